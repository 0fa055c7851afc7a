"""The compiled core: it is built from these sources or not used, in any order of imports, and is optional."""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
import sys
import tomllib
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import pytest

import hatch_build
from tests.tiers import full
from tools import house
from uprotocol import CORE, compiled, encoded

ROOT: Final = Path(__file__).resolve().parents[2]
PROJECT: Final[dict[str, Any]] = tomllib.loads((ROOT / "pyproject.toml").read_text())
HOOK: Final[dict[str, Any]] = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["hooks"]["custom"]
MODULES: Final[list[str]] = HOOK["modules"]
FIRST: Final = {name.rpartition(".")[0]: name for name in reversed(MODULES)}  # of each package
EXTENSION: Final = compiled.SUFFIX
# of C, and of gcc: mypyc puts an underscore before each name
KEYWORDS: Final = frozenset(
    "_" + word
    for word in (
        *("Alignas", "Alignof", "Atomic", "Bool", "Complex", "Generic", "Imaginary", "Noreturn", "Thread_local"),
        *("asm", "attribute", "complex", "const", "extension", "imag", "inline", "label", "real", "restrict"),
        *("signed", "thread", "typeof", "volatile"),
    )
)
OF_A_TUPLE: Final = {"__bool__", "__contains__", "__eq__", "__getitem__", "__hash__", "__iter__", "__len__"}

needs_core = pytest.mark.skipif(not CORE.startswith("compiled"), reason=f"needs the compiled core: {CORE}")
needs_compiler = pytest.mark.skipif(
    shutil.which(os.environ.get("CC") or "cc") is None, reason="needs a C compiler, which compiles the core"
)


def python(*arguments: str, root: Path = ROOT, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=root,
        env=os.environ | {"PYTHONPATH": str(root), "UP_STREAMER_COMPILED": ""} | environment,
        capture_output=True,
        text=True,
        check=False,
    )


# What is imported


@needs_core
@pytest.mark.parametrize("package", FIRST)
def test_the_core_is_whole_whichever_part_of_it_is_imported_first(package: str) -> None:
    said = python(
        "-c",
        f"import sys, {FIRST[package]}; names = {MODULES!r}\n"
        "print(*[sys.modules[name].__file__ for name in names if name in sys.modules])",
        UP_STREAMER_COMPILED="1",
    )
    assert said.returncode == 0, said.stderr
    assert said.stdout.split()
    assert [path for path in said.stdout.split() if not path.endswith(EXTENSION)] == []


