"""A lane: publisher -> relay -> subscriber with their own processes and networks, started once for many runs.

bare      bench.bare                 the same libraries or sockets, no code of up-streamer
streamer  the streamer under test
bridge    mosquitto itself           MQTT to MQTT: the source's broker forwards to the destination's
rust      --peer-rust BINARY         Eclipse's Rust streamer; it may lose messages, which are counted
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

from campaigns.bench import subject, wire
from campaigns.bench.networks import MATCH_TIMEOUT_S, Address
from campaigns.bench.processes import BenchError, Child, free_domain
from campaigns.bench.subject import Scene
from transports.ports import free_port

Kind = Literal["bare", "streamer", "bridge", "rust"]
RUN_TIMEOUT_S: Final = 120.0  # in addition to the duration of a run
# without a limit, a bridge connects with a Receive Maximum of 0, which the broker refuses
BRIDGE_WINDOW: Final = ("max_inflight_messages 65000",)
SLOWEST_PER_S: Final = 1_000  # assumed for the time limit of a run at full speed


@dataclass(frozen=True)
class Leg:
    """A source and a destination network. `far_ms`: delay between the relay and the destination's broker, each way."""

    source: str
    destination: str
    scene: Scene = field(default_factory=Scene)
    far_ms: float = 0
    broker_settings: Sequence[str] = ()  # lines of mosquitto.conf, of both brokers
    peers: int = 1  # destinations of a streamer, each with its own network and subscriber


class Lane:
    """A relay between a publisher and subscribers, each of which gets every message. `relay` is None if a broker is the
    relay."""

    def __init__(
        self, name: str, relay: Child | None, publisher: Child, subscribers: Sequence[Child], *, loses: bool
    ) -> None:
        self.name, self.relay, self._loses = name, relay, loses
        self._publisher, self._subscribers = publisher, subscribers
        self._run = 0
        self._under_way = 0, 0.0  # messages, and their seconds

    @property
    def process(self) -> Child:
        assert self.relay is not None, "a broker is nothing that is measured"
        return self.relay

    def _said(self) -> str:
        return self.relay.log_tail() if self.relay is not None else ""

    def join(self) -> None:
        """Waits until a message arrives, so that discovery and matching are complete."""
        deadline = time.monotonic() + MATCH_TIMEOUT_S
        while time.monotonic() < deadline:
            self._publisher.tell(run=0, messages=1, rate=0, size=wire.PAYLOAD_BYTES)
            self._publisher.answer(RUN_TIMEOUT_S)
            time.sleep(0.1)
            if all(given["seen"] == 0 for given in self._ask_subscribers(seen=True)):
                return
        raise BenchError(f"{self.name}: no message came through within {MATCH_TIMEOUT_S:.0f} s{self._said()}")

    def run(self, messages: int, rate: float = 0, size: int = wire.PAYLOAD_BYTES) -> dict[str, Any]:
        """Sends `messages` and returns the result of the slowest subscriber. Raises BenchError if a message is lost,
        doubled or out of order, unless this relay may lose messages."""
        self.begin(messages, rate, size)
        return self.finish()

    def begin(self, messages: int, rate: float = 0, size: int = wire.PAYLOAD_BYTES) -> None:
        """Starts a run. Lanes that run at the same time call `begin` and `finish` instead of `run`."""
        self._run += 1
        self._ask_subscribers(run=self._run, messages=messages, latency=rate > 0)
        self._publisher.tell(run=self._run, messages=messages, rate=rate, size=size)
        self._under_way = messages, RUN_TIMEOUT_S + (messages / rate if rate else messages / SLOWEST_PER_S)

    def finish(self) -> dict[str, Any]:
        messages, within_s = self._under_way
        results = [subscriber.answer(within_s) for subscriber in self._subscribers]
        for result in results:
            self._judge(result, messages)
        result = max(results, key=lambda one: float(one["seconds"]))
        result["publish_s"] = self._publisher.answer(RUN_TIMEOUT_S)["seconds"]
        return result

    def _ask_subscribers(self, **command: Any) -> list[dict[str, Any]]:
        for subscriber in self._subscribers:
            subscriber.tell(**command)
        return [subscriber.answer(RUN_TIMEOUT_S) for subscriber in self._subscribers]

    def _judge(self, result: dict[str, Any], messages: int) -> None:
        """Adds the number of lost messages and the rate."""
        lost = messages - result["received"]
        if not self._loses and (lost or result["doubled"] or result["disordered"]):
            raise BenchError(
                f"{self.name}: of {messages} sent {lost} lost, {result['doubled']} twice, {result['disordered']} out "
                f"of order{self._said()}"
            )
        result["lost"] = lost
        result["per_s"] = max(result["received"] - 1, 0) / max(float(result["seconds"]), 1e-9)

    def throughput(self, messages: int, size: int = wire.PAYLOAD_BYTES) -> float:
        """Returns messages per second between the first and the last received."""
        return float(self.run(messages, size=size)["per_s"])

    def cpu_s(self) -> float:
        """Returns the relay's CPU time so far; 0 if the relay is a broker."""
        return self.relay.cpu_s() if self.relay is not None else 0.0


