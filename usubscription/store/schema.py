"""The store's file: its tables, its version, and the authority that it belongs to.

open_store(file, authority) -> take -> look | make -> connect -> update -> of this authority? writable?
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Sequence
from typing import Final

from storage.disk import FileKind, SqliteFile, Step, pragma, tables_of
from storage.faults import DamagedError, is_full

SCHEMA_VERSION: Final = 1
APPLICATION_ID: Final = 0x75507375  # "uPsu"
# up to this size the start compares each row with its indexes, which detects damaged rows
CHECKED_WHOLE_BYTES_MAX: Final = 64 << 20
CACHE_KIB: Final = 64 * 1024  # SQLite's pages: the upper levels of the indexes of a million subscriptions
PRAGMAS: Final = (f"cache_size = -{CACHE_KIB}", "temp_store = MEMORY")  # of each connection

SCHEMA: Final = (
    "CREATE TABLE meta(key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID",
    """CREATE TABLE uri(id INTEGER PRIMARY KEY, authority TEXT NOT NULL, ue_id INTEGER NOT NULL,
       version INTEGER NOT NULL, resource INTEGER NOT NULL, UNIQUE(authority, ue_id, version, resource))""",
    # seq is the order of first subscription, which is the order of lists; bare 1: a topic without authority
    """CREATE TABLE subscription(seq INTEGER PRIMARY KEY, topic INTEGER NOT NULL, subscriber INTEGER NOT NULL,
       status INTEGER NOT NULL, major INTEGER NOT NULL, expires_ms INTEGER, sample_period_ms INTEGER, details BLOB,
       bare INTEGER NOT NULL DEFAULT 0, UNIQUE(subscriber, topic))""",
    "CREATE INDEX subscription_topic ON subscription(topic)",
    "CREATE INDEX subscription_expiry ON subscription(expires_ms) WHERE expires_ms IS NOT NULL",
    """CREATE TABLE link(topic INTEGER PRIMARY KEY, state INTEGER NOT NULL, major INTEGER NOT NULL, command INTEGER,
       generation INTEGER NOT NULL, attempt INTEGER NOT NULL, sample_period_ms INTEGER)""",
    # topic 0: all topics
    """CREATE TABLE registration(topic INTEGER NOT NULL, client INTEGER NOT NULL, major INTEGER NOT NULL,
       PRIMARY KEY(topic, client, major)) WITHOUT ROWID""",
    "CREATE INDEX registration_client ON registration(client)",
    "CREATE TABLE outbox(id INTEGER PRIMARY KEY AUTOINCREMENT, change TEXT NOT NULL)",
    # changes that this destination has not accepted yet
    """CREATE TABLE held(destination TEXT NOT NULL, number INTEGER NOT NULL, change TEXT NOT NULL,
       PRIMARY KEY(destination, number)) WITHOUT ROWID""",
    # handled commands: the request's id, and a hash of client and topic
    "CREATE TABLE handled(number INTEGER PRIMARY KEY, request BLOB NOT NULL, about INTEGER NOT NULL)",
)


def executing(statements: Sequence[str]) -> Step:
    def execute(db: sqlite3.Connection) -> None:
        for statement in statements:
            db.execute(statement)

    return execute


def _check(db: sqlite3.Connection) -> str:
    if pragma(db, "user_version") == SCHEMA_VERSION:
        _require_schema(db)
    if "subscription" not in tables_of(db):
        return ""
    odd_ones = "SELECT count(*) FROM subscription WHERE status NOT IN (1, 2) OR major NOT IN (3, 4)"
    (odd,) = db.execute(odd_ones).fetchone()
    return f"{odd} subscriptions have an unknown state or version" if odd else ""


def _require_schema(db: sqlite3.Connection) -> None:
    """Development versions wrote other tables under the same version. Raises FAILED_PRECONDITION for such a file; more
    tables or indexes do no harm."""
    found = {_normalised(sql) for (sql,) in db.execute("SELECT sql FROM sqlite_master WHERE sql IS NOT NULL")}
    missing = [" ".join(sql.split()[:3]) for sql in SCHEMA if _normalised(sql) not in found]
    if missing:
        path = db.execute("PRAGMA database_list").fetchone()[2]
        why = f"expected the tables of version {SCHEMA_VERSION}, and there is no such {missing[0].split('(')[0][7:]!r}"
        raise STORE.refusal(path, f"{why}: a development version wrote it; move it away to begin without subscriptions")


def _normalised(sql: str) -> str:
    return " ".join(sql.split())


STORE: Final = FileKind(
    "uSubscription store",
    APPLICATION_ID,
    SCHEMA_VERSION,
    migrations={},
    whole_bytes_max=CHECKED_WHOLE_BYTES_MAX,
    check=_check,
    advice=", and is left unchanged: stop the service, restore the file from a backup (or move it away to begin "
    "without subscriptions), and start again",
)


def open_store(file: SqliteFile, authority: str) -> sqlite3.Connection:
    """Open the store, or create it if there is no file. Raises sqlite3.Error, OSError, DamagedError, UStatusError:
    ALREADY_EXISTS (in use), FAILED_PRECONDITION (of another program, newer, of another authority)."""
    file.take()
    if file.path.is_dir():  # then a gateway continues without it, as with any store that it may not open
        raise PermissionError("it is a folder, not a file")
    if not file.look():
        if file.path.exists():
            raise DamagedError(f"it has {file.path.stat().st_size} bytes, and no table")
        file.make(lambda db: _fill(db, authority))
    db = file.connect()
    file.update(file.version)
    row = db.execute("SELECT value FROM meta WHERE key = 'authority'").fetchone()
    if row is None:
        raise DamagedError("it has no authority")
    if row[0] != authority:
        why = f"it belongs to authority {row[0]!r}, not {authority!r}: use a store of its own"
        raise file.kind.refusal(file.path, why)
    try:
        # fails for a read-only file
        db.execute("INSERT OR REPLACE INTO meta VALUES('opened_by', ?)", (str(os.getpid()),))
    except sqlite3.OperationalError as error:
        if not is_full(error, file.path):  # with a full disk the service starts, and refuses what it can't store
            raise
    return db


def _fill(db: sqlite3.Connection, authority: str) -> None:
    executing(SCHEMA)(db)
    # each new store has its own id, so that it is not mistaken for an older copy
    values = [("authority", authority), ("id", os.urandom(16).hex())]
    db.executemany("INSERT INTO meta VALUES(?, ?)", values)
