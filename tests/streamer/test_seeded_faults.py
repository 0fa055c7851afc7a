"""Under any faults of the networks, each acknowledged message on a subscribed topic arrives at least once and in order.

One seed draws the faults of every network, the messages, and the restarts of the streamer."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any

import pytest

from campaigns.simulation.network import Faults
from tests.tiers import seeds
from transports.local import LocalTransport
from uprotocol import uri as uris
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.umessage_pb2 import UMessage
from uprotocol.v1.uri_pb2 import UUri

MakeWorld = Any
Publish = Callable[..., UMessage]

TOPICS = [
    uris.parse(f"//{authority}/8001/1/{resource}")
    for authority in ("vehicle1", "mcu1")
    for resource in ("8001", "8002")
]
SUBSCRIBED = {
    "//vehicle1/8001/1/8001": ["//cloud/9001/1/0", "//mcu1/9001/1/0"],
    "//mcu1/8001/1/8001": ["//cloud/9001/1/0", "//vehicle1/9001/1/0"],
    "//mcu1/8001/1/8002": ["//cloud/9001/1/0"],
}
ROUNDS = 4
MESSAGES = 120  # of a round, of each publisher


async def publish_until_acknowledged(node: LocalTransport, messages: list[UMessage]) -> None:
    while messages:
        statuses = await node.send_batch(messages)
        messages = [message for message, status in zip(messages, statuses, strict=True) if status.code != UCode.OK]
        if messages:
            await asyncio.sleep(0.002)


def unique(messages: list[UMessage]) -> dict[str, list[bytes]]:
    """Payloads by topic, without those of ids that came before."""
    seen: set[tuple[int, int]] = set()
    found: dict[str, list[bytes]] = {}
    for message in messages:
        id = (message.attributes.id.msb, message.attributes.id.lsb)
        if id not in seen:
            seen.add(id)
            found.setdefault(uris.format(message.attributes.source), []).append(message.payload)
    return found


@pytest.mark.parametrize("seed", seeds(5, quick=2))
@pytest.mark.parametrize("volatile", [False, True], ids=["durable", "volatile"])
@pytest.mark.spec("local~disp-at-least-once")
@pytest.mark.spec("local~disp-no-discard")
@pytest.mark.spec("local~disp-order")
async def test_what_was_acknowledged_arrives_in_order(
    make_world: MakeWorld, publish: Publish, seed: int, volatile: bool
) -> None:
    draw = random.Random(seed)
    world = await make_world(
        subscriptions=SUBSCRIBED, more='[history]\nvolatile = ["//*/FFFFFFFF/FF/FFFF"]\n' if volatile else ""
    )
    vehicle, mcu = await world.node("vehicle", "vehicle1"), await world.node("mcu", "mcu1")
    cloud = await world.node("cloud", "cloud", 0x9001)
    publishers = {"vehicle1": vehicle, "mcu1": mcu}
    heard = {
        "cloud": await world.hear(cloud, uris.pattern("*")),
        "mcu1": await world.hear(mcu, uris.pattern("vehicle1")),
        "vehicle1": await world.hear(vehicle, uris.pattern("mcu1")),
    }
    expected: dict[str, list[bytes]] = {uris.format(topic): [] for topic in TOPICS}
    for round in range(ROUNDS):
        # only the cloud's network may take itself away: on the others the streamer listens, and nobody keeps what it
        # misses
        world.networks["cloud"].set_faults(
            Faults(
                seed + round,
                fail_send=0.1,
                unsure_send=0.05,
                drop_connection=0.2,
                away_ms=5,
                duplicate=0.05,
                delay_ms_max=3,
            )
        )
        for name in ("vehicle", "mcu"):
            world.networks[name].set_faults(
                Faults(seed * 7 + round, fail_send=0.05, unsure_send=0.05, duplicate=0.05, delay_ms_max=2)
            )
        batches = []
        for authority, node in publishers.items():
            mine = [topic for topic in TOPICS if topic.authority_name == authority]
            messages = []
            for number in range(MESSAGES):
                topic: UUri = draw.choice(mine)
                expected[uris.format(topic)].append(b"%d %d" % (round, number))
                messages.append(publish(topic, f"{round} {number}"))
            batches.append(publish_until_acknowledged(node, messages))
        await asyncio.gather(*batches)
        # a restart with records that wait; what is volatile ends with the process
        if not volatile and draw.random() < 0.5:
            for name in ("vehicle", "mcu"):
                await world.until(lambda network=world.networks[name]: not network.has_late)
                await world.taken(name)
            await world.restart()
    wanted = {
        "cloud": set(SUBSCRIBED),
        "mcu1": {"//vehicle1/8001/1/8001"},
        "vehicle1": {"//mcu1/8001/1/8001"},
    }
    for name, topics in wanted.items():
        full = {f"up:{topic}": expected[f"up:{topic}"] for topic in topics}
        count = sum(map(len, full.values()))
        await world.until(
            lambda hearer=heard[name], count=count: sum(map(len, unique(hearer.messages).values())) >= count
        )
        assert unique(heard[name].messages) == full, f"seed {seed}, {name}"
    assert world.assembly.dead_letters.total == 0
