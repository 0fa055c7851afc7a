"""Runs a streamer: starts its parts in order, and stops them in reverse.

    logs -> interest on disk -> endpoints: each listens once it is open -> pumps -> hosted services -> ready
                                '-> each uSubscription is asked once its network is connected

A message that arrives before the services run waits in the log; a request gets an error: try again.

If a network is unavailable, the disk full, or the uSubscription store unreadable at the start, it is tried again until
it works (networks.py, lifecycle.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Final, Self

import structlog

from history.epochs.keeper import Keeper
from storage.runtime import REAL, Runtime
from streamer import lifecycle, parts, renaming
from streamer.assembly import DRAIN_MS_MAX
from streamer.attaching import ChangeableAssembly
from streamer.config import Config
from streamer.edge.edge import check_extra
from streamer.lifecycle import REOPEN_MS_MAX, Part
from streamer.operating import metrics
from streamer.operating.admin import Admin
from streamer.operating.control import ControlSocket, SpareSocket
from streamer.operating.states import LOOK_S, of_one_that_cant_start
from streamer.operating.status import operations_without_start, status_of, status_without_start
from streamer.operating.tracing import check_tracing
from streamer.operations import operations_of
from streamer.reloading import Reloader
from streamer.reporting import Condition, Sample, build
from streamer.walk.endpoint import Endpoints
from streamer.walk.ingress import IdWindow, Logs
from uprotocol.pacing import Backoff
from uprotocol.status import UStatusError
from uprotocol.v1.ucode_pb2 import UCode

# longest delay of `ready`: for networks to open, then for uSubscriptions to answer over the connected ones
OPEN_WAIT_S: Final = 5.0
INTEREST_WAIT_S: Final = 5.0

log = structlog.get_logger()


class Streamer(ChangeableAssembly):
    """A streamer: `streamer = await Streamer.create(config); await streamer.run()`."""

    @classmethod
    async def create(cls, config: Config, runtime: Runtime = REAL) -> Self:
        """Opens the logs and creates the parts, but opens no network. Raises UStatusError."""
        check_extra(config)
        check_tracing(config.tracing)
        endpoints = parts.endpoints_of(config)
        runtime = dataclasses.replace(runtime, disk=runtime.disk.with_reserve(parts.reserve_of(config)))
        logs, window = await parts.logs_of(config, runtime)
        try:
            keeper = await parts.keeper_of(config, logs, runtime)
            return cls(config, endpoints, logs, window, keeper, runtime)
        except BaseException:
            await logs.durable.close()
            raise

    def __init__(
        self, config: Config, endpoints: Endpoints, logs: Logs, window: IdWindow, keeper: Keeper, runtime: Runtime
    ) -> None:
        super().__init__(config, endpoints, logs, window, keeper, runtime)
        self.reloader = Reloader(self, None, lambda address, guard: self.admin.change(address, guard))
        self.operations = operations_of(self, self.reloader)
        self.admin = Admin(
            config.streamer.admin,
            self.problems,
            partial(metrics.expose, self.samples),
            self.notes,
            self.all_vehicles,
            states=self.look,
            status=lambda: status_of(self).model_dump_json().encode(),
            guard=config.admin,
            operations=self.operations,
        )

    def conditions(self) -> list[Condition]:
        return [*super().conditions(), *self.admin.conditions()]

    def notes(self) -> list[str]:
        return [*super().notes(), *self.reloader.notes()]

    def samples(self) -> Iterator[Sample]:
        yield from super().samples()
        yield from self.reloader.samples()

    def __repr__(self) -> str:
        return f"Streamer({self.config.authority}, {list(self.endpoints)}, problems={self.problems()})"

    # Start and stop

    async def run(self, on_ready: Callable[[], None] = lambda: None) -> None:
        """Runs until `stop` is called or the task is cancelled; then drains and closes everything."""
        running = [*self._parts()]
        try:
            await self.admin.open()
            async with self.group:
                self.start_task(self._start_parts(running, on_ready), "start")
                await self.stopping.wait()
                self.networks.stop_waiting()
                for task in list(self.tasks):
                    task.cancel()
        finally:
            self.stopping.set()
            self.hosted.unserved.is_settled = False
            await lifecycle.stop(running)

    def stop(self) -> None:
        self.stopping.set()

    async def _start_parts(self, running: Sequence[Part], on_ready: Callable[[], None]) -> None:
        for part in running:
            if part.start is not None:
                await part.start()
            if part.run is not None:
                self.start_task(part.run(), part.name)
        self.ready.set()
        self.states.look()
        usual = set(self.new_stores.notes())  # of a first start
        for note in self.notes():
            if note in usual:
                log.info("a note", note=note)
            else:
                log.warning("a note", note=note)
        names = [endpoint.name for endpoint in self.endpoints]
        log.info("ready", authority=self.config.authority, endpoints=names, admin_port=self.admin.port or None)
        on_ready()

    def _parts(self) -> Iterator[Part]:
        """Yields the parts in the order in which they start."""
        embedded = self.embedded
        for one in self.logs:
            yield Part(f"{one.name} log", stage="file", stop=one.close)
        yield Part("tracing", stage="file", start=self._trace, stop=self.tracing.close)
        yield Part("dead letters", stage="file", run=self.dead_letters.run, stop=self.dead_letters.close)
        yield Part("gaps", run=self.gaps.run)
        yield Part("states", run=self._watch)
        yield Part("positions", start=self._load)
        if embedded is not None:
            # its service closes it too, if the services have the time for that
            yield Part("subscriptions", stage="file", start=embedded.open, stop=embedded.service.store.stop)
        yield Part("stored interest", start=self.interest.load)
        yield Part("subscriptions without rule", run=self.without_rule.run)
        yield Part("ledger", run=self.ledger.run)
        # networks open after all receivers are loaded
        yield Part("endpoints", stage="network", start=self.start_endpoints, stop=self.close_endpoints)
        yield Part("flows", stage="network", stop=self._close_flows)
        yield Part("dropped messages", stage="network", stop=self.drops.close)
        yield Part("new stores", stage="network", stop=self.new_stores.close)
        # services stop before the networks, last first
        yield Part("calls that nobody serves", stop=partial(self.hosted.unserved.drain, DRAIN_MS_MAX))
        yield Part("control", start=self.control.start, stop=self.control.stop)
        yield Part("history", start=self.history.start, stop=self.history.stop)
        if embedded is not None:
            run = partial(embedded.run, self._started_late)
            yield Part("usubscription", start=embedded.start, run=run, stop=embedded.service.stop)
        yield Part("all methods", start=self._settle)
        yield Part("learn the interest", run=self.interest.start, stop=self.interest.stop)
        yield Part("claims", run=self.claims.watch)
        yield Part("hand-overs", run=self.handovers.run)
        yield Part("follows", start=self.follows.start, stop=self.follows.stop)
        yield Part("HTTP edge", start=self.edge.open, run=self.edge.run, stop=self.edge.close)
        yield Part("recovery", start=self.recoveries.start, run=self.recoveries.run, stop=self.recoveries.stop)
        yield Part("networks that listen", start=self._wait_for_networks)
        yield Part("certificates", start=self.certificates.look, run=self.certificates.run)
        yield Part("admin", stop=self.admin.close)  # `run` opens it before all parts; it is closed first

    async def _watch(self) -> None:
        """Checks states, clocks, the log's file and old losses until cancelled."""
        durable, loop = self.logs.durable, asyncio.get_running_loop()
        while True:
            after_ms = self.config.history.acknowledge_after_ms
            for attached in self.attached.values():
                attached.clocks.look(loop.time())
            for one in self.logs:
                self.fast_senders.look(one, self.runtime.now_ms(), loop.time())
            for loss in durable.losses.acknowledge_passing(after_ms) if after_ms else ():
                what = "a loss counts as acknowledged: it was reported for history.acknowledge_after_hours"
                log.info(what, detail=loss.detail)
            await durable.check_file()
            await self.meters.look()
            self.states.look()
            await asyncio.sleep(LOOK_S)

    async def _load(self) -> None:
        for section in self.config.rules:
            self.rules.add(parts.rule_of(section))
        for endpoint in self.config.endpoint:
            if endpoint.renamed_from is not None:
                await self.paused.rename(endpoint.renamed_from, endpoint.name)
                renaming.rename(endpoint.renamed_from, endpoint.name, self.logs, self.config.streamer.data_dir)
        for pump in self.pumps:
            pump.begin()  # before networks listen: records from now on are for the pumps
        self.handovers.load()
        self.follows.load()
        self.recoveries.load()
        self.claims.load()

    async def _trace(self) -> None:
        self.tracing.change(self.config.tracing)

    async def _close_flows(self) -> None:
        self.entry.close()
        for flow in self.dispatch.flows.values():
            flow.close()
        self.keeper.close()

    async def _settle(self) -> None:
        """Notes that all hosted services have registered their methods."""
        self.hosted.unserved.is_settled = self.embedded is None or self.embedded.is_started

    async def _started_late(self) -> None:
        await self._settle()
        await self.interest.refresh()

    async def _wait_for_networks(self) -> None:
        """Waits until the networks listen for all subscribed topics, for OPEN_WAIT_S and INTEREST_WAIT_S at most.
        Everything else works meanwhile."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(OPEN_WAIT_S):
                await self.networks.tried()
        try:
            async with asyncio.timeout(INTEREST_WAIT_S):
                await self.interest.answered()
                await self.networks.listen()
        except TimeoutError:
            what = "not every uSubscription has answered yet; it is asked again while the rest works"
            log.warning(what, usubscriptions=self.interest.unhealthy, problems=self.problems())
        self.networks.services_listen()
        self.keeper.listening()


async def serve(
    config: Config,
    on_ready: Callable[[Streamer], None],
    stopping: asyncio.Event | None = None,
    read: Callable[[], Config] | None = None,
    file: Path | None = None,
) -> None:
    """Runs a streamer until `stopping` is set or the task is cancelled. `read()` reads the configuration again, for a
    reload; `file`: where it is, for reports. Raises UStatusError if waiting can't help."""
    stopping = stopping or asyncio.Event()
    version, core, python = build()
    log.info(
        "the streamer starts",
        version=version,
        core=core,
        python=python,
        config=None if file is None else str(file.absolute()),
        data_dir=str(config.streamer.data_dir.absolute()),
        admin=config.streamer.admin,
        endpoints=[endpoint.name for endpoint in config.endpoint],
    )
    streamer = await _create(config, stopping, file)
    if streamer is None:
        return
    streamer.stopping, streamer.reloader.read, streamer.config_file = stopping, read, file
    control = ControlSocket(config.streamer.data_dir, streamer.operations)
    try:
        async with control:
            await streamer.run(partial(on_ready, streamer))
    except BaseExceptionGroup as group:
        ours, others = group.split(UStatusError)
        if ours is None or others is not None:
            raise
        first: BaseException = ours
        while isinstance(first, BaseExceptionGroup):
            first = first.exceptions[0]
        raise first from None


