"""The connection: before open, after close, lost, and back; and sending and listening meanwhile.

open -> connected -- break_network -> callback(False), UNAVAILABLE -- heal_network -> callback(True), all as before

sender:    cut off in a batch -> OK ... OK, UNAVAILABLE ... -> the rest again: complete and in order
listener:  register, unregister while away -> in effect when it is back
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from transports.conformance.base import Ends, Pair, TransportHarness, spec
from transports.conformance.delivery import firsts, numbers
from transports.conformance.messages import (
    ALPHA,
    BETA,
    GAMMA,
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
from uprotocol.transport import Capability
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.ustatus_pb2 import UStatus

OTHER = topic(resource=0x9A02)
FROM_BETA, TO_ALPHA = topic(BETA), reply(ALPHA)  # beta is the end that is cut off, here as the sender
TRY_AGAIN_S = 0.01


class ConnectionConformance(TransportHarness):
    async def test_closed_before_open_and_after_close(self, ends: Ends) -> None:
        end = await ends(ALPHA)
        assert codes(await end.send_batch([notification(), notification()])) == [UCode.UNAVAILABLE] * 2
        await end.open()
        await end.close()
        assert codes(await end.send_batch([notification(), notification()])) == [UCode.UNAVAILABLE] * 2
        assert await code_of(end.send(notification())) == UCode.UNAVAILABLE
        if Capability.PUSH in self.capabilities:
            assert await code_of(end.register_listener(topic(), Sink(self.deadline_s), reply())) == UCode.UNAVAILABLE

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
            assert sum(end.dropped.values()) == 0  # type: ignore[attr-defined]
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
