"""Which records wait in one held address, and the first message of them, within the limits of a peer."""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from typing import Final

from streamer.walk.sender import QueuedRecord

# seqs of one peer that are counted, 8 bytes each; of more a part is known ("at least")
HELD_COUNTED_MAX: Final = 1 << 20
HEADS_BYTES_MAX: Final = 4 << 20  # of first messages in memory; the others are read from the log


@dataclass(slots=True)
class HeldBudget:
    """What all held addresses of a peer have in memory."""

    counted: int = 0
    heads_bytes: int = 0


class HeldRecords:
    """The seqs that wait in one hold, in order, by stream. A record may come by several ways, and counts once."""

    __slots__ = ("_budget", "_seqs", "are_counted", "count", "head")

    def __init__(self, budget: HeldBudget) -> None:
        self._budget = budget
        self._seqs: dict[int, array[int]] = {}
        self.count = 0
        self.are_counted = True  # False: more records wait than are counted
        self.head: QueuedRecord | None = None  # the first message that waits, if it is in memory

    def add(self, seq: int, stream: int) -> None:
        """Count the record `seq`, unless it is counted already."""
        seqs = self._seqs.get(stream)
        if seqs is None:
            seqs = self._seqs[stream] = array("Q")
        at = len(seqs) if not seqs or seqs[-1] < seq else bisect_left(seqs, seq)
        if at < len(seqs) and seqs[at] == seq:
            return
        if self._budget.counted >= HELD_COUNTED_MAX:
            self.are_counted = False
            return
        seqs.insert(at, seq)
        self.count += 1
        self._budget.counted += 1

    def add_all(self, other: HeldRecords) -> None:
        for stream, seqs in other._seqs.items():
            for seq in seqs:
                self.add(seq, stream)
        self.are_counted = self.are_counted and other.are_counted

    def _remove(self, count: int) -> None:
        self.count -= count
        self._budget.counted -= count

    def take_out(self, stream: int) -> None:
        """Count the records of `stream` no longer: they wait elsewhere."""
        self._remove(len(self._seqs.pop(stream, ())))

    def pass_to(self, after: int) -> None:
        """Note that nothing up to `after` waits any more."""
        for seqs in self._seqs.values():
            if passed := bisect_right(seqs, after):
                del seqs[:passed]
                self._remove(passed)
        if self.head is not None and self.head[0] <= after:
            self.forget_head()

    def clear(self) -> None:
        self._remove(self.count)
        self._seqs.clear()
        self.are_counted = True

    # The first message

    def offer_head(self, item: QueuedRecord, after: int) -> None:
        """Keep `item`, which waits, if it is the first one after the position `after`."""
        others_wait = not self.are_counted or self.count > 1
        if self.head is None and others_wait and item[0] - 1 > after:
            return  # the first message is not in memory
        if self.head is None or item[0] < self.head[0]:
            self.forget_head()
            if self._budget.heads_bytes + len(item[1].payload) <= HEADS_BYTES_MAX:
                self.keep_head(item)

    def keep_head(self, item: QueuedRecord) -> None:
        self.head = item
        self._budget.heads_bytes += len(item[1].payload)

    def forget_head(self) -> None:
        if self.head is not None:
            self._budget.heads_bytes -= len(self.head[1].payload)
            self.head = None
