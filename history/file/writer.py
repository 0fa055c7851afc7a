"""The writer thread: it commits everything that was queued in one transaction, so that one fsync serves many appends.

loop: append -> queue -> gather -> serialise, number -> Store.commit -> loop: on_written(appends, chunks, error)
                                              seqs are final only when the commit has succeeded
Records that were followed from another log are committed together with the position there.
"""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import structlog

from history.file.load import FOLLOWED_PREFIX, Cursor, Extent
from history.file.retention import Ages
from history.file.rows import LOG
from history.file.store import LogChanges, Store
from history.records.chunk import Chunk, Origin, RetentionLoss, Stream, StreamProgress
from history.records.epoch import Epoch
from storage.faults import is_damage, is_full
from storage.runtime import Gathering, Worker
from uprotocol.encoded import Carried
from uprotocol.status import UStatusError
from uprotocol.v1.ucode_pb2 import UCode

# A larger chunk does not reduce the cost per record any further, and a reader of one record reads the whole chunk.
CHUNK_RECORDS_MAX = 512
CHUNK_BYTES_MAX: Final = 1 << 20  # of messages; a single larger message has its own chunk
TRANSACTION_RECORDS_MAX: Final = 8_192  # some 30 ms: the first record does not wait longer for the last one
RETENTION_PERIOD_MS = 1_000  # between steps of retention; sooner if the log has exceeded its bytes
IDLE_TICK_S: Final = 1.0  # an idle writer checks the clock this often
# How long a message waits for others that share its commit by default, and how many messages are enough. Other values
# and their costs: docs/adr/small-pages-and-gathered-commits.md
GATHER_MS: Final = 8.0
GATHER_RECORDS: Final = 16
# Writing a cursor costs a page, and the only effect of a lost move is that some records are sent again. So a cursor
# that has only moved is written with a commit of records: once in CURSORS_PERIOD_S, or when cursors have moved by
# CURSORS_RECORDS. It gets a commit of its own when it has moved that far, or after CURSORS_IDLE_S. The same holds for a
# position in another log that has moved although no record came from there.
CURSORS_PERIOD_S: Final = 1.0
CURSORS_RECORDS: Final = 64  # sum over all cursors that have moved
CURSORS_IDLE_S: Final = 10.0

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class FollowedFrom:
    """Where the messages of an append come from, if they were followed from another log."""

    origins: list[Origin | None]  # of each message; None: this log created the message
    key: str  # names who follows what
    position: bytes  # in the other log, after these messages; opaque
    epochs: list[Epoch | None] | None = None  # of each message, as in the other log; None: no message has one


@dataclass(eq=False, slots=True)
class Append:
    streams: list[int]
    messages: list[Carried]
    done: asyncio.Future[int]
    failures_known: int = 0  # failed transactions that the loop knew when this was queued
    followed: FollowedFrom | None = None
    epochs: list[Epoch | None] | None = None  # of each message; None: no message has one
    # of `messages`: frontiers that were added for their epochs, and that the caller of `append` does not know
    lead: int = 0  # in front
    trail: int = 0  # behind


def split(batch: list[Append], bytes_max: int) -> list[list[Append]]:
    """Split `batch` into one transaction each. A transaction has more than `bytes_max` of payload only if a single
    append has more."""
    parts: list[list[Append]] = [[]]
    size = 0
    for append in batch:
        bytes = sum([len(message.payload) for message in append.messages])
        if parts[-1] and size + bytes > bytes_max:
            parts.append([])
            size = 0
        parts[-1].append(append)
        size += bytes
    return parts


def chunk_of(
    batch: Sequence[Append],
    after: int,
    streams: Mapping[int, Stream],
    ahead: Mapping[int, StreamProgress],
    time_ms: int,
) -> Chunk:
    """Returns all messages of `batch` as records, where `after` is the last seq so far.

    `ahead`: the progress of those `streams` that have grown by a commit which the loop has not seen yet.
    """
    ids = [id for append in batch for id in append.streams]
    newest: dict[int, int] = {}
    for id in set(ids):
        progress = ahead.get(id)
        newest[id] = streams[id].newest_seq if progress is None else progress[1]
    seqs = range(after + 1, after + 1 + len(ids))
    if len(newest) == 1:  # one topic, as in many batches
        prev_seqs = [newest[ids[0]], *seqs[:-1]]
    else:
        prev_seqs = []
        for seq, id in zip(seqs, ids, strict=True):
            prev_seqs.append(newest[id])
            newest[id] = seq
    origins: list[Origin | None] = []
    epochs: list[Epoch | None] = []
    for append in batch:
        none = [None] * len(append.messages)
        if (followed := append.followed) is None:
            origins.extend(none)
        else:
            origins.extend([*none[: append.lead], *followed.origins, *none[: append.trail]])
        epochs.extend(append.epochs or none)
    return Chunk(
        seqs,
        time_ms,
        ids,
        prev_seqs,
        None,
        [message for append in batch for message in append.messages],
        origins if any(origins) else None,
        epochs if any(epochs) else None,
    )


