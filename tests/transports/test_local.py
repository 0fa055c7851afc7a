"""The in-process transport: the conformance suite, and its faults."""

from __future__ import annotations

import pytest

from transports.conformance import TransportConformance
from transports.local import LocalConfig, LocalNetwork, LocalTransport
from uprotocol.transport import Capability, LocalUriProvider, UTransport
from uprotocol.v1.umessage_pb2 import UMessage


class TestLocal(TransportConformance):
    capabilities = Capability.PUSH | Capability.PULL | Capability.ACK | Capability.WILDCARD_SOURCE | Capability.PUBLISH_WITHOUT_SINK

    @pytest.fixture(autouse=True)
    def _network(self) -> None:
        self.network = LocalNetwork()

    async def make_end(self, authority: str, **limits: int) -> UTransport:
        return LocalTransport(LocalConfig(**limits), LocalUriProvider(authority, 0x10AB, 3), self.network)

    def normalise(self, message: UMessage) -> UMessage:
        return message

    async def inject(self, message: UMessage) -> None:
        self.network.inject(message)

    async def break_network(self, authority: str) -> None:
        self.network.member(authority).disconnect()

    async def heal_network(self, authority: str) -> None:
        self.network.member(authority).reconnect()

    async def inject_malformed(self, source, sink) -> int:
        self.network.inject(UMessage())
        return 1
