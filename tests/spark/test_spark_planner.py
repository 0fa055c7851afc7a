"""The planner against model histories: whatever changes between batches, each wanted record is in one batch."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from spark_ingest import offsets, polls
from spark_ingest.client import read
from spark_ingest.offsets import LogLoss, Offset, Range
from spark_ingest.options import Options
from spark_ingest.planner import Planner
from tests.spark.model_history import ModelHistory, ModelRecord, ModelSession
from uprotocol.core.ustreamer.v1.ustreamer_pb2 import Gap
from uprotocol.status import UStatusError
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.umessage_pb2 import UMessage

TOPICS = [f"up://car/1/1/800{number}" for number in range(4)]
NAMES = frozenset(range(4))


def settings(**more: Any) -> Options:
    given: dict[str, Any] = {"transport": "model", "local_authority": "spark1"}
    given |= {} if "authorities" in more else {"authority": "car"}
    return Options.model_validate(given | more)


class Query:
    """A query and its checkpoint, over model histories, on a loop that is driven step by step."""

    def __init__(self, runner: asyncio.Runner, histories: dict[str, ModelHistory], **options: Any) -> None:
        self._runner, self.histories = runner, histories
        self.checkpoint: dict[str, Any] | None = None
        self.delivered: Counter[int] = Counter()
        self.losses: list[LogLoss] = []
        self.batches = 0
        self.start(**options)

    def start(self, **options: Any) -> None:
        self.options = settings(**options)
        self.session: Any = ModelSession(self.options, self.histories)
        self.planner = Planner(self.session, lambda loss, _: self.losses.append(loss))

    def stop(self) -> None:
        self._runner.run(self.planner.fleet.close())

    def batch(self, limit: int | None = None, idle_s: float = 0.0, *, fails: bool = False) -> int:
        """Plan and read one batch. Returns 0 without new records, else the number of its rows plus 1. `fails`: read the
        batch twice, as Spark does if a task was killed."""
        if self.checkpoint is None:
            self.checkpoint = self._runner.run(self.planner.begin("query1")).json()
        start = Offset.of(json.loads(json.dumps(self.checkpoint)), self.options.authority)
        end = self._runner.run(self.planner.latest(start, limit, idle_s))
        if end == start:
            return 0
        again = Offset.of(json.loads(json.dumps(end.json())), self.options.authority)
        assert again == end, "an offset is what it was after it was in a checkpoint"
        rows = list(self.rows(start, end, self.planner.counted))
        if fails:
            assert sorted(rows) == sorted(self.rows(start, end, {})), "a batch has the same rows at each reading"
        self.delivered.update(rows)
        self.batches += 1
        self.checkpoint = end.json()
        self._runner.run(self.planner.commit(end))
        return 1 + len(rows)

    def rows(self, start: Offset, end: Offset, counted: offsets.Counted) -> Iterator[int]:
        ranges = offsets.ranges(start, end, self.options.coverage_topics)
        for part in offsets.divide(
            ranges, counted, self.options.max_records_per_partition, self.options.min_partitions
        ):
            for _, records in read(self.session, part, self._lost):
                yield from (int(UMessage.FromString(data).payload) for data in records.message)

    def _lost(self, loss: LogLoss, range: Range) -> None:
        self.losses.append(loss)

    def drain(self, limit: int | None = None) -> None:
        quiet = 0
        while quiet < 3:  # three rounds without a batch
            quiet = 0 if self.batch(limit, 0.01) else quiet + 1


steps = st.lists(
    st.one_of(
        st.tuples(st.just("append"), st.lists(st.integers(0, 3), min_size=1, max_size=6)),
        st.tuples(st.just("topics"), st.sets(st.integers(0, 3))),
        st.tuples(st.just("visible"), st.one_of(st.none(), st.sets(st.integers(0, 3)))),
        st.tuples(st.just("batch"), st.integers(1, 5)),
        st.tuples(st.just("fail"), st.integers(1, 5)),
    ),
    max_size=14,
)


SEEN_LATER: list[tuple[str, Any]] = [  # records become visible while older ones of an added topic are still read
    ("append", [0, 0, 0, 0, 0, 0]),
    ("topics", set()),
    ("append", [0, 0, 1]),
    ("topics", {2}),
    ("append", [0, 3, 2, 0, 3, 1]),
    ("visible", None),
    ("visible", {0, 1}),
    ("topics", set()),
    ("visible", None),
]


@example(SEEN_LATER, 1)
@given(steps, st.integers(1, 4))
@example(
    [
        ("append", [0]),
        ("batch", 1),
        ("visible", {0}),
        ("append", [0, 0, 0, 0]),
        ("batch", 1),
    ],
    1,
)
def test_each_wanted_record_is_in_one_batch_whatever_topics_and_access_do(
    steps: list[tuple[str, Any]], partition: int
) -> None:
    with asyncio.Runner() as runner:
        history, made = ModelHistory(), list[ModelRecord]()
        topics = {0, 1}
        query = Query(
            runner, {"car": history}, topics=tuple(TOPICS[one] for one in topics), max_records_per_partition=partition
        )

        def restart() -> None:
            query.stop()
            query.start(topics=tuple(TOPICS[one] for one in sorted(topics)), max_records_per_partition=partition)

        try:
            for step, value in steps:
                if step == "append":
                    new = [
                        ModelRecord(TOPICS[one], 1_000 + len(made) + place, len(made) + place)
                        for place, one in enumerate(value)
                    ]
                    made += new
                    history.append(*new)
                elif step == "topics":
                    query.drain()  # what is under way belongs to the topics before
                    topics = set(value)
                    restart()
                elif step == "visible":
                    query.drain()
                    history.visible = None if value is None else frozenset(TOPICS[one] for one in value)
                    restart()
                else:
                    query.batch(value, fails=step == "fail")
            query.drain(3)
            wanted = {TOPICS[one] for one in topics or NAMES} & (
                history.visible or (set(TOPICS) if history.visible is None else set())
            )
            assert not query.losses
            missing = [record for record in made if record.topic in wanted and not query.delivered[record.number]]
            assert not missing, f"of {topics}"
            assert max(query.delivered.values(), default=1) == 1
        finally:
            query.stop()


@pytest.fixture
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as made:
        yield made


def records(count: int, topic: int = 0, begin: int = 0) -> list[ModelRecord]:
    return [ModelRecord(TOPICS[topic], 1_000 + begin + one, begin + one) for one in range(count)]


def test_a_fleet_is_one_query_and_one_that_is_away_holds_up_nobody(runner: asyncio.Runner) -> None:
    histories = {f"car{number}": ModelHistory(b"%016d" % number) for number in range(20)}
    for number, history in enumerate(histories.values()):
        history.append(*records(10, begin=number * 100))
        history.is_away = number % 5 == 0
    query = Query(runner, histories, authorities=tuple(histories), starting_offsets="earliest")
    try:
        query.drain(limit=50)
        assert sum(query.delivered.values()) == 160
        away = {name for name, lag in query.planner.fleet.lag().items() if "away" in lag}
        assert away == {"car0", "car5", "car10", "car15"}
        assert query.planner.fleet.lag()["car0"]["away"]["reason"] == "nobody answers"
        for history in histories.values():
            history.is_away = False
        for member in query.planner.fleet.members.values():
            member.wake.set()  # instead of the pause between two calls
        query.drain(limit=7)
        assert set(query.delivered.values()) == {1}
        assert len(query.delivered) == 200
        assert not any("away" in lag or lag["records"] for lag in query.planner.fleet.lag().values())
    finally:
        query.stop()


@pytest.mark.parametrize("where", ["earliest", "latest"])
def test_a_history_that_joins_later_begins_where_the_query_began(runner: asyncio.Runner, where: str) -> None:
    histories = {"car1.depot7": ModelHistory(b"1" * 16), "car2.depot7": ModelHistory(b"2" * 16)}
    histories["car1.depot7"].append(*records(3))
    query = Query(runner, histories, authorities=("car1.depot7", "*.depot7"), starting_offsets=where)
    try:
        query.drain()
        now_ms = query.planner.fleet.run.began_ms
        histories["car2.depot7"].append(ModelRecord(TOPICS[0], now_ms - 5, 10), ModelRecord(TOPICS[0], now_ms + 5, 11))

        async def announce() -> None:
            query.planner.fleet.join("car2.depot7")
            query.planner.fleet.join("van1.depot8")

        runner.run(announce())
        query.drain()
        assert set(query.delivered) == ({0, 1, 2, 10, 11} if where == "earliest" else {11})
        query.stop()
        query.start(authorities=("car1.depot7", "*.depot7"), starting_offsets=where)
        histories["car2.depot7"].append(*records(1, begin=20))
        query.drain()  # the checkpoint names it
        assert query.delivered[20] == 1
    finally:
        query.stop()


def test_no_streamer_that_answers_is_an_error_with_the_reason(runner: asyncio.Runner) -> None:
    history = ModelHistory()
    history.is_away = True
    query = Query(runner, {"car": history}, start_timeout=0.05)
    try:
        with pytest.raises(UStatusError, match=r"no answer from car within 0.05 s: nobody answers"):
            query.batch()
        query.stop()
        history.is_away, history.refuses = False, UStatusError(UCode.PERMISSION_DENIED, "you may read nothing")
        query.start()
        with pytest.raises(UStatusError, match="you may read nothing"):
            query.batch()
    finally:
        query.stop()


def test_a_quiet_query_holds_no_records_and_an_older_checkpoint_still_works(runner: asyncio.Runner) -> None:
    history = ModelHistory()
    history.append(*records(2), *records(100, topic=1, begin=10))
    query = Query(runner, {"car": history}, topics=(TOPICS[0],))
    try:
        query.drain()
        first = query.checkpoint
        assert history.cursors == {"spark-query1": 102}, "beyond the records of others"
        history.retain()
        assert history.floor == 102
        query.stop()
        query.start(topics=(TOPICS[0],))
        query.checkpoint = first
        history.append(*records(1, begin=5))
        query.drain()
        assert not query.losses
        assert query.delivered == Counter([0, 1, 5])
    finally:
        query.stop()


def test_losses_are_named_with_their_cause(runner: asyncio.Runner) -> None:
    history = ModelHistory()
    history.append(*records(10))
    query = Query(runner, {"car": history}, max_records_per_batch=3)
    try:
        query.batch(3)
        query.stop()
        history.floor = 6  # retention, while the job was down for longer than its lease
        query.start()
        query.drain()
        assert [str(loss) for loss in query.losses] == [
            f"records 4 to 6 of log {history.incarnation.hex()} are lost: retention deleted them before they were read"
        ]
        assert query.delivered == Counter([0, 1, 2, 6, 7, 8, 9])
        query.stop()
        query.losses.clear()
        old, history.incarnation, history.floor, history.records = (
            history.incarnation,
            b"b" * 16,
            0,
            records(2, begin=50),
        )
        query.start()
        query.drain()
        (loss,) = query.losses
        assert (loss.reason, loss.incarnation) == (Gap.REASON_INCARNATION, old.hex())
        assert {50, 51} <= query.delivered.keys()
    finally:
        query.stop()


def test_a_loss_after_which_nothing_comes_is_reported_at_once(runner: asyncio.Runner) -> None:
    history = ModelHistory()
    history.append(*records(2), *records(3, topic=1, begin=50))
    query = Query(runner, {"car": history}, topics=(TOPICS[0],))
    try:
        query.drain()
        query.stop()
        history.append(*records(2, begin=2))
        history.floor = 7  # retention deletes the new ones before the query is back
        query.start(topics=(TOPICS[0],))
        query.drain()
        assert [(loss.after, loss.before, loss.reason) for loss in query.losses] == [(2, 8, Gap.REASON_RETENTION)]
        history.append(*records(1, begin=4))
        query.drain()
        assert (len(query.losses), query.delivered) == (1, Counter([0, 1, 4]))
    finally:
        query.stop()


def test_the_lag_is_known_also_right_after_a_batch(runner: asyncio.Runner) -> None:
    history = ModelHistory()
    history.append(*records(100))
    query = Query(runner, {"car": history}, max_records_per_batch=40)
    try:
        query.batch(40)
        lag = query.planner.fleet.lag()["car"]
        assert lag["records"] == 60
        assert lag["seconds"] > 1_000_000, "since 1970"
        query.drain()
        assert query.planner.fleet.lag()["car"] == {"records": 0, "seconds": 0.0}
    finally:
        query.stop()


def test_a_run_that_ends_plans_what_was_there_when_it_began(runner: asyncio.Runner) -> None:
    history = ModelHistory()
    history.append(*records(10))
    query = Query(runner, {"car": history})
    try:
        runner.run(query.planner.fleet.end_at_present())
        history.append(*records(5, begin=10))
        query.drain(4)
        assert sum(query.delivered.values()) == 10
        query.stop()
        query.start()
        runner.run(query.planner.fleet.end_at_present())
        query.drain(4)
        assert sum(query.delivered.values()) == 15
    finally:
        query.stop()


def test_a_batch_that_is_read_again_keeps_its_records_meanwhile(runner: asyncio.Runner) -> None:
    history = ModelHistory()
    history.append(*records(5))
    query = Query(runner, {"car": history}, max_records_per_partition=1)
    try:
        query.batch(3)
        start = Offset.of(query.checkpoint)
        end = runner.run(query.planner.latest(start, None, 1.0))
        query.stop()
        history.cursors.clear()  # the job was down for longer than its lease
        query.start()
        runner.run(query.planner.reread(start, end))
        assert history.cursors == {"spark-query1": 3}
        history.append(*records(2, begin=5))
        further = runner.run(query.planner.latest(end, None, 1.0))
        assert sorted(query.rows(end, further, {})) == [5, 6]
    finally:
        query.stop()


def test_one_batch_may_have_all_that_is_there(runner: asyncio.Runner) -> None:
    """Trigger.Once; `latest` is limited by the options."""
    history = ModelHistory()
    history.append(*records(100))
    query = Query(runner, {"car": history}, max_records_per_batch=7, max_records_per_partition=5)
    try:
        start = runner.run(query.planner.begin("query1"))
        end = runner.run(query.planner.latest(start, None, 1.0))
        assert len(list(query.rows(start, end, query.planner.counted))) == 7
        query.stop()
        query.start(max_records_per_batch=7, max_records_per_partition=5)  # it was not committed
        end = runner.run(query.planner.present(start))
        assert sorted(query.rows(start, end, query.planner.counted)) == list(range(100))
    finally:
        query.stop()


def test_the_whole_of_a_time_is_read_at_once(runner: asyncio.Runner) -> None:
    history = ModelHistory()
    history.append(*records(100))
    query = Query(runner, {"car": history}, starting_timestamp=1_020, ending_timestamp=1_030)
    start, end = runner.run(query.planner.whole())
    assert sorted(query.rows(start, end, query.planner.counted)) == list(range(20, 30))
    query.stop()
    text = json.dumps({history.incarnation.hex(): 7})
    query.start(starting_offsets=json.dumps({history.incarnation.hex(): 5}), ending_offsets=text)
    start, end = runner.run(query.planner.whole())
    assert sorted(query.rows(start, end, query.planner.counted)) == [5, 6]
    assert not history.cursors
    query.stop()
    history.is_away = True
    query.start(authorities=("car",), start_timeout=0.05)
    with pytest.raises(UStatusError, match="nobody answers"):
        runner.run(query.planner.whole())
    query.stop()


def test_given_offsets_of_a_log_that_is_not_there_or_beyond_its_end_are_losses(runner: asyncio.Runner) -> None:
    history, other = ModelHistory(), "ab" * 16
    history.append(*records(10))
    log = history.incarnation.hex()
    query = Query(runner, {"car": history}, starting_offsets=json.dumps({other: 5}))
    try:
        query.drain()
        assert [(loss.incarnation, loss.after, loss.before) for loss in query.losses] == [(other, 5, 0)]
        assert query.delivered.keys() == {*range(10)}
    finally:
        query.stop()
    for ending, expected, rows in (({log: 12}, (log, 12, 11), 10), ({other: 3, log: 4}, (other, 0, 0), 4)):
        query.losses.clear()
        query.start(ending_offsets=json.dumps(ending))
        start, end = runner.run(query.planner.whole())
        assert [(loss.incarnation, loss.after, loss.before) for loss in query.losses] == [expected]
        assert len(list(query.rows(start, end, query.planner.counted))) == rows
        query.stop()


def test_a_batch_waits_for_enough_records(runner: asyncio.Runner) -> None:
    history = ModelHistory()
    history.append(*records(3))
    query = Query(runner, {"car": history}, min_records_per_batch=5, max_trigger_delay=3_600)
    try:
        query.drain()
        assert not query.batches
        history.append(*records(2, begin=3))
        query.drain()
        assert (query.batches, sum(query.delivered.values())) == (1, 5)
        history.append(*records(2, begin=5))
        query.drain()
        assert query.batches == 1
        query.planner._last_batch_s -= 3_600
        query.drain()
        assert sum(query.delivered.values()) == 7
        history.append(*records(1, begin=7))
        runner.run(query.planner.fleet.end_at_present())  # which ignores it
        query.drain()
        assert sum(query.delivered.values()) == 8
    finally:
        query.stop()


def test_added_topics_may_begin_at_the_end(runner: asyncio.Runner) -> None:
    history = ModelHistory()
    history.append(*records(2, topic=1, begin=10), *records(2))
    query = Query(runner, {"car": history}, topics=(TOPICS[0],))
    try:
        query.drain()
        query.stop()
        query.start(topics=tuple(TOPICS[:2]), added_topics="latest")
        history.append(*records(1, topic=1, begin=20))
        query.drain()
        assert query.delivered == Counter([0, 1, 20])
    finally:
        query.stop()


def test_topics_that_are_granted_to_a_running_query_come_without_a_new_record(
    runner: asyncio.Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The poll that waits has passed their records, since they did not match."""
    monkeypatch.setattr(polls, "SPARK_WAIT_MS_MAX", 50)
    history = ModelHistory()
    history.append(*records(2), *records(3, topic=1, begin=10))
    history.visible = frozenset(TOPICS[:1])
    query = Query(runner, {"car": history})
    try:
        query.drain()
        assert query.delivered == Counter([0, 1])
        history.visible = None
        for _ in range(10):
            query.batch(None, 0.1)
        assert query.delivered == Counter([0, 1, 10, 11, 12])
    finally:
        query.stop()


