"""The remote leg: what this service has to tell the services of other authorities, until they have answered.

link with a command -> lane of its authority (lane.py) -> Subscribe, Unsubscribe -> Answered | TimedOut
                          | repeated while no answer comes; after a failure again, with back-off, for ever
notifications to us, audits (audit.py: what do you have of ours?) -> Notified | Lost | Orphaned

The subscriber in all of it is this service itself (core.usubscription).
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
from collections.abc import Callable, Iterator
from typing import Final

import structlog
from google.protobuf.message import Message

from storage.disk import REAL_DISK, Disk
from uprotocol import uri as uris
from uprotocol.communication import CallOptions, InMemoryRpcClient
from uprotocol.core.usubscription.paging_pb2 import PageAsked, PageGiven
from uprotocol.core.usubscription.v3 import usubscription_pb2 as v3
from uprotocol.core.usubscription.v4 import usubscription_pb2 as v4
from uprotocol.message import UPayload
from uprotocol.status import UStatusError
from uprotocol.transport import LocalUriProvider, UTransport
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.umessage_pb2 import UMessage
from uprotocol.v1.uri_pb2 import UUri
from usubscription.audit import Auditor
from usubscription.codec import CHANGE_RESOURCE, CODECS, ENTITY_TYPE, V4_CODEC, read_subscription, to_uri
from usubscription.lane import REPEAT_FIRST_MS, Lane
from usubscription.outbox import Pump
from usubscription.partners import Partners
from usubscription.state import Command, Event, Key, Link, Notified, Status
from usubscription.store import Store

TIMEOUT_MS: Final = 300_000  # of one remote command: req~usubscription-remote-max-timeout~1
# a fleet that is away holds some for each of its services; beyond it commands wait out a back-off
CALLS_PENDING_MAX: Final = 40_000
AUDIT_MS: Final = 300_000  # between questions for what the remote services have of ours
AUDIT_CALL_MS: Final = 10_000  # for the answer to one
RECENT_MS: Final = 60_000  # a late notification about an Unsubscribe may be under way that long
RECENT_MAX: Final = 10_000  # topics for which that is remembered

log = structlog.get_logger()


class Remote:
    """All lanes. `update` gives it every link that changes."""

    def __init__(
        self,
        transport: UTransport,
        authority: str,
        store: Store,
        pump: Pump,
        *,
        timeout_ms: int = TIMEOUT_MS,
        repeat_first_ms: int = REPEAT_FIRST_MS,
        audit_ms: int = AUDIT_MS,
        audit_call_ms: int = AUDIT_CALL_MS,
        random: Callable[[], float] = random.random,
        disk: Disk = REAL_DISK,
    ) -> None:
        self._transport, self._authority = transport, authority
        self._store, self._pump, self.random = store, pump, random
        self._timeout_ms, self.repeat_first_ms, self._audit_call_ms = timeout_ms, repeat_first_ms, audit_call_ms
        self._locals = {major: LocalUriProvider(authority, ENTITY_TYPE, major) for major in CODECS}
        self._clients = {
            major: InMemoryRpcClient(transport, local, calls_pending_max=CALLS_PENDING_MAX)
            for major, local in self._locals.items()
        }
        self._ears = {major: _Ear(major, self._hear) for major in CODECS}
        self._lanes: dict[str, Lane] = {}
        self._recent: dict[Key, float] = {}
        self._started_at = -math.inf  # loop time
        self._partners = Partners(store.database.path.with_name(store.database.path.name + ".partners"), disk)
        self._auditor = Auditor(
            store,
            self._partners,
            fetch=self._fetch,
            busy=self._busy,
            submit=self._submit,
            interval_ms=audit_ms,
            random=random,
        )
        self._open = False
        transport.on_connection(self._connection_changed)

    def __repr__(self) -> str:
        return f"Remote({self._authority}, lanes={len(self._lanes)}, commands={sum(map(len, self._lanes.values()))}, {self._auditor!r})"

    async def start(self) -> None:
        """Listen, then go on with what was not answered before the restart."""
        self._open = True
        self._started_at = asyncio.get_running_loop().time()
        await self._partners.load()
        for client in self._clients.values():
            await client.open()
        for major, ear in self._ears.items():
            await self._transport.register_listener(
                uris.pattern("*", ENTITY_TYPE, major, CHANGE_RESOURCE), ear, self._locals[major].get_source()
            )
        last = await self._store.read(lambda reader: reader.outbox_last())
        links = await self._store.read(lambda reader: reader.links())
        for topic, link in links:
            self.update(topic, link, last)
        if self._partners.all() or any(link.command is None for _, link in links):
            self._auditor.now()
        self._auditor.start()

    async def stop(self) -> None:
        """What was not answered goes on after the restart."""
        self._open = False
        await self._auditor.stop()
        for lane in list(self._lanes.values()):
            await lane.stop()
        for major, ear in self._ears.items():
            with contextlib.suppress(UStatusError):
                source = uris.pattern("*", ENTITY_TYPE, major, CHANGE_RESOURCE)
                await self._transport.unregister_listener(source, ear, self._locals[major].get_source())
        for client in self._clients.values():
            await client.close()
        await self._partners.close()

    @property
    def auditor(self) -> Auditor:
        return self._auditor

    def update(self, topic: Key, link: Link, after: int) -> None:
        """`link` of `topic` is as given; its command, if any, leaves once the changes up to `after` were told."""
        if not self._open:
            return
        lane = self._lanes.get(topic[0])
        if lane is None:
            if link.command is None:
                return
            lane = self._lanes[topic[0]] = Lane(self, topic[0])
        if link.command is Command.UNSUBSCRIBE:
            self._recent.pop(topic, None)
            self._recent[topic] = asyncio.get_running_loop().time()
            if len(self._recent) > RECENT_MAX:
                del self._recent[next(iter(self._recent))]
        lane.update(topic, link, after)

    def forget_all(self) -> None:
        """After a Reset no command is due any more; what others still have of ours is found by asking all of them."""
        for lane in self._lanes.values():
            lane.clear()
        self.ask_all()

    def ask_all(self) -> None:
        """What do they have of ours?"""
        self._auditor.now()

    # -- for the lanes
    # ----------------------------------------------------------------------------------------------------------------

    def idle(self, lane: Lane) -> None:
        """`lane` has nothing left to do."""
        if self._lanes.get(lane.authority) is lane:
            del self._lanes[lane.authority]

    def _busy(self, topic: Key) -> bool:
        lane = self._lanes.get(topic[0])
        return lane is not None and lane.busy(topic)

    async def prepare(self, topic: Key, link: Link, after: int) -> None:
        """The dispatcher prepares on the pending change, so that is told first."""
        if link.command is Command.SUBSCRIBE:
            await self._partners.remember((topic[0], link.major))
        await self._pump.told(after)

    async def store_event(self, event: Event) -> None:
        await self._store.submit(event)

    # -- the calls
    # ------------------------------------------------------------------------------------------------------------------

    async def call(self, topic: Key, link: Link) -> Status:
        """One try. Raises UStatusError."""
        command = link.command
        assert command is not None
        sink = uris.uri(topic[0], ENTITY_TYPE, link.major, int(command))
        request = _request(topic, link, self._locals[link.major].get_source())
        answer = await self._clients[link.major].invoke_method(
            sink, UPayload.pack(request), CallOptions(timeout_ms=self._timeout_ms)
        )
        if command is Command.UNSUBSCRIBE:
            return Status.UNSUBSCRIBED
        with _readable(topic[0]):
            return _read_status(link.major, answer)

    # -- what the others say
    # --------------------------------------------------------------------------------------------------------------

    def _hear(self, major: int, message: UMessage) -> None:
        source = message.attributes.source.authority_name
        try:
            told = CODECS[major].read_change(UPayload.of(message))
        except UStatusError as error:
            log.warning("a change notification can't be read", source=source, why=error.message)
            return
        if told.topic[0] != source or told.subscriber[:3] != (self._authority, ENTITY_TYPE, major):
            return  # not about us, or not theirs to say
        lane = self._lanes.get(source)
        if lane is not None:
            lane.kick()  # it is there
        elif told.status is not Status.UNSUBSCRIBED and (source, major) not in self._partners:
            self._auditor.stranger((source, major))  # it has what we know nothing of: our store was lost
        # about an earlier Unsubscribe of ours, or about what came after it? Ask.
        if told.status is Status.UNSUBSCRIBED:
            # what was recent before the start is forgotten
            since = max(self._recent.get(told.topic, -math.inf), self._started_at)
            if asyncio.get_running_loop().time() - since < RECENT_MS / 1000:
                self._auditor.suspect(told.topic)
                return
            self._recent.pop(told.topic, None)
        self._submit(Notified(told.topic, told.status))

    def _connection_changed(self, connected: bool) -> None:
        if connected and self._open:
            for lane in list(self._lanes.values()):
                lane.kick(connected=True)
            self._auditor.now()

    def _submit(self, event: Event) -> None:
        with contextlib.suppress(UStatusError):  # full or stopping: the next audit will see it
            self._store.submit(event)

    # -- audits
    # ------------------------------------------------------------------------------------------------------------------

    async def _fetch(self, authority: str, major: int, most: int) -> dict[Key, Status]:
        """What that service has of ours. Raises UStatusError; DATA_LOSS for what can't be read, or is more than `most`:
        it says nothing."""
        own = self._locals[major].get_source()
        if major == 4:
            return await self._fetch_4(authority, own, most)
        found: dict[Key, Status] = {}
        offset = 0
        while True:
            _bounded(authority, found, most)
            request = v3.FetchSubscriptionsRequest(subscriber=v3.SubscriberInfo(uri=own), offset=offset or None)
            answer = await self._list(authority, 3, request)
            with _readable(authority):
                page = answer.unpack(v3.FetchSubscriptionsResponse)
                found |= {uris.key(one.topic): Status(one.status.state) for one in page.subscriptions}
            offset += len(page.subscriptions)
            if not page.has_more_records or not page.subscriptions:
                break
        return found

    async def _fetch_4(self, authority: str, own: UUri, most: int) -> dict[Key, Status]:
        """In pages, where the other side knows them (paging.proto); else all at once."""
        found: dict[Key, Status] = {}
        after: int | None = 0
        while after is not None:
            _bounded(authority, found, most)
            request = v4.FetchSubscriptionsRequest(subscriber_filter=own)
            request.MergeFromString(PageAsked(after=after).SerializeToString())
            answer = await self._list(authority, 4, request)
            with _readable(authority):
                page = answer.unpack(v4.FetchSubscriptionsResponse)
                rows = [read_subscription(one) for one in page.subscriptions]
                given = PageGiven.FromString(page.SerializeToString())
                if given.HasField("next") and given.next <= after:
                    raise ValueError("its pages don't come to an end")
            found |= {row.topic: row.status for row in rows}
            after = given.next if given.HasField("next") else None
        return found

    async def _list(self, authority: str, major: int, request: Message) -> UPayload:
        method = uris.uri(authority, ENTITY_TYPE, major, V4_CODEC.methods["fetch_subscriptions"])
        return await self._clients[major].invoke_method(
            method, UPayload.pack(request), CallOptions(timeout_ms=self._audit_call_ms)
        )


def _bounded(authority: str, found: dict[Key, Status], most: int) -> None:
    if len(found) > most:
        raise UStatusError(
            UCode.DATA_LOSS, f"the uSubscription of {authority} claims to have more than {most} subscriptions of ours"
        )


@contextlib.contextmanager
def _readable(authority: str) -> Iterator[None]:
    """What can't be read says nothing about a subscription, so it ends nothing: DATA_LOSS, and asked again."""
    try:
        yield
    except (UStatusError, ValueError) as error:
        raise UStatusError(
            UCode.DATA_LOSS, f"the answer of the uSubscription of {authority} can't be read: {error}"
        ) from None


