"""Network -> listeners: bounded, one wake-up per batch, acknowledged last. For libraries with threads, and for those on the event loop.

library's thread: put(item, size)               -> items -> loop: deliver(batch) -> awaitable done -> taken(batch)
task on the loop: await put_on_loop(item, size)             up to BATCH_MAX         in the order of arrival
                  both wait while full, by messages or bytes, and whoever waits reads nothing
                  both answer False for an item of more than `item_bytes_max`: it is counted as dropped, and not taken

A network that reads a link with one thread stops reading everything once a publish waits for room. Where requests must
pass meanwhile, give them an inbox of their own, and let the one for publishes grow while its consumer holds what it has
(`held_messages_max`).
"""

from __future__ import annotations

import asyncio
import math
import sys
import threading
from collections import Counter, deque
from collections.abc import Awaitable, Callable
from typing import Final, Generic, TypeVar

import structlog

T = TypeVar("T")

# waiting or being taken; some 50 ms of the fastest network measured: more only hides a stall
MESSAGES_MAX: Final = 8_192
BYTES_MAX: Final = 64 << 20  # of large items that wait or are being taken: what a small gateway can spare
# up to this size the number of messages bounds the bytes, and counting would cost each message
SMALL_BYTES: Final = 1_024
HELD_S: Final = 0.1  # what is being taken for longer is held on purpose (a full disk), and is no matter of speed
BATCH_MAX: Final = 512  # messages handed over at once; beyond it the cost per message no longer falls

GATHER_MIN: Final = 64  # with fewer waiting, and the last batch less than ...
GATHER_S: Final = 0.0005  # ... so long ago, more are coming: wait for them. But only ...
BUSY_PER_S: Final = 10_000  # ... while so many come per second, as seen ...
SPAN_S: Final = 0.01  # ... that often: for fewer, latency is worth more than what a batch saves

log = structlog.get_logger()


