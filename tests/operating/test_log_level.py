"""Another level of the log while the streamer runs, and the configured one afterwards."""

from __future__ import annotations

import asyncio
import io
import logging
import sys
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
import structlog

from storage import logs
from streamer.config import StreamerSection
from streamer.operation import Operations
from streamer.parts.log_level import FOR_S_MAX, LogLevelPart
from uprotocol.status import UStatusError
from uprotocol.v1.ucode_pb2 import UCode


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> Iterator[io.StringIO]:
    """What is logged at level info; everything global is put back."""
    before, handlers, level = structlog.get_config(), logging.root.handlers[:], logging.root.level
    for owner, name in ((sys, "excepthook"), (sys, "unraisablehook"), (threading, "excepthook")):
        monkeypatch.setattr(owner, name, getattr(owner, name))
    monkeypatch.setattr(logs.atexit, "register", lambda call: None)
    file = io.StringIO()
    logs.configure("info", "text", file)
    yield file
    logging.captureWarnings(False)
    structlog.configure(**before)
    logging.root.handlers[:], logging.root.level = handlers, level
    logs.set_level("info")


@pytest.fixture
def made(written: io.StringIO) -> LogLevelPart:
    return LogLevelPart(cast("Any", SimpleNamespace(config=configured())), cast("Any", None))


def configured(**settings: Any) -> Any:
    return SimpleNamespace(streamer=StreamerSection(**settings))


async def ask(made: LogLevelPart, **given: Any) -> dict[str, Any]:
    return await Operations(made.operations()).answer("log_level", given)


async def test_another_level_is_in_force_at_once_also_for_loggers_in_use(
    made: LogLevelPart, written: io.StringIO
) -> None:
    log = structlog.get_logger().bind(endpoint="cloud")
    log.debug("before")
    assert await ask(made) == {"level": "info", "configured": "info", "ends_in_s": None}
    assert await ask(made, level="debug") == {"level": "debug", "configured": "info", "ends_in_s": None}
    log.debug("now")
    structlog.get_logger().debug("a new one")
    assert list(made.notes()) == ["the log level is debug until a restart; the configured one is info"]
    await ask(made, level="error")
    log.warning("too low")
    await ask(made, level="info")
    log.debug("after")
    assert list(made.notes()) == []
    events = [line.split("] ")[1].split("  ")[0] for line in written.getvalue().splitlines()]
    assert [one for one in events if not one.startswith("the log level")] == ["now", "a new one"]


async def test_the_configured_level_is_back_after_the_time(made: LogLevelPart, monkeypatch: pytest.MonkeyPatch) -> None:
    timers: list[tuple[float, Any]] = []
    loop = asyncio.get_running_loop()

    def call_later(delay: float, call: Any, *arguments: Any) -> asyncio.TimerHandle:
        timers.append((delay, lambda: call(*arguments)))
        return loop.call_at(loop.time() + delay, lambda: None)

    with monkeypatch.context() as patched:
        patched.setattr(loop, "call_later", call_later)
        assert (await ask(made, level="debug", for_s=600))["ends_in_s"] == 600
    (note,) = made.notes()
    assert note.startswith("the log level is debug for ")
    ((delay, end),) = timers
    assert delay == 600
    end()
    assert await ask(made) == {"level": "info", "configured": "info", "ends_in_s": None}
    assert list(made.notes()) == []


async def test_a_later_level_ends_the_time_of_an_earlier_one(made: LogLevelPart) -> None:
    await ask(made, level="debug", for_s=600)
    assert (await ask(made, level="error"))["ends_in_s"] is None
    made.change(configured(), configured(log_format="json"), None)  # a reload
    assert (await ask(made))["level"] == "error"


@pytest.mark.parametrize(
    "given",
    [{"level": "loud"}, {"level": 3}, {"level": "debug", "for_s": 0}, {"level": "debug", "for_s": FOR_S_MAX + 1}],
)
async def test_what_is_no_level_changes_nothing(made: LogLevelPart, given: dict[str, Any]) -> None:
    with pytest.raises(UStatusError) as error:
        await ask(made, **given)
    assert error.value.code == UCode.INVALID_ARGUMENT
    assert list(made.notes()) == []
