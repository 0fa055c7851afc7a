"""What is large, too large, too much, or still on its way when its sender closes.

small, large, small -> in order        too large -> refused, or it arrives        flood -> slow listener -> slow sender
"""

from __future__ import annotations

import asyncio

from transports.conformance.base import BatchSink, Pair, TransportHarness, codes, notification, raw, reply, spec, topic
from transports.conformance.delivery import firsts
from uprotocol.message import UMessageBuilder
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.umessage_pb2 import UMessage

STALLED_S = 0.5  # a sender that has got rid of nothing for so long waits for the listener: one that does not, floods on
LAST_WORDS = 500
PADDING = b" " * 1_024  # of each message, so that a few thousand are more than the buffers of a socket


class PressureConformance(TransportHarness):
    async def test_a_large_payload_is_not_overtaken(self, pair: Pair) -> None:
        """However it travels: in pieces, compressed, on a link of its own."""
        heard = await self.listen(pair, topic(), reply(), BatchSink(self.deadline_s))
        sizes = [1, self.payload_bytes_max, 2, self.payload_bytes_max // 2, self.payload_bytes_max // 16, 3, 4]
        await self.send_all(pair[0], [notification(bytes(size)) for size in sizes])
        await self.send_all(pair[0], [notification(b"end")])
        await heard.expect(len(sizes) + 1)
        assert [len(payload) for payload in heard.payloads] == [*sizes, len(b"end")]

    async def test_what_is_too_large_is_refused_or_arrives(self, pair: Pair) -> None:
        heard = await self.listen(pair, topic(), reply(), BatchSink(self.deadline_s))
        large = UMessageBuilder.notification(topic(), reply()).build_from_upayload(
            raw(bytes(self.payload_bytes_max * 4))
        )
        statuses = await pair[0].send_batch([large, notification(b"small")])
        if statuses[1].code == UCode.UNAVAILABLE:
            return  # it cost the connection, and nobody was told that it was sent
        await heard.expect_payload(b"small")
        arrived = [len(payload) for payload in heard.payloads if payload != b"small"]
        assert arrived == ([len(large.payload)] if statuses[0].code == UCode.OK else []), (
            f"it was answered {statuses[0]}"
        )

    @spec("dsn~utransport-registerlistener-start-invoking-listeners~1")
    async def test_a_slow_listener_is_felt_by_the_sender(self, pair: Pair) -> None:
        """Neither end takes more than its queues hold while a listener takes nothing."""
        heard = await self.gated(pair)
        sent: list[UMessage] = []
        flood = _padded(self.flood_messages)
        sending = asyncio.ensure_future(self.send_in_parts(pair[0], flood, sent))
        try:
            await heard.expect(1)
            progress = -1
            while not sending.done() and progress != len(sent) + len(heard.messages):
                progress = len(sent) + len(heard.messages)
                await asyncio.wait({sending}, timeout=STALLED_S)
            handed_over = len(heard.messages)
            sent_all = sending.done()
        finally:
            heard.gate.set()
        await sending
        assert handed_over < self.flood_messages, (
            "a listener that takes nothing was handed everything: bound what waits for it"
        )
        assert not (sent_all and self.slows_senders), (
            f"all {self.flood_messages} were sent while nobody took any: bound your queues"
        )
        await heard.until(lambda: heard.payloads[-1] == flood[-1].payload, "the last of the flood")
        assert firsts([int(payload) for payload in heard.payloads]) == list(range(self.flood_messages))

    async def test_what_was_answered_ok_arrives_though_its_sender_closes(self, pair: Pair) -> None:
        heard = await self.listen(pair, topic(), reply(), BatchSink(self.deadline_s))
        assert codes(await pair[0].send_batch(_padded(LAST_WORDS))) == [UCode.OK] * LAST_WORDS
        await pair[0].close()
        await heard.expect(LAST_WORDS)
        assert [int(payload) for payload in heard.payloads] == list(range(LAST_WORDS))


def _padded(count: int) -> list[UMessage]:
    return [notification(b"%d" % number + PADDING) for number in range(count)]
