"""Reads the committed state of a store.

StoreReader: subscribers of a topic, matching subscriptions, expired ones, links, registrations, the outbox
"""

from __future__ import annotations

import json
import sqlite3
import sys
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any, Final

from storage.disk import REAL_DISK, Disk
from storage.faults import DamagedError
from uprotocol import uri as uris
from uprotocol.core.usubscription.wire import ENTITY_TYPE
from usubscription.state import Key, RemoteLink, Row, Status
from usubscription.store.tables import PRAGMAS, STORE, URI_IS, StoredChange, read_change, read_link, to_key

_STATUSES: Final = tuple(Status)
_ROWS: Final = """SELECT t.authority, t.ue_id, t.version, t.resource, c.authority, c.ue_id, c.version, c.resource,
    s.status, s.expires_ms, s.sample_period_ms, s.details, s.seq
    FROM subscription s JOIN uri t ON t.id = s.topic JOIN uri c ON c.id = s.subscriber"""


class StoreReader:
    """Queries of the committed state, on a connection of its own."""

    def __init__(self, path: Path, *, from_outside: bool = False, disk: Disk = REAL_DISK) -> None:
        """`from_outside`: check that the file is a store of a known version, and write nothing. Raises UStatusError as
        FileKind.not_opened, and FAILED_PRECONDITION."""
        self.path, self._db = path, disk.look(path) if from_outside else disk.connect(path)
        try:
            for setting in (*PRAGMAS, "query_only = ON"):
                self._db.execute(f"PRAGMA {setting}")
            if from_outside and STORE.version_of(self._db, path) is None:
                raise STORE.refusal(path, "nothing is in it")
        except BaseException as error:
            self._db.close()
            if isinstance(error, sqlite3.Error):
                raise STORE.not_opened(error, path) from None
            raise

    def close(self) -> None:
        self._db.close()

    def subscribers(self, topic: Key, now_ms: int, offset: int, limit: int) -> tuple[list[Key], bool]:
        """Subscribers of exactly `topic`, in the order of their subscriptions, and whether more follow."""
        # a single row for all of them: SQLite releases Python's lock at each row, and then waits for the writer
        (text,) = self._db.execute(
            f"""SELECT json_group_array(json_array(authority, ue_id, version, resource)) FROM (
               SELECT c.authority, c.ue_id, c.version, c.resource FROM subscription s JOIN uri c ON c.id = s.subscriber
               WHERE s.topic = (SELECT id FROM uri WHERE {URI_IS})
               AND (s.expires_ms IS NULL OR s.expires_ms >= ?) ORDER BY s.seq LIMIT ? OFFSET ?)""",
            (*topic, now_ms, limit + 1, offset),
        ).fetchone()
        found = [to_key(parts) for parts in json.loads(text)]
        return found[:limit], len(found) > limit

    def pairs(self) -> Iterator[tuple[Key, Key, int | None]]:
        """(topic, subscriber, expires_ms) of all subscriptions, in their order. Equal keys are one object."""
        keys: dict[int, Key] = {
            id: (sys.intern(authority), *rest) for id, authority, *rest in self._db.execute("SELECT * FROM uri")
        }
        for topic, subscriber, expires_ms in self._db.execute(
            "SELECT topic, subscriber, expires_ms FROM subscription ORDER BY seq"
        ):
            yield keys[topic], keys[subscriber], expires_ms

    def each(
        self,
        topic: Key | None,
        subscriber: Key | None,
        now_ms: int,
        *,
        after: int = 0,
        offset: int = 0,
    ) -> Generator[tuple[int, Row], None, None]:
        """Subscriptions that match both patterns (None: any), with their numbers, in their order, beginning after
        number `after` and then with the one at `offset`."""
        wheres, values = ["(s.expires_ms IS NULL OR s.expires_ms >= ?)", "s.seq > ?"], [now_ms, after]
        for alias, column, pattern in (("t", "topic", topic), ("c", "subscriber", subscriber)):
            if pattern is not None:
                condition, parameters = _matches(alias, column, pattern)
                wheres.append(condition)
                values.extend(parameters)
        query = f"{_ROWS} WHERE {' AND '.join(wheres)} ORDER BY s.seq LIMIT -1 OFFSET ?"
        for row in self._db.execute(query, (*values, offset)):
            yield row[12], Row(row[0:4], row[4:8], _STATUSES[row[8]], row[9], row[10], row[11] or b"")

    def expired(self, now_ms: int, limit: int) -> tuple[list[tuple[Key, Key]], int | None]:
        """(topic, subscriber) of expired subscriptions, the oldest first, and when the next one expires (Unix ms)."""
        rows = self._db.execute(
            f"{_ROWS} WHERE s.expires_ms < ? ORDER BY s.expires_ms LIMIT ?", (now_ms, limit)
        ).fetchall()
        (following,) = self._db.execute(
            "SELECT min(expires_ms) FROM subscription WHERE expires_ms >= ?", (now_ms,)
        ).fetchone()
        return [(row[0:4], row[4:8]) for row in rows], following

    def links(self, authority: str | None = None) -> list[tuple[Key, RemoteLink]]:
        """All links (to `authority`), in the order of their commands."""
        # uses the index of addresses, since an audit reads the links of each vehicle
        which, values = ("", ()) if authority is None else ("WHERE u.authority = ?", (authority,))
        rows = self._db.execute(
            f"""SELECT u.authority, u.ue_id, u.version, u.resource, l.state, l.major, l.command, l.generation,
                l.attempt, l.sample_period_ms
                FROM uri u JOIN link l ON l.topic = u.id {which} ORDER BY l.generation""",
            values,
        ).fetchall()
        return [(row[0:4], read_link(row[4:])) for row in rows]

    def linked(self) -> list[tuple[str, int]]:
        """(authority, major) of services with a link without a pending command."""
        return self._db.execute(
            """SELECT u.authority, l.major FROM link l JOIN uri u ON u.id = l.topic WHERE l.command IS NULL
               GROUP BY u.authority, l.major ORDER BY min(l.generation)"""
        ).fetchall()

    def link_count(self, authority: str) -> int:
        query = "SELECT count(*) FROM uri u JOIN link l ON l.topic = u.id WHERE u.authority = ?"
        return int(self._db.execute(query, (authority,)).fetchone()[0])

    def subscribing(self, authority: str | None = None) -> list[tuple[str, int]]:
        """(authority, major) of other services (`authority`: only its own) that have subscribed here."""
        # uses the index of addresses, since an audit asks this of one authority
        which, values = ("", ()) if authority is None else ("c.authority = ? AND", (authority,))
        query = f"""SELECT DISTINCT c.authority, s.major FROM uri c JOIN subscription s ON s.subscriber = c.id
                    WHERE {which} c.ue_id & 65535 = {ENTITY_TYPE} AND s.major = c.version"""
        return self._db.execute(query, values).fetchall()

    def registrations(self) -> list[tuple[Key, int, Key | None]]:
        """(client, major, topic; None: everything)."""
        rows = self._db.execute(
            """SELECT c.authority, c.ue_id, c.version, c.resource, r.major, t.authority, t.ue_id, t.version, t.resource
               FROM registration r JOIN uri c ON c.id = r.client LEFT JOIN uri t ON t.id = r.topic ORDER BY r.topic,
               r.client, r.major"""
        ).fetchall()
        return [(row[0:4], row[4], row[5:9] if row[5] is not None else None) for row in rows]

    def outbox(self, after: int, limit: int) -> list[StoredChange]:
        return self._changes("SELECT id, change FROM outbox WHERE id > ? ORDER BY id LIMIT ?", after, limit)

    def held(self, destination: str, limit: int) -> list[StoredChange]:
        """The oldest changes that are held for `destination`."""
        query = "SELECT number, change FROM held WHERE destination = ? ORDER BY number LIMIT ?"
        return self._changes(query, destination, limit)

    def _changes(self, query: str, *values: str | int) -> list[StoredChange]:
        """Raises DATA_LOSS for text that can't be read: SQLite does not detect damage there."""
        rows = self._db.execute(query, values).fetchall()
        try:
            return [read_change(number, text) for number, text in rows]
        except (ValueError, TypeError, AttributeError) as error:
            damage = DamagedError(f"a change in it can't be read: {error!r}")
            raise STORE.fault(damage, self.path, "read") from None

    def destinations_held(self) -> list[str]:
        return [destination for (destination,) in self._db.execute("SELECT DISTINCT destination FROM held").fetchall()]

    def outbox_last(self) -> int:
        return self._number("SELECT coalesce(max(id), 0) FROM outbox")

    def outbox_count(self) -> int:
        return self._number("SELECT (SELECT count(*) FROM outbox) + (SELECT count(*) FROM held)")

    def authority(self) -> str:
        (authority,) = self._db.execute("SELECT value FROM meta WHERE key = 'authority'").fetchone()
        return str(authority)

    def answers_for(self) -> set[str]:
        """The authorities, and families of them, whose topics are stored as the service's own."""
        row = self._db.execute("SELECT value FROM meta WHERE key = 'answers_for'").fetchone()
        return set(row[0].split()) if row is not None else {self.authority()}

    def data_version(self) -> int:
        """Changes after every commit of another connection."""
        return self._number("PRAGMA data_version")

    def count(self) -> int:
        return self._number("SELECT count(*) FROM subscription")

    def _number(self, query: str) -> int:
        (number,) = self._db.execute(query).fetchone()
        return int(number)


