"""The send loop toward one peer: batches leave a queue one behind the other, and their answers come back in order.

queue -> send -> Flights: handed to the network, not answered yet -> land: in the order in which they left; after a
                 (several batches, where the network is far away)    failure all that are under way together, as if
                                                                     they had been one batch

A network far away answers a round trip later. Who waits for that before the next batch leaves sends one batch per
round trip, however fast the network is.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Final, Generic, NamedTuple, TypeVar

from streamer.egress.priority_queue import PriorityQueue
from streamer.walk.endpoint import Endpoint
from uprotocol.encoded import EncodedMessage
from uprotocol.pacing import Pace
from uprotocol.status import OK, RETRYABLE, is_nobody_listening
from uprotocol.v1.ustatus_pb2 import UStatus

BATCHES_MAX: Final = 32  # under way at once; each is a task of some 3 KB
# a batch that is not full waits so long behind those that are under way: the answer of a network that is near comes
# first, and what has gathered until then leaves together, for less
SPACING_S: Final = 0.005
# of payload, handed over and not answered, and one batch more; as much as our transports have in flight
BYTES_MAX: Final = 16 << 20
# how long the end waits for answers, so that the next start need not send everything again
LAND_S: Final = 0.5

T = TypeVar("T", bound=tuple[Any, EncodedMessage, Any])


class Flight(NamedTuple, Generic[T]):
    items: list[T]
    bytes: int  # of payload
    oldest_seq: int
    answer: asyncio.Future[list[UStatus]]


class Landed(NamedTuple, Generic[T]):
    items: list[T]
    statuses: list[UStatus]  # one for each


class Flights(Generic[T]):
    """Batches of one pump that were handed to the network and are not answered yet. Items are tuples with the message
    in the middle. `on_answer` is called when a batch is answered."""

    def __init__(self, peer: Endpoint, on_answer: Callable[[], None]) -> None:
        self._peer, self._on_answer = peer, on_answer
        self._flights: deque[Flight[T]] = deque()
        self.messages = self.bytes = 0
        self.next_at = 0.0  # loop time from which on a batch that is not full may leave
        self.begun = self.ended = 0  # batches, since the start
        self.have_failed = False  # something under way has to be sent again: nothing else leaves before it

    def __len__(self) -> int:
        return len(self._flights)

    def __iter__(self) -> Iterator[T]:
        """The items under way, in the order in which they left."""
        return (item for flight in self._flights for item in flight.items)

    def __repr__(self) -> str:
        return f"Flights({len(self)} batches, {self.messages} messages)"

    @property
    def have_capacity(self) -> bool:
        """One more batch may leave behind those that are under way: the network wants more before it answers."""
        if self.have_failed or len(self._flights) >= BATCHES_MAX or self.bytes >= BYTES_MAX:
            return False
        return self.messages < self._peer.in_flight_messages

    @property
    def are_answered(self) -> bool:
        """The oldest batch is answered: `landed` has something to report."""
        return bool(self._flights) and self._flights[0].answer.done()

    @property
    def oldest_seq(self) -> int | None:
        return min((flight.oldest_seq for flight in self._flights), default=None)

    def begin(self, items: list[T], oldest_seq: int = 0, is_held: Callable[[], bool] = lambda: False) -> None:
        """Send these behind those that are under way. If `is_held` when they are about to leave, they fail."""
        messages = [item[1] for item in items]
        octets = sum([len(message.payload) for message in messages])
        answer = self._peer.sends.begin(messages, self._answered, lambda: self.have_failed or is_held())
        self._flights.append(Flight(items, octets, oldest_seq, answer))
        self.begun += 1
        self.messages += len(items)
        self.bytes += octets
        self.next_at = asyncio.get_running_loop().time() + SPACING_S

    def _answered(self, statuses: list[UStatus]) -> None:
        # in the step in which the network has answered: whatever left after it would overtake what has failed
        if statuses.count(OK) != len(statuses) and any(
            status.code in RETRYABLE and not is_nobody_listening(status) for status in statuses
        ):
            self.have_failed = True
        self._on_answer()

    def landed(self) -> Landed[T]:
        """Returns the batches that were answered, up to the first that was not; they are not under way any more."""
        landed: Landed[T] = Landed([], [])
        while self._flights and self._flights[0].answer.done():
            items, octets, _, answer = self._flights.popleft()
            self.ended += 1
            self.messages -= len(items)
            self.bytes -= octets
            landed.items.extend(items)
            landed.statuses.extend(answer.result())
        self.have_failed = self.have_failed and bool(self._flights)
        return landed

    async def answered(self, timeout_s: float | None = None) -> None:
        """Wait until every batch under way is answered, or for so long."""
        if self._flights:
            await asyncio.wait([flight.answer for flight in self._flights], timeout=timeout_s)

    def drop(self) -> None:
        """Stop waiting for answers."""
        for flight in self._flights:
            flight.answer.cancel()


class Sender(Generic[T]):
    """Sends batches of `queue` to one peer. Its owner takes the batches, and settles what `land` returns."""

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
        """`messages_max`, `bytes_max`: of a full batch. `is_held`: nothing may leave just now. `cost`: units that
        `pace` counts for a batch."""
        self._peer, self._is_held, self._cost = peer, is_held, cost
        self.messages_max, self.bytes_max, self.pace = messages_max, bytes_max, pace
        self.queue: PriorityQueue[T] = PriorityQueue()
        self.flights: Flights[T] = Flights(peer, on_answer)
        self.is_failing = False  # nothing of the last batch got through: one batch at a time
        self.waiting: list[T] = []  # a batch that was taken from the queue, and waits for the pace

    @property
    def may_send(self) -> bool:
        """A batch of the queue may leave now."""
        queue, flights = self.queue, self.flights
        if not queue.messages or not flights.messages:
            return queue.messages > 0
        is_full = queue.messages >= self.messages_max or queue.bytes >= self.bytes_max
        if not is_full and flights.next_at > asyncio.get_running_loop().time():
            return False
        return flights.have_capacity

    @property
    def next_at(self) -> float | None:
        """Loop time from which on a batch that is not full may leave; None: not before an answer."""
        return self.flights.next_at if self.queue.messages and self.flights.have_capacity else None

    async def send(self, batch: list[T], oldest_seq: int = 0, *, is_trial: bool = False) -> bool:
        """Send `batch` behind what is under way, at the pace. Where the network takes one batch at a time, or this is a
        trial, wait for the answer: others would only fail behind it. False: something that left before it has failed
        meanwhile, so `batch` has to go back to the queue."""
        if self.pace is not None:
            self.waiting = batch
            await self.pace.spend(self._cost(batch))
            self.waiting = []
            if self.flights.have_failed:
                return False
        is_alone = not self.flights.messages and (is_trial or self.is_failing or not self._peer.in_flight_messages)
        self.flights.begin(batch, oldest_seq, self._is_held)
        if is_alone:
            await self.flights.answered()
        return True

    async def land(self) -> Landed[T]:
        """Returns what was answered; after a failure waits for all that is under way."""
        if self.flights.have_failed:
            await self.flights.answered()
        return self.flights.landed()
