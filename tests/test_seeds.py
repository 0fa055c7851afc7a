"""docs/seeds.md holds: what it names is there, what it calls built is shown by tests, and nothing is left out that has
an id."""

from __future__ import annotations

import ast
import functools
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final, NamedTuple

import pytest

from tools.spec_coverage import ROOT, requirements

PAGE: Final = ROOT / "docs" / "seeds.md"
COVERAGE: Final = ROOT / "docs" / "spec-coverage.md"
TEXTS: Final = ("p3", "pushpin", "ray", "strymon", "usub")  # what the ids begin with
STATE: Final = re.compile(r"built|(?:in part|planned|read otherwise): .+")
PROVEN: Final = ("built", "in part")  # states of rows that need files and tests


class Row(NamedTuple):
    id: str
    mechanism: str
    said_in: str
    files: list[str]
    tests: list[str]  # path::name; may be empty where docs/spec-coverage.md has the tests of a requirement in said_in
    state: str


def rows(page: str) -> list[Row]:
    """The lines that begin with an id of a mechanism. Raises TypeError for one that has not six cells."""
    found = []
    for line in re.findall(r"^\| `[a-z0-9]+-[0-9]+` \|.*$", page, re.MULTILINE):
        id, mechanism, said_in, files, tests, *state = [cell.strip() for cell in line[1:-1].split("|")]
        found.append(Row(id.strip("`"), mechanism, said_in, _named(files), _tests(tests), *state))
    return found


def planned_work(page: str) -> set[str]:
    table = page.partition("| planned work |")[2].partition("\n\n")[0]
    return set(re.findall(r"^\| ([A-Z][\w ]+) \|", table, re.MULTILINE))


def _named(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def _tests(cell: str) -> list[str]:
    """The tests of a cell as path::name. A cell has file::name, or ::name for the file of the test before it."""
    found: list[str] = []
    for test in _named(cell):
        file, _, name = test.partition("::")
        path = paths().get(file, file) if file else found[-1].partition("::")[0]
        found.append(f"{path}::{name}")
    return found


@functools.cache
def paths() -> dict[str, str]:
    """File name without suffix -> path of each test file whose name is unique."""
    files = [path.relative_to(ROOT).as_posix() for path in (ROOT / "tests").rglob("test_*.py")]
    counts = Counter(Path(file).stem for file in files)
    return {Path(file).stem: file for file in files if counts[Path(file).stem] == 1}


@functools.cache
def proven() -> frozenset[str]:
    """Requirements of version 3 that docs/spec-coverage.md lists with tests."""
    text = COVERAGE.read_text(encoding="utf-8")
    return frozenset(
        re.findall(r"^\| `([^`]+)` \| (?:[^|]*, )?v3(?:-seed)?[ ,][^|]*\|[^|]*\|[^|]*\| `test_", text, re.MULTILINE)
    )


@functools.cache
def defined(path: Path) -> frozenset[str]:
    """Names at the top of a module, where pytest finds tests: functions, classes, and classes that are made by a
    call."""
    names: set[str] = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign):
            names.update(target.id for target in node.targets if isinstance(target, ast.Name))
    return frozenset(names)


def is_test(named: str) -> bool:
    path, _, name = named.partition("::")
    return (
        path.startswith("tests/")
        and re.match("test_|Test", name) is not None
        and (ROOT / path).is_file()
        and name in defined(ROOT / path)
    )


def is_shown(row: Row) -> bool:
    """True if the row names tests, or only requirements that have some."""
    ids = _named(row.said_in)
    return bool(row.tests) or (bool(ids) and proven().issuperset(ids))


def wrong(found: Iterable[Row], works: set[str]) -> Iterator[str]:
    """What does not hold of these rows."""
    for row in found:
        kind, _, why = row.state.partition(": ")
        if STATE.fullmatch(row.state) is None:
            yield f"{row.id}: its state says nothing: {row.state!r}"
        if kind == "planned" and not any(why.startswith(work) for work in works):
            yield f"{row.id}: no planned work is called so: {why!r}"
        if kind in PROVEN and not (row.files and is_shown(row)):
            yield f"{row.id}: {kind}, and it names no file, or no test"
        if not row.mechanism or not row.said_in:
            yield f"{row.id}: what is it, and where does the text say so?"
        if kind != "planned":
            yield from (f"{row.id}: {file} is not there" for file in row.files if not (ROOT / file).is_file())
        yield from (f"{row.id}: {test} is no test" for test in row.tests if not is_test(test))


def test_every_row_holds() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert not list(wrong(rows(page), planned_work(page)))


def test_ids_are_unique_and_counted_from_one_in_each_text() -> None:
    ids = [row.id for row in rows(PAGE.read_text(encoding="utf-8"))]
    counts = Counter(id.rpartition("-")[0] for id in ids)
    assert tuple(counts) == TEXTS
    assert ids == [f"{text}-{number}" for text in TEXTS for number in range(1, counts[text] + 1)]


def test_a_row_that_is_named_elsewhere_in_the_page_is_there() -> None:
    page = PAGE.read_text(encoding="utf-8")
    named = set(re.findall(rf"`((?:{'|'.join(TEXTS)})-[0-9]+)`", page))
    assert named == {row.id for row in rows(page)}


def test_every_requirement_of_the_text_of_usubscription_has_a_row() -> None:
    asked = {one.id for one in requirements() if one.doc in ("v3", "v3-seed")}
    page = rows(PAGE.read_text(encoding="utf-8"))
    assert asked == {id for row in page if row.id.startswith("usub") for id in _named(row.said_in)}
    assert len(asked) > 40


@pytest.mark.parametrize(
    ("cells", "says"),
    [
        ("what | 1 | `history/log/log.py` | `test_seeds::test_every_row_holds` | done", "says nothing"),
        (
            "what | 1 | `history/log/log.py` | `test_seeds::test_every_row_holds` | read otherwise: ",
            "says nothing",
        ),
        ("what | 1 | `history/log/log.py` | | built", "no test"),
        ("what | 1 | | `test_seeds::test_every_row_holds` | in part: half of it", "no file"),
        ("what | 1 | | | planned: Somehow", "called so"),
        ("what | 1 | `history/nothing.py` | | read otherwise: so", "history/nothing.py is not there"),
        ("what | 1 | `history/log/log.py` | `test_seeds::test_nothing` | built", "is no test"),
        ("what | 1 | `history/log/log.py` | `test_seeds::rows` | built", "is no test"),
        ("what | 1 | `history/log/log.py` | `test_nothing::test_it` | built", "is no test"),
        ("what | 4; `req~nothing~1` | `history/log/log.py` | | built", "no test"),
        (
            "what | 1 | `history/log/log.py` | `test_seeds::test_every_row_holds` `::test_nothing` | built",
            "is no test",
        ),
        ("what | | `history/log/log.py` | `test_seeds::test_every_row_holds` | built", "where does"),
    ],
)
def test_a_row_that_does_not_hold_is_reported(cells: str, says: str) -> None:
    (found,) = wrong(rows(f"| `ray-1` | {cells} |"), {"Following"})
    assert says in found


def test_a_row_of_what_is_planned_may_name_files_that_are_not_there() -> None:
    assert not list(wrong(rows("| `ray-1` | what | 1 | `history/nothing.py` | | planned: Following |"), {"Following"}))
