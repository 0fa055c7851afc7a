"""One thread with a queue: it takes whatever has come as one batch, works on it, and tells the loop.

loop: put(job) -> queue -> gather -> thread: work(batch), tell(call) -> loop: call()
                              |
                          nothing has come for `tick_s`: work([])
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Callable
from typing import Any, Final, Generic, Protocol, TypeVar

import structlog

J = TypeVar("J")
J_contra = TypeVar("J_contra", contravariant=True)

BATCH_MAX: Final = 256

log = structlog.get_logger()


class Worker(Protocol[J_contra]):
    """Does jobs beside the loop, in the order of `put`, and tells in the order of `tell`."""

    @property
    def waiting(self) -> int:
        """Jobs that no batch has taken yet."""
        ...

    def put(self, job: J_contra) -> None:
        """From the loop, or from `work`. Nothing happens after `close`."""

    def tell(self, call: Callable[[], object]) -> None:
        """From `work` or `finish`: `call()` on the loop."""

    async def close(self) -> None:
        """What waits is done, `finish` has run, and everything told has been called when this returns. May be called
        twice."""


class WorkerFactory(Protocol):
    def __call__(
        self,
        name: str,
        work: Callable[[list[J]], None],
        *,
        batch_max: int = BATCH_MAX,
        weigh: Callable[[J], int] | None = None,
        gather_ms: int = 0,
        tick_s: float | None = None,
        finish: Callable[[], None] | None = None,
    ) -> Worker[J]:
        """`work(batch)` is called with what has come, up to `batch_max` in the measure of `weigh` (jobs, by default);
        it must not raise.

        `gather_ms`: a batch follows the one before it that late, unless it is full: the more share a commit, the less
        each costs.
        `tick_s`: after so long without a job `work([])` is called. `finish()` is called in the worker's turn after the
        last batch.
        """
        ...


class _End:
    """The last job."""


class ThreadWorker(Generic[J]):
    """See WorkerFactory. Its thread is a daemon: a process that ends needn't wait for it."""

    def __init__(
        self,
        name: str,
        work: Callable[[list[J]], None],
        *,
        batch_max: int = BATCH_MAX,
        weigh: Callable[[J], int] | None = None,
        gather_ms: int = 0,
        tick_s: float | None = None,
        finish: Callable[[], None] | None = None,
    ) -> None:
        self._name, self._work, self._batch_max, self._weigh = name, work, batch_max, weigh
        self._gather_s, self._tick_s, self._finish = gather_ms / 1000, tick_s, finish
        self._loop = asyncio.get_running_loop()
        self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._closing = False
        self._ended: asyncio.Future[None] = self._loop.create_future()
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def __repr__(self) -> str:
        return f"ThreadWorker({self._name}, waiting={self.waiting})"

    @property
    def waiting(self) -> int:
        return self._queue.qsize()

    def put(self, job: J) -> None:
        self._queue.put(job)

    def tell(self, call: Callable[[], object]) -> None:
        try:
            self._loop.call_soon_threadsafe(call)
        except RuntimeError:
            log.warning("the event loop ended before a worker did; what it has done stays done", worker=self._name)

    async def close(self) -> None:
        if not self._closing:
            self._closing = True
            self._queue.put(_End)
        await asyncio.shield(self._ended)

    # -- on the thread

    def _run(self) -> None:
        last = 0.0
        more = True
        try:
            while more:
                batch, more = self._gather(last)
                last = time.monotonic()
                if batch or (more and self._tick_s is not None):
                    self._work(batch)
        finally:
            if self._finish is not None:
                self._finish()
            self.tell(self._end)

    def _end(self) -> None:
        if not self._ended.done():
            self._ended.set_result(None)

    def _gather(self, last: float) -> tuple[list[J], bool]:
        """What has come, waiting for the first of it; False after the last job."""
        batch: list[J] = []
        weight = 0
        try:
            job = self._queue.get(timeout=self._tick_s)
            early = self._gather_s - (time.monotonic() - last)
            if early > 0 and self._queue.qsize() < self._batch_max and not self._closing:
                time.sleep(early)
            while True:
                if job is _End:
                    return batch, False
                batch.append(job)
                weight += 1 if self._weigh is None else self._weigh(job)
                if weight >= self._batch_max:
                    break
                job = self._queue.get_nowait()
        except queue.Empty:
            pass
        return batch, True