def _matches(alias: str, column: str, pattern: Key) -> tuple[str, list[Any]]:
    """dsn~uri-pattern-matching~2 in SQL: only wildcards of the pattern count."""
    authority, ue_id, version, resource = pattern
    equal: dict[str, Any] = {}
    if authority != uris.WILDCARD_AUTHORITY:
        equal[f"{alias}.authority"] = authority
    wild_type, wild_instance = ue_id & 0xFFFF == uris.WILDCARD_ENTITY_TYPE, ue_id >> 16 == uris.WILDCARD_ENTITY_INSTANCE
    if not wild_type and not wild_instance:
        equal[f"{alias}.ue_id"] = ue_id
    elif not wild_type:
        equal[f"({alias}.ue_id & 65535)"] = ue_id & 0xFFFF
    elif not wild_instance:
        equal[f"({alias}.ue_id >> 16)"] = ue_id >> 16
    if version != uris.WILDCARD_VERSION:
        equal[f"{alias}.version"] = version
    if resource != uris.WILDCARD_RESOURCE:
        equal[f"{alias}.resource"] = resource
    if len(equal) == 4:  # no wildcards: use the index
        return f"s.{column} = (SELECT id FROM uri WHERE {URI_IS})", list(pattern)
    return " AND ".join(f"{expression} = ?" for expression in equal) or "1", list(equal.values())
