"""The applications on the networks: publishers, hearers, subscribers, a history reader, and a foreign uSubscription
service.

They are never killed, and have sessions as clients of a broker have. They report what they see to the checker.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from google.protobuf.message import Message

from campaigns.simulation.network import CALM
from history.reading.client import Frames, HistoryClient
from history.reading.following import FollowMode
from history.reading.subscriber import GaplessSubscriber
from transports.local import LocalConfig, LocalTransport
from uprotocol import attributes as attrs
from uprotocol import uri as uris
from uprotocol import uuid as uuids
from uprotocol.attributes import is_expired
from uprotocol.communication import CallOptions, InMemoryRpcClient, InMemoryRpcServer
from uprotocol.core.ustreamer.v1.ustreamer_pb2 import Gap
from uprotocol.core.usubscription.v3 import usubscription_pb2 as v3
from uprotocol.core.usubscription.wire import CODECS
from uprotocol.message import UMessageBuilder, UPayload
from uprotocol.status import RETRYABLE, UStatusError
from uprotocol.transport import LocalUriProvider
from uprotocol.v1.uattributes_pb2 import UPayloadFormat, UPriority
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.umessage_pb2 import UMessage
from uprotocol.v1.uri_pb2 import UUri
from uprotocol.v1.uuid_pb2 import UUID
from usubscription_client import Status, Subscription
from usubscription_client.client import USubscriptionClient

if TYPE_CHECKING:
    from campaigns.simulation.checker import Wish

CALL_MS: Final = 4_000  # of a subscriber's call; then it tries again
RETRY_S: Final = 0.4
BURST_MESSAGES: Final = 20
FLOOD_BATCH: Final = 10
BURST_PAUSE_S: Final = 0.002  # at most, between two of them
PRIORITIES: Final = (UPriority.UPRIORITY_CS1, UPriority.UPRIORITY_CS1, UPriority.UPRIORITY_CS3)
SUBSCRIBE, UNSUBSCRIBE = 1, 2  # methods of both versions
FINAL: Final = frozenset({UCode.INVALID_ARGUMENT, UCode.PERMISSION_DENIED, UCode.NOT_FOUND, UCode.UNIMPLEMENTED})
"""Codes that refuse for good."""


async def node(world: Any, network: str, authority: str, entity: int, version: int = 1) -> LocalTransport:
    config = LocalConfig(network=world.networks[network].name, session=f"{authority}-{entity:x}-{version}")
    made = LocalTransport(config, LocalUriProvider(authority, entity, version), world.networks[network])
    await made.open()
    return made


class Publisher:
    """Sends one message after the other; repeats each until the network has accepted it, like a QoS 1 client."""

    def __init__(
        self,
        world: Any,
        transport: LocalTransport,
        name: str,
        topics: Sequence[UUri],
        sinks: Sequence[UUri],
        ttl_share: float,
    ) -> None:
        self._world, self._transport, self.name, self._topics, self._sinks = world, transport, name, topics, sinks
        self._ttl_share = ttl_share
        self._count = 0
        self._turn = asyncio.Lock()  # only one message is sent at a time

    async def run(self, messages: int, pause_s: float) -> None:
        dice = self._world.dice
        for _ in range(messages):
            await asyncio.sleep(dice.random() * pause_s)
            sink = dice.choice(self._sinks) if self._sinks and dice.random() < 0.15 else None
            await self.publish(
                dice.choice(self._topics), sink, dice.choice(PRIORITIES), dice.random() < self._ttl_share
            )

    async def publish(
        self, topic: UUri, sink: UUri | None = None, priority: int = UPriority.UPRIORITY_CS1, short_lived: bool = False
    ) -> UMessage | None:
        """Returns the message; None: it is unknown whether it was sent."""
        async with self._turn:
            return await self._publish(topic, sink, priority, short_lived)

    async def burst(self, dice: random.Random, seconds: float) -> None:
        """Publish on one topic, about one message in each turn of a busy loop."""
        topic, end = dice.choice(self._topics), asyncio.get_running_loop().time() + seconds
        while asyncio.get_running_loop().time() < end:
            for _ in range(BURST_MESSAGES):
                await self.publish(topic)
                await asyncio.sleep(dice.random() * BURST_PAUSE_S)
            await asyncio.sleep(dice.random() * 50 * BURST_PAUSE_S)

    def _new_id(self) -> UUID | None:
        """The id of the next message; None: one of the world's clock."""
        return None

    async def _publish(self, topic: UUri, sink: UUri | None, priority: int, short_lived: bool) -> UMessage | None:
        self._count += 1
        builder = UMessageBuilder.publish(topic) if sink is None else UMessageBuilder.notification(topic, sink)
        builder.with_priority(priority)  # type: ignore[arg-type]
        if short_lived:
            builder.with_ttl(int(200 + self._world.dice.random() * 20_000))
        text = f"{self.name} {self._count}".encode()
        if (id := self._new_id()) is not None:
            builder.with_id(id)
        message = builder.build_from_upayload(UPayload(text, UPayloadFormat.UPAYLOAD_FORMAT_TEXT))
        sent = self._world.checker.publishes(message)
        while not self._world.given_up:
            try:
                status = (await self._transport.send_batch([message]))[0]
            except UStatusError as error:
                status = error.status
            if status.code == UCode.OK:
                sent.acknowledged()
                return message
            if status.code not in RETRYABLE or is_expired(message.attributes, uuids.now_ms()):
                return None
            await asyncio.sleep(0.02 + self._world.dice.random() * 0.1)
        return None


