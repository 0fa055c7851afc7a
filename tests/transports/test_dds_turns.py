"""Turns of the threads of the DDS transport."""

from __future__ import annotations

import queue
import threading
import time
import uuid
from collections.abc import Callable

import pytest

from transports.dds import writers as writers_module
from transports.dds.config import DdsConfig
from transports.dds.link import FairLock, Participant
from transports.dds.writers import WRITERS_AT_ONCE, Batch, Outgoing, WriterRoute, Writers
from uprotocol.status import OK
from uprotocol.v1.ustatus_pb2 import UStatus

NEW = 40


def test_a_lock_goes_to_who_has_waited_longest_and_not_to_who_gave_it_back() -> None:
    lock, order = FairLock(), list[str]()

    def take(name: str) -> None:
        with lock:
            order.append(name)

    threads = [threading.Thread(target=take, args=(name,)) for name in "abc"]
    with lock:
        for waiting, thread in enumerate(threads, 1):
            thread.start()
            while len(lock._waiting) < waiting:
                time.sleep(0)
    take("again")
    for thread in threads:
        thread.join()
    assert order == ["a", "b", "c", "again"]
    take("free")
    assert order[-1] == "free"


def test_what_has_a_writer_goes_before_the_next_ones_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writers_module, "TURN_S_MAX", 60.0)  # as on an idle computer
    participant = Participant(DdsConfig(multicast=False, peers=("127.0.0.1",), tag=uuid.uuid4().hex))
    writers = Writers(participant, writers_max=1_000, timeout_s=1.0)
    done: queue.SimpleQueue[tuple[int, str]] = queue.SimpleQueue()

    def put(name: str) -> Callable[[], None]:
        def settled(statuses: list[UStatus]) -> None:
            assert statuses == [OK]
            done.put((len(writers), name))

        return lambda: writers.put(Outgoing(Batch(1, settled), 0, WriterRoute(name, 0, None), b"\0" * 64))

    try:
        writers.submit(put("known"))
        assert done.get() == (1, "known")
        held = threading.Event()
        writers.submit(held.wait)  # type: ignore[arg-type]
        for number in range(NEW):
            writers.submit(put(f"new{number}"))
            writers.submit(put(f"new{number}"))
        writers.submit(put("known"))
        held.set()
        made_by_then, name = done.get()
        assert name == "known"
        assert made_by_then <= 1 + WRITERS_AT_ONCE  # acknowledged at the end of the turn
        made = [done.get() for _ in range(2 * NEW)]
        assert [name for _, name in made] == [f"new{number // 2}" for number in range(2 * NEW)]
        assert len(writers) == 1 + NEW > WRITERS_AT_ONCE
    finally:
        writers.close()
        participant.close()
