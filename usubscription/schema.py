"""The store's file: made whole or not at all, checked when it is opened, locked for one service, migrated or refused.

open_store(path, authority) -> lock -> (make) -> is it ours? whole? of this version? of this authority? writable? -> connection
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from storage.disk import REAL_DISK, Disk, InUseError, Lock
from uprotocol.status import UStatusError
from uprotocol.v1.ucode_pb2 import UCode

SCHEMA_VERSION: Final = 3
APPLICATION_ID: Final = 0x75507375  # "uPsu": so that another program's file is not taken for ours
# up to this size each row is held against its indexes at the start: a bit that turned shows
CHECKED_WHOLE_BYTES_MAX: Final = 64 << 20
CACHE_KIB: Final = 64 * 1024  # of SQLite's pages: holds the upper levels of the indexes of a million subscriptions

_ADDED_IN_2: Final = (
    # told to others already, and still to be told to this destination
    """CREATE TABLE held(destination TEXT NOT NULL, number INTEGER NOT NULL, change TEXT NOT NULL,
       PRIMARY KEY(destination, number)) WITHOUT ROWID""",
    # commands that were handled: the request's id, and a hash of client and topic
    "CREATE TABLE handled(number INTEGER PRIMARY KEY, request BLOB NOT NULL, about INTEGER NOT NULL)",
)
# 1: the subscriber passed the topic without authority
_ADDED_IN_3: Final = ("ALTER TABLE subscription ADD COLUMN bare INTEGER NOT NULL DEFAULT 0",)
SCHEMA: Final = (
    "CREATE TABLE meta(key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID",
    """CREATE TABLE uri(id INTEGER PRIMARY KEY, authority TEXT NOT NULL, ue_id INTEGER NOT NULL, version INTEGER NOT
    NULL,
       resource INTEGER NOT NULL, UNIQUE(authority, ue_id, version, resource))""",
    # seq is the order of first subscription, in which lists are given
    """CREATE TABLE subscription(seq INTEGER PRIMARY KEY, topic INTEGER NOT NULL, subscriber INTEGER NOT NULL, status
    INTEGER NOT NULL,
       major INTEGER NOT NULL, expires_ms INTEGER, sample_period_ms INTEGER, details BLOB, UNIQUE(subscriber,
       topic))""",
    "CREATE INDEX subscription_topic ON subscription(topic)",
    "CREATE INDEX subscription_expiry ON subscription(expires_ms) WHERE expires_ms IS NOT NULL",
    """CREATE TABLE link(topic INTEGER PRIMARY KEY, state INTEGER NOT NULL, major INTEGER NOT NULL, command INTEGER,
       generation INTEGER NOT NULL, attempt INTEGER NOT NULL, sample_period_ms INTEGER)""",
    # topic 0: all of them
    """CREATE TABLE registration(topic INTEGER NOT NULL, client INTEGER NOT NULL, major INTEGER NOT NULL,
       PRIMARY KEY(topic, client, major)) WITHOUT ROWID""",
    "CREATE INDEX registration_client ON registration(client)",
    "CREATE TABLE outbox(id INTEGER PRIMARY KEY AUTOINCREMENT, change TEXT NOT NULL)",
    *_ADDED_IN_2,
    *_ADDED_IN_3,
)
MIGRATIONS: Final[dict[int, Sequence[str]]] = {1: _ADDED_IN_2, 2: _ADDED_IN_3}
"""From version n to n + 1: what to execute."""


Check = Callable[[sqlite3.Connection, Path], None]


def open_connection(
    path: Path, *, writer: bool, check: Check | None = None, disk: Disk = REAL_DISK
) -> sqlite3.Connection:
    """`check` sees the file before anything is written to it, and refuses it by raising."""
    connection = disk.connect(path)
    try:
        connection.execute(f"PRAGMA cache_size=-{CACHE_KIB}")
        connection.execute("PRAGMA temp_store=MEMORY")
        if check is not None:
            check(connection, path)
        if not writer:
            connection.execute("PRAGMA query_only=ON")
            return connection
        (mode,) = connection.execute("PRAGMA journal_mode=WAL").fetchone()
        if mode != "wal":
            raise sqlite3.OperationalError(f"the file system does not allow a write-ahead log (mode {mode})")
        connection.execute("PRAGMA synchronous=FULL")
    except BaseException:
        connection.close()
        raise
    return connection


def _tables(db: sqlite3.Connection) -> set[str]:
    return {name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}


def require_ours(connection: sqlite3.Connection, path: Path) -> None:
    """Raises FAILED_PRECONDITION if the file is another program's, or a newer one's."""
    (application,) = connection.execute("PRAGMA application_id").fetchone()
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if application != APPLICATION_ID:
        raise UStatusError(UCode.FAILED_PRECONDITION, f"{path} is an SQLite file, but not a uSubscription store")
    if version > SCHEMA_VERSION:
        raise UStatusError(
            UCode.FAILED_PRECONDITION,
            f"the store {path} has schema version {version}, and this program knows up to {SCHEMA_VERSION}: use a "
            "newer program",
        )


def explain(error: sqlite3.Error, path: Path) -> UStatusError:
    """What SQLite said while the store was in use: DATA_LOSS (damaged), RESOURCE_EXHAUSTED (the disk is full),
    UNAVAILABLE (it failed)."""
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF  # without the extension
    if code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB) or "Could not decode" in str(error):
        return damaged(path, str(error))
    if code == sqlite3.SQLITE_FULL:
        return UStatusError(UCode.RESOURCE_EXHAUSTED, "nothing was stored, because the disk is full: make room")
    return UStatusError(UCode.UNAVAILABLE, f"nothing was stored or read, because the disk failed: {error}")


def damaged(path: Path, what: str) -> UStatusError:
    return UStatusError(
        UCode.DATA_LOSS,
        f"the store {path} is damaged ({what}), and left as it is: stop the service, restore the file from a backup "
        "(or move it away to begin without subscriptions), and start again",
    )


class StoreFile:
    """The file of one service while it is open."""

    def __init__(self, path: Path, authority: str, disk: Disk = REAL_DISK) -> None:
        """Open or make the file. Blocks. Raises UStatusError: FAILED_PRECONDITION (in use, another program's, newer, of
        another authority), DATA_LOSS (corrupt), PERMISSION_DENIED (not writable), UNAVAILABLE (the disk). It never
        begins anew over a file that is there.
        """
        self.path, self.authority, self._disk = path, authority, disk
        self._lock_file: Lock | None = None
        self.db: sqlite3.Connection | None = None
        try:
            self._lock()
            if not path.exists():
                self._create()
            elif path.stat().st_size == 0:
                raise damaged(path, "it has 0 bytes")
            self._inspect()
            self.db = open_connection(path, writer=True, disk=disk)
            self._check(self.db)
        except (sqlite3.Error, OSError) as error:
            self.close()
            raise self._explain(error) from error
        except UStatusError:
            self.close()
            raise

    def close(self) -> None:
        """May be called twice."""
        if self.db is not None:
            with contextlib.suppress(sqlite3.Error):
                self.db.close()
            self.db = None
        if self._lock_file is not None:
            self._lock_file.release()
            self._lock_file = None

    def _lock(self) -> None:
        try:
            self._lock_file = self._disk.lock(Path(f"{self.path}.lock"))
        except InUseError:
            raise UStatusError(
                UCode.FAILED_PRECONDITION, f"the store {self.path} is in use by another process: one service per store"
            ) from None

    def _create(self) -> None:
        """Under another name first, so that a store that exists is a whole one."""
        making = self.path.with_name(self.path.name + ".new")
        making.unlink(missing_ok=True)
        db = self._disk.connect(making)
        try:
            db.execute("PRAGMA synchronous=FULL")
            db.execute("BEGIN")
            for statement in SCHEMA:
                db.execute(statement)
            db.execute("INSERT INTO meta VALUES('authority', ?)", (self.authority,))
            # a store that was made anew is not an older copy
            db.execute("INSERT INTO meta VALUES('id', ?)", (os.urandom(16).hex(),))
            db.execute(f"PRAGMA application_id={APPLICATION_ID}")
            db.execute(f"PRAGMA user_version={SCHEMA_VERSION}")
            db.execute("COMMIT")
        finally:
            db.close()
        os.replace(making, self.path)
        self._disk.sync_folder(self.path.parent)

    def _inspect(self) -> None:
        """Through a connection that can't write: what is not ours or not whole is not touched, nor is its write-ahead
        log moved into it."""
        db = self._disk.connect(self.path, read_only=True)
        try:
            require_ours(db, self.path)
            check = "integrity_check" if self.path.stat().st_size <= CHECKED_WHOLE_BYTES_MAX else "quick_check"
            (fault,) = db.execute(f"PRAGMA {check}(1)").fetchone()
            if fault == "ok" and not {"subscription"} - _tables(db):
                (odd,) = db.execute(
                    "SELECT count(*) FROM subscription WHERE status NOT IN (1, 2) OR major NOT IN (3, 4)"
                ).fetchone()
                fault = f"{odd} subscriptions have a state that there is not" if odd else fault
        finally:
            db.close()
        if fault != "ok":
            raise damaged(self.path, fault)

    def _check(self, db: sqlite3.Connection) -> None:
        (version,) = db.execute("PRAGMA user_version").fetchone()
        self._migrate(db, version)
        row = db.execute("SELECT value FROM meta WHERE key = 'authority'").fetchone()
        if row is None:
            raise damaged(self.path, "it does not say whose it is")
        (authority,) = row
        if authority != self.authority:
            raise UStatusError(
                UCode.FAILED_PRECONDITION,
                f"the store {self.path} belongs to authority {authority!r}, not {self.authority!r}: use that one's "
                "own store",
            )
        try:
            # a read-only file shows here
            db.execute("INSERT OR REPLACE INTO meta VALUES('opened_by', ?)", (str(os.getpid()),))
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode != sqlite3.SQLITE_FULL:  # a full disk passes; what is asked meanwhile is refused
                raise

    def _migrate(self, db: sqlite3.Connection, version: int) -> None:
        while version < SCHEMA_VERSION:
            if version not in MIGRATIONS:
                raise UStatusError(
                    UCode.FAILED_PRECONDITION,
                    f"the store {self.path} has schema version {version}, which is too old to migrate",
                )
            db.execute("BEGIN IMMEDIATE")
            try:
                for statement in MIGRATIONS[version]:
                    db.execute(statement)
                version += 1
                db.execute(f"PRAGMA user_version={version}")
                db.execute("COMMIT")
            except sqlite3.Error:
                db.execute("ROLLBACK")
                raise

    def _explain(self, error: Exception) -> UStatusError:
        text = str(error)
        if isinstance(error, PermissionError) or "readonly" in text or "unable to open" in text:
            return UStatusError(
                UCode.PERMISSION_DENIED,
                f"the store {self.path} can't be opened for writing ({text}): check its permissions",
            )
        if isinstance(error, FileNotFoundError):
            return UStatusError(
                UCode.FAILED_PRECONDITION, f"the directory of the store {self.path} does not exist: make it first"
            )
        if isinstance(error, sqlite3.OperationalError | OSError):
            return UStatusError(UCode.UNAVAILABLE, f"the store {self.path} can't be used now: {text}")
        return damaged(self.path, text)
