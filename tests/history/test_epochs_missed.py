"""What buckets may lack: time in which nobody listened, late records, clocks that differ, logs that are read later."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Sequence
from dataclasses import replace

import pytest

from history.epochs import groups
from history.epochs.assembling import BEGUN_THERE, MISSED, Assembled, Assembler
from history.epochs.groups import IDLE_REPORT_S_MAX, Buckets, Group, IncomingRecord
from history.epochs.merging import MISSED_EACH_MAX, REST
from history.log.log import Log
from history.records.chunk import Origin
from history.records.epoch import Time
from history.records.record import Record
from history.service.keeper import Keeper
from tests.history.test_epochs import DICE, LOG, OTHER_LOG, SECOND, FakeLog, arrived, at, reborn, times
from tests.history.test_epochs_whole import FRONTIERS, SIGNALS, START_MS, inline, message
from tests.history.world import virtually
from uprotocol import uri as uris
from uprotocol.core.ustreamer.v1.ustreamer_pb2 import Beginning, Frontier, GroupFrontier, LogicalTime
from uprotocol.message import UMessageBuilder
from uprotocol.v1.uri_pb2 import UUri

OTHER_CAR_SIGNAL = uris.uri("truck", 0x10, 1, 0x8001)
BOTH = Group("second", [SIGNALS[0], OTHER_CAR_SIGNAL], 1_000, 300, 5_000, 2_000)


class Watch:
    """Buckets of one second at a clock that the test sets, and what they report. Times are those since START_MS."""

    def __init__(self, group: Group = SECOND) -> None:
        self.kept, self.now_ms = Buckets(group), START_MS
        self.kept.start(self.now_ms, self.now)

    @property
    def now(self) -> float:
        return (self.now_ms - START_MS) / 1_000

    def at(self, ms: int) -> None:
        """Let the clock go on to `ms`, with everything that is due on the way."""
        while (due := self.kept.due) is not None and START_MS + due * 1_000 <= START_MS + ms:
            self.now_ms = max(self.now_ms, START_MS + round(due * 1_000 + 0.5))
            self.kept.tick(self.now_ms, self.now)
        self.now_ms = START_MS + ms

    def take(self, *records: tuple[UUri, int]) -> list[int]:
        """Takes records of these topics and id times; returns the second of the epoch of each."""
        found = self.kept.assign([self._record(*one) for one in records], self.now_ms, self.now)
        self.kept.settle(self.now_ms, self.now)
        return [(epoch.time[0] - START_MS) // 1_000 for epoch in found if epoch is not None]

    @staticmethod
    def _record(topic: UUri, created_ms: int) -> IncomingRecord:
        return arrived(topic, START_MS + created_ms)

    def report(self) -> GroupFrontier:
        return self.kept.report()


def seconds(ended: Sequence[GroupFrontier.Ended]) -> dict[int, str]:
    return {(one.time.numbers[0] - START_MS) // 1_000: one.incomplete for one in ended}


def spans(report: GroupFrontier) -> list[tuple[int, int]]:
    """First and last missed second."""
    return [
        ((one.first.numbers[0] - START_MS) // 1_000, (one.last.numbers[0] - START_MS) // 1_000) for one in report.missed
    ]


# -- clocks


def test_a_clock_that_is_ahead_makes_no_other_publisher_late_and_is_named() -> None:
    watch, ended = Watch(BOTH), dict[int, str]()
    for ms in range(0, 20_000, 250):
        watch.at(ms)
        assert watch.take((SIGNALS[0], ms), (OTHER_CAR_SIGNAL, ms + 3_000)) == [ms // 1_000, (ms + 3_000) // 1_000]
        ended |= seconds(watch.report().ended)
    assert set(ended) == set(range(19)), "each bucket ends when our clock is there"
    assert set(ended.values()) == {""}
    assert watch.kept.counts["late"] == 0
    assert [(who, ahead_ms) for who, (ahead_ms, _) in watch.kept.clocks_ahead.items()] == [(("truck", 0x10), 3_000)]
    watch.at(20_000 + 61_000)
    assert not watch.kept.clocks_ahead, "a minute after its last message"


def test_the_last_bucket_of_a_clock_that_is_ahead_ends_when_our_clock_is_there() -> None:
    watch = Watch()
    assert watch.take((SIGNALS[0], 100), (SIGNALS[0], 3_100)) == [0, 3]
    watch.at(1_299)
    assert not watch.report().ended
    watch.at(1_301)
    assert seconds(watch.report().ended) == {0: ""}
    watch.at(4_900)
    assert not watch.report().ended, "its time-out counts from its time"
    watch.at(5_100)
    assert seconds(watch.report().ended) == {3: groups.SILENT}


def test_a_bucket_that_is_ahead_times_out_after_its_time_also_after_a_restart() -> None:
    watch = Watch()
    watch.take((SIGNALS[0], 100), (SIGNALS[0], 4_100))
    after = Watch()
    after.kept = Buckets(SECOND)
    after.kept.resume(watch.report(), after.now)
    after.kept.start(after.now_ms, after.now)
    after.at(5_900)
    assert 4 not in seconds(after.report().ended)
    after.at(6_100)
    assert 4 in seconds(after.report().ended)


def test_both_epochs_of_a_late_record_say_so() -> None:
    watch = Watch()
    watch.at(1_400)
    watch.take((SIGNALS[0], 100), (SIGNALS[0], 1_350))
    assert seconds(watch.report().ended) == {0: ""}
    assert watch.take((SIGNALS[1], 200), (SIGNALS[1], 300), (SIGNALS[1], -4_000)) == [1, 1, 1]
    late = seconds(watch.report().late)
    assert set(late) == {0, -4}
    assert all("car/10 came too late, and are in the epoch" in why for why in late.values())
    watch.at(2_400)
    watch.take((SIGNALS[0], 2_400))
    (why,) = seconds(watch.report().ended).values()
    assert why == "messages of car/10 came too late for their own epochs, and are in it"
    assert not watch.report().late, "once"


def test_many_late_epochs_are_reported_in_bounded_reports() -> None:
    watch = Watch()
    watch.take((SIGNALS[0], 0))
    watch.take(*((SIGNALS[0], -1_000 * second) for second in range(3, 3_000)))
    assert len(watch.report().late) == groups.LATE_REPORTED_MAX
    assert watch.kept.counts["late"] > 2_900


def test_an_epoch_says_what_ids_are_in_it_that_are_too_far_ahead() -> None:
    watch = Watch()
    watch.take((SIGNALS[0], 100))
    assert watch.take((SIGNALS[1], 60_000)) == [-1], "the lowest that may come"
    watch.at(1_500)
    watch.take((SIGNALS[0], 1_500))
    ended = seconds(watch.report().ended)
    assert "whose ids are 60.0 s ahead of the gateway's clock" in ended[-1]
    assert ended[0] == ""


# -- a group in which nothing comes


def test_while_nothing_comes_the_frontier_follows_the_clock_and_reports_ever_less_often() -> None:
    watch, moved, before = Watch(), list[float](), set[int]()
    watch.take((SIGNALS[0], 0))
    for ms in range(0, 600_000, 100):
        watch.at(ms)
        lower = {(one.numbers[0] - START_MS) for one in watch.kept.report().lower}
        if lower != before:
            moved.append(ms / 1_000)
        before = lower
        behind_ms = ms - min(lower)
        assert behind_ms <= SECOND.timeout_ms + 1_000 + 1_000 * (IDLE_REPORT_S_MAX + 1)
    pauses = [later - earlier for earlier, later in itertools.pairwise(moved)]
    assert pauses[2] <= 2.0
    assert max(pauses) <= IDLE_REPORT_S_MAX + 1.0
    assert len(moved) < 70, "not one each second: a flash would wear"
    assert watch.take((SIGNALS[0], 599_900)) == [599]


def test_what_a_quiet_group_brings_within_its_time_out_has_its_own_epoch() -> None:
    watch = Watch()
    watch.at(60_000)
    assert watch.take((SIGNALS[0], 58_500), (SIGNALS[0], 58_900)) == [58, 58]
    assert watch.kept.counts["late"] == 0


# -- time in which nobody listened


def test_each_bucket_in_which_messages_may_be_missed_is_reported_and_incomplete() -> None:
    watch = Watch()
    watch.take((SIGNALS[0], 0), (SIGNALS[0], 500))
    watch.at(600)
    watch.kept.away("uplink", watch.now_ms, "the network was away")
    watch.at(4_600)
    watch.kept.back("uplink", watch.now_ms)
    watch.take((SIGNALS[0], 4_700))
    watch.at(6_700)
    watch.take((SIGNALS[0], 6_000), (SIGNALS[0], 6_700))
    report = watch.report()
    missed = {second for first, last in spans(report) for second in range(first, last + 1)}
    assert missed >= {1, 2, 3, 4}
    assert max(missed) == 4
    ended = seconds(report.ended)
    assert ended.keys() == {0, 4}, "those with records"
    assert all("the network was away" in why for why in ended.values())
    watch.at(8_000)
    watch.take((SIGNALS[0], 8_000))
    assert seconds(watch.report().ended) == {6: ""}
    assert not watch.report().missed


def test_what_was_missed_is_reported_before_its_epochs_are_over() -> None:
    """Otherwise a reader of several logs takes them for whole."""
    watch = Watch()
    watch.take((SIGNALS[0], 0))
    watch.kept.away("uplink", watch.now_ms, "the network was away")
    covered: set[int] = set()
    for ms in range(100, 20_000, 100):
        watch.at(ms)
        report = watch.report()
        covered |= {second for first, last in spans(report) for second in range(first, last + 1)}
        (lower,) = {(one.numbers[0] - START_MS) // 1_000 for one in report.lower}
        assert set(range(1, lower)) <= covered


class Gateway:
    """A keeper of one log that is stopped and started at a clock that the test sets."""

    def __init__(self, log: Log, group: Group = SECOND, *, receives: bool = True) -> None:
        self.log, self.group, self.receives, self.now_ms = log, group, receives, START_MS

    async def start(self) -> None:
        self.keeper = Keeper(FRONTIERS, [self.group], [self.log], lambda: self.now_ms, receives=self.receives)
        await self.keeper.open()

    async def take(self, *created_ms: int, topic: UUri = SIGNALS[0]) -> None:
        sent = [message(topic, START_MS + ms, DICE) for ms in created_ms]
        await self.log.append([self.log.stream_id(one.attributes.source) for one in sent], sent)

    async def records(self) -> list[Record]:
        found = []
        for chunk in await self.log.read(0, max_records=1 << 20, max_bytes=1 << 30):
            for place, (seq, one) in enumerate(zip(chunk.seqs, chunk.messages, strict=True)):
                epoch = chunk.epochs[place] if chunk.epochs else None
                message = one.decoded() if hasattr(one, "decoded") else one
                found.append(Record(self.log.incarnation, seq, 0, 0, message, None, epoch))
        return found

    async def read(self, topics: Sequence[UUri] = SIGNALS) -> dict[int, str]:
        """The epochs that a reader gets who reads from the start, and why they are incomplete."""
        handed = Assembler(topics).take(await self.records(), 0.0)
        return {(time[0] - START_MS) // 1_000: why for time, why in times(handed)}


def test_a_reader_hears_of_each_bucket_that_a_stopped_gateway_has_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asyncio, "to_thread", inline)

    async def go() -> None:
        gateway = Gateway(await Log.open(None, name="log"))
        await gateway.start()
        await gateway.take(0, 400)
        gateway.now_ms += 1_400
        await gateway.take(1_350)
        gateway.keeper.close()  # as by a kill: nothing is written
        gateway.now_ms += 4_000
        await gateway.start()
        gateway.now_ms += 200
        await gateway.take(5_550)
        gateway.keeper.listening()
        for ms in (6_100, 7_600, 9_000):
            gateway.now_ms = START_MS + ms
            await gateway.take(ms)
        read = await gateway.read()
        assert read.keys() == set(range(8)), "those without a record, too"
        assert [second for second, why in read.items() if not why] == [0, 6, 7]
        assert all("the gateway was not running" in read[second] for second in range(1, 6))
        assert "from 2023-11-14T22:13:21.400Z on" in read[3]
        gateway.keeper.close()
        await gateway.log.close()

    virtually(go(), 1)


def test_a_publisher_misses_nothing_while_it_does_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asyncio, "to_thread", inline)

    async def go() -> None:
        publisher = Gateway(await Log.open(None, name="log"), receives=False)
        await publisher.start()
        await publisher.take(0)
        publisher.keeper.close()
        publisher.now_ms += 4_000
        await publisher.start()
        for ms in (4_000, 5_500):
            publisher.now_ms = START_MS + ms
            await publisher.take(ms)
        assert await publisher.read() == {0: groups.INTERRUPTED, 4: ""}
        publisher.keeper.close()
        await publisher.log.close()

    virtually(go(), 1)


def test_only_groups_whose_publishers_are_behind_a_network_miss_something_while_it_is_away(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(asyncio, "to_thread", inline)

    async def go() -> None:
        gateway = Gateway(await Log.open(None, name="log"), BOTH)
        await gateway.start()
        await gateway.take(0)
        for host, is_missed in (("cloud", False), ("truck", False), ("car", True)):
            gateway.keeper.away(host, f"{host} was away", lambda authority, host=host: authority == host)  # type: ignore[misc]
            gateway.keeper.back(host)
            frontiers = [one for one in await gateway.records() if one.message.attributes.source == FRONTIERS]
            (group,) = Frontier.FromString(frontiers[-1].message.payload).groups
            assert bool(group.missed) == is_missed, host
        gateway.keeper.close()
        await gateway.log.close()

    virtually(go(), 1)


# -- at the reader


class SourceLog(FakeLog):
    """With missed buckets and late epochs in its frontiers."""

    def missed(self, lower: Time, first: int, last: int, *, why: str = "away", width: int = 1) -> Record:
        record = self.frontier([lower], [])
        frontier = Frontier.FromString(record.message.payload)
        missed = frontier.groups[0].missed.add(width_ms=width, incomplete=why)
        missed.first.numbers.append(first)
        missed.last.numbers.append(last)
        record.message.payload = frontier.SerializeToString()
        return record

    def late(self, lower: Time, *epochs: int, why: str = "late") -> Record:
        record = self.frontier([lower], [])
        frontier = Frontier.FromString(record.message.payload)
        for epoch in epochs:
            frontier.groups[0].late.add(incomplete=why).time.numbers.append(epoch)
        record.message.payload = frontier.SerializeToString()
        return record


def restarted(reader: Assembler, source: FakeLog) -> tuple[Assembler, int]:
    """Returns a restarted reader, and the seq after which it reads again."""
    positions = reader.safe({source.log: source.seq})
    saved = json.loads(json.dumps(reader.save(positions)))
    again = Assembler(timeout_s=10)
    again.restore(saved)
    return again, positions[source.log]


def test_missed_buckets_come_when_they_are_over_in_all_logs_in_order_and_once() -> None:
    one, other, reader = SourceLog(LOG), SourceLog(OTHER_LOG, "trailer"), Assembler()
    reader.begin([one.frontier([(1,)], [], 9), other.frontier([(1,)], [], 9)], 0.0)
    assert reader.take([other.data((2,)), other.frontier([(9,)], [])], 0.0) == []
    handed = reader.take([one.missed((3,), 1, 4)], 0.0)
    assert times(handed) == [((1,), "away"), ((2,), "away")], "what the other log has is not whole"
    assert [len(epoch.records) for epoch in handed] == [0, 1]
    assert times(reader.take([other.missed((9,), 3, 3), one.frontier([(9,)], [])], 0.0)) == [
        ((3,), "away"),
        ((4,), "away"),
    ]


def test_missed_buckets_that_are_not_over_are_read_again_after_a_restart() -> None:
    source, reader = SourceLog(), Assembler(timeout_s=10)
    snapshot = source.frontier([(1,)], [], 9)
    reader.begin([snapshot], 0.0)
    missed = source.missed((3,), 1, 4)
    assert [time for time, _ in times(reader.take([missed], 0.0))] == [(1,), (2,)]
    reader, seq = restarted(reader, source)
    assert seq < missed.seq
    reader.begin([snapshot], 0.0)
    assert [time for time, _ in times(reader.take([missed, source.frontier([(9,)], [])], 0.0))] == [(3,), (4,)]
    reader, seq = restarted(reader, source)
    assert seq == source.seq


@pytest.mark.parametrize("why", ["away", "late", MISSED])
def test_why_an_epoch_is_incomplete_that_was_not_taken_is_known_after_restarts(why: str) -> None:
    """The records that say so are before its first record, and are not read again."""
    source, reader = SourceLog(), Assembler(timeout_s=10)
    begin = source.frontier([(1,)], [(2,)] if why == MISSED else [], 9)
    reports = {"away": source.missed((1,), 2, 2), "late": source.late((1,), 2), MISSED: begin}
    reader.begin([source.frontier([(1,)], [], 9)], 0.0)
    reader.take([reports[why]], 0.0)
    if why == MISSED:
        reader.lose()
        reader.begin([begin], 0.0)
    came = [source.frontier([(1,)], []), source.data((2,)), source.frontier([(3,)], [])]
    held = [one for one in reader.take(came, 0.0) if one.records]
    assert times(held) == [((2,), why)]
    reader = reborn(reader, source, held)
    reader.begin([came[0]], 0.0)
    reader = reborn(reader, source, seq=came[0].seq)
    reader.begin([came[0]], 0.0)
    assert times(reader.take(came[1:], 0.0)) == [((2,), why)]


@pytest.mark.parametrize("restarts", [1, 2, 3])
def test_what_waited_at_a_restart_is_incomplete_after_a_gap_that_has_its_frontiers_too(restarts: int) -> None:
    """Retention took all frontiers before the next records: there is no snapshot."""
    source, reader = FakeLog(), Assembler()
    reader.begin([source.frontier([(1,)], [], 9)], 0.0)
    assert reader.take([source.data((1,)), source.frontier([(1,)], [(1,)])], 0.0) == []
    removed = source.seq
    for _ in range(restarts):
        reader = reborn(reader, source, seq=removed)
        reader.lose()
        reader.begin([], 0.0)
    came = [source.data((1,)), source.frontier([(1,)], [(1,)]), source.data((1,)), source.frontier([(2,)], [])]
    held = reader.take(came, 0.0)
    assert times(held) == [((1,), MISSED)]
    assert held[0].records == [came[0], came[2]]
    reader = reborn(reader, source, held)
    reader.begin([came[1]], 0.0)
    assert times(reader.take(came[2:], 0.0)) == [((1,), MISSED)]


@pytest.mark.parametrize("snapshot", ["none", "over"])
def test_what_waited_before_a_gap_is_incomplete(snapshot: str) -> None:
    source, reader = FakeLog(), Assembler()
    reader.begin([source.frontier([(1,)], [], 9)], 0.0)
    assert reader.take([source.data((1,)), source.frontier([(1,)], [(1,)])], 0.0) == []
    removed = [source.frontier([(2,)], [])]
    reader.lose()
    reader.begin(removed if snapshot == "over" else [], 0.0)
    assert times(reader.take([source.frontier([(2,)], [])], 0.0)) == [((1,), MISSED)]


def test_what_began_in_a_gap_is_incomplete_also_if_there_is_no_snapshot_after_it() -> None:
    source, reader = FakeLog(), Assembler()
    reader.begin([source.frontier([(1,)], [], 9)], 0.0)
    reader.lose()
    source.frontier([(1,)], [(2,)])
    reader.begin([], 0.0)
    came = [source.data((2,)), source.frontier([(1,)], [(2,)]), source.frontier([(3,)], [])]
    assert times(reader.take(came, 0.0)) == [((2,), MISSED)]
    assert times(reader.take([source.data((3,)), source.frontier([(4,)], [])], 0.0)) == [((3,), "")]


def test_of_what_was_lost_after_a_restart_no_part_comes_after_the_next_one() -> None:
    vehicle, reader = FakeLog(LOG, "vehicle"), Assembler()
    begin = vehicle.frontier([(1,)], [], 9)
    reader.begin([begin], 0.0)
    waits = [vehicle.data((1,)), vehicle.frontier([(1,)], [(1,)])]
    assert reader.take(waits, 0.0) == []
    reader = reborn(reader, vehicle)
    reader.begin([begin], 0.0)
    said = Beginning(topics=[SIGNALS[0]], service=at("vehicle"))
    begun = Record(OTHER_LOG, 50, 0, 0, UMessageBuilder.publish(at("hub", 0x8006)).pack(said))
    assert times(reader.take([*waits, begun], 0.0)) == [((1,), BEGUN_THERE)]
    rest = [vehicle.frontier([(1,)], [(1,)]), vehicle.data((1,)), vehicle.frontier([(2,)], [])]
    assert reader.take(rest, 0.0) == []
    reader = reborn(reader, vehicle, seq=waits[1].seq)  # something else waits since then
    reader.begin([waits[1]], 0.0)
    assert reader.take(rest, 0.0) == []


def test_of_a_long_absence_some_buckets_and_the_last_one_are_reported() -> None:
    source, reader = SourceLog(), Assembler()
    reader.begin([source.frontier([(1,)], [], 9)], 0.0)
    handed = reader.take([source.missed((10_000_000,), 1, 5_000_000)], 0.0)
    assert len(handed) == MISSED_EACH_MAX
    assert [time for time, _ in times(handed)][-2:] == [(MISSED_EACH_MAX - 1,), (5_000_000,)]


def test_what_no_keeper_reports_as_missed_is_ignored() -> None:
    source, reader = SourceLog(), Assembler()
    reader.begin([source.frontier([(1,)], [], 9)], 0.0)
    assert reader.take([source.missed((9,), 5, 2), source.missed((9,), 1, 2, width=0)], 0.0) == []


@pytest.mark.parametrize("numbers", [(), (1, 1)])
def test_times_with_another_count_of_numbers_are_ignored(numbers: Time) -> None:
    source, reader = SourceLog(), Assembler()
    begin, late = source.frontier([], [], 9), source.late((4,), 1)
    for record in (begin, late):
        frontier = Frontier.FromString(record.message.payload)
        frontier.groups[0].kept.passed.add(numbers=numbers)
        frontier.groups[0].late.add(incomplete="late").time.numbers.extend(numbers)
        frontier.groups[0].ended.add(incomplete="late").time.numbers.extend(numbers)
        record.message.payload = frontier.SerializeToString()
    reader.begin([begin], 0.0)
    assert times(reader.take([begin, source.data((5,)), late, source.frontier([(9,)], [])], 0.0)) == [
        ((1,), "late"),
        ((5,), ""),
    ]


def test_late_records_of_an_epoch_that_was_delivered_are_reported_once() -> None:
    source, reader = SourceLog(), Assembler(timeout_s=10)
    snapshot = source.frontier([(2,)], [(1,)], 9)
    reader.begin([snapshot], 0.0)
    came = [source.data((2,)), source.frontier([(4,)], [])]
    assert times(reader.take(came, 0.0)) == [((2,), "")]
    late = source.late((4,), 1, 2, 3)
    handed = reader.take([late], 0.0)
    assert times(handed) == [((2,), "late"), ((3,), "late")], "of 1 it has read nothing; 3 had no record in time"
    assert not any(epoch.records or epoch.is_complete for epoch in handed)
    assert reader.take([source.late((4,), 2)], 0.0) == []
    reader, _ = restarted(reader, source)
    reader.begin([snapshot], 0.0)
    assert reader.take([late], 0.0) == []


def test_late_records_of_an_epoch_that_other_logs_hold_back_make_it_incomplete() -> None:
    one, other, reader = SourceLog(LOG), SourceLog(OTHER_LOG, "trailer"), Assembler()
    reader.begin([one.frontier([(1,)], [], 9), other.frontier([(1,)], [], 9)], 0.0)
    assert reader.take([one.data((1,)), one.frontier([(3,)], []), one.late((3,), 1, 2)], 0.0) == []
    assert times(reader.take([other.frontier([(3,)], [])], 0.0)) == [((1,), "late"), ((2,), "late")]


def test_a_keeper_that_is_read_later_joins_at_epochs_that_are_not_over() -> None:
    one, other, reader = SourceLog(LOG), SourceLog(OTHER_LOG, "trailer"), Assembler()
    reader.begin([one.frontier([(1,)], [], 9)], 0.0)
    (first,) = reader.take([one.data((1,)), one.data((4,)), one.frontier([(3,)], [(4,)])], 0.0)
    assert (times([first]), first.keepers) == ([((1,), "")], {("gateway", 4)})
    joins = other.frontier([(2,)], [(2,)], 5)
    came = [joins, other.data((2,)), other.data((4,)), other.data((5,)), other.frontier([(9,)], [])]
    assert reader.take(came, 0.0) == [], "2 was over: its records are no rest of it"
    assert reader.dropped["filtered"] == 1
    fourth, fifth = reader.take([one.data((5,)), one.frontier([(9,)], [])], 0.0)
    assert times([fourth, fifth]) == [((4,), ""), ((5,), "")]
    assert [len(epoch.records) for epoch in (fourth, fifth)] == [2, 2]
    assert fourth.keepers == {("gateway", 4), ("trailer", 4)}


@pytest.mark.parametrize("between", ["nothing", "a restart", "a silence"])
@pytest.mark.parametrize("number", [1, 5])
def test_all_logs_of_a_keeper_join_at_the_same_epochs(between: str, number: int) -> None:
    """A follower takes all of a gateway's log on disk before that in memory."""
    one, disk, memory = FakeLog(LOG), FakeLog(OTHER_LOG, "trailer"), FakeLog(b"C" * 16, "trailer")
    disk.logs = memory.logs = [disk.log, memory.log]
    reader, now = Assembler(timeout_s=10), 0.0
    reader.begin([one.frontier([(1,)], [], 9)], now)
    came = [one.data((1,)), one.data((6,)), one.frontier([(4,)], [(6,)])]
    assert times(reader.take(came, now)) == [((1,), "")]
    joins = [disk.frontier([(1,)], [], number), disk.data((1,)), disk.data((3,)), disk.data((6,))]
    joins.append(disk.frontier([(9,)], [], number + 1))
    assert reader.take(joins, now) == []
    assert reader.dropped["filtered"] == 2
    if between == "a restart":
        reader = reborn(reader, one)
        reader.begin([came[2], joins[-1]], now)
        assert reader.take([came[1], joins[3]], now) == []
    elif between == "a silence":
        now = 9.0
        assert reader.take([one.frontier([(8,)], []), disk.frontier([(9,)], [], number + 2)], now) == []
        assert times(reader.overdue(11.0)) == [((6,), "one of its logs has reported nothing for 10 s")]
    reader.dropped.clear()
    joins = [memory.frontier([(1,)], [], number), *(memory.data((second,)) for second in (1, 3, 6))]
    joins += [memory.frontier([(9,)], [], number + 1), one.frontier([(9,)], [])]
    assert times(reader.take(joins, now)) == [((6,), REST if between == "a silence" else "")]
    assert reader.dropped["filtered"] == 2, "1 and 3 were over: these are parts of them"
    came = [log.data((12,)) for log in (one, disk, memory)]
    (last,) = reader.take([*came, *(log.frontier([(13,)], [], 60) for log in (one, disk, memory))], now)
    assert (times([last]), len(last.records)) == ([((12,), "")], 3)


