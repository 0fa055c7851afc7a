"""Runs with several workers and in two tiers: a nested pytest with what tests/conftest.py registers."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import tiers
from transports.conformance.deadline import LEAVE_S, awaits, limited

ROOT = Path(__file__).resolve().parent.parent
CONFTEST = """
import os
from tests.side_by_side import Summary, Turns

def pytest_configure(config):
    for name in ("full", "alone"):
        config.addinivalue_line("markers", name)
    config.pluginmanager.register(Summary(), "summary_of_workers")
    if hasattr(config, "workerinput"):
        config.pluginmanager.register(Turns(os.environ["PYTEST_XDIST_TESTRUNUID"]), "turns")
"""
SPANS = """
import json, os, time
from pathlib import Path
import pytest

def span(name):
    begun = time.monotonic()
    time.sleep(0.02)  # long enough for others to be seen beside it
    with Path("spans").open("a") as file:
        file.write(json.dumps([name, os.getpid(), begun, time.monotonic()]) + "\\n")

@pytest.mark.parametrize("number", range(40))
def test_beside_others(number):
    span("beside")

@pytest.mark.alone
@pytest.mark.parametrize("number", range(6))
def test_alone(number):
    span("alone")

@pytest.mark.full
@pytest.mark.parametrize("number", range(3))
def test_long(number): ...
"""


def run(path: Path, test: str, *options: str, conftest: str = CONFTEST, code: int = 0) -> str:
    """What pytest prints for a file with `test`, in a process of its own. Only the plugins that are named here."""
    (path / "test_one.py").write_text(test)
    (path / "conftest.py").write_text(conftest)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options, "--rootdir", str(path)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(command, cwd=path, env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout


def test_nothing_runs_beside_a_test_that_is_alone(tmp_path: Path) -> None:
    said = run(tmp_path, SPANS, "-p", "xdist.plugin", "-n", "3", "--dist", "worksteal")
    assert "49 passed" in said
    spans = [json.loads(line) for line in (tmp_path / "spans").read_text().splitlines()]
    assert len({worker for _, worker, _, _ in spans}) == 3, "all workers had tests"
    alone = [(begun, ended) for name, _, begun, ended in spans if name == "alone"]
    assert len(alone) == 6
    for begun, ended in alone:
        beside = [name for name, _, since, until in spans if since < ended and until > begun]
        assert beside == ["alone"]


@pytest.mark.parametrize("workers", [[], ["-p", "xdist.plugin", "-n", "2"]], ids=["one process", "two workers"])
def test_a_run_ends_with_what_it_has_left_out(workers: list[str], tmp_path: Path) -> None:
    said = run(tmp_path, SPANS, *workers, "-m", "not full", "-k", "long or alone")
    assert "tests left to `make test-rest`: 3 (docs/developing.md)" in said
    assert "processors busy: " in said
    said = run(tmp_path, SPANS, *workers, "-k", "long")
    assert "tests left to" not in said


def test_seeds_begin_where_make_simulate_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiers, "FIRST_SEED", 700)
    params = tiers.seeds(5, 2, step=10)
    assert [param.values for param in params] == [(700,), (710,), (720,), (730,), (740,)]
    marks = [{mark.name for mark in param.marks} for param in params]
    assert marks == [{"seeded"}] * 2 + [{"seeded", "full"}] * 3


def test_each_commit_draws_other_cases_and_all_have_their_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    cases = [f"case {number}" for number in range(300)]
    seen: set[str] = set()
    for number in range(60):
        monkeypatch.setattr(tiers, "_commit", lambda number=number: f"commit {number}")
        drawn = {param.values[0] for param in tiers.drawn(cases) if not param.marks}
        assert 10 <= len(drawn) <= 60
        assert drawn == {param.values[0] for param in tiers.drawn(cases) if not param.marks}, "the same for each worker"
        seen |= drawn
    assert seen == set(cases)


async def _waits_in_a_library(event: asyncio.Event) -> None:
    await event.wait()


async def test_a_test_that_hangs_says_what_it_waited_for() -> None:
    async def hangs(event: asyncio.Event) -> None:
        await _waits_in_a_library(event)

    with pytest.raises(pytest.fail.Exception) as failed:
        await limited(hangs, lambda *_: 0.01)(asyncio.Event())
    said = failed.value.msg.splitlines()
    assert said[0] == "not finished after 0.01 s; it was waiting at"
    assert said[1].endswith("in hangs: await _waits_in_a_library(event)")
    assert said[2].endswith("in _waits_in_a_library: await event.wait()")


async def test_a_test_that_swallows_its_cancellation_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transports.conformance.deadline.LEAVE_S", 0.01)
    over = asyncio.Event()
    ended = asyncio.Event()

    async def goes_on() -> None:
        try:
            await over.wait()
        except asyncio.CancelledError:
            await over.wait()
            ended.set()

    with pytest.raises(pytest.fail.Exception, match=r"(?s)over\.wait.*It swallowed its cancellation"):
        await limited(goes_on, lambda: 0.01)()
    over.set()
    await asyncio.wait_for(ended.wait(), LEAVE_S)


async def test_a_test_in_time_has_its_own_result() -> None:
    async def passes(value: int) -> int:
        await asyncio.sleep(0)
        return value

    async def fails() -> None:
        raise ValueError("its own")

    assert await limited(passes, lambda _: 10.0)(3) == 3
    with pytest.raises(ValueError, match="its own"):
        await limited(fails, lambda: 10.0)()


async def test_what_a_future_waits_for_can_not_be_seen() -> None:
    assert list(awaits(asyncio.get_running_loop().create_future())) == []