@dataclass(slots=True)
class Retention:
    age_ms: int
    keep_after: Callable[[], int]  # the lowest seq that a cursor which holds old records has confirmed
    owed_after: Callable[[], int]  # the lowest seq that a cursor with a holder has confirmed


@dataclass(slots=True)
class Written:
    """The result of one turn of the writer, for the loop."""

    extent: Extent
    batch: list[Append] | None = None  # None: a step of retention
    chunks: list[Chunk] = field(default_factory=list)
    progress: dict[int, StreamProgress] = field(default_factory=dict)  # of the streams of these chunks, by id
    error: UStatusError | None = None
    is_new_failure: bool = False  # a transaction has just failed; False: the appends were queued before the loop knew
    is_damaged: bool = False  # the file itself can't be used any more
    losses: list[RetentionLoss] = field(default_factory=list)
    acknowledged: list[int] = field(default_factory=list)  # numbers of damage, by another process


class Writer:
    """Owns the store while it runs. `save`, `save_lazily`, `flush` and `stop` are called on the loop; so is
    `on_written`."""

    def __init__(
        self,
        store: Store,
        retention: Retention,
        on_written: Callable[[Written], None],
        now_ms: Callable[[], int],
        name: str,
        gather_ms: float,
    ) -> None:
        self._store, self._retention, self._on_written, self._now_ms = store, retention, on_written, now_ms
        self._newest_seq = store.loaded.start_seq  # the last seq that was given out for good
        self._shared = threading.Lock()  # guards the next three; held for a swap only
        self._changes = LogChanges()
        self._lazy = LogChanges()  # cursors and positions that need not be on disk soon ...
        self._lazy_since, self._lazy_records = 0.0, 0  # ... since when, and by how many records cursors have moved
        self._ending = False
        self._failing = False  # the last transaction has failed
        # On the thread. What was queued before the loop knows of all failures fails, too, or it would overtake.
        self._failures = 0
        self._error = UStatusError(UCode.UNAVAILABLE, "an append before this one failed")
        self._next_retention = self._next_sample = self._next_cursors = 0.0
        self._may_shrink = True  # the last step of retention found something to do, or was not needed
        self._monotonic = store.runtime.monotonic
        self._gathering = Gathering(gather_ms, GATHER_RECORDS)
        # None: commit what was saved although nothing is appended
        self.worker: Worker[Append | None] = store.runtime.worker(
            f"history-{name}",
            self._turn,
            batch_max=TRANSACTION_RECORDS_MAX,
            weigh=lambda job: 0 if job is None else len(job.messages),
            gathering=self._gathering,
            tick_s=IDLE_TICK_S,
            finish=store.close,
        )

    # -- loop side

    def limit(self, age_ms: int, bytes_max: int, gather_ms: float) -> None:
        """Change the limits of retention, and how long a message waits for others; see Log.limit."""
        self._retention.age_ms, self._store.bytes_max = age_ms, bytes_max
        self._gathering.window_s = gather_ms / 1_000

    def save(self, changes: LogChanges) -> None:
        """Write `changes` with the next transaction."""
        with self._shared:
            for name in changes.cursors:
                self._lazy.cursors.pop(name, None)
            for key in changes.meta:
                self._lazy.meta.pop(key, None)
            self._changes.add(changes)

    def save_lazily(self, cursors: Mapping[str, Cursor], meta: Mapping[str, Any], records: int) -> bool:
        """Write cursors and rows of META that were saved before and have only moved since, the cursors by `records`.
        Returns True if they have to be on disk soon. No append that is queued may have a position of one of these
        rows."""
        lazy = self._lazy
        with self._shared:
            if not (lazy.cursors or lazy.meta):
                self._lazy_since, self._lazy_records = self._monotonic(), 0
            lazy.cursors.update(cursors)
            lazy.meta.update(meta)
            self._lazy_records += records
            return self._lazy_records >= CURSORS_RECORDS

    def flush(self) -> None:
        """Commit what was saved, without waiting for an append."""
        self.worker.put(None)

    def include_lazy(self) -> None:
        """Let the next transaction include what was saved lazily."""
        with self._shared:
            self._next_cursors = 0.0

    async def stop(self) -> None:
        """Commit what is queued, and close the store."""
        with self._shared:
            self._ending = True
        self.flush()
        await self.worker.close()

    # -- thread side

    def _turn(self, jobs: list[Append | None]) -> None:
        batch = [job for job in jobs if job is not None]
        lazy = self._lazy
        is_late = bool(lazy.cursors or lazy.meta) and self._monotonic() >= self._lazy_since + CURSORS_IDLE_S
        flush = len(batch) < len(jobs) or is_late
        bytes_max = max(self._store.sizes.transaction, CHUNK_BYTES_MAX)
        for part in split(batch, bytes_max) if len(batch) > 1 else [batch]:
            if behind := [append for append in part if append.failures_known < self._failures]:
                part = [append for append in part if append.failures_known == self._failures]
                self._refuse(behind)
            if part or flush:
                self._write(part)
            self._retain()

    def _write(self, batch: list[Append]) -> None:
        try:
            try:
                written = self._commit(batch)
            except sqlite3.Error as error:
                self._store.file.reset()
                if not self._store.make_room(error):
                    raise
                self._next_retention = 0.0
                self._retain()  # before anything is stored, or new records would use up the free space
                written = self._commit(batch)
        except Exception as cause:
            self._fail(batch, cause)
        else:
            self._failing = False
            self.worker.tell(lambda: self._on_written(written))

    def _fail(self, batch: list[Append], cause: Exception) -> None:
        if isinstance(cause, sqlite3.Error):
            self._error = LOG.fault(cause, self._store.path, "written")
        else:
            log.exception("a batch could not be stored", records=sum(len(append.messages) for append in batch))
            self._error = UStatusError(UCode.INTERNAL, f"the batch could not be stored: {cause!r}")
        damaged = is_damage(cause)
        if damaged:
            self._store.suspect()
        self._failing = True
        self._failures += 1
        self._store.file.reset()
        self._refuse(batch, is_new=True, is_damaged=damaged)

    def _refuse(self, batch: list[Append], *, is_new: bool = False, is_damaged: bool = False) -> None:
        """`is_new`: the transaction has failed just now."""
        extent = replace(self._store.extent)
        written = Written(extent, batch, error=self._error, is_new_failure=is_new, is_damaged=is_damaged)
        self.worker.tell(lambda: self._on_written(written))

    def _commit(self, batch: list[Append]) -> Written:
        followed = {FOLLOWED_PREFIX + one.followed.key: one.followed.position for one in batch if one.followed}
        lazy, now = self._lazy, self._monotonic()
        with self._shared:  # streams that a batch names were saved before it was queued, so they are already here
            changes, self._changes = self._changes, LogChanges()
            is_due = now >= self._next_cursors or self._lazy_records >= CURSORS_RECORDS
            if (lazy.cursors or lazy.meta) and (is_due or self._ending):
                changes.cursors |= lazy.cursors  # newer than what a failed commit gave back
                changes.meta |= lazy.meta
                lazy.cursors.clear()
                lazy.meta.clear()
                self._next_cursors = now + CURSORS_PERIOD_S
            for key in lazy.meta.keys() & followed.keys():  # older: afterwards it would take these back
                changes.meta[key] = lazy.meta.pop(key)
        try:
            chunks = self._chunks(batch) if batch else []
            progress = self._store.commit(chunks, changes, followed, probe=self._failing and not batch)
        except BaseException:
            with self._shared:
                changes.add(self._changes)
                self._changes = changes
            raise
        if chunks:
            self._newest_seq = chunks[-1].last_seq
        return Written(replace(self._store.extent), batch, chunks, progress)

    def _chunks(self, batch: list[Append]) -> list[Chunk]:
        store = self._store
        whole = chunk_of(batch, self._newest_seq, store.loaded.streams, store.ahead, self._now_ms())
        chunks = []
        begin = size = 0
        for index, message in enumerate(whole.data):
            if index > begin and (index - begin >= CHUNK_RECORDS_MAX or size + len(message) > CHUNK_BYTES_MAX):
                chunks.append(whole.slice(begin, index))
                begin, size = index, 0
            size += len(message)
        return [*chunks, whole.slice(begin, len(whole))] if chunks else [whole]

    def _retain(self) -> None:
        store, retention, now = self._store, self._retention, self._monotonic()
        if now < self._next_retention and not (self._may_shrink and store.used_bytes > store.sizes.file):
            return
        is_second = now >= self._next_sample
        if is_second:
            store.allowance.refill()
        written = Written(store.extent)
        more = has_room = self._may_shrink = False
        try:
            ages = Ages.at(self._now_ms(), retention.age_ms)
            more, written.losses = store.retain(ages, retention.keep_after(), retention.owed_after())
            store.bound_wal()
            if is_second:
                written.acknowledged = store.acknowledged_elsewhere()
            self._may_shrink = more or store.used_bytes <= store.sizes.file
        except Exception as error:  # the writer must go on in any case
            store.file.reset()
            if not is_full(error, store.path):
                log.exception("retention failed; it is tried again", path=str(store.path), error=repr(error))
            elif store.make_room(error):
                has_room = self._may_shrink = True
            else:
                log.warning("retention has no room on the disk; it is tried again", path=str(store.path))
        if is_second:
            store.sample()
            self._next_sample = now + RETENTION_PERIOD_MS / 1_000
        # While there is more to delete, every other turn of the writer deletes. So appends go on, and the log shrinks
        # faster than it grows.
        self._next_retention = 0.0 if more or has_room else now + RETENTION_PERIOD_MS / 1_000
        if more:
            self.worker.put(None)
        written.extent = replace(store.extent)
        self.worker.tell(lambda: self._on_written(written))
