"""Backoff: pauses after failures. Pace: a rate limit. Every package uses these two.

Exponential back-off with full jitter (Brooker, "Exponential Backoff And Jitter"); a pause can be ended early.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable

from uprotocol.tasks import wait_within


class Backoff:
    """The first wait is `min_ms`; each further one is twice as long, up to `max_ms`. `wake` ends a wait early, for
    example when a network is back. With `rng` each wait is random up to that length, so that many that failed together
    do not retry together."""

    def __init__(self, min_ms: int, max_ms: int, rng: random.Random | None = None) -> None:
        self._min_ms, self._max_ms = min_ms, max_ms
        self._rng = rng
        self._attempts = 0
        self._woken = asyncio.Event()

    @property
    def attempt(self) -> int:
        """Returns the number of the attempt that is not waited for yet, from 1."""
        return self._attempts + 1

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
        await wait_within(self._woken, pause_ms / 1000)


class Pace:
    """A token bucket: at most `per_s` units a second in the mean, and a second's units may go at once.

    With `at_once`, only so many may go at once, and no second, wherever it begins, has more than `per_s`.
    """

    def __init__(self, per_s: int, now: Callable[[], float], at_once: int | None = None) -> None:
        """`now`: loop time, seconds. `at_once`: less than `per_s`."""
        self.per_s, self._now = per_s, now
        self.at_once = per_s if at_once is None else at_once
        self._refill_per_s = per_s if at_once is None else per_s - at_once
        self._left, self._at = float(self.at_once), -math.inf

    def available(self) -> int:
        """Returns how many units may go now; 0 or less: none."""
        now = self._now()
        self._left = min(self.at_once, self._left + max(0.0, now - self._at) * self._refill_per_s)
        self._at = now
        return int(self._left)

    def take(self, units: int) -> None:
        """Count units that go now."""
        self._left -= units

    @property
    def wait_s(self) -> float:
        """Seconds until the next unit may go, counted from the last call of `available`."""
        return max(0.0, 1 - self._left) / self._refill_per_s

    async def spend(self, units: int) -> None:
        """Take these units, and wait until they are paid for. Several tasks may share one pace."""
        self.available()
        self.take(units)
        if self._left < 0:
            await asyncio.sleep(-self._left / self._refill_per_s)
