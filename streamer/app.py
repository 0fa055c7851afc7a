"""Runs a streamer: starts its parts in order, and stops them in reverse.

    logs -> interest on disk -> endpoints: each listens once it is open -> pumps -> hosted services -> ready
                                '-> each uSubscription is asked once its network is connected

A message that arrives before the services run waits in the log; a request gets an error: try again.

If a network is unavailable, the disk full, or the uSubscription store unreadable at the start, it is tried again until
it works (networks.py, embedded.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any, Self

import structlog

from history.epochs.keeper import Keeper
from storage.runtime import REAL, Runtime
from streamer import parts
from streamer.assembly import Assembly
from streamer.attaching import RunningEndpoints
from streamer.config import Config
from streamer.egress.claims import listed
from streamer.embedded import REOPEN_MS_MAX
from streamer.lifecycle import Parts
from streamer.operating import metrics
from streamer.operating.admin import Admin
from streamer.operating.control import ControlSocket
from streamer.operating.states import of_one_that_cant_start
from streamer.order import parts_in_order
from streamer.walk.endpoint import Endpoint, Endpoints
from streamer.walk.ingress import IdWindow, Logs
from uprotocol.pacing import Backoff
from uprotocol.status import UStatusError
from uprotocol.v1.ucode_pb2 import UCode

log = structlog.get_logger()


class Streamer(Assembly):
    """A streamer: `streamer = await Streamer.create(config); await streamer.run()`."""

    def __init__(
        self,
        config: Config,
        endpoints: Endpoints,
        logs: Logs,
        window: IdWindow,
        keeper: Keeper,
        runtime: Runtime = REAL,
    ) -> None:
        super().__init__(config, endpoints, logs, window, keeper, runtime)
        self._tasks: set[asyncio.Task[None]] = set()
        self._group: asyncio.TaskGroup | None = None  # of the tasks of `run`
        running = RunningEndpoints(self, self.start_task)
        self.add_rule, self.remove_rule = running.add_rule, running.remove_rule
        self.add_endpoint, self.remove_endpoint = running.add_endpoint, running.remove_endpoint
        self.parts = Parts(parts_in_order(self, running))

    @classmethod
    async def create(cls, config: Config, runtime: Runtime = REAL) -> Self:
        """Opens the logs and creates the parts, but opens no network. Raises UStatusError."""
        endpoints = parts.endpoints_of(config)
        runtime = dataclasses.replace(runtime, disk=runtime.disk.with_reserve(parts.reserve_of(config)))
        logs, window = await parts.logs_of(config, runtime)
        try:
            keeper = await parts.keeper_of(config, logs, runtime)
            return cls(config, endpoints, logs, window, keeper, runtime)
        except BaseException:
            await logs.durable.close()
            raise

    def __repr__(self) -> str:
        return f"Streamer({self.config.authority}, {list(self.endpoints)}, problems={self.problems()})"

    # Start and stop

    async def run(self) -> None:
        """Runs until `stop` is called or the task is cancelled; then drains and closes everything."""
        try:
            if self.admin is not None:
                await self.admin.open()
            async with asyncio.TaskGroup() as self._group:
                self.start_task(self._start(), "start")
                await self.stopping.wait()
                for task in list(self._tasks):
                    task.cancel()
        finally:
            self.stopping.set()
            self.hosted.unserved.is_settled = False
            await self.parts.stop()

    def stop(self) -> None:
        self.stopping.set()
        self.networks.stop_waiting()

    def start_task(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """Starts a task that is cancelled when the streamer stops. If it fails, the streamer stops."""
        assert self._group is not None, "run has begun"
        task = self._group.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _start(self) -> None:
        await self.parts.start(self.start_task)
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

    def dropped(self, endpoint: Endpoint) -> Counter[str]:
        """Returns the drops by reason, including those of the transport."""
        return metrics.dropped(endpoint)

    def cursors(self) -> list[dict[str, Any]]:
        """Returns the backlog in the durable log of each endpoint, also of those not configured."""
        durable = self.logs.durable
        found = listed(durable.cursors.all(), durable.newest_seq, durable.oldest_seq)
        return [dataclasses.asdict(one) for one in found]


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
                problems: Callable[[], list[str]] = functools.partial(list, (trouble_logged,))
                states = functools.partial(
                    of_one_that_cant_start, [one.name for one in config.endpoint], trouble_logged, since_ms
                )
                await stack.enter_async_context(
                    Admin(config.streamer.admin, problems, states=states, guard=config.admin)
                )
            waiting = asyncio.ensure_future(stopping.wait())
            await asyncio.wait({waiting}, timeout=backoff.next_ms() / 1000)
            waiting.cancel()
    return None
