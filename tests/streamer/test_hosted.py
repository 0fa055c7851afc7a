"""Services inside the streamer: reachable from every network, in any order of events."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from streamer.app import Streamer, serve
from uprotocol import uri as uris
from uprotocol import uuid as uuids
from uprotocol.communication import CallOptions, InMemoryRpcClient
from uprotocol.core.usubscription.v3.usubscription_pb2 import SubscriptionRequest, SubscriptionResponse
from uprotocol.message import UMessageBuilder, UPayload
from uprotocol.status import UStatusError
from uprotocol.v1.uattributes_pb2 import UMessageType
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.umessage_pb2 import UMessage

MakeWorld = Any
Publish = Callable[..., UMessage]

SPEED = uris.parse("//vehicle1/8001/1/8001")
CLOUD_APP = uris.parse("//cloud/9001/1/0")
SUBSCRIBE = uris.parse("//vehicle1/0/3/1")
DESCRIBE = uris.parse("//vehicle1/4/1/1")


async def test_what_was_not_inside_when_first_called_is_reached_when_it_is(make_world: MakeWorld) -> None:
    world = await make_world()
    cloud = await world.node("cloud", "cloud", 0x9001)
    streamer: Streamer = world.streamer
    heard = await world.hear(cloud, uris.ANY, CLOUD_APP)
    method = uris.parse("//vehicle1/77/1/1")
    requests: list[UMessage] = []

    class Service:
        def on_receive(self, message: UMessage) -> None:
            requests.append(message)

    service, callers = Service(), uris.uri(uris.WILDCARD_AUTHORITY, 0xFFFFFFFF, 0xFF, 0)
    vehicle = await world.node("vehicle", "vehicle1", 0x77)
    await world.hear(vehicle, callers, method)  # on the vehicle's network, where nobody answers
    await cloud.send(UMessageBuilder.request(CLOUD_APP, method, 60_000).build())
    await world.until(lambda: streamer.assembly.home.forwarded == 1)
    await streamer.assembly.hosted.register_listener(callers, service, method)
    await cloud.send(UMessageBuilder.request(CLOUD_APP, method, 60_000).build())
    await world.until(lambda: requests)
    await streamer.assembly.hosted.unregister_listener(callers, service, method)
    await cloud.send(UMessageBuilder.request(CLOUD_APP, method, 60_000).build())
    await world.until(lambda: streamer.assembly.home.forwarded == 2)
    assert len(requests) == 1
    assert heard.messages == []


@pytest.mark.parametrize("network", ["vehicle", "mcu", "cloud"])
async def test_a_malformed_request_is_answered_and_the_next_one_served(make_world: MakeWorld, network: str) -> None:
    world = await make_world()
    authority = {"vehicle": "vehicle1", "mcu": "mcu1", "cloud": "cloud"}[network]
    node = await world.node(network, authority, 0x9001)
    async with InMemoryRpcClient(node, node.local) as client:
        for method in (SUBSCRIBE, uris.parse("//vehicle1/0/4/1"), uris.parse("//vehicle1/4/1/2")):
            with pytest.raises(UStatusError) as caught:
                await client.invoke_method(method, UPayload(b"\xff\xff\xff\xff", 1))
            assert caught.value.code == UCode.INVALID_ARGUMENT
            assert caught.value.message
        with pytest.raises(UStatusError) as caught:  # a wildcard in the topic
            await client.invoke_method(SUBSCRIBE, UPayload.pack(SubscriptionRequest(topic=uris.pattern("vehicle1"))))
        assert caught.value.code == UCode.INVALID_ARGUMENT
        answer = await client.invoke_method(SUBSCRIBE, UPayload.pack(SubscriptionRequest(topic=SPEED)))
        assert answer.unpack(SubscriptionResponse).status.state == 2  # SUBSCRIBED
        await client.invoke_method(DESCRIBE, UPayload())


@pytest.mark.parametrize("method", ["//vehicle1/4/1/77", "//vehicle1/4/2/1", "//vehicle1/0/3/7FFF", "//vehicle1/0/9/1"])
async def test_a_method_that_there_is_not_is_answered_at_once(make_world: MakeWorld, method: str) -> None:
    world = await make_world()
    cloud = await world.node("cloud", "cloud", 0x9001)
    async with InMemoryRpcClient(cloud, cloud.local) as client:
        with pytest.raises(UStatusError) as caught:
            await client.invoke_method(uris.parse(method), UPayload(), CallOptions(timeout_ms=60_000))
        assert caught.value.code == UCode.UNIMPLEMENTED
        assert method in caught.value.message
    async with InMemoryRpcClient(world.assembly.hosted, world.assembly.local) as client:
        with pytest.raises(UStatusError, match="UNIMPLEMENTED"):
            await client.invoke_method(uris.parse(method), UPayload(), CallOptions(timeout_ms=60_000))


async def test_a_method_of_a_service_that_comes_or_goes_is_to_be_tried_again(make_world: MakeWorld) -> None:
    """A caller that got UNIMPLEMENTED would not come back after the restart."""
    world = await make_world()
    cloud = await world.node("cloud", "cloud", 0x9001)
    async with InMemoryRpcClient(cloud, cloud.local) as client:
        await world.assembly.history.stop()
        for method, code in ((DESCRIBE, UCode.UNAVAILABLE), (uris.parse("//vehicle1/4/1/77"), UCode.UNIMPLEMENTED)):
            with pytest.raises(UStatusError) as caught:
                await client.invoke_method(method, UPayload())
            assert caught.value.code == code


async def test_no_caller_gets_unimplemented_while_services_start_or_stop(make_world: MakeWorld) -> None:
    """A client gives up for good then: an Unsubscribe during a gateway's start would be lost."""
    world = await make_world()
    streamer = world.streamer
    cloud = await world.node("cloud", "cloud", 0x9001)
    async with InMemoryRpcClient(cloud, cloud.local) as client:
        for unserved, method in (
            (streamer.assembly.hosted.unserved, "//vehicle1/4/1/77"),
            (streamer.assembly.usubscription._gate.unserved, "//vehicle1/0/3/77"),
        ):
            assert unserved.is_settled
            unserved.is_settled = False
            with pytest.raises(UStatusError, match="UNAVAILABLE"):
                await client.invoke_method(uris.parse(method), UPayload())
            unserved.is_settled = True
    await world.stop()
    assert not streamer.assembly.hosted.unserved.is_settled
    assert not streamer.assembly.usubscription._gate.unserved.is_settled