@pytest.mark.parametrize("order", [*itertools.permutations((1, 2, 3))])
@pytest.mark.parametrize("is_suspect", [False, True])
def test_a_new_log_of_a_keeper_that_was_read_before_a_restart_joins_nothing(
    is_suspect: bool, order: tuple[int, int, int]
) -> None:
    one, disk, memory = FakeLog(LOG), FakeLog(OTHER_LOG, "trailer"), FakeLog(b"C" * 16, "trailer")
    reader = Assembler()
    reader.begin([one.frontier([(1,)], [], 9), disk.frontier([(1,)], [], 9)], 0.0)
    reader = reborn(reader, one)
    if is_suspect:
        reader.lose()
    disk.logs = memory.logs = [disk.log, memory.log]
    one.seq, disk.seq, memory.seq = order
    reader.begin([one.frontier([(9,)], [], 19), disk.frontier([(5,)], [], 19), memory.frontier([(5,)], [], 7)], 0.0)
    came = [disk.data((6,)), memory.data((6,)), disk.frontier([(9,)], []), memory.frontier([(9,)], [])]
    (sixth,) = reader.take(came, 0.0)
    assert (times([sixth]), len(sixth.records)) == ([((6,), "")], 2)


def test_what_was_over_at_a_keeper_before_it_was_read_is_not_whole_by_what_another_one_has() -> None:
    one, other, reader = SourceLog(LOG), SourceLog(OTHER_LOG, "trailer"), Assembler()
    reader.begin([one.frontier([(1,)], [], 9)], 0.0)
    assert reader.take([one.data((2,)), one.data((6,))], 0.0) == []
    joins = other.frontier([(5,)], [], 40)
    frontier = Frontier.FromString(joins.message.payload)
    frontier.groups[0].kept.passed.add(numbers=(4,))
    joins.message.payload = frontier.SerializeToString()
    handed = reader.take([joins, one.frontier([(9,)], []), other.frontier([(9,)], [])], 0.0)
    assert times(handed) == [((2,), MISSED), ((6,), "")]


