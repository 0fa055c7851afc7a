"""One connection to a broker, over TCP, TLS or WebSocket: packets in and out, in batches, on the event loop.

host -> addresses -> TCP -> TLS -> (websocket.py: HTTP's upgrade -> frames) -> Connection <-> broker
read -> PacketReader -> PUBLISH, PUBACK -> the user, one call for all packets of a read
                     -> CONNACK, SUBACK, UNSUBACK, DISCONNECT, PINGRESP -> one by one
write(bytes of many packets) -> at once

A packet that a broker must not send ends the connection with a reason; no exception reaches the event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import math
import socket
import ssl
import sys
import termios
from collections.abc import Mapping, Sequence
from typing import Any, Final, Protocol

from transports.base import on_own_thread
from transports.mqtt5 import packets, reasons, wire

# of one read: some 500 messages of 400 bytes, or 40 us to copy
READ_BYTES: Final = 1 << 18
# a packet of this size or more gets a buffer of its own; for smaller ones joining is cheaper
LARGE_BYTES: Final = 1 << 16
BARE_PUBACK_BYTES: Final = 4  # packet id, reason code, and a property length of 0
ANSWER_MS_MAX: Final = 20_000  # for SUBACK and UNSUBACK; if the broker takes longer, the connection is dropped
# ... but so long while it sends: 500,000 queued messages at the rate of a busy gateway
ANSWER_BEHIND_S_MAX: Final = 300.0
SESSION_TAKEN_OVER: Final = 0x8E  # reason code of DISCONNECT

_QUICK_ACK: Final[int | None] = getattr(socket, "TCP_QUICKACK", None)  # Linux
# Linux: how many bytes the peer has not acknowledged (SIOCOUTQ, tcp(7)); unknown elsewhere
_UNACKNOWLEDGED: Final[int | None] = termios.TIOCOUTQ if sys.platform == "linux" else None
_NUMERIC: Final = socket.AI_NUMERICHOST | socket.AI_NUMERICSERV

Packets = Sequence[tuple[int, bytes | memoryview]]
Address = tuple[int, Any]  # family, and what `connect` takes


class PacketTooLarge(ConnectionError):
    """The broker sends a packet that exceeds our Maximum Packet Size."""

    def __init__(self, announced: int, packet_bytes_max: int) -> None:
        super().__init__(
            f"expected packets of at most {packet_bytes_max} bytes, as CONNECT says, got one of {announced}: does the "
            "broker support Maximum Packet Size? Else keep large messages from it, or raise message_bytes_max"
        )


class Disconnected(ConnectionAbortedError):
    """The broker has ended the connection with a DISCONNECT."""

    def __init__(self, said: packets.Answer) -> None:
        super().__init__(f"it said: {reasons.ended(said.reason, said.properties)}")
        self.reason = said.reason


class TakenOver(Disconnected):
    """The broker has given our session to another client, which has logged in with the same client_id."""


class PacketReader:
    """Bytes -> whole packets. Each byte is copied a few times at most; at most one incomplete packet is kept.

    buffer <- a read -> split -> (first byte, body), ...   the rest is small: kept, and joined to the next read
                                                           the rest is large: a buffer of its packet's size
                                                           it is too large: its size is in `announced`, none is kept

    Joining a large packet again at each read would copy it some hundred times: 50 MB blocked the event loop for
    seconds.
    """

    def __init__(self, packet_bytes_max: int) -> None:
        self._packet_bytes_max = packet_bytes_max
        self._small = self.buffer = memoryview(bytearray(READ_BYTES))  # `buffer`: where the next read goes
        self._unread = b""  # the beginning of a small packet, or of a header
        self._large: memoryview | None = None
        self._first = self._filled = 0  # of the large packet: its first byte, and how many bytes of the rest have come
        self.announced = 0  # size of a packet that is too large, in bytes: nothing behind it can be read

    def take(self, count: int) -> Packets:
        """Returns the packets that are whole with `count` more bytes in the buffer. Raises ValueError: not MQTT."""
        if self._large is None:
            data = self._unread + self._small[:count]
            found, used = wire.split(data, self._packet_bytes_max)
            self._unread = unread = data[used:]
            length, start = wire.read_varint(unread, 1, len(unread)) if unread else (0, 0)
            if length > self._packet_bytes_max:
                self._unread, self.announced = b"", length
            if length < LARGE_BYTES or self.announced:
                return found
            self._unread, self._first, self._large = b"", unread[0], memoryview(bytearray(length))
            self._filled = len(unread) - start
            self._large[: self._filled] = memoryview(unread)[start:]
        else:
            found = []
            self._filled += count
            if self._filled == len(self._large):
                body, self._large, self.buffer = self._large, None, self._small
                return [(self._first, body)]
        self.buffer = self._large[self._filled : self._filled + READ_BYTES]
        return found


class ConnectionUser(Protocol):
    """Callbacks of a Connection, all on the event loop."""

    def welcomed(self, welcome: packets.Welcome) -> None:
        """The broker has accepted the login; messages of its session may follow at once."""

    def on_publishes(self, publishes: list[wire.Publish]) -> None:
        """The messages of one read, in order."""

    def on_pubacks(self, pubacks: list[tuple[int, int]], whys: Mapping[int, str]) -> None:
        """`pubacks`: [(packet id, reason code)] of one read, in order. `whys`: reason strings by packet id."""


class Connection(asyncio.BufferedProtocol):
    """`packet_bytes_max`: of one packet that arrives, as CONNECT tells the broker."""

    def __init__(self, user: ConnectionUser, packet_bytes_max: int, keep_alive_s: int) -> None:
        self._user, self.packet_bytes_max, self._keep_alive_s = user, packet_bytes_max, keep_alive_s
        self._reader, self._loop = PacketReader(packet_bytes_max), asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._socket: socket.socket | None = None
        self._answers: dict[int, asyncio.Future[Any]] = {}  # by packet id; of CONNACK, 0
        self.lost: asyncio.Future[OSError] = self._loop.create_future()  # completes when it has ended: why
        self._received_s = self._written_s = self._pinged_s = self._loop.time()
        self._messages_s = -math.inf  # when the broker last sent messages
        self._written_bytes = self._delivered_bytes = self._due_end = 0
        self._taken_s = self._loop.time()  # when the peer last took bytes
        self.delivered_s = self._loop.time()  # `watch_delivery`, or when the peer last took what was written before it
        # bytes written before the oldest unanswered ping: that the peer takes later ones does not show a live broker
        self._before_ping: int | None = None
        self._alive_s = self._loop.time()  # when the peer last took bytes from before that ping
        self.up = False  # the broker has accepted the login, and the connection is not lost
        self._paused = False  # the socket is not read

    def write(self, data: bytes, *, watch: bool = False) -> None:
        """Write whole packets. What the socket does not take at once leaves as soon as it can. `watch`: call
        `watch_delivery` as well."""
        if self._transport is not None:
            self._written_s = self._loop.time()
            self._written_bytes += len(data)
            self._transport.write(
                memoryview(data)
            )  # asyncio copies the unsent rest of a memoryview once, of bytes twice
            if watch:
                self._due_end, self.delivered_s = self._written_bytes, self._written_s

    @property
    def tls(self) -> ssl.SSLObject | None:
        """The state of TLS; None without it, or without a connection."""
        return self._transport.get_extra_info("ssl_object") if self._transport is not None else None

    @property
    def hung_up(self) -> OSError | None:
        """How the broker has ended the connection; None if it is open, the network is away, or another client has taken
        our session over."""
        if not self.lost.done() or self.lost.cancelled() or isinstance(self.lost.result(), (TimeoutError, TakenOver)):
            return None
        return self.lost.result()

    async def ask(self, packet_id: int, packet: bytes, timeout_s: float | None = None) -> Any:
        """Send `packet` and return the broker's answer: a Welcome for packet id 0, else an Answer. Raises OSError: the
        connection is lost.

        If no answer comes within `timeout_s` (default: ANSWER_MS_MAX), the connection is dropped. The time starts again
        while the peer still takes bytes that were written before the packet, and while it sends: its answer is behind
        all messages that it has queued for us. That may take ANSWER_BEHIND_S_MAX.
        """
        if self._transport is None:
            raise ConnectionResetError("it is closed")
        timeout_s = ANSWER_MS_MAX / 1000 if timeout_s is None else timeout_s
        self._answers[packet_id] = future = self._loop.create_future()
        self.write(packet)
        end, asked_s = self._written_bytes, self._loop.time()
        try:
            while not (await asyncio.wait({future}, timeout=timeout_s))[0]:
                if self.may_be_behind(asked_s, timeout_s):
                    continue
                self._look_at_delivery()
                if self._delivered_bytes >= end or self._loop.time() - self._taken_s >= timeout_s:
                    failure = TimeoutError("it does not answer in time")
                    self.drop(failure)
                    raise failure
            return future.result()
        finally:
            self._answers.pop(packet_id, None)

    def may_be_behind(self, asked_s: float, timeout_s: float) -> bool:
        """True if an answer that is due since `asked_s` may be behind what the broker has queued for us: it has sent
        a message within `timeout_s`, or we don't read."""
        now_s = self._loop.time()
        is_sending = self._paused or now_s - self._messages_s < timeout_s
        return self._transport is not None and is_sending and now_s - asked_s < ANSWER_BEHIND_S_MAX

    def pause(self, paused: bool) -> None:
        """Stop reading the socket, which holds the broker back, or go on."""
        if self._transport is not None and paused != self._paused:
            self._paused = paused
            if paused:
                self._transport.pause_reading()
            else:
                self._transport.resume_reading()

    def watch_delivery(self) -> None:
        """An answer to what was written before is due from now on: `delivered_s` is now, and moves while the peer takes
        bytes of that."""
        self._due_end, self.delivered_s = self._written_bytes, self._loop.time()

    def _look_at_delivery(self) -> None:
        """Note whether the peer has taken bytes. On a slow link one large message takes minutes, and nothing behind it
        can be answered until then."""
        if self._transport is None or self._socket is None:
            return
        unsent = self._transport.get_write_buffer_size()
        if _UNACKNOWLEDGED is not None:
            with contextlib.suppress(OSError):  # it has hung up; the next read says so
                queued = fcntl.ioctl(self._socket.fileno(), _UNACKNOWLEDGED, b"\0\0\0\0")
                unsent += int.from_bytes(queued, sys.byteorder)
        if self._written_bytes - unsent <= self._delivered_bytes:
            return
        self._taken_s = self._loop.time()
        if self._delivered_bytes < self._due_end:
            self.delivered_s = self._taken_s
        if self._before_ping is None or self._delivered_bytes < self._before_ping:
            self._alive_s = self._taken_s
        self._delivered_bytes = self._written_bytes - unsent

    def keep_alive(self, now_s: float) -> None:
        """Called once a second: send a ping when due; drop the connection if the broker is silent and takes no bytes
        from before the ping. Later bytes prove nothing: the kernel takes them even if the broker hangs."""
        self._look_at_delivery()
        if self._paused:
            self._received_s = now_s  # we don't read, so silence proves nothing
        if not self._keep_alive_s:
            return
        if now_s - max(self._received_s, self._alive_s) >= 2 * self._keep_alive_s:
            self.drop(TimeoutError(f"it has been silent for {2 * self._keep_alive_s} s"))
        elif now_s - max(self._pinged_s, min(self._received_s, self._written_s)) >= self._keep_alive_s:
            self._pinged_s = now_s
            if self._before_ping is None:
                self._before_ping = self._written_bytes
            self.write(packets.PINGREQ)

    def received(self) -> None:
        """Bytes have arrived, of any packet."""
        self._received_s, self._before_ping = self._loop.time(), None
        # Let the kernel acknowledge at once what was read; each write resets this option. A broker with Nagle's
        # algorithm (mosquitto, unless it has set_tcp_nodelay) sends the first of many PUBACKs and keeps the others
        # until TCP has acknowledged it. A delayed acknowledgement takes 40 ms, and every batch would wait that long.
        if _QUICK_ACK is not None and self._socket is not None:
            with contextlib.suppress(OSError):  # it has hung up; the next read says so
                self._socket.setsockopt(socket.IPPROTO_TCP, _QUICK_ACK, 1)

    def drop(self, failure: OSError) -> None:
        """Close it at once, without DISCONNECT."""
        transport, self._transport, self.up = self._transport, None, False
        if transport is None:
            return
        transport.abort()
        if not self.lost.done():  # else it was cancelled, and nothing waits for it
            self.lost.set_result(failure)
        for future in self._answers.values():
            if not future.done():
                future.set_exception(failure)

    # Callbacks of asyncio.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport), "TCP, TLS and WebSocket have one"
        self._transport = transport
        self._socket = transport.get_extra_info("socket")

    def connection_lost(self, exc: Exception | None) -> None:
        if exc is None:
            self.drop(ConnectionResetError("it hung up"))
        else:
            self.drop(exc if isinstance(exc, OSError) else ConnectionAbortedError(f"unexpected error {exc!r}"))

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._reader.buffer

    def buffer_updated(self, nbytes: int) -> None:
        self.received()
        publishes: list[wire.Publish] = []
        pubacks: list[tuple[int, int]] = []
        whys: dict[int, str] = {}
        try:
            for first, body in self._reader.take(nbytes):
                kind = first & 0xF0
                if kind == wire.PUBLISH_BITS and not first & 0x04:  # QoS 0 or 1
                    publishes.append(wire.read_publish(first, body))
                elif kind == wire.PUBACK and len(body) >= 2:
                    pubacks.append((body[0] << 8 | body[1], body[2] if len(body) > 2 else 0))
                    if len(body) > BARE_PUBACK_BYTES and (
                        why := packets.why_refused(bytes(body[: packets.ANSWER_BYTES_MAX]))
                    ):
                        whys[pubacks[-1][0]] = why
                else:
                    if publishes:  # a SUBACK changes how those behind it are read
                        self._user.on_publishes(publishes)
                        publishes = []
                    self._take_rare(kind, first, bytes(body))
                    if self._transport is None:
                        return
            if publishes:
                self._messages_s = self._received_s
                self._user.on_publishes(publishes)
            if pubacks and self._transport is not None:
                self._user.on_pubacks(pubacks, whys)
        except ValueError as error:
            self.drop(ConnectionAbortedError(f"it sent data that is not MQTT 5: {error}"))
        if self._reader.announced and self._transport is not None:
            self.write(packets.DISCONNECT_TOO_LARGE)
            self.drop(PacketTooLarge(self._reader.announced, self.packet_bytes_max))

    def _take_rare(self, kind: int, first: int, body: bytes) -> None:
        if len(body) > packets.ANSWER_BYTES_MAX and kind != wire.PUBLISH_BITS:
            raise ValueError(f"a packet of kind {first >> 4} and {len(body)} bytes")
        if kind == packets.CONNACK:
            welcome = packets.read_connack(body)
            if welcome.reason < reasons.FAILURE_MIN and not self.up:
                # a keep-alive of 0, or of hours, would notice a dead broker late; more pings are always allowed
                brokers_s = welcome.number("ServerKeepAlive", 0) or self._keep_alive_s
                self.up, self._keep_alive_s = True, min(self._keep_alive_s, brokers_s)
                self._user.welcomed(welcome)  # before the next packet, which may be a message
            self._answer(0, welcome)
        elif kind in (packets.SUBACK, packets.UNSUBACK):
            self._answer(*packets.read_answer(kind, body))
        elif kind == packets.DISCONNECT:
            said = packets.read_disconnect(body)
            self.drop(TakenOver(said) if said.reason == SESSION_TAKEN_OVER else Disconnected(said))
        elif kind == wire.PUBLISH_BITS and not first & 0x02:  # QoS 2: from an earlier client of this session
            self.write(packets.refuse(wire.read_publish(first, body).packet_id))
        elif kind == packets.PUBREL:
            self.write(packets.end(body))
        elif kind != packets.PINGRESP:
            raise ValueError(f"a packet of kind {first >> 4}")

    def _answer(self, packet_id: int, answer: object) -> None:
        future = self._answers.get(packet_id)
        if future is not None and not future.done():
            future.set_result(answer)


