"""What a reader takes of the answers of a history: each record once, in order, and nothing after one that is missing.

answer -> decode -> records -> judge: does it directly follow the last one of its topic? -> Accepted: records, gaps,
                    gaps -> told once                                                       and places
places: where to go on in each log, what proves it, which logs gave nothing
"""

from __future__ import annotations

import enum
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from google.protobuf.message import DecodeError

from history.epochs.frontier import GROUP_MAX, LENGTH_MAX, Epoch
from history.records import witness
from history.records.chunk import INCARNATION_BYTES, SEQ_MAX, Origin
from history.records.witness import Known, gap_of
from uprotocol.core.ustreamer.v1.ustreamer_pb2 import Gap, PollResponse, Position, RecordBatch
from uprotocol.encoded import EncodedMessage
from uprotocol.v1.umessage_pb2 import UMessage

# whose newest record is known; the longest quiet ones are forgotten, then the position counts for them
TOPICS_TRACKED_MAX: Final = 65_536
# times in a row that a record does not follow; then what is between is declared a gap: asking again doesn't help
REFUSED_MAX: Final = 8


@dataclass(frozen=True, slots=True)
class Record:
    """One message of a history. `time_ms`: when it was appended, Unix milliseconds. `origin`: where it was appended
    first, if that is another log. `epoch`: to which it belongs, if its topic is one of a group that has epochs."""

    incarnation: bytes
    seq: int
    prev_seq: int
    time_ms: int
    message: Any  # a UMessage, or what reads like one
    origin: Origin | None = None
    epoch: Epoch | None = None

    @property
    def topic(self) -> tuple[bytes, bytes, bytes]:
        """Log, source and sink: what has predecessors of its own."""
        if type(self.message) is EncodedMessage:  # of a stream that has been met its address is known
            return self.incarnation, self.message.stamp.address, b""
        attributes = self.message.attributes
        return self.incarnation, attributes.source.SerializeToString(), attributes.sink.SerializeToString()


Positions = dict[bytes, int]


@dataclass(slots=True)
class Places:
    """Where a reader is in each log, and what proves it (see history.records.witness)."""

    positions: Positions = field(default_factory=dict)
    known: dict[bytes, Known] = field(default_factory=dict)
    idle: set[bytes] = field(default_factory=set)  # logs in memory of which nothing was had: their end is no loss

    def copy(self) -> Places:
        return Places(dict(self.positions), dict(self.known), set(self.idle))

    def request(self) -> list[Position]:
        return [witness.position(one, seq, self.known.get(one, {})) for one, seq in self.positions.items()]

    def learn(self, told: Iterable[Position]) -> None:
        for position in told:
            if position.witnesses:
                self.known[position.incarnation] = witness.learn(self.known.get(position.incarnation, {}), position)

    def forget(self, incarnation: bytes) -> None:
        self.positions.pop(incarnation, None)
        self.known.pop(incarnation, None)
        self.idle.discard(incarnation)


@dataclass(slots=True)
class Accepted:
    """What one answer brought: records in order, the gaps before them, and where the next poll begins. `frontiers`: how
    far epochs had come where it began; None: it does not say."""

    frontiers: list[Record] | None = None
    records: list[Record] = field(default_factory=list)
    gaps: list[Gap] = field(default_factory=list)
    places: Places = field(default_factory=Places)

    @property
    def positions(self) -> Positions:
        return self.places.positions


class Verdict(enum.Enum):
    TAKEN = enum.auto()
    DUPLICATE = enum.auto()
    REFUSED = enum.auto()  # one is missing before it


