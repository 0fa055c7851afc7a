"""UAttributes: what each message type must, may and must not have (spec basics/uattributes.adoc), as one table.

validate(attributes)  =  validate_route(type, source, sink)   depends only on the addresses, so callers may cache it
                      +  validate_rest(attributes)            id, priority, ttl, ...: differs for each message
validate_filters(source, sink)                                the filters of a listener
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Final, Literal, NamedTuple

from uprotocol import uri as uris
from uprotocol import uuid as uuids
from uprotocol.status import UStatusError, invalid
from uprotocol.v1.uattributes_pb2 import UAttributes, UMessageType, UPriority
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.umessage_pb2 import UMessage
from uprotocol.v1.uri_pb2 import UUri
from uprotocol.v1.ustatus_pb2 import UStatus

PUBLISH: Final = UMessageType.UMESSAGE_TYPE_PUBLISH
REQUEST: Final = UMessageType.UMESSAGE_TYPE_REQUEST
RESPONSE: Final = UMessageType.UMESSAGE_TYPE_RESPONSE
NOTIFICATION: Final = UMessageType.UMESSAGE_TYPE_NOTIFICATION

# a constant, because Python looks up an enum's attribute at each use, and this is the hot path
_CS4: Final = UPriority.UPRIORITY_CS4
PRIORITY_DEFAULT: Final = int(UPriority.UPRIORITY_CS1)
PRIORITY_MAX: Final = int(UPriority.UPRIORITY_CS6)
ROUTES_KNOWN_MAX: Final = 8_192  # valid (type, source, sink) in the cache; some 2 MB when full

_RPC: Final = frozenset((REQUEST, RESPONSE))
_Reserved = Literal["permission_level", "token", "reqid", "commstatus"]
_ONLY_OF: Final[dict[_Reserved, int]] = {
    "permission_level": REQUEST,
    "token": REQUEST,
    "reqid": RESPONSE,
    "commstatus": RESPONSE,
}
_TRACEPARENT = re.compile(r"00-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")


class _Rule(NamedTuple):
    name: str
    source: tuple[str, Callable[[UUri], bool]]
    sink: tuple[str, Callable[[UUri], bool]] | None  # None: no sink, except the streamer's sink of a publish


_TOPIC = ("a topic (8000 to FFFE)", uris.is_topic)
_METHOD = ("a method (1 to 7FFF)", uris.is_method)
_REPLY = ("0", uris.is_reply)

RULES: Final[dict[int, _Rule]] = {
    PUBLISH: _Rule("publish", _TOPIC, None),
    NOTIFICATION: _Rule("notification", _TOPIC, _REPLY),
    REQUEST: _Rule("request", _REPLY, _METHOD),
    RESPONSE: _Rule("response", _METHOD, _REPLY),
}


def is_expired(attributes: UAttributes, now_ms: int) -> bool:
    """True if `now_ms` is later than the time in the id plus the ttl; with a ttl of 0 the message never expires
    (dsn~up-attributes-ttl-timeout~1, dsn~up-attributes-ttl~1)."""
    ttl = attributes.ttl
    return ttl > 0 and now_ms > (attributes.id.msb >> 16) + ttl


def refusal(message: UMessage, now_ms: int) -> UStatus | None:
    """None if `message` may be sent; else INVALID_ARGUMENT, or DEADLINE_EXCEEDED if it has expired (A-14)."""
    attributes = message.attributes
    try:
        validate(attributes, has_payload=message.HasField("payload"))
    except UStatusError as error:
        return error.status
    if not is_expired(attributes, now_ms):
        return None
    late_ms = now_ms - uuids.time_ms(attributes.id) - attributes.ttl
    return UStatus(
        code=UCode.DEADLINE_EXCEEDED,
        message=f"the message expired {late_ms} ms ago (ttl {attributes.ttl} ms): not sent",
    )


def is_streamer_sink(sink: UUri) -> bool:
    """True for the sink that only a streamer sets in a publish: a named authority, everything else a wildcard
    (dsn~up-attributes-publish-sink~2)."""
    return (
        sink.authority_name not in ("", uris.WILDCARD_AUTHORITY)
        and sink.ue_id == uris.WILDCARD_ENTITY
        and sink.ue_version_major == uris.WILDCARD_VERSION
        and sink.resource_id == uris.WILDCARD_RESOURCE
    )


def streamer_sink(authority: str) -> UUri:
    return uris.pattern(authority)


def lacks_authority(attributes: UAttributes) -> bool:
    """True if source or sink has no authority. An empty authority means the sender's host (spec basics/uri.adoc)."""
    return not attributes.source.authority_name or (not attributes.sink.authority_name and attributes.HasField("sink"))


def complete(attributes: UAttributes, source_authority: str, sink_authority: str | None = None) -> None:
    """Fill in missing authorities with the sender's. `sink_authority`: the value for the sink, if the network has
    different names for the two."""
    if attributes.HasField("source") and not attributes.source.authority_name:
        attributes.source.authority_name = source_authority
    if attributes.HasField("sink") and not attributes.sink.authority_name:
        attributes.sink.authority_name = sink_authority if sink_authority is not None else source_authority


def completed(message: UMessage, authority: str) -> UMessage:
    """Returns `message` itself, or a copy in which `authority` (the sender's) fills in a missing one."""
    if not lacks_authority(message.attributes):
        return message
    copy = UMessage()
    copy.CopyFrom(message)
    complete(copy.attributes, authority)
    return copy


def validate(attributes: UAttributes, *, has_payload: bool = True) -> None:
    """Check `attributes` against the rules of their type, and as `validate_rest`. Raises UStatusError(INVALID_ARGUMENT)
    for the first error."""
    _validate_route_once(
        attributes.type,
        attributes.source.SerializeToString() if attributes.HasField("source") else None,
        attributes.sink.SerializeToString() if attributes.HasField("sink") else None,
    )
    validate_rest(attributes, has_payload=has_payload)


