"""Broker x check, for the terminal and for docs/brokers.md."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from tests.brokers.deviations import Deviation


@dataclass
class Matrix:
    versions: dict[str, str] = field(default_factory=dict)
    rows: dict[str, dict[str, str]] = field(default_factory=dict)  # row -> make -> cell
    notes: dict[str, dict[str, list[str]]] = field(default_factory=dict)  # make -> why -> checks
    _counts: dict[tuple[str, str], dict[str, int]] = field(default_factory=dict)

    def note(
        self,
        make: str,
        check: str,
        report: pytest.TestReport,
        *,
        facts: dict[str, str],
        deviation: Deviation | None,
        mode: str | None,
    ) -> None:
        """Conformance tests are counted by mode; each other check has a row."""
        outcome = _outcome(report)
        if outcome == "deviates" and deviation is not None:
            checks = self.notes.setdefault(make, {}).setdefault(deviation.why, [])
            if check not in checks:
                checks.append(check)
        if mode is None:
            said = facts.pop("", "") or outcome
            self.rows.setdefault(check.replace("_", " "), {})[make] = f"**{said}**" if outcome == "FAILS" else said
            for row, cell in facts.items():
                self.rows.setdefault(row, {})[make] = cell
            return
        row = f"conformance, {mode}"
        counts = self._counts.setdefault((row, make), {})
        counts[outcome] = counts.get(outcome, 0) + 1
        shown = ", ".join(f"{counts[word]} {word}" for word in ("passes", "deviates", "FAILS") if word in counts)
        self.rows.setdefault(row, {})[make] = shown or "not run"

    def markdown(self) -> str:
        makes = list(dict.fromkeys(make for cells in self.rows.values() for make in cells))
        lines = ["| | " + " | ".join(f"{make} {self.versions.get(make, '')}".strip() for make in makes) + " |"]
        lines.append("|---" * (len(makes) + 1) + "|")
        for row, cells in self.rows.items():
            lines.append(f"| {row} | " + " | ".join(cells.get(make, "") for make in makes) + " |")
        notes = [
            f"- {make}: {why} ({', '.join(f'`{check}`' for check in checks)})"
            for make, reasons in self.notes.items()
            for why, checks in reasons.items()
        ]
        return "\n".join([*lines, "", *notes, ""])


def _outcome(report: pytest.TestReport) -> str:
    if report.failed:
        return "FAILS"
    if report.skipped:
        return "deviates" if hasattr(report, "wasxfail") else "not run"
    return "passes"
