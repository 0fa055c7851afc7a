"""Flow control: senders wait for peers that are merely slow, and for nobody else; those of a durable log for a moment
only."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from streamer.flow import ACTIVE_S, HELD_RECORDS, Flow
from uprotocol import uri as uris
from uprotocol.status import OK, UStatusError
from uprotocol.v1.ucode_pb2 import UCode

SPEED = uris.parse("//vehicle1/8001/1/8001")


class Peer:
    def __init__(self, lag: float, active: bool = True) -> None:
        self.lag, self.active = lag, active

    def __call__(self) -> float | None:
        return self.lag if self.active else None


def append(flow: Flow, records: int, passed: list[int], number: int) -> asyncio.Future[int]:
    """`passed` gets `number` when it was let in."""

    def let_in(answer: asyncio.Future[int]) -> None:
        passed.append(number)
        answer.set_result(number)

    return flow.append(records, let_in)


async def test_the_fastest_active_peer_decides() -> None:
    flow = Flow()
    assert flow.is_open
    slow, fast, stuck = Peer(3.0), Peer(0.5), Peer(9.0, active=False)
    for one in (slow, fast, stuck):
        flow.follow(one)
    assert flow.is_open
    fast.lag = 1.5
    assert not flow.is_open
    waiting = append(flow, 1, [], 1)
    await asyncio.sleep(0)
    flow.moved()
    await asyncio.sleep(0)
    assert not waiting.done()
    fast.lag = 0.9
    flow.moved()
    assert await asyncio.wait_for(waiting, ACTIVE_S / 2) == 1
    flow = Flow()
    flow.follow(stuck)
    assert flow.is_open, "a peer that takes nothing holds up nobody"


async def test_a_peer_that_falls_silent_lets_go() -> None:
    flow, peer = Flow(), Peer(2.0)
    flow.follow(peer)
    waiting = append(flow, 1, [], 1)
    peer.active = False
    assert not waiting.done()
    await asyncio.wait_for(waiting, 10 * ACTIVE_S)


async def test_a_batch_waits_its_turn_behind_those_that_came_before() -> None:
    flow, peer, passed = Flow(), Peer(2.0), list[int]()
    flow.follow(peer)

    waiting = [append(flow, 1, passed, 1), append(flow, 1, passed, 2)]
    peer.lag = 0.5
    waiting.append(append(flow, 1, passed, 3))  # though it is open now: others wait already
    assert passed == []
    flow.moved()
    assert await asyncio.gather(*waiting) == passed == [1, 2, 3]
    assert append(flow, 1, passed, 4).done()


async def test_what_the_log_refuses_is_told_to_whoever_waited() -> None:
    flow, peer = Flow(), Peer(2.0)
    flow.follow(peer)

    def refuse(answer: asyncio.Future[int]) -> None:
        answer.set_exception(UStatusError(UCode.RESOURCE_EXHAUSTED, "the disk is full"))

    waiting, behind = flow.append(1, refuse), append(flow, 1, [], 2)
    peer.lag = 0.5
    flow.moved()
    with pytest.raises(UStatusError, match="full"):
        await waiting
    assert await behind == 2


@pytest.mark.parametrize("batch", [1, 100, HELD_RECORDS, 5 * HELD_RECORDS])
async def test_a_durable_log_holds_its_senders_for_a_moment_at_a_time(batch: int) -> None:
    patience_s = 0.001
    flow, peer, passed = Flow(patience_s), Peer(2.0), list[int]()
    flow.follow(peer)  # lags for ever
    batches = 4 * HELD_RECORDS // batch + 1

    loop = asyncio.get_running_loop()
    began = loop.time()
    await asyncio.gather(*(append(flow, batch, passed, number) for number in range(batches)))
    assert passed == list(range(batches))
    assert loop.time() - began >= patience_s * (batches * batch // max(batch, HELD_RECORDS) - 1), (
        "a hold for each share"
    )


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
