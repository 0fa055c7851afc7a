"""Reads the log's file, in executor threads: a bounded step at a time, and around damaged parts.

(after, until, streams) -> first_seqs, by index or by scan -> rows -> decode -> select -> Scan
walk: every chunk that can still be found, in the order of the table, and where the table can't be walked any further,
in the order of the index of streams -> checksum -> (first_seq, columns | why not)
"""

from __future__ import annotations

import contextlib
import sqlite3
import struct
import threading
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from pathlib import Path
from typing import Final, NamedTuple

import structlog

from history.file.rows import CHUNK_COLUMNS, SPAN
from history.records.chunk import ID_BYTES, NOBODY, Chunk, Columns, CorruptChunkError, Scan, decode, unpack_streams
from storage.disk import REAL_DISK, Disk, any_text
from storage.faults import is_damage

# read in one step, so that a step takes milliseconds and the next reader gets its turn
SCAN_CHUNKS_MAX: Final = 256
FIND_CHUNKS_MAX: Final = 1_024  # in one step, of which mostly the ids alone are read
INDEX_ROWS_MAX: Final = 1_024  # read in one step, shared by the wanted streams
SCAN_BYTES_MAX: Final = 16 << 20  # read from disk in one step; this limits memory as well
BARE_BYTES: Final = 256  # a record counts as so many where its message is not read: such a step takes as long
KNOWN_BAD_MAX: Final = 10_000  # damaged chunks that are remembered, so that each is logged once
INDEXED_STREAMS_MAX: Final = 64  # for more streams a scan of all chunks is cheaper than merging the ranges of the index

Holes = Sequence[tuple[int, int]]  # (after, before)
ReadChunk = Callable[[sqlite3.Connection, int], Chunk]

log = structlog.get_logger()


class NoChunkError(CorruptChunkError):
    """The chunk is missing, although an index names it."""


class ScanLimits(NamedTuple):
    after: int
    until: int
    records: int
    bytes: int
    is_strict: bool  # not even the first record may exceed the limit
    is_bare: bool = False  # messages are not read


