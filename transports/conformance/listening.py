"""Filters: which pairs are valid, which pair matches which type, and how wildcards match. Listeners: several for one
filter, one for several, limits, and unregister_listener.

message (source, sink)  --  source_filter, sink_filter  ->  delivered or not
register_listener -> idempotent | RESOURCE_EXHAUSTED      unregister_listener -> no more calls | NOT_FOUND
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from transports.conformance.base import Ends, Pair, TransportHarness, spec
from transports.conformance.messages import (
    ALPHA,
    BETA,
    GAMMA,
    OTHER,
    PROBE,
    UE_ID,
    UE_VERSION,
    code_of,
    codes,
    example,
    method,
    notification,
    publish,
    reply,
    request,
    response,
    streamed,
    topic,
)
from transports.conformance.sending import INVALID, expired
from transports.conformance.sinks import BatchSink, Sink
from uprotocol import uri as uris
from uprotocol.transport import Capability, TtlCounts
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
    "any source authority": (uris.uri("*", UE_ID, UE_VERSION, 0x9A01), reply()),
    "any source type": (uris.uri(ALPHA, UE_ID | 0xFFFF, UE_VERSION, 0x9A01), reply()),
    "any source instance": (uris.uri(ALPHA, UE_ID | 0xFFFF_0000, UE_VERSION, 0x9A01), reply()),
    "any source entity": (uris.uri(ALPHA, 0xFFFF_FFFF, UE_VERSION, 0x9A01), reply()),
    "any source version": (uris.uri(ALPHA, UE_ID, 0xFF, 0x9A01), reply()),
    "any source resource": (uris.uri(ALPHA, UE_ID, UE_VERSION, 0xFFFF), reply()),
    "any source": (uris.ANY, reply()),
    "any sink authority": (topic(), uris.uri("*", UE_ID, UE_VERSION, 0)),
    "any sink type": (topic(), uris.uri(BETA, UE_ID | 0xFFFF, UE_VERSION, 0)),
    "any sink instance": (topic(), uris.uri(BETA, UE_ID | 0xFFFF_0000, UE_VERSION, 0)),
    "any sink version": (topic(), uris.uri(BETA, UE_ID, 0xFF, 0)),
    "any sink": (uris.ANY, _ANY_AT_BETA),
    "anything at all": (uris.ANY, uris.ANY),
}
NOT_MATCHING: dict[str, tuple[UUri, UUri]] = {
    "another source authority": (uris.uri("alph", UE_ID, UE_VERSION, 0x9A01), reply()),
    "another source type": (uris.uri(ALPHA, UE_ID ^ 0x1, UE_VERSION, 0x9A01), reply()),
    "another source instance": (uris.uri(ALPHA, UE_ID ^ 0x1_0000, UE_VERSION, 0x9A01), reply()),
    "source instance 0 is no wildcard": (uris.uri(ALPHA, UE_ID & 0xFFFF, UE_VERSION, 0x9A01), reply()),
    "any source type of another instance": (uris.uri(ALPHA, 0x4_FFFF, UE_VERSION, 0x9A01), reply()),
    "another source version": (uris.uri(ALPHA, UE_ID, UE_VERSION + 1, 0x9A01), reply()),
    "another source resource": (uris.uri(ALPHA, UE_ID, UE_VERSION, 0x9A02), reply()),
    "another sink authority": (topic(), uris.uri("bet", UE_ID, UE_VERSION, 0)),
    "another sink type": (topic(), uris.uri(BETA, UE_ID ^ 0x1, UE_VERSION, 0)),
    "sink instance 0 is no wildcard": (topic(), uris.uri(BETA, UE_ID & 0xFFFF, UE_VERSION, 0)),
    "another sink version": (topic(), uris.uri(BETA, UE_ID, UE_VERSION + 1, 0)),
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


DISCARDED = ["no id", "id of version 4", "id of the year 10889", "no type", "request of CS3", "response without reqid"]
DISCARDED += ["commstatus on a notification", "token on a notification"]

WIDE = {
    "any source authority": (uris.uri("*", UE_ID, UE_VERSION, 0x9A01), reply()),
    "any source": (uris.ANY, reply()),
    "anything at all": (uris.ANY, uris.ANY),
}


class Failing(Sink):
    """Raises directly, not in an awaitable, for every message."""

    def on_receive(self, message: UMessage) -> None:
        super().on_receive(message)
        raise RuntimeError("a listener that fails")


class ListeningConformance(TransportHarness):
    @spec("dsn~utransport-registerlistener-error-unimplemented~1")
    @spec("dsn~utransport-unregisterlistener-error-unimplemented~1")
    async def test_push_is_what_is_declared(self, pair: Pair) -> None:
        assert pair[0].capabilities == self.capabilities
        if Capability.PUSH in self.capabilities:
            return
        for call in (pair[1].register_listener, pair[1].unregister_listener):
            assert await code_of(call(topic(), Sink(self.deadline_s), reply())) == UCode.UNIMPLEMENTED

    @spec("req~utransport-delivery-methods~1")
    async def test_push_or_pull_is_declared(self) -> None:
        assert self.capabilities & (Capability.PUSH | Capability.PULL)

    @spec("dsn~utransport-registerlistener-number-of-listeners~1")
    async def test_several_listeners_of_one_filter_each_get_it_once(self, pair: Pair) -> None:
        first = await self.listen(pair, topic(), reply())
        others = [await self.listen(pair, topic(), reply(), kind(self.deadline_s)) for kind in (Sink, BatchSink, Sink)]
        await self.send_all(pair[0], [notification(b"one"), notification(b"two")])
        for heard in [first, *others]:
            assert await self.settle(pair[0], heard) == [b"one", b"two"]

    @spec("dsn~utransport-registerlistener-listener-reuse~1")
    async def test_one_listener_for_several_filters(self, pair: Pair) -> None:
        heard = await self.listen(pair, topic(), reply())
        await self.listen(pair, OTHER, reply(), heard)
        await self.send_all(pair[0], [notification(b"one"), notification(b"two", OTHER)])
        assert set(await self.settle(pair[0], heard)) == {b"one", b"two"}

    @spec("dsn~utransport-registerlistener-start-invoking-listeners~1")
    async def test_filters_that_overlap_each_deliver(self, pair: Pair) -> None:
        narrow = await self.listen(pair, topic(), reply())
        wide = await self.listen(pair, uris.pattern(ALPHA), reply())
        widest = await self.listen(pair, uris.ANY, uris.ANY)
        both = await self.listen(pair, topic(), reply(), Sink(self.deadline_s))
        await self.listen(pair, uris.ANY, reply(), both)
        await self.send_all(pair[0], [notification(b"one")])
        for heard in (narrow, wide, widest):
            assert await self.settle(pair[0], heard) == [b"one"]
        assert set(await self.settle(pair[0], both)) == {b"one"}, (
            "expected one at least; a network may deliver once for each filter"
        )

    async def test_a_message_that_is_sent_again_is_delivered_again(self, pair: Pair) -> None:
        """Retries are at least once, and a transport does not remove duplicates."""
        heard = await self.listen(pair, topic(), reply())
        message = notification(b"again")
        await self.send_all(pair[0], [message, message])
        await self.send_all(pair[0], [message])
        assert await self.settle(pair[0], heard) == [b"again"] * 3

    @spec("dsn~utransport-registerlistener-idempotent~1")
    async def test_registering_again_changes_nothing(self, pair: Pair) -> None:
        heard = await self.listen(pair, topic(), reply())
        witness = await self.listen(pair, topic(), reply())
        for _ in range(3):
            await pair[1].register_listener(topic(), heard, reply())
        await self.send_all(pair[0], [notification(b"one")])
        assert await self.settle(pair[0], heard) == [b"one"]
        await pair[1].unregister_listener(topic(), heard, reply())
        await self.send_all(pair[0], [notification(b"two")])
        assert await self.settle(pair[0], witness) == [b"one", b"two"]
        assert b"two" not in heard.payloads, "one unregister_listener ends all registrations of a listener"

    @spec("dsn~utransport-unregisterlistener-stop-invoking-listeners~1")
    async def test_unregistering_ends_delivery_to_that_listener_and_filter_only(self, pair: Pair) -> None:
        removed = await self.listen(pair, topic(), reply())
        await self.listen(pair, OTHER, reply(), removed)
        stays = await self.listen(pair, topic(), reply())
        await pair[1].unregister_listener(topic(), removed, reply())
        await self.send_all(pair[0], [notification(b"one"), notification(b"other", OTHER)])
        assert await self.settle(pair[0], stays) == [b"one"]
        await removed.expect_payload(b"other")
        assert b"one" not in removed.payloads

    @spec("dsn~utransport-unregisterlistener-stop-invoking-listeners~1")
    async def test_unregistering_the_last_listener_and_registering_again(self, pair: Pair) -> None:
        for _ in range(2):
            heard = await self.listen(pair, topic(), reply())
            await self.send_all(pair[0], [notification(b"one")])
            assert await self.settle(pair[0], heard) == [b"one"]
            await pair[1].unregister_listener(topic(), heard, reply())
        before = len(heard.messages)
        await self.send_all(pair[0], [notification(b"late")])
        await asyncio.sleep(self.settle_s)
        assert len(heard.messages) == before

    @pytest.mark.parametrize("name", WIDE)
    @spec("dsn~utransport-unregisterlistener-stop-invoking-listeners~1")
    async def test_unregistering_a_wildcard_ends_it_and_nothing_else(self, pair: Pair, name: str) -> None:
        source, sink = WIDE[name]
        wide, narrow = await self.listen(pair, source, sink), await self.listen(pair, topic(), reply())
        await self.send_all(pair[0], [notification(b"both")])
        assert await self.settle(pair[0], narrow) == [b"both"]
        await wide.expect_payload(b"both")
        await pair[1].unregister_listener(source, wide, sink)
        await self.send_all(pair[0], [notification(b"one")])
        assert await self.settle(pair[0], narrow) == [b"both", b"one"]
        assert b"one" not in wide.payloads
        assert await code_of(pair[1].unregister_listener(source, wide, sink)) == UCode.NOT_FOUND

    async def test_listeners_that_are_registered_before_open(self, ends: Ends) -> None:
        """Either the transport accepts none, or each gets the messages that are sent after `open` has returned."""
        self.needs(Capability.PUSH)
        alpha, beta = await ends(ALPHA), await ends(BETA)
        heard, removed = Sink(self.deadline_s), Sink(self.deadline_s)
        statuses = beta.register_before_open([(topic(), reply()), (reply(), None), (OTHER, reply())], heard)
        if statuses[0].code:
            assert UCode.OK not in codes(statuses)
            return
        assert codes(statuses) == [UCode.OK, UCode.INVALID_ARGUMENT, UCode.OK]
        assert codes(beta.register_before_open([(OTHER, reply())], removed)) == [UCode.OK]
        await alpha.open()
        await beta.open()
        if self.discovery:
            await self.reach(alpha, heard, example(topic(), reply()))
        await beta.register_listener(topic(), heard, reply())  # changes nothing
        await beta.unregister_listener(OTHER, removed, reply())
        await self.send_all(alpha, [notification(b"0"), notification(b"1", OTHER), notification(b"2")])
        assert sorted(await self.settle(alpha, heard)) == [b"0", b"1", b"2"]
        assert not removed.payloads
        await beta.unregister_listener(topic(), heard, reply())
        assert await code_of(beta.unregister_listener(topic(), heard, reply())) == UCode.NOT_FOUND

    @spec("dsn~utransport-unregisterlistener-error-notfound~1")
    async def test_unregistering_what_is_not_registered(self, pair: Pair) -> None:
        self.needs(Capability.PUSH)
        heard, stranger = Sink(self.deadline_s), Sink(self.deadline_s)
        await pair[1].register_listener(topic(), heard, reply())
        for source, listener in ((topic(), stranger), (OTHER, heard)):
            assert await code_of(pair[1].unregister_listener(source, listener, reply())) == UCode.NOT_FOUND
        await pair[1].unregister_listener(topic(), heard, reply())
        assert await code_of(pair[1].unregister_listener(topic(), heard, reply())) == UCode.NOT_FOUND

    @spec("req~utransport-registerlistener-max-listeners~1")
    @spec("dsn~utransport-registerlistener-error-resource-exhausted~1")
    async def test_the_limit_of_listeners_overall(self, ends: Ends) -> None:
        self.needs(Capability.PUSH)
        async with await ends(BETA, listeners_max=2) as end:
            heard = Sink(self.deadline_s)
            await end.register_listener(topic(), heard, reply())
            await end.register_listener(OTHER, heard, reply())
            third = topic(resource=0x9A03)
            assert await code_of(end.register_listener(third, heard, reply())) == UCode.RESOURCE_EXHAUSTED
            await end.register_listener(OTHER, heard, reply())  # registered already: OK at the limit, too
            await end.unregister_listener(OTHER, heard, reply())
            await end.register_listener(third, heard, reply())

    @spec("req~utransport-registerlistener-max-listeners~1")
    @spec("dsn~utransport-registerlistener-error-resource-exhausted~1")
    async def test_the_limit_of_listeners_of_one_filter(self, ends: Ends) -> None:
        self.needs(Capability.PUSH)
        async with await ends(BETA, listeners_per_filter_max=1) as end:
            heard, another = Sink(self.deadline_s), Sink(self.deadline_s)
            await end.register_listener(topic(), heard, reply())
            assert await code_of(end.register_listener(topic(), another, reply())) == UCode.RESOURCE_EXHAUSTED
            await end.register_listener(topic(), heard, reply())
            await end.register_listener(OTHER, another, reply())

    async def test_a_listener_that_raises_harms_nobody_else(self, pair: Pair) -> None:
        failing = await self.listen(pair, topic(), reply(), Failing(self.deadline_s))
        heard = await self.listen(pair, topic(), reply())
        await self.send_all(pair[0], self.traffic(5))
        assert await self.settle(pair[0], heard) == [b"0", b"1", b"2", b"3", b"4"]
        await failing.expect(5)

    async def test_a_batch_listener_gets_batches_in_order(self, pair: Pair) -> None:
        heard = BatchSink(self.deadline_s)
        await self.listen(pair, topic(), reply(), heard)
        await self.send_all(pair[0], self.traffic(500))
        assert await self.settle(pair[0], heard) == [b"%d" % number for number in range(500)]

    @spec("dsn~up-attributes-ttl-timeout~1")
    async def test_what_has_expired_is_never_delivered(self, pair: Pair) -> None:
        heard = await self.listen(pair, topic(), reply())
        await self.inject(notification(b"before"))
        await heard.expect(1)
        dropped = pair[1].dropped.total()
        await self.inject(expired())
        await self.inject(notification(b"after"))
        await heard.expect_payload(b"after")
        assert await self.settle(pair[0], heard) == [b"before", b"after"]
        await self.eventually(lambda: pair[1].dropped.total() > dropped, "the expired message to be counted")
        counts = pair[1].take_ttl_counts()
        assert counts == TtlCounts() or 1 <= counts.expired == len(counts.ages_ms) <= counts.arrived, f"got {counts}"
        assert pair[1].take_ttl_counts() == TtlCounts(), "taking the counts must set them to 0"

    @pytest.mark.parametrize("what", DISCARDED)
    @spec("dsn~utransport-registerlistener-discard-invalid-messages~1")
    async def test_an_invalid_message_is_discarded(self, pair: Pair, what: str) -> None:
        heard = await self.listen(pair, uris.ANY, uris.ANY)
        witness = await self.listen(pair, topic(), reply())
        before = pair[1].dropped.total()
        await self.inject(INVALID[what]())
        await self.eventually(lambda: pair[1].dropped.total() > before, "the discarded message to be counted")
        assert await self.settle(pair[0], witness) == []
        assert [payload for payload in heard.payloads if not payload.startswith(b"mark ")] == []

    async def test_what_is_on_a_key_of_somebody_else_is_discarded(self, pair: Pair) -> None:
        """Access lists apply to keys: they would have no effect if only the attributes of a message counted."""
        self.needs_hook("inject_misplaced")
        heard = await self.listen(pair, uris.ANY, uris.ANY)
        before = pair[1].dropped.total()
        await self.inject_misplaced(notification(b"misplaced"), GAMMA)
        await self.eventually(lambda: pair[1].dropped.total() > before, "the discarded message to be counted")
        assert await self.settle(pair[0], heard) == []

    @spec("dsn~up-attributes-traceparent~1")
    async def test_a_traceparent_that_is_none_costs_the_traceparent_and_not_the_message(self, pair: Pair) -> None:
        """It is removed: the message is still valid."""
        heard = await self.listen(pair, topic(), reply())
        before = pair[1].dropped.total()
        injected = INVALID["bad traceparent"]()
        await self.inject(injected)
        await heard.expect(1)
        assert [message.attributes.id for message in heard.messages] == [injected.attributes.id]
        assert not heard.messages[0].attributes.traceparent
        assert pair[1].dropped.total() == before
        assert pair[1].mended in ({}, {"traceparent": 1}), "if `mended` counts, it counts this message once"

    @spec("dsn~utransport-registerlistener-discard-invalid-messages~1")
    async def test_what_is_no_message_at_all_is_discarded_and_the_rest_goes_on(self, pair: Pair) -> None:
        heard = await self.listen(pair, topic(), reply())
        before = pair[1].dropped.total()
        await self.send_all(pair[0], [notification(b"before")])
        malformed = await self.inject_malformed(topic(), reply())
        await self.send_all(pair[0], [notification(b"after")])
        await self.eventually(lambda: pair[1].dropped.total() >= before + malformed, f"{malformed} to be counted")
        assert await self.settle(pair[0], heard) == [b"before", b"after"]

    async def test_a_streamed_publish_reaches_who_listens_to_everything_for_its_authority(self, pair: Pair) -> None:
        if not self.routes_streamed_publish:
            pytest.skip("this network carries a streamer's publish as one without sink")
        heard = await self.listen(pair, uris.ANY, uris.pattern(BETA))
        if self.discovery:
            await self.reach(pair[0], heard, streamed(PROBE))
        await self.send_all(pair[0], [streamed(b"for beta"), streamed(b"for gamma", authority="gamma")])
        await heard.expect_payload(b"for beta")
        assert b"for gamma" not in await self.settle(pair[0], heard)
