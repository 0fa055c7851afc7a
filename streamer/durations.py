"""How long something takes: a histogram, for the metrics."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate
from typing import Final

# from a write into the cache of a good disk to one that hangs
BOUNDS_S: Final = (0.000_5, 0.001, 0.002_5, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)


class Durations:
    """Counts durations by their size."""

    def __init__(self, bounds_s: Sequence[float] = BOUNDS_S) -> None:
        """`bounds_s`: upper bounds of the buckets in seconds, rising; a last one without bound is added."""
        self._bounds_s = tuple(bounds_s)
        self._counts = [0] * (len(self._bounds_s) + 1)
        self.sum_s = 0.0

    def __repr__(self) -> str:
        return f"Durations({sum(self._counts)} of {self.sum_s:.3f} s)"

    def add(self, seconds: float) -> None:
        self._counts[bisect_left(self._bounds_s, seconds)] += 1
        self.sum_s += seconds

    def buckets(self) -> list[tuple[str, float]]:
        """Returns each upper bound as Prometheus writes it, and how many durations were not longer."""
        bounds = (*self._bounds_s, math.inf)
        names = ["+Inf" if math.isinf(bound) else f"{bound:g}" for bound in bounds]
        return [(name, float(count)) for name, count in zip(names, accumulate(self._counts), strict=True)]
