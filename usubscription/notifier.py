"""Notifies subscribers and registered clients of changes, and publishes them on the change topics, in order.

outbox (committed) -> wait for the responses of their requests -> by destination -> send_batch -> Sent(number)
                                                                      |                             -> deleted later
                                                                      '-> failed: Hold -> sent from the store
                                                                                          (telling.py)

A destination is an authority, or the change topics of the own network. Each keeps its order; one that fails does not
delay others.
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
from usubscription.store.store import SubscriptionStore
from usubscription.telling import ChangeSender, Delivery, Troubles

CHANGES_WAITING_MAX: Final = 10_000  # in memory; others are read from the store when it is their turn
CHANGES_BATCH_MAX: Final = 128  # some 400 messages: the next batch waits until the network has accepted them
CHANGES_SLICE: Final = 16  # changes in one turn of the event loop, 1 ms, so that answers are not delayed
WOKEN_AT_ONCE: Final = 16  # waiting commands that are woken in one turn: some 2 ms with what they do next
# while changes follow each other, so that they are sent together: a single message costs ten times as much
GATHER_MS: Final = 5
# how long changes wait while more requests are queued than one transaction takes: a change costs as much of the event
# loop as an answer, for which a caller is waiting
ANSWERS_FIRST_MS: Final = 1_000
# between two Sent events: each is a commit, and after a crash only later changes are sent twice
NOTE_MS: Final = 200
STORE_RETRY_FIRST_MS: Final = 200  # while the store can't be read or written; doubles up to ...
STORE_RETRY_MAX_MS: Final = 5_000

log = structlog.get_logger()


class ChangeNotifier:
    """Sends the changes in the outbox. `sent` is the number of the last one that was sent; `dropped` counts messages by
    reason."""

    def __init__(
        self,
        transport: UTransport,
        authority: str,
        store: SubscriptionStore,
        responses: ResponseTracker,
        also: Collection[str] = (),
    ) -> None:
        self._sender, self._store, self._responses = ChangeSender(transport, authority, also), store, responses
        self._waiting: deque[tuple[StoredChange, Tag | None]] = deque()
        self._behind = True  # the store may have changes that are not in `_waiting`
        self._news = asyncio.Event()
        self.awaited: list[tuple[int, int, asyncio.Future[None]]] = []  # a heap, by the number of the change
        self._count = itertools.count()  # so that futures are never compared
        self._task: asyncio.Task[None] | None = None
        self._noting: asyncio.TimerHandle | None = None
        self._last = 0.0  # loop time of the last batch
        self.sent = 0
        self.dropped = self._sender.dropped
        self.troubles = Troubles(self._sender, store)
        transport.on_connection(lambda connected: self.troubles.retry_now() if connected else None)

    def __repr__(self) -> str:
        waiting = f"{len(self._waiting)}{'+' if self._behind else ''}"
        return f"ChangeNotifier(sent={self.sent}, waiting={waiting}, {self.troubles!r})"

    def start(self) -> None:
        self._news.set()
        self._task = asyncio.ensure_future(self._run())

    async def stop(self) -> None:
        """Unsent changes stay in the store."""
        await end(self._task)
        await self.troubles.stop()
        if self._noting is not None:
            self._noting.cancel()
            self._note()

    def _note(self) -> None:
        self._noting = None
        with contextlib.suppress(UStatusError):  # then these are sent again after a restart
            self._store.submit(Sent(self.sent))

    def add(self, changes: Sequence[StoredChange], tag: Tag | None) -> None:
        if not self._behind and len(self._waiting) + len(changes) <= CHANGES_WAITING_MAX:
            self._waiting.extend((change, tag) for change in changes)
        else:
            self._behind = True
        self._news.set()

    def look(self) -> None:
        """The store has changes that were not added here."""
        self._behind = True
        self._news.set()

    async def notified(self, number: int) -> None:
        """Wait until all changes up to `number` were sent."""
        if self.sent >= number:
            return
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self.awaited, (number, next(self._count), future))
        await future

    async def notified_up_to(self, number: int) -> None:
        """Wake those that wait for changes up to `number`, WOKEN_AT_ONCE in each turn of the event loop, since each
        continues with a call."""
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
        backoff: Backoff | None = None  # after a failure
        begun = False
        while True:
            if begun and not self._waiting and not self._behind:
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
                if not self._responses.lull.is_set():
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(ANSWERS_FIRST_MS / 1000):
                            await self._responses.lull.wait()
                batch = [self._waiting.popleft() for _ in range(min(len(self._waiting), CHANGES_BATCH_MAX))]
                await self._send_batch(batch)
                backoff = None
                continue
            except UStatusError as error:
                log.warning("changes can't be read from the store", why=error.message)
            except Exception:
                log.exception("sending changes failed")
            self._waiting.clear()  # they may be newer than what could not be read
            self._behind = True  # continue from the store, after the last change that was sent
            backoff = backoff or Backoff(STORE_RETRY_FIRST_MS, STORE_RETRY_MAX_MS)
            await backoff.wait()

    async def _catch_up(self) -> None:
        self._behind = False  # before the read, so that a change added meanwhile is not missed
        found = await self._store.read(lambda reader: reader.outbox(self.sent, CHANGES_WAITING_MAX))
        last = found[-1].number if found else 0
        added = [entry for entry in self._waiting if entry[0].number > last]
        self._waiting = deque((change, None) for change in found)
        if len(found) == CHANGES_WAITING_MAX:
            self._behind = True
        else:
            self._waiting.extend(added)

    async def _send_batch(self, batch: list[tuple[StoredChange, Tag | None]]) -> None:
        tags = {tag for _, tag in batch if tag is not None}
        if tags:
            await self._responses.left(tags)
        deliveries: list[Delivery] = []
        for count, stored in enumerate(stored for stored, _ in batch if stored.number > self.sent):
            if count and not count % CHANGES_SLICE:
                await asyncio.sleep(0)
            deliveries += self._sender.deliveries(stored)
        troubled = self.troubles.commands
        held = [delivery for delivery in deliveries if delivery.destination in troubled]
        held += await self._send([delivery for delivery in deliveries if delivery.destination not in troubled])
        if held:
            await self._hold(held)
        await self.notified_up_to(batch[-1][0].number)
        self._last = asyncio.get_running_loop().time()
        if self._noting is None:
            self._noting = asyncio.get_running_loop().call_later(NOTE_MS / 1000, self._note)

    async def _send(self, deliveries: list[Delivery]) -> list[Delivery]:
        """Returns what was not accepted. The destination of the first failure is in trouble; the failed deliveries to
        others are sent once more without it."""
        held: list[Delivery] = []
        while deliveries:
            failed, _ = await self._sender.send(deliveries)
            if not failed:
                break
            troubled = failed[0].destination
            self.troubles.begin(troubled)
            held += [delivery for delivery in failed if delivery.destination == troubled]
            deliveries = [delivery for delivery in failed if delivery.destination != troubled]
        return held

    async def _hold(self, held: list[Delivery]) -> None:
        """Store the deliveries before later changes count as sent."""
        event = Hold(tuple((one.destination, one.number, one.change, tuple(one.recipients)) for one in held))
        backoff = Backoff(STORE_RETRY_FIRST_MS, STORE_RETRY_MAX_MS)
        with self.troubles.holding(held):
            while True:
                try:
                    await self._store.submit(event)
                    return
                except UStatusError as error:
                    log.warning("changes for a destination that is away can't be stored: waiting", why=error.message)
                await backoff.wait()
