"""The pages that teach run as they stand."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import pytest

from tests.docs import running
from tests.tiers import full

DOCS: Final = Path(__file__).resolve().parents[2] / "docs"
zenoh = pytest.importorskip("zenoh", reason="the pages need Zenoh", exc_type=ImportError)


@pytest.mark.broker
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(not running.has_mosquitto(), reason="no mosquitto")
@pytest.mark.parametrize(
    "page",
    [
        "getting-started",
        "tutorials/gateway",
        *(pytest.param(f"tutorials/{one}", marks=full) for one in ("cloud", "plugin", "spark")),
    ],
)
def test_a_page_runs(page: str, tmp_path: Path) -> None:
    running.Page(DOCS / f"{page}.md", tmp_path).run()


def test_commands_of_a_block() -> None:
    block = "$ first \\\n  more\n$ second\none\ntwo\n"
    assert running.commands(block) == [("first   more", []), ("second", ["one", "two"])]


@pytest.mark.parametrize(
    ("wanted", "lines", "taken"),
    [
        (["a"], ["a", "b"], 1),
        (["b"], ["a", "b"], None),
        (["...", "b"], ["a", "b"], 2),
        (["a ... c"], ["a  x  c"], 1),
        (["a ... c"], ["a  x  d"], None),
        (["...", "b"], ["a"], None),
    ],
)
def test_lines_that_are_expected(wanted: list[str], lines: list[str], taken: int | None) -> None:
    assert running.found(wanted, lines) == taken


def test_a_page_that_promises_too_much_fails(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("```console\n$ echo one\ntwo\n```\n")
    with pytest.raises(running.Mismatch, match=r"should have printed:\ntwo\nhas printed:\none"):
        running.Page(page, tmp_path).run()


def test_terminals_files_and_ports(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "```toml\n# a.toml\nport = 1883\n```\n"
        "<!-- stays: one -->\n```console\n$ cat a.toml; read -t 100 x < <(sleep 100)\n...\nport = 1883\n```\n"
        "<!-- until -->\n```console\n$ echo x >> n; wc -l < n\n3\n```\n"
        "<!-- not run -->\n```console\n$ false\n```\n"
        "<!-- ctrl-c: one -->\n```console\n$ grep -c port a.toml\n1\n```\n"
    )
    running.Page(page, tmp_path).run()
    assert "1883" not in (tmp_path / "a.toml").read_text()
