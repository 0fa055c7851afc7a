"""Every row is written once although in every batch something is killed: the job, a worker of Python, the gateway."""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from spark_ingest import pipeline
from tests.spark import killing
from tests.spark.killing import Batches, History, Moment
from tests.spark.test_spark_source import Host, config, samples, started
from tests.tiers import full

if TYPE_CHECKING:
    from pyspark.sql.streaming.query import StreamingQuery

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(480),
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


def history_of(host: Host) -> History:
    return History(host.process.pid, host.port)


def ingest(host: Host, directory: Path) -> list[str]:
    """The command of a job that reads all there is and ends."""
    file = directory / "ingest.toml"
    file.write_text(
        '[source]\ntransport = "zenoh"\nauthority = "gateway"\nlocal_authority = "spark1"\n'
        f"max_records_per_batch = {BATCH}\n"
        f'[source.transport_config]\nmode = "client"\nconnect = ["tcp/127.0.0.1:{host.port}"]\n'
        f'[sink]\npath = "{directory}/rows"\ncheckpoint = "{directory}/checkpoint"\n'
        "[trigger]\navailable_now = true\n"
    )
    return [sys.executable, "-m", "spark_ingest", "--config", str(file)]


def finish(command: list[str]) -> None:
    with started(command) as job:
        _, err = job.communicate(timeout=killing.DEADLINE_S)
    assert job.returncode == 0, err


def fill(host: Host, batches: int) -> int:
    """Append the records of that many batches; returns how many."""
    messages = samples(BATCH)
    for _ in range(batches):
        host.ask(messages)
    return batches * BATCH


@full
def test_the_job_is_killed_in_every_batch(host: Host, tmp_path: Path) -> None:
    """Python, JVM and workers at once, as by a power cut: while it reads, writes, or has all but committed."""
    kills, too_late_max = len(Moment), 4
    records = fill(host, kills + too_late_max + 2)
    command, batches, batch, too_late = ingest(host, tmp_path), Batches(tmp_path), itertools.count(), 0
    moments = [*Moment]
    while moments:
        try:
            with started(command) as job, killing.caught(batches, next(batch), moments[0], history_of(host), job.pid):
                killing.kill(*killing.descendants(job.pid))
            del moments[0]
        except killing.TooLateError:
            too_late += 1
            assert too_late <= too_late_max
    finish(command)
    killing.assert_each_once(tmp_path, records)


@full
def test_the_worker_that_plans_is_killed(host: Host, tmp_path: Path) -> None:
    """Spark does not replace it: the job ends with an error, and the next run continues."""
    records = fill(host, 4)
    command, batches = ingest(host, tmp_path), Batches(tmp_path)
    with started(command) as job:
        killing.until(lambda: batches.is_planned(1), "batch 1 is planned")
        killing.kill(*killing.planners(job.pid))
        _, err = job.communicate(timeout=killing.DEADLINE_S)
    assert job.returncode == 1, err
    assert not batches.is_committed(3)
    finish(command)
    killing.assert_each_once(tmp_path, records)


@full
def test_a_python_worker_is_killed_in_every_batch(host: Host, tmp_path: Path) -> None:
    kills = 3
    records, batches = fill(host, kills + 1), Batches(tmp_path)
    with querying(host, tmp_path, PATIENT):
        for batch in range(kills):
            with killing.caught(batches, batch, Moment.READING, history_of(host), os.getpid()) as workers:
                killing.kill(*workers)
        killing.until(lambda: batches.is_committed(kills), "the last batch is committed")
    killing.assert_each_once(tmp_path, records)


@full
def test_the_gateway_is_killed_in_every_batch(host: Host, tmp_path: Path) -> None:
    """No task fails: each tries again until the gateway is back."""
    kills = 4
    records, batches = fill(host, kills + 1), Batches(tmp_path)
    with querying(host, tmp_path, "local[2]"):
        for batch in range(kills):
            with killing.caught(batches, batch, Moment.READING, history_of(host), os.getpid()):
                host.kill()
            host.start()
        killing.until(lambda: batches.is_committed(kills), "the last batch is committed")
    killing.assert_each_once(tmp_path, records)
