"""Which records are deleted, oldest first: by age, and by the space that the disk shows; and who was still owed them.

pages in use, ages, cursors -> doomed chunks -> (handed over, if they are few) -> deleted -> free pages -> released

bytes of retention = database + write-ahead log + the next transaction + OTHER_BYTES
    the lower one of the configured limit, and of what the disk allows: free space and the log's own, minus the reserve
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Final, NamedTuple

from history.file.reader import chunk_at, spans
from history.file.rows import CHUNK_BYTES
from history.records.chunk import Chunk, CorruptChunkError
from storage.disk import Disk, pragma
from storage.faults import Reserve, disk_bytes, existing_folder, free_bytes, margin_bytes

FILE_SUFFIXES: Final = ("", "-wal", "-shm", ".mark", ".head")  # of a log's path
WAL_SHARE: Final = 16  # of the bytes of retention, one part in so many is for the write-ahead log ...
WAL_BYTES_MIN: Final = 512 << 10  # ... but at least enough for some commits ...
WAL_BYTES_MAX: Final = 32 << 20  # ... and more has no benefit
WAL_WAIT_MS: Final = 100  # for readers: some of their steps
TRANSACTION_SHARE: Final = 16  # one part in so many is for the next transaction ...
TRANSACTION_BYTES_MAX: Final = 4 << 20  # ... 8,192 messages of 500 bytes
OTHER_BYTES: Final = 128 << 10  # the index of the write-ahead log, the mark, the head, the lock
DISK_LIMIT_BYTES_MIN: Final = 1 << 20  # on a full disk a log keeps at least this
FILE_BYTES_MIN: Final = 256 << 10  # empty tables and indexes need some pages
# both limit a pass to milliseconds, because appends wait for it; and each pass also writes some other pages
CHUNKS_PER_PASS: Final = 256
BYTES_PER_PASS: Final = 8 << 20
AGE_SHARE: Final = 64  # retention by age runs late by one part in so many of the age ...
LATE_MS_MAX: Final = 600_000  # ... but not more than that: deleting more at once costs the disk less
VACUUM_BYTES_PER_PASS: Final = 1 << 20  # released to the disk
VACUUM_FREE_PERCENT: Final = 25  # a lower share of free pages is kept for the next chunks
DAMAGED_SKIPPED_MAX: Final = 8  # so many damaged chunks that claim to be old are skipped in a pass

Doomed = tuple[int, int, bytes, int]  # first_seq, bytes, streams, time_ms


class Ages(NamedTuple):
    """Which records are too old, in Unix milliseconds."""

    now_ms: int
    cutoff_ms: int  # records that were appended earlier are deleted ...
    late_ms: int  # ... once the oldest of them was appended so much earlier than that

    @classmethod
    def at(cls, now_ms: int, age_ms: int) -> Ages:
        return cls(now_ms, now_ms - age_ms, min(age_ms // AGE_SHARE, LATE_MS_MAX))

    def is_due(self, time_ms: int) -> bool:
        """Returns True if a chunk of this time is due, or if its time can't be right."""
        return time_ms < self.cutoff_ms - self.late_ms or time_ms > self.now_ms