def test_what_a_gateway_begins_to_follow_again_is_waited_for() -> None:
    """Nothing of it is over before its next frontier; what the gateway itself keeps goes on."""
    vehicle, hub, reader = SourceLog(LOG, "vehicle"), SourceLog(OTHER_LOG, "hub"), Assembler(timeout_s=10)
    reader.begin([vehicle.frontier([(1,)], [], 9), hub.frontier([(1,)], [], 9)], 0.0)
    said = Beginning(topics=[uris.uri("*", 0xFFFF0004, 1, 0x8005), SIGNALS[0]], service=at("vehicle"))
    begun = Record(OTHER_LOG, 50, 0, 0, UMessageBuilder.publish(at("hub", 0x8006)).pack(said))
    hub.seq = 50
    assert reader.take([begun, hub.data((2,)), hub.frontier([(4,)], [])], 0.0) == []
    again = [vehicle.frontier([(1,)], [], 60), vehicle.data((2,)), vehicle.frontier([(4,)], [])]
    (epoch,) = reader.take(again, 1.0)
    assert times([epoch]) == [((2,), "")]
    assert len(epoch.records) == 2, "it was waited for, so it does not join later"
    assert reader.take([begun, hub.data((5,)), hub.frontier([(7,)], [])], 2.0) == []
    assert reader.due is not None
    ((time, why),) = times(reader.overdue(100.0))
    assert (time, bool(why)) == ((5,), True), "it does not wait for ever"


