"""What the HTTP ports share: the limits of their connections, and files that are read again when they change.

connection -> Line: limits number, time and size -> TLS -> aiohttp: parses -> a handler, which calls begin() and end()

aiohttp limits neither the number of connections nor the time in which a request must arrive: Line limits both, and the
size of a request. On a port whose handlers never call `begin` the limits of the head hold for the whole connection,
and every connection counts as idle.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import socket
import ssl
import struct
import time
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Generic, TypeVar

from aiohttp import web

from transports.certificates import KeptFiles, load_pair
from uprotocol.status import UStatusError
from uprotocol.v1.ucode_pb2 import UCode

LOG_S: Final = 60.0  # between two log lines of one kind; counters count all
BACKLOG: Final = 512  # connections that the system accepts for us: a restart brings all clients back at once
SERVER: Final = "up-streamer"
ACCEPTED_AT_ONCE: Final = 16  # ... and that we take in one turn of the loop; one too many is closed some turns later
USUAL_BYTES: Final = 256 << 10  # that wait for a client, at most, unless an event is larger than that
UNSENT_BYTES_MAX: Final = 64 << 20  # beyond the usual ones, of all connections of a port
HEAD_END: Final = b"\r\n\r\n"

T = TypeVar("T")
Files = Sequence[Path | None]

silent: Final = logging.getLogger("streamer.http.lines.nonsense")  # aiohttp's log lines about malformed requests
silent.disabled = True


@dataclass(slots=True)
class Limits:
    """Of a port's connections."""

    connections_max: int  # one more closes the one that has been idle for longest; if none is, it is refused
    head_bytes_max: int
    head_s: float  # for TLS, and for the head of a request
    body_bytes_max: int = 0
    body_s: float = 0.0
    send_s: float | None = None  # a client that takes nothing for so long is cut off


class Lines:
    """The open connections of a port."""

    def __init__(
        self, limits: Limits, tls: Latest[ssl.SSLContext] | None = None, refused: Counter[str] | None = None
    ) -> None:
        """`refused`: counts the connections that were closed on purpose, by reason."""
        self.limits, self.tls = limits, tls
        self.refused = Counter[str]() if refused is None else refused
        self._open: dict[Line, None] = {}  # oldest first
        self._idle: dict[Line, None] = {}  # without a request; idle for longest first
        self._unsent: dict[Line, int] = {}  # bytes beyond USUAL_BYTES; for longest first
        self._unsent_bytes = 0

    def __len__(self) -> int:
        return len(self._open)

    def __contains__(self, line: Line) -> bool:
        return line in self._open

    def admit(self, line: Line) -> bool:
        """Returns False if there may be no more; it first closes an idle one for it."""
        if len(self._open) >= self.limits.connections_max:
            last = next(iter(self._idle), None)
            self.refused["connections"] += 1
            if last is None:
                return False
            last.abort()
        self._open[line] = self._idle[line] = None
        return True

    def busy(self, line: Line) -> None:
        self._idle.pop(line, None)

    def idle(self, line: Line) -> None:
        if line in self._open:
            self._idle[line] = None

    def unsent(self, line: Line, size: int) -> None:
        """It has more to send than its client takes. If that is too much of all lines together, those are closed that
        have it for longest: an event may be as large as a message."""
        self._unsent[line] = size
        self._unsent_bytes += size
        while self._unsent_bytes > UNSENT_BYTES_MAX and len(self._unsent) > 1:
            self.refused["slow reader"] += 1
            next(iter(self._unsent)).abort()

    def sent(self, line: Line) -> None:
        self._unsent_bytes -= self._unsent.pop(line, 0)

    def remove(self, line: Line) -> None:
        self._open.pop(line, None)
        self._idle.pop(line, None)
        self.sent(line)

    def abort_idle(self) -> None:
        for line in list(self._idle):
            line.abort()

    def abort(self) -> None:
        for line in list(self._open):
            line.abort()