class Net:
    """The two networks of a leg, and the link between the relay and the destination."""

    def __init__(self, leg: Leg, directory: Path, stack: ExitStack, *, bridge: bool = False) -> None:
        self.destinations = [_network(leg.destination, leg, stack) for _ in range(leg.peers)]
        self.destination = self.relay_destination = self.destinations[0]
        if leg.far_ms:
            far = stack.enter_context(
                Child.module("far", "campaigns.bench.far", self.destination.number, leg.far_ms, log_dir=directory)
            )
            self.relay_destination = Address("mqtt", far.answer(RUN_TIMEOUT_S)["port"])
        more = _bridge(self.relay_destination.number) if bridge else ()
        self.source = _network(leg.source, leg, stack, more, BRIDGE_WINDOW if bridge else ())


def _network(
    network: str, leg: Leg, stack: ExitStack, more: Sequence[str] = (), unless_set: Sequence[str] = ()
) -> Address:
    """`more` follows the leg's own broker settings, because settings after a bridge belong to the bridge. `unless_set`
    applies to a leg without settings."""
    return new_address(network, stack, (*(leg.broker_settings or unless_set), *more))


def new_address(network: str, stack: ExitStack, broker_settings: Sequence[str] = ()) -> Address:
    """Returns an unused network, with a broker if it needs one. It exists until `stack` ends."""
    if network == "mqtt":
        from tools.broker import Broker

        return Address(network, stack.enter_context(Broker(settings=broker_settings)).port)
    return Address(network, free_domain() if network == "dds" else free_port())


def _bridge(port: int) -> list[str]:
    """Returns lines for mosquitto.conf of the source's broker: forward all topics of the bench to `port` with QoS 1."""
    return [
        "connection bench",
        f"address 127.0.0.1:{port}",
        f"topic {wire.MQTT_EVERY_TOPIC} out 1",
        "bridge_protocol_version mqttv50",
        "remote_clientid bench-bridge",
        "notifications false",
        "restart_timeout 1",
    ]


@contextmanager
def lane(kind: Kind, leg: Leg, directory: Path, binary: Path | None = None) -> Iterator[Lane]:
    """Runs a lane on its own networks. `binary` is for a lane of kind rust. Raises BenchError."""
    directory.mkdir(parents=True)
    with ExitStack() as stack:
        net = Net(leg, directory, stack, bridge=kind == "bridge")
        relay = _relay(kind, leg, net, directory, stack, binary)
        ends = [
            stack.enter_context(
                Child.module(
                    f"{kind}-{role}{number}", "campaigns.bench.load", role, address, leg.scene.topics, log_dir=directory
                )
            ).wait_for("ready")
            for role, addresses in (("subscriber", net.destinations), ("publisher", [net.source]))
            for number, address in enumerate(addresses)
        ]
        made = Lane(kind, relay, ends[-1], ends[:-1], loses=kind == "rust")
        made.join()
        yield made


def _relay(kind: Kind, leg: Leg, net: Net, directory: Path, stack: ExitStack, binary: Path | None) -> Child | None:
    source, destination = net.source, net.relay_destination
    if kind == "streamer":
        others = net.destinations[1:]
        return stack.enter_context(
            subject.start(directory, source, destination, *others, scene=leg.scene, log_dir=directory)
        )
    if kind == "bare":
        return stack.enter_context(
            Child.module("bare", "campaigns.bench.bare", source, destination, log_dir=directory)
        ).wait_for("ready")
    if kind == "rust":
        assert binary is not None, "a lane of this kind has one"
        interest = subject.write_interest(directory / "interest.json", leg.scene)
        command = [str(binary), str(source), str(destination), str(interest)]
        return stack.enter_context(Child("rust", command, directory / "rust.log")).wait_for("ready")
    return None


@contextmanager
def round_trip(kind: Kind, leg: Leg, directory: Path) -> Iterator[Child]:
    """Runs a lane whose ends are one process, which sends each message after the previous one has arrived."""
    directory.mkdir(parents=True)
    with ExitStack() as stack:
        net = Net(leg, directory, stack, bridge=kind == "bridge")
        _relay(kind, leg, net, directory, stack, None)
        ends = Child.module(
            f"{kind}-ends", "campaigns.bench.load", "round", net.source, net.destination, log_dir=directory
        )
        yield stack.enter_context(ends).wait_for("ready")
