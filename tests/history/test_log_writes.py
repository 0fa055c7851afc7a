"""What a log writes for a message, and when: pages, cursors, the index; counted, independent of the machine's speed."""

from __future__ import annotations

import asyncio
import contextlib
import random
import shutil
import sqlite3
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from history.file import load, retention, rows, store, writer
from history.file.reader import Reader, ScanLimits, walk
from history.file.verify import verify
from history.log.log import Log
from storage.disk import pragma
from storage.runtime import REAL
from uprotocol import uri as uris
from uprotocol.message import UMessageBuilder, UPayload
from uprotocol.v1.umessage_pb2 import UMessage

TOPICS = [uris.uri("vcu.vin", 0x10, 1, 0x8000 + place) for place in range(200)]
START_MS = 1_800_000_000_000
WAL_FRAME_BYTES = rows.PAGE_BYTES + 24


class Clock:
    """Unix milliseconds, and the seconds that workers count."""

    def __init__(self) -> None:
        self.now_ms, self.seconds = START_MS, 1_000.0

    def __call__(self) -> int:
        return self.now_ms


def message(topic: int = 0, size: int = 256) -> UMessage:
    return UMessageBuilder.publish(TOPICS[topic]).build_from_upayload(UPayload(bytes(size), 5))


async def append(log: Log, count: int = 1, topic: int = 0, size: int = 256) -> int:
    return await log.append([log.stream_id(TOPICS[topic])] * count, [message(topic, size)] * count)


async def open_log(path: Path, clock: Clock, **options: Any) -> Log:
    runtime = replace(REAL, monotonic=lambda: clock.seconds)
    return await Log.open(path, name="writes", now_ms=clock, runtime=runtime, **options)


async def retain(log: Log, clock: Clock) -> None:
    """Runs retention until it has nothing left to do."""
    assert log.durable
    heard, done = log._storage.writer._on_written, asyncio.Event()

    def listen(written: writer.Written) -> None:
        heard(written)
        if written.batch is None and log.durable and log._storage.writer._next_retention:
            done.set()

    clock.seconds += 2
    log._storage.writer._on_written = listen
    log._storage.writer.flush()
    await asyncio.wait_for(done.wait(), 30)
    log._storage.writer._on_written = heard


def ask(path: Path, query: str) -> list[Any]:
    with contextlib.closing(sqlite3.connect(path)) as db:
        return db.execute(query).fetchall()


@pytest.fixture
async def clock() -> Clock:
    return Clock()


@pytest.fixture
async def log(tmp_path: Path, clock: Clock) -> AsyncIterator[Log]:
    async with await open_log(tmp_path / "l.db", clock) as made:
        yield made


# -- pages


async def test_a_commit_of_one_message_writes_little_more_than_its_page(log: Log, tmp_path: Path) -> None:
    await append(log)
    wal = tmp_path / "l.db-wal"
    before = wal.stat().st_size
    for number in range(200):
        await append(log, topic=number % 5)
    written = (wal.stat().st_size - before) / 200
    assert written < 2.7 * WAL_FRAME_BYTES, "its page; every other time a new one, with those that name it"


async def test_many_topics_cost_the_index_no_more_than_a_few(tmp_path: Path, clock: Clock) -> None:
    written = {}
    for topics in (2, 200):
        path = tmp_path / f"{topics}.db"
        async with await open_log(path, clock, retention_bytes=1 << 30) as log:
            for topic in range(topics):
                await append(log, topic=topic)
            before = Path(f"{path}-wal").stat().st_size
            for number in range(1_500):
                await append(log, topic=number % topics)
            written[topics] = Path(f"{path}-wal").stat().st_size - before
    assert written[200] < 1.1 * written[2]


async def test_what_is_deleted_is_not_written_once_more(tmp_path: Path, clock: Clock) -> None:
    async with await open_log(tmp_path / "l.db", clock, retention_ms=1_000) as log:
        await append(log, 500, size=4_000)
        await append(log)
        before = (tmp_path / "l.db-wal").stat().st_size
        clock.now_ms += 10_000
        await append(log)
        await retain(log, clock)
        assert log.floor_seq >= 500
        assert (tmp_path / "l.db-wal").stat().st_size - before < 500 * 4_000 / 4


# -- cursors


async def cursor_on_disk(path: Path) -> int | None:
    found = ask(path, "SELECT seq FROM cursor WHERE name = 'egress:cloud'")
    return found[0][0] if found else None


