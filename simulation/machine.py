"""A computer with a gateway on it: its files outlive the processes that run on it, one after the other.

Machine.start -> GatewayProcess: Streamer.create, run -> ready -> stop (clean) | kill (between two steps) | died (error)
                       '-> taps: what was appended under which seq, which errors were logged
"""

from __future__ import annotations

import asyncio
import contextvars
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from history.log import Log
from simulation.disk import SimulatedDisk
from simulation.loop import PROCESS, Process, SimulatedWorker
from storage.runtime import Runtime, Used
from streamer.app import Streamer
from streamer.config import Config
from transports.local import LocalTransport
from uprotocol import uuid as uuids
from uprotocol.v1.umessage_pb2 import UMessage

STOP_S_MAX: Final = 60.0  # after it a gateway that was asked to stop has a task that never ends
RESTART_S: Final = 1.0  # after which a supervisor starts anew what has died by itself


def named(task: asyncio.Task[Any]) -> str:
    return (
        f"{task.get_coro().__qualname__} ({task.get_name() if not task.get_name().startswith('Task-') else 'no name'})"  # type: ignore[union-attr]
    )


class GatewayProcess(Process):
    """One life of a gateway."""

    def __init__(self, machine: Machine, number: int) -> None:
        super().__init__(f"{machine.name}#{number}", self._killed)
        self.machine = machine
        world = machine.world
        self.dice = random.Random(world.dice.getrandbits(64))
        self.disk = SimulatedDisk(self.dice, lambda what: world.note("disk", machine.name, what))
        self.disk.faults, self.disk.victim = machine.disk_faults, machine.disk_victim
        self.ids = uuids.UUIDGenerator(world.wall_ms, self.dice.randbytes)
        self.streamer: Streamer | None = None
        self.ready = False
        self.stopping = False
        self.torn = False
        self.task: asyncio.Task[None] | None = None
        self.tear_on_kill = ""

    def start(self) -> None:
        context = contextvars.copy_context()
        context.run(PROCESS.set, self)
        self.task = self.machine.world.loop.create_task(self._live(), name=self.name, context=context)

    async def _live(self) -> None:
        machine, world = self.machine, self.machine.world
        runtime = Runtime(
            disk=self.disk,
            worker=SimulatedWorker,  # type: ignore[arg-type]
            monotonic=world.loop.time,
            busy_s=lambda: 0.0,
            used=lambda: Used(0.0, 0.0, 0.0),
            random_bytes=self.dice.randbytes,
            rng=random.Random(self.dice.getrandbits(64)),
        )
        try:
            config = Config.model_validate(machine.config)
            self.streamer = streamer = await Streamer.create(config, runtime)
            for log in streamer.logs:
                self._tap(log)
            self._tap_letters(streamer)
            waiting = asyncio.ensure_future(streamer.ready.wait())
            waiting.add_done_callback(self._became_ready)
            try:
                await streamer.run()
            finally:
                waiting.cancel()
        except Exception as error:
            if self.alive:
                machine.died(self, error)
        else:
            machine.ended(self)

    def _became_ready(self, done: asyncio.Future[Any]) -> None:
        if not done.cancelled() and self.alive and not self.stopping:
            self.ready = True
            self.machine.became_ready(self)

    def _tap(self, log: Log) -> None:
        """Learn which record has which seq, once it is committed."""
        append, world, machine = log.append, self.machine.world, self.machine

        def tapped(streams: list[int], messages: Sequence[Any]) -> asyncio.Future[int]:
            future = append(streams, messages)

            def done(future: asyncio.Future[int]) -> None:
                if not future.cancelled() and future.exception() is None:
                    for place, message in enumerate(messages):
                        world.checker.appended(
                            machine.name, log.incarnation, log.durable, future.result() + place, message
                        )

            future.add_done_callback(done)
            return future

        log.append = tapped  # type: ignore[method-assign]

    def _tap_letters(self, streamer: Streamer) -> None:
        """Only so that nobody waits for what has been told; whether it was stored is looked up in the end."""
        add, checker = streamer.dead_letters.add, self.machine.world.checker

        def tapped(message: UMessage, *others: Any, **options: Any) -> None:
            checker.told_dead(message)
            add(message, *others, **options)

        streamer.dead_letters.add = tapped  # type: ignore[method-assign]

    def _killed(self) -> None:
        self.torn = self.disk.power_lost(tear=self.tear_on_kill)
        if self.streamer is not None:
            for endpoint in self.streamer.endpoints:
                if isinstance(endpoint.transport, LocalTransport):
                    endpoint.transport.abandon()
        self.machine.killed(self)


