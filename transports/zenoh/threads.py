"""Python that is called often on threads which Python did not start.

first call    -> PyGILState_Ensure, once more -> the interpreter's state of this thread stays: 2.7 us a call, not 10
thread's end  -> PyGILState_Release           -> it is gone

Each call from such a thread makes a state and ends it again, unless another call is still open. Zenoh's threads come
and go with its links, hence the Release: what the C library calls for the thread-local objects of C++ when a thread
ends (glibc). The destructor of a POSIX key comes too late, by then the thread does not know its state. On systems
without it nothing is kept, and each call costs what it costs.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from typing import Final

_LOCKED: Final = 0  # what Ensure answers to who has the interpreter already, and wants back in Release


KEPT: Final[set[int]] = set()
"""Threads, by `threading.get_ident`, that need not ask."""


def _release(_: int | None) -> None:
    """On the thread that ends. The call that this is ends the state with it."""
    KEPT.discard(threading.get_ident())
    ctypes.pythonapi.PyGILState_Release(_LOCKED)


_RELEASE: Final = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(_release)
_LIBC: Final = ctypes.CDLL(None) if sys.platform == "linux" else None
_AT_THREAD_EXIT: Final = getattr(_LIBC, "__cxa_thread_atexit_impl", None)
_OWNER: Final = ctypes.cast(ctypes.pythonapi.PyGILState_Release, ctypes.c_void_p)  # stays loaded until it was called


def keep_state() -> None:
    """On a foreign thread that is not in KEPT: its state in the interpreter stays until it ends."""
    KEPT.add(threading.get_ident())
    if _AT_THREAD_EXIT is not None and _AT_THREAD_EXIT(_RELEASE, None, _OWNER) == 0:
        ctypes.pythonapi.PyGILState_Ensure()
