"""The targets of all benchmarks, and the table that compares them with the figures.

figures of a run, from the last line of stdout -> rows(figures) -> what | to reach | reached
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import uprotocol

Figures = dict[str, Any]
Path = tuple[str, ...]

FLAT: Final = 1.25  # times the cost with one: two runs of the same may differ by so much


@dataclass(frozen=True)
class Target:
    """One row. `figure` reads its value from the figures, and raises KeyError, TypeError or ZeroDivisionError if it is
    absent."""

    what: str
    figure: Callable[[Figures], float]
    bound: float
    unit: str
    at_least: bool = False

    @property
    def to_reach(self) -> str:
        return f"{'at least' if self.at_least else 'at most'} {_number(self.bound)}{self.unit and ' ' + self.unit}"

    def reached(self, figures: Figures) -> float | None:
        """Returns None if it was not measured."""
        try:
            return float(self.figure(figures))
        except (KeyError, TypeError, ZeroDivisionError):
            return None

    def holds(self, value: float) -> bool:
        return value >= self.bound if self.at_least else value <= self.bound


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 or value == int(value) else f"{value:,.2f}"


def at(*path: str) -> Callable[[Figures], float]:
    """Returns a function that reads the figure at that path."""

    def take(figures: Figures) -> float:
        found: Any = figures
        for name in path:
            found = found[name]
        return found  # type: ignore[no-any-return]

    return take


def over(one: Callable[[Figures], float], other: Callable[[Figures], float]) -> Callable[[Figures], float]:
    return lambda figures: one(figures) / other(figures)


def beside(lane: str, cost: tuple[str, str]) -> Callable[[Figures], float]:
    """Returns the streamer's rate divided by that of another lane."""
    return over(at(*cost, "streamer", "per_s"), at(*cost, lane, "per_s"))


def is_compiled() -> bool:
    """Returns whether the measured core is compiled."""
    return uprotocol.CORE.startswith("compiled")


def _speeds(compiled: bool) -> list[Target]:
    build = "compiled" if compiled else "interpreted"
    zenoh = {"durable": 0.75 if compiled else 0.65, "volatile": 0.95 if compiled else 0.8}
    bounds = {f"zenoh_zenoh_{name}": bound for name, bound in zenoh.items()}
    bounds |= {"zenoh_mqtt": 1.0, "mqtt_zenoh": 1.0, "mqtt_mqtt": 1.0, "dds_zenoh": 0.95}
    return [
        Target(f"full speed beside bare, {leg}, {build}", at("legs", leg, "ratio"), bound, "", at_least=True)
        for leg, bound in bounds.items()
    ]


def _paced() -> list[Target]:
    durable, at_once = ("legs", "zenoh_zenoh_durable"), ("legs", "zenoh_zenoh_at_once")
    return [
        Target("CPU per message at 1,000/s, durable, over bare's", at(*durable, "cpu_at_1000_over_bare"), 1.8, ""),
        Target("latency at 1,000/s less bare's, durable, p50", at(*durable, "added_p50_ms"), 0.4, "ms"),
        Target("latency at 1,000/s less bare's, durable, p99", at(*durable, "added_p99_ms"), 1.5, "ms"),
        Target("the same with gather_ms = 0, p50", at(*at_once, "added_p50_ms"), 0.4, "ms"),
        Target("the same with gather_ms = 0, p99", at(*at_once, "added_p99_ms"), 1.5, "ms"),
    ]


def _topics() -> list[Target]:
    subscribed, published = ("costs", "topics_subscribed"), ("costs", "topics_published")
    most = at(*subscribed, "100000", "cpu_s_per_million")
    rows = [
        Target(
            "100,000 subscriptions on Zenoh: CPU per message, over one's",
            over(most, at(*subscribed, "1", "cpu_s_per_million")),
            FLAT,
            "",
        ),
        Target("100,000 subscriptions on Zenoh: threads", at(*subscribed, "100000", "threads"), 32, ""),
    ]
    return rows + [
        Target(
            f"{number:,} topics published on Zenoh, 4,000/s offered",
            at(*published, str(number), "per_s"),
            3_960,
            "/s",
            at_least=True,
        )
        for number in (3_900, 4_500, 30_000, 100_000)
    ]


