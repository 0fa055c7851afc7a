"""One part of a streamer: what it loads, runs, reports, and how it takes over a change.

    parts/order.py: the classes in the order in which they start
    create: each class is made with the Assembly -> Parts
    run:    load all -> start, run: one after the other -> ready
    stop:   stop, last first -> disconnect, in order -> close, all at once

A new part is one module in parts/ with one class, and one line in parts/order.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable, Iterator, Mapping
from typing import Any, ClassVar, Final, TypeVar

import structlog

from streamer.assembly import Assembly, Attached
from streamer.config import Config, EndpointSection
from streamer.operation import Operation
from streamer.reporting import STARTING, Condition, Reporter, Sample

# less than 5 s in total: containers are killed after 10 s
SERVICES_CLOSE_S: Final = 1.0  # for all together, one after the other
LATE_CLOSE_S: Final = 0.05  # for each service that is left after that, so that none keeps running
FILES_CLOSE_S: Final = 0.5  # for each, to close cleanly; otherwise the next start recovers the file

P = TypeVar("P", bound="Part")

log = structlog.get_logger()


class Part(Reporter):
    """One part of a streamer. All hooks do nothing by default; those that are not `async` are called on the event loop
    and must not block it."""

    name: ClassVar[str] = ""  # for log lines and tasks

    def __init__(self, assembly: Assembly, parts: Parts) -> None:
        """`parts`: all parts, with those before this one."""
        self.assembly, self.parts = assembly, parts

    @classmethod
    def require(cls, config: Config) -> None:
        """Raises UStatusError if it can't do what the configuration says on this machine: a package or a file is
        missing. Called before a file of the data_dir is opened, and by `up-streamer check`."""

    # From start to stop

    async def load(self) -> None:
        """Continues where the files say. No network is open yet, and no other part has started."""

    async def start(self) -> None:
        """Awaited before the next part starts. Raises UStatusError, which ends the streamer."""

    async def run(self) -> None:
        """Runs as a task from after `start` until it is cancelled. An error ends the streamer."""

    async def stop(self) -> None:
        """Ends a service, while the networks are still open. It may never have started."""

    async def disconnect(self) -> None:
        """Ends what works with networks: they are closed, or close now."""

    async def close(self) -> None:
        """Closes files."""

    # What it reports, and what can be asked of it

    def reporters(self) -> Iterable[Reporter]:
        """Returns what it has that reports. `conditions`, `notes` and `samples` are theirs, unless it has its own."""
        return ()

    def conditions(self) -> Iterable[Condition]:
        for reporter in self.reporters():
            yield from reporter.conditions()

    def notes(self) -> Iterable[str]:
        for reporter in self.reporters():
            yield from reporter.notes()

    def samples(self) -> Iterable[Sample]:
        for reporter in self.reporters():
            yield from reporter.samples()

    def operations(self) -> Mapping[str, Operation]:
        """Returns what people and programs can ask of it, by name. Called once."""
        return {}

    # Endpoints come and go

    def endpoint_added(self, attached: Attached, section: EndpointSection) -> None:
        """A new endpoint was made; its network is not open yet."""

    def endpoint_removed(self, attached: Attached) -> None:
        """An endpoint is removed; its network is closed. Its cursors stay."""

    def pumps_added(self, attached: Attached, section: EndpointSection) -> None:
        """An endpoint has new pumps: it is new, or has changed."""

    def pumps_removed(self, attached: Attached) -> None:
        """The pumps of an endpoint have ended: it is removed, or changes. Called before `endpoint_removed`."""

    # The configuration changes

    async def check(self, old: Config, new: Config) -> Any:
        """Makes what can fail, and returns it for `change` and `after_change`. Raises UStatusError: nothing changes."""

    async def before_change(self, old: Config, new: Config) -> None:
        """Ends what goes. From here on the change can't fail."""

    def change(self, old: Config, new: Config, checked: Any) -> None:
        """Takes over the new configuration. All parts do this in one step of the loop: no message meets half of it."""

    async def after_change(self, old: Config, new: Config, checked: Any) -> None:
        """Starts what is new."""


class Parts:
    """All parts of one streamer in the order in which they start, and what they report together."""

    def __init__(self, assembly: Assembly, order: Iterable[type[Part]]) -> None:
        self._assembly = assembly
        self._parts: list[Part] = []
        for kind in order:
            self._parts.append(kind(assembly, self))

    def __iter__(self) -> Iterator[Part]:
        return iter(self._parts)

    def of(self, kind: type[P]) -> P:
        return next(part for part in self._parts if isinstance(part, kind))

    def conditions(self) -> list[Condition]:
        """Returns everything that is wrong; empty: ready."""
        conditions = [condition for part in self._parts for condition in part.conditions()]
        if not self._assembly.ready.is_set():
            conditions.append(Condition(STARTING, is_fatal=True))
        return conditions

    def problems(self) -> list[str]:
        """Returns a sentence for each condition."""
        return [condition.problem for condition in self.conditions()]

    def notes(self) -> list[str]:
        return [note for part in self._parts for note in part.notes()]

    def samples(self) -> Iterator[Sample]:
        for part in self._parts:
            yield from part.samples()

    def operations(self) -> dict[str, Operation]:
        return {name: operation for part in self._parts for name, operation in part.operations().items()}

    def add_endpoint(self, attached: Attached, section: EndpointSection) -> None:
        """Adds an endpoint to all parts, in one step."""
        for part in self._parts:
            part.endpoint_added(attached, section)

    def remove_endpoint(self, attached: Attached) -> None:
        """Removes an endpoint without pumps from all parts, in one step."""
        for part in reversed(self._parts):
            part.endpoint_removed(attached)

    def add_pumps(self, attached: Attached, section: EndpointSection) -> None:
        for part in self._parts:
            part.pumps_added(attached, section)

    def remove_pumps(self, attached: Attached) -> None:
        for part in reversed(self._parts):
            part.pumps_removed(attached)

    async def stop(self) -> None:
        """Stops every part. Failures are logged."""
        time = asyncio.get_running_loop().time
        until = time() + SERVICES_CLOSE_S
        for part in reversed(self._parts):
            await within(max(until - time(), LATE_CLOSE_S), part.name, _ending(part.name, part.stop()))
        for part in self._parts:
            await _ending(part.name, part.disconnect())
        await asyncio.gather(*(within(FILES_CLOSE_S, part.name, _ending(part.name, part.close())) for part in self))


async def _ending(name: str, work: Coroutine[Any, Any, None]) -> None:
    try:
        await work
    except Exception:
        log.exception("closing failed; going on", part=name)


async def within(seconds: float, name: str, work: Coroutine[Any, Any, None]) -> None:
    """Awaits `work` for at most `seconds`, then logs a warning."""
    try:
        async with asyncio.timeout(seconds):
            await work
    except TimeoutError:
        log.warning("closing took too long; going on without", part=name, seconds=seconds)
