"""One world: brokers, one or two gateways, raw clients on both sides, and the messages between them.

vehicle (MQTT in-vehicle, or Zenoh)  <->  gateway (data_dir: perhaps a small disk)  <->  cloud (MQTT off-vehicle)
 up: topics that the cloud wants, notifications    Poller, reader: the history    down: publishes, notifications

With two gateways, a broker on the road between them, and an in-vehicle broker in the cloud, too.
"""

from __future__ import annotations

import json
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from campaigns.chaos import machine
from campaigns.chaos.judges import (
    SUBSCRIBED,
    Caller,
    MqttLink,
    MqttSender,
    Poller,
    PublisherSender,
    Sender,
    ZenohLink,
    ZenohSender,
    flow_of,
    mqtt_caller,
    name_in,
    subscribe,
    zenoh_caller,
)
from campaigns.chaos.ledger import Ledger, Verdict
from campaigns.chaos.plan import (
    ANNOUNCEMENTS,
    CLOUD,
    CLOUD_APP,
    DOWN,
    LATE,
    LATE_APP,
    PUBLISHER,
    ROAD,
    TO_CLOUD,
    TO_ROAD,
    UP,
    VEHICLE,
    VEHICLE_APP,
    ZENOH_RETRY,
    Flow,
    Places,
    Plan,
    access_rules,
    cloud_config,
    vehicle_config,
)
from campaigns.chaos.processes import Broker, ChaosError, Gateway, Process, publisher, reader, service
from campaigns.chaos.proxy import Datagrams, Link, Proxy
from campaigns.chaos.wire import NOTIFICATION, PUBLISH, Message, Uri
from transports.ports import free_port

