"""PUBLISH and PUBACK <-> bytes (OASIS MQTT 5.0, sections 2 and 3). No sockets.

Packet --publish_frame--> head | packet id | tail        bytes --split--> [(first byte, body)] --read_publish--> Publish

PublishCodec: encoded attributes <-> PUBLISH, with templates of what was computed before.
UAttributes --(all but the id) known?--> template --> PUBLISH                       unknown: SendChecks, mapping, frame
PUBLISH     --(topic, properties but for the id) known?--> template --> UAttributes unknown: read_packet, mapping
                and, if the ttl depends on it: as many whole seconds after the id's time?

Messages of one topic differ in id and payload and in little else; mapping, checks and protobuf are most of the cost of
a message. With and without a template the results are equal, and a test checks this. paho-mqtt spends some 300 us on
the properties of one PUBLISH; this code takes 3 to 5. packets.py has the rare packets."""

from __future__ import annotations

import functools
import re
import struct
from typing import Final, NamedTuple

from transports.base import SendChecks
from transports.mqtt5.mapping import FRESH_MS_MAX, FRESH_TTL, LATE_TTL, Mapping, Packet
from uprotocol.cache import Cache
from uprotocol.encoded import Carried, EncodedMessage, decoded, is_shared, suffix
from uprotocol.status import UStatusError, invalid
from uprotocol.uuid import MSB_MAX, time_ms
from uprotocol.v1.umessage_pb2 import UMessage

PUBLISH_BITS: Final = 0x30
PUBACK: Final = 0x40
QOS1: Final = 0x02  # flags of PUBLISH_BITS: QoS 1, neither duplicate nor retained
PACKET_BYTES_MAX: Final = 268_435_455  # the limit of the remaining length
HEADER_BYTES_MAX: Final = 5  # the first byte and the remaining length
TEXTS_CACHED_MAX: Final = 32_768  # encoded pairs that many messages share: types, sources, sinks

_PAYLOAD_FORMAT, _EXPIRY, _CONTENT_TYPE, _RESPONSE_TOPIC, _CORRELATION = 1, 2, 3, 8, 9  # properties of PUBLISH_BITS
_SUBSCRIPTION, _ALIAS, _USER = 11, 35, 38
_SIZES: Final = {_PAYLOAD_FORMAT: 2, _EXPIRY: 5, _ALIAS: 3}
ID_KEY: Final = b"\x26\x00\x011\x00\x24"  # the user property "1" with a value of ...
ID_TEXT_BYTES: Final = 36  # ... so many bytes
_EVER_CHANGING: Final = frozenset({"1", "6", LATE_TTL, FRESH_TTL, "10", "11"})

_u16 = struct.Struct("!H")
_u32 = struct.Struct("!I")

_UUID7: Final = re.compile(
    rb"([0-9a-fA-F]{8})-([0-9a-fA-F]{4})-(7[0-9a-fA-F]{3})-([89abAB][0-9a-fA-F]{3})-([0-9a-fA-F]{12})"
)
_id_field: Final = struct.Struct("<3sQcQ")  # UAttributes.id as protobuf writes it: tag and length, msb, tag, lsb
_ID_TAG, _LSB_TAG = b"\x0a\x12\x09", b"\x11"


class Publish(NamedTuple):
    """A PUBLISH that arrived. `properties` are still bytes."""

    packet_id: int  # 0: QoS 0, not acknowledged
    topic: bytes
    properties: bytes
    payload: bytes
    retained: bool = False  # sent because we have just subscribed


def text(text: str) -> bytes:
    data = text.encode()
    return _u16.pack(len(data)) + data


def _pair(key: str, value: str) -> bytes:
    return b"\x26" + text(key) + text(value)


_cached_pair = functools.lru_cache(TEXTS_CACHED_MAX)(_pair)


def varint(number: int) -> bytes:
    """A Variable Byte Integer (section 1.5.5)."""
    assert 0 <= number <= PACKET_BYTES_MAX, f"{number} does not fit a Variable Byte Integer"
    if number < 0x80:
        return bytes((number,))
    if number < 0x4000:
        return bytes((number & 0x7F | 0x80, number >> 7))
    digits = bytearray()
    while number > 0x7F:
        digits.append(number & 0x7F | 0x80)
        number >>= 7
    digits.append(number)
    return bytes(digits)


