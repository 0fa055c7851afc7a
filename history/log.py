"""The log: every message once, numbered, in order. Egress queue, history and Spark's offsets are all cursors into it.

append -> writer thread: one transaction -> tail (memory) -> on_append: pumps, long polls
                              |               |
                            SQLite --------> read(after)        path None: a ring in memory instead, same interface

All methods belong to one event loop, and none blocks it.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterable, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Final, Self, TypeVar

import structlog

from history import damage as kinds
from history.chunk import Chunk, Scan, message_id, message_ids
from history.cursors import Cursors
from history.damage import Damage, Ledger
from history.load import Cursor, Extent, Stream
from history.passed import Allowance, Passed
from history.reader import Limits, Reader
from history.store import RETENTION_BYTES, Store
from history.streams import STREAMS_MAX, Streams, TopicsFullError
from history.tail import Tail
from history.writer import CHUNK_RECORDS_MAX, RETENTION_PERIOD_MS, Append, Numbering, Retention, Writer, Written
from storage.faults import is_damage
from storage.runtime import REAL, Runtime
from uprotocol.encoded import Carried
from uprotocol.status import UStatusError
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.uri_pb2 import UUri

RETENTION_MS: Final = 7 * 24 * 3_600_000  # a vehicle in the workshop for a week finds its history again
# seconds of the highest rate measured: pumps and pollers at the head never touch the disk
TAIL_BYTES_MAX: Final = 32 << 20
RECORD_MEMORY_BYTES: Final = 800  # what a record costs in memory beside its bytes (message object, columns); measured
# queued for the writer: half a second of its speed, beyond that the disk is too slow for the sender
APPEND_RECORDS_MAX: Final = 65_536
SWEEP_S: Final = 10.0  # between looks for streams that can be forgotten, and ...
SWEEP_AGAIN_S: Final = 0.1  # ... between steps of one
ROOM_AGAIN_S: Final = 1.0  # until room is looked for again where there was none
CURSOR_FLUSH_MS: Final = 200  # a cursor is on disk that soon; what is lost of it is only sent twice
# a log that can't be written tries again so often, even if nobody appends: who sees it unhealthy may not send
PROBE_MS: Final = 1_000
READ_THREADS: Final = 2
READ_RECORDS_MAX: Final = 2_048  # of one read, if the caller does not say
READ_BYTES_MAX: Final = 4 << 20
TAIL_SCAN_CHUNKS_MAX: Final = 1_024  # looked at in one step on the loop, some milliseconds

_REASONS: Final = {  # what `dropped` counts
    kinds.FILE: "damaged_file",
    kinds.MISSING: "damaged_file",
    kinds.STRUCTURE: "damaged_file",
    kinds.COMMITS: "lost_commits",
    kinds.RECORDS: "corrupt_chunks",
    kinds.NETWORK: "network_loss",
    kinds.SUBSCRIPTIONS: "subscriptions_loss",
}

T = TypeVar("T")
log = structlog.get_logger()


class Log:
    """See `open`. `durable`: on disk, committed before an append's future resolves; otherwise a ring in memory.

    Seqs rise by one with each record, and start with 1; they leap over what was lost with a damaged file (a gap for
    every reader). `incarnation` is 16 random bytes that name this log: a log that was lost and made anew has another.
    `dropped` counts by reason what could not be kept or read. `cursors_lost`: a cursor was damaged, and not even its
    name is sure; whoever misses his begins at `floor_seq`.
    """

    def __init__(
        self, name: str, incarnation: bytes, retention_ms: int, retention_bytes: int, now_ms: Callable[[], int]
    ) -> None:
        """Use `open`."""
        self.name, self.incarnation = name, incarnation
        self.retention_ms, self.retention_bytes = retention_ms, retention_bytes
        self.healthy = True
        self.dropped: Counter[str] = Counter()
        self._now_ms = now_ms
        self._extent = Extent()
        self._ledger = Ledger()
        self._cursors = Cursors(name, now_ms, self._save_cursor)
        self.cursors_lost = False
        self._known = Streams(STREAMS_MAX, STREAMS_MAX)
        self._appending: set[Append] = set()  # not yet committed
        self._sweeping: asyncio.TimerHandle | None = None
        self._room_due = 0.0  # loop time
        self._forgotten_callbacks: list[Callable[[frozenset[int]], None]] = []
        self._using: list[Callable[[], Iterable[int]]] = []
        self._flush_due: asyncio.TimerHandle | None = None
        self._aging: asyncio.TimerHandle | None = None
        self._callbacks: list[Callable[[], None]] = []
        self._passed_callbacks: list[Callable[[Passed], None]] = []
        self._damage_callbacks: list[Callable[[Damage], None]] = []
        self._grown: asyncio.Future[None] | None = None
        self._queued = 0
        self._closed = False
        self._tail = Tail(0, TAIL_BYTES_MAX)
        self._numbering = Numbering(0, self._known.table)  # of the ring
        self._holes: list[tuple[int, int]] = []
        self._allowance = Allowance()  # of the ring
        self._writer: Writer | None = None
        self._reader: Reader | None = None
        self._executor: ThreadPoolExecutor | None = None
        self._loop = asyncio.get_running_loop()

    @classmethod
    async def open(
        cls,
        path: Path | str | None,
        *,
        name: str,
        retention_ms: int = RETENTION_MS,
        retention_bytes: int = RETENTION_BYTES,
        tail_bytes: int = TAIL_BYTES_MAX,
        streams_max: int = STREAMS_MAX,
        authority_streams_max: int | None = None,
        forget_after_s: float | None = None,
        now_ms: Callable[[], int] | None = None,
        runtime: Runtime = REAL,
    ) -> Log:
        """The log in the SQLite file `path` (made if there is none); for None a volatile one, whose ring has
        `retention_bytes` of memory.

        It knows at most `streams_max` streams, `authority_streams_max` of one source authority (None: no limit of its
        own), and forgets those that have had no record for `forget_after_s` (None: streams.FORGET_AFTER_S).

        Raises UStatusError: ALREADY_EXISTS if another process has it open, FAILED_PRECONDITION if the file is of a
        newer program or no log, RESOURCE_EXHAUSTED if the disk is full (nothing is changed then: try again),
        UNAVAILABLE on I/O errors. A damaged file is moved aside, never deleted, and a new incarnation starts; `damage`
        remembers it.
        """
        assert min(retention_ms, retention_bytes) > 0, "a log keeps something"
        assert streams_max > 0, "a log knows something"
        now_ms = now_ms or runtime.now_ms
        known = Streams(
            streams_max, streams_max if authority_streams_max is None else authority_streams_max, forget_after_s
        )
        if path is None:
            made = cls(name, runtime.random_bytes(16), retention_ms, retention_bytes, now_ms)
            made._know(known)
            made._tail.bytes_max = retention_bytes
            made._age_ring()
            return made
        executor = ThreadPoolExecutor(READ_THREADS, thread_name_prefix=f"history-{name}-read")
        loop = asyncio.get_running_loop()
        try:
            store = await loop.run_in_executor(executor, Store.open, Path(path), runtime, now_ms, retention_bytes)
            loaded = store.loaded
            await loop.run_in_executor(
                executor, known.load, loaded.streams, loaded.next_stream, loaded.forgotten, loop.time()
            )
        except BaseException:
            executor.shutdown(wait=False)
            raise
        made = cls(name, store.incarnation, retention_ms, retention_bytes, now_ms)
        made._know(known)
        made._start(store, executor, tail_bytes)
        return made

    def _know(self, known: Streams) -> None:
        self._known = known
        self._numbering = Numbering(0, known.table)
        self._sweeping = self._loop.call_later(min(SWEEP_S, known.forget_after_s), self._sweep)

    def _start(self, store: Store, executor: ThreadPoolExecutor, tail_bytes: int) -> None:
        loaded = store.loaded
        self._extent = replace(loaded.extent)
        self._cursors.rows = dict(loaded.cursors)
        self.cursors_lost = loaded.cursors_lost
        self._holes = list(loaded.holes)
        self._ledger = loaded.ledger
        for damage in loaded.found:
            self._count(damage)
        self._tail = Tail(store.extent.newest_seq, tail_bytes)
        self._executor, self._reader = executor, Reader(store.path, store.runtime.disk)
        retention = Retention(
            self.retention_ms, self.retention_bytes, self._cursors.keep_after, self._cursors.owed_after
        )
        self._writer = Writer(store, retention, self._on_written, self._now_ms, self.name)

    async def close(self) -> None:
        """Write what is queued, and close. May be called twice."""
        if self._closed:
            return
        self._closed = True
        for timer in (self._flush_due, self._aging, self._sweeping):
            if timer is not None:
                timer.cancel()
        if self._writer is not None:
            await self._writer.stop()
        if self._reader is not None and self._executor is not None:
            await asyncio.get_running_loop().run_in_executor(self._executor, self._reader.close)
            self._executor.shutdown(wait=False)
        self._wake()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def __repr__(self) -> str:
        state = "closed" if self._closed else "healthy" if self.healthy else "not healthy"
        return f"Log({self.name}, {'durable' if self.durable else 'volatile'}, {state}, {self.oldest_seq}..{self.newest_seq})"

    # -- state

    @property
    def durable(self) -> bool:
        return self._writer is not None

    @property
    def oldest_seq(self) -> int:
        """Of the records there are; 0 if there is none."""
        if self._writer is None:
            return self._tail.oldest.first_seq if self._tail.oldest is not None else 0
        return self._extent.oldest_seq

    @property
    def newest_seq(self) -> int:
        """The highest seq that was ever given out; 0 if there never was a record."""
        return self._extent.newest_seq

    @property
    def floor_seq(self) -> int:
        """Records up to here were deleted by retention; 0 if none ever was."""
        return self._tail.after if self._writer is None else self._extent.floor_seq

    @property
    def holes(self) -> list[tuple[int, int]]:
        """(after, before): what was committed once, and lost with a damaged file."""
        return self._holes

    @property
    def disk_bytes(self) -> int:
        """What all files of the log really take, the write-ahead log included; sampled every second. 0: volatile."""
        return self._extent.disk_bytes

    @property
    def disk_free_bytes(self) -> int:
        """What is left on the disk of the log; sampled every second. 0: volatile."""
        return self._extent.disk_free_bytes

    @property
    def stored_bytes(self) -> int:
        """Of the records there are."""
        return self._tail.bytes if self._writer is None else self._extent.stored_bytes

    # -- streams

    def stream_id(self, source: UUri, sink: UUri | None = None, *, wanted: bool = False) -> int:
        """The number of this pair, given out on first use. It may be forgotten when no record of it is kept; `append`
        bears that.

        Raises TopicsFullError (RESOURCE_EXHAUSTED): beyond `authority_streams_max` of the source's authority, or where
        only the reserve is left of `streams_max`. `wanted`, by somebody who has named just this one, has room in both,
        as long as there is any at all.
        """
        stream = self._known.find(source, sink)
        return stream.id if stream is not None else self._new_stream(source, sink, wanted)

    def _new_stream(self, source: UUri, sink: UUri | None, wanted: bool) -> int:
        known = self._known
        if known.is_crowded and self._loop.time() >= self._room_due and not self._forget(at_once=True):
            self._room_due = self._loop.time() + ROOM_AGAIN_S
        known.refuse_beyond(source.authority_name, wanted=wanted)
        stream = known.add(source, sink, self._loop.time())
        if self._writer is not None:
            self._writer.save_stream(stream)
        return stream.id

    def stream(self, id: int) -> Stream:
        """One that is known; see `knows_stream`."""
        return self._known.table[id]

    def knows_stream(self, id: int) -> bool:
        """False for a number that was forgotten, or that only damaged bytes name."""
        return id in self._known.table

    def streams(self) -> list[Stream]:
        """All of them, in the order of their numbers."""
        return list(self._known.table.values())

    @property
    def stream_count(self) -> int:
        return len(self._known.table)

    @property
    def streams_forgotten(self) -> int:
        """Since the log was opened."""
        return self._known.forgotten_total

    def topics_of(self, authority: str) -> int:
        """How many of them have their source there."""
        return self._known.count_of(authority)

    def streams_after(self, id: int, count: int) -> list[Stream]:
        """At most `count` of those with a number greater than `id`, in the order of their numbers."""
        return self._known.after(id, count)

    # -- forgetting streams

    def on_forgotten(self, callback: Callable[[frozenset[int]], None]) -> None:
        """`callback(ids)` on the loop, in the step in which these streams are forgotten. Their numbers are never used
        again."""
        self._forgotten_callbacks.append(callback)

    def keep_streams(self, callback: Callable[[], Iterable[int]]) -> None:
        """`callback()` on the loop gives the streams that somebody has in hand: those are not forgotten."""
        self._using.append(callback)

    def forgotten_seq(self, authorities: Set[str] | None) -> int:
        """Up to here there may have been records of these source authorities (None: of any) in streams that are
        forgotten. Who has not read so far may have missed some of any topic there."""
        return self._known.forgotten_seq(authorities)

    def _sweep(self) -> None:
        if self._closed:
            return
        more = self._known.look(self.floor_seq, self._loop.time())
        more = bool(self._forget()) or more
        self._sweeping = self._loop.call_later(
            SWEEP_AGAIN_S if more else min(SWEEP_S, self._known.forget_after_s), self._sweep
        )

    def _forget(self, *, at_once: bool = False) -> int:
        """Streams that have had no record for a while; `at_once`: some of those that have none now. How many that
        were."""
        if self._closed or not self.healthy:  # what can't be written would only gather
            return 0
        known, now = self._known, self._loop.time()
        known.look(self.floor_seq, now)
        candidates = known.candidates(self.floor_seq, now, at_once=at_once)
        if not candidates:
            return 0
        used: set[int] = set().union(
            *(append.streams for append in self._appending), *(callback() for callback in self._using)
        )
        known.keep_on((stream for stream in candidates if stream.id in used), now)
        doomed = [stream for stream in candidates if stream.id not in used]
        ids = frozenset(stream.id for stream in doomed)
        meta = known.remove(doomed)
        if not ids:
            return 0
        if self._writer is not None:
            self._writer.save_forgotten(ids, meta)
            self._schedule_flush()
        for callback in list(self._forgotten_callbacks):
            callback(ids)
        return len(ids)

    def _numbered_anew(self, streams: list[int], messages: Sequence[Carried]) -> list[int]:
        """Who appends may have kept a number for longer than the log has: a message says by itself where it comes from
        and goes to."""
        if not set(streams).difference(self._known.table):
            return streams
        found: dict[int, int] = {}
        for id, message in zip(streams, messages, strict=True):
            if id not in self._known.table and id not in found:
                attributes = message.attributes
                found[id] = self.stream_id(
                    attributes.source, attributes.sink if attributes.HasField("sink") else None, wanted=True
                )
        return [found.get(id, id) for id in streams]

    # -- append

    def append(self, streams: list[int], messages: Sequence[Carried]) -> asyncio.Future[int]:
        """Resolves with the first seq when all of them are committed; the others follow it without gap.

        `streams` has the `stream_id` of each message. Fails with UStatusError, and nothing stored: RESOURCE_EXHAUSTED
        (disk full, or more than APPEND_RECORDS_MAX waiting), UNAVAILABLE (I/O error, closed). The messages must not
        change afterwards.
        """
        assert len(streams) == len(messages) > 0, "a batch has messages, and each its stream"
        done: asyncio.Future[int] = self._loop.create_future()
        if self._known.forgotten_total:
            try:
                streams = self._numbered_anew(streams, messages)
            except UStatusError as error:
                done.set_exception(error)
                return done
        if self._closed:
            done.set_exception(UStatusError(UCode.UNAVAILABLE, f"the log {self.name} is closed"))
        elif self._writer is None:
            done.set_result(self._keep(streams, messages))
        elif self._queued and self._queued + len(messages) > APPEND_RECORDS_MAX:
            self.dropped["append_queue_full"] += len(messages)
            done.set_exception(
                UStatusError(
                    UCode.RESOURCE_EXHAUSTED,
                    f"{self._queued} messages wait for the log {self.name} already: send slower",
                )
            )
        else:
            self._queued += len(messages)
            append = Append(list(streams), list(messages), done)
            self._appending.add(append)
            self._writer.submit(append)
        return done

    def _keep(self, streams: list[int], messages: Sequence[Carried]) -> int:
        """Append to the ring."""
        time_ms = self._now_ms()
        first_seq = self._extent.newest_seq + 1
        gone: list[Chunk] = []
        for begin in range(0, len(messages), CHUNK_RECORDS_MAX):
            part, part_messages = (
                streams[begin : begin + CHUNK_RECORDS_MAX],
                messages[begin : begin + CHUNK_RECORDS_MAX],
            )
            seqs, prev_seqs = self._numbering.number(part)
            self._numbering.begin()
            newest = dict(zip(part, range(len(part)), strict=True))
            for id, count in Counter(part).items():
                place = newest[id]
                stream = self._known.table[id]
                stream.grow(
                    seqs[part.index(id)] if not stream.records else 0,
                    seqs[place],
                    count,
                    message_id(part_messages[place]),
                    time_ms,
                )
            size = 2 * sum(message.ByteSize() for message in part_messages)
            gone += self._push(Chunk(seqs, time_ms, part, prev_seqs, None, part_messages), size)
        self._extent.newest_seq = self._numbering.newest_seq
        self._fallen_out(gone)
        self._announce()
        return first_seq

    def _age_ring(self) -> None:
        """Every second: what is asked for in one step on the loop is there in the whole of it."""
        if not self._closed:
            self._aging = self._loop.call_later(RETENTION_PERIOD_MS / 1_000, self._age_ring)
        cutoff, keep_after = self._now_ms() - self.retention_ms, self._cursors.keep_after()
        self._allowance.refill()
        gone: list[Chunk] = []
        while (
            len(self._tail) > 1
            and (oldest := self._tail.oldest)
            and oldest.time_ms < cutoff
            and oldest.last_seq <= keep_after
        ):
            gone.append(self._tail.pop())
        self._fallen_out(gone)

    def _push(self, chunk: Chunk, bytes: int) -> list[Chunk]:
        return self._tail.push(chunk, bytes + RECORD_MEMORY_BYTES * len(chunk))

    def _fallen_out(self, gone: list[Chunk]) -> None:
        """Tell of what the ring no longer has, and an endpoint was still owed."""
        after = self._cursors.owed_after()
        if not gone or after >= gone[-1].last_seq:
            return
        after = max(after, gone[0].first_seq - 1)
        self._tell_passed(Passed(after, gone[-1].last_seq + 1, self._allowance.take(gone, after)))

    def _on_written(self, written: Written) -> None:
        """On the loop, after each transaction, and after each step of retention."""
        for passed in written.passed:
            self._tell_passed(passed)
        for number in written.acknowledged:
            self._ledger.acknowledge_one(number)
        self._extent = written.extent
        batch = written.batch
        if batch is None:
            return
        self._queued -= sum(len(append.messages) for append in batch)
        self._appending.difference_update(batch)
        if written.is_damaged:
            self._note(Damage(self._now_ms(), kinds.STRUCTURE, 0, 0, self.incarnation, "", str(written.error)))
        if written.error is not None:
            self._failed(batch, written.error)
            return
        if not self.healthy:
            self.healthy = True
            log.info("the log takes messages again", log=self.name)
        if not written.chunks:
            return
        for chunk in written.chunks:
            self._push(chunk, 2 * sum(map(len, chunk.data)))
        seq = written.chunks[0].first_seq
        for append in batch:
            if not append.done.done():
                append.done.set_result(seq)
            seq += len(append.messages)
        self._announce()

    def _failed(self, batch: list[Append], error: UStatusError) -> None:
        if self.healthy:
            self.healthy = False
            log.error("the log can't be written; messages are refused until it can", log=self.name, error=str(error))
        self.dropped["refused"] += sum(len(append.messages) for append in batch)
        for append in batch:
            if not append.done.done():
                append.done.set_exception(error)
        self._schedule_flush(PROBE_MS)  # tries again what else was in the transaction, and writes something in any case

    def _tell_passed(self, passed: Passed) -> None:
        for callback in list(self._passed_callbacks):
            callback(passed)

    def _announce(self) -> None:
        self._wake()
        for callback in list(self._callbacks):
            callback()

    def _wake(self) -> None:
        if self._grown is not None:
            self._grown.set_result(None)
            self._grown = None

    # -- what was lost

    def on_passed(self, callback: Callable[[Passed], None]) -> None:
        """`callback(passed)` on the loop, in the step in which `floor_seq` rises, if a cursor with `holds`, or of an
        endpoint, had not passed what retention has deleted. It must not append to this log."""
        self._passed_callbacks.append(callback)

    def on_damage(self, callback: Callable[[Damage], None]) -> None:
        """`callback(damage)` on the loop when damage is found that was not known; what `open` found is in `damage`
        already."""
        self._damage_callbacks.append(callback)

    @property
    def damage(self) -> list[Damage]:
        """What is known to be lost or damaged, and was not acknowledged by a person; kept over restarts, also where a
        new file started."""
        return self._ledger.open

    def acknowledge_damage(self) -> None:
        """A person has seen it: all of `damage` is history."""
        rows = self._ledger.acknowledge()
        if rows and self._writer is not None:
            self._writer.save_damage(rows)
            self._schedule_flush()

    def knows_lost(self, incarnation: bytes) -> bool:
        """True if that log was here once, and was lost with its records."""
        return self._ledger.knows(incarnation)

    def note_loss(self, kind: str, detail: str) -> None:
        """Something that is not of this log was lost (history.damage.OTHERS): kept with its damage, until a person has
        acknowledged it."""
        assert kind in kinds.OTHERS, "the log finds its own damage by itself"
        self._note(Damage(self._now_ms(), kind, 0, 0, self.incarnation, "", detail))

    def _note(self, damage: Damage) -> None:
        row = self._ledger.add(damage)
        if row is None:
            return
        self._count(damage)
        if self._writer is not None:
            self._writer.save_damage([row])
            self._schedule_flush()
        for callback in list(self._damage_callbacks):
            callback(damage)

    def _distrust_index(self) -> None:
        assert self._writer is not None
        self._writer.distrust_index()
        self._note(
            Damage(
                self._now_ms(),
                kinds.INDEX,
                0,
                0,
                self.incarnation,
                "",
                "the index of streams is made anew at the next start",
            )
        )

    def _count(self, damage: Damage) -> None:
        self.dropped[_REASONS.get(damage.kind, "damaged_rows")] += 1

    # -- read

    def on_append(self, callback: Callable[[], None]) -> Callable[[], None]:
        """`callback()` on the loop after each commit, when the records can be read. Returns what ends it."""
        self._callbacks.append(callback)

        def end() -> None:
            if callback in self._callbacks:
                self._callbacks.remove(callback)

        return end

    async def wait(self, after: int) -> None:
        """Until there is a seq greater than `after`. Raises UNAVAILABLE if the log is closed meanwhile."""
        while self.newest_seq <= after:
            if self._closed:
                raise UStatusError(UCode.UNAVAILABLE, f"the log {self.name} is closed")
            if self._grown is None:
                self._grown = self._loop.create_future()
            await asyncio.shield(self._grown)

    def tail(self, after: int) -> list[Chunk] | None:
        """All after `after` at once, or None if that reaches further back than the tail in memory."""
        return self._tail.read(after) if after >= self._tail.after else None

    async def read(
        self,
        after: int,
        *,
        max_records: int = READ_RECORDS_MAX,
        max_bytes: int = READ_BYTES_MAX,
        streams: Set[int] | None = None,
        until: int | None = None,
    ) -> list[Chunk]:
        """The next records after `after` up to and with `until`, of `streams` only if given (chunks then have holes);
        empty if none.

        At least one record comes even if it exceeds `max_bytes` (of messages). Damaged records are skipped: use `scan`
        to learn of them.
        """
        end = self.newest_seq if until is None else min(until, self.newest_seq)
        while after < end:
            found = await self.scan(after, max_records=max_records, max_bytes=max_bytes, streams=streams, until=end)
            if found.chunks:
                return found.chunks
            after = found.covered
        return []

    async def scan(
        self,
        after: int,
        *,
        max_records: int,
        max_bytes: int,
        streams: Set[int] | None = None,
        until: int | None = None,
        strict: bool = False,
    ) -> Scan:
        """One bounded step of `read`, which also says how far it came (beyond `after`, unless that is the end) and what
        is damaged.

        `strict`: not even the first record may exceed `max_bytes`.
        """
        until = self.newest_seq if until is None else min(until, self.newest_seq)
        if after >= until:
            return Scan(after, max_records, max_bytes)
        if after >= self._tail.after or self._reader is None:
            found = self._scan_tail(max(after, self.floor_seq), until, streams, max_records, max_bytes, strict)
        else:
            table = self._known.table
            wanted = None if streams is None else {id: table[id].newest_seq for id in streams if id in table}
            limits = Limits(max_records, max_bytes, strict)
            found = await self._in_executor(self._reader.scan, after, until, wanted, limits, self._holes)
            if found.is_index_wrong:
                self._distrust_index()
            for low, high, why in found.damaged:
                self._note(Damage(self._now_ms(), kinds.RECORDS, low, high, self.incarnation, "", why))
        found.gaps.extend(
            (max(after, low), high) for low, high in self._holes if low < found.covered and after < high - 1
        )
        return found

    def _scan_tail(
        self, after: int, until: int, streams: Set[int] | None, records_max: int, bytes_max: int, strict: bool
    ) -> Scan:
        found = Scan(after, records_max, bytes_max, strict)
        found.floor_seq = self.floor_seq  # also of what is still in memory: retention means the same to every reader
        chunks = self._tail.read(after, TAIL_SCAN_CHUNKS_MAX)
        for chunk in chunks:
            if chunk.first_seq > until:
                break
            found.take(chunk, until, streams)
            if found.full:
                return found
        if len(chunks) < TAIL_SCAN_CHUNKS_MAX:
            found.covered = max(found.covered, until)
        return found

    async def _in_executor(self, call: Callable[..., T], *arguments: object) -> T:
        assert self._executor is not None
        if self._closed:
            raise UStatusError(UCode.UNAVAILABLE, f"the log {self.name} is closed")
        try:
            return await self._loop.run_in_executor(self._executor, call, *arguments)
        except (sqlite3.Error, UnicodeDecodeError) as error:  # the latter where SQLite quotes what is damaged
            code = UCode.UNAVAILABLE if isinstance(error, sqlite3.Error) and not is_damage(error) else UCode.DATA_LOSS
            raise UStatusError(code, f"the log {self.name} can't be read: {error}") from error

    async def seq_of_id(self, id: bytes) -> int | None:
        """The seq of the newest record with this message id (16 bytes, big endian)."""
        if self._reader is not None:
            return await self._in_executor(self._reader.find_id, id)
        for chunk in reversed(self._tail.read(self._tail.after)):
            ids = message_ids(chunk.messages)
            for place in range(len(chunk) - 1, -1, -1):
                if ids[16 * place : 16 * place + 16] == id:
                    return chunk.seqs[place]
        return None

    async def seq_before_time(self, time_ms: int) -> int:
        """The seq after which everything appended after `time_ms` (Unix milliseconds) comes."""
        if self._reader is not None:
            first = await self._in_executor(self._reader.first_after_time, time_ms)
        else:
            first = next(
                (chunk.first_seq for chunk in self._tail.read(self._tail.after) if chunk.time_ms > time_ms), None
            )
        return self.newest_seq if first is None else min(first - 1, self.newest_seq)

    async def recent_ids(self, count: int) -> list[tuple[int, bytes]]:
        """Stream and id (16 bytes) of the newest `count` records, oldest first: what a duplicate window needs after a
        restart.

        The id counts together with the source: another's message may have the same one.
        """
        if self._reader is not None:
            return await self._in_executor(self._reader.recent_ids, count)
        chunks = self._tail.read(self._tail.after)
        ids = [
            (id, message_id(message))
            for chunk in chunks
            for id, message in zip(chunk.streams, chunk.messages, strict=True)
        ]
        return ids[-count:]

    # -- cursors

    def cursor(self, name: str) -> int | None:
        """The seq up to which `name` has confirmed, or None if there is no such cursor."""
        cursor = self._cursors.rows.get(name)
        return None if cursor is None else cursor.seq

    def cursor_row(self, name: str) -> Cursor | None:
        """All that is known of one cursor."""
        return self._cursors.rows.get(name)

    @property
    def cursor_count(self) -> int:
        return len(self._cursors.rows)

    def cursors(self) -> dict[str, int]:
        return {name: cursor.seq for name, cursor in self._cursors.rows.items()}

    def cursor_rows(self) -> dict[str, Cursor]:
        """All that is known of each cursor."""
        return dict(self._cursors.rows)

    def set_cursor(
        self, name: str, seq: int, *, lease_ms: int | None = None, holds: bool = False, absent_ms: int = 0
    ) -> None:
        """On disk with the next transaction, or within CURSOR_FLUSH_MS.

        What the cursor still needs is kept beyond the retention by age (never beyond that by bytes): with `lease_ms`
        until the lease ends, and then the cursor is gone; with `holds` until it is dropped. `absent_ms` is kept for the
        caller. Raises RESOURCE_EXHAUSTED beyond CURSORS_MAX.
        """
        self._cursors.set(name, seq, lease_ms, holds, absent_ms)

    def drop_cursor(self, name: str) -> None:
        """Nothing happens if there is none."""
        self._cursors.drop(name)

    def _save_cursor(self, name: str, cursor: Cursor | None) -> None:
        if self._writer is not None:
            self._writer.save_cursor(name, cursor)
            self._schedule_flush()

    def _schedule_flush(self, delay_ms: int = CURSOR_FLUSH_MS) -> None:
        if self._flush_due is None and not self._closed:
            self._flush_due = self._loop.call_later(delay_ms / 1_000, self._flush)

    def _flush(self) -> None:
        self._flush_due = None
        assert self._writer is not None
        self._cursors.drop_ended_leases()
        self._writer.flush()


__all__ = ["Chunk", "Cursor", "Damage", "Log", "Passed", "Scan", "Stream", "TopicsFullError"]
