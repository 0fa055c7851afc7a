"""Records to rows: UMessages in, one Arrow batch out. Pure. No content of a message raises an exception.

UMessage bytes --route cache--> authority, topic, format --payload reader--> path, ts, value_* --> pyarrow.RecordBatch
                    |
                    +-- all attributes but the id are the same bytes for every message of a topic, so they are parsed
                        once; messages with another layout are parsed by protobuf
"""

from __future__ import annotations

import json
import struct
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any as Anything
from typing import Final, NamedTuple

import numpy as np
import pyarrow as pa
from google.protobuf import wrappers_pb2
from google.protobuf.any_pb2 import Any
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass

from uprotocol import uri as uris
from uprotocol.cache import Cache
from uprotocol.core.ustreamer.v1.ustreamer_pb2 import Epoch, Sample
from uprotocol.v1.uattributes_pb2 import UAttributes, UPayloadFormat
from uprotocol.v1.umessage_pb2 import UMessage

COLUMNS: Final = (
    ("authority", "string"),
    ("topic", "string"),
    ("path", "string"),
    ("ts", "timestamp"),
    ("value_double", "double"),
    ("value_string", "string"),
    ("value_bool", "boolean"),
    ("seq", "long"),
    ("message_id", "string"),
    ("payload", "binary"),
    ("payload_format", "string"),
    ("epoch", "struct<group:string,time:array<bigint>>"),
    ("epoch_incomplete", "string"),
)
"""Name and Spark type of each column, in order. All but `seq` may be null."""

DDL: Final = ", ".join(f"{name} {type}" for name, type in COLUMNS)

_ARROW: Final[dict[str, pa.DataType]] = {
    "string": pa.string(),
    "timestamp": pa.timestamp("us", tz="UTC"),
    "double": pa.float64(),
    "boolean": pa.bool_(),
    "long": pa.int64(),
    "binary": pa.binary(),
    "struct<group:string,time:array<bigint>>": pa.struct([("group", pa.string()), ("time", pa.list_(pa.int64()))]),
}
SCHEMA: Final = pa.schema([(name, _ARROW[type]) for name, type in COLUMNS])

# topics of a fleet, some 0.3 KB each; with more topics the cache is cleared again and again, which doubles the cost
ROUTES_CACHED_MAX: Final = 65_536
TIME_MS_MAX: Final = 253_402_300_799_999  # end of the year 9999, beyond which neither protobuf nor Spark has dates
MOMENTS_CACHED_MAX: Final = 1_024  # times of samples; samples of one time follow each other
_SECONDS_MIN, _SECONDS_MAX = -62_135_596_800, 253_402_300_799  # what google.protobuf.Timestamp allows: years 1 to 9999

_ID_BYTES: Final = 17  # of an encoded id: msb, the tag of lsb, lsb; both little-endian
_FORMAT_PREFIX: Final = len("UPAYLOAD_FORMAT_")
_NO_TIME: Final = np.iinfo(np.int64).min

SampleValue = float | str | bool | None


class Decoded(NamedTuple):
    """`malformed` counts unreadable parts by kind: message, payload, time. Their rows are in `batch`, with nulls."""

    batch: pa.RecordBatch
    malformed: Counter[str]


class _MessageKind(NamedTuple):
    """What all messages with the same attributes have in common. `read` is None if the format has no value."""

    number: int
    authority: str | None
    topic: str | None
    format: str | None
    read: Callable[[_Rows, bytes], None] | None


