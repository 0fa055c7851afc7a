"""The packets that are rare, as bytes: CONNECT, SUBSCRIBE, UNSUBSCRIBE, DISCONNECT, and what a broker answers. Pure.

paho-mqtt's public classes know the properties and the reason codes; wire.py has the packets that carry the load.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties
from paho.mqtt.reasoncodes import ReasonCode
from paho.mqtt.subscribeoptions import SubscribeOptions

from transports.mqtt5 import reasons, wire
from transports.mqtt5.config import Mqtt5Config

CONNACK: Final = 0x20
PUBREL: Final = 0x60
SUBACK: Final = 0x90
UNSUBACK: Final = 0xB0
PINGRESP: Final = 0xD0
DISCONNECT: Final = 0xE0
PINGREQ: Final = b"\xc0\x00"
# DISCONNECT, reason 0x95: a packet is larger than our Maximum Packet Size (section 3.14.2.1)
TOO_LARGE: Final = b"\xe0\x01\x95"
ANSWER_BYTES_MAX: Final = 1 << 16  # of a packet that carries no message: paho copies it for each of its properties

_VERSION_5: Final = b"\x00\x04MQTT\x05"
_CLEAN_START, _PASSWORD, _USERNAME = 0x02, 0x40, 0x80  # flags of CONNECT


class Welcome(NamedTuple):
    """What CONNACK says."""

    reason: ReasonCode
    session_present: bool
    properties: dict[str, Any]

    def told(self, name: str, default: int) -> int:
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
        "MaximumPacketSize": packet_bytes_max,  # what is larger the broker throws away, and counts it for nobody
    }
    head = b"%b%c%b" % (_VERSION_5, flags, config.keep_alive_s.to_bytes(2, "big"))
    return _packet(0x10, head + _properties(PacketTypes.CONNECT, properties) + wire.text(client_id) + login)


def subscribe(packet_id: int, topic_filter: str, identifier: int | None, *, retained: bool) -> bytes:
    """QoS 1, No Local; `retained` asks for what the broker has retained, each time."""
    handling = SubscribeOptions.RETAIN_SEND_ON_SUBSCRIBE if retained else SubscribeOptions.RETAIN_DO_NOT_SEND
    options = SubscribeOptions(qos=1, noLocal=True, retainHandling=handling)
    named = _properties(PacketTypes.SUBSCRIBE, {"SubscriptionIdentifier": identifier} if identifier is not None else {})
    packed: bytes = options.pack()  # type: ignore[no-untyped-call]
    return _packet(0x82, packet_id.to_bytes(2, "big") + named + wire.text(topic_filter) + packed)


def unsubscribe(packet_id: int, topic_filter: str) -> bytes:
    return _packet(0xA2, packet_id.to_bytes(2, "big") + b"\x00" + wire.text(topic_filter))


def disconnect(properties: dict[str, int]) -> bytes:
    return _packet(DISCONNECT, b"\x00" + _properties(PacketTypes.DISCONNECT, properties))


def read_connack(body: bytes) -> Welcome:
    """This and the other readers raise ValueError for what is none such."""
    with _reading("CONNACK"):
        if body[1] == 0x01:  # of a broker that knows MQTT 3 only
            return Welcome(ReasonCode(PacketTypes.CONNACK, "Unsupported protocol version"), False, {})
        reason = ReasonCode(PacketTypes.CONNACK, identifier=body[1])
        return Welcome(reason, body[0] & 0x01 != 0, _unpacked(PacketTypes.CONNACK, body[2:])[0])


def read_answer(kind: int, body: bytes) -> tuple[int, ReasonCode]:
    """The packet id of a SUBACK or UNSUBACK, and what it says of the one topic filter that was asked about."""
    with _reading("SUBACK or UNSUBACK"):
        _, length = _unpacked(kind >> 4, body[2:])
        packet_id = body[0] << 8 | body[1]
        if not packet_id:
            raise ValueError("0 is no packet id")
        return packet_id, ReasonCode(kind >> 4, identifier=body[2 + length])


def read_disconnect(body: bytes) -> str:
    with _reading("DISCONNECT"):
        reason = ReasonCode(PacketTypes.DISCONNECT, identifier=body[0] if body else 0)
        properties = _unpacked(PacketTypes.DISCONNECT, body[1:])[0] if len(body) > 1 else {}
        return f"it said: {reasons.named(reason, properties)}"


def refuse(packet_id: int) -> bytes:
    """PUBREC: a message of QoS 2, which we never ask for, ends here."""
    return _packet(0x50, packet_id.to_bytes(2, "big") + b"\x83")


def end(pubrel: bytes) -> bytes:
    """PUBCOMP: we know nothing of the one of QoS 2 that PUBREL speaks of."""
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


def _unpacked(packet_type: int, data: bytes) -> tuple[dict[str, Any], int]:
    """The properties by their names, and how many bytes they take."""
    found, length = Properties(packet_type).unpack(data)  # type: ignore[no-untyped-call]
    return found.json(), length


@contextlib.contextmanager
def _reading(what: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # IndexError, KeyError, struct.error, several of paho's own
        raise ValueError(f"what should be a {what} can't be read: {error!r}") from None
