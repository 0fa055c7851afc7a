"""Reads everything in a log's file, and reports what is damaged. Writes nothing, and may run beside the gateway that
owns the log.

pages: SQLite's own check -> rows: checksums -> chunks: checksums, seqs without a jump, each topic's chain, addresses
    -> index: names every chunk of every stream -> cursors and mark: not beyond the newest record -> VerifyReport
"""

from __future__ import annotations

import contextlib
import sqlite3
from bisect import bisect_right
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from history.file import damage as kinds
from history.file import rows
from history.file.damage import Damage, Ledger
from history.file.reader import Span, chunk_at, next_first_seq, walk
from history.records.chunk import Chunk, Columns, CorruptChunkError, decode, message_id, unpack_streams
from storage.disk import REAL_DISK, BadMarkError, Disk, Marked, any_text, pragma, read_mark
from storage.faults import free_bytes
from uprotocol import uri as uris
from uprotocol.encoded import EncodedMessage
from uprotocol.status import UStatusError
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.uri_pb2 import UUri

FINDINGS_MAX: Final = 1_000  # more findings are only counted
# While we read, the write-ahead log can't be emptied. We stop before it fills the disk of a running gateway.
WAL_IGNORED_BYTES: Final = 8 << 20
STEPS_PER_LOOK: Final = 100_000  # of SQLite's virtual machine: some milliseconds


@dataclass(slots=True)
class VerifyReport:
    path: Path
    version: int = 0
    incarnation: bytes = b""
    records: int = 0  # readable
    oldest_seq: int = 0
    newest_seq: int = 0
    found: list[Damage] = field(default_factory=list)  # by this run
    found_total: int = 0
    reported: list[Damage] = field(default_factory=list)  # reported by the gateway, and not acknowledged yet

    @property
    def is_sound(self) -> bool:
        return not self.found_total and not self.reported

    def note(self, kind: str, detail: str, after: int = 0, before: int = 0) -> None:
        self.found_total += 1
        if len(self.found) < FINDINGS_MAX:
            self.found.append(Damage(0, kind, after, before, self.incarnation, detail=detail))


def verify(path: Path, disk: Disk = REAL_DISK) -> VerifyReport:
    """Raises UStatusError: INVALID_ARGUMENT (no such file), FAILED_PRECONDITION (of a newer program, or not a log),
    UNAVAILABLE (I/O error; or the log grows so fast that its disk would become full)."""
    rows.LOG.require_there(path)
    report = VerifyReport(path)
    marked: Marked | str | None
    try:
        marked = read_mark(path)  # read first: what it names is committed by then
    except (OSError, BadMarkError) as error:
        marked = str(error)
    watch = _Watch(path)
    try:
        with contextlib.closing(disk.look(path)) as db:
            db.text_factory = any_text
            db.set_progress_handler(watch.look, STEPS_PER_LOOK)
            db.execute("BEGIN")  # a snapshot, whatever is appended meanwhile
            _Verifier(db, report, marked).run()
            watch.check()
    except (sqlite3.DatabaseError, UnicodeDecodeError) as error:  # the latter where SQLite quotes what is damaged
        watch.check()
        if isinstance(error, sqlite3.OperationalError):
            raise rows.LOG.fault(error, path, "read") from error
        report.note(kinds.STRUCTURE, f"nothing of it can be read: {error}")
    return report


class _Watch:
    """Watches the write-ahead log of a file that is read."""

    def __init__(self, path: Path) -> None:
        self._path, self._is_over = path, False

    def look(self) -> bool:
        """Called by SQLite. Returns True, which ends the statement, if the disk has no space to empty the write-ahead
        log."""
        with contextlib.suppress(OSError):
            wal_bytes = Path(f"{self._path}-wal").stat().st_size
            self._is_over = self._is_over or (wal_bytes > WAL_IGNORED_BYTES and wal_bytes > free_bytes(self._path))
        return self._is_over

    def check(self) -> None:
        """Raises UNAVAILABLE if a statement was ended: then the findings are wrong."""
        if self._is_over:
            why = f"the log {self._path} grows so fast that it would fill its disk while it is read"
            raise UStatusError(UCode.UNAVAILABLE, f"{why}: try again when less comes")


