"""The state of each group in an Assembler: its frontiers, the records that wait, and the state for a restart.

record of frontiers -> GroupTable.read -> key, group, GroupFrontier, LogFrontier, for each group that it names
record of an epoch  -> GroupTable.key_of -> key
"""

from __future__ import annotations

import itertools
from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from google.protobuf.message import DecodeError

from history.epochs.frontier import NOTHING, Antichain, Spans, Time, maximal, minimal, precedes, raised, time_of
from history.epochs.merging import KeeperAddress, LogFrontier, MergedFrontiers, passed_unread, times_of
from history.reading.acceptor import Positions, Record
from uprotocol.core.ustreamer.v1.ustreamer_pb2 import Frontier, GroupFrontier

GROUPS_MAX: Final = 64  # that one log reports; a gateway has fewer
UNREPORTED_MAX: Final = 1_024  # groups with records and without a frontier
REPORTED_MAX: Final = 256  # epochs of a group whose loss was reported
DELIVERED_MAX: Final = 4_096  # epochs of a group that may be read again, and ends of epochs with a reason

REST: Final = "it was handed over before, and this came later"

GroupKey = tuple[str, KeeperAddress | None]  # a group, and its keeper if keepers are told apart


@dataclass(slots=True)
class PendingEpoch:
    """Records that wait for the end of their epoch. `first`: by log as it is read, the lowest seq of them."""

    records: list[Record] = field(default_factory=list)
    bytes: int = 0
    first: Positions = field(default_factory=dict)
    incomplete: str = ""