class Line(asyncio.Protocol):
    """One connection, passed to aiohttp while it keeps the limits of `lines`. TLS begins here and not at the listening
    socket, so that a connection counts before it.

    Its state: how far the connection is (`_securing`, `_is_served`, `_is_busy`, `is_answering`), the timers that end it
    (`_timer`, `_sending`), and how much of the next request's head has come.
    """

    def __init__(self, http: asyncio.Protocol, lines: Lines) -> None:
        self._http, self._lines = http, lines
        self._socket: asyncio.Transport | None = None
        self._transport: asyncio.Transport | None = None  # the same, or TLS over it
        self._timer: asyncio.TimerHandle | None = None
        self._sending: asyncio.TimerHandle | None = None
        self._securing: asyncio.Task[None] | None = None
        self._is_served = False  # True once it is passed to aiohttp
        self._is_busy = False  # with a request
        self.is_answering = False  # the answer to it has begun; set by who begins it
        self.ends_with_answer = False  # HTTP/1.0: for the client the end of the connection is that of the answer
        self._early = b""  # data received before that
        self._number = 0  # of the last request
        self._has_head = False  # of the next request
        self._tail = b""  # the end of what has come without it
        self._bytes_left = lines.limits.head_bytes_max

    @staticmethod
    def of(request: web.BaseRequest) -> Line | None:
        """Returns None if the client has gone."""
        line = None if request.transport is None else request.transport.get_protocol()
        return line if isinstance(line, Line) else None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._socket = self._transport = transport
        if not self._lines.admit(self):
            transport.abort()
            return
        self._within(self._lines.limits.head_s, "slow head")
        self._limit_silence(transport)
        if self._lines.tls is None:
            self._serve(transport)
        else:
            transport.pause_reading()
            self._securing = asyncio.create_task(self._secure(transport, self._lines.tls), name="TLS")

    def _limit_silence(self, transport: asyncio.Transport) -> None:
        """The system's limit for what was sent and not confirmed is 15 minutes."""
        send_s, opened = self._lines.limits.send_s, transport.get_extra_info("socket")
        if send_s is not None and opened is not None and hasattr(socket, "TCP_USER_TIMEOUT"):
            with contextlib.suppress(OSError):
                opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(send_s * 1_000))

    async def _secure(self, transport: asyncio.Transport, tls: Latest[ssl.SSLContext]) -> None:
        loop, secured = asyncio.get_running_loop(), None
        try:
            with contextlib.suppress(OSError):  # handshake failed; TimeoutError and SSLError are OSErrors
                context = await tls.get()
                secured = await loop.start_tls(
                    transport, self, context, server_side=True, ssl_handshake_timeout=self._lines.limits.head_s
                )
        finally:
            if secured is None:
                self._lines.refused["TLS"] += self in self._lines
                self.connection_lost(None)
        if secured is not None and self in self._lines:
            self._transport = secured
            self._serve(secured)

    def _serve(self, transport: asyncio.Transport) -> None:
        self._is_served = True
        self._http.connection_made(transport)
        if self._early:
            self._http.data_received(self._early)

    # Requests

    def begin(self, body_is_whole: Callable[[], bool]) -> int:
        """The head of a request has arrived. Returns its number, for `end`."""
        limits = self._lines.limits
        self._is_busy, self.is_answering = True, False
        self._number += 1
        self._lines.busy(self)
        self._stop_timer()
        if not body_is_whole():
            self._within(limits.body_s, "slow body", body_is_whole)
        return self._number

    def end(self, number: int, body_is_whole: Callable[[], bool]) -> None:
        """The request is answered. The rest of its body, if it has one, is read and forgotten by aiohttp."""
        if number != self._number:
            return  # the next one has begun
        self._is_busy = False
        self._lines.idle(self)
        self._stop_timer()
        if body_is_whole():
            self._has_head, self._tail, self._bytes_left = False, b"", self._lines.limits.head_bytes_max
        else:
            self._within(self._lines.limits.head_s, "slow body")

    def _within(self, seconds: float, reason: str, is_done: Callable[[], bool] = lambda: False) -> None:
        def look() -> None:
            self._timer = None
            if not is_done():
                self._cut(reason)

        self._timer = asyncio.get_running_loop().call_later(seconds, look)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    # asyncio.Protocol

    def data_received(self, data: bytes) -> None:
        if not self._has_head:
            self._look_for_head(data)
        self._bytes_left -= len(data)
        if self._bytes_left < 0:
            self._cut("large request")
            return
        if self._timer is None and not self._is_busy:
            self._within(self._lines.limits.head_s, "slow head")
        if self._is_served:
            self._http.data_received(data)
        else:
            self._early += data

    def _look_for_head(self, data: bytes) -> None:
        """From its end on, the limit of the body holds. One in chunks is longer than its content, and the next request
        may follow."""
        end = (self._tail + data).find(HEAD_END)
        if end < 0:
            self._tail = (self._tail + data)[-3:]
        elif end - len(self._tail) < self._bytes_left:
            self._has_head = True
            self._bytes_left = max(self._bytes_left, 2 * self._lines.limits.body_bytes_max + len(data))

    def eof_received(self) -> bool | None:
        return self._http.eof_received()

    def pause_writing(self) -> None:
        self._http.pause_writing()
        if (large := self._unsent() - USUAL_BYTES) > 0:
            self._lines.unsent(self, large)
        if self._lines.limits.send_s is not None:
            self._look_at_sending(None)

    def resume_writing(self) -> None:
        self._http.resume_writing()
        self._lines.sent(self)
        if self._sending is not None:
            self._sending.cancel()

    def _look_at_sending(self, before: int | None) -> None:
        unsent, send_s = self._unsent(), self._lines.limits.send_s
        if before is not None and unsent >= before:
            self._cut("slow reader")
        elif send_s is not None:
            self._sending = asyncio.get_running_loop().call_later(send_s, self._look_at_sending, unsent)

    def _unsent(self) -> int:
        return sum(one.get_write_buffer_size() for one in {self._socket, self._transport} if one is not None)

    def connection_lost(self, error: Exception | None) -> None:
        self._lines.remove(self)
        self._stop_timer()
        if self._sending is not None:
            self._sending.cancel()
        if self._is_served:
            self._is_served = False
            self._http.connection_lost(error)

    def _cut(self, reason: str) -> None:
        self._lines.refused[reason] += 1
        self.abort()

    def abort(self) -> None:
        """Closes the connection at once: the client sees that an answer is not whole."""
        self._lines.remove(self)
        opened = None if self._socket is None else self._socket.get_extra_info("socket")
        if self.ends_with_answer and opened is not None:
            with contextlib.suppress(OSError):  # a reset is no end
                opened.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        if self._transport is not None:
            self._transport.abort()
        if self._securing is not None:
            self._securing.cancel()


