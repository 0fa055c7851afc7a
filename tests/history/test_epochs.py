"""To which epoch a record belongs, and when an epoch ends: time buckets, reports of publishers, invalid reports."""

from __future__ import annotations

import asyncio
import json
import random
import sqlite3
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from history.epochs import groups as epochs_module
from history.epochs.assembling import BEGUN, BEGUN_THERE, MISSED, ODD, UNREPORTED, Assembled, Assembler
from history.epochs.groups import (
    ACTIVE_EACH_MAX,
    ACTIVE_MAX,
    LAST_EACH_MAX,
    Buckets,
    Group,
    IncomingRecord,
    Progress,
    timed,
    untimed,
)
from history.epochs.merging import LOG_GROUPS_MAX, REST, UNREPORTED_MAX
from history.file.store import Store
from history.log.log import Log
from history.reading.client import HistoryClient
from history.reading.subscriber import CursorFile, GaplessSubscriber
from history.records.chunk import Chunk, Origin, decode, encode
from history.records.epoch import NUMBER_MAX, NUMBER_MIN, Epoch, Time
from history.records.record import Record
from history.service import poll as poll_module
from history.service.keeper import Keeper
from history.service.poll import Poll
from tests.history.test_epochs_whole import FRONTIERS, LAP, LAPS, SIGNALS, START_MS, message
from tests.history.world import SERVICE, HistoryWorld
from tests.tiers import full
from uprotocol import uri as uris
from uprotocol import uuid as uuids
from uprotocol.core.ustreamer.ids import at
from uprotocol.core.ustreamer.v1.ustreamer_pb2 import (
    Beginning,
    Frontier,
    GroupFrontier,
    LogicalTime,
    PollRequest,
    PollResponse,
    ProgressRequest,
    ProgressResponse,
)
from uprotocol.message import UMessageBuilder, UPayload
from uprotocol.status import UStatusError
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.umessage_pb2 import UMessage
from uprotocol.v1.uri_pb2 import UUri

CAR = uris.uri("car", 0x21, 1)
OTHER_CAR = uris.uri("car", 0x22, 1)
DICE = random.Random(1)
LOG, OTHER_LOG = b"A" * 16, b"B" * 16
SECOND = Group("second", [uris.uri("car", 0x10, 1, 0xFFFF)], 1_000, lateness_ms=300, ahead_ms=5_000, timeout_ms=2_000)


def arrived(topic: UUri, created_ms: int, payload: UPayload | None = None) -> IncomingRecord:
    sent = message(topic, created_ms, DICE, payload)
    return IncomingRecord((topic.authority_name, topic.ue_id), topic.SerializeToString(), sent)


def signals(*created_ms: int) -> list[IncomingRecord]:
    return [arrived(SIGNALS[0], START_MS + ms) for ms in created_ms]


