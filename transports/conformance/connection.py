"""The connection: before open, after close, lost, and back.

open -> connected -- break_network -> callback(False), UNAVAILABLE -- heal_network -> callback(True), all as before
"""

from __future__ import annotations

import asyncio

from transports.conformance.base import (
    ALPHA,
    BETA,
    BatchSink,
    Changes,
    Ends,
    Pair,
    Sink,
    TransportHarness,
    code_of,
    codes,
    notification,
    reply,
    spec,
    topic,
)
from uprotocol.status import UStatusError
from uprotocol.transport import Capability, UTransport
from uprotocol.v1.ucode_pb2 import UCode


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
            assert codes(await pair[1].send_batch(self.traffic(3))) == [UCode.UNAVAILABLE] * 3
        assert bool(pair[1].connected)
        assert codes(await pair[1].send_batch(self.traffic(1))) == [UCode.OK]

    async def test_each_change_is_told_once_from_the_first_connection_to_the_end(self, ends: Ends, pair: Pair) -> None:
        """`pair` is there only so that somebody can be met; the end that is followed joins later."""
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
        assert changes.true_to_the_facts

    async def test_the_first_connection_is_told_when_the_network_was_away_at_open(self, ends: Ends, pair: Pair) -> None:
        await pair[1].close()
        end = await ends(BETA)
        changes = Changes(end)
        await self.break_network(BETA)
        opening = asyncio.ensure_future(self._open_in_vain(end))
        await asyncio.wait({opening}, timeout=self.settle_s * 4)
        assert not end.connected
        assert not changes.seen
        await self.heal_network(BETA)
        if not await asyncio.wait_for(opening, self.deadline_s):
            await end.open()  # as whoever opened it does after UNAVAILABLE
        await changes.until(True, self.deadline_s)
        async with self.away(end):
            pass
        await end.close()
        assert changes.seen == [True, False, True, False]
        assert changes.true_to_the_facts

    @staticmethod
    async def _open_in_vain(end: UTransport) -> bool:
        """True if `open` returned, with a connection or without."""
        try:
            await end.open()
        except UStatusError as error:
            assert error.code == UCode.UNAVAILABLE, error  # noqa: PT017 - either outcome is fine
            return False
        return True

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
        assert list(dict.fromkeys(heard.payloads)) == [b"%d" % number for number in range(100)]
