"""Generates docs/spec-coverage.md: which tests prove which requirement of the specification.

tools/spec_ids.toml ----------------+
                                    +--> table per area: id, level, met by, what is not met
pytest --collect-only --------------+       (marks `@pytest.mark.spec("id")`, for uSubscription with `doc="v3"`)
tools/spec_skipped.txt -------------+       (marked tests that prove nothing, since all their cases are skipped)
     ^
     '--- checked by each test run: `Proofs` is a plugin of tests/conftest.py

python tools/spec_coverage.py            write the page, and remove deleted tests from the list
python tools/spec_coverage.py --check    exit 1 if the page is stale, or a mark or a line of the list is unknown
python tools/spec_coverage.py --run      run the marked tests (minutes), write the list of skipped ones, then the page

The list is needed because the page is checked on a fresh clone, before any test ran, and must be the same everywhere.
With CI=true (where a missing broker is a failure, too) a run fails if a proof was skipped that is not in the list, or
if one in the list has passed. So a green run proves that the tests on the page have run and passed. Without CI a run
only prints the differences.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
import tomllib
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, NamedTuple

import pytest

ROOT: Final = Path(__file__).resolve().parent.parent
IDS: Final = ROOT / "tools" / "spec_ids.toml"
SKIPPED: Final = ROOT / "tools" / "spec_skipped.txt"
OUT: Final = ROOT / "docs" / "spec-coverage.md"
HEADER: Final = """# Coverage of the uProtocol specification

Each requirement, and the tests that prove it. `make spec-coverage` generates this page from marks of tests and \
tools/spec_ids.toml: do not edit it.

