"""How fast something is tried: Backoff after failures, Pace while all is well. The one of each in the house.

Exponential back-off with full jitter (Brooker, "Exponential Backoff And Jitter"), that can be cut short.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable


class Backoff:
    """Waits of `min_ms` at first, twice as long each time, up to `max_ms`; `wake` ends a wait early, for instance when
    a network is back. With `rng` each wait is drawn from what it may be, so that many who failed together don't try
    again together."""

    def __init__(self, min_ms: int, max_ms: int, rng: random.Random | None = None) -> None:
        self._min_ms, self._max_ms = min_ms, max_ms
        self._rng = rng
        self._attempts = 0
        self._woken = asyncio.Event()

    def __repr__(self) -> str:
        return f"Backoff(attempts={self._attempts})"

    def sibling(self) -> Backoff:
        """Another one with the same limits."""
        return Backoff(self._min_ms, self._max_ms, self._rng)

    def next_ms(self) -> int:
        """How long to wait after one more failure."""
        ceiling = max(self._min_ms, min(self._max_ms, self._min_ms << min(self._attempts, 30)))
        self._attempts += 1
        return ceiling if self._rng is None else self._rng.randint(self._min_ms, ceiling)

    def reset(self) -> None:
        """It went well: the next failure is the first one."""
        self._attempts = 0

    def wake(self) -> None:
        """End the wait that is under way, and begin again with the shortest."""
        self._attempts = 0
        self._woken.set()

    async def wait(self, at_most_ms: int | None = None) -> None:
        """Wait after one more failure, `at_most_ms` where that is less."""
        pause_ms = self.next_ms()
        if at_most_ms is not None:
            pause_ms = min(pause_ms, at_most_ms)
        self._woken.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(pause_ms / 1000):
                await self._woken.wait()


class Pace:
    """At most so many units a second in the mean; what a second allows may go at once."""

    def __init__(self, per_s: int, now: Callable[[], float]) -> None:
        """`now`: loop time, seconds."""
        self.per_s, self._now = per_s, now
        self._left, self._at = float(per_s), now()

    def __repr__(self) -> str:
        return f"Pace({self.per_s} a second, left={self._left:.0f})"

    async def spend(self, units: int) -> None:
        """Wait for as long as these units are too many. Several may share one pace."""
        now = self._now()
        self._left = min(self.per_s, self._left + (now - self._at) * self.per_s) - units
        self._at = now
        if self._left < 0:
            await asyncio.sleep(-self._left / self.per_s)
