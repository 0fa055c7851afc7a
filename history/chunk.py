"""A chunk: the records of one commit, as columns. The unit of storage, of reading and of retention.

UMessages -> Chunk -> encode -> Columns (one SQLite row, with CRC) -> decode -> Chunk -> data | messages, parsed on use
                        in the writer's thread                          in a reader's thread
"""

from __future__ import annotations

import struct
import zlib
from bisect import bisect_right
from collections.abc import Sequence, Set
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Final

from uprotocol.encoded import Carried, EncodedMessage, Stamps

ID_BYTES: Final = 16  # a message id, big endian
_STAMPS = Stamps()  # a cache only, so one for all logs
_HEADER = struct.Struct("<QIQ")  # first_seq, records, time_ms


class Chunk:
    """Records in log order. Their seqs are contiguous, unless the chunk was made by `select`.

    `time_ms` is the append time in Unix milliseconds; `streams`, `prev_seqs` and `data` have one entry per record.
    Never changed once made.
    """

    __slots__ = (
        *("_data", "_messages", "_stream_set", "first_seq", "last_seq", "prev_seqs", "seqs", "streams", "time_ms"),
    )

    def __init__(
        self,
        seqs: Sequence[int],
        time_ms: int,
        streams: list[int],
        prev_seqs: list[int],
        data: list[bytes] | None = None,
        messages: Sequence[Carried] | None = None,
    ) -> None:
        assert len(seqs) == len(streams) == len(prev_seqs) > 0, (
            "a chunk has records, and every column one entry for each"
        )
        assert data is not None or messages is not None, "a chunk holds its messages in one form at least"
        self.seqs, self.first_seq, self.last_seq = seqs, seqs[0], seqs[-1]
        self.time_ms, self.streams, self.prev_seqs = time_ms, streams, prev_seqs
        self._data, self._messages = data, messages
        self._stream_set: frozenset[int] | None = None

    def __repr__(self) -> str:
        return f"Chunk({self.first_seq}..{self.last_seq}, records={len(self)})"

    def __len__(self) -> int:
        return len(self.streams)

    @property
    def data(self) -> list[bytes]:
        """Each UMessage as bytes."""
        if self._data is None:
            assert self._messages is not None
            self._data = [message.SerializeToString() for message in self._messages]
        return self._data

    @property
    def messages(self) -> Sequence[Carried]:
        """Each message: the very objects that were appended while the chunk is in memory, else parsed on first use."""
        if self._messages is None:
            self._messages = list(map(_STAMPS.read, self.data))
        return self._messages

    @property
    def stream_set(self) -> frozenset[int]:
        if self._stream_set is None:
            self._stream_set = frozenset(self.streams)
        return self._stream_set

    def slice(self, begin: int, end: int) -> Chunk:
        """The records at the places [begin, end)."""
        if begin == 0 and end >= len(self):
            return self
        return Chunk(
            self.seqs[begin:end],
            self.time_ms,
            self.streams[begin:end],
            self.prev_seqs[begin:end],
            None if self._data is None else self._data[begin:end],
            None if self._messages is None else self._messages[begin:end],
        )

    def after(self, seq: int) -> Chunk:
        """The records with a greater seq; there must be one."""
        return self if seq < self.first_seq else self.slice(bisect_right(self.seqs, seq), len(self))

    def until(self, seq: int) -> Chunk:
        """The records up to and with `seq`; there must be one."""
        return self if seq >= self.last_seq else self.slice(0, bisect_right(self.seqs, seq))

    def select(self, wanted: Set[int]) -> Chunk | None:
        """The records of the streams `wanted`, or None if there is none."""
        if self.stream_set <= wanted:
            return self
        places = [place for place, stream in enumerate(self.streams) if stream in wanted]
        if not places:
            return None
        return Chunk(
            [self.seqs[place] for place in places],
            self.time_ms,
            [self.streams[place] for place in places],
            [self.prev_seqs[place] for place in places],
            None if self._data is None else [self._data[place] for place in places],
            None if self._messages is None else [self._messages[place] for place in places],
        )

    def places_within(self, records_max: int, bytes_max: int) -> int:
        """How many of the first records keep both limits."""
        fits = bisect_right(list(accumulate(map(len, self.data))), bytes_max)
        return max(0, min(fits, records_max))


class CorruptChunkError(Exception):
    """The bytes of a stored chunk are not those that were written."""


@dataclass(frozen=True, slots=True)
class Columns:
    """A chunk as it is stored."""

    first_seq: int
    records: int
    time_ms: int
    streams: bytes  # the set of its streams, u32 each: what retention must unindex, and what a scan looks at first
    ids: bytes  # 16 per record
    data: bytes  # u32 stream, u64 prev_seq, u32 length of each record, then the messages
    crc: int

    @property
    def bytes(self) -> int:
        return len(self.streams) + len(self.ids) + len(self.data)

    @property
    def last_seq(self) -> int:
        return self.first_seq + self.records - 1


