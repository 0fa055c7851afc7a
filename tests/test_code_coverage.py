"""The tool that compares the coverage of the code with its floor."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

from tools import code_coverage as tool

PAGE = f"before\n{tool.BEGIN}old\n{tool.END}after\n"


def summary(lines: int, branches: int, covered_lines: int, covered_branches: int) -> dict[str, int]:
    return {
        "num_statements": lines,
        "num_branches": branches,
        "covered_lines": covered_lines,
        "covered_branches": covered_branches,
    }


@pytest.fixture
def files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Any]:
    """What was measured: 90 % in all. The floor is 80."""
    measured = {
        "streamer/app.py": {"summary": summary(150, 50, 140, 40)},
        "history/log/log.py": {"summary": summary(0, 0, 0, 0)},
    }
    monkeypatch.setattr(tool, "measured", lambda: {"files": measured})
    monkeypatch.setattr(tool, "FLOOR", tmp_path / "floor.toml")
    monkeypatch.setattr(tool, "PAGE", tmp_path / "page.md")
    tool.FLOOR.write_text("percent = 80.0\n")
    tool.PAGE.write_text(PAGE)
    return measured


def test_the_floor_rises(files: dict[str, Any]) -> None:
    assert tool.main() == 0
    assert tomllib.loads(tool.FLOOR.read_text()) == {"percent": 89.5}
    page = tool.PAGE.read_text()
    assert "| `streamer/app.py` | 90 % | 150 |" in page
    assert page.startswith("before\n")
    assert page.endswith("after\n")
    assert tool.main() == 0
    assert tool.PAGE.read_text() == page


def test_below_the_floor_it_fails_and_changes_nothing(files: dict[str, Any]) -> None:
    tool.FLOOR.write_text("percent = 95.0\n")
    assert tool.main() == 1
    assert tomllib.loads(tool.FLOOR.read_text()) == {"percent": 95.0}
    assert tool.PAGE.read_text() == PAGE


def test_what_two_runs_differ_by_leaves_the_floor(files: dict[str, Any]) -> None:
    tool.FLOOR.write_text("percent = 89.9\n")
    assert tool.main() == 0
    assert tomllib.loads(tool.FLOOR.read_text()) == {"percent": 89.9}
    assert tool.PAGE.read_text() == PAGE


def test_the_least_covered_come_first() -> None:
    many = {f"file{number:02}.py": summary(100, 0, number, 0) for number in range(30)}
    rows = tool.table(many).splitlines()[2:]
    assert len(rows) == tool.LEAST_COVERED
    assert rows[0] == "| `file00.py` | 0 % | 100 |"
    assert rows[-1] == "| `file19.py` | 19 % | 100 |"
