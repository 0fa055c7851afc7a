"""What is held back between ingress and log: while no peer keeps up, and while the log refuses.

    ingress -> Appender: one network, one log --> Flow: one log, all networks --> log -> pumps -> moved
                  ^                                in turn, while a peer keeps up   |
                  '-- again for HOLD_S, if the network can't deliver it again <-----'- refused

Flow: senders wait while no peer keeps up. A volatile log can't wait for its readers, so the senders do: what has
arrived is not confirmed until a pump has caught up. Readers of a durable log can fall back to the disk; its senders
are held for as long as it is our own processor that is short, since there every message that is taken in now is one
that is sent later, and read back from the disk:

    a pump has read on            -> half as many come in, however fast or slow that is
    we idle, for a good part      -> we are not what is slow, the peer is: they come in, for the disk has room
    neither for HELD_S_MAX        -> a few come in all the same: nobody stands for ever

Only peers that take messages hold up the senders. One that is away or stuck reads the disk later, or loses the oldest
records of a ring (counted gaps). One that keeps up shows that the others are merely slow.

Appender: a full disk may be a passing thing. What is held is not confirmed, so the transport's bounded inbox fills and
its network waits. A network that delivers again what was not taken is refused at once instead; then nothing else of it
is appended until that has come again, so that the order holds.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, Protocol

from history.log import Log
from storage.runtime import Used
from uprotocol.encoded import EncodedMessage
from uprotocol.status import UStatusError
from uprotocol.v1.ucode_pb2 import UCode

# of a volatile log; some 4 MiB of small messages, well inside the smallest ring
LAG_RECORDS_MAX: Final = 8_192
# of the memory for a durable log's newest records: far from having to read them back from the disk
LAG_SHARE_MAX: Final = 0.25
ACTIVE_S: Final = 1.0  # a peer that has taken nothing for so long is stuck
SHARE_RECORDS: Final = 1_024  # let in at a time: what the inboxes of two networks hand over in one batch
READ_PER_TAKEN: Final = 2  # records that a pump reads for each that comes in: so it catches up, and senders go on
LOOK_S: Final = 0.02  # between looks whether we idle: some turns of the threads that share a processor
# of one processor: who uses more, or would if it were free, is what is slow; Python can use one
BUSY: Final = 0.75
# in which we let in a share whatever we see; shorter than what a publisher that is blocked, or its watchdog, minds
HELD_S_MAX: Final = 0.25
HOLD_S: Final = 2.0  # longer, and requests of the same network would outlive their callers' patience
RETRY_S: Final = 0.1  # between tries; each costs the disk a transaction
PASSING: Final = frozenset({UCode.RESOURCE_EXHAUSTED, UCode.UNAVAILABLE})
# within which a network delivers again what was not taken; the longest back-off of our transports is 1 s
REDELIVERY_S: Final = 5.0


class Follower(Protocol):
    """A pump that reads the log."""

    @property
    def place(self) -> int:
        """The seq that it has read up to."""

    def lag(self) -> float | None:
        """How far it is behind: 1 is as far as senders may be ahead of it; None: its peer takes nothing."""


Offer = Callable[["asyncio.Future[int]"], None]
"""Appends what has waited for its turn, and settles that future when the log has answered."""


class Flow:
    """Pumps call `moved`; appenders append through it."""

    def __init__(self, used: Callable[[], Used] | None = None) -> None:
        """`used`, of a durable log: what the process has used of its processors."""
        self._followers: list[Follower] = []
        self._used = used
        self._credit = 0.0  # records that may come in while no peer keeps up
        self._place = 0  # of the pump that leads
        self._looked_at = self._let_in_at = 0.0  # loop time
        self._used_then = Used(0.0, 0.0, 0.0)  # when we looked
        self.holds = False  # senders have to wait: who reads on calls `moved`
        # bounded by what the inboxes hand over unconfirmed
        self._queue: deque[tuple[int, Offer, asyncio.Future[int]]] = deque()
        self._serving: asyncio.Task[None] | None = None
        self._opened = asyncio.Event()  # something may come in

    def follow(self, follower: Follower) -> None:
        """A pump reads the log."""
        self._followers.append(follower)

    @property
    def is_open(self) -> bool:
        lags = [lag for follower in self._followers if (lag := follower.lag()) is not None]
        return not lags or min(lags) < 1

    def append(self, records: int, offer: Offer) -> asyncio.Future[int]:
        """`offer(answer)` now or when its turn has come, in the order of these calls; the answer."""
        answer: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        if not self._queue and self.is_open:
            self.holds = False
            offer(answer)
            return answer
        self._queue.append((records, offer, answer))
        if not self.holds:
            self._begin()
        if self._serving is None:
            self._serving = asyncio.ensure_future(self._serve())
        return answer

    def _begin(self) -> None:
        """No peer keeps up, from here on."""
        self.holds, self._credit, self._place = True, 0.0, self._leading()
        self._let_in_at = asyncio.get_running_loop().time()
        self._busy()

    async def _serve(self) -> None:
        try:
            while self._queue:
                records, offer, answer = self._queue[0]
                while not (is_open := self.is_open) and self._credit <= 0:
                    await self._hold()
                if not is_open:
                    self._credit -= records
                self._let_in_at = asyncio.get_running_loop().time()
                self._queue.popleft()
                offer(answer)
        finally:
            self._serving = None

    async def _hold(self) -> None:
        """Until it is open, a pump has read on, or it is time to look. A pump may also fall silent instead."""
        self._opened.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(ACTIVE_S if self._used is None else LOOK_S):
                await self._opened.wait()
        self._look()

    def moved(self) -> None:
        """A follower has read on."""
        if self._used is not None:
            place = self._leading()
            self._earn(max(place - self._place, 0) / READ_PER_TAKEN)  # it went back if another pump leads now
            self._place = place
        if self.is_open:
            self.holds = bool(self._queue)
            self._opened.set()
        elif self._credit > 0:
            self._opened.set()

    def _earn(self, records: float) -> None:
        """A share at most is saved: what nobody wanted to send then is not made up for."""
        self._credit = min(self._credit + records, SHARE_RECORDS)

    def _leading(self) -> int:
        """How far the pump is that is the furthest, of those whose peers take something."""
        return max((one.place for one in self._followers if one.lag() is not None), default=0)

    def _look(self) -> None:
        """Let a share in, if nothing is gained by holding on."""
        now = asyncio.get_running_loop().time()
        if self._used is None or now - self._looked_at < LOOK_S:
            return  # too short to see anything, or nothing to be done about it
        passed, busy = now - self._looked_at, self._busy()
        if busy < BUSY * passed or now - self._let_in_at >= HELD_S_MAX:
            self._earn(SHARE_RECORDS)

    def _busy(self) -> float:
        """Seconds of a processor since the last time: what our threads have used, and would have if one had been free
        whenever they wanted it. How long they wait for one the loop's thread shows."""
        if self._used is None:
            return 0.0
        self._looked_at = asyncio.get_running_loop().time()
        then, now = self._used_then, self._used()
        self._used_then = now
        ran = now.thread_s - then.thread_s
        waited = now.waited_s - then.waited_s
        return (now.process_s - then.process_s) * (ran + waited) / ran if ran > 0 else 0.0

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
