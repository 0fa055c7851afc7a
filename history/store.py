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
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import structlog
from google.protobuf.message import DecodeError

from history.chunk import ID_BYTES, Columns, CorruptChunkError, decode, unpack_streams
from storage.disk import InUseError, Lock, Mark
from storage.runtime import REAL, Runtime
from uprotocol.status import UStatusError
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.uri_pb2 import UUri

SCHEMA_VERSION: Final = 1
APPLICATION_ID: Final = 0x7570_7331  # "ups1": tells a log from any other SQLite file
PAGE_BYTES: Final = 16_384  # a batch of 512 messages takes some 170 KB; measured best of 4 to 32 KiB
CHECKPOINT_CHUNKS: Final = 256  # rolled forward on open at most; the index of streams is written this seldom, its pages then once
CHECK_BYTES_MAX: Final = 256 << 20  # a file up to this size is checked whole on open (a second per GB); a greater one where it is read
RETENTION_CHUNKS_PER_PASS: Final = 64  # keeps a pass to milliseconds, since appends wait for it
VACUUM_PAGES_PER_PASS: Final = 64  # 1 MiB given back per pass
VACUUM_FREE_PERCENT: Final = 25  # free pages below that are the room for the next chunks

_SCHEMA: Final = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value ANY) WITHOUT ROWID;
CREATE TABLE stream (id INTEGER PRIMARY KEY, source BLOB NOT NULL, sink BLOB, first_seq INTEGER NOT NULL, newest_seq INTEGER NOT NULL,
    records INTEGER NOT NULL, newest_id BLOB NOT NULL, newest_time_ms INTEGER NOT NULL);
CREATE TABLE chunk (first_seq INTEGER PRIMARY KEY, records INTEGER NOT NULL, time_ms INTEGER NOT NULL, bytes INTEGER NOT NULL,
    crc INTEGER NOT NULL, streams BLOB NOT NULL, ids BLOB NOT NULL, data BLOB NOT NULL);
CREATE INDEX chunk_time ON chunk (time_ms);
CREATE TABLE chunk_stream (stream INTEGER NOT NULL, first_seq INTEGER NOT NULL, PRIMARY KEY (stream, first_seq)) WITHOUT ROWID;
CREATE TABLE hole (after INTEGER PRIMARY KEY, before INTEGER NOT NULL);
CREATE TABLE cursor (name TEXT PRIMARY KEY, seq INTEGER NOT NULL, lease_until_ms INTEGER) WITHOUT ROWID;
"""

_MARK: Final = struct.Struct("<16sQ")  # incarnation, newest seq
CHUNK_COLUMNS: Final = "first_seq, records, time_ms, streams, ids, data, crc"

log = structlog.get_logger()


class Stream:
    """One (source, sink): a topic, or the notifications from one topic to one sink. Numbers move when a commit is done."""

    __slots__ = ("first_seq", "id", "newest_id", "newest_seq", "newest_time_ms", "records", "sink", "source")

    def __init__(self, id: int, source: UUri, sink: UUri | None) -> None:
        self.id, self.source, self.sink = id, source, sink
        self.first_seq = self.newest_seq = self.records = 0  # records: appended, ever
        self.newest_id = b""
        self.newest_time_ms = 0

    def __repr__(self) -> str:
        return f"Stream({self.id}, newest_seq={self.newest_seq}, records={self.records})"

    def grow(self, first_seq: int, newest_seq: int, records: int, newest_id: bytes, time_ms: int) -> None:
        self.first_seq = self.first_seq or first_seq
        self.newest_seq, self.newest_id, self.newest_time_ms = newest_seq, newest_id, time_ms
        self.records += records


@dataclass(frozen=True, slots=True)
class Cursor:
    seq: int
    lease_until_ms: int | None = None  # None: holds no retention


@dataclass(slots=True)
class Extent:
    """What of the log there is."""

    oldest_seq: int = 0  # 0: empty
    newest_seq: int = 0  # ever given out
    floor_seq: int = 0  # everything up to here was deleted
    stored_bytes: int = 0


def status_error(error: sqlite3.Error, path: Path) -> UStatusError:
    """A full disk is RESOURCE_EXHAUSTED; anything else that SQLite reports is UNAVAILABLE: trying again may help."""
    code = UCode.RESOURCE_EXHAUSTED if _primary_code(error) == sqlite3.SQLITE_FULL else UCode.UNAVAILABLE
    return UStatusError(code, f"the log {path} can't be written ({error}); nothing of this batch was stored: free the disk and send again")


def _primary_code(error: sqlite3.Error) -> int:
    return getattr(error, "sqlite_errorcode", 0) & 0xFF


def is_damage(error: sqlite3.Error) -> bool:
    return _primary_code(error) in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)


class DamagedError(Exception):
    """The file is a log, or was, and can't be used as one any more."""


