"""The rows of a log beside its chunks: tables, versions, and a checksum in each row that matters.

write: values + checksum -> row        read: row -> as written | one bit turned, put right | bad
upgrade, replace_time_index: tables of an older version -> today's, in one transaction or not at all

SQLite checks no content: a bit that turns on the disk moves a cursor, or a record to another topic, in silence. Chunks
have a checksum of their own (chunk.py). `chunk_stream` has none: readers compare what they find there with the chunks.
"""

from __future__ import annotations

import sqlite3
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from google.protobuf.message import DecodeError

from storage.file import FileKind, any_text, pragma, tables_of
from storage.statements import insert_rows
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.uri_pb2 import UUri

# chunks may have origins since 4, epochs since 5; the tables are those of 3
SCHEMA_VERSION: Final = 5
APPLICATION_ID: Final = 0x7570_7331  # "ups1": tells a log from any other SQLite file
# a commit of one message writes a page or two: small ones spare the flash, and full batches don't feel it
# (docs/adr/small-pages-and-gathered-commits.md). Files of before may have others: ask them
PAGE_BYTES: Final = 1_024
# a file up to this size is checked whole on open (a second per GB); a greater one where it is read
CHECK_BYTES_MAX: Final = 256 << 20
CORRECTED_MAX: Final = 1_000  # rows of a table that are searched for a turned bit, some milliseconds each
CORRECTED_BYTES_MAX: Final = 1_024  # of a value that is searched, 20 ms; it is their square that counts
# the widths in which SQLite stores integers: the highest bit of each is the sign
INTEGER_BITS: Final = (8, 16, 24, 32, 48, 64)

Row = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Table:
    """A table whose rows end with a checksum."""

    name: str
    columns: tuple[str, ...]
    ddl: str
    # a quick way to what is summed, for rows that have the types they should
    packed: Callable[[Row], bytes] | None = None
    since: int = 1  # the version of the schema that brought it

    def insert(self, db: sqlite3.Connection, rows: Iterable[Row]) -> None:
        """Insert, or replace what has the same key."""
        insert_rows(db, f"INSERT OR REPLACE INTO {self.name}", ((*row, self.checksum(row)) for row in rows))

    def checksum(self, row: Row) -> int:
        if self.packed is not None:
            try:
                return zlib.crc32(self.packed(row))
            except (struct.error, TypeError, ValueError):  # it is damaged
                pass
        return zlib.crc32(b"".join([self.name.encode(), *map(_packed, row)]))

    def read(self, db: sqlite3.Connection) -> Checked:
        """Every row, held against its checksum; those of version 1, which had none, as today's table has them. Raises
        sqlite3.Error, ValueError."""
        if not has_checksums(db, self.name):
            version = version_of(db)
            if self.since > version:
                return Checked()
            if version == 1:
                return Checked([upgraded(self, row) for row in db.execute(f"SELECT * FROM {self.name}")])
        found = Checked()
        found.rows.extend(self.each(db, found))
        return found

    def each(self, db: sqlite3.Connection, found: Checked) -> Iterator[Row]:
        """As `read`, for tables with very many rows: those that are right one by one; the others are in `found` at the
        end."""
        db.text_factory = any_text
        checksum = self.checksum
        for *whole, crc in db.execute(f"SELECT * FROM {self.name}"):
            values = tuple(whole)
            if checksum(values) == crc:
                yield values
                continue
            right = self._corrected(values, crc) if len(found.mended) + len(found.bad) < CORRECTED_MAX else None
            if right is None:
                found.bad.append(values)
            else:
                found.mended.append((values, right))
                yield right

    def _corrected(self, row: Row, crc: Any) -> Row | None:
        """The row that differs from this one in a single bit and has the right checksum. Chance finds one in a million
        times at most."""
        if not isinstance(crc, int):
            return None
        if (self.checksum(row) ^ crc).bit_count() == 1:
            return row  # it is the checksum itself whose bit turned
        for place, value in enumerate(row):
            for other in _one_bit_off(value):
                candidate = (*row[:place], other, *row[place + 1 :])
                if self.checksum(candidate) == crc:
                    return candidate
        return None


@dataclass(slots=True)
class Checked:
    """What a table holds."""

    rows: list[Row] = field(default_factory=list)  # as they were written
    mended: list[tuple[Row, Row]] = field(default_factory=list)  # found -> what it was; those are among `rows`, too
    bad: list[Row] = field(default_factory=list)


