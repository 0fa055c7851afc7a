"""Errors: a transport raises only UStatusError, whatever is wrong with the network, its state or the arguments.

unreachable, cut off, closed, closing, cancelled  |  odd addresses  ->  UStatusError, or a status for each message
"""

from __future__ import annotations

import asyncio
from typing import Final

import pytest

from transports.conformance.base import Ends, Pair, TransportHarness
from transports.conformance.messages import ALPHA, BETA, GAMMA, code_of, codes, notification, reply, topic
from transports.conformance.sinks import Changes, Sink
from uprotocol.transport import Capability, UTransport
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.uri_pb2 import UUri

FROM_GAMMA: Final = topic(GAMMA)  # the refused filter
ODD_AUTHORITIES: Final = [
    "two words",
    "a/b",
    "up/#",
    "+",
    "$SYS",
    "{}",
    "ünïcode",
    "a\0b",
    "*" * 2,
    "a" * 129,
    "[::1",
    "😀",
]


class ErrorConformance(TransportHarness):
    async def answers_of(self, end: UTransport, source: UUri, sink: UUri) -> dict[str, int]:
        """The code of each call."""
        heard = Sink(self.deadline_s)
        message = notification(b"odd")  # a builder would refuse odd addresses
        message.attributes.source.CopyFrom(source)
        message.attributes.sink.CopyFrom(sink)
        (status,) = await end.send_batch([message])
        return {
            "send_batch": status.code,
            "send": await code_of(end.send(message)),
            "register_listener": await code_of(end.register_listener(source, heard, sink)),
            "unregister_listener": await code_of(end.unregister_listener(source, heard, sink)),
            "receive": await code_of(end.receive(source, sink)),
        }

    def pushing(self, code: UCode.ValueType) -> UCode.ValueType:
        """The expected code of a call of the push side: `code`, or UNIMPLEMENTED without one."""
        return code if Capability.PUSH in self.capabilities else UCode.UNIMPLEMENTED

    async def test_a_network_that_can_not_be_reached(self, ends: Ends) -> None:
        end = ends.keep(await self.make_unreachable(ALPHA))
        for _ in range(2):  # its owner tries again
            assert await self.refusal_of(end.open()) == UCode.UNAVAILABLE
            assert not end.connected
            assert codes(await end.send_batch([notification()])) == [UCode.UNAVAILABLE]
        await self.answers_of(end, topic(), reply())
        await end.close()

    async def test_a_network_that_refuses_us(self, ends: Ends) -> None:
        end = ends.keep(await self.make_refused(ALPHA))
        for _ in range(2):
            assert await self.refusal_of(end.open()) in (UCode.UNAUTHENTICATED, UCode.PERMISSION_DENIED)
            assert not end.connected

    async def test_a_network_that_lets_us_hear_nothing(self, ends: Ends) -> None:
        """The caller of register_listener gets the error, and the listener is not registered."""
        self.needs(Capability.PUSH)
        end = ends.keep(await self.make_deaf(BETA))
        await end.open()
        heard = Sink(self.deadline_s)
        for _ in range(2):
            await self.refusal_of(end.register_listener(topic(), heard, reply()))
            assert await code_of(end.unregister_listener(topic(), heard, reply())) == UCode.NOT_FOUND

    async def test_a_filter_that_is_refused_costs_no_other(self, pair: Pair) -> None:
        """The caller gets the error, or `troubles` names it. The others still work, also on a new connection."""
        self.needs(Capability.PUSH)
        await self.refuse_filter(BETA, FROM_GAMMA, reply())
        heard, refused = await self.listen(pair, topic(), reply()), Sink(self.deadline_s)
        changes = Changes(pair[1])
        code = await code_of(pair[1].register_listener(FROM_GAMMA, refused, reply()))
        if code == UCode.OK:
            await self.names_gamma(pair[1])
        await self.send_all(pair[0], [notification(b"before")])
        await heard.expect_payload(b"before")
        await self.settle(pair[0], heard)
        assert changes.seen == []
        await self.stays_up(pair, heard)
        if code != UCode.OK:
            assert await code_of(pair[1].unregister_listener(FROM_GAMMA, refused, reply())) == UCode.NOT_FOUND

    async def test_a_filter_that_is_refused_when_we_are_back_is_a_trouble_and_costs_no_other(
        self, ends: Ends, pair: Pair
    ) -> None:
        """The trouble stays until the network allows the filter and the end has connected again."""
        heard, refused = await self.listen(pair, topic(), reply()), Sink(self.deadline_s)
        await pair[1].register_listener(FROM_GAMMA, refused, reply())
        await self.refuse_filter(BETA, FROM_GAMMA, reply())
        for _ in range(2):
            await self.stays_up(pair, heard)
            await self.names_gamma(pair[1])
        await self.allow_filters(BETA)
        await self.stays_up(pair, heard)
        await self.eventually(lambda: not self.is_named(pair[1]), f"no trouble that names {GAMMA}")
        gamma = await ends(GAMMA)
        await gamma.open()
        if self.discovery:
            await self.usable(gamma, refused, FROM_GAMMA, reply())
        await self.send_all(gamma, [notification(b"allowed", FROM_GAMMA)])
        await refused.expect_payload(b"allowed")

    async def stays_up(self, pair: Pair, heard: Sink) -> None:
        """After a reconnect the end is connected, and gets the messages that it is allowed to get."""
        async with self.away(pair[1]):
            pass
        await self.usable(pair[0], heard)
        changes = Changes(pair[1])
        await self.settle(pair[0], heard)
        assert pair[1].connected
        assert changes.seen == []

    async def names_gamma(self, end: UTransport) -> None:
        await self.eventually(lambda: self.is_named(end), f"a trouble that names {GAMMA}")

    def is_named(self, end: UTransport) -> bool:
        return any(GAMMA in trouble for trouble in end.troubles)

    async def test_one_that_was_never_opened_and_one_that_is_closed(self, ends: Ends) -> None:
        never, closed = await ends(ALPHA), await ends(ALPHA)
        await closed.open()
        await closed.close()
        for end in (never, closed):
            answers = await self.answers_of(end, topic(), reply())
            assert answers["send_batch"] == answers["send"] == UCode.UNAVAILABLE
            assert answers["register_listener"] == self.pushing(UCode.UNAVAILABLE)
            assert UCode.OK not in answers.values()

    async def test_calls_while_it_is_being_closed(self, pair: Pair) -> None:
        end = pair[1]
        messages = self.traffic(500, topic(BETA), reply(ALPHA))
        sent = [asyncio.ensure_future(end.send_batch(messages)) for _ in range(4)]
        closing = asyncio.ensure_future(end.close())
        answers = []
        while not closing.done():
            answers.append(await self.answers_of(end, topic(BETA), reply(ALPHA)))
            await asyncio.sleep(0)
        await closing
        for statuses in await asyncio.gather(*sent):
            assert len(statuses) == len(messages)
        assert codes(await end.send_batch(messages[:1])) == [UCode.UNAVAILABLE]

    async def test_an_open_that_is_cancelled_leaves_it_closed(self, ends: Ends) -> None:
        end = await ends(ALPHA)
        opening = asyncio.ensure_future(end.open())
        await asyncio.sleep(0)  # it has begun
        opening.cancel()
        await asyncio.wait(
            {opening}, timeout=self.deadline_s
        )  # unlike `gather`, this does not wait for a task that goes on
        assert opening.done(), "open() went on though it was cancelled"
        assert opening.cancelled() or opening.exception() is None, opening.exception()
        await end.close()
        assert not end.connected
        async with asyncio.timeout(self.deadline_s):  # resources of the cancelled one may become free a moment later
            while await code_of(end.open()) != UCode.OK:  # noqa: ASYNC110 - a free port is no event
                await asyncio.sleep(self.settle_s)
        await end.close()

    async def test_calls_while_the_network_is_away(self, pair: Pair) -> None:
        changes = Changes(pair[1])
        await self.break_network(BETA)
        await changes.until(False, self.deadline_s)
        async with asyncio.timeout(self.deadline_s):
            answers = await self.answers_of(pair[1], topic(), reply())
        assert answers["send_batch"] == answers["send"] == UCode.UNAVAILABLE
        await asyncio.wait_for(pair[1].close(), self.deadline_s)

    @pytest.mark.parametrize("authority", ODD_AUTHORITIES, ids=ascii)
    async def test_odd_addresses(self, pair: Pair, authority: str) -> None:
        odd_source, odd_sink = topic(), reply()
        odd_source.authority_name = odd_sink.authority_name = authority
        for source, sink in ((odd_source, reply()), (topic(), odd_sink)):
            answers = await self.answers_of(pair[0], source, sink)
            for call in ("send_batch", "send"):
                assert answers[call] == UCode.INVALID_ARGUMENT, (call, answers)
            for call in ("register_listener", "unregister_listener"):
                assert answers[call] == self.pushing(UCode.INVALID_ARGUMENT), (call, answers)
