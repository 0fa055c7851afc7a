"""Keeps the interpreter's state of threads that Python did not start and that call it often.

first call    -> PyGILState_Ensure, once more -> the state of this thread stays: 2.7 us a call instead of 10
thread's end  -> PyGILState_Release           -> the state is freed

Without it, each call from such a thread makes a state and frees it again, unless another call is still open. Zenoh's
threads start and end with its links, so the release is necessary. It uses the mechanism of glibc for destructors of
thread-local C++ objects. The destructor of a POSIX key would come too late: the thread no longer knows its state. On
other systems no state is kept.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from typing import Final

_LOCKED: Final = 0  # PyGILState_STATE of a thread that holds the GIL already: Ensure returns it, Release takes it


KEPT: Final[set[int]] = set()
"""Threads with a kept state, by `threading.get_ident`."""


def _release(_: int | None) -> None:
    """On the thread that ends. The state is freed when this call returns."""
    KEPT.discard(threading.get_ident())
    ctypes.pythonapi.PyGILState_Release(_LOCKED)


_RELEASE: Final = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(_release)
_LIBC: Final = ctypes.CDLL(None) if sys.platform == "linux" else None
_AT_THREAD_EXIT: Final = getattr(_LIBC, "__cxa_thread_atexit_impl", None)
_OWNER: Final = ctypes.cast(
    ctypes.pythonapi.PyGILState_Release, ctypes.c_void_p
)  # keeps the library loaded until the call


def keep_state() -> None:
    """Keep the state of this thread, which Python did not start and which is not in KEPT, until the thread ends."""
    KEPT.add(threading.get_ident())
    if _AT_THREAD_EXIT is not None and _AT_THREAD_EXIT(_RELEASE, None, _OWNER) == 0:
        ctypes.pythonapi.PyGILState_Ensure()
