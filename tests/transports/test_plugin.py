"""Plugins: found by name, imported when named, configured, with clear errors."""

from __future__ import annotations

import asyncio
import itertools
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import structlog
from typer.testing import CliRunner, Result

from storage import logs
from streamer import config as configs
from streamer.app import Streamer, serve
from streamer.commands import cli, terminal
from transports import plugin
from transports.local import LocalTransport
from uprotocol.status import UStatusError
from uprotocol.transport import LocalUriProvider
from uprotocol.v1.ucode_pb2 import UCode

LOCAL = LocalUriProvider("one", 0x10AB, 3)
Install = Callable[..., None]
_numbers = itertools.count()


def failure(*arguments: object) -> UStatusError:
    with pytest.raises(UStatusError) as raised:
        plugin.create(*arguments, LOCAL)  # type: ignore[arg-type]
    return raised.value


def test_the_plugins_of_this_package_are_found() -> None:
    assert set(plugin.names()) >= {"local", "zenoh", "mqtt5", "dds"}


def test_finding_them_imports_none() -> None:
    code = "import sys; from transports import plugin; plugin.names(); "
    code += "print({'zenoh', 'paho', 'cyclonedds'} & set(sys.modules))"
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
        == "set()"
    )


def test_a_transport_is_made_from_its_name_and_settings() -> None:
    made = plugin.create("local", {"network": "here"}, LOCAL)
    assert isinstance(made, LocalTransport)
    assert made.network.name == "here"
    assert plugin.load("local").capabilities == LocalTransport.capabilities


def test_an_unknown_name_is_reported_with_the_known_ones() -> None:
    error = failure("carrier-pigeon", {})
    assert error.code == UCode.NOT_FOUND
    assert "local" in error.message


def test_an_unknown_setting_is_named() -> None:
    error = failure("local", {"network": "here", "colour": "red", "listeners_max": 0})
    assert error.code == UCode.INVALID_ARGUMENT
    assert "colour" in error.message
    assert "listeners_max" in error.message


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """`install(text)` installs a package `up-transport-pigeon` whose module `pigeon_<n>` has that text, and whose
    plugin is `pigeon`."""
    site = tmp_path / "site"
    site.mkdir()
    monkeypatch.syspath_prepend(str(site))
    module = f"pigeon_{next(_numbers)}"

    def put(text: str, extras: Sequence[str] = (), target: str = "") -> None:
        (site / f"{module}.py").write_text(text)
        metadata = site / "up_transport_pigeon-1.0.dist-info"
        metadata.mkdir(exist_ok=True)
        provided = "".join(
            f"Provides-Extra: {extra}\nRequires-Dist: lib{extra}>=1; extra == '{extra}'\n" for extra in extras
        )
        (metadata / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: up-transport-pigeon\nVersion: 1.0\n{provided}"
        )
        (metadata / "entry_points.txt").write_text(f"[{plugin.GROUP}]\npigeon = {target or f'{module}:PLUGIN'}\n")

    yield put
    sys.modules.pop(module, None)


GOOD = """
from pydantic import BaseModel, ConfigDict
from transports.local import LocalTransport
from transports.plugin import TransportPlugin
from uprotocol.transport import Capability

class PigeonConfig(BaseModel):
    model_config = ConfigDict(extra="forbid")
    network: str = "here"

"""

