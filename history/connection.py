"""How a log's SQLite file is used: what holds for every connection that writes, and which of its files may take how
much.

bytes_max = database (file_bytes_max) + write-ahead log (wal_bytes_max) + the next transaction (transaction_bytes) +
OTHER_BYTES
"""

from __future__ import annotations

from typing import Final

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


def pragmas(bytes_max: int) -> tuple[str, ...]:
    """What the connection that writes has to be told."""
    wal_bytes = wal_bytes_max(bytes_max)
    pages = wal_bytes // 2 // PAGE_BYTES
    return "cell_size_check = 1", f"wal_autocheckpoint = {pages}", f"journal_size_limit = {wal_bytes}"
