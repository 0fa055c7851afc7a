"""The state of the service in one SQLite file. Its calls block, so they run on the store's threads.

apply([event, ...]) --one transaction--> state.step on what is stored -> tables.py: records, links, outbox -> commit
                                                                                              -> [Outcome, ...]
StoreReader: queries of the committed state

The transaction of a change also stores it in the outbox, with its recipients, and it stays there until it is sent; a
link contains the command that the remote service has not answered. So a crash between any two steps loses neither.
"""

from __future__ import annotations

import itertools
import os
import sqlite3
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import structlog

from storage.disk import REAL_DISK, BadMarkError, Disk, Marked, SqliteFile, read_mark, transaction
from storage.faults import DamagedError, is_full
from uprotocol import uri as uris
from uprotocol import uuid as uuids
from uprotocol.communication.shares import UNIT_BYTES, Quota, UEntity, weight
from uprotocol.core.usubscription.wire import STORE_BYTES
from uprotocol.status import UStatusError
from uprotocol.v1.ucode_pb2 import UCode
from usubscription import state
from usubscription.state import Change, Key, RemoteLink, Status, Subscribe, TopicEvent, Unsubscribe
from usubscription.store.reader import StoreReader
from usubscription.store.tables import (
    COPY,
    NO_TOPIC,
    PRAGMAS,
    STORE,
    UNTOLD,
    Client,
    Handled,
    StoredChange,
    StoredRecords,
    Tables,
    open_store,
)

SUBSCRIPTIONS_MAX: Final = 5_000_000  # some 1 GB on disk; beyond it Subscribe answers RESOURCE_EXHAUSTED
REGISTRATIONS_MAX: Final = 200_000  # for topics: one per topic and streamer
REGISTERED_FOR_ALL_MAX: Final = 1_000  # each gets every change
DETAILS_BYTES_MAX: Final = 4_096  # of one subscription: each change carries them to all its recipients
# changes that are not sent yet, including a Reset of a full store; beyond it the oldest are dropped
OUTBOX_CHANGES_MAX: Final = 3_000_000
STORE_WAL_BYTES_MAX: Final = 8 << 20  # the write-ahead log is cut to this size when it is emptied
WAL_HELD_BYTES_MAX: Final = 32 << 20  # ... and its limit while a reader prevents that: beyond it nothing is stored
V3: Final = 3  # the version whose subscribers are notified of their own Unsubscribe

log = structlog.get_logger()

# -- events that are not about a single topic


@dataclass(frozen=True, slots=True)
class Register:
    """`topic` None: for everything, as in version 4."""

    client: Key
    major: int
    topic: Key | None


class Unregister(Register):
    """Undo it."""


@dataclass(frozen=True, slots=True)
class Reset:
    """Delete what is shared with the authority `of`, or everything (None), and notify the clients concerned. `request`:
    as in Commanded."""

    of: str | None = None
    request: bytes | None = None


@dataclass(frozen=True, slots=True)
class Sent:
    """The changes up to this number were sent."""

    number: int


@dataclass(frozen=True, slots=True)
class Probe:
    """Write something, to find out whether the disk works."""


@dataclass(frozen=True, slots=True)
class Commanded:
    """A client's command with the id of its request (16 bytes): a redelivery does not undo later commands."""

    event: Subscribe | Unsubscribe
    request: bytes


@dataclass(frozen=True, slots=True)
class Hold:
    """Keep these changes (destination, number, change, recipients there) until their destination accepts them."""

    changes: tuple[tuple[str, int, Change, tuple[Client, ...]], ...]


@dataclass(frozen=True, slots=True)
class Released:
    """The changes held for `destination` up to this number were sent."""

    destination: str
    number: int


@dataclass(frozen=True, slots=True)
class Settle:
    """After a start: apply state.Moved to topics of authorities for which this service now answers, or no longer
    answers."""


@dataclass(frozen=True, slots=True)
class StoreKnown:
    """The other services know this store."""


StoreEvent = (
    StoreKnown | Settle | TopicEvent | Commanded | Probe | Register | Unregister | Reset | Sent | Hold | Released
)


@dataclass(slots=True)
class Outcome:
    answer: Status = Status.UNSUBSCRIBED
    changes: list[StoredChange] = field(default_factory=list)
    links: list[tuple[Key, RemoteLink]] = field(default_factory=list)  # topics whose link has changed
    many_changes: bool = False  # too many for `changes`: they are only in the outbox
    request: bytes | None = None  # the id of the request that caused it, if its response is to leave first


