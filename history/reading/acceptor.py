"""Takes the records of a history's answers: each once, in order, and none after one that is missing.

answer -> decode -> records -> judge: does it directly follow the last one of its topic? -> Accepted: records, gaps
                    gaps -> each is reported once                                           and the state
state: where to go on in each log, the witnesses of that, which logs have given nothing
"""

from __future__ import annotations

import enum
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from history.records import witness
from history.records.chunk import SEQ_MAX
from history.records.record import Positions, Record, decode
from history.records.witness import Known, gap_of
from uprotocol.core.ustreamer.v1.ustreamer_pb2 import Gap, PollResponse, Position
from uprotocol.v1.umessage_pb2 import UMessage

# topics whose newest record is remembered; for others, those without a record for longest, the position is used
TOPICS_TRACKED_MAX: Final = 65_536
# refusals in a row; then the missing records are reported as a gap, because asking again does not help
REFUSED_MAX: Final = 8


@dataclass(slots=True)
class ReaderState:
    """The position of a reader in each log, and its witnesses (see history.records.witness)."""

    positions: Positions = field(default_factory=dict)
    known: dict[bytes, Known] = field(default_factory=dict)
    idle: set[bytes] = field(default_factory=set)  # logs in memory that gave no record: their end is no loss

    def copy(self) -> ReaderState:
        return ReaderState(dict(self.positions), dict(self.known), set(self.idle))

    def request(self) -> list[Position]:
        return [witness.position(log, seq, self.known.get(log, {})) for log, seq in self.positions.items()]

    def learn(self, positions: Iterable[Position]) -> None:
        for position in positions:
            if position.witnesses:
                self.known[position.incarnation] = witness.learn(self.known.get(position.incarnation, {}), position)

    def forget(self, incarnation: bytes) -> None:
        self.positions.pop(incarnation, None)
        self.known.pop(incarnation, None)
        self.idle.discard(incarnation)


@dataclass(slots=True)
class Accepted:
    """The content of one answer: records in order, the gaps before them, and the state after them, from which the next
    poll begins. `frontiers`: as of where the answer began; None: it has none."""

    frontiers: list[Record] | None = None
    records: list[Record] = field(default_factory=list)
    gaps: list[Gap] = field(default_factory=list)
    state: ReaderState = field(default_factory=ReaderState)


class Verdict(enum.Enum):
    TAKEN = enum.auto()
    DUPLICATE = enum.auto()
    REFUSED = enum.auto()  # a record before it is missing


