"""The hooks of the conformance suite for the hub, as the author of a plugin writes them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest_asyncio

from tests.transports.mutants.end import HubConfig, HubTransport
from tests.transports.mutants.hub import MESSAGE_BYTES_MAX, Hub, keyed, pack, pack_address
from transports.conformance import TransportConformance, TransportHarness
from transports.listeners import Filter
from uprotocol.transport import LocalUriProvider, UTransport
from uprotocol.v1.umessage_pb2 import UMessage
from uprotocol.v1.uri_pb2 import UUri


class OnHub(TransportHarness):
    capabilities = HubTransport.capabilities
    flood_messages = 2_000  # the hub's queue holds 512
    payload_bytes_max = MESSAGE_BYTES_MAX // 2
    transport: type[HubTransport] = HubTransport
    hub: Hub

    @pytest_asyncio.fixture(autouse=True)
    async def _network(self) -> AsyncIterator[None]:
        self.hub = self.make_hub()
        await self.hub.start()
        yield
        await self.hub.stop()

    def make_hub(self) -> Hub:
        return Hub()

    async def make_end(self, authority: str, **limits: int) -> UTransport:
        return self.transport(HubConfig(port=self.hub.port, **limits), LocalUriProvider(authority, 0x10AB, 3))

    async def make_unreachable(self, authority: str) -> UTransport:
        return self.transport(HubConfig(port=1), LocalUriProvider(authority, 0x10AB, 3))

    async def make_refused(self, authority: str) -> UTransport:
        self.hub.refused.add(authority)
        return await self.make_end(authority)

    async def make_deaf(self, authority: str) -> UTransport:  # prose: ok
        self.hub.may_not_listen.add(authority)
        return await self.make_end(authority)

    async def refuse_filter(self, authority: str, source: UUri, sink: UUri) -> None:
        self.hub.refused_filters.add((authority, pack(Filter.of(source, sink, authority))))

    async def allow_filters(self, authority: str) -> None:
        self.hub.refused_filters.clear()

    async def refuse_address(self, authority: str, source: UUri, sink: UUri | None) -> None:
        self.hub.refused_addresses.add((authority, pack_address(source, sink)))

    async def allow_addresses(self, authority: str) -> None:
        self.hub.refused_addresses.clear()

    async def refuse_messages(self, authority: str) -> None:
        self.hub.full_for.add(authority)

    async def take_messages(self, authority: str) -> None:
        self.hub.full_for.clear()

    def normalise(self, message: UMessage) -> UMessage:
        return message

    async def inject(self, message: UMessage) -> None:
        self.hub.inject(keyed(message.attributes.source.authority_name, message.SerializeToString()))

    async def inject_misplaced(self, message: UMessage, authority: str) -> None:
        self.hub.inject(keyed(authority, message.SerializeToString()))

    async def inject_malformed(self, source: UUri, sink: UUri) -> int:
        self.hub.inject(b"\xff\xff\xff")
        self.hub.inject(b"")
        self.hub.inject(keyed(source.authority_name, b"\xff\xff\xff"))
        return 3

    async def break_network(self, authority: str) -> None:
        self.hub.cut(authority)
        await asyncio.sleep(0)

    async def heal_network(self, authority: str) -> None:
        self.hub.mend(authority)

    async def forget_network(self, authority: str) -> None:
        self.hub.forget(authority)

    async def make_returning(self, authority: str) -> UTransport:
        return self.transport(HubConfig(port=self.hub.port, session=True), LocalUriProvider(authority, 0x10AB, 3))

    def peer_process(self, authority: str) -> tuple[str, dict[str, Any]]:
        return "tests.transports.mutants.end:PLUGIN", {"port": self.hub.port}


class HubConformance(OnHub, TransportConformance):
    """All tests."""


class OneByOne(HubTransport):
    """Waits for an answer before it sends the next message, so that none overtakes one that a full hub has refused."""

    window = 1


class OnFullHub(OnHub):
    """A full hub refuses messages instead of letting their sender wait: UNAVAILABLE."""

    transport = OneByOne

    def make_hub(self) -> Hub:
        hub = Hub()
        hub.waits, hub.queue_messages_max = False, 256
        return hub
