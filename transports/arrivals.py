"""Queue of arrived messages: network -> listeners, bounded, one wake-up per batch, acknowledged last.

library's thread:   put(item, size)
task on the loop:   await put_on_loop(item, size)   -> items -> deliver(batch) -> its awaitable -> taken(batch, error)
callback on loop:   put_now(items)                      ^       up to BATCH_MAX         |          in order of arrival
                                                        |                               | failed, and redeliver=True:
                                                        '-------------------------------' with all behind it, in order

full, by messages or bytes:  put and put_on_loop wait, so their caller reads no more from the network
                             put_now takes the items all the same: pressed(True) asks the network to hold back,
                             pressed(False) to go on
larger than `item_bytes_max`: counted in `dropped` and not taken; put and put_on_loop return False

If a network reads a link with one thread, a publish that waits for capacity stops everything on that link. If requests
must pass meanwhile, give them arrivals of their own, and let those of publishes grow while their consumer holds a batch
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
HELD_S: Final = 0.1  # a batch that is being taken for longer is held on purpose (a full disk), not by a slow consumer
BATCH_MAX: Final = 512  # messages in one batch; beyond it the cost per message no longer falls
# of large items in a batch, and one item more. A volatile log takes a batch whole, even if its readers lag: this is a
# small part of what the smallest one holds
BATCH_BYTES_MAX: Final = 1 << 20

GATHER_MIN: Final = 64  # with fewer waiting, and the last batch less than ...
ARRIVALS_GATHER_S: Final = 0.0005  # ... so long ago, more are coming: wait for them. But only ...
BUSY_PER_S: Final = 10_000  # ... while so many come per second, measured ...
SPAN_S: Final = 0.01  # ... over so long: with fewer, latency is worth more than what a batch saves
# while a batch is being taken (its commit is gathered, say), the next one is delivered so often, and as soon as the
# batch is taken: waking the loop costs more than a message does
LULL_S = 0.002

REDELIVERY_MS_MIN: Final = 5  # before a batch that was not taken is delivered again; it doubles up to ...
REDELIVERY_MS_MAX: Final = 1_000  # ... so that a listener that always fails does not keep a core busy

log = structlog.get_logger()


class _Delivery(NamedTuple):
    """A batch that was delivered and is not yet taken."""

    items: list[Any]
    taking: asyncio.Future[None] | None  # None: all were taken at once
    since: float  # loop time
    raised: Exception | None  # by `deliver` itself, which would raise it again


class Capacity(Generic[T]):
    """The items that wait, the limits of an Arrivals, and the senders that wait until there are fewer.

    `wait` and `weigh` may be called from any thread; everything else happens on the event loop.
    """

    def __init__(
        self, messages_max: int, held_messages_max: int, bytes_max: int, pressed: Callable[[bool], None] | None
    ) -> None:
        self.messages_max, self._held_messages_max, self.bytes_max = messages_max, held_messages_max, bytes_max
        self._on_pressed = pressed
        self.items: deque[T] = deque()
        self.being_taken = 0  # messages
        self.held_since = math.inf  # loop time at which the oldest batch that is being taken was delivered
        self._elsewhere = 0  # messages that are held elsewhere and count here
        self.sizes: dict[int, int] = {}  # of large items, by their identity; under _changed
        self.bytes = 0  # the sum of `sizes`, and the bytes that are held elsewhere
        self.is_pressed = False
        self.stopped = True  # nothing is taken any more, so nobody need wait
        self.has_waiters = False
        self._changed = threading.Condition()
        self.waiters: set[asyncio.Future[None]] = set()  # of wait_on_loop

    def open(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop, self.stopped = loop, False

    @property
    def is_full(self) -> bool:
        held = self.held_since < math.inf and self._loop.time() - self.held_since > HELD_S
        limit = self._held_messages_max if held else self.messages_max
        return len(self.items) + self.being_taken + self._elsewhere >= limit or self.bytes >= self.bytes_max

    def wait(self) -> None:
        """Block this thread until there is free capacity."""
        with self._changed:
            while not self.stopped and self.is_full:
                self.has_waiters = True  # each time: `release` clears it
                self._changed.wait(HELD_S)  # no longer: nothing is signalled when the oldest batch counts as held

    async def wait_on_loop(self) -> None:
        """As `wait`, for a task on the loop. Does not switch tasks where there is free capacity."""
        while not self.stopped and self.is_full:
            self.has_waiters = True
            free: asyncio.Future[None] = self._loop.create_future()
            self.waiters.add(free)
            timeout = self._loop.call_later(HELD_S, _complete, free)  # as `wait` does
            try:
                await free
            finally:
                timeout.cancel()
                self.waiters.discard(free)

    def release(self) -> None:
        """Let everybody who waits look again."""
        self.has_waiters = False
        with self._changed:
            self._changed.notify_all()
        for free in self.waiters:
            _complete(free)

    def weigh(self, item: T, size_bytes: int) -> None:
        with self._changed:
            self.sizes[id(item)] = self.sizes.get(id(item), 0) + size_bytes
            self.bytes += size_bytes

    def forget(self, items: Iterable[T]) -> None:
        """Stop counting the bytes of `items`."""
        with self._changed:
            self.bytes -= sum(self.sizes.pop(id(item), 0) for item in items)

    def forget_all(self) -> None:
        with self._changed:
            self.bytes -= sum(self.sizes.values())
            self.sizes.clear()

    def count(self, octets: int, messages: int) -> None:
        with self._changed:
            self.bytes += octets
            self._elsewhere += messages
        self.press()

    def press(self) -> None:
        """Call `pressed` if that has changed."""
        messages = len(self.items) + self.being_taken + self._elsewhere
        if self.is_pressed:
            is_pressed = messages > self.messages_max // 2 or self.bytes > self.bytes_max // 2
        else:
            is_pressed = messages >= self.messages_max or self.bytes >= self.bytes_max
        if self._on_pressed is not None and is_pressed != self.is_pressed:
            self.is_pressed = is_pressed
            self._on_pressed(is_pressed)


class Arrivals(Generic[T]):
    """One per network connection. `put` may be called from any thread but the loop's; all else happens on the loop.

    Closed at first; `open` and `close` may follow one another as often as their transport's. `deliver` is called in the
    context in which `open` was called.

    `deliver(items)` may return an awaitable. The next batch does not wait for it, so a listener may await an answer
    that is behind its message. `taken(items, error)` is called in the order of arrival: with None when the awaitable
    has completed, with the exception when it has failed (then do not acknowledge the messages to the network). With
    `redeliver`, `error` is only an exception of `deliver` itself; a batch whose awaitable fails is delivered again
    until it is taken.

    Limits: `messages_max`, waiting or being taken; once the oldest batch has been held for HELD_S, `held_messages_max`
    instead (default: the same); and `bytes_max` of items over SMALL_BYTES, where the one item that exceeds it is still
    taken. `pressed(True)` is called when either limit is reached, `pressed(False)` when both are down to a half.

    `gathers`: wait a moment for more while many come one by one, and while a batch is still being taken. Of no use for
    a network that brings batches.
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
        self._deliver, self._taken, self._batch_max = deliver, taken, batch_max
        self._capacity = Capacity[T](messages_max, max(held_messages_max, messages_max), bytes_max, pressed)
        self._item_bytes_max = sys.maxsize
        self._redeliver, self._gathers = redeliver, gathers
        self._dropped = dropped if dropped is not None else Counter[str]()
        self._pending: deque[_Delivery] = deque()
        # a network that is pressed holds back; what still comes may be what a listener waits for, so it is delivered
        self._has_pressed = pressed is not None
        self._pending_max = sys.maxsize if self._has_pressed else messages_max
        self._awake = False  # `_drain` will be called
        self._lull: asyncio.TimerHandle | None = None  # ... by this timer, unless all is taken before
        self._last_drain = 0.0  # loop time
        self._span_start, self._span_messages, self._busy = 0.0, 0, False
        self._backoff = Backoff(REDELIVERY_MS_MIN, REDELIVERY_MS_MAX)
        self._redeliver_at = 0.0  # loop time; nothing is delivered before. 0: the last batch was taken
        self._closed = True
        self._paused = False
        self._idle = asyncio.Event()

    def __repr__(self) -> str:
        capacity = self._capacity
        counts = f"waiting={len(capacity.items)}, being_taken={capacity.being_taken}, bytes={capacity.bytes}"
        return f"{type(self).__name__}({counts})"

    @property
    def waiting(self) -> int:
        """Messages that have not been taken."""
        return len(self._capacity.items) + self._capacity.being_taken

    @property
    def undelivered(self) -> int:
        """Messages that wait to be delivered, for the first time or again."""
        return len(self._capacity.items)

    @property
    def octets(self) -> int:
        """Bytes of large items that have not been taken, and what `count` has added."""
        return self._capacity.bytes

    @property
    def is_full(self) -> bool:
        return self._capacity.is_full

    @property
    def is_pressed(self) -> bool:
        """True between `pressed(True)` and `pressed(False)`."""
        return self._capacity.is_pressed

    def open(self, item_bytes_max: int | None = None) -> None:
        """Take what comes from now on. `item_bytes_max` is a transport's `wire_bytes_max`: a larger item is counted in
        `dropped["too_large"]`; if your network waits for an acknowledgement, give it one."""
        self._loop, self._context = asyncio.get_running_loop(), contextvars.copy_context()
        self._item_bytes_max = item_bytes_max if item_bytes_max is not None else sys.maxsize
        self._capacity.open(self._loop)
        self._closed = self._awake = False
        self._redeliver_at = 0.0
        self._backoff.reset()

    # From the network.

    def put(self, item: T, size_bytes: int = 0) -> bool:
        """From any thread but the loop's. Waits while it is full, so that the sender notices a slow consumer.

        Returns False if the item is too large and was not taken."""
        if size_bytes > self._item_bytes_max:
            return self._refuse(size_bytes)
        capacity = self._capacity
        if len(capacity.items) + capacity.being_taken >= capacity.messages_max or capacity.bytes >= capacity.bytes_max:
            capacity.wait()
        if not capacity.stopped:
            if size_bytes > SMALL_BYTES:
                capacity.weigh(item, size_bytes)
            capacity.items.append(item)
        if not self._awake and not self._closed:
            self._awake = True
            try:
                self._loop.call_soon_threadsafe(self._drain, context=self._context)
            except RuntimeError:  # the loop has ended: nobody will ever read this
                capacity.stopped = self._closed = True
        return True

    async def put_on_loop(self, item: T, size_bytes: int = 0) -> bool:
        """As `put`, for a task on the loop. Does not switch tasks where there is free capacity; each task's order is
        kept."""
        if size_bytes > self._item_bytes_max:
            return self._refuse(size_bytes)
        await self._capacity.wait_on_loop()
        if not self._capacity.stopped:
            if size_bytes > SMALL_BYTES:
                self._capacity.weigh(item, size_bytes)
            self._capacity.items.append(item)
            self._wake()
        return True

    def put_now(self, items: Sequence[T], sizes: Iterable[int] = ()) -> int:
        """Take all of them at once, on the loop, even if it is full: for a network that holds back when `pressed`.

        Returns how many messages have not been taken by listeners."""
        if not self._capacity.stopped and items:
            for item, size_bytes in zip(items, sizes, strict=False):
                if size_bytes > SMALL_BYTES:
                    self._capacity.weigh(item, size_bytes)
            self._capacity.items.extend(items)
            self._capacity.press()
            self._wake()
        return len(self._capacity.items) + self._capacity.being_taken

    def count(self, octets: int, messages: int = 0) -> None:
        """Count so many more bytes and messages (fewer if negative) that are held elsewhere against the limits."""
        self._capacity.count(octets, messages)

    def _refuse(self, size_bytes: int) -> bool:
        self._dropped["too_large"] += 1
        log.warning("dropped a message that is too large", bytes=size_bytes, bytes_max=self._item_bytes_max)
        return False

    # To the listeners.

    def _wake(self) -> None:
        if not self._awake and not self._closed:
            self._awake = True
            self._loop.call_soon(self._drain, context=self._context)

    def _drain(self) -> None:
        """Deliver one batch. The next one follows after everybody else on the loop had a turn."""
        items, now, self._lull = self._capacity.items, self._loop.time(), None
        if now < self._redeliver_at:  # what has come meanwhile waits behind what is delivered again
            self._loop.call_at(self._redeliver_at, self._drain, context=self._context)
            return
        if self._busy and len(items) < GATHER_MIN and now - self._last_drain < ARRIVALS_GATHER_S:
            self._last_drain = 0.0  # once only
            self._loop.call_later(ARRIVALS_GATHER_S, self._drain, context=self._context)
            return
        self._last_drain, span = now, now - self._span_start
        if span > SPAN_S:
            self._busy = self._gathers and self._span_messages >= BUSY_PER_S * span
            self._span_start, self._span_messages = now, 0
        self._awake = False  # first: what arrives from here on calls `_drain` again
        if self._closed or self._paused or not items or self._capacity.being_taken >= self._pending_max:
            return
        count = min(len(items), self._batch_max)
        batch = self._batch_by_bytes(count) if self._capacity.sizes else [items.popleft() for _ in range(count)]
        self._span_messages += len(batch)
        raised = None
        try:
            result = self._deliver(batch)
        except Exception as error:
            log.exception("delivering a batch failed", messages=len(batch))
            result, raised = None, error
        if not self._pending:
            self._capacity.held_since = now
        taking = None if result is None else asyncio.ensure_future(result)
        self._pending.append(_Delivery(batch, taking, now, raised))
        self._capacity.being_taken += len(batch)
        if taking is None:
            self._settle()
        else:
            taking.add_done_callback(self._settle)
        if items and self._capacity.being_taken < self._pending_max:
            self._wake()
        elif self._gathers and self._pending and not self._awake:
            self._awake = True
            self._lull = self._loop.call_later(LULL_S, self._drain, context=self._context)

    def _batch_by_bytes(self, count: int) -> list[T]:
        """Up to `count` items, and up to BATCH_BYTES_MAX and one item more."""
        batch: list[T] = []
        octets = 0
        while len(batch) < count and octets < BATCH_BYTES_MAX:
            batch.append(self._capacity.items.popleft())
            octets += self._capacity.sizes.get(id(batch[-1]), 0)
        return batch

    def _settle(self, done: asyncio.Future[None] | None = None) -> None:
        """Finish the batches that are taken, in order."""
        capacity = self._capacity
        if done is not None and not done.cancelled():
            done.exception()  # marks it as retrieved: a batch behind a failed one is delivered again in any case
        while self._pending:
            # 1: a batch that is still being taken: later ones wait
            batch, taking, _since, raised = self._pending[0]
            failure: BaseException | None = None
            if taking is not None:
                if not taking.done():
                    break
                failure = asyncio.CancelledError() if taking.cancelled() else taking.exception()
            # 2: a failed one that the network can deliver again: with all later ones, after a pause
            if failure is not None and self._redeliver:
                log.warning(
                    "a listener did not take a batch: delivering it again", messages=len(batch), error=repr(failure)
                )
                self._requeue()
                self._redeliver_at = self._loop.time() + self._backoff.next_ms() / 1000
                self._wake()
                return
            # 3: a batch that is over, taken or not
            self._pending.popleft()
            capacity.held_since = self._pending[0].since if self._pending else math.inf
            capacity.being_taken -= len(batch)
            if self._redeliver_at:  # delivered again
                self._redeliver_at = 0.0
                self._backoff.reset()
            if capacity.sizes:
                capacity.forget(batch)
            error = failure or raised
            if self._taken is not None:
                self._taken(batch, error)
            elif error is not None:
                what = "a batch was not taken, and this network can't deliver it again"
                log.error(what, messages=len(batch), error=repr(error))
            if self._has_pressed:
                capacity.press()
            if capacity.has_waiters and not capacity.is_full:
                capacity.release()
        if not self._pending and not capacity.items:
            self._idle.set()
        if not self._pending and self._lull is not None:  # what arrives from here on calls `_drain` at once
            self._lull.cancel()
            self._lull, self._awake = None, False
        if capacity.items:
            self._wake()

    def _requeue(self) -> None:
        """Put everything that was not taken back to the front, in order. What was delivered behind a failed batch is
        delivered twice."""
        for batch in reversed(self._pending):
            self._capacity.items.extendleft(reversed(batch.items))
        self._pending.clear()
        self._capacity.being_taken, self._capacity.held_since = 0, math.inf

    # Pausing and closing.

    def pause(self) -> None:
        """The connection is lost: put back what was not taken, and deliver nothing until `resume`."""
        self._paused = True
        self._requeue()

    def resume(self) -> None:
        """Delivers again."""
        self._paused = False
        if self._capacity.items:
            self._wake()

    async def drained(self) -> None:
        """Completes when everything put so far has been taken."""
        while (self._capacity.items and not self._closed) or self._pending:
            self._idle.clear()
            await self._idle.wait()

    async def finish(self, within_s: float) -> list[T]:
        """Take nothing more, wait at most `within_s` seconds until everything has been taken, and close."""
        self._capacity.stopped = True
        self._capacity.release()
        try:
            async with asyncio.timeout(within_s):
                await self.drained()
        except TimeoutError:
            log.warning("closing, though listeners have not taken everything", arrivals=repr(self))
        return self.close()

    def close(self) -> list[T]:
        """Take nothing more, and return what no listener has taken, in order. May be called twice."""
        self._closed = self._capacity.stopped = True
        if self._redeliver:
            self._requeue()
        left = list(self._capacity.items)
        self._capacity.items.clear()
        self._capacity.forget_all()
        self._capacity.press()
        self._capacity.release()
        self._idle.set()
        return left


def _complete(free: asyncio.Future[None]) -> None:
    if not free.done():
        free.set_result(None)
