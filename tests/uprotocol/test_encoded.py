"""EncodedMessage reads like the UMessage that it is."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from uprotocol import uri as uris
from uprotocol import uuid as uuids
from uprotocol.encoded import EncodedMessage, Stamp, Stamps, decoded, shared_suffix, suffix
from uprotocol.message import UMessageBuilder, UPayload
from uprotocol.transport import EncodedListener
from uprotocol.v1.uattributes_pb2 import UAttributes, UPayloadFormat, UPriority
from uprotocol.v1.umessage_pb2 import UMessage

TOPIC = uris.parse("//vehicle1/8001/1/8001")


def encode(message: UMessage) -> EncodedMessage:
    return EncodedMessage(message.attributes.SerializeToString(), message.payload, Stamp(message.attributes))


@given(
    st.one_of(st.none(), st.binary(max_size=40_000)),
    st.integers(0, 2**32 - 1),
    st.sampled_from(UPriority.values()),
    st.sampled_from([UPayloadFormat.UPAYLOAD_FORMAT_UNSPECIFIED, UPayloadFormat.UPAYLOAD_FORMAT_RAW]),
)
def test_it_reads_like_the_message(
    payload: bytes | None, ttl: int, priority: UPriority.ValueType, format: UPayloadFormat.ValueType
) -> None:
    builder = UMessageBuilder.publish(TOPIC).with_ttl(ttl).with_priority(priority)
    message = builder.build_from_upayload(UPayload(payload, format) if payload is not None else None)
    encoded = encode(message)
    same = UMessage()
    same.CopyFrom(message)
    if not message.payload and not message.attributes.payload_format:
        same.ClearField("payload")  # an empty payload without a format is none
    assert decoded(encoded) == same
    assert UMessage.FromString(encoded.SerializeToString()) == same
    assert encoded.HasField("payload") == same.HasField("payload")
    assert encoded.payload == message.payload
    assert encoded.attributes == message.attributes
    assert encoded.id_bytes == uuids.to_bytes(message.attributes.id)
    assert encoded.created_ms == uuids.time_ms(message.attributes.id)
    assert encoded.stamp.priority == (priority or UPriority.UPRIORITY_CS1)
    assert encoded.is_expired(encoded.created_ms + ttl + 1) == (ttl > 0)
    assert not encoded.is_expired(encoded.created_ms + ttl)


STAMPS = Stamps()


@given(
    st.one_of(st.none(), st.binary(max_size=300)),
    st.sampled_from([UPayloadFormat.UPAYLOAD_FORMAT_UNSPECIFIED, UPayloadFormat.UPAYLOAD_FORMAT_RAW]),
    st.booleans(),
)
def test_what_was_written_is_read_back(payload: bytes | None, format: UPayloadFormat.ValueType, alone: bool) -> None:
    builder = UMessageBuilder.publish(TOPIC)
    if alone:
        builder.with_traceparent("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01")
    message = builder.build_from_upayload(UPayload(payload, format) if payload is not None else None)
    for _ in range(2):  # the second time with a cached stamp
        read = STAMPS.read(message.SerializeToString())
        assert decoded(read) == message
        assert read.HasField("payload") == message.HasField("payload")
        assert type(read) is EncodedMessage
        assert UMessage.FromString(read.SerializeToString()) == message
        assert read.stamp.is_shared == (not alone)


@given(st.binary(max_size=60))
def test_anything_is_read_as_protobuf_reads_it(data: bytes) -> None:
    try:
        expected = UMessage.FromString(data)
    except DecodeError:
        with pytest.raises(DecodeError):
            STAMPS.read(data)
    else:
        assert decoded(STAMPS.read(data)) == expected


@given(st.binary(max_size=100))
def test_a_suffix_is_cut_from_an_id_of_version_7_only(data: bytes) -> None:
    assert suffix(data) in (None, data[20:])


def test_messages_of_a_stream_share_the_suffix() -> None:
    one, two = (UMessageBuilder.publish(TOPIC).build().attributes.SerializeToString() for _ in range(2))
    assert suffix(one) == suffix(two) == one[20:]
    assert one != two


def test_an_unknown_priority_is_the_highest() -> None:
    assert Stamp(UAttributes(priority=99)).priority == UPriority.UPRIORITY_CS6  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "second",
    [
        b"\x0a\x12\x09\x01\x70" + bytes(6) + b"\x11" + bytes(7) + b"\x80",
        b"\x0a\x09\x11" + bytes(7) + b"\x80",
        b"\x0a\x00",
    ],
)
def test_a_second_id_or_half_of_one_is_read_as_protobuf_reads_it(second: bytes) -> None:
    """Protobuf merges it into the first; a reader that ignores it would use another id."""
    first, other = (UMessageBuilder.publish(TOPIC).build().attributes.SerializeToString() + second for _ in range(2))
    stamps = Stamps()
    for encoded in (first, other):
        attributes = UAttributes.FromString(encoded)
        assert shared_suffix(encoded, attributes) is None
        data = UMessage(attributes=attributes).SerializeToString()
        by_hand = b"\x0a" + bytes([len(encoded)]) + encoded
        assert decoded(stamps.read(by_hand)) == UMessage.FromString(by_hand) == UMessage.FromString(data)


def test_a_stamp_keeps_no_message_alive() -> None:
    """A nested protobuf message keeps the whole message alive, for example the first payload of each topic."""
    message = UMessageBuilder.publish(TOPIC).with_ttl(7).build_from_upayload(UPayload(bytes(1_000)))
    data = message.SerializeToString()
    read = Stamps().read(data)
    assert isinstance(read, EncodedMessage)
    names = (
        "address",
        "is_shared",
        "payload_format",
        "priority",
        "suffix",
        "ttl",
        "type",
    )  # compiled, it has no __slots__
    for stamp in (read.stamp, Stamp(message.attributes)):
        assert all(isinstance(getattr(stamp, name), (bytes, int)) for name in names)
        assert stamp.attributes.source == TOPIC
        assert stamp.attributes.ttl == 7
        assert not stamp.attributes.HasField("id")


def test_messages_of_a_stream_get_one_stamp_at_the_border() -> None:
    one, two = (EncodedMessage.of(UMessageBuilder.publish(TOPIC).build()) for _ in range(2))
    assert one.stamp is two.stamp
    traced = UMessageBuilder.publish(TOPIC).with_traceparent("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01")
    alone = EncodedMessage.of(traced.build())
    assert not alone.stamp.is_shared
    assert alone.stamp.address == one.stamp.address


@given(st.binary(max_size=60))
def test_anything_is_encoded_with_its_id_in_front_and_nothing_is_lost(data: bytes) -> None:
    try:
        message = UMessage.FromString(data)
    except DecodeError:
        return
    encoded = EncodedMessage.of(message)
    id = message.attributes.id
    assert encoded.id_bytes == id.msb.to_bytes(8, "big") + id.lsb.to_bytes(8, "big")
    assert encoded.payload == message.payload
    assert UAttributes.FromString(encoded.encoded).source == message.attributes.source
    assert encoded.decoded().attributes.id == id


def test_a_listener_of_encoded_messages_is_one_of_messages_too() -> None:
    class Heard(EncodedListener):
        def __init__(self) -> None:
            self.messages: list[EncodedMessage] = []

        def on_receive_encoded(self, messages: Sequence[EncodedMessage]) -> None:
            self.messages += messages

    heard, message = Heard(), UMessageBuilder.publish(TOPIC).build()
    assert heard.on_receive(message) is None
    assert heard.on_receive_batch([message, message]) is None
    assert [one.decoded() for one in heard.messages] == [message] * 3
