"""The campaigns: a table of worlds and their faults, and the function that runs one.

build -> send -> fault, fault, ... until the time is up -> heal -> drain -> judge
"""

from __future__ import annotations

import asyncio
import random
import time
from pathlib import Path
from typing import Final

from campaigns.chaos import damage, edge, machine
from campaigns.chaos.ending import finish
from campaigns.chaos.faults import FAULTS, heal
from campaigns.chaos.ledger import Verdict
from campaigns.chaos.plan import Plan
from campaigns.chaos.processes import MOSQUITTO, ChaosError
from campaigns.chaos.world import World

PAUSE_S_MAX: Final = 0.8  # between two faults
EPOCHS_BEGIN_S: Final = 30.0  # until the first epoch is read, before any fault


def no_mosquitto() -> str:
    return "" if MOSQUITTO is not None else "there is no mosquitto (apt-get install mosquitto)"


_KILLS: Final = {"kill_gateway": 4, "kill_gateway_early": 3, "stop_gateway": 1, "pause_gateway": 1}
# ten cuts per kill
_FOLLOWING: Final = {
    "net_burst": 8,
    "net_cut": 1,
    "kill_gateway": 3,
    "kill_gateway_early": 1,
    "kill_all": 1,
    "stop_gateway": 1,
    "pause_gateway": 1,
}
_BROKER: Final = (no_mosquitto,)

PLANS: Final[dict[str, Plan]] = {
    # A static file has the interest; no more is recorded.
    "kill-static": Plan(_KILLS, needs=_BROKER),
    # The README's own file: all records of the vehicle, and an embedded uSubscription.
    "kill-record": Plan(
        _KILLS | {"kill_reader": 2, "kill_all": 1}, interest="embedded", record=True, reader=True, needs=_BROKER
    ),
    "kill-embedded": Plan(_KILLS | {"kill_reader": 2}, interest="embedded", reader=True, needs=_BROKER),
    # The cloud has a uSubscription of its own, which the gateway calls and mirrors.
    "kill-remote": Plan(
        _KILLS | {"kill_service": 4, "stop_service": 2, "kill_all": 2}, interest="remote", needs=_BROKER, share=1.2
    ),
    "kill-remote-record": Plan(
        _KILLS | {"kill_service": 4, "kill_all": 2}, interest="remote", record=True, needs=_BROKER
    ),
    "zenoh": Plan(
        _KILLS | {"kill_reader": 2, "kill_all": 1},
        vehicle="zenoh",
        interest="embedded",
        record=True,
        reader=True,
        needs=_BROKER,
    ),
    # As in examples/vehicle-cloud: a gateway in the vehicle, one in the cloud, each with its uSubscription, and a
    # broker between them.
    "two-gateways": Plan(_KILLS | {"kill_all": 2}, interest="embedded", two=True, record=True, needs=_BROKER),
    # The cloud's gateway follows the vehicle's, or a gateway follows a publisher; the link between them is cut.
    "following-mqtt": Plan(
        _FOLLOWING | {"net_stall": 1, "net_half_close": 1},
        interest="embedded",
        two=True,
        follows="up",
        record=True,
        needs=_BROKER,
    ),
    "following-zenoh": Plan(
        _FOLLOWING | {"net_stall": 1, "net_half_close": 1},
        interest="embedded",
        two=True,
        road="zenoh",
        follows="both",
        record=True,
        needs=_BROKER,
    ),
    "following-dds": Plan(
        _FOLLOWING,
        interest="embedded",
        two=True,
        road="dds",
        follows="both",
        record=True,
        needs=(*_BROKER, machine.no_namespace),
    ),
    "following-publisher": Plan(
        _FOLLOWING
        | {"net_stall": 1, "net_half_close": 1, "kill_publisher": 3, "stop_publisher": 1, "pause_publisher": 1},
        vehicle="zenoh",
        interest="embedded",
        follows="publisher",
        record=True,
        needs=_BROKER,
    ),
    # Nothing is recorded: the followed topics change with each subscription, while messages are published.
    "following-wanted": Plan(
        _FOLLOWING | {"kill_publisher": 3, "stop_publisher": 1, "pause_publisher": 1},
        vehicle="zenoh",
        interest="embedded",
        follows="publisher",
        needs=_BROKER,
    ),
    # A reader behind the follower gets all of an epoch, or none.
    "epochs": Plan(
        _FOLLOWING | {"net_stall": 1, "net_half_close": 1, "kill_reader": 4},
        interest="embedded",
        two=True,
        follows="up",
        record=True,
        reader=True,
        epochs=True,
        needs=_BROKER,
    ),
    "brokers": Plan(
        {"broker_stop": 3, "broker_kill": 3, "broker_pause": 2, "kill_gateway": 2}, interest="embedded", needs=_BROKER
    ),
    # Wrong access rules: messages that a broker refuses wait, and others are sent.
    "refused": Plan(
        {"broker_refuse": 6, "kill_gateway": 1, "net_cut": 1},
        interest="embedded",
        record=True,
        reader=True,
        proxies=True,
        access=True,
        needs=_BROKER,
        share=0.8,
    ),
    "refused-two": Plan(
        {"broker_refuse": 6, "kill_gateway": 1, "net_cut": 1},
        interest="embedded",
        two=True,
        record=True,
        proxies=True,
        access=True,
        needs=_BROKER,
        share=0.8,
    ),
    "network": Plan(
        {"net_cut": 3, "net_stall": 3, "net_half_close": 3, "kill_gateway": 2}, proxies=True, needs=_BROKER
    ),
    "disk-full": Plan(
        {"disk_full": 4, "disk_reader": 2, "disk_read_only": 2, "kill_gateway": 1},
        interest="embedded",
        record=True,
        disk_bytes=64 << 20,  # twice the records of a minute: in the log, and in its write-ahead log
        needs=(*_BROKER, machine.no_tmpfs),
    ),
    "disk-error": Plan(
        {"io_error": 4, "io_die": 4}, interest="embedded", record=True, io=True, needs=(*_BROKER, machine.no_preload)
    ),
    "clock": Plan(
        {"clock_leap": 5, "kill_gateway": 1}, interest="static", clock=True, needs=(*_BROKER, machine.no_faketime)
    ),
}


