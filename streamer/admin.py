"""The admin port: /metrics, /healthz (alive), /readyz (nothing is wrong; else 503 and what is), /vehicles. Plain HTTP/1.1, GET only.

`notes` of /readyz are what a person may want to know though nothing is wrong.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any, Final, Self

from uprotocol.status import UStatusError
from uprotocol.v1.ucode_pb2 import UCode

REQUEST_BYTES_MAX: Final = 8_192  # a GET with the usual headers has some 500
VEHICLES_AT_ONCE: Final = 500  # written in one step, some milliseconds of the loop
REQUEST_TIMEOUT_S: Final = 5.0  # a client that connects and says nothing holds no memory for longer


class Admin:
    """Serves one streamer at `address` (HOST:PORT): its problems, of which none means ready, and its metrics as text."""

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
                f"the admin port {self._host}:{self.port} can't be opened: {error.strerror}; is another streamer running?",
            ) from None
        self.port = self._server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
            await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(REQUEST_TIMEOUT_S):
                request = await reader.readuntil(b"\r\n\r\n")
                for part in self._answer(request.split(b"\r\n", 1)[0].decode("latin-1")):
                    writer.write(part)
                    await writer.drain()
                    await asyncio.sleep(0)
        except (TimeoutError, ConnectionError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass
        finally:
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
                yield _response("200 OK", "text/plain; version=0.0.4", self._metrics())
            case "/healthz":
                yield _response("200 OK", "application/json", b'{"status":"alive"}\n')
            case "/readyz":
                problems = self._problems()
                told = {"status": "not ready" if problems else "ready", "problems": problems, "notes": self._notes()}
                body = json.dumps(told).encode() + b"\n"
                yield _response("503 Service Unavailable" if problems else "200 OK", "application/json", body)
            case "/vehicles":
                yield b"HTTP/1.1 200 OK\r\nContent-Type: application/x-ndjson\r\nConnection: close\r\n\r\n"
                for some in _slices(self._vehicles()):
                    yield b"".join(json.dumps(one).encode() + b"\n" for one in some)
            case _:
                yield _response("404 Not Found", "text/plain", b"there are /metrics, /healthz, /readyz and /vehicles\n")


def _slices(entries: Iterable[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    rest = iter(entries)
    while some := list(islice(rest, VEHICLES_AT_ONCE)):
        yield some


def _response(status: str, type: str, body: bytes) -> bytes:
    return f"HTTP/1.1 {status}\r\nContent-Type: {type}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body
