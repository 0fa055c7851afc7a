"""The house stays small: nothing in the product is written twice, and tools/house.py counts what it says."""

from __future__ import annotations

from pathlib import Path

from tools import house

TREE = Path(__file__).parents[1]


def test_no_two_places_of_the_product_share_ten_lines() -> None:
    assert house.shared_runs(TREE) == []


def test_it_finds_ten_lines_that_stand_twice(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / "streamer").mkdir(exist_ok=True)
        lines = [f"import {name}", *(f"    value_{number} = {number}" for number in range(house.SHARED_LINES)), "# end"]
        (tmp_path / "streamer" / f"{name}.py").write_text("\n\n".join(lines))
    (found,) = house.shared_runs(tmp_path)
    assert found == "streamer/one.py:3 ~ streamer/two.py:3"


def test_lines_of_code_are_those_that_do_something() -> None:
    text = '"""A docstring\nof two lines."""\n\nx = 1  # why\n\n\ndef f(\n    a: int,\n) -> str:\n'
    text += '    """Says."""\n    # a comment\n    return """one\ntwo"""\n'
    assert house.code_lines(text) == 1 + 3 + 2
