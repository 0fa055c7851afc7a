"""The pages hold: the readings, the links, and the numbers that they take from the code."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
HERE = Path(__file__).resolve()
READINGS = ROOT / "docs" / "readings.md"
SKIPPED = {READINGS, HERE, ROOT / "docs" / "spec-coverage.md"}  # the list itself, and what is made of other files
FOLDERS = ("docs", "tests", "tools", "deploy", "examples", "bench", "chaos", "simulation", ".github")
PRODUCT = ("uprotocol", "storage", "transports", "history", "usubscription", "usubscription_client", "streamer", "spark_ingest")
TEXT = {".py", ".md", ".toml", ".proto", ".yml", ".conf", ".service"}
NUMBER = re.compile(r"\b[A-Z]-[0-9]+\b")
ROW = re.compile(r"^\| ([A-Z]-[0-9]+) \|.*\| ([^|]*) \|$", re.MULTILINE)


def pages() -> list[Path]:
    return [
        ROOT / "README.md",
        ROOT / "deploy" / "README.md",
        *sorted((ROOT / "docs").rglob("*.md")),
        *sorted((ROOT / "examples").rglob("*.md")),
    ]


def used() -> dict[str, set[str]]:
    """Each number of a reading, and the files that name it."""
    found: dict[str, set[str]] = defaultdict(set)
    files = [path for folder in (*FOLDERS, *PRODUCT) for path in (ROOT / folder).rglob("*") if path.suffix in TEXT]
    for path in [*files, *ROOT.glob("*.md"), ROOT / "pyproject.toml"]:
        if path not in SKIPPED and path.name != "CHANGELOG.md":
            for number in NUMBER.findall(path.read_text(encoding="utf-8")):
                found[number].add(path.relative_to(ROOT).as_posix())
    return found


def rows() -> dict[str, str]:
    """Number of a reading -> its last column."""
    found = ROW.findall(READINGS.read_text(encoding="utf-8"))
    assert len({number for number, _ in found}) == len(found), "a number has two rows"
    return dict(found)


def test_every_reading_that_is_named_has_a_row_and_every_row_is_named() -> None:
    named = used()
    missing = {number: sorted(files) for number, files in named.items() if number not in rows()}
    assert not missing, f"docs/readings.md has no row for {missing}"
    assert not set(rows()) - set(named), "rows that nothing in the project names"


def test_a_reading_lives_where_its_row_says() -> None:
    named = used()
    for number, cell in rows().items():
        files = re.findall(r"`([^`]+)`", cell)
        assert files, f"{number} lives nowhere"
        assert set(files) <= named[number], f"{number} is not named in {set(files) - named[number]}"


def anchors(page: Path) -> set[str]:
    heads = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" in target:
            continue
        name, _, anchor = target.partition("#")
        there = (page.parent / name).resolve() if name else page
        assert there.exists(), f"{page.name} links to {target}, which there is not"
        assert not anchor or anchor in anchors(there), f"{page.name} links to {target}, and there is no such heading"


@pytest.mark.parametrize("page", [page for page in pages() if page not in SKIPPED], ids=lambda page: page.relative_to(ROOT).as_posix())
def test_files_that_are_named_are_there(page: Path) -> None:
    """Names with a folder of ours before them, as code or in the text. (DDS topics and keys of Zenoh begin with uprotocol/, too.)"""
    folders = "|".join(name for name in (*FOLDERS, *PRODUCT) if name != "uprotocol")
    text = page.read_text(encoding="utf-8")
    for name in set(re.findall(rf"(?<![\w/.-])((?:{folders})/[\w./-]*\w)", text)):
        assert (ROOT / name).exists() or (page.parent / name).exists(), f"{page.name} names {name}, which there is not"


def test_every_page_is_in_the_readme() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert not [page.name for page in (ROOT / "docs").glob("*.md") if f"docs/{page.name}" not in readme]
