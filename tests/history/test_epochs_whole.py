"""Epochs end to end, in random order: publishers, keepers that restart, readers that disconnect and return.

What the logs hold of an epoch is the truth: a reader has all of it, or none, or learns that it may be incomplete."""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pytest

from history.epochs.assembling import MISSED, Assembled, Assembler
from history.epochs.frontier import precedes
from history.epochs.groups import Group, created_ms, timed
from history.log.log import Log
from history.reading.client import HistoryClient
from history.reading.subscriber import GaplessSubscriber
from history.records.epoch import Epoch, Time
from history.service.keeper import Keeper
from storage.runtime import REAL
from tests.history.world import SERVICE, HistoryWorld, virtually
from tests.tiers import full, seeds
from uprotocol import uri as uris
from uprotocol import uuid as uuids
from uprotocol.core.ustreamer.v1.ustreamer_pb2 import LogicalTime, PollRequest, ProgressRequest
from uprotocol.message import UMessageBuilder, UPayload
from uprotocol.status import UStatusError
from uprotocol.v1.umessage_pb2 import UMessage
from uprotocol.v1.uri_pb2 import UUri

FRONTIERS: Final = uris.uri("gateway", 4, 1, 0x8005)
SIGNALS: Final = [uris.uri("car", 0x10, 1, 0x8000 + place) for place in range(3)]
LAPS: Final = [uris.uri("car", entity, 1, 0x8000 + place) for entity in (0x21, 0x22) for place in range(2)]
OTHER: Final = uris.uri("car", 0x30, 1, 0x8000)
SECOND: Final = Group("second", [uris.uri("car", 0x10, 1, 0xFFFF)], 1_000, 300, 2_000, 5_000)
LAP: Final = Group("lap", [uris.uri("car", 0x21, 1, 0xFFFF), uris.uri("car", 0x22, 1, 0xFFFF)], None, timeout_ms=5_000)
START_MS: Final = 1_700_000_000_000


def message(topic: UUri, created_ms: int, dice: random.Random, payload: UPayload | None = None) -> UMessage:
    msb = created_ms << 16 | 0x7000 | dice.getrandbits(12)
    lsb = 1 << 63 | dice.getrandbits(62)
    id = uuids.from_bytes(msb.to_bytes(8, "big") + lsb.to_bytes(8, "big"))
    return UMessageBuilder.publish(topic).with_id(id).build_from_upayload(payload or UPayload(b"x", 4))


class Course:
    """A publisher of laps: opens the next lap before it closes the last one; optionally in two dimensions."""

    def __init__(self, entity: int, length: int) -> None:
        self.address = uris.uri("car", entity, 1)
        self.topics = [topic for topic in LAPS if topic.ue_id == entity]
        self.length, self.open, self.next = length, list[Time](), 1
        self.sent: dict[Time, dict[bytes, tuple[bytes, int]]] = defaultdict(dict)


