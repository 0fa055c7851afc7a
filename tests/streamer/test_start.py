"""The start: each network is listened to as soon as it is open, with the interest stored on disk, and waits for no
other one."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from streamer.walk import networks
from tests.streamer.conftest import text
from transports.local import LocalTransport
from uprotocol import uri as uris
from uprotocol.communication import CallOptions, InMemoryRpcClient
from uprotocol.status import UStatusError
from uprotocol.transport import UListener, UTransport
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.umessage_pb2 import UMessage
from uprotocol.v1.uri_pb2 import UUri
from usubscription.service import USubscriptionService
from usubscription_client.client import USubscriptionClient

MakeWorld = Callable[..., Awaitable[Any]]
Publish = Callable[..., UMessage]

SPEED, OTHER = uris.parse("//vehicle1/8001/1/8001"), uris.parse("//vehicle1/8001/1/8002")
SUBSCRIBED = {"//vehicle1/8001/1/8001": ["//cloud/9001/1/0"]}
EMBEDDED = {"vehicle": "", "mcu": "none", "cloud": "none"}
REMOTE = {"vehicle": "none", "mcu": "none", "cloud": "remote"}


@contextmanager
def opened(
    monkeypatch: pytest.MonkeyPatch, then: dict[str, Callable[[LocalTransport], Awaitable[None]]]
) -> Iterator[None]:
    """`then`, by authority, is awaited within `open`, when the transport is on its network."""
    open = LocalTransport.open

    async def opening(self: LocalTransport) -> None:
        await open(self)
        if self.authority in then and self.local.get_source().ue_id == 4:
            await then[self.authority](self)

    with monkeypatch.context() as patched:
        patched.setattr(LocalTransport, "open", opening)
        yield


async def stalls(transport: LocalTransport) -> None:
    await asyncio.Event().wait()


def starts(world: Any) -> asyncio.Task[None]:
    return asyncio.create_task(world.start())


# A network that stalls, and the start of the others.


@pytest.mark.spec("local~disp-start-stop")
@pytest.mark.parametrize("kind", ["static", "embedded", "embedded, as remembered", "remote"])
async def test_a_message_reaches_earlier_subscribers_as_soon_as_its_network_is_open_though_another_stalls(
    make_world: MakeWorld, publish: Publish, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """The first message is sent within the gateway's `open` of that network, and one more with each turn of the loop.

    The interest is on disk: in a static file, in the store of our own uSubscription, in the file that stands in for a
    store that can't be opened, in the one that remembers what another uSubscription has said, which is away now.
    """
    subscriptions = SUBSCRIBED if kind == "static" else {}
    world = await make_world(REMOTE if kind == "remote" else EMBEDDED, subscriptions, start=False)
    vehicle, cloud = await world.node("vehicle", "vehicle1"), await world.node("cloud", "cloud", 0x9001)
    heard = await world.hear(cloud, SPEED)
    folder = world.config.streamer.data_dir
    if kind.startswith("embedded"):
        await world.start()
        async with USubscriptionClient(cloud, cloud.local, "vehicle1") as client:
            await client.subscribe(SPEED)
        await world.stop()
    if kind == "embedded, as remembered":

        async def full(self: USubscriptionService) -> None:
            raise UStatusError(UCode.RESOURCE_EXHAUSTED, "the disk is full")

        monkeypatch.setattr(USubscriptionService, "open", full)
    if kind == "remote":
        folder.mkdir()
        entry = ["//vehicle1/8001/1/8001", "//cloud/9001/1/0", None]
        (folder / "interest-cloud.json").write_text(json.dumps([entry]))
    sent, is_over = 0, False

    async def send() -> None:
        nonlocal sent
        await vehicle.send(publish(SPEED, str(sent)))
        sent += 1

    async def go_on() -> None:
        while not is_over:
            await send()
            await asyncio.sleep(0)

    async def at_once(transport: LocalTransport) -> None:
        await send()
        nonlocal sending
        sending = asyncio.create_task(go_on())

    sending: asyncio.Task[None] | None = None
    with opened(monkeypatch, {"vehicle1": at_once, "mcu1": stalls}):
        starting = starts(world)
        await heard.expect(100)
        is_over = True
        assert sending is not None
        await sending
        await heard.expect(sent)
        assert heard.texts == [str(number) for number in range(sent)]
        assert "endpoint mcu: its network is being opened" in world.parts.problems()
        assert not world.assembly.ready.is_set(), "the stalled network is being waited for"
        world.streamer.stop()
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)


async def test_a_network_that_stalls_while_listening_delays_no_other(
    make_world: MakeWorld, publish: Publish, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also later, when something else is to be listened to."""
    register = LocalTransport.register_listener

    async def hanging(self: LocalTransport, source: UUri, listener: UListener, sink: UUri | None = None) -> None:
        if self.authority == "mcu1":
            await asyncio.Event().wait()
        await register(self, source, listener, sink)

    monkeypatch.setattr(LocalTransport, "register_listener", hanging)
    monkeypatch.setattr("streamer.parts.endpoints.NETWORKS_WAIT_S", 0.05)
    monkeypatch.setattr("streamer.parts.endpoints.INTEREST_WAIT_S", 0.05)
    world = await make_world(EMBEDDED, SUBSCRIBED)
    vehicle, cloud = await world.node("vehicle", "vehicle1"), await world.node("cloud", "cloud", 0x9001)
    speed, other = await world.hear(cloud, SPEED), await world.hear(cloud, OTHER)
    await vehicle.send(publish(SPEED, "0"))
    await speed.expect(1)
    path = world.config.usubscription.static_file
    path.write_text(json.dumps(SUBSCRIBED | {"//vehicle1/8001/1/8002": ["//cloud/9001/1/0"]}))
    await world.assembly.interest.refresh()
    filters = world.assembly.networks["vehicle"].filters
    await world.until(lambda: (uris.key(OTHER), None) in filters._registered.keys() - filters._unsure)
    await vehicle.send(publish(OTHER, "1"))
    await other.expect(1)


