"""One world: brokers, a gateway, raw clients on both sides, and what is said between them.

vehicle (MQTT in-vehicle, or Zenoh)  <->  gateway (data_dir: perhaps a small disk)  <->  cloud (MQTT off-vehicle)
 up: topics that the cloud wants, notifications     Poller, reader: the history     down: publishes and notifications for the vehicle
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

from chaos import machine
from chaos.judges import (
    SUBSCRIBED,
    MqttLink,
    MqttSender,
    Poller,
    Sender,
    ZenohLink,
    ZenohSender,
    flow_of,
    mqtt_caller,
    subscribe,
    zenoh_caller,
)
from chaos.ledger import Ledger, Verdict
from chaos.processes import Broker, ChaosError, Gateway, Process, reader, service
from chaos.proxy import Proxy
from chaos.wire import NOTIFICATION, PUBLISH, Message, Uri
from streamer.processes import free_port

VEHICLE, CLOUD = "vehicle1", "cloud"
UP: Final = [Uri(VEHICLE, 0x8001, 1, 0x8001 + place) for place in range(4)]
DOWN: Final = [Uri(CLOUD, 0x8001, 1, 0x8001 + place) for place in range(2)]
UP_NOTE: Final = (Uri(VEHICLE, 0x8001, 1, 0x9001), Uri(CLOUD, 0x9001, 1, 0))
DOWN_NOTE: Final = (Uri(CLOUD, 0x8001, 1, 0x9001), Uri(VEHICLE, 0x9001, 1, 0))
SUBSCRIBER: Final = Uri(CLOUD, 0x9001, 1, 0)
SETTLE_S_MAX: Final = 60.0  # for everything to pass before the first fault
QUIET_S: Final = 8.0  # without an arrival, backlog or problem: what has not come by then doesn't come
STUCK_S: Final = 45.0  # without an arrival though there is a backlog or a problem: it is stuck
READY_S: Final = 90.0

Fault = str


@dataclass(frozen=True)
class Plan:
    """A campaign: the world, and how often it meets which fault."""

    faults: dict[Fault, int]
    vehicle: Literal["mqtt5", "zenoh"] = "mqtt5"
    interest: Literal["static", "embedded", "remote"] = "static"
    record: bool = False
    reader: bool = False
    proxies: bool = False
    disk_bytes: int = 0  # of a small disk for data_dir; 0: the usual one
    io: bool = False
    clock: bool = False
    rate: int = 150  # messages a second, all flows together
    share: float = 1.0  # of the time
    needs: tuple[Callable[[], str], ...] = ()  # each says why this machine can't, or nothing


@dataclass
class World:
    name: str
    plan: Plan
    folder: Path
    rng: random.Random
    ledger: Ledger = field(default_factory=Ledger)
    tally: Counter[str] = field(default_factory=Counter)
    verdict: Verdict = field(default_factory=Verdict)

    def __post_init__(self) -> None:
        self.brokers: dict[str, Broker] = {}
        self.proxies: dict[str, Proxy] = {}
        self.service: Process | None = None
        self.reader: Process | None = None
        self.poller: Poller | None = None
        self._closers: list[Callable[[], None]] = []
        self._talking = threading.Event()
        self.data_dir = self.folder / "data"
        self.zenoh_port, self.admin_port = free_port(), free_port()
        self.io: machine.IoFault | None = None
        self.clock: machine.Clock | None = None
        self.senders: dict[str, Sender] = {}
        self.hearers: dict[str, MqttLink | ZenohLink] = {}

    # Building

    def build(self) -> None:
        """Raises ChaosError if the world does not work before anybody hurts it."""
        plan = self.plan
        for side in (VEHICLE, CLOUD) if plan.vehicle == "mqtt5" else (CLOUD,):
            self.brokers[side] = broker = Broker(f"{side}-broker", self.folder, self.tally)
            broker.start()
            broker.wait_ready()
            if plan.proxies:
                self.proxies[side] = Proxy(broker.port)
        environment: dict[str, str] = {}
        if plan.disk_bytes:
            machine.mount(self.data_dir, plan.disk_bytes)
        self.data_dir.mkdir(exist_ok=True)
        if plan.io:
            self.io = machine.IoFault(self.folder, self.data_dir)
            environment |= self.io.environment
        if plan.clock:
            self.clock = machine.Clock(self.folder)
            environment |= self.clock.environment
        if plan.interest == "remote":
            self.service = service(self.folder, CLOUD, self.brokers[CLOUD].port, self.tally)
            self.service.start()
            self.service.wait_ready()
        self.gateway = Gateway(self.folder, self._write_config(), self.admin_port, self.tally, environment)
        self.gateway.start()
        self.gateway.wait_ready()
        self._join()
        self._subscribe()
        self._settle()

    def _write_config(self) -> Path:
        plan = self.plan
        session = "session_expiry_s = 86400"
        if plan.vehicle == "mqtt5":
            vehicle = f'transport = "mqtt5"\nsettings = {{ port = {self._port(VEHICLE)}, client_id = "gateway-vehicle", {session} }}'
        else:
            vehicle = f'transport = "zenoh"\nsettings = {{ mode = "router", listen = ["tcp/127.0.0.1:{self.zenoh_port}"] }}'
        parts = [
            f'[streamer]\ndata_dir = "{self.data_dir}"\nadmin = "127.0.0.1:{self.admin_port}"\nlog_level = "warning"',
            "[egress]\nretry_max_ms = 500",
            f'[[endpoint]]\nname = "vehicle"\nauthorities = ["{VEHICLE}"]\n{vehicle}'
            + ('\nusubscription = "none"' if plan.interest == "static" else ""),
            f'[[endpoint]]\nname = "cloud"\nauthorities = ["{CLOUD}"]\ntransport = "mqtt5"\n'
            f'usubscription = "{"remote" if plan.interest == "remote" else "none"}"\n'
            f'settings = {{ port = {self._port(CLOUD)}, mode = "off-vehicle", client_id = "gateway-cloud", {session} }}',
        ]
        if plan.record:
            parts.append(f'[history]\nrecord = ["//{VEHICLE}/FFFFFFFF/FF/FFFF"]')
        if plan.interest == "static":
            listed = {str(topic): [str(SUBSCRIBER)] for topic in UP} | {str(topic): [str(Uri(VEHICLE, 0x9001, 1, 0))] for topic in DOWN}
            (self.folder / "subscriptions.json").write_text(json.dumps(listed))
            parts.append(f'[usubscription]\nstatic_file = "{self.folder}/subscriptions.json"')
        path = self.folder / "gateway.toml"
        path.write_text("\n".join(parts) + "\n")
        return path

    def _port(self, side: str) -> int:
        return self.proxies[side].port if side in self.proxies else self.brokers[side].port

    def _join(self) -> None:
        """The raw clients take their places."""
        ledger, cloud = self.ledger, self.brokers[CLOUD]

        def hears(message: Message) -> None:
            if message.type in (PUBLISH, NOTIFICATION) and message.source.entity == UP[0].entity:
                ledger.arrived("push", message.id, flow_of(message), message.payload)

        self.hearers[CLOUD] = MqttLink(cloud.port, "judge-cloud", filters=(f"+/{CLOUD}",), heard=hears)
        self.senders[CLOUD] = MqttSender(ledger, cloud.port, "sender-cloud", off_vehicle=True)
        me = Uri(VEHICLE, 0x9101, 1, 0)
        pulled: set[str] = set()
        if self.plan.vehicle == "mqtt5":
            vehicle = self.brokers[VEHICLE]
            self.hearers[VEHICLE] = MqttLink(vehicle.port, "judge-vehicle", filters=(f"{CLOUD}/#",), heard=hears)
            self.senders[VEHICLE] = MqttSender(ledger, vehicle.port, "sender-vehicle", off_vehicle=False)
            caller, link = mqtt_caller(vehicle.port, "caller-vehicle", me, off_vehicle=False)
            self._closers.append(link.close)
        else:
            self.hearers[VEHICLE] = ZenohLink(self.zenoh_port, (f"up/{CLOUD}/**",), hears)
            self.senders[VEHICLE] = ZenohSender(ledger, self.zenoh_port)
            caller, zenoh_link = zenoh_caller(self.zenoh_port, me)
            self._closers.append(zenoh_link.close)
            pulled = {str(topic) for topic in DOWN}  # Zenoh keeps nothing for who is away: what was missed there is pulled
        self._closers += [one.close for one in (*self.hearers.values(), *self.senders.values())]
        for link_ in self.hearers.values():
            if isinstance(link_, MqttLink) and not link_.subscribed.wait(SETTLE_S_MAX):
                raise ChaosError("a judge could not subscribe")
        self.caller = caller
        self.poller = Poller(ledger, caller, VEHICLE, [*UP, *DOWN], pulled)

    def _subscribe(self) -> None:
        """The cloud's raw client tells a uSubscription what it wants, and sees that it stands."""
        if self.plan.interest == "static":
            return
        at = VEHICLE if self.plan.interest == "embedded" else CLOUD
        caller, link = mqtt_caller(self.brokers[CLOUD].port, "caller-cloud", SUBSCRIBER, off_vehicle=True)
        self._closers.append(link.close)
        deadline = time.monotonic() + SETTLE_S_MAX
        for topic in UP:
            while (state := subscribe(caller, at, topic)) != SUBSCRIBED:
                if time.monotonic() > deadline:
                    raise ChaosError(f"{topic} was not subscribed to at {at}: state {state}")
                time.sleep(0.2)

    def _settle(self) -> None:
        """Everything passes, again and again until it does; then what is sent counts."""
        assert self.poller is not None
        self.poller.start()
        deadline = time.monotonic() + SETTLE_S_MAX
        while True:
            for place in range(len(self.flows)):
                self.say(place)
            time.sleep(0.5)
            if not (silent := self.ledger.silent_flows()):
                break
            if time.monotonic() > deadline:
                raise ChaosError(f"nothing came of {silent}; problems: {self.gateway.problems()}")
        if self.plan.reader:
            self._start_reader()
        if any(fault.startswith("broker") for fault in self.plan.faults):
            for broker in self.brokers.values():  # its sessions are on its disk from now on
                broker.stop()
                broker.start()
                broker.wait_ready()
            self.await_links()
        self.ledger.begin()
        self.tally.clear()

    def _start_reader(self) -> None:
        settings = (
            {"port": self.brokers[VEHICLE].port}
            if self.plan.vehicle == "mqtt5"
            else {"mode": "client", "connect": [f"tcp/127.0.0.1:{self.zenoh_port}"], "connect_timeout_ms": 60_000}
        )
        options = {
            "transport": self.plan.vehicle,
            "settings": settings,
            "authority": VEHICLE,
            "service": VEHICLE,
            "cursor": str(self.folder / "reader.cursor"),
            "out": str(self.folder / "reader.out"),
            "topics": [str(topic) for topic in UP],
        }
        self.reader = reader(self.folder, options, self.tally)
        self.reader.start()
        self.reader.wait_ready()

    # Talking

    @property
    def flows(self) -> list[tuple[str, Uri, Uri | None]]:
        """(who sends, source, sink)"""
        found: list[tuple[str, Uri, Uri | None]] = [(VEHICLE, topic, None) for topic in UP]
        found += [(CLOUD, topic, Uri.any_of(VEHICLE)) for topic in DOWN]
        if self.plan.vehicle == "mqtt5":
            found += [(VEHICLE, *UP_NOTE), (CLOUD, *DOWN_NOTE)]
        return found

    @property
    def flow_senders(self) -> dict[str, str]:
        """flow -> the side that sends it"""
        return {str(source) if sink is None or sink.is_any else f"{source} > {sink}": side for side, source, sink in self.flows}

    def links_of(self, side: str) -> list[MqttLink]:
        """The raw clients at the broker of `side`."""
        sender, hearer = self.senders[side], self.hearers[side]
        return [one for one in (sender.link if isinstance(sender, MqttSender) else None, hearer) if isinstance(one, MqttLink)]

    def say(self, place: int) -> None:
        side, source, sink = self.flows[place]
        text = f"{source}#{self.rng.random()}".encode()
        self.senders[side].publish(source, sink, text + b"." * self.rng.choice((0, 60, 400)))

    def talk(self) -> None:
        """Start sending at the plan's rate, in bursts, until `hush`."""
        self._talking.set()
        rng = random.Random(self.rng.random())
        places = range(len(self.flows))

        def work() -> None:
            while self._talking.is_set():
                burst = rng.choice((1, 1, 2, 5, 20, 60))
                for _ in range(burst):
                    place = rng.choice(places)
                    if not self.senders[self.flows[place][0]].busy():
                        self.say(place)
                time.sleep(rng.uniform(0.5, 1.5) * burst / self.plan.rate)

        self._talker = threading.Thread(target=work, daemon=True)
        self._talker.start()

    def hush(self) -> None:
        self._talking.clear()
        self._talker.join()

    # Waiting

    def await_links(self) -> None:
        """Until every raw MQTT client is connected and subscribed again."""
        deadline = time.monotonic() + READY_S
        links = [one for one in self.hearers.values() if isinstance(one, MqttLink)]
        links += [one.link for one in self.senders.values() if isinstance(one, MqttSender)]
        for link in links:
            if not link.subscribed.wait(max(0.0, deadline - time.monotonic())):
                raise ChaosError(f"{link.name} did not come back to its broker")

    def await_ready(self) -> None:
        """Until /readyz says so. Told as a problem if it does not."""
        deadline = time.monotonic() + READY_S
        while problems := self.gateway.problems():
            if not self.gateway.running:
                self.note_end()
                return
            if time.monotonic() > deadline:
                self.verdict.problems.append(f"not ready {READY_S:.0f} s after the last fault: {problems}")
                return
            time.sleep(0.1)

    def note_end(self) -> None:
        """The gateway has ended though nobody hurt it."""
        self.verdict.problems.append(f"the gateway ended by itself, code {self.gateway.ended_code}: {self.gateway.tail()[-600:]}")
        self.gateway.restart_if_ended()

    def drain(self) -> None:
        """Until everything that is owed has come, or nothing comes any more."""
        arrivals, since = -1, time.monotonic()
        while self.ledger.missing():
            if self.ledger.arrivals != arrivals:
                arrivals, since = self.ledger.arrivals, time.monotonic()
            quiet = time.monotonic() - since
            if quiet > STUCK_S or (quiet > QUIET_S and not self.gateway.problems() and not self.gateway.backlog()):
                return
            time.sleep(0.2)

    # The end

    def finish(self) -> Verdict:
        """After the last fault is healed: wait for what is owed, and judge."""
        for process in self.processes:
            process.restart_if_ended()
        for process in self.processes:
            process.wait_ready()
        self.await_links()
        self.await_ready()
        self.hush()
        self._await_acks()
        self._await_history()
        self.drain()
        self._await_history()
        self.gateway.metrics()
        self._check_reader()
        self._read_letters()
        self.ledger.gap_records += int(self.gateway.gap_records)
        assert self.poller is not None
        if self.poller.gaps:
            self.verdict.notes.append(f"Poll told gaps: {self.poller.gaps[:5]}")
        self.verdict.notes += [f"/readyz told: {told}" for told in sorted(self.gateway.told)]
        for process in self.processes:
            self.verdict.notes += process.notes
            if tracebacks := process.log.read_text(errors="replace").count("Traceback (most recent call last)"):
                self.verdict.notes.append(f"{process.name} printed {tracebacks} tracebacks")
            if process.exits:
                self.verdict.notes.append(f"{process.name} ended by itself {process.exits} times and was started again")
        unheard = sum(one.link.unheard for one in self.senders.values() if isinstance(one, MqttSender))
        if unheard:
            self.verdict.notes.append(f"{unheard} messages were acknowledged by a broker that had no subscriber for them")
        self.ledger.judge(self.verdict)
        self.verdict.faults |= self.tally
        self.verdict.kills = sum(count for name, count in self.tally.items() if name.startswith("kill"))
        return self.verdict

    @property
    def processes(self) -> list[Process]:
        return [*self.brokers.values(), *(one for one in (self.service, self.gateway, self.reader) if one is not None)]

    def _await_acks(self) -> None:
        deadline = time.monotonic() + READY_S
        while any(isinstance(one, MqttSender) and one.link.unacked for one in self.senders.values()):
            if time.monotonic() > deadline:
                self.verdict.problems.append(f"a broker left {self.ledger.unacked()} messages without PUBACK")
                return
            time.sleep(0.1)

    def _await_history(self) -> None:
        """Poll has shown what there is now."""
        assert self.poller is not None
        now, deadline = time.monotonic(), time.monotonic() + READY_S
        while self.poller.caught_up_at < now:
            if time.monotonic() > deadline:
                self.verdict.problems.append(f"Poll did not come to the end of the history within {READY_S:.0f} s")
                return
            time.sleep(0.1)

    def _check_reader(self) -> None:
        """Each record that Poll has shown has reached the reader's file."""
        if self.reader is None:
            return
        recorded = {str(topic) for topic in UP}
        missing, size, since = {b""}, -1, time.monotonic()
        path = self.folder / "reader.out"
        while missing:
            lines = path.read_text(errors="replace").splitlines()
            have = {bytes.fromhex(line) for line in lines if len(line) == 32 and not line.startswith("gap")}
            missing = self.ledger.shown_ids(recorded) - have
            if len(lines) != size:
                size, since = len(lines), time.monotonic()
            if time.monotonic() - since > 2 * QUIET_S:
                break
            time.sleep(0.2)
        gaps = sum(line.startswith("gap") for line in lines)
        if missing:
            self.verdict.lost += len(missing)
            self.verdict.examples.append(f"lost: the reader never had {len(missing)} records that Poll shows ({gaps} gaps told)")
        self.verdict.faults["records read by the reader"] = len(have)

    def _read_letters(self) -> None:
        """What became a dead letter is told; read by the command line, as a person would."""
        command = [sys.executable, "-m", "streamer.cli", "dead-letters", "--data-dir", str(self.data_dir), "--json", "--limit", "10000"]
        answer = subprocess.run(command, capture_output=True, text=True, check=False)
        if answer.returncode != 0:
            self.verdict.notes.append(f"dead-letters failed: {answer.stderr.strip()[-300:]}")
        letters = [json.loads(line) for line in answer.stdout.splitlines() if line.startswith("{")]
        self.ledger.tell(bytes.fromhex(letter["id"].replace("-", "")) for letter in letters)
        if letters:
            reasons = Counter(f"{letter['code']}: {letter['reason']}"[:120] for letter in letters)
            self.verdict.notes.append(f"{len(letters)} dead letters, most often {reasons.most_common(2)}")

    def close(self) -> None:
        """End everything, however far it came."""
        self._talking.clear()
        if self.poller is not None:
            self.poller.end()
        for process in [*self.processes] if hasattr(self, "gateway") else [*self.brokers.values()]:
            process.close()
        if self.service is not None:
            self.service.close()
        for close in self._closers:
            threading.Thread(target=close, daemon=True).start()  # a client without its broker may take its time
        machine.unmount_below(self.folder)
