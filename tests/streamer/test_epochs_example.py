"""The example: a drive in epochs of one second, and a subscriber that joins in the middle of one."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


async def test_each_second_that_was_seen_was_whole(tmp_path: Path) -> None:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "examples.epochs", "--seconds", "6", "--pictures", str(tmp_path)),
        cwd=ROOT,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    said, why = await process.communicate()
    assert process.returncode == 0, why.decode()
    rows = [line.split("│")[1:-1] for line in said.decode().splitlines() if line.startswith("│")]
    cells = [[cell.strip() for cell in row] for row in rows]
    assert [row[3] for row in cells] == [
        *["none: it was over"] * 3,
        "none: it had begun",
        f"{cells[4][1]}, whole",
        "goes on",
    ]
    assert {path.name for path in tmp_path.iterdir()} == {"epochs-order.svg", "epochs-frontiers.svg"}
