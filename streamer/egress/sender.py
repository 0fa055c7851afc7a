"""The send loop toward one peer: its queue, the streams that wait aside, the batches in flight, the transport's calls.

PriorityQueue -> Sender -> in flight: given to the network, not answered yet -> landed: in the order in which they left;
      ^                    (several batches, if the network is far away)        after a failure all in flight together,
      |                                                                         as if they were one batch
      '-- Aside: streams that don't get through though others do, tried at intervals

Sends: a call returns    -> answered; what fails is sent again by its owner
       not within ms_max -> all calls under way are answered UNAVAILABLE and cancelled. `hung` is set: nothing is sent
                            until the transport was closed and opened again (networks.py). A later answer is ignored

A network far away answers after a round trip. If each batch waited for the answer of the one before, only one batch
per round trip would leave, even on a fast network.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence, Set
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import accumulate, chain
from operator import itemgetter
from typing import Any, Final, Generic, NamedTuple, TypeVar

import structlog

from transports.base import NOT_TRIED
from uprotocol import uuid as uuids
from uprotocol.encoded import EncodedMessage
from uprotocol.pacing import Backoff, Pace
from uprotocol.status import OK, RETRYABLE, is_nobody_listening
from uprotocol.v1.uattributes_pb2 import UPriority
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.ustatus_pb2 import UStatus

# Well above the limits of our transports: MQTT ends an idle connection after 20 s, a Zenoh put waits 5 s for a peer
# that does not read, a DDS write 4 s for a slow receiver
SEND_MS_MAX: Final = 60_000
# Gives a call more time for the bytes under way: a slow link (64 kbit/s) is no hang
BYTES_PER_S_MIN: Final = 8 << 10
ENVELOPE_BYTES: Final = 256  # about the size of a message without its payload
BATCHES_MAX: Final = 32  # in flight at once; each is a task of some 3 KB
# how long a batch that is not full waits behind those in flight: a network that is near answers earlier, and what has
# gathered until then leaves in one batch, which costs less
SPACING_S: Final = 0.005
# of payload in flight, plus one batch; as much as our transports have in flight
BYTES_MAX: Final = 16 << 20
# how long a pump that ends waits for answers, so that the next start sends less again
LAND_S: Final = 0.5
ASIDE_MESSAGES_MAX: Final = 8_192  # kept in memory for streams that are stuck; with more, the peer waits for them
ASIDE_BYTES_MAX: Final = 16 << 20  # of payload
TRIED_AT_ONCE: Final = 16  # messages of one stream, to see whether it moves again

REOPENED: Final = UStatus(
    code=UCode.UNAVAILABLE, message="the transport did not return, and is opened again: this is sent again after that"
)
BEHIND: Final = UStatus(code=UCode.UNAVAILABLE, message=NOT_TRIED)

T = TypeVar("T", bound=tuple[Any, EncodedMessage, Any])
Statuses = list[UStatus]
Item = tuple[int, EncodedMessage, int]  # seq, message, and the log's id of its stream
OrderKey = tuple[bytes, int]
"""((type, source, sink), priority class): messages with the same key keep their order."""

log = structlog.get_logger()


def key_of(message: EncodedMessage) -> OrderKey:
    return message.stamp.address, message.stamp.priority


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


class Aside(dict[OrderKey, deque[Item]]):
    """The streams of `queue` that don't get through though others do, each with its items that wait. `time` is the
    event loop's.

    sent: some taken, one not -> put aside --due--> the first few of each, with the others -> taken: back to the queue
                                   ^                                                     '-> not taken: later
                                   '-- new messages with the same OrderKey wait behind it
    """

    def __init__(self, queue: PriorityQueue[Item], backoff: Backoff, time: Callable[[], float]) -> None:
        super().__init__()
        self._queue, self._backoff, self._time = queue, backoff, time
        self._tried: set[OrderKey] = set()
        self.due_at = 0.0  # loop time of the next try
        self.messages = self.bytes = 0

    @property
    def streams(self) -> set[int]:
        """Returns their ids in the log."""
        return {item[2] for queue in self.values() for item in queue}

    @property
    def is_full(self) -> bool:
        return self.messages >= ASIDE_MESSAGES_MAX or self.bytes >= ASIDE_BYTES_MAX

    @property
    def oldest_seq(self) -> int | None:
        return min((item[0] for queue in self.values() for item in queue), default=None)

    def takes(self, item: Item) -> bool:
        """Have `item` wait if its stream is stuck. Returns whether it waits."""
        queue = self.get(key_of(item[1]))
        if queue is None:
            return False
        queue.append(item)
        self._count([item], 1)
        return True

    def take_out(self, which: Callable[[Item], bool]) -> list[Item]:
        """Remove and return the items for which `which` is true, here and from the queue."""
        taken = list[Item]()
        for key, queue in list(self.items()):
            out = [item for item in queue if which(item)]
            if out:
                taken += out
                ids = set(map(id, out))
                self[key] = deque(item for item in queue if id(item) not in ids)
                if not self[key]:
                    del self[key]
        self._count(taken, -1)
        return taken + self._queue.take_out(which)

    def due(self) -> list[Item]:
        """Returns the first items of each stream, if it is time to try them. The caller then calls `put_back` with
        those that did not get through."""
        if not self or self._time() < self.due_at:
            return []
        self._tried.update(self)
        found = [queue.popleft() for queue in self.values() for _ in range(min(len(queue), TRIED_AT_ONCE))]
        self._count(found, -1)
        return found

    def put_back(self, again: Sequence[Item], stuck: Set[OrderKey] = frozenset()) -> None:
        """Put items back that have not got through: in front of their stream if it is stuck, else of the queue. Also
        put the rest of the streams back whose `due` items got through."""
        apart, rest = list[Item](), list[Item]()
        for item in again:
            key = key_of(item[1])
            (apart if key in stuck or key in self else rest).append(item)
        for item in reversed(apart):
            key = key_of(item[1])
            self.setdefault(key, deque()).appendleft(item)
            self._tried.discard(key)
        self._count(apart, 1)
        if apart:
            self.due_at = self._time() + self._backoff.next_ms() / 1000
        moving = [item for key in self._tried for item in self.pop(key, ())]
        self._tried.clear()
        self._count(moving, -1)
        if not self:
            self._backoff.reset()
        # in order of seq, since the cursor depends on the first item, which has to be the oldest
        self._queue.put_back(sorted(rest + moving, key=itemgetter(0)))

    def _count(self, items: Sequence[Item], sign: int) -> None:
        self.messages += sign * len(items)
        self.bytes += sign * sum(len(item[1].payload) for item in items)


@dataclass(eq=False, slots=True)
class _SendCall:
    messages: int
    bytes: int
    began: float  # loop time
    due: float  # loop time: if it has not returned by then, it hangs
    answer: asyncio.Future[Statuses]
    on_answer: Callable[[Statuses], None]
    task: asyncio.Task[None] | None = None


class Sends:
    """The calls of `send_batch` of one transport, and how they end if it hangs. Lives on the event loop."""

    def __init__(
        self,
        name: str,
        send: Callable[[Sequence[EncodedMessage]], Awaitable[Statuses]],
        in_flight_messages: Callable[[], int],
    ) -> None:
        """`send` hands messages to the network; it never raises. `in_flight_messages`: see UTransport."""
        self._name, self._send, self.in_flight_messages = name, send, in_flight_messages
        self.ms_max = SEND_MS_MAX
        self.hung = asyncio.Event()
        self.hangs = 0
        self.trouble = ""  # says since when no call has returned; empty once one does
        self._calls: dict[_SendCall, None] = {}  # in the order in which they began
        self._bytes = 0  # of all these calls
        self._timer: asyncio.TimerHandle | None = None

    def __repr__(self) -> str:
        return f"Sends({self._name}, under_way={len(self._calls)}, hangs={self.hangs})"

    def begin(
        self,
        messages: Sequence[EncodedMessage],
        on_answer: Callable[[Statuses], None] = lambda _: None,
        is_held: Callable[[], bool] = lambda: False,
    ) -> asyncio.Future[Statuses]:
        """Send the messages behind what is under way. Returns one status for each. Cancelling it cancels the call.

        `on_answer` is called in the loop step in which the network answers. Sending begins one loop step later; if
        `is_held` is true then, the messages are not sent and are answered UNAVAILABLE.
        """
        loop = asyncio.get_running_loop()
        octets = sum([len(message.payload) for message in messages]) + ENVELOPE_BYTES * len(messages)
        self._bytes += octets
        due = loop.time() + self.ms_max / 1_000 + self._bytes / BYTES_PER_S_MIN
        call = _SendCall(len(messages), octets, loop.time(), due, loop.create_future(), on_answer)
        self._calls[call] = None
        task = call.task = loop.create_task(self._run(call, messages, is_held))
        call.answer.add_done_callback(lambda answer: task.cancel() if answer.cancelled() else None)
        if self._timer is None:
            self._timer = loop.call_at(due, self._look)
        return call.answer

    async def _run(self, call: _SendCall, messages: Sequence[EncodedMessage], is_held: Callable[[], bool]) -> None:
        try:
            if self.hung.is_set() or is_held():
                statuses = [REOPENED if self.hung.is_set() else BEHIND] * call.messages
            else:
                statuses = await self._send(messages)
                if self.trouble and call in self._calls:
                    self._works()
            if call in self._calls and not call.answer.done():
                call.on_answer(statuses)
                call.answer.set_result(statuses)
        except asyncio.CancelledError:
            call.answer.cancel()
            raise
        finally:
            if call in self._calls:
                del self._calls[call]
                self._bytes -= call.bytes

    def _look(self) -> None:
        """If a call hangs, answer and cancel all calls: the transport is about to be closed."""
        loop = asyncio.get_running_loop()
        self._timer = None
        if not self._calls:
            return
        due = min(call.due for call in self._calls)
        if due > loop.time():
            self._timer = loop.call_at(due, self._look)
            return
        self.hangs += 1
        calls = list(self._calls)
        if not self.trouble:
            since = datetime.fromtimestamp(uuids.now_ms() / 1_000 - (loop.time() - calls[0].began), UTC)
            self.trouble = (
                f"since {since.isoformat(timespec='seconds')} its transport does not return from sending within "
                f"{self.ms_max} ms (egress.send_ms_max): it is closed and opened again, and what was not answered is "
                "sent again"
            )
        log.error("a transport hangs", endpoint=self._name, calls=len(calls), hangs=self.hangs, why=self.trouble)
        self.hung.set()
        self._calls.clear()
        self._bytes = 0
        for call in calls:
            if not call.answer.done():
                statuses = [REOPENED] * call.messages
                call.on_answer(statuses)
                call.answer.set_result(statuses)
        for call in calls:
            if call.task is not None:
                call.task.cancel()

    def resume(self) -> None:
        """Send again: the transport was reopened. It works if a call returns, or none is under way after `ms_max`."""
        self.hung.clear()
        asyncio.get_running_loop().call_later(self.ms_max / 1_000, self._check_trouble)

    def _check_trouble(self) -> None:
        if self.trouble and self.is_idle:
            self._works()

    def _works(self) -> None:
        log.info("a transport that did not return from sending works again", endpoint=self._name)
        self.trouble = ""

    @property
    def is_idle(self) -> bool:
        """True if no call is under way and none hangs."""
        return not self._calls and not self.hung.is_set()

    def close(self) -> None:
        """Send nothing more, and stop the timer, which would keep the endpoint in memory."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class Flight(NamedTuple, Generic[T]):
    """A batch in flight."""

    items: list[T]
    bytes: int  # of payload
    oldest_seq: int
    answer: asyncio.Future[Statuses]


