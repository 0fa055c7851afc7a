"""A gateway whose disk is small: its stores share a reserve, and a retention that does not fit is reported."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.history.small_disk import RealSmallDisk, mount, unmount
from tests.streamer.conftest import MakeWorld, publication
from uprotocol import uri as uris
from uprotocol.message import UMessageBuilder, UPayload
from uprotocol.v1.ucode_pb2 import UCode

TOPIC = "//vehicle1/8001/1/8001"
RECORD = 'record = ["//vehicle1/FFFFFFFF/FF/FFFF"]\n'
MIB = 1 << 20
DISK_BYTES = 24 * MIB
GREAT = 64 << 10


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """The folder in which the gateway's data are, on a disk of DISK_BYTES."""
    mount(tmp_path, DISK_BYTES)
    yield tmp_path
    unmount(tmp_path)


async def test_a_retention_that_does_not_fit_is_a_note(make_world: MakeWorld) -> None:
    world = await make_world(more="[history]\nretention_mib = 1_000_000_000_000\nreserve_mib = 1\n")
    (note,) = (note for note in world.parts.notes() if "retention_mib" in note)
    assert "do not fit the disk" in note
    assert world.parts.problems() == []


@pytest.mark.parametrize("mib", [0, 2])
async def test_the_reserve_is_made_as_configured(make_world: MakeWorld, mib: int) -> None:
    world = await make_world(more=f"[history]\nreserve_mib = {mib}\n")
    path = world.config.streamer.data_dir / "reserve"
    assert (path.stat().st_size if path.exists() else 0) == mib * MIB


async def test_a_reserve_that_was_given_up_is_a_note_until_it_is_there_again(make_world: MakeWorld) -> None:
    world = await make_world(more="[history]\nreserve_mib = 1\n")

    def is_reported() -> bool:
        return any("its reserve of 1 MiB was given up" in note for note in world.parts.notes())

    assert not is_reported()
    reserve = world.assembly.runtime.disk.reserve
    assert reserve.give_up()
    assert is_reported()
    await world.until(lambda: not is_reported())
    assert reserve.is_whole


async def test_all_works_on_a_disk_that_was_filled(small: Path, make_world: MakeWorld) -> None:
    """By more messages than it holds, and then by another program."""
    world = await make_world(subscriptions={TOPIC: ["//cloud/9000/1/0"]}, more=f"[history]\n{RECORD}")
    log, sender = world.assembly.logs.durable, await world.node("vehicle", "vehicle1")
    cloud = await world.hear(await world.node("cloud", "cloud"), uris.parse(TOPIC))
    great = UPayload(bytes(GREAT), 5)

    async def publish(count: int) -> None:
        async with asyncio.timeout(60):
            for _ in range(count):
                await sender.send(UMessageBuilder.publish(uris.parse(TOPIC)).build_from_upayload(great))
            await world.taken("vehicle")

    great_ones = 2 * DISK_BYTES // GREAT
    await publish(great_ones)
    await world.until(lambda: len(cloud.messages) == great_ones)
    assert log.floor_seq > 0
    assert world.parts.problems() == []
    filler = RealSmallDisk(small).fill()
    await world.restart()
    assert world.parts.problems() == []
    world.assembly.dead_letters.add(publication(TOPIC), UCode.UNAVAILABLE, "away", "cloud")
    await publish(20)
    await world.until(lambda: len(cloud.messages) == great_ones + 20)
    assert world.parts.problems() == []
    filler.end()
