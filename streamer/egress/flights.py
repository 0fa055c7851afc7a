"""Batches on their way to one peer: they have been handed to its network, and are not answered yet.

begin -> send_batch -> answered? -> landed: in the order in which they left; after a failure all that are under way
                                    together, as if they had been one batch

A network far away answers a round trip later. Who waits for that before the next batch leaves sends one batch per
round trip, however fast the network is.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator
from typing import Final, Generic, NamedTuple, TypeVar

from streamer.walk.endpoint import Endpoint
from uprotocol.encoded import EncodedMessage
from uprotocol.status import OK, RETRYABLE, is_nobody_listening
from uprotocol.v1.ustatus_pb2 import UStatus

BATCHES_MAX: Final = 32  # at once; each is a task of some 3 KB
# behind those that are under way a batch that is not full waits for so long: the answer of a network that is near comes
# first, and what has gathered until then leaves together, for less
SPACING_S: Final = 0.005
# of payload, handed over and not answered, and one batch more; as much as our transports have in flight
BYTES_MAX: Final = 16 << 20
# how long the end waits for answers, so that the next start need not send all of it again
LAND_S: Final = 0.5


T = TypeVar("T")


def _has_failed(status: UStatus) -> bool:
    """The network, and not only this message."""
    return status.code in RETRYABLE and not is_nobody_listening(status)


class Flight(NamedTuple, Generic[T]):
    items: list[T]
    bytes: int  # of payload
    oldest_seq: int
    answer: asyncio.Future[list[UStatus]]


class Landed(NamedTuple, Generic[T]):
    items: list[T]
    statuses: list[UStatus]  # one for each


class Flights(Generic[T]):
    """Those of one pump, whose items are messages and what it knows of them. `on_answer` is called when a batch is
    answered."""

    def __init__(self, peer: Endpoint, on_answer: Callable[[], None]) -> None:
        self._peer, self._on_answer = peer, on_answer
        self._flights: deque[Flight[T]] = deque()
        self.messages = self.bytes = 0
        self.next_at = 0.0  # loop time from which on one that is not full may leave
        self.begun = self.ended = 0  # batches, since the start
        self.have_failed = False  # something of what is under way is to be sent again: nothing leaves before that

    def __len__(self) -> int:
        return len(self._flights)

    def __iter__(self) -> Iterator[T]:
        """What is under way, in the order in which it left."""
        return (item for flight in self._flights for item in flight.items)

    def __repr__(self) -> str:
        return f"Flights({len(self)} batches, {self.messages} messages)"

    @property
    def have_room(self) -> bool:
        """One more may leave behind those that are under way, since the network wants more before it answers."""
        if self.have_failed or len(self) >= BATCHES_MAX or self.bytes >= BYTES_MAX:
            return False
        return self.messages < self._peer.in_flight_messages

    def may_leave(self, *, is_full: bool) -> bool:
        """The next batch, behind those that are under way; `is_full`: as large as it gets."""
        return self.have_room and (is_full or self.next_at <= asyncio.get_running_loop().time())

    def leaves_at(self, waiting: int) -> float | None:
        """Loop time from which on so many messages may leave though no batch is full; None: not before an answer."""
        return self.next_at if waiting and self.have_room else None

    @property
    def are_answered(self) -> bool:
        """The oldest is: `landed` has something to tell."""
        return bool(self._flights) and self._flights[0].answer.done()

    @property
    def oldest_seq(self) -> int | None:
        return min((flight.oldest_seq for flight in self._flights), default=None)

    def begin(
        self,
        items: list[T],
        messages: list[EncodedMessage],
        oldest_seq: int = 0,
        is_held: Callable[[], bool] = lambda: False,
    ) -> None:
        """Send these behind those that are under way: items, and the message of each. What `is_held` when it is about
        to leave fails."""
        octets = sum([len(message.payload) for message in messages])
        answer = self._peer.begin_send(messages, self._answered, lambda: self.have_failed or is_held())
        self._flights.append(Flight(items, octets, oldest_seq, answer))
        self.begun += 1
        self.messages += len(items)
        self.bytes += octets
        self.next_at = asyncio.get_running_loop().time() + SPACING_S

    def _answered(self, statuses: list[UStatus]) -> None:
        # in the step in which the network has answered: whatever left after it would overtake what has failed
        if statuses.count(OK) != len(statuses) and any(map(_has_failed, statuses)):
            self.have_failed = True
        self._on_answer()

    def landed(self) -> Landed[T]:
        """What has been answered, up to the first that has not; it is under way no more."""
        landed: Landed[T] = Landed([], [])
        while self.are_answered:
            items, octets, _, answer = self._flights.popleft()
            self.ended += 1
            self.messages -= len(items)
            self.bytes -= octets
            landed.items.extend(items)
            landed.statuses.extend(answer.result())
        self.have_failed = self.have_failed and bool(self._flights)
        return landed

    async def answered(self, timeout_s: float | None = None) -> None:
        """Wait until all that is under way is answered, or for so long."""
        if self._flights:
            await asyncio.wait([flight.answer for flight in self._flights], timeout=timeout_s)

    def drop(self) -> None:
        """Wait for no answer any more."""
        for flight in self._flights:
            flight.answer.cancel()
