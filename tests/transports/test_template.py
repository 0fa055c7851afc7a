"""The template for transports of other repositories: copied and renamed, it is a plugin that passes the conformance
suite, with only this package on its path."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from streamer import config as configs
from tests.tiers import full
from transports import new, plugin
from uprotocol.transport import LocalUriProvider

ROOT = Path(__file__).parents[2]
TEMPLATE = ROOT / "examples" / "transport-template"
SUITE_S_MAX = 200
NAME = "can_fd"


@pytest.fixture
def copy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    """What the command makes."""
    directory = tmp_path / "up-transport-can_fd"
    assert new.main([NAME, str(directory)]) == 0
    assert f"cd {directory} && pip install -e '.[test]' && pytest" in capsys.readouterr().out
    return directory


def suite(copy: Path, *options: str) -> int:
    """How many of its tests have passed; none may fail."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join((str(copy), str(ROOT))),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options]
    done = subprocess.run(
        command, cwd=copy, env=environment, capture_output=True, text=True, timeout=SUITE_S_MAX, check=False
    )
    assert done.returncode == 0, done.stdout[-6_000:] + done.stderr[-2_000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None
    return int(passed[1])


def test_a_copy_sends_and_hears(copy: Path) -> None:
    assert suite(copy, "-k", "survive or whole or each_change or on_a_key") >= 8


@full
@pytest.mark.slow
@pytest.mark.timeout(SUITE_S_MAX + 20)
def test_a_copy_passes_the_conformance_suite(copy: Path) -> None:
    assert suite(copy) > 150


def test_a_copy_has_all_files_and_one_name(copy: Path) -> None:
    files = {str(path.relative_to(copy)) for path in copy.rglob("*") if path.is_file()}
    assert files == {"README.md", "gateway.toml", "pyproject.toml", "up_transport_can_fd.py", "tests/test_can_fd.py"}
    of_template = [path for pattern in ("*.*", "tests/*.*") for path in TEMPLATE.glob(pattern) if path.is_file()]
    assert len(of_template) == len(files)
    for path in files:
        text = (copy / path).read_text()
        assert not re.search("hubnet|HubConfig|HubTransport|Hubnet", text), path
    assert "class CanFdTransport(TransportBase)" in (copy / "up_transport_can_fd.py").read_text()
    assert "class TestCanFd(TransportConformance)" in (copy / "tests" / "test_can_fd.py").read_text()


def test_the_configuration_of_a_copy_is_accepted(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(copy))
    project = tomllib.loads((copy / "pyproject.toml").read_text())["project"]
    ((name, value),) = project["entry-points"][plugin.GROUP].items()
    points = plugin.names()
    monkeypatch.setattr(plugin, "names", lambda *_: {**points, name: EntryPoint(name, value, plugin.GROUP)})
    loaded = configs.loads((copy / "gateway.toml").read_text())
    (endpoint,) = [one for one in loaded.endpoint if one.transport == NAME]
    made = plugin.create(endpoint.transport, endpoint.settings, LocalUriProvider("backend", 1, 1))
    assert repr(made) == "CanFdTransport(backend, closed, 127.0.0.1:4711)"


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("mqtt5", "the transport mqtt5 exists already"),
        ("Redis", "lower-case letters"),
        ("9p", "lower-case letters"),
        ("a-b", "lower-case letters"),
        ("x" * 41, "at most 40 characters"),
    ],
)
def test_a_name_that_will_not_do(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, says: str) -> None:
    assert new.main([name, str(tmp_path / "there")]) == 2
    assert says in capsys.readouterr().err
    assert not (tmp_path / "there").exists()


def test_what_is_there_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "README.md").write_text("mine")
    for directory in (tmp_path, tmp_path / "README.md"):
        assert new.main([NAME, str(directory)]) == 2
        assert "name a directory that is new or empty" in capsys.readouterr().err
    assert [path.read_text() for path in tmp_path.iterdir()] == ["mine"]


def test_a_wheel_has_the_template() -> None:
    """Where `transports.new` looks for it."""
    build = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    target = build["force-include"][str(TEMPLATE.relative_to(ROOT))]
    assert ROOT / target == new.TEMPLATES[0]
    assert new.TEMPLATES[1] == TEMPLATE
