"""The bytes that the load generators make by hand are those of the mappings, or the bench would measure something
else."""

import pytest

from bench import wire
from bench.measure import LEGS
from bench.networks import Address, Tally
from bench.soak import slope
from bench.subject import write_config
from streamer import config as configs
from transports.dds import mapping as dds_mapping
from transports.mqtt5 import mapping as mqtt_mapping
from transports.mqtt5 import wire as mqtt_wire
from transports.zenoh import mapping as zenoh_mapping
from uprotocol import message as messages
from uprotocol.v1.umessage_pb2 import UMessage

PAYLOADS = list(wire.payloads(run=7, messages=3, rate=0))


def check(decoded: list[UMessage]) -> None:
    """Valid, on the topic, with the payload as it was, and each with an id of its own."""
    for message, payload in zip(decoded, PAYLOADS, strict=True):
        messages.validate(message)
        assert message.attributes.source == wire.TOPIC
        assert message.payload == payload
    assert len({(m.attributes.id.msb, m.attributes.id.lsb) for m in decoded}) == len(PAYLOADS)


def test_payloads_have_their_size_and_number() -> None:
    assert {len(payload) for payload in PAYLOADS} == {wire.PAYLOAD_BYTES}
    assert [wire.unstamp(payload)[:2] for payload in PAYLOADS] == [(7, 0), (7, 1), (7, 2)]


def test_zenoh_bytes_are_the_mappings() -> None:
    attributes = wire.Attributes()
    decoded = [zenoh_mapping.decode(payload, attributes.attachment(number)) for number, payload in enumerate(PAYLOADS)]
    check(decoded)
    assert {zenoh_mapping.message_key(message, "elsewhere") for message in decoded} == {wire.ZENOH_KEY}


def test_dds_bytes_are_the_mappings() -> None:
    dds_type = pytest.importorskip("bench.dds_type", reason="cyclonedds is not installed", exc_type=ImportError)
    attributes = wire.Attributes()
    samples = [dds_type.UMessage(attributes.plain(number), payload) for number, payload in enumerate(PAYLOADS)]
    decoded = [dds_mapping.decode(sample.serialize()) for sample in samples]
    check(decoded)
    assert samples[0].serialize() == dds_mapping.encode(decoded[0])
    assert not any(message.attributes.HasField("sink") for message in decoded)
    sources = [message.attributes.source for message in decoded]
    assert {dds_mapping.writer_partition(source, None, "elsewhere") for source in sources} == {wire.DDS_PARTITION}
    assert [dds_type.UMessage.deserialize(sample.serialize()).parts for sample in samples] == [
        sample.parts for sample in samples
    ]


def test_mqtt_bytes_are_the_mappings() -> None:
    packets = wire.PublishPackets()
    data = b"".join(packets.packet(number, payload) for number, payload in enumerate(PAYLOADS))
    split, length = mqtt_wire.split(data)
    assert length == len(data)
    publishes = [mqtt_wire.read_publish(first, body) for first, body in split]
    assert [publish.packet_id for publish in publishes] == [1, 2, 3]
    mapping = mqtt_mapping.Mapping(mqtt_mapping.Mode.IN_VEHICLE, "elsewhere")
    check(
        [
            mapping.decode(mqtt_wire.read_packet(publish)[0]._replace(topic=publish.topic.decode()))
            for publish in publishes
        ]
    )


def test_packets_are_split_wherever_the_stream_is_cut() -> None:
    packet = wire.PublishPackets().packet(0, PAYLOADS[0])
    data = packet + wire.puback_packet(b"\x00\x01") + packet
    for cut in range(len(data)):
        first, rest = wire.split_packets(data[:cut])
        second, end = wire.split_packets(data[rest:])
        assert [kind for kind, _, _ in first + second] == [wire.PUBLISH_PACKET, wire.PUBACK, wire.PUBLISH_PACKET]
        assert end == len(data) - rest


def test_the_brokers_receive_maximum_is_read() -> None:
    assert wire.receive_maximum(b"\x00\x00\x00") == wire.RECEIVE_MAXIMUM_DEFAULT
    assert wire.receive_maximum(b"\x00\x00\x0a\x12\x00\x01\x21\x22\x00\x0a\x21\x00\x14") == 20
    with pytest.raises(ConnectionError, match="0x87"):
        wire.receive_maximum(b"\x00\x87\x00")


def test_a_tally_counts_its_run_alone_and_sees_disorder() -> None:
    tally = Tally()
    tally.arm(7, 3, latency=True)
    for payload in (*wire.payloads(6, 2, 0), PAYLOADS[0], PAYLOADS[2], PAYLOADS[1]):
        tally.take(payload)
    tally.wait(0.01)
    result = tally.result()
    assert (result["received"], result["disordered"]) == (3, 2)
    assert result["p50_ms"] >= 0


def test_a_tally_gives_up_when_nothing_comes() -> None:
    tally = Tally()
    tally.arm(7, 4, latency=False)
    for payload in PAYLOADS:
        tally.take(payload)
    tally.wait(0.01)
    assert tally.result()["received"] == 3


def test_the_slope_of_a_line() -> None:
    assert slope([(100_000, 50.0), (200_000, 51.0), (300_000, 52.0)]) == pytest.approx(10.0)
    assert slope([(100_000, 50.0)]) == 0.0


@pytest.mark.parametrize("name", LEGS)
def test_the_streamers_configuration_is_accepted(name: str, tmp_path) -> None:

    leg = LEGS[name]
    path = write_config(tmp_path, Address(leg.source, 7), Address(leg.destination, 8), volatile=leg.volatile)
    config = configs.load(path)
    assert [endpoint.usubscription for endpoint in config.endpoint] == ["none", "none"]
    assert bool(config.history.volatile) == leg.volatile
