"""What the wheel holds: nothing that installs, and a `uprotocol` that knows when it is not alone."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from typing import Any, Final

import pytest

import uprotocol

ROOT: Final = Path(__file__).resolve().parents[2]
PROJECT: Final[dict[str, Any]] = tomllib.loads((ROOT / "pyproject.toml").read_text())
PACKAGES: Final[list[str]] = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
INSTALLERS: Final = {
    "apt",
    "apt-get",
    "apk",
    "brew",
    "conda",
    "dnf",
    "dpkg",
    "microdnf",
    "pacman",
    "pip",
    "pip3",
    "sudo",
    "yum",
    "zypper",
}


def constants(path: Path) -> set[str]:
    """Every string in a module but its docstrings, which nothing runs."""
    nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    docs = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    return {
        node.value
        for node in nodes
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docs
    }


def installs(path: Path) -> set[str]:
    """The installers that a module could call: named as a word of a command, or in a command line."""
    return {text for text in constants(path) if text in INSTALLERS or re.search(r"\bapt-get\b|\bsudo\b", text)}


def test_nothing_in_the_wheel_installs_system_packages() -> None:
    files = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    assert len(files) > 100
    assert {path.relative_to(ROOT).as_posix(): found for path in files if (found := installs(path))} == {}


def test_what_installs_the_broker_is_in_the_checkout_alone() -> None:
    """And the test above would find it."""
    assert "tools" not in PACKAGES
    assert installs(ROOT / "tools" / "mosquitto.py")


def test_the_java_that_is_named_is_that_of_the_extra() -> None:
    (requirement,) = PROJECT["project"]["optional-dependencies"]["java"]
    assert f"pip install '{requirement}'" in (ROOT / "spark_ingest" / "java.py").read_text()


def imported(module: str, *path: Path) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, path)), "UP_STREAMER_COMPILED": ""}
    return subprocess.run(
        [sys.executable, "-c", f"import {module}"],
        cwd="/",
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """Where up-streamer was installed."""
    for package in PACKAGES:
        (tmp_path / package).symlink_to(ROOT / package)
    (tmp_path / "up_streamer-0.1.0.dist-info").mkdir()
    return tmp_path


@pytest.mark.parametrize("module", ["uprotocol.v1.uri_pb2", "streamer.commands.cli", "history.log.log"])
def test_up_python_in_the_same_folder_is_reported_at_import(site: Path, module: str) -> None:
    assert imported(module, site).returncode == 0
    (site / "up_python-0.2.0.dev0.dist-info").mkdir()
    done = imported(module, site)
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: up-python and up-streamer are both installed in ")
    assert "virtual environment" in last


@pytest.mark.parametrize("module", ["streamer.commands.cli", "transports.plugin", "transports.zenoh"])
def test_up_python_before_us_on_the_path_is_reported_at_import(
    site: Path, tmp_path_factory: pytest.TempPathFactory, module: str
) -> None:
    other = tmp_path_factory.mktemp("other")
    (other / "uprotocol").mkdir()
    (other / "uprotocol" / "__init__.py").touch()
    done = imported(module, other, site)
    assert done.returncode == 1
    assert "expected the package 'uprotocol' of up-streamer" in done.stderr.strip().splitlines()[-1]


def test_ours_is_imported_where_it_was_not_installed_in_a_folder(site: Path) -> None:
    """From an archive there is no folder to look into."""
    shutil.make_archive(str(site / "archive"), "zip", ROOT, "uprotocol")
    done = imported("uprotocol", site / "archive.zip")
    assert done.returncode == 0, done.stderr


def wheel(folder: Path, switch: str) -> Path:
    """Built as `make wheel` does."""
    pytest.importorskip("hatchling")
    done = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)],
        cwd=ROOT,
        env=os.environ | {"UP_STREAMER_COMPILED": switch},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (made,) = folder.glob("*.whl")
    return made


def test_the_wheel_for_all_has_the_python_alone(tmp_path: Path) -> None:
    made = wheel(tmp_path, "0")
    assert made.name.endswith("-py3-none-any.whl")
    names = zipfile.ZipFile(made).namelist()
    assert "history/records/chunk.py" in names
    assert "streamer/operating/page/index.html" in names, "what a browser loads from the admin port"
    assert [name for name in names if "_compiled" in name or name.endswith(".so")] == []


@pytest.mark.skipif(not uprotocol.CORE.startswith("compiled"), reason=f"needs the compiled core: {uprotocol.CORE}")
def test_the_wheel_of_this_machine_has_both_and_imports_what_was_compiled(tmp_path: Path) -> None:
    made = wheel(tmp_path, "1")
    assert f"-cp{sys.version_info.major}{sys.version_info.minor}-" in made.name
    site = tmp_path / "site"
    with zipfile.ZipFile(made) as archive:
        assert "history/records/chunk.py" in archive.namelist()
        archive.extractall(site)
    asked = "message; print(uprotocol.CORE); import history.records.chunk as it; print(it.__file__)"
    state, path = imported(f"uprotocol.{asked}", site).stdout.splitlines()
    assert state == uprotocol.CORE
    assert path.startswith(str(site / "uprotocol" / "_compiled"))
