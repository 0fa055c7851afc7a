"""What is deleted, oldest first: by age, by what the disk shows; and who was still owed it.

pages in use, ages, cursors -> doomed chunks -> (handed over, if that is little) -> deleted -> free pages -> given back
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Final

from history.chunk import NOBODY, Chunk, CorruptChunkError
from history.connection import PAGE_BYTES, file_bytes_max, transaction_bytes
from history.reader import chunk_at
from storage.file import pragma

CHUNKS_PER_PASS: Final = 64  # keeps a pass to milliseconds, since appends wait for it
VACUUM_PAGES_PER_PASS: Final = 64  # 1 MiB given back per pass
VACUUM_FREE_PERCENT: Final = 25  # free pages below that are the room for the next chunks
WITNESSES_MAX: Final = 8  # damaged chunks that claim to be old are passed over, so many in a pass

Doomed = tuple[int, int, bytes]  # first_seq, bytes, streams


def used_bytes(db: sqlite3.Connection) -> int:
    """Of pages that hold something."""
    return (pragma(db, "page_count") - pragma(db, "freelist_count")) * PAGE_BYTES


def excess_of(used: int, stored: int, bytes_max: int) -> int:
    """How much has to go. Once it is too big, somewhat more: so that not every commit deletes."""
    excess = max(used - file_bytes_max(bytes_max), stored - bytes_max)
    return excess + transaction_bytes(bytes_max) // 4 if excess > 0 else excess


def find_doomed(db: sqlite3.Connection, cutoff_ms: int, excess: int, keep_after: int) -> tuple[list[Doomed], int]:
    """The oldest chunks that have to go, and the last seq of them. A chunk ends where the next begins: that is safer
    than its own word."""
    oldest = (
        "SELECT first_seq, length(streams) + length(ids) + length(data), streams FROM chunk ORDER BY first_seq LIMIT ?"
    )
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


def vacuum(db: sqlite3.Connection, bytes_max: int) -> bool:
    """Give back what is free: all beyond the limit, and most of what nobody will need soon. A bounded step; True if
    there is more."""
    free, pages = pragma(db, "freelist_count"), pragma(db, "page_count")
    is_beyond = free > 0 and pages * PAGE_BYTES > file_bytes_max(bytes_max) + transaction_bytes(bytes_max)
    if not is_beyond and (free * 100 <= pages * VACUUM_FREE_PERCENT or free < VACUUM_PAGES_PER_PASS):
        return False
    db.execute(f"PRAGMA incremental_vacuum({VACUUM_PAGES_PER_PASS})").fetchall()
    return True
