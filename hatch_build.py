"""Builds the compiled core: the modules that pyproject.toml names, by mypyc and a C compiler, where there is one.

python hatch_build.py      in this tree, unless what is there was built from these sources (`make` does so)
a wheel                    the same, and takes it along: a wheel for this Python and machine, else one for all

UP_STREAMER_COMPILED=0     nothing is built; a wheel has the Python alone
UP_STREAMER_COMPILED=1     it is an error if nothing can be built

What is built goes to uprotocol/_compiled, beside the Python and never in its place: uprotocol/compiled.py says which of
the two is imported.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

try:
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface
except ImportError:  # run as a script, where wheels can't be built
    BuildHookInterface = object  # type: ignore[assignment,misc]

ROOT: Final = Path(__file__).resolve().parent
LIBRARY: Final = "up_streamer"  # mypyc adds __mypyc: all of the code; each module is a door to it
# As `make check` sees them, the sources are typed; here it counts alone what the compiler has to know, on any Python,
# with whatever libraries are there. No cache: it takes 10 s, and is not to undo that of `make check`.
MYPY: Final = ("--config-file=", "--follow-imports=silent", "--ignore-missing-imports", f"--cache-dir={os.devnull}")
OPTIMISE: Final = "3"
SAID_BYTES_MAX: Final = 4_000  # of what a compiler that fails has to say: its end


def _load_compiled() -> Any:
    """uprotocol/compiled.py, without its package, which would choose between the two at once."""
    spec = importlib.util.spec_from_file_location("compiled", ROOT / "uprotocol" / "compiled.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Unbuilt(Exception):
    """Nothing can be built here, and why."""


def modules() -> list[str]:
    """The names of those that are compiled."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    names: list[str] = project["tool"]["hatch"]["build"]["targets"]["wheel"]["hooks"]["custom"]["modules"]
    return names


def _path(module: str) -> str | None:
    """Of a module of ours, below ROOT; None for others'."""
    for name in (module.replace(".", "/") + ".py", module.replace(".", "/") + "/__init__.py"):
        if (ROOT / name).is_file():
            return name
    return None


def _imports(path: str) -> Iterator[str]:
    for node in ast.walk(ast.parse((ROOT / path).read_bytes())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def sources(names: Sequence[str]) -> list[str]:
    """The files that these modules are made of, and those whose types and constants are built into them."""
    found: set[str] = set()
    waiting = [path for name in names if (path := _path(name)) is not None]
    while waiting:
        path = waiting.pop()
        if path not in found:
            found.add(path)
            waiting += [other for name in _imports(path) if (other := _path(name)) is not None]
    return sorted(found)


def _compiler() -> str:
    """The command of the C compiler. Raises Unbuilt."""
    command = os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc"
    if sys.platform != "win32" and shutil.which(shlex.split(command)[0]) is None:
        raise Unbuilt(f"there is no C compiler ({command})")
    if not (Path(sysconfig.get_path("include")) / "Python.h").is_file():
        raise Unbuilt("Python.h is missing (on Debian, apt-get install python3-dev)")
    return command


def _build(into: Path) -> None:
    """Compile, and lay the libraries into `into`, which does not exist. Raises Unbuilt."""
    command = _compiler()
    if importlib.util.find_spec("mypyc") is None or importlib.util.find_spec("setuptools") is None:
        raise Unbuilt("mypyc or setuptools is missing: pip install 'mypy[mypyc]'")
    names, compiled = modules(), _load_compiled()
    files = sources(names)
    before = compiled.fingerprint(ROOT, files)
    with tempfile.TemporaryDirectory(prefix="up-streamer-build-") as scratch:
        done = subprocess.run(
            [sys.executable, str(Path(__file__).resolve()), "--compile", scratch, *names],
            cwd=ROOT,
            env=os.environ | {"CC": command, "UP_STREAMER_COMPILED": "0"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            check=False,
        )
        if done.returncode:
            raise Unbuilt(f"compiling failed:\n{done.stdout[-SAID_BYTES_MAX:]}")
        if compiled.fingerprint(ROOT, files) != before:
            raise Unbuilt("the sources have changed meanwhile")
        into.mkdir(parents=True)
        for path in Path(scratch, "lib").rglob("*" + compiled.SUFFIX):
            name = ".".join(path.relative_to(Path(scratch, "lib")).parts)
            shutil.copy(path, into / name)
    manifest = {"library": f"{LIBRARY}__mypyc", "modules": names, "files": files, "fingerprint": before}
    (into / compiled.MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")


def compile(scratch: str, names: Sequence[str]) -> None:
    """What `_build` runs in a process of its own: C in `scratch`, the libraries in its folder lib."""
    from mypyc.build import mypycify
    from setuptools import Distribution

    paths = [path for name in names if (path := _path(name)) is not None]
    extensions = mypycify([*MYPY, *paths], opt_level=OPTIMISE, group_name=LIBRARY, target_dir=f"{scratch}/c")
    build = Distribution({"name": LIBRARY, "ext_modules": extensions}).get_command_obj("build_ext")
    build.build_lib, build.build_temp = f"{scratch}/lib", f"{scratch}/o"
    build.ensure_finalized()
    build.run()


def core() -> Path | None:
    """The folder of the compiled core, built if need be; None if it is not to be, or can't be. Says which.

    Raises Unbuilt if it has to be.
    """
    compiled = _load_compiled()
    wish = os.environ.get(compiled.SWITCH, "")
    folder = Path(compiled.FOLDER)
    try:
        if wish == "0":
            raise Unbuilt(f"{compiled.SWITCH}=0")
        try:
            if list(compiled.fitting(ROOT, folder)[1]) != modules():
                raise compiled.Interpreted("other modules")
        except compiled.Interpreted:
            _say(f"compiling {len(modules())} modules (a minute) ...")
            fresh = folder.with_name(f"{folder.name}.{os.getpid()}")
            try:
                _build(fresh)
                shutil.rmtree(folder, ignore_errors=True)
                fresh.rename(folder)
            finally:
                shutil.rmtree(fresh, ignore_errors=True)
            _say(f"the core is compiled: {folder.relative_to(ROOT)}")
    except Unbuilt as error:
        if wish == "1":
            raise
        _say(f"the core is interpreted: {error}")
        return None
    return folder


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


class CompiledCore(BuildHookInterface):  # type: ignore[type-arg]
    """Makes a wheel one of this Python and machine, where a core was compiled for it."""

    def dependencies(self) -> list[str]:
        """What compiling needs: the compiler, and the types of what the modules import."""
        if os.environ.get("UP_STREAMER_COMPILED") == "0":
            return []
        try:
            _compiler()
        except Unbuilt:
            return []
        return [*self.config["compiler"], *self.metadata.core.dependencies]

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        folder = core() if version == "standard" else None
        if folder is not None:
            build_data["pure_python"], build_data["infer_tag"] = False, True
            build_data["force_include"][str(folder)] = folder.relative_to(ROOT).as_posix()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--compile"]:
        compile(sys.argv[2], sys.argv[3:])
    else:
        try:
            core()
        except Unbuilt as error:
            sys.exit(f"the core can't be compiled: {error}")
