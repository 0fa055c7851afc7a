"""Which streams match a query, and their newest seqs: the same as after a full scan, and the work that it takes."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Iterator, Sequence, Set
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from history.log import log as log_module
from history.log.log import Log, Stream
from history.records.chunk import is_publish
from history.service import matches as matches_module
from history.service import poll as poll_module
from history.service.matches import EVERYTHING, Match, Matches, Sight
from tests.history.world import SERVICE, HistoryWorld, publishes
from tests.tiers import examples
from uprotocol import uri as uris
from uprotocol.communication import CallOptions
from uprotocol.core.ustreamer.v1.ustreamer_pb2 import PollRequest, PollResponse
from uprotocol.message import UMessageBuilder, UPayload
from uprotocol.v1.umessage_pb2 import UMessage
from uprotocol.v1.uri_pb2 import UUri

AUTHORITIES = ["v1", "v2", "v3.fleet", "x" * 128, ""]
TOPICS = [
    UUri(authority_name=authority, ue_id=ue_id, ue_version_major=1, resource_id=resource)
    for authority in AUTHORITIES
    for ue_id in (0x10, 0x2_0010)
    for resource in (0x8000, 0x8001)
]
PATTERNS = [
    uris.ANY,
    uris.pattern(resource=0x8001),
    uris.pattern(ue_id=0xFFFF_0010, resource=0x8000),
    uris.pattern("v1"),
    uris.pattern("v2", resource=0x8000),
    *TOPICS[:6],
    *TOPICS[12:14],
    uris.uri("nobody", 0x10, 1, 0x8000),
]


class Odd(Sight):
    """Accepts topics with an even resource."""

    key = "odd"

    @property
    def cost(self) -> int:
        return 3

    def sees(self, source: UUri, sink: UUri | None) -> bool:
        return source.resource_id % 2 == 0


def matched(log: Log, patterns: Sequence[UUri], sight: Sight) -> set[int]:
    """By looking at all."""
    return {
        stream.id
        for stream in log.streams()
        if is_publish(stream)
        and (not patterns or any(uris.matches(pattern, stream.source) for pattern in patterns))
        and sight.sees(stream.source, stream.sink)
    }


async def append(log: Log, topic: UUri, kind: int = 0) -> None:
    """`kind` 0: a publish, 1: a publish with a sink, 2: a notification."""
    message = UMessageBuilder.publish(topic).build()
    if kind:
        message.attributes.sink.CopyFrom(uris.pattern("v2") if kind == 1 else uris.uri("cloud", 0x20, 1))
    sink = message.attributes.sink if kind else None
    await log.append([log.stream_id(topic, sink, wanted=True)], [message])


@settings(deadline=None, max_examples=examples(150))
@given(
    st.lists(st.sampled_from(PATTERNS), max_size=4, unique_by=uris.key),
    st.booleans(),
    st.integers(1, 30),
    st.lists(st.tuples(st.integers(0, len(TOPICS) - 1), st.sampled_from([0, 0, 1, 2, 9])), max_size=60),
)
def test_it_is_as_if_all_streams_had_been_looked_at(
    patterns: list[UUri], is_odd: bool, few: int, does: list[tuple[int, int]]
) -> None:
    """Streams come, grow and are forgotten; the ring keeps some five records."""

    async def run() -> None:
        log = await Log.open(None, name="ring", retention_bytes=5_000, forget_after_s=3_600)
        sight = Odd() if is_odd else EVERYTHING
        cached = Matches([log]).of(patterns, EVERYTHING, "me")
        match = cached[log] if sight is EVERYTHING else Match(log, patterns or [uris.ANY], sight)
        for place, kind in does:
            if kind == 9:
                log.stream_table._forget(at_once=True)
                if match is not cached[log]:
                    match.forget({id for id in match.ids if not log.knows_stream(id)})
            else:
                await append(log, TOPICS[place], kind)
            if place % 3 == 0:
                expected = matched(log, patterns, sight)
                newest = max((log.stream(id).newest_seq for id in expected), default=0)
                assert await match.newest_seq() == newest
                await match.complete()
                assert set(match.ids) == expected
                assert {stream.id for stream in match.streams()} == expected
        await log.close()

    before = matches_module.FEW_MAX, matches_module.STREAMS_PER_STEP
    matches_module.FEW_MAX, matches_module.STREAMS_PER_STEP = few, 1 + few % 4  # type: ignore[misc]
    try:
        asyncio.run(run())
    finally:
        matches_module.FEW_MAX, matches_module.STREAMS_PER_STEP = before  # type: ignore[misc]


# -- work


class CountingLog:
    """Counts the streams and chunks that are read."""

    def __init__(self, log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
        self.streams = self.chunks = 0
        streams_after, stream, tail = log.stream_table.after, log.stream, log.tail

        def after(id: int, count: int, authorities: Set[str] | None = None) -> list[Stream]:
            found = streams_after(id, count, authorities)
            self.streams += len(found)
            return found

        def one(id: int) -> Stream:
            self.streams += 1
            return stream(id)

        def chunks(after: int) -> Any:
            found = tail(after)
            return None if found is None else _Counted(self, found)

        monkeypatch.setattr(log.stream_table, "after", after)
        monkeypatch.setattr(log, "stream", one)
        monkeypatch.setattr(log, "tail", chunks)


class _Counted(list[Any]):
    def __init__(self, counts: CountingLog, chunks: list[Any]) -> None:
        super().__init__(chunks)
        self._counts = counts

    def __reversed__(self) -> Iterator[Any]:  # type: ignore[override]
        for chunk in super().__reversed__():
            self._counts.chunks += 1
            yield chunk


async def fleet(vehicles: int, topics: int = 10) -> Log:
    """A volatile log in which every topic has a record."""
    log = await Log.open(None, name="ring", forget_after_s=3_600)
    for vehicle in range(vehicles):
        sources = [uris.uri(f"v{vehicle}", 0x10, 1, 0x8000 + place) for place in range(topics)]
        await log.append([log.stream_id(one) for one in sources], publishes(sources, b"x"))
    return log


@pytest.mark.parametrize("vehicles", [30, 300])
async def test_the_work_follows_the_question_and_the_change_and_not_all_topics(
    vehicles: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = await fleet(vehicles)
    monkeypatch.setattr(matches_module, "FEW_MAX", 100)
    counted = CountingLog(log, monkeypatch)
    named = Match(log, [uris.uri("v7", 0x10, 1, 0x8000 + place) for place in range(4)])
    assert await named.newest_seq() == 7 * 10 + 4
    of_one = Match(log, [uris.pattern("v8", resource=0x8002)])
    assert await of_one.newest_seq() == 8 * 10 + 3
    assert counted.streams <= 2 * 10 + 5, "those of two vehicles, and the five that match"
    wide = Match(log, [uris.ANY])
    await wide.complete()
    assert await wide.newest_seq() == vehicles * 10
    counted.streams = counted.chunks = 0
    for _ in range(10):
        assert await wide.newest_seq() == vehicles * 10
    assert (counted.streams, counted.chunks) == (0, 0), "nothing has changed"
    await append(log, uris.uri("v3", 0x10, 1, 0x8003))
    await append(log, uris.uri("new", 0x10, 1, 0x8003))
    counted.streams = counted.chunks = 0
    assert await wide.newest_seq() == vehicles * 10 + 2
    assert await named.newest_seq() == 7 * 10 + 4
    assert counted.streams <= 1 + 1 + 4, "the new one, by each of both, and the four that are named"
    assert counted.chunks == 1, "back from the newest"
    await log.close()


@pytest.mark.parametrize("sight", [EVERYTHING, Odd()], ids=["everything", "odd"])
async def test_the_newest_is_found_without_a_scan_of_all_streams_if_it_is_among_the_last(
    sight: Sight, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = await fleet(300)
    counted = CountingLog(log, monkeypatch)
    newest = 300 * 10 if sight is EVERYTHING else 300 * 10 - 1
    assert await Match(log, [uris.ANY], sight).newest_seq() == newest
    assert counted.streams == log.newest_seq - newest + 1
    monkeypatch.setattr(matches_module, "LAST_RECORDS", 20)
    assert await Match(log, [uris.pattern(resource=0x8004)], sight).newest_seq() == 300 * 10 - 5
    counted.streams = 0
    long_ago = uris.pattern("v7", ue_id=0xFFFF_0010), uris.pattern("nobody", ue_id=0xFFFF_0010)
    monkeypatch.setattr(matches_module, "STREAMS_PER_STEP", 5)
    assert await Match(log, long_ago, sight).newest_seq() == (80 if sight is EVERYTHING else 79)
    assert counted.streams <= 20 + 10 + 1 + 10, "the last, all of the two, and those that match"
    await log.close()


async def test_each_kind_of_topic_is_compared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    compared = 0
    really = uris.matches

    def matches(pattern: UUri, candidate: UUri) -> bool:
        nonlocal compared
        compared += 1
        return really(pattern, candidate)

    log = await fleet(200)
    monkeypatch.setattr("history.service.matches.uris.matches", matches)
    match = Match(log, [uris.pattern(resource=0x8003), uris.pattern(resource=0x8004)])
    await match.complete()
    assert len(match.ids) == 400
    assert compared <= 2 * 10
    await log.close()


async def test_a_step_is_bounded_by_what_it_compares(monkeypatch: pytest.MonkeyPatch) -> None:
    log = await fleet(300)
    steps = 1
    match = Match(log, [uris.ANY], Odd())
    while not match.advance():
        steps += 1
        assert match._comparisons <= matches_module.COMPARISONS_PER_STEP + Odd().cost
    assert steps >= 300 * 10 * (1 + Odd().cost) // matches_module.COMPARISONS_PER_STEP
    assert (len(match.ids), match.withheld) == (1_500, 1_500)
    await log.close()


async def test_what_is_kept_is_bounded_and_what_is_asked_for_last_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    log = await fleet(50)
    monkeypatch.setattr(matches_module, "CACHED_BYTES_MAX", 40_000)
    known = Matches([log])

    async def ask(place: int) -> Match:
        pattern = uris.pattern(ue_id=0xFFFF_0010, resource=0x8000 + place)
        match = known.of([pattern], EVERYTHING, f"caller{place}")[log]
        await match.complete()
        return match

    wide = known.of((), EVERYTHING, "me")[log]
    await wide.complete()
    asked = [await ask(place) for place in range(10)]
    assert await ask(9) is asked[9]
    assert sum(match.memory_bytes for _, matches in known._cached.values() for match in matches.values()) <= 40_000
    await log.close()


# -- over the wire


class World(HistoryWorld):
    async def poll(self, request: PollRequest) -> PollResponse:
        method, options = uris.uri(SERVICE.authority_name, 4, 1, 2), CallOptions(timeout_ms=60_000)
        return (await self.rpc.invoke_method(method, UPayload.pack(request), options)).unpack(PollResponse)


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    made = World()
    await made.open(await Log.open(tmp_path / "l.db", name="durable", tail_bytes=1, forget_after_s=3_600))
    yield made
    await made.close()


async def test_topics_that_come_while_a_poll_is_being_answered_are_not_passed_over(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More streams at once than one step reads, after the poll has read all earlier ones."""
    monkeypatch.setattr(matches_module, "STREAMS_PER_STEP", 2)
    (log,) = world.logs
    topics = [uris.uri(f"v{place}", 0x10, 1, 0x8000) for place in range(40)]
    await world.append_all(log, publishes(topics[:1], b"x"))
    at, came = poll_module.witnesses_at, False

    async def meanwhile(log: Log, seq: int) -> Any:
        nonlocal came
        if not came:
            came = True
            await world.append_all(log, publishes(topics[1:], b"x"))
        return await at(log, seq)

    monkeypatch.setattr(poll_module, "witnesses_at", meanwhile)
    found: list[int] = []
    request = PollRequest()
    for _ in range(4):
        answer = await world.poll(request)
        found += [seq for batch in answer.batches for seq in batch.seq]
        del request.positions[:]
        request.positions.extend(answer.next)
    assert found == list(range(1, 41))


