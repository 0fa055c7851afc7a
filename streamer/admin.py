"""The admin port: /metrics, /healthz (alive), /readyz (nothing is wrong; else 503 and what is), /vehicles. Plain
HTTP/1.1, GET only.

`notes` of /readyz are what a person may want to know though nothing is wrong.

Who asks without end takes a tenth of the loop at most: beyond that the last answer serves again. Lists are cut.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any, Final, Self

from uprotocol.status import UStatusError
from uprotocol.v1.ucode_pb2 import UCode

REQUEST_BYTES_MAX: Final = 8_192  # a GET with the usual headers has some 500
VEHICLES_AT_ONCE: Final = 500  # written in one step, some milliseconds of the loop
REQUEST_TIMEOUT_S: Final = 5.0  # a client that connects and says nothing holds no memory for longer
CONNECTIONS_MAX: Final = 256  # at once; beyond it they are closed: a monitor has one or two
LINES_TOLD_MAX: Final = 300  # of problems, and of notes; all PAUSES_MAX patterns that may be paused fit
LINE_CHARACTERS_MAX: Final = 1_000
LOOP_SHARE: Final = 0.1  # of the loop's time that answers may cost
LOOP_S_MAX: Final = 0.25  # ... beside what was not asked for before: every monitor's answer is made for it


class Admin:
    """Serves one streamer at `address` (HOST:PORT): its problems, of which none means ready, and its metrics as
    text."""

    def __init__(
        self,
        address: str,
        problems: Callable[[], list[str]],
        metrics: Callable[[], bytes] = lambda: b"",
        notes: Callable[[], list[str]] = list,
        vehicles: Callable[[], Iterable[dict[str, Any]]] = list,
    ) -> None:
        self._host, _, port = address.rpartition(":")
        self.port = int(port)
        self._problems, self._metrics, self._notes, self._vehicles = problems, metrics, notes, vehicles
        self._server: asyncio.Server | None = None
        self._connections = 0
        self._made: dict[str, bytes] = {}  # the last answer, by path
        self._left_s, self._refilled_at = LOOP_S_MAX, time.perf_counter()

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def open(self) -> None:
        """Raises UStatusError(UNAVAILABLE) if the port can't be had."""
        try:
            self._server = await asyncio.start_server(self._serve, self._host, self.port, limit=REQUEST_BYTES_MAX)
        except OSError as error:
            raise UStatusError(
                UCode.UNAVAILABLE,
                f"the admin port {self._host}:{self.port} can't be opened: {error.strerror}; is another streamer "
                "running?",
            ) from None
        self.port = self._server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
            await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._connections += 1
        try:
            if self._connections > CONNECTIONS_MAX:
                return
            async with asyncio.timeout(REQUEST_TIMEOUT_S):
                request = await reader.readuntil(b"\r\n\r\n")
                for part in self._answer(request.split(b"\r\n", 1)[0].decode("latin-1")):
                    writer.write(part)
                    await writer.drain()
                    await asyncio.sleep(0)
        except (TimeoutError, ConnectionError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass
        finally:
            self._connections -= 1
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()

    def _answer(self, line: str) -> Iterator[bytes]:
        """Written part by part, so that a long one holds up nothing else."""
        method, _, rest = line.partition(" ")
        path = rest.split(" ")[0].split("?")[0]
        if method not in ("GET", "HEAD"):
            yield _response("405 Method Not Allowed", "text/plain", b"GET only\n")
            return
        match path:
            case "/metrics":
                yield self._kept(path, lambda: _response("200 OK", "text/plain; version=0.0.4", self._metrics()))
            case "/healthz":
                yield _response("200 OK", "application/json", b'{"status":"alive"}\n')
            case "/readyz":
                yield self._kept(path, self._ready)
            case "/vehicles":
                yield from self._tell_vehicles()
            case _:
                yield _response("404 Not Found", "text/plain", b"there are /metrics, /healthz, /readyz and /vehicles\n")

    def _tell_vehicles(self) -> Iterator[bytes]:
        """In slices, between which others have their turn. It is too long to be kept: who asks too often is told to
        wait."""
        if not self._may_work():
            yield _response(
                "503 Service Unavailable", "text/plain", b"all of it was told just now: ask again in some seconds\n"
            )
            return
        yield b"HTTP/1.1 200 OK\r\nContent-Type: application/x-ndjson\r\nConnection: close\r\n\r\n"
        rest = iter(self._vehicles())
        while True:
            with self._working():
                part = b"".join(json.dumps(one).encode() + b"\n" for one in islice(rest, VEHICLES_AT_ONCE))
            if not part:
                return
            yield part

    def _ready(self) -> bytes:
        problems = _cut(self._problems())
        told = {"status": "not ready" if problems else "ready", "problems": problems, "notes": _cut(self._notes())}
        body = json.dumps(told).encode() + b"\n"
        return _response("503 Service Unavailable" if problems else "200 OK", "application/json", body)

    def _kept(self, path: str, make: Callable[[], bytes]) -> bytes:
        if path not in self._made or self._may_work():
            with self._working():
                self._made[path] = make()
        return self._made[path]

    def _may_work(self) -> bool:
        now = time.perf_counter()
        self._left_s = min(self._left_s + LOOP_SHARE * (now - self._refilled_at), LOOP_S_MAX)
        self._refilled_at = now
        return self._left_s > 0

    @contextlib.contextmanager
    def _working(self) -> Iterator[None]:
        begin = time.perf_counter()
        yield
        self._left_s -= time.perf_counter() - begin


def _cut(lines: list[str]) -> list[str]:
    told = [
        line if len(line) <= LINE_CHARACTERS_MAX else line[:LINE_CHARACTERS_MAX] + "..."
        for line in lines[:LINES_TOLD_MAX]
    ]
    return told if len(lines) <= LINES_TOLD_MAX else [*told, f"and {len(lines) - LINES_TOLD_MAX} more"]


def _response(status: str, type: str, body: bytes) -> bytes:
    return (
        f"HTTP/1.1 {status}\r\nContent-Type: {type}\r\nContent-Length: {len(body)}\r\nConnection: "
        "close\r\n\r\n".encode()
        + body
    )
