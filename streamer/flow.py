"""Flow control of the volatile log: a ring can't wait for its readers, so the senders do.

    ingress appends -> ring -> pumps          behind by half the ring? then what has arrived is not confirmed until they have caught up

Only peers that take messages hold up the senders: one that is away or stuck loses the oldest records (counted gaps), as a bounded ring
must, and one that keeps up shows that the others are merely slow.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final, Protocol

LAG_RECORDS_MAX: Final = 8_192  # some 4 MiB of small messages, well inside the smallest ring; a tenth of a second of the fastest network
ACTIVE_S: Final = 1.0  # a peer that has taken nothing for so long is stuck


class Follower(Protocol):
    """A pump on the volatile log (streamer.egress.Pump)."""

    @property
    def lag(self) -> float:
        """How far it is behind: 1 is as far as senders may be ahead of it."""
        ...

    def is_active(self, since: float) -> bool:
        """True if its peer has taken something since that loop time."""
        ...


class Flow:
    """One for the volatile log. Pumps call `moved`, ingress waits for `opened`."""

    def __init__(self) -> None:
        self.followers: Sequence[Follower] = ()
        self._opened: asyncio.Future[None] | None = None
        self._recheck: asyncio.TimerHandle | None = None

    @property
    def is_open(self) -> bool:
        since = asyncio.get_running_loop().time() - ACTIVE_S
        active = [follower.lag for follower in self.followers if follower.is_active(since)]
        return not active or min(active) < 1

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
