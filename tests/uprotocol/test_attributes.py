"""UAttributes: what each type must, may and must not carry."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from uprotocol import attributes as attrs
from uprotocol import uri as uris
from uprotocol import uuid as uuids
from uprotocol.encoded import Stamp
from uprotocol.message import UMessageBuilder
from uprotocol.status import UStatusError
from uprotocol.v1.uattributes_pb2 import UAttributes, UMessageType, UPayloadFormat, UPriority
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.uri_pb2 import UUri
from uprotocol.v1.uuid_pb2 import UUID

spec = pytest.mark.spec
TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
Change = Callable[[UAttributes], object]


def topic() -> UUri:
    return uris.uri("vcu", 0x1_0A10, 1, 0x8001)


def method() -> UUri:
    return uris.uri("ecu", 0xB1, 2, 0x7FFF)


def reply() -> UUri:
    return uris.uri("vcu", 0x1_0A10, 1, 0)


def publish() -> UAttributes:
    return UAttributes(id=uuids.new(), type=attrs.PUBLISH, source=topic())


def notification() -> UAttributes:
    return UAttributes(id=uuids.new(), type=attrs.NOTIFICATION, source=topic(), sink=reply())


def request() -> UAttributes:
    return UAttributes(
        id=uuids.new(), type=attrs.REQUEST, source=reply(), sink=method(), priority=UPriority.UPRIORITY_CS4, ttl=1000
    )


def response() -> UAttributes:
    return UAttributes(
        id=uuids.new(),
        type=attrs.RESPONSE,
        source=method(),
        sink=reply(),
        priority=UPriority.UPRIORITY_CS4,
        ttl=1000,
        reqid=uuids.new(),
    )


ALL = [publish, notification, request, response]


def refuses(attributes: UAttributes) -> None:
    with pytest.raises(UStatusError) as caught:
        attrs.validate(attributes)
    assert caught.value.code == UCode.INVALID_ARGUMENT
    assert caught.value.message


def with_resource(uri: UUri, resource: int) -> UUri:
    return uris.uri(uri.authority_name, uri.ue_id, uri.ue_version_major, resource)


@spec("req~uattributes-data-model-impl~1")
@spec("dsn~up-attributes-publish-type~1")
@spec("dsn~up-attributes-notification-type~1")
@spec("dsn~up-attributes-request-type~1")
@spec("dsn~up-attributes-response-type~1")
@pytest.mark.parametrize("make", ALL)
def test_each_type_is_valid_with_what_it_must_have_and_with_all_it_may(make: Callable[[], UAttributes]) -> None:
    attributes = make()
    attrs.validate(attributes)
    attributes.traceparent = TRACEPARENT
    attributes.payload_format = UPayloadFormat.UPAYLOAD_FORMAT_RAW
    attributes.priority = UPriority.UPRIORITY_CS6
    attributes.ttl = 0xFFFF_FFFF
    if make is request:
        attributes.permission_level = 3
        attributes.token = "token"
    if make is response:
        attributes.commstatus = UCode.OK
    attrs.validate(attributes)
    assert UAttributes.FromString(attributes.SerializeToString()) == attributes


@pytest.mark.parametrize("type", [0, 5, 77])
def test_an_unknown_type_is_refused(type: int) -> None:
    attributes = publish()
    attributes.type = UMessageType.ValueType(type)
    refuses(attributes)


@spec("dsn~up-attributes-publish-type~1")
@spec("dsn~up-attributes-notification-type~1")
@spec("dsn~up-attributes-request-type~1")
@spec("dsn~up-attributes-response-type~1")
@pytest.mark.parametrize("make", ALL)
def test_the_type_decides_what_must_be_there(make: Callable[[], UAttributes]) -> None:
    for type in (attrs.PUBLISH, attrs.NOTIFICATION, attrs.REQUEST, attrs.RESPONSE):
        attributes = make()
        if type != attributes.type:
            attributes.type = type
            refuses(attributes)


@spec("dsn~up-attributes-id~1")
@spec("dsn~uuid-spec~1")
@pytest.mark.parametrize("make", ALL)
@pytest.mark.parametrize("id", [None, UUID(), UUID(msb=0x4000, lsb=1 << 63), UUID(msb=0x7000, lsb=0)])
def test_an_id_is_a_uuid_7(make: Callable[[], UAttributes], id: UUID | None) -> None:
    attributes = make()
    attributes.ClearField("id")
    if id is not None:
        attributes.id.CopyFrom(id)
    refuses(attributes)


LAST_MS = 253_402_300_799_999  # of the year 9999


@spec("dsn~up-attributes-id~1")
@pytest.mark.parametrize("make", ALL)
def test_the_time_in_an_id_is_a_date(make: Callable[[], UAttributes]) -> None:
    attributes = make()
    attributes.id.msb = LAST_MS << 16 | 0x7FFF
    attrs.validate(attributes)
    for ms in (LAST_MS + 1, (1 << 48) - 1):
        attributes.id.msb = ms << 16 | 0x7000
        refuses(attributes)


def test_a_response_names_a_request_of_some_date() -> None:
    attributes = response()
    attributes.reqid.msb = (LAST_MS + 1) << 16 | 0x7000
    refuses(attributes)


OF_OTHER_TYPES = {  # what the specification's tables leave to one type
    publish: ["permission_level", "token", "reqid", "commstatus"],
    notification: ["permission_level", "token", "reqid", "commstatus"],
    request: ["reqid", "commstatus"],
    response: ["permission_level", "token"],
}
VALUES = {"permission_level": [0, 3], "token": ["", "token"], "commstatus": [UCode.OK, UCode.NOT_FOUND]}


@spec("req~uattributes-data-model-impl~1")
@pytest.mark.parametrize(("make", "name"), [(make, name) for make, names in OF_OTHER_TYPES.items() for name in names])
def test_an_attribute_of_another_type_is_refused_whatever_its_value(make: Callable[[], UAttributes], name: str) -> None:
    if name == "reqid":
        attributes = make()
        attributes.reqid.CopyFrom(uuids.new())
        refuses(attributes)
    for value in VALUES.get(name, ()):
        attributes = make()
        setattr(attributes, name, value)
        refuses(attributes)


@pytest.mark.parametrize("make", ALL)
def test_enumerations_are_not_negative(make: Callable[[], UAttributes]) -> None:
    for name in ("priority", "payload_format", *(["commstatus"] if make is response else [])):
        attributes = make()
        setattr(attributes, name, -1)
        refuses(attributes)


TOPIC_ONLY = [0, 1, 0x7FFF, 0xFFFF]
METHOD_ONLY = [0, 0x8000, 0xFFFE, 0xFFFF]
ZERO_ONLY = [1, 0x7FFF, 0x8000, 0xFFFF]


@spec("dsn~up-attributes-publish-source~1")
@spec("dsn~up-attributes-notification-source~1")
@spec("dsn~up-attributes-notification-sink~1")
@spec("dsn~up-attributes-request-source~1")
@spec("dsn~up-attributes-request-sink~1")
@spec("dsn~up-attributes-response-source~1")
@spec("dsn~up-attributes-response-sink~1")
@pytest.mark.parametrize(
    ("make", "part", "wrong"),
    [
        (publish, "source", TOPIC_ONLY),
        (notification, "source", TOPIC_ONLY),
        (notification, "sink", ZERO_ONLY),
        (request, "source", ZERO_ONLY),
        (request, "sink", METHOD_ONLY),
        (response, "source", METHOD_ONLY),
        (response, "sink", ZERO_ONLY),
    ],
)
def test_source_and_sink_have_the_resource_of_their_type(
    make: Callable[[], UAttributes], part: str, wrong: list[int]
) -> None:
    for resource in wrong:
        attributes = make()
        address: UUri = getattr(attributes, part)
        address.resource_id = resource
        refuses(attributes)
    attributes = make()
    attributes.ClearField(part)  # type: ignore[arg-type]
    refuses(attributes)


@pytest.mark.parametrize("make", ALL)
@pytest.mark.parametrize(
    "change",
    [
        lambda uri: setattr(uri, "authority_name", "*"),
        lambda uri: setattr(uri, "authority_name", "UPPER"),
        lambda uri: setattr(uri, "ue_id", 0xFFFF),
        lambda uri: setattr(uri, "ue_id", 0xFFFF_0001),
        lambda uri: setattr(uri, "ue_version_major", 0xFF),
        lambda uri: setattr(uri, "ue_version_major", 0x100),
        lambda uri: setattr(uri, "resource_id", 0x1_8000),
    ],
)
def test_an_address_names_one_resource(make: Callable[[], UAttributes], change: Callable[[UUri], None]) -> None:
    for part in ("source", "sink"):
        attributes = make()
        if attributes.HasField(part):  # type: ignore[arg-type]
            change(getattr(attributes, part))
            refuses(attributes)


@spec("dsn~up-attributes-publish-sink~2")
def test_a_publish_has_the_sink_of_a_streamer_or_none() -> None:
    attributes = publish()
    attributes.sink.CopyFrom(attrs.streamer_sink("cloud"))
    attrs.validate(attributes)
    assert attrs.is_streamer_sink(attributes.sink)
    for sink in (
        "//*/FFFFFFFF/FF/FFFF",
        "/FFFFFFFF/FF/FFFF",
        "//cloud/1/FF/FFFF",
        "//cloud/FFFFFFFF/1/FFFF",
        "//cloud/FFFFFFFF/FF/0",
    ):
        attributes.sink.CopyFrom(uris.parse(sink))
        assert not attrs.is_streamer_sink(attributes.sink)
        refuses(attributes)


@spec("dsn~up-attributes-request-priority~1")
@spec("dsn~up-attributes-response-priority~1")
@pytest.mark.parametrize("make", [request, response])
def test_calls_have_cs4_or_higher(make: Callable[[], UAttributes]) -> None:
    for priority in UPriority.values():
        attributes = make()
        attributes.priority = priority
        if priority >= UPriority.UPRIORITY_CS4:
            attrs.validate(attributes)
        else:
            refuses(attributes)


@spec("dsn~up-attributes-request-ttl~1")
@spec("dsn~up-attributes-response-ttl~1")
@pytest.mark.parametrize("make", [request, response])
def test_calls_have_a_ttl(make: Callable[[], UAttributes]) -> None:
    attributes = make()
    attributes.ttl = 0
    refuses(attributes)
    attributes.ClearField("ttl")
    refuses(attributes)


@spec("dsn~up-attributes-response-correlation-id~1")
@pytest.mark.parametrize("reqid", [None, UUID(), UUID(msb=0x4000, lsb=1 << 63)])
def test_a_response_names_its_request(reqid: UUID | None) -> None:
    attributes = response()
    attributes.ClearField("reqid")
    if reqid is not None:
        attributes.reqid.CopyFrom(reqid)
    refuses(attributes)


@spec("dsn~up-attributes-response-correlation-id~1")
@spec("dsn~up-attributes-response-priority~1")
@spec("dsn~up-attributes-response-ttl~1")
@given(
    st.integers(1, 0xFFFF_FFFF),
    st.sampled_from([value for value in UPriority.values() if value >= UPriority.UPRIORITY_CS4]),
)
def test_the_response_to_a_request_copies_what_it_must(ttl: int, priority: UPriority.ValueType) -> None:
    asked = request()
    asked.ttl, asked.priority = ttl, priority
    answer = UMessageBuilder.response_for_request(asked).build().attributes
    assert (answer.reqid, answer.priority, answer.ttl) == (asked.id, priority, ttl)
    assert (answer.source, answer.sink) == (asked.sink, asked.source)
    assert answer.id != asked.id


@spec("dsn~up-attributes-permission-level~1")
@spec("dsn~up-attributes-request-token~1")
@pytest.mark.parametrize("level", [None, 0, 1, 0xFFFF_FFFF])
@pytest.mark.parametrize("token", [None, "", "eyJ.any.thing"])
def test_a_request_may_carry_level_and_token(level: int | None, token: str | None) -> None:
    builder = UMessageBuilder.request(reply(), method(), 1000)
    if level is not None:
        builder.with_permission_level(level)
    if token is not None:
        builder.with_token(token)
    attributes = builder.build().attributes
    assert (attributes.permission_level if attributes.HasField("permission_level") else None) == level
    assert (attributes.token if attributes.HasField("token") else None) == token
    attrs.validate(attributes)


@spec("dsn~up-attributes-permission-level~1")
@pytest.mark.parametrize("level", [-1, 0x1_0000_0000])
def test_a_level_that_does_not_fit_is_refused(level: int) -> None:
    with pytest.raises(UStatusError):
        UMessageBuilder.request(reply(), method(), 1000).with_permission_level(level)


@spec("dsn~up-attributes-traceparent~1")
@pytest.mark.parametrize("make", ALL)
def test_a_traceparent_is_of_the_w3c(make: Callable[[], UAttributes]) -> None:
    good = ["", TRACEPARENT, TRACEPARENT[:-2] + "00"]
    bad = [
        TRACEPARENT.upper(),
        "01" + TRACEPARENT[2:],
        TRACEPARENT + "-",
        TRACEPARENT + "\n",
        TRACEPARENT[:-1],
        "00-" + "0" * 32 + "-b7ad6b7169203331-01",
        "00-0af7651916cd43dd8448eb211c80319c-" + "0" * 16 + "-01",
        "x",
    ]
    for text in good:
        attributes = make()
        attributes.traceparent = text
        attrs.validate(attributes)
    for text in bad:
        attributes = make()
        attributes.traceparent = text
        refuses(attributes)


@spec("dsn~up-attributes-payload-format~1")
def test_no_payload_no_format() -> None:
    attributes = publish()
    attrs.validate(attributes, has_payload=False)
    attributes.payload_format = UPayloadFormat.UPAYLOAD_FORMAT_TEXT
    attrs.validate(attributes, has_payload=True)
    with pytest.raises(UStatusError):
        attrs.validate(attributes, has_payload=False)


@spec("dsn~up-attributes-priority~1")
@spec("local~upriority-explicit")
def test_an_unset_priority_is_cs1() -> None:
    attributes = publish()
    assert Stamp(attributes).priority == UPriority.UPRIORITY_CS1
    attributes.priority = UPriority.UPRIORITY_CS0
    assert Stamp(attributes).priority == UPriority.UPRIORITY_CS0


@spec("dsn~up-attributes-ttl-timeout~1")
@spec("dsn~up-attributes-ttl~1")
@spec("local~uuid-time")
@given(st.integers(0, 2**48 - 1), st.integers(0, 2**32 - 1), st.integers(0, 2**49))
def test_expired_is_strictly_after_id_time_plus_ttl(created: int, ttl: int, now: int) -> None:
    attributes = UAttributes(id=UUID(msb=created << 16 | 0x7000, lsb=1 << 63), ttl=ttl)
    assert attrs.is_expired(attributes, now) == (ttl > 0 and now > created + ttl)
    assert not attrs.is_expired(attributes, created + ttl)
    assert attrs.is_expired(attributes, created + ttl + 1) == (ttl > 0)


@spec("dsn~up-attributes-ttl~1")
def test_without_ttl_nothing_expires() -> None:
    attributes = UAttributes(id=UUID(msb=0x7000, lsb=1 << 63))
    assert not attrs.is_expired(attributes, 2**60)


@given(st.binary(max_size=120))
def test_any_bytes_are_valid_refused_or_no_attributes_at_all(data: bytes) -> None:
    refused = UCode.INVALID_ARGUMENT
    try:
        attrs.validate(UAttributes.FromString(data))
    except DecodeError:
        return
    except UStatusError as error:
        refused = error.code
    assert refused == UCode.INVALID_ARGUMENT


def test_validating_twice_says_the_same() -> None:
    """Valid addresses are cached, invalid ones are not; the result is the same."""
    good, bad = publish(), notification()
    bad.ClearField("sink")
    for _ in range(3):
        attrs.validate(good)
        refuses(bad)
