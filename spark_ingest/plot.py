"""Plots a drive from the job's Parquet: speed and engine speed over time."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import pyarrow.dataset as ds

from spark_ingest import parquet
from uprotocol.status import UStatusError
from uprotocol.v1.ucode_pb2 import UCode

SPEED: Final = "Vehicle.OBD.Speed"
ENGINE_SPEED: Final = "Vehicle.OBD.EngineSpeed"
_COLOURS: Final = ("#1f6fb4", "#d1571f")


def plot(parquet_dir: Path | str, png: Path | str) -> None:
    """Draw `png` from the job's output. Raises UStatusError(NOT_FOUND) if neither signal is in it."""
    import matplotlib  # slow to import, and an optional extra

    matplotlib.use("Agg")
    from matplotlib import dates
    from matplotlib import pyplot as plt

    table = parquet.read(parquet_dir, ["path", "ts", "value_double"], ds.field("path").isin([SPEED, ENGINE_SPEED]))
    if not table.num_rows:
        raise UStatusError(UCode.NOT_FOUND, f"{parquet_dir} has no rows of {SPEED} or {ENGINE_SPEED}: nothing to draw")
    figure, panels = plt.subplots(2, 1, figsize=(12, 6), sharex=True, layout="constrained")
    for axes, path, label, colour in zip(
        panels, (SPEED, ENGINE_SPEED), ("vehicle speed (km/h)", "engine speed (rpm)"), _COLOURS, strict=True
    ):
        signal = table.filter(ds.field("path") == path).sort_by("ts")
        axes.plot(signal["ts"].to_numpy(), signal["value_double"].to_numpy(), color=colour, linewidth=0.9, label=path)
        axes.set_ylabel(label)
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        # above the curves
        axes.legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), borderaxespad=0.2, frameon=False)
    locator = dates.AutoDateLocator()  # type: ignore[no-untyped-call]
    panels[1].xaxis.set_major_locator(locator)
    panels[1].xaxis.set_major_formatter(dates.ConciseDateFormatter(locator))  # type: ignore[no-untyped-call]
    panels[1].set_xlabel("time (UTC)")
    panels[0].set_title(f"{table.num_rows:,} samples", loc="left", fontsize=10)
    figure.savefig(png, dpi=110)
    plt.close(figure)
