"""UMessage <-> bytes, and what was worked out once is not worked out again.

UMessage --(attributes but for the id) known?--> template --> bytes            unknown: Outbox, mapping, wire
PUBLISH  --(topic, properties but for the id) known?--> template --> UMessage  unknown: wire, mapping

Messages of one topic differ in id and payload, and hardly in anything else; mapping, checks and protobuf are most of what a message
costs. `encode` and `decode` answer as the long way does, and a test holds them to it.
"""

from __future__ import annotations

import re
import struct
from typing import Final, NamedTuple

from transports.mqtt5 import wire
from transports.mqtt5.mapping import Mapping
from transports.outbox import Outbox
from uprotocol.status import UStatusError
from uprotocol.v1.umessage_pb2 import UMessage

TEMPLATES_MAX: Final = 16_384  # each way, some 1 KB each; they start anew when there are more, as when messages differ in more than that

_UUID7: Final = re.compile(rb"([0-9a-fA-F]{8})-([0-9a-fA-F]{4})-(7[0-9a-fA-F]{3})-([89abAB][0-9a-fA-F]{3})-([0-9a-fA-F]{12})")
_id_field: Final = struct.Struct("<3sQcQ")  # UAttributes.id as protobuf writes it: tag and length, msb, tag, lsb
_ID_TAG, _LSB_TAG = b"\x0a\x12\x09", b"\x11"


class _Out(NamedTuple):
    """A PUBLISH but for packet id, the id's text and the payload."""

    topic: bytes
    before_id: bytes  # with the length of the properties
    after_id: bytes
    ttl_ms: int
    needs_payload: bool


class _In(NamedTuple):
    topic: str
    identifiers: tuple[int, ...]
    attributes: bytes  # but for the id
    has_payload: bool  # even if it is empty


class Codec:
    """`same_for_all_ids` False turns the templates of `decode` off, for a mapping whose attributes depend on the id's time."""

    def __init__(self, mapping: Mapping, outbox: Outbox, *, same_for_all_ids: bool = True) -> None:
        self._mapping, self._outbox, self._same_for_all_ids = mapping, outbox, same_for_all_ids
        self._out: dict[bytes, _Out] = {}
        self._in: dict[tuple[bytes, bytes, bytes], _In] = {}

    def encode(self, message: UMessage) -> tuple[bytes, bytes]:
        """The PUBLISH of `message` but for its packet id, which goes between the two.

        Raises UStatusError: INVALID_ARGUMENT for what is not valid or can't be carried, DEADLINE_EXCEEDED for what has expired.
        """
        attributes = message.attributes
        data = attributes.SerializeToString()
        out = self._out.get(data[20:])
        if out is None or not _begins_with_id(data) or (out.needs_payload and not message.HasField("payload")):
            return self._encode_anew(message, data)
        _, msb, _, lsb = _id_field.unpack_from(data)
        if out.ttl_ms and self._outbox.now_ms() > (msb >> 16) + out.ttl_ms:
            return self._encode_anew(message, data)  # it says why not
        text = f"{msb:016x}{lsb:016x}"
        id_text = f"{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:]}".encode()
        payload = message.payload
        tail = b"".join((out.before_id, id_text, out.after_id, payload))
        remaining = len(out.topic) + 2 + len(tail)
        if remaining > wire.PACKET_BYTES_MAX:
            return self._encode_anew(message, data)
        return b"%c%b%b" % (wire.PUBLISH | wire.QOS1, wire.varint(remaining), out.topic), tail

    def _encode_anew(self, message: UMessage, data: bytes) -> tuple[bytes, bytes]:
        refusal = self._outbox.refusal(message, self._outbox.now_ms())
        if refusal is not None:
            raise UStatusError.from_status(refusal)
        packet = self._mapping.encode(message)
        frame = wire.publish_frame(packet)
        attributes = message.attributes
        if _begins_with_id(data) and not (attributes.HasField("reqid") or attributes.token or attributes.traceparent):
            if len(self._out) >= TEMPLATES_MAX:
                self._out.clear()
            tail = frame[1]
            at = tail.index(wire.ID_KEY) + len(wire.ID_KEY)
            properties = tail[: len(tail) - len(packet.payload)]
            topic = packet.topic.encode()
            self._out[data[20:]] = _Out(
                len(topic).to_bytes(2, "big") + topic,
                properties[:at],
                properties[at + wire.ID_BYTES :],
                attributes.ttl,
                bool(attributes.payload_format),
            )
        return frame

    def decode(self, publish: wire.Publish) -> tuple[str, tuple[int, ...], UMessage]:
        """Topic, subscription identifiers, message. Raises UStatusError as Mapping.decode does."""
        topic, properties, payload = publish.topic, publish.properties, publish.payload
        at = properties.find(wire.ID_KEY) + len(wire.ID_KEY)
        key = (topic, properties[:at], properties[at + wire.ID_BYTES :])
        found = self._in.get(key)
        id = _UUID7.fullmatch(properties, at, at + wire.ID_BYTES) if found is not None else None
        if found is None or id is None:
            return self._decode_anew(publish, key, at)
        one, two, three, four, five = id.groups()
        field = _id_field.pack(_ID_TAG, int(one + two + three, 16), _LSB_TAG, int(four + five, 16))
        message = UMessage()
        message.attributes.MergeFromString(field + found.attributes)
        if payload or found.has_payload:
            message.payload = payload
        return found.topic, found.identifiers, message

    def _decode_anew(self, publish: wire.Publish, key: tuple[bytes, bytes, bytes], at: int) -> tuple[str, tuple[int, ...], UMessage]:
        packet, identifiers = wire.read_packet(publish)
        message = self._mapping.decode(packet)
        attributes = message.attributes
        one_of_a_kind = attributes.HasField("reqid") or attributes.token or attributes.traceparent
        if self._same_for_all_ids and not one_of_a_kind and wire.holds_id_at(publish.properties, at):
            if len(self._in) >= TEMPLATES_MAX:
                self._in.clear()
            data = attributes.SerializeToString()
            assert _begins_with_id(data), "protobuf writes fields in the order of their numbers"
            self._in[key] = _In(packet.topic, identifiers, data[20:], bool(attributes.payload_format))
        return packet.topic, identifiers, message


def _begins_with_id(data: bytes) -> bool:
    """True if the first 20 bytes of these UAttributes are a UUID of version 7, both halves written."""
    return data[:3] == _ID_TAG and data[11:12] == _LSB_TAG and data[4] >> 4 == 7 and data[19] >> 6 == 2
