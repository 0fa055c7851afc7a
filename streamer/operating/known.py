"""Payloads that the command line can read and write as JSON: methods and topics of core.usubscription, core.ustreamer.

descriptors, wire.py -> method(uri): types of request and answer    topic(uri): type of the messages

A UUri in JSON is an object, as protobuf writes it; in requests also a text, such as "up://vehicle1/8001/1/8001".
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from typing import Any, Final

from google.protobuf.json_format import MessageToDict, ParseDict, ParseError
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from uprotocol import uoptions_pb2 as options
from uprotocol import uri as uris
from uprotocol.core.ustreamer import ids
from uprotocol.core.ustreamer.v1 import ustreamer_pb2
from uprotocol.core.usubscription import wire
from uprotocol.core.usubscription.wire import V3, V4, Method
from uprotocol.message import UPayload
from uprotocol.status import UStatusError, invalid
from uprotocol.v1.uri_pb2 import UUri

SHOWN: Final = 80  # characters of a request that is refused
_URI: Final = UUri.DESCRIPTOR.full_name


def method(uri: UUri) -> Method | None:
    """Returns the types of a method; None for an unknown one."""
    return _methods().get((uri.ue_id & 0xFFFF, uri.ue_version_major, uri.resource_id))


def topic(uri: UUri) -> type[Message] | None:
    """Returns the type of a topic's messages; None for an unknown one."""
    return _topics().get((uri.ue_id & 0xFFFF, uri.ue_version_major, uri.resource_id))


def as_json(payload: UPayload, type: type[Message]) -> dict[str, Any] | None:
    """Returns the payload as JSON data; None if it is not a `type`."""
    try:
        return MessageToDict(payload.unpack(type), preserving_proto_field_name=True)
    except UStatusError:
        return None


def encode(text: str, type: type[Message]) -> UPayload:
    """Returns JSON as a payload of `type`. Raises INVALID_ARGUMENT."""
    try:
        given = json.loads(text)
        if not isinstance(given, Mapping):
            raise TypeError(f"got {text[:SHOWN]}")
        return UPayload.pack(ParseDict(_with_uris(given, type.DESCRIPTOR), type()))
    except (TypeError, ValueError, ParseError) as error:
        fields = ", ".join(type.DESCRIPTOR.fields_by_name) or "none"
        raise invalid(f"expected {type.DESCRIPTOR.full_name} as JSON, with the fields {fields}: {error}") from None


def _with_uris(value: Any, descriptor: Any) -> Any:
    """Returns `value` with objects in place of the texts of UUris."""
    if isinstance(value, str) and descriptor.full_name == _URI:
        return MessageToDict(uris.parse(value))
    if not isinstance(value, Mapping):
        return value
    found = {}
    for key, one in value.items():
        field = descriptor.fields_by_name.get(key)
        if field is not None and field.message_type is not None:
            inside = field.message_type
            one = [_with_uris(item, inside) for item in one] if isinstance(one, list) else _with_uris(one, inside)
        found[key] = one
    return found


@cache
def _methods() -> dict[tuple[int, int, int], Method]:
    found = {(wire.ENTITY_TYPE, codec.major, one.resource): one for codec in (V3, V4) for one in codec.methods.values()}
    for one in _service().methods:
        resource = one.GetOptions().Extensions[options.method_id]
        types = GetMessageClass(one.input_type), GetMessageClass(one.output_type)
        found[ids.ENTITY, ids.VERSION, resource] = Method(resource, *types)
    return found


@cache
def _topics() -> dict[tuple[int, int, int], type[Message]]:
    found: dict[tuple[int, int, int], type[Message]] = {
        (wire.ENTITY_TYPE, codec.major, wire.CHANGE_RESOURCE): codec.changes for codec in (V3, V4)
    }
    of_service = _service().GetOptions()
    for kind in (options.publish_topic, options.notification_topic):
        for one in of_service.Extensions[kind]:
            found[ids.ENTITY, ids.VERSION, one.id] = getattr(ustreamer_pb2, one.message)
    return found


def _service() -> Any:
    return ustreamer_pb2.DESCRIPTOR.services_by_name["uStreamer"]
