"""Wire formats of the benchmarks: topics, stamped payloads, and their packets on each network. Pure.

payload  = run (4) | number in the run (4) | time at which it was due, ns (8) | padding
           so a subscriber can count and check order and time, and the delay of a late publisher is included
zenoh    : payload, attachment = 0x01 + UAttributes
mqtt     : PUBLISH, QoS 1, uProtocol's user properties       made and parsed here: a client library
dds      : CDR of uprotocol::v1::UMessage                    would be slower than the relay

Every message has its own id, because a dispatcher drops an id that it has seen. Message n of a publisher is on topic
n modulo the number of topics.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Iterator
from typing import Final

from uprotocol import uri as uris
from uprotocol import uuid as uuids
from uprotocol.attributes import PUBLISH
from uprotocol.v1.uattributes_pb2 import UAttributes, UPayloadFormat, UPriority
from uprotocol.v1.uri_pb2 import UUri
from uprotocol.v1.uuid_pb2 import UUID

INGRESS_AUTHORITY: Final = "device1"
EGRESS_AUTHORITY: Final = "device2"
TOPICS_PER_ENTITY: Final = 1_000  # further topics belong to the next uEntities
FIRST_ENTITY: Final = 0x10AB
FIRST_RESOURCE: Final = 0x8000
VERSION: Final = 3


def topic(number: int) -> UUri:
    """Returns the topic `number` of a benchmark."""
    entity, resource = divmod(number, TOPICS_PER_ENTITY)
    return uris.uri(INGRESS_AUTHORITY, FIRST_ENTITY + entity, VERSION, FIRST_RESOURCE + resource)


def segments(number: int) -> str:
    """Returns the segments of that topic in Zenoh's keys and MQTT's in-vehicle topics."""
    entity, resource = divmod(number, TOPICS_PER_ENTITY)
    return f"{INGRESS_AUTHORITY}/{FIRST_ENTITY + entity:X}/0/{VERSION}/{FIRST_RESOURCE + resource:X}"


def zenoh_key(number: int) -> str:
    return f"up/{segments(number)}/{{}}/{{}}/{{}}/{{}}/{{}}"


TOPIC: Final = topic(0)
EVERY_TOPIC: Final = uris.pattern(INGRESS_AUTHORITY)
SUBSCRIBER: Final = uris.uri(EGRESS_AUTHORITY, 0x20EF, 1, 0)
ZENOH_KEY: Final = zenoh_key(0)
MQTT_TOPIC: Final = segments(0)
MQTT_EVERY_TOPIC: Final = f"{INGRESS_AUTHORITY}/#"
DDS_PARTITION: Final = ZENOH_KEY  # docs/dds-mapping.md

PAYLOAD_BYTES: Final = 256
_STAMP: Final = struct.Struct(">IIq")
PAYLOAD_BYTES_MIN: Final = _STAMP.size
BATCH_MESSAGES: Final = 64  # messages that a publisher sends together if so many are due
BATCH_BYTES: Final = 1 << 18  # ... fewer if they are large
unstamp = _STAMP.unpack_from


def batches(
    run: int,
    messages: int,
    rate: float,
    size: int = PAYLOAD_BYTES,
    *,
    now_ns: Callable[[], int] = time.time_ns,
    sleep: Callable[[float], None] = time.sleep,
) -> Iterator[list[bytes]]:
    """Yields `messages` payloads of `size` bytes, due evenly at `rate` per second (0: full speed), in batches of those
    that are due. The stamp is the time at which a message was due, even if it is sent later."""
    pack, padding = _STAMP.pack, b"x" * (size - PAYLOAD_BYTES_MIN)
    together = max(1, min(BATCH_MESSAGES, BATCH_BYTES // size))
    began, number = now_ns(), 0
    while number < messages:
        end = min(number + together, messages)
        if not rate:
            now = now_ns()
            yield [pack(run, n, now) + padding for n in range(number, end)]
            number = end
            continue
        early_ns = began + int(number / rate * 1e9) - now_ns()
        if early_ns > 0:
            sleep(early_ns / 1e9)
        due = min(end, max(number + 1, int((now_ns() - began) * rate / 1e9) + 1))
        yield [pack(run, n, began + int(n / rate * 1e9)) + padding for n in range(number, due)]
        number = due


def _id_template() -> tuple[int, int]:
    """Returns (msb, lsb with a zero counter) of a new UUIDv7; the low 48 bits of lsb count the messages."""
    made = uuids.new()
    return made.msb, made.lsb & ~0xFFFF_FFFF_FFFF


class Attributes:
    """UAttributes as 46 bytes, with a new id each time."""

    def __init__(self, topics: int = 1) -> None:
        self.msb, self.lsb = _id_template()
        wholes = [self._whole(topic(number)) for number in range(topics)]
        self._head = wholes[0][:12]
        assert wholes[0][11:20] == b"\x11" + self.lsb.to_bytes(8, "little"), "the id is the first field of UAttributes"
        self._attachment_head = b"\x01" + self._head
        self._tails, self._topics = [whole[20:] for whole in wholes], topics

    def _whole(self, source: UUri) -> bytes:
        made = UAttributes(
            id=UUID(msb=self.msb, lsb=self.lsb),
            type=PUBLISH,
            source=source,
            priority=UPriority.UPRIORITY_CS1,
            payload_format=UPayloadFormat.UPAYLOAD_FORMAT_PROTOBUF,
        )
        return made.SerializeToString()

    def plain(self, number: int) -> bytes:
        return self._head + (self.lsb | number).to_bytes(8, "little") + self._tails[number % self._topics]

    def attachment(self, number: int) -> bytes:
        """Returns the attributes with the version byte of the Zenoh mapping in front."""
        return self._attachment_head + (self.lsb | number).to_bytes(8, "little") + self._tails[number % self._topics]


# --- MQTT 5: only what a load generator needs
# -----------------------------------------------------------------------------

CONNACK, PUBLISH_PACKET, PUBACK, SUBACK = 2, 3, 4, 9
_RECEIVE_MAXIMUM: Final = 0x21
RECEIVE_MAXIMUM_DEFAULT: Final = 65_535  # MQTT 5, 3.2.2.3.3: the value if a CONNACK has no such property


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
    """Returns a CONNECT with a clean start and without keep-alive."""
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
    """PUBLISH packets that differ in packet id, the last digits of the message id, topic and payload."""

    def __init__(self, topics: int = 1) -> None:
        msb, lsb = _id_template()
        self._message_id = uuids.format(UUID(msb=msb, lsb=lsb))
        self._parts = [self._of(number) for number in range(topics)]
        self._topics = topics

    def _of(self, number: int) -> tuple[bytes, bytes, bytes]:
        """Returns the topic, and the properties before and after the digits of the counter."""
        source = uris.format(topic(number))
        properties = [("uP", "1"), ("1", self._message_id), ("2", "up-pub.v1"), ("3", source), ("5", "CS1")]
        encoded = (
            b"".join(b"\x26" + text_of(key) + text_of(value) for key, value in properties) + b"\x03" + text_of("2")
        )
        encoded = varint(len(encoded)) + encoded
        cut = encoded.index(self._message_id.encode()) + len(self._message_id) - 12
        return text_of(segments(number)), encoded[:cut], encoded[cut + 12 :]

    def packet(self, number: int, payload: bytes) -> bytes:
        name, before, after = self._parts[number % self._topics]
        length = varint(len(name) + 2 + len(before) + 12 + len(after) + len(payload))
        packet_id = (number % 65_535 + 1).to_bytes(2, "big")
        return b"".join((b"\x32", length, name, packet_id, before, b"%012x" % number, after, payload))


def publish_packet(rest: bytes, packet_id: int, topic_name: bytes) -> bytes:
    """Returns a PUBLISH with QoS 1; `rest` is everything after the packet id: properties and payload."""
    length = varint(len(topic_name) + 2 + len(rest))
    return b"".join((b"\x32", length, topic_name, packet_id.to_bytes(2, "big"), rest))


def publish_places(data: bytes, start: int) -> tuple[int, int]:
    """Returns the positions of the packet id and the payload of a PUBLISH whose body begins at `start`."""
    packet_id = start + 2 + (data[start] << 8 | data[start + 1])
    length, at, shift = 0, packet_id + 2, 0
    while True:
        byte = data[at]
        length |= (byte & 0x7F) << shift
        shift += 7
        at += 1
        if byte < 0x80:
            return packet_id, at + length


_ID_PROPERTY: Final = b"\x26\x00\x011\x00\x24"  # user property "1", a text of 36 characters


def message_id(data: bytes, start: int, end: int) -> bytes:
    """Returns the 16 bytes of the uProtocol id in a PUBLISH. Raises ValueError if it is missing."""
    at = data.index(_ID_PROPERTY, start, end) + len(_ID_PROPERTY)
    return bytes.fromhex(data[at : at + 36].decode().replace("-", ""))


def split_packets(data: bytes) -> tuple[list[tuple[int, int, int]], int]:
    """Returns (kind, start and end of the body) of every whole packet in `data`, and the position of the rest."""
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
    """Returns how many PUBLISH packets may be unacknowledged, from the body of a CONNACK. Raises ConnectionError if the
    broker refused the connection."""
    if connack[1]:
        raise ConnectionError(f"the broker refused the connection with reason code {connack[1]:#04x}")
    at, end = 3, 3 + connack[2]
    while at < end:
        property, at = connack[at], at + 1
        if property == _RECEIVE_MAXIMUM:
            return int.from_bytes(connack[at : at + 2], "big")
        at += _PROPERTY_BYTES.get(property) or 2 + int.from_bytes(connack[at : at + 2], "big")
    return RECEIVE_MAXIMUM_DEFAULT
