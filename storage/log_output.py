"""Writes the lines of the log to a file descriptor, in a separate thread.

write(line) -> queue (bounded) -> thread -> os.write      a reader that does not read, a full disk or a closed pipe
                  | full                       | fails    delay or lose lines of the log, and nothing else
                  '-> counted                  '-> counted: the next line that is written says how many were lost
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
from collections import deque
from typing import Final

# of lines that are not written yet: some 5,000, which is more than a gateway writes in an hour
WAITING_BYTES_MAX: Final = 1 << 20
CLOSE_S_MAX: Final = 1.0  # the end of a process waits this long until its last lines are written
WRITABLE_MS: Final = 1_000  # between checks whether a non-blocking descriptor can be written to again


class LogOutput:
    """A text file for structlog.PrintLogger. Writing does not block or raise. Any thread may write.

    The descriptor stays open. Lines are counted that could not be written: OSError, or more than WAITING_BYTES_MAX.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._changed = threading.Condition()
        self._waiting: deque[bytes] = deque()
        self._waiting_bytes = 0
        self._is_writing = False
        self._thread: threading.Thread | None = None
        self.lost_lines = 0
        self._unreported_lines = 0  # lost lines that the log does not report yet
        self._is_cut = False  # the last line was written in part

    def __repr__(self) -> str:
        return f"LogOutput(descriptor={self._descriptor}, waiting={len(self._waiting)}, lost_lines={self.lost_lines})"

    def write(self, text: str) -> int:
        data = text.encode(errors="backslashreplace")
        with self._changed:
            if self._waiting_bytes + len(data) > WAITING_BYTES_MAX:
                self._count_lost(data)
                return len(text)
            self._waiting.append(data)
            self._waiting_bytes += len(data)
            if self._thread is None:
                self._start()
            self._changed.notify_all()
        return len(text)

    def flush(self) -> None:
        """The thread writes each line as soon as it can."""

    def close(self) -> None:
        """Wait until all lines are written, at most CLOSE_S_MAX."""
        with self._changed:
            self._changed.wait_for(lambda: not self._waiting and not self._is_writing, CLOSE_S_MAX)

    def _start(self) -> None:
        thread = threading.Thread(target=self._run, name="log output", daemon=True)
        with contextlib.suppress(RuntimeError):  # the process is about to end, and its last lines are lost
            thread.start()
            self._thread = thread

    def _run(self) -> None:
        while True:
            with self._changed:
                self._is_writing = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: bool(self._waiting))
                lines, self._waiting, self._waiting_bytes = b"".join(self._waiting), deque(), 0
                self._is_writing, unreported = True, self._unreported_lines
            prefix = b"\n" if self._is_cut else b""
            if unreported:
                prefix += b"(%d lines of this log were lost: they could not be written)\n" % unreported
            is_reported = self._write_all(prefix) is None
            left = self._write_all(lines) if is_reported else lines
            with self._changed:
                if is_reported:
                    self._unreported_lines -= unreported
                if left is not None:
                    self._count_lost(left)

    def _write_all(self, data: bytes) -> bytes | None:
        """Returns the part that could not be written; None: everything was written."""
        view = memoryview(data)
        while view:
            try:
                view = view[os.write(self._descriptor, view) :]
            except BlockingIOError:  # another process has made the descriptor non-blocking
                poll = select.poll()
                poll.register(self._descriptor, select.POLLOUT)
                poll.poll(WRITABLE_MS)
            except OSError:
                self._is_cut = self._is_cut if len(view) == len(data) else data[-len(view) - 1] != ord("\n")
                return bytes(view)
        self._is_cut = False
        return None

    def _count_lost(self, data: bytes) -> None:
        lines = data.count(b"\n")
        self.lost_lines += lines
        self._unreported_lines += lines