NAMES: Final = (*PLANS, *damage.KINDS, edge.NAME)


def is_apart(name: str) -> bool:
    """True if it needs a network namespace of its own."""
    return name in PLANS and PLANS[name].road == "dds"


def share(name: str) -> float:
    """Its share of the time."""
    return PLANS[name].share if name in PLANS else 1.0


def why_not(name: str) -> str:
    """The reason why this machine cannot run it; empty if it can."""
    return "; ".join(filter(None, (need() for need in PLANS[name].needs))) if name in PLANS else ""


def run(name: str, seed: int, seconds: float, folder: Path) -> Verdict:
    """Run one campaign. Does not raise for failures of the world: they are in the verdict."""
    if name in damage.KINDS:
        return asyncio.run(damage.campaign(name, seed, seconds, folder))
    if name == edge.NAME:
        return edge.campaign(seed, seconds, folder)
    world = World(name, PLANS[name], folder, random.Random(f"{seed}/{name}"))
    began = time.monotonic()

    def phase(name: str) -> None:
        nonlocal began
        world.verdict.phases[name] = round(time.monotonic() - began, 1)
        began = time.monotonic()

    try:
        world.build()
        phase("build")
        world.talk()
        world.await_epochs(EPOCHS_BEGIN_S)
        _hurt(world, time.monotonic() + seconds)
        heal(world)
        phase("faults")
        return finish(world)
    except ChaosError as error:
        world.verdict.problems.append(str(error))
        world.ledger.judge(world.verdict)
        return world.verdict
    finally:
        phase("judge")
        world.close()


def _hurt(world: World, deadline: float) -> None:
    names, weights = zip(*world.plan.faults.items(), strict=True)
    while time.monotonic() < deadline:
        time.sleep(world.rng.uniform(0, PAUSE_S_MAX))
        world.note_ends()
        world.gateway = world.rng.choice(world.gateways)
        fault = world.rng.choices(names, weights)[0]
        world.log(f"{fault} {world.gateway.name}")
        FAULTS[fault](world)
        world.log("over")
        for gateway in world.gateways:
            gateway.metrics()  # gaps reported so far, before the next kill resets the counters
