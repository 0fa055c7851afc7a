"""Measures whether the event loop was blocked, and which threads and tasks a closed transport leaves behind.

loop:   beat, beat, beat ............ beat      longest gap, and ...
thread:            late? -> the loop's stack    ... its stack: waiting for events means a slow machine,
                                                               anything else is a call that blocks
"""

from __future__ import annotations

import asyncio
import re
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

BEAT_S: Final = 0.001
STACK_LINES_MAX: Final = 6  # the innermost ones: the blocking call and its callers
_WAITING: Final = ("selectors.py", "select", "proactor")  # files of an idle loop


class Heartbeat:
    """`async with Heartbeat(0.1) as heart: ...` and then `heart.blocked_s` and `heart.where`."""

    def __init__(self, bound_s: float) -> None:
        self.blocked_s = 0.0  # the longest time that the loop was late, except while it waited for events
        self.where = ""  # the stack of its thread meanwhile; "" if the call also held the GIL
        self._bound_s = bound_s
        self._at = 0.0
        self._stack: str | None = None
        self._idle = False
        self._ended = threading.Event()

    async def __aenter__(self) -> Self:
        self._loop, self._thread = asyncio.get_running_loop(), threading.get_ident()
        self._at = time.monotonic()
        self._beating = self._loop.call_later(BEAT_S, self._beat)
        self._watcher = threading.Thread(target=self._watch, name="conformance-heartbeat", daemon=True)
        self._watcher.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.sleep(BEAT_S)  # one more beat, for the last blocking call
        self._beat()
        self._beating.cancel()
        self._ended.set()
        self._watcher.join()

    def _beat(self) -> None:
        now = time.monotonic()
        late_s = now - self._at - BEAT_S
        if late_s > self.blocked_s and not self._idle:
            self.blocked_s, self.where = late_s, self._stack or ""
        self._stack, self._idle = None, False
        self._at = now
        self._beating.cancel()
        self._beating = self._loop.call_later(BEAT_S, self._beat)

    def _watch(self) -> None:
        while not self._ended.wait(BEAT_S):
            if self._stack is None and time.monotonic() - self._at > self._bound_s:
                frame = sys._current_frames().get(self._thread)
                file = Path(frame.f_code.co_filename).name if frame is not None else ""
                self._idle = any(word in file for word in _WAITING)
                self._stack = "" if frame is None else "".join(traceback.format_stack(frame)[-STACK_LINES_MAX:])


@dataclass(frozen=True)
class Alive:
    """The present threads and tasks, without threads of the loop's own executor and those that Python did not start."""

    threads: frozenset[threading.Thread]
    tasks: frozenset[asyncio.Task[Any]]

    @classmethod
    def now(cls) -> Alive:
        threads = [one for one in threading.enumerate() if not one.name.startswith(("asyncio_", "Dummy-"))]
        return cls(frozenset(threads), frozenset(asyncio.all_tasks()))

    def more(self, before: Alive, count: int) -> dict[str, int]:
        """Kinds with at least `count` more than before: threads by name, without numbers, and tasks by coroutine."""
        grown = Counter(self._kinds())
        grown.subtract(before._kinds())
        return {kind: number for kind, number in grown.items() if number >= count}

    def _kinds(self) -> Iterator[str]:
        for thread in self.threads:
            yield "thread " + re.sub(r"\d+", "", thread.name)
        for task in self.tasks:
            yield "task " + getattr(task.get_coro(), "__qualname__", "?")

    def since(self, before: Alive) -> list[str]:
        """New threads and tasks, by repr."""
        return [repr(one) for one in [*(self.threads - before.threads), *(self.tasks - before.tasks)]]