@pytest.mark.parametrize("copied_max", [10_000, 5])
async def test_a_wide_question_reads_the_same_from_disk(
    world: World, copied_max: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether or not the index is used, and whatever keeps the numbers; damaged or not."""
    monkeypatch.setattr(log_module, "NEWEST_COPIED_MAX", copied_max)
    monkeypatch.setattr(matches_module, "FEW_MAX", copied_max)
    (log,) = world.logs
    rng = random.Random(7)
    topics = [uris.uri(f"v{place}", 0x10, 1, 0x8000 + place % 3) for place in range(60)]
    sent = [rng.choice(topics) for _ in range(400)]
    for begin in range(0, 400, 7):
        part = publishes(sent[begin : begin + 7], b"x")
        await world.append_all(log, part)
        await append(log, topics[0], kind=2)  # nobody's who pulls
    for pattern in ([], [uris.pattern(resource=0x8001)], [uris.pattern("v4")]):
        found: list[UUri] = []
        request = PollRequest(topics=pattern, max_records=37)
        while True:
            answer = await world.poll(request)
            assert not answer.gaps
            for batch in answer.batches:
                found += [UMessage.FromString(data).attributes.source for data in batch.message]
            if not answer.more:
                break
            del request.positions[:]
            request.positions.extend(answer.next)
        assert found == [one for one in sent if not pattern or uris.matches(pattern[0], one)]
