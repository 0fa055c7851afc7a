"""Opens a log's file: creates, checks, migrates or salvages it.

take, look -> mark -> (make) -> check -> migrate -> load -> head, mark -> Opened
                                  |
                               damaged: copy -> page 1 from the head -> walk, read rows: everything whose checksum is
                               right -> NAME.salvaged -> replaces the damaged file, which is moved aside

head: a small file with a copy of page 1, which describes the tables: without it no table can be found
"""

from __future__ import annotations

import contextlib
import shutil
import sqlite3
import struct
import time
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import structlog
from google.protobuf.message import DecodeError

from history.file import damage as kinds
from history.file import rows
from history.file.damage import Damage, Ledger
from history.file.load import (
    CURSORS_LOST,
    FOLLOWED_PREFIX,
    FORGOTTEN_PREFIX,
    NEXT_STREAM,
    NOT_KNOWN,
    OTHER_AUTHORITIES,
    PREDECESSOR_PREFIX,
    Loaded,
    Loading,
)
from history.file.reader import walk
from history.file.retention import WAL_WAIT_MS, Sizes
from history.file.rows import DAMAGE, LOG
from storage.disk import (
    PRIVATE_FOLDER,
    BadMarkError,
    Disk,
    Marked,
    SqliteFile,
    any_text,
    empty_wal,
    private,
    read_mark,
)
from storage.faults import DamagedError, is_damage, move_aside, primary_code, remove
from storage.runtime import Runtime

HEADER_BYTES: Final = 100  # of an SQLite file, whose counters change; the description of the tables follows
# the versions of SQLite's format for writing and reading; with any other version a file is read-only
FILE_FORMATS: Final = (b"\1\1", b"\2\2")
_CRC: Final = struct.Struct("<I")

log = structlog.get_logger()


