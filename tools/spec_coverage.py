"""Which requirement of the specification is proven by which test: writes docs/spec-coverage.md.

tools/spec_ids.toml --+
                      +--> table per area: id, level, met by, not met yet
pytest --collect-only -'       (marks `@pytest.mark.spec("id")`, for uSubscription with `doc="v3"`; no test is run)

python tools/spec_coverage.py            write
python tools/spec_coverage.py --check    exit 1 if what is written is stale, or a mark names an unknown id or document
"""

from __future__ import annotations

import contextlib
import io
import sys
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import pytest

ROOT: Final = Path(__file__).resolve().parent.parent
IDS: Final = ROOT / "tools" / "spec_ids.toml"
OUT: Final = ROOT / "docs" / "spec-coverage.md"
HEADER: Final = """# Coverage of the uProtocol specification

Made by `make spec-coverage` from the marks of the tests and from tools/spec_ids.toml; don't edit it.
Level: M must, S should, Y may, D definition or fact. Ids that begin with `local~` are this project's own, for sentences that have none.
An empty "not met yet" beside a test means that the test proves all of it.
"""
NO_TEST: Final = "no test proves it yet"


@dataclass
class Requirement:
    """One row: an id, and in uSubscription its document. `doc` is empty where there is just one text."""

    area: str
    id: str
    doc: str
    level: str
    who: str
    what: str
    note: str
    by: str
    tests: set[tuple[str, str]] = field(default_factory=set)  # (file, test)

    @property
    def met(self) -> bool:
        return bool(self.tests or self.by)

    @property
    def ours(self) -> bool:
        return self.who != "APP"

    def row(self) -> str:
        missing = self.note or ("" if self.met else NO_TEST if self.ours else "concerns applications only")
        shown = [f"`{self.id}`", *([self.doc] if self.doc else []), self.level, self.what, self._met_by(), missing]
        return "| " + " | ".join(cell.replace("|", "\\|") for cell in shown) + " |"

    def _met_by(self) -> str:
        files: dict[str, set[str]] = defaultdict(set)
        for file, test in self.tests:
            files[test].add(file)
        proofs = [f"`{test}` ({', '.join(sorted(files[test]))})" for test in sorted(files)]
        return "<br>".join([*([self.by] if self.by else []), *proofs])


class Collected:
    """A pytest plugin that keeps the marks: (id, doc, file, test), and what a mark lacks."""

    def __init__(self) -> None:
        self.marks: list[tuple[str, str, str, str]] = []

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        for item in session.items:
            file = item.path.relative_to(ROOT / "tests").with_suffix("").as_posix()
            test = getattr(item, "originalname", item.name)
            for mark in item.iter_markers("spec"):
                doc = mark.kwargs.get("doc", "")
                self.marks.extend((id, doc, file, test) for id in mark.args)


def collect() -> list[tuple[str, str, str, str]]:
    """The marks of every test under tests/. Exits if a test file can't be imported, since its marks would be missed."""
    collected, said = Collected(), io.StringIO()
    with contextlib.redirect_stdout(said):
        code = pytest.main(
            ["--collect-only", "-q", "-p", "no:cacheprovider", "--rootdir", str(ROOT), str(ROOT / "tests")], plugins=[collected]
        )
    if code != pytest.ExitCode.OK:
        sys.exit(f"{said.getvalue()}\nthe tests can't be collected, so their marks are not known")
    return collected.marks


def requirements() -> Iterator[Requirement]:
    for area, entries in tomllib.loads(IDS.read_text()).items():
        if area == "documents":
            continue
        for id, entry in entries.items():
            what, note, by = entry["what"], entry.get("note", ""), entry.get("by", "")
            for doc, text in what.items() if isinstance(what, dict) else [("", what)]:
                doc_note = note.get(doc, "") if isinstance(note, dict) else note
                yield Requirement(area, id, doc, entry["level"], entry["who"], text, doc_note, by)


def assign(rows: list[Requirement], marks: list[tuple[str, str, str, str]]) -> list[str]:
    """Give each mark to its row; what is wrong with the others."""
    table = {(row.id, row.doc): row for row in rows}
    errors = set()
    for id, doc, file, test in marks:
        row = table.get((id, doc))
        if row is None and doc in ("v3-seed", "v3-today"):
            row = table.get((id, "v3"))  # both texts say the same
        if row is not None:
            row.tests.add((file, test))
            continue
        docs = [row.doc for row in rows if row.id == id]
        wanted = f"its document is one of {', '.join(docs)}, not {doc or 'none'}" if docs else "tools/spec_ids.toml has no such id"
        errors.add(f"tests/{file}.py: {test}: {id}: {wanted}")
    return sorted(errors)


def render(rows: list[Requirement]) -> str:
    documents = tomllib.loads(IDS.read_text())["documents"]
    areas: dict[str, list[Requirement]] = defaultdict(list)
    for row in rows:
        areas[row.area].append(row)
    parts = [HEADER, "| area | requirements | met | met in part | not met yet |", "|---|---|---|---|---|"]
    for area, members in areas.items():
        ours = [row for row in members if row.ours or row.met]
        part, met = sum(row.met and bool(row.note) for row in ours), sum(row.met and not row.note for row in ours)
        parts.append(f"| {area} | {len(ours)} | {met} | {part} | {len(ours) - met - part} |")
    for area, members in areas.items():
        docs = {row.doc for row in members} - {""}
        parts.append(f"\n## {area}\n")
        if docs:
            parts += [*(f"- {doc}: {text}" for doc, text in documents.items() if doc in docs), ""]
            members = [row if row.doc else Requirement(**{**vars(row), "doc": "all"}) for row in members]
        heads = ["id", *(["document"] if docs else []), "level", "requirement", "met by", "not met yet"]
        parts += ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|", *(row.row() for row in members)]
    return "\n".join(parts) + "\n"


def main() -> None:
    rows = list(requirements())
    errors = assign(rows, collect())
    text = render(rows)
    check = "--check" in sys.argv[1:]
    if check and (not OUT.exists() or OUT.read_text() != text):
        errors.append(f"{OUT.relative_to(ROOT)} is stale: run make spec-coverage")
    if not check:
        OUT.write_text(text)
    for error in errors:
        print(error, file=sys.stderr)
    met = sum(row.met for row in rows)
    print(f"{met} of {len(rows)} requirements have a proof ({sum(bool(row.note) and row.met for row in rows)} of them in part)")
    sys.exit(1 if errors else 0)


if __name__ == "__main__":
    main()
