"""The processor of one process: work takes time, and meanwhile the other callbacks of that process wait.

work(messages) -> busy until ...      a callback that is due meanwhile -> waits here, in order -> runs when it is free
            '-> used(): what the product measures (storage.runtime.Used)
"""

from __future__ import annotations

import contextvars
from collections import deque
from collections.abc import Callable
from typing import Any, Final, Protocol

from storage.runtime import Used

KEPT_S: Final = 10.0  # of what it has worked; the product looks back for some 5 s


class Clock(Protocol):
    """The parts of a loop that are needed here."""

    now: float

    def call_at(self, when: float, callback: Callable[[], None], *, context: contextvars.Context) -> Any: ...


class Processor:
    """Its process has one thread that does everything."""

    def __init__(self, loop: Clock, message_s: float) -> None:
        """`message_s`: what the append of a message takes, and each sending of it."""
        self._loop, self._message_s = loop, message_s
        self._busy_until = self._used_s = 0.0
        self._worked: deque[tuple[float, float]] = deque()  # begin and end, in seconds of the loop
        self._waiting: deque[Callable[[], None]] = deque()

    def work(self, messages: int) -> None:
        """The callback that runs now takes its time for so many messages."""
        seconds = messages * self._message_s
        if seconds <= 0:
            return
        begin = max(self._loop.now, self._busy_until)
        self._busy_until = begin + seconds
        self._used_s += seconds
        self._worked.append((begin, self._busy_until))
        while self._worked[0][1] < self._loop.now - KEPT_S:
            self._worked.popleft()

    def defers(self, run: Callable[[], None]) -> bool:
        """True if the thread is busy: then `run()` is called when it is free, in the order of these calls."""
        if not self._waiting and self._loop.now >= self._busy_until:
            return False
        self._waiting.append(run)
        if len(self._waiting) == 1:
            self._release_later()
        return True

    def _release_later(self) -> None:
        self._loop.call_at(max(self._busy_until, self._loop.now), self._release, context=contextvars.Context())

    def _release(self) -> None:
        while self._waiting and self._loop.now >= self._busy_until:
            self._waiting[0]()  # it stays there meanwhile, so that nothing overtakes the others
            self._waiting.popleft()
        if self._waiting:
            self._release_later()

    def used(self) -> Used:
        used_s = self._used_s - max(0.0, self._busy_until - self._loop.now)
        return Used(used_s, used_s, 0.0)

    def busy_s(self, seconds: float) -> float:
        """Returns how much of the last so many seconds it has worked; KEPT_S at most."""
        now = self._loop.now
        return sum(max(0.0, min(end, now) - max(begin, now - seconds)) for begin, end in self._worked)
