"""What a log keeps. A chunk: the records of one commit, as columns. The unit of storage, of reading and of retention.

UMessages -> Chunk -> encode -> Columns (one SQLite row, with CRC) -> decode -> Chunk -> data | messages, parsed on use
                        in the writer's thread                          in a reader's thread

Tail           the newest chunks, in memory
Scan           what a step of reading found
RetentionLoss  owed records that retention deleted
Stream         one topic, or the notifications from one topic to one sink; and its progress
               chunk -> growth_of -> writer's thread: StreamProgress -> Written -> loop: move -> readers
"""

from __future__ import annotations

import struct
import zlib
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any, Final, NamedTuple

from history.records.epoch import LENGTH_MAX, Epoch
from uprotocol import uri as uris
from uprotocol.core.ustreamer.ids import ENTITY, FRONTIERS
from uprotocol.encoded import Carried, EncodedMessage, Stamps
from uprotocol.v1.uri_pb2 import UUri

ID_BYTES: Final = 16  # a message id, big endian
INCARNATION_BYTES: Final = 16
SEQ_MAX: Final = (1 << 63) - 1  # the limit of SQLite, and so of every log; records begin at 1
NOBODY: Final = 1 << 62  # beyond every seq: the lowest seq if there is no cursor
RECORD_MEMORY_BYTES: Final = 800  # memory of a record besides its bytes (message object, columns); measured
ORIGIN_MEMORY_BYTES: Final = 100  # ... and of its origin, if it was followed
# of an origin in a reply: its log (2 bytes for 10,000 logs) and its seq; and once for each log its incarnation and a
# tag
ORIGIN_BYTES: Final = 11
ORIGIN_LOG_BYTES: Final = INCARNATION_BYTES + 2
EPOCH_MEMORY_BYTES: Final = 8  # one pointer for each record; the epochs themselves are shared
EPOCH_BYTES: Final = 3  # of a record in a reply: the index of its epoch ...
EPOCH_EACH_BYTES: Final = 80 + 11 * LENGTH_MAX  # ... and once for each epoch: its group and its numbers
PASSED_RECORDS_MAX = 1_000  # in one second of retention; beyond that only ranges are handed over, not messages
PASSED_BYTES_MAX = 1 << 20  # of their messages
TAIL_SCAN_CHUNKS_MAX: Final = 1_024  # read in one step on the loop, some milliseconds
_STAMPS = Stamps()  # a cache, so one is enough for all logs
_HEADER = struct.Struct("<QIQ")  # first_seq, records, time_ms
_AUTHORITY_TAG: Final = b"\x0a"  # field 1 of a serialised UUri, followed by ...
_LENGTH_MAX: Final = 0x80  # ... its length; lengths from here on take more bytes
_FRONTIERS: Final = UUri(ue_version_major=1, resource_id=FRONTIERS).SerializeToString()  # the end of such an address


class Origin(NamedTuple):
    """Where a record was first appended, if it was followed from another log."""

    incarnation: bytes  # of that log
    seq: int  # in that log