class _Verifier:
    def __init__(self, db: sqlite3.Connection, report: VerifyReport, marked: Marked | str | None) -> None:
        self._db, self._report, self._marked, self._note = db, report, marked, report.note
        self._addresses: dict[int, tuple[Any, Any]] = {}
        self._newest: dict[int, int] = {}  # of each stream, as far as it was read
        self._named = 0  # pairs of stream and chunk in the index

    def run(self) -> None:
        self._pages()
        found = {table: self._read(table) for table in rows.CHECKED}
        self._meta = dict[str, Any](found[rows.META])
        self._report.incarnation = bytes(self._meta.get("incarnation", b""))
        self._ledger = Ledger(found[rows.DAMAGE])
        self._report.reported = self._ledger.open
        holes = [(after, before) for after, before in found[rows.HOLE]]
        self._known = holes + self._ledger.lost(self._report.incarnation)  # lost records
        for id, source, sink, *_ in found[rows.STREAM]:
            self._addresses[id] = _address(UUri.FromString(source), None if sink is None else UUri.FromString(sink))
        self._floor = int(self._meta.get("floor_seq", 0))
        self._spans = [Span(*row) for row in found[rows.SPAN]]
        self._chunks()
        self._index()
        newest = int(self._meta.get("newest_seq", 0))
        self._ends(max(self._report.newest_seq, newest, *(before - 1 for _, before in holes)), found[rows.CURSOR])

    def _note_records(self, after: int, before: int, detail: str) -> None:
        """Note lost records, unless a person has acknowledged them."""
        if not self._ledger.covers(Damage(0, kinds.RECORDS, after, before, self._report.incarnation)):
            self._note(kinds.RECORDS, detail, after, before)

    # -- structure and rows

    def _pages(self) -> None:
        db, path = self._db, self._report.path
        version = rows.LOG.version_of(db, path)
        if version is None:
            raise rows.LOG.refusal(path, "nothing is in it")
        self._report.version = version
        if pragma(db, "application_id") != rows.APPLICATION_ID:
            self._note(kinds.STRUCTURE, "the file's header does not say that it is a log")
        try:
            for (line,) in db.execute(f"PRAGMA integrity_check({FINDINGS_MAX})"):
                if line != "ok":
                    self._note(kinds.STRUCTURE, str(line))
        except sqlite3.OperationalError:
            raise
        except sqlite3.DatabaseError as error:  # the check itself has failed; the following steps may work
            self._note(kinds.STRUCTURE, str(error))

    def _read(self, table: rows.Table) -> list[rows.StoredRow]:
        bad: list[rows.StoredRow] = []
        try:
            found = list(table.read(self._db, bad))
        except (sqlite3.DatabaseError, ValueError) as error:
            self._note(table.name, f"the table {table.name} can't be read: {error}")
            return []
        for row in bad:
            self._note(table.name, f"{table.columns[0]} {row[0]!r}: the checksum is wrong")
        return found

    # -- chunks

    def _chunks(self) -> None:
        report, floor = self._report, self._floor
        expected = 0
        for first_seq, columns, why in walk(self._db):
            if expected and first_seq > expected:
                self._jump(expected - 1, first_seq)
            elif not expected and first_seq > floor + 1:
                self._jump(floor, first_seq)
            if columns is None:
                following = next_first_seq(self._db, first_seq)
                self._note_records(first_seq - 1, following or first_seq + 1, why)
                expected = following or 0
                continue
            chunk = decode(columns)
            report.records += len(chunk)
            report.oldest_seq = report.oldest_seq or chunk.first_seq
            report.newest_seq = expected = chunk.last_seq
            expected += 1
            self._check_index_of(columns)
            self._check_span_of(columns)
            self._check_content(chunk, columns)
        newest = int(self._meta.get("newest_seq", 0))
        if report.newest_seq < newest and expected and newest > floor:
            self._jump(expected - 1, newest + 1)

    def _jump(self, after: int, before: int) -> None:
        """Note missing records that are not in a known hole."""
        if not any(low <= after and before <= high for low, high in self._known):
            self._note_records(after, before, "they aren't there")

    def _check_content(self, chunk: Chunk, columns: Columns) -> None:
        """Check what the checksum can't prove: that the chunk was right when it was written."""
        messages = chunk.messages
        if (
            b"".join(map(message_id, messages)) != columns.ids
            or frozenset(unpack_streams(columns.streams)) != chunk.stream_set
        ):
            self._note_records(chunk.first_seq - 1, chunk.last_seq + 1, "its columns contradict each other")
        for seq, prev_seq, id, message in zip(chunk.seqs, chunk.prev_seqs, chunk.streams, messages, strict=True):
            known = self._newest.get(id)
            if known is not None and prev_seq != known and not self._is_lost(prev_seq):
                what = f"record {seq} follows {prev_seq}, and {known} was the one before it"
                self._note(kinds.STREAM_ROW, f"stream {id}: {what}")
            self._newest[id] = seq
            attributes = message.stamp.attributes if type(message) is EncodedMessage else message.attributes
            address = _address(attributes.source, attributes.sink if attributes.HasField("sink") else None)
            if self._addresses.get(id) != address:
                what = f"record {seq} was sent from or to another address than the stream names"
                self._note(kinds.STREAM_ROW, f"stream {id}: {what}")
                self._addresses[id] = address

    def _is_lost(self, seq: int) -> bool:
        found = [(damage.after, damage.before) for damage in self._report.found if damage.kind == kinds.RECORDS]
        return any(after < seq < before for after, before in found + self._known)

    # -- indexes, cursors, mark

    def _index(self) -> None:
        """Note superfluous rows of the index; missing ones were noted with each chunk."""
        try:
            (count,) = self._db.execute("SELECT count(*) FROM chunk_stream").fetchone()
            if count == self._named:
                return
            # below the floor the index may name deleted chunks
            query = "SELECT stream, first_seq FROM chunk_stream WHERE first_seq > ?"
            for id, first_seq in self._db.execute(query, (self._floor,)):
                what = f"stream {id}: the index names records from {first_seq} on"
                if self._db.execute("SELECT 1 FROM chunk WHERE first_seq = ?", (first_seq,)).fetchone() is None:
                    self._note(kinds.INDEX, f"{what}, and there are none")
                    continue
                with contextlib.suppress(CorruptChunkError):
                    if id not in chunk_at(self._db, first_seq)[1].stream_set:
                        self._note(kinds.INDEX, f"{what}, which are not its own")
        except sqlite3.DatabaseError as error:
            self._note(kinds.INDEX, f"the index of streams can't be read: {error}")

    def _check_index_of(self, columns: Columns) -> None:
        """Check that the index names this chunk for each of its streams."""
        with contextlib.suppress(sqlite3.DatabaseError):
            for id in unpack_streams(columns.streams):
                query = "SELECT 1 FROM chunk_stream WHERE stream = ? AND first_seq = ?"
                if self._db.execute(query, (id, columns.first_seq)).fetchone() is not None:
                    self._named += 1
                elif columns.first_seq <= int(self._meta.get("indexed_seq", 0)):
                    what = f"the records from {columns.first_seq} on are not in the index"
                    self._note(kinds.INDEX, f"stream {id}: {what}")

    def _check_span_of(self, columns: Columns) -> None:
        """Check that the append time of this chunk is within its span."""
        if columns.first_seq > int(self._meta.get("indexed_seq", 0)):
            return
        index = bisect_right(self._spans, columns.first_seq, key=lambda span: span.first_seq) - 1
        span = self._spans[index] if index >= 0 else Span(0, 0, 0, 0)
        if columns.first_seq > span.last_seq or not span.earliest_ms <= columns.time_ms <= span.latest_ms:
            self._note(kinds.INDEX, f"the append time of the records from {columns.first_seq} on is not in its span")

    def _ends(self, newest: int, cursors: list[rows.StoredRow]) -> None:
        for name, seq, *_ in cursors:
            if seq > newest:
                self._note(kinds.CURSOR_ROW, f"{name} is beyond the newest record: {seq}")
        for key in rows.META_KEYS:
            if key not in self._meta:
                self._note(rows.META.name, f"{key} is missing")
        marked = self._marked
        if isinstance(marked, str):
            self._note(kinds.MARK, marked)
        elif marked is None:
            if newest:
                self._note(kinds.MARK, "no mark exists")
        elif marked.incarnation != self._report.incarnation:
            self._note(kinds.MARK, "it is of another log")
        elif marked.seq > newest:
            self._note(kinds.COMMITS, "committed, as the mark says, and not there", newest, marked.seq + 1)


def _address(source: UUri, sink: UUri | None) -> tuple[Any, Any]:
    return uris.key(source), None if sink is None else uris.key(sink)
