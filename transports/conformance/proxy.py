"""A TCP link that a test can cut: end -> TcpProxy -> broker or peer.

proxy = TcpProxy("127.0.0.1", broker_port); await proxy.start(); connect to proxy.port; proxy.cut(); proxy.mend()
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Final

from uprotocol.tasks import end

PROXY_CHUNK_BYTES: Final = 1 << 16  # of one read

TcpStream = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class TcpProxy:
    """Passes TCP connections on to a broker, and cuts them for tests."""

    def __init__(self, host: str, port: int) -> None:
        self._target = (host, port)
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self._whole = True
        self.port = 0

    async def start(self, port: int = 0) -> None:
        """Listens on 127.0.0.1; port 0: any free one, see `port`."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", port)
        self.port = self._server.sockets[0].getsockname()[1]

    def cut(self) -> None:
        """Reset every connection, and refuse new ones until `mend`."""
        self._whole = False
        for writer in list(self._writers):
            writer.transport.abort()

    def mend(self) -> None:
        """Accepts connections again."""
        self._whole = True

    async def stop(self) -> None:
        """Cuts all connections, and listens no more."""
        self.cut()
        if self._server is not None:
            self._server.close()
        await end(*self._tasks)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        writers = [writer]
        self._writers.add(writer)
        with contextlib.suppress(OSError, asyncio.CancelledError):
            if self._whole:
                there = await asyncio.open_connection(*self._target)
                writers.append(there[1])
                self._writers.add(there[1])
                if self._whole:
                    await self.pass_on((reader, writer), there)
        for one in writers:
            self._writers.discard(one)
            one.transport.abort()

    async def pass_on(self, end: TcpStream, there: TcpStream) -> None:
        """Pass on what either side of a connection sends, until both have ended."""

        async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                while data := await reader.read(PROXY_CHUNK_BYTES):
                    writer.write(data)
                    await writer.drain()
            finally:
                writer.close()

        await asyncio.gather(copy(end[0], there[1]), copy(there[0], end[1]))
