"""Backlog: everything that waits toward one peer in one log. It alone changes the positions (docs/waiting.md).

undecided, paused -----> TopicHolds ----.
refused, unheard ------> AddressHolds ---+-> ReadingBack: sent once it may leave
followed by a gateway -> OwedTopics: those that were held; the pump sends no publish
all else --------------> the cursor: behind everything that was sent and confirmed
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from itertools import chain
from typing import NamedTuple

import structlog

from history.log.log import Log, RetentionLoss
from history.records.chunk import is_publish
from streamer.egress.address_holds import AddressHolds
from streamer.egress.in_hand import InHand, loop_time
from streamer.egress.losses import PeerLosses
from streamer.egress.plans import SKIP, Plans, items_of
from streamer.egress.reading_back import ReadingBack
from streamer.egress.refusals import Refusals
from streamer.egress.rows import EndpointPositions, OwnedCursor, lowest, row, units_of
from streamer.egress.topic_holds import OwedTopics, TopicHolds
from streamer.walk.endpoint import Endpoint
from streamer.walk.paused import Pause, Paused
from streamer.walk.sender import QueuedRecord
from streamer.walk.view import View
from uprotocol.core.ustreamer.v1.ustreamer_pb2 import Gap
from uprotocol.status import Settled
from uprotocol.v1.ucode_pb2 import UCode

log = structlog.get_logger()


class WaitLimits(NamedTuple):
    absent_ms: int  # how long retention by age waits
    refused_s: float  # how long an address is held
    unheard_s: float


class Backlog:
    """The positions of one pump: its cursor, the holds, and up to where the log is read (`plans.read`). Others read
    them, and change them by these methods alone."""

    def __init__(
        self, peer: Endpoint, source: Log, view: View, in_hand: InHand, losses: PeerLosses, limits: WaitLimits
    ) -> None:
        self._peer, self._log, self._in_hand, self._losses = peer, source, in_hand, losses
        self.owned = OwnedCursor(source, row("egress", peer.name), limits.absent_ms)
        self.topics = TopicHolds(source, peer.name, limits.absent_ms, self._forget_plans)
        self.addresses = AddressHolds(source, peer.name, loop_time, *limits[1:], self._forget_plans)
        self.owed = OwedTopics(source, peer.name)
        self.plans = Plans(peer, source, view, self.topics, self.addresses)
        self.reading_back = ReadingBack(self.plans, in_hand, losses)
        self._refusals = Refusals(self.plans, in_hand, self.reading_back)

    def _forget_plans(self, streams: Iterable[int] | None) -> None:
        self.plans.forget_plans(streams)

    # The cursor

    def load(self) -> None:
        """Find the position to go on from, and report what was skipped while the streamer was stopped."""
        self.owned.begin()
        self.plans.read = self.owned.seq
        self.topics.load()
        self.addresses.load()
        self.reading_back.take_merged()
        self.owed.load()
        cursors = self._log.cursors
        for after, seq in units_of(cursors.seqs(), "skipped", self._peer.name).items():
            self._losses.on_gap(int(after), seq + 1, Gap.REASON_SKIPPED)
            cursors.drop(row("skipped", self._peer.name, after))

    def confirm(self) -> None:
        """Move the cursor to just before the oldest record that still waits; back, if reading has gone back."""
        read, oldest = self.plans.read, self._in_hand.oldest_seq
        cursor = read if oldest is None else min(read, oldest - 1)
        if self.addresses and (oldest := self.addresses.oldest_young) is not None:
            cursor = min(cursor, oldest)
        if cursor > self.owned.seq or read < self.owned.seq:
            self.owned.seq = cursor
            self.owned.save()

    def read_to(self, seq: int) -> None:
        """Note that the records up to `seq` were read, or are not there."""
        self.plans.read = max(self.plans.read, seq)

    def pass_unwanted(self) -> None:
        """Pass the records in memory that came after the last step and are not for the peer. Without that a removed
        endpoint that had everything would seem to have a backlog."""
        plans, owned = self.plans, self.owned
        if plans.read != owned.seq:
            return  # something waits
        for chunk in self._log.tail(plans.read) or ():
            if any(plans.plan(stream) is not SKIP for stream in chunk.stream_set):
                break
            plans.read = owned.seq = chunk.last_seq
        owned.save()

    def passed(self, ms: int, *, away_ms: int) -> None:
        """Note that `ms` have passed, and that the peer has been away for the last `away_ms` of them."""
        self.owned.waited(ms, away_ms=away_ms)
        self.topics.wait(ms)

    def positions(self) -> EndpointPositions:
        """Returns what the peer has had, as it is in memory: young holds have no row yet."""
        topics = {stream: hold.after for stream, hold in self.topics.items()}
        addresses = {unit: hold.after for unit, hold in self.addresses.items()}
        return EndpointPositions(self.owned.seq, self.owned.seq, lowest(topics, self.owed), addresses)

    def waits_after(self, stream: int) -> int | None:
        """Returns the seq after which the peer has nothing of a stream; None: it gets nothing of it."""
        targets, is_open = self.plans.wanted(stream)
        seqs = [hold.after for hold in self.plans.holds_of(stream)]
        if targets or is_open:
            seqs.append(max(self.owned.seq, 0 if is_open else min(target.since for target in targets)))
        if (held := self.topics.get(stream)) is not None:
            seqs.append(held.after)
        return min(seqs, default=None)

    # What the network has answered

    def settle(self, settled: Settled[QueuedRecord]) -> Settled[QueuedRecord]:
        """Hold the messages whose address is refused or unheard. Returns the others: sent, to be sent again, or dead
        letters."""
        if settled.again or settled.refused or self.reading_back.trying or self._refusals.fresh:
            settled = self._refusals.sort_out(settled)
        if self._peer.tells_absence:
            self._refusals.heard.update([item[2] for item in settled.sent])
        return settled

    def ends_expired(self, item: QueuedRecord, now_ms: int) -> bool:
        """Returns whether `item` has expired; then it becomes a dead letter."""
        expired = item[1].is_expired(now_ms)
        if expired:
            self.reading_back.skip_trial(item)
            self._losses.dead(item, UCode.DEADLINE_EXCEEDED, "its ttl ran out before the peer took it")
        return expired

    def heard_at(self, addresses: Sequence[str] | None) -> None:
        """Try these addresses, at which somebody listens now; None: all. See UTransport.on_heard."""
        self.addresses.try_heard(addresses)

    def try_all(self) -> None:
        """Try all addresses: the network may take now what it has refused."""
        self.addresses.try_all()

    # Interest and pauses

    def look_again(self, stream: int) -> None:
        """Look who wants this topic."""
        self.plans.forget_plans((stream,))
        self.reading_back.look_again(stream)

    def look_at_all(self, paused: Paused, fresh: frozenset[Pause]) -> None:
        """Look who wants what, and hold what is paused by `fresh`. Then nothing may be in flight."""
        self.plans.forget_all()
        self.reading_back.are_streams_found = False
        if fresh:
            self._hold_paused(paused, fresh)
        self.reading_back.look_at_all()

    def _hold_paused(self, paused: Paused, fresh: frozenset[Pause]) -> None:
        """Hold the topics that were just paused, from the first record that has not left, even if it was read already.
        Everything outside the queue has left or was never read."""
        candidates = self._in_hand.streams.union(self.topics, self.reading_back.targets, *self._streams_in_holds())
        sources = [(stream, self._log.stream(stream).source) for stream in candidates if self._log.knows_stream(stream)]
        concerns = paused.concerns
        held = self._within_capacity(
            {stream for stream, source in sources if any(concerns(pause, self._peer, source) for pause in fresh)}
        )
        first: dict[int, int] = {}  # by stream
        for item in self._take_out(lambda item: item[2] in held):
            first[item[2]] = min(item[0], first.get(item[2], item[0]))
        for stream in held:
            after = self._delivered_up_to(stream)
            self.topics.hold(stream, min(after, first.get(stream, after + 1) - 1))
            self.reading_back.withdraw_topic(stream)
            for hold in self.addresses.values():
                hold.held.take_out(stream)

    def _streams_in_holds(self) -> Iterator[Set[int]]:
        for hold in self.addresses.values():
            if hold.is_loaded and not self.reading_back.are_streams_found:
                yield {stream.id for stream in self._log.streams()}
                return
            yield hold.streams

    def _delivered_up_to(self, stream_id: int) -> int:
        """Returns the seq up to which all targets have had this stream, apart from records in the queue."""
        read = self.plans.read
        had = min([hold.after for hold in self.plans.holds_of(stream_id)], default=read)
        held = self.topics.get(stream_id)
        if held is None:
            return had
        targets, is_open = self.plans.wanted_if_not_paused(stream_id)
        now = {target.authority for target in self.reading_back.targets.get(stream_id, ())}
        if is_open or any(target.authority not in now for target in self.plans.missing(held, targets)):
            return min(had, held.after)  # one target has had nothing of it: the others get it twice
        return min(had, max(held.after, self.reading_back.position) if now else read)

    def _within_capacity(self, held: set[int]) -> set[int]:
        """Returns the topics of `held` for which cursors are free. Records of the others that were read are sent, since
        they would be lost otherwise."""
        beyond = [stream for stream in held if stream not in self.topics]
        beyond = beyond[max(self.topics.free_capacity, 0) :]
        if beyond:
            what = "too many topics are paused: what was read of some leaves all the same"
            log.warning(what, peer=self._peer.name, topics=len(beyond))
        return held.difference(beyond)

    # What is skipped or deleted

    def skip(self, to: int) -> int:
        """Have no record up to `to` wait any more. Called when nothing is in flight. Returns how many messages are
        dropped that were read already."""
        dropped = self._take_out(lambda item: item[0] <= to)
        self.reading_back.skip(to)
        self._pass_to(to)
        return len(dropped)

    def _take_out(self, which: Callable[[QueuedRecord], bool]) -> list[QueuedRecord]:
        """Remove and return what is in hand and not in flight."""
        items = self._in_hand.aside.take_out(which)
        for item in items:
            self.reading_back.withdraw_trial(item)
        return items

    def _pass_to(self, to: int) -> None:
        self.topics.pass_to(to)
        for hold in self.addresses.values():
            self.addresses.move(hold, to)
        self.read_to(to)

    def deleted(self, loss: RetentionLoss) -> None:
        """Report records that retention deleted and this peer may lack: the first few as dead letters, and the rest as
        one range."""
        items = chain.from_iterable(map(items_of, loss.chunks))
        unreported = self._losses.deleted([item for item in items if self._still_wants(item[2], item[0])])
        last = loss.before - 1
        if lost_range := self._unreported(loss, unreported):
            self._losses.lost(*lost_range)
        self._pass_to(last)
        self.reading_back.deleted(last)
        self.owed.move(last)

    def _unreported(self, loss: RetentionLoss, unreported: Sequence[QueuedRecord]) -> tuple[int, int] | None:
        """Returns the seqs before and after what is lost without a dead letter, or may be: `unreported`, and records
        that were not handed over. Of these, holds may lack those behind their positions."""
        last, holds = loss.before - 1, self.addresses.values()
        seen = max((chunk.last_seq for chunk in loss.chunks), default=loss.after)
        begins, before = [item[0] - 1 for item in unreported[:1]], loss.before
        if last > seen:
            first = [
                hold.held.head[0] - 1 if hold.held.head is not None else self.reading_back.sent_of_hold(hold)
                for hold in holds
            ]
            first += map(self.reading_back.sent_of_topic, self.topics)
            begins += [max(seen, after) for after in first if after < last]
        if last > max(seen, self.plans.read):
            begins.append(max(loss.after, min(self.owned.seq, last)))
        elif begins and last == seen:
            before = unreported[-1][0] + 1
        return (min(begins), before) if begins else None

    def _still_wants(self, stream: int, seq: int) -> bool:
        if stream in self.topics:
            return seq > self.reading_back.sent_of_topic(stream)
        if any(seq > self.reading_back.sent_of_hold(hold) for hold in self.plans.holds_of(stream)):
            return True
        if seq <= self.plans.read:
            return False  # it waits in memory, or has left
        targets, is_open = self.plans.wanted(stream)
        return is_open or any(seq > target.since for target in targets)

    # Publishes that a follower reads from our history

    def _is_publish(self, stream: int) -> bool:
        return self._log.knows_stream(stream) and is_publish(self._log.stream(stream))

    @property
    def has_publishes(self) -> bool:
        """True if some publishes wait at a position of their own."""
        return bool(self.owed) or any(map(self._is_publish, self.topics)) or bool(self.addresses)

    def hand_over(self) -> int:
        """Stop sending publishes. Returns the seq up to which all have left, except those that are now `owed`. Nothing
        may be in flight, and `confirm` has to follow."""
        publishes = set(filter(self._is_publish, self._in_hand.streams))
        unsent = self._take_out(lambda item: item[2] in publishes)
        self._owe()
        # for records of a hold that are tried or read back, the position from which they are owed counts
        first = [seq for seq, _, stream in unsent if seq <= self.owed.get(stream, seq)]
        self.continue_followed()
        return min([self.plans.read, *(seq - 1 for seq in first)])

    def continue_followed(self) -> None:
        """Send no publish: a follower reads them."""
        self.plans.is_followed = True
        self.plans.forget_plans(None)

    def _owe(self) -> None:
        """End the holds of publishes: the follower reads their records from our history, after the hold's position."""
        owed: dict[int, int] = {}
        for stream in list(filter(self._is_publish, self.topics)):
            owed[stream] = self.topics[stream].after
            self.topics.forget(stream)
            self.reading_back.forget_topic(stream)
        for hold in list(self.addresses.values()):
            publishes = [
                stream for stream in hold.streams if self._is_publish(stream) and self.plans.targets_of(hold, stream)
            ]
            for stream in publishes:
                owed[stream] = min(hold.after, owed.get(stream, hold.after))
            hold.streams.difference_update(publishes)
            for stream in publishes:
                hold.held.take_out(stream)
            hold.held.forget_head()
            if not hold.streams:
                self.addresses.drop(hold)
        for stream in list(filter(self._is_publish, self.reading_back.targets)):
            self.reading_back.withdraw_topic(stream)
        self.owed.add(owed)

    def take_back(self, seq: int, had: int) -> int:
        """Send the publishes with a greater seq, and those that are owed beyond `had`. Returns the seq after which the
        log is read now. Nothing may be in flight, and `confirm` has to follow."""
        plans = self.plans
        plans.is_followed = False
        for stream, after in self.owed.items():
            if self._log.knows_stream(stream) and max(after, had) < seq:
                self.topics.hold(stream, max(after, had))
                self.reading_back.look_again(stream)
        self.owed.clear_all()
        plans.forget_plans(None)
        if seq < plans.read:
            plans.pushed_to, plans.read = plans.read, max(seq, self._log.floor_seq)
        return plans.read

    def acknowledged(self) -> None:
        """Note that the follower has read something, and so what is owed."""
        self.owed.clear_all()

    # Streams

    def streams_in_hand(self) -> set[int]:
        """Returns the streams of records that were read and have not left, and those of holds: the log keeps them."""
        under_way = {item[2] for item in self._in_hand.under_way}
        wanted, targets = self.reading_back.wanted, self.reading_back.targets
        return self._in_hand.streams.union(under_way, self.topics, self.owed, wanted, targets)

    def forget(self, streams: frozenset[int]) -> None:
        self.plans.forget(streams)
        self._refusals.heard.difference_update(streams)
