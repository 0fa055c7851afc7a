"""The state of the service in one SQLite file. Blocks, so it lives on the store's threads.

apply([event, ...]) --one transaction--> state.step on what is stored --> records, links, outbox --commit--> [Outcome, ...]
Reader: the committed state, for questions

A change is stored in the outbox with those who are to be told, in the transaction that makes it, and leaves it once it
was sent; a link carries the command that the remote service has not answered. So a crash between any two steps loses
neither.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import sqlite3
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import structlog

from storage import mark as marks
from storage.disk import REAL_DISK, Disk, Mark
from uprotocol import uri as uris
from uprotocol.status import UStatusError
from uprotocol.v1.ucode_pb2 import UCode
from usubscription.handled import Handled
from usubscription.quota import UNIT_BYTES, Quota, caller, weight
from usubscription.reader import Reader, StoredChange, read_link, write_change
from usubscription.schema import StoreFile, explain
from usubscription.state import (
    Change,
    Ended,
    Event,
    Key,
    Link,
    Moved,
    Orphaned,
    Record,
    Status,
    Subscribe,
    TimedOut,
    Unsubscribe,
    is_past,
    step,
)

SUBSCRIPTIONS_MAX: Final = 5_000_000  # some 1 GB on disk; beyond it Subscribe answers RESOURCE_EXHAUSTED
REGISTRATIONS_MAX: Final = 200_000  # of topics: one per topic and streamer
REGISTERED_FOR_ALL_MAX: Final = 1_000  # each gets every change there is
DETAILS_BYTES_MAX: Final = 4_096  # of one subscription: each change of it carries them to everybody who is told
# changes waiting for the network, a Reset of a full store included; then the oldest are dropped
OUTBOX_CHANGES_MAX: Final = 3_000_000
HELD_UNIT_CHARACTERS: Final = 2 * UNIT_BYTES  # details are two for each byte; a change is some 250 beside them
HELD_WEIGHT: Final = f"1 + length(change) / {HELD_UNIT_CHARACTERS}"  # in SQL
OUTBOX_ROWS_AT_ONCE: Final = 100  # of one INSERT; SQLite allows 16,000
URIS_CACHED_MAX: Final = 131_072  # ids of recent URIs; the cache starts anew when it is full

log = structlog.get_logger()

V3: Final = 3  # the version whose subscribers hear of their own end
UNSEEN: Final[Key] = ("", 0, 0, 0)
"""The topic of a message that is about none: the end of a registration for everything."""


# -- events that are not about one topic
# ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Register:
    """`topic` None: for everything, as version 4 does."""

    client: Key
    major: int
    topic: Key | None


@dataclass(frozen=True, slots=True)
class Unregister:
    client: Key
    major: int
    topic: Key | None


@dataclass(frozen=True, slots=True)
class Reset:
    """Forget what is shared with the authority `of`, or everything (None), and tell whom it concerned."""

    of: str | None = None


@dataclass(frozen=True, slots=True)
class Sent:
    """The changes up to this number have been told."""

    number: int


@dataclass(frozen=True, slots=True)
class Probe:
    """Write something, to see whether the disk takes it."""


@dataclass(frozen=True, slots=True)
class Commanded:
    """A client's command, with the id of its request (16 bytes): one that comes again does not undo a later one."""

    event: Subscribe | Unsubscribe
    request: bytes


@dataclass(frozen=True, slots=True)
class Hold:
    """Keep these changes (destination, number, change, recipients there) until their destination takes them."""

    changes: tuple[tuple[str, int, Change, tuple[tuple[Key, int], ...]], ...]


@dataclass(frozen=True, slots=True)
class Released:
    """The changes held for `destination` up to this number have been told."""

    destination: str
    number: int


@dataclass(frozen=True, slots=True)
class Settle:
    """Bring topics whose authority this service answers for, or does not any more, to the right place: once after a
    start."""


StoreEvent = Settle | Event | Commanded | Probe | Register | Unregister | Reset | Sent | Hold | Released


