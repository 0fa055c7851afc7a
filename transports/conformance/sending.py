"""send: messages arrive unchanged, and those that may not be sent are refused with the right code.

send_batch([valid, invalid, expired, valid])  ->  [OK, INVALID_ARGUMENT, DEADLINE_EXCEEDED, OK]
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Final

import pytest

from transports.conformance.base import Pair, TransportHarness, spec
from transports.conformance.messages import (
    ALPHA,
    BETA,
    TTL_MS,
    code_of,
    codes,
    method,
    notification,
    publish,
    reply,
    request,
    response,
    streamed,
    topic,
)
from transports.conformance.sinks import BatchSink
from uprotocol import uri as uris
from uprotocol import uuid as uuids
from uprotocol.attributes import streamer_sink
from uprotocol.message import UMessageBuilder, UPayload
from uprotocol.transport import Capability
from uprotocol.v1.uattributes_pb2 import UPayloadFormat, UPriority
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.umessage_pb2 import UMessage
from uprotocol.v1.uri_pb2 import UUri
from uprotocol.v1.uuid_pb2 import UUID

FORMATS: list[UPayloadFormat.ValueType] = [
    format for format in UPayloadFormat.values() if format != UPayloadFormat.UPAYLOAD_FORMAT_UNSPECIFIED
]
TRACEPARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
EDGES: Final = (b"\n", b"\r\n", b" ", b"\t", b"\0", b'"')
ODD_ADDRESSES: list[tuple[UUri, UUri]] = [
    (topic(entity=0, version=0, resource=0x8000), reply(entity=0, version=0)),
    (topic(entity=0xFFFE_FFFE, version=0xFE, resource=0xFFFE), reply(entity=0xFFFE_FFFE, version=0xFE)),
    (topic(entity=0x0001_0000), reply(entity=0x0000_0001)),
    (topic("a" * 128), reply(BETA)),
    (topic("192.168.1.1"), reply(BETA)),
    (topic("[2001::7]"), reply(BETA)),
    (topic("my_vin.example-1.~"), reply(BETA)),
]


def broken(change: Callable[[UMessage], object], message: UMessage | None = None) -> UMessage:
    message = message if message is not None else notification(b"broken")
    change(message)
    return message


INVALID: dict[str, Callable[[], UMessage]] = {
    "empty": UMessage,
    "no id": lambda: broken(lambda m: m.attributes.ClearField("id")),
    "id of version 4": lambda: broken(lambda m: m.attributes.id.CopyFrom(UUID(msb=0x4000, lsb=1 << 63))),
    "id of the year 10889": lambda: broken(
        lambda m: m.attributes.id.CopyFrom(UUID(msb=0xFFFF_FFFF_FFFF_7000, lsb=1 << 63))
    ),
    "commstatus on a notification": lambda: broken(lambda m: setattr(m.attributes, "commstatus", UCode.NOT_FOUND)),
    "token on a notification": lambda: broken(lambda m: setattr(m.attributes, "token", "t")),
    "no type": lambda: broken(lambda m: m.attributes.ClearField("type")),
    "no source": lambda: broken(lambda m: m.attributes.ClearField("source")),
    "notification without sink": lambda: broken(lambda m: m.attributes.ClearField("sink")),
    "notification from a method": lambda: broken(lambda m: m.attributes.source.CopyFrom(method())),
    "source with wildcard": lambda: broken(lambda m: m.attributes.source.CopyFrom(uris.ANY)),
    "authority in upper case": lambda: broken(lambda m: setattr(m.attributes.source, "authority_name", "ALPHA")),
    "authority of 129 characters": lambda: broken(lambda m: setattr(m.attributes.source, "authority_name", "a" * 129)),
    "version of 9 bits": lambda: broken(lambda m: setattr(m.attributes.source, "ue_version_major", 0x104)),
    "publish to a method": lambda: broken(lambda m: m.attributes.sink.CopyFrom(method()), publish()),
    "request without ttl": lambda: broken(lambda m: m.attributes.ClearField("ttl"), request()),
    "request of CS3": lambda: broken(lambda m: setattr(m.attributes, "priority", UPriority.UPRIORITY_CS3), request()),
    "request to a topic": lambda: broken(lambda m: m.attributes.sink.CopyFrom(topic(BETA)), request()),
    "response without reqid": lambda: broken(lambda m: m.attributes.ClearField("reqid"), response()),
    "bad traceparent": lambda: broken(lambda m: setattr(m.attributes, "traceparent", "00-12-34-01")),
    "format without payload": lambda: broken(lambda m: m.ClearField("payload")),
}


def expired(payload: bytes = b"expired") -> UMessage:
    message = notification(payload)
    message.attributes.id.msb = (uuids.now_ms() - 5_000) << 16 | 0x7000
    message.attributes.ttl = 1
    return message


def every_combination() -> Iterator[UMessage]:
    """All types, with each optional attribute absent, at its limits and in between."""
    payload_forms: list[UPayload | None] = [
        None,
        UPayload(b"\x00\xff\n\xc3"),
        UPayload(b"", FORMATS[0]),
        UPayload(bytes(range(256)), FORMATS[-1]),
    ]
    for payload, trace, ttl in itertools.product(payload_forms, (None, TRACEPARENT), (None, TTL_MS, 0xFFFF_FFFF)):
        for priority in (None, UPriority.UPRIORITY_CS0, UPriority.UPRIORITY_CS6):
            for builder in (UMessageBuilder.publish(topic()), UMessageBuilder.notification(topic(), reply())):
                yield _built(builder, payload, priority=priority, ttl=ttl, traceparent=trace)
        for token, level in itertools.product((None, "a token: ü€😀"), (None, 0, 1, 0xFFFF_FFFF)):
            builder = UMessageBuilder.request(reply(ALPHA), method(), ttl or TTL_MS)
            builder.with_priority(UPriority.UPRIORITY_CS5)
            yield _built(builder, payload, token=token, permission_level=level, traceparent=trace)
        for status in (None, UCode.OK, UCode.NOT_FOUND, UCode.DATA_LOSS):
            builder = UMessageBuilder.response(method(ALPHA), reply(), uuids.new()).with_ttl(ttl or TTL_MS)
            yield _built(builder, payload, commstatus=status, traceparent=trace)


def _built(builder: UMessageBuilder, payload: UPayload | None, **attributes: object) -> UMessage:
    """Build a message with the attributes that are not None."""
    for name, value in attributes.items():
        if value is not None:
            getattr(builder, f"with_{name}")(value)
    return builder.build_from_upayload(payload)


class SendingConformance(TransportHarness):
    async def everything(self, pair: Pair) -> BatchSink:
        """One listener at beta for all messages with its sink, and for the publishes of alpha's topic."""
        heard = BatchSink(self.deadline_s)
        await self.listen(pair, uris.ANY, uris.pattern(BETA) if self.routes_streamed_publish else uris.ANY, heard)
        if Capability.PUBLISH_WITHOUT_SINK in self.capabilities:
            await self.listen(pair, topic(), None, heard)
        return heard

    def sendable(self, message: UMessage) -> UMessage:
        """`message`, with a streamer's sink if it is a publish and the network needs one."""
        if not message.attributes.HasField("sink") and Capability.PUBLISH_WITHOUT_SINK not in self.capabilities:
            message.attributes.sink.CopyFrom(streamer_sink(BETA))
        return message

    async def check_preserved(self, pair: Pair, messages: Sequence[UMessage]) -> None:
        heard = await self.everything(pair)
        if self.discovery:
            # each (source, sink) once: networks may discover each pair separately
            routes = {tuple(map(uris.key, (one.attributes.source, one.attributes.sink))): one for one in messages}
            for message in routes.values():
                await self.reach(pair[0], heard, message)
        await self.send_all(pair[0], messages)
        arrived = {uuids.to_bytes(message.attributes.id): message for message in await heard.expect(len(messages))}
        for sent in messages:
            assert arrived[uuids.to_bytes(sent.attributes.id)] == self.normalise(copy.deepcopy(sent))

    @spec("req~utransport-send-preserve-data~1")
    @spec("req~uattributes-data-model-impl~1")
    async def test_all_attributes_and_the_payload_survive(self, pair: Pair) -> None:
        await self.check_preserved(pair, [self.sendable(message) for message in every_combination()])

    @spec("req~utransport-send-preserve-data~1")
    @spec("dsn~up-attributes-payload-format~1")
    async def test_every_payload_format_survives(self, pair: Pair) -> None:
        builders = [(UMessageBuilder.notification(topic(), reply()), UPayload(b"data", format)) for format in FORMATS]
        await self.check_preserved(pair, [builder.build_from_upayload(payload) for builder, payload in builders])

    @spec("req~utransport-send-preserve-data~1")
    async def test_unusual_addresses_survive(self, pair: Pair) -> None:
        if self.refuses_foreign_source:
            pytest.skip("this network refuses sources of other authorities")
        await self.check_preserved(pair, [notification(b"odd", source, sink) for source, sink in ODD_ADDRESSES])

    @spec("req~utransport-send-preserve-data~1")
    async def test_the_streamers_sink_survives(self, pair: Pair) -> None:
        await self.check_preserved(pair, [streamed(b"streamed")])

    @spec("req~utransport-send-preserve-data~1")
    async def test_a_large_payload_survives(self, pair: Pair) -> None:
        data = bytes(range(256)) * (self.payload_bytes_max // 256)
        await self.check_preserved(pair, [notification(data)])

    @spec("req~utransport-send-preserve-data~1")
    async def test_a_payload_survives_whatever_it_ends_with(self, pair: Pair) -> None:
        """A network of lines, words or C strings may strip edges; also at the beginning, and if nothing else is
        there."""
        payloads = [form for edge in EDGES for form in (b"x" + edge, edge + b"x", edge, b"x" + edge * 3)]
        await self.check_preserved(pair, [notification(payload) for payload in payloads])

    @spec("req~utransport-send-preserve-data~1")
    async def test_every_priority_survives(self, pair: Pair) -> None:
        priorities = [None, *(value for value in UPriority.values() if value)]
        builders = [(UMessageBuilder.notification(topic(), reply()), value) for value in priorities]
        await self.check_preserved(
            pair, [(one if value is None else one.with_priority(value)).build() for one, value in builders]
        )

    @pytest.mark.parametrize("what", INVALID)
    @spec("dsn~utransport-send-error-invalid-parameter~1")
    async def test_an_invalid_message_is_refused(self, pair: Pair, what: str) -> None:
        assert await self.refusal_of(pair[0].send(INVALID[what]())) == UCode.INVALID_ARGUMENT

    @spec("dsn~up-attributes-ttl-timeout~1")
    async def test_an_expired_message_is_refused(self, pair: Pair) -> None:
        assert await code_of(pair[0].send(expired())) == UCode.DEADLINE_EXCEEDED

    @spec("dsn~up-attributes-ttl~1")
    async def test_a_ttl_of_0_never_expires(self, pair: Pair) -> None:
        heard = await self.listen(pair, topic(), reply())
        message = expired(b"old")
        message.attributes.ttl = 0
        await self.send_all(pair[0], [message])
        await heard.expect(1)

    @spec("dsn~utransport-send-error-invalid-parameter~1")
    async def test_what_is_refused_does_not_stop_the_rest(self, pair: Pair) -> None:
        heard = await self.listen(pair, topic(), reply())
        statuses = await pair[0].send_batch(
            [notification(b"1"), INVALID["no id"](), notification(b"2"), expired(), notification(b"3")]
        )
        assert codes(statuses) == [UCode.OK, UCode.INVALID_ARGUMENT, UCode.OK, UCode.DEADLINE_EXCEEDED, UCode.OK]
        assert await self.settle(pair[0], heard) == [b"1", b"2", b"3"]

    @spec("req~utransport-send-preserve-data~1")
    async def test_what_is_sent_belongs_to_the_caller(self, pair: Pair) -> None:
        """The caller may send the same messages again, or to another network."""
        heard = await self.everything(pair)
        sound = [self.sendable(one) for one in islice(every_combination(), 0, None, 7)]
        messages = [*sound, INVALID["no id"](), expired()]
        copies, given = copy.deepcopy(messages), list(messages)
        await pair[0].send_batch(given)
        await self.settle(pair[0], heard)
        assert [id(one) for one in given] == [id(one) for one in messages]
        assert messages == copies

    async def test_an_empty_batch_is_nothing(self, pair: Pair) -> None:
        assert await pair[0].send_batch([]) == []

    async def test_a_publish_without_sink_is_refused_where_undeclared(self, pair: Pair) -> None:
        declared = Capability.PUBLISH_WITHOUT_SINK in self.capabilities
        assert codes(await pair[0].send_batch([publish()])) == [UCode.OK if declared else UCode.INVALID_ARGUMENT]

    @spec("req~utransport-send-prevent-address-spoofing~1")
    async def test_a_foreign_source_is_refused_if_that_can_be_seen(self, pair: Pair) -> None:
        (status,) = await pair[0].send_batch([notification(b"foreign", topic("somebody.else"))])
        assert status.code == (UCode.PERMISSION_DENIED if self.refuses_foreign_source else UCode.OK)
