"""The log on disk: one SQLite file in WAL mode. One connection writes; readers have their own (reader.py).

Opening -> Store    commit: BEGIN, rows, COMMIT = fsync, or nothing at all happened    retain: what is old, or too much
                    with the records that were followed from another log, the place there
                    an error -> a new connection; what the disk did in spite of the error is undone or taken in
"""

from __future__ import annotations

import contextlib
import sqlite3
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
    STREAMS,
    Cursor,
    Unindexed,
    span_of,
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
    is_full_pass,
    own_bytes,
    readable,
    used_bytes,
    vacuum,
)
from history.file.rows import CURSOR, DAMAGE, META, SPAN, STREAM, Row, oldest_of
from history.records.chunk import Allowance, Chunk, Passed, encode, unpack_streams
from history.records.stream import NOWHERE, Place, Stream, growth_of
from storage.faults import is_full
from storage.file import empty_wal, pragma, transaction
from storage.reserve import with_room
from storage.runtime import REAL, Runtime
from storage.statements import delete_rows, insert_rows

RETENTION_BYTES: Final = 1 << 30  # some six million messages of 150 bytes; a flash of a small gateway bears it
CHECKPOINT_BYTES: Final = 32 << 20  # rolled forward on open at most: a tenth of a second
# of the index of topics, written at once: some 40 ms in which nothing is committed; where each message is of another
# topic, 2,048 chunks would be half a million
CHECKPOINT_ROWS = 16_384
WAL_AGAIN_S: Final = 1.0  # until readers are waited for again, where that was in vain

log = structlog.get_logger()


@dataclass(slots=True)
class Changes:
    """What is committed beside the chunks."""

    streams: list[Stream] = field(default_factory=list)  # new ones
    forgotten: list[int] = field(default_factory=list)  # streams
    meta: dict[str, Any] = field(default_factory=dict)  # None: gone
    cursors: dict[str, Cursor | None] = field(default_factory=dict)  # None: dropped
    damage: list[Row] = field(default_factory=list)
    distrusts_index: bool = False

    def followed_by(self, later: Changes) -> Changes:
        return Changes(
            self.streams + later.streams,
            self.forgotten + later.forgotten,
            self.meta | later.meta,
            self.cursors | later.cursors,
            self.damage + later.damage,
            self.distrusts_index or later.distrusts_index,
        )


