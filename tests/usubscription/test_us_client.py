"""The client: both versions, finding out the version, order of commands, reconnects."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from transports.local import LocalTransport
from uprotocol import uri as uris
from uprotocol.attributes import REQUEST
from uprotocol.communication import InMemorySubscriber
from uprotocol.message import UMessageBuilder, UPayload
from uprotocol.status import UStatusError
from uprotocol.transport import LocalUriProvider
from uprotocol.v1.ucode_pb2 import UCode
from usubscription_client import Status, Subscription, USubscriptionClient

TOPIC = uris.parse("//dev1/20/1/8001")
OTHER = uris.parse("//dev1/20/1/8002")
both = pytest.mark.parametrize("version", [3, 4])


class Listener:
    def __init__(self) -> None:
        self.heard: asyncio.Queue[Any] = asyncio.Queue()

    def on_receive(self, message: Any) -> None:
        self.heard.put_nowait(message)


@both
async def test_every_call_in_both_versions(world: Any, version: int) -> None:
    await world.service()
    client = await world.client(version=version)
    changes: asyncio.Queue[Subscription] = asyncio.Queue()
    client.on_change(changes.put_nowait)
    await client.register_for_notifications(TOPIC if version == 3 else None)
    assert (
        await client.subscribe(uris.parse("/20/1/8001"), sample_period_ms=50, expires_ms=4_102_444_800_000)
        is Status.SUBSCRIBED
    )
    own = uris.parse("//dev1/10/1/0")
    wanted = Subscription(TOPIC, own, Status.SUBSCRIBED, 4_102_444_800_000, 50)
    assert await client.fetch_subscriptions(topic=TOPIC) == [wanted] == await client.fetch_subscriptions(subscriber=own)
    assert await client.fetch_subscribers(TOPIC) == [own]
    await client.unsubscribe(TOPIC)
    assert await client.fetch_subscribers(TOPIC) == []
    await client.unregister_for_notifications(TOPIC if version == 3 else None)
    with pytest.raises(UStatusError) as error:
        await client.reset()
    assert error.value.code == UCode.PERMISSION_DENIED
    assert await asyncio.wait_for(changes.get(), 20) == wanted
    assert (await asyncio.wait_for(changes.get(), 20)).status is Status.UNSUBSCRIBED
    assert changes.empty()  # once as subscriber or registrant, never twice


async def test_what_version_3_cannot_do_is_said(world: Any) -> None:
    await world.service()
    client = await world.client(version=3)
    for call in (client.fetch_subscriptions(), client.register_for_notifications()):
        with pytest.raises(UStatusError) as error:
            await call
        assert error.value.code == UCode.UNIMPLEMENTED


async def test_pages_are_followed(world: Any) -> None:
    await world.service(page_entries_max=2)
    client = await world.client(version=3)
    topics = [uris.uri("dev1", 0x20, 1, 0x8000 + number) for number in range(5)]
    for topic in topics:
        await client.subscribe(topic)
    assert [one.topic for one in await client.fetch_subscriptions(subscriber=uris.parse("//dev1/10/1/0"))] == topics


async def test_the_version_is_found_out_once(world: Any) -> None:
    await world.service()
    client = await world.client()
    assert client.version is None
    await asyncio.gather(client.subscribe(TOPIC), client.subscribe(OTHER))
    assert client.version == 4
    assert (
        sum(world.services["dev1"].requests[name] for name in ("fetch_subscriptions_v4", "fetch_subscribers_v3")) == 2
    )


async def test_without_a_service_the_client_says_unavailable_and_finds_one_later(world: Any) -> None:
    client = await world.client(probe_ms=50)
    with pytest.raises(UStatusError, match="no uSubscription service answers at dev1") as error:
        await client.subscribe(TOPIC)
    assert error.value.code == UCode.UNAVAILABLE
    await world.service()
    assert await client.subscribe(TOPIC) is Status.SUBSCRIBED


async def test_commands_leave_in_order_and_the_last_one_wins(world: Any) -> None:
    service = await world.service()
    client = await world.client(version=4)
    transport = await world.transport("dev1", 0x77)
    spy = Listener()
    await transport.register_listener(uris.ANY, spy, uris.uri("dev1", 0, 4, 0xFFFF))
    first = asyncio.ensure_future(client.subscribe(OTHER))
    await asyncio.sleep(0)  # it is sent alone
    calls = [
        asyncio.ensure_future(call)
        for call in (client.subscribe(TOPIC), client.unsubscribe(TOPIC), client.subscribe(TOPIC))
    ]
    results = await asyncio.gather(first, *calls, return_exceptions=True)
    assert results[0] is results[3] is Status.SUBSCRIBED
    assert [error.code for error in results[1:3]] == [UCode.ABORTED] * 2
    sent = [spy.heard.get_nowait() for _ in range(spy.heard.qsize())]
    assert [one.attributes.sink.resource_id for one in sent if one.attributes.type == REQUEST] == [1, 1]
    assert len(await service.subscriptions()) == 2


async def test_equal_commands_share_an_answer(world: Any) -> None:
    service = await world.service()
    client = await world.client(version=4)
    assert await asyncio.gather(*(client.subscribe(TOPIC) for _ in range(10))) == [Status.SUBSCRIBED] * 10
    assert service.requests["subscribe_v4"] <= 2


async def test_subscriptions_are_restored_after_a_reconnect(world: Any) -> None:
    await world.service()
    client = await world.client()
    await client.subscribe(TOPIC, sample_period_ms=5)
    await client.subscribe(OTHER)
    await client.unsubscribe(OTHER)
    await client.register_for_notifications()
    await world.stop()
    for left in world.path.glob("dev1.db*"):
        left.unlink()
    service = await world.service()
    heard: asyncio.Queue[Subscription] = asyncio.Queue()
    client.on_change(heard.put_nowait)
    client.transport.disconnect()
    client.transport.reconnect()
    restored = await asyncio.wait_for(heard.get(), 20)
    assert (restored.topic, restored.sample_period_ms) == (TOPIC, 5)
    assert len(await service.subscriptions()) == 1


async def test_a_listener_hears_the_topic_until_the_unsubscribe(world: Any) -> None:
    await world.service()
    client, publisher = await world.client(), await world.transport("dev1", 0x20)
    one, two = Listener(), Listener()
    await client.subscribe(TOPIC, one)
    await client.subscribe(TOPIC, two)
    await publisher.send(UMessageBuilder.publish(TOPIC).build())
    await asyncio.wait_for(asyncio.gather(one.heard.get(), two.heard.get()), 20)
    await client.unsubscribe(TOPIC, one)
    assert await client.fetch_subscribers(TOPIC) != [], "the other listener still wants it"
    await client.unsubscribe(TOPIC)
    await publisher.send(UMessageBuilder.publish(TOPIC).build())
    await client.fetch_subscribers(TOPIC)  # after it
    assert one.heard.empty()
    assert two.heard.empty()


async def test_a_failed_subscribe_leaves_no_listener(world: Any) -> None:
    await world.service()
    client = await world.client(version=4)
    listener = Listener()
    with pytest.raises(UStatusError):
        await client.subscribe(uris.parse("//dev1/20/1/1"), listener)
    with pytest.raises(UStatusError):
        await client.transport.unregister_listener(uris.parse("//dev1/20/1/1"), listener)


async def test_since_needs_a_history_and_uses_it(world: Any) -> None:
    await world.service()

    class History:
        calls: list[Any] = []  # noqa: RUF012 - one test

        async def subscribe_since(self, topic: Any, since: Any, listener: Any) -> None:
            self.calls.append((uris.format(topic), since))

        async def unsubscribe(self, topic: Any, listener: Any) -> None:
            self.calls.append(uris.format(topic))

    with pytest.raises(UStatusError) as error:
        await (await world.client()).subscribe(TOPIC, Listener(), since=5)
    assert error.value.code == UCode.UNIMPLEMENTED
    history = History()
    client = await world.client(ue_id=0x11, history=history)
    assert await client.subscribe(TOPIC, Listener(), since=5) is Status.SUBSCRIBED
    await client.unsubscribe(TOPIC)
    assert history.calls == [("up://dev1/20/1/8001", 5), "up://dev1/20/1/8001"]


@pytest.mark.spec("dsn~usubscription-interaction-subscriber~1", doc="v3")
@pytest.mark.spec("aou~usubscription-interaction-subscriber~1", doc="v4")
@both
async def test_the_subscriber_of_the_communication_layer_works_with_it(world: Any, version: int) -> None:
    service = await world.service()
    client = await world.client(version=version)
    transport = await world.transport("dev1", 0x10)
    subscriber = InMemorySubscriber(transport, LocalUriProvider("dev1", 0x10, 1), client)
    listener = Listener()
    assert await subscriber.subscribe(TOPIC, listener, sample_period_ms=20) is Status.SUBSCRIBED
    (row,) = await service.subscriptions()
    assert row.sample_period_ms == 20
    await (await world.transport("dev1", 0x20)).send(UMessageBuilder.publish(TOPIC).build_from_upayload(UPayload(b"x")))
    assert (await asyncio.wait_for(listener.heard.get(), 20)).payload == b"x"
    await subscriber.unsubscribe(TOPIC, listener)
    assert await service.subscriptions() == []


@pytest.mark.spec("local~l2-subscriber-persistent")
@both
async def test_a_subscription_outlives_its_subscriber_and_the_service(world: Any, version: int) -> None:
    """The subscribing process ends without unsubscribing, and the service restarts; another process continues, and can
    unsubscribe."""
    me = LocalUriProvider("dev1", 0x10, 1)
    await world.service()
    transport = LocalTransport.on(await world.network("dev1"), me)
    await transport.open()
    async with USubscriptionClient(transport, me, version=version) as client:
        await InMemorySubscriber(transport, me, client).subscribe(TOPIC, Listener(), sample_period_ms=20)
    await transport.close()
    await world.stop()
    service = await world.service()
    (row,) = await service.subscriptions()
    assert (row.topic, row.subscriber, row.sample_period_ms) == (uris.key(TOPIC), uris.key(me.get_source()), 20)

    async with (
        LocalTransport.on(await world.network("dev1"), me) as again,
        USubscriptionClient(again, me, version=version) as client,
    ):
        listener = Listener()
        await again.register_listener(TOPIC, listener)  # it only has to register a listener
        await (await world.transport("dev1", 0x20)).send(
            UMessageBuilder.publish(TOPIC).build_from_upayload(UPayload(b"x"))
        )
        assert (await asyncio.wait_for(listener.heard.get(), 20)).payload == b"x"
        await InMemorySubscriber(again, me, client).unsubscribe(TOPIC)
        assert await service.subscriptions() == []


async def test_a_closed_client_says_so(world: Any) -> None:
    transport = await world.transport("dev1", 0x10)
    client = USubscriptionClient(transport, LocalUriProvider("dev1", 0x10, 1))
    for _ in range(2):
        with pytest.raises(UStatusError) as error:
            await client.subscribe(TOPIC)
        assert error.value.code == UCode.FAILED_PRECONDITION
        await client.close()
    with pytest.raises(UStatusError):
        USubscriptionClient(transport, LocalUriProvider("dev1", 0x10, 1), version=5)


async def test_closing_ends_what_waits(world: Any) -> None:
    client = await world.client(version=4)
    waiting = asyncio.ensure_future(client.subscribe(TOPIC))
    await asyncio.sleep(0)
    await client.close()
    with pytest.raises(UStatusError) as error:
        await waiting
    assert error.value.code == UCode.CANCELLED
