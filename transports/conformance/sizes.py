"""message_bytes_max, both ways, and what large messages may cost a slow listener's end.

owner says SMALL_MAX  --  send [small, exactly, too large, small] -> [OK, OK, INVALID_ARGUMENT, OK]
                      --  arrive  small, exactly, too large, small -> small, exactly, small; counted as too_large
"""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Final

from transports.conformance.base import (
    ALPHA,
    BETA,
    BatchSink,
    Ends,
    Pair,
    TransportHarness,
    codes,
    notification,
    reply,
    spec,
    topic,
)
from uprotocol.transport import ENVELOPE_BYTES_MAX, Capability, UTransport
from uprotocol.v1.ucode_pb2 import UCode

SMALL_MAX: Final = 1 << 16  # of a payload: what an owner may ask for
TOO_LARGE: Final = SMALL_MAX + ENVELOPE_BYTES_MAX + 4_096  # beyond what a network may allow for its own headers
FLOOD_BYTES: Final = 96 << 20  # more than Arrivals hold
STALLED_S: Final = 0.5  # nothing was sent or handed over for so long: there is no room


class SizeConformance(TransportHarness):
    async def limited(self, ends: Ends, authority: str) -> Pair:
        """Open ends, of which that one has an owner who wants no large messages."""
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
        sizes = [1, SMALL_MAX, TOO_LARGE, 2, TOO_LARGE, 3]
        statuses = await pair[0].send_batch([notification(bytes(size)) for size in sizes])
        assert codes(statuses) == [UCode.INVALID_ARGUMENT if size == TOO_LARGE else UCode.OK for size in sizes]
        assert all(status.message for status in statuses if status.code), "whoever sends must be told what the limit is"
        await self.send_all(pair[0], [notification(b"end")])
        await heard.expect_payload(b"end")
        assert [len(payload) for payload in heard.payloads] == [1, SMALL_MAX, 2, 3, len(b"end")]

    async def test_what_is_larger_than_its_owner_allows_is_not_taken(self, ends: Ends) -> None:
        self.needs(Capability.PUSH)
        pair = await self.limited(ends, BETA)
        heard = await self.listen(pair, topic(), reply(), BatchSink(self.deadline_s))
        await self.send_all(pair[0], [notification(bytes(size)) for size in (1, SMALL_MAX, TOO_LARGE, 2, TOO_LARGE, 3)])
        await self.send_all(pair[0], [notification(b"end")])
        await heard.expect_payload(b"end")
        assert [len(payload) for payload in heard.payloads] == [1, SMALL_MAX, 2, 3, len(b"end")]
        assert pair[1].connected, "what is too large costs nobody the connection"
        dropped = Counter[str](getattr(pair[1], "dropped", {}))
        assert dropped["too_large"] == (0 if self.network_drops_too_large else 2), f"counted was {dropped}"

    async def test_a_slow_listener_of_large_messages_is_not_handed_all_of_them(self, pair: Pair) -> None:
        """A limit that counts messages alone is none: a few thousand large ones are more than a small computer has."""
        heard = await self.gated(pair)
        size = self.payload_bytes_max
        count = FLOOD_BYTES // size + 1
        sending = asyncio.ensure_future(self._send_large(pair[0], size, count))
        try:
            progress = -1
            while progress != len(heard.messages) or not heard.messages:
                progress = len(heard.messages)
                await asyncio.wait({sending}, timeout=STALLED_S)
                if sending.done():
                    await asyncio.sleep(STALLED_S)
            handed_over = len(heard.messages)
        finally:
            heard.gate.set()
        await sending
        assert handed_over < count, (
            f"a listener that takes nothing was handed {handed_over * size >> 20} MiB: bound what waits in bytes"
        )
        await heard.until(lambda: len({one.attributes.id.lsb for one in heard.messages}) == count, "all of the flood")

    async def _send_large(self, sender: UTransport, size: int, count: int) -> None:
        """A few at a time: what is sent must not be what takes the memory."""
        payload = bytes(size)
        for start in range(0, count, 8):
            await self.send_all(sender, [notification(payload) for _ in range(min(8, count - start))])