async def test_a_service_inside_calls_one_that_is_inside_too(make_world: MakeWorld) -> None:
    world = await make_world()
    async with InMemoryRpcClient(world.assembly.hosted, world.assembly.local) as client:
        await client.invoke_method(DESCRIBE, UPayload())


async def test_a_listener_inside_hears_its_address_from_its_sources_and_one_that_fails_stops_nobody(
    make_world: MakeWorld,
) -> None:
    world = await make_world()
    hosted = world.assembly.hosted

    class Ear:
        def __init__(self, fails: bool = False) -> None:
            self.heard: list[UMessage] = []
            self.fails = fails

        def on_receive_batch(self, messages: Sequence[UMessage]) -> None:
            self.heard += messages
            assert not self.fails

        def on_receive(self, message: UMessage) -> None:
            self.on_receive_batch([message])

    anything, topic, whole = Ear(fails=True), Ear(), Ear()
    sink = uris.parse("//vehicle1/77/1/0")
    await hosted.register_listener(uris.ANY, anything, sink)
    await hosted.register_listener(SPEED, topic, sink)
    await hosted.register_listener(SPEED, topic, sink)  # changes nothing
    await hosted.register_listener(uris.ANY, whole, uris.pattern("vehicle1", 0x77))
    notes = [
        UMessageBuilder.notification(uris.parse(source), sink).build()
        for source in ("//vehicle1/8001/1/8001", "//vehicle1/8001/1/8002")
    ]
    assert hosted.deliver(notes) is None
    assert (anything.heard, topic.heard, whole.heard) == (notes, notes[:1], notes)
    await hosted.unregister_listener(SPEED, topic, sink)
    with pytest.raises(UStatusError, match="NOT_FOUND"):
        await hosted.unregister_listener(SPEED, topic, sink)
    await hosted.unregister_listener(uris.ANY, anything, sink)
    assert hosted.owns(sink)
    await hosted.unregister_listener(uris.ANY, whole, uris.pattern("vehicle1", 0x77))
    assert not hosted.owns(sink)


