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
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Final, Self

import structlog

from storage.runtime import REAL, Runtime
from streamer import lifecycle, parts
from streamer.assembly import DRAIN_MS_MAX
from streamer.attaching import ChangeableAssembly
from streamer.config import Config
from streamer.egress.claims import listed
from streamer.lifecycle import REOPEN_MS_MAX, Part
from streamer.operating import metrics
from streamer.operating.admin import Admin
from streamer.operating.control import ControlSocket
from streamer.operating.states import LOOK_S, Sample, conditions_of_log, of_one_that_cant_start
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
        endpoints = parts.endpoints_of(config)
        runtime = dataclasses.replace(runtime, disk=runtime.disk.with_reserve(parts.reserve_of(config)))
        logs, window = await parts.logs_of(config, runtime)
        try:
            keeper = await parts.keeper_of(config, logs, runtime)
            streamer = cls(config, endpoints, logs, window, keeper, runtime)
        except BaseException:
            await logs.durable.close()
            raise
        streamer.parts = [
            *streamer._storage_parts(),
            *streamer._walk_parts(),
            *streamer._service_parts(),
            *streamer._report_parts(),
        ]
        return streamer

    def __repr__(self) -> str:
        return f"Streamer({self.config.authority}, {list(self.endpoints)}, problems={self.problems()})"

    # Start and stop

    async def run(self) -> None:
        """Runs until `stop` is called or the task is cancelled; then drains and closes everything."""
        try:
            if self.admin is not None:
                await self.admin.open()
            async with self.group:
                self.start_task(self._start_parts(), "start")
                await self.stopping.wait()
                for task in list(self.tasks):
                    task.cancel()
        finally:
            self.stopping.set()
            self.hosted.unserved.is_settled = False
            await lifecycle.stop(self.parts)

    def stop(self) -> None:
        self.stopping.set()
        self.networks.stop_waiting()

    async def _start_parts(self) -> None:
        await lifecycle.start(self.parts, self.start_task)
        self.ready.set()
        self.states.look()
        for note in self.notes():
            log.warning("a note", note=note)
        log.info("ready", authority=self.config.authority, endpoints=[endpoint.name for endpoint in self.endpoints])

    def release(self, consumer: str) -> str:
        """Frees a consumer's name for the next uEntity that uses it; returns its owner. Raises NOT_FOUND."""
        owner = str(self.history.consumers.release(consumer))
        log.info("a consumer was released", consumer=consumer, owner=owner)
        return owner

    def cursors(self) -> list[dict[str, Any]]:
        """Returns the backlog in the durable log of each endpoint, also of those not configured."""
        durable = self.logs.durable
        found = listed(durable.cursors.all(), durable.newest_seq, durable.oldest_seq)
        return [dataclasses.asdict(one) for one in found]

    # The parts, in the order in which they start

    def _storage_parts(self) -> Iterator[Part]:
        letters, hours = self.dead_letters, self.config.history.acknowledge_after_hours
        for one in self.logs:
            yield Part(
                name=f"{one.name} log",
                stage="file",
                stop=one.close,
                conditions=partial(conditions_of_log, one, hours),
                samples=partial(metrics.of_log, one),
            )
        yield Part(
            name="dead letters",
            stage="file",
            run=letters.run,
            stop=letters.close,
            conditions=letters.conditions,
            samples=partial(metrics.of_dead_letters, letters),
        )
        yield Part(name="gaps", run=self.gaps.run, samples=partial(metrics.of_gaps, self.gaps))
        yield Part(name="epochs", samples=partial(metrics.of_epochs, self.keeper))
        yield Part(name="states", run=self._watch, samples=self.states.samples)

    async def _watch(self) -> None:
        """Checks states, clocks, the log's file and old losses until cancelled."""
        durable = self.logs.durable
        loop, after_ms = asyncio.get_running_loop(), self.config.history.acknowledge_after_ms
        while True:
            for attached in self.attached.values():
                attached.clocks.look(loop.time())
            for loss in durable.losses.acknowledge_passing(after_ms) if after_ms else ():
                what = "a loss counts as acknowledged: it was reported for history.acknowledge_after_hours"
                log.info(what, detail=loss.detail)
            await durable.check_file()
            self.states.look()
            await asyncio.sleep(LOOK_S)

    def _walk_parts(self) -> Iterator[Part]:
        """Yields the parts of the walk. Networks open last, after all receivers are loaded."""
        ledger, paused = self.ledger, self.paused
        yield Part(name="positions", start=self._load)
        if self.embedded is not None:
            yield Part(name="file of uSubscription", start=self.embedded.open)
        yield Part(name="stored interest", start=self.interest.load)
        yield Part(name="configuration", notes=self.configuration_notes)
        yield Part(name="ledger", run=ledger.run, samples=partial(ledger.samples, self.topics_of), notes=ledger.notes)
        yield Part(name="pauses", conditions=paused.conditions, samples=paused.samples, notes=paused.notes)
        yield Part(name="connections", conditions=self.networks.conditions)
        yield Part(
            name="endpoints",
            stage="network",
            start=self.start_endpoints,
            stop=self.close_endpoints,
            conditions=self.endpoint_conditions,
            samples=self.endpoint_samples,
            notes=self.endpoint_notes,
        )
        yield Part(name="flows", stage="network", stop=self._close_flows)

    async def _load(self) -> None:
        for section in self.config.rules:
            self.rules.add(parts.rule_of(section))
        for pump in self.pumps:
            pump.begin()  # before networks listen: records from now on are for the pumps
        self.handovers.load()
        self.follows.load()
        self.claims.load()

    async def _close_flows(self) -> None:
        self.entry.close()
        for flow in self.dispatch.flows.values():
            flow.close()
        self.keeper.close()

    def _service_parts(self) -> Iterator[Part]:
        """Yields the services; they stop before the networks, last first."""
        embedded, claims, handovers, follows = self.embedded, self.claims, self.handovers, self.follows
        yield Part(name="calls that nobody serves", stop=partial(self.hosted.unserved.drain, DRAIN_MS_MAX))
        yield Part(name="control", start=self.control.start, stop=self.control.stop)
        yield Part(
            name="history",
            start=self.history.start,
            stop=self.history.stop,
            samples=partial(metrics.of_history, self.history),
        )
        if embedded is not None:
            yield Part(
                name="usubscription",
                start=embedded.start,
                run=partial(embedded.run, self._started_late),
                stop=embedded.service.stop,
                conditions=embedded.conditions,
                samples=partial(metrics.of_usubscription, embedded.service),
            )
        yield Part(name="all methods", start=self._settle)
        yield Part(
            name="learn the interest",
            run=self.interest.start,
            stop=self.interest.stop,
            conditions=self.interest_conditions,
            samples=self._interest_samples,
        )
        yield Part(name="claims", run=claims.watch, conditions=claims.conditions, samples=claims.samples)
        yield Part(name="hand-overs", run=handovers.run, conditions=handovers.conditions, samples=handovers.samples)
        yield Part(
            name="follows",
            start=follows.start,
            stop=follows.stop,
            conditions=follows.conditions,
            samples=follows.samples,
        )
        yield Part(name="networks that listen", start=self._wait_for_networks)

    async def _settle(self) -> None:
        """Notes that all hosted services have registered their methods."""
        if self.embedded is None or self.embedded.is_started:
            self.hosted.unserved.is_settled = True

    async def _started_late(self) -> None:
        await self._settle()
        await self.interest.refresh()

    def _interest_samples(self) -> Iterator[Sample]:
        yield "interest_version", (), self.interest.version

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

    def _report_parts(self) -> Iterator[Part]:
        certificates = self.certificates
        yield Part(
            name="certificates",
            start=certificates.look,
            run=certificates.run,
            notes=certificates.notes,
            samples=partial(metrics.of_certificates, certificates),
        )
        if self.admin is not None:  # `run` opens it before all parts; it is closed first
            yield Part(name="admin", stop=self.admin.close)


