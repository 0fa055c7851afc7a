"""Whole epochs for Spark: the source plans and reads against a history that random steps change."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import random
from collections import defaultdict
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future
from typing import Any, Final, TypeVar

import pytest

from campaigns.simulation.loop import VirtualLoop
from history.epochs.assembling import BEGUN, BEGUN_THERE, MISSED, ODD, UNREPORTED
from history.epochs.merging import LOG_GROUPS_MAX, REST
from history.reading.client import HistoryClient
from history.records.epoch import Epoch
from spark_ingest import epochs, fleet, offsets, planner, polls, source
from spark_ingest.client import HistorySession
from spark_ingest.epochs import BatchFrontiers, Choice, FrontierRecord, Gates
from spark_ingest.offsets import HistoryOffset, Offset
from spark_ingest.options import Options
from spark_ingest.source import BatchReader, StreamReader
from tests.history.test_epochs_whole import LAPS, OTHER, SIGNALS, World, inline
from tests.history.world import SERVICE
from tests.tiers import seeds
from uprotocol import uri as uris
from uprotocol.core.ustreamer.v1.ustreamer_pb2 import Beginning, Frontier, GroupFrontier, LogicalTime, RecordBatch
from uprotocol.message import UMessageBuilder
from uprotocol.status import UStatusError

T = TypeVar("T")
TOPICS: Final = tuple(map(uris.format, (*SIGNALS, *LAPS, OTHER)))
ROUNDS: Final = 25

Row = tuple[int, Epoch | None, str | None]  # seq, and the columns of epochs


class Played:
    """A history with keepers in virtual time, and Spark's calls between its steps."""

    def __init__(self, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seed, self.dice = seed, random.Random(seed)
        self.loop = VirtualLoop(seed)
        self.world = World()
        self.open: StreamReader | None = None
        played = self

        class Direct(HistorySession):
            def run(self, call: Coroutine[Any, Any, T], limit_s: float | None = None) -> T:
                return played.run(call)

            def submit(self, call: Coroutine[Any, Any, T]) -> Future[T]:
                answer = Future[T]()
                try:
                    answer.set_result(played.run(call))
                except UStatusError as error:
                    answer.set_exception(error)
                return answer

            async def call(self, authority: str, ask: Callable[[HistoryClient], Coroutine[Any, Any, T]]) -> T:
                return await ask(played.client)

        @contextlib.contextmanager
        def direct(options: Options) -> Iterator[HistorySession]:
            yield Direct(options)

        monkeypatch.setattr(asyncio, "to_thread", inline)
        monkeypatch.setattr(source, "HistorySession", Direct)
        monkeypatch.setattr(source, "shared", direct)
        for module in (planner, polls, fleet):
            monkeypatch.setattr(module, "now_ms", lambda: self.world.now_ms)

    def run(self, what: Coroutine[Any, Any, T]) -> T:
        asyncio.set_event_loop(self.loop)
        return self.loop.run_until_complete(what)

    def begin(self) -> None:
        self.run(self.world.begin(self.dice, self.dice.choice([1, 2])))
        rpc = self.run(self.world.caller("spark"))
        self.client = HistoryClient(rpc, SERVICE, timeout_ms=2_000)

    def go_on(self, steps: int) -> None:
        for _ in range(steps):
            self.run(self.world.step())

    def pass_s(self, seconds: int) -> None:
        for _ in range(seconds):
            self.world.now_ms += 1_000
            self.run(asyncio.sleep(1.0))

    def has_all(self, offset: dict[str, Any]) -> bool:
        """Returns whether it is behind all records of the logs."""
        seqs = Offset.of(offset).histories["gateway"].seqs
        return all(seqs.get(log.incarnation.hex(), 0) >= log.newest_seq for log in self.world.logs)

    def end(self) -> None:
        self.stop()
        self.world.keeper.close()
        self.run(self.world.close())
        asyncio.set_event_loop(None)
        self.loop.finish([])

    def options(self, **more: Any) -> Options:
        made = {"transport": "local", "authority": "gateway", "local_authority": "spark", "topics": TOPICS}
        return Options.model_validate(made | {"epochs": "complete", "poll_timeout_ms": 1_000} | more)

    def reader(self, **more: Any) -> StreamReader:
        self.stop()
        self.open = StreamReader(self.options(**more))
        return self.open

    def stop(self) -> None:
        if self.open is not None:
            self.open.stop()


def rows(reader: StreamReader, start: dict[str, Any], end: dict[str, Any]) -> list[Row]:
    found = []
    for part in reader.partitions(start, end):
        for batch in reader.read(part):
            for row in batch.select(["incarnation", "seq", "epoch", "epoch_incomplete"]).to_pylist():
                epoch = row["epoch"]
                named = None if epoch is None else Epoch(epoch["group"], tuple(epoch["time"]))
                found.append(((row["incarnation"], row["seq"]), named, row["epoch_incomplete"]))
    return found  # type: ignore[return-value]


def play(seed: int, monkeypatch: pytest.MonkeyPatch) -> tuple[int, int]:
    played = Played(seed, monkeypatch)
    played.begin()
    dice = played.dice
    played.go_on(dice.randrange(30))
    latest = dice.random() < 0.5
    more = {"starting_offsets": "latest" if latest else "earliest"}
    if dice.random() < 0.5:
        more["max_records_per_batch"] = str(dice.choice([3, 20, 100]))
    reader = played.reader(**more)
    offset = reader.initialOffset()
    begun = Offset.of(offset).histories["gateway"].seqs
    batches: list[list[Row]] = []
    for turn in itertools.count():
        if turn < ROUNDS:
            played.go_on(dice.randrange(12))
        else:
            played.pass_s(20)  # until all epochs that were not closed have timed out
        if dice.random() < 0.1:
            reader = played.reader(**more)  # after a restart
        end = json.loads(json.dumps(reader.latestOffset(offset, reader.getDefaultReadLimit())))
        if end == offset:
            if turn > ROUNDS:
                break
            continue
        if turn > ROUNDS + 3 and not batches[-1] and played.has_all(end):
            break  # nothing comes any more but the gateway's reports that nothing does
        again = dice.random() < 0.2
        batches.append(rows(reader, offset, end))
        if again:
            reader = played.reader(**more)
            assert rows(reader, offset, end) == batches[-1], f"seed {seed}: a batch differs at its second reading"
        reader.commit(end)
        offset = end
    truth = played.run(played.world.truth())
    check_read_at_once(played, truth)
    seen: dict[Any, int] = {}
    of_batch: dict[Epoch, set[int]] = defaultdict(set)
    has: dict[Epoch, set[Any]] = defaultdict(set)
    marked: dict[Epoch, str] = {}
    for number, batch in enumerate(batches):
        for position, epoch, why in batch:
            assert position not in seen, f"seed {seed}: {position} of {epoch} in batches {seen[position]} and {number}"
            seen[position] = number
            if epoch is None:
                continue
            of_batch[epoch].add(number)
            has[epoch].add((bytes.fromhex(position[0]), position[1]))  # type: ignore[index]
            if why:
                marked[epoch] = why
    for epoch, records in has.items():
        assert epoch in marked or len(of_batch[epoch]) == 1, f"seed {seed}: {epoch} in batches {of_batch[epoch]}"
        assert epoch in marked or records == truth[epoch], f"seed {seed}: a part of {epoch}: {truth[epoch] ^ records}"
    assert not any("has reported nothing" in why for why in marked.values()), f"seed {seed}: {marked}"
    for epoch, records in truth.items():
        is_begun = any(seq <= begun.get(log.hex(), 0) for log, seq in records)
        covered = latest and any(seq for seq in begun.values())
        assert epoch in has or is_begun or covered, f"seed {seed}: all of {epoch} is missing"
    played.end()
    return len(has), len(has) - len(marked)


def check_read_at_once(played: Played, truth: dict[Epoch, set[tuple[bytes, int]]]) -> None:
    """`spark.read`, after all epochs are over."""
    reader = BatchReader(played.options())
    has: dict[Epoch, int] = defaultdict(int)
    for part in reader.partitions():
        for batch in reader.read(part):
            for epoch in batch["epoch"].to_pylist():
                if epoch is not None:
                    has[Epoch(epoch["group"], tuple(epoch["time"]))] += 1
    assert has == {epoch: len(records) for epoch, records in truth.items()}, f"seed {played.seed}"


@pytest.mark.parametrize("first", seeds(4, quick=1, step=5))
def test_a_batch_has_all_of_an_epoch(first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    sums = [0, 0]
    for seed in range(first, first + 5):
        checked, whole = play(seed, monkeypatch)
        sums[0] += checked
        sums[1] += whole
    assert sums[1] > 8, f"too few whole epochs: {sums}"  # 12 to 38 of some 110


@pytest.mark.parametrize("seed", seeds(6, quick=2))
def test_each_row_comes_once_if_the_option_epochs_changes_between_runs(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One query that is restarted with whole epochs and without them."""
    played = Played(seed, monkeypatch)
    played.begin()
    dice, seen = played.dice, set[Any]()
    reader = played.reader()
    offset = reader.initialOffset()
    for turn in itertools.count():
        played.go_on(dice.randrange(12)) if turn < ROUNDS else played.pass_s(20)
        if dice.random() < 0.25 or turn == ROUNDS:
            whole = turn >= ROUNDS or dice.random() < 0.5
            reader = played.reader(epochs="complete" if whole else "all", max_records_per_batch=dice.choice([7, 1_000]))
        end = json.loads(json.dumps(reader.latestOffset(offset, reader.getDefaultReadLimit())))
        found = rows(reader, offset, end) if end != offset else []
        if turn > ROUNDS + 3 and not found and played.has_all(end):
            break  # nothing comes any more but the gateway's reports that nothing does
        for position, epoch, _ in found:
            assert position not in seen, f"{position} of {epoch} comes twice"
            seen.add(position)
        offset = end
    truth = played.run(played.world.truth()).values()
    assert {(log.hex(), seq) for records in truth for log, seq in records} <= seen
    played.end()


# --- one rule at a time


def stored(offset: HistoryOffset) -> HistoryOffset:
    """An offset as it comes back from a checkpoint."""
    return Offset.of(json.loads(json.dumps(Offset("q", 1, {"car": offset}).json()))).histories["car"]


A, B, CLOUD = "aa" * 16, "bb" * 16, "cc" * 16
KEY: Final = ("car", 4, "g")
WHO: Final = "car has reported nothing for 60 s"


def frontier(
    seq: int, version: int, active: set[int], *, read: str = A, origin: str = "", ended: str | None = None, **more: Any
) -> FrontierRecord:
    """A frontier in the log `read`; its lower frontier is its active times. `ended`: "TIME WHY"."""
    group = GroupFrontier(group="g", version=version, number=more.get("number", version))
    group.logs.extend(bytes.fromhex(log) for log in more.get("logs", [origin or read]))
    group.kept.passed.extend(LogicalTime(numbers=[number]) for number in more.get("passed", ()))
    for times, numbers in ((group.lower, active), (group.active, active), (group.opened, more.get("opened", ()))):
        times.extend(LogicalTime(numbers=[number]) for number in sorted(numbers))
    if ended is not None:
        time, _, why = ended.partition(" ")
        group.ended.append(GroupFrontier.Ended(time=LogicalTime(numbers=[int(time)]), incomplete=why))
    topic = uris.uri("car", 4, 1, 0x8005)
    return FrontierRecord(read, seq, origin or read, UMessageBuilder.publish(topic).pack(Frontier(groups=[group])))


def records(read: str, origin: str, *times: int, first: int = 1) -> RecordBatch:
    """One record for each time; times below 0 are of a group without frontiers."""
    batch = RecordBatch(incarnation=bytes.fromhex(read))
    if origin != read:
        batch.origin_incarnation.append(bytes.fromhex(origin))
    for seq, time in enumerate(times, first):
        batch.seq.append(seq)
        batch.time_ms.append(0)
        batch.message.append(b"")
        batch.origin.append(int(origin != read))
        batch.epochs.add(group="g" if time >= 0 else "untold", time=LogicalTime(numbers=[time]))
        batch.epoch.append(len(batch.epochs))
    return batch


def chosen(start: Gates, end: Gates, batch: RecordBatch, seq: int) -> dict[int, str | None]:
    records = Choice(start, end, batch.incarnation.hex(), seq).of(batch)
    return dict(zip(records.seq, records.incomplete, strict=True))


def gates_after(*frontiers: FrontierRecord, gates: Gates | None = None, **what: Any) -> Gates:
    ends = {A: 100, B: 100, CLOUD: 100}
    return epochs.advance(gates or {}, BatchFrontiers(what.pop("start", {}), ends, frontiers, **what), now_ms=1_000)


def test_an_epoch_waits_for_a_log_without_a_parsedof_its_end() -> None:
    both = [A, B]
    ahead = gates_after(
        frontier(1, 1, set(), logs=both),
        frontier(1, 1, set(), read=B, logs=both),
        frontier(5, 2, {7}, opened={7}, logs=both),
        frontier(9, 3, set(), ended="7", logs=both),
    )
    assert ahead[KEY].held[(7,)].after == {A: 5, B: 0, CLOUD: 100}, "its records come after the frontier that opened it"
    assert chosen({}, ahead, records(A, A, 7, 7, first=6), 0) == {}
    level = gates_after(frontier(3, 3, set(), read=B, logs=both), gates=ahead, start={A: 100, B: 2})
    assert level[KEY].held == {}
    assert chosen(ahead, level, records(A, A, 7, 7, first=6), 100) == {6: None, 7: None}
    assert epochs.read_from(ahead, level, A, 100) == 5
    assert gates_after(gates=level) == {}, "a gate is dropped when its epochs are over"


def test_an_epoch_that_began_before_the_log_is_dropped() -> None:
    gates = gates_after(frontier(3, 9, {6, 7}, opened={7}, number=4))
    assert gates[KEY].filter == {(6,)}
    assert set(gates[KEY].held) == {(7,)}
    assert chosen({}, gates_after(frontier(9, 10, set(), number=5), gates=gates), records(A, A, 5, 6, 7, 8), 0) == {
        3: None,
        4: None,
    }


def test_epochs_of_an_absent_gateway_are_given_up_and_later_records_are_marked_as_the_rest() -> None:
    gates = gates_after(
        frontier(1, 1, set(), read=CLOUD, origin=A), frontier(3, 2, {7}, read=CLOUD, origin=A, opened={7})
    )
    assert epochs.given_up(gates, 61_000, 60_000) == gates
    given_up = epochs.given_up(gates, 61_001, 60_000)
    assert given_up[KEY].incomplete == {(7,): WHO}
    assert epochs.given_up(given_up, 1 << 40, 60_000) == given_up, "once"
    assert chosen(gates, given_up, records(CLOUD, A, 7, first=4), 100) == {4: WHO}
    assert epochs.needed(gates, {CLOUD: 100}) == {CLOUD: 3}
    assert epochs.needed(given_up, {CLOUD: 100}) == {CLOUD: 100}
    back = gates_after(frontier(101, 3, set(), read=CLOUD, origin=A, ended="7"), gates=given_up, start={CLOUD: 100})
    assert chosen(given_up, back, records(CLOUD, A, 7, 8, first=101), 100) == {101: REST, 102: None}
    assert chosen(given_up, back, records(CLOUD, A, 7, first=4), 100) == {}, "delivered before"


def test_the_rows_of_an_incomplete_epoch_have_the_reason() -> None:
    opened = frontier(2, 2, {7}, opened={7}), frontier(4, 3, set(), ended="7 nobody knows")
    assert chosen({}, gates_after(*opened), records(A, A, 7, -1, first=3), 0) == {3: "nobody knows", 4: UNREPORTED}
    waits, over = gates_after(opened[0]), frontier(4, 3, set(), ended="7")
    assert chosen(waits, gates_after(over, gates=waits, lossy=frozenset({A})), records(A, A, 7), 0) == {1: MISSED}
    given_up = gates_after(gates=waits, missing=frozenset({A}))
    assert (given_up[KEY].held, given_up[KEY].incomplete) == ({}, {(7,): MISSED})
    restarted = gates_after(frontier(2, 1, {8}, number=3), gates=waits, went_back=frozenset({A}))
    assert restarted[KEY].incomplete == {(7,): MISSED}, "what waited is delivered"
    assert restarted[KEY].held[(8,)].why == MISSED
    beginning = Beginning(topics=[uris.parse("//car/1/1/8000")], service=uris.uri("car", 4, 1))
    begun = FrontierRecord(A, 3, A, UMessageBuilder.publish(uris.uri("cloud", 4, 1, 0x8006)).pack(beginning))
    other = [uris.parse("//bus/1/1/8000")]
    for topics, why in ((), BEGUN_THERE), (beginning.topics, BEGUN_THERE), (other, None):
        over = gates_after(opened[0], begun, frontier(4, 3, set(), ended="7"), topics=topics)
        assert chosen({}, over, records(A, A, 7, first=3), 0) == {3: why}


def test_an_epoch_opened_between_missed_frontiers_is_incomplete() -> None:
    waits = gates_after(frontier(2, 2, {7}, opened={7}))
    beginning = Beginning(topics=[uris.parse("//*/FFFFFFFF/1/FFFF")], service=uris.uri("car", 4, 1))
    hole = FrontierRecord(A, 101, A, UMessageBuilder.publish(uris.uri("cloud", 4, 1, 0x8006)).pack(beginning))
    after = gates_after(hole, frontier(102, 9, {8, 9}, opened={9}, number=8), gates=waits, start={A: 100})
    assert chosen(waits, after, records(A, A, 7, first=3), 100) == {3: BEGUN_THERE}
    over = gates_after(frontier(110, 10, set(), number=9, ended="8"), gates=after, start={A: 109})
    assert chosen(after, over, records(A, A, 8, 9, first=103), 109) == {103: BEGUN_THERE, 104: None}


def test_frontiers_that_a_follower_has_not_received_make_epochs_incomplete() -> None:
    waits = gates_after(frontier(2, 1, {7}, opened={7}, read=CLOUD, origin=A, number=1))
    after = gates_after(
        frontier(101, 5, {8}, read=CLOUD, origin=A, number=5),
        frontier(103, 6, {9}, read=CLOUD, origin=A, number=6, opened={9}, ended="8"),
        frontier(105, 7, set(), read=CLOUD, origin=A, number=7, ended="9"),
        gates=waits,
        start={CLOUD: 100},
    )
    assert chosen(waits, after, records(CLOUD, A, 7, first=3), 100) == {3: BEGUN_THERE}
    assert chosen(waits, after, records(CLOUD, A, 8, 9, first=102), 100) == {102: BEGUN_THERE, 103: None}


def test_a_query_that_continues_with_whole_epochs_gets_the_rest_of_a_begun_epoch() -> None:
    begun = epochs.begin([frontier(2, 2, {7})], is_new=False)
    over = gates_after(frontier(7, 3, set(), ended="7"), gates=begun, start={A: 4})
    assert chosen({}, over, records(A, A, 7, 8, first=5), 4) == {5: BEGUN, 6: None}


def test_a_query_that_continues_without_whole_epochs_gets_the_waiting_records() -> None:
    waits = gates_after(frontier(2, 2, {7}, opened={7}))
    start, end = (Offset("q", 1, {"car": HistoryOffset({A: 5}, gates=gates)}) for gates in (waits, None))
    (range,) = offsets.ranges(start, end, ())
    assert (range.after, range.until, range.seq) == (2, 5, 5)
    assert chosen(waits, {}, records(A, A, 7, 8, 7, first=3), 5) == {3: None, 5: None}


def test_an_invalid_parsedchanges_nothing() -> None:
    gates = gates_after(frontier(2, 2, {7}, opened={7}))
    odd = frontier(3, 3, set())
    odd.message.payload = Frontier(
        groups=[GroupFrontier(group="g", version=3, active=[LogicalTime(numbers=[1, 2])])]
    ).SerializeToString()
    garbage = odd._replace(message=UMessageBuilder.publish(uris.uri("car", 4, 1, 0x8005)).build())
    garbage.message.payload = b"\xff\xff"
    unread = FrontierRecord(A, 4, A, UMessageBuilder.publish(uris.uri("cloud", 4, 1, 0x8006)).build())
    unread.message.payload = b"\xff\xff"
    assert gates_after(odd, garbage, unread, gates=gates)[KEY] == gates[KEY]


def test_too_many_waiting_epochs_are_delivered_as_incomplete() -> None:
    """The durable log is read from days ago; the one in memory has the last minutes."""
    both, gates = [A, B], Gates()
    seen: dict[int, str | None] = {}
    step = epochs.EPOCHS_WAITING_MAX // 4
    for first in range(2, 8 * step, step):
        versions = range(first, first + step)
        frontiers = [frontier(3 * version, version, {version}, opened={version}, logs=both) for version in versions]
        old = frontier(1, 1, set(), read=B, logs=both)
        end = gates_after(*(frontiers if gates else [old, *frontiers]), gates=gates, start={A: 3 * first - 1, B: 1})
        rows = records(A, A, *versions, first=3 * first + 1)
        for index in range(step):
            rows.seq[index] = 3 * (first + index) + 1
        seen |= chosen(gates, end, rows, 3 * first - 1)
        assert len(end[KEY].waiting) <= epochs.EPOCHS_WAITING_MAX
        assert len(json.dumps(epochs.to_json(end))) < 300_000
        gates = end
    assert set(seen.values()) == {epochs.TOO_MANY}, "the reason in the batch in which the limit was passed"
    assert gates[KEY].rest
    late = records(A, A, 5, first=30_000)
    assert chosen(gates, gates_after(gates=gates, start={A: 29_000}), late, 29_000) == {30_000: REST}
    newest = 9 * step
    level = gates_after(
        frontier(40_000, newest, set(), logs=both),
        frontier(40_001, newest, set(), read=B, logs=both),
        gates=gates,
        start={A: 39_000, B: 1},
    )
    assert not level[KEY].rest
    assert not level[KEY].held


def test_a_followed_log_whose_disk_was_replaced_begins_with_version_1() -> None:
    waits = gates_after(frontier(2, 900, {7}, opened={7}, read=CLOUD, origin=A))
    after = gates_after(
        frontier(101, 1, {8}, read=CLOUD, origin=B, opened={8}, number=1),
        frontier(103, 2, set(), read=CLOUD, origin=B, ended="8"),
        gates=waits,
        start={CLOUD: 100},
    )
    assert chosen(waits, after, records(CLOUD, A, 7, first=3), 100) == {3: MISSED}
    assert chosen(waits, after, records(CLOUD, B, 8, first=102), 100) == {102: None}
    assert gates_after(gates=after, start={CLOUD: 103}) == {}, "a gate is dropped when its epochs are over"


@pytest.mark.parametrize("durable_first", [False, True])
def test_an_epoch_that_was_over_in_a_log_before_its_first_parsedis_incomplete(durable_first: bool) -> None:
    both, memory = [A, B], {"read": CLOUD, "origin": B, "logs": [A, B]}
    in_memory = [
        frontier(1, 1, {1}, opened={1}, number=1, **memory),
        frontier(3, 2, {2}, opened={2}, ended="1", **memory),
        frontier(5, 3, {9}, opened={9}, ended="2", **memory),
    ]
    disk = {"read": CLOUD, "origin": A, "logs": both}
    on_disk = [frontier(7, 3, {9}, opened={9}, number=40, passed=[2], **disk)]
    first, second = (on_disk, in_memory) if durable_first else (in_memory, on_disk)
    waits = gates_after(*first)
    waits = epochs.from_json(json.loads(json.dumps(epochs.to_json(waits))))
    over = gates_after(*second, gates=waits, start={CLOUD: 100})
    end = gates_after(
        frontier(201, 4, set(), number=41, ended="9", **disk),
        frontier(202, 4, set(), number=4, ended="9", **memory),
        gates=over,
        start={CLOUD: 200},
    )
    whys = {time[0]: why for gates in (over, end) for time, why in gates[KEY].incomplete.items()}
    assert whys == {1: MISSED, 2: MISSED}


def test_a_group_may_start_again_with_times_of_another_length() -> None:
    two = frontier(101, 3, set())
    parsed = Frontier.FromString(two.message.payload)
    for times in (parsed.groups[0].lower, parsed.groups[0].active, parsed.groups[0].opened):
        times.add(numbers=[8, 1])
    two.message.payload = parsed.SerializeToString()
    rows = records(A, A, 7, 7, first=102)
    rows.epochs[1].time.numbers[:] = [8, 1]
    waits = gates_after(frontier(2, 2, {7}, opened={7}))
    assert chosen(waits, gates_after(two, gates=waits, start={A: 100}), rows, 100) == {103: ODD}, "7 waits"
    idle = gates_after(frontier(2, 2, {7}, opened={7}), frontier(3, 2, set(), ended="7"))
    restarted = gates_after(two, gates=idle, start={A: 100})
    assert set(restarted[KEY].held) == {(8, 1)}
    assert stored(HistoryOffset({A: 101}, gates=restarted)).gates == restarted


def test_frontiers_take_bounded_space_in_a_checkpoint() -> None:
    frontiers = []
    for index in range(1_000):
        one = frontier(index, index, {index}, opened={index})
        parsed = Frontier.FromString(one.message.payload)
        parsed.groups[0].group = f"g{index}"
        one.message.payload = parsed.SerializeToString()
        frontiers.append(one)
    assert len(gates_after(*frontiers)) == LOG_GROUPS_MAX
    logs = [index.to_bytes(16, "big").hex() for index in range(1, 1_000)]
    gates = Gates()
    seen = 0
    for first in range(0, len(logs), 100):
        frontiers = []
        for index, log in enumerate(logs[first : first + 100], first):
            named, version = logs[index : index + 10], 10_000 - index
            frontiers.append(frontier(9, version, {index}, read=CLOUD, origin=log, logs=named, opened={index}))
        gates = gates_after(*frontiers, gates=gates)
        seen = max(seen, len(gates[KEY].parts))
        after = gates[KEY].carried()
        assert after is not None
        assert len(after.parts) <= epochs.PARTS_MAX
    assert seen > epochs.PARTS_MAX
    assert gates[KEY].rest


def test_a_hundred_restarts_in_one_batch_make_no_epoch_incomplete() -> None:
    """Each restart has a new log in memory, which is followed, too."""
    frontiers = []
    memory = [index.to_bytes(16, "big").hex() for index in range(1, 101)]
    for index, log in enumerate(memory):
        version, logs = 2 * index + 1, [A, log]
        frontiers.append(frontier(4 * index, version, {index}, opened={index}, read=CLOUD, origin=A, logs=logs))
        frontiers.append(frontier(4 * index + 1, version, {index}, opened={index}, read=CLOUD, origin=log, logs=logs))
        frontiers.append(frontier(4 * index + 2, version + 1, set(), read=CLOUD, origin=A, logs=logs))
        if log != memory[-1]:
            frontiers.append(frontier(4 * index + 3, version + 1, set(), read=CLOUD, origin=log, logs=logs))
    gates = epochs.advance({}, BatchFrontiers({}, {CLOUD: 400}, frontiers), 1_000)
    assert set(gates[KEY].held) == {(99,)}, "the last log has no frontier of its end"
    assert gates[KEY].incomplete == {}
    carried = gates[KEY].carried()
    assert carried is not None
    assert set(carried.parts) == {A, memory[-1]}


def test_a_checkpoint_contains_the_waiting_epochs() -> None:
    begun = epochs.begin([frontier(2, 2, {3, 5})], is_new=True)
    assert begun[KEY].filter == {(5,)}
    gates = gates_after(frontier(7, 3, {5, 9}, opened={9}), gates=begun)
    offset = HistoryOffset({A: 9}, gates=gates)
    assert stored(offset) == offset
    for wrong in (7, [7], [["car", 4, "g", {}]], [["car", "x", "g", gates[KEY].json()]], {"a": 1}):
        with pytest.raises(UStatusError, match="expected waiting epochs"):
            Offset.of({A: 9, "epochs": wrong}, "car")
    gate = gates[KEY].json()
    with pytest.raises(UStatusError, match="different lengths"):
        Offset.of({"epochs": [[*KEY, gate | {"filter": [[1, 2]]}]]}, "car")
