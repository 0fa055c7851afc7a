"""Audits: which of our subscriptions do other services have? They are sent to each service with which we have links, or
which may have subscriptions from before a Reset.

start, reconnect, Reset, every audit_ms -> FetchSubscriptions(subscriber = us) -> compare with the links
another service names a new store, at once -^                                     '-> Notified | Lost | Orphaned
Partners: the services with which we share subscriptions, in a separate file beside the store, which survives a Reset
and the loss of the store.
first command to a service -> remember -> FILE -> send the command     an audit finds nothing that is shared -> forget

Services of this project name their stores in these questions and answers (stores.proto). A store that was lost, or
restored from a copy, has a new id: its service asks all services that it can know of, each of them notices the id,
audits that service at once, and renews what it lacks.

A topic is compared only if no command about it ran from before the request until after its answer, so that neither
list is stale.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Final, NamedTuple

import structlog
from pydantic import TypeAdapter

from storage.disk import REAL_DISK, Disk
from storage.saved import SavedFile
from uprotocol.core.usubscription.asking import CommandQueue
from uprotocol.core.usubscription.wire import CODECS, StoreSaid
from uprotocol.pacing import Backoff
from uprotocol.status import FINAL, UStatusError
from uprotocol.tasks import end, wait_within
from uprotocol.v1.ucode_pb2 import UCode
from usubscription.state import Key, Lost, Notified, Orphaned, RemoteLink, Status
from usubscription.store.database import Outcome, StoreEvent, StoreKnown
from usubscription.store.store import SubscriptionStore

AUDITS_AT_ONCE: Final = 16
# services without links in one round: if all of them are silent, those with links wait 100 s for the next round
PARTNERS_A_ROUND_MAX: Final = 160
# subscriptions that a service may have beside our links to it; with more its answer is not used
UNKNOWN_MAX: Final = 20_000
# services (each version counts): twice the largest fleet measured, 1 MB; then the oldest are forgotten
PARTNERS_MAX: Final = 20_000
PARTNERS_BYTES_MAX: Final = 8 << 20  # of the file
# authority, version, id of its store in hex if it is known
_PARTNERS: Final = TypeAdapter(list[tuple[str, int] | tuple[str, int, str]])
# between two saves: subscriptions to a fleet add hundreds a second, and each save waits for the disk
PARTNERS_SAVE_MS: Final = 100
SUSPECTS_MS: Final = 5_000  # between two audits of suspects while their service does not answer
# timeout of a page of the first audit at once: the question may have been lost with a process that has just started
# again, and its answer is due within 10 s
AT_ONCE_CALL_MS: Final = 3_000
# before an audit at once is repeated that was not answered: a partner may be starting, too; doubles ...
AT_ONCE_FIRST_MS: Final = 1_000
AT_ONCE_MAX_MS: Final = 30_000  # ... up to this
AT_ONCE_TRIES_MAX: Final = 8  # then its reconnect or the next round has to do: some two minutes
# how long a new store tells others of itself. A service that is connected audits it meanwhile, one that comes back
# later does so then
NOTIFY_MS: Final = 600_000
# strangers: authorities from which a message came while our store was new. Most devices have no service of their own,
# and a fleet has tens of thousands: they are asked apart from the partners, in one version, and fewer times
STRANGER_MAJOR: Final = 4
STRANGERS_AT_ONCE: Final = 64
# also of neighbours by the configuration, which may have no service: each question is a dead letter where a network
# knows that nobody listens
STRANGER_TRIES_MAX: Final = 3
RENEWALS_KEPT_MAX: Final = 20  # of different services, for reports

Partner = tuple[str, int]
"""The authority of a service, and the major version in which we subscribed there."""


class AuditAnswer(NamedTuple):
    """The answer of another service to an audit."""

    subscriptions: dict[Key, Status]  # ours
    said: StoreSaid


class Renewal(NamedTuple):
    """Another service had lost subscriptions of ours, and they are renewed there."""

    at_ms: int  # Unix milliseconds
    subscriptions: int


@dataclass(slots=True)
class Missed:
    """What another service agreed with an earlier store of ours, and what this store lacks. Numbers of
    subscriptions."""

    ours: int = 0  # of our clients there: they are lost, and ended there
    theirs: int = 0  # its own here: it renews them


FetchTheirs = Callable[[str, int, int, int | None], Awaitable[AuditAnswer]]
"""(authority, major, maximal number, timeout in milliseconds; None: the usual one) -> our subscriptions in that
service. Raises UStatusError."""

log = structlog.get_logger()


class Auditor:
    """Runs audits on the event loop. `now` requests a round."""

    def __init__(
        self,
        store: SubscriptionStore,
        partners: Partners,
        *,
        fetch: FetchTheirs,
        is_busy: Callable[[Key], bool],
        interval_ms: int,
        random: Callable[[], float],
        now_ms: Callable[[], int],
    ) -> None:
        self._store, self._partners = store, partners
        self._fetch, self._is_busy, self._interval_ms, self._random = fetch, is_busy, interval_ms, random
        self._now_ms = now_ms
        self._at_once = CommandQueue[Partner, Backoff](self._audit_at_once, AUDITS_AT_ONCE)
        self._strangers = CommandQueue[str, Backoff](self._notify_stranger, STRANGERS_AT_ONCE)
        self._notified: set[Partner] = set()  # they know of our new store, or are about to
        self.missed: dict[Partner, Missed] = {}
        self.on_missed: Callable[[], None] = lambda: None  # called when `missed` has changed
        self.renewed: dict[str, Renewal] = {}  # the last one of each authority, the newest last
        self.renewals = 0  # subscriptions
        # topics that may have ended, with a number, so that an answer clears no suspicion that came after its request
        self._suspects: dict[Key, int] = {}
        self._suspicions = itertools.count()
        self._due: dict[Partner, None] = {}  # partners without links that are still to be audited, in order
        self._is_full_round = False
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.ensure_future(self._run())

    async def stop(self) -> None:
        await end(self._task)
        await self._at_once.stop()
        await self._strangers.stop()

    @property
    def is_new(self) -> bool:
        """Other services may have agreed something with an earlier store, which this one lacks."""
        return self._store.database.new_since_ms is not None

    def notify(self, partner: Partner) -> None:
        """If our store is new, tell this service, which we have reason to know."""
        if self._must_notify(partner):
            self.at_once(partner)

    def arrived_from(self, authority: str) -> None:
        """A message has arrived: if our store is new, tell the service of `authority`, which may not exist."""
        if self._must_notify((authority, STRANGER_MAJOR)):
            self._strangers.put(authority, Backoff(AT_ONCE_FIRST_MS, AT_ONCE_MAX_MS))

    def _must_notify(self, partner: Partner) -> bool:
        if not self.is_new or partner in self._notified or len(self._notified) >= PARTNERS_MAX:
            return False
        self._notified.add(partner)
        return True

    def has_other_store(self, authority: str, major: int) -> None:
        """A service has asked us, and has named a store that we did not know."""
        for partner in self._known(authority) | {(authority, major)}:
            if self.is_new or partner in self._partners.known:
                self.at_once(partner)
            else:
                self.stranger(partner)

    def at_once(self, partner: Partner) -> None:
        """Audit this service before the next round, and again until it answers."""
        if len(self._at_once) < PARTNERS_MAX:
            self._at_once.put(partner, Backoff(AT_ONCE_FIRST_MS, AT_ONCE_MAX_MS))

    def hurry(self, partners: Iterable[Partner]) -> None:
        """A network is back: audit again at once what was not answered. `partners`: they are notified of a new store
        again."""
        self._at_once.hurry()
        self._strangers.hurry()
        for partner in partners:
            if self.is_new and not self._at_once.is_busy(partner):
                self.at_once(partner)

    def _known(self, authority: str) -> set[Partner]:
        return {(authority, major) for major in CODECS if (authority, major) in self._partners.known}

    async def _audit_at_once(self, partner: Partner, backoff: Backoff) -> int | None:
        """Returns after how many milliseconds it is repeated; None: it is done."""
        if await self._has_answered(partner, AT_ONCE_CALL_MS if backoff.attempt == 1 else None):
            return None
        tries_max = AT_ONCE_TRIES_MAX if partner in self._partners.known else STRANGER_TRIES_MAX
        return backoff.next_ms() if backoff.attempt < tries_max else None

    async def _notify_stranger(self, authority: str, backoff: Backoff) -> int | None:
        """Returns as `_audit_at_once`."""
        if await self._has_answered((authority, STRANGER_MAJOR), AT_ONCE_CALL_MS):
            for major in CODECS:
                self.notify((authority, major))
            return None
        return backoff.next_ms() if backoff.attempt < STRANGER_TRIES_MAX else None

    async def _has_answered(self, partner: Partner, timeout_ms: int | None) -> bool:
        try:
            return await self._audit(*partner, timeout_ms)
        except UStatusError as error:
            log.warning("the remote subscriptions can't be audited", why=error.message)
            return False

    def now(self) -> None:
        self._is_full_round = True
        self._wake.set()

    def stranger(self, partner: Partner) -> None:
        """A service that is not a known partner has a subscription of ours."""
        if len(self._due) < PARTNERS_MAX and partner not in self._due:
            self._due[partner] = None
            self._wake.set()

    def submit(self, event: StoreEvent) -> None:
        with contextlib.suppress(UStatusError):  # full or stopping: the next audit finds it again
            self._store.submit(event)

    def suspect(self, topic: Key) -> None:
        """A notification says that `topic` has ended, which may be outdated: an audit decides."""
        self._suspects[topic] = next(self._suspicions)
        self._wake.set()

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        next_all = self._next_all()
        notify_until = loop.time() + NOTIFY_MS / 1000
        while True:
            if self.is_new and loop.time() >= notify_until:
                self._notified.clear()
                self._strangers.clear()
                self.submit(StoreKnown())
                notify_until = loop.time() + AT_ONCE_MAX_MS / 1000  # the store may be unable to write now
            wait_s = max(min(next_all, notify_until if self.is_new else next_all) - loop.time(), 0)
            await wait_within(self._wake, min(wait_s, SUSPECTS_MS / 1000) if self._suspects else wait_s)
            self._wake.clear()
            is_full = self._is_full_round or loop.time() >= next_all
            if is_full:
                self._is_full_round, next_all = False, self._next_all()
            try:
                await self._round(is_full)
            except UStatusError as error:
                log.warning("the remote subscriptions can't be audited", why=error.message)
            except Exception:
                log.exception("auditing the remote subscriptions failed")

    def _next_all(self) -> float:
        return asyncio.get_running_loop().time() + self._interval_ms / 1000 * (0.75 + self._random() / 2)

    async def _round(self, is_full: bool) -> None:
        """Audit the services with links first (all of them, or those with suspects), then some other partners; the rest
        of them in further rounds that follow at once."""
        linked = await self._in_doubt()
        if is_full:
            linked |= dict.fromkeys(await self._store.read(lambda reader: reader.linked()))
        if is_full and not self._due:
            self._due = dict.fromkeys(self._partners.known)
        others = list(islice(self._due, PARTNERS_A_ROUND_MAX))
        for partner in others:
            del self._due[partner]
        asked = [*linked, *(partner for partner in others if partner not in linked)]
        for start in range(0, len(asked), AUDITS_AT_ONCE):
            await asyncio.gather(*(self._audit(*partner) for partner in asked[start : start + AUDITS_AT_ONCE]))
        if self._due:
            self._wake.set()

    async def _in_doubt(self) -> dict[Partner, None]:
        """The services of the suspects. A suspect with a pending command is cleared: the answer decides."""
        suspects, found = dict(self._suspects), dict[Partner, None]()
        by_authority: dict[str, list[Key]] = {}
        for topic in suspects:
            by_authority.setdefault(topic[0], []).append(topic)
        for authority, topics in by_authority.items():
            links = await self._links(authority)
            for topic in topics:
                if (link := links.get(topic)) is not None and link.command is None:
                    found[authority, link.major] = None
                else:
                    self._clear(topic, suspects)
        return found

    async def _audit(self, authority: str, major: int, timeout_ms: int | None = None) -> bool:
        """`timeout_ms`: as in FetchTheirs. Returns False if the service has not answered."""
        # 1: ask, and note what moves meanwhile. A partner that is remembered from now on has a command that the answer
        # may not know
        remembered = self._partners.remembered
        before, suspects = await self._links(authority), dict(self._suspects)
        moving = {topic for topic in before if self._is_busy(topic)}
        listing: AuditAnswer | None = None
        try:
            listing = await self._fetch(authority, major, UNKNOWN_MAX + len(before), timeout_ms)
        except UStatusError as error:
            log.info("a remote uSubscription does not list our subscriptions", authority=authority, why=str(error))
            if error.code not in FINAL:
                return False  # to be repeated
            if error.code == UCode.UNIMPLEMENTED and not before:
                self._partners.forget((authority, major), remembered)
        # 2: links of ours that it does not have
        after = await self._links(authority)
        stable = {
            topic: link
            for topic, link in after.items()
            if link.major == major
            and before.get(topic) == link
            and link.command is None
            and topic not in moving
            and not self._is_busy(topic)
        }
        lost = await _changed(self._compare(stable, listing and listing.subscriptions, suspects))
        if lost:
            self._renew(authority, lost)
        if listing is None:
            return True
        # 3: subscriptions that it has, and we do not know
        theirs, said = listing
        unknown = [topic for topic in theirs if topic[0] == authority and topic not in before and topic not in after]
        orphans = [topic for topic in unknown if not self._is_busy(topic)]
        for topic in orphans:
            self.submit(Orphaned(topic, major))
        self._compare_stores((authority, major), said, len(orphans))
        # 4: a partner with which we share nothing
        if not theirs and not any(link.major == major for link in (*before.values(), *after.values())):
            subscribing = await self._store.read(lambda reader: reader.subscribing(authority))
            if (authority, major) not in subscribing:
                self._partners.forget((authority, major), remembered)
        return True

    def _renew(self, authority: str, subscriptions: int) -> None:
        what = "a remote uSubscription had lost our subscriptions: they are renewed"
        log.warning(what, authority=authority, subscriptions=subscriptions)
        self.renewals += subscriptions
        now_ms, last = self._now_ms(), self.renewed.pop(authority, None)
        if last is not None and now_ms - last.at_ms < self._interval_ms / 2:  # of the same loss, in another version
            subscriptions += last.subscriptions
        self.renewed[authority] = Renewal(now_ms, subscriptions)
        if len(self.renewed) > RENEWALS_KEPT_MAX:
            del self.renewed[next(iter(self.renewed))]

    def _compare_stores(self, partner: Partner, said: StoreSaid, orphans: int) -> None:
        """Does the other service have a new store, or did it know another one of ours?"""
        authority, _ = partner
        if said.store and self._partners.learn(authority, said.store):
            for other in self._known(authority) - {partner}:
                self.at_once(other)
        # what others lost with a store that is an older copy they renew, and a restoration is reported as such
        has_lost = bool(orphans) or (bool(said.former) and not self._store.database.is_copy)
        if not self.is_new or not has_lost:
            return
        known = self.missed.get(partner, Missed())
        missed = Missed(max(orphans, known.ours), max(said.links, known.theirs))
        if partner in self.missed and missed == known:
            return
        self.missed[partner] = missed
        log.error(
            "a remote uSubscription knew another store of ours: what was agreed with that one is lost or renewed",
            authority=authority,
            our_subscriptions_lost=missed.ours,
            its_subscriptions_renewed=missed.theirs,
        )
        self.on_missed()

    def _clear(self, topic: Key, suspects: dict[Key, int]) -> None:
        """Clear a suspect, unless it was suspected again meanwhile: then the answer may be outdated."""
        if self._suspects.get(topic) == suspects[topic]:
            del self._suspects[topic]

    async def _links(self, authority: str) -> dict[Key, RemoteLink]:
        return dict(await self._store.read(lambda reader: reader.links(authority)))

    def _compare(
        self, ours: dict[Key, RemoteLink], theirs: dict[Key, Status] | None, suspects: dict[Key, int]
    ) -> list[asyncio.Future[Outcome]]:
        """`theirs` None: the service can't list them. Returns the outcomes for those that it has lost."""
        lost: list[asyncio.Future[Outcome]] = []
        for topic, link in ours.items():
            suspect = topic in suspects
            if suspect:
                self._clear(topic, suspects)
            if theirs is None:
                if suspect:
                    self.submit(Notified(topic, Status.UNSUBSCRIBED))  # nothing contradicts the notification
            elif topic not in theirs and suspect:
                self.submit(Notified(topic, Status.UNSUBSCRIBED))
            elif topic not in theirs:
                with contextlib.suppress(UStatusError):  # as in `submit`
                    lost.append(self._store.submit(Lost(topic)))
            elif theirs[topic] is not link.state:
                self.submit(Notified(topic, theirs[topic]))
        return lost


