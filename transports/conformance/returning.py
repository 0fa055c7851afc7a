"""What becomes of sending and listening when the network was away.

sender:    cut off in a batch -> OK ... OK, UNAVAILABLE ... -> the rest again: complete and in order
listener:  register, unregister while away -> as asked for when it is back
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from transports.conformance.base import (
    ALPHA,
    BETA,
    BatchSink,
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
from transports.conformance.delivery import firsts, numbers
from uprotocol.transport import Capability
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.ustatus_pb2 import UStatus

OTHER = topic(resource=0x9A02)
FROM_BETA, TO_ALPHA = topic(BETA), reply(ALPHA)  # beta is the end that is cut off, here as the sender
TRY_AGAIN_S = 0.01


class ReturningConformance(TransportHarness):
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
        """Its listener takes nothing at first, so that where senders feel that, the batch is on its way when the
        network goes."""
        self.needs_hook("break_network")
        alpha, beta = pair
        heard = await self.gated((beta, alpha), FROM_BETA, TO_ALPHA)
        messages = self.traffic(self.flood_messages, FROM_BETA, TO_ALPHA)
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
                "a network that acknowledges loses nothing that was answered OK"
            )

    @spec("dsn~utransport-registerlistener-start-invoking-listeners~1")
    async def test_a_listener_that_is_registered_while_the_network_is_away(self, pair: Pair) -> None:
        """Either it is refused, and may be registered later, or it works when the network is back."""
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
        """Either that is refused, and the listener stays, or it hears nothing from then on."""
        stays = await self.listen(pair, topic(), reply())
        gone = await self.listen(pair, OTHER, reply())
        async with self.away(pair[1]):
            async with asyncio.timeout(self.deadline_s):
                code = await code_of(pair[1].unregister_listener(OTHER, gone, reply()))
            assert code in (UCode.OK, UCode.UNAVAILABLE)
        await self.usable(pair[0], stays)
        if code != UCode.OK:
            await pair[1].unregister_listener(OTHER, gone, reply())
        assert await code_of(pair[1].unregister_listener(OTHER, gone, reply())) == UCode.NOT_FOUND
        await self.send_all(pair[0], [notification(b"late", OTHER)])
        await self.settle(pair[0], stays)
        assert b"late" not in gone.payloads


def _taken(statuses: Sequence[UStatus]) -> int:
    """How many were, from the first on; behind the first that was not there may be none."""
    answered = codes(statuses)
    taken = next((number for number, code in enumerate(answered) if code != UCode.OK), len(answered))
    assert set(answered[taken:]) <= {UCode.UNAVAILABLE}, (
        "what follows a message that could not be sent was sent: it overtakes the next try"
    )
    return taken
