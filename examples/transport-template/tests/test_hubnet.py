"""Proof that the transport is one: the conformance suite, over a hub that each test has for itself."""

from __future__ import annotations

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import AsyncIterator
from typing import Any

import pytest_asyncio
from up_transport_hubnet import (
    MESSAGE,
    PLUGIN,
    SUBSCRIBE,
    SYNC,
    UNSUBSCRIBE,
    HubConfig,
    HubTransport,
    frame,
    read_frame,
)

from transports.conformance import ALPHA, BETA, TcpProxy, TransportConformance
from uprotocol.transport import LocalUriProvider, UTransport
from uprotocol.v1.umessage_pb2 import UMessage
from uprotocol.v1.uri_pb2 import UUri


class Hub:
    def __init__(self) -> None:
        self.wants: dict[asyncio.StreamWriter, set[bytes]] = defaultdict(set)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        wants = self.wants[writer]
        with contextlib.suppress(OSError, EOFError, ValueError, asyncio.CancelledError):
            while True:
                kind, key, body = await read_frame(reader)
                if kind == MESSAGE:
                    await self.pass_on(writer, key, body)
                elif kind == SYNC:
                    writer.write(frame(SYNC))
                    await writer.drain()
                elif kind == SUBSCRIBE:
                    wants.add(key)
                elif kind == UNSUBSCRIBE:
                    wants.discard(key)
        del self.wants[writer]
        writer.transport.abort()

    async def pass_on(self, sender: asyncio.StreamWriter | None, key: bytes, body: bytes) -> None:
        for writer, wants in list(self.wants.items()):
            if writer is not sender and (key in wants or b"*" in wants):
                with contextlib.suppress(OSError):
                    writer.write(frame(MESSAGE, key, body))
                    await writer.drain()  # a slow one slows all, and loses nothing


class TestHubnet(TransportConformance):
    capabilities = HubTransport.capabilities
    flood_messages = 40_000  # more than the arrivals and the buffers of all sockets on the way hold
    deadline_s = 30

    @pytest_asyncio.fixture(autouse=True)
    async def _network(self) -> AsyncIterator[None]:
        self.hub = Hub()
        self.server = await asyncio.start_server(self.hub.serve, "127.0.0.1", 0)
        self.port = self.server.sockets[0].getsockname()[1]
        self.links = {name: TcpProxy("127.0.0.1", self.port) for name in (ALPHA, BETA)}
        for link in self.links.values():
            await link.start()
        yield
        self.server.close()
        for link in self.links.values():
            await link.stop()
        for writer in list(self.hub.wants):
            writer.transport.abort()
        await self.eventually(lambda: not self.hub.wants, "the hub to be left by all")

    async def make_end(self, authority: str, **limits: int) -> UTransport:
        port = self.links[authority].port if authority in self.links else self.port
        return HubTransport(HubConfig(port=port, **limits), LocalUriProvider(authority, 0x10AB, 3))

    async def make_unreachable(self, authority: str) -> UTransport:
        return HubTransport(HubConfig(port=1), LocalUriProvider(authority, 0x10AB, 3))

    def normalise(self, message: UMessage) -> UMessage:
        return message  # whole messages travel, so nothing is lost

    async def inject(self, message: UMessage) -> None:
        key = message.attributes.source.authority_name or ALPHA
        await self.hub.pass_on(None, key.lower()[:128].encode(), message.SerializeToString())

    async def inject_malformed(self, source: UUri, sink: UUri) -> int:
        key = source.authority_name.encode()
        bad = [b"\xff\xff\xff", b"\x0a\x05"]
        for body in bad:
            await self.hub.pass_on(None, key, body)
        return len(bad)

    async def inject_misplaced(self, message: UMessage, authority: str) -> None:
        await self.hub.pass_on(None, authority.encode(), message.SerializeToString())

    async def break_network(self, authority: str) -> None:
        self.links[authority].cut()

    async def heal_network(self, authority: str) -> None:
        self.links[authority].mend()

    async def forget_network(self, authority: str) -> None:
        """The hub remembers nobody who is away."""

    def peer_process(self, authority: str) -> tuple[str, dict[str, Any]]:
        return "up_transport_hubnet:PLUGIN", {"port": self.port}


def test_the_plugin_is_whole() -> None:
    assert PLUGIN.create(PLUGIN.config(port=1), LocalUriProvider("here", 1, 1)).capabilities == PLUGIN.capabilities
