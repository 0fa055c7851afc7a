"""What an opened file contains, verified by checksums and repaired where possible.

rows: meta, holes, streams, cursors --right--> + chunks since the last checkpoint -> Loaded
              |
              '-- wrong --> rebuilt from the chunks, which have their own checksums, and from the mark. What can't be
                            rebuilt gets the safe value: sending again is better than skipping. All of it is reported.

Nothing is written before everything was read. Then it is written in one transaction.
"""

from __future__ import annotations

import sqlite3
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, NamedTuple

import structlog

from history.file import damage as kinds
from history.file import rows
from history.file.damage import Damage, Ledger
from history.records.chunk import (
    ID_BYTES,
    Chunk,
    Columns,
    CorruptChunkError,
    Stream,
    address_of,
    decode,
    growth_of,
    unpack_streams,
)
from storage.disk import Marked, insert_rows, transaction

NOT_KNOWN: Final = -1
CURSORS_LOST: Final = "cursors_lost"  # in meta, until the log is closed: a cursor was lost
# in meta: the number of the next stream; numbers of forgotten streams are not used again
NEXT_STREAM: Final = "next_stream"
# in meta: the index of streams, and the spans, may name chunks that retention has deleted
STALE_NAMES: Final = "stale_names"
STREAMS: Final = "streams"  # in meta: how many rows there are
# in meta, with a source authority: the highest seq that its forgotten streams had ...
FORGOTTEN_PREFIX: Final = "forgotten:"
OTHER_AUTHORITIES: Final = "*"  # ... or that all other authorities together had
FOLLOWED_PREFIX: Final = "followed:"  # in meta, with a key of the follower: its position in another log
# in meta, with the incarnation, in hex, of a log from a copy of which this one was made: both are the same to this seq
PREDECESSOR_PREFIX: Final = "predecessor:"
STREAM_BYTES: Final = 4  # of one stream in Unindexed.streams
NUMBERS_LEAP: Final = 1 << 20  # by which numbers are skipped if the next number is damaged
# At most so many chunks are rolled forward on open. The index of streams is written this rarely: each of its pages then
# only once.
CHECKPOINT_CHUNKS: Final = 2_048

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Cursor:
    """The seq up to which a reader has confirmed."""

    seq: int
    # Unix milliseconds; until then records beyond `seq` are kept beyond the retention by age; then the cursor is
    # dropped
    lease_until_ms: int | None = None
    holds: bool = False  # records beyond `seq` are kept beyond the retention by age as long as the cursor exists
    absent_ms: int = 0  # the total time that its owner has been away; stored for the owner
    # who has to learn of records that retention deletes before this cursor has passed them; empty: nobody
    holder: str = ""

    @property
    def columns(self) -> rows.StoredRow:
        """The row of the table CURSOR, without the name."""
        return self.seq, self.lease_until_ms, int(self.holds), self.absent_ms, self.holder


@dataclass(slots=True)
class Extent:
    """Which records the log has, and how much space it takes."""

    oldest_seq: int = 0  # 0: empty
    newest_seq: int = 0  # the highest that was ever given out
    floor_seq: int = 0  # all records up to here were deleted
    stored_bytes: int = 0  # of messages, ids and columns
    disk_bytes: int = 0  # of all files of the log
    disk_free_bytes: int = 0  # free for us on its disk
    bytes_max: int = 0  # what the disk has room for, all files together; 0: unknown


class Unindexed(NamedTuple):
    """A chunk since the last checkpoint."""

    first_seq: int
    streams: bytes  # as in Columns; each of them will have a row in the index of streams
    time_ms: int
    bytes: int


def write_checkpoint(
    db: sqlite3.Connection,
    chunks: Sequence[Unindexed],
    streams: Sequence[rows.StoredRow],
    extent: Extent,
    *,
    is_index_trusted: bool,
) -> None:
    """Write the index and the spans of `chunks`, rows of STREAM, and META, in the caller's transaction."""
    index = sorted((id, chunk.first_seq) for chunk in chunks for id in unpack_streams(chunk.streams))
    insert_rows(db, "INSERT OR IGNORE INTO chunk_stream", index)
    for begin in range(0, len(chunks), CHECKPOINT_CHUNKS):
        part = chunks[begin : begin + CHECKPOINT_CHUNKS]
        times = [chunk.time_ms for chunk in part]
        rows.SPAN.insert(db, [(part[0].first_seq, part[-1].first_seq, min(times), max(times))])
    rows.STREAM.insert(db, streams)
    meta = {"newest_seq": extent.newest_seq, "floor_seq": extent.floor_seq, "stored_bytes": extent.stored_bytes}
    rows.META.insert(db, [*meta.items(), ("indexed_seq", extent.newest_seq if is_index_trusted else NOT_KNOWN)])