class Chunk:
    """Records in log order. Their seqs are contiguous, unless the chunk was made by `select`.

    `time_ms` is the append time in Unix milliseconds; `streams`, `prev_seqs` and `data` have one entry per record, and
    so have `origins` and `epochs`, unless they are None: none of the records was followed, or has an epoch. Never
    changed once made. A `bare` one has no messages.
    """

    __slots__ = (
        *("_data", "_messages", "_stream_set"),
        *("epochs", "first_seq", "last_seq", "origins", "prev_seqs", "seqs", "streams", "time_ms"),
    )

    def __init__(
        self,
        seqs: Sequence[int],
        time_ms: int,
        streams: list[int],
        prev_seqs: list[int],
        data: list[bytes] | None = None,
        messages: Sequence[Carried] | None = None,
        origins: list[Origin | None] | None = None,
        epochs: list[Epoch | None] | None = None,
    ) -> None:
        assert len(seqs) == len(streams) == len(prev_seqs) > 0, "a chunk has records, and each column an entry for each"
        assert origins is None or len(origins) == len(seqs), "one for each record, or none at all"
        assert epochs is None or len(epochs) == len(seqs), "one for each record, or none at all"
        assert data is not None or messages is not None, "a chunk holds its messages in one form at least"
        self.seqs, self.first_seq, self.last_seq = seqs, seqs[0], seqs[-1]
        self.time_ms, self.streams, self.prev_seqs = time_ms, streams, prev_seqs
        self._data, self._messages, self.origins, self.epochs = data, messages, origins, epochs
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
        """Each message: the objects that were appended, while the chunk is in memory; otherwise parsed on first use."""
        if self._messages is None:
            self._messages = list(map(_STAMPS.read, self.data))
        return self._messages

    @property
    def stream_set(self) -> frozenset[int]:
        if self._stream_set is None:
            self._stream_set = frozenset(self.streams)
        return self._stream_set

    def slice(self, begin: int, end: int) -> Chunk:
        """Returns the records with the indexes [begin, end)."""
        if begin == 0 and end >= len(self):
            return self
        return self._part(lambda column: column[begin:end])

    def after(self, seq: int) -> Chunk:
        """Returns the records with a greater seq; there must be one."""
        return self if seq < self.first_seq else self.slice(bisect_right(self.seqs, seq), len(self))

    def bare(self) -> Chunk:
        """Returns the numbers of the records alone: without messages, origins and epochs."""
        return Chunk(self.seqs, self.time_ms, self.streams, self.prev_seqs, [])

    def select(self, wanted: Set[int]) -> Chunk | None:
        """Returns the records of the streams `wanted`; None: no record."""
        if self.stream_set <= wanted:
            return self
        indexes = [index for index, stream in enumerate(self.streams) if stream in wanted]
        return self._part(lambda column: [column[index] for index in indexes]) if indexes else None

    def pick(self, indexes: Sequence[int], prev_seqs: list[int]) -> Chunk:
        """Returns the records at these indexes, with other predecessors."""
        picked = self._part(lambda column: [column[index] for index in indexes])
        picked.prev_seqs = prev_seqs
        return picked

    def _part(self, pick: Callable[[Any], Any]) -> Chunk:
        """Returns a chunk with the part of each column that `pick` returns."""
        data, messages, origins, epochs = self._data, self._messages, self.origins, self.epochs
        columns = (pick(self.streams), pick(self.prev_seqs), data and pick(data), messages and pick(messages))
        if origins is not None and not any(origins := pick(origins)):
            origins = None
        if epochs is not None and not any(epochs := pick(epochs)):
            epochs = None
        return Chunk(pick(self.seqs), self.time_ms, *columns, origins, epochs)

    def within(self, records_max: int, bytes_max: int, at_least: int = 0) -> tuple[int, int]:
        """Returns how many of the first records are within both limits (`at_least`: or so many), and the bytes that
        these take in a reply: messages, origins and epochs, without the numbers that all records have."""
        sizes = list(map(len, self.data))
        logs: set[bytes] = set()
        for index, origin in enumerate(self.origins or ()):
            if origin is not None:
                sizes[index] += ORIGIN_BYTES + ORIGIN_LOG_BYTES * (origin.incarnation not in logs)
                logs.add(origin.incarnation)
        known: set[Epoch | None] = {None}
        for index, epoch in enumerate(self.epochs or ()):
            sizes[index] += EPOCH_BYTES + EPOCH_EACH_BYTES * (epoch not in known)
            known.add(epoch)
        ends = list(accumulate(sizes, initial=0))
        fits = max(at_least, min(bisect_right(ends, bytes_max) - 1, records_max))
        return fits, ends[fits]


class CorruptChunkError(Exception):
    """The bytes of a stored chunk are not those that were written."""


class Columns(NamedTuple):
    """A chunk as it is stored: a row of the table."""

    first_seq: int
    records: int
    time_ms: int
    size: int  # of the last three
    crc: int
    streams: bytes  # the set of its streams, u32 each: for retention, which updates the index, and for scans
    ids: bytes  # 16 per record
    # u32 stream, u64 prev_seq, u32 length of each record, then the messages, then origins and epochs (see below)
    data: bytes

    @property
    def last_seq(self) -> int:
        return self.first_seq + self.records - 1


def message_id(message: Carried) -> bytes:
    """16 bytes, big endian."""
    if type(message) is EncodedMessage:
        return message.id_bytes
    id = message.attributes.id
    return struct.pack(">QQ", id.msb, id.lsb)


