"""The bytes that the load generators make by hand are those of the mappings, or the bench would measure something
else."""

import itertools
from pathlib import Path

import pytest

from campaigns.bench import bare, wire
from campaigns.bench.measure import LEGS
from campaigns.bench.networks import Address, Tally
from campaigns.bench.soak import slope
from campaigns.bench.subject import Scene, authority, write_config
from streamer import config as configs
from tests.transports import mqtt5_mapping, zenoh_attachments
from transports.dds import mapping as dds_mapping
from transports.mqtt5 import wire as mqtt_wire
from transports.zenoh import mapping as zenoh_mapping
from uprotocol import message as messages
from uprotocol.v1.umessage_pb2 import UMessage
from usubscription_client.sources import read_static


def payloads(run: int, messages: int, size: int = wire.PAYLOAD_BYTES) -> list[bytes]:
    return list(itertools.chain.from_iterable(wire.batches(run, messages, 0, size)))


PAYLOADS = payloads(7, 3)


def check(decoded: list[UMessage]) -> None:
    """Valid, on the topic, with the payload as it was, and each with an id of its own."""
    for message, payload in zip(decoded, PAYLOADS, strict=True):
        messages.validate(message)
        assert message.attributes.source == wire.TOPIC
        assert message.payload == payload
    assert len({(m.attributes.id.msb, m.attributes.id.lsb) for m in decoded}) == len(PAYLOADS)


class Clock:
    """Time that passes only where somebody sleeps, and by `late_ns` more each time."""

    def __init__(self, late_ns: int = 0) -> None:
        self.ns, self._late_ns = 1_000_000_000_000, late_ns

    def now_ns(self) -> int:
        return self.ns

    def sleep(self, seconds: float) -> None:
        self.ns += round(seconds * 1e9) + self._late_ns


def test_payloads_have_their_size_and_number() -> None:
    assert {len(payload) for payload in PAYLOADS} == {wire.PAYLOAD_BYTES}
    assert [wire.unstamp(payload)[:2] for payload in PAYLOADS] == [(7, 0), (7, 1), (7, 2)]
    for size in (wire.PAYLOAD_BYTES_MIN, 1 << 20):
        assert [len(payload) for payload in payloads(1, 2, size)] == [size, size]


def test_batches_are_bounded_in_messages_and_bytes() -> None:
    assert [len(batch) for batch in wire.batches(1, 150, 0)] == [64, 64, 22]
    assert [len(batch) for batch in wire.batches(1, 3, 0, wire.BATCH_BYTES)] == [1, 1, 1]


def test_a_stamp_is_when_a_message_was_due_evenly_spaced() -> None:
    clock = Clock()
    made = list(wire.batches(1, 5, 1_000, now_ns=clock.now_ns, sleep=clock.sleep))
    stamps = [wire.unstamp(payload)[2] for batch in made for payload in batch]
    assert [later - earlier for earlier, later in itertools.pairwise(stamps)] == [1_000_000] * 4
    assert [len(batch) for batch in made] == [1] * 5
    assert clock.ns == stamps[-1]


def test_a_late_publisher_hides_no_waiting() -> None:
    """It wakes up 10 ms late each time: what was due meanwhile leaves at once, and its stamps say when it was due."""
    clock = Clock(late_ns=10_000_000)
    began = clock.ns
    lateness, sizes = [], []
    for batch in wire.batches(1, 40, 1_000, now_ns=clock.now_ns, sleep=clock.sleep):
        sizes.append(len(batch))
        lateness += [clock.ns - wire.unstamp(payload)[2] for payload in batch]
    assert sum(sizes) == 40
    assert max(sizes) == 11
    assert max(lateness) == 10_000_000
    assert clock.ns - began < 60_000_000  # it catches up, so the rate is the one that was asked for


def test_topics_are_distinct_and_named_as_the_mappings_name_them() -> None:
    count = 2 * wire.TOPICS_PER_ENTITY + 1
    attributes = wire.Attributes(count)
    decoded = [zenoh_attachments.decode(b"", attributes.attachment(number)) for number in range(count)]
    assert len({message.attributes.source.SerializeToString() for message in decoded}) == count
    for number in (0, 1, wire.TOPICS_PER_ENTITY, count - 1):
        assert decoded[number].attributes.source == wire.topic(number)
        assert zenoh_mapping.message_key(decoded[number], "elsewhere") == wire.zenoh_key(number)
    assert zenoh_attachments.decode(b"", attributes.attachment(count)).attributes.source == wire.topic(0)


def test_zenoh_bytes_are_the_mappings() -> None:
    attributes = wire.Attributes()
    decoded = [
        zenoh_attachments.decode(payload, attributes.attachment(number)) for number, payload in enumerate(PAYLOADS)
    ]
    check(decoded)
    assert {zenoh_mapping.message_key(message, "elsewhere") for message in decoded} == {wire.ZENOH_KEY}


def test_dds_bytes_are_the_mappings() -> None:
    dds_type = pytest.importorskip(
        "campaigns.bench.dds_type", reason="cyclonedds is not installed", exc_type=ImportError
    )
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
    mapping = mqtt5_mapping.Mapping(mqtt5_mapping.Mode.IN_VEHICLE, "elsewhere")
    check(
        [mapping.decode(mqtt_wire.read_packet(publish)._replace(topic=publish.topic.decode())) for publish in publishes]
    )


