"""Records to rows: UMessages in, one Arrow batch out. Pure. No content of a message raises an exception.

UMessage bytes --kind cache--> authority, topic, ... --payloads.READERS--> path, ts, value_* --> pyarrow.RecordBatch
                    |
                    +-- all attributes but the id are the same bytes for every message of a topic, so they are parsed
                        once; messages with another layout are parsed by protobuf
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any as Anything
from typing import Final, NamedTuple

import numpy as np
import pyarrow as pa
from google.protobuf.message import DecodeError

from spark_ingest.payloads import HEADS_CACHED_MAX, LONG_MAX, MOMENTS_CACHED_MAX, NO_TIME, READERS, UNREADABLE, Values
from uprotocol import uri as uris
from uprotocol.cache import Cache
from uprotocol.core.ustreamer.v1.ustreamer_pb2 import Epoch, RecordBatch
from uprotocol.encoded import is_shared
from uprotocol.status import invalid
from uprotocol.v1.uattributes_pb2 import UAttributes, UPayloadFormat, UPriority
from uprotocol.v1.umessage_pb2 import UMessage

MALFORMED: Final = ("message", "payload", "time")
"""What of a message may be unreadable, as the column `malformed` says it. The rest of its row is as usual."""

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
    ("incarnation", "string"),
    ("append_time", "timestamp"),
    ("ts_source", "string"),
    ("value_long", "bigint"),
    ("priority", "string"),
    ("ttl_ms", "bigint"),
    ("traceparent", "string"),
    ("permission_level", "int"),
    ("sink", "string"),
    ("prev_seq", "bigint"),
    ("origin", "struct<incarnation:string,seq:bigint>"),
    ("malformed", "string"),
)
"""Name and Spark type of each column, in order. All but `seq` may be null."""

DDL: Final = ", ".join(f"{name} {type}" for name, type in COLUMNS)

_ARROW: Final[dict[str, pa.DataType]] = {
    "string": pa.string(),
    "timestamp": pa.timestamp("us", tz="UTC"),
    "double": pa.float64(),
    "boolean": pa.bool_(),
    "int": pa.int32(),
    "long": pa.int64(),
    "bigint": pa.int64(),
    "binary": pa.binary(),
    "struct<group:string,time:array<bigint>>": pa.struct([("group", pa.string()), ("time", pa.list_(pa.int64()))]),
    "struct<incarnation:string,seq:bigint>": pa.struct([("incarnation", pa.string()), ("seq", pa.int64())]),
}
SCHEMA: Final = pa.schema([(name, _ARROW[type]) for name, type in COLUMNS])

# topics of a fleet, some 0.3 KB each; with more topics the cache is cleared again and again, which doubles the cost
ROUTES_DECODED_MAX: Final = 65_536
TIME_MS_MAX: Final = 253_402_300_799_999  # end of the year 9999, beyond which neither protobuf nor Spark has dates

# first bytes of a message with the usual layout -> end of its attributes
_ENDS: Final = {bytes((0x0A, size, 0x0A, 0x12, 0x09)): size + 2 for size in range(20, 0x80)}
_ID_BYTES: Final = 17  # of an encoded id: msb, the tag of lsb, lsb; both little-endian
_FORMAT_PREFIX: Final = len("UPAYLOAD_FORMAT_")
_PRIORITY_PREFIX: Final = len("UPRIORITY_")
_INT_MAX: Final = np.iinfo(np.int32).max

_TS_SOURCES: Final = pa.array(["sample", "id", "append", "bounded"])
_SAMPLE, _ID, _APPEND, _BOUNDED = range(len(_TS_SOURCES))


class RecordColumns(NamedTuple):
    """Records of one log: a column of them is as long as `seq`, or empty if it has a default."""

    seq: Sequence[int]
    time_ms: Sequence[int]  # when it was appended, Unix ms
    message: Sequence[bytes]  # UMessage
    prev_seq: Sequence[int] = ()
    epochs: Sequence[Epoch] = ()  # each once
    epoch: Sequence[int] = ()  # which of `epochs`, counted from 1; 0: none
    origin_incarnation: Sequence[bytes] = ()  # each once
    origin: Sequence[int] = ()  # which of `origin_incarnation`, counted from 1; 0: it was appended here first
    origin_seq: Sequence[int] = ()
    incomplete: Sequence[str | None] = ()  # why its epoch is not whole

    @classmethod
    def of(cls, batch: RecordBatch) -> RecordColumns:
        return cls(**{name: getattr(batch, name) for name in cls._fields if name != "incomplete"})

    def take(self, indices: Sequence[int]) -> RecordColumns:
        """The records at `indices`, in that order."""
        count = len(self.seq)
        taken = {
            name: [column[index] for index in indices] if len(column) == count else ()
            for name, column in self._asdict().items()
            if name not in ("epochs", "origin_incarnation")
        }
        return self._replace(**taken)


class Decoded(NamedTuple):
    """`malformed` counts the rows with unreadable parts by kind, one of MALFORMED."""

    batch: pa.RecordBatch
    malformed: Counter[str]


class _MessageKind(NamedTuple):
    """What all messages with the same attributes have in common. `read` is None if the format has no value."""

    number: int
    read: Callable[[Values, int, bytes], None] | None
    authority: str | None = None  # from here on as the columns
    topic: str | None = None
    sink: str | None = None
    payload_format: str | None = None
    priority: str | None = None
    ttl_ms: int | None = None
    permission_level: int | None = None

    @classmethod
    def of(cls, number: int, attributes: UAttributes) -> _MessageKind:
        format, priority, level = attributes.payload_format, attributes.priority, attributes.permission_level
        is_known = format in UPayloadFormat.values()
        has_source, has_level = attributes.HasField("source"), attributes.HasField("permission_level")
        return cls(
            number,
            READERS.get(format),
            attributes.source.authority_name if has_source else None,
            uris.format(attributes.source) if has_source else None,
            uris.format(attributes.sink) if attributes.HasField("sink") else None,
            UPayloadFormat.Name(format)[_FORMAT_PREFIX:] if is_known else str(int(format)),
            UPriority.Name(priority)[_PRIORITY_PREFIX:] if priority and priority in UPriority.values() else None,
            attributes.ttl if attributes.HasField("ttl") else None,
            level if has_level and level <= _INT_MAX else None,
        )


_UNREADABLE_KIND: Final = _MessageKind(0, None)  # its payload is the whole message
_OF_PAYLOAD: Final = {
    *("path", "ts", "ts_source", "value_double", "value_string", "value_bool", "value_long", "malformed")
}


class Decoder:
    """Caches topics over batches. Not thread-safe.

    `columns`: the columns of the batches, names of COLUMNS, in this order; None: all. What they do not need is neither
    parsed nor counted as malformed. `max_clock_ahead_ms`: `ts` is at most this much later than the append time; None:
    no limit.

    Raises UStatusError(INVALID_ARGUMENT) for an unknown column and for no column at all.
    """

    def __init__(self, columns: Sequence[str] | None = None, max_clock_ahead_ms: int | None = None) -> None:
        assert max_clock_ahead_ms is None or max_clock_ahead_ms >= 0, f"expected 0 or more, got {max_clock_ahead_ms}"
        names = SCHEMA.names if columns is None else list(columns)
        if not names or set(names) - set(SCHEMA.names):
            raise invalid(f"expected one or more of the columns {', '.join(SCHEMA.names)}; got {names}")
        self.schema = pa.schema([SCHEMA.field(name) for name in names])
        self._max_ahead_ms = None if max_clock_ahead_ms is None else min(max_clock_ahead_ms, TIME_MS_MAX)
        self._has_payload, self._is_read = "payload" in names, not _OF_PAYLOAD.isdisjoint(names)
        self._kinds: dict[bytes, _MessageKind] = {}
        self._known = [_UNREADABLE_KIND]
        self._heads: Cache[bytes, str] = Cache(HEADS_CACHED_MAX)
        self._moments: Cache[bytes, int] = Cache(MOMENTS_CACHED_MAX)

    def decode(self, records: RecordColumns, incarnation: str) -> Decoded:
        """One row for each of `records`, in order; `incarnation`: of their log, in hex.

        Null is what `records` lack: `prev_seq`, `epoch` and `origin` also if their columns do not fit together.
        """
        if len(self._known) > ROUTES_DECODED_MAX:
            self._kinds.clear()
            del self._known[1:]
        values = Values(len(records.message), self._heads, self._moments)
        rows = _Rows(records, incarnation, self._known, self._max_ahead_ms, values)
        self._fill(rows)
        made = [_BUILDERS[name](rows) for name in self.schema.names]
        return Decoded(pa.RecordBatch.from_arrays(made, schema=self.schema), Counter(values.malformed.values()))

    def _fill(self, rows: _Rows) -> None:
        known_kinds, parse, add_kind, ids = self._kinds, self._parse, rows.kinds.append, rows.ids
        has_payload, is_read, values = self._has_payload, self._is_read, rows.values
        for row, data in enumerate(rows.records.message):
            # fast path for the usual layout:  0A len ( 0A 12 09 msb 11 lsb  rest )  12 len payload
            payload: bytes | None
            end = _ENDS.get(data[:5], 0)
            kind = known_kinds.get(data[22:end]) if end and data[13:14] == b"\x11" else None
            if kind is not None and (start := _payload_start(data, end)):
                id, payload = data[5:22], data[start:] if has_payload or (is_read and kind.read) else None
            else:
                kind, id, payload = parse(rows, row, data)
            add_kind(kind.number)
            ids += id
            if has_payload:
                rows.payloads.append(payload)
            if is_read and kind.read is not None and payload is not None:
                try:
                    kind.read(values, row, payload)
                except UNREADABLE:
                    values.malformed[row] = "payload"  # a reader writes last, so it has written nothing

    def _parse(self, rows: _Rows, row: int, data: bytes) -> tuple[_MessageKind, bytes, bytes | None]:
        try:
            message = UMessage.FromString(data)
        except DecodeError:
            rows.values.malformed[row] = "message"
            return _UNREADABLE_KIND, bytes(_ID_BYTES), data
        attributes = message.attributes
        id = attributes.id.msb.to_bytes(8, "little") + b"\x11" + attributes.id.lsb.to_bytes(8, "little")
        attributes.ClearField("id")
        has_trace = attributes.HasField("traceparent")
        if has_trace:
            rows.traceparents[row] = attributes.traceparent
        # what differs in each message would fill the cache with kinds of one message
        if has_trace or not is_shared(attributes):
            for name in ("traceparent", "token", "reqid"):
                attributes.ClearField(name)
            attributes.DiscardUnknownFields()
        key = attributes.SerializeToString()
        kind = self._kinds.get(key)
        if kind is None:
            kind = self._kinds[key] = _MessageKind.of(len(self._known), attributes)
            self._known.append(kind)
        return kind, id, message.payload if message.HasField("payload") else None


class _Rows:
    """A batch that is being made: its records, and what their messages contain."""

    def __init__(
        self,
        records: RecordColumns,
        incarnation: str,
        known: Sequence[_MessageKind],
        max_ahead_ms: int | None,
        values: Values,
    ) -> None:
        self.records, self.incarnation, self.known, self.max_ahead_ms = records, incarnation, known, max_ahead_ms
        self.values, self.count = values, len(records.message)
        times_ms = np.minimum(np.asarray(records.time_ms, dtype=np.uint64), TIME_MS_MAX)
        self.appended = times_ms.astype(np.int64)  # Unix ms
        self.kinds: list[int] = []  # places in `known`
        self.ids = bytearray()
        self.payloads: list[bytes | None] = []
        self.traceparents: dict[int, str] = {}  # by row

    @cached_property
    def halves(self) -> np.ndarray[Anything, Anything]:
        """The ids: msb and lsb."""
        wire = np.frombuffer(self.ids, dtype=np.uint8).reshape(-1, _ID_BYTES)
        return np.delete(wire, 8, axis=1).view("<u8")

    @cached_property
    def used(self) -> tuple[list[_MessageKind], pa.Array]:
        """The kinds of this batch, and which one each row has."""
        numbers = pa.array(np.asarray(self.kinds, dtype=np.int32)).dictionary_encode()
        return [self.known[number] for number in numbers.dictionary.to_pylist()], numbers.indices

    @cached_property
    def times(self) -> tuple[np.ndarray[Anything, Anything], np.ndarray[Anything, Anything]]:
        """Unix microseconds, and which of _TS_SOURCES each is from."""
        micros = np.asarray(self.values.micros, dtype=np.int64)
        source = np.full(self.count, _SAMPLE, dtype=np.int8)
        without = micros == NO_TIME
        if without.any():
            created = (self.halves[:, 0] >> np.uint64(16)).astype(np.int64)
            has_created = (created > 0) & (created <= TIME_MS_MAX)
            micros = np.where(without, np.where(has_created, created, self.appended) * 1_000, micros)
            source = np.where(without, np.where(has_created, _ID, _APPEND), source)
        if self.max_ahead_ms is not None:
            latest = (self.appended + self.max_ahead_ms) * 1_000
            source = np.where(micros > latest, _BOUNDED, source)
            micros = np.minimum(micros, latest)
        return micros, source


def _of_kind(name: str) -> Callable[[_Rows], pa.Array]:
    def build(rows: _Rows) -> pa.Array:
        used, numbers = rows.used
        return pa.array([getattr(kind, name) for kind in used], SCHEMA.field(name).type).take(numbers)

    return build


def _rare(values: Mapping[int, Anything], rows: int, type: pa.DataType) -> pa.Array:
    return pa.array(list(map(values.get, range(rows))), type) if values else pa.nulls(rows, type)


def _longs(values: Sequence[int], rows: int) -> pa.Array:
    """Null are numbers of more than 63 bits, and all if there is not one for each row."""
    if len(values) != rows:
        return pa.nulls(rows, pa.int64())
    unsigned = np.asarray(values, dtype=np.uint64)
    return pa.array(unsigned.astype(np.int64), mask=unsigned > LONG_MAX)


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


def _choices(numbers: Sequence[int], choices: Sequence[Anything], rows: int, type: pa.DataType) -> pa.Array:
    """The one of `choices` that each number means, counted from 1, null for 0; all null if that is inconsistent."""
    places = np.asarray(numbers, dtype=np.int64)
    if len(places) != rows or places.max(initial=0) > len(choices):
        return pa.nulls(rows, type)
    return pa.array([None, *choices], type).take(pa.array(places))


def _epochs(rows: _Rows) -> pa.Array:
    records = rows.records
    known = [{"group": one.group, "time": list(one.time.numbers)} for one in records.epochs]
    return _choices(records.epoch, known, rows.count, SCHEMA.field("epoch").type)


def _origins(rows: _Rows) -> pa.Array:
    records, type = rows.records, SCHEMA.field("origin").type
    names = [incarnation.hex() for incarnation in records.origin_incarnation]
    logs, seqs = _choices(records.origin, names, rows.count, pa.string()), _longs(records.origin_seq, rows.count)
    return pa.StructArray.from_arrays(
        [logs, seqs], fields=list(type), mask=pa.compute.or_(logs.is_null(), seqs.is_null())
    )


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


_BUILDERS: Final[dict[str, Callable[[_Rows], pa.Array]]] = {
    **{name: _of_kind(name) for name in _MessageKind._fields if name in SCHEMA.names},
    "path": lambda rows: pa.array(rows.values.paths, pa.string()),
    "ts": lambda rows: pa.array(rows.times[0]).cast(_ARROW["timestamp"]),
    "value_double": lambda rows: pa.array(rows.values.doubles, pa.float64()),
    "value_string": lambda rows: _rare(rows.values.strings, rows.count, pa.string()),
    "value_bool": lambda rows: _rare(rows.values.bools, rows.count, pa.bool_()),
    "seq": lambda rows: _longs(rows.records.seq, rows.count),
    "message_id": lambda rows: _texts(rows.halves),
    "payload": lambda rows: pa.array(rows.payloads, pa.binary()),
    "epoch": _epochs,
    "epoch_incomplete": lambda rows: pa.array(rows.records.incomplete or [None] * rows.count, pa.string()),
    "incarnation": lambda rows: pa.repeat(rows.incarnation, rows.count),
    "append_time": lambda rows: pa.array(rows.appended * 1_000).cast(_ARROW["timestamp"]),
    "ts_source": lambda rows: _TS_SOURCES.take(pa.array(rows.times[1])),
    "value_long": lambda rows: _rare(rows.values.longs, rows.count, pa.int64()),
    "traceparent": lambda rows: _rare(rows.traceparents, rows.count, pa.string()),
    "prev_seq": lambda rows: _longs(rows.records.prev_seq, rows.count),
    "origin": _origins,
    "malformed": lambda rows: _rare(rows.values.malformed, rows.count, pa.string()),
}
assert _BUILDERS.keys() == set(SCHEMA.names)
