"""The tables of a log's file, and a checksum in each row of them.

write: values + checksum -> row        read: row -> its checksum is right: `rows` | it is wrong: `bad`

SQLite does not check content. Without a checksum, a flipped bit on the disk would move a cursor, or assign a record to
another topic, and nobody would notice. Chunks have their own checksum (chunk.py). `chunk_stream` has none: readers
compare its rows with the chunks.
"""

from __future__ import annotations

import sqlite3
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from storage.disk import FileKind, any_text, insert_rows, tables_of
from uprotocol.v1.ucode_pb2 import UCode

SCHEMA_VERSION: Final = 1
APPLICATION_ID: Final = 0x7570_7331  # "ups1": distinguishes a log from any other SQLite file
# A commit of one message writes one or two pages. Small pages save flash writes, and full batches are not slower
# (docs/adr/small-pages-and-gathered-commits.md).
PAGE_BYTES: Final = 1_024
# A file up to this size is checked completely when it is opened (a second per GB). A larger file is checked where it
# is read.
CHECK_BYTES_MAX: Final = 256 << 20

StoredRow = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Table:
    """A table whose rows end with a checksum."""

    name: str
    columns: tuple[str, ...]
    ddl: str
    # a faster `_packed` of a whole row, for rows whose values have the expected types
    packed: Callable[[StoredRow], bytes] | None = None

    def insert(self, db: sqlite3.Connection, rows: Iterable[StoredRow]) -> None:
        """Insert rows, or replace those with the same key."""
        insert_rows(db, f"INSERT OR REPLACE INTO {self.name}", ((*row, self.checksum(row)) for row in rows))

    def checksum(self, row: StoredRow) -> int:
        if self.packed is not None:
            try:
                return zlib.crc32(self.packed(row))
            except (struct.error, TypeError, ValueError):  # the row is damaged
                pass
        return zlib.crc32(b"".join([self.name.encode(), *map(_packed, row)]))

    def read(self, db: sqlite3.Connection, bad: list[StoredRow]) -> Iterator[StoredRow]:
        """Yields the rows whose checksum is right, and appends the others to `bad`. Raises sqlite3.Error,
        ValueError."""
        db.text_factory = any_text
        checksum = self.checksum
        for *whole, crc in db.execute(f"SELECT * FROM {self.name}"):
            values = tuple(whole)
            if checksum(values) == crc:
                yield values
            else:
                bad.append(values)


def _packed(value: Any) -> bytes:
    if value is None:
        return b"n"
    if isinstance(value, int):
        return b"i" + value.to_bytes(9, "little", signed=True)
    if isinstance(value, float):
        return b"f" + repr(value).encode()
    data = value.encode(errors="surrogateescape") if isinstance(value, str) else bytes(value)
    return (b"t" if isinstance(value, str) else b"b") + len(data).to_bytes(4, "little") + data


# -- the tables

META_KEYS: Final = ("incarnation", "indexed_seq", "newest_seq", "floor_seq", "stored_bytes")  # always present

_STREAM_HEAD: Final = struct.Struct("<cQxcI")
_STREAM_SINK: Final = struct.Struct("<cI")
_STREAM_NUMBERS: Final = struct.Struct("<cQxcQxcQxcI")
_STREAM_TIME: Final = struct.Struct("<cQx")


def _packed_stream(row: StoredRow) -> bytes:
    """The same bytes as `_packed` of each value, five times as fast: there may be very many streams."""
    id, source, sink, first_seq, newest_seq, records, newest_id, time_ms = row
    parts = (
        b"stream",
        _STREAM_HEAD.pack(b"i", id, b"b", len(source)),
        source,
        b"n" if sink is None else _STREAM_SINK.pack(b"b", len(sink)) + sink,
        _STREAM_NUMBERS.pack(b"i", first_seq, b"i", newest_seq, b"i", records, b"b", len(newest_id)),
        newest_id,
        _STREAM_TIME.pack(b"i", time_ms),
    )
    return b"".join(parts)


