"""Egress: one pump per peer and log. It reads after its cursor, sends in batches, and moves the cursor when the peer
has confirmed.

    log -> read ahead (bounded) -> plans: who wants it? -> outbox -> deliveries: send, settle -> confirmed: cursor
     ^                              |                      ^  ^             |
     |                    undecided, paused: held          |  '-- resend ---+-> UNAVAILABLE
     '------- catch_up: read back what was held -----------'                '-> refused, unheard: held; dead letters

Messages of one (source, sink) and class stay in order: batches leave one after the other (sender.py), and several are
in flight if the network is far away. After a failure nothing leaves until all of them are answered.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Final

import structlog

from history.log.log import Log, RetentionLoss
from streamer.egress.blocked import Aside, Item, Outbox
from streamer.egress.catch_up import CatchUp, Reading, loop_time
from streamer.egress.deliveries import Deliveries
from streamer.egress.holds import HELD_HOURS, AddressHolds, OwedTopics, TopicHolds
from streamer.egress.paused import Pause, Paused
from streamer.egress.plans import OwnedCursor, Plans
from streamer.egress.publishes import Publishes
from streamer.egress.sender import LAND_S, Sender
from streamer.letters.dead_letter import DeadLetters
from streamer.quotas.ledger import units_of
from streamer.walk.endpoint import Endpoint
from streamer.walk.flow import ACTIVE_S, LAG_RECORDS_MAX, LAG_SHARE_MAX, Flow
from streamer.walk.view import Version, View
from uprotocol.core.ustreamer.v1.ustreamer_pb2 import Gap
from uprotocol.core.usubscription.wire import to_uri
from uprotocol.pacing import Backoff, Pace
from uprotocol.status import UStatusError
from usubscription_client.table import Topics

# read ahead: as many as the slowest broker measured takes in two seconds; more would only hide a stall
WINDOW_MESSAGES_MAX = 2_000
WINDOW_BYTES_MAX: Final = 16 << 20  # of payload, read ahead: 2,000 large messages must not fill a small memory
BATCH_MESSAGES_MAX: Final = 512  # per send_batch: with more, the cost per message does not fall further
# after a failure of a connected network: it may concern one stream only, and others should not wait long
CONNECTED_WAIT_MS_MAX: Final = 500
CURSOR_PREFIX: Final = "egress:"
# prefix of the cursor at which a peer began that was new while records waited for one that is not configured
BEGAN_PREFIX: Final = "began:"
ABSENT_MS_MAX: Final = 7 * 24 * 3_600_000  # how long retention by age waits for an endpoint that is away

log = structlog.get_logger()


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
        self._view, self._paused = view, paused
        self._version: Version | None = None  # of the view by which the plans were made
        self._pauses_known = frozenset[Pause]()
        self._backoff, self._flow = backoff, flow
        self.topic_holds = TopicHolds(source, peer.name, absent_ms_max)
        self.address_holds = AddressHolds(source, peer.name, loop_time, refused_hours * 3_600, unheard_hours * 3_600)
        self.owed = OwedTopics(source, peer.name)
        self._wake = asyncio.Event()
        # Paced messages leave in batches of a quarter of a second, since urgent messages wait for the batch before
        # them, and a larger batch would leave at once after its wait
        batch_max = BATCH_MESSAGES_MAX if pace is None else min(BATCH_MESSAGES_MAX, max(1, pace.per_s // 4))
        self.sender = Sender[Item](
            peer,
            self._wake.set,
            batch_max,
            WINDOW_BYTES_MAX,
            is_held=self._has_new_pause,
            pace=pace,
            cost=_units_of_batch,
        )
        self.aside = Aside(backoff.sibling(), loop_time)  # streams that don't get through though others do
        self.outbox = Outbox(self.sender.queue, self.aside)
        self.plans = Plans(peer, source, view, self.topic_holds, self.address_holds)
        self.reading = Reading(self.plans, dead_letters, functools.partial(on_gap, peer, source))
        self.catch_up = CatchUp(self.plans, self.outbox, self.sender, self.reading)
        self.deliveries = Deliveries(self.plans, self.sender, self.outbox, self.catch_up, backoff)
        self.owned = OwnedCursor(source, CURSOR_PREFIX + peer.name, absent_ms_max)
        self.publishes = Publishes(
            self.plans, self.owned, self.owed, self.outbox, self.catch_up, self.deliveries, self.wake
        )
        self.is_new = False  # True if it had no cursor before this start
        self.trouble = ""  # why reading or sending has stopped
        self._registrations = [
            flow.follow(self),
            paused.on_change(self.wake),
            source.on_append(self._wake.set),
            source.on_retention_loss(self._passed),
            source.on_forgotten(self._forgotten),
            source.keep_streams(self._in_hand),
        ]
        peer.on_heard(self._heard_at)

    def __repr__(self) -> str:
        seqs = f"cursor={self.cursor}, read={self.plans.read}, newest={self.log.newest_seq}"
        return f"Pump({self.peer.name}, {seqs}, waiting={len(self.sender.queue)})"

    def close(self) -> None:
        """Remove the pump from the log, its flow and the pauses, after `run` was cancelled. Its cursor stays."""
        for remove in self._registrations:
            remove()

    @property
    def backlog(self) -> int:
        """Returns how many records of the log are after the cursor."""
        return self.log.newest_seq - self.cursor

    @property
    def cursor(self) -> int:
        """Returns the last confirmed seq."""
        return self.owned.seq

    @property
    def read(self) -> int:
        """Returns the last seq that was read."""
        return self.plans.read

    def lag(self) -> float | None:
        """Returns how far reading is behind: 1 is LAG_SHARE_MAX of what is in memory; of a volatile log half of that,
        or LAG_RECORDS_MAX. None: the peer takes no messages.

        A peer that is behind because we send slowly must not hold up senders, since its records are on disk.
        """
        log, read = self.log, self.plans.read
        if self.deliveries.active_at < asyncio.get_running_loop().time() - ACTIVE_S:
            return None
        if log.durable:
            return 0.0 if self.sender.pace is not None else log.tail_share(read) / LAG_SHARE_MAX
        return max((log.newest_seq - read) / LAG_RECORDS_MAX, 2 * log.tail_share(read))

    def look_at(self, topics: Topics) -> None:
        """Check the held topics among these, whose interest has changed. For others the view is asked when a record
        comes."""
        held = self.topic_holds
        is_concerned = held and (topics is None or any(self.log.known_id(to_uri(one)) in held for one in topics))
        if is_concerned or self.plans.lacks_capacity:
            self._wake.set()

    def wake(self) -> None:
        """Try again at once: the peer may be back, or the pauses have changed."""
        self._backoff.wake()
        self.aside.wake()
        self._wake.set()

    def reconnected(self) -> None:
        """Try everything that was refused: the network is connected again, and may take it now."""
        self.address_holds.try_all()
        self.wake()

    def _heard_at(self, addresses: Sequence[str] | None) -> None:
        """Try these addresses, at which somebody listens now (UTransport.on_heard)."""
        if addresses is None:
            self.address_holds.try_all("unheard")
        else:
            for address in addresses:
                if (hold := self.address_holds.at(address)) is not None:
                    self.address_holds.try_now(hold)
        self._wake.set()

    # The cursor

    def begin(self) -> None:
        """Find the position to go on from. Called before any listener is registered, since messages that come from then
        on may be for this peer."""
        self.is_new = self.owned.begin()
        self.plans.read = self.owned.seq
        self.topic_holds.load()
        self.address_holds.load()
        for hold in self.address_holds.merged:  # its addresses are not on disk: each is tried alone
            self.address_holds.taken(hold)
            self.catch_up.taken.add(hold)
        self.owed.load()

    def waited(self, ms: int, *, away_ms: int) -> None:
        """Note that `ms` have passed, and that the peer has been away for the last `away_ms` of them."""
        self.owned.waited(ms, away_ms=away_ms)
        self.topic_holds.wait(ms)

    def _confirm(self) -> None:
        """Move the cursor to just before the oldest record that still waits."""
        sender, aside, holds = self.sender, self.aside, self.address_holds
        firsts = chain([first[0] for first in sender.queue.classes if first], sender.waiting)
        cursor = min((item[0] - 1 for item in firsts), default=self.plans.read)
        if aside and (oldest := aside.oldest_seq) is not None:
            cursor = min(cursor, oldest - 1)
        if sender.flights:
            cursor = min(cursor, min([flight.oldest_seq for flight in sender.flights]) - 1)
        if holds and (oldest := holds.oldest_young) is not None:
            cursor = min(cursor, oldest)
        if cursor > self.owned.seq:
            self.owned.seq = cursor
            self.owned.save()

    # The loop

    async def run(self) -> None:
        """Pump until cancelled, from the position that `begin` found. Then wait for answers, LAND_S at most."""
        sender = self.sender
        end: BaseException | None = None
        while end is None:
            try:
                await self._step()
            except BaseException as error:
                end = error
        try:
            await sender.answered(LAND_S)
        finally:
            self.deliveries.settle(*sender.landed())
            self._confirm()
            sender.drop()
        raise end

    async def _step(self) -> None:
        self._wake.clear()
        if self.publishes.changes:
            await self.sender.answered()
            await self._land()
            self.refresh_plans()
            await self.catch_up.find_streams_of_holds()
            self.publishes.make_changes()
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
        sender, aside = self.sender, self.aside
        if sender.has_answer:
            await self._land()
        elif sender.may_send or (aside and not sender.flights and aside.due_at <= loop_time()):
            if self._view.version != self._version:  # topics that were paused since then must not leave
                await self._refresh_in_order()
            await self.deliveries.send(WINDOW_BYTES_MAX)
            if self.sender.has_answer:
                await self._land()
        else:
            self._confirm()
            if at_the_end or aside or sender.flights or self.address_holds:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout_at(self._next_at()):
                        await self._wake.wait()

    def _next_at(self) -> float | None:
        """Returns the loop time from which a waiting message may leave without a call of `wake`."""
        if self.sender.flights:
            return self.sender.next_at
        due_at = self.aside.due_at if self.aside else None
        if self.address_holds or self.catch_up.taken:
            step_at = self.catch_up.next_at
            due_at = step_at if due_at is None else due_at if step_at is None else min(step_at, due_at)
        return due_at

    async def _land(self) -> None:
        """Settle the batches that were answered; after a failure, settle all that are under way, and pause."""
        if self.sender.have_failed:
            await self.sender.answered()
        self.deliveries.settle(*self.sender.landed())
        self._confirm()
        if self.sender.is_failing:
            await self._backoff.wait(CONNECTED_WAIT_MS_MAX if self.peer.connected else None)

    # Reading ahead

    async def _fill(self) -> bool:
        """Read until the window is full. Returns True if there is nothing to read for now."""
        plans, catch_up, queue, aside = self.plans, self.catch_up, self.sender.queue, self.aside
        while queue.messages < WINDOW_MESSAGES_MAX and queue.bytes < WINDOW_BYTES_MAX:
            if aside and aside.is_full:
                return False
            if self._view.version != self._version:
                await self._refresh_in_order()
            if (
                self.topic_holds
                or self.address_holds
                or catch_up.targets
                or catch_up.addresses
                or catch_up.found
                or catch_up.taken
            ):
                done = await catch_up.step()
                if done:
                    continue
                if done is False:
                    return False
            if plans.read >= self.log.newest_seq:
                return True
            chunks, covered = self.log.tail(plans.read), self.log.newest_seq
            if chunks is None:
                if plans.read < self.log.floor_seq:
                    self.reading.lost(plans.read, self.log.floor_seq + 1)
                    plans.read = self.log.floor_seq
                found = await self.reading.scan(plans.read)
                chunks, covered = found.chunks, found.covered
                self.refresh_plans()
                if catch_up.recheck:  # held topics come first
                    continue
            for chunk in chunks:
                if chunk.last_seq <= plans.read:  # retention deleted it while it was read
                    continue
                if queue.messages >= WINDOW_MESSAGES_MAX or queue.bytes >= WINDOW_BYTES_MAX:
                    return False
                items = plans.take(chunk)
                if items is None:
                    return not queue.messages
                if items:
                    queue.add(items)
                if self._flow.holds:
                    self._flow.moved()
            plans.read = max(plans.read, covered)
        return False

    # Rules, interest and pauses

    async def _refresh_in_order(self) -> None:
        """Settle what is under way, then call `refresh_plans`: a paused topic waits from the first record that has not
        left."""
        if self.sender.flights and self._has_new_pause():
            await self.sender.answered()
            await self._land()
        self.refresh_plans()

    def _has_new_pause(self) -> bool:
        return self._view.version != self._version and frozenset(self._paused) != self._pauses_known

    def refresh_plans(self) -> None:
        """Apply the current rules, interest and pauses."""
        version, before = self._view.version, self._version
        if version == before:
            return
        self._version = version
        topics = self._view.changed_since(before) if before is not None else None
        if topics is not None:
            for topic in sorted(topics):  # so that a run can be replayed
                stream = self.log.known_id(to_uri(topic))
                if stream is not None:
                    self.plans.by_stream.pop(stream, None)
                    if stream in self.topic_holds:
                        self.catch_up.recheck[stream] = None
            return
        self.plans.by_stream.clear()
        self.catch_up.are_streams_found = False
        pauses = frozenset(self._paused)
        if fresh := pauses - self._pauses_known:
            self.catch_up.hold_paused(self._paused, fresh)
        self._pauses_known = pauses
        self.catch_up.recheck = dict.fromkeys(self.topic_holds)

    # Streams that the log forgets, and records that retention deletes

    def _in_hand(self) -> set[int]:
        """Returns the streams of records that were read and have not left, and those of holds."""
        sender, catch_up = self.sender, self.catch_up
        held = {item[2] for item in chain(sender.queue, sender.waiting, sender.in_flight)}
        return held.union(self.topic_holds, self.owed, catch_up.found, catch_up.targets, self.aside.known_streams)

    def _forgotten(self, streams: frozenset[int]) -> None:
        self.plans.forget(streams)
        self.deliveries.forget(streams)

    def _passed(self, passed: RetentionLoss) -> None:
        self.deliveries.passed(passed, self.cursor)
        self.owed.move(passed.before - 1)
        self._wake.set()


def _units_of_batch(batch: list[Item]) -> int:
    return sum(units_of(len(item[1].payload)) for item in batch)
