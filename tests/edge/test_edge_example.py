"""examples/edge: a page of a real browser draws the drive, over cuts, without a gap."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.edge.chromium import Chromium
from tests.tiers import full

pytestmark = full

ROOT = Path(__file__).resolve().parents[2]
WAIT_S = 60


@pytest.fixture
async def url() -> AsyncIterator[str]:
    command = ("-m", "examples.edge", "--speed", "50")
    process = await asyncio.create_subprocess_exec(
        sys.executable, *command, cwd=ROOT, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    try:
        assert process.stdout is not None
        async with asyncio.timeout(WAIT_S):
            line = (await process.stdout.readline()).decode()
            assert line.startswith("open http://"), line + (await process.stdout.read()).decode()
        yield line.split()[1]
    finally:
        process.terminate()
        await process.wait()


async def facts(browser: Chromium) -> dict[str, int]:
    found: dict[str, int] = await browser.evaluate("facts")
    return found


async def test_the_page_misses_nothing_over_cuts(url: str, tmp_path: Path) -> None:
    """With EDGE_PICTURES, pictures of the page are saved there."""
    async with Chromium(tmp_path / "browser") as browser:
        await browser.open(url)
        await browser.until("facts.events > 500")
        for cut in range(2):
            await browser.evaluate("document.getElementById('cut').click()")
            await browser.until(f"facts.connects >= {cut + 2}")
            before = (await facts(browser))["events"]
            await browser.until(f"facts.events > {before + 160}")
        found = await facts(browser)
        assert (found["missing"], found["twice"]) == (0, 0)
        await browser.until("document.getElementById('trip').textContent.endsWith('km')")
        assert float((await browser.evaluate("document.getElementById('trip').textContent")).split()[0]) > 0
        for scheme in ("light", "dark"):
            path = Path(os.environ.get("EDGE_PICTURES", tmp_path)) / f"edge-{scheme}.png"
            await browser.look(path, scheme)
            assert path.stat().st_size > 10_000
