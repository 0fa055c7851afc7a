"""What a network can't send again is held for a moment while the log refuses, since a full disk may be a passing thing.

    append -> log takes it                             -> done
           -> log refuses -> held, in order -> again --^
                                            -> for HOLD_S in vain: refused, and so is all that follows until the log takes something

The sender feels it: what is held is not confirmed, so the transport's bounded inbox fills and its network waits.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import Final

from history.log import Log
from uprotocol.encoded import Carried
from uprotocol.status import UStatusError
from uprotocol.v1.ucode_pb2 import UCode

HOLD_S: Final = 2.0  # longer, and requests of the same network would outlive their callers' patience
RETRY_S: Final = 0.1  # between tries; each costs the disk a transaction
PASSING: Final = frozenset({UCode.RESOURCE_EXHAUSTED, UCode.UNAVAILABLE})

_Batch = tuple[list[int], Sequence[Carried], "asyncio.Future[int]"]


class Held:
    """Appends to one log for one network."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self._waiting: deque[_Batch] = deque()  # bounded by what the network's inbox hands over unconfirmed
        self._since: float | None = None  # loop time at which the log began to refuse
        self._trying: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        return f"Held({self._log.name}, batches={len(self._waiting)})"

    def append(self, streams: list[int], batch: Sequence[Carried]) -> asyncio.Future[int]:
        """As Log.append; fails when there was no use in waiting."""
        if not self._waiting and self._log.healthy and self._since is None:
            return self._offer(streams, batch)
        waiting: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._keep(streams, batch, waiting)
        return waiting

    def _offer(self, streams: list[int], batch: Sequence[Carried]) -> asyncio.Future[int]:
        taken = self._log.append(streams, batch)
        answer: asyncio.Future[int] = asyncio.get_running_loop().create_future()

        def settle(done: asyncio.Future[int]) -> None:
            if answer.done():
                return
            if done.cancelled():
                answer.cancel()
            elif (error := done.exception()) is None:
                answer.set_result(done.result())
            elif isinstance(error, UStatusError) and error.code in PASSING:
                self._keep(streams, batch, answer)
            else:
                answer.set_exception(error)

        taken.add_done_callback(settle)
        return answer

    def _keep(self, streams: list[int], batch: Sequence[Carried], answer: asyncio.Future[int]) -> None:
        self._waiting.append((streams, batch, answer))
        if self._since is None:
            self._since = asyncio.get_running_loop().time()
        if self._trying is None:
            self._trying = asyncio.ensure_future(self._try())

    async def _try(self) -> None:
        """Offer what waits, one batch after the other, until nothing does."""
        loop = asyncio.get_running_loop()
        try:
            while self._waiting:
                streams, batch, answer = self._waiting[0]
                try:
                    seq = await self._log.append(streams, batch)
                except UStatusError as error:
                    assert self._since is not None
                    if error.code in PASSING and loop.time() - self._since < HOLD_S:
                        await asyncio.sleep(RETRY_S)
                        continue
                    self._give_up(error)
                else:
                    self._since = None
                    self._waiting.popleft()
                    if not answer.done():
                        answer.set_result(seq)
        finally:
            self._trying = None

    def _give_up(self, error: UStatusError) -> None:
        """On all that waits: whatever is among it came first. The log has still to take something before it is trusted
        again."""
        waiting, self._waiting = self._waiting, deque()
        for _, _, answer in waiting:
            if not answer.done():
                answer.set_exception(error)
