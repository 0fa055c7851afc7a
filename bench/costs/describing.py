"""Describe of a log with many topics: ms until it is answered, and whether it is refused."""

from __future__ import annotations

import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

from bench import subject, wire
from bench.costs.common import Figures, Setting, metrics, points
from bench.costs.subscribing import ask
from bench.networks import Address
from bench.processes import BenchError, Child
from bench.subject import Scene
from streamer.demo.processes import free_port
from uprotocol import uri as uris

TOPICS: Final = (8_000, 30_000, 300_000)
ASKED: Final = 5  # times; the quickest counts, as the first one may have to make what the others find
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
        scene = Scene(topics=0, sections=sections)  # recorded, and wanted by nobody
        streamer = stack.enter_context(subject.start(directory, source, out, scene=scene, log_dir=directory))
        publisher = Child.module("publisher", "bench.load", "publisher", source, topics, log_dir=directory)
        stack.enter_context(publisher).wait_for("ready")
        publisher.tell(run=1, messages=topics, rate=0, size=wire.PAYLOAD_BYTES)
        publisher.answer(FILL_TIMEOUT_S)
        _wait_for(admin, topics)
        asker = Child.module("asker", "bench.asker", out, log_dir=directory)
        stack.enter_context(asker).wait_for("ready")
        cpu_s = streamer.cpu_s()
        given = [ask(asker, do="describe") for _ in range(ASKED)]
        ms, refused = round(min(one["ms"] for one in given), 2), given[-1]["refused"]
        return {
            **({} if refused else {"answered_ms": ms}),
            "ms": ms,
            "most_ms": round(max(one["ms"] for one in given), 2),
            "cpu_ms": round((streamer.cpu_s() - cpu_s) / ASKED * 1_000, 1),
            "refused": refused or "no",
            "rss_peak_mib": round(streamer.memory_mib("VmHWM")),
        }


def _wait_for(admin: int, topics: int) -> None:
    """Until the log knows that many topics. Raises BenchError."""
    deadline = time.monotonic() + FILL_TIMEOUT_S
    known = 0.0
    while time.monotonic() < deadline:
        known = sum(value for name, value in metrics(admin).items() if name.startswith("up_streamer_log_topics{"))
        if known >= topics:
            return
        time.sleep(LOOK_S)
    raise BenchError(f"after {FILL_TIMEOUT_S:.0f} s the log has {known:,.0f} of {topics:,} topics")
