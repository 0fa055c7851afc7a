"""`python -m bench`: the legs and their bare baselines as a table, and as JSON in the last line of stdout.

python -m bench --legs zenoh_mqtt,dds_zenoh --messages 20000
python -m bench --soak 1000000
python -m bench --scale

Exit code 0 only if every message arrived, once and in order, and a soak's memory stayed flat.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.measure import LEGS, Result, measure
from bench.processes import BenchError
from bench.soak import SOAK_LEGS, soak

BUSY_LOAD_PER_CORE = 0.5  # of others before we begin: from here on the figures are noise
SPREAD_MAX = 1.4  # between the ratios of a leg's rounds; on a quiet machine they differ by a tenth
MEMORY_FILE_SYSTEMS = ("tmpfs", "ramfs", "overlay-tmpfs")
_progress = Console(stderr=True)


def _file_system(directory: Path) -> str:
    answer = subprocess.run(["stat", "-f", "-c", "%T", directory], capture_output=True, text=True, check=False)
    return answer.stdout.strip() or "unknown"


def _cores() -> int:
    """Those that we may use, not those of the machine."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def _say(text: str) -> None:
    _progress.print(text, highlight=False, markup=False, soft_wrap=True)


def _tell_conditions(directory: Path) -> None:
    load, cores, kind = os.getloadavg()[0], _cores(), _file_system(directory)
    _say(f"{cores} cores, load {load:.1f}, log on {kind} ({directory})")
    if load > BUSY_LOAD_PER_CORE * cores:
        _say("warning: the machine is busy with other work; ratios are rough and latencies too long")
    if kind in MEMORY_FILE_SYSTEMS:
        _say(f"warning: {kind} is memory, so the durable figures are those of no disk at all; name one with --dir")


@contextmanager
def _work_directory(parent: Path | None) -> Iterator[Path]:
    directory = Path(tempfile.mkdtemp(prefix="up-streamer-bench-", dir=parent))
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _each(names: list[str], work: Callable[[str], Any]) -> tuple[dict[str, Any], bool]:
    """What `work` makes of every name; one that fails is told and left out, and the others go on."""
    results, whole = {}, True
    for name in names:
        _say(f"{name} ...")
        try:
            results[name] = work(name)
        except BenchError as error:
            _say(f"error: {name}: {error}")
            whole = False
    return results, whole


def _table(results: dict[str, Result]) -> Table:
    table = Table(title="up-streamer beside a bare relay")
    for column in (
        "leg",
        "messages/s",
        "bare/s",
        "ratio",
        "of rounds",
        "added p50 ms",
        "added p99 ms",
        "CPU s per million",
        "peak MiB",
    ):
        table.add_column(column, justify="left" if column == "leg" else "right", no_wrap=True)
    for name, one in results.items():
        table.add_row(
            name,
            f"{one.messages_per_s:,.0f}",
            f"{one.bare_messages_per_s:,.0f}",
            f"{one.ratio:.2f}",
            f"{min(one.ratios):.2f}-{max(one.ratios):.2f}",
            f"{one.added_p50_ms:.2f}",
            f"{one.added_p99_ms:.2f}",
            f"{one.cpu_s_per_million:.1f}",
            f"{one.rss_peak_mib:.0f}",
        )
    return table


def _legs(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    unknown = [name for name in names if name not in LEGS]
    if unknown or not names:
        raise argparse.ArgumentTypeError(f"unknown leg {', '.join(unknown) or '(none)'}; there are {', '.join(LEGS)}")
    return names


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench", description="Measure up-streamer beside a bare relay (docs/benchmarks.md)."
    )
    parser.add_argument("--legs", type=_legs, metavar="A,B", help=f"only these of {', '.join(LEGS)}")
    parser.add_argument(
        "--messages", type=int, metavar="N", help="messages of each throughput run (default: some seconds' worth)"
    )
    parser.add_argument("--json-only", action="store_true", help="no table, only the JSON line on stdout")
    parser.add_argument("--soak", type=int, metavar="N", help="pass N messages, and see that memory stays flat")
    parser.add_argument("--scale", action="store_true", help="many topics and subscribers in uSubscription")
    parser.add_argument(
        "--dir",
        type=Path,
        metavar="DIR",
        help="where the log is written: the disk that is measured (default: the temporary directory)",
    )
    return parser.parse_args()


def _scale() -> dict[str, Any]:
    """What bench.usubscription_scale measures, in a process of its own; its table goes to standard error."""
    _say("usubscription_scale ...")
    done = subprocess.run(
        [sys.executable, "-m", "bench.usubscription_scale"], stdout=subprocess.PIPE, text=True, check=False
    )
    *table, last = done.stdout.splitlines() or [""]
    for line in table:
        _say(f"  {line}")
    if done.returncode != 0:
        raise BenchError(f"usubscription_scale ended with code {done.returncode}: {last}")
    figures: dict[str, Any] = json.loads(last)
    return figures


def run(arguments: argparse.Namespace) -> int:
    with _work_directory(arguments.dir) as directory:
        _tell_conditions(directory)
        if arguments.soak is not None:
            names = arguments.legs or list(SOAK_LEGS)
            results, whole = _each(names, lambda name: soak(name, arguments.soak, directory / name, _say))
            print(json.dumps({"soak": results}))
            return 0 if whole else 1
        names = arguments.legs or list(LEGS)
        results, whole = _each(
            names,
            lambda name: measure(LEGS[name], directory / name, arguments.messages, lambda text: _say(f"  {text}")),
        )
        for name, result in results.items():
            if max(result.ratios) > SPREAD_MAX * min(result.ratios):
                _say(f"warning: {name}: the rounds disagree, something else was running: measure again")
        if not arguments.json_only:
            Console(width=None if sys.stdout.isatty() else 140).print(_table(results))
        figures: dict[str, Any] = {"legs": {name: result.json() for name, result in results.items()}}
        if arguments.legs is None:
            try:
                figures |= _scale()
            except BenchError as error:
                _say(f"error: {error}")
                whole = False
        print(json.dumps(figures))
        return 0 if whole else 1


def main() -> int:
    # so that everything is closed as after Ctrl-C
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    arguments = _arguments()
    try:
        if arguments.scale:
            print(json.dumps(_scale()))
            return 0
        return run(arguments)
    except BenchError as error:
        _say(f"error: {error}")
        return 1
    except KeyboardInterrupt:
        _say("stopped")
        return 130


if __name__ == "__main__":
    sys.exit(main())
