"""The picture of the demo: a panel for each vehicle, its speed over time, from the Parquet of the Spark job."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

SPEED: Final = "Vehicle.OBD.Speed"
PANEL_COLUMNS: Final = 2  # of panels
COLOUR: Final = "#1f6fb4"


def draw(parquet_dir: Path, titles: Mapping[str, str], png: Path) -> None:
    """Draw `png`. `titles`: of each panel, by the authority that publishes the speed."""
    import matplotlib  # slow to import, and an optional extra
    import pyarrow.dataset as ds

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    from spark_ingest import parquet

    table = parquet.read(parquet_dir, ["authority", "ts", "value_double"], ds.field("path") == SPEED)
    columns = min(PANEL_COLUMNS, len(titles))
    rows = -(-len(titles) // columns)
    figure, grid = plt.subplots(
        rows, columns, figsize=(12, 3 * rows), sharex=True, sharey=True, squeeze=False, layout="constrained"
    )
    for axes in grid.flat[len(titles) :]:
        axes.axis("off")
    for axes, (authority, title) in zip(grid.flat, titles.items(), strict=False):
        speed = table.filter(ds.field("authority") == authority).sort_by("ts")
        axes.set_title(title, loc="left", fontsize=12, fontweight="bold")
        axes.grid(alpha=0.3)
        if not speed.num_rows:
            axes.text(0.5, 0.5, f"no {SPEED}", transform=axes.transAxes, ha="center")
            continue
        times = speed["ts"].to_numpy().astype("datetime64[ms]").astype("int64")
        axes.plot(
            (times - times[0]) / 60_000, speed["value_double"].to_numpy(), color=COLOUR, linewidth=1.2, clip_on=False
        )
        axes.set_title(f"{speed.num_rows:,} samples", loc="right", fontsize=10)
    grid[0, 0].set_ylim(bottom=0)
    grid[0, 0].set_xlim(left=0)
    for axes in grid[:, 0]:
        axes.set_ylabel("speed (km/h)")
    for axes in grid[-1]:
        axes.set_xlabel("minutes since the start")
    figure.savefig(png, dpi=110)
    plt.close(figure)
