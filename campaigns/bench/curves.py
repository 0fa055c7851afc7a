"""Curves: the same measurement along one axis, as figures and pictures (campaigns/bench/pictures.py).

topics_published, topics_subscribed   4,000/s over so many topics     records   records in the log
fleet     vehicles with 30 topics each                                payload   16 B to 1 MiB
peers     networks that get every message                             load      latency by offered load
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from campaigns.bench import pictures, wire
from campaigns.bench.costs import elsewhere, topics
from campaigns.bench.costs.common import Figures, Setting, points
from campaigns.bench.lanes import Kind, Lane, Leg, lane
from campaigns.bench.measure import RUN_MESSAGES_MIN, VOLATILE, calibrate
from campaigns.bench.processes import BenchError
from campaigns.bench.subject import Scene

RESULTS: Final = "curves.json"  # the figures of the pictures, in the same directory
RUN_S: Final = 5.0
PEERS: Final = (1, 2, 3, 4, 6, 8)
RECORDS: Final = (0, 100_000, 250_000, 500_000, 1_000_000, 2_000_000)
RECORDS_MIB: Final = 16_384  # history.retention_mib: large enough that no record is deleted during the run
STEP_MESSAGES_MAX: Final = 250_000  # sent in one run while the log is filled
PAYLOADS: Final = tuple(4**power for power in range(2, 11))  # 16 B to 1 MiB
PAYLOAD_MIB_MAX: Final = 512  # of one run
LOADS: Final = (10, 100, 300, 1_000, 3_000, 10_000, 20_000, 40_000, 60_000, 80_000)
LOAD_KEPT: Final = 0.97  # share of the offered load that must arrive; below it, latency only shows a growing queue
FLEETS: Final = (100, 1_000, 5_000)

# name -> kind of lane, leg: shown together in the pictures
SUBJECTS: Final[dict[str, tuple[Kind, Leg]]] = {
    "bare": ("bare", Leg("zenoh", "zenoh")),
    "volatile": ("streamer", Leg("zenoh", "zenoh", VOLATILE)),
    "durable": ("streamer", Leg("zenoh", "zenoh")),
}


def _costing(one: Lane, messages: int, size: int = wire.PAYLOAD_BYTES) -> Figures:
    before = one.cpu_s()
    result = one.run(messages, size=size)
    return {
        "per_s": round(result["per_s"]),
        "cpu_s_per_million": round((one.cpu_s() - before) / messages * 1e6, 2),
        "rss_mib": round(one.relay.memory_mib("VmRSS")) if one.relay is not None else None,
    }


def peers(setting: Setting) -> Figures:
    """Measures one topic with `count` destinations: messages received per second, and CPU for each message sent."""

    def at(count: int, directory: Path) -> Figures:
        with lane("streamer", Leg("zenoh", "zenoh", peers=count), directory) as one:
            found = _costing(one, calibrate(one, setting.seconds_or(RUN_S)))
        delivered = found["cpu_s_per_million"] / count
        return {**found, "delivered_per_s": found["per_s"] * count, "cpu_s_per_million_delivered": round(delivered, 2)}

    return points(PEERS, setting, at)


def records(setting: Setting) -> Figures:
    """Measures full speed of a durable log by the number of its records, all in one streamer."""
    scene = Scene(sections={"history": {"retention_mib": RECORDS_MIB}})
    with lane("streamer", Leg("zenoh", "zenoh", scene), setting.directory / "records") as one:
        run_messages = calibrate(one, setting.seconds_or(RUN_S))
        passed = 0

        def at(count: int, _: Path) -> Figures:
            nonlocal passed
            while passed < count:
                step = min(count - passed, STEP_MESSAGES_MAX)
                one.run(step)
                passed += step
            found = _costing(one, run_messages)
            passed += run_messages
            return found

        return points(RECORDS, setting, at)


def _beside(xs: tuple[int, ...], setting: Setting, work: Callable[[Lane, int], Figures]) -> Figures:
    """Returns by subject what `work` returns for its lane at each x."""
    found = {}
    for name, (kind, leg) in SUBJECTS.items():
        setting.say(name)
        with lane(kind, leg, setting.directory / name) as one:
            one.run(RUN_MESSAGES_MIN)
            found[name] = points(xs, setting, lambda x, _, one=one: work(one, x))  # type: ignore[misc]
    return found


def payload(setting: Setting) -> Figures:
    """Measures full speed by payload size in bytes."""

    def at(one: Lane, size: int) -> Figures:
        few = max(50, min(RUN_MESSAGES_MIN, (PAYLOAD_MIB_MAX << 18) // size))
        rate = one.throughput(few, size)
        most = (PAYLOAD_MIB_MAX << 20) // size
        found = _costing(one, max(few, min(most, int(rate * setting.seconds_or(RUN_S)))), size)
        return {**found, "mib_per_s": round(found["per_s"] * size / (1 << 20), 2)}

    return _beside(PAYLOADS, setting, at)


def load(setting: Setting) -> Figures:
    """Measures latency by offered load, from the time at which each message was due."""
    full: dict[int, bool] = {}

    def at(one: Lane, rate: int) -> Figures:
        if full.get(id(one)):
            return {"skipped": "a smaller load was not carried"}
        before, messages = one.cpu_s(), max(100, int(rate * setting.seconds_or(RUN_S)))
        result = one.run(messages, rate)
        if result["per_s"] < LOAD_KEPT * rate:
            full[id(one)] = True
            return {"skipped": f"{result['per_s']:,.0f}/s of it were carried"}
        us = (one.cpu_s() - before) / messages * 1e6
        return {"p50_ms": round(result["p50_ms"], 3), "p99_ms": round(result["p99_ms"], 3), "us_per_message": round(us)}

    return _beside(LOADS, setting, at)


CURVES: Final[dict[str, Callable[[Setting], Figures]]] = {
    "topics_published": topics.published,
    "topics_subscribed": topics.subscribed,
    "fleet": lambda setting: elsewhere.fleet(setting, FLEETS),
    "peers": peers,
    "records": records,
    "payload": payload,
    "load": load,
}


def curves(names: list[str], setting: Setting, pictures_directory: Path) -> dict[str, Any]:
    """Measures `names` and writes figures and pictures; those of other curves do not change. A failed curve is reported
    and keeps its previous files."""
    pictures_directory.mkdir(parents=True, exist_ok=True)
    path = pictures_directory / RESULTS
    known: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    found: dict[str, Any] = {}
    for name in names:
        setting.say(f"{name} ...")
        try:
            found[name] = CURVES[name](Setting(setting.directory / name, setting.say, setting.seconds))
        except BenchError as error:
            setting.say(f"error: {name}: {error}")
            found[name] = {"failed": str(error)}
            continue
        known[name] = found[name]
        path.write_text(json.dumps(known, indent=1) + "\n")
        pictures.draw(name, known[name], pictures_directory)
    return found
