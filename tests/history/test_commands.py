"""Command: the history stores a follower's topics, applies each command once, leases and bounds them."""

from __future__ import annotations

import asyncio
import gc
import random
import tracemalloc
from collections.abc import AsyncIterator, Callable

import pytest

from history.log.log import Log
from history.reading.client import HistoryClient
from history.service import followers as followers_module
from tests.history.world import SERVICE, HistoryWorld, publishes
from tests.tiers import full, seeds
from uprotocol import uri as uris
from uprotocol.core.ustreamer.v1.ustreamer_pb2 import CommandRequest, PollRequest
from uprotocol.status import UStatusError
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.uri_pb2 import UUri

TOPICS = [uris.uri("vcu.vin", 0x10, 1, 0x8000 + place) for place in range(8)]
ANY = uris.uri("vcu.vin", 0x10, 1, 0xFFFF)
NAME = b"f" * 16


class World(HistoryWorld):
    async def begin(self) -> None:
        await self.open(await Log.open(None, name="test"))
        self.client = HistoryClient(self.rpc, SERVICE, timeout_ms=60_000)


@pytest.fixture
async def world() -> AsyncIterator[World]:
    made = World()
    await made.begin()
    yield made
    await made.close()


def command(number: int, *topics: UUri, removed: tuple[UUri, ...] = (), name: bytes = NAME) -> CommandRequest:
    """Follows `topics`, then unfollows those that are `gone`."""
    asked = CommandRequest(follower=name, number=number, lease_ms=60_000)
    for topic in topics:
        asked.changes.add().follow.topic.CopyFrom(topic)
    for topic in removed:
        asked.changes.add().unfollow.CopyFrom(topic)
    return asked


async def refused(client: HistoryClient, asked: CommandRequest | PollRequest) -> int:
    """Returns the code of the refusal."""
    with pytest.raises(UStatusError) as error:
        await (client.command(asked) if isinstance(asked, CommandRequest) else client.poll(asked))
    return error.value.code


@pytest.mark.parametrize("seed", seeds(20, quick=3))
async def test_a_poll_of_a_follower_answers_as_one_that_names_the_topics(world: World, seed: int) -> None:
    rng = random.Random(seed)
    wanted: dict[bytes, UUri] = {}
    for number in range(1, 25):
        asked = command(number)
        for topic in rng.choices([*TOPICS, ANY], weights=[4] * 8 + [1], k=rng.randrange(4)):
            change = asked.changes.add()
            if rng.random() < 0.6:
                change.follow.topic.CopyFrom(topic)
                wanted[topic.SerializeToString()] = topic
            else:
                change.unfollow.CopyFrom(topic)
                wanted.pop(topic.SerializeToString(), None)
        answer = await world.client.command(asked)
        assert await world.client.command(asked) == answer
        if number > 2:
            assert await refused(world.client, command(number - 2, TOPICS[0])) == UCode.NOT_FOUND
        assert await refused(world.client, command(number + 2, TOPICS[0])) == UCode.NOT_FOUND
        await world.append_all(world.logs[0], publishes(rng.sample(TOPICS, 3), b"x"))
        assert world.service.followers.topic_count == len(wanted)
        if wanted:  # a poll without topics means all of them
            named = await world.client.poll(PollRequest(topics=list(wanted.values())))
            followed = await world.client.poll(PollRequest(follower=NAME))
            assert list(followed.batches) == list(named.batches), f"{seed=} {number=}"
        else:
            assert not (await world.client.poll(PollRequest(follower=NAME))).batches


async def test_a_late_copy_of_the_first_command_takes_nothing_away(world: World) -> None:
    """Otherwise the answer covers a part of the followed topics, and the follower passes records that it misses."""
    first = command(1, TOPICS[0])
    await world.client.command(first)
    await world.client.command(command(2, TOPICS[1]))
    assert await refused(world.client, first) == UCode.NOT_FOUND
    await world.append_all(world.logs[0], publishes(TOPICS[:2], b"x"))
    (batch,) = (await world.client.poll(PollRequest(follower=NAME))).batches
    assert list(batch.seq) == [1, 2]


async def test_a_restarted_service_knows_nobody(world: World) -> None:
    await world.client.command(command(1, TOPICS[0]))
    await world.service.stop()
    await world.serve()
    assert await refused(world.client, PollRequest(follower=NAME)) == UCode.NOT_FOUND
    assert await refused(world.client, command(2)) == UCode.NOT_FOUND


async def test_a_follower_that_a_late_duplicate_created_again_is_not_polled(world: World) -> None:
    """After a restart the answer would cover the first command's topics only and skip the later ones."""
    first = command(1, TOPICS[0])
    await world.client.command(first)
    await world.client.command(command(2, TOPICS[1]))
    await world.service.stop()
    await world.serve()
    await world.client.command(first)
    assert await refused(world.client, PollRequest(follower=NAME, number=2)) == UCode.NOT_FOUND
    await world.client.poll(PollRequest(follower=NAME, number=1))


