"""The table of expected deviations, how what arrives is counted, and builds that can't be had."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest

from tests.brokers import makes
from tests.brokers.deviations import Deviation, judge, read
from tests.brokers.makes import Make, Missing
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


@pytest.mark.parametrize(
    ("command", "says", "registry_lacks_it"),
    [
        (("no-such-tool",), "`no-such-tool` is not installed", False),
        (("sh", "-c", "echo Could not find artifact; exit 1"), "Could not find artifact", True),
        (("sh", "-c", "echo no network; exit 1"), "no network", False),
    ],
)
def test_a_make_that_cannot_be_had_says_why(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, command: tuple[str, ...], says: str, registry_lacks_it: bool
) -> None:
    monkeypatch.setattr(makes, "CACHE", tmp_path)
    with pytest.raises(Missing, match=says) as missing:
        Make("other", "1", (command,)).prepare()
    assert missing.value.registry_lacks_it is registry_lacks_it


def test_a_make_is_built_once_and_again_when_its_sources_change(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(makes, "CACHE", tmp_path / "cache")
    sources = tmp_path / "sources"
    sources.mkdir()
    make = Make("other", "1", (("sh", "-c", "echo built >> {cache}/log"),), sources=sources)
    for text, times in (("one", 1), ("one", 1), ("two", 2)):
        (sources / "file").write_text(text)
        assert (make.prepare() / "log").read_text().count("built") == times
