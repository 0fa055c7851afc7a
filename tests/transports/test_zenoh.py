"""Zenoh: the conformance suite over TCP on loopback, and the mapping against the specification's own examples."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest_asyncio
import zenoh

from transports import zenoh_mapping as mapping
from transports.conformance import ALPHA, TcpProxy, TransportConformance
from transports.zenoh import ZenohConfig, ZenohTransport
from uprotocol.transport import Capability, LocalUriProvider, UTransport
from uprotocol.v1.umessage_pb2 import UMessage
from uprotocol.v1.uri_pb2 import UUri


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


class TestZenoh(TransportConformance):
    """beta connects to alpha through a proxy that can be cut; what our transport would not send comes from a session of Zenoh's own."""

    capabilities = Capability.PUSH | Capability.WILDCARD_SOURCE | Capability.PUBLISH_WITHOUT_SINK
    discovery = True
    routes_streamed_publish = False

    @pytest_asyncio.fixture(autouse=True)
    async def _network(self) -> AsyncIterator[None]:
        self.alpha_port, self.beta_port = free_port(), free_port()
        self.raw: zenoh.Session | None = None
        self.proxy = TcpProxy("127.0.0.1", self.alpha_port)
        await self.proxy.start()
        yield
        await self.proxy.stop()
        if self.raw is not None:
            self.raw.close()

    async def make_end(self, authority: str, **limits: int) -> UTransport:
        where: dict[str, list[str]] = {"listen": [f"tcp/127.0.0.1:{self.alpha_port if authority == ALPHA else self.beta_port}"]}
        if authority != ALPHA and not limits:  # those with limits are alone
            where["connect"] = [f"tcp/127.0.0.1:{self.proxy.port}"]
        no_gossip = {"scouting/gossip/enabled": False}  # or alpha would find beta's port, and pass the proxy by
        return ZenohTransport(ZenohConfig(**where, **limits, settings=no_gossip), LocalUriProvider(authority, 0x10AB, 3))

    async def break_network(self, authority: str) -> None:
        self.proxy.cut()

    async def heal_network(self, authority: str) -> None:
        self.proxy.mend()

    def peer_process(self, authority: str) -> tuple[str, dict[str, Any]]:
        return "transports.zenoh:PLUGIN", {"connect": [f"tcp/127.0.0.1:{self.alpha_port}"]}

    async def inject(self, message: UMessage) -> None:
        await self.put(mapping.message_key(message, ALPHA), message.payload, mapping.encode(message))

    async def inject_malformed(self, source: UUri, sink: UUri) -> int:
        key = mapping.filter_key(source, sink, ALPHA)
        attachments = [None, b"", b"\x01", b"\x02" + bytes(20), b"\x01\xff\xff\xff", b"\x01" + bytes(3), bytes(range(256))]
        for attachment in attachments:
            await self.put(key, b"malformed", attachment)
        return len(attachments)

    async def put(self, key: str, payload: bytes, attachment: bytes | None) -> None:
        """Once beta's subscription is known."""
        if self.raw is None:
            self.raw = await asyncio.to_thread(zenoh.open, ZenohConfig(connect=[f"tcp/127.0.0.1:{self.beta_port}"]).to_zenoh())
        publisher = self.raw.declare_publisher(key)
        await self.eventually(lambda: publisher.matching_status, f"a subscriber for {key}")
        publisher.put(payload, attachment=attachment)
