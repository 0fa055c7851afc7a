"""A worker: jobs in order, batches, ticks, and an end that loses nothing."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

from storage.runtime import Gathering, Worker

WAIT_S = 20


class Recorder:
    """Keeps the batches of a worker, holds it up while asked to, and is reported on the loop."""

    def __init__(self, **options: Any) -> None:
        self.batches: list[list[int]] = []
        self.reported: list[int] = []
        self.finished = False
        self.go, self.busy = threading.Event(), threading.Event()
        self.ticked = asyncio.Event()
        self.worker: Worker[int] = Worker("test", self._work, finish=self._finish, **options)
        self.go.set()  # not before: it may tick at once

    def _work(self, batch: list[int]) -> None:
        self.busy.set()
        self.go.wait(WAIT_S)
        self.batches.append(batch)
        for job in batch:
            self.worker.tell(lambda job=job: self.reported.append(job))
        if not batch:
            self.worker.tell(self.ticked.set)

    def _finish(self) -> None:
        assert threading.current_thread() is not threading.main_thread()
        self.finished = True


async def test_jobs_are_done_and_reported_in_order_and_the_end_waits_for_all() -> None:
    recorder = Recorder(batch_max=4)
    for job in range(10):
        recorder.worker.put(job)
    await recorder.worker.close()
    await recorder.worker.close()
    assert [job for batch in recorder.batches for job in batch] == recorder.reported == list(range(10))
    assert max(map(len, recorder.batches)) <= 4
    assert recorder.finished


async def test_what_has_come_meanwhile_is_one_batch_of_bounded_weight() -> None:
    recorder = Recorder(batch_max=6, weigh=lambda job: job)
    recorder.go.clear()
    recorder.worker.put(1)
    await asyncio.to_thread(recorder.busy.wait, WAIT_S)
    for job in (5, 1, 2, 2, 2, 9):
        recorder.worker.put(job)
    assert recorder.worker.waiting == 6
    recorder.go.set()
    await recorder.worker.close()
    assert recorder.batches == [[1], [5, 1], [2, 2, 2], [9]]


async def test_an_idle_worker_ticks() -> None:
    recorder = Recorder(tick_s=0.001)
    await asyncio.wait_for(recorder.ticked.wait(), WAIT_S)
    await recorder.worker.close()
    assert [] in recorder.batches


def test_a_loop_that_has_ended_does_no_harm() -> None:
    async def start() -> Recorder:
        recorder = Recorder()
        recorder.go.clear()
        recorder.worker.put(1)
        await asyncio.to_thread(recorder.busy.wait, WAIT_S)
        return recorder

    recorder = asyncio.run(start())
    recorder.worker.put(2)
    recorder.go.set()
    while len(recorder.batches) < 2:
        recorder.go.wait(0.001)
    assert recorder.reported == []


class Gather(Gathering):
    """Wants three, and keeps what came of it."""

    def __init__(self, window_ms: float, enough: int) -> None:
        super().__init__(window_ms, enough)
        self.turns: list[tuple[int, bool, bool]] = []

    def wanted(self, *, is_first: bool) -> int:
        return 3

    def took(self, jobs: int, *, waited: bool, in_vain: bool) -> None:
        self.turns.append((jobs, waited, in_vain))


FOR_EVER_MS = 1e9


async def test_a_batch_waits_for_as_many_as_are_wanted() -> None:
    gather = Gather(FOR_EVER_MS, 100)
    recorder = Recorder(gathering=gather)
    for job in range(6):
        recorder.worker.put(job)
        if job % 3 == 2:
            await asyncio.to_thread(recorder.busy.wait, WAIT_S)
            recorder.busy.clear()
    await recorder.worker.close()
    assert recorder.batches == [[0, 1, 2], [3, 4, 5]]
    assert [(jobs, in_vain) for jobs, _, in_vain in gather.turns] == [(3, False), (3, False)]


async def test_a_batch_waits_no_longer_than_the_window_or_until_there_is_enough() -> None:
    gather = Gather(1, 100)
    recorder = Recorder(gathering=gather)
    recorder.worker.put(1)
    await asyncio.to_thread(recorder.busy.wait, WAIT_S)
    await recorder.worker.close()
    assert (recorder.batches, gather.turns) == ([[1]], [(1, True, True)])
    gather = Gather(FOR_EVER_MS, 100)
    recorder = Recorder(gathering=gather, batch_max=1_000, weigh=lambda job: job)
    recorder.worker.put(40)
    recorder.worker.put(60)
    await asyncio.to_thread(recorder.busy.wait, WAIT_S)
    await recorder.worker.close()
    assert [sum(batch) for batch in recorder.batches] == [100]


async def test_the_end_waits_for_nobody() -> None:
    recorder = Recorder(gathering=Gather(FOR_EVER_MS, 100))
    recorder.worker.put(1)
    recorder.worker.put(2)
    await asyncio.wait_for(recorder.worker.close(), WAIT_S)
    assert [job for batch in recorder.batches for job in batch] == recorder.reported == [1, 2]
