"""Tells changes: to the subscriber, to those who registered, and to everybody on the change topics; after the answer,
in order.

outbox (committed) -> wait for the responses of their requests -> by destination -> send_batch -> Sent(number) -> deleted later
                                                                      |
                                                                      '-> in trouble: Hold -> told from the store (telling.py)

A destination is an authority, or the change topics of the own network: each keeps its order, and its trouble is its
own.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import itertools
from collections import Counter, deque
from collections.abc import Collection, Sequence
from typing import Final

import structlog

from uprotocol.status import UStatusError
from uprotocol.transport import UListener, UTransport
from uprotocol.v1.umessage_pb2 import UMessage
from uprotocol.v1.uri_pb2 import UUri
from uprotocol.v1.ustatus_pb2 import UStatus
from usubscription.database import Hold, Sent
from usubscription.reader import StoredChange
from usubscription.store import Store
from usubscription.telling import Part, Teller, Troubles

CHANGES_WAITING_MAX: Final = 10_000  # in memory; the others are read from the store when it is their turn
CHANGES_BATCH_MAX: Final = 16  # some 50 messages at once, 1 ms of the loop: what waits for it is answers
# while changes follow one another, so that they leave together: a message alone costs ten times as much
GATHER_MS: Final = 5
# between notes of what was told: each is a commit, and after a crash only what came since is told twice
NOTE_MS: Final = 200
# for a response to leave first, from its commit on; one that the RPC server had to drop never does
ANSWER_WAIT_MS_MAX: Final = 1_000
STORE_RETRY_FIRST_MS: Final = 200  # while the store can't be read or written; doubles up to ...
STORE_RETRY_MAX_MS: Final = 5_000

Tag = tuple[int, int]
"""A request's id."""

log = structlog.get_logger()


class AnswersFirst(UTransport):
    """The transport as the RPC servers see it: it notes which responses have left, so that what they bring about leaves
    later (C-23).

    Remembered is what is still to leave, not what has left: of that there may be any number before a change asks for
    it.
    """

    def __init__(self, inner: UTransport) -> None:
        self._inner = inner
        self.capabilities = inner.capabilities
        # -> loop time after which nobody waits for it, ascending; so it holds what came in a second
        self._expected: dict[Tag, float] = {}
        self._news = asyncio.Event()

    async def send_batch(self, messages: Sequence[UMessage]) -> list[UStatus]:
        try:
            return await self._inner.send_batch(messages)
        finally:  # failed or not: it won't leave later
            for message in messages:
                self._expected.pop((message.attributes.reqid.msb, message.attributes.reqid.lsb), None)
            self._news.set()

    def expect(self, tag: Tag) -> None:
        """The response to `tag` is about to leave. Call it on the turn of the loop on which the response is given."""
        self._expected[tag] = asyncio.get_running_loop().time() + ANSWER_WAIT_MS_MAX / 1000
        self._forget()

    def _forget(self) -> None:
        now = asyncio.get_running_loop().time()
        while self._expected and (first := next(iter(self._expected.items())))[1] <= now:
            del self._expected[first[0]]

    async def left(self, tags: set[Tag]) -> None:
        """Completes when the responses to all of `tags` that were expected have left, or each had its time."""
        self._forget()
        while waiting := [self._expected[tag] for tag in tags if tag in self._expected]:
            self._news.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(max(waiting)):
                    await self._news.wait()
            self._forget()

    async def register_listener(
        self, source_filter: UUri, listener: UListener, sink_filter: UUri | None = None
    ) -> None:
        await self._inner.register_listener(source_filter, listener, sink_filter)

    async def unregister_listener(
        self, source_filter: UUri, listener: UListener, sink_filter: UUri | None = None
    ) -> None:
        await self._inner.unregister_listener(source_filter, listener, sink_filter)