class Watch:
    """Buckets of one second, records up to 300 ms late, and the reports about them."""

    def __init__(self) -> None:
        self.kept = Buckets(SECOND)
        self.now = 0.0
        self.now_ms = START_MS
        self.kept.start(self.now_ms, self.now)

    def take(self, *created_ms: int, now_ms: int = 100_000) -> list[int]:
        """The second of each record, counted from START_MS."""
        self.now_ms = START_MS + now_ms
        found = self.kept.assign(signals(*created_ms), self.now_ms, self.now)
        self.kept.settle(self.now_ms, self.now)
        return [(epoch.time[0] - START_MS) // 1_000 for epoch in found if epoch is not None]

    def tick(self, now_s: float) -> None:
        self.now = now_s
        self.kept.tick(self.now_ms, self.now)

    def ended(self) -> list[tuple[int, str]]:
        report = self.kept.report()
        return [((one.time.numbers[0] - START_MS) // 1_000, one.incomplete) for one in report.ended]


# -- buckets


def test_a_bucket_ends_when_something_came_that_is_later_than_its_lateness() -> None:
    watch = Watch()
    assert watch.take(100, 900, 1_000, 1_299) == [0, 0, 1, 1]
    assert watch.ended() == []
    assert watch.take(950, 1_300) == [0, 1]
    assert watch.ended() == [(0, "")]


def test_what_is_late_joins_the_lowest_that_is_open_and_is_counted() -> None:
    watch = Watch()
    watch.take(100, 5_100)
    assert watch.ended() == [(0, "")]
    assert watch.take(100, 4_600, 4_900, 5_200) == [4, 4, 4, 5]
    assert watch.kept.counts["late"] == 1


def test_ids_ahead_of_our_clock_open_nothing() -> None:
    watch = Watch()
    assert watch.take(100, now_ms=0) == [-1 + 1]
    assert watch.take(5_200, 3_600_000, 200, now_ms=150) == [-1, -1, 0]
    assert watch.kept.counts["ahead"] == 2
    assert watch.take(5_200, now_ms=300) == [5], "now it is not ahead any more"


def test_our_clock_may_leap_in_both_directions() -> None:
    watch = Watch()
    watch.take(100, 1_400, now_ms=1_500)
    assert watch.take(1_500, now_ms=-500_000_000) == [1]
    assert watch.kept.counts["ahead"] == 1
    assert watch.take(1_600, now_ms=900_000_000) == [1]
    assert watch.take(2_400, now_ms=2_500) == [2]


def test_a_publisher_whose_clock_went_back_is_late_and_none_of_its_records_is_lost() -> None:
    watch = Watch()
    watch.take(10_000)
    found = watch.take(*range(0, 5_000, 100))
    assert len(found) == 50
    assert set(found) == {9}
    assert watch.kept.counts["late"] == 50


def test_what_falls_silent_ends_as_incomplete_and_then_holds_back_nobody() -> None:
    watch = Watch()
    watch.take(100, 1_100)
    watch.ended()
    assert watch.kept.due == 2.0
    watch.tick(1.9)
    assert not watch.kept.has_changes
    watch.tick(2.0)
    assert watch.ended() == [(0, epochs_module.SILENT), (1, epochs_module.SILENT)]
    assert watch.kept.frontier.lower == {(START_MS + 2_000,)}
    assert watch.take(700) == [2], "late: it opens what is not over"
    assert watch.take(7_000, now_ms=7_000) == [7]


def test_open_buckets_are_bounded() -> None:
    watch = Watch()
    watch.take(0)
    kept = Buckets(Group("wide", SECOND.topics, 1, 10_000_000, 5_000_000, 20_000_000))
    found = kept.assign(signals(*range(1_000_000)[:: 1_000_000 // 5_000]), START_MS + 1_000_000, 0.0)
    assert len(found) == 5_000
    assert len(kept.frontier.seen) == ACTIVE_MAX
    assert kept.counts["crowded"] > 4_000
    assert kept.report().ByteSize() < 16 << 10


@given(
    st.lists(st.tuples(st.integers(-20_000, 20_000), st.integers(-8_000, 8_000)), max_size=60), st.integers(0, 2_000)
)
def test_whatever_clocks_do_each_record_has_an_open_epoch_and_the_lower_frontier_never_goes_back(
    steps: Sequence[tuple[int, int]], lateness_ms: int
) -> None:
    kept = Buckets(Group("second", SECOND.topics, 1_000, lateness_ms, 2_000, 100_000))
    over = set[Time]()
    now_ms, lowest = START_MS, -1
    for place, (away_ms, clock_ms) in enumerate(steps):
        now_ms += clock_ms
        (epoch,) = kept.assign(signals(now_ms - START_MS + away_ms), now_ms, float(place))
        assert epoch is not None
        assert epoch.time not in over
        assert epoch.time in kept.report().active or epoch.time in kept.frontier.seen
        kept.settle(now_ms, float(place))
        if place % 7 == 6:
            kept.tick(now_ms, float(place) + 1_000)
        over |= {tuple(one.time.numbers) for one in kept.report().ended}
        for (time,) in kept.frontier.lower:
            assert time >= lowest
            lowest = time


# -- what publishers say


class Laps:
    """A progress group and its reports."""

    def __init__(self) -> None:
        self.kept = Progress(LAP, dict)
        self.now = 0.0

    def say(self, *changes: tuple[Time, int], publisher: UUri = CAR, last: Sequence[tuple[UMessage, int]] = ()) -> None:
        asked = ProgressRequest(group="lap")
        for time, change in changes:
            said = asked.changes.add(time=LogicalTime(numbers=time), change=change)
            for sent, count in last if change < 0 else ():
                said.last.add(topic=sent.attributes.source, id=uuids.to_bytes(sent.attributes.id), count=count)
        self.kept.change(publisher, asked.changes, self.now)
        self.kept.settle(0, self.now)

    def take(self, *records: IncomingRecord) -> list[Time | None]:
        found = self.kept.assign(records, START_MS, self.now)
        self.kept.settle(0, self.now)
        return [None if epoch is None else epoch.time for epoch in found]

    def ended(self) -> list[tuple[Time, str]]:
        return [(tuple(one.time.numbers), one.incomplete) for one in self.kept.report().ended]

    def refused(self, *changes: tuple[Time, int], publisher: UUri = CAR) -> tuple[int, str]:
        """And nothing has changed."""
        before = (self.kept.frontier.lower, set(self.kept.frontier.seen), set(self.kept.publishers))
        with pytest.raises(UStatusError) as caught:
            self.say(*changes, publisher=publisher)
        assert before == (self.kept.frontier.lower, set(self.kept.frontier.seen), set(self.kept.publishers))
        return caught.value.code, caught.value.message


def test_an_epoch_is_over_when_all_that_opened_it_have_closed_it() -> None:
    laps = Laps()
    laps.say(((1,), 1))
    laps.say(((1,), 1), publisher=OTHER_CAR)
    assert laps.take(arrived(LAPS[0], START_MS), arrived(LAPS[2], START_MS)) == [(1,), (1,)]
    laps.say(((2,), 1), ((1,), -1))
    assert laps.ended() == []
    laps.say(((1,), -1), publisher=OTHER_CAR)
    assert laps.ended() == [((1,), "")]


def test_a_close_does_not_overtake_data() -> None:
    laps = Laps()
    laps.say(((1,), 1))
    sent = [arrived(LAPS[0], START_MS + ms) for ms in range(5)]
    of_next = arrived(LAPS[0], START_MS + 100)
    assert laps.take(*sent[:2]) == [(1,), (1,)]
    last = sent[-1].message
    assert isinstance(last, UMessage)
    laps.say(((2,), 1), ((1,), -1), last=[(last, 5)])
    assert laps.ended() == []
    assert laps.take(*sent[2:4], of_next) == [(1,), (1,), (2,)], "by their ids"
    assert laps.ended() == []
    assert laps.take(sent[4]) == [(1,)]
    assert laps.ended() == [((1,), "")]


def test_what_never_comes_ends_it_as_incomplete_after_a_while() -> None:
    laps = Laps()
    laps.say(((1,), 1))
    sent = arrived(LAPS[0], START_MS)
    laps.take(sent)
    assert isinstance(sent.message, UMessage)
    laps.say(((1,), -1), last=[(sent.message, 3)])
    laps.now = 5.0
    laps.kept.tick(0, laps.now)
    assert laps.ended() == [((1,), "car/21: 1 of 3 messages of up://car/21/1/8000 came")]
    assert laps.kept.counts["incomplete"] == 1


def test_a_publisher_that_dies_ends_nothing_but_its_own() -> None:
    laps = Laps()
    laps.say(((1,), 1))
    laps.say(((1,), 1), ((2,), 1), publisher=OTHER_CAR)
    laps.take(arrived(LAPS[0], START_MS))
    laps.now = 4.0
    laps.take(arrived(LAPS[2], START_MS, timed((1,), UPayload(b"x", 4))))
    laps.say(((2,), 1), publisher=OTHER_CAR)
    laps.now = 5.0
    laps.kept.tick(0, laps.now)
    assert laps.ended() == []
    laps.say(((1,), -1), publisher=OTHER_CAR)
    assert laps.ended() == [((1,), f"car/21: {epochs_module.UNCLOSED}")]


def test_who_has_several_open_names_one_in_each_payload() -> None:
    laps = Laps()
    laps.say(((1, 0), 1), ((0, 1), 1))
    named = [arrived(LAPS[0], START_MS, timed(time, UPayload(b"x", 4))) for time in ((0, 1), (1, 0))]
    assert laps.take(*named, arrived(LAPS[0], START_MS)) == [(0, 1), (1, 0), (0, 1)]
    assert laps.kept.counts["unnamed"] == 1
    assert laps.take(arrived(LAPS[0], START_MS, timed((7, 7), UPayload(b"x", 4)))) == [(0, 1)]
    assert laps.kept.counts["late"] == 1
    assert untimed(timed((3, 4), UPayload(b"inside", 4))) == ((3, 4), UPayload(b"inside", 4))
    assert untimed(UPayload(b"plain", 4)) == (None, UPayload(b"plain", 4))
    assert untimed(UPayload(b"\xff", 1)) == (None, UPayload(b"\xff", 1)), "no Any"


def test_what_comes_while_nothing_is_open_has_no_epoch() -> None:
    laps = Laps()
    assert laps.take(arrived(LAPS[0], START_MS)) == [None]
    assert (laps.kept.counts["late"], laps.kept.counts["without"]) == (1, 1)


def test_what_nobody_should_say() -> None:
    laps = Laps()
    assert laps.refused(((1,), -1)) == (UCode.NOT_FOUND, "(1,) of 'lap' was not opened by the caller")
    laps.say(((5,), 1))
    assert laps.refused(((5,), -1), publisher=OTHER_CAR)[0] == UCode.NOT_FOUND
    assert laps.refused(((1, 2), 1)) == (
        UCode.INVALID_ARGUMENT,
        "change 1: the times of 'lap' have 1 numbers, got (1, 2)",
    )
    assert laps.refused(((), 1))[0] == UCode.INVALID_ARGUMENT
    assert laps.refused((tuple(range(9)), 1))[0] == UCode.INVALID_ARGUMENT
    assert laps.refused(((6,), 2)) == (UCode.INVALID_ARGUMENT, "change 1 is +1 or -1, got 2")
    code, why = laps.refused(((6,), 1), ((4,), 1))
    assert code == UCode.FAILED_PRECONDITION
    assert "(4,) of 'lap' is over: the lower frontier has come to [(5,)]" in why
    laps.say(((6,), 1), ((5,), -1))
    laps.say(((6,), 1), ((5,), -1))  # said again, as after an answer that was lost
    assert laps.kept.frontier.lower == {(6,)}


def test_times_of_different_lengths_in_one_request_change_nothing() -> None:
    laps = Laps()
    assert laps.refused(((1,), 1), ((1, 2), 1)) == (
        UCode.INVALID_ARGUMENT,
        "the times of 'lap' have 1 numbers, got (1, 2)",
    )


def test_a_million_open_epochs_are_refused() -> None:
    laps = Laps()
    for first in range(0, 1_000_000, 50_000):
        many = [((first + place,), 1) for place in range(epochs_module.CHANGES_MAX)]
        assert laps.refused(*many)[0] == UCode.RESOURCE_EXHAUSTED
    assert laps.refused(*many, ((1,), 1))[0] == UCode.RESOURCE_EXHAUSTED
    laps.say(*(((place,), 1) for place in range(ACTIVE_EACH_MAX)))
    assert laps.refused(((1_000,), 1))[0] == UCode.RESOURCE_EXHAUSTED
    laps.say(((0,), -1), ((1_000,), 1))
    assert laps.kept.report().ByteSize() < 64 << 10


def test_a_million_epochs_that_are_closed_while_a_lower_one_is_open_are_refused() -> None:
    laps = Laps()
    laps.say(((0,), 1))

    def drive(lap: int) -> None:
        laps.say(((lap,), 1))
        sent = arrived(LAPS[0], START_MS + lap, timed((lap,), UPayload(b"x", 4)))
        assert laps.take(sent) == [(lap,)]
        assert isinstance(sent.message, UMessage)
        laps.say(((lap,), -1), last=[(sent.message, 1)])
        assert laps.ended() == []

    for lap in range(1, ACTIVE_EACH_MAX):
        drive(lap)
    code, what = laps.refused(((ACTIVE_EACH_MAX,), 1))
    assert (code, "the lowest first" in what) == (UCode.RESOURCE_EXHAUSTED, True)
    laps.say(((1_000,), 1), publisher=OTHER_CAR)
    laps.say(((0,), -1))
    assert [time for time, _ in laps.ended()] == [(lap,) for lap in range(1, ACTIVE_EACH_MAX)]
    laps.say(((2_000,), 1))


def test_a_million_topics_that_are_named_with_the_end_of_epochs_are_refused() -> None:
    """Each record of a frontier would have them all."""
    laps = Laps()

    def close(lap: int, topics: int, publisher: UUri = CAR) -> None:
        asked = ProgressRequest(group="lap")
        asked.changes.add(time=LogicalTime(numbers=[lap]), change=1)
        closed = asked.changes.add(time=LogicalTime(numbers=[lap]), change=-1)
        for place in range(topics):
            topic = uris.uri(publisher.authority_name, publisher.ue_id, 1, 0x8000 + place)
            closed.last.add(topic=topic, id=bytes(16), count=1)
        laps.kept.change(publisher, asked.changes, laps.now)

    for lap in range(4):
        close(lap, LAST_EACH_MAX // 4)
    with pytest.raises(UStatusError, match="wait until the messages") as caught:
        close(9, 1)
    assert caught.value.code == UCode.RESOURCE_EXHAUSTED
    assert len(laps.kept.frontier.held) == 4
    close(0, LAST_EACH_MAX)  # once more: it was done
    close(9, 1, OTHER_CAR)
    assert laps.kept.report().ByteSize() < 100_000
    laps.now = 100.0
    laps.kept.tick(0, laps.now)
    close(10, LAST_EACH_MAX)


def test_in_a_group_of_several_hosts_each_host_has_a_share() -> None:
    """For any number of publishers that it claims."""
    kept = Progress(Group("lap", [uris.pattern("*", 0xFFFFFFFF, 0xFF)], None), dict)

    def open_lap(lap: int, host: str, entity: int) -> None:
        asked = ProgressRequest(group="lap")
        asked.changes.add(time=LogicalTime(numbers=[lap]), change=1)
        kept.change(uris.uri(host, entity, 1), asked.changes, 0.0)

    for lap in range(ACTIVE_EACH_MAX):
        open_lap(lap, "hostile", 0x100 + lap)
    with pytest.raises(UStatusError, match="of one publisher"):
        open_lap(ACTIVE_EACH_MAX, "hostile", 0x1000)
    open_lap(ACTIVE_EACH_MAX, "car", 0x21)


def test_numbers_go_as_far_as_the_wire_bears() -> None:
    laps = Laps()
    laps.say(((NUMBER_MIN,), 1))
    laps.say(((NUMBER_MAX,), 1), ((NUMBER_MIN,), -1))
    (record,) = laps.take(arrived(LAPS[0], START_MS))
    assert record == (NUMBER_MAX,)
    chunk = Chunk([1], 7, [1], [0], [b""], None, None, [Epoch("lap", (NUMBER_MIN, NUMBER_MAX))])
    chunk._messages = [message(LAPS[0], START_MS, DICE)]
    assert decode(encode(chunk)).epochs == [Epoch("lap", (NUMBER_MIN, NUMBER_MAX))]


# -- through the service, and over restarts


class World(HistoryWorld):
    async def begin(self, path: Path) -> None:
        self.path, self.now_ms = path, START_MS
        log = await Log.open(path, name="test")
        self.keeper = Keeper(FRONTIERS, [SECOND, LAP], [log], lambda: self.now_ms)
        await self.keeper.open()
        await self.open(log, keeper=self.keeper)
        self.client = HistoryClient(self.rpc, SERVICE, timeout_ms=20_000)

    async def restart(self, groups: Sequence[Group] = (SECOND, LAP)) -> None:
        self.keeper.close()
        await self.close()
        self.now_ms += 100
        log = await Log.open(self.path, name="test")
        self.keeper = Keeper(FRONTIERS, groups, [log], lambda: self.now_ms)
        try:
            await self.keeper.open()
        finally:
            await self.open(log, keeper=self.keeper)
        self.client = HistoryClient(self.rpc, SERVICE, timeout_ms=20_000)

    async def say(self, caller: str, entity: int, *changes: tuple[Time, int], group: str = "lap") -> ProgressResponse:
        asked = ProgressRequest(group=group)
        for time, change in changes:
            asked.changes.add(time=LogicalTime(numbers=time), change=change)
        rpc = await self.caller(caller, entity)
        payload = await rpc.invoke_method(at("gateway", 4), UPayload.pack(asked))
        return payload.unpack(ProgressResponse)

    async def frontiers(self, name: str = "lap") -> list[GroupFrontier]:
        """Returns all frontiers of a group in the logs."""
        log = self.logs[0]
        stream = log.known_id(FRONTIERS)
        assert stream is not None
        chunks = await log.read(0, streams={stream})
        frontiers = (Frontier.FromString(message.payload) for chunk in chunks for message in chunk.messages)
        return [group for one in frontiers for group in one.groups if group.group == name]


@pytest.fixture
async def world(tmp_path: Path):  # type: ignore[no-untyped-def]
    made = World()
    await made.begin(tmp_path / "l.db")
    yield made
    made.keeper.close()
    await made.close()


async def test_progress_over_the_wire(world: World) -> None:
    answer = await world.say("car", 0x21, ((1,), 1))
    assert [tuple(one.numbers) for one in answer.lower] == [(1,)]
    await world.append_all(world.logs[0], [message(LAPS[0], START_MS, DICE)])
    await world.say("car", 0x21, ((2,), 1), ((1,), -1))
    frontiers = await world.frontiers()
    assert [tuple(one.time.numbers) for group in frontiers for one in group.ended] == [(1,)]
    updates = [(tuple(one.time.numbers), one.change) for group in frontiers for one in group.updates]
    assert updates == [((1,), 1), ((1,), -1), ((2,), 1)]


@pytest.mark.parametrize(
    ("caller", "group", "code", "says"),
    [
        ("car", "stint", UCode.NOT_FOUND, "no group 'stint' has epochs here; there are: lap, second"),
        ("car", "second", UCode.FAILED_PRECONDITION, "nobody opens or closes them"),
        ("thief", "lap", UCode.PERMISSION_DENIED, "publishes nothing of 'lap'"),
    ],
)
async def test_who_may_not_say_anything(world: World, caller: str, group: str, code: int, says: str) -> None:
    with pytest.raises(UStatusError, match=says) as caught:
        await world.say(caller, 0x21, ((1,), 1), group=group)
    assert caught.value.code == code
    assert not any(frontier.lower for frontier in await world.frontiers())


async def test_what_was_open_goes_on_after_a_restart_and_its_count_with_it(world: World) -> None:
    await world.say("car", 0x21, ((1,), 1))
    sent = [message(LAPS[0], START_MS + ms, DICE) for ms in range(4)]
    await world.append_all(world.logs[0], sent[:2])
    asked = ProgressRequest(group="lap")
    change = asked.changes.add(time=LogicalTime(numbers=(1,)), change=-1)
    change.last.add(topic=LAPS[0], id=uuids.to_bytes(sent[3].attributes.id), count=4)
    await world.keeper.progress(CAR, asked)
    await world.append_all(world.logs[0], sent[2:3])
    before = (await world.frontiers())[-1]
    assert before.kept.held[0].is_closing
    await world.restart()
    await world.append_all(world.logs[0], sent[3:])
    ended = (await world.frontiers())[-1]
    assert [(tuple(one.time.numbers), one.incomplete) for one in ended.ended] == [((1,), "")]
    assert (ended.number, ended.version) == (before.number + 1, before.version + 1)


def full_disk(*_: object, **__: object) -> None:
    error = sqlite3.OperationalError("database or disk is full")
    error.sqlite_errorcode = sqlite3.SQLITE_FULL
    raise error


async def test_what_the_log_refuses_does_not_count(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last message of an epoch can't be stored: when it is sent again, it ends the epoch."""

    await world.say("car", 0x21, ((1,), 1), ((2,), 1))
    sent = [message(LAPS[0], START_MS + ms, DICE, timed((1,), UPayload(b"x", 4))) for ms in range(3)]
    await world.append_all(world.logs[0], sent[:1])
    asked = ProgressRequest(group="lap")
    change = asked.changes.add(time=LogicalTime(numbers=(1,)), change=-1)
    change.last.add(topic=LAPS[0], id=uuids.to_bytes(sent[2].attributes.id), count=3)
    await world.keeper.progress(CAR, asked)
    with monkeypatch.context() as patch:
        patch.setattr(Store, "commit", full_disk)
        for refused in (sent[1:2], sent[2:]):
            with pytest.raises(UStatusError):
                await world.append_all(world.logs[0], refused)
    assert not any(frontier.ended for frontier in await world.frontiers())
    await world.append_all(world.logs[0], sent[1:2])
    other = message(LAPS[2], START_MS, DICE)  # another record, which makes the keeper publish what it could not before
    await world.append_all(world.logs[0], [sent[2], other])
    ended = [
        (tuple(one.time.numbers), one.incomplete) for frontier in await world.frontiers() for one in frontier.ended
    ]
    assert [time for time, _ in ended] == [(1,)]
    whole = not ended[0][1]
    stored = [epoch for chunk in await world.logs[0].read(0) for epoch in chunk.epochs or () if epoch is not None]
    assert stored.count(Epoch("lap", (1,))) >= 3 or not whole, "what is told as whole is stored"


async def test_a_disk_that_is_full_for_long_makes_no_frontier_long(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Epochs that were open before are reported when capacity is free again; those that ended meanwhile are not."""
    log, seconds = world.logs[0], [START_MS + 1_000 * second for second in range(2 * ACTIVE_MAX)]
    await world.append_all(log, [message(SIGNALS[0], seconds[0], DICE)])
    with monkeypatch.context() as patch:
        patch.setattr(Store, "commit", full_disk)
        for second in seconds[1:]:
            world.now_ms = second
            with pytest.raises(UStatusError):
                await world.append_all(log, [message(SIGNALS[0], second, DICE)])
    await world.append_all(log, [message(SIGNALS[0], seconds[-1] + 1, DICE)])
    frontiers = await world.frontiers("second")
    assert [tuple(one.time.numbers) for frontier in frontiers for one in frontier.ended] == [(START_MS,)]
    assert tuple(frontiers[-1].active[-1].numbers) == (seconds[-1],)
    assert max(map(GroupFrontier.ByteSize, frontiers)) < 500


def test_a_record_that_is_refused_after_its_epoch_was_closed_is_reported_with_its_end() -> None:
    """A closed epoch counts messages on their way to the disk, and may not end before the epochs that precede it."""
    laps = Laps()
    laps.say(((1,), 1), ((2,), 1))
    laps.take(arrived(LAPS[0], START_MS))
    sent = arrived(LAPS[1], START_MS + 1, timed((2,), UPayload(b"x", 4)))
    assert laps.take(sent) == [(2,)]
    assert isinstance(sent.message, UMessage)
    laps.say(((2,), -1), last=[(sent.message, 1)])
    assert laps.ended() == [], "(1,) precedes it"
    laps.kept.refused(sent.publisher, sent.topic, (2,))
    assert laps.kept.has_changes
    assert laps.ended() == []
    laps.say(((1,), -1))
    assert laps.ended() == [((1,), ""), ((2,), epochs_module.REFUSED)]
    laps.kept.refused(sent.publisher, sent.topic, (1,))
    laps.ended()
    assert (1,) in laps.kept.spoiled, "until its end was stored"


async def test_a_group_that_is_not_kept_any_more_ends_what_is_open(world: World) -> None:
    await world.say("car", 0x21, ((1,), 1))
    await world.append_all(world.logs[0], [message(LAPS[0], START_MS, DICE)])
    await world.restart([SECOND])
    (*_, before, last) = await world.frontiers()
    assert (list(last.lower), list(last.active)) == ([], [])
    assert [(tuple(one.time.numbers), one.incomplete) for one in last.ended] == [((1,), epochs_module.ENDED)]
    assert last.version > before.version, "who waits for all logs to know of an epoch knows that it is over"


@pytest.mark.parametrize("others", [[], [SECOND]])
@pytest.mark.parametrize("width_ms", [None, 1_000])
async def test_a_group_that_was_taken_out_may_come_back(
    world: World, others: list[Group], width_ms: int | None
) -> None:
    """With and without another report in between, and in the other order."""
    await world.say("car", 0x21, ((1,), 1))
    await world.append_all(world.logs[0], [message(LAPS[0], START_MS, DICE)])
    await world.restart(others)
    await world.append_all(world.logs[0], [message(topic, START_MS, DICE) for topic in (LAPS[0], SIGNALS[0])])
    (*_, before) = await world.frontiers()
    await world.restart([replace(LAP, width_ms=width_ms)])
    if width_ms is None:
        await world.say("car", 0x21, ((2,), 1))
    await world.append_all(world.logs[0], [message(LAPS[0], START_MS, DICE)])
    (*_, last) = await world.frontiers()
    assert [tuple(time.numbers) for time in last.active] == [(2,) if width_ms is None else (START_MS,)]
    assert last.version > before.version


async def test_another_kind_under_the_same_name_is_refused_at_the_start(world: World) -> None:
    await world.say("car", 0x21, ((1,), 1))
    with pytest.raises(UStatusError, match="give what is kept by bucket another name") as caught:
        await world.restart([Group("lap", LAP.topics, 1_000)])
    assert caught.value.code == UCode.FAILED_PRECONDITION


async def test_an_answer_without_the_frontiers_that_were_asked_for_is_refused(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def none(*_: object) -> bool:
        return True

    monkeypatch.setattr(Poll, "_add_frontiers", none)
    async with GaplessSubscriber(world.client, SIGNALS, assembler=Assembler(SIGNALS)) as subscriber:
        with pytest.raises(UStatusError, match="expected frontiers") as caught:
            await anext(subscriber.epochs())
    assert caught.value.code == UCode.DATA_LOSS


async def test_sampling_and_epochs_exclude_each_other(world: World) -> None:
    with pytest.raises(UStatusError, match="sampled"):
        GaplessSubscriber(world.client, SIGNALS, assembler=Assembler(SIGNALS), sample_period_ms=100)


async def test_the_snapshot_is_as_of_where_reading_begins(world: World) -> None:
    log = world.logs[0]
    for second in range(5):
        await world.append_all(log, [message(SIGNALS[0], START_MS + second * 1_000 + ms, DICE) for ms in (0, 400)])
    chunks = await log.read(0)
    stream = log.known_id(FRONTIERS)
    frontier_seqs = [seq for chunk in chunks for seq, id in zip(chunk.seqs, chunk.streams, strict=True) if id == stream]
    for seq in range(log.newest_seq + 1):
        request = PollRequest(frontiers=True, max_records=1)
        request.positions.add(incarnation=log.incarnation, seq=seq)
        answer = await world.client.poll(request)
        assert answer.has_frontiers
        expected = max((one for one in frontier_seqs if one <= seq), default=0)
        assert [one for batch in answer.frontiers for one in batch.seq] == ([expected] if expected else [])


async def fleet_tells(log: Log, vehicles: int, bytes: int = 0) -> set[str]:
    """Appends a report of an open epoch for each vehicle; returns their authorities."""
    names = [f"v{place}.fleet" for place in range(vehicles)]
    group = GroupFrontier(group="second", number=5, version=5, logs=[OTHER_LOG])
    group.active.add(numbers=[START_MS])
    group.kept.incomplete.add(incomplete="x" * bytes)
    said = UPayload.pack(Frontier(groups=[group]))
    for first in range(0, vehicles, 500):
        sent = [UMessageBuilder.publish(at(name, 0x8005)).build_from_upayload(said) for name in names[first:][:500]]
        await log.append([log.stream_id(one.attributes.source) for one in sent], sent)
    return set(names)


@pytest.mark.parametrize(("vehicles", "bytes"), [(2 * poll_module.FRONTIER_TOPICS_MAX + 100, 0), (40, 60_000)])
async def test_a_fleet_tells_in_pages_how_far_it_has_come(
    world: World, vehicles: int, bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For any number of vehicles and any size of report, no answer is too long for a transport."""
    log, topic, polled, has_frontiers = world.logs[0], SIGNALS[0], list[PollResponse](), asyncio.Event()
    names = await fleet_tells(log, vehicles, bytes)
    poll = HistoryClient.poll

    async def counted(self: HistoryClient, *arguments: Any, **more: Any) -> PollResponse:
        polled.append(await poll(self, *arguments, **more))
        if polled[-1].has_frontiers:
            has_frontiers.set()
        return PollResponse.FromString(polled[-1].SerializeToString())

    monkeypatch.setattr(HistoryClient, "poll", counted)
    at_end = await world.client.frontiers(PollRequest(latest=True))
    at_begin = await world.client.frontiers(PollRequest(earliest=True))
    assert (sum(len(batch.seq) for batch in at_end), at_begin) == (vehicles + 1, []), "with that of the gateway"
    assembler = Assembler([topic], each=True)
    has_frontiers.clear()
    async with GaplessSubscriber(
        world.client, [topic], start=PollRequest(latest=True), assembler=assembler, mode="poll"
    ) as subscriber:
        reading = asyncio.create_task(anext(subscriber.epochs()))
        await asyncio.wait_for(has_frontiers.wait(), 30)
        await world.append_all(log, [message(topic, START_MS, DICE), message(topic, START_MS + 10_000, DICE)])
        await asyncio.wait_for(reading, 30)
    assert len([name for name, _, upper in assembler.frontiers() if upper == {(START_MS,)}]) >= len(names)
    assert max(answer.ByteSize() for answer in polled) < 1 << 20
    pages = [answer for answer in polled if answer.next_frontiers_page]
    assert len(pages) >= 4
    assert not any(answer.batches for answer in pages)


async def test_pages_without_end_are_read_no_further(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    async def endless(answer: Poll) -> bool:
        answer.response.next_frontiers_page = bytes(24)
        answer.response.frontiers.add(incarnation=LOG, message=[bytes(500_000)])
        return False

    monkeypatch.setattr(Poll, "_add_frontiers", endless)
    monkeypatch.setattr("history.reading.client.FRONTIERS_BYTES_MAX", 5 << 20)
    with pytest.raises(UStatusError, match="name the authorities") as caught:
        await world.client.frontiers(PollRequest())
    assert caught.value.code == UCode.RESOURCE_EXHAUSTED
    async with GaplessSubscriber(world.client, SIGNALS, assembler=Assembler(SIGNALS)) as subscriber:
        with pytest.raises(UStatusError, match="name the authorities"):
            await asyncio.wait_for(anext(subscriber.epochs()), 30)


async def test_a_page_that_nobody_gave_is_refused_or_the_first(world: World) -> None:
    names = await fleet_tells(world.logs[0], 3)
    with pytest.raises(UStatusError, match="of the answer before") as caught:
        await world.client.poll(PollRequest(frontiers=True, frontiers_page=b"x"))
    assert caught.value.code == UCode.INVALID_ARGUMENT
    for page in (b"\xff" * 24, bytes(24), OTHER_LOG + b"\x80" + bytes(7)):
        answer = await world.client.poll(PollRequest(latest=True, frontiers=True, frontiers_page=page))
        assert sum(len(batch.seq) for batch in answer.frontiers) == len(names) + 1, "with that of the gateway"
    none = PollRequest(latest=True, frontiers=True, frontiers_page=world.logs[0].incarnation + b"\x7f" + bytes(7))
    assert (await world.client.poll(none)).has_frontiers


def test_a_cursor_file_with_epochs_that_are_none_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "cursor.json"
    path.write_text('{"positions": {}, "known": {}, "idle": [], "epochs": {"groups": [{"group": 1}]}}')
    with pytest.raises(UStatusError, match="not a cursor file"):
        CursorFile(path).load()


# -- the assembler by itself


class FakeLog:
    """Records of a log, numbered."""

    def __init__(self, log: bytes = LOG, keeper: str = "gateway") -> None:
        self.log, self.topic, self.seq, self.version = log, at(keeper, 0x8005), 0, 0
        self.logs = [log]  # of its keeper

    def data(self, time: Time, topic: UUri = SIGNALS[0]) -> Record:
        self.seq += 1
        return Record(self.log, self.seq, 0, 0, message(topic, START_MS, DICE), None, Epoch("second", time))

    def frontier(self, lower: Sequence[Time], active: Sequence[Time], number: int = 0, **more: object) -> Record:
        self.seq, self.version = self.seq + 1, self.version + 1
        group = GroupFrontier(group="second", number=number or self.version, version=self.version, logs=self.logs)
        group.lower.extend(LogicalTime(numbers=time) for time in lower)
        group.active.extend(LogicalTime(numbers=time) for time in active)
        said = Frontier(groups=[group])
        sent = UMessageBuilder.publish(self.topic).pack(said)
        return Record(self.log, self.seq, 0, 0, sent)

    def junk(self) -> Record:
        self.seq += 1
        sent = UMessageBuilder.publish(FRONTIERS).build_from_upayload(UPayload(b"\xff\xff", 2))
        return Record(self.log, self.seq, 0, 0, sent)


def times(assembled: Sequence[Assembled]) -> list[tuple[Time, str]]:
    return [(one.epoch.time, one.incomplete) for one in assembled if one.epoch is not None]


def test_the_documents_example_at_the_subscriber() -> None:
    """completed 0-2, active 3 and 5, latent 4 and 6 on: it sees 6, and neither 5 nor 4."""
    source, reader = FakeLog(), Assembler()
    reader.begin([source.frontier([(3,)], [(3,), (5,)], number=9)], 0.0)
    came = [source.data((time,)) for time in (3, 4, 5, 6)]
    assert reader.take(came, 0.0) == []
    assert times(reader.take([source.frontier([(7,)], [(7,)])], 0.0)) == [((6,), "")]
    assert reader.dropped["filtered"] == 3


def test_incomparable_times_are_not_dropped() -> None:
    source, reader = FakeLog(), Assembler()
    reader.begin([source.frontier([(0, 0)], [(0, 0), (2, 1)], number=9)], 0.0)
    reader.take([source.data(time) for time in ((0, 2), (2, 0), (2, 1), (3, 0), (1, 1))], 0.0)
    assert times(reader.take([source.frontier([], [])], 0.0)) == [((0, 2), ""), ((3, 0), "")]


def test_a_coarser_filter_and_none() -> None:
    source = FakeLog()
    coarse, none = Assembler(beyond={"second": [(6,)]}), Assembler(filter="all")
    snapshot = source.frontier([(3,)], [(3,), (5,)], number=9)
    came = [*(source.data((time,)) for time in (5, 6, 7)), source.frontier([(9,)], [(9,)])]
    for reader in (coarse, none):
        reader.begin([snapshot], 0.0)
    assert times(coarse.take(came, 0.0)) == [((7,), "")]
    assert times(none.take(came, 0.0)) == [((5,), BEGUN), ((6,), ""), ((7,), "")]


def test_several_logs_of_one_group_are_over_when_all_are() -> None:
    one, other, reader = FakeLog(LOG), FakeLog(OTHER_LOG, "trailer"), Assembler()
    reader.begin([one.frontier([(1,)], [(1,)], 9), other.frontier([(1,)], [(1,), (2,)], 9)], 0.0)
    reader.take([one.data((2,)), one.data((3,)), other.data((3,))], 0.0)
    assert times(reader.take([one.frontier([(4,)], [(4,)])], 0.0)) == []
    assert times(reader.take([other.frontier([(4,)], [(4,)])], 0.0)) == [((3,), "")]
    assert reader.dropped["filtered"] == 1


def test_a_silent_log_is_waited_for_and_then_reported() -> None:
    one, other, reader = FakeLog(LOG), FakeLog(OTHER_LOG, "trailer"), Assembler(timeout_s=10)
    reader.begin([one.frontier([(1,)], [], 9), other.frontier([(1,)], [], 9)], 0.0)
    reader.take([one.data((2,)), one.frontier([(4,)], [(4,)])], 5.0)
    assert reader.due == 10.0
    assert reader.overdue(9.9) == []
    (given_up,) = reader.overdue(10.0)
    assert "trailer" in given_up.incomplete
    (rest,) = reader.take([other.data((2,)), other.frontier([(4,)], [(4,)])], 11.0)
    assert (rest.epoch, rest.incomplete) == (given_up.epoch, REST)


def test_after_a_gap_what_was_open_may_not_be_whole() -> None:
    source, reader = FakeLog(), Assembler()
    reader.begin([source.frontier([(1,)], [(1,)], 9)], 0.0)
    reader.take([source.data((2,))], 0.0)
    reader.lose()
    reader.begin([source.frontier([(2,)], [(2,), (3,)], 12)], 0.0)
    reader.take([source.data((3,)), source.data((4,))], 0.0)
    assert times(reader.take([source.frontier([], [])], 0.0)) == [((2,), MISSED), ((3,), MISSED), ((4,), "")]


def test_where_the_log_went_back_what_was_open_may_not_be_whole() -> None:
    """A disk was damaged. The reader had read everything, so it gets no gap; how (1) and (2) ended is lost."""
    source, reader = FakeLog(), Assembler()
    opened = [
        source.frontier([(1,)], [(1,)]),
        source.frontier([(1,)], [(1,), (2,)]),
        source.frontier([(1,)], [(1,), (2,)]),
    ]
    assert reader.take([*opened, source.data((1,)), source.data((2,))], 0.0) == []
    source.version = 1
    assert times(reader.take([source.frontier([], [])], 0.0)) == [((1,), MISSED), ((2,), MISSED)]
    later = [source.frontier([(3,)], [(3,)]), source.data((3,)), source.frontier([], [])]
    assert times(reader.take(later, 0.0)) == [((3,), "")]


def test_what_is_too_big_is_handed_over_in_parts() -> None:
    source, reader = FakeLog(), Assembler(bytes_max=10_000)
    reader.begin([source.frontier([(1,)], [], 9)], 0.0)
    handed = [part for _ in range(10) for part in reader.take([source.data((2,)) for _ in range(5)], 0.0)]
    handed += reader.take([source.frontier([(3,)], [])], 0.0)
    assert sum(len(one.records) for one in handed) == 50
    assert not any(one.is_complete for one in handed)


def test_what_can_not_be_read_or_compared_is_counted() -> None:
    source, reader = FakeLog(), Assembler()
    reader.begin([source.frontier([(1,)], [(1,)], 9)], 0.0)
    reader.take([source.data((2,))], 0.0)
    assert times(reader.take([source.junk(), source.frontier([(1, 2)], []), source.data((1, 2))], 0.0)) == [
        ((1, 2), ODD)
    ]
    sent = UMessageBuilder.publish(at("hub", 0x8006)).build_from_upayload(UPayload(b"\xff\xff", 2))
    reader.take([Record(LOG, 99, 0, 0, sent)], 0.0)
    assert reader.dropped["unreadable"] == 3
    assert times(reader.take([source.frontier([(3,)], [])], 0.0)) == [((2,), "")]


def test_a_group_may_start_again_with_times_of_another_length() -> None:
    source, other, reader = FakeLog(), FakeLog(OTHER_LOG), Assembler()
    reader.begin([source.frontier([(1,)], [(1,)], 9)], 0.0)
    reader.take([source.data((2,)), source.frontier([], [])], 0.0)
    came = [other.frontier([(0, 1)], [(0, 1)], 1), other.data((0, 1)), other.frontier([(1, 0)], [])]
    came[0].message.payload = _opened(came[0].message.payload)
    assert times(reader.take(came, 0.0)) == [((0, 1), "")]
    assert reader.dropped["unreadable"] == 0


def _opened(payload: bytes) -> bytes:
    frontier = Frontier.FromString(payload)
    for group in frontier.groups:
        group.opened.extend(group.active)
    return frontier.SerializeToString()


def reborn(reader: Assembler, source: FakeLog, held: Sequence[Assembled] = (), seq: int = 0) -> Assembler:
    """Returns a restarted assembler, with its state saved when all of `source`, or up to `seq`, was read and `held` not
    taken."""
    positions = reader.safe({source.log: seq or source.seq}, held)
    saved = json.loads(json.dumps(reader.save(positions, held)))
    again = Assembler(timeout_s=10)
    again.restore(saved)
    return again


@pytest.mark.parametrize("restarts", [pytest.param(False, marks=full), True])
def test_what_a_silent_gateway_brings_later_is_the_rest_after_a_restart_and_an_hour_too(restarts: bool) -> None:
    """One of two vehicles is away for longer than each epoch can be known by itself."""
    one, other, reader = FakeLog(LOG), FakeLog(OTHER_LOG, "trailer"), Assembler(timeout_s=10)
    snapshot = [one.frontier([(0,)], [], 9), other.frontier([(0,)], [], 9)]
    reader.begin(snapshot, 0.0)
    handed: list[Assembled] = []
    seconds = 10_000
    for second in range(1, seconds):
        now = second * 20.0
        handed += reader.take([one.data((second,)), one.frontier([(second + 1,)], [])], now)
        handed += reader.overdue(now + 15.0)
    assert [time for time, _ in times(handed)] == [(second,) for second in range(1, seconds)]
    if restarts:
        reader = reborn(reader, one)
        reader.begin([one.frontier([(seconds,)], []), snapshot[1]], now)
    for second in (1, 5, seconds - 1):
        came = [other.data((second,)), other.frontier([(second + 1,)], [])]
        assert times(reader.take(came, now + 20.0)) == [((second,), REST)]
    assert times(reader.take([one.data((seconds,)), one.frontier([(seconds + 1,)], [])], now + 20.0)) == []
    assert times(reader.take([other.frontier([(seconds + 1,)], [])], now + 20.0)) == [((seconds,), "")]


def test_what_was_handed_over_and_not_taken_is_no_rest_after_a_restart() -> None:
    source, reader = FakeLog(), Assembler()
    snapshot = source.frontier([(0,)], [], 9)
    reader.begin([snapshot], 0.0)
    seconds = [(second,) for second in range(1, 1_000)]
    came = [source.data(second) for second in seconds] + [source.frontier([(1_000_000,)], [])]
    held = reader.take(came, 0.0)
    assert [time for time, _ in times(held)] == seconds
    again = reborn(reader, source, held=held[1:])
    again.begin([snapshot], 0.0)
    assert times(again.take(came, 0.0)) == [(second, "") for second in seconds[1:]]


def test_what_was_not_taken_comes_after_a_second_restart_that_comes_before_it_was_read_again() -> None:
    source, reader = FakeLog(), Assembler()
    snapshot = source.frontier([(0,)], [], 9)
    reader.begin([snapshot], 0.0)
    came = [source.data((1,)), source.frontier([(2,)], []), source.data((2,)), source.frontier([(3,)], [])]
    held = reader.take(came, 0.0)
    reader = reborn(reader, source, held=held)
    reader.begin([snapshot], 0.0)
    assert times(reader.take(came[:2], 0.0)) == [((1,), "")]
    reader = reborn(reader, source, seq=came[1].seq)
    reader.begin([came[1]], 0.0)
    assert times(reader.take(came[2:], 0.0)) == [((2,), "")]
    reader = reborn(reader, source)
    assert reader.save({source.log: source.seq})["groups"][0]["open"] == [], "it was read again, and taken"


def test_a_rest_that_was_not_taken_comes_after_a_second_restart_that_comes_before_it_was_read_again() -> None:
    source, reader = FakeLog(), Assembler()
    reader.begin([source.frontier([(0,)], [], 9)], 0.0)
    assert times(reader.take([source.data((1,)), source.frontier([(2,)], [])], 0.0)) == [((1,), "")]
    snapshot = source.frontier([(2,)], [])
    came = [source.frontier([(2,)], []), source.data((1,)), source.frontier([(3,)], [])]
    held = reader.take(came, 0.0)
    reader = reborn(reader, source, held=held)
    reader.begin([snapshot], 0.0)
    assert reader.take(came[:1], 0.0) == []
    reader = reborn(reader, source, seq=came[0].seq)
    reader.begin([snapshot], 0.0)
    assert times(reader.take(came[1:], 0.0)) == times(held) == [((1,), REST)]


def test_what_waits_for_nothing_does_not_come_again_because_something_else_waited() -> None:
    source, reader = FakeLog(), Assembler()
    plain = [Record(LOG, seq, 0, 0, message(SIGNALS[1], START_MS, DICE)) for seq in (3, 4, 5)]
    reader.begin([source.frontier([(1,)], [(1,)], 9)], 0.0)
    (first,) = reader.take([source.data((2,)), *plain[:1]], 0.0)
    (held,) = reader.take(plain[1:], 0.0)
    source.seq = 5
    for not_taken, comes in (([], []), ([held], plain[1:])):
        again = reborn(reader, source, not_taken)
        assert [record for one in again.take(plain, 0.0) for record in one.records] == comes
    again = reborn(reader, source)
    again.lose({LOG})
    (reread,) = again.take(plain, 0.0)
    assert reread.records == plain, "the log went back: these are other records"
    assert first.records == plain[:1]


@pytest.mark.parametrize("durable_first", [False, True])
def test_what_was_over_in_a_log_before_it_was_read_is_not_whole_by_what_another_one_has(durable_first: bool) -> None:
    """A follower has all of the log in memory, and of the one on disk what came since it follows."""
    durable, memory, reader = FakeLog(LOG), FakeLog(OTHER_LOG), Assembler()
    durable.version = 2

    def say(log: FakeLog, lower: int, active: Sequence[Time], number: int, passed: Sequence[Time] = ()) -> Record:
        record = log.frontier([(lower,)], active, number)
        frontier = Frontier.FromString(record.message.payload)
        (group,) = frontier.groups
        group.logs[:] = [LOG, OTHER_LOG]
        group.opened.extend(group.active)
        group.kept.passed.extend(LogicalTime(numbers=time) for time in passed)
        record.message.payload = frontier.SerializeToString()
        return record

    in_memory = [say(memory, 1, [(1,)], 1), memory.data((1,)), say(memory, 2, [(2,)], 2), memory.data((2,))]
    in_memory += [say(memory, 9, [(9,)], 3), memory.data((9,))]
    on_disk = [say(durable, 9, [(9,)], 40, [(2,)]), durable.data((9,))]
    handed = reader.take([*on_disk, *in_memory] if durable_first else [*in_memory, *on_disk], 0.0)
    memory.version = durable.version = 50
    handed += reader.take([say(durable, 10, [], 41), say(memory, 10, [], 4)], 0.0)
    assert times(handed) == [((1,), MISSED), ((2,), MISSED), ((9,), "")]


def test_what_a_filter_covers_is_dropped_also_of_a_log_without_frontiers() -> None:
    source, other, reader = FakeLog(LOG), FakeLog(OTHER_LOG, "trailer"), Assembler(beyond={"second": [(4,)]})
    reader.begin([source.frontier([(1,)], [(2,)], 9)], 0.0)
    assert reader.take([other.data((2,)), other.data((4,)), other.data((5,))], 0.0) == []
    assert times(reader.take([source.frontier([(6,)], [])], 0.0)) == [((5,), UNREPORTED)]
    assert reader.dropped["begun"] == 2


@pytest.mark.parametrize("by_snapshot", [False, True])
def test_what_had_begun_in_a_log_that_is_new_drops_nothing_of_the_others(by_snapshot: bool) -> None:
    """A reader is behind in one log; the other log is newer, and its beginning is already removed."""
    source, other, reader = FakeLog(LOG), FakeLog(OTHER_LOG, "trailer"), Assembler()
    reader.begin([source.frontier([(1,)], [], 9)], 0.0)
    assert reader.take([source.data((2,)), source.data((3,))], 0.0) == []
    begins = other.frontier([(9,)], [(9,)], 12)
    if by_snapshot:
        reader.begin([begins], 0.0)
    else:
        reader.take([other.data((3,)), begins], 0.0)
    came = [
        source.data((2,)),
        source.data((8,)),
        other.data((9,)),
        source.frontier([(10,)], []),
        other.frontier([(10,)], []),
    ]
    handed = reader.take(came, 0.0)
    assert [time for time, _ in times(handed)] == [(2,), (3,), (8,), (9,)]
    assert {why for _, why in times(handed)} <= {MISSED, UNREPORTED}
    assert [len(one.records) for one in handed] == [2, 1 if by_snapshot else 2, 1, 1]
    opened = [one.frontier([(11,)], [(11,)]) for one in (source, other)]
    over = [one.frontier([(12,)], []) for one in (source, other)]
    assert times(reader.take([*opened, source.data((11,)), other.data((11,)), *over], 0.0)) == [((11,), "")]


def test_a_vehicle_whose_clock_is_years_ahead_makes_nobody_else_late() -> None:
    """The others are parked when it ends its epochs."""
    one, other, reader = FakeLog(LOG), FakeLog(OTHER_LOG, "trailer"), Assembler()
    reader.begin([one.frontier([], [], 9), other.frontier([], [], 9)], 0.0)
    future = [(1 << 40) + second for second in range(1_000)]
    handed = [epoch for second in future for epoch in reader.take([other.data((second,)), other.frontier([], [])], 0.0)]
    assert [time for time, _ in times(handed)] == [(second,) for second in future]
    for second in range(1, 1_000):
        opened = one.frontier([(second,)], [(second,)])
        assert times(reader.take([opened, one.data((second,)), one.frontier([], [])], 0.0)) == [((second,), "")]


def test_whatever_logs_tell_takes_bounded_memory_and_none_of_their_records_is_lost() -> None:
    source, reader = FakeLog(), Assembler(timeout_s=10)
    frontiers = []
    for place in range(20 * LOG_GROUPS_MAX):
        one = source.frontier([(1,)], [(1,)])
        frontier = Frontier.FromString(one.message.payload)
        frontier.groups[0].group = f"g{place}"
        one.message.payload = frontier.SerializeToString()
        frontiers.append(one)
    reader.take(frontiers, 0.0)
    assert reader.dropped["unreadable"] == 19 * LOG_GROUPS_MAX
    assert len(list(reader.frontiers())) == LOG_GROUPS_MAX

    def unheard(groups: int) -> list[Record]:
        return [replace(source.data((5,)), epoch=Epoch(f"unheard{place}", (5,))) for place in range(groups)]

    reader.take(unheard(100), 0.0)
    assert reader.dropped["begun"] == 100
    handed = [*reader.take(unheard(100), 20.0), *reader.overdue(20.0)]
    assert [why for _, why in times(handed)] == [UNREPORTED] * 100
    reader.take(unheard(4 * UNREPORTED_MAX), 20.0)
    assert len(reader.overdue(40.0)) + reader.dropped["begun"] == 100 + 4 * UNREPORTED_MAX
    assert len(list(reader.frontiers())) <= LOG_GROUPS_MAX + UNREPORTED_MAX + 1


def test_what_begins_in_between_takes_away_what_is_open_of_these_topics_alone() -> None:
    source = FakeLog()
    readers = [Assembler([SIGNALS[0]]), Assembler([SIGNALS[1]])]
    said = Beginning(topics=[SIGNALS[0]], service=at("gateway"))
    snapshot = source.frontier([(1,)], [(1,)], 9)  # of before what came
    came = [
        source.data((2,)),
        source.frontier([(2,)], [(2,)]),
        Record(LOG, 99, 0, 0, UMessageBuilder.publish(at("hub", 0x8006)).pack(said)),
        source.data((2,)),
        source.data((3,)),
        source.frontier([(4,)], []),
    ]
    for reader in readers:
        reader.begin([snapshot], 0.0)
    assert [times(reader.take(came, 0.0)) for reader in readers] == [
        [((2,), BEGUN_THERE), ((3,), "")],
        [((2,), ""), ((3,), "")],
    ]


def test_delivered_records_are_not_reported_again_where_something_begins() -> None:
    source, reader = FakeLog(), Assembler(SIGNALS)
    reader.begin([source.frontier([(1,)], [], 9)], 0.0)
    reader.take([source.frontier([(2,)], [(2,), (3,)], 10), source.data((2,)), source.data((3,))], 0.0)
    assert reader.due == 60.0
    assert [time for time, _ in times(reader.overdue(60.0))] == [(2,), (3,)]
    said = UMessageBuilder.publish(at("hub", 0x8006)).pack(Beginning(topics=SIGNALS, service=at("gateway")))
    begun = Record(LOG, 99, 0, 0, said)
    assert times(reader.take([source.data((2,)), begun], 61.0)) == [((2,), REST)]


def test_an_epoch_that_began_meanwhile_is_reported_once_though_it_is_read_again_after_a_restart() -> None:
    source, reader = FakeLog(), Assembler(SIGNALS)
    snapshot = source.frontier([(1,)], [], 9)
    reader.begin([snapshot], 0.0)
    said = UMessageBuilder.publish(at("hub", 0x8006)).pack(Beginning(topics=SIGNALS, service=at("gateway")))
    opened = source.frontier([(2,)], [(2,)], 10)
    source.seq += 1
    came = [opened, Record(LOG, source.seq, 0, 0, said)]
    lost = reader.take(came, 0.0)
    assert times(lost) == [((2,), BEGUN_THERE)]
    for not_taken in ([], lost):
        again = reborn(reader, source, not_taken)
        again.begin([snapshot], 0.0)
        assert times(again.take(came, 0.0)) == times(not_taken), "something else holds the cursor back"


def test_where_frontiers_were_missed_the_next_one_is_the_snapshot() -> None:
    source, reader = FakeLog(), Assembler(SIGNALS)
    said = Beginning(topics=[*SIGNALS, uris.parse("//*/FFFF0004/1/8005")], service=at("gateway"))
    reader.begin([source.frontier([(1,)], [(1,)], 9)], 0.0)
    came = [
        source.data((2,)),
        source.frontier([(2,)], [(2,)]),
        Record(LOG, 99, 0, 0, UMessageBuilder.publish(at("hub", 0x8006)).pack(said)),
        source.frontier([(3,)], [(3,)], 40),  # (3,) was opened in between
        source.data((3,)),
        source.data((4,)),
        source.frontier([(5,)], [], 41),
    ]
    assert times(reader.take(came, 0.0)) == [((2,), BEGUN_THERE), ((4,), "")]


def test_frontiers_that_somebody_on_the_way_was_not_given_are_missed() -> None:
    """Rules may withdraw a topic from a follower for a while, and grant it again without a report."""
    source, followed, own = FakeLog(), Assembler(), Assembler()
    came = [
        source.frontier([(2,)], [(2,)], 10),
        source.data((2,)),
        source.frontier([(3,)], [(3,)], 13),
        source.data((3,)),
        source.data((4,)),
        source.frontier([(5,)], [], 14),
    ]
    first = source.frontier([(1,)], [], 9)
    for reader, there in ((own, None), (followed, Origin(LOG, 1))):
        reader.begin([replace(first, origin=there)], 0.0)
        handed = reader.take([replace(one, origin=there) for one in came], 0.0)
        lost = BEGUN_THERE if there else ""
        assert times(handed) == [((2,), lost), ((3,), lost), ((4,), "")]


def test_who_waits_for_one_keeper_does_not_ask_again_and_again_because_another_one_is_silent() -> None:
    """A parked topic holds nothing: its silence makes no epoch overdue."""
    parked, drives, reader = FakeLog(), FakeLog(log=b"drives" + bytes(10)), Assembler()
    reader.begin([parked.frontier([], [], 9), drives.frontier([(1,)], [], 9)], 0.0)
    assert reader.due is None
    assert reader.overdue(50.0) == []
    reader.take([drives.frontier([(2,)], [(2,)], 10), drives.data((2,))], 100.0)
    for now in (100.0, 130.0, 159.9):
        assert reader.overdue(now) == []
        assert reader.due == 160.0
    (one,) = reader.overdue(160.0)
    assert one.incomplete == "gateway has reported nothing for 60.0 s"
    assert reader.due is None
