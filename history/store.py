"""The log on disk: one SQLite file in WAL mode. One connection writes; readers have their own (reader.py).

open: lock -> check -> load -> roll forward          commit: BEGIN, rows, COMMIT = fsync, or nothing at all happened
                |                  |
                |              fewer records than the mark says were committed: a hole, told to every reader
            damaged: moved aside, a new incarnation starts
"""

from __future__ import annotations

import contextlib
import sqlite3
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import structlog
from google.protobuf.message import DecodeError

from history import damage as kinds
from history import rows
from history.chunk import Chunk, Columns, CorruptChunkError, decode, unpack_streams
from history.cursors import NOBODY
from history.damage import Damage, Ledger
from history.load import NOT_KNOWN, Cursor, Extent, Loaded, Stream, load
from history.passed import Allowance, Passed
from history.rows import APPLICATION_ID, CHUNK_COLUMNS, CURSOR, DAMAGE, META, SCHEMA_VERSION, STREAM, Row
from storage import mark as marks
from storage.disk import BUSY_TIMEOUT_S, REAL_DISK, Disk, InUseError, Lock, Mark
from storage.faults import disk_bytes, free_bytes, is_damage, is_full, move_aside
from storage.runtime import REAL, Runtime
from uprotocol.status import UStatusError
from uprotocol.v1.ucode_pb2 import UCode

PAGE_BYTES: Final = 16_384  # a batch of 512 messages takes some 170 KB; measured best of 4 to 32 KiB
CHECKPOINT_CHUNKS: Final = 256  # rolled forward on open at most; the index of streams is written this seldom, its pages then once
CHECK_BYTES_MAX: Final = 256 << 20  # a file up to this size is checked whole on open (a second per GB); a greater one where it is read
RETENTION_CHUNKS_PER_PASS: Final = 64  # keeps a pass to milliseconds, since appends wait for it
VACUUM_PAGES_PER_PASS: Final = 64  # 1 MiB given back per pass
VACUUM_FREE_PERCENT: Final = 25  # free pages below that are the room for the next chunks
WITNESSES_MAX: Final = 8  # damaged chunks that claim to be old are passed over, so many in a pass
RETENTION_BYTES: Final = 1 << 30  # some six million messages of 150 bytes; a flash of a small gateway bears it
WAL_SHARE: Final = 16  # of the bytes of retention, one part in so many is for the write-ahead log ...
WAL_BYTES_MIN: Final = 512 << 10  # ... but it has room for some commits ...
WAL_BYTES_MAX: Final = 32 << 20  # ... and more brings nothing
WAL_WAIT_MS: Final = 100  # for readers, some steps of them
WAL_AGAIN_S: Final = 1.0  # until they are waited for again, where that was in vain
TRANSACTION_SHARE: Final = 16  # one part in so many is for the next transaction ...
TRANSACTION_BYTES_MAX: Final = 4 << 20  # ... 8,192 messages of 500 bytes
OTHER_BYTES: Final = 128 << 10  # the index of the write-ahead log, the mark, the lock
FILE_BYTES_MIN: Final = 256 << 10  # tables and indexes that hold nothing take some 180 KiB

log = structlog.get_logger()


@dataclass(slots=True)
class Changes:
    """What is committed beside the chunks."""

    streams: list[Stream] = field(default_factory=list)  # new ones
    cursors: dict[str, Cursor | None] = field(default_factory=dict)  # None: dropped
    damage: list[Row] = field(default_factory=list)
    distrusts_index: bool = False

    def followed_by(self, later: Changes) -> Changes:
        return Changes(
            self.streams + later.streams,
            self.cursors | later.cursors,
            self.damage + later.damage,
            self.distrusts_index or later.distrusts_index,
        )


def status_error(error: sqlite3.Error, path: Path) -> UStatusError:
    """A full disk is RESOURCE_EXHAUSTED; anything else that SQLite reports is UNAVAILABLE: trying again may help."""
    code = UCode.RESOURCE_EXHAUSTED if is_full(error, path) else UCode.UNAVAILABLE
    return UStatusError(code, f"the log {path} can't be written ({error}); nothing of this batch was stored: free the disk and send again")


class DamagedError(Exception):
    """The file is a log, or was, and can't be used as one any more."""


