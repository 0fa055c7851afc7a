"""Egress: one pump per peer and log. Reads after its cursor, sends in batches, moves the cursor when the peer has confirmed.

    log -> read ahead (bounded) -> who wants it? -> priority classes -> send_batch -> confirmed: cursor
                                    view, sample period                   |-> UNAVAILABLE: again, in order, after a pause
                                                                          +-> refused, expired: dead letter

Order holds per (source, sink) within a class: one batch is in flight, and after a failure nothing behind it was tried.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import structlog

from history.chunk import Chunk
from history.log import Log
from streamer.dead_letter import DeadLetters
from streamer.endpoint import Endpoint
from streamer.flow import LAG_RECORDS_MAX, Flow
from streamer.retry import Backoff
from streamer.view import Target, Version, View
from uprotocol import attributes as attrs
from uprotocol import uri as uris
from uprotocol import uuid as uuids
from uprotocol.encoded import Carried, EncodedMessage, decoded, lane
from uprotocol.status import OK, RETRYABLE, UStatusError, code_name
from uprotocol.v1.uattributes_pb2 import UPriority
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.umessage_pb2 import UMessage
from uprotocol.v1.ustatus_pb2 import UStatus

WINDOW_MESSAGES_MAX: Final = 2_000  # read ahead of the peer: two seconds of the slowest broker measured; more only hides a stall
WINDOW_BYTES_MAX: Final = 16 << 20  # of payload, read ahead: 2,000 large messages must not fill a small computer
READ_MESSAGES_MAX: Final = 2_048  # per read of the log from disk: a window, so that a hop to a thread is worth it
READ_BYTES_MAX: Final = 4 << 20  # per read of the log
BATCH_MESSAGES_MAX: Final = 512  # per send_batch: beyond it the cost per message no longer falls
CURSOR_PREFIX: Final = "egress:"
UNDECIDED_WAIT_S: Final = 5.0  # how long a record waits for a uSubscription that is being asked about its topic

log = structlog.get_logger()


Item = tuple[int, Carried]  # seq and message
_RETRYABLE: Final = frozenset(int(code) for code in RETRYABLE)  # plain numbers: an enum's attribute is looked up in Python at each use


class Plan(NamedTuple):
    """What to do with the records of one stream, for one peer."""

    targets: tuple[Target, ...]  # empty: skip
    since: int  # skip up to here
    as_is: bool  # every message, unchanged: the fast way
    add_sink: bool  # one copy per target with the streamer's sink
    drop_sink: bool  # the streamer's sink has done its work


SKIP: Final = Plan((), 0, False, False, False)


class Pump:
    """Sends one log's records to one peer. Owns the cursor `egress:PEER` in that log."""

    def __init__(
        self,
        peer: Endpoint,
        source: Log,
        view: View,
        dead_letters: DeadLetters,
        backoff: Backoff,
        flow: Flow | None = None,
        now_ms: Callable[[], int] = uuids.now_ms,
    ) -> None:
        self.peer, self.log = peer, source
        self._view, self._dead_letters, self._backoff, self._now_ms = view, dead_letters, backoff, now_ms
        self.name = CURSOR_PREFIX + peer.name
        self._lanes: list[deque[Item]] = [deque() for _ in UPriority.values()]  # by priority class
        self._waiting = self._waiting_bytes = 0
        self._plans: dict[int, Plan | None] = {}
        self._plans_version: Version | None = None
        self._due_ms: dict[tuple[int, str], int] = {}  # (stream, authority) -> next message of a thinned topic
        self._wake = asyncio.Event()
        self._read = 0  # last seq read
        self.cursor = 0  # last seq confirmed
        self.retries = 0
        self.gaps = 0  # records that retention took before the peer got them
        self._flow = flow
        self._active_at = -math.inf  # loop time at which the peer last took something, or was given something after that
        self._failing = False  # the last batch was not taken whole
        source.on_append(self._wake.set)

    def __repr__(self) -> str:
        return f"Pump({self.peer.name}, cursor={self.cursor}, read={self._read}, newest={self.log.newest_seq}, waiting={self._waiting})"

    @property
    def backlog(self) -> int:
        """Records of the log that this peer has not been through."""
        return self.log.newest_seq - self.cursor

    @property
    def lag(self) -> float:
        """How far reading is behind: 1 is LAG_RECORDS_MAX, or as many as fill half of the log's room."""
        log = self.log
        unread = log.newest_seq - self._read
        kept = max(log.newest_seq - log.floor_seq, 1)
        return max(unread / LAG_RECORDS_MAX, 2 * log.stored_bytes * unread / kept / log.retention_bytes)

    def is_active(self, since: float) -> bool:
        """True if the peer has taken something since that loop time."""
        return self._active_at >= since

    def wake(self) -> None:
        """Try again now: the peer may be back, or the interest is another."""
        self._backoff.wake()
        self._wake.set()

    def begin(self) -> None:
        """Find the place to go on from. Before anything is listened to: what is taken from then on may be for this peer."""
        stored = self.log.cursor(self.name)
        if stored is None:  # a new peer: what was there before it is not for it
            stored = self.log.newest_seq
            self.log.set_cursor(self.name, stored)
        self.cursor = self._read = stored

    async def run(self) -> None:
        """Pump until cancelled, from where `begin` found it."""
        while True:
            await self._fill()
            if not self._waiting:
                self._confirm()
                self._wake.clear()
                if self._read >= self.log.newest_seq:
                    await self._wake.wait()
                continue
            await self._send()

    # Reading ahead

    def _is_full(self) -> bool:
        return self._waiting >= WINDOW_MESSAGES_MAX or self._waiting_bytes >= WINDOW_BYTES_MAX

    async def _fill(self) -> None:
        """Read until the window is full or the log is at its end."""
        while not self._is_full() and self._read < self.log.newest_seq:
            if self._plans_version != (version := self._view.version):
                self._plans.clear()
                self._plans_version = version
            chunks, covered = await self._next_chunks()
            for chunk in chunks:
                if not await self._plan_all(chunk.streams):
                    return
                self._take(chunk)
                if self._is_full():
                    return
            self._read = max(self._read, covered)

    async def _next_chunks(self) -> tuple[list[Chunk], int]:
        """What follows the last record read, and up to where that is all; from memory where it is there."""
        chunks = self.log.tail(self._read)
        if chunks is not None:
            return chunks, self.log.newest_seq
        if self._read < self.log.floor_seq:
            self._gap(self._read, self.log.floor_seq + 1)
            self._read = self.log.floor_seq
        found = await self.log.scan(self._read, max_records=READ_MESSAGES_MAX, max_bytes=READ_BYTES_MAX)
        for after, before in found.gaps:
            self._gap(after, before)
        return found.chunks, found.covered

    def _gap(self, after: int, before: int) -> None:
        self.gaps += before - after - 1
        log.error("records were lost to retention or damage before the peer got them", peer=self.peer.name, after=after, before=before)

    async def _plan_all(self, streams: list[int]) -> bool:
        """Plan each stream of a chunk; False if the interest changed meanwhile."""
        for stream in set(streams).difference(self._plans):
            plan = self._plan(stream)
            if plan is None:
                try:
                    async with asyncio.timeout(UNDECIDED_WAIT_S):
                        while (plan := self._plan(stream)) is None:
                            self._wake.clear()
                            await self._wake.wait()
                except TimeoutError:
                    topic = uris.format(self.log.stream(stream).source)
                    log.warning("passed over until a uSubscription says who wants it", peer=self.peer.name, topic=topic)
                    plan = SKIP
                if self._plans_version != self._view.version:
                    return False
            self._plans[stream] = plan
        return True

    def _plan(self, stream_id: int) -> Plan | None:
        stream = self.log.stream(stream_id)
        legs = self._view.legs(stream.source, stream.sink, self.log.newest_seq)
        if legs is None:
            return None
        leg = next((leg for leg in legs if leg.peer is self.peer), None)
        if leg is None:
            return SKIP
        directed = stream.sink is not None and attrs.is_streamer_sink(stream.sink)
        add_sink = self.peer.needs_sink and stream.sink is None
        drop_sink = directed and not self.peer.needs_sink
        thinned = all(target.period_ms for target in leg.targets)
        since = min(target.since for target in leg.targets)
        return Plan(leg.targets, since, not (add_sink or drop_sink or thinned), add_sink, drop_sink)

    def _take(self, chunk: Chunk) -> None:
        plans, lanes, taken, size = self._plans, self._lanes, 0, 0
        for seq, stream, message in zip(chunk.seqs, chunk.streams, chunk.messages, strict=True):
            plan = plans[stream]
            assert plan is not None
            if not plan.targets or seq <= plan.since:
                continue
            if plan.as_is:
                lanes[message.stamp.lane if type(message) is EncodedMessage else lane(message.attributes)].append((seq, message))
                taken += 1
                size += len(message.payload)
                continue
            for copy in self._copies(plan, stream, seq, decoded(message)):
                lanes[lane(copy.attributes)].append((seq, copy))
                taken += 1
                size += len(copy.payload)
        self._waiting += taken
        self._waiting_bytes += size
        self._read = chunk.last_seq
        if self._flow is not None:
            self._flow.moved()

    def _copies(self, plan: Plan, stream: int, seq: int, message: UMessage) -> list[UMessage]:
        """The message as the peer is to see it, once or once per authority, thinned by the sample periods."""
        created = uuids.time_ms(message.attributes.id)
        due = [target for target in plan.targets if seq > target.since and self._is_due(stream, target, created)]
        if not due:
            return []
        if plan.add_sink:
            return [_with_sink(message, target.authority) for target in due]
        return [_without_sink(message)] if plan.drop_sink else [message]

    def _is_due(self, stream: int, target: Target, created_ms: int) -> bool:
        """At most one message per period and subscribing authority (sample_period; measured by the publisher's clock)."""
        if target.period_ms is None:
            return True
        key = (stream, target.authority)
        if 0 < self._due_ms.get(key, 0) - created_ms <= target.period_ms:  # further ahead: the clock jumped back, start anew
            return False
        self._due_ms[key] = created_ms + target.period_ms
        return True

    # Sending

    async def _send(self) -> None:
        batch = self._next_batch()
        if not batch:
            return
        transport, loop = self.peer.transport, asyncio.get_running_loop()
        if not self._failing:
            self._active_at = loop.time()
        messages: Sequence[Any] = [message for _, message in batch]
        if not transport.takes_encoded:
            messages = [decoded(message) for message in messages]
        try:
            statuses = await transport.send_batch(messages)
        except UStatusError as error:
            statuses = [error.status] * len(batch)
        again = self._settle(batch, statuses)
        for item in reversed(again):
            self._lanes[lane(item[1].attributes)].appendleft(item)
        self._waiting += len(again)
        self._waiting_bytes += sum(len(message.payload) for _, message in again)
        self._confirm()
        self._failing = bool(again)
        if again:
            self.retries += 1
            await self._backoff.wait()
        else:
            self._active_at = loop.time()
            self._backoff.reset()

    def _next_batch(self) -> list[Item]:
        """Highest class first; what has expired becomes a dead letter instead."""
        batch: list[Item] = []
        now = self._now_ms()
        for queue in reversed(self._lanes):
            while queue and len(batch) < BATCH_MESSAGES_MAX:
                item = queue.popleft()
                self._waiting -= 1
                self._waiting_bytes -= len(item[1].payload)
                if _is_expired(item[1], now):
                    self._dead(item, UCode.DEADLINE_EXCEEDED, "its ttl ran out before the peer took it")
                else:
                    batch.append(item)
        return batch

    def _settle(self, batch: list[Item], statuses: list[UStatus]) -> list[Item]:
        """What has to be sent again."""
        again: list[Item] = []
        sent = 0
        for item, status in zip(batch, statuses, strict=True):
            if status is OK or not status.code:
                sent += 1
            elif status.code in _RETRYABLE:
                again.append(item)  # the ttl is looked at when it is its turn again
            else:
                self._dead(item, status.code, status.message or code_name(status.code))
        self.peer.forwarded += sent
        return again

    def _dead(self, item: Item, code: UCode.ValueType, reason: str) -> None:
        self.peer.dropped["undeliverable"] += 1
        self._dead_letters.add(decoded(item[1]), code, reason, self.peer.name)

    def _confirm(self) -> None:
        """Move the cursor to just before the oldest record that still waits."""
        cursor = min((queue[0][0] - 1 for queue in self._lanes if queue), default=self._read)
        if cursor > self.cursor:
            self.cursor = cursor
            self.log.set_cursor(self.name, cursor)


def _is_expired(message: Carried, now_ms: int) -> bool:
    if type(message) is EncodedMessage:
        return message.stamp.ttl > 0 and message.is_expired(now_ms)
    return attrs.is_expired(message.attributes, now_ms)


def _with_sink(message: UMessage, authority: str) -> UMessage:
    copy = UMessage()
    copy.CopyFrom(message)
    copy.attributes.sink.CopyFrom(attrs.streamer_sink(authority))
    return copy


def _without_sink(message: UMessage) -> UMessage:
    copy = UMessage()
    copy.CopyFrom(message)
    copy.attributes.ClearField("sink")
    return copy