def publish_frame(packet: Packet) -> tuple[bytes, bytes]:
    """A QoS 1 PUBLISH without its packet id, which goes between the two parts. Raises INVALID_ARGUMENT if it is too
    long for MQTT."""
    parts = []
    if packet.expiry_s is not None:
        parts.append(b"\x02" + _u32.pack(packet.expiry_s))
    if packet.content_type is not None:
        parts.append(b"\x03" + text(packet.content_type))
    if packet.correlation is not None:
        parts.append(b"\x09" + _u16.pack(len(packet.correlation)) + packet.correlation)
    for key, value in packet.user_properties:
        parts.append(_pair(key, value) if key in _EVER_CHANGING else _cached_pair(key, value))
    properties = b"".join(parts)
    topic, length = text(packet.topic), varint(len(properties))
    remaining = len(topic) + 2 + len(length) + len(properties) + len(packet.payload)
    if remaining > PACKET_BYTES_MAX:
        raise invalid(f"expected a packet of at most {PACKET_BYTES_MAX} bytes, the limit of MQTT, got {remaining}")
    return b"%c%b%b" % (PUBLISH_BITS | QOS1, varint(remaining), topic), b"%b%b%b" % (length, properties, packet.payload)


def pubacks(packet_ids: list[int]) -> bytes:
    """One PUBACK (success) for each, in order."""
    return b"".join([b"\x40\x02" + _u16.pack(packet_id) for packet_id in packet_ids])


def split(data: bytes, bytes_max: int = PACKET_BYTES_MAX) -> tuple[list[tuple[int, bytes]], int]:
    """Every whole packet in `data` as (first byte, what follows the remaining length), and how many bytes they take.

    Stops before a packet larger than `bytes_max`. Raises ValueError if these are not MQTT packets: nothing behind can
    be read.
    """
    packets, start, end = [], 0, len(data)
    while start + 2 <= end:
        length, position = data[start + 1], start + 2
        if length & 0x80:
            length, position = read_varint(data, start + 1, end)
            if not position or length > bytes_max:
                break
        if position + length > end:
            break
        packets.append((data[start], data[position : position + length]))
        start = position + length
    return packets, start


def read_varint(data: bytes | memoryview, start: int, end: int) -> tuple[int, int]:
    """The number at `start` and where it ends; (0, 0) if the rest of it has not arrived. Raises ValueError."""
    number = shift = 0
    for position in range(start, min(end, start + 4)):
        digit = data[position]
        number |= (digit & 0x7F) << shift
        if digit < 0x80:
            return number, position + 1
        shift += 7
    if end - start >= 4:
        raise ValueError("a Variable Byte Integer has at most 4 bytes")
    return 0, 0


def read_publish(first: int, body: bytes | memoryview) -> Publish:
    """`body` is a memoryview if it is large, so that only its parts are copied. Raises ValueError if it is not that of
    a PUBLISH."""
    try:
        position = topic_end = 2 + (body[0] << 8 | body[1])
        packet_id = 0
        if first & 0x06:
            packet_id = body[position] << 8 | body[position + 1]
            position += 2
        length, start = body[position], position + 1
        if length & 0x80:
            length, start = read_varint(body, position, len(body))
    except IndexError:
        raise ValueError("a PUBLISH ends before its properties") from None
    end = start + length
    if not start or end > len(body):
        raise ValueError("a PUBLISH ends within its properties")
    if isinstance(body, bytes):
        return Publish(packet_id, body[2:topic_end], body[start:end], body[end:], first & 0x01 != 0)
    return Publish(packet_id, bytes(body[2:topic_end]), bytes(body[start:end]), bytes(body[end:]), first & 0x01 != 0)


def holds_id_at(properties: bytes, at: int) -> bool:
    """True if the first user property "1" has a value of ID_TEXT_BYTES at `at`. read_packet must have accepted the
    properties."""
    position = 0
    while position < at - len(ID_KEY):
        if properties.startswith(ID_KEY[:4], position):
            return False
        position = _end_of_property(properties, position)
    return position == at - len(ID_KEY) and properties.startswith(ID_KEY, position)


