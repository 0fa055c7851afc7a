"""The parts of a streamer: started in order, stopped in the other; each says what is wrong with it, and its counters.

Part.start, then Part.run as a task -> the next part -> ... -> ready
stop: services, the last first, for SERVICES_CLOSE_S in all -> networks -> files, side by side, FILES_CLOSE_S each
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import structlog

from streamer.operating.states import Condition, Sample

Stage = Literal["service", "network", "file"]

# in all less than 5 s: containers are killed after 10
SERVICES_CLOSE_S: Final = 1.0  # for all of them together, one after the other
NETWORKS_CLOSE_S: Final = 3.0  # for each, side by side
FILES_CLOSE_S: Final = 0.5  # for one file to be closed cleanly; the next start recovers one that was not

log = structlog.get_logger()


@dataclass(frozen=True, kw_only=True)
class Part:
    """One part: what starts and stops it, and what it reports. `run` becomes a task once `start` has returned; `stop`
    is called even if the part was never started."""

    name: str
    stage: Stage = "service"  # of stopping
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
        """Raises what `start` of a part raises."""
        for part in self._parts:
            if part.start is not None:
                await part.start()
            if part.run is not None:
                start_task(part.run(), part.name)

    async def stop(self) -> None:
        """Stop every part. A failure is logged, and the other parts are stopped all the same."""
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
    """Do `work`, but not for longer: the process has to end."""
    try:
        async with asyncio.timeout(seconds):
            await work
    except TimeoutError:
        log.warning("closing took too long; going on without", part=name, seconds=seconds)
