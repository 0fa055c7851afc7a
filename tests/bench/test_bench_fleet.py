"""The fleet leg: its packets are what the product reads, and a small fleet comes through whole."""

from __future__ import annotations

from pathlib import Path

import pytest

from campaigns.bench import fleet, fleet_wire
from campaigns.bench.wire import split_packets
from tests.transports.mqtt5_mapping import Mapping
from transports.mqtt5.mapping import Mode, Packet
from uprotocol import uri as uris
from uprotocol import uuid as uuids
from uprotocol.attributes import PUBLISH, RESPONSE
from uprotocol.message import validate


def read(packet: bytes) -> fleet_wire.Received:
    ((kind, start, end),), rest = split_packets(packet)
    assert (kind, rest) == (3, len(packet))
    return fleet_wire.read_publish(packet, start, end)


def test_what_a_vehicle_sends_is_what_the_product_reads() -> None:
    asked = uuids.new()
    for type, mine, theirs, extra in (
        ("up-pub.v1", "//vin00007/20/1/800C", "//cloud/FFFFFFFF/FF/FFFF", ()),
        ("up-res.v1", "//vin00007/0/4/1", "//cloud/0/4/0", (300, uuids.to_bytes(asked))),
    ):
        made = fleet_wire.properties(type, uuids.format(uuids.new()), mine, theirs, "CS4", *extra)
        payload = fleet_wire.stamped(222, 3, 4, True)
        received = read(fleet_wire.publish_packet("vin00007/cloud", 5, made, payload))
        assert (received.packet_id, received.payload) == (b"\0\5", payload)
        properties = list(received.users.items())
        packet = Packet(
            received.topic, properties, received.expiry_s or None, received.correlation or None, "2", received.payload
        )
        message = Mapping(Mode.OFF_VEHICLE, "cloud").decode(packet)
        validate(message)
        assert message.attributes.type == (RESPONSE if extra else PUBLISH)
        assert message.attributes.ttl == (300_000 if extra else 0)
        assert not extra or message.attributes.reqid == asked
        assert message.attributes.source == uris.parse(mine)


def test_topics_have_numbers() -> None:
    for number in (0, 29, 30, 222, 149_999):
        assert fleet_wire.topic_number(fleet_wire.topic_uri(number, 30), 30) == number
    assert fleet_wire.segments(fleet_wire.topic_uri(222, 30)) == "vin00007/20/0/1/800C"
    topic, sequence, due_ns, is_owed = fleet_wire.unstamp(fleet_wire.stamped(222, 3, 4, True))
    assert (topic, sequence, due_ns, is_owed) == (222, 3, 4, 1)


@pytest.mark.slow
@pytest.mark.broker
def test_a_small_fleet_comes_through_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet, "STEADY_S", 0.5)
    figures = fleet.measure(3, tmp_path, lambda text: None, topics_each=2, rate=20.0)
    assert figures["subscribed"] == 6
    assert figures["asked_of_vehicles"] >= 6, "beside the subscriptions, whether they knew an earlier store"
    assert (figures["lost"], figures["duplicates"], figures["disordered"], figures["refused"]) == (0, 0, 0, 0)
    assert figures["messages_owed"] > 0
    assert figures["pending_s"] <= figures["subscribed_s"]
