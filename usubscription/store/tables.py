"""The store's file: its tables, how it is opened, and what writes them.

open_store(file, authority) -> take -> look | make -> connect -> update -> of this authority? writable?

meta: authority, ids, and whether the other services know this store     uri: ids of addresses
subscription, link: input and result of state.step
registration: clients to be notified     outbox: changes to be sent, ordered by number
held: changes that a destination has not accepted yet     handled: commands that were handled

`Tables` and its helpers run within the transaction of their caller, on the writer's thread.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sqlite3
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

from storage.disk import REAL_DISK, FileKind, SqliteFile, insert_rows, pragma, tables_of
from storage.faults import DamagedError, is_damage, is_full
from uprotocol import uuid as uuids
from uprotocol.communication.shares import UNIT_BYTES
from uprotocol.core.usubscription.wire import STORE_BYTES
from usubscription.state import Change, Command, Key, RemoteLink, Status, SubscriptionRecord

SCHEMA_VERSION: Final = 1
APPLICATION_ID: Final = 0x75507375  # "uPsu"
# up to this size the start compares each row with its indexes, which detects damaged rows
CHECKED_WHOLE_BYTES_MAX: Final = 64 << 20
CACHE_KIB: Final = 64 * 1024  # SQLite's pages: the upper levels of the indexes of a million subscriptions
PRAGMAS: Final = (f"cache_size = -{CACHE_KIB}", "temp_store = MEMORY")  # of each connection

HELD_UNIT_CHARACTERS: Final = 2 * UNIT_BYTES  # two characters for each byte of details; the rest has some 250
HELD_WEIGHT: Final = f"1 + length(change) / {HELD_UNIT_CHARACTERS}"  # SQL
URIS_CACHED_MAX: Final = 131_072  # ids of recent URIs; a full cache is cleared
HANDLED_MAX: Final = 32_768  # commands; a redelivery comes within the ttl of its request, seconds to minutes
OF_RESET: Final = 0  # the hash of commands before a Reset: none of them counts as the last one
NO_TOPIC: Final[Key] = ("", 0, 0, 0)
"""The topic of a change that has none: the end of a registration for everything."""

_RECORD: Final = "status, major, expires_ms, sample_period_ms, details, bare"

_USES: Final = (
    "subscription.topic",
    "subscription.subscriber",
    "link.topic",
    "registration.topic",
    "registration.client",
)
_UNUSED: Final = " AND ".join(f"NOT EXISTS(SELECT 1 FROM {use.split('.')[0]} WHERE {use} = ?1)" for use in _USES)

UNTOLD: Final = "untold"
"""In meta while the other services have to be told that this store is not the one they knew: since when (Unix
milliseconds)."""
COPY: Final = "copy"  # in meta, beside UNTOLD: it is an older copy; else it was made without subscriptions

URI_IS: Final = "authority = ? AND ue_id = ? AND version = ? AND resource = ?"

Client = tuple[Key, int]
"""The receiver of a notification, and its major version."""

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


def _check(db: sqlite3.Connection) -> str:
    """Returns what is wrong. Development versions wrote other tables under the same version: raises FAILED_PRECONDITION
    for such a file; more tables or indexes do no harm."""
    if pragma(db, "user_version") == SCHEMA_VERSION:
        found = {tuple(sql.split()) for (sql,) in db.execute("SELECT sql FROM sqlite_master WHERE sql IS NOT NULL")}
        missing = next((words for sql in SCHEMA if (words := tuple(sql.split())) not in found), None)
        if missing is not None:
            path = db.execute("PRAGMA database_list").fetchone()[2]
            what = " ".join(missing[1:3]).split("(")[0]
            why = f"expected the tables of version {SCHEMA_VERSION}, and there is no such {what!r}"
            advice = "a development version wrote it; move it away to begin without subscriptions"
            raise STORE.refusal(path, f"{why}: {advice}")
    if "subscription" not in tables_of(db):
        return ""
    odd_ones = "SELECT count(*) FROM subscription WHERE status NOT IN (1, 2) OR major NOT IN (3, 4)"
    (odd,) = db.execute(odd_ones).fetchone()
    return f"{odd} subscriptions have an unknown state or version" if odd else ""


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
    _require_authority(db, file.path, authority)
    try:
        # fails for a read-only file
        db.execute("INSERT OR REPLACE INTO meta VALUES('opened_by', ?)", (str(os.getpid()),))
    except sqlite3.OperationalError as error:
        if not is_full(error, file.path):  # with a full disk the service starts, and refuses what it can't store
            raise
    return db


def require_usable(path: Path, authority: str, *, whole: bool = True) -> None:
    """Raises what `open_store` would raise, and writes nothing: DamagedError, UStatusError as FileKind.require_usable,
    FAILED_PRECONDITION (of another authority). `whole`: look for damage."""
    STORE.require_usable(path, whole=whole)
    if not path.exists():
        return
    if not path.stat().st_size:
        raise DamagedError("it has 0 bytes, and no table")
    try:
        with contextlib.closing(REAL_DISK.look(path)) as db:
            _require_authority(db, path, authority)
    except sqlite3.Error as error:
        if is_damage(error):
            raise DamagedError(str(error)) from None
        raise STORE.not_opened(error, path) from None


def _require_authority(db: sqlite3.Connection, path: Path, authority: str) -> None:
    row = db.execute("SELECT value FROM meta WHERE key = 'authority'").fetchone()
    if row is None:
        raise DamagedError("it has no authority")
    if row[0] != authority:
        raise STORE.refusal(path, f"it belongs to authority {row[0]!r}, not {authority!r}: use a store of its own")


def _fill(db: sqlite3.Connection, authority: str) -> None:
    for statement in SCHEMA:
        db.execute(statement)
    # each new store has its own id, so that it is not mistaken for an older copy
    values = [("authority", authority), ("id", os.urandom(STORE_BYTES).hex()), (UNTOLD, str(uuids.now_ms()))]
    db.executemany("INSERT INTO meta VALUES(?, ?)", values)


# -- rows


class StoredChange(NamedTuple):
    """A change in the outbox: its number, and the recipients of its Notification with their major versions."""

    number: int
    change: Change
    recipients: tuple[Client, ...]


def record_of(row: Sequence[Any]) -> SubscriptionRecord:
    return SubscriptionRecord(Status(row[0]), row[1], row[2], row[3], row[4] or b"", bool(row[5]))


def read_link(row: Sequence[Any]) -> RemoteLink:
    return RemoteLink(Status(row[0]), row[1], Command(row[2]) if row[2] is not None else None, row[3], row[4], row[5])


_encode: Final = json.JSONEncoder(separators=(",", ":")).encode  # json.dumps would create an encoder at each call


def write_change(change: Change, recipients: Sequence[Client]) -> str:
    *head, details, bare, _, status_changed = change
    return _encode([*head, details.hex(), status_changed, recipients, int(bare)])


def read_change(number: int, text: str) -> StoredChange:
    topic, subscriber, status, major, expires_ms, period, details, status_changed, recipients, bare = json.loads(text)
    change = Change(
        to_key(topic),
        to_key(subscriber),
        Status(status),
        major,
        expires_ms,
        period,
        bytes.fromhex(details),
        bare=bool(bare),
        status_changed=status_changed,
    )
    return StoredChange(number, change, tuple((to_key(key), major) for key, major in recipients))


def to_key(parts: list[Any]) -> Key:
    authority, ue_id, version, resource = parts
    return (authority, ue_id, version, resource)


# -- writing


class Tables:
    """The tables of one store, on the connection `db`, which is set for each transaction; used by one thread at a
    time."""

    db: sqlite3.Connection

    def __init__(self, outbox_max: int) -> None:
        self._outbox_max = outbox_max
        self._ids: dict[Key, int] = {}
        self._keys: dict[int, Key] = {}
        self._clients: dict[int, list[Client]] | None = None  # registered, by topic (0: all); None: has to be read
        self._changes: list[tuple[int, str]] = []  # number and text of the changes of this batch
        self.unused: set[int] = set()  # URIs that may no longer be referred to
        self.number = 0  # of the last change
        self.held = 0  # changes that wait for a destination; one with long details counts as several
        self.dropped = 0  # changes dropped because outbox or held were full

    def load(self) -> None:
        """Read the counters from the committed state."""
        self.forget()
        (self.held,) = self.db.execute(f"SELECT coalesce(sum({HELD_WEIGHT}), 0) FROM held").fetchone()
        self.number = self.last_number()

    def last_number(self) -> int:
        """The number of the last change that was ever stored."""
        row = self.db.execute("SELECT seq FROM sqlite_sequence WHERE name = 'outbox'").fetchone()
        return int(row[0]) if row is not None else 0

    def forget(self) -> None:
        """Clear the caches, after a rollback."""
        self._clients = None
        for cache in (self._changes, self._ids, self._keys, self.unused):
            cache.clear()

    def finish(self) -> None:
        """Write the changes, and delete URIs that are no longer referred to. Call it at the end of a transaction."""
        stored = insert_rows(self.db, "INSERT INTO outbox(id, change)", self._changes)
        if self.number % 1024 < stored:  # at about every 1,024th change
            dropped = self.db.execute("DELETE FROM outbox WHERE id <= ?", (self.number - self._outbox_max,)).rowcount
            self.dropped += max(dropped, 0)
        self._changes.clear()
        for id in self.unused - {0}:
            deleted = self.db.execute(f"DELETE FROM uri WHERE id = ?1 AND {_UNUSED}", (id,))
            if deleted.rowcount and (key := self._keys.pop(id, None)) is not None:
                self._ids.pop(key, None)
        self.unused.clear()
        if len(self._ids) > URIS_CACHED_MAX:  # both together
            self._ids.clear()
            self._keys.clear()

    # -- URIs

    def find(self, key: Key) -> int | None:
        known = self._ids.get(key)
        if known is None:
            row = self.db.execute(f"SELECT id FROM uri WHERE {URI_IS}", key).fetchone()
            if row is None:
                return None
            known = self._ids[key] = row[0]
            self._keys[known] = key
        return known

    def id(self, key: Key) -> int:
        known = self.find(key)
        if known is None:
            made = self.db.execute("INSERT INTO uri(authority, ue_id, version, resource) VALUES(?, ?, ?, ?)", key)
            assert made.lastrowid is not None
            known = self._ids[key] = made.lastrowid
            self._keys[known] = key
        return known

    def key(self, id: int) -> Key:
        known = self._keys.get(id)
        if known is None:
            query = "SELECT authority, ue_id, version, resource FROM uri WHERE id = ?"
            known = self._keys[id] = self.db.execute(query, (id,)).fetchone()
            self._ids[known] = id
        return known

    # -- subscriptions and links

    def keep(self, topic: int, subscriber: Key, record: SubscriptionRecord | None, *, is_known: bool) -> None:
        """Insert, update, or (None) delete a subscription."""
        who = self.id(subscriber)
        if record is None:
            self.db.execute("DELETE FROM subscription WHERE subscriber = ? AND topic = ?", (who, topic))
            self.unused.add(who)
            return
        status, major, expires_ms, period, details, bare = record
        if is_known:
            sql = """UPDATE subscription SET status = ?, major = ?, expires_ms = ?, sample_period_ms = ?, details = ?,
                     bare = ? WHERE subscriber = ? AND topic = ?"""
        else:
            sql = f"INSERT INTO subscription({_RECORD}, subscriber, topic) VALUES(?, ?, ?, ?, ?, ?, ?, ?)"
        self.db.execute(sql, (int(status), major, expires_ms, period, details or None, bare, who, topic))

    def link(self, topic: int) -> RemoteLink:
        row = self.db.execute(
            "SELECT state, major, command, generation, attempt, sample_period_ms FROM link WHERE topic = ?", (topic,)
        ).fetchone()
        return read_link(row) if row is not None else RemoteLink()

    def keep_link(self, topic: int, link: RemoteLink) -> None:
        if link.state is Status.UNSUBSCRIBED:
            self.db.execute("DELETE FROM link WHERE topic = ?", (topic,))
        else:
            self.db.execute("INSERT OR REPLACE INTO link VALUES(?, ?, ?, ?, ?, ?, ?)", (topic, *link))

    def topics(self) -> list[tuple[Key, bool]]:
        """Topics with a subscription or a link, and whether there is a link."""
        rows = self.db.execute(
            """SELECT u.authority, u.ue_id, u.version, u.resource, l.topic IS NOT NULL
               FROM uri u LEFT JOIN link l ON l.topic = u.id
               WHERE l.topic IS NOT NULL OR EXISTS (SELECT 1 FROM subscription s WHERE s.topic = u.id)"""
        ).fetchall()
        return [(row[:4], bool(row[4])) for row in rows]

    def shared(self, authority: str) -> tuple[list[Key], list[tuple[Key, Key]], list[tuple[Key, int, Key | None]]]:
        """Topics of `authority` with subscriptions here; (topic, subscriber) of its clients to other topics; their
        registrations."""
        topics = self.db.execute(
            """SELECT authority, ue_id, version, resource FROM uri u WHERE authority = ?
               AND (EXISTS(SELECT 1 FROM link WHERE topic = u.id)
                    OR EXISTS(SELECT 1 FROM subscription WHERE topic = u.id)) ORDER BY id""",
            (authority,),
        ).fetchall()
        clients = self.db.execute(
            """SELECT t.authority, t.ue_id, t.version, t.resource, c.authority, c.ue_id, c.version, c.resource
               FROM uri c JOIN subscription s ON s.subscriber = c.id JOIN uri t ON t.id = s.topic
               WHERE c.authority = ?1 AND t.authority != ?1 ORDER BY s.seq""",
            (authority,),
        ).fetchall()
        registered = self.db.execute(
            """SELECT c.id, r.major, r.topic FROM uri c JOIN registration r ON r.client = c.id WHERE c.authority = ?
               ORDER BY r.topic, r.client, r.major""",
            (authority,),
        ).fetchall()
        named = [(self.key(client), major, self.key(topic) if topic else None) for client, major, topic in registered]
        return topics, [(row[:4], row[4:]) for row in clients], named

    # -- registrations

    def register(self, topic: int, client: Key, major: int) -> bool:
        """Returns False if it was registered already. Topic 0: for everything."""
        who = self.id(client)
        done = self.db.execute("INSERT OR IGNORE INTO registration VALUES(?, ?, ?)", (topic, who, major))
        if done.rowcount and self._clients is not None:  # a streamer of version 3 registers for each topic
            self._clients.setdefault(topic, []).append((client, major))
        return bool(done.rowcount)

    def unregister(self, topic: int, client: Key, major: int) -> bool:
        """Returns False if it was not registered."""
        who = self.find(client)
        if who is None:
            return False
        done = self.db.execute(
            "DELETE FROM registration WHERE topic = ? AND client = ? AND major = ?", (topic, who, major)
        )
        if done.rowcount and self._clients is not None:
            known = self._clients[topic]
            known.remove((client, major))
            if not known:
                del self._clients[topic]
        self.unused.update((topic, who))
        return bool(done.rowcount)

    def _registrations(self) -> list[tuple[int, int, int]]:
        return self.db.execute("SELECT topic, client, major FROM registration ORDER BY topic, client, major").fetchall()

    # -- changes to be sent

    def add_changes(self, topic: int, changes: Sequence[Change], only: Client | None = None) -> list[StoredChange]:
        """Add changes to the outbox, which is written at the end of the batch: for their subscribers and for the
        clients that are registered for `topic`, or for one client `only`."""
        stored = []
        for change in changes:
            recipients = [only] if only is not None else []
            if only is None:
                if self._clients is None:  # from memory: usually none, or one streamer for everything
                    self._clients = {}
                    for registered_topic, client, major in self._registrations():
                        self._clients.setdefault(registered_topic, []).append((self.key(client), major))
                if change.notify_subscriber:
                    recipients.append((change.subscriber, change.major))
                for who in (*self._clients.get(0, ()), *self._clients.get(topic, ())):
                    if who not in recipients and (who[1] >= 4 or change.status_changed):
                        recipients.append(who)
            self.number += 1
            self._changes.append((self.number, write_change(change, recipients)))
            stored.append(StoredChange(self.number, change, tuple(recipients)))
        return stored

    def hold(self, changes: Iterable[tuple[str, int, Change, Sequence[Client]]]) -> None:
        """Store changes for their destinations. At the limit the oldest changes of the destination with the most are
        dropped."""
        held = "SELECT 1 FROM held WHERE destination = ? AND number = ?"
        fresh = {
            (destination, number): write_change(change, recipients)
            for destination, number, change, recipients in changes
            if self.db.execute(held, (destination, number)).fetchone() is None
        }
        insert_rows(self.db, "INSERT INTO held", ((*key, text) for key, text in fresh.items()))
        self.held += sum(1 + len(text) // HELD_UNIT_CHARACTERS for text in fresh.values())
        oldest = "number IN (SELECT number FROM held WHERE destination = ?1 ORDER BY number LIMIT ?2)"
        heaviest = f"SELECT destination FROM held GROUP BY destination ORDER BY sum({HELD_WEIGHT}) DESC LIMIT 1"
        while self.held > self._outbox_max:
            (longest,) = self.db.execute(heaviest).fetchone()
            oldest_ones = (longest, max(1, self._outbox_max // 64))
            self.dropped += self.delete_held(f"destination = ?1 AND {oldest}", oldest_ones)

    def delete_held(self, which: str, values: Sequence[Any]) -> int:
        """Returns the number of deleted rows."""
        query = f"SELECT coalesce(sum({HELD_WEIGHT}), 0) FROM held WHERE {which}"
        (weight,) = self.db.execute(query, values).fetchone()
        self.held -= weight
        return self.db.execute(f"DELETE FROM held WHERE {which}", values).rowcount

    # -- reset

    def reset(self) -> None:
        """Delete everything, and add changes for all who were subscribed or registered."""
        self.finish()  # what earlier events of this batch began
        rows = self.db.execute("SELECT id, authority, ue_id, version, resource FROM uri")
        keys: dict[int, Key] = {row[0]: row[1:5] for row in rows}
        registered: dict[int, list[Client]] = {}
        for topic, client, major in self._registrations():
            registered.setdefault(topic, []).append((keys[client], major))
        insert_rows(self.db, "INSERT INTO outbox(change)", self._endings(keys, registered))
        for table in ("subscription", "link", "registration", "uri"):
            self.db.execute(f"DELETE FROM {table}")
        self.forget()
        self.number = self.last_number()

    def _endings(self, keys: dict[int, Key], registered: dict[int, list[Client]]) -> Iterator[tuple[str]]:
        for_all, notified = registered.get(0, []), set[Client]()
        query = f"SELECT topic, subscriber, {_RECORD} FROM subscription ORDER BY seq"
        for topic, subscriber, *row in self.db.execute(query).fetchall():
            _, major, expires_ms, period, details, bare = record_of(row)
            ended = Status.UNSUBSCRIBED
            change = Change(keys[topic], keys[subscriber], ended, major, expires_ms, period, details, bare)
            recipients = [(change.subscriber, major)]
            recipients += [client for client in (*for_all, *registered.get(topic, ())) if client != recipients[0]]
            notified.update(recipients)
            yield (write_change(change, recipients),)
        for topic, clients in registered.items():
            for client in clients:
                if client not in notified:
                    notified.add(client)
                    change = Change(keys[topic] if topic else NO_TOPIC, client[0], Status.UNSUBSCRIBED, client[1])
                    yield (write_change(change, [client]),)


class Handled:
    """The newest HANDLED_MAX commands: the id of the request, and a hash of its client and topic.

    A network may deliver a request again after later ones about the same topic; it must not undo them.
    """

    def __init__(self, tables: Tables) -> None:
        self._tables = tables
        self._hashes: dict[bytes, int] | None = None  # by request; None: has to be read
        self._last: dict[int, bytes] = {}  # the last request of each hash
        self._unsaved: list[tuple[int, bytes, int]] = []
        self._number = 0

    @staticmethod
    def about(client: Key, topic: Key) -> int:
        """A hash of both, the same after a restart, and never OF_RESET."""
        digest = hashlib.blake2b(repr((client, topic)).encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big", signed=True) or 1

    def forget(self) -> None:
        """Read everything again at the next use: after a rollback, or after all rows were changed."""
        self._hashes = None
        self._unsaved.clear()

    def is_past(self, request: bytes, about: int) -> bool:
        """True if `request` was handled before, and later ones with this hash since."""
        if self._hashes is None:
            self._hashes, self._last, self._number = {}, {}, 0
            for row in self._tables.db.execute("SELECT * FROM handled ORDER BY number").fetchall():
                self.add(*row[1:])
                self._number = row[0]
            self._unsaved.clear()
        return request in self._hashes and self._last.get(about) != request

    def add(self, request: bytes, about: int) -> None:
        """After `is_past`."""
        if self._hashes is None or request in self._hashes:  # it is a repetition of the last one
            return
        self._number += 1
        self._unsaved.append((self._number, request, about))
        self._hashes[request] = about
        if about != OF_RESET:
            self._last[about] = request
        if len(self._hashes) > HANDLED_MAX:
            oldest = next(iter(self._hashes))
            about = self._hashes.pop(oldest)
            if self._last.get(about) == oldest:
                del self._last[about]

    def reset(self, abouts: Collection[int] | None = None) -> None:
        """After a Reset no request with one of these hashes (None: with any) counts as the last one."""
        self.store()
        if abouts is None:
            self._tables.db.execute("UPDATE handled SET about = ?", (OF_RESET,))
            self.forget()
        else:
            for about in abouts:
                self._last.pop(about, None)
            among = "about IN (SELECT value FROM json_each(?))"
            self._tables.db.execute(f"UPDATE handled SET about = ? WHERE {among}", (OF_RESET, json.dumps(list(abouts))))

    def store(self) -> None:
        """Write new requests, in the transaction of their commands."""
        stored = insert_rows(self._tables.db, "INSERT INTO handled(number, request, about)", self._unsaved)
        if self._number % 1024 < stored:  # at about every 1,024th request
            self._tables.db.execute("DELETE FROM handled WHERE number <= ?", (self._number - HANDLED_MAX,))
        self._unsaved.clear()


@dataclass(slots=True)
class StoredRecords:
    """The records of one topic, for state.step."""

    _tables: Tables
    _topic: int
    seen: dict[Key, SubscriptionRecord] = field(default_factory=dict)  # by subscriber: those that were read

    def get(self, subscriber: Key, /) -> SubscriptionRecord | None:
        who = self._tables.find(subscriber)
        if who is None:
            return None
        row = self._tables.db.execute(
            f"SELECT {_RECORD} FROM subscription WHERE subscriber = ? AND topic = ?", (who, self._topic)
        ).fetchone()
        if row is None:
            return None
        self.seen[subscriber] = record_of(row)
        return self.seen[subscriber]

    def has_others(self, subscriber: Key, /) -> bool:
        who = self._tables.find(subscriber)
        row = self._tables.db.execute(
            "SELECT 1 FROM subscription WHERE topic = ? AND subscriber IS NOT ? LIMIT 1", (self._topic, who)
        ).fetchone()
        return row is not None

    def items(self) -> list[tuple[Key, SubscriptionRecord]]:
        rows = self._tables.db.execute(
            f"SELECT subscriber, {_RECORD} FROM subscription WHERE topic = ? ORDER BY seq", (self._topic,)
        ).fetchall()
        found = [(self._tables.key(row[0]), record_of(row[1:])) for row in rows]
        self.seen.update(found)
        return found
