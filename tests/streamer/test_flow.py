"""Flow control: senders wait only for slow peers; those of a durable log only while our own processor is the
bottleneck."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from campaigns.simulation.loop import VirtualLoop
from storage.runtime import Used
from streamer.walk.flow import ACTIVE_S, HELD_S_MAX, LAG_RECORDS_MAX, MEASURE_S, SHARE_RECORDS, Flow
from tests.tiers import examples
from uprotocol import uri as uris
from uprotocol.status import OK, UStatusError
from uprotocol.v1.ucode_pb2 import UCode

SPEED = uris.parse("//vehicle1/8001/1/8001")


class Peer:
    """What a Pump is to a Flow."""

    def __init__(self, lag: float, active: bool = True) -> None:
        self.behind, self.active, self.read = lag, active, 0

    def lag(self) -> float | None:
        return self.behind if self.active else None


def append(flow: Flow, records: int, passed: list[int], number: int) -> asyncio.Future[int]:
    """Appends `number` to `passed` when the flow admits it."""

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
    fast.behind = 1.5
    assert not flow.is_open
    waiting = append(flow, 1, [], 1)
    await asyncio.sleep(0)
    flow.moved()
    await asyncio.sleep(0)
    assert not waiting.done()
    fast.behind = 0.9
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
    peer.behind = 0.5
    waiting.append(append(flow, 1, passed, 3))  # though it is open now: others wait already
    assert passed == []
    flow.moved()
    assert await asyncio.gather(*waiting) == passed == [1, 2, 3]
    assert append(flow, 1, passed, 4).done()


async def test_a_refusal_by_the_log_is_reported_to_the_waiting_appender() -> None:
    flow, peer = Flow(), Peer(2.0)
    flow.follow(peer)

    def refuse(answer: asyncio.Future[int]) -> None:
        answer.set_exception(UStatusError(UCode.RESOURCE_EXHAUSTED, "the disk is full"))

    waiting, behind = flow.append(1, refuse), append(flow, 1, [], 2)
    peer.behind = 0.5
    flow.moved()
    with pytest.raises(UStatusError, match="full"):
        await waiting
    assert await behind == 2


class Gateway:
    """One processor that takes in and sends, in steps during which nothing else happens, on virtual time."""

    BATCH = 512

    def __init__(self, loop: VirtualLoop, taking_s: float, sending_s: float, answer_s: float) -> None:
        """Of the processor, for each record; and of the peer, for each batch."""
        self._loop, self._taking_s, self._sending_s, self._answer_s = loop, taking_s, sending_s, answer_s
        self._worked_s = 0.0
        self.taken = self.read = self.furthest = 0  # records
        self.longest_s = 0.0  # that a batch has waited
        self.flow = Flow(lambda: Used(self._worked_s, self._worked_s, 0.0))
        self.flow.follow(self)

    def lag(self) -> float | None:
        return (self.taken - self.read) / LAG_RECORDS_MAX

    def _work(self, seconds: float) -> None:
        self._loop.now += seconds
        self._worked_s += seconds

    def _take(self, answer: asyncio.Future[int]) -> None:
        self._work(self.BATCH * self._taking_s)
        self.taken += self.BATCH
        self.furthest = max(self.furthest, self.taken - self.read)
        answer.set_result(self.taken)

    async def flood(self, records: int) -> None:
        """As from a publisher that sends as fast as it may."""
        while self.taken < records:
            began = self._loop.now
            await self.flow.append(self.BATCH, self._take)
            self.longest_s = max(self.longest_s, self._loop.now - began - self.BATCH * self._taking_s)
            await asyncio.sleep(0)

    async def pump(self) -> None:
        while True:
            if self.read < self.taken:
                self._work(self.BATCH * self._sending_s)
                self.read += self.BATCH
                if self.flow.holds:
                    self.flow.moved()
                await asyncio.sleep(self._answer_s)
            else:
                await asyncio.sleep(0.001)


def on_virtual_time(scenario: Callable[[VirtualLoop], Coroutine[Any, Any, None]]) -> None:
    loop = VirtualLoop(0)
    running = asyncio.events._get_running_loop()
    asyncio.events._set_running_loop(None)
    try:
        loop.run_until_complete(scenario(loop))
    finally:
        loop.finish([])
        asyncio.events._set_running_loop(running)


# from a desktop to a processor of a hundredth of its speed
COST_S = st.floats(2e-6, 1e-3)


@pytest.mark.spec("local~disp-queue")
@settings(max_examples=examples(25))
@given(taking_s=COST_S, sending_s=COST_S)
@example(taking_s=10e-6, sending_s=40e-6)
@example(taking_s=1e-3, sending_s=2e-6)
def test_taking_in_does_not_run_away_from_sending(taking_s: float, sending_s: float) -> None:
    async def scenario(loop: VirtualLoop) -> None:
        gateway = Gateway(loop, taking_s, sending_s, 0.0)
        pumping = loop.create_task(gateway.pump())
        await gateway.flood(20 * LAG_RECORDS_MAX)
        pumping.cancel()
        held = (taking_s + sending_s) * LAG_RECORDS_MAX / HELD_S_MAX  # shares that came in since nobody stands for ever
        assert gateway.furthest <= LAG_RECORDS_MAX + (2 + held) * SHARE_RECORDS

    on_virtual_time(scenario)


@pytest.mark.spec("local~disp-queue")
@settings(max_examples=examples(25))
@given(cost_s=st.floats(2e-6, 8e-6), answer_s=st.floats(0.05, 2.0))
def test_a_burst_is_taken_in_though_the_peer_is_slow(cost_s: float, answer_s: float) -> None:
    """The peer answers a batch after a long time, in which we are idle: the disk has space for the burst."""
    records = 20 * LAG_RECORDS_MAX

    async def scenario(loop: VirtualLoop) -> None:
        gateway = Gateway(loop, cost_s, cost_s, answer_s)
        pumping = loop.create_task(gateway.pump())
        await gateway.flood(records)
        pumping.cancel()
        assert gateway.longest_s <= 3 * MEASURE_S
        assert loop.now <= 2 * records / SHARE_RECORDS * MEASURE_S

    on_virtual_time(scenario)


@settings(max_examples=examples(25))
@given(taking_s=COST_S, sending_s=COST_S)
def test_senders_go_on_while_a_peer_reads_all_that_it_has_missed(taking_s: float, sending_s: float) -> None:
    async def scenario(loop: VirtualLoop) -> None:
        gateway = Gateway(loop, taking_s, sending_s, 0.0)
        gateway.taken = missed = 100 * LAG_RECORDS_MAX
        pumping = loop.create_task(gateway.pump())
        await gateway.flood(missed + 10 * LAG_RECORDS_MAX)
        pumping.cancel()
        assert gateway.taken - gateway.read < missed, "it catches up"
        turn_s = 2 * gateway.BATCH * sending_s + SHARE_RECORDS * (taking_s + 2 * sending_s)
        assert gateway.longest_s <= HELD_S_MAX + turn_s, "nobody stands for ever"

    on_virtual_time(scenario)


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

    monkeypatch.setattr(world.assembly.endpoints["cloud"].transport, "send_batch", slowly)
    payloads = [b"%06d" % number + bytes(1_000) for number in range(20_000)]  # more than the ring holds
    for begin in range(0, len(payloads), 500):
        messages = [publish(SPEED) for _ in range(500)]
        for message, payload in zip(messages, payloads[begin : begin + 500], strict=True):
            message.payload = payload
        assert not any(status.code for status in await vehicle.send_batch(messages))
    await world.until(lambda: len(taken) >= len(payloads))
    assert taken == payloads
    assert all(pump.losses.gaps == 0 for pump in world.assembly.pumps)
