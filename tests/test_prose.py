"""tools/prose.py finds what it says it finds."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools import prose


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("def f():\n    'Nobody is told of it.'\n", ["Nobody is told"]),
        ("# names an endpoint, which there is not\n", ["which there is not"]),
        ("x = f'as it is now: {y}'\n", ["as it is now"]),
        ("def is_told(): ...\n", ["is_told"]),
        ("def f(gone): self.rung = 1\n", ["gone", "rung"]),
        ("told()  # a name of somebody else, used and not defined\n", []),
        ("x = 'goes nowhere'  # prose: ok\n", []),
    ],
)
def test_python(tmp_path: Path, text: str, found: list[str]) -> None:
    (tmp_path / "one.py").write_text(text)
    assert sorted(one.found for one in prose.findings(tmp_path, ["one.py"])) == sorted(found)


def test_markdown_without_code(tmp_path: Path) -> None:
    (tmp_path / "one.md").write_text("It is as ever.\n\n```\nas ever\n```\n\nThe key `as ever` of [x](as ever).\n")
    assert [(one.line, one.found) for one in prose.findings(tmp_path, ["one.md"])] == [(1, "as ever")]


def test_generated_files_are_left_out() -> None:
    files = prose.checked_files(prose.ROOT)
    assert "README.md" in files
    assert not [name for name in files if name.endswith("_pb2.py")]
