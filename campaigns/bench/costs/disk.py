"""Bytes that a streamer writes to disk for each message, at rates at which commits are small.

/proc/PID/io write_bytes of the streamer while 10, 100 and 1,000 messages/s pass. Each rate has its own streamer; all
run at once. A short run may end before the log's first checkpoint: `most` adds the bytes of the write-ahead log that
are not copied yet, each of which is written at most once more. With --seconds 600 these no longer matter.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

from campaigns.bench.costs.common import Figures, Setting, points
from campaigns.bench.lanes import Lane, Leg, lane

RATES: Final = (10, 100, 1_000)
SHORT_S: Final = 15.0
WARM_UP_S: Final = 1.0  # time to create the file and write the first cursor
KB: Final = 1_000


def measure(setting: Setting) -> Figures:
    """Returns by rate: KB written per message, so far and at most, and the CPU time."""
    seconds = setting.seconds_or(SHORT_S)
    with _streamers(setting) as streamers:
        for rate, one in streamers.items():
            one.run(max(1, int(rate * WARM_UP_S)), rate)
        before = {rate: (one.process.io_bytes("write_bytes"), one.cpu_s()) for rate, one in streamers.items()}
        for rate, one in streamers.items():
            one.begin(int(rate * seconds), rate)

        def at(rate: int, directory: Path) -> Figures:
            one, messages, (written, cpu_s) = streamers[rate], int(rate * seconds), before[rate]
            result = one.finish()
            written = one.process.io_bytes("write_bytes") - written
            waiting = sum(file.stat().st_size for file in (directory / "data").glob("*-wal"))
            return {
                "kb_per_message": round(written / messages / KB, 1),
                "kb_per_message_most": round((written + waiting) / messages / KB, 1),
                "us_per_message": round((one.cpu_s() - cpu_s) / messages * 1e6),
                "p50_ms": round(result["p50_ms"], 2),
                "p99_ms": round(result["p99_ms"], 2),
                "seconds": seconds,
            }

        return points(RATES, setting, at)


@contextmanager
def _streamers(setting: Setting) -> Iterator[dict[int, Lane]]:
    with ExitStack() as stack:
        yield {
            rate: stack.enter_context(lane("streamer", Leg("zenoh", "zenoh"), setting.directory / str(rate)))
            for rate in RATES
        }
