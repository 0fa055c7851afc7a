"""The queue of what has arrived: network -> listeners, bounded, one wake-up per batch, acknowledged last.

library's thread:   put(item, size)
task on the loop:   await put_on_loop(item, size)   -> items -> deliver(batch) -> its awaitable -> taken(batch, error)
callback on loop:   put_now(items)                      ^       up to BATCH_MAX         |          in order of arrival
                                                        |                               | failed, and redeliver=True:
                                                        '-------------------------------' with all behind it, in order

full, by messages or bytes:  put and put_on_loop wait, and whoever waits reads nothing
                             put_now takes it nevertheless: pressed(True) says hold back, pressed(False) go on
too large for `item_bytes_max`: counted as dropped, and not taken; put and put_on_loop answer False

A network that reads a link with one thread stops reading everything once a publish waits for room. Where requests must
pass meanwhile, give them arrivals of their own, and let those of publishes grow while their consumer holds what it has
(`held_messages_max`).
"""

from __future__ import annotations

import asyncio
import contextvars
import math
import sys
import threading
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, Final, Generic, NamedTuple, TypeVar

import structlog

from uprotocol.pacing import Backoff

T = TypeVar("T")

# waiting or being taken; some 50 ms of the fastest network measured: more only hides a stall
MESSAGES_MAX: Final = 8_192
BYTES_MAX: Final = 64 << 20  # of large items that wait or are being taken: what a small gateway can spare
# up to this size the number of messages bounds the bytes, and counting would cost each message
SMALL_BYTES: Final = 1_024
HELD_S: Final = 0.1  # what is being taken for longer is held on purpose (a full disk), and is no matter of speed
BATCH_MAX: Final = 512  # messages handed over at once; beyond it the cost per message no longer falls
# of large items in a batch, and one item more: a small part of what the smallest volatile log holds, which takes a
# batch whole, whatever of it its readers have yet to read
BATCH_BYTES_MAX: Final = 1 << 20

GATHER_MIN: Final = 64  # with fewer waiting, and the last batch less than ...
GATHER_S: Final = 0.0005  # ... so long ago, more are coming: wait for them. But only ...
BUSY_PER_S: Final = 10_000  # ... while so many come per second, as seen ...
SPAN_S: Final = 0.01  # ... that often: for fewer, latency is worth more than what a batch saves
# what follows a batch that is still being taken (a commit is gathered, say) is handed over so often, and once that is
# taken: waking the loop costs more than a message does
LULL_S = 0.002

REDELIVERY_MS_MIN: Final = 5  # before what was not taken is handed over again; it doubles up to ...
REDELIVERY_MS_MAX: Final = 1_000  # ... so that a listener that always fails costs no core

log = structlog.get_logger()


class _Batch(NamedTuple):
    """Handed over, and not yet taken."""

    items: list[Any]
    taking: asyncio.Future[None]
    since: float  # loop time
    raised: Exception | None  # by `deliver` itself, which would do so again