class Opening:
    """One attempt to open the file."""

    def __init__(self, path: Path, runtime: Runtime, now_ms: Callable[[], int], sizes: Sizes) -> None:
        self.path, self._runtime, self._now_ms = path, runtime, now_ms
        # secure_delete: many builds of SQLite overwrite deleted content with zeros by default
        pragmas = "cell_size_check = 1", "secure_delete = FAST", f"journal_size_limit = {sizes.wal}"
        self.file = SqliteFile(LOG, path, runtime.disk, pragmas)
        self.loaded = Loaded()

    def run(self) -> None:
        """Open the file. Raises UStatusError as FileKind.not_opened, ALREADY_EXISTS (in use),
        FAILED_PRECONDITION (newer, or not a log); then nothing was changed. Only a damaged file is moved aside."""
        try:
            self.path.parent.mkdir(PRIVATE_FOLDER, parents=True, exist_ok=True)
            self.file.take()
            salvaged = self.file.beside(".salvaged")
            if salvaged.exists() and not self.path.exists():  # the last start ended in between
                salvaged.rename(self.path)
            try:
                self._open([])
            except (DamagedError, DecodeError, TypeError, ValueError, sqlite3.DatabaseError) as error:
                # SQLite reports an SQL error if the descriptions of the tables in the file are damaged
                is_sql = isinstance(error, sqlite3.Error) and primary_code(error) == sqlite3.SQLITE_ERROR
                if isinstance(error, sqlite3.Error) and not (is_sql or is_damage(error)):
                    raise
                self._open(self._start_over(error))
        except BaseException as error:
            self.file.close()
            if isinstance(error, sqlite3.Error | OSError | DamagedError):
                raise LOG.not_opened(error, self.path) from error
            raise

    def _open(self, damage: Sequence[Damage]) -> None:
        """`damage`: what a new log has to remember of the previous one."""
        file = self.file
        is_new = not file.look()
        marked, mark_trouble = self._read_mark()
        if is_new:
            damage = damage or self._predecessor(marked)
            self._make(damage)
        self._check()
        db = file.connect()
        db.text_factory = any_text
        # version 0: a bit of the header has flipped, since every log has a version
        if file.update(file.version or LOG.version):
            log.info("the log was migrated to the current format", path=str(self.path), version=LOG.version)
        self.loaded = Loading(db, marked, mark_trouble, self._now_ms(), self._runtime.random_bytes).run()
        if is_new or damage:
            self.loaded.found = self.loaded.ledger.open
        if is_new and not damage:
            self.loaded.new_since_ms = self._now_ms()
        # the head helps after later damage; a full disk must not prevent reading
        with contextlib.suppress(OSError, sqlite3.Error):
            if empty_wal(db, WAL_WAIT_MS):
                # Closing a file releases all locks that this process has on it. The next program that reads the log
                # would then believe that it is the last one, and delete the write-ahead log that we write.
                file.reset()
                keep_head(self.path)
        file.begin_mark(self.loaded.incarnation, self.loaded.start_seq)

    # -- existing files

    def _read_mark(self) -> tuple[Marked | None, str]:
        """Returns the mark, or why it can't be used."""
        try:
            return read_mark(self.path), ""
        except (OSError, BadMarkError) as error:
            return None, f"the mark can't be used ({error})"

    def _predecessor(self, marked: Marked | None) -> list[Damage]:
        """Returns what is known of a previous log: by its mark, its write-ahead log, or a damaged file that was moved
        aside by a start that did not get any further."""
        if self.file.wal_bytes:
            move_aside(self.path)  # SQLite would delete it
        found = self.path.parent.glob(f"{self.path.name}.damaged-*")
        aside = max((str(path) for path in found if not path.name.endswith("-shm")), default="").removesuffix("-wal")
        if marked is not None and marked.seq:
            detail = "there was a log here, and its file is missing"
            return [Damage(self._now_ms(), kinds.MISSING, 0, marked.seq + 1, marked.incarnation, aside, detail)]
        detail = "a damaged log was moved aside earlier"
        return [Damage(self._now_ms(), kinds.FILE, moved_to=aside, detail=detail)] if aside else []

    def _make(self, damage: Sequence[Damage]) -> None:
        meta: dict[str, Any] = dict.fromkeys(rows.META_KEYS, 0) | {"incarnation": self._runtime.random_bytes(16)}
        ledger = Ledger()
        for one in damage:
            ledger.add(one)
        self.file.make(lambda db: rows.create(db, meta, ledger.rows))

    def _check(self) -> None:
        with self.path.open("rb") as file:
            header = file.read(HEADER_BYTES)
        if header and header[18:20] not in FILE_FORMATS:
            raise DamagedError("its header is damaged")
        if suspect_path(self.path).exists():
            raise DamagedError("it could not be written, because it is damaged")

    # -- damage

    def _start_over(self, reason: Exception) -> list[Damage]:
        """Save everything that can be read, and move the damaged file aside. Returns what the next log has to remember.
        Raises OSError and sqlite3.Error if the disk has no space for both: then the damaged file stays for the next
        attempt."""
        self.file.reset()
        marked, _ = self._read_mark()
        incarnation, seq = (b"", 0) if marked is None else marked
        aside = self.file.beside(f".damaged-{time.time_ns()}")

        def damage(before: int, detail: str) -> Damage:
            return Damage(self._now_ms(), kinds.FILE, 0, before, incarnation, str(aside), detail)

        salvaged = damage(0, f"{reason}; what could be read was saved")
        whole = salvage(self.path, marked, self._runtime.disk, self._runtime.random_bytes, salvaged)
        move_aside(self.path, aside)
        suspect_path(self.path).unlink(missing_ok=True)
        what = "the log is damaged, and was moved aside"
        log.error(what, moved_to=str(aside), saved=whole is not None, reason=str(reason))
        if whole is not None:
            whole.rename(self.path)
            return [salvaged]
        return [*self._open_damage_of(aside), damage(seq + 1 if seq else 0, str(reason))]

    def _open_damage_of(self, path: Path) -> list[Damage]:
        """Returns the damage in a damaged file that nobody has acknowledged, as far as it can be read."""
        try:
            with contextlib.closing(self._runtime.disk.connect(path, read_only=True)) as db:
                return Ledger(DAMAGE.read(db, [])).open
        except (sqlite3.Error, TypeError, ValueError):
            return []


def suspect_path(path: Path) -> Path:
    """Returns the path of a file that requests: rebuild the log at the next open."""
    return Path(f"{path}.suspect")


# -- the head


def head_path(path: Path) -> Path:
    return Path(f"{path}.head")


def keep_head(path: Path) -> None:
    """Call this only if the file is known to be whole, its write-ahead log is empty, and this process has no connection
    to it. Raises OSError."""
    with path.open("rb") as file:
        header = file.read(HEADER_BYTES)
        page = header + file.read(_page_bytes(header) - HEADER_BYTES)
    kept = _read_head(path)
    if kept is None or kept[HEADER_BYTES:] != page[HEADER_BYTES:]:
        with open(head_path(path), "wb", opener=private) as head:
            head.write(page + _CRC.pack(zlib.crc32(page)))


def _read_head(path: Path) -> bytes | None:
    with contextlib.suppress(OSError):
        data = head_path(path).read_bytes()
        page = data[:-4]
        if len(page) == _page_bytes(page) > HEADER_BYTES and _CRC.unpack(data[-4:])[0] == zlib.crc32(page):
            return page
    return None


def _page_bytes(header: bytes) -> int:
    return int.from_bytes(header[16:18], "big")  # 65,536 would not fit, and was never used


