"""Holds senders back between ingress and log: while no peer keeps up, and while the log refuses.

    ingress -> Flow: one log, all networks --> Appender: one network, one log --> log -> pumps -> moved
               in turn, while a peer keeps up     ^                                |
                                                  '-- retried for HOLD_S, if the network can't redeliver <- refused

Flow: senders wait while no peer keeps up. A volatile log can't wait for its readers, so the senders do: a message is
not confirmed until a pump has caught up. Readers of a durable log can fall back to the disk. Its senders are held as
long as our own processor is the bottleneck: whatever comes in then is sent later, and read back from the disk:

    a pump has read n records     -> n/2 come in
    our processor is partly idle  -> the peer is slow, not we: a share comes in, since the disk has capacity
    neither for HELD_S_MAX        -> a share comes in anyway: nobody waits forever

Only peers that take messages hold up the senders. A peer that is away or stuck reads the disk later, or loses the
oldest records of a ring (counted gaps). If one peer keeps up, the others are merely slow.

Appender: a full disk may be temporary. A held message is not confirmed, so the transport's bounded inbox fills and its
network waits. If the network redelivers messages that were not taken, they are refused at once instead.

Order: batches enter the log in the order in which they were offered. When a transaction fails, the log refuses all
batches that it got before the loop learnt of the failure (history/file/writer.py). So an appender appends nothing while
it waits for such a refusal: it holds or refuses. Refused batches come again in the order of the network's queue, so
nothing is appended until the first of them has come.
"""

from __future__ import annotations

import asyncio
import functools
import heapq
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple, Protocol

from history.log.log import Log
from storage.runtime import Used
from uprotocol import callbacks
from uprotocol.callbacks import Remove
from uprotocol.encoded import EncodedMessage
from uprotocol.status import UStatusError
from uprotocol.tasks import wait_within
from uprotocol.v1.ucode_pb2 import UCode

# of a volatile log; some 4 MiB of small messages, well below the smallest ring
LAG_RECORDS_MAX: Final = 8_192
# of the memory for a durable log's newest records: far from the point where they are read back from the disk
LAG_SHARE_MAX: Final = 0.25
ACTIVE_S: Final = 1.0  # a peer that has taken nothing for so long is stuck
SHARE_RECORDS: Final = 1_024  # that come in at once: one batch of the inboxes of two networks
READ_PER_TAKEN: Final = 2  # records that a pump reads for each that comes in, so that it catches up
MEASURE_S: Final = 0.02  # between measurements: some time slices of threads that share a processor
# share of one processor, the most that Python can use; above it we are the bottleneck
BUSY: Final = 0.75
# after which a share comes in anyway; shorter than the timeout of a blocked publisher or its watchdog
HELD_S_MAX: Final = 0.25
HOLD_S: Final = 2.0  # if longer, requests of the same network would time out
STORE_RETRY_S: Final = 0.1  # between tries; each costs the disk a transaction
STORE_BUSY_CODES: Final = frozenset({UCode.RESOURCE_EXHAUSTED, UCode.UNAVAILABLE})
# within which a network redelivers messages that were not taken; the longest back-off of our transports is 1 s
REDELIVERY_S: Final = 5.0


class LogReader(Protocol):
    """A pump that reads the log."""

    @property
    def read(self) -> int:
        """Returns the last seq that it has read."""

    def lag(self) -> float | None:
        """Returns how far it is behind: 1 is the limit for senders; None: its peer takes no messages."""


Offer = Callable[["asyncio.Future[int]"], None]
"""Appends a batch when it is its turn, and settles the future when the log has answered."""