@dataclass(slots=True)
class Store:
    """Used by one thread at a time: by whoever opens it, then by the writer."""

    path: Path
    incarnation: bytes = b""
    extent: Extent = field(default_factory=Extent)
    streams: list[Stream] = field(default_factory=list)
    cursors: dict[str, Cursor] = field(default_factory=dict)
    holes: list[tuple[int, int]] = field(default_factory=list)  # (after, before): committed once, and lost with a damaged WAL
    moved_to: Path | None = None  # where a damaged predecessor is kept
    runtime: Runtime = REAL
    _db: sqlite3.Connection | None = None
    _lock: Lock | None = None
    _mark: Mark | None = None
    _unindexed: list[tuple[int, bytes]] = field(default_factory=list)  # chunks since the last checkpoint
    _dirty: set[int] = field(default_factory=set)  # streams that grew since
    _stream_places: dict[int, Stream] = field(default_factory=dict)

    def __repr__(self) -> str:
        return f"Store({self.path}, {self.extent})"

    # -- open and close

    @classmethod
    def open(cls, path: Path, runtime: Runtime = REAL) -> Store:
        """Raises UStatusError: ALREADY_EXISTS (in use), FAILED_PRECONDITION (newer, or no log), UNAVAILABLE (I/O)."""
        store = cls(path, runtime=runtime)
        store._take_lock()
        try:
            try:
                store._open()
            except (DamagedError, DecodeError, TypeError, ValueError, sqlite3.DatabaseError) as error:
                if isinstance(error, sqlite3.Error) and not is_damage(error):
                    raise
                store._move_aside(error)
                store._forget()
                store._open()
        except BaseException as error:
            store._release()
            if isinstance(error, sqlite3.Error):
                raise UStatusError(UCode.UNAVAILABLE, f"the log {path} can't be opened: {error}") from error
            raise
        return store

    def _take_lock(self) -> None:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._lock = self.runtime.disk.lock(Path(f"{self.path}.lock"))  # held as long as the log is open
        except InUseError as owner:
            raise UStatusError(
                UCode.ALREADY_EXISTS, f"the log {self.path} is in use by process {owner}: stop that one, or configure another path"
            ) from None
        except OSError as error:
            raise UStatusError(UCode.UNAVAILABLE, f"the log {self.path} can't be opened: {error}") from error

    def _open(self) -> None:
        db = self._db = self.runtime.disk.connect(self.path)
        if self.path.stat().st_size == 0 and not _tables(db):
            self._create(db)
        self._verify(db)
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA synchronous = FULL")
        self._load(db)

    def _create(self, db: sqlite3.Connection) -> None:
        db.execute(f"PRAGMA page_size = {PAGE_BYTES}")
        db.execute("PRAGMA auto_vacuum = INCREMENTAL")
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA synchronous = FULL")
        db.execute("BEGIN IMMEDIATE")
        for statement in _SCHEMA.split(";\n"):
            db.execute(statement)
        db.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        db.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
        meta = {"incarnation": self.runtime.random_bytes(16), "indexed_seq": 0, "newest_seq": 0, "floor_seq": 0, "stored_bytes": 0}
        db.executemany("INSERT INTO meta VALUES (?, ?)", meta.items())
        db.execute("COMMIT")

    def _verify(self, db: sqlite3.Connection) -> None:
        if _pragma(db, "application_id") != APPLICATION_ID:
            if _tables(db):
                raise UStatusError(UCode.FAILED_PRECONDITION, f"{self.path} is a SQLite file, but not a log: configure another path")
            raise DamagedError("there is nothing in it")
        version = _pragma(db, "user_version")
        if version > SCHEMA_VERSION:
            raise UStatusError(
                UCode.FAILED_PRECONDITION,
                f"the log {self.path} has format {version}, and this program knows up to {SCHEMA_VERSION}: "
                "run the newer program, or configure another path",
            )
        if self.path.stat().st_size <= CHECK_BYTES_MAX:
            answer = db.execute("PRAGMA quick_check(1)").fetchone()[0]
            if answer != "ok":
                raise DamagedError(str(answer))

    def _move_aside(self, reason: Exception) -> None:
        if self._db is not None:
            with contextlib.suppress(sqlite3.Error):
                self._db.close()
        self._db = None
        target = Path(f"{self.path}.damaged-{time.time_ns()}")
        for suffix in ("", "-wal", "-shm"):
            with contextlib.suppress(FileNotFoundError):
                Path(f"{self.path}{suffix}").rename(f"{target}{suffix}")
        self.moved_to = target
        log.error(
            "the log is damaged: it was moved aside, and an empty one with a new incarnation starts",
            path=str(self.path),
            moved_to=str(target),
            reason=str(reason),
        )

    def _load(self, db: sqlite3.Connection) -> None:
        meta = dict(db.execute("SELECT key, value FROM meta"))
        missing = {"incarnation", "indexed_seq", "newest_seq", "floor_seq", "stored_bytes"} - meta.keys()
        if missing:
            raise DamagedError(f"it doesn't say {', '.join(sorted(missing))}")
        self.incarnation = bytes(meta["incarnation"])
        oldest = db.execute("SELECT min(first_seq) FROM chunk").fetchone()[0] or 0
        self.extent = Extent(oldest, meta["newest_seq"], meta["floor_seq"], meta["stored_bytes"])
        for id, source, sink, first, newest, records, newest_id, time_ms in db.execute("SELECT * FROM stream ORDER BY id"):
            stream = Stream(id, UUri.FromString(source), None if sink is None else UUri.FromString(sink))
            stream.grow(first, newest, records, newest_id, time_ms)
            self.add_stream(stream)
        for name, seq, lease_until_ms in db.execute("SELECT name, seq, lease_until_ms FROM cursor"):
            self.cursors[name] = Cursor(seq, lease_until_ms)
        self._roll_forward(db, meta["indexed_seq"])
        self.holes = list(db.execute("SELECT after, before FROM hole ORDER BY after"))
        self._open_mark(db)

    def _open_mark(self, db: sqlite3.Connection) -> None:
        """The mark is a small file that says up to where was committed. SQLite cuts a damaged WAL in silence; this is how we know."""
        self._mark = self.runtime.disk.mark(Path(f"{self.path}.mark"))
        marked = self._mark.read(_MARK.size)
        incarnation, seq = _MARK.unpack(marked) if len(marked) == _MARK.size else (b"", 0)
        newest = self.extent.newest_seq
        if incarnation == self.incarnation and seq > max(newest, self.start_seq):
            db.execute("INSERT OR REPLACE INTO hole VALUES (?, ?)", (newest, seq + 1))
            self.holes = [hole for hole in self.holes if hole[0] != newest] + [(newest, seq + 1)]
            log.error("committed records are lost: the write-ahead log was damaged", path=str(self.path), after=newest, before=seq + 1)

    @property
    def start_seq(self) -> int:
        """The last seq that must not be given out again."""
        return max(self.extent.newest_seq, *(before - 1 for _, before in self.holes), 0)

    def _forget(self) -> None:
        self.streams.clear()
        self.cursors.clear()
        self.holes.clear()
        self._unindexed.clear()
        self._dirty.clear()
        self._stream_places.clear()

    def add_stream(self, stream: Stream) -> None:
        self.streams.append(stream)
        self._stream_places[stream.id] = stream

    def _roll_forward(self, db: sqlite3.Connection, indexed_seq: int) -> None:
        """Count in what was committed after the last checkpoint."""
        for row in db.execute(f"SELECT {CHUNK_COLUMNS} FROM chunk WHERE first_seq > ? ORDER BY first_seq", (indexed_seq,)):
            columns = Columns(*row)
            self._unindexed.append((columns.first_seq, columns.streams))
            self.extent.stored_bytes += columns.bytes
            self.extent.newest_seq = max(self.extent.newest_seq, columns.last_seq)
            with contextlib.suppress(CorruptChunkError, struct.error, TypeError, KeyError):  # whoever reads it learns of the gap
                streams = decode(columns).streams
                for id, growth in growth_of(columns.first_seq, streams, columns.ids, columns.time_ms).items():
                    self._stream_places[id].grow(*growth)
                    self._dirty.add(id)

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

    def commit(
        self, chunks: Sequence[Columns], new_streams: Sequence[Stream], cursors: dict[str, Cursor | None], *, probe: bool = False
    ) -> None:
        """All of it on disk, or a sqlite3.Error and nothing of it. `probe`: write something in any case, to see whether that works."""
        db = self._connection()
        checkpoint = len(self._unindexed) + len(chunks) >= CHECKPOINT_CHUNKS
        db.execute("BEGIN IMMEDIATE")
        with _transaction(db):
            db.executemany(
                "INSERT INTO stream VALUES (?, ?, ?, 0, 0, 0, x'', 0)",
                [(s.id, s.source.SerializeToString(), None if s.sink is None else s.sink.SerializeToString()) for s in new_streams],
            )
            db.executemany(
                "INSERT INTO chunk VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                [(c.first_seq, c.records, c.time_ms, c.bytes, c.crc, c.streams, c.ids, c.data) for c in chunks],
            )
            _write_cursors(db, cursors)
            if probe:
                db.execute("INSERT OR REPLACE INTO meta VALUES ('probe', randomblob(8))")
            if checkpoint and self._unindexed:  # up to before these chunks, whose streams have not grown yet
                self._checkpoint(db)
        if checkpoint:
            self._checkpointed()
        for stream in new_streams:
            self.add_stream(stream)
        self._unindexed.extend((c.first_seq, c.streams) for c in chunks)
        if chunks:
            self.extent.oldest_seq = self.extent.oldest_seq or chunks[0].first_seq
            self.extent.newest_seq = chunks[-1].last_seq
            self.extent.stored_bytes += sum(c.bytes for c in chunks)
            assert self._mark is not None
            with contextlib.suppress(OSError):  # in place, without fsync: it need not survive more than SQLite's own file does
                self._mark.write(_MARK.pack(self.incarnation, self.extent.newest_seq))

    def grown(self, ids: Iterable[int]) -> None:
        self._dirty.update(ids)

    def _connection(self) -> sqlite3.Connection:
        if self._db is None:
            self._db = self.runtime.disk.connect(self.path)
            self._db.execute("PRAGMA synchronous = FULL")
        return self._db

    def reset(self) -> None:
        """After an error: the next commit starts with a new connection."""
        if self._db is not None:
            with contextlib.suppress(sqlite3.Error):
                self._db.close()
            self._db = None

    def _checkpoint(self, db: sqlite3.Connection) -> None:
        rows = [(id, first_seq) for first_seq, packed in self._unindexed for id in unpack_streams(packed)]
        rows.sort()
        db.executemany("INSERT OR IGNORE INTO chunk_stream VALUES (?, ?)", rows)
        grown = [self._stream_places[id] for id in sorted(self._dirty)]
        db.executemany(
            "UPDATE stream SET first_seq = ?, newest_seq = ?, records = ?, newest_id = ?, newest_time_ms = ? WHERE id = ?",
            [(s.first_seq, s.newest_seq, s.records, s.newest_id, s.newest_time_ms, s.id) for s in grown],
        )
        extent = self.extent
        meta = {"newest_seq": extent.newest_seq, "floor_seq": extent.floor_seq, "stored_bytes": extent.stored_bytes}
        meta["indexed_seq"] = extent.newest_seq
        db.executemany("UPDATE meta SET value = ? WHERE key = ?", [(value, key) for key, value in meta.items()])

    def _checkpointed(self) -> None:
        self._unindexed.clear()
        self._dirty.clear()

    # -- retention

    def retain(self, cutoff_ms: int, bytes_max: int, keep_after: int) -> bool:
        """Delete the oldest chunks: those appended before `cutoff_ms`, but none with a seq beyond `keep_after`, and as many as exceed
        `bytes_max` in any case. The last chunk stays, so that a reader finds the end. A bounded step; True if there is more to do."""
        db = self._connection()
        doomed = self._doomed(db, cutoff_ms, bytes_max, keep_after)
        if not doomed:
            return self._vacuum(db)
        before = Extent(self.extent.oldest_seq, self.extent.newest_seq, self.extent.floor_seq, self.extent.stored_bytes)
        db.execute("BEGIN IMMEDIATE")
        try:
            with _transaction(db):
                self._checkpoint(db)
                index = [(id, first) for first, _, _, packed in doomed for id in unpack_streams(packed)]
                db.executemany("DELETE FROM chunk_stream WHERE stream = ? AND first_seq = ?", index)
                db.execute("DELETE FROM chunk WHERE first_seq <= ?", (doomed[-1][0],))
                self.extent.oldest_seq = db.execute("SELECT min(first_seq) FROM chunk").fetchone()[0] or 0
                self.extent.floor_seq = max(before.floor_seq, doomed[-1][0] + doomed[-1][1] - 1)
                self.extent.stored_bytes -= sum(bytes for _, _, bytes, _ in doomed)
                meta = {"floor_seq": self.extent.floor_seq, "stored_bytes": self.extent.stored_bytes}
                db.executemany("UPDATE meta SET value = ? WHERE key = ?", [(value, key) for key, value in meta.items()])
        except BaseException:
            self.extent = before
            raise
        self._checkpointed()
        return len(doomed) == RETENTION_CHUNKS_PER_PASS

    def _doomed(self, db: sqlite3.Connection, cutoff_ms: int, bytes_max: int, keep_after: int) -> list[tuple[int, int, int, bytes]]:
        # Order is by seq, not by the clock: whatever was appended before an old record is older.
        aged = db.execute("SELECT max(first_seq) FROM chunk WHERE time_ms < ?", (cutoff_ms,)).fetchone()[0] or 0
        excess = self.extent.stored_bytes - bytes_max
        doomed: list[tuple[int, int, int, bytes]] = []
        oldest = "SELECT first_seq, records, bytes, streams FROM chunk WHERE first_seq < ? ORDER BY first_seq LIMIT ?"
        newest = db.execute("SELECT max(first_seq) FROM chunk").fetchone()[0] or 0
        for first, records, bytes, packed in db.execute(oldest, (newest, RETENTION_CHUNKS_PER_PASS)):
            if excess <= 0 and not (first <= aged and first + records - 1 <= keep_after):
                break
            doomed.append((first, records, bytes, packed))
            excess -= bytes
        return doomed

    def _vacuum(self, db: sqlite3.Connection) -> bool:
        free, pages = _pragma(db, "freelist_count"), _pragma(db, "page_count")
        if free * 100 <= pages * VACUUM_FREE_PERCENT or free < VACUUM_PAGES_PER_PASS:
            return False
        db.execute(f"PRAGMA incremental_vacuum({VACUUM_PAGES_PER_PASS})").fetchall()
        return True


