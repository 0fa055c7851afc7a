"""`python -m campaigns.operate`: every operation of a running fleet under load. Each is reported, and loses nothing.

python -m campaigns.operate --only "kill -9" --only rename          python -m campaigns.operate --list
python -m campaigns.operate --json out/operate.json --patience 3    python -m campaigns.operate --soak --hours 12

Two vehicles and a cloud behind one broker with TLS, passwords and access rules (fleet.py); raw clients count. Exit code
1 if a message is lost, reordered, or doubled without a kill, if something is not reported, or not well again.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final

from campaigns.chaos import machine
from campaigns.chaos.processes import MOSQUITTO, ChaosError

from campaigns.operate import restarts, keys, reloads, data, asking  # isort: skip  # the order of the steps
from campaigns.operate.fleet import Fleet
from campaigns.operate.stage import STEPS, Row

RATE: Final = 200.0  # messages a second
COLUMNS: Final = ("step", "s", "after s", "delivered", "lost", "doubled", "reordered", "reported as")
LINE: Final = "{:<36} {:>5} {:>7} {:>9} {:>5} {:>8} {:>10}  {}"
MODULES: Final = (restarts, keys, reloads, data, asking)
REPORTED_CHARACTERS_MAX: Final = 90


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m campaigns.operate", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--only", action="append", choices=sorted(STEPS), metavar="STEP", help="one step; repeatable")
    parser.add_argument("--list", action="store_true", help="list the steps, and end")
    parser.add_argument("--minutes", type=float, help="begin no further step after so long")
    parser.add_argument("--rate", type=float, default=RATE, help=f"messages a second (default: {RATE:g})")
    parser.add_argument("--seed", type=int, help="of the load; without it, a new one, which is printed")
    parser.add_argument(
        "--patience", type=float, default=1.0, help="factor of the time limits, for a machine with other work"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there, too")
    parser.add_argument("--keep", action="store_true", help="keep the folder: logs, configurations, data")
    parser.add_argument("--soak", action="store_true", help="steady load in place of the steps: is everything flat?")
    parser.add_argument("--hours", type=float, default=1.0, help="of the soak (default: 1)")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder of soak.json (default: out)")
    return parser.parse_args()


def line(row: Row) -> str:
    """A row of the table."""
    if row.skipped:
        return f"{row.step:<36} skipped: {row.skipped}"
    turn, said = row.turn, "; ".join(row.reported)
    said = said if len(said) <= REPORTED_CHARACTERS_MAX else f"{said[: REPORTED_CHARACTERS_MAX - 3]}..."
    seconds = f"{row.seconds:.0f}", f"{row.reported_after_s:.1f}"
    counts = turn.delivered, turn.lost, turn.doubled, turn.reordered
    return LINE.format(row.step, *seconds, *counts, said if row.good else f"FAILED {said}")


def run(fleet: Fleet, chosen: list[str], patience: float, ends: float) -> list[Row]:
    """Do the steps; prints the table as it grows."""
    say(LINE.format(*COLUMNS))
    rows: list[Row] = []
    for name in chosen:
        if time.monotonic() > ends:
            rows.append(Row(name, skipped="the time is up"))
        else:
            rows.append(STEPS[name].run(fleet, patience))
        say(line(rows[-1]))
        for trouble in (*rows[-1].problems, *(() if rows[-1].good else rows[-1].turn.examples)):
            say(f"    {trouble}")
    return rows


def summary(rows: list[Row], seed: int, rate: float) -> dict[str, Any]:
    done = [row for row in rows if not row.skipped]
    total = {key: sum(getattr(row.turn, key) for row in done) for key in ("owed", "delivered", "lost", "reordered")}
    total |= {
        "doubled": sum(row.turn.doubled for row in done if not row.may_double),
        "doubled_by_kills": sum(row.turn.doubled for row in done if row.may_double),
        "reported_after_s_max": max((round(row.reported_after_s, 2) for row in done), default=0.0),
        "failed": sum(not row.good for row in done),
        "skipped": len(rows) - len(done),
    }
    return {"seed": seed, "rate": rate, "total": total, "steps": [row.as_dict() for row in rows]}


def main() -> int:
    arguments = _arguments()
    if arguments.list:
        print("\n".join(STEPS))
        return 0
    if MOSQUITTO is None:
        say("skipped: there is no mosquitto (apt-get install mosquitto)")
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    seed = random.randrange(1 << 31) if arguments.seed is None else arguments.seed
    chosen = [name for name in STEPS if not arguments.only or name in arguments.only]
    folder = Path(tempfile.mkdtemp(prefix="up-streamer-operate-"))
    began = time.monotonic()
    ends = began + arguments.minutes * 60 if arguments.minutes else float("inf")
    fleet = Fleet(folder, arguments.rate, seed, with_old="upgrade" in chosen and not arguments.soak)
    try:
        fleet.build()
        fleet.talk()
        say(f"seed {seed}; the fleet was up after {time.monotonic() - began:.0f} s, in {folder}")
        if arguments.soak:
            from campaigns.operate.soak import soak

            return soak(fleet, arguments.hours, arguments.out, arguments.patience, say)
        rows = run(fleet, chosen, arguments.patience, ends)
    except ChaosError as error:
        say(f"the fleet did not work: {error}")
        return 1
    finally:
        fleet.close()
        machine.unmount_below(folder)
        if arguments.keep:
            say(f"kept: {folder}")
        else:
            shutil.rmtree(folder, ignore_errors=True)
    result = summary(rows, seed, arguments.rate)
    if arguments.json is not None:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result))
    return 0 if all(row.good for row in rows) else 1


if __name__ == "__main__":
    try:
        code = main()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    sys.stdout.flush()
    os._exit(code)  # threads of the raw clients may still wait for brokers that have ended
