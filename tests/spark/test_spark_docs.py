"""The programs of docs/spark.md run as they stand, one after the other, with their addresses and paths replaced."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from spark_ingest import parquet, pipeline
from tests.spark.test_spark_source import DEADLINE_S, Host, samples
from tests.tiers import ROOT, full

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

RECORDS = 1_500


def programs() -> list[str]:
    page = (ROOT / "docs" / "spark.md").read_text(encoding="utf-8")
    return re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    made = Host(tmp_path / "data" / "history.db")
    yield made
    made.stop()


@pytest.fixture
def spark() -> Iterator[SparkSession]:
    session = pipeline.session()
    yield session
    session.stop()


def test_the_programs_are_python() -> None:
    for program in programs():
        compile(program, "docs/spark.md", "exec")


@full
@pytest.mark.slow
@pytest.mark.timeout(240)
def test_the_programs_do_what_the_page_says(host: Host, spark: SparkSession, tmp_path: Path) -> None:
    host.ask(samples(RECORDS))
    replaced = {
        "tcp/127.0.0.1:7447": f"tcp/127.0.0.1:{host.port}",
        'saveAsTable("drives")': f'save("{tmp_path}/table")',
        'format("delta")': 'format("parquet")',  # without what Delta needs
        '"drives"': f'"{tmp_path}/drives"',
        '"drives.checkpoint"': f'"{tmp_path}/drives.checkpoint"',
        '"delta.checkpoint"': f'"{tmp_path}/delta.checkpoint"',
        '"before"': f'"{tmp_path}/before"',
    }
    names: dict[str, Any] = {"spark": spark}
    for program in programs():
        for old, new in replaced.items():
            program = program.replace(old, new)
        exec(compile(program, "docs/spark.md", "exec"), names)
        for query in spark.streams.active:
            query.processAllAvailable()
            query.stop()
    assert parquet.read(tmp_path / "drives").num_rows == RECORDS
    assert spark.read.parquet(f"{tmp_path}/table").count() == RECORDS
    assert spark.read.parquet(f"{tmp_path}/before").count() == 0, "the time of the page is before the test"
    for path, rows in names["signals"].items():
        assert written(rows, tmp_path / path) == RECORDS // 15, "the drive has 15 signals"
    for name in ("means", "parts"):  # no window is over
        assert written(names[name], tmp_path / name) == 0


def written(rows: DataFrame, place: Path) -> int:
    writer = rows.writeStream.format("parquet").option("path", str(place / "rows"))
    query = writer.option("checkpointLocation", str(place / "checkpoint")).trigger(availableNow=True).start()
    assert query.awaitTermination(DEADLINE_S)
    return int(parquet.read(place / "rows").num_rows)
