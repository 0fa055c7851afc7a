"""Who takes part in the walkthrough of Pushpin's document: its backend, a publisher, curl, and an edge.

Backend  reliable-stream.php in Python: a blob in a file, its MD5 as id      Curl  raw bytes of a held answer
Edge     a Proxy on a real port, with channels in memory
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import re
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from aiohttp import web

from streamer.config.edge import HttpSection, ProxySection
from streamer.grip.headers import grip_last
from streamer.grip.items import Item, ResponseFormat, StreamFormat
from streamer.grip.link import Links, Sign
from streamer.grip.proxy import Proxy
from uprotocol import callbacks
from uprotocol.pacing import Backoff
from uprotocol.status import UStatusError
from uprotocol.v1.ucode_pb2 import UCode

PATH = "/reliable-stream"
CHANNEL = "reliable-stream"
HOST = "127.0.0.1"
WAIT_S = 10.0
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class MemoryChannels:
    """Channels without a log: an item whose id is the channel's last one is a repeat."""

    def __init__(self, *names: str) -> None:
        self._last: dict[str, str | None] = {}
        self.listeners: dict[str, list[Callable[[Item], None]]] = {}
        for name in names:
            self.add(name)

    def add(self, name: str) -> None:
        self._last[name], self.listeners[name] = None, []

    def last_id(self, name: str) -> str | None:
        if name not in self._last:
            raise UStatusError(UCode.NOT_FOUND, f"unknown channel {name!r}; known: {', '.join(self._last)}")
        return self._last[name]

    def listen(self, name: str, on_item: Callable[[Item], None]) -> callbacks.Remove:
        self.last_id(name)
        return callbacks.add(self.listeners[name], on_item)

    def publish(self, item: Item) -> None:
        if item.id is None or item.id != self.last_id(item.channel):
            self._last[item.channel] = item.id or self._last[item.channel]
            for on_item in list(self.listeners[item.channel]):
                on_item(item)


class MemoryClients:
    def __init__(self, clients_max: int = 100) -> None:
        self.refused, self.events, self.count = Counter[str](), Counter[str](), Counter[str]()
        self._clients_max = clients_max

    @property
    def are_full(self) -> bool:
        return self.count.total() >= self._clients_max

    def turned_away(self, reason: str, why: str) -> None:
        self.refused[reason] += 1

    @contextlib.contextmanager
    def taken(self, kind: str) -> Iterator[None]:
        self.count[kind] += 1
        try:
            yield
        finally:
            self.count[kind] -= 1


def stream_item(content: bytes, id: str | None = None, prev_id: str | None = None, channel: str = CHANNEL) -> Item:
    return Item(channel, id, prev_id, False, StreamFormat(content), None)


def response_item(body: bytes, id: str | None = None, prev_id: str | None = None, **answer: object) -> Item:
    return Item(CHANNEL, id, prev_id, False, None, ResponseFormat(body=body, **answer))  # type: ignore[arg-type]


