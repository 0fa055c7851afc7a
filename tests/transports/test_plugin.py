"""Plugins: found by name, imported when named, configured, and clear about what is wrong."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import EntryPoint

import pytest

from transports import plugin
from transports.local import LocalTransport
from uprotocol.status import UStatusError
from uprotocol.transport import LocalUriProvider
from uprotocol.v1.ucode_pb2 import UCode

LOCAL = LocalUriProvider("one", 0x10AB, 3)


def failure(*arguments: object) -> UStatusError:
    with pytest.raises(UStatusError) as raised:
        plugin.create(*arguments, LOCAL)  # type: ignore[arg-type]
    return raised.value


def test_the_plugins_of_this_package_are_found() -> None:
    assert set(plugin.names()) >= {"local", "zenoh", "mqtt5", "dds"}


def test_finding_them_imports_none() -> None:
    code = "import sys; from transports import plugin; plugin.names(); print({'zenoh', 'paho', 'cyclonedds'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "set()"


def test_a_transport_is_made_from_its_name_and_settings() -> None:
    made = plugin.create("local", {"network": "here"}, LOCAL)
    assert isinstance(made, LocalTransport)
    assert made.network.name == "here"
    assert plugin.load("local").capabilities == LocalTransport.capabilities


def test_an_unknown_name_is_told_with_those_that_are_known() -> None:
    error = failure("carrier-pigeon", {})
    assert error.code == UCode.NOT_FOUND
    assert "local" in error.message


def test_an_unknown_setting_is_named() -> None:
    error = failure("local", {"network": "here", "colour": "red", "listeners_max": 0})
    assert error.code == UCode.INVALID_ARGUMENT
    assert "colour" in error.message
    assert "listeners_max" in error.message


def test_a_missing_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugin, "names", lambda: {"pigeon": EntryPoint("pigeon", "no_such_module_at_all:PLUGIN", plugin.GROUP)})
    error = failure("pigeon", {})
    assert error.code == UCode.FAILED_PRECONDITION
    assert "pip install 'up-streamer[pigeon]'" in error.message
