"""Starts parts in order, stops them in reverse, and collects their reports: conditions, samples and notes.

Part.start, then Part.run as a task -> the next part -> ... -> ready
stop: services, last first, SERVICES_CLOSE_S in total -> networks -> files, concurrently, FILES_CLOSE_S each
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import structlog

from streamer.operating.states import Condition, Sample

Stage = Literal["service", "network", "file"]

# less than 5 s in total: containers are killed after 10 s
SERVICES_CLOSE_S: Final = 1.0  # for all together, one after the other
NETWORKS_CLOSE_S: Final = 3.0  # for each, concurrently
FILES_CLOSE_S: Final = 0.5  # for each, to close cleanly; otherwise the next start recovers the file

log = structlog.get_logger()


@dataclass(frozen=True, kw_only=True)
class Part:
    """One part: how it starts and stops, and its reports. `run` becomes a task after `start`; `stop` is called even if
    the part was never started."""

    name: str
    stage: Stage = "service"  # in which it stops
    start: Callable[[], Awaitable[Any]] | None = None
    run: Callable[[], Coroutine[Any, Any, None]] | None = None
    stop: Callable[[], Awaitable[Any]] | None = None
    conditions: Callable[[], Iterable[Condition]] = tuple
    samples: Callable[[], Iterable[Sample]] = tuple
    notes: Callable[[], Iterable[str]] = tuple


class Parts:
    """The parts in the order in which they start."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self._parts = tuple(parts)

    def __repr__(self) -> str:
        return f"Parts({', '.join(part.name for part in self._parts)})"

    async def start(self, start_task: Callable[[Coroutine[Any, Any, None], str], object]) -> None:
        """Starts every part. Raises the error of a part's `start`."""
        for part in self._parts:
            if part.start is not None:
                await part.start()
            if part.run is not None:
                start_task(part.run(), part.name)

    async def stop(self) -> None:
        """Stops every part. Failures are logged."""
        await within(SERVICES_CLOSE_S, "services", self._stop_services())
        for part in self._parts:
            if part.stage == "network":
                await _stop(part)
        files = [part for part in self._parts if part.stage == "file"]
        await asyncio.gather(*(within(FILES_CLOSE_S, part.name, _stop(part)) for part in files))

    async def _stop_services(self) -> None:
        for part in reversed(self._parts):
            if part.stage == "service":
                await _stop(part)

    def conditions(self) -> Iterator[Condition]:
        return (condition for part in self._parts for condition in part.conditions())

    def samples(self) -> Iterator[Sample]:
        return (sample for part in self._parts for sample in part.samples())

    def notes(self) -> Iterator[str]:
        return (note for part in self._parts for note in part.notes())


async def _stop(part: Part) -> None:
    if part.stop is None:
        return
    try:
        await part.stop()
    except Exception:
        log.exception("closing failed; going on", part=part.name)


async def within(seconds: float, name: str, work: Coroutine[Any, Any, None]) -> None:
    """Awaits `work` for at most `seconds`, then logs a warning."""
    try:
        async with asyncio.timeout(seconds):
            await work
    except TimeoutError:
        log.warning("closing took too long; going on without", part=name, seconds=seconds)
