"""The size and the shape of the product: ceilings that it may not pass. `make house` shows what they are about."""

from __future__ import annotations

from pathlib import Path

from tools import house

TREE = Path(__file__).parents[1]


def test_no_two_places_of_the_product_share_ten_lines() -> None:
    assert house.shared_runs(TREE) == []


def test_ten_lines_that_stand_twice_are_found(tmp_path: Path) -> None:
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


def _write(tree: Path, **files: str) -> None:
    (tree / "streamer").mkdir()
    for name, text in files.items():
        (tree / "streamer" / f"{name}.py").write_text(text)


def test_names_that_stand_twice_are_found(tmp_path: Path) -> None:
    _write(tmp_path, one="class A:\n    class Inner: ...\nKey = tuple[int, str]\n", two="Key = bytes | None\nA = 3\n")
    assert house.names_twice(tmp_path) == {"Key": ["streamer/one.py", "streamer/two.py"]}


def test_long_classes_are_found(tmp_path: Path) -> None:
    _write(tmp_path, one="class A:\n" + "    x = 1\n" * house.CLASS_LINES_MAX + "class B:\n    x = 1\n")
    assert house.long_classes(tmp_path) == {"streamer/one.py:A": house.CLASS_LINES_MAX + 1}


def test_circles_of_imports_are_found(tmp_path: Path) -> None:
    _write(
        tmp_path,
        one="from streamer import two\n",
        two="def f():\n    from streamer.three import x\n",
        three="import streamer.one\nfrom streamer import __init__\n",
        four="from streamer import one\n",
    )
    assert house.circles(tmp_path) == [["streamer.one", "streamer.three", "streamer.two"]]