@dataclass(slots=True)
class Loaded:
    """The state with which a store starts."""

    incarnation: bytes = b""
    extent: Extent = field(default_factory=Extent)
    streams: dict[int, Stream] = field(default_factory=dict)  # in the order of their numbers
    next_stream: int = 1
    # by source authority: the highest seq that its forgotten streams had
    forgotten: dict[str, int] = field(default_factory=dict)
    positions: dict[str, bytes] = field(default_factory=dict)  # in logs that are followed, by key
    # logs from whose copies this one was made, by incarnation: up to this seq they are the same
    predecessors: dict[bytes, int] = field(default_factory=dict)
    cursors: dict[str, Cursor] = field(default_factory=dict)
    cursors_lost: bool = False  # a cursor was lost, and even its name is uncertain
    holes: list[tuple[int, int]] = field(default_factory=list)  # (after, before): committed once, and lost
    ledger: Ledger = field(default_factory=Ledger)
    found: list[Damage] = field(default_factory=list)  # found by this open
    unindexed: list[Unindexed] = field(default_factory=list)  # chunks since the last checkpoint
    dirty: set[int] = field(default_factory=set)  # streams that grew since then
    is_index_trusted: bool = True
    new_since_ms: int | None = None  # this open made the file, an earlier one is unknown (Unix ms)

    @property
    def start_seq(self) -> int:
        """Returns the last seq that must not be given out again."""
        return max(self.extent.newest_seq, *(before - 1 for _, before in self.holes), 0)


