"""Reading the log's file, in executor threads: a bounded step at a time, and round what is damaged.

(after, until, streams) -> places: first_seqs, by index or by scan -> rows -> decode -> select -> Scan(chunks, covered, gaps)
"""

from __future__ import annotations

import contextlib
import sqlite3
import struct
import threading
from collections.abc import Iterator, Set
from pathlib import Path
from typing import Final

import structlog

from history.chunk import ID_BYTES, Chunk, Columns, CorruptChunkError, Scan, decode, unpack_streams
from history.rows import CHUNK_COLUMNS
from history.store import is_damage
from storage.disk import REAL_DISK, Disk

SCAN_CHUNKS_MAX: Final = 256  # looked at in one step, so that a step takes milliseconds and the next reader has its turn
INDEX_ROWS_MAX: Final = 1_024  # looked up in one step, shared by the streams that are wanted
SCAN_BYTES_MAX: Final = 16 << 20  # read from disk in one step, which bounds memory as well
KNOWN_BAD_MAX: Final = 10_000  # damaged chunks that are logged and counted, each once
INDEXED_STREAMS_MAX: Final = 64  # beyond that a scan of all chunks costs less than merging so many index ranges

log = structlog.get_logger()


class Reader:
    """Connections are pooled; every method may be called from any thread and blocks. Raises sqlite3.Error."""

    def __init__(self, path: Path, disk: Disk = REAL_DISK) -> None:
        self._path, self._disk = path, disk
        self._idle: list[sqlite3.Connection] = []
        self._lock = threading.Lock()
        self._closed = False
        self._known_bad: set[int] = set()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for db in idle:
            db.close()

    @contextlib.contextmanager
    def _snapshot(self) -> Iterator[sqlite3.Connection]:
        with self._lock:
            db = self._idle.pop() if self._idle else None
        if db is None:
            db = self._disk.connect(self._path, read_only=True)
        try:
            db.execute("BEGIN")
            yield db
            db.execute("ROLLBACK")
        except BaseException:
            db.close()
            raise
        with self._lock:
            if not self._closed:
                self._idle.append(db)
                return
        db.close()

    def scan(self, after: int, until: int, wanted: Set[int] | None, records_max: int, bytes_max: int, strict: bool) -> Scan:
        """The records in (after, until] of the streams `wanted` (None: all), as far as one step goes."""
        found = Scan(after, records_max, bytes_max, strict)
        with self._snapshot() as db:
            (found.floor_seq,) = db.execute("SELECT value FROM meta WHERE key = 'floor_seq'").fetchone()
            places, complete_to = _places(db, after, until, wanted)
            read = 0
            for first_seq in places:
                chunk = self._row(db, first_seq, max(after, first_seq - 1), until, found)
                if chunk is None or chunk.last_seq <= after:
                    continue
                read += sum(map(len, chunk.data))
                found.take(chunk, until, wanted)
                if found.full or read >= SCAN_BYTES_MAX:
                    return found
            found.covered = max(found.covered, complete_to)
        return found

    def _row(self, db: sqlite3.Connection, first_seq: int, after: int, until: int, found: Scan) -> Chunk | None:
        """The chunk at `first_seq`; None if it can't be read, and then the gap is noted."""
        try:
            row = db.execute(f"SELECT {CHUNK_COLUMNS} FROM chunk WHERE first_seq = ?", (first_seq,)).fetchone()
            return decode(Columns(*row))
        except (CorruptChunkError, struct.error, TypeError) as error:
            reason: Exception = error
        except sqlite3.DatabaseError as error:
            if not is_damage(error):
                raise
            reason = error
        following = db.execute("SELECT min(first_seq) FROM chunk INDEXED BY chunk_time WHERE first_seq > ?", (first_seq,)).fetchone()[0]
        before = min(following or until + 1, until + 1)
        found.gaps.append((after, before))
        found.covered = max(found.covered, before - 1)
        if first_seq not in self._known_bad and len(self._known_bad) < KNOWN_BAD_MAX:
            self._known_bad.add(first_seq)
            found.damaged.append((first_seq - 1, following or until + 1, str(reason)))
            log.error(
                "records are damaged and will be reported as a gap", path=str(self._path), after=after, before=before, reason=str(reason)
            )
        return None

    def find_id(self, id: bytes) -> int | None:
        """The seq of the newest record with this message id."""
        with self._snapshot() as db:
            for first_seq, ids in db.execute("SELECT first_seq, ids FROM chunk WHERE instr(ids, ?) ORDER BY first_seq DESC", (id,)):
                place = ids.find(id)
                while place >= 0 and place % ID_BYTES:
                    place = ids.find(id, place + 1)
                if place >= 0:
                    return int(first_seq) + int(place) // ID_BYTES
        return None

    def first_after_time(self, time_ms: int) -> int | None:
        """The first seq appended after `time_ms`."""
        with self._snapshot() as db:
            (seq,) = db.execute("SELECT min(first_seq) FROM chunk WHERE time_ms > ?", (time_ms,)).fetchone()
        return None if seq is None else int(seq)

    def recent_ids(self, count: int) -> list[tuple[int, bytes]]:
        """Stream and id of the newest records, oldest first."""
        newest: list[tuple[int, bytes]] = []
        query = "SELECT ids, substr(data, 1, 4 * records) FROM chunk ORDER BY first_seq DESC"
        with self._snapshot() as db, contextlib.closing(db.execute(query)) as rows:
            while len(newest) < count and (row := rows.fetchone()) is not None:
                ids, streams = row[0], unpack_streams(row[1])
                newest += [(id, ids[place * ID_BYTES : (place + 1) * ID_BYTES]) for place, id in reversed(list(enumerate(streams)))]
        return newest[:count][::-1]


