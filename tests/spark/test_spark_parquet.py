"""Reading the job's Parquet without Spark; its plot; the command line."""

from __future__ import annotations

import contextlib
import json
import shutil
from pathlib import Path
from urllib.parse import quote

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest

from spark_ingest import __main__ as command
from spark_ingest import parquet, pipeline, plot
from spark_ingest.decode import SCHEMA, Decoder, RecordColumns
from streamer.commands.demo import drive
from uprotocol.status import UStatusError


def commit(directory: Path, batch: str, files: list[Path]) -> None:
    log = directory / parquet.METADATA
    log.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps({"path": "file://" + quote(str(file)), "action": "add"}) for file in files]
    (log / batch).write_text("\n".join(["v1", *lines]))


def write(directory: Path, name: str, seqs: range, authority: str = "vehicle1") -> Path:
    """Write a part of a simulated drive as the job does."""
    samples = list(drive.simulate(1, 200).samples(1_700_000_000_000))
    messages = [drive.message(samples[seq]).SerializeToString() for seq in seqs]
    batch = Decoder().decode(RecordColumns(seqs, [1] * len(seqs), messages), "12ab").batch
    file = directory / f"authority={authority}" / "date=2023-11-14" / name
    file.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_batches([batch]).drop_columns(["authority"]), file)
    return file


def test_only_what_was_committed_is_read(tmp_path: Path) -> None:
    directory = tmp_path / "with a blank"
    files = [write(directory, f"part-{number}.parquet", range(number * 100, number * 100 + 100)) for number in range(4)]
    commit(directory, "0", files[:1])
    commit(directory, "1.compact", files[:2])
    commit(directory, "2", files[2:3])  # the fourth is of a batch that was cut off
    (directory / parquet.METADATA / ".2.crc").touch()
    assert sorted(parquet.read(str(directory))["seq"].to_pylist()) == list(range(300))
    moved = tmp_path / "moved"
    shutil.move(directory, moved)
    table = parquet.read(moved, ["seq", "authority", "date"])
    assert table.num_rows == 300
    assert set(table["authority"].to_pylist()) == {"vehicle1"}
    assert str(table["date"][0]) == "2023-11-14"


def test_nothing_was_committed(tmp_path: Path) -> None:
    with pytest.raises(UStatusError, match="no batch was committed"):
        parquet.read(tmp_path)
    commit(tmp_path, "0", [])
    assert parquet.read(tmp_path, ["seq"]).num_rows == 0


def test_files_with_fewer_columns_have_nulls(tmp_path: Path) -> None:
    old, new = write(tmp_path, "old.parquet", range(3)), write(tmp_path, "new.parquet", range(3, 6))
    names = SCHEMA.names[: SCHEMA.names.index("incarnation")]
    pq.write_table(pq.ParquetFile(old).read().select([name for name in names if name != "authority"]), old)
    commit(tmp_path, "0", [old, new])
    table = parquet.read(tmp_path).sort_by("seq")
    assert table.schema.names == [*SCHEMA.names, "date"]
    assert table["authority"].to_pylist() == ["vehicle1"] * 6
    assert table["incarnation"].to_pylist() == [None] * 3 + ["12ab"] * 3
    assert table["ts_source"].to_pylist() == [None] * 3 + ["sample"] * 3
    assert table["origin"].null_count == 6
    assert parquet.read(tmp_path, ["origin"], ds.field("append_time").is_null()).num_rows == 3


def test_the_picture(tmp_path: Path) -> None:
    commit(tmp_path, "0", [write(tmp_path, "part.parquet", range(3_000))])
    png = tmp_path / "drive.png"
    plot.plot(tmp_path, png)
    assert png.read_bytes().startswith(b"\x89PNG")
    commit(tmp_path, "0", [])
    with pytest.raises(UStatusError, match="nothing to draw"):
        plot.plot(str(tmp_path), str(png))


def test_the_command_reports_a_wrong_configuration(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "ingest.toml"
    file.write_text('[source]\ntransport = "zenoh"\nautority = "gateway"\n[sink]\npath = "a"\ncheckpoint = "b"\n')
    assert command.main(["--config", str(file)]) == command.EXIT_CONFIG
    errors = capsys.readouterr().err
    assert "source.autority: unknown key" in errors
    assert "source.localAuthority: Field required" in errors


@pytest.mark.parametrize(
    ("written", "planned", "commits", "error"),
    [
        (None, None, (), ""),
        (4, 4, (3, 4), ""),
        (4, 5, (4,), ""),
        (None, 0, (), ""),
        (4, None, (), "has no batch of it. Spark would skip"),
        (4, 2, (1, 2), "up to 2 only"),
        (None, 4, (3, 4), "has none of their rows"),
    ],
)
def test_a_sink_and_a_checkpoint_belong_together(
    tmp_path: Path, written: int | None, planned: int | None, commits: tuple[int, ...], error: str
) -> None:
    sink, checkpoint = tmp_path / "rows", tmp_path / "checkpoint"

    def batches(folder: Path, *numbers: int) -> None:
        folder.mkdir(parents=True)
        for number in numbers:
            (folder / str(number)).write_text("v1")
            (folder / f".{number}.crc").touch()

    if written is not None:
        batches(sink / parquet.METADATA, *range(written))
        (sink / parquet.METADATA / f"{written}.compact").write_text("v1")
    if planned is not None:
        batches(checkpoint / "offsets", *range(planned + 1))
    batches(checkpoint / "commits", *commits)
    with pytest.raises(UStatusError, match=error) if error else contextlib.nullcontext():
        pipeline.check_sink(sink, checkpoint)
