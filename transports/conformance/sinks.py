"""Listeners that collect messages and wait for them, and a recorder of connection changes.

Sink, BatchSink, Gated: wake the test when enough messages have arrived      Changes: the calls of on_connection
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Sequence

from transports.conformance.messages import PROBE
from uprotocol.transport import UTransport
from uprotocol.v1.umessage_pb2 import UMessage


class Sink:
    """Collects messages and waits for them. Must be called on the thread that made it. Probes are only counted."""

    def __init__(self, deadline_s: float) -> None:
        self.messages: list[UMessage] = []
        self.probes = 0
        self.strange_threads: set[str] = set()  # other threads that have called it
        self._deadline_s = deadline_s
        self._changed = asyncio.Event()
        self._thread = threading.get_ident()
        self._waiting_on: asyncio.AbstractEventLoop | None = None

    def on_receive(self, message: UMessage) -> Awaitable[None] | None:
        """Keeps a message."""
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
        return [message.payload for message in self.messages]

    async def expect(self, count: int) -> list[UMessage]:
        """Returns the first `count` messages. Fails if they do not arrive in time."""
        await self.until(lambda: len(self.messages) >= count, f"{count} messages")
        return self.messages[:count]

    async def expect_payload(self, payload: bytes) -> None:
        """Waits until a message with this payload has come."""
        checked = 0

        def has_come() -> bool:
            """Checks only messages that are new since the last call: the cost of a wait is linear."""
            nonlocal checked
            new = self.messages[checked:]
            checked += len(new)
            return any(message.payload == payload for message in new)

        await self.until(has_come, f"the payload {payload!r}")

    async def until(self, holds: Callable[[], bool], what: str, within_s: float | None = None) -> None:
        """Returns when `holds()`, which is called after each message. Fails if it does not hold in time."""
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
    """A Sink for transports that deliver batches."""

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
    """Records the calls of on_connection."""

    def __init__(self, end: UTransport) -> None:
        self.seen: list[bool] = []
        self.agrees_with_connected = True  # each call had the value of `connected`
        self._end = end
        self._changed = asyncio.Event()
        end.on_connection(self._on_change)

    def _on_change(self, connected: bool) -> None:
        self.seen.append(connected)
        self.agrees_with_connected &= bool(self._end.connected) is connected
        self._changed.set()

    async def until(self, connected: bool, deadline_s: float) -> None:
        """Returns when the last call had this value. Fails if that is not in time."""
        try:
            async with asyncio.timeout(deadline_s):
                while self.seen[-1:] != [connected]:
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            raise AssertionError(
                f"expected on_connection({connected}) within {deadline_s} s, got {self.seen}"
            ) from None
