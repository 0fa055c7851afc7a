"""Deadlines for what a plugin does in a test, which say what it was waiting for. None of them needs its cooperation: a
library that swallows a cancellation is left behind.

async test ---> limited(test, deadline) ---> the same test, which fails at its deadline with the awaits that it was in
open, close --> in_time(call, deadline_s) --> the same for one call
the end of the loop -> close_in_time(loop) -> stopped, if tasks that were cancelled go on
"""

from __future__ import annotations

import asyncio
import functools
import linecache
import logging
from collections.abc import Awaitable, Callable, Iterator
from types import CodeType, FrameType
from typing import Any, Final, TypeVar

import pytest

LEAVE_S: Final = 5.0  # for a test that is cancelled at its deadline to close what it opened
LOOKS: Final = 12  # every LEAVE_S, whether only tasks are left that were cancelled

T = TypeVar("T")
log = logging.getLogger(__name__)

AsyncTest = Callable[..., Awaitable[None]]


def limited(test: AsyncTest, deadline: Callable[..., float]) -> AsyncTest:
    """The same test, for pytest. `deadline` is called with its arguments, and answers seconds. Then the test is
    cancelled, and left behind if it goes on all the same: a plugin that swallows a cancellation must not hold up the
    tests that follow.

    Where pytest-timeout runs, too, its limit has to be longer: it can only tell that the event loop was idle.
    """

    @functools.wraps(test)
    async def run(*arguments: Any, **named: Any) -> None:
        return await in_time(test(*arguments, **named), deadline(*arguments, **named))

    return run


async def in_time(call: Awaitable[T], deadline_s: float, what: str = "") -> T:
    """What `call` answers or raises. It fails the test if that takes longer; the call is cancelled then, and left
    behind if it goes on for LEAVE_S all the same."""
    running = asyncio.ensure_future(call)
    try:
        await asyncio.wait({running}, timeout=deadline_s)
    except BaseException:  # we are cancelled
        running.cancel()
        raise
    if running.done():
        return running.result()
    waits = "\n".join(awaits(running)) or "    (it can't be seen)"
    running.cancel()
    await asyncio.wait({running}, timeout=LEAVE_S)
    left = "" if running.done() else f"\nIt swallowed its cancellation, and was left behind after {LEAVE_S:g} s."
    name = f"{what}: " if what else ""
    pytest.fail(f"{name}not finished after {deadline_s:g} s; it was waiting at\n{waits}{left}", pytrace=False)


def close_in_time(loop: asyncio.AbstractEventLoop, looks: int = LOOKS) -> None:
    """Who closes a loop cancels its tasks and waits until they have ended, for ever if one goes on. Called at the end
    of a test, this stops the loop if it stands so after LEAVE_S, which who closes it is told by a RuntimeError."""

    def look() -> None:
        left = [task for task in asyncio.all_tasks(loop) if not task.done()]
        if all(task.cancelling() for task in left):
            places = "\n".join(f"{task.get_name()}\n" + "\n".join(awaits(task)) for task in left)
            log.error("tasks that have swallowed their cancellation are left behind with their loop:\n%s", places)
            loop.stop()
        elif looks > 1:  # other fixtures are not through, or the loop lives on for further tests
            close_in_time(loop, looks - 1)

    loop.call_later(LEAVE_S, look)


def awaits(task: asyncio.Future[Any]) -> Iterator[str]:
    """The lines of code that a task is suspended at, the outermost first."""
    waiting: Any = task.get_coro() if isinstance(task, asyncio.Task) else None
    while waiting is not None:
        frame: FrameType | None = getattr(waiting, "cr_frame", None) or getattr(waiting, "gi_frame", None)
        if frame is not None:
            yield f"    {_place(frame.f_code, frame.f_lineno)}"
        waiting = getattr(waiting, "cr_await", None) or getattr(waiting, "gi_yieldfrom", None)


def _place(code: CodeType, line: int) -> str:
    return f"{code.co_filename}:{line} in {code.co_name}: {linecache.getline(code.co_filename, line).strip()}"
