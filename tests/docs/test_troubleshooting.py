"""docs/troubleshooting.md quotes texts that the product prints."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path
from typing import Final

from tools.house import PRODUCT

ROOT: Final = Path(__file__).resolve().parents[2]
PAGE: Final = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
ROW: Final = re.compile(r"^\| (?!you see|---)(.*?) \|", re.MULTILINE)
OTHERS: Final = {"received", "forwarded", "--version"}  # columns of `status`, an option
ROWS_MIN: Final = 25


@cache
def said() -> str:
    """All strings of the product, with `...` for what changes."""
    found = []
    for path in (path for name in PRODUCT for path in (ROOT / name).rglob("*.py") if "_pb2" not in path.name):
        for one in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(one, ast.JoinedStr):
                parts = [part.value if isinstance(part, ast.Constant) else "\0" for part in one.values]
                found.append("".join(map(str, parts)))
            elif isinstance(one, ast.Constant) and isinstance(one.value, str):
                found.append(one.value)
    return "\n".join(found)


def test_each_quoted_text_is_one_that_the_product_prints() -> None:
    rows = ROW.findall(PAGE)
    assert len(rows) >= ROWS_MIN
    quoted = [text for row in rows for text in re.findall(r"`([^`]+)`", row) if text not in OTHERS]
    assert len(quoted) >= ROWS_MIN
    parts = {part.strip(" :") for text in quoted for part in text.removeprefix("error ").split("...")} - {""}
    assert not [part for part in parts if part not in said() and part.removeprefix("up_streamer_") not in said()]
