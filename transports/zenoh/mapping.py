"""uProtocol on Zenoh: the mapping alone, pure (spec up-l1/zenoh.adoc).

UMessage -> key      up/device1/10AB/0/3/80CD/{}/{}/{}/{}/{}         source and sink, five segments each
         -> attachment  0x01 | UAttributes                           -> payload, unaltered -> Zenoh priority
"""

from __future__ import annotations

from typing import Final

from uprotocol import attributes as attrs
from uprotocol import uri as uris
from uprotocol.status import UStatusError, invalid
from uprotocol.v1.uattributes_pb2 import UAttributes, UMessageType, UPriority
from uprotocol.v1.umessage_pb2 import UMessage
from uprotocol.v1.uri_pb2 import UUri

# of uProtocol; in an attachment the attributes follow it, and their ttl is nowhere else
# (dsn~up-transport-zenoh-attributes-mapping~1, A-25, A-27)
VERSION_BYTE: Final = b"\x01"
NO_SINK: Final = "{}/{}/{}/{}/{}"

ALL_SOURCES: Final = "up/*"  # an `authority_prefix`

SEGMENTS: Final = 11  # of every key
_SOURCE_AT, _SINK_AT = 1, 6  # index of the two authorities
_TYPE_AT: Final = (
    21  # in an attachment: after the version and the id (field 1 of UAttributes), as every encoder writes it
)
_CALLS: Final = {  # the octets there of a request and a response: field 2, a varint
    bytes([0x10, type]) for type in (UMessageType.UMESSAGE_TYPE_REQUEST, UMessageType.UMESSAGE_TYPE_RESPONSE)
}

PRIORITIES: Final[dict[int, str]] = {
    UPriority.UPRIORITY_UNSPECIFIED: "DATA_LOW",
    UPriority.UPRIORITY_CS0: "BACKGROUND",
    UPriority.UPRIORITY_CS1: "DATA_LOW",
    UPriority.UPRIORITY_CS2: "DATA",
    UPriority.UPRIORITY_CS3: "DATA_HIGH",
    UPriority.UPRIORITY_CS4: "INTERACTIVE_LOW",
    UPriority.UPRIORITY_CS5: "INTERACTIVE_HIGH",
    UPriority.UPRIORITY_CS6: "REAL_TIME",
}
"""UPriority -> name of the Zenoh priority (dsn~up-transport-zenoh-message-priority-mapping~1)."""


def is_call(attachment: bytes) -> bool:
    """True for the attachment of a request or a response, without parsing it."""
    return attachment[_TYPE_AT : _TYPE_AT + 2] in _CALLS


def segments(address: UUri, local_authority: str) -> str:
    """Authority, type, instance, version, resource; `*` for a wildcard, the local authority for an empty one.

    Raises UStatusError(INVALID_ARGUMENT) for an authority with `*` or `$`, which are special in key expressions; only
    IPvFuture can have them.
    """
    authority = address.authority_name or local_authority
    if len(authority) > 1 and ("*" in authority or "$" in authority):
        raise invalid(
            f"the authority {authority} has a character that is special in Zenoh's keys (* or $): it can't be "
            "reached over Zenoh"
        )
    numbers = (
        (address.ue_id & 0xFFFF, uris.WILDCARD_ENTITY_TYPE),
        (address.ue_id >> 16, uris.WILDCARD_ENTITY_INSTANCE),
        (address.ue_version_major, uris.WILDCARD_VERSION),
        (address.resource_id, uris.WILDCARD_RESOURCE),
    )
    return "/".join([authority, *("*" if number == wildcard else f"{number:X}" for number, wildcard in numbers)])


def message_key(message: UMessage, local_authority: str) -> str:
    """The key of `message`. That of a publish has no sink, not even a streamer's
    (dsn~up-transport-zenoh-key-expr~1)."""
    attributes = message.attributes
    sink = attributes.sink if attributes.HasField("sink") and not uris.has_wildcard(attributes.sink) else None
    return filter_key(attributes.source, sink, local_authority)


def filter_key(source: UUri, sink: UUri | None, local_authority: str) -> str:
    """The key expression of a filter; Zenoh's `*` also matches the segment `{}`, so match the UUris after receipt."""
    return f"up/{segments(source, local_authority)}/{segments(sink, local_authority) if sink is not None else NO_SINK}"


def authority_prefix(key: str) -> str:
    """The first segments of a message's key, up to the source's authority."""
    return key[: key.index("/", len("up/"))]


def entity_prefix(key: str) -> str:
    """The first segments, up to the version of the source's uEntity."""
    return "/".join(key.split("/", _SINK_AT)[: _SINK_AT - 1])


def sink_key(key: str) -> str:
    """The key expression of all messages to the sink of `key`, the key of a message with a sink."""
    sink = key.split("/", _SINK_AT)[_SINK_AT]
    return f"up/*/*/*/*/*/{sink}"


def publish_key(prefix: str, segment: str) -> str:
    """The key of a publish that begins with `prefix`. The other segments of its source are `segment`, which may be a
    wildcard."""
    missing = _SINK_AT - prefix.count("/") - 1
    return "/".join([prefix, *[segment] * missing, NO_SINK])


def complete(attributes: UAttributes, key: str) -> None:
    """Fill in authorities that are missing: the sender has written its own into the key (spec up-l1/zenoh.adoc)."""
    segments = key.split("/")
    source, sink = segments[_SOURCE_AT], segments[_SINK_AT]
    attrs.complete(attributes, source, source if sink == "{}" else sink)


def is_key_of(key: str, attributes: UAttributes) -> bool:
    """False if `key` names other addresses than `attributes`: Zenoh's access control checks the key alone.

    Missing addresses and authorities do not differ. Of a publish only the source counts: its key has no sink.
    """
    there = key.split("/")
    if len(there) != SEGMENTS:
        return False
    try:
        if attributes.HasField("source") and there[_SOURCE_AT:_SINK_AT] != _parts(attributes.source, there[_SOURCE_AT]):
            return False
        has_sink = attributes.HasField("sink") and attributes.type != UMessageType.UMESSAGE_TYPE_PUBLISH
        return not has_sink or there[_SINK_AT:] == _parts(attributes.sink, there[_SINK_AT])
    except UStatusError:  # no valid key
        return False


def _parts(address: UUri, authority: str) -> list[str]:
    return segments(address, authority).split("/")
