"""Links that are cut: the TCP proxy of the conformance suite on a thread of its own, as the campaigns have no event
loop; and the UDP of a machine, for DDS.

Proxy.cut: connections are reset, and refused        Datagrams.cut: the kernel drops every datagram, until `mend`
"""

from __future__ import annotations

import asyncio
import subprocess
import threading
from collections.abc import Callable
from typing import Protocol

from transports.conformance.proxy import PROXY_CHUNK_BYTES, TcpProxy, TcpStream

Tap = Callable[[bytes], bytes]
"""Data of a read -> data to pass on, in one direction of one connection. Raises ConnectionError to reset it."""


class RoughProxy(TcpProxy):
    """A TcpProxy that can also be stalled and half closed, and whose data a subclass may change."""

    def __init__(self, host: str, port: int) -> None:
        super().__init__(host, port)
        self._ended: set[asyncio.StreamWriter] = set()  # those whose stream has been ended
        self._flowing = asyncio.Event()
        self._flowing.set()

    def taps(self) -> tuple[Tap, Tap]:
        """The taps of one new connection, to the target and back."""
        return bytes, bytes

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
        super().mend()
        self._flowing.set()

    async def pass_on(self, end: TcpStream, there: TcpStream) -> None:
        to_there, back = self.taps()
        try:
            await asyncio.gather(self._copy(end[0], there[1], to_there), self._copy(there[0], end[1], back))
        finally:
            self._ended -= {end[1], there[1]}

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, tap: Tap) -> None:
        try:
            while data := await reader.read(PROXY_CHUNK_BYTES):
                await self._flowing.wait()
                if writer not in self._ended:
                    writer.write(tap(data))
                    await writer.drain()
        finally:
            writer.close()


class Link(Protocol):
    def cut(self) -> None: ...

    def mend(self) -> None: ...


class Proxy:
    """`port` leads to `target_port`, until it is cut, stalled or half closed; `mend` ends any of these."""

    def __init__(self, target_port: int) -> None:
        self._loop = asyncio.new_event_loop()
        self._proxy = RoughProxy("127.0.0.1", target_port)
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        asyncio.run_coroutine_threadsafe(self._proxy.start(), self._loop).result(10)
        self.port = self._proxy.port

    def cut(self) -> None:
        self._call(self._proxy.cut)

    def stall(self) -> None:
        self._call(self._proxy.stall)

    def half_close(self) -> None:
        self._call(self._proxy.half_close)

    def mend(self) -> None:
        self._call(self._proxy.mend)

    def _call(self, what: Callable[[], None]) -> None:
        self._loop.call_soon_threadsafe(what)

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(self._proxy.stop(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)


class Datagrams:
    """Those of the network namespace that we are in, which is our own: see machine.no_namespace. Brokers and raw
    clients, which talk TCP, don't notice."""

    DROP = ("ipproto", "udp", "blackhole", "pref", "0")

    def __init__(self) -> None:
        for command in (
            # it comes first by itself, and nothing can be put before it
            ("rule", "add", "lookup", "local", "pref", "100"),
            ("rule", "del", "lookup", "local", "pref", "0"),
        ):
            subprocess.run(["ip", *command], check=True, capture_output=True)
        self._is_cut = False

    def cut(self) -> None:
        if not self._is_cut:
            subprocess.run(["ip", "rule", "add", *self.DROP], check=True, capture_output=True)
        self._is_cut = True

    def mend(self) -> None:
        if self._is_cut:
            subprocess.run(["ip", "rule", "del", *self.DROP], check=True, capture_output=True)
        self._is_cut = False
