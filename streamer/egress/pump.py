"""Egress: one pump per peer and log. It reads after its cursor, sends in batches, and moves the cursor when the peer
has confirmed.

    log -> read ahead (bounded) -> plans: who wants it? -> queue -> send -> settle -> taken: the cursor moves
     ^                              |                      ^ ^                |-----> UNAVAILABLE: sent again, in order,
     |                    undecided, paused: held          | '----------------'       after a pause; aside if others
     |                                 v                   |                          got through
     '----- reading_back: what was held leaves --------------'           expired, refused: dead letter; held

Messages of one (source, sink) and class stay in order: batches leave one after the other (sender.py), and several are
in flight if the network is far away. After a failure nothing leaves until all of them are answered.
"""

from __future__ import annotations

import asyncio
import functools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Final

import structlog

from history.log.log import Log, RetentionLoss
from streamer.egress.address_holds import HELD_HOURS
from streamer.egress.backlog import Backlog, WaitLimits
from streamer.egress.in_hand import InHand
from streamer.egress.losses import PeerLosses
from streamer.letters.dead_letter import DeadLetters
from streamer.walk.endpoint import Endpoint
from streamer.walk.flow import ACTIVE_S, LAG_RECORDS_MAX, LAG_SHARE_MAX, Flow
from streamer.walk.ledger import units_of
from streamer.walk.paused import Pause, Paused
from streamer.walk.sender import LAND_S, OrderKey, QueuedRecord, Sender, key_of
from streamer.walk.view import Version, View
from transports.base import NOT_TRIED
from uprotocol import uuid as uuids
from uprotocol.core.ustreamer.v1.ustreamer_pb2 import Gap
from uprotocol.core.usubscription.wire import to_uri
from uprotocol.pacing import Backoff, Pace
from uprotocol.status import Settled, UStatusError, code_name
from uprotocol.tasks import wait_until
from usubscription_client.interest import Topics

# read ahead: as many as the slowest broker measured takes in two seconds; more would only hide a stall
WINDOW_MESSAGES_MAX = 2_000
PUMP_WINDOW_BYTES_MAX: Final = 16 << 20  # of payload, read ahead: 2,000 large messages must not fill a small memory
BATCH_MESSAGES_MAX: Final = 512  # per send_batch: with more, the cost per message does not fall further
# after a failure of a connected network: it may concern one stream only, and others should not wait long
CONNECTED_WAIT_MS_MAX: Final = 500
AT_ONCE: Final = 0.0  # loop time of a step that need not wait
ABSENT_MS_MAX: Final = 7 * 24 * 3_600_000  # how long retention by age waits for an endpoint that is away

log = structlog.get_logger()


