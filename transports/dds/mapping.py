"""UMessage <-> DDS, see docs/dds-mapping.md: names, partitions, samples. Pure, without any DDS library.

message -> writer_partition(source, sink)  "up/device1/10AB/0/3/80CD/{}/{}/{}/{}/{}"     decides who gets it
        -> encode -> CDR octets            struct { octet version; boolean has_payload;
                                                    sequence<octet> attributes, payload; }
filter  -> reader_partition(source, sink)  "up/device1/10AB/*/3/*/{}/{}/{}/{}/{}"
octets  -> decode -> message, or INVALID_ARGUMENT
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Iterable
from fnmatch import fnmatchcase
from typing import Final
from urllib.parse import quote, unquote

from google.protobuf.message import DecodeError

from uprotocol import attributes as attrs
from uprotocol import uri as uris
from uprotocol.status import invalid
from uprotocol.v1.uattributes_pb2 import UAttributes, UPriority
from uprotocol.v1.umessage_pb2 import UMessage
from uprotocol.v1.uri_pb2 import UUri

TOPIC: Final = "uprotocol/v1"
SEEN_TOPIC: Final = "uprotocol/v1/seen"
TYPE_NAME: Final = "uprotocol::v1::UMessage"
VERSION_OCTET: Final = 1  # uProtocol's major version, first octet of every sample

NO_SINK: Final = "{}/{}/{}/{}/{}"
NO_VALUE: Final = "{}"

_SAFE: Final = "$&'()+,;=:"  # characters of IPvFuture, without those that are special to fnmatch: ! * [ ]

NUMBERED: Final = b"uprotocol/1 numbered"  # USER_DATA of a writer whose source time stamps carry numbers
# they replace 16.8 ms of the time, and repeat after 16.8 million samples: ten minutes of the fastest sender
_NUMBER_BITS: Final = 24
NUMBERS: Final = 1 << _NUMBER_BITS

LIFESPAN_MS_MIN: Final = 1_024  # the shortest class: a shorter one would save no memory worth a change of QoS
LIFESPAN_MS_MAX: Final = 2**31  # 24 days; beyond it a sample lives as long as its writer

TRANSPORT_PRIORITY: Final[dict[int, int]] = {
    UPriority.UPRIORITY_UNSPECIFIED: 8,  # as CS1, dsn~up-attributes-priority~1
    UPriority.UPRIORITY_CS0: 0,
    UPriority.UPRIORITY_CS1: 8,
    UPriority.UPRIORITY_CS2: 16,
    UPriority.UPRIORITY_CS3: 24,
    UPriority.UPRIORITY_CS4: 32,
    UPriority.UPRIORITY_CS5: 40,
    UPriority.UPRIORITY_CS6: 48,
}
"""The code point of the DiffServ class of each priority. DDS implementations write it into the IP header."""

_LITTLE, _BIG = struct.Struct("<I"), struct.Struct(">I")
_ENCAPSULATIONS: Final[dict[bytes, struct.Struct]] = {  # PLAIN_CDR and PLAIN_CDR2: the same octets for this type
    b"\x00\x00": _BIG,
    b"\x00\x01": _LITTLE,
    b"\x00\x06": _BIG,
    b"\x00\x07": _LITTLE,
}
_HEAD: Final = b"\x00\x01\x00\x00" + bytes([VERSION_OCTET])  # little-endian PLAIN_CDR without options, then the version
_WITHOUT_PAYLOAD: Final = _HEAD + b"\x00\x00\x00"  # has_payload, and two octets that align what follows
_WITH_PAYLOAD: Final = _HEAD + b"\x01\x00\x00"
_PADDING: Final = (b"", b"\x00\x00\x00", b"\x00\x00", b"\x00")  # by length modulo 4
_SEQUENCES_AT: Final = len(_WITH_PAYLOAD)
FRAME_BYTES: Final = _SEQUENCES_AT + 4 + 3 + 4  # octets of a sample beside attributes and payload, at most


def writer_partition(source: UUri, sink: UUri | None, local_authority: str) -> str:
    """The partition of a message. It has no wildcard, so that a reader's pattern always meets a plain name."""
    there = NO_SINK if sink is None else _segments(sink, local_authority, NO_VALUE)
    return f"up/{_segments(source, local_authority, NO_VALUE)}/{there}"


def reader_partition(source_filter: UUri, sink_filter: UUri | None, local_authority: str) -> str:
    """The partition of a pair of filters.

    A pattern and a name both have eleven segments, so `*` never matches a slash. But `*` matches `{}`, so messages that
    arrive must still be matched against the filters.
    """
    sink = NO_SINK if sink_filter is None else _segments(sink_filter, local_authority, "*")
    return f"up/{_segments(source_filter, local_authority, '*')}/{sink}"


def is_pattern(partition: str) -> bool:
    """True if a reader's partition matches other names than its own."""
    return "*" in partition


def partition_of(message: UMessage) -> str:
    """The partition of a message whose addresses have their authorities."""
    attributes = message.attributes
    return writer_partition(attributes.source, attributes.sink if attributes.HasField("sink") else None, "")


def complete(attributes: UAttributes, partition: str) -> None:
    """Fill in missing authorities from the partition of the writer ("": unknown), which has the sender's own."""
    segments = partition.split("/")
    if len(segments) != 11 or not attrs.lacks_authority(attributes):
        return
    source, sink = _name(segments[1]), _name(segments[6])
    attrs.complete(attributes, source, source if sink == "{}" else sink)


