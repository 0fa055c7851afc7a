"""uProtocol on NATS: the mapping alone, pure.

(source, sink), sender -> subject   up.vehicle%2E1.8001.0.1.8000.-.-.-.-.-.gateway1
                                    five tokens each, `-` for no sink; then who sends it
UMessages              -> payload   each after its length (varint), as protobuf in other languages writes them, too

NATS separates tokens with dots and has no escapes, so `.` and `%` in an authority are percent-encoded. A filter has `*`
for its wildcards, so that the server matches; and `*` for the sender.
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
    """Five tokens. An empty authority means the sender's host, so its authority is written here."""
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
    """The part of a subject with the addresses of `message`."""
    attributes = message.attributes
    return address_route(attributes.source, attributes.sink if attributes.HasField("sink") else None, own_authority)


def address_route(source: UUri, sink: UUri | None, own_authority: str) -> str:
    """The route of a message with these addresses: some 800 characters at most."""
    there = address(sink, own_authority) if sink is not None else NO_SINK
    return f"{address(source, own_authority)}.{there}"


def filter_route(source: UUri, sink: UUri | None, own_authority: str) -> str:
    """The route of a filter. `*` for a sink also matches `-`, so match the UUris after receipt."""
    wanted = address(sink, own_authority, of_filter=True) if sink is not None else NO_SINK
    return f"{address(source, own_authority, of_filter=True)}.{wanted}"


def pack(message: UMessage) -> bytes:
    """One message for a payload. A payload is any number of them, one after the other."""
    out = io.BytesIO()
    proto.serialize_length_prefixed(message, out)
    return out.getvalue()


def unpack(payload: bytes) -> list[UMessage]:
    """Raises UStatusError(INVALID_ARGUMENT) if `payload` is not a sequence of UMessages."""
    source, messages = io.BytesIO(payload), []
    try:
        while source.tell() < len(payload):
            messages.append(proto.parse_length_prefixed(UMessage, source))
    except (DecodeError, ValueError) as error:
        raise invalid(f"expected UMessages, each after its length, got {len(payload)} bytes: {error}") from None
    if not messages:
        raise invalid("expected at least one UMessage, got an empty payload")
    return messages


def complete(messages: Sequence[UMessage], where: str) -> list[UMessage]:
    """Fill in missing authorities, and return the messages whose addresses agree with the route `where`.

    A server's permissions apply to subjects, so a message must agree with its subject.
    """
    tokens = where.split(".")
    source, sink = unescape(tokens[0]), unescape(tokens[ADDRESS_TOKENS])
    for message in messages:
        attrs.complete(message.attributes, source, sink)
    return [message for message in messages if route(message, "") == where]
