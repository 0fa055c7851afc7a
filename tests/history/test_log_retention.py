"""What retention removes, what holds it back, and to whom it is reported."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

from history.file.retention import Sizes
from history.log.log import Cursor, Log, RetentionLoss
from history.records import chunk as chunk_module
from uprotocol import uri as uris
from uprotocol.message import UMessageBuilder, UPayload
from uprotocol.v1.umessage_pb2 import UMessage

TOPIC = uris.uri("vcu.vin", 0x10, 1, 0x8000)
AGE_MS = 60_000


class Clock:
    def __init__(self) -> None:
        self.now = 1_800_000_000_000

    def __call__(self) -> int:
        return self.now


def message(data: bytes = b"x") -> UMessage:
    return UMessageBuilder.publish(TOPIC).build_from_upayload(UPayload(data, 5))


async def append(log: Log, count: int, *, batch: int = 10, size: int = 1) -> None:
    id = log.stream_id(TOPIC)
    for _ in range(0, count, batch):
        await log.append([id] * batch, [message(bytes(size)) for _ in range(batch)])


async def until(log: Log, condition: Callable[[], bool]) -> None:
    """Let retention run until `condition` holds."""
    async with asyncio.timeout(30):
        while not condition():
            await retain(log)


async def retain(log: Log) -> None:
    """One turn of retention, to its end."""
    if not log.durable:
        log._storage.age()
        return
    heard, done = log._storage.writer._on_written, asyncio.Event()

    def listen(written: object) -> None:
        heard(written)  # type: ignore[arg-type]
        if getattr(written, "batch", 0) is None and log.durable and log._storage.writer._next_retention != 0.0:
            done.set()

    log._storage.writer._on_written = listen
    log._storage.writer._next_retention = log._storage.writer._next_sample = 0.0
    log._storage.writer.flush()
    await asyncio.wait_for(done.wait(), 30)
    log._storage.writer._on_written = heard


@pytest.fixture(params=["durable", "volatile"])
async def made(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Log, Clock]:
    clock = Clock()
    path = tmp_path / "l.db" if request.param == "durable" else None
    return await Log.open(path, name=request.param, retention_ms=AGE_MS, now_ms=clock), clock


async def test_age_never_passes_a_cursor_that_holds(made: tuple[Log, Clock]) -> None:
    log, clock = made
    async with log:
        await append(log, 100)
        log.cursors.set("egress:cloud", 35, holds=True)
        clock.now += 1_000 * AGE_MS
        await append(log, 10)
        await until(log, lambda: log.floor_seq >= 30)
        await retain(log)
        assert log.floor_seq == 30  # the chunk with what it still wants stays whole
        log.cursors.drop("egress:cloud")
        await until(log, lambda: log.floor_seq >= 100)


async def test_a_cursor_that_was_only_announced_retains_nothing(made: tuple[Log, Clock]) -> None:
    log, clock = made
    async with log:
        await append(log, 100)
        log.cursors.set("anybody", 35)
        clock.now += 2 * AGE_MS
        await append(log, 10)
        await until(log, lambda: log.floor_seq >= 100)


async def test_what_a_cursor_holds_and_how_long_it_was_away_is_kept_over_a_restart(tmp_path: Path) -> None:
    clock = Clock()
    async with await Log.open(tmp_path / "l.db", name="first", now_ms=clock) as log:
        await append(log, 10)
        log.cursors.set("egress:cloud", 5, holds=True, absent_ms=1_234)
        log.cursors.set("consumer:app", 6, lease_ms=1_000)
        log.cursors.set("plain", 7)
        rows = log.cursors.all()
    assert rows["egress:cloud"] == Cursor(5, None, True, 1_234)
    async with await Log.open(tmp_path / "l.db", name="second", now_ms=clock) as log:
        assert log.cursors.all() == rows
        assert log.cursors.seqs() == {"egress:cloud": 5, "consumer:app": 6, "plain": 7}
        clock.now += 1_000_000
        log.cursors.set("plain", 8)
        async with asyncio.timeout(10):
            while "consumer:app" in log.cursors.all():  # noqa: ASYNC110 - its lease has ended, the others never do
                await asyncio.sleep(0.01)
        assert set(log.cursors.seqs()) == {"egress:cloud", "plain"}


async def test_what_age_takes_from_an_endpoint_is_handed_over(made: tuple[Log, Clock]) -> None:
    log, clock = made
    async with log:
        losses: list[tuple[RetentionLoss, int]] = []
        log.on_retention_loss(lambda passed: losses.append((passed, log.floor_seq)))
        await append(log, 30)
        log.cursors.set("egress:cloud", 15, holder="egress")
        sent = [data for chunk in await log.read(0) for data in chunk.data]
        clock.now += 2 * AGE_MS
        await append(log, 10)
        await until(log, lambda: log.floor_seq >= 30)
        seqs = [seq for passed, _ in losses for chunk in passed.chunks for seq in chunk.seqs]
        assert seqs == list(range(16, 31))
        assert [data for passed, _ in losses for chunk in passed.chunks for data in chunk.data] == sent[15:]
        assert (losses[0][0].after, losses[-1][0].before) == (15, 31)
        # reported before the floor rises, or as it rises
        assert all(floor <= passed.before - 1 for passed, floor in losses)


async def test_bytes_pass_even_a_cursor_that_holds_and_only_the_first_are_handed_over(
    made: tuple[Log, Clock], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunk_module, "PASSED_RECORDS_MAX", 25)
    log, _ = made
    async with log:
        losses: list[RetentionLoss] = []
        log.on_retention_loss(losses.append)
        log.cursors.set("parked:topic", 5, holds=True)
        await retain(log)
        log.retention_bytes = log._tail.bytes_max = 300_000
        if not log.durable:
            log._storage._allowance.refill()
        else:
            log._storage.writer._store.allowance.refill()
            log._storage._store.sizes = Sizes(300_000)
            log._storage.writer._next_sample = float("inf")
        await append(log, 200, size=10_000)
        async with asyncio.timeout(30):
            while log.floor_seq <= 100:  # noqa: ASYNC110 - retention has no event
                await asyncio.sleep(0.01)
        seqs = [seq for passed in losses for chunk in passed.chunks for seq in chunk.seqs]
        assert seqs == list(range(6, 31))
        places = [(passed.after, passed.before) for passed in losses]
        assert places[0][0] == 5
        assert [before - 1 for _, before in places[:-1]] == [after for after, _ in places[1:]]
        assert places[-1][1] == log.floor_seq + 1


async def test_records_that_every_reader_has_had_are_not_reported_as_lost(made: tuple[Log, Clock]) -> None:
    log, clock = made
    async with log:
        losses: list[RetentionLoss] = []
        log.on_retention_loss(losses.append)
        await append(log, 30)
        log.cursors.set("egress:cloud", 30, holder="egress")
        log.cursors.set("consumer:slow", 3, lease_ms=10)
        clock.now += 2 * AGE_MS
        await append(log, 10)
        await until(log, lambda: log.floor_seq >= 30)
        assert losses == []


# -- bytes: what the disk shows


def disk_bytes(folder: Path) -> int:
    return sum(path.stat().st_blocks * 512 for path in folder.iterdir())


@pytest.mark.parametrize(("batch", "size"), [(512, 250), (8, 3_000), (3, 60_000)])
async def test_the_bytes_of_retention_are_what_the_disk_shows(tmp_path: Path, batch: int, size: int) -> None:
    bound = 8 << 20
    async with await Log.open(tmp_path / "l.db", name="bound", retention_bytes=bound, tail_bytes=1) as log:
        id, highest = log.stream_id(TOPIC), 0
        messages = [message(bytes(size)) for _ in range(batch)]
        for _ in range(3 * bound // (batch * size)):
            await log.append([id] * batch, messages)
            highest = max(highest, disk_bytes(tmp_path))
        assert highest <= bound
        assert log.floor_seq > 0
        assert log.extent.stored_bytes > bound // 2, "most of it is for records"
        await until(log, lambda: log.extent.disk_bytes > bound // 2)
        assert log.extent.disk_bytes <= bound


async def test_a_reader_that_never_ends_does_not_keep_the_log_from_being_bounded_again(tmp_path: Path) -> None:
    bound = 8 << 20
    async with await Log.open(tmp_path / "l.db", name="bound", retention_bytes=bound, tail_bytes=1) as log:
        await append(log, 1_000, batch=100, size=1_000)
        reader = sqlite3.connect(tmp_path / "l.db")
        reader.execute("BEGIN")
        reader.execute("SELECT count(*) FROM chunk").fetchone()
        await append(log, 20_000, batch=100, size=1_000)
        assert (tmp_path / "l.db-wal").stat().st_size > 2 << 20, "it could not be emptied"
        reader.close()
        await until(log, lambda: disk_bytes(tmp_path) <= bound)


async def test_a_log_that_may_take_less_than_before_gives_back_what_is_too_much(tmp_path: Path) -> None:
    async with await Log.open(tmp_path / "l.db", name="great") as log:
        await append(log, 20_000, batch=500, size=1_000)
    assert disk_bytes(tmp_path) > 20 << 20
    async with await Log.open(tmp_path / "l.db", name="small", retention_bytes=4 << 20) as log:
        await until(log, lambda: disk_bytes(tmp_path) <= 4 << 20)
        assert log.oldest_seq == log.floor_seq + 1 < log.newest_seq
        assert (await log.read(log.floor_seq))[0].first_seq == log.oldest_seq


async def test_a_chunk_that_lies_about_its_age_deletes_nothing(tmp_path: Path) -> None:
    clock = Clock()
    path = tmp_path / "l.db"
    async with await Log.open(path, name="made", retention_ms=AGE_MS, now_ms=clock) as log:
        await append(log, 100)
    db = sqlite3.connect(path)
    db.execute("UPDATE chunk SET time_ms = time_ms - (1 << 40) WHERE first_seq = 91")
    db.commit()
    db.close()
    async with await Log.open(path, name="again", retention_ms=AGE_MS, now_ms=clock) as log:
        for _ in range(3):
            await retain(log)
        assert log.floor_seq == 0
        for floor in (90, 100):  # the damaged one goes with those that are newer, and surely old
            clock.now += 2 * AGE_MS
            await append(log, 10)
            await until(log, lambda floor=floor: log.floor_seq >= floor)  # type: ignore[misc]
