"""The TCP proxy of the conformance suite on a thread of its own: the campaigns have no event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

from transports.conformance.proxy import TcpProxy


class Proxy:
    """`port` leads to `target_port`, until it is cut, stalled or half closed; `mend` ends any of these."""

    def __init__(self, target_port: int) -> None:
        self._loop = asyncio.new_event_loop()
        self._proxy = TcpProxy("127.0.0.1", target_port)
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
