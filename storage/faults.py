"""Kinds of file errors: full disk, damage, missing permission, or temporary. Moves damaged files aside.

sqlite3.Error, OSError, DamagedError -> is_damage? -> move_aside, create a new file    is_full? -> keep, try again
                                        is_denied? -> a person has to act              neither -> try again
"""

from __future__ import annotations

import contextlib
import errno
import os
import sqlite3
import time
from pathlib import Path
from typing import Final

# A disk with fewer free bytes counts as full: SQLite reports other errors if it can't create its small files.
FULL_BYTES: Final = 1 << 20
_FULL_ERRNOS: Final = (errno.ENOSPC, errno.EDQUOT)


class DamagedError(Exception):
    """The bytes of a file are not those that were written, but SQLite reported no error. The argument says why."""


def primary_code(error: sqlite3.Error) -> int:
    """Returns SQLite's result code without the bits of the extended code."""
    return getattr(error, "sqlite_errorcode", 0) & 0xFF


def is_damage(error: BaseException) -> bool:
    """Returns True if the bytes of an SQLite file are not those that were written."""
    if not isinstance(error, sqlite3.Error):
        return isinstance(error, DamagedError)
    is_text = "Could not decode" in str(error)  # Python's module reports text that is not UTF-8
    return is_text or primary_code(error) in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)


def is_full(error: BaseException, path: Path) -> bool:
    """Returns True if the disk of the file `path` has caused `error` because it is full."""
    if isinstance(error, OSError):
        return error.errno in _FULL_ERRNOS
    if not isinstance(error, sqlite3.Error):
        return False
    if primary_code(error) == sqlite3.SQLITE_FULL:
        return True
    with contextlib.suppress(OSError):
        return primary_code(error) in (sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN) and free_bytes(path) < FULL_BYTES
    return False


def is_denied(error: BaseException, path: Path) -> bool:
    """Returns True if this process may not write the file `path`, or create files beside it."""
    if isinstance(error, sqlite3.Error):
        codes = (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PERM)
        return primary_code(error) in codes and not os.access(path if path.exists() else path.parent, os.W_OK)
    return isinstance(error, PermissionError)


def free_bytes(path: Path) -> int:
    """Returns how many bytes this process may still use on the disk of the file `path`. Raises OSError."""
    stat = os.statvfs(path.parent)
    return stat.f_bavail * stat.f_frsize


def disk_bytes(path: Path) -> int:
    """Returns how many bytes the file occupies on its disk; 0 if there is no file."""
    try:
        return path.stat().st_blocks * 512
    except OSError:
        return 0


def remove(path: Path) -> None:
    """Delete a SQLite file, its journal and its write-ahead log, if they exist. Raises OSError."""
    for suffix in ("-journal", "-wal", "-shm", ""):
        Path(f"{path}{suffix}").unlink(missing_ok=True)


def move_aside(path: Path, target: Path | None = None) -> Path:
    """Rename a damaged SQLite file and its write-ahead log to `target`, by default NAME.damaged-TIME. Returns the new
    name. Raises OSError."""
    target = target or Path(f"{path}.damaged-{time.time_ns()}")
    for suffix in ("-wal", "-shm", ""):  # the file itself last: if this is interrupted, the next attempt finds it
        with contextlib.suppress(FileNotFoundError):
            Path(f"{path}{suffix}").rename(f"{target}{suffix}")
    return target
