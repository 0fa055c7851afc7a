"""The writer thread: everything that was queued goes into one transaction, so that one fsync serves many.

loop: submit(append) -> queue -> gather -> serialise, number -> Store.commit -> loop: on_written(appends, chunks, error)
                                                  nothing is numbered for good before the commit is done
What was followed from another log is committed together with the place there up to which it brings us.
"""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import structlog

from history.epochs.frontier import Epoch
from history.file.load import FOLLOWED_PREFIX, NEXT_STREAM, Cursor, Extent
from history.file.retention import Ages
from history.file.rows import LOG, Row
from history.file.store import Changes, Store
from history.records.chunk import Chunk, Origin, Passed
from history.records.stream import Place, Stream
from storage.faults import is_damage, is_full
from storage.gathering import Gathering
from storage.worker import Worker
from uprotocol.encoded import Carried
from uprotocol.status import UStatusError
from uprotocol.v1.ucode_pb2 import UCode

# beyond it the cost per record no longer falls, and a reader of one record reads the whole chunk
CHUNK_RECORDS_MAX = 512
CHUNK_BYTES_MAX: Final = 1 << 20  # of messages; a single greater message has a chunk of its own
TRANSACTION_RECORDS_MAX: Final = 8_192  # some 30 ms: the first of them does not wait longer for the last
RETENTION_PERIOD_MS = 1_000  # sooner if the log has grown beyond its bytes
IDLE_TICK_S: Final = 1.0  # how often an idle writer looks at the clock
# How long a message waits for others that share its commit, if nobody says otherwise, and how many are enough. What
# other values cost and bring: docs/adr/small-pages-and-gathered-commits.md
GATHER_MS: Final = 8.0
GATHER_RECORDS: Final = 16
# What is lost of a cursor is sent twice, and writing it costs a page. So one that has only moved goes along with a
# commit so often, or when it has come so far; it is written alone when it has come so far, or after a while. So does a
# place in another log that has moved though nothing came from there.
CURSORS_PERIOD_S: Final = 1.0
CURSORS_RECORDS: Final = 64  # of all that have moved, together
CURSORS_IDLE_S: Final = 10.0

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Followed:
    """Where the messages of an append come from, if they were followed from another log."""

    origins: list[Origin | None]  # of each message; None: it is our own word about them
    key: str  # names who follows what
    place: bytes  # how far it has come there with these messages; opaque
    epochs: list[Epoch | None] | None = None  # of each message, as it was there; None: none has one


@dataclass(eq=False, slots=True)
class Append:
    streams: list[int]
    messages: list[Carried]
    done: asyncio.Future[int]
    failures_heard: int = 0  # failed transactions that the loop knew of when this was submitted
    followed: Followed | None = None
    epochs: list[Epoch | None] | None = None  # of each message; None: none has one
    # of the messages: frontiers of their epochs, which are not of who appends them
    lead: int = 0  # in front
    trail: int = 0  # behind


def places_of(batch: Sequence[Append]) -> dict[str, bytes]:
    """Rows of META: how far these bring us in other logs."""
    found = [append.followed for append in batch if append.followed is not None]
    return {FOLLOWED_PREFIX + followed.key: followed.place for followed in found}


def origins_of(batch: Sequence[Append]) -> list[Origin | None] | None:
    """Of each message; None: none was followed."""
    origins: list[Origin | None] = []
    for append in batch:
        followed = append.followed
        if followed is None:
            origins.extend([None] * len(append.messages))
        else:
            origins.extend([*[None] * append.lead, *followed.origins, *[None] * append.trail])
    return origins if any(origins) else None


def epochs_of(batch: Sequence[Append]) -> list[Epoch | None] | None:
    """Of each message; None: none has one."""
    if all(append.epochs is None for append in batch):
        return None
    epochs: list[Epoch | None] = []
    for append in batch:
        epochs.extend([None] * len(append.messages) if append.epochs is None else append.epochs)
    return epochs if any(epochs) else None