class Decoder:
    """Caches topics over batches. Not thread-safe."""

    def __init__(self) -> None:
        self._routes: dict[bytes, _MessageKind] = {}
        self._known: list[_MessageKind] = []
        self._heads: Cache[bytes, str] = Cache(ROUTES_CACHED_MAX)
        self._moments: Cache[bytes, int] = Cache(MOMENTS_CACHED_MAX)

    def decode(
        self,
        seqs: Sequence[int],
        times_ms: Sequence[int],
        messages: Sequence[bytes],
        epochs: Sequence[Epoch] = (),
        epoch: Sequence[int] = (),
        incomplete: Sequence[str | None] = (),
    ) -> Decoded:
        """One row for each of `messages` (UMessage bytes), in order; `times_ms`: when each was appended, Unix ms.
        `epochs`, `epoch`: as in RecordBatch; null if they are inconsistent. `incomplete`: the reason why the epoch of
        each is not whole; may be empty.

        `ts` is the sample's own time, else the creation time in the message's id, else the append time.
        """
        if len(self._known) > ROUTES_CACHED_MAX:
            self._routes.clear()
            self._known.clear()
        rows = _Rows(self._heads, self._moments)
        ids = bytearray()
        routes: list[int] = []
        payloads: list[bytes | None] = []
        known_routes, parse, add_route, add_payload = self._routes, self._parse, routes.append, payloads.append
        for data in messages:
            # fast path for the usual layout:  0A len ( 0A 12 09 msb 11 lsb  rest )  12 len payload
            route: _MessageKind | None = None
            payload: bytes | None
            if (
                data[2:5] == b"\x0a\x12\x09"
                and data[0] == 0x0A
                and 20 <= (end := data[1]) < 0x80
                and data[13:14] == b"\x11"
            ):
                end += 2
                route = known_routes.get(data[22:end])
                if route is not None and (start := _payload_start(data, end)):
                    id, payload = data[5:22], data[start:]
                else:
                    route = None
            if route is None:
                route, id, payload = parse(data, rows)
            add_route(route.number)
            ids += id
            add_payload(payload)
            if route.read is None or payload is None:
                rows.add(None, None, _NO_TIME)
                continue
            try:
                route.read(rows, payload)
            except (DecodeError, ValueError, RecursionError, OverflowError):
                rows.malformed["payload"] += 1  # a reader adds its row last, so it has added none
                rows.add(None, None, _NO_TIME)
        epoch_column = _epochs(len(messages), epochs, epoch)
        whys = pa.array(incomplete, pa.string()) if incomplete else pa.nulls(len(messages), pa.string())
        return Decoded(self._batch(rows, ids, routes, payloads, seqs, times_ms, epoch_column, whys), rows.malformed)

    def _parse(self, data: bytes, rows: _Rows) -> tuple[_MessageKind, bytes, bytes | None]:
        try:
            message = UMessage.FromString(data)
        except DecodeError:
            rows.malformed["message"] += 1
            # a row with the bytes as its payload, without a topic; no attributes consist of this byte
            return self._route(b"\xff", None), bytes(_ID_BYTES), data
        attributes = message.attributes
        id = attributes.id.msb.to_bytes(8, "little") + b"\x11" + attributes.id.lsb.to_bytes(8, "little")
        attributes.ClearField("id")
        payload = message.payload if message.HasField("payload") else None
        return self._route(attributes.SerializeToString(), attributes), id, payload

    def _route(self, key: bytes, attributes: UAttributes | None) -> _MessageKind:
        found = self._routes.get(key)
        if found is None:
            authority = topic = name = read = None
            if attributes is not None:
                format = attributes.payload_format
                is_known = format in UPayloadFormat.values()
                name = UPayloadFormat.Name(format)[_FORMAT_PREFIX:] if is_known else str(int(format))
                read = _READERS.get(format)
                if attributes.HasField("source"):
                    authority, topic = attributes.source.authority_name, uris.format(attributes.source)
            found = self._routes[key] = _MessageKind(len(self._known), authority, topic, name, read)
            self._known.append(found)
        return found

    def _batch(
        self,
        rows: _Rows,
        ids: bytearray,
        routes: list[int],
        payloads: list[bytes | None],
        seqs: Sequence[int],
        times_ms: Sequence[int],
        epochs: pa.Array,
        incomplete: pa.Array,
    ) -> pa.RecordBatch:
        wire = np.frombuffer(ids, dtype=np.uint8).reshape(-1, _ID_BYTES)
        halves = np.delete(wire, 8, axis=1).view("<u8")
        route_numbers = pa.array(np.asarray(routes, dtype=np.int32))
        of_route = {
            name: pa.array([getattr(route, name) for route in self._known], pa.string()).take(route_numbers)
            for name in ("authority", "topic", "format")
        }
        columns = {
            "authority": of_route["authority"],
            "topic": of_route["topic"],
            "path": pa.array(rows.paths, pa.string()),
            "ts": _times(rows.micros, halves, times_ms),
            "value_double": pa.array(rows.doubles, pa.float64()),
            "value_string": pa.array(rows.strings, pa.string()),
            "value_bool": pa.array(rows.bools, pa.bool_()),
            "seq": pa.array(seqs, pa.int64()),
            "message_id": _texts(halves),
            "payload": pa.array(payloads, pa.binary()),
            "payload_format": of_route["format"],
            "epoch": epochs,
            "epoch_incomplete": incomplete,
        }
        return pa.RecordBatch.from_arrays(list(columns.values()), schema=SCHEMA)


