"""A plan: where to divide the matching records of a log into parts of some size, without sending them.

most streams of the log match -> its records are counted: each seq is one, but those in holes and of  -> Cuts -> LogPlan
                                 other streams, which the index of streams finds                        |
else                          -> scan, with the index of streams and without messages -> seqs ---------'

Damage that nobody has noticed yet is noticed by who reads the parts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Final

from history.log.log import Log
from history.records.chunk import Scan
from history.service.matches import Match
from uprotocol.core.ustreamer.v1.ustreamer_pb2 import LogPlan, Position, Witness

PLAN_RECORDS_MAX: Final = 1_000_000  # by default
PLAN_CUTS_MAX: Final = 1_000  # in one answer: some 70 KiB
# scans of one log for one answer, some 20 ms each: two million records. Nothing is sent, so they may be more than those
# of other polls
PLAN_STEPS_MAX: Final = 32
OTHERS_SHARE: Final = 2  # records are counted if at most one in so many is of a stream that does not match
OTHERS_RECORDS_MAX: Final = 10_000  # of these, in one step
CUTS_PER_STEP: Final = 50  # get their witnesses from memory in one step on the loop, a millisecond


@dataclass(slots=True)
class Cut:
    """Some records, and where they begin and end."""

    first_seq: int
    first_time_ms: int  # 0: unknown
    seq: int = 0
    records: int = 0


class Cuts:
    """Divides records, which come in log order, into parts of `size` records. It takes `records_max` records and
    `cuts_max` parts at most; the last part may be smaller."""

    def __init__(self, size: int, records_max: int, cuts_max: int) -> None:
        self._size = size
        self.left = min(records_max, size * cuts_max)  # records that it still takes
        self.records = 0
        self.cuts: list[Cut] = []

    def add(self, seqs: Sequence[int], time_ms: int) -> None:
        """Add records that were appended at `time_ms`; not more than `left`."""
        assert len(seqs) <= self.left, "no more is read than fits"
        self.left -= len(seqs)
        self.records += len(seqs)
        begin = 0
        while begin < len(seqs):
            if not self.cuts or self.cuts[-1].records == self._size:
                self.cuts.append(Cut(seqs[begin], time_ms))
            cut = self.cuts[-1]
            end = min(begin + self._size - cut.records, len(seqs))
            cut.records += end - begin
            cut.seq = seqs[end - 1]
            begin = end


async def plan_step(log: Log, match: Match, after: int, until: int, cuts: Cuts) -> Scan:
    """Add the matching records after `after`, up to and including `until`, as far as one step goes and `cuts` takes
    them. The answer's chunks mean nothing."""
    others = match.others()
    if others is None or sum(one.records for one in others) > log.newest_seq // OTHERS_SHARE:
        found = await log.scan(after, max_records=cuts.left, max_bytes=1, streams=match.ids, until=until, bare=True)
        for chunk in found.chunks:
            cuts.add(chunk.seqs, chunk.time_ms)
        return found
    ids = {one.id for one in others if one.newest_seq > after}
    if not ids:
        found = Scan(after, until, 0, 0, floor_seq=log.floor_seq)
        found.covered = until
        found.gaps = [(max(after, low), before) for low, before in log.holes if low < until and after < before - 1]
    else:
        found = await log.scan(after, max_records=OTHERS_RECORDS_MAX, max_bytes=1, streams=ids, until=until, bare=True)
    _count(found, cuts)
    return found


def _count(found: Scan, cuts: Cuts) -> None:
    """Add all records that `found` has covered, without those in it, and those in its gaps."""
    begin = max(found.after, found.floor_seq)
    of_others = ((seq - 1, seq + 1) for chunk in found.chunks for seq in chunk.seqs)
    for low, before in sorted((*found.gaps, *of_others, (found.covered, found.covered + 1))):
        records = range(begin + 1, min(low, found.covered) + 1)
        taken = records[: cuts.left]
        cuts.add(taken, 0)
        if len(taken) < len(records):
            break
        begin = max(begin, before - 1)
    if not cuts.left:
        found.covered = cuts.cuts[-1].seq
        found.gaps = [gap for gap in found.gaps if gap[0] < found.covered]


async def log_plan(
    log: Log, match: Match, cuts: Cuts, witnesses: Callable[[Log, int], Awaitable[list[Witness]]]
) -> LogPlan:
    """`witnesses(log, seq)`: of the record there. They are read from disk for the last cut only."""
    untimed = [cut for cut in cuts.cuts if not cut.first_time_ms]
    if untimed:
        for cut, time_ms in zip(untimed, await log.times_of([cut.first_seq for cut in untimed]), strict=True):
            cut.first_time_ms = time_ms
    newest = log.newest_seq if match.has_all else await match.newest_seq()
    plan = LogPlan(incarnation=log.incarnation, newest_match_seq=newest)
    for number, cut in enumerate(cuts.cuts, 1):
        is_at_hand = cut.seq > log.in_memory_after or number == len(cuts.cuts)
        position = Position(
            incarnation=log.incarnation,
            seq=cut.seq,
            witnesses=await witnesses(log, cut.seq) if is_at_hand else (),
            in_memory=not log.durable,
        )
        plan.cuts.add(position=position, records=cut.records, first_time_ms=cut.first_time_ms)
        if number % CUTS_PER_STEP == 0:
            await asyncio.sleep(0)
    return plan
