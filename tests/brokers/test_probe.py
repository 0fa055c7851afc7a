"""What `up-streamer check --connect` finds out at each broker, and that its subscribers notice nothing."""

from __future__ import annotations

import pytest

from tests.brokers.makes import AnyBroker
from tests.brokers.test_announced import Client
from transports.mqtt5 import Mqtt5Config, Mqtt5Transport
from uprotocol import attributes as attrs
from uprotocol import uri as uris
from uprotocol.transport import LocalUriProvider, ProbeRequest, ProbeVerdict

pytestmark = pytest.mark.broker

SENT = [(uris.parse(f"//probing{number}/4/1/8001"), attrs.streamer_sink("probed")) for number in range(12)]
NEEDED = ProbeRequest([(uris.ANY, uris.pattern("probing0"))], SENT)


async def test_a_probe_disturbs_no_subscriber(broker: AnyBroker, facts: dict[str, str]) -> None:
    settings = {"host": broker.host, "port": broker.port, "mode": "off-vehicle"}
    with Client.of(broker, "monitor") as monitor:
        for number in range(len(SENT)):
            monitor.subscribe(f"probing{number}/probed")
        end = Mqtt5Transport(Mqtt5Config.model_validate(settings), LocalUriProvider("probing0", 4, 1))
        found = [one async for one in end.probe(NEEDED)]
        assert not [one for one in found if one.verdict is ProbeVerdict.FAIL]
        rights = [one for one in found if "may write" in one.what or "may read" in one.what]
        facts[""] = ", ".join(f"{one.verdict} {one.what.partition(' probing')[0]}" for one in rights)
        assert monitor.publish("probing0/probed", b"mark") < 0x80
        assert monitor.wait("message").payload == b"mark"
        assert not monitor.has_message
