"""The HTTP server of the admin port: GET (and HEAD), one request per connection.

connection -> Line: limits number, time and size -> TLS -> aiohttp: parses and routes -> token -> page

aiohttp limits neither the number of connections nor the time in which a request must arrive: Line limits both, and the
size of a request.
"""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import functools
import hmac
import logging
import ssl
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, Generic, TypeVar

import structlog
from aiohttp import web

from streamer.config import AdminSection
from transports.certificates import KeptFiles, load_pair
from uprotocol.status import UStatusError
from uprotocol.v1.ucode_pb2 import UCode

REQUEST_BYTES_MAX: Final = 8_192  # a usual GET has some 500
REQUEST_TIMEOUT_S: Final = 5.0  # then the connection is closed
# at once; one more closes the oldest, so that idle connections lock nobody out: a request takes milliseconds
CONNECTIONS_MAX: Final = 256
CLOSE_S_MAX: Final = 0.5  # for answers in progress; a part of SERVICES_CLOSE_S

TOO_OFTEN: Final = "this was answered a moment ago: ask again in some seconds\n"

PageHandler = Callable[[web.Request], Awaitable[web.StreamResponse]]
MakePage = Callable[[], tuple[int, str, bytes]]  # status, type of the content, content
T = TypeVar("T")
List = Callable[[], Iterator[bytes] | None]  # in slices; None if requested too often

log = structlog.get_logger()
_silent = logging.getLogger("streamer.operating.http_port.nonsense")  # aiohttp's log lines about malformed requests
_silent.disabled = True


class HttpPort:
    """Serves `pages` and `lists` by their paths to clients that `guard` allows."""

    def __init__(self, pages: Mapping[str, MakePage], lists: Mapping[str, List], guard: AdminSection) -> None:
        self._pages, self._lists, self._guard = pages, lists, guard
        self._token: Latest[bytes] | None = None
        self._server: asyncio.Server | None = None
        self._runner: web.AppRunner | None = None
        self._lines: dict[Line, None] = {}  # oldest first

    async def open(self, host: str, port: int) -> int:
        """Returns the port, which the system chooses for 0. Raises as `Admin.open`."""
        guard = self._guard
        self._token = await _latest([guard.token_file], functools.partial(_read_token, guard))
        tls = await _latest([guard.cert_file, guard.key_file], functools.partial(_context, guard))
        http, loop = await self.serve(), asyncio.get_running_loop()
        try:
            self._server = await loop.create_server(lambda: Line(http(), tls, self._lines), host, port)
        except OSError as error:
            why = f"the admin port {host}:{port} can't be opened: {error.strerror}; is another streamer running?"
            raise UStatusError(UCode.UNAVAILABLE, why) from None
        opened: int = self._server.sockets[0].getsockname()[1]
        return opened

    async def serve(self) -> Callable[[], asyncio.Protocol]:
        """Returns a factory for aiohttp's side of a connection."""
        self._runner = runner = web.AppRunner(
            self._application(), access_log=None, logger=_silent, lingering_time=0, shutdown_timeout=CLOSE_S_MAX
        )
        await runner.setup()
        assert runner.server is not None, "setup makes it"
        return runner.server

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
            for line in list(self._lines):
                line.abort()
            await self._server.wait_closed()
        if self._runner is not None:
            await self._runner.cleanup()

    def _application(self) -> web.Application:
        made = web.Application(middlewares=[self._admit])
        made.on_response_prepare.append(_close_after)
        for path, page in self._pages.items():
            made.router.add_get(path, _telling(page))
        for path, slices in self._lists.items():
            made.router.add_get(path, _listing(slices))
        return made

    @web.middleware
    async def _admit(self, request: web.Request, handler: PageHandler) -> web.StreamResponse:
        if self._token is not None and not _shows(request, await self._token.get()):
            return web.Response(status=401, text="a token is asked for\n", headers={"WWW-Authenticate": "Bearer"})
        try:
            return await handler(request)
        except web.HTTPNotFound:
            return web.Response(status=404, text=f"there are {', '.join((*self._pages, *self._lists))}\n")
        except web.HTTPMethodNotAllowed as error:
            return web.Response(status=405, text="GET only\n", headers={"Allow": error.headers["Allow"]})
        except (web.HTTPException, ConnectionError):
            raise
        except Exception:
            log.exception("a question at the admin port has failed", path=request.path)
            raise


def _telling(page: MakePage) -> PageHandler:
    async def tell(_: web.Request) -> web.StreamResponse:
        status, type, body = page()
        return web.Response(status=status, headers={"Content-Type": type}, body=body)

    return tell


def _listing(slices: List) -> PageHandler:
    async def tell(request: web.Request) -> web.StreamResponse:
        parts = slices()
        if parts is None:
            return web.Response(status=503, text=TOO_OFTEN)
        response = web.StreamResponse(headers={"Content-Type": "application/x-ndjson"})
        await response.prepare(request)
        for part in parts if request.method == "GET" else ():
            await response.write(part)
            await asyncio.sleep(0)  # lets other tasks run
        return response

    return tell


