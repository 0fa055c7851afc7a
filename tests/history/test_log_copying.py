"""A copy of a log that is written meanwhile is that log at one moment. Readers tell another log of it apart."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from history.file import copying
from history.file.copying import Copied, copy_log, make_another
from history.file.damage import MISSING
from history.file.retention import Sizes
from history.file.verify import verify
from history.log.log import Log, position_before
from history.reading.subscriber import GaplessSubscriber, HistoryClient
from storage.copies import CopyPace
from tests.history.world import SERVICE, HistoryWorld, publishes
from uprotocol import uri as uris
from uprotocol.core.ustreamer.v1.ustreamer_pb2 import Gap, PollRequest
from uprotocol.status import UStatusError
from uprotocol.v1.ucode_pb2 import UCode

TOPICS = [uris.uri("vcu.vin", 0x10, 1, 0x8000 + place) for place in range(40)]
RETENTION_BYTES = 24 << 20


async def append(log: Log, count: int, size: int = 400) -> None:
    messages = publishes([TOPICS[place % len(TOPICS)] for place in range(count)], os.urandom(size))
    await log.append([log.stream_id(one.attributes.source) for one in messages], messages)


async def records(path: Path) -> dict[int, bytes]:
    """Every record of a log by its seq."""
    async with await Log.open(path, name="read") as log:
        return await read_all(log)


async def read_all(log: Log) -> dict[int, bytes]:
    found: dict[int, bytes] = {}
    after = 0
    while chunks := await log.read(after):
        for chunk in chunks:
            found.update(zip(chunk.seqs, chunk.data, strict=True))
        after = chunks[-1].last_seq
    return found


class Watched(CopyPace):
    """Counts steps, and notes how long the write-ahead log becomes."""

    def __init__(self, source: Path, target: Path, **more: Any) -> None:
        super().__init__(target, **more)
        self._wal, self.longest, self.steps = Path(f"{source}-wal"), 0, 0

    def rest(self) -> None:
        self.steps += 1
        with contextlib.suppress(FileNotFoundError):
            self.longest = max(self.longest, self._wal.stat().st_size)
        super().rest()


@contextlib.asynccontextmanager
async def written(log: Log, size: int = 400) -> AsyncIterator[None]:
    """Somebody appends to it all the time."""

    async def write() -> None:
        for turn in itertools.count():
            await append(log, 1 + turn % 200, size)
            log.cursors.set("egress:cloud", log.newest_seq)

    writing = asyncio.create_task(write())
    try:
        yield
    finally:
        writing.cancel()
        await asyncio.gather(writing, return_exceptions=True)


async def copied(log: Log, source: Path, target: Path, pace: CopyPace | None = None) -> Copied:
    return await asyncio.to_thread(copy_log, source, target, pace or CopyPace(target), lambda: log.newest_seq)


@pytest.mark.parametrize("bytes", [RETENTION_BYTES, 4 << 20], ids=["all is kept", "the oldest go meanwhile"])
async def test_a_copy_of_a_log_that_is_written_is_that_log_at_one_moment(tmp_path: Path, bytes: int) -> None:
    source, target = tmp_path / "history.db", tmp_path / "copy.db"
    async with await Log.open(source, name="live", retention_bytes=bytes) as log:
        for _ in range(100):
            await append(log, 100)
        pace = Watched(source, target, share=0.3)
        async with written(log):
            made = await copied(log, source, target, pace)
        report, live = await asyncio.to_thread(verify, target), await read_all(log)
    assert report.is_sound, report.found
    assert (report.incarnation, report.oldest_seq, report.newest_seq) == made
    assert pace.steps > 3
    sizes = Sizes(bytes)
    assert pace.longest <= sizes.wal + 2 * sizes.transaction
    kept = await records(target)
    assert list(kept) == list(range(made.oldest_seq, made.newest_seq + 1))
    assert {seq: data for seq, data in kept.items() if seq in live} == {
        seq: data for seq, data in live.items() if seq <= made.newest_seq
    }
    async with await Log.open(target, name="copy") as log:
        assert not log.damage
        assert log.incarnation == made.incarnation
        assert (log.cursors.seq("egress:cloud") or 0) >= 10_000
        of_one = [seq for chunk in await log.read(0, streams={log.stream_id(TOPICS[7])}) for seq in chunk.seqs]
        assert of_one, "its index of topics is there"


async def test_an_index_that_is_written_meanwhile_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from history.file import store

    monkeypatch.setattr(store, "CHECKPOINT_ROWS", 200)  # a checkpoint with nearly each commit
    monkeypatch.setattr(copying, "INDEX_ROWS_AT_ONCE", 50)
    source, target = tmp_path / "history.db", tmp_path / "copy.db"
    async with await Log.open(source, name="live", retention_bytes=3 << 20) as log:
        for _ in range(60):
            await append(log, 40)
        async with written(log):
            await copied(log, source, target, CopyPace(target, share=0.3))
    report = await asyncio.to_thread(verify, target)
    assert report.is_sound, report.found
    assert not report.found_total


async def test_a_stopped_log_is_copied_without_its_write_ahead_log(tmp_path: Path) -> None:
    source, target = tmp_path / "history.db", tmp_path / "copy.db"
    async with await Log.open(source, name="live") as log:
        await append(log, 10)
        made = copy_log(source, target, CopyPace(target))
    assert made.newest_seq == 10
    assert verify(target).is_sound
    assert (target.stat().st_mode & 0o777, Path(f"{target}.mark").stat().st_mode & 0o777) == (0o600, 0o600)
    assert {one.name for one in tmp_path.glob("copy*")} == {"copy.db", "copy.db.mark"}


async def test_commits_that_are_lost_already_are_missing_in_the_copy_too(tmp_path: Path) -> None:
    source, target = tmp_path / "history.db", tmp_path / "copy.db"
    async with await Log.open(source, name="live") as log:
        await append(log, 10)
        incarnation = log.incarnation
    copying.write_mark(source, incarnation, 15)
    copy_log(source, target, CopyPace(target))
    report = verify(target)
    assert [(one.kind, one.after, one.before) for one in report.found] == [("commits", 10, 16)]


async def test_it_ends_early_without_space_or_when_the_process_ends(tmp_path: Path) -> None:
    source, target = tmp_path / "history.db", tmp_path / "copy.db"
    async with await Log.open(source, name="live") as log:
        await append(log, 10)
        for number, (pace, code) in enumerate(
            [
                (CopyPace(target, kept_bytes=lambda: 1 << 60), UCode.RESOURCE_EXHAUSTED),
                (CopyPace(target, is_stopping=lambda: True), UCode.UNAVAILABLE),
            ]
        ):
            with pytest.raises(UStatusError) as error:
                await copied(log, source, tmp_path / f"copy{number}.db", pace)
            assert error.value.code == code


# -- another log of a copy


class Restored(HistoryWorld):
    """A reader of a log that is replaced by another log of an older copy."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    async def begin(self, records: int) -> None:
        await self.open(await Log.open(self._folder / "history.db", name="live"))
        await self.add("before", records)

    async def add(self, what: str, count: int) -> None:
        for number in range(count):
            (log,) = self.logs
            await self.append_all(log, publishes([TOPICS[number % 2]], f"{what} {number}".encode()))

    async def back_up(self) -> None:
        copy_log(self._folder / "history.db", self._folder / "copy.db", CopyPace(self._folder))

    async def restore(self) -> None:
        await self.service.stop()
        old = self.logs.pop()
        await old.close()
        make_another(self._folder / "copy.db", os.urandom(16), 1_790_000_000_000, "restored", old.newest_seq)
        self.logs.append(await Log.open(self._folder / "copy.db", name="restored"))
        await self.serve()


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[Restored]:
    made = Restored(tmp_path)
    yield made
    await made.close()