def is_partition_of(partition: str, attributes: UAttributes) -> bool:
    """False if a writer's `partition` names other addresses than `attributes`: access control checks the partition
    alone. Missing addresses and authorities do not differ."""
    there = partition.split("/")
    if len(there) != 11:
        return False
    if attributes.HasField("source"):
        source = _segments(attributes.source, _name(there[1]), NO_VALUE)
        if source != "/".join(there[1:6]):
            return False
    return not attributes.HasField("sink") or "/".join(there[6:]) == _segments(
        attributes.sink, _name(there[6]), NO_VALUE
    )


def partitions_meet(theirs: Iterable[str], ours: Collection[str]) -> bool:
    """True if DDS matches endpoints with these partitions: they are equal, or one is a pattern (fnmatch) of the
    other."""
    return any(fnmatchcase(one, other) or fnmatchcase(other, one) for one in theirs for other in ours)


def _segments(uri: UUri, local_authority: str, wildcard: str) -> str:
    """authority/type/instance/version/resource"""
    authority = uri.authority_name or local_authority
    kind, instance = uri.ue_id & 0xFFFF, uri.ue_id >> 16
    # Brackets are special to fnmatch. An IPv6 address is written without them, as no name has a colon; IPvFuture is
    # percent-encoded.
    plain = quote(authority, safe=_SAFE) if uris.is_ip_future(authority) else authority.strip("[]")
    return "/".join(
        (
            wildcard if authority == uris.WILDCARD_AUTHORITY else plain,
            wildcard if kind == uris.WILDCARD_ENTITY_TYPE else f"{kind:X}",
            wildcard if instance == uris.WILDCARD_ENTITY_INSTANCE else f"{instance:X}",
            wildcard if uri.ue_version_major == uris.WILDCARD_VERSION else f"{uri.ue_version_major:X}",
            wildcard if uri.resource_id == uris.WILDCARD_RESOURCE else f"{uri.resource_id:X}",
        )
    )


def _name(segment: str) -> str:
    """The authority that `_segments` has written as `segment`."""
    return unquote(segment) if "%" in segment else f"[{segment}]" if ":" in segment else segment


def lifespan_ms(ttl_ms: int) -> int | None:
    """The class of a ttl, in ms: the next power of two that is not shorter; None, without limit, if there is no ttl.
    Receivers check the ttl itself."""
    if not ttl_ms or ttl_ms > LIFESPAN_MS_MAX:
        return None
    return max(LIFESPAN_MS_MIN, 1 << (ttl_ms - 1).bit_length())


def numbered_ns(now_ns: int, number: int) -> int:
    """The source time stamp of a writer's sample `number`: the time, rounded up so that no lifespan ends early, with
    the number in its low bits."""
    return (now_ns // NUMBERS + 1) * NUMBERS + number % NUMBERS


def missing(last_ns: int, next_ns: int) -> int:
    """Returns how many samples of a numbered writer are missing between two time stamps; -1 if the second is not newer.

    The number decides, so that a clock may be set back; if it is half a cycle ahead, the time decides. Whole cycles are
    not noticed.
    """
    distance = (next_ns - last_ns) % NUMBERS
    return (distance - 1) % NUMBERS if 0 < distance < NUMBERS // 2 or next_ns // NUMBERS > last_ns // NUMBERS else -1


def encode(message: UMessage) -> bytes:
    """The sample of a message, as little-endian CDR with its encapsulation header."""
    return pack(message.attributes.SerializeToString(), message.payload, has_payload=message.HasField("payload"))


def pack(attributes: bytes, payload: bytes, *, has_payload: bool) -> bytes:
    return b"".join(
        (
            _WITH_PAYLOAD if has_payload else _WITHOUT_PAYLOAD,
            _LITTLE.pack(len(attributes)),
            attributes,
            _PADDING[len(attributes) & 3],
            _LITTLE.pack(len(payload)),
            payload,
        )
    )


def unpack(sample: bytes) -> tuple[bytes, bytes | None]:
    """Attributes and payload (None: absent). Raises UStatusError(INVALID_ARGUMENT) if this is not such a sample or has
    another version."""
    length = _ENCAPSULATIONS.get(sample[:2])
    if length is None or len(sample) < _SEQUENCES_AT:
        raise invalid(
            f"expected a sample of {TYPE_NAME} as plain CDR, got {len(sample)} octets that begin with "
            f"{sample[:8].hex()}"
        )
    if sample[4] != VERSION_OCTET:
        raise invalid(f"expected uProtocol version {VERSION_OCTET}, got {sample[4]}")
    try:
        attributes, at = _sequence(sample, _SEQUENCES_AT, length)
        payload, _ = _sequence(sample, at + (-at & 3), length)
    except (struct.error, IndexError):
        raise invalid(f"the sample ends after {len(sample)} octets, within one of its sequences") from None
    return attributes, payload if sample[5] else None


def _sequence(sample: bytes, at: int, length: struct.Struct) -> tuple[bytes, int]:
    (count,) = length.unpack_from(sample, at)
    end = at + 4 + count
    if end > len(sample):
        raise IndexError
    return sample[at + 4 : end], end


def decode(sample: bytes) -> UMessage:
    """The message of a sample, not validated. Raises UStatusError(INVALID_ARGUMENT) if the sample is malformed."""
    attributes, payload = unpack(sample)
    if not attributes:
        raise invalid("the sample has no attributes")
    message = UMessage()
    try:
        message.attributes.MergeFromString(attributes)
    except DecodeError as error:
        raise invalid(f"expected attributes of type uprotocol.v1.UAttributes: {error}") from None
    if payload is not None:
        message.payload = payload
    return message