LATE_S_MAX: Final = 3.0  # between two subscriptions during faults
SETTLE_S_MAX: Final = 60.0  # for messages to pass before the first fault


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
        self.gateways: list[Gateway] = []
        self.gateway: Gateway  # the one that faults affect
        self.proxies: dict[str, Link] = {}
        self.service: Process | None = None
        self.reader: Process | None = None
        self.publisher: Process | None = None
        self.poller: Poller | None = None
        self.follower: Poller | None = None  # poller of the follower's log, if that is another one
        self._closers: list[Callable[[], None]] = []
        self._talking = threading.Event()
        self.data_dir = self.folder / "data"
        self.zenoh_port, self.road_port = free_port(), free_port()
        self.io: machine.IoFault | None = None
        self.clock: machine.Clock | None = None
        self.senders: dict[str, Sender] = {}
        self.hearers: dict[str, MqttLink | ZenohLink] = {}
        self.held_max = 0  # maximum of records held at once because a broker refused them
        self.flows = self.plan.flows  # later also those that are subscribed to

    # Building

    def build(self) -> None:
        """Raises ChaosError if the world does not work before anybody hurts it."""
        for side in self.plan.brokers:
            access = access_rules(()) if self.plan.access else None
            self.brokers[side] = broker = Broker(f"{side}-broker", self.folder, self.tally, access)
            broker.start()
            broker.wait_ready()
        for name in self.plan.proxied:
            self.proxies[name] = self._link(name)
        self._make_gateways()
        if self.plan.interest == "remote":
            self.service = service(self.folder, CLOUD, self.brokers[CLOUD].port, self.tally)
        for process in (*self.gateways, *([self.service] if self.service is not None else [])):
            process.start()
        if self.plan.follows == "publisher":
            self._start_publisher()
        for process in self.processes:
            process.wait_ready()
        self._join()
        if self.publisher is not None:
            self._await_announcement()
        self._subscribe()
        self._settle()

    def _link(self, name: str) -> Link:
        if self.plan.road == "dds":
            return Datagrams()
        if name in self.brokers:
            return Proxy(self.brokers[name].port)
        if ROAD in self.brokers:
            return Proxy(self.brokers[ROAD].port)
        return Proxy(self.road_port if self.plan.two else self.zenoh_port)

    def _start_publisher(self) -> None:
        sender = self.senders[VEHICLE] = PublisherSender(self.ledger)
        link = self.proxies[ROAD]
        assert isinstance(link, Proxy)
        options = {
            "settings": {"mode": "peer", "connect": [f"tcp/127.0.0.1:{link.port}"], "settings": ZENOH_RETRY},
            "authority": PUBLISHER.authority,
            "entity": PUBLISHER.entity,
            "log": str(self.folder / "publisher.db"),
            "port": sender.port,
        }
        self.publisher = publisher(self.folder, options, self.tally)
        self.publisher.start()

    def _ports(self, to_road: str) -> dict[str, int]:
        """Of the brokers, as the gateway reaches them that goes to the road by this way."""
        links = {side: self.proxies.get(side) for side in self.brokers}
        if to_road in self.proxies:
            links[ROAD] = self.proxies[to_road]
        return {side: link.port if isinstance(link, Proxy) else self.brokers[side].port for side, link in links.items()}

    def _make_gateways(self) -> None:
        plan = self.plan
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
        static_file = self.folder / "subscriptions.json"
        listed = {str(topic): [str(CLOUD_APP)] for topic in UP} | {str(topic): [str(VEHICLE_APP)] for topic in DOWN}
        static_file.write_text(json.dumps(listed))
        road = self.proxies.get(ROAD)
        road_port = road.port if isinstance(road, Proxy) else 0
        places = Places(
            self.data_dir, free_port(), self._ports(TO_ROAD), self.zenoh_port, static_file, road_port=road_port
        )
        self._add_gateway("gateway", vehicle_config(plan, places), places, environment)
        if plan.two:
            places = places._replace(
                data_dir=self.folder / "cloud-data",
                admin_port=free_port(),
                ports=self._ports(TO_CLOUD),
                road_port=self.road_port,
            )
            self._add_gateway("cloud-gateway", cloud_config(plan, places), places, {})

    def _add_gateway(self, name: str, config: str, places: Places, environment: dict[str, str]) -> None:
        path = self.folder / f"{name}.toml"
        path.write_text(config)
        self.gateway = Gateway(name, self.folder, path, places.data_dir, places.admin_port, self.tally, environment)
        self.gateways.append(self.gateway)

    def _join(self) -> None:
        """Connect the raw clients."""
        cloud, off_vehicle = self.brokers[CLOUD].port, self.plan.off_vehicle[CLOUD]

        def hears(message: Message) -> None:
            if message.type in (PUBLISH, NOTIFICATION) and message.source.entity == UP[0].entity:
                self.ledger.arrived("push", self._key(message), flow_of(message), message.payload)

        filters = (f"+/{CLOUD}",) if off_vehicle else (f"{VEHICLE}/#",)
        self.hearers[CLOUD] = MqttLink(cloud, "judge-cloud", filters=filters, heard=hears)
        self.senders[CLOUD] = MqttSender(self.ledger, cloud, "sender-cloud", off_vehicle=off_vehicle)
        if self.plan.vehicle == "mqtt5":
            vehicle = self.brokers[VEHICLE].port
            self.hearers[VEHICLE] = MqttLink(vehicle, "judge-vehicle", filters=(f"{CLOUD}/#",), heard=hears)
            self.senders[VEHICLE] = MqttSender(self.ledger, vehicle, "sender-vehicle", off_vehicle=False)
        else:
            self.hearers[VEHICLE] = ZenohLink(self.zenoh_port, (f"up/{CLOUD}/**",), hears)
            if self.publisher is None:
                self.senders[VEHICLE] = ZenohSender(self.ledger, self.zenoh_port)
        self._closers += [one.close for one in (*self.hearers.values(), *self.senders.values())]
        for link in self.hearers.values():
            if isinstance(link, MqttLink) and not link.subscribed.wait(SETTLE_S_MAX):
                raise ChaosError("a judge could not subscribe")
        # Zenoh keeps nothing for who is away: what was missed there is pulled.
        pulled = {str(topic) for topic in DOWN} if self.plan.vehicle == "zenoh" else set()
        followed = self.plan.is_followed if self.publisher is not None else (lambda _: False)
        caller = self._caller(Uri(VEHICLE, 0x9101, 1, 0))
        self.poller = Poller(self.ledger, caller, VEHICLE, pulled, followed=followed, key=self._key)
        if self.plan.two and self.plan.follows:
            caller = self._caller(Uri(CLOUD, 0x9101, 1, 0))
            self.follower = Poller(self.ledger, caller, CLOUD, set(), followed=self._is_from_vehicle)

    def _is_from_vehicle(self, flow: str) -> bool:
        return flow.startswith(f"up://{VEHICLE}/") and self.plan.is_followed(flow)

    def _key(self, message: Message) -> bytes:
        """The name of a message in the ledger."""
        is_publishers = self.publisher is not None and message.source._replace(resource=0) == PUBLISHER
        return name_in(message.payload) if is_publishers and message.type == PUBLISH else message.id

    def _caller(self, me: Uri) -> Caller:
        """Somebody who calls, on the network of its authority."""
        link: MqttLink | ZenohLink
        if me.authority == VEHICLE and self.plan.vehicle == "zenoh":
            caller, link = zenoh_caller(self.zenoh_port, me)
        else:
            port, off_vehicle = self.brokers[me.authority].port, self.plan.off_vehicle[me.authority]
            caller, link = mqtt_caller(port, f"caller-{me.entity:X}-{me.authority}", me, off_vehicle=off_vehicle)
        self._closers.append(link.close)
        return caller

    def _await_announcement(self) -> None:
        """A gateway follows whom it has heard of. From then on a subscriber's answer counts, whatever is hurt next."""
        is_heard = threading.Event()
        link = ZenohLink(self.zenoh_port, (f"up/{ANNOUNCEMENTS.segments}/**",), lambda _: is_heard.set())
        self._closers.append(link.close)
        if not is_heard.wait(SETTLE_S_MAX):
            raise ChaosError("the publisher did not announce itself")

    def _subscribe(self) -> None:
        """Raw clients tell a uSubscription what they want, and see that it stands."""
        if self.plan.service is None:
            return
        wanted = [(CLOUD_APP, self.plan.service, UP)] + ([(VEHICLE_APP, VEHICLE, DOWN)] if self.plan.two else [])
        deadline = time.monotonic() + SETTLE_S_MAX
        for who, at, topics in wanted:
            caller = self._caller(who)
            for topic in topics:
                while (state := subscribe(caller, at, topic)) != SUBSCRIBED:
                    if time.monotonic() > deadline:
                        raise ChaosError(f"{topic} was not subscribed to at {at}: state {state}")
                    time.sleep(0.2)

    def _settle(self) -> None:
        """Send until messages of every flow arrive; then start to count."""
        assert self.poller is not None
        for poller in self.pollers:
            poller.start()
        deadline = time.monotonic() + SETTLE_S_MAX
        while True:
            for flow in self.plan.flows:
                self.say(flow)
            time.sleep(0.5)
            if not (silent := self.ledger.silent_flows()):
                break
            if time.monotonic() > deadline:
                raise ChaosError(f"nothing came of {silent}; problems: {[one.problems() for one in self.gateways]}")
        if self.plan.reader:
            self._start_reader()
        if any(fault.startswith("broker") for fault in self.plan.faults):
            for broker in self.brokers.values():  # its sessions are on its disk from now on
                broker.stop()
                broker.start()
                broker.wait_ready()
            self.await_links(SETTLE_S_MAX)
        self.ledger.begin()
        self.tally.clear()

    def _start_reader(self) -> None:
        settings = (
            {"port": self.brokers[VEHICLE].port}
            if self.plan.vehicle == "mqtt5"
            else {"mode": "client", "connect": [f"tcp/127.0.0.1:{self.zenoh_port}"], "connect_timeout_ms": 60_000}
        )
        at, transport = VEHICLE, str(self.plan.vehicle)
        if self.plan.epochs:
            at, transport, settings = CLOUD, "mqtt5", {"port": self.brokers[CLOUD].port}
        options = {
            "transport": transport,
            "settings": settings,
            "authority": at,
            "service": at,
            "epochs": self.plan.epochs,
            "cursor": str(self.folder / "reader.cursor"),
            "out": str(self.folder / "reader.out"),
            "topics": [str(topic) for topic in UP],
        }
        self.reader = reader(self.folder, options, self.tally)
        self.reader.start()
        self.reader.wait_ready()

    def log(self, text: str) -> None:
        """For who looks for the reason of a failure: the times are those of the examples."""
        with (self.folder / "faults.log").open("a") as log:
            log.write(f"{self.ledger.now():.2f} {text}\n")

    # Talking

    def subscribe_late(self) -> None:
        """Subscribe to one more topic at intervals. Its messages count from the answer SUBSCRIBED on, even if processes
        die then."""
        service, rng = self.plan.service, random.Random(self.rng.random())
        if service is None:
            return
        caller = self._caller(LATE_APP)

        def work() -> None:
            for topic in LATE:
                time.sleep(rng.uniform(0.2, LATE_S_MAX))
                while self._talking.is_set() and subscribe(caller, service, topic) != SUBSCRIBED:
                    time.sleep(0.1)
                if not self._talking.is_set():
                    return
                self.tally["subscriptions"] += 1
                self.flows.append(Flow(VEHICLE, topic, None))

        threading.Thread(target=work, daemon=True).start()

    def say(self, flow: Flow) -> None:
        text = f"{flow.source}#{self.rng.random()}".encode()
        self.senders[flow.side].publish(flow.source, flow.sink, text + b"." * self.rng.choice((0, 60, 400)))

    def talk(self) -> None:
        """Start sending at the plan's rate, in bursts, until `hush`."""
        self._talking.set()
        rng = random.Random(self.rng.random())

        def work() -> None:
            while self._talking.is_set():
                burst = rng.choice((1, 1, 2, 5, 20, 60))
                for _ in range(burst):
                    flow = rng.choice(self.flows)
                    if not self.senders[flow.side].busy():
                        self.say(flow)
                time.sleep(rng.uniform(0.5, 1.5) * burst / self.plan.rate)

        self._talker = threading.Thread(target=work, daemon=True)
        self._talker.start()
        self.subscribe_late()

    def hush(self) -> None:
        self._talking.clear()
        self._talker.join()

    @property
    def pollers(self) -> list[Poller]:
        return [one for one in (self.poller, self.follower) if one is not None]

    @property
    def processes(self) -> list[Process]:
        return [
            *self.brokers.values(),
            *(one for one in (self.service, *self.gateways, self.reader, self.publisher) if one is not None),
        ]

    def links_of(self, side: str) -> list[MqttLink]:
        """The raw clients at the broker of `side`, but for those that only call."""
        ends = [one for ends in (self.senders, self.hearers) for at, one in ends.items() if at == side]
        links = [one.link if isinstance(one, MqttSender) else one for one in ends]
        return [one for one in links if isinstance(one, MqttLink)]

    def await_links(self, timeout_s: float) -> None:
        """Wait until every raw MQTT client is connected and subscribed again. Raises ChaosError."""
        deadline = time.monotonic() + timeout_s
        for side in self.brokers:
            for link in self.links_of(side):
                if not link.subscribed.wait(max(0.0, deadline - time.monotonic())):
                    raise ChaosError(f"{link.name} did not come back to its broker")

    def await_gateways(self, timeout_s: float) -> bool:
        """Until all of them are ready; False if that takes longer."""
        deadline = time.monotonic() + timeout_s
        while any(gateway.problems() for gateway in self.gateways):
            if time.monotonic() > deadline:
                return False
            time.sleep(0.1)
        return True

    def epochs_read(self) -> list[dict[str, Any]]:
        """Returns what the reader has written of each epoch, without records that came before anything was followed."""
        lines = (self.folder / "reader.out").read_text(errors="replace").splitlines()
        epochs = [json.loads(line) for line in lines if line.startswith("{") and line.endswith("}")]
        return [epoch for epoch in epochs if epoch["time"] is not None]

    def await_epochs(self, timeout_s: float) -> None:
        """Wait until the reader has an epoch, if it reads them: a fault of half a minute may delay the hand-over, and
        would leave nothing to judge. Raises ChaosError."""
        deadline = time.monotonic() + timeout_s
        while self.plan.epochs and not self.epochs_read():
            if time.monotonic() > deadline:
                raise ChaosError(f"{timeout_s:.0f} s without a fault, and the reader has no epoch")
            time.sleep(0.2)

    def note_ends(self) -> None:
        """A gateway that has ended though nobody hurt it is a problem, and is started again."""
        for gateway in self.gateways:
            if not gateway.running:
                said = gateway.tail()[-600:]
                self.verdict.problems.append(f"{gateway.name} ended by itself, code {gateway.ended_code}: {said}")
                gateway.restart_if_ended()

    def close(self) -> None:
        """End everything, also after a failure."""
        self._talking.clear()
        for poller in self.pollers:
            poller.end()
        for process in self.processes:
            process.close()
        for close in self._closers:
            threading.Thread(target=close, daemon=True).start()  # a client without its broker may take its time
        machine.unmount_below(self.folder)
