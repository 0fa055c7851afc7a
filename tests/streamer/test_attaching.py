"""Endpoints that are added to a running streamer, and removed from it."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Sequence
from typing import Any

import pytest
from pydantic import ValidationError

from campaigns.simulation.network import FaultyNetwork
from streamer.config import EndpointSection, FollowSection, RuleSection
from streamer.parts.endpoints import EndpointPart
from streamer.parts.readiness import Readiness
from tests.streamer.conftest import MakeWorld, World, changed, endpoints, publication
from transports.local import LocalTransport
from uprotocol import uri as uris
from uprotocol.status import UStatusError

DOOR = "//vehicle1/9001/1/8001"
CLOUD_ONLY = "//vehicle1/9001/1/8002"
TIMES = 300
WARM_UP = 50  # rounds in which caches fill
# of whose objects no more may be there afterwards; the log keeps records in memory
PACKAGES = ("streamer", "transports", "usubscription", "asyncio")
# asyncio keeps cancelled timers in its heap, some hundred of them, until they are most of it: that is no growth
NOT_COUNTED = (asyncio.Handle, asyncio.TimerHandle)
# the endpoint of the last round may still be referred to by a timer: some 60 objects; one object that each round keeps
# would be 250
OBJECTS_MAX = 150
TWO = {"vehicle": "", "cloud": "none"}

SETTLED_S = 0.25  # longer than any part takes to follow a change


def section(**keys: Any) -> EndpointSection:
    made = {
        "name": "dock",
        "transport": "local",
        "authorities": ["dock1"],
        "settings": {"network": "attached-dock"},
        "usubscription": "none",
    }
    return EndpointSection.model_validate(made | keys)


def rules() -> list[RuleSection]:
    ways = (("vehicle", "dock"), ("dock", "vehicle"), ("cloud", "dock"))
    return [RuleSection.model_validate({"from": one, "to": other}) for one, other in ways]


async def make(make_world: MakeWorld) -> World:
    world = await make_world(
        endpoints(TWO), {DOOR: ["//dock1/8001/1/0", "//cloud/8001/1/0"], CLOUD_ONLY: ["//cloud/8001/1/0"]}
    )
    world.networks["dock"] = FaultyNetwork.named("attached-dock")
    return world


async def attach(world: World, follow: Sequence[FollowSection] = (), **keys: Any) -> None:
    config = world.streamer.config
    dock = section(**keys)
    await world.reload(
        changed(config, endpoint=[*config.endpoint, dock], rule=[*config.rules, *rules()], follow=[*follow])
    )


async def detach(world: World, name: str = "dock") -> None:
    config = world.streamer.config
    left = [one for one in config.endpoint if one.name != name]
    ways = [rule for rule in config.rules if name not in (rule.from_, rule.to)]
    await world.reload(changed(config, endpoint=left, rule=ways, follow=[]))


async def add(world: World, **keys: Any) -> None:
    streamer = world.streamer
    await attach(world, **keys)
    await world.until(lambda: streamer.assembly.networks.is_connected(streamer.assembly.endpoints["dock"]))


async def test_an_endpoint_that_is_added_gets_messages_and_sends_them(make_world: MakeWorld) -> None:
    world = await make(make_world)
    await add(world)
    heard = await world.hear(await world.node("dock", "dock1"), uris.parse(DOOR))
    at_vehicle = await world.node("vehicle", "vehicle1", 0x9001)
    await at_vehicle.send(publication(DOOR, "open"))
    await world.until(lambda: heard.texts == ["open"])
    await world.until(lambda: world.parts.of(Readiness).look()["endpoints"]["dock"]["state"] == "ready")


async def test_records_for_a_removed_endpoint_wait_until_it_is_added_again(make_world: MakeWorld) -> None:
    world = await make(make_world)
    streamer = world.streamer
    await add(world)
    at_vehicle = await world.node("vehicle", "vehicle1", 0x9001)
    heard = await world.hear(await world.node("dock", "dock1"), uris.parse(DOOR))
    await at_vehicle.send(publication(DOOR, "1"))
    await world.until(lambda: heard.texts == ["1"])
    transport = streamer.assembly.endpoints["dock"].transport
    assert isinstance(transport, LocalTransport)
    transport.disconnect()
    at_cloud = await world.hear(await world.node("cloud", "cloud"), uris.parse(DOOR))
    await at_vehicle.send(publication(DOOR, "2"))
    await world.until(lambda: at_cloud.texts[-1:] == ["2"])
    await detach(world)
    assert "dock" not in streamer.assembly.endpoints
    assert "dock" not in streamer.parts.of(Readiness).look()["endpoints"]
    assert not [rule for rule in streamer.assembly.rules if "dock" in (rule.ingress, rule.egress)]
    assert [(one.endpoint, one.records) for one in streamer.assembly.claims.unclaimed] == [("dock", 1)]
    await add(world)
    await world.until(lambda: heard.texts == ["1", "2"])
    assert not streamer.assembly.claims.unclaimed


@pytest.mark.parametrize("is_wanted", [False, True])
async def test_what_comes_while_an_endpoint_is_removed_waits_only_if_it_wants_it(
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch, is_wanted: bool
) -> None:
    world = await make(make_world)
    streamer = world.streamer
    await add(world)
    heard = await world.hear(await world.node("dock", "dock1"), uris.parse(DOOR))
    at_vehicle = await world.node("vehicle", "vehicle1", 0x9001)
    at_cloud = await world.hear(await world.node("cloud", "cloud"), uris.ANY)
    await at_vehicle.send(publication(DOOR, "before"))
    await world.until(lambda: heard.texts == at_cloud.texts == ["before"])
    endpoints = world.parts.of(EndpointPart)
    stop_endpoint = endpoints.stop_endpoint

    async def stop_late(attached: Any) -> None:
        await stop_endpoint(attached)
        await at_vehicle.send(publication(DOOR if is_wanted else CLOUD_ONLY, "meanwhile"))
        await world.until(lambda: at_cloud.texts == ["before", "meanwhile"])

    monkeypatch.setattr(endpoints, "stop_endpoint", stop_late)
    await detach(world)
    assert [one.records for one in streamer.assembly.claims.unclaimed] == ([1] if is_wanted else [])


async def test_what_does_not_fit_is_refused_and_changes_nothing(make_world: MakeWorld) -> None:
    world = await make(make_world)
    streamer = world.streamer
    for name, authority, what in (("cloud", "dock1", "cloud"), ("dock", "cloud", "authority 'cloud' belongs")):
        with pytest.raises(ValidationError, match=what):
            await attach(world, name=name, authorities=[authority])
    with pytest.raises(UStatusError, match="endpoint of our own authority"):
        await detach(world, "vehicle")
    assert [one.name for one in streamer.assembly.endpoints] == ["vehicle", "cloud"] == list(streamer.assembly.attached)


def counts(world: World) -> dict[str, int]:
    """Whatever may grow: tasks, callbacks and tables of the parts, metric samples, objects."""
    streamer = world.streamer
    parts: tuple[Any, ...] = (
        streamer,
        streamer.assembly.claims,
        streamer.assembly.endpoints,
        streamer.assembly.express,
        streamer.assembly.dispatch.flows[streamer.assembly.logs.durable],
        streamer.assembly.follows,
        streamer.assembly.handovers,
        streamer.assembly.hosted,
        streamer.assembly.interest,
        streamer.assembly.ledger,
        streamer.assembly.logs.durable,
        streamer.assembly.logs.volatile,
        streamer.assembly.networks,
        streamer.assembly.paused,
        streamer.parts.of(Readiness).states,
    )
    sizes = {
        f"{type(part).__name__}{name}": len(value)
        for part in parts
        for name, value in vars(part).items()
        if isinstance(value, dict | list | set | tuple) and name not in ("_owners", "_journal", "_rising", "_snapshot")
    }
    gc.collect()
    return {
        **sizes,
        "tasks": len(asyncio.all_tasks()),
        # without one that is there once an endpoint has forwarded something since it was made
        "samples": sum(name != "last_forwarded_seconds" for name, *_ in streamer.parts.samples()),
        "members of the network": len(world.networks["dock"].members),
        "objects": sum(
            str(type(one).__module__).startswith(PACKAGES) and type(one) not in NOT_COUNTED for one in gc.get_objects()
        ),
    }


async def settled_counts(world: World) -> dict[str, int]:
    """Returns the counts when they have not changed for a moment: what a change has begun ends by itself."""
    last, now = dict[str, int](), counts(world)
    while last != now:
        await asyncio.sleep(SETTLED_S)
        last, now = now | {"objects": 0}, counts(world) | {"objects": 0}
    return counts(world)


@pytest.mark.full
async def test_an_endpoint_that_comes_and_goes_leaves_nothing_behind(
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under load: a publisher sends all the time, also to the endpoint that comes and goes."""
    monkeypatch.setattr("streamer.parts.reloading.OPEN_WAIT_S", 0.05)  # its uSubscription never answers
    world = await make(make_world)
    streamer = world.streamer
    at_vehicle = await world.node("vehicle", "vehicle1", 0x9001)
    heard = await world.hear(await world.node("cloud", "cloud"), uris.parse(DOOR))
    follow = FollowSection.model_validate({"endpoint": "dock", "service": "//dock1/4/1/0"})
    before: dict[str, int] = {}
    for number in range(TIMES):
        await attach(world, [follow], usubscription="remote")
        await at_vehicle.send(publication(DOOR, str(number)))
        if number % 4:
            await world.until(lambda: streamer.assembly.networks.is_connected(streamer.assembly.endpoints["dock"]))
        await detach(world)
        if number in (WARM_UP, TIMES - 1):
            await world.until(lambda: heard.texts[-1:] == [str(number)])  # noqa: B023 - awaited here
            heard.messages.clear()
        if number == WARM_UP:
            before = await settled_counts(world)
    after = await settled_counts(world)
    objects = after.pop("objects") - before.pop("objects")
    assert after == before
    assert objects <= OBJECTS_MAX, f"{objects} more objects after {TIMES - WARM_UP} rounds"