def _packed(value: Any) -> bytes:
    if value is None:
        return b"n"
    if isinstance(value, int):
        return b"i" + value.to_bytes(9, "little", signed=True)
    if isinstance(value, float):
        return b"f" + repr(value).encode()
    data = value.encode(errors="surrogateescape") if isinstance(value, str) else bytes(value)
    return (b"t" if isinstance(value, str) else b"b") + len(data).to_bytes(4, "little") + data


def _one_bit_off(value: Any) -> Iterator[Any]:
    if isinstance(value, int):
        for bit in range(63):
            yield value ^ (1 << bit)
        for width in INTEGER_BITS:
            yield value - (1 << (width - 1)) if value >= 0 else value + (1 << (width - 1))
    elif isinstance(value, str):
        for data in _one_bit_off(value.encode(errors="surrogateescape")):
            yield any_text(data)
    elif isinstance(value, bytes) and len(value) <= CORRECTED_BYTES_MAX:
        for place in range(len(value)):
            for bit in range(8):
                yield value[:place] + bytes((value[place] ^ (1 << bit),)) + value[place + 1 :]


# -- the tables

META_KEYS: Final = ("incarnation", "indexed_seq", "newest_seq", "floor_seq", "stored_bytes")  # that are always there

_STREAM_HEAD: Final = struct.Struct("<cQxcI")
_STREAM_SINK: Final = struct.Struct("<cI")
_STREAM_NUMBERS: Final = struct.Struct("<cQxcQxcQxcI")
_STREAM_TIME: Final = struct.Struct("<cQx")


def _packed_stream(row: Row) -> bytes:
    """What `_packed` makes of each value, in a fifth of the time: there may be millions."""
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
    ("name", "seq", "lease_until_ms", "holds", "absent_ms"),
    """CREATE TABLE cursor (name TEXT PRIMARY KEY, seq INTEGER NOT NULL, lease_until_ms INTEGER, holds INTEGER NOT NULL,
       absent_ms INTEGER NOT NULL, crc INTEGER NOT NULL) WITHOUT ROWID""",
)
DAMAGE: Final = Table(
    "damage",
    ("number", "when_ms", "kind", "after", "before", "incarnation", "moved_to", "detail", "acknowledged"),
    """CREATE TABLE damage (number INTEGER PRIMARY KEY, when_ms INTEGER NOT NULL, kind TEXT NOT NULL, after INTEGER NOT
    NULL,
       before INTEGER NOT NULL, incarnation BLOB NOT NULL, moved_to TEXT NOT NULL, detail TEXT NOT NULL, acknowledged
       INTEGER NOT NULL, crc INTEGER NOT NULL)""",
    since=2,
)
# Chunks that begin in first_seq..last_seq: when the earliest and the latest of them was appended. A row for many chunks
# does what an index on time did, whose pages each commit wrote anew.
SPAN: Final = Table(
    "span",
    ("first_seq", "last_seq", "earliest_ms", "latest_ms"),
    """CREATE TABLE span (first_seq INTEGER PRIMARY KEY, last_seq INTEGER NOT NULL, earliest_ms INTEGER NOT NULL,
       latest_ms INTEGER NOT NULL, crc INTEGER NOT NULL)""",
    since=3,
)
CHECKED: Final = (META, STREAM, HOLE, CURSOR, DAMAGE, SPAN)

_CHUNK: Final = (
    """CREATE TABLE chunk (first_seq INTEGER PRIMARY KEY, records INTEGER NOT NULL, time_ms INTEGER NOT NULL, bytes
    INTEGER NOT NULL,
       crc INTEGER NOT NULL, streams BLOB NOT NULL, ids BLOB NOT NULL, data BLOB NOT NULL)""",
    "CREATE TABLE chunk_stream (stream INTEGER NOT NULL, first_seq INTEGER NOT NULL, PRIMARY KEY (stream, first_seq)) "
    "WITHOUT ROWID",
)
CHUNK_COLUMNS: Final = "first_seq, records, time_ms, streams, ids, data, crc"


def oldest_of(db: sqlite3.Connection) -> int:
    """The first seq of all chunks; 0: there is none."""
    return int(db.execute("SELECT min(first_seq) FROM chunk").fetchone()[0] or 0)


def create(db: sqlite3.Connection, meta: dict[str, Any], damage: Sequence[Row]) -> None:
    """In the caller's transaction: everything that an empty log has."""
    for statement in (*(table.ddl for table in CHECKED), *_CHUNK):
        db.execute(statement)
    META.insert(db, meta.items())
    DAMAGE.insert(db, damage)


# -- older versions

