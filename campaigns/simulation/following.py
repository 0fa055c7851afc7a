"""What a follower must have of the vehicle's log, and the faults that are about it: worlds of the kinds of following.

NamedPublisher: topics that only `[[follow]] topics` names, and the vehicle records -> V's log, and never pushed
another name of the followed endpoint, while the hub is away; an operator adopts what waits for the former name
at the end: every record of these topics that V's log still has is in C's log, once, or in a reported gap
then one of both is emptied: C must say so and have everything again, V must report what its follower knows
"""

from __future__ import annotations

import asyncio
import random
import shutil
from typing import TYPE_CHECKING, Any, Final

from campaigns.simulation.apps import Publisher
from history.records.chunk import message_id
from streamer.commands import cursors
from uprotocol import uri as uris
from uprotocol.status import UStatusError
from uprotocol.v1.uri_pb2 import UUri

if TYPE_CHECKING:
    from campaigns.simulation.machine import Machine
    from campaigns.simulation.world import World
    from history.log.log import Log
    from transports.local import LocalTransport

NAMED: Final = ("//vin1/8009/1/8001", "//vin1/8009/1/8002")
NAMES: Final = ("cloud", "cloud2")  # of the vehicle's endpoint that the hub follows
NAMED_SHARE: Final = 0.6  # of worlds of these kinds
EMPTIED_SHARE: Final = 0.5
PAUSE_S_MAX: Final = 0.4  # between two messages
START_S_MAX: Final = 60.0
READ_S_MAX: Final = 60.0


class NamedPublisher(Publisher):
    """Publishes from the first moment to the last, as far as the vehicle's network takes it."""

    def __init__(self, world: World, transport: LocalTransport) -> None:
        super().__init__(world, transport, "named", [uris.parse(one) for one in NAMED], [], 0.0)
        self._dice = random.Random(f"{world.seed} named")

    async def run(self, messages: int, pause_s: float) -> None:
        while not self._world.healed:
            await asyncio.sleep(self._dice.random() * PAUSE_S_MAX)
            await self.publish(self._dice.choice(self._topics))


def has_named(world: World) -> bool:
    return (
        world.follows
        and "named" not in world.without
        and random.Random(f"{world.seed} has named").random() < NAMED_SHARE
    )


class FollowingChecker:
    """Of the records of NAMED in the vehicle's log: which the hub must have."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._after: tuple[bytes, int] | None = None  # log and seq; later records are owed
        self.is_excused = False  # a rule kept them inside for a while, or the hub does not follow in the end

    def look(self) -> None:
        """Called often: since when does the hub follow?"""
        origin, hub = self._world.machines["V"].streamer, self._world.machines["C"].streamer
        if self._after is None and origin is not None and hub is not None and self._world.are_followed():
            self._after = origin.assembly.logs.durable.incarnation, origin.assembly.logs.durable.newest_seq

    async def missing(self) -> list[str]:
        """Compares the logs of both gateways, which run."""
        origin, hub = self._world.machines["V"].streamer, self._world.machines["C"].streamer
        if origin is None or hub is None:
            return []
        there, here = origin.assembly.logs.durable, hub.assembly.logs.durable
        after = self._after
        if after is None or after[0] != there.incarnation or self.is_excused or self._world.checker.allowed_gaps:
            return []
        had = {id for _, id, _ in await _records(here)}
        places = self._world.checker.places
        return [
            f"seq {seq} on {uris.format(topic)} is in the vehicle's log, and the hub has neither it nor a gap"
            for seq, id, topic in await _records(there)
            if seq > after[1]
            and uris.format(topic).removeprefix("up:") in NAMED
            and id not in had
            and not any(machine == "C" for machine, _, _ in places.get(id, ()))
            and not self._world.checker.in_followed_gap(there.incarnation, seq)
        ]

    async def check(self) -> None:
        missing = await self.missing()
        end = self._world.loop.now + READ_S_MAX
        while missing and self._world.loop.now < end:
            await asyncio.sleep(0.5)
            missing = await self.missing()
        if missing:
            self._world.checker.fail("not followed and not told", f"{missing[0]} ({len(missing)} such records)")

    def begin_again(self) -> None:
        """The hub is emptied: it must have everything that the vehicle's log has."""
        origin = self._world.machines["V"].streamer
        assert origin is not None
        if self._after is not None:
            self._after = origin.assembly.logs.durable.incarnation, 0
        for places in self._world.checker.places.values():
            places[:] = [one for one in places if one[0] != "C"]


