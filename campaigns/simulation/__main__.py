"""The command line: see campaigns/simulation/__init__.py."""

from __future__ import annotations

import argparse
import contextlib
import gzip
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

from campaigns.simulation.plan import KNOWN_FAULTS
from campaigns.simulation.pool import HASH_SEED, broken_by, outcomes, prepare, run_seed


def _command(seed: int, kinds: Sequence[str]) -> str:
    of_kinds = f" --kinds {','.join(kinds)}" if kinds else ""
    return f"python -m campaigns.simulation --seed {seed}{of_kinds} -v"


@contextlib.contextmanager
def _opened(path: Path | None) -> Iterator[IO[bytes] | gzip.GzipFile | None]:
    """The file to write records to; without the time and its name where it is compressed (.gz)."""
    if path is None:
        yield None
        return
    with path.open("wb") as file:
        if path.suffix == ".gz":
            with gzip.GzipFile(filename="", mode="wb", fileobj=file, mtime=0) as compressed:
                yield compressed
        else:
            yield file


def _many(arguments: argparse.Namespace) -> int:
    with _opened(arguments.record) as records:
        return _run_many(arguments, records)


def _run_many(arguments: argparse.Namespace, records: IO[bytes] | gzip.GzipFile | None) -> int:
    began, failed, virtual_s, epochs = time.monotonic(), [], 0.0, 0
    digests: list[str] = []
    seeds = range(arguments.start, arguments.start + arguments.seeds)
    if not arguments.json:
        print(f"seeds {seeds.start} to {seeds.stop - 1}, {arguments.jobs} processes", flush=True)
    kinds = arguments.kinds
    for number, outcome in enumerate(outcomes(seeds, arguments.jobs, without=arguments.without, kinds=kinds), 1):
        virtual_s += outcome.virtual_s
        epochs += outcome.epochs
        digests.append(outcome.digest)
        if records is not None:
            records.write(f"{outcome.record}\n".encode())
        if outcome.violations:
            failed.append(outcome)
            if not arguments.json:
                kind, text = outcome.violations[0]
                more = f" (and {len(outcome.violations) - 1} more)" if len(outcome.violations) > 1 else ""
                print(
                    f"seed {outcome.seed} ({outcome.kind}): {kind}: {text}{more}\n    {_command(outcome.seed, kinds)}",
                    flush=True,
                )
        if number % 500 == 0 and not arguments.json:
            print(f"{number} worlds, {len(failed)} with a fault", flush=True)
        if len(failed) >= arguments.max_failures:
            break
    seconds = time.monotonic() - began
    if arguments.json:
        summary = {
            "seeds": number,
            "start": seeds.start,
            "seconds": round(seconds, 1),
            "epochs": epochs,
            "failed": [{name: value for name, value in asdict(one).items() if name != "record"} for one in failed],
        }
        print(json.dumps(summary | ({"digests": digests} if arguments.all else {})))
    else:
        rate = f"{seconds:.0f} s ({number / seconds:.1f}/s)"
        what = f"{number} worlds, {virtual_s / 3600:.1f} hours of virtual time, {epochs} epochs read whole"
        print(f"{what}, in {rate}: {len(failed)} with a fault")
    return 1 if failed else 0


def _one(arguments: argparse.Namespace) -> int:
    prepare()
    with broken_by(arguments.broken):
        outcome = run_seed(arguments.seed, verbose=arguments.verbose, without=arguments.without, kinds=arguments.kinds)
    print(f"seed {outcome.seed} ({outcome.kind}), {outcome.virtual_s:.1f} s of virtual time, digest {outcome.digest}")
    for kind, text in outcome.violations:
        print(f"{kind}: {text}")
    return 1 if outcome.violations else 0


def _breaks(arguments: argparse.Namespace) -> int:
    """Apply each break alone, until a seed finds a fault that it does not find without the break."""
    prepare()
    from campaigns.simulation.breaks import BREAKS

    rows: list[dict[str, Any]] = []
    chosen = {name: known for name, known in BREAKS.items() if arguments.broken in ("", name)}
    for name, known in chosen.items():
        without = arguments.without - {known.needs}
        row: dict[str, Any] = {"break": name, "seeds": None, "seed": None, "message": "not found"}
        seeds = range(arguments.start, arguments.start + arguments.seeds)
        kinds = known.kinds
        for number, outcome in enumerate(outcomes(seeds, arguments.jobs, without=without, broken=name, kinds=kinds), 1):
            if outcome.violations and not run_seed(outcome.seed, without=without, kinds=kinds).violations:
                row |= {"seeds": number, "seed": outcome.seed, "message": ": ".join(outcome.violations[0])}
                break
        rows.append(row)
        print(f"{name}: {known.what}\n    seed {row['seed']}, the {row['seeds']}. tried: {row['message']}", flush=True)
    print(
        "\n| break | seeds until found | the checker says |\n|---|---|---|\n"
        + "\n".join(f"| {row['break']} | {row['seeds']} | {row['message']} |" for row in rows)
    )
    return 0 if all(row["seeds"] for row in rows) else 1


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m campaigns.simulation",
        description="whole gateways in worlds from seeds; see campaigns/simulation/__init__.py",
    )
    parser.add_argument("--seeds", type=int, default=200, help="how many worlds")
    parser.add_argument("--start", type=int, default=0, help="the first seed")
    parser.add_argument("--seed", type=int, help="only this one")
    parser.add_argument("-v", "--verbose", action="store_true", help="with --seed: say everything that happens")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument("--max-failures", type=int, default=20, help="stop after so many seeds with a fault")
    parser.add_argument(
        "--without",
        type=lambda text: frozenset(text.split(",")),
        default=KNOWN_FAULTS,
        help="names of plan.py that must not happen",
    )
    parser.add_argument(
        "--kinds", type=lambda text: tuple(text.split(",")), default=(), help="only worlds of these kinds (world.py)"
    )
    parser.add_argument("--broken", default="", help="with --seed: put this break of breaks.py in; with --breaks: only")
    parser.add_argument("--breaks", action="store_true", help="put each break of breaks.py in, and look for it")
    parser.add_argument("--record", type=Path, metavar="FILE", help="write what was heard in each world (recording.py)")
    parser.add_argument("--all", action="store_true", help="with --json: the digest of each run")
    parser.add_argument("--json", action="store_true", help="one line of JSON in the end, and nothing else")
    arguments = parser.parse_args()
    if os.environ.get("PYTHONHASHSEED") != HASH_SEED:
        os.environ["PYTHONHASHSEED"] = HASH_SEED
        os.execv(sys.executable, [sys.executable, "-m", "campaigns.simulation", *sys.argv[1:]])
    if arguments.breaks:
        return _breaks(arguments)
    return _many(arguments) if arguments.seed is None else _one(arguments)


if __name__ == "__main__":
    sys.exit(main())
