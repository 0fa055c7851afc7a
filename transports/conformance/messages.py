"""The messages of the suite and their addresses: from alpha to beta by default.

publish, streamed, notification, request, response | example: one that matches a pair of filters
"""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from typing import Final

from uprotocol import attributes as attrs
from uprotocol import uri as uris
from uprotocol import uuid as uuids
from uprotocol.message import UMessageBuilder, UPayload
from uprotocol.status import UStatusError
from uprotocol.v1.uattributes_pb2 import UPayloadFormat
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.umessage_pb2 import UMessage
from uprotocol.v1.uri_pb2 import UUri
from uprotocol.v1.ustatus_pb2 import UStatus
from uprotocol.v1.uuid_pb2 import UUID

ALPHA: Final = "alpha"
BETA: Final = "beta"
GAMMA: Final = "gamma"
UE_ID: Final = 0x0003_10AB  # instance 3 of type 10AB
UE_VERSION: Final = 4
OTHER_ID: Final = 0x9A02  # of a second topic
TTL_MS: Final = 60_000
PROBE: Final = b"conformance probe"


def topic(authority: str = ALPHA, resource: int = 0x9A01, entity: int = UE_ID, version: int = UE_VERSION) -> UUri:
    return uris.uri(authority, entity, version, resource)


OTHER: Final = topic(resource=OTHER_ID)


def reply(authority: str = BETA, entity: int = UE_ID, version: int = UE_VERSION) -> UUri:
    return uris.uri(authority, entity, version, 0)


def method(authority: str = BETA, resource: int = 0x0B18, entity: int = UE_ID, version: int = UE_VERSION) -> UUri:
    return uris.uri(authority, entity, version, resource)


def raw(data: bytes) -> UPayload:
    return UPayload(data, UPayloadFormat.UPAYLOAD_FORMAT_RAW)


def publish(payload: bytes = b"", source: UUri | None = None) -> UMessage:
    return UMessageBuilder.publish(source or topic()).build_from_upayload(raw(payload))


def streamed(payload: bytes = b"", source: UUri | None = None, authority: str = BETA) -> UMessage:
    """A publish with the sink that only a streamer sets."""
    message = UMessageBuilder(attrs.PUBLISH, source or topic(), attrs.streamer_sink(authority))
    return message.build_from_upayload(raw(payload))


def notification(payload: bytes = b"", source: UUri | None = None, sink: UUri | None = None) -> UMessage:
    return UMessageBuilder.notification(source or topic(), sink or reply()).build_from_upayload(raw(payload))


def request(payload: bytes = b"", source: UUri | None = None, sink: UUri | None = None) -> UMessage:
    return UMessageBuilder.request(source or reply(ALPHA), sink or method(), TTL_MS).build_from_upayload(raw(payload))


def response(
    payload: bytes = b"", source: UUri | None = None, sink: UUri | None = None, request_id: UUID | None = None
) -> UMessage:
    builder = UMessageBuilder.response(source or method(ALPHA), sink or reply(), request_id or uuids.new())
    return builder.with_ttl(TTL_MS).build_from_upayload(raw(payload))


def example(source_filter: UUri, sink_filter: UUri | None) -> UMessage:
    """A probe that matches the filters, from alpha to beta where they have wildcards."""
    source = _filled(source_filter, ALPHA, 0 if sink_filter is not None and uris.is_method(sink_filter) else 0x9A01)
    if sink_filter is None:
        return publish(PROBE, source)
    sink = _filled(sink_filter, BETA, 0)
    if uris.is_topic(source):
        return notification(PROBE, source, sink)
    return request(PROBE, source, sink) if uris.is_method(sink) else response(PROBE, source, sink)


def _filled(pattern: UUri, authority: str, resource: int) -> UUri:
    """`pattern` with these, and our entity and version, in place of wildcards."""
    entity = pattern.ue_id
    for mask in (0xFFFF, 0xFFFF_0000):
        if entity & mask == mask:
            entity = entity & ~mask | UE_ID & mask
    return UUri(
        authority_name=authority if pattern.authority_name in ("", "*") else pattern.authority_name,
        ue_id=entity,
        ue_version_major=UE_VERSION if pattern.ue_version_major == uris.WILDCARD_VERSION else pattern.ue_version_major,
        resource_id=resource if pattern.resource_id == uris.WILDCARD_RESOURCE else pattern.resource_id,
    )


def codes(statuses: Sequence[UStatus]) -> list[int]:
    return [status.code for status in statuses]


async def code_of(call: Awaitable[object]) -> int:
    """OK, or the code of the UStatusError that `call` raises. Another exception fails the test."""
    try:
        await call
    except UStatusError as error:
        return int(error.code)
    return UCode.OK
