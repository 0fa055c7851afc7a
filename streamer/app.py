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
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Self

import structlog

from storage.runtime import REAL, Runtime
from streamer import building
from streamer.assembly import Assembly
from streamer.config import Config
from streamer.operating.admin import Admin
from streamer.operating.control import ControlSocket, SpareSocket
from streamer.operating.states import of_one_that_cant_start
from streamer.part import Part, Parts
from streamer.parts.admin import AdminPort
from streamer.parts.losses import LossPart
from streamer.parts.order import ORDER, require
from streamer.parts.readiness import Readiness
from streamer.parts.reloading import Reloader
from streamer.parts.status import operations_without_start, status_without_start
from streamer.parts.usubscription import REOPEN_MS_MAX
from streamer.reporting import build
from uprotocol.pacing import Backoff
from uprotocol.status import UStatusError
from uprotocol.v1.ucode_pb2 import UCode

log = structlog.get_logger()


class Streamer:
    """A streamer: `streamer = await Streamer.create(config); await streamer.run()`.

    `assembly` is what every message passes; `parts` run and report it.
    """

    @classmethod
    async def create(cls, config: Config, runtime: Runtime = REAL) -> Self:
        """Opens the logs and creates the parts, but opens no network. Raises UStatusError."""
        require(config)
        endpoints = building.endpoints_of(config)
        runtime = dataclasses.replace(runtime, disk=runtime.disk.with_reserve(building.reserve_of(config)))
        logs, window = await building.logs_of(config, runtime)
        try:
            keeper = await building.keeper_of(config, logs, runtime)
            return cls(Assembly(config, endpoints, logs, window, keeper, runtime))
        except BaseException:
            await logs.durable.close()
            raise

    def __init__(self, assembly: Assembly) -> None:
        self.assembly = assembly
        self.parts = Parts(assembly, [kind for kind, _ in ORDER])
        port = self.parts.of(AdminPort)
        self.admin, self.operations = port.admin, port.offered

    def __repr__(self) -> str:
        return f"Streamer({self.config.authority}, {list(self.assembly.endpoints)}, problems={self.parts.problems()})"

    @property
    def config(self) -> Config:
        return self.assembly.config

    async def run(self, on_ready: Callable[[], None] = lambda: None) -> None:
        """Runs until `stop` is called or the task is cancelled; then drains and closes everything."""
        assembly = self.assembly
        try:
            await self.admin.open()
            async with assembly.tasks.group:
                assembly.tasks.start(self._start(on_ready), "start")
                await assembly.stopping.wait()
                assembly.networks.stop_waiting()
                assembly.tasks.cancel()
        finally:
            assembly.stopping.set()
            assembly.hosted.unserved.is_settled = False
            await self.parts.stop()

    def stop(self) -> None:
        self.assembly.stopping.set()

    async def _start(self, on_ready: Callable[[], None]) -> None:
        assembly = self.assembly
        for part in self.parts:
            await part.load()
        for part in self.parts:
            await part.start()
            if type(part).run is not Part.run:
                assembly.tasks.start(part.run(), part.name)
        assembly.ready.set()
        self.parts.of(Readiness).states.look()
        usual = set(self.parts.of(LossPart).notes())  # of a first start
        for note in self.parts.notes():
            if note in usual:
                log.info("a note", note=note)
            else:
                log.warning("a note", note=note)
        endpoints = [endpoint.name for endpoint in assembly.endpoints]
        log.info("ready", authority=self.config.authority, endpoints=endpoints, admin_port=self.admin.port or None)
        on_ready()


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
    streamer.assembly.stopping, streamer.assembly.config_file = stopping, file
    streamer.parts.of(Reloader).read = read
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
        admin = Admin(
            config.streamer.admin,
            [trouble].copy,
            states=partial(of_one_that_cant_start, [one.name for one in config.endpoint], trouble, since_ms),
            status=status.model_dump_json().encode,
            guard=config.admin,
            operations=operations,
        )
        with contextlib.suppress(TimeoutError):
            async with admin, SpareSocket(config.streamer.data_dir, operations):
                async with asyncio.timeout(backoff.next_ms() / 1000):
                    await stopping.wait()
    return None
