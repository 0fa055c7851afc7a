"""Calls to remote services: how many are fresh at once, and that the silent ones hold up the others shortly."""

from __future__ import annotations

import asyncio

from usubscription import places
from usubscription.places import Place, Places


async def settled(*tasks: asyncio.Task[Place]) -> list[bool]:
    for _ in range(3):
        await asyncio.sleep(0)
    return [task.done() for task in tasks]


async def test_first_come_first_served_and_each_gives_back_once() -> None:
    here = Places()
    taken = [await here.take() for _ in range(places.FRESH_MAX)]
    waiting = [asyncio.ensure_future(here.take()) for _ in range(3)]
    assert await settled(*waiting) == [False] * 3
    taken[0].give_back()
    taken[0].give_back()
    assert await settled(*waiting) == [True, False, False]
    waiting[1].cancel()
    taken[1].give_back()
    assert await settled(*waiting) == [True, True, True]
    for place in (*taken, waiting[0].result(), waiting[2].result()):
        place.give_back()
    assert f"free={places.FRESH_MAX}, waiting=0" in repr(here)


async def test_one_that_is_cancelled_with_its_place_gives_it_back() -> None:
    here = Places()
    taken = [await here.take() for _ in range(places.FRESH_MAX)]
    waiting = asyncio.ensure_future(here.take())
    await settled(waiting)
    taken[0].give_back()
    waiting.cancel()  # on the turn on which it has got it
    await settled(waiting)
    assert "free=1, waiting=0" in repr(here)


async def test_a_silent_call_is_fresh_for_a_while_and_longer_where_nobody_answers() -> None:
    """By the loop's own clock, which is turned forward here."""
    loop, here = asyncio.get_running_loop(), Places()
    now, late = loop.time, 0.0
    loop.time = lambda: now() + late  # type: ignore[method-assign]
    try:
        for others_answer, fresh_s in ((True, places.FRESH_MS / 1000), (False, places.FRESH_SILENT_MS / 1000)):
            await here.take()
            began = late
            while f"free={places.FRESH_MAX}" not in repr(here):
                here.answered_at = loop.time() if others_answer else 0.0
                late += 0.1
                await asyncio.sleep(0)
            assert fresh_s <= late - began < fresh_s + 2.0
    finally:
        del loop.time  # type: ignore[method-assign]
