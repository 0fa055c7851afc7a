"""Memory while a million messages pass: resident size of the streamer after every 100,000, and its slope.

The first part fills what is bounded (tail, rings, caches, the allocator's arenas). After it, memory must stay
constant.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final

from campaigns.bench.lanes import lane
from campaigns.bench.measure import LEGS
from campaigns.bench.processes import BenchError

STEP_MESSAGES: Final = 100_000
FILL_MESSAGES: Final = 200_000  # tail and windows reach their bounds before this
# growth after the fill: 20 bytes for each of 800,000 messages, which is less than one object each
GROWTH_MIB_MAX: Final = 16.0
SOAK_MESSAGES_MIN: Final = FILL_MESSAGES + 2 * STEP_MESSAGES  # two points define a slope
SOAK_LEGS: Final = ("zenoh_zenoh_durable", "zenoh_zenoh_volatile")


def slope(points: list[tuple[int, float]]) -> float:
    """Returns MiB per million messages: the slope of the least-squares line through (messages, MiB)."""
    mean_x, mean_y = (sum(values) / len(points) for values in zip(*points, strict=True))
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    return sum((x - mean_x) * (y - mean_y) for x, y in points) / spread * 1e6 if spread else 0.0


def soak(name: str, messages: int, directory: Path, say: Callable[[str], None], rate: float = 0) -> dict[str, float]:
    """Passes `messages` through the streamer at `rate` per second (0: at full speed).

    Raises BenchError if one is lost or memory grows by more than GROWTH_MIB_MAX.
    """
    if messages < SOAK_MESSAGES_MIN:
        raise BenchError(
            f"a soak needs {SOAK_MESSAGES_MIN:,} messages or more: the first {FILL_MESSAGES:,} only fill "
            "what is bounded"
        )
    points: list[tuple[int, float]] = []
    with lane("streamer", LEGS[name], directory) as streamer:
        for passed in range(STEP_MESSAGES, messages + 1, STEP_MESSAGES):
            per_s = streamer.run(STEP_MESSAGES, rate)["per_s"]
            points.append((passed, streamer.process.memory_mib("VmRSS")))
            say(f"{name}: {passed:>10,} messages, {points[-1][1]:7.1f} MiB, {per_s:,.0f}/s")
        peak = streamer.process.memory_mib("VmHWM")
    after = [point for point in points if point[0] >= FILL_MESSAGES]
    growth = max(size for _, size in after) - after[0][1]
    result = {
        "messages": points[-1][0],
        "rss_first_mib": round(points[0][1], 1),
        "rss_after_fill_mib": round(after[0][1], 1),
        "rss_last_mib": round(after[-1][1], 1),
        "rss_peak_mib": round(peak, 1),
        "growth_after_fill_mib": round(growth, 1),
        "slope_mib_per_million": round(slope(after), 1),
    }
    say(f"{name}: {result['slope_mib_per_million']:+.1f} MiB per million messages after the first {FILL_MESSAGES:,}")
    if growth > GROWTH_MIB_MAX:
        raise BenchError(
            f"{name}: grew by {growth:.1f} MiB after {FILL_MESSAGES:,} messages; the limit is {GROWTH_MIB_MAX:.0f}"
        )
    return result
