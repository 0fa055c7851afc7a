"""What `.ci/run` does after the checks: every test with the compiled core; again, with the Python source, the tests of
the packages that hold compiled modules.

make test -> make test-rest -> each test of the rest that failed, once more and alone -> make test-interpreted

A test of the rest that fails and then passes alone is unstable. The run fails if a test fails twice, if more than
`UNSTABLE_MAX` are unstable, or if a step fails for any other reason. The last line lists the unstable tests.

As a pytest plugin (`-p tools.ci_run --failures FILE`) this module writes what failed in a run.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import pytest

from tools import spec_coverage

ROOT: Final = Path(__file__).resolve().parent.parent
UNSTABLE_MAX: Final = 3  # a busy machine explains a few; more of them is a fault of the product or of the tests
AGAIN_MAX: Final = 10  # of so many failed tests a second run tells something; beyond it something larger is broken
MINUTES_EXPECTED: Final = 35  # on two cores
CLOSING: Final = re.compile(r"(passed|failed|errors?)\b.* in [0-9.]+s")  # pytest's last line
COMPILED: Final = {"UP_STREAMER_COMPILED": "1"}


class Failures:
    """Writes the tests that failed, and what else was wrong, to a file. Under pytest-xdist the main process does."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._tests: list[str] = []
        self._other: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and report.nodeid not in self._tests:
            self._tests.append(report.nodeid)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._other.append(f"{report.nodeid} cannot be collected")

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        proofs = session.config.pluginmanager.get_plugin(spec_coverage.PLUGIN_NAME)
        other = [*self._other, *getattr(proofs, "differences", [])]
        if session.exitstatus not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
            other.append(f"pytest ended with {session.exitstatus!r}")
        self._path.write_text(json.dumps({"tests": self._tests, "other": other}))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--failures", metavar="FILE", help="write to this file, as JSON, what failed")


def pytest_configure(config: pytest.Config) -> None:
    path = config.getoption("--failures")
    if path is not None and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Failures(Path(path)), "failures")


@dataclass(frozen=True)
class Step:
    """One command that has run: whether it succeeded, and pytest's last line."""

    succeeded: bool
    closing: str


@dataclass
class Verdict:
    """What the runs together say."""

    closings: dict[str, str] = field(default_factory=dict)  # by step
    wrong: list[str] = field(default_factory=list)  # each fails the run
    unstable: list[str] = field(default_factory=list)

    @property
    def failed(self) -> bool:
        return bool(self.wrong) or len(self.unstable) > UNSTABLE_MAX

    def lines(self) -> list[str]:
        width = max(map(len, self.closings), default=0) + 1
        lines = [f"{name + ':':{width}} {closing}" for name, closing in self.closings.items()]
        lines += [f"failed: {reason}" for reason in self.wrong]
        if len(self.unstable) > UNSTABLE_MAX:
            lines.append(f"failed: {len(self.unstable)} tests are unstable, at most {UNSTABLE_MAX} may be")
        return [*lines, f"unstable: {', '.join(self.unstable) or 'none'}"]


Run = Callable[[Sequence[str], Mapping[str, str]], Step]


def run(command: Sequence[str], environment: Mapping[str, str]) -> Step:
    """Runs it and prints what it prints."""
    closing = ""
    with subprocess.Popen(
        command, cwd=ROOT, env=os.environ | environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            sys.stdout.buffer.write(line)
            sys.stdout.buffer.flush()
            if CLOSING.search(text := line.decode(errors="replace")):
                closing = text.strip(" =\r\n")
    return Step(process.returncode == 0, closing)


def run_rest(verdict: Verdict, run: Run, folder: Path) -> None:
    """The tests that `make test` leaves out, and those of them that fail once more, each alone."""
    path = folder / "failures.json"
    step = run(["make", "test-rest", "COMPILED=1", f"ARGS=-p tools.ci_run --failures {path}"], {})
    verdict.closings["rest"] = step.closing
    if step.succeeded:
        return
    if not path.exists():
        verdict.wrong.append("the rest ended early")
        return
    failures = json.loads(path.read_text())
    tests: list[str] = failures["tests"]
    verdict.wrong += failures["other"]
    if not tests and not verdict.wrong:
        verdict.wrong.append("the rest, though none of its tests")
    if len(tests) > AGAIN_MAX:
        verdict.wrong.append(f"{len(tests)} tests of the rest, too many to run each of them again")
        return
    for test in tests:
        print(f"\nonce more, alone: {test}", flush=True)
        if run([sys.executable, "-m", "pytest", test], COMPILED).succeeded:
            verdict.unstable.append(test)
        else:
            verdict.wrong.append(f"{test}, twice")


def run_step(verdict: Verdict, run: Run, name: str, command: Sequence[str]) -> None:
    step = run(command, {})
    verdict.closings[name] = step.closing
    if not step.succeeded:
        verdict.wrong.append(" ".join(command))


def run_all(run: Run, folder: Path) -> Verdict:
    """All steps, also after one that failed: each says something of its own."""
    verdict = Verdict()
    run_step(verdict, run, "compiled", ["make", "test", "COMPILED=1"])
    run_rest(verdict, run, folder)
    run_step(verdict, run, "interpreted", ["make", "test-interpreted"])
    return verdict


def main() -> int:
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        verdict = run_all(run, Path(folder))
    print(f"\n{(time.monotonic() - began_s) / 60:.0f} minutes; {MINUTES_EXPECTED} are expected on two cores at most")
    print("\n".join(verdict.lines()), flush=True)
    return int(verdict.failed)


if __name__ == "__main__":
    sys.exit(main())
