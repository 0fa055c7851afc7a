"""python -m campaigns.fuzz [--list | --replay | --minutes 10 | --seconds 60] [--target NAME]...

The targets share the time; two of them run side by side. The exit code is 1 if there was a find.
"""

from __future__ import annotations

import argparse
import random
import sys
from pathlib import Path
from typing import Final

from campaigns.fuzz import engine, registry

SECONDS_DEFAULT: Final = 60.0


def main(arguments: list[str] | None = None) -> int:
    asked = _asked(arguments)
    if asked.nursery:
        engine.nursery(asked.nursery, asked.target, asked.seconds, asked.out, asked.seed)
        return 0
    if asked.name is not None:
        print(registry.file_name(asked.name.read_bytes()))
        return 0
    seed = asked.seed if asked.seed is not None else random.randrange(1, 1 << 31)
    targets = registry.load()
    if unknown := set(asked.target) - set(targets):
        sys.exit(f"there is no target {', '.join(sorted(unknown))}: --list shows them")
    names = asked.target or sorted(targets)
    if asked.list:
        for name in names:
            print(
                f"{name:26} {len(targets[name].inputs()):4} inputs  "
                f"{(targets[name].run.__doc__ or '').strip().splitlines()[:1]}"
            )
        return 0
    if asked.replay:
        engine.quiet()
        print(sum(engine.replay(targets[name]) for name in names), "inputs replayed")
        return 0
    return hunt_all(
        names,
        asked.minutes * 60 if asked.minutes else asked.seconds,
        asked.out,
        seed=seed,
        with_atheris=False if asked.random else None,
    )


def hunt_all(names: list[str], seconds: float, out: Path, *, seed: int = 1, with_atheris: bool | None = None) -> int:
    """Fuzzes for `seconds` in total, shared by `names`. Returns 1 if there was a find."""
    if with_atheris is None and not engine.has_atheris():
        print("atheris is not installed: random changes to the corpus instead, without feedback")
    print(f"{len(names)} targets, {seconds:.0f} s in all, --seed {seed}; what they say is in {out}", flush=True)
    failed = False
    for report in engine.hunt(
        names, seconds * engine.SIDE_BY_SIDE / len(names), out, seed=seed, with_atheris=with_atheris
    ):
        found = "FOUND " + ", ".join(report.finds) if report.failed else "nothing found"
        print(
            f"{report.target:26} {report.executions:9} executions, {report.engine}, {report.seconds:.1f} s: {found}",
            flush=True,
        )
        failed = failed or report.failed
    return int(failed)


def _asked(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m campaigns.fuzz", description=__doc__)
    parser.add_argument("--list", action="store_true", help="the targets")
    parser.add_argument("--replay", action="store_true", help="run the inputs of the corpus, and no others")
    parser.add_argument("--target", action="append", default=[], help="only this one; may be given more than once")
    parser.add_argument("--minutes", type=float, default=0.0, help="in all")
    parser.add_argument("--seconds", type=float, default=SECONDS_DEFAULT, help="in all, where no minutes are given")
    parser.add_argument("--name", type=Path, help="the name that this file has in the corpus")
    parser.add_argument("--random", action="store_true", help="without atheris")
    parser.add_argument("--out", type=Path, default=engine.OUT, help="where finds, logs and what was learnt go")
    parser.add_argument("--seed", type=int, help="of the changes; by chance if not given")
    parser.add_argument("--nursery", default="", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