@dataclass(slots=True)
class GroupState:
    """The state of one group. Epochs are named by their time."""

    filter: Antichain = NOTHING  # epochs that had begun before we read
    suspect: Antichain = NOTHING  # epochs that are covered by these, and not over, may have records in a gap
    reported_frontiers: MergedFrontiers = field(default_factory=MergedFrontiers)
    pending: dict[Time, PendingEpoch] = field(default_factory=dict)
    incomplete: dict[Time, str] = field(default_factory=dict)  # reasons in frontiers, for epochs not delivered yet
    # Epochs that were delivered or dropped and whose records may be read again, with the last seq in each log. An entry
    # also holds for all epochs that are less than it, because those were delivered before.
    delivered: dict[Time, Positions] = field(default_factory=dict)
    open: set[Time] = field(default_factory=set)  # exceptions from `delivered`: epochs whose rest waited at a restart
    unknown_since: float | None = None  # loop time; records have come, and no frontier
    known: set[bytes] = field(default_factory=set)  # logs that had reported a frontier before a restart
    finished: Spans = field(default_factory=Spans)  # delivered epochs: further records of them are the rest
    redelivered: set[Time] = field(default_factory=set)  # exceptions from `finished`: not taken before a restart
    reported: dict[Time, None] = field(default_factory=dict)  # newest epochs of which only the loss is reported
    length: int = 0  # of its times

    def begin_log(self, reported: GroupFrontier, open: Iterable[Time], *, is_running: bool) -> None:
        """Begin to read a log of which records before this are not read. `is_running`: other logs of the group are read
        already, so `open` epochs are not dropped, but may be incomplete."""
        passed = passed_unread(reported, self.length)
        self.length = self.length or len(next(iter(passed), ()))
        self.suspect = raised(self.suspect, [*passed, *(open if is_running else ())])
        if not is_running:
            self.filter = raised(self.filter, open)

    def is_rest(self, time: Time) -> bool:
        return time not in self.redelivered and time in self.finished

    def note_delivered(self, time: Time, records: Iterable[Record]) -> None:
        """Note that these records must not be delivered again."""
        last: Positions = {}
        for record in records:
            last[record.incarnation] = max(record.seq, last.get(record.incarnation, 0))
        for other in list(self.delivered):
            if precedes(other, time) or precedes(time, other):
                time = max(time, other)
                for log, seq in self.delivered.pop(other).items():
                    last[log] = max(seq, last.get(log, 0))
        self.delivered[time] = last
        if len(self.delivered) > DELIVERED_MAX:
            del self.delivered[next(iter(self.delivered))]

    def was_delivered(self, time: Time, record: Record) -> bool:
        """Returns whether the record was delivered before a restart."""
        lasts = (last for other, last in self.delivered.items() if precedes(time, other))
        return time not in self.open and any(record.seq <= last.get(record.incarnation, 0) for last in lasts)

    def forget_delivered(self, safe: Positions) -> None:
        """Forget what is before `safe`, the positions from which a restart reads again."""
        for time in [one for one, last in self.delivered.items() if _is_before(last, safe)]:
            del self.delivered[time]

    def note_reported(self, time: Time) -> bool:
        """Note that the loss of the epoch is reported. Returns whether it was not reported before."""
        is_new = time not in self.reported
        self.reported[time] = None
        if len(self.reported) > REPORTED_MAX:
            del self.reported[next(iter(self.reported))]
        return is_new

    def note_incomplete(self, frontier: GroupFrontier) -> None:
        for one in frontier.ended:
            if one.incomplete and 0 < len(one.time.numbers) == self.length:
                self.incomplete[time_of(one.time)] = one.incomplete
        while len(self.incomplete) > DELIVERED_MAX:
            del self.incomplete[next(iter(self.incomplete))]

    def due(self, timeout_s: float) -> float | None:
        """Returns when to stop waiting for a log, loop time; None: nothing waits."""
        if not self.pending:
            return None
        merged = self.reported_frontiers
        at = merged.silent_at(timeout_s) if merged.parts else None
        return (self.unknown_since or 0.0) + timeout_s if at is None else at

    # -- restarts

    def save(self, safe: Positions, in_hand: Mapping[Time, str]) -> dict[str, Any]:
        """Returns data for `restore`. `in_hand`: epochs delivered and not taken, and why they are incomplete."""
        open = {time: one.incomplete for time, one in self.pending.items()} | dict(in_hand)
        return {
            "filter": sorted(self.filter),
            "suspect": sorted(self.suspect),
            "logs": sorted(log.hex() for log in self.reported_frontiers.parts),
            "delivered": [
                [time, {log.hex(): seq for log, seq in last.items()}]
                for time, last in sorted(self.delivered.items())
                if not _is_before(last, safe)
            ],
            "open": sorted(open),
            "rest": sorted(time for time, why in open.items() if why == REST),
            "finished": self.finished.spans,
            "reported": list(self.reported),
        }

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Raises KeyError, TypeError or ValueError for data that is not of `save`."""
        self.filter = maximal([*self.filter, *map(restored_time, saved["filter"])])
        self.suspect = maximal(map(restored_time, saved["suspect"]))
        self.known = {bytes.fromhex(log) for log in saved["logs"]}
        self.delivered = {
            restored_time(time): {bytes.fromhex(log): int(seq) for log, seq in last.items()}
            for time, last in saved["delivered"]
        }
        self.open = set(map(restored_time, saved["open"]))
        self.redelivered = self.open.difference(map(restored_time, saved["rest"]))
        self.finished = Spans((restored_time(first), restored_time(last)) for first, last in saved["finished"])
        self.reported = dict.fromkeys(map(restored_time, saved["reported"]))
        ends = itertools.chain.from_iterable(self.finished.spans)
        times = [*self.filter, *self.suspect, *self.delivered, *self.open, *self.reported, *ends]
        self.length = next(map(len, times), self.length)
        if {len(time) for time in times} - {self.length}:
            raise ValueError("times of one group have one length")


def restored_time(numbers: Iterable[int]) -> Time:
    return tuple(int(one) for one in numbers)


class GroupTable:
    """The groups of one reader. `each`: groups of one name with different keepers are different groups. `beyond`: the
    first filter of a group, by name. `dropped` counts "unreadable": records, or parts of them, that no keeper sends."""

    def __init__(self, dropped: Counter[str], *, each: bool, beyond: Mapping[str, Antichain]) -> None:
        self._dropped, self._each, self._beyond = dropped, each, beyond
        self.groups: dict[GroupKey, GroupState] = {}
        self._keepers: dict[bytes, dict[str, KeeperAddress]] = {}  # by log, by name
        self._unreported: OrderedDict[GroupKey, None] = OrderedDict()  # groups with records and without a frontier

    def of(self, key: GroupKey) -> GroupState:
        group = self.groups.get(key)
        if group is None:
            group = self.groups[key] = GroupState(filter=self._beyond.get(key[0], NOTHING))
            group.length = next((len(time) for time in group.filter), 0)
        return group

    def unreported(self, key: GroupKey) -> GroupState:
        """Returns a group that no frontier has named; the oldest of too many such groups is removed."""
        group = self.of(key)
        self._unreported[key] = None
        if len(self._unreported) > UNREPORTED_MAX:
            oldest = next((one for one in self._unreported if one != key and not self.groups[one].pending), None)
            if oldest is not None:
                del self._unreported[oldest], self.groups[oldest]
        return group

    def key_of(self, record: Record, name: str) -> GroupKey:
        if not self._each:
            return name, None
        known = self._keepers.get(first_log(record), {}).get(name)
        return name, known or self._keepers.get(record.incarnation, {}).get(name)

    def read(self, record: Record, now: float) -> Iterator[tuple[GroupKey, GroupState, GroupFrontier, LogFrontier]]:
        """Yields each group that a record of frontiers names."""
        source, log = record.message.attributes.source, first_log(record)
        keeper = (source.authority_name, source.ue_id)
        try:
            frontier = Frontier.FromString(record.message.payload)
        except DecodeError:
            self._dropped["unreadable"] += 1
            return
        for reported in frontier.groups[:GROUPS_MAX]:
            key, times = (reported.group, keeper if self._each else None), times_of(reported)
            if times is None or not self._has_free_capacity(log, reported.group):
                self._dropped["unreadable"] += 1
                continue
            lower, active = times
            if not self._has_length(key, keeper, len((*lower, *active, ())[0])):
                self._dropped["unreadable"] += 1
                continue
            self._unreported.pop(key, None)
            self._keepers[log][reported.group] = keeper
            logs = frozenset(reported.logs)
            part = LogFrontier(keeper, reported.version, minimal(lower), frozenset(active), logs, reported.number, now)
            yield key, self.of(key), reported, part

    def merge(self, group: GroupState, name: str, log: bytes, part: LogFrontier) -> Collection[LogFrontier]:
        """Merge the report of a log. Returns the last reports of logs that it replaces."""
        merged = group.reported_frontiers
        merged.update(log, part)
        group.unknown_since = None
        replaced = {one: merged.parts[one] for one in merged.replaced_by(log)}
        for one in replaced:
            self._leave(merged, name, one, part.heard_at)
        return replaced.values()

    def _has_length(self, key: GroupKey, keeper: KeeperAddress, length: int) -> bool:
        """Returns whether times of the group may have this length: that of its first one, unless its only keeper begins
        it again with another, and nothing waits."""
        group = self.of(key)
        if length and group.length not in (0, length):
            if group.pending or any(part.keeper != keeper for part in group.reported_frontiers.parts.values()):
                return False
            group = self.groups[key] = GroupState()
        group.length = group.length or length
        return True

    def _has_free_capacity(self, log: bytes, name: str) -> bool:
        """Returns whether the log may report one more group: it may have GROUPS_MAX that have not ended."""
        known = self._keepers.setdefault(log, {})
        if name not in known and len(known) >= GROUPS_MAX:
            for other, keeper in list(known.items()):
                merged = self.of((other, keeper if self._each else None)).reported_frontiers
                part = merged.parts.get(log)
                if part is None or not (part.lower or part.active):
                    self._leave(merged, other, log, 0.0 if part is None else part.heard_at)
        return name in known or len(known) < GROUPS_MAX

    def _leave(self, merged: MergedFrontiers, name: str, log: bytes, now: float) -> None:
        """Note that the log reports nothing more about the group."""
        if log in merged.parts:
            merged.drop(log, now)
        self._keepers[log].pop(name, None)
        if not self._keepers[log]:
            del self._keepers[log]


def first_log(record: Record) -> bytes:
    """Returns the log in which the record was first appended, whose keeper assigned its epoch."""
    return record.incarnation if record.origin is None else record.origin.incarnation


def _is_before(last: Positions, safe: Positions) -> bool:
    """Returns whether all of these records are before `safe`, so that none is read again."""
    return all(seq <= safe.get(log, seq) for log, seq in last.items())
