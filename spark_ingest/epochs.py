"""Micro-batches that contain only whole epochs. Pure.

driver: gates of `start` --advance(frontiers between start and end)--> gates of `end`   in the checkpoint, with seqs
tasks:  Choice(gates of both) --of(batch)--> records that are delivered now; not those that wait or were delivered

A gate is the state of the epochs of one group, as one keeper reports them: which epochs wait, and from which seq of
each log on. A record is delivered in the first batch at whose end it does not wait, and in no other batch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, NamedTuple

from google.protobuf.message import DecodeError

from history.epochs.assembling import (
    BEGUN,
    BEGUN_THERE,
    MISSED,
    ODD,
    UNREPORTED,
    begins,
    begins_with_frontiers,
    concerns,
)
from history.epochs.frontier import NOTHING, Antichain, is_covered, maximal, minimal, not_passed, raised
from history.epochs.merging import LOG_GROUPS_MAX, LOGS_MAX, REST, is_replaced, passed_unread, times_of
from history.records.epoch import Time
from spark_ingest.decode import RecordColumns
from uprotocol import uri as uris
from uprotocol.core.ustreamer import ids
from uprotocol.core.ustreamer.v1.ustreamer_pb2 import Beginning, Frontier, GroupFrontier, RecordBatch
from uprotocol.v1.umessage_pb2 import UMessage
from uprotocol.v1.uri_pb2 import UUri

TOPICS: Final = ids.frontiers_of(uris.WILDCARD_AUTHORITY)  # keepers and followers publish frontiers there

PARTS_MAX: Final = 64  # logs of a gate; also earlier logs that may have records of waiting epochs
EPOCHS_WAITING_MAX: Final = 1_024  # epochs of a gate; a keeper has at most 256 open
TOO_MANY: Final = "too many epochs wait for a log of their gateway"

EpochGroupKey = tuple[str, int, str]  # the keeper's authority and uEntity, and the name of the group
Seqs = Mapping[str, int]  # by the log that is read


class FrontierRecord(NamedTuple):
    """A record of TOPICS."""

    read: str  # the log that it was read from
    seq: int  # in that log
    origin: str  # the keeper's log, from which `read` may have followed it
    message: UMessage


def frontier_records(batches: Iterable[RecordBatch]) -> Iterator[FrontierRecord]:
    for batch in batches:
        read, names = batch.incarnation.hex(), [name.hex() for name in batch.origin_incarnation]
        origins = batch.origin or [0] * len(batch.seq)
        for seq, origin, data in zip(batch.seq, origins, batch.message, strict=True):
            yield FrontierRecord(read, seq, names[origin - 1] if origin else read, UMessage.FromString(data))


@dataclass(frozen=True, slots=True)
class LogFrontierState:
    """The latest frontier of a group in one log."""

    read: str
    version: int
    lower: Antichain
    active: frozenset[Time]
    logs: frozenset[str]
    number: int
    is_ended: bool = False  # no more frontiers come from this log, for example because it was in memory

    def json(self) -> list[Any]:
        times = sorted(self.lower), sorted(self.active)
        return [self.read, self.version, *times, sorted(self.logs), self.number, self.is_ended]

    @classmethod
    def of(
        cls, read: Any, version: Any, lower: Any, active: Any, logs: Any, number: Any, ended: Any
    ) -> LogFrontierState:
        times = minimal(_times(lower)), frozenset(_times(active))
        return cls(str(read), int(version), *times, frozenset(map(str, logs)), int(number), bool(ended))


@dataclass(slots=True)
class WaitingEpoch:
    """An epoch that some log has not reported as over."""

    since: int  # the version of the first frontier that named it
    after: dict[str, int] = field(default_factory=dict)  # log -> seq after which its records were not delivered
    why: str = ""  # the reason why it will not be whole
    is_given_up: bool = False  # its records are delivered without waiting for the rest

    def json(self) -> list[Any]:
        return [self.since, self.after, self.why, self.is_given_up]


@dataclass(slots=True)
class EpochGate:
    """The epochs of one group at the end of a batch."""

    parts: dict[str, LogFrontierState] = field(default_factory=dict)  # by the log of the keeper (`origin`)
    filter: Antichain = NOTHING  # epochs that began before we read: the batch that ends here drops them
    waiting: dict[Time, WaitingEpoch] = field(default_factory=dict)
    # reasons, of epochs that the batch that ends here delivers
    incomplete: dict[Time, str] = field(default_factory=dict)
    heard_ms: int = 0  # time of the last frontier, Unix ms
    rest: Antichain = NOTHING  # times up to it were delivered in part, as `TOO_MANY`. It stays until every log has
    rest_since: int = 0  # reached this version and excludes more of them
    suspect: Antichain = NOTHING  # times up to it may lack records of a log that was read later

    def json(self) -> dict[str, Any]:
        return {
            "parts": {origin: part.json() for origin, part in sorted(self.parts.items())},
            "filter": sorted(self.filter),
            "waiting": [[time, *one.json()] for time, one in sorted(self.waiting.items())],
            "incomplete": sorted(self.incomplete.items()),
            "heard_ms": self.heard_ms,
            "rest": [sorted(self.rest), self.rest_since],
            "suspect": sorted(self.suspect),
        }

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> EpochGate:
        """From JSON. Raises KeyError, TypeError, ValueError."""
        parts = {str(origin): LogFrontierState.of(*part) for origin, part in given["parts"].items()}
        waiting = {
            _time(time): WaitingEpoch(
                int(since), {str(log): int(seq) for log, seq in after.items()}, str(why), bool(given_up)
            )
            for time, since, after, why, given_up in given["waiting"]
        }
        incomplete = {_time(time): str(why) for time, why in given["incomplete"]}
        filter, suspect = maximal(_times(given["filter"])), maximal(_times(given["suspect"]))
        rest, since = given["rest"]
        heard_ms = int(given["heard_ms"])
        made = cls(parts, filter, waiting, incomplete, heard_ms, maximal(_times(rest)), int(since), suspect)
        if len({len(time) for time in made._all_times()}) > 1:
            raise ValueError("the times of one group have different lengths; expected one length")
        return made

    def _all_times(self) -> Iterator[Time]:
        for part in self.parts.values():
            yield from (*part.lower, *part.active)
        yield from (*self.filter, *self.waiting, *self.incomplete, *self.rest, *self.suspect)

    @property
    def length(self) -> int:
        """The number of numbers in each of its times; 0 without times."""
        return len(next(self._all_times(), ()))

    @property
    def held(self) -> dict[Time, WaitingEpoch]:
        """Epochs whose records are not delivered yet."""
        return {time: one for time, one in self.waiting.items() if not one.is_given_up}

    @property
    def _live(self) -> list[LogFrontierState]:
        return [part for part in self.parts.values() if not part.is_ended]

    @property
    def _is_whole(self) -> bool:
        """True if a frontier of each log that the frontiers name has been read."""
        return self.parts.keys() >= frozenset[str]().union(*(part.logs for part in self._live))

    @property
    def _is_idle(self) -> bool:
        """True if the gate can be dropped: each log will have a new frontier before the next records of an epoch."""
        is_level = len({part.version for part in self._live}) <= 1
        return not self.waiting and not self.filter and not self.rest and self._is_whole and is_level

    def carried(self) -> EpochGate | None:
        """Returns the gate at the start of the next batch; None if it can be dropped."""
        if self._is_idle:
            return None
        lower = minimal(time for part in self._live for time in part.lower)
        filter, suspect = self.filter, self.suspect
        if self._is_whole and self._live:
            filter, suspect = not_passed(filter, lower), not_passed(suspect, lower)
        waiting = {time: replace(one, after=dict(one.after)) for time, one in self.waiting.items()}
        return EpochGate(self._needed, filter, waiting, {}, self.heard_ms, self.rest, self.rest_since, suspect)

    @property
    def _needed(self) -> dict[str, LogFrontierState]:
        """The logs that have not ended, and ended ones that may have records of waiting epochs."""
        first = min((one.since for one in self.waiting.values()), default=None)
        return {
            origin: part
            for origin, part in self.parts.items()
            if not part.is_ended or (first is not None and part.version >= first)
        }

    def begin(self, record: FrontierRecord, group: GroupFrontier, *, is_new: bool) -> None:
        """Apply a frontier of the snapshot. `is_new`: drop the epochs that are active in it."""
        part = self._part(record, group)
        if part is None:
            return
        self.parts[record.origin] = part
        if is_new:
            self.filter = raised(self.filter, part.active)
            return
        for time in part.active:
            waiting = self.waiting.setdefault(time, WaitingEpoch(part.version, why=BEGUN))
            waiting.since = min(waiting.since, part.version)

    def apply(self, record: FrontierRecord, group: GroupFrontier, *, is_lossy: bool) -> bool:
        """Apply a frontier, in the order of each log. Returns False and changes nothing if no keeper writes it so."""
        part = self._part(record, group)
        if part is None:
            return False
        # 1: the epochs that had begun `before` we read what the keeper says of them
        opened = {_time(one.numbers) for one in group.opened} & part.active
        known = self.parts.get(record.origin)
        before = part.active - opened
        if known is not None and not known.is_ended:
            # a follower may have missed frontiers of a log that it follows; see Assembler
            if record.read == record.origin or part.number <= known.number + 1:
                before = frozenset()
            else:
                self.spoil(BEGUN_THERE)
        elif part.number == 1:
            before = frozenset()
        if known is None and not self._live and not is_lossy:  # the first frontier: it serves as the snapshot
            self.filter, before = raised(self.filter, before), frozenset()
        # 2: the keeper's part, in place of its last one; a new keeper's may include records that we passed unread
        self._replace(record.origin, part)
        if known is None:
            length = self.length or len(next(iter((*part.lower, *part.active)), ()))
            self.suspect = raised(self.suspect, passed_unread(group, length))
            for time, one in self.waiting.items():
                one.why = one.why or (MISSED if is_covered(self.suspect, time) else "")
        # 3: epochs that are open there
        for time in part.active:
            if is_covered(self.filter, time) or is_covered(self.rest, time):
                continue
            waiting = self.waiting.setdefault(time, WaitingEpoch(part.version))
            waiting.since = min(waiting.since, part.version)
            if time in opened:
                waiting.after.setdefault(record.read, record.seq)
            if time in before:
                waiting.why = waiting.why or (MISSED if is_lossy else BEGUN_THERE)
            if is_covered(self.suspect, time):
                waiting.why = waiting.why or MISSED
        # 4: epochs that have ended there
        for ended in group.ended:
            ends = self.waiting.get(_time(ended.time.numbers))
            if ends is not None:
                ends.why = ends.why or ended.incomplete
        self.parts[record.origin] = part
        if len(self.waiting) > EPOCHS_WAITING_MAX:
            self._deliver_in_parts()
        return True

    def _replace(self, origin: str, part: LogFrontierState) -> None:
        """Store the frontier, and end the logs that no longer exist according to it."""
        new = origin, part.version, part.logs
        for other, old in self.parts.items():
            if not old.is_ended and other != origin and is_replaced((other, old.version, old.logs), new):
                self.parts[other] = replace(old, is_ended=True)
                if old.version > part.version:  # the keeper's disk was replaced, so its versions begin at 1
                    self.spoil(MISSED)
                    self.rest_since = 0
                    for waiting in self.waiting.values():
                        waiting.since = 0

    def _deliver_in_parts(self) -> None:
        """Deliver what waits: too many epochs wait because one log is far behind the others."""
        self.rest_since = max(self.rest_since, *(one.since for one in self.waiting.values()))
        self.rest = raised(self.rest, self.waiting)
        self.give_up(TOO_MANY)
        self.waiting.clear()

    def _part(self, record: FrontierRecord, group: GroupFrontier) -> LogFrontierState | None:
        """Returns None if no keeper writes such a frontier."""
        times = times_of(group)
        if times is None:
            return None
        lower, active = times
        if (lower or active) and self.length not in (0, len((*lower, *active)[0])):
            if self.waiting or self.incomplete or self.rest:
                return None
            # the group starts again, with times of another length
            self.parts, self.filter, self.suspect = {}, NOTHING, NOTHING
        logs = frozenset(log.hex() for log in group.logs)
        return LogFrontierState(record.read, group.version, minimal(lower), frozenset(active), logs, group.number)

    def spoil(self, why: str) -> None:
        """Mark all waiting epochs as incomplete, unless they have a reason already."""
        for waiting in self.waiting.values():
            waiting.why = waiting.why or why

    def forget_logs(self, went_back: Collection[str], missing: Collection[str]) -> None:
        """Start again if a log went back, since its versions did too; end the logs that are missing."""
        if any(part.read in went_back for part in self.parts.values()):
            self.give_up(MISSED)
            self.parts, self.waiting = {}, {}
            self.filter = self.rest = self.suspect = NOTHING
        for origin, part in self.parts.items():
            if part.read in missing:
                self.parts[origin] = replace(part, is_ended=True)
                self.spoil(MISSED)

    def settle(self, start: Seqs, end: Seqs) -> None:
        """Deliver the epochs that are over in all logs."""
        self._end_surplus_logs()
        live, is_whole = self._live, self._is_whole
        if not live or (is_whole and all(part.version >= self.rest_since for part in live)):
            self.rest = not_passed(self.rest, [time for part in live for time in part.lower])
        reads = {part.read for part in self.parts.values()}
        for time, waiting in list(self.waiting.items()):
            if not live or (
                is_whole and all(part.version >= waiting.since and time not in part.active for part in live)
            ):
                del self.waiting[time]
                why = REST if waiting.is_given_up else waiting.why
                if why:
                    self.incomplete[time] = why
                continue
            if waiting.is_given_up:
                self.incomplete[time] = REST
            for log in {*start, *end}:
                waiting.after.setdefault(log, start.get(log, 0) if log in reads else end.get(log, 0))
        if len(self._needed) > PARTS_MAX:
            self._deliver_in_parts()

    def _end_surplus_logs(self) -> None:
        """End the oldest logs above LOGS_MAX: no keeper has more at once."""
        surplus = sorted((part.version, origin) for origin, part in self.parts.items() if not part.is_ended)
        for _, origin in surplus[:-LOGS_MAX]:
            self.parts[origin] = replace(self.parts[origin], is_ended=True)
            self.spoil(MISSED)

    def give_up(self, why: str) -> None:
        for time, waiting in self.held.items():
            waiting.is_given_up = True
            self.incomplete[time] = why


Gates = dict[EpochGroupKey, EpochGate]


def to_json(gates: Gates) -> list[Any]:
    return [[*key, gate.json()] for key, gate in sorted(gates.items())]


def from_json(given: Iterable[Sequence[Any]]) -> Gates:
    """Raises KeyError, TypeError, ValueError."""
    return {(str(authority), int(entity), str(group)): EpochGate.of(gate) for authority, entity, group, gate in given}


def begin(snapshot: Iterable[FrontierRecord], *, is_new: bool) -> Gates:
    """The gates at the start of a query. Records of active epochs are before that position, so these epochs are not
    whole: a new query (`is_new`) drops them; another query has delivered their first records."""
    gates: Gates = {}
    for record in snapshot:
        for key, group in _groups(record):
            gates.setdefault(key, EpochGate()).begin(record, group, is_new=is_new)
    return {key: gate for key, gate in gates.items() if gate.carried() is not None}


@dataclass(frozen=True, slots=True)
class BatchFrontiers:
    """What the frontiers between the start and the end of a batch report."""

    start: Seqs
    end: Seqs
    records: Sequence[FrontierRecord]  # in the order of each log
    topics: Sequence[UUri] = ()  # that are read; empty: all
    lossy: frozenset[str] = frozenset()  # logs in which some of the frontiers are lost
    went_back: frozenset[str] = frozenset()  # logs that went back, so that earlier frontiers are no longer valid
    missing: frozenset[str] = frozenset()  # logs that no longer exist


def advance(gates: Gates, batch: BatchFrontiers, now_ms: int) -> Gates:
    """The gates at the end of a batch."""
    made: Gates = {}
    for key, gate in gates.items():
        carried = gate.carried()
        if carried is not None:
            carried.forget_logs(batch.went_back, batch.missing)
            made[key] = carried
    groups = Counter(key[:2] for key in made)
    for record in batch.records:
        if not ids.is_frontiers(record.message.attributes.source):
            _apply_beginning(made, record, batch.topics)
            continue
        for key, group in _groups(record):
            if key not in made and groups[key[:2]] >= LOG_GROUPS_MAX:
                continue
            if key not in made:
                groups[key[:2]] += 1
            gate = made.setdefault(key, EpochGate())
            if gate.apply(record, group, is_lossy=record.read in batch.lossy | batch.went_back):
                gate.heard_ms = now_ms
    for gate in made.values():
        if {part.read for part in gate.parts.values()} & batch.lossy:
            gate.spoil(MISSED)
        gate.settle(batch.start, batch.end)
    return made


def given_up(gates: Gates, now_ms: int, timeout_ms: int) -> Gates:
    """Returns a copy of `gates`, in which those that hold epochs and have had no frontier for more than `timeout_ms`
    deliver what waits, with the time-out as the reason."""
    made = dict(gates)
    for key, old in gates.items():
        if old.held and now_ms - old.heard_ms > timeout_ms:
            gate = old.carried()
            assert gate is not None, "a gate that holds epochs is not dropped"
            gate.incomplete = dict(old.incomplete)
            gate.give_up(f"{key[0]} has reported nothing for {timeout_ms / 1000:g} s")
            made[key] = gate
    return made


def read_from(start: Gates, end: Gates, log: str, seq: int) -> int:
    """The seq after which a batch that begins at `seq` reads a log, to deliver records that waited."""
    low = seq
    for key, gate in start.items():
        still = end[key].held if key in end else {}
        for time, waiting in gate.held.items():
            if time not in still:
                low = min(low, waiting.after.get(log, 0))
    return low


@dataclass(slots=True)
class _GroupInLog:
    """What a batch delivers of one group and one log of its keeper."""

    before: dict[Time, int] = field(default_factory=dict)  # held at the start of the batch: records after this seq
    held: dict[Time, int] = field(default_factory=dict)  # held at its end
    filter: Antichain = NOTHING
    rest: Antichain = NOTHING
    incomplete: dict[Time, str] = field(default_factory=dict)
    length: int = 0  # of its times

    def why(self, time: Time) -> str | None:
        """Returns the reason why the epoch is not whole; None if it is."""
        if len(time) != self.length:
            return ODD if self.length else None
        if is_covered(self.rest, time) and time not in self.incomplete:
            return REST
        return self.incomplete.get(time)


class Choice:
    """Chooses the records of the log `read` for a batch that begins after `seq`; also says which epochs are not whole.
    It is sent to the tasks."""

    def __init__(self, start: Gates, end: Gates, read: str, seq: int) -> None:
        self._after = seq
        self._known: dict[tuple[str, str], _GroupInLog] = {}
        for (_, _, group), gate in start.items():
            for origin in gate.parts:
                before = self._known.setdefault((origin, group), _GroupInLog()).before
                before.update({time: waiting.after.get(read, 0) for time, waiting in gate.held.items()})
        for (_, _, group), gate in end.items():
            for origin in gate.parts:
                known = self._known.setdefault((origin, group), _GroupInLog())
                known.held.update({time: waiting.after.get(read, 0) for time, waiting in gate.held.items()})
                known.filter, known.rest = gate.filter, gate.rest
                known.incomplete, known.length = gate.incomplete, gate.length

    def of(self, batch: RecordBatch) -> RecordColumns:
        """Returns the chosen records, and why their epochs are not whole."""
        read, names = batch.incarnation.hex(), [name.hex() for name in batch.origin_incarnation]
        origins = batch.origin or [0] * len(batch.seq)
        epochs = [None, *((one.group, _time(one.time.numbers)) for one in batch.epochs)]
        indices, whys = [], list[str | None]()
        for index, (seq, origin, number) in enumerate(
            zip(batch.seq, origins, batch.epoch or [0] * len(batch.seq), strict=True)
        ):
            epoch, why = epochs[number] if number < len(epochs) else None, None
            if epoch is None:
                if seq <= self._after:
                    continue
            else:
                known = self._known.get((names[origin - 1] if origin else read, epoch[0]))
                if not self._has(known, epoch[1], seq):
                    continue
                why = UNREPORTED if known is None else known.why(epoch[1])
            indices.append(index)
            whys.append(why)
        records = RecordColumns.of(batch)
        if len(indices) < len(batch.seq):
            records = records.take(indices)
        return records._replace(incomplete=whys)

    def _has(self, known: _GroupInLog | None, time: Time, seq: int) -> bool:
        if known is None:
            return seq > self._after
        if seq > self._after:
            is_old = time not in known.before and time not in known.held and len(time) == known.length
            if is_old and is_covered(known.filter, time):
                return False
        elif not 0 <= known.before.get(time, seq) < seq:
            return False
        return not 0 <= known.held.get(time, seq) < seq


def needed(gates: Gates, seqs: Seqs) -> dict[str, int]:
    """The seq of each log up to which no later batch reads it again."""
    made = dict(seqs)
    for gate in gates.values():
        for waiting in gate.held.values():
            for log in made:
                made[log] = min(made[log], waiting.after.get(log, 0))
    return made


def _groups(record: FrontierRecord) -> Iterator[tuple[EpochGroupKey, GroupFrontier]]:
    source = record.message.attributes.source
    try:
        frontier = Frontier.FromString(record.message.payload)
    except DecodeError:
        return
    for group in frontier.groups[:LOG_GROUPS_MAX]:
        yield (source.authority_name, source.ue_id, group.group), group


def _apply_beginning(gates: Gates, record: FrontierRecord, topics: Sequence[UUri]) -> None:
    """A follower between the keeper and us has begun to follow some of our topics: earlier records may be missing."""
    try:
        beginning = Beginning.FromString(record.message.payload)
    except DecodeError:
        return
    for key, gate in gates.items() if begins(beginning, topics) else ():
        if key[0] == record.message.attributes.source.authority_name:
            continue  # the follower itself keeps these epochs
        if concerns(beginning, key[0]):
            gate.spoil(BEGUN_THERE)
        if begins_with_frontiers(beginning, key[:2]):
            gate.forget_logs((), {part.read for part in gate.parts.values()})


def _time(numbers: Iterable[int]) -> Time:
    return tuple(int(one) for one in numbers)


def _times(given: Iterable[Iterable[int]]) -> list[Time]:
    return [_time(one) for one in given]
