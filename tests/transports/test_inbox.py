"""The inbox: order, bounds, acknowledgement, and threads that wait."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Iterable

import pytest

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


async def put_all(inbox: Inbox[int], items: Iterable[int], where: str, size_bytes: int = 0) -> None:
    """From a thread, or from this task."""
    if where == "thread":
        await asyncio.to_thread(lambda: [inbox.put(item, size_bytes) for item in items])
        return
    for item in items:
        await inbox.put_on_loop(item, size_bytes)


from_both = pytest.mark.parametrize("where", ["thread", "loop"])


async def within(what: Awaitable[object]) -> None:
    await asyncio.wait_for(what, DEADLINE_S)


@from_both
async def test_everything_comes_once_in_order_and_in_batches(where: str) -> None:
    consumer = Consumer(5_000)
    inbox = Inbox(consumer, batch_max=100)
    await within(put_all(inbox, range(5_000), where))
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


@from_both
async def test_who_puts_waits_while_it_is_full(where: str) -> None:
    consumer = Consumer(10)
    consumer.slow = True
    inbox = Inbox(consumer, messages_max=10, batch_max=5)
    putting = asyncio.ensure_future(put_all(inbox, range(100), where))
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


@from_both
async def test_large_items_are_bounded_in_bytes(where: str) -> None:
    consumer = Consumer(3)
    consumer.slow = True
    inbox = Inbox(consumer, bytes_max=20_000, batch_max=1)
    putting = asyncio.ensure_future(put_all(inbox, range(1_000, 1_010), where, 10_000))
    while len(consumer.results) < 2:  # noqa: ASYNC110 - one batch after the other
        await asyncio.sleep(0.001)
    await asyncio.sleep(0.05)
    assert not putting.done()
    assert consumer.items == [1_000, 1_001], "two of 10,000 bytes fill it"
    inbox_of_small: Inbox[int] = Inbox(Consumer(), bytes_max=20_000)
    await within(put_all(inbox_of_small, range(100), where, SMALL_BYTES))
    consumer.slow = False
    for result in consumer.results:
        result.set_result(None)
    await within(putting)
    await within(inbox.drained())
    assert consumer.items == list(range(1_000, 1_010))
    assert inbox._bytes == 0
    assert not inbox._sizes


@from_both
async def test_there_is_more_room_while_what_came_is_held(where: str) -> None:
    consumer = Consumer(10)
    consumer.slow = True
    inbox = Inbox(consumer, messages_max=10, held_messages_max=50, batch_max=5)
    putting = asyncio.ensure_future(put_all(inbox, range(100), where))
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


@from_both
async def test_taken_is_told_in_order_of_arrival_with_what_became_of_it(where: str) -> None:
    consumer, told, all_told = Consumer(3), [], asyncio.Event()
    consumer.slow = True

    def taken(batch: list[int], error: BaseException | None) -> None:
        told.append((batch, error))
        if len(told) == 3:
            all_told.set()

    inbox = Inbox(consumer, taken, batch_max=1)
    await within(put_all(inbox, range(3), where))
    await within(consumer.done.wait())
    failure = RuntimeError("disk full")
    consumer.results[2].set_result(None)
    consumer.results[1].set_exception(failure)
    await asyncio.sleep(0)
    assert told == [], "the first is still being taken"
    consumer.results[0].set_result(None)
    await within(all_told.wait())
    assert told == [([0], None), ([1], failure), ([2], None)]


@from_both
async def test_a_consumer_that_raises_does_not_end_it(where: str) -> None:
    seen, told, done = [], [], asyncio.Event()

    def deliver(batch: list[int]) -> None:
        seen.extend(batch)
        if seen == [0, 1]:
            done.set()
        raise ValueError("a bug")

    inbox = Inbox(deliver, lambda batch, error: told.append(type(error)), batch_max=1)
    await put_all(inbox, [0, 1], where)
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


async def test_close_releases_tasks_that_wait_and_keeps_nothing() -> None:
    consumer = Consumer(1)
    consumer.slow = True
    inbox: Inbox[int] = Inbox(consumer, messages_max=1, bytes_max=10_000)
    putting = [asyncio.ensure_future(put_all(inbox, range(10), "loop", 10_000)) for _ in range(2)]
    await within(consumer.done.wait())
    inbox.close()
    await within(asyncio.gather(*putting))
    assert not inbox._items
    assert (inbox._bytes, inbox._sizes, inbox._waiters) == (0, {}, set())
    assert consumer.items == [0]


async def test_a_task_that_waits_may_be_cancelled() -> None:
    consumer = Consumer(1)
    consumer.slow = True
    inbox: Inbox[int] = Inbox(consumer, messages_max=1)
    putting = asyncio.ensure_future(put_all(inbox, range(10), "loop"))
    await within(consumer.done.wait())
    putting.cancel()
    await asyncio.gather(putting, return_exceptions=True)
    assert not inbox._waiters
    consumer.results[0].set_result(None)
    consumer.slow = False
    await within(put_all(inbox, [10], "loop"))
    await within(inbox.drained())
    assert consumer.items == [0, 10]


async def test_tasks_and_threads_may_share_one() -> None:
    consumer = Consumer(2_000)
    inbox: Inbox[int] = Inbox(consumer, messages_max=16)
    await within(asyncio.gather(put_all(inbox, range(1_000), "loop"), put_all(inbox, range(1_000, 2_000), "thread")))
    await within(consumer.done.wait())
    for first in (0, 1_000):
        assert [item for item in consumer.items if first <= item < first + 1_000] == list(range(first, first + 1_000))


def test_putting_after_the_loop_has_ended_is_harmless() -> None:
    async def make() -> Inbox[int]:
        return Inbox(lambda batch: None)

    asyncio.run(make()).put(1)