class Inbox(Generic[T]):
    """One per network connection. `put` may be called from any thread but the loop's; all else happens on the loop.

    `deliver(items)` may return an awaitable; the next batch does not wait for it, but `taken(items, error)` is called
    in the order of arrival, with None when the awaitable completed and with the exception when it failed (the network
    must not be told then).

    What has more than `item_bytes_max` (a transport's `wire_bytes_max`) is not taken: it is counted in
    `dropped["too_large"]`, and if your network waits for an acknowledgement, give it one.

    Bounds: `messages_max`, waiting or being taken; `held_messages_max` instead, once the oldest batch has been held for
    HELD_S (default: the same); and `bytes_max` of items over SMALL_BYTES, beyond which the one item that passes the
    bound still comes in.
    """

    def __init__(
        self,
        deliver: Callable[[list[T]], Awaitable[None] | None],
        taken: Callable[[list[T], BaseException | None], None] | None = None,
        *,
        messages_max: int = MESSAGES_MAX,
        held_messages_max: int = 0,
        bytes_max: int = BYTES_MAX,
        batch_max: int = BATCH_MAX,
        item_bytes_max: int | None = None,
        dropped: Counter[str] | None = None,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._deliver, self._taken = deliver, taken
        self._messages_max, self._batch_max = messages_max, batch_max
        self._held_messages_max, self._bytes_max = max(held_messages_max, messages_max), bytes_max
        self._item_bytes_max = item_bytes_max if item_bytes_max is not None else sys.maxsize
        self._dropped = dropped if dropped is not None else Counter[str]()
        self._items: deque[T] = deque()
        self._awake = False
        self._last_drain = 0.0  # loop time
        self._span_start, self._span_messages, self._busy = 0.0, 0, False
        self._pending: deque[tuple[list[T], asyncio.Future[None], float]] = deque()  # with the loop time of their start
        self._pending_messages = 0
        self._oldest_at = math.inf  # loop time at which the oldest batch that is being taken was handed over
        self._sizes: dict[int, int] = {}  # of large items, by their identity; under _room
        self._bytes = 0  # their sum
        self._room = threading.Condition()
        self._waiting = False
        self._waiters: set[asyncio.Future[None]] = set()  # of put_on_loop
        self._closed = False
        self._idle = asyncio.Event()
        self._idle.set()

    def __repr__(self) -> str:
        return f"Inbox(waiting={len(self._items)}, being_taken={self._pending_messages})"

    def put(self, item: T, size_bytes: int = 0) -> bool:
        """From any thread but the loop's. Waits while the inbox is full, so that a slow consumer is felt by the sender.

        False: too large, and not taken."""
        if size_bytes > self._item_bytes_max:
            return self._refuse(size_bytes)
        if len(self._items) + self._pending_messages >= self._messages_max or self._bytes >= self._bytes_max:
            self._wait_for_room()
        self._add(item, size_bytes)
        if not self._awake and not self._closed:
            self._awake = True
            try:
                self._loop.call_soon_threadsafe(self._drain)
            except RuntimeError:  # the loop has ended: nobody will ever read this
                self._closed = True
        return True

    def _refuse(self, size_bytes: int) -> bool:
        self._dropped["too_large"] += 1
        log.warning("dropped what is too large", bytes=size_bytes, bytes_max=self._item_bytes_max)
        return False

    async def put_on_loop(self, item: T, size_bytes: int = 0) -> bool:
        """The same for a task on the loop. Returns without a switch of tasks where there is room; each task's order is
        kept."""
        if size_bytes > self._item_bytes_max:
            return self._refuse(size_bytes)
        while self._is_full() and not self._closed:
            self._waiting = True
            room: asyncio.Future[None] = self._loop.create_future()
            self._waiters.add(room)
            # as a thread does: nobody tells that the oldest batch is held by now
            again = self._loop.call_later(HELD_S, _wake, room)
            try:
                await room
            finally:
                again.cancel()
                self._waiters.discard(room)
        self._add(item, size_bytes)
        if not self._awake and not self._closed:
            self._awake = True
            self._loop.call_soon(self._drain)
        return True

    def _add(self, item: T, size_bytes: int) -> None:
        if self._closed:
            return
        if size_bytes > SMALL_BYTES:
            with self._room:
                self._sizes[id(item)] = self._sizes.get(id(item), 0) + size_bytes
                self._bytes += size_bytes
        self._items.append(item)

    def _is_full(self) -> bool:
        held = self._loop.time() - self._oldest_at > HELD_S
        limit = self._held_messages_max if held else self._messages_max
        return len(self._items) + self._pending_messages >= limit or self._bytes >= self._bytes_max

    def _wait_for_room(self) -> None:
        with self._room:
            while self._is_full() and not self._closed:
                self._waiting = True  # each time: whoever made room has taken it back
                self._room.wait(HELD_S)  # and not longer: nobody tells that the oldest batch is held by now

    def _make_room(self, batch: list[T]) -> None:
        if self._sizes:
            with self._room:
                self._bytes -= sum(self._sizes.pop(id(item), 0) for item in batch)
        if self._waiting and not self._is_full():
            with self._room:
                self._waiting = False
                self._room.notify_all()
            self._wake_tasks()

    def _wake_tasks(self) -> None:
        for room in self._waiters:
            _wake(room)

    def _drain(self) -> None:
        """Hand over one batch, and come back for the next after everybody else on the loop had a turn."""
        items, now = self._items, self._loop.time()
        if self._busy and len(items) < GATHER_MIN and now - self._last_drain < GATHER_S:
            self._last_drain = 0.0  # once only
            self._loop.call_later(GATHER_S, self._drain)
            return
        self._last_drain = now
        span = now - self._span_start
        if span > SPAN_S:
            self._busy = self._span_messages >= BUSY_PER_S * span
            self._span_start, self._span_messages = now, 0
        self._awake = False  # first: what arrives from here on wakes us again
        if self._closed or not items:
            return
        if self._pending_messages < self._messages_max:
            batch = [items.popleft() for _ in range(min(len(items), self._batch_max))]
            self._span_messages += len(batch)
            self._hand_over(batch)
        if items and not self._awake and self._pending_messages < self._messages_max:
            self._awake = True
            self._loop.call_soon(self._drain)

    def _hand_over(self, batch: list[T]) -> None:
        try:
            result = self._deliver(batch)
        except Exception as error:
            log.exception("delivering a batch failed", messages=len(batch))
            self._finish(batch, error)
            return
        if result is None and not self._pending:
            self._finish(batch, None)
            return
        self._idle.clear()
        self._pending_messages += len(batch)
        if result is None:
            future: asyncio.Future[None] = self._loop.create_future()
            future.set_result(None)
        else:
            future = asyncio.ensure_future(result)  # type: ignore[assignment, arg-type, unused-ignore]
        self._pending.append((batch, future, self._loop.time()))
        self._oldest_at = self._pending[0][2]
        future.add_done_callback(self._settle)

    def _settle(self, _done: asyncio.Future[None]) -> None:
        while self._pending and self._pending[0][1].done():
            batch, future, _at = self._pending.popleft()
            self._oldest_at = self._pending[0][2] if self._pending else math.inf
            self._pending_messages -= len(batch)
            self._finish(batch, asyncio.CancelledError() if future.cancelled() else future.exception())
        if not self._pending:
            self._idle.set()
        if self._items and not self._awake and not self._closed:
            self._awake = True
            self._loop.call_soon(self._drain)

    def _finish(self, batch: list[T], error: BaseException | None) -> None:
        if self._taken is not None:
            self._taken(batch, error)
        elif error is not None:
            log.error(
                "a batch was not taken, and this network can't deliver it again", messages=len(batch), error=repr(error)
            )
        self._make_room(batch)

    async def drained(self) -> None:
        """Completes when everything put so far has been taken."""
        while (self._items and not self._closed) or self._pending:
            await self._idle.wait()
            await asyncio.sleep(0)

    def close(self) -> None:
        """Drop what waits and release who waits for room. May be called twice."""
        self._closed = True
        self._items.clear()
        with self._room:
            self._sizes.clear()
            self._bytes = 0
            self._room.notify_all()
        self._wake_tasks()


def _wake(room: asyncio.Future[None]) -> None:
    if not room.done():
        room.set_result(None)
