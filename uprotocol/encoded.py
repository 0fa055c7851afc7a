"""A message that is routed, counted, stored and forwarded without being parsed.

encoded UAttributes = 0A 12 09 msb 11 lsb | suffix            EncodedMessage(encoded, payload, Stamp)
                      the id: 20 bytes    | everything else   .attributes and .decoded() parse it on demand

Messages of one stream have the same suffix, and so share one Stamp: its results (valid, route, priority) are computed
once and looked up afterwards. Parsing, validating and building a UMessage costs some 5 us; the look-up costs 0.1 us.

Inside the dispatcher every message is an EncodedMessage. uprotocol.transport.EncodedListener converts the UMessages of
a transport; a transport without Capability.ENCODED gets UMessages again.
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
_FAR_OFF: Final = uuids.MSB_MAX >> 56  # first byte of a time that may be invalid: from September 9983 on
SHARED_BYTES_MAX: Final = 512  # attributes of a shared stamp: two addresses have some 300 bytes at most
_ATTRIBUTES, _PAYLOAD = 0x0A, 0x12  # the fields of UMessage, length-delimited


def suffix(encoded: bytes) -> bytes | None:
    """Returns what follows the id in serialised UAttributes; None if they don't begin with a UUID of version 7.

    Also None for a time from September 9983 on: `validate` has to decide whether that is valid (A-54). Use
    `shared_suffix` before storing the result for other messages.
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
    """Returns the suffix of `encoded` (the serialised `attributes`) if other messages may have it; else None.

    None also if the suffix contains a second id, or half of one: protobuf would merge it into the first.
    """
    found = suffix(encoded)
    if found is None or not is_shared(attributes) or UAttributes.FromString(found).HasField("id"):
        return None
    return found


class Stamp:
    """All attributes of a message except its id. Stamps are compared by identity, so there is one for each suffix.

    It holds bytes and numbers but no protobuf message, which would keep the whole message alive with its payload.

    `priority`: the class (CS0 is 1), CS1 if none is set (dsn~up-attributes-priority~1); a higher one of a later
    specification counts as CS6.
    """

    __slots__ = ("address", "is_shared", "payload_format", "priority", "suffix", "ttl", "type")

    def __init__(self, attributes: UAttributes, suffix: bytes | None = None) -> None:
        """`suffix`: what follows the id in the serialised `attributes`, if the caller has it."""
        self.suffix = _without_id(attributes) if suffix is None else suffix
        self.type = attributes.type
        address = UAttributes(type=attributes.type)  # what routing depends on, as a key
        if attributes.HasField("source"):
            address.source.CopyFrom(attributes.source)
        if attributes.HasField("sink"):
            address.sink.CopyFrom(attributes.sink)
        address.DiscardUnknownFields()  # routing ignores them, and they may be large
        self.address = address.SerializeToString()
        self.priority = min(attributes.priority or attrs.PRIORITY_DEFAULT, attrs.PRIORITY_MAX)
        self.ttl: int = attributes.ttl  # milliseconds; 0: never expires
        self.payload_format: int = attributes.payload_format
        self.is_shared = is_shared(attributes)

    @property
    def attributes(self) -> UAttributes:
        """The attributes without id; parsed at each access."""
        return UAttributes.FromString(self.suffix)


def _without_id(attributes: UAttributes) -> bytes:
    rest = UAttributes()
    rest.CopyFrom(attributes)
    rest.ClearField("id")
    return rest.SerializeToString()


def is_shared(attributes: UAttributes) -> bool:
    """False if the stamp should not be stored: another attribute than the id is individual to the message, or unknown
    fields make the attributes larger than SHARED_BYTES_MAX."""
    is_single = attributes.traceparent or attributes.token or attributes.HasField("reqid")
    return not is_single and attributes.ByteSize() <= SHARED_BYTES_MAX


