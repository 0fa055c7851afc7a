"""Listeners that wait, and one that follows a connection.

Sink, BatchSink, Gated: collect, and wake the test when enough has come      Changes: what on_connection tells
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Sequence

from transports.conformance.messages import PROBE, payloads
from uprotocol.transport import UTransport
from uprotocol.v1.umessage_pb2 import UMessage


class Sink:
    """A listener that collects, and knows how to wait. It must be called on the thread that made it. Probes are counted
    apart."""

    def __init__(self, deadline_s: float) -> None:
        self.messages: list[UMessage] = []
        self.probes = 0
        self.strange_threads: set[str] = set()  # those that have called it, and are not the loop's
        self._deadline_s = deadline_s
        self._changed = asyncio.Event()
        self._thread = threading.get_ident()
        self._waiting_on: asyncio.AbstractEventLoop | None = None

    def on_receive(self, message: UMessage) -> Awaitable[None] | None:
        if message.payload == PROBE:
            self.probes += 1
        else:
            self.messages.append(message)
        is_ours = threading.get_ident() == self._thread
        if not is_ours:
            self.strange_threads.add(threading.current_thread().name)
        if is_ours or self._waiting_on is None:
            self._changed.set()
        else:
            self._waiting_on.call_soon_threadsafe(self._changed.set)
        return None

    @property
    def payloads(self) -> list[bytes]:
        return payloads(self.messages)

    async def expect(self, count: int) -> list[UMessage]:
        """The first `count` messages; fails if they don't come in time."""
        await self.until(lambda: len(self.messages) >= count, f"{count} messages")
        return self.messages[:count]

    async def expect_payload(self, payload: bytes) -> None:
        looked_at = 0

        def has_come() -> bool:
            """Looks at what is new since it was last asked: a wait costs what comes meanwhile, not its square."""
            nonlocal looked_at
            new = self.messages[looked_at:]
            looked_at += len(new)
            return any(message.payload == payload for message in new)

        await self.until(has_come, f"the payload {payload!r}")

    async def until(self, holds: Callable[[], bool], what: str, within_s: float | None = None) -> None:
        """Returns when `holds`, which is asked after each message; fails if that does not come in time."""
        deadline_s = within_s or self._deadline_s
        self._waiting_on = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(deadline_s):
                while not holds():
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            raise AssertionError(f"expected {what} within {deadline_s} s, got {len(self.messages)} messages") from None
        assert not self.strange_threads, f"listeners run on the event loop's thread only, not on {self.strange_threads}"


class BatchSink(Sink):
    """The same, for transports that hand over batches."""

    def __init__(self, deadline_s: float) -> None:
        super().__init__(deadline_s)
        self.batches: list[int] = []

    def on_receive_batch(self, messages: Sequence[UMessage]) -> Awaitable[None] | None:
        self.batches.append(len(messages))
        for message in messages:
            self.on_receive(message)
        return None


class Gated(BatchSink):
    """Takes nothing until its gate opens."""

    def __init__(self, deadline_s: float) -> None:
        super().__init__(deadline_s)
        self.gate = asyncio.Event()

    def on_receive_batch(self, messages: Sequence[UMessage]) -> Awaitable[None]:
        super().on_receive_batch(messages)
        return self._take()

    async def _take(self) -> None:
        await self.gate.wait()


class Changes:
    """Follows on_connection."""

    def __init__(self, end: UTransport) -> None:
        self.seen: list[bool] = []
        self.true_to_the_facts = True  # whatever was told, `connected` said it, too
        self._end = end
        self._changed = asyncio.Event()
        end.on_connection(self._on_change)

    def _on_change(self, connected: bool) -> None:
        self.seen.append(connected)
        self.true_to_the_facts &= bool(self._end.connected) is connected
        self._changed.set()

    async def until(self, connected: bool, deadline_s: float) -> None:
        """Returns when that was told last; fails if it is not in time."""
        try:
            async with asyncio.timeout(deadline_s):
                while self.seen[-1:] != [connected]:
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            raise AssertionError(
                f"expected on_connection({connected}) within {deadline_s} s, told was {self.seen}"
            ) from None