class Flow:
    """The flow into one log. Pumps call `moved`; appenders append through it.

    Its state: the pumps that read (`_readers`), the appends that wait for their turn (`_queue`, while it `holds`), and
    how many records may come in (`_credit`), by how far the leading pump has come and by the processor's time.
    """

    def __init__(self, used: Callable[[], Used] | None = None) -> None:
        """`used`, for a durable log: the processor time that the process has used."""
        self._readers: list[LogReader] = []
        self._used = used
        self._credit = 0.0  # records that may come in while no peer keeps up
        self._read = 0  # last seq that the leading pump has read
        self._looked_at = self._let_in_at = 0.0  # loop time
        self._used_then = Used(0.0, 0.0, 0.0)  # at `_looked_at`
        self.holds = False  # senders have to wait, and pumps call `moved`
        # bounded by the unconfirmed messages of the inboxes
        self._queue: deque[tuple[int, Offer, asyncio.Future[int]]] = deque()
        self._serving: asyncio.Task[None] | None = None
        self._opened = asyncio.Event()  # set when records may come in

    def follow(self, reader: LogReader) -> Remove:
        """Add a pump that reads the log. Returns a function that removes it."""
        return callbacks.add(self._readers, reader)

    @property
    def is_open(self) -> bool:
        lags = [lag for reader in self._readers if (lag := reader.lag()) is not None]
        return not lags or min(lags) < 1

    def append(self, records: int, offer: Offer) -> asyncio.Future[int]:
        """Call `offer(answer)` now or when it is its turn, in the order of these calls. Returns the answer."""
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
        """Begin to hold senders: no peer keeps up any more."""
        self.holds, self._credit, self._read = True, 0.0, self._leading()
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
        """Wait until the flow is open, a pump has read on or stopped, or it is time to measure."""
        self._opened.clear()
        await wait_within(self._opened, ACTIVE_S if self._used is None else MEASURE_S)
        self._look()

    def moved(self) -> None:
        """Note that a pump has read on."""
        if self._used is not None:
            read = self._leading()
            self._earn(max(read - self._read, 0) / READ_PER_TAKEN)  # lower if another pump leads now
            self._read = read
        if self.is_open:
            self.holds = bool(self._queue)
            self._opened.set()
        elif self._credit > 0:
            self._opened.set()

    def _earn(self, records: float) -> None:
        """Add to the credit, which is one share at most, so that records do not add up during a pause."""
        self._credit = min(self._credit + records, SHARE_RECORDS)

    def _leading(self) -> int:
        """Returns the last seq that the leading pump has read, among those whose peers take messages."""
        return max((one.read for one in self._readers if one.lag() is not None), default=0)

    def _look(self) -> None:
        """Let a share in if further waiting gains nothing."""
        now = asyncio.get_running_loop().time()
        if self._used is None or now - self._looked_at < MEASURE_S:
            return  # the log is volatile, or the time too short to measure
        passed, busy = now - self._looked_at, self._busy()
        if busy < BUSY * passed or now - self._let_in_at >= HELD_S_MAX:
            self._earn(SHARE_RECORDS)

    def _busy(self) -> float:
        """Returns the processor seconds since the last call that our threads have used, and would have used if a
        processor had been free: the loop's thread shows how long they wait for one."""
        if self._used is None:
            return 0.0
        self._looked_at = asyncio.get_running_loop().time()
        then, now = self._used_then, self._used()
        self._used_then = now
        ran = now.thread_s - then.thread_s
        waited = now.waited_s - then.waited_s
        return (now.process_s - then.process_s) * (ran + waited) / ran if ran > 0 else 0.0

    def close(self) -> None:
        """Stop before the log is closed."""
        if self._serving is not None:
            self._serving.cancel()


@dataclass(order=True, slots=True)
class _Offered:
    """A batch that the log has neither taken nor finally refused."""

    number: int  # of this offer; lower numbers come first
    streams: list[int] = field(compare=False)
    batch: Sequence[EncodedMessage] = field(compare=False)
    answer: asyncio.Future[int] = field(compare=False)
    failures: int = field(compare=False)  # of the log, when it got the batch


class _Awaited(NamedTuple):
    """The first offered batch that was refused and has not come again."""

    number: int  # of its offer
    id: bytes  # of its first message
    until: float  # loop time


