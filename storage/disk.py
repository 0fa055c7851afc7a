"""Everything that is written to a disk or read from it passes here: SQLite files, their locks, marks, small files that
are replaced whole.

connect(path) -> sqlite3.Connection     lock(path) -> Lock     mark(path) -> Mark     replace_text(path, text)
                                                                                       read_json(path, shape)

The mark says up to where was committed, and is overwritten in place after each commit: SQLite cuts a damaged
write-ahead log to its last whole commit, in silence, and a file that is gone says nothing.
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
from typing import IO, Final, NamedTuple, Self, TypeVar

from pydantic import TypeAdapter, ValidationError

from storage import faults
from storage.reserve import NO_RESERVE, Reserve, with_room

T = TypeVar("T")

BUSY_TIMEOUT_S: Final = 5.0  # a file that we lock for ourselves is shared with our own readers, and with a backup
STATEMENTS_CACHED: Final = 256

_MAGIC: Final = b"upm1"
_MARK: Final = struct.Struct("<4s16sQ")  # magic, incarnation, newest seq; then the checksum of those
_CRC: Final = struct.Struct("<I")


class InUseError(Exception):
    """Another process holds the lock; the argument says which, as far as it is known."""


class Lock:
    """Of one process. flock: it ends with the process, however that ends."""

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
        # a full disk must not keep us from reading; the number is for the message only
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
    """What a mark says."""

    incarnation: bytes
    seq: int


class BadMarkError(Exception):
    """The bytes of the mark are not those that were written."""


def pack_mark(incarnation: bytes, seq: int) -> bytes:
    body = _MARK.pack(_MAGIC, incarnation, seq)
    return body + _CRC.pack(zlib.crc32(body))


def read_mark(path: Path) -> Marked | None:
    """The mark beside the file `path`; None if there is none. Raises OSError, BadMarkError."""
    try:
        return unpack_mark(Path(f"{path}.mark").read_bytes())
    except FileNotFoundError:
        return None


def unpack_mark(data: bytes) -> Marked | None:
    """None if nothing was ever written. Raises BadMarkError."""
    if not any(data):  # a file that was made, and then its disk was full
        return None
    if len(data) != _MARK.size + _CRC.size or not data.startswith(_MAGIC):
        raise BadMarkError("it is no mark")
    if _CRC.pack(zlib.crc32(data[: _MARK.size])) != data[_MARK.size :]:
        raise BadMarkError("its checksum is wrong")
    return Marked(*_MARK.unpack_from(data)[1:])


class Mark:
    """A few bytes that are overwritten in place, without waiting for the disk. All raise OSError."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)

    def write(self, data: bytes) -> None:
        os.pwrite(self._file, data, 0)

    def begin(self, data: bytes) -> None:
        """These and nothing else, on disk when this returns."""
        os.ftruncate(self._file, len(data))
        os.pwrite(self._file, data, 0)
        os.fsync(self._file)

    def close(self) -> None:
        os.close(self._file)


class Disk:
    """The real one. All calls block. Raise OSError, and `connect` and what it returns sqlite3.Error."""

    reserve: Reserve = NO_RESERVE
    """What the stores on it may give up when it is full."""

    def with_reserve(self, reserve: Reserve) -> Self:
        """The same disk for those who share `reserve`."""
        found = copy.copy(self)
        found.reserve = reserve
        return found

    def free_bytes(self, path: Path) -> int:
        """What is left to us beside the file `path`."""
        return faults.free_bytes(path)

    def connect(self, path: Path, *, read_only: bool = False) -> sqlite3.Connection:
        """In autocommit mode, usable from any thread. `read_only`: nothing is written; what is in a write-ahead log
        stays there."""
        return sqlite3.connect(
            f"{path.absolute().as_uri()}?mode={'ro' if read_only else 'rwc'}",
            uri=True,
            isolation_level=None,
            check_same_thread=False,
            timeout=BUSY_TIMEOUT_S,
            cached_statements=STATEMENTS_CACHED,
        )

    def lock(self, path: Path) -> Lock:
        """Until it is released, or the process ends. Raises InUseError."""
        return Lock(path)

    def mark(self, path: Path) -> Mark:
        """Made if there is none."""
        return Mark(path)

    def replace_text(self, path: Path, text: str) -> None:
        """After a crash the file holds the old text or the new one, and after this returns the new one."""
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
            with contextlib.suppress(OSError):  # on a full disk it would keep its room
                fresh.unlink()
            raise
        self.sync_folder(path.parent)

    def sync_folder(self, path: Path) -> None:
        """What was made, renamed or removed in this folder stays so from here on."""
        self.sync(path)

    def sync(self, path: Path) -> None:
        """What is in this file, or folder, stays so from here on."""
        file = os.open(path, os.O_RDONLY)
        try:
            os.fsync(file)
        finally:
            os.close(file)


REAL_DISK: Final = Disk()


def read_json(path: Path, shape: TypeAdapter[T]) -> T:
    """What a file of ours holds, whatever has become of it. Raises OSError, and ValueError in one line if it is not of
    that shape."""
    try:
        return shape.validate_json(path.read_bytes(), strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = "".join(f"[{step!r}]" for step in first["loc"])
        raise ValueError(f"{where}: {first['msg']}" if where else first["msg"]) from None
