"""Publish, notify, subscribe over the in-process transport."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

import uprotocol.communication as communication
from campaigns.simulation.network import FaultyNetwork
from transports.local import LocalTransport
from uprotocol import uri as uris
from uprotocol.communication import (
    CallOptions,
    InMemoryRpcClient,
    InMemoryRpcServer,
    InMemorySubscriber,
    NotificationListener,
    Notifier,
    Publisher,
    RpcClient,
    RpcServer,
    SimpleNotifier,
    SimplePublisher,
    Subscriber,
)
from uprotocol.message import UMessageBuilder, UPayload
from uprotocol.status import OK, UStatusError
from uprotocol.transport import Capability, LocalUriProvider, UListener, UTransport
from uprotocol.v1.uattributes_pb2 import UMessageType, UPayloadFormat, UPriority
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.umessage_pb2 import UMessage
from uprotocol.v1.uri_pb2 import UUri
from uprotocol.v1.ustatus_pb2 import UStatus

spec = pytest.mark.spec
TEXT = UPayload(b"hello", UPayloadFormat.UPAYLOAD_FORMAT_TEXT)
TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
CAR, APP = LocalUriProvider("car", 0x10, 1), LocalUriProvider("app", 0x20, 1)


class Heard:
    """A listener that keeps its messages."""

    def __init__(self) -> None:
        self.messages: asyncio.Queue[UMessage] = asyncio.Queue()

    def on_receive(self, message: UMessage) -> None:
        self.messages.put_nowait(message)

    async def next(self) -> UMessage:
        return await asyncio.wait_for(self.messages.get(), 10)


@dataclass
class Service:
    """A subscription service that records its calls, and may fail."""

    asked: list[tuple[str, str, dict[str, Any]]] = field(default_factory=list)
    error: UStatusError | None = None
    listeners: Any = None

    async def subscribe(self, topic: UUri, **options: Any) -> str:
        return await self._answer("subscribe", topic, options)

    async def unsubscribe(self, topic: UUri) -> str:
        return await self._answer("unsubscribe", topic, {})

    async def _answer(self, what: str, topic: UUri, options: dict[str, Any]) -> str:
        self.asked.append((what, uris.format(topic), options))
        if self.error is not None:
            raise self.error
        return "SUBSCRIBED"


@dataclass
class Pair:
    network: FaultyNetwork
    car: LocalTransport
    app: LocalTransport


@pytest.fixture
async def pair() -> AsyncIterator[Pair]:
    network = FaultyNetwork()
    async with LocalTransport.on(network, CAR) as car, LocalTransport.on(network, APP) as app:
        yield Pair(network, car, app)


@spec("dsn~communication-layer-api-declaration~1")
@spec("dsn~communication-layer-api-namespace~1")
@spec("dsn~communication-layer-impl-default~1")
def test_every_role_is_declared_and_has_an_implementation() -> None:
    assert communication.__name__.rsplit(".", 1)[-1] == "communication"
    implemented = {
        Publisher: SimplePublisher,
        Notifier: SimpleNotifier,
        Subscriber: InMemorySubscriber,
        RpcClient: InMemoryRpcClient,
        RpcServer: InMemoryRpcServer,
    }
    for role, implementation in implemented.items():
        assert inspect.isabstract(role)
        assert issubclass(implementation, role)
        assert not inspect.isabstract(implementation)
    assert issubclass(NotificationListener, UListener)


def test_every_operation_is_a_coroutine() -> None:
    for role in (SimplePublisher, SimpleNotifier, InMemorySubscriber, InMemoryRpcClient, InMemoryRpcServer):
        for name, method in inspect.getmembers(role, inspect.isfunction):
            if not name.startswith(("_", "on_receive")):
                assert inspect.iscoroutinefunction(method), f"{role.__name__}.{name} could block"


class Stuck(UTransport):
    """A transport with a network that never answers: every operation waits for `release`."""

    capabilities = Capability.PUSH

    def __init__(self) -> None:
        self.release = asyncio.Event()
        self.waiting = 0

    async def _wait(self) -> None:
        self.waiting += 1
        await self.release.wait()

    async def send_batch(self, messages: Sequence[UMessage]) -> list[UStatus]:
        await self._wait()
        return [OK] * len(messages)

    async def register_listener(self, *_: Any) -> None:
        await self._wait()

    async def unregister_listener(self, *_: Any) -> None:
        await self._wait()


@spec("dsn~communication-layer-impl-default~1")
@spec("dsn~communication-layer-impl-async~1")
async def test_no_operation_blocks_while_the_network_takes_for_ever() -> None:
    """All at once on one event loop: each waits, and everything else continues."""

    def handler(request: UMessage) -> None:
        raise AssertionError("nobody calls")

    below, topic, method = Stuck(), CAR.get_resource(0x8001), uris.uri("car", 0x10, 1, 1)
    notifier, subscriber = SimpleNotifier(below, APP), InMemorySubscriber(below, APP, Service())
    client, server = InMemoryRpcClient(below, APP), InMemoryRpcServer(below, APP)
    operations = [
        SimplePublisher(below, CAR).publish(0x8001, TEXT),
        SimpleNotifier(below, CAR).notify(0x8001, APP.get_source()),
        notifier.register_notification_listener(topic, Heard()),
        notifier.unregister_notification_listener(topic, Heard()),
        subscriber.subscribe(topic, Heard()),
        client.open(),
        server.register_request_handler(1, handler),
    ]
    tasks = [asyncio.ensure_future(operation) for operation in operations]
    for _ in range(20):  # turns of the event loop, which a blocking operation would prevent
        await asyncio.sleep(0)
    assert below.waiting == len(operations)
    assert not any(task.done() for task in tasks)
    below.release.set()
    await asyncio.wait_for(asyncio.gather(*tasks), 20)
    below.release.clear()
    more = [
        subscriber.unsubscribe(topic),
        client.invoke_method(method, options=CallOptions(60_000)),
        server.unregister_request_handler(1, handler),
    ]
    tasks = [asyncio.ensure_future(operation) for operation in more]
    for _ in range(20):
        await asyncio.sleep(0)
    assert not any(task.done() for task in tasks)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    below.release.set()
    await asyncio.gather(client.close(), server.close())


@spec("local~l2-publisher")
async def test_publishes_on_its_own_topic(pair: Pair) -> None:
    heard = Heard()
    await pair.app.register_listener(CAR.get_resource(0x8001), heard)
    await SimplePublisher(pair.car, CAR).publish(
        0x8001, TEXT, priority=UPriority.UPRIORITY_CS3, ttl_ms=60_000, traceparent=TRACEPARENT
    )
    message = await heard.next()
    attributes = message.attributes
    assert UPayload.of(message) == TEXT
    assert attributes.type == UMessageType.UMESSAGE_TYPE_PUBLISH
    assert attributes.source == CAR.get_resource(0x8001)
    assert not attributes.HasField("sink")
    assert (attributes.priority, attributes.ttl, attributes.traceparent) == (
        UPriority.UPRIORITY_CS3,
        60_000,
        TRACEPARENT,
    )


@spec("local~upriority-explicit")
async def test_what_is_not_said_is_not_set(pair: Pair) -> None:
    heard = Heard()
    await pair.app.register_listener(CAR.get_resource(0x8001), heard)
    await SimplePublisher(pair.car, CAR).publish(0x8001)
    message = await heard.next()
    assert not message.HasField("payload")
    assert not message.attributes.priority
    assert not message.attributes.HasField("ttl")


@spec("dsn~communication-layer-impl-error-handling~1")
@spec("local~l2-exceptions")
async def test_failures_are_status_errors(pair: Pair) -> None:
    publisher, notifier = SimplePublisher(pair.car, CAR), SimpleNotifier(pair.car, CAR)
    for call in (
        publisher.publish(0x7FFF),
        publisher.publish(0x8001, ttl_ms=-1),
        notifier.notify(0x8001, APP.get_resource(1)),
    ):
        with pytest.raises(UStatusError) as caught:
            await call
        assert caught.value.code == UCode.INVALID_ARGUMENT
    pair.network.break_()
    with pytest.raises(UStatusError) as caught:
        await publisher.publish(0x8001)
    assert caught.value.code == UCode.UNAVAILABLE


@spec("local~l2-notifier")
@spec("local~l2-notification-listener")
async def test_notifies_one_destination(pair: Pair) -> None:
    heard, topic = Heard(), CAR.get_resource(0x8002)
    app = SimpleNotifier(pair.app, APP)
    await app.register_notification_listener(topic, heard)
    car = SimpleNotifier(pair.car, CAR)
    await car.notify(
        0x8002, APP.get_source(), TEXT, priority=UPriority.UPRIORITY_CS2, ttl_ms=90_000, traceparent=TRACEPARENT
    )
    message = await heard.next()
    assert UPayload.of(message) == TEXT
    assert message.attributes.type == UMessageType.UMESSAGE_TYPE_NOTIFICATION
    assert (message.attributes.source, message.attributes.sink) == (topic, APP.get_source())
    assert (message.attributes.priority, message.attributes.ttl) == (UPriority.UPRIORITY_CS2, 90_000)

    witness = Heard()
    for resource in (0x8002, 0x8003):
        await app.register_notification_listener(CAR.get_resource(resource), witness)
    await app.unregister_notification_listener(topic, heard)
    for resource in (0x8003, 0x8002):
        await car.notify(resource, APP.get_source())
        await witness.next()
    await app.register_notification_listener(topic, heard)
    await car.notify(0x8003, APP.get_source())
    await witness.next()
    assert heard.messages.empty(), "neither another topic nor what came while it did not listen"


@pytest.mark.parametrize("resource", [0, 1, 0xFFFF])
async def test_notifications_come_from_a_topic(pair: Pair, resource: int) -> None:
    app = SimpleNotifier(pair.app, APP)
    for call in (app.register_notification_listener, app.unregister_notification_listener):
        with pytest.raises(UStatusError) as caught:
            await call(uris.pattern("car", resource=resource), Heard())
        assert caught.value.code == UCode.INVALID_ARGUMENT
    with pytest.raises(UStatusError) as caught:
        await app.unregister_notification_listener(CAR.get_resource(0x8001), Heard())
    assert caught.value.code == UCode.NOT_FOUND


@spec("local~l2-subscriber")
@spec("dsn~usubscription-interaction-subscriber~1", doc="v3")
@spec("aou~usubscription-interaction-subscriber~1", doc="v4")
async def test_subscribes_at_the_service_and_listens(pair: Pair) -> None:
    service, heard, topic = Service(), Heard(), CAR.get_resource(0x8001)
    subscriber = InMemorySubscriber(pair.app, APP, service)
    assert await subscriber.subscribe(topic, heard, sample_period_ms=100) == "SUBSCRIBED"
    assert service.asked == [("subscribe", "up://car/10/1/8001", {"sample_period_ms": 100})]
    publisher = SimplePublisher(pair.car, CAR)
    await publisher.publish(0x8001, TEXT)
    assert (await heard.next()).payload == b"hello"

    await subscriber.unsubscribe(topic, heard)
    assert [what for what, _, _ in service.asked] == ["subscribe", "unsubscribe"]
    await publisher.publish(0x8001)
    last = Heard()
    await pair.app.register_listener(topic, last)
    await publisher.publish(0x8001)
    await last.next()
    assert heard.messages.empty()


async def test_listens_before_it_subscribes(pair: Pair) -> None:
    heard, topic = Heard(), CAR.get_resource(0x8001)

    class PublishesAtOnce(Service):
        async def subscribe(self, topic: UUri, **options: Any) -> str:
            await SimplePublisher(pair.car, CAR).publish(0x8001, TEXT)
            await heard.next()
            return "SUBSCRIBED"

    await InMemorySubscriber(pair.app, APP, PublishesAtOnce()).subscribe(topic, heard)


@spec("dsn~communication-layer-impl-error-handling~1")
async def test_a_failed_subscribe_leaves_no_listener(pair: Pair) -> None:
    service, heard, topic = (
        Service(error=UStatusError(UCode.PERMISSION_DENIED, "no")),
        Heard(),
        CAR.get_resource(0x8001),
    )
    subscriber = InMemorySubscriber(pair.app, APP, service)
    with pytest.raises(UStatusError, match="PERMISSION_DENIED"):
        await subscriber.subscribe(topic, heard)
    with pytest.raises(UStatusError) as caught:
        await pair.app.unregister_listener(topic, heard)
    assert caught.value.code == UCode.NOT_FOUND
    service.error = None
    await subscriber.subscribe(topic, heard)
    service.error = UStatusError(UCode.UNAVAILABLE)
    with pytest.raises(UStatusError):
        await subscriber.subscribe(topic, heard)  # the repetition failed; the existing subscription stays
    await pair.app.unregister_listener(topic, heard)


async def test_a_failed_unsubscribe_may_be_tried_again(pair: Pair) -> None:
    service, heard, topic = Service(), Heard(), CAR.get_resource(0x8001)
    subscriber = InMemorySubscriber(pair.app, APP, service)
    await subscriber.subscribe(topic, heard)
    service.error = UStatusError(UCode.UNAVAILABLE)
    with pytest.raises(UStatusError):
        await subscriber.unsubscribe(topic, heard)
    await SimplePublisher(pair.car, CAR).publish(0x8001)
    await heard.next()
    service.error = None
    await subscriber.unsubscribe(topic, heard)
    with pytest.raises(UStatusError, match="NOT_FOUND"):
        await subscriber.unsubscribe(topic, heard)


async def test_the_last_listener_ends_the_subscription(pair: Pair) -> None:
    service, one, two, topic = Service(), Heard(), Heard(), CAR.get_resource(0x8001)
    subscriber = InMemorySubscriber(pair.app, APP, service)
    await subscriber.subscribe(topic, one)
    await subscriber.subscribe(topic, two)
    await subscriber.unsubscribe(topic, one)
    assert [what for what, _, _ in service.asked] == ["subscribe", "subscribe"]
    await SimplePublisher(pair.car, CAR).publish(0x8001)
    await two.next()
    assert one.messages.empty()
    await subscriber.unsubscribe(topic, two)
    assert service.asked[-1][0] == "unsubscribe"


async def test_a_subscription_outlives_its_subscriber(pair: Pair) -> None:
    service, topic = Service(), CAR.get_resource(0x8001)
    await InMemorySubscriber(pair.app, APP, service).subscribe(topic, Heard())
    assert [what for what, _, _ in service.asked] == ["subscribe"], "nothing unsubscribes by itself"
    reborn = InMemorySubscriber(pair.app, APP, service)
    await reborn.unsubscribe(topic)
    assert service.asked[-1][:2] == ("unsubscribe", "up://car/10/1/8001")


async def test_only_topics_can_be_subscribed_to(pair: Pair) -> None:
    subscriber = InMemorySubscriber(pair.app, APP, Service())
    for resource in (0, 1, 0xFFFF):
        with pytest.raises(UStatusError) as caught:
            await subscriber.subscribe(uris.uri("car", 0x10, 1, resource), Heard())
        assert caught.value.code == UCode.INVALID_ARGUMENT


async def test_an_empty_authority_is_the_own_one(pair: Pair) -> None:
    service = Service()
    await InMemorySubscriber(pair.app, APP, service).subscribe(uris.parse("/30/1/8001"), Heard())
    assert service.asked[0][1] == "up://app/30/1/8001"
    heard = Heard()
    await pair.app.register_listener(CAR.get_resource(0x8001), heard, uris.uri("car", 0x11, 1, 0))
    await SimpleNotifier(pair.car, CAR).notify(0x8001, uris.parse("/11/1/0"))
    assert (await heard.next()).attributes.sink.authority_name == "car"


def test_a_publish_with_a_method_is_not_built() -> None:
    with pytest.raises(UStatusError):
        UMessageBuilder.publish(CAR.get_resource(1)).build()
