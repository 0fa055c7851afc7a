"""One blocked stream of a peer: the others continue, the stream keeps its order, and no message is lost."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from history.log.log import Log
from streamer.egress import in_hand
from streamer.egress.in_hand import Aside
from streamer.egress.pump import Pump
from streamer.walk.endpoint import Endpoint, Endpoints
from streamer.walk.flow import Flow
from streamer.walk.paused import Paused
from streamer.walk.sender import PriorityQueue, QueuedRecord, key_of
from streamer.walk.view import Decision, Leg, Target
from tests.tiers import examples
from uprotocol import uri as uris
from uprotocol.encoded import EncodedMessage
from uprotocol.message import UMessageBuilder
from uprotocol.pacing import Backoff
from uprotocol.status import OK
from uprotocol.transport import Capability, UTransport
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.umessage_pb2 import UMessage
from uprotocol.v1.uri_pb2 import UUri
from uprotocol.v1.ustatus_pb2 import UStatus

TOPICS = [uris.parse(f"//vehicle1/8001/1/{resource:X}") for resource in range(0x8001, 0x8005)]


class Network(UTransport):
    """Accepts messages of every topic that is not stuck."""

    capabilities = Capability.PUBLISH_WITHOUT_SINK
    connected = True

    def __init__(self) -> None:
        self.stuck: set[int] = set()
        self.taken: list[UMessage] = []
        self.news = asyncio.Event()

    async def send_batch(self, messages: Sequence[UMessage]) -> list[UStatus]:
        statuses = []
        for message in messages:
            if message.attributes.source.resource_id in self.stuck:
                statuses.append(UStatus(code=UCode.UNAVAILABLE, message="its reader takes nothing"))
            else:
                self.taken.append(message)
                statuses.append(OK)
        self.news.set()
        await asyncio.sleep(0)
        return statuses


class Everything:
    version = (0, 0, 0)
    endpoints = Endpoints([])

    def __init__(self, peer: Endpoint) -> None:
        self._decision = Decision((Leg(peer, (Target("cloud", 0, None),)),))

    def comes_from(self, peer: Endpoint, source: UUri) -> bool:
        return False

    def decide(self, source: UUri, sink: UUri | None, log: Log) -> Decision:
        return self._decision


async def until(network: Network, condition: Any) -> None:
    async with asyncio.timeout(20):
        while not condition():
            network.news.clear()
            await network.news.wait()


def of(topic: UUri, messages: Sequence[UMessage]) -> list[bytes]:
    return [message.payload for message in messages if message.attributes.source == topic]


def made(topic: UUri, number: int) -> EncodedMessage:
    message = UMessageBuilder.publish(topic).build()
    message.payload = b"%d" % number
    return EncodedMessage.of(message)


async def pumping() -> tuple[Log, Network, Pump, asyncio.Task[None]]:
    log, network = await Log.open(None, name="test"), Network()
    peer = Endpoint("cloud", ["cloud"], network)  # type: ignore[arg-type]
    letters: Any = SimpleNamespace(add=lambda *_: pytest.fail("nothing is undeliverable here"))
    pump = Pump(peer, log, Everything(peer), letters, Backoff(1, 2), Flow(), Paused(Path(), Endpoints([peer]), ""))  # type: ignore[arg-type]
    pump.begin()
    return log, network, pump, asyncio.create_task(pump.run())


@pytest.mark.spec("local~disp-order")
async def test_a_stuck_stream_holds_up_no_other_and_keeps_its_order() -> None:
    log, network, pump, running = await pumping()
    network.stuck = {0x8001}
    streams = [log.stream_id(topic) for topic in TOPICS]
    for number in range(50):
        await log.append(streams, [made(topic, number) for topic in TOPICS])
    await until(network, lambda: len(network.taken) >= 150)
    assert of(TOPICS[0], network.taken) == []
    assert pump.cursor == 0  # the oldest that waits holds the cursor
    network.stuck = set()
    await until(network, lambda: len(network.taken) >= 200)
    for topic in TOPICS:
        assert of(topic, network.taken) == [b"%d" % number for number in range(50)]
    async with asyncio.timeout(20):
        while pump.cursor < 200:  # noqa: ASYNC110 - no event for it
            await asyncio.sleep(0.001)
    assert not pump.aside
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await log.close()


async def test_what_is_kept_aside_is_bounded_and_nothing_of_it_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_hand, "ASIDE_MESSAGES_MAX", 20)
    log, network, pump, running = await pumping()
    network.stuck = {0x8001}
    streams = [log.stream_id(topic) for topic in TOPICS[:2]]
    await log.append([streams[1]], [made(TOPICS[1], 0)])
    for number in range(100):
        await log.append([streams[0]], [made(TOPICS[0], number)])
    await asyncio.sleep(0.05)
    assert pump.aside.messages <= 20 + 2_000  # what was read already has to go somewhere
    network.stuck = set()
    await until(network, lambda: len(network.taken) >= 101)
    assert of(TOPICS[0], network.taken) == [b"%d" % number for number in range(100)]
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await log.close()


@given(seed=st.integers(0, 1 << 30))
@settings(max_examples=examples(40))
def test_streams_that_get_stuck_and_free_by_chance_lose_and_reorder_nothing(seed: int) -> None:
    asyncio.run(_by_chance(seed))


async def _by_chance(seed: int) -> None:
    draw = random.Random(seed)
    log, network, _, running = await pumping()
    streams = {uris.key(topic): log.stream_id(topic) for topic in TOPICS}
    sent: dict[tuple[str, int, int, int], list[bytes]] = {uris.key(topic): [] for topic in TOPICS}
    for number in range(60):
        topic = draw.choice(TOPICS)
        network.stuck = {one.resource_id for one in TOPICS if draw.random() < 0.3}
        sent[uris.key(topic)].append(b"%d" % number)
        await log.append([streams[uris.key(topic)]], [made(topic, number)])
        if draw.random() < 0.3:
            await asyncio.sleep(0)
    network.stuck = set()
    await until(network, lambda: len(network.taken) >= 60)
    for topic in TOPICS:
        assert of(topic, network.taken) == sent[uris.key(topic)]
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await log.close()


def test_who_is_aside_waits_until_it_is_due() -> None:
    now = 0.0
    queue = PriorityQueue[QueuedRecord]()
    aside = Aside(queue, Backoff(1_000, 1_000), lambda: now)
    messages = [made(TOPICS[0], number) for number in range(3)]
    aside.put_back([(1, messages[0], 7)], {key_of(messages[0])})
    assert aside.takes((2, messages[1], 7))
    assert not aside.takes((3, made(TOPICS[1], 0), 8))
    assert (aside.messages, aside.oldest_seq, aside.due()) == (2, 1, [])
    now = 2.0
    assert [seq for seq, _, _ in aside.due()] == [1, 2]
    assert aside.takes((4, messages[2], 7))  # still behind them
    aside.put_back([])
    assert [seq for seq, _, _ in queue] == [4]
    assert not aside
