"""What arrived -> listeners, in order, acknowledged last.

arrive -> queue -> one batch per turn of the loop -> listeners -> taken: acknowledge, in the order of arrival
            ^----------------- all of it again, in order, with back-off -----' not taken

BYTES_MAX or MESSAGES_MAX here
                     -> pressed: the socket is not read, and the broker is held back               -> half of it taken: read again
   for PRESSED_S_MAX -> shedding: it is read, since what a listener waits for may be behind;       -> half of it taken: a new
                        messages are neither kept nor acknowledged                                    connection, they come again
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, NamedTuple

import structlog

from transports.listeners import Filter

BATCH_MESSAGES_MAX: Final = 512  # handed over at once; beyond it the cost per message no longer falls
# of QoS 0, which Receive Maximum does not hold back: beyond it they are dropped
UNACKNOWLEDGED_MESSAGES_MAX: Final = 8_192
BYTES_MAX: Final = 32 << 20  # waiting or being taken: 2,048 messages of 16 KiB. Receive Maximum can't count bytes
# the same; some 1.5 KB each if small. A broker may not keep to Receive Maximum: mosquitto with
MESSAGES_MAX: Final = 8_192
# `max_inflight_messages 0` does not
PRESSED_S_MAX: Final = 5.0  # how long the socket stands; far less than a keep-alive, or than a PUBACK may take
REDELIVERY_MS_MIN: Final = 5  # before the first try again; it doubles up to ...
REDELIVERY_MS_MAX: Final = 1_000  # ... so that a listener that always fails costs no core

log = structlog.get_logger()


Message = tuple[Filter | None, bytes, bytes]
"""As ListenerTable.deliver_encoded takes it: the filter is None, for all; payload; serialised UAttributes."""


class Arrived(NamedTuple):
    message: Message | None  # None: nothing to deliver, only to acknowledge in its turn
    # which of our connections brought it: on another one the broker would take our answer for another message's
    connection: int
    packet_id: int  # 0: QoS 0
    size: int = 0  # bytes of its message; 0 if it is one of many that are small


class Intake:
    """Lives on the event loop. What waits is bounded in messages and bytes: `pressed(True)` is called when there are
    MESSAGES_MAX or BYTES_MAX, `pressed(False)` when there are half as many again of both."""

    def __init__(
        self,
        deliver: Callable[[list[Message]], Awaitable[None] | None],
        acknowledge: Callable[[Sequence[Arrived]], None],
        pressed: Callable[[bool], None] = lambda _: None,
    ) -> None:
        self._deliver, self._taken, self._pressed = deliver, acknowledge, pressed
        self._bytes, self._messages, self.is_pressed = 0, 0, False
        self._queue: deque[Arrived] = deque()
        self._taking: deque[tuple[list[Arrived], asyncio.Future[None]]] = deque()
        self._awake, self._closed = False, True
        self._redelivery_ms = REDELIVERY_MS_MIN
        self._idle = asyncio.Event()
        self._idle.set()

    def __repr__(self) -> str:
        return f"Intake(waiting={len(self._queue)}, batches_being_taken={len(self._taking)}, bytes={self._bytes})"

    def open(self) -> None:
        self._closed = False

    @property
    def full(self) -> bool:
        return len(self._queue) >= UNACKNOWLEDGED_MESSAGES_MAX

    @property
    def waiting(self) -> int:
        """Messages that have not been taken."""
        return len(self._queue) + sum(len(batch) for batch, _ in self._taking)

    def arrive(self, arrived: Sequence[Arrived], octets: int = 0) -> None:
        """`octets` is the sum of their sizes, as far as that is not in `count` already."""
        if self._closed or not arrived:
            return
        self._queue.extend(arrived)
        self.count(octets, len(arrived))
        self._idle.clear()
        self._wake()

    def count(self, octets: int, messages: int = 0) -> None:
        """So many bytes and messages more are held here, or fewer."""
        self._bytes += octets
        self._messages += messages
        if self.is_pressed:
            is_pressed = self._bytes > BYTES_MAX // 2 or self._messages > MESSAGES_MAX // 2
        else:
            is_pressed = self._bytes >= BYTES_MAX or self._messages >= MESSAGES_MAX
        if is_pressed != self.is_pressed:
            self.is_pressed = is_pressed
            self._pressed(is_pressed)

    def _acknowledge(self, batch: Sequence[Arrived]) -> None:
        self._taken(batch)
        self.count(-sum([one.size for one in batch]) if self._bytes else 0, -len(batch))

    def _wake(self, after_ms: int = 0) -> None:
        if not self._awake:
            self._awake = True
            loop = asyncio.get_running_loop()
            loop.call_later(after_ms / 1000, self._hand_over) if after_ms else loop.call_soon(self._hand_over)

    def _hand_over(self) -> None:
        """The next batch does not wait for this one, so that a listener may await an answer that is behind."""
        self._awake = False
        if not self._queue:
            return
        batch = [self._queue.popleft() for _ in range(min(len(self._queue), BATCH_MESSAGES_MAX))]
        try:
            result = self._deliver([one.message for one in batch if one.message is not None])
        except Exception:
            log.exception("delivering a batch failed; its messages count as taken", messages=len(batch))
            result = None
        if result is None and not self._taking:
            self._acknowledge(batch)
        else:
            future = asyncio.ensure_future(_completed() if result is None else _awaited(result))
            self._taking.append((batch, future))
            future.add_done_callback(self._settle)
        if self._queue:
            self._wake()
        elif not self._taking:
            self._idle.set()

    def _settle(self, done: asyncio.Future[None]) -> None:
        if not done.cancelled():
            done.exception()  # one behind a failure is delivered again, whatever became of it
        while self._taking and self._taking[0][1].done():
            batch, future = self._taking[0]
            error = asyncio.CancelledError() if future.cancelled() else future.exception()
            if error is not None:
                log.warning("a listener did not take a batch: it gets it again", messages=len(batch), error=repr(error))
                self._go_back()
                return
            self._taking.popleft()
            self._redelivery_ms = REDELIVERY_MS_MIN
            self._acknowledge(batch)
        if not self._queue and not self._taking:
            self._idle.set()

    def _go_back(self) -> None:
        """Queue again everything that was not taken; what was handed over behind a failure comes twice, and in
        order."""
        for batch, _ in reversed(self._taking):
            self._queue.extendleft(reversed(batch))
        self._taking.clear()
        if self._closed:
            self._clear()
            self._idle.set()
        self._wake(self._redelivery_ms)
        self._redelivery_ms = min(self._redelivery_ms * 2, REDELIVERY_MS_MAX)

    async def close(self, drain_ms: int) -> None:
        """Take no more, and wait until what is here has been taken, or `drain_ms`. What is not stays with the
        broker."""
        self._closed = True
        try:
            if not self._idle.is_set():
                async with asyncio.timeout(drain_ms / 1000):
                    await self._idle.wait()
        except TimeoutError:
            log.warning("closing, though listeners have not taken everything", intake=repr(self))
        self._clear()

    def _clear(self) -> None:
        octets = sum([one.size for one in self._queue])
        messages = len(self._queue)
        self._queue.clear()
        self.count(-octets, -messages)


async def _completed() -> None:
    return None


async def _awaited(result: Awaitable[None]) -> None:
    await result
