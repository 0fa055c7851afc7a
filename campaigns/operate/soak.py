"""Steady load for hours, and a gentle operation every few minutes: nothing may grow, and nothing may be lost.

each gateway, every SAMPLE_S -> after the warm-up: Theil-Sen slope x duration <= LIMITS -> soak.json, soak.png
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import combinations, cycle
from pathlib import Path
from typing import Any, Final

from campaigns.chaos.processes import ChaosError
from campaigns.operate.fleet import Fleet, access_file
from campaigns.operate.reloads import reload_by_signal
from campaigns.operate.sites import Site
from campaigns.operate.stage import Row, Stage

SAMPLE_S: Final = 10.0
OPERATE_S: Final = 180.0
WARM_UP_S_MIN: Final = 600.0  # the newest records in memory reach their limit within five minutes
WARM_UP_SHARE: Final = 0.25  # caches, logs up to their limit, the allocator's arenas
POINTS_MAX: Final = 200  # of one fit; more are thinned out
# growth over the time after the warm-up, by the fit
LIMITS: Final = {"rss_mib": 8.0, "fds": 3.0, "threads": 2.0, "wal_mib": 8.0, "backlog": 100.0}
LOG_SHARE_MAX: Final = 1.05  # of the limit of the durable log on disk
MIB: Final = 1 << 20


@dataclass
class Series:
    """One figure of one gateway, with the seconds of its samples."""

    at: list[float] = field(default_factory=list)
    values: list[float] = field(default_factory=list)

    def add(self, at: float, value: float) -> None:
        self.at.append(at)
        self.values.append(value)

    def growth(self) -> float:
        """After the warm-up, by a fit that single peaks do not change."""
        begin = max(WARM_UP_S_MIN, self.at[-1] * WARM_UP_SHARE) if self.at else 0.0
        points = [(at, value) for at, value in zip(self.at, self.values, strict=True) if at >= begin]
        return slope(points) * (points[-1][0] - points[0][0]) if len(points) > 1 else 0.0


def slope(points: Sequence[tuple[float, float]]) -> float:
    """The Theil-Sen estimate: the median of the slopes between all pairs of points."""
    step = -(-len(points) // POINTS_MAX)
    pairs = combinations(points[::step] if step > 1 else points, 2)
    slopes = [(b[1] - a[1]) / (b[0] - a[0]) for a, b in pairs if b[0] > a[0]]
    return statistics.median(slopes) if slopes else 0.0


def judge(series: dict[str, dict[str, Series]]) -> list[str]:
    """What has grown, of which gateway."""
    found: list[str] = []
    for site, those in series.items():
        for name, limit in LIMITS.items():
            grown = those[name].growth()
            if grown > limit:
                found.append(f"{site}: {name} grew by {grown:.1f} after the warm-up; the limit is {limit:g}")
        if (share := max(those["log_share"].values, default=0.0)) > LOG_SHARE_MAX:
            found.append(f"{site}: the log had {share:.2f} of its limit on disk")
    return found


def sample(site: Site) -> dict[str, float]:
    """The figures of a gateway now. Raises OSError if it does not run."""
    process = Path(f"/proc/{site.gateway.pid}")
    status = dict(line.split(":", 1) for line in (process / "status").read_text().splitlines())
    if "VmRSS" not in status:  # of a process that has ended, and was not waited for
        raise ProcessLookupError(f"{site.gateway.name} has ended")
    metrics = site.gateway.metrics()
    log = {key: value for key, value in metrics.items() if "durable" in key}
    size, limit = (_of(log, name) for name in ("log_disk_bytes", "log_disk_limit_bytes"))
    return {
        "rss_mib": int(status["VmRSS"].split()[0]) / 1024,
        "fds": len(list((process / "fd").iterdir())),
        "threads": float(status["Threads"]),
        "wal_mib": sum(file.stat().st_size for file in site.data_dir.glob("*-wal")) / MIB,
        "backlog": sum(value for key, value in metrics.items() if key.startswith("backlog")),
        "log_share": size / limit if limit else 0.0,
    }


def _of(metrics: dict[str, float], name: str) -> float:
    return sum(value for key, value in metrics.items() if key.startswith(name + "{") or key == name)


def _reload(stage: Stage) -> None:
    site = stage.vin1
    site.config["egress"]["retry_max_ms"] = 1_100 - site.config["egress"]["retry_max_ms"]  # 500 and 600, in turn
    reload_by_signal(stage, site)


def _pause(stage: Stage) -> None:
    for command in ("pause", "resume"):
        stage.command(stage.vin2, command, "//ecu1/8001/1/8001", "offboard")
        stage.flowing(lambda flow: not flow.startswith("up://ecu1.vin2/"))


def _wrong_rule(stage: Stage) -> None:
    broker = stage.fleet.broker
    broker.change_access(access_file((("vin1", "ecu1.vin1/backend"),)))
    stage.reported("held", lambda: stage.vin1.gateway.held() > 0)
    broker.change_access(access_file())


def _broker(stage: Stage) -> None:
    stage.fleet.broker.stop()
    stage.fleet.broker.start()
    stage.fleet.broker.wait_ready()


OPERATIONS: Final[tuple[Callable[[Stage], None], ...]] = (_reload, _pause, _wrong_rule, _broker)


def _rows(fleet: Fleet, patience: float) -> Iterator[Row]:
    """Does one operation after the other, and judges what was sent since the one before."""
    for work in cycle(OPERATIONS):
        row = Row(work.__name__.strip("_"))
        stage = Stage(fleet, row, patience)
        try:
            work(stage)
            stage.calm()
        except (ChaosError, OSError, KeyError) as error:
            row.problems.append(f"{type(error).__name__}: {error}")
        until = fleet.book.now()
        stage.settle(until)
        row.turn = fleet.book.turn(until)
        yield row


def soak(fleet: Fleet, hours: float, out: Path, patience: float, say: Callable[[str], None]) -> int:
    """Returns the exit code."""
    if hours * 3600 < 2 * WARM_UP_S_MIN:
        say(f"in less than {2 * WARM_UP_S_MIN / 60:.0f} minutes growth is not judged: that is the warm-up")
    series = {name: {key: Series() for key in (*LIMITS, "log_share")} for name in fleet.sites}
    began, rows, operations = time.monotonic(), list[Row](), _rows(fleet, patience)
    operate_at = began + OPERATE_S
    while (now := time.monotonic()) < began + hours * 3600:
        for name, site in fleet.sites.items():
            for key, value in sample(site).items():
                series[name][key].add(now - began, value)
        if now >= operate_at:
            rows.append(row := next(operations))
            operate_at = now + OPERATE_S
            turn = row.turn
            counts = f"delivered {turn.delivered}, lost {turn.lost}, doubled {turn.doubled}, reordered {turn.reordered}"
            say(f"{(now - began) / 60:6.1f} min  {row.step:<11} {counts}  {_figures(series)}")
            for trouble in (*row.problems, *(() if row.good else turn.examples)):
                say(f"    {trouble}")
        time.sleep(max(0.0, SAMPLE_S - (time.monotonic() - now)))
    rows.append(next(operations))  # judges the rest
    grown = judge(series)
    for line in (*grown, *rows[-1].problems):
        say(line)
    out.mkdir(parents=True, exist_ok=True)
    result = _result(series, rows, grown, hours)
    (out / "soak.json").write_text(json.dumps(result) + "\n")
    _draw(series, out / "soak.png", say)
    print(json.dumps({key: result[key] for key in ("hours", "total", "growth", "grown")}))
    return 1 if grown or not all(row.good for row in rows) else 0


def _figures(series: dict[str, dict[str, Series]]) -> str:
    return "; ".join(
        f"{name} {those['rss_mib'].values[-1]:.0f} MiB, {those['fds'].values[-1]:.0f} fds"
        for name, those in series.items()
    )


def _result(series: dict[str, dict[str, Series]], rows: list[Row], grown: list[str], hours: float) -> dict[str, Any]:
    totals = ("owed", "delivered", "lost", "doubled", "reordered", "wrong")
    return {
        "hours": hours,
        "total": {key: sum(getattr(row.turn, key) for row in rows) for key in totals},
        "growth": {site: {key: round(those[key].growth(), 2) for key in LIMITS} for site, those in series.items()},
        "grown": grown,
        "limits": LIMITS,
        "problems": [problem for row in rows for problem in row.problems],
        "series": {
            site: {key: {"s": one.at, "value": one.values} for key, one in those.items()}
            for site, those in series.items()
        },
    }


def _draw(series: dict[str, dict[str, Series]], path: Path, say: Callable[[str], None]) -> None:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        say("no picture: there is no matplotlib")
        return
    names = (*LIMITS, "log_share")
    figure = Figure(figsize=(12, 7), layout="constrained")
    for place, name in zip(figure.subplots(2, 3).flat, names, strict=True):
        for site, those in series.items():
            place.plot([at / 3600 for at in those[name].at], those[name].values, label=site, linewidth=1)
        place.set_title(name)
        place.set_xlabel("hours")
        place.set_ylim(bottom=0)
    figure.axes[0].legend()
    figure.savefig(path)