class Pump:
    """Sends one log's records to one peer. What waits there is in `waits`."""

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
        # Paced messages leave in batches of a quarter of a second, since urgent messages wait for the batch before
        # them, and a larger batch would leave at once after its wait
        batch_max = BATCH_MESSAGES_MAX if pace is None else min(BATCH_MESSAGES_MAX, max(1, pace.per_s // 4))
        self.sender = Sender[QueuedRecord](peer, batch_max, PUMP_WINDOW_BYTES_MAX, pace=pace, cost=_units_of_batch)
        self.in_hand = InHand(self.sender, backoff.sibling())
        self.aside = self.in_hand.aside
        self.losses = PeerLosses(peer, source, dead_letters, functools.partial(on_gap, peer, source))
        limits = WaitLimits(absent_ms_max, refused_hours * 3_600, unheard_hours * 3_600)
        self.waits = Backlog(peer, source, view, self.in_hand, self.losses, limits)
        self._turn = asyncio.Lock()  # held by a step, or by a change that has to wait until nothing is in flight
        self.trouble = ""  # why the log can't be read
        self.retries = 0
        self._active_at = -math.inf  # loop time at which the peer last took a message, or was sent one after that
        self._registrations = [
            flow.follow(self),
            paused.on_change(self._pauses_changed),
            source.on_append(self.sender.wake.set),
            source.on_retention_loss(self._passed),
            source.on_forgotten(self.waits.forget),
            source.keep_streams(self.waits.streams_in_hand),
            peer.on_heard(self._heard_at),
        ]

    def __repr__(self) -> str:
        seqs = f"cursor={self.cursor}, read={self.waits.plans.read}, newest={self.log.newest_seq}"
        return f"Pump({self.peer.name}, {seqs}, waiting={len(self.sender.queue)})"

    def close(self) -> None:
        """Remove the pump from whatever calls it, after `run` was cancelled. Its cursor stays."""
        for remove in self._registrations:
            remove()

    @property
    def backlog(self) -> int:
        """Returns how many records of the log are after the cursor."""
        return self.log.newest_seq - self.cursor

    @property
    def cursor(self) -> int:
        """Returns the last confirmed seq."""
        return self.waits.owned.seq

    @property
    def read(self) -> int:
        """Returns the last seq that was read."""
        return self.waits.plans.read

    def lag(self) -> float | None:
        """Returns how far reading is behind: 1 is LAG_SHARE_MAX of what is in memory; of a volatile log half of that,
        or LAG_RECORDS_MAX. None: the peer takes no messages.

        A peer that is behind because we send slowly must not hold up senders, since its records are on disk.
        """
        log, read = self.log, self.waits.plans.read
        if self._active_at < asyncio.get_running_loop().time() - ACTIVE_S:
            return None
        if log.durable:
            return 0.0 if self.sender.pace is not None else log.tail_share(read) / LAG_SHARE_MAX
        return max((log.newest_seq - read) / LAG_RECORDS_MAX, 2 * log.tail_share(read))

    def interest_changed(self, _: Topics) -> None:
        """Look at the held topics again. For others the view is asked when a record comes."""
        if self.waits.topics or self.waits.plans.lacks_capacity:
            self.sender.wake.set()

    def wake(self) -> None:
        """Try again at once: the peer may be back, or the pauses have changed."""
        self._backoff.wake()
        self.aside.due_at = 0.0
        self.sender.wake.set()

    def _heard_at(self, addresses: Sequence[str] | None) -> None:
        """Try these addresses, at which somebody listens now (UTransport.on_heard)."""
        self.waits.heard_at(addresses)
        self.sender.wake.set()

    def begin(self) -> None:
        """Find the position to go on from. Called before any listener is registered, since messages that come from then
        on may be for this peer."""
        self.waits.load()

    # The loop

    async def run(self) -> None:
        """Pump until cancelled, from the position that `begin` found. Then wait for answers, LAND_S at most."""
        sender = self.sender
        end: BaseException | None = None
        while end is None:
            try:
                async with self._turn:
                    next_at = await self._step()
                if next_at is None or next_at > asyncio.get_running_loop().time():
                    await wait_until(sender.wake, next_at)
            except BaseException as error:
                end = error
        try:
            await sender.answered(LAND_S)
        finally:
            self._settle(sender.landed())
            self.waits.confirm()
            sender.drop()
        raise end

    async def _step(self) -> float | None:
        """Settle what was answered; else read ahead, and send a batch. Returns the loop time of the next step; None:
        when there is news."""
        sender, aside = self.sender, self.aside
        sender.wake.clear()
        if sender.is_held:  # a paused topic waits from the first record that has not left
            await sender.answered()
        landed = sender.landed()
        if landed is not None:  # 1: answers, before anything is read: what has failed goes back into the window
            self._settle(landed)
            if sender.is_failing:
                await self._backoff.wait(CONNECTED_WAIT_MS_MAX if self.peer.connected else None)
            return AT_ONCE
        if self._view.version != self._version:  # 2: rules, interest, pauses
            self.refresh_plans()
        at_the_end, failure = False, ""
        try:
            at_the_end = await self._fill()  # 3: read ahead
        except UStatusError as error:  # of the log
            failure = str(error)
        if failure:
            if self.trouble != failure:
                self.trouble = failure
                what = "the log can't be read for a peer; trying again"
                log.error(what, peer=self.peer.name, error=failure, _kind="reading")
            await self._backoff.wait()
            return AT_ONCE
        if self.trouble:
            self.trouble = ""
            log.info("the log can be read for a peer again", peer=self.peer.name, _kind="reading")
            self._backoff.reset()
        if sender.is_held:  # topics that were paused meanwhile must not leave
            return AT_ONCE
        next_at = sender.leaves_at()  # 4: send
        if aside and not sender.flights:
            next_at = aside.due_at if next_at is None else next_at
        if next_at is not None and next_at <= asyncio.get_running_loop().time():
            await self._send()
            return AT_ONCE
        self.waits.confirm()  # 5: nothing to do until ...
        if not (at_the_end or aside or sender.flights or self.waits.addresses):
            return AT_ONCE
        if self.waits.addresses and not sender.flights and (held_at := self.waits.reading_back.next_at) is not None:
            next_at = held_at if next_at is None else min(next_at, held_at)
        return next_at

    # Reading ahead

    async def _fill(self) -> bool:
        """Read until the window is full, or the pauses change. Returns True if there is nothing to read for now."""
        waits, queue, aside = self.waits, self.sender.queue, self.aside
        plans, reading_back = waits.plans, waits.reading_back
        while queue.messages < WINDOW_MESSAGES_MAX and queue.bytes < PUMP_WINDOW_BYTES_MAX:
            if aside and aside.is_full:
                return False
            if self._view.version != self._version:
                if self.sender.is_held:
                    return False
                self.refresh_plans()
            if waits.topics or waits.addresses or reading_back.has_work:  # 1: what was held
                done = await reading_back.step()
                if done:
                    continue
                if done is False:
                    return False
            if plans.read >= self.log.newest_seq:
                return True
            chunks, covered = self.log.tail(plans.read), self.log.newest_seq  # 2: new records, in memory
            if chunks is None:  # 3: or on disk
                if plans.read < self.log.floor_seq:
                    self.losses.lost(plans.read, self.log.floor_seq + 1)
                    waits.read_to(self.log.floor_seq)
                found = await reading_back.scan(plans.read)
                chunks, covered = found.chunks, found.covered
                if self.sender.is_held:
                    return False
                self.refresh_plans()
                if reading_back.recheck:  # held topics come first
                    continue
            for chunk in chunks:
                if chunk.last_seq <= plans.read:  # retention deleted it while it was read
                    continue
                if queue.messages >= WINDOW_MESSAGES_MAX or queue.bytes >= PUMP_WINDOW_BYTES_MAX:
                    return False
                items = plans.messages_of(chunk)
                if items is None:
                    return not queue.messages
                if items:
                    queue.add(items)
                if self._flow.holds:
                    self._flow.moved()
            waits.read_to(covered)
        return False

    # Sending

    async def _send(self) -> None:
        """Send the next batch, highest class first; an expired message becomes a dead letter instead."""
        now, sender, aside, waits = uuids.now_ms(), self.sender, self.aside, self.waits
        batch: list[QueuedRecord] = []
        items = aside.due() if aside else []
        while True:
            batch += [item for item in items if not (item[1].stamp.ttl and waits.ends_expired(item, now))]
            items = sender.queue.take(sender.messages_max - len(batch), PUMP_WINDOW_BYTES_MAX)
            if not items:
                break
            if aside:
                items = [item for item in items if not aside.takes(item)]
        if not batch:
            if aside:
                aside.put_back([])
            return
        if not sender.is_failing:
            self._active_at = asyncio.get_running_loop().time()
        if not await sender.send(batch, min([seq for seq, _, _ in batch]), is_trial=bool(aside)):
            aside.put_back(batch)

    def _settle(self, landed: Settled[QueuedRecord] | None) -> None:
        """Note messages that were taken as delivered. Send the others again, hold them, or make them dead letters."""
        if landed is None:
            return
        sender, settled = self.sender, self.waits.settle(landed)
        self.peer.forwarded += len(settled.sent)
        for stream, count in Counter([item[2] for item in settled.sent]).items():
            self.peer.forwarded_from[self.waits.plans.origin(stream)] += count
        for item, status in settled.refused:
            self.losses.dead(item, status.code, status.message or code_name(status.code))
        again = [item for item, _ in settled.again]
        stuck = set[OrderKey]()  # the streams that failed while others got through
        if settled.sent:
            stuck = {key_of(item[1]) for item, status in settled.again if status.message != NOT_TRIED}
        if again or self.aside:
            self.aside.put_back(again, stuck)
        was_failing, sender.is_failing = sender.is_failing, bool(again) and not stuck
        if again:
            self.retries += 1
        if not sender.is_failing:
            self._active_at = asyncio.get_running_loop().time()
            self.losses.refill()
            if was_failing:
                self._backoff.reset()
        self.waits.confirm()

    # Rules, interest and pauses

    def refresh_plans(self) -> None:
        """Apply the current rules, interest and pauses. If the pauses have changed, nothing may be in flight."""
        before, self._version = self._version, self._view.version
        topics = self._view.changed_since(before) if before is not None else None
        if topics is not None:
            for topic in sorted(topics):  # so that a run can be replayed
                stream = self.log.known_id(to_uri(topic))
                if stream is not None:
                    self.waits.look_again(stream)
            return
        pauses, self.sender.is_held = frozenset(self._paused), False
        self.waits.look_at_all(self._paused, pauses - self._pauses_known)
        self._pauses_known = pauses

    def _pauses_changed(self) -> None:
        self.sender.is_held = True
        self.wake()

    async def between_batches(self, change: Callable[[], int]) -> int:
        """Returns the result of `change`, which is called while the pump rests and nothing is in flight."""
        self.wake()
        async with self._turn:
            await self.sender.answered()
            self._settle(self.sender.landed())
            self.refresh_plans()
            await self.waits.reading_back.find_streams_of_holds()
            result = change()
            self.waits.confirm()
            return result

    def _passed(self, passed: RetentionLoss) -> None:
        self.waits.deleted(passed)
        self.sender.wake.set()


def _units_of_batch(batch: list[QueuedRecord]) -> int:
    return sum(units_of(len(item[1].payload)) for item in batch)
