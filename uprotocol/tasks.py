"""Tasks and events of the loop: waits for an event that end in time, and the end of tasks."""

from __future__ import annotations

import asyncio
from typing import Any


async def wait_until(event: asyncio.Event, at: float | None) -> bool:
    """Wait until `event` is set, but not beyond this loop time. Returns whether it was set by then."""
    try:
        async with asyncio.timeout_at(at):
            return await event.wait()
    except TimeoutError:
        return False


async def wait_within(event: asyncio.Event, seconds: float) -> bool:
    """Wait until `event` is set, `seconds` at most. Returns whether it was set by then."""
    return await wait_until(event, asyncio.get_running_loop().time() + seconds)


async def end(*tasks: asyncio.Future[Any] | None) -> None:
    """Cancel `tasks`, and wait until they have ended."""
    known = [task for task in tasks if task is not None]
    for task in known:
        task.cancel()
    await asyncio.gather(*known, return_exceptions=True)
