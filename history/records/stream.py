"""A stream: one topic, or the notifications from one topic to one sink; and its progress.

chunk -> growth_of -> writer's thread: StreamProgress -> Written -> loop: move -> readers
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, Final

from history.records.chunk import ID_BYTES
from uprotocol import uri as uris
from uprotocol.core.ustreamer.ids import ENTITY, FRONTIERS
from uprotocol.v1.uri_pb2 import UUri

_AUTHORITY_TAG: Final = b"\x0a"  # field 1 of a serialised UUri, followed by ...
_LENGTH_MAX: Final = 0x80  # ... its length; lengths from here on take more bytes

_FRONTIERS: Final = UUri(ue_version_major=1, resource_id=FRONTIERS).SerializeToString()  # the end of such an address

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
