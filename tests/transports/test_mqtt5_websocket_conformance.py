"""MQTT 5 over WebSocket, through a bridge to a real mosquitto: the conformance suite, in one mode."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from tests.tiers import full
from tests.transports.mqtt5_proxy import RefusingProxy
from tests.transports.mqtt5_websocket import WebSocketBridge
from tests.transports.test_mqtt5_conformance import BASE, Mqtt5Conformance
from transports.mqtt5 import Mqtt5Config, Mqtt5Transport
from transports.mqtt5.mapping import Mode
from uprotocol.transport import Capability, LocalUriProvider, UTransport

pytestmark = [pytest.mark.broker, full]


class TestWebSocket(Mqtt5Conformance):
    """end -> bridge -> the proxy of the other modes' tests -> broker"""

    mode = Mode.IN_VEHICLE
    routes_streamed_publish = False
    capabilities = BASE | Capability.WILDCARD_SOURCE | Capability.PUBLISH_WITHOUT_SINK

    @pytest_asyncio.fixture(autouse=True)
    async def bridged(self, network: None) -> AsyncIterator[None]:
        self.bridges: dict[str, WebSocketBridge] = {}
        yield
        for bridge in self.bridges.values():
            await bridge.stop()

    async def end(self, authority: str, **settings: Any) -> UTransport:
        if authority not in self.bridges:
            proxy = self.proxies.setdefault(authority, RefusingProxy(self.broker.host, self.broker.port))
            await proxy.start()
            self.bridges[authority] = WebSocketBridge("127.0.0.1", proxy.port)
            await self.bridges[authority].start()
        config = Mqtt5Config(port=self.bridges[authority].port, mode=self.mode, websocket={}, **settings)
        return Mqtt5Transport(config, LocalUriProvider(authority, 0x10AB, 3))

    async def make_unreachable(self, authority: str) -> UTransport:
        config = Mqtt5Config(port=1, mode=self.mode, websocket={})
        return Mqtt5Transport(config, LocalUriProvider(authority, 0x10AB, 3))