class Sizes:
    """How much of the bytes of retention each of a log's files may take."""

    def __init__(self, whole: int, wal_max: int = WAL_BYTES_MAX) -> None:
        """`wal_max`: limit of the write-ahead log, so that the reserve of a full disk is enough to empty it."""
        self.whole = whole
        # a larger one needs fewer checkpoints
        self.wal = max(min(whole // WAL_SHARE, wal_max, WAL_BYTES_MAX), WAL_BYTES_MIN)
        # one transaction adds this before retention runs
        self.transaction = min(whole // TRANSACTION_SHARE, TRANSACTION_BYTES_MAX)
        self.file = max(whole - self.wal - self.transaction - OTHER_BYTES, FILE_BYTES_MIN)  # of pages in use


class DiskRoom:
    """How much of its disk a log may take. Other programs may fill the disk, too, and may take deleted space at once.
    So each time the reserve is released, at most twice its bytes, or half of the log, are deleted."""

    def __init__(self, path: Path, reserve: Reserve) -> None:
        self._path, self._reserve = path, reserve
        self._least = 0

    def limit(self, own: int, free: int) -> int:
        """Returns the limit for all files of the log, which take `own` bytes, where `free` bytes are left. Raises
        OSError."""
        kept = self._reserve.bytes + margin_bytes(self._path)
        allowed = _allowed(own + free, self._path, self._reserve)
        if allowed >= own or not self._least:
            self._least = max(own - 2 * kept, own // 2, DISK_LIMIT_BYTES_MIN)
        return max(allowed, self._least)


def own_bytes(path: Path) -> int:
    """Returns how many bytes all files of a log take on the disk."""
    return sum(disk_bytes(Path(f"{path}{suffix}")) for suffix in FILE_SUFFIXES)


def disk_limit(path: Path, reserve: Reserve) -> int:
    """Returns how many bytes the disk allows the files of the log `path` now. Raises OSError."""
    free = free_bytes(existing_folder(path) / path.name)
    return max(_allowed(own_bytes(path) + free, path, reserve), DISK_LIMIT_BYTES_MIN)


def _allowed(bytes: int, path: Path, reserve: Reserve) -> int:
    return bytes + reserve.held - reserve.bytes - margin_bytes(path)


def used_bytes(db: sqlite3.Connection) -> int:
    return (pragma(db, "page_count") - pragma(db, "freelist_count")) * pragma(db, "page_size")


def is_disk_short(db: sqlite3.Connection, path: Path, sizes: Sizes, disk: Disk) -> bool:
    """Returns True if the disk, after one more transaction, has not enough space to empty the write-ahead log, by which
    the file may grow."""
    try:
        growth = pragma(db, "page_count") * pragma(db, "page_size") - path.stat().st_size
        return max(growth, 0) + sizes.transaction > disk.free_bytes(path)
    except OSError:
        return False


def find_doomed(
    db: sqlite3.Connection, ages: Ages, excess: int, keep_after: int, *, at_once: bool
) -> tuple[list[Doomed], int]:
    """Returns the oldest chunks that have to be deleted, and their last seq. A chunk ends where the next one begins:
    that is safer than its own number of records. `at_once`: delete old chunks now, and not only when enough of them can
    be deleted together."""
    if excess <= 0 and not at_once:
        oldest = db.execute("SELECT time_ms FROM chunk ORDER BY first_seq LIMIT 1").fetchone()
        if oldest is None or not ages.is_due(oldest[0]):
            return [], 0
    query = f"SELECT first_seq, {CHUNK_BYTES}, streams, time_ms FROM chunk ORDER BY first_seq LIMIT ?"
    rows: list[Doomed] = db.execute(query, (CHUNKS_PER_PASS + 1,)).fetchall()
    aged = _aged(db, rows, ages) if len(rows) > 1 and rows[1][0] - 1 <= keep_after else 0
    doomed: list[Doomed] = []
    floor = size_now = 0
    for row, following in pairwise(rows):
        last = following[0] - 1
        if size_now >= BYTES_PER_PASS or (excess <= 0 and not (row[0] <= aged and last <= keep_after)):
            break
        doomed.append(row)
        floor = last
        excess -= row[1]
        size_now += row[1]
    return doomed, floor


def is_full_pass(doomed: Sequence[Doomed]) -> bool:
    """Returns True if there may be more chunks to delete."""
    return len(doomed) == CHUNKS_PER_PASS or sum(bytes for _, bytes, *_ in doomed) >= BYTES_PER_PASS


def _aged(db: sqlite3.Connection, rows: Sequence[Doomed], ages: Ages) -> int:
    """Returns the first seq of the last of the oldest chunks that are all too old; 0: no chunk.

    The order is by seq, not by time. A time in the future can't be right, so the following chunks decide about such a
    chunk. One wrong time must not delete young records: the checksum of the last chunk, the witness, must be right.
    """
    witnesses = []
    for first_seq, _, _, time_ms in rows:
        if time_ms < ages.cutoff_ms:
            witnesses.append(first_seq)
        elif time_ms <= ages.now_ms:
            break
    else:
        if not witnesses and _is_next_aged(db, rows[-1][0], ages):
            return rows[-1][0]
    for witness in witnesses[: -DAMAGED_SKIPPED_MAX - 1 : -1]:
        try:
            columns, _chunk = chunk_at(db, witness)
        except CorruptChunkError:
            continue
        if columns.time_ms < ages.cutoff_ms:
            return witness
    return 0


def _is_next_aged(db: sqlite3.Connection, after: int, ages: Ages) -> bool:
    """Returns True if the first chunk beyond `after` whose time is not in the future is too old. The chunks between
    were written while a clock was wrong for long."""
    query = "SELECT first_seq, time_ms FROM chunk WHERE first_seq BETWEEN ? AND ? AND time_ms <= ? ORDER BY 1 LIMIT 1"
    for first_seq, last_seq, earliest_ms, _ in spans(db):
        if last_seq > after and earliest_ms <= ages.now_ms:
            found = db.execute(query, (max(first_seq, after + 1), last_seq, ages.now_ms)).fetchone()
            if found is not None:
                return bool(found[1] < ages.cutoff_ms)
    return False


def readable(db: sqlite3.Connection, doomed: Sequence[Doomed]) -> Iterator[Chunk]:
    for first_seq, *_ in doomed:
        try:
            yield chunk_at(db, first_seq)[1]
        except CorruptChunkError:
            continue


def vacuum(db: sqlite3.Connection, sizes: Sizes) -> bool:
    """Release free pages to the disk: all beyond the limit, and most of those that will not be needed soon. A bounded
    step; returns True if there is more."""
    free, pages, page_bytes = (pragma(db, name) for name in ("freelist_count", "page_count", "page_size"))
    step = VACUUM_BYTES_PER_PASS // page_bytes
    is_beyond = free > 0 and pages * page_bytes > sizes.file + sizes.transaction
    if not is_beyond and (free * 100 <= pages * VACUUM_FREE_PERCENT or free < step):
        return False
    db.executescript(f"PRAGMA incremental_vacuum({step});")  # `execute` would end it after the first page
    return True