# What comes before its service is there.


async def test_a_call_to_a_service_inside_that_has_not_started_is_to_be_tried_again(
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is answered, and goes to no other network."""
    world = await make_world(EMBEDDED, {}, start=False)
    mcu, home = await world.node("mcu", "mcu1"), await world.node("vehicle", "vehicle1", 0x9)
    stray = await world.hear(home, uris.ANY, uris.pattern("vehicle1"))
    may_start, start = asyncio.Event(), USubscriptionService.start

    async def late(self: USubscriptionService) -> None:
        await may_start.wait()
        await start(self)

    monkeypatch.setattr(USubscriptionService, "start", late)
    starting = starts(world)
    await world.until(
        lambda: world.streamer is not None and world.assembly.networks.is_connected(world.assembly.endpoints["mcu"])
    )
    rpc = InMemoryRpcClient(mcu, mcu.local)
    await rpc.open()
    with pytest.raises(UStatusError, match="//vehicle1/0/3/1 is not served now: try again later") as raised:
        await rpc.invoke_method(uris.parse("//vehicle1/0/3/1"), text(""), CallOptions(timeout_ms=5_000))
    assert raised.value.code == UCode.UNAVAILABLE
    await rpc.close()
    may_start.set()
    await starting
    async with USubscriptionClient(mcu, mcu.local, "vehicle1") as client:
        await client.subscribe(SPEED)
    assert not stray.messages


async def test_what_a_transport_can_not_take_before_it_is_open_is_registered_right_after(
    make_world: MakeWorld, publish: Publish, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LocalTransport, "register_before_open", UTransport.register_before_open)
    world = await make_world(EMBEDDED, SUBSCRIBED)
    vehicle, cloud = await world.node("vehicle", "vehicle1"), await world.node("cloud", "cloud", 0x9001)
    heard = await world.hear(cloud, SPEED)
    await vehicle.send(publish(SPEED, "0"))
    await heard.expect(1)


async def test_a_topic_that_nobody_wants_any_more_when_the_network_is_open_is_not_listened_to(
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = await make_world(EMBEDDED, SUBSCRIBED, start=False)
    go_on = asyncio.Event()

    async def waits(transport: LocalTransport) -> None:
        await go_on.wait()

    with opened(monkeypatch, {"vehicle1": waits}):
        starting = starts(world)
        await world.until(lambda: world.streamer is not None and world.assembly.endpoints["vehicle"].connected)
        transport = world.assembly.endpoints["vehicle"].transport
        sources = {uris.key(one.source) for one in transport.listeners.filters}
        assert uris.key(SPEED) in sources
        world.config.usubscription.static_file.write_text("{}")
        await world.assembly.interest.refresh()
        go_on.set()
        await starting
    assert uris.key(SPEED) not in {uris.key(one.source) for one in transport.listeners.filters}


# Networks that are away.


@pytest.mark.parametrize("hung", [False, True])
async def test_who_subscribes_waits_for_a_network_that_is_being_opened(
    make_world: MakeWorld, publish: Publish, monkeypatch: pytest.MonkeyPatch, hung: bool
) -> None:
    """For a while: then nothing that is published there after the answer is missed."""
    world = await make_world(EMBEDDED, {}, start=False)
    vehicle, cloud = await world.node("vehicle", "vehicle1"), await world.node("cloud", "cloud", 0x9001)
    heard = await world.hear(cloud, SPEED)
    monkeypatch.setattr(networks, "BACK_SOON_S", 0.1 if hung else 20.0)
    go_on = asyncio.Event()

    async def waits(transport: LocalTransport) -> None:
        await go_on.wait()

    with opened(monkeypatch, {"vehicle1": waits}):
        starting = starts(world)
        await world.until(lambda: world.streamer is not None and world.assembly.hosted.unserved.is_settled)
        async with USubscriptionClient(cloud, cloud.local, "vehicle1") as client:
            subscribing = asyncio.create_task(client.subscribe(SPEED))
            await world.until(lambda: world.assembly.interest.wants(SPEED))
            if not hung:
                assert not subscribing.done()
                go_on.set()
            await subscribing
        go_on.set()
        await starting
        await vehicle.send(publish(SPEED, "0"))
        await heard.expect(1)


@pytest.mark.parametrize("only_listens", [True, False])
async def test_a_subscriber_waits_for_a_network_that_was_just_lost_unless_others_reach_it(
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch, only_listens: bool
) -> None:
    """When the last client of a Zenoh router leaves, no client is left that needs our filters."""
    world = await make_world(EMBEDDED, {})
    cloud = await world.node("cloud", "cloud", 0x9001)
    transport = world.assembly.endpoints["mcu"].transport
    monkeypatch.setattr(transport, "only_listens", only_listens, raising=False)
    monkeypatch.setattr(networks, "BACK_SOON_S", 0.3)
    transport.disconnect()
    loop = asyncio.get_running_loop()
    before = loop.time()
    async with USubscriptionClient(cloud, cloud.local, "vehicle1") as client:
        await client.subscribe(SPEED)
    assert (loop.time() - before < 0.3) is only_listens


def absent_s(world: Any, endpoint: str) -> float:
    from prometheus_client.parser import text_string_to_metric_families

    from streamer.operating import metrics

    for family in text_string_to_metric_families(metrics.expose(world.parts.samples).decode()):
        for sample in family.samples:
            if sample.name == "up_streamer_absent_seconds" and sample.labels == {
                "endpoint": endpoint,
                "log": "durable",
            }:
                return sample.value
    raise AssertionError("no such metric")


async def test_the_metric_of_an_absence_is_that_of_the_moment_of_the_scrape(
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also after a restart: the time goes on only while the streamer runs and the network is not there."""
    world = await make_world(EMBEDDED, {})
    loop = asyncio.get_running_loop()
    now = loop.time()
    monkeypatch.setattr(loop, "time", lambda: now)
    transport = world.assembly.endpoints["cloud"].transport
    assert absent_s(world, "cloud") == 0
    transport.disconnect()
    assert absent_s(world, "cloud") == 0
    now += 7
    assert absent_s(world, "cloud") == absent_s(world, "cloud") == pytest.approx(7, abs=0.01)
    now += 600
    world.assembly.claims.passed(607_000, {"cloud": 607_000})  # as it is saved
    now += 3
    assert absent_s(world, "cloud") == pytest.approx(610, abs=0.01)
    assert absent_s(world, "mcu") == 0
    transport.reconnect()
    assert absent_s(world, "cloud") == 0
    now += 5
    transport.disconnect()
    now += 2
    assert absent_s(world, "cloud") == pytest.approx(2, abs=0.01)
