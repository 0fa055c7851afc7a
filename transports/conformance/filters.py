"""Filters: which pairs are valid, which pair matches which type, and how wildcards match.

message (source, sink)  --  source_filter, sink_filter  ->  delivered or not
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from transports.conformance.base import Pair, TransportHarness, spec
from transports.conformance.messages import (
    ALPHA,
    BETA,
    ENTITY,
    VERSION,
    code_of,
    method,
    notification,
    publish,
    reply,
    request,
    response,
    streamed,
    topic,
)
from transports.conformance.sinks import BatchSink, Sink
from uprotocol import uri as uris
from uprotocol.transport import Capability
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.umessage_pb2 import UMessage
from uprotocol.v1.uri_pb2 import UUri

Filters = tuple[UUri, UUri | None]

_ANY_AT_ALPHA = uris.pattern(ALPHA)
_ANY_AT_BETA = uris.pattern(BETA)

VALID_PAIRS: dict[str, Filters] = {
    "(topic, none)": (topic(), None),
    "(any, none)": (_ANY_AT_ALPHA, None),
    "(topic, reply)": (topic(), reply()),
    "(reply, method)": (reply(ALPHA), method()),
    "(method, reply)": (method(ALPHA), reply()),
    "(any, reply)": (_ANY_AT_ALPHA, reply()),
    "(any, any)": (_ANY_AT_ALPHA, _ANY_AT_BETA),
}
INVALID_PAIRS: dict[str, Filters] = {
    "(reply, none)": (reply(ALPHA), None),
    "(method, none)": (method(ALPHA), None),
    "(reply, reply)": (reply(ALPHA), reply()),
    "(reply, any)": (reply(ALPHA), _ANY_AT_BETA),
    "(reply, topic)": (reply(ALPHA), topic(BETA)),
    "(method, method)": (method(ALPHA), method()),
    "(method, any)": (method(ALPHA), _ANY_AT_BETA),
    "(method, topic)": (method(ALPHA), topic(BETA)),
    "(topic, method)": (topic(), method()),
    "(topic, any)": (topic(), _ANY_AT_BETA),
    "(topic, topic)": (topic(), topic(BETA)),
    "(any, method)": (_ANY_AT_ALPHA, method()),
    "(any, topic)": (_ANY_AT_ALPHA, topic(BETA)),
    "(authority in upper case, none)": (UUri(authority_name="ALPHA", ue_version_major=1, resource_id=0x8000), None),
    "(topic, version of 9 bits)": (topic(), UUri(authority_name=BETA, ue_id=1, ue_version_major=0x101)),
}
STREAMED = "publish with a streamer's sink"
TYPES: dict[str, Callable[[bytes], UMessage]] = {
    "publish": publish,
    "notification": notification,
    "request": request,
    "response": response,
    STREAMED: streamed,
}
SEES: dict[str, set[str]] = {
    "(topic, none)": {"publish"},
    "(any, none)": {"publish"},
    "(topic, reply)": {"notification"},
    "(reply, method)": {"request"},
    "(method, reply)": {"response"},
    "(any, reply)": {"notification", "response"},
    "(any, any)": {"notification", "request", "response", STREAMED},
}
# of the notification from topic() to reply()
MATCHING: dict[str, tuple[UUri, UUri]] = {
    "exact": (topic(), reply()),
    "any source authority": (uris.uri("*", ENTITY, VERSION, 0x9A01), reply()),
    "any source type": (uris.uri(ALPHA, ENTITY | 0xFFFF, VERSION, 0x9A01), reply()),
    "any source instance": (uris.uri(ALPHA, ENTITY | 0xFFFF_0000, VERSION, 0x9A01), reply()),
    "any source entity": (uris.uri(ALPHA, 0xFFFF_FFFF, VERSION, 0x9A01), reply()),
    "any source version": (uris.uri(ALPHA, ENTITY, 0xFF, 0x9A01), reply()),
    "any source resource": (uris.uri(ALPHA, ENTITY, VERSION, 0xFFFF), reply()),
    "any source": (uris.ANY, reply()),
    "any sink authority": (topic(), uris.uri("*", ENTITY, VERSION, 0)),
    "any sink type": (topic(), uris.uri(BETA, ENTITY | 0xFFFF, VERSION, 0)),
    "any sink instance": (topic(), uris.uri(BETA, ENTITY | 0xFFFF_0000, VERSION, 0)),
    "any sink version": (topic(), uris.uri(BETA, ENTITY, 0xFF, 0)),
    "any sink": (uris.ANY, _ANY_AT_BETA),
    "anything at all": (uris.ANY, uris.ANY),
}
NOT_MATCHING: dict[str, tuple[UUri, UUri]] = {
    "another source authority": (uris.uri("alph", ENTITY, VERSION, 0x9A01), reply()),
    "another source type": (uris.uri(ALPHA, ENTITY ^ 0x1, VERSION, 0x9A01), reply()),
    "another source instance": (uris.uri(ALPHA, ENTITY ^ 0x1_0000, VERSION, 0x9A01), reply()),
    "source instance 0 is no wildcard": (uris.uri(ALPHA, ENTITY & 0xFFFF, VERSION, 0x9A01), reply()),
    "any source type of another instance": (uris.uri(ALPHA, 0x4_FFFF, VERSION, 0x9A01), reply()),
    "another source version": (uris.uri(ALPHA, ENTITY, VERSION + 1, 0x9A01), reply()),
    "another source resource": (uris.uri(ALPHA, ENTITY, VERSION, 0x9A02), reply()),
    "another sink authority": (topic(), uris.uri("bet", ENTITY, VERSION, 0)),
    "another sink type": (topic(), uris.uri(BETA, ENTITY ^ 0x1, VERSION, 0)),
    "sink instance 0 is no wildcard": (topic(), uris.uri(BETA, ENTITY & 0xFFFF, VERSION, 0)),
    "another sink version": (topic(), uris.uri(BETA, ENTITY, VERSION + 1, 0)),
}


class FilterConformance(TransportHarness):
    def listenable(self, filters: Filters) -> bool:
        """False for pairs that need an undeclared capability."""
        source, sink = filters
        if sink is not None:
            return True
        wildcard = source.resource_id == uris.WILDCARD_RESOURCE
        return Capability.PUBLISH_WITHOUT_SINK in self.capabilities and (
            not wildcard or Capability.WILDCARD_SOURCE in self.capabilities
        )

    @pytest.mark.parametrize("name", VALID_PAIRS)
    @spec("dsn~utransport-registerlistener-error-invalid-parameter~1")
    async def test_a_valid_pair_is_accepted_or_undeclared(self, pair: Pair, name: str) -> None:
        self.needs(Capability.PUSH)
        source, sink = VALID_PAIRS[name]
        listener = Sink(self.deadline_s)
        if self.listenable((source, sink)):
            await pair[1].register_listener(source, listener, sink)
            await pair[1].unregister_listener(source, listener, sink)
        else:
            for call in (pair[1].register_listener, pair[1].unregister_listener):
                assert await code_of(call(source, listener, sink)) == UCode.INVALID_ARGUMENT

    @pytest.mark.parametrize("name", INVALID_PAIRS)
    @spec("dsn~utransport-registerlistener-error-invalid-parameter~1")
    @spec("dsn~utransport-unregisterlistener-error-invalid-parameter~1")
    async def test_an_invalid_pair_is_refused(self, pair: Pair, name: str) -> None:
        self.needs(Capability.PUSH)
        source, sink = INVALID_PAIRS[name]
        for call in (pair[1].register_listener, pair[1].unregister_listener):
            assert await code_of(call(source, Sink(self.deadline_s), sink)) == UCode.INVALID_ARGUMENT

    @pytest.mark.parametrize("name", VALID_PAIRS)
    @spec("dsn~utransport-registerlistener-start-invoking-listeners~1")
    @spec("local~l1-nosink")
    async def test_which_pair_sees_which_type(self, pair: Pair, name: str) -> None:
        if not self.listenable(VALID_PAIRS[name]):
            pytest.skip("this pair of filters needs a capability that is not declared")
        with_sink = Capability.PUBLISH_WITHOUT_SINK not in self.capabilities
        sent = [make(type.encode()) for type, make in TYPES.items() if not (with_sink and type == "publish")]
        heard = await self.listen(pair, *VALID_PAIRS[name])
        witness = await self.listen(pair, topic(resource=0xAAAA), reply(entity=0xAAAA))  # of a stream without others
        await self.send_all(pair[0], sent)
        await self.settle(pair[0], witness, topic(resource=0xAAAA), reply(entity=0xAAAA))
        expected = SEES[name] - (set() if self.routes_streamed_publish else {STREAMED})
        await heard.expect(len(expected))
        assert sorted(payload.decode() for payload in heard.payloads if payload.decode() in TYPES) == sorted(expected)

    @pytest.mark.parametrize("name", MATCHING)
    @spec("dsn~uri-pattern-matching~2")
    @spec("dsn~utransport-registerlistener-start-invoking-listeners~1")
    async def test_a_pattern_that_matches(self, pair: Pair, name: str) -> None:
        self.needs(Capability.PUSH)
        heard = BatchSink(self.deadline_s)
        source, sink = MATCHING[name]
        await pair[1].register_listener(source, heard, sink)
        if self.discovery:
            await self.reach(pair[0], heard, notification(b"conformance probe"))
        await self.send_all(pair[0], [notification(b"one"), notification(b"two")])
        assert await self.settle(pair[0], heard) == [b"one", b"two"]

    @pytest.mark.parametrize("name", NOT_MATCHING)
    @spec("dsn~uri-pattern-matching~2")
    async def test_a_pattern_that_does_not_match(self, pair: Pair, name: str) -> None:
        source, sink = NOT_MATCHING[name]
        heard = await self.listen(pair, source, sink, reachable=False)
        witness = await self.listen(pair, topic(), reply())
        await self.send_all(pair[0], [notification(b"one"), notification(b"two")])
        assert await self.settle(pair[0], witness) == [b"one", b"two"]
        assert heard.messages == []

    async def test_an_authority_left_out_of_a_filter_is_our_own(self, pair: Pair) -> None:
        heard = await self.listen(pair, topic(), reply(""))
        own = Sink(self.deadline_s)
        await pair[1].register_listener(topic(""), own, reply())
        await self.send_all(pair[0], [notification(b"to beta")])
        assert await self.settle(pair[0], heard) == [b"to beta"]
        assert own.messages == [], "a filter without authority is for beta's own topic, which alpha did not send"

    async def test_a_left_out_authority_and_our_own_are_one_filter(self, pair: Pair) -> None:
        heard = await self.listen(pair, topic(), reply(""))
        await pair[1].register_listener(topic(), heard, reply(BETA))
        await self.send_all(pair[0], [notification(b"once")])
        assert await self.settle(pair[0], heard) == [b"once"]
        await pair[1].unregister_listener(topic(), heard, reply(BETA))

    @spec("dsn~uri-authority-mapping~1")
    async def test_an_address_without_authority_means_the_senders_host(self, pair: Pair) -> None:
        heard = await self.listen(pair, uris.ANY, uris.ANY)
        await self.send_all(
            pair[0], [notification(b"named", topic(""), reply()), notification(b"both", topic(""), reply(""))]
        )
        assert await self.settle(pair[0], heard) == [b"named", b"both"]
        addresses = [(message.attributes.source, message.attributes.sink) for message in heard.messages[:2]]
        assert addresses == [(topic(ALPHA), reply(BETA)), (topic(ALPHA), reply(ALPHA))], (
            "expected the authorities of the sender"
        )

    async def test_nobody_hears_what_it_sent_itself(self, pair: Pair) -> None:
        self.needs(Capability.PUSH)
        own = Sink(self.deadline_s)
        await pair[0].register_listener(uris.ANY, own, uris.ANY)
        heard = await self.listen(pair, topic(), reply())
        await self.send_all(
            pair[0],
            [notification(b"out"), notification(b"to myself", topic(), reply(ALPHA)), streamed(b"x", authority=ALPHA)],
        )
        assert await self.settle(pair[0], heard) == [b"out"]
        assert own.messages == []