def message_id(message: Carried) -> bytes:
    """16 bytes, big endian."""
    if type(message) is EncodedMessage:
        return message.id_bytes
    id = message.attributes.id
    return struct.pack(">QQ", id.msb, id.lsb)


def message_ids(messages: Sequence[Carried]) -> bytes:
    """16 bytes for each, big endian."""
    return b"".join(map(message_id, messages))


def encode(chunk: Chunk) -> Columns:
    records = len(chunk)
    data = chunk.data
    blob = b"".join(
        (
            struct.pack(f"<{records}I", *chunk.streams),
            struct.pack(f"<{records}Q", *chunk.prev_seqs),
            struct.pack(f"<{records}I", *map(len, data)),
            *data,
        )
    )
    streams = pack_streams(chunk.stream_set)
    ids = message_ids(chunk.messages)
    first_seq, time_ms = chunk.first_seq, chunk.time_ms
    return Columns(
        first_seq, records, time_ms, streams, ids, blob, _crc(first_seq, records, time_ms, streams, ids, blob)
    )


def decode(columns: Columns) -> Chunk:
    """Raises CorruptChunkError."""
    records, data = columns.records, columns.data
    if columns.crc != _crc(columns.first_seq, records, columns.time_ms, columns.streams, columns.ids, data):
        raise CorruptChunkError(f"the checksum of the records {columns.first_seq}..{columns.last_seq} is wrong")
    try:
        streams = struct.unpack_from(f"<{records}I", data, 0)
        prev_seqs = struct.unpack_from(f"<{records}Q", data, 4 * records)
        lengths = struct.unpack_from(f"<{records}I", data, 12 * records)
    except struct.error:
        raise CorruptChunkError(f"the columns of {records} records from {columns.first_seq} on end too early") from None
    ends = list(accumulate(lengths, initial=16 * records))
    if not records or ends[-1] != len(data):  # a wrong checksum may be right by chance
        raise CorruptChunkError(
            f"{records} records from {columns.first_seq} on take {ends[-1]} bytes, and there are {len(data)}"
        )
    messages = [data[begin:end] for begin, end in pairwise(ends)]
    return Chunk(
        range(columns.first_seq, columns.first_seq + records), columns.time_ms, list(streams), list(prev_seqs), messages
    )


def pack_streams(streams: Set[int]) -> bytes:
    return struct.pack(f"<{len(streams)}I", *sorted(streams))


def unpack_streams(packed: bytes) -> tuple[int, ...]:
    return struct.unpack(f"<{len(packed) // 4}I", packed[: len(packed) // 4 * 4])


def _crc(first_seq: int, records: int, time_ms: int, streams: bytes, ids: bytes, data: bytes) -> int:
    crc = zlib.crc32(_HEADER.pack(first_seq % (1 << 64), records % (1 << 32), time_ms % (1 << 64)))
    return zlib.crc32(data, zlib.crc32(ids, zlib.crc32(streams, crc)))


@dataclass(slots=True)
class Scan:
    """What one step of reading found."""

    after: int
    records_left: int  # of what was asked for
    bytes_left: int
    strict: bool = False  # else the first record is taken even if it is too big
    chunks: list[Chunk] = field(default_factory=list)
    # (after, before): the records in between can't be read any more
    gaps: list[tuple[int, int]] = field(default_factory=list)
    covered: int = 0  # every record asked for up to this seq is in `chunks` or in `gaps`
    # (after, before, why) of damaged chunks, each once
    damaged: list[tuple[int, int, str]] = field(default_factory=list)
    floor_seq: int = 0  # records up to here were deleted by retention before this step looked
    is_index_wrong: bool = False  # it was read without it
    full: bool = False  # the next record would exceed what was asked for

    def __post_init__(self) -> None:
        self.covered = self.after

    def take(self, chunk: Chunk, until: int, wanted: Set[int] | None) -> None:
        """Add what is asked for of `chunk`, which reaches beyond `after`."""
        chunk = chunk.after(self.after)
        self.covered = min(chunk.last_seq, until)
        if chunk.first_seq > until:
            return
        part = chunk.until(until) if wanted is None else chunk.until(until).select(wanted)
        if part is None:
            return
        fits = part.places_within(self.records_left, self.bytes_left)
        if not self.chunks and not self.strict:
            fits = max(fits, 1)
        if fits < len(part):
            self.full = True
            self.covered = part.seqs[fits] - 1
            if not fits:
                return
            part = part.slice(0, fits)
        self.chunks.append(part)
        self.records_left -= len(part)
        self.bytes_left -= sum(map(len, part.data))
        self.full = self.full or self.records_left <= 0 or self.bytes_left <= 0