class World(HistoryWorld):
    """Groups in one log or two, both in memory; the simulation tests faults of disks."""

    async def begin(self, dice: random.Random, logs: int) -> None:
        self.dice, self.now_ms = dice, START_MS
        self.stopped: list[tuple[int, int]] = []  # times, from and to, in which the gateway was not running
        self._runtime = replace(REAL, random_bytes=random.Random(dice.getrandbits(64)).randbytes)  # of incarnations
        made = [await self._log(place) for place in range(logs)]
        self.keeper = self._keeper(made)
        await self.keeper.open()
        await self.open(*made, keeper=self.keeper)
        length = dice.choice([1, 2])
        self.courses = [Course(0x21, length), Course(0x22, length)]
        self.place_of = {topic.SerializeToString(): dice.randrange(logs) for topic in (*SIGNALS, *LAPS, OTHER)}

    async def _log(self, place: int) -> Log:
        return await Log.open(None, name=f"log{place}", now_ms=lambda: self.now_ms, runtime=self._runtime)

    def _keeper(self, logs: Sequence[Log]) -> Keeper:
        return Keeper(FRONTIERS, [SECOND, LAP], logs, lambda: self.now_ms)

    async def restart_keeper(self) -> None:
        """As after a restart of the gateway, which takes a while; its logs are as they were."""
        self.keeper.close()
        await self.service.stop()
        self.stopped.append((self.now_ms, self.now_ms + self.dice.choice([0, 300, 2_500])))
        self.now_ms = self.stopped[-1][1]
        self.keeper = self._keeper(self.logs)
        await self.keeper.open()
        self._arguments["keeper"] = self.keeper
        await self.serve()
        self.keeper.listening()

    async def replace_log(self) -> None:
        """As after its disk was replaced; there is one log."""
        self.keeper.close()
        await self.service.stop()
        for log in self.logs:
            await log.close()
        self.logs = [await self._log(0)]
        self.keeper = self._keeper(self.logs)
        await self.keeper.open()
        self._arguments["keeper"] = self.keeper
        await self.serve()

    async def publish(self, messages: list[UMessage]) -> None:
        for place, log in enumerate(self.logs):
            mine = [one for one in messages if self.place_of[one.attributes.source.SerializeToString()] == place]
            if mine:
                await self.append_all(log, mine)

    # -- what happens

    async def signals(self) -> None:
        dice = self.dice
        away_ms = dice.choice([0, 0, 0, -200, -900, -3_000, 1_000, 4_000, 100_000])  # of the publisher's clock
        burst = [
            message(dice.choice([*SIGNALS, OTHER]), self.now_ms + away_ms + dice.randrange(300), dice)
            for _ in range(dice.randrange(1, 12))
        ]
        await self.publish(burst)

    async def open_lap(self, course: Course) -> None:
        if len(course.open) > 3:
            return
        time = (course.next, *[self.dice.randrange(3) for _ in range(course.length - 1)])
        course.next += self.dice.randrange(2)
        if await self._say(course, time, 1) and time not in course.open:
            course.open.append(time)

    async def lap_messages(self, course: Course) -> None:
        dice = self.dice
        for _ in range(dice.randrange(1, 6)):
            topic, payload = dice.choice(course.topics), None
            open = sorted(course.open)
            time = dice.choice(open) if open else None
            if time is not None and (len(open) > 1 or dice.random() < 0.2):
                payload = timed(time, UPayload(b"named", 4))
            sent = message(topic, self.now_ms, dice, payload)
            await self.publish([sent])
            if time is not None:
                self.note(course, time, topic, sent)

    def note(self, course: Course, time: Time, topic: UUri, sent: UMessage) -> None:
        key, id = topic.SerializeToString(), uuids.to_bytes(sent.attributes.id)
        last_id, count = course.sent[time].get(key, (b"", 0))
        course.sent[time][key] = (max(last_id, id), count + 1)

    async def close_lap(self, course: Course) -> None:
        if course.open and self.dice.random() < 0.9:
            time = self.dice.choice(course.open)
            if await self._say(course, time, -1):
                course.open.remove(time)

    async def close_lap_ahead_of_its_data(self, course: Course) -> None:
        """What it says was sent comes after that."""
        if len(course.open) == 1:
            (time,) = course.open
            late = [message(course.topics[0], self.now_ms, self.dice) for _ in range(2)]
            for one in late:
                self.note(course, time, course.topics[0], one)
            if await self._say(course, time, -1):
                course.open.remove(time)
            for one in late[: self.dice.choice([1, 2, 2, 2])]:  # one may never come
                await self.publish([one])

    async def _say(self, course: Course, time: Time, change: int) -> bool:
        asked = ProgressRequest(group="lap")
        said = asked.changes.add(time=LogicalTime(numbers=time), change=change)
        for topic, (id, count) in course.sent.get(time, {}).items() if change < 0 else ():
            said.last.add(topic=UUri.FromString(topic), id=id, count=count)
        try:
            await self.keeper.progress(course.address, asked)
        except UStatusError:
            return False
        return True

    async def wait(self) -> None:
        ms = self.dice.choice([50, 200, 700, 1_500, 9_000])
        self.now_ms += ms
        await asyncio.sleep(ms / 1_000)

    async def step(self) -> None:
        course = self.dice.choice(self.courses)
        happens = [
            *[self.signals] * 6,
            *[lambda: self.open_lap(course)] * 2,
            *[lambda: self.lap_messages(course)] * 5,
            *[lambda: self.close_lap(course)] * 2,
            lambda: self.close_lap_ahead_of_its_data(course),
            *[self.wait] * 4,
        ]
        await self.dice.choice(happens)()
        if self.dice.random() < 0.02:
            await self.restart_keeper()

    async def truth(self) -> dict[Epoch, set[tuple[bytes, int]]]:
        """The records in the logs, by the epoch that the log has assigned. `published`: of buckets, by their ids, but
        for those that came before their time, from a clock that is too far ahead."""
        found: dict[Epoch, set[tuple[bytes, int]]] = defaultdict(set)
        self.published: dict[Epoch, set[tuple[bytes, int]]] = defaultdict(set)
        for log in self.logs:
            for chunk in await log.read(0, max_records=1 << 20, max_bytes=1 << 30):
                epochs = chunk.epochs or [None] * len(chunk)
                for seq, epoch, message in zip(chunk.seqs, epochs, chunk.messages, strict=True):
                    if epoch is not None:
                        found[epoch].add((log.incarnation, seq))
                    if epoch is not None and epoch.group == SECOND.name:
                        bucket = min(created_ms(message) // 1_000 * 1_000, epoch.time[0])
                        self.published[Epoch(SECOND.name, (bucket,))].add((log.incarnation, seq))
        return found

    def missed(self, epoch: Epoch) -> bool:
        """Returns whether the gateway was not running within this bucket."""
        begin = epoch.time[0]
        return epoch.group == SECOND.name and any(a < begin + 1_000 and begin <= b for a, b in self.stopped)


class Reader:
    """A reader that joins at any time, and returns."""

    def __init__(self, world: World, client: HistoryClient, path: Path, *, latest: bool) -> None:
        self.world, self.client, self.path = world, client, path
        self.topics = [*SIGNALS, *LAPS, OTHER]
        self.start = PollRequest(latest=True) if latest else PollRequest(earliest=True)
        self.has: list[Assembled] = []
        self.dropped = 0
        self.task: asyncio.Task[None] | None = None

    async def run(self) -> None:
        assembler = Assembler(self.topics)
        async with GaplessSubscriber(
            self.client, self.topics, start=self.start, assembler=assembler, cursor_path=self.path, wait_ms_max=2_000
        ) as subscriber:
            async for epoch in subscriber.epochs():
                self.has.append(epoch)
                await subscriber.commit()

    def come(self) -> None:
        assert self.task is None
        self.task = asyncio.create_task(self.run())

    async def go(self) -> None:
        if self.task is not None:
            self.task.cancel()
            await asyncio.gather(self.task, return_exceptions=True)
            self.task = None


async def play(seed: int, folder: Path) -> tuple[int, int]:
    dice = random.Random(seed)
    world = World()
    await world.begin(dice, dice.choice([1, 2]))
    readers = []
    for _ in range(dice.randrange(20)):
        await world.step()
    for place in range(3):
        rpc = await world.caller(f"cloud{place}")
        client = HistoryClient(rpc, SERVICE, timeout_ms=2_000)
        readers.append(Reader(world, client, folder / f"{seed}-{place}.json", latest=place > 0))
    for _ in range(150):
        await world.step()
        reader = dice.choice(readers)
        if dice.random() < 0.1 and reader.task is None:
            reader.come()
        elif dice.random() < 0.03:
            await reader.go()
    for reader in readers:
        if reader.task is None:
            reader.come()
    for _ in range(10):  # until everything has timed out that nobody closed
        world.now_ms += 2_000
        await asyncio.sleep(2.0)
    truth, checked, whole = await world.truth(), 0, 0
    for reader in readers:
        assert reader.task is not None
        assert not reader.task.done(), reader.task
        seen, plain = set[Epoch](), set[tuple[bytes, int]]()
        came_late = {one.epoch for one in reader.has if not one.records and "came too late" in one.incomplete}
        for one in reader.has:
            records = [(record.incarnation, record.seq) for record in one.records]
            if one.epoch is None:
                assert plain.isdisjoint(records), f"seed {seed}: records without an epoch come again"
                plain.update(records)
                continue
            assert len(set(records)) == len(records), f"seed {seed}: twice the same"
            if not records:
                assert not one.is_complete
                continue
            assert one.epoch not in seen, f"seed {seed}: {one.epoch} comes again: {one}"
            seen.add(one.epoch)
            checked += 1
            whole += one.is_complete
            if one.is_complete:
                lacking = truth[one.epoch] ^ set(records)
                assert not lacking, f"seed {seed}: a part of {one.epoch}, without {lacking}"
                if one.epoch.group == SECOND.name and one.epoch not in came_late:
                    wrong = world.published[one.epoch] ^ set(records)
                    assert not wrong, f"seed {seed}: {one.epoch} is whole with, or without, {wrong}"
                    assert not world.missed(one.epoch), f"seed {seed}: {one.epoch} is whole; stopped: {world.stopped}"
        await reader.go()
    for begin, end in world.stopped:
        for bucket in range(begin // 1_000 * 1_000, end + 1, 1_000):
            known = Epoch(SECOND.name, (bucket,))
            reported = known in {one.epoch for one in readers[0].has if not one.is_complete}
            assert reported, f"seed {seed}: nothing of {known}, in which the gateway was not running"
    everything = [one.epoch for one in readers[0].has if one.epoch is not None and one.records]
    lacking = set(truth) ^ set(everything)
    assert not lacking, f"seed {seed}: who reads from the start on has all, but {lacking}"
    in_order(everything, seed)
    world.keeper.close()
    await world.close()
    return checked, whole


def in_order(epochs: Sequence[Epoch], seed: int) -> None:
    for place, one in enumerate(epochs):
        for later in epochs[place + 1 :]:
            is_before = one.group == later.group and precedes(later.time, one.time)
            assert not is_before, f"seed {seed}: {later} after {one}"


async def inline(call: Callable[..., Any], *arguments: Any) -> Any:
    return call(*arguments)


@pytest.mark.parametrize("first", seeds(8, quick=1, step=5))
def test_all_of_an_epoch_or_none(first: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asyncio, "to_thread", inline)
    sums = [0, 0]
    for seed in range(first, first + 5):

        async def go(seed: int = seed) -> None:
            checked, whole = await play(seed, tmp_path)
            sums[0] += checked
            sums[1] += whole

        virtually(go(), seed)
    assert sums[1] > 50, f"epochs were seen, and most of them whole: {sums}"


@pytest.mark.parametrize("seconds", [20, pytest.param(400, marks=full)])
def test_a_disk_that_was_replaced_holds_nobody_back(
    seconds: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its versions start again, after any time."""
    monkeypatch.setattr(asyncio, "to_thread", inline)

    async def go() -> None:
        world, dice = World(), random.Random(1)
        await world.begin(dice, 1)
        client = HistoryClient(await world.caller("cloud0"), SERVICE, timeout_ms=2_000)
        reader = Reader(world, client, tmp_path / "cursor.json", latest=False)
        reader.come()

        async def drive(seconds: int) -> list[tuple[int, str]]:
            """The records that it received meanwhile."""
            known = len(reader.has)
            for _ in range(seconds):
                await world.publish([message(SIGNALS[0], world.now_ms + ms, dice) for ms in (0, 100)])
                world.now_ms += 1_000
                await asyncio.sleep(1.0)
            return [
                ((one.epoch.time[0] - START_MS) // 1_000, one.incomplete)
                for one in reader.has[known:]
                if one.epoch is not None
            ]

        before = await drive(seconds)
        assert before == [(second, "") for second in range(seconds - 2)]
        await world.replace_log()
        after = await drive(10)
        assert [second for second, _ in after] == list(range(seconds - 2, seconds + 8))
        assert {why for second, why in after if second <= seconds} == {MISSED}
        assert {why for second, why in after if second > seconds} == {""}
        await reader.go()
        world.keeper.close()
        await world.close()

    virtually(go(), 1)
