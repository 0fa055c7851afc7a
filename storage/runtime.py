"""Disk, threads, clocks and random numbers of the core. A simulation passes its own, and so repeats any run from its
seed.

Streamer.create(config, runtime) -> logs, uSubscription, dead letters, interest, back-offs

The event loop provides timers. Times in messages and their ids come from uprotocol.uuid, which a simulation replaces
separately.
"""

from __future__ import annotations

import contextlib
import os
import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NamedTuple

from storage.disk import REAL_DISK, Disk
from storage.worker import ThreadWorker, WorkerFactory
from uprotocol import uuid as uuids


class Used(NamedTuple):
    """Processor time used so far, in seconds."""

    process_s: float  # the sum over all threads of this process
    thread_s: float  # of this thread
    waited_s: float  # this thread was ready to run, and no processor was free


def used() -> Used:
    try:
        waited = int(Path("/proc/thread-self/schedstat").read_text(encoding="ascii").split()[1]) / 1e9
    except (OSError, ValueError, IndexError):  # not every kernel reports it
        waited = 0.0
    return Used(time.process_time(), time.thread_time(), waited)


def thread_busy_s() -> float:
    """Returns the seconds in which this thread ran, or was ready to run and no processor was free."""
    _, ran, waited = used()
    return ran + waited


@dataclass(frozen=True, slots=True)
class Runtime:
    disk: Disk = REAL_DISK
    worker: WorkerFactory = ThreadWorker
    now_ms: Callable[[], int] = uuids.now_ms  # Unix milliseconds
    monotonic: Callable[[], float] = time.monotonic  # seconds; for threads without a loop
    random_bytes: Callable[[int], bytes] = os.urandom  # for ids, which must be unique
    rng: random.Random = field(default_factory=random.Random)  # for pauses
    busy_s: Callable[[], float] = thread_busy_s  # of the calling thread
    used: Callable[[], Used] = used  # the same


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
