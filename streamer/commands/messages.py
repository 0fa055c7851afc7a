"""What a message says: as JSON, or as a line for a person."""

from __future__ import annotations

import json
from typing import Any

from google.protobuf.json_format import MessageToDict

from uprotocol import uri as uris
from uprotocol import uuid as uuids
from uprotocol.core.ustreamer.v1.ustreamer_pb2 import DeadLetter, Sample
from uprotocol.message import UPayload
from uprotocol.status import UStatusError, code_name
from uprotocol.v1.uattributes_pb2 import UMessageType, UPayloadFormat, UPriority
from uprotocol.v1.umessage_pb2 import UMessage


def payload_value(message: UMessage) -> Any:
    """The payload as JSON can say it: known messages and text as such, everything else as hex."""
    payload, format = message.payload, message.attributes.payload_format
    if not message.HasField("payload"):
        return None
    try:
        if format == UPayloadFormat.UPAYLOAD_FORMAT_TEXT:
            return payload.decode()
        if format == UPayloadFormat.UPAYLOAD_FORMAT_JSON:
            return json.loads(payload)
    except ValueError:
        return payload.hex()
    if format in (UPayloadFormat.UPAYLOAD_FORMAT_PROTOBUF, UPayloadFormat.UPAYLOAD_FORMAT_PROTOBUF_WRAPPED_IN_ANY):
        for type in (Sample, DeadLetter):
            try:
                known = UPayload.of(message).unpack(type)
            except UStatusError:
                continue
            if known.SerializeToString(deterministic=True) and (not isinstance(known, Sample) or known.path):
                return MessageToDict(known, preserving_proto_field_name=True)
    return payload.hex()


def as_dict(message: UMessage) -> dict[str, Any]:
    """A message as plain data; absent attributes are left out."""
    attributes = message.attributes
    data: dict[str, Any] = {
        "id": uuids.format(attributes.id),
        "time_ms": uuids.time_ms(attributes.id),
        "type": UMessageType.Name(attributes.type)[len("UMESSAGE_TYPE_") :].lower(),
        "source": uris.format(attributes.source),
    }
    if attributes.HasField("sink"):
        data["sink"] = uris.format(attributes.sink)
    if attributes.priority in UPriority.values() and attributes.priority:
        data["priority"] = UPriority.Name(attributes.priority)[len("UPRIORITY_") :]
    if attributes.ttl:
        data["ttl_ms"] = attributes.ttl
    if attributes.HasField("commstatus"):
        data["commstatus"] = code_name(attributes.commstatus)
    if message.HasField("payload"):
        data["payload_format"] = (
            UPayloadFormat.Name(attributes.payload_format)[len("UPAYLOAD_FORMAT_") :]
            if attributes.payload_format in UPayloadFormat.values()
            else attributes.payload_format
        )
        data["payload"] = payload_value(message)
    return data


def as_line(message: UMessage) -> str:
    data = as_dict(message)
    payload = data.get("payload")
    if isinstance(payload, dict) and "path" in payload:
        value = next((payload[key] for key in ("double_value", "string_value", "bool_value") if key in payload), None)
        payload = f"{payload['path']} = {value}"
    way = f"{data['source']} -> {data['sink']}" if "sink" in data else data["source"]
    return f"{data['type']:<12} {way}  {payload if payload is not None else ''}"
