"""What do you have of ours? Asked of each service with which we have links, or which may hold copies from before a
Reset.

start, reconnect, Reset, every audit_ms -> FetchSubscriptions(subscriber = us) -> compare with the links
                                                                                  '-> Notified | Lost | Orphaned
Partners: the services that may hold copies of our subscriptions, in a file of its own beside the store: it outlives a
Reset and the store's loss.
first command to a service -> remember -> FILE -> the command leaves          an audit says: nothing of ours -> forget

A topic counts only if no command about it was under way from before the question until after its answer, so neither
list is stale.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import math
from collections.abc import Awaitable, Callable
from itertools import islice
from pathlib import Path
from typing import Final

import structlog
from pydantic import TypeAdapter

from storage.disk import REAL_DISK, Disk, read_json
from uprotocol.core.usubscription.asking import end
from uprotocol.status import FINAL, UStatusError
from uprotocol.v1.ucode_pb2 import UCode
from usubscription.state import Event, Key, Link, Lost, Notified, Orphaned, Status
from usubscription.store.store import Store

AUDITS_AT_ONCE: Final = 16
# services without links: if all of these are silent, those with links wait 100 s for their next turn
PARTNERS_A_ROUND_MAX: Final = 160
# that a service may have of ours beside our links to it; more is a lie, or a store that was lost long ago
UNKNOWN_MAX: Final = 20_000
# services, each of a version: twice the largest fleet measured, 1 MB; then the oldest are forgotten
PARTNERS_MAX: Final = 20_000
_PARTNERS: Final = TypeAdapter(list[tuple[str, int]])  # authority, version
# between two saves of them: a fleet that is subscribed to brings hundreds a second, and each save is a file that waits
# for the disk, with all else that does
PARTNERS_SAVE_MS: Final = 100
SUSPECTS_MS: Final = 5_000  # between questions for what is doubtful, while its service can't be asked

Partner = tuple[str, int]
"""Authority, and the major version in which we subscribed there."""

Fetch = Callable[[str, int, int], Awaitable[dict[Key, Status]]]
"""(authority, major, how many at most) -> what that service has of ours. Raises UStatusError."""

log = structlog.get_logger()


class Auditor:
    """Lives on the loop. `now` asks for a round."""

    def __init__(
        self,
        store: Store,
        partners: Partners,
        *,
        fetch: Fetch,
        is_busy: Callable[[Key], bool],
        interval_ms: int,
        random: Callable[[], float],
    ) -> None:
        self._store, self._partners = store, partners
        self._fetch, self._is_busy, self._interval_ms, self._random = fetch, is_busy, interval_ms, random
        # and which suspicion it is, so that an answer ends none that came after the question
        self._suspects: dict[Key, int] = {}
        self._suspicions = itertools.count()
        self._due: dict[Partner, None] = {}  # partners without links that have not had their turn, in order
        self._everybody = False
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        return f"Auditor(suspects={len(self._suspects)}, partners={len(self._partners.all())})"

    @property
    def quiet(self) -> bool:
        """True if no round is asked for and nothing is to be checked."""
        return not self._suspects and not self._wake.is_set()

    def start(self) -> None:
        self._task = asyncio.ensure_future(self._run())

    async def stop(self) -> None:
        await end(self._task)

    def now(self) -> None:
        self._everybody = True
        self._wake.set()

    def stranger(self, partner: Partner) -> None:
        """A service that we don't know of has something of ours."""
        if len(self._due) < PARTNERS_MAX and partner not in self._due:
            self._due[partner] = None
            self._wake.set()

    def submit(self, event: Event) -> None:
        with contextlib.suppress(UStatusError):  # full or stopping: the next audit will see it
            self._store.submit(event)

    def suspect(self, topic: Key) -> None:
        """Its service says that it ended, which may be old news: ask."""
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
            everybody = self._everybody or loop.time() >= next_all
            if everybody:
                self._everybody, next_all = False, self._next_all()
            try:
                await self._round(everybody)
            except UStatusError as error:
                log.warning("no audit of the remote subscriptions", why=error.message)
            except Exception:
                log.exception("auditing the remote subscriptions failed")

    def _next_all(self) -> float:
        return asyncio.get_running_loop().time() + self._interval_ms / 1000 * (0.75 + self._random() / 2)

    async def _round(self, everybody: bool) -> None:
        """Those with links first, or of them those that are in doubt; of the others some, and the rest in rounds that
        follow at once."""
        linked = await self._in_doubt()
        if everybody:
            linked |= dict.fromkeys(await self._store.read(lambda reader: reader.linked()))
        if everybody and not self._due:
            self._due = dict.fromkeys(self._partners.all())
        others = list(islice(self._due, PARTNERS_A_ROUND_MAX))
        for partner in others:
            del self._due[partner]
        asked = [*linked, *(partner for partner in others if partner not in linked)]
        for start in range(0, len(asked), AUDITS_AT_ONCE):
            await asyncio.gather(*(self._audit(*partner) for partner in asked[start : start + AUDITS_AT_ONCE]))
        if self._due:
            self._wake.set()

    async def _in_doubt(self) -> dict[Partner, None]:
        """Whom to ask about the suspects; of those that have a command under way its answer decides."""
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
            log.info("a remote uSubscription does not say what it has of ours", authority=authority, why=str(error))
            if error.code not in FINAL:
                return  # later, perhaps
            if error.code == UCode.UNIMPLEMENTED and not before:
                self._partners.forget((authority, major))  # it never will
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
        """Unless we were told again meanwhile: what is known may be older than that."""
        if self._suspects.get(topic) == suspects[topic]:
            del self._suspects[topic]

    async def _links(self, authority: str) -> dict[Key, Link]:
        return dict(await self._store.read(lambda reader: reader.links(authority)))

    def _compare(self, ours: dict[Key, Link], theirs: dict[Key, Status] | None, suspects: dict[Key, int]) -> None:
        """`theirs` None: it can't say."""
        for topic, link in ours.items():
            suspect = topic in suspects
            if suspect:
                self._clear(topic, suspects)
            if theirs is None:
                if suspect:
                    self.submit(Notified(topic, Status.UNSUBSCRIBED))  # it said so, and nothing speaks against it
            elif topic not in theirs:
                self.submit(Notified(topic, Status.UNSUBSCRIBED) if suspect else Lost(topic))
            elif theirs[topic] is not link.state:
                self.submit(Notified(topic, theirs[topic]))


