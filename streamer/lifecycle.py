"""How parts start and stop; the embedded uSubscription, which starts as soon as the disk allows it.

Part.start, then Part.run as a task -> the next part -> ... -> ready
stop: services, last first, SERVICES_CLOSE_S in total, then LATE_CLOSE_S each -> networks
      -> files, concurrently, FILES_CLOSE_S each
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, Final, Literal

import structlog

from storage.runtime import Runtime
from streamer.reporting import Condition
from uprotocol.pacing import Backoff
from uprotocol.status import UStatusError
from uprotocol.v1.ucode_pb2 import UCode
from usubscription.service import USubscriptionService

# less than 5 s in total: containers are killed after 10 s
SERVICES_CLOSE_S: Final = 1.0  # for all together, one after the other
LATE_CLOSE_S: Final = 0.05  # for each service that is left after that, so that none keeps running
NETWORKS_CLOSE_S: Final = 3.0  # for each, concurrently
FILES_CLOSE_S: Final = 0.5  # for each, to close cleanly; otherwise the next start recovers the file
REOPEN_MS_MAX: Final = 30_000  # between attempts to open a file on a full disk

log = structlog.get_logger()


@dataclass(frozen=True)
class Part:
    """How a part starts and stops. `run` becomes a task after `start`; `stop` is called even if it never started."""

    name: str
    _: KW_ONLY
    stage: Literal["service", "network", "file"] = "service"  # in which it stops
    start: Callable[[], Awaitable[Any]] | None = None
    run: Callable[[], Coroutine[Any, Any, None]] | None = None
    stop: Callable[[], Awaitable[Any]] | None = None


async def stop(parts: Sequence[Part]) -> None:
    """Stops every part. Failures are logged."""
    services, networks, files = (
        [part for part in parts if part.stage == stage] for stage in ("service", "network", "file")
    )
    until = asyncio.get_running_loop().time() + SERVICES_CLOSE_S
    for part in reversed(services):
        left_s = until - asyncio.get_running_loop().time()
        await within(max(left_s, LATE_CLOSE_S), part.name, _stop(part))
    for part in networks:
        await _stop(part)
    await asyncio.gather(*(within(FILES_CLOSE_S, part.name, _stop(part)) for part in files))


async def _stop(part: Part) -> None:
    try:
        if part.stop is not None:
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


class EmbeddedUSubscription:
    """Opens and starts `service` as soon as the disk allows it: a store that can't be read or written is tried again,
    at least every REOPEN_MS_MAX. Raises errors that waiting does not fix: FAILED_PRECONDITION, ALREADY_EXISTS (see
    usubscription.store.tables)."""

    def __init__(self, service: USubscriptionService, runtime: Runtime, on_lost: Callable[[int], None]) -> None:
        """`on_lost(changes)`: number of subscription changes that were lost with the file."""
        self.service, self._runtime, self._on_lost = service, runtime, on_lost
        self._trouble = ""  # why it can't start
        self.is_started = False

    async def open(self) -> None:
        """Opens the file if the disk allows it; otherwise `run` tries again."""
        await self._attempt(self.service.open)

    async def start(self) -> None:
        """Starts the service if its file is open; otherwise `run` tries again."""
        if not self._trouble:
            await self._start()

    async def run(self, on_started: Callable[[], Awaitable[None]]) -> None:
        """Tries to start the service until it runs, then awaits `on_started`. Does nothing if it runs already."""
        if self.is_started:
            return
        backoff = Backoff(1_000, REOPEN_MS_MAX, self._runtime.rng)
        await backoff.wait()
        while not await self._start():
            await backoff.wait()
        await on_started()

    async def _start(self) -> bool:
        await self._attempt(self.service.start)
        self.is_started = not self._trouble
        if self.is_started and (lost := self.service.store.database.lost_changes):
            self._on_lost(lost)
        return self.is_started

    async def _attempt(self, begin: Callable[[], Awaitable[None]]) -> None:
        """Calls `begin`; notes why it fails if it can be tried again."""
        try:
            await begin()
        except UStatusError as error:
            if error.code in (UCode.FAILED_PRECONDITION, UCode.ALREADY_EXISTS):
                raise
            self._trouble = f"its service can't start: {error}"
            log.error("uSubscription can't start; trying again", error=str(error))
        else:
            self._trouble = ""

    def conditions(self) -> Iterator[Condition]:
        if self._trouble:
            yield Condition(f"usubscription: {self._trouble}", is_fatal=True)
        elif self.service.store.trouble is not None:
            what = "uSubscription answers nobody, and the last known subscriptions serve"
            yield Condition(f"{what}: {self.service.store.trouble}", is_fatal=True)
        elif not self.service.store.healthy:
            yield Condition("the subscriptions can't be stored", is_fatal=True)
