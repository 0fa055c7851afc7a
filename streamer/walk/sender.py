"""What leaves for one peer: the send loop, and the express way.

PriorityQueue -> Sender -> in flight: given to the network, not answered yet -> landed: in the order in which they left;
                           (several batches, if the network is far away)        after a failure all in flight together,
                                                                                as if they were one batch

A network far away answers after a round trip. If each batch waited for the answer of the one before, only one batch
per round trip would leave, even on a fast network.

The express way: requests, responses, and frames of histories, in memory, by priority, dropped at their ttl. One queue
and one send loop per peer. What a log keeps leaves by the pumps (pump.py).

ingress -> put -> queue (bounded) -> Sender -> peer
             |                         |
             +--------- fail ----------+--> a request's originator gets a response that says why; a dead letter
                                       '--> frames and answers of histories: counted, since a follower asks again

A network that is away is tried again until the ttl ends. A request that nobody takes, as its network says, is tried
again for UNHEARD_S, since networks learn of a new listener a moment late; then its originator gets UNAVAILABLE.
Requests to the same method by the same caller wait behind it.

A queue is bounded in messages and bytes. So that a caller who floods a stalled peer leaves capacity for the others,
- a caller (the uEntity that is the source of a request, or the sink of a response) has at most a quarter,
- the uEntities of one source authority together have at most a half, since their numbers may be made up,
- answers of the streamer itself have a limit of their own, of which one authority has at most a quarter, so that a
  caller whose request is refused gets an answer,
- frames of histories have a limit of their own, of which one follower has at most a half.
A message counts until the network has taken it.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from itertools import accumulate, chain
from typing import Any, Final, Generic, NamedTuple, TypeVar

from streamer.letters.dead_letter import REASON_CHARACTERS_MAX, DeadLetters
from streamer.walk.endpoint import Endpoint, Endpoints, Statuses
from streamer.walk.hosted import HostedTransport
from uprotocol import attributes as attrs
from uprotocol import uuid as uuids
from uprotocol.communication.shares import CALLERS_SHARE, Full, Shares
from uprotocol.core.ustreamer import ids
from uprotocol.encoded import EncodedMessage
from uprotocol.message import error_response
from uprotocol.pacing import Backoff, Pace
from uprotocol.status import OK, RETRYABLE, Settled, code_name, is_nobody_listening, settle
from uprotocol.tasks import wait_until
from uprotocol.v1.uattributes_pb2 import UAttributes, UPriority
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.ustatus_pb2 import UStatus

BATCHES_MAX: Final = 32  # in flight at once; each is a task of some 3 KB
# how long a batch that is not full waits behind those in flight: a network that is near answers earlier, and what has
# gathered until then leaves in one batch, which costs less
SPACING_S: Final = 0.005
# of payload in flight, plus one batch; as much as our transports have in flight
SENDING_BYTES_MAX: Final = 16 << 20
# how long a pump or an express queue that ends waits for answers, so that less is sent again
LAND_S: Final = 0.5
# of the express way: messages sent at once; few, so that an urgent one does not wait long
EXPRESS_MESSAGES_MAX: Final = 256
EXPRESS_BYTES_MAX: Final = 4 << 20  # ... and at least one message: a transport copies what it sends
# our own answers that wait for one endpoint beside its queue, 1 KiB of memory each: thousands of calls of one authority
# may be refused at once, and each gets an answer
ANSWERS_MAX: Final = 16_384
SENDERS_SHARE: Final = 2  # the callers of one authority together get a half: one host can invent many callers
# how long a request is tried again while its network knows nobody who takes it, but at most half of its remaining ttl:
# longer than a new listener needs to be known behind several routers
UNHEARD_S: Final = 0.5
UNHEARD_PAUSE_S_MIN: Final = 0.01  # before it is tried again; as long as it has waited already, within these limits
UNHEARD_PAUSE_S_MAX: Final = 0.1
ASKED_AGAIN: Final = frozenset((ids.DESCRIBE, ids.POLL, ids.COMMAND))  # methods of a history that callers repeat

T = TypeVar("T", bound=tuple[Any, EncodedMessage, *tuple[Any, ...]])
QueuedRecord = tuple[int, EncodedMessage, int]  # seq, message, and the log's id of its stream
OrderKey = tuple[bytes, int]
"""((type, source, sink), priority class): messages with the same key keep their order."""


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
        taken = [item for item in self if which(item)]
        if taken:
            out = set(map(id, taken))
            self.classes = [deque(item for item in queue if id(item) not in out) for queue in self.classes]
            self.messages -= len(taken)
            self.bytes -= sum([len(item[1].payload) for item in taken])
        return taken


class Flight(NamedTuple, Generic[T]):
    items: list[T]
    bytes: int  # of payload
    oldest_seq: int
    answer: asyncio.Future[Statuses]


class Sender(Generic[T]):
    """Sends batches of `queue` to one peer. Items are tuples with the message in the middle. Its owner takes the
    batches, and what `landed` returns.

    Its state: `queue`, the batch that waits for the pace (`waiting`), the batches in flight (`flights`), and what the
    last answers mean for the next batch (`have_failed`, `is_failing`, `is_held`, `_next_at`).
    """

    def __init__(
        self,
        peer: Endpoint,
        messages_max: int,
        bytes_max: int,
        *,
        pace: Pace | None = None,
        cost: Callable[[list[T]], int] = len,
    ) -> None:
        """`messages_max`, `bytes_max`: of a full batch. `cost`: units that `pace` counts for a batch."""
        self.peer, self._cost = peer, cost
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
        if self.have_failed or len(self.flights) >= BATCHES_MAX or self._bytes >= SENDING_BYTES_MAX:
            return None
        if self._messages >= self.peer.in_flight_messages:
            return None
        is_full = queue.messages >= self.messages_max or queue.bytes >= self.bytes_max
        return 0.0 if is_full else self._next_at

    async def send(self, batch: list[T], oldest_seq: int = 0, *, is_trial: bool = False) -> bool:
        """Send `batch` behind those in flight, at the pace. If the network takes one batch at a time, or this is a
        trial, wait for the answer, since others would only fail behind it. Returns False if an earlier message has
        failed meanwhile; then `batch` has to go back to the queue."""
        if self.peer.spans is not None:
            self.peer.spans.ready(self.peer.name, [item[1] for item in batch])
        if self.pace is not None:
            self.waiting = batch
            await self.pace.spend(self._cost(batch))
            self.waiting = []
            if self.have_failed:
                return False
        is_alone = not self.flights and (is_trial or self.is_failing or not self.peer.in_flight_messages)
        messages = [item[1] for item in batch]
        octets = sum([len(message.payload) for message in messages])
        answer = self.peer.sends.begin(messages, self._answered, lambda: self.have_failed or self.is_held)
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

    def landed(self) -> Settled[T] | None:
        """Returns the result of the batches that were answered, up to the first unanswered one. After a failure: of all
        batches in flight, once all are answered. None: there is no result yet."""
        landed, statuses = list[T](), list[UStatus]()
        if self.have_failed and not all(flight.answer.done() for flight in self.flights):
            return None
        while self.flights and self.flights[0].answer.done():
            items, octets, _, answer = self.flights.popleft()
            self.ended += 1
            self._messages -= len(items)
            self._bytes -= octets
            landed.extend(items)
            statuses.extend(answer.result())
        self.have_failed = self.have_failed and bool(self.flights)
        if not landed:
            return None
        if self.peer.spans is not None:
            self.peer.spans.answered(self.peer.name, [item[1] for item in landed], statuses)
        return settle(landed, statuses)

    async def answered(self, timeout_s: float | None = None) -> None:
        """Wait until every batch in flight is answered, `timeout_s` at most."""
        if self.flights:
            await asyncio.wait([flight.answer for flight in self.flights], timeout=timeout_s)

    def drop(self) -> None:
        """Stop waiting for answers."""
        for flight in self.flights:
            flight.answer.cancel()

    def take_back(self) -> None:
        """Stop waiting for answers, and put what was not answered back into the queue."""
        self.drop()
        self.queue.put_back([*self.in_flight])
        self.flights.clear()
        self._messages = self._bytes = 0
        self.have_failed = False


# -- the express way


class ExpressMessage(NamedTuple):
    size: int
    message: EncodedMessage
    accounts: list[tuple[Shares[Hashable], Hashable]]  # the limits that it counts toward, and the owner in each
    unheard_since: float = 0.0  # loop time of the first answer that nobody takes it; 0: none
    unheard_until: float = 0.0  # loop time after which such an answer is final


def _asked_again(message: EncodedMessage) -> str:
    """Returns the name of the drop counter of a message that the receiver asks the history for again; else "". It
    gets no dead letter: followers that are away would cause many, which would push out those of others."""
    if message.stamp.type == attrs.NOTIFICATION:
        return "frames"
    method = message.stamp.attributes.source  # of a response
    is_of_history = (method.ue_id & 0xFFFF, method.ue_version_major) == (ids.ENTITY, ids.VERSION)
    is_answer = message.stamp.type == attrs.RESPONSE and is_of_history and method.resource_id in ASKED_AGAIN
    return "history_answers" if is_answer else ""


class Express:
    """The queues of all peers, and the answers to requests that can't be dispatched (dispatcher section of the
    specification)."""

    def __init__(
        self,
        endpoints: Endpoints,
        hosted: HostedTransport,
        dead_letters: DeadLetters,
        *,
        messages_max: int,
        bytes_max: int,
        backoff: Callable[[], Backoff],
    ) -> None:
        """`messages_max`, `bytes_max`: limits of one endpoint's queue; our own answers have as many more bytes."""
        self.endpoints, self._hosted, self._dead_letters = endpoints, hosted, dead_letters
        self.messages_max, self.bytes_max = messages_max, bytes_max
        self._backoff = backoff
        self.queues: dict[str, ExpressQueue] = {}
        for endpoint in endpoints:
            self.add_endpoint(endpoint)
        self._inside: set[asyncio.Future[None]] = set()

    def add_endpoint(self, endpoint: Endpoint) -> None:
        """Add a queue for it, or continue with the one that `rename` has kept for it."""
        if (kept := self.queues.get(endpoint.name)) is not None:
            kept.change_peer(endpoint)
        else:
            self.queues[endpoint.name] = ExpressQueue(endpoint, self, self._backoff())

    def rename(self, old: str, new: str) -> None:
        """Keep what waits for endpoint `old` for `new`: in the same step, `old` is removed and `new` is added. Call it
        once `run` of the queue has been cancelled."""
        if old in self.queues:
            self.queues[new] = self.queues.pop(old)

    def limit(self, messages_max: int) -> None:
        """Change how many messages may wait for each endpoint, and wait between attempts as `backoff` says now."""
        self.messages_max = messages_max
        for queue in self.queues.values():
            queue.limit(messages_max, self._backoff())

    def remove_endpoint(self, name: str) -> None:
        """Fail what waits in its queue with UNAVAILABLE. Call it once `run` of the queue has been cancelled."""
        if (queue := self.queues.pop(name, None)) is not None:  # None: `rename` has kept it
            queue.fail_all(UCode.UNAVAILABLE, f"endpoint {name!r} was removed")

    def fail(
        self,
        message: EncodedMessage,
        code: UCode.ValueType,
        reason: str,
        endpoint: Endpoint,
        *,
        is_withheld: bool = False,
    ) -> None:
        """Keep `message`, which can't be dispatched, as a dead letter. If it is a request, answer its originator.

        A request of a hosted service gets no dead letter, since the service repeats it: its requests to a network that
        is away for a day would push out the other letters.
        """
        if message.stamp.type != attrs.REQUEST:
            self._dead_letters.add(message, code, reason, endpoint.name, is_withheld=is_withheld)
            return
        attributes = UAttributes.FromString(message.encoded)  # its payload is not touched
        response = error_response(attributes, UStatus(code=code, message=reason[:REASON_CHARACTERS_MAX]))
        if self._hosted.owns(attributes.source):
            taken = self._hosted.deliver([response])
            if taken is not None:
                future = asyncio.ensure_future(taken)
                self._inside.add(future)
                future.add_done_callback(self._inside.discard)
            return
        self._dead_letters.add(message, code, reason, endpoint.name, is_withheld=is_withheld)
        origin = self.endpoints.owner(response.attributes.sink.authority_name)
        if origin is not None:
            self.queues[origin.name].put(EncodedMessage.of(response), is_ours=True)


