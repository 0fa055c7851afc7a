"""The tool that says which requirement is proven: it must not accept a mark that proves nothing."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    found = importlib.util.spec_from_file_location("spec_coverage_tool", ROOT / "tools" / "spec_coverage.py")
    assert found is not None
    assert found.loader is not None
    module = sys.modules[found.name] = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


def test_a_mark_needs_a_known_id_and_where_there_are_several_texts_its_document(tool: ModuleType) -> None:
    rows = list(tool.requirements())
    marks = [
        ("dsn~uri-scheme~1", "", "a", "test_good"),
        ("dsn~uri-scheme~99", "", "a", "test_unknown"),
        ("dsn~uri-scheme~1", "v4", "a", "test_document_too_many"),
        ("req~usubscription-unsubscribe~1", "v3-seed", "a", "test_both_texts_of_3_say_the_same"),
        ("req~usubscription-subscribe~1", "v3-today", "a", "test_today"),
        ("req~usubscription-subscribe~1", "v3", "a", "test_which_of_the_two"),
        ("req~usubscription-subscribe~1", "", "a", "test_no_document"),
    ]
    errors = tool.assign(rows, marks)
    assert [error.split(": ")[1] for error in errors] == [
        *("test_document_too_many", "test_no_document", "test_unknown", "test_which_of_the_two"),
    ]
    proven = {(row.id, row.doc) for row in rows if row.tests}
    assert proven == {("dsn~uri-scheme~1", ""), ("req~usubscription-unsubscribe~1", "v3"), ("req~usubscription-subscribe~1", "v3-today")}


def test_the_list_is_whole(tool: ModuleType) -> None:
    rows = list(tool.requirements())
    assert len({(row.id, row.doc) for row in rows}) == len(rows)
    assert all(row.what and row.who for row in rows)
    assert {letter for row in rows for letter in row.level.split(", ")} <= set("MSYD")
    assert {row.doc for row in rows} == {"", "v3", "v3-seed", "v3-today", "v4"}
    assert {row.area.split(".")[0] for row in rows} == {str(number) for number in range(1, 11)}


def test_what_is_not_met_is_said(tool: ModuleType) -> None:
    rows = list(tool.requirements())
    for row in rows:
        row.note = row.by = ""
    text = tool.render(rows)
    assert text.count(tool.NO_TEST) == sum(row.ours for row in rows)
    rows[0].tests.add(("uprotocol/test_uri", "test_it"))
    rows[0].note = "only half of it"
    assert "`test_it` (uprotocol/test_uri) | only half of it |" in tool.render(rows)