class Database:
    """Applies events to the store; used by one thread at a time."""

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
        pragmas = (*PRAGMAS, f"journal_size_limit = {STORE_WAL_BYTES_MAX}")
        self._file = SqliteFile(STORE, self.path, disk, pragmas)
        self.tables = Tables(outbox_changes_max)
        self._handled = Handled(self.tables)
        self._is_loaded = False  # the counts in memory agree with the file
        self.refused: Counter[str] = Counter()  # by limit
        # committed changes that are missing: the file or its write-ahead log was damaged, or is an older copy
        self.lost_changes = 0
        self.id = b""  # names this store to other services; an older copy gets another one
        # the other services do not know this store yet: since when (Unix milliseconds); None: they do
        self.new_since_ms: int | None = None
        self.is_copy = False  # it is an older copy of a store; else it was made without subscriptions
        self._make_quotas()

    def open(self) -> None:
        """Raises UStatusError as tables.open_store and FileKind.not_opened. A damaged file is left unchanged."""
        self._file.disk.retry_with_reserve(self.path, self._open)

    def _open(self) -> None:
        is_made = not self.path.exists()
        try:
            self.tables.db = open_store(self._file, self.authority)
            self._load()
            self._compare_mark(is_made=is_made)
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

    def owns(self, authority: str) -> bool:
        """True if this is the uSubscription of `authority`."""
        return uris.is_one_of(authority, self._own)

    def reader(self) -> StoreReader:
        return StoreReader(self.path, disk=self._file.disk)

    # -- counts in memory

    def _load(self) -> None:
        """Stored entries stay, even if they exceed the current limits."""
        self._make_quotas()
        execute = self.tables.db.execute
        stored = """SELECT c.authority, c.ue_id, sum(1 + ifnull(length(s.details), 0) / ?)
                    FROM subscription s JOIN uri c ON c.id = s.subscriber GROUP BY s.subscriber"""
        for authority, ue_id, count in execute(stored, (UNIT_BYTES,)):
            self.subscriptions.add((authority, ue_id), count)
        registered = "SELECT c.authority, c.ue_id, r.topic FROM registration r JOIN uri c ON c.id = r.client"
        for authority, ue_id, topic in execute(registered):
            (self._for_topics if topic else self._for_all).add((authority, ue_id), 1)
        self.tables.load()
        (last,) = execute("SELECT coalesce(max(generation), 0) FROM link").fetchone()
        self._generations = itertools.count(last + 1)
        self._handled.forget()
        self._is_loaded = True

    def _make_quotas(self) -> None:
        self.subscriptions = Quota("subscriptions", self._subscriptions_max, self._own)
        self._for_topics = Quota("registrations for topics", REGISTRATIONS_MAX, self._own)
        self._for_all = Quota("registrations for everything", REGISTERED_FOR_ALL_MAX, self._own)
        self._added: list[tuple[Quota, UEntity, int]] = []  # in the current transaction

    def _count(self, quota: Quota, client: Key, more: int) -> None:
        quota.add(client[:2], more)
        self._added.append((quota, client[:2], more))

    def _compare_mark(self, *, is_made: bool) -> None:
        """SQLite silently ignores the rest of a damaged write-ahead log; the mark beside the file has the number of the
        last change. A copy that was restored has no mark. `is_made`: this start has made the file."""
        marked: Marked | None = None
        tables, db, path = self.tables, self.tables.db, str(self.path)
        try:
            marked = read_mark(self.path)
        except (OSError, BadMarkError) as error:
            log.warning("the mark of the subscriptions can't be read: a new one is created", path=path, why=str(error))
        meta: dict[str, str] = dict(db.execute("SELECT key, value FROM meta").fetchall())
        before = dict(meta)
        # the id is missing if it was lost with the write-ahead log
        self.id = bytes.fromhex(meta.get("id", marked.incarnation.hex() if marked is not None else ""))
        if marked is not None and marked.incarnation == self.id and marked.seq > tables.number:
            self.lost_changes = marked.seq - tables.number
            tables.number = marked.seq  # numbers are never used twice
            what = "changes of subscriptions are lost: the end of the store was damaged"
            log.error(what, path=path, changes=self.lost_changes)
        if not is_made and (marked is None or marked.incarnation != self.id or self.lost_changes):
            # it was restored or is damaged: other services have to notice that it may lack what they agreed with it
            self.id = os.urandom(STORE_BYTES)
            meta |= {UNTOLD: str(uuids.now_ms())} | ({COPY: "1"} if tables.number else {})
        meta["id"] = self.id.hex()
        self.new_since_ms, self.is_copy = int(meta[UNTOLD]) if UNTOLD in meta else None, COPY in meta
        try:
            db.executemany("INSERT OR REPLACE INTO meta VALUES(?, ?)", meta.items() - before.items())
        except sqlite3.OperationalError:  # for example a full disk; the next start tries again
            return
        try:
            self._file.begin_mark(self.id, tables.number)
        except OSError as error:
            log.warning("the mark of the subscriptions can't be written", path=path, why=str(error))

    # -- applying

    def apply(self, events: Iterable[StoreEvent], now_ms: int) -> list[Outcome | UStatusError]:
        """Apply all `events` in order, in one transaction, which is committed when this returns.

        An event that is refused has a UStatusError as its result. Raises UStatusError (UNAVAILABLE, RESOURCE_EXHAUSTED)
        if the disk fails; then nothing of the batch is stored. DATA_LOSS: the file is damaged.
        """
        batch = list(events)
        return self._file.disk.retry_with_reserve(self.path, lambda: self._apply_all(batch, now_ms))

    def _apply_all(self, events: Sequence[StoreEvent], now_ms: int) -> list[Outcome | UStatusError]:
        tables = self.tables
        try:
            db = tables.db = self._file.writable(WAL_HELD_BYTES_MAX)
            if not self._is_loaded:
                self._load()
            number, held = tables.number, tables.held
            self._added.clear()
            try:
                with transaction(db):
                    outcomes = [self._apply(event, now_ms) for event in events]
                    self._handled.store()
                    tables.finish()
            except BaseException:
                tables.number, tables.held = number, held
                tables.forget()
                self._handled.forget()
                for quota, client, more in self._added:
                    quota.add(client, -more)
                raise
        except sqlite3.Error as error:
            self._file.reset()
            # unless the disk is full, it is unknown whether the transaction is on disk
            self._is_loaded = self._is_loaded and is_full(error, self.path)
            raise self._file.kind.fault(error, self.path, "used") from error
        if tables.number != number:
            self._file.move_mark(tables.number)
        return outcomes

    def _apply(self, event: StoreEvent, now_ms: int) -> Outcome | UStatusError:
        tables = self.tables
        if isinstance(event, Commanded):  # networks may redeliver a request after later ones
            about = Handled.about(event.event.subscriber, event.event.topic)
            if self._handled.is_past(event.request, about):  # its id says nothing about the order: clocks go back
                why = "this request was handled before, and later ones about its topic since: it changes nothing"
                return UStatusError(UCode.ABORTED, why)
            done = self._apply(event.event, now_ms)
            if isinstance(done, Outcome):
                self._handled.add(event.request, about)
                done.request = event.request
            return done
        match event:
            case Sent(number):
                tables.db.execute("DELETE FROM outbox WHERE id <= ?", (number,))
            case Probe():
                tables.db.execute("INSERT OR REPLACE INTO meta VALUES('probed_ms', ?)", (str(now_ms),))
            case Hold(changes):
                tables.hold(changes)
            case Released(destination, number):
                tables.delete_held("destination = ? AND number <= ?", (destination, number))
            case StoreKnown():
                tables.db.execute("DELETE FROM meta WHERE key IN (?, ?)", (UNTOLD, COPY))
                self.new_since_ms = None
            case Unregister():
                self._unregister(event)
            case Settle():
                self._settle(now_ms)
            case Register():
                return self._register(event)
            case Reset(of, request):
                return self._reset(request) if of is None else self._reset_shared(of, request, now_ms)
            case Subscribe() if (refusal := self._refusal(event, now_ms)) is not None:
                return refusal
            case _:
                return self._step(event, now_ms)
        return Outcome()

    def _refusal(self, event: Subscribe, now_ms: int) -> UStatusError | None:
        """Why it may not be stored. An existing subscription that does not become larger is never refused."""
        size = len(event.details)
        if size > DETAILS_BYTES_MAX:
            why = f"the details of a subscription may have {DETAILS_BYTES_MAX} bytes, got {size}"
            return self._full("details", why)
        full = self.subscriptions.refusal(event.subscriber[:2], weight(size))
        if full is None or state.is_past(event.expires_ms, now_ms):
            return None
        topic = self.tables.find(event.topic)
        known = StoredRecords(self.tables, topic).get(event.subscriber) if topic is not None else None
        if known is not None and weight(len(known.details)) >= weight(size):
            return None
        return self._full("subscriptions", full)

    def _full(self, reason: str, why: str) -> UStatusError:
        self.refused[reason] += 1
        return UStatusError(UCode.RESOURCE_EXHAUSTED, why)

    def _step(self, event: TopicEvent, now_ms: int) -> Outcome:
        tables = self.tables
        remote = not uris.is_one_of(event.topic[0], self._own)
        creates = isinstance(event, Subscribe | state.Orphaned)
        topic = tables.id(event.topic) if creates else tables.find(event.topic)
        if topic is None:
            return Outcome()
        link = tables.link(topic) if remote or isinstance(event, state.Moved) else RemoteLink()
        records = StoredRecords(tables, topic)
        done = state.step(event, records, link, remote=remote, now_ms=now_ms, generation=next(self._generations))
        if done.link.command is not None and done.link.generation != link.generation:
            done.link = done.link._replace(major=self._majors.get(event.topic[0], done.link.major))
        for subscriber, record in done.records.items():
            known = records.seen.get(subscriber)
            had, has = (weight(len(one.details)) if one is not None else 0 for one in (known, record))
            if has != had:
                self._count(self.subscriptions, subscriber, has - had)
            tables.keep(topic, subscriber, record, is_known=known is not None)
        outcome = Outcome(done.answer, tables.add_changes(topic, done.changes))
        if done.link != link:
            tables.keep_link(topic, done.link)
        if done.link != link or isinstance(event, state.TimedOut):
            outcome.links.append((event.topic, done.link))
        if done.link.state is Status.UNSUBSCRIBED and (not done.records or None in done.records.values()):
            tables.unused.add(topic)  # checked at the end of the transaction
        return outcome

    def _settle(self, now_ms: int) -> None:
        """The changes are in the outbox."""
        for topic, is_linked in self.tables.topics():
            if uris.is_one_of(topic[0], self._own) == is_linked:
                self._step(state.Moved(topic), now_ms)
        answers_for = " ".join(sorted(self._own))
        self.tables.db.execute("INSERT OR REPLACE INTO meta VALUES('answers_for', ?)", (answers_for,))

    def _register(self, event: Register) -> Outcome | UStatusError:
        topic = 0 if event.topic is None else self.tables.id(event.topic)
        if not self.tables.register(topic, event.client, event.major):
            return Outcome()  # it was registered already
        quota = self._for_topics if topic else self._for_all
        if (why := quota.refusal(event.client[:2])) is not None:
            self.tables.unregister(topic, event.client, event.major)
            return self._full("registrations", why)
        self._count(quota, event.client, 1)
        return Outcome()

    def _unregister(self, event: Unregister) -> None:
        topic = 0 if event.topic is None else self.tables.find(event.topic)
        if topic is not None and self.tables.unregister(topic, event.client, event.major):
            self._count(self._for_topics if topic else self._for_all, event.client, -1)

    # -- resetting

    def _reset(self, request: bytes | None) -> Outcome:
        """Delete everything, and notify all who were subscribed or registered."""
        self.tables.reset()
        self._handled.reset()
        for quota in (self.subscriptions, self._for_topics, self._for_all):
            for (authority, ue_id), has in quota.all():
                self._count(quota, (authority, ue_id, 0, 0), -has)
        return Outcome(many_changes=True, request=request)

    def _reset_shared(self, authority: str, request: bytes | None, now_ms: int) -> Outcome | UStatusError:
        """End our links to the service of `authority`, and the subscriptions and registrations of its clients here;
        it must not end those of others."""
        if uris.is_one_of(authority, self._own):
            return _denied(f"this is the uSubscription of {authority}: only another one may reset what it shares")
        topics, subscribed, registered = self.tables.shared(authority)
        if not (topics or subscribed or registered):
            return _denied(f"nothing is shared with the uSubscription of {authority}, so it can reset nothing")
        ended = [self._step(state.Ended(topic), now_ms) for topic in topics]
        ended += [self._step(Unsubscribe(topic, subscriber, V3), now_ms) for topic, subscriber in subscribed]
        outcome = Outcome(changes=[stored for one in ended for stored in one.changes], request=request)
        outcome.links = [link for one in ended for link in one.links]
        abouts = {Handled.about(stored.change.subscriber, stored.change.topic) for stored in outcome.changes}
        self._handled.reset(abouts)
        notified = {recipient for stored in outcome.changes for recipient in stored.recipients}
        for client, major, topic in registered:
            self._unregister(Unregister(client, major, topic))
            if (client, major) not in notified:
                notified.add((client, major))
                change = Change(topic or NO_TOPIC, client, Status.UNSUBSCRIBED, major)
                outcome.changes += self.tables.add_changes(0, [change], only=(client, major))
        return outcome


def _denied(why: str) -> UStatusError:
    return UStatusError(UCode.PERMISSION_DENIED, why)
