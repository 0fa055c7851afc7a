"""Received messages: order, bounds, acknowledgement, and waiting threads."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, TypeVar

import pytest

from tests.history.world import virtually
from transports.arrivals import BATCH_BYTES_MAX, REDELIVERY_MS_MIN, SMALL_BYTES, Arrivals

DEADLINE_S = 10
T = TypeVar("T")


class Consumer:
    """Takes at once, or, if it is `slow`, when `release` is called; `wanted` items make `done`."""

    def __init__(self, wanted: int = 0) -> None:
        self.items: list[int] = []
        self.batches: list[int] = []
        self.results: list[asyncio.Future[None]] = []
        self.wanted, self.done = wanted, asyncio.Event()
        self.slow, self.handed = False, asyncio.Event()  # a batch was, that is being taken

    def __call__(self, batch: list[int]) -> Awaitable[None] | None:
        self.items += batch
        self.batches.append(len(batch))
        if len(self.items) >= self.wanted:
            self.done.set()
        if not self.slow:
            return None
        self.results.append(asyncio.get_running_loop().create_future())
        self.handed.set()
        return self.results[-1]

    def release(self) -> None:
        """Take all that was handed over, and at once from now on."""
        self.slow = False
        for result in self.results:
            result.set_result(None)


def opened(
    deliver: Callable[[list[int]], Awaitable[None] | None],
    taken: Callable[[list[int], BaseException | None], None] | None = None,
    **limits: Any,
) -> Arrivals[int]:
    arrivals = Arrivals(deliver, taken, **limits)
    arrivals.open()
    return arrivals


async def put_all(arrivals: Arrivals[int], items: Iterable[int], where: str, size_bytes: int = 0) -> None:
    """From a thread, or from this task."""
    if where == "thread":
        await asyncio.to_thread(lambda: [arrivals.put(item, size_bytes) for item in items])
        return
    for item in items:
        await arrivals.put_on_loop(item, size_bytes)


from_both = pytest.mark.parametrize("where", ["thread", "loop"])


async def within(what: Awaitable[T]) -> T:
    return await asyncio.wait_for(what, DEADLINE_S)


@from_both
async def test_everything_comes_once_in_order_and_in_batches(where: str) -> None:
    consumer = Consumer(5_000)
    arrivals = opened(consumer, batch_max=100)
    await within(put_all(arrivals, range(5_000), where))
    await within(consumer.done.wait())
    await within(arrivals.drained())
    assert consumer.items == list(range(5_000))
    assert max(consumer.batches) <= 100


async def test_many_threads_keep_each_their_order() -> None:
    consumer = Consumer(4_000)
    arrivals = opened(consumer, messages_max=64)

    def put(first: int) -> None:
        for number in range(1_000):
            arrivals.put(first + number)

    await within(asyncio.gather(*(asyncio.to_thread(put, first) for first in (0, 10_000, 20_000, 30_000))))
    await within(consumer.done.wait())
    for first in (0, 10_000, 20_000, 30_000):
        assert [item for item in consumer.items if first <= item < first + 1_000] == list(range(first, first + 1_000))


@from_both
async def test_who_puts_waits_while_it_is_full(where: str) -> None:
    consumer = Consumer(10)
    consumer.slow = True
    arrivals = opened(consumer, messages_max=10, batch_max=5)
    putting = asyncio.ensure_future(put_all(arrivals, range(100), where))
    await within(consumer.done.wait())
    await asyncio.sleep(0.05)
    assert not putting.done(), "ten are being taken, and nobody has taken one"
    assert consumer.items == list(range(10))
    consumer.release()
    await within(putting)
    await within(arrivals.drained())
    assert consumer.items == list(range(100))


@from_both
async def test_large_items_are_bounded_in_bytes(where: str) -> None:
    consumer = Consumer(3)
    consumer.slow = True
    arrivals = opened(consumer, bytes_max=20_000, batch_max=1)
    putting = asyncio.ensure_future(put_all(arrivals, range(1_000, 1_010), where, 10_000))
    while len(consumer.results) < 2:  # noqa: ASYNC110 - one batch after the other
        await asyncio.sleep(0.001)
    await asyncio.sleep(0.05)
    assert not putting.done()
    assert consumer.items == [1_000, 1_001], "two of 10,000 bytes fill it"
    arrivals_of_small = opened(Consumer(), bytes_max=20_000)
    await within(put_all(arrivals_of_small, range(100), where, SMALL_BYTES))
    consumer.release()
    await within(putting)
    await within(arrivals.drained())
    assert consumer.items == list(range(1_000, 1_010))
    assert arrivals.octets == 0
    assert not arrivals._capacity.sizes


@from_both
async def test_there_is_more_room_while_what_came_is_held(where: str) -> None:
    consumer = Consumer(10)
    consumer.slow = True
    arrivals = opened(consumer, messages_max=10, held_messages_max=50, batch_max=5)
    putting = asyncio.ensure_future(put_all(arrivals, range(100), where))
    async with asyncio.timeout(DEADLINE_S):
        while arrivals.undelivered < 40:  # noqa: ASYNC110 - filled from another thread
            await asyncio.sleep(0.01)
    await asyncio.sleep(0.05)
    assert not putting.done()
    assert arrivals.undelivered == 40
    assert consumer.items == list(range(10)), "no more than before are handed over"
    consumer.release()
    await within(putting)
    await within(arrivals.drained())
    assert consumer.items == list(range(100))


@from_both
async def test_results_are_reported_in_order_of_arrival(where: str) -> None:
    consumer, results, all_reported = Consumer(3), [], asyncio.Event()
    consumer.slow = True

    def taken(batch: list[int], error: BaseException | None) -> None:
        results.append((batch, error))
        if len(results) == 3:
            all_reported.set()

    arrivals = opened(consumer, taken, batch_max=1)
    await within(put_all(arrivals, range(3), where))
    await within(consumer.done.wait())
    failure = RuntimeError("disk full")
    consumer.results[2].set_result(None)
    consumer.results[1].set_exception(failure)
    await asyncio.sleep(0)
    assert results == [], "the first is still being taken"
    consumer.results[0].set_result(None)
    await within(all_reported.wait())
    assert results == [([0], None), ([1], failure), ([2], None)]


@from_both
async def test_a_consumer_that_raises_does_not_end_it(where: str) -> None:
    seen, results, done = [], [], asyncio.Event()

    def deliver(batch: list[int]) -> None:
        seen.extend(batch)
        if seen == [0, 1]:
            done.set()
        raise ValueError("a bug")

    arrivals = opened(deliver, lambda batch, error: results.append(type(error)), batch_max=1)
    await put_all(arrivals, [0, 1], where)
    await within(done.wait())
    await within(arrivals.drained())
    assert results == [ValueError, ValueError]


async def test_close_releases_who_waits_and_delivers_nothing_more() -> None:
    consumer = Consumer(1)
    consumer.slow = True
    arrivals = opened(consumer, messages_max=1)
    thread = threading.Thread(target=lambda: [arrivals.put(number) for number in range(10)])
    thread.start()
    await within(consumer.done.wait())
    arrivals.close()
    arrivals.close()
    await within(asyncio.to_thread(thread.join))
    consumer.results[0].set_result(None)
    await within(arrivals.drained())
    assert consumer.items == [0]


async def test_close_releases_tasks_that_wait_and_keeps_nothing() -> None:
    consumer = Consumer(1)
    consumer.slow = True
    arrivals = opened(consumer, messages_max=1, bytes_max=10_000)
    putting = [asyncio.ensure_future(put_all(arrivals, range(10), "loop", 10_000)) for _ in range(2)]
    await within(consumer.done.wait())
    arrivals.close()
    await within(asyncio.gather(*putting))
    assert not arrivals.undelivered
    assert (arrivals.octets, arrivals._capacity.sizes, arrivals._capacity.waiters) == (0, {}, set())
    assert consumer.items == [0]


async def test_a_task_that_waits_may_be_cancelled() -> None:
    consumer = Consumer(1)
    consumer.slow = True
    arrivals = opened(consumer, messages_max=1)
    putting = asyncio.ensure_future(put_all(arrivals, range(10), "loop"))
    await within(consumer.done.wait())
    putting.cancel()
    await asyncio.gather(putting, return_exceptions=True)
    assert not arrivals._capacity.waiters
    consumer.results[0].set_result(None)
    consumer.slow = False
    await within(put_all(arrivals, [10], "loop"))
    await within(arrivals.drained())
    assert consumer.items == [0, 10]


async def test_tasks_and_threads_may_share_one() -> None:
    consumer = Consumer(2_000)
    arrivals = opened(consumer, messages_max=16)
    await within(
        asyncio.gather(put_all(arrivals, range(1_000), "loop"), put_all(arrivals, range(1_000, 2_000), "thread"))
    )
    await within(consumer.done.wait())
    for first in (0, 1_000):
        assert [item for item in consumer.items if first <= item < first + 1_000] == list(range(first, first + 1_000))


async def test_a_consumer_that_raises_keeps_its_place_in_the_order() -> None:
    results: list[tuple[list[int], type]] = []
    first: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def deliver(batch: list[int]) -> Awaitable[None] | None:
        if batch == [0]:
            return first
        raise ValueError("a bug")

    arrivals = opened(deliver, lambda batch, error: results.append((batch, type(error))), batch_max=1, redeliver=True)
    arrivals.put_now([0, 1])
    await asyncio.sleep(0.01)
    assert results == [], "the first is still being taken"
    first.set_result(None)
    await within(arrivals.drained())
    assert results == [([0], type(None)), ([1], ValueError)], "and it does not come again: it would raise again"


# Handed over again.


class Refusing:
    """Refuses the first `times` batches that begin with `item`, after a moment."""

    def __init__(self, item: int, times: int) -> None:
        self.item, self.times = item, times
        self.batches: list[list[int]] = []
        self.at: list[float] = []

    async def __call__(self, batch: list[int]) -> None:
        self.batches.append(batch)
        self.at.append(asyncio.get_running_loop().time())
        await asyncio.sleep(0)
        if batch[0] == self.item and self.times:
            self.times -= 1
            raise RuntimeError("disk full")


async def test_what_was_not_taken_comes_again_in_order_with_all_behind_it() -> None:
    taken: list[int] = []
    consumer = Refusing(2, times=3)
    arrivals = opened(consumer, lambda batch, error: taken.extend(batch), batch_max=2, redeliver=True)
    arrivals.put_now(range(6))
    await within(arrivals.drained())
    assert taken == list(range(6)), "each is taken once, in order"
    assert consumer.batches == [[0, 1], *[[2, 3], [4, 5]] * 4]
    pauses = [later - before for before, later in zip(consumer.at[1::2], consumer.at[3::2], strict=False)]
    least = [REDELIVERY_MS_MIN / 1000 * 2**number for number in range(3)]  # a busy machine makes any of them longer
    assert all(pause >= shortest for pause, shortest in zip(pauses, least, strict=True)), "twice as long each time"


def test_what_comes_meanwhile_does_not_shorten_the_pause_of_what_comes_again() -> None:
    """A drain is scheduled when the failure is noticed, as there is more in the queue."""
    handed: list[float] = []

    async def refuse() -> None:
        raise RuntimeError("disk full")

    async def run() -> None:
        loop = asyncio.get_running_loop()

        def deliver(_batch: list[int]) -> Awaitable[None] | None:
            handed.append(loop.time())
            return refuse() if len(handed) < 1_000 else None  # else a loop that never pauses would end no test

        arrivals = opened(deliver, batch_max=1, redeliver=True, gathers=False)
        arrivals.put_now(range(1_000))
        for item in range(1_000, 2_000):
            await asyncio.sleep(0.001)
            arrivals.put_now([item])
        arrivals.close()

    virtually(run())
    pauses = [later - before for before, later in itertools.pairwise(sorted(set(handed)))]
    assert pauses == pytest.approx([REDELIVERY_MS_MIN / 1000 * 2**number for number in range(7)])
    assert len(handed) <= 4 * (len(pauses) + 1), "what follows a failure is handed over until that is noticed"


async def test_after_close_nothing_comes_again_and_what_was_not_taken_is_answered() -> None:
    consumer = Refusing(0, times=1_000)
    arrivals = opened(consumer, batch_max=2, redeliver=True)
    arrivals.put_now(range(3), [10_000] * 3)
    await asyncio.sleep(0)
    assert arrivals.octets == 30_000
    assert arrivals.close() == [0, 1, 2]
    await asyncio.sleep(0.02)
    assert consumer.batches == [[0, 1]]
    assert (arrivals.octets, arrivals.waiting) == (0, 0)


async def test_what_was_not_taken_waits_while_it_is_paused() -> None:
    consumer = Consumer()
    consumer.slow = True
    arrivals = opened(consumer, batch_max=2, redeliver=True)
    arrivals.put_now(range(4))
    await asyncio.sleep(0.01)
    assert consumer.items == [0, 1, 2, 3]
    consumer.results[0].set_result(None)
    await asyncio.sleep(0.01)
    arrivals.pause()
    assert (arrivals.waiting, arrivals.undelivered) == (2, 2)
    arrivals.put_now([4])
    consumer.results[1].set_result(None)  # too late: it was on a connection that is gone
    await asyncio.sleep(0.02)
    assert consumer.items == [0, 1, 2, 3]
    consumer.slow = False
    arrivals.resume()
    await within(arrivals.drained())
    assert consumer.items == [0, 1, 2, 3, 2, 3, 4]


async def test_finish_takes_no_more_and_waits_for_what_is_there_but_not_for_ever() -> None:
    consumer = Consumer()
    consumer.slow = True
    arrivals = opened(consumer, redeliver=True)
    arrivals.put_now([1])
    await asyncio.sleep(0.01)
    finishing = asyncio.ensure_future(arrivals.finish(within_s=DEADLINE_S))
    await asyncio.sleep(0)
    arrivals.put_now([2])
    consumer.results[0].set_result(None)
    assert await within(finishing) == []
    assert consumer.items == [1]
    arrivals.open()
    arrivals.put_now([3])
    await asyncio.sleep(0.01)
    assert await within(arrivals.finish(within_s=0.01)) == [3]


# Pressure.


async def test_pressure_is_reported_and_nothing_waits() -> None:
    reports: list[bool] = []
    consumer = Consumer()
    consumer.slow = True
    arrivals = opened(consumer, messages_max=10, bytes_max=20_000, batch_max=2, pressed=reports.append)
    arrivals.put_now(range(9))
    assert reports == []
    arrivals.put_now(range(9, 12))
    assert reports == [True]
    assert arrivals.is_pressed
    await asyncio.sleep(0.01)
    assert consumer.items == list(range(12)), "all of it is handed over: what a listener waits for may be behind"
    for result in consumer.results[:3]:
        result.set_result(None)
    await asyncio.sleep(0.01)
    assert reports == [True], "six are left"
    consumer.results[3].set_result(None)
    await asyncio.sleep(0.01)
    assert reports == [True, False]
    arrivals.count(20_000)
    assert reports == [True, False, True], "what is held elsewhere counts as well"
    arrivals.count(-20_000, messages=6)
    arrivals.count(0, messages=-6)
    assert reports == [True, False, True, False]


def test_putting_after_the_loop_has_ended_is_harmless() -> None:
    async def make() -> Arrivals[int]:
        return opened(lambda batch: None)

    asyncio.run(make()).put(1)


@from_both
async def test_a_batch_is_bounded_in_bytes(where: str) -> None:
    consumer = Consumer(wanted=5)
    arrivals = opened(consumer, gathers=False)
    arrivals.put_now([1, 2, 3], [BATCH_BYTES_MAX // 2] * 3)
    await put_all(arrivals, [4], where, 2 * BATCH_BYTES_MAX)
    await put_all(arrivals, [5], where)
    await within(consumer.done.wait())
    assert consumer.items == [1, 2, 3, 4, 5]
    assert consumer.batches in ([2, 2, 1], [2, 1, 1, 1])  # from a thread the third may leave alone


async def test_while_a_batch_is_being_taken_the_loop_is_not_woken_for_each_that_follows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("transports.arrivals.LULL_S", DEADLINE_S)  # so that nothing but the consumer ends it
    consumer = Consumer(wanted=4)
    consumer.slow = True
    arrivals = opened(consumer)
    await put_all(arrivals, [0], "thread")
    await within(consumer.handed.wait())
    await put_all(arrivals, [1, 2, 3], "thread")
    for _ in range(10):
        await asyncio.sleep(0)
    assert (consumer.items, arrivals.undelivered) == ([0], 3)
    consumer.release()
    async with asyncio.timeout(DEADLINE_S / 2):
        await consumer.done.wait()
    assert consumer.batches == [1, 3]
    await put_all(arrivals, [4], "thread")  # taken at once: nothing waits
    async with asyncio.timeout(DEADLINE_S / 2):
        await arrivals.drained()
    assert consumer.items == [0, 1, 2, 3, 4]


async def test_what_follows_a_batch_that_is_not_taken_is_handed_over_all_the_same() -> None:
    consumer = Consumer(wanted=3)
    consumer.slow = True
    arrivals = opened(consumer)
    for number in range(3):
        await put_all(arrivals, [number], "thread")
    async with asyncio.timeout(DEADLINE_S):
        await consumer.done.wait()
    assert consumer.items == [0, 1, 2]
    arrivals.close()
    consumer.release()
    arrivals.open()
    await put_all(arrivals, [3], "thread")
    async with asyncio.timeout(DEADLINE_S):
        await arrivals.drained()
    assert consumer.items == [0, 1, 2, 3]
