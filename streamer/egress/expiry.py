"""What retention deletes before the peer got it: the first few records are dead letters, the rest is one range.

A person looks at dead letters; a range is a gap, in the log of the streamer and in what it counts as lost.
"""

from __future__ import annotations

from itertools import chain
from typing import Final

from history.log.log import RetentionLoss
from streamer.egress.catch_up import CatchUp
from streamer.egress.plans import Plans, items_of
from streamer.egress.topic_holds import OwedTopics
from streamer.walk.sender import QueuedRecord
from uprotocol.v1.ucode_pb2 import UCode

PASSED_LETTERS_MAX: Final = 100  # until the peer takes messages again


class Expiry:
    """Reports what retention deletes of one pump, whose plans and holds it shares, and moves them behind it."""

    def __init__(self, plans: Plans, owed: OwedTopics, catch_up: CatchUp) -> None:
        self._plans, self._owed, self._catch_up = plans, owed, catch_up
        self._topic_holds, self._address_holds = plans.topic_holds, plans.address_holds
        self.refill()

    def refill(self) -> None:
        """Allow PASSED_LETTERS_MAX dead letters again."""
        self._letters_left = PASSED_LETTERS_MAX

    def passed(self, passed: RetentionLoss, cursor: int) -> None:
        """Report records that retention deleted and this peer may lack: the first few as dead letters, and the rest as
        one range."""
        plans, catch_up = self._plans, self._catch_up
        items = chain.from_iterable(map(items_of, passed.chunks))
        lost = [item for item in items if self._still_wants(item[2], item[0])]
        reported = lost[: self._letters_left]
        self._letters_left -= len(reported)
        for item in reported:
            catch_up.reading.dead(item, UCode.RESOURCE_EXHAUSTED, "the log had to delete it before the peer was back")
        last = passed.before - 1
        if lost_range := self._unreported(passed, lost[len(reported) :], cursor):
            catch_up.reading.lost(*lost_range)
        for stream, held in self._topic_holds.items():
            if held.after < last:
                self._topic_holds.move(stream, last)
        for hold in self._address_holds.values():
            self._address_holds.move(hold, last)
        catch_up.position = max(catch_up.position, min(last, catch_up.until))
        plans.read = max(plans.read, last)
        self._owed.move(last)

    def _unreported(self, passed: RetentionLoss, unreported: list[QueuedRecord], cursor: int) -> tuple[int, int] | None:
        """Returns the seqs before and after what is lost without a dead letter, or may be: `unreported`, and records
        that were not handed over. Of these, holds may lack those behind their positions."""
        last, holds = passed.before - 1, self._address_holds.values()
        seen = max((chunk.last_seq for chunk in passed.chunks), default=passed.after)
        begins, before = [item[0] - 1 for item in unreported[:1]], passed.before
        if last > seen:
            first = [
                hold.held.head[0] - 1 if hold.held.head is not None else self._catch_up.sent_of_hold(hold)
                for hold in holds
            ]
            first += map(self._catch_up.sent_of_topic, self._topic_holds)
            begins += [max(seen, after) for after in first if after < last]
        if last > max(seen, self._plans.read):
            begins.append(max(passed.after, min(cursor, last)))
        elif begins and last == seen:
            before = unreported[-1][0] + 1
        return (min(begins), before) if begins else None

    def _still_wants(self, stream: int, seq: int) -> bool:
        if stream in self._topic_holds:
            return seq > self._catch_up.sent_of_topic(stream)
        if any(seq > self._catch_up.sent_of_hold(hold) for hold in self._plans.holds_of(stream)):
            return True
        if seq <= self._plans.read:
            return False  # it waits in memory, or has left
        targets, is_open = self._plans.wanted(stream)
        return is_open or any(seq > target.since for target in targets)
