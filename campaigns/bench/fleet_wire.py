"""The wire format of the fleet leg: MQTT packets of uProtocol, made and parsed by hand. Pure.

payload = topic (4) | number on that topic (4) | when it was due, ns (8) | whether it must arrive (1) | padding
The topic 12 of vehicle vin00007 is //vin00007/20/1/800C, number 7 * 30 + 12 of all topics.
"""

from __future__ import annotations

import struct
from typing import Final, NamedTuple

from campaigns.bench.wire import PAYLOAD_BYTES, text_of, varint
from uprotocol import uri as uris
from uprotocol.v1.uri_pb2 import UUri

CLOUD: Final = "cloud"
BACKEND: Final = uris.uri(CLOUD, 0x10, 1, 0)  # the subscriber
ENTITY, VERSION, FIRST_TOPIC = 0x20, 1, 0x8000  # of a vehicle's topics
CALL_TTL_MS: Final = 600_000  # of a Subscribe
PUBLISHED: Final = f"+/{ENTITY:X}/0/{VERSION:X}/+"  # in-vehicle, on the back end's network
FOR_BACKEND: Final = f"+/+/+/+/+/{CLOUD}/10/0/1/0"
FOR_VEHICLES: Final = f"{CLOUD}/+"  # off-vehicle

_STAMP: Final = struct.Struct(">IIqB")
_PADDING: Final = b"x" * (PAYLOAD_BYTES - _STAMP.size)
unstamp = _STAMP.unpack_from


def stamped(topic: int, number: int, due_ns: int, is_owed: bool) -> bytes:
    return _STAMP.pack(topic, number, due_ns, is_owed) + _PADDING


def vehicle(number: int) -> str:
    return f"vin{number:05}"


def topic_uri(topic: int, topics_each: int) -> UUri:
    return uris.uri(vehicle(topic // topics_each), ENTITY, VERSION, FIRST_TOPIC + topic % topics_each)


def topic_number(uri: UUri, topics_each: int) -> int:
    return int(uri.authority_name[3:]) * topics_each + uri.resource_id - FIRST_TOPIC


def segments(uri: UUri) -> str:
    """Returns a topic name in a vehicle or in the back end."""
    return (
        f"{uri.authority_name}/{uri.ue_id & 0xFFFF:X}/{uri.ue_id >> 16:X}/{uri.ue_version_major:X}/{uri.resource_id:X}"
    )


# -- packets

_EXPIRY, _CONTENT_TYPE, _CORRELATION, _USER = 0x02, 0x03, 0x09, 0x26
_FIXED: Final = {0x01: 1, _EXPIRY: 4, 0x23: 2}  # bytes of the PUBLISH properties that are not texts


def properties(
    type: str, id: str, source: str, sink: str, priority: str, expiry_s: int = 0, reqid: bytes = b""
) -> bytes:
    """Returns the properties of a PUBLISH in uProtocol's mapping. expiry_s 0 and no reqid add no property."""
    users = (("uP", "1"), ("1", id), ("2", type), ("3", source), ("4", sink), ("5", priority))
    made = b"".join(b"\x26" + text_of(key) + text_of(value) for key, value in users)
    if expiry_s:
        made += struct.pack(">BI", _EXPIRY, expiry_s)
    if reqid:
        made += struct.pack(">BH", _CORRELATION, len(reqid)) + reqid
    return made + b"\x03" + text_of("2")  # payload format: protobuf


def publish_packet(topic: str, packet_id: int, made: bytes, payload: bytes) -> bytes:
    body = b"".join((text_of(topic), packet_id.to_bytes(2, "big"), varint(len(made)), made, payload))
    return b"".join((b"\x32", varint(len(body)), body))


class Received(NamedTuple):
    topic: str
    packet_id: bytes
    users: dict[str, str]
    correlation: bytes
    expiry_s: int
    payload: bytes


def read_publish(data: bytes, start: int, end: int) -> Received:
    """Parses the body of a PUBLISH with QoS 1."""
    at = start + 2 + int.from_bytes(data[start : start + 2], "big")
    topic, packet_id = data[start + 2 : at].decode(), data[at : at + 2]
    length, at = _read_varint(data, at + 2)
    stop, users, correlation, expiry_s = at + length, dict[str, str](), b"", 0
    while at < stop:
        kind, at = data[at], at + 1
        if kind == 0x0B:  # the subscription identifier
            _, at = _read_varint(data, at)
            continue
        if kind in _FIXED:
            value, at = data[at : at + _FIXED[kind]], at + _FIXED[kind]
            expiry_s = int.from_bytes(value, "big") if kind == _EXPIRY else expiry_s
            continue
        value, at = _read_text(data, at)
        if kind == _USER:
            text, at = _read_text(data, at)
            users[value.decode()] = text.decode()
        elif kind == _CORRELATION:
            correlation = value
    return Received(topic, packet_id, users, correlation, expiry_s, data[stop:end])


def payload_of(data: bytes, end: int) -> bytes:
    """Returns the payload of a PUBLISH with a stamped payload, and ignores the rest."""
    return data[end - PAYLOAD_BYTES : end]


def _read_text(data: bytes, at: int) -> tuple[bytes, int]:
    end = at + 2 + int.from_bytes(data[at : at + 2], "big")
    return data[at + 2 : end], end


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte, at = data[at], at + 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
