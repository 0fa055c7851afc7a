"""The conformance suite of the mqtt5 transport over each broker, in both modes."""

from __future__ import annotations

from typing import Any

import pytest

from tests.brokers.makes import Make
from tests.transports.test_mqtt5_conformance import BASE, Mqtt5Conformance
from transports.mqtt5.mapping import Mode
from uprotocol.transport import Capability, UTransport

pytestmark = pytest.mark.broker


class BrokerConformance(Mqtt5Conformance):
    @pytest.fixture(autouse=True)
    def endpoint(self, make: Make) -> None:
        """With the settings that docs/brokers.md gives for this make."""
        self.settings = make.endpoint

    async def make_end(self, authority: str, **limits: Any) -> UTransport:
        return await super().make_end(authority, **{**self.settings, **limits})

    def peer_process(self, authority: str) -> tuple[str, dict[str, Any]]:
        plugin, settings = super().peer_process(authority)
        return plugin, {**settings, **self.settings}


class TestInVehicle(BrokerConformance):
    mode = Mode.IN_VEHICLE
    routes_streamed_publish = False  # as in tests/transports
    capabilities = BASE | Capability.WILDCARD_SOURCE | Capability.PUBLISH_WITHOUT_SINK


class TestOffVehicle(BrokerConformance):
    mode = Mode.OFF_VEHICLE
    capabilities = BASE
