"""The MQTT 5 mapping: the specification's own examples (the corrected ones), every property, and decode(encode(m)) ==
m."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.transports.mqtt5_mapping import Mapping
from transports.mqtt5.mapping import FRESH_TTL, LATE_TTL, Mode, Packet, TtlReading
from uprotocol import attributes as attrs
from uprotocol import uri as uris
from uprotocol import uuid as uuids
from uprotocol.status import UStatusError
from uprotocol.v1.uattributes_pb2 import UAttributes, UMessageType, UPayloadFormat, UPriority
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.umessage_pb2 import UMessage
from uprotocol.v1.uri_pb2 import UUri
from uprotocol.v1.uuid_pb2 import UUID

E2E = Mapping(Mode.IN_VEHICLE, "device1")
D2D = Mapping(Mode.OFF_VEHICLE, "device1")
ID = uuids.parse("0192a7b0-0000-7000-8000-0123456789ab")

spec = pytest.mark.spec


def message(
    type: int = attrs.PUBLISH, source: str = "up://device1/3BA/3/9876", sink: str | None = None, **more: Any
) -> UMessage:
    payload = more.pop("payload", None)
    made = UMessage(attributes=UAttributes(id=ID, type=UMessageType.ValueType(type), source=uris.parse(source), **more))
    if sink is not None:
        made.attributes.sink.CopyFrom(uris.parse(sink))
    if payload is not None:
        made.payload = payload
    return made


def properties(made: UMessage) -> dict[str, str]:
    found = E2E.encode(made).user_properties
    assert len(dict(found)) == len(found)
    return dict(found)


def packet(*changes: tuple[str, str | None], topic: str = "device1/3BA/0/3/9876", **more: Any) -> Packet:
    """A valid publish, with some user properties set otherwise or left out."""
    found = dict(E2E.encode(message()).user_properties) | dict(changes)
    return Packet(topic, [(key, value) for key, value in found.items() if value is not None], **more)


@spec("local~l1-normalise")
@spec("dsn~up-transport-mqtt5-e2e-topic-names~1")
@pytest.mark.parametrize(
    ("type", "source", "sink", "topic"),
    [
        (attrs.PUBLISH, "up://device1/3BA/3/9876", None, "device1/3BA/0/3/9876"),
        (
            attrs.NOTIFICATION,
            "up://device1/3BA/3/8001",
            "up://device1/200AB/1/0",
            "device1/3BA/0/3/8001/device1/AB/2/1/0",
        ),
        (attrs.REQUEST, "up://device1/403BA/3/0", "up:/AB/1/2", "device1/3BA/4/3/0/device1/AB/0/1/2"),
        (attrs.RESPONSE, "up:/3BA/3/67", "up://device1/100AB/1/0", "device1/3BA/0/3/67/device1/AB/1/1/0"),
        (attrs.PUBLISH, "up://device1/3BA/3/9876", "up://vehicle1/FFFFFFFF/FF/FFFF", "device1/3BA/0/3/9876"),
    ],
)
def test_in_vehicle_topic_names(type: int, source: str, sink: str | None, topic: str) -> None:
    assert E2E.encode(message(type, source, sink)).topic == topic


@spec("dsn~up-transport-mqtt5-e2e-topic-names~1")
@pytest.mark.parametrize(
    ("source", "sink", "expected"),
    [
        ("up://*/FFFF03BA/3/9876", None, "+/3BA/+/3/9876"),
        ("up://device1/3BA/4/FFFF", "up://device1/AB/1/0", "device1/3BA/0/4/+/device1/AB/0/1/0"),
        ("up://*/FFFFFFFF/FF/0", "up:/AB/1/12CD", "+/+/+/+/0/device1/AB/0/1/12CD"),
        ("up://*/FFFFFFFF/FF/FFFF", "up:/AB/1/0", "+/+/+/+/+/device1/AB/0/1/0"),
    ],
)
def test_in_vehicle_filters(source: str, sink: str | None, expected: str) -> None:
    assert E2E.topic_filter(uris.parse(source), uris.parse(sink) if sink else None) == expected


@spec("dsn~up-transport-mqtt5-d2d-topic-names~1")
def test_off_vehicle_topic_names() -> None:
    sent = message(attrs.NOTIFICATION, "up://vehicle1/3BA/3/8001", "up://backend/AB/1/0")
    assert D2D.encode(sent).topic == "vehicle1/backend"
    published = message(source="up://vehicle1/3BA/3/8001", sink="up://backend/FFFFFFFF/FF/FFFF")
    assert D2D.encode(published).topic == "vehicle1/backend"
    assert D2D.decode(D2D.encode(published)) == published


@spec("dsn~up-transport-mqtt5-d2d-topic-names~1")
@pytest.mark.parametrize(
    ("sink", "expected"), [("up://backend/FFFFFFFF/FF/FFFF", "+/backend"), ("up:/FFFFFFFF/FF/FFFF", "+/device1")]
)
def test_off_vehicle_filters(sink: str, expected: str) -> None:
    assert D2D.topic_filter(uris.parse("up://*/FFFFFFFF/FF/FFFF"), uris.parse(sink)) == expected


@pytest.mark.parametrize("mapping", [E2E, D2D], ids=["in-vehicle", "off-vehicle"])
def test_an_address_of_a_later_ip_version_is_carried_unless_it_has_a_wildcard_of_mqtt(mapping: Mapping) -> None:
    plain = message(attrs.NOTIFICATION, "up://[v1.fe80::a*$b]/3BA/3/8001", "up://[v1.x]/AB/1/0")
    carried = mapping.encode(plain)
    assert {"[v1.fe80::a*$b]", "[v1.x]"} <= set(carried.topic.split("/"))
    assert mapping.decode(carried) == plain
    for source, sink in (
        ("up://[v1.fe80::a+en1]/3BA/3/8001", "up://backend/AB/1/0"),
        ("up://a/3BA/3/8001", "up://[v1.a+en1]/AB/1/0"),
    ):
        with pytest.raises(UStatusError, match=r"a\+en1\] has a \+") as refused:
            mapping.encode(message(attrs.NOTIFICATION, source, sink))
        assert refused.value.code == UCode.INVALID_ARGUMENT
    with pytest.raises(UStatusError, match="MQTT"):
        mapping.topic_filter(uris.parse("up://*/FFFFFFFF/FF/FFFF"), uris.parse("up://[v1.a+en1]/FFFFFFFF/FF/FFFF"))


def test_off_vehicle_every_message_needs_a_sink() -> None:
    with pytest.raises(UStatusError, match="sink") as refused:
        D2D.encode(message())
    assert refused.value.code == UCode.INVALID_ARGUMENT
    with pytest.raises(UStatusError, match="FFFF") as refused:
        D2D.topic_filter(uris.parse("up://vehicle1/3BA/3/8001"), None)
    assert refused.value.code == UCode.INVALID_ARGUMENT


@spec("dsn~up-transport-mqtt5-attributes-mapping~1")
def test_a_bare_publish_carries_what_it_has_and_nothing_else() -> None:
    expected = {
        "uP": "1",
        "1": "0192a7b0-0000-7000-8000-0123456789ab",
        "2": "up-pub.v1",
        "3": "up://device1/3BA/3/9876",
    }
    assert E2E.encode(message()) == Packet("device1/3BA/0/3/9876", list(expected.items()))


@spec("dsn~up-transport-mqtt5-attributes-mapping~1")
@spec("dsn~up-transport-mqtt5-payload-mapping~1")
def test_everything_that_a_response_can_carry() -> None:
    request_id = UUID(msb=0x0192A7B000017000, lsb=0x8000000000000001)
    sent = message(
        attrs.RESPONSE,
        "up://device1/3BA/3/67",
        "up://device2/100AB/1/0",
        priority=UPriority.UPRIORITY_CS4,
        ttl=1001,
        permission_level=0,
        commstatus=UCode.OK,
        reqid=request_id,
        token="t",
        traceparent="00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
        payload_format=UPayloadFormat.UPAYLOAD_FORMAT_JSON,
        payload=b"\x00\xff",
    )
    encoded = E2E.encode(sent)
    assert dict(encoded.user_properties) == {
        "uP": "1",
        "1": "0192a7b0-0000-7000-8000-0123456789ab",
        "2": "up-res.v1",
        "3": "up://device1/3BA/3/67",
        "4": "up://device2/100AB/1/0",
        "5": "CS4",
        "6": "1001",
        "7": "0",
        "8": "0",
        "10": "t",
        "11": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
    }
    assert encoded[2:] == (2, bytes.fromhex("0192a7b000017000 8000000000000001"), "3", b"\x00\xff")
    assert E2E.decode(encoded) == sent


@spec("dsn~up-transport-mqtt5-attributes-mapping~1")
@pytest.mark.parametrize(
    ("ttl", "expiry_s", "exact"),
    [
        (None, None, None),
        (0, None, None),
        (1, 1, "1"),
        (999, 1, "999"),
        (1000, 1, None),
        (1001, 2, "1001"),
        (5999, 6, "5999"),
        (0xFFFF_FFFF, 4_294_968, "4294967295"),
    ],
)
def test_ttl(ttl: int | None, expiry_s: int | None, exact: str | None) -> None:
    sent = message(ttl=ttl)
    encoded = E2E.encode(sent)
    assert (encoded.expiry_s, dict(encoded.user_properties).get("6")) == (expiry_s, exact)
    assert E2E.decode(encoded).attributes.ttl == (ttl or 0)


def test_a_long_expiry_is_capped() -> None:
    assert E2E.decode(packet(expiry_s=0xFFFF_FFFF)).attributes.ttl == 0xFFFF_FFFF


def at(age_ms: int, ttl_reading: TtlReading = TtlReading.RESTORED) -> Mapping:
    """A mapping whose clock is so far behind the id's time."""
    return Mapping(Mode.IN_VEHICLE, "device1", ttl_reading=ttl_reading, now_ms=lambda: uuids.time_ms(ID) + age_ms)


