"""A pump under random failures: the cursor never passes an unconfirmed record, order holds within a class, and a slow
peer delays no other."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from history.log.log import Log
from streamer.egress.pump import PUMP_WINDOW_BYTES_MAX, Pump
from streamer.walk.endpoint import Endpoint, Endpoints
from streamer.walk.flow import Flow
from streamer.walk.paused import Paused
from streamer.walk.view import Decision, Leg, Target
from transports.base import stopped
from uprotocol import uri as uris
from uprotocol import uuid as uuids
from uprotocol.encoded import EncodedMessage
from uprotocol.message import UMessageBuilder
from uprotocol.pacing import Backoff
from uprotocol.transport import Capability, UTransport
from uprotocol.v1.uattributes_pb2 import UPriority
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.umessage_pb2 import UMessage
from uprotocol.v1.uri_pb2 import UUri
from uprotocol.v1.ustatus_pb2 import UStatus

MakeWorld = Any
Publish = Callable[..., UMessage]

TOPICS = [uris.parse(f"//vehicle1/8001/1/{resource:X}") for resource in range(0x8001, 0x8004)]
PRIORITIES = [UPriority.UPRIORITY_CS0, UPriority.UPRIORITY_CS1, UPriority.UPRIORITY_CS4]


class Network(UTransport):
    """A transport that takes, refuses or is away as drawn; `taken` is what has left, in order."""

    capabilities = Capability.PUBLISH_WITHOUT_SINK
    connected = False

    def __init__(self, draw: random.Random, *, away: float, refused: float) -> None:
        self._draw, self._away, self._refused = draw, away, refused
        self.taken: list[UMessage] = []
        self.refused: list[UMessage] = []
        self.batches: list[int] = []
        self.after_batch: Callable[[], None] = lambda: None

    async def send_batch(self, messages: Sequence[UMessage]) -> list[UStatus]:
        statuses = self.take(messages)
        await asyncio.sleep(0)
        self.after_batch()
        return statuses

    def take(self, messages: Sequence[UMessage]) -> list[UStatus]:
        self.batches.append(len(messages))
        statuses: list[UStatus] = []
        for message in messages:
            if self._draw.random() < self._away:
                break
            if self._draw.random() < self._refused:
                self.refused.append(message)
                statuses.append(UStatus(code=UCode.PERMISSION_DENIED, message="no"))
            else:
                self.taken.append(message)
                statuses.append(UStatus(code=UCode.OK))
        if len(statuses) < len(messages):
            stopped(statuses, len(messages), UStatus(code=UCode.UNAVAILABLE, message="away"))
        return statuses


class FarNetwork(Network):
    """One that answers some steps later, by when further batches have left. What it does not take stops what comes
    behind it until its sender has the result."""

    in_flight_messages = 600

    def __init__(self, draw: random.Random, *, away: float, refused: float) -> None:
        super().__init__(draw, away=away, refused=refused)
        self.under_way = self.most_under_way = 0
        self._failed = 0  # of those
        self.answering = asyncio.Event()
        self.answering.set()

    async def send_batch(self, messages: Sequence[UMessage]) -> list[UStatus]:
        if self._failed:
            return stopped([], len(messages), UStatus(code=UCode.UNAVAILABLE, message="one before was not taken"))
        self.under_way += 1
        self.most_under_way = max(self.most_under_way, self.under_way)
        statuses = self.take(messages)
        has_failed = any(status.code == UCode.UNAVAILABLE for status in statuses)
        self._failed += has_failed
        await self.answering.wait()
        for _ in range(self._draw.randrange(20)):
            await asyncio.sleep(0)
        self.under_way -= 1
        self._failed -= has_failed
        self.after_batch()
        return statuses


class EverythingFor:
    """A view by which a peer wants some topics."""

    version = (0, 0, 0)
    endpoints = Endpoints([])

    def __init__(self, peer: Endpoint, topics: Sequence[UUri], period_ms: int | None = None) -> None:
        self._peer, self._topics, self._period_ms = peer, [uris.key(topic) for topic in topics], period_ms

    def comes_from(self, peer: Endpoint, source: UUri) -> bool:
        return False

    def decide(self, source: UUri, sink: UUri | None, log: Log) -> Decision:
        wanted = uris.key(source) in self._topics
        return Decision((Leg(self._peer, (Target("cloud", 0, self._period_ms),)),)) if wanted else Decision()


def seq_by_id(messages: Sequence[UMessage]) -> dict[int, int]:
    return {message.attributes.id.msb << 64 | message.attributes.id.lsb: seq for seq, message in enumerate(messages, 1)}


def id_of(message: UMessage) -> int:
    return int(message.attributes.id.msb << 64 | message.attributes.id.lsb)


@pytest.mark.spec("local~disp-queue")
@pytest.mark.spec("local~disp-order")
@pytest.mark.spec("local~disp-batch")
@example(seed=1635908, away=0.02, refused=0.1, count=656, far=False)
@given(
    far=st.booleans(),
    seed=st.integers(0, 1 << 30),
    away=st.sampled_from([0.0, 0.02, 0.3]),
    refused=st.sampled_from([0.0, 0.1]),
    count=st.integers(1, 700),
)
def test_the_cursor_never_passes_what_was_not_confirmed(
    seed: int, away: float, refused: float, count: int, far: bool
) -> None:
    asyncio.run(_pump(seed, away, refused, count, far))


def pump_of(peer: Endpoint, log: Log, view: EverythingFor, dead_letters: Any) -> Pump:
    paused = Paused(Path(), Endpoints([peer]), "")
    return Pump(peer, log, view, dead_letters, Backoff(1, 1), Flow(), paused)  # type: ignore[arg-type]


async def _pump(seed: int, away: float, refused: float, count: int, far: bool) -> None:
    draw = random.Random(seed)
    log = await Log.open(None, name="test")
    network, letters = (FarNetwork if far else Network)(draw, away=away, refused=refused), []
    peer = Endpoint("cloud", ["cloud"], network)  # type: ignore[arg-type]
    dead_letters: Any = SimpleNamespace(add=lambda message, code, reason, endpoint: letters.append(message))
    wanted = TOPICS[:2]
    pump = pump_of(peer, log, EverythingFor(peer, wanted), dead_letters)
    pump.begin()
    messages = [
        UMessageBuilder.publish(draw.choice(TOPICS)).with_priority(draw.choice(PRIORITIES)).build()
        for _ in range(count)
    ]
    keys = [uris.key(topic) for topic in wanted]
    mine = [message for message in messages if uris.key(message.attributes.source) in keys]
    seqs = seq_by_id(messages)
    cursors = [0]

    faults: list[str] = []

    def check() -> None:
        """At any time: each record behind the cursor has been sent or is a dead letter."""
        if pump.cursor < cursors[-1]:
            faults.append(f"the cursor went back to {pump.cursor}")
        cursors.append(pump.cursor)
        finished = {id_of(message) for message in (*network.taken, *letters)}
        if not all(id_of(message) in finished for message in mine if seqs[id_of(message)] <= pump.cursor):
            faults.append(f"the cursor is at {pump.cursor}, which it must not have reached")

    network.after_batch = check
    running = asyncio.create_task(pump.run())
    for begin in range(0, count, 100):
        part = messages[begin : begin + 100]
        await log.append(
            [log.stream_id(message.attributes.source, None) for message in part], list(map(EncodedMessage.of, part))
        )
    async with asyncio.timeout(30):
        while pump.cursor < count:
            assert not running.done()
            await asyncio.sleep(0.001)
    check()
    assert faults == []  # reported here: an error of a transport is its endpoint's trouble
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert {id_of(message) for message in network.taken} | {id_of(message) for message in letters} == {
        id_of(message) for message in mine
    }
    assert [id_of(message) for message in letters] == [id_of(message) for message in network.refused]
    lanes: dict[tuple[Any, int], list[int]] = {}
    for message in network.taken:
        lanes.setdefault((uris.key(message.attributes.source), message.attributes.priority), []).append(
            seqs[id_of(message)]
        )
    assert all(seqs_ == sorted(set(seqs_)) for seqs_ in lanes.values())  # in order within a class, and each once
    assert log.cursors.seq("egress:cloud") == count
    if not away:
        assert len(network.batches) <= 1 + count // 8  # batches, not messages
    await log.close()


async def far_pump(count: int) -> tuple[FarNetwork, Pump, Log]:
    """A pump that runs, and has sent all that may be under way of `count` messages."""
    log = await Log.open(None, name="test")
    network = FarNetwork(random.Random(0), away=0, refused=0)
    network.answering.clear()
    peer = Endpoint("cloud", ["cloud"], network)  # type: ignore[arg-type]
    pump = pump_of(peer, log, EverythingFor(peer, TOPICS[:1]), Any)
    pump.begin()
    stream = log.stream_id(TOPICS[0], None)
    for _ in range(count):
        await log.append([stream], [EncodedMessage.of(UMessageBuilder.publish(TOPICS[0]).build())])
    return network, pump, log


@pytest.mark.spec("local~disp-batch")
async def test_further_batches_leave_before_the_first_is_answered() -> None:
    network, pump, log = await far_pump(3_000)
    async with log:
        running = asyncio.create_task(pump.run())
        async with asyncio.timeout(30):
            while len(network.taken) < network.in_flight_messages:  # noqa: ASYNC110 - the pump tells nobody
                await asyncio.sleep(0.001)
        assert network.under_way == len(network.batches) == 2
        assert len(network.taken) < network.in_flight_messages + 512, "no more than the network wants, and a batch"
        assert pump.cursor == 0
        network.answering.set()
        async with asyncio.timeout(30):
            while pump.cursor < 3_000:  # noqa: ASYNC110 - the pump tells nobody
                await asyncio.sleep(0.001)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


@pytest.mark.spec("local~disp-order")
async def test_after_a_failure_nothing_leaves_until_all_that_left_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    network, pump, log = await far_pump(1_500)
    calls: list[tuple[Sequence[UMessage], asyncio.Future[list[UStatus]]]] = []
    begun = asyncio.Event()

    def send_batch(messages: Sequence[UMessage]) -> asyncio.Future[list[UStatus]]:
        calls.append((messages, asyncio.get_running_loop().create_future()))
        begun.set()
        return calls[-1][1]

    monkeypatch.setattr(network, "send_batch", send_batch)
    async with log:
        running = asyncio.create_task(pump.run())
        async with asyncio.timeout(30):
            while len(calls) < 2:
                begun.clear()
                await begun.wait()
            (first, answer), (second, later) = calls
            answer.set_result(stopped([], len(first), UStatus(code=UCode.UNAVAILABLE, message="away")))
            for _ in range(50):
                await asyncio.sleep(0)
            assert len(calls) == 2
            begun.clear()
            later.set_result(stopped([], len(second), UStatus(code=UCode.UNAVAILABLE, message="away")))
            await begun.wait()
        again, _ = calls[2]
        assert [id_of(one) for one in again] == [id_of(one) for one in [*first, *second]][: len(again)]
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


@pytest.mark.parametrize("batches", [1, 2])
async def test_what_is_answered_while_a_pump_ends_is_not_sent_again(batches: int) -> None:
    network, pump, log = await far_pump(700)
    if batches == 1:
        network.in_flight_messages = 0
    async with log:
        running = asyncio.create_task(pump.run())
        async with asyncio.timeout(30):
            while network.under_way < batches:  # noqa: ASYNC110 - the pump tells nobody
                await asyncio.sleep(0.001)
        running.cancel()
        await asyncio.sleep(0)
        network.answering.set()
        await asyncio.gather(running, return_exceptions=True)
        assert network.taken
        assert log.cursors.seq("egress:cloud") == pump.cursor == len(network.taken)


@pytest.mark.spec("local~disp-sample-period")
@given(
    steps=st.lists(st.integers(0, 400), min_size=1, max_size=60),
    period_ms=st.integers(1, 300),
    jump=st.integers(0, 59),
    back_ms=st.integers(0, 5_000),
)
def test_a_thinned_topic_has_one_message_per_period_whatever_the_clock_does(
    steps: list[int], period_ms: int, jump: int, back_ms: int
) -> None:
    asyncio.run(_thin(steps, period_ms, jump, back_ms))


async def _thin(steps: list[int], period_ms: int, jump: int, back_ms: int) -> None:
    log = await Log.open(None, name="test")
    network = Network(random.Random(0), away=0, refused=0)
    peer = Endpoint("cloud", ["cloud"], network)  # type: ignore[arg-type]
    pump = pump_of(peer, log, EverythingFor(peer, TOPICS[:1], period_ms), Any)
    pump.begin()
    now, times = uuids.now_ms(), []
    for number, step in enumerate(steps):
        now += step - (back_ms if number == jump else 0)
        times.append(now)
    messages = []
    for time_ms in times:
        message = UMessageBuilder.publish(TOPICS[0]).build()
        message.attributes.id.msb = time_ms << 16 | 0x7000
        messages.append(message)
    stream = log.stream_id(TOPICS[0], None)
    await log.append([stream] * len(messages), list(map(EncodedMessage.of, messages)))
    running = asyncio.create_task(pump.run())
    async with asyncio.timeout(30):
        while pump.cursor < len(messages):  # noqa: ASYNC110 - the pump tells nobody
            await asyncio.sleep(0.001)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await log.close()
    sent = [uuids.time_ms(message.attributes.id) for message in network.taken]
    assert sent[0] == times[0]
    forward = [later - earlier for earlier, later in itertools.pairwise(sent) if later >= earlier]
    assert all(gap >= period_ms for gap in forward)
    if jump >= len(times) or not back_ms:  # the clock only went on: nothing was held back for longer than a period
        left_out = set(times) - set(sent)
        assert all(any(0 <= time_ms - one < period_ms for one in sent) for time_ms in left_out)


@pytest.mark.spec("local~disp-payload-opaque")
async def test_what_a_payload_holds_is_nobodys_business(make_world: MakeWorld, publish: Publish) -> None:
    world = await make_world(subscriptions={"//vehicle1/8001/1/8001": ["//cloud/9001/1/0"]})
    vehicle, cloud = await world.node("vehicle", "vehicle1"), await world.node("cloud", "cloud")
    heard = await world.hear(cloud, TOPICS[0])
    sent = []
    for payload in (b"", b"\xff" * 100_000, b"\x00", None):
        message = publish(TOPICS[0])
        if payload is None:
            message.ClearField("payload")
            message.attributes.ClearField("payload_format")
        else:
            message.payload = payload
        sent.append(message)
    await vehicle.send_batch(sent)
    await heard.expect(len(sent))
    assert heard.messages == sent


@pytest.mark.spec("local~disp-at-least-once")
async def test_a_slow_peer_disturbs_nobody_else(make_world: MakeWorld, publish: Publish) -> None:
    world = await make_world(subscriptions={"//vehicle1/8001/1/8001": ["//cloud/9001/1/0", "//mcu1/9/1/0"]})
    vehicle, cloud, mcu = (
        await world.node("vehicle", "vehicle1"),
        await world.node("cloud", "cloud"),
        await world.node("mcu", "mcu1", 9),
    )
    neighbour = await world.hear(mcu, TOPICS[0])
    slowly: list[UMessage] = []
    release = asyncio.Event()

    class Slow:
        async def on_receive(self, message: UMessage) -> None:
            slowly.append(message)
            await release.wait()

    await cloud.register_listener(TOPICS[0], Slow())  # type: ignore[arg-type]
    count = 12_000  # more than the slow one's queue holds
    for begin in range(0, count, 500):
        await vehicle.send_batch([publish(TOPICS[0], str(number)) for number in range(begin, begin + 500)])
    await neighbour.expect(count)
    pump = next(pump for pump in world.assembly.pumps if pump.peer.name == "cloud" and pump.log.durable)
    assert pump.backlog > 0
    assert len(slowly) < count
    release.set()
    await world.until(lambda: len(slowly) >= count)
    assert [message.payload for message in slowly] == [str(number).encode() for number in range(count)]
    await world.until(lambda: pump.backlog == 0)


@pytest.mark.spec("local~disp-policies")
async def test_a_volatile_topic_keeps_the_newest_and_a_durable_one_everything(
    make_world: MakeWorld, publish: Publish
) -> None:
    world = await make_world(
        subscriptions={"//vehicle1/8001/1/8001": ["//cloud/9001/1/0"], "//vehicle1/8001/1/8002": ["//cloud/9001/1/0"]},
        more='[history]\nvolatile = ["//vehicle1/FFFFFFFF/FF/8002"]\nvolatile_mib = 8\n',
    )
    vehicle, cloud = await world.node("vehicle", "vehicle1"), await world.node("cloud", "cloud")
    durable, volatile = await world.hear(cloud, TOPICS[0]), await world.hear(cloud, TOPICS[1])
    world.assembly.endpoints["cloud"].transport.disconnect()
    count, filling = 5_000, "x" * 6_000  # 30 MB: more than the ring and what has been read ahead
    for begin in range(0, count, 200):
        part = range(begin, begin + 200)
        await vehicle.send_batch([publish(TOPICS[1], f"{number} {filling}") for number in part])
        await vehicle.send_batch([publish(TOPICS[0], str(number)) for number in part])
    await world.until(
        lambda: world.assembly.logs.volatile.newest_seq == count and world.assembly.logs.durable.newest_seq == count
    )
    world.assembly.endpoints["cloud"].transport.reconnect()
    await durable.expect(count)
    await world.until(lambda: volatile.messages and volatile.messages[-1].payload.startswith(b"4999 "))
    assert [int(text) for text in durable.texts] == list(range(count))
    numbers = [int(text.split()[0]) for text in volatile.texts]
    assert numbers == sorted(set(numbers))
    assert len(numbers) < count
    pump = next(pump for pump in world.assembly.pumps if pump.peer.name == "cloud" and not pump.log.durable)
    assert pump.losses.gaps == count - len(numbers)  # counted, never silent


async def test_large_messages_are_not_all_read_ahead(make_world: Any, publish: Any) -> None:
    world = await make_world(subscriptions={"//vehicle1/8001/1/8001": ["//cloud/9001/1/0"]})
    vehicle = await world.node("vehicle", "vehicle1")
    world.assembly.endpoints["cloud"].transport.disconnect()
    pump = next(pump for pump in world.assembly.pumps if pump.peer.name == "cloud" and pump.log.durable)
    large = bytes(1 << 20)
    for _ in range(40):
        message = publish("//vehicle1/8001/1/8001")
        message.payload = large
        await vehicle.send(message)
    await world.until(lambda: world.assembly.logs.durable.newest_seq == 40 and pump.retries)
    assert pump.sender.queue.bytes <= PUMP_WINDOW_BYTES_MAX + (8 << 20)
    hearer = await world.hear(await world.node("cloud", "cloud"), uris.parse("//vehicle1/8001/1/8001"))
    world.assembly.endpoints["cloud"].transport.reconnect()
    await hearer.expect(40)
    assert pump.sender.queue.bytes == 0


async def test_what_is_paced_leaves_in_small_batches(make_world: MakeWorld, publish: Publish) -> None:
    """A quarter of a second's worth each, so that an urgent message waits behind no more."""
    world = await make_world(
        subscriptions={uris.format(TOPICS[0]): ["//cloud/9001/1/0"]}, egress="messages_per_s = 40\n"
    )
    transport, sizes = world.assembly.endpoints["cloud"].transport, list[int]()
    send_batch = transport.send_batch

    async def counted(messages: Any) -> Any:
        sizes.append(len(messages))
        return await send_batch(messages)

    transport.send_batch = counted  # type: ignore[method-assign]
    heard = await world.hear(await world.node("cloud", "cloud", 0x9001), TOPICS[0])
    vehicle = await world.node("vehicle", "vehicle1")
    transport.disconnect()
    for number in range(40):
        await vehicle.send(publish(TOPICS[0], f"{number}"))
    await world.taken("vehicle")
    transport.reconnect()
    await heard.expect(40)
    assert max(sizes) == 10