class Flood:
    """A vehicle of a fleet that sends far more than its quota, and nothing again."""

    def __init__(self, world: Any, transport: LocalTransport, topic: UUri) -> None:
        self._world, self._transport, self._topic = world, transport, topic

    async def run(self, batches: int, pause_s: float) -> None:
        checker = self._world.checker
        for number in range(batches):
            payload = UPayload(f"flood {number}".encode(), UPayloadFormat.UPAYLOAD_FORMAT_TEXT)
            builders = (UMessageBuilder.publish(self._topic) for _ in range(FLOOD_BATCH))
            messages = [builder.build_from_upayload(payload) for builder in builders]
            sents = [checker.publishes(message, is_flood=True) for message in messages]
            try:
                statuses = await self._transport.send_batch(messages)
            except UStatusError:
                continue
            for sent, status in zip(sents, statuses, strict=True):
                if status.code == UCode.OK:
                    sent.acknowledged()
            await asyncio.sleep(pause_s)


class Hearer:
    """Records the messages of a network for one authority."""

    def __init__(self, world: Any, name: str) -> None:
        self._world, self.name = world, name

    def on_receive_batch(self, messages: Sequence[UMessage]) -> None:
        for message in messages:
            inside = UMessage()
            inside.CopyFrom(message)
            inside.attributes.source.CopyFrom(self._world.inside(message.attributes.source))
            self._world.checker.heard(self.name, inside)


