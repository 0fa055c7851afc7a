"""Backoff: pauses after failures. Pace: a rate limit. Every package uses these two.

Exponential back-off with full jitter (Brooker, "Exponential Backoff And Jitter"); a pause can be ended early.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable


class Backoff:
    """The first wait is `min_ms`; each further one is twice as long, up to `max_ms`. `wake` ends a wait early, for
    example when a network is back. With `rng` each wait is random up to that length, so that many that failed together
    do not retry together."""

    def __init__(self, min_ms: int, max_ms: int, rng: random.Random | None = None) -> None:
        self._min_ms, self._max_ms = min_ms, max_ms
        self._rng = rng
        self._attempts = 0
        self._woken = asyncio.Event()

    def __repr__(self) -> str:
        return f"Backoff(attempts={self._attempts})"

    def sibling(self) -> Backoff:
        """Returns a new Backoff with the same limits."""
        return Backoff(self._min_ms, self._max_ms, self._rng)

    def next_ms(self) -> int:
        """Returns how long to wait after one more failure."""
        ceiling = max(self._min_ms, min(self._max_ms, self._min_ms << min(self._attempts, 30)))
        self._attempts += 1
        return ceiling if self._rng is None else self._rng.randint(self._min_ms, ceiling)

    def reset(self) -> None:
        """Call it after a success: the next failure counts as the first."""
        self._attempts = 0

    def wake(self) -> None:
        """End the current wait; the next one is the shortest again."""
        self._attempts = 0
        self._woken.set()

    async def wait(self, at_most_ms: int | None = None) -> None:
        """Wait after one more failure, but not longer than `at_most_ms`."""
        pause_ms = self.next_ms()
        if at_most_ms is not None:
            pause_ms = min(pause_ms, at_most_ms)
        self._woken.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(pause_ms / 1000):
                await self._woken.wait()


class Pace:
    """At most `per_s` units a second on average; the units of one second may be spent at once."""

    def __init__(self, per_s: int, now: Callable[[], float]) -> None:
        """`now`: loop time, seconds."""
        self.per_s, self._now = per_s, now
        self._left, self._at = float(per_s), now()

    def __repr__(self) -> str:
        return f"Pace({self.per_s} a second, left={self._left:.0f})"

    async def spend(self, units: int) -> None:
        """Spend `units`, and wait until the average is kept again. Several tasks may share one pace."""
        now = self._now()
        self._left = min(self.per_s, self._left + (now - self._at) * self.per_s) - units
        self._at = now
        if self._left < 0:
            await asyncio.sleep(-self._left / self.per_s)
