"""The compiled core: some modules as machine code, compiled from the same Python sources (hatch_build.py, `make`).

    import history.records.chunk -> built for this Python, and from these very sources?
                            yes, all of them -> _compiled/cpython-311-x86_64-linux-gnu/history.records.chunk....so
                            else             -> history/records/chunk.py

Either all modules are compiled or none is: compiled modules call each other directly. If any source differs from what
was compiled, the compiled core is not used. `up-streamer --version` says which one is used, and why.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import sys
from collections.abc import Iterable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import EXTENSION_SUFFIXES, ExtensionFileLoader, ModuleSpec
from importlib.util import spec_from_file_location
from types import ModuleType
from typing import Final

SWITCH: Final = "UP_STREAMER_COMPILED"  # environment variable. 0: interpreted; 1: compiled, or fail
SUFFIX: Final = EXTENSION_SUFFIXES[0]  # of this Python and machine, such as .cpython-311-x86_64-linux-gnu.so
ROOT: Final = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
FOLDER: Final = os.path.join(ROOT, "uprotocol", "_compiled", SUFFIX.split(".")[1])
MANIFEST: Final = "core.json"  # {"library": NAME, "modules": [NAME, ...], "files": [PATH, ...], "fingerprint": HEX}


class Interpreted(Exception):
    """The compiled core can't be used; the text says why."""


def fingerprint(root: str, files: Iterable[str]) -> str:
    """SHA-256 (hex) of the names and contents of `files` below `root`. Raises OSError."""
    digest = hashlib.sha256()
    for name in files:
        with open(os.path.join(root, name), "rb") as file:
            content = file.read()
        digest.update(b"%s %d\n" % (name.encode(), len(content)))
        digest.update(content)
    return digest.hexdigest()


class Finder(MetaPathFinder):
    """Imports the modules `names` from their compiled files in `folder`."""

    def __init__(self, folder: str, names: Iterable[str]) -> None:
        self._folder, self._names = folder, frozenset(names)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None, /
    ) -> ModuleSpec | None:
        if fullname not in self._names:
            return None
        file = os.path.join(self._folder, fullname + SUFFIX)
        return spec_from_file_location(fullname, file, loader=ExtensionFileLoader(fullname, file))


def fitting(root: str, folder: str) -> tuple[str, tuple[str, ...]]:
    """Returns the library in `folder` and its modules. Raises Interpreted if the sources below `root` differ."""
    try:
        with open(os.path.join(folder, MANIFEST), encoding="utf-8") as file:
            manifest = json.load(file)
        is_current = fingerprint(root, manifest["files"]) == manifest["fingerprint"]
        library, modules = str(manifest["library"]), tuple(map(str, manifest["modules"]))
    except FileNotFoundError:
        raise Interpreted("not built for this Python") from None
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise Interpreted(f"what was built can't be read: {error!r}") from None
    if not is_current:
        raise Interpreted("built from other sources: make")
    return library, modules


def _install(root: str, folder: str) -> tuple[str, ...]:
    library, modules = fitting(root, folder)
    early = [name for name in modules if name in sys.modules]
    if early:  # never mix compiled and interpreted modules
        raise Interpreted(f"{early[0]} was imported before uprotocol")
    finder = Finder(folder, (library, *modules))
    sys.meta_path.insert(0, finder)
    try:
        importlib.import_module(library)
    except ImportError as error:  # compiled for another libc, for example
        sys.meta_path.remove(finder)
        raise Interpreted(f"it can't be loaded: {error}") from None
    return modules


def use(wish: str, root: str = ROOT, folder: str = FOLDER) -> str:
    """Import the compiled core from now on, unless `wish` is "0". Returns a description of what is used, and why.

    Raises ImportError if `wish` is "1" and there is no usable compiled core.
    """
    try:
        if wish == "0":
            raise Interpreted(f"{SWITCH}=0")
        return f"compiled core ({len(_install(root, folder))} modules)"
    except Interpreted as error:
        if wish == "1":
            raise ImportError(f"{SWITCH}=1, but the compiled core can't be used: {error}") from None
        return f"interpreted ({error})"
