"""What `.ci/run` makes of failed tests: run once more alone, then unstable or a failure."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tools import ci_run

TESTS = """
import os
import pytest

@pytest.fixture
def broken():
    raise OSError

def test_good(): ...

@pytest.mark.parametrize("case", ["we are the router", "a::b[c]"])
def test_bad(case):
    assert not case

def test_no_fixture(broken): ...

def test_crash():
    os._exit(1)
"""


class Steps:
    """Instead of processes: says which step or test fails, and writes down what was run."""

    def __init__(self, *, steps: Iterable[str] = (), tests: Sequence[str] = (), twice: Iterable[str] = ()) -> None:
        self.steps, self.tests, self.twice = set(steps), list(tests), set(twice)
        self.other: list[str] = []
        self.crashes = False  # before it has written what failed
        self.ran: list[str] = []

    def __call__(self, command: Sequence[str], environment: Mapping[str, str]) -> ci_run.Step:
        name = command[1] if command[0] == "make" else command[-1]
        self.ran.append(name)
        if name != "test-rest":
            return ci_run.Step(name not in self.steps | self.twice, f"1 {name} in 2.00s")
        path = Path(command[-1].rpartition(" ")[2])
        if not self.crashes:
            path.write_text(json.dumps({"tests": self.tests, "other": self.other}))
        return ci_run.Step(not (self.tests or self.other or self.crashes), "9 passed in 8.00s")


def test_all_is_well(tmp_path: Path) -> None:
    steps = Steps()
    verdict = ci_run.run_all(steps, tmp_path)
    assert steps.ran == ["test", "test-rest", "test-interpreted"]
    assert not verdict.failed
    assert verdict.lines() == [
        "compiled:    1 test in 2.00s",
        "rest:        9 passed in 8.00s",
        "interpreted: 1 test-interpreted in 2.00s",
        "unstable: none",
    ]


def test_what_passes_alone_is_unstable(tmp_path: Path) -> None:
    steps = Steps(tests=["a::b[c d]", "e::f"])
    verdict = ci_run.run_all(steps, tmp_path)
    assert steps.ran == ["test", "test-rest", "a::b[c d]", "e::f", "test-interpreted"]
    assert not verdict.failed
    assert verdict.lines()[-1] == "unstable: a::b[c d], e::f"


def test_what_fails_twice_fails_the_run(tmp_path: Path) -> None:
    verdict = ci_run.run_all(Steps(tests=["a::b", "e::f"], twice=["e::f"]), tmp_path)
    assert verdict.failed
    assert verdict.lines()[-2:] == ["failed: e::f, twice", "unstable: a::b"]


def test_only_so_many_tests_may_be_unstable(tmp_path: Path) -> None:
    tests = [f"a::{number}" for number in range(ci_run.UNSTABLE_MAX + 1)]
    assert not ci_run.run_all(Steps(tests=tests[1:]), tmp_path).failed
    verdict = ci_run.run_all(Steps(tests=tests), tmp_path)
    assert verdict.failed
    assert verdict.lines()[-2:] == ["failed: 4 tests are unstable, at most 3 may be", f"unstable: {', '.join(tests)}"]


def test_many_failed_tests_are_not_run_again(tmp_path: Path) -> None:
    steps = Steps(tests=[f"a::{number}" for number in range(ci_run.AGAIN_MAX + 1)])
    verdict = ci_run.run_all(steps, tmp_path)
    assert steps.ran == ["test", "test-rest", "test-interpreted"]
    assert verdict.failed
    assert verdict.lines()[-2] == "failed: 11 tests of the rest, too many to run each of them again"


@pytest.mark.parametrize("name", ["test", "test-interpreted"])
def test_the_other_steps_have_no_second_run(name: str, tmp_path: Path) -> None:
    steps = Steps(steps=[name])
    verdict = ci_run.run_all(steps, tmp_path)
    assert steps.ran == ["test", "test-rest", "test-interpreted"]
    assert verdict.failed
    assert verdict.lines()[-2].startswith(f"failed: make {name}")


def test_what_is_no_failed_test_fails_the_run(tmp_path: Path) -> None:
    steps = Steps(tests=["a::b"])
    steps.other = ["test_x was skipped, but counts as a proof"]
    verdict = ci_run.run_all(steps, tmp_path)
    assert verdict.failed
    assert verdict.lines()[-2:] == ["failed: test_x was skipped, but counts as a proof", "unstable: a::b"]


def test_a_rest_that_ends_early_fails_the_run(tmp_path: Path) -> None:
    steps = Steps()
    steps.crashes = True
    verdict = ci_run.run_all(steps, tmp_path)
    assert verdict.failed
    assert verdict.lines()[-2] == "failed: the rest ended early"


def failures(folder: Path, files: Mapping[str, str], *options: str) -> dict[str, Any]:
    """What the plugin writes for a pytest over `files`, in a process of its own."""
    for name, text in files.items():
        (folder / name).write_text(text)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "tools.ci_run", *options]
    environment = os.environ | {"PYTHONPATH": str(ci_run.ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    subprocess.run(
        [*command, "--failures", "failures.json", "--rootdir", str(folder)],
        cwd=folder,
        env=environment,
        capture_output=True,
        timeout=100,
        check=False,
    )
    return json.loads((folder / "failures.json").read_text())  # type: ignore[no-any-return]


def test_the_plugin_writes_each_failed_test_once_also_one_that_ended_its_worker(tmp_path: Path) -> None:
    written = failures(tmp_path, {"test_one.py": TESTS}, "-p", "xdist.plugin", "-n", "2")
    assert written["other"] == []
    assert sorted(written["tests"]) == [
        "test_one.py::test_bad[a::b[c]]",
        "test_one.py::test_bad[we are the router]",
        "test_one.py::test_crash",
        "test_one.py::test_no_fixture",
    ]


@pytest.mark.parametrize("workers", [[], ["-p", "xdist.plugin", "-n", "2"]], ids=["one process", "two workers"])
def test_the_plugin_writes_what_is_no_failed_test(workers: list[str], tmp_path: Path) -> None:
    files = {"test_one.py": "raise OSError", "conftest.py": ""}
    written = failures(tmp_path, files, *workers)
    assert "test_one.py cannot be collected" in written["other"]
    conftest = "def pytest_configure(config):\n    config.pluginmanager.register(Proofs(), 'spec_proofs')\n"
    conftest += "class Proofs:\n    differences = ['test_x was skipped, but counts as a proof']\n"
    written = failures(tmp_path, {"test_one.py": "def test_good(): ...", "conftest.py": conftest}, *workers)
    assert written == {"tests": [], "other": ["test_x was skipped, but counts as a proof"]}


def test_a_command_is_printed_and_its_closing_line_kept(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    program = "import os; print('1 passed in 3.0s'); print('==== 2 failed, 1 passed in 4.5s (0:00:04) ==='); "
    step = ci_run.run([sys.executable, "-c", program + "print(os.environ['NAME']); exit(3)"], {"NAME": "näme"})
    assert step == ci_run.Step(False, "2 failed, 1 passed in 4.5s (0:00:04)")
    assert "näme\n".encode() in capfdbinary.readouterr().out
