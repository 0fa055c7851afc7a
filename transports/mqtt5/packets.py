"""The rare packets as bytes: CONNECT, SUBSCRIBE, UNSUBSCRIBE, DISCONNECT, and the answers of a broker. Pure.

paho-mqtt's public classes write the properties, and have the table of all. The broker's packets are read here, since
paho raises for a reason code or a property that it does not list for that packet. wire.py has PUBLISH and PUBACK.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

import structlog
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties
from paho.mqtt.subscribeoptions import SubscribeOptions

from transports.mqtt5 import reasons, wire
from transports.mqtt5.config import Mqtt5Config

CONNACK: Final = 0x20
PUBREC: Final = 0x50
PUBREL: Final = 0x60
SUBACK: Final = 0x90
UNSUBACK: Final = 0xB0
PINGRESP: Final = 0xD0
DISCONNECT: Final = 0xE0
PINGREQ: Final = b"\xc0\x00"
# DISCONNECT, reason 0x95: a packet is larger than our Maximum Packet Size (section 3.14.2.1)
DISCONNECT_TOO_LARGE: Final = b"\xe0\x01\x95"
ANSWER_BYTES_MAX: Final = 1 << 16  # of a packet without a message: paho copies it for each of its properties

_VERSION_5: Final = b"\x00\x04MQTT\x05"
_CLEAN_START, _PASSWORD, _USERNAME = 0x02, 0x40, 0x80  # flags of CONNECT

_DATA, _PAIR = -1, -2  # kinds of values: text or octets; two texts. A positive kind is a number of so many bytes
_KINDS: Final = {"Byte": 1, "Two Byte Integer": 2, "Four Byte Integer": 4, "UTF-8 String Pair": _PAIR}
_LISTED: Final = Properties(PacketTypes.CONNACK)  # type: ignore[no-untyped-call]  # has the table of section 2.2.2.2
_ANSWERS: Final = {PacketTypes.CONNACK, PacketTypes.SUBACK, PacketTypes.UNSUBACK, PacketTypes.DISCONNECT}
# of the properties that an answer may have: id -> name and kind
_PROPERTIES: Final[dict[int, tuple[str, int]]] = {
    number: (name.replace(" ", ""), _KINDS.get(_LISTED.types[kind], _DATA))
    for name, number in _LISTED.names.items()
    for kind, packet_types in [_LISTED.properties[number]]
    if _ANSWERS.intersection(packet_types)
}
_NEVER_0: Final = frozenset({"ReceiveMaximum", "MaximumPacketSize"})  # with 0, nothing could be sent to the broker

log = structlog.get_logger()


class Answer(NamedTuple):
    """The answer of the broker to one request, or why it ends the connection."""

    reason: int
    properties: dict[str, Any]  # strings are str; UserProperty is not kept


class Welcome(NamedTuple):
    """The content of CONNACK."""

    reason: int
    session_present: bool
    properties: dict[str, Any]  # as those of Answer

    def number(self, name: str, default: int) -> int:
        value: int = self.properties.get(name, default)
        return value


def connect(
    config: Mqtt5Config, client_id: str, password: str | None, *, clean_start: bool, packet_bytes_max: int
) -> bytes:
    flags, login = _CLEAN_START if clean_start else 0, b""
    if config.username is not None:
        flags, login = flags | _USERNAME, wire.text(config.username)
    if password is not None:
        flags, login = flags | _PASSWORD, login + wire.text(password)
    properties = {
        "SessionExpiryInterval": config.session_expiry_s,
        "ReceiveMaximum": config.receive_maximum,
        "MaximumPacketSize": packet_bytes_max,  # the broker drops larger packets and does not count them
    }
    head = b"%b%c%b" % (_VERSION_5, flags, config.keep_alive_s.to_bytes(2, "big"))
    return _packet(0x10, head + _properties(PacketTypes.CONNECT, properties) + wire.text(client_id) + login)


def subscribe(packet_id: int, topic_filter: str, *, retained: bool) -> bytes:
    """QoS 1, No Local; `retained` asks for what the broker has retained, each time."""
    handling = SubscribeOptions.RETAIN_SEND_ON_SUBSCRIBE if retained else SubscribeOptions.RETAIN_DO_NOT_SEND
    options = SubscribeOptions(qos=1, noLocal=True, retainHandling=handling)
    packed: bytes = options.pack()  # type: ignore[no-untyped-call]
    return _packet(0x82, packet_id.to_bytes(2, "big") + b"\x00" + wire.text(topic_filter) + packed)


def unsubscribe(packet_id: int, topic_filter: str) -> bytes:
    return _packet(0xA2, packet_id.to_bytes(2, "big") + b"\x00" + wire.text(topic_filter))


def publish(packet_id: int, topic: str, payload: bytes, qos: int) -> bytes:
    """A message without properties of uProtocol, which the broker keeps for a second at most."""
    expiry = b"\x05\x02" + (1).to_bytes(4, "big")
    return _packet(wire.PUBLISH_BITS | qos << 1, wire.text(topic) + packet_id.to_bytes(2, "big") + expiry + payload)


def disconnect(properties: dict[str, int]) -> bytes:
    return _packet(DISCONNECT, b"\x00" + _properties(PacketTypes.DISCONNECT, properties))


def read_connack(body: bytes) -> Welcome:
    """This and the other readers raise ValueError for a packet that is cut short, and for nothing else: any byte is a
    reason code."""
    with _reading("CONNACK"):
        if body[1] == 0x01:  # from a broker that supports only MQTT 3
            return Welcome(reasons.UNSUPPORTED_VERSION, False, {})
        return Welcome(body[1], body[0] & 0x01 != 0, _unpacked(body, 2)[0])


def read_answer(kind: int, body: bytes) -> tuple[int, Answer]:
    """The packet id of a SUBACK or UNSUBACK, and the answer for its one topic filter."""
    with _reading("SUBACK" if kind == SUBACK else "UNSUBACK"):
        packet_id = body[0] << 8 | body[1]
        if not packet_id:
            raise ValueError("expected a packet id of 1 to 65535, got 0")
        properties, end = _unpacked(body, 2)
        return packet_id, Answer(body[end], properties)


def read_pubrec(body: bytes) -> tuple[int, Answer]:
    """The packet id of a PUBREC, and its reason code."""
    with _reading("PUBREC"):
        return body[0] << 8 | body[1], Answer(body[2] if len(body) > 2 else 0, {})


def read_disconnect(body: bytes) -> Answer:
    with _reading("DISCONNECT"):
        return Answer(body[0] if body else 0, _unpacked(body, 1)[0] if len(body) > 1 else {})


def why_refused(puback: bytes) -> str:
    """The reason string of a PUBACK; "" if there is none or it can't be read."""
    try:
        properties, _ = _unpacked(puback, 3)
        return str(properties.get("ReasonString", ""))
    except (IndexError, ValueError):
        return ""


