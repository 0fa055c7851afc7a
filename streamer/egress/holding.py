"""Holding: records begin to wait toward one peer. They wait in the log at a position of their own, and
reading_back.py sends them later.

the network refuses an address, or nobody listens -> AddressHolds; so do the records behind it in the queue
an operator has paused the topic                  -> TopicHolds, from the first record that has not left
a follower reads publishes from our history       -> OwedTopics: those that were held; the pump sends no publish
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set

import structlog

from history.records.chunk import is_publish
from streamer.egress.address_holds import AddressHold
from streamer.egress.hold_state import RETURNING
from streamer.egress.in_hand import InHand
from streamer.egress.plans import Plans
from streamer.egress.reading_back import ReadingBack
from streamer.egress.reasons import Kind, fate_of_failure, fate_of_refusal
from streamer.egress.topic_holds import OwedTopics
from streamer.walk.paused import Pause, Paused
from streamer.walk.sender import QueuedRecord, key_of
from transports.base import NOT_TRIED
from uprotocol.status import Settled
from uprotocol.v1.ustatus_pb2 import UStatus

Refused = tuple[QueuedRecord, UStatus, Kind]
"""A message that is to be held, the answer of the network, and the kind of the hold."""

log = structlog.get_logger()


class Holding:
    """What begins to wait in one pump, whose plans, holds and queue it shares."""

    def __init__(self, plans: Plans, owed: OwedTopics, in_hand: InHand, reading_back: ReadingBack) -> None:
        self._plans, self._peer, self._log, self._owed = plans, plans.peer, plans.log, owed
        self._topic_holds, self._address_holds = plans.topic_holds, plans.address_holds
        self._in_hand, self._sender, self._reading_back = in_hand, in_hand.sender, reading_back
        # new holds, until `_fresh_until` batches are answered: messages that were under way beside theirs may still be
        # taken, which shows that the network takes such messages now
        self.fresh: set[AddressHold] = set()
        self._fresh_until = 0
        self.heard: set[int] = set()  # streams of which the network has taken a message since the start

    # Refused and unheard addresses

    def sort_out(self, settled: Settled[QueuedRecord]) -> Settled[QueuedRecord]:
        """Hold the messages whose address is refused or unheard, and note the trials that were taken. Returns the
        others: sent, to be sent again, or dead letters."""
        again, dead = list[tuple[QueuedRecord, UStatus]](), list[tuple[QueuedRecord, UStatus]]()
        held = list[Refused]()
        durable = self._log.durable
        fates = [(fate_of_failure(*answer, is_durable=durable), *answer) for answer in settled.again]
        fates += [(fate_of_refusal(answer[1], is_durable=durable), *answer) for answer in settled.refused]
        for fate, item, status in fates:
            if fate == "again":
                again.append((item, status))
            elif fate == "dead":
                dead.append((item, status))
            elif fate == "nobody":
                self._peer.dropped["nobody_listens"] += 1
            else:
                held.append((item, status, fate))
        reading_back = self._reading_back
        if reading_back.trying:
            tried = {seq for seq, _ in reading_back.trying}
            for item in settled.sent:
                if item[0] in tried and (hold := reading_back.trial_of(item)) is not None and not hold.is_over:
                    reading_back.was_taken(hold, item)
            for item, _ in dead:
                reading_back.skip_trial(item)
        for item, status, kind in self._hold(held, [item for item, _ in again]):
            if kind == "refused":
                dead.append((item, status))
            else:
                self._peer.dropped["nobody_listens"] += 1
        if self.fresh:
            self._try_fresh(settled.sent)
        again = self._without_those_behind(again)
        if settled.sent and again and reading_back.is_under_way:
            again = self._hold_what_is_stuck(again)
        return Settled(settled.sent, again, dead)

    def _hold_what_is_stuck(self, failed: list[tuple[QueuedRecord, UStatus]]) -> list[tuple[QueuedRecord, UStatus]]:
        """While something is read back, hold streams that fail although others get through, as if they were refused.
        The reading back can then end, and the positions of these streams are on disk. Returns the others."""
        stuck = {key_of(item[1]) for item, status in failed if status.message != NOT_TRIED}
        held, again = list[Refused](), list[tuple[QueuedRecord, UStatus]]()
        for item, status in failed:
            if item[0] <= self._reading_back.until and key_of(item[1]) in stuck and self._log.durable:
                held.append((item, status, "refused"))
            else:
                again.append((item, status))
        return again + [(item, status) for item, status, _ in self._hold(held, [item for item, _ in again])]

    def _without_those_behind(self, again: list[tuple[QueuedRecord, UStatus]]) -> list[tuple[QueuedRecord, UStatus]]:
        """Have messages that failed wait in the hold of their address, if it is held meanwhile: in the queue they would
        be behind its position. So do those of their streams that follow. Returns the others."""
        others, streams = list[tuple[QueuedRecord, UStatus]](), set[int]()
        for item, status in again:
            if (hold := self._hold_of(item)) is None:
                others.append((item, status))
            else:
                self._address_holds.wait_behind(hold, item)
                streams.add(item[2])
        if streams:
            self._wait_behind(streams)
        return others

    def _hold(self, held: Sequence[Refused], again: Sequence[QueuedRecord]) -> list[Refused]:
        """Hold these, and behind them the queued messages for their addresses. Returns those that can't be held
        because too many addresses are. `again`: messages that have failed, and are not in the queue."""
        beyond = list[Refused]()
        if not held:
            return beyond
        streams, holds, first = set[int](), set[AddressHold](), dict[AddressHold, int]()
        is_shared = False
        for one in held:
            item, status, kind = one
            address, authority = self._peer.addressed(item[1])
            known = self._address_holds.of(address, authority)
            if known is not None:
                if not known.is_waiting:
                    streams |= known.streams
                    if known.progress.state is RETURNING:
                        first[known] = self._plans.read
                is_shared |= known.is_new_to(item[2])
            was_tried, was_heard = self._reading_back.trial_of(item) is not None, item[2] in self.heard
            hold = self._address_holds.hold(
                address, authority, known, item, status, kind, was_heard=was_heard, was_tried=was_tried
            )
            if hold is None:
                beyond.append(one)
                continue
            if self._peer.spans is not None:
                self._peer.spans.held(self._peer.name, item[1], kind, status)
            streams.add(item[2])
            holds.add(hold)
        self._wait_behind(None if is_shared else streams)
        if first:
            self._move_returning(first, [*(item for item, *_ in held), *again])
        self.fresh |= holds
        self._fresh_until = self._sender.begun
        return beyond

    def _wait_behind(self, streams: Set[int] | None) -> None:
        """Move queued messages whose address is now held into its hold: those of `streams`, or all (None)."""

        def is_held(item: QueuedRecord) -> bool:
            return (streams is None or item[2] in streams) and self._hold_of(item) is not None

        for item in self._in_hand.aside.take_out(is_held):
            if (hold := self._hold_of(item)) is not None:
                self._address_holds.wait_behind(hold, item)

    def _move_returning(self, first: dict[AddressHold, int], unsent: Sequence[QueuedRecord]) -> None:
        """Move holds that were refused again while they were read back. Everything before the first message that waits
        was taken; nothing after the position of the reading back was read."""
        for item in (*unsent, *self._in_hand.under_way):
            hold = self._address_holds.of(*self._peer.addressed(item[1]))
            if hold in first:
                first[hold] = min(first[hold], item[0])
        for hold, seq in first.items():
            head = hold.held.head[0] if hold.held.head is not None else seq
            self._address_holds.move(hold, min(seq, head, self._reading_back.position + 1) - 1)

    def _hold_of(self, item: QueuedRecord) -> AddressHold | None:
        """Returns the hold in which this message must wait; None: it may leave."""
        if (item[0], item[1].stamp.address) in self._reading_back.trying:
            return None
        hold = self._address_holds.of(*self._peer.addressed(item[1]))
        return hold if hold is not None and hold.is_waiting else None

    def _try_fresh(self, sent: Sequence[QueuedRecord]) -> None:
        """Try new holds again if a message that left after theirs was taken: the network takes such messages now."""
        for item in sent:
            hold = self._address_holds.of(*self._peer.addressed(item[1]))
            if hold in self.fresh and item[0] > hold.after:
                self.fresh.discard(hold)
                self._address_holds.try_now(hold)
        if self._sender.ended >= self._fresh_until:
            self.fresh.clear()

    # Pauses

    def hold_paused(self, paused: Paused, fresh: frozenset[Pause]) -> None:
        """Hold the topics that were just paused, from the first record that has not left, even if it was read already.
        Called when no batch is in flight: everything outside the queue has left or was never read.
        """
        candidates = self._in_hand.streams.union(
            self._topic_holds, self._reading_back.targets, *self._streams_in_holds()
        )
        sources = [(stream, self._log.stream(stream).source) for stream in candidates if self._log.knows_stream(stream)]
        concerns = paused.concerns
        held = self._within_capacity(
            {stream for stream, source in sources if any(concerns(pause, self._peer, source) for pause in fresh)}
        )
        first: dict[int, int] = {}  # by stream
        for item in self._in_hand.aside.take_out(lambda item: item[2] in held):
            first[item[2]] = min(item[0], first.get(item[2], item[0]))
            self._reading_back.withdraw_trial(item)
        for stream in held:
            after = self._delivered_up_to(stream)
            self._topic_holds.hold(stream, min(after, first.get(stream, after + 1) - 1))
            self._reading_back.withdraw_topic(stream)
            for hold in self._address_holds.values():
                hold.held.take_out(stream)

    def _streams_in_holds(self) -> Iterator[Set[int]]:
        for hold in self._address_holds.values():
            if hold.is_loaded and not self._reading_back.are_streams_found:
                yield {stream.id for stream in self._log.streams()}
                return
            yield hold.streams

    def _delivered_up_to(self, stream_id: int) -> int:
        """Returns the seq up to which all targets have had this stream, apart from records in the queue."""
        read = self._plans.read
        had = min([hold.after for hold in self._plans.holds_of(stream_id)], default=read)
        held = self._topic_holds.get(stream_id)
        if held is None:
            return had
        targets, is_open = self._plans.wanted_if_not_paused(stream_id)
        now = {target.authority for target in self._reading_back.targets.get(stream_id, ())}
        if is_open or any(target.authority not in now for target in self._plans.missing(held, targets)):
            return min(had, held.after)  # one target has had nothing of it: the others get it twice
        return min(had, max(held.after, self._reading_back.position) if now else read)

    def _within_capacity(self, held: set[int]) -> set[int]:
        """Returns the topics of `held` for which cursors are free. Records of the others that were read are sent, since
        they would be lost otherwise."""
        beyond = [stream for stream in held if stream not in self._topic_holds]
        beyond = beyond[max(self._topic_holds.free_capacity, 0) :]
        if beyond:
            what = "too many topics are paused: what was read of some leaves all the same"
            log.warning(what, peer=self._peer.name, topics=len(beyond))
        return held.difference(beyond)

    # Skipping

    def skip(self, to: int) -> int:
        """Have no record up to `to` wait any more. Called when nothing is in flight. Returns how many messages are
        dropped that were read already."""
        dropped = self._in_hand.aside.take_out(lambda item: item[0] <= to)
        for item in dropped:
            self._reading_back.withdraw_trial(item)
        for stream, held in self._topic_holds.items():
            if held.after < to:
                self._topic_holds.move(stream, to)
        for hold in self._address_holds.values():
            self._address_holds.move(hold, to)
        self._reading_back.skip(to)
        self._plans.read = max(self._plans.read, to)
        return len(dropped)

    # Publishes that a follower reads from our history

    def _is_publish(self, stream: int) -> bool:
        return self._log.knows_stream(stream) and is_publish(self._log.stream(stream))

    @property
    def has_publishes(self) -> bool:
        """True if some publishes wait at a position of their own."""
        return bool(self._owed) or any(map(self._is_publish, self._topic_holds)) or bool(self._address_holds)

    def stop_publishes(self) -> int:
        """Stop sending publishes. Returns the seq up to which all have left, except those that are now `owed`. Nothing
        may be in flight, and `Pump.confirm` has to follow."""
        publishes = set(filter(self._is_publish, self._in_hand.streams))
        unsent = self._in_hand.aside.take_out(lambda item: item[2] in publishes)
        for item in unsent:
            self._reading_back.withdraw_trial(item)
        self._owe()
        # for records of a hold that are tried or read back, the position from which they are owed counts
        first = [seq for seq, _, stream in unsent if seq <= self._owed.get(stream, seq)]
        self._plans.is_followed = True
        self._plans.forget_plans(None)
        return min([self._plans.read, *(seq - 1 for seq in first)])

    def _owe(self) -> None:
        """End the holds of publishes: the follower reads their records from our history, after the hold's position."""
        owed: dict[int, int] = {}
        for stream in list(filter(self._is_publish, self._topic_holds)):
            owed[stream] = self._topic_holds[stream].after
            self._topic_holds.forget(stream)
            self._reading_back.forget_topic(stream)
        for hold in list(self._address_holds.values()):
            publishes = [one for one in hold.streams if self._is_publish(one) and self._plans.targets_of(hold, one)]
            for stream in publishes:
                owed[stream] = min(hold.after, owed.get(stream, hold.after))
            hold.streams.difference_update(publishes)
            for stream in publishes:
                hold.held.take_out(stream)
            hold.held.forget_head()
            if not hold.streams:
                self._address_holds.drop(hold)
        for stream in list(filter(self._is_publish, self._reading_back.targets)):
            self._reading_back.withdraw_topic(stream)
        self._owed.add(owed)

    def resume_publishes(self, seq: int, had: int) -> int:
        """Send the publishes with a greater seq, and those that are owed beyond `had`. Returns the seq after which the
        log is read now. Nothing may be in flight, and `Pump.confirm` has to follow."""
        plans = self._plans
        plans.is_followed = False
        for stream, after in self._owed.items():
            if self._log.knows_stream(stream) and max(after, had) < seq:
                self._topic_holds.hold(stream, max(after, had))
                self._reading_back.look_again(stream)
        self._owed.clear_all()
        plans.forget_plans(None)
        if seq < plans.read:
            plans.pushed_to, plans.read = plans.read, max(seq, self._log.floor_seq)
        return plans.read

    # Streams

    def streams_in_hand(self) -> set[int]:
        """Returns the streams of records that were read and have not left, and those of holds: the log keeps them."""
        under_way = {item[2] for item in self._in_hand.under_way}
        found, targets = self._reading_back.found, self._reading_back.targets
        return self._in_hand.streams.union(under_way, self._topic_holds, self._owed, found, targets)

    def forget(self, streams: frozenset[int]) -> None:
        """Forget streams that the log has forgotten."""
        self._plans.forget(streams)
        self.heard.difference_update(streams)