def encode(chunk: Chunk) -> Columns:
    records, data = len(chunk), chunk.data
    lengths = struct.pack(f"<{records}I", *map(len, data))
    numbers = struct.pack(f"<{records}I{records}Q", *chunk.streams, *chunk.prev_seqs)
    has_notes = chunk.origins is not None or chunk.epochs is not None
    blob = b"".join((numbers, lengths, *data, pack_notes(chunk) if has_notes else b""))
    streams = struct.pack(f"<{len(chunk.stream_set)}I", *sorted(chunk.stream_set))
    ids = b"".join(map(message_id, chunk.messages))
    crc = _crc(chunk.first_seq, records, chunk.time_ms, streams, ids, blob)
    size = len(streams) + len(ids) + len(blob)
    return Columns(chunk.first_seq, records, chunk.time_ms, size, crc, streams, ids, blob)


def decode(columns: Columns) -> Chunk:
    """Raises CorruptChunkError."""
    first_seq, records, time_ms, data = columns.first_seq, columns.records, columns.time_ms, columns.data
    if columns.crc != _crc(first_seq, records, time_ms, columns.streams, columns.ids, data):
        raise CorruptChunkError(f"the checksum of the records {first_seq}..{columns.last_seq} is wrong")
    try:
        numbers = struct.unpack_from(f"<{records}I{records}Q{records}I", data)
    except struct.error:
        raise CorruptChunkError(f"the columns of {records} records from {first_seq} on end too early") from None
    ends = list(accumulate(numbers[2 * records :], initial=16 * records))
    notes = unpack_notes(data[ends[-1] :], records)
    # damaged bytes may have the right checksum by chance
    if not records or notes is None:
        raise CorruptChunkError(
            f"{records} records from {first_seq} on take {ends[-1]} bytes, and there are {len(data)}"
        )
    messages = [data[begin:end] for begin, end in pairwise(ends)]
    streams, prev_seqs = list(numbers[:records]), list(numbers[records : 2 * records])
    return Chunk(range(first_seq, first_seq + records), time_ms, streams, prev_seqs, messages, None, *notes)


# Behind the messages of a chunk: its origins, if there are any, then a mark and its epochs, if there are any

Notes = tuple[list[Origin | None] | None, list[Epoch | None] | None]
_EPOCHS: Final = b"\xff\xff"  # origins never have so many logs


def pack_notes(chunk: Chunk) -> bytes:
    origins = b"" if chunk.origins is None else pack_origins(chunk.origins)
    return origins if chunk.epochs is None else b"".join((origins, _EPOCHS, pack_epochs(chunk.epochs)))


def unpack_notes(packed: bytes, records: int) -> Notes | None:
    """Returns None if these bytes are damaged."""
    end = 0
    if packed and not packed.startswith(_EPOCHS):
        end = 2 + INCARNATION_BYTES * int.from_bytes(packed[:2], "little") + 10 * records
    origins = unpack_origins(packed[:end], records) if end else None
    if (end and origins is None) or packed[end : end + 2] not in (b"", _EPOCHS):
        return None
    if end == len(packed):
        return origins, None
    epochs = unpack_epochs(packed[end + 2 :], records)
    return None if epochs is None else (origins, epochs)


# Of a chunk with followed records. Logs: u16 how many, 16 bytes each; then u16 of each record: which of them, counted
# from 1, or 0, and then u64 of each: its seq there, or 0


def pack_origins(origins: Sequence[Origin | None]) -> bytes:
    logs: dict[bytes, int] = {}
    which = numbered(origins, logs)
    seqs = [0 if origin is None else origin.seq for origin in origins]
    return b"".join((struct.pack("<H", len(logs)), *logs, struct.pack(f"<{len(which)}H{len(which)}Q", *which, *seqs)))


def unpack_origins(packed: bytes, records: int) -> list[Origin | None] | None:
    """Returns None if these bytes are damaged."""
    begin = 2 + INCARNATION_BYTES * int.from_bytes(packed[:2], "little")
    if len(packed) != begin + 10 * records:
        return None
    logs = [packed[at : at + INCARNATION_BYTES] for at in range(2, begin, INCARNATION_BYTES)]
    numbers = struct.unpack_from(f"<{records}H{records}Q", packed, begin)
    which, seqs = numbers[:records], numbers[records:]
    if not 0 < max(which, default=0) <= len(logs):
        return None
    origins = [Origin(logs[one - 1], seq) if one else None for one, seq in zip(which, seqs, strict=True)]
    return origins if pack_origins(origins) == packed else None


