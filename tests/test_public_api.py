"""docs/public-api.md: what it lists can be imported, and documented code imports nothing else of ours."""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from tools.house import PRODUCT

ROOT: Final = Path(__file__).parents[1]
PAGE: Final = ROOT / "docs" / "public-api.md"
PLUGINS: Final = ("examples/transport-template", "examples/transport-nats")


def rows() -> dict[str, set[str]]:
    """Module -> names, of the tables of the page."""
    found: dict[str, set[str]] = {}
    for module, names in re.findall(r"^\| `([\w.*]+)` \| ([^|]*) \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE):
        found.setdefault(module, set()).update(re.findall(r"`(\w+)`", names))
    return found


def imports(code: str) -> Iterator[tuple[str, str]]:
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] in PRODUCT:
            yield from ((node.module, alias.name) for alias in node.names)


def documented() -> list[tuple[str, str]]:
    """Where, and code: the Python of the pages, and the files of the example plugins."""
    found = []
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        for block in re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE):
            statements = re.findall(r"^from [\w.]+ import (?:\([^)]*\)|[^\n]*)", block, re.MULTILINE)
            found.append((page.name, "\n".join(statements)))
    for folder in PLUGINS:
        found += [(str(path.relative_to(ROOT)), path.read_text()) for path in sorted((ROOT / folder).rglob("*.py"))]
    return found


@pytest.mark.parametrize("module", [module for module in rows() if not module.endswith("*_pb2")])
def test_what_is_listed_is_there(module: str) -> None:
    for library, needs in (("transports.zenoh", "zenoh"), ("transports.dds", "cyclonedds"), ("spark", "pyspark")):
        if module.startswith(library):
            pytest.importorskip(needs, exc_type=ImportError)
    imported = importlib.import_module(module)
    missing = [name for name in rows()[module] if not hasattr(imported, name)]
    assert not missing, f"{PAGE.name}: {module} has no {', '.join(missing)}"


def test_documented_code_imports_what_is_listed() -> None:
    public = rows()
    unlisted = {
        f"{where}: from {module} import {name}"
        for where, code in documented()
        for module, name in imports(code)
        if name not in public.get(module, ())
        and f"{module}.{name}" not in public
        and not re.fullmatch(r"uprotocol\.v1(\.\w+_pb2)?", module)
    }
    assert not unlisted, f"not in {PAGE.name}:\n" + "\n".join(sorted(unlisted))
