"""The table of expected deviations, and how what arrives is counted."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest

from tests.brokers.deviations import Deviation, judge, read
from tests.brokers.stage import Counts


@pytest.mark.parametrize(
    ("outcome", "text", "may", "judged", "is_expected"),
    [
        ("failed", "2000 sent: 1000 lost", False, "skipped", True),
        ("failed", "2000 sent: 3 reordered", False, "failed", False),
        ("passed", "", False, "failed", False),
        ("passed", "", True, "passed", False),
        ("skipped", "no broker", False, "skipped", False),
    ],
)
def test_a_run_fails_where_a_deviation_comes_or_goes(
    outcome: Literal["passed", "failed", "skipped"], text: str, may: bool, judged: str, is_expected: bool
) -> None:
    report = pytest.TestReport("check", ("file", 1, "check"), {}, outcome, text, "call")
    judge(report, Deviation("why", "1000 lost", may))
    assert (report.outcome, hasattr(report, "wasxfail")) == (judged, is_expected)


def test_a_row_may_name_several_checks(tmp_path: Path) -> None:
    (tmp_path / "table.toml").write_text('[[mochi]]\nwhy = "so"\nmay = true\nchecks = ["one", "two"]\n')
    expected = Deviation("so", may=True)
    assert read(tmp_path / "table.toml") == {("mochi", "one"): expected, ("mochi", "two"): expected}


@pytest.mark.parametrize(
    ("heard", "said"),
    [
        ("abcd", "4 sent: all, once, in order"),
        ("abd", "4 sent: 1 lost"),
        ("abcabcd", "4 sent: 3 doubled"),
        ("acbd", "4 sent: 1 reordered"),
        ("dabxa", "4 sent: 1 lost, 1 doubled, 2 reordered"),
    ],
)
def test_counts(heard: str, said: str) -> None:
    sent = [letter.encode() for letter in "abcd"]
    assert str(Counts.of(sent, [letter.encode() for letter in heard])) == said
