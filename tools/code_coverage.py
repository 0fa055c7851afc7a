"""Code coverage of the tests: checks it against a floor, and lists the least covered files.

make test-all COMPILED=0 -> .coverage (pytest-cov, lines and branches) -> percent, against tools/coverage_floor.toml
                                                          -> docs/developing.md: the twenty least covered files

python -m tools.code_coverage    after that; exit 1 if coverage is below the floor. If it is higher by more than
                                 NOISE_PERCENT, the command raises the floor and writes the page, for the next commit.

Only the tests' own processes are measured, with the core interpreted: compiled modules cannot be traced.
Source: `req~up-language-test-coverage~1`.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parent.parent
FLOOR: Final = ROOT / "tools" / "coverage_floor.toml"
PAGE: Final = ROOT / "docs" / "developing.md"
BEGIN, END = "<!-- least covered: begin -->\n", "<!-- least covered: end -->\n"
LEAST_COVERED: Final = 20
NOISE_PERCENT: Final = 0.5  # between two runs of the same code: races take other branches, machines lack other things


def measured() -> dict[str, Any]:
    """Returns `coverage json` of the last run: files with their summaries, and totals."""
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        command = [sys.executable, "-m", "coverage", "json", "--quiet", "-o", file.name]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(f"nothing was measured, run `make test-all COMPILED=0` first: {done.stdout}{done.stderr}")
        found: dict[str, Any] = json.loads(Path(file.name).read_text())
        return found


def percent(summary: dict[str, int]) -> float:
    """The percentage of lines and branches together, as coverage.py counts it."""
    of = summary["num_statements"] + summary["num_branches"]
    return 100.0 * (summary["covered_lines"] + summary["covered_branches"]) / of if of else 100.0


def total(files: dict[str, dict[str, int]]) -> float:
    keys = ("num_statements", "num_branches", "covered_lines", "covered_branches")
    return percent({key: sum(summary[key] for summary in files.values()) for key in keys})


def table(files: dict[str, dict[str, int]]) -> str:
    least = sorted(files.items(), key=lambda item: (percent(item[1]), item[0]))[:LEAST_COVERED]
    rows = [f"| `{name}` | {percent(summary):.0f} % | {summary['num_statements']} |" for name, summary in least]
    return "\n".join(["| file | covered | statements |", "|---|---|---|", *rows, ""])


def main() -> int:
    files = {name: found["summary"] for name, found in measured()["files"].items()}
    now, floor = total(files), float(tomllib.loads(FLOOR.read_text())["percent"])
    print(f"code coverage: {now:.1f} % of lines and branches, {len(files)} files; the floor is {floor} %")
    if now < floor:
        print(f"expected at least {floor} %: add tests for new code, see docs/developing.md", file=sys.stderr)
        return 1
    if (higher := int((now - NOISE_PERCENT) * 10) / 10) > floor:
        FLOOR.write_text(
            f"# Of lines and branches. Raised by tools/code_coverage.py, never lowered.\npercent = {higher}\n"
        )
        before, rest = PAGE.read_text().split(BEGIN)
        PAGE.write_text(before + BEGIN + table(files) + END + rest.split(END)[1])
        print(f"the floor is {higher} % now: commit tools/coverage_floor.toml and docs/developing.md")
    return 0


if __name__ == "__main__":
    sys.exit(main())
