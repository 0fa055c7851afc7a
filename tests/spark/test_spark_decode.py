"""Decoding: every known payload gives its value, other payloads give nulls, and no payload raises."""

from __future__ import annotations

from typing import Any

import pytest
from google.protobuf import wrappers_pb2
from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp
from hypothesis import given
from hypothesis import strategies as st

from spark_ingest.decode import SCHEMA, TIME_MS_MAX, Decoder
from streamer.demo import drive
from uprotocol import uri as uris
from uprotocol import uuid as uuids
from uprotocol.core.ustreamer.v1.ustreamer_pb2 import Epoch, LogicalTime, Sample
from uprotocol.message import UMessageBuilder, UPayload
from uprotocol.v1.uattributes_pb2 import UPayloadFormat
from uprotocol.v1.umessage_pb2 import UMessage
from uprotocol.v1.uuid_pb2 import UUID

TOPIC = uris.uri("vehicle1", 0x8001, 1, 0x8002)
TEXT, JSON = UPayloadFormat.UPAYLOAD_FORMAT_TEXT, UPayloadFormat.UPAYLOAD_FORMAT_JSON
PROTOBUF, RAW = UPayloadFormat.UPAYLOAD_FORMAT_PROTOBUF, UPayloadFormat.UPAYLOAD_FORMAT_RAW
NO_VALUE = (None, None, None)


def published(payload: UPayload | None) -> UMessage:
    return UMessageBuilder.publish(TOPIC).build_from_upayload(payload)


def row(message: UMessage | bytes, time_ms: int = 7) -> dict[str, Any]:
    data = message if isinstance(message, bytes) else message.SerializeToString()
    decoder = Decoder()
    (first, second) = decoder.decode([5, 6], [time_ms, time_ms], [data, data]).batch.to_pylist()
    assert first | {"seq": 6} == second  # the second one goes through the route cache
    return dict(first)


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
    assert Decoder().decode([1], [1], [message.SerializeToString()]).malformed == malformed


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
    assert set(made.values()) == {None}
    assert Decoder().decode([1], [1], [b"\xff"]).malformed == {"message": 1}


@pytest.mark.parametrize(
    "time", [Timestamp(seconds=2**62), Timestamp(seconds=1, nanos=-1), Timestamp(seconds=-(2**50))]
)
def test_an_invalid_time_falls_back_to_the_id(time: Timestamp) -> None:
    message = published(UPayload.pack(Sample(path="p", time=time, double_value=1)))
    made = row(message)
    assert made["ts"].timestamp() * 1000 == pytest.approx(uuids.time_ms(message.attributes.id), abs=1)
    assert Decoder().decode([1], [1], [message.SerializeToString()]).malformed == {"time": 1}


def test_an_id_beyond_the_calendar_falls_back_to_the_append_time() -> None:
    message = published(UPayload(b"x", RAW))
    message.attributes.id.CopyFrom(UUID(msb=2**64 - 1, lsb=2**64 - 1))
    assert row(message, time_ms=2_000)["ts"].timestamp() == 2.0
    assert (
        Decoder().decode([1], [2**64 - 1], [message.SerializeToString()]).batch["ts"].cast("int64")[0].as_py()
        == TIME_MS_MAX * 1000
    )


@given(st.lists(st.binary(max_size=80), max_size=5), st.data())
def test_no_bytes_raise(blobs: list[bytes], data: st.DataObject) -> None:
    message = published(UPayload.pack(Sample(path="a", double_value=1))).SerializeToString()
    cut = data.draw(st.integers(0, len(message)))
    changed = bytearray(message)
    changed[data.draw(st.integers(0, len(message) - 1))] = data.draw(st.integers(0, 255))
    messages = [message, *blobs, message[:cut], bytes(changed), message + bytes(data.draw(st.binary(max_size=8)))]
    decoded = Decoder().decode(range(len(messages)), [1] * len(messages), messages)
    assert decoded.batch.schema == SCHEMA
    assert decoded.batch.num_rows == len(messages)
    decoded.batch.validate(full=True)


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
    together = [decoder.decode([1], [1], [message]).batch.to_pylist() for message in messages]
    alone = [Decoder().decode([1], [1], [message]).batch.to_pylist() for message in messages]
    assert repr(together) == repr(alone)  # a flipped bit may make a NaN, which is unlike itself


def test_more_topics_than_the_cache_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spark_ingest.decode.ROUTES_CACHED_MAX", 3)
    decoder = Decoder()
    for start in range(0x8000, 0x8020, 4):
        topics = [uris.uri("v", 1, 1, start + number) for number in range(4)]
        messages = [UMessageBuilder.publish(topic).build().SerializeToString() for topic in topics]
        assert decoder.decode(range(4), [1] * 4, messages).batch["topic"].to_pylist() == [
            uris.format(topic) for topic in topics
        ]


def test_each_row_has_its_epoch() -> None:
    message = published(UPayload.pack(Sample(path="a", double_value=1))).SerializeToString()
    epochs = [
        Epoch(group="second", time=LogicalTime(numbers=[5_000])),
        Epoch(group="lap", time=LogicalTime(numbers=[1, -2])),
    ]
    made = Decoder().decode(range(4), [1] * 4, [message] * 4, epochs, [1, 0, 2, 1]).batch
    second, lap = {"group": "second", "time": [5_000]}, {"group": "lap", "time": [1, -2]}
    assert made["epoch"].to_pylist() == [second, None, lap, second]
    made.validate(full=True)


@pytest.mark.parametrize("places", [[], [1, 1], [3, 0, 0]])
def test_inconsistent_epochs_make_a_column_of_nulls(places: list[int]) -> None:
    message = published(UPayload.pack(Sample(path="a", double_value=1))).SerializeToString()
    made = Decoder().decode(range(3), [1] * 3, [message] * 3, [Epoch(group="second")], places).batch
    assert made["epoch"].null_count == 3
    assert made.schema == SCHEMA
