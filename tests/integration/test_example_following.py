"""examples/following: its command counts correctly, and no message is lost, doubled or out of order."""

from __future__ import annotations

import asyncio
import os
import re
import sys
from pathlib import Path

import pytest

from examples.following.__main__ import Heard
from tests.tiers import full

ROOT = Path(__file__).parents[2]


@full
@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_over_cuts_and_kills_everything_is_heard_once_and_in_order() -> None:
    command = ["-m", "examples.following", "--messages", "400", "--cuts", "4", "--kills", "3", "--seed", "5"]
    running = await asyncio.create_subprocess_exec(
        sys.executable,
        *command,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        said = (await running.communicate())[0].decode()
    finally:
        if running.returncode is None:
            running.terminate()
    assert running.returncode == 0, said
    assert "sent 400, heard 400, lost 0, doubled 0, out of order 0   (4 cuts, 3 kills," in said
    assert len(re.findall(r"^ +\d+: (?:cut|hub|vehicle|both)", said, re.MULTILINE)) == 7


@pytest.mark.parametrize(
    ("numbers", "verdict"),
    [
        ([0, 1, 2], "sent 3, heard 3, lost 0, doubled 0, out of order 0"),
        ([0, 2], "sent 3, heard 2, lost 1, doubled 0, out of order 0"),
        ([0, 1, 1, 2], "sent 3, heard 3, lost 0, doubled 1, out of order 0"),
        ([0, 2, 1], "sent 3, heard 3, lost 0, doubled 0, out of order 1"),
    ],
)
def test_it_counts_what_is_wrong(numbers: list[int], verdict: str) -> None:
    heard = Heard()
    heard.numbers = numbers
    assert heard.verdict(3) == (verdict, numbers == [0, 1, 2])
