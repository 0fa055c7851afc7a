"""`python -m campaigns.chaos`: subject a gateway to every fault that this machine allows, and check that no
acknowledged message is lost.

python -m campaigns.chaos --minutes 10 --seed 7          python -m campaigns.chaos --only kill-record --minutes 1
--json result.json

Each campaign is a process of its own; they run side by side, one on each core. Exit code 1 if an acknowledged
message is lost or reordered, or damage is not reported. The last line of stdout is the summary as JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

from campaigns.chaos import campaigns, machine
from campaigns.chaos.ledger import Verdict

OVERHEAD_S: Final = 25.0  # of a campaign, beside its faults: building, draining, judging
HANG_S: Final = 240.0  # beyond its time: then it counts as hanging, which is a failure
FAULTS_S_MIN: Final = 5.0
SUMMED: Final = (
    "kills",
    "acked",
    "delivered",
    "lost",
    "doubled",
    "duplicated",
    "reordered",
    "reported",
    "excluded",
    "wrong",
    "unreported",
    "skipped",
)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m campaigns.chaos", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--minutes", type=float, default=10.0, help="for all campaigns together (default: 10)")
    parser.add_argument("--seed", type=int, default=None, help="of the faults; without it, a new one, which is printed")
    parser.add_argument(
        "--only",
        action="append",
        choices=sorted(campaigns.NAMES),
        metavar="NAME",
        help=f"one of {', '.join(campaigns.NAMES)}; repeatable",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the summary there, too")
    parser.add_argument(
        "--parallel", type=int, default=max(2, len(os.sched_getaffinity(0))), help="campaigns at once (default: cores)"
    )
    parser.add_argument("--keep", action="store_true", help="keep the folders: logs, configurations, data")
    parser.add_argument("--campaign", help=argparse.SUPPRESS)  # run this one here, in `--folder`, for `--seconds`
    parser.add_argument("--seconds", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def _one(name: str, seed: int, seconds: float, folder: Path) -> dict[str, Any]:
    """Run a campaign in a process of its own; returns its verdict."""
    if reason := campaigns.why_not(name):
        _say(f"{name}: skipped: {reason}")
        return dataclasses.asdict(Verdict(skipped=1, notes=[f"skipped: {reason}"]))
    folder.mkdir()
    command = [
        *(machine.NAMESPACE if campaigns.is_apart(name) else ()),
        sys.executable,
        "-m",
        "campaigns.chaos",
        "--campaign",
        name,
        "--seed",
        str(seed),
        "--seconds",
        str(seconds),
        "--folder",
        str(folder),
    ]
    began = time.monotonic()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True, text=True)
    try:
        said, _ = process.communicate(timeout=seconds + HANG_S)
        verdict: dict[str, Any] = json.loads(said.splitlines()[-1])
    except (subprocess.TimeoutExpired, IndexError, ValueError) as error:
        verdict = dataclasses.asdict(Verdict(problems=[f"the campaign did not end as it should: {error!r}"]))
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    verdict["seconds"] = round(time.monotonic() - began, 1)
    good = Verdict(**{key: value for key, value in verdict.items() if key != "seconds"}).good
    counts = ", ".join(f"{key} {verdict[key]}" for key in SUMMED if verdict[key])
    _say(f"{name}: {'good' if good else 'FAILED'} after {verdict['seconds']:.0f} s: {counts}")
    for line in (*verdict["problems"], *verdict["examples"], *verdict["notes"]):
        _say(f"    {line}")
    return verdict


def _shares(chosen: list[str], minutes: float, parallel: int) -> dict[str, float]:
    """Seconds of faults for each campaign, so that all end within `minutes`."""
    able = [name for name in chosen if not campaigns.why_not(name)]
    time_s = minutes * 60 * min(parallel, max(1, len(able))) - OVERHEAD_S * len(able)
    weight = sum(campaigns.share(name) for name in able) or 1.0
    return {name: max(FAULTS_S_MIN, time_s * campaigns.share(name) / weight) for name in chosen}


def _summary(seed: int, verdicts: dict[str, dict[str, Any]]) -> dict[str, Any]:
    total = {key: sum(verdict[key] for verdict in verdicts.values()) for key in SUMMED}
    faults: Counter[str] = Counter()
    for verdict in verdicts.values():
        faults.update(verdict["faults"])
    problems = sum(len(verdict["problems"]) for verdict in verdicts.values())
    return {
        "seed": seed,
        "total": total | {"problems": problems},
        "faults": dict(sorted(faults.items())),
        "campaigns": verdicts,
    }


def main() -> int:
    arguments = _arguments()
    seed = random.randrange(1 << 31) if arguments.seed is None else arguments.seed
    if arguments.campaign is not None:
        verdict = campaigns.run(arguments.campaign, seed, arguments.seconds, arguments.folder)
        print(json.dumps(dataclasses.asdict(verdict)), flush=True)
        os._exit(0 if verdict.good else 1)  # threads of the raw clients may still wait for brokers that have ended
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    chosen = arguments.only or list(campaigns.NAMES)
    _say(f"seed {seed}")
    shares = _shares(chosen, arguments.minutes, arguments.parallel)
    folder = Path(tempfile.mkdtemp(prefix="up-streamer-chaos-"))
    try:
        with ThreadPoolExecutor(arguments.parallel) as pool:
            running = {name: pool.submit(_one, name, seed, shares[name], folder / name) for name in chosen}
            verdicts = {name: future.result() for name, future in running.items()}
    finally:
        machine.unmount_below(folder)
        if arguments.keep:
            _say(f"kept: {folder}")
        else:
            shutil.rmtree(folder, ignore_errors=True)
    summary = _summary(seed, verdicts)
    text = json.dumps(summary)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(summary, indent=2) + "\n")
    print(text)
    total = summary["total"]
    return 1 if any(total[key] for key in ("lost", "doubled", "reordered", "wrong", "unreported", "problems")) else 0


if __name__ == "__main__":
    sys.exit(main())