@dataclass(slots=True)
class Loading:
    """Loads one opened file. `_mark_trouble`: why the mark can't be used; empty if it can."""

    _db: sqlite3.Connection
    _marked: Marked | None
    _mark_trouble: str
    _now_ms: int
    _random_bytes: Callable[[int], bytes]
    _made: Loaded = field(default_factory=Loaded)
    # (table, rows) to be written at the end
    _writes: list[tuple[rows.Table, list[rows.StoredRow]]] = field(default_factory=list)
    _deletes: list[tuple[str, Any]] = field(default_factory=list)
    _rebuild: bool = False  # read all chunks, and write what follows from them
    _is_count_sure: bool = True  # the numbers of streams in meta are not damaged
    _bad_streams: list[int] = field(default_factory=list)  # their rows can't be read
    _missing_streams: int = 0  # their rows do not exist ...
    _named: int = 0  # ... and so many of them were found in the records

    def run(self) -> Loaded:
        """Raises sqlite3.Error."""
        made = self._made
        found, bad = self._read(rows.DAMAGE)
        made.ledger = Ledger(found)
        for _ in bad:
            self._found(kinds.NOTE, "a note of earlier damage can't be read any more")
        meta = self._load_meta()
        made.incarnation = meta["incarnation"]
        self._rebuild = self._rebuild or meta["indexed_seq"] == NOT_KNOWN
        self._load_holes_and_spans()
        self._load_streams(meta)
        oldest = rows.oldest_of(self._db)
        made.extent = Extent(oldest, meta["newest_seq"], meta["floor_seq"], meta["stored_bytes"])
        if STALE_NAMES in meta:
            self._deletes.append(("DELETE FROM chunk_stream WHERE first_seq <= ?", meta["floor_seq"]))
            self._deletes.append(("DELETE FROM span WHERE last_seq <= ?", meta["floor_seq"]))
            self._deletes.append(("DELETE FROM meta WHERE key = ?", STALE_NAMES))
        if not self._rebuild:
            self._read_chunks(meta["indexed_seq"])
        if self._rebuild:
            self._rebuild_all()
        self._compare_with_mark()
        self._load_cursors()
        for after, before in made.holes:
            if before - 1 > max(made.extent.floor_seq, 0):
                self._found(kinds.COMMITS, "", after, before)
        self._write()
        return made

    def _found(self, kind: str, detail: str, after: int = 0, before: int = 0, incarnation: bytes | None = None) -> None:
        incarnation = self._made.incarnation if incarnation is None else incarnation
        damage = Damage(self._now_ms, kind, after, before, incarnation, detail=detail)
        row = self._made.ledger.add(damage)
        if row is not None:
            self._writes.append((rows.DAMAGE, [row]))
            self._made.found.append(damage)
            log.error("the log is damaged", kind=kind, after=after, before=before, detail=detail)

    # -- rows

    def _read(self, table: rows.Table) -> tuple[list[rows.StoredRow], list[rows.StoredRow]]:
        """Returns the rows whose checksum is right, and the others, which are deleted."""
        bad: list[rows.StoredRow] = []
        found = list(table.read(self._db, bad))
        self._drop(table, bad)
        return found, bad

    def _drop(self, table: rows.Table, bad: Sequence[rows.StoredRow]) -> None:
        for row in bad:
            self._delete(table.name, table.columns[0], row[0])

    def _load_meta(self) -> dict[str, Any]:
        found, bad = self._read(rows.META)
        meta = dict[str, Any](found)
        self._made.cursors_lost = CURSORS_LOST in meta
        prefix = FOLLOWED_PREFIX
        self._made.positions = {key.removeprefix(prefix): one for key, one in meta.items() if key.startswith(prefix)}
        self._made.predecessors = {
            bytes.fromhex(key.removeprefix(PREDECESSOR_PREFIX)): seq
            for key, seq in meta.items()
            if key.startswith(PREDECESSOR_PREFIX)
        }
        lost = [key for key, _ in bad]
        is_followed = [isinstance(key, str) and key.startswith(prefix) for key in lost]
        self._is_count_sure = all(is_followed)
        self._load_forgotten(meta)
        missing = [key for key in rows.META_KEYS if key not in meta]
        if missing:
            self._rebuild = True
            meta |= dict.fromkeys(missing, 0)
        if "incarnation" in missing:
            meta["incarnation"] = self._marked.incarnation if self._marked is not None else self._random_bytes(16)
            self._writes.append((rows.META, [("incarnation", meta["incarnation"])]))
        self._made.incarnation = meta["incarnation"]
        for key in missing:
            self._found(kinds.META_ROW, f"{key} was lost, and was restored from the records and the mark")
        for key in lost:
            if key not in missing:  # a follower begins where the other log says, and drops the records it already has
                what = "how far a log was followed, or up to where topics were forgotten, may not be known any more"
                self._found(kinds.META_ROW, f"{key!r} can't be read: {what}")
        if "floor_seq" in missing:
            meta["floor_seq"] = NOT_KNOWN
        return meta

    def _load_holes_and_spans(self) -> None:
        found, bad = self._read(rows.HOLE)
        self._made.holes = sorted(found)
        if bad:
            self._found(kinds.HOLE_ROW, "the list of records that were lost earlier was damaged, and is rebuilt")
            self._rebuild = True
        if self._read(rows.SPAN)[1]:
            self._found(kinds.INDEX, "the append times in the index were damaged, and are rebuilt from the records")
            self._rebuild = True

    def _load_forgotten(self, meta: dict[str, Any]) -> None:
        prefix, forgotten = FORGOTTEN_PREFIX, self._made.forgotten
        self._made.next_stream = meta.get(NEXT_STREAM, 1)
        forgotten |= {key.removeprefix(prefix): seq for key, seq in meta.items() if key.startswith(prefix)}
        if not self._is_count_sure:  # one of these rows may be the damaged one
            forgotten[OTHER_AUTHORITIES] = max(forgotten.get(OTHER_AUTHORITIES, 0), meta.get("floor_seq", 0))
            self._writes.append((rows.META, [(prefix + OTHER_AUTHORITIES, forgotten[OTHER_AUTHORITIES])]))

    def _load_streams(self, meta: dict[str, Any]) -> None:
        bad: list[rows.StoredRow] = []
        for id, source, sink, first, newest, records, newest_id, time_ms in rows.STREAM.read(self._db, bad):
            self._made.streams[id] = Stream(id, source, sink, (first, newest, records, newest_id, time_ms))
        self._drop(rows.STREAM, bad)
        self._bad_streams = [row[0] for row in bad if isinstance(row[0], int)]
        self._made.next_stream = max(self._made.next_stream, 1 + max(self._made.streams, default=0))
        if not self._is_count_sure:
            self._made.next_stream += NUMBERS_LEAP
            self._writes.append((rows.META, [(NEXT_STREAM, self._made.next_stream)]))
            meta.setdefault(STREAMS, len(self._made.streams) + len(bad))
        expected = meta.get(STREAMS, 0)
        if len(self._made.streams) != expected or bad:
            self._rebuild = True
            self._missing_streams = max(0, expected - len(self._made.streams) - len(bad))

    def _load_cursors(self) -> None:
        made = self._made
        found, bad = self._read(rows.CURSOR)
        for name, seq, lease_until_ms, holds, absent_ms, holder in found:
            cursor = made.cursors[name] = Cursor(seq, lease_until_ms, bool(holds), absent_ms, holder)
            if seq > made.start_seq:
                what = f"{name} was beyond the newest record ({seq}), and begins again at the oldest record"
                self._found(kinds.CURSOR_ROW, what)
                cursor = made.cursors[name] = replace(cursor, seq=made.extent.floor_seq)
                self._writes.append((rows.CURSOR, [(name, *cursor.columns)]))
        for row in bad:
            self._restart_cursor(row[0], row[-1])

    def _restart_cursor(self, name: Any, holder: Any) -> None:
        """Any value of the row may be wrong, so the cursor begins at the oldest record."""
        made = self._made
        made.cursors_lost = True
        self._writes.append((rows.META, [(CURSORS_LOST, 1)]))
        self._found(kinds.CURSOR_ROW, f"{name!r} can't be read, and begins again at the oldest record")
        if isinstance(name, str) and name.isprintable() and name not in made.cursors:
            holder = holder if isinstance(holder, str) and holder.isprintable() else ""
            cursor = made.cursors[name] = Cursor(made.extent.floor_seq, holds=bool(holder), holder=holder)
            self._writes.append((rows.CURSOR, [(name, *cursor.columns)]))

    def _delete(self, table: str, key: str, value: Any) -> None:
        where = f"{key} IS ?"
        if isinstance(value, str):  # damaged text may not be UTF-8, and then it can't be a text parameter
            where, value = f"CAST({key} AS BLOB) = ?", value.encode(errors="surrogateescape")
        self._deletes.append((f"DELETE FROM {table} WHERE {where}", value))

    # -- chunks

    def _read_chunks(self, after: int) -> None:
        """Count the chunks beyond `after`; NOT_KNOWN: all of them, and name the streams and holes that are in none of
        the tables."""
        made, extent, is_rebuild = self._made, self._made.extent, after == NOT_KNOWN
        made.unindexed.clear()
        expected: int | None = None
        holes = set(made.holes)
        for columns, chunk in self._chunks(after):
            made.unindexed.append(Unindexed(columns.first_seq, columns.streams, columns.time_ms, columns.size))
            extent.stored_bytes += columns.size
            if is_rebuild and expected is not None and columns.first_seq > expected:
                holes.add((expected - 1, columns.first_seq))
            expected = columns.last_seq + 1
            extent.newest_seq = max(extent.newest_seq, columns.last_seq)
            if chunk is not None:
                if is_rebuild:
                    self._name_streams(chunk)
                self._count(chunk, columns)
        made.holes = sorted(holes)

    def _count(self, chunk: Chunk, columns: Columns) -> None:
        for id, growth in growth_of(columns.first_seq, chunk.streams, columns.ids, columns.time_ms):
            stream = self._made.streams.get(id)
            if stream is None:
                self._rebuild = True
            elif growth[1] > stream.newest_seq:
                stream.grow(*growth)
                self._made.dirty.add(id)

    def _chunks(self, after: int) -> Iterator[tuple[Columns, Chunk | None]]:
        """Yields each chunk beyond `after`, with None if its records can't be read, which is noted as damage."""
        previous: tuple[int, str] | None = None
        query = f"SELECT {rows.CHUNK_COLUMNS} FROM chunk WHERE first_seq > ? ORDER BY first_seq"
        for row in self._db.execute(query, (after,)):
            if previous is not None:
                self._found(kinds.RECORDS, previous[1], previous[0], row[0])
                previous = None
            columns = Columns(*row)
            try:
                chunk = decode(columns)
            except (CorruptChunkError, struct.error, TypeError, ValueError) as error:
                if not self._is_plausible(columns):
                    self._delete("chunk", "first_seq", columns.first_seq)
                    claim = f"a damaged chunk claims seqs from {columns.first_seq} on, which were never given out"
                    self._found(kinds.RECORDS, claim)
                    continue
                previous = columns.first_seq - 1, str(error)
                yield columns, None
            else:
                yield columns, chunk
        if previous is not None:
            self._found(kinds.RECORDS, previous[1], previous[0], self._made.extent.newest_seq + 1)

    def _is_plausible(self, columns: Columns) -> bool:
        """Returns False if a damaged chunk is beyond everything that was ever committed, or its number of records is
        wrong: with it the seqs would leap ahead."""
        c = columns
        row: rows.StoredRow = (c.first_seq, c.records, c.time_ms, c.streams, c.ids, c.data)
        if [type(value) for value in row] != [int, int, int, bytes, bytes, bytes]:
            return False
        if c.records != len(c.ids) // ID_BYTES:
            return False
        marked = self._marked
        return marked is None or marked.incarnation != self._made.incarnation or columns.last_seq <= marked.seq

    def _rebuild_all(self) -> None:
        made, extent = self._made, self._made.extent
        extent.stored_bytes = 0
        self._read_chunks(NOT_KNOWN)
        self._note_lost_streams()
        if extent.floor_seq == NOT_KNOWN:
            extent.floor_seq = max(0, extent.oldest_seq - 1)
        meta = {NEXT_STREAM: made.next_stream, STREAMS: len(made.streams)}
        self._writes += [(rows.META, list(meta.items())), (rows.HOLE, list(made.holes))]

    def _note_lost_streams(self) -> None:
        """Note the streams of which neither row nor records exist. Their numbers must not be given out again."""
        made = self._made
        lost = [id for id in self._bad_streams if id not in self._made.streams]
        for id in lost:
            self._found(kinds.STREAM_ROW, f"the row of stream {id} can't be read, and it has no records any more")
        if (nameless := self._missing_streams - self._named) > 0:
            self._found(
                kinds.STREAM_ROW, f"the rows of {nameless} streams are missing, and they have no records any more"
            )
        self._made.streams = dict(sorted(self._made.streams.items()))
        likely = [id for id in lost if 0 < id < made.next_stream + NUMBERS_LEAP]  # the number itself may be damaged
        made.next_stream = max(0, made.next_stream - 1, *self._made.streams, *likely) + 1 + self._missing_streams

    def _name_streams(self, chunk: Chunk) -> None:
        """Find the streams of a chunk whose rows are lost by the addresses in its messages."""
        for id in chunk.stream_set - self._made.streams.keys():
            index = chunk.streams.index(id)
            attributes = chunk.messages[index].attributes
            address = address_of(attributes.source, attributes.sink if attributes.HasField("sink") else None)
            made = Stream(id, *((address, None) if isinstance(address, bytes) else address))
            made.first_seq = chunk.prev_seqs[index]  # it had that one at least, though that is not there any more
            self._made.streams[id] = made
            self._named += id not in self._bad_streams
            self._found(
                kinds.STREAM_ROW, f"the row of stream {id} could not be read, and was restored from its records"
            )

    # -- the mark

    def _compare_with_mark(self) -> None:
        made, marked = self._made, self._marked
        newest = made.extent.newest_seq
        unsure = "it is unknown whether the newest records are all there"
        if self._mark_trouble:
            self._found(kinds.MARK, f"{self._mark_trouble}: {unsure}")
        elif marked is None:
            if newest:
                self._found(kinds.MARK, f"it is missing: {unsure}")
        elif marked.incarnation != made.incarnation:
            if marked.seq and not made.ledger.knows(marked.incarnation):
                self._found(
                    kinds.MISSING, "another log was here, as its mark says", 0, marked.seq + 1, marked.incarnation
                )
        elif marked.seq > made.start_seq:
            # A cursor that was set with those commits is at an older seq, or is missing if it was new.
            made.cursors_lost = True
            self._writes.append((rows.META, [(CURSORS_LOST, 1)]))
            made.holes = [hole for hole in made.holes if hole[0] != newest] + [(newest, marked.seq + 1)]
            self._writes.append((rows.HOLE, [(newest, marked.seq + 1)]))

    # -- writing

    def _write(self) -> None:
        made = self._made
        for number in made.ledger.forget(made.extent.floor_seq, made.incarnation):
            self._delete(rows.DAMAGE.name, "number", number)
        if not (self._writes or self._deletes or self._rebuild):
            return
        with transaction(db := self._db):
            for statement, key in self._deletes:
                db.execute(statement, (key,))
            for table, right in self._writes:
                table.insert(db, right)
            if self._rebuild:
                db.execute("DELETE FROM chunk_stream")
                db.execute("DELETE FROM span")
                streams = [made.streams[id].row(made.streams[id].progress) for id in sorted(made.dirty)]
                write_checkpoint(db, made.unindexed, streams, made.extent, is_index_trusted=True)
        if self._rebuild:
            made.unindexed.clear()
            made.dirty.clear()