class Reader:
    """Has a pool of connections. Every method may be called from any thread, and blocks. Raises sqlite3.Error."""

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
            db.text_factory = any_text
            db.execute("PRAGMA cell_size_check = 1")
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

    def scan(self, limits: ScanLimits, wanted: Set[int] | None, newest: Mapping[int, int] | None, holes: Holes) -> Scan:
        """Returns the records within `limits` of the streams `wanted` (None: all), as far as one step goes.

        With the `newest` seq of each wanted stream the index is trusted, as long as both agree. Without, every chunk is
        read; then `wanted` may change meanwhile. `holes` are known to be empty; any other missing seq is damage.
        """
        if newest is not None:
            wanted = newest.keys()  # not changed by the loop
        read = bare_at if limits.is_bare else whole_at
        with self._snapshot() as db:
            row = db.execute("SELECT value FROM meta WHERE key = 'floor_seq'").fetchone()
            floor = row[0] if row is not None else 0
            found = self._step(db, Scan(*limits, floor_seq=floor), wanted, holes, read, is_quick=newest is not None)
            if newest is not None and (found.is_index_wrong or not _is_whole(found, newest, holes)):
                found = self._step(db, Scan(*limits, floor_seq=floor), wanted, holes, whole_at, is_quick=False)
                # without messages it may also have been a damaged chunk
                found.is_index_wrong = not (limits.is_bare and found.gaps)
        return found

    def _step(
        self,
        db: sqlite3.Connection,
        found: Scan,
        streams: Set[int] | None,
        holes: Holes,
        read: ReadChunk,
        *,
        is_quick: bool,
    ) -> Scan:
        """`is_quick`: trust the index, and the set of streams of each chunk; otherwise read every chunk."""
        after, until = found.after, found.until
        candidates, complete_to = _candidates(db, after, until, streams if is_quick else None)
        expected = max(after, found.floor_seq) + 1
        bytes = 0
        for first_seq in candidates:
            if first_seq > expected and not is_quick:
                self._jump(found, expected - 1, first_seq, holes)
            chunk = self._row(db, first_seq, found, read, is_quick=is_quick)
            if chunk is None:
                expected = found.covered + 1
                continue
            expected = max(expected, chunk.last_seq + 1)
            if chunk.last_seq <= after:
                continue
            bytes += len(chunk) * BARE_BYTES if found.is_bare else sum(map(len, chunk.data))
            found.take(chunk, streams)
            if found.full or bytes >= SCAN_BYTES_MAX:
                return found
        if complete_to == until >= expected and not is_quick:
            self._jump(found, expected - 1, until + 1, holes)
        found.covered = max(found.covered, complete_to)
        return found

    def _jump(self, found: Scan, after: int, before: int, holes: Holes) -> None:
        """Note that records were committed there, and no chunk has them any more."""
        if not any(low <= after and before <= high for low, high in holes):
            self._note(found, after, before, "they aren't there")

    def _note(self, found: Scan, after: int, before: int, why: str) -> bool:
        """Note that the records between can't be read. Returns whether that was not noted before."""
        found.gaps.append((max(found.after, after), min(before, found.until + 1)))
        found.covered = max(found.covered, min(before - 1, found.until))
        is_new = after + 1 not in self._known_bad and len(self._known_bad) < KNOWN_BAD_MAX
        if is_new:
            self._known_bad.add(after + 1)
            found.damaged.append((after, before, why))
        return is_new

    def _row(
        self, db: sqlite3.Connection, first_seq: int, found: Scan, read: ReadChunk, *, is_quick: bool
    ) -> Chunk | None:
        """Returns the chunk at `first_seq`. If it can't be read, returns None and notes the gap, or that the index is
        wrong."""
        try:
            return read(db, first_seq)
        except (CorruptChunkError, sqlite3.DatabaseError) as error:
            if isinstance(error, NoChunkError) and is_quick:
                found.is_index_wrong = True
                return None
            if isinstance(error, sqlite3.DatabaseError) and not is_damage(error):
                raise
            reason = str(error)
        if self._note(found, first_seq - 1, next_first_seq(db, first_seq) or found.until + 1, reason):
            (after, before), what = found.gaps[-1], "records are damaged and will be reported as a gap"
            log.error(what, path=str(self._path), after=after, before=before, reason=reason)
        return None

    def find_id(self, id: bytes) -> int | None:
        """Returns the seq of the newest record with this message id."""
        with self._snapshot() as db:
            for first_seq, ids in db.execute(
                "SELECT first_seq, ids FROM chunk WHERE instr(ids, ?) ORDER BY first_seq DESC", (id,)
            ):
                at = ids.find(id)
                while at >= 0 and at % ID_BYTES:
                    at = ids.find(id, at + 1)
                if at >= 0:
                    return int(first_seq) + int(at) // ID_BYTES
        return None

    def find_ids(self, ids: Set[bytes], after: int, until: int) -> tuple[dict[tuple[int, bytes], int], int]:
        """Looks for records with these ids beyond the seq `after`, up to `until`: a bounded step. Returns their seqs by
        stream and id, and how far it has looked. A record in a damaged chunk is not found."""
        found: dict[tuple[int, bytes], int] = {}
        query = "SELECT {} FROM chunk WHERE first_seq = ?"
        with self._snapshot() as db:
            start = db.execute("SELECT max(first_seq) FROM chunk WHERE first_seq <= ?", (after + 1,)).fetchone()[0] or 0
            candidates = first_seqs(db, start, until, FIND_CHUNKS_MAX)
            for first_seq in candidates:
                try:
                    (packed,) = db.execute(query.format("ids"), (first_seq,)).fetchone()
                    parts = [packed[at : at + ID_BYTES] for at in range(0, len(packed), ID_BYTES)]
                    if ids.isdisjoint(parts):
                        continue
                    (packed,) = db.execute(query.format("substr(data, 1, 4 * records)"), (first_seq,)).fetchone()
                    keys = enumerate(zip(unpack_streams(packed), parts, strict=False), first_seq)
                    found |= {key: seq for seq, key in keys if key[1] in ids and after < seq <= until}
                except (sqlite3.DatabaseError, TypeError, struct.error) as error:
                    if isinstance(error, sqlite3.DatabaseError) and not is_damage(error):
                        raise
        return found, until if len(candidates) < FIND_CHUNKS_MAX else candidates[-1]

    def first_after_time(self, time_ms: int) -> int | None:
        """Returns the first seq that was appended after `time_ms`, in the order of seqs, whatever the clock did."""
        query = "SELECT first_seq FROM chunk WHERE first_seq BETWEEN ? AND ? AND time_ms > ? ORDER BY 1 LIMIT 1"
        with self._snapshot() as db:
            for first_seq, last_seq, _, latest_ms in spans(db):
                if latest_ms > time_ms:
                    found = db.execute(query, (first_seq, last_seq, time_ms)).fetchone()
                    if found is not None:
                        return int(found[0])
        return None

    def times_of(self, seqs: Sequence[int]) -> list[int]:
        """Returns the append time of each of these records; 0: it can't be read."""
        query, found = "SELECT time_ms FROM chunk WHERE first_seq <= ? ORDER BY first_seq DESC LIMIT 1", list[int]()
        with self._snapshot() as db:
            for seq in seqs:
                try:
                    row = db.execute(query, (seq,)).fetchone()
                except sqlite3.DatabaseError as error:
                    if not is_damage(error):
                        raise
                    row = None
                found.append(row[0] if row is not None and isinstance(row[0], int) and row[0] > 0 else 0)
        return found

    def recent_ids(self, count: int) -> list[tuple[int, bytes]]:
        """Returns the stream and id of the newest records, oldest first, as far as they can be read without walking
        around damage."""
        newest: list[tuple[int, bytes]] = []
        query = "SELECT ids, substr(data, 1, 4 * records) FROM chunk ORDER BY first_seq DESC"
        try:
            with self._snapshot() as db, contextlib.closing(db.execute(query)) as rows:
                while len(newest) < count and (row := rows.fetchone()) is not None:
                    # a damaged chunk: its readers get a gap
                    with contextlib.suppress(TypeError, struct.error):
                        ids, streams = row[0], unpack_streams(row[1])
                        parts = [ids[at : at + ID_BYTES] for at in range(0, len(ids), ID_BYTES)]
                        newest += [one for one in zip(streams, parts, strict=False) if len(one[1]) == ID_BYTES][::-1]
        except sqlite3.DatabaseError as error:
            if not is_damage(error):
                raise
            what = "the ids of older records can't be read: some messages may be stored twice"
            log.warning(what, path=str(self._path), reason=str(error))
        return newest[:count][::-1]


