"""Refusals: the network refuses an address, or nobody listens. Its records begin to wait, and those behind them in the
queue; a trial that was taken shows that they may leave."""

from __future__ import annotations

from collections.abc import Sequence, Set

from streamer.egress.address_holds import AddressHold
from streamer.egress.hold_state import RETURNING
from streamer.egress.in_hand import InHand
from streamer.egress.plans import Plans
from streamer.egress.reading_back import ReadingBack
from streamer.egress.reasons import Kind, fate_of_failure, fate_of_refusal
from streamer.walk.sender import QueuedRecord, key_of
from transports.base import NOT_TRIED
from uprotocol.status import Settled
from uprotocol.v1.ustatus_pb2 import UStatus

Refused = tuple[QueuedRecord, UStatus, Kind]
"""A message that is to be held, the answer of the network, and the kind of the hold."""


class Refusals:
    """What a network has not taken of one pump, whose plans, holds and queue it shares."""

    def __init__(self, plans: Plans, in_hand: InHand, reading_back: ReadingBack) -> None:
        self._plans, self._peer, self._log = plans, plans.peer, plans.log
        self._address_holds = plans.address_holds
        self._in_hand, self._sender, self._reading_back = in_hand, in_hand.sender, reading_back
        # new holds, until `_fresh_until` batches are answered: messages that were under way beside theirs may still be
        # taken, which shows that the network takes such messages now
        self.fresh: set[AddressHold] = set()
        self._fresh_until = 0
        self.heard: set[int] = set()  # streams of which the network has taken a message since the start

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
        for refused in held:
            item, status, kind = refused
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
                beyond.append(refused)
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