class Pump:
    """Sends what is in the outbox. `sent` is the number of the last change that was told; `dropped` counts messages by
    reason."""

    def __init__(
        self, transport: UTransport, authority: str, store: Store, answers: AnswersFirst, also: Collection[str] = ()
    ) -> None:
        self._teller, self._store, self._answers = Teller(transport, authority, also), store, answers
        self._waiting: deque[tuple[StoredChange, Tag | None]] = deque()
        self._behind = True  # there may be more in the store than is waiting here
        self._news = asyncio.Event()
        self._awaited: list[tuple[int, int, asyncio.Future[None]]] = []  # a heap, by the number of the change
        self._count = itertools.count()  # so that futures are never compared
        self._task: asyncio.Task[None] | None = None
        self._noting: asyncio.TimerHandle | None = None
        self._last = 0.0  # loop time at which something was told
        self.sent = 0
        self._troubles = Troubles(self._teller, store)
        transport.on_connection(lambda connected: self._troubles.kick() if connected else None)

    def __repr__(self) -> str:
        return f"Pump(sent={self.sent}, waiting={len(self._waiting)}{'+' if self._behind else ''}, {self._troubles!r})"

    @property
    def dropped(self) -> Counter[str]:
        """Messages that were refused for good, by reason."""
        return self._teller.dropped

    @property
    def messages_sent(self) -> int:
        return self._teller.sent

    def start(self) -> None:
        self._news.set()
        self._task = asyncio.ensure_future(self._run())

    async def stop(self) -> None:
        """What was not told stays in the store."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None
        await self._troubles.stop()
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

    async def told(self, number: int) -> None:
        """Completes when all changes up to `number` were told."""
        if self.sent >= number:
            return
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._awaited, (number, next(self._count), future))
        await future

    def _told_up_to(self, number: int) -> None:
        """Wakes those that wait for it and no others: there may be thousands, each behind another change."""
        self.sent = max(self.sent, number)
        while self._awaited and self._awaited[0][0] <= self.sent:
            _, _, future = heapq.heappop(self._awaited)
            if not future.done():
                future.set_result(None)

    @property
    def idle(self) -> bool:
        return not self._waiting and not self._behind

    async def _run(self) -> None:
        delay_ms, begun = STORE_RETRY_FIRST_MS, False
        while True:
            if begun and not self._waiting and not self._behind:
                self._news.clear()
                await self._news.wait()
            try:
                if not begun:
                    await self._troubles.start()
                    begun = True
                if not self._waiting:
                    await self._catch_up()
                    continue
                if asyncio.get_running_loop().time() - self._last < GATHER_MS / 1000:
                    await asyncio.sleep(GATHER_MS / 1000)
                batch = [self._waiting.popleft() for _ in range(min(len(self._waiting), CHANGES_BATCH_MAX))]
                await self._tell(batch)
                delay_ms = STORE_RETRY_FIRST_MS
                continue
            except UStatusError as error:
                log.warning("changes can't be read from the store", why=error.message)
            except Exception:
                log.exception("telling changes failed")
                self._waiting.clear()
            self._behind = True  # from the store again, from the last one that was told
            await asyncio.sleep(delay_ms / 1000)
            delay_ms = min(delay_ms * 2, STORE_RETRY_MAX_MS)

    async def _catch_up(self) -> None:
        self._behind = False  # first: what is added from here on either waits behind these, or sets it again
        found = await self._store.read(lambda reader: reader.outbox(self.sent, CHANGES_WAITING_MAX))
        last = found[-1].number if found else 0
        added = [entry for entry in self._waiting if entry[0].number > last]
        self._waiting = deque((change, None) for change in found)
        self._waiting.extend(added)
        if len(found) == CHANGES_WAITING_MAX:
            self._waiting = deque((change, None) for change in found)
            self._behind = True

    async def _tell(self, batch: list[tuple[StoredChange, Tag | None]]) -> None:
        tags = {tag for _, tag in batch if tag is not None}
        if tags:
            await self._answers.left(tags)
        parts = [part for stored, _ in batch if stored.number > self.sent for part in self._teller.parts(stored)]
        held = [part for part in parts if part.destination in self._troubles]
        held += await self._send([part for part in parts if part.destination not in self._troubles])
        if held:
            await self._hold(held)
        self._told_up_to(batch[-1][0].number)
        self._last = asyncio.get_running_loop().time()
        if self._noting is None:
            self._noting = asyncio.get_running_loop().call_later(NOTE_MS / 1000, self._note)

    async def _send(self, parts: list[Part]) -> list[Part]:
        """What was not taken. The first one of it has its destination's trouble; the others behind it are tried once
        more without it."""
        held: list[Part] = []
        while parts:
            failed, _ = await self._teller.send(parts)
            if not failed:
                break
            troubled = failed[0].destination
            self._troubles.begin(troubled)
            held += [part for part in failed if part.destination == troubled]
            parts = [part for part in failed if part.destination != troubled]
        return held

    async def _hold(self, held: list[Part]) -> None:
        """Into the store, before anything behind it counts as told."""
        event = Hold(tuple((part.destination, part.number, part.change, part.recipients) for part in held))
        delay_ms = STORE_RETRY_FIRST_MS
        with self._troubles.holding(held):
            while True:
                try:
                    await self._store.submit(event)
                    return
                except UStatusError as error:
                    log.warning("changes for a destination that is away can't be stored: waiting", why=error.message)
                await asyncio.sleep(delay_ms / 1000)
                delay_ms = min(delay_ms * 2, STORE_RETRY_MAX_MS)
