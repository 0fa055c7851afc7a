"""`python -m campaigns.bench`: runs legs and costs, and prints the table of targets; the last line of stdout is JSON.

python -m campaigns.bench                                        everything in its short form, some ten minutes
python -m campaigns.bench --legs zenoh_mqtt,disk --seconds 60    some legs and costs, 60 s for each run
python -m campaigns.bench --curves                               the curves and their pictures, an hour
python -m campaigns.bench --soak 1000000                         memory while a million messages pass

The exit code is 0 only if every message arrived once and in order, and the memory of a soak did not grow.
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
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from campaigns.bench import targets
from campaigns.bench.costs import COSTS
from campaigns.bench.costs.common import Setting, has_failed
from campaigns.bench.curves import CURVES, curves
from campaigns.bench.measure import LEGS, Result, measure
from campaigns.bench.processes import BenchError
from campaigns.bench.soak import SOAK_LEGS, soak

BUSY_LOAD_PER_CORE: Final = 0.5  # load of other processes at the start, above which the figures are noise
SPREAD_MAX: Final = 1.4  # between the ratios of a leg's rounds; on a quiet machine they differ by a tenth
MEMORY_FILE_SYSTEMS: Final = ("tmpfs", "ramfs", "overlay-tmpfs")
TABLE_COLUMNS: Final = 160  # if standard output is no terminal
SCALE: Final = "usubscription"  # runs only if it is named: it takes a minute and has no row in the table
PICTURES: Final = Path(__file__).resolve().parents[2] / "docs" / "pictures"
_progress = Console(stderr=True)


def _file_system(directory: Path) -> str:
    answer = subprocess.run(["stat", "-f", "-c", "%T", directory], capture_output=True, text=True, check=False)
    return answer.stdout.strip() or "unknown"


def _cores() -> int:
    """Returns the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def _say(text: str) -> None:
    _progress.print(text, highlight=False, markup=False, soft_wrap=True)


def _tell_conditions(directory: Path) -> None:
    load, cores, kind = os.getloadavg()[0], _cores(), _file_system(directory)
    build = "compiled" if targets.is_compiled() else "interpreted"
    _say(f"{cores} cores, load {load:.1f}, log on {kind} ({directory}), core {build}")
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
    """Returns the results of `work` for each name. A failed one is logged and left out; the others continue."""
    results, whole = {}, True
    for name in names:
        _say(f"{name} ...")
        try:
            results[name] = work(name)
        except BenchError as error:
            _say(f"error: {name}: {error}")
            whole = False
        except Exception:  # an error of the bench itself costs this leg, not the figures of an hour
            _say(f"error: {name}: {traceback.format_exc()}")
            whole = False
    return results, whole


LEG_COLUMNS: Final = (
    *("leg", "messages/s", "bare/s", "ratio", "of rounds", "added p50 ms", "added p99 ms"),
    *("CPU s per million", "bare's", "us at 1,000/s", "bare's", "peak MiB", "beside"),
)


def _leg_table(results: dict[str, Result]) -> Table:
    table = Table(title="up-streamer beside a bare relay")
    for column in LEG_COLUMNS:
        is_text = column in ("leg", "beside")
        table.add_column(column, justify="left" if is_text else "right", no_wrap=is_text)
    for name, one in results.items():
        whole = one.json()
        ours, bare = (whole["lanes"][kind] for kind in ("streamer", "bare"))
        table.add_row(
            name,
            f"{ours['messages_per_s']:,}",
            f"{bare['messages_per_s']:,}",
            f"{whole['ratio']:.2f}",
            f"{whole['ratio_least']:.2f}-{whole['ratio_most']:.2f}",
            f"{whole['added_p50_ms']:.2f}",
            f"{whole['added_p99_ms']:.2f}",
            f"{ours['cpu_s_per_million']:.1f}",
            f"{bare['cpu_s_per_million']:.1f}",
            f"{ours['us_per_message_at_1000']:,}",
            f"{bare['us_per_message_at_1000']:,}",
            f"{ours['rss_peak_mib']:.0f}",
            "\n".join(_beside(kind, lane) for kind, lane in whole["lanes"].items() if kind in ("bridge", "rust")),
        )
    return table


def _beside(kind: str, lane: dict[str, Any]) -> str:
    lost = f", {lane['lost_share']:.0%} lost" if "lost_share" in lane else ""
    return f"{kind} {lane['messages_per_s']:,}/s{lost}"


def _target_table(rows: list[dict[str, Any]]) -> Table:
    table = Table(title="what was to be reached")
    for column in ("what", "to reach", "reached", ""):
        table.add_column(column, justify="left" if column == "what" else "right")
    for row in rows:
        mark = {True: "yes", False: "no", None: ""}[row["holds"]]
        table.add_row(row["what"], row["to_reach"], row["reached"] or "not measured", mark)
    return table


def _names(known: tuple[str, ...]) -> Callable[[str], list[str]]:
    def parse(text: str) -> list[str]:
        names = [name.strip() for name in text.split(",") if name.strip()]
        unknown = [name for name in names if name not in known]
        if unknown or not names:
            raise argparse.ArgumentTypeError(f"unknown: {', '.join(unknown) or '(none)'}; there are {', '.join(known)}")
        return names

    return parse