def parts_of(batch: list[Append], bytes_max: int) -> list[list[Append]]:
    """One at least, for a transaction each: with more than `bytes_max` of payload only where a single append has it."""
    if len(batch) < 2:
        return [batch]
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


@dataclass(slots=True)
class Retention:
    age_ms: int
    keep_after: Callable[[], int]  # the lowest seq that a cursor which holds what is old has confirmed
    owed_after: Callable[[], int]  # the lowest seq that an endpoint has confirmed


@dataclass(slots=True)
class Written:
    """What a turn of the writer has done."""

    extent: Extent
    batch: list[Append] | None = None  # None: retention
    chunks: list[Chunk] = field(default_factory=list)
    places: dict[int, Place] = field(default_factory=dict)  # to which the streams of these chunks have moved
    error: UStatusError | None = None
    is_damaged: bool = False  # it is the file itself that can't be used any more
    passed: list[Passed] = field(default_factory=list)
    acknowledged: list[int] = field(default_factory=list)  # notes of damage, by another process


class Numbering:
    """Gives out seqs and prev_seqs. What was given out since `begin` is in `streams` when it is committed, or `undo`
    takes it back."""

    def __init__(
        self, newest_seq: int, streams: Mapping[int, Stream], ahead: Mapping[int, Place] | None = None
    ) -> None:
        """`ahead`: where those of `streams` are by now that may not have moved there yet."""
        self.newest_seq = newest_seq
        self._streams, self._ahead = streams, {} if ahead is None else ahead
        self._newest: dict[int, int] = {}  # since `begin`
        self._seq_before = newest_seq

    def begin(self) -> None:
        self._newest, self._seq_before = {}, self.newest_seq

    def number(self, streams: list[int]) -> tuple[range, list[int]]:
        newest, ahead = self._newest, self._ahead
        for stream in set(streams):
            if stream not in newest:
                place = ahead.get(stream)
                newest[stream] = self._streams[stream].newest_seq if place is None else place[1]
        first = self.newest_seq + 1
        if len(newest) == 1 and streams:  # of one topic, as many batches are
            last = self.newest_seq = self.newest_seq + len(streams)
            prev_seqs = [newest[streams[0]], *range(first, last)]
            newest[streams[0]] = last
            return range(first, last + 1), prev_seqs
        prev_seqs = []
        for seq, stream in enumerate(streams, first):
            prev_seqs.append(newest[stream])
            newest[stream] = seq
        self.newest_seq += len(streams)
        return range(first, first + len(streams)), prev_seqs

    def undo(self) -> None:
        self._newest.clear()
        self.newest_seq = self._seq_before


