"""Following: each record once and in order, whatever happens to commands, answers and frames."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, Final, Self, get_args

import pytest

from campaigns.simulation.loop import EPOCH_S
from history.file.copying import make_another
from history.log.log import Log
from history.reading.acceptor import Acceptor, ReaderState
from history.reading.client import Frames, HistoryClient
from history.reading.following import Following, FollowingOptions, FollowMode
from history.reading.subscriber import GaplessSubscriber
from history.service.matches import Sight, Sights
from tests.history.world import SERVICE, HistoryWorld, publishes, virtually
from tests.tiers import full, seeds
from transports.local import LocalTransport
from uprotocol import uri as uris
from uprotocol import uuid as uuids
from uprotocol.communication import InMemoryRpcServer
from uprotocol.core.ustreamer.v1.ustreamer_pb2 import (
    CommandRequest,
    CommandResponse,
    Frame,
    Gap,
    HandOver,
    PollRequest,
    PollResponse,
    Position,
)
from uprotocol.message import UMessageBuilder, UPayload
from uprotocol.status import UStatusError
from uprotocol.transport import LocalUriProvider
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.umessage_pb2 import UMessage
from uprotocol.v1.uri_pb2 import UUri

HERE = LocalUriProvider("cloud", 0x30, 1)
TOPICS = [uris.uri("vcu.vin", 0x10, 1, 0x8000 + place) for place in range(5)]
FAULTS = 0.12

Change = Callable[[UMessage], list[tuple[float, UMessage]]]


class Spoiled(Frames):
    """`change` maps a frame to other frames, delivered after some seconds."""

    change: Change | None = None

    def on_receive(self, message: UMessage) -> None:
        if self.change is None:
            super().on_receive(message)
            return
        for delay, one in self.change(message):
            asyncio.get_running_loop().call_later(delay, super().on_receive, one)


class Client(HistoryClient):
    """Loses calls on their way there, or their answers, and brings commands again, late. `faults` of 1 of each."""

    def __init__(self, *args: Any, seed: int = 0, **more: Any) -> None:
        super().__init__(*args, **more)
        self.rng, self.faults, self.calls = random.Random(seed), 0.0, 0
        self.delay_s = 0.0  # of calls, and of answers, at most
        self.lost: set[str] = set()  # methods of which no call arrives
        self.old: list[CommandRequest] = []

    async def poll(self, request: PollRequest | None = None, *, patience_ms: int | None = None) -> PollResponse:
        self.calls += 1
        self._lose("poll")
        answer = await super().poll(request, patience_ms=patience_ms)
        await asyncio.sleep(self.rng.random() * self.delay_s)
        self._lose()
        return answer

    async def command(self, request: CommandRequest, *, patience_ms: int | None = None) -> CommandResponse:
        self.calls += 1
        self._lose("command")
        if self.old and self.rng.random() < self.faults:
            with contextlib.suppress(UStatusError):  # it is too old
                await super().command(self.rng.choice(self.old))
        self.old.append(request)
        await asyncio.sleep(self.rng.random() * self.delay_s)
        answer = await super().command(request, patience_ms=patience_ms)
        self._lose()
        return answer

    def _lose(self, method: str = "") -> None:
        if method in self.lost or self.rng.random() < self.faults:
            raise UStatusError(UCode.UNAVAILABLE, "lost on the way")


class Door(Sights):
    is_closed = False

    def of(self, caller: UUri) -> Sight:
        if self.is_closed:
            raise UStatusError(UCode.PERMISSION_DENIED, "not any more")
        return super().of(caller)


class World(HistoryWorld):
    async def begin(self, seed: int = 0) -> None:
        self.access = Door()
        await self.open(await self.log(), access=self.access)
        self.there = LocalTransport.on(self.network, HERE)
        await self.there.open()
        self.frames = Spoiled(self.there, HERE)
        self.client = Client(self.rpc, SERVICE, timeout_ms=2_000, frames=self.frames, seed=seed)

    @staticmethod
    async def log() -> Log:
        return await Log.open(None, name="test", now_ms=uuids.now_ms)

    async def lose_log(self) -> None:
        """The service is restarted with another log, which gets the messages on their way."""
        lost, self.logs[0] = self.logs[0], await self.log()
        await self.service.stop()
        await self.serve()
        await lost.close()

    async def append(self, first: int, count: int) -> None:
        messages = [
            UMessageBuilder.publish(TOPICS[number % 5]).build_from_upayload(UPayload(str(number).encode(), 4))
            for number in range(first, first + count)
        ]
        await self.append_all(self.logs[0], messages)

    async def close(self) -> None:
        await self.client.close()
        await super().close()
        await self.there.close()


def changed(message: UMessage, **fields: Any) -> UMessage:
    """With a frame that has other fields."""
    frame = Frame.FromString(message.payload)
    for name, value in fields.items():
        setattr(frame, name, value)
    made = UMessage()
    made.CopyFrom(message)
    made.payload = frame.SerializeToString()
    return made


def cut(message: UMessage, size: int) -> UMessage:
    made = UMessage()
    made.CopyFrom(message)
    made.payload = message.payload[:size]
    return made


def spoil(rng: random.Random, message: UMessage) -> list[tuple[float, UMessage]]:
    match rng.randrange(12):
        case 0:
            return []
        case 1:
            return [(0, message), (rng.random(), message)]
        case 2:
            return [(rng.random() * 3, message)]
        case 3:
            return [(0, cut(message, rng.randrange(len(message.payload))))]
        case 4:
            return [(0, changed(message, subscription=rng.getrandbits(64))), (0, message)]
    return [(0, message)]


async def numbers(subscriber: GaplessSubscriber, count: int) -> list[int]:
    async with asyncio.timeout(3_600):  # of virtual time
        return [int((await anext(subscriber)).message.payload) for _ in range(count)]


async def whole(world: World, mode: FollowMode, seed: int = 0, count: int = 300) -> GaplessSubscriber:
    """Numbers come while they are read: each once, and of each topic in order."""
    async with GaplessSubscriber(world.client, TOPICS, mode=mode, max_records=7, rng=random.Random(seed)) as subscriber:

        async def feed() -> None:
            for first in range(0, count, 10):
                await world.append(first, 10)
                await asyncio.sleep(0.3)

        feeding = asyncio.create_task(feed())
        seen = await numbers(subscriber, count)
        await feeding
        assert sorted(seen) == list(range(count)), f"{seed=}"
        for topic in range(5):
            assert [one for one in seen if one % 5 == topic] == list(range(topic, count, 5)), f"{seed=}"
        assert subscriber.gaps == 0
    return subscriber


@pytest.mark.parametrize("seed", seeds(200, quick=5))
def test_under_faults_each_record_comes_once_and_in_order(seed: int) -> None:
    async def run() -> None:
        world = World()
        await world.begin(seed)
        rng = random.Random(seed)
        world.client.faults = FAULTS
        world.frames.change = lambda message: spoil(rng, message)
        modes: tuple[FollowMode, ...] = get_args(FollowMode)
        subscriber = GaplessSubscriber(world.client, TOPICS, mode=rng.choice(modes), max_records=7, rng=rng)
        async with subscriber:

            async def disturb() -> None:
                for first in range(0, 300, 10):
                    await world.append(first, 10)
                    await asyncio.sleep(rng.random())
                    if rng.random() < 0.2:
                        subscriber.mode = rng.choice(modes)
                    if rng.random() < 0.05:
                        await world.service.stop()
                        await world.serve()

            disturbing = asyncio.create_task(disturb())
            seen = await numbers(subscriber, 300)
            await disturbing
            assert sorted(seen) == list(range(300)), f"{seed=}"
            for topic in range(5):
                assert [one for one in seen if one % 5 == topic] == list(range(topic, 300, 5)), f"{seed=}"
            assert subscriber.gaps == 0
        await world.close()

    virtually(run(), seed)


SPOILS: dict[str, Change] = {
    "sound": lambda message: [(0, message)],
    "lost": lambda message: [],
    "doubled": lambda message: [(0, message), (0.5, message)],
    "late": lambda message: [(Frame.FromString(message.payload).number % 3, message)],
    "cut": lambda message: [(0, cut(message, len(message.payload) // 2))],
    "empty": lambda message: [(0, cut(message, 0))],
    "unknown": lambda message: [(0, changed(message, subscription=77))],
    "huge number": lambda message: [(0, changed(message, number=(1 << 64) - 1))],
}


@pytest.mark.parametrize("how", SPOILS)
@pytest.mark.parametrize("mode", ["auto", pytest.param("push", marks=full)])
def test_frames_of_every_kind_do_no_harm(how: str, mode: FollowMode) -> None:
    async def run() -> None:
        world = World()
        await world.begin()
        world.frames.change = SPOILS[how]
        subscriber = await whole(world, mode)
        assert subscriber.counts["pushes"], "it was asked for"
        assert (subscriber.counts["frames"] > 0) == (how not in ("lost", "cut", "empty", "unknown"))
        assert world.client.calls < 1_000
        await world.close()

    virtually(run())


def subscription(message: UMessage) -> int:
    return Frame.FromString(message.payload).subscription


Stop = Callable[[World], Coroutine[Any, Any, None]]


async def no_window(world: World) -> None:
    """The acknowledgements of what we have taken are lost."""
    world.client.lost = {"command"}
    await asyncio.sleep(40)
    assert len(world.service.followers.pushes) == 1, "it waits for its window"


async def lease_over(world: World) -> None:
    world.client.lost = {"command", "poll"}
    await asyncio.sleep(40)
    assert not len(world.service.followers)


async def closed(world: World) -> None:
    await world.service.followers.close()
    world.service.followers.open()


async def shut_down(world: World) -> None:
    await world.service.stop()
    await asyncio.sleep(5)
    await world.serve()


async def refused(world: World) -> None:
    """While the follower does not poll."""
    world.access.is_closed = True
    async with asyncio.timeout(60):
        while len(world.service.followers.pushes):  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    world.access.is_closed = False


STOPS: dict[str, tuple[Stop, dict[str, Any]]] = {
    "no window": (no_window, {"window_bytes": 2_000}),
    "lease over": (lease_over, {"lease_ms": 4_000}),
    "closed": (closed, {}),
    "shut down": (shut_down, {}),
    "refused": (refused, {}),
}


@pytest.mark.parametrize("seed", seeds(5, quick=1))
@pytest.mark.parametrize("how", STOPS)
def test_after_the_service_ends_a_push_the_subscriber_continues_by_poll(how: str, seed: int) -> None:
    """At any moment: nothing is lost or duplicated, and late frames of the old push are ignored."""

    async def run() -> None:
        world, rng = World(), random.Random(seed)
        await world.begin(seed)
        stop, more = STOPS[how]
        old: list[UMessage] = []
        world.frames.change = lambda message: old.append(message) or [(0, message)]  # type: ignore[func-returns-value]
        acceptor, seen = Acceptor(), list[int]()
        async with Following(world.client, FollowingOptions(rng=random.Random(seed), **more)) as following:

            async def read() -> None:
                while True:
                    answer = await following.next(acceptor.state)
                    if answer is not None:
                        accepted = acceptor.accept(answer)
                        assert not accepted.gaps, f"{seed=}"
                        seen.extend(int(one.message.payload) for one in accepted.records)

            async def feed(first: int, count: int) -> None:
                for number in range(first, first + count):
                    await world.append(number, 1)
                    await asyncio.sleep(rng.random() / 5)

            async def has(count: int) -> None:
                async with asyncio.timeout(3_600):
                    while len(seen) < count and not reading.done():  # noqa: ASYNC110
                        await asyncio.sleep(0.01)
                if reading.done():
                    reading.result()

            reading = asyncio.create_task(read())
            for one in TOPICS:
                following.follow(one)
            await feed(0, 50)
            await has(50)
            ended, polls = subscription(old[-1]), following.counts["polls"]
            feeding = asyncio.create_task(feed(50, 250))
            await asyncio.sleep(rng.random() * 3)
            await stop(world)
            await feeding
            if "poll" not in world.client.lost:
                await has(300)
            world.client.lost = set()
            await has(300)
            assert following.counts["polls"] > polls, f"{seed=}"
            count = 300
            async with asyncio.timeout(3_600):
                while subscription(old[-1]) == ended:
                    await feed(count, 1)
                    count += 1
                    await has(count)
                    await asyncio.sleep(1)
            stale = [one for one in old if subscription(one) == ended]
            frames, dropped = following.counts["frames"], world.frames.dropped["stale"]
            for message in stale:
                for late in (message, changed(message, number=1_000_000)):
                    Frames.on_receive(world.frames, late)
            assert world.frames.dropped["stale"] == dropped + 2 * len(stale)
            assert following.counts["frames"] == frames
            await feed(count, 5)
            await has(count + 5)
            reading.cancel()
        assert sorted(seen) == list(range(count + 5)), f"{seed=}"
        for topic in range(5):
            assert [one for one in seen if one % 5 == topic] == list(range(topic, count + 5, 5)), f"{seed=}"
        await world.close()

    virtually(run(), seed)


def test_no_name_is_used_twice_though_chance_repeats_itself() -> None:
    """As in processes forked from one. Frames of a push from before a restart were taken for frames of the current
    push, which has more topics."""

    async def run() -> None:
        world = World()
        await world.begin()
        for number in range(1, 3):
            async with Following(world.client, FollowingOptions(mode="push", rng=random.Random(1))) as following:
                following.follow(TOPICS[0])
                await following.next(ReaderState({world.logs[0].incarnation: 0}))
            assert len(world.service.followers) == number
        subscriptions = {one.push._asked.subscription for one in world.service.followers if one.push is not None}
        assert len(subscriptions) == 2
        await world.close()

    virtually(run())


def test_a_hand_over_that_nobody_can_hear_is_refused() -> None:
    async def run() -> None:
        world = World()
        await world.begin()
        following = Following(world.client)
        async with following:
            world.client.faults = 1.0
            waiting = asyncio.create_task(following.commands.hand_over(HandOver(take=True)))
            await asyncio.sleep(1)
        with pytest.raises(UStatusError):
            await waiting
        await world.close()

    virtually(run())


LIES: dict[str, Callable[[int], PollResponse]] = {
    "nothing": lambda _: PollResponse(),
    "more of nothing": lambda _: PollResponse(more=True),
    "the same place": lambda _: PollResponse(more=True, next=[Position(incarnation=b"L" * 16, seq=5)]),
    "back": lambda call: PollResponse(more=True, next=[Position(incarnation=b"L" * 16, seq=max(1, 1_000 - call))]),
    "huge": lambda _: PollResponse(more=True, next=[Position(incarnation=b"L" * 16, seq=(1 << 64) - 1)]),
    "another log each time": lambda call: PollResponse(next=[Position(incarnation=call.to_bytes(16, "big"), seq=5)]),
}


@pytest.mark.parametrize("lie", LIES)
@pytest.mark.parametrize(
    "mode", [pytest.param(mode, marks=[full] if mode != "auto" else []) for mode in get_args(FollowMode)]
)
def test_a_service_that_lies_is_not_asked_without_end(
    mode: FollowMode, lie: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run() -> None:
        world = World()
        await world.begin()
        calls = 0

        async def lying(*_: object, **__: object) -> PollResponse:
            nonlocal calls
            calls += 1
            await asyncio.sleep(0.001)  # there and back
            return LIES[lie](calls)

        monkeypatch.setattr(world.client, "poll", lying)
        acceptor = Acceptor()
        async with Following(world.client, FollowingOptions(mode=mode, rng=random.Random(1))) as following:
            following.follow(TOPICS[0])
            try:
                async with asyncio.timeout(60):
                    while True:
                        answer = await following.next(acceptor.state)
                        if answer is not None:
                            acceptor.accept(answer)
            except TimeoutError:
                pass
        assert calls <= 60 * 20, f"{calls} polls in a minute"
        assert len(acceptor.state.positions) <= 1
        await world.close()

    virtually(run())


class Resource:
    """Served at the publisher of TOPICS[0]. It carries the id of its last message, and optionally its position."""

    METHOD: Final = uris.uri("vcu.vin", 0x10, 1, 1)

    def __init__(self, world: World, *, has_place: bool) -> None:
        self._world, self._has_position = world, has_place
        self._local = LocalUriProvider("vcu.vin", 0x10, 1)
        self.transport = LocalTransport.on(world.network, self._local)
        self._server = InMemoryRpcServer(self.transport, self._local)
        self._last = PollRequest()
        self.changed: list[tuple[bytes, bytes]] = []  # log and id of each change

    async def __aenter__(self) -> Self:
        await self.transport.open()
        await self._server.register_request_handler(self.METHOD.resource_id, lambda _: self._last)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._server.close()
        await self.transport.close()

    async def change(self) -> None:
        (message,) = publishes([TOPICS[0]], str(len(self.changed)).encode())
        log = self._world.logs[0]
        seq = await log.append([log.stream_id(TOPICS[0])], [message])
        self._last = PollRequest(after_message_id=id_of(message))
        if self._has_position:
            self._last.positions.add(incarnation=log.incarnation, seq=seq)
        self.changed.append((log.incarnation, id_of(message)))

    async def read(self) -> PollRequest:
        """Its content, which names the start position."""
        return (await self._world.rpc.invoke_method(self.METHOD)).unpack(PollRequest)


@pytest.mark.parametrize("seed", seeds(30, quick=1))
@pytest.mark.parametrize("mode", get_args(FollowMode))
@pytest.mark.parametrize("has_place", [False, True], ids=["id", "place"])
@pytest.mark.parametrize("is_lost", [False, True], ids=["kept", "lost"])
def test_what_changes_between_a_read_and_the_subscription_is_not_missed(
    seed: int, mode: FollowMode, has_place: bool, is_lost: bool
) -> None:
    """A resource carries its last message's id: a client reads it, it changes, and then the client subscribes.
    If the log is lost meanwhile, all of the new log is delivered, and a reader with a position gets the gap."""

    async def run() -> None:
        world, rng, gaps = World(), random.Random(seed), list[Gap]()
        await world.begin(seed)
        async with Resource(world, has_place=has_place) as resource:

            async def change() -> None:
                for _ in range(40):
                    await resource.change()
                    await asyncio.sleep(rng.choice([0, 0, rng.random() / 5]))

            await resource.change()
            changing = asyncio.create_task(change())
            await asyncio.sleep(rng.random())
            read = await resource.read()
            lost = world.logs[0].incarnation
            await asyncio.sleep(rng.choice([0, rng.random() / 5]))  # we think
            if is_lost:
                await world.lose_log()
                await asyncio.sleep(rng.choice([0, rng.random() / 5]))
            start = PollRequest(after_message_id=read.after_message_id)
            positions = {one.incarnation: one.seq for one in read.positions}
            async with GaplessSubscriber(
                world.client, TOPICS[:1], mode=mode, start=start, positions=positions, on_gap=gaps.append, rng=rng
            ) as subscriber:
                await changing
                await resource.change()
                ids = [id for _, id in resource.changed]
                after = [number for number, (log, _) in enumerate(resource.changed) if log != lost]
                expected = after if is_lost else list(range(ids.index(read.after_message_id) + 1, len(ids)))
                assert await numbers(subscriber, len(expected)) == expected, f"{seed=}"
                assert subscriber.gaps == len(gaps) == (is_lost and has_place), f"{seed=}"
                for gap in gaps:
                    assert gap.reason == Gap.REASON_INCARNATION
                    assert {gap.incarnation: gap.after_seq} == positions
                await resource.change()
                assert await numbers(subscriber, 1) == [len(ids)], f"{seed=}: and nothing twice"
        await world.close()

    with on_the_loops_clock():
        virtually(run(), seed)


@contextlib.contextmanager
def on_the_loops_clock() -> Iterator[None]:
    """Ids, and the times of logs that ask `uuids`, hold virtual time."""

    def time_ns() -> int:
        return int((EPOCH_S + asyncio.get_running_loop().time()) * 1e9)

    generate = uuids.UUIDGenerator(lambda: time_ns() // 1_000_000)
    with uuids.simulated(time_ns, generate):
        yield


def id_of(message: UMessage) -> bytes:
    id = message.attributes.id
    return id.msb.to_bytes(8, "big") + id.lsb.to_bytes(8, "big")


@pytest.mark.parametrize("seed", seeds(100, quick=4))
def test_a_topic_that_is_wanted_later_is_whole_from_then_on(seed: int) -> None:
    """Requests and pushes sent before are still on their way."""

    async def run() -> None:
        world = World()
        await world.begin(seed)
        rng = random.Random(seed)
        if seed % 2:
            world.client.faults, world.frames.change = FAULTS, lambda message: spoil(rng, message)
        world.client.delay_s = rng.choice([0, 0.05, 1])
        mode, acceptor, seen = rng.choice(get_args(FollowMode)), Acceptor(), list[int]()
        whole_from: dict[int, int] = {}  # by topic: what was appended before it was wanted, ...
        nothing_before: dict[int, int] = {}  # ... and what we had been through
        async with Following(
            world.client, FollowingOptions(mode=mode, start=PollRequest(latest=True), rng=rng)
        ) as following:

            async def read() -> None:
                while True:
                    answer = await following.next(acceptor.state)
                    if answer is not None:
                        accepted = acceptor.accept(answer)
                        assert not accepted.gaps, f"{seed=}"
                        seen.extend(int(record.message.payload) for record in accepted.records)

            reading = asyncio.create_task(read())
            following.follow(TOPICS[0])
            async with asyncio.timeout(60):
                while not acceptor.state.positions:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            whole_from[0] = 0
            for first in range(0, 600, 5):
                await world.append(first, 5)
                if rng.random() < 0.1 and len(whole_from) < 5:
                    nothing_before[len(whole_from)] = max(acceptor.state.positions.values())
                    following.follow(TOPICS[len(whole_from)])
                    acceptor.begin_here()
                    whole_from[len(whole_from)] = first + 5
                elif rng.random() < 0.1:
                    following.mode = rng.choice(get_args(FollowMode))
                await asyncio.sleep(rng.random() * rng.choice([0, 0.01, 0.3]))
            wanted = sorted(number for number in range(600) if number >= whole_from.get(number % 5, 600))
            async with asyncio.timeout(3_600):
                while not set(wanted) <= set(seen) and not reading.done():  # noqa: ASYNC110
                    await asyncio.sleep(1)
            if reading.done():
                reading.result()
            reading.cancel()
        assert len(seen) == len(set(seen)), f"{seed=}"
        for topic in range(5):
            of_topic = [one for one in seen if one % 5 == topic]
            assert of_topic == sorted(of_topic), f"{seed=}"
            assert all(one >= nothing_before.get(topic, 0) for one in of_topic), f"{seed=}"
        await world.close()

    virtually(run(), seed)


def test_a_ring_is_heard_while_it_is_pushed() -> None:
    async def run() -> None:
        world = World()
        await world.begin()
        acceptor, answers = Acceptor(), list[int]()
        async with Following(world.client, FollowingOptions(mode="push", rng=random.Random(1))) as following:

            async def read() -> None:
                while True:
                    answer = await following.next(acceptor.state)
                    if answer is not None:
                        answers.extend(int(one.message.payload) for one in acceptor.accept(answer).records)

            reading = asyncio.create_task(read())
            following.follow(TOPICS[0])
            await asyncio.sleep(60)  # long enough for the longest quiet
            assert following.is_pushed
            world.frames.change = SPOILS["lost"]
            await world.append(0, 1)
            following.check_now()
            await asyncio.sleep(1)
            assert answers == [0]
            reading.cancel()
        await world.close()

    virtually(run())


async def test_a_renamed_position_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "history.db"
    async with await Log.open(path, name="renamed") as log:
        log.followed.keep("old:a", b"1")
        log.followed.keep("old:b", b"2")
        await log.saved()
    make_another(path, bytes(16), 0, "restored")
    async with await Log.open(path, name="renamed") as log:
        for key in log.followed.positions():
            log.followed.rename(key, key.replace("old", "new"))
    async with await Log.open(path, name="renamed") as log:
        assert log.followed.positions() == {"new:a": b"1", "new:b": b"2"}


def test_what_is_not_kept_is_asked_for_again_soon_after_a_change_and_then_with_the_lease() -> None:
    class Keeping:
        version, kept = 0, True

        def keeps(self, topic: UUri, sees: Callable[[UUri], bool]) -> bool:
            return self.kept

    async def run() -> None:
        world, heard = World(), list[tuple[int, int]]()
        await world.begin()
        world.service._keeping = keeping = Keeping()  # type: ignore[assignment]
        loop = asyncio.get_running_loop()

        async with Following(
            world.client, on_not_kept=lambda topics: heard.append((round(loop.time()), len(topics)))
        ) as following:
            following.follow(TOPICS[0])
            await asyncio.sleep(1)
            keeping.kept, keeping.version = False, 1  # its gateway did not know yet what is wanted
            await asyncio.sleep(65)
            assert heard == [(0, 0), (6, 1), (12, 1), (42, 1)]
        await world.close()

    virtually(run())
