"""The first messages of many new topics on DDS, and how long messages of a known topic wait meanwhile.

one way        here: 2,000 writers                   there: one reader with a wildcard
with readers   here: 2,000 writers                   there: a reader for each topic, made one by one
both ways      each end reads 2,000 topics of the other, and both begin at the same time

Two processes have their own transports on loopback. Meanwhile a known topic carries a message every 20 ms in each
direction that has topics; its wait is the time since the message was due.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from campaigns.bench.networks import DDS_LOOPBACK
from campaigns.bench.processes import BenchError, Child, free_domain
from transports.dds import DdsTransport
from transports.dds.config import DdsConfig
from uprotocol import uri as uris
from uprotocol.message import UMessageBuilder, UPayload
from uprotocol.transport import LocalUriProvider
from uprotocol.v1.uattributes_pb2 import UPayloadFormat
from uprotocol.v1.umessage_pb2 import UMessage
from uprotocol.v1.uri_pb2 import UUri

TOPICS: Final = 2_000
BATCH: Final = 512  # the batch size of the dispatcher
KNOWN: Final = 0x9000  # the resource of the known topic
KNOWN_PERIOD_S: Final = 0.02
CASE_S_MAX: Final = 90.0
CASES: Final = {"one_way": ("all", False), "with_readers": ("each", False), "both_ways": ("each", True)}


def topic(authority: str, number: int) -> UUri:
    return uris.uri(authority, 0x1000 + number // 256, 1, 0x8000 + number % 256)


def message(of: UUri, payload: bytes) -> UMessage:
    return UMessageBuilder.publish(of).build_from_upayload(UPayload(payload, UPayloadFormat.UPAYLOAD_FORMAT_RAW))


def cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


class Arrived:
    """Which topics have arrived, and how late the messages of the known topic were."""

    def __init__(self) -> None:
        self.topics: set[bytes] = set()
        self.messages = 0
        self.waited_s = 0.0
        self.all = asyncio.Event()

    def on_receive(self, message: UMessage) -> None:
        source = message.attributes.source
        if source.resource_id == KNOWN:
            self.waited_s = max(self.waited_s, time.time() - float(message.payload))
            return
        self.messages += 1
        self.topics.add(source.SerializeToString())
        if len(self.topics) == TOPICS:
            self.all.set()


async def end(me: str, other: str, domain: int, asks: str, sends: bool) -> None:
    """Runs one of the two processes: JSON lines on stdin are its commands, JSON lines on stdout its results."""
    lines: asyncio.Queue[None] = asyncio.Queue()

    def read() -> None:
        if sys.stdin.readline():
            lines.put_nowait(None)

    asyncio.get_running_loop().add_reader(sys.stdin, read)
    config = DdsConfig(domain_id=domain, cyclone_xml=DDS_LOOPBACK)
    async with DdsTransport(config, LocalUriProvider(me, 1, 1)) as transport:
        arrived, began = Arrived(), time.perf_counter()
        if asks == "all":
            await transport.register_listener(uris.pattern(other), arrived)
        elif asks == "each":
            wanted = [topic(other, number) for number in range(TOPICS)] + [uris.uri(other, 1, 1, KNOWN)]
            await asyncio.gather(*(transport.register_listener(one, arrived) for one in wanted))
        registered_s = time.perf_counter() - began
        made = [message(topic(me, number), b"x" * 256) for number in range(TOPICS if sends else 0)]
        print(json.dumps({"registered_s": registered_s}), flush=True)
        await lines.get()
        if sends:  # the other end knows it from now on
            await transport.send_batch([message(uris.uri(me, 1, 1, KNOWN), b"%.6f" % time.time())])
        print(json.dumps({"ready": True}), flush=True)
        await lines.get()
        arrived.waited_s = 0.0
        began, used = time.perf_counter(), cpu_s()
        known = asyncio.ensure_future(_tick(transport, uris.uri(me, 1, 1, KNOWN))) if sends else None
        sending = asyncio.ensure_future(_send(transport, made))
        if asks:
            await asyncio.wait_for(arrived.all.wait(), CASE_S_MAX)
        await sending
        figures = {
            "seconds": time.perf_counter() - began,
            "cpu_s": cpu_s() - used,
            "waited_ms": arrived.waited_s * 1_000,
        }
        print(json.dumps(figures | {"messages": arrived.messages if asks else TOPICS}), flush=True)
        await lines.get()
        if known is not None:
            known.cancel()


async def _send(transport: DdsTransport, made: list[UMessage]) -> None:
    for start in range(0, len(made), BATCH):
        statuses = await transport.send_batch(made[start : start + BATCH])
        refused = [status for status in statuses if status.code]
        if refused:
            raise BenchError(f"{len(refused)} of {len(statuses)} were refused: {refused[0].message}")


async def _tick(transport: DdsTransport, known: UUri) -> None:
    loop = asyncio.get_running_loop()
    due = loop.time()
    sent: set[asyncio.Future[Any]] = set()
    while True:
        sending = asyncio.ensure_future(transport.send_batch([message(known, b"%.6f" % time.time())]))
        sent.add(sending)
        sending.add_done_callback(sent.discard)
        due += KNOWN_PERIOD_S
        await asyncio.sleep(max(due - loop.time(), 0))


def _case(name: str, directory: Path) -> dict[str, float]:
    asks, both = CASES[name]
    domain = str(free_domain())
    ends = [("here", "there", asks if both else "", True), ("there", "here", asks, both)]
    children = [
        Child.module(me, "campaigns.bench.dds_topics", "--end", me, other, domain, wants, int(sends), log_dir=directory)
        for me, other, wants, sends in ends
    ]
    try:
        registered = max(child.answer(CASE_S_MAX)["registered_s"] for child in children)
        for step in ("known", "all"):
            for child in children:
                child.tell(begin=step)
            if step == "known":
                for child in children:
                    child.answer(CASE_S_MAX)
        answers = [child.answer(CASE_S_MAX) for child in children]
        for child in children:
            child.tell(end=True)
    finally:
        for child in children:
            child.close()
    if any(one["messages"] != TOPICS for one in answers):
        raise BenchError(f"{name}: of {TOPICS} topics came {[one['messages'] for one in answers]} messages")
    return {
        "seconds": max(one["seconds"] for one in answers),
        "cpu_s": sum(one["cpu_s"] for one in answers),
        "known_waited_ms": max(one["waited_ms"] for one in answers),
        "registered_s": registered,
    }


def measure(directory: Path, say: Callable[[str], None]) -> dict[str, dict[str, float]]:
    """Returns by case: seconds until all first messages have arrived, CPU seconds of both ends, the longest wait of a
    known topic in ms, seconds to create the readers. Raises BenchError if a message is lost or doubled."""
    directory.mkdir(parents=True, exist_ok=True)
    results = {}
    for name in CASES:
        results[name] = {key: round(value, 3) for key, value in _case(name, directory).items()}
        say(f"{name}: {results[name]}")
    return results


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m campaigns.bench.dds_topics", description=__doc__.splitlines()[0])
    parser.add_argument("--dir", type=Path, default=Path("out/bench-dds"), help="for the logs of the two processes")
    parser.add_argument("--end", nargs=5, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.end:
        me, other, domain, asks, sends = arguments.end
        asyncio.run(end(me, other, int(domain), asks, sends == "1"))
        return
    print(json.dumps(measure(arguments.dir, lambda text: print(text, file=sys.stderr))))


if __name__ == "__main__":
    main()
