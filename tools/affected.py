"""Runs the tests that a change affects, nearest first, for a minute (`make affected`).

python -m tools.affected [--base REF] [--seconds 45] [--list] [-m pytest ARGUMENTS ...]

git -> changed files -> modules that depend on them -> ... -> test files, each with its shortest chain
    -> nearest first; beyond distance 1 first those in a folder of the same name (tests/grip for streamer/grip)
    -> rounds of 12, 24, 48 ... files; a round that fails is the last, and after `--seconds` no further test begins

A module depends on what it imports (tools/house.py) and on the packages around it; a test file on each conftest.py
around it, too. Names of modules and of files in strings count; `entry_points` leads to the plugins of pyproject.toml.
Not seen are names that are put together, commands, and tests that read all sources. So `make test` is what proves a
change before it lands. No code is traced and no data kept: compiled modules make no difference.

As a pytest plugin (`-p tools.affected --until TIME --left FILE`) this module ends a round in time.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Final

import pytest

from tools import house

ROOT: Final = Path(__file__).resolve().parent.parent
PACKAGES: Final = (*house.PRODUCT, "tests", "campaigns", "tools")
OWN_TARGETS: Final = ("interop", "brokers")  # folders that `make test` does not enter; each has a target
MAIN: Final = ("main", "origin/main")
FIRST_ROUND: Final = 12  # test files
ROUND_S: Final = 8.0  # it takes a round to begin: four workers import what they test
SHOWN_MAX: Final = 15  # files that a list names one by one
MODULE_IN_STRING: Final = re.compile(r'"([A-Za-z_]\w*(?:\.\w+)+)[":]')
PASSED: Final = (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)  # the latter: all of them are marked `full`

Graph = Mapping[str, Collection[str]]  # file -> files that it depends on, all relative to the tree
Chain = tuple[str, ...]  # a test file, what it depends on, ..., a changed file; the test file alone, if it has changed


def _git(tree: Path, *arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=tree, stdout=subprocess.PIPE, text=True, check=True)
    return done.stdout


def common_commit(tree: Path, base: str | None = None) -> str:
    """The last commit that HEAD shares with `base`, by default with main. Without a main it is HEAD.

    Raises CalledProcessError.
    """
    if base is None:
        known = _git(tree, "for-each-ref", "--format=%(refname:lstrip=2)", "refs/heads", "refs/remotes").split()
        base = next((name for name in MAIN if name in known), "HEAD")
    return _git(tree, "merge-base", base, "HEAD").strip()


def changed_files(tree: Path, commit: str) -> list[str]:
    """Files that differ from `commit`, deleted and untracked ones too; of a renamed one both names.

    Raises CalledProcessError.
    """
    names = _git(tree, "diff", "--name-only", "--no-renames", "-z", commit, "--")
    names += _git(tree, "ls-files", "--others", "--exclude-standard", "-z")
    return sorted(name for name in set(names.split("\0")) if name and not (tree / name).is_dir())


# --- what depends on what ---


def dependencies(tree: Path, changed: Collection[str] = ()) -> Graph:
    """Of files that are no modules `changed` alone are seen. Raises SyntaxError."""
    paths = {path.relative_to(tree) for place in (*PACKAGES, "examples") for path in (tree / place).rglob("*.py")}
    paths |= {path.relative_to(tree) for path in tree.glob("*.py")}
    deleted = {Path(path) for path in changed if path.endswith(".py")} - paths  # others may still import them
    files = {house.module_name(path): tree / path for path in (*sorted(deleted), *sorted(paths))}
    modules = house.import_graph(files)
    plugins = _plugins(tree)
    needed: dict[str, set[str]] = {}
    for name, path in files.items():
        if not path.exists():
            continue
        own = path.relative_to(tree).as_posix()
        text = path.read_text().replace('" / "', "/")
        others = modules[name] | set(_beginnings(name))
        if is_test_file(own):
            others |= {f"{package}.conftest" for package in _beginnings(name)}
        for dotted in MODULE_IN_STRING.findall(text):
            module = next((each for each in (dotted, *_beginnings(dotted)) if each in files), "")
            others |= {module, f"{module}.__main__"} if "." in module else set()
        if "entry_points(" in text:
            others |= plugins
        needed[own] = {files[other].relative_to(tree).as_posix() for other in others & files.keys() - {name}}
        needed[own] |= {other for other in changed if other != own and _names(text, own, other)}
    return needed


def is_test_file(path: str) -> bool:
    return path.startswith("tests/") and PurePosixPath(path).match("test_*.py")


def _beginnings(dotted: str) -> list[str]:
    """Of a.b.c: a.b, a."""
    parts = dotted.split(".")
    return [".".join(parts[:length]) for length in range(len(parts) - 1, 0, -1)]


def _plugins(tree: Path) -> set[str]:
    """The modules that pyproject.toml names as entry points."""
    settings = tree / "pyproject.toml"
    project = tomllib.loads(settings.read_text())["project"] if settings.exists() else {}
    return {point.split(":")[0] for group in project.get("entry-points", {}).values() for point in group.values()}


def _names(text: str, reader: str, path: str) -> bool:
    """Whether the source `text` of the file `reader` names the file `path`.

    A module of ours has to be named by its path; another file by its name or a folder around it: "docs", "docs/*.md".
    """
    file = PurePosixPath(path)
    if file.parts[0] not in house.PRODUCT and reader.split("/")[0] in house.PRODUCT:
        return False  # the product speaks of docs, but does not read them
    if file.suffix == ".py" and file.parts[0] in PACKAGES:
        return path in text
    folders = [re.escape(name) for name in file.parent.parts if name not in PACKAGES]
    return file.name in text or bool(folders and re.search(rf'"([^"\s]*/)?({"|".join(folders)})/?(\*[^"]*)?"', text))


def affected(needed: Graph, changed: Iterable[str]) -> list[Chain]:
    """The test files that the changed files affect, each with its shortest chain, nearest first."""
    users: dict[str, set[str]] = defaultdict(set)
    for user, others in needed.items():
        for other in others:
            users[other].add(user)
    chains: dict[str, Chain] = {path: (path,) for path in sorted(changed)}
    # whose tests use what has changed by fixtures, which import the whole streamer: a long chain says little about them
    rooms = {PurePosixPath(path).parent.name for path in chains} - {"tests"}
    waiting = list(chains)
    for path in waiting:  # grows meanwhile
        for user in sorted(users[path] - chains.keys()):
            chains[user] = (user, *chains[path])
            waiting.append(user)

    def order(chain: Chain) -> tuple[int, bool, int, str]:
        distance = len(chain) - 1
        is_elsewhere = PurePosixPath(chain[0]).parent.name not in rooms
        return min(distance, 2), is_elsewhere, distance, chain[0]

    return sorted((chain for path, chain in chains.items() if is_test_file(path) and path in needed), key=order)


# --- a round, as pytest sees it ---


class Round:
    """Lets no test begin after a moment, and writes which were left: file -> [tests left, tests], as JSON.

    Under pytest-xdist the workers hold the tests back, and the main process writes.
    """

    def __init__(self, until: float, path: Path | None) -> None:
        self._until, self._path = until, path
        self._tests: set[str] = set()  # ids
        self._ran: set[str] = set()

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self) -> bool | None:
        return True if time.time() > self._until else None  # True: nothing more is to be done for this test

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._tests |= {item.nodeid for item in session.items}

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: Sequence[str]) -> None:
        self._tests |= set(ids)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._ran.add(report.nodeid)

    def pytest_sessionfinish(self) -> None:
        if self._path is not None:
            tests = Counter(name.split("::")[0] for name in self._tests)
            left = Counter(name.split("::")[0] for name in self._tests - self._ran)
            self._path.write_text(json.dumps({file: [left[file], tests[file]] for file in left}))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--until", type=float, default=float("inf"), help="no test begins after this time (Unix, s)")
    parser.addoption("--left", metavar="FILE", help="write to this file, as JSON, which tests were left")


def pytest_configure(config: pytest.Config) -> None:
    path = None if hasattr(config, "workerinput") else config.getoption("--left")
    config.pluginmanager.register(Round(config.getoption("--until"), path and Path(path)), "affected_round")


# --- the command ---


@dataclass
class Result:
    """What came of the affected test files."""

    failed: bool = False
    in_part: dict[str, tuple[int, int]] = field(default_factory=dict)  # test file -> its tests that were left, all
    left: list[str] = field(default_factory=list)  # test files of which no test has run, nearest first


def run(tests: Sequence[str], until: float, arguments: Sequence[str], folder: Path) -> Result:
    """Runs test files in rounds, with `python ARGUMENTS`. `until` is a Unix time (s), `folder` for temporary files."""
    result = Result()
    waiting = list(tests)
    size = FIRST_ROUND
    while waiting and not result.failed and time.time() < until - ROUND_S:
        chosen, waiting = waiting[:size], waiting[size:]
        size *= 2
        print(f"\nthe nearest {len(chosen)} test files, {len(waiting)} after them", flush=True)
        path = folder / f"{len(waiting)}.json"
        options = ["-p", "tools.affected", "--until", f"{until}", "--left", f"{path}"]
        done = subprocess.run([sys.executable, *arguments, *options, *chosen], cwd=ROOT, check=False)
        result.failed = done.returncode not in PASSED
        counts: dict[str, tuple[int, int]] = json.loads(path.read_text()) if path.exists() else {}
        for file in chosen:
            left, count = counts.get(file, (0, 0))
            if left == count > 0:
                result.left.append(file)
            elif left:
                result.in_part[file] = left, count
    result.left += waiting
    return result


def outcome(result: Result, count: int, seconds: float) -> Iterator[str]:
    """What has run of `count` test files in `seconds`, and what was left."""
    yield f"\n{count - len(result.left)} of {count} affected test files have run, in {seconds:.0f} s"
    yield from (f"  in part: {file}, {left} of {tests} tests left" for file, (left, tests) in result.in_part.items())
    if result.left:
        yield f"left, {'as a round has failed' if result.failed else 'for lack of time'}: {len(result.left)}"
        yield from (f"  {line}" for line in _shortened(result.left))
    yield "what proves a change before it lands is `make test`"


def _shortened(files: Sequence[str]) -> list[str]:
    """The first ones, then the numbers of the others by folder."""
    others = Counter(file.rpartition("/")[0] or "." for file in files[SHOWN_MAX:])
    more = ", ".join(f"{count} in {folder}" for folder, count in sorted(others.items()))
    return [*files[:SHOWN_MAX], *([f"and {more}"] if more else [])]


def _own_target(path: str) -> str | None:
    """The target that runs this test file, unless it is `make test`."""
    folder = path.split("/")[1]
    return f"make {folder}" if folder in OWN_TARGETS else None


def parser() -> argparse.ArgumentParser:
    known = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    known.add_argument("--base", help="compare with the last commit that HEAD shares with it (default: main)")
    known.add_argument(
        "--seconds",
        type=float,
        default=45.0,
        help="after these, no further test begins: those that run take some seconds more",
    )
    known.add_argument("--list", action="store_true", help="print the affected test files with their chains, run none")
    return known


def main() -> int:
    began = time.time()
    options, arguments = parser().parse_known_args()
    try:
        commit = common_commit(ROOT, options.base)
        changed = changed_files(ROOT, commit)
        needed = dependencies(ROOT, changed)
    except (OSError, subprocess.CalledProcessError, SyntaxError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    chains = affected(needed, changed)
    print(f"files changed since {commit[:8]}: {len(changed)}", *_shortened(changed), sep="\n  ")
    for path in changed:
        if not affected(needed, [path]):
            print(f"no test is seen to use {path}")
    for target in sorted(filter(None, {_own_target(test) for test, *_ in chains})):
        print(f"affected, too: {target}")
    chains = [chain for chain in chains if _own_target(chain[0]) is None]
    distances = sorted(Counter(len(chain) - 1 for chain in chains).items())
    print(
        f"test files affected: {len(chains)}", *(f"{count} at distance {far}" for far, count in distances), sep="\n  "
    )
    if options.list or not chains:
        print(*(f"{len(chain) - 1} {' <- '.join(chain)}" for chain in chains), sep="\n")
        return 0
    tests = [chain[0] for chain in chains]
    with tempfile.TemporaryDirectory() as folder:
        result = run(tests, began + options.seconds, arguments or ["-m", "pytest"], Path(folder))
    print(*outcome(result, len(tests), time.time() - began), sep="\n")
    return int(result.failed)


if __name__ == "__main__":
    sys.exit(main())
