"""Disk, threads, clocks and random numbers of the core. A simulation passes its own, and so repeats any run from its
seed.

Streamer.create(config, runtime) -> logs, uSubscription, dead letters, interest, back-offs

The event loop provides timers. Times in messages and their ids come from uprotocol.uuid, which a simulation replaces
separately.

Worker: one thread with a queue. It takes everything that has come as one batch, works on it, and calls back on the loop
loop: put(job) -> queue -> gather -> thread: work(batch), tell(call) -> loop: call()
                              |
                          nothing has come for `tick_s`: work([])
Answerer: a worker whose jobs are questions; the answers of a batch come to the loop together.

Gathering: one commit for five messages costs the disk little more than one for a single message. But a wait that brings
nothing is lost time, above all for a sender that waits for each answer before it sends on, or may have only so many
messages in flight: everything it can send is there at once. So a wait ends as soon as there is as much as the last
probe has brought. Only now and then a probe waits to the end of the window, to find out whether more would come.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import queue
import random
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Generic, NamedTuple, TypeVar

import structlog

from storage.disk import REAL_DISK, Disk
from uprotocol import uuid as uuids
from uprotocol.status import UStatusError
from uprotocol.v1.ucode_pb2 import UCode

J = TypeVar("J")
Q = TypeVar("Q")
A = TypeVar("A")

WORK_BATCH_MAX: Final = 256
WAITING_MAX = 20_000  # questions before a worker: some seconds of work; more are refused

LOOK_MIN: Final = 8  # turns between two probes if probes bring jobs ...
LOOK_MAX: Final = 1_024  # ... and if they don't: one lost window in so many turns does not matter
WHATEVER_COMES: Final = 1 << 30
_END: Final = object()  # the last job

log = structlog.get_logger()


class Gathering:
    """Decides how many jobs a worker waits for. Used by one worker."""

    def __init__(self, window_ms: float, enough: int) -> None:
        """No job waits longer than `window_ms` (0: none waits), and no wait begins if there is `enough`, as measured by
        the worker."""
        self.window_s, self.enough = window_ms / 1_000, enough
        self._expected = 1  # jobs after a wait, including those that were there before; 1: do not wait
        self._every = self._left = LOOK_MIN  # turns: between two probes, and until the next one
        self._is_look = False

    def wanted(self, *, is_first: bool) -> int:
        """Returns the number of jobs to wait for. `is_first`: the worker was idle when the first of them came. A probe
        begins there if possible, so that it sees a burst from its beginning."""
        self._is_look = self._left <= 0 and (is_first or self._left <= -LOOK_MIN)
        return WHATEVER_COMES if self._is_look else self._expected

    def took(self, jobs: int, *, waited: bool, in_vain: bool) -> None:
        """A turn begins with this many jobs. `waited`: for more than there were. `in_vain`: the window ended before
        there were as many as wanted, or enough."""
        self._left -= 1
        if self._is_look and waited:
            self._every = LOOK_MIN if jobs > self._expected else min(2 * self._every, LOOK_MAX)
            self._left = self._every
            self._expected = jobs if jobs > self._expected else self._less(jobs)
        elif in_vain:
            self._expected = self._less(jobs)

    def _less(self, jobs: int) -> int:
        return max(1, (self._expected + jobs) // 2)


class Worker(Generic[J]):
    """Does jobs beside the loop, in the order of `put`, and calls back in the order of `tell`.

    Its thread is a daemon: a process that ends does not wait for it. While it sleeps, it is woken when there is as much
    as it waits for, and not by each job: each waking costs more than a job's share of the work.
    """

    def __init__(
        self,
        name: str,
        work: Callable[[list[J]], None],
        *,
        batch_max: int = WORK_BATCH_MAX,
        weigh: Callable[[J], int] | None = None,
        gathering: Gathering | None = None,
        tick_s: float | None = None,
        finish: Callable[[], None] | None = None,
    ) -> None:
        """`work(batch)` is called with the jobs that have come, up to `batch_max` as measured by `weigh` (by default
        the number of jobs); it must not raise.

        `gathering`: says for how many more a batch waits, and for how long.
        `tick_s`: after so long without a job `work([])` is called. `finish()` is called in the worker's turn after the
        last batch.
        """
        self._name, self._work, self._batch_max, self._weigh = name, work, batch_max, weigh
        self._gathering, self._tick_s, self._finish = gathering, tick_s, finish
        self._loop = asyncio.get_running_loop()
        self._closing = False
        self._ended: asyncio.Future[None] = self._loop.create_future()
        self._jobs: deque[Any] = deque()
        self._since = 0.0  # when the first of them came
        self._weight_put = self._weight_taken = 0  # so far; the first is changed by `put`, the other on the thread
        # the thread sleeps until so many jobs, or such a weight, have come; 0 jobs: it is awake, or was woken
        self._goal_jobs = self._goal_weight = 0
        self._bell: queue.SimpleQueue[None] = queue.SimpleQueue()
        threading.Thread(target=self._run, name=name, daemon=True).start()

    @property
    def waiting(self) -> int:
        """Returns how many jobs no batch has taken yet."""
        return len(self._jobs)

    def put(self, job: J) -> None:
        """Add a job, from the loop or from `work`. Has no effect after `close`."""
        if not self._jobs:
            self._since = time.monotonic()
        if self._weigh is not None and (weight := self._weigh(job)):  # jobs of weight 0 may be put from the thread
            self._weight_put += weight
        self._jobs.append(job)
        if self._goal_jobs and self._is_enough(self._goal_jobs, self._goal_weight):
            self._goal_jobs = 0
            self._bell.put(None)

    def tell(self, call: Callable[[], object]) -> None:
        """Run `call()` on the loop. Called by `work` or `finish`."""
        try:
            self._loop.call_soon_threadsafe(call)
        except RuntimeError:
            log.warning("the event loop ended before a worker did; what it has done stays done", worker=self._name)

    async def close(self) -> None:
        """Wait until all jobs are done, `finish` has run, and all callbacks have run. May be called twice."""
        if not self._closing:
            self._closing = True
            self._jobs.append(_END)
            self._goal_jobs = 0
            self._bell.put(None)
        await asyncio.shield(self._ended)

    def _is_enough(self, jobs: int, weight: int) -> bool:
        waiting = len(self._jobs)
        return waiting >= jobs or weight <= (waiting if self._weigh is None else self._weight_put - self._weight_taken)

    # -- on the thread

    def _run(self) -> None:
        more = True
        gathering = self._gathering
        try:
            while more:
                is_first = not self._jobs
                has_jobs = self._sleep(1, 1 << 62, None if self._tick_s is None else time.monotonic() + self._tick_s)
                if has_jobs and gathering is not None and gathering.window_s and not self._closing:
                    goal = gathering.wanted(is_first=is_first), gathering.enough
                    is_enough = self._is_enough(*goal)
                    in_vain = not is_enough and not self._sleep(*goal, self._since + gathering.window_s)
                    gathering.took(len(self._jobs), waited=not is_enough, in_vain=in_vain)
                batch: list[J] = []
                weight = 0
                while self._jobs and weight < self._batch_max:
                    job = self._jobs.popleft()
                    if job is _END:
                        more = False
                        break
                    batch.append(job)
                    one = 1 if self._weigh is None else self._weigh(job)
                    weight += one
                    self._weight_taken += one
                if batch or (more and self._tick_s is not None):
                    self._work(batch)
        finally:
            if self._finish is not None:
                self._finish()
            self.tell(self._end)

    def _end(self) -> None:
        if not self._ended.done():
            self._ended.set_result(None)

    def _sleep(self, jobs: int, weight: int, until: float | None) -> bool:
        """Sleep until there are that many jobs, or that much weight, or the worker closes. Returns False at `until`."""
        while not self._closing:
            self._goal_weight, self._goal_jobs = weight, jobs
            if self._is_enough(jobs, weight):  # the last of them came before `put` could see the goal
                break
            try:
                self._bell.get(timeout=None if until is None else max(0.0, until - time.monotonic()))
            except queue.Empty:
                self._goal_jobs = 0
                return False
        self._goal_jobs = 0
        return True


WorkerFactory = type[Worker[Any]]


Receive = Callable[[A | BaseException], object]
"""Receives one answer, on the loop, in the order of the questions."""


class Answerer(Generic[Q, A]):
    """A worker that answers. `work(questions)` runs beside the loop and returns an answer or an exception for each."""

    def __init__(
        self,
        name: str,
        work: Callable[[list[Q]], Sequence[A | BaseException]],
        answered: Callable[[list[tuple[Q, Receive[A]]], Sequence[A | BaseException]], None] | None = None,
        *,
        worker: WorkerFactory = Worker,
        **options: Any,
    ) -> None:
        """`answered(batch, answers)` is called on the loop, and delivers them (by default `give`). `options`: of the
        worker."""
        self._loop = asyncio.get_running_loop()
        self._name, self._work, self._answered = name, work, answered or give
        self._closing = False
        self._worker: Worker[tuple[Q, Receive[A]]] = worker(name, self._turn, **options)

    def ask(self, question: Q) -> asyncio.Future[A]:
        """Same as `put`; returns a future for the answer."""
        future: asyncio.Future[A] = self._loop.create_future()
        self.put(question, functools.partial(settle, future))
        return future

    def put(self, question: Q, receive: Receive[A]) -> None:
        """Raises RESOURCE_EXHAUSTED at the limit, UNAVAILABLE once it is closed."""
        if self._closing:
            raise UStatusError(UCode.UNAVAILABLE, "the service is stopping: try again later")
        if self._worker.waiting >= WAITING_MAX:
            why = f"{WAITING_MAX} requests wait for the store, which is the limit: try later"
            raise UStatusError(UCode.RESOURCE_EXHAUSTED, why)
        self._worker.put((question, receive))

    def _turn(self, batch: list[tuple[Q, Receive[A]]]) -> None:
        """Beside the loop."""
        try:
            answers: Sequence[A | BaseException] = self._work([question for question, _ in batch])
        except BaseException as error:
            if not isinstance(error, UStatusError):
                log.exception("a batch failed", worker=self._name, questions=len(batch))
            answers = [error] * len(batch)
        self._worker.tell(functools.partial(self._answered, batch, answers))

    async def close(self) -> None:
        """Answer all questions, then end."""
        self._closing = True
        await self._worker.close()


def give(batch: Sequence[tuple[Any, Receive[A]]], answers: Sequence[A | BaseException]) -> None:
    """Deliver the answers of a batch."""
    for (_, receive), answer in zip(batch, answers, strict=True):
        receive(answer)


def settle(future: asyncio.Future[A], answer: A | BaseException) -> None:
    """Give a future its result, or its error; nothing happens if nobody waits any more."""
    if future.done():
        return
    if isinstance(answer, BaseException):
        future.set_exception(answer)
        future.exception()  # marks it as retrieved, even if nobody waits
    else:
        future.set_result(answer)


# -- all of them


class Used(NamedTuple):
    """Processor time used so far, in seconds."""

    process_s: float  # the sum over all threads of this process
    thread_s: float  # of this thread
    waited_s: float  # this thread was ready to run, and no processor was free

    @property
    def busy_s(self) -> float:
        """Seconds in which this thread ran, or was ready to run."""
        return self.thread_s + self.waited_s


def used() -> Used:
    try:
        waited = int(Path("/proc/thread-self/schedstat").read_text(encoding="ascii").split()[1]) / 1e9
    except (OSError, ValueError, IndexError):  # not every kernel reports it
        waited = 0.0
    return Used(time.process_time(), time.thread_time(), waited)


@dataclass(frozen=True, slots=True)
class Runtime:
    disk: Disk = REAL_DISK
    worker: WorkerFactory = Worker
    now_ms: Callable[[], int] = uuids.now_ms  # Unix milliseconds
    monotonic: Callable[[], float] = time.monotonic  # seconds; for threads without a loop
    random_bytes: Callable[[int], bytes] = os.urandom  # for ids, which must be unique
    rng: random.Random = field(default_factory=random.Random)  # for pauses
    used: Callable[[], Used] = used  # of the calling thread


REAL: Final = Runtime()


def leave(code: int) -> None:
    """End the process with `code`.

    If Zenoh is loaded, the interpreter is not shut down: a thread of Zenoh that calls Python meanwhile would abort the
    process, and its exit code would be lost.
    """
    if "zenoh" in sys.modules:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):  # its reader has ended
                stream.flush()
        os._exit(code)
    sys.exit(code)