def test_the_rest_of_an_epoch_comes_only_after_a_silence() -> None:
    """A quiet gateway is waited for by its clock, so what it sends late is in time."""
    one, other, reader = SourceLog(LOG), SourceLog(OTHER_LOG, "trailer"), Assembler(timeout_s=60)
    reader.begin([one.frontier([(1,)], [], 9), other.frontier([(1,)], [], 9)], 0.0)
    handed: list[Assembled] = []
    for second in range(1, 60):
        came = [one.data((second,)), one.frontier([(second + 1,)], [])]
        if second > 10:
            came.append(other.frontier([(second - 10,)], []))  # by its clock
        if second == 40:
            came[2:] = [other.data((32,)), other.frontier([(32,)], [(32,)])]  # some seconds old
        handed += reader.take(came, float(second))
    assert REST not in {why for _, why in times(handed)}
    assert len(next(epoch for epoch in handed if epoch.epoch is not None and epoch.epoch.time == (32,)).records) == 2


@pytest.mark.parametrize("restarts", [False, True])
@pytest.mark.parametrize("of_one_keeper", [False, True])
def test_what_had_begun_before_reading_is_not_whole_by_what_a_silent_log_brings_later(
    of_one_keeper: bool, restarts: bool
) -> None:
    """It reports only later, or it has reported and then nothing for long."""
    one, other = FakeLog(LOG), FakeLog(OTHER_LOG, "gateway" if of_one_keeper else "trailer")
    reader, begins = Assembler(timeout_s=10), other.frontier([(5,)], [(5,)], 1 if of_one_keeper else 9)
    if of_one_keeper:
        one.logs = other.logs = [LOG, OTHER_LOG]
    reader.begin([one.frontier([(5,)], [(5,)], 9), *([] if of_one_keeper else [begins])], 0.0)
    newest = one.frontier([(7,)], [])
    (sixth,) = [*reader.take([one.data((5,)), one.data((6,)), newest], 5.0), *reader.overdue(11.0)]
    assert times([sixth])[0][0] == (6,)
    if restarts:
        reader = reborn(reader, one)
        reader.begin([newest, *([] if of_one_keeper else [begins])], 12.0)
    came = [*([begins] if of_one_keeper else []), other.data((5,)), other.data((7,)), other.frontier([(9,)], [])]
    other.version = one.version
    assert times(reader.take([*came, one.frontier([(9,)], []), other.frontier([(9,)], [])], 12.0)) == [
        ((5,), MISSED),
        ((7,), ""),
    ]


