"""Stops a child process for a while."""

from __future__ import annotations

import os
import signal


def stop_child(pid: int) -> None:
    """Stop a child of this process, and return when none of its threads runs any more. SIGSTOP alone returns before: on
    a busy machine the child still takes and acknowledges what comes meanwhile. SIGCONT continues it."""
    os.kill(pid, signal.SIGSTOP)
    os.waitid(os.P_PID, pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