def refuse(packet_id: int) -> bytes:
    """PUBREC that refuses a message of QoS 2, which we never ask for."""
    return _packet(0x50, packet_id.to_bytes(2, "big") + b"\x83")


def end(pubrel: bytes) -> bytes:
    """PUBCOMP for a PUBREL of QoS 2 whose packet id we don't know."""
    if len(pubrel) < 2:
        raise ValueError("a PUBREL ends before its packet id")
    return _packet(0x70, pubrel[:2] + b"\x92")


def _packet(first: int, body: bytes) -> bytes:
    return b"%c%b%b" % (first, wire.varint(len(body)), body)


def _properties(packet_type: int, values: dict[str, int]) -> bytes:
    made = Properties(packet_type)  # type: ignore[no-untyped-call]
    for name, value in values.items():
        setattr(made, name, value)
    packed: bytes = made.pack()  # type: ignore[no-untyped-call]
    return packed


def _unpacked(data: bytes, start: int) -> tuple[dict[str, Any], int]:
    """The properties by name, and where they end. Left out: those behind an unknown one, which can't be read, and
    impossible values. Raises IndexError if `data` ends before they do."""
    length, at = wire.read_varint(data, start, len(data))
    end = at + length
    if not at or end > len(data):
        raise IndexError("it ends before its properties do")
    found: dict[str, Any] = {}
    while at < end:
        name, kind = _PROPERTIES.get(data[at], ("", 1))
        value, after = _value(data, at + 1, kind)
        if not name or after > end:
            log.warning("the broker sends a property that can't be read", property=data[at], after=list(found))
            break
        at = after
        if value is not None and (value or name not in _NEVER_0):
            found.setdefault(name, value)
    return found, end


def _value(data: bytes, at: int, kind: int) -> tuple[int | str | None, int]:
    """The value at `at` (None for a pair), and where it ends, possibly beyond `data`."""
    if kind > 0:
        return int.from_bytes(data[at : at + kind], "big"), at + kind
    end = at + 2 + int.from_bytes(data[at : at + 2], "big")
    if kind == _PAIR:
        return None, end + 2 + int.from_bytes(data[end : end + 2], "big")
    return data[at + 2 : end].decode(errors="replace"), end


@contextlib.contextmanager
def _reading(what: str) -> Iterator[None]:
    try:
        yield
    except (IndexError, ValueError) as error:
        raise ValueError(f"a {what} can't be read: {error!r}") from None
