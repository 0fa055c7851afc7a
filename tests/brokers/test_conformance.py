"""The conformance suite of the mqtt5 transport over each broker, in both modes."""

from __future__ import annotations

from typing import Any, Final

import pytest

from tests.brokers.deviations import Deviation
from tests.brokers.makes import Make
from tests.transports.test_mqtt5_conformance import BASE, Mqtt5Conformance
from transports.mqtt5.mapping import Mode
from uprotocol.transport import Capability, UTransport

pytestmark = pytest.mark.broker

DEVIATES_S: Final = 3.0  # nothing of these checks takes a second where it does not deviate


class BrokerConformance(Mqtt5Conformance):
    @pytest.fixture(autouse=True)
    def _of_make(self, make: Make, deviation: Deviation | None, request: pytest.FixtureRequest) -> None:
        """With the settings that docs/brokers.md gives for this make. What is not expected to come is not waited for
        long."""
        self.settings = dict(make.endpoint)
        if request.function.__name__ == "test_all_attributes_and_the_payload_survive":
            self.settings.pop("in_flight_max", None)  # what leaves a second later may have a longer ttl (docs/mqtt5.md)
        if self.settings.get("in_flight_max") == 1:  # a round trip for each message
            self.flood_messages, self.deadline_s = 2_500, 20.0
        if deviation is not None and not deviation.may:
            self.deadline_s = DEVIATES_S

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
