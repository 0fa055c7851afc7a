"""The site of the documentation: its pages, its links, and the names that its API reference describes."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import itertools
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import pytest

from tools import docs_site

ROOT: Final = Path(__file__).resolve().parents[2]
CONFIG: Final[dict[str, Any]] = tomllib.loads((docs_site.DOCS / "site.toml").read_text(encoding="utf-8"))["project"]


def pages_in(navigation: Any) -> Iterator[str]:
    if isinstance(navigation, str):
        yield navigation
    else:
        for inner in navigation.values() if isinstance(navigation, dict) else navigation:
            yield from pages_in(inner)


def test_the_navigation_has_each_page_once() -> None:
    listed = sorted(pages_in(CONFIG["nav"]))
    pages = [path.relative_to(docs_site.DOCS).as_posix() for path in docs_site.DOCS.rglob("*.md")]
    assert listed == sorted(page for page in pages if not page.startswith("adr/"))


def test_the_pages_load_no_fonts() -> None:
    assert CONFIG["theme"]["font"] is False


def test_a_link_that_leaves_docs_leads_to_a_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(docs_site, "SOURCE", tmp_path / "source")
    monkeypatch.setattr(docs_site, "write_api", lambda folder: None)  # needs griffe
    docs_site.Source().write()
    page = (tmp_path / "source" / "developing.md").read_text()
    assert not re.search(r"\]\(\.\./", page)
    assert "`.ci/run`" in (tmp_path / "source" / "developing.md").read_text()
    copied = (tmp_path / "source" / "files" / "README.md").read_text()
    assert "](../getting-started.md)" in copied
    toml = (tmp_path / "source" / "files" / "pyproject.toml.md").read_text()
    assert toml.startswith("# pyproject.toml\n\n````toml\n")


def test_wrong_links_are_found(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "index.html").write_text(
        '<h1 id="top"></h1><a href="a/#there">x</a><a href="a/#gone">x</a><a href="b/">x</a><a href="#top">x</a>'
        '<a href="https://example.com/">x</a><script src="https://example.com/s.js"></script>'
    )
    (tmp_path / "a" / "index.html").write_text('<h1 id="there"></h1><a href="..">x</a>')
    assert list(docs_site.wrong_links(tmp_path)) == [
        "index.html loads https://example.com/s.js from elsewhere",
        "index.html links to a/#gone, and there is no such heading",
        "index.html links to b/, which does not exist",
    ]


def test_parts_of_a_docstring() -> None:
    assert docs_site.prose("One <line>.\n\n    a --> b\n") == ["One &lt;line>.", "", "```text", "a --> b", "```", ""]


@pytest.mark.spec("req~up-language-ci-api-docs~1")
@pytest.mark.parametrize("module", [module for module in docs_site.public() if not module.endswith("_pb2")])
def test_each_public_name_is_documented(module: str) -> None:
    """Constants and aliases of types excepted, since their value says it, and the tests of the conformance suite."""
    for library, needs in (("transports.zenoh", "zenoh"), ("transports.dds", "cyclonedds"), ("spark", "pyspark")):
        if module.startswith(library):
            pytest.importorskip(needs, exc_type=ImportError)
    imported = importlib.import_module(module)
    if not str(imported.__file__).endswith(".py"):  # compiled code has no docstrings
        imported = read_as_python(imported)
    assert imported.__doc__, f"{module} has no docstring"
    names, _ = docs_site.public()[module]
    found = {name: getattr(imported, name) for name in names}
    code = {name: one for name, one in found.items() if inspect.isclass(one) or inspect.isfunction(one)}
    assert not [name for name, one in code.items() if not one.__doc__]
    methods = {f"{name}.{key}": one for name, of in code.items() for key, one in public_methods(of)}
    assert not [name for name, one in methods.items() if not inspect.getdoc(one)]


def read_as_python(compiled: ModuleType) -> ModuleType:
    """Returns the same module, run as Python."""
    path = Path(str(ROOT), *compiled.__name__.split(".")).with_suffix(".py")
    spec = importlib.util.spec_from_file_location(f"{compiled.__name__}_as_python", path)
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = made  # dataclasses look there
    try:
        spec.loader.exec_module(made)
    finally:
        del sys.modules[spec.name]
    return made


def public_methods(of: Any) -> Iterator[tuple[str, Any]]:
    for key, one in vars(of).items() if inspect.isclass(of) else ():
        if not key.startswith(("_", "test_")) and inspect.isfunction(one):
            yield key, getattr(of, key)


def test_headings_lists_and_tables_have_an_empty_line_before_them() -> None:
    """GitHub needs none, the site does."""
    begins = re.compile(r"(#+ |- |\d+\. |\|)")
    wrong = []
    for path in sorted(docs_site.DOCS.rglob("*.md")):
        text = docs_site.FENCED.sub("", path.read_text(encoding="utf-8"))
        lines = text.splitlines()
        for before, line in itertools.pairwise(lines):
            found = begins.match(line)
            may_follow = (found[1], "  ", "- ", "<!-- ") if found and not found[1].startswith("#") else ()
            if found and before.strip() and not (before.startswith(may_follow) or re.match(r"\d+\. ", before)):
                wrong.append(f"{path.name}: {line}")
    assert not wrong
