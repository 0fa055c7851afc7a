"""Errors of a Zenoh transport for invalid settings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.certificates import TestAuthority
from transports import plugin
from transports.zenoh.config import DICTIONARY, ZenohConfig
from uprotocol.status import UStatusError
from uprotocol.transport import LocalUriProvider
from uprotocol.v1.ucode_pb2 import UCode


@pytest.mark.parametrize("name", ["transport/auth/usrpwd/password", "transport/link/tls/listen_private_key_base64"])
def test_a_secret_that_zenoh_does_not_take_is_not_repeated(name: str) -> None:
    config = ZenohConfig(connect=("tcp/127.0.0.1:7447",), settings={name: {"hunter2": 1}})
    with pytest.raises(UStatusError, match=name) as caught:
        config.to_zenoh()
    assert "hunter2" not in caught.value.message


def test_another_setting_is_shown_as_it_was_given() -> None:
    with pytest.raises(UStatusError, match="sideways"):
        ZenohConfig(connect=("tcp/127.0.0.1:7447",), settings={"mode": "sideways"}).to_zenoh()


@pytest.mark.parametrize("text", ["", "\n", " \n\n"])
@pytest.mark.parametrize("by_path", [False, True])
def test_users_of_whom_there_is_none_are_refused(tmp_path: Path, text: str, by_path: bool) -> None:
    """Zenoh takes such a file for "no authentication": everybody could connect."""
    file = tmp_path / "devices"
    file.write_text(text)
    named: dict[str, Any] = {"settings": {DICTIONARY: str(file)}} if by_path else {"credentials_file": file}
    config = ZenohConfig.model_validate({"listen": ["tcp/127.0.0.1:0"]} | named)
    with pytest.raises(UStatusError, match="no line of user:password") as caught:
        config.to_zenoh()
    assert caught.value.code == UCode.INVALID_ARGUMENT
    file.write_text(text + "ecu1:secret\n")
    config.to_zenoh()


def test_access_control_has_to_say_whether_it_is_enabled() -> None:
    """Zenoh takes a missing `enabled` for false, so that no rule would apply."""
    control = {"default_permission": "deny", "rules": [], "subjects": [], "policies": []}
    settings = {"listen": ["tcp/127.0.0.1:0"], "settings": {"access_control": control}}
    with pytest.raises(UStatusError, match="has no `enabled`") as caught:
        plugin.create("zenoh", settings, LocalUriProvider("one", 1, 1))
    assert caught.value.code == UCode.INVALID_ARGUMENT
    for enabled in (True, False):
        settings["settings"] = {"access_control": control | {"enabled": enabled}}
        plugin.create("zenoh", settings, LocalUriProvider("one", 1, 1))


async def test_a_policy_that_names_no_rule_is_an_invalid_argument() -> None:
    """Not UNAVAILABLE, which would be tried again without end."""
    control = {
        "enabled": True,
        "default_permission": "deny",
        "rules": [{"id": "r", "permission": "allow", "messages": ["put"], "key_exprs": ["up/**"]}],
        "subjects": [{"id": "s", "usernames": ["ecu1"]}],
        "policies": [{"subjects": ["s"], "rules": ["none such"]}],
    }
    settings = {"listen": ["tcp/127.0.0.1:0"], "settings": {"access_control": control}}
    transport = plugin.create("zenoh", settings, LocalUriProvider("one", 1, 1))
    with pytest.raises(UStatusError, match="none such") as caught:
        await transport.open()
    assert caught.value.code == UCode.INVALID_ARGUMENT
    await transport.close()


async def test_nobody_to_trust_is_an_invalid_argument_where_certificates_are_demanded(tmp_path: Path) -> None:
    certificate, key = TestAuthority(tmp_path).issue("gateway")
    tls = {"certificate": certificate, "private_key": key, "mutual": True}
    transport = plugin.create("zenoh", {"listen": ["tls/localhost:0"], "tls": tls}, LocalUriProvider("one", 1, 1))
    with pytest.raises(UStatusError, match="Missing root certificates") as caught:
        await transport.open()
    assert caught.value.code == UCode.INVALID_ARGUMENT
    await transport.close()