class _Rows:
    """The columns that payloads fill, one entry per record.

    `heads` and `moments` cache encoded paths and times of samples: a signal has one path, and all signals of a moment
    have one time.
    """

    __slots__ = ("bools", "doubles", "heads", "malformed", "micros", "moments", "paths", "strings")

    def __init__(self, heads: Cache[bytes, str], moments: Cache[bytes, int]) -> None:
        self.heads, self.moments = heads, moments
        self.paths: list[str | None] = []
        self.micros: list[int] = []
        self.doubles: list[float | None] = []
        self.strings: list[str | None] = []
        self.bools: list[bool | None] = []
        self.malformed: Counter[str] = Counter()

    def add(self, path: str | None, value: SampleValue, micros: int) -> None:
        self.paths.append(path)
        self.micros.append(micros)
        self.doubles.append(value if type(value) is float else None)
        self.strings.append(value if type(value) is str else None)
        self.bools.append(value if type(value) is bool else None)

    def remember(self, path: str, time: bytes, micros: int) -> None:
        """Cache the path and the time, if the length of the path takes one byte."""
        head = path.encode()
        if len(head) <= 0x7F:
            self.heads[bytes((0x0A, len(head))) + head] = path
            self.moments[bytes((0x12, len(time))) + time] = micros


def _payload_start(data: bytes, end: int) -> int:
    """Returns the index of the payload if only the payload follows the attributes that end at `end`; else 0."""
    left = len(data) - end
    if left < 2 or data[end] != 0x12:
        return 0
    size = data[end + 1]
    if size < 0x80:
        return end + 2 if left == size + 2 else 0
    high = data[end + 2] if left > 2 else 0x80
    return end + 3 if high < 0x80 and left == (size & 0x7F) + (high << 7) + 3 else 0


def _epochs(rows: int, epochs: Sequence[Epoch], numbers: Sequence[int]) -> pa.Array:
    type = SCHEMA.field("epoch").type
    if len(numbers) != rows or max(numbers, default=0) > len(epochs):
        return pa.nulls(rows, type)
    known = [None, *({"group": one.group, "time": list(one.time.numbers)} for one in epochs)]
    return pa.array(known, type).take(pa.array(np.asarray(numbers, dtype=np.int32)))


_double: Final = struct.Struct("<d").unpack_from


def _add_sample(rows: _Rows, payload: bytes) -> None:
    """Protobuf payloads do not name their type: one that parses as a Sample with a path and a value is a Sample."""
    size = len(payload)
    if size > 13:  # 0A len path  12 len time  19 double: not parsed if path and time are cached
        end = 2 + payload[1]
        path = rows.heads.get(payload[:end])
        if path is not None and size > end + 10:
            value_at = end + 2 + payload[end + 1]
            known = rows.moments.get(payload[end:value_at])
            if known is not None and size == value_at + 9 and payload[value_at] == 0x19:
                rows.paths.append(path)
                rows.micros.append(known)
                rows.doubles.append(_double(payload, value_at + 1)[0])
                rows.strings.append(None)
                rows.bools.append(None)
                return
    _add_parsed_sample(rows, payload)


def _add_parsed_sample(rows: _Rows, payload: bytes) -> None:
    sample = Sample.FromString(payload)
    kind = sample.WhichOneof("value")
    path = sample.path
    if kind is None or not path:
        rows.add(None, None, _NO_TIME)
        return
    micros = _NO_TIME
    if sample.HasField("time"):
        time = sample.time
        seconds, nanos = time.seconds, time.nanos
        if _SECONDS_MIN <= seconds <= _SECONDS_MAX and 0 <= nanos < 1_000_000_000:
            micros = seconds * 1_000_000 + nanos // 1_000
            rows.remember(path, time.SerializeToString(), micros)
        else:
            rows.malformed["time"] += 1
    rows.add(path, getattr(sample, kind), micros)


