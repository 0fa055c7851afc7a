"""Describe of a log with many topics: the newest matching record (Spark's question with each batch), and all topics
in pages."""

from __future__ import annotations

import statistics
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

from campaigns.bench import subject, wire
from campaigns.bench.costs.common import Figures, Setting, metrics, points
from campaigns.bench.costs.subscribing import ask
from campaigns.bench.networks import Address
from campaigns.bench.processes import BenchError, Child
from campaigns.bench.subject import Scene
from transports.ports import free_port
from uprotocol import uri as uris

TOPICS: Final = (8_000, 30_000, 300_000)
ASKED: Final = 5  # times; the first answer may have to build a cache, and is reported by itself
FILL_TIMEOUT_S: Final = 180.0
LOOK_S: Final = 0.2


def measure(setting: Setting) -> Figures:
    return points(TOPICS, setting, _at)


def _at(topics: int, directory: Path) -> Figures:
    directory.mkdir(parents=True)
    admin = free_port()
    sections: dict[str, dict[str, Any]] = {
        "streamer": {"admin": f"127.0.0.1:{admin}"},
        "history": {"record": [uris.format(wire.EVERY_TOPIC)]},
        "limits": {"memory_mib": subject.MEMORY_MIB},
    }
    source, out = Address("zenoh", free_port()), Address("zenoh", free_port())
    with ExitStack() as stack:
        scene = Scene(topics=0, sections=sections)  # topics are recorded, but have no subscriber
        streamer = stack.enter_context(subject.start(directory, source, out, scene=scene, log_dir=directory))
        publisher = Child.module("publisher", "campaigns.bench.load", "publisher", source, topics, log_dir=directory)
        stack.enter_context(publisher).wait_for("ready")
        publisher.tell(run=1, messages=topics, rate=0, size=wire.PAYLOAD_BYTES)
        publisher.answer(FILL_TIMEOUT_S)
        _wait_for(admin, topics)
        asker = Child.module("asker", "campaigns.bench.asker", out, log_dir=directory)
        stack.enter_context(asker).wait_for("ready")
        cpu_s = streamer.cpu_s()
        given = [ask(asker, do="logs") for _ in range(ASKED)]
        cpu_ms = (streamer.cpu_s() - cpu_s) / ASKED * 1_000
        if any(one["newest_match_seq"] != topics for one in given):
            raise BenchError(f"the newest of {topics:,} records is told as {given[0]['newest_match_seq']:,}")
        ms = [one["ms"] for one in given]
        listed = ask(asker, do="topics")
        if listed["topics"] != topics:
            raise BenchError(f"{listed['topics']:,} topics were listed")
        return {
            "answered_ms": round(min(ms), 2),
            "first_ms": round(ms[0], 2),
            "most_ms": round(max(ms), 2),
            "cpu_ms": round(cpu_ms, 1),
            "page_ms": round(statistics.median(listed["page_ms"]), 2),
            "page_most_ms": round(max(listed["page_ms"]), 2),
            "pages": len(listed["page_ms"]),
            "listed_s": round(listed["s"], 2),
            "beside_most_ms": round(listed["beside_most_ms"], 2),
            "rss_peak_mib": round(streamer.memory_mib("VmHWM")),
        }


def _wait_for(admin: int, topics: int) -> None:
    """Waits until the log has a record of each of `topics` topics. Raises BenchError."""
    deadline = time.monotonic() + FILL_TIMEOUT_S
    known = 0.0
    while time.monotonic() < deadline:
        known = sum(value for name, value in metrics(admin).items() if name.startswith("up_streamer_log_newest_seq{"))
        if known >= topics:
            return
        time.sleep(LOOK_S)
    raise BenchError(f"after {FILL_TIMEOUT_S:.0f} s the log has {known:,.0f} of {topics:,} records")