def numbered(origins: Iterable[Origin | None], logs: dict[bytes, int]) -> list[int]:
    """Returns the number of each origin's log, counted from 1; 0 for None. New logs are added to `logs`."""
    return [0 if origin is None else logs.setdefault(origin.incarnation, len(logs) + 1) for origin in origins]


# Of a chunk with records that have epochs. Epochs: u16 how many; of each u8 length of its group, u8 how many numbers,
# the group as UTF-8, i64 each number; then u16 of each record: which of them, counted from 1, or 0


def pack_epochs(epochs: Sequence[Epoch | None]) -> bytes:
    known: dict[Epoch, int] = {}
    which = [0 if epoch is None else known.setdefault(epoch, len(known) + 1) for epoch in epochs]
    parts = [struct.pack("<H", len(known))]
    for group, time in known:
        name = group.encode()
        parts += (struct.pack("<BB", len(name), len(time)), name, struct.pack(f"<{len(time)}q", *time))
    parts.append(struct.pack(f"<{len(which)}H", *which))
    return b"".join(parts)


def unpack_epochs(packed: bytes, records: int) -> list[Epoch | None] | None:
    """Returns None if these bytes are damaged."""
    known: list[Epoch | None] = [None]
    try:
        (count,) = struct.unpack_from("<H", packed)
        end = 2
        for _ in range(count):
            length, numbers = struct.unpack_from("<BB", packed, end)
            end += 2 + length
            known.append(Epoch(packed[end - length : end].decode(), struct.unpack_from(f"<{numbers}q", packed, end)))
            end += 8 * numbers
        epochs = [known[one] for one in struct.unpack_from(f"<{records}H", packed, end)]
    except (struct.error, UnicodeDecodeError, IndexError):
        return None
    return epochs if any(epochs) and pack_epochs(epochs) == packed else None


