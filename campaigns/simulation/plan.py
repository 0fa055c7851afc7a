"""The faults of a world: drawn from its seed, one after the other, some of them at the same time.

background: publishers, wishes       foreground: `actions` faults, with pauses between       then `heal`
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import random
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, Final

from campaigns.simulation.disk import DiskFaults
from campaigns.simulation.epochs import FAST_SIGNALS, LAPS, SIGNALS
from campaigns.simulation.following import adopt
from campaigns.simulation.network import CALM, Faults, Weather
from campaigns.simulation.recovery import WRONG, WRONG_ORDER
from uprotocol import uri as uris
from uprotocol.status import RETRYABLE, UStatusError
from uprotocol.v1.ucode_pb2 import UCode

if TYPE_CHECKING:
    from campaigns.simulation.machine import Machine, MachineProcess
    from campaigns.simulation.world import World

HOUR_MS: Final = 3_600_000
HANG_S_MAX: Final = 20.0  # until something was sent, and the hanging transport was opened again
NEVER: Final = (UCode.OK, UCode.INVALID_ARGUMENT, UCode.PERMISSION_DENIED, UCode.NOT_FOUND, UCode.UNIMPLEMENTED)
SHORTAGES: Final = tuple(int(code) for code in UCode.values() if code not in NEVER)
"""All codes that do not refuse for good."""
REFUSALS: Final = tuple(int(code) for code in UCode.values() if code != UCode.OK and code not in RETRYABLE)
"""Codes for one message while later ones are accepted: retryable codes end a batch (Faults.fail_send)."""

BURSTING: Final = ("vin", "mcu", "hub")  # publishers; those of epochs announce their messages

ELSEWHERE: Final = ".elsewhere"
FLOOD_PAUSES_S: Final = (0.03, 0.1, 0.2)  # between batches: 330 to 50 messages a second
FLOOD_BATCHES_MAX: Final = 120
NAME_SHARE: Final = 0.25  # of actions, after which the followed endpoint has another name
RELOAD_SHARE: Final = 0.6  # of other configurations that are taken over without a restart

KNOWN_FAULTS: Final = frozenset({"late_error", "tear_young", "pause_undecided"})
"""Left out by default; `--without ''` allows all.

