"""A TCP link that a test can cut, stall and half close: end -> TcpProxy -> broker or peer.

proxy = TcpProxy("127.0.0.1", broker_port); await proxy.start(); connect to proxy.port; proxy.cut(); proxy.mend()
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Final

CHUNK_BYTES: Final = 1 << 16  # of one read

Tap = Callable[[bytes], bytes]
"""Data of a read -> data to pass on, in one direction of one connection. Raises ConnectionError to reset it."""


class TcpProxy:
    def __init__(self, host: str, port: int) -> None:
        self._target = (host, port)
        self._writers: set[asyncio.StreamWriter] = set()
        self._ended: set[asyncio.StreamWriter] = set()  # those whose stream has been ended
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self._whole = True
        self._flowing = asyncio.Event()
        self._flowing.set()
        self.port = 0

    def taps(self) -> tuple[Tap, Tap]:
        """The taps of one new connection, to the target and back; a subclass may change the data."""
        return bytes, bytes

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    def cut(self) -> None:
        """Reset every connection, and refuse new ones until `mend`."""
        self._whole = False
        for writer in list(self._writers):
            writer.transport.abort()

    def stall(self) -> None:
        """Pass nothing on in either direction, and close nothing, until `mend`: a link that is dead without being
        closed."""
        self._flowing.clear()

    def half_close(self) -> None:
        """End one direction of every connection, alternately: its receiver reads the end of the stream. The other
        direction still works."""
        for writer in list(self._writers)[::2]:
            if not writer.transport.is_closing():
                self._ended.add(writer)
                writer.write_eof()

    def mend(self) -> None:
        self._whole = True
        self._flowing.set()

    async def stop(self) -> None:
        self.cut()
        if self._server is not None:
            self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        self._writers.add(writer)
        there: asyncio.StreamWriter | None = None
        with contextlib.suppress(OSError, asyncio.CancelledError):
            if self._whole:
                from_there, there = await asyncio.open_connection(*self._target)
                self._writers.add(there)
                if self._whole:
                    to_there, back = self.taps()
                    await asyncio.gather(self._copy(reader, there, to_there), self._copy(from_there, writer, back))
        for end in (writer, there):
            if end is not None:
                self._writers.discard(end)
                self._ended.discard(end)
                end.transport.abort()

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, tap: Tap) -> None:
        try:
            while data := await reader.read(CHUNK_BYTES):
                await self._flowing.wait()
                if writer not in self._ended:
                    writer.write(tap(data))
                    await writer.drain()
        finally:
            writer.close()
