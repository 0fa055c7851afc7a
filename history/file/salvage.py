"""Saves the chunks and rows of a damaged file whose checksums are right into a new file. The rest is reported as lost.

damaged file -> copy -> page 1 from the head -> walk, read rows -> NAME.salvaged -> replaces the damaged file
                          ^
    head: a small file with a copy of page 1, which describes the tables: without it no table can be found
"""

from __future__ import annotations

import contextlib
import shutil
import sqlite3
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from history.file import rows
from history.file.damage import Damage, Ledger
from history.file.load import CURSORS_LOST, FOLLOWED_PREFIX, FORGOTTEN_PREFIX, NEXT_STREAM, NOT_KNOWN, OTHERS
from history.file.reader import walk
from storage.disk import Disk, Marked
from storage.faults import remove
from storage.file import SqliteFile, any_text

_CRC: Final = struct.Struct("<I")
_HEADER_BYTES: Final = 100  # of SQLite's file header, whose counters change; the description of the tables follows


# -- the head


def head_path(path: Path) -> Path:
    return Path(f"{path}.head")


def keep_head(path: Path) -> None:
    """Call this only if the file is known to be whole, its write-ahead log is empty, and this process has no connection
    to it. Raises OSError."""
    with path.open("rb") as file:
        header = file.read(_HEADER_BYTES)
        page = header + file.read(_page_bytes(header) - _HEADER_BYTES)
    kept = _read_head(path)
    if kept is None or kept[_HEADER_BYTES:] != page[_HEADER_BYTES:]:
        head_path(path).write_bytes(page + _CRC.pack(zlib.crc32(page)))


def _read_head(path: Path) -> bytes | None:
    with contextlib.suppress(OSError):
        data = head_path(path).read_bytes()
        page = data[:-4]
        if len(page) == _page_bytes(page) > _HEADER_BYTES and _CRC.unpack(data[-4:])[0] == zlib.crc32(page):
            return page
    return None


def _page_bytes(header: bytes) -> int:
    """Returns the page size that the header names."""
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
    read = {table.name: _read(old, table) for table in rows.CHECKED}
    meta = dict[str, Any](read[rows.META.name].rows)
    incarnation = meta.get("incarnation", marked.incarnation if marked is not None else None)
    if marked is None or marked.incarnation != incarnation:
        incarnation = random_bytes(16)  # the highest seq is unknown, and no seq may name two records
    ledger = Ledger(read[rows.DAMAGE.name].rows)
    ledger.add(damage)
    rows.create(db, {}, ledger.rows)
    first_seq = _copy_chunks(old, db)
    if not first_seq and not read[rows.CURSOR.name].rows:
        raise _NothingError
    kept = dict.fromkeys(rows.META_KEYS, 0) | {
        "incarnation": incarnation,
        "indexed_seq": NOT_KNOWN,  # everything else is rebuilt from the chunks
        "floor_seq": meta.get("floor_seq", max(0, first_seq - 1)),
        CURSORS_LOST: 1,  # it is unknown how many rows a damaged page had
    }
    prefixes = (FORGOTTEN_PREFIX, FOLLOWED_PREFIX)
    kept |= {key: value for key, value in meta.items() if key == NEXT_STREAM or key.startswith(prefixes)}
    is_meta_whole = not read[rows.META.name].bad and meta.keys() >= set(rows.META_KEYS)
    if not is_meta_whole and kept["floor_seq"]:  # rows about forgotten streams may be missing
        kept[FORGOTTEN_PREFIX + OTHERS] = kept["floor_seq"]
    rows.META.insert(db, kept.items())
    for table in rows.CHECKED:
        if table not in (rows.META, rows.DAMAGE, rows.SPAN):
            table.insert(db, read[table.name].rows)


def _copy_chunks(old: sqlite3.Connection, db: sqlite3.Connection) -> int:
    """Returns the first seq; 0 if there was no chunk."""
    first = 0
    for first_seq, c, _ in walk(old):
        if c is not None:
            values = (c.first_seq, c.records, c.time_ms, c.bytes, c.crc, c.streams, c.ids, c.data)
            db.execute("INSERT OR IGNORE INTO chunk VALUES (?, ?, ?, ?, ?, ?, ?, ?)", values)
            first = first or first_seq
    return first


def _read(db: sqlite3.Connection, table: rows.Table) -> rows.Checked:
    """Returns the rows whose checksum is right, and one bad row if the table can't be read."""
    try:
        return table.read(db)
    except (sqlite3.DatabaseError, TypeError, ValueError):
        return rows.Checked(bad=[()])
