"""Egress: one pump per peer and log. Reads after its cursor, sends in batches, moves the cursor when the peer has
confirmed.

    log -> read ahead (bounded) -> who wants it? -> priority queue -> send_batch -> confirmed: cursor
     ^                             | sample period                     |-> UNAVAILABLE: again, in order, after a pause
     |                         nobody can say yet, paused: held        |-> address refused, or unheard: held
     '- read back <- decided, resumed, taken again <- holds.py <-------+
                                                                       '-> message refused, expired: dead letter

Order holds per (source, sink) within a class: batches leave one behind the other, of which a network far away has
several under way (flights.py), and after a failure nothing leaves until all of them are answered.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass
from itertools import chain, islice
from operator import itemgetter
from typing import Final, NamedTuple, cast

import structlog

from history.log.log import Log, Passed
from history.records.chunk import Chunk, Scan
from history.records.stream import is_publish
from streamer.egress.blocked import Aside, Item, key_of
from streamer.egress.blocked import Key as StreamKey
from streamer.egress.flights import LAND_S, Flights
from streamer.egress.holds import HELD_HOURS, HOLDER, AddressHold, AddressHolds, Kind, OwedTopics, TopicHold, TopicHolds
from streamer.egress.paused import Pause, Paused
from streamer.egress.priority_queue import PriorityQueue
from streamer.letters.dead_letter import DeadLetters
from streamer.quotas.ledger import units_of
from streamer.walk.endpoint import Endpoint
from streamer.walk.flow import ACTIVE_S, LAG_RECORDS_MAX, LAG_SHARE_MAX, Flow
from streamer.walk.view import Decision, Target, Version, View
from transports.base import NOT_TRIED
from uprotocol import attributes as attrs
from uprotocol import cache as caches
from uprotocol import uuid as uuids
from uprotocol.core.ustreamer.v1.ustreamer_pb2 import Gap
from uprotocol.core.usubscription.wire import to_uri
from uprotocol.encoded import EncodedMessage, Readdressed
from uprotocol.pacing import Backoff, Pace
from uprotocol.status import Settled, UStatusError, code_name, is_nobody_listening, settle
from uprotocol.uri import Key
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.ustatus_pb2 import UStatus
from usubscription_client.table import Topics

# read ahead of the peer: two seconds of the slowest broker measured; more only hides a stall
WINDOW_MESSAGES_MAX: Final = 2_000
WINDOW_BYTES_MAX: Final = 16 << 20  # of payload, read ahead: 2,000 large messages must not fill a small computer
READ_MESSAGES_MAX: Final = 2_048  # per read of the log from disk: a window, so that a hop to a thread is worth it
READ_BYTES_MAX: Final = 4 << 20  # per read of the log
BATCH_MESSAGES_MAX: Final = 512  # per send_batch: beyond it the cost per message no longer falls
CURSOR_PREFIX: Final = "egress:"
# where a peer began that was new while records waited for one that is not configured: after that seq it has had its own
BEGAN_PREFIX: Final = "began:"
RECHECK_TOPICS: Final = 256  # topics looked at in one step, some milliseconds of the loop
# dead letters of what retention took before the peer was back; beyond it only the range is told
PASSED_LETTERS_MAX: Final = 100
# after a failure of a network that is there: it may be one stream's, and others should not wait long
CONNECTED_WAIT_MS_MAX: Final = 500
ABSENT_MS_MAX: Final = 7 * 24 * 3_600_000  # for so long an endpoint that is away holds retention by age
TRIED_AT_ONCE: Final = 32  # first messages of held addresses that are sent in one round
TRY_EVERY_S: Final = 0.1  # between two rounds, so that thousands of held addresses don't delay live messages
# once the first messages of some were taken, others are tried for so long, and all of these are read back together
GATHER_S: Final = 0.2
GATHERED_MAX: Final = 512
LETTERS_OF_HOLD_MAX: Final = 100  # dead letters of one that has waited too long; beyond it only the range is told
# a "no" that a person or time can mend, and that goes for more than this message
HELD_CODES: Final = frozenset(
    {
        UCode.PERMISSION_DENIED,
        UCode.UNAUTHENTICATED,
        UCode.RESOURCE_EXHAUSTED,
        UCode.FAILED_PRECONDITION,
        UCode.NOT_FOUND,
        UCode.ABORTED,
        UCode.CANCELLED,
    }
)

log = structlog.get_logger()


class Plan(NamedTuple):
    """What to do with the records of one stream, for one peer."""

    targets: tuple[Target, ...]
    since: int  # none of them wants what came up to here
    as_is: bool  # every message, unchanged: the fast way
    copies: tuple[Readdressed, ...]  # one for each target, with the streamer's sink; empty: one for all of them
    whole: Readdressed | None  # takes away the streamer's sink, which has done its work
    park: bool  # nobody can say yet who else wants it
    held: tuple[tuple[AddressHold, int], ...] = ()  # others, whose address is held: behind what, after which seq


SKIP: Final = Plan((), 0, False, (), None, False)


@dataclass(slots=True)
class ReadBack:
    """What was held and is to leave now, read once more from the log up to `until`; then it is live again."""

    targets: dict[int, tuple[Target, ...]]  # by stream: who has not had it, and since when; empty: nothing is read back
    topics: Set[int]  # those of them that are TopicHolds
    addresses: list[AddressHold]
    place: int
    until: int

    @property
    def is_under_way(self) -> bool:
        return bool(self.targets or self.addresses)


class Pump:
    """Sends one log's records to one peer. Owns the cursor `egress:PEER` in that log, and the peer's holds."""

    def __init__(
        self,
        peer: Endpoint,
        source: Log,
        view: View,
        dead_letters: DeadLetters,
        backoff: Backoff,
        flow: Flow,
        paused: Paused,
        *,
        absent_ms_max: int = ABSENT_MS_MAX,
        refused_hours: float = HELD_HOURS,
        unheard_hours: float = HELD_HOURS,
        on_gap: Callable[[Endpoint, Log, int, int, Gap.Reason.ValueType], None] = lambda *_: None,
        pace: Pace | None = None,
    ) -> None:
        self.peer, self.log = peer, source
        self._view, self._dead_letters, self._backoff = view, dead_letters, backoff
        self.name = CURSOR_PREFIX + peer.name
        self._queue: PriorityQueue[Item] = PriorityQueue()
        self._plans: dict[int, Plan] = {}
        self._plans_version: Version | None = None
        self._paused, self._pauses_known = paused, frozenset[Pause]()
        self.topic_holds = TopicHolds(source, peer.name, absent_ms_max)
        self.address_holds = AddressHolds(source, peer.name, _loop_time, refused_hours * 3_600, unheard_hours * 3_600)
        self.owed = OwedTopics(source, peer.name)
        self._are_streams_found = False  # of the holds that are there from before the start
        self._trying: dict[tuple[int, bytes], AddressHold] = {}  # by seq and addresses of the message that is tried
        self._taken: set[AddressHold] = set()  # whose first message the network has taken ...
        self._read_back_at = 0.0  # ... and loop time at which they are read back
        self._try_at = 0.0  # loop time before which no more are tried
        # until the batches that had left before these were held are answered
        self._held_lately: set[AddressHold] = set()
        self._held_lately_until = 0  # so many batches are
        self._heard: set[int] = set()  # streams of which the network has taken something since the start
        self._recheck: dict[int, None] = {}  # held topics to be looked at: the interest has changed
        self._lacks_room = False  # to hold what comes next
        self._found: dict[int, tuple[Target, ...]] = {}  # held topics that are wanted, and by whom
        self._back = ReadBack({}, frozenset(), [], 0, 0)
        # streams that don't get through though others do
        self.aside = Aside(backoff.sibling(), _loop_time)
        # by stream and authority: when the next message of a thinned topic is due
        self._due_ms: dict[int, dict[str, int]] = {}
        self._sending: list[Item] = []  # taken from the queue, and neither under way nor settled
        self._wake = asyncio.Event()
        self._flights: Flights[Item] = Flights(peer, self._wake.set)
        self._read = 0  # last seq read
        self.cursor = 0  # last seq confirmed
        self.is_new = False  # it had no cursor before this start
        self.retries = 0
        self.gaps = 0  # records that were lost to retention or damage before the peer got them
        self.trouble = ""  # why reading or sending does not go on
        self._flow, self._on_gap, self._pace = flow, on_gap, pace
        self.is_followed = False  # the peer takes the publishes by itself (handover.py)
        self._pushed_to = 0  # while they were pushed again from further back: up to here all else has left
        self._between: deque[tuple[Callable[[], int], asyncio.Future[int]]] = deque()  # to be done while nothing leaves
        # how long the peer has been away, while the streamer ran, as it was last noted (claims.py)
        self.absent_ms, self._absent_ms_max = 0, absent_ms_max
        self._letters_left = PASSED_LETTERS_MAX
        # loop time at which the peer last took something, or was given something after that
        self._active_at = -math.inf
        self._failing = False  # the last batch was not taken whole
        flow.follow(self)
        paused.on_change(self.wake)
        source.on_append(self._wake.set)
        source.on_passed(self._passed)
        source.on_forgotten(self._forgotten)
        source.keep_streams(self._in_hand)
        peer.on_heard(self._heard_at)

    def __repr__(self) -> str:
        places = f"cursor={self.cursor}, read={self._read}, newest={self.log.newest_seq}"
        return f"Pump({self.peer.name}, {places}, waiting={len(self._queue)})"

    @property
    def backlog(self) -> int:
        """Records of the log that this peer has not been through."""
        return self.log.newest_seq - self.cursor

    def lag(self) -> float | None:
        """How far reading is behind: 1 is LAG_SHARE_MAX of what is in memory; of a volatile log half of that, or
        LAG_RECORDS_MAX. None: the peer takes nothing.

        Who is behind because we send slowly is no reason to hold up senders: its records are on disk.
        """
        log = self.log
        if self._active_at < asyncio.get_running_loop().time() - ACTIVE_S:
            return None
        if log.durable:
            return 0.0 if self._pace is not None else log.tail_share(self._read) / LAG_SHARE_MAX
        return max((log.newest_seq - self._read) / LAG_RECORDS_MAX, 2 * log.tail_share(self._read))

    @property
    def place(self) -> int:
        return self._read

    def look_at(self, topics: Topics) -> None:
        """The interest in them has changed. What is held of them may be wanted now; about the others the view is
        asked when a record comes."""
        held = self.topic_holds
        is_concerned = held and (topics is None or any(self.log.known_id(to_uri(one)) in held for one in topics))
        if is_concerned or self._lacks_room:
            self._wake.set()

    def wake(self) -> None:
        """Try again now: the peer may be back, or what is paused is another."""
        self._backoff.wake()
        self.aside.wake()
        self._wake.set()

    def reconnected(self) -> None:
        """The network is there again: what it has refused before it may take now."""
        self.address_holds.try_all()
        self.wake()

    def _heard_at(self, addresses: Sequence[str] | None) -> None:
        """Somebody listens at these addresses now (UTransport.on_heard)."""
        if addresses is None:
            self.address_holds.try_all("unheard")
        else:
            for address in addresses:
                if (hold := self.address_holds.at(address)) is not None:
                    self.address_holds.try_now(hold)
        self._wake.set()

    def begin(self) -> None:
        """Find the place to go on from. Before anything is listened to: what is taken from then on may be for this
        peer."""
        stored = self.log.cursor_rows().get(self.name)
        if stored is not None:
            self.cursor, self.absent_ms = min(stored.seq, self.log.newest_seq), stored.absent_ms
        elif self.log.cursors_lost:  # it may be ours that can't be read any more: sending again beats skipping
            self.cursor = self.log.floor_seq
        else:  # a new peer: what was there before it is not for it
            self.cursor, self.is_new = self.log.newest_seq, True
        self._read = self.cursor
        self._save()
        self.topic_holds.load()
        self.address_holds.load()
        for hold in self.address_holds.merged:  # which addresses it had nobody has kept: each is tried by itself
            self.address_holds.taken(hold)
            self._taken.add(hold)
        self.owed.load()

    def absent_after(self, ms: int, *, away_ms: int) -> int:
        """`absent_ms` when so much time has passed since it was noted, and of it the peer has been away for the last
        `away_ms`."""
        return self.absent_ms + ms if away_ms >= ms else away_ms

    def waited(self, ms: int, *, away_ms: int) -> None:
        """So much time has passed, and of it the peer has been away for the last `away_ms`."""
        absent_ms = self.absent_after(ms, away_ms=away_ms)
        if absent_ms != self.absent_ms:
            self.absent_ms = absent_ms
            self._save()
        self.topic_holds.wait(ms)

    def _save(self) -> None:
        """Retention by age keeps what the peer has not had, until it has been away for too long."""
        holds = self.absent_ms < self._absent_ms_max
        self.log.set_cursor(self.name, self.cursor, holds=holds, absent_ms=self.absent_ms, holder=HOLDER)

    async def run(self) -> None:
        """Pump until cancelled, from where `begin` found it. What is under way then is waited for, LAND_S at most."""
        end: BaseException | None = None
        while end is None:
            try:
                await self._step()
            except BaseException as error:
                end = error
        try:
            await self._flights.answered(LAND_S)
        finally:
            self._settle(*self._flights.landed())
            self._flights.drop()
        raise end

    # The publishes, handed over and taken back

    async def stop_publishes(self) -> int:
        """Send no publish any more; up to which seq they all have left, but for those that are `owed` then."""
        return await self._do_between(self._stop_publishes)

    async def resume_publishes(self, seq: int, had: int = 0) -> None:
        """Send those again that have a greater seq, and all that come; and what is owed beyond `had`."""
        await self._do_between(lambda: self._resume_publishes(seq, had))

    def go_back(self, seq: int) -> None:
        """Before it runs: publishes after `seq` are pushed (again)."""
        self._resume_publishes(seq, 0)

    async def _do_between(self, what: Callable[[], int]) -> int:
        done: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._between.append((what, done))
        self.wake()
        return await done

    async def _change_publishes(self) -> None:
        await self._flights.answered()
        await self._land()
        self._heed()
        await self._find_streams_of_holds()
        while self._between:
            what, done = self._between.popleft()
            try:
                result = what()
            except UStatusError as error:
                if not done.done():
                    done.set_exception(error)
            else:
                if not done.done():
                    done.set_result(result)

    def _is_publish(self, stream: int) -> bool:
        return self.log.knows_stream(stream) and is_publish(self.log.stream(stream))

    @property
    def holds_publishes(self) -> bool:
        """Something of them waits at a place of its own."""
        return bool(self.owed) or any(map(self._is_publish, self.topic_holds)) or bool(self.address_holds)

    def _stop_publishes(self) -> int:
        waiting = self.aside.known_streams.union(item[2] for item in self._queue)
        publishes = set(filter(self._is_publish, waiting))
        unsent = self._take_out(lambda item: item[2] in publishes)
        for item in unsent:
            self._is_not_tried(item)
        # of what was held, and is tried or read back, the position of its hold counts
        first = () if self._back.is_under_way else [item[0] for item in unsent if self._holding(item) is None]
        self._owe_publishes()
        self.is_followed = True
        self._plans.clear()
        return min([self._read, *(seq - 1 for seq in first)])

    def _owe_publishes(self) -> None:
        """What is held of publishes is not held any more, but to be had from our history from there on."""
        owed: dict[int, int] = {}
        for stream in list(filter(self._is_publish, self.topic_holds)):
            owed[stream] = self.topic_holds[stream].after
            self.topic_holds.forget(stream)
            self._found.pop(stream, None)
            self._recheck.pop(stream, None)
        for hold in list(self.address_holds.values()):
            publishes = [one for one in hold.streams if self._is_publish(one) and self._targets_of(hold, one)]
            for stream in publishes:
                owed[stream] = min(hold.after, owed.get(stream, hold.after))
            hold.streams.difference_update(publishes)
            self.address_holds.forget_head(hold)
            if not hold.streams:
                self.address_holds.drop(hold)
        for stream in list(filter(self._is_publish, self._back.targets)):
            del self._back.targets[stream]
        self.owed.add(owed)

    def _resume_publishes(self, seq: int, had: int) -> int:
        self.is_followed = False
        for stream, after in self.owed.items():
            if self.log.knows_stream(stream) and max(after, had) < seq:
                self.topic_holds.hold(stream, max(after, had))
                self._recheck[stream] = None
        self.owed.clear_all()
        self._plans.clear()
        if seq < self._read:
            self._pushed_to, self._read = self._read, max(seq, self.log.floor_seq)
            self.cursor = min(self.cursor, self._read)
            self._save()
        return self._read

    async def _step(self) -> None:
        self._wake.clear()
        if self._between:
            await self._change_publishes()
        before, at_the_end = self.trouble, False
        try:
            at_the_end = await self._fill()
            self.trouble = ""
        except UStatusError as error:  # of the log
            self.trouble = str(error)
        if self.trouble:
            if self.trouble != before:
                log.error("the log can't be read for a peer; trying again", peer=self.peer.name, error=self.trouble)
            await self._backoff.wait()
            return
        if before:
            log.info("the log can be read for a peer again", peer=self.peer.name)
            self._backoff.reset()
        if self._flights.are_answered:
            await self._land()
        elif self._may_send:
            await self._heed_in_order()  # what was paused since does not leave
            await self._send()
        else:
            self._confirm()
            if at_the_end or self.aside or self._flights or self.address_holds:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout_at(self._next_at):
                        await self._wake.wait()

    @property
    def _batch_max(self) -> int:
        """Messages. Where they are paced, a quarter of a second's: what is urgent waits behind a batch, and one that
        has waited for the share of several seconds would leave at once."""
        return BATCH_MESSAGES_MAX if self._pace is None else min(BATCH_MESSAGES_MAX, max(1, self._pace.per_s // 4))

    @property
    def _may_send(self) -> bool:
        if not self._flights:
            return self._queue.messages > 0 or (
                bool(self.aside) and self.aside.due_at <= asyncio.get_running_loop().time()
            )
        is_full = self._queue.messages >= self._batch_max or self._queue.bytes >= WINDOW_BYTES_MAX
        return self._queue.messages > 0 and self._flights.may_leave(is_full=is_full)

    @property
    def _next_at(self) -> float | None:
        """Loop time from which on something that waits may leave, though nobody wakes us."""
        if self._flights:
            return self._flights.leaves_at(self._queue.messages)
        due = [
            self._held_due_at,
            self.aside.due_at if self.aside else None,
            self._read_back_at if self._taken else None,
        ]
        return min((at for at in due if at is not None), default=None)

    # Reading ahead

    def _is_full(self) -> bool:
        is_full = self._queue.messages >= WINDOW_MESSAGES_MAX or self._queue.bytes >= WINDOW_BYTES_MAX
        return is_full or (bool(self.aside) and self.aside.is_full)

    async def _fill(self) -> bool:
        """Read until the window is full; True if there is nothing to read for now."""
        while not self._is_full():
            await self._heed_in_order()
            if (due_at := self._held_due_at) is not None and due_at <= _loop_time():
                await self._try_held()
            if self._recheck:
                await self._look_at_held_topics()
            elif self._back.is_under_way:
                if not await self._read_back():
                    return False
            elif self._found or self._is_time_to_read_back:
                if self._queue or self._flights:
                    return False  # what was read before leaves first
                await self._begin_reading_back()
            elif self._read >= self.log.newest_seq:
                return True
            else:
                chunks, covered = self.log.tail(self._read), self.log.newest_seq
                if chunks is None:
                    if self._read < self.log.floor_seq:
                        self._gap(self._read, self.log.floor_seq + 1)
                        self._read = self.log.floor_seq
                    found = await self._scan(self._read)
                    chunks, covered = found.chunks, found.covered
                    self._heed()
                    if self._recheck:  # what is held comes first
                        continue
                for chunk in chunks:
                    if chunk.last_seq <= self._read:  # told as passed by retention while it was read
                        continue
                    if self._is_full():
                        return False
                    if not self._take(chunk):
                        return not self._queue
                self._read = max(self._read, covered)
        return False

    def _heed(self) -> None:
        """Go by the rules, the interest and the pauses that are in force now."""
        version, before = self._view.version, self._plans_version
        if version == before:
            return
        self._plans_version = version
        topics = self._view.changed_since(before) if before is not None else None
        if topics is not None:
            for topic in sorted(topics):  # so that a run can be replayed
                self._heed_topic(topic)
            return
        self._plans.clear()
        self._are_streams_found = False
        pauses = frozenset(self._paused)
        if fresh := pauses - self._pauses_known:
            self._hold_back(fresh)
        self._pauses_known = pauses
        self._recheck = dict.fromkeys(self.topic_holds)

    def _heed_topic(self, topic: Key) -> None:
        stream = self.log.known_id(to_uri(topic))
        if stream is not None:
            self._plans.pop(stream, None)
            if stream in self.topic_holds:
                self._recheck[stream] = None

    async def _scan(self, place: int, streams: Set[int] | None = None, until: int | None = None) -> Scan:
        """What follows `place` and is not in memory any more."""
        found = await self.log.scan(
            place, max_records=READ_MESSAGES_MAX, max_bytes=READ_BYTES_MAX, streams=streams, until=until
        )
        for after, before in found.gaps:
            self._gap(after, before)
        return found

    def _gap(self, after: int, before: int) -> None:
        self.gaps += before - after - 1
        what = "records were lost to retention or damage before the peer got them"
        log.error(what, peer=self.peer.name, after=after, before=before)
        is_retention = before - 1 <= self.log.floor_seq
        reason = Gap.REASON_RETENTION if is_retention else Gap.REASON_CORRUPTION
        self._on_gap(self.peer, self.log, after, before, reason)

    def _wanted(self, stream_id: int) -> tuple[tuple[Target, ...], bool]:
        """Who at the peer wants this stream, as far as is known, and whether somebody may yet turn up."""
        if not self.log.knows_stream(stream_id):  # retention has passed it since it was read
            return (), False
        stream = self.log.stream(stream_id)
        if self._view.comes_from(self.peer, stream.source) or (self.is_followed and is_publish(stream)):
            return (), False
        return self._mine(self._view.decide(stream.source, stream.sink, self.log))

    def _mine(self, decision: Decision) -> tuple[tuple[Target, ...], bool]:
        leg = next((leg for leg in decision.legs if leg.peer is self.peer), None)
        return () if leg is None else leg.targets, self.peer in decision.open

    def _plan(self, stream_id: int) -> Plan:
        targets, is_open = self._wanted(stream_id)
        held = self.topic_holds.get(stream_id)
        if held is None and (due := self._due_ms.get(stream_id)):  # of who wants it no more nothing is kept
            self._due_ms[stream_id] = {
                target.authority: due[target.authority] for target in targets if target.authority in due
            }
        if held is not None:
            targets = tuple(target for target in targets if target.authority in held.served)
        elif not self.peer.needs_sink and any(target.period_ms is None and not target.since for target in targets):
            is_open = False  # the peer's network gets each message anyway
        return self._plan_for(stream_id, targets, park=is_open and held is None)

    def _plan_for(self, stream_id: int, targets: tuple[Target, ...], *, park: bool) -> Plan:
        held: tuple[tuple[AddressHold, int], ...] = ()
        if self.address_holds and targets:
            targets, held = self._without_held(stream_id, targets)
        return self._plan_of(stream_id, targets, park=park, held=held)

    def _plan_of(
        self, stream_id: int, targets: tuple[Target, ...], *, park: bool, held: tuple[tuple[AddressHold, int], ...]
    ) -> Plan:
        if not targets:
            return SKIP._replace(park=park, held=held) if park or held else SKIP
        stream = self.log.stream(stream_id)
        copies: tuple[Readdressed, ...] = ()
        whole = None
        if self.peer.needs_sink and stream.sink is None:
            copies = tuple(Readdressed(stream.source, attrs.streamer_sink(target.authority)) for target in targets)
        elif stream.sink is not None and attrs.is_streamer_sink(stream.sink) and not self.peer.needs_sink:
            whole = Readdressed(stream.source, None)
        thinned = all(target.period_ms for target in targets)
        since = min(target.since for target in targets)
        if not is_publish(stream):
            since = max(since, self._pushed_to)
        as_is = not (copies or whole or thinned or park or held)
        return Plan(targets, since, as_is, copies, whole, park, held)

    def _without_held(
        self, stream_id: int, targets: tuple[Target, ...]
    ) -> tuple[tuple[Target, ...], tuple[tuple[AddressHold, int], ...]]:
        """Those whose address is not held, and what holds those of the others."""
        going, held = list[Target](), dict[AddressHold, int]()
        for target in targets:
            hold = self._hold_of(stream_id, target)
            if hold is None or hold.is_returning:
                going.append(target)
            else:
                hold.streams.add(stream_id)
                held[hold] = min(target.since, held.get(hold, target.since))
        return tuple(going), tuple(held.items())

    def _hold_of(self, stream_id: int, target: Target) -> AddressHold | None:
        """What holds the messages of this stream to `target`."""
        stream = self.log.stream(stream_id)
        source, sink = stream.source, stream.sink
        if self.peer.needs_sink and sink is None:
            sink = attrs.streamer_sink(target.authority)
        elif sink is not None and attrs.is_streamer_sink(sink) and not self.peer.needs_sink:
            sink = None
        return self.address_holds.of(self.peer.address_of(source, sink), source.authority_name)

    def _take(self, chunk: Chunk) -> bool:
        """What is new in `chunk`, and wanted, to the queue. False if more of its topics would have to be held than
        may be."""
        plans = self._plans
        if len(plans) > caches.streams_max:
            plans.clear()  # here, before those of this chunk are made: all of them are needed at once
        for stream in chunk.stream_set.difference(plans):
            plans[stream] = self._plan(stream)
        wanted = [plan for stream in chunk.stream_set if (plan := plans[stream]) is not SKIP]
        parks = sum([plan.park for plan in wanted])
        self._lacks_room = bool(parks) and parks > self.topic_holds.room
        if self._lacks_room:
            return False
        fresh = chunk.after(self._read)
        if len(wanted) == len(chunk.stream_set) and all(plan.as_is and plan.since < fresh.first_seq for plan in wanted):
            self._queue.add(list(_items(fresh)))
        elif wanted:
            self._queue.add([copy for item in _items(fresh) for copy in self._wanted_of(item)])
        self._read = chunk.last_seq
        if self._flow.holds:
            self._flow.moved()
        return True

    def _wanted_of(self, item: Item) -> list[Item]:
        """What of it leaves, by the plan for its stream; holds that first where it has to be."""
        seq, _, stream = item
        plan = self._plans[stream]
        if plan.park:
            self.topic_holds.park(stream, seq - 1, plan.targets)
            plan = self._plans[stream] = self._plan(stream)
        for hold, since in plan.held:
            if seq > since:
                self.address_holds.passed(hold, seq)
        if seq <= plan.since or not plan.targets:
            return []
        return [item] if plan.as_is else self._copies(plan, item)

    def _copies(self, plan: Plan, item: Item) -> list[Item]:
        """The message as the peer is to see it, once or once per authority, thinned by the sample periods."""
        seq, message, stream = item
        created = message.created_ms
        due = [
            place
            for place, target in enumerate(plan.targets)
            if seq > target.since and self._is_due(stream, target, created)
        ]
        if plan.copies:
            return [(seq, plan.copies[place].of(message), stream) for place in due]
        return [(seq, message if plan.whole is None else plan.whole.of(message), stream)] if due else []

    def _is_due(self, stream: int, target: Target, created_ms: int) -> bool:
        """At most one message per period and subscribing authority (sample_period; measured by the publisher's
        clock)."""
        if target.period_ms is None:
            return True
        due = self._due_ms.setdefault(stream, {})
        # further ahead: the clock jumped back, start anew
        if 0 < due.get(target.authority, 0) - created_ms <= target.period_ms:
            return False
        due[target.authority] = created_ms + target.period_ms
        return True

    # Topics that were undecided or paused

    async def _look_at_held_topics(self) -> None:
        """The interest has changed: which of them are wanted now, and which are not?"""
        for stream in list(islice(self._recheck, RECHECK_TOPICS)):
            del self._recheck[stream]
            held = self.topic_holds.get(stream)
            if held is None:
                continue
            targets, is_open = self._wanted(stream)
            missing = self._missing(held, targets)
            if missing:
                self._found[stream] = missing
                continue
            self._found.pop(stream, None)
            self.topic_holds.serve(stream, (target for target in targets if target.authority not in held.served))
            self._plans.pop(stream, None)
            if not is_open and stream not in self._back.topics:
                self.topic_holds.forget(stream)
        await asyncio.sleep(0)

    def _missing(self, held: TopicHold, targets: tuple[Target, ...]) -> tuple[Target, ...]:
        """Those who want what was held and have not had it."""
        if held.whole and not self.peer.needs_sink:
            return ()
        return tuple(target for target in targets if target.authority not in held.served and target.since < self._read)

    # Reading back

    async def _begin_reading_back(self) -> None:
        """All that was found to be wanted, or taken, since the last time."""
        await self._find_streams_of_holds()
        targets: dict[int, tuple[Target, ...]] = {}
        topics = {stream: those for stream, those in self._found.items() if stream in self.topic_holds}
        for stream, those in topics.items():
            after = self.topic_holds[stream].after
            targets[stream] = tuple(one._replace(since=max(one.since, after)) for one in those)
        taken = [hold for hold in self._taken if hold.is_taken and not hold.is_over]
        for hold in taken:
            hold.is_taken, hold.is_returning = False, True
            for stream, more in (await self._targets_in(hold)).items():
                targets[stream] = _both(targets.get(stream, ()), more)
        for hold in taken:
            self.address_holds.uncover(hold)
        place = min([target.since for those in targets.values() for target in those], default=self._read)
        self._back = ReadBack(targets, topics.keys(), taken, place, self._read)
        self._found, self._taken = {}, set()

    async def _find_streams_of_holds(self) -> None:
        """Of those that are there from before the start: which streams they had nobody has kept."""
        if self._are_streams_found or not any(hold.is_loaded for hold in self.address_holds.values()):
            return
        self._are_streams_found = True
        for place, stream in enumerate(self.log.streams()):
            for hold in self._holds_of(stream.id):
                hold.streams.add(stream.id)
            if place % RECHECK_TOPICS == RECHECK_TOPICS - 1:
                await asyncio.sleep(0)

    def _holds_of(self, stream_id: int) -> list[AddressHold]:
        """What holds messages of this stream, whether it is paused or not."""
        if not self.address_holds or not self.log.knows_stream(stream_id):
            return []
        stream = self.log.stream(stream_id)
        targets, _ = self._mine(self._view.wanted(stream.source, stream.sink, self.log))
        return [hold for target in targets if (hold := self._hold_of(stream_id, target)) is not None]

    def _targets_of(self, hold: AddressHold, stream: int) -> tuple[Target, ...]:
        """Who wants what of this stream is in it, and since when."""
        targets, _ = self._wanted(stream)
        return tuple(
            target._replace(since=max(target.since, hold.after))
            for target in targets
            if self._hold_of(stream, target) is hold
        )

    async def _targets_in(self, hold: AddressHold) -> dict[int, tuple[Target, ...]]:
        """The same of all its streams."""
        targets: dict[int, tuple[Target, ...]] = {}
        for place, stream in enumerate(list(hold.streams)):
            if those := self._targets_of(hold, stream):
                targets[stream] = those
            if place % RECHECK_TOPICS == RECHECK_TOPICS - 1:
                await asyncio.sleep(0)
        return targets

    async def _read_back(self) -> bool:
        """One step; False while what was read has to leave first."""
        back = self._back
        if back.place < back.until and back.targets:
            found = await self._scan(back.place, back.targets.keys(), back.until)
            now = uuids.now_ms()
            for item in chain.from_iterable(map(_items, found.chunks)):
                self._add_again(item, now)
            back.place = max(back.place, found.covered)
            return True
        if self._queue or self._flights or not self.aside.known_streams.isdisjoint(back.targets):
            return False  # the positions of these holds stand until all of it was confirmed
        self._back = ReadBack({}, frozenset(), [], 0, 0)
        for stream in back.topics:
            if stream in self.topic_holds and stream in back.targets:
                self.topic_holds.serve(stream, back.targets[stream])
                self._plans.pop(stream, None)
                self._recheck[stream] = None
        for hold in back.addresses:
            if hold.is_returning and not hold.is_over:
                self._release(hold)
        return True

    def _add_again(self, item: Item, now_ms: int) -> None:
        """To the queue, what of it was found missing."""
        seq, message, stream = item
        targets = self._back.targets.get(stream, ())
        if all(seq <= target.since for target in targets):
            return
        if stream not in self._back.topics and message.is_expired(now_ms):
            self.peer.dropped["expired_while_held"] += 1
            return
        plan = self._plan_for(stream, targets, park=False)
        for hold, since in plan.held:
            if seq > since:
                self.address_holds.passed(hold, seq)
        self._queue.add(self._copies(plan, item))

    def _release(self, hold: AddressHold) -> None:
        """Nothing waits in it any more."""
        for stream in hold.streams:
            self._plans.pop(stream, None)
        self.address_holds.drop(hold)

    # Addresses that the network refuses, or where nobody listens

    @property
    def _may_try_held(self) -> bool:
        """Not while something is read back, since that ends only when nothing is under way."""
        return not (self._back.is_under_way or self._found or self._is_time_to_read_back)

    @property
    def _held_due_at(self) -> float | None:
        """Loop time at which some are to be tried."""
        due_at = self.address_holds.next_at if self._may_try_held else None
        return None if due_at is None else max(due_at, self._try_at)

    @property
    def _is_time_to_read_back(self) -> bool:
        return bool(self._taken) and (len(self._taken) >= GATHERED_MAX or self._read_back_at <= _loop_time())

    async def _try_held(self) -> None:
        """Send the first message of those whose time has come, in front of what waits."""
        self._try_at = _loop_time() + TRY_EVERY_S
        await self._find_streams_of_holds()
        due = deque(self.address_holds.take_due(TRIED_AT_ONCE))
        try:
            while due:
                await self._try(due[0])
                due.popleft()
        finally:
            for hold in due:  # the log can't be read
                self.address_holds.not_tried(hold)

    async def _try(self, hold: AddressHold) -> None:
        if self.address_holds.is_at_its_limit(hold):
            await self._end_hold(hold)
            return
        first = await self._first_of(hold)
        if hold.is_over:  # while it was read
            return
        if first is None:
            self._release(hold)
            return
        self._trying[first[0], first[1].stamp.address], hold.tried = hold, first[0]
        self._queue.put_back([first])

    async def _first_of(self, hold: AddressHold) -> Item | None:
        """The first message that waits; None: nothing does."""
        head, now = hold.head, uuids.now_ms()
        if head is not None and not head[1].is_expired(now) and self._is_wanted(head, hold):
            return head
        while True:
            after, until = hold.after, self._read
            targets = await self._targets_in(hold)
            if after >= until or not targets:
                return None
            found = await self._scan(after, targets.keys(), until)
            for item in chain.from_iterable(map(_items, found.chunks)):
                wanted = tuple(one for one in targets.get(item[2], ()) if item[0] > one.since)
                if not wanted:
                    continue
                if item[1].is_expired(now):
                    self.peer.dropped["expired_while_held"] += 1
                    continue
                if copies := self._copies(self._unheld_plan(item[2], wanted), item):
                    self.address_holds.move(hold, item[0] - 1)
                    return copies[0]
            if found.covered <= after or hold.is_over:
                return None
            self.address_holds.move(hold, found.covered)

    def _is_wanted(self, item: Item, hold: AddressHold) -> bool:
        """Somebody still wants it there."""
        return any(item[0] > target.since for target in self._targets_of(hold, item[2]))

    async def _end_hold(self, hold: AddressHold) -> None:
        """It has waited for as long as it may."""
        after, until = hold.after, self._read
        targets = await self._targets_in(hold)
        found = await self._scan(after, targets.keys(), until) if targets else None
        why = f"{hold.why}; it has waited for as long as it may (egress.{hold.kind}_hours)"
        letters = 0
        for item in chain.from_iterable(map(_items, found.chunks)) if found is not None else ():
            wanted = tuple(one for one in targets.get(item[2], ()) if item[0] > one.since)
            for copy in self._copies(self._unheld_plan(item[2], wanted), item) if wanted else ():
                letters += 1
                if letters <= LETTERS_OF_HOLD_MAX:
                    self._dead(copy, hold.code, why)
        rest = max(hold.records, letters) - min(letters, LETTERS_OF_HOLD_MAX)
        self.peer.dropped["held_too_long"] += rest
        what = "messages are not tried any more: the network did not take them for as long as they may wait"
        counts = {"records": max(hold.records, letters), "dead_letters": min(letters, LETTERS_OF_HOLD_MAX)}
        log.error(what, endpoint=self.peer.name, to=hold.name, why=hold.why, after=after, until=until, **counts)
        if rest:
            self._on_gap(self.peer, self.log, after, until + 1, Gap.REASON_UNDELIVERED)
        self.address_holds.ended += 1
        if not hold.is_over:
            self._release(hold)

    def _unheld_plan(self, stream: int, targets: tuple[Target, ...]) -> Plan:
        """For these targets, though their address is held."""
        return self._plan_of(stream, targets, park=False, held=())

    def _sort_out_held(self, settled: Settled[Item]) -> Settled[Item]:
        """What of it was sent, leaves again or is a dead letter; what is held waits from now on."""
        sent, again, dead = list(settled.sent), list[tuple[Item, UStatus]](), list[tuple[Item, UStatus]]()
        held = list[tuple[Item, UStatus, Kind]]()
        for item, status in settled.again:
            if not is_nobody_listening(status):
                again.append((item, status))
            elif self.log.durable and item[1].stamp.type == attrs.PUBLISH:
                held.append((item, status, "unheard"))
            else:
                self.peer.dropped["nobody_listens"] += 1
        for item, status in settled.refused:
            if status.code not in HELD_CODES:
                dead.append((item, status))
            elif self.log.durable:
                held.append((item, status, "refused"))
            elif status.code == UCode.RESOURCE_EXHAUSTED:
                again.append((item, status))
            else:
                dead.append((item, status))
        if self._trying:
            tried = {seq for seq, _ in self._trying}
            for item in settled.sent:
                if item[0] in tried and (hold := self._no_longer_tried(item)) is not None and not hold.is_over:
                    self.address_holds.taken(hold)
                    if hold.unit.startswith("=") and hold.tried == item[0]:
                        self.address_holds.move(hold, item[0])
                    if not self._taken:
                        self._read_back_at = _loop_time() + GATHER_S
                    self._taken.add(hold)
            for item, _ in dead:
                self._next_is_tried(item)
        for item, status, kind in self._hold(held):
            if kind == "refused":
                dead.append((item, status))
            else:
                self.peer.dropped["nobody_listens"] += 1
        if self._held_lately:
            self._look_at_taken(settled.sent)
        return Settled(sent, again, dead)

    def _hold_what_is_stuck(self, settled: Settled[Item]) -> Settled[Item]:
        """While something is read back, what of it does not get through though others do waits as if it were refused:
        the end of the reading back must not wait for it, and its place is on disk."""
        is_stuck = {key_of(item[1]) for item, status in settled.again if status.message != NOT_TRIED}
        held, again = list[tuple[Item, UStatus, Kind]](), list[tuple[Item, UStatus]]()
        for item, status in settled.again:
            if item[0] <= self._back.until and key_of(item[1]) in is_stuck and self.log.durable:
                held.append((item, status, "refused"))
            else:
                again.append((item, status))
        again += [(item, status) for item, status, _ in self._hold(held)]
        return settled._replace(again=again)

    def _no_longer_tried(self, item: Item) -> AddressHold | None:
        return self._trying.pop((item[0], item[1].stamp.address), None)

    def _is_not_tried(self, item: Item) -> None:
        """`item` was taken away before it left."""
        hold = self._no_longer_tried(item) if self._trying else None
        if hold is not None and not hold.is_over:
            self.address_holds.not_tried(hold)

    def _next_is_tried(self, item: Item) -> None:
        """`item` will not leave: where it was tried, what comes behind it is."""
        hold = self._trying.get((item[0], item[1].stamp.address)) if self._trying else None
        if hold is not None and not hold.is_over and hold.tried == item[0]:
            self.address_holds.move(hold, item[0])
        self._is_not_tried(item)

    def _hold(self, held: Sequence[tuple[Item, UStatus, Kind]]) -> list[tuple[Item, UStatus, Kind]]:
        """These wait, and what is in the queue for their addresses waits behind them. Returns those that can't: too
        many addresses are held."""
        beyond = list[tuple[Item, UStatus, Kind]]()
        if not held:
            return beyond
        streams, holds, first = set[int](), set[AddressHold](), dict[AddressHold, int]()
        merges = self.address_holds.merges
        for one in held:
            item, status, kind = one
            address, authority = self.peer.addressed(item[1])
            known = self.address_holds.of(address, authority)
            if known is not None and not known.is_waiting:
                streams |= known.streams
                if known.is_returning:
                    first[known] = self._read
            was_tried, was_heard = self._no_longer_tried(item) is not None, item[2] in self._heard
            hold = self.address_holds.hold(
                address, authority, known, item, status, kind, was_heard=was_heard, was_tried=was_tried
            )
            if hold is None:
                beyond.append(one)
                continue
            streams.add(item[2])
            holds.add(hold)
        if merges != self.address_holds.merges:
            self._plans.clear()
        for stream in streams:
            self._plans.pop(stream, None)
        for item in self._take_out(lambda item: item[2] in streams and self._holding(item) is not None):
            if (behind := self._holding(item)) is not None:
                self.address_holds.wait_behind(behind, item)
        for item in (*(item for item, *_ in held), *self._flights) if first else ():
            behind = self._hold_of_item(item)
            if behind in first:
                first[behind] = min(first[behind], item[0])
        for hold, seq in first.items():  # what came before was taken, and what comes behind was not read
            head = hold.head[0] if hold.head is not None else seq
            self.address_holds.move(hold, min(seq, head, self._back.place + 1) - 1)
        self._held_lately |= holds
        self._held_lately_until = self._flights.begun
        return beyond

    def _holding(self, item: Item) -> AddressHold | None:
        """What holds this message, as it is to leave."""
        if (item[0], item[1].stamp.address) in self._trying:
            return None
        hold = self._hold_of_item(item)
        return hold if hold is not None and hold.is_waiting else None

    def _hold_of_item(self, item: Item) -> AddressHold | None:
        return self.address_holds.of(*self.peer.addressed(item[1]))

    def _take_out(self, which: Callable[[Item], bool]) -> list[Item]:
        """Of what was read and has not left."""
        return self.aside.take_out(which) + self._queue.take_out(which)

    def _look_at_taken(self, sent: Sequence[Item]) -> None:
        """Something that left behind a message that was not taken: the network takes such messages now."""
        for item in sent:
            hold = self._hold_of_item(item)
            if hold in self._held_lately and item[0] > hold.after:
                self._held_lately.discard(hold)
                self.address_holds.try_now(hold)
        if self._flights.ended >= self._held_lately_until:
            self._held_lately.clear()

    # What is paused

    def _hold_back(self, fresh: frozenset[Pause]) -> None:
        """What was paused just now waits in the log from its first record on that has not left, whatever of it was read
        already.

        No batch is in flight here, so all that is not in these queues has left, or was never read.
        """

        candidates = self.aside.known_streams.union(
            (item[2] for item in self._queue), self.topic_holds, self._back.targets, *self._streams_in_holds()
        )
        sources = [(stream, self.log.stream(stream).source) for stream in candidates if self.log.knows_stream(stream)]
        concerns = self._paused.concerns
        held = self._fitting(
            {stream for stream, source in sources if any(concerns(pause, self.peer, source) for pause in fresh)}
        )
        first: dict[int, int] = {}  # by stream
        for item in self._take_out(lambda item: item[2] in held):
            first[item[2]] = min(item[0], first.get(item[2], item[0]))
            self._is_not_tried(item)
        for stream in held:
            after = self._had(stream)
            self.topic_holds.hold(stream, min(after, first.get(stream, after + 1) - 1))
            self._back.targets.pop(stream, None)

    def _streams_in_holds(self) -> Iterator[Set[int]]:
        """Of the addresses that are held."""
        for hold in self.address_holds.values():
            if hold.is_loaded and not self._are_streams_found:
                yield {stream.id for stream in self.log.streams()}
                return
            yield hold.streams

    def _had(self, stream_id: int) -> int:
        """Up to where everybody who wants this stream has had it, but for what was in the queues."""
        had = min([hold.after for hold in self._holds_of(stream_id)], default=self._read)
        held, stream = self.topic_holds.get(stream_id), self.log.stream(stream_id)
        if held is None:
            return had
        targets, is_open = self._mine(self._view.wanted(stream.source, stream.sink, self.log))
        now = {target.authority for target in self._back.targets.get(stream_id, ())}
        if is_open or any(target.authority not in now for target in self._missing(held, targets)):
            return min(had, held.after)  # somebody has had none of it: the others get it twice
        return min(had, max(held.after, self._back.place) if now else self._read)

    def _fitting(self, held: set[int]) -> set[int]:
        """Those of `held` for which there are cursors: what was read of the others leaves, since else it would be
        lost."""
        beyond = [stream for stream in held if stream not in self.topic_holds][max(self.topic_holds.room, 0) :]
        if beyond:
            what = "too many topics are paused: what was read of some leaves all the same"
            log.warning(what, peer=self.peer.name, topics=len(beyond))
        return held.difference(beyond)

    # What the log forgets

    def _in_hand(self) -> set[int]:
        """The streams of what was read and has not left, and of what is held."""
        held = {item[2] for item in chain(self._queue, self._sending, self._flights)}
        return held.union(self.topic_holds, self.owed, self._found, self._back.targets, self.aside.known_streams)

    def _forgotten(self, streams: frozenset[int]) -> None:
        for known in (self._plans, self._due_ms):
            for stream in streams.intersection(known):
                del known[stream]
        self._heard.difference_update(streams)

    # What retention took

    def _passed(self, passed: Passed) -> None:
        """Retention has deleted records that this peer may not have had: told one by one while they are few, beyond
        that as one range."""
        items = chain.from_iterable(map(_items, passed.chunks))
        lost = [item for item in items if self._still_wants(item[2], item[0])]
        told = lost[: self._letters_left]
        self._letters_left -= len(told)
        for item in told:
            self._dead(item, UCode.RESOURCE_EXHAUSTED, "the log had to delete it before the peer was back")
        last = passed.before - 1
        seen = max((chunk.last_seq for chunk in passed.chunks), default=passed.after)
        if len(lost) > len(told) or last > max(seen, self._read):
            self._gap(max(passed.after, min(self.cursor, last)), passed.before)
        for stream, held in self.topic_holds.items():
            if held.after < last:
                self.topic_holds.move(stream, last)
        for hold in self.address_holds.values():
            self.address_holds.move(hold, last)
        self.owed.move(last)
        self._back.place = max(self._back.place, min(last, self._back.until))
        self._read = max(self._read, last)
        self._wake.set()

    def _still_wants(self, stream: int, seq: int) -> bool:
        held = self.topic_holds.get(stream)
        if held is not None:
            return seq > (max(held.after, self._back.place) if stream in self._back.targets else held.after)
        for hold in self._holds_of(stream):
            if seq > (max(hold.after, self._back.place) if hold.is_returning else hold.after):
                return True
        if seq <= self._read:
            return False  # it waits in memory, or has left
        targets, is_open = self._wanted(stream)
        return is_open or any(seq > target.since for target in targets)

    # Sending

    async def _heed_in_order(self) -> None:
        """As `_heed`. What is paused stays back from its first record on that has not left: so what is under way is
        settled before."""
        if self._flights and self._has_new_pause():
            await self._flights.answered()
            await self._land()
        self._heed()

    def _has_new_pause(self) -> bool:
        return self._view.version != self._plans_version and frozenset(self._paused) != self._pauses_known

    async def _send(self) -> None:
        """The next batch, behind those that are under way; where the network wants one at a time, until it is
        settled."""
        batch = self._sending = self._next_batch()
        if not batch:
            if self.aside:
                self._put_back([])
            return
        if not self._failing:
            self._active_at = asyncio.get_running_loop().time()
        if self._pace is not None:
            await self._pace.spend(sum(units_of(len(item[1].payload)) for item in batch))
        self._sending = []
        if self._flights.have_failed:  # while we waited: what has to leave again comes first
            self._put_back(batch)
        else:
            is_alone = not self._flights and (not self.peer.in_flight_messages or self._failing or bool(self.aside))
            messages, oldest_seq = [message for _, message, _ in batch], min([seq for seq, _, _ in batch])
            self._flights.begin(batch, messages, oldest_seq, self._has_new_pause)
            if is_alone:  # one at a time, or a trial: others would only fail behind it
                await self._flights.answered()
                await self._land()

    async def _land(self) -> None:
        """Settle what has been answered; after a failure all that is under way."""
        if self._flights.have_failed:
            await self._flights.answered()
        self._settle(*self._flights.landed())
        await self._rest()

    async def _rest(self) -> None:
        if self._failing:
            await self._backoff.wait(CONNECTED_WAIT_MS_MAX if self.peer.connected else None)

    def _settle(self, batch: list[Item], statuses: list[UStatus]) -> None:
        """What was taken has left; the rest leaves again, or is a dead letter."""
        if not batch:
            return
        settled = settle(batch, statuses)
        if settled.again or settled.refused or self._trying or self._held_lately:
            settled = self._sort_out_held(settled)
            if settled.sent and settled.again and self._back.is_under_way:
                settled = self._hold_what_is_stuck(settled)
        if self.peer.tells_absence:
            self._heard.update([item[2] for item in settled.sent])
        self.peer.forwarded += len(settled.sent)
        for item, status in settled.refused:
            self._dead(item, status.code, status.message or code_name(status.code))
        again = [item for item, _ in settled.again]
        stuck = set[StreamKey]()  # the streams that failed though others got through
        if settled.sent:
            stuck = {key_of(item[1]) for item, status in settled.again if status.message != NOT_TRIED}
        if again or self.aside:
            self._put_back(again, stuck)
        self._confirm()
        was_failing, self._failing = self._failing, bool(again) and not stuck
        if again:
            self.retries += 1
        if not self._failing:
            self._active_at = asyncio.get_running_loop().time()
            self._letters_left = PASSED_LETTERS_MAX
            if was_failing:
                self._backoff.reset()

    def _put_back(self, again: list[Item], stuck: Set[StreamKey] = frozenset()) -> None:
        """What has not got through: aside, where others have, else to the front of the queue."""
        apart, rest = list[Item](), list[Item]()
        for item in again:
            key = key_of(item[1])
            (apart if key in stuck or key in self.aside else rest).append(item)
        self.aside.put_back(apart)
        # the first that waits is the oldest, by which the cursor goes
        self._queue.put_back(sorted(rest + self.aside.release(), key=itemgetter(0)))

    def _next_batch(self) -> list[Item]:
        """Highest class first; what has expired becomes a dead letter instead."""
        now = uuids.now_ms()
        batch: list[Item] = []
        items = self.aside.due() if self.aside else []
        while True:
            batch += [item for item in items if not (item[1].stamp.ttl and self._is_expired(item, now))]
            items = self._queue.take(self._batch_max - len(batch), WINDOW_BYTES_MAX)
            if not items:
                return batch
            if self.aside:
                items = [item for item in items if not self.aside.takes(item)]

    def _is_expired(self, item: Item, now_ms: int) -> bool:
        """If so, it is a dead letter now."""
        expired = item[1].is_expired(now_ms)
        if expired:
            self._next_is_tried(item)
            self._dead(item, UCode.DEADLINE_EXCEEDED, "its ttl ran out before the peer took it")
        return expired

    def _confirm(self) -> None:
        """Move the cursor to just before the oldest record that still waits."""
        cursor = min((item[0] - 1 for item in chain(self._queue.firsts, self._sending)), default=self._read)
        if self.aside and (oldest := self.aside.oldest_seq) is not None:
            cursor = min(cursor, oldest - 1)
        if (oldest := self._flights.oldest_seq) is not None:
            cursor = min(cursor, oldest - 1)
        if (oldest := self.address_holds.oldest_young) is not None:
            cursor = min(cursor, oldest)
        if cursor > self.cursor:
            self.cursor = cursor
            self._save()

    def _dead(self, item: Item, code: UCode.ValueType, reason: str) -> None:
        self.peer.dropped["undeliverable"] += 1
        self._dead_letters.add(item[1], code, reason, self.peer.name)


def _loop_time() -> float:
    return asyncio.get_running_loop().time()


def _both(some: tuple[Target, ...], more: tuple[Target, ...]) -> tuple[Target, ...]:
    """Each authority once, from the earlier place on."""
    both = {target.authority: target for target in some}
    for target in more:
        known = both.get(target.authority)
        both[target.authority] = target if known is None or target.since < known.since else known
    return tuple(both.values())


def _items(chunk: Chunk) -> Iterator[Item]:
    """Ingress appends nothing but EncodedMessages, and what is read from disk is one, too."""
    return zip(chunk.seqs, cast(Sequence[EncodedMessage], chunk.messages), chunk.streams, strict=True)
