"""Draws the figures of a curve as SVG pictures: axes with units, colours that are easy to distinguish.

A failed or skipped point is left out, and the line ends there.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

Figures = dict[str, Any]
Series = dict[str, list[tuple[float, float]]]

# colours by Okabe and Ito, which differ also in grey and for the colour-blind; and markers, for print
STYLES: Final = (("#0072B2", "o"), ("#D55E00", "s"), ("#009E73", "^"), ("#CC79A7", "D"))
SIZE_INCHES: Final = (6.4, 3.6)
LINEAR_TICKS_MAX: Final = 6  # labels in the millions are wide


@dataclass(frozen=True)
class Picture:
    title: str
    x: str
    y: str
    series: Callable[[Figures], Series]
    x_log: bool = True
    y_log: bool = False
    ticks: bool = False  # one for each x, if they are far enough apart


def line(figures: Figures, *keys: str) -> list[tuple[float, float]]:
    """Returns (x, the first of `keys` that the point has) in the order of x."""
    found = []
    for x, point in figures.items():
        value = next((point[key] for key in keys if isinstance(point, dict) and point.get(key) is not None), None)
        if value is not None:
            found.append((float(x), float(value)))
    return sorted(found)


def _one(name: str, key: str) -> Callable[[Figures], Series]:
    return lambda figures: {name: line(figures, key)}


def _each(key: str) -> Callable[[Figures], Series]:
    return lambda figures: {name: line(points, key) for name, points in figures.items()}


def _delays(figures: Figures) -> Series:
    return {
        f"{name}, {quantile}": line(figures[name], f"{quantile}_ms")
        for name in ("bare", "durable")
        if name in figures
        for quantile in ("p50", "p99")
    }


# curve -> file name -> picture
PICTURES: Final[dict[str, dict[str, Picture]]] = {
    "topics_published": {
        "topics-published": Picture(
            "4,000 messages/s over many topics on Zenoh: what arrives",
            "topics",
            "messages/s",
            _one("arrives", "per_s"),
        )
    },
    "topics_subscribed": {
        "topics-subscribed": Picture(
            "Each topic on Zenoh subscribed to by itself: CPU at 4,000/s",
            "subscriptions",
            "CPU s per million messages",
            _one("durable", "cpu_s_per_million"),
            ticks=True,
        )
    },
    "fleet": {
        "fleet": Picture(
            "The cloud subscribes to 30 topics of each vehicle",
            "vehicles",
            "s until all stand",
            lambda figures: {
                "answered (PENDING or better)": line(figures, "pending_s"),
                "all are SUBSCRIBED": line(figures, "subscribed_s"),
            },
            y_log=True,
            ticks=True,
        )
    },
    "peers": {
        "peers": Picture(
            "One topic to several networks: CPU for each delivery",
            "networks that get every message",
            "CPU s per million deliveries",
            _one("durable", "cpu_s_per_million_delivered"),
            x_log=False,
            ticks=True,
        )
    },
    "records": {
        "records": Picture(
            "Full speed while the log grows: CPU",
            "records in the log",
            "CPU s per million messages",
            _one("durable", "cpu_s_per_million"),
            x_log=False,
        )
    },
    "payload": {
        "payload": Picture("Zenoh to Zenoh by payload", "payload, bytes", "MiB/s", _each("mib_per_s"), y_log=True)
    },
    "load": {
        "load": Picture(
            "Zenoh to Zenoh: latency at an offered load",
            "messages/s offered",
            "ms from when it was due",
            _delays,
            y_log=True,
        )
    },
}


def draw(curve: str, figures: Figures, directory: Path) -> list[Path]:
    """Writes the pictures of a curve to `directory` and returns their paths. A picture without points is not drawn."""
    return [
        path
        for name, picture in PICTURES[curve].items()
        if (path := _draw(picture, picture.series(figures), directory / f"bench-{name}.svg")) is not None
    ]


def _draw(picture: Picture, series: Series, path: Path) -> Path | None:
    series = {name: points for name, points in series.items() if points}
    if not series:
        return None
    os.environ.setdefault("MPLBACKEND", "Agg")
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter

    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": path.name, "font.size": 9}):
        figure = Figure(figsize=SIZE_INCHES, layout="constrained")
        axes = figure.add_subplot()
        for (name, points), (colour, mark) in zip(series.items(), _styles(len(series)), strict=True):
            axes.plot(*zip(*points, strict=True), label=name, color=colour, marker=mark, markersize=4, linewidth=1.5)
        axes.set(title=picture.title, xlabel=picture.x, ylabel=picture.y)
        if picture.x_log:
            axes.set_xscale("log")
        else:
            axes.locator_params(axis="x", nbins=LINEAR_TICKS_MAX)
        if picture.y_log:
            axes.set_yscale("log")
        else:
            axes.set_ylim(0, 1.08 * max(y for points in series.values() for _, y in points))
        for axis in (axes.xaxis, axes.yaxis):  # drawn behind the scales, which set their own
            axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
        axes.grid(alpha=0.3)
        if picture.ticks:
            axes.set_xticks(sorted({x for points in series.values() for x, _ in points}))
            axes.xaxis.minorticks_off()
        if len(series) > 1:
            figure.legend(loc="outside lower center", ncols=len(series), frameon=False)
        figure.savefig(path, format="svg", metadata={"Date": None, "Creator": None})
    return path


def _styles(count: int) -> Iterable[tuple[str, str]]:
    assert count <= len(STYLES), "more lines are no picture any more"
    return STYLES[:count]