class Partners:
    """Lives on the loop; the disk is written on a thread, once for all that came meanwhile."""

    def __init__(self, path: Path, disk: Disk = REAL_DISK) -> None:
        self.path, self._disk = path, disk
        self._known: dict[Partner, int] = {}  # and with which change it came
        self._changes = self._saved = 0
        self._saving: asyncio.Future[None] | None = None
        self._saved_at = -math.inf  # loop time

    def __repr__(self) -> str:
        return f"Partners({len(self._known)})"

    def __contains__(self, partner: Partner) -> bool:
        return partner in self._known

    def all(self) -> list[Partner]:
        return list(self._known)

    async def load(self) -> None:
        """A file that can't be read is told and replaced: the links in the store name those that count most."""
        try:
            self._known = dict.fromkeys(await asyncio.to_thread(read_json, self.path, _PARTNERS), 0)
        except FileNotFoundError:
            return
        except (OSError, ValueError) as error:
            what = "the file of services that may have subscriptions of ours can't be read"
            log.warning(what, path=str(self.path), why=str(error))

    async def remember(self, partner: Partner) -> None:
        """Completes when it is on disk, or can't be: that is told, and holds no command."""
        mine = self._known.get(partner)
        if mine is None:
            self._changes += 1
            mine = self._known[partner] = self._changes
            if len(self._known) > PARTNERS_MAX:
                del self._known[next(iter(self._known))]
        await self._is_saved(mine)

    def forget(self, partner: Partner) -> None:
        """On disk with the next save: until then it is asked once more after a restart."""
        if self._known.pop(partner, None) is not None:
            self._changes += 1

    async def close(self) -> None:
        await self._is_saved(self._changes)

    async def _is_saved(self, change: int) -> None:
        """With all that came until then: thousands wait for one save, and go on together."""
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
            await asyncio.to_thread(self._disk.replace_text, self.path, json.dumps(list(self._known)))
        except OSError as error:
            what = "the services that may have subscriptions of ours can't be noted"
            log.warning(what, path=str(self.path), why=str(error))
        finally:
            self._saved, self._saving, self._saved_at = changes, None, loop.time()
