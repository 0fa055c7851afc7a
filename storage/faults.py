"""Errors of files, and the disk space that is reserved for the case that the disk becomes full.

sqlite3.Error, OSError, DamagedError -> is_damage? -> move_aside, create a new file    is_full? -> keep, try again
                                        is_denied? -> a person has to act              neither -> try again

Reserve: a file whose blocks are allocated. On a full disk no row could be deleted without it, because deleting a row
first needs space in the write-ahead log.

allocated           full: Disk.retry_with_reserve(path, work) -> work fails -> give_up: truncated -> work again
  ^                                                                      |
  '-- there is space again: the part that deletes old data calls `restore` <-'
"""

from __future__ import annotations

import contextlib
import errno
import os
import sqlite3
import threading
import time
from pathlib import Path
from typing import Final

import structlog

# A disk with fewer free bytes counts as full: SQLite reports other errors if it can't create its small files.
FULL_BYTES: Final = 1 << 20
_FULL_ERRNOS: Final = (errno.ENOSPC, errno.EDQUOT)

DEFAULT_BYTES_MAX: Final = 32 << 20  # more than the write-ahead log of the history has, so that it can be emptied
DEFAULT_SHARE: Final = 8  # of a small disk, one part in so many
SHARE_MIN: Final = 4  # at most one part in so many, whatever is configured
MARGIN_SHARE: Final = 16  # of a tiny disk
# of file systems that can't allocate blocks ahead
_CANNOT_ALLOCATE: Final = (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS)
_WRITTEN_AT_ONCE: Final = 1 << 20

log = structlog.get_logger()


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


def file_bytes(path: Path) -> int:
    """Returns the size of the file; 0 if there is no file."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


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


# -- the reserve


class Reserve:
    """The reserve of one folder, for all files in it. Any thread may call it; every call blocks."""

    def __init__(self, path: Path, bytes: int) -> None:
        """The file `path` with that size; 0: no reserve, and `restore` deletes an existing file."""
        self.path, self.bytes = path, bytes
        self._lock = threading.Lock()
        self._is_loss_logged = False  # a line of the log says that it was given up
        self._trouble = ""  # why it could not be allocated; the last reason that was logged
        self._counts_blocks = True  # the file system reports how many blocks a file has

    @property
    def held(self) -> int:
        """The bytes that are allocated now."""
        if not self.bytes:
            return 0
        return min(disk_bytes(self.path) if self._counts_blocks else file_bytes(self.path), self.bytes)

    @property
    def is_whole(self) -> bool:
        return self.held >= self.bytes

    def give_up(self) -> bool:
        """Release the reserve. Returns False if nothing was allocated."""
        with self._lock:
            if not self.held:
                return False
            try:
                os.truncate(self.path, 0)
            except OSError as error:
                log.error("the reserve can't be given up", path=str(self.path), error=str(error))
                return False
            if not self._is_loss_logged:
                self._is_loss_logged = True
                log.warning("the disk is full: its reserve was given up", path=str(self.path), bytes=self.bytes)
            return True

    def make_room(self, path: Path) -> bool:
        """Release the reserve for the file `path`, whose disk was full just now. Returns False if there is still no
        space."""
        if self.give_up():
            return True
        with contextlib.suppress(OSError):  # another thread may have released it meanwhile
            return self.bytes > 0 and free_bytes(path) >= margin_bytes(path)
        return False

    def restore(self, free: int) -> bool:
        """Allocate it again if the `free` bytes of its disk are enough. Returns True if it is complete."""
        if not self.bytes:
            if self.path.is_file():
                self.path.unlink(missing_ok=True)
            return True
        if self.is_whole and file_bytes(self.path) == self.bytes:
            return True
        with self._lock:
            if not self.is_whole and free < self.bytes - self.held + margin_bytes(self.path):
                return False
            try:
                self._make()
            except OSError as error:
                with contextlib.suppress(OSError):  # a part of it has no use
                    os.truncate(self.path, 0)
                if not is_full(error, self.path) and str(error) != self._trouble:
                    self._trouble = str(error)
                    log.warning("the reserve can't be made", path=str(self.path), error=self._trouble)
                return False
            if self._is_loss_logged:
                self._is_loss_logged = False
                log.info("the reserve of the disk is there again", path=str(self.path), bytes=self.bytes)
            return True

    def _make(self) -> None:
        file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(file, min(os.fstat(file).st_size, self.bytes))
            if not _allocate(file, self.bytes):
                _write(file, self.bytes)
            os.fsync(file)
            if disk_bytes(self.path) < self.bytes:  # the file system has compressed the allocated zeros
                _write(file, self.bytes)
                os.fsync(file)
            self._counts_blocks = disk_bytes(self.path) >= self.bytes
        finally:
            os.close(file)


NO_RESERVE: Final = Reserve(Path(), 0)


def _allocate(file: int, bytes: int) -> bool:
    """Returns False if the system or the file system does not support it. Raises OSError."""
    allocate = getattr(os, "posix_fallocate", None)  # not on macOS
    if allocate is None:
        return False
    try:
        allocate(file, 0, bytes)
    except OSError as error:
        if error.errno not in _CANNOT_ALLOCATE:
            raise
        return False
    return True


def _write(file: int, bytes: int) -> None:
    """Write random bytes: a file system that compresses allocates no blocks for zeros."""
    for offset in range(0, bytes, _WRITTEN_AT_ONCE):
        data = os.urandom(min(_WRITTEN_AT_ONCE, bytes - offset))
        while data:
            data = data[os.pwrite(file, data, offset) :]
            offset += len(data)


def reserve_of(path: Path, bytes: int | None) -> Reserve:
    """Returns a reserve in the file `path`, whose folder need not exist yet: of `bytes`, limited by the size of the
    disk; None: of a size that suits the disk. Raises OSError."""
    whole = _whole_bytes(path)
    if bytes is None:
        return Reserve(path, min(DEFAULT_BYTES_MAX, whole // DEFAULT_SHARE))
    return Reserve(path, min(bytes, whole // SHARE_MIN))


def margin_bytes(path: Path) -> int:
    """Returns how many bytes stay free besides the reserve, for small files of other programs on the disk of the file
    `path`. Raises OSError."""
    return min(FULL_BYTES, _whole_bytes(path) // MARGIN_SHARE)


def _whole_bytes(path: Path) -> int:
    stat = os.statvfs(existing_folder(path))
    return stat.f_blocks * stat.f_frsize


def existing_folder(path: Path) -> Path:
    """Returns the nearest existing folder above the file `path`."""
    return next(one for one in path.absolute().parents if one.exists())
