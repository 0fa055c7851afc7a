"""All disk access: SQLite files, their locks and marks, and small files that are replaced completely.

connect(path) -> sqlite3.Connection     lock(path) -> Lock     mark(path) -> Mark     replace_text(path, text)

The mark names the last committed seq, and is overwritten after each commit: SQLite truncates a damaged write-ahead log
to its last whole commit without an error, and a missing file has no error either.
"""

from __future__ import annotations

import contextlib
import copy
import fcntl
import os
import sqlite3
import struct
import zlib
from pathlib import Path
from typing import IO, Final, NamedTuple, Self

from storage import faults
from storage.faults import NO_RESERVE, Reserve, with_room

BUSY_TIMEOUT_S: Final = 5.0  # a file that this process owns is still shared with its readers, and with a backup
STATEMENTS_CACHED: Final = 256

_MAGIC: Final = b"upm1"
_MARK: Final = struct.Struct("<4s16sQ")  # magic, incarnation, newest seq; followed by their checksum
_CRC: Final = struct.Struct("<I")


class InUseError(Exception):
    """Another process holds the lock; the argument is its process id, if known."""


class Lock:
    """A lock of one process. It is a flock, so it ends with the process in any case."""

    def __init__(self, path: Path) -> None:
        self._file: IO[str] | None = path.open("a+")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.seek(0)
            owner = self._file.read().strip() or "unknown"
            self.release()
            raise InUseError(owner) from None
        except BaseException:
            self.release()
            raise
        # a full disk must not prevent reading; the process id is only for the message
        with contextlib.suppress(OSError):
            self._file.truncate(0)
            self._file.write(f"{os.getpid()}\n")
            self._file.flush()

    def release(self) -> None:
        """May be called twice."""
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()
            self._file = None


class Marked(NamedTuple):
    """The content of a mark."""

    incarnation: bytes
    seq: int


class BadMarkError(Exception):
    """The mark is damaged."""


def pack_mark(incarnation: bytes, seq: int) -> bytes:
    body = _MARK.pack(_MAGIC, incarnation, seq)
    return body + _CRC.pack(zlib.crc32(body))


def read_mark(path: Path) -> Marked | None:
    """Returns the mark beside the file `path`, or None if it does not exist. Raises OSError, BadMarkError."""
    try:
        return unpack_mark(Path(f"{path}.mark").read_bytes())
    except FileNotFoundError:
        return None


def unpack_mark(data: bytes) -> Marked | None:
    """Returns None if no mark was ever written. Raises BadMarkError."""
    if not any(data):  # the file was created, and then the disk was full
        return None
    if len(data) != _MARK.size + _CRC.size or not data.startswith(_MAGIC):
        raise BadMarkError("it is not a mark")
    if _CRC.pack(zlib.crc32(data[: _MARK.size])) != data[_MARK.size :]:
        raise BadMarkError("its checksum is wrong")
    return Marked(*_MARK.unpack_from(data)[1:])


class Mark:
    """A few bytes that are overwritten in place, without waiting for the disk. All methods raise OSError."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)

    def write(self, data: bytes) -> None:
        os.pwrite(self._file, data, 0)

    def begin(self, data: bytes) -> None:
        """Replace the content by `data`. It is on disk when this returns."""
        os.ftruncate(self._file, len(data))
        os.pwrite(self._file, data, 0)
        os.fsync(self._file)

    def close(self) -> None:
        os.close(self._file)


class Disk:
    """The real disk. All methods block and raise OSError; `connect` and its connections raise sqlite3.Error."""

    reserve: Reserve = NO_RESERVE
    """The space that stores on this disk may release when it is full."""

    def with_reserve(self, reserve: Reserve) -> Self:
        """Returns the same disk with another reserve."""
        found = copy.copy(self)
        found.reserve = reserve
        return found

    def free_bytes(self, path: Path) -> int:
        """Returns the free bytes on the disk of the file `path`."""
        return faults.free_bytes(path)

    def connect(self, path: Path, *, read_only: bool = False) -> sqlite3.Connection:
        """Returns a connection in autocommit mode that may be used from any thread. `read_only`: nothing is written,
        and the write-ahead log stays unchanged."""
        return sqlite3.connect(
            f"{path.absolute().as_uri()}?mode={'ro' if read_only else 'rwc'}",
            uri=True,
            isolation_level=None,
            check_same_thread=False,
            timeout=BUSY_TIMEOUT_S,
            cached_statements=STATEMENTS_CACHED,
        )

    def lock(self, path: Path) -> Lock:
        """Returns a lock that ends when it is released, or with the process. Raises InUseError."""
        return Lock(path)

    def mark(self, path: Path) -> Mark:
        """Returns the mark, which is created if it does not exist."""
        return Mark(path)

    def replace_text(self, path: Path, text: str) -> None:
        """Replace the file. After a crash it holds the old text or the new one; after this returns, the new one."""
        with_room(self.reserve, path, lambda: self._replace_text(path, text))

    def _replace_text(self, path: Path, text: str) -> None:
        fresh = path.with_name(path.name + ".new")
        try:
            with fresh.open("w") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            fresh.replace(path)
        except OSError:
            with contextlib.suppress(OSError):  # on a full disk it would occupy space
                fresh.unlink()
            raise
        self.sync_folder(path.parent)

    def sync_folder(self, path: Path) -> None:
        """Make everything durable that was created, renamed or removed in this folder."""
        self.sync(path)

    def sync(self, path: Path) -> None:
        """Make the content of this file or folder durable."""
        file = os.open(path, os.O_RDONLY)
        try:
            os.fsync(file)
        finally:
            os.close(file)


REAL_DISK: Final = Disk()
