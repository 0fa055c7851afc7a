"""Room on a disk that is kept for the day on which the disk is full: a file whose blocks are allocated.

make: allocated     full: with_room(reserve, path, work) -> work fails -> give_up: truncated -> work again
  ^                                                                          |
  '-- room again: whoever deletes old data sees it, and calls `restore` <----'

Without it nothing could be deleted on a full disk: to delete a row takes room in the write-ahead log first.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sqlite3
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Final, TypeVar

import structlog

from storage.faults import FULL_BYTES, disk_bytes, free_bytes, is_full
from uprotocol.status import UStatusError
from uprotocol.v1.ucode_pb2 import UCode

T = TypeVar("T")

DEFAULT_BYTES_MAX: Final = 32 << 20  # more than the write-ahead log of the history has, so that it can be emptied
DEFAULT_SHARE: Final = 8  # on a small disk one part in so many
SHARE_MIN: Final = 4  # whatever is asked for, not more than one part in so many
MARGIN_SHARE: Final = 16  # of a tiny disk
# of file systems that can't allocate blocks ahead
_CANNOT_ALLOCATE: Final = (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS)
_WRITTEN_AT_ONCE: Final = 1 << 20

log = structlog.get_logger()


class Reserve:
    """Of one folder, shared by all that have their files there. Any thread may call it; every call blocks."""

    def __init__(self, path: Path, bytes: int) -> None:
        """The file `path` of that size; 0: none, and one that is there is removed by `restore`."""
        self.path, self.bytes = path, bytes
        self._lock = threading.Lock()
        self._is_loss_logged = False  # the log says that it was given up
        self._trouble = ""  # why it could not be made, as it was logged last
        self._counts_blocks = True  # the file system says how many blocks a file has

    def __repr__(self) -> str:
        return f"Reserve({self.path}, {self.held} of {self.bytes} bytes)"

    @property
    def held(self) -> int:
        """Bytes of it that are allocated now."""
        if not self.bytes:
            return 0
        return min(disk_bytes(self.path) if self._counts_blocks else _size(self.path), self.bytes)

    @property
    def is_whole(self) -> bool:
        return self.held >= self.bytes

    def give_up(self) -> bool:
        """Let others have its room. False if there was none."""
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
        """For the file `path`, whose disk was full a moment ago. False if there is none."""
        if self.give_up():
            return True
        with contextlib.suppress(OSError):  # somebody else may have given it up meanwhile
            return self.bytes > 0 and free_bytes(path) >= margin_bytes(path)
        return False

    def restore(self, free: int) -> bool:
        """Make it again if that leaves something of the `free` bytes of its disk. True if it is whole."""
        if self._is_made():
            return True
        with self._lock:
            if not self.is_whole and free < self.bytes - self.held + margin_bytes(self.path):
                return False
            try:
                self._make()
            except OSError as error:
                with contextlib.suppress(OSError):  # half of it helps nobody
                    os.truncate(self.path, 0)
                if not is_full(error, self.path) and str(error) != self._trouble:
                    self._trouble = str(error)
                    log.warning("the reserve can't be made", path=str(self.path), error=self._trouble)
                return False
            if self._is_loss_logged:
                self._is_loss_logged = False
                log.info("the reserve of the disk is there again", path=str(self.path), bytes=self.bytes)
            return True

    def _is_made(self) -> bool:
        if not self.bytes:
            return not self.path.exists()
        return self.is_whole and _size(self.path) == self.bytes

    def _make(self) -> None:
        if not self.bytes:
            self.path.unlink(missing_ok=True)
            return
        file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(file, min(os.fstat(file).st_size, self.bytes))
            if not _allocate(file, self.bytes):
                _write(file, self.bytes)
            os.fsync(file)
            if disk_bytes(self.path) < self.bytes:  # what was allocated were zeros, which it has compressed
                _write(file, self.bytes)
                os.fsync(file)
            self._counts_blocks = disk_bytes(self.path) >= self.bytes
        finally:
            os.close(file)


class _NoReserve(Reserve):
    """Of a disk on which nobody keeps one."""

    def __init__(self) -> None:
        super().__init__(Path(), 0)

    def restore(self, free: int) -> bool:
        return True


NO_RESERVE: Final[Reserve] = _NoReserve()


def _allocate(file: int, bytes: int) -> bool:
    """False if the system or the file system can't. Raises OSError."""
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


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _write(file: int, bytes: int) -> None:
    """Bytes of chance: zeros are no blocks where the file system compresses."""
    for place in range(0, bytes, _WRITTEN_AT_ONCE):
        data = os.urandom(min(_WRITTEN_AT_ONCE, bytes - place))
        while data:
            data = data[os.pwrite(file, data, place) :]
            place += len(data)


def reserve_of(path: Path, bytes: int | None) -> Reserve:
    """In the file `path`, whose folder need not be there yet; of `bytes`, as far as its disk has so much, or as great
    as fits that disk (None). Raises OSError."""
    whole = _whole_bytes(path)
    if bytes is None:
        return Reserve(path, min(DEFAULT_BYTES_MAX, whole // DEFAULT_SHARE))
    return Reserve(path, min(bytes, whole // SHARE_MIN))


def margin_bytes(path: Path) -> int:
    """What is left free beside the reserve, for the small files of others on the disk of the file `path`. Raises
    OSError."""
    return min(FULL_BYTES, _whole_bytes(path) // MARGIN_SHARE)


def _whole_bytes(path: Path) -> int:
    """Of the disk of the file `path`."""
    stat = os.statvfs(existing_folder(path))
    return stat.f_blocks * stat.f_frsize


def existing_folder(path: Path) -> Path:
    """In which the file `path` is, or would be once the folders between are made."""
    return next(one for one in path.absolute().parents if one.exists())


def with_room(reserve: Reserve, path: Path, work: Callable[[], T]) -> T:
    """`work`, which uses the file `path`; once more if its disk was full, and the reserve could be given up. Raises
    what the last try raises."""
    try:
        return work()
    except (sqlite3.Error, OSError, UStatusError) as error:
        is_short = error.code == UCode.RESOURCE_EXHAUSTED if isinstance(error, UStatusError) else is_full(error, path)
        if not is_short or not reserve.make_room(path):
            raise
    return work()
