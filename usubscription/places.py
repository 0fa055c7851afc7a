"""How many calls to remote services may be fresh at once.

take -> a free place, or behind those who wait -> Place -> given back: answered, or silent for FRESH_MS -> the next one
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from typing import Final

# calls just made, to all services together, that nobody has answered: half of what one caller may have waiting for a
# network (express.messages_max), since audits and others ask, too. Beyond that they would be refused, one by one
FRESH_MAX: Final = 512
# then a call is fresh no more: a service that is silent keeps others waiting so long ...
FRESH_MS: Final = 1_000
FRESH_SILENT_MS: Final = 10_000  # ... or longer, while nobody at all answers: the network may be away


class Places:
    """Room for FRESH_MAX fresh calls, whose first come is first served. A call is fresh until it is answered, or for
    FRESH_MS, so a service that is silent holds up the others for that long only."""

    def __init__(self) -> None:
        self._free = FRESH_MAX
        self._waiting: deque[asyncio.Future[None]] = deque()
        self.answered_at = -math.inf  # loop time at which somebody has answered

    def __repr__(self) -> str:
        return f"Places(free={self._free}, waiting={len(self._waiting)})"

    async def take(self) -> Place:
        if self._free:
            self._free -= 1
        else:
            mine: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append(mine)
            try:
                await mine
            except asyncio.CancelledError:
                if mine.done() and not mine.cancelled():
                    self.give_back()
                raise
        return Place(self)

    def give_back(self) -> None:
        """To the next one that waits."""
        while self._waiting:
            following = self._waiting.popleft()
            if not following.done():
                following.set_result(None)
                return
        self._free += 1


class Place:
    """Of one call."""

    def __init__(self, places: Places) -> None:
        self._places, self._loop = places, asyncio.get_running_loop()
        self._taken_at = self._loop.time()
        self._timer: asyncio.TimerHandle | None = self._loop.call_later(FRESH_MS / 1000, self._look)

    def _look(self) -> None:
        now = self._loop.time()
        others_are_answered = now - self._places.answered_at < FRESH_MS / 1000
        if others_are_answered or now - self._taken_at >= FRESH_SILENT_MS / 1000:
            self.give_back()
        else:
            self._timer = self._loop.call_later(FRESH_MS / 1000, self._look)

    def give_back(self) -> None:
        """May be called twice."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
            self._places.give_back()
