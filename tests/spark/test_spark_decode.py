"""Decoding: every known payload gives its value, other payloads give nulls, and no payload raises."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa
import pytest
from google.protobuf import wrappers_pb2
from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp
from hypothesis import given
from hypothesis import strategies as st

from spark_ingest.decode import SCHEMA, TIME_MS_MAX, Decoded, Decoder, RecordColumns
from streamer.commands.demo import drive
from uprotocol import uri as uris
from uprotocol import uuid as uuids
from uprotocol.core.ustreamer.v1.ustreamer_pb2 import Epoch, LogicalTime, RecordBatch, Sample
from uprotocol.message import UMessageBuilder, UPayload
from uprotocol.status import UStatusError
from uprotocol.v1.uattributes_pb2 import UAttributes, UPayloadFormat, UPriority
from uprotocol.v1.umessage_pb2 import UMessage
from uprotocol.v1.uri_pb2 import UUri
from uprotocol.v1.uuid_pb2 import UUID

TOPIC = uris.uri("vehicle1", 0x8001, 1, 0x8002)
TEXT, JSON = UPayloadFormat.UPAYLOAD_FORMAT_TEXT, UPayloadFormat.UPAYLOAD_FORMAT_JSON
PROTOBUF, RAW = UPayloadFormat.UPAYLOAD_FORMAT_PROTOBUF, UPayloadFormat.UPAYLOAD_FORMAT_RAW
NO_VALUE = (None, None, None)
LOG = "0123456789abcdef" * 2
TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def published(payload: UPayload | None) -> UMessage:
    return UMessageBuilder.publish(TOPIC).build_from_upayload(payload)


def row(message: UMessage | bytes, time_ms: int = 7) -> dict[str, Any]:
    data = message if isinstance(message, bytes) else message.SerializeToString()
    records = RecordColumns([5, 6], [time_ms, time_ms], [data, data], prev_seq=[0, 0])
    (first, second) = Decoder().decode(records, LOG).batch.to_pylist()
    assert first | {"seq": 6} == second  # the second one goes through the cache
    return dict(first)


def decoded(messages: Sequence[bytes], *, decoder: Decoder | None = None, time_ms: int = 1, **columns: Any) -> Decoded:
    records = RecordColumns(range(len(messages)), [time_ms] * len(messages), messages, **columns)
    return (decoder or Decoder()).decode(records, LOG)


def values(row: dict[str, Any]) -> tuple[Any, Any, Any]:
    return row["value_double"], row["value_string"], row["value_bool"]


def test_a_sample_fills_every_column() -> None:
    message = published(
        UPayload.pack(
            Sample(path="Vehicle.Speed", time=Timestamp(seconds=1_700_000_000, nanos=123_456_789), double_value=42.5)
        )
    )
    made = row(message)
    assert made.pop("ts").timestamp() == 1_700_000_000.123456
    assert made == {
        "authority": "vehicle1",
        "topic": "up://vehicle1/8001/1/8002",
        "path": "Vehicle.Speed",
        "value_double": 42.5,
        "value_string": None,
        "value_bool": None,
        "seq": 5,
        "message_id": uuids.format(message.attributes.id),
        "payload": message.payload,
        "payload_format": "PROTOBUF",
        "epoch": None,
        "epoch_incomplete": None,
        "incarnation": LOG,
        "append_time": datetime(1970, 1, 1, 0, 0, 0, 7_000, UTC),
        "ts_source": "sample",
        "value_long": None,
        "priority": None,
        "ttl_ms": None,
        "traceparent": None,
        "permission_level": None,
        "sink": None,
        "prev_seq": 0,
        "origin": None,
        "malformed": None,
    }


@pytest.mark.parametrize(
    ("sample", "expected"),
    [
        (Sample(path="p", string_value="D"), (None, "D", None)),
        (Sample(path="p", bool_value=False), (None, None, False)),
        (Sample(path="p", double_value=0.0), (0.0, None, None)),
        (Sample(path="p"), NO_VALUE),
        (Sample(double_value=3.0), NO_VALUE),
    ],
)
def test_samples_plain_and_in_any(sample: Sample, expected: tuple[Any, Any, Any]) -> None:
    for payload, name in (
        (UPayload.pack(sample), "PROTOBUF"),
        (UPayload.pack_to_any(sample), "PROTOBUF_WRAPPED_IN_ANY"),
    ):
        made = row(published(payload))
        assert values(made) == expected
        assert made["payload"] == payload.data
        assert made["payload_format"] == name
        assert made["path"] == ("p" if expected != NO_VALUE else None)


@pytest.mark.parametrize(
    ("wrapper", "expected"),
    [
        (wrappers_pb2.DoubleValue(value=1.5), (1.5, None, None)),
        (wrappers_pb2.UInt64Value(value=2**63), (2.0**63, None, None)),
        (wrappers_pb2.Int32Value(value=-4), (-4.0, None, None)),
        (wrappers_pb2.BoolValue(value=True), (None, None, True)),
        (wrappers_pb2.StringValue(value="é"), (None, "é", None)),
        (wrappers_pb2.BytesValue(value=b"x"), NO_VALUE),
        (Timestamp(seconds=1), NO_VALUE),
    ],
)
def test_wrappers_in_any(wrapper: Message, expected: tuple[Any, Any, Any]) -> None:
    assert values(row(published(UPayload.pack_to_any(wrapper)))) == expected


@pytest.mark.parametrize(
    ("format", "data", "expected", "malformed"),
    [
        (TEXT, b"12.5", (None, "12.5", None), {}),
        (TEXT, b"", (None, "", None), {}),
        (TEXT, b"\xff\xfe", NO_VALUE, {"payload": 1}),
        (JSON, b" 12 ", (12.0, None, None), {}),
        (JSON, b"1e400", (float("inf"), None, None), {}),
        (JSON, b'"on"', (None, "on", None), {}),
        (JSON, b"true", (None, None, True), {}),
        (JSON, b"null", NO_VALUE, {}),
        (JSON, b'{"a":1}', NO_VALUE, {}),
        (JSON, b"[" * 100_000, NO_VALUE, {}),
        (JSON, b"NaN", NO_VALUE, {"payload": 1}),
        (JSON, b'"\\ud800"', NO_VALUE, {"payload": 1}),
        (JSON, b"{", NO_VALUE, {}),
        (JSON, b"nope", NO_VALUE, {"payload": 1}),
        (JSON, b"9" * 5_000, (float("inf"), None, None), {}),
        (PROTOBUF, b"\x0a\xff", NO_VALUE, {"payload": 1}),
        (PROTOBUF, b"", NO_VALUE, {}),
        (UPayloadFormat.UPAYLOAD_FORMAT_PROTOBUF_WRAPPED_IN_ANY, b"\x0a\xff", NO_VALUE, {"payload": 1}),
        (RAW, b"\x00\x01", NO_VALUE, {}),
        (UPayloadFormat.UPAYLOAD_FORMAT_SOMEIP, b"\x00", NO_VALUE, {}),
    ],
)
def test_other_payloads_are_kept_and_counted(
    format: Any, data: bytes, expected: tuple[Any, Any, Any], malformed: dict[str, int]
) -> None:
    message = published(UPayload(data, format))
    made = row(message)
    assert values(made) == expected
    assert made["payload"] == data
    assert made["topic"] == uris.format(TOPIC)
    assert decoded([message.SerializeToString()]).malformed == malformed
    assert made["malformed"] == next(iter(malformed), None)


def test_a_message_without_payload_is_a_row_without_one() -> None:
    made = row(published(None))
    assert made["payload"] is None
    assert made["payload_format"] == "UNSPECIFIED"
    assert made["ts"].timestamp() * 1000 == pytest.approx(uuids.now_ms(), abs=60_000)


def test_invalid_bytes_are_a_row_of_nulls_with_the_bytes() -> None:
    made = row(b"\x0a\xffgarbage", time_ms=1_000)
    assert made.pop("ts").timestamp() == 1.0
    assert made.pop("payload") == b"\x0a\xffgarbage"
    assert made.pop("seq") == 5
    assert made.pop("prev_seq") == 0
    assert made.pop("incarnation") == LOG
    assert made.pop("append_time").timestamp() == 1.0
    assert made.pop("ts_source") == "append"
    assert made.pop("malformed") == "message"
    assert set(made.values()) == {None}
    assert decoded([b"\xff"]).malformed == {"message": 1}


@pytest.mark.parametrize(
    "time", [Timestamp(seconds=2**62), Timestamp(seconds=1, nanos=-1), Timestamp(seconds=-(2**50))]
)
def test_an_invalid_time_falls_back_to_the_id(time: Timestamp) -> None:
    message = published(UPayload.pack(Sample(path="p", time=time, double_value=1)))
    made = row(message)
    assert made["ts"].timestamp() * 1000 == pytest.approx(uuids.time_ms(message.attributes.id), abs=1)
    assert decoded([message.SerializeToString()]).malformed == {"time": 1}
    assert (made["malformed"], made["value_double"]) == ("time", 1)


def test_an_id_beyond_the_calendar_falls_back_to_the_append_time() -> None:
    message = published(UPayload(b"x", RAW))
    message.attributes.id.CopyFrom(UUID(msb=2**64 - 1, lsb=2**64 - 1))
    assert row(message, time_ms=2_000)["ts"].timestamp() == 2.0
    made = decoded([message.SerializeToString()], time_ms=2**64 - 1).batch
    assert made["ts"].cast("int64")[0].as_py() == made["append_time"].cast("int64")[0].as_py() == TIME_MS_MAX * 1000


@given(st.lists(st.binary(max_size=80), max_size=5), st.data())
def test_no_bytes_raise(blobs: list[bytes], data: st.DataObject) -> None:
    message = published(UPayload.pack(Sample(path="a", double_value=1))).SerializeToString()
    cut = data.draw(st.integers(0, len(message)))
    changed = bytearray(message)
    changed[data.draw(st.integers(0, len(message) - 1))] = data.draw(st.integers(0, 255))
    messages = [message, *blobs, message[:cut], bytes(changed), message + bytes(data.draw(st.binary(max_size=8)))]
    made = decoded(messages).batch
    assert made.schema == SCHEMA
    assert made.num_rows == len(messages)
    made.validate(full=True)


@given(
    st.binary(max_size=400), st.sampled_from(sorted(UPayloadFormat.values())), st.sampled_from(["a", "b.c", "x" * 120])
)
def test_the_fast_path_agrees_with_protobuf(payload: bytes, format: Any, authority: str) -> None:
    message = UMessageBuilder.publish(uris.uri(authority, 0x8001, 1, 0x8002)).build_from_upayload(
        UPayload(payload, format)
    )
    made = row(message)
    assert made["payload"] == payload
    assert made["authority"] == authority
    assert made["message_id"] == uuids.format(message.attributes.id)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["a", "Vehicle.OBD.Speed", "é" * 70]),
            st.integers(0, 3),
            st.sampled_from([1.5, -0.0, "x", True, False]),
        ),
        max_size=8,
    ),
    st.data(),
)
def test_caches_do_not_change_the_result(parts: list[tuple[str, int, float | str | bool]], data: st.DataObject) -> None:
    messages = []
    for path, seconds, value in parts:
        sample = drive.SignalSample(drive.Signal(path, "v", 0x8000), seconds * 1_000, value)
        payload = bytearray(drive.message(sample).payload)
        if data.draw(st.booleans()):
            payload[data.draw(st.integers(0, len(payload) - 1))] ^= 1 << data.draw(st.integers(0, 7))
        payload = payload[: data.draw(st.integers(0, len(payload)))] if data.draw(st.booleans()) else payload
        messages += [
            published(UPayload(bytes(payload), PROTOBUF)).SerializeToString(),
            drive.message(sample).SerializeToString(),
        ]
    decoder = Decoder()
    together = [decoded([message], decoder=decoder).batch.to_pylist() for message in messages]
    alone = [decoded([message]).batch.to_pylist() for message in messages]
    assert repr(together) == repr(alone)  # a flipped bit may make a NaN, which is unlike itself


def same_with_and_without_caches(whole: bytes, others: Iterable[bytes]) -> None:
    decoder = Decoder()
    for message in others:
        decoded([whole], decoder=decoder)
        behind, alone = decoded([message], decoder=decoder), decoded([message])
        assert repr(behind.batch.to_pylist()) == repr(alone.batch.to_pylist()), message
        assert behind.malformed == alone.malformed, message


@pytest.mark.parametrize("value", [1.5, "xy", True, False])
def test_a_damaged_message_behind_a_whole_one(value: float | str | bool) -> None:
    """Caches have what the whole one contains."""
    whole = drive.message(drive.SignalSample(drive.Signal("a", "v", 0x8000), 1_000, value)).SerializeToString()
    flipped = (
        whole[:place] + bytes([whole[place] ^ 1 << bit]) + whole[place + 1 :]
        for place in range(len(whole))
        for bit in range(8)
    )
    same_with_and_without_caches(whole, flipped)
    same_with_and_without_caches(whole, (whole[:end] for end in range(len(whole))))


DOUBLE, TRUE, STRING = b"\x19" + struct.pack("<d", 1.5), b"\x28\x01", b"\x22\x01x"
ENDS_OF_SAMPLES = [
    *(b"", DOUBLE, DOUBLE[:-1], DOUBLE + DOUBLE, DOUBLE + TRUE, DOUBLE + b"\xff", b"\x19"),
    *(TRUE, b"\x28\x00", b"\x28\x02", b"\x28\x80\x01", TRUE + b"\x28\x00", TRUE + STRING, b"\x28"),
    *(STRING, b"\x22\x00", b"\x22\x01\xff", b"\x22\x80\x01" + b"x" * 127, b"\x22\x80\x01" + b"x" * 128, b"\x22"),
    *(STRING + STRING, b"\x12\x00" + TRUE, b"\x0a\x01b" + TRUE, b"\x30\x01" + TRUE),
]


def test_ends_of_samples_behind_a_whole_one() -> None:
    begin = Sample(path="a", time=Timestamp(seconds=1)).SerializeToString()
    whole, *others = (
        published(UPayload(begin + end, PROTOBUF)).SerializeToString() for end in (DOUBLE, *ENDS_OF_SAMPLES)
    )
    same_with_and_without_caches(whole, others)


def test_more_topics_than_the_cache_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spark_ingest.decode.ROUTES_DECODED_MAX", 3)
    decoder = Decoder()
    for start in range(0x8000, 0x8020, 4):
        topics = [uris.uri("v", 1, 1, start + number) for number in range(4)]
        messages = [UMessageBuilder.publish(topic).build().SerializeToString() for topic in topics]
        made = decoded(messages, decoder=decoder).batch
        assert made["topic"].to_pylist() == [uris.format(topic) for topic in topics]
        assert len(decoder._known) == len(topics) + 1


def test_each_row_has_its_epoch() -> None:
    message = published(UPayload.pack(Sample(path="a", double_value=1))).SerializeToString()
    epochs = [
        Epoch(group="second", time=LogicalTime(numbers=[5_000])),
        Epoch(group="lap", time=LogicalTime(numbers=[1, -2])),
    ]
    made = decoded([message] * 4, epochs=epochs, epoch=[1, 0, 2, 1]).batch
    second, lap = {"group": "second", "time": [5_000]}, {"group": "lap", "time": [1, -2]}
    assert made["epoch"].to_pylist() == [second, None, lap, second]
    made.validate(full=True)


@pytest.mark.parametrize("places", [[], [1, 1], [3, 0, 0]])
def test_inconsistent_epochs_make_a_column_of_nulls(places: list[int]) -> None:
    message = published(UPayload.pack(Sample(path="a", double_value=1))).SerializeToString()
    made = decoded([message] * 3, epochs=[Epoch(group="second")], epoch=places).batch
    assert made["epoch"].null_count == 3
    assert made.schema == SCHEMA


# Attributes


ADDRESSES = st.builds(
    UUri,
    authority_name=st.sampled_from(["", "vehicle1", "x" * 120]),
    ue_id=st.integers(0, 2**32 - 1),
    ue_version_major=st.integers(0, 255),
    resource_id=st.integers(0, 2**16 - 1),
)
UUIDS = st.builds(UUID, msb=st.integers(0, 2**64 - 1), lsb=st.integers(0, 2**64 - 1))


@st.composite
def encoded_messages(draw: st.DrawFn) -> bytes:
    """UMessages, some of them as another implementation may write them."""
    attributes = UAttributes(priority=draw(st.integers(0, 9)), payload_format=draw(st.integers(0, 9)))  # type: ignore[arg-type]
    for name, values in {
        "id": UUIDS,
        "source": ADDRESSES,
        "sink": ADDRESSES,
        "reqid": UUIDS,
    }.items():
        if draw(st.booleans()):
            getattr(attributes, name).CopyFrom(draw(values))
    for name, numbers_or_texts in {
        "ttl": st.integers(0, 2**32 - 1),
        "permission_level": st.integers(0, 2**32 - 1) | st.sampled_from([2**31 - 1, 2**31]),
        "token": st.text(max_size=9),
        "traceparent": st.just(TRACEPARENT) | st.text(max_size=9),
    }.items():
        if draw(st.booleans()):
            setattr(attributes, name, draw(numbers_or_texts))
    rest = UAttributes()
    rest.CopyFrom(attributes)
    rest.ClearField("id")
    begin, end = UAttributes(id=attributes.id).SerializeToString(), rest.SerializeToString()
    unknown = draw(st.sampled_from([b"", b"\x78\x01", b"\x7a\xff\x07" + b"u" * 1_023]))
    data = draw(st.sampled_from([attributes.SerializeToString(), begin + end, end + begin])) + unknown
    message = UMessage(payload=draw(st.binary(max_size=200))) if draw(st.booleans()) else UMessage()
    return UMessage(attributes=UAttributes.FromString(data)).SerializeToString() + message.SerializeToString()


def attributes_of(data: bytes) -> dict[str, Any]:
    """What the columns of attributes contain, by protobuf alone."""
    message = UMessage.FromString(data)
    attributes = message.attributes
    has, level = attributes.HasField, attributes.permission_level
    return {
        "authority": attributes.source.authority_name if has("source") else None,
        "topic": uris.format(attributes.source) if has("source") else None,
        "sink": uris.format(attributes.sink) if has("sink") else None,
        "priority": f"CS{attributes.priority - 1}" if 1 <= attributes.priority <= 7 else None,
        "ttl_ms": attributes.ttl if has("ttl") else None,
        "permission_level": level if has("permission_level") and level < 2**31 else None,
        "traceparent": attributes.traceparent if has("traceparent") else None,
        "message_id": uuids.format(attributes.id) if attributes.id.msb or attributes.id.lsb else None,
        "payload": message.payload if message.HasField("payload") else None,
    }


@given(st.lists(encoded_messages(), max_size=6))
def test_attributes_agree_with_protobuf(messages: list[bytes]) -> None:
    decoder = Decoder()
    for made in (decoded(messages, decoder=decoder).batch, decoded(messages, decoder=decoder).batch):
        made.validate(full=True)
        expected = [attributes_of(message) for message in messages]
        assert made.select(list(attributes_of(b""))).to_pylist() == expected


@pytest.mark.parametrize("name", ["CS0", "CS1", "CS2", "CS3", "CS4", "CS5", "CS6"])
def test_a_priority_is_its_class(name: str) -> None:
    message = UMessageBuilder.publish(TOPIC).with_priority(UPriority.Value(f"UPRIORITY_{name}")).build()
    assert row(message)["priority"] == name


def test_what_differs_in_each_message_does_not_fill_the_cache() -> None:
    messages = []
    for number in range(50):
        message = published(UPayload(b"x", TEXT))
        message.attributes.traceparent = f"00-{number:032x}-b7ad6b7169203331-01"
        message.attributes.token = str(number)
        message.attributes.reqid.msb = number
        messages += [message.SerializeToString(), published(UPayload(b"y", TEXT)).SerializeToString()]
    decoder = Decoder()
    made = decoded(messages, decoder=decoder).batch
    assert made["traceparent"].to_pylist()[:3] == [
        f"00-{0:032x}-b7ad6b7169203331-01",
        None,
        f"00-{1:032x}-b7ad6b7169203331-01",
    ]
    assert made["topic"].to_pylist() == [uris.format(TOPIC)] * 100
    assert len(decoder._kinds) == 1


# Values


@given(st.integers(-(2**70), 2**70) | st.sampled_from([2**53 + 1, -(2**63), 2**63 - 1, 2**63, -(2**63) - 1]))
def test_json_integers_are_exact(number: int) -> None:
    made = row(published(UPayload(f" {number} ".encode(), JSON)))
    assert made["value_double"] == float(number)
    assert made["value_long"] == (number if -(2**63) <= number < 2**63 else None)


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_other_json_numbers_are_doubles(number: float) -> None:
    made = row(published(UPayload(json.dumps(number).encode(), JSON)))
    assert struct.pack("d", made["value_double"]) == struct.pack("d", number)
    assert made["value_long"] is None


def test_minus_zero_keeps_its_sign_as_a_double() -> None:
    made = row(published(UPayload(b"-0", JSON)))
    assert str(made["value_double"]) == "-0.0"
    assert made["value_long"] == 0


INTEGERS = [
    (wrappers_pb2.Int32Value, -(2**31), 2**31 - 1),
    (wrappers_pb2.UInt32Value, 0, 2**32 - 1),
    (wrappers_pb2.Int64Value, -(2**63), 2**63 - 1),
    (wrappers_pb2.UInt64Value, 0, 2**64 - 1),
]


@given(st.sampled_from(INTEGERS).flatmap(lambda kind: st.tuples(st.just(kind[0]), st.integers(*kind[1:]))))
def test_wrapped_integers_are_exact(case: tuple[Any, int]) -> None:
    wrapper, number = case
    made = row(published(UPayload.pack_to_any(wrapper(value=number))))
    assert made["value_double"] == float(number)
    assert made["value_long"] == (number if number < 2**63 else None)
    assert made["path"] is None


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["", "a", "Vehicle.OBD.Speed", "é" * 70, "x" * 300]),
            st.none() | st.builds(Timestamp, seconds=st.integers(-3, 3), nanos=st.sampled_from([0, 1_999])),
            st.one_of(st.none(), st.floats(), st.text(max_size=200), st.booleans()),
        ),
        max_size=9,
    )
)
def test_samples_agree_with_protobuf(cases: list[tuple[str, Timestamp | None, float | str | bool | None]]) -> None:
    messages, expected = [], []
    for path, time, value in cases:
        name = {float: "double_value", str: "string_value", bool: "bool_value"}.get(type(value))
        sample = Sample(path=path, time=time, **({name: value} if name else {}))  # type: ignore[arg-type]
        messages.append(published(UPayload(sample.SerializeToString(), PROTOBUF)).SerializeToString())
        is_sample = name is not None and path
        micros = time.seconds * 1_000_000 + time.nanos // 1_000 if time is not None and is_sample else None
        expected.append((path, value, micros) if is_sample else (None, None, None))
    made = decoded(messages)
    found = []
    for one, micros in zip(made.batch.to_pylist(), made.batch["ts"].cast("int64").to_pylist(), strict=True):
        (value,) = {one for one in values(one) if one is not None} or {None}
        found.append((one["path"], value, micros if one["ts_source"] == "sample" else None))
    assert repr(found) == repr(expected)
    assert not made.malformed


# Times


def sampled(seconds: int | None, id_ms: int) -> bytes:
    time = None if seconds is None else Timestamp(seconds=seconds)
    message = published(UPayload.pack(Sample(path="p", time=time, double_value=1)))
    message.attributes.id.CopyFrom(UUID(msb=id_ms << 16 | 0x7000, lsb=2**63))
    return message.SerializeToString()


@pytest.mark.parametrize(
    ("seconds", "id_ms", "ahead_ms", "expected"),
    [
        (900, 5_000, None, (900_000, "sample")),
        (2_000, 5_000, None, (2_000_000, "sample")),
        (None, 5_000, None, (5_000, "id")),
        (None, 0, None, (1_000_000, "append")),
        (900, 5_000, 0, (900_000, "sample")),
        (-900, 5_000, 0, (-900_000, "sample")),
        (1_001, 5_000, 1_000, (1_001_000, "sample")),
        (1_002, 5_000, 1_000, (1_001_000, "bounded")),
        (None, 2_000_000, 500, (1_000_500, "bounded")),
        (None, 0, 0, (1_000_000, "append")),
        (253_402_300_799, 0, 2**80, (253_402_300_799_000, "sample")),
    ],
)
def test_the_source_of_a_time_and_its_limit(
    seconds: int | None, id_ms: int, ahead_ms: int | None, expected: tuple[int, str]
) -> None:
    made = decoded([sampled(seconds, id_ms)], decoder=Decoder(max_clock_ahead_ms=ahead_ms), time_ms=1_000_000).batch
    assert (made["ts"].cast("int64")[0].as_py() / 1_000, made["ts_source"][0].as_py()) == expected
    assert made["append_time"].cast("int64")[0].as_py() == 1_000_000_000


# Projection


@given(st.lists(st.sampled_from(SCHEMA.names), min_size=1, unique=True), st.lists(encoded_messages(), max_size=4))
def test_a_projection_has_the_same_values(columns: list[str], messages: list[bytes]) -> None:
    messages = [*messages, sampled(5, 1_000), sampled(None, 1_000), b"\xff"]
    decoder, whole = Decoder(columns), decoded(messages, prev_seq=range(len(messages))).batch
    for _ in range(2):
        made = decoded(messages, decoder=decoder, prev_seq=range(len(messages))).batch
        assert made.schema == decoder.schema == pa.schema([SCHEMA.field(name) for name in columns])
        assert repr(made.to_pylist()) == repr(whole.select(columns).to_pylist())


def test_what_is_not_read_is_not_parsed() -> None:
    message = published(UPayload(b"\xff", PROTOBUF)).SerializeToString()
    assert decoded([message]).malformed == {"payload": 1}
    assert decoded([message], decoder=Decoder(["topic", "payload"])).malformed == {}
    made = decoded([message, b"\xff", published(None).SerializeToString()], decoder=Decoder(["malformed"]))
    assert made.batch.to_pydict() == {"malformed": ["payload", "message", None]}


@pytest.mark.parametrize("columns", [[], ["seq", "value"]])
def test_unknown_columns_are_refused(columns: list[str]) -> None:
    with pytest.raises(UStatusError, match=r"authority, topic, path.*malformed; got"):
        Decoder(columns)


# Records


def record_batch() -> RecordBatch:
    return RecordBatch(
        incarnation=bytes.fromhex(LOG),
        seq=[4, 6, 7],
        prev_seq=[0, 4, 5],
        time_ms=[1, 2, 3],
        message=[published(UPayload(text, TEXT)).SerializeToString() for text in (b"a", b"b", b"c")],
        origin_incarnation=[b"\x01\x02", b"\xff"],
        origin=[0, 2, 1],
        origin_seq=[0, 2**63 - 1, 9],
        epochs=[Epoch(group="g")],
        epoch=[0, 1, 0],
    )


def test_records_know_their_predecessor_and_their_origin() -> None:
    made = Decoder().decode(RecordColumns.of(record_batch()), LOG).batch
    made.validate(full=True)
    assert made["prev_seq"].to_pylist() == [0, 4, 5]
    assert made["origin"].to_pylist() == [
        None,
        {"incarnation": "ff", "seq": 2**63 - 1},
        {"incarnation": "0102", "seq": 9},
    ]
    assert made["incarnation"].to_pylist() == [LOG] * 3
    assert made["append_time"].cast("int64").to_pylist() == [1_000, 2_000, 3_000]


@given(st.lists(st.sampled_from(range(3)), max_size=4))
def test_some_of_the_records(indices: list[int]) -> None:
    records = RecordColumns.of(record_batch())._replace(incomplete=["x", None, "z"])
    whole, some = (Decoder().decode(one, LOG).batch for one in (records, records.take(indices)))
    assert some.to_pylist() == [whole.to_pylist()[index] for index in indices]


@pytest.mark.parametrize(
    "wrong",
    [
        {"origin": [1, 1]},
        {"origin": [3, 0, 0]},
        {"origin_seq": [1]},
        {"prev_seq": [1, 2]},
        {"origin_seq": [2**63] * 3, "prev_seq": [2**63] * 3, "origin": [1] * 3},
    ],
)
def test_inconsistent_records_make_nulls(wrong: dict[str, list[int]]) -> None:
    records = RecordColumns.of(record_batch())._replace(**wrong)
    for made in (Decoder().decode(records, LOG).batch, Decoder().decode(records.take([0, 1, 2]), LOG).batch):
        made.validate(full=True)
        assert made["seq"].to_pylist() == [4, 6, 7]
        for name in {name.removesuffix("_seq") if name.startswith("origin") else name for name in wrong}:
            assert made[name].null_count == 3, name
