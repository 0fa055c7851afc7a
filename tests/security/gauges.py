"""Gauges of a gateway under attack, read from outside: memory, disk, log lines.

Gauges.begin -> idle_mib ... rss, peak (by the kernel), disk, log lines, its own metrics
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
RESET_PEAK: Final = "5"  # the value of clear_refs that resets the peak, see proc(5)


def memory_mib(pid: int, what: str = "VmRSS") -> float:
    """Returns a value of /proc/PID/status; 0 if the process has ended."""
    try:
        found = re.search(rf"^{what}:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    except OSError:
        return 0.0
    return int(found[1]) / 1024 if found else 0.0


def folder_mib(folder: Path) -> float:
    """Returns the size of its files on disk, which may appear and vanish meanwhile."""
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_blocks * 512
        except OSError:
            continue
    return total / (1 << 20)


class Gauges:
    """Samples a gateway on its own thread from `begin` to `end`."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._ended = threading.Event()
        self._samples: list[float] = []
        self._thread = threading.Thread(target=self._work, daemon=True)
        self.disk_mib = 0.0  # the maximum
        self._lines_at = 0
        self._peak, self._of_kernel = 0.0, False

    def begin(self) -> None:
        self._lines_at = self._lines()
        with contextlib.suppress(OSError):  # without the right to reset it, the samples are used
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
        """Returns the number of lines since `begin`."""
        return self._lines() - self._lines_at

    def median_mib(self) -> float:
        """Returns the median of the samples so far."""
        return statistics.median(self._samples) if self._samples else memory_mib(self._gateway.pid)

    def peak_mib(self) -> float:
        """Returns the kernel's peak if it can be reset, else that of the samples."""
        return self._peak

    def end(self) -> None:
        self._ended.set()
        self._thread.join()