def test_topics_may_be_added_while_earlier_ones_are_still_read(runner: asyncio.Runner) -> None:
    """No batch ends where the reading of the earlier ones does: what comes before that does not match."""
    history = ModelHistory()
    history.append(*records(2, topic=1, begin=10), *records(1, topic=2, begin=20), *records(1))
    query = Query(runner, {"car": history}, topics=(TOPICS[0],), max_records_per_partition=1)
    try:
        query.drain()
        query.stop()
        query.start(topics=tuple(TOPICS[:2]), max_records_per_partition=1)
        query.batch(1)
        query.stop()
        query.start(topics=tuple(TOPICS[:3]), max_records_per_partition=1)
        query.drain()
        assert query.delivered == Counter([0, 10, 11, 20])
        before = history.polls
        query.drain()
        assert history.polls - before < 10, "it waits for records"
    finally:
        query.stop()


def test_a_checkpoint_of_version_1_is_continued(runner: asyncio.Runner) -> None:
    history = ModelHistory()
    history.append(*records(10))
    query = Query(runner, {"car": history})
    try:
        query.checkpoint = {history.incarnation.hex(): 6}
        query.drain()
        assert query.delivered == Counter([6, 7, 8, 9])
        assert query.batches == 1
        assert query.checkpoint is not None
        assert query.checkpoint["query"]
    finally:
        query.stop()


