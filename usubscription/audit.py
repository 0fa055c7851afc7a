"""Audits: which of our subscriptions do other services have? They are sent to each service with which we have links, or
which may have subscriptions from before a Reset.

start, reconnect, Reset, every audit_ms -> FetchSubscriptions(subscriber = us) -> compare with the links
                                                                                  '-> Notified | Lost | Orphaned
Partners: the services that may have subscriptions of ours, in a separate file beside the store, which survives a Reset
and the loss of the store.
first command to a service -> remember -> FILE -> send the command          an audit finds no subscription -> forget

A topic is compared only if no command about it ran from before the request until after its answer, so that neither
list is stale.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
from collections.abc import Awaitable, Callable
from itertools import islice
from pathlib import Path
from typing import Final

import structlog
from pydantic import TypeAdapter

from storage.disk import REAL_DISK, Disk
from storage.saved import SavedFile
from uprotocol.core.usubscription.asking import end
from uprotocol.status import FINAL, UStatusError
from uprotocol.v1.ucode_pb2 import UCode
from usubscription.state import Key, Lost, Notified, Orphaned, RemoteLink, Status, TopicEvent
from usubscription.store.store import SubscriptionStore

AUDITS_AT_ONCE: Final = 16
# services without links in one round: if all of them are silent, those with links wait 100 s for the next round
PARTNERS_A_ROUND_MAX: Final = 160
# subscriptions that a service may have beside our links to it; with more its answer is not used
UNKNOWN_MAX: Final = 20_000
# services (each version counts): twice the largest fleet measured, 1 MB; then the oldest are forgotten
PARTNERS_MAX: Final = 20_000
PARTNERS_BYTES_MAX: Final = 8 << 20  # of the file
_PARTNERS: Final = TypeAdapter(list[tuple[str, int]])  # authority, version
# between two saves: subscriptions to a fleet add hundreds a second, and each save waits for the disk
PARTNERS_SAVE_MS: Final = 100
SUSPECTS_MS: Final = 5_000  # between two audits of suspects while their service does not answer

Partner = tuple[str, int]
"""The authority of a service, and the major version in which we subscribed there."""

FetchTheirs = Callable[[str, int, int], Awaitable[dict[Key, Status]]]
"""(authority, major, maximal number) -> our subscriptions in that service. Raises UStatusError."""

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
    ) -> None:
        self._store, self._partners = store, partners
        self._fetch, self._is_busy, self._interval_ms, self._random = fetch, is_busy, interval_ms, random
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

    def now(self) -> None:
        self._is_full_round = True
        self._wake.set()

    def stranger(self, partner: Partner) -> None:
        """A service that is not a known partner has a subscription of ours."""
        if len(self._due) < PARTNERS_MAX and partner not in self._due:
            self._due[partner] = None
            self._wake.set()

    def submit(self, event: TopicEvent) -> None:
        with contextlib.suppress(UStatusError):  # full or stopping: the next audit finds it again
            self._store.submit(event)

    def suspect(self, topic: Key) -> None:
        """A notification says that `topic` has ended, which may be outdated: an audit decides."""
        self._suspects[topic] = next(self._suspicions)
        self._wake.set()

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        next_all = self._next_all()
        while True:
            wait_s = next_all - loop.time()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(wait_s, SUSPECTS_MS / 1000) if self._suspects else wait_s):
                    await self._wake.wait()
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

    async def _audit(self, authority: str, major: int) -> None:
        before, suspects = await self._links(authority), dict(self._suspects)
        moving = {topic for topic in before if self._is_busy(topic)}
        theirs: dict[Key, Status] | None = None
        try:
            theirs = await self._fetch(authority, major, UNKNOWN_MAX + len(before))
        except UStatusError as error:
            log.info("a remote uSubscription does not list our subscriptions", authority=authority, why=str(error))
            if error.code not in FINAL:
                return  # to be repeated
            if error.code == UCode.UNIMPLEMENTED and not before:
                self._partners.forget((authority, major))
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
        self._compare(stable, theirs, suspects)
        if theirs is None:
            return
        for topic in theirs:
            if topic[0] == authority and topic not in before and topic not in after and not self._is_busy(topic):
                self.submit(Orphaned(topic, major))
        if not theirs and not any(link.major == major for link in (*before.values(), *after.values())):
            self._partners.forget((authority, major))

    def _clear(self, topic: Key, suspects: dict[Key, int]) -> None:
        """Clear a suspect, unless it was suspected again meanwhile: then the answer may be outdated."""
        if self._suspects.get(topic) == suspects[topic]:
            del self._suspects[topic]

    async def _links(self, authority: str) -> dict[Key, RemoteLink]:
        return dict(await self._store.read(lambda reader: reader.links(authority)))

    def _compare(self, ours: dict[Key, RemoteLink], theirs: dict[Key, Status] | None, suspects: dict[Key, int]) -> None:
        """`theirs` None: the service can't list them."""
        for topic, link in ours.items():
            suspect = topic in suspects
            if suspect:
                self._clear(topic, suspects)
            if theirs is None:
                if suspect:
                    self.submit(Notified(topic, Status.UNSUBSCRIBED))  # nothing contradicts the notification
            elif topic not in theirs:
                self.submit(Notified(topic, Status.UNSUBSCRIBED) if suspect else Lost(topic))
            elif theirs[topic] is not link.state:
                self.submit(Notified(topic, theirs[topic]))


class Partners:
    """Used on the event loop; a thread writes the file, once for all changes that wait."""

    def __init__(self, path: Path, disk: Disk = REAL_DISK) -> None:
        self._file = SavedFile(path, _PARTNERS, PARTNERS_BYTES_MAX, disk)
        self.known: dict[Partner, int] = {}  # with the number of the change that added it; read only
        self._changes = self._saved = 0
        self._saving: asyncio.Future[None] | None = None
        self._saved_at = -math.inf  # loop time

    async def load(self) -> None:
        """Read the file. If it can't be read, that is logged: the links in the store have the current partners."""
        try:
            self.known = dict.fromkeys(await asyncio.to_thread(self._file.load) or (), 0)
        except UStatusError as error:
            log.warning("the saved partners can't be used", why=error.message)

    async def remember(self, partner: Partner) -> None:
        """Wait until `partner` is on disk. A failure is logged, and stops no command."""
        change = self.known.get(partner)
        if change is None:
            self._changes += 1
            change = self.known[partner] = self._changes
            if len(self.known) > PARTNERS_MAX:
                del self.known[next(iter(self.known))]
        await self._wait_saved(change)

    def forget(self, partner: Partner) -> None:
        """Written with the next save; after a restart before that it is audited once more."""
        if self.known.pop(partner, None) is not None:
            self._changes += 1

    async def close(self) -> None:
        await self._wait_saved(self._changes)

    async def _wait_saved(self, change: int) -> None:
        """Thousands may wait for one save."""
        while self._saved < change:
            if self._saving is None:
                self._saving = asyncio.ensure_future(self._save())
            await asyncio.shield(self._saving)

    async def _save(self) -> None:
        loop = asyncio.get_running_loop()
        if (early_s := self._saved_at + PARTNERS_SAVE_MS / 1000 - loop.time()) > 0:
            await asyncio.sleep(early_s)
        changes = self._changes
        try:
            await asyncio.to_thread(self._file.save, list(self.known))
        except UStatusError as error:
            log.warning("the partners can't be saved", why=error.message)
        finally:
            self._saved, self._saving, self._saved_at = changes, None, loop.time()
