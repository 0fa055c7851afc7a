"""The HTTP servers of the edge: for clients at http.listen, and for publishers at grip.publish.

connection -> Line: limits -> TLS -> aiohttp -> HttpServer: size of the body, errors -> EdgeServer -> /stream
                                                                                 |           '-> a proxied backend
                                                                                 '-> PublishServer -> /publish/
"""

from __future__ import annotations

import asyncio
import contextlib
import resource
import ssl
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Final

import structlog
from aiohttp import HttpVersion11, web

from streamer.config.edge import GripSection, HttpSection
from streamer.edge.callers import Callers
from streamer.http.hosts import host_of, is_known_host
from streamer.http.lines import SERVER, Latest, Limits, Line, Lines, Listener, SeldomLog, latest_tls
from streamer.http.places import Places
from streamer.http.statuses import RETRY_LATER, STATUSES
from streamer.reporting import Condition, Reporter, Sample
from uprotocol.status import UStatusError
from uprotocol.v1.ucode_pb2 import UCode

STREAM_PATH: Final = "/stream"
PUBLISH_PATH: Final = "/publish/"
HEAD_BYTES_MAX: Final = 16_384  # a usual one has 1 KiB; tokens and long lists of topics
HEAD_S: Final = 5.0  # for TLS, and for the head of a request
IDLE_S: Final = 15  # between two requests of a connection
BODY_S: Final = 30.0
BODY_BYTES_MAX: Final = 1 << 20  # of requests to backends
PUBLISH_BYTES_MAX: Final = 4 << 20  # of items: some long ones at once
BODIES_BYTES_MAX: Final = 64 << 20  # of all requests to backends that are being answered; they pass in pieces
PUBLISH_BODIES_BYTES_MAX: Final = 16 << 20  # of publishers; each takes up to ten times as much until it is sent
SMALL_BYTES_MAX: Final = 16 << 10  # a body that needs no such room, so that large ones do not keep small ones out
LINGER_S: Final = 1.0  # reads the rest of a body that was refused, so that its sender gets the answer
SPARE: Final = 256  # connections beyond clients_max: short requests, and those that are told to come back later
PUBLISHERS_CONNECTED_MAX: Final = 256  # connections
FILES_SPARE: Final = 256  # open files for everything but connections: logs, networks
EDGE_CLOSE_S_MAX: Final = 0.25  # for answers in progress; a part of SERVICES_CLOSE_S, as the next one
CANCELLED_S_MAX: Final = 0.1  # for what was cancelled
PATH_SHOWN_MAX: Final = 200  # characters in the log

# a handler's errors; each other is answered 500, and logged
EDGE_STATUSES: Final = {**STATUSES, UCode.RESOURCE_EXHAUSTED: 503}  # of the gateway, not of the client alone

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

log = structlog.get_logger()


