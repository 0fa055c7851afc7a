"""Shared parts of the cost measurements: their setting, points along an axis, and metrics from the admin port."""

from __future__ import annotations

import urllib.request
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from campaigns.bench.processes import BenchError

PACE_PER_S: Final = 4_000  # what a gateway sends off the vehicle, and what a fleet sends in the rows
ADMIN_TIMEOUT_S: Final = 30.0


@dataclass(frozen=True)
class Setting:
    """Where to write and whom to notify. `seconds` replaces the measurement's own, short duration of each run."""

    directory: Path
    say: Callable[[str], None]
    seconds: float | None = None

    def seconds_or(self, short: float) -> float:
        return self.seconds or short


Figures = dict[str, Any]


def points(xs: Iterable[Any], setting: Setting, work: Callable[[Any, Path], Figures]) -> Figures:
    """Returns the figures of `work` for each x, in its own directory. A failed x is reported, the others go on."""
    found: Figures = {}
    for x in xs:
        name = f"{x:,}" if isinstance(x, int) else str(x)
        try:
            found[str(x)] = work(x, setting.directory / str(x))
        except BenchError as error:
            found[str(x)] = {"failed": str(error)}
            setting.say(f"error: {name}: {error}")
        else:
            setting.say(f"{name}: " + ", ".join(f"{key} {_shown(value)}" for key, value in found[str(x)].items()))
    return found


def _shown(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int | float) else str(value)


BROKEN: Final = ("failed", "lost", "doubled", "duplicates", "disordered")  # figures that must be zero or absent


def has_failed(figures: Any) -> bool:
    """Returns whether any point failed, or has lost, doubled or disordered a message."""
    if isinstance(figures, dict):
        return any(figures.get(name) for name in BROKEN) or any(has_failed(one) for one in figures.values())
    return False


def metrics(port: int) -> dict[str, float]:
    """Returns the metrics of the streamer's admin port by name and labels. Raises BenchError."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=ADMIN_TIMEOUT_S) as answer:
            text = answer.read().decode()
    except OSError as error:
        raise BenchError(f"the admin port does not answer: {error}") from None
    lines = [line.rpartition(" ") for line in text.splitlines() if line and not line.startswith("#")]
    return {name: float(value) for name, _, value in lines}
