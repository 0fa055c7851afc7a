"""Commands that run within the process of the tests."""

from __future__ import annotations

import pytest

from storage import logs


@pytest.fixture(autouse=True)
def logging_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """No command sets up the log of this process: loggers would keep the output of the command, which is closed."""
    monkeypatch.setattr(logs, "configure", lambda *_, **__: None)
