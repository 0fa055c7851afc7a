"""How a log's SQLite file is used: what holds for every connection that writes, and which of its files may take how
much.

bytes_max = database (file_bytes_max) + write-ahead log (wal_bytes_max) + the next transaction (transaction_bytes) +
OTHER_BYTES
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator
from typing import Final

from storage.disk import BUSY_TIMEOUT_S

PAGE_BYTES: Final = 16_384  # a batch of 512 messages takes some 170 KB; measured best of 4 to 32 KiB
WAL_SHARE: Final = 16  # of the bytes of retention, one part in so many is for the write-ahead log ...
WAL_BYTES_MIN: Final = 512 << 10  # ... but it has room for some commits ...
WAL_BYTES_MAX: Final = 32 << 20  # ... and more brings nothing
WAL_WAIT_MS: Final = 100  # for readers, some steps of them
TRANSACTION_SHARE: Final = 16  # one part in so many is for the next transaction ...
TRANSACTION_BYTES_MAX: Final = 4 << 20  # ... 8,192 messages of 500 bytes
OTHER_BYTES: Final = 128 << 10  # the index of the write-ahead log, the mark, the head, the lock
FILE_BYTES_MIN: Final = 256 << 10  # tables and indexes that hold nothing take some 180 KiB


def wal_bytes_max(bytes_max: int) -> int:
    """For the write-ahead log: the greater, the fewer checkpoints."""
    return min(max(bytes_max // WAL_SHARE, WAL_BYTES_MIN), WAL_BYTES_MAX)


def transaction_bytes(bytes_max: int) -> int:
    """For what one transaction adds before retention has its turn."""
    return min(bytes_max // TRANSACTION_SHARE, TRANSACTION_BYTES_MAX)


def file_bytes_max(bytes_max: int) -> int:
    """For the pages of the database that are in use."""
    return max(bytes_max - wal_bytes_max(bytes_max) - transaction_bytes(bytes_max) - OTHER_BYTES, FILE_BYTES_MIN)


def settle(db: sqlite3.Connection, bytes_max: int) -> None:
    """What a connection that writes has to be told. Raises sqlite3.Error."""
    db.execute("PRAGMA journal_mode = WAL")
    db.execute("PRAGMA synchronous = FULL")
    db.execute("PRAGMA cell_size_check = 1")
    wal_bytes = wal_bytes_max(bytes_max)
    db.execute(f"PRAGMA wal_autocheckpoint = {wal_bytes // 2 // PAGE_BYTES}")
    db.execute(f"PRAGMA journal_size_limit = {wal_bytes}")


def empty_wal(db: sqlite3.Connection) -> bool:
    """Move what the write-ahead log holds into the file; False if a reader was in the way."""
    db.execute(f"PRAGMA busy_timeout = {WAL_WAIT_MS}")
    try:
        is_busy, *_ = db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
    finally:
        db.execute(f"PRAGMA busy_timeout = {round(BUSY_TIMEOUT_S * 1_000)}")
    return not is_busy


@contextlib.contextmanager
def transaction(db: sqlite3.Connection) -> Iterator[None]:
    """All of it is committed, or nothing."""
    db.execute("BEGIN IMMEDIATE")
    try:
        yield
        db.execute("COMMIT")
    except BaseException:
        with contextlib.suppress(sqlite3.Error):
            db.execute("ROLLBACK")
        raise


def pragma(db: sqlite3.Connection, name: str) -> int:
    return int(db.execute(f"PRAGMA {name}").fetchone()[0])
