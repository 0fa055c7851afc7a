"""A query on a cluster of several processes loses nothing and writes nothing twice while executors and workers die."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from spark_ingest import pipeline
from tests.spark import killing
from tests.spark.cluster import Cluster
from tests.spark.killing import Batches, History, Moment
from tests.spark.test_spark_source import Host, config, samples
from tests.tiers import full

pytestmark = [
    full,
    pytest.mark.slow,
    pytest.mark.timeout(480),
    pytest.mark.skipif(sys.platform != "linux", reason="finds processes in /proc"),
]

BATCH = 20_000  # records
PARTITIONS = 4  # of a batch, for two executors
BATCHES = 8


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    made = Host(tmp_path / "data" / "history.db")
    yield made
    made.stop()


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with Cluster(tmp_path / "cluster") as started:
        yield started


def test_executors_workers_and_a_node_are_killed_in_different_batches(
    host: Host, cluster: Cluster, tmp_path: Path
) -> None:
    messages, batches = samples(BATCH), Batches(tmp_path)
    for _ in range(BATCHES):
        host.ask(messages)
    records = BATCH * BATCHES
    first, second = cluster.workers
    history = History(host.process.pid, host.port)
    session = pipeline.session(pipeline.Spark(master=cluster.url, conf=cluster.conf))
    try:
        settings = config(
            host,
            tmp_path,
            authority="",
            authorities=["gateway"],
            max_records_per_batch=BATCH,
            min_partitions=PARTITIONS,
        )
        query = pipeline.start(session, settings.model_copy(update={"trigger": pipeline.Trigger()}))

        def caught(batch: int, moment: Moment) -> contextlib.AbstractContextManager[list[int]]:
            return killing.caught(batches, batch, moment, history, first.pid, second.pid)

        with caught(0, Moment.READING) as workers:
            killing.kill(*workers)
        with caught(1, Moment.READING):
            killing.kill(*killing.executors(first.pid))
        with caught(2, Moment.WRITING):
            killing.kill(*killing.executors(second.pid))
        with caught(3, Moment.READING) as workers:
            killing.kill(*workers)
        with caught(4, Moment.WRITING):
            killing.kill(*cluster.executors())
        with caught(5, Moment.READING):
            first.end()
        with caught(6, Moment.READING):
            killing.kill(*cluster.executors())
        killing.until(lambda: batches.is_committed(BATCHES - 1), "the last batch is committed")
        assert query.exception() is None
        query.stop()
    finally:
        session.stop()
    killing.assert_each_once(tmp_path, records)
