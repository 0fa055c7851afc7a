"""HistoryFeed: one long poll for all listeners; each gets its records once and in order, whatever happens to the
others."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from history.log.log import Log
from history.reading import client as client_module
from history.reading import feed as feeds
from history.reading.feed import HistoryFeed
from history.reading.subscriber import HistoryClient
from history.service.poll import POLL_BYTES_MAX
from tests.history.world import SERVICE, HistoryWorld, publishes
from tests.tiers import full
from uprotocol import uri as uris
from uprotocol.core.ustreamer.v1.ustreamer_pb2 import CommandRequest, CommandResponse, Gap, PollRequest, PollResponse
from uprotocol.status import UStatusError
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.umessage_pb2 import UMessage
from uprotocol.v1.uri_pb2 import UUri

LISTENERS, TOPICS = 1_000, 10_000


def topic(number: int) -> UUri:
    return uris.uri("vcu.vin", 0x10, 1, 0x8000 + number)


class Client(HistoryClient):
    """Counts; `spoil` may change an answer, or raise."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.polls = self.in_flight = self.in_flight_max = self.asked_bytes = self.answer_bytes = 0
        self.waiting: list[int] = []  # topics of each long poll that is under way
        self.followed: dict[bytes, set[bytes]] = {}  # by follower
        self.spoil: Callable[[PollRequest, PollResponse], None] = lambda request, response: None

    async def poll(self, request: PollRequest | None = None, *, patience_ms: int | None = None) -> PollResponse:
        assert request is not None
        self.polls += 1
        self.in_flight += 1
        self.in_flight_max = max(self.in_flight_max, self.in_flight)
        self.asked_bytes = max(self.asked_bytes, request.ByteSize())
        topics = len(self.followed.get(request.follower, ())) if request.follower else len(request.topics)
        if request.wait_ms:
            self.waiting.append(topics)
        try:
            response = await super().poll(request)
            self.spoil(request, response)
            self.answer_bytes = max(self.answer_bytes, response.ByteSize())
            return response
        finally:
            self.in_flight -= 1
            if request.wait_ms:
                self.waiting.remove(topics)

    async def command(self, request: CommandRequest, *, patience_ms: int | None = None) -> CommandResponse:
        response = await super().command(request)
        followed = self.followed.setdefault(request.follower, set())
        for change in request.changes:
            if change.HasField("follow"):
                followed.add(change.follow.topic.SerializeToString())
            else:
                followed.discard(change.unfollow.SerializeToString())
        return response


class World(HistoryWorld):
    """A durable log, a ring, and a feed elsewhere that reads both."""

    async def begin(self, path: Path) -> None:
        await self.open(await Log.open(path, name="durable"), await Log.open(None, name="volatile"))
        self.client = Client(self.rpc, SERVICE, timeout_ms=30_000)
        self.gaps: list[tuple[UUri, Gap]] = []
        self.feed = HistoryFeed(self.client, on_gap=lambda topic, gap: self.gaps.append((topic, gap)))

    @property
    def log(self) -> Log:
        return self.logs[0]

    @property
    def ring(self) -> Log:
        return self.logs[1]

    async def restart(self) -> None:
        """As a streamer restarts: the durable log stays, the ring is a new one."""
        await self.service.stop()
        await self.ring.close()
        self.logs[1] = await Log.open(None, name="volatile")
        await self.serve()

    async def close(self) -> None:
        await self.feed.close()
        await super().close()

    async def append(self, number: int, *topics: int, size: int = 0, log: Log | None = None) -> None:
        payload = f"{number:06}".encode() + bytes(size)
        await self.append_all(log or self.log, publishes([topic(one) for one in topics], payload))

    async def caught_up(self, topics: int) -> None:
        await until(lambda: self.client.waiting == [topics] and self.client.in_flight == 1)


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(120):
        while not holds():  # noqa: ASYNC110 - of many things at once
            await asyncio.sleep(0.005)


@pytest.fixture
async def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[World]:
    monkeypatch.setattr(client_module, "BACKOFF_MS_MIN", 1)
    made = World()
    await made.begin(tmp_path / "l.db")
    yield made
    await made.close()


class Listener:
    def __init__(self, taking: Callable[[], Awaitable[object]] | None = None) -> None:
        self.numbers: list[int] = []
        self._taking = taking

    async def on_receive_batch(self, messages: list[UMessage]) -> None:
        self.numbers += [int(message.payload[:6]) for message in messages]
        if self._taking is not None:
            await self._taking()