def _changes() -> list[Target]:
    fleet, dds = ("costs", "fleet", "1000"), ("costs", "dds_new_topics")
    return [
        Target("fleet of 1,000 with 30 topics: until all are PENDING", at(*fleet, "pending_s"), 5, "s"),
        Target("fleet of 1,000 with 30 topics: until all are SUBSCRIBED", at(*fleet, "subscribed_s"), 60, "s"),
        Target("fleet of 1,000: p99 of the messages meanwhile", at(*fleet, "p99_ms"), 50, "ms"),
        Target("first sight of a topic with 20,000 filters", at("costs", "first_sight", "20000", "ms"), 0.05, "ms"),
        Target(
            "one subscription more, 5,000 topics: CPU", at("costs", "one_subscription_more", "5000", "cpu_ms"), 1, "ms"
        ),
        Target(
            "one subscription more, 50,000 topics: CPU",
            at("costs", "one_subscription_more", "50000", "cpu_ms"),
            1,
            "ms",
        ),
        Target("start with 5,000 embedded Zenoh subscriptions", at("costs", "start_subscribed", "s"), 2, "s"),
        Target("200 notifications of a hosted service", at("costs", "notifications", "ms"), 5, "ms"),
        Target(
            "Describe with 300,000 topics is answered, in", at("costs", "describe", "300000", "answered_ms"), 50, "ms"
        ),
        Target("2,000 new topics on DDS, one way", at(*dds, "one_way", "seconds"), 1, "s"),
        Target("2,000 new topics on DDS, 2,000 readers", at(*dds, "with_readers", "seconds"), 1, "s"),
        Target("2,000 new topics on DDS, both ways", at(*dds, "both_ways", "seconds"), 2, "s"),
        Target(
            "what a known topic on DDS waits meanwhile",
            at(*dds, "both_ways", "known_waited_ms"),
            100,
            "ms",
        ),
    ]


def _brokers() -> list[Target]:
    far, alone, slow = (("costs", name) for name in ("mqtt_far", "mqtt_one_at_a_time", "slow_processor"))
    stock = ("costs", "mqtt_stock_window")
    return [
        Target(
            "MQTT, broker 50 ms away each way, beside mosquitto's bridge",
            beside("bridge", far),
            0.99,
            "",
            at_least=True,
        ),
        Target(
            "slow processor, zenoh to mqtt: taken in over sent",
            over(at(*slow, "taken_per_s"), at(*slow, "sent_per_s")),
            FLAT,
            "",
        ),
        Target(
            "one message at a time over MQTT, beside bare",
            beside("bare", alone),
            0.15,
            "",
            at_least=True,
        ),
        Target(
            "brokers with 20 in flight, beside bare",
            beside("bare", stock),
            0.8,
            "",
            at_least=True,
        ),
    ]


def _following() -> list[Target]:
    polls, road = ("costs", "following_polls"), ("costs", "following")
    most, one = (at(*polls, topics, "bytes") for topics in ("10000", "1"))
    return [
        *(
            Target(f"followed over {name} of 200 ms there and back, over 0", over(far, near), 0.8, "", at_least=True)
            for link, name in (("zenoh", "Zenoh"), ("mqtt", "MQTT"))
            for far, near in [[at(*road, link, "follow_push", trip, "per_s") for trip in ("200", "0")]]
        ),
        Target("bytes of a poll that follows 10,000 topics, over those of one", over(most, one), 1, ""),
        Target(
            "an append where other topics have epochs, over none",
            at("costs", "epochs", "of_others_over_none"),
            1.05,
            "",
        ),
    ]


def targets(compiled: bool) -> list[Target]:
    """Returns all rows; the speeds depend on whether the core is compiled."""
    disk = [
        Target(
            f"disk, durable, 256 B at {rate:,}/s: written per message",
            at("costs", "disk", str(rate), "kb_per_message"),
            bound,
            "KB",
        )
        for rate, bound in ((10, 12), (100, 8), (1_000, 2))
    ]
    return [*disk, *_paced(), *_topics(), *_changes(), *_brokers(), *_following(), *_speeds(compiled)]


def rows(figures: Figures, compiled: bool) -> list[dict[str, Any]]:
    """Returns the table: what, to reach, reached (None: not measured), and whether the target is met."""
    found = []
    for target in targets(compiled):
        value = target.reached(figures)
        shown = None if value is None else f"{_number(value)}{target.unit and ' ' + target.unit}"
        holds = None if value is None else target.holds(value)
        found.append({"what": target.what, "to_reach": target.to_reach, "reached": shown, "holds": holds})
    return found
