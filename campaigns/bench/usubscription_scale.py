"""uSubscription at full size: a store with a million subscriptions, read while it is written to.

fill (bulk, not measured) -> start -> FetchSubscribers one by one (p99) while subscribers subscribe -> memory
                             service process         two client processes, over Zenoh on loopback; each answer durable

Prints a table, and as its last line one JSON object. `python campaigns/bench/usubscription_scale.py [--subscriptions N]
[--seconds S]`
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import random
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import structlog

from transports.plugin import create
from transports.ports import free_port
from uprotocol import uri as uris
from uprotocol.communication import CallOptions, InMemoryRpcClient
from uprotocol.core.usubscription.v3 import usubscription_pb2 as v3
from uprotocol.core.usubscription.v4 import usubscription_pb2 as v4
from uprotocol.message import UMessageBuilder, UPayload
from uprotocol.transport import LocalUriProvider, UTransport
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.umessage_pb2 import UMessage
from uprotocol.v1.uri_pb2 import UUri
from usubscription.state import Status
from usubscription.store.database import Database

AUTHORITY: Final = "scale"
TOPICS_PER_ENTITY: Final = 100
SUBSCRIBERS_AT_ONCE: Final = 256  # requests in flight, as of a few hundred applications that start together
FETCH_PAUSE_S: Final = 0.002  # between questions, so that they cover the whole run
RATE_PER_S: Final = 2_200  # Subscribes during the measurement of FetchSubscribers; the service must support 2,000
OPTIONS: Final = CallOptions(timeout_ms=30_000)


def fill(path: Path, subscriptions: int, topics: int, subscribers: int) -> None:
    """Writes the store that the service would leave, in bulk: filling it over the network would take longer than the
    measurement."""
    database = Database(path, AUTHORITY)
    database.open()
    database.close()
    db = sqlite3.connect(path, isolation_level=None)
    db.execute("PRAGMA synchronous=OFF")
    db.execute("BEGIN")
    db.executemany("INSERT INTO uri VALUES(?, ?, ?, 1, ?)", ((1 + n, *topic(n)) for n in range(topics)))
    db.executemany(
        "INSERT INTO uri VALUES(?, ?, ?, 1, 0)", ((1 + topics + n, AUTHORITY, 0x10000 + n) for n in range(subscribers))
    )
    each = subscriptions // topics
    step = subscribers // each
    rows = ((1 + t, 1 + topics + (t + k * step) % subscribers) for t in range(topics) for k in range(each))
    db.executemany(
        f"INSERT INTO subscription(topic, subscriber, status, major) VALUES(?, ?, {int(Status.SUBSCRIBED)}, 4)", rows
    )
    db.execute("COMMIT")
    db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    db.close()


def topic(number: int) -> tuple[str, int, int]:
    """Returns authority, entity and resource."""
    return (AUTHORITY, 0x100 + number // TOPICS_PER_ENTITY, 0x8000 + number % TOPICS_PER_ENTITY)


def topic_uri(number: int) -> UUri:
    authority, ue_id, resource = topic(number)
    return uris.uri(authority, ue_id, 1, resource)


class Service:
    """The service in its own process."""

    def __init__(self, path: Path, endpoint: str) -> None:
        settings = ["--setting", f'listen=["{endpoint}"]']
        command = [
            sys.executable,
            "-m",
            "usubscription",
            "--authority",
            AUTHORITY,
            "--store",
            str(path),
            "--transport",
            "zenoh",
            *settings,
        ]
        started = time.monotonic()
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        self.start_s = time.monotonic() - started
        assert line, "the service did not start"

    def memory_mib(self) -> float:
        """Returns the peak of resident memory."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        (peak,) = (line for line in status.splitlines() if line.startswith("VmHWM"))
        return int(peak.split()[1]) / 1024

    def cpu_s(self) -> float:
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(30)


def percentile(values: list[float], part: float) -> float:
    return sorted(values)[min(int(len(values) * part), len(values) - 1)]


async def fetch_until(endpoint: str, end: float, topics: int) -> list[float]:
    """Returns the ms of each FetchSubscribers."""
    local, chance, found = LocalUriProvider(AUTHORITY, 0xF000, 1), random.Random(1), []
    async with create("zenoh", {"connect": [endpoint]}, local) as transport, InMemoryRpcClient(transport, local) as rpc:
        while time.monotonic() < end:
            asked = UPayload.pack(v3.FetchSubscribersRequest(topic=topic_uri(chance.randrange(topics))))
            started = time.perf_counter()
            answer = await rpc.invoke_method(uris.uri(AUTHORITY, 0, 3, 8), asked, OPTIONS)
            found.append((time.perf_counter() - started) * 1000)
            assert answer.unpack(v3.FetchSubscribersResponse).subscribers
            await asyncio.sleep(FETCH_PAUSE_S)
    return found


