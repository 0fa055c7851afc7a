"""Processes that print their state as JSON lines, and that end with ours.

Child.start(name, "streamer.commands.cli", "run", ...) -> say("ready"): the next line with that key
                                                       -> stop(), or kill() as in a power cut
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import os
import signal
import sys
from collections import deque
from typing import Any, Final

from uprotocol.status import UStatusError
from uprotocol.v1.ucode_pb2 import UCode

START_TIMEOUT_S: Final = 60.0  # until a process is ready, on a busy machine
STOP_TIMEOUT_S: Final = 20.0  # after SIGTERM, before SIGKILL
LINES_KEPT: Final = 50  # of a process's output, to show when it fails
_PR_SET_PDEATHSIG: Final = 1
_LIBC: Final = ctypes.CDLL(None) if sys.platform == "linux" else None  # before any fork: a child must not load anything


class Child:
    """A process that prints its state as JSON lines, and ends with ours."""

    def __init__(self, name: str, process: asyncio.subprocess.Process) -> None:
        self.name, self.process = name, process
        self._lines: deque[str] = deque(maxlen=LINES_KEPT)
        self._said: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()  # None: it says nothing more
        self._reading = asyncio.create_task(self._read_all())

    @classmethod
    async def start(cls, name: str, *command: str) -> Child:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            preexec_fn=die_with_parent,
            start_new_session=True,
        )
        return cls(name, process)

    async def _read_all(self) -> None:
        await asyncio.gather(self._read(self.process.stdout), self._read(self.process.stderr))
        self._said.put_nowait(None)

    async def _read(self, stream: asyncio.StreamReader | None) -> None:
        assert stream is not None
        async for raw in stream:
            line = raw.decode(errors="replace").rstrip()
            self._lines.append(line)
            if line.startswith("{"):
                with contextlib.suppress(json.JSONDecodeError):
                    self._said.put_nowait(json.loads(line))

    async def say(self, key: str, timeout_s: float = START_TIMEOUT_S) -> dict[str, Any]:
        """Returns the next JSON line with `key`. Raises UStatusError if the process ends or takes too long."""
        try:
            async with asyncio.timeout(timeout_s):
                while (said := await self._said.get()) is not None:
                    if key in said:
                        return said
                self._said.put_nowait(None)  # for the next call
                await self.process.wait()
                raise self._ending()
        except TimeoutError:
            why = f"{self.name} said no {key!r} within {timeout_s:.0f} s:\n{self.tail}"
            raise UStatusError(UCode.DEADLINE_EXCEEDED, why) from None

    def require_running(self) -> None:
        """Raises UStatusError(ABORTED) with the last output if it has ended."""
        if self.process.returncode is not None:
            raise self._ending()

    def _ending(self) -> UStatusError:
        return UStatusError(UCode.ABORTED, f"{self.name} ended with code {self.process.returncode}:\n{self.tail}")

    @property
    def lines(self) -> list[str]:
        """The last lines of its output, LINES_KEPT at most."""
        return list(self._lines)

    @property
    def tail(self) -> str:
        return "\n".join(f"    {line}" for line in list(self._lines)[-15:]) or "    (it said nothing)"

    async def kill(self) -> None:
        self.process.kill()
        await self.process.wait()

    async def stop(self) -> int | None:
        """Send SIGTERM, then SIGKILL if needed. Also kills what the process started."""
        if self.process.returncode is None:
            self.process.terminate()
            try:
                async with asyncio.timeout(STOP_TIMEOUT_S):
                    await self.process.wait()
            except TimeoutError:
                self.process.kill()
                await self.process.wait()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        await self._reading
        return self.process.returncode


def die_with_parent(number: signal.Signals = signal.SIGTERM, parent: int | None = None) -> None:
    """Call this in a child before exec. It gets the signal when its parent ends for any reason. Linux only.

    `parent`: its process id; the child exits if the parent has already ended."""
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, number)
        if parent is not None and os.getppid() != parent:
            os._exit(1)