async def until_on_disk(path: Path, seq: int) -> None:
    """Waits for the next tick of the writer, which has no event."""
    async with asyncio.timeout(30):
        while await cursor_on_disk(path) != seq:  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def test_a_cursor_that_moves_goes_along_with_a_commit_once_a_second(
    log: Log, tmp_path: Path, clock: Clock
) -> None:
    path = tmp_path / "l.db"
    log.cursors.set("egress:cloud", 0, holds=True)
    for seq in range(1, 40):
        await append(log)
        log.cursors.set("egress:cloud", seq, holds=True)
        clock.seconds += 0.1
        behind = log.newest_seq - (await cursor_on_disk(path) or 0)
        assert behind <= 12
    moves = {await cursor_on_disk(path)}
    for seq in range(40, 140):
        await append(log)
        log.cursors.set("egress:cloud", seq, holds=True)
        clock.seconds += 0.1
        moves.add(await cursor_on_disk(path))
    assert 9 <= len(moves) <= 12


async def test_a_cursor_that_stands_is_written_after_ten_seconds(log: Log, tmp_path: Path, clock: Clock) -> None:
    path = tmp_path / "l.db"
    log.cursors.set("egress:cloud", 0, holds=True)
    await append(log)
    await append(log)
    log.cursors.set("egress:cloud", 2, holds=True)
    clock.seconds += 9.9
    assert log.durable
    assert log._storage.writer._monotonic() < log._storage.writer._lazy_since + writer.CURSORS_IDLE_S
    assert await cursor_on_disk(path) == 0
    clock.seconds += 0.2
    await until_on_disk(path, 2)


async def test_a_cursor_that_has_come_far_is_written_though_no_message_comes(
    log: Log, tmp_path: Path, clock: Clock
) -> None:
    far = writer.CURSORS_RECORDS
    log.cursors.set("egress:cloud", 0, holds=True)
    await append(log, 3 * far)
    await until_on_disk(tmp_path / "l.db", 0)
    assert log.durable
    async with asyncio.timeout(30):  # that it was new is why it was written
        while log._storage._flush_due is not None:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    log.cursors.set("egress:cloud", far - 1, holds=True)
    assert log._storage._flush_due is None
    log.cursors.set("egress:cloud", far, holds=True)
    await until_on_disk(tmp_path / "l.db", far)


@pytest.mark.parametrize("change", ["new", "holds", "dropped", "lease"])
async def test_what_is_more_than_a_move_does_not_wait(log: Log, tmp_path: Path, clock: Clock, change: str) -> None:
    path = tmp_path / "l.db"
    log.cursors.set("egress:cloud", 0, holds=change != "lease", lease_ms=1_000 if change == "lease" else None)
    log.cursors.set("other", 0)
    await append(log)
    log.cursors.set("other", 1)
    expected: list[tuple[str, int]] = [("egress:cloud", 1)]
    if change == "new":
        log.cursors.set("a", 1)
        expected = [("a", 1), ("egress:cloud", 0)]
    elif change == "dropped":
        log.cursors.drop("egress:cloud")
        expected = []
    else:
        log.cursors.set("egress:cloud", 1, holds=False, lease_ms=2_000 if change == "lease" else None)
    async with asyncio.timeout(30):  # the clock of the workers stands: it is not for them that it is written
        while ask(path, "SELECT name, seq FROM cursor WHERE name != 'other' ORDER BY 1") != expected:  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def test_a_clean_stop_loses_no_move(tmp_path: Path, clock: Clock) -> None:
    async with await open_log(tmp_path / "l.db", clock) as log:
        await append(log, 5)
        log.cursors.set("egress:cloud", 1, holds=True)
        await append(log)
        log.cursors.set("egress:cloud", 6, holds=True)
    assert await cursor_on_disk(tmp_path / "l.db") == 6


