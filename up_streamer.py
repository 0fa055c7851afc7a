"""The command `up-streamer`, or `python -m up_streamer`. Outside of all packages: nothing is imported before it.

start -> Ctrl-C ends the process at once -> imports (half a second) -> Ctrl-C is KeyboardInterrupt -> the command -> end
                                                                       a finalizer ignores it -> comes again
"""

from __future__ import annotations

import os
import signal
import sys  # and nothing that takes time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NoReturn

EXIT_INTERRUPTED = 130
AGAIN_S = 0.01  # by then, what ignored it has returned


def main() -> None:
    """Runs the command line. Ctrl-C ends the process with EXIT_INTERRUPTED and without a traceback, at any time, unless
    the caller has SIGINT ignored."""
    is_ignored = signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    if not is_ignored:
        signal.signal(signal.SIGINT, _end)
    from streamer.commands import cli

    try:
        if not is_ignored:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            sys.unraisablehook = _interrupt_again
        cli.main()
    except KeyboardInterrupt:
        _end()
    finally:
        if not is_ignored:
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # it is done: the interpreter shuts down


def _end(*_: object) -> NoReturn:
    os._exit(EXIT_INTERRUPTED)


def _interrupt_again(ignored: sys.UnraisableHookArgs) -> None:
    """Repeats a Ctrl-C that came while Python ran a finalizer or closed a generator, where it ignores exceptions."""
    import threading

    if ignored.exc_type is KeyboardInterrupt:
        signal_again = threading.Timer(AGAIN_S, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT))
        signal_again.daemon = True
        signal_again.start()
    else:
        sys.__unraisablehook__(ignored)


if __name__ == "__main__":
    main()
