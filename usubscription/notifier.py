"""Tells changes: to the subscriber, to those who registered, and to everybody on the change topics; after the answer,
in order.

outbox (committed) -> wait for the responses of their requests -> by destination -> send_batch -> Sent(number)
                                                                      |                             -> deleted later
                                                                      '-> in trouble: Hold -> told from the store
                                                                                              (telling.py)

A destination is an authority, or the change topics of the own network: each keeps its order, and its trouble is its
own.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import itertools
from collections import deque
from collections.abc import Collection, Sequence
from typing import Final

import structlog

from uprotocol.core.usubscription.asking import end
from uprotocol.pacing import Backoff
from uprotocol.status import UStatusError
from uprotocol.transport import UTransport
from usubscription.requests import ResponseTracker, Tag
from usubscription.store.database import Hold, Sent
from usubscription.store.reader import StoredChange
from usubscription.store.store import Store
from usubscription.telling import Part, Teller, Troubles

CHANGES_WAITING_MAX: Final = 10_000  # in memory; the others are read from the store when it is their turn
CHANGES_BATCH_MAX: Final = 128  # some 400 messages at once: each batch waits for the network to take it
CHANGES_SLICE: Final = 16  # made in one go, 1 ms of the loop: what waits for it is answers
WOKEN_AT_ONCE: Final = 16  # that waited for a change: with what they go on to do, some 2 ms of the loop
# while changes follow one another, so that they leave together: a message alone costs ten times as much
GATHER_MS: Final = 5
# while more requests wait than one transaction takes, their answers come first, for so long; telling costs the loop as
# much as answering, and who asks is waiting
ANSWERS_FIRST_MS: Final = 1_000
# between notes of what was told: each is a commit, and after a crash only what came since is told twice
NOTE_MS: Final = 200
STORE_RETRY_FIRST_MS: Final = 200  # while the store can't be read or written; doubles up to ...
STORE_RETRY_MAX_MS: Final = 5_000

log = structlog.get_logger()


class Notifier:
    """Sends what is in the outbox. `sent` is the number of the last change that was told; `dropped` counts messages by
    reason."""

    def __init__(
        self,
        transport: UTransport,
        authority: str,
        store: Store,
        responses: ResponseTracker,
        also: Collection[str] = (),
    ) -> None:
        self._teller, self._store, self._responses = Teller(transport, authority, also), store, responses
        self._waiting: deque[tuple[StoredChange, Tag | None]] = deque()
        self._behind = True  # there may be more in the store than is waiting here
        self._news = asyncio.Event()
        self.awaited: list[tuple[int, int, asyncio.Future[None]]] = []  # a heap, by the number of the change
        self._count = itertools.count()  # so that futures are never compared
        self._task: asyncio.Task[None] | None = None
        self._noting: asyncio.TimerHandle | None = None
        self._last = 0.0  # loop time at which something was told
        self.sent = 0
        self.dropped = self._teller.dropped
        self.troubles = Troubles(self._teller, store)
        transport.on_connection(lambda connected: self.troubles.retry_now() if connected else None)

    def __repr__(self) -> str:
        return (
            f"Notifier(sent={self.sent}, waiting={len(self._waiting)}{'+' if self._behind else ''}, {self.troubles!r})"
        )

    def start(self) -> None:
        self._news.set()
        self._task = asyncio.ensure_future(self._run())

    async def stop(self) -> None:
        """What was not told stays in the store."""
        await end(self._task)
        await self.troubles.stop()
        if self._noting is not None:
            self._noting.cancel()
            self._note()

    def _note(self) -> None:
        self._noting = None
        with contextlib.suppress(UStatusError):  # then these are told again after a restart
            self._store.submit(Sent(self.sent))

    def add(self, changes: Sequence[StoredChange], tag: Tag | None) -> None:
        if not self._behind and len(self._waiting) + len(changes) <= CHANGES_WAITING_MAX:
            self._waiting.extend((change, tag) for change in changes)
        else:
            self._behind = True
        self._news.set()

    def look(self) -> None:
        """There is more in the store than was added."""
        self._behind = True
        self._news.set()

    async def notified(self, number: int) -> None:
        """Completes when all changes up to `number` were told."""
        if self.sent >= number:
            return
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self.awaited, (number, next(self._count), future))
        await future

    async def notified_up_to(self, number: int) -> None:
        """Wakes those that wait for it and no others: there may be thousands, each behind another change. Some on each
        turn of the loop, since each goes on with a call."""
        self.sent = max(self.sent, number)
        woken = 0
        while self.awaited and self.awaited[0][0] <= self.sent:
            _, _, future = heapq.heappop(self.awaited)
            if not future.done():
                future.set_result(None)
                woken += 1
                if not woken % WOKEN_AT_ONCE:
                    await asyncio.sleep(0)

    @property
    def idle(self) -> bool:
        return not self._waiting and not self._behind

    async def _run(self) -> None:
        backoff, begun = Backoff(STORE_RETRY_FIRST_MS, STORE_RETRY_MAX_MS), False
        while True:
            if begun and self.idle:
                self._news.clear()
                await self._news.wait()
            try:
                if not begun:
                    await self.troubles.start()
                    begun = True
                if not self._waiting:
                    await self._catch_up()
                    continue
                is_soon = asyncio.get_running_loop().time() - self._last < GATHER_MS / 1000
                if is_soon and len(self._waiting) < CHANGES_BATCH_MAX:
                    await asyncio.sleep(GATHER_MS / 1000)
                await self._answers_first()
                batch = [self._waiting.popleft() for _ in range(min(len(self._waiting), CHANGES_BATCH_MAX))]
                await self._tell(batch)
                backoff.reset()
                continue
            except UStatusError as error:
                log.warning("changes can't be read from the store", why=error.message)
            except Exception:
                log.exception("telling changes failed")
            self._waiting.clear()  # they may be newer than what could not be read
            self._behind = True  # from the store again, from the last one that was told
            await backoff.wait()

    async def _answers_first(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(ANSWERS_FIRST_MS / 1000):
                await self._responses.lull.wait()

    async def _catch_up(self) -> None:
        self._behind = False  # first: what is added from here on either waits behind these, or sets it again
        found = await self._store.read(lambda reader: reader.outbox(self.sent, CHANGES_WAITING_MAX))
        last = found[-1].number if found else 0
        added = [entry for entry in self._waiting if entry[0].number > last]
        self._waiting = deque((change, None) for change in found)
        if len(found) == CHANGES_WAITING_MAX:
            self._behind = True
        else:
            self._waiting.extend(added)

    async def _tell(self, batch: list[tuple[StoredChange, Tag | None]]) -> None:
        tags = {tag for _, tag in batch if tag is not None}
        if tags:
            await self._responses.left(tags)
        parts = await self._parts([stored for stored, _ in batch if stored.number > self.sent])
        held = [part for part in parts if part.destination in self.troubles]
        held += await self._send([part for part in parts if part.destination not in self.troubles])
        if held:
            await self._hold(held)
        await self.notified_up_to(batch[-1][0].number)
        self._last = asyncio.get_running_loop().time()
        if self._noting is None:
            self._noting = asyncio.get_running_loop().call_later(NOTE_MS / 1000, self._note)

    async def _parts(self, changes: Sequence[StoredChange]) -> list[Part]:
        parts: list[Part] = []
        for number, stored in enumerate(changes):
            if number and not number % CHANGES_SLICE:
                await asyncio.sleep(0)
            parts += self._teller.parts(stored)
        return parts

    async def _send(self, parts: list[Part]) -> list[Part]:
        """What was not taken. The first one of it has its destination's trouble; the others behind it are tried once
        more without it."""
        held: list[Part] = []
        while parts:
            failed, _ = await self._teller.send(parts)
            if not failed:
                break
            troubled = failed[0].destination
            self.troubles.begin(troubled)
            held += [part for part in failed if part.destination == troubled]
            parts = [part for part in failed if part.destination != troubled]
        return held

    async def _hold(self, held: list[Part]) -> None:
        """Into the store, before anything behind it counts as told."""
        event = Hold(tuple((part.destination, part.number, part.change, tuple(part.recipients)) for part in held))
        backoff = Backoff(STORE_RETRY_FIRST_MS, STORE_RETRY_MAX_MS)
        with self.troubles.holding(held):
            while True:
                try:
                    await self._store.submit(event)
                    return
                except UStatusError as error:
                    log.warning("changes for a destination that is away can't be stored: waiting", why=error.message)
                await backoff.wait()
