"""What is deleted, oldest first: by age, by what the disk shows; and who was still owed it.

pages in use, ages, cursors -> doomed chunks -> (handed over, if that is little) -> deleted -> free pages -> given back

bytes of retention = database + write-ahead log + the next transaction + OTHER_BYTES
    the least of what is configured, and of what the disk allows: what is free, and what the log has, less the reserve
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Final, NamedTuple

from history.file.reader import chunk_at, spans
from history.records.chunk import Chunk, CorruptChunkError
from storage.faults import disk_bytes, free_bytes
from storage.file import pragma
from storage.reserve import Reserve, existing_folder, margin_bytes

FILE_SUFFIXES: Final = ("", "-wal", "-shm", ".mark", ".head")  # of a log's path
WAL_SHARE: Final = 16  # of the bytes of retention, one part in so many is for the write-ahead log ...
WAL_BYTES_MIN: Final = 512 << 10  # ... but it has room for some commits ...
WAL_BYTES_MAX: Final = 32 << 20  # ... and more brings nothing
WAL_WAIT_MS: Final = 100  # for readers, some steps of them
TRANSACTION_SHARE: Final = 16  # one part in so many is for the next transaction ...
TRANSACTION_BYTES_MAX: Final = 4 << 20  # ... 8,192 messages of 500 bytes
OTHER_BYTES: Final = 128 << 10  # the index of the write-ahead log, the mark, the head, the lock
DISK_LIMIT_BYTES_MIN: Final = 1 << 20  # a full disk takes no more from a log
FILE_BYTES_MIN: Final = 256 << 10  # tables and indexes that hold nothing take some 180 KiB, where pages are of 16 KiB
# both keep a pass to milliseconds, since appends wait for it; and each pass writes some pages beside
CHUNKS_PER_PASS: Final = 256
BYTES_PER_PASS: Final = 8 << 20
AGE_SHARE: Final = 64  # retention by age comes one part in so many of the age late ...
LATE_MS_MAX: Final = 600_000  # ... and not more than that: what goes together costs the disk less
VACUUM_BYTES_PER_PASS: Final = 1 << 20  # given back
VACUUM_FREE_PERCENT: Final = 25  # free pages below that are the room for the next chunks
WITNESSES_MAX: Final = 8  # damaged chunks that claim to be old are passed over, so many in a pass

Doomed = tuple[int, int, bytes, int]  # first_seq, bytes, streams, time_ms


class Ages(NamedTuple):
    """What is old, in Unix milliseconds."""

    now_ms: int
    cutoff_ms: int  # what was appended before goes
    late_ms: int  # but nothing does before its oldest was appended so long before that

    @classmethod
    def at(cls, now_ms: int, age_ms: int) -> Ages:
        return cls(now_ms, now_ms - age_ms, min(age_ms // AGE_SHARE, LATE_MS_MAX))

    def is_due(self, time_ms: int) -> bool:
        """Has the oldest chunk to go, or can't its time be right?"""
        return time_ms < self.cutoff_ms - self.late_ms or time_ms > self.now_ms