class ExpressQueue:
    """The queue and the send loop of one peer."""

    def __init__(self, peer: Endpoint, express: Express, backoff: Backoff) -> None:
        self.peer = peer
        self._express, self._backoff = express, backoff
        limits = express.messages_max, express.bytes_max
        self._callers: Shares[Hashable] = Shares(*limits, CALLERS_SHARE)
        self._senders: Shares[Hashable] = Shares(*limits, SENDERS_SHARE)  # the same messages, by source authority
        self._frames: Shares[Hashable] = Shares(*limits, SENDERS_SHARE)
        self._answers: Shares[Hashable] = Shares(ANSWERS_MAX, express.bytes_max, CALLERS_SHARE)
        self._sender = Sender[ExpressMessage](peer, EXPRESS_MESSAGES_MAX, EXPRESS_BYTES_MAX)
        # requests that nobody takes, until they are tried again
        self._unheard: dict[OrderKey, list[ExpressMessage]] = {}

    def change_peer(self, peer: Endpoint) -> None:
        """Send what waits to `peer`: the same network under another name. Call it while `run` does not run."""
        self.peer = self._sender.peer = peer

    def limit(self, messages_max: int, backoff: Backoff) -> None:
        for shares in (self._callers, self._senders, self._frames):
            shares.limit(messages_max)
        self._backoff.wake()
        self._backoff = backoff

    def __len__(self) -> int:
        """Returns the number of messages that wait or are being sent."""
        return self._callers.pieces + self._frames.pieces + self._answers.pieces

    @property
    def bytes(self) -> int:
        return self._callers.bytes + self._frames.bytes + self._answers.bytes

    def put(self, message: EncodedMessage, *, is_ours: bool = False) -> None:
        """Queue it. If the queue is full, or full for this caller, answer RESOURCE_EXHAUSTED. `is_ours`: it is our
        answer to a refused request."""
        attributes = message.stamp.attributes
        accounts: list[tuple[Shares[Hashable], Hashable]]
        if is_ours:
            accounts = [(self._answers, attributes.sink.authority_name)]
        else:
            caller = attributes.source if attributes.type == attrs.REQUEST else attributes.sink
            account = caller.authority_name, caller.ue_id
            if attributes.type == attrs.NOTIFICATION:
                accounts = [(self._frames, account)]
            else:
                accounts = [(self._callers, account), (self._senders, attributes.source.authority_name)]
        size = message.ByteSize()
        for shares, whose in accounts:
            if (full := shares.full(whose, size)) is not None:
                self._refuse(message, full, is_ours=is_ours)
                return
        for shares, whose in accounts:
            shares.add(whose, 1, size)
        self._sender.queue.add([ExpressMessage(size, message, accounts)])
        self._sender.wake.set()

    def _refuse(self, message: EncodedMessage, full: Full, *, is_ours: bool) -> None:
        """Answer a message that exceeds the limit `full`. It is not parsed: a batch of large ones would be in memory
        twice."""
        if is_ours:
            self.peer.dropped["answers_full"] += 1  # answers don't leave: the caller isn't listening now
        elif dropped := _asked_again(message):
            self.peer.dropped[dropped] += 1
        else:
            limit = f"{full.limit} {'bytes' if full.is_of_bytes else 'messages'}"
            whose = " of this caller or authority" if full.is_of_one else ""
            self.peer.dropped["express_share" if full.is_of_one else "express_full"] += 1
            why = f"at most {limit}{whose} wait for endpoint {self.peer.name!r}"
            self._express.fail(message, UCode.RESOURCE_EXHAUSTED, why, self.peer)

    def _uncount(self, entry: ExpressMessage) -> None:
        for shares, whose in entry.accounts:
            shares.add(whose, -1, -entry.size)

    def _end(self, entry: ExpressMessage, code: UCode.ValueType, reason: str) -> None:
        self._uncount(entry)
        if dropped := _asked_again(entry.message):
            self.peer.dropped[dropped] += 1
        else:
            self._express.fail(entry.message, code, reason, self.peer)

    def fail_all(self, code: UCode.ValueType, reason: str) -> None:
        unheard = list(chain.from_iterable(self._unheard.values()))
        self._unheard.clear()
        for entry in (*unheard, *self._sender.queue):
            self._end(entry, code, reason)

    async def run(self) -> None:
        """Send until cancelled. Then wait for answers, LAND_S at most; what was not taken waits in the queue."""
        sender = self._sender
        try:
            while True:
                sender.wake.clear()
                landed, leaves_at = sender.landed(), sender.leaves_at()
                if landed is not None:
                    self._settle(landed)
                    if sender.is_failing:
                        await self._backoff.wait(self._soonest_expiry_ms())
                elif leaves_at is None or leaves_at > asyncio.get_running_loop().time():
                    await wait_until(sender.wake, leaves_at)
                elif batch := self._next_batch():
                    await sender.send(batch)
        finally:
            try:
                await sender.answered(LAND_S)
            finally:
                if (landed := sender.landed()) is not None:
                    self._settle(landed)
                sender.take_back()

    def _next_batch(self) -> list[ExpressMessage]:
        """Returns the next messages, the highest class first, without those that have expired."""
        batch: list[ExpressMessage] = []
        now = uuids.now_ms()
        for entry in self._sender.queue.take(EXPRESS_MESSAGES_MAX, EXPRESS_BYTES_MAX):
            if entry.message.is_expired(now):
                what = f"its ttl ran out before endpoint {self.peer.name!r} took it"
                self._end(entry, UCode.DEADLINE_EXCEEDED, what)
            elif self._unheard and (waiting := self._unheard.get(key_of(entry.message))) is not None:
                waiting.append(self._unheard_from_now(entry))
            else:
                batch.append(entry)
        return batch

    def _settle(self, landed: Settled[ExpressMessage]) -> None:
        """Remove messages that were taken; the others go back to the queue, or fail."""
        sent, again, refused = landed
        unheard = [(entry, status) for entry, status in again if is_nobody_listening(status)]
        if unheard:
            refused += self._try_again_soon(unheard)
        for entry in sent:
            self._uncount(entry)
        for entry, status in refused:
            what = status.message or code_name(status.code)
            self._end(entry, status.code, f"endpoint {self.peer.name!r}: {what}")
        self.peer.forwarded += len(sent)
        for entry in sent:
            origin = self._express.endpoints.owner(entry.message.stamp.attributes.source.authority_name)
            self.peer.forwarded_from["" if origin is None else origin.name] += 1
        # their ttl is checked when it is their turn again
        waiting = [entry for entry, status in again if not is_nobody_listening(status)]
        was_failing, self._sender.is_failing = self._sender.is_failing, bool(waiting)
        if waiting:
            self._sender.queue.put_back(waiting)
        elif was_failing:
            self._backoff.reset()

    def _try_again_soon(self, unheard: list[tuple[ExpressMessage, UStatus]]) -> list[tuple[ExpressMessage, UStatus]]:
        """Let requests wait that nobody takes now. Returns the others: for them the answer is final."""
        now, final = asyncio.get_running_loop().time(), list[tuple[ExpressMessage, UStatus]]()
        for entry, status in unheard:
            is_over = entry.unheard_until and now >= entry.unheard_until
            if is_over or entry.message.stamp.type != attrs.REQUEST:
                final.append((entry, status))
                continue
            key, waits = key_of(entry.message), self._unheard_from_now(entry)
            if key in self._unheard:
                self._unheard[key].append(waits)
                continue
            self._unheard[key] = [waits]
            pause_s = min(max(now - waits.unheard_since, UNHEARD_PAUSE_S_MIN), UNHEARD_PAUSE_S_MAX)
            pause_s = min(pause_s, max(waits.unheard_until - now, 0.0))
            asyncio.get_running_loop().call_later(pause_s, self._try_again, key)
        return final

    def _unheard_from_now(self, entry: ExpressMessage) -> ExpressMessage:
        """Returns the entry with the time until which it is tried again."""
        if entry.unheard_until:
            return entry
        now, expires_ms = asyncio.get_running_loop().time(), entry.message.expires_ms
        left_s = UNHEARD_S if expires_ms is None else max(expires_ms - uuids.now_ms(), 0) / 2_000
        return entry._replace(unheard_since=now, unheard_until=now + min(UNHEARD_S, left_s))

    def _try_again(self, key: OrderKey) -> None:
        entries = self._unheard.pop(key, None)
        if entries:
            self._sender.queue.put_back(entries)
            self._sender.wake.set()

    def _soonest_expiry_ms(self) -> int | None:
        """Returns the time until the next message expires, so that its originator gets the answer in time."""
        ends = [end for entry in self._sender.queue if (end := entry.message.expires_ms) is not None]
        return max(min(ends) - uuids.now_ms() + 1, 0) if ends else None
