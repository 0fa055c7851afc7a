"""The interpreter's states of threads that Python did not start: kept while they live, freed when they end."""

from __future__ import annotations

import ctypes
import subprocess
import sys

import pytest

from transports.zenoh.threads import KEPT, keep_state

Start = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)


def states() -> int:
    """The number of states of this interpreter."""
    api = ctypes.pythonapi
    api.PyInterpreterState_Get.restype = api.PyInterpreterState_ThreadHead.restype = ctypes.c_void_p
    api.PyThreadState_Next.restype = ctypes.c_void_p
    count, state = 0, api.PyInterpreterState_ThreadHead(ctypes.c_void_p(api.PyInterpreterState_Get()))
    while state:
        count, state = count + 1, api.PyThreadState_Next(ctypes.c_void_p(state))
    return count


def call_on_foreign_threads(count: int) -> None:
    posix, handle = ctypes.CDLL(None), ctypes.c_ulong()

    @Start
    def begin(_: int | None) -> None:
        keep_state()

    for _ in range(count):
        assert posix.pthread_create(ctypes.byref(handle), None, begin, None) == 0
        assert posix.pthread_join(handle, None) == 0


@pytest.mark.skipif(sys.platform != "linux", reason="glibc")
def test_a_thread_that_has_ended_leaves_no_state() -> None:
    """In a new process: in the process of the tests, a thread that an earlier test left may end between the counts."""
    run_python(f"from {__name__} import leave_no_state; leave_no_state()")


def leave_no_state() -> None:
    before = states()
    call_on_foreign_threads(50)
    assert (states(), KEPT) == (before, set())


def run_python(program: str) -> None:
    finished = subprocess.run([sys.executable, "-c", program], check=False, timeout=60, capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr


def test_a_thread_that_ends_after_the_interpreter_harms_nobody() -> None:
    """It lives until the process ends: its destructor must not call freed code."""
    program = """
import ctypes, threading
from transports.zenoh.threads import keep_state
called, posix = threading.Event(), ctypes.CDLL(None)
begin = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)(lambda _: (keep_state(), called.set(), None)[2])
handle = ctypes.c_ulong()
for _ in range(20):
    called.clear()
    posix.pthread_create(ctypes.byref(handle), None, begin, None)
    called.wait()
"""
    for _ in range(5):
        run_python(program)
