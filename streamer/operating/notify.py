"""Notifies the service manager (systemd's Type=notify), if one started us: ready, status, watchdog.

NOTIFY_SOCKET -> a datagram for each change
WATCHDOG_USEC -> regular beats from the event loop; without them the manager restarts the process

Source: sd_notify(3). The manager sends no answer, so nothing here waits; errors of the socket are ignored.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Callable, MutableMapping
from typing import Final, Self

START_BEAT_S: Final = 10.0  # each beat extends the start timeout by three: a start may wait for a full disk
BEATS_TO_BE_LATE: Final = 3
STATUS_CHARACTERS_MAX: Final = 400
STARTING: Final = f"EXTEND_TIMEOUT_USEC={int(START_BEAT_S * BEATS_TO_BE_LATE * 1_000_000)}"


class ServiceManager:
    """Use with `async with`; it sends beats until the exit. Removes its variables from `environment`, so that no child
    process uses them."""

    def __init__(self, environment: MutableMapping[str, str] = os.environ) -> None:
        address = environment.pop("NOTIFY_SOCKET", "")
        interval = environment.pop("WATCHDOG_USEC", "")
        interval_us = int(interval) if interval.isascii() and interval.isdecimal() else 0
        watched = environment.pop("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
        self._address = "\0" + address[1:] if address.startswith("@") else address
        self._interval_s = interval_us / 1_000_000 / BEATS_TO_BE_LATE if watched and interval_us else 0.0
        self._socket: socket.socket | None = None
        self._beats: asyncio.Task[None] | None = None
        self._state = STARTING
        self._hurry = asyncio.Event()  # set to send the next beat at once
        self._status: Callable[[], str] = lambda: "starting"

    def __repr__(self) -> str:
        return f"ServiceManager({self._address or None!r}, beat={self._interval_s or None} s, {self._state})"

    async def __aenter__(self) -> Self:
        if self._address.startswith(("/", "\0")):  # others (vsock) are not for services on the same machine
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
            self._socket.setblocking(False)
            self._beats = asyncio.create_task(self._beat(), name="service manager")
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._beats is not None:
            self._beats.cancel()
            await asyncio.gather(self._beats, return_exceptions=True)
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def ready(self, status: Callable[[], str]) -> None:
        """Reports that the service is ready; each beat sends the current `status()`."""
        self._state, self._status = "READY=1", status
        self._hurry.set()

    def stopping(self) -> None:
        """Reports that the service is stopping."""
        self._state = "STOPPING=1"
        self._hurry.set()

    async def _beat(self) -> None:
        """Sends everything in each beat, so that one lost to a full queue does not matter."""
        while True:
            self._hurry.clear()
            status = " ".join(self._status().split())[:STATUS_CHARACTERS_MAX]
            self._tell(self._state, f"STATUS={status}", *(["WATCHDOG=1"] if self._interval_s else []))
            pause_s = START_BEAT_S if self._state == STARTING or not self._interval_s else self._interval_s
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._hurry.wait()

    def _tell(self, *lines: str) -> None:
        if self._socket is not None:
            with contextlib.suppress(OSError):  # the manager is not there, or its queue is full
                self._socket.sendto("\n".join(lines).encode(), self._address)
