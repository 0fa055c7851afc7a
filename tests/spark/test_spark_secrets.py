"""What Spark shows and keeps of a query has no secret of the transport's settings in it."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final, NamedTuple

import pytest

from tests.spark.test_spark_source import Host, samples
from tests.tiers import ROOT, full

pytestmark = [full, pytest.mark.slow, pytest.mark.timeout(480)]

JOB: Final = Path(__file__).with_name("secret_job.py")
SECRETS: Final = ("password", "key", "broken")  # in the order of secret_job's arguments
PLACES: Final = ("events", "checkpoint", "rows", "shown", "stderr", "stdout")  # of its folder


class Ran(NamedTuple):
    folder: Path
    secrets: Mapping[str, str]

    def files(self) -> Iterator[Path]:
        for place in PLACES:
            found = self.folder / place
            yield from [found] if found.is_file() else (file for file in found.rglob("*") if file.is_file())


def run_job(folder: Path) -> Ran:
    secrets = {name: f"{name}{uuid.uuid4().hex}" for name in SECRETS}
    data = folder / "data"
    data.mkdir()
    (data / "credentials").write_text(f"spark:{secrets['password']}\n")
    host = Host(data / "history.db")
    try:
        host.ask(samples(3_000))
        with (folder / "stdout").open("wb") as out, (folder / "stderr").open("wb") as errors:
            environ = os.environ | {"PYTHONPATH": str(ROOT)}
            command = [sys.executable, str(JOB), str(host.port), str(folder), *secrets.values()]
            job = subprocess.run(command, stdout=out, stderr=errors, env=environ, check=False)
        assert job.returncode == 0, (folder / "stderr").read_text(errors="replace")[-2_000:]
    finally:
        host.stop()
    return Ran(folder, secrets)


def require_shown(ran: Ran) -> None:
    """Else the search would prove nothing: the queries have run and failed, and the pages and logs have content."""
    texts = {str(file.relative_to(ran.folder)): file.read_bytes() for file in ran.files()}

    def has(place: str, *words: bytes) -> bool:
        found = [text for name, text in texts.items() if name.startswith(place)]
        return all(any(word in text for text in found) for word in words)

    assert has("shown/plan", b"== Physical Plan ==", b"StreamingRelationV2", b"transportConfig")
    assert has("shown/progress", b"numInputRows")
    assert has("shown/errors", b"UNRESOLVED_COLUMN", b"unknown key", b"UNAVAILABLE", b"Logical Plan")
    assert has("shown/ui", b"Completed Streaming Queries", b"Environment", b"Details for Query")
    assert has("shown/api", b"planDescription", b"sparkProperties")
    assert has("shown/commands", b"pyspark.daemon", b"java")
    assert has("events", b"SparkListenerSQLExecutionStart", b"SparkListenerEnvironmentUpdate")
    assert has("checkpoint/offsets/0", b"batchWatermarkMs")
    assert has("stderr", b"INFO MicroBatchExecution")


def test_a_secret_is_nowhere_to_be_read(tmp_path: Path) -> None:
    """One test, since the job takes a minute."""
    ran = run_job(tmp_path)
    require_shown(ran)
    found = {
        name: str(file.relative_to(ran.folder))
        for file in ran.files()
        for name, secret in ran.secrets.items()
        if secret.encode() in file.read_bytes()
    }
    assert found == {}
