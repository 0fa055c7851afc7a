"""What the core gets from outside: disk, threads, clocks and chance. A simulation hands in its own, and so replays any
run from its seed.

Streamer.create(config, runtime) -> logs, uSubscription, dead letters, interest, back-offs

Timers and sleeping are the event loop's. The time in messages and their ids come from uprotocol.uuid, which has a seam
of its own.
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
    """Seconds of processors, so far."""

    process_s: float  # in which a thread of this process ran; the more of them run at once, the more
    thread_s: float  # in which this thread ran
    waited_s: float  # in which it would have run if a processor had been free


def used() -> Used:
    try:
        waited = int(Path("/proc/thread-self/schedstat").read_text(encoding="ascii").split()[1]) / 1e9
    except (OSError, ValueError, IndexError):  # not every kernel tells
        waited = 0.0
    return Used(time.process_time(), time.thread_time(), waited)


def thread_busy_s() -> float:
    """Seconds in which this thread ran, or would have if a processor had been free."""
    _, ran, waited = used()
    return ran + waited


@dataclass(frozen=True, slots=True)
class Runtime:
    disk: Disk = REAL_DISK
    worker: WorkerFactory = ThreadWorker
    now_ms: Callable[[], int] = uuids.now_ms  # Unix milliseconds
    monotonic: Callable[[], float] = time.monotonic  # seconds; for workers, which have no loop
    random_bytes: Callable[[int], bytes] = os.urandom  # for what must never be the same twice
    rng: random.Random = field(default_factory=random.Random)  # for pauses
    busy_s: Callable[[], float] = thread_busy_s  # of the calling thread, which is the loop's
    used: Callable[[], Used] = used  # the same


REAL: Final = Runtime()


def leave(code: int) -> None:
    """End the process with `code`, as its last deed.

    With Zenoh in it the interpreter's own end is left out: a thread of Zenoh's that comes back into Python meanwhile
    aborts the process, and its exit code is lost.
    """
    if "zenoh" in sys.modules:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):  # nobody reads it any more
                stream.flush()
        os._exit(code)
    sys.exit(code)
