"""How long something takes: a histogram, for the metrics."""

from __future__ import annotations

from bisect import bisect_left
from itertools import accumulate
from typing import Final

# upper bounds of the buckets, rising: from a write into the cache of a good disk to one that hangs
BOUNDS_S: Final = (0.000_5, 0.001, 0.002_5, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)


class Durations:
    """Counts durations by their size."""

    def __init__(self) -> None:
        self._counts = [0] * (len(BOUNDS_S) + 1)  # the last one has no bound
        self.sum_s = 0.0

    def __repr__(self) -> str:
        return f"Durations({sum(self._counts)} of {self.sum_s:.3f} s)"

    def add(self, seconds: float) -> None:
        self._counts[bisect_left(BOUNDS_S, seconds)] += 1
        self.sum_s += seconds

    def buckets(self) -> list[tuple[str, float]]:
        """Returns each upper bound as Prometheus writes it, and how many durations were not longer."""
        names = [*(f"{bound:g}" for bound in BOUNDS_S), "+Inf"]
        return [(name, float(count)) for name, count in zip(names, accumulate(self._counts), strict=True)]