class Landed(NamedTuple, Generic[T]):
    """Batches that were answered."""

    items: list[T]
    statuses: Statuses  # one for each


class Sender(Generic[T]):
    """Sends batches of `queue` to one peer. Items are tuples with the message in the middle. Its owner takes the
    batches, and settles what `landed` returns."""

    def __init__(
        self,
        sends: Sends,
        messages_max: int,
        bytes_max: int,
        *,
        pace: Pace | None = None,
        cost: Callable[[list[T]], int] = len,
    ) -> None:
        """`messages_max`, `bytes_max`: of a full batch. `cost`: units that `pace` counts for a batch."""
        self._sends, self._cost = sends, cost
        self.messages_max, self.bytes_max, self.pace = messages_max, bytes_max, pace
        self.queue: PriorityQueue[T] = PriorityQueue()
        self.flights: deque[Flight[T]] = deque()
        self._messages = self._bytes = 0  # in flight
        self._next_at = 0.0  # loop time from which a batch that is not full may leave
        self.begun = self.ended = 0  # batches, since the start
        self.is_held = False  # what has not left yet must not leave now: it fails, and is sent again
        self.have_failed = False  # a message in flight has to be sent again: no other one leaves before it
        self.is_failing = False  # no message of the last batch got through: one batch at a time
        self.waiting: list[T] = []  # a batch from the queue that waits for the pace
        self.wake = asyncio.Event()  # a batch was answered; the owner sets it for its own news

    def __repr__(self) -> str:
        return f"Sender({len(self.queue)} wait, {len(self.flights)} batches with {self._messages} messages in flight)"

    @property
    def in_flight(self) -> Iterator[T]:
        """Yields the items in flight, in the order in which they left."""
        return (item for flight in self.flights for item in flight.items)

    def leaves_at(self) -> float | None:
        """Returns the loop time from which a batch of the queue may leave; None: not before an answer, or there is
        none. Behind those in flight one may leave if the network takes more before it answers."""
        queue = self.queue
        if not queue.messages or not self.flights:
            return 0.0 if queue.messages else None
        if self.have_failed or len(self.flights) >= BATCHES_MAX or self._bytes >= BYTES_MAX:
            return None
        if self._messages >= self._sends.in_flight_messages():
            return None
        is_full = queue.messages >= self.messages_max or queue.bytes >= self.bytes_max
        return 0.0 if is_full else self._next_at

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
        sends = self._sends
        is_alone = not self.flights and (is_trial or self.is_failing or not sends.in_flight_messages())
        messages = [item[1] for item in batch]
        octets = sum([len(message.payload) for message in messages])
        answer = sends.begin(messages, self._answered, lambda: self.have_failed or self.is_held)
        self.flights.append(Flight(batch, octets, oldest_seq, answer))
        self.begun += 1
        self._messages += len(batch)
        self._bytes += octets
        self._next_at = asyncio.get_running_loop().time() + SPACING_S
        if is_alone:
            await asyncio.wait([answer])
        return True

    def _answered(self, statuses: Statuses) -> None:
        # in the loop step of the answer, since anything that left later would overtake the messages that failed
        if statuses.count(OK) != len(statuses) and any(
            status.code in RETRYABLE and not is_nobody_listening(status) for status in statuses
        ):
            self.have_failed = True
        self.wake.set()

    def landed(self) -> Landed[T]:
        """Returns the batches that were answered, up to the first one that was not; after a failure none until all in
        flight are answered."""
        landed: Landed[T] = Landed([], [])
        if self.have_failed and not all(flight.answer.done() for flight in self.flights):
            return landed
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
