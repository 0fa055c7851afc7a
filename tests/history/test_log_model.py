"""The log against a list: after any appends, restarts, retention and leases, both have the same records."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from history.file import writer as writer_module
from history.file.retention import Ages
from history.file.writer import FollowedFrom, Written
from history.log.log import Log
from history.records.chunk import Origin
from tests.tiers import examples
from uprotocol import uri as uris
from uprotocol.message import UMessageBuilder, UPayload
from uprotocol.v1.umessage_pb2 import UMessage

TOPICS = [uris.uri("vcu.vin", 0x10, 1, 0x8000 + place) for place in range(6)]
BATCHES = st.lists(st.integers(0, 5), min_size=1, max_size=12)
KEYS = st.none() | st.sampled_from("xy")  # of a log that the batch is followed from
OTHER = b"o" * 16
NEVER = float("inf")
SMALL_TAIL_BYTES = 8_000  # some five chunks: reads come from the disk and from memory


def message(topic: int) -> UMessage:
    return UMessageBuilder.publish(TOPICS[topic]).build_from_upayload(UPayload(b"x" * 40, 5))


class LogMachine(RuleBasedStateMachine):
    """`records` is the model: (seq, prev_seq, topic, bytes, origin, time_ms) of everything that was ever
    acknowledged."""

    durable = True

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.folder = Path(tempfile.mkdtemp())
        self.records: list[tuple[int, int, int, bytes, Origin | None, int]] = []
        self.places: dict[str, bytes] = {}  # in other logs
        self.there = 0  # the last seq there
        self.newest: dict[int, int] = {}
        self.cursors: dict[str, int] = {}
        self.leases: dict[str, tuple[int, int]] = {}  # name -> (seq, until)
        self.now = 1_800_000_000_000
        self.ids: dict[int, int] = {}  # the number of each topic that is known
        self.used: set[int] = set()  # all that were ever given out
        self.forgotten = 0  # newest seq of a topic that was

    def run(self, awaitable: Any) -> Any:
        return self.loop.run_until_complete(awaitable)

    async def _open(self) -> Log:
        path = self.folder / "l.db" if self.durable else None
        log = await Log.open(
            path,
            name="model",
            retention_ms=60_000,
            retention_bytes=30_000,
            tail_bytes=SMALL_TAIL_BYTES,
            now_ms=lambda: self.now,
        )
        if log.durable:
            log._storage.writer._next_retention = NEVER  # only when a rule says so, else it runs while we compare
        log.on_forgotten(self._forgotten)
        return log

    def _forgotten(self, ids: frozenset[int]) -> None:
        for topic in [topic for topic, id in self.ids.items() if id in ids]:
            assert self.newest.get(topic, 0) <= self.log.floor_seq, "a topic with records was forgotten"
            assert not self.log.knows_stream(self.ids.pop(topic))
            self.forgotten = max(self.forgotten, self.newest.pop(topic, 0))

    def id(self, topic: int) -> int:
        id = self.log.stream_id(TOPICS[topic])
        if topic not in self.ids:
            assert id not in self.used, "the number of a topic that was forgotten"
            self.ids[topic] = id
            self.used.add(id)
        assert id == self.ids[topic]
        return id

    @initialize()
    def open(self) -> None:
        self.log = self.run(self._open())
        self.incarnation = self.log.incarnation

    @rule(batches=st.lists(st.tuples(BATCHES, KEYS), min_size=1, max_size=4))
    def append(self, batches: list[tuple[list[int], str | None]]) -> None:
        self.run(self._append(batches))

    async def _append(self, batches: list[tuple[list[int], str | None]]) -> None:
        sent = [[message(topic) for topic in batch] for batch, _ in batches]
        ids = [[self.id(topic) for topic in batch] for batch, _ in batches]
        followed = [self._followed(len(batch), key) for batch, key in batches]
        futures = [self.log.append(*columns) for columns in zip(ids, sent, followed, strict=True)]
        firsts = await asyncio.gather(*futures)
        for first, (batch, _), messages, whence in zip(firsts, batches, sent, followed, strict=True):
            assert first == (self.records[-1][0] if self.records else 0) + 1
            origins = [None] * len(batch) if whence is None else whence.origins
            for seq, (topic, given, origin) in enumerate(zip(batch, messages, origins, strict=True), first):
                data = given.SerializeToString()
                self.records.append((seq, self.newest.get(topic, 0), topic, data, origin, self.now))
                self.newest[topic] = seq

    def _followed(self, count: int, key: str | None) -> FollowedFrom | None:
        if key is None:
            return None
        begin, self.there = self.there + 1, self.there + count
        self.places[key] = b"%d" % self.there
        return FollowedFrom([Origin(OTHER, seq) for seq in range(begin, begin + count)], key, self.places[key])

    @rule(key=st.sampled_from("xyz"), is_known=st.booleans())
    def keep_place(self, key: str, is_known: bool) -> None:
        self.log.followed.keep(key, b"%d" % self.there if is_known else None)
        self.places.pop(key, None)
        if is_known:
            self.places[key] = b"%d" % self.there

    @rule(leap_ms=st.sampled_from([1, 1_000, 30_000, 70_000, -5_000, -100_000]))
    def leap(self, leap_ms: int) -> None:
        self.now += leap_ms

    @rule(name=st.sampled_from("ab"), place=st.floats(0, 1))
    def set_cursor(self, name: str, place: float) -> None:
        seq = int(self.log.newest_seq * place)
        self.log.cursors.set(name, seq)
        self.cursors[name] = seq

    @rule(place=st.floats(0, 1), lease_ms=st.sampled_from([1_000, 100_000]))
    def lease(self, place: float, lease_ms: int) -> None:
        seq = int(self.log.newest_seq * place)
        self.log.cursors.set("leased", seq, lease_ms=lease_ms)
        self.leases["leased"] = (seq, self.now + lease_ms)

    @rule(name=st.sampled_from("ab"))
    def drop_cursor(self, name: str) -> None:
        self.log.cursors.drop(name)
        self.cursors.pop(name, None)

    @precondition(lambda self: self.durable)
    @rule()
    def restart(self) -> None:
        self.run(self.log.close())
        self.log = self.run(self._open())
        assert self.log.incarnation == self.incarnation

    @precondition(lambda self: self.durable)
    @rule()
    def retain(self) -> None:
        """Let the writer's retention finish, and check its guarantees."""
        self.run(self._retain())

    async def _retain(self) -> None:
        writer = self.log._storage.writer
        assert writer is not None
        done = asyncio.Event()
        heard = writer._on_written

        def listen(written: Written) -> None:
            heard(written)
            if written.batch is None and writer._next_retention != 0.0:
                done.set()

        writer._on_written = listen
        writer._next_retention = 0.0
        writer.flush()
        await asyncio.wait_for(done.wait(), 30)
        writer._on_written = heard
        writer._next_retention = NEVER
        ages = Ages.at(self.now, 60_000)
        cutoff = ages.cutoff_ms - ages.late_ms
        held = min((seq for seq, until in self.leases.values() if until >= self.now), default=1 << 62)
        chunks = await self._chunks()
        assert self.log.extent.stored_bytes <= 30_000 or len(chunks) == 1
        # what is old is gone, unless a lease needs it or what is in front of it
        for first_seq, last_seq, time_ms in chunks[:-1]:
            assert time_ms >= cutoff or last_seq > held or chunks[0][1] > held, (first_seq, last_seq, held)

    async def _chunks(self) -> list[tuple[int, int, int]]:
        found = await self.log.scan(self.log.floor_seq, max_records=10_000, max_bytes=1 << 30)
        return [(chunk.first_seq, chunk.last_seq, chunk.time_ms) for chunk in found.chunks]

    @rule()
    def forget(self) -> None:
        """Forget all streams without a record; the log itself would wait for some minutes."""
        self.run(self._forget())

    async def _forget(self) -> None:
        log = self.log
        log.stream_table.forget_after_s = 0.0
        log.stream_table._forget()
        assert {topic for topic in self.ids if self.newest.get(topic, 0) <= log.floor_seq} == set()
        log.stream_table.forget_after_s = 1e9

    @invariant()
    def agree(self) -> None:
        if hasattr(self, "log"):
            self.run(self._agree())

    async def _agree(self) -> None:
        log = self.log
        assert {stream.id for stream in log.streams()} == set(self.ids.values())
        assert log.stream_table.forgotten_seq({"vcu.vin"}) == log.stream_table.forgotten_seq(None) == self.forgotten
        assert log.newest_seq == (self.records[-1][0] if self.records else 0)
        assert {name: seq for name, seq in log.cursors.seqs().items() if name != "leased"} == self.cursors
        assert log.followed.positions() == self.places
        there = [record for record in self.records if record[0] > log.floor_seq]
        assert log.oldest_seq == (there[0][0] if there else 0)
        assert not self.records or there, "the newest is always there"
        assert await self._read(log.floor_seq, None) == [record[:5] for record in there]
        middle = there[len(there) // 2][0] if there else 0
        assert await self._read(middle, {0, 3}) == [
            record[:5] for record in there if record[0] > middle and record[2] in (0, 3)
        ]
        tail = log.tail(middle)
        if tail is not None:
            assert [seq for chunk in tail for seq in chunk.seqs] == [
                record[0] for record in there if record[0] > middle
            ]

    async def _read(self, after: int, topics: set[int] | None) -> list[tuple[int, int, int, bytes, Origin | None]]:
        log = self.log
        wanted = None if topics is None else {self.id(topic) for topic in topics}
        found: list[tuple[int, int, int, bytes, Origin | None]] = []
        while chunks := await log.read(after, max_records=7, streams=wanted):
            after = chunks[-1].last_seq
            for chunk in chunks:
                topic = [log.stream(id).source.resource_id - 0x8000 for id in chunk.streams]
                origins = chunk.origins or [None] * len(chunk)
                found += list(zip(chunk.seqs, chunk.prev_seqs, topic, chunk.data, origins, strict=True))
        return found

    def teardown(self) -> None:
        if hasattr(self, "log"):
            self.run(self.log.close())
        self.loop.close()
        shutil.rmtree(self.folder)


class VolatileMachine(LogMachine):
    durable = False


QUICK = settings(
    max_examples=examples(15), stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
)


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer_module, "CHUNK_RECORDS_MAX", 5)
    monkeypatch.setattr("history.file.store.CHECKPOINT_CHUNKS", 7)
    monkeypatch.setattr(writer_module, "RETENTION_PERIOD_MS", 10**9)


class TestDurable(LogMachine.TestCase):  # type: ignore[misc, name-defined]
    settings = QUICK


class TestVolatile(VolatileMachine.TestCase):  # type: ignore[misc, name-defined]
    settings = QUICK
