"""Plans: where to divide matching records, against what a poll reads."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from history.log.log import Chunk, Log, Scan
from history.reading.subscriber import HistoryClient
from history.service import planning
from tests.history.world import SERVICE, HistoryWorld, publishes, retention_runs
from uprotocol import uri as uris
from uprotocol.communication import CallOptions
from uprotocol.core.ustreamer.ids import COMMAND
from uprotocol.core.ustreamer.v1.ustreamer_pb2 import CommandRequest, Gap, LogPlan, PollRequest, PollResponse, Position
from uprotocol.message import UMessageBuilder, UPayload
from uprotocol.status import UStatusError
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.uri_pb2 import UUri

TOPICS: Final = [uris.uri("vcu.vin", 0x10, 1, 0x8000 + place) for place in range(6)]
SINK: Final = uris.uri("cloud", 0x20, 1)


class World(HistoryWorld):
    """A durable log with almost nothing in memory, and a volatile one."""

    def __init__(self) -> None:
        self.now = 1_800_000_000_000
        self.matching: dict[Log, dict[int, tuple[UUri, int]]] = {}  # publishes: topic and time by seq

    async def begin(self, path: Path) -> None:
        self.durable = await Log.open(
            path / "l.db", name="durable", retention_ms=60_000, tail_bytes=1, now_ms=lambda: self.now
        )
        self.volatile = await Log.open(None, name="volatile", now_ms=lambda: self.now)
        await self.open(self.durable, self.volatile, share=1)
        self.client = HistoryClient(self.rpc, SERVICE)
        self.matching = {log: {} for log in self.logs}

    async def append(self, log: Log, topics: list[UUri], *, with_notification: bool = False) -> None:
        messages = publishes(topics, b"x")
        if with_notification:
            messages.insert(len(messages) // 2, UMessageBuilder.notification(TOPICS[0], SINK).build())
        sinks = [one.attributes.sink if one.attributes.HasField("sink") else None for one in messages]
        streams = [log.stream_id(one.attributes.source, sink) for one, sink in zip(messages, sinks, strict=True)]
        first = await log.append(streams, messages)
        for seq, (message, sink) in enumerate(zip(messages, sinks, strict=True), first):
            if sink is None:
                self.matching[log][seq] = message.attributes.source, self.now

    def expected(
        self, log: Log, request: PollRequest, after: int, until: int, records_max: int
    ) -> list[tuple[int, ...]]:
        """Returns (seq, records, time) of each cut."""
        found = [
            (seq, time)
            for seq, (topic, time) in self.matching[log].items()
            if after < seq <= until
            and (not request.topics or any(uris.matches(pattern, topic) for pattern in request.topics))
        ][:records_max]
        size = request.plan_records
        parts = [found[at : at + size] for at in range(0, len(found), size)]
        return [(part[-1][0], len(part), part[0][1]) for part in parts]

    async def retention(self) -> None:
        await retention_runs(self.durable)


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    made = World()
    await made.begin(tmp_path)
    yield made
    await made.close()


def cuts(response: PollResponse, log: Log) -> list[tuple[int, ...]]:
    found = [one for one in response.plan if one.incarnation == log.incarnation]
    assert len(found) <= 1
    return [(cut.position.seq, cut.records, cut.first_time_ms) for plan in found for cut in plan.cuts]


def places(response: PollResponse) -> dict[bytes, int]:
    return {position.incarnation: position.seq for position in response.next}


def plan_of(response: PollResponse, log: Log) -> LogPlan:
    return next(one for one in response.plan if one.incarnation == log.incarnation)


@pytest.mark.parametrize("seed", range(6))
async def test_a_plan_divides_what_a_poll_would_read(world: World, seed: int) -> None:
    rng = random.Random(seed)
    notifies = bool(seed % 2)
    for _ in range(rng.randint(20, 60)):
        world.now += rng.randint(1, 500)
        for log in world.logs:
            await world.append(
                log,
                rng.choices(TOPICS, k=rng.randint(1, 30)),
                with_notification=notifies and rng.random() < 0.5,
            )
    for topics in (
        [],
        [TOPICS[1]],
        TOPICS[2:5],
        [uris.pattern(resource=0x8003)],
        TOPICS,
        [uris.uri("x", 1, 1, 0x8000)],
    ):
        request = PollRequest(topics=topics, plan_records=rng.choice((1, 7, 50, 10_000)))
        planned: dict[Log, list[tuple[int, ...]]] = {log: [] for log in world.logs}
        for _ in range(100):
            if rng.random() < 0.5:
                request.max_records = rng.randint(2, 200)
            response = await world.client.poll(request)
            assert not response.batches
            assert not response.gaps
            before = {one.incarnation: one.seq for one in response.begin}
            for log in world.logs:
                made = cuts(response, log)
                total = sum(cut[1] for cut in made)
                planned[log] += made
                assert made == world.expected(
                    log, request, before[log.incarnation], places(response)[log.incarnation], total
                )
                assert total <= (request.max_records or planning.PLAN_RECORDS_MAX)
                if made:
                    plan = plan_of(response, log)
                    matching = [seq for seq, *_ in world.expected(log, request, 0, log.newest_seq, 1 << 40)]
                    assert plan.newest_match_seq == matching[-1]
                    assert [one.seq for one in plan.cuts[-1].position.witnesses] == [made[-1][0]]
                    assert plan.cuts[-1].position.in_memory == (not log.durable)
            del request.positions[:]
            request.positions.extend(response.next)
            if not response.more:
                break
        for log in world.logs:
            assert sum(cut[1] for cut in planned[log]) == sum(
                cut[1] for cut in world.expected(log, request, 0, log.newest_seq, 1 << 40)
            )
            assert places(response)[log.incarnation] == log.newest_seq
        # every part can be read on its own, and has as many records as planned
        log = rng.choice(world.logs)
        after = 0
        for seq, records, _ in planned[log][:5]:
            part = PollRequest(topics=topics)
            part.positions.extend(
                Position(incarnation=one.incarnation, seq=after if one is log else 1 << 40) for one in world.logs
            )
            part.until.add(incarnation=log.incarnation, seq=seq)
            answer = await world.client.poll(part)
            assert [len(batch.seq) for batch in answer.batches if batch.incarnation == log.incarnation] == [records]
            after = seq


async def test_who_reads_everything_is_planned_for_without_a_scan(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    await world.append(world.durable, TOPICS * 20)
    with monkeypatch.context() as patched:
        patched.setattr(Log, "scan", None)
        patched.setattr("history.service.poll.witnesses_at", no_witness)
        response = await world.client.poll(PollRequest(plan_records=50))
    assert cuts(response, world.durable) == [(50, 50, world.now), (100, 50, world.now), (120, 20, world.now)]
    assert plan_of(response, world.durable).newest_match_seq == 120
    assert not response.more


async def test_a_few_records_of_others_are_left_out_of_the_count(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "OTHERS_RECORDS_MAX", 3)
    for number in range(20):
        await world.append(world.durable, TOPICS, with_notification=number % 2 == 0)
    read: list[set[int] | None] = []
    scan = Log.scan

    async def noted(log: Log, after: int, *, streams: set[int] | None = None, **rest: Any) -> Scan:
        read.append(streams)
        return await scan(log, after, streams=streams, **rest)

    with monkeypatch.context() as patched:
        patched.setattr(Log, "scan", noted)
        patched.setattr("history.service.poll.witnesses_at", no_witness)
        response = await world.client.poll(PollRequest(plan_records=50))
    assert cuts(response, world.durable) == [(54, 50, world.now), (109, 50, world.now), (130, 20, world.now)]
    assert [len(streams or ()) for streams in read] == [1] * 4, "the notifications alone, three at a time"


async def no_witness(log: Log, seq: int) -> list[object]:
    return []


async def test_messages_are_not_read_for_a_plan(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(5):
        await world.append(world.durable, TOPICS * 3)
    with monkeypatch.context() as patched:
        patched.setattr("history.file.reader.decode", None)
        patched.setattr("history.service.poll.witnesses_at", no_witness)
        response = await world.client.poll(PollRequest(topics=TOPICS[:1], plan_records=10))
    assert cuts(response, world.durable) == [(55, 10, world.now), (85, 5, world.now)]


async def test_an_answer_has_a_limited_number_of_cuts(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("history.service.poll.PLAN_CUTS_MAX", 10)
    for log in world.logs:
        await world.append(log, TOPICS * 4)
    first = await world.client.poll(PollRequest(plan_records=2))
    assert [len(plan.cuts) for plan in first.plan] == [5, 5]
    assert first.more
    assert set(places(first).values()) == {10}
    rest = await world.client.poll(PollRequest(plan_records=2, positions=first.next, topics=TOPICS[:1]))
    assert cuts(rest, world.volatile) == [(19, 2, world.now)]
    assert places(rest)[world.volatile.incarnation] == 24


async def test_a_rare_topic_takes_bounded_steps(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("history.service.poll.PLAN_STEPS_MAX", 2)
    monkeypatch.setattr("history.file.reader.INDEX_ROWS_MAX", 3)
    for place in range(20):
        await world.append(world.durable, [TOPICS[place % 2]])
    request, seen = PollRequest(topics=TOPICS[:1], plan_records=100), 0
    for _ in range(10):
        response = await world.client.poll(request)
        seen += sum(cut.records for plan in response.plan for cut in plan.cuts)
        del request.positions[:]
        request.positions.extend(response.next)
        if not response.more:
            break
    assert seen == 10
    assert places(response)[world.durable.incarnation] == 20


async def test_a_plan_waits_holds_a_cursor_and_reports_losses(world: World) -> None:
    await world.append(world.durable, TOPICS[:1])
    start = await world.client.poll(PollRequest(plan_records=10, consumer="spark", lease_ms=60_000))
    assert (start.lease_ms, cuts(start, world.durable)) == (60_000, [(1, 1, world.now)])
    world.now += 200_000  # its lease is over, too
    await world.append(world.durable, TOPICS[:2])
    await world.retention()
    begin = [Position(incarnation=world.durable.incarnation, seq=0)]
    response = await world.client.poll(PollRequest(plan_records=10, positions=begin))
    assert [(gap.reason, gap.after_seq, gap.before_seq) for gap in response.gaps] == [(Gap.REASON_RETENTION, 0, 2)]
    assert cuts(response, world.durable) == [(3, 2, world.now)]
    waiting = PollRequest(plan_records=10, positions=response.next, wait_ms=50)
    nothing = await world.client.poll(waiting)
    assert (len(nothing.plan), nothing.more, places(nothing)) == (0, False, places(response))


@pytest.mark.parametrize(
    "request_", [PollRequest(plan_records=1, follower=b"x" * 16), PollRequest(plan_records=1, frontiers=True)]
)
async def test_a_plan_is_neither_of_a_follower_nor_with_frontiers(world: World, request_: PollRequest) -> None:
    with pytest.raises(UStatusError) as caught:
        await world.client.poll(request_)
    assert caught.value.code == UCode.INVALID_ARGUMENT


async def test_nobody_is_pushed_a_plan(world: World) -> None:
    command = CommandRequest(follower=b"x" * 16, number=1)
    command.push.sink.CopyFrom(SINK)
    command.push.poll.plan_records = 1
    with pytest.raises(UStatusError) as caught:
        await world.rpc.invoke_method(
            uris.uri("gateway", 4, 1, COMMAND), UPayload.pack(command), CallOptions(timeout_ms=2_000)
        )
    assert caught.value.code == UCode.INVALID_ARGUMENT


@given(
    after=st.integers(0, 20),
    floor=st.integers(0, 30),
    length=st.integers(1, 60),
    gaps=st.lists(st.tuples(st.integers(0, 80), st.integers(2, 20)), max_size=4),
    others=st.sets(st.integers(1, 80)),
    size=st.integers(1, 10),
    records_max=st.integers(1, 60),
    cuts_max=st.integers(1, 10),
)
def test_records_are_counted_without_holes_and_others(
    after: int,
    floor: int,
    length: int,
    gaps: list[tuple[int, int]],
    others: set[int],
    size: int,
    records_max: int,
    cuts_max: int,
) -> None:
    until = after + length
    found = Scan(after, until, 0, 0, floor_seq=floor)
    found.covered = until
    found.gaps = [(low, low + width) for low, width in gaps if after <= low < until]
    seqs = sorted(seq for seq in others if max(after, floor) < seq <= until)
    found.chunks = [Chunk(seqs, 0, [1] * len(seqs), [0] * len(seqs), [])] if seqs else []
    lost = {seq for low, width in found.gaps for seq in range(low + 1, width)}
    expected = [seq for seq in range(max(after, floor) + 1, until + 1) if seq not in lost and seq not in others]
    made = planning.Cuts(size, records_max, cuts_max)
    planning._count(found, made)
    taken = expected[: min(records_max, size * cuts_max)]
    assert [(cut.first_seq, cut.seq, cut.records) for cut in made.cuts] == [
        (taken[at], taken[at : at + size][-1], len(taken[at : at + size])) for at in range(0, len(taken), size)
    ]
    is_full = len(taken) == min(records_max, size * cuts_max)
    assert found.covered == (taken[-1] if is_full else until)
    assert all(low < found.covered for low, _ in found.gaps)
