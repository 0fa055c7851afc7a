"""What the parts with an HTTP port do the same when the configuration changes."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Coroutine, Iterable
from typing import Any, Final

from streamer.assembly import Tasks
from uprotocol.status import UStatusError
from uprotocol.tasks import end
from uprotocol.v1.ucode_pb2 import UCode

OPEN_WAIT_S: Final = 3.0  # longest wait of a reload until what it has changed is open


class PortOpening:
    """Opens a port again in the background: what still tries to open it as it was configured before ends."""

    def __init__(self, tasks: Tasks, what: str) -> None:
        self._tasks, self._what = tasks, what
        self._task: asyncio.Task[None] | None = None

    async def begin(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        if self._task is not None:
            await end(self._task)
        self._task = self._tasks.start(work, self._what)
        return self._task


def require_free(addresses: Iterable[str | None]) -> None:
    """Raises UNAVAILABLE if no port can be opened at one of them (HOST:PORT)."""
    for address in addresses:
        if address is not None:
            _try_to_open(address)


def _try_to_open(address: str) -> None:
    host, _, port = address.rpartition(":")
    try:
        addresses = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, kind, protocol, _name, where in addresses:
            with socket.socket(family, kind, protocol) as trial:
                trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                trial.bind(where)
    except OSError as error:
        raise UStatusError(UCode.UNAVAILABLE, f"{address} can't be opened: {error.strerror or error}") from None
