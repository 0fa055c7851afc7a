"""Pause and resume by RPC, and the level of the log, as parts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from storage import logs
from streamer.assembly import HOSTED_DRAIN_MS_MAX, Assembly
from streamer.config import Config, patterns
from streamer.operating.control import Control
from streamer.operating.log_level import LogLevel
from streamer.operation import Operation
from streamer.part import Part, Parts
from streamer.reporting import Reporter


class ControlPart(Part):
    name = "control"

    def __init__(self, assembly: Assembly, parts: Parts) -> None:
        super().__init__(assembly, parts)
        allowed = patterns(assembly.config.dispatch.control)
        self._control = Control(assembly.hosted, assembly.local, assembly.paused, allowed, HOSTED_DRAIN_MS_MAX)

    async def start(self) -> None:
        await self._control.start()

    async def stop(self) -> None:
        await self._control.stop()

    def change(self, old: Config, new: Config, checked: Any) -> None:
        self._control.allow(patterns(new.dispatch.control))


class LogLevelPart(Part):
    name = "log level"

    def __init__(self, assembly: Assembly, parts: Parts) -> None:
        super().__init__(assembly, parts)
        self._level = LogLevel(lambda: assembly.config.streamer.log_level)

    def reporters(self) -> tuple[Reporter]:
        return (self._level,)

    def operations(self) -> Mapping[str, Operation]:
        return {"log_level": self._level.operation()}

    def change(self, old: Config, new: Config, checked: Any) -> None:
        before, now = old.streamer, new.streamer
        if (before.log_level, before.log_format) != (now.log_level, now.log_format):
            logs.configure(now.log_level, now.log_format)
            self._level.keep()
