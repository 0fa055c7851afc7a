"""MQTT over WebSocket (MQTT 5, section 6): aiohttp opens it and makes the frames; a Connection sees a byte stream.

dial -> name, TCP, TLS, HTTP's upgrade with the subprotocol mqtt -> WebSocketTransport <-> Connection
write(bytes of many packets) -> one binary frame
binary frames -> a stream of bytes: a frame may hold several packets, or a part of one
pause_reading -> no frame is taken -> aiohttp's queue fills -> the socket is not read -> the broker is held back

Imported only where WebSocket is used: aiohttp takes 0.1 s and 11 MiB. Why aiohttp: docs/adr/mqtt5.md.
"""

from __future__ import annotations

import asyncio
import contextlib
import http
import socket
import ssl
import sys
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult
from yarl import URL

from transports.mqtt5.config import WebSocketConfig, first_line, is_header_value
from transports.mqtt5.connection import Address, Connection, Dialler, PacketTooLarge, new_socket
from uprotocol.status import UStatusError
from uprotocol.v1.ucode_pb2 import UCode

SUBPROTOCOL: Final = "mqtt"  # MQTT-6.0.0-3
FRAME_EXTRA_BYTES: Final = 4 << 20  # a frame may be so much longer than the longest packet, since it may hold several
CONTROL_FRAME_BYTES_MAX: Final = 2 + 125  # RFC 6455, section 5.5
QUOTED_MAX: Final = 200  # characters of a broker's text in an error

_NUMERIC: Final = socket.AI_NUMERICHOST | socket.AI_NUMERICSERV
# of an HTTP status at the upgrade; others are FAILED_PRECONDITION
_CODES: Final = {
    401: UCode.UNAUTHENTICATED,
    403: UCode.PERMISSION_DENIED,
    407: UCode.UNAUTHENTICATED,
    408: UCode.UNAVAILABLE,
    429: UCode.UNAVAILABLE,
}


class FrameTooLarge(PacketTooLarge):
    """A frame that is too large to keep, whatever packets it holds."""

    def __init__(self, why: str) -> None:
        ConnectionError.__init__(
            self,
            f"the broker sends a WebSocket frame that is longer than our Maximum Packet Size and {FRAME_EXTRA_BYTES} "
            f"bytes ({why}): does it support Maximum Packet Size? Else keep large messages from it, or raise "
            "message_bytes_max",
        )


class WebSocketDialler(Dialler):
    """Connects to one URL, any number of times."""

    def __init__(self, host: str, port: int, config: WebSocketConfig) -> None:
        super().__init__(host, port)
        self._config = config

    async def dial(self, connection: Connection, context: ssl.SSLContext | None, timeout_s: float) -> None:
        """As Dialler.dial; `timeout_s` also for the answer to the upgrade. Raises UStatusError as well: a header's file
        can't be read, or the upgrade is refused."""
        headers = await asyncio.to_thread(_headers, self._config)
        scheme = "ws" if context is None else "wss"
        url = URL.build(scheme=scheme, host=self._host, port=self._port, path=self._config.path, encoded=True)
        connector = aiohttp.TCPConnector(
            ssl=context if context is not None else True,
            resolver=_Resolver(self._addresses, timeout_s),
            use_dns_cache=False,  # each attempt looks the name up
            socket_factory=lambda address: new_socket(address[0], context),
            force_close=True,
        )
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=timeout_s, sock_read=timeout_s)
        # trust_env is off: no proxy or password from the environment or ~/.netrc
        async with aiohttp.ClientSession(
            connector=connector,
            timeout=timeout,
            middlewares=(_once,),
            ws_response_class=_Upgraded,
            cookie_jar=aiohttp.DummyCookieJar(),
        ) as session:
            try:
                upgraded = await session.ws_connect(
                    url,
                    protocols=(SUBPROTOCOL,),
                    headers=headers,
                    max_msg_size=connection.packet_bytes_max + FRAME_EXTRA_BYTES,
                )
            except aiohttp.WSServerHandshakeError as error:
                raise _refused(url, error) from None
            except aiohttp.ClientError as error:
                raise _plain(error) from error
            assert isinstance(upgraded, _Upgraded), "ws_response_class says so"
            if upgraded.protocol != SUBPROTOCOL:
                upgraded.abort()
                raise UStatusError(
                    UCode.FAILED_PRECONDITION,
                    f"{url} opens a WebSocket without the subprotocol {SUBPROTOCOL!r} (it names "
                    f"{upgraded.subprotocols or 'none'}): is MQTT served there? Set port and websocket.path",
                )
            connection.connection_made(WebSocketTransport(upgraded, connection))
            session.detach()  # else it would close the socket, which the Connection has from here on


