"""An event loop in virtual time, on which processes can be killed between any two steps.

ready -> step -> step ...      nothing is ready: the clock jumps to the next timer      no timer either: an error
          '-> of a process that is dead: dropped, as if its machine had lost power

A busy loop finds several timers due at once, and handles them in one turn: with `late_s_max` the clock jumps past
the next timer, by up to that time. Without it, unrelated events never happen in
one turn.

Every callback belongs to the process in whose context it was scheduled (the variable PROCESS), so two gateways share
one loop and neither is affected if the other one dies. Threads of the product are callbacks here, with
delays from the seed.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import gc
import heapq
import itertools
import random
import sys
import warnings
from asyncio import events
from collections.abc import Callable, Coroutine
from typing import Any, Final, TypeVar

from campaigns.simulation.processor import Processor
from storage.runtime import Gathering

T = TypeVar("T")

EXECUTOR_DELAY_S: Final = 0.003  # at most, before a call and after it
EPOCH_S: Final = 1_800_000_000  # the wall clock at the begin of a run
TURNS_MAX: Final = 100_000  # of the loop at one moment; more mean that something is repeated without a pause


class DeadlockError(Exception):
    """No callback will ever run, or the same ones repeat without end."""


class Process:
    """A process that can be killed. `steps` counts its callbacks; at `kill_at` it dies instead of running one more.
    `processor`: None, if its work takes no time."""

    processor: Processor | None = None

    def __init__(self, name: str, on_kill: Callable[[], None] = lambda: None) -> None:
        self.name, self.on_kill = name, on_kill
        self.alive = True
        self.steps = 0
        self.kill_at: int | None = None
        self.tasks: list[asyncio.Task[Any]] = []

    def __repr__(self) -> str:
        return f"Process({self.name}, {'alive' if self.alive else 'dead'}, steps={self.steps})"

    def kill(self) -> None:
        if self.alive:
            self.alive = False
            self.on_kill()


PROCESS: Final[contextvars.ContextVar[Process | None]] = contextvars.ContextVar("process", default=None)


def _may_run(process: Process | None) -> bool:
    """Counts one step of `process`. False if it has been killed, or is killed at this step."""
    if process is None:
        return True
    if not process.alive:
        return False
    process.steps += 1
    if process.kill_at is not None and process.steps >= process.kill_at:
        process.kill()
        return False
    return True


def _waits(handle: Any, run: Callable[[], None]) -> bool:
    """True if the thread of its process is busy, and runs it later."""
    process: Process | None = handle.process
    return process is not None and process.processor is not None and process.processor.defers(run)


class _Handle(events.Handle):
    __slots__ = ("process",)

    def _run(self) -> None:  # type: ignore[override]
        if not _waits(self, self._run_now):
            self._run_now()

    def _run_now(self) -> None:
        if not self._cancelled and _may_run(self.process):  # type: ignore[attr-defined]
            super()._run()  # type: ignore[misc]


class _TimerHandle(events.TimerHandle):
    __slots__ = ("process",)

    def _run(self) -> None:  # type: ignore[override]
        if not _waits(self, self._run_now):
            self._run_now()

    def _run_now(self) -> None:
        if not self._cancelled and _may_run(self.process):  # type: ignore[attr-defined]
            super()._run()  # type: ignore[misc]


class _Task(asyncio.Task[T]):
    """A task that has its place in a set by its number, not by its address: those of a set run in the same order each
    time."""

    def __init__(self, *args: Any, number: int, **options: Any) -> None:
        self._number = number
        super().__init__(*args, **options)

    def __hash__(self) -> int:
        return self._number


class _Future(asyncio.Future[T]):
    """As `_Task`."""

    def __init__(self, *, number: int, loop: asyncio.AbstractEventLoop) -> None:
        self._number = number
        super().__init__(loop=loop)

    def __hash__(self) -> int:
        return self._number


class _Clock:
    """Replaces the selector: instead of waiting, the clock jumps."""

    def __init__(self, loop: VirtualLoop) -> None:
        self._loop = loop
        self._turns = 0  # since the clock moved

    def select(self, timeout: float | None) -> list[Any]:
        loop, before = self._loop, self._loop.now
        if timeout is None:
            raise DeadlockError("every task waits for something that nothing will bring about")
        first = loop._scheduled[0]._when if loop._scheduled else loop.now
        if timeout > 0 or first < loop.now + loop._clock_resolution:  # the timer that runs now must not be early
            loop.now = max(loop.now, first)
        if loop.late_s_max and loop.now > before:
            loop.now += loop.lateness.random() * loop.late_s_max
        self._turns = 0 if loop.now > before else self._turns + 1
        if self._turns > TURNS_MAX:
            raise DeadlockError(
                f"{TURNS_MAX} turns of the loop at {loop.now:.3f} s: something is tried without a pause"
            )
        return []

    def close(self) -> None:
        pass


class VirtualLoop(asyncio.BaseEventLoop):
    """See above. `now` is loop time in seconds from 0."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.now = 0.0
        self.late_s_max = 0.0
        self.lateness = random.Random(seed)  # a generator of its own, so that other draws do not change
        self.over = False  # nothing may be scheduled any more
        self.random = random.Random(seed)
        self.errors: list[dict[str, Any]] = []  # unhandled errors
        self._selector = _Clock(self)
        self._clock_resolution = 1e-9
        self.tasks: list[asyncio.Task[Any]] = []  # of no process
        self._numbers = itertools.count()  # of tasks and futures
        self.set_exception_handler(lambda _, context: self.errors.append(context))

    def time(self) -> float:
        return self.now

    def _process_events(self, event_list: Any) -> None:
        pass

    def _write_to_self(self) -> None:
        pass

    def call_soon(self, callback: Any, *args: Any, context: contextvars.Context | None = None) -> events.Handle:
        handle = _Handle(callback, args, self, context)
        handle.process = handle._context.get(PROCESS)  # type: ignore[attr-defined]
        if not self.over:
            self._ready.append(handle)  # type: ignore[attr-defined]
        return handle

    def call_soon_threadsafe(
        self, callback: Any, *args: Any, context: contextvars.Context | None = None
    ) -> events.Handle:
        return self.call_soon(callback, *args, context=context)

    def call_at(
        self, when: float, callback: Any, *args: Any, context: contextvars.Context | None = None
    ) -> events.TimerHandle:
        timer = _TimerHandle(when, callback, args, self, context)
        timer.process = timer._context.get(PROCESS)  # type: ignore[attr-defined]
        if not self.over:
            heapq.heappush(self._scheduled, timer)  # type: ignore[attr-defined]
            timer._scheduled = True  # type: ignore[attr-defined]
        return timer

    def call_later(
        self, delay: float, callback: Any, *args: Any, context: contextvars.Context | None = None
    ) -> events.TimerHandle:
        return self.call_at(self.now + delay, callback, *args, context=context)

    def create_future(self) -> asyncio.Future[Any]:
        return _Future(number=next(self._numbers), loop=self)

    def create_task(
        self, coro: Coroutine[Any, Any, T], *, name: str | None = None, context: contextvars.Context | None = None
    ) -> asyncio.Task[T]:
        task: asyncio.Task[T] = _Task(coro, number=next(self._numbers), loop=self, name=name, context=context)
        process = (context if context is not None else contextvars.copy_context()).get(PROCESS)
        (self.tasks if process is None else process.tasks).append(task)
        return task

    def run_in_executor(self, executor: Any, func: Callable[..., T], *args: Any) -> asyncio.Future[T]:  # type: ignore[override]
        future: asyncio.Future[T] = self.create_future()

        def settle(result: T | None, error: BaseException | None) -> None:
            if future.done():
                return
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(result)  # type: ignore[arg-type]

        def call() -> None:
            result, error = None, None
            try:
                result = func(*args)
            except Exception as caught:
                error = caught
            self.call_later(self.random.random() * EXECUTOR_DELAY_S, settle, result, error)

        self.call_later(self.random.random() * EXECUTOR_DELAY_S, call)
        return future

    def finish(self, processes: list[Process]) -> None:
        """End the remaining tasks, without letting them run any further."""
        self.over = True
        hook, sys.unraisablehook = sys.unraisablehook, lambda _: None  # suppress the output of dead processes
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                for process in processes:
                    process.alive = False
                for task in [task for process in processes for task in process.tasks] + self.tasks:
                    task._log_destroy_pending = False  # type: ignore[attr-defined]
                    with contextlib.suppress(BaseException):
                        task.get_coro().close()  # type: ignore[union-attr]
                for process in processes:
                    process.tasks.clear()
                self.tasks.clear()
                self._ready.clear()  # type: ignore[attr-defined]
                self._scheduled.clear()  # type: ignore[attr-defined]
                self.close()
                gc.collect()
        finally:
            sys.unraisablehook = hook