@functools.lru_cache(maxsize=ROUTES_KNOWN_MAX)
def _validate_route_once(type: int, source: bytes | None, sink: bytes | None) -> None:
    """Only valid addresses are cached: what raises can't fill the cache."""
    validate_route(
        type, None if source is None else UUri.FromString(source), None if sink is None else UUri.FromString(sink)
    )


def validate_route(type: int, source: UUri | None, sink: UUri | None) -> None:
    """Check what depends only on the type and the addresses. Raises UStatusError(INVALID_ARGUMENT)."""
    rule = RULES.get(type)
    if rule is None:
        raise invalid(f"expected a message type of 1 to 4, got {type}")
    _validate_address(rule.name, "source", source, rule.source)
    if rule.sink is not None:
        _validate_address(rule.name, "sink", sink, rule.sink)
    elif sink is not None:
        uris.validate(sink)
        if not is_streamer_sink(sink):
            raise invalid(
                f"a publish has no sink, unless a streamer's //AUTHORITY/FFFFFFFF/FF/FFFF; got {uris.format(sink)}"
            )


def _validate_address(
    type_name: str, part: str, address: UUri | None, expected: tuple[str, Callable[[UUri], bool]]
) -> None:
    description, is_allowed = expected
    if address is None:
        raise invalid(f"a {type_name} needs a {part} whose resource is {description}, got none")
    uris.validate(address)
    if not is_allowed(address):
        raise invalid(f"the {part} of a {type_name} has a resource that is {description}, got {uris.format(address)}")
    if uris.has_wildcard(address):
        raise invalid(f"the {part} of a {type_name} names one resource, but {uris.format(address)} has wildcards")


def validate_rest(attributes: UAttributes, *, has_payload: bool = True) -> None:
    """Check what differs for each message. Raises UStatusError(INVALID_ARGUMENT).

    `has_payload` False: a payload format is an error, too (dsn~up-attributes-payload-format~1).
    """
    if not has_payload and attributes.payload_format:
        raise invalid(f"a message without payload has no payload format, got {attributes.payload_format}")
    if not uuids.is_message_id(attributes.id):
        given = uuids.format(attributes.id) if attributes.HasField("id") else "none"
        raise invalid(f"a message has an id, which is a UUID of version 7 with a time until the year 9999, got {given}")
    if attributes.traceparent and not has_valid_traceparent(attributes):
        raise invalid(
            f"traceparent is 00-TRACE_ID-PARENT_ID-FLAGS of the W3C Trace Context, got {attributes.traceparent!r}"
        )
    if attributes.priority < 0 or attributes.payload_format < 0:  # values of a later specification are positive
        raise invalid(
            f"priority and payload format are 0 or more, got {attributes.priority} and {attributes.payload_format}"
        )
    type = attributes.type
    has = attributes.HasField
    # attributes that the specification defines for another type only
    if (type != RESPONSE and (has("reqid") or has("commstatus"))) or (
        type != REQUEST and (has("permission_level") or has("token"))
    ):
        odd, only = next((odd, only) for odd, only in _ONLY_OF.items() if only != type and has(odd))
        raise invalid(f"only a {RULES[only].name} has the attribute {odd}, but this message has type {type}")
    if type not in _RPC:
        return
    priority = attributes.priority
    if priority < _CS4:
        name = UPriority.Name(priority) if priority in UPriority.values() else priority
        raise invalid(f"requests and responses have priority CS4 or higher, got {name}")
    if not attributes.ttl:
        raise invalid("requests and responses need a ttl greater than 0 ms")
    if type == RESPONSE and not uuids.is_message_id(attributes.reqid):
        raise invalid(
            "a response names the id of its request (reqid), a UUID of version 7 with a time until the year 9999"
        )
    if type == RESPONSE and attributes.commstatus < 0:
        raise invalid(f"a commstatus is 0 or more, got {attributes.commstatus}")


def has_valid_traceparent(attributes: UAttributes) -> bool:
    """True without a traceparent, too (dsn~up-attributes-traceparent~1). A sender gets an error for an invalid one; a
    receiver removes it from the message."""
    traceparent = attributes.traceparent
    return not traceparent or _TRACEPARENT.fullmatch(traceparent) is not None


_T, _M, _R, _W = "topic", "method", "reply", "wildcard"
_FILTER_PAIRS: Final = frozenset({(_T, None), (_W, None), (_T, _R), (_R, _M), (_M, _R), (_W, _R), (_W, _W)})
"""Valid kinds of the resources of (source filter, sink filter) (spec up-l1, valid filter pairs)."""


def validate_filters(source_filter: UUri, sink_filter: UUri | None) -> None:
    """Raises UStatusError(INVALID_ARGUMENT) for a malformed filter or a pair that the specification does not list."""
    kinds: list[str | None] = []
    for filter in (source_filter, sink_filter):
        if filter is None:
            kinds.append(None)
            continue
        uris.validate(filter)
        resource = filter.resource_id
        if resource in (uris.WILDCARD_RESOURCE, uris.RESOURCE_REPLY):
            kinds.append(_W if resource else _R)
        else:
            kinds.append(_M if resource <= uris.RESOURCE_METHOD_MAX else _T)
    if tuple(kinds) not in _FILTER_PAIRS:
        sink = "no sink filter" if sink_filter is None else f"sink filter {uris.format(sink_filter)}"
        raise invalid(
            f"source filter {uris.format(source_filter)} with {sink} can match no message; "
            "allowed are (topic or FFFF, none), (topic, 0), (0, method), (method, 0), (FFFF, 0), (FFFF, FFFF)"
        )
