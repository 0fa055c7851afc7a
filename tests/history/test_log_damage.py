"""Damage is reported: at once and after every restart, until a person has acknowledged it."""

from __future__ import annotations

import asyncio
import os
import sqlite3
from pathlib import Path

from history.file import damage as kinds
from history.file.damage import Damage
from history.file.retention import Sizes
from history.file.rows import DAMAGE, PAGE_BYTES
from history.log.log import Cursor, Log
from history.service.gaps import QUEUED_MAX, Gaps
from uprotocol import uri as uris
from uprotocol.core.ustreamer.v1.ustreamer_pb2 import Gap, GapNotice
from uprotocol.message import UMessageBuilder, UPayload
from uprotocol.status import UStatusError
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.umessage_pb2 import UMessage
from uprotocol.v1.uri_pb2 import UUri

TOPICS = [uris.uri("vcu.vin", 0x10, 1, 0x8000 + place) for place in range(4)]
SINK = uris.uri("cloud", 0x20, 1, 0)


def message(topic: int = 0, size: int = 100) -> UMessage:
    return UMessageBuilder.publish(TOPICS[topic]).build_from_upayload(UPayload(os.urandom(size), 5))


async def append(log: Log, *topics: int, size: int = 100) -> int:
    return await log.append(
        [log.stream_id(TOPICS[topic]) for topic in topics], [message(topic, size) for topic in topics]
    )


async def read_all(log: Log, after: int = 0) -> list[int]:
    seqs: list[int] = []
    while chunks := await log.read(after):
        after = chunks[-1].last_seq
        seqs += [seq for chunk in chunks for seq in chunk.seqs]
    return seqs


async def made(path: Path, batches: int = 10) -> bytes:
    """30 records in chunks of 3."""
    async with await Log.open(path, name="made") as log:
        for _ in range(batches):
            await append(log, 0, 1, 2, size=30_000)
        log.cursors.set("egress:cloud", 7, holds=True)
        return log.incarnation


def damage_record(path: Path, first_seq: int) -> None:
    """Turn one byte of a message of the chunk at `first_seq`, in the file itself."""
    db = sqlite3.connect(path)
    (data,) = db.execute("SELECT data FROM chunk WHERE first_seq = ?", (first_seq,)).fetchone()
    db.close()
    content = bytearray(path.read_bytes())
    place = content.find(data[50_000:50_100])
    assert place > 0
    content[place + 10] ^= 0xFF
    path.write_bytes(content)


def summary(log: Log) -> list[tuple[str, int, int]]:
    return [(damage.kind, damage.after, damage.before) for damage in log.damage]


async def test_a_damaged_chunk_is_reported_when_it_is_read_and_until_it_is_acknowledged(tmp_path: Path) -> None:
    path = tmp_path / "l.db"
    await made(path)
    damage_record(path, 13)
    async with await Log.open(path, name="again") as log:
        found: list[Damage] = []
        log.losses.on_found(found.append)
        assert log.damage == []
        await log.scan(0, max_records=20, max_bytes=1 << 30, until=14)
        assert found == log.damage
        assert summary(log) == [("records", 12, 16)]
        assert (found[0].incarnation, found[0].records) == (log.incarnation, 3)
        await read_all(log)
        assert (len(found), log.dropped["corrupt_chunks"]) == (1, 1)
    async with await Log.open(path, name="restarted") as log:
        assert log.damage == found
        await read_all(log)
        assert log.damage == found
        log.losses.acknowledge()
        assert log.damage == []
    async with await Log.open(path, name="acknowledged") as log:
        await read_all(log)
        assert log.damage == []


