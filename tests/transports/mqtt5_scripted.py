"""An MQTT 5 broker with knobs, for what no real broker does on command. QoS 0 and 1, sessions, no retained messages; of
QoS 2 the PUBLISH.

async with serving(ScriptedBroker(Knobs(overlap=Overlap.EACH_OWN_ID))) as broker: ... broker.port

A knob is read each time that it matters, so a test may turn it while the broker runs.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties

from tests.transports.mqtt5_answering import CONNECT, PINGREQ, SUBSCRIBE, UNSUBSCRIBE, packet
from transports.mqtt5 import wire

DEADLINE_S: Final = 20
DISCONNECT: Final = 0xE0
PUBLISH: Final = 0x30
PUBACK: Final = 0x40
PUBREC: Final = 0x50
NOBODY: Final = 0x10
IDENTIFIER_IN_USE: Final = 0x91
QUOTA_EXCEEDED: Final = 0x97
TOPIC_NAME_INVALID: Final = 0x90
PACKET_TOO_LARGE: Final = 0x95

Answer = tuple[int, str]
"""Reason code, reason string ("": none)."""


class Overlap(enum.Enum):
    """How a message is sent that several subscriptions of one client match (section 3.3.4 allows each of them)."""

    ONE_ALL_IDS = "one copy with all identifiers"
    ONE_LAST_ID = "one copy with the identifier of the youngest subscription"
    EACH_OWN_ID = "a copy for each subscription, with its identifier"
    EACH_ALL_IDS = "a copy for each subscription, with all identifiers"  # ActiveMQ Artemis
    EACH_NO_ID = "a copy for each subscription, without identifiers"


def _accepted(_: str) -> Answer:
    return 0, ""


@dataclass
class Knobs:
    answers_connect: bool = True
    connack: Answer = (0, "")
    announces: Mapping[str, Any] = field(default_factory=dict)  # properties of CONNACK, by paho's names
    session_expiry_max_s: int | None = None  # announced where a client asks for more, and kept to
    granted_qos: int = 1
    suback: Callable[[str], Answer] = _accepted  # by topic filter
    puback: Callable[[str], Answer] = _accepted  # by topic; what it refuses is not forwarded
    subscriptions_max: int | None = None  # of a session; one more is refused with 0x97
    slashes_max: int | None = None  # of a topic; a PUBLISH with more ends the connection with 0x90
    topic_bytes_max: int | None = None  # the same
    payload_bytes_max: int | None = None  # a PUBLISH with more ends the connection with 0x95
    # packet identifiers of its own messages in flight are refused in SUBSCRIBE with 0x91 (mochi has one space for both)
    confuses_identifiers: bool = False
    tells_nobody: bool = False  # PUBACK 0x10
    waits_for_release: bool = True  # passes a message of QoS 2 on after PUBREL, which it does not understand
    disconnects_on: str = ""  # a SUBSCRIBE to a filter with this prefix closes the connection, no DISCONNECT
    overlap: Overlap = Overlap.ONE_ALL_IDS
    # the next messages are sent when all that were sent have been acknowledged (HiveMQ polls a session's queue so)
    waits_for_acknowledgements: bool = False


class _Queued(NamedTuple):
    topic: bytes  # with its length
    rest: bytes  # properties with their length, payload


class _Connection:
    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer, self.session = writer, _Session()

    def write(self, data: bytes) -> None:
        self._writer.write(data)

    def end(self, reason: int | None = None, properties: Mapping[str, Any] | None = None) -> None:
        """With a DISCONNECT if a reason is given, else without."""
        if reason is not None:
            body = bytes((reason,)) + _packed(PacketTypes.DISCONNECT, properties or {})
            self.write(packet(DISCONNECT, body))
        self._writer.close()


@dataclass(eq=False)
class _Session:
    expiry_s: int = 0
    receive_maximum: int = 65_535
    filters: dict[str, int | None] = field(default_factory=dict)  # topic filter -> subscription identifier
    queue: deque[_Queued] = field(default_factory=deque)
    in_flight: dict[int, _Queued] = field(default_factory=dict)
    last_packet_id: int = 0
    connection: _Connection | None = None

    def forward(self, topic: str, properties: bytes, payload: bytes, knobs: Knobs) -> bool:
        """False if nothing of this session matches."""
        matching = [id for topic_filter, id in self.filters.items() if _matches(topic_filter, topic)]
        if not matching:
            return False
        ids = [id for id in matching if id is not None]
        copies = {
            Overlap.ONE_ALL_IDS: [ids],
            Overlap.ONE_LAST_ID: [ids[-1:]],
            Overlap.EACH_OWN_ID: [[id] if id is not None else [] for id in matching],
            Overlap.EACH_ALL_IDS: [ids] * len(matching),
            Overlap.EACH_NO_ID: [[]] * len(matching),
        }[knobs.overlap]
        for copy in copies:
            all_properties = properties + b"".join(b"\x0b" + wire.varint(id) for id in copy)
            rest = wire.varint(len(all_properties)) + all_properties + payload
            self.queue.append(_Queued(wire.text(topic), rest))
        self.pump(knobs)
        return True

    def pump(self, knobs: Knobs) -> None:
        """Send what may be sent."""
        if self.connection is None or (knobs.waits_for_acknowledgements and self.in_flight):
            return
        while self.queue and len(self.in_flight) < self.receive_maximum:
            one = self.queue.popleft()
            if not knobs.granted_qos:
                self.connection.write(packet(PUBLISH, one.topic + one.rest))
                continue
            self.last_packet_id = self.last_packet_id % 65_535 + 1
            self.in_flight[self.last_packet_id] = one
            self._send(self.last_packet_id, one, PUBLISH | 0x02)

    def send_again(self) -> None:
        """On a new connection, what the last one has not acknowledged."""
        for packet_id, one in self.in_flight.items():
            self._send(packet_id, one, PUBLISH | 0x0A)

    def _send(self, packet_id: int, one: _Queued, first: int) -> None:
        assert self.connection is not None
        self.connection.write(packet(first, one.topic + packet_id.to_bytes(2, "big") + one.rest))


class ScriptedBroker:
    """`tests.transports.mqtt5_answering.serving` gives it a port."""

    def __init__(self, knobs: Knobs | None = None) -> None:
        self.knobs = knobs or Knobs()
        self.port = 0
        self.connections = 0  # CONNECTs so far
        self.heard: Counter[str] = Counter()  # messages that were published, by topic
        self.heard_payloads: Counter[bytes] = Counter()
        self.subscribed: list[str] = []  # topic filters, one entry for each time that one was asked for
        self.connects: list[bytes] = []  # bodies of CONNECT packets
        self.sessions: dict[bytes, _Session] = {}  # by client id
        self._changed = asyncio.Event()  # since somebody has looked

    async def until(self, condition: Callable[[], bool]) -> None:
        """Of this broker. Raises TimeoutError."""
        async with asyncio.timeout(DEADLINE_S):
            while not condition():
                self._changed.clear()
                await self._changed.wait()

    @property
    def unacknowledged(self) -> int:
        """Messages that were sent to clients and that they have not acknowledged."""
        return sum(len(session.in_flight) for session in self.sessions.values())

    @property
    def queued(self) -> int:
        """Messages that wait to be sent to clients."""
        return sum(len(session.queue) for session in self.sessions.values())

    def end_connections(self, reason: int | None = None, properties: Mapping[str, Any] | None = None) -> None:
        """Ends all connections, with a DISCONNECT if a reason is given, else without."""
        for session in self.sessions.values():
            if session.connection is not None:
                session.connection.end(reason, properties)

    def forget(self) -> None:
        """Drops all sessions, like a restarted broker without persistence."""
        self.end_connections()
        self.sessions.clear()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection, data = _Connection(writer), b""
        try:
            with contextlib.suppress(OSError):
                while more := await reader.read(65_536):
                    found, used = wire.split(data + more)
                    data = (data + more)[used:]
                    for first, body in found:
                        if not writer.is_closing():
                            self._on_packet(connection, first, body)
                    self._changed.set()
        finally:
            if connection.session.connection is connection:
                connection.session.connection = None
            writer.close()

    def _on_packet(self, connection: _Connection, first: int, body: bytes) -> None:
        session = connection.session
        if first == CONNECT:
            self._on_connect(connection, body)
        elif first & 0xF0 == PUBLISH:
            self._on_publish(connection, first, body)
        elif first == PUBACK:
            session.in_flight.pop(int.from_bytes(body[:2], "big"), None)
            session.pump(self.knobs)
        elif first == SUBSCRIBE:
            self._on_subscribe(connection, body)
        elif first == UNSUBSCRIBE:
            length, at = wire.read_varint(body, 2, len(body))
            session.filters.pop(body[at + length + 2 :].decode(), None)
            connection.write(packet(0xB0, body[:2] + b"\x00\x00"))
        elif first == PINGREQ:
            connection.write(b"\xd0\x00")

    def _on_connect(self, connection: _Connection, body: bytes) -> None:
        self.connections += 1
        self.connects.append(body)
        knobs = self.knobs
        if not knobs.answers_connect:
            return
        properties, at = _unpacked(PacketTypes.CONNECT, body, 10)
        client_id = body[at + 2 : at + 2 + int.from_bytes(body[at : at + 2], "big")]
        asked_s = getattr(properties, "SessionExpiryInterval", 0)
        announces, reason = dict(knobs.announces), knobs.connack
        granted_s = min(asked_s, announces.get("SessionExpiryInterval", asked_s))
        if knobs.session_expiry_max_s is not None and asked_s > knobs.session_expiry_max_s:
            granted_s = announces["SessionExpiryInterval"] = knobs.session_expiry_max_s
        if reason[1]:
            announces["ReasonString"] = reason[1]
        session = self.sessions.get(client_id)
        is_present = session is not None and not body[7] & 0x02 and session.expiry_s > 0
        packed = _packed(PacketTypes.CONNACK, announces)
        connection.write(packet(0x20, bytes((is_present and reason[0] < 0x80, reason[0])) + packed))
        if reason[0] >= 0x80:
            connection.end()
            return
        if session is not None and session.connection is not None:
            session.connection.end(0x8E)
        if session is None or not is_present:
            session = self.sessions[client_id] = _Session()
        session.expiry_s, session.connection = granted_s, connection
        session.receive_maximum = getattr(properties, "ReceiveMaximum", 65_535)
        connection.session = session
        session.send_again()
        session.pump(knobs)

    def _on_publish(self, connection: _Connection, first: int, body: bytes) -> None:
        knobs, publish = self.knobs, wire.read_publish(first, body)
        topic = publish.topic.decode()
        self.heard[topic] += 1
        self.heard_payloads[publish.payload] += 1
        is_topic_bad = (knobs.slashes_max is not None and topic.count("/") > knobs.slashes_max) or (
            knobs.topic_bytes_max is not None and len(publish.topic) > knobs.topic_bytes_max
        )
        is_too_large = knobs.payload_bytes_max is not None and len(publish.payload) > knobs.payload_bytes_max
        if is_topic_bad or is_too_large:
            connection.end(TOPIC_NAME_INVALID if is_topic_bad else PACKET_TOO_LARGE)
            return
        reason, why = knobs.puback(topic)
        is_second = first & 0x06 == 0x04  # QoS 2
        if reason < 0x80 and not (is_second and knobs.waits_for_release):
            sessions = [one for one in list(self.sessions.values()) if one is not connection.session]
            heard = [one.forward(topic, publish.properties, publish.payload, knobs) for one in sessions]
            if knobs.tells_nobody and not any(heard):
                reason = NOBODY
        if publish.packet_id:
            properties = _packed(PacketTypes.PUBACK, {"ReasonString": why} if why else {})
            kind = PUBREC if is_second else PUBACK
            connection.write(packet(kind, publish.packet_id.to_bytes(2, "big") + bytes((reason,)) + properties))

    def _on_subscribe(self, connection: _Connection, body: bytes) -> None:
        knobs, filters = self.knobs, connection.session.filters
        properties, at = _unpacked(PacketTypes.SUBSCRIBE, body, 2)
        topic_filter = body[at + 2 : at + 2 + int.from_bytes(body[at : at + 2], "big")].decode()
        self.subscribed.append(topic_filter)
        if knobs.disconnects_on and topic_filter.startswith(knobs.disconnects_on):
            connection.end()
            return
        reason, why = knobs.suback(topic_filter)
        if knobs.confuses_identifiers and int.from_bytes(body[:2], "big") in connection.session.in_flight:
            reason = IDENTIFIER_IN_USE
        is_full = knobs.subscriptions_max is not None and len(filters) >= knobs.subscriptions_max
        if reason < 0x80 and is_full and topic_filter not in filters:
            reason, why = QUOTA_EXCEEDED, why or "too many subscriptions"
        if reason < 0x80:
            reason = min(knobs.granted_qos, 1)
            (identifier,) = getattr(properties, "SubscriptionIdentifier", None) or (None,)
            filters[topic_filter] = identifier
        packed = _packed(PacketTypes.SUBACK, {"ReasonString": why} if why else {})
        connection.write(packet(0x90, body[:2] + packed + bytes((reason,))))


def _matches(topic_filter: str, topic: str) -> bool:
    """Section 4.7, of filters as the transport makes them: `+` is the only wildcard."""
    wanted, given = topic_filter.split("/"), topic.split("/")
    return len(wanted) == len(given) and all(one in ("+", two) for one, two in zip(wanted, given, strict=True))


def _packed(packet_type: int, values: Mapping[str, Any]) -> bytes:
    made = Properties(packet_type)  # type: ignore[no-untyped-call]
    for name, value in values.items():
        setattr(made, name, value)
    packed: bytes = made.pack()  # type: ignore[no-untyped-call]
    return packed


def _unpacked(packet_type: int, body: bytes, at: int) -> tuple[Any, int]:
    """The properties at `at`, and where they end."""
    length, start = wire.read_varint(body, at, len(body))
    made = Properties(packet_type)  # type: ignore[no-untyped-call]
    made.unpack(body[at : start + length])  # type: ignore[no-untyped-call]
    return made, start + length
