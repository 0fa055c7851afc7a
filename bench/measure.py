"""One leg: the bare relay and the streamer side by side, measured in turn.

round 1: bare run, streamer run, bare latency, streamer latency   each lane has its own networks, publisher, subscriber,
round 2: the same                                                 started once; the lane that is not measured is idle
...   -> medians of what the rounds say
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from bench import subject
from bench.networks import MATCH_TIMEOUT_S, Address
from bench.processes import BenchError, Child, free_domain
from streamer.demo.processes import free_port

ROUNDS: Final = 3  # pairs; the median of three lets one of them be disturbed
RUN_SECONDS_MAX: Final = 4.0  # of one throughput run: a slow machine or library sends fewer messages instead
RUN_MESSAGES_MIN: Final = 2_000
WARM_UP_SHARE: Final = 0.05  # of a run's messages, sent first and not counted
LATENCY_RATE: Final = 1_000  # messages per second
LATENCY_SECONDS: Final = 2.0  # per round: five seconds and more in all
RUN_TIMEOUT_S: Final = 120.0


@dataclass(frozen=True)
class Leg:
    """From one network to another; `messages` of a run where that takes at most RUN_SECONDS_MAX."""

    source: str
    destination: str
    messages: int
    volatile: bool = False


LEGS: Final[dict[str, Leg]] = {
    "zenoh_zenoh_durable": Leg("zenoh", "zenoh", 200_000),
    "zenoh_zenoh_volatile": Leg("zenoh", "zenoh", 200_000, volatile=True),
    "zenoh_mqtt": Leg("zenoh", "mqtt", 50_000),
    "mqtt_zenoh": Leg("mqtt", "zenoh", 50_000),
    "dds_zenoh": Leg("dds", "zenoh", 200_000),
}


@dataclass(frozen=True)
class Result:
    """The figures of one leg, as the last line of stdout has them, and how far the rounds' ratios were apart."""

    messages_per_s: float
    bare_messages_per_s: float
    ratio: float
    added_p50_ms: float
    added_p99_ms: float
    cpu_s_per_million: float
    rss_peak_mib: float
    ratios: tuple[float, ...]

    def json(self) -> dict[str, float]:
        digits = {"messages_per_s": None, "bare_messages_per_s": None, "rss_peak_mib": 1, "cpu_s_per_million": 1}
        return {name: round(value, digits.get(name, 3)) for name, value in vars(self).items() if name != "ratios"}


class Lane:
    """A relay between a publisher and a subscriber."""

    def __init__(self, name: str, relay: Child, publisher: Child, subscriber: Child) -> None:
        self.name, self.relay = name, relay
        self._publisher, self._subscriber = publisher, subscriber
        self._run = 0

    def join(self) -> None:
        """Until a message passes: discovery and matching are done."""
        deadline = time.monotonic() + MATCH_TIMEOUT_S
        while time.monotonic() < deadline:
            self._publisher.tell(run=0, messages=1, rate=0)
            self._publisher.answer(RUN_TIMEOUT_S)
            time.sleep(0.1)
            self._subscriber.tell(seen=True)
            if self._subscriber.answer(RUN_TIMEOUT_S)["seen"] == 0:
                return
        raise BenchError(f"{self.name}: no message came through within {MATCH_TIMEOUT_S:.0f} s{self.relay.log_tail()}")

    def run(self, messages: int, rate: float = 0) -> dict[str, Any]:
        """Send `messages`, and count them at the other end. Raises BenchError if one is lost, doubled or out of
        order."""
        self._run += 1
        self._subscriber.tell(run=self._run, messages=messages, latency=rate > 0)
        self._subscriber.answer(RUN_TIMEOUT_S)
        self._publisher.tell(run=self._run, messages=messages, rate=rate)
        result = self._subscriber.answer(RUN_TIMEOUT_S)
        if result["received"] != messages or result["disordered"]:
            lost = messages - result["received"]
            raise BenchError(
                f"{self.name}: of {messages} sent {lost} lost, {result['disordered']} out of "
                f"order{self.relay.log_tail()}"
            )
        self._publisher.answer(RUN_TIMEOUT_S)
        return result

    def throughput(self, messages: int) -> float:
        """Messages per second between the first and the last received."""
        return (messages - 1) / max(float(self.run(messages)["seconds"]), 1e-9)


