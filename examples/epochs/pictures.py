"""Draws a partial order of times with both frontiers, and the frontiers of a run over its log."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from history.epochs.frontier import Frontier, PassedTimes, is_ahead, is_covered
from history.records.epoch import Time

COLOURS: Final = {  # colours of Okabe and Ito
    "latent": "#FFFFFF",
    "active": "#E69F00",
    "completed": "#0072B2",
    "skipped": "#BBBBBB",
}
SIDE: Final = 6  # times from 0 in each dimension
LOWER, UPPER, NEWEST = "#009E73", "#D55E00", "#56B4E9"


class Point(NamedTuple):
    """The frontiers after a record of the log; times in seconds of the drive."""

    seq: int
    lower: float
    upper: float
    newest: float


def draw(folder: Path, points: Sequence[Point], joined_seq: int) -> None:
    """Draw epochs-order.svg and epochs-frontiers.svg."""
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = "epochs"  # the same run gives the same file
    folder.mkdir(parents=True, exist_ok=True)
    _order(folder / "epochs-order.svg")
    _frontiers(folder / "epochs-frontiers.svg", points, joined_seq)


def scripted() -> tuple[Frontier, PassedTimes]:
    """Two publishers: one advances the first number, one the second; both began with (0, 0)."""
    frontier = Frontier()
    frontier.hold((0, 0))
    frontier.hold((2, 1), (1, 3))
    for time in ((0, 0), (0, 1), (1, 0), (1, 1), (0, 2)):
        frontier.see(time)
    for time in ((2, 1), (2, 2), (3, 1), (1, 3), (1, 4)):
        frontier.see(time)
    return frontier, frontier.release((0, 0))


def _state(frontier: Frontier, passed: PassedTimes, time: Time) -> str:
    if frontier.may_come(time):
        return "active" if time in frontier.seen else "latent"
    return "completed" if time in passed.completed else "skipped"


def _order(path: Path) -> None:
    from matplotlib import pyplot

    frontier, passed = scripted()
    figure, axes = pyplot.subplots(figsize=(6.4, 5.2))
    for x in range(SIDE):
        for y in range(SIDE):
            time = (x, y)
            colour = COLOURS[_state(frontier, passed, time)]
            axes.scatter(x, y, s=420, c=colour, edgecolors="black", linewidths=1, zorder=3)
            if time in frontier.lower:
                axes.scatter(x, y, s=900, facecolors="none", edgecolors=LOWER, linewidths=3, zorder=2)
            if time in frontier.upper:
                axes.scatter(x, y, s=1_250, facecolors="none", edgecolors=UPPER, linewidths=3, zorder=2)
            if not is_covered(frontier.upper, time) and is_ahead(frontier.lower, time):
                axes.text(x, y, "sees", ha="center", va="center", fontsize=7, zorder=4)
    for state, colour in COLOURS.items():
        axes.scatter([], [], s=120, c=colour, edgecolors="black", label=state)
    for name, colour in (("lower frontier", LOWER), ("upper frontier", UPPER)):
        axes.scatter([], [], s=160, facecolors="none", edgecolors=colour, linewidths=3, label=name)
    axes.set(
        xlabel="first number of a time",
        ylabel="second number",
        title="A new reader gets the times that no active time covers",
    )
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False, labelspacing=1.2)
    _save(figure, path)


def _frontiers(path: Path, points: Sequence[Point], joined_seq: int) -> None:
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7.2, 4.2))
    seqs = [point.seq for point in points]
    axes.step(seqs, [point.newest for point in points], where="post", color=NEWEST, label="time in the newest id")
    axes.step(seqs, [point.upper for point in points], where="post", color=UPPER, label="upper frontier")
    axes.step(seqs, [point.lower for point in points], where="post", color=LOWER, ls="--", label="lower frontier")
    at = next(point for point in points if point.seq >= joined_seq)
    axes.axvline(joined_seq, color="black", lw=1)
    axes.text(joined_seq, points[-1].upper, " joins here", va="top")
    axes.axhspan(at.upper, at.upper + 1, xmin=0, color="#DDDDDD", zorder=0, label="the second that a new reader drops")
    axes.set(xlabel="number in the log", ylabel="second of the drive", title="The frontiers of a drive")
    axes.legend(loc="lower right", frameon=False)
    _save(figure, path)


def _save(figure: Any, path: Path) -> None:
    from matplotlib import pyplot

    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)