class Listener:
    """Serves an application at one address."""

    def __init__(self, what: str, address: str, lines: Lines, application: web.Application, **options: Any) -> None:
        """`what`: its name in errors. `address`: HOST:PORT; port 0 is any free one. `options`: of web.AppRunner."""
        host, _, port = address.rpartition(":")
        self._what, self._host, self._port, self.lines = what, host.strip("[]"), int(port), lines
        self._runner = web.AppRunner(application, access_log=None, logger=silent, **options)
        self._server: asyncio.Server | None = None

    async def open(self) -> int:
        """Returns the port. Raises UNAVAILABLE if it can't be opened."""
        http, loop = await self.serve(), asyncio.get_running_loop()
        try:
            self._server = await loop.create_server(
                lambda: Line(http(), self.lines), self._host, self._port, backlog=ACCEPTED_AT_ONCE
            )
            for one in self._server.sockets:
                with socket.fromfd(one.fileno(), one.family, one.type) as same:
                    same.listen(BACKLOG)
        except OSError as error:
            why = f"{self._what} {self._host}:{self._port} can't be opened: {error.strerror}"
            raise UStatusError(UCode.UNAVAILABLE, f"{why}; is another streamer running?") from None
        opened: int = self._server.sockets[0].getsockname()[1]
        return opened

    async def serve(self) -> Callable[[], asyncio.Protocol]:
        """Returns a factory for aiohttp's side of a connection."""
        await self._runner.setup()
        assert self._runner.server is not None, "setup makes it"
        return self._runner.server

    def refuse_more(self) -> None:
        """Accepts no connection any more, and closes those without a request."""
        if self._server is not None:
            self._server.close()
        self.lines.abort_idle()

    async def close(self) -> None:
        """Cuts all connections. May be called twice."""
        self.refuse_more()
        self.lines.abort()
        if self._server is not None:
            await self._server.wait_closed()
        await self._runner.cleanup()


# Files


class Latest(Generic[T]):
    """The current content of files. Only one read runs at a time."""

    def __init__(self, files: KeptFiles[T], found: T) -> None:
        self._files, self.found = files, found
        self._looking: asyncio.Future[T] | None = None

    @property
    def trouble(self) -> str:
        """Why the last content is still in use, though the files have changed; empty if it is theirs."""
        return self._files.trouble

    async def get(self) -> T:
        """Returns the current content. During a read, other callers get the last content."""
        if self._looking is None or self._looking.done():
            self._looking = asyncio.ensure_future(asyncio.to_thread(self._files.current))
            self.found = await asyncio.shield(self._looking)
        return self.found


async def latest(files: Files, make: Callable[[], T]) -> Latest[T] | None:
    """Returns None if the files are not configured. Raises as `make`."""
    if files[0] is None:
        return None
    kept = KeptFiles(files, make)
    return Latest(kept, await asyncio.to_thread(kept.current))


async def latest_tls(section: str, certificate: Path | None, key: Path | None) -> Latest[ssl.SSLContext] | None:
    """Returns None without a certificate. Raises FAILED_PRECONDITION if the pair can't be used. `section`: the
    configuration's, which has `cert_file` and `key_file`."""

    def make() -> ssl.SSLContext:
        assert certificate is not None
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        try:
            load_pair(context, certificate, key)
        except (OSError, ValueError) as error:
            why = f"{section}.cert_file {certificate} and {section}.key_file {key} can't be used: {error}"
            raise UStatusError(UCode.FAILED_PRECONDITION, why) from None
        return context

    return await latest([certificate, key], make)


def break_off(request: web.BaseRequest) -> None:
    """Closes the connection at once: the client sees that the answer is not whole."""
    line = Line.of(request)
    if line is not None:
        line.abort()
    elif request.transport is not None:  # of another server
        request.transport.abort()


# Log


class SeldomLog:
    """Says when a kind of log line is due: clients must not be able to fill the log."""

    def __init__(self) -> None:
        self._said: dict[Hashable, float] = {}

    def is_due(self, kind: Hashable) -> bool:
        """`kind`: of a bounded set, so nothing that a client chooses."""
        now = time.monotonic()
        if now < self._said.get(kind, -math.inf) + LOG_S:
            return False
        self._said[kind] = now
        return True


# Headers


def bearer_of(request: web.BaseRequest) -> str | None:
    """Returns the token of `Authorization: Bearer TOKEN`; None if it has another form or is not there."""
    scheme, _, shown = request.headers.get("Authorization", "").partition(" ")
    return shown.strip() if scheme.lower() == "bearer" else None