class HttpServer(Reporter):
    """A server at `address`. `_answer` is called with the head of a request; its body has limits of its own."""

    def __init__(
        self, what: str, address: str, limits: Limits, places: Places, *, bodies_bytes_max: int, cancels: bool
    ) -> None:
        """`what`: the setting that has the address. `bodies_bytes_max`: of all requests at once. `cancels`: an answer
        is cancelled when its client goes."""
        self.what, self._address, self._limits, self._places = what, address, limits, places
        self._bodies_bytes_max, self._cancels = bodies_bytes_max, cancels
        self._listener: Listener | None = None
        self._running: set[asyncio.Task[object]] = set()
        self._bodies_bytes, self._log = 0, SeldomLog()
        self._pair: tuple[Path | None, Path | None] = None, None  # files of the certificate and of its key

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        raise NotImplementedError

    async def open(self) -> int:
        """Returns the port, which the system chooses for 0. Raises UNAVAILABLE if the port can't be opened,
        FAILED_PRECONDITION for a file that can't be used."""
        tls = await latest_tls(self.what.partition(".")[0], *self._pair)
        self._listener = self.listener(tls)
        port = await self._listener.open()
        log.info("listens for HTTP", setting=self.what, port=port, tls=tls is not None)
        return port

    def listener(self, tls: Latest[ssl.SSLContext] | None = None) -> Listener:
        application = web.Application(client_max_size=self._limits.body_bytes_max, middlewares=[self._guarded])
        application.router.add_route("*", "/{path:.*}", self._answer)
        application.on_response_prepare.append(self._prepare)
        return Listener(
            self.what,
            self._address,
            Lines(self._limits, tls, self._places.refused),
            application,
            keepalive_timeout=IDLE_S,
            lingering_time=LINGER_S,
            auto_decompress=False,  # a backend gets the body as it was sent
            handler_cancellation=self._cancels,
            shutdown_timeout=CANCELLED_S_MAX,
        )

    async def close(self) -> None:
        """Ends clients that are held at once, lets other answers end, and closes. May be called twice."""
        if self._listener is None:
            return
        self._listener.refuse_more()
        self._places.end()
        if self._running:
            await asyncio.wait(self._running, timeout=EDGE_CLOSE_S_MAX)
        await self._listener.close()

    @property
    def connections(self) -> int:
        return 0 if self._listener is None else len(self._listener.lines)

    def conditions(self) -> Iterator[Condition]:
        tls = None if self._listener is None else self._listener.lines.tls
        if tls is not None and tls.trouble:
            yield Condition(tls.trouble)

    @web.middleware
    async def _guarded(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        line, task = Line.of(request), asyncio.current_task()
        if line is None or task is None:
            raise ConnectionResetError("the client has gone")
        number, is_whole = line.begin(request.content.is_eof), request.content.is_eof
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        task.add_done_callback(lambda _: line.end(number, is_whole))  # aiohttp writes the answer in this task, too
        try:
            with self._room_for_body(request):
                return await handler(request)
        except (web.HTTPException, ConnectionError):
            raise
        except UStatusError as error:
            status = EDGE_STATUSES.get(error.code)
            if status is None:
                return self._failed(request, line)
            headers = RETRY_LATER if status == 503 else {}
            return web.Response(status=status, text=f"{error.message}\n", headers=headers)
        except Exception:
            return self._failed(request, line)

    def _failed(self, request: web.Request, line: Line) -> web.Response:
        if self._log.is_due(type(sys.exception()).__name__):
            path = request.path[:PATH_SHOWN_MAX]
            log.exception("a request at the HTTP edge has failed", port=self.what, method=request.method, path=path)
        if line.is_answering:
            line.abort()  # the client sees that the answer is not whole
            raise ConnectionAbortedError
        return web.Response(status=500, text="this request has failed: the log of the gateway says why\n")

    @contextlib.contextmanager
    def _room_for_body(self, request: web.Request) -> Iterator[None]:
        """Raises 413 if the body is too large, 503 if there are too many of them."""
        size, size_max = request.content_length or 0, self._limits.body_bytes_max
        if request.content_length is None and request.body_exists:
            size = size_max  # in chunks
        if size > size_max:
            raise web.HTTPRequestEntityTooLarge(size_max, size, text=f"expected a body of at most {size_max} bytes\n")
        if size > SMALL_BYTES_MAX and self._bodies_bytes + size > self._bodies_bytes_max:
            self._places.refused["bodies"] += 1
            raise web.HTTPServiceUnavailable(text="too many requests at once\n", headers=RETRY_LATER)
        self._bodies_bytes += size
        try:
            yield
        finally:
            self._bodies_bytes -= size

    async def _prepare(self, request: web.Request, response: web.StreamResponse) -> None:
        if line := Line.of(request):
            line.is_answering, line.ends_with_answer = True, request.version < HttpVersion11
        if response.headers.get("Server", "").startswith("Python/"):  # aiohttp's own, not a backend's
            response.headers["Server"] = SERVER


class EdgeServer(HttpServer):
    """Listens at `http.listen`: `stream` answers GET /stream, `proxied` everything else."""

    def __init__(
        self, http: HttpSection, stream: Handler, proxied: Handler | None = None, *, callers: Callers, places: Places
    ) -> None:
        assert http.listen is not None
        self._stream, self._proxied, self._callers = stream, proxied, callers
        wanted = http.clients_max + SPARE
        allowed = allowed_connections(wanted)
        self.note = ""
        if allowed < wanted:
            self.note = (
                f"http.clients_max is {http.clients_max}, but the limit of open files (ulimit -n) lets the HTTP edge "
                f"have {allowed} connections: raise it (systemd: LimitNOFILE=)"
            )
        limits = Limits(allowed, HEAD_BYTES_MAX, HEAD_S, BODY_BYTES_MAX, BODY_S, http.send_s)
        super().__init__("http.listen", http.listen, limits, places, bodies_bytes_max=BODIES_BYTES_MAX, cancels=True)
        self._pair = http.cert_file, http.key_file

    async def open(self) -> int:
        await self._callers.open()
        return await super().open()

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        if request.path != STREAM_PATH:
            self._callers.check_host(request)  # who may ask, and from which page, is the backend's to say
            if self._proxied is None:
                raise web.HTTPNotFound(text=f"there is GET {STREAM_PATH}\n")
            return await self._proxied(request)
        if request.method == "OPTIONS":
            self._callers.check_host(request)
            return self._callers.preflight(request)
        if request.method != "GET":
            raise web.HTTPMethodNotAllowed(request.method, ["GET", "OPTIONS"], text=f"{STREAM_PATH}: GET only\n")
        return await self._stream(request)

    async def _prepare(self, request: web.Request, response: web.StreamResponse) -> None:
        await super()._prepare(request, response)
        if request.path == STREAM_PATH:
            response.headers.update(self._callers.cors(request))

    def notes(self) -> Iterator[str]:
        if self.note:
            yield self.note

    def samples(self) -> Iterator[Sample]:
        yield "edge_connections", ("http",), self.connections


class PublishServer(HttpServer):
    """Listens at `grip.publish`: `publish` answers POST /publish/."""

    def __init__(self, grip: GripSection, publish: Handler, places: Places) -> None:
        assert grip.publish is not None
        self._grip, self._publish = grip, publish
        self._hosts = [grip.publish.rpartition(":")[0]]
        limits = Limits(PUBLISHERS_CONNECTED_MAX, HEAD_BYTES_MAX, HEAD_S, PUBLISH_BYTES_MAX, BODY_S, BODY_S)
        # what has begun is committed, though its publisher has gone
        bodies = PUBLISH_BODIES_BYTES_MAX
        super().__init__("grip.publish", grip.publish, limits, places, bodies_bytes_max=bodies, cancels=False)

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        if self._grip.publish_key_file is None:
            self._refuse_browsers(request)
        if request.path not in (PUBLISH_PATH, PUBLISH_PATH.rstrip("/")):
            raise web.HTTPNotFound(text=f"there is POST {PUBLISH_PATH}\n")
        if request.method != "POST":
            raise web.HTTPMethodNotAllowed(request.method, ["POST"], text=f"{PUBLISH_PATH}: POST only\n")
        return await self._publish(request)

    def _refuse_browsers(self, request: web.Request) -> None:
        """Without a key, whoever is on this machine may publish; pages in its browser may not."""
        if not is_known_host(host_of(request), self._hosts) or "Origin" in request.headers:
            self._places.refused["origin"] += 1
            text = (
                "expected a publisher on this machine, got a page of a browser, or a Host that is not grip.publish or "
                f"loopback ({host_of(request)[:80]!r}): others need grip.publish_key_file\n"
            )
            raise web.HTTPForbidden(text=text)

    def samples(self) -> Iterator[Sample]:
        yield "edge_connections", ("publish",), self.connections


def allowed_connections(wanted: int) -> int:
    """Returns how many of `wanted` connections the limit of open files allows; it is raised if it may be."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return wanted
    needed = wanted + FILES_SPARE
    if soft < needed:
        soft = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return max(1, min(wanted, soft - FILES_SPARE))