def test_a_beginning_of_a_gateway_behind_the_one_that_is_read_loses_nothing_of_that_one() -> None:
    """Two gateways follow each other, so what the other one begins is in the log on disk, too."""
    disk, memory, reader = FakeLog(LOG, "vehicle"), FakeLog(OTHER_LOG, "vehicle"), Assembler([SIGNALS[0]])
    disk.logs = memory.logs = [LOG, OTHER_LOG]
    reader.begin([disk.frontier([(1,)], [], 9), memory.frontier([(1,)], [], 9)], 0.0)
    said = Beginning(topics=[uris.uri("*", 0xFFFF0004, 1, 0x8005), SIGNALS[0]], service=at("vehicle"))
    sent = UMessageBuilder.publish(at("hub", 0x8006)).pack(said)
    begun = Record(LOG, 50, 0, 0, sent, Origin(b"C" * 16, 7))
    disk.seq = 50
    came = [log.frontier([(1,)], [(1,)]) for log in (disk, memory)] + [disk.data((1,)), begun, memory.data((1,))]
    (first,) = reader.take([*came, disk.frontier([(2,)], []), memory.frontier([(2,)], [])], 0.0)
    assert (times([first]), len(first.records)) == ([((1,), "")], 2)


def test_a_beginning_of_another_gateway_loses_what_is_open() -> None:
    vehicle, reader = SourceLog(LOG, "vehicle"), Assembler([SIGNALS[0]])
    reader.begin([vehicle.frontier([(1,)], [], 9)], 0.0)
    said = Beginning(topics=[SIGNALS[0]], service=at("vehicle"))
    begun = Record(OTHER_LOG, 50, 0, 0, UMessageBuilder.publish(at("hub", 0x8006)).pack(said))
    assert times(reader.take([vehicle.data((1,)), vehicle.frontier([(1,)], [(1,)]), begun], 0.0)) == [
        ((1,), BEGUN_THERE)
    ]


