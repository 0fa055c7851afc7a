"""Prints the table of faults, or checks all faults.

python -m tests.transports.mutants               the table of docs/conformance.md: each fault, and what catches it
python -m tests.transports.mutants --all [WORD]  runs every fault, or those with that word, against every test: minutes
"""

from __future__ import annotations

import sys

from tests.transports.mutants.end import HubTransport
from tests.transports.mutants.faults import MUTANTS
from tests.transports.mutants.matrix import IN_TIME_S, cases, caught_by, verdict


def row(says: str, tests: list[str]) -> str:
    return f"| {says} | {', '.join(f'`{name}`' for name in tests) or 'nothing'} |"


def table() -> list[str]:
    head = ["| fault | must be caught by |", "|---|---|"]
    mutants = sorted(MUTANTS.values(), key=lambda mutant: not mutant.caught_by)
    return head + [row(mutant.says, [mutant.caught_by] if mutant.caught_by else []) for mutant in mutants]


def run_all(word: str = "") -> None:
    """Try the good plugin first: a test that it fails reveals no fault."""
    for name, case in cases().items():
        if why := verdict(HubTransport, case, IN_TIME_S):
            print(f"The good plugin fails {name}: {why}", file=sys.stderr)
    mutants = [mutant for mutant in MUTANTS.values() if word in mutant.name]
    caught = 0
    for mutant in mutants:
        tests = caught_by(mutant)
        caught += bool(tests)
        print(row(mutant.says, tests), flush=True)
    print(f"{caught} of {len(mutants)} faults are caught.")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--all"]:
        run_all(*sys.argv[2:])
    else:
        print("\n".join(table()))