MISSING = "needs a module that is not installed (No module named 'no_such_library')"
WRONG: dict[str, tuple[str, list[str]]] = {
    "its library is missing": ("import no_such_library", [MISSING, "install what provides 'no_such_library'"]),
    "its import raises": (
        "raise ValueError('no wings\\non this machine')",
        ["can't be imported", "ValueError: no wings on this machine"],
    ),
    "its text is no Python": ("def def", ["can't be imported", "SyntaxError"]),
    "a name of a library is gone": ("from json import no_such_name", ["can't be imported", "no_such_name"]),
    "no PLUGIN": ("", ["can't be imported", "AttributeError", "PLUGIN"]),
    "a transport as PLUGIN": (
        GOOD + "PLUGIN = LocalTransport",
        ["must name a transports.plugin.TransportPlugin", "the class LocalTransport"],
    ),
    "a function as PLUGIN": (
        "def PLUGIN(): ...",
        ["must name a transports.plugin.TransportPlugin", "an instance of function"],
    ),
    "its config is no model": (
        GOOD + "PLUGIN = TransportPlugin('pigeon', dict, LocalTransport, LocalTransport.capabilities)",
        ["config must be a pydantic model", "the class dict"],
    ),
    "its config is an instance": (
        GOOD + "PLUGIN = TransportPlugin('pigeon', PigeonConfig(), LocalTransport, LocalTransport.capabilities)",
        ["config must be a pydantic model", "an instance of PigeonConfig"],
    ),
    "its create can't be called": (
        GOOD + "PLUGIN = TransportPlugin('pigeon', PigeonConfig, 'LocalTransport', LocalTransport.capabilities)",
        ["create must be callable", "an instance of str"],
    ),
    "its capabilities are a list": (
        GOOD + "PLUGIN = TransportPlugin('pigeon', PigeonConfig, LocalTransport, [Capability.PUSH])",
        ["capabilities must be", "an instance of list"],
    ),
    "its model raises": (
        GOOD.replace("network: str", "def model_post_init(self, _):\n        raise KeyError('wings')\n    network: str")
        + "PLUGIN = TransportPlugin('pigeon', PigeonConfig, LocalTransport, LocalTransport.capabilities)",
        ["fails to check its settings", "KeyError: 'wings'"],
    ),
}
"""What is found when the configuration is read."""

UNMADE: dict[str, tuple[str, list[str]]] = {
    "its constructor raises": (
        GOOD + "PLUGIN = TransportPlugin('pigeon', PigeonConfig, lambda config, local: 1 / 0, Capability.PUSH)",
        ["can't be made from its settings", "ZeroDivisionError"],
    ),
    "it makes something else": (
        GOOD + "PLUGIN = TransportPlugin('pigeon', PigeonConfig, lambda config, local: config, Capability.PUSH)",
        ["must return a uprotocol.transport.UTransport", "an instance of PigeonConfig"],
    ),
}
"""What shows only when the transport is made."""


@pytest.mark.parametrize("what", [*WRONG, *UNMADE])
def test_a_plugin_that_can_not_be_used_is_one_line_that_says_what_to_do(install: Install, what: str) -> None:
    text, words = (WRONG | UNMADE)[what]
    install(text)
    error = failure("pigeon", {})
    assert error.code == UCode.FAILED_PRECONDITION
    assert "transport 'pigeon' of the package up-transport-pigeon" in error.message
    assert "\n" not in error.message
    for word in words:
        assert word in error.message
    assert "up-streamer[" not in error.message, "it is not ours, so no extra of ours helps"


@pytest.mark.parametrize("what", UNMADE)
def test_each_failure_of_a_constructor_has_its_own_error(install: Install, what: str) -> None:
    install(UNMADE[what][0])
    assert isinstance(failure("pigeon", {}), plugin.NotMade)


def test_what_a_constructor_says_itself_goes_through(install: Install) -> None:
    says = "def make(config, local):\n    raise UStatusError(UCode.INVALID_ARGUMENT, 'a pigeon needs a loft')\n"
    imports = "from uprotocol.status import UStatusError\nfrom uprotocol.v1.ucode_pb2 import UCode\n"
    install(GOOD + imports + says + "PLUGIN = TransportPlugin('pigeon', PigeonConfig, make, Capability.PUSH)")
    error = failure("pigeon", {})
    assert (error.code, error.message) == (UCode.INVALID_ARGUMENT, "a pigeon needs a loft")


def test_an_extra_is_named_only_where_the_package_has_it(install: Install) -> None:
    install("import no_such_library", extras=["pigeon"])
    assert "try pip install 'libpigeon>=1' (its extra 'pigeon')" in failure("pigeon", {}).message