# -- what was reported before a reader begins


def kept(record: Record, *, missed: Sequence[tuple[int, int]] = (), passed: Sequence[int] = ()) -> Record:
    """Returns the frontier with what a gateway adds for a reader that begins there."""
    frontier = Frontier.FromString(record.message.payload)
    (group,) = frontier.groups
    group.kept.passed.extend(LogicalTime(numbers=[time]) for time in passed)
    for first, last in missed:
        span = group.kept.missed.add(width_ms=1, incomplete="away")
        span.first.numbers.append(first)
        span.last.numbers.append(last)
    record.message.payload = frontier.SerializeToString()
    return record


@pytest.mark.parametrize("restarts", [False, True])
def test_who_begins_after_a_report_hears_of_the_missed_buckets_that_are_not_over(restarts: bool) -> None:
    one, other, reader = SourceLog(LOG), SourceLog(OTHER_LOG, "trailer"), Assembler(timeout_s=10)
    begin = kept(one.frontier([(3,)], [], 9), missed=[(1, 6)], passed=[2]), other.frontier([(1,)], [], 9)
    reader.begin(begin, 0.0)
    over = one.frontier([(9,)], [])
    assert reader.take([over], 0.0) == [], "the other log may bring more of them"
    if restarts:
        reader, _ = restarted(reader, one)
        reader.begin([over, begin[1]], 0.0)
    came = [other.data((2,)), other.data((4,)), other.data((5,)), other.data((7,)), other.frontier([(9,)], [])]
    handed = reader.take(came, 0.0)
    assert times(handed) == [((2,), "away"), ((3,), "away"), ((4,), "away"), ((5,), "away"), ((6,), "away"), ((7,), "")]
    assert [len(epoch.records) for epoch in handed] == [1, 0, 1, 1, 0, 1], "1 was over, and nothing came of it"


