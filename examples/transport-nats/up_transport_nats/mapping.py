"""uProtocol on NATS: the mapping alone, pure.

(source, sink), sender -> subject   up.vehicle%2E1.8001.0.1.8000.-.-.-.-.-.gateway1
                                    five tokens each, `-` for no sink; then who sends it
UMessages              -> payload   each behind its length (varint), as protobuf's other languages write them, too

NATS tells tokens apart by dots and can't escape, so `.` and `%` in an authority are percent-encoded. A filter has `*`
where it leaves something open, so that the server matches; and `*` for the sender.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Final

from google.protobuf import proto
from google.protobuf.message import DecodeError

from uprotocol import attributes as attrs
from uprotocol import uri as uris
from uprotocol.status import invalid
from uprotocol.v1.umessage_pb2 import UMessage
from uprotocol.v1.uri_pb2 import UUri

NO_SINK: Final = "-.-.-.-.-"
ADDRESS_TOKENS: Final = 5


def escape(authority: str) -> str:
    return authority.replace("%", "%25").replace(".", "%2E")


def unescape(token: str) -> str:
    return token.replace("%2E", ".").replace("%25", "%")


def address(uri: UUri, own_authority: str, *, of_filter: bool = False) -> str:
    """Five tokens. Who names no authority means the host that he is on, which is said here, since another host can't
    know it."""
    authority = uri.authority_name or own_authority
    type, instance = uri.ue_id & 0xFFFF, uri.ue_id >> 16
    values = (
        (type, 0xFFFF),
        (instance, 0xFFFF),
        (uri.ue_version_major, uris.WILDCARD_VERSION),
        (uri.resource_id, uris.WILDCARD_RESOURCE),
    )
    tokens = ["*" if of_filter and value == wildcard else f"{value:X}" for value, wildcard in values]
    return ".".join(["*" if of_filter and authority == uris.WILDCARD_AUTHORITY else escape(authority), *tokens])


def route(message: UMessage, own_authority: str) -> str:
    """What of a subject says where `message` comes from and goes to."""
    attributes = message.attributes
    return address_route(attributes.source, attributes.sink if attributes.HasField("sink") else None, own_authority)


def address_route(source: UUri, sink: UUri | None, own_authority: str) -> str:
    """The same of a message with these addresses: some 800 characters at most."""
    there = address(sink, own_authority) if sink is not None else NO_SINK
    return f"{address(source, own_authority)}.{there}"


def filter_route(source: UUri, sink: UUri | None, own_authority: str) -> str:
    """The same of a filter. `*` for a sink also lets `-` through: match the UUris after receipt."""
    wanted = address(sink, own_authority, of_filter=True) if sink is not None else NO_SINK
    return f"{address(source, own_authority, of_filter=True)}.{wanted}"


def pack(message: UMessage) -> bytes:
    """One message of a payload, which is any number of them, one behind the other."""
    out = io.BytesIO()
    proto.serialize_length_prefixed(message, out)
    return out.getvalue()


def unpack(payload: bytes) -> list[UMessage]:
    """Raises UStatusError(INVALID_ARGUMENT) for what is no sequence of UMessages."""
    source, messages = io.BytesIO(payload), []
    try:
        while source.tell() < len(payload):
            messages.append(proto.parse_length_prefixed(UMessage, source))
    except (DecodeError, ValueError) as error:
        raise invalid(f"expected UMessages, each behind its length, got {len(payload)} bytes: {error}") from None
    if not messages:
        raise invalid("expected at least one UMessage, got an empty payload")
    return messages


def complete(messages: Sequence[UMessage], where: str) -> list[UMessage]:
    """Those of `messages` that belong on the route `where`, with the authorities that their senders left out.

    The rest are left out: a server's permissions are about subjects, and hold nothing if something else counts within.
    """
    tokens = where.split(".")
    source, sink = unescape(tokens[0]), unescape(tokens[ADDRESS_TOKENS])
    for message in messages:
        attrs.complete(message.attributes, source, sink)
    return [message for message in messages if route(message, "") == where]
