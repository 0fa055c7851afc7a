"""ReadingBack sends what was held toward one peer once it may leave. It reads the records back from the log.

    topic: somebody wants it now    ------------------------------------+-> read back -> queue -> confirmed: not held
    address: due -> its first message is tried -> taken: gathered ------'                        any more
                                              '-> refused: later; at its limit: dead letters

One reading back covers everything that was found or taken before it begins. Newer records are read after it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Set
from itertools import chain, islice
from typing import Final

from history.records.chunk import Scan
from streamer.egress.address_holds import AddressHold
from streamer.egress.hold_state import RETURNING, TAKEN
from streamer.egress.in_hand import InHand, loop_time
from streamer.egress.losses import PeerLosses
from streamer.egress.plans import Plans, items_of
from streamer.walk.sender import QueuedRecord
from streamer.walk.view import Target
from uprotocol import uuid as uuids

RECHECK_TOPICS: Final = 256  # topics checked in one step, which takes the loop some milliseconds
TRIED_AT_ONCE: Final = 32  # first messages of held addresses that are sent in one round
TRY_EVERY_S: Final = 0.1  # between two rounds, so that thousands of held addresses don't delay live messages
# for so long after the first message of an address was taken, others are tried; all are read back together
GATHER_S: Final = 0.2
GATHERED_MAX: Final = 512
READ_MESSAGES_MAX: Final = 2_048  # per read of the log from disk: enough to be worth a call in a thread
READ_BYTES_MAX: Final = 4 << 20  # per read of the log


class ReadingBack:
    """Reads back for one pump, whose plans, holds and queue it shares.

    What it will read back: `recheck`, held topics whose interest has changed; `wanted`, those that are wanted, with the
    targets that want them; `_taken`, holds whose first message the network has taken, which are read back together at
    the loop time `_read_back_at`. What it reads back: `targets` that lack records, by stream; the streams `topics` that
    are held; the held addresses; from `position`, read so far, to `until`. What it tries: `trying` has the holds by seq
    and addresses of the message that is tried, until the next round at `_try_at`. `are_streams_found`: those of holds
    from before the start."""

    def __init__(self, plans: Plans, in_hand: InHand, losses: PeerLosses) -> None:
        self._plans, self._peer, self._log = plans, plans.peer, plans.log
        self._topic_holds, self._address_holds = plans.topic_holds, plans.address_holds
        self._in_hand, self._queue, self._losses = in_hand, in_hand.sender.queue, losses
        self.recheck: dict[int, None] = {}
        self.wanted: dict[int, tuple[Target, ...]] = {}
        self._taken: dict[AddressHold, None] = {}
        self._read_back_at = 0.0
        self.targets: dict[int, tuple[Target, ...]] = {}
        self.topics: set[int] = set()
        self._addresses: list[AddressHold] = []
        self.position = self.until = 0
        self.trying: dict[tuple[int, bytes], AddressHold] = {}
        self._try_at = 0.0
        self.are_streams_found = False

    @property
    def is_under_way(self) -> bool:
        return bool(self.targets or self._addresses)

    @property
    def has_work(self) -> bool:
        return self.is_under_way or bool(self.wanted or self._taken)

    @property
    def next_at(self) -> float | None:
        """Returns the loop time of the next step that is due by time alone."""
        times = self._due_at, self._read_back_at if self._taken else None
        return min([at for at in times if at is not None], default=None)

    @property
    def _due_at(self) -> float | None:
        """Returns the loop time at which to try first messages; None while something is read back, since that ends
        only when nothing is under way."""
        if self.is_under_way or self.wanted or self._is_time_to_read_back:
            return None
        due_at = self._address_holds.next_at
        return None if due_at is None else max(due_at, self._try_at)

    @property
    def _is_time_to_read_back(self) -> bool:
        return bool(self._taken) and (len(self._taken) >= GATHERED_MAX or self._read_back_at <= loop_time())

    async def step(self) -> bool | None:
        """Returns True after a step, False while records that were read must leave first, None if nothing is to do."""
        if (due_at := self._due_at) is not None and due_at <= loop_time():
            await self._try_held()
        if self.recheck:
            await self._check_topics()
        elif self.is_under_way:
            return await self._read_back()
        elif self.wanted or self._is_time_to_read_back:
            if not self._in_hand.has_left:
                return False
            await self._begin_reading_back()
        else:
            return None
        return True

    async def scan(self, position: int, streams: Set[int] | None = None, until: int | None = None) -> Scan:
        """Read the records after `position` that are no longer in memory. Raises UStatusError."""
        scan = await self._log.scan(
            position, max_records=READ_MESSAGES_MAX, max_bytes=READ_BYTES_MAX, streams=streams, until=until
        )
        for after, before in scan.gaps:
            self._losses.lost(after, before)
        return scan

    # Topics

    def look_again(self, stream: int) -> None:
        """Look who wants a topic, if it is held."""
        if stream in self._topic_holds:
            self.recheck[stream] = None

    def look_at_all(self) -> None:
        self.recheck = dict.fromkeys(self._topic_holds)

    async def _check_topics(self) -> None:
        """Of the held topics with changed interest, read back those that are wanted and forget the others."""
        for stream in list(islice(self.recheck, RECHECK_TOPICS)):
            del self.recheck[stream]
            held = self._topic_holds.get(stream)
            if held is None:
                continue
            targets, is_open = self._plans.wanted(stream)
            missing = self._plans.missing(held, targets)
            if missing:
                self.wanted[stream] = missing
                continue
            self.wanted.pop(stream, None)
            self._topic_holds.serve(stream, (target for target in targets if target.authority not in held.served))
            if not is_open and stream not in self.topics:
                self._topic_holds.forget(stream)
        await asyncio.sleep(0)

    def withdraw_topic(self, stream: int) -> None:
        """Stop reading a topic back: it is held again, or no longer held."""
        self.targets.pop(stream, None)
        self.topics.discard(stream)

    def forget_topic(self, stream: int) -> None:
        """Note that a topic is not held any more. What is read back of it already goes on."""
        self.wanted.pop(stream, None)
        self.recheck.pop(stream, None)

    def skip(self, to: int) -> None:
        """Read back nothing up to `to`."""
        self.targets = {
            stream: tuple(target._replace(since=max(target.since, to)) for target in targets)
            for stream, targets in self.targets.items()
        }
        self.position = max(self.position, to)

    def deleted(self, to: int) -> None:
        """Note that there is nothing up to `to` any more."""
        self.position = max(self.position, min(to, self.until))

    def take_merged(self) -> None:
        """Read back merged units from before the start: their addresses are not on disk, so each is tried alone."""
        for hold in self._address_holds.merged.values():
            self._address_holds.taken(hold)
            self._taken[hold] = None

    # Reading back

    async def _begin_reading_back(self) -> None:
        """Start with all topics that were found wanted, and all addresses that were taken, since the last time."""
        await self.find_streams_of_holds()
        targets: dict[int, tuple[Target, ...]] = {}
        for stream, missing in self.wanted.items():
            if (held := self._topic_holds.get(stream)) is not None:
                targets[stream] = tuple(target._replace(since=max(target.since, held.after)) for target in missing)
        topics = set(targets)
        taken = [hold for hold in self._taken if hold.progress.state is TAKEN]
        for hold in taken:
            self._address_holds.begin_return(hold)
            for stream, more in (await self._targets_in(hold)).items():
                targets[stream] = _both(targets.get(stream, ()), more)
        for hold in taken:
            self._address_holds.uncover(hold)
        self.targets, self.topics, self._addresses = targets, topics, taken
        self.until = self._plans.read
        self.position = min([target.since for lacking in targets.values() for target in lacking], default=self.until)
        self.wanted, self._taken = {}, {}

    async def find_streams_of_holds(self) -> None:
        """Find the streams of holds from before the start, since the disk does not say which streams they had."""
        if self.are_streams_found or not any(hold.is_loaded for hold in self._address_holds.values()):
            return
        self.are_streams_found = True
        for index, stream in enumerate(self._log.streams()):
            for hold in self._plans.holds_of(stream.id):
                hold.streams.add(stream.id)
            self._hold_undecided(stream.id)
            if index % RECHECK_TOPICS == RECHECK_TOPICS - 1:
                await asyncio.sleep(0)

    def _hold_undecided(self, stream: int) -> None:
        """Hold a topic from the position of its address, if it was held there before the start and nobody knows any
        more who wants it: the saved interest was lost, and the service has not answered yet."""
        after, known = self._plans.undecided_after(stream), self._topic_holds.get(stream)
        if after is None or (known is not None and known.after <= after):
            return
        if known is None and self._topic_holds.free_capacity <= 0:
            return
        self._topic_holds.hold(stream, after)
        self.recheck[stream] = None

    async def _targets_in(self, hold: AddressHold) -> dict[int, tuple[Target, ...]]:
        """Returns the targets that wait in `hold`, by stream."""
        targets: dict[int, tuple[Target, ...]] = {}
        for index, stream in enumerate(list(hold.streams)):
            if waiting := self._plans.targets_of(hold, stream):
                targets[stream] = waiting
            if index % RECHECK_TOPICS == RECHECK_TOPICS - 1:
                await asyncio.sleep(0)
        return targets

    async def _read_back(self) -> bool:
        """Take one step. Returns False while records that were read must leave first."""
        if self.position < self.until and self.targets:
            scan = await self.scan(self.position, self.targets.keys(), self.until)
            now = uuids.now_ms()
            for item in chain.from_iterable(map(items_of, scan.chunks)):
                self._add(item, now)
            self.position = max(self.position, scan.covered)
            return True
        if not self._in_hand.has_left or not self._in_hand.aside.streams.isdisjoint(self.targets):
            return False  # the holds keep their positions until all their records are confirmed
        targets, topics, addresses = self.targets, self.topics, self._addresses
        self.targets, self.topics, self._addresses = {}, set(), []
        for stream in topics:
            if stream in self._topic_holds:
                self._topic_holds.serve(stream, targets[stream])
                self.recheck[stream] = None
        for hold in addresses:
            self._address_holds.confirmed(hold)
        return True

    def _add(self, item: QueuedRecord, now_ms: int) -> None:
        """Queue a record for the targets that have not had it."""
        seq, message, stream = item
        targets = self.targets.get(stream, ())
        if all(seq <= target.since for target in targets):
            return
        if stream not in self.topics and message.is_expired(now_ms):
            self._peer.dropped["expired_while_held"] += 1
            return
        plan = self._plans.plan_for(stream, targets)
        self._plans.count_held(plan, seq, stream)
        self._queue.add(self._plans.copies(plan, item))

    # Trying held addresses

    async def _try_held(self) -> None:
        """Put the first message of the holds that are due in front of the queue."""
        self._try_at = loop_time() + TRY_EVERY_S
        await self.find_streams_of_holds()
        due = deque(self._address_holds.take_due(TRIED_AT_ONCE))
        try:
            while due:
                await self._try(due[0])
                due.popleft()
        finally:
            for hold in due:  # the log can't be read
                self._address_holds.not_tried(hold)

    async def _try(self, hold: AddressHold) -> None:
        if self._address_holds.is_at_its_limit(hold):
            await self._end(hold)
            return
        first = await self._first_of(hold)
        if hold.is_over:  # it ended while it was read
            return
        if first is None:
            self._address_holds.drop(hold)
            return
        self.trying[first[0], first[1].stamp.address], hold.tried = hold, first[0]
        self._queue.put_back([first])

    async def _first_of(self, hold: AddressHold) -> QueuedRecord | None:
        """Returns the first message that waits; None: nothing waits."""
        head, now = hold.held.head, uuids.now_ms()
        if (
            head is not None
            and not head[1].is_expired(now)
            and any(head[0] > target.since for target in self._plans.targets_of(hold, head[2]))
        ):
            return head
        while True:
            after, until = hold.after, self._plans.read
            targets = await self._targets_in(hold)
            if after >= until or not targets:
                return None
            scan = await self.scan(after, targets.keys(), until)
            for item in chain.from_iterable(map(items_of, scan.chunks)):
                wanted = tuple(target for target in targets.get(item[2], ()) if item[0] > target.since)
                if not wanted:
                    continue
                if item[1].is_expired(now):
                    self._peer.dropped["expired_while_held"] += 1
                    continue
                if copies := self._plans.copies(self._plans.unheld_plan(item[2], wanted), item):
                    self._address_holds.move(hold, item[0] - 1)
                    return copies[0]
            if scan.covered <= after or hold.is_over:
                return None
            self._address_holds.move(hold, scan.covered)

    async def _end(self, hold: AddressHold) -> None:
        """End a hold that has waited for as long as it may."""
        after, until = hold.after, self._plans.read
        targets = await self._targets_in(hold)
        scan = await self.scan(after, targets.keys(), until) if targets else None
        copies = list[QueuedRecord]()
        for item in chain.from_iterable(map(items_of, scan.chunks)) if scan is not None else ():
            if wanted := tuple(target for target in targets.get(item[2], ()) if item[0] > target.since):
                copies += self._plans.copies(self._plans.unheld_plan(item[2], wanted), item)
        self._losses.held_too_long(hold, copies, after, until)
        self._address_holds.ended += 1
        if not hold.is_over:
            self._address_holds.drop(hold)

    def sent_of_hold(self, hold: AddressHold) -> int:
        """Returns the seq up to which the records of this hold have left."""
        return max(hold.after, self.position) if hold.progress.state is RETURNING else hold.after

    def sent_of_topic(self, stream: int) -> int:
        """Returns the seq up to which the records of this topic, which is held, have left."""
        after = self._topic_holds[stream].after
        return max(after, self.position) if stream in self.targets else after

    def trial_of(self, item: QueuedRecord) -> AddressHold | None:
        """Removes the trial with `item`, and returns its hold."""
        return self.trying.pop((item[0], item[1].stamp.address), None)

    def was_taken(self, hold: AddressHold, item: QueuedRecord) -> None:
        """Note that the network has taken the trial of `hold`. The rest is read back soon."""
        self._address_holds.taken(hold)
        if hold.unit.startswith("=") and hold.tried == item[0]:
            self._address_holds.move(hold, item[0])
        if not self._taken:
            self._read_back_at = loop_time() + GATHER_S
        self._taken[hold] = None

    def withdraw_trial(self, item: QueuedRecord) -> None:
        """Have `item`, which was removed before it left, tried again if it was a trial."""
        hold = self.trial_of(item) if self.trying else None
        if hold is not None and not hold.is_over:
            self._address_holds.not_tried(hold)

    def skip_trial(self, item: QueuedRecord) -> None:
        """Try the message behind `item`, which will never leave, if `item` was a trial."""
        hold = self.trying.get((item[0], item[1].stamp.address)) if self.trying else None
        if hold is not None and not hold.is_over and hold.tried == item[0]:
            self._address_holds.move(hold, item[0])
        self.withdraw_trial(item)


def _both(some: tuple[Target, ...], more: tuple[Target, ...]) -> tuple[Target, ...]:
    """Returns each authority once, from its earlier seq on."""
    both = {target.authority: target for target in some}
    for target in more:
        known = both.get(target.authority)
        both[target.authority] = target if known is None or target.since < known.since else known
    return tuple(both.values())