async def until(holds: Callable[[], object]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not holds():  # noqa: ASYNC110 - any state may be asked for
            await asyncio.sleep(0.001)


async def serve(handler: Handler, port: int = 0, *, cancels: bool = False) -> tuple[web.AppRunner, int]:
    application = web.Application()
    application.router.add_route("*", "/{path:.*}", handler)
    runner = web.AppRunner(application, handler_cancellation=cancels, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, HOST, port, reuse_address=True).start()
    return runner, runner.addresses[0][1]


class Backend:
    """The program of the document. `answer_link`, if it is set, answers requests to the link in its place.
    `before_first`: called after the first answer of a hold was made, and before it is sent."""

    def __init__(self, file: Path, timeout_s: int = 120) -> None:
        self._file, self._timeout_s = file, timeout_s
        self.answer_link: Handler | None = None
        self.before_first: Callable[[], None] = lambda: None
        self.asked: list[web.Request] = []
        self.links = asyncio.Queue[list[str]]()  # the Grip-Last of each request to the link
        self.port = 0
        self._runner: web.AppRunner | None = None

    @property
    def id(self) -> str:
        return hashlib.md5(self._file.read_bytes()).hexdigest()

    def write(self, text: str) -> None:
        self._file.write_text(text)

    async def open(self) -> None:
        self._runner, self.port = await serve(self._answer, self.port)

    async def close(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        self.asked.append(request)
        if request.query.get("recover") == "true":
            self.links.put_nowait(request.headers.getall("Grip-Last", []))
            if self.answer_link is not None:
                return await self.answer_link(request)
            return self.answer(request)
        answer = self.answer(request)
        self.before_first()
        return answer

    def answer(self, request: web.Request) -> web.Response:
        data, last_id = self._file.read_bytes(), None
        id = hashlib.md5(data).hexdigest()
        if request.query.get("recover") == "true":
            name, found, last_id = request.headers.get("Grip-Last", "").partition("; last-id=")
            if not found or name != CHANNEL:
                return web.Response(status=400, text="Invalid Grip-Last header.\n")
        headers = {
            "Grip-Hold": "stream",
            "Grip-Channel": f"{CHANNEL}; prev-id={id}",
            "Grip-Link": f"<{PATH}?recover=true>; rel=next; timeout={self._timeout_s}",
        }
        return web.Response(body=b"" if last_id == id else data, headers=headers, content_type="text/plain")


@dataclass
class Edge:
    """A proxy of all paths to one backend."""

    channels: MemoryChannels
    proxy: Proxy
    clients: MemoryClients
    port: int = 0
    _runner: web.AppRunner | None = None
    _curls: list[Curl] = field(default_factory=list)

    @classmethod
    async def open(
        cls,
        backend_port: int,
        *,
        send_s: float = 5,
        timeout_s: float = 1,
        clients_max: int = 100,
        sign: Sign | None = None,
    ) -> Edge:
        http = HttpSection(listen=f"{HOST}:0", send_s=send_s, clients_max=clients_max)
        section = ProxySection(prefix="/", backend=f"http://{HOST}:{backend_port}", timeout_s=timeout_s)
        channels, clients = MemoryChannels(CHANNEL, "other"), MemoryClients(clients_max)
        links = Links(sign, timeout_s=0.5)
        proxy = Proxy([section], http, channels, links, clients, sign, Backoff(5, 20))
        made = cls(channels, proxy, clients)
        made._runner, made.port = await serve(proxy.handle, cancels=True)
        return made

    async def curl(
        self, path: str = PATH, *headers: str, port: int = 0, method: str = "GET", body: bytes = b""
    ) -> Curl:
        """`port`: of another server."""
        self._curls.append(await Curl.get(port or self.port, path, *headers, method=method, body=body))
        return self._curls[-1]

    async def close(self) -> None:
        assert self._runner is not None
        for curl in self._curls:
            curl.cut()
        await self._runner.cleanup()
        await self.proxy.close()

    async def held(self, count: int) -> None:
        """Returns once so many listen to the channel."""
        await until(lambda: len(self.channels.listeners[CHANNEL]) == count)


class Curl:
    """`curl -i` in raw bytes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self.raw = b""
        self.is_cut = False  # by a reset, not at the end of an answer

    @classmethod
    async def get(cls, port: int, path: str = PATH, *headers: str, method: str = "GET", body: bytes = b"") -> Curl:
        reader, writer = await asyncio.open_connection(HOST, port)
        lines = (f"{method} {path} HTTP/1.1", f"Host: {HOST}:{port}", *headers)
        writer.write("\r\n".join([*lines, "", ""]).encode() + body)
        return cls(reader, writer)

    @property
    def head(self) -> str:
        return self.raw.partition(b"\r\n\r\n")[0].decode()

    @property
    def body(self) -> bytes:
        """What has come of the body, without the lines between its chunks."""
        rest = self.raw.partition(b"\r\n\r\n")[2]
        if "Transfer-Encoding: chunked" not in self.head:
            return rest
        body = b""
        while match := re.match(rb"([0-9A-Fa-f]+)\r\n", rest):
            size = int(match[1], 16)
            body += rest[match.end() : match.end() + size]
            rest = rest[match.end() + size + 2 :]
        return body

    @property
    def lines(self) -> list[str]:
        return self.body.decode().splitlines()

    @property
    def is_whole(self) -> bool:
        return self.raw.endswith(b"0\r\n\r\n") if "chunked" in self.head else bool(self.raw)

    async def until(self, end: str) -> None:
        """Reads until the body ends so."""
        async with asyncio.timeout(WAIT_S):
            while not (b"\r\n\r\n" in self.raw and self.body.endswith(end.encode())):
                if not await self._more():
                    raise AssertionError(f"the answer ends with {self.raw[-200:]!r}")

    async def until_end(self) -> None:
        """Reads until the connection or the answer ends."""
        async with asyncio.timeout(WAIT_S):
            while not self.raw.endswith(b"\r\n0\r\n\r\n") and await self._more():
                pass

    async def _more(self) -> bytes:
        try:
            part = await self._reader.read(65_536)
        except ConnectionResetError:
            self.is_cut, part = True, b""
        self.raw += part
        return part

    def cut(self) -> None:
        self._writer.transport.abort()


def last(id: str) -> list[str]:
    """The Grip-Last of a request to the link."""
    return grip_last({CHANNEL: id})