class Subscribers:
    """Callers of Subscribe. They take the answers in batches: one call for each answer would cost more than the
    service."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._sent: dict[int, float] = {}
        self._numbers = itertools.count()
        self.latencies: list[float] = []
        self.news = asyncio.Event()

    def requests(self, count: int) -> list[UMessage]:
        sink, source, made = uris.uri(AUTHORITY, 0, 4, 1), uris.uri(AUTHORITY, 0xF001, 1, 0), []
        for number in itertools.islice(self._numbers, count):
            at = uris.uri(AUTHORITY, 0x100_0000 * self._seed + 0x8000 + number // 0x7000, 1, 0x8000 + number % 0x7000)
            request = UMessageBuilder.request(source, sink, OPTIONS.timeout_ms).pack(v4.SubscribeRequest(topic=at))
            self._sent[request.attributes.id.msb] = 0.0
            made.append(request)
        return made

    async def send(self, transport: UTransport, requests: list[UMessage]) -> None:
        now = time.perf_counter()
        for request in requests:
            self._sent[request.attributes.id.msb] = now
        assert all(status.code == UCode.OK for status in await transport.send_batch(requests))

    @property
    def waiting(self) -> int:
        return len(self._sent)

    def on_receive_batch(self, messages: Sequence[UMessage]) -> None:
        now = time.perf_counter()
        for message in messages:
            assert message.attributes.commstatus == UCode.OK, message
            self.latencies.append((now - self._sent.pop(message.attributes.reqid.msb)) * 1000)
        self.news.set()

    def on_receive(self, message: UMessage) -> None:
        self.on_receive_batch([message])


async def subscribe_for(endpoint: str, seconds: float, rate: float, seed: int) -> dict[str, Any]:
    """Subscribes at `rate` per second, even if the service is slower (0: SUBSCRIBERS_AT_ONCE callers at full speed)."""
    local, callers = LocalUriProvider(AUTHORITY, 0xF001, 1), Subscribers(seed)
    async with create("zenoh", {"connect": [endpoint]}, local) as transport:
        await transport.register_listener(uris.uri(AUTHORITY, 0, 4, 1), callers, local.get_source())
        await callers.send(transport, callers.requests(1))  # the network is connected and has routes
        await callers.news.wait()
        callers.latencies.clear()
        ready = callers.requests(int(seconds * rate)) if rate else []
        began = time.monotonic()
        started = 0
        while (now := time.monotonic()) < began + seconds:
            if rate:
                due = min(int((now - began) * rate), len(ready))
                await callers.send(transport, ready[started:due])
                started = due
                await asyncio.sleep(0.002)
            else:
                callers.news.clear()
                await callers.send(transport, callers.requests(SUBSCRIBERS_AT_ONCE - callers.waiting))
                await callers.news.wait()
        took = time.monotonic() - began
        answered = len(callers.latencies)
        async with asyncio.timeout(30):
            while callers.waiting > len(ready) - started:
                callers.news.clear()
                await callers.news.wait()
    found = callers.latencies
    return {
        "subscribe_per_s": round(answered / took),
        "p50_ms": percentile(found, 0.5),
        "p99_ms": percentile(found, 0.99),
    }


def load(endpoint: str, seconds: float, rate: float, seed: int) -> subprocess.Popen[str]:
    """Starts the subscribers in their own process."""
    command = [sys.executable, __file__, "--load", json.dumps([endpoint, seconds, rate, seed])]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def result(process: subprocess.Popen[str]) -> dict[str, Any]:
    said, _ = process.communicate(timeout=120)
    found: dict[str, Any] = json.loads(said)
    return found


def measure(endpoint: str, seconds: float, rate: float, topics: int) -> dict[str, Any]:
    idle = asyncio.run(fetch_until(endpoint, time.monotonic() + min(seconds, 3), topics))
    steady = load(endpoint, seconds + 1, rate, 1)
    time.sleep(1)  # the load has started
    busy = asyncio.run(fetch_until(endpoint, time.monotonic() + seconds - 1, topics))
    at_rate, flat_out = result(steady), result(load(endpoint, seconds, 0, 2))
    return {
        "subscribe_per_s": at_rate["subscribe_per_s"],
        "subscribe_p50_ms": round(at_rate["p50_ms"], 2),
        "subscribe_p99_ms": round(at_rate["p99_ms"], 2),
        "fetch_subscribers_p50_ms": round(percentile(busy, 0.5), 2),
        "fetch_subscribers_p99_ms": round(percentile(busy, 0.99), 2),
        "fetch_subscribers_idle_p99_ms": round(percentile(idle, 0.99), 2),
        "fetches": len(busy),
        "subscribe_max_per_s": flat_out["subscribe_per_s"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--subscriptions", type=int, default=1_000_000)
    parser.add_argument("--topics", type=int, default=100_000)
    parser.add_argument("--subscribers", type=int, default=10_000)
    parser.add_argument("--rate", type=float, default=RATE_PER_S, help="Subscribes per second")
    parser.add_argument("--load", help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, default=10.0, help="of the measured part")
    options = parser.parse_args()
    if options.load is not None:
        print(json.dumps(asyncio.run(subscribe_for(*json.loads(options.load)))))
        return
    with tempfile.TemporaryDirectory(prefix="usubscription-scale-") as directory:
        path = Path(directory) / "store.db"
        fill(path, options.subscriptions, options.topics, options.subscribers)
        endpoint = f"tcp/127.0.0.1:{free_port()}"
        service = Service(path, endpoint)
        try:
            figures = {
                "subscriptions": options.subscriptions,
                "topics": options.topics,
                "subscribers": options.subscribers,
            }
            figures |= {"start_s": round(service.start_s, 2)}
            figures |= measure(endpoint, options.seconds, options.rate, options.topics)
            figures |= {"rss_peak_mib": round(service.memory_mib()), "cpu_s": round(service.cpu_s(), 1)}
            figures |= {"store_mib": round(sum(file.stat().st_size for file in Path(directory).iterdir()) / 2**20)}
        finally:
            service.stop()
    for name, value in figures.items():
        print(f"{name:32} {value:>12,}")
    print(json.dumps({"usubscription": figures}))


if __name__ == "__main__":
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))  # stdout is for figures
    main()
