"""A stream: one topic, or the notifications from one topic to one sink; and how far it has come.

chunk -> growth_of -> writer's thread: places -> Written -> loop: move -> readers
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, Final

from history.records.chunk import ID_BYTES
from uprotocol import uri as uris
from uprotocol.core.ustreamer.ids import ENTITY, FRONTIERS
from uprotocol.v1.uri_pb2 import UUri

_AUTHORITY_TAG: Final = b"\x0a"  # field 1 of a UUri, as protobuf writes it, and then ...
_LENGTH_MAX: Final = 0x80  # ... its length; longer ones take more bytes

_FRONTIERS: Final = UUri(ue_version_major=1, resource_id=FRONTIERS).SerializeToString()  # as such an address ends

Place = tuple[int, int, int, bytes, int]
"""How far a stream has come: its first and newest seq, how many records, the newest one's id and time."""
NOWHERE: Final[Place] = (0, 0, 0, b"", 0)


class Stream:
    """One (source, sink). It belongs to the event loop, and moves when a commit is done.

    The addresses are kept as bytes, since there may be millions: a UUri takes ten times as much.
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

    def __init__(self, id: int, source: bytes, sink: bytes | None, place: Place = NOWHERE) -> None:
        self.id, self.source_bytes, self.sink_bytes = id, source, sink
        self.move(place)

    def __repr__(self) -> str:
        return f"Stream({self.id}, newest_seq={self.newest_seq}, records={self.records})"

    @property
    def source(self) -> UUri:
        """Made anew each time."""
        return UUri.FromString(self.source_bytes)

    @property
    def sink(self) -> UUri | None:
        """Made anew each time."""
        return None if self.sink_bytes is None else UUri.FromString(self.sink_bytes)

    @property
    def address(self) -> bytes | tuple[bytes, bytes]:
        return self.source_bytes if self.sink_bytes is None else (self.source_bytes, self.sink_bytes)

    @property
    def place(self) -> Place:
        return self.first_seq, self.newest_seq, self.records, self.newest_id, self.newest_time_ms

    def row(self, place: Place) -> tuple[Any, ...]:
        """As it is stored, with that place."""
        return (self.id, self.source_bytes, self.sink_bytes, *place)

    def move(self, place: Place) -> None:
        self.first_seq, self.newest_seq, self.records, self.newest_id, self.newest_time_ms = place

    def grow(self, first_seq: int, newest_seq: int, records: int, newest_id: bytes, time_ms: int) -> None:
        self.move((self.first_seq or first_seq, newest_seq, self.records + records, newest_id, time_ms))


def growth_of(first_seq: int, streams: Sequence[int], ids: bytes, time_ms: int) -> Iterator[tuple[int, Place]]:
    """What each stream of a chunk has there."""
    newest = dict(zip(streams, range(len(streams)), strict=True))
    first = dict(zip(reversed(streams), range(len(streams) - 1, -1, -1), strict=True))
    counts = Counter(streams)
    for id, place in newest.items():
        newest_id = ids[place * ID_BYTES : (place + 1) * ID_BYTES]
        yield id, (first_seq + first[id], first_seq + place, counts[id], newest_id, time_ms)


def address_of(source: UUri, sink: UUri | None) -> bytes | tuple[bytes, bytes]:
    """The same for the same address, whatever unknown fields a sender has put into it."""
    return plain_address(source) if sink is None else (plain_address(source), plain_address(sink))


def plain_address(uri: UUri) -> bytes:
    """As the log has it."""
    return UUri(
        authority_name=uri.authority_name,
        ue_id=uri.ue_id,
        ue_version_major=uri.ue_version_major,
        resource_id=uri.resource_id,
    ).SerializeToString()


def authority_of(address: bytes) -> str:
    """Of a UUri that is serialised."""
    if address[:1] == _AUTHORITY_TAG and address[1] < _LENGTH_MAX:  # without parsing it: there may be millions
        return address[2 : 2 + address[1]].decode()
    return UUri.FromString(address).authority_name


def kind_of(address: bytes) -> bytes:
    """All but its authority: a fleet has as many kinds of topics as one vehicle has topics."""
    if address[:1] == _AUTHORITY_TAG and address[1] < _LENGTH_MAX:
        return address[2 + address[1] :]
    uri = UUri.FromString(address)
    uri.authority_name = ""
    return uri.SerializeToString()


_ALL_OF_ONE: Final = kind_of(uris.ANY.SerializeToString())


def is_frontier(stream: Stream) -> bool:
    """Of a topic on which it is told how far epochs have come."""
    if not stream.source_bytes.endswith(_FRONTIERS):
        return False
    source = stream.source
    return stream.sink_bytes is None and source.resource_id == FRONTIERS and source.ue_id & 0xFFFF == ENTITY


def is_publish(stream: Stream) -> bool:
    """No sink, or the one that a streamer sets (an authority, all else wildcard)."""
    return stream.sink_bytes is None or kind_of(stream.sink_bytes) == _ALL_OF_ONE
