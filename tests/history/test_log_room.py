"""A log on a disk that is smaller than its retention: the oldest records are removed before the disk is full; if
another program fills the disk, the log works again by itself once there is space."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sqlite3
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from history.file import verify as verify_module
from history.file.verify import verify
from history.log.log import Log, RetentionLoss
from storage.faults import Reserve, disk_bytes
from storage.runtime import REAL, Runtime
from streamer.letters import dead_letter
from tests.history.small_disk import RealSmallDisk, SmallDisk, mount, unmount
from uprotocol import uri as uris
from uprotocol.message import UMessageBuilder, UPayload
from uprotocol.status import UStatusError
from uprotocol.v1.ucode_pb2 import UCode
from usubscription.store.database import Database, Probe, Register

MIB = 1 << 20
DISK_BYTES = 16 * MIB
RESERVE_BYTES = 2 * MIB
TOPIC = uris.parse("//vehicle/8001/1/8000")
WAIT_S = 30


@pytest.fixture(params=["acting", "mounted"])
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[SmallDisk | RealSmallDisk]:
    """Of DISK_BYTES, and with a reserve."""
    if request.param == "acting":
        yield SmallDisk(tmp_path, DISK_BYTES).with_reserve(Reserve(tmp_path / "reserve", RESERVE_BYTES))
        return
    folder = tmp_path / "mounted"
    folder.mkdir()
    mount(folder, DISK_BYTES)
    yield RealSmallDisk(folder).with_reserve(Reserve(folder / "reserve", RESERVE_BYTES))
    unmount(folder)


@pytest.fixture
def folder(disk: SmallDisk | RealSmallDisk) -> Path:
    return disk.reserve.path.parent


@pytest.fixture
def runtime(disk: SmallDisk | RealSmallDisk) -> Runtime:
    return replace(REAL, disk=disk)


async def open_log(runtime: Runtime) -> Log:
    return await Log.open(runtime.disk.reserve.path.parent / "history.db", name="small", runtime=runtime, tail_bytes=1)


async def append(log: Log, mib: int) -> int:
    """Appends so many MiB; returns how many were accepted."""
    message = UMessageBuilder.publish(TOPIC).build_from_upayload(UPayload(os.urandom(64 << 10), 5))
    taken = 0
    for _ in range(mib):
        try:
            await log.append([log.stream_id(TOPIC)] * 16, [message] * 16)
        except UStatusError as error:
            if error.code != UCode.RESOURCE_EXHAUSTED:
                raise
        else:
            taken += 1
    return taken


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not condition():  # noqa: ASYNC110 - the disk tells nobody
            await asyncio.sleep(0.02)


async def is_whole(log: Log) -> bool:
    """Reads everything that retention has left."""
    while True:
        count, after = 0, (floor := log.floor_seq)
        while chunks := await log.read(after):
            after = chunks[-1].last_seq
            count += sum(map(len, chunks))
        if log.floor_seq == floor:  # else it has gone on meanwhile
            return count == log.newest_seq - floor


async def test_the_oldest_records_go_before_the_disk_is_full(runtime: Runtime, folder: Path) -> None:
    async with await open_log(runtime) as log:
        passed: list[RetentionLoss] = []
        log.on_retention_loss(passed.append)
        log.cursors.set("egress:cloud", 0, holds=True)
        assert await append(log, 2 * DISK_BYTES // MIB) == 2 * DISK_BYTES // MIB
        assert log.disk_limit_bytes < DISK_BYTES - RESERVE_BYTES < log.retention_bytes
        assert log.floor_seq > 0
        assert log.extent.stored_bytes > DISK_BYTES // 2, "most of the disk is for records"
        assert runtime.disk.reserve.is_whole
        assert (folder / "history.db-wal").stat().st_size <= RESERVE_BYTES
        assert await is_whole(log)
        assert (passed[0].after, passed[-1].before) == (0, log.floor_seq + 1), (
            "the loss is reported to the readers that missed the records"
        )


async def test_a_disk_that_another_program_has_filled(runtime: Runtime, disk: SmallDisk | RealSmallDisk) -> None:
    async with await open_log(runtime) as log:
        await append(log, 8)
        filler = disk.fill()
        assert await append(log, 8) == 8, "within the free space of the log, or the reserve"
        await until(lambda: disk.reserve.is_whole)
        assert log.floor_seq > 0
        assert await append(log, 8) == 8
        filler.end()


async def test_a_program_that_takes_whatever_is_deleted(runtime: Runtime, disk: SmallDisk | RealSmallDisk) -> None:
    async with await open_log(runtime) as log:
        await append(log, 10)
        kept, filler = log.extent.stored_bytes, disk.fill()
        refused = 0
        for _ in range(24):
            refused += not await append(log, 1)
            filler.again()
        assert refused > 0
        assert not log.healthy
        assert log.extent.stored_bytes > kept // 4, "it is of no use to delete all for it"
        newest = log.newest_seq
        filler.end()
        await until(lambda: log.healthy and disk.reserve.is_whole)
        assert await is_whole(log)
        assert await append(log, 4) == 4
        assert log.newest_seq == newest + 64
        assert log.damage == []


@pytest.mark.parametrize("before_mib", [2, 20])
async def test_a_foreign_reader_that_never_ends(runtime: Runtime, folder: Path, before_mib: int) -> None:
    async with await open_log(runtime) as log:
        assert await append(log, before_mib) == before_mib
        reader = sqlite3.connect(folder / "history.db")
        reader.execute("BEGIN")
        reader.execute("SELECT count(*) FROM chunk").fetchone()
        taken = await append(log, DISK_BYTES // MIB)
        assert taken < DISK_BYTES // MIB
        with pytest.raises(UStatusError, match=r"somebody has been reading .* end that reader"):
            await log.append(
                [log.stream_id(TOPIC)], [UMessageBuilder.publish(TOPIC).build_from_upayload(UPayload(bytes(MIB), 5))]
            )
        newest = log.newest_seq
        reader.close()
        await until(lambda: log.healthy)
        assert await append(log, 8) == 8
        assert log.newest_seq == newest + 8 * 16
        await until(lambda: (folder / "history.db-wal").stat().st_size <= RESERVE_BYTES)
        assert runtime.disk.reserve.is_whole


async def test_the_stores_open_on_a_full_disk(runtime: Runtime, disk: SmallDisk | RealSmallDisk, folder: Path) -> None:
    """Each of them: the reserve is made again meanwhile."""
    assert disk.reserve.restore(disk.free_bytes(folder / "reserve"))
    filler = disk.fill()
    letters = dead_letter.LetterStore(folder / "dead-letters.db", disk=disk)
    letters.write([(1, 14, "away", "cloud", b"")])
    letters.close()
    assert not disk.reserve.held
    filler.end()
    for name in ("usubscription", "log"):
        assert disk.reserve.restore(disk.free_bytes(folder / "reserve"))
        filler = disk.fill()
        if name == "log":
            async with await open_log(runtime) as log:
                assert await append(log, 1) == 1
        else:
            database = Database(folder / "usubscription.db", "vehicle", disk=disk)
            database.open()
            database.apply([Probe()], 1)
            database.close()
        assert not disk.reserve.held
        filler.end()


async def test_stores_that_are_open_write_on_a_full_disk(disk: SmallDisk | RealSmallDisk, folder: Path) -> None:
    letter = UMessageBuilder.publish(TOPIC).build_from_upayload(UPayload(bytes(64 << 10), 5)).SerializeToString()
    with (
        contextlib.closing(dead_letter.LetterStore(folder / "dead-letters.db", disk=disk)) as letters,
        contextlib.closing(Database(folder / "usubscription.db", "vehicle", disk=disk)) as database,
    ):
        database.open()
        for write in (
            lambda: letters.write([(1, 14, "away", "cloud", letter)]),
            lambda: database.apply([Register(("vehicle", place, 1, 0), 3, None) for place in range(1_000)], 1),
        ):
            assert disk.reserve.restore(disk.free_bytes(folder / "reserve"))
            filler = disk.fill()
            for _ in range(100):
                write()
                if not disk.reserve.held:
                    break
            assert not disk.reserve.held
            filler.end()
        assert letters.read()[-1].reason == "away"


async def test_many_great_messages_are_no_great_transaction(
    runtime: Runtime, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is queued at once may be more than the disk has."""
    async with await open_log(runtime) as log:
        id = log.stream_id(TOPIC)
        message = UMessageBuilder.publish(TOPIC).build_from_upayload(UPayload(os.urandom(64 << 10), 5))
        await asyncio.gather(*(log.append([id] * 8, [message] * 8) for _ in range(2 * DISK_BYTES // (8 * (64 << 10)))))
        assert log.newest_seq == 2 * DISK_BYTES // (64 << 10)
        assert sum(map(disk_bytes, folder.iterdir())) <= DISK_BYTES


async def test_verifying_ends_before_it_lets_the_disk_fill(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "history.db"
    async with await Log.open(path, name="read") as log:
        await append(log, 4)
        monkeypatch.setattr(verify_module, "STEPS_PER_LOOK", 10)
        assert verify(path).is_sound
        monkeypatch.setattr(verify_module, "WAL_IGNORED_BYTES", 1)
        monkeypatch.setattr(verify_module, "free_bytes", lambda path: 0)
        with pytest.raises(UStatusError, match=r"UNAVAILABLE.*try again when less comes"):
            verify(path)
