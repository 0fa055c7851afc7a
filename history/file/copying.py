"""Copies a log's file while its owner writes it, and makes another log of a copy.

    chunks up to the newest one, some MiB at a time -> the index of streams -> the chunks of meanwhile, twice
    -> one snapshot: the last chunks, and all small tables -> what retention has deleted meanwhile is deleted -> mark

Each step is a read transaction of milliseconds, so that the write-ahead log can be emptied between them. Chunks never
change, and everything else is read in one snapshot: the copy is the log as it was at that moment.
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NamedTuple

from history.file import damage as kinds
from history.file import rows
from history.file.damage import Damage, Ledger
from history.file.load import PREDECESSOR_PREFIX, STALE_NAMES
from history.file.opening import suspect_path
from history.file.rows import DAMAGE, HOLE, LOG, META
from history.records.chunk import unpack_streams
from storage.copies import STEP_BYTES, CopyPace, make_private
from storage.disk import REAL_DISK, Disk, insert_rows, read_mark, transaction
from storage.faults import DamagedError

SHARES: Final = (0.5, 1.0)  # of the time, for the chunks of meanwhile: each pass has less to copy
CHUNKS_AT_ONCE: Final = 256
INDEX_ROWS_AT_ONCE: Final = 16_384  # milliseconds
PREDECESSORS_MAX: Final = 16


class Copied(NamedTuple):
    incarnation: bytes
    oldest_seq: int
    newest_seq: int


def copy_log(
    source: Path, target: Path, pace: CopyPace, newest: Callable[[], int] | None = None, disk: Disk = REAL_DISK
) -> Copied:
    """Copy the log's file to `target`, and write its mark.

    `newest()`: the newest seq that is surely committed, from any thread; None: nobody writes. Raises sqlite3.Error,
    OSError, DamagedError, UStatusError (LOG.version_of), and as CopyPace.
    """
    if suspect_path(source).exists():
        raise DamagedError("it could not be written, because it is damaged, and is repaired by the next start")
    make_private(target)
    with contextlib.closing(disk.connect(target)) as db:
        for setting in (*LOG.layout, "journal_mode = OFF", "synchronous = OFF"):
            db.execute(f"PRAGMA {setting}")
        with transaction(db):
            rows.create(db, {}, ())
            LOG.stamp(db)
        db.execute("ATTACH ? AS live", (f"{source.absolute().as_uri()}?mode=ro",))
        return _Copying(db, source, target, pace, disk).run(newest)


class _Copying:
    def __init__(self, db: sqlite3.Connection, source: Path, target: Path, pace: CopyPace, disk: Disk) -> None:
        self._db, self._source, self._target, self._pace, self._disk = db, source, target, pace, disk
        self._last = 0  # first seq of the last chunk that was copied

    def run(self, newest: Callable[[], int] | None) -> Copied:
        db, share = self._db, self._pace.share
        self._chunks(newest)
        indexed = self._index()
        for later in SHARES if newest is not None else ():
            self._pace.share = max(share, later)
            self._chunks(newest)
        marked = read_mark(self._source)  # read first: what it names is committed by then
        with transaction(db):
            db.execute("INSERT INTO main.chunk SELECT * FROM live.chunk WHERE first_seq > ?", (self._last,))
            for table in rows.CHECKED:
                db.execute(f"INSERT INTO main.{table.name} SELECT * FROM live.{table.name}")
        self._pace.share = share
        self._pace.rest()
        bad: list[rows.StoredRow] = []
        meta = dict[str, Any](META.read(db, bad))
        if bad or not meta.keys() >= set(rows.META_KEYS):
            raise DamagedError("the checksums of its table meta are wrong")
        self._delete(meta["floor_seq"])
        self._index_rest(indexed, meta["indexed_seq"])
        copied = Copied(meta["incarnation"], rows.oldest_of(db), newest_of(db, meta))
        db.execute("DETACH live")
        self._disk.sync(self._target)
        is_same = marked is not None and marked.incarnation == copied.incarnation
        write_mark(self._target, copied.incarnation, max(copied.newest_seq, marked.seq if marked and is_same else 0))
        return copied

    def _chunks(self, newest: Callable[[], int] | None) -> None:
        """Copy the chunks up to the newest one of now."""
        db = self._db
        end = newest() if newest is not None else (1 << 62)
        found = f"SELECT first_seq, {rows.CHUNK_BYTES} FROM live.chunk WHERE first_seq > ? AND first_seq <= ?"
        while True:
            size, last = 0, self._last
            for first_seq, bytes in db.execute(f"{found} ORDER BY first_seq LIMIT {CHUNKS_AT_ONCE}", (last, end)):
                size, last = size + bytes, first_seq
                if size >= STEP_BYTES:
                    break
            if last == self._last:
                return
            with transaction(db):
                copy = "INSERT INTO main.chunk SELECT * FROM live.chunk WHERE first_seq > ? AND first_seq <= ?"
                db.execute(copy, (self._last, last))
            self._last = last
            self._disk.sync(self._target)  # else the last sync would keep the owner's commits waiting
            self._pace.rest()

    def _index(self) -> int:
        """Copy the index of streams of the chunks so far, and return up to which seq it names them."""
        db, after = self._db, (-1, -1)
        (indexed,) = db.execute("SELECT value FROM live.meta WHERE key = 'indexed_seq'").fetchone() or (0,)
        (floor,) = db.execute("SELECT value FROM live.meta WHERE key = 'floor_seq'").fetchone() or (0,)
        while True:
            with transaction(db):
                copy = """INSERT INTO main.chunk_stream SELECT stream, first_seq FROM live.chunk_stream
                          WHERE (stream, first_seq) > (?, ?) AND first_seq > ? AND first_seq <= ?
                          ORDER BY stream, first_seq LIMIT ?"""
                done = db.execute(copy, (*after, floor, indexed, INDEX_ROWS_AT_ONCE)).rowcount
            if done:
                after = db.execute(
                    "SELECT stream, first_seq FROM main.chunk_stream ORDER BY stream DESC, first_seq DESC LIMIT 1"
                ).fetchone()
            self._pace.rest()
            if done < INDEX_ROWS_AT_ONCE:
                return int(indexed)

    def _index_rest(self, after: int, until: int) -> None:
        """Add the rows of chunks that were indexed meanwhile."""
        db = self._db
        query = "SELECT first_seq, streams FROM chunk WHERE first_seq > ? AND first_seq <= ? ORDER BY first_seq LIMIT ?"
        while found := db.execute(query, (after, until, CHUNKS_AT_ONCE)).fetchall():
            with transaction(db):
                index = sorted((id, first_seq) for first_seq, streams in found for id in unpack_streams(streams))
                insert_rows(db, "INSERT OR IGNORE INTO chunk_stream", index)
            after = found[-1][0]
            self._pace.rest()

    def _delete(self, floor: int) -> None:
        """Delete what retention has deleted since it was copied."""
        db = self._db
        if rows.oldest_of(db) > floor:
            return
        with transaction(db):
            db.execute("DELETE FROM chunk WHERE first_seq <= ?", (floor,))
            META.insert(db, [(STALE_NAMES, 1)])  # the index may name them
        self._pace.rest()


def newest_of(db: sqlite3.Connection, meta: dict[str, Any]) -> int:
    """Returns the highest seq that the log in this file has given out."""
    last = db.execute("SELECT first_seq + records - 1 FROM chunk ORDER BY first_seq DESC LIMIT 1").fetchone()
    holes = [before - 1 for _, before in HOLE.read(db, [])]
    return int(max(meta["newest_seq"], 0 if last is None else last[0], *holes, 0))


def write_mark(path: Path, incarnation: bytes, seq: int) -> None:
    """Write the mark of a copy. Raises OSError."""
    mark_path = Path(f"{path}.mark")
    mark_path.unlink(missing_ok=True)
    make_private(mark_path)
    mark = REAL_DISK.mark(mark_path)
    try:
        mark.begin(incarnation, seq)
    finally:
        mark.close()


def make_another(
    path: Path, incarnation: bytes, now_ms: int, why: str, lost_to: int = 0, disk: Disk = REAL_DISK
) -> int:
    """Make another log of the copy at `path`: its next records will get seqs that the log which it was copied from has
    given to others.

    It remembers that log and up to where both are the same, so that readers go on there (log.position_before), and
    reports as damage that the rest is lost: up to `lost_to`, or 0 if that is unknown. Returns the newest seq. Raises as
    `copy_log`.
    """
    with contextlib.closing(disk.connect(path)) as db:
        LOG.version_of(db, path)
        with transaction(db):
            meta = dict[str, Any](META.read(db, []))
            old, newest = meta["incarnation"], newest_of(db, meta)
            known = sorted((seq, key) for key, seq in meta.items() if key.startswith(PREDECESSOR_PREFIX))
            for _, key in known[: max(0, len(known) - PREDECESSORS_MAX + 1)]:
                db.execute("DELETE FROM meta WHERE key = ?", (key,))
            META.insert(db, [("incarnation", incarnation), (PREDECESSOR_PREFIX + old.hex(), newest)])
            ours = DAMAGE.columns.index("incarnation")
            ledger = Ledger(
                tuple(incarnation if at == ours and value == old else value for at, value in enumerate(row))
                for row in DAMAGE.read(db, [])
            )
            before = lost_to + 1 if lost_to > newest else 0
            ledger.add(Damage(now_ms, kinds.MISSING, newest, before, old, "", why))
            DAMAGE.insert(db, ledger.rows)
    write_mark(path, incarnation, newest)
    return newest