class Acceptor:
    """Takes a record only if it directly follows the last one taken of its topic. Pure: no I/O, no clock.

    `dropped`: duplicate, refused (does not follow), behind_refused, unreadable (not a UMessage, or a gap without end).
    """

    def __init__(
        self,
        positions: Positions | None = None,
        places: Places | None = None,
        *,
        read: Callable[[bytes], Any] = UMessage.FromString,
    ) -> None:
        """`read` makes the message of a record. Raises DecodeError."""
        self._read = read
        self.places = places.copy() if places is not None else Places(dict(positions or {}))
        self.dropped: Counter[str] = Counter()
        self._base: Positions = dict(self.positions)  # of a topic not in `_newest` nothing has come after this
        self._newest: OrderedDict[tuple[bytes, bytes, bytes], int] = OrderedDict()  # (incarnation, source, sink) -> seq
        self._lost_to: Positions = {}  # whatever is missing up to here has been told as a gap
        self._refused_in_a_row = 0

    @property
    def positions(self) -> Positions:
        return self.places.positions

    def accept(self, response: PollResponse) -> Accepted:
        accepted = Accepted()
        had = {gap.incarnation: self.positions.get(gap.incarnation, 0) for gap in response.gaps}
        following = {position.incarnation: position.seq for position in response.next}
        for begin in response.begin:
            if begin.incarnation not in self.positions:
                self.positions[begin.incarnation] = self._base[begin.incarnation] = begin.seq
                if begin.in_memory:
                    self.places.idle.add(begin.incarnation)
        if response.has_frontiers:
            told = (decode(batch, self._read) or () for batch in response.frontiers)
            accepted.frontiers = [record for records in told for record in records if isinstance(record, Record)]
        for gap in response.gaps:
            self._note(gap, had[gap.incarnation], accepted)
        for incarnation in [one for one in self.positions if one not in following] if following else []:
            self._lose(incarnation, accepted)  # the service names all its logs there
        for batch in response.batches:
            records = decode(batch, self._read)
            if records is None or not self._take(batch.incarnation, records, accepted):
                following.pop(batch.incarnation, None)
        for incarnation, seq in following.items():
            self.positions[incarnation] = max(seq, self.positions.get(incarnation, 0))
        self.places.learn(response.begin)
        self.places.learn(response.next)
        accepted.places = self.places.copy()
        return accepted

    def judge(self, record: Record) -> Verdict:
        """Whether `record` is the next one of its topic; it counts as taken if it is."""
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
        self.places.idle.discard(incarnation)
        return Verdict.TAKEN

    def begin_here(self) -> None:
        """More topics are wanted, from these places on: what the first record of one names before it is not ours."""
        self._base = dict(self.positions)

    def resume(self, places: Places) -> None:
        """Go on from `places`, which another acceptor came to with these topics; what was taken here already will be a
        duplicate."""
        self.places = Places(dict(places.positions), dict(places.known), self.places.idle & places.positions.keys())

    def _note(self, gap: Gap, had: int, accepted: Accepted) -> None:
        """`had`: the position before this answer. A push may begin further back, because its follower has polled
        meanwhile. Records up to `had` that were deleted since then are not missing."""
        incarnation = gap.incarnation
        if gap.reason == Gap.REASON_INCARNATION:
            self._lose(incarnation, accepted)
            return
        if not 0 < gap.before_seq <= SEQ_MAX:  # it ends nowhere, so there is no place behind it
            self.dropped["unreadable"] += 1
            return
        if went_back(gap):  # start again where it says
            self.positions[incarnation] = self._base[incarnation] = gap.before_seq - 1
            self.places.known[incarnation] = witness.up_to(self.places.known.get(incarnation, {}), gap.before_seq - 1)
            self._lost_to.pop(incarnation, None)
            for key in [key for key in self._newest if key[0] == incarnation]:
                del self._newest[key]
        elif gap.before_seq - 1 <= max(had, self._lost_to.get(incarnation, 0)):
            return
        else:
            self._lost_to[incarnation] = gap.before_seq - 1
        accepted.gaps.append(gap)

    def _lose(self, incarnation: bytes, accepted: Accepted) -> None:
        """This log is gone."""
        seq = self.positions.get(incarnation)
        if seq is None:
            return
        if incarnation not in self.places.idle:
            accepted.gaps.append(Gap(reason=Gap.REASON_INCARNATION, incarnation=incarnation, after_seq=seq))
        self.places.forget(incarnation)
        self._lost_to.pop(incarnation, None)
        self._base.pop(incarnation, None)

    def _take(self, incarnation: bytes, records: Sequence[Record | int], accepted: Accepted) -> bool:
        """False if a record did not follow; then the position is where the missing one comes next."""
        seqs = (record if isinstance(record, int) else record.seq for record in records)
        base = self._base.setdefault(incarnation, min(seqs, default=1) - 1)
        position = self.positions.setdefault(incarnation, base)
        for place, record in enumerate(records):
            if isinstance(record, int):
                self.dropped["unreadable"] += 1
                accepted.gaps.append(gap_of(Gap.REASON_CORRUPTION, incarnation, record - 1, record + 1))
                self._lost_to[incarnation] = max(record, self._lost_to.get(incarnation, 0))
                continue
            verdict = self.judge(record)
            if verdict is Verdict.REFUSED:
                self.dropped["behind_refused"] += len(records) - place - 1
                self._refused_in_a_row += 1
                self._go_back(record, position, accepted)
                return False
            if verdict is Verdict.TAKEN:
                position = self.positions[incarnation] = max(position, record.seq)
                accepted.records.append(record)
        return True

    def _go_back(self, record: Record, position: int, accepted: Accepted) -> None:
        incarnation = record.incarnation
        allowed = max(self._newest.get(record.topic, self._base[incarnation]), self._lost_to.get(incarnation, 0))
        self.positions[incarnation] = min(allowed, position)
        if self._refused_in_a_row >= REFUSED_MAX:
            self._refused_in_a_row = 0
            self._lost_to[incarnation] = record.prev_seq
            accepted.gaps.append(gap_of(Gap.REASON_UNSPECIFIED, incarnation, allowed, record.prev_seq + 1))