@pytest.mark.parametrize(
    ("age_ms", "carried", "restored_ms", "specified_ms"),
    [
        (4_200, {}, 0, 0),  # no interval: no ttl
        (4_200, {"expiry_s": 1}, 5_000, 1_000),
        (4_999, {"expiry_s": 0}, 5_000, 1_000),  # 0 would never expire
        (0, {"expiry_s": 0}, 1_000, 1_000),
        (-10_000, {"expiry_s": 8}, 8_000, 8_000),  # our clock is behind
        (10_000, {"expiry_s": 8}, 18_000, 8_000),  # or ahead
        (4_200, {"expiry_s": 1, "6": "4999"}, 4_999, 4_999),
        (4_200, {"6": "4999"}, 4_999, 4_999),
        (4_200, {"expiry_s": 0, "6": "4999"}, 4_999, 4_999),
        (4_200, {"expiry_s": 1, LATE_TTL: "9000"}, 9_000, 1_000),
        (4_200, {LATE_TTL: "9000"}, 9_000, 0),
        (4_200, {"expiry_s": 1, LATE_TTL: "9000", "6": "4999"}, 4_999, 4_999),
        (4_200, {"expiry_s": 3, FRESH_TTL: "8000"}, 8_000, 3_000),  # counted off one more than had passed
        (4_200, {"expiry_s": 5, FRESH_TTL: "8000"}, 9_000, 5_000),
        (14_200, {"expiry_s": 5, FRESH_TTL: "8000"}, 19_000, 5_000),  # our clock is ahead
        (8_200, {FRESH_TTL: "8000"}, 9_000, 0),  # counted down to 0, and left out
        (4_200, {"expiry_s": 0xFFFF_FFFF}, 0xFFFF_FFFF, 0xFFFF_FFFF),
        (0xFFFF_FFFF, {"expiry_s": 1}, 0xFFFF_FFFF, 1_000),
    ],
)
def test_a_ttl_that_arrives(age_ms: int, carried: dict[str, Any], restored_ms: int, specified_ms: int) -> None:
    properties = {key: value for key, value in carried.items() if key != "expiry_s"}
    arrived = packet(*properties.items(), expiry_s=carried.get("expiry_s"))
    assert at(age_ms).decode(arrived).attributes.ttl == restored_ms
    assert at(age_ms, TtlReading.SPECIFICATION).decode(arrived).attributes.ttl == specified_ms


