"""Pushes: replay, then live, never more in flight than the window; and sample periods against a model."""

from __future__ import annotations

import asyncio
import random
from collections import deque
from typing import Literal, get_args

import pytest

from history.log.log import Log
from history.reading.acceptor import Acceptor
from history.reading.client import Frames, HistoryClient
from history.service import poll as poll_module
from history.service.followers import WINDOW_BYTES_MIN
from tests.history.world import SERVICE, HistoryWorld, publishes, virtually
from tests.tiers import seeds
from transports.local import LocalTransport
from uprotocol import uri as uris
from uprotocol import uuid as uuids
from uprotocol.core.ustreamer.v1.ustreamer_pb2 import CommandRequest, Frame, PollRequest, Position
from uprotocol.status import UStatusError
from uprotocol.transport import LocalUriProvider
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.umessage_pb2 import UMessage

THERE = LocalUriProvider("cloud", 0x30, 1)
TOPIC = uris.uri("vcu.vin", 0x10, 1, 0x8000)
NAME = b"f" * 16
ALL = 1 << 62


class World(HistoryWorld):
    async def begin(self, **service: int) -> None:
        self.now_ms = 1_800_000_000_000  # of the log
        self.messages: list[UMessage] = []
        self.times_ms: list[int] = []
        await self.open(await Log.open(None, name="test", now_ms=lambda: self.now_ms), **service)
        self.there = LocalTransport.on(self.network, THERE)
        await self.there.open()
        self.frames = Frames(self.there, THERE)
        self.client = HistoryClient(self.rpc, SERVICE, frames=self.frames)
        self.came: deque[tuple[Frame, int]] = deque()
        topic = self.client.frames_topic
        await self.frames.listen(topic)
        self.frames.expect(topic, 7, lambda frame, size: self.came.append((frame, size)))
        self.number = 0

    async def say(self, **fields: object) -> None:
        self.number += 1
        await self.client.command(CommandRequest(follower=NAME, number=self.number, lease_ms=60_000, **fields))  # type: ignore[arg-type]

    async def push(self, window: int = 0, poll: PollRequest | None = None, period_ms: int = 0) -> None:
        asked = CommandRequest()
        asked.changes.add().follow.topic.CopyFrom(TOPIC)
        asked.changes[0].follow.sample_period_ms = period_ms
        asked.push.sink.CopyFrom(THERE.get_source())
        asked.push.subscription, asked.push.window_bytes = 7, window
        asked.push.poll.CopyFrom(poll if poll is not None else PollRequest(earliest=True))
        await self.say(changes=asked.changes, push=asked.push)

    async def append(self, *sizes: int) -> None:
        messages = [publishes([TOPIC], b"x" * size)[0] for size in sizes]
        self.messages += messages
        self.times_ms += [self.now_ms] * len(messages)
        await self.append_all(self.logs[0], messages)

    async def close(self) -> None:
        await self.client.close()
        await super().close()
        await self.there.close()


@pytest.mark.parametrize("seed", seeds(20, quick=2))
def test_never_more_is_under_way_than_the_window(seed: int) -> None:
    async def run() -> None:
        world, rng = World(), random.Random(seed)
        await world.begin()
        await world.append(*(rng.randrange(2_000) for _ in range(300)))
        await world.push(window=10_000)
        acceptor, taken, records = Acceptor(), 0, 0
        while records < 300:
            await asyncio.sleep(0.1)
            held = sum(bytes for frame, bytes in world.came)
            assert held <= 10_000 + 2_500, f"{seed=}: at most one record too much"
            assert world.came, f"{seed=}: what was taken opens the window"
            for _ in range(rng.randint(1, len(world.came))):
                frame, _ = world.came.popleft()
                assert frame.number == taken + 1
                taken = frame.number
                records += len(acceptor.accept(frame.answer).records)
            await world.say(frames_taken=taken)
        assert not acceptor.dropped
        await world.close()

    virtually(run(), seed)


def test_a_window_that_others_make_smaller_opens_again() -> None:
    """Although no acknowledgement was requested while the window was larger."""

    async def run() -> None:
        world = World()
        await world.begin(window_bytes_max=1 << 20)
        await world.push()
        for records in (12, 200):
            await world.append(*[8_000] * records)
            await asyncio.sleep(0.1)
        assert [frame.tell for frame, _ in world.came] == [False, True, False, False], "and the window is full"
        for number in range(40):
            other = CommandRequest(follower=bytes([number]) * 16, number=1)
            other.push.sink.CopyFrom(THERE.get_source())
            other.push.subscription = 100 + number
            other.push.poll.earliest = True
            await world.client.command(other)
        acceptor, records = Acceptor(), 0
        while records < 212:
            await asyncio.sleep(0.1)
            frames, bytes_of = zip(*world.came, strict=True)
            world.came.clear()
            assert sum(bytes_of) <= (WINDOW_BYTES_MIN if records else 1 << 20) + 8_500
            records += sum(len(acceptor.accept(frame.answer).records) for frame in frames)
            assert any(frame.tell for frame in frames)
            await world.say(frames_taken=max(frame.number for frame in frames if frame.tell))
        assert not acceptor.dropped
        await world.close()

    virtually(run())


