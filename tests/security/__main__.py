"""`python -m tests.security`: runs every attack on its own gateway, and prints a table of the costs (docs/security.md).

python -m tests.security --only polls --only leases --seconds 20 --json result.json

The exit code is 1 if a bound is broken that NOT_YET does not name. The last line of stdout is the result as JSON.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shutil
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from campaigns.chaos.processes import ChaosError
from tests.security.attacks import ATTACKS, BY_NAME, NOT_YET, Attack
from tests.security.honest import Honest
from tests.security.stage import Stage
from tests.security.trial import Figures, Trial, Verdict

RATE: Final = 50.0  # honest messages a second
PEACE_S: Final = 8.0


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.security", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument(
        "--only", action="append", choices=sorted(BY_NAME), metavar="NAME", help=f"{', '.join(BY_NAME)}; repeatable"
    )
    parser.add_argument("--seconds", type=float, help="of each attack, instead of its own")
    parser.add_argument("--short", action="store_true", help="as small as in `make test`, and not judged by latency")
    parser.add_argument(
        "--peace", type=float, default=PEACE_S, metavar="SECONDS", help="before and after (default: %(default)s)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there, too")
    parser.add_argument("--keep", action="store_true", help="keep the folders: logs, configurations, data")
    return parser.parse_args()


def attempt(attack: Attack, folder: Path, arguments: argparse.Namespace) -> Verdict:
    """Runs an attack on its own stage."""
    stage = Stage(attack.scene, folder)
    try:
        stage.start()
        honest = Honest(stage, RATE)
        try:
            options = attack.options(short=arguments.short, seconds=arguments.seconds)
            return Trial(stage, honest, attack, options, arguments.peace, by_latency=not arguments.short).run(
                restart=True
            )
        finally:
            honest.close()
    except ChaosError as error:
        return Verdict(attack.name, Figures(), [f"it could not be tried: {error}"])
    finally:
        stage.close()


def _ms(figures: Figures, phase: str) -> str:
    p50, p99 = figures.ms.get(phase, (float("nan"),) * 2)
    return f"{p50:.0f}/{p99:.0f}"


def table(verdicts: list[Verdict]) -> Table:
    made = Table(title="attacks")
    for column in (
        "attack",
        "RSS idle",
        "peak",
        "after",
        "peace",
        "attack",
        "after",
        "lost",
        "calls",
        "late",
        "disk",
        "lines",
        "verdict",
    ):
        made.add_column(column, justify="left" if column in ("attack", "verdict") else "right")
    for one in verdicts:
        found = one.figures
        made.add_row(
            one.attack,
            f"{found.idle_mib:.0f}",
            f"+{found.peak_mib - found.idle_mib:.0f}",
            f"{found.after_mib - found.idle_mib:+.0f}",
            _ms(found, "peace"),
            _ms(found, "attack"),
            _ms(found, "after"),
            f"{found.lost}/{found.sent}",
            f"{found.calls_failed}/{found.calls}",
            str(found.late_lost),
            f"{found.disk_mib:.0f}",
            str(found.log_lines),
            "held" if one.good else "not yet" if one.attack in NOT_YET else "BROKEN",
        )
    made.caption = (
        "RSS and disk in MiB; p50/p99 of honest messages in ms; lost: honest messages; calls: honest ones that failed"
    )
    return made


def main() -> int:
    arguments = _arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    chosen = [BY_NAME[name] for name in arguments.only] if arguments.only else list(ATTACKS)
    folder = Path(tempfile.mkdtemp(prefix="up-streamer-attack-"))
    verdicts: list[Verdict] = []
    try:
        for attack in chosen:
            _say(f"{attack.name}: {attack.what} ...")
            (folder / attack.name).mkdir()
            verdicts.append(verdict := attempt(attack, folder / attack.name, arguments))
            for line in (*verdict.broken, f"reported: {verdict.figures.reported}"):
                _say(f"    {line}")
            if not arguments.keep:
                shutil.rmtree(folder / attack.name, ignore_errors=True)
    finally:
        if arguments.keep:
            _say(f"kept: {folder}")
        else:
            shutil.rmtree(folder, ignore_errors=True)
    Console(width=None if sys.stdout.isatty() else 160).print(table(verdicts))
    result: dict[str, Any] = {one.attack: dataclasses.asdict(one) | {"good": one.good} for one in verdicts}
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result))
    return 1 if any(not one.good and one.attack not in NOT_YET for one in verdicts) else 0


if __name__ == "__main__":
    sys.exit(main())