async def test_a_new_file_remembers_its_damaged_predecessor_and_what_that_had_to_tell(tmp_path: Path) -> None:
    path = tmp_path / "l.db"
    incarnation = await made(path)
    damage_record(path, 13)
    async with await Log.open(path, name="again") as log:
        await read_all(log)
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 5 * PAGE_BYTES)
    async with await Log.open(path, name="saved") as log:
        assert log.incarnation == incarnation  # the mark says up to where seqs were given out
        assert summary(log) == [("records", 12, 16), ("file", 0, 0), ("commits", 27, 31)]
        assert Path(log.damage[1].moved_to).exists()
        assert log.dropped == {"damaged_file": 1, "lost_commits": 1, "corrupt_chunks": 1}
        assert await read_all(log) == [*range(1, 13), *range(16, 28)]
        assert log.cursors.all() == {"egress:cloud": Cursor(7, holds=True)}
        damage = log.damage
    path.write_bytes(os.urandom(50_000))
    async with await Log.open(path, name="new") as log:
        assert log.incarnation != incarnation
        (whole,) = [damage for damage in log.damage if damage.before == 31 and damage.after == 0]
        assert (whole.kind, whole.incarnation) == (kinds.FILE, incarnation)
        assert Path(whole.moved_to).exists()
        assert await append(log, 0) == 1
    async with await Log.open(path, name="later") as log:
        assert whole in log.damage
        assert (log.dropped["damaged_file"], len(damage)) == (0, 3)


async def test_a_log_without_its_file_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "l.db"
    incarnation = await made(path)
    path.unlink()
    async with await Log.open(path, name="new") as log:
        assert summary(log) == [("missing", 0, 31)]
        assert log.damage[0].incarnation == incarnation


async def test_an_empty_file_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "l.db"
    await made(path)
    path.write_bytes(b"")
    async with await Log.open(path, name="new") as log:
        assert summary(log) == [("missing", 0, 31)]


async def test_a_start_that_only_moved_the_file_aside_is_reported_by_the_next_start(tmp_path: Path) -> None:
    path = tmp_path / "l.db"
    await made(path)
    path.rename(f"{path}.damaged-123")
    Path(f"{path}.mark").unlink()
    async with await Log.open(path, name="new") as log:
        assert [(damage.kind, damage.moved_to) for damage in log.damage] == [("file", f"{path}.damaged-123")]


async def test_a_new_log_has_nothing_to_tell(tmp_path: Path) -> None:
    async with await Log.open(tmp_path / "l.db", name="new") as log:
        assert log.damage == []
        assert log.dropped == {}
        assert log.extent.disk_bytes > 10 * PAGE_BYTES
        assert log.extent.disk_free_bytes > 0


async def test_another_process_may_acknowledge(tmp_path: Path) -> None:
    path = tmp_path / "l.db"
    await made(path)
    damage_record(path, 13)
    async with await Log.open(path, name="again") as log:
        await read_all(log)
        assert log.damage
        async with asyncio.timeout(10):
            while not _acknowledge_in_the_file(path):  # noqa: ASYNC110 - the writer has not written it yet
                await asyncio.sleep(0.01)
            while log.damage:  # noqa: ASYNC110 - the writer looks every second
                await asyncio.sleep(0.01)


def _acknowledge_in_the_file(path: Path) -> bool:
    db = sqlite3.connect(path, isolation_level=None)
    rows = [(*row[:-1], 1) for row in DAMAGE.read(db, [])]
    DAMAGE.insert(db, rows)
    db.close()
    return bool(rows)


