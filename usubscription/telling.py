"""Sends changes as messages by destination; a destination that does not accept them catches up later from the store.

StoredChange -> deliveries: one per destination, with its messages -> send_batch -> accepted | refused | not now
not now: held in the store -> the oldest is sent again with back-off -> Released -> caught up
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
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
from uprotocol.transport import Capability, UTransport
from uprotocol.v1.uattributes_pb2 import UAttributes, UMessageType, UPriority
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.umessage_pb2 import UMessage
from uprotocol.v1.ustatus_pb2 import UStatus
from usubscription.state import Change, Key
from usubscription.store.database import Released
from usubscription.store.reader import StoredChange
from usubscription.store.store import SubscriptionStore

RETRY_FIRST_MS: Final = 200  # before the next try for a destination; doubles up to ...
RETRY_MAX_MS: Final = 5_000  # ... while it accepts nothing
RETRY_GAP_MS: Final = 5  # between the tries of two destinations, so that thousands that are away don't block the loop
HELD_BATCH_MAX: Final = 16  # changes of a destination that are sent at once while it catches up
# tries of a change whose error is neither a permanent refusal nor a retryable one (eight minutes); then it is dropped
TRIES_MAX: Final = 100
HOME: Final = ""  # the destination of the change topics: all listeners in the own network
PRIORITY: Final = UPriority.UPRIORITY_CS2

log = structlog.get_logger()


class Delivery(NamedTuple):
    """The messages of one change to one destination."""

    destination: str
    number: int
    change: Change
    recipients: list[tuple[Key, int]]  # of HOME: none
    messages: list[UMessage]


class ChangeSender:
    """Builds the messages of changes and sends them. `sent` and `dropped` count messages."""

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
        self.sent = 0
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
            message = self._message(NOTIFICATION, major, payload)
            if self._also and uris.is_one_of(client[0], self._also):
                message.attributes.source.authority_name = client[0]
            fill_uri(message.attributes.sink, client)
            delivery = deliveries.setdefault(client[0], Delivery(client[0], number, change, [], []))
            delivery.recipients.append((client, major))
            delivery.messages.append(message)
        if self._publishes if held_for is None else held_for == HOME:
            messages = [self._message(PUBLISH, major, payload) for major, payload in payloads.items()]
            deliveries[HOME] = Delivery(HOME, number, change, [], messages)
        return list(deliveries.values())

    def _message(self, type: UMessageType.ValueType, major: int, payload: bytes) -> UMessage:
        message = UMessage(attributes=self._attributes[type, major], payload=payload)
        message.attributes.id.CopyFrom(uuids.new())
        return message

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
            results = list(islice(statuses, len(delivery.messages)))
            failure = next((status for status in results if status.code and status.code not in FINAL), None)
            if failure is None and delivery.destination not in destinations:
                self.count(results)
                continue
            why = failure if failure is not None and not failed else why
            destinations.add(delivery.destination)
            failed.append(delivery)
        return failed, why

    def count(self, statuses: Iterable[UStatus]) -> None:
        for status in statuses:
            if status.code == UCode.OK:
                self.sent += 1
            else:
                self.dropped[code_name(status.code)] += 1


@dataclass(slots=True)
class _Trouble:
    backoff: Backoff = field(default_factory=lambda: Backoff(RETRY_FIRST_MS, RETRY_MAX_MS))
    holding: int = 0  # Hold events that are not committed yet
    tries: int = 0  # of the oldest change
    # of the oldest changes, by number: a retry sends the same messages
    deliveries: dict[int, Delivery] = field(default_factory=dict)

    def keep(self, delivery: Delivery) -> None:
        if len(self.deliveries) < HELD_BATCH_MAX:
            self.deliveries[delivery.number] = delivery


class Troubles(CommandQueue[str, _Trouble]):
    """The destinations that do not accept messages (the keys of `commands`); each catches up from the store."""

    def __init__(self, sender: ChangeSender, store: SubscriptionStore) -> None:
        super().__init__(self._catch_up, 1)
        self._sender, self._store = sender, store

    def __repr__(self) -> str:
        return f"Troubles({len(self)})"

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
            self.put(destination, trouble, RETRY_FIRST_MS)
        return trouble

    @contextlib.contextmanager
    def holding(self, deliveries: Sequence[Delivery]) -> Iterator[None]:
        """While the deliveries are being stored, their destinations do not count as caught up."""
        # a destination may have caught up meanwhile, so it begins again
        troubles = {delivery.destination: self.begin(delivery.destination) for delivery in deliveries}
        for delivery in deliveries:
            troubles[delivery.destination].keep(delivery)
        for trouble in troubles.values():
            trouble.holding += 1
        try:
            yield
        finally:
            for trouble in troubles.values():
                trouble.holding -= 1

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
        for delivery in deliveries:
            trouble.keep(delivery)
        failed, why = await self._sender.send(deliveries)
        done = len(deliveries) - len(failed)
        if not done:
            trouble.tries += why.code not in RETRYABLE
            if trouble.tries < TRIES_MAX:
                return False
            log.warning("a change was refused too often and is dropped", destination=destination, why=why.message)
            self._sender.count([why])
            done = 1
        trouble.tries = 0
        for delivery in deliveries[:done]:
            trouble.deliveries.pop(delivery.number, None)
        await self._store.submit(Released(destination, found[done - 1].number))
        return True
