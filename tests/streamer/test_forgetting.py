"""Topics that the log has forgotten: readers that kept their numbers continue with the new ones, and messages in
delivery are kept."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from history.log.log import Log
from streamer.building import MemoryLimits
from uprotocol import uri as uris
from uprotocol.v1.umessage_pb2 import UMessage

MakeWorld = Any
Publish = Callable[..., UMessage]

SPEED, GEAR, FUEL = (uris.parse(f"//vehicle1/8001/1/{resource}") for resource in (8001, 8002, 8003))
SUBSCRIBED = {uris.format(topic).removeprefix("up:"): ["//cloud/9001/1/0"] for topic in (SPEED, GEAR)}
VOLATILE = '[history]\nvolatile = ["//vehicle1/FFFFFFFF/FF/FFFF"]\nvolatile_mib = 8\n'
RING_BYTES = 4_000  # the newest records only


def forget(log: Log) -> int:
    """What would happen after some minutes."""
    log.stream_table.forget_after_s = 0.0
    return log.stream_table._forget()


async def test_a_forgotten_topic_is_decided_and_delivered_again(make_world: MakeWorld, publish: Publish) -> None:
    world = await make_world(subscriptions=SUBSCRIBED, more=VOLATILE)
    log = world.assembly.logs.volatile
    log._tail.bytes_max = RING_BYTES
    vehicle, cloud = await world.node("vehicle", "vehicle1"), await world.node("cloud", "cloud")
    heard, gear = await world.hear(cloud, SPEED), await world.hear(cloud, GEAR)
    await vehicle.send(publish(SPEED, "1"))
    await heard.expect(1)
    old = log.stream_id(SPEED)
    await vehicle.send_batch([publish(GEAR, "x" * 500) for _ in range(20)])
    await gear.expect(20)
    ingress = world.assembly.ingresses["vehicle"]
    pump = next(pump for pump in world.assembly.pumps if pump.peer.name == "cloud" and pump.log is log)
    await world.until(lambda: not pump.backlog)
    assert forget(log) == 1
    assert not log.knows_stream(old)
    assert old not in {verdict.stream for verdict in ingress._verdicts.values()}
    assert old not in pump.waits.plans._by_stream
    await vehicle.send(publish(SPEED, "2"))
    await heard.expect(2)
    assert heard.texts == ["1", "2"]
    assert log.stream_id(SPEED) > old


async def test_topics_of_what_waits_for_a_peer_are_kept_though_the_ring_has_passed_them(
    make_world: MakeWorld, publish: Publish
) -> None:
    world = await make_world(subscriptions=SUBSCRIBED, more=VOLATILE)
    log, transport = world.assembly.logs.volatile, world.assembly.endpoints["cloud"].transport
    log._tail.bytes_max = RING_BYTES
    vehicle, cloud = await world.node("vehicle", "vehicle1"), await world.node("cloud", "cloud")
    heard = await world.hear(cloud, SPEED)
    pump = next(pump for pump in world.assembly.pumps if pump.peer.name == "cloud" and pump.log is log)
    transport.disconnect()
    await vehicle.send(publish(SPEED, "waits"))
    await world.until(lambda: pump.retries)
    id = log.stream_id(SPEED)
    await vehicle.send_batch([publish(GEAR, "x" * 500) for _ in range(20)])
    await world.until(lambda: log.newest_seq == 21 and log.floor_seq >= 1)
    assert forget(log) == 0
    assert log.knows_stream(id)
    transport.reconnect()
    await heard.expect(1)
    await world.until(lambda: not pump.backlog)
    assert forget(log) == 1
    assert not log.knows_stream(id)


async def test_parked_topics_are_kept_until_they_are_decided(make_world: MakeWorld, publish: Publish) -> None:
    world = await make_world(subscriptions=SUBSCRIBED, more=VOLATILE)
    log = world.assembly.logs.volatile
    log._tail.bytes_max = RING_BYTES
    pump = next(pump for pump in world.assembly.pumps if pump.peer.name == "cloud" and pump.log is log)
    id = log.stream_id(FUEL)
    pump.waits.topics.park(id, 0, ())
    assert forget(log) == 0
    pump.waits.topics.forget(id)
    assert forget(log) == 1


async def test_when_a_thinned_topic_is_due_is_forgotten_with_it(make_world: MakeWorld) -> None:
    world = await make_world(subscriptions=SUBSCRIBED, more=VOLATILE)
    log = world.assembly.logs.volatile
    pump = next(pump for pump in world.assembly.pumps if pump.log is log)
    id = log.stream_id(FUEL)
    pump.waits.plans.due_ms[id] = {"cloud": 1}
    forget(log)
    assert not pump.waits.plans.due_ms


@pytest.mark.parametrize(
    ("volatile", "durable_topics", "volatile_topics"), [("", 16_383, 1), (VOLATILE, 12_288, 4_096)]
)
async def test_the_topics_follow_the_memory(
    make_world: MakeWorld, volatile: str, durable_topics: int, volatile_topics: int
) -> None:
    world = await make_world(more=f"{volatile}[limits]\nmemory_mib = 32\n")
    logs = world.assembly.logs
    assert (logs.durable.stream_table.streams_max, logs.volatile.stream_table.streams_max) == (
        durable_topics,
        volatile_topics,
    )
    assert durable_topics + volatile_topics == MemoryLimits(32 << 20).topics_max
    assert logs.durable.stream_table.authority_streams_max == MemoryLimits(32 << 20).authority_topics_max


async def test_made_up_topics_leave_room_for_what_somebody_has_named(make_world: MakeWorld, publish: Publish) -> None:
    more = '[history]\nrecord = ["//*/8002/1/FFFF"]\n[limits]\nmemory_mib = 32\n'
    world = await make_world(subscriptions=SUBSCRIBED, more=more)
    share = MemoryLimits(32 << 20).authority_topics_max
    vehicle, cloud = await world.node("vehicle", "vehicle1"), await world.node("cloud", "cloud")
    heard = await world.hear(cloud, SPEED)
    made_up = [uris.uri("vehicle1", 0x8002, 1, 0x8000 + number) for number in range(share + 50)]
    for begin in range(0, len(made_up), 500):
        await vehicle.send_batch([publish(topic, "x") for topic in made_up[begin : begin + 500]])
    await vehicle.send(publish(SPEED, "1"))
    await heard.expect(1)
    endpoint = world.assembly.endpoints["vehicle"]
    assert endpoint.dropped["authority_topics_full"] == 50
    assert world.assembly.topics_of("vehicle1") == share + 1
    assert world.assembly.dead_letters.total == 0
    log = world.assembly.logs.durable
    log.floor_seq = log.newest_seq  # retention has passed them
    assert forget(log) > 0
    before = log.newest_seq
    await vehicle.send(publish(made_up[-1], "again"))
    await world.until(lambda: log.newest_seq == before + 1)