@contextmanager
def lane(kind: str, leg: Leg, directory: Path) -> Iterator[Lane]:
    """A running lane of `kind` bare or streamer, on networks of its own."""
    directory.mkdir(parents=True)
    with ExitStack() as stack:
        source, destination = (_network(network, stack) for network in (leg.source, leg.destination))
        if kind == "bare":
            relay = stack.enter_context(
                Child.module("bare", "bench.bare", source, destination, log_dir=directory)
            ).wait_for("ready")
        else:
            relay = stack.enter_context(
                subject.start(directory, source, destination, volatile=leg.volatile, log_dir=directory)
            )
        ends = [
            stack.enter_context(
                Child.module(f"{kind}-{role}", "bench.load", role, address, log_dir=directory)
            ).wait_for("ready")
            for role, address in (("publisher", source), ("subscriber", destination))
        ]
        made = Lane(kind, relay, *ends)
        made.join()
        yield made


def _network(network: str, stack: ExitStack) -> Address:
    if network == "mqtt":
        from transports.mqtt5.broker import Broker

        return Address(network, stack.enter_context(Broker()).port)
    return Address(network, free_domain() if network == "dds" else free_port())


def measure(leg: Leg, directory: Path, messages: int | None, progress: Callable[[str], None]) -> Result:
    """All rounds of one leg. Raises BenchError."""
    with lane("bare", leg, directory / "bare") as bare, lane("streamer", leg, directory / "streamer") as streamer:
        counts = {one.name: messages or _calibrate(one, leg) for one in (bare, streamer)}
        rates: dict[str, list[float]] = {bare.name: [], streamer.name: []}
        delays: dict[str, list[tuple[float, float]]] = {bare.name: [], streamer.name: []}
        cpu_s = 0.0
        for number in range(ROUNDS):
            rates[bare.name].append(bare.throughput(counts[bare.name]))
            before = streamer.relay.cpu_s()
            rates[streamer.name].append(streamer.throughput(counts[streamer.name]))
            cpu_s += streamer.relay.cpu_s() - before
            for one in (bare, streamer):
                result = one.run(int(LATENCY_RATE * LATENCY_SECONDS), LATENCY_RATE)
                delays[one.name].append((result["p50_ms"], result["p99_ms"]))
            progress(
                f"round {number + 1} of {ROUNDS}: bare {rates['bare'][-1]:,.0f}/s, streamer "
                f"{rates['streamer'][-1]:,.0f}/s"
            )
        rss_peak_mib = streamer.relay.memory_mib("VmHWM")
    ratios = tuple(ours / theirs for ours, theirs in zip(rates["streamer"], rates["bare"], strict=True))
    added = [
        [ours[q] - theirs[q] for ours, theirs in zip(delays["streamer"], delays["bare"], strict=True)] for q in (0, 1)
    ]
    return Result(
        messages_per_s=statistics.median(rates["streamer"]),
        bare_messages_per_s=statistics.median(rates["bare"]),
        ratio=statistics.median(ratios),
        added_p50_ms=statistics.median(added[0]),
        added_p99_ms=statistics.median(added[1]),
        cpu_s_per_million=cpu_s / (ROUNDS * counts["streamer"]) * 1e6,
        rss_peak_mib=rss_peak_mib,
        ratios=ratios,
    )


def _calibrate(one: Lane, leg: Leg) -> int:
    """Warm up, and see how many messages fit into RUN_SECONDS_MAX."""
    rate = one.throughput(max(int(leg.messages * WARM_UP_SHARE), RUN_MESSAGES_MIN // 2))
    return min(leg.messages, max(RUN_MESSAGES_MIN, int(rate * RUN_SECONDS_MAX)))
