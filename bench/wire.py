"""What travels in a benchmark: one topic, 256-byte payloads, and the bytes of each network around them. Pure.

payload  = run (4) | number in the run (4) | time stamp in ns (8) | padding   so a subscriber can count, and check order
zenoh    : payload, attachment = 0x01 + UAttributes                          and time
mqtt     : PUBLISH, QoS 1, uProtocol's user properties                       made and taken apart here: a client library
dds      : CDR of uprotocol::v1::UMessage, written by cyclonedds             would be slower than what is measured

Every message has an id of its own, for a dispatcher drops an id that it has seen.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Iterator
from typing import Final

from uprotocol import uri as uris
from uprotocol import uuid as uuids
from uprotocol.attributes import PUBLISH
from uprotocol.v1.uattributes_pb2 import UAttributes, UPayloadFormat, UPriority
from uprotocol.v1.uuid_pb2 import UUID

INGRESS_AUTHORITY: Final = "device1"
EGRESS_AUTHORITY: Final = "device2"
TOPIC: Final = uris.uri(INGRESS_AUTHORITY, 0x10AB, 3, 0x80CD)
SUBSCRIBER: Final = uris.uri(EGRESS_AUTHORITY, 0x20EF, 1, 0)
SEGMENTS: Final = f"{INGRESS_AUTHORITY}/10AB/0/3/80CD"
ZENOH_KEY: Final = f"up/{SEGMENTS}/{{}}/{{}}/{{}}/{{}}/{{}}"
MQTT_TOPIC: Final = SEGMENTS
DDS_PARTITION: Final = ZENOH_KEY  # docs/dds-mapping.md

PAYLOAD_BYTES: Final = 256
_STAMP: Final = struct.Struct(">IIq")
_PADDING: Final = b"x" * (PAYLOAD_BYTES - _STAMP.size)
unstamp = _STAMP.unpack_from


def payloads(run: int, messages: int, rate: float) -> Iterator[bytes]:
    """`messages` stamped payloads, `rate` of them per second (0: as fast as they are taken)."""
    pack, now_ns, started = _STAMP.pack, time.time_ns, time.perf_counter()
    for number in range(messages):
        if rate:
            early = started + number / rate - time.perf_counter()
            if early > 0:
                time.sleep(early)
        yield pack(run, number, now_ns()) + _PADDING


def _id_template() -> tuple[int, int]:
    """(msb, lsb with a zero counter) of a UUIDv7 made now; the low 48 bits of lsb count the messages."""
    made = uuids.new()
    return made.msb, made.lsb & ~0xFFFF_FFFF_FFFF


class Attributes:
    """UAttributes as bytes, 46 of them, with a new id each time."""

    def __init__(self) -> None:
        self.msb, self.lsb = _id_template()
        whole = UAttributes(
            id=UUID(msb=self.msb, lsb=self.lsb),
            type=PUBLISH,
            source=TOPIC,
            priority=UPriority.UPRIORITY_CS1,
            payload_format=UPayloadFormat.UPAYLOAD_FORMAT_PROTOBUF,
        ).SerializeToString()
        head, self._tail = whole[:12], whole[20:]
        assert whole[11:20] == b"\x11" + self.lsb.to_bytes(8, "little"), "the id is the first field of UAttributes"
        self._head = head
        self._attachment_head = b"\x01" + head

    def plain(self, number: int) -> bytes:
        return self._head + (self.lsb | number).to_bytes(8, "little") + self._tail

    def attachment(self, number: int) -> bytes:
        """With the version byte of the Zenoh mapping in front."""
        return self._attachment_head + (self.lsb | number).to_bytes(8, "little") + self._tail


# --- MQTT 5, as little of it as a load generator needs
# -----------------------------------------------------------------------------

CONNACK, PUBLISH_PACKET, PUBACK, SUBACK = 2, 3, 4, 9
_RECEIVE_MAXIMUM: Final = 0x21
RECEIVE_MAXIMUM_DEFAULT: Final = 65_535  # MQTT 5, 3.2.2.3.3: what a CONNACK without the property means


def varint(value: int) -> bytes:
    out = bytearray()
    while True:
        value, low = divmod(value, 128)
        out.append(low | (0x80 if value else 0))
        if not value:
            return bytes(out)


def text_of(text: str) -> bytes:
    return struct.pack(">H", len(text)) + text.encode()


def connect_packet(client_id: str) -> bytes:
    properties = struct.pack(">BH", _RECEIVE_MAXIMUM, 65_535)
    body = (
        text_of("MQTT") + b"\x05\x02" + struct.pack(">H", 0) + varint(len(properties)) + properties + text_of(client_id)
    )
    return b"\x10" + varint(len(body)) + body


def subscribe_packet(topic_filter: str) -> bytes:
    body = struct.pack(">H", 1) + b"\x00" + text_of(topic_filter) + b"\x01"
    return b"\x82" + varint(len(body)) + body


def puback_packet(packet_id: bytes) -> bytes:
    return b"\x40\x02" + packet_id


class PublishPackets:
    """PUBLISH packets that differ in packet id, the last digits of the message id, and the payload."""

    def __init__(self) -> None:
        msb, lsb = _id_template()
        message_id = uuids.format(UUID(msb=msb, lsb=lsb))
        properties = [("uP", "1"), ("1", message_id), ("2", "up-pub.v1"), ("3", uris.format(TOPIC)), ("5", "CS1")]
        encoded = (
            b"".join(b"\x26" + text_of(key) + text_of(value) for key, value in properties) + b"\x03" + text_of("2")
        )
        encoded = varint(len(encoded)) + encoded
        cut = encoded.index(message_id.encode()) + len(message_id) - 12
        length = 2 + len(MQTT_TOPIC) + 2 + len(encoded) + PAYLOAD_BYTES
        self._head = b"\x32" + varint(length) + text_of(MQTT_TOPIC)
        self._before, self._after = encoded[:cut], encoded[cut + 12 :]

    def packet(self, number: int, payload: bytes) -> bytes:
        packet_id = (number % 65_535 + 1).to_bytes(2, "big")
        return b"".join((self._head, packet_id, self._before, b"%012x" % number, self._after, payload))


def split_packets(data: bytes) -> tuple[list[tuple[int, int, int]], int]:
    """(kind, start and end of its body) of every whole packet in `data`, and where the rest begins."""
    packets, position, end = [], 0, len(data)
    while position + 2 <= end:
        at, length, shift = position + 1, 0, 0
        while at < end:
            byte = data[at]
            length |= (byte & 0x7F) << shift
            shift += 7
            at += 1
            if byte < 0x80:
                break
        else:
            break
        if at + length > end:
            break
        packets.append((data[position] >> 4, at, at + length))
        position = at + length
    return packets, position


# all others are texts
_PROPERTY_BYTES: Final = {0x11: 4, 0x13: 2, 0x21: 2, 0x22: 2, 0x24: 1, 0x25: 1, 0x27: 4, 0x28: 1, 0x29: 1, 0x2A: 1}


def receive_maximum(connack: bytes) -> int:
    """How many PUBLISH packets the broker lets be unacknowledged, from the body of its CONNACK. Raises ConnectionError
    if it refused us."""
    if connack[1]:
        raise ConnectionError(f"the broker refused the connection with reason code {connack[1]:#04x}")
    at, end = 3, 3 + connack[2]
    while at < end:
        property, at = connack[at], at + 1
        if property == _RECEIVE_MAXIMUM:
            return int.from_bytes(connack[at : at + 2], "big")
        at += _PROPERTY_BYTES.get(property) or 2 + int.from_bytes(connack[at : at + 2], "big")
    return RECEIVE_MAXIMUM_DEFAULT
