"""A cloud that subscribes to a fleet: `python -m campaigns.bench.fleet --vehicles 1000`.

back end's client -- MQTT in-vehicle --> up-streamer, uSubscription inside -- MQTT off-vehicle --> all vehicles
      <------------------------------ their messages, all the time ------------------------------'

The client subscribes to every topic of every vehicle. A topic is PENDING until its vehicle has agreed, and SUBSCRIBED
afterwards. A message must arrive if it is sent after its vehicle was asked for the topic.
Prints one JSON line.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

from campaigns.bench.fleet_wire import CLOUD
from campaigns.bench.processes import BenchError, Child
from campaigns.bench.subject import READY_WORD
from tools.broker import Broker

VEHICLES: Final = (100, 1_000, 5_000)  # in the runs of `make bench`
TOPICS_EACH: Final = 30
RATE: Final = 4_000.0  # messages a second over all vehicles
SUBSCRIBED_WITHIN_S: Final = 600.0  # after this time, the subscriptions so far count
STEADY_S: Final = 5.0  # measured once all topics are SUBSCRIBED
STALL_S: Final = 15.0  # if nothing arrives for so long, the missing messages are lost
LOOK_S: Final = 1.0
TELL_S: Final = 10.0
ANSWER_S: Final = 60.0
# `limits.memory_mib` of a bridge whose one client may have so many subscriptions: a quarter of the memory is for
# subscriptions, 2 KiB each, and one caller has a quarter of them
MEMORY_KIB_PER_TOPIC: Final = 4 * 4 * 2
MEMORY_MIB_MIN: Final = 512


def write_config(directory: Path, backend_port: int, fleet_port: int, topics: int) -> Path:
    """Writes the bridge's TOML file."""

    def endpoint(name: str, authority: str, port: int, mode: str) -> str:
        lines = [f"[[endpoint]]\nname = '{name}'\ntransport = 'mqtt5'\nauthorities = ['{authority}']"]
        return "\n".join([*lines, "[endpoint.settings]", f"host = '127.0.0.1'\nport = {port}\nmode = '{mode}'"])

    memory_mib = max(MEMORY_MIB_MIN, topics * MEMORY_KIB_PER_TOPIC // 1024 + 64)
    sections = [
        f"[streamer]\nauthority = '{CLOUD}'\ndata_dir = {json.dumps(str(directory / 'data'))}\nlog_level = 'warning'",
        endpoint("backend", CLOUD, backend_port, "in-vehicle"),
        endpoint("fleet", "*", fleet_port, "off-vehicle").replace("['*']", "['*']\nsuffix = ''"),
        f"[limits]\nmemory_mib = {memory_mib}",
    ]
    path = directory / "bridge.toml"
    path.write_text("\n\n".join(sections) + "\n")
    return path


class Ends:
    """The bridge and the processes at its two ends."""

    def __init__(self, stack: ExitStack, directory: Path, vehicles: int, topics_each: int) -> None:
        def child(name: str, module: str, *arguments: object) -> Child:
            return stack.enter_context(Child.module(name, module, *arguments, log_dir=directory))

        backend_port, fleet_port = (stack.enter_context(Broker()).port for _ in range(2))
        config = write_config(directory, backend_port, fleet_port, vehicles * topics_each)
        self.bridge = child("bridge", "streamer.commands.cli", "run", "--config", config).wait_for(READY_WORD)
        size = (vehicles, topics_each)
        self.vehicles = child("vehicles", "campaigns.bench.fleet_load", "vehicles", fleet_port, *size).wait_for("ready")
        self.backend = child("backend", "campaigns.bench.fleet_load", "backend", backend_port, *size).wait_for("ready")

    def ask(self, end: Child, **command: Any) -> dict[str, Any]:
        end.tell(**command)
        return end.answer(ANSWER_S)


def measure(
    vehicles: int,
    directory: Path,
    say: Callable[[str], None],
    *,
    topics_each: int = TOPICS_EACH,
    rate: float = RATE,
    limit_s: float = SUBSCRIBED_WITHIN_S,
) -> dict[str, Any]:
    """Subscribes to a fleet while it publishes. `pending_s` and `subscribed_s` are None if `limit_s` was too short.
    Raises BenchError if a process ends."""
    directory.mkdir(parents=True, exist_ok=True)
    topics = vehicles * topics_each
    with ExitStack() as stack:
        ends = Ends(stack, directory, vehicles, topics_each)
        ends.ask(ends.vehicles, rate=rate)
        time.sleep(LOOK_S)
        cpu_s = ends.bridge.cpu_s()
        seen = ends.ask(ends.backend, subscribe=True)
        started = shown_at = time.monotonic()
        while seen["subscribed"] < topics and time.monotonic() - started < limit_s:
            time.sleep(LOOK_S)
            seen = ends.ask(ends.backend, look=True)
            if time.monotonic() - shown_at >= TELL_S:
                shown_at = time.monotonic()
                say(f"{shown_at - started:.0f} s: {seen['pending']:,} answered, {seen['subscribed']:,} of {topics:,}")
        cpu_s, meanwhile_s = ends.bridge.cpu_s() - cpu_s, time.monotonic() - started
        meanwhile = ends.ask(ends.backend, delays=True)
        cpu_before, began = ends.bridge.cpu_s(), time.monotonic()
        time.sleep(STEADY_S)
        steady = ends.ask(ends.backend, delays=True)
        steady_cores = (ends.bridge.cpu_s() - cpu_before) / (time.monotonic() - began)
        sent = ends.ask(ends.vehicles, stop=True)
        last = _until_all_came(ends, sent["owed"])
        p50_ms, p99_ms = meanwhile["delays"] or (None, None)
        steady_p50_ms, steady_p99_ms = steady["delays"] or (None, None)
        return {
            "vehicles": vehicles,
            "topics": topics,
            "rate_per_s": rate,
            "pending_s": last.get("pending_s"),
            "subscribed_s": last.get("subscribed_s"),
            "subscribed": meanwhile["subscribed"],
            "refused": last["refused"],
            "asked_of_vehicles": sent["requests"],
            "messages_sent": sent["sent"],
            "messages_owed": sent["owed"],
            "lost": sent["owed"] - last["received"],
            "duplicates": last["duplicates"],
            "disordered": last["disordered"],
            "p50_ms": p50_ms,
            "p99_ms": p99_ms,
            "steady_p50_ms": steady_p50_ms,
            "steady_p99_ms": steady_p99_ms,
            "cpu_s": round(cpu_s, 1),
            "cores": round(cpu_s / meanwhile_s, 2),
            "steady_cores": round(steady_cores, 2),
            "peak_mib": round(ends.bridge.memory_mib("VmHWM"), 1),
            "written_mib": round(ends.bridge.written_mib(), 1),
        }


def _until_all_came(ends: Ends, owed: int) -> dict[str, Any]:
    seen = ends.ask(ends.backend, look=True)
    moved = time.monotonic()
    while seen["received"] < owed and time.monotonic() - moved < STALL_S:
        time.sleep(LOOK_S)
        before, seen = seen["received"], ends.ask(ends.backend, look=True)
        if seen["received"] != before:
            moved = time.monotonic()
    return seen


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m campaigns.bench.fleet", description="A cloud that subscribes to a fleet."
    )
    parser.add_argument("--vehicles", type=int, default=1_000)
    parser.add_argument("--topics-each", type=int, default=TOPICS_EACH)
    parser.add_argument("--rate", type=float, default=RATE, help="messages per second over all vehicles")
    parser.add_argument("--limit-s", type=float, default=SUBSCRIBED_WITHIN_S, help="for all to be subscribed")
    parser.add_argument("--dir", type=Path, help="where the bridge keeps its files (default: a temporary directory)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="up-streamer-bench-", dir=options.dir) as directory:
        try:
            figures = measure(
                options.vehicles,
                Path(directory),
                lambda text: print(text, file=sys.stderr, flush=True),
                topics_each=options.topics_each,
                rate=options.rate,
                limit_s=options.limit_s,
            )
        except BenchError as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
    print(json.dumps(figures))
    whole = figures["subscribed"] == figures["topics"] and not figures["lost"] and not figures["disordered"]
    return os.EX_OK if whole else 1


if __name__ == "__main__":
    sys.exit(main())