class WebSocketTransport(asyncio.Transport):
    """The transport of a Connection, as that of a socket, with frames below it.

    What changes: `_unread` (bytes that the Connection has not taken), `_may_read` (it has not paused us), `_is_due`
    (`_deliver` will be called), `_is_closed`, and what aiohttp keeps behind `_upgraded`.
    """

    def __init__(self, upgraded: _Upgraded, user: Connection) -> None:
        super().__init__()
        self._upgraded, self._user, self._wire = upgraded, user, upgraded.wire
        self._loop = asyncio.get_running_loop()
        # it never asks aiohttp to wait: the caller of `write` bounds what is not sent yet
        self._wire.set_write_buffer_limits(high=sys.maxsize)
        self._wire.set_protocol(_Hearing(self._wire.get_protocol(), user))
        self._unread: list[bytes | memoryview] = []  # parts of frames; at most about aiohttp's queue and one frame
        self._is_due = False
        self._may_read = asyncio.Event()
        self._may_read.set()
        self._is_closed = False
        self._reading = asyncio.create_task(self._read())

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Send one binary frame, masked, at once. aiohttp's `send_bytes` waits only if the transport is full; this one
        never is, so the coroutine ends after one step."""
        sending = self._upgraded.send_bytes(data)  # type: ignore[arg-type]  # takes any buffer
        try:
            sending.send(None)
        except StopIteration:
            return
        except ConnectionError:
            return  # it has hung up; the next read says so
        sending.close()
        self._user.drop(ConnectionAbortedError("unexpected: aiohttp waits before it writes a frame"))

    def pause_reading(self) -> None:
        self._may_read.clear()

    def resume_reading(self) -> None:
        self._may_read.set()
        self._deliver_soon()

    def get_write_buffer_size(self) -> int:
        return self._wire.get_write_buffer_size()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._wire.get_extra_info(name, default)

    def abort(self) -> None:
        self._is_closed = True
        self._unread.clear()
        self._upgraded.abort()
        self._reading.cancel()

    async def _read(self) -> None:
        """Take frames until the connection ends."""
        try:
            while True:
                await self._may_read.wait()
                message = await self._upgraded.receive()  # does not wait if aiohttp has one already
                if message.type is not aiohttp.WSMsgType.BINARY:
                    break
                self._unread.append(message.data)
                self._deliver_soon()
            while self._unread:
                await self._may_read.wait()
                self._deliver()
            failure: Exception = _ended(message, self._upgraded.close_code)
        except Exception as error:
            failure = error
        self._user.connection_lost(failure)

    def _deliver_soon(self) -> None:
        """Deliver later in this turn of the loop, together with the frames that came with it: brokers send each packet
        in a frame."""
        if self._unread and not self._is_due:
            self._is_due = True
            self._loop.call_soon(self._deliver)

    def _deliver(self) -> None:
        """Deliver until the user pauses or ends the connection."""
        self._is_due = False
        data = memoryview(self._unread[0] if len(self._unread) == 1 else b"".join(self._unread))
        self._unread.clear()
        while data and self._may_read.is_set() and not self._is_closed:
            buffer = self._user.get_buffer(-1)
            count = min(len(buffer), len(data))
            buffer[:count] = data[:count]
            data = data[count:]
            self._user.buffer_updated(count)
        if data and not self._is_closed:
            self._unread.append(data)


class _Upgraded(aiohttp.ClientWebSocketResponse):
    """aiohttp's WebSocket, with the transport below it."""

    def __init__(
        self, reader: Any, writer: Any, protocol: Any, response: aiohttp.ClientResponse, *rest: Any, **more: Any
    ) -> None:
        super().__init__(reader, writer, protocol, response, *rest, **more)
        self._answer = response
        self.subprotocols = response.headers.get("Sec-WebSocket-Protocol", "")[:QUOTED_MAX]
        connection = response.connection
        assert connection is not None, "it has just been upgraded"
        wire = connection.transport
        assert wire is not None, "it has just been upgraded"
        self.wire: asyncio.Transport = wire

    def abort(self) -> None:
        """Close it at once, without a close frame."""
        self.wire.abort()
        self._answer.close()


class _Hearing(asyncio.Protocol):
    """In front of aiohttp's protocol: reports to the Connection that bytes have arrived. aiohttp delivers only whole
    frames, and a large one may take minutes."""

    def __init__(self, below: asyncio.BaseProtocol, user: Connection) -> None:
        assert isinstance(below, asyncio.Protocol), "aiohttp's"
        self._below, self._user = below, user
        self.connection_lost = below.connection_lost  # type: ignore[method-assign]
        self.eof_received = below.eof_received  # type: ignore[method-assign]

    def data_received(self, data: bytes) -> None:
        if len(data) > CONTROL_FRAME_BYTES_MAX:  # a smaller one may be a ping of a proxy whose broker hangs
            self._user.received()
        self._below.data_received(data)


class _Lost(aiohttp.ClientError):
    """The connection was lost; `__cause__` says how."""


async def _once(request: aiohttp.ClientRequest, send: aiohttp.ClientHandlerType) -> aiohttp.ClientResponse:
    """Send the request once: aiohttp would repeat it after a loss, and follow a redirection with our headers."""
    try:
        answer = await send(request)
    except aiohttp.ClientConnectorError:  # aiohttp does not repeat after this one
        raise
    except (aiohttp.ClientOSError, aiohttp.ServerDisconnectedError) as error:
        raise _Lost from error
    if answer.status == 101:
        return answer
    answer.close()
    raise aiohttp.WSServerHandshakeError(
        answer.request_info, answer.history, message="no upgrade", status=answer.status, headers=answer.headers
    )