class SimulatedWorker:
    """storage.runtime.Worker as callbacks: a batch begins with a delay after its first job, and its callbacks run with
    a delay after its end."""

    DELAY_S: Final = 0.004  # at most; a commit takes some milliseconds

    def __init__(
        self,
        name: str,
        work: Callable[[list[Any]], None],
        *,
        batch_max: int = 256,
        weigh: Callable[[Any], int] | None = None,
        gathering: Gathering | None = None,
        tick_s: float | None = None,
        finish: Callable[[], None] | None = None,
    ) -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        self._loop, self._work, self._finish, self._name = loop, work, finish, name
        self._batch_max, self._weigh, self._tick_s = batch_max, weigh, tick_s
        self._gathering = gathering
        self._is_first = False
        self._wanted = 0  # jobs that are waited for; 0: none
        self._waiting: asyncio.TimerHandle | None = None
        self._jobs: list[Any] = []
        self._callbacks: list[Callable[[], object]] = []
        self._busy = self._closing = self._working = False
        self._ended: asyncio.Future[None] = loop.create_future()
        self._ticking: asyncio.TimerHandle | None = None
        self._tick_later()

    @property
    def waiting(self) -> int:
        return len(self._jobs)

    def put(self, job: Any) -> None:
        self._jobs.append(job)
        if self._wanted and self._is_enough():
            self._gathered(in_vain=False)
        self._wake()

    def tell(self, call: Callable[[], object]) -> None:
        self._callbacks.append(call)

    async def close(self) -> None:
        self._closing = True
        if self._wanted:
            self._gathered(in_vain=False)
        self._wake()
        await asyncio.shield(self._ended)

    def _wake(self) -> None:
        if not self._busy and not self._ended.done():
            self._busy, self._is_first = True, len(self._jobs) <= 1
            self._loop.call_later(self._loop.random.random() * self.DELAY_S, self._gather)

    def _tick_later(self) -> None:
        if self._tick_s is not None:
            if self._ticking is not None:
                self._ticking.cancel()
            self._ticking = self._loop.call_later(self._tick_s, self._wake)

    def _is_enough(self) -> bool:
        assert self._gathering is not None
        weight = sum(1 if self._weigh is None else self._weigh(job) for job in self._jobs)
        return len(self._jobs) >= self._wanted or weight >= self._gathering.enough

    def _gather(self) -> None:
        if self._gathering is None or self._closing or not self._jobs:
            self._turn()
            return
        self._wanted = self._gathering.wanted(is_first=self._is_first)
        if self._is_enough():
            self._gathering.took(len(self._jobs), waited=False, in_vain=False)
            self._wanted = 0
            self._turn()
        else:
            self._waiting = self._loop.call_later(self._gathering.window_s, lambda: self._gathered(in_vain=True))

    def _gathered(self, *, in_vain: bool) -> None:
        assert self._gathering is not None
        assert self._waiting is not None
        self._wanted = 0
        self._waiting.cancel()
        self._gathering.took(len(self._jobs), waited=True, in_vain=in_vain)
        self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        batch: list[Any] = []
        weight = 0
        while self._jobs and weight < self._batch_max:
            batch.append(self._jobs.pop(0))
            weight += 1 if self._weigh is None else self._weigh(batch[-1])
        if batch or (self._tick_s is not None and not self._closing):
            self._work(batch)
        ending = self._closing and not self._jobs
        if ending and self._finish is not None:
            self._finish()
        callbacks, self._callbacks = self._callbacks, []
        self._loop.call_later(self._loop.random.random() * self.DELAY_S, self._tell, callbacks, ending)

    def _tell(self, callbacks: list[Callable[[], object]], ending: bool) -> None:
        for call in callbacks:
            self._loop.call_soon(call)
        self._busy = False
        if ending:
            if self._ticking is not None:
                self._ticking.cancel()
            self._loop.call_soon(lambda: self._ended.done() or self._ended.set_result(None))
        elif self._jobs or self._closing:
            self._wake()
        else:
            self._tick_later()