def _is_whole(found: Scan, wanted: Mapping[int, int], holes: Holes) -> bool:
    """Returns False if a record of `wanted` was skipped: each record names the one before it in its stream, and the
    newest one of each stream is known."""
    seen: dict[int, int] = {}

    def is_lost(seq: int) -> bool:
        return any(after < seq < before for gaps in (found.gaps, holes) for after, before in gaps)

    begin = max(found.after, found.floor_seq)
    for chunk in found.chunks:
        for stream, seq, prev_seq in zip(chunk.streams, chunk.seqs, chunk.prev_seqs, strict=True):
            if prev_seq > seen.get(stream, begin) and not is_lost(prev_seq):
                return False
            seen[stream] = seq
    if found.full:
        return True
    missing = (seq for id, seq in wanted.items() if seen.get(id, begin) < seq <= found.covered)
    return all(map(is_lost, missing))


def _candidates(db: sqlite3.Connection, after: int, until: int, wanted: Set[int] | None) -> tuple[list[int], int]:
    """Returns the first_seq of each chunk that may have wanted records, and up to which seq this list is complete."""
    start = db.execute("SELECT max(first_seq) FROM chunk WHERE first_seq <= ?", (after + 1,)).fetchone()[0] or 0
    if wanted is None or len(wanted) > INDEXED_STREAMS_MAX:
        return _scanned(db, start, until, wanted)
    row = db.execute("SELECT value FROM meta WHERE key = 'indexed_seq'").fetchone()
    indexed_seq = row[0] if row is not None else -1
    named: set[int] = set()
    complete_to = min(indexed_seq, until)
    rows_max = max(INDEX_ROWS_MAX // max(1, len(wanted)), 1)
    query = "SELECT first_seq FROM chunk_stream WHERE stream = ? AND first_seq BETWEEN ? AND ? ORDER BY 1 LIMIT ?"
    for stream in wanted:
        rows = [row[0] for row in db.execute(query, (stream, start, complete_to, rows_max))]
        named.update(rows)
        if len(rows) == rows_max:
            complete_to = min(complete_to, rows[-1])
    if complete_to < min(indexed_seq, until):
        return sorted(one for one in named if one <= complete_to), complete_to
    if until <= indexed_seq:
        return sorted(named), until
    fresh, complete_to = _scanned(db, max(start, indexed_seq + 1), until, wanted)
    return sorted(named) + fresh, complete_to


def _scanned(db: sqlite3.Connection, start: int, until: int, wanted: Set[int] | None) -> tuple[list[int], int]:
    query = "SELECT first_seq, streams FROM chunk WHERE first_seq BETWEEN ? AND ? ORDER BY first_seq LIMIT ?"
    try:
        rows = db.execute(query, (start, until, SCAN_CHUNKS_MAX)).fetchall()
    except sqlite3.DatabaseError as error:
        if not is_damage(error):
            raise
        rows = [(one, None) for one in first_seqs(db, start, until, SCAN_CHUNKS_MAX)]
    complete_to = until if len(rows) < SCAN_CHUNKS_MAX else min(until, rows[-1][0])
    if wanted is not None:  # a chunk with a damaged set of streams may have them
        rows = [row for row in rows if not isinstance(row[1], bytes) or not wanted.isdisjoint(unpack_streams(row[1]))]
    return [row[0] for row in rows], complete_to


def chunk_at(db: sqlite3.Connection, first_seq: int) -> tuple[Columns, Chunk]:
    """Raises CorruptChunkError, or sqlite3.DatabaseError."""
    row = db.execute(f"SELECT {CHUNK_COLUMNS} FROM chunk WHERE first_seq = ?", (first_seq,)).fetchone()
    if row is None:
        raise NoChunkError(f"the records from {first_seq} on aren't there")
    try:
        columns = Columns(*row)
        return columns, decode(columns)
    except (struct.error, TypeError, ValueError) as error:
        raise CorruptChunkError(f"the columns of the records from {first_seq} on are none: {error}") from None


def whole_at(db: sqlite3.Connection, first_seq: int) -> Chunk:
    return chunk_at(db, first_seq)[1]


def bare_at(db: sqlite3.Connection, first_seq: int) -> Chunk:
    """Returns a chunk without its messages. Its checksum can't be compared without them: whatever else shows damage has
    the whole chunk read. Raises as `chunk_at`."""
    query = "SELECT records, time_ms, streams FROM chunk WHERE first_seq = ?"
    with contextlib.suppress(struct.error, TypeError, ValueError, OverflowError, sqlite3.DatabaseError):
        records, time_ms, packed = db.execute(query, (first_seq,)).fetchone()
        with db.blobopen("chunk", "data", first_seq, readonly=True) as data:
            numbers = struct.unpack(f"<{records}I{records}Q", data.read(12 * records))
        streams = list(numbers[:records])
        if records and set(streams) == set(unpack_streams(packed)):
            return Chunk(range(first_seq, first_seq + records), time_ms, streams, list(numbers[records:]), [])
    return chunk_at(db, first_seq)[1]


def walk(db: sqlite3.Connection) -> Iterator[tuple[int, Columns | None, str]]:
    """Yields in order (first_seq, columns, ""), or (first_seq, None, why) if a chunk can't be read. Raises
    sqlite3.Error if the disk fails."""
    after = -1
    while found := first_seqs(db, after + 1, NOBODY, SCAN_CHUNKS_MAX):
        after = found[-1]
        for first_seq in found:
            try:
                yield first_seq, chunk_at(db, first_seq)[0], ""
            except (CorruptChunkError, sqlite3.DatabaseError) as error:
                yield first_seq, None, str(error)


def next_first_seq(db: sqlite3.Connection, after: int) -> int | None:
    """Returns the first_seq of the next chunk that can be found, or None."""
    return next(iter(first_seqs(db, after + 1, NOBODY, 1)), None)


def first_seqs(db: sqlite3.Connection, start: int, until: int, count: int) -> list[int]:
    """Returns the first `count` chunks that begin in start..until. Where the table can't be walked: those that the
    index of streams names, though this reads the whole index, and those of the table beyond the damage."""
    query = "SELECT {} first_seq FROM {} WHERE first_seq BETWEEN ? AND ? ORDER BY 1 LIMIT ?"
    try:
        found = {row[0] for row in db.execute(query.format("", "chunk"), (start, until, count))}
    except sqlite3.DatabaseError as error:
        if not is_damage(error):
            raise
        found = set(_walked(db, start, until, count))
        with contextlib.suppress(sqlite3.DatabaseError):
            found.update(row[0] for row in db.execute(query.format("DISTINCT", "chunk_stream"), (start, until, count)))
    return sorted(one for one in found if start <= one <= until)[:count]


def _walked(db: sqlite3.Connection, start: int, until: int, count: int) -> list[int]:
    found: list[int] = []
    seq: int | None = start
    query = "SELECT first_seq FROM chunk WHERE first_seq BETWEEN ? AND ? ORDER BY 1 LIMIT ?"
    while seq is not None and len(found) < count:
        try:
            for (first_seq,) in db.execute(query, (seq, until, count - len(found))):
                found.append(first_seq)
                seq = first_seq + 1
            break
        except sqlite3.DatabaseError:
            seq = _beyond_damage(db, seq, until)
    return found


def _beyond_damage(db: sqlite3.Connection, seq: int, until: int) -> int | None:
    """Returns the next seq from which the table can be walked again. The search doubles its distance each time, and
    then bisects."""

    def is_whole(seq: int) -> bool:
        try:
            db.execute("SELECT first_seq FROM chunk WHERE first_seq >= ? ORDER BY 1 LIMIT 1", (seq,)).fetchone()
        except sqlite3.DatabaseError:
            return False
        return True

    leap = 1
    while not is_whole(seq + leap):
        leap *= 2
        if seq + leap > until:
            return None
    return bisect_left(range(seq + leap), True, lo=seq + leap // 2 + 1, key=is_whole)


class Span(NamedTuple):
    """Chunks that begin in first_seq..last_seq, and when the earliest and the latest of them was appended, in Unix
    milliseconds."""

    first_seq: int
    last_seq: int
    earliest_ms: int
    latest_ms: int


def spans(db: sqlite3.Connection) -> list[Span]:
    """Returns all spans in order. The last one has the chunks since the last checkpoint, whose times are unknown."""
    known = [Span(*row) for row in db.execute(f"SELECT {', '.join(SPAN.columns)} FROM span ORDER BY first_seq")]
    return [*known, Span(max((span.last_seq for span in known), default=-1) + 1, NOBODY, -NOBODY, NOBODY)]