class Sizes:
    """Which of a log's files may take how much of the bytes of retention."""

    def __init__(self, whole: int, wal_max: int = WAL_BYTES_MAX) -> None:
        """`wal_max`: of the write-ahead log, so that the reserve of a full disk is enough to empty it."""
        self.whole = whole
        # the greater, the fewer checkpoints
        self.wal = max(min(whole // WAL_SHARE, wal_max, WAL_BYTES_MAX), WAL_BYTES_MIN)
        # what one adds before retention has its turn
        self.transaction = min(whole // TRANSACTION_SHARE, TRANSACTION_BYTES_MAX)
        self.file = max(whole - self.wal - self.transaction - OTHER_BYTES, FILE_BYTES_MIN)  # of pages in use


class DiskRoom:
    """How much of its disk a log may take. Others may fill the disk as well, and what is deleted may be theirs at once:
    so for one reserve, which was given up, no more than twice its bytes, or half of the log, are deleted."""

    def __init__(self, path: Path, reserve: Reserve) -> None:
        self._path, self._reserve = path, reserve
        self._least = 0

    def limit(self, own: int, free: int) -> int:
        """Bytes of all files of the log, which takes `own` bytes, where `free` ones are left. Raises OSError."""
        kept = self._reserve.bytes + margin_bytes(self._path)
        allowed = _allowed(own + free, self._path, self._reserve)
        if allowed >= own or not self._least:
            self._least = max(own - 2 * kept, own // 2, DISK_LIMIT_BYTES_MIN)
        return max(allowed, self._least)


def own_bytes(path: Path) -> int:
    """What all files of a log really take."""
    return sum(disk_bytes(Path(f"{path}{suffix}")) for suffix in FILE_SUFFIXES)


def disk_limit(path: Path, reserve: Reserve) -> int:
    """What the disk allows the files of the log `path`, as it is now. Raises OSError."""
    free = free_bytes(existing_folder(path) / path.name)
    return max(_allowed(own_bytes(path) + free, path, reserve), DISK_LIMIT_BYTES_MIN)


def _allowed(bytes: int, path: Path, reserve: Reserve) -> int:
    return bytes + reserve.held - reserve.bytes - margin_bytes(path)


def used_bytes(db: sqlite3.Connection) -> int:
    """Of pages that hold something."""
    return (pragma(db, "page_count") - pragma(db, "freelist_count")) * pragma(db, "page_size")


def find_doomed(
    db: sqlite3.Connection, ages: Ages, excess: int, keep_after: int, *, at_once: bool
) -> tuple[list[Doomed], int]:
    """The oldest chunks that have to go, and the last seq of them. A chunk ends where the next begins: that is safer
    than its own word. `at_once`: what is old goes now, and not only when enough of it can go together."""
    if excess <= 0 and not at_once:
        oldest = db.execute("SELECT time_ms FROM chunk ORDER BY first_seq LIMIT 1").fetchone()
        if oldest is None or not ages.is_due(oldest[0]):
            return [], 0
    size = "length(streams) + length(ids) + length(data)"
    query = f"SELECT first_seq, {size}, streams, time_ms FROM chunk ORDER BY first_seq LIMIT ?"
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
    """There may be more."""
    return len(doomed) == CHUNKS_PER_PASS or sum(bytes for _, bytes, *_ in doomed) >= BYTES_PER_PASS


def _aged(db: sqlite3.Connection, rows: Sequence[Doomed], ages: Ages) -> int:
    """The last of the oldest chunks that are too old, one after the other; 0: there is none.

    Order is by seq, not by the clock. A time that has not come yet can't be right, so what follows decides about such a
    chunk. One wrong time must not delete what is young: the last one, the witness, has to be whole.
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
    for witness in witnesses[: -WITNESSES_MAX - 1 : -1]:
        try:
            columns, _chunk = chunk_at(db, witness)
        except CorruptChunkError:
            continue
        if columns.time_ms < ages.cutoff_ms:
            return witness
    return 0


def _is_next_aged(db: sqlite3.Connection, after: int, ages: Ages) -> bool:
    """Is the first chunk beyond `after` too old whose time may be right? Those between come from the future, as they
    say: a clock was wrong for long."""
    query = "SELECT first_seq, time_ms FROM chunk WHERE first_seq BETWEEN ? AND ? AND time_ms <= ? ORDER BY 1 LIMIT 1"
    for first_seq, last_seq, earliest_ms, _ in spans(db):
        if last_seq > after and earliest_ms <= ages.now_ms:
            found = db.execute(query, (max(first_seq, after + 1), last_seq, ages.now_ms)).fetchone()
            if found is not None:
                return bool(found[1] < ages.cutoff_ms)
    return False


def readable(db: sqlite3.Connection, doomed: Sequence[Doomed]) -> Iterator[Chunk]:
    """The chunks, but for those that can't be read."""
    for first_seq, *_ in doomed:
        try:
            yield chunk_at(db, first_seq)[1]
        except CorruptChunkError:
            continue


def vacuum(db: sqlite3.Connection, sizes: Sizes) -> bool:
    """Give back what is free: all beyond the limit, and most of what nobody will need soon. A bounded step; True if
    there is more."""
    free, pages, page_bytes = (pragma(db, name) for name in ("freelist_count", "page_count", "page_size"))
    step = VACUUM_BYTES_PER_PASS // page_bytes
    is_beyond = free > 0 and pages * page_bytes > sizes.file + sizes.transaction
    if not is_beyond and (free * 100 <= pages * VACUUM_FREE_PERCENT or free < step):
        return False
    db.executescript(f"PRAGMA incremental_vacuum({step});")  # `execute` ends it after the first page
    return True
