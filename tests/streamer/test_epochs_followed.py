"""Epochs through gateways: kept by one, followed by another, read at either: all of an epoch, or none."""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from history.epochs.assembling import BEGUN_THERE, Assembled, Assembler
from history.log.log import Log
from history.reading.client import HistoryClient
from history.reading.subscriber import GaplessSubscriber
from history.records.epoch import Epoch
from history.records.record import Record
from streamer.following.followed import _first_behind
from tests.streamer.conftest import MakeWorld
from tests.streamer.test_following import DOOR, SPEED, SUBSCRIBED, Pair, Publish
from tests.tiers import seeds
from uprotocol import uri as uris
from uprotocol import uuid as uuids
from uprotocol.communication import InMemoryRpcClient
from uprotocol.core.ustreamer import ids
from uprotocol.core.ustreamer.v1.ustreamer_pb2 import Beginning, Frontier, Gap, GroupFrontier
from uprotocol.message import UMessageBuilder
from uprotocol.v1.umessage_pb2 import UMessage
from uprotocol.v1.uri_pb2 import UUri

WIDTH_MS, BEHIND_MS = 1_000, 60_000
EPOCHS = f"""
[[epochs]]
name = "second"
topics = ["//vehicle1/8001/1/FFFF"]
width_ms = {WIDTH_MS}
timeout_ms = 100000
"""
Ids = set[bytes]


def id_of(message: UMessage) -> bytes:
    return uuids.to_bytes(message.attributes.id)


class Read:
    """The records that a reader at one gateway has received, over all its restarts."""

    def __init__(self, pair: Pair, at: str, cursor: Path | None = None) -> None:
        self._pair, self._at, self._cursor = pair, at, cursor
        self.topics = [SPEED, DOOR]
        self.has: list[Assembled] = []
        self._task: asyncio.Task[None] | None = None
        self.assembler = Assembler(self.topics)

    async def begin(self) -> None:
        world = self._pair.hub if self._at == "hub" else self._pair.vehicle
        network, authority = ("office", "tablet") if self._at == "hub" else ("car", "vehicle1")
        self._stack = AsyncExitStack()
        node = await world.node(network, authority, 0x9000 + random.randrange(0x1000))
        rpc = await self._stack.enter_async_context(InMemoryRpcClient(node, node.local))
        self._client = HistoryClient(rpc, ids.at("hub" if self._at == "hub" else "vehicle1"), timeout_ms=2_000)
        self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        self.assembler = Assembler(self.topics)
        async with GaplessSubscriber(
            self._client, self.topics, assembler=self.assembler, cursor_path=self._cursor, wait_ms_max=500
        ) as subscriber:
            async for epoch in subscriber.epochs():
                self.has.append(epoch)
                await subscriber.commit()

    async def end(self) -> None:
        assert self._task is not None
        assert not self._task.done(), self._task
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        await self._stack.aclose()

    @property
    def epochs(self) -> dict[Epoch, Assembled]:
        return {one.epoch: one for one in self.has if one.epoch is not None}

    @property
    def whole(self) -> dict[Epoch, Ids]:
        return {
            epoch: {id_of(record.message) for record in one.records}
            for epoch, one in self.epochs.items()
            if one.is_complete
        }


async def truth(log: Log) -> dict[Epoch, Ids]:
    """The contents of the log of the gateway that keeps the epochs."""
    found: dict[Epoch, Ids] = defaultdict(set)
    for chunk in await log.read(0, max_records=1 << 20, max_bytes=1 << 30):
        for epoch, message in zip(chunk.epochs or (), chunk.messages, strict=False):
            if epoch is not None:
                found[epoch].add(id_of(message.decoded() if hasattr(message, "decoded") else message))
    return found


