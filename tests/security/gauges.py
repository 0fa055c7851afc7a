"""What the gateway takes: memory, disk, log lines. Read from outside, while it is attacked.

Gauges.begin -> idle_mib ... rss, peak (of the kernel), disk, log lines, what it says of itself
"""

from __future__ import annotations

import contextlib
import re
import statistics
import threading
from pathlib import Path
from typing import Final

from campaigns.chaos.processes import Gateway

SAMPLE_S: Final = 0.1
RESET_PEAK: Final = "5"  # what clear_refs takes for "forget the peak", see proc(5)


def memory_mib(pid: int, what: str = "VmRSS") -> float:
    """A line of /proc/PID/status; 0 for a process that is gone."""
    try:
        found = re.search(rf"^{what}:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    except OSError:
        return 0.0
    return int(found[1]) / 1024 if found else 0.0


def folder_mib(folder: Path) -> float:
    """Bytes that its files take on disk; files come and go meanwhile."""
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_blocks * 512
        except OSError:
            continue
    return total / (1 << 20)


class Gauges:
    """Samples a gateway on a thread of its own, from `begin` to `end`."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._ended = threading.Event()
        self._samples: list[float] = []
        self._thread = threading.Thread(target=self._work, daemon=True)
        self.disk_mib = 0.0  # the most that was seen
        self._lines_at = 0
        self._peak, self._of_kernel = 0.0, False

    def begin(self) -> None:
        self._lines_at = self._lines()
        with contextlib.suppress(OSError):  # not ours to reset, perhaps: the samples will have to do
            Path(f"/proc/{self._gateway.pid}/clear_refs").write_text(RESET_PEAK)
            self._of_kernel = True
        self._thread.start()

    def _work(self) -> None:
        while not self._ended.wait(SAMPLE_S):
            if self._gateway.running:
                self._samples.append(memory_mib(self._gateway.pid))
                self._peak = max(
                    self._peak, memory_mib(self._gateway.pid, "VmHWM") if self._of_kernel else self._samples[-1]
                )
            if len(self._samples) % 10 == 1:
                self.disk_mib = max(self.disk_mib, folder_mib(self._gateway.data_dir))

    def _lines(self) -> int:
        return self._gateway.said().count("\n")

    @property
    def log_lines(self) -> int:
        """Since `begin`."""
        return self._lines() - self._lines_at

    def median_mib(self) -> float:
        """Of the samples so far."""
        return statistics.median(self._samples) if self._samples else memory_mib(self._gateway.pid)

    def peak_mib(self) -> float:
        """The kernel's own mark, where it can be reset; else of the samples."""
        return self._peak

    def end(self) -> None:
        self._ended.set()
        self._thread.join()
