"""The table of expected deviations, deviations.toml: make -> check -> what happens instead, and why.

A run fails where a check deviates that is not in it, and where one in it no longer does.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pytest

TABLE: Final = Path(__file__).parent / "deviations.toml"


@dataclass(frozen=True)
class Deviation:
    """`shows` is a part of the failure's text. `may`: it depends on timing, so the check may also pass."""

    why: str
    shows: str = ""
    may: bool = False


def read(path: Path = TABLE) -> dict[tuple[str, str], Deviation]:
    """(make, check) -> what is expected of it."""
    table = tomllib.loads(path.read_text())
    return {
        (make, check): Deviation(**row)
        for make, groups in table.items()
        for row in groups
        for check in row.pop("checks")
    }


def judge(report: pytest.TestReport, deviation: Deviation) -> None:
    """Changes the report of a check that is in the table: the failure that is expected becomes an xfail, and a success
    where one is expected a failure."""
    if report.failed and deviation.shows in report.longreprtext:
        report.outcome = "skipped"
        report.wasxfail = deviation.why
    elif report.failed:
        report.sections.append(("deviations.toml", f"expects another failure: {deviation.shows!r}"))
    elif report.passed and not deviation.may:
        report.outcome = "failed"
        report.longrepr = f"no longer deviates: take its row out of deviations.toml ({deviation.why})"
