"""The state of the service in one SQLite file. Blocks, so it lives on the store's threads.

apply([event, ...]) --one transaction--> state.step on what is stored -> tables.py: records, links, outbox -> commit
                                                                                              -> [Outcome, ...]
Reader: the committed state, for questions

A change is stored in the outbox with those who are to be told, in the transaction that makes it, and leaves it once it
was sent; a link carries the command that the remote service has not answered. So a crash between any two steps loses
neither.
"""

from __future__ import annotations

import itertools
import os
import sqlite3
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import structlog

from storage.disk import REAL_DISK, BadMarkError, Disk, Marked, read_mark
from storage.faults import DamagedError, is_full
from storage.file import SqliteFile, transaction
from storage.reserve import with_room
from uprotocol import uri as uris
from uprotocol.status import UStatusError
from uprotocol.v1.ucode_pb2 import UCode
from usubscription import state
from usubscription.handled import Handled
from usubscription.quota import UNIT_BYTES, Quota, caller, weight
from usubscription.state import Change, Event, Key, Link, Status, Subscribe, Unsubscribe
from usubscription.store import schema
from usubscription.store.reader import Reader, StoredChange
from usubscription.store.tables import UNSEEN, StoredRecords, Tables

SUBSCRIPTIONS_MAX: Final = 5_000_000  # some 1 GB on disk; beyond it Subscribe answers RESOURCE_EXHAUSTED
REGISTRATIONS_MAX: Final = 200_000  # of topics: one per topic and streamer
REGISTERED_FOR_ALL_MAX: Final = 1_000  # each gets every change there is
DETAILS_BYTES_MAX: Final = 4_096  # of one subscription: each change of it carries them to everybody who is told
# changes waiting for the network, a Reset of a full store included; then the oldest are dropped
OUTBOX_CHANGES_MAX: Final = 3_000_000
WAL_BYTES_MAX: Final = 8 << 20  # of the write-ahead log, once it was emptied
WAL_HELD_BYTES_MAX: Final = 32 << 20  # ... and while somebody reads the file: beyond it nothing is stored
V3: Final = 3  # the version whose subscribers hear of their own end

log = structlog.get_logger()

