"""The send loop toward one peer: batches leave a queue one after the other, and are answered in the same order.

queue -> send -> in flight: given to the network, not answered yet -> landed: in the order in which they left; after
                 (several batches, if the network is far away)           a failure all in flight together, as if
                                                                         they were one batch

A network far away answers after a round trip. If each batch waited for the answer of the one before, only one batch
per round trip would leave, even on a fast network.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, chain
from typing import Any, Final, Generic, NamedTuple, TypeVar

from streamer.walk.endpoint import Endpoint
from uprotocol.encoded import EncodedMessage
from uprotocol.pacing import Pace
from uprotocol.status import OK, RETRYABLE, is_nobody_listening
from uprotocol.v1.uattributes_pb2 import UPriority
from uprotocol.v1.ustatus_pb2 import UStatus

BATCHES_MAX: Final = 32  # in flight at once; each is a task of some 3 KB
# how long a batch that is not full waits behind those in flight: a network that is near answers earlier, and what has
# gathered until then leaves in one batch, which costs less
SPACING_S: Final = 0.005
# of payload in flight, plus one batch; as much as our transports have in flight
BYTES_MAX: Final = 16 << 20
# how long a pump that ends waits for answers, so that the next start sends less again
LAND_S: Final = 0.5

T = TypeVar("T", bound=tuple[Any, EncodedMessage, Any])


class PriorityQueue(Generic[T]):
    """Messages to be sent: the highest priority class first, the oldest first within a class. Items are tuples with the
    message in the middle. `messages` of them wait, with `bytes` of payload."""

    def __init__(self) -> None:
        self.classes: list[deque[T]] = [deque() for _ in UPriority.values()]  # the lowest first
        self.messages = self.bytes = 0

    def __len__(self) -> int:
        return self.messages

    def __iter__(self) -> Iterator[T]:
        return chain.from_iterable(reversed(self.classes))

    def add(self, items: Sequence[T]) -> None:
        priorities = {item[1].stamp.priority for item in items}
        if len(priorities) == 1:  # the common case
            self.classes[priorities.pop()].extend(items)
        else:
            for item in items:
                self.classes[item[1].stamp.priority].append(item)
        self.messages += len(items)
        self.bytes += sum([len(item[1].payload) for item in items])

    def put_back(self, items: Sequence[T]) -> None:
        """Put items back that were taken in this order and have not got through."""
        for item in reversed(items):
            self.classes[item[1].stamp.priority].appendleft(item)
        self.messages += len(items)
        self.bytes += sum([len(item[1].payload) for item in items])

    def take(self, messages_max: int, bytes_max: int) -> list[T]:
        """Remove and return the next items; the last one may exceed `bytes_max`."""
        if self.messages <= messages_max and self.bytes <= bytes_max:  # the common case: all of them
            batch = [item for queue in reversed(self.classes) for item in queue]
            self.messages = self.bytes = 0
            for queue in self.classes:
                queue.clear()
            return batch
        batch = []
        for queue in reversed(self.classes):
            batch += [queue.popleft() for _ in range(min(len(queue), messages_max - len(batch)))]
        sizes = list(accumulate([len(item[1].payload) for item in batch], initial=0))
        fits = bisect_left(sizes, bytes_max)  # counts the item that reaches the limit
        if fits < len(batch):
            for item in reversed(batch[fits:]):
                self.classes[item[1].stamp.priority].appendleft(item)
            del batch[fits:]
        self.messages -= len(batch)
        self.bytes -= sizes[len(batch)]
        return batch

    def take_out(self, which: Callable[[T], bool]) -> list[T]:
        """Remove and return the items for which `which` is true."""
        taken = [item for item in self if which(item)]
        if taken:
            out = set(map(id, taken))
            self.classes = [deque(item for item in queue if id(item) not in out) for queue in self.classes]
            self.messages -= len(taken)
            self.bytes -= sum([len(item[1].payload) for item in taken])
        return taken


class Flight(NamedTuple, Generic[T]):
    """A batch in flight."""

    items: list[T]
    bytes: int  # of payload
    oldest_seq: int
    answer: asyncio.Future[list[UStatus]]


class Landed(NamedTuple, Generic[T]):
    """Batches that were answered."""

    items: list[T]
    statuses: list[UStatus]  # one for each


class Sender(Generic[T]):
    """Sends batches of `queue` to one peer. Items are tuples with the message in the middle. Its owner takes the
    batches, and settles what `landed` returns."""

    def __init__(
        self,
        peer: Endpoint,
        on_answer: Callable[[], None],
        messages_max: int,
        bytes_max: int,
        *,
        is_held: Callable[[], bool] = lambda: False,
        pace: Pace | None = None,
        cost: Callable[[list[T]], int] = len,
    ) -> None:
        """`on_answer` is called when a batch is answered. `messages_max`, `bytes_max`: of a full batch. A batch fails
        if `is_held` is true when it is about to leave. `cost`: units that `pace` counts for a batch."""
        self._peer, self._on_answer, self._is_held, self._cost = peer, on_answer, is_held, cost
        self.messages_max, self.bytes_max, self.pace = messages_max, bytes_max, pace
        self.queue: PriorityQueue[T] = PriorityQueue()
        self.flights: deque[Flight[T]] = deque()
        self._messages = self._bytes = 0  # in flight
        self._next_at = 0.0  # loop time from which a batch that is not full may leave
        self.begun = self.ended = 0  # batches, since the start
        self.have_failed = False  # a message in flight has to be sent again: no other one leaves before it
        self.is_failing = False  # no message of the last batch got through: one batch at a time
        self.waiting: list[T] = []  # a batch from the queue that waits for the pace

    def __repr__(self) -> str:
        return f"Sender({len(self.queue)} wait, {len(self.flights)} batches with {self._messages} messages in flight)"

    @property
    def in_flight(self) -> Iterator[T]:
        """Yields the items in flight, in the order in which they left."""
        return (item for flight in self.flights for item in flight.items)

    @property
    def may_send(self) -> bool:
        """True if a batch of the queue may leave now."""
        queue = self.queue
        if not queue.messages or not self.flights:
            return queue.messages > 0
        is_full = queue.messages >= self.messages_max or queue.bytes >= self.bytes_max
        if not is_full and self._next_at > asyncio.get_running_loop().time():
            return False
        return self._has_capacity()

    @property
    def next_at(self) -> float | None:
        """Returns the loop time from which a batch that is not full may leave; None: not before an answer."""
        return self._next_at if self.queue.messages and self._has_capacity() else None

    def _has_capacity(self) -> bool:
        """True if one more batch may leave behind those in flight: the network takes more before it answers."""
        if self.have_failed or len(self.flights) >= BATCHES_MAX or self._bytes >= BYTES_MAX:
            return False
        return self._messages < self._peer.in_flight_messages

    async def send(self, batch: list[T], oldest_seq: int = 0, *, is_trial: bool = False) -> bool:
        """Send `batch` behind those in flight, at the pace. If the network takes one batch at a time, or this is a
        trial, wait for the answer, since others would only fail behind it. Returns False if an earlier message has
        failed meanwhile; then `batch` has to go back to the queue."""
        if self.pace is not None:
            self.waiting = batch
            await self.pace.spend(self._cost(batch))
            self.waiting = []
            if self.have_failed:
                return False
        is_alone = not self.flights and (is_trial or self.is_failing or not self._peer.in_flight_messages)
        messages = [item[1] for item in batch]
        octets = sum([len(message.payload) for message in messages])
        answer = self._peer.sends.begin(messages, self._answered, lambda: self.have_failed or self._is_held())
        self.flights.append(Flight(batch, octets, oldest_seq, answer))
        self.begun += 1
        self._messages += len(batch)
        self._bytes += octets
        self._next_at = asyncio.get_running_loop().time() + SPACING_S
        if is_alone:
            await asyncio.wait([answer])
        return True

    def _answered(self, statuses: list[UStatus]) -> None:
        # in the loop step of the answer, since anything that left later would overtake the messages that failed
        if statuses.count(OK) != len(statuses) and any(
            status.code in RETRYABLE and not is_nobody_listening(status) for status in statuses
        ):
            self.have_failed = True
        self._on_answer()

    @property
    def has_answer(self) -> bool:
        """True if the oldest batch in flight is answered, so that `landed` returns something."""
        return bool(self.flights) and self.flights[0].answer.done()

    def landed(self) -> Landed[T]:
        """Returns the batches that were answered, up to the first one that was not. After a failure, call it when all
        in flight are `answered`."""
        landed: Landed[T] = Landed([], [])
        while self.flights and self.flights[0].answer.done():
            items, octets, _, answer = self.flights.popleft()
            self.ended += 1
            self._messages -= len(items)
            self._bytes -= octets
            landed.items.extend(items)
            landed.statuses.extend(answer.result())
        self.have_failed = self.have_failed and bool(self.flights)
        return landed

    async def answered(self, timeout_s: float | None = None) -> None:
        """Wait until every batch in flight is answered, `timeout_s` at most."""
        if self.flights:
            await asyncio.wait([flight.answer for flight in self.flights], timeout=timeout_s)

    def drop(self) -> None:
        """Stop waiting for answers."""
        for flight in self.flights:
            flight.answer.cancel()
