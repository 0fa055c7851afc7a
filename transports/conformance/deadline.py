"""Deadlines for calls of a plugin in a test. They report what a call was waiting for, and leave a library behind that
swallows a cancellation.

async test ---> limited(test, deadline) ---> the same test, which fails at its deadline with the awaits that it was in
open, close --> in_time(call, deadline_s) --> the same for one call
the end of the loop -> close_in_time(loop) -> stopped, if cancelled tasks go on
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
CHECKS: Final = 12  # each after LEAVE_S, whether only cancelled tasks are left

T = TypeVar("T")
log = logging.getLogger(__name__)

AsyncTest = Callable[..., Awaitable[None]]


def limited(test: AsyncTest, deadline: Callable[..., float]) -> AsyncTest:
    """The same test, for pytest, cancelled after `deadline(arguments)` seconds. A test that goes on is left behind: a
    plugin that swallows a cancellation must not delay the following tests.

    The limit of pytest-timeout must be longer, since it can only report that the event loop was idle.
    """

    @functools.wraps(test)
    async def run(*arguments: Any, **named: Any) -> None:
        return await in_time(test(*arguments, **named), deadline(*arguments, **named))

    return run


async def in_time(call: Awaitable[T], deadline_s: float, what: str = "") -> T:
    """Return the result of `call`, or raise its exception. After `deadline_s` the test fails and the call is cancelled;
    if it goes on for LEAVE_S, it is left behind."""
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


def close_in_time(loop: asyncio.AbstractEventLoop, checks: int = CHECKS) -> None:
    """Closing a loop cancels its tasks and waits for them, for ever if one swallows the cancellation. Called at the end
    of a test, this stops such a loop after LEAVE_S, and the closing call raises RuntimeError."""

    def check() -> None:
        left = [task for task in asyncio.all_tasks(loop) if not task.done()]
        if all(task.cancelling() for task in left):
            positions = "\n".join(f"{task.get_name()}\n" + "\n".join(awaits(task)) for task in left)
            log.error("tasks that have swallowed their cancellation are left behind with their loop:\n%s", positions)
            loop.stop()
        elif checks > 1:  # other fixtures are not finished, or the loop is used for further tests
            close_in_time(loop, checks - 1)

    loop.call_later(LEAVE_S, check)


def awaits(task: asyncio.Future[Any]) -> Iterator[str]:
    """The lines of code where a task is suspended, the outermost first."""
    waiting: Any = task.get_coro() if isinstance(task, asyncio.Task) else None
    while waiting is not None:
        frame: FrameType | None = getattr(waiting, "cr_frame", None) or getattr(waiting, "gi_frame", None)
        if frame is not None:
            yield f"    {_position(frame.f_code, frame.f_lineno)}"
        waiting = getattr(waiting, "cr_await", None) or getattr(waiting, "gi_yieldfrom", None)


def _position(code: CodeType, line: int) -> str:
    return f"{code.co_filename}:{line} in {code.co_name}: {linecache.getline(code.co_filename, line).strip()}"
