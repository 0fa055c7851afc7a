"""Targets for networks: MQTT, Zenoh, DDS, and messages that are forwarded.

octets -> mapping -> listener table -> a valid message -> every other mapping -> and back: the same message
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise, product

from google.protobuf.message import DecodeError

from campaigns.fuzz.registry import is_refused, refusing, target
from campaigns.fuzz.shapes import Dice, made
from streamer.walk.names import Names
from transports.base import SendChecks
from transports.dds import mapping as dds_mapping
from transports.listeners import ListenerTable
from transports.mqtt5 import wire
from transports.mqtt5.mapping import Mapping, Mode, Packet, TtlReading
from transports.mqtt5.wire import PublishCodec
from transports.zenoh import mapping as zenoh_mapping
from uprotocol import attributes as attrs
from uprotocol import uri as uris
from uprotocol import uuid as uuids
from uprotocol.encoded import EncodedMessage, Readdressed, Stamps
from uprotocol.message import validate
from uprotocol.transport import EncodedListener
from uprotocol.v1.uattributes_pb2 import UAttributes
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.umessage_pb2 import UMessage
from uprotocol.v1.uri_pb2 import UUri
from uprotocol.v1.uuid_pb2 import UUID

INVALID, DENIED = UCode.INVALID_ARGUMENT, UCode.PERMISSION_DENIED
OWN = "vin"
NOW_MS = 0x0192_A7B0_0000  # the time of the ids in the shapes, so that few have expired


class Heard(EncodedListener):
    """A listener that takes encoded messages."""

    def __init__(self) -> None:
        self.messages: list[EncodedMessage] = []

    def on_receive_encoded(self, messages: Sequence[EncodedMessage]) -> None:
        self.messages += messages


def table() -> tuple[ListenerTable, Heard]:
    made, heard = ListenerTable(OWN, now_ms=lambda: NOW_MS), Heard()
    made.add(uris.ANY, None, heard)
    made.add(uris.ANY, uris.ANY, heard)
    return made, heard


def arrive(payload: bytes, encoded: bytes, key: str = "up/vin/10/0/1/8000/{}/{}/{}/{}/{}") -> None:
    """Passes a message through the listener table three times: from the second time on, the stream is known."""
    listeners, heard = table()

    def complete(place: int, attributes: UAttributes) -> None:
        zenoh_mapping.complete(attributes, key)

    listeners.deliver_encoded([(None, payload, encoded)], complete)
    listeners.deliver_encoded([(None, payload + b"2", encoded), (None, payload, encoded)], complete)
    assert listeners.failures == 0
    dropped = listeners.dropped.total()
    assert dropped + len(heard.messages) == 3, "each is heard or counted"
    for message in heard.messages:
        check(message)


def check(message: EncodedMessage) -> None:
    """Checks that a delivered message is valid and consistent, and that it can be forwarded or is refused."""
    plain = message.decoded()
    validate(plain)
    id = plain.attributes.id
    assert (id.msb.to_bytes(8, "big") + id.lsb.to_bytes(8, "big")) == message.id_bytes, "two ids in one message"
    assert message.created_ms == id.msb >> 16
    assert message.is_expired(NOW_MS) == attrs.is_expired(plain.attributes, NOW_MS)
    assert message.HasField("payload") == plain.HasField("payload")
    assert Stamps().read(message.SerializeToString()).decoded() == plain
    forward(plain)


def forward(message: UMessage) -> None:
    """Converts a message by each mapping and back."""
    with refusing(INVALID):
        assert len(zenoh_mapping.message_key(message, OWN).split("/")) == 11
    sample = dds_mapping.decode(dds_mapping.encode(message))
    assert sample == message
    attributes = message.attributes
    sink = attributes.sink if attributes.HasField("sink") else None
    partition = dds_mapping.writer_partition(attributes.source, sink, OWN)
    bare = UAttributes.FromString(message.attributes.SerializeToString())
    bare.source.authority_name = ""
    dds_mapping.complete(bare, partition)
    assert bare.source.authority_name == (message.attributes.source.authority_name or OWN)
    for mode in Mode:
        with refusing(INVALID):
            _by_mqtt(message, mode)


def _by_mqtt(message: UMessage, mode: Mode) -> None:
    mapping = Mapping(mode, OWN)
    codec = PublishCodec(mapping, SendChecks(now_ms=lambda: NOW_MS))
    for _ in range(2):
        head, tail = codec.encode(message)
        [(first, body)], size = wire.split(head + b"\0\7" + tail)
        assert size == len(head) + 2 + len(tail)
        publish = wire.read_publish(first, body)
        for _ in range(2):
            _, encoded = codec.decode(publish)
            assert _comparable(UAttributes.FromString(encoded)) == _comparable(message.attributes), "not what was sent"
        assert publish.payload == message.payload


def _comparable(attributes: UAttributes) -> UAttributes:
    """Returns attributes without what MQTT cannot carry: an empty token, a ttl of 0, and no authority."""
    copy = UAttributes.FromString(attributes.SerializeToString())
    if not copy.token:
        copy.ClearField("token")
    if not copy.traceparent:
        copy.ClearField("traceparent")
    if not copy.ttl:
        copy.ClearField("ttl")
    attrs.complete(copy, OWN)
    copy.DiscardUnknownFields()
    return copy


@target
def zenoh_sample(data: bytes) -> None:
    """Parses a payload and an attachment."""
    dice = Dice(data)
    payload, attachment = dice.some(), dice.rest()
    arrive(payload, attachment[1:])


@target
def zenoh_key(data: bytes) -> None:
    """Makes the keys of all kinds of addresses, and parses them."""
    dice = Dice(data)
    source, sink = made(UUri, dice), made(UUri, dice) if dice.octet() & 1 else None
    with refusing(INVALID):
        uris.validate(source)
        if sink is not None:
            uris.validate(sink)
        key = zenoh_mapping.filter_key(source, sink, OWN)
        assert len(key.split("/")) == 11
        assert key.isprintable()
        attributes = UAttributes(source=source, sink=sink)
        attributes.source.authority_name = ""
        zenoh_mapping.complete(attributes, key)
        assert attributes.source.authority_name == (source.authority_name or OWN)
        for make in (dds_mapping.reader_partition, dds_mapping.writer_partition):
            assert len(make(source, sink, OWN).split("/")) == 11


@target
def message_arrives(data: bytes) -> None:
    """Passes on a message with attributes of any shape."""
    dice = Dice(data)
    attributes = made(UAttributes, dice)
    payload = dice.some()
    arrive(payload, attributes.SerializeToString() + dice.rest())


@target
def mqtt_packets(data: bytes) -> None:
    """Splits data of a socket that is cut anywhere."""
    cut = data[0] if data else 0
    stream = data[1:]
    try:
        packets, size = wire.split(stream)
    except ValueError:
        return
    assert 0 <= size <= len(stream)
    early, early_size = wire.split(stream[:cut])
    assert early == packets[: len(early)], "what came in pieces reads otherwise"
    assert early_size <= size
    for first, body in packets:
        _publish(first, body)


@target
def mqtt_publish(data: bytes) -> None:
    """Parses the body of a PUBLISH: topic, properties, payload."""
    if data:
        _publish(data[0], data[1:])


def _publish(first: int, body: bytes) -> None:
    try:
        publish = wire.read_publish(first, body)
    except ValueError:
        return
    for mode in Mode:
        codec = PublishCodec(Mapping(mode, OWN), SendChecks(now_ms=lambda: NOW_MS))
        with refusing(INVALID, DENIED):
            found = codec.decode(publish)
            assert codec.decode(publish) == found, "a template says something else"
            arrive(publish.payload, found[1])


@target
def mqtt_properties(data: bytes) -> None:
    """Parses topic and user properties given as texts, so that no lengths have to be guessed."""
    parts = data.split(b"\xff")
    texts = [part.decode(errors="replace") for part in parts]
    pairs = list(pairwise(texts[1:]))[::2]
    numbers = Dice(parts[-1])
    expiry_s = int.from_bytes(numbers.take(4), "big") if numbers.octet() & 1 else None
    packet = Packet(
        texts[0], pairs, expiry_s, dict(pairs).get("9", "").encode() or None, dict(pairs).get("c"), b"payload"
    )
    for mode, reading in product(Mode, TtlReading):
        mapping = Mapping(mode, OWN, ttl_reading=reading)
        with refusing(INVALID, DENIED):
            message, _ = mapping.read(packet, NOW_MS)
            had_ttl = expiry_s is not None and "6" not in dict(pairs)
            assert message.attributes.ttl or not had_ttl, "an expiry interval became a ttl that never expires"
            arrive(message.payload, message.attributes.SerializeToString())


@target
def dds_sample(data: bytes) -> None:
    with refusing(INVALID):
        attributes, payload = dds_mapping.unpack(data)
        whole = dds_mapping.pack(attributes, payload or b"", has_payload=payload is not None)
        assert dds_mapping.unpack(whole) == (attributes, payload)
        assert is_refused(dds_mapping.unpack, whole[:-1]), "a sample that ends too early was taken"
        message = dds_mapping.decode(data)
        assert dds_mapping.decode(dds_mapping.encode(message)) == message
        arrive(payload or b"", attributes)


@target
def stored_message(data: bytes) -> None:
    """Parses a UMessage as the log stores it: our parser and protobuf must return the same."""
    stamps = Stamps()
    try:
        plain = UMessage.FromString(data)
    except DecodeError:
        plain = None
    for _ in range(2):
        try:
            message = stamps.read(data)
        except DecodeError:
            assert plain is None, "protobuf can read it"
            continue
        assert plain is not None, "protobuf can't read it"
        assert message.decoded() == plain
        assert UMessage.FromString(message.SerializeToString()) == plain
        moved = Readdressed(uris.uri("ecu1", 1, 1, 0x8000), uris.uri("cloud", 2, 1, 0))
        assert moved.of(message).decoded() == moved.of(EncodedMessage.of(plain)).decoded()
        id = UUID(msb=plain.attributes.id.msb, lsb=plain.attributes.id.lsb)
        assert uuids.to_bytes(id) == message.id_bytes, "two ids in one message"


@target
def names_of_what_is_carried(data: bytes) -> None:
    """Sends payloads of the core services under other names."""
    dice = Dice(data)
    message = EncodedMessage.of(made(UMessage, dice))
    names = Names("vin", lambda authority: authority in ("ecu1", "cloud"))
    left = names.leave(message).decoded()
    read = Stamps().read(message.SerializeToString())
    assert names.leave(read).decoded() == left, "an encoded message leaves as another one"
    assert left.attributes.id == message.attributes.id
    back = names.arrived(None, EncodedMessage.of(left)).decoded()
    assert back.attributes == left.attributes, "only what is carried"
    names.filter(message.attributes.source, None)