| column | content |
|---|---|
| id | the specification's id, or `local~...` for a sentence without one |
| level | M must, S should, Y may, D definition or fact |
| met by | tests, with their file in parentheses; "every transport": the five files \
that run the conformance suite. Skipped tests do not count |
| not met | what no test proves ("met in part"), or why the requirement is out of scope; empty: all of it is proven |
"""
SKIPPED_HEADER: Final = (
    "# Marked tests of which every case is skipped, so that their marks prove nothing. Made by tools/spec_coverage.py "
    "--run.\n"
)
PLUGIN_NAME: Final = "spec_proofs"  # under which pytest knows `Proofs`
NO_TEST: Final = "no test proves it yet"
SHOWN_MAX: Final = 20  # lines: without a broker there are hundreds
# files of tests that run the conformance suite for a transport of the product
CONFORMANCE: Final = {
    "transports/test_dds",
    "transports/test_local",
    "transports/test_mqtt5_conformance",
    "transports/test_mqtt5_websocket_conformance",
    "transports/test_zenoh",
}
# transports that only try the conformance suite: they prove nothing about a transport of the product
OTHERS: Final = ("transports/mutants/",)


class Mark(NamedTuple):
    id: str
    doc: str
    file: str
    test: str


@dataclass
class Requirement:
    """One row: an id, and in uSubscription its document. `doc` is empty where there is just one text."""

    area: str
    id: str
    doc: str
    level: str
    who: str
    what: str
    note: str  # the part that is not met
    by: str  # a document that meets it
    out: str  # why it is out of scope
    tests: set[tuple[str, str]] = field(default_factory=set)  # (file, test)

    @property
    def met(self) -> bool:
        return bool(self.tests or self.by)

    @property
    def state(self) -> str:
        if self.out:
            return "out of scope"
        return ("met in part" if self.note else "met") if self.met else "not met"

    def row(self) -> str:
        missing = f"out of scope: {self.out}" if self.out else self.note or ("" if self.met else NO_TEST)
        shown = [f"`{self.id}`", *([self.doc] if self.doc else []), self.level, self.what, self._met_by(), missing]
        return "| " + " | ".join(cell.replace("|", "\\|") for cell in shown) + " |"

    def _met_by(self) -> str:
        files: dict[str, set[str]] = defaultdict(set)
        for file, test in self.tests:
            files[test].add(file)
        tests: dict[str, list[str]] = defaultdict(list)
        for test in sorted(files):
            names = sorted(file.rpartition("/")[2] for file in files[test])
            tests["every transport" if files[test] == CONFORMANCE else ", ".join(names)].append(f"`{test}`")
        proofs = [f"{', '.join(tests[where])} ({where})" for where in sorted(tests)]
        return "; ".join([*([self.by] if self.by else []), *proofs])


# -- what ran


def test_of(nodeid: str) -> str:
    """The test without its parameters."""
    return nodeid.partition("[")[0]


def listed_as_skipped() -> set[str]:
    return (
        {line for line in SKIPPED.read_text().splitlines() if line and not line.startswith("#")}
        if SKIPPED.exists()
        else set()
    )


def proves(item: pytest.Item) -> bool:
    """True if the test has marks that count."""
    return item.get_closest_marker("spec") is not None and not any(f"tests/{other}" in item.nodeid for other in OTHERS)


def write_skipped(tests: Collection[str]) -> None:
    SKIPPED.write_text("\n".join([SKIPPED_HEADER, *sorted(tests)]) + "\n")


class Proofs:
    """A pytest plugin that compares skipped tests with the list. `must_hold`: a difference fails the run; else it is
    printed. Under pytest-xdist each worker sends its outcomes, and the main process compares."""

    __name__ = PLUGIN_NAME

    def __init__(self, listed: Collection[str], *, must_hold: bool) -> None:
        self._listed, self._must_hold = listed, must_hold
        self._outcomes: dict[str, set[str]] = {}  # by marked test: the outcomes of its cases
        self._partly: set[str] = set()  # tests of which only some cases were selected, so that nothing is known
        self.differences: list[str] = []

    @property
    def skipped(self) -> list[str]:
        """The marked tests of which every case was skipped, sorted."""
        return sorted(
            test for test, outcomes in self._outcomes.items() if outcomes == {"skipped"} and test not in self._partly
        )

    def pytest_deselected(self, items: Sequence[pytest.Item]) -> None:
        self._partly |= {test_of(item.nodeid) for item in items}

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._partly |= {test_of(argument) for argument in session.config.args if "[" in argument}
        self._outcomes = {test_of(item.nodeid): set() for item in session.items if proves(item)}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        outcomes = self._outcomes.get(test_of(report.nodeid))
        if outcomes is not None and (report.when == "call" or report.outcome != "passed"):
            outcomes.add(report.outcome)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """The outcomes of a worker of pytest-xdist. A crashed worker sends none."""
        outcomes, partly = getattr(node, "workeroutput", {}).get(PLUGIN_NAME, ({}, []))
        for test, seen in outcomes.items():
            self._outcomes.setdefault(test, set()).update(seen)
        self._partly.update(partly)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if hasattr(session.config, "workeroutput"):  # in a worker
            outcomes = {test: sorted(seen) for test, seen in self._outcomes.items()}
            session.config.workeroutput[PLUGIN_NAME] = (outcomes, sorted(self._partly))
            return
        not_tried = [test for test in self.skipped if test not in self._listed]
        passed = sorted(test for test in self._listed if "passed" in self._outcomes.get(test, ()))
        self.differences = [f"{test} was skipped, but counts as a proof" for test in not_tried]
        self.differences += [f"{test} passed, but tools/spec_skipped.txt says that it is skipped" for test in passed]
        if self.differences and self._must_hold and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self.differences:
            terminalreporter.section("proofs of the specification")
            for difference in self.differences[:SHOWN_MAX]:
                terminalreporter.line(difference)
            if len(self.differences) > SHOWN_MAX:
                terminalreporter.line(f"... and {len(self.differences) - SHOWN_MAX} more")
            terminalreporter.line("if that is intended, run python tools/spec_coverage.py --run")


def proofs() -> Proofs:
    """The plugin, for tests/conftest.py."""
    return Proofs(listed_as_skipped(), must_hold=os.environ.get("CI", "").lower() in ("true", "1"))


def run() -> None:
    """Run the marked tests, and write the list of skipped ones. Exits if one fails, as some do without a
    broker."""
    os.environ["CI"] = "true"
    proofs = Proofs((), must_hold=False)
    code = pytest.main(
        ["-q", "-m", "spec", "-p", "no:cacheprovider", "--rootdir", str(ROOT), str(ROOT / "tests")], plugins=[proofs]
    )
    if code != pytest.ExitCode.OK:
        sys.exit("a marked test fails, so the list was not written")
    write_skipped(proofs.skipped)


# -- what is marked


class Collected:
    """A pytest plugin that records the marks of tests that run, and the names of all marked tests."""

    def __init__(self, skipped: Collection[str]) -> None:
        self._skipped = skipped
        self.marks: list[Mark] = []
        self.tests: set[str] = set()

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        for item in session.items:
            if not proves(item):
                continue
            test, name = test_of(item.nodeid), getattr(item, "originalname", item.name)
            if name == "runTest" and item.parent is not None:  # a state machine: the name of its class is clearer
                name = item.parent.name
            file = item.path.relative_to(ROOT / "tests").with_suffix("").as_posix()
            self.tests.add(test)
            if test not in self._skipped:
                marks = item.iter_markers("spec")
                self.marks.extend(
                    Mark(id, mark.kwargs.get("doc", ""), file, name) for mark in marks for id in mark.args
                )


def collect(skipped: Collection[str]) -> Collected:
    """The marks of every test under tests/. Exits if a test file cannot be imported: its marks would be missing."""
    collected, said = Collected(skipped), io.StringIO()
    with contextlib.redirect_stdout(said):
        code = pytest.main(
            ["--collect-only", "-q", "-p", "no:cacheprovider", "--rootdir", str(ROOT), str(ROOT / "tests")],
            plugins=[collected],
        )
    if code != pytest.ExitCode.OK:
        sys.exit(f"{said.getvalue()}\nthe tests can't be collected, so their marks are unknown")
    return collected


def requirements() -> Iterator[Requirement]:
    """Every row of tools/spec_ids.toml. `note` and `out` are one text, or one text per document."""
    tables = tomllib.loads(IDS.read_text())
    for area, entries in tables.items():
        if area == "documents":
            continue
        for id, entry in entries.items():
            what = entry["what"]
            for doc, text in what.items() if isinstance(what, dict) else [("", what)]:
                note, out = (_of_document(entry.get(name, ""), doc) for name in ("note", "out"))
                yield Requirement(area, id, doc, entry["level"], entry["who"], text, note, entry.get("by", ""), out)


def _of_document(text: str | dict[str, str], doc: str) -> str:
    return text.get(doc, "") if isinstance(text, dict) else text


def assign(rows: list[Requirement], marks: Sequence[Mark]) -> list[str]:
    """Assign each mark to its row; returns the errors of the others."""
    table = {(row.id, row.doc): row for row in rows}
    errors = set()
    for id, doc, file, test in marks:
        row = table.get((id, doc))
        if row is None and doc in ("v3-seed", "v3-today"):
            row = table.get((id, "v3"))  # both documents have the same text
        if row is not None and not row.out:
            row.tests.add((file, test))
            continue
        docs = [row.doc for row in rows if row.id == id]
        wanted = (
            f"its document is one of {', '.join(docs)}, not {doc or 'none'}"
            if docs
            else "tools/spec_ids.toml has no such id"
        )
        errors.add(f"tests/{file}.py: {test}: {id}: {'it is said to be out of scope' if row is not None else wanted}")
    return sorted(errors)


# -- the page

STATES: Final = ("met", "met in part", "not met", "out of scope")


def counts(rows: Collection[Requirement]) -> list[int]:
    return [len(rows), *(sum(row.state == state for row in rows) for state in STATES)]


def merged(rows: Sequence[Requirement]) -> list[Requirement]:
    """Join rows that differ only in their document. A row without a document gets "all"."""
    found: dict[str, Requirement] = {}
    for row in rows:
        joined = found.setdefault(replace(row, doc="").row(), replace(row, doc=""))
        joined.doc = ", ".join(filter(None, [joined.doc, row.doc or "all"]))
    return list(found.values())


def render(rows: list[Requirement]) -> str:
    documents = tomllib.loads(IDS.read_text())["documents"]
    areas: dict[str, list[Requirement]] = defaultdict(list)
    for row in rows:
        areas[row.area].append(row)
    parts = [HEADER, f"| area | requirements | {' | '.join(STATES)} |", "|---" * (2 + len(STATES)) + "|"]
    for area, members in [*areas.items(), ("all", rows)]:
        parts.append(f"| {area} | {' | '.join(map(str, counts(members)))} |")
    for area, members in areas.items():
        docs = {row.doc for row in members} - {""}
        parts.append(f"\n## {area}\n")
        if docs:
            parts += [*(f"- {doc}: {text}" for doc, text in documents.items() if doc in docs), ""]
            members = merged(members)
        heads = ["id", *(["document"] if docs else []), "level", "requirement", "met by", "not met"]
        parts += ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|", *(row.row() for row in members)]
    return "\n".join(parts) + "\n"


def main() -> None:
    if "--run" in sys.argv[1:]:
        run()
    skipped = listed_as_skipped()
    rows, collected = list(requirements()), collect(skipped)
    errors, removed = assign(rows, collected.marks), skipped - collected.tests
    text = render(rows)
    if "--check" in sys.argv[1:]:
        errors += [
            f"tools/spec_skipped.txt: {test}: no marked test has that name: run make spec-coverage"
            for test in sorted(removed)
        ]
        if not OUT.exists() or OUT.read_text() != text:
            errors.append(f"{OUT.relative_to(ROOT)} is stale: run make spec-coverage")
    else:
        write_skipped(skipped - removed)
        OUT.write_text(text)
    for error in errors:
        print(error, file=sys.stderr)
    total, *each = counts(rows)
    print(f"{total} requirements: {', '.join(f'{count} {state}' for count, state in zip(each, STATES, strict=True))}")
    sys.exit(1 if errors else 0)


if __name__ == "__main__":
    main()
