"""The rows of the store, as the state machine needs them: each call is within the transaction of its caller.

uri: ids for addresses     subscription, link: what state.step reads and decides     registration: who is told
outbox: changes to be told, in the order of their numbers     held: those that a destination has not taken yet
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

from storage.file import SqliteFile
from storage.statements import insert_rows
from usubscription.quota import UNIT_BYTES
from usubscription.state import Change, Key, Link, Record, Status
from usubscription.store.reader import URI_IS, StoredChange, read_link, write_change

HELD_UNIT_CHARACTERS: Final = 2 * UNIT_BYTES  # details are two for each byte; a change is some 250 beside them
HELD_WEIGHT: Final = f"1 + length(change) / {HELD_UNIT_CHARACTERS}"  # in SQL
URIS_CACHED_MAX: Final = 131_072  # ids of recent URIs; the cache starts anew when it is full
UNSEEN: Final[Key] = ("", 0, 0, 0)
"""The topic of a message that is about none: the end of a registration for everything."""

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
"""Who is told, and in which major version."""


class Tables:
    """One thread at a time."""

    def __init__(self, file: SqliteFile, outbox_max: int) -> None:
        self._file, self._outbox_max = file, outbox_max
        self._ids: dict[Key, int] = {}
        self._keys: dict[int, Key] = {}
        self._clients: dict[int, list[Client]] | None = None  # registered, by topic (0: all); None: to be read
        self._telling: list[tuple[int, str]] = []  # number and text of the changes of this batch
        self.unused: set[int] = set()  # URIs that perhaps nothing refers to any more
        self.number = 0  # of the last change
        self.held = 0  # changes that wait for a destination of theirs; one with long details counts as several
        self.dropped = 0  # changes, where outbox or held were full

    def execute(self, sql: str, values: Sequence[Any] = ()) -> sqlite3.Cursor:
        return self._file.connect().execute(sql, values)

    def insert(self, into: str, rows: Iterable[Sequence[Any]]) -> int:
        """In few statements; how many."""
        return insert_rows(self._file.connect(), f"INSERT INTO {into}", rows)

    def load(self) -> None:
        """What is counted here, from what was committed."""
        self.forget()
        (self.held,) = self.execute(f"SELECT coalesce(sum({HELD_WEIGHT}), 0) FROM held").fetchone()
        self.number = self.last_number()

    def last_number(self) -> int:
        """Of the changes that were ever stored."""
        row = self.execute("SELECT seq FROM sqlite_sequence WHERE name = 'outbox'").fetchone()
        return int(row[0]) if row is not None else 0

    def forget(self) -> None:
        """After a transaction that was not committed: what is in memory may not be in the file."""
        self._clients = None
        for cache in (self._telling, self._ids, self._keys, self.unused):
            cache.clear()

    def finish(self) -> None:
        """At the end of a transaction."""
        if self._telling:
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
        """Forget the URIs that nothing refers to any more, so that passing topics leave nothing behind."""
        for id in self.unused - {0}:
            gone = self.execute(f"DELETE FROM uri WHERE id = ?1 AND {_UNUSED}", (id,))
            if gone.rowcount and (key := self._keys.pop(id, None)) is not None:
                self._ids.pop(key, None)
        self.unused.clear()

    # -- subscriptions and links

    def keep(self, topic: int, subscriber: Key, record: Record | None, *, is_known: bool) -> None:
        """None: it is gone."""
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

    def link(self, topic: int) -> Link:
        row = self.execute(
            "SELECT state, major, command, generation, attempt, sample_period_ms FROM link WHERE topic = ?", (topic,)
        ).fetchone()
        return read_link(row) if row is not None else Link()

    def keep_link(self, topic: int, link: Link) -> None:
        if link.state is Status.UNSUBSCRIBED:
            self.execute("DELETE FROM link WHERE topic = ?", (topic,))
        else:
            self.execute("INSERT OR REPLACE INTO link VALUES(?, ?, ?, ?, ?, ?, ?)", (topic, *link))

    def topics(self) -> list[tuple[Key, bool]]:
        """Those that somebody is subscribed to, and whether there is a link for them."""
        rows = self.execute(
            """SELECT u.authority, u.ue_id, u.version, u.resource, l.topic IS NOT NULL
               FROM uri u LEFT JOIN link l ON l.topic = u.id
               WHERE l.topic IS NOT NULL OR EXISTS (SELECT 1 FROM subscription s WHERE s.topic = u.id)"""
        ).fetchall()
        return [(row[:4], bool(row[4])) for row in rows]

    def shared(self, authority: str) -> tuple[list[Key], list[tuple[Key, Key]], list[tuple[Key, int, Key | None]]]:
        """Topics of `authority` that somebody has here; (topic, subscriber) of its clients elsewhere; their
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
        """False: it was registered already. Topic 0: for everything."""
        who = self.id(client)
        done = self.execute("INSERT OR IGNORE INTO registration VALUES(?, ?, ?)", (topic, who, major))
        if done.rowcount and self._clients is not None:  # a streamer of version 3 registers for each topic by itself
            self._clients.setdefault(topic, []).append((client, major))
        return bool(done.rowcount)

    def unregister(self, topic: int, client: Key, major: int) -> bool:
        """False: it was not registered."""
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

    def registered(self, topic: int) -> list[Client]:
        """Clients to be told of changes of this topic. Nobody, as a rule, or one streamer for everything: so don't ask
        the disk."""
        if self._clients is None:
            self._clients = {}
            for at, client, major in self._registrations():
                self._clients.setdefault(at, []).append((self.key(client), major))
        return [*self._clients.get(0, ()), *self._clients.get(topic, ())]

    def _registrations(self) -> list[tuple[int, int, int]]:
        return self.execute("SELECT topic, client, major FROM registration ORDER BY topic, client, major").fetchall()

    # -- changes to be told

    def note(self, change: Change, recipients: Sequence[Client]) -> StoredChange:
        """Into the outbox with it, at the end of the batch."""
        self.number += 1
        self._telling.append((self.number, write_change(change, recipients)))
        return StoredChange(self.number, change, tuple(recipients))

    def _store_changes(self) -> None:
        """Those of the whole batch."""
        stored = self.insert("outbox(id, change)", self._telling)
        if self.number % 1024 < stored:  # now and then
            dropped = self.execute("DELETE FROM outbox WHERE id <= ?", (self.number - self._outbox_max,)).rowcount
            self.dropped += max(dropped, 0)
        self._telling.clear()

    def hold(self, changes: Iterable[tuple[str, int, Change, Sequence[Client]]]) -> None:
        """At the limit the destination that holds most loses its oldest."""
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
            self.dropped += self._let_go(f"destination = ?1 AND {oldest}", (longest, max(1, self._outbox_max // 64)))

    def release(self, destination: str, number: int) -> None:
        self._let_go("destination = ? AND number <= ?", (destination, number))

    def _let_go(self, which: str, values: Sequence[Any]) -> int:
        """How many changes waited no longer for a destination."""
        (weight,) = self.execute(f"SELECT coalesce(sum({HELD_WEIGHT}), 0) FROM held WHERE {which}", values).fetchone()
        self.held -= weight
        return self.execute(f"DELETE FROM held WHERE {which}", values).rowcount

    # -- all of it

    def reset(self) -> None:
        """Everything goes, then everybody who was subscribed or registered is told."""
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
        for_all, told = registered.get(0, []), set[Client]()
        query = f"SELECT topic, subscriber, {_RECORD} FROM subscription ORDER BY seq"
        for topic, subscriber, *row in self.execute(query).fetchall():
            _, major, expires_ms, period, details, bare = record_of(row)
            ended = Status.UNSUBSCRIBED
            change = Change(keys[topic], keys[subscriber], ended, major, expires_ms, period, details, bare)
            recipients = [(change.subscriber, major)]
            recipients += [client for client in (*for_all, *registered.get(topic, ())) if client != recipients[0]]
            told.update(recipients)
            yield (write_change(change, recipients),)
        for topic, clients in registered.items():
            for client in clients:
                if client not in told:
                    told.add(client)
                    change = Change(keys[topic] if topic else UNSEEN, client[0], Status.UNSUBSCRIBED, client[1])
                    yield (write_change(change, [client]),)


class StoredRecords:
    """The records of one topic, as the machine wants to see them."""

    def __init__(self, tables: Tables, topic: int) -> None:
        self._tables, self._topic = tables, topic
        self.seen: dict[Key, Record] = {}  # by subscriber, as far as anybody asked

    def get(self, subscriber: Key, /) -> Record | None:
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

    def items(self) -> list[tuple[Key, Record]]:
        rows = self._tables.execute(
            f"SELECT subscriber, {_RECORD} FROM subscription WHERE topic = ? ORDER BY seq", (self._topic,)
        ).fetchall()
        found = [(self._tables.key(row[0]), record_of(row[1:])) for row in rows]
        self.seen.update(found)
        return found


def record_of(row: Sequence[Any]) -> Record:
    return Record(Status(row[0]), row[1], row[2], row[3], row[4] or b"", bool(row[5]))
