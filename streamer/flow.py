"""Flow control: senders wait while no peer keeps up with them. One Flow for each log.

    ingress -> append: at once, or when its turn has come -> log -> pumps -> moved

A volatile log can't wait for its readers, so the senders do: what has arrived is not confirmed until a pump has caught
up. A durable log can, since its readers fall back to the disk, but taking in must not starve sending of the processor:
with `patience_s` the senders are held for so long at a time, with a share of records in between, which leaves them
HELD_RECORDS / patience_s at the least.

Only peers that take messages hold up the senders: one that is away or stuck reads the disk later, or loses the oldest
records of a ring (counted gaps); and one that keeps up shows that the others are merely slow.
"""

from __future__ import annotations

import asyncio
import functools
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, Protocol

# some 4 MiB of small messages, well inside the smallest ring; a tenth of a second of the fastest network
LAG_RECORDS_MAX: Final = 8_192
ACTIVE_S: Final = 1.0  # a peer that has taken nothing for so long is stuck
DURABLE_PATIENCE_S: Final = 0.01  # ten times what a batch needs to be sent
# from one hold to the next: 50,000 a second and more still come in, faster than any peer but Zenoh takes them
HELD_RECORDS: Final = 512


class Follower(Protocol):
    """A pump (streamer.egress.Pump)."""

    @property
    def lag(self) -> float:
        """How far it is behind: 1 is as far as senders may be ahead of it."""
        ...

    def is_active(self, since: float) -> bool:
        """True if its peer has taken something since that loop time."""
        ...


Append = Callable[[], "asyncio.Future[int]"]


class Flow:
    """Pumps call `moved`; ingress appends through it."""

    def __init__(self, patience_s: float | None = None) -> None:
        self.followers: Sequence[Follower] = ()
        self._patience_s = patience_s
        self._credit = 0  # records until the next hold
        # bounded by what the inboxes hand over unconfirmed
        self._queue: deque[tuple[int, Append, asyncio.Future[int]]] = deque()
        self._serving: asyncio.Task[None] | None = None
        self._opened: asyncio.Future[None] | None = None
        self._recheck: asyncio.TimerHandle | None = None

    @property
    def is_open(self) -> bool:
        since = asyncio.get_running_loop().time() - ACTIVE_S
        active = [follower.lag for follower in self.followers if follower.is_active(since)]
        return not active or min(active) < 1

    def append(self, records: int, append: Append) -> asyncio.Future[int]:
        """`append()` now or when its turn has come, in the order of these calls; its result either way."""
        if not self._queue and self._take(records):
            return append()
        waiting: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._queue.append((records, append, waiting))
        if self._serving is None:
            self._serving = asyncio.ensure_future(self._serve())
        return waiting

    async def _serve(self) -> None:
        try:
            while self._queue:
                records, append, waiting = self._queue[0]
                while not self._take(records):
                    await self._hold()
                self._queue.popleft()
                append().add_done_callback(functools.partial(_pass_on, waiting))
        finally:
            self._serving = None

    def _take(self, records: int) -> bool:
        if self.is_open:
            return True
        if self._credit <= 0:
            return False
        self._credit -= records
        return True

    async def _hold(self) -> None:
        if self._patience_s is None:
            await self.opened()
        elif not (await asyncio.wait({self.opened()}, timeout=self._patience_s))[0]:
            self._credit = HELD_RECORDS

    def opened(self) -> asyncio.Future[None]:
        """Completes when the flow is open again."""
        loop = asyncio.get_running_loop()
        if self._opened is None:
            self._opened = loop.create_future()
            self._recheck = loop.call_later(ACTIVE_S, self._tick)  # a follower may fall silent instead of catching up
        return self._opened

    def _tick(self) -> None:
        self._recheck = None
        self.moved()
        if self._opened is not None:
            self._recheck = asyncio.get_running_loop().call_later(ACTIVE_S, self._tick)

    def moved(self) -> None:
        """A follower has read on."""
        if self._opened is not None and self.is_open:
            future, self._opened = self._opened, None
            if self._recheck is not None:
                self._recheck.cancel()
                self._recheck = None
            if not future.done():
                future.set_result(None)


def _pass_on(waiting: asyncio.Future[int], done: asyncio.Future[int]) -> None:
    if waiting.done():
        return
    if done.cancelled():
        waiting.cancel()
    elif (error := done.exception()) is not None:
        waiting.set_exception(error)
    else:
        waiting.set_result(done.result())
