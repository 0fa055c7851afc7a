"""A socket to the broker, made on the event loop: whoever gives up leaves no thread to wait for, and no socket.

host -> addresses (a literal: at once; a name: on a thread that nobody waits for) -> TCP, one address after the other -> TLS -> socket
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import threading
from collections.abc import Callable
from typing import Any, Final

Address = tuple[int, Any]  # family, and what `connect` takes
_NUMERIC: Final = socket.AI_NUMERICHOST | socket.AI_NUMERICSERV


class Dialler:
    """Dials one host, again and again."""

    def __init__(self, host: str, port: int) -> None:
        self._host, self._port = host, port
        # one at a time: a resolver that hangs costs one thread, not one per try
        self._lookup: asyncio.Future[list[Address]] | None = None

    async def dial(self, context: ssl.SSLContext | None, timeout_s: float) -> socket.socket:
        """A connected, non-blocking socket; with `context` after TLS's handshake. `timeout_s` each: for the name, an
        address, TLS.

        Raises OSError (gaierror, SSLError, TimeoutError among them), and ValueError for a host that can be none
        (UnicodeError among them).
        """
        async with asyncio.timeout(timeout_s):
            addresses = await self._addresses()
        failure = OSError(f"{self._host} has no address")
        for family, address in addresses:
            try:
                async with asyncio.timeout(timeout_s):
                    sock = await _connected(family, address)
                break
            except OSError as error:  # the next one may answer
                failure = error
        else:
            raise failure
        if context is None:
            return sock
        async with asyncio.timeout(timeout_s):
            return await _secured(sock, context, self._host)

    async def _addresses(self) -> list[Address]:
        with contextlib.suppress(socket.gaierror):
            return _look_up(self._host, self._port, _NUMERIC)
        if self._lookup is None or self._lookup.done():
            self._lookup = _in_thread(lambda: _look_up(self._host, self._port))
        return await asyncio.shield(self._lookup)


def _look_up(host: str, port: int, flags: int = 0) -> list[Address]:
    return [(found[0], found[4]) for found in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=flags)]


def _in_thread(work: Callable[[], list[Address]]) -> asyncio.Future[list[Address]]:
    """Not in the loop's own pool, whose threads the end of a process waits for: a name may take half a minute, and
    can't be cancelled."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[list[Address]] = loop.create_future()
    future.add_done_callback(lambda done: done.cancelled() or done.exception())  # whoever asked may have gone

    def settle(result: list[Address] | Exception) -> None:
        if isinstance(result, Exception):
            future.set_exception(result)
        else:
            future.set_result(result)

    def run() -> None:
        result: list[Address] | Exception
        try:
            result = work()
        except Exception as error:  # the caller's to translate
            result = error
        with contextlib.suppress(RuntimeError):  # the loop has been closed
            loop.call_soon_threadsafe(settle, result)

    threading.Thread(target=run, name="look up a broker", daemon=True).start()
    return future


async def _connected(family: int, address: Any) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, address)
    except BaseException:
        sock.close()
        raise
    return sock


async def _secured(plain: socket.socket, context: ssl.SSLContext, host: str) -> ssl.SSLSocket:
    """The context checks who the broker is."""
    try:
        sock = context.wrap_socket(plain, server_hostname=host, do_handshake_on_connect=False)
    except BaseException:
        plain.close()
        raise
    try:
        while True:
            try:
                sock.do_handshake()
            except ssl.SSLWantReadError:
                await _ready(sock, write=False)
            except ssl.SSLWantWriteError:
                await _ready(sock, write=True)
            else:
                return sock
    except BaseException:
        sock.close()
        raise


async def _ready(sock: socket.socket, *, write: bool) -> None:
    loop, fd = asyncio.get_running_loop(), sock.fileno()
    future: asyncio.Future[None] = loop.create_future()
    add, remove = (loop.add_writer, loop.remove_writer) if write else (loop.add_reader, loop.remove_reader)

    def settle() -> None:
        if not future.done():
            future.set_result(None)

    add(fd, settle)
    try:
        await future
    finally:
        remove(fd)


__all__ = ["Dialler"]