async def _create(config: Config, stopping: asyncio.Event, file: Path | None) -> Streamer | None:
    """Returns the streamer once the disk allows it; None if `stopping` is set before. Meanwhile the admin port and the
    control socket report the error."""
    backoff = Backoff(1_000, REOPEN_MS_MAX)
    trouble_logged, since_ms = "", REAL.now_ms()
    while not stopping.is_set():
        try:
            return await Streamer.create(config)
        except UStatusError as error:
            if error.code not in (UCode.UNAVAILABLE, UCode.RESOURCE_EXHAUSTED, UCode.PERMISSION_DENIED):
                raise
            trouble = str(error)
        if trouble != trouble_logged:
            trouble_logged, since_ms = trouble, REAL.now_ms()
            log.error("the streamer can't start; trying again", error=trouble)
        status = status_without_start(config, file, trouble, since_ms, REAL.now_ms())
        operations = operations_without_start(status)
        admin: contextlib.AbstractAsyncContextManager[object] = contextlib.nullcontext()
        if config.streamer.admin is not None:
            names = [one.name for one in config.endpoint]
            states = partial(of_one_that_cant_start, names, trouble, since_ms)
            admin = Admin(
                config.streamer.admin,
                [trouble].copy,
                states=states,
                status=status.model_dump_json().encode,
                guard=config.admin,
                operations=operations,
            )
        with contextlib.suppress(TimeoutError):
            async with admin, SpareSocket(config.streamer.data_dir, operations):
                async with asyncio.timeout(backoff.next_ms() / 1000):
                    await stopping.wait()
    return None
