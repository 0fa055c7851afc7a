"""The log on disk: one SQLite file in WAL mode. One connection writes; readers have their own (reader.py).

Opening -> Store    commit: BEGIN, rows, COMMIT = fsync, or nothing at all    retain: delete old or excess chunks
                    records that were followed from another log, and the position there, in one transaction
                    after an error: a new connection; what the disk did in spite of the error is undone, or adopted
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import structlog

from history.file.load import (
    CHECKPOINT_CHUNKS,
    CURSORS_LOST,
    NOT_KNOWN,
    STALE_NAMES,
    STREAM_BYTES,
    STREAMS,
    Cursor,
    Unindexed,
    write_checkpoint,
)
from history.file.opening import Opening, suspect_path
from history.file.retention import (
    WAL_BYTES_MAX,
    WAL_WAIT_MS,
    Ages,
    DiskRoom,
    Doomed,
    Sizes,
    find_doomed,
    is_disk_short,
    is_full_pass,
    own_bytes,
    readable,
    used_bytes,
    vacuum,
)
from history.file.rows import CURSOR, DAMAGE, META, STREAM, StoredRow, oldest_of
from history.records.chunk import (
    NO_RECORDS,
    Allowance,
    Chunk,
    RetentionLoss,
    Stream,
    StreamProgress,
    encode,
    growth_of,
    unpack_streams,
)
from storage.disk import delete_rows, empty_wal, insert_rows, pragma, transaction
from storage.faults import is_full
from storage.runtime import REAL, Runtime

RETENTION_BYTES: Final = 1 << 30  # some six million messages of 150 bytes; a small gateway's flash has enough space
CHECKPOINT_BYTES: Final = 32 << 20  # rolled forward on open at most: a tenth of a second
# Rows of the index of topics that are written at once: some 40 ms in which nothing is committed. If each message had
# another topic, 2,048 chunks would have half a million rows.
CHECKPOINT_ROWS = 16_384
DURATIONS_MAX = 4_096  # of transactions that nobody has asked for yet
WAL_AGAIN_S: Final = 1.0  # between two attempts to wait for readers

log = structlog.get_logger()


@dataclass(slots=True)
class LogChanges:
    """What is committed beside chunks."""

    streams: list[Stream] = field(default_factory=list)  # new ones
    forgotten: list[int] = field(default_factory=list)  # ids of streams
    meta: dict[str, Any] = field(default_factory=dict)  # None: the row is deleted
    cursors: dict[str, Cursor | None] = field(default_factory=dict)  # None: dropped
    damage: list[StoredRow] = field(default_factory=list)
    distrusts_index: bool = False

    def add(self, later: LogChanges) -> None:
        self.streams += later.streams
        self.forgotten += later.forgotten
        self.meta |= later.meta
        self.cursors |= later.cursors
        self.damage += later.damage
        self.distrusts_index = self.distrusts_index or later.distrusts_index

    def write_rows(self, db: sqlite3.Connection) -> None:
        """Write meta, damage and cursors, in the caller's transaction."""
        if self.meta:
            META.insert(db, [(key, value) for key, value in self.meta.items() if value is not None])
            delete_rows(db, "DELETE FROM meta WHERE key", [key for key, value in self.meta.items() if value is None])
        if self.damage:
            DAMAGE.insert(db, self.damage)
        if self.cursors:
            CURSOR.insert(db, [(name, *one.columns) for name, one in self.cursors.items() if one is not None])
            dropped = [name for name, cursor in self.cursors.items() if cursor is None]
            delete_rows(db, "DELETE FROM cursor WHERE name", dropped)


