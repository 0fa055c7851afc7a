"""Copies files that are in use, in short steps with pauses, so that their owner hardly notices.

copy_store: a snapshot of a SQLite file that rarely changes, page by page    copy_small, copy_whole: any other file
CopyPace: a step took t -> is there still space, does anybody want us to stop? -> a pause of t * (1 / share - 1)
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from storage.disk import REAL_DISK, Disk
from storage.faults import FULL_BYTES
from uprotocol.status import UStatusError
from uprotocol.v1.ucode_pb2 import UCode

SHARE: Final = 0.2  # of the time, while the owner of the files works
PAUSE_S_MAX: Final = 2.0  # after a step that a slow disk has made long
STEP_BYTES: Final = 1 << 20
STEP_PAGES: Final = 256
COPIED_WAL_BYTES_MAX: Final = 8 << 20  # a longer write-ahead log waits for us: the rest is copied without pauses


class CopyPace:
    """Which share of the time the copying takes, and when it ends early. Used by one thread."""

    def __init__(
        self,
        target: Path,
        share: float = 1.0,
        *,
        kept_bytes: Callable[[], int] = lambda: FULL_BYTES,
        is_stopping: Callable[[], bool] = lambda: False,
        disk: Disk = REAL_DISK,
    ) -> None:
        """`kept_bytes()`: so much stays free on the disk of the file `target`. `is_stopping()`: this process ends. Both
        are called on any thread."""
        self.share = share
        self._target, self._kept, self._is_stopping, self._disk = target, kept_bytes, is_stopping, disk
        self._since = time.monotonic()

    def require(self, bytes: int) -> None:
        """Raises RESOURCE_EXHAUSTED if the disk has no space for so many more bytes; UNAVAILABLE once stopping."""
        if self._is_stopping():
            raise UStatusError(UCode.UNAVAILABLE, "the streamer is stopping: try again when it is stopped")
        free, kept = self._disk.free_bytes(self._target), self._kept()
        if free < bytes + kept:
            what = f"{self._target.parent} has {free >> 20} MiB free, and {bytes >> 20} MiB are needed"
            rest = f", with {kept >> 20} MiB left over for those who use that disk: choose another one"
            raise UStatusError(UCode.RESOURCE_EXHAUSTED, what + rest)

    def rest(self) -> None:
        """Called after each step. Raises as `require`."""
        self.require(0)
        pause_s = min((time.monotonic() - self._since) * (1 / self.share - 1), PAUSE_S_MAX)
        if pause_s > 0:
            time.sleep(pause_s)
        self._since = time.monotonic()


def copy_store(source: Path, target: Path, pace: CopyPace, disk: Disk = REAL_DISK) -> None:
    """Copy a SQLite file of this moment, whatever is written meanwhile. Its write-ahead log can't be emptied until this
    ends. Raises sqlite3.Error, OSError, and as CopyPace."""
    share = pace.share

    def rest(*_: int) -> None:
        with contextlib.suppress(FileNotFoundError):
            pace.share = 1.0 if Path(f"{source}-wal").stat().st_size > COPIED_WAL_BYTES_MAX else share
        pace.rest()

    try:
        with contextlib.closing(disk.connect(source, read_only=True)) as db:
            db.execute("BEGIN")
            db.execute("SELECT count(*) FROM sqlite_master").fetchone()  # the snapshot begins
            with contextlib.closing(_connect_new(target, disk)) as copy:
                db.backup(copy, pages=STEP_PAGES, progress=rest)
                copy.execute("PRAGMA journal_mode = DELETE")  # one file, without a write-ahead log
    finally:
        pace.share = share
    disk.sync(target)


def _connect_new(path: Path, disk: Disk) -> sqlite3.Connection:
    """Returns a connection to a new file, which is worth nothing before it is complete."""
    make_private(path)
    db = disk.connect(path)
    db.execute("PRAGMA journal_mode = OFF")
    db.execute("PRAGMA synchronous = OFF")
    return db


def make_private(path: Path) -> None:
    """Create an empty file that only its owner may read. Raises FileExistsError."""
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))


def write_private(path: Path, data: bytes, disk: Disk = REAL_DISK) -> None:
    """Write a new file that only its owner may read. It is on disk when this returns."""
    make_private(path)
    path.write_bytes(data)
    disk.sync(path)


def copy_whole(source: Path, target: Path, pace: CopyPace, disk: Disk = REAL_DISK) -> str:
    """Copy a file that does not change, and return its SHA-256 in hex. Raises OSError, and as CopyPace."""
    make_private(target)
    with target.open("wb") as copy:
        digest = sha256(source, pace, copy.write)
    disk.sync(target)
    return digest


def sha256(path: Path, pace: CopyPace, take: Callable[[bytes], object] = lambda _: None) -> str:
    """Returns the SHA-256 of a file in hex, whose parts `take` gets. Raises OSError, and as CopyPace."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(STEP_BYTES):
            take(block)
            digest.update(block)
            pace.rest()
    return digest.hexdigest()