def test_a_first_batch_that_was_cut_off_is_read_again_from_where_it_began(runner: asyncio.Runner) -> None:
    """Spark asks for the initial offset anew then, and `latest` is another one."""
    history = ModelHistory()
    history.append(*records(5))
    query = Query(runner, {"car": history}, starting_offsets="latest", consumer="c")
    try:
        start = runner.run(query.planner.begin("query1"))
        history.append(*records(3, begin=5))
        end = runner.run(query.planner.latest(start, None, 1.0))
        assert sorted(query.rows(start, end, {})) == [5, 6, 7]
        assert runner.run(query.planner.begin("query1")) == start
        query.stop()
        query.start(starting_offsets="latest", consumer="c")
        again = runner.run(query.planner.begin("query2"))
        assert again != start
        assert history.cursors["c"] == 5, "its records are kept"
        runner.run(query.planner.reread(again, start))
        assert history.cursors["c"] == 5, "also if it was empty"
        query.stop()
        query.start(starting_offsets="latest", consumer="c")
        runner.run(query.planner.begin("query3"))
        end = Offset.of(end.json())
        runner.run(query.planner.reread(again, end))
        assert history.cursors["c"] == 5, "its records are kept while they are read"
        assert sorted(query.rows(again, end, {})) == [5, 6, 7]
        assert runner.run(query.planner.latest(end, None, 0.1)) == end
        assert history.cursors["c"] == 8, "it is the same query"
        history.append(*records(1, begin=8))
        assert sorted(query.rows(end, runner.run(query.planner.latest(end, None, 1.0)), {})) == [8]
    finally:
        query.stop()


@given(st.lists(st.lists(st.integers(1, 50), max_size=8), max_size=6), st.one_of(st.none(), st.integers(1, 300)))
def test_a_limit_is_shared_and_none_starves(counts: list[list[int]], limit: int | None) -> None:
    taken = offsets.share(counts, limit)
    sizes = [sum(one[:count]) for one, count in zip(counts, taken, strict=True)]
    assert all(count > 0 for one, count in zip(counts, taken, strict=True) if one)
    if limit is None:
        assert sizes == [sum(one) for one in counts]
    else:
        firsts = sum(one[0] for one in counts if one)
        assert sum(sizes) <= max(limit, 0) + firsts