# -- events that are not about one topic


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
        self.path, self.authority = Path(path), authority
        self._own = frozenset((authority, *also))
        self._subscriptions_max = subscriptions_max
        self._majors = majors or {}
        pragmas = (*schema.PRAGMAS, f"journal_size_limit = {WAL_BYTES_MAX}")
        self._file = SqliteFile(schema.STORE, self.path, disk, pragmas)
        self._tables = Tables(self._file, outbox_changes_max)
        self._handled = Handled(self._tables)
        self._is_loaded = False  # what is counted in memory is what the file has
        self.refused: Counter[str] = Counter()  # by the limit that was reached
        # that were committed once: the file, or the end of its write-ahead log, was damaged or an older copy
        self.lost_changes = 0
        self._make_quotas()

    def __repr__(self) -> str:
        return f"Database({self.path}, {self.authority}, subscriptions={self.subscriptions!r})"

    @property
    def outbox_dropped(self) -> int:
        """Changes that were not told, because too many waited."""
        return self._tables.dropped

    @property
    def _quotas(self) -> tuple[Quota, ...]:
        return self.subscriptions, self._for_topics, self._for_all

    def open(self) -> None:
        """Raises UStatusError as schema.open_store and FileKind.not_opened do. A damaged file is left as it is."""
        with_room(self._file.disk.reserve, self.path, self._open)

    def _open(self) -> None:
        try:
            db = schema.open_store(self._file, self.authority)
            self._load()
            self._heed_mark(db)
        except (sqlite3.Error, OSError, DamagedError) as error:
            self.close()
            raise self._file.kind.not_opened(error, self.path) from error
        except UStatusError:
            self.close()
            raise

    def close(self) -> None:
        """May be called twice."""
        self._is_loaded = False
        self._file.close()

    def reader(self) -> Reader:
        return Reader(self.path, disk=self._file.disk)

    # -- what is counted in memory

    def _load(self) -> None:
        self._make_quotas()
        self._load_quotas()
        self._tables.load()
        (last,) = self._tables.execute("SELECT coalesce(max(generation), 0) FROM link").fetchone()
        self._generations = itertools.count(last + 1)
        self._handled.forget()
        self._is_loaded = True

    def _make_quotas(self) -> None:
        self.subscriptions = Quota("subscriptions", self._subscriptions_max, self._own)
        self._for_topics = Quota("registrations for topics", REGISTRATIONS_MAX, self._own)
        self._for_all = Quota("registrations for everything", REGISTERED_FOR_ALL_MAX, self._own)

    def _load_quotas(self) -> None:
        """What is there stays, also where it is more than a share of today."""
        stored = self._tables.execute(
            """SELECT c.authority, c.ue_id, sum(1 + ifnull(length(s.details), 0) / ?)
               FROM subscription s JOIN uri c ON c.id = s.subscriber GROUP BY s.subscriber""",
            (UNIT_BYTES,),
        )
        for authority, ue_id, count in stored:
            self.subscriptions.add((authority, ue_id), count)
        query = "SELECT c.authority, c.ue_id, r.topic FROM registration r JOIN uri c ON c.id = r.client"
        for authority, ue_id, topic in self._tables.execute(query):
            (self._for_topics if topic else self._for_all).add((authority, ue_id), 1)

    def _heed_mark(self, db: sqlite3.Connection) -> None:
        """SQLite cuts a damaged write-ahead log in silence; the mark beside the file says how far we had come."""
        marked: Marked | None = None
        tables, path = self._tables, str(self.path)
        try:
            marked = read_mark(self.path)
        except (OSError, BadMarkError) as error:
            log.warning("the mark of the subscriptions can't be used, and begins anew", path=path, why=str(error))
        row = db.execute("SELECT value FROM meta WHERE key = 'id'").fetchone()
        if row is None:  # of an older program; or the name was lost with the write-ahead log, and then the mark has it
            row = ((os.urandom(16) if marked is None else marked.incarnation).hex(),)
            try:
                db.execute("INSERT INTO meta VALUES('id', ?)", row)
            except sqlite3.OperationalError:  # a disk that is full, say; then the next start makes it
                return
        store_id = bytes.fromhex(row[0])
        if marked is not None and marked.incarnation == store_id and marked.seq > tables.number:
            self.lost_changes = marked.seq - tables.number
            tables.number = marked.seq  # no number names two changes
            what = "changes of subscriptions are lost: the end of the store was damaged"
            log.error(what, path=path, changes=self.lost_changes)
        try:
            self._file.begin_mark(store_id, tables.number)
        except OSError as error:
            log.warning("the mark of the subscriptions can't be written", path=path, why=str(error))

    # -- applying

    def apply(self, events: Iterable[StoreEvent], now_ms: int) -> list[Outcome | UStatusError]:
        """All of `events` in order, in one transaction: committed when this returns.

        What one event may not do is its own UStatusError. Raises UStatusError (UNAVAILABLE, RESOURCE_EXHAUSTED) if the
        disk fails; then nothing of the batch is stored. DATA_LOSS: the file is damaged.
        """
        work = list(events)
        return with_room(self._file.disk.reserve, self.path, lambda: self._try(work, now_ms))

    def _try(self, events: Sequence[StoreEvent], now_ms: int) -> list[Outcome | UStatusError]:
        try:
            db = self._file.connect()
            self._file.require_in_place()
            self._file.require_wal_below(WAL_HELD_BYTES_MAX)
            if not self._is_loaded:
                self._load()
            return self._apply_all(db, events, now_ms)
        except sqlite3.Error as error:
            self._file.reset()
            # where it is not full, nobody knows whether the transaction is on disk all the same
            self._is_loaded = self._is_loaded and is_full(error, self.path)
            raise self._file.kind.fault(error, self.path, "used") from error

    def _apply_all(
        self, db: sqlite3.Connection, events: Iterable[StoreEvent], now_ms: int
    ) -> list[Outcome | UStatusError]:
        tables = self._tables
        number, held = tables.number, tables.held
        for quota in self._quotas:
            quota.begin()
        try:
            with transaction(db):
                outcomes = [self._apply(event, now_ms) for event in events]
                self._handled.store()
                tables.finish()
        except BaseException:
            tables.number, tables.held = number, held
            tables.forget()
            self._handled.forget()
            for quota in self._quotas:
                quota.rollback()
            raise
        if tables.number != number:
            self._file.move_mark(tables.number)
        return outcomes

    def _apply(self, event: StoreEvent, now_ms: int) -> Outcome | UStatusError:
        tables = self._tables
        match event:
            case Sent(number):
                tables.execute("DELETE FROM outbox WHERE id <= ?", (number,))
            case Probe():
                tables.execute("INSERT OR REPLACE INTO meta VALUES('probed_ms', ?)", (str(now_ms),))
            case Hold(changes):
                tables.hold(changes)
            case Released(destination, number):
                tables.release(destination, number)
            case Unregister():
                self._unregister(event)
            case Settle():
                self._settle(now_ms)
            case Commanded(command, request):
                return self._command(command, request, now_ms)
            case Register():
                return self._register(event)
            case Reset():
                return self._reset() if event.of is None else self._reset_shared(event.of, now_ms)
            case Subscribe() if (refusal := self._refusal(event, now_ms)) is not None:
                return refusal
            case _:
                return self._step(event, now_ms)
        return Outcome()

    def _refusal(self, event: Subscribe, now_ms: int) -> UStatusError | None:
        """Why it may not be stored. One that is there already, and takes no more room than it had, always may."""
        size = len(event.details)
        if size > DETAILS_BYTES_MAX:
            why = f"the details of a subscription take {size} bytes, and may take {DETAILS_BYTES_MAX}"
            return self._full("details", why)
        full = self.subscriptions.room(caller(event.subscriber), weight(size))
        if full is None or state.is_past(event.expires_ms, now_ms):
            return None
        topic = self._tables.find(event.topic)
        known = StoredRecords(self._tables, topic).get(event.subscriber) if topic is not None else None
        if known is not None and weight(len(known.details)) >= weight(size):
            return None
        return self._full("subscriptions", full)

    def _full(self, reason: str, why: str) -> UStatusError:
        self.refused[reason] += 1
        return UStatusError(UCode.RESOURCE_EXHAUSTED, why)

    def _command(self, command: Subscribe | Unsubscribe, request: bytes, now_ms: int) -> Outcome | UStatusError:
        """Networks deliver requests again, a late one behind its successors. Ids are compared for equality only: clocks
        go back."""
        about = Handled.about(command.subscriber, command.topic)
        if self._handled.is_past(request, about):
            why = "this request was handled before, and later ones about the topic since: it changes nothing"
            return UStatusError(UCode.ABORTED, why)
        done = self._apply(command, now_ms)
        if isinstance(done, Outcome):
            self._handled.add(request, about)
        return done

    def _step(self, event: Event, now_ms: int) -> Outcome:
        tables = self._tables
        remote = not uris.is_one_of(event.topic[0], self._own)
        creates = isinstance(event, Subscribe | state.Orphaned)
        topic = tables.id(event.topic) if creates else tables.find(event.topic)
        if topic is None:
            return Outcome()
        link = tables.link(topic) if remote or isinstance(event, state.Moved) else Link()
        records = StoredRecords(tables, topic)
        done = state.step(event, records, link, remote=remote, now_ms=now_ms, generation=next(self._generations))
        if done.link.command is not None and done.link.generation != link.generation:
            done.link = done.link._replace(major=self._majors.get(event.topic[0], done.link.major))
        for subscriber, record in done.records.items():
            known = records.seen.get(subscriber)
            had, has = (weight(len(one.details)) if one is not None else 0 for one in (known, record))
            self.subscriptions.add(caller(subscriber), has - had)
            tables.keep(topic, subscriber, record, is_known=known is not None)
        outcome = Outcome(done.answer, self._tell(topic, done.changes))
        if done.link != link:
            tables.keep_link(topic, done.link)
            outcome.topic, outcome.link = event.topic, done.link
        elif isinstance(event, state.TimedOut):
            outcome.topic, outcome.link = event.topic, link
        if done.link.state is Status.UNSUBSCRIBED and (not done.records or None in done.records.values()):
            tables.unused.add(topic)  # perhaps: the sweep looks
        return outcome

    def _tell(self, topic: int, changes: Iterable[Change]) -> list[StoredChange]:
        if not changes:
            return []
        registered = self._tables.registered(topic)
        stored = []
        for change in changes:
            recipients = [(change.subscriber, change.major)] if change.tell_subscriber else []
            for client in registered:
                if client not in recipients and (client[1] >= 4 or change.status_changed):
                    recipients.append(client)
            stored.append(self._tables.note(change, recipients))
        return stored

    def _settle(self, now_ms: int) -> None:
        """What it changes is in the outbox."""
        for topic, is_linked in self._tables.topics():
            if uris.is_one_of(topic[0], self._own) == is_linked:
                self._step(state.Moved(topic), now_ms)
        answers_for = " ".join(sorted(self._own))
        self._tables.execute("INSERT OR REPLACE INTO meta VALUES('answers_for', ?)", (answers_for,))

    def _register(self, event: Register) -> Outcome | UStatusError:
        topic = 0 if event.topic is None else self._tables.id(event.topic)
        if not self._tables.register(topic, event.client, event.major):
            return Outcome()  # it was registered already
        quota = self._for_topics if topic else self._for_all
        if (why := quota.room(caller(event.client))) is not None:
            self._tables.unregister(topic, event.client, event.major)
            return self._full("registrations", why)
        quota.add(caller(event.client), 1)
        return Outcome()

    def _unregister(self, event: Unregister) -> None:
        topic = 0 if event.topic is None else self._tables.find(event.topic)
        if topic is not None and self._tables.unregister(topic, event.client, event.major):
            (self._for_topics if topic else self._for_all).add(caller(event.client), -1)

    # -- resetting

    def _reset(self) -> Outcome:
        """Everything goes, then everybody who was subscribed or registered is told."""
        self._tables.reset()
        self._handled.reset()
        for quota in self._quotas:
            quota.clear()
        return Outcome(many_changes=True)

    def _reset_shared(self, authority: str, now_ms: int) -> Outcome | UStatusError:
        """What we have agreed with the service of `authority`, and what its clients have here; what others have is not
        its to end."""
        if uris.is_one_of(authority, self._own):
            return _denied(f"this is the uSubscription of {authority}: only another one may reset what it shares")
        topics, subscribed, registered = self._tables.shared(authority)
        if not (topics or subscribed or registered):
            return _denied(f"nothing is shared with the uSubscription of {authority}, so it can reset nothing")
        ended = [self._step(state.Ended(topic), now_ms) for topic in topics]
        ended += [self._step(Unsubscribe(topic, subscriber, V3), now_ms) for topic, subscriber in subscribed]
        outcome = Outcome(changes=[stored for one in ended for stored in one.changes])
        outcome.links = [(one.topic, one.link) for one in ended if one.topic is not None and one.link is not None]
        abouts = {Handled.about(stored.change.subscriber, stored.change.topic) for stored in outcome.changes}
        self._handled.reset(abouts)
        told = {recipient for stored in outcome.changes for recipient in stored.recipients}
        for client, major, topic in registered:
            self._unregister(Unregister(client, major, topic))
            if (client, major) not in told:
                told.add((client, major))
                change = Change(topic or UNSEEN, client, Status.UNSUBSCRIBED, major)
                outcome.changes.append(self._tables.note(change, [(client, major)]))
        return outcome


def _denied(why: str) -> UStatusError:
    return UStatusError(UCode.PERMISSION_DENIED, why)
