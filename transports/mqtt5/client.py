"""A paho client whose socket the event loop serves, and whose PUBLISH and PUBACK packets are read and written in
batches.

readable -> PacketReader -> PUBLISH, PUBACK -> our callbacks, once per read
                         -> the rest (CONNACK, SUBACK, PINGRESP, DISCONNECT, ...) -> paho
send(bytes of many packets) -> paho's queue -> loop_write

paho alone manages some 1,500 QoS 1 messages/s: it reads headers byte by byte, keeps properties in slow objects, walks
through all that is in flight with each PUBACK, and makes one system call per packet. It still does what is hard to get
right and is not
hot: the handshake, keep-alive, subscriptions, reason codes. What we override or use of it that is not public: `_sock`,
`_sock_recv`, `_sock_send`, `_create_socket`, `_packet_read`, `_loop_rc_handle`, `_packet_queue`, `_mid_generate`; a
test holds each new release of paho to that.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Callable
from typing import Any, Final

import paho.mqtt.client as paho
from paho.mqtt.enums import CallbackAPIVersion, MQTTErrorCode, MQTTProtocolVersion

from transports.mqtt5 import wire
from transports.mqtt5.reader import PacketReader, Packets, PacketTooLarge

_QUICK_ACK: Final[int | None] = getattr(socket, "TCP_QUICKACK", None)  # Linux

OnPublishes = Callable[[list[wire.Publish]], None]
OnPubacks = Callable[[list[tuple[int, int]]], None]


class BatchClient(paho.Client):
    """`on_publishes(publishes)` and `on_pubacks([(packet id, reason code)])` are called once for all that one read
    brought, in order."""

    def __init__(self, client_id: str, on_publishes: OnPublishes, on_pubacks: OnPubacks) -> None:
        super().__init__(
            CallbackAPIVersion.VERSION2, client_id=client_id, protocol=MQTTProtocolVersion.MQTTv5, manual_ack=True
        )
        self.on_publishes, self.on_pubacks = on_publishes, on_pubacks
        # one of those that paho takes for SUBSCRIBE, so they don't collide
        self.next_packet_id: Callable[[], int] = self._mid_generate
        self.failure: BaseException | None = None  # why the last connection ended, if the socket said so
        # of what comes; a broker that keeps to what CONNECT says never sends more
        self.packet_bytes_max = wire.PACKET_BYTES_MAX
        self._reader = PacketReader(self.packet_bytes_max)
        self._fed = b""  # the packet that paho is to read
        self._events: asyncio.AbstractEventLoop | None = None
        self._fd = -1
        self._dialled: socket.socket | None = None  # what paho is to use next
        self._flushing = self._writing = False
        self.paused = False  # the socket is not read
        self.on_socket_register_write = self._on_want_write
        self.on_socket_close = self._on_close

    # The socket, on the event loop.

    def attach(self, loop: asyncio.AbstractEventLoop, sock: socket.socket, connect: Callable[[], Any]) -> None:
        """Let `loop` serve `sock`, on which `connect` (paho's own connect or reconnect) says CONNECT. Closes it if that
        fails."""
        self._dialled, self._reader, self.failure = sock, PacketReader(self.packet_bytes_max), None
        try:
            # we batch ourselves; Nagle would only hold back the last one
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connect()
        except BaseException:
            sock.close()
            self._dialled = None
            raise
        if self._sock is None:  # it has hung up already
            raise (
                self.failure
                if isinstance(self.failure, OSError)
                else ConnectionResetError("it hung up before it answered")
            )
        self._events, self._fd = loop, sock.fileno()
        self.paused = False
        loop.add_reader(self._fd, self.loop_read)
        self._flush()

    def _create_socket(self) -> socket.socket:
        """paho would make it here, blocking; ours is there already."""
        sock, self._dialled = self._dialled, None
        assert sock is not None, "paho connects only in attach"
        return sock

    def pause(self, paused: bool) -> None:
        """Let what comes wait in the kernel, so that the broker is held back; each connection begins without."""
        if self._events is not None and paused != self.paused:
            self.paused = paused
            if paused:
                self._events.remove_reader(self._fd)
            else:
                self._events.add_reader(self._fd, self.loop_read)
                self._events.call_soon(self.loop_read)  # TLS may have read ahead

    def keep_alive(self) -> None:
        """Once a second: ping, and give up a broker that is silent."""
        if self.paused:
            self._last_bytes_received = paho.time_func()  # it is us who don't listen
        self.loop_misc()

    def drop(self) -> None:
        """End the connection without a word; on_disconnect is called."""
        if self._sock is not None:
            self._loop_rc_handle(MQTTErrorCode.MQTT_ERR_CONN_LOST)

    def _on_close(self, *_: Any) -> None:
        if self._events is not None:
            self._events.remove_reader(self._fd)
            self._events.remove_writer(self._fd)
        self._events, self._writing = None, False

    def _on_want_write(self, *_: Any) -> None:
        if self._events is not None and not self._flushing:
            self._flushing = True
            self._events.call_soon(self._flush)

    def _flush(self) -> None:
        """Write what is queued: at once, and what the socket does not take when it can take more."""
        self._flushing = False
        self.loop_write()
        if self._events is not None and self._writing != self.want_write():
            self._writing = not self._writing
            if self._writing:
                self._events.add_writer(self._fd, self._flush)
            else:
                self._events.remove_writer(self._fd)

    # Packets.

    def send_packets(self, data: bytes, first: int) -> None:
        """Queue whole packets, of the kind `first`; they leave in this turn of the loop or the next."""
        self._packet_queue(first, data, 0, 1)

    def loop_read(self, max_packets: int = 1) -> MQTTErrorCode:
        """Everything that has come, in place of paho's packet by packet."""
        sock = self._sock
        if not isinstance(sock, socket.socket):
            return MQTTErrorCode.MQTT_ERR_NO_CONN
        try:
            packets = self._reader.read(sock)
        except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return MQTTErrorCode.MQTT_ERR_SUCCESS
        except OSError as error:
            self.failure, packets = error, None
        except ValueError as error:
            return self._give_up(error)
        if packets is None:
            return self._loop_rc_handle(MQTTErrorCode.MQTT_ERR_CONN_LOST)
        self._hurry(sock)
        self._last_bytes_received = paho.time_func()
        try:
            result = self._sort(packets)
        except ValueError as error:
            return self._give_up(error)
        return self._refuse(self._reader.announced) if self._reader.announced and self._sock is not None else result

    def _give_up(self, error: Exception) -> MQTTErrorCode:
        self.failure = error
        return self._loop_rc_handle(MQTTErrorCode.MQTT_ERR_PROTOCOL)

    def _refuse(self, announced: int) -> MQTTErrorCode:
        """Tell the broker why, if it takes that at once, and hang up: none of the packet is kept."""
        # of that kind paho does nothing but to send it; we hang up ourselves
        self.send_packets(wire.TOO_LARGE, wire.PUBACK)
        self.failure = PacketTooLarge(announced, self.packet_bytes_max)
        self.loop_write()
        return (
            self._loop_rc_handle(MQTTErrorCode.MQTT_ERR_PROTOCOL)
            if self._sock is not None
            else MQTTErrorCode.MQTT_ERR_PROTOCOL
        )

    @staticmethod
    def _hurry(sock: socket.socket) -> None:
        """Let the kernel acknowledge at once what has been read, which it forgets to do each time we write.

        A broker with Nagle's algorithm (mosquitto, unless it has set_tcp_nodelay) sends the first PUBACK of many and
        keeps the others until TCP has acknowledged that one; put off as usual, this takes 40 ms, for which every batch
        would wait.
        """
        if _QUICK_ACK is not None:
            with contextlib.suppress(OSError):  # it has hung up; the next read says so
                sock.setsockopt(socket.IPPROTO_TCP, _QUICK_ACK, 1)

    def _sort(self, packets: Packets) -> MQTTErrorCode:
        publishes: list[wire.Publish] = []
        pubacks: list[tuple[int, int]] = []
        for first, body in packets:
            kind = first & 0xF0
            if kind == wire.PUBLISH and first & 0x06 != 0x04:  # QoS 2, which we never grant, is left to paho
                publishes.append(wire.read_publish(first, body))
            elif kind == wire.PUBACK and len(body) >= 2:
                pubacks.append((body[0] << 8 | body[1], body[2] if len(body) > 2 else 0))
            else:
                if publishes:  # a SUBACK changes how those behind it are read
                    self.on_publishes(publishes)
                    publishes = []
                result = self._feed(bytes((first,)) + wire.varint(len(body)) + body)
                if result > 0 or self._sock is None:
                    return self._loop_rc_handle(result) if self._sock is not None else result
        if publishes:
            self.on_publishes(publishes)
        if pubacks:
            self.on_pubacks(pubacks)
        return MQTTErrorCode.MQTT_ERR_SUCCESS

    def _feed(self, packet: bytes) -> MQTTErrorCode:
        self._fed = packet
        return self._packet_read()

    def _sock_send(self, buf: bytes | bytearray) -> int:
        try:
            return super()._sock_send(buf)
        except BlockingIOError:
            raise
        except OSError as error:
            self.failure = error
            self._read_alert()
            raise

    def _read_alert(self) -> None:
        """With TLS, the broker may have said why before it hung up."""
        if not isinstance(self._sock, ssl.SSLSocket):
            return
        try:
            self._sock.recv(1)
        except (ssl.SSLEOFError, ssl.SSLWantReadError, ssl.SSLZeroReturnError):
            return
        except ssl.SSLError as alert:
            self.failure = alert
        except OSError:
            return

    def _sock_recv(self, bufsize: int) -> bytes:
        data, self._fed = self._fed[:bufsize], self._fed[bufsize:]
        return data
