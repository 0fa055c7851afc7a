"""A client of a stream against a model: whatever is appended when, however slowly it reads, however often it is cut, it
has each record once and in order. On virtual time."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Hashable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from history.log.log import Log
from history.reading.acceptor import ReaderState
from history.service.service import HistoryService
from streamer.edge import feeds
from streamer.edge.clients import Output, StreamClient
from streamer.edge.feeds import Feeds, KeptBytes, SharedRate
from streamer.edge.positions import StreamStart, position_text
from streamer.edge.query import Query
from tests.history.world import HistoryWorld, publishes, virtually
from uprotocol import uri as uris
from uprotocol.core.ustreamer.v1.ustreamer_pb2 import PollRequest, PollResponse
from uprotocol.v1.uattributes_pb2 import UPayloadFormat
from uprotocol.v1.uri_pb2 import UUri

TOPICS = [uris.uri("vehicle", 0x20, 1, 0x8001 + number) for number in range(3)]
CLIENT = uris.uri("phone", 0x8000, 1)
WANTED = TOPICS[:2]


class SlowResponse:
    """Takes what is written after random pauses; keeps it."""

    def __init__(self, rng: random.Random) -> None:
        self.rng, self.data = rng, b""

    async def write(self, data: bytes) -> None:
        if self.rng.random() < 0.3:
            await asyncio.sleep(self.rng.random() * 3)
        self.data += data  # a cut while it waits: the client has none of it


class SlowHistory:
    """Answers after random pauses, so that clients and feeds are at different positions."""

    def __init__(self, history: HistoryService, rng: random.Random) -> None:
        self._history, self._rng = history, rng

    async def read(self, caller: UUri, asked: PollRequest) -> PollResponse:
        answer = await self._history.read(caller, asked)
        await asyncio.sleep(self._rng.choice([0, 0.1, 2]))
        return answer

    def sight_key(self, caller: UUri) -> Hashable:
        return self._history.sight_key(caller)


class Phone:
    """Reads until it is cut, and goes on with the last id that it has."""

    def __init__(self, world: HistoryWorld, shared: Feeds, rng: random.Random) -> None:
        self.world, self.shared, self.rng = world, shared, rng
        self.id, self.found = position_text(ReaderState()), list[str]()

    async def run(self) -> None:
        while True:
            response: Any = SlowResponse(self.rng)
            since = StreamStart.of(self.id)
            reading = self.shared.reading(CLIENT, WANTED, "json")
            reading.begin(since.state, since.start)
            client = StreamClient(
                Counter(),
                self.shared,
                reading,
                Output(response),
                Query(tuple(WANTED)),
                CLIENT,
            )
            running = asyncio.create_task(self._read(client, since.state, reading))
            await asyncio.wait([running], timeout=self.rng.choice([0.01, 1, 5, 20, 60]))
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            self._take(response.data.decode())

    async def _read(self, client: StreamClient, before: ReaderState, reading: feeds.HistoryReading) -> None:
        await client.run(before, [await reading.next()])

    def _take(self, text: str) -> None:
        for block in text.split("\n\n"):
            lines = dict(line.split(": ", 1) for line in block.split("\n") if line)
            self.id = lines.get("id", self.id)
            if "data" in lines:
                assert "event" not in lines, f"a gap where nothing is lost: {lines}"
                self.found.append(lines["data"].split('"text":"')[1].split('"')[0])


async def _play(seed: int, kept: int, *, has_callers: bool) -> None:
    rng, world = random.Random(seed), HistoryWorld()
    logs = [await Log.open(None, name=name) for name in ("durable", "volatile")]
    await world.open(*logs)
    shared = Feeds(SlowHistory(world.service, rng), has_callers=has_callers)
    phones = [Phone(world, shared, rng) for _ in range(3)]
    tasks = [asyncio.create_task(phone.run()) for phone in phones]
    sent: dict[int, list[str]] = {0: [], 1: []}
    try:
        for number in range(80):
            topic, at = rng.choice(TOPICS), rng.randrange(2)
            text = f"{number}-{'x' * rng.choice([0, 300])}"
            messages = publishes([topic], text.encode(), UPayloadFormat.UPAYLOAD_FORMAT_TEXT)
            await world.append_all(logs[at], messages)
            if topic in WANTED:
                sent[at].append(text)
            await asyncio.sleep(rng.choice([0, 0, 0.1, 3]))
        await asyncio.sleep(900)
        for phone in phones:
            assert len(phone.found) == len(set(phone.found)), "a record came twice"
            for at in (0, 1):
                assert [text for text in phone.found if text in set(sent[at])] == sent[at]
    finally:
        for task in tasks:
            task.cancel()
        done = await asyncio.gather(*tasks, return_exceptions=True)
        assert not [one for one in done if isinstance(one, Exception)]
        shared.close()
        await world.close()
    assert kept


@settings(deadline=None)
@given(
    seed=st.integers(0, 1 << 30),
    kept=st.sampled_from([300, 2_000, 1 << 20]),
    all_kept=st.sampled_from([0, 1_000, 1 << 20]),
    units_per_s=st.sampled_from([0.5, 10.0, None]),
)
def test_each_record_once_and_in_order(seed: int, kept: int, all_kept: int, units_per_s: float | None) -> None:
    """`units_per_s`: of each caller; None: they are not told apart."""
    changed = {
        "KEPT_BYTES_MAX": kept,
        "ALL_KEPT_BYTES_MAX": all_kept,
        "FEEDS_FREE": 0,
        "FEED_UNITS_PER_S": units_per_s or 1,
    }
    with pytest.MonkeyPatch.context() as patched:
        for name, value in changed.items():
            patched.setattr(feeds, name, value)
        virtually(_play(seed, kept, has_callers=units_per_s is not None), seed)


async def test_many_feeds_of_one_caller_share_a_rate() -> None:
    few, many = SharedRate(), SharedRate()
    few.feeds, many.feeds = feeds.FEEDS_FREE, feeds.FEEDS_FREE + 1
    assert few.pause_s(1_000_000) == 0
    pauses = [many.pause_s(feeds.FEED_UNITS_PER_S) for _ in range(3)]
    assert pauses == pytest.approx([1, 2, 3], abs=0.1)


def test_all_feeds_together_keep_a_bounded_amount() -> None:
    room = KeptBytes()
    room.feeds = 1
    assert not room.is_too_much(feeds.KEPT_BYTES_MAX, 2)
    assert room.is_too_much(feeds.KEPT_BYTES_MAX + 1, 2)
    assert not room.is_too_much(10 * feeds.KEPT_BYTES_MAX, 1), "one event of any size"
    room.feeds, room.used = 1_000, feeds.ALL_KEPT_BYTES_MAX + 1
    assert not room.is_too_much(feeds.ALL_KEPT_BYTES_MAX // 1_000, 2)
    assert room.is_too_much(feeds.ALL_KEPT_BYTES_MAX // 1_000 + 1, 1), "not even one, if all have too much"
