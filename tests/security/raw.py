"""MQTT 5 on a plain socket, to send faster, larger or less valid packets than a client library does.

RawMqtt: CONNECT, then any bytes; a thread reads and acknowledges what arrives, or does not read at all.
"""

from __future__ import annotations

import contextlib
import itertools
import socket
import struct
import threading
from collections.abc import Callable
from typing import Final

from campaigns.chaos.wire import CE_NAMES, Message, id_text

CONNECT, PUBLISH, PUBACK, SUBSCRIBE = 0x10, 0x30, 0x40, 0x82
RECEIVED_BYTES: Final = 1 << 20
IN_FLIGHT_MAX: Final = 10_000


def varint(value: int) -> bytes:
    out = bytearray()
    while True:
        value, low = value >> 7, value & 0x7F
        out.append(low | 0x80 if value else low)
        if not value:
            return bytes(out)


def _text(value: str | bytes) -> bytes:
    data = value.encode() if isinstance(value, str) else value
    return struct.pack(">H", len(data)) + data


def packet(kind: int, *parts: bytes) -> bytes:
    body = b"".join(parts)
    return bytes([kind]) + varint(len(body)) + body


def user(name: str | bytes, value: str | bytes) -> bytes:
    """Returns a user property."""
    return b"\x26" + _text(name) + _text(value)


def properties(message: Message) -> bytes:
    """Returns the properties of a uProtocol message, see up-l1/mqtt_5.adoc."""
    parts = [
        user("uP", "1"),
        user("1", id_text(message.id)),
        user("2", CE_NAMES[message.type]),
        user("3", str(message.source)),
    ]
    if message.sink is not None:
        parts.append(user("4", str(message.sink)))
    parts.append(user("5", f"CS{message.priority - 1}"))
    if message.ttl_ms:
        parts.append(b"\x02" + struct.pack(">I", -(-message.ttl_ms // 1000)))
    if message.reqid is not None:
        parts.append(b"\x09" + _text(message.reqid))
    parts.append(b"\x03" + _text(str(message.format)))
    return b"".join(parts)


def publish(topic: str, payload: bytes, found: bytes, mid: int) -> bytes:
    """Returns a PUBLISH with QoS 1, or QoS 0 if `mid` is 0."""
    head = _text(topic) + (struct.pack(">H", mid) if mid else b"")
    return packet(PUBLISH | (0x02 if mid else 0), head, varint(len(found)), found, payload)


class RawMqtt:
    """One connection. With `reads=False` it never reads what the broker sends."""

    def __init__(
        self, port: int, client_id: str, *filters: str, reads: bool = True, heard: Callable[[bytes], None] | None = None
    ) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), 10)
        self._socket.settimeout(120)
        self._heard = heard  # called with the body of each PUBLISH
        self._mids = itertools.cycle(range(1, 65_536))
        self._free = threading.Semaphore(IN_FLIGHT_MAX)
        self.received = self.acked = self.refused = 0
        self.closed = threading.Event()
        receive_maximum = b"\x21\xff\xff"
        self._socket.sendall(
            packet(
                CONNECT,
                _text("MQTT"),
                b"\x05\x02\x00\x3c",
                varint(len(receive_maximum)),
                receive_maximum,
                _text(client_id),
            )
        )
        self._socket.recv(4096)
        if filters:
            self._socket.sendall(packet(SUBSCRIBE, b"\x00\x01\x00", *(_text(one) + b"\x01" for one in filters)))
        if reads:
            threading.Thread(target=self._read, daemon=True).start()

    def send(self, data: bytes) -> None:
        self._socket.sendall(data)

    def say(self, messages: list[Message], *, off_vehicle: bool = False, qos: int = 1) -> None:
        """Sends messages; waits while IN_FLIGHT_MAX are not acknowledged."""
        out = []
        for message in messages:
            if qos:
                self._free.acquire()
            out.append(
                publish(
                    message.topic(off_vehicle), message.payload, properties(message), next(self._mids) if qos else 0
                )
            )
        self.send(b"".join(out))

    def settle(self, timeout_s: float) -> None:
        """Waits until everything sent is acknowledged, at most `timeout_s`."""
        taken = 0
        while taken < IN_FLIGHT_MAX and self._free.acquire(timeout=timeout_s):
            taken += 1
        for _ in range(taken):
            self._free.release()

    def _read(self) -> None:
        waiting = bytearray()
        with contextlib.suppress(OSError):
            while data := self._socket.recv(RECEIVED_BYTES):
                waiting += data
                self._take(waiting)
        self.closed.set()

    def _take(self, waiting: bytearray) -> None:
        at, acks = 0, []
        while (end := self._end(waiting, at)) is not None:
            kind, start, at = waiting[at], end[0], end[1]
            if kind & 0xF0 == PUBACK:
                self.acked += 1
                self.refused += at - start > 2 and waiting[start + 2] >= 0x80
                self._free.release()
            elif kind & 0xF0 == PUBLISH:
                self.received += 1
                length = struct.unpack_from(">H", waiting, start)[0]
                if kind & 0x06:
                    acks.append(packet(PUBACK, bytes(waiting[start + 2 + length : start + 4 + length])))
                if self._heard is not None:
                    self._heard(bytes(waiting[start:at]))
        del waiting[:at]
        if acks:
            self.send(b"".join(acks))

    @staticmethod
    def _end(data: bytearray, at: int) -> tuple[int, int] | None:
        """Returns where the body of the packet at `at` begins and ends, if the packet is complete."""
        size = shift = 0
        for place in range(at + 1, min(at + 5, len(data))):
            size |= (data[place] & 0x7F) << shift
            shift += 7
            if data[place] < 0x80:
                return (place + 1, place + 1 + size) if place + 1 + size <= len(data) else None
        return None

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