def _read_status(major: int, answer: UPayload) -> Status:
    """Raises INVALID_ARGUMENT, or ValueError for a status that is not there or of a later specification."""
    if major == 4:
        return Status(answer.unpack(v4.SubscribeResponse).status - 1)
    response = answer.unpack(v3.SubscriptionResponse)
    if not response.HasField("status"):
        raise ValueError("it has no status")
    return Status(response.status.state)


def _request(topic: Key, link: Link, own: UUri) -> Message:
    """No expiry. Version 3 names itself as subscriber, for services that still read that field (C-11)."""
    uri, subscribing = to_uri(topic), link.command is Command.SUBSCRIBE
    if link.major == 4:
        return (
            v4.SubscribeRequest(topic=uri, sample_period=link.sample_period_ms)
            if subscribing
            else v4.UnsubscribeRequest(topic=uri)
        )
    subscriber = v3.SubscriberInfo(uri=own)
    if not subscribing:
        return v3.UnsubscribeRequest(topic=uri, subscriber=subscriber)
    request = v3.SubscriptionRequest(topic=uri, subscriber=subscriber)
    if link.sample_period_ms is not None:
        request.attributes.sample_period_ms = link.sample_period_ms
    return request


class _Ear:
    """Listens to what remote services tell us in one version."""

    def __init__(self, major: int, hear: Callable[[int, UMessage], None]) -> None:
        self._major, self._hear = major, hear

    def on_receive(self, message: UMessage) -> None:
        self._hear(self._major, message)