META: Final = Table(
    "meta", ("key", "value"), "CREATE TABLE meta (key TEXT PRIMARY KEY, value ANY, crc INTEGER NOT NULL) WITHOUT ROWID"
)
STREAM: Final = Table(
    "stream",
    ("id", "source", "sink", "first_seq", "newest_seq", "records", "newest_id", "newest_time_ms"),
    """CREATE TABLE stream (id INTEGER PRIMARY KEY, source BLOB NOT NULL, sink BLOB, first_seq INTEGER NOT NULL,
       newest_seq INTEGER NOT NULL, records INTEGER NOT NULL, newest_id BLOB NOT NULL, newest_time_ms INTEGER NOT NULL,
       crc INTEGER NOT NULL)""",
    _packed_stream,
)
HOLE: Final = Table(
    "hole",
    ("after", "before"),
    "CREATE TABLE hole (after INTEGER PRIMARY KEY, before INTEGER NOT NULL, crc INTEGER NOT NULL)",
)
CURSOR: Final = Table(
    "cursor",
    ("name", "seq", "lease_until_ms", "holds", "absent_ms", "holder"),
    """CREATE TABLE cursor (name TEXT PRIMARY KEY, seq INTEGER NOT NULL, lease_until_ms INTEGER, holds INTEGER NOT NULL,
       absent_ms INTEGER NOT NULL, holder TEXT NOT NULL, crc INTEGER NOT NULL) WITHOUT ROWID""",
)
DAMAGE: Final = Table(
    "damage",
    ("number", "when_ms", "kind", "after", "before", "incarnation", "moved_to", "detail", "acknowledged"),
    """CREATE TABLE damage (number INTEGER PRIMARY KEY, when_ms INTEGER NOT NULL, kind TEXT NOT NULL, after INTEGER NOT
    NULL,
       before INTEGER NOT NULL, incarnation BLOB NOT NULL, moved_to TEXT NOT NULL, detail TEXT NOT NULL, acknowledged
       INTEGER NOT NULL, crc INTEGER NOT NULL)""",
)
# Chunks that begin in first_seq..last_seq, and the times when the earliest and the latest of them was appended. One row
# describes many chunks: an index on time would be written with each commit.
SPAN: Final = Table(
    "span",
    ("first_seq", "last_seq", "earliest_ms", "latest_ms"),
    """CREATE TABLE span (first_seq INTEGER PRIMARY KEY, last_seq INTEGER NOT NULL, earliest_ms INTEGER NOT NULL,
       latest_ms INTEGER NOT NULL, crc INTEGER NOT NULL)""",
)
CHECKED: Final = (META, STREAM, HOLE, CURSOR, DAMAGE, SPAN)

_CHUNK: Final = (
    """CREATE TABLE chunk (first_seq INTEGER PRIMARY KEY, records INTEGER NOT NULL, time_ms INTEGER NOT NULL, bytes
    INTEGER NOT NULL,
       crc INTEGER NOT NULL, streams BLOB NOT NULL, ids BLOB NOT NULL, data BLOB NOT NULL)""",
    "CREATE TABLE chunk_stream (stream INTEGER NOT NULL, first_seq INTEGER NOT NULL, PRIMARY KEY (stream, first_seq)) "
    "WITHOUT ROWID",
)
CHUNK_BYTES: Final = "length(streams) + length(ids) + length(data)"  # without a checksum, so the column is not trusted
CHUNK_COLUMNS: Final = f"first_seq, records, time_ms, {CHUNK_BYTES}, crc, streams, ids, data"  # as in Columns


def oldest_of(db: sqlite3.Connection) -> int:
    """Returns the lowest seq of all chunks; 0 if there is no chunk."""
    return int(db.execute("SELECT min(first_seq) FROM chunk").fetchone()[0] or 0)


def create(db: sqlite3.Connection, meta: dict[str, Any], damage: Sequence[StoredRow]) -> None:
    """Create the tables of an empty log, in the caller's transaction."""
    for statement in (*(table.ddl for table in CHECKED), *_CHUNK):
        db.execute(statement)
    META.insert(db, meta.items())
    DAMAGE.insert(db, damage)


SCHEMAS: Final = (frozenset(" ".join(statement.split()) for statement in (*[one.ddl for one in CHECKED], *_CHUNK)),)
"""The statements with which SQLite stores the tables of each version, with white space normalised."""
MIGRATIONS: Final[dict[int, Callable[[sqlite3.Connection], object]]] = {}
"""By version n: the step that brings a file to version n + 1, in one transaction."""


# -- the file


def has_known_schema(db: sqlite3.Connection) -> bool:
    """Return False if the file does not describe our tables as they were created. Other tables may exist beside them,
    for example of a backup tool or of ANALYZE."""
    found = {" ".join(str(sql).split()) for (sql,) in db.execute("SELECT sql FROM sqlite_master WHERE sql IS NOT NULL")}
    return any(known <= found for known in SCHEMAS)


LOG: Final = FileKind(
    "log",
    APPLICATION_ID,
    SCHEMA_VERSION,
    migrations=MIGRATIONS,
    is_ours=lambda db: {"chunk", "chunk_stream", "meta"} <= tables_of(db),
    layout=(f"page_size = {PAGE_BYTES}", "auto_vacuum = INCREMENTAL"),
    quick_bytes_max=CHECK_BYTES_MAX,
    check=lambda db: "" if has_known_schema(db) else "the descriptions of its tables are damaged",
    damaged=UCode.UNAVAILABLE,  # the sender retries: the next start saves everything that can be read
)