class Arrivals(Generic[T]):
    """One per network connection. `put` may be called from any thread but the loop's; all else happens on the loop.

    Made closed: `open` and `close` may follow one another as often as their transport's. `deliver` is called in the
    context in which `open` was.

    `deliver(items)` may return an awaitable; the next batch does not wait for it, so that a listener may await an
    answer that is behind. `taken(items, error)` is called in the order of arrival, with None when the awaitable
    completed and with the exception when it failed (the network must not be told then). With `redeliver` only an
    exception of `deliver` itself comes as an error: what an awaitable refused is handed over again until it is taken.

    Bounds: `messages_max`, waiting or being taken; `held_messages_max` instead, once the oldest batch has been held for
    HELD_S (default: the same); and `bytes_max` of items over SMALL_BYTES, beyond which the one item that passes the
    bound still comes in. `pressed(True)` is called when there are so many of either, and `pressed(False)` when there
    are half as many of both.

    `gathers`: wait a moment for more where many come one by one, and while a batch is being taken that is not taken at
    once. For a network that brings batches it is of no use.
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
        redeliver: bool = False,
        gathers: bool = True,
        pressed: Callable[[bool], None] | None = None,
        dropped: Counter[str] | None = None,
    ) -> None:
        self._deliver, self._taken, self._pressed = deliver, taken, pressed
        self._messages_max, self._batch_max, self._bytes_max = messages_max, batch_max, bytes_max
        self._held_messages_max = max(held_messages_max, messages_max)
        self._item_bytes_max = sys.maxsize
        self._redeliver, self._gathers = redeliver, gathers
        self._dropped = dropped if dropped is not None else Counter[str]()
        self._items: deque[T] = deque()
        self._pending: deque[_Batch] = deque()
        self._pending_messages = 0
        # who is pressed holds back, and what has come nevertheless may be what a listener waits for
        self._pending_max = messages_max if pressed is None else sys.maxsize
        self._oldest_at = math.inf  # loop time at which the oldest batch that is being taken was handed over
        self._elsewhere = 0  # messages that count here as well
        self._sizes: dict[int, int] = {}  # of large items, by their identity; under _room
        self._bytes = 0  # their sum, and of what is elsewhere
        self.is_pressed = False
        self._awake = False  # `_drain` will be called
        self._lull: asyncio.TimerHandle | None = None  # ... by this timer, unless all is taken before
        self._last_drain = 0.0  # loop time
        self._span_start, self._span_messages, self._busy = 0.0, 0, False
        self._backoff = Backoff(REDELIVERY_MS_MIN, REDELIVERY_MS_MAX)
        self._again_at = 0.0  # loop time; nothing is handed over before
        self._room = threading.Condition()
        self._waiting = False  # somebody waits for room
        self._waiters: set[asyncio.Future[None]] = set()  # of put_on_loop
        self._stopped = self._closed = True
        self._paused = False
        self._idle = asyncio.Event()

    def __repr__(self) -> str:
        counts = f"waiting={len(self._items)}, being_taken={self._pending_messages}, bytes={self._bytes}"
        return f"{type(self).__name__}({counts})"

    @property
    def waiting(self) -> int:
        """Messages that have not been taken."""
        return len(self._items) + self._pending_messages

    @property
    def not_handed_over(self) -> int:
        """Those of them that no listener has seen, or that come again."""
        return len(self._items)

    @property
    def octets(self) -> int:
        """Of large items that have not been taken, and of what else counts here."""
        return self._bytes

    @property
    def is_full(self) -> bool:
        held = self._oldest_at < math.inf and self._loop.time() - self._oldest_at > HELD_S
        limit = self._held_messages_max if held else self._messages_max
        return self.waiting + self._elsewhere >= limit or self._bytes >= self._bytes_max

    def open(self, item_bytes_max: int | None = None) -> None:
        """Take what comes from now on. `item_bytes_max` is a transport's `wire_bytes_max`: what has more is counted in
        `dropped["too_large"]`; if your network waits for an acknowledgement, give it one."""
        self._loop, self._context = asyncio.get_running_loop(), contextvars.copy_context()
        self._item_bytes_max = item_bytes_max if item_bytes_max is not None else sys.maxsize
        self._stopped = self._closed = self._awake = False
        self._again_at = 0.0

    # What comes in.

    def put(self, item: T, size_bytes: int = 0) -> bool:
        """From any thread but the loop's. Waits while it is full, so that a slow consumer is felt by the sender.

        False: too large, and not taken."""
        if size_bytes > self._item_bytes_max:
            return self._refuse(size_bytes)
        if len(self._items) + self._pending_messages >= self._messages_max or self._bytes >= self._bytes_max:
            with self._room:
                while not self._stopped and self.is_full:
                    self._waiting = True  # each time: whoever made room has taken it back
                    self._room.wait(HELD_S)  # and not longer: nobody tells that the oldest batch is held by now
        if not self._stopped:
            if size_bytes > SMALL_BYTES:
                self._weigh(item, size_bytes)
            self._items.append(item)
        if not self._awake and not self._closed:
            self._awake = True
            try:
                self._loop.call_soon_threadsafe(self._drain, context=self._context)
            except RuntimeError:  # the loop has ended: nobody will ever read this
                self._stopped = self._closed = True
        return True

    async def put_on_loop(self, item: T, size_bytes: int = 0) -> bool:
        """The same for a task on the loop. Returns without a switch of tasks where there is room; each task's order is
        kept."""
        if size_bytes > self._item_bytes_max:
            return self._refuse(size_bytes)
        while not self._stopped and self.is_full:
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
        if not self._stopped:
            if size_bytes > SMALL_BYTES:
                self._weigh(item, size_bytes)
            self._items.append(item)
            self._wake()
        return True

    def put_now(self, items: Sequence[T], sizes: Iterable[int] = ()) -> None:
        """On the loop, all of them, though it may be full: for a network that holds back when it is told `pressed`."""
        if not self._stopped and items:
            for item, size_bytes in zip(items, sizes, strict=False):
                if size_bytes > SMALL_BYTES:
                    self._weigh(item, size_bytes)
            self._items.extend(items)
            self._press()
            self._wake()

    def count(self, octets: int, messages: int = 0) -> None:
        """So many bytes and messages more are held elsewhere, or fewer, and shall count here."""
        with self._room:
            self._bytes += octets
            self._elsewhere += messages
        self._press()

    def _refuse(self, size_bytes: int) -> bool:
        self._dropped["too_large"] += 1
        log.warning("dropped what is too large", bytes=size_bytes, bytes_max=self._item_bytes_max)
        return False

    def _weigh(self, item: T, size_bytes: int) -> None:
        with self._room:
            self._sizes[id(item)] = self._sizes.get(id(item), 0) + size_bytes
            self._bytes += size_bytes

    # Room, and pressure.

    def _release(self) -> None:
        """Whoever waits for room may look again."""
        self._waiting = False
        with self._room:
            self._room.notify_all()
        for room in self._waiters:
            _wake(room)

    def _press(self) -> None:
        messages = self.waiting + self._elsewhere
        if self.is_pressed:
            is_pressed = messages > self._messages_max // 2 or self._bytes > self._bytes_max // 2
        else:
            is_pressed = messages >= self._messages_max or self._bytes >= self._bytes_max
        if self._pressed is not None and is_pressed != self.is_pressed:
            self.is_pressed = is_pressed
            self._pressed(is_pressed)

    # To the listeners.

    def _wake(self) -> None:
        if not self._awake and not self._closed:
            self._awake = True
            self._loop.call_soon(self._drain, context=self._context)

    def _end_lull(self) -> None:
        """What arrives from here on wakes us again."""
        if self._lull is not None:
            self._lull.cancel()
            self._lull, self._awake = None, False

    def _drain(self) -> None:
        """Hand over one batch, and come back for the next after everybody else on the loop had a turn."""
        items, now = self._items, self._loop.time()
        if now < self._again_at:  # whatever has come meanwhile waits behind what comes again
            self._loop.call_at(self._again_at, self._drain, context=self._context)
            return
        if self._busy and len(items) < GATHER_MIN and now - self._last_drain < GATHER_S:
            self._last_drain = 0.0  # once only
            self._loop.call_later(GATHER_S, self._drain, context=self._context)
            return
        self._last_drain, self._lull = now, None
        span = now - self._span_start
        if span > SPAN_S:
            self._busy = self._gathers and self._span_messages >= BUSY_PER_S * span
            self._span_start, self._span_messages = now, 0
        self._awake = False  # first: what arrives from here on wakes us again
        if self._closed or self._paused or not items or self._pending_messages >= self._pending_max:
            return
        batch = self._next_batch()
        self._span_messages += len(batch)
        raised = None
        try:
            result = self._deliver(batch)
        except Exception as error:
            log.exception("delivering a batch failed", messages=len(batch))
            result, raised = None, error
        if result is None and not self._pending:
            self._finish(batch, raised)
        else:
            if not self._pending:
                self._oldest_at = now
            taking = self._loop.create_future() if result is None else asyncio.ensure_future(result)
            if result is None:
                taking.set_result(None)
            self._pending.append(_Batch(batch, taking, now, raised))
            self._pending_messages += len(batch)
            taking.add_done_callback(self._settle)
        if items and self._pending_messages < self._pending_max:
            self._wake()
        elif self._gathers and self._pending and not self._awake:
            self._awake = True
            self._lull = self._loop.call_later(LULL_S, self._drain, context=self._context)

    def _next_batch(self) -> list[T]:
        items, sizes = self._items, self._sizes
        count = min(len(items), self._batch_max)
        if not sizes:
            return [items.popleft() for _ in range(count)]
        batch: list[T] = []
        octets = 0
        while len(batch) < count and octets < BATCH_BYTES_MAX:
            batch.append(items.popleft())
            octets += sizes.get(id(batch[-1]), 0)
        return batch

    def _settle(self, done: asyncio.Future[None]) -> None:
        if not done.cancelled():
            done.exception()  # asked for here: one behind a failure may be handed over again whatever became of it
        while self._pending and self._pending[0].taking.done():
            batch, taking, _since, error = self._pending[0]
            failure = asyncio.CancelledError() if taking.cancelled() else taking.exception()
            if failure is not None and self._redeliver:
                log.warning(
                    "a listener did not take a batch: it gets it again", messages=len(batch), error=repr(failure)
                )
                self._go_back()
                self._again_at = self._loop.time() + self._backoff.next_ms() / 1000
                self._wake()
                return
            self._pending.popleft()
            self._oldest_at = self._pending[0].since if self._pending else math.inf
            self._pending_messages -= len(batch)
            self._finish(batch, failure or error)
        if not self._pending:
            self._end_lull()
        if self._items:
            self._wake()

    def _finish(self, batch: list[T], error: BaseException | None) -> None:
        if self._redeliver:
            self._backoff.reset()
        if self._sizes:
            with self._room:
                self._bytes -= sum(self._sizes.pop(id(item), 0) for item in batch)
        if self._taken is not None:
            self._taken(batch, error)
        elif error is not None:
            log.error(
                "a batch was not taken, and this network can't deliver it again", messages=len(batch), error=repr(error)
            )
        if self._pressed is not None:
            self._press()
        if self._waiting and not self.is_full:
            self._release()
        if not self._pending and not self._items:
            self._idle.set()

    def _go_back(self) -> None:
        """All that was not taken waits again, in order: what was handed over behind a failure comes twice."""
        self._end_lull()
        for batch in reversed(self._pending):
            self._items.extendleft(reversed(batch.items))
        self._pending.clear()
        self._pending_messages, self._oldest_at = 0, math.inf

    # The end, for now or for good.

    def pause(self) -> None:
        """The connection is gone: what was not taken goes back, and nothing is handed over until `resume`."""
        self._paused = True
        self._go_back()

    def resume(self) -> None:
        self._paused = False
        if self._items:
            self._wake()

    def stop(self) -> None:
        """Take nothing more. What is here is still handed over."""
        self._stopped = True
        self._release()

    async def drained(self) -> None:
        """Completes when everything put so far has been taken."""
        while (self._items and not self._closed) or self._pending:
            self._idle.clear()
            await self._idle.wait()

    async def finish(self, within_s: float) -> list[T]:
        """Take nothing more, wait until what is here has been taken, but no longer than that, and close."""
        self.stop()
        try:
            async with asyncio.timeout(within_s):
                await self.drained()
        except TimeoutError:
            log.warning("closing, though listeners have not taken everything", arrivals=repr(self))
        return self.close()

    def close(self) -> list[T]:
        """Take nothing more, and return what no listener has taken, in order. May be called twice."""
        self._stopped = self._closed = True
        self._end_lull()
        if self._redeliver:
            self._go_back()
        left = list(self._items)
        self._items.clear()
        with self._room:
            self._bytes -= sum(self._sizes.values())
            self._sizes.clear()
        self._press()
        self._release()
        self._idle.set()
        return left


def _wake(room: asyncio.Future[None]) -> None:
    if not room.done():
        room.set_result(None)