def _binary(text: str) -> Path:
    path = Path(text).resolve()
    if not os.access(path, os.X_OK) or path.is_dir():
        raise argparse.ArgumentTypeError(f"{text} is no program; docs/benchmarks.md says how it is built")
    return path


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m campaigns.bench", description="Measure up-streamer beside a bare relay (docs/benchmarks.md)."
    )
    known = (*LEGS, *COSTS, SCALE)
    parser.add_argument("--legs", type=_names(known), metavar="A,B", help=f"only these of {', '.join(known)}")
    parser.add_argument("--messages", type=int, metavar="N", help="of each run at full speed, instead of --seconds")
    parser.add_argument("--seconds", type=float, metavar="S", help="of each run (default: a few)")
    parser.add_argument(
        "--peer-rust", type=_binary, metavar="BINARY", help="Eclipse's Rust streamer in a lane (docs/benchmarks.md)"
    )
    parser.add_argument(
        "--curves",
        type=_names(tuple(CURVES)),
        nargs="?",
        const=list(CURVES),
        metavar="A,B",
        help=f"draw these of {', '.join(CURVES)} (default: all) into docs/pictures",
    )
    parser.add_argument("--json-only", action="store_true", help="no table, only the JSON line on stdout")
    parser.add_argument("--soak", type=int, metavar="N", help="pass N messages, and see that memory stays flat")
    parser.add_argument(
        "--rate", type=float, default=0, metavar="R", help="with --soak: R a second (default: at full speed)"
    )
    parser.add_argument(
        "--dir",
        type=Path,
        metavar="DIR",
        help="where the log is written: the disk that is measured (default: the temporary directory)",
    )
    return parser.parse_args()


def _scale() -> dict[str, Any]:
    """Runs campaigns.bench.usubscription_scale in its own process; its table goes to standard error."""
    done = subprocess.run(
        [sys.executable, "-m", "campaigns.bench.usubscription_scale"], stdout=subprocess.PIPE, text=True, check=False
    )
    *table, last = done.stdout.splitlines() or [""]
    for line in table:
        _say(f"  {line}")
    if done.returncode != 0:
        raise BenchError(f"usubscription_scale ended with code {done.returncode}: {last}")
    figures: dict[str, Any] = json.loads(last)[SCALE]
    return figures


def _run_soak(arguments: argparse.Namespace, directory: Path) -> int:
    names = [name for name in arguments.legs or SOAK_LEGS if name in LEGS]
    results, whole = _each(names, lambda name: soak(name, arguments.soak, directory / name, _say, arguments.rate))
    print(json.dumps({"soak": results}))
    return 0 if whole else 1


def _run_curves(arguments: argparse.Namespace, directory: Path) -> int:
    figures = curves(arguments.curves, Setting(directory, lambda text: _say(f"  {text}"), arguments.seconds), PICTURES)
    print(json.dumps({"curves": figures}))
    return 1 if has_failed(figures) else 0


def _measure_leg(name: str, arguments: argparse.Namespace, directory: Path) -> Result:
    result = measure(
        LEGS[name],
        directory / name,
        lambda text: _say(f"  {text}"),
        messages=arguments.messages,
        seconds=arguments.seconds,
        rust=arguments.peer_rust,
    )
    if max(result.ratios) > SPREAD_MAX * min(result.ratios):
        _say(f"warning: {name}: the rounds disagree, something else was running: measure again")
    return result


def run(arguments: argparse.Namespace) -> int:
    with _work_directory(arguments.dir) as directory:
        _tell_conditions(directory)
        if arguments.soak is not None:
            return _run_soak(arguments, directory)
        if arguments.curves is not None:
            return _run_curves(arguments, directory)
        names = arguments.legs or [*LEGS, *COSTS]

        def cost(name: str) -> Any:
            return COSTS[name](Setting(directory / name, lambda text: _say(f"  {text}"), arguments.seconds))

        legs, legs_whole = _each([n for n in names if n in LEGS], lambda n: _measure_leg(n, arguments, directory))
        costs, costs_whole = _each([n for n in names if n in COSTS], cost)
        scale, scale_whole = _each([n for n in names if n == SCALE], lambda _: _scale())
        figures = {"legs": {name: result.json() for name, result in legs.items()}, "costs": costs, **scale}
        rows = targets.rows(figures, targets.is_compiled())
        if not arguments.json_only:
            _print_tables(legs, rows if arguments.legs is None else [row for row in rows if row["reached"] is not None])
        print(json.dumps({**figures, "table": rows}))
        return 0 if legs_whole and costs_whole and scale_whole and not has_failed(costs) else 1


def _print_tables(legs: dict[str, Result], rows: list[dict[str, Any]]) -> None:
    console = Console(width=None if sys.stdout.isatty() else TABLE_COLUMNS)
    if legs:
        console.print(_leg_table(legs))
    if rows:
        console.print(_target_table(rows))


def main() -> int:
    # SIGTERM closes everything as Ctrl-C does
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    arguments = _arguments()
    try:
        return run(arguments)
    except BenchError as error:
        _say(f"error: {error}")
        return 1
    except KeyboardInterrupt:
        _say("stopped")
        return 130


if __name__ == "__main__":
    sys.exit(main())
