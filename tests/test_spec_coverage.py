"""The tool that says which requirement is proven: it must not accept a mark that proves nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tools import spec_coverage as tool

ROOT = Path(__file__).resolve().parent.parent


def test_a_mark_needs_a_known_id_and_where_there_are_several_texts_its_document() -> None:
    rows = list(tool.requirements())
    marks = [
        tool.Mark("dsn~uri-scheme~1", "", "a", "test_good"),
        tool.Mark("dsn~uri-scheme~99", "", "a", "test_unknown"),
        tool.Mark("dsn~uri-scheme~1", "v4", "a", "test_document_too_many"),
        tool.Mark("req~usubscription-unsubscribe~1", "v3-seed", "a", "test_both_texts_of_3_say_the_same"),
        tool.Mark("req~usubscription-subscribe~1", "v3-today", "a", "test_today"),
        tool.Mark("req~usubscription-subscribe~1", "v3", "a", "test_which_of_the_two"),
        tool.Mark("req~usubscription-subscribe~1", "", "a", "test_no_document"),
        tool.Mark("dsn~up-language-naming~1", "", "a", "test_of_what_is_out_of_scope"),
    ]
    errors = tool.assign(rows, marks)
    assert [error.split(": ")[1] for error in errors] == [
        *(
            "test_document_too_many",
            "test_no_document",
            "test_of_what_is_out_of_scope",
            "test_unknown",
            "test_which_of_the_two",
        ),
    ]
    proven = {(row.id, row.doc) for row in rows if row.tests}
    assert proven == {
        ("dsn~uri-scheme~1", ""),
        ("req~usubscription-unsubscribe~1", "v3"),
        ("req~usubscription-subscribe~1", "v3-today"),
    }


def test_the_list_is_whole() -> None:
    rows = list(tool.requirements())
    assert len({(row.id, row.doc) for row in rows}) == len(rows)
    assert all(row.what and row.who for row in rows)
    assert {letter for row in rows for letter in row.level.split(", ")} <= set("MSYD")
    assert {row.doc for row in rows} == {"", "v3", "v3-seed", "v3-today", "v4"}
    assert {row.area.split(".")[0] for row in rows} == {str(number) for number in range(1, 13)}


def test_what_is_not_met_is_said() -> None:
    rows = list(tool.requirements())
    for row in rows:
        row.note = row.by = ""
    text = tool.render(rows)
    assert text.count(tool.NO_TEST) == len({(row.id, row.level, row.what) for row in rows if not row.out})
    assert text.count("| out of scope: ") == sum(bool(row.out) for row in rows) > 30
    rows[0].tests.add(("uprotocol/test_uri", "test_it"))
    rows[0].note = "only half of it"
    assert "`test_it` (test_uri) | only half of it |" in tool.render(rows)
    total, met, part, not_met, out = tool.counts(rows)
    assert (met, part) == (0, 1)
    assert total == part + not_met + out
    rows[0].note = ""
    assert tool.counts(rows)[1:3] == [1, 0]


MARKED = """
import pytest
spec = pytest.mark.spec("dsn~uri-scheme~1")

@spec
def test_runs(): ...

@spec
def test_is_skipped(): pytest.skip("not here")

@spec
@pytest.mark.parametrize("case", [1, 2])
def test_runs_in_part(case):
    if case == 2:
        pytest.skip("not this one")

@spec
@pytest.mark.skipif(True, reason="never")
def test_is_never_called(): ...

@spec
@pytest.mark.xfail
def test_fails_as_expected(): assert False

def test_unmarked(): pytest.skip("it proves nothing anyway")
"""
CONFTEST = """
from tools import spec_coverage

def pytest_configure(config):
    listed = [f"test_marked.py::{name}" for name in (LISTED)]
    config.pluginmanager.register(spec_coverage.Proofs(listed, must_hold=MUST), spec_coverage.PLUGIN_NAME)
"""
SKIPPED = ["test_fails_as_expected", "test_is_never_called", "test_is_skipped"]


def run(path: Path, listed: list[str], *options: str, must_hold: bool = True) -> tuple[int, list[str]]:
    """A run of its own with the watch in it: its exit code, and what it found."""
    (path / "test_marked.py").write_text(MARKED)
    (path / "conftest.py").write_text(CONFTEST.replace("LISTED", repr(listed)).replace("MUST", repr(must_hold)))
    command = [
        sys.executable,
        "-m",
        "pytest",
        *("-p", "xdist.plugin"),
        "-q",
        "-p",
        "no:cacheprovider",
        "-W",
        "ignore",
        "--rootdir",
        str(path),
        *options,
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(command, cwd=path, env=environment, capture_output=True, text=True, timeout=100)
    assert "INTERNALERROR" not in done.stdout + done.stderr
    return done.returncode, [line for line in done.stdout.splitlines() if line.startswith("test_marked.py::")]


def test_a_run_that_skips_a_proof_fails_unless_the_list_says_so(tmp_path: Path) -> None:
    reported = [f"test_marked.py::{name} was skipped, but counts as a proof" for name in SKIPPED]
    assert run(tmp_path, []) == (1, reported)
    assert run(tmp_path, SKIPPED) == (0, [])
    assert run(tmp_path, SKIPPED[:2]) == (1, reported[2:])
    assert run(tmp_path, [], must_hold=False) == (0, reported), "where much is not installed it is only reported"


def test_a_run_that_passes_what_the_list_calls_skipped_fails(tmp_path: Path) -> None:
    wrong = [
        f"test_marked.py::{name} passed, but tools/spec_skipped.txt says that it is skipped"
        for name in ("test_runs", "test_runs_in_part")
    ]
    assert run(tmp_path, [*SKIPPED, "test_runs", "test_runs_in_part"]) == (1, wrong)


def test_what_several_workers_saw_counts_as_one_run(tmp_path: Path) -> None:
    """The cases of one test run on two of them: skipped here, passed there."""
    reported = [f"test_marked.py::{name} was skipped, but counts as a proof" for name in SKIPPED]
    assert run(tmp_path, [], "-n", "2") == (1, reported)
    assert run(tmp_path, SKIPPED, "-n", "2") == (0, [])
    wrong = "test_marked.py::test_runs_in_part passed, but tools/spec_skipped.txt says that it is skipped"
    assert run(tmp_path, [*SKIPPED, "test_runs_in_part"], "-n", "2") == (1, [wrong])


def test_of_what_was_not_selected_whole_nothing_is_said(tmp_path: Path) -> None:
    assert run(tmp_path, [], "test_marked.py::test_runs_in_part[2]") == (0, [])
    assert run(tmp_path, [], "-k", "in_part and 2") == (0, [])
    assert run(tmp_path, [], "-k", "runs") == (0, [])


def test_transports_that_are_no_product_prove_nothing() -> None:
    listed = tool.listed_as_skipped()
    assert listed, "the suite is run over transports that lack a capability, so some of it is skipped"
    assert not any(other in test for test in listed for other in tool.OTHERS)