async def serve(config: Config, on_ready: Callable[[Streamer], None], stopping: asyncio.Event | None = None) -> None:
    """Runs a streamer until `stopping` is set or the task is cancelled. Raises UStatusError if waiting can't help."""
    stopping = stopping or asyncio.Event()
    streamer = await _create(config, stopping)
    if streamer is None:
        return

    async def announce() -> None:
        await streamer.ready.wait()
        on_ready(streamer)

    async def stop() -> None:
        await stopping.wait()
        streamer.stop()

    helpers = [asyncio.create_task(announce()), asyncio.create_task(stop())]
    try:
        async with ControlSocket(
            config.streamer.data_dir, streamer.paused, streamer.release, streamer.vehicles, streamer.cursors
        ):
            await streamer.run()
    except BaseExceptionGroup as group:
        ours, others = group.split(UStatusError)
        if ours is None or others is not None:
            raise
        first: BaseException = ours
        while isinstance(first, BaseExceptionGroup):
            first = first.exceptions[0]
        raise first from None
    finally:
        for helper in helpers:
            helper.cancel()
        await asyncio.gather(*helpers, return_exceptions=True)


async def _create(config: Config, stopping: asyncio.Event) -> Streamer | None:
    """Returns the streamer once the disk allows it; None if `stopping` is set before. Meanwhile the admin port reports
    the error."""
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
        async with contextlib.AsyncExitStack() as stack:
            if config.streamer.admin is not None:
                problems: Callable[[], list[str]] = partial(list, (trouble_logged,))
                states = partial(
                    of_one_that_cant_start, [one.name for one in config.endpoint], trouble_logged, since_ms
                )
                await stack.enter_async_context(
                    Admin(config.streamer.admin, problems, states=states, guard=config.admin)
                )
            waiting = asyncio.ensure_future(stopping.wait())
            await asyncio.wait({waiting}, timeout=backoff.next_ms() / 1000)
            waiting.cancel()
    return None
