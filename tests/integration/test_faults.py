"""Faults that must lose nothing: killed processes, unavailable brokers, a full disk, a killed uSubscription."""

from __future__ import annotations

import asyncio
import resource
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

import pytest

from streamer.commands.demo.drive import send_all
from streamer.commands.demo.processes import Child
from tests.transports.zenoh_readers import Reader
from tools.broker import Broker
from uprotocol import uri as uris
from uprotocol.message import UMessageBuilder, UPayload
from uprotocol.transport import LocalUriProvider, UTransport
from uprotocol.v1.uattributes_pb2 import UPayloadFormat
from uprotocol.v1.umessage_pb2 import UMessage
from uprotocol.v1.uri_pb2 import UUri
from usubscription_client.client import USubscriptionClient

pytestmark = [pytest.mark.broker, pytest.mark.timeout(180)]

SPEED = uris.parse("//vehicle1/8001/1/8001")
DOOR = uris.parse("//vehicle1/8001/1/8002")
ALARM = uris.parse("//cloud/8001/1/8001")
SUBSCRIBED = {"//vehicle1/8001/1/8001": ["//cloud/9001/1/0"], "//cloud/8001/1/8001": ["//vehicle1/9001/1/0"]}
SESSION = 'client_id = "gateway", session_expiry_s = 3600'

MakeGateway = Callable[..., Awaitable[Any]]


def numbered(topic: UUri, first: int, count: int) -> list[UMessage]:
    return [
        UMessageBuilder.publish(topic).build_from_upayload(
            UPayload(b"%d" % number, UPayloadFormat.UPAYLOAD_FORMAT_TEXT)
        )
        for number in range(first, first + count)
    ]


def numbers(first: int, count: int) -> list[bytes]:
    return [b"%d" % number for number in range(first, first + count)]


async def publish_on(node: UTransport, topic: UUri, count: int, published: list[int]) -> None:
    """Publishes in batches, each repeated until it is acknowledged; `published[0]` is the number of messages so far."""
    for first in range(0, count, 20):
        await send_all(node, numbered(topic, first, 20))
        published[0] = first + 20
        await asyncio.sleep(0.01)


async def reached(published: list[int], count: int) -> None:
    async with asyncio.timeout(60):
        while published[0] < count:  # noqa: ASYNC110 - callers ask for any number
            await asyncio.sleep(0.005)


@pytest.mark.spec("local~disp-at-least-once")
@pytest.mark.spec("local~disp-queue")
async def test_a_streamer_killed_mid_stream_loses_nothing_that_was_acknowledged(
    make_gateway: MakeGateway, make_broker: Any
) -> None:
    """Between two brokers with QoS 1, everything arrives in order after the streamer was killed."""
    inside, outside = make_broker(persistent=True), make_broker(persistent=True)
    more = f"""
[[endpoint]]
name = "inside"
transport = "mqtt5"
authorities = ["vehicle1"]
settings = {{ host = "127.0.0.1", port = {inside.port}, {SESSION} }}
"""
    gateway = await make_gateway(outside, "cloud", SUBSCRIBED, extra=more)
    heard = await gateway.hear(await gateway.mqtt(), SPEED)
    publisher = await gateway.node("mqtt5", "vehicle1", {"host": inside.host, "port": inside.port}, 0x8001)
    published, count = [0], 3_000
    publishing = asyncio.create_task(publish_on(publisher, SPEED, count, published))
    for kill_at in (500, 1_200, 1_900):
        await reached(published, kill_at)
        await gateway.child.kill()
        await reached(published, kill_at + 300)
        await gateway.start()
    await publishing
    await heard.until(lambda: len(set(heard.payloads)) == count, "each payload")
    assert heard.unique == numbers(0, count)


@pytest.mark.spec("local~disp-retry")
@pytest.mark.spec("local~disp-order")
async def test_a_broker_away_mid_stream_costs_nothing_but_time(make_gateway: MakeGateway, make_broker: Any) -> None:
    broker = make_broker(persistent=True)
    gateway = await make_gateway(broker, "vehicle cloud", SUBSCRIBED, cloud=SESSION)
    cloud = await gateway.mqtt(client_id="app", session_expiry_s=3600)
    vehicle = await gateway.zenoh()
    heard = await gateway.hear(cloud, SPEED)
    await vehicle.send_batch(numbered(SPEED, 0, 100))
    await heard.expect(100)
    broker.stop()  # so that the subscriber's session is on its disk
    await broker.start_async()
    await gateway.until_ready()
    broker.kill()  # nothing is under way, since messages acknowledged but not yet written would be lost
    await vehicle.send_batch(numbered(SPEED, 100, 400))
    await gateway.until_problems(lambda problems: any("cloud" in problem for problem in problems))
    await broker.start_async()
    await heard.expect_payload(b"499")
    await gateway.until_ready()
    published = [0]
    publishing = asyncio.create_task(publish_on(vehicle, DOOR, 40, [0]))  # without subscribers
    sending = asyncio.create_task(_stream(vehicle, 500, 1_500, published))
    await reached(published, 800)
    broker.stop()  # mid-stream; it keeps what it has acknowledged
    await reached(published, 1_200)
    await broker.start_async()
    await asyncio.gather(publishing, sending)
    await heard.until(lambda: len(set(heard.payloads)) == 2_000, "2_000 payloads")
    assert heard.unique == numbers(0, 2_000)
    assert len(heard.messages) - 2_000 <= 2 * 512  # duplicates come only from the cuts: messages in flight
    await gateway.until_ready()