class Store:
    """Used by one thread at a time: by whoever opens it, then by the writer."""

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
        self._is_choked = False  # somebody reads, and the disk has no room for a longer write-ahead log
        opening = with_room(self.reserve, path, lambda: self._opened(now_ms or runtime.now_ms))
        self.file, self.loaded, self.extent = opening.file, opening.loaded, opening.loaded.extent
        # by their numbers. They are added and forgotten on the loop; here they are only looked up
        self.streams: dict[int, Stream] = self.loaded.streams
        self.allowance = Allowance()
        self.heard_seq = self.loaded.start_seq  # the loop has heard of all growth up to here; the loop says so
        # places of streams that grew since the last checkpoint, or are ahead of what the loop has
        self.ahead = {id: self.streams[id].place for id in self.loaded.dirty}
        self._stream_rows = len(self.streams)
        self._must_count = False  # after an error: some of those that were to be written may be there
        self._data_version = 0  # of SQLite: changes when another process has written
        self._used_bytes = 0  # of pages that are in use, when we last looked
        self._added_bytes = 0  # since then
        self._wal_due = 0.0
        self._unindexed_bytes = sum(chunk.bytes for chunk in self.loaded.unindexed)
        self._unindexed_rows = sum(chunk.rows for chunk in self.loaded.unindexed)
        self._stale: set[int] = set()  # streams of which the index names chunks that retention has deleted
        self._aging = False  # retention by age has more to do
        self._is_shrunk = False  # the file gave pages back, which the disk has when the write-ahead log is empty
        self._passing: Passed | None = None  # by a step of retention that may have failed
        self._late: list[Passed] = []
        # by a commit that may have failed, in META: places in other logs as they were before; None: there was none
        self._replaced: dict[str, Row | None] = {}
        self._connected(self.file.connect())
        self.sample()

    def _opened(self, now_ms: Callable[[], int]) -> Opening:
        opening = Opening(self.path, self.runtime, now_ms, self.sizes)
        opening.run()
        return opening

    def __repr__(self) -> str:
        return f"Store({self.path}, {self.extent})"

    def close(self) -> None:
        """Everything committed is kept in any case; a clean close spares the next open some work."""
        try:
            db = self._connection()
            with transaction(db):
                self._checkpoint(db)
                db.execute("DELETE FROM meta WHERE key = ?", (CURSORS_LOST,))  # everybody has begun anew by now
            self._checkpointed()
            empty_wal(db, WAL_WAIT_MS)
        except sqlite3.Error as error:
            what = "the log could not be closed cleanly; the next open recovers it"
            log.warning(what, path=str(self.path), error=str(error))
        self.file.close()

    # -- connections

    def _connection(self) -> sqlite3.Connection:
        if (db := self.file.db) is None:
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
        """The write-ahead log, where nobody keeps it from being emptied."""
        db.execute(f"PRAGMA wal_autocheckpoint = {self.sizes.wal // 2 // pragma(db, 'page_size')}")
        db.execute(f"PRAGMA journal_size_limit = {self.sizes.wal}")

    def _resume(self, db: sqlite3.Connection) -> None:
        """After an error nobody knows whether the transaction is on disk all the same. Chunks of it go: their senders
        were refused, and their seqs will be given out again; and so do the places that came with them. What retention
        has deleted is gone, and those who were owed it are told."""
        newest = self.extent.newest_seq
        if (db.execute("SELECT max(first_seq) FROM chunk").fetchone()[0] or 0) > newest:
            with transaction(db):
                db.execute("DELETE FROM chunk WHERE first_seq > ?", (newest,))
                delete_rows(db, "DELETE FROM meta WHERE key", list(self._replaced))
                insert_rows(db, "INSERT INTO meta", filter(None, self._replaced.values()))
            log.warning("a commit that had failed was on disk, and was taken back", path=str(self.path), after=newest)
        self._replaced = {}
        self._must_count = True
        meta, extent = dict[str, int](META.read(db).rows), self.extent
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
        """It is damaged: the next open makes it anew, from what can be read."""
        with contextlib.suppress(OSError):
            suspect_path(self.path).touch()

    # -- write

    def make_room(self, error: Exception) -> bool:
        """Give up the reserve of a disk that is full, as the error says, so that something can be deleted. False if it
        was another error, or there is no room."""
        if not is_full(error, self.path):
            return False
        try:
            if self.file.wal_bytes > self.sizes.wal + self.sizes.transaction and not empty_wal(self._connection(), 0):
                return False  # somebody reads: what is written now only makes the write-ahead log longer
        except sqlite3.Error:  # for want of room, as a rule
            self.file.reset()
        has_room = self.reserve.make_room(self.path)
        self._measure()
        return has_room

    def commit(
        self,
        chunks: Sequence[Chunk],
        changes: Changes,
        followed: Mapping[str, bytes] | None = None,
        *,
        probe: bool = False,
    ) -> dict[int, Place]:
        """All of it on disk, or a sqlite3.Error and nothing of it. `followed`: places in other logs that hold only with
        these chunks, by key of META; older ones may be in `changes`. `probe`: write something in any case, to see
        whether that works. Returns where the streams of these chunks are now, for the loop to take over when it hears
        of it."""
        db, extent, unindexed, ahead = self._connection(), self.extent, self.loaded.unindexed, self.ahead
        self.file.require_in_place()
        columns = [encode(chunk) for chunk in chunks]
        is_due = len(unindexed) + len(chunks) >= CHECKPOINT_CHUNKS or self._unindexed_bytes >= CHECKPOINT_BYTES
        is_due = is_due or self._unindexed_rows >= CHECKPOINT_ROWS
        checkpoint = is_due and len(unindexed) > 0  # up to before these chunks, whose streams have not grown yet
        if self._added_bytes > self.sizes.transaction // 8:  # here, since after the COMMIT nothing may fail
            self._look(db)
        if self._is_choked:
            if not empty_wal(db, 0):
                raise _choked(self.path)
            self._is_choked = False
        with transaction(db):
            self._write_changes(db, changes)
            db.executemany(
                "INSERT INTO chunk VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                [(c.first_seq, c.records, c.time_ms, c.bytes, c.crc, c.streams, c.ids, c.data) for c in columns],
            )
            if followed:
                self._write_followed(db, followed)
            if probe:
                META.insert(db, [("probe", self.runtime.random_bytes(8))])
            if checkpoint:
                self._checkpoint(db)
        self._replaced = {}
        if checkpoint:
            self._checkpointed()
        places: dict[int, Place] = {}
        for chunk, c in zip(chunks, columns, strict=True):
            unindexed.append(Unindexed.of(c))
            self._unindexed_bytes += c.bytes
            self._unindexed_rows += unindexed[-1].rows
            extent.oldest_seq = extent.oldest_seq or c.first_seq
            extent.newest_seq = c.last_seq
            extent.stored_bytes += c.bytes
            self._added_bytes += c.bytes
            for id, growth in growth_of(c.first_seq, chunk.streams, c.ids, c.time_ms):
                first_seq, newest_seq, records, newest_id, time_ms = growth
                before = ahead.get(id) or self.streams[id].place
                place = before[0] or first_seq, newest_seq, before[2] + records, newest_id, time_ms
                places[id] = ahead[id] = place
        if chunks:
            self.file.move_mark(extent.newest_seq)
        return places

    def _write_changes(self, db: sqlite3.Connection, changes: Changes) -> None:
        if changes.streams or changes.forgotten:
            self._write_streams(db, changes)
        if changes.meta:
            META.insert(db, [(key, value) for key, value in changes.meta.items() if value is not None])
            delete_rows(db, "DELETE FROM meta WHERE key", [key for key, value in changes.meta.items() if value is None])
        DAMAGE.insert(db, changes.damage)
        if changes.cursors:
            kept = [(name, *c.columns) for name, c in changes.cursors.items() if c is not None]
            CURSOR.insert(db, kept)
            dropped = [name for name, cursor in changes.cursors.items() if cursor is None]
            delete_rows(db, "DELETE FROM cursor WHERE name", dropped)
        if changes.distrusts_index:
            self.loaded.is_index_trusted = False
            META.insert(db, [("indexed_seq", NOT_KNOWN)])

    def _write_followed(self, db: sqlite3.Connection, followed: Mapping[str, bytes]) -> None:
        query = "SELECT * FROM meta WHERE key = ?"
        self._replaced = {key: db.execute(query, (key,)).fetchone() for key in followed}
        META.insert(db, followed.items())

    def _write_streams(self, db: sqlite3.Connection, changes: Changes) -> None:
        STREAM.insert(db, [stream.row(NOWHERE) for stream in changes.streams])
        self._stream_rows += len(changes.streams)
        self._stream_rows -= delete_rows(db, "DELETE FROM stream WHERE id", changes.forgotten)
        if self._must_count:
            self._stream_rows, self._must_count = db.execute("SELECT count(*) FROM stream").fetchone()[0], False
        META.insert(db, [(STREAMS, self._stream_rows)])

    def _checkpoint(self, db: sqlite3.Connection) -> None:
        unindexed, extent = self.loaded.unindexed, self.extent
        index = sorted((id, chunk.first_seq) for chunk in unindexed for id in unpack_streams(chunk.streams))
        insert_rows(db, "INSERT OR IGNORE INTO chunk_stream", index)
        if unindexed:
            SPAN.insert(db, [span_of(unindexed)])
        STREAM.insert(db, [self.streams[id].row(self.ahead[id]) for id in sorted(self.ahead) if id in self.streams])
        meta = {"newest_seq": extent.newest_seq, "floor_seq": extent.floor_seq, "stored_bytes": extent.stored_bytes}
        meta["indexed_seq"] = extent.newest_seq if self.loaded.is_index_trusted else NOT_KNOWN
        META.insert(db, meta.items())
        if self._stale:
            delete = "DELETE FROM chunk_stream WHERE first_seq <= ? AND stream"
            delete_rows(db, delete, sorted(self._stale), extent.floor_seq)
            db.execute("DELETE FROM span WHERE last_seq <= ?", (extent.floor_seq,))
            db.execute("DELETE FROM meta WHERE key = ?", (STALE_NAMES,))

    def _checkpointed(self) -> None:
        self.loaded.unindexed.clear()
        self._unindexed_bytes = self._unindexed_rows = 0
        self._stale.clear()
        heard = self.heard_seq
        for id in [id for id, place in self.ahead.items() if place[1] <= heard]:
            del self.ahead[id]

    # -- looking

    def acknowledged_elsewhere(self) -> list[int]:
        """The numbers of the damage that another process has acknowledged in our file since we last looked."""
        db = self._connection()
        version = pragma(db, "data_version")
        if version == self._data_version:
            return []
        self._data_version = version
        return [row[0] for row in DAMAGE.read(db).rows if row[-1]]

    def sample(self) -> None:
        """Look what the files really take, what is left, and how much retention may leave here. The reserve is made
        again where it was given up, and there is room."""
        with contextlib.suppress(OSError):
            self.reserve.restore(self.runtime.disk.free_bytes(self.path))
        self._measure()

    def _measure(self) -> None:
        extent = self.extent
        extent.disk_bytes = own_bytes(self.path)
        with contextlib.suppress(OSError, sqlite3.Error):  # whatever it is shows when something is written
            extent.disk_free_bytes = self.runtime.disk.free_bytes(self.path)
            extent.bytes_max = min(self.bytes_max, self.room.limit(extent.disk_bytes, extent.disk_free_bytes))
            self._fit(extent.bytes_max)

    def _fit(self, whole: int) -> None:
        wal_before, self.sizes = self.sizes.wal, Sizes(whole, self._wal_max)
        if self.sizes.wal != wal_before and self.file.db is not None:
            self._bound(self.file.db)

    @property
    def _wal_max(self) -> int:
        return self.reserve.bytes or WAL_BYTES_MAX

    # -- retention

    @property
    def is_too_big(self) -> bool:
        """Costs nothing: is it time to `retain`?"""
        return self._used_bytes + self._added_bytes > self.sizes.file

    def retain(self, ages: Ages, keep_after: int, owed_after: int) -> tuple[bool, list[Passed]]:
        """Delete the oldest chunks: those that are too old, but none with a seq beyond `keep_after`, and in any case as
        many as it takes to keep all files within their sizes. The last chunk stays, so that a reader finds the end. A
        bounded step: True if there is more to do.

        What lies beyond `owed_after` is handed back, as far as that is not too much.
        """
        db = self._connection()
        late, self._late = self._late, []
        excess = self._excess(db)
        if self._is_choked:  # to delete something makes the write-ahead log longer
            return False, late
        doomed, floor = find_doomed(db, ages, excess, keep_after, at_once=self._aging)
        if not doomed:
            self._aging = False
            more = vacuum(db, self.sizes)
            self._is_shrunk = self._is_shrunk or more
            return more, late
        if owed_after < floor:
            owed = max(owed_after, self.extent.floor_seq)
            self._passing = Passed(owed, floor + 1, self.allowance.take(readable(db, doomed), owed))
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
        """What the index and the spans say of them goes with the next checkpoint, so that its pages are written once
        for all that went meanwhile."""
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
                else:  # who opens the file counts in what came since the last checkpoint
                    stored_bytes = self.extent.stored_bytes - self._unindexed_bytes
                    meta = {"floor_seq": self.extent.floor_seq, "stored_bytes": stored_bytes, STALE_NAMES: 1}
                    META.insert(db, meta.items())
        except BaseException:
            self.extent = before
            raise
        if checkpoint:
            self._checkpointed()

    def _look(self, db: sqlite3.Connection) -> None:
        self._used_bytes, self._added_bytes = used_bytes(db), 0
        self._is_choked = self.file.wal_bytes > self.sizes.wal + self.sizes.transaction and self._is_short(db)

    def _is_short(self, db: sqlite3.Connection) -> bool:
        """Would the disk, after another transaction, have no room for emptying the write-ahead log? The file may grow
        by that."""
        try:
            growth = pragma(db, "page_count") * pragma(db, "page_size") - self.path.stat().st_size
            return max(growth, 0) + self.sizes.transaction > self.runtime.disk.free_bytes(self.path)
        except OSError:
            return False

    def _excess(self, db: sqlite3.Connection) -> int:
        """How much has to go. Once it is too big, somewhat more: so that not every commit deletes."""
        self._look(db)
        excess = max(self._used_bytes - self.sizes.file, self.extent.stored_bytes - self.sizes.whole)
        return excess + self.sizes.transaction // 4 if excess > 0 else excess

    def bound_wal(self) -> None:
        """SQLite empties its write-ahead log by itself, unless readers are always there; then they are waited for."""
        db = self.file.db
        if db is None or self.runtime.monotonic() < self._wal_due:
            return
        wal_bytes = self.file.wal_bytes
        if wal_bytes > self.sizes.wal or (self._is_shrunk and wal_bytes):
            if empty_wal(db, WAL_WAIT_MS):
                self._is_shrunk = self._is_choked = False
            else:
                self._wal_due = self.runtime.monotonic() + WAL_AGAIN_S  # somebody reads for long: a backup, say


def _choked(path: Path) -> sqlite3.OperationalError:
    why = f"somebody has been reading {path} for so long that its write-ahead log has filled the disk"
    error = sqlite3.OperationalError(f"{why}: end that reader")
    error.sqlite_errorcode = sqlite3.SQLITE_FULL
    return error
