"""How many messages may leave in a second, for brokers that throw away what is more (AWS IoT Core). Pure."""

from __future__ import annotations

from typing import Final

AT_ONCE_SHARE: Final = 10  # a tenth of a second's messages may leave at once; the others as time passes


class Rate:
    """At most `per_s` messages in any one second, wherever it begins: what may leave at once and what a second brings
    add up to that. `per_s` is 2 or more; `now_s` is loop time."""

    def __init__(self, per_s: int) -> None:
        self.at_once = max(1, per_s // AT_ONCE_SHARE)
        self._each_s = per_s - self.at_once
        self._left, self._at_s = float(self.at_once), 0.0

    def __repr__(self) -> str:
        return f"Rate({self.at_once} at once and {self._each_s} a second, left={self._left:.1f})"

    def room(self, now_s: float) -> int:
        """So many may leave now."""
        self._left = min(self.at_once, self._left + max(0.0, now_s - self._at_s) * self._each_s)
        self._at_s = now_s
        return int(self._left)

    def leave(self, count: int) -> None:
        """So many do; no more than `room` has just said."""
        self._left -= count

    @property
    def wait_s(self) -> float:
        """Until the next one may leave, counted from the last `room`."""
        return max(0.0, 1 - self._left) / self._each_s
