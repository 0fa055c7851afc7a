"""The embedded uSubscription, as parts: its file, and its service, which starts as soon as the disk allows it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from typing import Any, Final

import structlog

from streamer.assembly import HOSTED_DRAIN_MS_MAX, Assembly
from streamer.config import Config
from streamer.part import Part, Parts
from streamer.reporting import Condition, Sample, each
from uprotocol.pacing import Backoff
from uprotocol.status import UStatusError
from uprotocol.v1.ucode_pb2 import UCode

REOPEN_MS_MAX: Final = 30_000  # between attempts to open a file on a full disk

log = structlog.get_logger()


class SubscriptionFile(Part):
    """Opens the file if the disk allows it, then loads the interest, which may read it. A file that can't be read or
    written is tried again by the service."""

    name = "subscriptions"

    def __init__(self, assembly: Assembly, parts: Parts) -> None:
        super().__init__(assembly, parts)
        self.trouble = ""  # why the service can't start

    async def start(self) -> None:
        if self.assembly.usubscription is not None:
            await self.attempt(self.assembly.usubscription.open)
        await self.assembly.interest.load()

    async def attempt(self, begin: Callable[[], Awaitable[None]]) -> None:
        """Calls `begin`; notes why it fails if it can be tried again. Raises errors that waiting does not fix:
        FAILED_PRECONDITION, ALREADY_EXISTS (see usubscription.store.tables)."""
        try:
            await begin()
        except UStatusError as error:
            if error.code in (UCode.FAILED_PRECONDITION, UCode.ALREADY_EXISTS):
                raise
            self.trouble = f"its service can't start: {error}"
            log.error("uSubscription can't start; trying again", error=str(error))
        else:
            self.trouble = ""

    async def close(self) -> None:
        """Its service closes it too, if the services have the time for that."""
        if self.assembly.usubscription is not None:
            await self.assembly.usubscription.store.stop()

    def conditions(self) -> Iterator[Condition]:
        if self.assembly.usubscription is None:
            return
        store = self.assembly.usubscription.store
        if self.trouble:
            yield Condition(f"usubscription: {self.trouble}", is_fatal=True)
        elif store.trouble is not None:
            what = "uSubscription answers nobody, and the last known subscriptions serve"
            yield Condition(f"{what}: {store.trouble}", is_fatal=True)
        elif not store.healthy:
            yield Condition("the subscriptions can't be stored", is_fatal=True)


class USubscriptionPart(Part):
    """The service. It is the last one with methods: once it has started, an unknown method is UNIMPLEMENTED."""

    name = "usubscription"

    def __init__(self, assembly: Assembly, parts: Parts) -> None:
        super().__init__(assembly, parts)
        self._store = parts.of(SubscriptionFile)
        self.is_started = False

    async def start(self) -> None:
        if self.assembly.usubscription is None:
            self.assembly.hosted.unserved.is_settled = True
        elif not self._store.trouble:
            await self._start()

    async def run(self) -> None:
        """Tries to start the service until it runs."""
        if self.assembly.usubscription is None or self.is_started:
            return
        backoff = Backoff(1_000, REOPEN_MS_MAX, self.assembly.runtime.rng)
        await backoff.wait()
        while not await self._start():
            await backoff.wait()
        await self.assembly.interest.refresh()

    async def _start(self) -> bool:
        service = self.assembly.usubscription
        assert service is not None, "only called if there is one"
        await self._store.attempt(service.start)
        self.is_started = self.assembly.hosted.unserved.is_settled = not self._store.trouble
        if self.is_started and (lost := service.store.database.lost_changes):
            self.assembly.losses.subscriptions_lost(lost)
        return self.is_started

    async def stop(self) -> None:
        if self.assembly.usubscription is not None:
            await self.assembly.usubscription.stop()

    async def close(self) -> None:
        """If `stop` took too long, its tasks still run."""
        if self.assembly.usubscription is not None:
            await self.assembly.usubscription.halt()

    def samples(self) -> Iterator[Sample]:
        if self.assembly.usubscription is not None:
            yield from each("usubscription_requests", (), self.assembly.usubscription.requests)
            yield from each("usubscription_refused", (), self.assembly.usubscription.refused)

    def change(self, old: Config, new: Config, checked: Any) -> None:
        if self.assembly.usubscription is not None:
            self.assembly.usubscription.may_reset = new.usubscription.reset


class UnservedPart(Part):
    """Calls of methods that nobody serves: answered once all services have started; they end before the networks."""

    name = "calls that nobody serves"

    async def stop(self) -> None:
        await self.assembly.hosted.unserved.drain(HOSTED_DRAIN_MS_MAX)