class Machine:
    """See above. `config` is what the next process gets."""

    def __init__(self, world: Any, name: str, folder: Path, config: dict[str, Any]) -> None:
        from simulation.disk import DiskFaults

        self.world, self.name, self.folder, self.config = world, name, folder, config
        folder.mkdir(parents=True)
        self.disk_faults = DiskFaults()
        self.disk_victim = "history"
        self.process: GatewayProcess | None = None
        self.processes: list[GatewayProcess] = []
        self.wanted = False  # running is wanted
        self.torn = False  # a write-ahead log of it was cut once
        self.had_disk_faults = False
        # a process of it has ended as it should, so that the tables are in the files themselves
        self.was_closed = False
        self.on_ready: list[Callable[[], None]] = []

    @property
    def streamer(self) -> Streamer | None:
        return self.process.streamer if self.process is not None else None

    @property
    def running(self) -> bool:
        return self.process is not None

    @property
    def ready(self) -> bool:
        return self.process is not None and self.process.ready

    def start(self, config: dict[str, Any] | None = None) -> GatewayProcess:
        assert self.process is None, f"{self.name} runs already"
        if config is not None:
            self.config = config
        self.wanted = True
        self.process = process = GatewayProcess(self, len(self.processes))
        self.processes.append(process)
        self.world.note("start", self.name)
        self.world.checker.starts(self)
        process.start()
        return process

    def set_disk(self, faults: Any, victim: str) -> None:
        self.disk_faults, self.disk_victim = faults, victim
        if self.process is not None:
            self.process.disk.faults, self.process.disk.victim = faults, victim

    def kill(self, *, tear: str = "") -> None:
        if self.process is not None:
            self.process.tear_on_kill = tear
            self.process.kill()

    def kill_after(self, steps: int, *, tear: str = "") -> None:
        if self.process is not None:
            self.process.tear_on_kill = tear
            self.process.kill_at = self.process.steps + steps

    async def stop(self) -> None:
        """SIGTERM, and wait for the end."""
        process = self.process
        self.wanted = False
        if process is None or process.task is None:
            return
        self.world.note("stop", self.name)
        self.world.checker.disturbed(self.name)
        process.stopping = True
        if process.streamer is None:  # it is still opening its files: there is no handler yet, so the signal ends it
            process.kill()
            return
        process.streamer.stop()
        done, _ = await asyncio.wait({process.task}, timeout=STOP_S_MAX)
        if not done and process.alive:
            stuck = [named(task) for task in process.tasks if not task.done()]
            self.world.checker.fail("a task that never ends", f"{self.name} does not stop: {stuck[:5]}")
            process.kill()

    # -- what a process tells

    def became_ready(self, process: GatewayProcess) -> None:
        self.world.note("ready", self.name)
        self.world.checker.ready(self)
        for callback in self.on_ready:
            callback()

    def ended(self, process: GatewayProcess) -> None:
        """A clean end: nothing of it may still live."""
        self.process = None
        self.was_closed = True
        self.world.note("ended", self.name)
        self.world.loop.call_soon(self._look_for_leftovers, process, context=self.world.context)

    def _look_for_leftovers(self, process: GatewayProcess) -> None:
        left = [task for task in process.tasks if not task.done()]
        if left:
            self.world.loop.call_later(1.0, self._tell_leftovers, process, left, context=self.world.context)

    def _tell_leftovers(self, process: GatewayProcess, left: list[asyncio.Task[Any]]) -> None:
        left = [task for task in left if not task.done()]
        process.alive = False
        if left:
            self.world.checker.fail(
                "a task that never ends", f"{self.name} has stopped, and there is still {named(left[0])}"
            )

    def killed(self, process: GatewayProcess) -> None:
        self.torn = self.torn or process.torn
        if self.process is process:
            self.process = None
        self.world.note("killed", self.name, "torn" if process.torn else "", process.steps)
        self.world.checker.disturbed(self.name)

    def died(self, process: GatewayProcess, error: Exception) -> None:
        """By itself: a supervisor starts it anew."""
        self.process = None
        process.alive = False
        self.world.note("died", self.name, repr(error))
        self.world.checker.died(self, error)
        if process.streamer is not None:
            for endpoint in process.streamer.endpoints:
                if isinstance(endpoint.transport, LocalTransport):
                    endpoint.transport.abandon()
        process.disk.power_lost()
        if self.wanted:
            self.world.loop.call_later(RESTART_S, self._again, context=self.world.context)

    def _again(self) -> None:
        if self.wanted and self.process is None:
            self.start()
