"""The log: every message once, numbered, in order. The egress queue, the history and Spark's offsets are cursors in it.

append -> storage (a file, or memory) -> on_written -> the append's future, on_append: pumps, long polls
                       |
                     tail (memory) <- tail, scan, read -> storage: records that are no longer in memory

All methods belong to one event loop, and none blocks it.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Set
from pathlib import Path
from typing import Final, Protocol, Self

import structlog

from history.file import damage as kinds
from history.file.damage import Damage, Ledger
from history.file.load import Cursor
from history.file.reader import ScanLimits
from history.file.store import RETENTION_BYTES, LogChanges
from history.file.writer import GATHER_MS, Append, FollowedFrom, Retention, Written
from history.log.cursors import Cursors, FollowedLogs
from history.log.storage import DurableStorage, Storage, VolatileStorage
from history.log.streams import STREAMS_MAX, StreamTable, TopicsFullError
from history.records.chunk import Chunk, RetentionLoss, Scan, Stream
from storage.runtime import REAL, Runtime
from uprotocol import callbacks
from uprotocol.encoded import Carried
from uprotocol.status import UStatusError
from uprotocol.v1.ucode_pb2 import UCode

RETENTION_MS: Final = 7 * 24 * 3_600_000  # a vehicle that was in the workshop for a week finds its history again
# some seconds of the highest rate measured: pumps and pollers at the head never read the disk
TAIL_BYTES_MAX: Final = 32 << 20
# queued for the writer: half a second of its speed; beyond that the disk is too slow for the sender
APPEND_RECORDS_MAX: Final = 65_536
# A log that can't be written tries again this often, even if nobody appends: a sender that sees it unhealthy may not
# send.
PROBE_MS: Final = 1_000
READ_RECORDS_MAX: Final = 2_048  # of one read, by default
READ_BYTES_MAX: Final = 4 << 20
NEWEST_COPIED_MAX: Final = 10_000  # streams of one scan on disk whose newest seqs go to the reader: a millisecond

_REASONS: Final = {  # of damage: the keys of `dropped`
    **dict.fromkeys((kinds.FILE, kinds.MISSING, kinds.STRUCTURE), "damaged_file"),
    kinds.COMMITS: "lost_commits",
    kinds.RECORDS: "corrupt_chunks",
    kinds.NETWORK: "network_loss",
    kinds.SUBSCRIPTIONS: "subscriptions_loss",
    kinds.DROPPED: "dropped_messages",
    kinds.EMPTIED: "emptied",
}

log = structlog.get_logger()


class EpochMarker(Protocol):
    """Sets the epochs of messages. On the event loop."""

    def mark(self, target: Log, append: Append) -> None:
        """Called before the storage of `target` gets `append`: set its epochs, and add the frontiers."""

    def failed(self, target: Log, appends: Sequence[Append]) -> None:
        """These appends are not stored in `target`. It must not append."""


class LogLosses:
    """What is known to be lost or damaged; it is saved in the log's file until a person has acknowledged it. `dropped`
    counts by reason what could not be kept or read."""

    def __init__(self, storage: Storage, now_ms: Callable[[], int]) -> None:
        self._storage, self._now_ms, self._incarnation = storage, now_ms, storage.loaded.incarnation
        self.ledger: Ledger = storage.loaded.ledger
        self.dropped: Counter[str] = Counter()
        self._callbacks: list[Callable[[Damage], None]] = []
        for damage in storage.loaded.found:
            self._count(damage)

    def on_found(self, callback: Callable[[Damage], None]) -> None:
        """`callback(damage)` on the loop when new damage is found. What was found when the log was opened is in
        `Log.damage` already."""
        self._callbacks.append(callback)

    def acknowledge(self) -> None:
        """A person has seen all open damage."""
        if rows := self.ledger.acknowledge():
            self._storage.save(LogChanges(damage=rows))

    def acknowledge_passing(self, after_ms: int) -> list[Damage]:
        """Acknowledge damage of a kind in history.file.damage.PASSING that was found at least `after_ms` ago, and
        return it. A time that lies as far ahead is of a wrong clock, and is treated the same way."""
        now_ms = self._now_ms()
        passing = (damage for damage in self.ledger.open if damage.kind in kinds.PASSING)
        due = [damage for damage in passing if abs(now_ms - damage.when_ms) >= after_ms]
        if due:
            self._storage.save(LogChanges(damage=self.ledger.acknowledge(due.__contains__)))
        return due

    def report(self, kind: str, detail: str) -> None:
        """Report a loss of another part (history.file.damage.OTHERS): it is kept until a person has acknowledged it."""
        assert kind in kinds.OTHERS, "the log finds its own damage by itself"
        if not self.note(kind, detail):
            row = self.ledger.renew(self._found(kind, detail))
            if row is not None:
                self._storage.save(LogChanges(damage=[row]))

    def put(self, kind: str, detail: str, number: int | None = None) -> int:
        """Keep a loss of another part that grows, until a person has acknowledged it. `number`: what the last call for
        the same loss has returned; once that is acknowledged, a new loss begins. Returns the number for the next call.

        Each call is a write to the disk. The caller bounds how many losses are open."""
        assert kind in kinds.OTHERS, "the log finds its own damage by itself"
        damage = self._found(kind, detail)
        is_new = number is None or not self.ledger.is_open(number)
        number, row = self.ledger.put(damage, None if is_new else number)
        self._storage.save(LogChanges(damage=[row]))
        if is_new:
            self._tell(damage)
        return number

    def note(self, kind: str, detail: str, after: int = 0, before: int = 0) -> bool:
        """Note damage of this log. Returns False if it was known."""
        damage = self._found(kind, detail, after, before)
        row = self.ledger.add(damage)
        if row is None:
            return False
        self._storage.save(LogChanges(damage=[row]))
        self._tell(damage)
        return True

    def _tell(self, damage: Damage) -> None:
        self._count(damage)
        for callback in list(self._callbacks):
            callback(damage)

    def _found(self, kind: str, detail: str, after: int = 0, before: int = 0) -> Damage:
        return Damage(self._now_ms(), kind, after, before, self._incarnation, "", detail)

    def _count(self, damage: Damage) -> None:
        self.dropped[_REASONS.get(damage.kind, "damaged_rows")] += 1


class Log:
    """See `open`. `durable`: an append's future resolves when it is committed to disk; otherwise a ring in memory.

    Seqs rise by one with each record, and start with 1. They leap over records that were lost with a damaged file,
    which every reader learns as a gap. `incarnation` is 16 random bytes that name this log: a log that was lost and
    created again has another one. `dropped` counts by reason what could not be kept or read. `new_since_ms` (Unix):
    when this process made the file, with nothing known of an earlier one; else None.

    Its own state: `extent` and the seqs of it, which each transaction and each step of retention replace; what is under
    way (`_appending`, `_queued`, `_saving`); how the last transaction ended (`failures`, `healthy`, `trouble`). All
    else has an owner of its own: `stream_table`, `cursors`, `followed`, `losses` and the storage, whose tail is read
    here.
    """

    def __init__(
        self,
        name: str,
        storage: Storage,
        retention_ms: int,
        retention_bytes: int,
        streams_max: int,
        authority_streams_max: int | None,
        forget_after_s: float | None,
        now_ms: Callable[[], int],
    ) -> None:
        """Use `open`."""
        loaded = storage.loaded
        self._storage, self._loop = storage, asyncio.get_running_loop()
        self.name, self.incarnation, self.durable = name, loaded.incarnation, storage.durable
        self.new_since_ms, self.retention_ms, self.retention_bytes = loaded.new_since_ms, retention_ms, retention_bytes
        self.holes, self.predecessors = list(loaded.holes), loaded.predecessors
        self.losses = LogLosses(storage, now_ms)
        self.dropped = self.losses.dropped
        self.cursors = Cursors(name, storage, now_ms, loaded.cursors, lost=loaded.cursors_lost)
        self.followed = FollowedLogs(name, storage)
        limits = (streams_max, authority_streams_max, forget_after_s)
        table = self.stream_table = StreamTable(storage, lambda: self.floor_seq, lambda: self._is_writable, *limits)
        # what callers ask a log about its streams: see there
        self.stream_id, self.known_id, self.publishes_from = table.id_of, table.known_id, table.publishes_from
        self.topics_of, self.frontier_ids = table.topics_of, table.frontier_ids
        self.on_forgotten, self.keep_streams = table.on_forgotten, table.keep
        # failed transactions that are known; appends that were made before the last of them are refused, too
        self.failures = 0
        self.healthy = True  # the last transaction has succeeded
        self.trouble = ""  # why it has failed
        self._tail, self.durations = storage.tail, storage.durations
        self._closed = False
        self._appending: set[Append] = set()  # given to the storage, not yet reported by it
        self._queued = 0  # messages of those
        self._saving: set[asyncio.Future[None]] = set()  # of `saved`
        self._grown = asyncio.Event()  # or closed
        self._append_callbacks: list[Callable[[], None]] = []
        self._loss_callbacks: list[Callable[[RetentionLoss], None]] = []
        self._epoch_marker: EpochMarker | None = None
        self._without_epochs = set[int]()
        self.keep_streams(lambda: (stream for append in self._appending for stream in append.streams))
        extent = self.extent = loaded.extent  # disk_bytes, disk_free_bytes: sampled every second
        self.oldest_seq = extent.oldest_seq  # of the records that are there; 0: none
        self.newest_seq = extent.newest_seq  # the highest that was ever given out; 0: none
        self.floor_seq = extent.floor_seq  # records up to here were deleted by retention; 0: none was ever deleted

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
        """The log in the SQLite file `path`, which is created if it does not exist; for None a volatile log, which has
        `retention_bytes` of memory.

        It knows at most `streams_max` streams, `authority_streams_max` of one source authority (None: no such limit),
        and forgets streams without a record for `forget_after_s` (None: streams.FORGET_AFTER_S).

        A message waits at most `gather_ms` for others that share its commit, and only while others come.

        Raises UStatusError: ALREADY_EXISTS if another process has it open, FAILED_PRECONDITION if the file is of a
        newer program or no log, RESOURCE_EXHAUSTED if the disk is full (nothing is changed: try again), UNAVAILABLE on
        I/O errors. A damaged file is moved aside, never deleted; what can't be saved of it is in `damage`.
        """
        assert min(retention_ms, retention_bytes) > 0, "a log keeps records"
        assert streams_max > 0, "a log knows streams"
        now_ms = now_ms or runtime.now_ms
        limits = (retention_bytes, tail_bytes, gather_ms)
        storage: Storage = (
            VolatileStorage(runtime.random_bytes(16), retention_bytes, now_ms)
            if path is None
            else await DurableStorage.open(Path(path), name, *limits, now_ms, runtime)
        )
        streams = (streams_max, authority_streams_max, forget_after_s)
        opened = cls(name, storage, retention_ms, retention_bytes, *streams, now_ms)
        await storage.run(opened.stream_table.index)
        retention = Retention(retention_ms, opened.cursors.keep_after, opened.cursors.owed_after)
        storage.start(retention, opened._on_written)
        return opened

    def limit(self, retention_ms: int, retention_bytes: int, gather_ms: float = GATHER_MS) -> None:
        """Change what `open` was given. What is too much now is deleted by the next steps of retention."""
        assert min(retention_ms, retention_bytes) > 0, "a log keeps records"
        self.retention_ms, self.retention_bytes = retention_ms, retention_bytes
        self._storage.limit(retention_ms, retention_bytes, gather_ms)

    async def close(self) -> None:
        """Write everything that is queued, and close. May be called twice."""
        if not self._closed:
            self._closed = True
            self.stream_table.close()
            await self._storage.close()
            self._grown.set()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def __repr__(self) -> str:
        state = "closed" if self._closed else "healthy" if self.healthy else "not healthy"
        return f"Log({self.name}, {state}, {self.oldest_seq}..{self.newest_seq})"

    @property
    def _is_writable(self) -> bool:
        return self.healthy and not self._closed

    @property
    def disk_limit_bytes(self) -> int:
        """Returns how much its files may take: less than `retention_bytes` where the disk has less."""
        return min(self.extent.bytes_max or self.retention_bytes, self.retention_bytes)

    @property
    def damage(self) -> list[Damage]:
        """What is known to be lost or damaged and was not acknowledged by a person; kept over restarts."""
        return self.losses.ledger.open

    # -- streams

    def stream(self, id: int) -> Stream:
        """Returns a known stream; see `knows_stream`."""
        return self.stream_table.by_id[id]

    def knows_stream(self, id: int) -> bool:
        """Returns False for a forgotten stream, or for a number from damaged bytes."""
        return id in self.stream_table.by_id

    def streams(self) -> list[Stream]:
        """Returns all streams in the order of their numbers."""
        return list(self.stream_table.by_id.values())

    @property
    def stream_count(self) -> int:
        return len(self.stream_table.by_id)

    # -- append

    def append(
        self, streams: list[int], messages: Sequence[Carried], followed: FollowedFrom | None = None
    ) -> asyncio.Future[int]:
        """Resolves with the first seq when all messages are committed; the others follow it without a gap.

        `streams` has the `stream_id` of each message. `followed`: the messages come from another log, and the position
        there is committed with them. Of several appends with one key the last position is valid, so after a failure
        none may be appended that continues behind the failed one. Fails with UStatusError, and stores nothing:
        RESOURCE_EXHAUSTED (disk full, more than APPEND_RECORDS_MAX queued, or more than
        history.log.cursors.FOLLOWED_MAX followed logs), UNAVAILABLE (I/O error, closed). The messages must not change
        afterwards.
        """
        assert len(streams) == len(messages) > 0, "a batch has messages, and a stream for each"
        done: asyncio.Future[int] = self._loop.create_future()
        try:
            if self.stream_table.forgotten_count:
                streams = self.stream_table.renumbered(streams, messages)
            if self._closed:
                raise UStatusError(UCode.UNAVAILABLE, f"the log {self.name} is closed")
            if self._queued and self._queued + len(messages) > APPEND_RECORDS_MAX:
                self.dropped["append_queue_full"] += len(messages)
                what = f"{self._queued} messages wait for the log {self.name} already: send slower"
                raise UStatusError(UCode.RESOURCE_EXHAUSTED, what)
            if followed is not None:
                self.followed.begin(followed, len(messages))
        except UStatusError as error:
            done.set_exception(error)
            return done
        append = Append(list(streams), list(messages), done, self.failures, followed)
        if followed is not None:
            append.epochs = followed.epochs
        if self._epoch_marker is not None and not self._without_epochs.issuperset(streams):
            self._epoch_marker.mark(self, append)
        self._queued += len(append.messages)
        self._appending.add(append)
        self._storage.append(append)
        return done

    def keep_epochs(self, marker: EpochMarker, without: set[int]) -> None:
        """`marker` sets the epochs of each append that is not of these streams alone, and adds frontiers in front of
        and behind its messages."""
        self._epoch_marker, self._without_epochs = marker, without

    def _on_written(self, written: Written) -> None:
        """On the loop, after each transaction, and after each step of retention."""
        # 1. What each of both reports.
        self.failures += written.is_new_failure
        for id, progress in written.progress.items():
            self.stream_table.by_id[id].move(progress)
        for loss in written.losses:
            for callback in list(self._loss_callbacks):
                callback(loss)
        for number in written.acknowledged:
            self.losses.ledger.acknowledge_one(number)
        extent = self.extent = written.extent
        self.oldest_seq, self.newest_seq, self.floor_seq = extent.oldest_seq, extent.newest_seq, extent.floor_seq
        # 2. A step of retention is over.
        batch = written.batch
        if batch is None:
            self.cursors.drop_ended_leases()
            return
        # 3. A transaction is over: what was under way no longer is.
        for waiting in self._saving if written.error is None else ():
            if not waiting.done():
                waiting.set_result(None)
        self._queued -= sum([len(append.messages) for append in batch])
        self._appending.difference_update(batch)
        if self.followed.under_way:
            self.followed.end(batch, is_committed=written.error is None)
        if written.is_damaged:
            self.losses.note(kinds.STRUCTURE, str(written.error))
        if written.error is not None:
            self._failed(batch, written.error)
            return
        # 4. It has succeeded, and may have stored records.
        if not self.healthy:
            self.healthy, self.trouble = True, ""
            log.info("the log takes messages again", log=self.name, _kind="writing")
        if not written.chunks:
            return
        seq = written.chunks[0].first_seq
        for append in batch:
            if not append.done.done():
                append.done.set_result(seq + append.lead)
            seq += len(append.messages)
        self._grown.set()
        for notify in list(self._append_callbacks):
            notify()

    def _failed(self, batch: list[Append], error: UStatusError) -> None:
        was_healthy, self.healthy, self.trouble = self.healthy, False, error.message
        if was_healthy:
            what = "the log can't be written; messages are refused until it can"
            log.error(what, log=self.name, error=str(error), _kind="writing")
        self.dropped["refused"] += sum(len(append.messages) for append in batch)
        if self._epoch_marker is not None:
            self._epoch_marker.failed(self, batch)
        for append in batch:
            if not append.done.done():
                append.done.set_exception(error)
        self._storage.flush_soon(PROBE_MS)

    async def check_file(self) -> None:
        """Check whether the file is still in its place; if not, the log is unhealthy a moment later."""
        if self.healthy:
            await self._storage.check_file()

    async def saved(self) -> None:
        """Wait until all cursors and positions of now are on disk, however long it can't be written."""
        for _ in range(2 if self.durable else 0):  # the first transaction may have begun without them
            waiting: asyncio.Future[None] = self._loop.create_future()
            self._saving.add(waiting)
            self._storage.flush_soon(0, with_lazy=True)
            try:
                await waiting
            finally:
                self._saving.discard(waiting)

    def on_retention_loss(self, callback: Callable[[RetentionLoss], None]) -> Callable[[], None]:
        """`callback(loss)` on the loop, in the step in which `floor_seq` rises, if retention has deleted records that a
        cursor with `holds`, or with a holder, had not passed. It must not append to this log. Returns a function
        that removes the callback."""
        return callbacks.add(self._loss_callbacks, callback)

    # -- read

    def on_append(self, callback: Callable[[], None]) -> Callable[[], None]:
        """`callback()` on the loop after each commit, when the records can be read. Returns a function that removes the
        callback."""
        return callbacks.add(self._append_callbacks, callback)

    async def wait(self, after: int) -> None:
        """Wait for a seq greater than `after`. Raises UNAVAILABLE if the log is closed meanwhile."""
        while self.newest_seq <= after:
            if self._closed:
                raise UStatusError(UCode.UNAVAILABLE, f"the log {self.name} is closed")
            self._grown.clear()
            await self._grown.wait()

    @property
    def in_memory_after(self) -> int:
        """`tail` has all records beyond this seq."""
        return self._tail.after

    def tail(self, after: int) -> list[Chunk] | None:
        """Returns all records after `after`, or None if not all of them are in memory."""
        return self._tail.read(after) if after >= self._tail.after else None

    def tail_share(self, after: int) -> float:
        """Returns which share of the tail's memory the records after `after` take; above 1 if some are not there."""
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
        """Returns the next records after `after` up to and including `until`, of `streams` only if given (chunks then
        have holes); empty at the end.

        Returns at least one record even if it exceeds `max_bytes` (of messages). Damaged records are skipped: `scan`
        reports them.
        """
        end = self.newest_seq if until is None else min(until, self.newest_seq)
        while after < end:
            scan = await self.scan(after, max_records=max_records, max_bytes=max_bytes, streams=streams, until=end)
            if scan.chunks:
                return scan.chunks
            after = scan.covered
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
        bare: bool = False,
    ) -> Scan:
        """One bounded step of `read`. It also reports how far it came (beyond `after`, unless that is the end) and what
        is damaged. `strict`: not even the first record may exceed `max_bytes`. `bare`: no messages, nor their damage.
        """
        until = self.newest_seq if until is None else min(until, self.newest_seq)
        limits = ScanLimits(after, until, max_records, max_bytes, strict, bare)
        if after >= until:
            return Scan(*limits)
        if max(after, self.floor_seq) >= self._tail.after:
            # the floor also hides records that are still in memory: retention is the same for every reader
            limits = limits._replace(after=max(after, self.floor_seq))
            scan = self._tail.scan(Scan(*limits, floor_seq=self.floor_seq), streams)
        else:
            newest = _newest_seqs(self.stream_table.by_id, streams)
            scan = await self._storage.run(self._storage.reader.scan, limits, streams, newest, self.holes)
            if scan.is_index_wrong:
                self._storage.save(LogChanges(distrusts_index=True))
                self.losses.note(kinds.INDEX, "the index of streams is rebuilt at the next start")
            for low, high, why in scan.damaged:
                self.losses.note(kinds.RECORDS, why, low, high)
        scan.gaps.extend((max(after, low), high) for low, high in self.holes if low < scan.covered and after < high - 1)
        return scan

    async def times_of(self, seqs: Sequence[int]) -> list[int]:
        """Returns when each of these records was appended, in Unix milliseconds; 0: damaged."""
        return await self._storage.run(self._storage.reader.times_of, seqs)

    async def seq_of_id(self, id: bytes) -> int | None:
        """Returns the seq of the newest record with this message id (16 bytes, big endian)."""
        return await self._storage.run(self._storage.reader.find_id, id)

    async def seq_before_time(self, time_ms: int) -> int:
        """Returns a seq so that all records appended after `time_ms` (Unix milliseconds) are beyond it."""
        first = await self._storage.run(self._storage.reader.first_after_time, time_ms)
        return self.newest_seq if first is None else min(first - 1, self.newest_seq)

    async def recent_ids(self, count: int) -> list[tuple[int, bytes]]:
        """Returns the stream and the id (16 bytes) of the newest `count` records, oldest first, for a duplicate window
        after a restart. An id is unique only together with its source."""
        return await self._storage.run(self._storage.reader.recent_ids, count)


async def find_ids(durable: Log, ids: Set[bytes], after: int, until: int) -> tuple[dict[tuple[int, bytes], int], int]:
    """See Reader.find_ids. Of a durable log."""
    return await durable._storage.run(durable._storage.reader.find_ids, ids, after, until)


def position_before(restored: Log, positions: Mapping[bytes, int]) -> tuple[int, bytes]:
    """Returns the furthest of `positions`, by incarnation, in a log from a copy of which `restored` was made, as far as
    both are the same; (0, b""): there is none."""
    of_both = ((min(positions[old], seq), old) for old, seq in restored.predecessors.items() if old in positions)
    return max(of_both, default=(0, b""))


def _newest_seqs(streams: Mapping[int, Stream], ids: Set[int] | None) -> dict[int, int] | None:
    """Returns the newest seqs, with which the reader detects a wrong index. None: there are so many streams that it
    reads every chunk anyway."""
    if ids is None or len(ids) > NEWEST_COPIED_MAX:
        return None
    return {id: streams[id].newest_seq for id in ids if id in streams}


__all__ = ["Chunk", "Cursor", "Damage", "Log", "RetentionLoss", "Scan", "Stream", "TopicsFullError"]
