"""What an error of a file means: no room, damage, not permitted, or something that may pass; and how a damaged file is
put aside.

sqlite3.Error, OSError, DamagedError -> is_damage? -> move_aside, begin anew     is_full? -> keep, try again
                                        is_denied? -> a person has to act       neither -> try again
"""

from __future__ import annotations

import contextlib
import errno
import os
import sqlite3
import time
from pathlib import Path
from typing import Final

# a disk with less free is full: SQLite names other reasons where it can't make its small files
FULL_BYTES: Final = 1 << 20
_FULL_ERRNOS: Final = (errno.ENOSPC, errno.EDQUOT)


class DamagedError(Exception):
    """The bytes of a file are not those that were written, though SQLite did not stumble; the argument says how."""


def primary_code(error: sqlite3.Error) -> int:
    """SQLite's result code, without what it adds to it."""
    return getattr(error, "sqlite_errorcode", 0) & 0xFF


def is_damage(error: BaseException) -> bool:
    """True if the bytes of an SQLite file are not those that were written."""
    if not isinstance(error, sqlite3.Error):
        return isinstance(error, DamagedError)
    is_text = "Could not decode" in str(error)  # of Python's module, where a text is no UTF-8 any more
    return is_text or primary_code(error) in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)


def is_full(error: BaseException, path: Path) -> bool:
    """True if `error` came of a disk without room for the file `path`, or for what belongs to it."""
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
    """True if we may not write the file `path`, or make files beside it."""
    if isinstance(error, sqlite3.Error):
        codes = (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PERM)
        return primary_code(error) in codes and not os.access(path if path.exists() else path.parent, os.W_OK)
    return isinstance(error, PermissionError)


def free_bytes(path: Path) -> int:
    """What is left to us on the disk of the file `path`. Raises OSError."""
    stat = os.statvfs(path.parent)
    return stat.f_bavail * stat.f_frsize


def disk_bytes(path: Path) -> int:
    """What the file really takes; 0 if there is none."""
    try:
        return path.stat().st_blocks * 512
    except OSError:
        return 0


def remove(path: Path) -> None:
    """A SQLite file and what belongs to it, as far as it is there. Raises OSError."""
    for suffix in ("-journal", "-wal", "-shm", ""):
        Path(f"{path}{suffix}").unlink(missing_ok=True)


def move_aside(path: Path, target: Path | None = None) -> Path:
    """A damaged SQLite file and what belongs to it, to `target` or NAME.damaged-TIME: nothing is deleted. Returns the
    new name.

    Raises OSError.
    """
    target = target or Path(f"{path}.damaged-{time.time_ns()}")
    for suffix in ("-wal", "-shm", ""):  # the file itself last: until then it is found where it was
        with contextlib.suppress(FileNotFoundError):
            Path(f"{path}{suffix}").rename(f"{target}{suffix}")
    return target
