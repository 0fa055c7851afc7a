"""The computer of a gateway, or of a publisher that keeps its own history: its files survive the processes that run
on it, one after the other.

Machine.start -> GatewayProcess: Streamer.create, run -> ready -> stop (clean) | kill (between two steps) | died (error)
                       '-> taps: appended records with seq and origin, logged errors
Keeper.start --> KeeperProcess: HistoryPublisher, what is due -> the same
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import random
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from campaigns.simulation.disk import SimulatedDisk
from campaigns.simulation.following import config_of
from campaigns.simulation.loop import PROCESS, Process, SimulatedWorker
from campaigns.simulation.network import KEEPER
from campaigns.simulation.processor import Processor
from history.file.writer import FollowedFrom as Notes
from history.log.log import Log
from history.publisher import HistoryPublisher
from storage.runtime import Runtime, Used
from streamer.app import Streamer
from streamer.config import Config
from streamer.parts.recovery import RecoveryPart
from streamer.parts.reloading import Reloader
from transports.local import LocalConfig, LocalTransport
from uprotocol import uri as uris
from uprotocol import uuid as uuids
from uprotocol.core.ustreamer.v1.ustreamer_pb2 import Gap
from uprotocol.encoded import decoded
from uprotocol.message import UPayload
from uprotocol.status import UStatusError
from uprotocol.transport import LocalUriProvider
from uprotocol.v1.uattributes_pb2 import UPayloadFormat
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.umessage_pb2 import UMessage
from uprotocol.v1.uri_pb2 import UUri
from uprotocol.v1.ustatus_pb2 import UStatus

if TYPE_CHECKING:
    from campaigns.simulation.checker import Checker

STOP_S_MAX: Final = 60.0  # for a stop; later a task counts as never ending
LATE_OPEN_SHARE: Final = 0.2  # of the networks that a process opens: they take up to ...
# ... before we are on them, and as long again until `open` returns. Together less than NETWORKS_WAIT_S: who is ready is
# on each network, which the checker counts on
LATE_OPEN_S_MAX: Final = 2.4
TAIL_RECORDS: Final = 64  # in the memory of a gateway whose work takes time
RELOAD_S_MAX: Final = 60.0  # as STOP_S_MAX, for a reload
RESTART_S: Final = 1.0  # then a supervisor restarts a process that died


def named(task: asyncio.Task[Any]) -> str:
    return (
        f"{task.get_coro().__qualname__} ({task.get_name() if not task.get_name().startswith('Task-') else 'no name'})"  # type: ignore[union-attr]
    )


def runtime_of(
    world: Any, disk: SimulatedDisk, dice: random.Random, used: Callable[[], Used] = lambda: Used(0.0, 0.0, 0.0)
) -> Runtime:
    return Runtime(
        disk=disk,
        worker=SimulatedWorker,  # type: ignore[arg-type]
        monotonic=world.loop.time,
        used=used,
        random_bytes=dice.randbytes,
        rng=random.Random(dice.getrandbits(64)),
    )


class MachineProcess(Process):
    """One life of a process on a machine."""

    streamer: Streamer | None = None

    def __init__(self, machine: Machine, number: int) -> None:
        super().__init__(f"{machine.name}#{number}", self._killed)
        self.machine = machine
        world = machine.world
        self.dice = random.Random(world.dice.getrandbits(64))
        self.disk = SimulatedDisk(self.dice, lambda what: world.note("disk", machine.name, what))
        self.disk.faults, self.disk.victim = machine.disk_faults, machine.disk_victim
        self.ids = uuids.UUIDGenerator(world.wall_ms, self.dice.randbytes)
        self.ready = False
        self.stopping = False
        self.torn = False
        self.task: asyncio.Task[None] | None = None
        self.tear_on_kill = ""
        self.newest_at_start = 0  # durable seq: a record of a process that was killed before it could report it, too

    def start(self) -> None:
        context = contextvars.copy_context()
        context.run(PROCESS.set, self)
        self.task = self.machine.world.loop.create_task(self._live(), name=self.name, context=context)

    async def _live(self) -> None:
        try:
            await self._serve(self._runtime())
        except Exception as error:
            if self.alive:
                self.machine.died(self, error)
        else:
            self.machine.ended(self)

    def _runtime(self) -> Runtime:
        return runtime_of(self.machine.world, self.disk, self.dice)

    async def _serve(self, runtime: Runtime) -> None:
        raise NotImplementedError

    def ask_to_stop(self) -> bool:
        """Returns False if no handler exists yet, so that the signal just ends the process."""
        raise NotImplementedError

    def transports(self) -> list[LocalTransport]:
        raise NotImplementedError

    def _became_ready(self) -> None:
        if self.alive and not self.stopping:
            self.ready = True
            self.machine.became_ready(self)

    def _tap(self, log: Log, on_append: Callable[[Sequence[Any]], Callable[[], None]] | None = None) -> None:
        """Record seq and origin of each record, once it is committed. `on_append` is called with each record, and
        the function that it returns is called after the commit."""
        append, checker, machine = log.append, self.machine.world.checker, self.machine
        if log.durable:
            self.newest_at_start = log.newest_seq

        def tapped(streams: list[int], messages: Sequence[Any], notes: Notes | None = None) -> asyncio.Future[int]:
            if self.processor is not None:
                self.processor.work(len(messages))
            committed = on_append(messages) if on_append is not None else lambda: None
            future = append(streams, messages, notes)

            def done(future: asyncio.Future[int]) -> None:
                if not future.cancelled() and future.exception() is None:
                    for place, message in enumerate(messages):
                        origin = notes.origins[place] if notes is not None else None
                        seq = future.result() + place
                        checker.appended(machine.name, log.incarnation, log.durable, seq, message, origin)
                    committed()

            future.add_done_callback(done)
            return future

        log.append = tapped  # type: ignore[method-assign]

    def _killed(self) -> None:
        self.torn = self.disk.power_lost(tear=self.tear_on_kill)
        for transport in self.transports():
            transport.abandon()
        self.machine.killed(self)


class GatewayProcess(MachineProcess):
    """One life of a gateway."""

    def _runtime(self) -> Runtime:
        world = self.machine.world
        self.processor = Processor(world.loop, world.message_s)
        return runtime_of(world, self.disk, self.dice, self.processor.used)

    async def _serve(self, runtime: Runtime) -> None:
        config = self.machine.validated(self.machine.config)
        self.streamer = streamer = await Streamer.create(config, runtime)
        for log in streamer.assembly.logs:
            self._tap(log)
            if self.machine.world.message_s:
                log.tail_share = functools.partial(_share_of_a_small_tail, log)  # type: ignore[method-assign]
        rest = self.machine.world.rest
        if rest is not None and self.machine.name == "V":
            with contextlib.suppress(UStatusError):  # a faulty disk
                await rest.checker.read(streamer.assembly.logs.durable)
        self._tap_letters(streamer)
        self._tap_gaps(streamer)
        self._tap_listening(streamer)
        if "late_open" not in self.machine.world.without:
            self._open_late(
                random.Random(f"{self.machine.world.seed} {self.name}")
            )  # a generator of its own, so that other draws do not change
        waiting = asyncio.ensure_future(streamer.assembly.ready.wait())
        waiting.add_done_callback(lambda done: None if done.cancelled() else self._became_ready())
        try:
            await streamer.run()
        finally:
            waiting.cancel()

    def _open_late(self, dice: random.Random) -> None:
        """Make some networks open late."""
        for transport in self.transports():
            if dice.random() < LATE_OPEN_SHARE:
                waits_s = dice.random() ** 2 * LATE_OPEN_S_MAX, dice.random() ** 2 * LATE_OPEN_S_MAX
                transport.open = _late(transport.open, *waits_s)  # type: ignore[method-assign]

    def ask_to_stop(self) -> bool:
        if self.streamer is None:
            return False
        self.streamer.stop()
        return True

    def transports(self) -> list[LocalTransport]:
        endpoints = self.streamer.assembly.endpoints if self.streamer is not None else ()
        return [one.transport for one in endpoints if isinstance(one.transport, LocalTransport)]

    def _tap_listening(self, streamer: Streamer) -> None:
        """When it has begun to listen: later than its start, and on a slow processor some time before it is ready."""
        listening, machine = streamer.assembly.keeper.listening, self.machine

        def tapped() -> None:
            if self.alive:
                machine.listens()
            listening()

        streamer.assembly.keeper.listening = tapped  # type: ignore[method-assign]

    def _tap_letters(self, streamer: Streamer) -> None:
        """Only to end the wait for reported messages; the disk shows at the end whether it was stored."""
        add, checker = streamer.assembly.dead_letters.add, self.machine.world.checker

        def tapped(message: UMessage, *others: Any, **options: Any) -> None:
            checker.dead_letter(message)
            add(message, *others, **options)

        streamer.assembly.dead_letters.add = tapped  # type: ignore[method-assign]

    def _tap_gaps(self, streamer: Streamer) -> None:
        """Gaps of histories that are followed, and of recovery sources."""
        on_gap, checker, name = streamer.assembly.follows.on_gap, self.machine.world.checker, self.machine.name

        def tapped(service: UUri, gap: Gap) -> None:
            checker.followed_gap(name, gap)
            on_gap(service, gap)

        streamer.assembly.follows.on_gap = tapped
        if self.machine.name == "V" and (rest := self.machine.world.rest) is not None:
            report = streamer.parts.of(RecoveryPart).on_gap

            def reported(topic: UUri, source: Log, what: str) -> None:
                rest.checker.gap(topic, what)
                report(topic, source, what)

            streamer.parts.of(RecoveryPart).on_gap = reported
            streamer.parts.of(RecoveryPart).on_answer = rest.checker.answered


def _share_of_a_small_tail(log: Log, after: int) -> float:
    """As Log.tail_share, of a memory for TAIL_RECORDS records: a world has too few to fill a real one."""
    return (log.newest_seq - after) / TAIL_RECORDS


def _late(open: Callable[[], Awaitable[None]], before_s: float, after_s: float) -> Callable[[], Awaitable[None]]:
    async def opens_late() -> None:
        await asyncio.sleep(before_s)
        await open()
        await asyncio.sleep(after_s)

    return opens_late


class KeeperProcess(MachineProcess):
    """One life of a publisher that keeps its own history."""

    def __init__(self, machine: Keeper, number: int) -> None:
        super().__init__(machine, number)
        self._due = machine.due
        self._stop = asyncio.Event()
        self.came = asyncio.Event()
        network = machine.world.networks["vehicle"]
        self._local = LocalUriProvider("vin1", KEEPER, 1)
        self._transport = _PlainTransport(LocalConfig(network=network.name), self._local, network)
        self._transport.checker = machine.world.checker

    async def _serve(self, runtime: Runtime) -> None:
        world, options = self.machine.world, self.machine.config
        await self._transport.open()
        path = self.machine.folder / "door.db"
        async with _Kept(self._transport, self._local, path, runtime=runtime, **options).tapped(self._tap_kept) as kept:
            self._became_ready()
            while not self._stop.is_set():
                self.came.clear()
                while self._due and not self._stop.is_set():
                    await self._publish(kept, self._due.popleft())
                await self.came.wait()
        world.note("closed", self.name, dict(kept.counts))
        await self._transport.close()

    async def _publish(self, kept: HistoryPublisher, resource: int) -> None:
        self.machine.count += 1  # type: ignore[attr-defined]
        text = f"{self.machine.name} {self.machine.count}".encode()  # type: ignore[attr-defined]
        try:
            await kept.publish(resource, UPayload(text, UPayloadFormat.UPAYLOAD_FORMAT_TEXT))
        except UStatusError as error:
            self.machine.world.note("keeper", repr(error))

    def _tap_kept(self, log: Log) -> None:
        checker, is_followed = self.machine.world.checker, self.machine.world.keeper_is_followed
        checker.kept_ids_went_back = checker.clock_was_set_back

        def on_append(messages: Sequence[Any]) -> Callable[[], None]:
            sents = [checker.publishes(decoded(message), is_kept=is_followed()) for message in messages]

            def committed() -> None:
                for sent in sents:
                    if sent.is_kept:  # else only the plain copy exists: it counts once the network has it
                        sent.acknowledged()

            return committed

        self._tap(log, on_append)

    def ask_to_stop(self) -> bool:
        self._stop.set()
        self.came.set()
        return self.ready

    def transports(self) -> list[LocalTransport]:
        return [self._transport]


class _PlainTransport(LocalTransport):
    checker: Checker

    async def send_batch(self, messages: Sequence[UMessage]) -> list[UStatus]:
        statuses = await super().send_batch(messages)
        for message, status in zip(messages, statuses, strict=True):
            sent = self.checker.sent.get(uuids.to_bytes(message.attributes.id))
            if sent is not None and not sent.is_kept and status.code == UCode.OK and sent.acknowledged_at is None:
                sent.acknowledged()
        return statuses


class _Kept(HistoryPublisher):
    def tapped(self, tap: Callable[[Log], None]) -> _Kept:
        self._tap = tap
        return self

    async def _open_log(self) -> Log:
        kept = await super()._open_log()
        self._tap(kept)
        return kept


class Machine:
    """See above. `config` is what the next process gets."""

    def __init__(self, world: Any, name: str, folder: Path, config: dict[str, Any]) -> None:
        from campaigns.simulation.disk import DiskFaults

        self.world, self.name, self.folder, self.config = world, name, folder, config
        folder.mkdir(parents=True)
        self.disk_faults = DiskFaults()
        self.disk_victim = "history"
        self.process: MachineProcess | None = None
        self.processes: list[MachineProcess] = []
        self.wanted = False  # it should be running
        self.torn = False  # a write-ahead log was cut once
        self.had_disk_faults = False
        # a process has ended cleanly, so the tables are in the main files
        self.was_closed = False
        self.on_ready: list[Callable[[], None]] = []
        # when it stopped to run, and was ready again: (wall clock in ms, loop time)
        self._downs: list[tuple[int, float, int]] = []  # and the newest time that the clock had shown by then
        self._ups: list[tuple[int, float]] = []

    @property
    def streamer(self) -> Streamer | None:
        return self.process.streamer if self.process is not None else None

    @property
    def running(self) -> bool:
        return self.process is not None

    @property
    def ready(self) -> bool:
        return self.process is not None and self.process.ready

    def make_process(self) -> MachineProcess:
        return GatewayProcess(self, len(self.processes))

    def command_runtime(self) -> Runtime:
        """Returns the runtime of a command that works on the files while the gateway is stopped."""
        dice = random.Random(f"{self.world.seed} {self.name} command {self.world.loop.time()}")
        disk = SimulatedDisk(dice, lambda what: self.world.note("disk", self.name, what))
        return runtime_of(self.world, disk, dice)

    def validated(self, config: dict[str, Any]) -> Config:
        return Config.model_validate(config_of(self.world, self.name, config))

    def start(self, config: dict[str, Any] | None = None) -> MachineProcess:
        assert self.process is None, f"{self.name} runs already"
        if config is not None:
            self.config = config
        self.wanted = True
        self.process = process = self.make_process()
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

    async def reload(self, config: dict[str, Any]) -> bool:
        """Have the process take over a configuration, which is that of the next one, too. Returns False if it runs
        with another one."""
        process, streamer = self.process, self.streamer
        if process is None or streamer is None:
            self.config = config
            return process is None
        if not process.ready or process.stopping or streamer.assembly.stopping.is_set():
            return False
        self.config = config
        self.world.checker.changes(self)
        streamer.parts.of(Reloader).read = lambda: self.validated(config)
        context = contextvars.copy_context()
        context.run(PROCESS.set, process)
        task = self.world.loop.create_task(streamer.parts.of(Reloader).reload(), name="reload", context=context)
        await self.world.until(lambda: task.done() or not process.alive, RELOAD_S_MAX, 0.01)
        if not process.alive or self.process is not process:
            return True
        if not task.done():
            self.world.checker.fail("a task that never ends", f"{self.name} reloads for ever")
            return False
        try:
            self.world.note("reloaded", self.name, *map(str, task.result()))
        except (UStatusError, asyncio.CancelledError) as error:  # the latter: it ends
            self.world.note("not reloaded", self.name, repr(error))
            return False
        if self.config is config:
            self.world.checker.ready(self)
        return True

    async def stop(self) -> None:
        """SIGTERM, and wait for the end."""
        process = self.process
        self.wanted = False
        if process is None or process.task is None:
            return
        self.world.note("stop", self.name)
        self.world.checker.disturbed(self.name)
        process.stopping = True
        if not process.ask_to_stop():  # it is still opening its files and has no handler, so the signal ends it
            process.kill()
            return
        done, _ = await asyncio.wait({process.task}, timeout=STOP_S_MAX)
        if not done and process.alive:
            stuck = [named(task) for task in process.tasks if not task.done()]
            self.world.checker.fail("a task that never ends", f"{self.name} does not stop: {stuck[:5]}")
            process.kill()

    def absences(self) -> list[tuple[int, int, int]]:
        """From when to when it did not run and listen, and the newest time that its clock had shown before: later than
        the begin if the clock was set back. Unix milliseconds; not absences in which the clock was set."""
        spans = zip(self._downs, self._ups[1:], strict=False)
        return [
            (down_ms, up_ms, newest_ms)
            for (down_ms, down_s, newest_ms), (up_ms, up_s) in spans
            if abs((up_ms - down_ms) - (up_s - down_s) * 1_000) < 2
        ]

    def _went_down(self) -> None:
        if self._ups and len(self._downs) < len(self._ups):  # else it did not listen since
            now_ms = self.world.wall_ms()
            self._downs.append((now_ms, self.world.loop.now, max(now_ms, self.world.newest_ms)))

    # -- reports of a process

    def listens(self) -> None:
        if len(self._ups) == len(self._downs):
            self._ups.append((self.world.wall_ms(), self.world.loop.now))

    def became_ready(self, process: MachineProcess) -> None:
        self.world.note("ready", self.name)
        self.world.checker.ready(self)
        for callback in self.on_ready:
            callback()

    def ended(self, process: MachineProcess) -> None:
        """A clean end: no task may be left."""
        self.process = None
        self._went_down()
        self.was_closed = True
        self.world.note("ended", self.name)
        self.world.loop.call_soon(self._look_for_leftovers, process, context=self.world.context)

    def _look_for_leftovers(self, process: MachineProcess) -> None:
        left = [task for task in process.tasks if not task.done()]
        if left:
            self.world.loop.call_later(1.0, self._tell_leftovers, process, left, context=self.world.context)

    def _tell_leftovers(self, process: MachineProcess, left: list[asyncio.Task[Any]]) -> None:
        left = [task for task in left if not task.done()]
        process.alive = False
        if left:
            self.world.checker.fail(
                "a task that never ends", f"{self.name} has stopped, and there is still {named(left[0])}"
            )

    def killed(self, process: MachineProcess) -> None:
        self._went_down()
        self.torn = self.torn or process.torn
        if self.process is process:
            self.process = None
        self.world.note("killed", self.name, "torn" if process.torn else "", process.steps)
        self.world.checker.disturbed(self.name)

    def died(self, process: MachineProcess, error: Exception) -> None:
        """It died by itself: a supervisor restarts it."""
        self._went_down()
        self.process = None
        process.alive = False
        self.world.note("died", self.name, repr(error))
        self.world.checker.died(self, error)
        for transport in process.transports():
            transport.abandon()
        process.disk.power_lost()
        if self.wanted:
            self.world.loop.call_later(RESTART_S, self._again, context=self.world.context)

    def _again(self) -> None:
        if self.wanted and self.process is None:
            self.start()


class Keeper(Machine):
    """A machine of a publisher that keeps its own history. `due`: resources on which it must publish; `config`: the
    options of its HistoryPublisher."""

    def __init__(self, world: Any, name: str, folder: Path, config: dict[str, Any]) -> None:
        super().__init__(world, name, folder, config)
        self.due: deque[int] = deque()
        self.count = 0

    def make_process(self) -> MachineProcess:
        return KeeperProcess(self, len(self.processes))

    def lose_disk(self) -> None:
        for path in self.folder.glob("door.db*"):
            path.unlink()

    def publish(self, topic: UUri) -> None:
        self.world.note("due", uris.format(topic))
        self.due.append(topic.resource_id)
        if isinstance(self.process, KeeperProcess):
            self.process.came.set()

    async def run(self, topics: Sequence[UUri], messages: int, pause_s: float) -> None:
        dice = self.world.dice
        for _ in range(messages):
            await asyncio.sleep(dice.random() * pause_s)
            self.publish(dice.choice(topics))