@dataclass(slots=True)
class Outcome:
    """What became of one event."""

    answer: Status = Status.UNSUBSCRIBED
    changes: list[StoredChange] = field(default_factory=list)
    topic: Key | None = None
    link: Link | None = None  # of `topic`, if that changed
    many_changes: bool = False  # too many for a list: they are in the outbox only
    links: list[tuple[Key, Link]] = field(default_factory=list)  # of a Reset: those that it has changed
    tag: Any = None


class Database:
    """The writing side; one thread at a time."""

    def __init__(
        self,
        path: Path | str,
        authority: str,
        *,
        subscriptions_max: int = SUBSCRIPTIONS_MAX,
        outbox_changes_max: int = OUTBOX_CHANGES_MAX,
        majors: dict[str, int] | None = None,
        disk: Disk = REAL_DISK,
        also: Iterable[str] = (),
    ) -> None:
        self.path, self.authority, self._disk = Path(path), authority, disk
        self._own = frozenset((authority, *also))
        self._subscriptions_max, self._outbox_max = subscriptions_max, outbox_changes_max
        self.subscriptions = Quota("subscriptions", subscriptions_max, self._own)
        self._for_topics = self._for_all = Quota("registrations", 0, self._own)  # until they are loaded
        self._majors = majors or {}
        self._ids: dict[Key, int] = {}
        self._keys: dict[int, Key] = {}
        self._unused: set[int] = set()
        self._held = 0  # changes that wait for a destination of theirs; one with long details counts as several
        self._number = 0  # of the last change
        self._telling: list[Any] = []  # number and text of the changes of this batch, in turn
        self._clients: dict[int, list[tuple[Key, int]]] | None = None  # registered, by topic (0: all); None: to be read
        self._handled: Handled | None = None  # None: to be read
        self.refused: Counter[str] = Counter()  # by the limit that was reached
        self.outbox_dropped = 0
        # that were committed once: the file, or the end of its write-ahead log, was damaged or an older copy
        self.lost_changes = 0
        self._store_id = b""
        self._mark: Mark | None = None
        self._file: StoreFile | None = None
        self._db: sqlite3.Connection | None = None

    def __repr__(self) -> str:
        return f"Database({self.path}, {self.authority}, subscriptions={self.subscriptions!r})"

    def open(self) -> None:
        """Raises UStatusError as StoreFile does."""
        self._file = StoreFile(self.path, self.authority, self._disk)
        assert self._file.db is not None
        self._db = self._file.db
        try:
            self._load(self._db)
        except sqlite3.Error as error:
            raise explain(error, self.path) from error

    def _load(self, db: sqlite3.Connection) -> None:
        self._load_quotas(db)
        (self._held,) = db.execute(f"SELECT coalesce(sum({HELD_WEIGHT}), 0) FROM held").fetchone()
        (last,) = db.execute("SELECT coalesce(max(generation), 0) FROM link").fetchone()
        self._generations = itertools.count(last + 1)
        self._number = self._last_number(db)
        self._clients = self._handled = None
        self._heed_mark(db)

    def _load_quotas(self, db: sqlite3.Connection) -> None:
        """What is there stays, also where it is more than a share of today."""
        self.subscriptions = Quota("subscriptions", self._subscriptions_max, self._own)
        self._for_topics = Quota("registrations for topics", REGISTRATIONS_MAX, self._own)
        self._for_all = Quota("registrations for everything", REGISTERED_FOR_ALL_MAX, self._own)
        stored = db.execute(
            """SELECT c.authority, c.ue_id, sum(1 + ifnull(length(s.details), 0) / ?) FROM subscription s JOIN uri c ON
            c.id = s.subscriber
               GROUP BY s.subscriber""",
            (UNIT_BYTES,),
        )
        for authority, ue_id, count in stored:
            self.subscriptions.add((authority, ue_id), count)
        registered = db.execute(
            "SELECT c.authority, c.ue_id, r.topic FROM registration r JOIN uri c ON c.id = r.client"
        )
        for authority, ue_id, topic in registered:
            (self._for_topics if topic else self._for_all).add((authority, ue_id), 1)

    @property
    def _quotas(self) -> tuple[Quota, ...]:
        return self.subscriptions, self._for_topics, self._for_all

    def _heed_mark(self, db: sqlite3.Connection) -> None:
        """SQLite cuts a damaged write-ahead log in silence; the mark beside the file says how far we had come."""
        marked: marks.Marked | None = None
        try:
            self._mark = self._disk.mark(Path(f"{self.path}.mark"))
            marked = marks.unpack(self._mark.read(marks.SIZE))
        except (OSError, marks.BadMarkError) as error:
            log.warning(
                "the mark of the subscriptions can't be used, and begins anew", path=str(self.path), why=str(error)
            )
        row = db.execute("SELECT value FROM meta WHERE key = 'id'").fetchone()
        if row is None:  # of an older program; or the name was lost with the write-ahead log, and then the mark has it
            row = ((os.urandom(16) if marked is None else marked.incarnation).hex(),)
            try:
                db.execute("INSERT INTO meta VALUES('id', ?)", row)
            except sqlite3.OperationalError:  # a disk that is full, say; then the next start makes it
                return
        self._store_id = bytes.fromhex(row[0])
        if marked is not None and marked.incarnation == self._store_id and marked.seq > self._number:
            self.lost_changes = marked.seq - self._number
            self._number = marked.seq  # no number names two changes
            log.error(
                "changes of subscriptions are lost: the end of the store was damaged",
                path=str(self.path),
                changes=self.lost_changes,
            )
        if self._mark is not None:
            with contextlib.suppress(OSError):
                self._mark.begin(marks.pack(self._store_id, self._number))

    def _last_number(self, db: sqlite3.Connection) -> int:
        row = db.execute("SELECT seq FROM sqlite_sequence WHERE name = 'outbox'").fetchone()
        return int(row[0]) if row is not None else 0

    def close(self) -> None:
        """May be called twice."""
        self._db = None
        if self._mark is not None:
            self._mark.close()
            self._mark = None
        if self._file is not None:
            self._file.close()

    # -- applying
    # ------------------------------------------------------------------------------------------------------------------

    def apply(self, events: Iterable[StoreEvent], now_ms: int) -> list[Outcome | UStatusError]:
        """All of `events` in order, in one transaction: committed when this returns.

        What one event may not do is its own UStatusError. Raises UStatusError (UNAVAILABLE, RESOURCE_EXHAUSTED) if the
        disk fails; then nothing of the batch is stored. DATA_LOSS: the file is damaged.
        """
        db = self._db
        assert db is not None, "open() comes first"
        counts = self._number, self._held
        for quota in self._quotas:
            quota.begin()
        try:
            db.execute("BEGIN IMMEDIATE")
            outcomes = [self._apply(db, event, now_ms) for event in events]
            if self._telling:
                self._store_changes(db)
            if self._handled is not None:
                self._handled.store(db)
            if self._unused:
                self._sweep(db)
            db.execute("COMMIT")
            if self._number != counts[0] and self._mark is not None:
                with contextlib.suppress(OSError):  # in place, without waiting for the disk
                    self._mark.write(marks.pack(self._store_id, self._number))
        except BaseException as error:
            self._number, self._held = counts
            for quota in self._quotas:
                quota.rollback()
            self._telling.clear()
            self._clients = self._handled = None
            self._ids.clear()
            self._keys.clear()
            self._unused.clear()
            with contextlib.suppress(sqlite3.Error):
                db.execute("ROLLBACK")
            if isinstance(error, sqlite3.Error):
                raise explain(error, self.path) from error
            raise
        return outcomes

    def _apply(self, db: sqlite3.Connection, event: StoreEvent, now_ms: int) -> Outcome | UStatusError:
        match event:
            case Sent(number):
                db.execute("DELETE FROM outbox WHERE id <= ?", (number,))
                return Outcome()
            case Probe():
                db.execute("INSERT OR REPLACE INTO meta VALUES('probed_ms', ?)", (str(now_ms),))
                return Outcome()
            case Commanded(command, request):
                return self._command(db, command, request, now_ms)
            case Hold(changes):
                self._hold(db, changes)
                return Outcome()
            case Released(destination, number):
                self._let_go(db, "destination = ? AND number <= ?", (destination, number))
                return Outcome()
            case Register():
                return self._register(db, event)
            case Unregister():
                self._unregister(db, event)
                return Outcome()
            case Reset():
                return self._reset(db) if event.of is None else self._reset_shared(db, event.of, now_ms)
            case Settle():
                return self._settle(db, now_ms)
            case Subscribe() if (refusal := self._refusal(db, event, now_ms)) is not None:
                return refusal
        return self._step(db, event, now_ms)

    def _refusal(self, db: sqlite3.Connection, event: Subscribe, now_ms: int) -> UStatusError | None:
        """Why it may not be stored. One that is there already, and takes no more room than it had, always may."""
        size = len(event.details)
        if size > DETAILS_BYTES_MAX:
            return self._full(
                "details", f"the details of a subscription take {size} bytes, and may take {DETAILS_BYTES_MAX}"
            )
        why = self.subscriptions.room(caller(event.subscriber), weight(size))
        if why is None or is_past(event.expires_ms, now_ms):
            return None
        topic = self._find(db, event.topic)
        known = _StoredRecords(self, db, topic).get(event.subscriber) if topic is not None else None
        if known is not None and weight(len(known.details)) >= weight(size):
            return None
        return self._full("subscriptions", why)

    def _full(self, reason: str, why: str) -> UStatusError:
        self.refused[reason] += 1
        return UStatusError(UCode.RESOURCE_EXHAUSTED, why)

    def _command(
        self, db: sqlite3.Connection, command: Subscribe | Unsubscribe, request: bytes, now_ms: int
    ) -> Outcome | UStatusError:
        """Networks deliver requests again, a late one behind its successors. Ids are compared for equality only: clocks
        go back."""
        if self._handled is None:
            self._handled = Handled(db)
        about = self._handled.about(command.subscriber, command.topic)
        if self._handled.is_past(request, about):
            return UStatusError(
                UCode.ABORTED,
                "this request was handled before, and later ones about the topic since: it changes nothing",
            )
        done = self._apply(db, command, now_ms)
        if isinstance(done, Outcome):
            self._handled.add(request, about)
        return done

    def _step(self, db: sqlite3.Connection, event: Event, now_ms: int) -> Outcome:
        remote = not uris.is_one_of(event.topic[0], self._own)
        creates = isinstance(event, Subscribe | Orphaned)
        topic = self._id(db, event.topic) if creates else self._find(db, event.topic)
        if topic is None:
            return Outcome()
        link = self._link(db, topic) if remote or isinstance(event, Moved) else Link()
        records = _StoredRecords(self, db, topic)
        done = step(event, records, link, remote=remote, now_ms=now_ms, generation=next(self._generations))
        if done.link.command is not None and done.link.generation != link.generation:
            done.link = done.link._replace(major=self._majors.get(event.topic[0], done.link.major))
        for subscriber, record in done.records.items():
            self._keep(db, topic, subscriber, record, records.seen.get(subscriber))
        outcome = Outcome(done.answer, self._tell(db, topic, done.changes))
        if done.link != link:
            self._keep_link(db, topic, done.link)
            outcome.topic, outcome.link = event.topic, done.link
        elif isinstance(event, TimedOut):
            outcome.topic, outcome.link = event.topic, link
        if done.link.state is Status.UNSUBSCRIBED and (not done.records or None in done.records.values()):
            self._unused.add(topic)  # perhaps: the sweep looks
        return outcome

    def _settle(self, db: sqlite3.Connection, now_ms: int) -> Outcome:
        """What it changes is in the outbox."""
        rows = db.execute(
            """SELECT u.authority, u.ue_id, u.version, u.resource, l.topic IS NOT NULL FROM uri u LEFT JOIN link l ON
            l.topic = u.id
               WHERE l.topic IS NOT NULL OR EXISTS (SELECT 1 FROM subscription s WHERE s.topic = u.id)"""
        ).fetchall()
        for *topic, is_linked in rows:
            if uris.is_one_of(topic[0], self._own) == bool(is_linked):
                self._step(db, Moved((topic[0], topic[1], topic[2], topic[3])), now_ms)
        db.execute("INSERT OR REPLACE INTO meta VALUES('answers_for', ?)", (" ".join(sorted(self._own)),))
        return Outcome()

    def _keep(
        self, db: sqlite3.Connection, topic: int, subscriber: Key, record: Record | None, known: Record | None
    ) -> None:
        who = self._id(db, subscriber)
        had, has = (weight(len(one.details)) if one is not None else 0 for one in (known, record))
        self.subscriptions.add(caller(subscriber), has - had)
        if record is None:
            db.execute("DELETE FROM subscription WHERE subscriber = ? AND topic = ?", (who, topic))
            self._unused.add(who)
            return
        status, major, expires_ms, period, details, bare = record
        values = (int(status), major, expires_ms, period, details or None, bare, who, topic)
        if known is not None:
            db.execute(
                """UPDATE subscription SET status = ?, major = ?, expires_ms = ?, sample_period_ms = ?, details = ?,
                bare = ?
                   WHERE subscriber = ? AND topic = ?""",
                values,
            )
        else:
            db.execute(
                """INSERT INTO subscription(status, major, expires_ms, sample_period_ms, details, bare, subscriber,
                topic)
                   VALUES(?, ?, ?, ?, ?, ?, ?, ?)""",
                values,
            )

    def _link(self, db: sqlite3.Connection, topic: int) -> Link:
        row = db.execute(
            "SELECT state, major, command, generation, attempt, sample_period_ms FROM link WHERE topic = ?", (topic,)
        ).fetchone()
        return read_link(row) if row is not None else Link()

    def _keep_link(self, db: sqlite3.Connection, topic: int, link: Link) -> None:
        if link.state is Status.UNSUBSCRIBED:
            db.execute("DELETE FROM link WHERE topic = ?", (topic,))
        else:
            db.execute("INSERT OR REPLACE INTO link VALUES(?, ?, ?, ?, ?, ?, ?)", (topic, *link))

    # -- telling
    # ------------------------------------------------------------------------------------------------------------------

    def _tell(self, db: sqlite3.Connection, topic: int, changes: Sequence[Change]) -> list[StoredChange]:
        if not changes:
            return []
        registered = self._registered(db, topic)
        stored = []
        for change in changes:
            recipients = [(change.subscriber, change.major)] if change.tell_subscriber else []
            for client in registered:
                if client not in recipients and (client[1] >= 4 or change.status_changed):
                    recipients.append(client)
            stored.append(self._note(change, recipients))
        return stored

    def _note(self, change: Change, recipients: Sequence[tuple[Key, int]]) -> StoredChange:
        """Into the outbox with it, at the end of the batch."""
        self._number += 1
        self._telling += (self._number, write_change(change, recipients))
        return StoredChange(self._number, change, tuple(recipients))

    def _store_changes(self, db: sqlite3.Connection) -> None:
        """Those of the whole batch, in few statements: each statement gives up Python's lock, and has to wait for it
        again."""
        for start in range(0, len(self._telling), 2 * OUTBOX_ROWS_AT_ONCE):
            part = self._telling[start : start + 2 * OUTBOX_ROWS_AT_ONCE]
            db.execute(f"INSERT INTO outbox(id, change) VALUES {', '.join(['(?, ?)'] * (len(part) // 2))}", part)
        if self._number % 1024 < len(self._telling) // 2:  # now and then
            dropped = db.execute("DELETE FROM outbox WHERE id <= ?", (self._number - self._outbox_max,)).rowcount
            self.outbox_dropped += max(dropped, 0)
        self._telling.clear()

    def _hold(
        self, db: sqlite3.Connection, changes: Sequence[tuple[str, int, Change, Sequence[tuple[Key, int]]]]
    ) -> None:
        """At the limit the destination that holds most loses its oldest."""
        fresh = {
            (destination, number): write_change(change, recipients)
            for destination, number, change, recipients in changes
            if not self._is_held(db, destination, number)
        }
        db.executemany("INSERT INTO held VALUES(?, ?, ?)", [(*key, text) for key, text in fresh.items()])
        self._held += sum(1 + len(text) // HELD_UNIT_CHARACTERS for text in fresh.values())
        while self._held > self._outbox_max:
            (longest,) = db.execute(
                f"SELECT destination FROM held GROUP BY destination ORDER BY sum({HELD_WEIGHT}) DESC LIMIT 1"
            ).fetchone()
            oldest = "destination = ?1 AND number IN (SELECT number FROM held WHERE destination = ?1 ORDER BY number LIMIT ?2)"
            self.outbox_dropped += self._let_go(db, oldest, (longest, max(1, self._outbox_max // 64)))

    def _is_held(self, db: sqlite3.Connection, destination: str, number: int) -> bool:
        return (
            db.execute("SELECT 1 FROM held WHERE destination = ? AND number = ?", (destination, number)).fetchone()
            is not None
        )

    def _let_go(self, db: sqlite3.Connection, which: str, values: Sequence[Any]) -> int:
        """How many changes waited no longer for a destination."""
        (weight,) = db.execute(f"SELECT coalesce(sum({HELD_WEIGHT}), 0) FROM held WHERE {which}", values).fetchone()
        self._held -= weight
        return db.execute(f"DELETE FROM held WHERE {which}", values).rowcount

    def _registered(self, db: sqlite3.Connection, topic: int) -> list[tuple[Key, int]]:
        """Clients to be told of changes of this topic. Nobody, as a rule, or one streamer for everything: so don't ask
        the disk."""
        if self._clients is None:
            self._clients = {}
            for at, client, major in db.execute(
                "SELECT topic, client, major FROM registration ORDER BY topic, client, major"
            ).fetchall():
                self._clients.setdefault(at, []).append((self._key(db, client), major))
        return [*self._clients.get(0, ()), *self._clients.get(topic, ())]

    def _register(self, db: sqlite3.Connection, event: Register) -> Outcome | UStatusError:
        topic = 0 if event.topic is None else self._id(db, event.topic)
        client = self._id(db, event.client)
        done = db.execute("INSERT OR IGNORE INTO registration VALUES(?, ?, ?)", (topic, client, event.major))
        if not done.rowcount:
            return Outcome()  # it was registered already
        self._clients = None
        quota = self._for_topics if topic else self._for_all
        if (why := quota.room(caller(event.client))) is not None:
            db.execute(
                "DELETE FROM registration WHERE topic = ? AND client = ? AND major = ?", (topic, client, event.major)
            )
            self._unused.update((topic, client))
            return self._full("registrations", why)
        quota.add(caller(event.client), 1)
        return Outcome()

    def _unregister(self, db: sqlite3.Connection, event: Unregister) -> None:
        topic = 0 if event.topic is None else self._find(db, event.topic)
        client = self._find(db, event.client)
        if topic is not None and client is not None:
            done = db.execute(
                "DELETE FROM registration WHERE topic = ? AND client = ? AND major = ?", (topic, client, event.major)
            )
            (self._for_topics if topic else self._for_all).add(caller(event.client), -done.rowcount)
            self._clients = None
            self._unused.update((topic, client))

    def _reset(self, db: sqlite3.Connection) -> Outcome:
        """Everything goes, then everybody who was subscribed or registered is told."""
        self._store_changes(db)  # of earlier events of this batch
        keys: dict[int, Key] = {
            row[0]: row[1:5] for row in db.execute("SELECT id, authority, ue_id, version, resource FROM uri")
        }
        registered: dict[int, list[tuple[Key, int]]] = {}
        for topic, client, major in db.execute(
            "SELECT topic, client, major FROM registration ORDER BY topic, client, major"
        ):
            registered.setdefault(topic, []).append((keys[client], major))
        for_all, told = registered.get(0, []), set[tuple[Key, int]]()

        def changes() -> Iterator[tuple[str]]:
            query = "SELECT topic, subscriber, major, expires_ms, sample_period_ms, details, bare FROM subscription ORDER BY seq"
            for topic, subscriber, major, expires_ms, period, details, bare in db.execute(query).fetchall():
                ended = Status.UNSUBSCRIBED
                change = Change(
                    keys[topic], keys[subscriber], ended, major, expires_ms, period, details or b"", bool(bare)
                )
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

        db.executemany("INSERT INTO outbox(change) VALUES(?)", changes())
        for table in ("subscription", "link", "registration", "uri"):
            db.execute(f"DELETE FROM {table}")
        self._ids.clear()
        self._keys.clear()
        self._unused.clear()
        if self._handled is not None:
            self._handled.store(db)
        db.execute("UPDATE handled SET about = 0")
        for quota in self._quotas:
            quota.clear()
        self._clients = self._handled = None
        self._number = self._last_number(db)
        return Outcome(many_changes=True)

    def _reset_shared(self, db: sqlite3.Connection, authority: str, now_ms: int) -> Outcome | UStatusError:
        """What we have agreed with the service of `authority`, and what its clients have here; what others have is not
        its to end."""
        if uris.is_one_of(authority, self._own):
            return _denied(f"this is the uSubscription of {authority}: only another one may reset what it shares")
        topics, subscribed, registered = self._shared(db, authority)
        if not (topics or subscribed or registered):
            return _denied(f"nothing is shared with the uSubscription of {authority}, so it can reset nothing")
        ended = [self._step(db, Ended(topic), now_ms) for topic in topics]
        ended += [self._step(db, Unsubscribe(topic, subscriber, V3), now_ms) for topic, subscriber in subscribed]
        outcome = Outcome(changes=[stored for one in ended for stored in one.changes])
        outcome.links = [(one.topic, one.link) for one in ended if one.topic is not None and one.link is not None]
        if self._handled is None:
            self._handled = Handled(db)
        abouts = {Handled.about(stored.change.subscriber, stored.change.topic) for stored in outcome.changes}
        self._handled.reset(db, abouts)
        told = {recipient for stored in outcome.changes for recipient in stored.recipients}
        for client, major, topic in registered:
            self._unregister(db, Unregister(client, major, topic))
            if (client, major) not in told:
                told.add((client, major))
                change = Change(topic or UNSEEN, client, Status.UNSUBSCRIBED, major)
                outcome.changes.append(self._note(change, [(client, major)]))
        return outcome

    def _shared(
        self, db: sqlite3.Connection, authority: str
    ) -> tuple[list[Key], list[tuple[Key, Key]], list[tuple[Key, int, Key | None]]]:
        """Topics of `authority` that somebody has here; (topic, subscriber) of its clients elsewhere; their
        registrations."""
        topics = db.execute(
            """SELECT authority, ue_id, version, resource FROM uri u WHERE authority = ? AND (EXISTS(SELECT 1 FROM link
            WHERE topic = u.id)
               OR EXISTS(SELECT 1 FROM subscription WHERE topic = u.id)) ORDER BY id""",
            (authority,),
        ).fetchall()
        clients = db.execute(
            """SELECT t.authority, t.ue_id, t.version, t.resource, c.authority, c.ue_id, c.version, c.resource
               FROM uri c JOIN subscription s ON s.subscriber = c.id JOIN uri t ON t.id = s.topic
               WHERE c.authority = ?1 AND t.authority != ?1 ORDER BY s.seq""",
            (authority,),
        ).fetchall()
        registered = db.execute(
            """SELECT c.id, r.major, r.topic FROM uri c JOIN registration r ON r.client = c.id WHERE c.authority = ?
               ORDER BY r.topic, r.client, r.major""",
            (authority,),
        ).fetchall()
        return (
            topics,
            [(row[:4], row[4:]) for row in clients],
            [
                (self._key(db, client), major, self._key(db, topic) if topic else None)
                for client, major, topic in registered
            ],
        )

    # -- URIs
    # ------------------------------------------------------------------------------------------------------------------

    def _find(self, db: sqlite3.Connection, key: Key) -> int | None:
        known = self._ids.get(key)
        if known is None:
            row = db.execute(
                "SELECT id FROM uri WHERE authority = ? AND ue_id = ? AND version = ? AND resource = ?", key
            ).fetchone()
            if row is None:
                return None
            known = row[0]
            self._remember(key, known)
        return known

    def _id(self, db: sqlite3.Connection, key: Key) -> int:
        known = self._find(db, key)
        if known is None:
            cursor = db.execute("INSERT INTO uri(authority, ue_id, version, resource) VALUES(?, ?, ?, ?)", key)
            assert cursor.lastrowid is not None
            known = cursor.lastrowid
            self._remember(key, known)
        return known

    def _key(self, db: sqlite3.Connection, id: int) -> Key:
        known = self._keys.get(id)
        if known is None:
            known = db.execute("SELECT authority, ue_id, version, resource FROM uri WHERE id = ?", (id,)).fetchone()
            self._remember(known, id)
        return known

    def _remember(self, key: Key, id: int) -> None:
        if len(self._ids) >= URIS_CACHED_MAX:
            self._ids.clear()
            self._keys.clear()
        self._ids[key] = id
        self._keys[id] = key

    def _sweep(self, db: sqlite3.Connection) -> None:
        """Forget the URIs that nothing refers to any more, so that passing topics leave nothing behind."""
        for id in self._unused - {0}:
            gone = db.execute(
                """DELETE FROM uri WHERE id = ?1 AND NOT EXISTS(SELECT 1 FROM subscription WHERE topic = ?1)
                   AND NOT EXISTS(SELECT 1 FROM subscription WHERE subscriber = ?1) AND NOT EXISTS(SELECT 1 FROM link
                   WHERE topic = ?1) AND NOT EXISTS(SELECT 1 FROM registration WHERE topic = ?1)
                   AND NOT EXISTS(SELECT 1 FROM registration WHERE client = ?1)""",
                (id,),
            )
            if gone.rowcount:
                key = self._keys.pop(id, None)
                if key is not None:
                    self._ids.pop(key, None)
        self._unused.clear()

    def reader(self) -> Reader:
        return Reader(self.path, disk=self._disk)


class _StoredRecords:
    """The records of one topic, as the machine wants to see them."""

    def __init__(self, database: Database, db: sqlite3.Connection, topic: int) -> None:
        self._database, self._db, self._topic = database, db, topic
        self.seen: dict[Key, Record] = {}  # by subscriber, as far as anybody asked

    def get(self, subscriber: Key, /) -> Record | None:
        who = self._database._find(self._db, subscriber)
        if who is None:
            return None
        row = self._db.execute(
            "SELECT status, major, expires_ms, sample_period_ms, details, bare FROM subscription WHERE subscriber = ? "
            "AND topic = ?",
            (who, self._topic),
        ).fetchone()
        if row is None:
            return None
        self.seen[subscriber] = _record(row)
        return self.seen[subscriber]

    def has_others(self, subscriber: Key, /) -> bool:
        who = self._database._find(self._db, subscriber)
        row = self._db.execute(
            "SELECT 1 FROM subscription WHERE topic = ? AND subscriber IS NOT ? LIMIT 1", (self._topic, who)
        ).fetchone()
        return row is not None

    def items(self) -> list[tuple[Key, Record]]:
        rows = self._db.execute(
            "SELECT subscriber, status, major, expires_ms, sample_period_ms, details, bare FROM subscription WHERE "
            "topic = ? ORDER BY seq",
            (self._topic,),
        ).fetchall()
        found = [(self._database._key(self._db, row[0]), _record(row[1:])) for row in rows]
        self.seen.update(found)
        return found


def _denied(why: str) -> UStatusError:
    return UStatusError(UCode.PERMISSION_DENIED, why)


def _record(row: Sequence[Any]) -> Record:
    return Record(Status(row[0]), row[1], row[2], row[3], row[4] or b"", bool(row[5]))


__all__ = [
    "Commanded",
    "Database",
    "Hold",
    "Outcome",
    "Probe",
    "Reader",
    "Register",
    "Released",
    "Reset",
    "Sent",
    "StoreEvent",
    "StoredChange",
    "Unregister",
]
