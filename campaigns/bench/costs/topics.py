"""Many topics: subscribed to one by one, published on Zenoh, and received for the first time."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Final

from campaigns.bench import wire
from campaigns.bench.costs.common import PACE_PER_S, Figures, Setting, points
from campaigns.bench.lanes import Leg, lane
from campaigns.bench.subject import Scene
from transports.listeners import ListenerTable
from uprotocol import uuid as uuids
from uprotocol.attributes import PUBLISH
from uprotocol.v1.uattributes_pb2 import UAttributes
from uprotocol.v1.umessage_pb2 import UMessage

SUBSCRIBED: Final = (1, 1_000, 10_000, 100_000)
PUBLISHED: Final = (3_900, 4_500, 30_000, 100_000)
SHORT_S: Final = 5.0
START_TIMEOUT_S: Final = 180.0  # with 100,000 subscriptions
# each subscription has a thread: more of them would overload the machine
THREADS_MAX: Final = 1_000
# times that each topic is published before the measurement, as a sender treats a new topic differently from a known
# one; with many topics only if the runs are long
WARM_UP_ROUNDS: Final = 20
WARM_UP_TOPICS_MAX: Final = 5_000
LONG_S: Final = 60.0
FILTERS: Final = (1_000, 20_000)
FIRST_SIGHTS: Final = 200


def subscribed(setting: Setting) -> Figures:
    """Zenoh to Zenoh with one subscription per topic, 4,000/s over all topics."""
    threads = 0

    def at(topics: int, directory: Path) -> Figures:
        nonlocal threads
        if threads > THREADS_MAX:
            return {"skipped": f"the smaller number took {threads:,} threads"}
        began = time.monotonic()
        scene = Scene(topics=topics, start_timeout_s=START_TIMEOUT_S)
        with lane("streamer", Leg("zenoh", "zenoh", scene), directory) as streamer:
            start_s = time.monotonic() - began
            streamer.run(max(topics, PACE_PER_S))  # each once: the cost of a first message is measured elsewhere
            messages = max(topics, int(PACE_PER_S * setting.seconds_or(SHORT_S)))
            cpu_s = streamer.cpu_s()
            result = streamer.run(messages, PACE_PER_S)
            threads = streamer.process.threads()
            return {
                "cpu_s_per_million": round((streamer.cpu_s() - cpu_s) / messages * 1e6, 1),
                "threads": threads,
                "rss_peak_mib": round(streamer.process.memory_mib("VmHWM")),
                "scrambled_share": round(result["scrambled"] / messages, 3),
                "per_s": round(result["per_s"]),
                "start_s": round(start_s, 1),
            }

    return points(SUBSCRIBED, setting, at)


def published(setting: Setting) -> Figures:
    """Zenoh to Zenoh with one subscription to all topics: what arrives of 4,000/s over so many topics."""

    def at(topics: int, directory: Path) -> Figures:
        with lane("streamer", Leg("zenoh", "zenoh", Scene(topics=topics, exact=False)), directory) as streamer:
            rounds = WARM_UP_ROUNDS if topics <= WARM_UP_TOPICS_MAX or setting.seconds_or(SHORT_S) >= LONG_S else 0
            if rounds:
                streamer.run(rounds * topics)
            messages = max(topics, int(PACE_PER_S * setting.seconds_or(SHORT_S)))
            cpu_s = streamer.cpu_s()
            result = streamer.run(messages, PACE_PER_S)
            return {
                "warm_up_rounds": rounds,
                "per_s": round(result["per_s"]),
                "offered_per_s": PACE_PER_S,
                "lost": result["lost"],
                "p99_ms": round(result["p99_ms"], 1),
                "cpu_s_per_million": round((streamer.cpu_s() - cpu_s) / messages * 1e6, 1),
                "rss_peak_mib": round(streamer.process.memory_mib("VmHWM")),
            }

    return points(PUBLISHED, setting, at)


class _Nobody:
    def on_receive(self, message: UMessage) -> None:
        pass


def first_sight(setting: Setting) -> Figures:
    """Measures the event loop's time for the first message of a topic, in this process: only the table of listeners."""

    def at(filters: int, _: Path) -> Figures:
        table = ListenerTable("bench", listeners_max=filters)
        for number in range(filters):
            table.add(wire.topic(number), None, _Nobody())
        messages = [_message(number) for number in range(0, filters, filters // FIRST_SIGHTS)]
        began = time.process_time()
        assert all(table.wants(message) for message in messages), "each topic has its filter"
        return {"ms": round((time.process_time() - began) / len(messages) * 1_000, 4)}

    return points(FILTERS, setting, at)


def _message(number: int) -> UMessage:
    return UMessage(attributes=UAttributes(id=uuids.new(), type=PUBLISH, source=wire.topic(number)))
