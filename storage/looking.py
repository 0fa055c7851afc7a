"""Opens SQLite files of another process, or of none, to look at them: nothing in their folder is written.

SQLite has to write an index (-shm) beside a file with a write-ahead log (-wal), even to read it, and makes both if they
are missing. Whoever has a file open has both.

no write-ahead log, or an empty one without index -> opened as immutable: nobody has it open. Who opens it later may
                                                     change it while it is read; then the read may fail
index there, and readable                         -> opened with a read-only index: another process has the file open,
                                                     or was killed
write-ahead log without an index                  -> both are copied into a temporary folder, since the log has commits
                                                     that the file lacks
"""

from __future__ import annotations

import shutil
import sqlite3
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Final

from storage.faults import file_bytes

FREE_BYTES_KEPT: Final = 16 << 20  # on the disk of the temporary folder, for its other users

Open = Callable[[str, type[sqlite3.Connection]], sqlite3.Connection]
"""(URI of a file, class of the connection) -> connection"""


class _OfCopy(sqlite3.Connection):
    """A connection to a copy, which is removed when it is closed."""

    folder: tempfile.TemporaryDirectory[str]

    def close(self) -> None:
        super().close()
        self.folder.cleanup()


def connect(path: Path, open_uri: Open) -> sqlite3.Connection:
    """Returns a connection that reads `path` with everything that was committed. Raises sqlite3.Error."""
    uri, wal, index = path.absolute().as_uri(), Path(f"{path}-wal"), Path(f"{path}-shm")
    if not index.exists() and not file_bytes(wal):
        return open_uri(f"{uri}?mode=ro&immutable=1", sqlite3.Connection)
    db = open_uri(f"{uri}?mode=ro&readonly_shm=1", sqlite3.Connection)
    try:
        db.execute("SELECT count(*) FROM sqlite_master").fetchone()
        return db
    except sqlite3.OperationalError:
        db.close()
        if not wal.exists():  # it was closed meanwhile, and is whole
            return open_uri(f"{uri}?mode=ro&immutable=1", sqlite3.Connection)
    except BaseException:
        db.close()
        raise
    return _connect_copy(path, wal, open_uri)


def _connect_copy(path: Path, wal: Path, open_uri: Open) -> sqlite3.Connection:
    folder = tempfile.TemporaryDirectory(prefix="up-streamer-")
    try:
        needed, free = path.stat().st_size + wal.stat().st_size, shutil.disk_usage(folder.name).free
        if free < needed + FREE_BYTES_KEPT:
            raise sqlite3.OperationalError(
                f"{path} has a write-ahead log in a folder that can't be written, so it is read from a copy: "
                f"{needed >> 20} MiB are needed in {tempfile.gettempdir()}, and {free >> 20} MiB are free; set TMPDIR"
            )
        copy = Path(folder.name) / path.name
        shutil.copyfile(path, copy)
        shutil.copyfile(wal, f"{copy}-wal")
        db = open_uri(f"{copy.as_uri()}?mode=rw", _OfCopy)
    except OSError as error:
        folder.cleanup()
        raise sqlite3.OperationalError(f"{path} can't be copied to {tempfile.gettempdir()}: {error}") from error
    except BaseException:
        folder.cleanup()
        raise
    assert isinstance(db, _OfCopy)
    db.folder = folder
    db.execute("PRAGMA query_only = ON")
    return db
