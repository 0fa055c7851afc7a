"""The level of the log, as a part: another one for a while, without a restart.

log_level(level, for_s) -> in force at once -> after `for_s`: the configured level. Until then a note in /readyz says so
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from typing import Any, Final, get_args

import structlog

from storage import logs
from streamer.assembly import Assembly
from streamer.config import Config
from streamer.operation import Arguments, Operation
from streamer.part import Part, Parts
from uprotocol.status import invalid

FOR_S_MAX: Final = 30 * 86_400
LEVELS: Final[tuple[logs.Level, ...]] = get_args(logs.Level)

log = structlog.get_logger()


class LogLevelPart(Part):
    name = "log level"

    def __init__(self, assembly: Assembly, parts: Parts) -> None:
        super().__init__(assembly, parts)
        self._asked: logs.Level | None = None  # in place of the configured one
        self._ends: asyncio.TimerHandle | None = None

    def notes(self) -> Iterator[str]:
        if self._asked is not None:
            left = "until a restart" if self._ends is None else f"for {self._left_s:.0f} s more"
            yield f"the log level is {self._asked} {left}; the configured one is {self._configured}"

    def operations(self) -> Mapping[str, Operation]:
        """log_level: without `level` it only answers. `for_s`: until the configured level is back."""

        async def log_level(given: Arguments) -> dict[str, Any]:
            if "level" in given:
                asked, for_s = given.text("level"), given.number("for_s") if "for_s" in given else None
                level = next((one for one in LEVELS if one == asked), None)
                if level is None:
                    raise invalid(f"level: expected {', '.join(LEVELS)}; got {asked[:32]!r}")
                if for_s is not None and not 1 <= for_s <= FOR_S_MAX:
                    raise invalid(f"for_s: expected 1 to {FOR_S_MAX} seconds, got {for_s}")
                self._change(level, for_s)
            ends = None if self._ends is None else round(self._left_s)
            return {"level": self._asked or self._configured, "configured": self._configured, "ends_in_s": ends}

        return {"log_level": Operation(log_level, ("level", "for_s"), is_change=True)}

    def change(self, old: Config, new: Config, checked: Any) -> None:
        before, now = old.streamer, new.streamer
        if (before.log_level, before.log_format) != (now.log_level, now.log_format):
            logs.configure(now.log_level, now.log_format)
            if self._asked is not None:
                logs.set_level(self._asked)

    @property
    def _configured(self) -> logs.Level:
        return self.assembly.config.streamer.log_level

    @property
    def _left_s(self) -> float:
        assert self._ends is not None
        return max(0.0, self._ends.when() - asyncio.get_running_loop().time())

    def _change(self, level: logs.Level, for_s: int | None) -> None:
        if self._ends is not None:
            self._ends.cancel()
            self._ends = None
        was, configured = self._asked or self._configured, self._configured
        self._asked = None if level == configured else level
        if self._asked is not None and for_s is not None:
            self._ends = asyncio.get_running_loop().call_later(for_s, self._change, configured, None)
        logs.set_level(level)
        log.warning("the log level has changed", level=level, was=was, configured=configured, for_s=for_s)
