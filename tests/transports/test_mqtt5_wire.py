"""The bytes of PUBLISH and PUBACK, the templates in front of them, and the choice among a broker's copies: all pure."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from paho.mqtt.enums import MQTTProtocolVersion
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties

from tests.transports.mqtt5_mapping import Mapping
from transports.base import SendChecks
from transports.mqtt5 import wire
from transports.mqtt5.mapping import FRESH_TTL, LATE_TTL, Mode, Packet, TtlReading
from transports.mqtt5.session import Copies, topic_matches
from transports.mqtt5.wire import PublishCodec
from uprotocol import attributes as attrs
from uprotocol import uri as uris
from uprotocol import uuid as uuids
from uprotocol.encoded import EncodedMessage, Stamp
from uprotocol.message import UMessageBuilder, UPayload
from uprotocol.status import UStatusError
from uprotocol.v1.uattributes_pb2 import UPriority
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.umessage_pb2 import UMessage

paho_packet = pytest.importorskip("paho.mqtt._packet")  # paho's own decoder, where it has one apart

texts = st.text(
    st.characters(codec="utf-8", exclude_categories=["Cc", "Cn", "Cs"], exclude_characters="\ufeff"), max_size=40
)
packets = st.builds(
    Packet,
    texts,
    st.lists(st.tuples(st.sampled_from(["uP", "1", "2", "3", "10", "11", "x"]), texts), max_size=8),
    st.none() | st.integers(0, 2**32 - 1),
    st.none() | st.binary(max_size=40),
    st.none() | texts,
    st.binary(max_size=300),
)


def whole(packet: Packet, packet_id: int = 7) -> bytes:
    head, tail = wire.publish_frame(packet)
    return head + packet_id.to_bytes(2, "big") + tail


@given(packets, st.integers(1, 65_535))
def test_a_publish_survives(packet: Packet, packet_id: int) -> None:
    data = whole(packet, packet_id)
    [(first, body)], used = wire.split(data)
    assert used == len(data)
    publish = wire.read_publish(first, body)
    assert publish.packet_id == packet_id
    assert wire.read_packet(publish) == packet


@given(packets)
def test_paho_reads_what_we_write(packet: Packet) -> None:
    [(first, body)], _ = wire.split(whole(packet))
    read = paho_packet.decode_publish(first, body, MQTTProtocolVersion.MQTTv5)
    assert (read.qos, read.retain, read.dup, read.mid) == (1, False, False, 7)
    assert (read.topic.decode(), bytes(read.payload)) == (packet.topic, packet.payload)
    assert getattr(read.properties, "UserProperty", []) == packet.user_properties
    assert getattr(read.properties, "MessageExpiryInterval", None) == packet.expiry_s
    assert getattr(read.properties, "CorrelationData", None) == packet.correlation
    assert getattr(read.properties, "ContentType", None) == packet.content_type


def test_we_read_what_paho_writes() -> None:
    properties = Properties(PacketTypes.PUBLISH)
    properties.PayloadFormatIndicator = 1
    properties.ResponseTopic = "elsewhere"
    properties.TopicAlias = 3
    properties.SubscriptionIdentifier = [5, 300, 268_435_455]
    properties.UserProperty = ("uP", "1")
    properties.ContentType = "2"
    packed = properties.pack()
    body = b"\x00\x01t\x00\x09" + packed + b"payload"
    publish = wire.read_publish(wire.PUBLISH_BITS | wire.QOS1, body)
    assert wire.read_packet(publish) == Packet("t", [("uP", "1")], None, None, "2", b"payload")


@given(st.lists(packets, max_size=4), st.data())
def test_split_takes_what_is_whole(several: list[Packet], data: st.DataObject) -> None:
    stream = b"".join(whole(packet) for packet in several)
    cut = data.draw(st.integers(0, len(stream)))
    before, used = wire.split(stream[:cut])
    after, rest = wire.split(stream[used:])
    assert used + rest == len(stream)
    assert [body for _, body in before + after] == [wire.split(whole(packet))[0][0][1] for packet in several]


@given(st.binary(max_size=200))
def test_nonsense_is_refused_and_nothing_else(data: bytes) -> None:
    try:
        found, used = wire.split(data)
        assert used <= len(data)
        for first, body in found:
            wire.read_packet(wire.read_publish(first, body))
    except (ValueError, UStatusError):
        return


@pytest.mark.parametrize("number", [0, 1, 127, 128, 16_383, 16_384, 2_097_151, 2_097_152, 268_435_455])
def test_a_remaining_length(number: int) -> None:
    assert wire.varint(number) == paho_varint(number)


def paho_varint(number: int) -> bytes:
    from paho.mqtt.properties import VariableByteIntegers

    return bytes(VariableByteIntegers.encode(number))


def test_a_remaining_length_of_five_bytes_is_none() -> None:
    with pytest.raises(ValueError, match="4 bytes"):
        wire.split(b"\x30\xff\xff\xff\xff\x01")
    assert wire.split(b"\x30\xff\xff\xff") == ([], 0)


def test_pubacks() -> None:
    assert wire.pubacks([1, 0xABCD]) == b"\x40\x02\x00\x01\x40\x02\xab\xcd"


# Templates.

TOPIC = uris.parse("up://device1/10AB/3/80CD")


def builders() -> list[UMessageBuilder]:
    return [
        UMessageBuilder.publish(TOPIC),
        UMessageBuilder.publish(TOPIC).with_ttl(60_000).with_priority(UPriority.UPRIORITY_CS6),
        UMessageBuilder.publish(TOPIC).with_ttl(60_001),
        UMessageBuilder(attrs.PUBLISH, TOPIC, attrs.streamer_sink("backend")),
        UMessageBuilder.notification(TOPIC, uris.parse("up://device2/1/1/0")),
        UMessageBuilder.request(
            uris.parse("up://device1/1/1/0"), uris.parse("up://device2/1/1/7"), 60_000
        ).with_permission_level(0),
        UMessageBuilder.request(uris.parse("up://device1/1/1/0"), uris.parse("up://device2/1/1/7"), 60_000).with_token(
            "\x26 1 $"
        ),
        UMessageBuilder.response(
            uris.parse("up://device1/1/1/7"), uris.parse("up://device2/1/1/0"), uuids.new()
        ).with_ttl(60_000),
        UMessageBuilder.publish(TOPIC).with_traceparent("00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"),
    ]


AGES_MS = (0, 999, 1_000, 1_001, 0, 30_000, 30_000, -10_000)  # of a message that leaves and arrives


@pytest.mark.parametrize("reading", TtlReading)
@pytest.mark.parametrize("index", range(len(builders())))
@pytest.mark.parametrize("payload", [None, UPayload(b""), UPayload(b"", 2), UPayload(b"x"), UPayload(b"y" * 200, 7)])
def test_templates_answer_as_the_long_way_does(index: int, payload: UPayload | None, reading: TtlReading) -> None:
    now_ms = 0

    def clock() -> int:
        return now_ms

    mapping = Mapping(Mode.IN_VEHICLE, "device1", ttl_reading=reading, now_ms=clock)
    codec = PublishCodec(mapping, SendChecks(now_ms=clock))
    for age_ms in AGES_MS:
        message = builders()[index].build_from_upayload(payload)
        now_ms = uuids.time_ms(message.attributes.id) + age_ms
        packet = mapping.encode(message)
        head, tail = codec.encode(message)
        assert (head, tail) == wire.publish_frame(packet)
        publish = wire.read_publish(head[0], wire.split(head + b"\x00\x07" + tail)[0][0][1])
        assert codec.decode(publish) == (packet.topic, mapping.decode(packet).attributes.SerializeToString())
        data = message.attributes.SerializeToString()
        assert codec.encode(EncodedMessage(data, message.payload, Stamp(message.attributes))) == (head, tail)


def test_templates_refuse_what_the_long_way_does() -> None:
    now = uuids.now_ms()
    codec = PublishCodec(Mapping(Mode.IN_VEHICLE, "device1"), SendChecks(now_ms=lambda: now))
    good = UMessageBuilder.publish(TOPIC).with_ttl(1_000).build_from_upayload(UPayload(b"x", 2))
    codec.encode(good)
    without_payload, no_id, version_4, no_date, late = (UMessage.FromString(good.SerializeToString()) for _ in range(5))
    without_payload.ClearField("payload")
    no_id.attributes.ClearField("id")
    version_4.attributes.id.msb ^= 0x3000
    no_date.attributes.id.msb = 0xFFFF_FFFF_FFFF_7000
    late.attributes.id.msb = (now - 1_001) << 16 | 0x7000
    for bad, code in (
        (without_payload, UCode.INVALID_ARGUMENT),
        (no_id, UCode.INVALID_ARGUMENT),
        (version_4, UCode.INVALID_ARGUMENT),
        (no_date, UCode.INVALID_ARGUMENT),
        (late, UCode.DEADLINE_EXCEEDED),
    ):
        with pytest.raises(UStatusError) as refused:
            codec.encode(bad)
        assert refused.value.code == code
    codec.encode(good)


def publish_of(user_properties: list[tuple[str, str]], **more: object) -> wire.Publish:
    [(first, body)], _ = wire.split(whole(Packet("device1/10AB/0/3/80CD", user_properties, **more)))  # type: ignore[arg-type]
    return wire.read_publish(first, body)


def test_an_id_is_read_where_it_is_and_nowhere_else() -> None:
    """Each time the second packet differs from the first in its id alone, or seems to."""
    one, two = (uuids.format(uuids.new()) for _ in range(2))
    rest = [("uP", "1"), ("2", "up-pub.v1"), ("3", "up://device1/10AB/3/80CD")]
    mapping = Mapping(Mode.IN_VEHICLE, "device1")
    for before in ([], [("1", "short")], [("1", uuids.format(uuids.new()))], [("x", "y")]):
        for more in (
            {},
            {"correlation": wire.ID_KEY + b"\x70\x00\x80" + bytes(7)},
            {"expiry_s": 0x26000131, "content_type": "2"},
        ):
            codec = PublishCodec(mapping, SendChecks())
            for id in (one, two, "no id at all, but as long as one is..", two.upper(), one):
                publish = publish_of([*before, ("1", id), *rest], **more)
                packet = wire.read_packet(publish)
                first = next(value for key, value in [*before, ("1", id)] if key == "1")
                if first.startswith("no") or first == "short":
                    with pytest.raises(UStatusError):
                        mapping.decode(packet)
                    with pytest.raises(UStatusError):
                        codec.decode(publish)
                else:
                    assert codec.decode(publish)[1] == mapping.decode(packet).attributes.SerializeToString()


@pytest.mark.parametrize(
    ("pairs", "expiry_s", "holds_s"),
    [
        ([], None, None),  # without a ttl, and with one that is exact, the template is for all messages
        ([("6", "59999")], 60, None),
        ([(LATE_TTL, "60000")], 60, None),
        ([], 60, 3),  # else for those that have waited as many whole seconds
        ([(FRESH_TTL, "60000")], 60, 3),
        ([(FRESH_TTL, "60000")], None, 3),
    ],
)
def test_a_template_of_what_arrives_holds_while_the_ttl_is_the_same(
    pairs: list[tuple[str, str]], expiry_s: int | None, holds_s: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_ms, read = 0, 0
    mapping = Mapping(Mode.IN_VEHICLE, "device1")
    long_way = mapping.read

    def counted(packet: Packet, at_ms: int) -> tuple[UMessage, bool]:
        nonlocal read
        read += 1
        return long_way(packet, at_ms)

    monkeypatch.setattr(mapping, "read", counted)
    codec = PublishCodec(mapping, SendChecks(now_ms=lambda: now_ms))
    for age_ms, is_known in ((3_000, False), (3_999, True), (3_500, True), (4_000, holds_s is None)):
        id, read = uuids.new(), 0
        now_ms = uuids.time_ms(id) + age_ms
        publish = publish_of(
            [("uP", "1"), ("1", uuids.format(id)), ("2", "up-pub.v1"), ("3", "up://device1/10AB/3/80CD"), *pairs],
            expiry_s=expiry_s,
        )
        found = codec.decode(publish)[1]
        assert read == (0 if is_known else 1)
        assert found == long_way(wire.read_packet(publish), now_ms)[0].attributes.SerializeToString()


# Copies.


@pytest.mark.parametrize(
    ("topic_filter", "topic", "matches"),
    [
        ("a/b", "a/b", True),
        ("+/b", "a/b", True),
        ("+/+", "a/b", True),
        ("+", "a/b", False),
        ("a/b/+", "a/b", False),
        ("a/+", "b/a", False),
    ],
)
def test_topic_filters(topic_filter: str, topic: str, matches: bool) -> None:
    assert topic_matches(topic_filter, topic) is matches


_SEGMENTS = st.sampled_from("ab")


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["add", "remove"]),
            st.lists(st.sampled_from("ab+"), min_size=1, max_size=3).map("/".join),
        ),
        max_size=30,
    ),
    st.lists(st.lists(_SEGMENTS, min_size=1, max_size=3).map("/".join), min_size=1, max_size=4),
)
def test_looking_filters_up_finds_what_comparing_each_would(steps: list[tuple[str, str]], topics: list[str]) -> None:
    copies = Copies()
    subscriptions = copies.subscriptions
    for step, topic_filter in steps:
        known = subscriptions.get(topic_filter)
        if step == "add" and known is None:
            subscriptions.add(topic_filter)
        elif step == "remove" and known is not None:
            subscriptions.remove(known)
        for topic in topics:
            matching = sum(topic_matches(topic_filter, topic) for topic_filter in subscriptions)
            assert subscriptions.matches(topic) == matching
            assert bool(copies[topic]) == (matching > 0)
