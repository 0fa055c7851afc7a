"""Payloads to values: the path, the time and the value of each row of a batch. Pure.

payload --READERS[format]--> Values     Sample, plain or in Any | google.protobuf's wrappers in Any | text | JSON scalar
                |
                +-- a signal has one path, and all signals of a moment have one time: both are parsed once
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from typing import Any as Anything
from typing import Final

import numpy as np
from google.protobuf import wrappers_pb2
from google.protobuf.any_pb2 import Any
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass

from uprotocol.cache import Cache
from uprotocol.core.ustreamer.v1.ustreamer_pb2 import Sample
from uprotocol.v1.uattributes_pb2 import UPayloadFormat

HEADS_CACHED_MAX: Final = 65_536  # paths of a fleet, some 0.2 KB each; vehicles of one kind have the same
MOMENTS_CACHED_MAX: Final = 1_024  # times of samples; samples of one time follow each other
_SECONDS_MIN, _SECONDS_MAX = -62_135_596_800, 253_402_300_799  # what google.protobuf.Timestamp allows: years 1 to 9999
NO_TIME: Final = np.iinfo(np.int64).min
LONG_MIN, LONG_MAX = np.iinfo(np.int64).min, np.iinfo(np.int64).max
_LONG_LENGTH_MAX: Final = len(str(LONG_MIN))  # characters

UNREADABLE: Final = (DecodeError, ValueError, RecursionError, OverflowError)
"""What a reader raises if a payload is malformed. It has written nothing then."""

SampleValue = float | str | bool | int | None


class Values:
    """What the payloads of a batch of `rows` contain; an integer is also a double.

    `heads` and `moments` cache encoded paths and times of samples, with their values; they outlive the batch.
    """

    def __init__(self, rows: int, heads: Cache[bytes, str], moments: Cache[bytes, int]) -> None:
        self.heads, self.moments = heads, moments
        self.paths: list[str | None] = [None] * rows
        self.micros: list[int] = [NO_TIME] * rows  # Unix microseconds
        self.doubles: list[float | None] = [None] * rows
        # rarer ones, by row
        self.strings: dict[int, str] = {}
        self.bools: dict[int, bool] = {}
        self.longs: dict[int, int] = {}
        self.malformed: dict[int, str] = {}  # one of decode.MALFORMED, by row

    def put(self, row: int, value: SampleValue) -> None:
        if isinstance(value, bool):
            self.bools[row] = value
        elif isinstance(value, str):
            self.strings[row] = value
        elif value is not None:
            self.doubles[row] = float(value)
            if isinstance(value, int) and LONG_MIN <= value <= LONG_MAX:
                self.longs[row] = value


_double: Final = struct.Struct("<d").unpack_from


def _read_sample(values: Values, row: int, payload: bytes) -> None:
    """Protobuf payloads do not name their type: one that parses as a Sample with a path and a value is a Sample."""
    # 0A len path  12 len time  19 double | 22 len string | 28 bool: not parsed if path and time are cached
    size = len(payload)
    if size > 2 and (path := values.heads.get(payload[: (end := 2 + payload[1])])) is not None and size > end + 2:
        at = end + 2 + payload[end + 1]
        micros = values.moments.get(payload[end:at])
        if micros is not None and size >= at + 2:
            tag, next = payload[at], payload[at + 1]
            is_read = True
            if tag == 0x19 and size == at + 9:
                values.doubles[row] = _double(payload, at + 1)[0]
            elif tag == 0x28 and size == at + 2 and next < 2:
                values.bools[row] = next == 1
            elif tag == 0x22 and size == at + 2 + next and next < 0x80:
                values.strings[row] = payload[at + 2 :].decode()
            else:
                is_read = False
            if is_read:
                values.paths[row], values.micros[row] = path, micros
                return
    _parse_sample(values, row, payload)


def _parse_sample(values: Values, row: int, payload: bytes) -> None:
    sample = Sample.FromString(payload)
    kind = sample.WhichOneof("value")
    path = sample.path
    if kind is None or not path:
        return
    if sample.HasField("time"):
        time = sample.time
        seconds, nanos = time.seconds, time.nanos
        if _SECONDS_MIN <= seconds <= _SECONDS_MAX and 0 <= nanos < 1_000_000_000:
            values.micros[row] = micros = seconds * 1_000_000 + nanos // 1_000
            head, moment = path.encode(), time.SerializeToString()
            if len(head) <= 0x7F:  # so that the length takes one byte
                values.heads[bytes((0x0A, len(head))) + head] = path
                values.moments[bytes((0x12, len(moment))) + moment] = micros
        else:
            values.malformed[row] = "time"
    values.paths[row] = path
    values.put(row, getattr(sample, kind))


_WRAPPED: Final = {  # the other wrappers have a floating-point number
    "BoolValue": bool,
    "StringValue": str,
    "BytesValue": None,
    **dict.fromkeys(("Int64Value", "UInt64Value", "Int32Value", "UInt32Value"), int),
}
_WRAPPERS: Final[dict[str, tuple[type[Message], type]]] = {
    kind.full_name: (GetMessageClass(kind), convert)
    for name, kind in wrappers_pb2.DESCRIPTOR.message_types_by_name.items()
    if (convert := _WRAPPED.get(name, float)) is not None
}
_SAMPLE_TYPE: Final = Sample.DESCRIPTOR.full_name


def _read_any(values: Values, row: int, payload: bytes) -> None:
    wrapped = Any.FromString(payload)
    type_name = wrapped.type_url.rpartition("/")[2]
    if type_name == _SAMPLE_TYPE:
        _read_sample(values, row, wrapped.value)
    elif type_name in _WRAPPERS:
        message, convert = _WRAPPERS[type_name]
        values.put(row, convert(message.FromString(wrapped.value).value))  # type: ignore[attr-defined]  # every wrapper has one


def _read_text(values: Values, row: int, payload: bytes) -> None:
    values.strings[row] = payload.decode()


def _no_constant(name: str) -> Anything:
    raise ValueError(f"{name} is not JSON")


def _integer(text: str) -> SampleValue:
    return int(text) if len(text) <= _LONG_LENGTH_MAX else float(text)


_JSON: Final = json.JSONDecoder(parse_constant=_no_constant, parse_int=_integer)


def _read_json(values: Values, row: int, payload: bytes) -> None:
    """Scalars only: an object or a list has no single value and is not parsed."""
    text = payload.decode()
    if text.lstrip()[:1] in ("{", "["):
        return
    value = _JSON.decode(text)
    if type(value) is str:
        value.encode()  # raises on half a surrogate pair, which JSON allows and a column does not
    values.put(row, value)
    if type(value) is int and not value:
        values.doubles[row] = float(text)  # -0


READERS: Final[dict[int, Callable[[Values, int, bytes], None]]] = {
    UPayloadFormat.UPAYLOAD_FORMAT_PROTOBUF: _read_sample,
    UPayloadFormat.UPAYLOAD_FORMAT_PROTOBUF_WRAPPED_IN_ANY: _read_any,
    UPayloadFormat.UPAYLOAD_FORMAT_TEXT: _read_text,
    UPayloadFormat.UPAYLOAD_FORMAT_JSON: _read_json,
}
