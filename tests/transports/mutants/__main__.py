"""python -m tests.transports.mutants [WORD]: every fault against every test, as a table; or only those with that word in their name.

Minutes in all. The good plugin comes first: what fails for it says nothing about a fault, and is told.
"""

from __future__ import annotations

import sys

from tests.transports.mutants.end import HubTransport
from tests.transports.mutants.faults import MUTANTS, Mutant
from tests.transports.mutants.matrix import IN_TIME_S, cases, caught_by, verdict

NAMED_MAX = 2  # tests that the table names for each fault


def row(mutant: Mutant, tests: list[str]) -> str:
    named = ", ".join(f"`{name.removeprefix('test_')}`" for name in tests[:NAMED_MAX]) or "nothing"
    more = f" and {len(tests) - NAMED_MAX} more" if len(tests) > NAMED_MAX else ""
    return f"| {mutant.says} | {named}{more} |"


def main(word: str = "") -> None:
    for name, case in cases().items():
        if why := verdict(HubTransport, case, IN_TIME_S):
            print(f"The good plugin fails {name}: {why}", file=sys.stderr)
    mutants = [mutant for mutant in MUTANTS.values() if word in mutant.name]
    caught = 0
    print("| fault | caught by |\n|---|---|")
    for mutant in mutants:
        tests = caught_by(mutant)
        caught += bool(tests)
        print(row(mutant, tests), flush=True)
    print(f"\n{caught} of {len(mutants)} faults are caught.")


if __name__ == "__main__":
    main(*sys.argv[1:])