async def _close_after(_: web.Request, response: web.StreamResponse) -> None:
    response.force_close()
    response.headers.update({"Connection": "close", "Server": "up-streamer"})


# Authentication


class Latest(Generic[T]):
    """The current content of files. Only one read runs at a time."""

    def __init__(self, files: KeptFiles[T], found: T) -> None:
        self._files, self._found = files, found
        self._looking: asyncio.Future[T] | None = None

    async def get(self) -> T:
        """Returns the current content. During a read, other callers get the last content."""
        if self._looking is None or self._looking.done():
            self._looking = asyncio.ensure_future(asyncio.to_thread(self._files.current))
            self._found = await asyncio.shield(self._looking)
        return self._found


async def _latest(files: Sequence[Path | None], make: Callable[[], T]) -> Latest[T] | None:
    """Returns None if the files are not configured. Raises as `make`."""
    if files[0] is None:
        return None
    kept = KeptFiles(files, make)
    return Latest(kept, await asyncio.to_thread(kept.current))


def _context(guard: AdminSection) -> ssl.SSLContext:
    assert guard.cert_file is not None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        load_pair(context, guard.cert_file, guard.key_file)
    except (OSError, ValueError) as error:
        why = f"admin.cert_file {guard.cert_file} and admin.key_file {guard.key_file} can't be used: {error}"
        raise UStatusError(UCode.FAILED_PRECONDITION, why) from None
    return context


def _read_token(guard: AdminSection) -> bytes:
    assert guard.token_file is not None
    try:
        token, why = guard.token_file.read_bytes().removeprefix(codecs.BOM_UTF8).strip(), "it is empty"
    except OSError as error:
        token, why = b"", str(error.strerror)
    if not token:
        raise UStatusError(UCode.FAILED_PRECONDITION, f"admin.token_file {guard.token_file} can't be used: {why}")
    return token


def _shows(request: web.Request, token: bytes) -> bool:
    scheme, _, shown = request.headers.get("Authorization", "").partition(" ")
    right = hmac.compare_digest(shown.strip().encode(errors="surrogateescape"), token)
    return right and scheme.lower() == "bearer"


class Line(asyncio.Protocol):
    """One connection, passed to aiohttp while it keeps the limits of this file. Above CONNECTIONS_MAX connections,
    the oldest is closed. TLS begins here and not at the listening socket, so that a connection counts before it."""

    def __init__(self, http: asyncio.Protocol, tls: Latest[ssl.SSLContext] | None, others: dict[Line, None]) -> None:
        self._http, self._tls, self._others = http, tls, others
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._securing: asyncio.Task[None] | None = None
        self._is_served = False  # True once it is passed to aiohttp
        self._early = b""  # data received before that
        self._bytes_left = REQUEST_BYTES_MAX

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        if len(self._others) >= CONNECTIONS_MAX:
            next(iter(self._others)).abort()
        self._others[self] = None
        self._timer = asyncio.get_running_loop().call_later(REQUEST_TIMEOUT_S, self.abort)
        if self._tls is None:
            self._serve(transport)
        else:
            transport.pause_reading()
            self._securing = asyncio.create_task(self._secure(transport, self._tls), name="admin TLS")

    async def _secure(self, transport: asyncio.Transport, tls: Latest[ssl.SSLContext]) -> None:
        loop, secured = asyncio.get_running_loop(), None
        try:
            with contextlib.suppress(OSError):  # handshake failed; TimeoutError and SSLError are OSErrors
                context = await tls.get()
                secured = await loop.start_tls(
                    transport, self, context, server_side=True, ssl_handshake_timeout=REQUEST_TIMEOUT_S
                )
        finally:
            if secured is None:
                self.connection_lost(None)
        if secured is not None and self in self._others:
            self._transport = secured
            self._serve(secured)

    def _serve(self, transport: asyncio.Transport) -> None:
        self._is_served = True
        self._http.connection_made(transport)
        if self._early:
            self._http.data_received(self._early)

    def data_received(self, data: bytes) -> None:
        self._bytes_left -= len(data)
        if self._bytes_left < 0:
            self.abort()
        elif self._is_served:
            self._http.data_received(data)
        else:
            self._early += data

    def eof_received(self) -> bool | None:
        return self._http.eof_received()

    def pause_writing(self) -> None:
        self._http.pause_writing()

    def resume_writing(self) -> None:
        self._http.resume_writing()

    def connection_lost(self, error: Exception | None) -> None:
        self._others.pop(self, None)
        if self._timer is not None:
            self._timer.cancel()
        if self._is_served:
            self._is_served = False
            self._http.connection_lost(error)

    def abort(self) -> None:
        self._others.pop(self, None)
        if self._transport is not None:
            self._transport.abort()
        if self._securing is not None:
            self._securing.cancel()
