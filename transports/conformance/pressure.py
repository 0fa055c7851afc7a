"""Large messages, too large ones, too many, and those on their way when their sender closes.

small, large, small -> in order        too large -> refused, or it arrives        flood -> slow listener -> slow sender

owner allows SMALL_MAX --  send [small, exactly, too large, small] -> [OK, OK, INVALID_ARGUMENT, OK]
                      --  arrive  small, exactly, too large, small -> small, exactly, small; counted as too_large
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from typing import Final

from transports.conformance.base import Ends, Pair, TransportHarness, spec
from transports.conformance.delivery import firsts
from transports.conformance.messages import ALPHA, BETA, codes, notification, reply, topic
from transports.conformance.sinks import BatchSink, Sink
from uprotocol.transport import ENVELOPE_BYTES_MAX, Capability, UTransport
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.umessage_pb2 import UMessage

STALLED_S = 0.5  # without progress for so long, all queues are full
LAST_WORDS = 500
SMALL_MAX: Final = 1 << 16  # of a payload: a limit of an owner
TOO_LARGE: Final = SMALL_MAX + ENVELOPE_BYTES_MAX + 4_096  # more than a network may allow for its own headers
SIZES: Final = (1, SMALL_MAX, TOO_LARGE, 2, TOO_LARGE, 3)
FLOOD_BYTES: Final = 96 << 20  # more than Arrivals can hold
PADDING = b" " * 1_024  # of each message, so that a few thousand are more than the buffers of a socket


class PressureConformance(TransportHarness):
    async def test_a_large_payload_is_not_overtaken(self, pair: Pair) -> None:
        """Not even if it is sent in pieces, compressed, or on its own link."""
        heard = await self.listen(pair, topic(), reply(), BatchSink(self.deadline_s))
        sizes = [1, self.payload_bytes_max, 2, self.payload_bytes_max // 2, self.payload_bytes_max // 16, 3, 4]
        await self.send_all(pair[0], [notification(bytes(size)) for size in sizes])
        await self.send_all(pair[0], [notification(b"end")])
        await heard.expect(len(sizes) + 1)
        assert [len(payload) for payload in heard.payloads] == [*sizes, len(b"end")]

    async def test_what_is_too_large_is_refused_or_arrives(self, pair: Pair) -> None:
        heard = await self.listen(pair, topic(), reply(), BatchSink(self.deadline_s))
        large = notification(bytes(self.payload_bytes_max * 4))
        statuses = await pair[0].send_batch([large, notification(b"small")])
        assert statuses[0].code in (UCode.OK, UCode.INVALID_ARGUMENT, UCode.RESOURCE_EXHAUSTED, UCode.UNAVAILABLE)
        if statuses[0].code != UCode.UNAVAILABLE:
            assert statuses[1].code == UCode.OK
        if statuses[1].code == UCode.UNAVAILABLE:
            return  # the connection was lost, and the message was not answered OK
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
        flood = await self.flood(padding=PADDING)
        sending = asyncio.ensure_future(self.send_in_parts(pair[0], flood, sent))
        try:
            handed_over = await _stalled(sending, heard, sent)
            sent_all = sending.done()
        finally:
            heard.gate.set()
        await sending
        assert handed_over < self.flood_messages, (
            "a listener that takes nothing got all messages: limit those that wait for it"
        )
        assert not (sent_all and self.slows_senders), (
            f"all {self.flood_messages} were sent while the listener took none: limit your queues"
        )
        await heard.until(lambda: heard.messages[-1].payload == flood[-1].payload, "the last of the flood")
        assert firsts([int(payload) for payload in heard.payloads]) == list(range(self.flood_messages))

    async def test_what_was_answered_ok_arrives_though_its_sender_closes(self, pair: Pair) -> None:
        heard = await self.listen(pair, topic(), reply(), BatchSink(self.deadline_s))
        assert codes(await pair[0].send_batch(self.traffic(LAST_WORDS, padding=PADDING))) == [UCode.OK] * LAST_WORDS
        await pair[0].close()
        await heard.expect(LAST_WORDS)
        assert [int(payload) for payload in heard.payloads] == list(range(LAST_WORDS))

    # The size limit of an owner.

    async def limited(self, ends: Ends, authority: str) -> Pair:
        """Open ends; the owner of the end of `authority` allows only small messages."""
        pair = await ends(ALPHA), await ends(BETA)
        pair[authority == BETA].message_bytes_max = SMALL_MAX
        for end in pair:
            await end.open()
        return pair

    @spec("dsn~utransport-send-error-invalid-parameter~1")
    async def test_what_is_larger_than_its_owner_allows_is_not_sent(self, ends: Ends) -> None:
        self.needs(Capability.PUSH)
        pair = await self.limited(ends, ALPHA)
        heard = await self.listen(pair, topic(), reply(), BatchSink(self.deadline_s))
        statuses = await pair[0].send_batch([notification(bytes(size)) for size in SIZES])
        assert codes(statuses) == [UCode.INVALID_ARGUMENT if size == TOO_LARGE else UCode.OK for size in SIZES]
        assert all(status.message for status in statuses if status.code), (
            "the sender must get the limit in the message of the status"
        )
        await self._only_small_ones_arrived(pair, heard)

    async def test_what_is_larger_than_its_owner_allows_is_not_taken(self, ends: Ends) -> None:
        self.needs(Capability.PUSH)
        pair = await self.limited(ends, BETA)
        heard = await self.listen(pair, topic(), reply(), BatchSink(self.deadline_s))
        await self.send_all(pair[0], [notification(bytes(size)) for size in SIZES])
        await self._only_small_ones_arrived(pair, heard)
        assert pair[1].connected, "a message that is too large must not end the connection"
        dropped = Counter[str](getattr(pair[1], "dropped", {}))
        assert dropped["too_large"] == (0 if self.network_drops_too_large else 2), f"got {dropped}"

    async def _only_small_ones_arrived(self, pair: Pair, heard: Sink) -> None:
        await self.send_all(pair[0], [notification(b"end")])
        await heard.expect_payload(b"end")
        assert [len(payload) for payload in heard.payloads] == [1, SMALL_MAX, 2, 3, len(b"end")]

    async def test_a_slow_listener_of_large_messages_is_not_handed_all_of_them(self, pair: Pair) -> None:
        """A limit in messages alone is not enough: a few thousand large ones fill the memory of a small computer."""
        heard = await self.gated(pair)
        size = self.payload_bytes_max
        count = FLOOD_BYTES // size + 1
        sending = asyncio.ensure_future(self._send_large(pair[0], size, count))
        try:
            handed_over = await _stalled(sending, heard)
        finally:
            heard.gate.set()
        await sending
        assert handed_over < count, (
            f"a listener that takes nothing got {handed_over * size >> 20} MiB: limit waiting messages in bytes, too"
        )
        await heard.until(lambda: len({one.attributes.id.lsb for one in heard.messages}) == count, "all of the flood")

    async def _send_large(self, sender: UTransport, size: int, count: int) -> None:
        """A few at a time, so that the sent messages do not take the memory."""
        payload = bytes(size)
        for start in range(0, count, 8):
            await self.send_all(sender, [notification(payload) for _ in range(min(8, count - start))])


async def _stalled(sending: asyncio.Future[None], heard: BatchSink, sent: Sequence[UMessage] = ()) -> int:
    """The number of messages of `heard`, when neither it nor `sent` has grown for STALLED_S."""
    progress = -1
    while progress != len(sent) + len(heard.messages) or not heard.messages:
        progress = len(sent) + len(heard.messages)
        await asyncio.wait({sending}, timeout=STALLED_S)
        if sending.done():
            await asyncio.sleep(STALLED_S)
    return len(heard.messages)