def test_who_reads_the_report_hears_of_missed_buckets_once() -> None:
    source, reader = SourceLog(), Assembler()
    begin = kept(source.frontier([(1,)], [], 9), missed=[(3, 4)])
    reader.begin([begin], 0.0)
    reader.lose()
    again = kept(source.frontier([(2,)], []), missed=[(3, 4), (5, 5)])
    reader.begin([again], 0.0)
    handed = reader.take([kept(source.missed((4,), 6, 6), missed=[(3, 4), (5, 5), (6, 6)])], 0.0)
    handed += reader.take([source.frontier([(9,)], [])], 0.0)
    assert times(handed) == [((time,), "away") for time in (3, 4, 5, 6)]


@pytest.mark.parametrize("how", ["a gap", "a gap with the snapshot", "not followed"])
def test_what_was_over_at_a_keeper_when_its_frontiers_were_not_read_is_not_whole_by_what_another_one_has(
    how: str,
) -> None:
    one, other, reader = SourceLog(LOG), SourceLog(OTHER_LOG, "trailer"), Assembler()
    there = Origin(LOG, 1) if how == "not followed" else None
    begin = replace(one.frontier([(2,)], [], 9), origin=there), other.frontier([(2,)], [], 9)
    reader.begin(begin, 0.0)
    later = replace(kept(one.frontier([(6,)], [], 20), missed=[(6, 7)], passed=[5]), origin=there)
    if how != "not followed":
        reader.lose()
        reader.begin([] if how == "a gap with the snapshot" else [later, begin[1]], 0.0)
    came = [other.data((4,)), other.data((6,)), other.data((8,)), other.frontier([(9,)], [])]
    handed = reader.take([later, *came, replace(one.frontier([(9,)], [], 21), origin=there)], 0.0)
    assert times(handed) == [((4,), MISSED), ((6,), "away"), ((7,), "away"), ((8,), "")]