def _places(db: sqlite3.Connection, after: int, until: int, wanted: Set[int] | None) -> tuple[list[int], int]:
    """The first_seq of each chunk that may have what is wanted, and up to which seq this list is complete."""
    start = db.execute("SELECT max(first_seq) FROM chunk WHERE first_seq <= ?", (after + 1,)).fetchone()[0] or 0
    if wanted is None or len(wanted) > INDEXED_STREAMS_MAX:
        return _scanned(db, start, until, wanted)
    (indexed_seq,) = db.execute("SELECT value FROM meta WHERE key = 'indexed_seq'").fetchone()
    places: set[int] = set()
    complete_to = min(indexed_seq, until)
    rows_max = max(INDEX_ROWS_MAX // max(1, len(wanted)), 1)
    query = "SELECT first_seq FROM chunk_stream WHERE stream = ? AND first_seq BETWEEN ? AND ? ORDER BY first_seq LIMIT ?"
    for stream in wanted:
        rows = [row[0] for row in db.execute(query, (stream, start, complete_to, rows_max))]
        places.update(rows)
        if len(rows) == rows_max:
            complete_to = min(complete_to, rows[-1])
    if complete_to < min(indexed_seq, until):
        return sorted(place for place in places if place <= complete_to), complete_to
    fresh, complete_to = _scanned(db, max(start, indexed_seq + 1), until, wanted) if until > indexed_seq else ([], until)
    return sorted(places) + fresh, complete_to


def _scanned(db: sqlite3.Connection, start: int, until: int, wanted: Set[int] | None) -> tuple[list[int], int]:
    query = "SELECT first_seq, records, streams FROM chunk WHERE first_seq BETWEEN ? AND ? ORDER BY first_seq LIMIT ?"
    try:
        rows = db.execute(query, (start, until, SCAN_CHUNKS_MAX)).fetchall()
    except sqlite3.DatabaseError as error:
        if not is_damage(error):
            raise
        # The table itself can't be walked; its index on time still names every chunk.
        query = "SELECT first_seq, 1, NULL FROM chunk INDEXED BY chunk_time WHERE first_seq BETWEEN ? AND ? ORDER BY first_seq LIMIT ?"
        rows = db.execute(query, (start, until, SCAN_CHUNKS_MAX)).fetchall()
    complete_to = until if len(rows) < SCAN_CHUNKS_MAX else min(until, rows[-1][0] + rows[-1][1] - 1)
    if wanted is None:
        return [row[0] for row in rows], complete_to
    return [row[0] for row in rows if not isinstance(row[2], bytes) or not wanted.isdisjoint(unpack_streams(row[2]))], complete_to


__all__ = ["Reader"]