async def test_its_readers_get_a_gap_and_go_on_where_both_logs_part(world: Restored) -> None:
    gaps: list[Gap] = []
    await world.begin(20)
    client = HistoryClient(world.rpc, SERVICE)
    async with GaplessSubscriber(client, TOPICS[:2], on_gap=gaps.append) as reader:
        had = [(await anext(reader)).message.payload.decode() for _ in range(20)]
        await world.back_up()
        old = world.logs[0].incarnation
        await world.add("lost", 5)
        had += [(await anext(reader)).message.payload.decode() for _ in range(5)]
        await world.restore()
        await world.add("after", 9)  # with the seqs of those that are lost
        got = [(await anext(reader)).message.payload.decode() for _ in range(9)]
    assert had == [*(f"before {number}" for number in range(20)), *(f"lost {number}" for number in range(5))]
    assert got == [f"after {number}" for number in range(9)]
    assert [(gap.reason, gap.incarnation, gap.after_seq) for gap in gaps] == [(Gap.REASON_INCARNATION, old, 25)]


async def test_a_reader_that_was_behind_gets_the_rest(world: Restored) -> None:
    await world.begin(20)
    client = HistoryClient(world.rpc, SERVICE)
    first = await client.poll(PollRequest(topics=TOPICS[:2], max_records=8))
    await world.back_up()
    await world.add("lost", 5)
    await world.restore()
    await world.add("after", 2)
    answer = await client.poll(PollRequest(topics=TOPICS[:2], positions=first.next, latest=True))
    assert [gap.reason for gap in answer.gaps] == [Gap.REASON_INCARNATION]
    assert [seq for batch in answer.batches for seq in batch.seq] == list(range(9, 23))
    assert [one.seq for one in answer.begin] == [8]


async def test_a_log_that_was_restored_twice_knows_both_before_it(world: Restored, tmp_path: Path) -> None:
    await world.begin(20)
    client = HistoryClient(world.rpc, SERVICE)
    first = await client.poll(PollRequest(topics=TOPICS[:2]))
    await world.back_up()
    await world.restore()
    await world.add("between", 4)
    second = await client.poll(PollRequest(topics=TOPICS[:2]))
    (log,) = world.logs
    again = tmp_path / "again.db"
    copy_log(tmp_path / "copy.db", again, CopyPace(again))
    make_another(again, os.urandom(16), 1_790_000_000_000, "restored again")
    await world.service.stop()
    await log.close()
    world.logs[:] = [await Log.open(again, name="again")]
    await world.serve()
    await world.add("after", 1)
    for before, seqs in ((first, range(21, 26)), (second, range(25, 26))):
        answer = await client.poll(PollRequest(topics=TOPICS[:2], positions=before.next))
        assert [seq for batch in answer.batches for seq in batch.seq] == list(seqs)


async def test_it_remembers_what_is_lost_until_a_person_has_seen_it(world: Restored) -> None:
    await world.begin(3)
    await world.back_up()
    await world.add("lost", 5)
    old = world.logs[0].incarnation
    await world.restore()
    (log,) = world.logs
    assert [(one.kind, one.incarnation, one.after, one.before, one.detail) for one in log.damage] == [
        (MISSING, old, 3, 9, "restored")
    ]
    log.losses.acknowledge()
    await log.close()
    world.logs[:] = [await Log.open(log_path(world), name="again")]
    assert not world.logs[0].damage
    assert position_before(world.logs[0], {old: 100}) == (3, old)


def log_path(world: Restored) -> Path:
    return world._folder / "copy.db"
