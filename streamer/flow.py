"""What is held back between ingress and log: while no peer keeps up, and while the log refuses.

    ingress -> Appender: one network, one log --> Flow: one log, all networks --> log -> pumps -> moved
                  ^                                in turn, while a peer keeps up   |
                  '-- again for HOLD_S, if the network can't deliver it again <-----'- refused

Flow: senders wait while no peer keeps up. A volatile log can't wait for its readers, so the senders do: what has
arrived is not confirmed until a pump has caught up. Readers of a durable log fall back to the disk, so its senders are
held for `patience_s` at a time only, with HELD_RECORDS in between: taking in must not starve sending of the processor.

Only peers that take messages hold up the senders. One that is away or stuck reads the disk later, or loses the oldest
records of a ring (counted gaps). One that keeps up shows that the others are merely slow.

Appender: a full disk may be a passing thing. What is held is not confirmed, so the transport's bounded inbox fills and
its network waits. A network that delivers again what was not taken is refused at once instead; then nothing else of it
is appended until that has come again, so that the order holds.
"""

from __future__ import annotations

import asyncio
import functools
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

from history.log import Log
from uprotocol.encoded import EncodedMessage
from uprotocol.status import UStatusError
from uprotocol.v1.ucode_pb2 import UCode

# some 4 MiB of small messages, well inside the smallest ring; a tenth of a second of the fastest network
LAG_RECORDS_MAX: Final = 8_192
ACTIVE_S: Final = 1.0  # a peer that has taken nothing for so long is stuck
DURABLE_PATIENCE_S: Final = 0.01  # ten times what a batch needs to be sent
# from one hold to the next: 50,000 a second and more still come in, faster than any peer but Zenoh takes them
HELD_RECORDS: Final = 512
HOLD_S: Final = 2.0  # longer, and requests of the same network would outlive their callers' patience
RETRY_S: Final = 0.1  # between tries; each costs the disk a transaction
PASSING: Final = frozenset({UCode.RESOURCE_EXHAUSTED, UCode.UNAVAILABLE})
# within which a network delivers again what was not taken; the longest back-off of our transports is 1 s
REDELIVERY_S: Final = 5.0


Lag = Callable[[], float | None]
"""How far a pump is behind: 1 is as far as senders may be ahead of it; None: its peer takes nothing."""
Offer = Callable[["asyncio.Future[int]"], None]
"""Appends what has waited for its turn, and settles that future when the log has answered."""


class Flow:
    """Pumps call `moved`; appenders append through it."""

    def __init__(self, patience_s: float | None = None) -> None:
        self._followers: list[Lag] = []
        self._patience_s = patience_s
        self._credit = 0  # records until the next hold
        self.holds = False  # senders wait: who reads on calls `moved`
        # bounded by what the inboxes hand over unconfirmed
        self._queue: deque[tuple[int, Offer, asyncio.Future[int]]] = deque()
        self._serving: asyncio.Task[None] | None = None
        self._opened = asyncio.Event()  # it was open when a follower had read on

    def follow(self, lag: Lag) -> None:
        """A pump reads the log."""
        self._followers.append(lag)

    @property
    def is_open(self) -> bool:
        lags = [lag for follower in self._followers if (lag := follower()) is not None]
        return not lags or min(lags) < 1

    def append(self, records: int, offer: Offer) -> asyncio.Future[int]:
        """`offer(answer)` now or when its turn has come, in the order of these calls; the answer."""
        answer: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        if not self._queue and (self.is_open or self._has_credit(records)):
            offer(answer)
            return answer
        self._queue.append((records, offer, answer))
        if self._serving is None:
            self._serving = asyncio.ensure_future(self._serve())
        return answer

    async def _serve(self) -> None:
        self.holds = True
        try:
            while self._queue:
                records, offer, answer = self._queue[0]
                while not (self.is_open or self._has_credit(records)):
                    await self._hold()
                self._queue.popleft()
                offer(answer)
        finally:
            self._serving, self.holds = None, False

    def _has_credit(self, records: int) -> bool:
        if self._credit <= 0:
            return False
        self._credit -= records
        return True

    async def _hold(self) -> None:
        """Until it is open, or patience ends. A follower may also fall silent instead of catching up."""
        self._opened.clear()
        try:
            async with asyncio.timeout(ACTIVE_S if self._patience_s is None else self._patience_s):
                await self._opened.wait()
        except TimeoutError:
            if self._patience_s is not None:
                self._credit = HELD_RECORDS

    def moved(self) -> None:
        """A follower has read on."""
        if self.is_open:
            self._opened.set()

    def close(self) -> None:
        """Hold nothing any more: the log is about to be closed."""
        if self._serving is not None:
            self._serving.cancel()


