"""Messages as plain data for people and programs: of the command line, of the admin port.

as_dict   the whole message, as `subscribe --json` prints it
as_row    the same with at most so many bytes of the payload, for lists
"""

from __future__ import annotations

import json
from typing import Any

from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message

from streamer.operating import known
from uprotocol import uri as uris
from uprotocol import uuid as uuids
from uprotocol.core.ustreamer.v1.ustreamer_pb2 import DeadLetter, Sample
from uprotocol.message import UPayload
from uprotocol.status import UStatusError, code_name
from uprotocol.v1.uattributes_pb2 import UMessageType, UPayloadFormat, UPriority
from uprotocol.v1.umessage_pb2 import UMessage


def payload_value(payload: UPayload, type: type[Message] | None = None) -> Any:
    """Returns JSON data: known messages and text decoded, everything else as hex. `type`: what it is expected to be."""
    if type is not None and (found := known.as_json(payload, type)) is not None:
        return found
    data, format = payload.data, payload.format
    try:
        if format == UPayloadFormat.UPAYLOAD_FORMAT_TEXT:
            return data.decode()
        if format == UPayloadFormat.UPAYLOAD_FORMAT_JSON:
            return json.loads(data)
    except (ValueError, RecursionError):
        return data.hex()
    guessed = _guessed(payload)
    return data.hex() if guessed is None else guessed


def _guessed(payload: UPayload) -> dict[str, Any] | None:
    """Returns a Sample or DeadLetter as plain data; None for everything else."""
    protobuf = (UPayloadFormat.UPAYLOAD_FORMAT_PROTOBUF, UPayloadFormat.UPAYLOAD_FORMAT_PROTOBUF_WRAPPED_IN_ANY)
    for type in (Sample, DeadLetter) if payload.format in protobuf else ():
        try:
            found = payload.unpack(type)
        except UStatusError:
            continue
        if found.SerializeToString(deterministic=True) and (not isinstance(found, Sample) or found.path):
            return MessageToDict(found, preserving_proto_field_name=True)
    return None


def _decoded(message: UMessage) -> dict[str, Any] | None:
    """Returns a payload of a known topic, or of a known type, as plain data."""
    payload, type = UPayload.of(message), known.topic(message.attributes.source)
    found = None if type is None else known.as_json(payload, type)
    return _guessed(payload) if found is None else found


def as_dict(message: UMessage) -> dict[str, Any]:
    """Returns a message as plain data; omits absent attributes."""
    data = _attributes(message)
    if message.HasField("payload"):
        data["payload"] = payload_value(UPayload.of(message), known.topic(message.attributes.source))
    return data


def as_row(message: UMessage, bytes_max: int) -> dict[str, Any]:
    """Returns a message with at most `bytes_max` bytes of its payload, which is omitted if there is none.

    payload_as: "text", "json" (its text, which may be no valid JSON), "decoded" (known messages) or "hex".
    payload_bytes: its full length.
    """
    row = _attributes(message)
    if not message.HasField("payload"):
        return row
    data, format = message.payload, message.attributes.payload_format
    row["payload_bytes"] = len(data)
    if len(data) <= bytes_max and (found := _decoded(message)) is not None:
        return row | {"payload_as": "decoded", "payload": found}
    if format in (UPayloadFormat.UPAYLOAD_FORMAT_TEXT, UPayloadFormat.UPAYLOAD_FORMAT_JSON):
        kind = "text" if format == UPayloadFormat.UPAYLOAD_FORMAT_TEXT else "json"
        return row | {"payload_as": kind, "payload": data[:bytes_max].decode(errors="replace")}
    return row | {"payload_as": "hex", "payload": data[:bytes_max].hex()}


def _attributes(message: UMessage) -> dict[str, Any]:
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
        format = attributes.payload_format
        is_known = format in UPayloadFormat.values()
        data["payload_format"] = UPayloadFormat.Name(format)[len("UPAYLOAD_FORMAT_") :] if is_known else format
    return data
