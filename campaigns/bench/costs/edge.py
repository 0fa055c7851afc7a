"""The HTTP edge: clients of GET /stream, beside a bare fan-out by aiohttp_sse."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from campaigns.bench.costs.common import Figures, Setting, points
from campaigns.bench.processes import Child

CLIENTS: Final = 1_000
TOPICS: Final = 10
PER_S: Final = 10  # messages of each topic: 10,000 events/s in all
SHORT_S: Final = 10.0


def measure(setting: Setting) -> Figures:
    """1,000 clients over 10 topics with 10 messages/s each: delays, CPU per event, memory per client."""

    def at(kind: str, directory: Path) -> Figures:
        directory.mkdir(parents=True, exist_ok=True)
        seconds = setting.seconds_or(SHORT_S)
        load = "campaigns.bench.edge_load"
        with Child.module("server", load, "serve", kind, log_dir=directory) as server:
            port = int(server.line(60).split()[1])
            before_mib = server.memory_mib("VmRSS")
            arguments = ("listen", "--port", port, "--clients", CLIENTS, "--topics", TOPICS)
            with Child.module("clients", load, *arguments, log_dir=directory) as clients:
                clients.wait_for("ready")
                idle_mib = server.memory_mib("VmRSS")
                cpu_s = server.cpu_s()
                server.tell(publish={"topics": TOPICS, "per_s": PER_S, "seconds": seconds})
                sent = server.answer(seconds + 60)["sent"]
                cpu_s = server.cpu_s() - cpu_s
                clients.tell(figures=True)
                found = clients.answer(60)
                busy_mib = server.memory_mib("VmRSS")
        expected = sent * CLIENTS // TOPICS
        return {
            "events_per_s": round(found["events"] / seconds),
            "lost": expected - found["events"],
            "disordered": found["disordered"],
            "p50_ms": round(found["p50_ms"], 1),
            "p99_ms": round(found["p99_ms"], 1),
            "cpu_us_per_event": round(cpu_s / found["events"] * 1e6, 1),
            "kib_per_client": round((idle_mib - before_mib) * 1024 / CLIENTS, 1),
            "kib_per_client_busy": round((busy_mib - before_mib) * 1024 / CLIENTS, 1),
        }

    return points(("ours", "bare"), setting, at)
