"""A message as it crosses a dispatcher: addressed, counted, stored and sent on without being parsed.

encoded UAttributes = 0A 12 09 msb 11 lsb | suffix         EncodedMessage(encoded, payload, Stamp)
                      the id: 20 bytes    | all the rest   .attributes and .decoded() parse it when somebody looks

Messages of one stream share the suffix, and with it the Stamp: what is known of one (valid, its route, its priority)
is known of all. Parsing, validating and building a UMessage costs some 5 us; looking up its stamp costs 0.1 us.

Inside the dispatcher every message is an EncodedMessage. What a transport brings as UMessages becomes one at the border
(uprotocol.transport.EncodedListener); a transport without Capability.ENCODED is sent UMessages again.
"""

from __future__ import annotations

import struct
from typing import Final

from uprotocol import attributes as attrs
from uprotocol import uuid as uuids
from uprotocol.cache import Cache
from uprotocol.v1.uattributes_pb2 import UAttributes
from uprotocol.v1.umessage_pb2 import UMessage
from uprotocol.v1.uri_pb2 import UUri

_BEGIN: Final = b"\x0a\x12\x09"  # field 1, 18 bytes: a UUID of two fixed64, msb first
_ID_SIZE: Final = 20
_ID: Final = struct.Struct("<3sQBQ")
_FAR_OFF: Final = uuids.MSB_MAX >> 56  # the first byte of a time that may be none: from September 9983 on
SHARED_BYTES_MAX: Final = 512  # of attributes that others may share: two addresses have some 300 at most
_ATTRIBUTES, _PAYLOAD = 0x0A, 0x12  # the fields of UMessage, length-delimited


def suffix(encoded: bytes) -> bytes | None:
    """What follows the id in serialised UAttributes; None if they don't begin with an id that is a UUID of version 7.

    None as well for a time of the last years before 10000: whether that is a date yet is for `validate` to say (A-54).
    To remember what follows it for other messages, ask `shared_suffix`.
    """
    if (
        len(encoded) < _ID_SIZE
        or not encoded.startswith(_BEGIN)
        or encoded[11] != 0x11
        or encoded[4] >> 4 != 7
        or encoded[19] >> 6 != 2
        or encoded[10] >= _FAR_OFF
    ):
        return None
    return encoded[_ID_SIZE:]


def shared_suffix(encoded: bytes, attributes: UAttributes) -> bytes | None:
    """The suffix of `encoded`, which are `attributes`, if other messages may have it; else None.

    To protobuf a second id behind the first one counts, or half of it. Whoever reads by hand would take the message for
    another one.
    """
    found = suffix(encoded)
    if found is None or not is_shared(attributes) or UAttributes.FromString(found).HasField("id"):
        return None
    return found


class Stamp:
    """All attributes of a message but its id. Compared by identity: whoever makes stamps keeps one for each suffix.

    It holds bytes and numbers, and no protobuf message: one that is kept keeps the whole message alive that it was part
    of, payload included.
    """

    __slots__ = ("address", "is_shared", "payload_format", "priority", "suffix", "ttl", "type")

    def __init__(self, attributes: UAttributes, suffix: bytes | None = None) -> None:
        """`suffix`, if the caller has it: what follows the id in the serialised `attributes`."""
        self.suffix = _without_id(attributes) if suffix is None else suffix
        self.type = attributes.type
        address = UAttributes(type=attributes.type)  # what decides where a message goes, as a key
        if attributes.HasField("source"):
            address.source.CopyFrom(attributes.source)
        if attributes.HasField("sink"):
            address.sink.CopyFrom(attributes.sink)
        address.DiscardUnknownFields()  # they decide nothing, and may be large
        self.address = address.SerializeToString()
        self.priority = attrs.priority(attributes)
        self.ttl: int = attributes.ttl  # milliseconds; 0: never expires
        self.payload_format: int = attributes.payload_format
        self.is_shared = is_shared(attributes)

    @property
    def attributes(self) -> UAttributes:
        """Parsed anew each time; without an id."""
        return UAttributes.FromString(self.suffix)