@pytest.mark.parametrize(
    ("age_ms", "ttl_ms", "ours"),
    [
        (-10_000, 8_000, {FRESH_TTL: "8000"}),
        (0, 8_000, {FRESH_TTL: "8000"}),
        (1_000, 8_000, {FRESH_TTL: "8000"}),
        (1_001, 8_000, {LATE_TTL: "8000"}),
        (1_001, 8_001, {}),  # property 6 has it
        (1_001, 0, {}),
    ],
)
def test_a_ttl_that_leaves(age_ms: int, ttl_ms: int, ours: dict[str, str]) -> None:
    sent = message(ttl=ttl_ms)
    found = dict(at(age_ms).encode(sent).user_properties)
    assert {key: value for key, value in found.items() if key.startswith("up-streamer")} == ours
    specified = at(age_ms, TtlReading.SPECIFICATION).encode(sent)
    assert [pair for pair in at(age_ms).encode(sent).user_properties if pair[0] not in ours] == list(
        specified.user_properties
    )


@pytest.mark.parametrize(
    "changed",
    [
        packet(("uP", None)),
        packet(("2", "pub.v1")),
        packet(("3", "//device1/3ba/3/9876")),
        packet(("3", "up:/3BA/3/9876")),
        packet(("5", "CS6"), ("5", "CS6")),
        Packet("device1/3BA/0/3/9876", [*packet().user_properties, ("3", "up://device9/1/1/8000"), ("else", "x")]),
    ],
)
def test_what_is_read_leniently(changed: Packet) -> None:
    decoded = E2E.decode(changed).attributes
    assert decoded.type == attrs.PUBLISH
    assert decoded.source.ue_id == 0x3BA


