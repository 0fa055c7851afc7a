"""The last fault of some worlds: a gateway restarts with an empty data folder. Its neighbour keeps running."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from uprotocol.core.usubscription.wire import ENTITY_TYPE
from usubscription.state import Key

if TYPE_CHECKING:
    from campaigns.simulation.machine import Machine
    from campaigns.simulation.world import World

EMPTIED: Final = "emptied"  # the name of this fault
EMPTIED_SHARE: Final = 0.5  # of worlds with two gateways, neither of which follows the other
START_S_MAX: Final = 60.0
SETTLE_S: Final = 15.0  # audits at the start are over, and nothing waits any more
RENEWED_S_MAX: Final = 10.0  # then the other service has renewed its half of the subscriptions
REPORTED_S_MAX: Final = 15.0  # what others knew is collected for 10 s, then it is reported


async def empty_one(world: World) -> None:
    """Start both gateways, which are stopped, empty one of them, and check what it and the other one say and do."""
    dice = random.Random(f"{world.seed} {EMPTIED}")
    if world.kind != "chain" or EMPTIED in world.without or dice.random() >= EMPTIED_SHARE:
        return
    names = ["V", "C"]
    dice.shuffle(names)
    emptied, other = (world.machines[name] for name in names)
    for machine in (emptied, other):
        machine.start()
    if not await world.until(lambda: emptied.ready and other.ready, START_S_MAX):
        world.checker.fail("not ready", "the gateways do not start again")
        return
    await world.until(lambda: False, SETTLE_S)
    shared = await _of_other_services(emptied)
    await emptied.stop()
    world.note(EMPTIED, emptied.name, len(shared))
    shutil.rmtree(emptied.folder)
    emptied.folder.mkdir()
    emptied.start()
    await _check(world, emptied, other, shared)
    for machine in (emptied, other):
        await machine.stop()
    await world.until(lambda: False, SETTLE_S)


async def _check(world: World, emptied: Machine, other: Machine, shared: set[tuple[Key, Key]]) -> None:
    checker = world.checker

    def is_connected() -> bool:
        process = emptied.process
        return process is not None and process.ready and all(one.connected for one in process.transports())

    if not await world.until(is_connected, START_S_MAX):
        checker.fail("not ready", f"{emptied.name} does not start with an emptied folder")
        return
    assert emptied.streamer is not None
    assert other.streamer is not None
    if not any(" new since " in note for note in emptied.streamer.parts.notes()):
        checker.fail("emptied and not noted", f"{emptied.name}: {emptied.streamer.parts.notes()}")
    end = world.loop.now + RENEWED_S_MAX
    while (missing := shared - await _of_other_services(emptied)) and world.loop.now < end:
        await world.until(lambda: False, 0.25)
    if missing:
        checker.fail("not renewed", f"after {RENEWED_S_MAX} s {emptied.name} does not have {min(missing)}")
    if shared:
        await _reported(world, emptied, lambda: _has(emptied.streamer.parts.problems(), "knew others"), "degraded")
        await _reported(world, other, lambda: _has(other.streamer.parts.notes(), "had lost"), "noted at the other one")


async def _reported(world: World, machine: Machine, is_reported: Callable[[], bool], what: str) -> None:
    if not await world.until(is_reported, REPORTED_S_MAX):
        assert machine.streamer is not None
        said = [*machine.streamer.parts.problems(), *machine.streamer.parts.notes()]
        world.checker.fail(f"emptied and not {what}", f"{machine.name}: {said}")


def _has(texts: list[str], part: str) -> bool:
    return any(part in text for text in texts)


async def _of_other_services(machine: Machine) -> set[tuple[Key, Key]]:
    """(subscriber, topic) of the subscriptions that other uSubscription services have there."""
    service = machine.streamer.assembly.usubscription if machine.streamer is not None else None
    if service is None:
        return set()
    return {
        (row.subscriber, row.topic)
        for row in await service.subscriptions()
        if row.subscriber[0] != service.authority and row.subscriber[1] & 0xFFFF == ENTITY_TYPE
    }
