"""subscribe(topic, listener, since=...): earlier messages arrive too, once and in order, from the streamer's
history."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from history.reading import feed as feeds
from history.reading.feed import HistoryFeed
from history.reading.subscriber import HistoryClient
from uprotocol import uri as uris
from uprotocol.communication import InMemoryRpcClient
from uprotocol.status import UStatusError
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.umessage_pb2 import UMessage
from usubscription.service import USubscriptionService
from usubscription_client.client import USubscriptionClient

SPEED = uris.parse("//vehicle1/8001/1/8001")
HISTORY = uris.parse("//vehicle1/4/1/0")
MORE = '[history]\nrecord = ["//vehicle1/8001/FF/FFFF"]\n'
STREAMER = {"vehicle": "none", "cloud": "remote"}


class Car:
    """A streamer that records, a uSubscription of the cloud, and a client there that has a history."""

    def __init__(self, world: Any, publish: Callable[..., UMessage]) -> None:
        self.world, self._publish = world, publish
        self.sent: list[UMessage] = []

    async def open(self, stack: AsyncExitStack, folder: Path) -> None:
        world = self.world
        service = USubscriptionService(await world.node("cloud", "cloud", 0), "cloud", folder / "cloud.db")
        await service.start()
        stack.push_async_callback(service.stop)
        await world.start()
        self._vehicle = await world.node("vehicle", "vehicle1")
        cloud = await world.node("cloud", "cloud", 0x9001)
        rpc = await stack.enter_async_context(InMemoryRpcClient(cloud, cloud.local))
        self.feed = await stack.enter_async_context(HistoryFeed(HistoryClient(rpc, HISTORY, timeout_ms=2_000)))
        self.client = await stack.enter_async_context(USubscriptionClient(cloud, cloud.local, history=self.feed))

    async def publish(self, count: int) -> None:
        messages = [self._publish(SPEED, str(len(self.sent) + number)) for number in range(count)]
        self.sent += messages
        await self._vehicle.send_batch(messages)
        await self.world.until(lambda: self.world.assembly.logs.durable.newest_seq >= len(self.sent))


@pytest.fixture
async def car(make_world: Any, publish: Any, tmp_path: Path) -> AsyncIterator[Car]:
    made = Car(await make_world(STREAMER, more=MORE, start=False), publish)
    async with AsyncExitStack() as stack:
        await made.open(stack, tmp_path)
        yield made


class Listener:
    def __init__(self, failing: int | None = None) -> None:
        self.numbers: list[int] = []
        self._failing = failing
        self._more = asyncio.Event()

    async def on_receive(self, message: UMessage) -> None:
        await asyncio.sleep(0)
        self.numbers.append(int(message.payload))
        self._more.set()
        if self.numbers[-1] == self._failing:
            raise ZeroDivisionError

    async def until(self, number: int) -> list[int]:
        async with asyncio.timeout(30):
            while not self.numbers or self.numbers[-1] < number:
                self._more.clear()
                await self._more.wait()
        return self.numbers


async def test_what_was_there_and_what_comes_over_a_restart(car: Car) -> None:
    await car.publish(20)
    everything, later, of_id, of_time = (Listener() for _ in range(4))
    start = datetime.now(UTC)
    await car.client.subscribe(SPEED, everything, since=0)
    await car.client.subscribe(SPEED, later, since=15)
    await car.client.subscribe(SPEED, of_id, since=car.sent[9].attributes.id)
    await car.client.subscribe(SPEED, of_time, since=start - timedelta(hours=1))
    for one, first in ((everything, 0), (later, 15), (of_id, 10), (of_time, 0)):
        assert await one.until(19) == list(range(first, 20))
    await car.publish(20)
    assert await everything.until(39) == list(range(40))
    await car.world.restart()
    await car.publish(10)
    assert await everything.until(49) == list(range(50))
    assert await later.until(49) == list(range(15, 50))
    await car.client.unsubscribe(SPEED, later)
    await car.publish(1)
    assert await everything.until(50) == list(range(51))
    assert later.numbers == list(range(15, 50)), "one ended, the others go on"
    assert "feeds=3" in repr(car.feed)
    await car.client.unsubscribe(SPEED)
    assert "feeds=0" in repr(car.feed)


async def test_the_same_listener_twice_hears_once(car: Car) -> None:
    listener = Listener()
    await asyncio.gather(*(car.feed.subscribe_since(SPEED, 0, listener) for _ in range(3)))
    await car.publish(5)
    assert await listener.until(4) == list(range(5))
    assert "feeds=1" in repr(car.feed)


async def test_a_listener_that_fails_hears_the_rest(car: Car) -> None:
    await car.publish(5)
    listener = Listener(failing=2)
    await car.client.subscribe(SPEED, listener, since=0)
    assert await listener.until(4) == list(range(5))


@pytest.mark.parametrize("since", [-1, True, 1.5, "yesterday", datetime(2026, 1, 1)])
async def test_a_since_that_is_none(car: Car, since: Any) -> None:
    with pytest.raises(UStatusError, match="sequence number") as caught:
        await car.client.subscribe(SPEED, Listener(), since=since)
    assert caught.value.code == UCode.INVALID_ARGUMENT
    assert "feeds=0" in repr(car.feed)


async def test_a_history_that_does_not_answer_is_reported_at_once(car: Car) -> None:
    await car.world.stop()
    listener = Listener()
    with pytest.raises(UStatusError) as caught:
        await car.client.subscribe(SPEED, listener, since=0)
    assert caught.value.code in (UCode.DEADLINE_EXCEEDED, UCode.UNAVAILABLE)
    assert "subscribed=0" in repr(car.client)
    await car.world.start()
    await car.client.subscribe(SPEED, listener, since=0)
    await car.publish(3)
    assert await listener.until(2) == [0, 1, 2]


async def test_a_feed_that_the_history_refused_can_be_asked_for_again(
    car: Car, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(self: HistoryClient, request: Any = None) -> Any:
        raise UStatusError(UCode.PERMISSION_DENIED, "not for you")

    listener = Listener()
    with monkeypatch.context() as patch:
        patch.setattr(HistoryClient, "poll", refuse)
        await car.feed.subscribe_since(SPEED, 0, listener)
        await car.world.until(lambda: "feeds=0" in repr(car.feed))
    await car.feed.subscribe_since(SPEED, 0, listener)
    await car.publish(3)
    assert await listener.until(2) == [0, 1, 2]


async def test_feeds_are_bounded(car: Car, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feeds, "FEEDS_MAX", 1)
    await car.feed.subscribe_since(SPEED, 0, Listener())
    with pytest.raises(UStatusError, match="limit"):
        await car.feed.subscribe_since(SPEED, 0, Listener())