def went_back(gap: Gap) -> bool:
    """The log itself went back behind what its reader knows, and goes on at `before_seq`."""
    return gap.reason == Gap.REASON_CORRUPTION and gap.before_seq - 1 <= gap.after_seq


def decode(batch: RecordBatch, read: Callable[[bytes], Any] = UMessage.FromString) -> list[Record | int] | None:
    """Its records; the seq alone of what is no UMessage. None if the columns have different lengths, or a seq is none
    that a log gives, or where a record comes from, or to what it belongs, can't be read."""
    columns = (batch.seq, batch.prev_seq, batch.time_ms, batch.message)
    if len({len(column) for column in columns}) != 1:
        return None
    if batch.seq and not (min(batch.seq) > 0 and max(*batch.seq, *batch.prev_seq) <= SEQ_MAX):
        return None
    origins, epochs = _origins(batch), _epochs(batch)
    if origins is None or epochs is None:
        return None
    records: list[Record | int] = []
    for seq, prev_seq, time_ms, data, origin, epoch in zip(*columns, origins, epochs, strict=True):
        try:
            records.append(Record(batch.incarnation, seq, prev_seq, time_ms, read(data), origin, epoch))
        except DecodeError:
            records.append(seq)
    return records


def _origins(batch: RecordBatch) -> Sequence[Origin | None] | None:
    """One for each record; None if they can't be read."""
    logs, places, seqs = batch.origin_incarnation, batch.origin, batch.origin_seq
    if not (logs or places or seqs):
        return [None] * len(batch.seq)
    if not len(places) == len(seqs) == len(batch.seq) or {len(log) for log in logs} - {INCARNATION_BYTES}:
        return None
    if max(places, default=0) > len(logs) or max(seqs, default=0) > SEQ_MAX:
        return None
    pairs = list(zip(places, seqs, strict=True))
    if any(place and not seq for place, seq in pairs):
        return None
    return [Origin(logs[place - 1], seq) if place else None for place, seq in pairs]


def _epochs(batch: RecordBatch) -> Sequence[Epoch | None] | None:
    """One for each record; None if they can't be read."""
    if not (batch.epochs or batch.epoch):
        return [None] * len(batch.seq)
    known = [Epoch(one.group, tuple(one.time.numbers)) for one in batch.epochs]
    if len(batch.epoch) != len(batch.seq) or max(batch.epoch, default=0) > len(known):
        return None
    if not all(0 < len(one.group.encode()) <= GROUP_MAX and 0 < len(one.time) <= LENGTH_MAX for one in known):
        return None
    return [known[place - 1] if place else None for place in batch.epoch]
