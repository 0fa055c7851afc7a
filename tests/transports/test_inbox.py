"""The inbox: order, bounds, acknowledgement, and threads that wait."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable

from transports.inbox import SMALL_BYTES, Inbox

DEADLINE_S = 10


class Consumer:
    """Takes at once, or when `taking` is released; `wanted` items make `done`."""

    def __init__(self, wanted: int = 0) -> None:
        self.items: list[int] = []
        self.batches: list[int] = []
        self.results: list[asyncio.Future[None]] = []
        self.wanted, self.done = wanted, asyncio.Event()
        self.slow = False

    def __call__(self, batch: list[int]) -> Awaitable[None] | None:
        self.items += batch
        self.batches.append(len(batch))
        if len(self.items) >= self.wanted:
            self.done.set()
        if not self.slow:
            return None
        self.results.append(asyncio.get_running_loop().create_future())
        return self.results[-1]


async def within(what: Awaitable[object]) -> None:
    await asyncio.wait_for(what, DEADLINE_S)


async def test_everything_comes_once_in_order_and_in_batches() -> None:
    consumer = Consumer(5_000)
    inbox = Inbox(consumer, batch_max=100)
    await within(asyncio.to_thread(lambda: [inbox.put(number) for number in range(5_000)]))
    await within(consumer.done.wait())
    await within(inbox.drained())
    assert consumer.items == list(range(5_000))
    assert max(consumer.batches) <= 100


async def test_many_threads_keep_each_their_order() -> None:
    consumer = Consumer(4_000)
    inbox: Inbox[int] = Inbox(consumer, messages_max=64)

    def put(first: int) -> None:
        for number in range(1_000):
            inbox.put(first + number)

    await within(asyncio.gather(*(asyncio.to_thread(put, first) for first in (0, 10_000, 20_000, 30_000))))
    await within(consumer.done.wait())
    for first in (0, 10_000, 20_000, 30_000):
        assert [item for item in consumer.items if first <= item < first + 1_000] == list(range(first, first + 1_000))


async def test_who_puts_waits_while_it_is_full() -> None:
    consumer = Consumer(10)
    consumer.slow = True
    inbox = Inbox(consumer, messages_max=10, batch_max=5)
    putting = asyncio.ensure_future(asyncio.to_thread(lambda: [inbox.put(number) for number in range(100)]))
    await within(consumer.done.wait())
    await asyncio.sleep(0.05)
    assert not putting.done(), "ten are being taken, and nobody has taken one"
    assert consumer.items == list(range(10))
    consumer.slow = False
    for result in consumer.results:
        result.set_result(None)
    await within(putting)
    await within(inbox.drained())
    assert consumer.items == list(range(100))


async def test_large_items_are_bounded_in_bytes() -> None:
    consumer = Consumer(3)
    consumer.slow = True
    inbox = Inbox(consumer, bytes_max=20_000, batch_max=1)
    putting = asyncio.ensure_future(asyncio.to_thread(lambda: [inbox.put(number, 10_000) for number in range(1_000, 1_010)]))
    while len(consumer.results) < 2:  # noqa: ASYNC110 - one batch after the other
        await asyncio.sleep(0.001)
    await asyncio.sleep(0.05)
    assert not putting.done()
    assert consumer.items == [1_000, 1_001], "two of 10,000 bytes fill it"
    inbox_of_small: Inbox[int] = Inbox(Consumer(), bytes_max=20_000)
    await within(asyncio.to_thread(lambda: [inbox_of_small.put(number, SMALL_BYTES) for number in range(100)]))
    consumer.slow = False
    for result in consumer.results:
        result.set_result(None)
    await within(putting)
    await within(inbox.drained())
    assert consumer.items == list(range(1_000, 1_010))
    assert inbox._bytes == 0
    assert not inbox._sizes


async def test_there_is_more_room_while_what_came_is_held() -> None:
    consumer = Consumer(10)
    consumer.slow = True
    inbox = Inbox(consumer, messages_max=10, held_messages_max=50, batch_max=5)
    putting = asyncio.ensure_future(asyncio.to_thread(lambda: [inbox.put(number) for number in range(100)]))
    async with asyncio.timeout(DEADLINE_S):
        while len(inbox._items) < 40:  # noqa: ASYNC110 - filled from another thread
            await asyncio.sleep(0.01)
    await asyncio.sleep(0.05)
    assert not putting.done()
    assert len(inbox._items) == 40
    assert consumer.items == list(range(10)), "no more than before are handed over"
    consumer.slow = False
    for result in consumer.results:
        result.set_result(None)
    await within(putting)
    await within(inbox.drained())
    assert consumer.items == list(range(100))


async def test_taken_is_told_in_order_of_arrival_with_what_became_of_it() -> None:
    consumer, told, all_told = Consumer(3), [], asyncio.Event()
    consumer.slow = True

    def taken(batch: list[int], error: BaseException | None) -> None:
        told.append((batch, error))
        if len(told) == 3:
            all_told.set()

    inbox = Inbox(consumer, taken, batch_max=1)
    await within(asyncio.to_thread(lambda: [inbox.put(number) for number in range(3)]))
    await within(consumer.done.wait())
    failure = RuntimeError("disk full")
    consumer.results[2].set_result(None)
    consumer.results[1].set_exception(failure)
    await asyncio.sleep(0)
    assert told == [], "the first is still being taken"
    consumer.results[0].set_result(None)
    await within(all_told.wait())
    assert told == [([0], None), ([1], failure), ([2], None)]


async def test_a_consumer_that_raises_does_not_end_it() -> None:
    seen, told, done = [], [], asyncio.Event()

    def deliver(batch: list[int]) -> None:
        seen.extend(batch)
        if seen == [0, 1]:
            done.set()
        raise ValueError("a bug")

    inbox = Inbox(deliver, lambda batch, error: told.append(type(error)), batch_max=1)
    await asyncio.to_thread(lambda: [inbox.put(0), inbox.put(1)])
    await within(done.wait())
    await within(inbox.drained())
    assert told == [ValueError, ValueError]


async def test_close_releases_who_waits_and_delivers_nothing_more() -> None:
    consumer = Consumer(1)
    consumer.slow = True
    inbox = Inbox(consumer, messages_max=1)
    thread = threading.Thread(target=lambda: [inbox.put(number) for number in range(10)])
    thread.start()
    await within(consumer.done.wait())
    inbox.close()
    inbox.close()
    await within(asyncio.to_thread(thread.join))
    consumer.results[0].set_result(None)
    await within(inbox.drained())
    assert consumer.items == [0]


def test_putting_after_the_loop_has_ended_is_harmless() -> None:
    async def make() -> Inbox[int]:
        return Inbox(lambda batch: None)

    asyncio.run(make()).put(1)