@full
@pytest.mark.timeout(300)
async def test_one_long_poll_feeds_1000_listeners_of_10000_topics(world: World) -> None:
    listeners = [Listener() for _ in range(LISTENERS)]
    client, each = world.client, TOPICS // LISTENERS
    await world.append(0, *range(TOPICS))
    await world.feed.subscribe_since(topic(0), 0, listeners[0])
    await world.caught_up(1)
    asked_bytes = client.asked_bytes
    for begin in range(1, TOPICS, 100):  # each asks the service before it returns
        some = range(begin, min(begin + 100, TOPICS))
        await asyncio.gather(*(world.feed.subscribe_since(topic(one), 0, listeners[one // each]) for one in some))
    await until(lambda: all(listener.numbers == [0] * each for listener in listeners))
    await world.caught_up(TOPICS)
    client.polls = client.in_flight_max = client.asked_bytes = client.answer_bytes = 0
    for number in range(1, 4):
        await world.append(number, *range(TOPICS))
        await until(lambda number=number: all(listener.numbers[-each:] == [number] * each for listener in listeners))  # type: ignore[misc]
    assert all(listener.numbers == sorted([0, 1, 2, 3] * each) for listener in listeners)
    assert client.in_flight_max == 1
    assert 0 < client.asked_bytes < 2 * asked_bytes, "a few witnesses more, and no topic"
    assert client.answer_bytes <= POLL_BYTES_MAX
    assert client.polls <= 3 * TOPICS // 200, "not one poll is for one listener"
    assert not world.gaps


async def test_each_begins_where_it_asked_to_and_late_ones_join_while_messages_come(world: World) -> None:
    early, late = [Listener() for _ in range(50)], [Listener() for _ in range(50)]
    for number in range(20):
        await world.append(number, *range(50))
    for one, listener in enumerate(early):
        await world.feed.subscribe_since(topic(one), 20 * one, listener)

    async def publish() -> None:
        for number in range(20, 220):
            await world.append(number, *range(50))
            await asyncio.sleep(0)

    publishing = asyncio.create_task(publish())
    for one, listener in enumerate(late):
        await world.feed.subscribe_since(topic(one), 0, listener)
    everything = Listener()
    await world.feed.subscribe_since(uris.pattern("vcu.vin"), 0, everything)
    await publishing
    await until(lambda: all(listener.numbers and listener.numbers[-1] == 219 for listener in early + late))
    await until(lambda: len(everything.numbers) == 220 * 50)
    for one, (first, second) in enumerate(zip(early, late, strict=True)):
        assert second.numbers == list(range(220))
        assert first.numbers == [number for number in range(220) if 50 * number + one + 1 > 20 * one]
    assert everything.numbers == sorted(everything.numbers)
    await world.caught_up(51)
    assert not world.gaps


async def test_a_slow_listener_stops_nobody_is_bounded_and_loses_nothing(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feeds, "FEED_BYTES_MAX", 20_000)
    gate = asyncio.Event()
    slow, quick = Listener(gate.wait), Listener()
    await world.feed.subscribe_since(topic(0), 0, slow)
    await world.feed.subscribe_since(topic(1), 0, quick)
    await world.caught_up(2)
    for number in range(200):
        await world.append(number, 0, 1, size=1_000)
        await until(lambda number=number: bool(quick.numbers) and quick.numbers[-1] == number)  # type: ignore[misc]
    assert quick.numbers == list(range(200))
    assert len(slow.numbers) < 200
    await world.caught_up(1)  # the slow one is out, and does not even poll
    gate.set()
    await until(lambda: len(slow.numbers) == 200)
    await world.caught_up(2)
    await world.append(200, 0, 1)
    await until(lambda: slow.numbers[-1] == quick.numbers[-1] == 200)
    assert slow.numbers == quick.numbers == list(range(201))


async def test_a_restart_of_the_streamer_is_no_gap_for_what_is_durable(world: World) -> None:
    listeners = [Listener() for _ in range(40)]
    of_ring = Listener()
    await asyncio.gather(*(world.feed.subscribe_since(topic(one), 0, listeners[one]) for one in range(40)))
    await world.feed.subscribe_since(topic(99), 0, of_ring)
    await world.append(0, *range(40))
    await world.append(0, 99, log=world.ring)
    await world.caught_up(41)
    await until(lambda: of_ring.numbers == [0])
    lost = world.ring.incarnation
    await world.restart()
    await world.append(1, *range(40))
    await world.append(1, 99, log=world.ring)
    await until(lambda: all(listener.numbers == [0, 1] for listener in [*listeners, of_ring]))
    await world.caught_up(41)
    assert [(gap_topic, gap.reason, gap.incarnation) for gap_topic, gap in world.gaps] == [
        (topic(99), Gap.REASON_INCARNATION, lost)
    ]


async def test_a_log_that_went_back_is_reported_to_each_listener_and_read_from_the_common_position(
    world: World, tmp_path: Path
) -> None:
    listeners = [Listener() for _ in range(5)]
    path, copy = tmp_path / "data" / "l.db", tmp_path / "copy"

    async def reopen() -> None:
        world.logs[0] = await Log.open(path, name="durable")
        await world.serve()

    async def close() -> None:
        await world.service.stop()
        await world.log.close()

    await close()
    await reopen()
    for number in range(10):
        await world.append(number, *range(5))
    await close()
    shutil.copytree(path.parent, copy)
    await reopen()
    for one, listener in enumerate(listeners):
        await world.feed.subscribe_since(topic(one), 0, listener)
    for number in range(10, 20):
        await world.append(number, *range(5))
    await until(lambda: all(listener.numbers == list(range(20)) for listener in listeners))
    await world.caught_up(5)
    await close()
    shutil.rmtree(path.parent)
    shutil.copytree(copy, path.parent)
    world.logs[0] = await Log.open(path, name="durable")
    for number in range(100, 115):  # beyond where all have read to
        await world.append(number, *range(5))
    await world.serve()
    await until(lambda: all(listener.numbers[-1] == 114 for listener in listeners))
    for listener in listeners:
        again = listener.numbers[20:]
        assert again == [*range(again[0], 10), *range(100, 115)]
    assert sorted((gap_topic.resource_id, gap.reason) for gap_topic, gap in world.gaps) == [
        (topic(one).resource_id, Gap.REASON_CORRUPTION) for one in range(5)
    ]
    await world.caught_up(5)


async def test_who_leaves_hears_no_more_and_the_others_go_on(world: World) -> None:
    left, stays, also = Listener(), Listener(), Listener()
    for listener in (left, stays):
        await world.feed.subscribe_since(topic(0), 0, listener)
    await world.feed.subscribe_since(topic(1), 0, also)
    await world.append(0, 0, 1)
    await until(lambda: left.numbers == stays.numbers == also.numbers == [0])
    await world.feed.unsubscribe(topic(0), left)
    await world.append(1, 0, 1)
    await until(lambda: stays.numbers == also.numbers == [0, 1])
    await world.feed.unsubscribe(topic(0), stays)
    await world.feed.unsubscribe(topic(1), also)
    await until(lambda: world.client.in_flight == 0)
    assert left.numbers == [0]
    await world.feed.subscribe_since(topic(1), 2, left)
    await until(lambda: left.numbers == [0, 1])


async def test_answers_with_holes_are_asked_for_again(world: World) -> None:
    listeners = [Listener() for _ in range(10)]
    await asyncio.gather(*(world.feed.subscribe_since(topic(one), 0, listeners[one]) for one in range(10)))
    await world.caught_up(10)
    spoiled = 0

    def spoil(request: PollRequest, response: PollResponse) -> None:
        nonlocal spoiled
        for batch in response.batches:
            if request.wait_ms and len(batch.seq) > 1:
                spoiled += 1
                place = spoiled % len(batch.seq)
                if spoiled % 3 == 0:
                    batch.message[place] = b"\xff"
                elif spoiled % 3 == 1:
                    del batch.message[place]
                else:
                    for column in (batch.seq, batch.prev_seq, batch.time_ms, batch.message):
                        del column[place]

    world.client.spoil = spoil
    for number in range(100):
        await world.append(number, *range(10))
        await asyncio.sleep(0.001)
    world.client.spoil = lambda request, response: None
    await world.append(100, *range(10))  # what is left out at the very end shows only when something follows
    await until(lambda: all(listener.numbers[-1:] == [100] for listener in listeners))
    assert spoiled > 3
    assert all(listener.numbers == list(range(101)) for listener in listeners)
    assert not world.gaps


async def test_one_that_is_refused_ends_alone(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    good, bad = Listener(), Listener()
    await world.feed.subscribe_since(topic(0), 0, good)
    await world.feed.subscribe_since(topic(1), 0, bad)
    await world.caught_up(2)

    def refuse(request: PollRequest, response: PollResponse) -> None:
        if topic(1) in request.topics or topic(1).SerializeToString() in world.client.followed.get(
            request.follower, ()
        ):
            raise UStatusError(UCode.PERMISSION_DENIED, "not this one")

    world.client.spoil = refuse
    await world.append(0, 0, 1)
    await until(lambda: good.numbers == [0] and "feeds=1" in repr(world.feed))
    await world.caught_up(1)
    assert bad.numbers == []


async def test_wildcards_beyond_the_limit_of_a_poll_get_another_one(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feeds, "WILDCARD_PATTERNS_MAX", 2)
    patterns = [uris.pattern("vcu.vin", resource=0x8000 + one) for one in range(5)]
    listeners = [Listener() for _ in patterns]
    for pattern, listener in zip(patterns, listeners, strict=True):
        await world.feed.subscribe_since(pattern, 0, listener)
    await until(lambda: sorted(world.client.waiting) == [1, 2, 2])
    await world.append(7, *range(5))
    await until(lambda: all(listener.numbers == [7] for listener in listeners))
