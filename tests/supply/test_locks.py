"""What is pinned is what pyproject.toml allows, all of it, with hashes, and names no place to get it from. Offline."""

from __future__ import annotations

import contextlib
import re
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any, Final

import pytest
from packaging.markers import Marker
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT: Final = Path(__file__).resolve().parents[2]
PROJECT: Final[dict[str, Any]] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
NAME: Final = r"[\w.-]+"
EXTRAS: Final = r"(?:\[[\w.,-]+\])?"
PYTHONS: Final = ("3.11", "3.12", "3.13")
LOCKS: Final = {  # and the extras that each is made of
    "requirements.lock": tuple(PROJECT["optional-dependencies"]),
    "deploy/requirements.lock": ("zenoh", "mqtt5", "dds", "http"),
    "requirements-build.lock": ("build",),
}


def pinned(lock: str, python: str, machine: str = "x86_64") -> dict[str, str]:
    """Each package of a lock on Linux with that Python, and its version."""
    text = (ROOT / lock).read_text()
    here = {"python_version": python, "python_full_version": f"{python}.0", "sys_platform": "linux", "os_name": "posix"}
    here |= {"platform_machine": machine, "platform_system": "Linux", "platform_python_implementation": "CPython"}
    found: dict[str, str] = {}
    for name, version, marker in re.findall(rf"^({NAME}){EXTRAS}==(\S+)(?: ; (.*?))?(?: \\)?$", text, re.MULTILINE):
        if not marker or Marker(marker).evaluate(here):
            assert name not in found, f"{lock} pins {name} twice for Python {python}"
            found[canonicalize_name(name)] = version
    return found


def wanted(extras: tuple[str, ...], python: str) -> list[Requirement]:
    """What pyproject.toml asks for itself, on Linux with that Python."""
    texts = [*PROJECT["dependencies"], *(text for extra in extras for text in PROJECT["optional-dependencies"][extra])]
    here = {"python_version": python, "sys_platform": "linux", "platform_machine": "x86_64"}
    parsed = [Requirement(text) for text in texts]
    return [one for one in parsed if one.name != PROJECT["name"] and (one.marker is None or one.marker.evaluate(here))]


@pytest.mark.parametrize("python", PYTHONS)
@pytest.mark.parametrize(("lock", "extras"), LOCKS.items(), ids=LOCKS)
def test_each_dependency_is_pinned_within_its_bounds(lock: str, extras: tuple[str, ...], python: str) -> None:
    versions = pinned(lock, python)
    for requirement in wanted(extras, python):
        version = versions.get(canonicalize_name(requirement.name))
        assert version is not None, f"{lock} lacks {requirement}: run `make lock`"
        assert requirement.specifier.contains(version), (
            f"{lock} pins {version}, {requirement} is asked for: run `make lock`"
        )


@pytest.mark.parametrize("python", PYTHONS)
@pytest.mark.parametrize("lock", list(LOCKS)[1:])
def test_the_smaller_locks_have_the_versions_that_the_tests_ran_with(lock: str, python: str) -> None:
    tested, deployed = pinned("requirements.lock", python), pinned(lock, python)
    assert deployed
    assert deployed.items() <= tested.items()


def test_a_gateway_on_arm_lacks_dds_alone() -> None:
    """All that is pinned has wheels for Linux on ARM, but for Cyclone DDS (docs/installing.md)."""
    of = {machine: pinned("deploy/requirements.lock", "3.11", machine).keys() for machine in ("x86_64", "aarch64")}
    assert of["x86_64"] - of["aarch64"] == {"cyclonedds", "rich-click", "click"}  # the others are what it asks for
    assert of["aarch64"] < of["x86_64"]


@pytest.mark.parametrize("lock", LOCKS)
def test_a_lock_has_hashes_and_no_addresses(lock: str) -> None:
    text = (ROOT / lock).read_text()
    assert "://" not in text
    assert not re.search(r"^--?(index-url|i|extra-index-url|find-links|f)\b", text, re.MULTILINE)
    pins = re.split(rf"^(?={NAME}{EXTRAS}==)", text, flags=re.MULTILINE)[1:]
    assert pins
    assert [pin.split()[0] for pin in pins if "--hash=sha256:" not in pin] == []


@pytest.mark.parametrize("lock", LOCKS)
def test_what_is_required_with_extras_is_pinned_with_them(lock: str) -> None:
    """By the project, or by a package that it installs. A line without the extras does not bind pip 23, which comes
    with Python 3.11: it takes the newest release instead, and then refuses that, since it has no hash."""
    installed = pinned(lock, f"{sys.version_info.major}.{sys.version_info.minor}")
    texts = [
        *PROJECT["dependencies"],
        *(text for extra in LOCKS[lock] for text in PROJECT["optional-dependencies"][extra]),
    ]
    for name, version in installed.items():
        with contextlib.suppress(
            PackageNotFoundError
        ):  # for another platform, or of an extra that is not installed here
            package = distribution(name)
            texts += package.requires or () if package.version == version else ()
    required = [one for one in map(Requirement, texts) if one.extras and one.name != PROJECT["name"]]
    lines = re.findall(rf"^({NAME}{EXTRAS})==", (ROOT / lock).read_text(), re.MULTILINE)
    extras = {canonicalize_name(one.name): one.extras for one in map(Requirement, lines)}
    wrong = [
        str(one)
        for one in required
        if (one.marker is None or one.marker.evaluate({"extra": ""}))
        and not one.extras <= extras[canonicalize_name(one.name)]
    ]
    assert not wrong, f"{lock} pins {wrong} without the extras: run `make lock`"


def test_each_bound_has_a_version_in_it() -> None:
    """`make lowest` installs these: without a lower bound it would take the oldest release there ever was."""
    for requirement in (Requirement(text) for texts in PROJECT["optional-dependencies"].values() for text in texts):
        if requirement.name != PROJECT["name"]:
            assert any(one.operator in (">=", "==", "~=") for one in requirement.specifier), requirement


def test_the_generated_code_runs_with_the_lowest_protobuf() -> None:
    """It refuses a runtime that is older than itself."""
    lowest = next(Requirement(text) for text in PROJECT["dependencies"] if text.startswith("protobuf"))
    generated = sorted((ROOT / "uprotocol").rglob("*_pb2.py"))
    assert generated
    for path in generated:
        found = re.search(r"_runtime_version\.Domain\.PUBLIC,\s*(\d+),\s*(\d+),\s*(\d+),", path.read_text())
        assert found, path
        version = tuple(map(int, found.groups()))
        (bound,) = lowest.specifier
        assert version <= tuple(map(int, bound.version.split("."))), f"{path.name} needs protobuf {version}"
