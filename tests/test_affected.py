"""`make affected`: which test files a change affects, in which order they run, and what is left after a minute."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import tomllib
from collections.abc import Mapping
from pathlib import Path

import pytest

from tools import affected

PLUGINS = """
[project.entry-points."up_streamer.transports"]
zenoh = "transports.zenoh:PLUGIN"
"""


def write(tree: Path, files: Mapping[str, str]) -> None:
    for name, text in files.items():
        path = tree / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def chains(tree: Path, *changed: str) -> list[affected.Chain]:
    return affected.affected(affected.dependencies(tree, changed), changed)


def test_the_nearest_test_comes_first(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "storage/disk.py": "",
            "history/writer.py": "from storage import disk\n",
            "streamer/app.py": "def run():\n    from history.writer import Writer\n",
            "tests/test_a.py": "def test_app():\n    import streamer.app\n",
            "tests/test_b.py": "from history import writer\nfrom streamer import app\n",
            "tests/test_c.py": "from storage.disk import Disk\n",
            "tests/test_d.py": "from storage import files\n",
            "tests/helper.py": "from storage import disk\n",
        },
    )
    assert chains(tmp_path, "storage/disk.py") == [
        ("tests/test_c.py", "storage/disk.py"),
        ("tests/test_b.py", "history/writer.py", "storage/disk.py"),
        ("tests/test_a.py", "streamer/app.py", "history/writer.py", "storage/disk.py"),
    ]


def test_a_changed_test_has_distance_0(tmp_path: Path) -> None:
    write(tmp_path, {"storage/disk.py": "", "tests/test_a.py": "from storage import disk\n", "tests/test_b.py": ""})
    assert chains(tmp_path, "storage/disk.py", "tests/test_b.py") == [
        ("tests/test_b.py",),
        ("tests/test_a.py", "storage/disk.py"),
    ]
    assert chains(tmp_path, "storage/disk.py", "tests/test_a.py") == [("tests/test_a.py",)]


def test_a_file_that_nobody_imports_affects_no_test(tmp_path: Path) -> None:
    write(tmp_path, {"storage/disk.py": "", "tests/test_a.py": ""})
    assert chains(tmp_path, "storage/disk.py", "LICENSE") == []


def test_after_direct_imports_come_the_tests_of_the_same_folder(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "streamer/grip/link.py": "",
            "streamer/app.py": "from streamer.grip import link\n",
            "streamer/cli.py": "from streamer import app\n",
            "tests/conftest.py": "",
            "tests/cli/test_cli.py": "from streamer import cli\n",
            "tests/cli/test_link.py": "from streamer.grip import link\n",
            "tests/grip/conftest.py": "from tests import gateway\n",
            "tests/gateway.py": "from streamer import app\n",
            "tests/grip/test_walk.py": "",
        },
    )
    assert [chain[0] for chain in chains(tmp_path, "streamer/grip/link.py")] == [
        "tests/cli/test_link.py",
        "tests/grip/test_walk.py",
        "tests/cli/test_cli.py",
    ]


def test_a_test_depends_on_each_conftest_around_it_and_on_packages(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "storage/__init__.py": "",
            "storage/disk.py": "",
            "tests/conftest.py": "from storage import disk\n",
            "tests/cli/conftest.py": "",
            "tests/cli/test_a.py": "",
            "tests/test_b.py": "",
        },
    )
    assert chains(tmp_path, "tests/cli/conftest.py") == [("tests/cli/test_a.py", "tests/cli/conftest.py")]
    assert [chain[1:] for chain in chains(tmp_path, "storage/__init__.py")] == [
        ("tests/conftest.py", "storage/disk.py", "storage/__init__.py")
    ] * 2


def test_modules_in_strings_and_plugins_are_seen(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "pyproject.toml": PLUGINS,
            "transports/plugin.py": "points = entry_points(group=GROUP)\n",
            "transports/zenoh/__init__.py": "from transports.zenoh import sender\n",
            "transports/zenoh/sender.py": "LIMIT = 3\n",
            "campaigns/chaos/__init__.py": "",
            "campaigns/chaos/__main__.py": "",
            "tests/test_a.py": 'monkeypatch.setattr("transports.zenoh.sender.LIMIT", 4)\n',
            "tests/test_b.py": "from transports import plugin\n",
            "tests/test_c.py": 'run(sys.executable, "-m", "campaigns.chaos")\n',
        },
    )
    assert chains(tmp_path, "transports/zenoh/sender.py") == [
        ("tests/test_a.py", "transports/zenoh/sender.py"),
        ("tests/test_b.py", "transports/plugin.py", "transports/zenoh/__init__.py", "transports/zenoh/sender.py"),
    ]
    assert chains(tmp_path, "campaigns/chaos/__main__.py") == [("tests/test_c.py", "campaigns/chaos/__main__.py")]


def test_who_names_a_file_or_its_folder_reads_it(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "streamer/app.py": 'HELP = "see docs/edge.md"\n',
            "tests/test_a.py": 'PAGE = ROOT / "docs" / "edge.md"\n',
            "tests/test_b.py": 'PAGES = (ROOT / "docs").rglob("*.md")\n',
            "tests/test_c.py": "from streamer import app  # docs\n",
            "tests/test_d.py": 'TOOL = ROOT / "tools" / "proto.py"\n',
            "tests/test_e.py": 'NAME = "tools"\nFILE = "proto.py"\nPAGES = "docs/*.toml"\n',
            "tools/proto.py": "",
        },
    )
    assert [chain[0] for chain in chains(tmp_path, "docs/edge.md")] == [f"tests/test_{x}.py" for x in "abe"]
    assert [chain[0] for chain in chains(tmp_path, "docs/concepts.md")] == ["tests/test_b.py", "tests/test_e.py"]
    assert [chain[0] for chain in chains(tmp_path, "tools/proto.py")] == ["tests/test_d.py"]


def test_a_module_that_has_become_a_package_is_the_package(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "storage/disk/__init__.py": "from storage import files\n",
            "storage/files.py": "",
            "tests/test_a.py": "from storage import disk\n",
        },
    )
    changed = ["storage/disk.py", "storage/disk/__init__.py", "storage/files.py"]
    assert chains(tmp_path, *changed) == [("tests/test_a.py", "storage/disk/__init__.py")]
    assert affected.dependencies(tmp_path, changed)["storage/disk/__init__.py"] == {"storage/files.py"}


def git(tree: Path, *arguments: str) -> None:
    subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b", *arguments], cwd=tree, check=True)


def test_deleted_renamed_and_untracked_files_have_changed(tmp_path: Path) -> None:
    git(tmp_path, "init", "-q", "-b", "main")
    write(
        tmp_path,
        {
            "storage/disk.py": "DISK = 'a text of some length'\n",
            "storage/gone.py": "",
            "tests/test_a.py": "from storage import gone\n",
            "tests/test_b.py": "from storage import files\n",
            "tests/test_gone.py": "",
            "tests/test_kept.py": "",
        },
    )
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-q", "-m", "first")
    start = affected.common_commit(tmp_path)
    assert affected.changed_files(tmp_path, start) == []
    git(tmp_path, "switch", "-q", "-c", "work")
    git(tmp_path, "mv", "storage/disk.py", "storage/files.py")
    git(tmp_path, "commit", "-q", "-m", "second")
    git(tmp_path, "rm", "-q", "storage/gone.py", "tests/test_gone.py")
    write(tmp_path, {"tests/test_ünew.py": ""})
    assert affected.common_commit(tmp_path) == start  # where the branch began
    changed = affected.changed_files(tmp_path, start)
    assert changed == [
        *("storage/disk.py", "storage/files.py", "storage/gone.py"),
        *("tests/test_gone.py", "tests/test_ünew.py"),
    ]
    assert chains(tmp_path, *changed) == [
        ("tests/test_ünew.py",),
        ("tests/test_a.py", "storage/gone.py"),
        ("tests/test_b.py", "storage/files.py"),
    ]
    uncommitted = affected.changed_files(tmp_path, affected.common_commit(tmp_path, "work"))
    assert uncommitted == ["storage/gone.py", "tests/test_gone.py", "tests/test_ünew.py"]
    git(tmp_path, "branch", "-q", "-m", "main", "trunk")  # a repository without a main
    assert affected.changed_files(tmp_path, affected.common_commit(tmp_path)) == uncommitted
    with pytest.raises(subprocess.CalledProcessError):
        affected.common_commit(tmp_path, "no-such-branch")


def test_of_this_tree_the_tests_of_a_room_come_first() -> None:
    changed = "/".join(["streamer", "grip", "signatures.py"])  # named in one piece, this test would depend on it
    needed = affected.dependencies(affected.ROOT, [changed])
    files = [
        file for file, *_ in affected.affected(needed, [changed]) if file.split("/")[1] not in affected.OWN_TARGETS
    ]
    assert files[0] == "tests/grip/test_publish.py"
    room = [str(path.relative_to(affected.ROOT)) for path in (affected.ROOT / "tests/grip").glob("test_*.py")]
    assert set(files[: len(room)]) == set(room)


def test_tests_that_pytest_does_not_enter_have_targets_of_their_own() -> None:
    settings = tomllib.loads((affected.ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]
    assert settings["testpaths"] == ["tests"]
    assert set(affected.OWN_TARGETS) == set(settings["norecursedirs"]) - {".*", "build", "dist"}
    targets = (affected.ROOT / "Makefile").read_text()
    assert all(f"\n{name}: " in targets for name in affected.OWN_TARGETS)


FAKE = """
import json, sys
from pathlib import Path
files = sys.argv[sys.argv.index("--left") + 2:]
log = Path(__file__).parent / "rounds"
log.write_text((log.read_text() if log.exists() else "") + f"{len(files)} {sys.argv[1]}\\n")
left = {"t003": [1, 2], "t013": [4, 4]}
left = {file: left[file] for file in left if file in files}
Path(sys.argv[sys.argv.index("--left") + 1]).write_text(json.dumps(left))
sys.exit(1 if FAILS in files else 0)
"""


def rounds(folder: Path, fails: str, seconds: float = 100.0) -> tuple[affected.Result, list[str]]:
    """The result for 50 test files, and `files options` of each round, which a program instead of pytest has noted."""
    (folder / "fake.py").write_text(FAKE.replace("FAILS", repr(fails)))
    tests = [f"t{number:03}" for number in range(50)]
    result = affected.run(tests, time.time() + seconds, [str(folder / "fake.py"), "-q"], folder)
    log = folder / "rounds"
    return result, log.read_text().splitlines() if log.exists() else []


def test_rounds_become_larger(tmp_path: Path) -> None:
    result, ran = rounds(tmp_path, fails="none")
    assert ran == ["12 -q", "24 -q", "14 -q"]
    assert result == affected.Result(in_part={"t003": (1, 2)}, left=["t013"])


def test_a_failed_round_is_the_last(tmp_path: Path) -> None:
    result, ran = rounds(tmp_path, fails="t014")
    assert ran == ["12 -q", "24 -q"]
    assert result.failed
    assert result.left == ["t013", *(f"t{number:03}" for number in range(36, 50))]
    lines = list(affected.outcome(result, 50, 31.4))
    assert lines[:4] == [
        "\n35 of 50 affected test files have run, in 31 s",
        "  in part: t003, 1 of 2 tests left",
        "left, as a round has failed: 15",
        "  t013",
    ]


def test_no_round_begins_when_time_is_up(tmp_path: Path) -> None:
    result, ran = rounds(tmp_path, fails="none", seconds=affected.ROUND_S - 1)
    assert ran == []
    assert len(result.left) == 50
    assert "left, for lack of time: 50" in list(affected.outcome(result, 50, 3.0))


@pytest.mark.parametrize("workers", [[], ["-p", "xdist.plugin", "-n", "2", "--dist", "load"]], ids=["alone", "workers"])
@pytest.mark.parametrize("until", [0.0, float("inf")])
def test_after_its_time_no_test_begins(until: float, workers: list[str], tmp_path: Path) -> None:
    files = {"test_a.py": "def test_first(): ...\ndef test_second(): ...\n", "test_b.py": "def test_third(): ...\n"}
    write(tmp_path, files)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "tools.affected", *workers]
    done = subprocess.run(
        [*command, "--until", str(until), "--left", "left.json", "--rootdir", ".", *files],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(affected.ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode in affected.PASSED, done.stdout + done.stderr
    left = json.loads((tmp_path / "left.json").read_text())
    assert left == ({} if until else {"test_a.py": [2, 2], "test_b.py": [1, 1]})
    assert ("3 passed" in done.stdout) == bool(until)


def test_a_file_can_have_run_in_part(tmp_path: Path) -> None:
    path = tmp_path / "left.json"
    ending = affected.Round(float("inf"), path)
    ending.pytest_xdist_node_collection_finished(["a.py::one", "a.py::two[b::c]", "b.py::three"])
    for test in ("a.py::one", "b.py::three"):
        ending.pytest_runtest_logreport(pytest.TestReport(test, (test, 1, test), {}, "passed", None, "call"))
    ending.pytest_sessionfinish()
    assert json.loads(path.read_text()) == {"a.py": [1, 2]}


def test_what_it_does_not_know_is_for_pytest() -> None:
    """In order, and with values that begin with no dash."""
    arguments = ["--list", "-m", "pytest", "-n", "4", "-m", "not full", "-x", "--seconds", "3"]
    options, others = affected.parser().parse_known_args(arguments)
    assert others == ["-m", "pytest", "-n", "4", "-m", "not full", "-x"]
    assert (options.list, options.seconds, options.base) == (True, 3.0, None)
