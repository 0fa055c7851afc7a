"""What must arrive, field by field.

sent, received -> differences: ["ttl: 55555 != 55000", ...], empty where all is as it was sent
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from google.protobuf.message import Message

from tests.interop.parties import Fields
from uprotocol import attributes as attrs
from uprotocol import uuid as uuids
from uprotocol.v1.uattributes_pb2 import UAttributes, UPayloadFormat, UPriority
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.umessage_pb2 import UMessage
from uprotocol.v1.uri_pb2 import UUri

TRACEPARENT: Final = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
TYPES: Final = ("publish", "notification", "request", "response")
EXACT_MS: Final = 55_555  # a ttl that is no whole second travels exactly on MQTT, too
WHOLE_MS: Final = 58_000  # one that is may lose or gain the seconds that it waited (docs/mqtt5.md, A-17)
_DIFFERENCE_MS_MAX: Final = 30_000  # of WHOLE_MS: a busy machine

_TEXT = {"payload": b"Gr\xc3\xbc\xc3\x9fe".hex(), "payload_format": UPayloadFormat.UPAYLOAD_FORMAT_TEXT}
_PROTOBUF = {"payload": bytes(range(256)).hex(), "payload_format": UPayloadFormat.UPAYLOAD_FORMAT_PROTOBUF}


def profiles(type: str, source: str, sink: str | None) -> Iterator[tuple[str, Fields]]:
    """What is sent for one cell: everything set; next to nothing; values that are easily lost; a ttl in whole
    seconds."""
    common: dict[str, Any] = {"type": type, "source": source, "sink": sink}
    reqid = uuids.format(uuids.new())
    if type == "request":
        allowed: dict[str, Any] = {"token": "a token: ü", "permission_level": 7}
        least: dict[str, Any] = {"ttl_ms": EXACT_MS}
        zeros: dict[str, Any] = {"ttl_ms": EXACT_MS, "permission_level": 0}
        priority = UPriority.UPRIORITY_CS6
    elif type == "response":
        allowed = {"commstatus": UCode.PERMISSION_DENIED, "reqid": reqid}
        least = {"reqid": reqid, "ttl_ms": EXACT_MS}
        zeros = {"reqid": reqid, "ttl_ms": EXACT_MS, "commstatus": UCode.OK}
        priority = UPriority.UPRIORITY_CS5
    else:
        allowed, least, zeros, priority = {}, {}, {"ttl_ms": 0}, UPriority.UPRIORITY_CS3
    yield "all", Fields(**common, ttl_ms=EXACT_MS, priority=priority, traceparent=TRACEPARENT, **allowed, **_TEXT)
    yield "least", Fields(**common, **least)
    empty = {"payload": "", "payload_format": UPayloadFormat.UPAYLOAD_FORMAT_RAW}
    yield "zeros", Fields(**common, **zeros, **empty)
    yield "seconds", Fields(**common, **(least | {"ttl_ms": WHOLE_MS}), **_PROTOBUF)


def differences(
    sent: UMessage, received: UMessage, *, sink: UUri | None = None, absent_payload_shows: bool = True
) -> list[str]:
    """Where `received` is not what was sent. `sink` is what a publish is to arrive with: a streamer sets or removes it.

    The forms that mean the same by the specification count as one: no priority and CS1, no ttl and 0, and, where
    `absent_payload_shows` is false (up-transport-zenoh and -mqtt5 make one of both), no payload and an empty one.
    """
    expected, got = _normal(sent), _normal(received)
    if expected.attributes.type == attrs.PUBLISH:
        expected.attributes.ClearField("sink")
        if sink is not None:
            expected.attributes.sink.CopyFrom(sink)
    if sent.attributes.ttl and sent.attributes.ttl % 1000 == 0:
        difference_ms = expected.attributes.ttl - got.attributes.ttl
        if difference_ms % 1000 == 0 and abs(difference_ms) <= _DIFFERENCE_MS_MAX:
            expected.attributes.ttl = got.attributes.ttl
    found = [
        line
        for name in UAttributes.DESCRIPTOR.fields_by_name
        for line in _field(name, expected.attributes, got.attributes)
    ]
    if expected.payload != got.payload or (
        absent_payload_shows and expected.HasField("payload") != got.HasField("payload")
    ):
        found.append(f"payload: {_payload(expected)} != {_payload(got)}")
    return found


def _normal(message: UMessage) -> UMessage:
    copy = UMessage()
    copy.CopyFrom(message)
    if copy.attributes.priority == UPriority.UPRIORITY_UNSPECIFIED:
        copy.attributes.priority = UPriority.UPRIORITY_CS1
    if not copy.attributes.ttl:
        copy.attributes.ClearField("ttl")
    return copy


def _field(name: str, expected: UAttributes, got: UAttributes) -> Iterator[str]:
    if UAttributes.DESCRIPTOR.fields_by_name[name].has_presence and expected.HasField(name) != got.HasField(name):
        sent = "set" if expected.HasField(name) else "not set"
        yield f"{name}: {sent} when sent, {_words(getattr(got, name))!r} when received"
    elif getattr(expected, name) != getattr(got, name):
        yield f"{name}: {_words(getattr(expected, name))} != {_words(getattr(got, name))}"


def _words(value: Any) -> str:
    return str(value).replace("\n", " ").strip() if isinstance(value, Message) else repr(value)


def _payload(message: UMessage) -> str:
    return repr(message.payload) if message.HasField("payload") else "none"
