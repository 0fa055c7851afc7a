"""up-streamer demo: all of it at once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from storage import logs
from streamer.commands import terminal


def demo(
    data: Annotated[Path | None, typer.Option(help="A recorded drive (CSV); without it, a simulated one.")] = None,
    seed: Annotated[int, typer.Option(help="Of the simulated drive.")] = 1,
    seconds: Annotated[int, typer.Option(min=10, help="Length of the simulated drive.")] = 600,
    rate: Annotated[float, typer.Option(min=1, help="Samples per second.")] = 5_000,
    out_dir: Annotated[Path, typer.Option("--out", help="Where the plot goes.")] = Path("out"),
    without_mqtt: Annotated[
        bool, typer.Option("--without-mqtt", help="No MQTT broker: the cloud is on Zenoh, too.")
    ] = False,
    keep: Annotated[bool, typer.Option(help="Keep data and configurations.")] = False,
) -> None:
    """A drive crosses three networks because somebody subscribed, and Spark writes it down.

    Example: [bold]up-streamer demo --data drive.csv[/]
    """
    from streamer.demo import demo as demos

    logs.configure()
    options = demos.Options(data, seed, seconds, rate, out_dir, not without_mqtt, keep)
    outcome = terminal.finish(demos.Demo(options, terminal.err).run())
    demos.show(outcome, terminal.out)
    if not outcome.adds_up:
        terminal.err.print("[bold red]it does not add up[/]")
    print(json.dumps(outcome.as_dict()), flush=True)
    raise typer.Exit(0 if outcome.adds_up else terminal.EXIT_FAILED)