class Writer:
    """Owns the store while it runs. `submit`, `save`, `flush`, `stop` are called on the loop; `on_written` is called
    there."""

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
        self._numbering = Numbering(store.loaded.start_seq, store.streams, store.ahead)
        self._shared = threading.Lock()  # guards the next one; held for a swap only
        self._changes = Changes()
        self._moved: dict[str, Cursor] = {}  # guarded as well: cursors that need not be on disk soon, ...
        self._kept: dict[str, Any] = {}  # ... rows of META for which that holds, too, and ...
        self._moved_since, self._moved_by = 0.0, 0  # ... when the first of them came, and how far cursors did, together
        self._ending = False
        self._failing = False  # the last transaction did not get through
        self.failures_heard = 0  # on the loop
        # on the thread: what was submitted before the loop heard of all of them fails, too, or it would overtake
        self._failures = 0
        self._error = UStatusError(UCode.UNAVAILABLE, "an append before this one failed")
        self._next_retention = self._next_sample = self._next_cursors = 0.0
        self._may_shrink = True  # retention found something to do the last time, or it was not needed
        self._monotonic = store.runtime.monotonic
        # None: commit what was saved, though nothing is appended
        self._worker: Worker[Append | None] = store.runtime.worker(
            f"history-{name}",
            self._turn,
            batch_max=TRANSACTION_RECORDS_MAX,
            weigh=lambda job: 0 if job is None else len(job.messages),
            gathering=Gathering(gather_ms, GATHER_RECORDS) if gather_ms else None,
            tick_s=IDLE_TICK_S,
            finish=store.close,
        )

    # -- loop side

    def submit(self, append: Append) -> None:
        append.failures_heard = self.failures_heard
        self._worker.put(append)

    def save_stream(self, stream: Stream) -> None:
        with self._shared:
            self._changes.streams.append(stream)
            self._changes.meta[NEXT_STREAM] = stream.id + 1

    def save_forgotten(self, ids: Iterable[int], meta: Mapping[str, Any]) -> None:
        with self._shared:
            self._changes.forgotten.extend(ids)
            self._changes.meta.update(meta)

    def save_cursor(self, name: str, cursor: Cursor | None) -> None:
        """None: it is dropped."""
        with self._shared:
            self._moved.pop(name, None)
            self._changes.cursors[name] = cursor

    def move_cursor(self, name: str, cursor: Cursor, records: int) -> bool:
        """One that was saved, and has only moved since, by so many records. True if it has to be on disk soon."""
        with self._shared:
            self._begin_moving()
            self._moved[name] = cursor
            self._moved_by += records
            return self._moved_by >= CURSORS_RECORDS

    def keep_place(self, key: str, place: bytes | None, *, is_first: bool) -> None:
        """None: it is forgotten. No append with this key is under way."""
        with self._shared:
            if is_first:
                self._kept.pop(FOLLOWED_PREFIX + key, None)
                self._changes.meta[FOLLOWED_PREFIX + key] = place
            else:
                self._begin_moving()
                self._kept[FOLLOWED_PREFIX + key] = place

    def save_moved(self) -> None:
        """With the next transaction, whatever has only moved."""
        with self._shared:
            self._next_cursors = 0.0

    def _begin_moving(self) -> None:
        if not (self._moved or self._kept):
            self._moved_since, self._moved_by = self._monotonic(), 0

    def save_damage(self, rows: Sequence[Row]) -> None:
        with self._shared:
            self._changes.damage.extend(rows)

    def distrust_index(self) -> None:
        with self._shared:
            self._changes.distrusts_index = True
        self.flush()

    def flush(self) -> None:
        """Commit what `save_*` left, without waiting for an append."""
        self._worker.put(None)

    async def stop(self) -> None:
        """Commit what waits, and close the store."""
        with self._shared:
            self._ending = True
        self.flush()
        await self._worker.close()

    # -- thread side

    def _turn(self, jobs: list[Append | None]) -> None:
        batch = [job for job in jobs if job is not None]
        flush = len(batch) < len(jobs) or self._is_cursor_late()
        for part in parts_of(batch, max(self._store.sizes.transaction, CHUNK_BYTES_MAX)):
            if behind := [append for append in part if append.failures_heard < self._failures]:
                part = [append for append in part if append.failures_heard == self._failures]
                self._refuse(behind)
            if part or flush:
                self._write(part)
            self._retain()

    def _is_cursor_late(self) -> bool:
        return bool(self._moved or self._kept) and self._monotonic() >= self._moved_since + CURSORS_IDLE_S

    def _take_changes(self, followed: Mapping[str, bytes]) -> Changes:
        with self._shared:  # streams that a batch names were saved before it was submitted, so they are here by now
            changes, self._changes = self._changes, Changes()
            now = self._monotonic()
            is_due = now >= self._next_cursors or self._moved_by >= CURSORS_RECORDS
            if (self._moved or self._kept) and (is_due or self._ending):
                changes.cursors |= self._moved  # newer than what a failed commit gave back
                changes.meta |= self._kept
                self._moved.clear()
                self._kept.clear()
                self._next_cursors = now + CURSORS_PERIOD_S
            for key in self._kept.keys() & followed.keys():  # older: afterwards it would take these back
                changes.meta[key] = self._kept.pop(key)
        return changes

    def _write(self, batch: list[Append]) -> None:
        try:
            written = self._commit(batch)
        except Exception as cause:
            if isinstance(cause, sqlite3.Error):
                self._error = LOG.fault(cause, self._store.path, "written")
            else:
                log.exception("a batch could not be stored", records=sum(len(append.messages) for append in batch))
                self._error = UStatusError(UCode.INTERNAL, f"the batch could not be stored: {cause!r}")
            is_damaged = is_damage(cause)
            if is_damaged:
                self._store.suspect()
            self._failing = True
            self._failures += 1
            self._store.file.reset()
            self._refuse(batch, is_news=True, is_damaged=is_damaged)
        else:
            self._failing = False
            self._worker.tell(lambda: self._hear(written))

    def _refuse(self, batch: list[Append], *, is_news: bool = False, is_damaged: bool = False) -> None:
        """`is_news`: of a transaction that failed just now."""
        written = Written(replace(self._store.extent), batch, error=self._error, is_damaged=is_damaged)
        self._worker.tell(lambda: self._hear(written, failures=int(is_news)))

    def _hear(self, written: Written, failures: int = 0) -> None:
        """On the loop, to which the streams belong."""
        self.failures_heard += failures
        for id, place in written.places.items():
            self._store.streams[id].move(place)
        self._on_written(written)
        self._store.heard_seq = max(self._store.heard_seq, written.extent.newest_seq)

    def _commit(self, batch: list[Append]) -> Written:
        try:
            return self._try(batch)
        except sqlite3.Error as error:
            self._store.file.reset()
            if not self._store.make_room(error):
                raise
        self._next_retention = 0.0
        self._retain()  # before anything is stored, or new records would use up the room
        return self._try(batch)

    def _try(self, batch: list[Append]) -> Written:
        followed = places_of(batch)
        changes = self._take_changes(followed)
        self._numbering.begin()
        try:
            chunks = self._chunks(batch, origins_of(batch) if followed else None, epochs_of(batch)) if batch else []
            places = self._store.commit(chunks, changes, followed, probe=self._failing and not batch)
        except BaseException:
            self._numbering.undo()
            with self._shared:
                self._changes = changes.followed_by(self._changes)
            raise
        return Written(replace(self._store.extent), batch, chunks, places)

    def _chunks(
        self, batch: list[Append], origins: list[Origin | None] | None, epochs: list[Epoch | None] | None
    ) -> list[Chunk]:
        streams = [stream for append in batch for stream in append.streams]
        messages = [message for append in batch for message in append.messages]
        data = [message.SerializeToString() for message in messages]
        seqs, prev_seqs = self._numbering.number(streams)
        whole = Chunk(seqs, self._now_ms(), streams, prev_seqs, data, messages, origins, epochs)
        chunks = []
        begin = size = 0
        for place, message in enumerate(data):
            if place > begin and (place - begin >= CHUNK_RECORDS_MAX or size + len(message) > CHUNK_BYTES_MAX):
                chunks.append(whole.slice(begin, place))
                begin, size = place, 0
            size += len(message)
        return [*chunks, whole.slice(begin, len(data))] if chunks else [whole]

    def _retain(self) -> None:
        store, retention, now = self._store, self._retention, self._monotonic()
        if now < self._next_retention and not (self._may_shrink and store.is_too_big):
            return
        is_second = now >= self._next_sample
        if is_second:
            store.allowance.refill()
        written = Written(store.extent)
        more = has_room = self._may_shrink = False
        try:
            ages = Ages.at(self._now_ms(), retention.age_ms)
            more, written.passed = store.retain(ages, retention.keep_after(), retention.owed_after())
            store.bound_wal()
            if is_second:
                written.acknowledged = store.acknowledged_elsewhere()
            self._may_shrink = more or not store.is_too_big
        except Exception as error:  # whatever it is, the writer must go on
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
        # While there is more to delete, every other turn of the writer deletes: appends go on, and the log shrinks
        # faster than it grows.
        self._next_retention = 0.0 if more or has_room else now + RETENTION_PERIOD_MS / 1_000
        if more:
            self._worker.put(None)
        written.extent = replace(store.extent)
        self._worker.tell(lambda: self._hear(written))