Since = Literal["place", "time", "id", "unknown id", "earliest", "latest"]


def since(world: World, how: Since, rng: random.Random) -> tuple[PollRequest, int]:
    """Returns a start within the log, and its seq; for `latest` the lowest seq that it can mean."""
    log = world.logs[0]
    seq = rng.randint(1, log.newest_seq)
    match how:
        case "place":
            return PollRequest(positions=[Position(incarnation=log.incarnation, seq=seq)]), seq
        case "time":
            poll = PollRequest()
            poll.after_time.FromMilliseconds(world.times_ms[seq - 1])
            return poll, sum(time_ms <= world.times_ms[seq - 1] for time_ms in world.times_ms)
        case "id":
            return PollRequest(after_message_id=uuids.to_bytes(world.messages[seq - 1].attributes.id)), seq
        case "unknown id":  # then its time counts: what was appended in that very millisecond may have come after it
            made_ms = world.times_ms[seq - 1]
            id = made_ms.to_bytes(6, "big") + b"\x70\x00\x80" + rng.randbytes(7)
            return PollRequest(after_message_id=id), sum(time_ms < made_ms for time_ms in world.times_ms)
        case "earliest":
            return PollRequest(earliest=True), 0
        case "latest":
            return PollRequest(latest=True), log.newest_seq


@pytest.mark.parametrize("seed", seeds(20, quick=2))
@pytest.mark.parametrize("how", get_args(Since))
def test_replay_becomes_live_without_hole_or_double(how: Since, seed: int) -> None:
    """From any start: a record appended while the command is answered, or right after the answer, arrives once."""

    async def run() -> None:
        world, rng = World(), random.Random(seed)
        await world.begin()
        log = world.logs[0]
        for _ in range(10):
            await world.append(*[10] * 5)
            world.now_ms += rng.randrange(3)

        async def publish() -> None:
            for _ in range(50):
                await world.append(10)
                world.now_ms += rng.randrange(3)
                await asyncio.sleep(rng.choice([0, 0, 0.001]))

        publishing = asyncio.create_task(publish())
        for _ in range(rng.randrange(30)):
            await asyncio.sleep(0)
        poll, first = since(world, how, rng)
        poll.max_records = rng.randint(1, 20)
        await world.push(poll=poll)
        answered = log.newest_seq
        await world.append(10)  # right after the answer
        await publishing
        await asyncio.sleep(1)
        assert [frame.number for frame, _ in world.came] == list(range(1, len(world.came) + 1)), f"{seed=}"
        (begin,) = world.came[0][0].answer.begin
        # what is appended in the millisecond that was asked for, before the answer, is not after that time
        same_ms = sum(time_ms <= poll.after_time.ToMilliseconds() for time_ms in world.times_ms)
        last = {"latest": answered, "time": min(same_ms, answered)}.get(how, first)
        assert first <= begin.seq <= last, f"{seed=}: it begins at {begin.seq}"
        seqs = [seq for frame, _ in world.came for batch in frame.answer.batches for seq in batch.seq]
        assert seqs == list(range(begin.seq + 1, 102)), f"{seed=}"
        assert not any(frame.answer.gaps for frame, _ in world.came), f"{seed=}"
        await world.close()

    virtually(run(), seed)


def test_what_never_came_can_be_acknowledged_and_nothing_is_lost() -> None:
    async def run() -> None:
        world = World()
        await world.begin()
        await world.append(*[1_000] * 10)
        poll = PollRequest(earliest=True, consumer="app", lease_ms=60_000)
        await world.push(window=3_000, poll=poll)
        log = world.logs[0]
        for _ in range(10):
            await world.say(frames_taken=ALL, acked=[Position(incarnation=log.incarnation, seq=ALL)])
            await asyncio.sleep(0.1)
        cursor = log.cursors.seq("consumer:app")
        assert cursor == 10, "no further than the log goes"
        seqs = [seq for frame, _ in world.came for batch in frame.answer.batches for seq in batch.seq]
        assert seqs == list(range(1, 11))
        await world.close()

    virtually(run())


def test_a_frame_takes_no_acknowledgement_back() -> None:
    async def run() -> None:
        world = World()
        await world.begin()
        await world.append(*[10] * 10)
        log = world.logs[0]
        places = [Position(incarnation=log.incarnation, seq=2)]
        poll = PollRequest(positions=places, acked=places, consumer="app", lease_ms=60_000)
        await world.push(poll=poll)
        await asyncio.sleep(0.1)
        await world.say(acked=[Position(incarnation=log.incarnation, seq=10)])
        await world.append(10)
        await asyncio.sleep(0.1)
        await world.append(10)
        await asyncio.sleep(0.1)
        assert log.cursors.seq("consumer:app") == 10
        await world.close()

    virtually(run())


