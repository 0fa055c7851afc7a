"""Encoded attributes <-> PUBLISH, and what was worked out once is not worked out again.

UAttributes --(all but the id) known?--> template --> PUBLISH                       unknown: SendChecks, mapping, wire
PUBLISH     --(topic, properties but for the id) known?--> template --> UAttributes unknown: wire, mapping

Messages of one topic differ in id and payload, and hardly in anything else; mapping, checks and protobuf are most of
what a message costs. `encode` and `decode` answer as the long way does, and a test holds them to it.
"""

from __future__ import annotations

import re
import struct
from typing import Final, NamedTuple

from transports.base import SendChecks
from transports.mqtt5 import wire
from transports.mqtt5.mapping import Mapping, Packet
from uprotocol.cache import Cache
from uprotocol.encoded import Carried, EncodedMessage, decoded, is_shared, suffix
from uprotocol.status import UStatusError, invalid
from uprotocol.uuid import MSB_MAX

# each way, some 1 KB each; more are needed where messages differ in more than id and payload
TEMPLATES_MAX: Final = 16_384

_UUID7: Final = re.compile(
    rb"([0-9a-fA-F]{8})-([0-9a-fA-F]{4})-(7[0-9a-fA-F]{3})-([89abAB][0-9a-fA-F]{3})-([0-9a-fA-F]{12})"
)
_id_field: Final = struct.Struct("<3sQcQ")  # UAttributes.id as protobuf writes it: tag and length, msb, tag, lsb
_ID_TAG, _LSB_TAG = b"\x0a\x12\x09", b"\x11"
_ID_SIZE: Final = _id_field.size


class _Out(NamedTuple):
    """A PUBLISH but for packet id, the id's text and the payload."""

    topic: bytes
    before_id: bytes  # with the length of the properties
    after_id: bytes
    size: int  # what the remaining length says, but for the payload
    ttl_ms: int
    needs_payload: bool


class _In(NamedTuple):
    topic: str
    identifiers: tuple[int, ...]
    attributes: bytes  # but for the id


class Codec:
    """`same_for_all_ids` False turns the templates of `decode` off, for a mapping whose attributes depend on the id's
    time."""

    def __init__(self, mapping: Mapping, checks: SendChecks, *, same_for_all_ids: bool = True) -> None:
        self._mapping, self._checks, self._same_for_all_ids = mapping, checks, same_for_all_ids
        self.packet_bytes_max = wire.PACKET_BYTES_MAX  # ours, or the broker's if that is less
        self._out: Cache[bytes, _Out] = Cache(TEMPLATES_MAX)
        self._in: Cache[tuple[bytes, bytes, bytes], _In] = Cache(TEMPLATES_MAX)

    def encode(self, message: Carried) -> tuple[bytes, bytes]:
        """The PUBLISH of `message` but for its packet id, which goes between the two.

        Raises UStatusError: INVALID_ARGUMENT for what is not valid or can't be carried, DEADLINE_EXCEEDED for what has
        expired.
        """
        data: bytes = message.encoded if type(message) is EncodedMessage else message.attributes.SerializeToString()
        out = self._out.get(data[_ID_SIZE:])
        if out is None:
            return self._encode_anew(message, data)
        tag, msb, lsb_tag, lsb = _id_field.unpack_from(data)
        payload = message.payload
        remaining = out.size + len(payload)
        if (
            tag != _ID_TAG
            or lsb_tag != _LSB_TAG
            or msb >> 12 & 0xF != 7  # no UUID of version 7
            or msb > MSB_MAX  # no date
            or lsb >> 62 != 2
            or (out.needs_payload and not payload and not message.HasField("payload"))
            or (out.ttl_ms and self._checks.now_ms() > (msb >> 16) + out.ttl_ms)
            or remaining + wire.HEADER_BYTES_MAX > self.packet_bytes_max
        ):
            return self._encode_anew(message, data)  # it says why not
        id = b"%08x-%04x-%04x-%04x-%012x" % (
            msb >> 32,
            msb >> 16 & 0xFFFF,
            msb & 0xFFFF,
            lsb >> 48,
            lsb & 0xFFFF_FFFF_FFFF,
        )
        head = b"%c%b%b" % (wire.PUBLISH | wire.QOS1, wire.varint(remaining), out.topic)
        return head, b"".join((out.before_id, id, out.after_id, payload))

    def _encode_anew(self, message: Carried, data: bytes) -> tuple[bytes, bytes]:
        message = decoded(message)
        refusal = self._checks.refusal(message, self._checks.now_ms())
        if refusal is not None:
            raise UStatusError.from_status(refusal)
        packet = self._mapping.encode(message)
        head, tail = wire.publish_frame(packet)
        length = len(head) + 2 + len(tail)
        if length > self.packet_bytes_max:  # a broker hangs up on it, again and again
            raise invalid(
                f"a message is a packet of at most {self.packet_bytes_max} bytes here, and this one has {length}: "
                "send less, or raise "
                "message_bytes_max, and the broker's own limit if it has one"
            )
        key = suffix(data)
        if key is not None and is_shared(message.attributes):
            self._out[key] = _template(packet, tail, message.attributes.ttl)
        return head, tail

    def decode(self, publish: wire.Publish) -> tuple[str, tuple[int, ...], bytes]:
        """Topic, subscription identifiers, serialised UAttributes. Raises UStatusError as Mapping.decode does."""
        topic, properties = publish.topic, publish.properties
        at = properties.find(wire.ID_KEY) + len(wire.ID_KEY)
        key = (topic, properties[:at], properties[at + wire.ID_BYTES :])
        found = self._in.get(key)
        id = _UUID7.fullmatch(properties, at, at + wire.ID_BYTES) if found is not None else None
        if found is None or id is None:
            return self._decode_anew(publish, key, at)
        one, two, three, four, five = id.groups()
        encoded = _id_field.pack(_ID_TAG, int(one + two + three, 16), _LSB_TAG, int(four + five, 16)) + found.attributes
        return found.topic, found.identifiers, encoded

    def _decode_anew(
        self, publish: wire.Publish, key: tuple[bytes, bytes, bytes], at: int
    ) -> tuple[str, tuple[int, ...], bytes]:
        packet, identifiers = wire.read_packet(publish)
        attributes = self._mapping.decode(packet).attributes
        encoded = attributes.SerializeToString()
        if self._same_for_all_ids and is_shared(attributes) and wire.holds_id_at(publish.properties, at):
            rest = suffix(encoded)
            if rest is not None:
                self._in[key] = _In(packet.topic, identifiers, rest)
        return packet.topic, identifiers, encoded


def _template(packet: Packet, tail: bytes, ttl_ms: int) -> _Out:
    """`tail` is that of `packet`'s PUBLISH."""
    at = tail.index(wire.ID_KEY) + len(wire.ID_KEY)
    properties = tail[: len(tail) - len(packet.payload)]
    topic = packet.topic.encode()
    return _Out(
        len(topic).to_bytes(2, "big") + topic,
        properties[:at],
        properties[at + wire.ID_BYTES :],
        2 + len(topic) + 2 + len(properties),
        ttl_ms,
        packet.content_type is not None,
    )
