"""One seed, one world: gateways, applications on their networks, and faults.

      A, P  vehicle ---+              +--- cloud   L, Foreign (kind "foreign")
                       V (gateway) ---+      |
   M, P, S  mcu -------+                     C (gateway, kind "chain") --- hub   H, P
             '--- a uSubscription service without a gateway, for S

kind "epochs": one of the others, and V keeps the epochs of two groups, for readers by epoch (epochs.py)
kind "recovery": one of the others, and a publisher of the vehicle has a REST history, which V asks (recovery.py)

kind "follow": as "chain", but C follows V over the cloud, and V follows C in some    "keeper": V follows K on the
vehicle's network as well, a publisher that keeps its own history

plan (drawn from the seed): weather, partitions, kills, restarts, other configurations, clocks, disks, wishes
    -> everything heals -> owed messages must arrive or be reported -> everything stops -> nothing may be left
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
from collections.abc import Awaitable, Callable, Iterator, Sequence
from importlib.metadata import EntryPoint
from itertools import repeat
from pathlib import Path
from typing import Any, Final

import structlog

from campaigns.simulation.apps import (
    SUBSCRIBE,
    Flood,
    Foreign,
    Hearer,
    HistoryReader,
    Publisher,
    Subscriber,
    is_application,
    node,
)
from campaigns.simulation.checker import Checker, FollowedLog, Hop, Key
from campaigns.simulation.disk import SimulatedDisk
from campaigns.simulation.emptied import empty_one
from campaigns.simulation.epochs import (
    AHEAD_MS,
    FAST_SIGNALS,
    HUB_SIGNALS,
    LAPS,
    OLD_SHARE,
    SIGNALS,
    EpochReader,
    EpochsChecker,
    Laps,
    SkewedPublisher,
    sections,
    sections_of_hub,
)
from campaigns.simulation.following import NAMES, FollowingChecker, NamedPublisher, has_named
from campaigns.simulation.following import empty_one as empty_follower_or_followed
from campaigns.simulation.loop import EPOCH_S, PROCESS, DeadlockError, Process, VirtualLoop
from campaigns.simulation.machine import Keeper, Machine, MachineProcess, named, runtime_of
from campaigns.simulation.network import USUBSCRIPTION, SimulatedNetwork
from campaigns.simulation.plan import Plan
from campaigns.simulation.recovery import POINT, RestPublisher
from campaigns.simulation.recovery import sections as sections_of_recovery
from history.log import streams
from history.log.log import Log
from history.reading.following import FollowMode
from streamer.egress.rows import EndpointPositions
from transports import plugin as plugins
from transports.local import LocalTransport
from uprotocol import attributes as attrs
from uprotocol import uri as uris
from uprotocol import uuid as uuids
from uprotocol.core.usubscription.wire import CODECS
from uprotocol.encoded import decoded
from uprotocol.status import FINAL, code_name
from uprotocol.transport import UListener
from uprotocol.v1.umessage_pb2 import UMessage
from uprotocol.v1.uri_pb2 import UUri
from uprotocol.v1.uuid_pb2 import UUID
from usubscription.service import USubscriptionService
from usubscription_client import Status

FAR_ANSWER_S: Final = 0.1  # of the cloud's network, in every other world: pumps have several batches under way there
OUTSIDE: Final = frozenset({"cloud", "hub"})  # the networks outside the vehicle
SUFFIX, SUFFIX_SHARE = "x1", 0.3
KINDS: Final = ("static", "static", "chain", "foreign")
FOLLOW_KINDS: Final = ("follow", "keeper")
FOLLOW_SHARE: Final = 0.4
LATE_SHARE: Final = 0.5  # of worlds with a busy loop: one turn handles all timers that are due within ...
LATE_S_MAX: Final = (0.001, 0.005, 0.02)  # ... one of these
LOAD: Final = "load"  # the work of gateways takes time
LOAD_SHARE: Final = 0.25  # of worlds; for each message ...
MESSAGE_S: Final = (0.0002, 0.001, 0.003)  # ... one of these, once for the log and once for each network
FLOOD_SHARE: Final = 0.2  # of other worlds, in which the flood finds a gateway that has time; with LOAD: all
EPOCHS: Final = "epochs"  # may be in a world of any kind
EPOCHS_SHARE: Final = 0.2
RECOVERY: Final = "recovery"  # the same
RECOVERY_SHARE: Final = 0.25
RECOVERED_S: Final = 120.0  # no back-off of a source lasts that long
MODES: Final[tuple[FollowMode, ...]] = ("auto", "poll", "push")
HEAL_S_MAX: Final = 150.0  # back-offs end, services are asked again: then gateways must be ready
SETTLE_S_MAX: Final = 460.0  # remote commands are repeated after a minute, audits come every five
WATCH_S: Final = 0.2
UNFOLLOWED_MAX: Final = 4  # reports of quiet groups come all the time
PUSHED_S_MAX: Final = 2.0  # messages sent before a hand-over have arrived after it
EPOCHS_S: Final = 45.0  # open epochs are over, and every reader runs again
SEND_MS_MAX: Final = 2_000  # a transport that does not return for that long is opened again
# where work takes time: a flood takes the processor for 2 s, and answers wait meanwhile (by default it is a minute)
LOADED_SEND_MS_MAX: Final = 10_000
RESEND_STEPS: Final = 45  # some more than sending a few dead letters again takes
OVERLOAD_S: Final = 6.0  # overload counts for 5 s, and is measured each quarter of a second
BUSY_S_MIN: Final = 0.15  # less is no overload in any of these quarters
QUIET_S: Final = 3.0  # after all has arrived, to see whether more comes
FORGET_AFTER_S: Final = 0.5  # a topic without records
STEPS_MAX: Final = 3_000_000
REFUSED_FOR_GOOD: Final = frozenset(f"refused {code_name(code)}" for code in FINAL)  # codes that networks report
SHM: Final = Path("/dev/shm")

AUTHORITIES: Final = {"vehicle": "vin1", "mcu": "mcu1", "cloud": "hub", "hub": "hub"}
STATIC: Final = {  # topic -> hearers by the static file
    "//vin1/8001/1/8001": ("cloud", "mcu"),
    "//vin1/8001/1/8002": ("cloud",),
    "//mcu1/8002/1/8001": ("cloud", "vehicle"),
}
HEARERS: Final = {"vehicle": "A", "mcu": "M", "cloud": "L", "hub": "H"}
FLEET, FLOODER, FLOOD_TOPIC = "*.fleet", "v9.fleet", "//v9.fleet/8008/1/8001"  # its quota is that of a vehicle
QUOTA_PER_S: Final = 40
WISHED_VIN: Final = ("//vin1/8001/1/8003", "//vin1/8001/1/8004")
WISHED_HUB: Final = ("//hub/8003/1/8001", "//hub/8003/1/8002")
LONE: Final = ("//mcu1/8002/1/8009", "//mcu1/8002/1/800A")  # topics without publishers: only subscriptions matter
SINK: Final = "//hub/9001/1/0"
UNSERVED_TOPIC, STRANGER = "//vin1/8001/1/800E", "stranger"  # no endpoint has the authority that subscribes to it
KEPT_STATIC: Final = {"//vin1/8004/1/8001": ("hub", "mcu"), "//vin1/8004/1/8002": ("hub",)}
KEPT_WISHED: Final = ("//vin1/8004/1/8003",)
KEPT_YEARS_MS: Final = 10 * 365 * 86_400_000  # no retention by age: clocks jump, and that is no loss
EXCUSES: Final = frozenset({"C", "weather hub", "break hub", "disk C", "partition C hub", "hang C hub", "rename"})
"""Events after which a hearer behind the follower may get a message twice."""

_installed = functools.cache(plugins.names)  # else each start of a gateway reads all of site-packages


def _names(group: str = plugins.GROUP) -> dict[str, EntryPoint]:
    return _installed(group) | ({POINT.name: POINT} if group == POINT.group else {})


plugins.names = _names


def _wall_ns() -> int:
    world = World.current
    return world.wall_ms() * 1_000_000 if world is not None else 0


class World:
    current: World | None = None

    def __init__(
        self,
        seed: int,
        *,
        verbose: bool = False,
        out: Any = None,
        without: frozenset[str] = frozenset(),
        kinds: Sequence[str] = (),
    ) -> None:
        """`without`: names of faults to leave out (see plan.py), to look behind a known one. `kinds`: allowed kinds;
        empty: all."""
        self.seed, self._verbose, self._out, self.without = seed, verbose, out or sys.stdout, without
        self.loop = VirtualLoop(seed)
        self.dice = random.Random(seed)
        self.checker = Checker(self)
        self.context = contextvars.copy_context()
        self.offset_ms = 0
        self.newest_ms = 0  # the newest time that the clock showed before it was set back
        self.ids = uuids.UUIDGenerator(self.wall_ms, random.Random(seed ^ 0x5EED).randbytes)
        self.networks: dict[str, SimulatedNetwork] = {}
        self.machines: dict[str, Machine] = {}  # with gateways
        self.keeper: Keeper | None = None
        self.given_up = False
        self.publishers: list[Publisher] = []
        # by hearer, with the topics and the machine of its service
        self.subscribers: dict[str, tuple[Subscriber, list[UUri], str]] = {}
        # by network: the end, its listener, and its filter
        self.hearers: dict[str, tuple[LocalTransport, Hearer, list[UUri]]] = {}
        self.foreign: Foreign | None = None
        self.lone: USubscriptionService | None = None
        self.reader: HistoryReader | None = None
        self.notes = 0
        self._digest = hashlib.blake2b(digest_size=16)
        self.folder = Path(tempfile.mkdtemp(prefix="simulation-", dir=SHM if SHM.is_dir() else None))
        own = random.Random(seed ^ 0xF0110)  # a generator of its own, so that worlds of other kinds do not change
        kind, follow_kind = self.dice.choice(KINDS), own.choice(FOLLOW_KINDS)
        self.kind = follow_kind if own.random() < FOLLOW_SHARE else kind
        bases = [one for one in kinds if one not in (EPOCHS, RECOVERY, LOAD)]
        if bases and self.kind not in bases:
            self.kind = next((one for one in (kind, follow_kind) if one in bases), None) or own.choice(sorted(bases))
        self.epoch_dice = random.Random(seed ^ 0xE90C5)  # a generator of its own, so that other draws do not change
        by_chance = self.epoch_dice.random() < EPOCHS_SHARE and EPOCHS not in without
        self.epochs = EpochsChecker(self) if by_chance or EPOCHS in kinds else None
        self.recovery_dice = random.Random(seed ^ 0x4EC0)  # a generator of its own
        recovers = self.recovery_dice.random() < RECOVERY_SHARE and RECOVERY not in without
        self.recovers = recovers or RECOVERY in kinds
        self.rest: RestPublisher | None = None
        self.flood: Flood | None = None
        self.healed = False
        self.follows = self.kind in FOLLOW_KINDS
        self.has_hub = self.follows or self.kind == "chain"  # a gateway behind the cloud, and a network behind that
        self.tasks: list[asyncio.Task[Any]] = []
        # a generator of its own, so that other draws do not change
        has_suffix = random.Random(seed ^ 0x5FF1).random() < SUFFIX_SHARE and "suffix" not in without
        self.suffix = SUFFIX if has_suffix else ""  # appended to the vehicle's names outside
        own_pace = random.Random(seed ^ 0x10AD)  # a generator of its own
        if own_pace.random() < LATE_SHARE and "late" not in without:
            self.loop.late_s_max = own_pace.choice(LATE_S_MAX)
        self._draw_load(random.Random(seed ^ 0xC0575), of_kind=LOAD in kinds)  # a generator of its own
        self._keeper_was_followed = False
        self.handed_over_since: float | None = None  # publishes to the cloud, by a process of V that lives
        self.following = FollowingChecker(self) if has_named(self) else None
        if self.follows:
            self._draw_following()
        else:
            self.static, self.wished_vin = STATIC | ({FLOOD_TOPIC: ("cloud",)} if self.has_flood else {}), WISHED_VIN

    def _draw_load(self, dice: random.Random, *, of_kind: bool) -> None:
        """Where names are changed on the way, or histories followed, no vehicle of a fleet is beside the others."""
        is_loaded = (dice.random() < LOAD_SHARE or of_kind) and LOAD not in self.without
        self.message_s = dice.choice(MESSAGE_S) if is_loaded else 0.0
        self.send_ms_max = LOADED_SEND_MS_MAX if is_loaded else SEND_MS_MAX
        may_flood = not self.follows and not self.suffix and LOAD not in self.without
        self.has_flood = may_flood and (is_loaded or dice.random() < FLOOD_SHARE)

    def _draw_following(self) -> None:
        dice = self.dice
        self.mode: FollowMode = dice.choice(MODES)
        self.is_fleet, self.is_mutual = dice.random() < 0.3, dice.random() < 0.35
        of_fleet = (
            {"//mcu1/8002/1/8001"} if self.is_fleet and not self.suffix else set()
        )  # authorities that it may not use as source
        self.static = {
            topic: tuple("hub" if one == "cloud" else one for one in places if one != "cloud" or topic not in of_fleet)
            for topic, places in STATIC.items()
        }
        self.wished_vin = WISHED_VIN
        if self.kind == "keeper":
            self.static |= KEPT_STATIC
            self.wished_vin += KEPT_WISHED
        named = ["//vin1/8001/1/8001"], ["//vin1/8001/1/FFFF", "//vin1/8004/1/8002"]
        self.followed_topics: list[str] = dice.choice(([], [], *named))

    # -- time, notes

    def wall_ms(self) -> int:
        return int((EPOCH_S + self.loop.now) * 1000) + self.offset_ms

    def set_clock(self, change_ms: int) -> None:
        self.newest_ms = max(self.newest_ms, self.wall_ms())
        self.offset_ms += change_ms

    def note(self, *what: Any) -> None:
        self.notes += 1
        text = f"{self.loop.now:12.6f} {' '.join(map(str, what))}".replace(str(self.folder), "")
        self._digest.update(text.encode())
        if self._verbose:
            print(text, file=self._out)

    @property
    def digest(self) -> str:
        return self._digest.hexdigest()

    # -- names; the checker uses those inside the vehicle

    def named(self, network: str, uri: UUri) -> UUri:
        """The name as written on that network."""
        if not self.suffix or network not in OUTSIDE or uri.authority_name not in ("vin1", "mcu1"):
            return uri
        return uris.uri(f"{uri.authority_name}.{self.suffix}", uri.ue_id, uri.ue_version_major, uri.resource_id)

    def inside(self, uri: UUri) -> UUri:
        if not self.suffix or uri.authority_name not in (f"vin1.{self.suffix}", f"mcu1.{self.suffix}"):
            return uri
        return uris.uri(uri.authority_name.partition(".")[0], uri.ue_id, uri.ue_version_major, uri.resource_id)

    # -- which networks are connected, for the checker

    def hops(self, hearer: str, topic: Key) -> tuple[Hop, ...]:
        if hearer == "S":
            return ()
        hub = "hub" if self.has_hub else "cloud"
        origin = {"vin1": "vehicle", "mcu1": "mcu", FLOODER: "mcu", "hub": hub}[topic[0]]
        target = next(network for network, name in HEARERS.items() if name == hearer)
        if target == "hub":
            return (("V", origin, "cloud"), ("C", "cloud", "hub"))
        if origin == "hub":
            return (("C", "hub", "cloud"), ("V", "cloud", target))
        return (("V", origin, target),)

    def passes(self, machine: Machine) -> set[tuple[str, str]]:
        endpoints = machine.config.get("endpoint", ())
        roles = {one["name"]: one["settings"]["network"].split("/")[1] for one in endpoints}
        if "rule" in machine.config:
            return {(roles[rule["from"]], roles[rule["to"]]) for rule in machine.config["rule"]}
        return {(a, b) for a in roles.values() for b in roles.values() if a != b}

    def recorded(self, machine: Machine) -> list[UUri]:
        return [uris.parse(text) for text in machine.config.get("history", {}).get("record", [])]

    def disk_troubled(self, name: str) -> bool:
        machine = self.machines.get(name, self.keeper)
        assert machine is not None
        return bool(machine.disk_faults) or machine.torn or machine.had_disk_faults

    @property
    def all_machines(self) -> list[Machine]:
        return [*self.machines.values(), *([self.keeper] if self.keeper is not None else [])]

    def excuses(self, hearer: str, why: str) -> bool:
        """True if an event may give a hearer a message twice."""
        return not self.follows or hearer != "H" or why in EXCUSES

    def over_quota(self) -> int:
        """Messages that the processes of the vehicle's gateway have counted as dropped."""
        count = 0
        for process in self.machines["V"].processes:
            if process.streamer is not None:
                ledger = process.streamer.assembly.ledger
                count += ledger.others.dropped + sum(account.own[2] for account in ledger)
                refused = (endpoint.transport.refused or {} for endpoint in process.streamer.assembly.endpoints)
                count += sum(sum(one.values()) for one in refused)
        return count

    def is_busy(self, name: str) -> bool:
        """True if the thread of that gateway may have been overloaded in the last seconds."""
        process = self.machines[name].process
        processor = process.processor if process is not None else None
        return processor is not None and processor.busy_s(OVERLOAD_S) >= BUSY_S_MIN

    def keeper_is_followed(self) -> bool:
        """From now on its kept messages cannot be lost."""
        if not self._keeper_was_followed:
            streamer = self.machines["V"].streamer
            all = streamer.assembly.follows if streamer is not None else ()
            self._keeper_was_followed = any(not one.is_gateway and one.has_position.is_set() for one in all)
        return self._keeper_was_followed

    # -- building it

    async def build(self) -> None:
        for name in ("vehicle", "mcu", "cloud", "hub") if self.has_hub else ("vehicle", "mcu", "cloud"):
            self.networks[name] = SimulatedNetwork(f"{self.seed}/{name}", self.dice.getrandbits(32), self._on_the_way)
        self.networks["cloud"].answer_s = FAR_ANSWER_S * (self.seed % 2)
        self.machines["V"] = Machine(self, "V", self.folder / "V", self.vehicle_config())
        if self.has_hub:
            self.machines["C"] = Machine(self, "C", self.folder / "C", self.hub_config())
        if self.kind == "keeper":
            options = {"announce_s": self.dice.choice((1.0, 5.0)), "retention_ms": KEPT_YEARS_MS}
            self.keeper = Keeper(self, "K", self.folder / "K", options)
        static: dict[str, list[str]] = {}
        for topic, places in self.static.items():
            static[topic] = [f"//{AUTHORITIES[place]}/9001/1/0" for place in places]
        static[UNSERVED_TOPIC] = [f"//{STRANGER}/9001/1/0"]
        (self.folder / "static.json").write_text(json.dumps(static))
        if self.follows:
            there = {self._text(topic): [SINK] for topic, places in self.static.items() if "hub" in places}
            (self.folder / "static-hub.json").write_text(json.dumps(there))
        await self._populate()
        for machine in self.machines.values():
            machine.on_ready.append(lambda: self._static(confirmed=self._all_started()))
        self._static(confirmed=False)

    def _all_started(self) -> bool:
        """The follower must have run once, with its listeners."""
        return self.machines["V"].ready and (not self.follows or self.machines["C"].ready)

    def _text(self, topic: str) -> str:
        """The name as written on the cloud's network."""
        return uris.format(self.named("cloud", uris.parse(topic))).removeprefix("up:")

    def vehicle_config(self) -> dict[str, Any]:
        def endpoint(network: str, mode: str, name: str = "") -> dict[str, Any]:
            settings = {"network": f"{self.seed}/{network}", "session": f"V-{network}"}
            fleet = [FLEET] if self.has_flood and network == "mcu" else []
            return {
                "name": name or network,
                "transport": "local",
                "authorities": [AUTHORITIES[network], *fleet],
                "usubscription": mode,
                "settings": settings,
            }

        remote = "none" if self.kind == "static" else "remote"
        follow = {"endpoint": "cloud", "service": "//hub/4/1/0", "mode": self.mode} if self.follows else {}
        followed_by = {"followed_by": "//hub/4/1/0"} if self.follows else {}
        epochs: dict[str, Any] = {"epochs": sections(self.epoch_dice)} if self.epochs is not None else {}
        if self.epochs is not None:
            self.epochs.width_ms = epochs["epochs"][0]["width_ms"]
        recovery = {"recovery": sections_of_recovery()} if self.recovers else {}
        return (
            epochs
            | recovery
            | {
                "follow": [follow] if self.follows and self.is_mutual else [],
                "streamer": {"authority": "vin1", "data_dir": str(self.folder / "V")},
                "endpoint": [
                    endpoint("vehicle", "embedded"),
                    endpoint("mcu", "none"),
                    endpoint("cloud", remote) | {"suffix": self.suffix} | followed_by,
                ],
                "history": {"reserve_mib": 1},
                "limits": {"authority_messages_per_s": QUOTA_PER_S},
                "usubscription": {"static_file": str(self.folder / "static.json")},
                "egress": {"retry_min_ms": 5, "retry_max_ms": 400, "send_ms_max": self.send_ms_max},
            }
        )

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
        cloud, following = endpoint("cloud", vehicles, "none"), {}
        if self.follows:
            service = f"//{'*' if self.is_fleet else vehicles[0]}/4/1/0"
            of_epochs = (*SIGNALS, FAST_SIGNALS, *LAPS) if self.epochs is not None else ()
            topics = [self._text(topic) for topic in (*self.followed_topics, *of_epochs)]
            following["follow"] = [{"endpoint": "cloud", "service": service, "mode": self.mode, "topics": topics}]
            following["usubscription"] = {"static_file": str(self.folder / "static-hub.json")}  # type: ignore[assignment]
            if self.epochs is not None:
                following["epochs"] = sections_of_hub(self.machines["V"].config["epochs"])  # type: ignore[assignment]
            if self.is_mutual:
                cloud["followed_by"] = f"//{vehicles[0]}/4/1/0"
        return following | {
            "streamer": {"authority": "hub", "data_dir": str(self.folder / "C")},
            "endpoint": [endpoint("hub", ["hub"], "embedded"), cloud],
            "history": {"reserve_mib": 1},
            "egress": {"retry_min_ms": 5, "retry_max_ms": 400, "send_ms_max": self.send_ms_max},
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
        if self.has_flood:
            flooder = await node(self, "mcu", FLOODER, 0x8008)
            self.flood = Flood(self, flooder, uris.parse(FLOOD_TOPIC))
        if self.kind != "static":
            hub = await node(self, "hub" if self.has_hub else "cloud", "hub", 0x8003)
            self.publishers.append(Publisher(self, hub, "hub", [uris.parse(one) for one in WISHED_HUB], [], ttl_share))
        for network in self.networks:
            await self._hearer(network)
        self.checker.sinks[uris.key(uris.parse(SINK))] = "L"
        await self._subscribe()
        await self._lone_service()
        if self.epochs is not None:
            await self._populate_epochs(self.epochs)
        if self.recovers:
            self.rest = RestPublisher(self, await node(self, "vehicle", "vin1", 0x8007))
            self.publishers.append(self.rest)
        if self.following is not None:
            self.publishers.append(NamedPublisher(self, await node(self, "vehicle", "vin1", 0x8009)))

    async def _populate_epochs(self, epochs: EpochsChecker) -> None:
        signals = await node(self, "vehicle", "vin1", 0x8005)
        self.publishers.append(Publisher(self, signals, "signals", [uris.parse(one) for one in SIGNALS], [], 0.0))
        self.laps = Laps(self, await node(self, "vehicle", "vin1", 0x8006), self.epoch_dice)
        self.publishers.append(self.laps)
        for place in range(3):
            transport = await node(self, "vehicle", "vin1", 0x9300 + place)
            topics = [*self.epoch_dice.choice(([*SIGNALS, *LAPS], SIGNALS, [*LAPS, SIGNALS[0]])), FAST_SIGNALS]
            cursor = self.folder / f"epochs-{place}.json" if place < 2 else None
            seed = self.epoch_dice.getrandbits(32)
            reader = EpochReader(self, f"reader {place}", transport, topics, cursor, seed)
            epochs.readers.append(reader)
        dice = random.Random(f"{self.seed} clocks")  # a generator of its own
        fast = await node(self, "vehicle", "vin1", 0x8009)
        epochs.fast = SkewedPublisher(self, fast, "fast", FAST_SIGNALS, dice.choice(AHEAD_MS))
        self.publishers.append(epochs.fast)
        if self.follows:
            timeout_ms = self.machines["V"].config["epochs"][0]["timeout_ms"]
            old = await node(self, "hub", "hub", 0x8009)
            old_ms = round(dice.random() * OLD_SHARE * timeout_ms)
            self.publishers.append(SkewedPublisher(self, old, "old", HUB_SIGNALS, -old_ms))
        for place in range(2) if self.follows else ():
            transport = await node(self, "hub", "hub", 0x9310 + place)
            cursor = self.folder / f"epochs-hub-{place}.json" if place < 1 else None
            topics, seed = self.epoch_dice.choice(([*SIGNALS, *LAPS], SIGNALS)), self.epoch_dice.getrandbits(32)
            topics = [*topics, FAST_SIGNALS, HUB_SIGNALS]
            epochs.readers.append(EpochReader(self, f"hub reader {place}", transport, topics, cursor, seed, "C"))
        self.tasks += [self.loop.create_task(reader.run()) for reader in epochs.readers]
        self.tasks.append(self.loop.create_task(self._watch_epochs(epochs)))

    async def _watch_epochs(self, epochs: EpochsChecker) -> None:
        while True:
            await asyncio.sleep(WATCH_S)
            epochs.watch()

    async def _hearer(self, network: str) -> None:
        transport = await node(self, network, AUTHORITIES[network], 0x9001)
        hearer = Hearer(self, HEARERS[network])
        topics = [topic for topic, places in self.static.items() if network in places]
        if network in ("cloud", "hub"):
            topics += [] if network == "cloud" and self.has_hub else self.wished_vin
        if network == "vehicle" and self.kind != "static":
            topics += WISHED_HUB
        named = [self.named(network, uris.parse(topic)) for topic in topics]
        for one in named:
            await transport.register_listener(one, hearer)
        self.hearers[network] = transport, hearer, named
        if network == "cloud":
            await transport.register_listener(uris.ANY, hearer, uris.parse(SINK))
        if network == "cloud" and self.follows:
            for topic in (*self.static, *self.wished_vin):
                await transport.register_listener(self.named(network, uris.parse(topic)), Spy(self))

    async def _subscribe(self) -> None:
        """The subscribers, with their services."""
        version = self.dice.choice((3, 4))
        if self.kind == "static":
            await self._subscriber("L", "cloud", "vin1", version, WISHED_VIN, "V")
        elif self.has_hub:
            await self._subscriber("H", "hub", "hub", version, self.wished_vin, "C")
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
        """A service that listens to the network itself, like `python -m usubscription`, and is never killed."""
        transport = await node(self, "mcu", "mcu1", 0)
        (self.folder / "lone").mkdir()
        disk = SimulatedDisk(random.Random(self.seed), lambda what: None)
        runtime = runtime_of(self, disk, random.Random(self.seed))
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
        service, modes = uris.parse("//vin1/4/1/0"), MODES if self.follows else ()
        self.reader = HistoryReader(self, transport, service, topics, self.folder / "reader.json", modes)
        self.tasks.append(self.loop.create_task(self.reader.run()))

    # -- when a subscription is certain

    def _static(self, *, confirmed: bool) -> None:
        for topic, places in self.static.items():
            for place in places:
                key = uris.key(uris.parse(topic))
                self.checker.want(HEARERS[place], key, self.hops(HEARERS[place], key), confirmed=confirmed)

    async def foreign_is_sure(self, topic: UUri) -> None:
        """A service that cannot list has been recognised: from now on no command to it may be missed."""
        key = uris.key(topic)
        want = self.checker.want("L", key, self.hops("L", key), confirmed=False)
        while want.wanted and not self.given_up:
            streamer = self.machines["V"].streamer
            if (
                self.machines["V"].ready
                and streamer is not None
                and not streamer.assembly.interest.unhealthy
                and not streamer.assembly.interest.can_list
            ):
                self.checker.want("L", key, self.hops("L", key), confirmed=True)
                return
            await asyncio.sleep(0.2)

    def forget(self, machine: Machine, endpoint: str, transport: LocalTransport) -> None:
        """The network of an endpoint forgets the messages that it has accepted and not delivered yet. Its transport
        reports that loss; the gateway must then report it in its log and as a reason why it is not ready."""
        transport.disconnect()
        network = self.networks[transport.network.name.split("/")[1]]
        forgotten = network.forget(transport, is_application)
        if not forgotten or not transport.is_open:
            return  # nothing is lost, or the process has ended
        reported = self.checker.reported_lost[machine.name]
        transport.report_loss("it was opened again, and has forgotten what was on its way", len(forgotten))
        self.note("forgotten", machine.name, endpoint, len(forgotten))
        is_problem = any(f"endpoint {endpoint}" in problem for problem in machine.streamer.parts.problems())  # type: ignore[union-attr]
        if self.checker.reported_lost[machine.name] - reported < len(forgotten) or not is_problem:
            return  # they are still owed
        for message in forgotten:
            self.checker.lost(uuids.to_bytes(message.attributes.id), is_for_good=True)

    def _on_the_way(self, what: str, message: UMessage, member: LocalTransport) -> None:
        self.note("on the way", what, message.payload[:20] if message.attributes.source.ue_id >= 0x8000 else "")
        if what == "lost":  # without a follower it is lost for good
            is_for_good = member in (
                *self.networks["mcu"].members,
                *(self.networks["hub"].members if self.has_hub else ()),
            )
            self.checker.lost(uuids.to_bytes(message.attributes.id), is_for_good=is_for_good)
        if what.startswith("refused"):
            self.checker.refused_alone(uuids.to_bytes(message.attributes.id))
        if what in REFUSED_FOR_GOOD and is_remote_subscribe(message):
            _, topic = CODECS[message.attributes.sink.ue_version_major].read_subscribe(message, "")
            self.checker.no_for_good(uris.key(self.inside(topic)))

    async def watch(self) -> None:
        """Conditions of services and followers that must hold at every moment."""
        while True:
            await asyncio.sleep(WATCH_S)
            handed_over = False
            for machine in self.machines.values():
                streamer = machine.streamer
                if streamer is None or not machine.ready:
                    continue
                handed_over = handed_over or (machine.name == "V" and bool(streamer.assembly.handovers.followed))
                for follower in streamer.assembly.history.followers:
                    waiting = sum(not poll.is_pushed and not poll.is_cut for poll in follower.polls)
                    if waiting > 1:
                        self.checker.fail("more than one poll", f"{machine.name} holds {waiting} polls of {follower}")
            if self.following is not None:
                self.following.look()
            if not handed_over:
                self.handed_over_since = None
            elif self.handed_over_since is None:
                self.handed_over_since = self.loop.now

    # -- running

    def run(self) -> None:
        """The whole run. The checker has the violations."""
        asyncio.set_event_loop(self.loop)
        World.current = self
        try:
            with uuids.simulated(_wall_ns, self._new_id), _captured(self), _forgetful():
                try:
                    self.loop.run_until_complete(self._live())
                except DeadlockError as error:
                    self.checker.fail("a task that never ends", str(error))
                for machine in self.all_machines:
                    for process in machine.processes:
                        process.disk.power_lost()
        finally:
            processes: list[Process] = [process for machine in self.all_machines for process in machine.processes]
            with _captured(self):
                self.loop.finish(processes)
            World.current = None
            asyncio.set_event_loop(None)
            shutil.rmtree(self.folder, ignore_errors=True)

    def _new_id(self) -> UUID:
        process = PROCESS.get()
        return process.ids() if isinstance(process, MachineProcess) else self.ids()

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
        self.healed = True
        checker.recording.begin()
        if not await self.until(self._all_ready, HEAL_S_MAX) and not checker.violations:
            for machine in self.machines.values():
                problems = problems_of(machine)
                if problems:
                    checker.fail("not ready", f"{machine.name} is not ready again: {problems}")
        if not await self.until(lambda: all(task.done() for task in plan.tasks), HEAL_S_MAX) and not checker.violations:
            left = [named(task) for task in plan.tasks if not task.done()]
            checker.fail("a task that never ends", f"somebody outside waits for ever: {left[:3]}")
        await self._check_subscriptions()
        self._check_unserved()
        if self.follows:
            await self._check_following()
        self._look_at_unclaimed(plan)
        if self.epochs is not None:
            await self._mark_epochs(self.epochs)
        checker.recording.last_round(
            place for place, want in checker.wants.items() if want.wanted and not (want.refused or want.unsure)
        )
        for publisher in self.publishers:
            for topic in publisher._topics:
                await publisher.publish(topic)
        if self.epochs is not None:
            await self.laps.lap(3, 0.1)
        if self.keeper is not None:
            for text in (*KEPT_STATIC, *KEPT_WISHED):
                self.keeper.publish(uris.parse(text))
        await self.until(lambda: checker.outstanding == 0, SETTLE_S_MAX)
        await asyncio.sleep(QUIET_S)
        if self.epochs is not None:
            await self._check_epochs(self.epochs)
        if self.rest is not None:
            await self._check_recovered(self.rest)
        if self.follows:
            await self._check_followed()
        checker.recording.end()
        await self._resend_letters()
        self.given_up = True
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        for machine in self.all_machines:
            await machine.stop()
        assert self.lone is not None
        await self.lone.stop()
        await asyncio.sleep(2.0)
        checker.forgive(self._dead_letters())
        checker.finish()
        if not checker.violations:
            await empty_one(self)
        if not checker.violations:
            await empty_follower_or_followed(self)

    async def _mark_epochs(self, epochs: EpochsChecker) -> None:
        """All readers run and all old epochs are over: new epochs are owed to all of them."""
        await asyncio.sleep(EPOCHS_S)
        logs = self._logs_of_keepers()
        epochs.newest_healed = {one.incarnation: one.newest_seq for one in logs if one.newest_seq}

    def _logs_of_keepers(self) -> list[Log]:
        streamers = (machine.streamer for machine in self.machines.values() if machine.config.get("epochs"))
        return [log for streamer in streamers if streamer is not None for log in streamer.assembly.logs]

    async def _check_epochs(self, epochs: EpochsChecker) -> None:
        await asyncio.sleep(EPOCHS_S)  # nobody closes the last bucket: it times out
        if self.machines["V"].streamer is not None:
            streamers = {name: machine.streamer for name, machine in self.machines.items()}
            epochs.logs_of = {
                name: {log.incarnation for log in one.assembly.logs} for name, one in streamers.items() if one
            }
            await epochs.learn(self._logs_of_keepers())
            await self.until(lambda: not any(map(epochs.owed, epochs.readers)), EPOCHS_S)
            epochs.finish()

    async def _check_recovered(self, rest: RestPublisher) -> None:
        await self.until(lambda: not any(map(rest.checker.owed, rest.histories)), RECOVERED_S)
        streamer = self.machines["V"].streamer
        if streamer is not None and not self.checker.violations:
            await rest.checker.finish(streamer.assembly.logs.durable)

    async def _resend_letters(self) -> None:
        """Networks decline some messages of the gateways. An operator sends the dead letters again, and some gateways
        are killed meanwhile: what has left their stores must arrive."""
        dice = random.Random(f"{self.seed} letters")
        self.checker.disturbed_from("resend")
        for network in self.networks.values():
            network.declines = lambda message, sender: (
                is_application(message) and str(sender.session)[:2] in ("V-", "C-") and dice.random() < 0.5
            )
        for publisher in (one for one in self.publishers if type(one) is Publisher for _ in range(3)):
            for topic in publisher._topics:
                await publisher.publish(topic)
        await asyncio.sleep(QUIET_S)
        for network in self.networks.values():
            network.declines = None
        for machine in self.machines.values():
            if machine.process is not None and machine.folder.joinpath("dead-letters.db").exists():
                is_killed = dice.random() < 0.5
                await self._resend(machine, dice.randrange(RESEND_STEPS) if is_killed else None)
                if machine.process is None:
                    machine.start()
                    await self.until(self._all_ready, HEAL_S_MAX)
                    await self._resend(machine)
        await self.until(lambda: self.checker.outstanding == 0, SETTLE_S_MAX)
        await asyncio.sleep(QUIET_S)
        self.checker.disturbed_until("resend")

    async def _resend(self, machine: Machine, kill_after: int | None = None) -> None:
        """Within the process of the gateway, which is killed after so many steps."""
        process, streamer = machine.process, machine.streamer
        if process is None or streamer is None:
            return
        begun = process.steps
        if kill_after is not None:
            machine.kill_after(kill_after)
        context = contextvars.copy_context()
        context.run(PROCESS.set, process)
        asked = streamer.operations.answer("resend_letters", {"all": True})
        task = self.loop.create_task(asked, name="resend", context=context)
        await self.until(lambda: task.done() or not process.alive, HEAL_S_MAX, 0.05)
        if task.done():
            self.note("resent", machine.name, task.result()["counts"], process.steps - begun)
        elif process.alive:
            self.checker.fail("a task that never ends", f"{machine.name} resends for ever")
        await asyncio.sleep(QUIET_S)  # so that a kill that is due happens

    def _look_at_unclaimed(self, plan: Plan) -> None:
        for machine in self.machines.values():
            if machine.streamer is not None:
                newest = plan.newest_at_heal(machine)
                for waits in machine.streamer.assembly.claims.unclaimed:
                    first = EndpointPositions.of(waits.log.cursors.seqs(), waits.endpoint).first_of_all
                    self.checker.unclaimed.append((machine.name, first, newest))

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

    # -- following, at the end

    def _unfollowed(self) -> list[str]:
        """The reasons why something is not followed, or not to its end."""
        found = []
        for machine in self.machines.values():
            streamer = machine.streamer
            if streamer is None:
                return [f"{machine.name} does not run"]
            is_follower = bool(machine.config["follow"])
            if is_follower and not any(
                one.is_gateway and one.state == "handed_over" for one in streamer.assembly.follows
            ):
                found.append(f"{machine.name} follows {list(streamer.assembly.follows)}")
            of_publishers = [one for one in streamer.assembly.follows if not one.is_gateway and one.connected]
            if self.keeper is not None and machine.name == "V" and not of_publishers:
                found.append(f"V does not follow the publisher: {list(streamer.assembly.follows)}")
            for name, log, records in streamer.assembly.handovers.backlog():
                if records > (UNFOLLOWED_MAX if self.epochs is not None else 0):
                    found.append(f"{machine.name} holds {records} records of {log} for {name}")
            left, most = (
                len(streamer.assembly.history.followers),
                3,
            )  # a gateway, the reader, and one of its earlier lives
            readers = self.epochs.readers if self.epochs is not None else ()
            most += 2 * sum(reader.machine == machine.name for reader in readers)
            if left > most:
                found.append(f"{machine.name} knows {left} followers")
        return found

    def are_followed(self) -> bool:
        """The vehicle's gateway has handed over, and the hub is connected."""
        hub, vehicle = self.machines["C"].streamer, self.machines["V"].streamer
        is_there = vehicle is not None and bool(vehicle.assembly.handovers.followed)
        return (
            is_there
            and hub is not None
            and any(one.is_gateway and one.state == "handed_over" for one in hub.assembly.follows)
        )

    async def _check_following(self) -> None:
        if not await self.until(lambda: not self._unfollowed(), SETTLE_S_MAX, 1.0) and not self.checker.violations:
            self.checker.fail("never settles", "; ".join(self._unfollowed()))

    async def _check_followed(self) -> None:
        """The content of the logs, once no process is killed any more."""
        if self.following is not None and self.machines["C"].config["follow"]:
            await self.following.check()
        for machine in self.machines.values():
            if machine.streamer is None:
                continue
            log, after = machine.streamer.assembly.logs.durable, 0
            followed = FollowedLog(self.checker, machine.name)
            while chunks := await log.read(after):
                for chunk in chunks:
                    for message, origin in zip(chunk.messages, chunk.origins or repeat(None), strict=False):
                        followed.take(log.incarnation, decoded(message), origin)
                after = chunks[-1].last_seq

    # -- the subscriptions in the end

    async def _check_subscriptions(self) -> None:
        wrong: list[tuple[str, str]] = []
        end = self.loop.now + SETTLE_S_MAX
        while not self.checker.violations:
            wrong = await self._wrong_subscriptions()
            if not wrong or self.loop.now >= end:
                break
            if self.loop.now > end - SETTLE_S_MAX + 90 and any(kind != "never settles" for kind, _ in wrong):
                break  # waiting does not bring lost messages back
            await asyncio.sleep(1.0)
        for kind, text in wrong:
            self.checker.fail(kind, text)

    def _check_unserved(self) -> None:
        """What the static file subscribes to, and no rule lets through, is in the notes of the vehicle's gateway."""
        machine = self.machines["V"]
        if machine.streamer is None or self.checker.violations:
            return
        passing = self.passes(machine)
        name_of = {one["settings"]["network"].split("/")[1]: one["name"] for one in machine.config["endpoint"]}
        origins = {"vin1": "vehicle", "mcu1": "mcu", FLOODER: "mcu"}
        expected = {f"{UNSERVED_TOPIC}, and no endpoint has the authority {STRANGER}"}
        for topic, places in self.static.items():
            origin = origins[uris.parse(topic).authority_name]
            for place in ("cloud" if one == "hub" else one for one in places):
                if place != origin and (origin, place) not in passing:
                    expected.add(f"there is no rule from {name_of[origin]} to {name_of[place]}")
        notes = machine.streamer.parts.notes()
        for text in sorted(expected):
            if not any(text in note for note in notes):
                self.checker.fail("wanted, not served and not noted", f"{text}: not in {notes}")

    async def _wrong_subscriptions(self) -> list[tuple[str, str]]:
        wrong = []
        for hearer, (subscriber, topics, name) in self.subscribers.items():
            streamer = self.machines[name].streamer if name else None
            service = streamer.assembly.usubscription if streamer is not None else self.lone if not name else None
            if service is None:
                return [("not ready", f"{name} does not run")]
            rows, authority = await service.subscriptions(), service.authority
            states = {row.topic: Status(row.status) for row in rows if row.subscriber == uris.key(subscriber.uri)}
            for topic in topics:
                want = self.checker.wants.get((hearer, uris.key(topic)))
                if want is not None and want.unsure:
                    continue
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


def is_remote_subscribe(message: UMessage) -> bool:
    """A request from one uSubscription to another."""
    attributes = message.attributes
    is_asked = attributes.type == attrs.REQUEST and attributes.sink.ue_id == attributes.source.ue_id == USUBSCRIPTION
    return is_asked and attributes.sink.resource_id == SUBSCRIBE


def problems_of(machine: Machine) -> list[str]:
    """The reasons why it is not ready, except those that only a person can end: the cursor of a former name, a
    publisher's clock."""
    if machine.streamer is None:
        return ["it does not run"]
    return [
        problem
        for problem in machine.streamer.parts.problems()
        if not any(part in problem for part in ("is not configured", "acknowledge", "ahead of ours"))
    ]


class Spy(UListener):
    """Between two gateways, one of which follows: no publish may be pushed there, except dead letters that are sent
    again."""

    def __init__(self, world: World) -> None:
        self._world = world

    def on_receive(self, message: UMessage) -> None:
        world, since = self._world, self._world.handed_over_since
        streamer = world.machines["V"].streamer
        if streamer is None or not all(
            pump.waits.plans.is_followed for pump in streamer.assembly.pumps if pump.peer.name in NAMES
        ):
            return  # following is ending: one log after the other is pushed again
        if since is None or world.loop.now - since <= PUSHED_S_MAX:
            return
        if is_application(message) and not world.checker.may_be_dead_letter(message):
            world.checker.fail("pushed, though it is followed", f"{message.payload!r}, handed over at {since:.3f} s")


@contextlib.contextmanager
def _forgetful() -> Iterator[None]:
    """Forget topics without records soon, since a world lasts only minutes."""
    before, streams.FORGET_AFTER_S = streams.FORGET_AFTER_S, FORGET_AFTER_S
    try:
        yield
    finally:
        streams.FORGET_AFTER_S = before


@contextlib.contextmanager
def _captured(world: World) -> Any:
    """Pass the log lines of gateways to the checker."""

    def capture(_: Any, method: str, event: dict[str, Any]) -> Any:
        process = PROCESS.get()
        if event.get("exc_info"):
            error = sys.exc_info()[1]
            event["exception"] = repr(error)
        if isinstance(process, MachineProcess) and process.alive:
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
