"""Which records of a followed history were pushed to us before we took over: our own log says it, not the history.

position when we ended, or when the history pushed again -> read from there -> in our log? -> dropped, "pushed_before"
                                                                               '-> stored: nobody had pushed it, a
                                                                                   network lost it, or we lost it
Both logs have the records of a topic in nearly the same order, so mostly a short part of ours answers for a batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from history.log.log import Log, find_ids
from history.records.chunk import Origin
from history.records.epoch import Epoch
from history.records.record import Record
from uprotocol.encoded import EncodedMessage

# a position may be stored after pushes that are beyond it: where the history pushes again, and we have not heard it yet
SLACK: Final = 65_536


class Sorted(NamedTuple):
    """A record of ours, and the log that it goes to."""

    target: Log
    stream: int
    message: EncodedMessage
    key: bytes | None  # in the window of ids
    origin: Origin | None
    epoch: Epoch | None


class PushedBefore:
    """`up_to`: by log of the history, the seq up to which it may have pushed its records. `after`: what it has pushed
    of records beyond our position is beyond this seq of our durable log `log`."""

    def __init__(self, log: Log, after: int) -> None:
        self._log, self.after, self.up_to = log, after, dict[bytes, int]()
        self._near = self._after  # where the records of the last batch were found

    @property
    def _after(self) -> int:
        return max(self.after - SLACK, self._log.floor_seq)

    def concerns(self, record: Record) -> bool:
        return record.seq <= self.up_to.get(record.incarnation, 0)

    def seq_here(self, positions: Iterable[tuple[bytes, int]]) -> int:
        """Returns `after` for a position in the history that is stored now."""
        is_reached = all(seq >= self.up_to.get(incarnation, 0) for incarnation, seq in positions)
        return self._log.newest_seq if is_reached else self.after

    async def had(self, sorted: Sequence[Sorted]) -> frozenset[tuple[int, bytes]]:
        """Returns stream and id of those that our durable log has. Raises UStatusError."""
        log, first = self._log, self._after
        wanted = {
            (one.stream, one.message.id_bytes)
            for one in sorted
            if one.target is log and log.stream(one.stream).newest_seq > first
        }
        found, newest = dict[tuple[int, bytes], int](), log.newest_seq
        for begin, end in ((self._near, newest), (first, self._near)):
            at = begin
            while wanted - found.keys() and at < end:
                here, at = await find_ids(log, {id for _, id in wanted}, at, end)
                found |= {key: seq for key, seq in here.items() if key in wanted}
        if found:
            self._near = max(first, min(found.values()) - 1)
        return frozenset(found)
