"""`python -m campaigns.bench.far PORT DELAY_MS`: a TCP port that forwards to the local PORT with a delay.

client <-> [port, printed on stdout] --DELAY_MS later--> PORT, and back with the same delay; in order, no rate limit
"""

from __future__ import annotations

import asyncio
import signal
import sys
from collections import deque
from typing import Any, Final

from campaigns.bench.load import answer

# bytes under way in one direction: 100 ms of 600 MB/s. Beyond it the sender waits, as for a receiver's window
BYTES_MAX: Final = 64 << 20


class Delay:
    """Bytes in order, each of which is under way for `delay_s`. Time is an argument."""

    def __init__(self, delay_s: float) -> None:
        self._delay_s, self.size = delay_s, 0
        self._under_way: deque[tuple[float, bytes]] = deque()

    def put(self, now: float, data: bytes) -> None:
        self._under_way.append((now + self._delay_s, data))
        self.size += len(data)

    def take(self, now: float) -> list[bytes]:
        """Returns what has arrived by `now`."""
        out = []
        while self._under_way and self._under_way[0][0] <= now:
            out.append(self._under_way.popleft()[1])
            self.size -= len(out[-1])
        return out

    @property
    def next(self) -> float | None:
        """Returns when the next bytes arrive, or None if none are under way."""
        return self._under_way[0][0] if self._under_way else None


class Side(asyncio.Protocol):
    """One end of a connection. `other` writes what it reads after the delay."""

    def __init__(self, delay_s: float) -> None:
        self._delay = Delay(delay_s)
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._ended = False
        self.transport: Any = None
        self.other: Side | None = None

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        transport.pause_reading()

    def join(self, other: Side) -> None:
        """From now on `other` writes what this end reads."""
        self.other = other
        self.transport.resume_reading()

    def data_received(self, data: bytes) -> None:
        self._delay.put(self._loop.time(), data)
        if self._delay.size > BYTES_MAX:
            self.transport.pause_reading()
        self._arm()

    def connection_lost(self, error: Exception | None) -> None:
        self._ended = True
        self._arm()

    def _arm(self) -> None:
        if self._timer is None:
            due = self._delay.next
            if due is not None:
                self._timer = self._loop.call_at(due, self._pass_on)
            elif self._ended and self.other is not None:
                self.other.transport.close()

    def _pass_on(self) -> None:
        self._timer = None
        arrived = self._delay.take(self._loop.time())
        assert self.other is not None, "nothing is read before"
        if not self.other.transport.is_closing():
            self.other.transport.write(b"".join(arrived))
        if not self._ended and self._delay.size <= BYTES_MAX:
            self.transport.resume_reading()
        self._arm()


class Far:
    """The port while it is open."""

    def __init__(self, target: int, delay_s: float) -> None:
        self._target, self._delay_s = target, delay_s
        self._joining: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    async def open(self) -> int:
        """Opens the port and returns its number."""
        self._server = await asyncio.get_running_loop().create_server(self._accept, "127.0.0.1", 0)
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    def _accept(self) -> Side:
        near = Side(self._delay_s)
        task = asyncio.ensure_future(self._join(near))
        self._joining.add(task)
        task.add_done_callback(self._joining.discard)
        return near

    async def _join(self, near: Side) -> None:
        try:
            _, far = await asyncio.get_running_loop().create_connection(
                lambda: Side(self._delay_s), "127.0.0.1", self._target
            )
        except OSError:
            near.transport.abort()
            return
        near.join(far)
        far.join(near)

    def close(self) -> None:
        if self._server is not None:
            self._server.close()


async def serve(target: int, delay_ms: float) -> None:
    answer(ready=True, port=await Far(target, delay_ms / 1_000).open())
    await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the bench ends this process
    asyncio.run(serve(int(sys.argv[1]), float(sys.argv[2])))