async def test_a_move_whose_commit_failed_is_not_lost_and_the_newest_counts(
    log: Log, tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    log.cursors.set("egress:cloud", 0, holds=True)
    await append(log, 5)
    log.cursors.set("egress:cloud", 3, holds=True)
    clock.seconds += 2
    commit = store.Store.commit

    def fail(*_: Any, **__: Any) -> Any:
        raise sqlite3.OperationalError("disk I/O error")

    monkeypatch.setattr(store.Store, "commit", fail)
    with pytest.raises(Exception, match="can't be written"):
        await append(log)
    monkeypatch.setattr(store.Store, "commit", commit)
    log.cursors.set("egress:cloud", 5, holds=True)
    clock.seconds += 2
    await append(log)
    assert await cursor_on_disk(tmp_path / "l.db") == 5


# -- times


async def test_the_first_record_after_a_time_is_found_whatever_the_clock_did(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (load, store):
        monkeypatch.setattr(module, "CHECKPOINT_CHUNKS", 7)
    dice = random.Random(7)
    times: dict[int, int] = {}

    async def check(log: Log) -> None:
        probes = [*dice.sample(sorted(times.values()), min(20, len(times))), START_MS - 10**9, START_MS + 10**9]
        for time_ms in [probe + step for probe in probes for step in (-1, 0, 1)]:
            later = [seq for seq, at in times.items() if at > time_ms and seq > log.floor_seq]
            assert await log.seq_before_time(time_ms) == (min(later) - 1 if later else log.newest_seq)

    for _ in range(4):
        async with await open_log(tmp_path / "l.db", clock, retention_ms=10**6) as log:
            await check(log)
            for _ in range(60):
                clock.now_ms += dice.choice([0, 1, 50, 1_000, 20_000, -3_000, -500_000, 600_000])
                seq, count = await append(log, 2), 2
                times |= dict.fromkeys(range(seq, seq + count), clock.now_ms)
            await check(log)
            await retain(log, clock)
            await check(log)
        assert verify(tmp_path / "l.db").is_sound
    assert log.floor_seq


async def test_times_that_come_from_the_future_do_not_keep_what_is_old(tmp_path: Path, clock: Clock) -> None:
    async with await open_log(tmp_path / "l.db", clock, retention_ms=60_000) as log:
        clock.now_ms += 10**12
        for _ in range(retention.CHUNKS_PER_PASS + 20):
            await append(log)
        clock.now_ms -= 10**12
        for _ in range(3):
            await append(log)
        await retain(log, clock)
        assert log.floor_seq == 0, "what came after it is young"
        newest = log.newest_seq
        clock.now_ms += 100_000
        await append(log)
        await retain(log, clock)
        await retain(log, clock)
        assert log.floor_seq == newest


async def test_one_time_that_was_wrong_deletes_nothing_young_before_it(tmp_path: Path, clock: Clock) -> None:
    async with await open_log(tmp_path / "l.db", clock, retention_ms=60_000) as log:
        await append(log, 5)
        clock.now_ms -= 10**12  # a start before the clock was set
        await append(log, 5)
        clock.now_ms += 10**12 + 30_000
        await append(log, 5)
        await retain(log, clock)
        assert log.floor_seq == 0
        clock.now_ms += 31_000
        await retain(log, clock)
        assert log.floor_seq == 10


# -- retention


async def test_what_is_old_goes_together_and_not_one_by_one(tmp_path: Path, clock: Clock) -> None:
    age_ms = 6_400_000
    async with await open_log(tmp_path / "l.db", clock, retention_ms=age_ms) as log:
        for _ in range(30):
            await append(log)
            clock.now_ms += 10_000
        clock.now_ms = START_MS + age_ms
        floors = []
        for _ in range(30):
            clock.now_ms += 10_000
            await retain(log, clock)
            floors.append(log.floor_seq)
        assert len(set(floors)) <= 4
        assert floors[-1] >= 20
        assert all(floor <= number + 1 for number, floor in enumerate(floors)), "nothing goes too early"


async def test_the_index_is_written_sooner_where_each_message_is_of_another_topic(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "CHECKPOINT_ROWS", 30)
    path = tmp_path / "l.db"
    async with await open_log(path, clock) as log:
        for number in range(29):
            await append(log, topic=number)
        assert ask(path, "SELECT count(*) FROM chunk_stream") == [(0,)]
        await append(log, topic=29)
        await append(log, topic=30)
        assert ask(path, "SELECT count(*) FROM chunk_stream") == [(30,)]


async def test_the_index_names_nothing_that_was_deleted_after_the_next_checkpoint_or_a_crash(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "CHECKPOINT_CHUNKS", 10)
    path, copy = tmp_path / "l.db", tmp_path / "killed" / "l.db"
    copy.parent.mkdir()
    query = "SELECT count(*) FROM chunk_stream WHERE first_seq <= {}"
    async with await open_log(path, clock, retention_ms=60_000) as log:
        for number in range(25):
            await append(log, topic=number % 3)
        clock.now_ms += 100_000
        await append(log)
        for _ in range(9):
            await append(log)
        await append(log)  # a checkpoint: the chunks above are named
        await append(log)
        await retain(log, clock)
        assert log.floor_seq == 25
        assert ask(path, query.format(25))[0][0] > 0, "they go with the next checkpoint"
        for suffix in ("", "-wal", ".mark"):
            shutil.copyfile(f"{path}{suffix}", f"{copy}{suffix}")
        for _ in range(12):
            await append(log)
        assert ask(path, query.format(25)) == [(0,)]
        assert ask(path, "SELECT count(*) FROM span WHERE last_seq <= 25") == [(0,)]
    async with await open_log(copy, clock) as log:
        assert (log.floor_seq, log.damage) == (25, [])
        assert ask(copy, query.format(25)) == [(0,)]
        stored = log.extent.stored_bytes
    assert verify(copy).is_sound
    assert ask(copy, "SELECT sum(bytes) FROM chunk") == [(stored,)]


# -- versions


def change_version(path: Path, version: int) -> int:
    """Returns the version before."""
    with contextlib.closing(sqlite3.connect(path)) as db:
        before = pragma(db, "user_version")
        db.execute(f"PRAGMA user_version = {version}")
        return before


async def test_a_version_whose_bits_flipped_is_corrected(tmp_path: Path, clock: Clock) -> None:
    """No log has version 0."""
    path = tmp_path / "l.db"
    async with await open_log(path, clock) as log:
        await append(log, 3)
    assert change_version(path, 0) == 1
    async with await open_log(path, clock) as log:
        assert (log.newest_seq, log.damage) == (3, [])
    assert change_version(path, 1) == 1


# -- damage without an index on time


async def test_records_behind_a_damaged_page_are_read_and_the_gap_is_exact(tmp_path: Path, clock: Clock) -> None:
    path = tmp_path / "l.db"
    async with await open_log(path, clock) as log:
        for number in range(300):
            await log.append([log.stream_id(TOPICS[0])], [numbered(number)])
    damage_page_of(path, 150)
    reader = Reader(path)  # as of a log that is in use
    seqs, gaps, after = [], [], 0
    while after < 300:
        found = reader.scan(ScanLimits(after, 300, 1_000, 1 << 30, False), None, None, [])
        seqs += [seq for chunk in found.chunks for seq in chunk.seqs]
        gaps += found.gaps
        after = found.covered
    reader.close()
    assert seqs == [seq for seq in range(1, 301) if not gaps[0][0] < seq < gaps[-1][1]]
    assert gaps[0][0] < 151 < gaps[-1][1]
    assert 2 <= 300 - len(seqs) <= 8, "what was on that page"
    assert verify(path).records == len(seqs)
    async with await open_log(path, clock) as log:  # it is found, and what can be read is saved
        assert log.holes == [(gaps[0][0], gaps[-1][1])]
        assert [chunk.first_seq for chunk in await log.read(299)] == [300]


@pytest.mark.parametrize("indexed", [True, False])
async def test_chunks_behind_damage_are_found_by_their_names_or_by_leaps(
    tmp_path: Path, clock: Clock, indexed: bool
) -> None:
    path = tmp_path / "l.db"
    async with await open_log(path, clock) as log:
        for number in range(300):
            await log.append([log.stream_id(TOPICS[0])], [numbered(number)])
    if not indexed:
        with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as db:
            db.execute("DELETE FROM chunk_stream")
    for number in (150, 156, 170):
        damage_page_of(path, number)
    with contextlib.closing(sqlite3.connect(path)) as db:
        read = [first_seq for first_seq, columns, _ in walk(db) if columns is not None]
    lost = set(range(1, 301)) - set(read)
    assert {151, 157, 171} <= lost
    assert len(lost) <= (24 if indexed else 40)


def numbered(number: int) -> UMessage:
    return UMessageBuilder.publish(TOPICS[0]).build_from_upayload(UPayload(b"<%06d>" % number * 30, 5))


def damage_page_of(path: Path, number: int) -> None:
    """The head of the page that has that record."""
    content = bytearray(path.read_bytes())
    place = content.index(b"<%06d>" % number * 30)
    begin = place - place % rows.PAGE_BYTES
    content[begin : begin + 8] = bytes(byte ^ 0xA5 for byte in content[begin : begin + 8])
    path.write_bytes(content)
