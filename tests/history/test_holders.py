"""One reader at a time uses a consumer's name: two that share one would move its cursor past what the other lacks."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Final, get_args

import pytest

from history.log.log import Log
from history.reading.client import Frames, HistoryClient
from history.reading.following import FollowMode
from history.reading.subscriber import CursorFile, GaplessSubscriber
from history.service.consumers import owner_of
from tests.history.world import SERVICE, HistoryWorld, publishes, virtually
from transports.local import LocalTransport
from uprotocol import uri as uris
from uprotocol import uuid as uuids
from uprotocol.core.ustreamer.v1.ustreamer_pb2 import PollRequest
from uprotocol.status import UStatusError
from uprotocol.transport import LocalUriProvider
from uprotocol.v1.ucode_pb2 import UCode

HERE: Final = LocalUriProvider("cloud", 0x30, 1)
TOPIC: Final = uris.uri("vcu.vin", 0x10, 1, 0x8000)
CURSOR: Final = "consumer:app"


class World(HistoryWorld):
    async def begin(self) -> None:
        loop, began_ms = asyncio.get_running_loop(), uuids.now_ms()

        def now_ms() -> int:
            return began_ms + int(loop.time() * 1_000)  # leases end in virtual time, too

        await self.open(await Log.open(None, name="test", now_ms=now_ms))
        self.service.consumers._now_ms = now_ms
        self.log = self.logs[0]
        there = await self._stack.enter_async_context(LocalTransport.on(self.network, HERE))
        self.client = HistoryClient(self.rpc, SERVICE, timeout_ms=2_000, frames=Frames(there, HERE))

    async def append(self, count: int) -> None:
        await self.append_all(self.log, publishes([TOPIC] * count, b"x"))

    def holders(self) -> list[str]:
        return [one.holder for one in map(owner_of, self.log.cursors.all()) if one is not None]


async def take(subscriber: GaplessSubscriber, count: int) -> list[int]:
    async with asyncio.timeout(30):
        return [(await anext(subscriber)).seq for _ in range(count)]


async def refused(world: World) -> None:
    """Until a poll or a command was."""
    async with asyncio.timeout(30):
        while not world.service.counts["refused"]:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def kill(subscriber: GaplessSubscriber) -> None:
    """As the end of its process does: it says nothing more."""
    assert subscriber._puller is not None
    subscriber._puller.cancel()
    await asyncio.wait([subscriber._puller])


@pytest.mark.parametrize("mode", get_args(FollowMode))
def test_a_quick_reader_does_not_move_the_cursor_past_a_slow_one(mode: FollowMode) -> None:
    async def run() -> None:
        world = World()
        await world.begin()
        await world.append(50)
        async with GaplessSubscriber(world.client, mode=mode, consumer="app", lease_ms=600_000, max_records=4) as slow:
            await take(slow, 2)
            quick = GaplessSubscriber(world.client, mode=mode, consumer="app")
            async with quick:
                taking = asyncio.create_task(take(quick, 50))
                await refused(world)
                await world.append(1)
                assert (world.log.cursors.seq(CURSOR) or 0) <= 2
                assert not taking.done()
                assert not quick.connected
                assert await take(slow, 49) == list(range(3, 52))
                await slow.close()
                assert await taking == list(range(1, 51)), "it leaves, and the next one begins"
            assert len(world.service.followers.pushes) == 0
        await world.close()

    virtually(run())


def test_a_reader_whose_name_stays_in_use_ends_and_says_by_whom() -> None:
    async def run() -> None:
        world = World()
        await world.begin()
        await world.append(1)
        async with GaplessSubscriber(world.client, consumer="app", holder="left") as first:
            await take(first, 1)
            async with GaplessSubscriber(world.client, consumer="app") as second:
                began = asyncio.get_running_loop().time()
                with pytest.raises(
                    UStatusError, match=r"'app' is in use by 'left' .* needs a name of its own"
                ) as caught:
                    await second.next_batch()
                assert caught.value.code == UCode.ABORTED
                assert 90 <= asyncio.get_running_loop().time() - began < 110
        await world.close()

    virtually(run())


def test_after_a_kill_the_next_reader_waits_for_the_lease_and_one_of_that_name_does_not() -> None:
    async def run() -> None:
        world, time = World(), asyncio.get_running_loop().time
        await world.begin()
        await world.append(3)
        first = GaplessSubscriber(world.client, consumer="app", holder="a", mode="poll")
        await first.__aenter__()
        await take(first, 3)
        await kill(first)
        began = time()
        again = GaplessSubscriber(world.client, consumer="app", holder="a", mode="poll")
        await again.__aenter__()
        assert await take(again, 3) == [1, 2, 3]
        assert time() - began < 1
        await kill(again)
        async with GaplessSubscriber(world.client, consumer="app") as other:
            assert [one.seq for one in await other.next_batch()] == [1, 2, 3]
            assert 50 < time() - began < 110
        await world.close()

    virtually(run())


async def test_a_cursor_file_keeps_the_name_over_a_kill(tmp_path: Path) -> None:
    world, path = World(), tmp_path / "cursor"
    await world.begin()
    await world.append(5)
    first = GaplessSubscriber(world.client, consumer="app", cursor_path=path)
    await first.__aenter__()
    await take(first, 1)
    holders = world.holders()
    await kill(first)
    async with GaplessSubscriber(world.client, consumer="app", cursor_path=path) as again:
        assert await take(again, 5) == [1, 2, 3, 4, 5]
        await again.commit()
        assert world.holders() == holders
    async with GaplessSubscriber(world.client, consumer="app", cursor_path=path) as again:
        await world.append(1)
        assert await take(again, 1) == [6]
        assert world.holders() == holders == [CursorFile(path).holder or holders[0]]
    assert world.service.counts["refused"] == 0
    await world.close()


async def test_a_reader_that_leaves_lets_the_cursor_hold_retention_for_its_lease() -> None:
    world = World()
    await world.begin()
    await world.append(5)
    async with GaplessSubscriber(world.client, consumer="app", lease_ms=600_000) as subscriber:
        await take(subscriber, 5)
        await subscriber.commit()
    cursor = world.log.cursors.get(CURSOR)
    assert cursor is not None
    assert cursor.seq == 5
    assert (cursor.lease_until_ms or 0) > world.service.consumers._now_ms() + 500_000
    assert world.holders() == [""]
    await world.close()


async def test_a_reader_without_a_consumer_has_no_holder_and_a_holder_is_checked(tmp_path: Path) -> None:
    world, path = World(), tmp_path / "cursor"
    await world.begin()
    await world.append(1)
    async with GaplessSubscriber(world.client, cursor_path=path) as subscriber:
        await take(subscriber, 1)
        await subscriber.commit()
    assert world.holders() == []
    assert "holder" not in path.read_text()
    with pytest.raises(UStatusError, match="a holder of at most 64 printable characters"):
        GaplessSubscriber(world.client, consumer="app", holder="x" * 65)
    path.write_text(path.read_text().replace('"idle"', '"holder": "' + "x" * 65 + '", "idle"'))
    with pytest.raises(UStatusError, match="is not a cursor file"):
        CursorFile(path).load()
    await world.close()


async def test_a_holder_that_leaves_makes_room_at_once() -> None:
    world = World()
    await world.begin()
    await world.client.poll(PollRequest(consumer="app", holder="a", lease_ms=600_000))
    with pytest.raises(UStatusError, match="in use by 'a'"):
        await world.client.poll(PollRequest(consumer="app", holder="b", leaves=True))
    await world.client.poll(PollRequest(consumer="app", holder="a", lease_ms=600_000, leaves=True))
    await world.client.poll(PollRequest(consumer="app", holder="b"))
    await world.close()
