"""Which readers learn that retention has deleted records: those of whose topics it has, and no others."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
from pathlib import Path
from typing import Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from history.file import writer as writer_module
from history.log.log import Log
from history.reading.subscriber import HistoryClient
from history.service import matches as matches_module
from history.service.matches import Matches
from tests.history.world import SERVICE, HistoryWorld, publishes, virtually
from uprotocol import uri as uris
from uprotocol.core.ustreamer.v1.ustreamer_pb2 import PollRequest, Position
from uprotocol.v1.uri_pb2 import UUri

TOPICS: Final = [uris.uri(f"v{place % 2}", 0x10, 1, 0x8000 + place) for place in range(6)]
KEPT_BYTES: Final = 12_000  # a dozen records

Batches = list[list[int]]
batches = st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=6), max_size=25)
wanted = st.sets(st.integers(0, 5), min_size=1)


async def fill(log: Log, topics: Batches) -> dict[int, int]:
    """Returns the topic of each record."""
    made: dict[int, int] = {}
    for batch in topics:
        messages = publishes([TOPICS[topic] for topic in batch], b"x")
        first = await log.append([log.stream_id(one.attributes.source) for one in messages], messages)
        made.update(enumerate(batch, first))
    return made


async def reports(log: Log, topics: list[UUri], position: int) -> bool:
    (match,) = Matches([log]).make(topics, matches_module.EVERYTHING).values()
    await match.complete()
    return await match.has_passed(log.floor_seq, position)


@given(batches, wanted)
def test_a_loss_is_reported_to_those_who_have_one(topics: Batches, which: set[int]) -> None:
    async def run() -> None:
        async with await Log.open(None, name="l", retention_bytes=KEPT_BYTES) as log:
            made = await fill(log, topics)
            for position in range(log.newest_seq + 1):
                lost = any(topic in which and position < seq <= log.floor_seq for seq, topic in made.items())
                assert await reports(log, [TOPICS[topic] for topic in which], position) == lost
                if which == set(range(6)):
                    assert await reports(log, [uris.ANY], position) == lost

    virtually(run())


@pytest.mark.parametrize("limit", ["DOUBTFUL_MAX", "DOUBTFUL_STEPS_MAX", ""])
@given(topics=batches, which=wanted)
def test_no_loss_is_hidden_where_not_all_is_known(topics: Batches, which: set[int], limit: str) -> None:
    async def run() -> None:
        forget_after_s = None if limit else 0.01
        async with await Log.open(None, name="l", retention_bytes=KEPT_BYTES, forget_after_s=forget_after_s) as log:
            made = await fill(log, topics)
            await asyncio.sleep(60)
            for position in range(log.newest_seq + 1):
                if any(topic in which and position < seq <= log.floor_seq for seq, topic in made.items()):
                    assert await reports(log, [TOPICS[topic] for topic in which], position)

    with pytest.MonkeyPatch.context() as patched:
        if limit:
            patched.setattr(matches_module, limit, 1)
        virtually(run())


class World(HistoryWorld):
    now = 1_800_000_000_000

    async def begin(self, path: Path) -> None:
        self.path = path / "l.db"
        self.log = await self.opened()
        await self.open(self.log, share=1)
        self.client = HistoryClient(self.rpc, SERVICE)

    async def opened(self) -> Log:
        return await Log.open(self.path, name="l", retention_ms=60_000, tail_bytes=1, now_ms=lambda: self.now)

    async def gaps(self, topic: int, after: int) -> int:
        place = Position(incarnation=self.log.incarnation, seq=after)
        return len((await self.client.poll(PollRequest(topics=[TOPICS[topic]], positions=[place]))).gaps)

    async def gaps_after_time(self, topic: int) -> int:
        asked = PollRequest(topics=[TOPICS[topic]])
        asked.after_time.FromMilliseconds(self.now - 200_000)
        return len((await self.client.poll(asked)).gaps)

    async def reopen(self, *, damaged: bool = False) -> None:
        """`damaged`: the rows of all topics are, so they are restored from their records."""
        await self.service.stop()
        await self.log.close()
        if damaged:
            with contextlib.closing(sqlite3.connect(self.path)) as db, db:
                db.execute("UPDATE stream SET crc = crc + 1")
        self.log = await self.opened()
        self.logs[:] = [self.log]
        await self.serve()


async def test_on_disk_the_first_record_that_is_left_says_what_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer_module, "RETENTION_PERIOD_MS", 20)
    world = World()
    await world.begin(tmp_path)
    await fill(world.log, [[0, 1], [0, 0]])  # 1 to 4
    world.now += 200_000
    await fill(world.log, [[0, 1, 2]] * 3)  # 5 to 13
    async with asyncio.timeout(10):
        while world.log.floor_seq < 4:  # noqa: ASYNC110 - retention tells nobody
            await asyncio.sleep(0.02)
    assert [await world.gaps(0, after) for after in range(5)] == [1, 1, 1, 1, 0]
    assert [await world.gaps(1, after) for after in range(5)] == [1, 1, 0, 0, 0]
    assert [await world.gaps(2, after) for after in range(5)] == [0] * 5
    assert [await world.gaps_after_time(topic) for topic in range(3)] == [1, 1, 0]
    await world.reopen()
    assert [await world.gaps(1, after) for after in range(5)] == [1, 1, 0, 0, 0]
    await world.reopen(damaged=True)
    assert [await world.gaps(1, after) for after in range(5)] == [1, 1, 0, 0, 0]
    assert [await world.gaps_after_time(topic) for topic in range(3)] == [1, 1, 0]
    await world.close()
