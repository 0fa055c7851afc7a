"""The connection: before open, after close, lost, and back; and sending and listening meanwhile.

open -> connected -- break_network -> callback(False), UNAVAILABLE -- heal_network -> callback(True), all as before

sender:    cut off in a batch -> OK ... OK, UNAVAILABLE ... -> the rest again: complete and in order
listener:  register, unregister while away -> in effect when it is back

Errors: a transport raises only UStatusError, whatever is wrong with the network, its state or the arguments.
unreachable, cut off, closed, closing, cancelled  |  odd addresses  ->  UStatusError, or a status for each message
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final

import pytest

from transports.conformance.base import Ends, Pair, TransportHarness, spec
from transports.conformance.delivery import firsts, numbers
from transports.conformance.messages import (
    ALPHA,
    BETA,
    GAMMA,
    OTHER,
    PROBE,
    code_of,
    codes,
    method,
    notification,
    reply,
    request,
    topic,
)
from transports.conformance.sinks import BatchSink, Changes, Gated, Sink
from uprotocol.transport import Capability, ProbeRequest, ProbeVerdict, TtlCounts, UTransport
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.uri_pb2 import UUri
from uprotocol.v1.ustatus_pb2 import UStatus

FROM_BETA, TO_ALPHA = topic(BETA), reply(ALPHA)  # beta is the end that is cut off, here as the sender
TRY_AGAIN_S = 0.01


class ConnectionConformance(TransportHarness):
    async def test_close_may_be_called_at_any_time_and_again(self, ends: Ends) -> None:
        never_opened = await ends(ALPHA)
        await never_opened.close()
        end = await ends(ALPHA)
        await end.open()
        await asyncio.gather(end.close(), end.close())
        await end.close()
        assert not end.connected

    async def test_one_that_is_closed_and_opened_again_sends_and_hears(self, pair: Pair) -> None:
        """A streamer does this with a transport that does not return from sending, and registers its listeners
        again."""
        heard = await self.listen(pair, topic(), reply(), BatchSink(self.deadline_s))
        await pair[1].close()
        await pair[1].open()
        await pair[1].register_listener(topic(), heard, reply())
        await self.usable(pair[0], heard)
        before = len(heard.messages)
        await self.send_all(pair[0], [notification(b"after"), notification(b"last")])
        await heard.expect_payload(b"last")
        assert [payload for payload in heard.payloads[before:] if payload != PROBE] == [b"after", b"last"]
        await self.send_all(pair[1], [notification(b"", FROM_BETA, TO_ALPHA)])

    async def test_nothing_is_delivered_after_close(self, pair: Pair) -> None:
        heard = await self.listen(pair, topic(), reply())
        await pair[1].close()
        before = len(heard.messages)
        await pair[0].send_batch(self.traffic(10))
        await asyncio.sleep(self.settle_s)
        assert len(heard.messages) == before

    async def test_a_transport_has_a_repr_and_counts_what_it_drops(self, pair: Pair) -> None:
        for end in pair:
            assert ALPHA in repr(end) or BETA in repr(end)
            assert end.dropped.total() == end.mended.total() == end.unprobed == end.left_unacknowledged == 0
            assert end.take_ttl_counts() == TtlCounts()
            assert end.troubles == []

    @spec("dsn~utransport-registerlistener-start-invoking-listeners~1")
    async def test_listeners_work_again_after_the_network_was_away(self, pair: Pair) -> None:
        heard = await self.listen(pair, topic(), reply(), BatchSink(self.deadline_s))
        await self.send_all(pair[0], [notification(b"before")])
        await heard.expect(1)
        async with self.away(pair[1]):
            pass
        assert pair[1].connected
        await self.usable(pair[0], heard)
        await self.send_all(pair[0], [notification(b"after")])
        await heard.expect_payload(b"after")

    async def test_sending_while_the_network_is_away_is_unavailable_and_keeps_the_order(self, pair: Pair) -> None:
        async with self.away(pair[1]):
            assert pair[1].connected is False
            assert isinstance(pair[1].away_because, str)
            assert codes(await pair[1].send_batch(self.traffic(3))) == [UCode.UNAVAILABLE] * 3
        assert bool(pair[1].connected)
        assert pair[1].away_because == ""
        assert codes(await pair[1].send_batch(self.traffic(1))) == [UCode.OK]

    async def test_each_change_is_reported_once(self, ends: Ends, pair: Pair) -> None:
        """Some networks connect only to another end, so `pair` exists. The tested end joins later."""
        await pair[1].close()
        end = await ends(BETA)
        changes = Changes(end)
        assert not end.connected
        assert not changes.seen
        await end.open()
        await changes.until(True, self.deadline_s)
        await end.close()
        await changes.until(False, self.deadline_s)
        assert changes.seen == [True, False]
        assert changes.agrees_with_connected

    async def test_a_late_first_connection_is_reported(self, ends: Ends, pair: Pair) -> None:
        await pair[1].close()
        end = await ends(BETA)
        changes = Changes(end)
        await self.break_network(BETA)
        opening = asyncio.ensure_future(code_of(end.open()))
        await asyncio.wait({opening}, timeout=self.settle_s * 4)
        assert not end.connected
        assert not changes.seen
        await self.heal_network(BETA)
        opened = await asyncio.wait_for(opening, self.deadline_s)
        assert opened in (UCode.OK, UCode.UNAVAILABLE)
        if opened != UCode.OK:
            await end.open()  # its owner tries again
        await changes.until(True, self.deadline_s)
        async with self.away(end):
            pass
        await end.close()
        assert changes.seen == [True, False, True, False]
        assert changes.agrees_with_connected

    async def test_a_connection_callback_that_raises_harms_nobody(self, pair: Pair) -> None:
        def fail(connected: bool) -> None:
            raise RuntimeError(f"connected={connected}")

        pair[1].on_connection(fail)
        changes = Changes(pair[1])
        await pair[1].close()
        await changes.until(False, self.deadline_s)

    async def test_nothing_that_was_sent_is_lost_while_we_are_away(self, pair: Pair) -> None:
        self.needs(Capability.PUSH | Capability.PERSISTENT_SESSION)
        heard = await self.listen(pair, topic(), reply(), BatchSink(self.deadline_s))
        async with self.away(pair[1]):
            await self.send_all(pair[0], self.traffic(100))
        for number in range(100):
            await heard.expect_payload(b"%d" % number)
        assert firsts(numbers(heard)) == list(range(100))

    async def test_listeners_work_again_after_the_network_forgot_us(self, ends: Ends, pair: Pair) -> None:
        """All listeners: not only the first one, and not only those of one authority."""
        self.needs_hook("forget_network")
        alpha, beta, gamma = *pair, await ends(GAMMA)
        await gamma.open()
        of_alpha = await self.listen((alpha, beta), topic(), reply())
        of_gamma = await self.listen((gamma, beta), topic(GAMMA), reply())
        requests = await self.listen((alpha, beta), reply(ALPHA), method())
        async with self.away(beta):
            await self.forget_network(BETA)
        if self.discovery:
            await self.usable(alpha, of_alpha)
            await self.usable(gamma, of_gamma, topic(GAMMA), reply())
            await self.reach(alpha, requests, request(PROBE))
        await self.send_until_taken(alpha, [notification(b"of alpha"), request(b"a request")])
        await self.send_until_taken(gamma, [notification(b"of gamma", topic(GAMMA))])
        await of_alpha.expect_payload(b"of alpha")
        await of_gamma.expect_payload(b"of gamma")
        await requests.expect_payload(b"a request")

    async def test_what_comes_while_our_process_is_restarted_waits_for_its_listeners(self, ends: Ends) -> None:
        """The messages wait for each listener until it is registered, though `open` has returned before."""
        self.needs(Capability.PUSH | Capability.PERSISTENT_SESSION)
        alpha, first = await ends(ALPHA), ends.keep(await self.make_returning(BETA))
        for end in (alpha, first):
            await end.open()
        for source in (topic(), OTHER):
            await self.listen((alpha, first), source, reply())
        await first.close()
        await self.send_all(alpha, [*self.traffic(10), *self.traffic(10, OTHER)])
        second = ends.keep(await self.make_returning(BETA))
        await second.open()
        await self.send_all(alpha, [*self.traffic(1, first=10), *self.traffic(1, OTHER, first=10)])
        for source in (topic(), OTHER):
            heard = BatchSink(self.deadline_s)
            await second.register_listener(source, heard, reply())
            await heard.expect_payload(b"10")
            assert firsts(numbers(heard)) == list(range(11))

    async def test_what_no_listener_has_taken_by_the_close_comes_to_the_next_process(self, ends: Ends) -> None:
        """A close waits for listeners for a time, and does not acknowledge in their place afterwards."""
        self.needs(Capability.PUSH | Capability.ACK | Capability.PERSISTENT_SESSION)
        alpha, first = await ends(ALPHA), ends.keep(await self.make_returning(BETA))
        for end in (alpha, first):
            await end.open()
        slow = Gated(self.deadline_s)
        await first.register_listener(topic(), slow, reply())
        await self.send_all(alpha, self.traffic(5))
        await slow.until(lambda: bool(slow.messages), "a message")
        await first.close()
        second = ends.keep(await self.make_returning(BETA))
        await second.open()
        heard = BatchSink(self.deadline_s)
        await second.register_listener(topic(), heard, reply())
        await heard.until(lambda: len(firsts(numbers(heard))) == 5, "what no listener had taken")
        assert firsts(numbers(heard)) == list(range(5))
        slow.gate.set()

    # Sending, registering and unregistering shortly before, while and after the network is away.

    async def test_what_is_sent_after_the_sender_was_away_arrives_in_order(self, pair: Pair) -> None:
        alpha, beta = pair
        heard = await self.listen((beta, alpha), FROM_BETA, TO_ALPHA, BatchSink(self.deadline_s))
        messages = self.traffic(200, FROM_BETA, TO_ALPHA)
        async with self.away(beta):
            assert codes(await beta.send_batch(messages[:20])) == [UCode.UNAVAILABLE] * 20
        if self.discovery:
            await self.usable(beta, heard, FROM_BETA, TO_ALPHA)
        await self.send_all(beta, messages[:100])
        await self.send_all(beta, messages[100:])
        await self.settle(beta, heard, FROM_BETA, TO_ALPHA)
        assert firsts(numbers(heard)) == list(range(200))

    async def test_a_batch_that_is_cut_off_ends_there_and_goes_on_later(self, pair: Pair) -> None:
        """Its listener takes nothing at first: if that blocks the sender, the batch is on its way when the network is
        lost."""
        self.needs_hook("break_network")
        alpha, beta = pair
        heard = await self.gated((beta, alpha), FROM_BETA, TO_ALPHA)
        messages = await self.flood(FROM_BETA, TO_ALPHA)
        sending = asyncio.ensure_future(beta.send_batch(messages))
        try:
            await heard.expect(1)
            await asyncio.sleep(self.settle_s)
            async with self.away(beta):
                pass
        finally:
            heard.gate.set()
        async with asyncio.timeout(self.deadline_s):
            statuses = await sending
            sent = _taken(statuses)
            if self.discovery:
                await self.usable(beta, heard, FROM_BETA, TO_ALPHA)
            while sent < len(messages):
                await asyncio.sleep(TRY_AGAIN_S)
                sent += _taken(await beta.send_batch(messages[sent:]))
        await self.settle(beta, heard, FROM_BETA, TO_ALPHA)
        arrived = firsts(numbers(heard))
        assert arrived == sorted(arrived)
        if Capability.ACK in self.capabilities:
            assert arrived == list(range(len(messages))), (
                "a network that acknowledges must not lose a message that was answered OK"
            )

    @spec("dsn~utransport-registerlistener-start-invoking-listeners~1")
    async def test_a_listener_that_is_registered_while_the_network_is_away(self, pair: Pair) -> None:
        """Either it is refused and may be registered later, or it works when the network is back."""
        first = await self.listen(pair, topic(), reply())
        late = Sink(self.deadline_s)
        async with self.away(pair[1]):
            async with asyncio.timeout(self.deadline_s):
                code = await code_of(pair[1].register_listener(OTHER, late, reply()))
            assert code in (UCode.OK, UCode.UNAVAILABLE)
        if code != UCode.OK:
            await pair[1].register_listener(OTHER, late, reply())
        await self.usable(pair[0], first)
        if self.discovery:
            await self.usable(pair[0], late, OTHER)
        await self.send_all(pair[0], [notification(b"late", OTHER)])
        await late.expect_payload(b"late")

    @spec("dsn~utransport-unregisterlistener-stop-invoking-listeners~1")
    async def test_a_listener_that_is_unregistered_while_the_network_is_away(self, pair: Pair) -> None:
        """Either that is refused and the listener stays, or it gets nothing from then on."""
        stays = await self.listen(pair, topic(), reply())
        removed = await self.listen(pair, OTHER, reply())
        async with self.away(pair[1]):
            async with asyncio.timeout(self.deadline_s):
                code = await code_of(pair[1].unregister_listener(OTHER, removed, reply()))
            assert code in (UCode.OK, UCode.UNAVAILABLE)
        await self.usable(pair[0], stays)
        if code != UCode.OK:
            await pair[1].unregister_listener(OTHER, removed, reply())
        assert await code_of(pair[1].unregister_listener(OTHER, removed, reply())) == UCode.NOT_FOUND
        await self.send_all(pair[0], [notification(b"late", OTHER)])
        await self.settle(pair[0], stays)
        assert b"late" not in removed.payloads


def _taken(statuses: Sequence[UStatus]) -> int:
    """Number of messages that were sent. None may be sent after the first one that was not."""
    answered = codes(statuses)
    taken = next((number for number, code in enumerate(answered) if code != UCode.OK), len(answered))
    assert set(answered[taken:]) <= {UCode.UNAVAILABLE}, (
        "a message after one that could not be sent was sent: it overtakes the next attempt"
    )
    return taken


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

    async def test_a_probe_disturbs_nobody(self, ends: Ends, pair: Pair) -> None:
        """`up-streamer check --connect` while an end with the same settings is open."""
        heard, changes = await self.listen(pair, topic(), reply(), BatchSink(self.deadline_s)), Changes(pair[1])
        end = await ends(BETA)
        asked = ProbeRequest([(topic(), reply())], [(FROM_BETA, TO_ALPHA), (topic(), reply())], is_running=True)
        found = [one async for one in end.probe(asked)]
        assert found
        assert not [what for verdict, what in found if verdict is ProbeVerdict.FAIL]
        assert not end.connected
        await self.usable(pair[0], heard)
        assert {payload for payload in heard.payloads if payload != PROBE} == set()
        assert changes.seen == []
        assert [one.dropped.total() for one in pair] == [0, 0]

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

    async def test_closed_before_open_and_after_close(self, ends: Ends) -> None:
        never, closed = await ends(ALPHA), await ends(ALPHA)
        await closed.open()
        await closed.close()
        for end in (never, closed):
            answers = await self.answers_of(end, topic(), reply())
            assert answers["send_batch"] == answers["send"] == UCode.UNAVAILABLE
            assert answers["register_listener"] == self.pushing(UCode.UNAVAILABLE)
            assert UCode.OK not in answers.values()
            assert codes(await end.send_batch([notification(), notification()])) == [UCode.UNAVAILABLE] * 2

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
        # unlike `gather`, this does not wait for a task that goes on
        await asyncio.wait({opening}, timeout=self.deadline_s)
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
