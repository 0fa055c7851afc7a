"""Opens and starts the embedded uSubscription, as soon as the disk allows it.

open -> start -- store can't be read or written: tries again, at least every REOPEN_MS_MAX --> on_started
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from typing import Final

import structlog

from storage.runtime import Runtime
from streamer.operating.states import Condition
from uprotocol.pacing import Backoff
from uprotocol.status import UStatusError
from uprotocol.v1.ucode_pb2 import UCode
from usubscription.service import USubscriptionService

REOPEN_MS_MAX: Final = 30_000  # between attempts to open a file on a full disk

log = structlog.get_logger()


class EmbeddedUSubscription:
    """Starts `service`. Raises errors that waiting does not fix: FAILED_PRECONDITION, ALREADY_EXISTS (see
    usubscription.store.schema)."""

    def __init__(self, service: USubscriptionService, runtime: Runtime, on_lost: Callable[[int], None]) -> None:
        """`on_lost(changes)`: number of subscription changes that were lost with the file."""
        self.service, self._runtime, self._on_lost = service, runtime, on_lost
        self._trouble = ""  # why it can't start
        self._is_open = False
        self.is_started = False

    def __repr__(self) -> str:
        return f"EmbeddedUSubscription(is_started={self.is_started}, trouble={self._trouble!r})"

    async def open(self) -> None:
        """Opens the file if the disk allows it; otherwise `run` tries again."""
        self._is_open = await self._attempt(self.service.open)

    async def start(self) -> None:
        """Starts the service if its file is open; otherwise `run` tries again."""
        if self._is_open:
            await self._start()

    async def run(self, on_started: Callable[[], Awaitable[None]]) -> None:
        """Tries to start the service until it runs, then awaits `on_started`. Does nothing if it runs already."""
        backoff = Backoff(1_000, REOPEN_MS_MAX, self._runtime.rng)
        if self.is_started:
            return
        await backoff.wait()
        while not await self._start():
            await backoff.wait()
        await on_started()

    async def _start(self) -> bool:
        if not await self._attempt(self.service.start):
            return False
        if lost := self.service.lost_changes:
            self._on_lost(lost)
        self.is_started = True
        return True

    async def _attempt(self, begin: Callable[[], Awaitable[None]]) -> bool:
        """Calls `begin`. Returns False if it fails and can be tried again."""
        try:
            await begin()
        except UStatusError as error:
            if error.code in (UCode.FAILED_PRECONDITION, UCode.ALREADY_EXISTS):
                raise
            self._trouble = f"its service can't start: {error}"
            log.error("uSubscription can't start; trying again", error=str(error))
            return False
        self._trouble = ""
        return True

    def conditions(self) -> Iterator[Condition]:
        if self._trouble:
            yield Condition(f"usubscription: {self._trouble}", is_fatal=True)
        elif self.service.trouble is not None:
            what = "uSubscription answers nobody, and the last known subscriptions serve"
            yield Condition(f"{what}: {self.service.trouble}", is_fatal=True)
        elif not self.service.healthy:
            yield Condition("the subscriptions can't be stored", is_fatal=True)
