"""UMessage: payloads and builders."""

from __future__ import annotations

import pytest
from google.protobuf.any_pb2 import Any
from google.protobuf.timestamp_pb2 import Timestamp
from hypothesis import given
from hypothesis import strategies as st

from uprotocol import attributes as attrs
from uprotocol import message as messages
from uprotocol import uri as uris
from uprotocol import uuid as uuids
from uprotocol.attributes import streamer_sink
from uprotocol.message import UMessageBuilder, UPayload, error_response
from uprotocol.status import UStatusError
from uprotocol.v1.uattributes_pb2 import UPayloadFormat, UPriority
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.umessage_pb2 import UMessage
from uprotocol.v1.ustatus_pb2 import UStatus

spec = pytest.mark.spec
RAW = UPayloadFormat.UPAYLOAD_FORMAT_RAW
TOPIC, METHOD, REPLY = uris.uri("a", 1, 1, 0x8000), uris.uri("b", 2, 1, 1), uris.uri("a", 1, 1, 0)

payloads = st.one_of(st.none(), st.builds(UPayload, st.binary(max_size=64), st.sampled_from(UPayloadFormat.values())))
any_priority = st.sampled_from(UPriority.values())
rpc_priority = st.sampled_from([value for value in UPriority.values() if value >= UPriority.UPRIORITY_CS4])
ttls = st.integers(0, 0xFFFF_FFFF)


@spec("req~umessage-data-model-impl~1")
@spec("req~umessage-data-model-proto~1")
@given(payloads, any_priority, ttls, st.sampled_from([0x8000, 0x9ABC, 0xFFFE]), st.booleans())
def test_publishes_and_notifications_are_valid(
    payload: UPayload | None, priority: UPriority.ValueType, ttl: int, resource: int, notify: bool
) -> None:
    topic = uris.uri("a", 0x2_0001, 1, resource)
    builder = UMessageBuilder.notification(topic, REPLY) if notify else UMessageBuilder.publish(topic)
    message = builder.with_priority(priority).with_ttl(ttl).build_from_upayload(payload)
    messages.validate(message)
    assert UMessage.FromString(message.SerializeToString()) == message
    assert message.HasField("payload") == (payload is not None)
    assert message.attributes.HasField("sink") == notify, "a publisher never sets the streamer's sink"


@given(payloads, rpc_priority, st.integers(1, 0xFFFF_FFFF), st.sampled_from([1, 0x7FFF]))
def test_requests_and_their_responses_are_valid(
    payload: UPayload | None, priority: UPriority.ValueType, ttl: int, resource: int
) -> None:
    method = uris.uri("b", 2, 1, resource)
    request = UMessageBuilder.request(REPLY, method, ttl).with_priority(priority).build_from_upayload(payload)
    messages.validate(request)
    response = UMessageBuilder.response_for_request(request.attributes).build_from_upayload(payload)
    messages.validate(response)
    assert response.attributes.reqid == request.attributes.id


def test_a_builder_makes_a_new_message_each_time_and_leaves_its_arguments_alone() -> None:
    builder = UMessageBuilder.publish(TOPIC)
    one, two = builder.build(), builder.build()
    assert one.attributes.id != two.attributes.id
    assert one.attributes.source is not TOPIC
    id = uuids.new()
    assert builder.with_id(id).build().attributes.id == id == builder.build().attributes.id