def _end_of_property(data: bytes, start: int) -> int:
    """Where the property at `start` ends. Raises IndexError if its lengths are missing, UStatusError for one that a
    PUBLISH can't have."""
    kind = data[start]
    if kind == _USER:
        start += 2 + (data[start + 1] << 8 | data[start + 2])  # to the byte in front of its value
    elif kind == _SUBSCRIPTION:
        return read_varint(data, start + 1, len(data))[1] or len(data) + 1
    elif kind in _SIZES:
        return start + _SIZES[kind]
    elif kind not in (_CONTENT_TYPE, _RESPONSE_TOPIC, _CORRELATION):
        raise invalid(f"property {kind} is not allowed in a PUBLISH")
    return start + 3 + (data[start + 1] << 8 | data[start + 2])


def read_packet(publish: Publish) -> Packet:
    """The content of a PUBLISH. Raises UStatusError(INVALID_ARGUMENT)."""
    user: list[tuple[str, str]] = []
    expiry_s = correlation = content_type = None
    data, end = publish.properties, 0
    try:
        while end < len(data):
            start, end = end, _end_of_property(data, end)
            kind = data[start]
            if end > len(data):
                raise IndexError
            if kind == _USER:
                split = start + 3 + (data[start + 1] << 8 | data[start + 2])
                user.append((data[start + 3 : split].decode(), data[split + 2 : end].decode()))
            elif kind == _EXPIRY:
                (expiry_s,) = _u32.unpack_from(data, start + 1)
            elif kind == _CONTENT_TYPE:
                content_type = data[start + 3 : end].decode()
            elif kind == _CORRELATION:
                correlation = data[start + 3 : end]
        topic = publish.topic.decode()
    except (IndexError, ValueError) as error:
        raise invalid(f"the properties of a PUBLISH can't be read: {str(error) or 'they end too early'}") from None
    return Packet(topic, user, expiry_s, correlation, content_type, publish.payload)


class _OutTemplate(NamedTuple):
    """Template of a PUBLISH: all but packet id, message id and payload."""

    topic: bytes
    before_id: bytes  # with the length of the properties
    after_id: bytes
    size: int  # the remaining length without the payload
    ttl_ms: int
    needs_payload: bool
    late: _OutTemplate | None = None  # for messages sent later than FRESH_MS_MAX after their id's time


def _without_id(packet: Packet, ttl_ms: int) -> _OutTemplate:
    """The template of `packet`, without its id and payload."""
    _, tail = publish_frame(packet)
    at = tail.index(ID_KEY) + len(ID_KEY)
    properties, topic = tail[: len(tail) - len(packet.payload)], text(packet.topic)
    size, has_format = len(topic) + 2 + len(properties), packet.content_type is not None
    return _OutTemplate(topic, properties[:at], properties[at + ID_TEXT_BYTES :], size, ttl_ms, has_format)


class _InTemplate(NamedTuple):
    topic: str
    attributes: bytes  # without the id
    waited_s: int | None  # valid for messages that arrive so long after the time of their id; None: for all