async def _stream(node: UTransport, first: int, count: int, published: list[int]) -> None:
    for at in range(0, count, 50):
        await send_all(node, numbered(SPEED, first + at, 50))
        published[0] = at + 50
        await asyncio.sleep(0.02)


@pytest.mark.spec("local~disp-no-discard")
async def test_a_full_disk_refuses_tells_and_recovers(make_gateway: MakeGateway, make_broker: Any) -> None:
    broker = make_broker(persistent=True)
    gateway = await make_gateway(broker, "vehicle cloud", SUBSCRIBED, cloud=SESSION)
    cloud, vehicle = await gateway.mqtt(entity=0x8001), await gateway.zenoh(entity=0x9001)
    heard = await gateway.hear(vehicle, ALARM)
    await send_all(cloud, numbered(ALARM, 0, 100))
    await heard.expect(100)
    pid = gateway.child.process.pid
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (4_096, resource.RLIM_INFINITY))
    await send_all(cloud, numbered(ALARM, 100, 200))  # the broker accepts and keeps them
    await gateway.until_problems(lambda problems: any("log refuses messages" in problem for problem in problems))
    metrics = await gateway.metrics()
    assert metrics['dropped_total{endpoint="cloud",reason="refused"}'] >= 1
    assert metrics['log_healthy{log="durable"}'] == 0
    gateway.child.require_running()
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    await heard.until(lambda: len(set(heard.payloads)) == 300, "300 payloads")
    assert heard.unique == numbers(0, 300)
    await gateway.until_ready()


class Service:
    """`up-streamer usubscription` of the cloud, on the broker."""

    def __init__(self, gateway: Any, broker: Broker, stack: AsyncExitStack) -> None:
        self._gateway, self._broker, self._stack = gateway, broker, stack
        self.child: Child | None = None

    async def start(self) -> None:
        store = self._gateway.config.parent / "cloud.db"
        where = ["--transport", "mqtt5", "--set", f"port={self._broker.port}", "--store", str(store), "--json"]
        self.child = await Child.start(
            "uSubscription", "streamer.commands.cli", "usubscription", "--authority", "cloud", *where
        )
        self._stack.push_async_callback(self.child.stop)
        await self.child.say("ready")


async def test_a_usubscription_killed_and_restarted(make_gateway: MakeGateway, own_broker: Broker) -> None:
    """Only the cloud's service has subscriptions here: the vehicle has no service."""
    modes = {"vehicle": "none", "cloud": "remote"}
    # so that it listens before the first request
    more = '[usubscription]\nrefresh_s = 1\n[history]\nrecord = ["//vehicle1/8001/FF/FFFF"]\n'
    gateway = await make_gateway(own_broker, more=more, usubscription=modes, start=False)
    service = Service(gateway, own_broker, gateway.stack)
    await service.start()
    await gateway.start()
    await gateway.until_ready()
    cloud, vehicle = await gateway.mqtt(), await gateway.zenoh()
    heard = await gateway.hear(cloud, uris.pattern("vehicle1", 0x8001))
    async with USubscriptionClient(cloud, LocalUriProvider("cloud", 0x9001, 1)) as client:
        version = (await gateway.metrics())["interest_version"]
        await client.subscribe(SPEED)
        await gateway.until(lambda metrics: metrics["interest_version"] > version)
        await vehicle.send_batch(numbered(SPEED, 0, 10))
        await heard.expect(10)
        assert service.child is not None
        await service.child.kill()
        await gateway.until_problems(
            lambda problems: any("uSubscription of cloud does not answer" in problem for problem in problems)
        )
        await vehicle.send_batch(numbered(SPEED, 10, 10))  # the last known interest is used
        await heard.expect(20)
        await service.start()
        await gateway.until_ready()
        version = (await gateway.metrics())["interest_version"]
        await client.subscribe(DOOR)
        await gateway.until(lambda metrics: metrics["interest_version"] > version)
        await vehicle.send_batch(numbered(SPEED, 20, 10) + numbered(DOOR, 30, 10))
        await heard.expect(40)
    assert sorted(heard.payloads, key=int) == numbers(0, 40)


@pytest.mark.full
async def test_an_ecu_that_stops_reading_is_named_and_costs_its_neighbour_nothing(
    make_gateway: MakeGateway, own_broker: Broker
) -> None:
    gateway = await make_gateway(own_broker, subscriptions=SUBSCRIBED, vehicle='mode = "router"')
    where = f"tcp/127.0.0.1:{gateway.zenoh_port}"
    sick, well = [await Reader.start(gateway.stack, where, ALARM, 1_800, {}) for _ in range(2)]
    await sick.says("listening")
    await well.says("listening")
    cloud = await gateway.mqtt()
    await gateway.until_ready()
    sick.stop()
    for first in range(0, 1_800, 100):
        payloads = [b"%08d" % number + bytes(4_088) for number in range(first, first + 100)]
        await send_all(
            cloud,
            [
                UMessageBuilder.publish(ALARM).build_from_upayload(
                    UPayload(payload, UPayloadFormat.UPAYLOAD_FORMAT_RAW)
                )
                for payload in payloads
            ],
        )
    (problem,) = await gateway.until_problems(
        lambda problems: [one for one in problems if "sending waits for the peer" in one]
    )
    assert problem.startswith("endpoint vehicle: since ")
    assert "(tcp/127.0.0.1:" in problem
    await well.says("all")
    await gateway.until_ready()