late_error: a COMMIT that fails though it was executed. The log undoes what it refused; the subscription store does
not yet.
tear_young: a log is lost whose tables are only in its write-ahead log. That is reported (damage, readiness, the topic
of gaps), but a reader that had not begun cannot know a log without having got a record of it, and the checker expects
a gap, too.
pause_undecided: a topic is paused while a service of version 3 has not answered about it. It has one cursor for
subscribers that were served meanwhile and for others: after a restart the former get the records from there, twice, and
from before their subscription.
"""

Action = Callable[[], Awaitable[None]]


class Plan:
    def __init__(self, world: World) -> None:
        self._world, self._dice = world, world.dice
        self._reload_dice = random.Random(f"{world.seed} reloads")
        self._name_dice = random.Random(f"{world.seed} names")
        self.tasks: list[asyncio.Task[Any]] = []
        self._was_left: set[str] = set()  # names of the cloud's endpoint that have a backlog each
        self._base: dict[str, dict[str, Any]] = {}
        # of each machine when its own configuration was restored: the durable seq, and the process that it started with
        self._newest_at_heal: dict[str, int] = {}
        self._started_at_heal: dict[str, MachineProcess | None] = {}

    @property
    def _v(self) -> Machine:
        return self._world.machines["V"]

    def newest_at_heal(self, machine: Machine) -> int:
        """Returns the durable seq that it had when its own configuration was restored."""
        process = self._started_at_heal.get(machine.name)
        newest = self._newest_at_heal.get(machine.name, 0)
        return newest if process is None else max(newest, process.newest_at_start)

    def _spawn(self, work: Any) -> None:
        self.tasks.append(self._world.loop.create_task(work))

    async def run(self) -> None:
        from campaigns.simulation.world import KEPT_STATIC, KEPT_WISHED

        dice, world = self._dice, self._world
        history: dict[str, Any] = self._v.config["history"]
        if dice.random() < 0.5 and "record" not in world.without:
            history["record"] = ["//vin1/8001/1/FFFF"]
        if dice.random() < 0.5:
            history["retention_hours"] = 24.0
        if dice.random() < (0.3 if world.follows else 0.1):
            history["volatile"] = ["//vin1/8001/1/8002"]
            world.checker.volatile = [uris.parse("//vin1/8001/1/8002")]
        if world.epochs is not None and world.epoch_dice.random() < 0.4:  # an epoch is over in both logs
            history["volatile"] = [*history.get("volatile", ()), SIGNALS[1]]
            world.checker.volatile = [*world.checker.volatile, uris.parse(SIGNALS[1])]
        self._base = {name: copy.deepcopy(machine.config) for name, machine in world.machines.items()}
        world.note("kind", world.kind, history)
        for machine in world.all_machines:
            machine.start()
        if world.follows:
            world.tasks.append(world.loop.create_task(world.watch()))
        if "record" in history and dice.random() < 0.5:
            await world.add_reader([uris.parse("//vin1/8001/1/8001"), uris.parse("//vin1/8001/1/8003")])
        if dice.random() < 0.8:
            await world.until(lambda: all(machine.ready for machine in world.machines.values()), 30.0)
        length_s = 1 + dice.random() * 8
        for publisher in world.publishers:
            count = 5 + dice.randrange(30)
            self._spawn(publisher.run(count, 2 * length_s / count))
        if world.keeper is not None:
            topics = [uris.parse(one) for one in (*KEPT_STATIC, *KEPT_WISHED)]
            count = 5 + dice.randrange(30)
            self._spawn(world.keeper.run(topics, count, 2 * length_s / count))
        for hearer in world.subscribers:
            self._spawn(self._wishes(hearer, length_s))
        if world.flood is not None:
            self._spawn(self._flood())
        actions = self._follow_actions() if world.follows else self._actions()
        for _ in range(1 + dice.randrange(5)):
            await asyncio.sleep(dice.random() * length_s / 3)
            action = dice.choices([action for _, action in actions], [weight for weight, _ in actions])[0]
            world.note("action", action.__name__)
            await action()
            may_rename = world.following is not None and "another_name" not in world.without
            if may_rename and self._name_dice.random() < NAME_SHARE:
                world.note("action", "another name")
                await self._another_name()
        await asyncio.sleep(dice.random())

    def _actions(self) -> list[tuple[float, Action]]:
        found: list[tuple[float, Action]] = [
            (3, self._weather),
            (2, self._partition),
            (1, self._break_network),
            (1, self._hang),
            (1, self._forget),
            (3, self._kill),
            (3, self._restart),
            (1, self._power_cut),
            (1, self._bad_disk),
            (0.5, self._tear),
            (1, self._clock),
            (1.5, self._long_absence),
            (1.5, self._rename),
            (1, self._rule_removed),
            (1, self._record_or_not),
            (2, self._reload),
            (1, self._endpoint_removed),
            (2.5, self._access_rule),
            (2, self._nobody_listens),
        ]
        if self._world.kind != "foreign" or "pause_undecided" not in self._world.without:
            found.append((1.5, self._pause))
        if self._world.kind != "static":
            found.append((3, self._shortage))
        if self._world.kind == "foreign":
            found += [(4, self._silence), (1, self._foreign_wish)]
        return self._allowed(found)

    def _follow_actions(self) -> list[tuple[float, Action]]:
        found: list[tuple[float, Action]] = [
            (3, self._bad_link),
            (3, self._cuts),
            (1, self._weather),
            (1, self._partition),
            (1, self._break_network),
            (1, self._hang),
            (4, self._kill),
            (2, self._kill_both),
            (2, self._restart),
            (1, self._power_cut),
            (1, self._bad_disk),
            (1, self._origin_lost_and_bad_disk),
            (0.5, self._tear),
            (1, self._clock),
            (1, self._long_absence),
            (2, self._follow_not),
            (2, self._followed_by_nobody),
            (1, self._follow_otherwise),
            (1, self._rule_removed),
            (1, self._record_or_not),
            (2, self._reload),
            (1, self._endpoint_removed),
            (2, self._access_rule),
            (1, self._nobody_listens),
            (1, self._shortage),
        ]
        if self._world.keeper is not None:
            found += [(4, self._kill_keeper), (3, self._bad_copies)]
        return self._allowed(found)

    def _allowed(self, found: list[tuple[float, Action]]) -> list[tuple[float, Action]]:
        if self._world.rest is not None:
            found += [(4, self._bad_history), (3, self._partition_vehicle)]
        return [(weight, action) for weight, action in found if action.__name__.strip("_") not in self._world.without]

    # -- background

    async def _wishes(self, hearer: str, length_s: float) -> None:
        subscriber, topics, _ = self._world.subscribers[hearer]
        for topic in topics:
            await subscriber.wish(topic, True)
        for _ in range(self._dice.randrange(4)):
            await asyncio.sleep(self._dice.random() * length_s / 2)
            topic = self._dice.choice(topics)
            if self._dice.random() < 0.5 and "hurry" not in self._world.without:
                await subscriber.hurry(topic, self._dice.random() < 0.7)
            else:
                want = self._world.checker.wants[hearer, uris.key(topic)]
                await subscriber.wish(topic, not want.wanted)

    async def _flood(self) -> None:
        """Once or twice, at any moment."""
        dice = random.Random(f"{self._world.seed} flood")  # a generator of its own
        assert self._world.flood is not None
        for _ in range(1 + dice.randrange(2)):
            await asyncio.sleep(dice.random() * 4)
            await self._world.flood.run(5 + dice.randrange(FLOOD_BATCHES_MAX), dice.choice(FLOOD_PAUSES_S))

    # -- faults

    @staticmethod
    def _cloud(streamer: Any) -> Any:
        """The endpoint of the vehicle's gateway on the cloud's network, which may have been renamed."""
        return next(one for one in streamer.assembly.endpoints if one.transport.network.name.endswith("/cloud"))

    def _machine(self) -> Machine:
        return self._dice.choice(list(self._world.machines.values()))

    async def _some(self, most_s: float) -> None:
        await asyncio.sleep(self._dice.random() ** 2 * most_s)

    async def _weather(self) -> None:
        dice, world = self._dice, self._world
        name = dice.choice(list(world.networks))
        faults = Faults(
            fail_send=dice.choice((0.0, 0.1, 0.4)),
            unsure_send=dice.choice((0.0, 0.0, 0.1)),
            duplicate=dice.choice((0.0, 0.0, 0.1)),
            delay_ms_max=dice.choice((0, 0, 5, 50)),
        )
        weather = Weather(faults)
        if dice.random() < 0.25:
            weather = Weather(faults, refuse=0.1, codes=(dice.choice(REFUSALS), dice.choice(REFUSALS)))
        if name == "mcu" and dice.random() < 0.3:
            weather = Weather(faults, lose=0.1)
        world.checker.disturbed_from(f"weather {name}")
        world.networks[name].set_weather(weather)
        await self._some(3.0)
        self._calm(name)

    def _calm(self, name: str) -> None:
        self._world.networks[name].set_weather(CALM)
        self._world.checker.disturbed_until(f"weather {name}")

    async def _partition(self) -> None:
        """One gateway loses one network."""
        machine = self._machine()
        streamer = machine.streamer
        if streamer is None:
            return
        endpoint = self._dice.choice(list(streamer.assembly.endpoints))
        transport: Any = endpoint.transport
        why = f"partition {machine.name} {endpoint.name}"
        self._world.checker.disturbed_from(why)
        transport.disconnect()
        await self._some(8.0)
        transport.reconnect()
        self._world.checker.disturbed_until(why)

    async def _hang(self) -> None:
        """A gateway's transport does not return from sending until it is closed and opened again; meanwhile it misses
        what others send, as in a partition."""
        machine = self._machine()
        if machine.streamer is None:
            return
        endpoint = self._dice.choice(list(machine.streamer.assembly.endpoints))
        transport: Any = endpoint.transport
        why = f"hang {machine.name} {endpoint.name}"
        self._world.checker.disturbed_from(why)
        hangs = transport.network.hangs
        hangs[transport] = self._dice.choice(("before", "after"))
        await self._world.until(lambda: not (machine.ready and transport in hangs), HANG_S_MAX)
        hangs.pop(transport, None)  # nothing was sent
        await self._world.until(lambda: not machine.ready or endpoint.sends.is_idle, HANG_S_MAX)
        self._world.checker.disturbed_until(why)

    async def _forget(self) -> None:
        """A gateway's network has answered messages that are still on their way, and is opened again: it forgets them,
        and reports how many."""
        dice, machine = random.Random(f"{self._world.seed} forget {self._world.loop.now}"), self._v
        if machine.streamer is None:
            return
        endpoint = dice.choice(list(machine.streamer.assembly.endpoints))
        transport: Any = endpoint.transport
        name = transport.network.name.split("/")[1]
        why = f"forget {machine.name} {endpoint.name}"
        self._world.checker.disturbed_from(why)
        self._world.networks[name].set_weather(Weather(Faults(delay_ms_max=dice.choice((50, 500)))))
        await self._burst(0.3)
        self._world.forget(machine, endpoint.name, transport)
        await self._some(1.0)
        transport.reconnect()
        self._calm(name)
        self._world.checker.disturbed_until(why)

    async def _break_network(self) -> None:
        name = self._dice.choice(list(self._world.networks))
        network = self._world.networks[name]
        self._world.checker.disturbed_from(f"break {name}")
        network.break_()
        await self._some(5.0)
        network.heal()
        self._world.checker.disturbed_until(f"break {name}")

    async def _kill(self) -> None:
        machine = self._machine()
        if self._dice.random() < 0.3:
            machine.kill()
        else:
            machine.kill_after(self._dice.randrange(600))
            await self._world.until(lambda: not machine.running, 5.0, 0.05)
            machine.kill()
        await self._some(6.0)
        self._start(machine)
        if self._dice.random() < 0.3:  # before it is ready, too
            machine.kill_after(self._dice.randrange(1200))
            await self._world.until(lambda: machine.ready or not machine.running, 8.0, 0.05)
            if not machine.running:
                await self._some(1.0)
                self._start(machine)

    async def _restart(
        self, config: dict[str, Any] | None = None, machine: Machine | None = None, away_s: float = 4.0
    ) -> None:
        machine = machine or self._machine()
        if config is not None:
            await self._take(machine, config, away_s)
            return
        await machine.stop()
        await self._some(away_s)
        self._start(machine)

    def _start(self, machine: Machine, config: dict[str, Any] | None = None) -> None:
        if not machine.running:
            machine.start(config)

    async def _power_cut(self) -> None:
        """At a COMMIT: it was executed, but the caller has not got the result."""
        machine = self._machine()
        process = machine.process
        if process is None:
            return
        machine.had_disk_faults = True
        process.disk.victim = self._dice.choice(("history", "usubscription", "dead-letters", ""))
        process.disk.power_cut = process.kill
        await self._world.until(lambda: not process.alive, 4.0, 0.05)
        process.disk.power_cut = None
        machine.kill()
        await self._some(2.0)
        self._start(machine)

    async def _bad_disk(self) -> None:
        dice, machine = self._dice, self._machine()
        machine.had_disk_faults = True
        late = dice.choice((0.0, 0.0, 0.2))
        if "late_error" in self._world.without:
            late = 0.0
        faults = DiskFaults(dice.choice((0.0, 0.2, 1.0)), dice.choice((0.0, 0.1)), late)
        self._world.checker.disturbed_from(f"disk {machine.name}")
        machine.set_disk(faults, dice.choice(("history", "history", "usubscription")))
        if dice.random() < 0.5:
            await self._burst(0.3)
        await self._some(3.0)
        if dice.random() < 0.3:
            machine.kill()
        self._good_disk(machine)
        await self._some(1.0)
        self._start(machine)

    async def _burst(self, most_s: float) -> None:
        """Keep more than one message on its way to a log, from several networks."""
        dice = self._dice
        publishers = [one for one in self._world.publishers if one.name in BURSTING]
        seconds = dice.random() * most_s
        for publisher in dice.sample(publishers, 1 + dice.randrange(min(3, len(publishers)))):
            self._spawn(publisher.burst(random.Random(dice.getrandbits(32)), seconds))
        await asyncio.sleep(seconds)

    def _good_disk(self, machine: Machine) -> None:
        machine.set_disk(DiskFaults(), "")
        self._world.checker.disturbed_until(f"disk {machine.name}")

    async def _tear(self) -> None:
        """A kill, and then the write-ahead log of the history is cut."""
        machine = self._machine() if self._world.follows else self._v
        self._world.checker.allowed_gaps = True
        machine.had_disk_faults = True
        machine.kill(tear="" if not machine.was_closed and "tear_young" in self._world.without else "history")
        self._world.checker.torn(machine.name)
        if self._world.epochs is not None:
            self._world.epochs.torn()
        await self._some(2.0)
        self._start(machine)

    async def _clock(self) -> None:
        jump = self._dice.choice((-2 * HOUR_MS, -1_000, 1_000, HOUR_MS, 3 * HOUR_MS))
        self._world.note("clock", jump)
        self._world.set_clock(jump)
        if jump <= -HOUR_MS:
            self._world.checker.clock_was_set_back = True

    async def _long_absence(self) -> None:
        """The cloud is unreachable, or the vehicle's gateway is off, while the wall clock advances by hours or days."""
        dice, world = self._dice, self._world
        world.checker.disturbed_from("absence")
        streamer = self._v.streamer
        off = dice.random() < 0.3
        transport: Any = None
        if off:
            await self._v.stop()
        elif streamer is not None:
            transport = self._cloud(streamer).transport
            transport.disconnect()
        await asyncio.sleep(0.5 + 2.5 * dice.random())  # so that a message waits for it
        hours = dice.choice((5, 30, 73, 120))
        world.note("absence", hours)
        world.set_clock(hours * HOUR_MS)
        retention_hours = self._v.validated(self._v.config).history.retention_hours
        world.checker.has_expired = world.checker.has_expired or hours > retention_hours
        await asyncio.sleep(3.5)  # retention runs
        if transport is not None:
            transport.reconnect()
        if off:
            self._start(self._v)
        world.checker.disturbed_until("absence")

    async def _rename(self) -> None:
        """The cloud's endpoint has another name for a while; its backlog goes there, or waits for the old name."""
        config = copy.deepcopy(self._v.config)
        before = config["endpoint"][2]["name"]
        name = "cloud2" if before == "cloud" else "cloud"
        config["endpoint"][2]["name"] = name
        for follow in config.get("follow", ()):
            follow["endpoint"] = name
        config["endpoint"][2].pop("renamed_from", None)
        is_carried = self._dice.random() < 0.6 and self._was_left != {before, name}
        if is_carried:
            config["endpoint"][2]["renamed_from"] = before
        else:
            self._was_left = {before, name}
        for rule in config.get("rule", []):
            for side in ("from", "to"):
                if rule[side] in ("cloud", "cloud2"):
                    rule[side] = name
        await self._with_config(config, era=not is_carried)

    async def _another_name(self) -> None:
        """The endpoint that the hub follows has another name, mostly while the hub is away. Perhaps an operator does
        what the finding says, before or after the hub is back."""
        dice, hub = self._name_dice, self._world.machines["C"]
        if dice.random() < 0.7:
            await hub.stop()
            await asyncio.sleep(dice.random())
        if len(self._v.config["endpoint"]) < 3:
            return
        await self._rename()
        when = dice.choice(("at once", "later", "never"))
        await asyncio.sleep(dice.random() * 2)
        for moment in ("at once", "later"):
            if when == moment:
                await self._v.stop()
                self._world.checker.disturbed_from("rename")
                await adopt(self._world, self._v)
                self._start(self._v)
            self._start(hub)
            await asyncio.sleep(dice.random() * 4)

    async def _rule_removed(self) -> None:
        if self._world.following is not None:
            self._world.following.is_excused = True
        config = copy.deepcopy(self._v.config)
        if "rule" in config:
            del config["rule"]
        else:
            names = [one["name"] for one in config["endpoint"]]
            removed = self._dice.choice([("vehicle", names[2]), ("vehicle", "mcu"), ("mcu", names[2])])
            config["rule"] = [{"from": a, "to": b} for a in names for b in names if a != b and (a, b) != removed]
        await self._with_config(config)

    async def _reload(self) -> None:
        """Reloads of the vehicle's gateway, one after the other or two at once, with other faults between them."""
        for _ in range(1 + self._dice.randrange(3)):
            config = copy.deepcopy(self._v.config)
            for _ in range(1 + self._dice.randrange(2)):
                self._change(config)
            await self._take(self._v, config, 2.0)
            await self._meanwhile()

    def _change(self, config: dict[str, Any]) -> None:
        dice, endpoints = self._dice, config["endpoint"]
        match dice.randrange(4):
            case 0:  # a network is closed and opened again
                authorities = dice.choice(endpoints)["authorities"]
                if authorities[-1].endswith(ELSEWHERE):
                    authorities.pop()
                else:
                    authorities.append(f"*.{authorities[0]}{ELSEWHERE}")
            case 1:  # all pumps are made again
                config["egress"]["retry_max_ms"] = dice.choice((300, 400))
            case 2:
                if config["history"].pop("record", None) is None:
                    config["history"]["record"] = ["//vin1/8001/1/FFFF"]
            case 3:
                config["express"] = {"messages_max": dice.choice((2_000, 4_096))}

    async def _endpoint_removed(self) -> None:
        """A network is not configured for a while."""
        before = self._v.config
        removed = "mcu" if self._dice.random() < 0.5 else before["endpoint"][2]["name"]
        config = copy.deepcopy(before)
        config["endpoint"] = [one for one in config["endpoint"] if one["name"] != removed]
        config["follow"] = [one for one in config.get("follow", ()) if one["endpoint"] != removed]
        if "rule" in config:
            config["rule"] = [one for one in config["rule"] if removed not in (one["from"], one["to"])]
        await self._take(self._v, config, 1.0)
        await self._some(4.0)
        if self._dice.random() < 0.3:
            await self._kill()
        await self._take(self._v, before, 1.0)

    async def _record_or_not(self) -> None:
        config = copy.deepcopy(self._v.config)
        if config["history"].pop("record", None) is None:
            config["history"]["record"] = ["//vin1/8001/1/FFFF"]
        await self._with_config(config)

    async def _pause(self) -> None:
        """A topic, everything, or a rule is not dispatched to the cloud for a while, perhaps over a restart of the
        gateway."""
        dice, streamer = self._dice, self._v.streamer
        if streamer is None:
            return
        names = [one.name for one in streamer.assembly.endpoints]
        topic = uris.parse(dice.choice(("//vin1/8001/1/8001", "//*/FFFFFFFF/FF/FFFF")))
        peer = self._cloud(streamer).name
        origin = dice.choice(("", "", *[one for one in names if one != peer]))
        self._world.checker.disturbed_from("pause")
        with contextlib.suppress(UStatusError):  # it was killed meanwhile
            await streamer.assembly.paused.pause(topic, peer, origin)
        await self._some(4.0)
        match dice.randrange(4):
            case 0:
                self._v.kill()
                await self._some(2.0)
                self._start(self._v)
            case 1:
                await self._restart(machine=self._v)
            case 2:
                await self._partition()
        if dice.random() < 0.7:  # else it is resumed in the end
            await self._resume_all(self._v)

    async def _resume_all(self, machine: Machine) -> None:
        for _ in range(20):
            streamer = machine.streamer
            if streamer is not None and not len(streamer.assembly.paused):
                break
            with contextlib.suppress(UStatusError):
                for pause in list(streamer.assembly.paused) if streamer is not None else ():
                    await streamer.assembly.paused.resume(uris.parse(pause.topic), pause.peer, pause.origin)
            await asyncio.sleep(0.5)
        self._world.checker.disturbed_until("pause")

    async def _access_rule(self) -> None:
        """A network refuses what gateways send to some addresses, for a while, in which something else may happen."""
        dice, world = self._dice, self._world
        name = dice.choice([one for one in world.networks if one != "vehicle"])
        network, why = world.networks[name], f"access rule {name}"
        addresses = [f"*vin1*/8001/1/{dice.choice(('8001', '8003', '*'))}", "*vin1*/8001/1/*", "*vin1*/8004/1/*"]
        address = dice.choice(addresses)
        world.note("refuses", name, address)
        world.checker.disturbed_from(why)
        network.refuse(address)
        await self._meanwhile()
        network.allow(address)
        if dice.random() < 0.3:
            await self._meanwhile()
        world.checker.disturbed_until(why)

    async def _nobody_listens(self) -> None:
        """Subscribers do not listen for a while, like an application that restarts."""
        dice, world = self._dice, self._world
        alone = [one for one in ("mcu", "hub", "cloud") if one in world.hearers]
        if world.has_hub:
            alone.remove("cloud")  # gateways listen there, too, and absent listeners miss messages
        name = dice.choice(alone)
        if self._v.config["history"].get("volatile"):
            return  # nothing waits for it
        transport, hearer, topics = world.hearers[name]
        quiet = await world.until(
            lambda: not transport.arrivals.waiting and not world.networks[name].has_late, 3.0, 0.01
        )
        if not quiet:
            return  # sent messages would reach nobody
        why = f"nobody on {name}"
        world.note("nobody listens on", name)
        world.checker.disturbed_from(why)
        for topic in topics:
            await transport.unregister_listener(topic, hearer)
        await self._meanwhile()
        for topic in topics:
            await transport.register_listener(topic, hearer)
        world.checker.disturbed_until(why)

    async def _meanwhile(self) -> None:
        """Some seconds, and perhaps another fault of a gateway."""
        await self._some(4.0)
        match self._dice.randrange(7):
            case 0:
                self._v.kill()
                await self._some(2.0)
                self._start(self._v)
            case 1:
                await self._restart()
            case 2:
                await self._partition()
            case 3 if self._world.kind != "foreign" or "pause_undecided" not in self._world.without:
                await self._pause()
            case 4:
                await self._burst(0.3)
        await self._some(3.0)

    async def _with_config(self, config: dict[str, Any], *, era: bool = False) -> None:
        transport: Any = None
        if self._dice.random() < 0.4 and self._v.streamer is not None:  # with a backlog
            transport = self._cloud(self._v.streamer).transport
            transport.disconnect()
            await self._some(2.0)
        if era:
            await self._v.stop()
            self._another_era()
            await self._some(2.0)
            self._start(self._v, config)
        else:
            await self._take(self._v, config, 2.0)
        if transport is not None:
            transport.reconnect()  # a reload may have left it open

    async def _take(self, machine: Machine, config: dict[str, Any], away_s: float) -> None:
        """The gateway takes over a configuration: while it runs, perhaps with a kill meanwhile, or by a restart."""
        dice = self._reload_dice
        if "reload" not in self._world.without and dice.random() < RELOAD_SHARE:
            self._world.checker.disturbed_from(f"reload {machine.name}")
            if dice.random() < 0.25:
                machine.kill_after(dice.randrange(300))
            is_taken = await machine.reload(config)
            if machine.process is not None:
                machine.process.kill_at = None
            self._start(machine)
            self._world.checker.disturbed_until(f"reload {machine.name}")
            if is_taken:
                return
        await machine.stop()
        await self._some(away_s)
        self._start(machine, config)

    def _another_era(self) -> None:
        """Another name is another peer, with a cursor of its own: each in order, though not one after the other."""
        self._world.checker.era += 1
        self._world.checker.disturbed_from("rename")

    async def _shortage(self) -> None:
        """Services of subscriptions refuse commands for a while."""
        codes = tuple(self._dice.choice(SHORTAGES) for _ in range(2))
        network = self._world.networks["cloud"]
        network.set_weather(Weather(short=self._dice.choice((0.5, 1.0)), short_codes=codes))
        self._wish_otherwise()
        await self._some(4.0)
        self._calm("cloud")

    def _wish_otherwise(self) -> None:
        for hearer, (subscriber, topics, _) in self._world.subscribers.items():
            if self._dice.random() < 0.7:
                topic = self._dice.choice(topics)
                want = self._world.checker.wants.get((hearer, uris.key(topic)))
                self._spawn(subscriber.wish(topic, want is None or not want.wanted))

    async def _silence(self) -> None:
        """The foreign service does not answer for a while."""
        assert self._world.foreign is not None
        self._world.foreign.speaking.clear()
        if self._dice.random() < 0.4:
            await self._restart(machine=self._v, away_s=1.0)
        await asyncio.sleep(1 + self._dice.random() * 12)
        self._world.foreign.speaking.set()

    async def _foreign_wish(self) -> None:
        from campaigns.simulation.world import SINK, WISHED_VIN

        world = self._world
        assert world.foreign is not None
        topic = uris.parse(self._dice.choice(WISHED_VIN))
        want = world.checker.wants.get(("L", uris.key(topic)))
        if want is not None and want.wanted:
            world.checker.unwant("L", uris.key(topic))
            self._spawn(world.foreign.set(topic, uris.parse(SINK), False))
        else:
            self._spawn(self._foreign_subscribes(topic, SINK))

    async def _foreign_subscribes(self, topic: Any, sink: str) -> None:
        world = self._world
        assert world.foreign is not None
        key = uris.key(topic)
        world.checker.want("L", key, world.hops("L", key), confirmed=False)
        await world.foreign.set(topic, uris.parse(sink), True)

        def known() -> bool:
            streamer = self._v.streamer
            return self._v.ready and streamer is not None and "hub" in streamer.assembly.interest.wants(topic)

        if await world.until(known, 60.0):
            world.checker.want("L", key, world.hops("L", key), confirmed=True)

    # -- faults between follower and followed

    async def _bad_link(self) -> None:
        """Messages of following over the cloud are lost, duplicated, or late and reordered."""
        late = self._dice.choice((0.0, 0.1, 0.4))
        await self._unsound("cloud", late, wishes=self._dice.random() < 0.5)

    async def _bad_copies(self) -> None:
        """The same for the publisher that keeps its history; late only once its plain copies are not needed."""
        late = self._dice.choice((0.0, 0.1, 0.4)) if self._world.keeper_is_followed() else 0.0
        await self._unsound("vehicle", late)

    async def _unsound(self, name: str, late: float, *, wishes: bool = False) -> None:
        weather = Weather(lose_followed=self._dice.choice((0.0, 0.1, 0.4)), late_followed=late)
        if wishes:
            self._wish_otherwise()
            await self._some(1.0)
        self._world.checker.disturbed_from(f"weather {name}")
        self._world.networks[name].set_weather(weather)
        for _ in range(2):
            if wishes:
                self._wish_otherwise()
            await self._some(4.0)
        self._calm(name)

    async def _cuts(self) -> None:
        """One side of the link is cut off, repeatedly."""
        name = self._dice.choice(("V", "C"))
        self._world.checker.disturbed_from(f"partition {name} cloud")
        for _ in range(1 + self._dice.randrange(12)):
            streamer = self._world.machines[name].streamer
            if streamer is not None:
                transport: Any = self._cloud(streamer).transport
                transport.disconnect()
                await self._some(0.5)
                transport.reconnect()
            await self._some(0.5)
        self._world.checker.disturbed_until(f"partition {name} cloud")

    # -- faults of a REST history

    async def _bad_history(self) -> None:
        """It does not answer, or wrongly, for a while."""
        assert self._world.rest is not None
        self._world.rest.mode = self._dice.choice((*WRONG, WRONG_ORDER))
        self._world.note("history", self._world.rest.mode)
        if self._dice.random() < 0.4:
            await self._kill()
        await self._some(8.0)
        self._world.rest.mode = ""

    async def _partition_vehicle(self) -> None:
        """The vehicle's gateway loses the vehicle's network."""
        streamer = self._v.streamer
        if streamer is None:
            return
        transport: Any = next(iter(streamer.assembly.endpoints)).transport
        self._world.checker.disturbed_from("partition V vehicle")
        transport.disconnect()
        await self._some(4.0)
        transport.reconnect()
        self._world.checker.disturbed_until("partition V vehicle")

    async def _kill_both(self) -> None:
        machines = self._world.machines.values()
        for machine in machines:
            machine.kill_after(self._dice.randrange(600))
        await self._world.until(lambda: not any(machine.running for machine in machines), 3.0, 0.05)
        for machine in machines:
            machine.kill()
        for machine in machines:
            await self._some(3.0)
            self._start(machine)

    async def _kill_keeper(self) -> None:
        keeper = self._world.keeper
        assert keeper is not None
        if self._dice.random() < 0.3:
            await keeper.stop()
        else:
            keeper.kill_after(self._dice.randrange(200))
            await self._world.until(lambda: not keeper.running, 3.0, 0.05)
            keeper.kill()
        if self._dice.random() < 0.2:  # a new flash: records that nobody had followed are lost, and that is reported
            self._world.checker.allowed_gaps = True
            keeper.lose_disk()
        await self._some(4.0)
        self._start(keeper)

    async def _origin_lost_and_bad_disk(self) -> None:
        """Conversations end while their records are on the way to a disk that may refuse them."""
        dice, world = self._dice, self._world
        follower, origin = world.machines["C"], self._v
        if world.keeper is not None and dice.random() < 0.7:
            follower, origin = self._v, world.keeper
        follower.had_disk_faults = True
        world.checker.disturbed_from(f"disk {follower.name}")
        for _ in range(1 + dice.randrange(4)):
            follower.set_disk(DiskFaults(dice.choice((0.3, 1.0)), 0.0, 0.0), "history")
            await self._some(0.5)
            origin.kill()
            self._start(origin)
            await self._some(1.0)
            follower.set_disk(DiskFaults(), "")
            await self._some(1.0)
        self._good_disk(follower)

    async def _follow_not(self) -> None:
        """The hub follows nobody for a while, or from now on."""
        hub = self._world.machines["C"]
        if self._dice.random() < 0.3:
            self._base["C"]["follow"] = []
            if self._world.following is not None:
                self._world.following.is_excused = True
        await self._for_a_while(hub, hub.config | {"follow": []})

    async def _followed_by_nobody(self) -> None:
        """The vehicle's gateway names no follower for a while."""
        config = copy.deepcopy(self._v.config)
        config["endpoint"][2].pop("followed_by", None)
        await self._for_a_while(self._v, config)

    async def _for_a_while(self, machine: Machine, config: dict[str, Any]) -> None:
        self._world.checker.was_unfollowed = True
        before = machine.config
        await self._restart(config, machine)
        await self._some(8.0)
        if (
            self._dice.random() < 0.7 and machine.config != self._base[machine.name]
        ):  # else it ends when the world heals
            await self._restart(before, machine, 2.0)

    async def _follow_otherwise(self) -> None:
        """Follow in another way, or follow more."""
        hub, dice = self._world.machines["C"], self._dice
        topics = dice.choice(([], ["//vin1/8001/1/8002"]))
        of_epochs = (*SIGNALS, FAST_SIGNALS, *LAPS) if self._world.epochs is not None else ()
        all = [uris.parse(one) for one in (*topics, *of_epochs)]
        named = [uris.format(self._world.named("cloud", one)).removeprefix("up:") for one in all]
        follow = [
            one | {"mode": dice.choice(("auto", "poll", "push")), "topics": named} for one in hub.config["follow"]
        ]
        await self._restart(hub.config | {"follow": follow}, hub, 2.0)

    # -- and back to normal

    async def heal(self) -> None:
        world = self._world
        world.note("heal")
        for name in world.networks:
            self._calm(name)
        if world.foreign is not None:
            world.foreign.speaking.set()
        if world.rest is not None:
            world.rest.mode = ""
        for network in world.networks.values():
            network.allow()
            network.heal()
        if world.keeper is not None:
            if world.keeper.process is not None:
                world.keeper.process.kill_at = None
            self._start(world.keeper)
        for machine in world.machines.values():
            self._good_disk(machine)
            self._newest_at_heal[machine.name] = world.checker.newest.get(machine.name, 0)
            if machine.process is not None:
                machine.process.kill_at = None
            base = self._base[machine.name]
            if machine.config != base:
                renamed = [one["name"] for one in machine.config["endpoint"]] != [
                    one["name"] for one in base["endpoint"]
                ]
                if renamed:
                    await machine.stop()
                    self._another_era()
                    self._start(machine, base)
                    self._started_at_heal[machine.name] = machine.process
                else:
                    await self._take(machine, base, 0.0)
                self._newest_at_heal[machine.name] = world.checker.newest.get(machine.name, 0)
            self._start(machine)
        await self._resume_all(self._v)
