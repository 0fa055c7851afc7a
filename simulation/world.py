"""One seed, one world: gateways, those who live on their networks, and what befalls them.

      A, P  vehicle ---+              +--- cloud   L, Foreign (kind "foreign")
                       V (gateway) ---+      |
   M, P, S  mcu -------+                     C (gateway, kind "chain") --- hub   H, P
             '--- a uSubscription service without a gateway, for S

plan (drawn from the seed): weather, partitions, kills, restarts, other configurations, clocks, disks, wishes
    -> everything heals -> what is owed must have come, or been told -> everything stops -> nothing may be left
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import hashlib
import json
import logging
import random
import shutil
import sqlite3
import sys
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, Final

import structlog

from history import streams
from simulation.apps import Foreign, Hearer, HistoryReader, Publisher, Subscriber, node
from simulation.checker import Checker, Hop, Key
from simulation.disk import SimulatedDisk
from simulation.loop import EPOCH_S, PROCESS, DeadlockError, Process, SimulatedWorker, VirtualLoop
from simulation.machine import GatewayProcess, Machine, named
from simulation.network import SimulatedNetwork
from simulation.plan import Plan
from storage.runtime import Runtime, Used
from transports import plugin as plugins
from transports.local import LocalTransport
from uprotocol import uri as uris
from uprotocol import uuid as uuids
from uprotocol.v1.umessage_pb2 import UMessage
from uprotocol.v1.uri_pb2 import UUri
from uprotocol.v1.uuid_pb2 import UUID
from usubscription.service import USubscriptionService
from usubscription_client import Status

FAR_ANSWER_S: Final = 0.1  # of the cloud's network, in every other world: pumps have several batches under way there
OUTSIDE: Final = frozenset({"cloud", "hub"})  # the networks off the vehicle
SUFFIX, SUFFIX_SHARE = "x1", 0.3
KINDS: Final = ("static", "static", "chain", "foreign")
HEAL_S_MAX: Final = 150.0  # back-offs end, services are asked again: then gateways must be ready
SETTLE_S_MAX: Final = 460.0  # remote commands are repeated after a minute, audits come every five
QUIET_S: Final = 3.0  # after all is there, for what should not come any more
FORGET_AFTER_S: Final = 0.5  # a topic without records
STEPS_MAX: Final = 3_000_000
SHM: Final = Path("/dev/shm")

AUTHORITIES: Final = {"vehicle": "vin1", "mcu": "mcu1", "cloud": "hub", "hub": "hub"}
STATIC: Final = {  # topic -> where somebody hears it by the static file
    "//vin1/8001/1/8001": ("cloud", "mcu"),
    "//vin1/8001/1/8002": ("cloud",),
    "//mcu1/8002/1/8001": ("cloud", "vehicle"),
}
HEARERS: Final = {"vehicle": "A", "mcu": "M", "cloud": "L", "hub": "H"}
WISHED_VIN: Final = ("//vin1/8001/1/8003", "//vin1/8001/1/8004")
WISHED_HUB: Final = ("//hub/8003/1/8001", "//hub/8003/1/8002")
LONE: Final = ("//mcu1/8002/1/8009", "//mcu1/8002/1/800A")  # nobody publishes these: only who subscribed to them counts
SINK: Final = "//hub/9001/1/0"

plugins.names = functools.cache(plugins.names)  # type: ignore[assignment]  # else each start of a gateway reads all of site-packages


def _wall_ns() -> int:
    world = World.current
    return world.wall_ms() * 1_000_000 if world is not None else 0


class World:
    current: World | None = None

    def __init__(
        self, seed: int, *, verbose: bool = False, out: Any = None, without: frozenset[str] = frozenset()
    ) -> None:
        """`without` names what must not befall this world (see plan.py), to look behind a fault that is known."""
        self.seed, self._verbose, self._out, self.without = seed, verbose, out or sys.stdout, without
        self.loop = VirtualLoop(seed)
        self.dice = random.Random(seed)
        self.checker = Checker(self)
        self.context = contextvars.copy_context()
        self.offset_ms = 0
        self.ids = uuids.UUIDGenerator(self.wall_ms, random.Random(seed ^ 0x5EED).randbytes)
        self.networks: dict[str, SimulatedNetwork] = {}
        self.machines: dict[str, Machine] = {}
        self.given_up = False
        self.publishers: list[Publisher] = []
        # by hearer, with the topics and the machine of its service
        self.subscribers: dict[str, tuple[Subscriber, list[UUri], str]] = {}
        self.foreign: Foreign | None = None
        self.lone: USubscriptionService | None = None
        self.reader: HistoryReader | None = None
        self.notes = 0
        self._digest = hashlib.blake2b(digest_size=16)
        self.folder = Path(tempfile.mkdtemp(prefix="simulation-", dir=SHM if SHM.is_dir() else None))
        self.kind = self.dice.choice(KINDS)
        self.tasks: list[asyncio.Task[Any]] = []
        # no draw of the others' dice
        has_suffix = random.Random(seed ^ 0x5FF1).random() < SUFFIX_SHARE and "suffix" not in without
        self.suffix = SUFFIX if has_suffix else ""  # behind the vehicle's names, out there

    # -- time, notes

    def wall_ms(self) -> int:
        return int((EPOCH_S + self.loop.now) * 1000) + self.offset_ms

    def note(self, *what: Any) -> None:
        self.notes += 1
        text = f"{self.loop.now:12.6f} {' '.join(map(str, what))}".replace(str(self.folder), "")
        self._digest.update(text.encode())
        if self._verbose:
            print(text, file=self._out)

    @property
    def digest(self) -> str:
        return self._digest.hexdigest()

    # -- names, which the checker knows as they are inside the vehicle

    def named(self, network: str, uri: UUri) -> UUri:
        """As who is on that network writes it."""
        if not self.suffix or network not in OUTSIDE or uri.authority_name not in ("vin1", "mcu1"):
            return uri
        return uris.uri(f"{uri.authority_name}.{self.suffix}", uri.ue_id, uri.ue_version_major, uri.resource_id)

    def inside(self, uri: UUri) -> UUri:
        if not self.suffix or uri.authority_name not in (f"vin1.{self.suffix}", f"mcu1.{self.suffix}"):
            return uri
        return uris.uri(uri.authority_name.partition(".")[0], uri.ue_id, uri.ue_version_major, uri.resource_id)

    # -- the geography, for the checker

    def hops(self, hearer: str, topic: Key) -> tuple[Hop, ...]:
        if hearer == "S":
            return ()
        origin = {"vin1": "vehicle", "mcu1": "mcu", "hub": "hub" if self.kind == "chain" else "cloud"}[topic[0]]
        target = next(network for network, name in HEARERS.items() if name == hearer)
        if target == "hub":
            return (("V", origin, "cloud"), ("C", "cloud", "hub"))
        if origin == "hub":
            return (("C", "hub", "cloud"), ("V", "cloud", target))
        return (("V", origin, target),)

    def passes(self, machine: Machine) -> set[tuple[str, str]]:
        roles = {one["name"]: one["settings"]["network"].split("/")[1] for one in machine.config["endpoint"]}
        if "rule" in machine.config:
            return {(roles[rule["from"]], roles[rule["to"]]) for rule in machine.config["rule"]}
        return {(a, b) for a in roles.values() for b in roles.values() if a != b}

    def recorded(self, machine: Machine) -> list[UUri]:
        return [uris.parse(text) for text in machine.config.get("history", {}).get("record", [])]

    def disk_troubled(self, name: str) -> bool:
        machine = self.machines[name]
        return bool(machine.disk_faults) or machine.torn or machine.had_disk_faults

    # -- making it

    async def build(self) -> None:
        for name in ("vehicle", "mcu", "cloud", "hub") if self.kind == "chain" else ("vehicle", "mcu", "cloud"):
            self.networks[name] = SimulatedNetwork(f"{self.seed}/{name}", self.dice.getrandbits(32), self._on_the_way)
        self.networks["cloud"].answer_s = FAR_ANSWER_S * (self.seed % 2)
        self.machines["V"] = Machine(self, "V", self.folder / "V", self.vehicle_config())
        if self.kind == "chain":
            self.machines["C"] = Machine(self, "C", self.folder / "C", self.hub_config())
        static: dict[str, list[str]] = {}
        for topic, places in STATIC.items():
            static[topic] = [f"//{AUTHORITIES[place]}/9001/1/0" for place in places]
        (self.folder / "static.json").write_text(json.dumps(static))
        await self._populate()
        self.machines["V"].on_ready.append(lambda: self._static(confirmed=True))
        self._static(confirmed=False)

    def vehicle_config(self) -> dict[str, Any]:
        def endpoint(network: str, mode: str, name: str = "") -> dict[str, Any]:
            settings = {"network": f"{self.seed}/{network}", "session": f"V-{network}"}
            return {
                "name": name or network,
                "transport": "local",
                "authorities": [AUTHORITIES[network]],
                "usubscription": mode,
                "settings": settings,
            }

        remote = "none" if self.kind == "static" else "remote"
        return {
            "streamer": {"authority": "vin1", "data_dir": str(self.folder / "V")},
            "endpoint": [
                endpoint("vehicle", "embedded"),
                endpoint("mcu", "none"),
                endpoint("cloud", remote) | {"suffix": self.suffix},
            ],
            "history": {},
            "usubscription": {"static_file": str(self.folder / "static.json")},
            "egress": {"retry_min_ms": 5, "retry_max_ms": 400},
        }

    def hub_config(self) -> dict[str, Any]:
        def endpoint(name: str, authorities: list[str], mode: str) -> dict[str, Any]:
            settings = {"network": f"{self.seed}/{name}", "session": f"C-{name}"}
            return {
                "name": name,
                "transport": "local",
                "authorities": authorities,
                "usubscription": mode,
                "settings": settings,
            }

        vehicles = [self.named("cloud", uris.uri(name)).authority_name for name in ("vin1", "mcu1")]
        return {
            "streamer": {"authority": "hub", "data_dir": str(self.folder / "C")},
            "endpoint": [endpoint("hub", ["hub"], "embedded"), endpoint("cloud", vehicles, "none")],
            "history": {},
            "egress": {"retry_min_ms": 5, "retry_max_ms": 400},
        }

    async def _populate(self) -> None:
        ttl_share = self.dice.choice((0.0, 0.0, 0.1))
        sinks = [uris.parse(SINK)]
        vehicle = await node(self, "vehicle", "vin1", 0x8001)
        vin_topics = ["//vin1/8001/1/8001", "//vin1/8001/1/8002", *WISHED_VIN]
        self.publishers.append(
            Publisher(self, vehicle, "vin", [uris.parse(one) for one in vin_topics], sinks, ttl_share)
        )
        mcu = await node(self, "mcu", "mcu1", 0x8002)
        self.publishers.append(Publisher(self, mcu, "mcu", [uris.parse("//mcu1/8002/1/8001")], sinks, ttl_share))
        if self.kind != "static":
            hub = await node(self, "hub" if self.kind == "chain" else "cloud", "hub", 0x8003)
            self.publishers.append(Publisher(self, hub, "hub", [uris.parse(one) for one in WISHED_HUB], [], ttl_share))
        for network in self.networks:
            await self._hearer(network)
        self.checker.sinks[uris.key(uris.parse(SINK))] = "L"
        await self._subscribe()
        await self._lone_service()

    async def _hearer(self, network: str) -> None:
        transport = await node(self, network, AUTHORITIES[network], 0x9001)
        hearer = Hearer(self, HEARERS[network])
        topics = [topic for topic, places in STATIC.items() if network in places]
        if network in ("cloud", "hub"):
            topics += [] if network == "cloud" and self.kind == "chain" else WISHED_VIN
        if network == "vehicle" and self.kind != "static":
            topics += WISHED_HUB
        for topic in topics:
            await transport.register_listener(self.named(network, uris.parse(topic)), hearer)
        if network == "cloud":
            await transport.register_listener(uris.ANY, hearer, uris.parse(SINK))

    async def _subscribe(self) -> None:
        """Who makes wishes, with which service."""
        version = self.dice.choice((3, 4))
        if self.kind == "static":
            await self._subscriber("L", "cloud", "vin1", version, WISHED_VIN, "V")
        elif self.kind == "chain":
            await self._subscriber("H", "hub", "hub", version, WISHED_VIN, "C")
            await self._subscriber("A", "vehicle", "vin1", self.dice.choice((3, 4)), WISHED_HUB, "V")
        else:
            transport = await node(self, "cloud", "hub", 0, 3)
            self.foreign = Foreign(self, transport, "hub")
            await self.foreign.open()
            await self._subscriber("A", "vehicle", "vin1", 3, WISHED_HUB, "V")
            for topic in WISHED_VIN:
                if self.dice.random() < 0.7:
                    await self.foreign.set(uris.parse(topic), uris.parse(SINK), True)
                    self.tasks.append(self.loop.create_task(self.foreign_is_sure(uris.parse(topic))))

    async def _lone_service(self) -> None:
        """One that listens to the network itself, as `python -m usubscription` does, and is never killed."""
        transport = await node(self, "mcu", "mcu1", 0)
        (self.folder / "lone").mkdir()
        runtime = Runtime(
            disk=SimulatedDisk(random.Random(self.seed), lambda what: None),
            worker=SimulatedWorker,  # type: ignore[arg-type]
            monotonic=self.loop.time,
            busy_s=lambda: 0.0,
            used=lambda: Used(0.0, 0.0, 0.0),
            rng=random.Random(self.seed),
        )
        self.lone = USubscriptionService(transport, "mcu1", self.folder / "lone" / "usubscription.db", runtime=runtime)
        await self.lone.start()
        await self._subscriber("S", "mcu", "mcu1", self.dice.choice((3, 4)), LONE, "")

    async def _subscriber(
        self, hearer: str, network: str, authority: str, version: int, topics: tuple[str, ...], machine: str
    ) -> None:
        transport = await node(self, network, AUTHORITIES[network], 0x9101)
        service = self.named(network, uris.uri(authority)).authority_name
        subscriber = Subscriber(self, transport, hearer, service, version, network)
        await subscriber.open()
        self.subscribers[hearer] = (subscriber, [uris.parse(topic) for topic in topics], machine)

    async def add_reader(self, topics: list[UUri]) -> None:
        transport = await node(self, "vehicle", "vin1", 0x9200)
        self.checker.reader_topics = topics
        self.reader = HistoryReader(self, transport, uris.parse("//vin1/4/1/0"), topics, self.folder / "reader.json")
        self.tasks.append(self.loop.create_task(self.reader.run()))

    # -- when something is sure

    def _static(self, *, confirmed: bool) -> None:
        for topic, places in STATIC.items():
            for place in places:
                key = uris.key(uris.parse(topic))
                self.checker.want(HEARERS[place], key, self.hops(HEARERS[place], key), confirmed=confirmed)

    async def foreign_is_sure(self, topic: UUri) -> None:
        """A service that can't list has been understood: from here on nothing that it was told of may be missed."""
        key = uris.key(topic)
        want = self.checker.want("L", key, self.hops("L", key), confirmed=False)
        while want.wanted and not self.given_up:
            streamer = self.machines["V"].streamer
            if (
                self.machines["V"].ready
                and streamer is not None
                and streamer.interest.healthy
                and not streamer.interest.can_list
            ):
                self.checker.want("L", key, self.hops("L", key), confirmed=True)
                return
            await asyncio.sleep(0.2)

    def _on_the_way(self, what: str, message: UMessage, member: LocalTransport) -> None:
        self.note("on the way", what, message.payload[:20] if message.attributes.source.ue_id >= 0x8000 else "")
        if what == "lost":
            self.checker.lost(uuids.to_bytes(message.attributes.id))

    # -- running it

    def run(self) -> None:
        """The whole life. Violations are in the checker."""
        asyncio.set_event_loop(self.loop)
        World.current = self
        try:
            with uuids.simulated(_wall_ns, self._new_id), _captured(self), _forgetful():
                try:
                    self.loop.run_until_complete(self._live())
                except DeadlockError as error:
                    self.checker.fail("a task that never ends", str(error))
                for machine in self.machines.values():
                    for process in machine.processes:
                        process.disk.power_lost()
        finally:
            processes: list[Process] = [process for machine in self.machines.values() for process in machine.processes]
            with _captured(self):
                self.loop.finish(processes)
            World.current = None
            asyncio.set_event_loop(None)
            shutil.rmtree(self.folder, ignore_errors=True)

    def _new_id(self) -> UUID:
        process = PROCESS.get()
        return process.ids() if isinstance(process, GatewayProcess) else self.ids()

    async def _live(self) -> None:
        await self.build()
        plan = Plan(self)
        await plan.run()
        await self._end(plan)

    async def until(self, condition: Callable[[], bool], seconds: float, step_s: float = 0.25) -> bool:
        end = self.loop.now + seconds
        while not condition():
            if self.loop.now >= end or self.checker.violations:
                return False
            await asyncio.sleep(step_s)
        return True

    async def _end(self, plan: Plan) -> None:
        checker = self.checker
        await plan.heal()
        if not await self.until(self._all_ready, HEAL_S_MAX) and not checker.violations:
            for machine in self.machines.values():
                problems = problems_of(machine)
                if problems:
                    checker.fail("not ready", f"{machine.name} is not ready again: {problems}")
        if not await self.until(lambda: all(task.done() for task in plan.tasks), HEAL_S_MAX) and not checker.violations:
            left = [named(task) for task in plan.tasks if not task.done()]
            checker.fail("a task that never ends", f"somebody outside waits for ever: {left[:3]}")
        await self._check_subscriptions()
        self._look_at_unclaimed(plan)
        for publisher in self.publishers:
            for topic in publisher._topics:
                await publisher.publish(topic)
        await self.until(lambda: checker.outstanding == 0, SETTLE_S_MAX)
        await asyncio.sleep(QUIET_S)
        self.given_up = True
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        for machine in self.machines.values():
            await machine.stop()
        assert self.lone is not None
        await self.lone.stop()
        await asyncio.sleep(2.0)
        checker.forgive(self._dead_letters())
        checker.finish()

    def _look_at_unclaimed(self, plan: Plan) -> None:
        for machine in self.machines.values():
            if machine.streamer is not None:
                newest = plan.newest_at_heal.get(machine.name, 0)
                for waits in machine.streamer.claims.unclaimed:
                    self.checker.unclaimed.append((machine.name, min(waits.cursors.values()), newest))

    def _all_ready(self) -> bool:
        return all(machine.ready and not problems_of(machine) for machine in self.machines.values())

    def _dead_letters(self) -> list[tuple[bytes, str]]:
        found = []
        for machine in self.machines.values():
            with contextlib.suppress(sqlite3.Error):
                db = sqlite3.connect(machine.folder / "dead-letters.db")
                for endpoint, message in db.execute("SELECT endpoint, message FROM letter"):
                    found.append((uuids.to_bytes(UMessage.FromString(message).attributes.id), endpoint))
                db.close()
        return found

    # -- the subscriptions in the end

    async def _check_subscriptions(self) -> None:
        wrong: list[tuple[str, str]] = []
        end = self.loop.now + SETTLE_S_MAX
        while not self.checker.violations:
            wrong = await self._wrong_subscriptions()
            if not wrong or self.loop.now >= end:
                break
            if self.loop.now > end - SETTLE_S_MAX + 90 and any(kind != "never settles" for kind, _ in wrong):
                break  # what is lost does not come back by waiting
            await asyncio.sleep(1.0)
        for kind, text in wrong:
            self.checker.fail(kind, text)

    async def _wrong_subscriptions(self) -> list[tuple[str, str]]:
        wrong = []
        for hearer, (subscriber, topics, name) in self.subscribers.items():
            streamer = self.machines[name].streamer if name else None
            service = streamer.usubscription if streamer is not None else self.lone if not name else None
            if service is None:
                return [("not ready", f"{name} does not run")]
            rows, authority = await service.subscriptions(), service.authority
            states = {row.topic: Status(row.status) for row in rows if row.subscriber == uris.key(subscriber.uri)}
            for topic in topics:
                want = self.checker.wants.get((hearer, uris.key(topic)))
                state = states.get(uris.key(self.named("hub", topic) if name == "C" else topic))
                wanted = want is not None and want.wanted and not want.refused
                if wanted and state is None:
                    wrong.append(
                        (
                            "a subscription that nobody ended",
                            f"{hearer} wants {uris.format(topic)}, and the service of {authority} does not know it",
                        )
                    )
                elif not wanted and state is not None:
                    wrong.append(
                        (
                            "a subscription that nobody made",
                            f"the service of {authority} has {state!s} for {hearer} of {uris.format(topic)}",
                        )
                    )
                elif wanted and state is not Status.SUBSCRIBED:
                    wrong.append(
                        (
                            "never settles",
                            f"{hearer} wants {uris.format(topic)}, and it is still {state!s} at {authority}",
                        )
                    )
                elif wanted and want is not None and want.confirmed_at is None:
                    want.confirmed_at = self.loop.now
                if self.foreign is not None and name and not wrong:
                    known = any(key[1] == 0 for key in self.foreign.subscribers.get(uris.key(topic), {}))
                    if known != wanted:
                        wrong.append(
                            (
                                "never settles",
                                f"the service of the other side has {known} for {uris.format(topic)}, not {wanted}",
                            )
                        )
        return wrong


