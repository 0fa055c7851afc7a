"""Notifies subscribers and registered clients of changes, and publishes them on the change topics, in order.

outbox (committed) -> wait for the responses of their requests -> deliveries: one per destination, with its messages
deliveries -> send_batch -> accepted, refused: Sent(number), deleted later
                         '-> not now: Hold -> the oldest is sent again with back-off -> Released -> caught up

A destination is an authority, or the change topics of the own network. Each keeps its order; one that fails does not
delay others: it catches up later from the store.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import itertools
from collections import Counter, deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import structlog

from uprotocol import uri as uris
from uprotocol import uuid as uuids
from uprotocol.attributes import NOTIFICATION, PUBLISH
from uprotocol.core.usubscription.asking import CommandQueue
from uprotocol.core.usubscription.wire import CODECS, V3_CODEC, fill_uri, service
from uprotocol.message import PROTOBUF
from uprotocol.pacing import Backoff
from uprotocol.status import FINAL, OK, RETRYABLE, UStatusError, code_name
from uprotocol.tasks import end, wait_until, wait_within
from uprotocol.transport import Capability, UTransport
from uprotocol.v1.uattributes_pb2 import UAttributes, UPriority
from uprotocol.v1.umessage_pb2 import UMessage
from uprotocol.v1.ustatus_pb2 import UStatus
from usubscription.state import Change
from usubscription.store.database import Hold, Released, Sent
from usubscription.store.store import SubscriptionStore
from usubscription.store.tables import Client, StoredChange

# how long a change waits for the response of its request, from the commit on: a dropped response is never sent
ANSWER_WAIT_MS_MAX: Final = 1_000
CHANGES_WAITING_MAX: Final = 10_000  # in memory; others are read from the store when it is their turn
CHANGES_BATCH_MAX: Final = 128  # some 400 messages: the next batch waits until the network has accepted them
CHANGES_SLICE: Final = 16  # changes in one turn of the event loop, 1 ms, so that answers are not delayed
WOKEN_AT_ONCE: Final = 16  # waiting commands that are woken in one turn: some 2 ms with what they do next
# while changes follow each other, so that they are sent together: a single message costs ten times as much
NOTIFIER_GATHER_MS: Final = 5
# how long changes wait while more requests are queued than one transaction takes: a change costs as much of the event
# loop as an answer, for which a caller is waiting
ANSWERS_FIRST_MS: Final = 1_000
# between two Sent events: each is a commit, and after a crash only later changes are sent twice
NOTE_MS: Final = 200
STORE_RETRY_FIRST_MS: Final = 200  # while the store can't be read or written; doubles up to ...
STORE_RETRY_MAX_MS: Final = 5_000
NOTIFIER_RETRY_FIRST_MS: Final = 200  # before the next try for a destination; doubles up to ...
NOTIFIER_RETRY_MAX_MS: Final = 5_000  # ... while it accepts nothing
RETRY_GAP_MS: Final = 5  # between the tries of two destinations, so that thousands that are away don't block the loop
HELD_BATCH_MAX: Final = 16  # changes of a destination that are sent at once while it catches up
# tries of a change whose error is neither a permanent refusal nor a retryable one (eight minutes); then it is dropped
TRIES_MAX: Final = 100
HOME: Final = ""  # the destination of the change topics: all listeners in the own network
PRIORITY: Final = UPriority.UPRIORITY_CS2

log = structlog.get_logger()


class ResponseTracker:
    """Knows which responses are still to be sent, so that changes are sent after the response that caused them
    (C-23)."""

    def __init__(self) -> None:
        # loop time after which a change no longer waits for it, ascending; so it has the responses of one second
        self._expected: dict[bytes, float] = {}  # by the id of the request
        self._news = asyncio.Event()
        # not set while many commands wait: from when they exceed one transaction until none is left
        self.lull = asyncio.Event()
        self.lull.set()

    def __len__(self) -> int:
        """The number of responses that are still to be sent."""
        return len(self._expected)

    def expect(self, request: bytes) -> None:
        """The response to `request` will be sent. Call it in the turn of the event loop in which it is queued."""
        now = asyncio.get_running_loop().time()
        self._expected[request] = now + ANSWER_WAIT_MS_MAX / 1000
        while (first := next(iter(self._expected.items())))[1] <= now:
            del self._expected[first[0]]

    def sent(self, messages: Sequence[UMessage]) -> None:
        """The messages were sent, or have failed."""
        for message in messages:
            self._expected.pop(uuids.to_bytes(message.attributes.reqid), None)
        self._news.set()

    async def left(self, requests: set[bytes]) -> None:
        """Wait until the expected responses to `requests` were sent, or ANSWER_WAIT_MS_MAX is over for each."""
        loop = asyncio.get_running_loop()
        while waiting := [at for one in requests if (at := self._expected.get(one, 0.0)) > loop.time()]:
            self._news.clear()
            await wait_until(self._news, max(waiting))


class Delivery(NamedTuple):
    """The messages of one change to one destination."""

    destination: str
    number: int
    change: Change
    recipients: list[Client]  # of HOME: none
    messages: list[UMessage]


class ChangeSender:
    """Builds the messages of changes and sends them. `dropped` counts messages."""

    def __init__(self, transport: UTransport, authority: str, also: Collection[str] = ()) -> None:
        """`also`: authorities, or families of them, for whose clients this service has their own authority."""
        self._transport, self._also = transport, also
        self._attributes = {
            (type, major): UAttributes(
                type=type, source=service(authority, major), priority=PRIORITY, payload_format=PROTOBUF
            )
            for type in (NOTIFICATION, PUBLISH)
            for major in CODECS
        }
        self._publishes = Capability.PUBLISH_WITHOUT_SINK in transport.capabilities
        self.dropped: Counter[str] = Counter()

    def deliveries(self, stored: StoredChange, held_for: str | None = None) -> list[Delivery]:
        """Notifications, then the Publish in either version (C-18, A-41). `held_for`: the only destination of a held
        change. The messages are validated by the transport."""
        number, change, _ = stored
        payloads = {major: codec.change(change).SerializeToString() for major, codec in CODECS.items()}
        deliveries: dict[str, Delivery] = {}
        for client, major in stored.recipients:
            payload = payloads[major]
            if change.bare and (client, major) == (change.subscriber, V3_CODEC.major):  # with the topic of its request
                payload = V3_CODEC.change(change, bare=True).SerializeToString()
            message = UMessage(attributes=self._attributes[NOTIFICATION, major], payload=payload)
            message.attributes.id.CopyFrom(uuids.new())
            if self._also and uris.is_one_of(client[0], self._also):
                message.attributes.source.authority_name = client[0]
            fill_uri(message.attributes.sink, client)
            delivery = deliveries.setdefault(client[0], Delivery(client[0], number, change, [], []))
            delivery.recipients.append((client, major))
            delivery.messages.append(message)
        if self._publishes if held_for is None else held_for == HOME:
            delivery = deliveries[HOME] = Delivery(HOME, number, change, [], [])
            for major, payload in payloads.items():
                message = UMessage(attributes=self._attributes[PUBLISH, major], payload=payload)
                message.attributes.id.CopyFrom(uuids.new())
                delivery.messages.append(message)
        return list(deliveries.values())

    async def send(self, deliveries: Sequence[Delivery]) -> tuple[list[Delivery], UStatus]:
        """Send them. Returns those that have to be sent again later, and the error of the first of them.

        After a failure all later deliveries to the same destination count as failed, so that their order is kept.
        """
        messages = [message for delivery in deliveries for message in delivery.messages]
        try:
            statuses = iter(await self._transport.send_batch(messages))
        except UStatusError as error:
            statuses = iter([error.status] * len(messages))
        failed: list[Delivery] = []
        destinations: set[str] = set()  # that failed
        why = OK
        for delivery in deliveries:
            results = list(itertools.islice(statuses, len(delivery.messages)))
            failure = next((status for status in results if status.code and status.code not in FINAL), None)
            if failure is None and delivery.destination not in destinations:
                self.dropped.update(code_name(status.code) for status in results if status.code)
                continue
            why = failure if failure is not None and not failed else why
            destinations.add(delivery.destination)
            failed.append(delivery)
        return failed, why


@dataclass(slots=True)
class _Trouble:
    backoff: Backoff = field(default_factory=lambda: Backoff(NOTIFIER_RETRY_FIRST_MS, NOTIFIER_RETRY_MAX_MS))
    holding: int = 0  # Hold events that are not committed yet
    tries: int = 0  # of the oldest change
    # of the oldest changes, by number: a retry sends the same messages
    deliveries: dict[int, Delivery] = field(default_factory=dict)


class Troubles(CommandQueue[str, _Trouble]):
    """The destinations that do not accept messages (the keys of `commands`); each catches up from the store."""

    def __init__(self, sender: ChangeSender, store: SubscriptionStore) -> None:
        super().__init__(self._catch_up, 1)
        self._sender, self._store = sender, store

    async def start(self) -> None:
        """Begin with the destinations of changes that were held before a restart. Raises UStatusError if the store
        can't be read."""
        for destination in await self._store.read(lambda reader: reader.destinations_held()):
            self.put(destination, _Trouble())

    def begin(self, destination: str) -> _Trouble:
        trouble = self.commands.get(destination)
        if trouble is None:
            log.info("changes can't be sent now: they wait", destination=destination or "the own network")
            trouble = _Trouble()
            self.put(destination, trouble, NOTIFIER_RETRY_FIRST_MS)
        return trouble

    def retry_now(self) -> None:
        """Retry at once: the network is back."""
        for trouble in self.commands.values():
            trouble.backoff.reset()
        self.hurry()

    async def _catch_up(self, destination: str, trouble: _Trouble) -> int | None:
        """Returns the milliseconds until the next try; None: it has caught up."""
        try:
            progress = await self._retry(destination, trouble)
            if progress is None:
                return None
            if progress:
                trouble.backoff.reset()
                return 0
        except UStatusError as error:
            what = "the held changes of a destination can't be read or released"
            log.warning(what, destination=destination, why=error.message)
        except Exception:
            log.exception("sending held changes failed", destination=destination)
        await asyncio.sleep(RETRY_GAP_MS / 1000)
        return trouble.backoff.next_ms()

    async def _retry(self, destination: str, trouble: _Trouble) -> bool | None:
        """Send the oldest changes. True: some were sent; False: none; None: nothing is left."""
        found = await self._store.read(lambda reader: reader.held(destination, HELD_BATCH_MAX))
        if not found:
            return False if trouble.holding else None
        deliveries = [
            trouble.deliveries.get(stored.number) or self._sender.deliveries(stored, destination)[0] for stored in found
        ]
        trouble.deliveries |= {delivery.number: delivery for delivery in deliveries}
        failed, why = await self._sender.send(deliveries)
        done = len(deliveries) - len(failed)
        if not done:
            trouble.tries += why.code not in RETRYABLE
            if trouble.tries < TRIES_MAX:
                return False
            log.warning("a change was refused too often and is dropped", destination=destination, why=why.message)
            self._sender.dropped[code_name(why.code)] += 1
            done = 1
        trouble.tries = 0
        for delivery in deliveries[:done]:
            trouble.deliveries.pop(delivery.number, None)
        await self._store.submit(Released(destination, found[done - 1].number))
        return True


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
        self._waiting: deque[tuple[StoredChange, bytes | None]] = deque()  # with the id of the request that caused it
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

    def add(self, changes: Sequence[StoredChange], request: bytes | None) -> None:
        if not self._behind and len(self._waiting) + len(changes) <= CHANGES_WAITING_MAX:
            self._waiting.extend((change, request) for change in changes)
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
                is_soon = asyncio.get_running_loop().time() - self._last < NOTIFIER_GATHER_MS / 1000
                if is_soon and len(self._waiting) < CHANGES_BATCH_MAX:
                    await asyncio.sleep(NOTIFIER_GATHER_MS / 1000)
                if not self._responses.lull.is_set():
                    await wait_within(self._responses.lull, ANSWERS_FIRST_MS / 1000)
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

    async def _send_batch(self, batch: list[tuple[StoredChange, bytes | None]]) -> None:
        await self._responses.left({request for _, request in batch if request is not None})
        deliveries: list[Delivery] = []
        for count, stored in enumerate(stored for stored, _ in batch if stored.number > self.sent):
            if count and not count % CHANGES_SLICE:
                await asyncio.sleep(0)
            deliveries += self._sender.deliveries(stored)
        await self._deliver(deliveries)
        await self.notified_up_to(batch[-1][0].number)
        self._last = asyncio.get_running_loop().time()
        if self._noting is None:
            self._noting = asyncio.get_running_loop().call_later(NOTE_MS / 1000, self._note)

    async def _deliver(self, deliveries: list[Delivery]) -> None:
        """Send them. What is not accepted is stored before later changes count as sent: the destination of the first
        failure is in trouble, and the failed deliveries to others are sent once more without it."""
        troubled = self.troubles.commands
        held = [one for one in deliveries if one.destination in troubled]
        rest = [one for one in deliveries if one.destination not in troubled]
        while rest:
            rest, _ = await self._sender.send(rest)
            if rest:
                failing = rest[0].destination
                self.troubles.begin(failing)
                held += [one for one in rest if one.destination == failing]
                rest = [one for one in rest if one.destination != failing]
        if not held:
            return
        # a destination that has caught up meanwhile begins again, and has not caught up before these are stored
        troubles = {one.destination: self.troubles.begin(one.destination) for one in held}
        for one in held:
            if len(known := troubles[one.destination].deliveries) < HELD_BATCH_MAX:
                known[one.number] = one
        for trouble in troubles.values():
            trouble.holding += 1
        event = Hold(tuple((one.destination, one.number, one.change, tuple(one.recipients)) for one in held))
        backoff = Backoff(STORE_RETRY_FIRST_MS, STORE_RETRY_MAX_MS)
        try:
            while True:
                try:
                    await self._store.submit(event)
                    return
                except UStatusError as error:
                    log.warning("changes for a destination that is away can't be stored: waiting", why=error.message)
                await backoff.wait()
        finally:
            for trouble in troubles.values():
                trouble.holding -= 1