@pytest.mark.parametrize(
    "changed",
    [
        Packet("device1/3BA/0/3/9876", []),
        *(packet((key, None)) for key in ("1", "2", "3")),
        packet(("uP", "2")),
        packet(("1", "0192a7b0-0000-4000-8000-0123456789ab")),
        packet(("2", "pub.v2")),
        packet(("3", "")),
        packet(("3", "http://device1/3BA/3/9876")),
        packet(("4", "up://x")),
        packet(("5", "CS7")),
        packet(("5", "4")),
        packet(("6", "-1"), expiry_s=1),
        packet(("6", "4294967296")),
        packet((LATE_TTL, "0"), expiry_s=1),
        packet((LATE_TTL, "soon"), expiry_s=1),
        packet((FRESH_TTL, "0"), expiry_s=1),
        packet((FRESH_TTL, "4294967296")),
        packet(("7", "1_0")),
        packet(("7", "٣")),
        packet(("8", "")),
        packet(correlation=b"short"),
        packet(correlation=bytes(16)),
        packet(content_type="application/json"),
    ],
)
def test_what_can_not_be_read(changed: Packet) -> None:
    with pytest.raises(UStatusError) as refused:
        E2E.decode(changed)
    assert refused.value.code == UCode.INVALID_ARGUMENT


@spec("req~utransport-send-prevent-address-spoofing~1")
@pytest.mark.parametrize(
    "topic", ["device2/3BA/0/3/9876", "device1/3BA/0/3/9877", "device1/3BA/0/3/9876/a/1/0/1/0", "x", ""]
)
def test_addresses_that_the_topic_does_not_have(topic: str) -> None:
    with pytest.raises(UStatusError) as refused:
        E2E.decode(packet(topic=topic))
    assert refused.value.code == UCode.PERMISSION_DENIED


@pytest.mark.parametrize("token", ["a\0b", "\x1b[0m", "x" * 65_536, "\ufffe"])
def test_a_token_that_would_end_the_connection(token: str) -> None:
    sent = message(attrs.REQUEST, "up://device1/3BA/3/0", "up://device1/AB/1/2", token=token)
    with pytest.raises(UStatusError, match="token") as refused:
        E2E.encode(sent)
    assert refused.value.code == UCode.INVALID_ARGUMENT