class Subscriber:
    """One client of a uSubscription service, whose wishes are drawn. The last one on each topic must hold in
    the end."""

    def __init__(
        self, world: Any, transport: LocalTransport, name: str, authority: str, version: int, network: str
    ) -> None:
        self._world, self.name, self.version, self.authority, self._network = world, name, version, authority, network
        self._transport = transport
        self.local = transport.local
        self.client = USubscriptionClient(
            transport, transport.local, authority, version, call_ms=CALL_MS, probe_ms=1_000
        )
        self.client.on_change(self._changed)
        self._busy: dict[Any, asyncio.Lock] = {}

    async def open(self) -> None:
        while True:
            try:
                await self.client.open()
                return
            except UStatusError:
                await asyncio.sleep(RETRY_S)

    @property
    def uri(self) -> UUri:
        return self.local.get_source()

    def _changed(self, change: Subscription) -> None:
        if uris.key(change.subscriber) == uris.key(self.uri):
            self._world.checker.on_change(self.name, self._world.inside(change.topic), change.status)

    def _named(self, topic: UUri) -> UUri:
        named: UUri = self._world.named(self._network, topic)
        return named

    async def wish(self, topic: UUri, wanted: bool) -> None:
        """Repeat until the service has answered OK."""
        lock = self._busy.setdefault(uris.key(topic), asyncio.Lock())
        async with lock:
            await self._say(self._world.checker.wishes(self.name, topic, wanted), topic, wanted)

    async def _say(self, wish: Wish, topic: UUri, wanted: bool) -> None:
        while not self._world.given_up:
            try:
                if wanted:
                    status = await self.client.subscribe(self._named(topic))
                else:
                    await self.client.unsubscribe(self._named(topic))
                    status = Status.UNSUBSCRIBED
            except UStatusError as error:
                if error.code in FINAL:
                    wish.refused(error.code)
                    return
                wish.unanswered()
                await asyncio.sleep(RETRY_S)
                continue
            wish.answered(status)
            return

    async def hurry(self, topic: UUri, last: bool) -> None:
        """Send Subscribe, Unsubscribe, ... without waiting for answers; the last one must win if the network keeps
        their order."""
        network: Any = self._transport.network
        if network.weather is not CALM or network.has_late:
            await self.wish(topic, last)
            return
        lock = self._busy.setdefault(uris.key(topic), asyncio.Lock())
        async with lock:
            wish = self._world.checker.wishes(self.name, topic, last, is_hurried=True)
            commands = [last, not last, last]
            # after a reconnect it would repeat a subscription that was ended without it
            self.client._subscribed.pop(uris.key(self._named(topic)), None)
            rpc = InMemoryRpcClient(self._transport, self.local)
            await rpc.open()
            try:
                calls = [asyncio.ensure_future(self._raw(rpc, self._named(topic), subscribe)) for subscribe in commands]
                results = await asyncio.gather(*calls, return_exceptions=True)
            finally:
                await rpc.close()
            if isinstance(results[-1], Status):
                self._world.note("hurry", self.name, [str(result) for result in results])
                wish.answered(results[-1])
                return
            wish.unanswered()
            await self._say(wish, topic, last)

    async def _raw(self, rpc: InMemoryRpcClient, topic: UUri, subscribe: bool) -> Status:
        codec = CODECS[self.version]
        request = codec.subscribe(topic) if subscribe else codec.unsubscribe(topic)
        sink = uris.uri(self.authority, 0, self.version, SUBSCRIBE if subscribe else UNSUBSCRIBE)
        payload = await rpc.invoke_method(sink, UPayload.pack(request), CallOptions(timeout_ms=CALL_MS))
        return codec.read_status(payload) if subscribe else Status.UNSUBSCRIBED