class Appender:
    """Appends what one network brings to one log, when the flow lets it."""

    def __init__(
        self,
        log: Log,
        flow: Flow,
        on_refused: Callable[[Sequence[EncodedMessage]], None],
        *,
        holds: bool,
        redelivers: bool = False,
    ) -> None:
        """`holds`: what the log refuses waits here for a moment. `redelivers`: the network brings it again, in order.

        `on_refused` gets what the log has not taken in the end.
        """
        self._log, self._flow, self._on_refused = log, flow, on_refused
        self._holds, self._redelivers = holds, redelivers
        # bounded by what the network's inbox hands over unconfirmed
        self._held: deque[tuple[list[int], Sequence[EncodedMessage], asyncio.Future[int]]] = deque()
        self._refusing_since: float | None = None  # loop time
        self._retrying: asyncio.Task[None] | None = None
        # the id that nothing may overtake, and until when (loop time)
        self._awaiting_redelivery: tuple[bytes, float] | None = None

    def __repr__(self) -> str:
        return f"Appender({self._log.name}, held={len(self._held)})"

    def append(self, streams: list[int], batch: Sequence[EncodedMessage]) -> asyncio.Future[int]:
        """As Log.append; fails when there was no use in waiting."""
        return self._flow.append(len(batch), functools.partial(self._offer, streams, batch))

    def _offer(self, streams: list[int], batch: Sequence[EncodedMessage], answer: asyncio.Future[int]) -> None:
        if self._awaiting_redelivery is not None and self._is_ahead(batch, *self._awaiting_redelivery):
            what = "what the log has refused before this comes again first"
            self._refuse(batch, answer, UStatusError(UCode.UNAVAILABLE, what))
        elif self._holds and (self._held or self._refusing_since is not None or not self._log.healthy):
            self._hold(streams, batch, answer)
        else:
            taken = self._log.append(streams, batch)
            if taken.done() and taken.exception() is None:  # by a volatile log
                self._settle(streams, batch, answer, taken)
            else:
                taken.add_done_callback(functools.partial(self._settle, streams, batch, answer))

    def _settle(
        self,
        streams: list[int],
        batch: Sequence[EncodedMessage],
        answer: asyncio.Future[int],
        taken: asyncio.Future[int],
    ) -> None:
        error = None if taken.cancelled() else taken.exception()
        if taken.cancelled() or answer.done():
            answer.cancel()
        elif error is None:
            answer.set_result(taken.result())
        elif self._holds and isinstance(error, UStatusError) and error.code in PASSING:
            self._hold(streams, batch, answer)
        else:
            self._refuse(batch, answer, error)

    def _refuse(self, batch: Sequence[EncodedMessage], answer: asyncio.Future[int], error: BaseException) -> None:
        if answer.done():
            return
        answer.set_exception(error)
        if self._redelivers and self._awaiting_redelivery is None:
            self._awaiting_redelivery = (batch[0].id_key, asyncio.get_running_loop().time() + REDELIVERY_S)
        self._on_refused(batch)

    def _is_ahead(self, batch: Sequence[EncodedMessage], id: bytes, until: float) -> bool:
        """True if `batch` would overtake what the log has refused and the network has not yet delivered again."""
        if asyncio.get_running_loop().time() < until and all(message.id_key != id for message in batch):
            return True
        self._awaiting_redelivery = None
        return False

    def close(self) -> None:
        """Try nothing again any more."""
        if self._retrying is not None:
            self._retrying.cancel()

    # What the log refuses for a moment

    def _hold(self, streams: list[int], batch: Sequence[EncodedMessage], answer: asyncio.Future[int]) -> None:
        self._held.append((streams, batch, answer))
        if self._refusing_since is None:
            self._refusing_since = asyncio.get_running_loop().time()
        if self._retrying is None:
            self._retrying = asyncio.ensure_future(self._retry())

    async def _retry(self) -> None:
        """Offer what is held, one batch after the other, until nothing is."""
        loop = asyncio.get_running_loop()
        try:
            while self._held:
                streams, batch, answer = self._held[0]
                try:
                    seq = await self._log.append(streams, batch)
                except UStatusError as error:
                    assert self._refusing_since is not None
                    if error.code in PASSING and loop.time() - self._refusing_since < HOLD_S:
                        await asyncio.sleep(RETRY_S)
                        continue
                    # on all that is held: whatever is among it came first. The log has still to take something before
                    # it is trusted again
                    held, self._held = self._held, deque()
                    for _, batch, answer in held:
                        self._refuse(batch, answer, error)
                else:
                    self._refusing_since = None
                    self._held.popleft()
                    if not answer.done():
                        answer.set_result(seq)
        finally:
            self._retrying = None
