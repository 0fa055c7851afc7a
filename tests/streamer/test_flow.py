"""The volatile log: its senders wait for peers that are merely slow, and for nobody else."""

from __future__ import annotations

import asyncio
from typing import Any

from streamer.flow import ACTIVE_S, Flow
from uprotocol import uri as uris
from uprotocol.status import OK

SPEED = uris.parse("//vehicle1/8001/1/8001")


class Peer:
    def __init__(self, lag: float, active: bool = True) -> None:
        self.lag, self.active = lag, active

    def is_active(self, since: float) -> bool:
        return self.active


async def test_the_fastest_active_peer_decides() -> None:
    flow = Flow()
    assert flow.is_open
    slow, fast, stuck = Peer(3.0), Peer(0.5), Peer(9.0, active=False)
    flow.followers = [slow, fast, stuck]
    assert flow.is_open
    fast.lag = 1.5
    assert not flow.is_open
    opened = flow.opened()
    flow.moved()
    assert not opened.done()
    fast.lag = 0.9
    flow.moved()
    assert opened.done()
    flow.followers = [stuck]
    assert flow.is_open, "a peer that takes nothing holds up nobody"


async def test_a_peer_that_falls_silent_lets_go() -> None:
    flow, peer = Flow(), Peer(2.0)
    flow.followers = [peer]
    opened = flow.opened()
    peer.active = False
    await asyncio.wait_for(opened, 10 * ACTIVE_S)


async def test_a_slow_peer_of_a_volatile_topic_loses_nothing(make_world: Any, publish: Any, monkeypatch: Any) -> None:
    world = await make_world(
        subscriptions={"//vehicle1/8001/1/8001": ["//cloud/9001/1/0"]},
        more='[history]\nvolatile = ["//*/FFFFFFFF/FF/FFFF"]\nvolatile_mib = 8\n',
    )
    vehicle = await world.node("vehicle", "vehicle1")
    taken: list[bytes] = []

    async def slowly(messages: Any) -> Any:
        await asyncio.sleep(0.002)
        taken.extend(message.payload for message in messages)
        return [OK] * len(messages)

    monkeypatch.setattr(world.streamer.endpoints["cloud"].transport, "send_batch", slowly)
    payloads = [b"%06d" % number + bytes(1_000) for number in range(20_000)]  # more than the ring holds
    for begin in range(0, len(payloads), 500):
        messages = [publish(SPEED) for _ in range(500)]
        for message, payload in zip(messages, payloads[begin : begin + 500], strict=True):
            message.payload = payload
        assert not any(status.code for status in await vehicle.send_batch(messages))
    await world.until(lambda: len(taken) >= len(payloads))
    assert taken == payloads
    assert all(pump.gaps == 0 for pump in world.streamer.pumps)
