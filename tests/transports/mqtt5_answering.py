"""Brokers for tests: `serving` gives one a port; `Answering` answers everything with one reason code, or some topics
with another one."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final, Protocol, TypeVar

from transports.mqtt5 import wire

CONNECT: Final = 0x10
SUBSCRIBE: Final = 0x82
UNSUBSCRIBE: Final = 0xA2
QOS1: Final = 0x32
PINGREQ: Final = 0xC0


def packet(first: int, body: bytes) -> bytes:
    return bytes((first,)) + wire.varint(len(body)) + body


class Answering:
    """A broker that answers everything with `reason`, where the packet has one."""

    def __init__(self) -> None:
        self.reason = self.port = self.connections = 0
        self.heard: Counter[bytes] = Counter()  # messages, by the last segment of their topic
        self.silent_about = b""  # last segment of a topic whose messages have no answer
        self.asked_in_vain = asyncio.Event()
        self.topics: dict[bytes, int] = {}  # last segment of a topic -> reason code of its PUBACK, if another one

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        data = b""
        with contextlib.suppress(OSError):
            while more := await reader.read(65_536):
                found, used = wire.split(data + more)
                data = (data + more)[used:]
                writer.writelines(self._answer(first, body) for first, body in found)
        writer.close()

    def _answer(self, first: int, body: bytes) -> bytes:
        if first == CONNECT:
            return b"\x20\x03\x00\x00\x00"
        if first == QOS1:
            topic_end = 2 + int.from_bytes(body[:2], "big")
            topic = body[2:topic_end].rpartition(b"/")[2]
            self.heard[topic] += 1
            if topic == self.silent_about:
                self.asked_in_vain.set()
                return b""
            reason = self.topics.get(topic, self.reason)
            return packet(0x40, body[topic_end : topic_end + 2] + bytes((reason, 0)))
        if first in (SUBSCRIBE, UNSUBSCRIBE):
            return packet(first & 0xF0 | 0x10, body[:2] + bytes((0, self.reason)))
        return b"\xd0\x00" if first == PINGREQ else b""


class Server(Protocol):
    port: int

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection."""


S = TypeVar("S", bound=Server)


@asynccontextmanager
async def serving(broker: S) -> AsyncIterator[S]:
    """It serves all connections to a port of its own."""
    server = await asyncio.start_server(broker.serve, "127.0.0.1", 0)
    broker.port = server.sockets[0].getsockname()[1]
    async with server:
        yield broker


@asynccontextmanager
async def answering() -> AsyncIterator[Answering]:
    async with serving(Answering()) as broker:
        yield broker