def test_an_entry_point_to_nothing_is_reported(install: Install) -> None:
    install("", target="no_such_pigeon.loft:PLUGIN")
    message = failure("pigeon", {}).message
    assert "the package is incomplete: install up-transport-pigeon again" in message


def test_a_long_complaint_is_cut(install: Install) -> None:
    install("raise RuntimeError('coo ' * 10_000)")
    assert len(failure("pigeon", {}).message) < 700


def test_a_missing_package_of_ours_names_our_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zenoh", None)
    for module in [name for name in sys.modules if name == "transports.zenoh" or name.startswith("transports.zenoh.")]:
        monkeypatch.delitem(sys.modules, module)
    error = failure("zenoh", {})
    assert error.code == UCode.FAILED_PRECONDITION
    assert re.search(r"try pip install 'eclipse-zenoh>=[\d.]+' \(its extra 'zenoh'\)", error.message), error.message


# Through the command line.

CONFIG = """
[streamer]
data_dir = "{folder}/data"
[[endpoint]]
name = "loft"
transport = "pigeon"
authorities = ["vehicle1"]
"""


def command(tmp_path: Path, *arguments: str) -> Result:
    (tmp_path / "loft.toml").write_text(CONFIG.format(folder=tmp_path))
    result = CliRunner(env={"COLUMNS": "2000", "TERM": "dumb"}).invoke(
        cli.app, [*arguments, "-c", str(tmp_path / "loft.toml")]
    )
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exc_info
    assert "Traceback" not in result.output
    return result


@pytest.mark.parametrize("what", [*WRONG, *UNMADE])
def test_check_says_it_in_one_line(install: Install, tmp_path: Path, what: str) -> None:
    text, words = (WRONG | UNMADE)[what]
    install(text)
    result = command(tmp_path, "check")
    assert result.exit_code == (terminal.EXIT_CONFIG if what in WRONG else terminal.EXIT_FAILED)
    (line,) = result.stderr.splitlines()
    for word in ["transport 'pigeon' of the package up-transport-pigeon", *words]:
        assert word in line
    if what in WRONG:
        assert "loft.toml:6: endpoint 'loft'" in line


def test_check_accepts_a_good_one(install: Install, tmp_path: Path) -> None:
    make = "from transports.local import PLUGIN as here\n\n"
    make += "def make(config, local):\n    return here.create(here.config(network='loft'), local)\n\n"
    install(GOOD + make + "PLUGIN = TransportPlugin('pigeon', PigeonConfig, make, LocalTransport.capabilities)")
    assert command(tmp_path, "check").exit_code == 0


@pytest.mark.parametrize("what", ["its library is missing", "a transport as PLUGIN"])
def test_run_says_it_in_one_line(install: Install, tmp_path: Path, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "configure", lambda *_: None)  # loggers of this process outlive the captured stderr
    text, words = WRONG[what]
    install(text)
    result = command(tmp_path, "run")
    assert result.exit_code == terminal.EXIT_CONFIG
    (line,) = result.stderr.splitlines()
    for word in words:
        assert word in line


async def test_a_constructor_that_fails_is_the_trouble_of_that_endpoint_alone(install: Install, tmp_path: Path) -> None:
    install(UNMADE["its constructor raises"][0])
    text = CONFIG.format(folder=tmp_path) + '[[endpoint]]\nname = "hall"\ntransport = "local"\nauthorities = ["hall"]\n'
    stopping = asyncio.Event()

    def on_ready(streamer: Streamer) -> None:
        pytest.fail("an endpoint that can't be made is never ready")

    async with asyncio.timeout(10):
        with structlog.testing.capture_logs() as logs:
            serving = asyncio.create_task(serve(configs.loads(text), on_ready, stopping))
            while not any("can't be made" in str(entry.get("why")) for entry in logs):
                assert not serving.done(), serving
                await asyncio.sleep(0.01)
            stopping.set()
            await serving
    reports = [entry for entry in logs if "ZeroDivisionError" in str(entry)]
    assert reports
    for entry in reports:
        assert "exc_info" not in entry