class Dialler:
    """Connects to one host, any number of times. A cancelled attempt leaves no thread to wait for, and no socket."""

    def __init__(self, host: str, port: int) -> None:
        self._host, self._port = host, port
        # one at a time: a resolver that hangs costs one thread, not one per try
        self._lookup: asyncio.Future[list[Address]] | None = None

    async def dial(self, connection: Connection, context: ssl.SSLContext | None, timeout_s: float) -> None:
        """Connect, with `context` over TLS. `timeout_s` each: for the name, an address, TLS.

        Raises OSError (gaierror, SSLError, TimeoutError among them), and ValueError for an impossible host name
        (UnicodeError among them).
        """
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(timeout_s):
            addresses = await self._addresses()
        failure = OSError(f"{self._host} has no address")
        for family, address in addresses:
            sock = new_socket(family, context)
            try:
                async with asyncio.timeout(timeout_s):
                    await loop.sock_connect(sock, address)
                break
            except BaseException as error:
                sock.close()
                if not isinstance(error, OSError):
                    raise
                failure = error  # the next address may answer
        else:
            raise failure
        name = None if context is None else self._host  # the context checks who the broker is
        async with asyncio.timeout(timeout_s):
            await loop.create_connection(lambda: connection, sock=sock, ssl=context, server_hostname=name)

    async def _addresses(self) -> list[Address]:
        with contextlib.suppress(socket.gaierror):
            return look_up(self._host, self._port, _NUMERIC)
        if self._lookup is None or self._lookup.done():
            # not in the loop's own pool: the process would wait for its threads at its end, and a look-up may take
            # half a minute
            thread = on_own_thread("look up a broker", lambda: look_up(self._host, self._port), lambda _: None)
            self._lookup = asyncio.ensure_future(thread)
        return await asyncio.shield(self._lookup)


def new_socket(family: int, context: ssl.SSLContext | None) -> socket.socket:
    sock = socket.socket(family) if context is None else _TlsSocket(family)
    sock.setblocking(False)
    # asyncio sets this only for a socket whose protocol is TCP explicitly. Without it a message behind a PUBACK waits
    # 40 ms, until the broker's kernel has acknowledged that
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock


def look_up(host: str, port: int, flags: int = 0) -> list[Address]:
    return [(found[0], found[4]) for found in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=flags)]


class _TlsSocket(socket.socket):
    """asyncio ends the connection when a write fails; here the next read ends it: a broker that refuses our certificate
    says so before it hangs up."""

    def send(self, data: Any, flags: int = 0, /) -> int:
        try:
            return super().send(data, flags)
        except ConnectionError:
            return memoryview(data).nbytes