def unpack_streams(packed: bytes) -> tuple[int, ...]:
    return struct.unpack(f"<{len(packed) // 4}I", packed[: len(packed) // 4 * 4])


def _crc(first_seq: int, records: int, time_ms: int, streams: bytes, ids: bytes, data: bytes) -> int:
    crc = zlib.crc32(_HEADER.pack(first_seq % (1 << 64), records % (1 << 32), time_ms % (1 << 64)))
    return zlib.crc32(data, zlib.crc32(ids, zlib.crc32(streams, crc)))


@dataclass(slots=True)
class Scan:
    """The result of one step of reading."""

    after: int
    until: int
    records_left: int  # of the requested ones
    bytes_left: int
    strict: bool = False  # False: the first record is taken even if it is too large
    is_bare: bool = False  # bare chunks are enough: no message is read, and bytes are not limited
    chunks: list[Chunk] = field(default_factory=list)
    # (after, before): the records between can't be read any more
    gaps: list[tuple[int, int]] = field(default_factory=list)
    covered: int = 0  # every requested record up to this seq is in `chunks` or in `gaps`
    # (after, before, why) of damaged chunks, each once
    damaged: list[tuple[int, int, str]] = field(default_factory=list)
    floor_seq: int = 0  # records up to here were deleted by retention before this step
    is_index_wrong: bool = False  # the records were read without it
    full: bool = False  # the next record would exceed a limit

    def __post_init__(self) -> None:
        self.covered = self.after

    def take(self, chunk: Chunk, wanted: Set[int] | None) -> None:
        """Add the requested records of `chunk`, which has some beyond `after`."""
        self.covered = min(chunk.last_seq, self.until)
        if chunk.first_seq > self.until:
            return
        if self.is_bare:
            chunk = chunk.bare()
        if chunk.first_seq <= self.after:
            chunk = chunk.after(self.after)
        if chunk.last_seq > self.until:
            chunk = chunk.slice(0, bisect_right(chunk.seqs, self.until))
        part = chunk if wanted is None else chunk.select(wanted)
        if part is None:
            return
        if self.is_bare:
            fits, bytes = min(len(part), self.records_left), 0
        else:
            is_taken = not self.chunks and not self.strict
            fits, bytes = part.within(self.records_left, self.bytes_left, at_least=int(is_taken))
        if fits < len(part):
            self.full = True
            self.covered = part.seqs[fits] - 1
            if not fits:
                return
            part = part.slice(0, fits)
        self.chunks.append(part)
        self.records_left -= len(part)
        self.bytes_left -= bytes
        self.full = self.full or self.records_left <= 0 or self.bytes_left <= 0


class Tail:
    """The newest chunks, within a limit of memory."""

    def __init__(self, after: int, bytes_max: int) -> None:
        self.after = after  # all records beyond it are here
        self.bytes_max = bytes_max
        self.bytes = 0
        self.chunks: list[Chunk] = []
        self._last_seqs: list[int] = []
        self._sizes: list[int] = []
        self._free = 0  # entries at the front that are empty; removed now and then, because that moves all others

    def __len__(self) -> int:
        return len(self.chunks) - self._free

    def push(self, chunk: Chunk, message_bytes: int) -> list[Chunk]:
        """Add a chunk. Returns the chunks that were removed for it."""
        record_bytes = RECORD_MEMORY_BYTES if chunk.origins is None else RECORD_MEMORY_BYTES + ORIGIN_MEMORY_BYTES
        record_bytes += 0 if chunk.epochs is None else EPOCH_MEMORY_BYTES
        bytes = 2 * message_bytes + record_bytes * len(chunk)  # as objects, and as bytes
        self.chunks.append(chunk)
        self._last_seqs.append(chunk.last_seq)
        self._sizes.append(bytes)
        self.bytes += bytes
        removed: list[Chunk] = []
        while self.bytes > self.bytes_max and len(self) > 1:
            removed.append(self.pop())
        return removed

    def pop(self) -> Chunk:
        """Remove the oldest chunk, and return it."""
        index = self._free
        chunk = self.chunks[index]
        self.after = self._last_seqs[index]
        self.bytes -= self._sizes[index]
        self.chunks[index] = None  # type: ignore[call-overload]
        self._free += 1
        if self._free > 256 and self._free * 2 > len(self.chunks):
            del self.chunks[: self._free], self._last_seqs[: self._free], self._sizes[: self._free]
            self._free = 0
        return chunk

    @property
    def oldest(self) -> Chunk | None:
        return self.chunks[self._free] if len(self) else None

    def read(self, after: int) -> list[Chunk]:
        """Returns the records after `after`, which must not be less than `Tail.after`."""
        found = self.chunks[bisect_right(self._last_seqs, after, lo=self._free) :]
        if found and found[0].first_seq <= after:
            found[0] = found[0].after(after)
        return found

    def scan(self, found: Scan, streams: Set[int] | None) -> Scan:
        """One bounded step of a scan that begins in the tail. Returns `found`."""
        begin = bisect_right(self._last_seqs, found.after, lo=self._free)
        chunks = self.chunks[begin : begin + TAIL_SCAN_CHUNKS_MAX]
        for chunk in chunks:
            if chunk.first_seq > found.until:
                break
            found.take(chunk, streams)
            if found.full:
                return found
        if len(chunks) < TAIL_SCAN_CHUNKS_MAX:
            found.covered = max(found.covered, found.until)
        return found


class RetentionLoss(NamedTuple):
    """Retention has deleted the records in (after, before) before a cursor with a holder had passed them."""

    after: int
    before: int
    chunks: list[Chunk]  # these records, oldest first, as far as the allowance reaches and they can be read


class Allowance:
    """How many records of a RetentionLoss may still be handed over before the next `refill`."""

    def __init__(self) -> None:
        self.refill()

    def refill(self) -> None:
        self._records, self._bytes = PASSED_RECORDS_MAX, PASSED_BYTES_MAX

    def take(self, chunks: Iterable[Chunk], after: int) -> list[Chunk]:
        """Returns the first records of `chunks` beyond `after`. Chunks that are not needed are not read."""
        taken: list[Chunk] = []
        if self._records <= 0 or self._bytes <= 0:
            return taken
        for chunk in chunks:
            if chunk.last_seq <= after:
                continue
            chunk = chunk.after(after)
            fits, bytes = chunk.within(self._records, self._bytes)
            if fits:
                taken.append(chunk.slice(0, fits))
                self._bytes -= bytes
            self._records = self._records - fits if fits == len(chunk) else 0
            if not self._records:
                break
        return taken


# -- streams


StreamProgress = tuple[int, int, int, bytes, int]
"""Of a stream: its first and newest seq, the number of its records, and the id and append time (ms) of the newest
one."""
NO_RECORDS: Final[StreamProgress] = (0, 0, 0, b"", 0)


class Stream:
    """One (source, sink). It belongs to the event loop, which moves it after each commit.

    Addresses are kept as bytes, because there may be very many: a UUri takes ten times the memory.
    """

    __slots__ = (
        "first_seq",
        "id",
        "newest_id",
        "newest_seq",
        "newest_time_ms",
        "records",
        "sink_bytes",
        "source_bytes",
    )

    def __init__(self, id: int, source: bytes, sink: bytes | None, progress: StreamProgress = NO_RECORDS) -> None:
        self.id, self.source_bytes, self.sink_bytes = id, source, sink
        self.move(progress)

    def __repr__(self) -> str:
        return f"Stream({self.id}, newest_seq={self.newest_seq}, records={self.records})"

    @property
    def source(self) -> UUri:
        """A new object each time."""
        return UUri.FromString(self.source_bytes)

    @property
    def sink(self) -> UUri | None:
        """A new object each time."""
        return None if self.sink_bytes is None else UUri.FromString(self.sink_bytes)

    @property
    def address(self) -> bytes | tuple[bytes, bytes]:
        return self.source_bytes if self.sink_bytes is None else (self.source_bytes, self.sink_bytes)

    @property
    def progress(self) -> StreamProgress:
        return self.first_seq, self.newest_seq, self.records, self.newest_id, self.newest_time_ms

    def row(self, progress: StreamProgress) -> tuple[Any, ...]:
        """Returns the row of the table STREAM, with that progress."""
        return (self.id, self.source_bytes, self.sink_bytes, *progress)

    def move(self, progress: StreamProgress) -> None:
        self.first_seq, self.newest_seq, self.records, self.newest_id, self.newest_time_ms = progress

    def grow(self, first_seq: int, newest_seq: int, records: int, newest_id: bytes, time_ms: int) -> None:
        self.move((self.first_seq or first_seq, newest_seq, self.records + records, newest_id, time_ms))


def growth_of(first_seq: int, streams: Sequence[int], ids: bytes, time_ms: int) -> Iterator[tuple[int, StreamProgress]]:
    """Yields the id of each stream of a chunk, and its progress within the chunk alone."""
    newest = dict(zip(streams, range(len(streams)), strict=True))
    first = dict(zip(reversed(streams), range(len(streams) - 1, -1, -1), strict=True))
    counts = Counter(streams)
    for id, index in newest.items():
        newest_id = ids[index * ID_BYTES : (index + 1) * ID_BYTES]
        yield id, (first_seq + first[id], first_seq + index, counts[id], newest_id, time_ms)


def address_of(source: UUri, sink: UUri | None) -> bytes | tuple[bytes, bytes]:
    """Returns the same for the same address, even if a sender has added unknown fields."""
    return plain_address(source) if sink is None else (plain_address(source), plain_address(sink))


def plain_address(uri: UUri) -> bytes:
    """Returns the form in which a log stores this address."""
    return UUri(
        authority_name=uri.authority_name,
        ue_id=uri.ue_id,
        ue_version_major=uri.ue_version_major,
        resource_id=uri.resource_id,
    ).SerializeToString()


def authority_of(address: bytes) -> str:
    """Returns the authority of a serialised UUri."""
    if address[:1] == _AUTHORITY_TAG and address[1] < _LENGTH_MAX:  # without parsing: there may be very many
        return address[2 : 2 + address[1]].decode()
    return UUri.FromString(address).authority_name


def kind_of(address: bytes) -> bytes:
    """Returns a serialised UUri without its authority. A fleet has as many kinds of topics as one vehicle has
    topics."""
    if address[:1] == _AUTHORITY_TAG and address[1] < _LENGTH_MAX:
        return address[2 + address[1] :]
    uri = UUri.FromString(address)
    uri.authority_name = ""
    return uri.SerializeToString()


_ALL_OF_ONE: Final = kind_of(uris.ANY.SerializeToString())


def is_frontier(stream: Stream) -> bool:
    """Returns True for a topic that carries frontiers of epochs."""
    if not stream.source_bytes.endswith(_FRONTIERS):
        return False
    source = stream.source
    return stream.sink_bytes is None and source.resource_id == FRONTIERS and source.ue_id & 0xFFFF == ENTITY


def is_publish(stream: Stream) -> bool:
    """Returns True if there is no sink, or one that a streamer has set (an authority, everything else wildcard)."""
    return stream.sink_bytes is None or kind_of(stream.sink_bytes) == _ALL_OF_ONE