def test_the_python_is_run_where_the_environment_says_so() -> None:
    said = python(
        "-c",
        "import history.records.chunk as one, uprotocol; print(one.__file__, uprotocol.CORE)",
        UP_STREAMER_COMPILED="0",
    )
    assert said.stdout.split(maxsplit=1) == [
        str(ROOT / "history/records/chunk.py"),
        "interpreted (UP_STREAMER_COMPILED=0)\n",
    ]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Sources of which a core could have been built, and the folder of one that was."""
    (tmp_path / "one.py").write_text("ONE = 1\n")
    folder = tmp_path / "core"
    folder.mkdir()
    manifest: dict[str, Any] = {"library": "nothing_of_ours", "modules": ["one_of_ours"], "files": ["one.py"]}
    manifest["fingerprint"] = compiled.fingerprint(str(tmp_path), ["one.py"])
    (folder / compiled.MANIFEST).write_text(json.dumps(manifest))
    return tmp_path


def state(tree: Path) -> str:
    finders = list(sys.meta_path)
    said = compiled.use("", str(tree), str(tree / "core"))
    assert sys.meta_path == finders, "nothing is led elsewhere"
    with pytest.raises(ImportError, match="UP_STREAMER_COMPILED=1, but the compiled core can't be used"):
        compiled.use("1", str(tree), str(tree / "core"))
    return said


def test_what_was_built_from_these_sources_fits(tree: Path) -> None:
    assert compiled.fitting(str(tree), str(tree / "core")) == ("nothing_of_ours", ("one_of_ours",))


@pytest.mark.parametrize("change", ["ONE = 2\n", "ONE = 1\n\n", ""])
def test_what_was_built_from_other_sources_is_not_used(tree: Path, change: str) -> None:
    (tree / "one.py").write_text(change)
    assert state(tree) == "interpreted (built from other sources: make)"


def test_a_library_of_a_deleted_source_is_not_used(tree: Path) -> None:
    (tree / "one.py").unlink()
    assert state(tree).startswith("interpreted (")


def test_a_missing_build_is_reported(tmp_path: Path) -> None:
    assert state(tmp_path) == "interpreted (not built for this Python)"


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"files": 7}'])
def test_a_damaged_manifest_is_reported(tree: Path, text: str) -> None:
    (tree / "core" / compiled.MANIFEST).write_text(text)
    assert state(tree).startswith("interpreted (what was built can't be read: ")


def test_a_library_that_cannot_be_loaded_is_reported(tree: Path) -> None:
    (tree / "core" / f"nothing_of_ours{EXTENSION}").write_bytes(b"for another machine")
    assert state(tree).startswith("interpreted (it can't be loaded: ")


def test_half_a_core_is_none(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "one_of_ours", ModuleType("one_of_ours"))
    assert state(tree) == "interpreted (one_of_ours was imported before uprotocol)"


# How it is built


def test_all_that_is_built_in_is_looked_at() -> None:
    """A constant of another module is built into those that use it."""
    assert {"uprotocol/cache.py", "uprotocol/uuid.py", "uprotocol/v1/uri_pb2.py"} <= set(
        hatch_build.sources(["uprotocol.encoded"])
    )
    assert "history/log/log.py" in hatch_build.sources(["streamer.walk.ingress"]), "imported for its types alone, too"


def test_each_module_of_the_core_is_there_once() -> None:
    assert sorted(set(MODULES)) == MODULES == hatch_build.modules()
    for name in MODULES:
        assert (ROOT / (name.replace(".", "/") + ".py")).is_file(), name


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A tree like ours, whose core is one module of two lines."""
    for name in ("hatch_build.py", "uprotocol/compiled.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "uprotocol/__init__.py").write_text(
        "import os; from uprotocol import compiled; CORE = compiled.use(os.environ[compiled.SWITCH])\n"
    )
    (tmp_path / "uprotocol/small.py").write_text("def double(number: int) -> int:\n    return 2 * number\n")
    (tmp_path / "pyproject.toml").write_text(
        '[tool.hatch.build.targets.wheel.hooks.custom]\nmodules = ["uprotocol.small"]\n'
    )
    return tmp_path


USE: Final = "import uprotocol.small as it, uprotocol; print(it.double(21), uprotocol.CORE)"


@full
@needs_compiler
@pytest.mark.slow
def test_a_change_of_a_source_is_what_runs_before_it_is_compiled_and_after(small: Path) -> None:
    pytest.importorskip("mypyc")
    assert python("-c", USE, root=small).stdout == "42 interpreted (not built for this Python)\n"
    built = python("hatch_build.py", root=small)
    assert "the core is compiled: uprotocol/_compiled/" in built.stderr
    assert python("-c", USE, root=small).stdout == "42 compiled core (1 modules)\n"
    assert python("hatch_build.py", root=small).stderr == "", "nothing is built twice"

    source = small / "uprotocol/small.py"
    source.write_text(source.read_text().replace("2 *", "3 *"))
    assert python("-c", USE, root=small).stdout == "63 interpreted (built from other sources: make)\n"
    assert python("-c", USE, root=small, UP_STREAMER_COMPILED="1").returncode == 1
    assert python("hatch_build.py", root=small, UP_STREAMER_COMPILED="1").returncode == 0
    assert python("-c", USE, root=small).stdout == "63 compiled core (1 modules)\n"

    source.write_text("def double(number: int) -> int:\n    return 'many'\n")
    failed = python("hatch_build.py", root=small)
    assert failed.returncode == 0
    assert "the core is interpreted: compiling failed" in failed.stderr
    assert "small.py:2: error" in failed.stderr
    assert [path.name for path in (small / "uprotocol/_compiled").iterdir()] == [Path(compiled.FOLDER).name]


def test_without_a_compiler_the_python_does(small: Path) -> None:
    done = python("hatch_build.py", root=small, CC="/no/such/compiler -O3")
    assert done.returncode == 0
    assert done.stderr.splitlines()[-1] == "the core is interpreted: there is no C compiler (/no/such/compiler -O3)"
    failed = python("hatch_build.py", root=small, CC="/no/such/compiler", UP_STREAMER_COMPILED="1")
    assert failed.returncode == 1
    assert "the core can't be compiled: there is no C compiler" in failed.stderr
    reported = python("hatch_build.py", root=small, UP_STREAMER_COMPILED="0").stderr
    assert reported == "the core is interpreted: UP_STREAMER_COMPILED=0\n"


