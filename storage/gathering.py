"""For how many jobs a worker waits before it works: as many as a wait has brought, and for no longer than a window.

worker: something has come -> wanted(): that many, or a look to the end of the window -> took(): what came of it

One commit for five messages costs the disk little more than one for a single message. But a wait that brings nothing
is lost time, above all for a sender that waits for each answer before it sends on, or has only so many under way: all
that it can send is there at once, and whoever waits on slows it. So a wait ends as soon as there is as much as the
last look has brought, and only every so often one goes on to the end, to see whether more would come.
"""

from __future__ import annotations

from typing import Final

LOOK_MIN: Final = 8  # turns from one look to the next where looks bring something ...
LOOK_MAX: Final = 1_024  # ... and where they don't: a window lost in so many turns is not felt
WHATEVER_COMES: Final = 1 << 30


class Gathering:
    """Used by one worker."""

    def __init__(self, window_ms: float, enough: int) -> None:
        """No job waits longer than `window_ms`, and nothing is waited for where there is `enough`, in the measure of
        the worker."""
        self.window_s, self.enough = window_ms / 1_000, enough
        self._expected = 1  # jobs that a wait brings, with those that were there: 1, and nothing is waited for
        self._every = self._left = LOOK_MIN  # turns: from look to look, and until the next one
        self._is_look = False

    def __repr__(self) -> str:
        return f"Gathering(expected={self._expected}, looks every {self._every})"

    def wanted(self, *, is_first: bool) -> int:
        """Jobs to wait for. `is_first`: the worker was idle when the first of them came. Looks begin there, if it ever
        is, so that one sees a burst from its beginning."""
        self._is_look = self._left <= 0 and (is_first or self._left <= -LOOK_MIN)
        return WHATEVER_COMES if self._is_look else self._expected

    def took(self, jobs: int, *, waited: bool, in_vain: bool) -> None:
        """A turn begins with so many jobs. `waited`: for more than were there. `in_vain`: the window ended before there
        were as many as wanted, or enough."""
        self._left -= 1
        if self._is_look and waited:
            self._every = LOOK_MIN if jobs > self._expected else min(2 * self._every, LOOK_MAX)
            self._left = self._every
            self._expected = jobs if jobs > self._expected else self._less(jobs)
        elif in_vain:
            self._expected = self._less(jobs)

    def _less(self, jobs: int) -> int:
        return max(1, (self._expected + jobs) // 2)
