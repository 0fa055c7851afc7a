"""Every row is written once although in every batch something is killed: the job, a worker of Python, the gateway."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from spark_ingest import pipeline
from tests.spark import killing
from tests.spark.killing import Batches, Moment
from tests.spark.test_spark_source import Host, config, samples, started
from tests.tiers import full

if TYPE_CHECKING:
    from pyspark.sql.streaming.query import StreamingQuery

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(280),
    pytest.mark.skipif(sys.platform != "linux", reason="finds processes in /proc"),
]

BATCH = 10_000  # records: enough to be seen at each moment
PATIENT = "local[2,4]"  # a task is tried four times; with local[2], the first failure ends the query


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    made = Host(tmp_path / "data" / "history.db")
    yield made
    made.stop()


@contextlib.contextmanager
def querying(host: Host, directory: Path, master: str) -> Iterator[StreamingQuery]:
    """The query in this process, without a pause between batches."""
    session = pipeline.session(pipeline.Spark(master=master))
    try:
        settings = config(host, directory, max_records_per_batch=BATCH)
        query = pipeline.start(session, settings.model_copy(update={"trigger": pipeline.Trigger()}))
        yield query
        assert query.exception() is None
        query.stop()
    finally:
        session.stop()


def fill(host: Host, batches: int) -> int:
    """Append the records of that many batches; returns how many."""
    messages = samples(BATCH)
    for _ in range(batches):
        host.ask(messages)
    return batches * BATCH


@full
def test_the_job_is_killed_in_every_batch(host: Host, tmp_path: Path) -> None:
    """Python, JVM and workers at once, as by a power cut: while it reads, writes, or has all but committed."""
    kills = 6
    records = fill(host, kills + 2)
    file = tmp_path / "ingest.toml"
    file.write_text(
        '[source]\ntransport = "zenoh"\nauthority = "gateway"\nlocal_authority = "spark1"\n'
        f"max_records_per_batch = {BATCH}\n"
        f'[source.transport_config]\nmode = "client"\nconnect = ["tcp/127.0.0.1:{host.port}"]\n'
        f'[sink]\npath = "{tmp_path}/rows"\ncheckpoint = "{tmp_path}/checkpoint"\n'
        "[trigger]\navailable_now = true\n"
    )
    command, batches = [sys.executable, "-m", "spark_ingest", "--config", str(file)], Batches(tmp_path)
    for batch, moment in zip(range(kills), itertools.cycle(Moment), strict=False):
        with started(command) as job:
            readers = functools.partial(killing.reading, job.pid, host.port)
            with killing.caught(batches, batch, moment, readers):
                killing.kill(*killing.descendants(job.pid))
    with started(command) as job:
        _, err = job.communicate(timeout=killing.DEADLINE_S)
    assert job.returncode == 0, err
    killing.assert_each_once(tmp_path, records)


@pytest.mark.parametrize("kills", [2, pytest.param(12, marks=full)])
def test_a_python_worker_is_killed_in_every_batch(host: Host, tmp_path: Path, kills: int) -> None:
    records, batches = fill(host, kills + 1), Batches(tmp_path)
    readers = functools.partial(killing.reading, os.getpid(), host.port)
    with querying(host, tmp_path, PATIENT):
        for batch in range(kills):
            with killing.caught(batches, batch, Moment.READING, readers) as workers:
                killing.kill(*workers)
        killing.until(lambda: batches.is_committed(kills), "the last batch is committed")
    killing.assert_each_once(tmp_path, records)


@full
def test_the_gateway_is_killed_in_every_batch(host: Host, tmp_path: Path) -> None:
    """No task fails: each tries again until the gateway is back."""
    kills = 8
    records, batches = fill(host, kills + 1), Batches(tmp_path)
    readers = functools.partial(killing.reading, os.getpid(), host.port)
    with querying(host, tmp_path, "local[2]"):
        for batch in range(kills):
            with killing.caught(batches, batch, Moment.READING, readers):
                host.kill()
            host.start()
        killing.until(lambda: batches.is_committed(kills), "the last batch is committed")
    killing.assert_each_once(tmp_path, records)