class PublishCodec:
    """Times of ids are compared with the clock of `checks`, in both directions."""

    def __init__(self, mapping: Mapping, checks: SendChecks) -> None:
        self._mapping, self._checks = mapping, checks
        self.packet_bytes_max = PACKET_BYTES_MAX  # the smaller of our limit and the broker's
        self._out: Cache[bytes, _OutTemplate] = Cache()
        self._in: Cache[tuple[bytes, bytes, bytes], _InTemplate] = Cache()

    def encode(self, message: Carried) -> tuple[bytes, bytes]:
        """The PUBLISH of `message` without its packet id, which goes between the two parts.

        Raises UStatusError: INVALID_ARGUMENT for a message that is not valid or that MQTT can't carry,
        DEADLINE_EXCEEDED for one that has expired.
        """
        key: bytes | None
        if type(message) is EncodedMessage:
            data, key = message.encoded, message.stamp.suffix
        else:
            data = message.attributes.SerializeToString()
            key = suffix(data)
        out = self._out.get(key) if key is not None else None
        if out is None:
            return self._encode_without_template(message, key)
        payload = message.payload
        _, msb, _, lsb = _id_field.unpack_from(data)
        age_ms = self._checks.now_ms() - (msb >> 16) if out.ttl_ms else 0
        if age_ms > FRESH_MS_MAX and out.late is not None:
            out = out.late
        remaining = out.size + len(payload)
        if (
            msb >> 12 & 0xF != 7  # no UUID of version 7
            or msb > MSB_MAX  # no date
            or lsb >> 62 != 2
            or (out.needs_payload and not payload and not message.HasField("payload"))
            or age_ms > out.ttl_ms
            or remaining + HEADER_BYTES_MAX > self.packet_bytes_max
        ):
            return self._encode_without_template(message, key)  # which says what is wrong
        time, version, variant, rest = msb >> 32, msb & 0xFFFF, lsb >> 48, lsb & 0xFFFF_FFFF_FFFF
        id = b"%08x-%04x-%04x-%04x-%012x" % (time, msb >> 16 & 0xFFFF, version, variant, rest)
        if 0x80 <= remaining < 0x4000:  # `varint` has two bytes, as nearly always
            head = b"%c%c%c%b" % (PUBLISH_BITS | QOS1, remaining & 0x7F | 0x80, remaining >> 7, out.topic)
        else:
            head = b"%c%b%b" % (PUBLISH_BITS | QOS1, varint(remaining), out.topic)
        return head, b"".join((out.before_id, id, out.after_id, payload))

    def _encode_without_template(self, message: Carried, key: bytes | None) -> tuple[bytes, bytes]:
        message = decoded(message)
        now_ms = self._checks.now_ms()
        refusal = self._checks.refusal(message, now_ms)
        if refusal is not None:
            raise UStatusError.from_status(refusal)
        packet = self._mapping.encode(message, is_late=now_ms - time_ms(message.attributes.id) > FRESH_MS_MAX)
        head, tail = publish_frame(packet)
        length = len(head) + 2 + len(tail)
        if length > self.packet_bytes_max:  # the broker would hang up at each attempt
            raise invalid(
                f"expected a packet of at most {self.packet_bytes_max} bytes, got {length}: send less, or raise "
                "message_bytes_max, and the broker's own limit if it has one"
            )
        if key is not None and is_shared(message.attributes):
            self._out[key] = self._template(message)
        return head, tail

    def _template(self, message: UMessage) -> _OutTemplate:
        """The template for all messages that differ from `message` only in id and payload."""
        fresh = self._mapping.encode(message, is_late=False)
        made = _without_id(fresh, message.attributes.ttl)
        if message.attributes.ttl and (late := self._mapping.encode(message, is_late=True)) != fresh:
            return made._replace(late=_without_id(late, message.attributes.ttl))
        return made

    def decode(self, publish: Publish) -> tuple[str, bytes]:
        """Returns the topic and the serialised UAttributes. Raises UStatusError as Mapping.decode does."""
        topic, properties = publish.topic, publish.properties
        at = properties.find(ID_KEY) + len(ID_KEY)
        key = (topic, properties[:at], properties[at + ID_TEXT_BYTES :])
        found = self._in.get(key)
        id = _UUID7.fullmatch(properties, at, at + ID_TEXT_BYTES) if found is not None else None
        if found is not None and id is not None:
            one, two, three, four, five = id.groups()
            msb = int(one + two + three, 16)
            if found.waited_s is None or found.waited_s == max(0, self._checks.now_ms() - (msb >> 16)) // 1000:
                field = _id_field.pack(_ID_TAG, msb, _LSB_TAG, int(four + five, 16))
                return found.topic, field + found.attributes
        packet = read_packet(publish)
        now_ms = self._checks.now_ms()
        message, is_restored = self._mapping.read(packet, now_ms)
        attributes = message.attributes
        encoded = attributes.SerializeToString()
        rest = suffix(encoded)
        if rest is not None and is_shared(attributes) and holds_id_at(properties, at):
            waited = max(0, now_ms - time_ms(attributes.id)) // 1000 if is_restored else None
            self._in[key] = _InTemplate(packet.topic, rest, waited)
        return packet.topic, encoded
