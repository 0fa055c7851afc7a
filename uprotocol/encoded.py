"""A message as it crosses a dispatcher: addressed, counted, stored and sent on without being parsed.

encoded UAttributes = 0A 12 09 msb 11 lsb | stamp          EncodedMessage(encoded, payload, Stamp)
                      the id: 20 bytes    | all the rest   .attributes and .decoded() parse it when somebody looks

Messages of one stream share the stamp, so what is known of one (valid, its route, its priority) is known of all.
Parsing, validating and building a UMessage costs some 5 us; looking up its stamp costs 0.1 us.
"""

from __future__ import annotations

from typing import Final

from uprotocol import uuid as uuids
from uprotocol.attributes import PRIORITY_DEFAULT, PRIORITY_MAX
from uprotocol.v1.uattributes_pb2 import UAttributes
from uprotocol.v1.umessage_pb2 import UMessage
from uprotocol.v1.uri_pb2 import UUri

_BEGIN: Final = b"\x0a\x12\x09"  # field 1, 18 bytes: a UUID of two fixed64, msb first
_ID_SIZE: Final = 20
_FAR_OFF: Final = uuids.MSB_MAX >> 56  # the first byte of a time that may be none: from September 9983 on
STAMPS_MAX: Final = 32_768  # streams whose stamp is known, some 1 KB each
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
    ):
        return None
    if encoded[10] >= _FAR_OFF:
        return None
    return encoded[_ID_SIZE:]


def shared_suffix(encoded: bytes, attributes: UAttributes) -> bytes | None:
    """The suffix of `encoded`, which are `attributes`, if other messages may have it; else None.

    To protobuf a second id behind the first one counts, or half of it. Whoever reads by hand would take the message for
    another one.
    """
    mark = suffix(encoded)
    if mark is None or not is_shared(attributes) or UAttributes.FromString(mark).HasField("id"):
        return None
    return mark


class Stamp:
    """All attributes of a message but its id. Compared by identity: whoever makes stamps keeps one for each suffix.

    It holds bytes, and no protobuf message: one that is kept keeps the whole message alive that it was part of, payload
    included.
    """

    __slots__ = ("lane", "payload_format", "suffix", "ttl", "type")

    def __init__(self, attributes: UAttributes, suffix: bytes | None = None) -> None:
        """`suffix`, if the caller has it: what follows the id in the serialised `attributes`."""
        self.suffix = _without_id(attributes) if suffix is None else suffix
        self.type = attributes.type
        self.lane = lane(attributes)
        self.ttl: int = attributes.ttl  # milliseconds; 0: never expires
        self.payload_format: int = attributes.payload_format

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
    """False if something else than the id is of this message alone: its stamp is not worth remembering."""
    return not (attributes.traceparent or attributes.token or attributes.HasField("reqid"))


def lane(attributes: UAttributes) -> int:
    """The priority class as a number (CS0 is 1); one of a later specification counts as the highest that we know."""
    return min(attributes.priority or PRIORITY_DEFAULT, PRIORITY_MAX)


class EncodedMessage:
    """Reads like a valid UMessage whose payload is there if it has bytes or a format. Never changed once made.

    `encoded` are the serialised UAttributes, which begin with a valid id; `stamp` is what follows it.
    """

    __slots__ = ("_decoded", "encoded", "payload", "stamp")

    def __init__(self, encoded: bytes, payload: bytes, stamp: Stamp) -> None:
        self.encoded, self.payload, self.stamp = encoded, payload, stamp
        self._decoded: UMessage | None = None

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

    def is_expired(self, now_ms: int) -> bool:
        return self.stamp.ttl > 0 and now_ms > self.created_ms + self.stamp.ttl

    @property
    def attributes(self) -> UAttributes:
        return self.decoded().attributes

    def HasField(self, name: str) -> bool:
        return name == "attributes" or bool(self.payload) or self.stamp.payload_format != 0

    def ByteSize(self) -> int:
        return len(self.encoded) + len(self.payload) + 8

    def SerializeToString(self) -> bytes:
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


Carried = UMessage | EncodedMessage
"""What a dispatcher carries: they read alike."""


def decoded(message: Carried) -> UMessage:
    return message.decoded() if type(message) is EncodedMessage else message  # type: ignore[return-value]


class Readdressed:
    """Gives the messages of one stream other addresses, without parsing each: what follows the id is worked out
    once."""

    __slots__ = ("_sink", "_source", "_stamp", "_suffix")

    def __init__(self, source: UUri, sink: UUri | None) -> None:
        self._source, self._sink = source, sink
        self._stamp: Stamp | None = None
        self._suffix = b""

    def of(self, message: Carried) -> Carried:
        """A copy of `message`, which keeps its id."""
        if type(message) is not EncodedMessage:
            copy = UMessage()
            copy.CopyFrom(message)  # type: ignore[arg-type]
            self._put(copy.attributes)
            return copy
        if self._stamp is None:
            attributes = message.stamp.attributes
            self._put(attributes)
            self._stamp = Stamp(attributes)
            self._suffix = self._stamp.suffix
        return EncodedMessage(message.encoded[:_ID_SIZE] + self._suffix, message.payload, self._stamp)

    def _put(self, attributes: UAttributes) -> None:
        attributes.source.CopyFrom(self._source)
        if self._sink is not None:
            attributes.sink.CopyFrom(self._sink)


class Stamps:
    """Reads serialised UMessages back; one stamp for each suffix. A cache: it starts anew when it is full."""

    def __init__(self) -> None:
        self._known: dict[bytes, Stamp] = {}

    def read(self, data: bytes) -> Carried:
        """The message in `data`, a UMessage as this module or protobuf writes it; an EncodedMessage where that says the
        same.

        Raises google.protobuf.message.DecodeError.
        """
        begin, end = _field(data, 0, _ATTRIBUTES)
        encoded, payload = data[begin:end], b""
        if 0 < end < len(data):
            payload_begin, payload_end = _field(data, end, _PAYLOAD)
            if payload_end != len(data):
                return UMessage.FromString(data)
            payload = data[payload_begin:]
        stamp = self._known.get(encoded[_ID_SIZE:])
        if stamp is None or suffix(encoded) is None:
            stamp = self._meet(encoded, data)
            if stamp is None:
                return UMessage.FromString(data)
        if not payload and (end < len(data)) != (stamp.payload_format != 0):
            return UMessage.FromString(data)  # an empty payload without a format, which an EncodedMessage can't say
        return EncodedMessage(encoded, payload, stamp)

    def _meet(self, encoded: bytes, data: bytes) -> Stamp | None:
        """A new stamp; None if the message has none that others may share."""
        message = UMessage.FromString(data)
        mark = shared_suffix(encoded, message.attributes)
        if mark is None:
            return None
        if len(self._known) >= STAMPS_MAX:
            self._known.clear()
        stamp = self._known[mark] = Stamp(message.attributes, mark)
        return stamp


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