class Drive:
    """Signals whose ids carry a clock of their own, which is behind, so that seconds pass as fast as they are
    published."""

    def __init__(self, pair: Pair, dice: random.Random) -> None:
        self._pair, self._dice = pair, dice
        self.now_ms = (uuids.now_ms() - BEHIND_MS) // WIDTH_MS * WIDTH_MS

    async def second(self, count: int = 20) -> int:
        """Publishes one message; returns its time."""
        begin = self.now_ms
        for place in range(count):
            topic = self._dice.choice([SPEED, DOOR])
            id = uuids.from_bytes(
                (begin + place * WIDTH_MS // count).to_bytes(6, "big")
                + (0x7000 | place).to_bytes(2, "big")
                + (1 << 63 | self._dice.getrandbits(62)).to_bytes(8, "big")
            )
            payload = self._pair.publication(topic, "x")
            message = UMessageBuilder.publish(topic).with_id(id).build()
            message.payload, message.attributes.payload_format = payload.payload, payload.attributes.payload_format
            await self._pair.car.send(message)
        self.now_ms += WIDTH_MS
        return begin


@pytest.fixture
async def pair(make_world: MakeWorld, publish: Publish) -> Pair:
    return Pair(make_world, publish)


async def all_ended(pair: Pair, reads: list[Read], last: int) -> None:
    """Waits until each reader has the last epoch but one."""

    def is_there(read: Read) -> bool:
        return Epoch("second", (last - WIDTH_MS,)) in read.epochs

    await pair.hub.until(lambda: all(map(is_there, reads)))


async def one_by_one(pair: Pair, read: Read, drive: Drive) -> int:
    """The epoch before is over before the next one begins; a record that arrives at once opens its epoch at once."""
    time = await drive.second()
    await all_ended(pair, [read], time)
    return time


@pytest.mark.parametrize("mode", ["poll", "push"])
async def test_epochs_are_whole_where_they_are_followed(pair: Pair, mode: str) -> None:
    await pair.begin(mode=mode, topics='topics = ["//vehicle1/8001/1/FFFF"]', vehicle_more=EPOCHS)
    await pair.handed_over()
    reads = [Read(pair, "vehicle"), Read(pair, "hub")]
    for read in reads:
        await read.begin()
    drive = Drive(pair, random.Random(1))
    seconds = [await drive.second() for _ in range(12)]
    await all_ended(pair, reads, seconds[-1])
    there = await truth(pair.vehicle.assembly.logs.durable)
    for read in reads:
        assert all(records == there[epoch] for epoch, records in read.whole.items())
        assert [epoch.time[0] for epoch in read.whole] == seconds[:-1]
        await read.end()


@pytest.mark.parametrize("seed", seeds(3, quick=1))
async def test_cuts_and_restarts_on_the_way_make_no_epoch_a_part_of_one(pair: Pair, seed: int, tmp_path: Path) -> None:
    dice = random.Random(seed)
    await pair.begin(topics='topics = ["//vehicle1/8001/1/FFFF"]', vehicle_more=EPOCHS)
    await pair.handed_over()
    read = Read(pair, "hub", tmp_path / "cursor.json")
    await read.begin()
    drive = Drive(pair, dice)
    restarts = seconds = 0
    for _ in range(15):
        last = await drive.second()
        seconds += 1
        await pair.vehicle.taken("car")
        match dice.randrange(8):
            case 0:
                await read.end()
                await pair.hub.restart()
                await read.begin()
            case 1:
                restarts += 1
                await pair.vehicle.restart()
            case 2:
                pair.hub.networks["link"].cut("vehicle1")
                last = await drive.second()
                seconds += 1
                pair.hub.networks["link"].mend("vehicle1")
            case 3:
                await read.end()
                await read.begin()
    await all_ended(pair, [read], last)
    there = await truth(pair.vehicle.assembly.logs.durable)
    assert all(records == there[epoch] for epoch, records in read.whole.items()), f"seed {seed}"
    incomplete = [one for one in read.epochs.values() if not one.is_complete]
    assert len(incomplete) <= 2 * restarts, (
        f"seed {seed}: only what the vehicle's restarts cut is not whole: {incomplete}"
    )
    assert len(read.whole) + len(incomplete) == seconds - 1, f"seed {seed}"
    await read.end()


async def test_what_begins_to_be_followed_in_the_middle_of_an_epoch_is_not_taken_for_all_of_it(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    nobody_yet = {topic: who for topic, who in SUBSCRIBED.items() if topic == uris.format(SPEED).removeprefix("up:")}
    monkeypatch.setattr("tests.streamer.test_following.SUBSCRIBED", nobody_yet)
    await pair.begin(topics='topics = ["//vehicle1/8001/1/8001"]', vehicle_more=EPOCHS)
    await pair.handed_over()
    read, drive = Read(pair, "hub"), Drive(pair, random.Random(3))
    await read.begin()
    first = [await drive.second() for _ in range(3)]
    half = await drive.second(count=7)  # more of it comes below
    drive.now_ms = half
    await all_ended(pair, [read], half)
    (follow,) = pair.hub.config.follow
    more = follow.model_copy(update={"topics": ["//vehicle1/8001/1/FFFF"]})
    await read.end()
    await pair.hub.stop()
    pair.hub.config = pair.hub.config.model_copy(update={"follow": [more]})
    await pair.hub.start()
    await pair.handed_over()
    await read.begin()
    again = [await drive.second() for _ in range(4)]
    await all_ended(pair, [read], again[-1])
    there = await truth(pair.vehicle.assembly.logs.durable)
    assert again[0] == half
    assert Epoch("second", (half,)) not in read.whole, "of what was open a part is missing"
    assert {epoch.time[0] for epoch in read.whole} == {*first, *again[1:-1]}
    for time in again[1:-1]:
        assert read.whole[Epoch("second", (time,))] == there[Epoch("second", (time,))]
    await read.end()


async def test_what_is_pushed_in_between_is_missing_from_what_was_open(pair: Pair) -> None:
    """If following stops for a while, what was pushed is here already, and has no epochs."""
    await pair.begin(topics='topics = ["//vehicle1/8001/1/FFFF"]', vehicle_more=EPOCHS)
    await pair.handed_over()
    read, drive = Read(pair, "hub"), Drive(pair, random.Random(4))
    await read.begin()
    first = [await drive.second() for _ in range(3)]
    half = await drive.second(count=7)
    await all_ended(pair, [read], half)
    followed = pair.vehicle.config
    endpoints = [one.model_copy(update={"followed_by": None}) for one in followed.endpoint]
    await pair.vehicle.stop()
    pair.vehicle.config = followed.model_copy(update={"endpoint": endpoints})
    await pair.vehicle.start()
    await pair.hub.until(lambda: "names it as followed_by" in pair.followed.trouble)
    drive.now_ms = half
    heard = len(pair.heard.texts)
    between = [await drive.second() for _ in range(2)]
    await pair.heard.expect(heard + 40)
    await pair.vehicle.stop()
    pair.vehicle.config = followed
    await pair.vehicle.start()
    await pair.handed_over()
    again = [await drive.second() for _ in range(4)]
    await all_ended(pair, [read], again[-1])
    there = await truth(pair.vehicle.assembly.logs.durable)
    assert {half, *between, *again} <= {epoch.time[0] for epoch in there}
    assert [epoch.time[0] for epoch in read.whole] == [*first, *again[:-1]]
    assert all(records == there[epoch] for epoch, records in read.whole.items())
    assert read.epochs[Epoch("second", (half,))].incomplete == BEGUN_THERE
    await read.end()


async def test_what_ceases_to_be_followed_in_the_middle_of_an_epoch_is_missing_from_it(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    nobody: dict[str, list[str]] = {}
    monkeypatch.setattr("tests.streamer.test_following.SUBSCRIBED", nobody)
    await pair.begin(topics='topics = ["//vehicle1/8001/1/FFFF"]', vehicle_more=EPOCHS)
    await pair.handed_over()
    read, drive = Read(pair, "hub"), Drive(pair, random.Random(5))
    await read.begin()
    first = [await drive.second() for _ in range(3)]
    half = await drive.second(count=7)
    await all_ended(pair, [read], half)
    (follow,) = pair.hub.config.follow
    await read.end()
    await pair.hub.stop()
    less = follow.model_copy(update={"topics": ["//vehicle1/8002/1/FFFF"]})
    pair.hub.config = pair.hub.config.model_copy(update={"follow": [less]})
    await pair.hub.start()
    await pair.handed_over()
    await read.begin()
    drive.now_ms = half
    for _ in range(3):
        await drive.second()
    await pair.hub.until(lambda: Epoch("second", (half,)) in read.epochs)
    assert {epoch.time[0] for epoch in read.whole} == set(first)
    assert not read.epochs[Epoch("second", (half,))].records
    await read.end()


async def test_a_temporary_loss_of_access_is_reported_once_and_when_it_ends(pair: Pair) -> None:
    await pair.begin(topics='topics = ["//vehicle1/8001/1/FFFF"]', vehicle_more=EPOCHS)
    await pair.handed_over()
    read, drive = Read(pair, "hub"), Drive(pair, random.Random(6))
    await read.begin()
    first = [await drive.second() for _ in range(3)]
    await all_ended(pair, [read], first[-1])
    log = pair.hub.assembly.logs.durable
    beginnings = log.stream_id(pair.hub.assembly.local.get_resource(ids.BEGINNINGS), wanted=True)

    async def topics() -> list[list[UUri]]:
        chunks = await log.read(0, streams={beginnings})
        return [list(Beginning.FromString(one.payload).topics) for chunk in chunks for one in chunk.messages]

    before = len(await topics())
    for _ in range(3):  # as each conversation with the gateway says it
        pair.followed._denied(DOOR)
    half, *more = [await one_by_one(pair, read, drive) for _ in range(4)]
    assert (await topics())[before:] == [[DOOR], [DOOR]]
    assert read.epochs[Epoch("second", (first[-1],))].incomplete == BEGUN_THERE
    assert {epoch.time[0] for epoch in read.whole} >= {*first[:-1], *more[:-1]} - {half}
    await read.end()


def test_a_gap_is_reported_at_its_position() -> None:
    """Among records of several logs: behind the records before it, ahead of those after it."""
    one, other = b"1" * 16, b"2" * 16
    message = UMessageBuilder.publish(SPEED).build()
    records = [Record(log, seq, 0, 0, message) for log, seq in ((one, 5), (one, 9), (other, 2), (other, 7))]
    for gap, place in (
        (Gap(incarnation=one, after_seq=0, before_seq=5), 0),
        (Gap(incarnation=one, after_seq=5, before_seq=9), 1),
        (Gap(incarnation=other, after_seq=2, before_seq=7), 3),
        (Gap(incarnation=other, after_seq=7, before_seq=9), 4),
    ):
        assert _first_behind(gap, records) == place


async def test_nobody_but_the_keeper_tells_of_epochs(pair: Pair) -> None:
    """A published false frontier would end running epochs for all readers."""
    recorded = '[history]\nrecord = ["//vehicle1/FFFFFFFF/FF/FFFF"]\n'
    await pair.begin(vehicle_more=EPOCHS + recorded)
    read, drive = Read(pair, "vehicle"), Drive(pair, random.Random(4))
    await read.begin()
    await drive.second(count=5)
    false = Frontier(groups=[GroupFrontier(group="second", number=99, version=99)])
    message = UMessageBuilder.publish(ids.at("vehicle1", ids.FRONTIERS)).pack(false)
    await pair.car.send(message)
    last = [await drive.second() for _ in range(2)][-1]
    await all_ended(pair, [read], last)
    there = await truth(pair.vehicle.assembly.logs.durable)
    assert all(records == there[epoch] for epoch, records in read.whole.items())
    assert pair.vehicle.assembly.endpoints["car"].dropped["spoofed"] == 1
    await read.end()
