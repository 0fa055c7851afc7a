"""A deadline for an asynchronous test, which says what the test was waiting for.

async test ---> limited(test, deadline) ---> the same test, which fails at its deadline with the awaits that it was in
"""

from __future__ import annotations

import asyncio
import functools
import linecache
from collections.abc import Awaitable, Callable, Iterator
from types import CodeType, FrameType
from typing import Any, Final

import pytest

LEAVE_S: Final = 5.0  # for a test that is cancelled at its deadline to close what it opened

AsyncTest = Callable[..., Awaitable[None]]


def limited(test: AsyncTest, deadline: Callable[..., float]) -> AsyncTest:
    """The same test, for pytest. `deadline` is called with its arguments, and answers seconds. Then the test is
    cancelled, and left behind if it goes on all the same: a plugin that swallows a cancellation must not hold up the
    tests that follow.

    Where pytest-timeout runs, too, its limit has to be longer: it can only tell that the event loop was idle.
    """

    @functools.wraps(test)
    async def run(*arguments: Any, **named: Any) -> None:
        deadline_s = deadline(*arguments, **named)
        running = asyncio.ensure_future(test(*arguments, **named))
        await asyncio.wait({running}, timeout=deadline_s)
        if running.done():
            return running.result()
        waits = "\n".join(awaits(running)) or "    (it can't be seen)"
        running.cancel()
        await asyncio.wait({running}, timeout=LEAVE_S)
        left = "" if running.done() else f"\nIt swallowed its cancellation, and was left behind after {LEAVE_S:g} s."
        pytest.fail(f"not finished after {deadline_s:g} s; it was waiting at\n{waits}{left}", pytrace=False)

    return run


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
