"""A wrong access rule, and subscribers that register late, on real networks: everything arrives, in order."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from tests.integration.conftest import Gateway, Hearer
from tools.broker import Broker
from uprotocol import uri as uris
from uprotocol.attributes import streamer_sink
from uprotocol.communication import CallOptions, InMemoryRpcClient
from uprotocol.message import UMessageBuilder, UPayload
from uprotocol.status import UStatusError
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.umessage_pb2 import UMessage
from uprotocol.v1.uri_pb2 import UUri

pytestmark = pytest.mark.timeout(180)

MakeGateway = Callable[..., Awaitable[Gateway]]
SPEED, DOOR, ALARM = (uris.parse(f"//vehicle1/8001/1/{resource}") for resource in ("8001", "8002", "8003"))
CLOUD = uris.parse("//cloud/9001/1/0")
METHOD = uris.parse("//cloud/9001/1/1")
SUBSCRIBED = {uris.format(topic): [uris.format(CLOUD)] for topic in (SPEED, DOOR)}

# the gateway may read everything and write nothing: `vehicle` instead of `vehicle1`
WRONG = "user gateway\ntopic read #\ntopic write vehicle/#\nuser cloud\ntopic readwrite #\n"
RIGHT = WRONG.replace("topic write vehicle/#", "topic write #")


class OneTopic(Hearer):
    """Keeps the messages of one topic."""

    def __init__(self, topic: UUri) -> None:
        super().__init__()
        self.topic = topic

    def on_receive(self, message: UMessage) -> Awaitable[None] | None:
        return super().on_receive(message) if message.attributes.source == self.topic else None


def message(builder: UMessageBuilder, number: int) -> UMessage:
    return builder.build_from_upayload(UPayload(b"%d" % number, 6))


def numbers(count: int) -> list[bytes]:
    return [b"%d" % number for number in range(count)]


async def all_of(heard: Hearer, count: int) -> None:
    await heard.until(lambda: len(heard.unique) >= count, f"{count} different messages")
    assert heard.unique == numbers(count)


@pytest.mark.broker
@pytest.mark.parametrize("mode", ["in-vehicle", "off-vehicle"])
async def test_a_wrong_access_rule_loses_nothing_and_the_operator_reads_of_it(
    make_gateway: MakeGateway, make_broker: Callable[..., Broker], mode: str
) -> None:
    """In-vehicle each topic is held by itself, off-vehicle the pair of authorities."""
    broker = make_broker(users={"gateway": "g", "cloud": "c"}, acl=WRONG)
    login = f'mode = "{mode}", username = "gateway", password = "g"'
    gateway = await make_gateway(broker, "vehicle cloud", SUBSCRIBED, cloud=login)
    vehicle = await gateway.zenoh()
    cloud = await gateway.mqtt(mode=mode, username="cloud", password="c")
    speed, door = OneTopic(SPEED), OneTopic(DOOR)
    for heard in (speed, door):
        if mode == "off-vehicle":  # a publish has the streamer's sink there
            await cloud.register_listener(uris.pattern("vehicle1"), heard, streamer_sink("cloud"))
        else:
            await cloud.register_listener(heard.topic, heard)
    alarm = await gateway.hear(cloud, ALARM, CLOUD)
    codes: list[UCode.ValueType] = []

    async def call(client: InMemoryRpcClient) -> None:
        with pytest.raises(UStatusError) as raised:
            await client.invoke_method(METHOD, UPayload(b"?", 6), CallOptions(20_000))
        codes.append(raised.value.code)

    async with InMemoryRpcClient(vehicle, vehicle.local) as client:  # type: ignore[attr-defined]
        for number in range(90):
            await vehicle.send(message(UMessageBuilder.publish(SPEED), number))
            await vehicle.send(message(UMessageBuilder.publish(DOOR), number))
            if number < 60:
                await vehicle.send(message(UMessageBuilder.notification(ALARM, CLOUD), number))
        began = asyncio.get_running_loop().time()
        await asyncio.gather(*(call(client) for _ in range(150)))
        took_s = asyncio.get_running_loop().time() - began
    assert codes == [UCode.PERMISSION_DENIED] * 150
    assert took_s < 20, "at once, and not when their ttl was over"
    held = 'held_records{endpoint="cloud",log="durable",reason="refused"}'
    await gateway.until(lambda found: found[held] == 240)
    units = 'held_addresses{endpoint="cloud",log="durable",reason="refused"}'
    assert (await gateway.metrics())[units] == (3 if mode == "in-vehicle" else 1)
    assert speed.messages == door.messages == alarm.messages == []
    broker.change_acl(RIGHT)
    await all_of(speed, 90)
    await all_of(door, 90)
    await all_of(alarm, 60)
    await gateway.until(lambda found: found[held] == 0)
    assert not (await gateway.metrics()).get('dropped_total{endpoint="cloud",reason="undeliverable"}')


async def backlog_waits(gateway: Gateway, endpoint: str, records: int) -> None:
    held = f'held_records{{endpoint="{endpoint}",log="durable",reason="unheard"}}'
    await gateway.until(lambda found: found[held] == records)


async def test_a_backlog_waits_for_a_dds_reader_that_comes_later(make_gateway: MakeGateway, broker: Broker) -> None:
    """The subscriber's process joins, and declares its reader some seconds later."""
    subscriber = uris.parse("//mcu1/9001/1/0")
    gateway = await make_gateway(broker, "vehicle mcu", {uris.format(SPEED): [uris.format(subscriber)]})
    vehicle = await gateway.zenoh()
    for number in range(50):
        await vehicle.send(message(UMessageBuilder.publish(SPEED), number))
    await backlog_waits(gateway, "mcu", 50)
    mcu = await gateway.dds()
    other = await gateway.hear(mcu, DOOR)
    await vehicle.send(message(UMessageBuilder.publish(SPEED), 50))
    await backlog_waits(gateway, "mcu", 51)
    heard = await gateway.hear(mcu, SPEED)
    await all_of(heard, 51)
    assert len(heard.messages) == 51, "each once"
    assert other.messages == []
    await vehicle.send(message(UMessageBuilder.publish(SPEED), 51))
    await all_of(heard, 52)


@pytest.mark.parametrize("is_alone", [True, False])
async def test_a_backlog_waits_for_a_zenoh_subscriber_that_declares_later(
    make_gateway: MakeGateway, broker: Broker, is_alone: bool
) -> None:
    """100 records wait on disk, the gateway restarts, and the subscriber's process links before it declares: directly,
    or through another client."""
    subscriber = uris.parse("//vehicle1/9001/1/0")
    topic = uris.parse("//cloud/8001/1/8001")
    gateway = await make_gateway(broker, "vehicle cloud", {uris.format(topic): [uris.format(subscriber)]})
    cloud = await gateway.mqtt(entity=0x8001)
    for number in range(100):
        await cloud.send(message(UMessageBuilder.publish(topic), number))
    backlog = 'backlog{endpoint="vehicle",log="durable"}'
    await gateway.until(lambda found: found[backlog] == 100)
    assert gateway.child is not None
    await gateway.child.stop()
    await gateway.start()
    if not is_alone:
        other = await gateway.zenoh(entity=0x9002)
        await gateway.hear(other, SPEED)
    vehicle = await gateway.zenoh(entity=0x9001)
    await cloud.send(message(UMessageBuilder.publish(topic), 100))
    await backlog_waits(gateway, "vehicle", 101)
    heard = await gateway.hear(vehicle, topic)
    await all_of(heard, 101)
    assert len(heard.messages) == 101, "each once"