@full
@pytest.mark.timeout(300)
async def test_thousands_that_came_and_went_have_left_no_memory(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of them polled and were killed, half never came back."""
    monkeypatch.setattr(followers_module, "LEASE_MS_MIN", 0)
    monkeypatch.setattr(followers_module, "LEASES_CHECK_S", 0.0)
    followers = world.service.followers

    async def come_and_go(first: int, count: int) -> None:
        for place in range(first, first + count):
            name = place.to_bytes(16, "big")
            asked = command(1, *TOPICS, ANY, name=name)
            asked.lease_ms = 60_000 if place % 2 else 1
            await world.client.command(asked)
            if place % 2:
                await world.client.poll(PollRequest(follower=name, earliest=True))
                last = command(2, name=name)
                last.lease_ms = 1
                await world.client.command(last)
            if place % 100 == 99:
                async with asyncio.timeout(60):
                    while len(followers):  # noqa: ASYNC110
                        await asyncio.sleep(0.001)

    await world.append_all(world.logs[0], publishes(TOPICS, b"x"))
    await come_and_go(0, 1_000)  # what is made once, is there
    tracemalloc.start()
    try:
        gc.collect()
        before, _ = tracemalloc.get_traced_memory()
        await come_and_go(1_000, 3_000)
        gc.collect()
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert after - before < 128 << 10, f"{after - before} bytes more, of 3,000"


async def test_too_many_followers_of_one_authority_leave_room_for_others(world: World) -> None:
    most = followers_module.FOLLOWERS_MAX // 4
    for place in range(most):
        await world.client.command(command(1, name=place.to_bytes(16, "big")))
    assert await refused(world.client, command(1)) == UCode.RESOURCE_EXHAUSTED
    assert len(world.service.followers) == most
    other = HistoryClient(await world.caller("other"), SERVICE)
    await other.command(command(1, TOPICS[0]))


async def test_a_million_topics_are_stopped_by_the_bound(world: World) -> None:
    most, number = followers_module.TOPICS_MAX // 4, 0
    topics = (uris.uri("vcu.vin", entity, 1, 0x8000 + place) for entity in range(1, 1_000) for place in range(1_000))
    while True:
        number += 1
        asked = command(number, *(next(topics) for _ in range(1_000)))
        if world.service.followers.topic_count + 1_000 > most:
            assert await refused(world.client, asked) == UCode.RESOURCE_EXHAUSTED
            break
        await world.client.command(asked)
    assert most - 1_000 < world.service.followers.topic_count <= most
    await world.client.command(command(number, TOPICS[0]))  # the refused one has changed nothing


@pytest.mark.parametrize("rounds", [4, pytest.param(40, marks=full)])
async def test_leases_that_are_over_leave_nothing(world: World, monkeypatch: pytest.MonkeyPatch, rounds: int) -> None:
    monkeypatch.setattr(followers_module, "LEASE_MS_MIN", 0)
    monkeypatch.setattr(followers_module, "LEASES_CHECK_S", 0.0)
    followers = world.service.followers
    for round in range(rounds):
        for place in range(250):
            asked = command(1, *TOPICS[:2], name=(round * 250 + place).to_bytes(16, "big"))
            asked.lease_ms = 1
            await world.client.command(asked)
        async with asyncio.timeout(60):
            while len(followers):  # noqa: ASYNC110
                await asyncio.sleep(0.001)
    assert followers.counts["expired"] == 250 * rounds
    assert (followers.topic_count, len(followers.pushes), len(world.service._waiting)) == (0, 0, 0)


class Keeping:
    """Keeps the topics in `kept`."""

    def __init__(self, *kept: UUri) -> None:
        self.version, self.kept, self.looks = 0, kept, 0

    def keeps(self, topic: UUri, sees: Callable[[UUri], bool]) -> bool:
        self.looks += 1
        return topic in self.kept and sees(topic)


async def not_kept(world: World, asked: CommandRequest, *, asks: bool = True) -> list[UUri]:
    asked.asks_kept = asks
    return list((await world.client.command(asked)).not_kept)


async def test_what_is_followed_and_not_kept_is_answered_to_who_asks(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(followers_module, "KEPT_S", 0.0)
    world.service._keeping = keeping = Keeping(TOPICS[0])
    assert await not_kept(world, command(1, *TOPICS[:3]), asks=False) == []
    assert keeping.looks == 0, "who does not ask costs nothing"
    assert await not_kept(world, command(2)) == TOPICS[1:3]
    assert keeping.looks == 3
    assert await not_kept(world, command(3)) == TOPICS[1:3]
    assert keeping.looks == 3, "nothing has changed"
    assert await not_kept(world, command(4, TOPICS[4], removed=(TOPICS[1],))) == [TOPICS[2], TOPICS[4]]
    keeping.kept, keeping.version = (TOPICS[2], TOPICS[4]), 1
    assert await not_kept(world, command(5)) == [TOPICS[0]]
    world.service._keeping = None
    assert await not_kept(world, command(6)) == []


async def test_looking_for_what_is_not_kept_is_bounded(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.service._keeping = keeping = Keeping()
    many = [uris.uri("vcu.vin", 0x11, 1, 0x8000 + place) for place in range(300)]
    assert await not_kept(world, command(1, *many)) == many[: followers_module.NOT_KEPT_MAX]
    assert keeping.looks == followers_module.NOT_KEPT_MAX
    for number in range(2, 9):
        keeping.version = number
        assert len(await not_kept(world, command(number, TOPICS[0], removed=(many[0],)))) == 99
    assert keeping.looks == followers_module.NOT_KEPT_MAX, "at most one look in KEPT_S"
    monkeypatch.setattr(followers_module, "KEPT_S", 0.0)
    (follower,) = world.service.followers
    follower.next_look = 0.0
    assert len(await not_kept(world, command(9))) == 100
