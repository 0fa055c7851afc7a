"""Writes the tables of the store. Each call is within the transaction of its caller, on the writer's thread.

uri: ids of addresses     subscription, link: input and result of state.step     registration: clients to be notified
outbox: changes to be sent, ordered by number     held: changes that a destination has not accepted yet
handled: commands that were handled
"""

from __future__ import annotations

import hashlib
import json
import sqlite3
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any, Final

from storage.disk import SqliteFile, insert_rows
from uprotocol.communication.shares import UNIT_BYTES
from usubscription.state import Change, Key, RemoteLink, Status, SubscriptionRecord
from usubscription.store.reader import URI_IS, StoredChange, read_link, write_change

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

Client = tuple[Key, int]
"""The receiver of a notification, and its major version."""


class Tables:
    """The tables of one store; used by one thread at a time."""

    def __init__(self, file: SqliteFile, outbox_max: int) -> None:
        self._file, self._outbox_max = file, outbox_max
        self._ids: dict[Key, int] = {}
        self._keys: dict[int, Key] = {}
        self._clients: dict[int, list[Client]] | None = None  # registered, by topic (0: all); None: has to be read
        self._changes: list[tuple[int, str]] = []  # number and text of the changes of this batch
        self.unused: set[int] = set()  # URIs that may no longer be referred to
        self.number = 0  # of the last change
        self.held = 0  # changes that wait for a destination; one with long details counts as several
        self.dropped = 0  # changes dropped because outbox or held were full

    def execute(self, sql: str, values: Sequence[Any] = ()) -> sqlite3.Cursor:
        return self._file.connect().execute(sql, values)

    def insert(self, into: str, rows: Iterable[Sequence[Any]]) -> int:
        """Insert in few statements. Returns the number of rows."""
        return insert_rows(self._file.connect(), f"INSERT INTO {into}", rows)

    def load(self) -> None:
        """Read the counters from the committed state."""
        self.forget()
        (self.held,) = self.execute(f"SELECT coalesce(sum({HELD_WEIGHT}), 0) FROM held").fetchone()
        self.number = self.last_number()

    def last_number(self) -> int:
        """The number of the last change that was ever stored."""
        row = self.execute("SELECT seq FROM sqlite_sequence WHERE name = 'outbox'").fetchone()
        return int(row[0]) if row is not None else 0

    def forget(self) -> None:
        """Clear the caches, after a rollback."""
        self._clients = None
        for cache in (self._changes, self._ids, self._keys, self.unused):
            cache.clear()

    def finish(self) -> None:
        """Call it at the end of a transaction."""
        if self._changes:
            self._store_changes()
        if self.unused:
            self._sweep()

    # -- URIs

    def find(self, key: Key) -> int | None:
        known = self._ids.get(key)
        if known is None:
            row = self.execute(f"SELECT id FROM uri WHERE {URI_IS}", key).fetchone()
            if row is None:
                return None
            known = row[0]
            self._remember(key, known)
        return known

    def id(self, key: Key) -> int:
        known = self.find(key)
        if known is None:
            made = self.execute("INSERT INTO uri(authority, ue_id, version, resource) VALUES(?, ?, ?, ?)", key)
            assert made.lastrowid is not None
            known = made.lastrowid
            self._remember(key, known)
        return known

    def key(self, id: int) -> Key:
        known = self._keys.get(id)
        if known is None:
            known = self.execute("SELECT authority, ue_id, version, resource FROM uri WHERE id = ?", (id,)).fetchone()
            self._remember(known, id)
        return known

    def _remember(self, key: Key, id: int) -> None:
        if len(self._ids) >= URIS_CACHED_MAX:  # both together
            self._ids.clear()
            self._keys.clear()
        self._ids[key] = id
        self._keys[id] = key

    def _sweep(self) -> None:
        """Delete URIs that are no longer referred to."""
        for id in self.unused - {0}:
            deleted = self.execute(f"DELETE FROM uri WHERE id = ?1 AND {_UNUSED}", (id,))
            if deleted.rowcount and (key := self._keys.pop(id, None)) is not None:
                self._ids.pop(key, None)
        self.unused.clear()

    # -- subscriptions and links

    def keep(self, topic: int, subscriber: Key, record: SubscriptionRecord | None, *, is_known: bool) -> None:
        """Insert, update, or (None) delete a subscription."""
        who = self.id(subscriber)
        if record is None:
            self.execute("DELETE FROM subscription WHERE subscriber = ? AND topic = ?", (who, topic))
            self.unused.add(who)
            return
        status, major, expires_ms, period, details, bare = record
        if is_known:
            sql = """UPDATE subscription SET status = ?, major = ?, expires_ms = ?, sample_period_ms = ?, details = ?,
                     bare = ? WHERE subscriber = ? AND topic = ?"""
        else:
            sql = f"INSERT INTO subscription({_RECORD}, subscriber, topic) VALUES(?, ?, ?, ?, ?, ?, ?, ?)"
        self.execute(sql, (int(status), major, expires_ms, period, details or None, bare, who, topic))

    def link(self, topic: int) -> RemoteLink:
        row = self.execute(
            "SELECT state, major, command, generation, attempt, sample_period_ms FROM link WHERE topic = ?", (topic,)
        ).fetchone()
        return read_link(row) if row is not None else RemoteLink()

    def keep_link(self, topic: int, link: RemoteLink) -> None:
        if link.state is Status.UNSUBSCRIBED:
            self.execute("DELETE FROM link WHERE topic = ?", (topic,))
        else:
            self.execute("INSERT OR REPLACE INTO link VALUES(?, ?, ?, ?, ?, ?, ?)", (topic, *link))

    def topics(self) -> list[tuple[Key, bool]]:
        """Topics with a subscription or a link, and whether there is a link."""
        rows = self.execute(
            """SELECT u.authority, u.ue_id, u.version, u.resource, l.topic IS NOT NULL
               FROM uri u LEFT JOIN link l ON l.topic = u.id
               WHERE l.topic IS NOT NULL OR EXISTS (SELECT 1 FROM subscription s WHERE s.topic = u.id)"""
        ).fetchall()
        return [(row[:4], bool(row[4])) for row in rows]

    def shared(self, authority: str) -> tuple[list[Key], list[tuple[Key, Key]], list[tuple[Key, int, Key | None]]]:
        """Topics of `authority` with subscriptions here; (topic, subscriber) of its clients to other topics; their
        registrations."""
        topics = self.execute(
            """SELECT authority, ue_id, version, resource FROM uri u WHERE authority = ?
               AND (EXISTS(SELECT 1 FROM link WHERE topic = u.id)
                    OR EXISTS(SELECT 1 FROM subscription WHERE topic = u.id)) ORDER BY id""",
            (authority,),
        ).fetchall()
        clients = self.execute(
            """SELECT t.authority, t.ue_id, t.version, t.resource, c.authority, c.ue_id, c.version, c.resource
               FROM uri c JOIN subscription s ON s.subscriber = c.id JOIN uri t ON t.id = s.topic
               WHERE c.authority = ?1 AND t.authority != ?1 ORDER BY s.seq""",
            (authority,),
        ).fetchall()
        registered = self.execute(
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
        done = self.execute("INSERT OR IGNORE INTO registration VALUES(?, ?, ?)", (topic, who, major))
        if done.rowcount and self._clients is not None:  # a streamer of version 3 registers for each topic
            self._clients.setdefault(topic, []).append((client, major))
        return bool(done.rowcount)

    def unregister(self, topic: int, client: Key, major: int) -> bool:
        """Returns False if it was not registered."""
        who = self.find(client)
        if who is None:
            return False
        done = self.execute(
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
        return self.execute("SELECT topic, client, major FROM registration ORDER BY topic, client, major").fetchall()

    # -- changes to be sent

    def add_changes(self, topic: int, changes: Sequence[Change]) -> list[StoredChange]:
        """Add changes for their subscribers, and for the clients that are registered for `topic`."""
        if changes and self._clients is None:  # from memory: usually none, or one streamer for everything
            self._clients = {}
            for registered_topic, client, major in self._registrations():
                self._clients.setdefault(registered_topic, []).append((self.key(client), major))
        stored = []
        for change in changes:
            assert self._clients is not None
            recipients = [(change.subscriber, change.major)] if change.notify_subscriber else []
            for who in (*self._clients.get(0, ()), *self._clients.get(topic, ())):
                if who not in recipients and (who[1] >= 4 or change.status_changed):
                    recipients.append(who)
            stored.append(self.add_change(change, recipients))
        return stored

    def add_change(self, change: Change, recipients: Sequence[Client]) -> StoredChange:
        """Add a change to the outbox; it is written at the end of the batch."""
        self.number += 1
        self._changes.append((self.number, write_change(change, recipients)))
        return StoredChange(self.number, change, tuple(recipients))

    def _store_changes(self) -> None:
        """Write the changes of the batch."""
        stored = self.insert("outbox(id, change)", self._changes)
        if self.number % 1024 < stored:  # at about every 1,024th change
            dropped = self.execute("DELETE FROM outbox WHERE id <= ?", (self.number - self._outbox_max,)).rowcount
            self.dropped += max(dropped, 0)
        self._changes.clear()

    def hold(self, changes: Iterable[tuple[str, int, Change, Sequence[Client]]]) -> None:
        """Store changes for their destinations. At the limit the oldest changes of the destination with the most are
        dropped."""
        held = "SELECT 1 FROM held WHERE destination = ? AND number = ?"
        fresh = {
            (destination, number): write_change(change, recipients)
            for destination, number, change, recipients in changes
            if self.execute(held, (destination, number)).fetchone() is None
        }
        self.insert("held", ((*key, text) for key, text in fresh.items()))
        self.held += sum(1 + len(text) // HELD_UNIT_CHARACTERS for text in fresh.values())
        oldest = "number IN (SELECT number FROM held WHERE destination = ?1 ORDER BY number LIMIT ?2)"
        heaviest = f"SELECT destination FROM held GROUP BY destination ORDER BY sum({HELD_WEIGHT}) DESC LIMIT 1"
        while self.held > self._outbox_max:
            (longest,) = self.execute(heaviest).fetchone()
            self.dropped += self._delete_held(
                f"destination = ?1 AND {oldest}", (longest, max(1, self._outbox_max // 64))
            )

    def release(self, destination: str, number: int) -> None:
        """Delete the changes up to `number` that were held for `destination`."""
        self._delete_held("destination = ? AND number <= ?", (destination, number))

    def _delete_held(self, which: str, values: Sequence[Any]) -> int:
        """Returns the number of deleted rows."""
        (weight,) = self.execute(f"SELECT coalesce(sum({HELD_WEIGHT}), 0) FROM held WHERE {which}", values).fetchone()
        self.held -= weight
        return self.execute(f"DELETE FROM held WHERE {which}", values).rowcount

    # -- reset

    def reset(self) -> None:
        """Delete everything, and add changes for all who were subscribed or registered."""
        self._store_changes()  # of earlier events of this batch
        rows = self.execute("SELECT id, authority, ue_id, version, resource FROM uri")
        keys: dict[int, Key] = {row[0]: row[1:5] for row in rows}
        registered: dict[int, list[Client]] = {}
        for topic, client, major in self._registrations():
            registered.setdefault(topic, []).append((keys[client], major))
        self.insert("outbox(change)", self._endings(keys, registered))
        for table in ("subscription", "link", "registration", "uri"):
            self.execute(f"DELETE FROM {table}")
        self.forget()
        self.number = self.last_number()

    def _endings(self, keys: dict[int, Key], registered: dict[int, list[Client]]) -> Iterator[tuple[str]]:
        for_all, notified = registered.get(0, []), set[Client]()
        query = f"SELECT topic, subscriber, {_RECORD} FROM subscription ORDER BY seq"
        for topic, subscriber, *row in self.execute(query).fetchall():
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

    def __repr__(self) -> str:
        return f"Handled({len(self._hashes or ())})"

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
            for number, known, known_about in self._tables.execute("SELECT * FROM handled ORDER BY number").fetchall():
                self._number = number
                self._remember(known, known_about)
        return request in self._hashes and self._last.get(about) != request

    def add(self, request: bytes, about: int) -> None:
        """After `is_past`."""
        if self._hashes is not None and request not in self._hashes:  # else it is a repetition of the last one
            self._number += 1
            self._unsaved.append((self._number, request, about))
            self._remember(request, about)

    def _remember(self, request: bytes, about: int) -> None:
        assert self._hashes is not None
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
            self._tables.execute("UPDATE handled SET about = ?", (OF_RESET,))
            self.forget()
        else:
            for about in abouts:
                self._last.pop(about, None)
            among = "about IN (SELECT value FROM json_each(?))"
            self._tables.execute(f"UPDATE handled SET about = ? WHERE {among}", (OF_RESET, json.dumps(list(abouts))))

    def store(self) -> None:
        """Write new requests, in the transaction of their commands."""
        stored = self._tables.insert("handled(number, request, about)", self._unsaved)
        if self._number % 1024 < stored:  # at about every 1,024th request
            self._tables.execute("DELETE FROM handled WHERE number <= ?", (self._number - HANDLED_MAX,))
        self._unsaved.clear()


class StoredRecords:
    """The records of one topic, for state.step."""

    def __init__(self, tables: Tables, topic: int) -> None:
        self._tables, self._topic = tables, topic
        self.seen: dict[Key, SubscriptionRecord] = {}  # by subscriber: those that were read

    def get(self, subscriber: Key, /) -> SubscriptionRecord | None:
        who = self._tables.find(subscriber)
        if who is None:
            return None
        row = self._tables.execute(
            f"SELECT {_RECORD} FROM subscription WHERE subscriber = ? AND topic = ?", (who, self._topic)
        ).fetchone()
        if row is None:
            return None
        self.seen[subscriber] = record_of(row)
        return self.seen[subscriber]

    def has_others(self, subscriber: Key, /) -> bool:
        who = self._tables.find(subscriber)
        row = self._tables.execute(
            "SELECT 1 FROM subscription WHERE topic = ? AND subscriber IS NOT ? LIMIT 1", (self._topic, who)
        ).fetchone()
        return row is not None

    def items(self) -> list[tuple[Key, SubscriptionRecord]]:
        rows = self._tables.execute(
            f"SELECT subscriber, {_RECORD} FROM subscription WHERE topic = ? ORDER BY seq", (self._topic,)
        ).fetchall()
        found = [(self._tables.key(row[0]), record_of(row[1:])) for row in rows]
        self.seen.update(found)
        return found


def record_of(row: Sequence[Any]) -> SubscriptionRecord:
    return SubscriptionRecord(Status(row[0]), row[1], row[2], row[3], row[4] or b"", bool(row[5]))
