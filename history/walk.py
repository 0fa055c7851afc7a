"""Every chunk of a file that can still be found, however damaged the file is.

table in order --can't be walked any further--> index on time: names what follows
      '------------------------------------------------'-> row by row -> checksum -> (first_seq, columns | why not)
"""

from __future__ import annotations

import contextlib
import sqlite3
import struct
from collections.abc import Iterator

from history.chunk import Chunk, Columns, CorruptChunkError, decode
from history.rows import CHUNK_COLUMNS


def chunk_at(db: sqlite3.Connection, first_seq: int) -> tuple[Columns, Chunk]:
    """Raises CorruptChunkError, or sqlite3.DatabaseError."""
    row = db.execute(f"SELECT {CHUNK_COLUMNS} FROM chunk WHERE first_seq = ?", (first_seq,)).fetchone()
    try:
        columns = Columns(*row)
        return columns, decode(columns)
    except (struct.error, TypeError, ValueError) as error:
        raise CorruptChunkError(f"the columns of the records from {first_seq} on are none: {error}") from None


def walk(db: sqlite3.Connection) -> Iterator[tuple[int, Columns | None, str]]:
    """In order: (first_seq, columns, ""), or (first_seq, None, why) where a chunk can't be read. Raises no error of
    damage."""
    for first_seq in _places(db):
        try:
            columns, _ = chunk_at(db, first_seq)
        except (CorruptChunkError, sqlite3.DatabaseError) as error:
            yield first_seq, None, str(error)
        else:
            yield first_seq, columns, ""


def _places(db: sqlite3.Connection) -> Iterator[int]:
    last = -1
    with contextlib.suppress(sqlite3.DatabaseError):
        for (first_seq,) in db.execute("SELECT first_seq FROM chunk NOT INDEXED ORDER BY first_seq"):
            if isinstance(first_seq, int) and first_seq > last:
                last = first_seq
                yield last
        return
    with contextlib.suppress(sqlite3.DatabaseError):
        rest = {
            row[0] for row in db.execute("SELECT first_seq FROM chunk INDEXED BY chunk_time") if isinstance(row[0], int)
        }
        yield from sorted(place for place in rest if place > last)