def test_a_publish_is_taken_apart_and_passed_on_as_it_is() -> None:
    packet = wire.PublishPackets(3).packet(2, PAYLOADS[2])
    [(kind, start, end)], _ = wire.split_packets(packet)
    packet_id, payload = wire.publish_places(packet, start)
    assert (kind, packet[packet_id : packet_id + 2], packet[payload:end]) == (3, b"\x00\x03", PAYLOADS[2])
    assert packet[start + 2 : packet_id].decode() == wire.segments(2)
    assert wire.publish_packet(packet[packet_id + 2 : end], 3, packet[start:packet_id]) == packet


def test_the_bare_relay_gives_mqtt_what_zenoh_has_and_back() -> None:
    """The id is all of the attributes that differs between the messages of a topic."""
    attributes = wire.Attributes()
    topic, rest = bare.FromAttributes().rest(attributes.attachment(5), PAYLOADS[0])
    packet = wire.publish_packet(rest, 9, topic)
    ((first, body),), _ = mqtt_wire.split(packet)
    publish = mqtt_wire.read_publish(first, body)
    mapping = mqtt5_mapping.Mapping(mqtt5_mapping.Mode.IN_VEHICLE, "elsewhere")
    decoded = mapping.decode(mqtt_wire.read_packet(publish)._replace(topic=publish.topic.decode()))
    assert decoded == zenoh_attachments.decode(PAYLOADS[0], attributes.attachment(5))
    [(_, start, end)], _ = wire.split_packets(packet)
    id = decoded.attributes.id
    assert wire.message_id(packet, start, end) == id.msb.to_bytes(8, "big") + id.lsb.to_bytes(8, "big")


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
    for payload in (*payloads(6, 2), PAYLOADS[0], PAYLOADS[2], PAYLOADS[1]):
        tally.take(payload)
    tally.wait(0.01, 0)
    result = tally.result()
    assert (result["received"], result["disordered"], result["doubled"]) == (3, 1, 0)
    assert result["p50_ms"] >= 0


def test_a_tally_gives_up_when_nothing_comes() -> None:
    tally = Tally()
    tally.arm(7, 4, latency=False)
    for payload in PAYLOADS:
        tally.take(payload)
    tally.wait(0.01)
    assert tally.result()["received"] == 3


def test_what_comes_twice_counts_also_after_the_last() -> None:
    tally = Tally()
    tally.arm(7, 3, latency=False)
    for payload in (*PAYLOADS, PAYLOADS[1]):
        tally.take(payload)
    tally.wait(0.01, 60)  # would take a minute, if nothing had come twice
    assert (tally.result()["received"], tally.result()["doubled"]) == (3, 1)


def test_order_holds_per_topic_and_disorder_across_topics_is_reported() -> None:
    tally = Tally(topics=2)
    tally.arm(7, 6, latency=False)
    made = payloads(7, 6)
    for number in (1, 0, 3, 2, 4, 5):
        tally.take(made[number])
    assert (tally.result()["disordered"], tally.result()["scrambled"]) == (0, 5)
    tally.arm(7, 6, latency=False)
    for number in (0, 1, 4, 2, 3, 5):
        tally.take(made[number])
    assert tally.result()["disordered"] == 1


def test_the_slope_of_a_line() -> None:
    assert slope([(100_000, 50.0), (200_000, 51.0), (300_000, 52.0)]) == pytest.approx(10.0)
    assert slope([(100_000, 50.0)]) == 0.0


@pytest.mark.parametrize("name", LEGS)
def test_the_streamers_configuration_is_accepted(name: str, tmp_path: Path) -> None:
    leg = LEGS[name]
    path = write_config(tmp_path, Address(leg.source, 7), Address(leg.destination, 8), scene=leg.scene)
    config = configs.load(path)
    assert [endpoint.usubscription for endpoint in config.endpoint] == ["none", "none"]
    assert bool(config.history.volatile) == leg.scene.volatile


def test_a_configuration_has_what_a_scene_asks_for(tmp_path: Path) -> None:
    scene = Scene(
        topics=5_000,
        exact=False,
        sections={"history": {"retention_mib": 9}, "streamer": {"admin": "127.0.0.1:0"}},
        out_settings={"in_flight_max": 77},
    )
    outs = [Address("mqtt", 8), Address("mqtt", 9), Address("mqtt", 10)]
    config = configs.load(write_config(tmp_path, Address("zenoh", 7), *outs, scene=scene))
    assert [endpoint.authorities for endpoint in config.endpoint[1:]] == [[authority(number)] for number in range(3)]
    assert {endpoint.settings["in_flight_max"] for endpoint in config.endpoint[1:]} == {77}
    assert (config.history.retention_mib, config.streamer.admin) == (9, "127.0.0.1:0")
    assert config.limits.memory_mib > 512  # else one authority may not have so many topics
    (entry,) = read_static(tmp_path / "interest.json")[:1]
    assert entry.topic == wire.EVERY_TOPIC


def test_an_embedded_service_has_no_file(tmp_path: Path) -> None:
    config = configs.load(write_config(tmp_path, Address("zenoh", 7), Address("zenoh", 8), scene=Scene(embedded=True)))
    assert [endpoint.usubscription for endpoint in config.endpoint] == ["embedded", "none"]
    assert config.usubscription.static_file is None
