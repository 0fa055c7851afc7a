"""The world: two vehicles and a cloud behind one mosquitto with TLS, passwords and access rules; raw clients count.

raw Zenoh -- vin1 --.
                     broker: TLS, passwords, an access file -- cloud -- broker (plain) -- raw MQTT
raw Zenoh -- vin2 --'

Both vehicles have an ecu1 and an ecu2, which are ecu1.vin1, ... outside. The load goes on all the time.
"""

from __future__ import annotations

import os
import random
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Final, NamedTuple

from campaigns.chaos import machine
from campaigns.chaos.judges import (
    SUBSCRIBED,
    Caller,
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
from campaigns.chaos.processes import Broker, ChaosError
from campaigns.chaos.wire import NOTIFICATION, PUBLISH, REQUEST, RESPONSE, Message, Uri, new_id
from campaigns.operate.book import Book
from campaigns.operate.sites import Site, Table
from tests.certificates import DAY, TestAuthority
from tools.broker import password_line
from transports.ports import free_port

VINS: Final = ("vin1", "vin2")
HOSTS: Final = ("ecu1", "ecu2")  # in each vehicle
CLOUD: Final = "backend"
DATA_BYTES: Final = 224 << 20  # of the small disk of vin1
SETTLE_S_MAX: Final = 90.0
CALL_S: Final = 3.0  # ttl of a request
LATE_S: Final = 3.0  # by this much later an answer may say that it has expired
CALLS_PAUSE_S: Final = 0.3
APP: Final = 0x8001
CLOUD_APP: Final = Uri(CLOUD, 0x9001, 1, 0)
# the last commit of the version before, whose data the present one has to read
OLD: Final = "5634de82b394d3f2a604d2712eecd88f4616b36f"
ROOT: Final = Path(__file__).resolve().parents[2]
LETTER: Final = Uri("ecu1", APP, 1, 0x8003)  # of vin1: one message that is too large for the broker
METHOD: Final = Uri(CLOUD, 0x9000, 1, 1)


class Flow(NamedTuple):
    """Messages of one source to one sink, whose order counts."""

    vin: str
    goes_up: bool
    source: Uri
    sink: Uri | None


def flows_of(vin: str) -> list[Flow]:
    place = VINS.index(vin)
    up = [Uri("ecu1", APP, 1, 0x8001), Uri("ecu1", APP, 1, 0x8002), Uri("ecu2", APP, 1, 0x8001)]
    down = [Uri(CLOUD, APP, 1, 0x8001 + 16 * place), Uri(CLOUD, APP, 1, 0x8002 + 16 * place)]
    return [
        *(Flow(vin, True, topic, None) for topic in up),
        *(Flow(vin, False, topic, None) for topic in down),
        Flow(vin, True, Uri("ecu1", APP, 1, 0x9001), CLOUD_APP),
        Flow(vin, False, Uri(CLOUD, APP, 1, 0x9001), Uri(f"ecu1.{vin}", 0x9001, 1, 0)),
    ]


def outside(vin: str, uri: Uri) -> Uri:
    """The name that `uri` of a vehicle has in the cloud."""
    return uri._replace(authority=f"{uri.authority}.{vin}") if uri.authority in HOSTS else uri


def access_file(denied: tuple[tuple[str, str], ...] = ()) -> str:
    """The broker's access file (docs/names.md). `denied`: (user, topic) that a wrong rule keeps from writing."""
    lines: list[str] = []
    for vin in VINS:
        lines.append(f"user {vin}")
        lines += [f"topic deny {topic}" for user, topic in denied if user == vin]
        for host in HOSTS:
            lines += [f"topic write {host}.{vin}/+", f"topic read +/{host}.{vin}"]
    lines.append(f"user {CLOUD}")
    lines += [f"topic deny {topic}" for user, topic in denied if user == CLOUD]
    lines += [f"topic write {CLOUD}/+", f"topic read +/{CLOUD}", "topic read $SYS/broker/publish/messages/dropped"]
    return "\n".join([*lines, ""])


class Secrets:
    """The keys, certificates and passwords of the fleet, in files at fixed places."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.folder, self._made = folder, 0
        self.authority = self.new_authority()
        self.ca = folder / "ca.pem"
        self.trust(self.authority)
        self.passwords = {user: f"first-{user}" for user in (*VINS, CLOUD)}
        for user in self.passwords:
            self.issue(user)
            self.write_password(user)
        self.issue("broker")
        self.write_passwords()

    def new_authority(self) -> TestAuthority:
        self._made += 1
        place = self.folder / f"ca{self._made}"
        place.mkdir()
        return TestAuthority(place, f"ca{self._made}")

    def trust(self, *authorities: TestAuthority) -> None:
        self._put(self.ca, b"".join(one.ca.read_bytes() for one in authorities))

    def issue(self, name: str, ends_in: timedelta = 300 * DAY) -> None:
        """A new certificate and key for NAME, in the files of the old ones."""
        for made in self.authority.issue(name, ends_in):
            self._put(self.folder / made.name, made.read_bytes())

    def write_password(self, user: str, password: str | None = None) -> None:
        """In the file of the gateway that logs in."""
        self._put(self.folder / f"{user}.password", (password or self.passwords[user]).encode() + b"\n")

    def write_passwords(self) -> None:
        """In the file of the broker."""
        lines = "".join(password_line(user, password) for user, password in self.passwords.items())
        self._put(self.folder / "passwords", lines.encode())

    def _put(self, path: Path, data: bytes) -> None:
        fresh = path.with_suffix(".new")
        fresh.write_bytes(data)
        fresh.chmod(0o600)
        fresh.replace(path)

    def tls(self, user: str) -> Table:
        """Settings of a gateway."""
        return {
            "ca_file": self.ca,
            "cert_file": self.folder / f"{user}.pem",
            "key_file": self.folder / f"{user}.key",
        }

    @property
    def broker_settings(self) -> list[str]:
        return [
            "allow_anonymous false",
            f"password_file {self.folder}/passwords",
            f"cafile {self.ca}",
            f"certfile {self.folder}/broker.pem",
            f"keyfile {self.folder}/broker.key",
            "require_certificate true",
        ]


class Fleet:
    def __init__(self, folder: Path, rate: float, seed: int, *, with_old: bool = False) -> None:
        """`rate`: messages a second, all flows together. `with_old`: vin2 begins with the version before, where there
        is one."""
        self.why_not_old = _why_not_old(folder / "old") if with_old else "the fleet was built without it"
        self.folder, self._rate, self._rng = folder, rate, random.Random(seed)
        self.book, self.tally = Book(), Counter[str]()
        self._closers: list[Callable[[], None]] = []
        self._going = threading.Event()
        self._zenoh_ports = {vin: free_port() for vin in VINS}
        self._senders: dict[str, Sender] = {}
        self._askers: dict[str, ZenohLink] = {}
        self.pollers: dict[str, Poller] = {}
        self.sites: dict[str, Site] = {}
        self.clock: machine.Clock | None = None
        self.flows = [flow for vin in VINS for flow in flows_of(vin)]

    # Building

    def build(self) -> None:
        """Raises ChaosError if the world does not work before anything is done to it."""
        self.secrets = Secrets(self.folder / "secrets")
        self.broker = Broker("broker", self.folder, self.tally, access_file(), self.secrets.broker_settings)
        self.inner = Broker("cloud-broker", self.folder, self.tally)
        for broker in (self.broker, self.inner):
            broker.start()
            broker.wait_ready()
        for name, config in {**{vin: self._vehicle(vin) for vin in VINS}, CLOUD: self._cloud()}.items():
            environment: dict[str, str] = {}
            if name == VINS[0] and not machine.no_faketime():
                self.clock = machine.Clock(self.folder)
                environment = self.clock.environment
            site = self.sites[name] = Site(name, self.folder, config, environment)
            site.data_dir.mkdir(exist_ok=True)
            if name == VINS[0] and not machine.no_tmpfs():
                machine.mount(site.data_dir, DATA_BYTES)
            if name == VINS[1] and not self.why_not_old:
                old = {"PYTHONPATH": str(self.folder / "old"), "PYTHONSAFEPATH": "1", "UP_STREAMER_COMPILED": "0"}
                site.gateway = site.made(old)
            site.gateway.start()
        for site in self.sites.values():
            site.gateway.wait_ready()
        self._join()
        self._subscribe()
        self._settle()

    def _streamer(self, name: str, authority: str) -> Table:
        streamer = {
            "authority": authority,
            "data_dir": self.folder / f"{name}-data",
            "admin": f"127.0.0.1:{free_port()}",
            "log_level": "info",
        }
        return {"streamer": streamer, "egress": {"retry_max_ms": 500}}

    def _road(self, user: str) -> Table:
        """Settings of a gateway's link to the broker."""
        return {
            "host": "127.0.0.1",
            "port": self.broker.port,
            "mode": "off-vehicle",
            "client_id": f"{user}-gateway",
            "session_expiry_s": 4294967295,
            "username": user,
            "password_file": self.secrets.folder / f"{user}.password",
            "tls": self.secrets.tls(user),
        }

    def _vehicle(self, vin: str) -> Table:
        listen = {"mode": "router", "listen": [f"tcp/127.0.0.1:{self._zenoh_ports[vin]}"]}
        home = {"name": "vehicle", "transport": "zenoh", "authorities": list(HOSTS), "settings": listen}
        road = {"name": "offboard", "transport": "mqtt5", "authorities": [CLOUD], "suffix": vin}
        return self._streamer(vin, "ecu1") | {
            "endpoint": [
                home | {"usubscription": "embedded"},
                road | {"usubscription": "none", "settings": self._road(vin)},
            ],
            "history": {
                "record": [f"//{host}/FFFFFFFF/FF/FFFF" for host in HOSTS],
                "retention_mib": 64,
                "reserve_mib": 16,
            },
            "usubscription": {"answers_for": ["ecu2"]},
        }

    def _cloud(self) -> Table:
        inside = {"port": self.inner.port, "client_id": "backend-home", "session_expiry_s": 86_400}
        home = {"name": "cloud", "transport": "mqtt5", "authorities": [CLOUD], "usubscription": "embedded"}
        road = {"name": "fleet", "transport": "mqtt5", "authorities": ["*"], "suffix": ""}
        return self._streamer(CLOUD, CLOUD) | {
            "endpoint": [home | {"settings": inside}, road | {"settings": self._road(CLOUD)}],
        }

    # Raw clients

    def _named(self, vin: str) -> Callable[[Message], str]:
        """Names of flows in the book: as the cloud calls them."""

        def name(message: Message) -> str:
            sink = message.sink
            if sink is not None and not sink.is_any:
                sink = outside(vin, sink)
            return flow_of(replace(message, source=outside(vin, message.source), sink=sink))

        return name

    def _hears(self, name: Callable[[Message], str]) -> Callable[[Message], None]:
        def heard(message: Message) -> None:
            if message.type in (PUBLISH, NOTIFICATION) and message.source.entity == APP:
                self.book.arrived("push", message.id, name(message), message.payload)

        return heard

    def _keep(self, link: Any) -> Any:
        self._closers.append(link.close)
        return link

    def _join(self) -> None:
        inner = self.inner.port
        filters = tuple(f"{host}.{vin}/#" for vin in VINS for host in HOSTS)
        hearer = self._keep(MqttLink(inner, "judge", filters=filters, heard=self._hears(flow_of)))
        self._senders[CLOUD] = self._keep(MqttSender(self.book, inner, "sender", off_vehicle=False))
        answering = f"+/+/+/+/+/{METHOD.segments}"
        server = self._keep(MqttLink(inner, "server", filters=(answering,), heard=self._answers_with(lambda: server)))
        for vin in VINS:
            port, name = self._zenoh_ports[vin], self._named(vin)
            self._keep(ZenohLink(port, (f"up/{CLOUD}/**",), self._hears(name)))
            self._senders[vin] = self._keep(ZenohSender(self.book, port, name))
            self._serve_in(vin)
            caller, link = zenoh_caller(port, Uri("ecu1", 0x9101, 1, 0))
            self._keep(link)
            pulled = {flow_name(flow) for flow in self.flows if flow.vin == vin and not flow.goes_up}
            self.pollers[vin] = Poller(self.book, caller, "ecu1", pulled, flow=name)
            _, self._askers[vin] = asking = zenoh_caller(port, Uri("ecu1", 0x9102, 1, 0))
            self._call_from(asking, METHOD)
            me = Uri(CLOUD, 0x9002 + VINS.index(vin), 1, 0)
            caller_link = mqtt_caller(inner, f"caller-{vin}", me, off_vehicle=False)
            self._call_from(caller_link, Uri(f"ecu2.{vin}", METHOD.entity, 1, 1))
        for link in (hearer, server):
            if not link.subscribed.wait(SETTLE_S_MAX):
                raise ChaosError("a judge could not subscribe")

    def _serve_in(self, vin: str) -> None:
        key = f"up/*/*/*/*/*/{METHOD._replace(authority='ecu2').segments}"
        link = self._keep(ZenohLink(self._zenoh_ports[vin], (key,), self._answers_with(lambda: link)))

    def _answers_with(self, link: Callable[[], MqttLink | ZenohLink]) -> Callable[[Message], None]:
        """Who answers each request with its payload."""

        def heard(request: Message) -> None:
            if request.type != REQUEST or request.sink is None:
                return
            at, payload = link(), request.payload
            ends = request.sink, request.source
            answer = Message(new_id(), RESPONSE, *ends, payload, ttl_ms=request.ttl_ms, reqid=request.id)
            if isinstance(at, MqttLink):
                at.send(answer, False, lambda _: None)
            else:
                at.send(answer)

        return heard

    def _call_from(self, end: tuple[Caller, MqttLink | ZenohLink], method: Uri) -> None:
        caller, link = end
        self._keep(link)

        def work() -> None:
            self._going.wait()
            while self._going.is_set():
                request = self.book.asked(f"{caller.me} > {method}")
                answer = caller.call(method, os.urandom(16), CALL_S, LATE_S)
                request.over(None if answer is None else answer.commstatus or 0)
                time.sleep(CALLS_PAUSE_S)

        threading.Thread(target=work, daemon=True).start()

    def _subscribe(self) -> None:
        """The applications say what they want, and see that it stands."""
        caller, link = mqtt_caller(self.inner.port, "subscriber", CLOUD_APP, off_vehicle=False)
        self._keep(link)
        publishes = [flow for flow in self.flows if flow.sink is None]
        for flow in publishes:
            if flow.goes_up:
                self._subscribe_to(caller, CLOUD, outside(flow.vin, flow.source))
        self._subscribe_to(caller, CLOUD, outside(VINS[0], LETTER))
        for vin in VINS:
            caller, zenoh_link = zenoh_caller(self._zenoh_ports[vin], Uri("ecu1", 0x9001, 1, 0))
            self._keep(zenoh_link)
            for flow in publishes:
                if flow.vin == vin and not flow.goes_up:
                    self._subscribe_to(caller, "ecu1", flow.source)

    def _subscribe_to(self, caller: Caller, service: str, topic: Uri) -> None:
        deadline = time.monotonic() + SETTLE_S_MAX
        while (state := subscribe(caller, service, topic)) != SUBSCRIBED:
            if time.monotonic() > deadline:
                raise ChaosError(f"{topic} was not subscribed to at {service}: state {state}")
            time.sleep(0.2)

    def _settle(self) -> None:
        """Send until messages of every flow arrive, then start to count."""
        for poller in self.pollers.values():
            poller.start()
        deadline = time.monotonic() + SETTLE_S_MAX
        while True:
            for flow in self.flows:
                self._say(flow)
            time.sleep(0.5)
            if not (silent := self.book.silent_flows()):
                break
            if time.monotonic() > deadline:
                troubles = {name: site.lines() for name, site in self.sites.items()}
                raise ChaosError(f"nothing came of {silent}; /readyz: {troubles}")

    # Load

    def ask(self, vin: str, count: int) -> None:
        """Send so many requests in a vehicle, and don't wait for the answers."""
        me, ttl_ms = Uri("ecu1", 0x9102, 1, 0), int(CALL_S * 1000)
        for _ in range(count):
            self._askers[vin].send(Message(new_id(), REQUEST, me, METHOD, b"?", ttl_ms=ttl_ms))

    def say_letter(self, size: int) -> str:
        """Publish a message of so many bytes. Returns the name of its flow."""
        flow = Flow(VINS[0], True, LETTER, None)
        self._senders[flow.vin].publish(flow.source, flow.sink, os.urandom(size))
        return flow_name(flow)

    def _say(self, flow: Flow) -> None:
        payload = os.urandom(8).hex().encode() + b"." * self._rng.choice((0, 60, 400))
        self._senders[flow.vin if flow.goes_up else CLOUD].publish(flow.source, flow.sink, payload)

    def talk(self) -> None:
        """Send at the rate, until `close`; requests, too."""
        self._going.set()

        def work() -> None:
            due = time.monotonic()
            while self._going.is_set():
                flow = self._rng.choice(self.flows)
                if not self._senders[flow.vin if flow.goes_up else CLOUD].busy():
                    self._say(flow)
                due = max(due + 1 / self._rate, time.monotonic() - 1)
                time.sleep(max(0.0, due - time.monotonic()))

        threading.Thread(target=work, daemon=True).start()

    def close(self) -> None:
        """End everything, also after a failure."""
        self._going.clear()
        for poller in self.pollers.values():
            poller.end()
        for site in self.sites.values():
            site.gateway.close()
        for name in ("broker", "inner"):
            if (broker := getattr(self, name, None)) is not None:
                broker.close()
        for close in self._closers:
            threading.Thread(target=close, daemon=True).start()  # a client without its broker may take its time
        machine.unmount_below(self.folder)


def _why_not_old(place: Path) -> str:
    """Puts the version before into `place`. Returns why that can't be."""
    place.mkdir()
    archive = subprocess.run(["git", "archive", OLD], cwd=ROOT, capture_output=True, check=False)
    if archive.returncode:
        return f"this is no clone with the commit {OLD[:8]}"
    subprocess.run(["tar", "-x", "-C", str(place)], input=archive.stdout, check=True)
    return ""


def flow_is_of(vin: str, flow: str) -> bool:
    """The flow of this name in the book comes from that vehicle, or goes there."""
    place = VINS.index(vin)
    return f".{vin}/" in flow or any(flow == str(one.source) for one in flows_of(VINS[place]) if not one.goes_up)


def flow_name(flow: Flow) -> str:
    """The name of a flow in the book."""
    source = outside(flow.vin, flow.source)
    return str(source) if flow.sink is None else f"{source} > {flow.sink}"