def growth_of(first_seq: int, streams: Sequence[int], ids: bytes, time_ms: int) -> dict[int, tuple[int, int, int, bytes, int]]:
    """For each stream of a chunk: its first and newest seq there, how many records, the newest one's id and time."""
    newest = dict(zip(streams, range(len(streams)), strict=True))
    first = dict(zip(reversed(streams), range(len(streams) - 1, -1, -1), strict=True))
    counts = Counter(streams)
    return {
        id: (first_seq + first[id], first_seq + place, counts[id], ids[place * ID_BYTES : (place + 1) * ID_BYTES], time_ms)
        for id, place in newest.items()
    }


def _write_cursors(db: sqlite3.Connection, cursors: dict[str, Cursor | None]) -> None:
    kept = [(name, cursor.seq, cursor.lease_until_ms) for name, cursor in cursors.items() if cursor is not None]
    db.executemany("INSERT OR REPLACE INTO cursor VALUES (?, ?, ?)", kept)
    db.executemany("DELETE FROM cursor WHERE name = ?", [(name,) for name, cursor in cursors.items() if cursor is None])


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


def _tables(db: sqlite3.Connection) -> int:
    return int(db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0])


def _pragma(db: sqlite3.Connection, name: str) -> int:
    return int(db.execute(f"PRAGMA {name}").fetchone()[0])
