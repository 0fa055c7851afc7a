"""Each test of the conformance suite ends even if a call of the plugin hangs and swallows its cancellation. This needs
no pytest-timeout, which can't report where it hung."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
RUN_S_MAX = 30  # far below what pytest-timeout would end
SUITE = """
import asyncio
import contextlib

from tests.transports.mutants.end import HubTransport
from tests.transports.mutants.harness import OnHub
from transports.conformance import deadline
from uprotocol.transport import UTransport

deadline.LEAVE_S = 0.1


async def hang() -> None:
    while True:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.Event().wait()


class HangsInOpen(HubTransport):
    async def open(self) -> None:
        await hang()


class HangsInSending(HubTransport):
    async def send_batch(self, messages):
        await hang()


class HangsInClose(HubTransport):
    async def close(self) -> None:
        await super().close()
        await hang()


class LeavesATask(HubTransport):
    async def open(self) -> None:
        await super().open()
        self.hanging = asyncio.ensure_future(hang())


class OneTest(OnHub):
    test_deadline_s = 0.5

    async def test_it(self, pair) -> None:
        await self.send_all(pair[0], self.traffic(1))


class TestOpen(OneTest):
    transport = HangsInOpen


class TestSending(OneTest):
    transport = HangsInSending


class TestClose(OneTest):
    transport = HangsInClose


class TestTask(OneTest):
    transport = LeavesATask


class TestGood(OneTest):
    pass
"""
SETTINGS = """
[pytest]
asyncio_mode = strict
asyncio_default_fixture_loop_scope = function
"""


def test_a_plugin_that_swallows_cancellations_holds_up_no_test(tmp_path: Path) -> None:
    (tmp_path / "test_suite.py").write_text(SUITE)
    (tmp_path / "pytest.ini").write_text(SETTINGS)
    options = ["-q", "-p", "no:cacheprovider", "-p", "no:timeout", "-rA", "-c", "pytest.ini", "test_suite.py"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=RUN_S_MAX,
        check=False,
    )
    said = done.stdout
    for outcome in (
        "ERROR test_suite.py::TestOpen::test_it",
        "FAILED test_suite.py::TestSending::test_it",
        "ERROR test_suite.py::TestClose::test_it",
        "PASSED test_suite.py::TestGood::test_it",
    ):
        assert outcome in said, said
    assert "opening alpha and beta: not finished after 0.5 s" in said
    assert "close of HangsInClose(" in said
    assert "in hang: await asyncio.Event().wait()" in said
    assert "It swallowed its cancellation, and was left behind" in said
    assert "tasks that have swallowed their cancellation are left behind with their loop" in said
