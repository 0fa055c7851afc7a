"""What a test run with several workers (pytest-xdist) needs: each test its turn, and a summary of them all.

                 a test    waits for the doorway, passes it, and keeps the room shared while it runs
an `alone` test, the same, but stays in the doorway until the room is empty, so nothing runs beside it
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any, Final

import pytest

PLUGIN_NAME: Final = "summary_of_workers"


class Turns:
    """Runs a test that is marked `alone` while no other worker of this run runs one."""

    def __init__(self, run_id: str) -> None:
        self._base = Path(tempfile.gettempdir()) / f"up-streamer-tests-{os.getuid()}-{run_id}"
        self._doorway, self._room = self._open("doorway"), self._open("room")

    def _open(self, name: str) -> IO[bytes]:
        return Path(f"{self._base}.{name}").open("wb")

    @contextlib.contextmanager
    def turn(self, *, alone: bool) -> Iterator[None]:
        """Blocks until the test may run."""
        fcntl.flock(self._doorway, fcntl.LOCK_EX)
        try:
            fcntl.flock(self._room, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        finally:
            fcntl.flock(self._doorway, fcntl.LOCK_UN)
        try:
            yield
        finally:
            fcntl.flock(self._room, fcntl.LOCK_UN)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Any:
        with self.turn(alone=item.get_closest_marker("alone") is not None):
            return (yield)

    def pytest_unconfigure(self) -> None:
        for file in (self._doorway, self._room):
            file.close()
            Path(file.name).unlink(missing_ok=True)  # others that have it open keep theirs


class Summary:
    """How many tests were left to `make test-all`, and how busy the processors were."""

    def __init__(self) -> None:
        self._left: set[str] = set()
        self._before = processor_times()

    def pytest_deselected(self, items: Sequence[pytest.Item]) -> None:
        self._left |= {item.nodeid for item in items if item.get_closest_marker("full") is not None}

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        self._left.update(getattr(node, "workeroutput", {}).get(PLUGIN_NAME, []))

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if hasattr(session.config, "workeroutput"):
            session.config.workeroutput[PLUGIN_NAME] = sorted(self._left)

    @pytest.hookimpl(trylast=True)
    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        loads = [
            (after[0] - before[0]) / max(sum(after) - sum(before), 1)
            for before, after in zip(self._before, processor_times(), strict=False)
        ]
        if loads:
            terminalreporter.line(f"processors busy: {', '.join(f'{load:.0%}' for load in loads)}")
        if self._left:
            terminalreporter.line(f"tests left to `make test-rest`: {len(self._left)} (docs/developing.md)")


def processor_times() -> list[tuple[int, int]]:
    """Busy and idle time of each processor, in ticks. Empty where the system does not say."""
    with contextlib.suppress(OSError):
        fields = [line.split() for line in Path("/proc/stat").read_text().splitlines()]
        times = [list(map(int, each[1:9])) for each in fields if each[0].startswith("cpu") and each[0] != "cpu"]
        return [(sum(each) - each[3] - each[4], each[3] + each[4]) for each in times]  # idle, and waiting for a disk
    return []
