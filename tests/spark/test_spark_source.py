"""The source against a real history on Zenoh in a process of its own; with Spark where Spark matters."""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from history.file.copying import copy_log, make_another
from spark_ingest import parquet, pipeline
from spark_ingest.client import HistorySession
from spark_ingest.client import read as read_ranges
from spark_ingest.decode import Decoder, RecordColumns
from spark_ingest.offsets import HistoryOffset, Offset, Range
from spark_ingest.options import Options
from spark_ingest.source import StreamReader
from storage.copies import CopyPace
from streamer.commands.demo import drive
from tests.tiers import full
from transports.ports import free_port
from uprotocol import uri as uris
from uprotocol import uuid as uuids
from uprotocol.message import UMessageBuilder, UPayload
from uprotocol.status import UStatusError
from uprotocol.v1.uattributes_pb2 import UPayloadFormat
from uprotocol.v1.umessage_pb2 import UMessage

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

HOST = Path(__file__).with_name("history_host.py")
DEADLINE_S = 110  # of a wait for an event; only a broken test gets there


class Host:
    """The process, and its commands."""

    def __init__(self, path: Path, retention_ms: int = 86_400_000) -> None:
        self.port, self.path, self.retention_ms = free_port(), path, retention_ms
        self.start()

    def start(self) -> None:
        command = [sys.executable, str(HOST), str(self.port), str(self.path), str(self.retention_ms)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        started = self._line()
        self.incarnation: str = started["incarnation"]
        self.ring: str = started["ring"]

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.communicate(timeout=DEADLINE_S)

    def restart(self, instead: Path | None = None) -> None:
        """Restart the host, with the files of the folder `instead` if given."""
        self.stop()
        if instead is not None:
            shutil.rmtree(self.path.parent)
            shutil.copytree(instead, self.path.parent)
        self.start()

    def ask(self, messages: list[UMessage] | None = None, volatile: list[UMessage] | None = None) -> dict[str, Any]:
        """Append `messages` to the durable log and `volatile` to the one in memory; returns the state of the log."""
        assert self.process.stdin is not None
        asked = {
            name: [base64.b64encode(message.SerializeToString()).decode() for message in given or []]
            for name, given in (("append", messages), ("volatile", volatile))
        }
        self.process.stdin.write(json.dumps(asked) + "\n")
        self.process.stdin.flush()
        return self._line()

    def _line(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "the host ended"
        answer: dict[str, Any] = json.loads(line)
        return answer

    @property
    def settings(self) -> dict[str, Any]:
        return {
            "transport": "zenoh",
            "transport_config": {
                "mode": "client",
                "connect": [f"tcp/127.0.0.1:{self.port}"],
                "connect_timeout_ms": 2_000,
            },
            "authority": "gateway",
            "local_authority": "spark1",
            "poll_timeout_ms": 5_000,
        }

    def options(self, **more: Any) -> Options:
        return Options.model_validate(self.settings | more)


@pytest.fixture
def hosting(tmp_path: Path) -> Iterator[Callable[..., Host]]:
    hosts: list[Host] = []

    def make(**settings: Any) -> Host:
        hosts.append(Host(tmp_path / f"data{len(hosts)}" / "history.db", **settings))
        return hosts[-1]

    yield make
    for host in hosts:
        host.stop()


@pytest.fixture
def host(hosting: Callable[..., Host]) -> Host:
    return hosting()


@pytest.fixture(scope="module")
def spark() -> Iterator[SparkSession]:
    session = pipeline.session()
    yield session
    session.stop()


def samples(count: int, seed: int = 1) -> list[UMessage]:
    made = drive.simulate(seed, count // 15 + 1).samples(1_700_000_000_000)
    return [drive.message(sample) for sample in itertools.islice(made, count)]


def ids(messages: list[UMessage]) -> list[str]:
    return [uuids.format(message.attributes.id) for message in messages]


def eventually(holds: Callable[[], bool]) -> None:
    """Wait for a state of another process that sends no event for it."""
    end = time.monotonic() + DEADLINE_S
    while not holds():
        assert time.monotonic() < end, f"not reached within {DEADLINE_S} s"
        time.sleep(0.05)


def history_of(offset: dict[str, Any]) -> HistoryOffset:
    return Offset.of(offset, "gateway").histories.get("gateway", HistoryOffset())


def seqs_of(offset: dict[str, Any]) -> dict[str, int]:
    return history_of(offset).seqs


def latest(reader: StreamReader, start: dict[str, Any], seq: int, log: str = "") -> dict[str, Any]:
    """The end of the batches after `start` that reach `seq` in the log, the durable one by default."""
    deadline = time.monotonic() + DEADLINE_S
    while (max(seqs_of(start).values(), default=0) if not log else seqs_of(start).get(log, 0)) < seq:
        start = reader.latestOffset(start, reader.getDefaultReadLimit())
        assert time.monotonic() < deadline, f"expected to reach seq {seq}, got {start}"
    return start


def v2(seqs: dict[str, int], query: str = "q") -> dict[str, Any]:
    """An offset of the history of the host."""
    return Offset(query, 1, {"gateway": HistoryOffset(dict(seqs))}).json()


def reach(*readers: StreamReader) -> None:
    """Wait until the readers reach a host after its restart."""
    for reader in readers:
        for member in reader._planner.fleet.members.values():
            member.wake.set()  # instead of the pause between two calls
        eventually(lambda reader=reader: not any("away" in lag for lag in reader.reportLatestOffset().values()))  # type: ignore[misc]


def rows_of(reader: StreamReader, start: dict[str, Any], end: dict[str, Any]) -> list[int]:
    return [
        seq for part in reader.partitions(start, end) for batch in reader.read(part) for seq in batch["seq"].to_pylist()
    ]


def _no_loss(loss: object, _: object) -> None:
    raise AssertionError(f"expected no loss, got {loss}")


# --- without Spark


def test_wrong_options_are_named() -> None:
    right = {
        "transport": "zenoh",
        "AUTHORITY": "gateway",
        "localauthority": "spark1",
        "topics": "up://*/8001/1/FFFF, up:/1/1/8000",
        "maxrecordsperbatch": "5",
    }
    options = Options.of(right)
    assert options.topics == ("up://*/8001/1/FFFF", "up:/1/1/8000")
    assert (options.max_records_per_batch, options.fail_on_data_loss, options.starting_offsets) == (5, True, "earliest")
    for wrong, error in (
        ({"topic": "x"}, "unknown option 'topic'; known: transport, transportConfig"),
        ({"topics": "up://x/1"}, "three path segments"),
        ({"startingOffsets": "now"}, "earliest, latest or a JSON"),
        ({"transportConfig": "{"}, "transportConfig: .*JSON"),
        ({"maxRecordsPerBatch": "0"}, "maxRecordsPerBatch"),
        ({"authority": "*"}, "concrete authority"),
        ({"epochs": "some"}, "epochs: .*'complete'"),
        ({"epochTimeout": "0"}, "epochTimeout: .*greater than 0"),
        ({"failOnDataLoss": "perhaps"}, "failOnDataLoss"),
    ):
        with pytest.raises(UStatusError, match=error):
            Options.of({key: value for key, value in right.items() if key.lower() != next(iter(wrong)).lower()} | wrong)
    with pytest.raises(UStatusError, match="localAuthority: Field required"):
        Options.of({"transport": "zenoh", "authority": "gateway"})


def test_a_batch_is_planned_read_twice_the_same_and_acknowledged(host: Host) -> None:
    host.ask(samples(25_000))
    reader = StreamReader(host.options(max_records_per_batch=21_000))
    try:
        start = reader.initialOffset()
        assert seqs_of(start) == {}
        consumer = f"consumer:spark-{start['query']}"
        assert host.ask()["cursors"] == {consumer: 0}, "nothing may be forgotten from now on"
        end = reader.latestOffset(start, reader.getDefaultReadLimit())
        assert seqs_of(end) == {host.incarnation: 21_000}
        partitions = reader.partitions(start, end)
        assert len(partitions) == 2
        twice = [
            [seq for part in partitions for batch in reader.read(part) for seq in batch["seq"].to_pylist()]
            for _ in range(2)
        ]
        assert twice == [list(range(1, 21_001))] * 2
        assert StreamReader(host.options()).partitions(start, end) == [
            *StreamReader(host.options(max_records_per_batch=21_000)).partitions(start, end)
        ], "after a restart the plan is not known"
        reader.commit(end)
        assert host.ask()["cursors"] == {consumer: 21_000}
        last = latest(reader, end, 25_000)
        host.ask(samples(10))
        reader.prepareForTriggerAvailableNow()
        host.ask(samples(10))
        over = reader.latestOffset(last, reader.getDefaultReadLimit())
        assert seqs_of(over) == {host.incarnation: 25_010}
        assert reader.latestOffset(over, reader.getDefaultReadLimit()) == over
        assert host.ask()["cursors"] == {consumer: 25_010}
    finally:
        reader.stop()


def test_topics_select_records_and_others_make_no_batch(host: Host) -> None:
    messages = samples(150)
    host.ask(messages)
    options = host.options(topics="up://mcu1/8001/1/8001")
    reader = StreamReader(options)
    try:
        end = reader.latestOffset({}, reader.getDefaultReadLimit())
        rows = [row for part in reader.partitions({}, end) for batch in reader.read(part) for row in batch.to_pylist()]
        assert [row["message_id"] for row in rows] == ids(
            [m for m in messages if uris.format(m.attributes.source) == options.topics[0]]
        )
        assert {row["path"] for row in rows} == {"Vehicle.OBD.EngineSpeed"}
        host.ask([UMessageBuilder.publish(uris.uri("vehicle1", 1, 1, 0x8000)).build()])
        assert reader.latestOffset(end, reader.getDefaultReadLimit()) == end
    finally:
        reader.stop()


def test_thirty_rows_of_a_rare_topic_are_one_batch_and_one_partition(host: Host) -> None:
    rare = uris.uri("mcu1", 0x99, 1, 0x8000)
    for _ in range(30):
        host.ask([UMessageBuilder.publish(rare).build(), *samples(300)])
    reader = StreamReader(host.options(topics=uris.format(rare), max_records_per_batch=100))
    try:
        start = reader.initialOffset()
        end = reader.latestOffset(start, reader.getDefaultReadLimit())
        (part,) = reader.partitions(start, end)
        assert sum(batch.num_rows for batch in reader.read(part)) == 30
        reader.commit(end)
        assert reader.latestOffset(end, reader.getDefaultReadLimit()) == end
        eventually(lambda: [*host.ask()["cursors"].values()] == [host.ask()["newest"]])
    finally:
        reader.stop()


def test_an_error_names_the_streamer_also_where_no_connection_can_be_opened() -> None:
    where = {"mode": "client", "connect": [f"tcp/127.0.0.1:{free_port()}"], "connect_timeout_ms": 100}
    options = Options.model_validate(
        {"transport": "zenoh", "transport_config": json.dumps(where), "authority": "gateway", "local_authority": "s"}
    )
    with contextlib.closing(HistorySession(options)) as session:
        for _ in range(2):  # the second call fails by the first attempt
            with pytest.raises(UStatusError, match=r"^UNAVAILABLE: gateway: opening the Zenoh session: "):
                session.run(session.call("gateway", lambda client: client.logs([])))


@full
def test_reading_waits_for_a_streamer_that_restarts(host: Host) -> None:
    host.ask(samples(30_000))
    with contextlib.closing(HistorySession(host.options(poll_timeout_ms=1_000))) as session:
        found = read_ranges(session, [Range("gateway", host.incarnation, 0, 30_000)], _no_loss)
        seqs = list(next(found)[1].seq)
        host.kill()
        host.start()
        seqs += [seq for _, batch in found for seq in batch.seq]
    assert seqs == list(range(1, 30_001))
    reader, at = StreamReader(host.options(poll_timeout_ms=300)), v2({host.incarnation: 7})
    try:
        end = latest(reader, reader.initialOffset(), 30_000)
        host.kill()
        eventually(lambda: "away" in reader.reportLatestOffset()["gateway"])
        # no news, no failure
        assert reader.latestOffset(end, reader.getDefaultReadLimit()) == end
        reader.commit(end)
        with contextlib.suppress(UStatusError):
            reader.prepareForTriggerAvailableNow()
        with pytest.raises(UStatusError, match="gateway: "):  # but a run that is to end can't end like that
            reader.latestOffset(at, reader.getDefaultReadLimit())
        host.start()
    finally:
        reader.stop()


def test_a_loss_by_retention_is_reported_with_its_bounds(hosting: Callable[..., Host]) -> None:
    host = hosting(retention_ms=1)
    newest = host.ask(samples(3_000))["newest"]
    eventually(lambda: host.ask(samples(10))["oldest"] > newest)
    state = host.ask()
    strict, loose = StreamReader(host.options()), StreamReader(host.options(fail_on_data_loss=False))
    try:
        (part,) = strict.partitions({host.incarnation: 5}, {host.incarnation: state["newest"]})
        lost = rf"gateway: records 6 to \d+ of log {host.incarnation} are lost: retention deleted them.*failOnDataLoss"
        with pytest.raises(UStatusError, match=lost):
            list(strict.read(part))
        rows = [seq for batch in loose.read(part) for seq in batch["seq"].to_pylist()]
        assert rows == list(range(rows[0], state["newest"] + 1))
        missing = "ab" * 16
        with pytest.raises(UStatusError, match=f"gateway: the log {missing} and"):
            strict.latestOffset({missing: 3}, strict.getDefaultReadLimit())
        assert set(seqs_of(loose.latestOffset({missing: 3}, loose.getDefaultReadLimit()))) == {host.incarnation}
        assert [batch for part in loose.partitions({}, {missing: 3}) for batch in loose.read(part)] == []
    finally:
        strict.stop()
        loose.stop()


def test_retention_deletes_after_commit(hosting: Callable[..., Host]) -> None:
    host = hosting(retention_ms=1)
    reader = StreamReader(host.options())
    try:
        host.ask(samples(1))  # a cursor holds what comes after it
        start = reader.initialOffset()
        newest = host.ask(samples(2_000))["newest"]
        end = latest(reader, start, newest)
        assert len(rows_of(reader, start, end)) >= 2_000
        assert host.ask(samples(1))["oldest"] <= max(1, min(seqs_of(start).values(), default=0) + 1)
        reader.commit(end)
        eventually(lambda: host.ask(samples(1))["oldest"] > newest)
    finally:
        reader.stop()


@pytest.fixture
def copied(host: Host, tmp_path: Path) -> Path:
    """A copy of the host's files, from when there were 100 records."""
    host.ask(samples(100))
    host.stop()
    copy = tmp_path / "copy"
    shutil.copytree(host.path.parent, copy)
    host.start()
    return copy


@pytest.mark.parametrize("grown", [0, pytest.param(50, marks=full), 150])
def test_a_log_that_went_back_is_a_loss_whether_or_not_it_has_grown(host: Host, copied: Path, grown: int) -> None:
    strict, loose = StreamReader(host.options()), StreamReader(host.options(fail_on_data_loss=False))
    try:
        limit = strict.getDefaultReadLimit()
        begin = strict.initialOffset()
        middle = latest(strict, begin, 100)
        host.ask(samples(100, seed=2))
        end = latest(strict, middle, 200)
        assert rows_of(strict, begin, middle) + rows_of(strict, middle, end) == list(range(1, 201))
        host.restart(copied)
        reach(strict)
        if grown:
            host.ask(samples(grown, seed=3))
        newest = 100 + grown
        went_back = rf"gateway: the log {host.incarnation} went back.* up to seq 100; .*101 to 200 .*failOnDataLoss"
        with pytest.raises(UStatusError, match=went_back):
            latest(strict, end, 1_000)
        # a batch that was planned before is read again
        with pytest.raises(UStatusError, match="went back"):
            rows_of(strict, middle, end)
        assert rows_of(loose, middle, end) == list(range(101, min(200, newest) + 1))
        after = loose.latestOffset(end, limit)
        assert seqs_of(after) == {host.incarnation: newest}
        assert rows_of(loose, end, after) == rows_of(loose, end, after) == list(range(101, newest + 1)), (
            "after the last record that agrees"
        )
        assert loose.latestOffset(after, limit) == after
        host.ask(samples(5, seed=4))
        for reader in (strict, loose):
            further = latest(reader, after, newest + 5)
            assert rows_of(reader, after, further) == list(range(newest + 1, newest + 6))
        loose.commit(further)
    finally:
        strict.stop()
        loose.stop()


def test_a_log_that_was_restored_is_a_loss_and_is_read_on_where_it_parts(host: Host, tmp_path: Path) -> None:
    strict, loose = StreamReader(host.options()), StreamReader(host.options(fail_on_data_loss=False))
    restored = tmp_path / "restored"
    restored.mkdir()
    try:
        host.ask(samples(100))
        begin = strict.initialOffset()
        copy_log(host.path, restored / "history.db", CopyPace(restored / "history.db"))
        host.ask(samples(100, seed=2))
        end = latest(strict, begin, 200)
        assert rows_of(strict, begin, end) == list(range(1, 201))
        before = host.incarnation
        make_another(restored / "history.db", b"r" * 16, 1_790_000_000_000, "restored")
        host.restart(restored)
        host.ask(samples(50, seed=3))
        assert host.incarnation == (b"r" * 16).hex()
        reach(strict)
        with pytest.raises(UStatusError, match=f"log {before} and its records after seq 200 are lost.*failOnDataLoss"):
            latest(strict, end, 1_000)
        reach(loose)
        after = latest(loose, end, 150, host.incarnation)
        assert rows_of(loose, end, after) == list(range(101, 151))
        host.ask(samples(5, seed=4))
        for reader in (strict, loose):
            assert rows_of(reader, after, latest(reader, after, 155, host.incarnation)) == list(range(151, 156))
    finally:
        strict.stop()
        loose.stop()


def test_a_checkpoint_with_seqs_alone_is_continued(host: Host) -> None:
    host.ask(samples(100))
    reader = StreamReader(host.options())
    try:
        limit, at = reader.getDefaultReadLimit(), {host.incarnation: 100}
        assert reader.latestOffset(at, limit) == at
        end = reader.latestOffset({host.incarnation: 60}, limit)
        assert rows_of(reader, {host.incarnation: 60}, end) == list(range(61, 101))
        assert json.loads(json.dumps(end)) == end
        assert list(history_of(end).known[host.incarnation]) == [100]
    finally:
        reader.stop()


def fleet(begin: int, end: int) -> list[UMessage]:
    """A record of each of `count` topics, 30 of each vehicle."""
    topics = (uris.uri(f"vehicle{place // 30}", 0x10, 1, 0x8000 + place % 30) for place in range(begin, end))
    return [UMessageBuilder.publish(topic).build_from_upayload(UPayload(b"1", 5)) for topic in topics]


@full
def test_a_query_over_a_fleet_continues_with_any_number_of_topics(host: Host) -> None:
    """More topics than one answer could name: 8,000."""
    wide = StreamReader(host.options(starting_offsets="latest"))
    some = StreamReader(host.options(topics="up://*/10/1/8007"))
    try:
        limit = wide.getDefaultReadLimit()
        host.ask(fleet(0, 90))
        begin = wide.initialOffset()
        assert seqs_of(begin) == {host.incarnation: 90}
        first = some.initialOffset()
        place = some.latestOffset(first, limit)
        assert rows_of(some, first, place) == [8, 38, 68]
        size = len(json.dumps(begin))
        for topics in (9_000, 31_000):
            before = seqs_of(begin)[host.incarnation]
            host.ask(fleet(before, topics))
            end = latest(wide, begin, topics)
            assert rows_of(wide, begin, end) == list(range(before + 1, topics + 1))
            wide.commit(end)
            begin, after = end, latest(some, place, max(seq for seq in range(topics + 1) if seq % 30 == 8))
            assert rows_of(some, place, after) == [seq for seq in range(before + 1, topics + 1) if seq % 30 == 8]
            place = after
        assert len(json.dumps(begin)) < 4 * size, "the size of a checkpoint does not depend on topics"
        host.restart()
        reach(wide, some)
        assert wide.latestOffset(begin, limit) == begin
        assert seqs_of(latest(wide, v2({}), 31_000)) == {host.incarnation: 31_000}, "like a new query"
    finally:
        wide.stop()
        some.stop()


@pytest.mark.parametrize("where", ["earliest", "latest"])
def test_a_restart_loses_no_volatile_topics_that_are_not_read(host: Host, where: str) -> None:
    quiet = UMessageBuilder.publish(uris.uri("vehicle1", 1, 1, 0x8000)).build()
    host.ask(samples(100), volatile=[quiet])
    reader = StreamReader(host.options(topics="up://mcu1/8001/1/FFFF", starting_offsets=where))
    try:
        limit = reader.getDefaultReadLimit()
        start = reader.initialOffset()
        end = reader.latestOffset(start, limit)
        host.restart()
        reach(reader)
        newest = host.ask(samples(10), volatile=[quiet])["newest"]
        assert len(rows_of(reader, end, latest(reader, end, newest - 1))) > 0
    finally:
        reader.stop()


def test_a_restart_loses_volatile_topics_that_were_read(host: Host) -> None:
    host.ask(samples(10), volatile=samples(10))
    reader = StreamReader(host.options(starting_offsets="latest"))
    try:
        limit = reader.getDefaultReadLimit()
        start = reader.initialOffset()
        assert set(seqs_of(start)) == {host.incarnation, host.ring}
        host.restart()  # nothing came since the query began: nothing is lost
        reach(reader)
        assert reader.latestOffset(start, limit) == start
        host.ask(volatile=samples(10))
        end = latest(reader, start, 10, host.ring)
        assert rows_of(reader, start, end) == list(range(1, 11)), "all records of the new log are new"
        missing = host.ring
        host.restart()
        reach(reader)
        with pytest.raises(UStatusError, match=f"the log {missing} and its records after seq 10 are lost"):
            latest(reader, end, 1_000)
    finally:
        reader.stop()


# --- the job's configuration


def test_a_configuration_names_unknown_keys(tmp_path: Path) -> None:
    file = tmp_path / "ingest.toml"
    text = '[source]\ntransport = "zenoh"\nauthority = "gateway"\nlocal_authority = "spark1"\n'
    text += '[source.transport_config]\nconnect = ["tcp/127.0.0.1:1"]\n'
    text += '[sink]\npath = "out"\ncheckpoint = "state"\n'
    file.write_text(text)
    config = pipeline.load(file)
    assert pipeline.options(config.source)["transportConfig"] == '{"connect": ["tcp/127.0.0.1:1"]}'
    assert Options.of(pipeline.options(config.source)) == Options.model_validate(config.source.model_dump())
    for more, error in (
        ("[spork]\n", "spork"),
        ("[spark]\nmemory = 3\n", "spark.memory"),
        ("[trigger]\navailable_now = true\nprocessing_time_ms = 5\n", "exclude each other"),
        ("[sink]\n", "not TOML"),
    ):
        file.write_text(text + more)
        with pytest.raises(UStatusError, match=error):
            pipeline.load(file)
    with pytest.raises(UStatusError, match="cannot read"):
        pipeline.load(tmp_path / "none.toml")


def test_a_failure_of_the_query_is_that_of_its_task() -> None:
    text = "[STREAM_FAILED] Query terminated:\nTraceback\n  uprotocol.status.UStatusError: DATA_LOSS: gateway: x\n"
    assert str(pipeline.failure(text)) == "DATA_LOSS: gateway: x"
    assert str(pipeline.failure("Out of memory\n at x")) == "ABORTED: Out of memory"
    assert str(pipeline.failure("")) == "ABORTED: the query failed without a reason"


# --- with Spark


def config(host: Host, directory: Path, **source: Any) -> pipeline.IngestConfig:
    return pipeline.IngestConfig.model_validate(
        {
            "source": host.settings | source,
            "sink": {"path": directory / "rows", "checkpoint": directory / "checkpoint"},
            "trigger": {"available_now": True},
        }
    )


@contextlib.contextmanager
def started(command: list[str]) -> Iterator[subprocess.Popen[str]]:
    """Spark in a process group of its own, which is killed at the end."""
    with subprocess.Popen(
        command, start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def written(directory: Path) -> list[dict[str, Any]]:
    return sorted(parquet.read(directory / "rows").to_pylist(), key=lambda row: row["seq"])


def run(spark: SparkSession, settings: pipeline.IngestConfig) -> int:
    query = pipeline.start(spark, settings)
    assert query.awaitTermination(DEADLINE_S)
    return sum(progress.numInputRows for progress in query.recentProgress)


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_rows_equal_the_published_messages_also_after_a_restart(
    host: Host, spark: SparkSession, tmp_path: Path
) -> None:
    topic = uris.uri("vehicle1", 7, 1, 0x8001)
    others = [
        UPayload(b'"on"', UPayloadFormat.UPAYLOAD_FORMAT_JSON),
        UPayload(b"\xff", UPayloadFormat.UPAYLOAD_FORMAT_PROTOBUF),
        None,
    ]
    messages = samples(3_000) + [UMessageBuilder.publish(topic).build_from_upayload(payload) for payload in others]
    begun_ms = uuids.now_ms()
    host.ask(messages)
    settings = config(host, tmp_path, max_records_per_batch=1_100)
    assert run(spark, settings) == 3_003  # found by its name, nothing was registered
    more = samples(500, seed=2)
    assert run(spark, settings) == 0
    host.ask(more)
    assert run(spark, settings) == 500
    rows = written(tmp_path)
    assert [row["seq"] for row in rows] == list(range(1, 3_504))
    prev_seqs, newest = [], Counter[str]()
    for row in rows:
        prev_seqs.append(newest[row["topic"]])
        newest[row["topic"]] = row["seq"]
    times_ms = [round(row["append_time"].timestamp() * 1_000) for row in rows]
    encoded = [message.SerializeToString() for message in messages + more]
    records = RecordColumns(range(1, 3_504), times_ms, encoded, prev_seqs)
    for row in rows:
        assert row.pop("date") == row["ts"].date()
    assert rows == Decoder().decode(records, host.incarnation).batch.to_pylist()
    assert begun_ms <= times_ms[0] <= times_ms[-1] <= uuids.now_ms()
    (cursor,) = host.ask()["cursors"].values()
    assert cursor == 3_503
    reader = spark.read.format("uprotocol")
    for name, value in pipeline.options(settings.source).items():
        reader = reader.option(name, value)
    assert reader.load().where("value_bool").count() == sum(row["value_bool"] is True for row in rows)
    assert reader.option("startingOffsets", "latest").load().count() == 0
    with pytest.raises(Exception, match="unknown option 'offset'"):
        reader.option("offset", "1").load().count()


def seconds(*tenths: int) -> list[UMessage]:
    """Messages of topics with epochs, one at each of the given tenths of a second."""
    made = []
    for tenth in tenths:
        time_ms, rest = 1_700_000_000_000 + tenth * 100, b"\x80" + os.urandom(7)
        id = uuids.from_bytes((time_ms << 16 | 0x7000).to_bytes(8, "big") + rest)
        topic = uris.uri("epochs", 1, 1, 0x8000 + tenth % 3)
        made.append(UMessageBuilder.publish(topic).with_id(id).build_from_upayload(UPayload(b"1", 5)))
    return made


@full
@pytest.mark.slow
@pytest.mark.timeout(240)
def test_each_batch_has_whole_epochs(host: Host, spark: SparkSession, tmp_path: Path) -> None:
    host.path.with_name("epochs").touch()
    host.restart()
    settings = config(host, tmp_path, epochs="complete", topics=["//epochs/1/1/FFFF"], max_records_per_batch=5)

    def more(*tenths: int) -> list[int]:
        """Publish at these tenths of a second, run the job, and return the seconds of the new rows."""
        host.ask(seconds(*tenths))
        run(spark, settings)
        rows = sorted(written(tmp_path), key=lambda row: (row["epoch"]["time"], row["seq"]))[len(whys) :]
        assert all(row["epoch"]["group"] == "second" for row in rows)
        whys.extend(row["epoch_incomplete"] for row in rows)
        return [row["epoch"]["time"][0] // 1_000 - 1_700_000_000 for row in rows]

    whys: list[str | None] = []
    assert more(0, 1, 3, 9, 10, 12, 13, 20, 21) == [0] * 4 + [1] * 3
    (held,) = host.ask()["cursors"].values()
    assert more(22, 25, 30) == [2] * 4
    waited = [row["seq"] for row in written(tmp_path) if row["epoch"]["time"] == [1_700_000_002_000]]
    assert held < min(waited), "the cursor keeps waiting records"
    assert more(35) == []
    assert set(whys) == {None}
    host.restart()
    assert more(37, 40) == [3] * 3
    assert set(whys[11:]) == {"the gateway was not running in between"}
    assert spark.read.parquet(str(tmp_path / "rows")).count() == 14


@full
@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_running_query_continues_while_a_fleet_grows(host: Host, spark: SparkSession, tmp_path: Path) -> None:
    host.ask(fleet(0, 90))
    settings = config(host, tmp_path).model_copy(update={"trigger": pipeline.Trigger(processing_time_ms=200)})
    query = pipeline.start(spark, settings)
    try:
        eventually(lambda: 90 in host.ask()["cursors"].values())
        for topics in (7_990, 8_010, 9_000):
            host.ask(fleet(host.ask()["newest"], topics))
            eventually(lambda topics=topics: query.exception() or topics in host.ask()["cursors"].values())  # type: ignore[misc]
            assert query.exception() is None
    finally:
        query.stop()
    assert [row["seq"] for row in written(tmp_path)] == list(range(1, 9_001))


@full
@pytest.mark.slow
@pytest.mark.timeout(240)
def test_every_row_is_written_once_if_the_job_is_killed_or_stopped(host: Host, tmp_path: Path) -> None:
    messages = samples(39_998)
    for payload in (UPayload(b"nope", UPayloadFormat.UPAYLOAD_FORMAT_JSON), UPayload(b"\xff", 1)):
        messages.append(UMessageBuilder.publish(uris.uri("vehicle1", 7, 1, 0x8001)).build_from_upayload(payload))
    host.ask(messages)
    file = tmp_path / "ingest.toml"
    file.write_text(
        '[source]\ntransport = "zenoh"\nauthority = "gateway"\nlocal_authority = "spark1"\nmax_records_per_batch = '
        "4000\n"
        f'[source.transport_config]\nmode = "client"\nconnect = ["tcp/127.0.0.1:{host.port}"]\n'
        f'[sink]\npath = "{tmp_path}/rows"\ncheckpoint = "{tmp_path}/checkpoint"\n'
    )
    command = [sys.executable, "-m", "spark_ingest", "--config", str(file)]
    planned, committed = tmp_path / "checkpoint/offsets/2", tmp_path / "checkpoint/commits/2"
    with started(command) as first:
        eventually(planned.exists)
        os.killpg(first.pid, signal.SIGKILL)  # the job, its JVM and their workers, as a power cut would
    assert not committed.exists()  # else this was no cut in a batch
    with started(command) as second:
        eventually(lambda: 40_000 in host.ask()["cursors"].values())
        second.send_signal(signal.SIGTERM)
        out, err = second.communicate(timeout=DEADLINE_S)
    assert second.returncode == 0, err
    report = json.loads(out.splitlines()[-1])
    assert report["stopped"] is True
    assert report["malformed"] == {"message": 0, "payload": 2, "time": 0}
    rows = written(tmp_path)
    assert [row["malformed"] for row in rows][-3:] == [None, "payload", "payload"]
    assert [row["message_id"] for row in rows] == ids(messages)