async def test_gaps_are_published_at_the_start_and_when_they_are_found(tmp_path: Path) -> None:
    path = tmp_path / "l.db"
    await made(path)
    path.unlink()
    await made(path)
    damage_record(path, 13)
    async with await Log.open(path, name="again") as log:
        heard: asyncio.Queue[tuple[UUri, GapNotice]] = asyncio.Queue()
        gaps = Gaps("gateway", [log], lambda topic, notice: heard.put((topic, notice)), now_ms=lambda: 1_000)
        running = asyncio.create_task(gaps.run())
        topic, notice = await asyncio.wait_for(heard.get(), 10)
        assert uris.format(topic) == "up://gateway/4/1/8002"
        assert (notice.gap.reason, notice.gap.after_seq, notice.gap.before_seq) == (Gap.REASON_CORRUPTION, 0, 31)
        assert notice.gap.incarnation not in (log.incarnation, b"")
        await read_all(log)
        _, notice = await asyncio.wait_for(heard.get(), 10)
        assert (notice.gap.incarnation, notice.gap.after_seq, notice.gap.before_seq) == (log.incarnation, 12, 16)
        gaps.add(
            Gap(reason=Gap.REASON_RETENTION, incarnation=log.incarnation, after_seq=1, before_seq=5),
            "cloud",
            "too long away",
        )
        _, notice = await asyncio.wait_for(heard.get(), 10)
        assert (notice.endpoint, notice.detail, notice.time.ToMilliseconds()) == ("cloud", "too long away", 1_000)
        assert (gaps.total, gaps.lost) == (3, 0)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def test_gaps_that_nobody_takes_cost_no_memory(tmp_path: Path) -> None:
    async def never(*_: object) -> None:
        raise UStatusError(UCode.UNAVAILABLE, "nobody is there")

    gaps = Gaps("gateway", [], never)
    for _ in range(QUEUED_MAX + 5):
        gaps.add(Gap())
    assert (gaps.total, gaps.lost) == (QUEUED_MAX + 5, 5)
    running = asyncio.create_task(gaps.run())
    async with asyncio.timeout(10):
        while gaps._queue:  # noqa: ASYNC110 - it tells nobody
            await asyncio.sleep(0)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_a_loss_in_a_network_counts_as_acknowledged_after_a_while_over_restarts_and_damage_does_not(
    tmp_path: Path,
) -> None:
    path, now_ms, hour_ms = tmp_path / "l.db", 1_700_000_000_000, 3_600_000
    await made(path)
    damage_record(path, 13)
    async with await Log.open(path, name="first", now_ms=lambda: now_ms) as log:
        await read_all(log)
        log.losses.report(kinds.NETWORK, "a session")
        log.losses.report(kinds.SUBSCRIPTIONS, "3 changes")
        assert log.losses.acknowledge_passing(hour_ms) == []
        now_ms += hour_ms - 1
    async with await Log.open(path, name="second", now_ms=lambda: now_ms) as log:
        assert log.losses.acknowledge_passing(hour_ms) == []
        now_ms += 1
        assert [one.detail for one in log.losses.acknowledge_passing(hour_ms)] == ["a session"]
        assert log.losses.acknowledge_passing(hour_ms) == []
        assert [one.kind for one in log.damage] == ["records", "subscriptions"]
    async with await Log.open(path, name="third", now_ms=lambda: now_ms) as log:
        assert [one.kind for one in log.damage] == ["records", "subscriptions"]


async def test_a_loss_that_happens_again_is_reported_from_then_on(tmp_path: Path) -> None:
    now_ms = 1_700_000_000_000
    async with await Log.open(tmp_path / "l.db", name="one", now_ms=lambda: now_ms) as log:
        log.losses.report(kinds.NETWORK, "a session")
        now_ms += 1_000
        log.losses.report(kinds.NETWORK, "a session")
        (damage,) = log.damage
        assert damage.when_ms == now_ms
        now_ms -= 5_000  # the clock was put right: what lies ahead ends, too
        assert log.losses.acknowledge_passing(6_000) == []
        assert log.losses.acknowledge_passing(5_000) == [damage]


async def test_what_was_acknowledged_is_remembered_only_as_long_as_it_could_be_found_again(tmp_path: Path) -> None:
    path = tmp_path / "l.db"
    await made(path)
    damage_record(path, 13)
    async with await Log.open(path, name="again") as log:
        await read_all(log)
        for number in range(3):
            log.losses.report(kinds.NETWORK, f"loss {number}")
        log.losses.acknowledge()
    async with await Log.open(path, name="later") as log:
        assert [row[2] for row in log.losses.ledger.rows] == ["records"]
        await read_all(log)
        assert log.damage == []
        assert log.durable
        log.cursors.drop("egress:cloud")
        log._storage._store.sizes = Sizes(1)
        log._storage.writer._next_retention = 0.0
        async with asyncio.timeout(10):
            while log.floor_seq < 15:  # noqa: ASYNC110 - retention tells nobody
                await asyncio.sleep(0.01)
    async with await Log.open(path, name="passed") as log:
        assert log.losses.ledger.rows == []