@dataclass(slots=True)
class Store:
    """Used by one thread at a time: by whoever opens it, then by the writer."""

    path: Path
    runtime: Runtime = REAL
    now_ms: Callable[[], int] = REAL.now_ms
    loaded: Loaded = field(default_factory=Loaded)
    bytes_max: int = RETENTION_BYTES
    allowance: Allowance = field(default_factory=Allowance)
    _db: sqlite3.Connection | None = None
    _lock: Lock | None = None
    _mark: Mark | None = None
    _stream_places: dict[int, Stream] = field(default_factory=dict)
    _data_version: int = 0  # of SQLite: changes when another process has written
    _used_bytes: int = 0  # of pages that are in use, as last looked at and appended since
    _wal_due: float = 0.0

    def __repr__(self) -> str:
        return f"Store({self.path}, {self.extent})"

    @property
    def incarnation(self) -> bytes:
        return self.loaded.incarnation

    @property
    def extent(self) -> Extent:
        return self.loaded.extent

    @property
    def streams(self) -> list[Stream]:
        return self.loaded.streams

    # -- open and close

    @classmethod
    def open(cls, path: Path, runtime: Runtime = REAL, now_ms: Callable[[], int] | None = None, bytes_max: int = RETENTION_BYTES) -> Store:
        """Raises UStatusError: ALREADY_EXISTS (in use), FAILED_PRECONDITION (newer, or no log), RESOURCE_EXHAUSTED (the disk is full),
        UNAVAILABLE (I/O). Only a file that is damaged is moved aside."""
        store = cls(path, runtime, now_ms or runtime.now_ms, bytes_max=bytes_max)
        store._take_lock()
        try:
            try:
                store._open([])
            except (DamagedError, DecodeError, TypeError, ValueError, sqlite3.DatabaseError) as error:
                if isinstance(error, sqlite3.Error) and not is_damage(error):
                    raise
                store._open(store._move_aside(error))
        except BaseException as error:
            store._release()
            if isinstance(error, sqlite3.Error | OSError):
                raise store._cant_open(error) from error
            raise
        return store

    def _cant_open(self, error: Exception) -> UStatusError:
        if is_full(error, self.path):
            return UStatusError(
                UCode.RESOURCE_EXHAUSTED, f"the log {self.path} can't be opened, because its disk is full ({error}); nothing was changed"
            )
        return UStatusError(UCode.UNAVAILABLE, f"the log {self.path} can't be opened: {error}")

    def _take_lock(self) -> None:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._lock = self.runtime.disk.lock(Path(f"{self.path}.lock"))  # held as long as the log is open
        except InUseError as owner:
            raise UStatusError(
                UCode.ALREADY_EXISTS, f"the log {self.path} is in use by process {owner}: stop that one, or configure another path"
            ) from None
        except OSError as error:
            raise self._cant_open(error) from error

    def _open(self, damage: Sequence[Damage]) -> None:
        """`damage` is what a new log has to remember of the one that was here."""
        marked, mark_trouble = self._read_mark()
        is_new = self._inspect()
        db = self._db = self.runtime.disk.connect(self.path)
        if is_new:
            self._create(db, damage or self._predecessor(marked))
        self._verify(db)
        db.execute("PRAGMA journal_mode = WAL")
        self._settle(db)
        self._upgrade(db)
        self.loaded = load(db, marked, mark_trouble, self.now_ms(), self.runtime.random_bytes)
        if is_new:
            self.loaded.found = self.loaded.ledger.open
        self._stream_places = {stream.id: stream for stream in self.loaded.streams}
        self._data_version = _pragma(db, "data_version")
        self._open_mark()
        self.sample()

    def _settle(self, db: sqlite3.Connection) -> None:
        """What holds for a connection, not for the file."""
        db.execute("PRAGMA synchronous = FULL")
        db.execute("PRAGMA cell_size_check = 1")
        wal_bytes = wal_bytes_max(self.bytes_max)
        db.execute(f"PRAGMA wal_autocheckpoint = {wal_bytes // 2 // PAGE_BYTES}")
        db.execute(f"PRAGMA journal_size_limit = {wal_bytes}")

    def _inspect(self) -> bool:
        """Is it ours, and of a version that we know? True if there is nothing in it yet. Changes nothing: not even a log beside it."""
        if self.path.is_dir():
            raise UStatusError(UCode.FAILED_PRECONDITION, f"the log {self.path} can't be opened: it is a folder, not a file")
        if not self.path.exists() or not self.path.stat().st_size:
            return True
        db = self.runtime.disk.connect(self.path, read_only=True)
        try:
            tables = {name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
            if _pragma(db, "application_id") != APPLICATION_ID and not {"chunk", "chunk_stream", "meta"} <= tables:
                if tables:
                    raise UStatusError(UCode.FAILED_PRECONDITION, f"{self.path} is a SQLite file, but not a log: configure another path")
                return True
            version = _pragma(db, "user_version")
        finally:
            db.close()
        if version > SCHEMA_VERSION:
            raise UStatusError(
                UCode.FAILED_PRECONDITION,
                f"the log {self.path} has format {version}, and this program knows up to {SCHEMA_VERSION}: "
                "run the newer program, or configure another path",
            )
        return False

    def _create(self, db: sqlite3.Connection, damage: Sequence[Damage]) -> None:
        db.execute(f"PRAGMA page_size = {PAGE_BYTES}")
        db.execute("PRAGMA auto_vacuum = INCREMENTAL")
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA synchronous = FULL")
        meta = {"incarnation": self.runtime.random_bytes(16), "indexed_seq": 0, "newest_seq": 0, "floor_seq": 0, "stored_bytes": 0}
        ledger = Ledger()
        for one in damage:
            ledger.add(one)
        db.execute("BEGIN IMMEDIATE")
        with _transaction(db):
            rows.create(db, meta, ledger.rows)

    def _verify(self, db: sqlite3.Connection) -> None:
        if self.path.stat().st_size <= CHECK_BYTES_MAX:
            answer = db.execute("PRAGMA quick_check(1)").fetchone()[0]
            if answer != "ok":
                raise DamagedError(str(answer))

    def _upgrade(self, db: sqlite3.Connection) -> None:
        """From an older version, in one transaction: whatever interrupts it, the old file is still there."""
        is_today_s = any(name == "crc" for _, name, *_ in db.execute("PRAGMA table_info(meta)"))
        version, application = _pragma(db, "user_version"), _pragma(db, "application_id")
        if is_today_s and version == SCHEMA_VERSION and application == APPLICATION_ID:
            return
        db.execute("BEGIN IMMEDIATE")
        with _transaction(db):
            if not is_today_s:
                rows.upgrade(db, 1)
                log.info("the log was brought to a newer format", path=str(self.path), version=SCHEMA_VERSION)
            db.execute(f"PRAGMA application_id = {APPLICATION_ID}")  # bits that turned there
            db.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")

    def _predecessor(self, marked: marks.Marked | None) -> list[Damage]:
        """What is left of a log that was here: its mark, or a damaged file that was moved aside by somebody who then came no further."""
        aside = sorted(path for path in self.path.parent.glob(f"{self.path.name}.damaged-*") if not path.name.endswith(("-wal", "-shm")))
        moved_to = str(aside[-1]) if aside else ""
        if marked is not None and marked.seq:
            detail = "there was a log here, and its file is gone"
            return [Damage(self.now_ms(), kinds.MISSING, 0, marked.seq + 1, marked.incarnation, moved_to, detail)]
        if aside:
            return [Damage(self.now_ms(), kinds.FILE, 0, 0, b"", moved_to, "a damaged log was moved aside earlier")]
        return []

    def _move_aside(self, reason: Exception) -> list[Damage]:
        """What the next log has to remember."""
        if self._db is not None:
            with contextlib.suppress(sqlite3.Error):
                self._db.close()
        self._db = None
        target = move_aside(self.path)
        log.error(
            "the log is damaged: it was moved aside, and an empty one with a new incarnation starts",
            path=str(self.path),
            moved_to=str(target),
            reason=str(reason),
        )
        marked, _ = self._read_mark()
        seq, incarnation = (marked.seq, marked.incarnation) if marked is not None else (0, b"")
        return [
            *_told_by(target, self.runtime.disk),
            Damage(self.now_ms(), kinds.FILE, 0, seq + 1 if seq else 0, incarnation, str(target), str(reason)),
        ]

    def _read_mark(self) -> tuple[marks.Marked | None, str]:
        """What the mark says, and else why it can't be used."""
        try:
            return marks.unpack(Path(f"{self.path}.mark").read_bytes()), ""
        except FileNotFoundError:
            return None, ""
        except (OSError, marks.BadMarkError) as error:
            return None, f"the mark can't be used ({error})"

    def _open_mark(self) -> None:
        self._mark = self.runtime.disk.mark(Path(f"{self.path}.mark"))
        self._mark.begin(marks.pack(self.incarnation, self.loaded.start_seq))

    def close(self) -> None:
        """Everything committed is kept in any case; a clean close spares the next open some work."""
        if self._db is not None:
            try:
                self._db.execute("BEGIN IMMEDIATE")
                with _transaction(self._db):
                    self._checkpoint(self._db)
                self._checkpointed()
                self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            except sqlite3.Error as error:
                log.warning("the log could not be closed cleanly; the next open recovers it", path=str(self.path), error=str(error))
        self._release()

    def _release(self) -> None:
        if self._db is not None:
            with contextlib.suppress(sqlite3.Error):
                self._db.close()
            self._db = None
        if self._mark is not None:
            self._mark.close()
            self._mark = None
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    # -- write

    def commit(self, chunks: Sequence[Columns], changes: Changes, *, probe: bool = False) -> None:
        """All of it on disk, or a sqlite3.Error and nothing of it. `probe`: write something in any case, to see whether that works."""
        db = self._connection()
        loaded = self.loaded
        checkpoint = len(loaded.unindexed) + len(chunks) >= CHECKPOINT_CHUNKS
        db.execute("BEGIN IMMEDIATE")
        with _transaction(db):
            STREAM.insert(db, [stream.row for stream in changes.streams])
            db.executemany(
                "INSERT INTO chunk VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                [(c.first_seq, c.records, c.time_ms, c.bytes, c.crc, c.streams, c.ids, c.data) for c in chunks],
            )
            if changes.cursors:
                _write_cursors(db, changes.cursors)
            DAMAGE.insert(db, changes.damage)
            if changes.distrusts_index:
                loaded.is_index_trusted = False
                META.insert(db, [("indexed_seq", NOT_KNOWN)])
            if probe:
                META.insert(db, [("probe", self.runtime.random_bytes(8))])
            if checkpoint and loaded.unindexed:  # up to before these chunks, whose streams have not grown yet
                self._checkpoint(db)
        if checkpoint:
            self._checkpointed()
        for stream in changes.streams:
            self.streams.append(stream)
            self._stream_places[stream.id] = stream
        loaded.unindexed.extend((c.first_seq, c.streams) for c in chunks)
        if chunks:
            self.extent.oldest_seq = self.extent.oldest_seq or chunks[0].first_seq
            self.extent.newest_seq = chunks[-1].last_seq
            added = sum(c.bytes for c in chunks)
            self.extent.stored_bytes += added
            self._used_bytes += added
            assert self._mark is not None
            with contextlib.suppress(OSError):  # in place, without fsync: it need not survive more than SQLite's own file does
                self._mark.write(marks.pack(self.incarnation, self.extent.newest_seq))

    def grown(self, ids: Iterable[int]) -> None:
        self.loaded.dirty.update(ids)

    def _connection(self) -> sqlite3.Connection:
        if self._db is None:
            self._db = self.runtime.disk.connect(self.path)
            self._settle(self._db)
            # What failed may have been stored all the same. It was refused, nobody has seen it, and its seqs are given out again.
            self._db.execute("DELETE FROM chunk WHERE first_seq > ?", (self.extent.newest_seq,))
            self._data_version = _pragma(self._db, "data_version")
        return self._db

    def reset(self) -> None:
        """After an error: the next commit starts with a new connection."""
        if self._db is not None:
            with contextlib.suppress(sqlite3.Error):
                self._db.close()
            self._db = None

    def _checkpoint(self, db: sqlite3.Connection) -> None:
        index = [(id, first_seq) for first_seq, packed in self.loaded.unindexed for id in unpack_streams(packed)]
        index.sort()
        db.executemany("INSERT OR IGNORE INTO chunk_stream VALUES (?, ?)", index)
        STREAM.insert(db, [self._stream_places[id].row for id in sorted(self.loaded.dirty)])
        extent = self.extent
        meta = {"newest_seq": extent.newest_seq, "floor_seq": extent.floor_seq, "stored_bytes": extent.stored_bytes}
        META.insert(db, [*meta.items(), ("indexed_seq", extent.newest_seq if self.loaded.is_index_trusted else NOT_KNOWN)])

    def _checkpointed(self) -> None:
        self.loaded.unindexed.clear()
        self.loaded.dirty.clear()

    def acknowledged_elsewhere(self) -> list[int]:
        """The numbers of the damage that another process has acknowledged in our file since we last looked."""
        db = self._connection()
        version = _pragma(db, "data_version")
        if version == self._data_version:
            return []
        self._data_version = version
        return [row[0] for row in DAMAGE.read(db).rows if row[-1]]

    def sample(self) -> None:
        """Look what the files really take, and what is left."""
        self.extent.disk_bytes = sum(disk_bytes(Path(f"{self.path}{suffix}")) for suffix in ("", "-wal", "-shm", ".mark"))
        with contextlib.suppress(OSError):
            self.extent.disk_free_bytes = free_bytes(self.path)

    # -- retention

    def retain(self, cutoff_ms: int, bytes_max: int, keep_after: int, owed_after: int) -> tuple[bool, Passed | None]:
        """Delete the oldest chunks: those appended before `cutoff_ms`, but none with a seq beyond `keep_after`, and in any case as many as
        it takes to keep all files within `bytes_max`. The last chunk stays, so that a reader finds the end. A bounded step; True if there
        is more to do.

        What lies beyond `owed_after` is handed back, as far as that is not too much.
        """
        db = self._connection()
        excess = self._excess(db, bytes_max)
        doomed, floor = self._doomed(db, cutoff_ms, excess, keep_after)
        if not doomed:
            return self._vacuum(db, bytes_max), None
        before = replace(self.extent)
        passed = self._passed(db, doomed, max(owed_after, before.floor_seq), floor) if owed_after < floor else None
        db.execute("BEGIN IMMEDIATE")
        try:
            with _transaction(db):
                self._checkpoint(db)
                index = [(id, first) for first, _, packed in doomed for id in unpack_streams(packed)]
                db.executemany("DELETE FROM chunk_stream WHERE stream = ? AND first_seq = ?", index)
                db.execute("DELETE FROM chunk WHERE first_seq <= ?", (floor,))
                self.extent.oldest_seq = floor + 1
                self.extent.floor_seq = max(before.floor_seq, floor)
                self.extent.stored_bytes -= sum(bytes for _, bytes, _ in doomed)
                META.insert(db, [("floor_seq", self.extent.floor_seq), ("stored_bytes", self.extent.stored_bytes)])
        except BaseException:
            self.loaded.extent = before
            raise
        self._checkpointed()
        return len(doomed) == RETENTION_CHUNKS_PER_PASS or self._excess(db, bytes_max) > 0, passed

    def _excess(self, db: sqlite3.Connection, bytes_max: int) -> int:
        """How much of the file has to become free. Once it is too big, somewhat more: so that not every commit deletes."""
        self._used_bytes = (_pragma(db, "page_count") - _pragma(db, "freelist_count")) * PAGE_BYTES
        excess = max(self._used_bytes - file_bytes_max(bytes_max), self.extent.stored_bytes - bytes_max)
        return excess + transaction_bytes(bytes_max) // 4 if excess > 0 else excess

    def is_too_big(self, bytes_max: int) -> bool:
        """An estimate that costs nothing: is it time to `retain`?"""
        return self._used_bytes > file_bytes_max(bytes_max)

    def _passed(self, db: sqlite3.Connection, doomed: Sequence[_Doomed], after: int, floor: int) -> Passed:
        def chunks() -> Iterator[Chunk]:
            for first, _, _ in doomed:
                if (chunk := _chunk_at(db, first)) is not None:  # else (after, before) names it
                    yield chunk

        return Passed(after, floor + 1, self.allowance.take(chunks(), after))

    def _doomed(self, db: sqlite3.Connection, cutoff_ms: int, excess: int, keep_after: int) -> tuple[list[_Doomed], int]:
        """The oldest chunks that have to go, and the last seq of them. A chunk ends where the next begins: safer than its own word."""
        oldest = "SELECT first_seq, length(streams) + length(ids) + length(data), streams FROM chunk ORDER BY first_seq LIMIT ?"
        rows: list[_Doomed] = db.execute(oldest, (RETENTION_CHUNKS_PER_PASS + 1,)).fetchall()
        aged = self._aged(db, cutoff_ms) if len(rows) > 1 and rows[1][0] - 1 <= keep_after else 0
        doomed: list[_Doomed] = []
        floor = 0
        for row, following in pairwise(rows):
            last = following[0] - 1
            if excess <= 0 and not (row[0] <= aged and last <= keep_after):
                break
            doomed.append(row)
            floor = last
            excess -= row[1]
        return doomed, floor

    def _aged(self, db: sqlite3.Connection, cutoff_ms: int) -> int:
        """Order is by seq, not by the clock: whatever was appended before an old record is older. One wrong time must not delete them all:
        the witness has to be whole."""
        query = "SELECT max(first_seq) FROM chunk WHERE time_ms < ? AND first_seq < ?"
        witness = NOBODY
        for _ in range(WITNESSES_MAX):
            witness = db.execute(query, (cutoff_ms, witness)).fetchone()[0] or 0
            if not witness:
                return 0
            chunk = _chunk_at(db, witness)
            if chunk is not None and chunk.time_ms < cutoff_ms:
                return witness
        return 0

    def _vacuum(self, db: sqlite3.Connection, bytes_max: int) -> bool:
        """Give back what is free: all beyond the limit, and most of what nobody will need soon. A bounded step; True if there is more."""
        free, pages = _pragma(db, "freelist_count"), _pragma(db, "page_count")
        is_beyond = free > 0 and pages * PAGE_BYTES > file_bytes_max(bytes_max) + transaction_bytes(bytes_max)
        if not is_beyond and (free * 100 <= pages * VACUUM_FREE_PERCENT or free < VACUUM_PAGES_PER_PASS):
            return False
        db.execute(f"PRAGMA incremental_vacuum({VACUUM_PAGES_PER_PASS})").fetchall()
        return True

    def bound_wal(self) -> None:
        """SQLite empties its write-ahead log by itself, unless readers are always there; then they are waited for."""
        if self._db is None or self.runtime.monotonic() < self._wal_due:
            return
        wal = Path(f"{self.path}-wal")
        if not wal.exists() or wal.stat().st_size <= wal_bytes_max(self.bytes_max):
            return
        self._db.execute(f"PRAGMA busy_timeout = {WAL_WAIT_MS}")
        try:
            is_busy, *_ = self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
        finally:
            self._db.execute(f"PRAGMA busy_timeout = {round(BUSY_TIMEOUT_S * 1_000)}")
        if is_busy:  # somebody reads for long: a backup, say
            self._wal_due = self.runtime.monotonic() + WAL_AGAIN_S


_Doomed = tuple[int, int, bytes]  # first_seq, bytes, streams


def wal_bytes_max(bytes_max: int) -> int:
    """Of `bytes_max`, for the write-ahead log: the greater, the fewer checkpoints."""
    return min(max(bytes_max // WAL_SHARE, WAL_BYTES_MIN), WAL_BYTES_MAX)


def transaction_bytes(bytes_max: int) -> int:
    """Of `bytes_max`, for what one transaction adds before retention has its turn."""
    return min(bytes_max // TRANSACTION_SHARE, TRANSACTION_BYTES_MAX)


def file_bytes_max(bytes_max: int) -> int:
    """Of `bytes_max`, for the pages of the database that are in use."""
    return max(bytes_max - wal_bytes_max(bytes_max) - transaction_bytes(bytes_max) - OTHER_BYTES, FILE_BYTES_MIN)


def _chunk_at(db: sqlite3.Connection, first_seq: int) -> Chunk | None:
    """None if it can't be read."""
    try:
        row = db.execute(f"SELECT {CHUNK_COLUMNS} FROM chunk WHERE first_seq = ?", (first_seq,)).fetchone()
        return decode(Columns(*row))
    except (CorruptChunkError, struct.error, TypeError, ValueError):
        return None


def _write_cursors(db: sqlite3.Connection, cursors: dict[str, Cursor | None]) -> None:
    kept = [(name, c.seq, c.lease_until_ms, int(c.holds), c.absent_ms) for name, c in cursors.items() if c is not None]
    CURSOR.insert(db, kept)
    db.executemany("DELETE FROM cursor WHERE name = ?", [(name,) for name, cursor in cursors.items() if cursor is None])


def _told_by(path: Path, disk: Disk = REAL_DISK) -> list[Damage]:
    """What a damaged file had to tell already, and nobody has acknowledged; as far as it can be read."""
    try:
        db = disk.connect(path, read_only=True)
    except sqlite3.Error:
        return []
    try:
        return Ledger(DAMAGE.read(db).rows).open
    except (sqlite3.Error, TypeError, ValueError):
        return []
    finally:
        db.close()


@contextlib.contextmanager
def _transaction(db: sqlite3.Connection) -> Any:
    """Commits what follows a BEGIN; on any error rolls back."""
    try:
        yield
        db.execute("COMMIT")
    except BaseException:
        with contextlib.suppress(sqlite3.Error):
            db.execute("ROLLBACK")
        raise


def _pragma(db: sqlite3.Connection, name: str) -> int:
    return int(db.execute(f"PRAGMA {name}").fetchone()[0])


__all__ = ["Changes", "Cursor", "Damage", "Extent", "Store", "Stream", "status_error"]
