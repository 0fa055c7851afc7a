"""Processes of the measurement of the HTTP edge (costs/edge.py).

serve ours    a log, its HistoryService and HttpStreams: GET /stream
serve bare    the same messages through a queue of each client and aiohttp_sse alone: what a web developer writes first
listen        clients of one process: parse each event, and check that the numbers of a topic follow each other
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from aiohttp import web
from aiohttp_sse import EventSourceResponse

from history.log.log import Log
from history.service.service import HistoryService
from streamer.config.edge import HttpSection
from streamer.edge.streams import HttpStreams
from streamer.http.places import Places
from transports.local import LocalNetwork, LocalTransport
from uprotocol import uri as uris
from uprotocol.message import UMessageBuilder, UPayload
from uprotocol.transport import LocalUriProvider
from uprotocol.v1.uattributes_pb2 import UPayloadFormat
from uprotocol.v1.uri_pb2 import UUri

ENTITY: Final = 0x20
QUEUE_MAX: Final = 1_000
_EVENT: Final = re.compile(rb'"text":"(\d+) (\d+)"')


def topic_of(number: int) -> UUri:
    return uris.uri("vehicle", ENTITY, 1, 0x8001 + number)


class Ours:
    """The edge of a gateway, without the gateway."""

    async def open(self) -> Callable[[web.Request], Any]:
        local = LocalUriProvider("gateway", 4, 1)
        transport = LocalTransport.on(LocalNetwork(), local)
        await transport.open()
        self._log = await Log.open(Path(tempfile.mkdtemp()) / "history.db", name="durable")
        service = HistoryService(transport, local, [self._log])
        await service.start()
        return HttpStreams(service, self, HttpSection(), Places(100_000)).get

    async def of(self, request: web.Request) -> UUri:
        return uris.uri("phone", 0x8000, 1)

    def still_allowed(self, request: web.Request, caller: UUri) -> bool:
        return True

    async def publish(self, topic: int, text: str) -> None:
        payload = UPayload(text.encode(), UPayloadFormat.UPAYLOAD_FORMAT_TEXT)
        message = UMessageBuilder.publish(topic_of(topic)).build_from_upayload(payload)
        await self._log.append([self._log.stream_id(topic_of(topic))], [message])


class Bare:
    """A fan-out without history: what a client misses is lost."""

    def __init__(self) -> None:
        self._queues: dict[str, list[asyncio.Queue[tuple[str, str]]]] = {}
        self._seq = 0

    async def open(self) -> Callable[[web.Request], Any]:
        return self._get

    async def _get(self, request: web.Request) -> web.StreamResponse:
        response = EventSourceResponse(sep="\n")
        await response.prepare(request)
        queue = asyncio.Queue[tuple[str, str]](QUEUE_MAX)
        self._queues.setdefault(request.query["topic"], []).append(queue)
        async with response:
            while True:
                id, data = await queue.get()
                await response.send(data, id=id)

    async def publish(self, topic: int, text: str) -> None:
        self._seq += 1
        name = uris.format(topic_of(topic))
        data = json.dumps(
            {"topic": name, "id": "0", "time": "2026-01-01T00:00:00.000Z", "seq": self._seq, "text": text}
        )
        for queue in self._queues.get(name, ()):
            queue.put_nowait((str(self._seq), data.replace('": "', '":"')))


async def serve(kind: str) -> None:
    """Commands on stdin: {"publish": {"topics", "per_s", "seconds"}}."""
    subject = Ours() if kind == "ours" else Bare()
    app = web.Application()
    app.router.add_get("/stream", await subject.open())
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0, backlog=4_096)
    await site.start()
    print(f"ready {runner.addresses[0][1]}", flush=True)
    while line := await asyncio.to_thread(sys.stdin.readline):
        asked = json.loads(line)["publish"]
        began, sent = time.monotonic(), 0
        rounds = int(asked["seconds"] * asked["per_s"])
        for number in range(rounds):
            for topic in range(asked["topics"]):  # evenly over the round
                due = began + (number + topic / asked["topics"]) / asked["per_s"]
                await asyncio.sleep(max(0, due - time.monotonic()))
                await subject.publish(topic, f"{number} {time.monotonic_ns()}")
                sent += 1
        print(json.dumps({"sent": sent}), flush=True)


class Listener(asyncio.Protocol):
    """One client: GET, then events."""

    def __init__(self, query: str, delays_ns: list[int]) -> None:
        self._query, self._delays_ns = query, delays_ns
        self._rest = b""
        self._next = 0
        self.events = self.wrong = 0
        self.ready = asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.write(f"GET /stream?{self._query} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())

    def data_received(self, data: bytes) -> None:
        now = time.monotonic_ns()
        self.ready.set()
        whole, _, self._rest = (self._rest + data).rpartition(b"\n")
        for number, sent in _EVENT.findall(whole):
            self.wrong += int(number) != self._next
            self._next = int(number) + 1
            self.events += 1
            self._delays_ns.append(now - int(sent))


async def listen(port: int, clients: int, topics: int) -> None:
    """Any line on stdin asks for the figures."""
    delays: list[int] = []
    loop, found = asyncio.get_running_loop(), list[Listener]()
    for number in range(clients):
        query = f"topic={uris.format(topic_of(number % topics))}"
        _, client = await loop.create_connection(lambda query=query: Listener(query, delays), "127.0.0.1", port)  # type: ignore[misc]
        await client.ready.wait()
        found.append(client)
    print("ready", flush=True)
    while await asyncio.to_thread(sys.stdin.readline):
        seen = -1
        while seen != len(delays):  # until nothing is under way any more
            seen = len(delays)
            await asyncio.sleep(0.5)
        ordered = sorted(delays)
        figures = {
            "events": sum(client.events for client in found),
            "disordered": sum(client.wrong for client in found),
            "p50_ms": ordered[len(ordered) // 2] / 1e6 if ordered else None,
            "p99_ms": ordered[len(ordered) * 99 // 100] / 1e6 if ordered else None,
        }
        print(json.dumps(figures), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("role", choices=["serve", "listen"])
    parser.add_argument("kind", nargs="?", default="ours")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--clients", type=int, default=0)
    parser.add_argument("--topics", type=int, default=1)
    asked = parser.parse_args()
    if asked.role == "serve":
        asyncio.run(serve(asked.kind))
    else:
        asyncio.run(listen(asked.port, asked.clients, asked.topics))


if __name__ == "__main__":
    main()
