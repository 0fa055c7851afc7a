"""Socket -> whole packets, each byte copied a few times at most, and never more than one packet kept that is not whole.

recv -> split -> (first byte, body), ...        the rest is small: kept, and joined to what the next read brings
                                          the rest is large: a buffer of its packet's size <- recv_into, until it is full -> body
                                          it announces more than `packet_bytes_max`: `announced` says so, and nothing is
                                          kept

Joining a large packet anew at each read would copy it some hundred times: 50 MB held the event loop up for seconds.
"""

from __future__ import annotations

import socket
import ssl
from typing import Final

from transports.mqtt5 import wire

# of one read: some 500 messages of 400 bytes, or 40 us of copying; a TLS record is smaller anyway
READ_BYTES: Final = 1 << 18
# from here on a packet has a buffer of its own: smaller ones are joined for less than that costs
LARGE_BYTES: Final = 1 << 16

Packets = list[tuple[int, bytes]]


class PacketTooLarge(ValueError):
    """The broker sends more than we said that we take: it does not keep to our Maximum Packet Size."""

    def __init__(self, announced: int, packet_bytes_max: int) -> None:
        super().__init__(
            f"the broker announced a packet of {announced} bytes, and CONNECT said {packet_bytes_max} at most: does "
            "it keep to a Maximum "
            "Packet Size? Else keep large messages from it, or raise message_bytes_max"
        )


class PacketReader:
    """Of one connection."""

    def __init__(self, packet_bytes_max: int) -> None:
        self._packet_bytes_max = packet_bytes_max
        self._unread = b""  # the beginning of a small packet, or of a header
        self._large: bytearray | None = None
        self._first = self._filled = 0  # of the large packet: its first byte, and how much of the rest has come
        self.announced = 0  # bytes of a packet that is too large: nothing behind it can be read, and none of it is kept

    def read(self, sock: socket.socket) -> Packets | None:
        """What is whole by now; None at the end of the stream. Raises OSError as the socket does, ValueError for what
        is no MQTT."""
        packets = self._read_some(sock)
        # select does not see what TLS has read ahead
        while packets is not None and isinstance(sock, ssl.SSLSocket) and sock.pending():
            more = self._read_some(sock)
            if more is None:
                break  # the next read says so again
            packets += more
        return packets

    def _read_some(self, sock: socket.socket) -> Packets | None:
        if self._large is not None:
            return self._fill(sock, self._large)
        data = sock.recv(READ_BYTES)
        if not data:
            return None
        if self._unread:
            data = self._unread + data
        packets, used = wire.split(data, self._packet_bytes_max)
        self._keep(data, used)
        return packets

    def _keep(self, data: bytes, used: int) -> None:
        """What is behind `used` is the beginning of a packet."""
        start, length = wire.announced(data, used)
        if length > self._packet_bytes_max:
            self._unread, self.announced = b"", length
        elif length < LARGE_BYTES:
            self._unread = data[used:]
        else:
            self._unread, self._first, self._large = b"", data[used], bytearray(length)
            self._filled = len(data) - start
            self._large[: self._filled] = memoryview(data)[start:]

    def _fill(self, sock: socket.socket, large: bytearray) -> Packets | None:
        end = min(self._filled + READ_BYTES, len(large))
        count = sock.recv_into(memoryview(large)[self._filled : end])
        if not count:
            return None
        self._filled += count
        if self._filled < len(large):
            return []
        self._large = None
        return [(self._first, bytes(large))]