def test_what_compiles_is_pinned_with_what_is_tested() -> None:
    """The compiler of a wheel that is built in isolation is one that development uses, too."""
    assert set(HOOK["compiler"]) <= set(PROJECT["project"]["optional-dependencies"]["build"])


# What is compiled reads as it runs


def trees() -> Iterator[tuple[str, ast.AST]]:
    for path in house.sources(ROOT):
        yield path.relative_to(ROOT).as_posix(), ast.parse(path.read_text(encoding="utf-8"))


def core() -> Iterator[tuple[str, ast.AST]]:
    """Those that are compiled."""
    paths = {name.replace(".", "/") + ".py" for name in MODULES}
    return ((path, tree) for path, tree in trees() if path in paths)


def test_no_attribute_of_the_core_becomes_a_keyword_of_c() -> None:
    found = {
        f"{path}:{node.lineno} {node.attr}"
        for path, tree in core()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and node.attr in KEYWORDS
    }
    assert found == set()


def test_no_named_tuple_is_other_than_a_tuple() -> None:
    """Compiled code takes it for one: what is not empty is true, whatever its class says."""
    found = {
        f"{path} {node.name}.{method.name}"
        for path, tree in trees()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef) and "NamedTuple" in {getattr(base, "id", "") for base in node.bases}
        for method in node.body
        if isinstance(method, ast.FunctionDef) and method.name in OF_A_TUPLE
    }
    assert found == set()


def test_nothing_of_the_core_waits_while_it_handles_an_exception() -> None:
    """mypyc (2.4) forgets to end the handling then: each exception of the thread has that one as its context from there
    on, and the next one both. In a loop that is a leak, and a traceback of hours."""
    waits = (ast.Await, ast.AsyncFor, ast.AsyncWith, ast.Yield, ast.YieldFrom)
    found = {
        f"{path}:{node.lineno}"
        for path, tree in core()
        for handling in ast.walk(tree)
        if isinstance(handling, ast.Try | ast.TryStar)
        for part in (*handling.handlers, *handling.finalbody)
        for node in ast.walk(part)
        if isinstance(node, waits)
    }
    assert found == set()


def fixed(module: str) -> Iterator[tuple[str, str]]:
    """What can't be set once it is compiled: constants that are final, functions, and what a class has."""
    for node in ast.parse((ROOT / (module.replace(".", "/") + ".py")).read_text(encoding="utf-8")).body:
        match node:
            case ast.AnnAssign(target=ast.Name(id=name)) if ast.unparse(node.annotation).startswith("Final"):
                yield module, name
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield module, name
            case ast.ClassDef():
                methods = [one for one in node.body if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef)]
                yield from ((f"{module}.{node.name}", one.name) for one in methods)


def patched(path: Path) -> Iterator[tuple[str, str]]:
    """Module and name of what a test sets: `setattr(module, "NAME", ...)` or `setattr("module.NAME", ...)`."""
    nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    modules = {
        alias.asname or alias.name: f"{node.module}.{alias.name}"
        for node in nodes
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    for node in nodes:
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "setattr":
            match node.args:
                case [ast.Constant(value=str(whole)), *_]:
                    module, _, name = whole.rpartition(".")
                    yield module, name
                case [ast.Name(id=alias), ast.Constant(value=str(name)), *_]:
                    yield modules.get(alias, alias), name


def test_no_test_sets_what_is_built_in() -> None:
    """Hand it in; or a constant that a test sets is not final."""
    built_in = {one for name in MODULES for one in fixed(name)}
    assert {("uprotocol.encoded", "SHARED_BYTES_MAX"), ("uprotocol.encoded.EncodedMessage", "decoded")} <= built_in
    found = [(path.name, what) for path in (ROOT / "tests").rglob("*.py") for what in patched(path)]
    assert found
    assert [one for one in found if one[1] in built_in] == []


@needs_core
def test_a_traceback_leads_to_the_python() -> None:
    with pytest.raises(AttributeError) as error:
        encoded.EncodedMessage.of(None)  # type: ignore[arg-type]
    last = traceback.extract_tb(error.value.__traceback__)[-1]
    assert last.filename == "uprotocol/encoded.py"
    assert (ROOT / last.filename).read_text().splitlines()[(last.lineno or 0) - 1].strip().startswith("attributes = ")
