"""What is deleted, oldest first: by age, by what the disk shows; and who was still owed it.

pages in use, ages, cursors -> doomed chunks -> (handed over, if that is little) -> deleted -> free pages -> given back

bytes of retention = database + write-ahead log + the next transaction + OTHER_BYTES
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Final

from history.chunk import NOBODY, Chunk, CorruptChunkError
from history.reader import chunk_at
from history.rows import PAGE_BYTES
from storage.file import pragma

WAL_SHARE: Final = 16  # of the bytes of retention, one part in so many is for the write-ahead log ...
WAL_BYTES_MIN: Final = 512 << 10  # ... but it has room for some commits ...
WAL_BYTES_MAX: Final = 32 << 20  # ... and more brings nothing
WAL_WAIT_MS: Final = 100  # for readers, some steps of them
TRANSACTION_SHARE: Final = 16  # one part in so many is for the next transaction ...
TRANSACTION_BYTES_MAX: Final = 4 << 20  # ... 8,192 messages of 500 bytes
OTHER_BYTES: Final = 128 << 10  # the index of the write-ahead log, the mark, the head, the lock
FILE_BYTES_MIN: Final = 256 << 10  # tables and indexes that hold nothing take some 180 KiB
CHUNKS_PER_PASS: Final = 64  # keeps a pass to milliseconds, since appends wait for it
VACUUM_PAGES_PER_PASS: Final = 64  # 1 MiB given back per pass
VACUUM_FREE_PERCENT: Final = 25  # free pages below that are the room for the next chunks
WITNESSES_MAX: Final = 8  # damaged chunks that claim to be old are passed over, so many in a pass

Doomed = tuple[int, int, bytes]  # first_seq, bytes, streams


class Sizes:
    """Which of a log's files may take how much of the bytes of retention."""

    def __init__(self, whole: int) -> None:
        self.whole = whole
        self.wal = min(max(whole // WAL_SHARE, WAL_BYTES_MIN), WAL_BYTES_MAX)  # the greater, the fewer checkpoints
        # what one adds before retention has its turn
        self.transaction = min(whole // TRANSACTION_SHARE, TRANSACTION_BYTES_MAX)
        self.file = max(whole - self.wal - self.transaction - OTHER_BYTES, FILE_BYTES_MIN)  # of pages in use


def used_bytes(db: sqlite3.Connection) -> int:
    """Of pages that hold something."""
    return (pragma(db, "page_count") - pragma(db, "freelist_count")) * PAGE_BYTES


def find_doomed(db: sqlite3.Connection, cutoff_ms: int, excess: int, keep_after: int) -> tuple[list[Doomed], int]:
    """The oldest chunks that have to go, and the last seq of them. A chunk ends where the next begins: that is safer
    than its own word."""
    size = "length(streams) + length(ids) + length(data)"
    oldest = f"SELECT first_seq, {size}, streams FROM chunk ORDER BY first_seq LIMIT ?"
    rows: list[Doomed] = db.execute(oldest, (CHUNKS_PER_PASS + 1,)).fetchall()
    aged = _aged(db, cutoff_ms) if len(rows) > 1 and rows[1][0] - 1 <= keep_after else 0
    doomed: list[Doomed] = []
    floor = 0
    for row, following in pairwise(rows):
        last = following[0] - 1
        if excess <= 0 and not (row[0] <= aged and last <= keep_after):
            break
        doomed.append(row)
        floor = last
        excess -= row[1]
    return doomed, floor


def _aged(db: sqlite3.Connection, cutoff_ms: int) -> int:
    """Order is by seq, not by the clock: whatever was appended before an old record is older. One wrong time must not
    delete them all: the witness has to be whole."""
    query = "SELECT max(first_seq) FROM chunk WHERE time_ms < ? AND first_seq < ?"
    witness = NOBODY
    for _ in range(WITNESSES_MAX):
        witness = db.execute(query, (cutoff_ms, witness)).fetchone()[0] or 0
        if not witness:
            return 0
        try:
            columns, _chunk = chunk_at(db, witness)
        except CorruptChunkError:
            continue
        if columns.time_ms < cutoff_ms:
            return witness
    return 0


def readable(db: sqlite3.Connection, doomed: Sequence[Doomed]) -> Iterator[Chunk]:
    """The chunks, but for those that can't be read."""
    for first_seq, _, _ in doomed:
        try:
            yield chunk_at(db, first_seq)[1]
        except CorruptChunkError:
            continue


def vacuum(db: sqlite3.Connection, sizes: Sizes) -> bool:
    """Give back what is free: all beyond the limit, and most of what nobody will need soon. A bounded step; True if
    there is more."""
    free, pages = pragma(db, "freelist_count"), pragma(db, "page_count")
    is_beyond = free > 0 and pages * PAGE_BYTES > sizes.file + sizes.transaction
    if not is_beyond and (free * 100 <= pages * VACUUM_FREE_PERCENT or free < VACUUM_PAGES_PER_PASS):
        return False
    db.execute(f"PRAGMA incremental_vacuum({VACUUM_PAGES_PER_PASS})").fetchall()
    return True
