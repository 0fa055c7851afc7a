"""What the parts with an HTTP port do the same when the configuration changes."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, Iterable, Iterator
from typing import Final

from streamer.assembly import Tasks
from streamer.reporting import Condition, Reporter
from uprotocol.pacing import Backoff
from uprotocol.status import UStatusError
from uprotocol.tasks import end
from uprotocol.v1.ucode_pb2 import UCode

OPEN_WAIT_S: Final = 3.0  # longest wait of a reload until what it has changed is open
OPEN_MS_MIN: Final = 500  # shortest and ...
OPEN_MS_MAX: Final = 30_000  # ... longest pause between attempts to open a port after a change


class PortOpening(Reporter):
    """Opens a port again in the background, until that works: meanwhile `conditions` has the reason."""

    def __init__(self, tasks: Tasks, name: str, failed: Callable[[str, int], str], *, is_fatal: bool) -> None:
        """`failed(error, attempt)` logs a failure, and returns the reason for operators."""
        self._tasks, self._name, self._failed, self._is_fatal = tasks, name, failed, is_fatal
        self._task: asyncio.Task[None] | None = None
        self._trouble = ""

    async def begin(self, reopen: Callable[[], Awaitable[None]]) -> asyncio.Task[None]:
        """`reopen` closes the port and opens it as it is configured now. What still tries to open it as it was before
        ends."""
        if self._task is not None:
            await end(self._task)
        self._task = self._tasks.start(self._reopen(reopen), self._name)
        return self._task

    async def _reopen(self, reopen: Callable[[], Awaitable[None]]) -> None:
        backoff = Backoff(OPEN_MS_MIN, OPEN_MS_MAX)
        while True:
            try:
                await reopen()
            except UStatusError as error:
                self._trouble = self._failed(error.message, backoff.attempt)
                await backoff.wait()
            else:
                self._trouble = ""
                return

    def conditions(self) -> Iterator[Condition]:
        if self._trouble:
            yield Condition(self._trouble, is_fatal=self._is_fatal)


def require_free(addresses: Iterable[str | None]) -> None:
    """Raises UNAVAILABLE if no port can be opened at one of them (HOST:PORT)."""
    for address in filter(None, addresses):
        host, _, port = address.rpartition(":")
        try:
            found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
            for family, kind, protocol, _name, where in found:
                with socket.socket(family, kind, protocol) as trial:
                    trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                    trial.bind(where)
        except OSError as error:
            raise UStatusError(UCode.UNAVAILABLE, f"{address} can't be opened: {error.strerror or error}") from None