def _put_head(copy: Path, head: bytes) -> None:
    """Replace page 1: with counters for the size of the file, and an empty list of free pages."""
    page = bytearray(head)
    pages = copy.stat().st_size // len(page)
    page[24:40] = struct.pack(">IIII", 1, pages, 0, 0)  # change counter, pages, first free page, free pages
    page[92:96] = struct.pack(">I", 1)  # the change counter for which the number of pages holds
    with copy.open("r+b") as file:
        file.write(page)


# -- salvage


class _NothingError(Exception):
    """Nothing could be saved."""


def salvage(
    path: Path, marked: Marked | None, disk: Disk, random_bytes: Callable[[int], bytes], damage: Damage
) -> Path | None:
    """Create a whole new file beside the damaged one, with everything that could be saved. Returns its path, or None if
    nothing could be saved. The damaged file does not change.

    `damage` is what the new file has to remember. Raises OSError and sqlite3.Error if the disk is full or fails.
    """
    copy, whole = Path(f"{path}.copy"), Path(f"{path}.salvaged")
    remove(copy)
    try:
        for suffix in ("", "-wal"):
            if Path(f"{path}{suffix}").exists():
                shutil.copyfile(f"{path}{suffix}", f"{copy}{suffix}")
        found = _open_copy(copy, _read_head(path), disk)
        if found is None:
            return None
        with contextlib.closing(found):
            SqliteFile(rows.LOG, whole, disk).make(lambda db: _fill(found, db, marked, random_bytes, damage))
    except _NothingError:
        return None
    finally:
        remove(copy)
    return whole


def _open_copy(copy: Path, head: bytes | None, disk: Disk) -> sqlite3.Connection | None:
    """Open the copy as it is, or else with the head that was kept. Returns None if it has no readable tables."""
    for page in (None, head):
        if page is not None:
            _put_head(copy, page)
        try:
            db = disk.connect(copy)
            db.text_factory = any_text
        except sqlite3.DatabaseError:
            continue
        try:
            if rows.has_known_schema(db):
                return db
        except (sqlite3.DatabaseError, ValueError):  # ValueError: SQLite's own description is not text
            pass
        db.close()
    return None


def _fill(
    old: sqlite3.Connection,
    db: sqlite3.Connection,
    marked: Marked | None,
    random_bytes: Callable[[int], bytes],
    damage: Damage,
) -> None:
    """Copy everything whose checksum is right."""
    bad: list[rows.StoredRow] = []  # of META
    read = {table.name: _read(old, table, bad if table is rows.META else []) for table in rows.CHECKED}
    meta = dict[str, Any](read[rows.META.name])
    incarnation = meta.get("incarnation", marked.incarnation if marked is not None else None)
    if marked is None or marked.incarnation != incarnation:
        incarnation = random_bytes(16)  # the highest seq is unknown, and no seq may name two records
    ledger = Ledger(read[rows.DAMAGE.name])
    ledger.add(damage)
    rows.create(db, {}, ledger.rows)
    first_seq = _copy_chunks(old, db)
    if not first_seq and not read[rows.CURSOR.name]:
        raise _NothingError
    kept = dict.fromkeys(rows.META_KEYS, 0) | {
        "incarnation": incarnation,
        "indexed_seq": NOT_KNOWN,  # everything else is rebuilt from the chunks
        "floor_seq": meta.get("floor_seq", max(0, first_seq - 1)),
        CURSORS_LOST: 1,  # it is unknown how many rows a damaged page had
    }
    prefixes = (FORGOTTEN_PREFIX, FOLLOWED_PREFIX, PREDECESSOR_PREFIX)
    kept |= {key: value for key, value in meta.items() if key == NEXT_STREAM or key.startswith(prefixes)}
    is_meta_whole = not bad and meta.keys() >= set(rows.META_KEYS)
    if not is_meta_whole and kept["floor_seq"]:  # rows about forgotten streams may be missing
        kept[FORGOTTEN_PREFIX + OTHER_AUTHORITIES] = kept["floor_seq"]
    rows.META.insert(db, kept.items())
    for table in rows.CHECKED:
        if table not in (rows.META, rows.DAMAGE, rows.SPAN):
            table.insert(db, read[table.name])


def _copy_chunks(old: sqlite3.Connection, db: sqlite3.Connection) -> int:
    """Returns the first seq; 0 if there was no chunk."""
    first = 0
    for first_seq, columns, _ in walk(old):
        if columns is not None:
            db.execute("INSERT OR IGNORE INTO chunk VALUES (?, ?, ?, ?, ?, ?, ?, ?)", columns)
            first = first or first_seq
    return first


def _read(db: sqlite3.Connection, table: rows.Table, bad: list[rows.StoredRow]) -> list[rows.StoredRow]:
    """Returns the rows whose checksum is right; no row, and a bad one, if the table can't be read."""
    try:
        return list(table.read(db, bad))
    except (sqlite3.DatabaseError, TypeError, ValueError):
        bad.append(())
        return []