def _without_id(attributes: UAttributes) -> bytes:
    rest = UAttributes()
    rest.CopyFrom(attributes)
    rest.ClearField("id")
    return rest.SerializeToString()


def is_shared(attributes: UAttributes) -> bool:
    """False if something else than the id is of this message alone, or if it is larger than any that is valid, by
    fields that nobody knows: its stamp is not worth remembering."""
    is_single = attributes.traceparent or attributes.token or attributes.HasField("reqid")
    return not is_single and attributes.ByteSize() <= SHARED_BYTES_MAX


class EncodedMessage:
    """Reads like a valid UMessage whose payload is there if it has bytes or a format. Never changed once made.

    `encoded` are the serialised UAttributes, which begin with a valid id; `stamp` is what follows it.
    """

    __slots__ = ("_decoded", "encoded", "payload", "stamp")

    def __init__(self, encoded: bytes, payload: bytes, stamp: Stamp) -> None:
        self.encoded, self.payload, self.stamp = encoded, payload, stamp
        self._decoded: UMessage | None = None

    @classmethod
    def of(cls, message: UMessage, *, keep: bool = False) -> EncodedMessage:
        """`message`, which must not change afterwards. Streams that share a suffix get the same stamp each time.

        `keep` it with all that it has, also what only protobuf reads in it.
        """
        attributes = message.attributes
        encoded = attributes.SerializeToString()
        is_plain = encoded.startswith(_BEGIN) and encoded[11:12] == b"\x11"
        if not is_plain:  # no valid id, or one with fields that we don't know
            encoded = _ID.pack(_BEGIN, attributes.id.msb, 0x11, attributes.id.lsb) + _without_id(attributes)
        rest, payload = encoded[_ID_SIZE:], message.payload
        stamp = _STAMPS.get(rest)
        if stamp is None:
            stamp = Stamp(attributes, rest)
            if stamp.is_shared:
                _STAMPS[rest] = stamp
        made = cls(encoded, payload, stamp)
        if keep or not is_plain or message.HasField("payload") != (bool(payload) or stamp.payload_format != 0):
            made._decoded = message
        return made

    def __repr__(self) -> str:
        return f"EncodedMessage(id={self.id_bytes.hex()}, payload={len(self.payload)} bytes)"

    @property
    def id_key(self) -> bytes:
        """The id as encoded, 18 bytes: equal to `UUID.SerializeToString()`."""
        return self.encoded[2:_ID_SIZE]

    @property
    def id_bytes(self) -> bytes:
        """The id, 16 bytes, big endian."""
        encoded = self.encoded
        return encoded[10:2:-1] + encoded[19:11:-1]

    @property
    def created_ms(self) -> int:
        """The time in the id, Unix milliseconds."""
        return int.from_bytes(self.encoded[5:11], "little")

    @property
    def expires_ms(self) -> int | None:
        """Last Unix millisecond of its life; None: it never expires."""
        return self.created_ms + self.stamp.ttl if self.stamp.ttl else None

    def is_expired(self, now_ms: int) -> bool:
        return self.stamp.ttl > 0 and now_ms > self.created_ms + self.stamp.ttl

    @property
    def attributes(self) -> UAttributes:
        return self.decoded().attributes

    def HasField(self, name: str) -> bool:
        if name == "attributes" or self.payload or self.stamp.payload_format:
            return True
        return self._decoded is not None and self._decoded.HasField("payload")

    def ByteSize(self) -> int:
        return len(self.encoded) + len(self.payload) + 8

    def SerializeToString(self) -> bytes:
        if self._decoded is not None:  # it may have what only protobuf reads in it
            return self._decoded.SerializeToString()
        encoded, payload = self.encoded, self.payload
        if payload or self.stamp.payload_format:
            return b"\x0a%b%b\x12%b%b" % (_varint(len(encoded)), encoded, _varint(len(payload)), payload)
        return b"\x0a%b%b" % (_varint(len(encoded)), encoded)

    def decoded(self) -> UMessage:
        """The UMessage; parsed once."""
        if self._decoded is None:
            message = UMessage()
            message.attributes.ParseFromString(self.encoded)
            if self.HasField("payload"):
                message.payload = self.payload
            self._decoded = message
        return self._decoded