class _Resolver(AbstractResolver):
    """Uses the addresses of the Dialler, which needs no thread of the loop's own pool."""

    def __init__(self, addresses: Callable[[], Awaitable[list[Address]]], timeout_s: float) -> None:
        self._addresses, self._timeout_s = addresses, timeout_s

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        async with asyncio.timeout(self._timeout_s):
            addresses = await self._addresses()
        return [
            ResolveResult(
                # the scope is part of a link-local address of IPv6
                host=f"{address[0]}%{address[3]}" if len(address) > 3 and address[3] else address[0],
                hostname=host,
                port=port,
                family=of,
                proto=0,
                flags=_NUMERIC,
            )
            for of, address in addresses
        ]

    async def close(self) -> None:
        pass


def _headers(config: WebSocketConfig) -> dict[str, str]:
    """The headers of the upgrade. Blocks. Raises UStatusError: a file can't be used."""
    headers = {name: value.get_secret_value() for name, value in config.headers.items()}
    for name, file in config.secret_headers.items():
        setting = f"websocket.secret_headers.{name}"
        headers[name] = first_line(setting, file).strip()
        if not is_header_value(headers[name]):
            why = f"{setting} {file} can't be used: its first line has a control character"
            raise UStatusError(UCode.FAILED_PRECONDITION, why)
    return headers


def _refused(url: URL, error: aiohttp.WSServerHandshakeError) -> UStatusError:
    """The error for an HTTP server that does not upgrade to a WebSocket."""
    status, phrase = error.status, ""
    headers: Mapping[str, str] = error.headers or {}
    with contextlib.suppress(ValueError):
        phrase = f" {http.HTTPStatus(status).phrase}"
    server = f", server {headers['Server'][:QUOTED_MAX]}" if "Server" in headers else ""
    if status == 101:
        phrase += f", but not as a valid upgrade ({error.message})"
    if status in (401, 407):
        hint = "are websocket.headers, secret_headers and tls.cert_file right? It knows us by nothing else"
    elif status == 403:
        hint = "let this client in there, or correct websocket.headers, secret_headers and tls.cert_file"
    elif status == 404:
        hint = "is websocket.path right?"
    elif 300 <= status < 400 and "Location" in headers:
        hint = f"it redirects to {headers['Location'][:QUOTED_MAX]}: set host, port, tls and websocket.path to that"
    elif status >= 500 or status in _CODES:
        hint = "it is tried again; a proxy answers so while the broker behind it is away"
    else:
        hint = (
            "no WebSocket is served there, or a proxy in between answers by itself: are port, tls and websocket.path "
            "right, and does each proxy pass the header Upgrade on?"
        )
    code = UCode.UNAVAILABLE if status >= 500 else _CODES.get(status, UCode.FAILED_PRECONDITION)
    return UStatusError(code, f"{url} answers the upgrade to a WebSocket with HTTP {status}{phrase}{server}: {hint}")


def _plain(error: aiohttp.ClientError) -> Exception:
    """The OSError or ValueError that aiohttp has wrapped, so that errors are the same as over plain TCP."""
    if isinstance(error, aiohttp.ClientConnectorCertificateError):
        return error.certificate_error
    if isinstance(error, aiohttp.ClientConnectorError):
        return error.os_error
    if isinstance(error, _Lost):
        cause: BaseException | None = error.__cause__
        while cause is not None and not isinstance(cause, ssl.SSLError):
            cause = cause.__cause__
        if isinstance(cause, ssl.SSLError):  # TLS 1.3 refuses a client's certificate when the first bytes are read
            return cause
        return ConnectionResetError("it hung up on the upgrade to a WebSocket, or wants another certificate from us")
    if isinstance(error, (OSError, ValueError)):
        return error
    said = str(error)[:QUOTED_MAX]
    return ConnectionAbortedError(f"it answers the upgrade to a WebSocket with data that is not HTTP: {said}")


def _ended(message: aiohttp.WSMessage, close_code: int | None) -> Exception:
    """Why no further frame comes."""
    if message.type is aiohttp.WSMsgType.TEXT:
        return ConnectionAbortedError("it sent a text frame, and MQTT uses binary ones (MQTT-6.0.0-1)")
    if message.type is aiohttp.WSMsgType.ERROR:
        if close_code == aiohttp.WSCloseCode.MESSAGE_TOO_BIG:
            return FrameTooLarge(str(message.data))
        return ConnectionAbortedError(f"it sent data that is not WebSocket: {message.data}")
    if message.type is aiohttp.WSMsgType.CLOSE:
        said = f" ({str(message.extra)[:QUOTED_MAX]})" if message.extra else ""
        return ConnectionResetError(f"it closed the WebSocket with code {message.data}{said}")
    return ConnectionResetError("it hung up")