_OTHERS: Final = {"BoolValue": bool, "StringValue": str, "BytesValue": None}  # the other wrappers have a number
_WRAPPERS: Final[dict[str, tuple[type[Message], type]]] = {
    kind.full_name: (GetMessageClass(kind), convert)
    for name, kind in wrappers_pb2.DESCRIPTOR.message_types_by_name.items()
    if (convert := _OTHERS.get(name, float)) is not None
}
_SAMPLE_TYPE: Final = Sample.DESCRIPTOR.full_name


def _add_any(rows: _Rows, payload: bytes) -> None:
    wrapped = Any.FromString(payload)
    type_name = wrapped.type_url.rpartition("/")[2]
    if type_name == _SAMPLE_TYPE:
        _add_sample(rows, wrapped.value)
        return
    wrapper = _WRAPPERS.get(type_name)
    if wrapper is None:
        rows.add(None, None, _NO_TIME)
        return
    message, convert = wrapper
    rows.add(None, convert(message.FromString(wrapped.value).value), _NO_TIME)  # type: ignore[attr-defined]  # every wrapper has one


def _add_text(rows: _Rows, payload: bytes) -> None:
    rows.add(None, payload.decode(), _NO_TIME)


def _no_constant(name: str) -> Anything:
    raise ValueError(f"{name} is not JSON")


def _add_json(rows: _Rows, payload: bytes) -> None:
    """Scalars only: an object or a list has no single value and is not parsed."""
    text = payload.decode()
    if text.lstrip()[:1] in ("{", "["):
        rows.add(None, None, _NO_TIME)
        return
    value = json.loads(text, parse_constant=_no_constant, parse_int=float)
    if type(value) is str:
        value.encode()  # raises on half a surrogate pair, which JSON allows and a column does not
    rows.add(None, value, _NO_TIME)


_READERS: Final[dict[int, Callable[[_Rows, bytes], None]]] = {
    UPayloadFormat.UPAYLOAD_FORMAT_PROTOBUF: _add_sample,
    UPayloadFormat.UPAYLOAD_FORMAT_PROTOBUF_WRAPPED_IN_ANY: _add_any,
    UPayloadFormat.UPAYLOAD_FORMAT_TEXT: _add_text,
    UPayloadFormat.UPAYLOAD_FORMAT_JSON: _add_json,
}


def _times(micros: list[int], halves: np.ndarray[Anything, Anything], times_ms: Sequence[int]) -> pa.Array:
    own = np.asarray(micros, dtype=np.int64)
    created = (halves[:, 0] >> np.uint64(16)).astype(np.int64)
    appended = np.minimum(np.asarray(times_ms, dtype=np.uint64), TIME_MS_MAX).astype(np.int64)
    fallback = np.where((created > 0) & (created <= TIME_MS_MAX), created, appended) * 1_000
    return pa.array(np.where(own == _NO_TIME, fallback, own)).cast(_ARROW["timestamp"])


_HEX: Final = np.frombuffer(b"".join(b"%02x" % byte for byte in range(256)), dtype="<u2")
# indices of the hex pairs in xxxxxxxx-xxxx-...
_PAIRS: Final = np.array([0, 2, 4, 6, 9, 11, 14, 16, 19, 21, 24, 26, 28, 30, 32, 34])
_TEXT_LENGTH: Final = 36


def _texts(halves: np.ndarray[Anything, Anything]) -> pa.Array:
    """Ids as text, without a loop over rows; null for an id of zeros."""
    count = len(halves)
    pairs = _HEX[halves.astype(">u8").view(np.uint8).reshape(count, 16)].view(np.uint8).reshape(count, 16, 2)
    text = np.full((count, _TEXT_LENGTH), ord("-"), dtype=np.uint8)
    text[:, _PAIRS], text[:, _PAIRS + 1] = pairs[:, :, 0], pairs[:, :, 1]
    offsets = np.arange(0, (count + 1) * _TEXT_LENGTH, _TEXT_LENGTH, dtype=np.int32)
    made = pa.StringArray.from_buffers(count, pa.py_buffer(offsets), pa.py_buffer(text))
    missing = ~halves.any(axis=1)
    return pa.compute.if_else(pa.array(missing), pa.scalar(None, pa.string()), made) if missing.any() else made
