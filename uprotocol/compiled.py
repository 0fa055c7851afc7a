"""The compiled core: some modules as machine code, made from this same Python (hatch_build.py, `make`).

    import history.records.chunk -> built for this Python, and from these very sources?
                            yes, all of them -> _compiled/cpython-311-x86_64-linux-gnu/history.records.chunk....so
                            else             -> history/records/chunk.py, as ever

All or none: compiled modules call each other without asking Python. What was built from other sources, of which one
line may have been changed since, is never used. `up-streamer --version` says which it is, and why.
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

SWITCH: Final = "UP_STREAMER_COMPILED"  # in the environment. 0: the Python; 1: the compiled core, or no start at all
SUFFIX: Final = EXTENSION_SUFFIXES[0]  # .cpython-311-x86_64-linux-gnu.so: of which Python and machine
ROOT: Final = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
FOLDER: Final = os.path.join(ROOT, "uprotocol", "_compiled", SUFFIX.split(".")[1])
MANIFEST: Final = "core.json"  # {"library": NAME, "modules": [NAME, ...], "files": [PATH, ...], "fingerprint": HEX}


class Interpreted(Exception):
    """The compiled core is not used, and why."""


def fingerprint(root: str, files: Iterable[str]) -> str:
    """Of the sources at `files` below `root`, their names and their bytes. Raises OSError."""
    digest = hashlib.sha256()
    for name in files:
        with open(os.path.join(root, name), "rb") as file:
            content = file.read()
        digest.update(b"%s %d\n" % (name.encode(), len(content)))
        digest.update(content)
    return digest.hexdigest()


class Finder(MetaPathFinder):
    """Leads the import of `names` to their files in `folder`."""

    def __init__(self, folder: str, names: Iterable[str]) -> None:
        self._folder, self._names = folder, frozenset(names)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None, /
    ) -> ModuleSpec | None:
        if fullname not in self._names:
            return None
        place = os.path.join(self._folder, fullname + SUFFIX)
        return spec_from_file_location(fullname, place, loader=ExtensionFileLoader(fullname, place))


def fitting(root: str, folder: str) -> tuple[str, tuple[str, ...]]:
    """The library in `folder` and its modules, if they were built from the sources below `root`.

    Raises Interpreted.
    """
    try:
        with open(os.path.join(folder, MANIFEST), encoding="utf-8") as file:
            manifest = json.load(file)
        is_theirs = fingerprint(root, manifest["files"]) == manifest["fingerprint"]
        library, modules = str(manifest["library"]), tuple(map(str, manifest["modules"]))
    except FileNotFoundError:
        raise Interpreted("not built for this Python") from None
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise Interpreted(f"what was built can't be read: {error!r}") from None
    if not is_theirs:
        raise Interpreted("built from other sources: make")
    return library, modules


def _install(root: str, folder: str) -> tuple[str, ...]:
    library, modules = fitting(root, folder)
    early = [name for name in modules if name in sys.modules]
    if early:  # half a core would be worse than none
        raise Interpreted(f"{early[0]} was imported before uprotocol")
    finder = Finder(folder, (library, *modules))
    sys.meta_path.insert(0, finder)
    try:
        importlib.import_module(library)
    except ImportError as error:  # made for another libc, say
        sys.meta_path.remove(finder)
        raise Interpreted(f"it can't be loaded: {error}") from None
    return modules


def use(wish: str, root: str = ROOT, folder: str = FOLDER) -> str:
    """From here on import the compiled core, unless `wish` is "0"; for people: whether that is so.

    Raises ImportError if `wish` is "1" and there is none.
    """
    try:
        if wish == "0":
            raise Interpreted(f"{SWITCH}=0")
        return f"compiled core ({len(_install(root, folder))} modules)"
    except Interpreted as error:
        if wish == "1":
            raise ImportError(f"{SWITCH}=1, and there is no compiled core to be used: {error}") from None
        return f"interpreted ({error})"
