"""Calls to remote services: the limit of fresh calls, and that silent ones delay others only for a short time."""

from __future__ import annotations

import asyncio

from usubscription import remote
from usubscription.remote import FreshCall, FreshCalls


async def settled(*tasks: asyncio.Task[FreshCall]) -> list[bool]:
    for _ in range(3):
        await asyncio.sleep(0)
    return [task.done() for task in tasks]


async def test_calls_begin_in_order_and_each_ends_once() -> None:
    calls = FreshCalls()
    fresh = [await calls.begin() for _ in range(remote.FRESH_MAX)]
    waiting = [asyncio.ensure_future(calls.begin()) for _ in range(3)]
    assert await settled(*waiting) == [False] * 3
    fresh[0].end()
    fresh[0].end()
    assert await settled(*waiting) == [True, False, False]
    waiting[1].cancel()
    fresh[1].end()
    assert await settled(*waiting) == [True, True, True]
    for call in (*fresh, waiting[0].result(), waiting[2].result()):
        call.end()
    assert f"unlocked, value:{remote.FRESH_MAX}]" in repr(calls)


async def test_a_call_that_is_cancelled_when_it_may_begin_lets_the_next_begin() -> None:
    calls = FreshCalls()
    fresh = [await calls.begin() for _ in range(remote.FRESH_MAX)]
    waiting = asyncio.ensure_future(calls.begin())
    await settled(waiting)
    fresh[0].end()
    waiting.cancel()  # in the turn of the loop in which it may begin
    await settled(waiting)
    assert "unlocked, value:1]" in repr(calls)


async def test_a_silent_call_is_fresh_for_a_while_and_longer_if_nobody_answers() -> None:
    """Advances the clock of the event loop."""
    loop, calls = asyncio.get_running_loop(), FreshCalls()
    now, late = loop.time, 0.0
    loop.time = lambda: now() + late  # type: ignore[method-assign]
    try:
        for others_answer, fresh_s in ((True, remote.FRESH_MS / 1000), (False, remote.FRESH_SILENT_MS / 1000)):
            await calls.begin()
            began = late
            while f"value:{remote.FRESH_MAX}]" not in repr(calls):
                calls.answered_at = loop.time() if others_answer else 0.0
                late += 0.1
                await asyncio.sleep(0)
            assert fresh_s <= late - began < fresh_s + 2.0
    finally:
        del loop.time  # type: ignore[method-assign]