class Store:
    """Used by one thread at a time: first by the thread that opens it, then by the writer."""

    def __init__(
        self,
        path: Path,
        runtime: Runtime = REAL,
        now_ms: Callable[[], int] | None = None,
        bytes_max: int = RETENTION_BYTES,
    ) -> None:
        """Opens the file. Raises as Opening does."""
        self.path, self.runtime, self.bytes_max = path, runtime, bytes_max
        self.reserve = runtime.disk.reserve
        self.room = DiskRoom(path, self.reserve)
        self.sizes = Sizes(bytes_max, self._wal_max)
        self._is_choked = False  # a reader is active, and the disk has no space for a longer write-ahead log
        opening = Opening(path, runtime, now_ms or runtime.now_ms, self.sizes)
        runtime.disk.retry_with_reserve(path, opening.run)
        self.file, self.loaded, self.extent = opening.file, opening.loaded, opening.loaded.extent
        self.allowance = Allowance()
        self.heard_seq = self.loaded.start_seq  # the loop has applied all progress up to here; set on the loop
        # progress of the streams that grew since the last checkpoint, or whose progress the loop has not applied yet
        self.ahead = {id: self.loaded.streams[id].progress for id in self.loaded.dirty}
        # of the last transactions, in seconds: all of it, and the COMMIT at its end, which waits for the disk
        self.durations: deque[tuple[float, float]] = deque(maxlen=DURATIONS_MAX)
        self._stream_rows = len(self.loaded.streams)
        self._must_count = False  # after an error it is unknown which rows were written
        self._data_version = 0  # of SQLite: it changes when another process has written
        self.used_bytes = 0  # of pages that are in use; with `_added_bytes`, which were added since they were counted
        self._added_bytes = 0
        self._wal_due = 0.0
        self._unindexed_bytes = sum(chunk.bytes for chunk in self.loaded.unindexed)
        self._unindexed_rows = sum(len(chunk.streams) for chunk in self.loaded.unindexed) // STREAM_BYTES
        self._stale: set[int] = set()  # for these streams the index has rows of deleted chunks
        self._aging = False  # retention by age has more to do
        self._is_shrunk = False  # the file released pages, which are free on the disk when the write-ahead log is empty
        self._passing: RetentionLoss | None = None  # of a step of retention that may have failed
        self._late: list[RetentionLoss] = []
        # of a commit that may have failed: positions in other logs before it, as rows of META; None: there was none
        self._replaced: dict[str, StoredRow | None] = {}
        self._connected(self.file.connect())
        self.sample()

    def close(self) -> None:
        """Close the file. Everything committed is kept in any case; a clean close makes the next open faster."""
        try:
            db = self.file.db or self._reconnect()
            with transaction(db):
                self._checkpoint(db)
                # every reader whose cursor was lost has already begun again
                db.execute("DELETE FROM meta WHERE key = ?", (CURSORS_LOST,))
            self._checkpointed()
            empty_wal(db, WAL_WAIT_MS)
        except sqlite3.Error as error:
            what = "the log could not be closed cleanly; the next open recovers it"
            log.warning(what, path=str(self.path), error=str(error))
        self.file.close()

    # -- connections

    def _reconnect(self) -> sqlite3.Connection:
        db = self.file.connect()
        try:
            self._resume(db)
        except BaseException:
            self.file.reset()
            raise
        self._connected(db)
        return db

    def _connected(self, db: sqlite3.Connection) -> None:
        self._data_version = pragma(db, "data_version")
        self._bound(db)
        self._look(db)
        self._measure()

    def _bound(self, db: sqlite3.Connection) -> None:
        """Limit the write-ahead log, as long as no reader prevents that it is emptied."""
        db.execute(f"PRAGMA wal_autocheckpoint = {self.sizes.wal // 2 // pragma(db, 'page_size')}")
        db.execute(f"PRAGMA journal_size_limit = {self.sizes.wal}")

    def _resume(self, db: sqlite3.Connection) -> None:
        """After an error it is unknown whether the transaction is on disk in spite of it. If it is, its chunks are
        deleted, because their senders were refused and their seqs will be given out again; positions that came with
        them are restored. What retention has deleted stays deleted, and is reported to those who were owed it."""
        newest = self.extent.newest_seq
        if (db.execute("SELECT max(first_seq) FROM chunk").fetchone()[0] or 0) > newest:
            with transaction(db):
                db.execute("DELETE FROM chunk WHERE first_seq > ?", (newest,))
                delete_rows(db, "DELETE FROM meta WHERE key", list(self._replaced))
                insert_rows(db, "INSERT INTO meta", filter(None, self._replaced.values()))
            log.warning("a commit that had failed was on disk, and was taken back", path=str(self.path), after=newest)
        self._replaced = {}
        self._must_count = True
        meta, extent = dict[str, int](META.read(db, [])), self.extent
        if meta.get("floor_seq", 0) > extent.floor_seq:
            extent.floor_seq, extent.oldest_seq = meta["floor_seq"], oldest_of(db)
            unindexed = self.loaded.unindexed
            if unindexed and meta.get("newest_seq", 0) >= unindexed[0].first_seq:  # it was a checkpoint, too
                self._checkpointed()
            extent.stored_bytes = meta.get("stored_bytes", extent.stored_bytes) + self._unindexed_bytes
            if self._passing is not None:
                self._late.append(self._passing)
        self._passing = None

    def suspect(self) -> None:
        """Mark the file as damaged: the next open rebuilds it from everything that can be read."""
        with contextlib.suppress(OSError):
            suspect_path(self.path).touch()

    # -- write

    def make_room(self, error: Exception) -> bool:
        """If `error` says that the disk is full, release the reserve, so that records can be deleted. Returns False for
        another error, or if there is still no space."""
        if not is_full(error, self.path):
            return False
        try:
            is_long = self.file.wal_bytes > self.sizes.wal + self.sizes.transaction
            if is_long and not empty_wal(self.file.db or self._reconnect(), 0):
                return False  # a reader is active: writing only makes the write-ahead log longer
        except sqlite3.Error:  # usually for lack of space
            self.file.reset()
        has_room = self.reserve.make_room(self.path)
        self._measure()
        return has_room

    def commit(
        self,
        chunks: Sequence[Chunk],
        changes: LogChanges,
        followed: Mapping[str, bytes] | None = None,
        *,
        probe: bool = False,
    ) -> dict[int, StreamProgress]:
        """Commit all of it, or raise sqlite3.Error and commit nothing.

        `followed`: positions in other logs that are valid only with these chunks, by key of META; `changes` may have
        older ones. `probe`: write something in any case, to find out whether that works. Returns the progress of the
        streams of these chunks, which the loop applies."""
        # 1: whatever may fail, before the transaction
        began = self.runtime.monotonic()
        db = self.file.db or self._reconnect()
        extent, unindexed, ahead = self.extent, self.loaded.unindexed, self.ahead
        self.file.require_in_place()
        columns = [encode(chunk) for chunk in chunks]
        is_due = len(unindexed) + len(chunks) >= CHECKPOINT_CHUNKS or self._unindexed_bytes >= CHECKPOINT_BYTES
        is_due = is_due or self._unindexed_rows >= CHECKPOINT_ROWS
        checkpoint = is_due and len(unindexed) > 0  # without these chunks, whose streams have not grown yet
        if self._added_bytes > self.sizes.transaction // 8:  # here, because nothing may fail after the COMMIT
            self._look(db)
        if self._is_choked:
            if not empty_wal(db, 0):
                why = "somebody has been reading it for so long that its write-ahead log has filled the disk"
                error = sqlite3.OperationalError(f"{why}: end that reader")
                error.sqlite_errorcode = sqlite3.SQLITE_FULL
                raise error
            self._is_choked = False
        with transaction(db):  # 2: write
            if changes.streams or changes.forgotten:
                self._write_streams(db, changes)
            changes.write_rows(db)
            if changes.distrusts_index:
                self.loaded.is_index_trusted = False
                META.insert(db, [("indexed_seq", NOT_KNOWN)])
            db.executemany("INSERT INTO chunk VALUES (?, ?, ?, ?, ?, ?, ?, ?)", columns)
            if followed:
                query = "SELECT * FROM meta WHERE key = ?"
                self._replaced = {key: db.execute(query, (key,)).fetchone() for key in followed}
                META.insert(db, followed.items())
            if probe:
                META.insert(db, [("probe", self.runtime.random_bytes(8))])
            if checkpoint:
                self._checkpoint(db)
            written = self.runtime.monotonic()
        # 3: it is on disk; nothing from here on may fail
        now = self.runtime.monotonic()
        self.durations.append((now - began, now - written))
        self._replaced = {}
        if checkpoint:
            self._checkpointed()
        moved: dict[int, StreamProgress] = {}
        for chunk, c in zip(chunks, columns, strict=True):
            unindexed.append(Unindexed(c.first_seq, c.streams, c.time_ms, c.size))
            self._unindexed_bytes += c.size
            self._unindexed_rows += len(c.streams) // STREAM_BYTES
            extent.oldest_seq = extent.oldest_seq or c.first_seq
            extent.newest_seq = chunk.last_seq
            extent.stored_bytes += c.size
            self._added_bytes += c.size
            self.used_bytes += c.size
            for id, growth in growth_of(c.first_seq, chunk.streams, c.ids, c.time_ms):
                first_seq, newest_seq, records, newest_id, time_ms = growth
                before = ahead.get(id) or self.loaded.streams[id].progress
                progress = before[0] or first_seq, newest_seq, before[2] + records, newest_id, time_ms
                moved[id] = ahead[id] = progress
        if chunks:
            self.file.move_mark(extent.newest_seq)
        return moved

    def _write_streams(self, db: sqlite3.Connection, changes: LogChanges) -> None:
        STREAM.insert(db, [stream.row(NO_RECORDS) for stream in changes.streams])
        self._stream_rows += len(changes.streams)
        self._stream_rows -= delete_rows(db, "DELETE FROM stream WHERE id", changes.forgotten)
        if self._must_count:
            self._stream_rows, self._must_count = db.execute("SELECT count(*) FROM stream").fetchone()[0], False
        META.insert(db, [(STREAMS, self._stream_rows)])

    def _checkpoint(self, db: sqlite3.Connection) -> None:
        loaded, floor = self.loaded, self.extent.floor_seq
        grown = [loaded.streams[id].row(self.ahead[id]) for id in sorted(self.ahead) if id in loaded.streams]
        write_checkpoint(db, loaded.unindexed, grown, self.extent, is_index_trusted=loaded.is_index_trusted)
        if self._stale:
            delete_rows(db, "DELETE FROM chunk_stream WHERE first_seq <= ? AND stream", sorted(self._stale), floor)
            db.execute("DELETE FROM span WHERE last_seq <= ?", (floor,))
            db.execute("DELETE FROM meta WHERE key = ?", (STALE_NAMES,))

    def _checkpointed(self) -> None:
        self.loaded.unindexed.clear()
        self._unindexed_bytes = self._unindexed_rows = 0
        self._stale.clear()
        heard = self.heard_seq
        for id in [id for id, progress in self.ahead.items() if progress[1] <= heard]:
            del self.ahead[id]

    # -- sampling

    def acknowledged_elsewhere(self) -> list[int]:
        """Returns the numbers of the damage that another process has acknowledged in the file since the last call."""
        db = self.file.db or self._reconnect()
        version = pragma(db, "data_version")
        if version == self._data_version:
            return []
        self._data_version = version
        return [row[0] for row in DAMAGE.read(db, []) if row[-1]]

    def sample(self) -> None:
        """Measure what the files take, what is free, and the limit of retention. Restore the reserve if it was released
        and there is space."""
        with contextlib.suppress(OSError):
            self.reserve.restore(self.runtime.disk.free_bytes(self.path))
        self._measure()

    def _measure(self) -> None:
        extent = self.extent
        extent.disk_bytes = own_bytes(self.path)
        with contextlib.suppress(OSError, sqlite3.Error):  # the next write reports it
            extent.disk_free_bytes = self.runtime.disk.free_bytes(self.path)
            extent.bytes_max = self.room.limit(extent.disk_bytes, extent.disk_free_bytes)
            wal_before, self.sizes = self.sizes.wal, Sizes(min(self.bytes_max, extent.bytes_max), self._wal_max)
            if self.sizes.wal != wal_before and self.file.db is not None:
                self._bound(self.file.db)

    @property
    def _wal_max(self) -> int:
        return self.reserve.bytes or WAL_BYTES_MAX

    # -- retention

    def retain(self, ages: Ages, keep_after: int, owed_after: int) -> tuple[bool, list[RetentionLoss]]:
        """Delete the oldest chunks: those that are too old, but none with a seq beyond `keep_after`, and in any case as
        many as it takes to keep all files within their sizes. The last chunk stays, so that a reader finds the end. A
        bounded step: returns True if there is more to delete.

        Also returns the deleted records beyond `owed_after`, as far as the allowance reaches."""
        db = self.file.db or self._reconnect()
        late, self._late = self._late, []
        excess = self._excess(db)
        if self._is_choked:  # deleting makes the write-ahead log longer
            return False, late
        doomed, floor = find_doomed(db, ages, excess, keep_after, at_once=self._aging)
        if not doomed:
            self._aging = False
            more = vacuum(db, self.sizes)
            self._is_shrunk = self._is_shrunk or more
            return more, late
        if owed_after < floor:
            owed = max(owed_after, self.extent.floor_seq)
            self._passing = RetentionLoss(owed, floor + 1, self.allowance.take(readable(db, doomed), owed))
        try:
            self._delete(db, doomed, floor)
        except BaseException:
            self._late = late
            raise
        if self._passing is not None:
            late.append(self._passing)
            self._passing = None
        self._aging = is_full_pass(doomed) or self._excess(db) > 0
        return self._aging, late

    def _delete(self, db: sqlite3.Connection, doomed: Sequence[Doomed], floor: int) -> None:
        """Their rows of the index and of the spans are deleted by the next checkpoint, so that the pages are written
        once for all chunks that were deleted meanwhile."""
        before, unindexed = replace(self.extent), self.loaded.unindexed
        checkpoint = len(unindexed) > 0 and floor >= unindexed[0].first_seq
        self._stale.update(*(unpack_streams(packed) for _, _, packed, _ in doomed))
        try:
            with transaction(db):
                db.execute("DELETE FROM chunk WHERE first_seq <= ?", (floor,))
                self.extent.oldest_seq = oldest_of(db)
                self.extent.floor_seq = max(before.floor_seq, floor)
                self.extent.stored_bytes -= sum(bytes for _, bytes, *_ in doomed)
                if checkpoint:
                    self._checkpoint(db)
                else:  # an open counts the chunks since the last checkpoint
                    stored_bytes = self.extent.stored_bytes - self._unindexed_bytes
                    meta = {"floor_seq": self.extent.floor_seq, "stored_bytes": stored_bytes, STALE_NAMES: 1}
                    META.insert(db, meta.items())
        except BaseException:
            self.extent = before
            raise
        if checkpoint:
            self._checkpointed()

    def _look(self, db: sqlite3.Connection) -> None:
        self.used_bytes, self._added_bytes = used_bytes(db), 0
        is_long = self.file.wal_bytes > self.sizes.wal + self.sizes.transaction
        self._is_choked = is_long and is_disk_short(db, self.path, self.sizes, self.runtime.disk)

    def _excess(self, db: sqlite3.Connection) -> int:
        """Returns how many bytes have to be deleted: somewhat more than the excess, so that not every commit
        deletes."""
        self._look(db)
        excess = max(self.used_bytes - self.sizes.file, self.extent.stored_bytes - self.sizes.whole)
        return excess + self.sizes.transaction // 4 if excess > 0 else excess

    def bound_wal(self) -> None:
        """Empty the write-ahead log if it is too long. SQLite does so by itself, unless some reader is always active:
        then this waits for the readers."""
        db = self.file.db
        if db is None or self.runtime.monotonic() < self._wal_due:
            return
        wal_bytes = self.file.wal_bytes
        if wal_bytes > self.sizes.wal or (self._is_shrunk and wal_bytes):
            if empty_wal(db, WAL_WAIT_MS):
                self._is_shrunk = self._is_choked = False
            else:
                self._wal_due = self.runtime.monotonic() + WAL_AGAIN_S  # a reader is active for long, such as a backup
