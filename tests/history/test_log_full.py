"""A disk that is full when the log is opened: one clear error and no damage; with free space the log is unchanged."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from history.log.log import Log
from streamer.letters import dead_letter
from tests.history.small_disk import mount, unmount
from uprotocol import uri as uris
from uprotocol.message import UMessageBuilder, UPayload
from uprotocol.status import UStatusError
from uprotocol.v1.ucode_pb2 import UCode

OldData = Callable[[str], Path]
TOPIC = uris.parse("//vehicle1/8001/1/8000")
DISK_BYTES = 1 << 20
FREE_BYTES = [0, 4_096, 20_000, 40_000, 150_000, 300_000]


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of DISK_BYTES."""
    path = tmp_path / "disk"
    path.mkdir()
    mount(path, DISK_BYTES)
    yield path
    unmount(path)


def fill(disk: Path, free_bytes: int) -> Path:
    stat = os.statvfs(disk)
    filler = disk / "filler"
    filler.write_bytes(bytes(max(0, stat.f_bavail * stat.f_frsize - free_bytes)))
    return filler


async def append(log: Log, size: int = 100) -> int:
    return await log.append(
        [log.stream_id(TOPIC)], [UMessageBuilder.publish(TOPIC).build_from_upayload(UPayload(bytes(size), 5))]
    )


async def records(log: Log) -> int:
    count = after = 0
    while chunks := await log.read(after):
        after = chunks[-1].last_seq
        count += sum(map(len, chunks))
    return count


async def full_then_room(path: Path, free_bytes: int, now_ms: int, expected: int) -> None:
    filler = fill(path.parent, free_bytes)
    for _ in range(2):
        try:
            log = await Log.open(path, name="full", now_ms=lambda: now_ms)
        except UStatusError as error:
            refused: UStatusError | None = error
        else:
            refused = None
            assert (await records(log), log.damage) == (expected, [])
            with pytest.raises(UStatusError, match="RESOURCE_EXHAUSTED"):
                await append(log, 400_000)
            await log.close()
        assert refused is None or refused.code == UCode.RESOURCE_EXHAUSTED
    filler.unlink()
    async with await Log.open(path, name="room", now_ms=lambda: now_ms) as log:
        assert (await records(log), log.damage) == (expected, [])
        await append(log)
    assert not list(path.parent.glob("*damaged*"))


@pytest.mark.parametrize("free_bytes", FREE_BYTES)
async def test_a_new_log(disk: Path, free_bytes: int) -> None:
    await full_then_room(disk / "history.db", free_bytes, 1_800_000_000_000, 0)


@pytest.mark.parametrize("free_bytes", FREE_BYTES)
async def test_a_log_that_was_closed(disk: Path, free_bytes: int) -> None:
    now_ms = 1_800_000_000_000
    async with await Log.open(disk / "history.db", name="made", now_ms=lambda: now_ms) as log:
        message = UMessageBuilder.publish(TOPIC).build_from_upayload(UPayload(b"x", 5))
        await log.append([log.stream_id(TOPIC)] * 30, [message] * 30)
    await full_then_room(disk / "history.db", free_bytes, now_ms, 30)


@pytest.mark.parametrize("free_bytes", FREE_BYTES)
def test_dead_letters(disk: Path, free_bytes: int) -> None:
    path = disk / "dead-letters.db"
    store = dead_letter.LetterStore(path)
    store.write([(1, 14, "away", "cloud", b"")])
    store.close()
    filler = fill(disk, free_bytes)
    for _ in range(2):
        try:
            dead_letter.LetterStore(path).close()
        except UStatusError as error:
            refused: UStatusError | None = error
        else:
            refused = None
        assert refused is None or refused.code == UCode.RESOURCE_EXHAUSTED
    filler.unlink()
    store = dead_letter.LetterStore(path)
    assert [one.reason for one in store.read()] == ["away"]
    store.close()
    assert not list(disk.glob("*damaged*"))
