"""The conformance suite passes a good plugin, and fails it for each fault."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.tiers import drawn
from tests.transports.mutants.__main__ import table
from tests.transports.mutants.end import HubTransport
from tests.transports.mutants.faults import MUTANTS
from tests.transports.mutants.harness import HubConformance, OnFullHub
from tests.transports.mutants.matrix import IN_TIME_S, SOON_S, cases, verdict
from transports.conformance.delivery import DeliveryConformance, PressureConformance

CAUGHT_OF_50_MIN = 45
DOCS = Path(__file__).parents[3] / "docs" / "conformance.md"
CASES = cases()
CAUGHT = {name: mutant for name, mutant in MUTANTS.items() if mutant.caught_by}


class TestHub(HubConformance):
    """The good plugin, with all of pytest around it."""


class TestFullHub(OnFullHub, DeliveryConformance, PressureConformance):
    """Another good plugin, whose network says that it is full."""


def alone_if_measured(case: Any) -> Any:
    """Beside other tests, a fault that wastes the processor gets too little of it to be noticed."""
    measured = CAUGHT[case.values[0]].caught_by.endswith("_costs_no_processor")
    return pytest.param(*case.values, marks=[*case.marks, pytest.mark.alone]) if measured else case


@pytest.mark.parametrize("name", [alone_if_measured(case) for case in drawn(CAUGHT)])
def test_the_suite_catches(name: str) -> None:
    mutant = CAUGHT[name]
    assert verdict(mutant.transport, CASES[mutant.caught_by], SOON_S), (
        f"{mutant.caught_by} passes a plugin with this fault: {mutant.says}"
    )


@pytest.mark.parametrize("case", drawn(sorted({mutant.caught_by for mutant in CAUGHT.values()})))
def test_what_catches_a_fault_passes_the_good_plugin(case: str) -> None:
    assert verdict(HubTransport, CASES[case], IN_TIME_S) == ""


def test_the_docs_have_the_table() -> None:
    """`python -m tests.transports.mutants` prints it."""
    assert "\n".join(table()) in DOCS.read_text()


def test_enough_are_caught() -> None:
    assert len(MUTANTS) >= 50
    assert len(CAUGHT) * 50 >= len(MUTANTS) * CAUGHT_OF_50_MIN
