"""What retention deletes before the peer got it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from history.log.log import RetentionLoss
from streamer.egress.losses import PeerLosses
from streamer.egress.plans import Plans, items_of
from streamer.egress.reading_back import ReadingBack
from streamer.egress.topic_holds import OwedTopics
from streamer.walk.sender import QueuedRecord


class Expiry:
    """Reports what retention deletes of one pump, whose plans and holds it shares, and moves them behind it."""

    def __init__(self, plans: Plans, owed: OwedTopics, reading_back: ReadingBack, losses: PeerLosses) -> None:
        self._plans, self._owed, self._reading_back, self._losses = plans, owed, reading_back, losses
        self._topic_holds, self._address_holds = plans.topic_holds, plans.address_holds

    def passed(self, passed: RetentionLoss, cursor: int) -> None:
        """Report records that retention deleted and this peer may lack: the first few as dead letters, and the rest as
        one range."""
        plans = self._plans
        items = chain.from_iterable(map(items_of, passed.chunks))
        unreported = self._losses.deleted([item for item in items if self._still_wants(item[2], item[0])])
        last = passed.before - 1
        if lost_range := self._unreported(passed, unreported, cursor):
            self._losses.lost(*lost_range)
        for stream, held in self._topic_holds.items():
            if held.after < last:
                self._topic_holds.move(stream, last)
        for hold in self._address_holds.values():
            self._address_holds.move(hold, last)
        self._reading_back.deleted(last)
        plans.read = max(plans.read, last)
        self._owed.move(last)

    def _unreported(
        self, passed: RetentionLoss, unreported: Sequence[QueuedRecord], cursor: int
    ) -> tuple[int, int] | None:
        """Returns the seqs before and after what is lost without a dead letter, or may be: `unreported`, and records
        that were not handed over. Of these, holds may lack those behind their positions."""
        last, holds = passed.before - 1, self._address_holds.values()
        seen = max((chunk.last_seq for chunk in passed.chunks), default=passed.after)
        begins, before = [item[0] - 1 for item in unreported[:1]], passed.before
        if last > seen:
            first = [
                hold.held.head[0] - 1 if hold.held.head is not None else self._reading_back.sent_of_hold(hold)
                for hold in holds
            ]
            first += map(self._reading_back.sent_of_topic, self._topic_holds)
            begins += [max(seen, after) for after in first if after < last]
        if last > max(seen, self._plans.read):
            begins.append(max(passed.after, min(cursor, last)))
        elif begins and last == seen:
            before = unreported[-1][0] + 1
        return (min(begins), before) if begins else None

    def _still_wants(self, stream: int, seq: int) -> bool:
        if stream in self._topic_holds:
            return seq > self._reading_back.sent_of_topic(stream)
        if any(seq > self._reading_back.sent_of_hold(hold) for hold in self._plans.holds_of(stream)):
            return True
        if seq <= self._plans.read:
            return False  # it waits in memory, or has left
        targets, is_open = self._plans.wanted(stream)
        return is_open or any(seq > target.since for target in targets)