authorities = st.from_regex(r"[a-z0-9][a-z0-9.\-_~]{0,20}", fullmatch=True)
ids = st.builds(
    lambda a, b: UUID(msb=a & ~0xF000 | 0x7000, lsb=b >> 2 | 1 << 63),
    st.integers(0, uuids.MSB_MAX),
    st.integers(0, 2**64 - 1),
)


def addresses(resources: st.SearchStrategy[int]) -> st.SearchStrategy[UUri]:
    entities = st.builds(lambda kind, instance: instance << 16 | kind, *[st.integers(0, 0xFFFE)] * 2)
    return st.builds(uris.uri, authorities, entities, st.integers(0, 0xFE), resources)


TOPIC, METHOD, REPLY = addresses(st.integers(0x8000, 0xFFFE)), addresses(st.integers(1, 0x7FFF)), addresses(st.just(0))


@st.composite
def messages(draw: st.DrawFn) -> UMessage:
    type = draw(st.sampled_from([attrs.PUBLISH, attrs.NOTIFICATION, attrs.REQUEST, attrs.RESPONSE]))
    source, sink = {
        attrs.PUBLISH: (TOPIC, st.none() | authorities.map(attrs.streamer_sink)),
        attrs.NOTIFICATION: (TOPIC, REPLY),
        attrs.REQUEST: (REPLY, METHOD),
        attrs.RESPONSE: (METHOD, REPLY),
    }[type]
    rpc = type in (attrs.REQUEST, attrs.RESPONSE)
    made = UMessage(attributes=UAttributes(id=draw(ids), type=type, source=draw(source), sink=draw(sink)))
    made.attributes.priority = draw(st.integers(5 if rpc else 0, 7))
    ttl = draw(st.integers(1, 2**32 - 1) if rpc else st.none() | st.integers(0, 2**32 - 1))
    if ttl:  # unset and 0 become the same
        made.attributes.ttl = ttl
    if draw(st.booleans()):
        if type == attrs.REQUEST:
            made.attributes.permission_level = draw(st.integers(0, 2**32 - 1))
            made.attributes.token = draw(
                st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Cn"]), min_size=1)
            )
        if type == attrs.RESPONSE:
            made.attributes.commstatus = draw(st.integers(0, 16))
        made.attributes.traceparent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    if type == attrs.RESPONSE:
        made.attributes.reqid.CopyFrom(draw(ids))
    made.attributes.payload_format = draw(st.integers(0, 8))
    payload = draw(st.binary(max_size=64))
    if payload or made.attributes.payload_format:  # absent and empty look alike otherwise
        made.payload = payload
    return made


@spec("req~utransport-send-preserve-data~1")
@given(messages())
def test_everything_survives(sent: UMessage) -> None:
    attrs.validate(sent.attributes)
    modes = [E2E, D2D] if sent.attributes.HasField("sink") else [E2E]
    for mapping in modes:
        assert mapping.decode(mapping.encode(sent)) == sent


def test_a_priority_without_a_name_is_refused() -> None:
    with pytest.raises(UStatusError) as caught:
        E2E.encode(message(priority=8))  # type: ignore[arg-type]  # of a later specification
    assert caught.value.code == UCode.INVALID_ARGUMENT


@given(
    st.text(max_size=30),
    st.lists(st.tuples(st.sampled_from(["uP", *"12345678", "10", "11", LATE_TTL, FRESH_TTL]), st.text(max_size=40))),
)
def test_nonsense_is_refused_and_nothing_else(topic: str, user_properties: list[tuple[str, str]]) -> None:
    try:
        E2E.decode(Packet(topic, user_properties))
    except UStatusError:
        return


@given(TOPIC | METHOD | REPLY, TOPIC | METHOD | REPLY)
def test_a_filter_without_wildcards_is_the_topic(source: UUri, sink: UUri) -> None:
    assert E2E.topic_filter(source, sink) == E2E.topic(attrs.NOTIFICATION, source, sink)
    assert E2E.topic_filter(source, None) == E2E.topic(attrs.PUBLISH, source, None)