@pytest.mark.parametrize(
    "build",
    [
        lambda: UMessageBuilder.publish(METHOD).build(),
        lambda: UMessageBuilder.notification(TOPIC, TOPIC).build(),
        lambda: UMessageBuilder.request(METHOD, METHOD, 1).build(),
        lambda: UMessageBuilder.request(REPLY, METHOD, 0).build(),
        lambda: UMessageBuilder.request(REPLY, METHOD, -1).build(),
        lambda: UMessageBuilder.request(REPLY, METHOD, 2**32).build(),
        lambda: UMessageBuilder.request(REPLY, METHOD, 1).with_priority(UPriority.UPRIORITY_CS3).build(),
        lambda: UMessageBuilder.response(METHOD, REPLY, uuids.new()).build(),
        lambda: UMessageBuilder.publish(TOPIC).with_traceparent("x").build(),
        lambda: UMessageBuilder.publish(uris.pattern("a", resource=0x8000)).build(),
    ],
)
def test_what_would_be_invalid_is_not_built(build: object) -> None:
    assert callable(build)
    with pytest.raises(UStatusError) as caught:
        build()
    assert caught.value.code == UCode.INVALID_ARGUMENT


def test_the_payload_decides_the_format() -> None:
    timestamp = Timestamp(seconds=5)
    message = UMessageBuilder.publish(TOPIC).pack(timestamp)
    assert message.attributes.payload_format == UPayloadFormat.UPAYLOAD_FORMAT_PROTOBUF
    assert UPayload.of(message).unpack(Timestamp) == timestamp
    wrapped = UPayload.pack_to_any(timestamp)
    assert Any.FromString(wrapped.data).Is(Timestamp.DESCRIPTOR)
    assert wrapped.unpack(Timestamp) == timestamp


@spec("local~error-empty-response")
def test_no_payload_is_an_empty_message() -> None:
    assert UPayload().unpack(Timestamp) == Timestamp()
    assert UPayload(b"", messages.PROTOBUF_WRAPPED_IN_ANY).unpack(Timestamp) == Timestamp()


@pytest.mark.parametrize(
    "payload",
    [
        UPayload(b"\xff", messages.PROTOBUF),
        UPayload(b"\xff", messages.PROTOBUF_WRAPPED_IN_ANY),
        UPayload.pack_to_any(UStatus()),
        UPayload(b"{}", UPayloadFormat.UPAYLOAD_FORMAT_JSON),
        UPayload(b"", UPayloadFormat.ValueType(99)),
    ],
)
def test_a_payload_of_another_kind_is_refused(payload: UPayload) -> None:
    with pytest.raises(UStatusError) as caught:
        payload.unpack(Timestamp)
    assert caught.value.code == UCode.INVALID_ARGUMENT


@spec("dsn~up-attributes-payload-format~1")
def test_a_format_without_payload_is_invalid() -> None:
    message = UMessageBuilder.publish(TOPIC).build_from_upayload(UPayload(b"", RAW))
    messages.validate(message)
    message.ClearField("payload")
    with pytest.raises(UStatusError):
        messages.validate(message)


@spec("dsn~service-error-model-error-response~1")
@given(st.sampled_from([code for code in UCode.values() if code != UCode.OK]), st.text(max_size=20))
def test_an_error_response_says_why(code: UCode.ValueType, text: str) -> None:
    request = UMessageBuilder.request(REPLY, METHOD, 500).with_priority(UPriority.UPRIORITY_CS5).build()
    response = error_response(request.attributes, UStatus(code=code, message=text))
    assert response.attributes.commstatus == code
    assert UPayload.of(response).unpack(UStatus) == UStatus(code=code, message=text)
    assert (response.attributes.priority, response.attributes.ttl) == (UPriority.UPRIORITY_CS5, 500)


@spec("dsn~up-attributes-ttl-timeout~1")
def test_a_message_expires() -> None:
    message = UMessageBuilder.publish(TOPIC).with_ttl(100).build()
    created = uuids.time_ms(message.attributes.id)
    assert not attrs.is_expired(message.attributes, uuids.now_ms())
    assert not attrs.is_expired(message.attributes, created + 100)
    assert attrs.is_expired(message.attributes, created + 101)


@spec("dsn~up-attributes-publish-sink~2")
def test_the_streamers_sink_is_a_named_authority() -> None:
    assert uris.format(streamer_sink("cloud")) == "up://cloud/FFFFFFFF/FF/FFFF"