# cursors of endpoints; in version 1 a cursor couldn't say that it holds retention
HELD_PREFIXES: Final = ("egress:", "parked:", "held:")
_V1: Final = (
    "CREATE TABLE meta (key TEXT PRIMARY KEY, value ANY) WITHOUT ROWID",
    """CREATE TABLE stream (id INTEGER PRIMARY KEY, source BLOB NOT NULL, sink BLOB, first_seq INTEGER NOT NULL,
       newest_seq INTEGER NOT NULL, records INTEGER NOT NULL, newest_id BLOB NOT NULL, newest_time_ms INTEGER NOT
       NULL)""",
    "CREATE TABLE hole (after INTEGER PRIMARY KEY, before INTEGER NOT NULL)",
    "CREATE TABLE cursor (name TEXT PRIMARY KEY, seq INTEGER NOT NULL, lease_until_ms INTEGER) WITHOUT ROWID",
)
_TIME_INDEX: Final = "CREATE INDEX chunk_time ON chunk (time_ms)"  # until version 2
_V2: Final = tuple(table for table in CHECKED if table.since <= 2)
SCHEMAS: Final = tuple(
    frozenset(" ".join(statement.split()) for statement in (*tables, *_CHUNK))
    for tables in ((*_V1, _TIME_INDEX), (*[table.ddl for table in _V2], _TIME_INDEX), [table.ddl for table in CHECKED])
)
"""What SQLite says of the tables of each version, but for white space; those of 4 and 5 are those of 3."""
OLD_SPAN_RECORDS: Final = 65_536  # in a span of an older file: a poll from a time looks through one


def upgrade(db: sqlite3.Connection) -> None:
    """From version 1, in the caller's transaction. Chunks without origins and epochs are the same in all versions."""
    old = [(table, table.read(db).rows) for table in _V2]
    for table in _V2:
        db.execute(f"DROP TABLE IF EXISTS {table.name}")
        db.execute(table.ddl)
    for table, found in old:
        table.insert(db, found)


def replace_time_index(db: sqlite3.Connection) -> None:
    """From version 2, in the caller's transaction. Only the index is read, which has all that is needed: some hundred
    milliseconds for a GiB of small chunks."""
    db.execute(SPAN.ddl)
    spans = f"""SELECT min(first_seq), max(first_seq), min(time_ms), max(time_ms) FROM chunk INDEXED BY chunk_time
                GROUP BY first_seq / {OLD_SPAN_RECORDS}"""
    SPAN.insert(db, db.execute(spans).fetchall())
    db.execute("DROP INDEX chunk_time")


def version_of(db: sqlite3.Connection) -> int:
    """What the tables say; bits of what the header says may have turned. From 3 on only the header can tell."""
    if has_checksums(db, SPAN.name):
        said = pragma(db, "user_version")
        return said if said in (3, 4) else SCHEMA_VERSION
    return 2 if has_checksums(db, META.name) else 1


def has_checksums(db: sqlite3.Connection, table: str) -> bool:
    return any(name == "crc" for _, name, *_ in db.execute(f"PRAGMA table_info({table})"))


def upgraded(table: Table, row: Row) -> Row:
    """A row of version 1 as today's table has it."""
    if table is STREAM:
        plain = (None if address is None else UUri.FromString(address).SerializeToString() for address in row[1:3])
        try:
            return (row[0], *plain, *row[3:])
        except DecodeError as error:
            raise ValueError(f"stream {row[0]} has no address that can be read") from error
    if table is not CURSOR:
        return row
    name, seq, lease_until_ms = row
    return (name, seq, lease_until_ms, int(lease_until_ms is None and name.startswith(HELD_PREFIXES)), 0)


# -- the file


def has_known_schema(db: sqlite3.Connection) -> bool:
    """False if what the file says of our tables is not what was written there. Others may have theirs beside them, such
    as a backup tool or ANALYZE."""
    found = {" ".join(str(sql).split()) for (sql,) in db.execute("SELECT sql FROM sqlite_master WHERE sql IS NOT NULL")}
    return any(known <= found for known in SCHEMAS)


LOG: Final = FileKind(
    "log",
    APPLICATION_ID,
    SCHEMA_VERSION,
    migrations={1: lambda db: upgrade(db), 2: replace_time_index, 3: lambda db: None, 4: lambda db: None},
    is_ours=lambda db: {"chunk", "chunk_stream", "meta"} <= tables_of(db),
    layout=(f"page_size = {PAGE_BYTES}", "auto_vacuum = INCREMENTAL"),
    quick_bytes_max=CHECK_BYTES_MAX,
    check=lambda db: "" if has_known_schema(db) else "it does not name its tables as it did",
    damaged=UCode.UNAVAILABLE,  # a sender tries again: the next start saves what can be read
)