class EncodedMessage:
    """Reads like a valid UMessage that has a payload if there are payload bytes or a payload format. Immutable.

    `encoded` are the serialised UAttributes, which begin with a valid id; `stamp` has the rest of them.
    """

    __slots__ = ("_decoded", "encoded", "payload", "stamp")

    def __init__(self, encoded: bytes, payload: bytes, stamp: Stamp) -> None:
        self.encoded, self.payload, self.stamp = encoded, payload, stamp
        self._decoded: UMessage | None = None

    @classmethod
    def of(cls, message: UMessage, *, keep: bool = False) -> EncodedMessage:
        """Convert `message`, which must not change afterwards. Messages with the same suffix get the same stamp.

        `keep`: keep the UMessage itself, since it may contain what only protobuf can read.
        """
        attributes = message.attributes
        encoded = attributes.SerializeToString()
        is_plain = encoded.startswith(_BEGIN) and encoded[11:12] == b"\x11"
        if not is_plain:  # no valid id, or one with unknown fields
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
        """The last Unix millisecond in which the message is valid; None: it never expires."""
        return self.created_ms + self.stamp.ttl if self.stamp.ttl else None

    def is_expired(self, now_ms: int) -> bool:
        ttl = self.stamp.ttl
        return ttl > 0 and now_ms > int.from_bytes(self.encoded[5:11], "little") + ttl

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
        if self._decoded is not None:  # it may contain what only protobuf can read
            return self._decoded.SerializeToString()
        encoded, payload = self.encoded, self.payload
        size, count = len(encoded), len(_VARINTS)
        head = _VARINTS[size] if size < count else _varint(size)
        if not payload and not self.stamp.payload_format:
            return b"\x0a%b%b" % (head, encoded)
        size = len(payload)
        return b"\x0a%b%b\x12%b%b" % (head, encoded, _VARINTS[size] if size < count else _varint(size), payload)

    def decoded(self) -> UMessage:
        """Returns the UMessage; it is parsed once."""
        if self._decoded is None:
            message = UMessage()
            message.attributes.ParseFromString(self.encoded)
            if self.payload or self.stamp.payload_format:
                message.payload = self.payload
            self._decoded = message
        return self._decoded


_STAMPS: Final[Cache[bytes, Stamp]] = Cache()  # of `EncodedMessage.of`


Carried = UMessage | EncodedMessage
"""What transports with Capability.ENCODED and logs accept; both read alike."""


def decoded(message: Carried) -> UMessage:
    return message.decoded() if type(message) is EncodedMessage else message  # type: ignore[return-value]


READDRESSED_MAX: Final = 256  # stamps of one address, which differ in priority and ttl


class Readdressed:
    """Changes the addresses of messages; the new attributes are computed once for each stamp."""

    __slots__ = ("_sink", "_source", "_stamps")

    def __init__(self, source: UUri, sink: UUri | None) -> None:
        """`sink` None: remove the sink."""
        self._source, self._sink = source, sink
        self._stamps: Cache[Stamp, Stamp] = Cache(READDRESSED_MAX)

    def of(self, message: EncodedMessage) -> EncodedMessage:
        """Returns a copy of `message` with the new addresses and the same id."""
        stamp = self._stamps.get(message.stamp)
        if stamp is None:
            attributes = message.stamp.attributes
            self.put(attributes)
            stamp = Stamp(attributes)
            if stamp.is_shared:
                self._stamps[message.stamp] = stamp
        return EncodedMessage(message.encoded[:_ID_SIZE] + stamp.suffix, message.payload, stamp)

    def put(self, attributes: UAttributes) -> None:
        """Write the new addresses into `attributes`."""
        attributes.source.CopyFrom(self._source)
        if self._sink is None:
            attributes.ClearField("sink")
        else:
            attributes.sink.CopyFrom(self._sink)


class Stamps:
    """Reads serialised UMessages, with one stamp for each suffix. The stamps are in a Cache."""

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
    """Returns begin and end of the content of the length-delimited field `tag` at `at`; (0, 0) if there is none."""
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
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


_VARINTS: Final = [_varint(value) for value in range(1 << 14)]