def test_all_buckets_below_the_lowest_are_over_those_without_a_record_too() -> None:
    """A reader that begins later has not read what was reported of them."""
    watch = Watch()
    watch.take((SIGNALS[0], 0))
    watch.at(1_500)
    watch.report()
    watch.at(30_000)
    watch.take((SIGNALS[0], 30_000))
    report = watch.report()
    (lower,), (passed,) = report.lower, report.kept.passed
    assert passed.numbers[0] == lower.numbers[0] - 1_000


def test_who_begins_after_two_restarts_hears_what_was_missed_at_the_first_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gateway itself knows it, too, when a record opens one of these buckets."""
    monkeypatch.setattr(asyncio, "to_thread", inline)

    async def go() -> None:
        gateway = Gateway(await Log.open(None, name="log"))
        await gateway.start()
        await gateway.take(0)
        for until_ms in (2_500, 5_100):
            gateway.keeper.close()
            gateway.now_ms = START_MS + until_ms
            await gateway.start()
            gateway.keeper.listening()
            begun = len(await gateway.records())
            gateway.now_ms += 700
            await gateway.take(1_100)
        await gateway.take(2_500, 4_500)
        gateway.now_ms = START_MS + 8_000
        await gateway.take(6_500)
        await gateway.take(8_000)
        records = await gateway.records()
        reader = Assembler(SIGNALS)
        reader.begin(records[begun - 1 : begun], 0.0)
        read = {(time[0] - START_MS) // 1_000: why for time, why in times(reader.take(records[begun:], 0.0))}
        assert [second for second, why in read.items() if "the gateway was not running" in why] == [2, 3, 4, 5]
        assert read[6] == ""
        frontiers = [one for one in records[begun:] if one.message.attributes.source == FRONTIERS]
        ended = [one for each in frontiers for one in Frontier.FromString(each.message.payload).groups[0].ended]
        assert "the gateway was not running" in seconds(ended)[2]
        gateway.keeper.close()
        await gateway.log.close()

    virtually(go(), 1)