_STAMPS: Final[Cache[bytes, Stamp]] = Cache()  # of `EncodedMessage.of`


Carried = UMessage | EncodedMessage
"""What transports with Capability.ENCODED are sent, and logs keep: they read alike."""


def decoded(message: Carried) -> UMessage:
    return message.decoded() if type(message) is EncodedMessage else message  # type: ignore[return-value]


READDRESSED_MAX: Final = 256  # stamps of one address: it may have as many as there are priorities and lifetimes


class Readdressed:
    """Gives messages other addresses without parsing each: what follows the id is worked out once for each stamp."""

    __slots__ = ("_sink", "_source", "_stamps")

    def __init__(self, source: UUri, sink: UUri | None) -> None:
        """`sink` None: they have none afterwards."""
        self._source, self._sink = source, sink
        self._stamps: Cache[Stamp, Stamp] = Cache(READDRESSED_MAX)

    def of(self, message: EncodedMessage) -> EncodedMessage:
        """A copy of `message`, which keeps its id."""
        stamp = self._stamps.get(message.stamp)
        if stamp is None:
            attributes = message.stamp.attributes
            self.put(attributes)
            stamp = Stamp(attributes)
            if stamp.is_shared:
                self._stamps[message.stamp] = stamp
        return EncodedMessage(message.encoded[:_ID_SIZE] + stamp.suffix, message.payload, stamp)

    def put(self, attributes: UAttributes) -> None:
        """The addresses into `attributes`."""
        attributes.source.CopyFrom(self._source)
        if self._sink is None:
            attributes.ClearField("sink")
        else:
            attributes.sink.CopyFrom(self._sink)


class Stamps:
    """Reads serialised UMessages back; one stamp for each suffix. A cache: it starts anew when it is full."""

    def __init__(self) -> None:
        self._known: Cache[bytes, Stamp] = Cache()

    def read(self, data: bytes) -> EncodedMessage:
        """The message in `data`, a UMessage as this module or protobuf writes it.

        Raises google.protobuf.message.DecodeError.
        """
        begin, end = _field(data, 0, _ATTRIBUTES)
        encoded, payload = data[begin:end], b""
        if 0 < end < len(data):
            payload_begin, payload_end = _field(data, end, _PAYLOAD)
            if payload_end != len(data):
                return EncodedMessage.of(UMessage.FromString(data), keep=True)
            payload = data[payload_begin:]
        stamp = self._known.get(encoded[_ID_SIZE:])
        if stamp is None or suffix(encoded) is None:
            message = UMessage.FromString(data)
            rest = shared_suffix(encoded, message.attributes)
            if rest is None:
                return EncodedMessage.of(message, keep=True)
            stamp = self._known[rest] = Stamp(message.attributes, rest)
        if not payload and (end < len(data)) != (stamp.payload_format != 0):
            return EncodedMessage.of(UMessage.FromString(data), keep=True)  # an empty payload without a format
        return EncodedMessage(encoded, payload, stamp)


def _field(data: bytes, at: int, tag: int) -> tuple[int, int]:
    """Where the content of the length-delimited field `tag` at `at` begins and ends; (0, 0) if there is none."""
    try:
        if data[at] != tag:
            return 0, 0
        at += 1
        length = data[at]
        if length > 0x7F:
            length &= 0x7F
            shift = 7
            at += 1
            while (byte := data[at]) > 0x7F:
                length |= (byte & 0x7F) << shift
                shift += 7
                at += 1
            length |= byte << shift
    except IndexError:
        return 0, 0
    begin, end = at + 1, at + 1 + length
    return (begin, end) if end <= len(data) else (0, 0)


def _varint(value: int) -> bytes:
    if value < len(_VARINTS):
        return _VARINTS[value]
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


_VARINTS: Final = [bytes([n]) if n < 0x80 else bytes([n & 0x7F | 0x80, n >> 7]) for n in range(1 << 14)]