class Appender:
    """Appends the messages of one network to one log, in order, as the flow permits."""

    def __init__(
        self,
        log: Log,
        on_refused: Callable[[Sequence[EncodedMessage]], None],
        *,
        holds: bool,
        redelivers: bool = False,
    ) -> None:
        """`holds`: a batch that the log refuses waits here for HOLD_S. `redelivers`: the network delivers it again, in
        order. `on_refused` gets the batches that the log has finally not taken."""
        self._log, self._on_refused = log, on_refused
        self._holds, self._redelivers = holds, redelivers
        self._offers = 0
        # given to the log, which answers in this order; bounded, like `_held`, by the unconfirmed messages of the
        # network's inbox
        self._under_way: dict[int, tuple[_Offered, asyncio.Future[int]]] = {}  # by the number of the offer
        self._held: list[_Offered] = []  # a heap
        self._refusing_since: float | None = None  # loop time
        self._retrying: asyncio.Task[None] | None = None
        self._awaited: _Awaited | None = None

    def offer(self, streams: list[int], batch: Sequence[EncodedMessage], answer: asyncio.Future[int]) -> None:
        """Append a batch whose turn it is. `answer` is settled like that of Log.append; it fails if waiting did not
        help."""
        self._offers += 1
        offered = _Offered(self._offers, streams, batch, answer, self._log.failures)
        if self._redelivers and self._is_ahead(offered):
            what = "what the log has refused before this comes again first"
            self._refuse(offered, UStatusError(UCode.UNAVAILABLE, what))
        elif self._holds and (
            self._held or self._refusing_since is not None or not self._log.healthy or self._is_failing(offered)
        ):
            self._hold(offered)
        else:
            taken = self._log.append(streams, batch)
            if taken.done():  # taken by a volatile log, or refused at once
                self._settle(offered, taken)
            else:
                self._under_way[offered.number] = offered, taken
                taken.add_done_callback(functools.partial(self._settle, offered))

    def _settle(self, offered: _Offered, taken: asyncio.Future[int]) -> None:
        """Forward the log's answer."""
        self._under_way.pop(offered.number, None)
        error = None if taken.cancelled() else taken.exception()
        if taken.cancelled() or offered.answer.done():
            offered.answer.cancel()
        elif error is None:
            offered.answer.set_result(taken.result())
        elif self._holds and isinstance(error, UStatusError) and error.code in STORE_BUSY_CODES:
            self._hold(offered)
        else:
            self._refuse(offered, error)

    def _is_failing(self, offered: _Offered) -> bool:
        """True if the log is about to refuse batches before `offered`."""
        first = next(iter(self._under_way.values()), None)
        return first is not None and first[0].failures != offered.failures

    # Messages that the network redelivers

    def _is_ahead(self, offered: _Offered) -> bool:
        """True if it would overtake a batch that was refused or is about to be refused."""
        if self._is_failing(offered):
            return True
        awaited = self._awaited
        if awaited is None:
            return False
        is_it = any(message.id_bytes == awaited.id for message in offered.batch)
        if not is_it and asyncio.get_running_loop().time() < awaited.until:
            return True
        self._awaited = None
        return False

    def _refuse(self, offered: _Offered, error: BaseException) -> None:
        if offered.answer.done():
            return
        offered.answer.set_exception(error)
        if self._redelivers and (self._awaited is None or offered.number < self._awaited.number):
            until = asyncio.get_running_loop().time() + REDELIVERY_S
            self._awaited = _Awaited(offered.number, offered.batch[0].id_bytes, until)
        self._on_refused(offered.batch)

    # Messages that the log refuses for a while

    def _hold(self, offered: _Offered) -> None:
        heapq.heappush(self._held, offered)
        if self._refusing_since is None:
            self._refusing_since = asyncio.get_running_loop().time()
        if self._retrying is None:
            self._retrying = asyncio.ensure_future(self._retry())

    async def _retry(self) -> None:
        """Offer the held batches, one after the other, until none is held."""
        loop = asyncio.get_running_loop()
        try:
            while self._under_way:  # these may be refused, and precede the held ones
                await asyncio.wait([taken for _, taken in self._under_way.values()])
            while self._held:
                first = self._held[0]
                try:
                    seq = await self._log.append(first.streams, first.batch)
                except UStatusError as error:
                    assert self._refusing_since is not None
                    if error.code in STORE_BUSY_CODES and loop.time() - self._refusing_since < HOLD_S:
                        await asyncio.sleep(STORE_RETRY_S)
                        continue
                    # all held batches: none may overtake another. The log is trusted again only after it has taken a
                    # batch
                    held, self._held = sorted(self._held), []
                    for offered in held:
                        self._refuse(offered, error)
                else:
                    self._refusing_since = None
                    heapq.heappop(self._held)
                    if not first.answer.done():
                        first.answer.set_result(seq)
        finally:
            self._retrying = None

    def close(self) -> None:
        """Stop retrying."""
        if self._retrying is not None:
            self._retrying.cancel()
