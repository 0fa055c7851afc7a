"""What a Zenoh transport says of settings that Zenoh does not take."""

from __future__ import annotations

import pytest

from transports.zenoh.config import ZenohConfig
from uprotocol.status import UStatusError


@pytest.mark.parametrize("name", ["transport/auth/usrpwd/password", "transport/link/tls/listen_private_key_base64"])
def test_a_secret_that_zenoh_does_not_take_is_not_repeated(name: str) -> None:
    config = ZenohConfig(connect=("tcp/127.0.0.1:7447",), settings={name: {"hunter2": 1}})
    with pytest.raises(UStatusError, match=name) as caught:
        config.to_zenoh()
    assert "hunter2" not in caught.value.message


def test_another_setting_is_shown_as_it_was_given() -> None:
    with pytest.raises(UStatusError, match="sideways"):
        ZenohConfig(connect=("tcp/127.0.0.1:7447",), settings={"mode": "sideways"}).to_zenoh()
