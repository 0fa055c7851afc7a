"""Processes that a benchmark starts, asks, measures, and always ends.

Child(argv) -> ready line -> ask(command) -> answer ... close(): end of stdin, then SIGTERM, then SIGKILL
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path
from typing import IO, Any, Final, Self

from streamer.commands.demo.processes import die_with_parent

READY_TIMEOUT_S: Final = 60.0  # a cold start of Python, Zenoh and the streamer on a busy machine
CLOSE_TIMEOUT_S: Final = 10.0
_TICKS_PER_S: Final = os.sysconf("SC_CLK_TCK")
_LOG_TAIL_BYTES: Final = 1_000  # the last lines name the reason


class BenchError(Exception):
    """The benchmark can't continue, or its figures would be invalid."""


class Child:
    """A process in its own session, so that Ctrl-C reaches only the bench, which then ends its children in order."""

    def __init__(self, name: str, argv: list[str], log: Path) -> None:
        self.name, self._log = name, log
        with log.open("wb") as stderr:
            self._process = subprocess.Popen(
                argv,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                start_new_session=True,
                preexec_fn=partial(die_with_parent, signal.SIGKILL),
            )
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        assert self._process.stdout is not None
        self._reader = threading.Thread(target=self._read, args=(self._process.stdout,), daemon=True)
        self._reader.start()

    @classmethod
    def module(cls, name: str, module: str, *arguments: object, log_dir: Path) -> Self:
        """Runs `python -m module arguments`."""
        return cls(name, [sys.executable, "-m", module, *map(str, arguments)], log_dir / f"{name}.log")

    @property
    def pid(self) -> int:
        return self._process.pid

    def _read(self, stdout: IO[bytes]) -> None:
        with stdout:
            for line in stdout:
                self._lines.put(line.decode(errors="replace"))
        self._lines.put(None)

    def line(self, timeout_s: float) -> str:
        """Returns the next line of stdout. Raises BenchError with the end of the log on an end or a timeout."""
        try:
            line = self._lines.get(timeout=timeout_s)
        except queue.Empty:
            raise BenchError(f"{self.name} said nothing for {timeout_s:.0f} s{self.log_tail()}") from None
        if line is None:
            raise BenchError(f"{self.name} ended with code {self._process.wait(CLOSE_TIMEOUT_S)}{self.log_tail()}")
        return line

    def wait_for(self, word: str, timeout_s: float = READY_TIMEOUT_S) -> Self:
        """Waits until a line of stdout contains `word`."""
        deadline = time.monotonic() + timeout_s
        while word not in self.line(max(deadline - time.monotonic(), 0.01)):
            pass
        return self

    def tell(self, **command: Any) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(command).encode() + b"\n")
            self._process.stdin.flush()
        except OSError:
            raise BenchError(f"{self.name} ended{self.log_tail()}") from None

    def answer(self, timeout_s: float) -> dict[str, Any]:
        made: dict[str, Any] = json.loads(self.line(timeout_s))
        return made

    def log_tail(self) -> str:
        """Returns the end of stderr, for an error text."""
        with contextlib.suppress(OSError):
            text = self._log.read_bytes()[-_LOG_TAIL_BYTES:].decode(errors="replace").strip()
            if text:
                return f"; its log ends with:\n{text}"
        return ""

    # costs, from /proc (Linux)

    def cpu_s(self) -> float:
        """Returns user and system seconds of all threads so far."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S

    def memory_mib(self, field: str) -> float:
        """Returns `VmRSS` (now) or `VmHWM` (peak)."""
        for line in Path(f"/proc/{self.pid}/status").read_text().splitlines():
            if line.startswith(field + ":"):
                return int(line.split()[1]) / 1024
        raise BenchError(f"{self.name} has no {field}: it has ended{self.log_tail()}")

    def io_bytes(self, field: str) -> int:
        """Returns `write_bytes` (caused to be written to a disk) or `rchar` (read from files) so far."""
        for line in Path(f"/proc/{self.pid}/io").read_text().splitlines():
            name, _, value = line.partition(": ")
            if name == field:
                return int(value)
        raise BenchError(f"{self.name} has no {field}: it has ended{self.log_tail()}")

    def written_mib(self) -> float:
        return self.io_bytes("write_bytes") / (1 << 20)

    def threads(self) -> int:
        return len(list(Path(f"/proc/{self.pid}/task").iterdir()))

    def signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(number)

    def close(self) -> None:
        """Ends the process. A second call does nothing."""
        self.signal(signal.SIGCONT)  # a stopped process would not handle the signals
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.terminate()
        try:
            self._process.wait(CLOSE_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader.join(CLOSE_TIMEOUT_S)  # the reader lives on if a child of the process does

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def free_domain() -> int:
    """Returns a DDS domain with free first ports (RTPS 9.6.1.1: 7400 + 250 per domain, then 10 + 2 per participant)."""
    domains = list(range(1, 200))
    random.shuffle(domains)
    for domain in domains:
        with contextlib.suppress(OSError), contextlib.ExitStack() as probes:
            for offset in range(10, 18):
                probes.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM)).bind(
                    ("127.0.0.1", 7400 + 250 * domain + offset)
                )
            return domain
    raise BenchError("no DDS domain has its ports free")