class Foreign:
    """A foreign uSubscription service of version 3, which cannot list everything. It can stop answering, and refuse
    commands for a while."""

    def __init__(self, world: Any, transport: LocalTransport, authority: str) -> None:
        self._world, self._transport, self.authority = world, transport, authority
        self._server = InMemoryRpcServer(transport, LocalUriProvider(authority, 0, 3))
        self.subscribers: dict[Any, dict[Any, UUri]] = {}
        self._registered: dict[Any, dict[Any, UUri]] = {}
        self.speaking = asyncio.Event()
        self.speaking.set()

    async def open(self) -> None:
        for method, handler in (
            (1, self._subscribe),
            (2, self._unsubscribe),
            (3, self._fetch),
            (6, self._register),
            (8, self._fetch_subscribers),
        ):
            await self._server.register_request_handler(method, handler)

    async def set(self, topic: UUri, subscriber: UUri, subscribed: bool) -> None:
        topic = self._world.named("cloud", topic)
        known = self.subscribers.setdefault(uris.key(topic), {})
        if subscribed:
            known[uris.key(subscriber)] = subscriber
        else:
            known.pop(uris.key(subscriber), None)
        state = v3.SubscriptionStatus.SUBSCRIBED if subscribed else v3.SubscriptionStatus.UNSUBSCRIBED
        update = v3.Update(
            topic=topic, subscriber=v3.SubscriberInfo(uri=subscriber), status=v3.SubscriptionStatus(state=state)
        )
        for sink in self._registered.get(uris.key(topic), {}).values():
            message = UMessageBuilder.notification(uris.uri(self.authority, 0, 3, 0x8000), sink).pack(update)
            while (await self._transport.send_batch([message]))[0].code in RETRYABLE and not self._world.given_up:  # noqa: ASYNC110
                await asyncio.sleep(0.05)

    async def _subscribe(self, request: UMessage) -> Message:
        await self.speaking.wait()
        asked = UPayload.of(request).unpack(v3.SubscriptionRequest)
        await self.set(asked.topic, request.attributes.source, True)
        return v3.SubscriptionResponse(
            status=v3.SubscriptionStatus(state=v3.SubscriptionStatus.SUBSCRIBED), topic=asked.topic
        )

    async def _unsubscribe(self, request: UMessage) -> Message:
        await self.speaking.wait()
        asked = UPayload.of(request).unpack(v3.UnsubscribeRequest)
        await self.set(asked.topic, request.attributes.source, False)
        return v3.UnsubscribeResponse()

    async def _register(self, request: UMessage) -> Message:
        await self.speaking.wait()
        topic = UPayload.of(request).unpack(v3.NotificationsRequest).topic
        self._registered.setdefault(uris.key(topic), {})[uris.key(request.attributes.source)] = (
            request.attributes.source
        )
        return v3.NotificationsResponse()

    async def _fetch_subscribers(self, request: UMessage) -> Message:
        await self.speaking.wait()
        topic = UPayload.of(request).unpack(v3.FetchSubscribersRequest).topic
        found = self.subscribers.get(uris.key(topic), {})
        return v3.FetchSubscribersResponse(subscribers=[v3.SubscriberInfo(uri=one) for one in found.values()])

    async def _fetch(self, request: UMessage) -> Message:
        """The subscriptions of one subscriber, as an audit asks for them."""
        await self.speaking.wait()
        asked = UPayload.of(request).unpack(v3.FetchSubscriptionsRequest)
        if not asked.HasField("subscriber"):
            raise UStatusError(UCode.UNIMPLEMENTED, "by subscriber only")
        key = uris.key(asked.subscriber.uri)
        response = v3.FetchSubscriptionsResponse()
        for topic, subscribers in self.subscribers.items():
            if key in subscribers:
                response.subscriptions.add(
                    topic=uris.uri(*topic),
                    subscriber=v3.SubscriberInfo(uri=subscribers[key]),
                    status=v3.SubscriptionStatus(state=v3.SubscriptionStatus.SUBSCRIBED),
                )
        return response


class HistoryReader:
    """Reads all records of `topics`; restarts at times from its cursor file, and in another of `modes`."""

    def __init__(
        self,
        world: Any,
        transport: LocalTransport,
        service: UUri,
        topics: Sequence[UUri],
        cursor: Path,
        modes: Sequence[FollowMode] = (),
    ) -> None:
        """`modes`: empty: it only polls, since nothing can be pushed to it."""
        self._modes = modes
        self._world, self._transport, self._service, self.topics, self._cursor = (
            world,
            transport,
            service,
            topics,
            cursor,
        )

    async def run(self) -> None:
        while not self._world.given_up:
            try:
                await self._live(10 + int(self._world.dice.random() * 60))
            except UStatusError as error:
                self._world.note("reader", repr(error))
                await asyncio.sleep(RETRY_S)

    async def _live(self, batches: int) -> None:
        async with InMemoryRpcClient(self._transport, self._transport.local) as rpc:
            frames = Frames(self._transport, self._transport.local) if self._modes else None
            client = HistoryClient(rpc, self._service, timeout_ms=3_000, frames=frames)
            reader = GaplessSubscriber(
                client,
                self.topics,
                cursor_path=self._cursor,
                wait_ms_max=4_000,
                on_gap=self._gap,
                rng=self._world.dice,
                random_bytes=self._world.dice.randbytes,
            )
            if self._modes:
                reader.mode = self._world.dice.choice(self._modes)
            self._world.checker.reader_starts()
            async with reader:
                for _ in range(batches):
                    if self._modes and self._world.dice.random() < 0.2:
                        reader.mode = self._world.dice.choice(self._modes)
                    for record in await reader.next_batch():
                        self._world.checker.read(record.incarnation, record.seq, record.message)
                with contextlib.suppress(UStatusError):
                    await reader.commit()

    def _gap(self, gap: Gap) -> None:
        self._world.checker.reader_gap(gap)


def is_application(message: UMessage) -> bool:
    return message.attributes.source.ue_id >= 0x8000 and message.attributes.type in (attrs.PUBLISH, attrs.NOTIFICATION)