def test_after_its_end_nothing_is_pushed() -> None:
    async def run() -> None:
        world = World()
        await world.begin()
        await world.append(10)
        await world.push()
        await asyncio.sleep(0.1)
        await world.say(stop_push=True)
        world.came.clear()
        await world.append(10)
        await asyncio.sleep(60)
        assert not world.came
        assert len(world.service.followers.pushes) == 0
        await world.close()

    virtually(run())


def pushes() -> list[str]:
    """The running tasks."""
    return [task.get_name() for task in asyncio.all_tasks() if task.get_name() == "push"]


def test_a_stopped_service_has_ended_every_push_that_it_was_asked_to_end() -> None:
    async def run() -> None:
        world = World()
        await world.begin()
        await world.push()
        assert pushes()
        for follower in world.service.followers:
            follower.stop_push()  # as a command does, and the end of a lease
        await world.service.followers.close()
        assert not pushes()
        await world.close()

    virtually(run())


@pytest.mark.parametrize("turns", range(1, 6))
def test_a_push_that_is_asked_for_while_the_service_stops_does_not_outlive_it(turns: int) -> None:
    """The command is on its way when the service ends its pushes, in any turn of the loop."""

    async def run() -> None:
        world = World()
        await world.begin()
        await world.append(10)
        await world.push()
        world.number = 0  # once the push is forgotten, its numbers start again
        asking = asyncio.create_task(world.push())
        for _ in range(turns):
            await asyncio.sleep(0)
        await world.service.stop()
        assert not pushes()
        assert len(world.service.followers) == 0
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await asyncio.sleep(5)
        assert not pushes()
        await world.close()

    virtually(run())


def test_a_service_that_stops_takes_no_follower() -> None:
    async def run() -> None:
        world = World()
        await world.begin()
        await world.service.followers.close()
        with pytest.raises(UStatusError, match="UNAVAILABLE"):
            await world.push()
        assert len(world.service.followers) == 0
        await world.service.stop()
        await world.service.start()
        world.number = 0
        await world.push()
        await asyncio.sleep(0)
        assert pushes()
        await world.close()
        assert not pushes()

    virtually(run())


def test_frames_go_to_nobody_else() -> None:
    async def run() -> None:
        world = World()
        await world.begin()
        asked = CommandRequest(follower=NAME, number=1)
        asked.push.sink.CopyFrom(uris.uri("victim", 1, 1, 0))
        with pytest.raises(UStatusError) as error:
            await world.client.command(asked)
        assert error.value.code == UCode.PERMISSION_DENIED
        assert not len(world.service.followers)
        await world.close()

    virtually(run())


@pytest.mark.parametrize("seed", seeds(20, quick=2))
def test_a_sample_period_gives_the_first_record_of_each(seed: int) -> None:
    async def run() -> None:
        world, rng = World(), random.Random(seed)
        await world.begin()
        period = rng.choice([1, 2, 5, 1_000])
        for _ in range(60):
            await world.append(*[1] * rng.randint(1, 3))
            if rng.random() < 0.3:
                world.now_ms += 2
        asked = CommandRequest()
        asked.changes.add().follow.topic.CopyFrom(TOPIC)
        asked.changes[0].follow.sample_period_ms = period
        await world.say(changes=asked.changes)
        (all_of_it,) = (await world.client.poll(PollRequest(topics=[TOPIC]))).batches
        expected: list[int] = []
        last = -1
        for seq, time_ms in zip(all_of_it.seq, all_of_it.time_ms, strict=True):
            if time_ms // period != last:
                expected.append(seq)
            last = time_ms // period
        (batch,) = (await world.client.poll(PollRequest(follower=NAME))).batches
        assert list((await world.client.poll(PollRequest(follower=NAME))).batches) == [batch]
        assert list(batch.seq) == expected, f"{seed=}"
        assert list(batch.prev_seq) == [0, *expected[:-1]], f"{seed=}"
        await world.close()

    virtually(run(), seed)


def test_frontiers_come_with_the_first_frames_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """In pages, as they are polled; then what is followed."""
    monkeypatch.setattr(poll_module, "FRONTIER_TOPICS_MAX", 2)

    async def run() -> None:
        world = World()
        await world.begin()
        tellers = [uris.uri(f"v{place}", 4, 1, 0x8005) for place in range(5)]
        await world.append_all(world.logs[0], publishes(tellers, b"", 2))
        asked = CommandRequest()
        for topic in (TOPIC, *tellers):
            asked.changes.add().follow.topic.CopyFrom(topic)
        asked.push.sink.CopyFrom(THERE.get_source())
        asked.push.subscription = 7
        asked.push.poll.CopyFrom(PollRequest(latest=True, frontiers=True))
        await world.say(changes=asked.changes, push=asked.push)
        for _ in range(2):
            await asyncio.sleep(0.1)
            await world.append(10, 10)
        await asyncio.sleep(0.1)
        answers = [frame.answer for frame, _ in world.came]
        assert [sum(len(batch.seq) for batch in one.frontiers) for one in answers] == [2, 2, 1, 0]
        assert [one.has_frontiers for one in answers] == [False, False, True, False]
        assert [sum(len(batch.seq) for batch in one.batches) for one in answers] == [0, 0, 2, 2]
        await world.close()

    virtually(run())
