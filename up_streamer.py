"""The command `up-streamer`, or `python -m up_streamer`. Outside of all packages: nothing is imported before it.

start -> Ctrl-C ends the process at once -> imports (half a second) -> Ctrl-C is KeyboardInterrupt -> the command -> end
"""

from __future__ import annotations

import os
import signal  # and nothing else that takes time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NoReturn

EXIT_INTERRUPTED = 130


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
        cli.main()
    except KeyboardInterrupt:
        _end()
    finally:
        if not is_ignored:
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # it is done: the interpreter shuts down


def _end(*_: object) -> NoReturn:
    os._exit(EXIT_INTERRUPTED)


if __name__ == "__main__":
    main()
