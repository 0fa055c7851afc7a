"""Zenoh to MQTT with a slow processor: the streamer gets a share of one core, its publisher is not limited.

Measures what the streamer receives, what it sends, and what it reads back from its disk because it received more than
it sent (/proc/PID/io rchar: bytes read from files, with or without disk access).
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from campaigns.bench.costs.common import Figures, Setting
from campaigns.bench.lanes import Leg, lane
from campaigns.bench.measure import calibrate
from campaigns.bench.processes import Child

SHARE: Final = 0.5  # of one core
PERIOD_S: Final = 0.02
SHORT_S: Final = 6.0
MIB: Final = 1 << 20


@contextmanager
def slowed(child: Child, share: float = SHARE) -> Iterator[None]:
    """Keeps `child` on one core, and stops it for the rest of each PERIOD_S. It needs no further rights."""
    cores = os.sched_getaffinity(child.pid)
    for task in os.listdir(f"/proc/{child.pid}/task"):
        os.sched_setaffinity(int(task), {max(cores)})
    done = threading.Event()

    def pulse() -> None:
        while not done.is_set():
            child.signal(signal.SIGSTOP)
            done.wait(PERIOD_S * (1 - share))
            child.signal(signal.SIGCONT)
            done.wait(PERIOD_S * share)

    thread = threading.Thread(target=pulse, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        child.signal(signal.SIGCONT)


def measure(setting: Setting) -> Figures:
    with lane("streamer", Leg("zenoh", "mqtt"), setting.directory) as streamer, slowed(streamer.process):
        messages = calibrate(streamer, setting.seconds_or(SHORT_S))
        read = streamer.process.io_bytes("rchar")
        result = streamer.run(messages)
        read = streamer.process.io_bytes("rchar") - read
    figures = {
        "taken_per_s": round(messages / result["publish_s"]),
        "sent_per_s": round(result["per_s"]),
        "read_back_mib": round(read / MIB, 1),
        "messages": messages,
    }
    setting.say(", ".join(f"{key} {value:,}" for key, value in figures.items()))
    return figures
