"""up-streamer replay, demo: publish the samples of a drive; show their way to Spark."""

from __future__ import annotations

import json
import time
from collections import Counter
from typing import Annotated, Final

import typer

from storage import logs
from streamer.commands import terminal
from streamer.commands.options import AsJson, Data, DemoOptions, Seed, Where
from uprotocol.status import invalid

PROGRESS_S: Final = 0.5  # between two progress lines
START_MS_MAX: Final = 4_102_444_800_000  # the year 2100; a larger value is probably in another unit


def replay(
    where: Where,
    data: Data = None,
    seed: Seed = 1,
    seconds: Annotated[
        int, typer.Option(min=1, help="Length of the simulated drive; a row of samples per second.")
    ] = 600,
    all_signals: Annotated[
        bool, typer.Option("--all", help="Publish the signals of all authorities, not only our own.")
    ] = False,
    start_ms: Annotated[
        int | None,
        typer.Option(min=0, max=START_MS_MAX, help="Time of the first row in Unix milliseconds; without it, now."),
    ] = None,
    rate: Annotated[
        float | None, typer.Option(min=0.1, help="Samples per second; as fast as the network takes them.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Replay a drive: each sample as one publish.

    Example: [bold]up-streamer replay --data drive.csv -a mcu1 -t dds -s domain_id=7 --rate 1000[/]
    """
    from streamer.demo import replay as replays

    logs.configure()
    network, drive = where.network(), replays.load(data, seed, seconds)
    publishers = sorted({signal.publisher for signal in drive.signals})
    if not all_signals and network.authority not in publishers:
        raise invalid(
            f"authority {network.authority!r} publishes nothing of a drive, {' and '.join(publishers)} do: be one "
            "of them, or add --all"
        )
    for line in drive.report():
        terminal.err.print(f"{data}: {line}", markup=False)
    begin_ms = int(time.time() * 1000) if start_ms is None else start_ms
    samples = (one for one in drive.samples(begin_ms) if all_signals or one.signal.publisher == network.authority)
    shown = 0.0

    def progress(published: int) -> None:
        nonlocal shown
        if as_json and time.monotonic() - shown > PROGRESS_S:
            shown = time.monotonic()
            print(json.dumps({"published": published}), flush=True)

    async def work() -> Counter[str]:
        async with network.open() as opened:
            return await replays.replay(opened, samples, rate=rate, on_progress=progress)

    counts = terminal.finish(work())
    report = {"done": True, "published": counts.total(), "problems": drive.problems_total}
    line = f"published {counts.total()} samples on {len(counts)} topics"
    terminal.tell(as_json, {**report, "topics": dict(sorted(counts.items()))}, line)


def demo(options: DemoOptions) -> None:
    """A drive crosses three networks because somebody subscribed, and Spark writes it down.

    Example: [bold]up-streamer demo --data drive.csv[/]
    """
    from streamer.demo import demo as demos

    logs.configure()

    async def perform() -> demos.DemoResult:
        return await demos.Demo(options, terminal.err).run()  # created here, so that Ctrl-C removes its folder

    outcome = terminal.finish(perform())
    demos.show(outcome, terminal.out)
    if not outcome.adds_up:
        terminal.err.print("[bold red]it does not add up[/]")
    print(json.dumps(outcome.as_dict()), flush=True)
    raise typer.Exit(0 if outcome.adds_up else terminal.EXIT_FAILED)
