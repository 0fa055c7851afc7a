"""The names of cursors: how they stand in the files of former releases, made and taken apart."""

from __future__ import annotations

from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamer.egress import rows
from streamer.egress.rows import RowName, parsed, row, units_of

NAMES = st.text(st.characters(exclude_characters=":", codec="utf-8"), min_size=1, max_size=20)
UNITS = st.none() | st.text(max_size=30)


@pytest.mark.parametrize(
    ("made", "stored"),
    [
        (row("egress", "cloud"), "egress:cloud"),
        (row("followed", "cloud"), "followed:cloud"),
        (row("follower", "cloud", "//hub/80030004/1/0"), "follower:cloud://hub/80030004/1/0"),
        (row("parked", "cloud", 17), "parked:cloud:17"),
        (row("owed", "cloud", 17), "owed:cloud:17"),
        (row("held", "cloud", "r=a:b"), "held:cloud:r=a:b"),
        (row("began", "cloud"), "began:cloud"),
        (row("skipped", "cloud", 31), "skipped:cloud:31"),
    ],
)
def test_the_names_of_rows_are_those_of_former_releases(made: str, stored: str) -> None:
    assert made == stored


@given(st.sampled_from(get_args(rows.RowKind)), NAMES, UNITS)
def test_a_name_is_taken_apart_into_what_it_was_made_of(kind: rows.RowKind, endpoint: str, unit: str | None) -> None:
    assert parsed(row(kind, endpoint, unit)) == RowName(kind, endpoint, unit)
    if unit is not None:
        cursors = {row(kind, endpoint, unit): 7, row(kind, endpoint + "x", unit): 8, row(kind, endpoint): 9}
        assert units_of(cursors, kind, endpoint) == {unit: 7}


def test_rows_of_consumers_belong_to_no_endpoint() -> None:
    assert [parsed(name) for name in ("consumer:app", "owner:cloud/8001/app", "egress", "")] == [None] * 4