async def _records(log: Log) -> list[tuple[int, bytes, UUri]]:
    found, after = list[tuple[int, bytes, UUri]](), 0
    while chunks := await log.read(after):
        for chunk in chunks:
            topics = {stream: log.stream(stream).source for stream in chunk.stream_set if log.knows_stream(stream)}
            for seq, stream, message in zip(chunk.seqs, chunk.streams, chunk.messages, strict=True):
                if stream in topics:
                    found.append((seq, message_id(message), topics[stream]))
        after = chunks[-1].last_seq
    return found


# An operator


async def adopt(world: World, machine: Machine) -> None:
    """Do what the finding about a former name says, while the gateway is stopped."""
    new = machine.config["endpoint"][2]["name"]
    old = next(one for one in NAMES if one != new)
    path = machine.folder / "history.db"
    if machine.running or not path.exists():
        return
    for out_of_order in (False, True):
        try:
            found = await cursors._adopt(path, old, new, out_of_order=out_of_order, runtime=machine.command_runtime())
            world.note("adopted", old, new, found)
            return
        except UStatusError as error:
            world.note("not adopted", old, new, error.message)
            if "--out-of-order" not in error.message:
                return


# An emptied folder, at the very end


async def empty_one(world: World) -> None:
    """Start both gateways, which are stopped, empty one of them, and check what both have and say."""
    dice = random.Random(f"{world.seed} emptied")
    if world.following is None or "emptied" in world.without or dice.random() >= EMPTIED_SHARE:
        return
    hub, vehicle = world.machines["C"], world.machines["V"]
    emptied = dice.choice((hub, hub, vehicle))
    for machine in (hub, vehicle):
        machine.start()
    if not await world.until(lambda: world.are_followed(), START_S_MAX):
        return  # the hub does not follow any more
    await asyncio.sleep(35.0)  # what was read is acknowledged
    has_read = bool(hub.streamer is not None and hub.streamer.assembly.logs.durable.newest_seq)
    await emptied.stop()
    world.note("emptied", emptied.name)
    shutil.rmtree(emptied.folder)
    emptied.folder.mkdir()
    world.checker.emptied(emptied.name)
    emptied.start()
    if not await world.until(lambda: world.are_followed(), START_S_MAX) or not has_read:
        return
    words = "an earlier one has had records of" if emptied is hub else "has followed another one"
    if not await world.until(lambda: _says(emptied, words), START_S_MAX):
        said = emptied.streamer.parts.problems() if emptied.streamer is not None else []
        world.checker.fail("emptied and not told", f"{emptied.name}: {said}")
    if emptied is hub:
        world.following.begin_again()
        await world.following.check()
    for machine in (hub, vehicle):
        await machine.stop()
    await asyncio.sleep(2.0)


def _says(machine: Machine, words: str) -> bool:
    return machine.streamer is not None and any(words in one for one in machine.streamer.parts.problems())


def config_of(world: Any, name: str, config: dict[str, Any]) -> dict[str, Any]:
    """Returns the configuration with what these worlds need, whatever the plan has made of it."""
    if world.following is None:
        return config
    if name == "V":
        history = config.get("history", {})
        return config | {"history": history | {"record": [*history.get("record", ()), *NAMED]}}
    topics = [world._text(topic) for topic in NAMED]
    follow = [one | {"topics": [*one.get("topics", ()), *topics]} for one in config.get("follow", ())]
    return config | {"follow": follow}
