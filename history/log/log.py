"""The log: every message once, numbered, in order. Egress queue, history and Spark's offsets are all cursors into it.

append -> storage: disk.py, or ring.py -> on_written -> the append's future, on_append: pumps, long polls
                       |
                     tail (memory) <- tail, scan, read -> storage: what lies further back

All methods belong to one event loop, and none blocks it.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Sequence, Set
from pathlib import Path
from typing import Final, Protocol, Self

import structlog

from history.file import damage as kinds
from history.file.damage import Damage
from history.file.load import Cursor, Extent, Stream
from history.file.reader import Limits
from history.file.store import RETENTION_BYTES
from history.file.writer import CURSORS_IDLE_S, GATHER_MS, Append, Followed, Writer, Written
from history.log.durable import Disk
from history.log.followed import FollowedLogs
from history.log.streams import STREAMS_MAX, Streams, TopicsFullError
from history.log.volatile import Ring
from history.records.chunk import NOBODY, Chunk, Passed, Scan
from storage.runtime import REAL, Runtime
from uprotocol.encoded import Carried
from uprotocol.status import UStatusError
from uprotocol.v1.ucode_pb2 import UCode

RETENTION_MS: Final = 7 * 24 * 3_600_000  # a vehicle in the workshop for a week finds its history again
# seconds of the highest rate measured: pumps and pollers at the head never touch the disk
TAIL_BYTES_MAX: Final = 32 << 20
# queued for the writer: half a second of its speed, beyond that the disk is too slow for the sender
APPEND_RECORDS_MAX: Final = 65_536
# one that can't be written tries again so often, even if nobody appends: who sees it unhealthy may not send
PROBE_MS: Final = 1_000
# a lease that has less left is on disk soon when it is longer again, so that no crash ends it
LEASE_LEFT_MS: Final = round(2_000 * CURSORS_IDLE_S)
CURSORS_MAX: Final = 50_000  # peers, their parked topics, and consumers with a name; some 300 bytes each
READ_RECORDS_MAX: Final = 2_048  # of one read, if the caller does not say
READ_BYTES_MAX: Final = 4 << 20
NEWEST_COPIED_MAX: Final = 10_000  # streams of one scan on disk whose newest seqs go to the reader: a millisecond
TAIL_SCAN_CHUNKS_MAX: Final = 1_024  # looked at in one step on the loop, some milliseconds

_REASONS: Final = {  # what `dropped` counts
    **dict.fromkeys((kinds.FILE, kinds.MISSING, kinds.STRUCTURE), "damaged_file"),
    kinds.COMMITS: "lost_commits",
    kinds.RECORDS: "corrupt_chunks",
    kinds.NETWORK: "network_loss",
    kinds.SUBSCRIPTIONS: "subscriptions_loss",
}

log = structlog.get_logger()


class Keeper(Protocol):
    """Of the epochs of some topics. On the loop."""

    def mark(self, log: Log, append: Append) -> None:
        """It is about to be handed to the storage: set its epochs, and add what is to be told."""

    def failed(self, log: Log, appends: Sequence[Append]) -> None:
        """They are not stored. It must not append."""


class Log(Streams):
    """See `open`. `durable`: on disk, committed before an append's future resolves; otherwise a ring in memory.

    Seqs rise by one with each record, and start with 1; they leap over what was lost with a damaged file (a gap for
    every reader). `incarnation` is 16 random bytes that name this log: a log that was lost and made anew has another.
    `dropped` counts by reason what could not be kept or read. `cursors_lost`: a cursor was damaged, and not even its
    name is sure; whoever misses his begins at `floor_seq`.
    """

    def __init__(
        self,
        name: str,
        storage: Disk | Ring,
        retention_ms: int,
        retention_bytes: int,
        streams_max: int,
        authority_streams_max: int | None,
        forget_after_s: float | None,
        now_ms: Callable[[], int],
    ) -> None:
        """Use `open`."""
        loaded = storage.loaded
        super().__init__(storage, streams_max, authority_streams_max, forget_after_s)
        self.name, self.incarnation, self.durable, self._now_ms = name, loaded.incarnation, storage.durable, now_ms
        self.retention_ms, self.retention_bytes = retention_ms, retention_bytes
        self.cursors_lost = loaded.cursors_lost
        self.holes = list(loaded.holes)  # (after, before): what was committed once, and lost with a damaged file
        self.dropped: Counter[str] = Counter()
        self._tail, self._ledger = storage.tail, loaded.ledger
        # All that changes, and who changes it. The loop alone, where nobody else is named:
        self.healthy = True  # the last transaction got through
        self.trouble = ""  # why it did not
        self._closed = False
        self._appending: set[Append] = set()  # handed to the storage, not yet reported by it
        self._saving: set[asyncio.Future[None]] = set()  # of `saved`
        self._queued = 0  # messages of those
        self._grown = asyncio.Event()  # or closed
        self._followed = FollowedLogs(name, loaded.places)
        self._cursors = dict(loaded.cursors)
        self._next_lease_end_ms = 0  # no lease ends before; Unix milliseconds
        self._append_callbacks: list[Callable[[], None]] = []
        self._passed_callbacks: list[Callable[[Passed], None]] = []
        self._damage_callbacks: list[Callable[[Damage], None]] = []
        self._keeper: Keeper | None = None
        # Elsewhere: the tail (the loop, in methods of the storage); the cursors (the loop; retention reads them, from
        # the writer's thread); the streams in `_table` (the loop; their seqs are moved by the writer's thread)
        for damage in loaded.found:
            self._count(damage)
        self.keep_streams(self._appended_to)
        self._take_over(loaded.extent)

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
        gather_ms: float = GATHER_MS,
        now_ms: Callable[[], int] | None = None,
        runtime: Runtime = REAL,
    ) -> Log:
        """The log in the SQLite file `path` (made if there is none); for None a volatile one, whose ring has
        `retention_bytes` of memory.

        It knows at most `streams_max` streams, `authority_streams_max` of one source authority (None: no limit of its
        own), and forgets those that have had no record for `forget_after_s` (None: streams.FORGET_AFTER_S).

        A message waits for others to share its commit, `gather_ms` at most and only while that brings something.

        Raises UStatusError: ALREADY_EXISTS if another process has it open, FAILED_PRECONDITION if the file is of a
        newer program or no log, RESOURCE_EXHAUSTED if the disk is full (nothing is changed then: try again),
        UNAVAILABLE on I/O errors. A damaged file is moved aside, never deleted, and a new incarnation starts; `damage`
        remembers it.
        """
        assert min(retention_ms, retention_bytes) > 0, "a log keeps something"
        assert streams_max > 0, "a log knows something"
        now_ms = now_ms or runtime.now_ms
        storage: Disk | Ring
        if path is None:
            storage = Ring(runtime.random_bytes(16), retention_bytes, now_ms)
        else:
            storage = await Disk.open(Path(path), name, retention_bytes, tail_bytes, gather_ms, now_ms, runtime)
        limits = (streams_max, authority_streams_max, forget_after_s)
        made = cls(name, storage, retention_ms, retention_bytes, *limits, now_ms)
        await storage.run(made._load)
        storage.start(made, made._on_written)
        return made

    async def close(self) -> None:
        """Write what is queued, and close. May be called twice."""
        if not self._closed:
            self._closed = True
            self._sweeping.cancel()
            await self._storage.close()
            self._grown.set()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def __repr__(self) -> str:
        state = "closed" if self._closed else "healthy" if self.healthy else "not healthy"
        kind = "durable" if self.durable else "volatile"
        return f"Log({self.name}, {kind}, {state}, {self.oldest_seq}..{self.newest_seq})"

    @property
    def failures(self) -> int:
        """Transactions that have failed, as far as this loop has heard. What was appended when there were fewer, and
        has no answer yet, will be refused."""
        return self._storage.failures

    @property
    def _is_writable(self) -> bool:
        return self.healthy and not self._closed

    # -- append

    def append(
        self, streams: list[int], messages: Sequence[Carried], followed: Followed | None = None
    ) -> asyncio.Future[int]:
        """Resolves with the first seq when all of them are committed; the others follow it without gap.

        `streams` has the `stream_id` of each message. `followed`: they come from another log, and the place there is
        committed with them; of several with one key the last one holds, so where one has failed none may be appended
        that goes on behind it. Fails with UStatusError, and nothing stored: RESOURCE_EXHAUSTED (disk full, more than
        APPEND_RECORDS_MAX waiting, or one more than history.log.followed.PLACES_MAX followed), UNAVAILABLE (I/O error,
        closed). The messages must not change afterwards.
        """
        assert len(streams) == len(messages) > 0, "a batch has messages, and each its stream"
        done: asyncio.Future[int] = self._loop.create_future()
        try:
            streams = self._numbered_anew(streams, messages) if self.streams_forgotten else streams
            if self._closed:
                raise UStatusError(UCode.UNAVAILABLE, f"the log {self.name} is closed")
            if self._queued and self._queued + len(messages) > APPEND_RECORDS_MAX:
                self.dropped["append_queue_full"] += len(messages)
                what = f"{self._queued} messages wait for the log {self.name} already: send slower"
                raise UStatusError(UCode.RESOURCE_EXHAUSTED, what)
            if followed is not None:
                self._followed.begin(followed, len(messages))
        except UStatusError as error:
            done.set_exception(error)
            return done
        append = Append(list(streams), list(messages), done, followed=followed)
        if followed is not None:
            append.epochs = followed.epochs
        if self._keeper is not None:
            self._keeper.mark(self, append)
        self._queued += len(append.messages)
        self._appending.add(append)
        self._storage.append(append)
        return done

    def keep_epochs(self, keeper: Keeper) -> None:
        """It looks at each append: which epochs the messages are of, and what is to be told in front of and behind
        them."""
        self._keeper = keeper

    def _appended_to(self) -> Iterable[int]:
        return (stream for append in self._appending for stream in append.streams)

    def _on_written(self, written: Written) -> None:
        """On the loop, after each transaction, and after each step of retention."""
        for passed in written.passed:
            for callback in list(self._passed_callbacks):
                callback(passed)
        for number in written.acknowledged:
            self._ledger.acknowledge_one(number)
        self._take_over(written.extent)
        batch = written.batch
        if batch is None:
            self.drop_ended_leases()
            return
        for waiting in self._saving if written.error is None else ():
            if not waiting.done():
                waiting.set_result(None)
        self._queued -= sum([len(append.messages) for append in batch])
        self._appending.difference_update(batch)
        if self._followed.under_way:
            self._followed.end(batch, is_committed=written.error is None)
        if written.is_damaged:
            self._note(kinds.STRUCTURE, str(written.error))
        if written.error is not None:
            self._failed(batch, written.error)
            return
        if not self.healthy:
            self.healthy, self.trouble = True, ""
            log.info("the log takes messages again", log=self.name)
        if not written.chunks:
            return
        seq = written.chunks[0].first_seq
        for append in batch:
            if not append.done.done():
                append.done.set_result(seq + append.lead)
            seq += len(append.messages)
        self._grown.set()
        for heard in list(self._append_callbacks):
            heard()

    def _take_over(self, extent: Extent) -> None:
        self.oldest_seq = extent.oldest_seq  # of the records there are; 0: none
        self.newest_seq = extent.newest_seq  # the highest that was ever given out; 0: none
        self.floor_seq = extent.floor_seq
        self.stored_bytes = extent.stored_bytes  # of the records there are
        # what all files really take, the write-ahead log included, and what is left on their disk; sampled every second
        self.disk_bytes, self.disk_free_bytes = extent.disk_bytes, extent.disk_free_bytes  # volatile: 0
        # `retention_bytes`, or less where the disk has less
        self.disk_limit_bytes = extent.bytes_max or self.retention_bytes

    def _failed(self, batch: list[Append], error: UStatusError) -> None:
        self.trouble = error.message
        if self.healthy:
            self.healthy = False
            log.error("the log can't be written; messages are refused until it can", log=self.name, error=str(error))
        self.dropped["refused"] += sum(len(append.messages) for append in batch)
        if self._keeper is not None:
            self._keeper.failed(self, batch)
        for append in batch:
            if not append.done.done():
                append.done.set_exception(error)
        self._storage.flush_soon(PROBE_MS)

    async def look(self) -> None:
        """Find out what is wrong with its file though nobody appends; then it is unhealthy a moment later."""
        if self.healthy:
            await self._storage.look()

    # -- what is followed into it

    def places(self) -> dict[str, bytes]:
        """By key: how far it has come in the logs that are followed into it. As committed; those that only moved may
        not be on disk yet."""
        return dict(self._followed.known)

    def place(self, key: str) -> bytes | None:
        """One of `places`; None if that log was never followed, or its place was lost with a damaged file."""
        return self._followed.known.get(key)

    def keep_place(self, key: str, place: bytes | None, *, at_once: bool = False) -> None:
        """Nothing up to there was for us, so no record brings it; None: forget it. Not while an append with this key is
        under way: it could be written ahead of the records.

        The first one is on disk soon, since without it nobody knows where to go on; one that has only moved as late as
        such a cursor, and to lose that does no harm; `at_once`: it does. Raises RESOURCE_EXHAUSTED beyond
        history.log.followed.PLACES_MAX.
        """
        is_first = at_once or self.place(key) is None
        if self._followed.keep(key, place):
            self._storage.save(lambda writer: writer.keep_place(key, place, is_first=is_first), at_once=is_first)

    async def saved(self) -> None:
        """Until all places and cursors of now are on disk, which may be long if it can't be written."""
        for _ in range(2 if self.durable else 0):  # the first may have begun without them
            waiting: asyncio.Future[None] = self._loop.create_future()
            self._saving.add(waiting)
            self._storage.save(lambda writer: writer.save_moved(), at_once=False)
            self._storage.flush_soon(0)
            try:
                await waiting
            finally:
                self._saving.discard(waiting)

    # -- who has confirmed what

    def cursor(self, name: str) -> int | None:
        """The seq up to which `name` has confirmed, or None if there is no such cursor."""
        cursor = self._cursors.get(name)
        return None if cursor is None else cursor.seq

    def cursor_row(self, name: str) -> Cursor | None:
        """All that is known of one cursor."""
        return self._cursors.get(name)

    @property
    def cursor_count(self) -> int:
        return len(self._cursors)

    def cursors(self) -> dict[str, int]:
        return {name: cursor.seq for name, cursor in self._cursors.items()}

    def cursor_rows(self) -> dict[str, Cursor]:
        """All that is known of each cursor."""
        return dict(self._cursors)

    def set_cursor(
        self,
        name: str,
        seq: int,
        *,
        lease_ms: int | None = None,
        holds: bool = False,
        absent_ms: int = 0,
        holder: str | None = None,
    ) -> None:
        """On disk with the next transaction, or within disk.FLUSH_MS; where it has only moved on, and not far, within
        writer.CURSORS_IDLE_S, and sooner while messages come.

        What the cursor still needs is kept beyond the retention by age (never beyond that by bytes): with `lease_ms`
        until the lease ends, and then the cursor is gone; with `holds` until it is dropped. `absent_ms` is kept for the
        caller. Raises RESOURCE_EXHAUSTED beyond CURSORS_MAX.
        """
        assert lease_ms is None or not holds, "a cursor that holds has no lease: it never ends by itself"
        known = self._cursors.get(name)
        if known is None and len(self._cursors) >= CURSORS_MAX:
            self.drop_ended_leases()
            if len(self._cursors) >= CURSORS_MAX:
                what = f"the log {self.name} has {CURSORS_MAX} cursors, which is the limit"
                raise UStatusError(UCode.RESOURCE_EXHAUSTED, what)
        if holder is None:
            holder = "" if known is None else known.holder
        cursor = Cursor(seq, None if lease_ms is None else self._now_ms() + lease_ms, holds, absent_ms, holder)
        if cursor == known:
            return
        self._cursors[name] = cursor
        if cursor.lease_until_ms is not None:
            self._next_lease_end_ms = min(self._next_lease_end_ms, cursor.lease_until_ms)
        if known is not None and self._has_only_moved(known, cursor):
            records = max(0, seq - known.seq)
            self._storage.save(lambda writer: writer.move_cursor(name, cursor, records), at_once=False)
        else:
            self._storage.save(lambda writer: writer.save_cursor(name, cursor))

    def _has_only_moved(self, known: Cursor, cursor: Cursor) -> bool:
        """And what is on disk of it holds at least until this will be."""
        if cursor.seq < known.seq:  # back: what is on disk would lose what lies between
            return False
        if known.lease_until_ms is None or cursor.lease_until_ms is None:
            kept = (known.holds, known.lease_until_ms, known.holder)
            return kept == (cursor.holds, cursor.lease_until_ms, cursor.holder)
        return known.lease_until_ms - self._now_ms() >= LEASE_LEFT_MS

    def drop_cursor(self, name: str) -> None:
        """Nothing happens if there is none."""
        if self._cursors.pop(name, None) is not None:
            self._storage.save(lambda writer: writer.save_cursor(name, None))

    def drop_ended_leases(self) -> None:
        now = self._now_ms()
        if now <= self._next_lease_end_ms:
            return
        leased = [(one.lease_until_ms, name) for name, one in self._cursors.items() if one.lease_until_ms is not None]
        self._next_lease_end_ms = min((until for until, _ in leased if until >= now), default=NOBODY)
        for until, name in leased:
            if until < now:
                self.drop_cursor(name)

    def keep_after(self) -> int:
        """Beyond this seq somebody needs what is old. From any thread: it only reads, from a copy made in one step."""
        now, cursors = self._now_ms(), list(self._cursors.values())
        held = (
            one.seq for one in cursors if one.holds or (one.lease_until_ms is not None and one.lease_until_ms >= now)
        )
        return min(held, default=NOBODY)

    def owed_after(self) -> int:
        """Beyond this seq some endpoint was promised everything. From any thread, as `keep_after`."""
        cursors = list(self._cursors.values())
        return min((one.seq for one in cursors if one.holds or one.holder), default=NOBODY)

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
        if rows:
            self._storage.save(lambda writer: writer.save_damage(rows))

    def acknowledge_passing(self, after_ms: int) -> list[Damage]:
        """What is of a kind in history.file.damage.PASSING, and was found `after_ms` ago or earlier, counts as
        acknowledged
        from now on: what that is. A time that lies so far ahead was of a wrong clock, and counts alike."""
        now_ms = self._now_ms()
        due = [one for one in self.damage if one.kind in kinds.PASSING and abs(now_ms - one.when_ms) >= after_ms]
        if due:
            rows = self._ledger.acknowledge(due.__contains__)
            self._storage.save(lambda writer: writer.save_damage(rows))
        return due

    def knows_lost(self, incarnation: bytes) -> bool:
        """True if that log was here once, and was lost with its records."""
        return self._ledger.knows(incarnation)

    def note_loss(self, kind: str, detail: str) -> None:
        """Something that is not of this log was lost (history.file.damage.OTHERS): kept with its damage, until a
        person has
        acknowledged it."""
        assert kind in kinds.OTHERS, "the log finds its own damage by itself"
        if not self._note(kind, detail):
            row = self._ledger.renew(self._found(kind, detail))
            if row is not None:
                self._storage.save(lambda writer: writer.save_damage([row]))

    def _found(self, kind: str, detail: str, after: int = 0, before: int = 0) -> Damage:
        return Damage(self._now_ms(), kind, after, before, self.incarnation, "", detail)

    def _note(self, kind: str, detail: str, after: int = 0, before: int = 0) -> bool:
        """False: it was known."""
        damage = self._found(kind, detail, after, before)
        row = self._ledger.add(damage)
        if row is None:
            return False
        self._count(damage)
        self._storage.save(lambda writer: writer.save_damage([row]))
        for callback in list(self._damage_callbacks):
            callback(damage)
        return True

    def _count(self, damage: Damage) -> None:
        self.dropped[_REASONS.get(damage.kind, "damaged_rows")] += 1

    # -- read

    def on_append(self, callback: Callable[[], None]) -> Callable[[], None]:
        """`callback()` on the loop after each commit, when the records can be read. Returns what ends it."""
        self._append_callbacks.append(callback)

        def end() -> None:
            if callback in self._append_callbacks:
                self._append_callbacks.remove(callback)

        return end

    async def wait(self, after: int) -> None:
        """Until there is a seq greater than `after`. Raises UNAVAILABLE if the log is closed meanwhile."""
        while self.newest_seq <= after:
            if self._closed:
                raise UStatusError(UCode.UNAVAILABLE, f"the log {self.name} is closed")
            self._grown.clear()
            await self._grown.wait()

    @property
    def in_memory_after(self) -> int:
        """Beyond this seq `tail` has everything."""
        return self._tail.after

    def tail(self, after: int) -> list[Chunk] | None:
        """All after `after` at once, or None if that reaches further back than the tail in memory."""
        return self._tail.read(after) if after >= self._tail.after else None

    def tail_share(self, after: int) -> float:
        """Of the memory for the newest records: so much those after `after` take; more than 1 if it has not all."""
        tail = self._tail
        return (self.newest_seq - after) / max(self.newest_seq - tail.after, 1) * tail.bytes / tail.bytes_max

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
        limits = Limits(after, until, max_records, max_bytes, strict)
        if after >= until:
            return Scan(*limits)
        if max(after, self.floor_seq) >= self._tail.after:
            found = self._scan_tail(streams, limits._replace(after=max(after, self.floor_seq)))
        else:
            newest = self._newest(streams)
            found = await self._storage.run(self._storage.reader.scan, limits, streams, newest, self.holes)
            if found.is_index_wrong:
                self._storage.save(Writer.distrust_index, at_once=False)
                self._note(kinds.INDEX, "the index of streams is made anew at the next start")
            for low, high, why in found.damaged:
                self._note(kinds.RECORDS, why, low, high)
        found.gaps.extend(
            (max(after, low), high) for low, high in self.holes if low < found.covered and after < high - 1
        )
        return found

    def _newest(self, streams: Set[int] | None) -> dict[int, int] | None:
        """By which the reader notices an index that is wrong. None: there are so many that it looks into every chunk
        anyway."""
        if streams is None or len(streams) > NEWEST_COPIED_MAX:
            return None
        table = self._table
        return {id: table[id].newest_seq for id in streams if id in table}

    def _scan_tail(self, streams: Set[int] | None, limits: Limits) -> Scan:
        # the floor also of what is still in memory: retention means the same to every reader
        found = Scan(*limits, floor_seq=self.floor_seq)
        chunks = self._tail.read(found.after, TAIL_SCAN_CHUNKS_MAX)
        for chunk in chunks:
            if chunk.first_seq > found.until:
                break
            found.take(chunk, streams)
            if found.full:
                return found
        if len(chunks) < TAIL_SCAN_CHUNKS_MAX:
            found.covered = max(found.covered, found.until)
        return found

    async def seq_of_id(self, id: bytes) -> int | None:
        """The seq of the newest record with this message id (16 bytes, big endian)."""
        return await self._storage.run(self._storage.reader.find_id, id)

    async def seq_before_time(self, time_ms: int) -> int:
        """The seq after which everything appended after `time_ms` (Unix milliseconds) comes."""
        first = await self._storage.run(self._storage.reader.first_after_time, time_ms)
        return self.newest_seq if first is None else min(first - 1, self.newest_seq)

    async def recent_ids(self, count: int) -> list[tuple[int, bytes]]:
        """Stream and id (16 bytes) of the newest `count` records, oldest first: what a duplicate window needs after a
        restart.

        The id counts together with the source: another's message may have the same one.
        """
        return await self._storage.run(self._storage.reader.recent_ids, count)


__all__ = ["Chunk", "Cursor", "Damage", "Log", "Passed", "Scan", "Stream", "TopicsFullError"]
