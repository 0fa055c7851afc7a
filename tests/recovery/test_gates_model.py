"""Whatever the network, the source, the disk and a kill do: each message is in the log once and in order, or in a gap
that was reported; none that was acknowledged is lost."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path
from typing import Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from campaigns.simulation.disk import DiskFaults
from streamer.recovery.gates import Cause
from tests.history.world import virtually
from tests.recovery.model import ChainedSource, ModelSource, Recovered

BAD: Final = (
    *("away", "raises", "slow", "deaf", "nothing", "others", "invalid", "all", "endless", "huge", "position"),
    "reversed",
)
COMMON: Final = ("publish", "publish", "publish", "wait", "wait long", "twice", "kill", "kill soon", "disk", "idle")
CHAINED: Final = (*COMMON, "lose", "lose", "late", "bring late", *BAD, "fine", "lacks")
PLAIN: Final = (*COMMON, "lose at end", "away from network", *BAD[:-1], "fine")


async def run(folder: Path, make: type[ModelSource], actions: list[tuple[str, int]], seed: int) -> None:
    world = Recovered(folder, make, seed)
    await world.start()
    for action, size in actions:
        await act(world, action, size)
    world.bring_late()
    numbers = await world.settle()
    last = world.publish()
    await asyncio.sleep(10)
    numbers = await world.numbers()
    world.check(numbers)
    assert numbers[-1] == int(last.payload), "it goes on"


async def act(world: Recovered, action: str, size: int) -> None:
    match action:
        case "publish" | "lose" | "twice" | "late":
            for _ in range(size % 4 + 1):
                world.publish(lost=action == "lose", twice=action == "twice", late=action == "late")
        case "bring late":
            world.bring_late()
        case "wait":
            await asyncio.sleep(size / 1_000)
        case "wait long":
            await asyncio.sleep(size / 10)
        case "kill":
            await world.restart()
        case "kill soon":
            world.life.kill_at = world.life.steps + size
            world.publish()
            await asyncio.sleep(0.1)
            await world.restart()
        case "disk":
            world.life.disk.faults = DiskFaults(0.5, 0.2, 0.0)
            for _ in range(size % 4 + 1):
                world.publish()
                await asyncio.sleep(0.02)
            world.life.disk.faults = DiskFaults()
        case "idle":
            world.ask(Cause.IDLE)
        case "lose at end":  # the last ones, and then silence
            await asyncio.sleep(1)
            world.publish(lost=True)
            await asyncio.sleep(0.1)
            world.ask(Cause.NETWORK)
        case "away from network":
            world.is_connected = False
            world.doubt()
            for _ in range(size % 4):
                world.publish(lost=True)
            world.is_connected = True
            world.ask(Cause.NETWORK)
        case "fine":
            world.model.mode = ""
        case "lacks":
            world.model.lacks.update(range(max(1, len(world.published) - size % 4), len(world.published) + 1))
        case bad:
            world.model.mode = bad


@pytest.mark.parametrize(("make", "known"), [(ChainedSource, CHAINED), (ModelSource, PLAIN)])
def test_each_message_once_and_in_order_or_in_a_gap(make: type[ModelSource], known: tuple[str, ...]) -> None:
    @given(st.lists(st.tuples(st.sampled_from(known), st.integers(1, 60)), max_size=25), st.integers(0, 1 << 30))
    def property(actions: list[tuple[str, int]], seed: int) -> None:
        with tempfile.TemporaryDirectory() as folder:
            virtually(run(Path(folder), make, actions, seed))

    property()
