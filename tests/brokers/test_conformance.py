"""The conformance suite of the mqtt5 transport over each broker, in both modes."""

from __future__ import annotations

import pytest

from tests.transports.test_mqtt5_conformance import BASE, Mqtt5Conformance
from transports.mqtt5.mapping import Mode
from uprotocol.transport import Capability

pytestmark = pytest.mark.broker


class TestInVehicle(Mqtt5Conformance):
    mode = Mode.IN_VEHICLE
    routes_streamed_publish = False  # as in tests/transports
    capabilities = BASE | Capability.WILDCARD_SOURCE | Capability.PUBLISH_WITHOUT_SINK


class TestOffVehicle(Mqtt5Conformance):
    mode = Mode.OFF_VEHICLE
    capabilities = BASE
