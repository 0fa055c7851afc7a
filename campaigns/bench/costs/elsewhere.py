"""Costs whose measurements are outside this package: a fleet, and new topics on DDS."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any, Final

from campaigns.bench.costs.common import Figures, Setting, points
from campaigns.bench.processes import BenchError

FLEETS: Final = (100, 1_000)  # vehicles, 30 topics each; the curves also have 5,000


def _measure(module: str) -> Any:
    try:
        return importlib.import_module(module).measure
    except ModuleNotFoundError as error:
        if error.name is not None and error.name.startswith("campaigns"):
            raise BenchError(f"{error.name} is not there") from None
        raise BenchError(f"{error.name} is not installed") from None


def fleet(setting: Setting, fleets: tuple[int, ...] = FLEETS) -> Figures:
    measure = _measure("campaigns.bench.fleet")

    def at(vehicles: int, directory: Path) -> Figures:
        directory.mkdir(parents=True)
        figures: Figures = measure(vehicles, directory, setting.say)
        return figures

    return points(fleets, setting, at)


def dds(setting: Setting) -> Figures:
    """Measures the first message of many new topics, and how long other messages wait meanwhile."""
    setting.directory.mkdir(parents=True)
    figures: Figures = _measure("campaigns.bench.dds_topics")(setting.directory, setting.say)
    return figures
