"""One leg: the bare relay and the streamer, measured in turn, and other relays that support the leg.

round 1: for each lane a run at full speed   then for each lane a run at 1,000/s (delays, CPU)
round 2: the same                            the lane that is not measured is idle
...   -> medians of the rounds
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from campaigns.bench.lanes import Kind, Lane, Leg, lane
from campaigns.bench.subject import Scene

ROUNDS: Final = 3  # the median of three rounds allows for one disturbed round
RUN_S: Final = 3.0  # of one run at full speed, estimated by the warm-up; --seconds sets it
RUN_MESSAGES_MIN: Final = 2_000
WARM_UP_MESSAGES: Final = 10_000  # sent first and not counted; fewer on a slow leg
LATENCY_RATE: Final = 1_000  # messages per second
LATENCY_S: Final = 1.5  # per round; --seconds applies to these runs, too

VOLATILE: Final = Scene(volatile=True)
AT_ONCE: Final = Scene(sections={"history": {"gather_ms": 0}})
LEGS: Final[dict[str, Leg]] = {
    "zenoh_zenoh_durable": Leg("zenoh", "zenoh"),
    "zenoh_zenoh_at_once": Leg("zenoh", "zenoh", AT_ONCE),
    "zenoh_zenoh_volatile": Leg("zenoh", "zenoh", VOLATILE),
    "zenoh_mqtt": Leg("zenoh", "mqtt"),
    "mqtt_zenoh": Leg("mqtt", "zenoh"),
    "mqtt_mqtt": Leg("mqtt", "mqtt"),
    "dds_zenoh": Leg("dds", "zenoh"),
}
RUST_NETWORKS: Final = ("zenoh", "mqtt")  # networks for which the Rust streamer has transports on one machine


@dataclass
class Figures:
    """The figures of one lane from all rounds."""

    per_s: list[float] = field(default_factory=list)
    p50_ms: list[float] = field(default_factory=list)
    p99_ms: list[float] = field(default_factory=list)
    cpu_s: float = 0.0  # of the runs at full speed
    messages: int = 0  # sent in these runs
    lost: int = 0
    paced_cpu_s: float = 0.0  # of the runs at LATENCY_RATE
    paced_messages: int = 0
    paced_lost: int = 0
    rss_peak_mib: float = 0.0

    def json(self) -> dict[str, Any]:
        found: dict[str, Any] = {
            "messages_per_s": round(statistics.median(self.per_s)),
            "p50_ms": round(statistics.median(self.p50_ms), 3),
            "p99_ms": round(statistics.median(self.p99_ms), 3),
        }
        if self.cpu_s:  # a broker has no rates: its own work can't be told from its work as a bridge
            found["cpu_s_per_million"] = round(self.cpu_s / self.messages * 1e6, 1)
            found["us_per_message_at_1000"] = round(self.paced_cpu_s / self.paced_messages * 1e6)
            found["rss_peak_mib"] = round(self.rss_peak_mib, 1)
        if self.lost or self.paced_lost:
            found["lost_share"] = round(self.lost / self.messages, 3)
            found["lost_share_at_1000"] = round(self.paced_lost / self.paced_messages, 3)
        return found


@dataclass(frozen=True)
class Result:
    """The figures of one leg, by lane. The ratios are computed per round, not from the medians."""

    lanes: dict[str, Figures]

    @property
    def ratios(self) -> list[float]:
        ours, bare = self.lanes["streamer"].per_s, self.lanes["bare"].per_s
        return [one / other for one, other in zip(ours, bare, strict=True)]

    def added_ms(self, name: str) -> float:
        """Returns the median delay added by the streamer to bare; it may be negative. `name`: p50_ms or p99_ms."""
        ours, bare = (list[float](getattr(self.lanes[kind], name)) for kind in ("streamer", "bare"))
        return statistics.median(one - other for one, other in zip(ours, bare, strict=True))

    def json(self) -> dict[str, Any]:
        ours, bare = (self.lanes[kind].json() for kind in ("streamer", "bare"))
        return {
            "ratio": round(statistics.median(self.ratios), 3),
            "ratio_least": round(min(self.ratios), 3),
            "ratio_most": round(max(self.ratios), 3),
            "added_p50_ms": round(self.added_ms("p50_ms"), 3),
            "added_p99_ms": round(self.added_ms("p99_ms"), 3),
            "cpu_at_1000_over_bare": round(ours["us_per_message_at_1000"] / bare["us_per_message_at_1000"], 2),
            "lanes": {name: figures.json() for name, figures in self.lanes.items()},
        }


def kinds(leg: Leg, rust: Path | None) -> list[Kind]:
    """Returns the lanes that can run this leg."""
    found: list[Kind] = ["bare", "streamer"]
    if leg.source == leg.destination == "mqtt":
        found.append("bridge")
    if rust is not None and leg.source in RUST_NETWORKS and leg.destination in RUST_NETWORKS:
        found.append("rust")
    return found


def measure(
    leg: Leg,
    directory: Path,
    say: Callable[[str], None],
    *,
    messages: int | None = None,
    seconds: float | None = None,
    rust: Path | None = None,
) -> Result:
    """Runs all rounds of one leg with `messages` or else `seconds` for each run. Raises BenchError."""
    with ExitStack() as stack:
        lanes = {
            kind: stack.enter_context(lane(kind, leg, directory / kind, rust if kind == "rust" else None))
            for kind in kinds(leg, rust)
        }
        counts = {kind: messages or calibrate(one, seconds or RUN_S) for kind, one in lanes.items()}
        figures = {str(kind): Figures() for kind in lanes}
        for number in range(ROUNDS):
            for kind, one in lanes.items():
                _full_speed(one, counts[kind], figures[kind])
            for kind, one in lanes.items():
                _paced(one, int(LATENCY_RATE * (seconds or LATENCY_S)), figures[kind])
            rates = ", ".join(f"{kind} {figures[kind].per_s[-1]:,.0f}/s" for kind in lanes)
            say(f"round {number + 1} of {ROUNDS}: {rates}")
        for kind, one in lanes.items():
            if one.relay is not None:
                figures[kind].rss_peak_mib = one.relay.memory_mib("VmHWM")
    return Result(figures)


def _full_speed(one: Lane, messages: int, figures: Figures) -> None:
    before = one.cpu_s()
    result = one.run(messages)
    figures.cpu_s += one.cpu_s() - before
    figures.per_s.append(result["per_s"])
    figures.messages += messages
    figures.lost += result["lost"]


def _paced(one: Lane, messages: int, figures: Figures) -> None:
    before = one.cpu_s()
    result = one.run(messages, LATENCY_RATE)
    figures.paced_cpu_s += one.cpu_s() - before
    figures.p50_ms.append(result["p50_ms"])
    figures.p99_ms.append(result["p99_ms"])
    figures.paced_messages += messages
    figures.paced_lost += result["lost"]


def calibrate(one: Lane, seconds: float) -> int:
    """Warms up, and returns how many messages fit into `seconds`."""
    one.run(RUN_MESSAGES_MIN // 2)
    rate = one.throughput(WARM_UP_MESSAGES)
    return max(RUN_MESSAGES_MIN, int(rate * seconds))