async def test_a_hosted_service_gets_an_error_when_its_call_cannot_leave(make_world: MakeWorld) -> None:
    world = await make_world(more="[express]\nmessages_max = 1\n")
    world.assembly.endpoints["cloud"].transport.disconnect()
    async with InMemoryRpcClient(world.assembly.hosted, world.assembly.local) as client:
        method = uris.parse("//cloud/9001/1/1")
        first = asyncio.create_task(client.invoke_method(method, UPayload(), CallOptions(timeout_ms=500)))
        await world.until(lambda: len(world.assembly.express.queues["cloud"]) == 1)
        with pytest.raises(UStatusError) as caught:
            await client.invoke_method(method, UPayload())
        assert caught.value.code == UCode.RESOURCE_EXHAUSTED
        with pytest.raises(UStatusError) as caught:
            await first
        assert caught.value.code == UCode.DEADLINE_EXCEEDED


@pytest.mark.spec("local~disp-at-least-once")
async def test_what_comes_while_the_streamer_starts_is_not_lost(
    make_world: MakeWorld, publish: Publish, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One uSubscription does not answer, so starting takes its time; what is taken meanwhile is for the peers."""
    monkeypatch.setattr("streamer.parts.endpoints.INTEREST_WAIT_S", 0.5)
    world = await make_world({"vehicle": "", "cloud": ""}, start=False)
    vehicle, cloud = await world.node("vehicle", "vehicle1"), await world.node("cloud", "cloud")
    heard = await world.hear(cloud, uris.ANY, CLOUD_APP)
    starting = asyncio.create_task(world.start())
    note = UMessageBuilder.notification(SPEED, CLOUD_APP).build()
    await world.until(lambda: world.streamer is not None and world.assembly.networks["vehicle"].filters._registered)
    assert not world.assembly.ready.is_set()
    await vehicle.send(note)
    await world.until(lambda: world.assembly.logs.durable.newest_seq == 1)
    assert not world.assembly.ready.is_set()
    await starting
    assert (await heard.expect(1))[0].attributes.id == note.attributes.id


async def test_a_network_that_refuses_a_listener_stops_nothing(
    make_world: MakeWorld, publish: Publish, monkeypatch: Any
) -> None:
    subscriptions = {"//vehicle1/8001/1/8001": ["//cloud/9001/1/0"]}
    world = await make_world(subscriptions=subscriptions, start=False)
    refusing = True
    from transports.local import LocalTransport

    register = LocalTransport.register_listener

    async def picky(self: LocalTransport, *arguments: Any) -> None:
        if refusing and self.local.get_authority() == "mcu1":
            raise UStatusError(UCode.PERMISSION_DENIED, "the broker lets nobody listen")
        await register(self, *arguments)

    monkeypatch.setattr(LocalTransport, "register_listener", picky)
    await world.start()
    assert any(
        "endpoint mcu: listening failed" in problem and "lets nobody listen" in problem
        for problem in world.parts.problems()
    )
    vehicle, cloud, mcu = (
        await world.node("vehicle", "vehicle1"),
        await world.node("cloud", "cloud"),
        await world.node("mcu", "mcu1"),
    )
    heard = await world.hear(cloud, uris.pattern("*"), None)
    await vehicle.send(publish(SPEED, "goes on"))
    await heard.expect(1)
    refusing = False
    await world.until(lambda: not world.parts.problems())  # by itself
    noted = await world.hear(cloud, uris.ANY, CLOUD_APP)
    await mcu.send(UMessageBuilder.notification(uris.parse("//mcu1/8001/1/8001"), CLOUD_APP).build())
    assert (await noted.expect(1))[0].attributes.type == UMessageType.UMESSAGE_TYPE_NOTIFICATION


async def test_stopping_while_starting_is_heard(make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("streamer.parts.endpoints.INTEREST_WAIT_S", 60)
    text = """
[[endpoint]]
name = "vehicle"
transport = "local"
authorities = ["vehicle1"]
usubscription = "remote"
settings = {{ network = "{n}-vehicle" }}
"""
    world = await make_world(text, start=False)
    stopping = asyncio.Event()
    serving = asyncio.create_task(serve(world.config, lambda streamer: None, stopping))
    await world.until(lambda: world.networks["vehicle"].members)
    stopping.set()
    await asyncio.wait_for(serving, 10)
    stopping.set()
    await asyncio.wait_for(serve(world.config, lambda streamer: None, stopping), 10)  # at once


FROM_HERE = uris.parse("//vehicle1/4/1/8001")


def notes(*authorities: str) -> list[UMessage]:
    sinks = [uris.parse(f"//{authority}/9001/1/0") for authority in authorities]
    return [UMessageBuilder.notification(FROM_HERE, sink).build() for sink in sinks]


def counting(monkeypatch: pytest.MonkeyPatch, owner: Any, method: str) -> list[int]:
    """How many messages each call of `method` has in its last argument."""
    sizes: list[int] = []
    whole = getattr(owner, method)

    def counted(*arguments: Any) -> Any:
        sizes.append(len(arguments[-1]))
        return whole(*arguments)

    monkeypatch.setattr(owner, method, counted)
    return sizes


async def test_what_services_send_together_leaves_together(
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One append and one batch of the home network, whatever is waiting, and each destination in order."""
    world = await make_world()
    streamer = world.streamer
    here, there = await world.node("vehicle", "vehicle1"), await world.node("cloud", "cloud")
    at_home, far = await world.hear(here, uris.ANY, CLOUD_APP), await world.hear(there, uris.ANY, CLOUD_APP)
    heard_here = await world.hear(here, uris.ANY, uris.parse("//vehicle1/9001/1/0"))
    published = await world.hear(here, FROM_HERE)
    batches = counting(monkeypatch, streamer.assembly.home.transport, "send_batch")
    appends = counting(monkeypatch, streamer.assembly.logs.durable, "append")
    messages: list[UMessage] = []
    for _ in range(100):
        messages += [*notes("vehicle1", "cloud"), UMessageBuilder.publish(FROM_HERE).build()]
    assert {status.code for status in await streamer.assembly.hosted.send_batch(messages)} == {UCode.OK}
    assert batches == [200]  # the notifications to vehicle1, and the publishes, which nobody wants elsewhere
    assert appends == [100]
    assert await far.expect(100) == messages[1::3]
    assert (await heard_here.expect(100), await published.expect(100)) == (messages[0::3], messages[2::3])
    assert at_home.messages == []


async def test_what_the_log_refuses_does_not_leave_and_holds_up_nothing_else(
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = await make_world(subscriptions={uris.format(FROM_HERE): ["//cloud/9001/1/0"]})
    streamer = world.streamer
    here = await world.node("vehicle", "vehicle1")
    published = await world.hear(here, FROM_HERE)
    heard = await world.hear(here, uris.ANY, uris.parse("//vehicle1/9001/1/0"))

    def refuse(*_: Any) -> asyncio.Future[int]:
        refused = asyncio.get_running_loop().create_future()
        refused.set_exception(UStatusError(UCode.UNAVAILABLE, "the disk is away"))
        return refused

    monkeypatch.setattr(streamer.assembly.logs.durable, "append", refuse)
    request = UMessageBuilder.request(uris.parse("//vehicle1/4/1/0"), uris.parse("//cloud/77/1/1"), 60_000).build()
    messages = [*notes("cloud", "vehicle1", "cloud"), UMessageBuilder.publish(FROM_HERE).build(), request]
    statuses = [status.code for status in await streamer.assembly.hosted.send_batch(messages)]
    away = UCode.UNAVAILABLE
    assert statuses == [away, UCode.OK, away, away, UCode.OK]
    assert await heard.expect(1) == [messages[1]]
    assert published.messages == []  # it leaves when the log has it, and is tried again


async def test_a_network_that_is_away_holds_up_no_other(make_world: MakeWorld) -> None:
    world = await make_world()
    streamer = world.streamer
    there = await world.node("cloud", "cloud")
    far = await world.hear(there, uris.ANY, CLOUD_APP)
    streamer.assembly.home.transport.disconnect()
    messages = notes("vehicle1", "cloud", "vehicle1", "cloud")
    statuses = [status.code for status in await streamer.assembly.hosted.send_batch(messages)]
    assert statuses == [UCode.UNAVAILABLE, UCode.OK, UCode.UNAVAILABLE, UCode.OK]
    assert await far.expect(2) == messages[1::2]


async def test_behind_a_notification_that_has_expired_no_other_one_to_its_destination_leaves(
    make_world: MakeWorld,
) -> None:
    """A retried message is not overtaken. Other destinations, and unordered messages, are not delayed."""
    world = await make_world()
    late, expired = UCode.DEADLINE_EXCEEDED, UMessageBuilder.notification(FROM_HERE, CLOUD_APP).with_ttl(1).build()
    await world.until(lambda: uuids.now_ms() > uuids.time_ms(expired.attributes.id) + 1)
    request = UMessageBuilder.request(uris.parse("//vehicle1/4/1/0"), uris.parse("//cloud/77/1/1"), 60_000).build()
    messages = [*notes("mcu1"), expired, *notes("cloud", "mcu1"), request]
    statuses = [status.code for status in await world.assembly.hosted.send_batch(messages)]
    assert statuses == [UCode.OK, late, late, UCode.OK, UCode.OK]