class Acceptor:
    """Takes a record only if it directly follows the last one taken of its topic. Pure: no I/O, no clock.

    Its state: `state`; the last seq taken, by topic (`_newest`) or by log (`_base`); up to where what is missing was
    reported (`_lost_to`); `_refused_in_a_row`; `dropped`.

    `dropped`: duplicate, refused (a record before it is missing), behind_refused, unreadable (not a UMessage, or a gap
    without an end).
    """

    def __init__(
        self,
        positions: Positions | None = None,
        state: ReaderState | None = None,
        *,
        read: Callable[[bytes], Any] = UMessage.FromString,
    ) -> None:
        """`read` decodes the message of a record. It raises DecodeError."""
        self._read = read
        self.state = state.copy() if state is not None else ReaderState(dict(positions or {}))
        self.dropped: Counter[str] = Counter()
        self._base: Positions = dict(self.state.positions)  # for topics that are not in `_newest`: the last seq taken
        self._newest: OrderedDict[tuple[bytes, bytes, bytes], int] = OrderedDict()  # (incarnation, source, sink) -> seq
        self._lost_to: Positions = {}  # what is missing up to here has been reported as a gap
        self._refused_in_a_row = 0

    def accept(self, response: PollResponse) -> Accepted:
        accepted, positions = Accepted(), self.state.positions
        had = {gap.incarnation: positions.get(gap.incarnation, 0) for gap in response.gaps}
        following = witness.seqs_of(response.next)
        for begin in response.begin:
            if begin.incarnation not in positions:
                positions[begin.incarnation] = self._base[begin.incarnation] = begin.seq
                if begin.in_memory:
                    self.state.idle.add(begin.incarnation)
        if response.has_frontiers:
            decoded = (decode(batch, self._read) or () for batch in response.frontiers)
            accepted.frontiers = [record for records in decoded for record in records if isinstance(record, Record)]
        for gap in response.gaps:
            self._note(gap, had[gap.incarnation], accepted)
        for incarnation in [log for log in positions if log not in following] if following else ():
            self._lose(incarnation, accepted)  # the service lists all its logs there
        for batch in response.batches:
            records = decode(batch, self._read)
            if records is None or not self._take(batch.incarnation, records, accepted):
                following.pop(batch.incarnation, None)
        for incarnation, seq in following.items():
            positions[incarnation] = max(seq, positions.get(incarnation, 0))
        self.state.learn([*response.begin, *response.next])
        accepted.state = self.state.copy()
        return accepted

    def judge(self, record: Record) -> Verdict:
        """Decide whether `record` is the next one of its topic. If it is, it counts as taken."""
        incarnation, key = record.incarnation, record.topic
        last = self._newest.get(key, self._base.get(incarnation, 0))
        if record.seq <= last:
            self.dropped["duplicate"] += 1
            return Verdict.DUPLICATE
        if record.prev_seq > max(last, self._lost_to.get(incarnation, 0)) or record.prev_seq >= record.seq:
            self.dropped["refused"] += 1
            return Verdict.REFUSED
        self._newest[key] = record.seq
        self._newest.move_to_end(key)
        if len(self._newest) > TOPICS_TRACKED_MAX:
            (of, _, _), forgotten = self._newest.popitem(last=False)
            self._base[of] = max(self._base[of], forgotten)
        self._refused_in_a_row = 0
        self.state.idle.discard(incarnation)
        return Verdict.TAKEN

    def begin_here(self) -> None:
        """More topics are followed from here on: the first record of each may name a predecessor that was not asked
        for."""
        self._base = dict(self.state.positions)

    def resume(self, state: ReaderState) -> None:
        """Continue from `state`, to which another acceptor has read these topics. Records that were taken here already
        will be duplicates."""
        self.state = ReaderState(dict(state.positions), dict(state.known), self.state.idle & state.positions.keys())

    def _note(self, gap: Gap, had: int, accepted: Accepted) -> None:
        """`had`: the position before this answer. A push may begin further back, because its reader has polled
        meanwhile. Records up to `had` that were deleted since then are not missing."""
        incarnation = gap.incarnation
        if gap.reason == Gap.REASON_INCARNATION:
            self._lose(incarnation, accepted)
            return
        if not 0 < gap.before_seq <= SEQ_MAX:  # without an end there is no position to continue from
            self.dropped["unreadable"] += 1
            return
        if went_back(gap):  # start again from there
            self.state.positions[incarnation] = self._base[incarnation] = gap.before_seq - 1
            self.state.known[incarnation] = witness.up_to(self.state.known.get(incarnation, {}), gap.before_seq - 1)
            self._lost_to.pop(incarnation, None)
            for key in [key for key in self._newest if key[0] == incarnation]:
                del self._newest[key]
        elif gap.before_seq - 1 <= max(had, self._lost_to.get(incarnation, 0)):
            return
        else:
            self._lost_to[incarnation] = gap.before_seq - 1
        accepted.gaps.append(gap)

    def _lose(self, incarnation: bytes, accepted: Accepted) -> None:
        """The log no longer exists."""
        seq = self.state.positions.get(incarnation)
        if seq is None:
            return
        if incarnation not in self.state.idle:
            accepted.gaps.append(Gap(reason=Gap.REASON_INCARNATION, incarnation=incarnation, after_seq=seq))
        self.state.forget(incarnation)
        self._lost_to.pop(incarnation, None)
        self._base.pop(incarnation, None)

    def _take(self, incarnation: bytes, records: Sequence[Record | int], accepted: Accepted) -> bool:
        """Returns False if a record was refused; then the position is before the one that is missing."""
        seqs = (record if isinstance(record, int) else record.seq for record in records)
        base = self._base.setdefault(incarnation, min(seqs, default=1) - 1)
        positions = self.state.positions
        position = positions.setdefault(incarnation, base)
        for index, record in enumerate(records):
            if isinstance(record, int):
                self.dropped["unreadable"] += 1
                accepted.gaps.append(gap_of(Gap.REASON_CORRUPTION, incarnation, record - 1, record + 1))
                self._lost_to[incarnation] = max(record, self._lost_to.get(incarnation, 0))
                continue
            verdict = self.judge(record)
            if verdict is Verdict.REFUSED:
                self.dropped["behind_refused"] += len(records) - index - 1
                self._refused_in_a_row += 1
                self._go_back(record, position, accepted)
                return False
            if verdict is Verdict.TAKEN:
                position = positions[incarnation] = max(position, record.seq)
                accepted.records.append(record)
        return True

    def _go_back(self, record: Record, position: int, accepted: Accepted) -> None:
        incarnation = record.incarnation
        allowed = max(self._newest.get(record.topic, self._base[incarnation]), self._lost_to.get(incarnation, 0))
        self.state.positions[incarnation] = min(allowed, position)
        if self._refused_in_a_row >= REFUSED_MAX:
            self._refused_in_a_row = 0
            self._lost_to[incarnation] = record.prev_seq
            accepted.gaps.append(gap_of(Gap.REASON_UNSPECIFIED, incarnation, allowed, record.prev_seq + 1))


def went_back(gap: Gap) -> bool:
    """Returns whether the gap says that the log went back behind what its reader knows, and goes on at `before_seq`."""
    return gap.reason == Gap.REASON_CORRUPTION and gap.before_seq - 1 <= gap.after_seq