def problems_of(machine: Machine) -> list[str]:
    """What keeps it from being ready, but for what only a person can end: the cursor of a name that it had for a
    while."""
    if machine.streamer is None:
        return ["it does not run"]
    return [
        problem
        for problem in machine.streamer.problems()
        if "is not configured" not in problem and "acknowledge" not in problem
    ]


@contextlib.contextmanager
def _forgetful() -> Iterator[None]:
    """Topics whose records are gone are forgotten soon: a world is over in minutes."""
    before, streams.FORGET_AFTER_S = streams.FORGET_AFTER_S, FORGET_AFTER_S
    try:
        yield
    finally:
        streams.FORGET_AFTER_S = before


@contextlib.contextmanager
def _captured(world: World) -> Any:
    """What gateways log is material for the checker."""

    def capture(_: Any, method: str, event: dict[str, Any]) -> Any:
        process = PROCESS.get()
        if event.get("exc_info"):
            error = sys.exc_info()[1]
            event["exception"] = repr(error)
        if isinstance(process, GatewayProcess) and process.alive:
            world.note(
                "log",
                process.machine.name,
                method,
                event.get("event"),
                *(f"{k}={v}" for k, v in event.items() if k not in ("event", "exc_info")),
            )
            world.checker.logged(process.machine.name, event)
        raise structlog.DropEvent

    before = structlog.get_config()
    structlog.configure(
        processors=[capture],
        wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING),
        cache_logger_on_first_use=False,
    )
    try:
        yield
    finally:
        structlog.configure(**before)


Step = Callable[[], Awaitable[None]]