async def _changed(outcomes: list[asyncio.Future[Outcome]]) -> int:
    """Returns how many links have changed: another audit of the same service may have found the same."""
    done = await asyncio.gather(*outcomes, return_exceptions=True)
    return sum(isinstance(outcome, Outcome) and bool(outcome.links) for outcome in done)


class KnownPartner(NamedTuple):
    added: int  # the change that added it
    remembered: int  # number of the last call that remembered it


class StoreIds(NamedTuple):
    current: bytes
    former: bytes = b""  # empty: no other one was known


class Partners:
    """The services with which we share subscriptions, and the stores of services that have named them.

    Used on the event loop; a thread writes the file, once for all changes that wait.
    """

    def __init__(self, path: Path, disk: Disk = REAL_DISK) -> None:
        self._file = SavedFile(path, _PARTNERS, PARTNERS_BYTES_MAX, disk)
        self.known: dict[Partner, KnownPartner] = {}  # read only
        self.remembered = 0  # calls of `remember` and `note`; read only
        self.stores: dict[str, StoreIds] = {}  # by authority; those of partners are saved
        self._changes = self._saved = self._wanted = 0
        self._saving: asyncio.Future[None] | None = None
        self._noting: asyncio.Future[None] | None = None
        self._saved_at = -math.inf  # loop time
        self._is_closing = asyncio.Event()  # nothing waits any more for others to save with

    async def load(self) -> None:
        """Read the file. If it can't be read, that is logged: the links in the store have the current partners."""
        try:
            entries = await asyncio.to_thread(self._file.load) or ()
            self.known = dict.fromkeys((entry[:2] for entry in entries), KnownPartner(0, 0))
            self.stores = {entry[0]: StoreIds(bytes.fromhex(entry[2])) for entry in entries if len(entry) == 3}
        except ValueError:
            log.warning("the saved partners can't be used", why="the id of a store in them is not hexadecimal")
        except UStatusError as error:
            log.warning("the saved partners can't be used", why=error.message)

    def require_readable(self) -> None:
        """Raises FAILED_PRECONDITION if there is a file that can't be read. Blocks."""
        self._file.load()

    async def remember(self, partner: Partner) -> None:
        """Wait until `partner` is on disk. A failure is logged, and stops no command."""
        await self._wait_saved(self._add(partner))

    def note(self, partner: Partner) -> None:
        """As `remember`, without waiting."""
        is_new = partner not in self.known
        self._add(partner)
        if is_new:
            self._save_soon()

    def _add(self, partner: Partner) -> int:
        """Returns the number of the change that added it."""
        self.remembered += 1
        known = self.known.get(partner)
        if known is None:
            self._changes += 1
        added = self._changes if known is None else known.added
        self.known[partner] = KnownPartner(added, self.remembered)
        if len(self.known) > PARTNERS_MAX:
            del self.known[next(iter(self.known))]
        return added

    def learn(self, authority: str, store: bytes) -> bool:
        """A service has named its store. Returns False if that was known."""
        known = self.stores.pop(authority, None)
        if known is not None and known.current == store:
            self.stores[authority] = known
            return False
        self.stores[authority] = StoreIds(store, b"" if known is None else known.current)
        if len(self.stores) > PARTNERS_MAX:
            del self.stores[next(iter(self.stores))]
        if any((authority, major) in self.known for major in CODECS):
            self._changes += 1
            self._save_soon()
        return True

    def _save_soon(self) -> None:
        self._wanted = self._changes
        if self._noting is None or self._noting.done():
            self._noting = asyncio.ensure_future(self._save_wanted())

    async def _save_wanted(self) -> None:
        while self._saved < self._wanted:
            await self._wait_saved(self._wanted)

    def forget(self, partner: Partner, remembered: int) -> None:
        """Forget it, unless it was remembered after `remembered` calls had been made. Written with the next save; after
        a restart before that it is audited once more."""
        known = self.known.get(partner)
        if known is not None and known.remembered <= remembered:
            del self.known[partner]
            self._changes += 1

    async def close(self) -> None:
        """Save at once what waits."""
        self._is_closing.set()
        await self._wait_saved(self._changes)

    async def _wait_saved(self, change: int) -> None:
        """Thousands may wait for one save."""
        while self._saved < change:
            if self._saving is None:
                self._saving = asyncio.ensure_future(self._save())
            await asyncio.shield(self._saving)

    def _entry(self, partner: Partner) -> tuple[str, int] | tuple[str, int, str]:
        store = self.stores.get(partner[0])
        return partner if store is None else (*partner, store.current.hex())

    async def _save(self) -> None:
        loop = asyncio.get_running_loop()
        if (early_s := self._saved_at + PARTNERS_SAVE_MS / 1000 - loop.time()) > 0:
            await wait_within(self._is_closing, early_s)
        changes = self._changes
        try:
            await asyncio.to_thread(self._file.save, [self._entry(partner) for partner in self.known])
        except UStatusError as error:
            log.warning("the partners can't be saved", why=error.message)
        finally:
            self._saved, self._saving, self._saved_at = changes, None, loop.time()
