"""uProtocol on the wire, written by hand: the judges share no code with what they judge.

Uri, Message <-> protobuf bytes      Message <-> MQTT 5 topic and properties      Message <-> Zenoh key and attachment

Sources: the specification's up-l1/mqtt_5.adoc and up-l1/zenoh.adoc, and the numbers of its .proto files.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, NamedTuple

from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties

PUBLISH, REQUEST, RESPONSE, NOTIFICATION = 1, 2, 3, 4
CE_NAMES: Final = {PUBLISH: "up-pub.v1", REQUEST: "up-req.v1", RESPONSE: "up-res.v1", NOTIFICATION: "up-not.v1"}
TYPES: Final = {name: number for number, name in CE_NAMES.items()}
PRIORITY_CS1, PRIORITY_CS4 = 2, 5
FORMAT_PROTOBUF, FORMAT_TEXT = 2, 7

Fields = dict[int, list[int | bytes]]


def varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def field(number: int, value: int | bytes | str | None) -> bytes:
    """One protobuf field; nothing for None and for the default that implicit presence leaves out."""
    if value is None or value == 0 or value == "":
        return b""
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    data = value.encode() if isinstance(value, str) else value
    return varint(number << 3 | 2) + varint(len(data)) + data


def fixed64(number: int, value: int) -> bytes:
    return varint(number << 3 | 1) + value.to_bytes(8, "little")


def parse(data: bytes) -> Fields:
    """The fields of a protobuf message by number, in their order. Raises ValueError if it is none."""
    found: Fields = {}
    at = 0
    while at < len(data):
        tag, at = _read_varint(data, at)
        kind = tag & 7
        value: int | bytes
        if kind == 0:
            value, at = _read_varint(data, at)
        elif kind in (1, 5):
            size = 8 if kind == 1 else 4
            value, at = int.from_bytes(data[at : at + size], "little"), at + size
        elif kind == 2:
            size, at = _read_varint(data, at)
            value, at = data[at : at + size], at + size
        else:
            raise ValueError(f"wire type {kind}")
        if at > len(data):
            raise ValueError("cut off")
        found.setdefault(tag >> 3, []).append(value)
    return found


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while at < len(data):
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
    raise ValueError("cut off")


def packed(values: Iterable[int | bytes]) -> list[int]:
    """A repeated integer field, packed or not."""
    numbers: list[int] = []
    for value in values:
        if isinstance(value, int):
            numbers.append(value)
            continue
        at = 0
        while at < len(value):
            number, at = _read_varint(value, at)
            numbers.append(number)
    return numbers


def number(fields: Fields, name: int, default: int = 0) -> int:
    value = fields.get(name, [default])[-1]
    return value if isinstance(value, int) else default


def blob(fields: Fields, name: int) -> bytes | None:
    value = fields.get(name, [None])[-1]
    return value if isinstance(value, bytes) else None


class Uri(NamedTuple):
    authority: str
    entity: int
    version: int
    resource: int

    def __str__(self) -> str:
        return f"up://{self.authority}/{self.entity:X}/{self.version:X}/{self.resource:X}"

    @classmethod
    def of(cls, text: str) -> Uri:
        authority, entity, version, resource = text.removeprefix("up:").removeprefix("//").split("/")
        return cls(authority, int(entity, 16), int(version, 16), int(resource, 16))

    @classmethod
    def any_of(cls, authority: str) -> Uri:
        """The sink that a streamer gives to a publish."""
        return cls(authority, 0xFFFF_FFFF, 0xFF, 0xFFFF)

    @property
    def is_any(self) -> bool:
        return self.entity == 0xFFFF_FFFF

    def encode(self) -> bytes:
        return field(1, self.authority) + field(2, self.entity) + field(3, self.version) + field(4, self.resource)

    @classmethod
    def decode(cls, data: bytes) -> Uri:
        fields = parse(data)
        return cls((blob(fields, 1) or b"").decode(), number(fields, 2), number(fields, 3), number(fields, 4))

    @property
    def segments(self) -> str:
        return f"{self.authority}/{self.entity & 0xFFFF:X}/{self.entity >> 16:X}/{self.version:X}/{self.resource:X}"


def new_id() -> bytes:
    """A UUID version 7, 16 bytes."""
    random = bytearray(os.urandom(10))
    random[0] = random[0] & 0x0F | 0x70
    random[2] = random[2] & 0x3F | 0x80
    return int(time.time() * 1000).to_bytes(6, "big") + bytes(random)


def id_text(id: bytes) -> str:
    text = id.hex()
    return "-".join((text[:8], text[8:12], text[12:16], text[16:20], text[20:]))


@dataclass(frozen=True, slots=True)
class Message:
    id: bytes
    type: int
    source: Uri
    sink: Uri | None
    payload: bytes
    ttl_ms: int = 0
    reqid: bytes | None = None
    commstatus: int = 0
    format: int = FORMAT_TEXT

    @property
    def priority(self) -> int:
        return PRIORITY_CS4 if self.type in (REQUEST, RESPONSE) else PRIORITY_CS1

    # Zenoh

    def attachment(self) -> bytes:
        return b"\x01" + self.attributes()

    def attributes(self) -> bytes:
        return b"".join(
            (
                field(1, _uuid(self.id)),
                field(2, self.type),
                field(3, self.source.encode()),
                field(4, self.sink.encode() if self.sink is not None else None),
                field(5, self.priority),
                field(6, self.ttl_ms or None),
                field(9, _uuid(self.reqid) if self.reqid is not None else None),
                field(12, self.format),
            )
        )

    def zenoh_key(self) -> str:
        sink = self.sink.segments if self.sink is not None and not self.sink.is_any else "{}/{}/{}/{}/{}"
        return f"up/{self.source.segments}/{sink}"

    @classmethod
    def of_attributes(cls, data: bytes, payload: bytes) -> Message:
        """Raises ValueError, TypeError if these are none."""
        fields = parse(data)
        sink, reqid = blob(fields, 4), blob(fields, 9)
        return cls(
            _uuid_of(blob(fields, 1) or b""),
            number(fields, 2),
            Uri.decode(blob(fields, 3) or b""),
            Uri.decode(sink) if sink is not None else None,
            payload,
            number(fields, 6),
            _uuid_of(reqid) if reqid is not None else None,
            number(fields, 8),
            number(fields, 12),
        )

    @classmethod
    def of_umessage(cls, data: bytes) -> Message:
        fields = parse(data)
        return cls.of_attributes(blob(fields, 1) or b"", blob(fields, 2) or b"")

    # MQTT 5

    def topic(self, off_vehicle: bool) -> str:
        if off_vehicle:
            assert self.sink is not None, "off-vehicle topics have a sink"
            return f"{self.source.authority}/{self.sink.authority}"
        if self.type == PUBLISH or self.sink is None:
            return self.source.segments
        return f"{self.source.segments}/{self.sink.segments}"

    def properties(self) -> Properties:
        made = Properties(PacketTypes.PUBLISH)  # type: ignore[no-untyped-call]
        user = [("uP", "1"), ("1", id_text(self.id)), ("2", CE_NAMES[self.type]), ("3", str(self.source))]
        if self.sink is not None:
            user.append(("4", str(self.sink)))
        user.append(("5", f"CS{self.priority - 1}"))
        if self.ttl_ms:
            made.MessageExpiryInterval = -(-self.ttl_ms // 1000)
            if self.ttl_ms % 1000:
                user.append(("6", str(self.ttl_ms)))
        if self.reqid is not None:
            made.CorrelationData = self.reqid
        made.ContentType = str(self.format)
        made.UserProperty = user
        return made

    @classmethod
    def of_mqtt(cls, properties: Properties, payload: bytes) -> Message:
        """Raises KeyError, ValueError if this is none."""
        user = dict(reversed(getattr(properties, "UserProperty", [])))
        return cls(
            bytes.fromhex(user["1"].replace("-", "")),
            TYPES[user["2"]],
            Uri.of(user["3"]),
            Uri.of(user["4"]) if "4" in user else None,
            payload,
            int(user.get("6", 1000 * getattr(properties, "MessageExpiryInterval", 0))),
            getattr(properties, "CorrelationData", None),
            int(user.get("8", 0)),
            int(getattr(properties, "ContentType", "0")),
        )


def _uuid(id: bytes) -> bytes:
    return fixed64(1, int.from_bytes(id[:8], "big")) + fixed64(2, int.from_bytes(id[8:], "big"))


def _uuid_of(data: bytes) -> bytes:
    fields = parse(data)
    return number(fields, 1).to_bytes(8, "big") + number(fields, 2).to_bytes(8, "big")
