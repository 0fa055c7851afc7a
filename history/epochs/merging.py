"""What one reader knows of each group of topics: its frontiers, merged over all logs that report them, the records that
wait, and the state for a restart. Pure.

record of frontiers -> GroupTable.read -> key, group, GroupFrontier, LogFrontier, for each group that it names
record of an epoch  -> GroupTable.key_of -> key

MergedFrontiers.update(log, LogFrontier) -> lower: the minimal times that may come from any log
                                         -> is_over(time): over in each log, at a version that knows that time
silence: a log that has reported nothing for too long is no longer waited for, until it reports again

The cost depends on the change, not on the number of logs: each of a thousand vehicles reports all the time.
"""

from __future__ import annotations

import itertools
from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, field
from typing import Any, Final

from google.protobuf.message import DecodeError

from history.epochs.frontier import (
    ACTIVE_MAX,
    NOTHING,
    Antichain,
    Spans,
    is_ahead,
    is_covered,
    maximal,
    minimal,
    not_passed,
    precedes,
    raised,
)
from history.records.epoch import GROUP_MAX, LENGTH_MAX, Time, time_of
from history.records.record import Positions, Record
from uprotocol.core.ustreamer.v1.ustreamer_pb2 import Frontier, GroupFrontier

LOGS_MAX: Final = 16  # of one keeper; it has a durable and a volatile one
SINCE_MAX: Final = 4_096  # times that some log of a keeper does not know
LOG_GROUPS_MAX: Final = 64  # that one log reports; a gateway has fewer
UNREPORTED_MAX: Final = 1_024  # groups with records and without a frontier
REPORTED_MAX: Final = 256  # epochs of a group whose loss was reported
DELIVERED_MAX: Final = 4_096  # epochs of a group that may be read again, and ends of epochs with a reason
MISSED_SPANS_MAX: Final = 256  # spans of missed buckets that are not over
MISSED_EACH_MAX: Final = 1_000  # buckets of a span that are reported; of more, the last one instead of the others

REST: Final = "it was handed over before, and this came later"

KeeperAddress = tuple[str, int]  # of the keeper of a group: authority, uEntity
Life = tuple[Any, int, Collection[Any]]  # of a log: its incarnation, the version, and the logs that this version names
GroupKey = tuple[str, KeeperAddress | None]  # a group, and its keeper if keepers are distinguished


def times_of(report: GroupFrontier) -> tuple[list[Time], list[Time]] | None:
    """Returns the lower frontier and the active times, all with the same number of numbers. None: it is invalid."""
    if max(len(report.lower), len(report.active)) > ACTIVE_MAX or len(report.logs) > LOGS_MAX:
        return None
    if not 0 < len(report.group.encode()) <= GROUP_MAX:
        return None
    lower, active = ([time_of(one) for one in times] for times in (report.lower, report.active))
    lengths = {len(time) for time in (*lower, *active)}
    return (lower, active) if not lengths or (len(lengths) == 1 and 0 < lengths.pop() <= LENGTH_MAX) else None


def is_replaced(old: Life, new: Life) -> bool:
    """Returns whether the old one of two logs of a keeper no longer exists, by the last report of each; the new log's
    came last. If both exist, one names the other."""
    (old_log, old_version, old_logs), (log, version, logs) = old, new
    return old_log not in logs and (old_version <= version or log not in old_logs)


def passed_unread(report: GroupFrontier, length: int, *, others: bool = False) -> list[Time]:
    """Returns the times that were over before this frontier, which is the first one that is read of its log: they may
    have records that are not read. Only other logs of the group can bring more of them: those of its keeper, or of
    `others`. All have `length` numbers; 0: as many as the first one."""
    if report.number == 1 or (len(report.logs) < 2 and not others):
        return []
    passed = [time_of(one) for one in report.kept.passed if 0 < len(one.numbers) <= LENGTH_MAX]
    return [time for time in passed if len(time) == (length or len(passed[0]))]


@dataclass(slots=True)
class LogFrontier:
    """The frontiers that one log reports."""

    keeper: KeeperAddress
    version: int
    lower: Antichain
    active: frozenset[Time]
    logs: frozenset[bytes]
    number: int  # of the report in that log
    heard_at: float
    is_silent: bool = False


@dataclass(slots=True)
class _Keeper:
    parts: dict[bytes, LogFrontier] = field(default_factory=dict)  # by log
    since: dict[Time, int] = field(default_factory=dict)  # the first known version that has this time
    oldest: int = 0  # version of the logs that are not silent

    def is_behind(self, time: Time) -> bool:
        """Returns whether one of its logs does not know the time."""
        return self.since.get(time, 0) > self.oldest


class MergedFrontiers:
    """`unheard`: logs that others name and that have reported nothing. `is_settled`: nothing that decides what is over
    has changed since it was set."""

    def __init__(self) -> None:
        self.parts: dict[bytes, LogFrontier] = {}  # by the log in which it was first appended
        self.unheard: set[bytes] = set()
        self.unheard_since: float | None = None
        self.is_settled = False
        self._keepers: dict[KeeperAddress, _Keeper] = {}
        self._merged_keepers: frozenset[KeeperAddress] | None = None  # of `_keepers`; None: it has changed
        self._behind: set[KeeperAddress] = set()  # whose logs have different versions
        self._lows: Counter[Time] = Counter()
        self._lower: Antichain | None = None
        self._named: Counter[bytes] = Counter()
        self._waited_for: OrderedDict[bytes, LogFrontier] = OrderedDict()  # the last one reported last
        self._silent: dict[bytes, LogFrontier] = {}
        self._has_given_up = False  # True: the unheard logs are no longer waited for
        self._expected: dict[bytes, KeeperAddress] = {}  # logs of `unheard` whose keeper reports again soon

    def __repr__(self) -> str:
        return f"MergedFrontiers({sorted(self.lower)}, {len(self.parts)} logs)"

    # -- frontiers

    @property
    def lower(self) -> Antichain:
        """Returns the minimal times that may come from the logs that are waited for."""
        if self._lower is None:
            self._lower = minimal(self._lows)
        return self._lower

    @property
    def upper(self) -> Antichain:
        return maximal(time for part in self.parts.values() for time in part.active)

    @property
    def keepers(self) -> frozenset[KeeperAddress]:
        if self._merged_keepers is None:
            self._merged_keepers = frozenset(self._keepers)
        return self._merged_keepers

    @property
    def is_whole(self) -> bool:
        """True if every log that is waited for has reported."""
        return not self.unheard or self._has_given_up

    def is_over(self, time: Time) -> bool:
        return not is_ahead(self.lower, time) and not any(self._keepers[one].is_behind(time) for one in self._behind)

    def not_passed(self, times: Antichain) -> Antichain:
        """Returns those of the times up to which a log may still bring records, also a silent or an unheard one."""
        lower, silent = self.lower, self._silent.values()
        may_come = (is_ahead(lower, one) or any(is_ahead(part.lower, one) for part in silent) for one in times)
        return times if self.unheard else frozenset(itertools.compress(times, may_come))

    def missing(self, time: Time) -> str:
        """Returns which silent logs might bring more of a time that is over; empty: none."""
        who = {
            part.keeper[0]
            for part in self._silent.values()
            if is_ahead(part.lower, time) or part.version < self._keepers[part.keeper].since.get(time, 0)
        }
        return ", ".join(sorted(who)) or ("one of its logs" if self.unheard else "")

    # -- reports

    def update(self, log: bytes, part: LogFrontier) -> None:
        old = self.parts.get(log)
        if old is not None and old.keeper != part.keeper:
            self.drop(log, part.heard_at)
            old = None
        self.parts[log] = self._waited_for[log] = part
        self._waited_for.move_to_end(log)
        self._silent.pop(log, None)
        lower = old.lower if old is not None and not old.is_silent else frozenset[Time]()
        if lower != part.lower:
            self._rise(part.lower)
            self._sink(lower)
        if part.keeper not in self._keepers:
            self._keepers[part.keeper], self._merged_keepers = _Keeper(), None
        keeper = self._keepers[part.keeper]
        keeper.parts[log] = part
        for time in part.active:
            keeper.since[time] = min(part.version, keeper.since.get(time, part.version))
        self._count(part.keeper)
        self._touch_others(keeper, log, part if old is None else old, part.heard_at)
        self.unheard.discard(log)
        for expected in [one for one, keeper_of in self._expected.items() if keeper_of == part.keeper]:
            del self._expected[expected]
            if expected not in self._named:
                self.unheard.discard(expected)
        if old is None or old.logs != part.logs:
            self._name(part.logs)
            self._unname(old.logs if old is not None else ())
        if not self.unheard:
            self._forget(keeper, part)
        self._note_unheard(part.heard_at)

    def replaced_by(self, log: bytes) -> list[bytes]:
        """Returns the logs that no longer exist, by the report of this one: they were in memory before a restart, or
        their disk was replaced. The caller drops them."""
        part = self.parts[log]
        parts = self._keepers[part.keeper].parts
        new = log, part.version, part.logs
        replaced = [one for one, old in parts.items() if one != log and is_replaced((one, old.version, old.logs), new)]
        if len(parts) - len(replaced) > LOGS_MAX:
            replaced.append(min(parts.keys() - {log, *replaced}, key=lambda one: (parts[one].version, one)))
        return replaced

    def touch(self, log: bytes, part: LogFrontier, now: float) -> None:
        """Note that the log is there, without a new report."""
        if part.heard_at == now and not part.is_silent:
            return
        part.heard_at = now
        self._waited_for[log] = part
        self._waited_for.move_to_end(log)
        self._touch_others(self._keepers[part.keeper], log, part, now)
        if part.is_silent:
            part.is_silent = False
            del self._silent[log]
            self._rise(part.lower)
            self._count(part.keeper)

    def drop(self, log: bytes, now: float) -> None:
        part = self.parts.pop(log)
        self._waited_for.pop(log, None)
        self._silent.pop(log, None)
        if not part.is_silent:
            self._sink(part.lower)
        keeper = self._keepers[part.keeper]
        del keeper.parts[log]
        self._count(part.keeper)
        if keeper.parts:
            newest = max(one.version for one in keeper.parts.values())
            keeper.since = {time: version for time, version in keeper.since.items() if version <= newest}
        else:
            del self._keepers[part.keeper]
            self._merged_keepers = None
        self._unname(part.logs)
        if log in self._named:
            self.unheard.add(log)
        self._note_unheard(now)
        self.is_settled = False

    def knows(self, keeper: KeeperAddress) -> bool:
        """Returns whether logs of the keeper are merged, or waited for."""
        return keeper in self._keepers or keeper in self._expected.values()

    def may_bring(self, keeper: KeeperAddress, floor: Antichain) -> bool:
        """Returns whether a log of the keeper, perhaps one that has not reported, may bring times that `floor` has
        passed."""
        if keeper not in self._keepers:
            return self.knows(keeper)
        parts = self._keepers[keeper].parts
        are_beyond = all(is_ahead(floor, time) for part in parts.values() for time in part.lower)
        return not are_beyond or any(not part.logs <= parts.keys() for part in parts.values())

    def expect(self, log: bytes, now: float) -> None:
        """Forget what the log has reported, and wait until its keeper reports again, which is a snapshot."""
        keeper = self.parts[log].keeper
        self.drop(log, now)
        self._expected[log] = keeper
        self.unheard.add(log)
        self._note_unheard(now)

    # -- silent logs

    def silent_at(self, timeout_s: float) -> float | None:
        """Returns when to stop waiting for the next log; None: none is waited for."""
        heard = next((part.heard_at for part in self._waited_for.values()), None)
        if self.unheard and not self._has_given_up and self.unheard_since is not None:
            heard = self.unheard_since if heard is None else min(heard, self.unheard_since)
        return None if heard is None else heard + timeout_s

    def silence(self, now: float, timeout_s: float) -> None:
        """Stop waiting for each log that `silent_at` has announced up to now."""
        while self._waited_for:
            log, part = next(iter(self._waited_for.items()))
            if part.heard_at + timeout_s > now:  # the same arithmetic as in `silent_at`
                break
            del self._waited_for[log]
            self._silent[log] = part
            part.is_silent = True
            self._sink(part.lower)
            self._count(part.keeper)
        if self.unheard and self.unheard_since is not None and self.unheard_since + timeout_s <= now:
            self._has_given_up = True
            self.is_settled = False

    # -- internals

    def _touch_others(self, keeper: _Keeper, log: bytes, part: LogFrontier, now: float) -> None:
        """Count the keeper's other logs with the same version as heard, too: they had nothing to report."""
        if len(keeper.parts) > 1:
            for other_log, other in keeper.parts.items():
                if other_log != log and not other.is_silent and other.version >= part.version:
                    other.heard_at = now
                    self._waited_for.move_to_end(other_log)

    def _rise(self, times: Iterable[Time]) -> None:
        for time in times:
            self._lows[time] += 1
            if self._lows[time] == 1 and (self._lower is None or not is_ahead(self._lower, time)):
                self._lower, self.is_settled = None, False

    def _sink(self, times: Iterable[Time]) -> None:
        for time in times:
            self._lows[time] -= 1
            if not self._lows[time]:
                del self._lows[time]
                if self._lower is None or time in self._lower:
                    self._lower, self.is_settled = None, False

    def _name(self, logs: Iterable[bytes]) -> None:
        for log in logs:
            self._named[log] += 1
            if log not in self.parts:
                self.unheard.add(log)

    def _unname(self, logs: Iterable[bytes]) -> None:
        for log in logs:
            self._named[log] -= 1
            if not self._named[log]:
                del self._named[log]
                self.unheard.discard(log)

    def _note_unheard(self, now: float) -> None:
        if not self.unheard and self.unheard_since is not None:
            self.unheard_since, self._has_given_up, self.is_settled = None, False, False
        elif self.unheard and self.unheard_since is None:
            self.unheard_since = now

    def _count(self, of: KeeperAddress) -> None:
        """Update after the versions of the keeper's logs have changed."""
        keeper = self._keepers[of]
        versions = {one.version for one in keeper.parts.values() if not one.is_silent}
        keeper.oldest = min(versions, default=1 << 63)
        was_behind = of in self._behind
        if len(versions) > 1:
            self._behind.add(of)
        else:
            self._behind.discard(of)
        if was_behind or len(versions) > 1:
            self.is_settled = False

    @staticmethod
    def _forget(keeper: _Keeper, part: LogFrontier) -> None:
        """Forget times that are over and that all logs of the keeper know."""
        since = keeper.since
        if len(since) > len(part.active):
            for time in [one for one, version in since.items() if version <= keeper.oldest and one not in part.active]:
                del since[time]
        while len(since) > SINCE_MAX:
            del since[next(iter(since))]


@dataclass(slots=True)
class MissedSpan:
    """Buckets whose messages a keeper may have missed, as the record `by` of its log reports; None: the snapshot where
    reading began, which is not read again. `next`: the first one that is not reported."""

    first: int
    last: int
    width: int
    why: str
    by: Record | None
    next: int
    left: int = MISSED_EACH_MAX  # buckets that may still be reported

    def covers(self, time: Time) -> bool:
        return self.first <= time[0] <= self.last

    def step(self) -> None:
        """Go on to the next bucket, or to the last one if too many were reported."""
        self.left -= 1
        self.next = self.next + self.width if self.left > 1 else max(self.last, self.next + self.width)

    def save(self) -> list[Any]:
        return [self.first, self.last, self.width, self.why, self.next, self.left]

    @classmethod
    def restored(cls, first: Any, last: Any, width: Any, why: Any, next: Any, left: Any) -> MissedSpan:
        return cls(int(first), int(last), max(1, int(width)), str(why), None, int(next), int(left))


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
    started: Antichain = NOTHING  # epochs up to these had begun, or were over, when reading started
    # By keeper that was read only when others were already: the lower frontier at that time. The records of other times
    # in all of its logs are dropped: their epochs are delivered, or were over.
    floors: dict[KeeperAddress, Antichain] = field(default_factory=dict)
    missed: list[MissedSpan] = field(default_factory=list)  # buckets that are not over
    # undelivered epochs whose records came too late: the reason for the reader, and the frontier that reported it
    late: dict[Time, tuple[str, Record]] = field(default_factory=dict)
    reported_frontiers: MergedFrontiers = field(default_factory=MergedFrontiers)
    pending: dict[Time, PendingEpoch] = field(default_factory=dict)
    incomplete: dict[Time, str] = field(default_factory=dict)  # reasons in frontiers, for epochs not delivered yet
    # Epochs that were delivered or dropped and whose records may be read again, with the last seq in each log. An entry
    # also holds for all epochs that are less than it, because those were delivered before.
    delivered: dict[Time, Positions] = field(default_factory=dict)
    open: set[Time] = field(default_factory=set)  # exceptions from `delivered`: epochs whose rest waited at a restart
    unknown_since: float | None = None  # loop time; records have come, and no frontier
    # Logs that had reported a frontier before a restart, or before a gap that has their next ones, too
    known: set[bytes] = field(default_factory=set)
    finished: Spans = field(default_factory=Spans)  # delivered epochs: further records of them are the rest
    # Epochs of `open` that were not delivered again yet, and why they were incomplete. They are exceptions from
    # `finished`, unless the reason is REST.
    redelivered: dict[Time, str] = field(default_factory=dict)
    reported: dict[Time, None] = field(default_factory=dict)  # newest epochs of which only the loss is reported
    length: int = 0  # of its times

    @property
    def is_running(self) -> bool:
        """Returns whether logs of the group are read already, or were before a restart."""
        return bool(self.known or self.reported_frontiers.parts)

    def begin_log(
        self,
        keeper: KeeperAddress,
        reported: GroupFrontier,
        open: Iterable[Time],
        by: Record | None,
        *,
        is_running: bool,
    ) -> None:
        """Begin to read a log, perhaps not from its first record on. `is_running`: other logs of the group are read
        already. Then `open` epochs are not dropped, but may be incomplete, and a new keeper joins at epochs that are
        not over. `by`: as in MissedSpan."""
        passed = passed_unread(reported, self.length, others=is_running)
        self.length = self.length or len(next(iter(passed), ()))
        self.suspect = raised(self.suspect, [*passed, *(open if is_running else ())])
        merged = self.reported_frontiers
        self.note_missed(reported.kept.missed, by, merged.lower)
        if is_running and merged.lower and not merged.knows(keeper):
            self.floors[keeper] = merged.lower
        if not is_running:
            self.filter = raised(self.filter, open)
            over = map(time_of, reported.kept.passed)
            self.started = raised(self.started, [*open, *filter(self.has_length, over)])

    def doubt_unread(self, reported: GroupFrontier, open: Iterable[Time], by: Record | None) -> None:
        """Note that reports of a log before this one were not read. `open`: epochs that were open meanwhile."""
        self.suspect = raised(self.suspect, [*open, *passed_unread(reported, self.length, others=True)])
        self.note_missed(reported.kept.missed, by)

    def note_begun(self, logs: Set[bytes], is_suspect: bool) -> None:
        """Note that a snapshot of these logs was read. `is_suspect`: it comes after a gap."""
        parts = self.reported_frontiers.parts
        if parts:  # else its frontiers are in a gap, and the next ones say what it may concern
            self.known.clear()
        if is_suspect:
            self.suspect = raised(self.suspect, [*self.pending, *self.redelivered])
            self.known.update(parts.keys() - logs)

    def has_length(self, time: Time) -> bool:
        """Returns whether the time, of a report, has as many numbers as the others of this group."""
        return 0 < len(time) == self.length

    def doubt_passed(self, frontiers: Iterable[GroupFrontier]) -> None:
        """Note that what was over before these frontiers, which are the first ones read, may come from another log."""
        if len(self.reported_frontiers.parts) > 1:
            passed = (passed_unread(one, self.length, others=True) for one in frontiers)
            self.suspect = raised(self.suspect, itertools.chain.from_iterable(passed))

    def joined(self, keeper: KeeperAddress, time: Time) -> bool:
        """Returns whether the epoch was over before this keeper was read."""
        floor = self.floors.get(keeper)
        return floor is not None and not is_ahead(floor, time)

    def note_missed(self, spans: Iterable[GroupFrontier.Missed], by: Record | None, lower: Antichain = NOTHING) -> None:
        """Note buckets whose messages a keeper may have missed. Those that were over by `lower` are not reported."""
        for missed in spans:
            times, width, why = (time_of(missed.first), time_of(missed.last)), missed.width_ms, missed.incomplete
            if not width or {*map(len, times)} != {1} or self.length != 1 or times[0] > times[1]:
                continue
            (first,), (last,) = times
            if any((one.first, one.last, one.why) == (first, last, why) for one in self.missed):
                continue
            over = max((low - first for (low,) in lower if low > first), default=0)
            span = MissedSpan(first, last, width, why, by, first + -(-over // width) * width)
            self.missed = [*self.missed[1 - MISSED_SPANS_MAX :], span]
            self.reported_frontiers.is_settled = False

    def note_late(self, time: Time, why: str, by: Record) -> None:
        """Note that records of an epoch that is not delivered came late."""
        self.late[time] = why, by
        self.reported_frontiers.is_settled = False
        if len(self.late) > DELIVERED_MAX:
            del self.late[next(iter(self.late))]

    def take_late(self, time: Time) -> str:
        """Returns why the epoch is incomplete if records of it came late, which is reported now; else ""."""
        why, _ = self.late.pop(time, ("", None))
        if why:
            self.note_reported(time)
        return why

    def why_missed(self, time: Time) -> str:
        return next((span.why for span in self.missed if span.covers(time)), "")

    def take_empty(self) -> dict[Time, str]:
        """Returns epochs without records that are over now and whose messages may be missing, and why."""
        found: dict[Time, str] = {}
        is_over = self.reported_frontiers.is_over
        for time in [one for one in self.late if is_over(one)]:
            if time not in self.pending:
                found[time] = self.take_late(time)
        for span in self.missed:
            while span.next <= span.last and is_over((span.next,)):
                time = (span.next,)
                span.step()
                if time not in self.pending and not self.is_rest(time) and not is_covered(self.started, time):
                    found.setdefault(time, span.why)
        return found

    def forget_over(self, beyond: Antichain, *, is_suspect: bool) -> None:
        """Forget what concerns only epochs that are over, and filter those up to `beyond`. `is_suspect`: there was a
        gap, and no snapshot since."""
        merged = self.reported_frontiers
        filter = not_passed(self.filter, merged.lower)
        # a silent log may bring what is filtered no longer: a part of it, since its beginning was not read
        suspect = raised(self.suspect, merged.not_passed(self.filter - filter))
        self.suspect = suspect if is_suspect else merged.not_passed(suspect)
        self.filter = raised(filter, beyond)
        self.missed = [span for span in self.missed if span.next <= span.last]
        self.floors = {keeper: floor for keeper, floor in self.floors.items() if merged.may_bring(keeper, floor)}
        for time in [time for time in self.incomplete if time not in self.pending and not is_ahead(merged.lower, time)]:
            del self.incomplete[time]

    def reports_not_over(self) -> Iterator[Record]:
        """Yields the records that report epochs as incomplete that are not over."""
        yield from (by for _, by in self.late.values())
        yield from (span.by for span in self.missed if span.by is not None)

    def is_rest(self, time: Time) -> bool:
        return time in self.finished and self.redelivered.get(time, REST) == REST

    def note_delivered(self, time: Time, records: Iterable[Record]) -> None:
        """Note that these records must not be delivered again."""
        self.redelivered.pop(time, None)
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
            if one.incomplete and self.has_length(time := time_of(one.time)):
                self.incomplete[time] = one.incomplete
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
        delivered = {time: last for time, last in sorted(self.delivered.items()) if not _is_before(last, safe)}
        open = {time: why for time, why in self.redelivered.items() if is_covered(delivered, time)}
        open |= {time: one.incomplete for time, one in self.pending.items()} | dict(in_hand)
        return {
            "filter": sorted(self.filter),
            "suspect": sorted(self.suspect),
            "started": sorted(self.started),
            "joined": [[*keeper, sorted(floor)] for keeper, floor in sorted(self.floors.items())],
            "logs": sorted(log.hex() for log in self.reported_frontiers.parts or self.known),
            "delivered": [[time, {log.hex(): seq for log, seq in last.items()}] for time, last in delivered.items()],
            "open": sorted(open),
            "rest": sorted(time for time, why in open.items() if why == REST),
            "reasons": sorted((time, why) for time, why in open.items() if why not in ("", REST)),
            "finished": self.finished.spans,
            "reported": list(self.reported),
            "missed": [one.save() for one in self.missed if one.by is None],
        }

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Raises KeyError, TypeError or ValueError for data that is not of `save`."""
        self.filter = maximal([*self.filter, *map(restored_time, saved["filter"])])
        self.suspect = maximal(map(restored_time, saved["suspect"]))
        self.started = maximal(map(restored_time, saved.get("started", ())))
        self.floors = {
            (str(authority), int(entity)): minimal(map(restored_time, floor))
            for authority, entity, floor in saved.get("joined", ())
        }
        self.known = {bytes.fromhex(log) for log in saved["logs"]}
        self.delivered = {
            restored_time(time): {bytes.fromhex(log): int(seq) for log, seq in last.items()}
            for time, last in saved["delivered"]
        }
        self.open = set(map(restored_time, saved["open"]))
        reasons = {restored_time(time): str(why) for time, why in saved.get("reasons", ())}
        reasons |= dict.fromkeys(map(restored_time, saved["rest"]), REST)
        self.redelivered = {time: reasons.get(time, "") for time in self.open}
        self.finished = Spans((restored_time(first), restored_time(last)) for first, last in saved["finished"])
        self.reported = dict.fromkeys(map(restored_time, saved["reported"]))
        self.missed = [MissedSpan.restored(*one) for one in saved.get("missed", ())]
        ends = itertools.chain.from_iterable(self.finished.spans)
        floors = itertools.chain.from_iterable(self.floors.values())
        times = [*self.filter, *self.suspect, *self.started, *self.delivered, *self.open, *self.reported]
        times += [*ends, *floors, *((span.first,) for span in self.missed)]
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
            beyond = self._beyond.get(key[0], NOTHING)
            group = self.groups[key] = GroupState(filter=beyond, started=beyond)
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

    def in_order(self, snapshot: Iterable[Record]) -> list[Record]:
        """Returns known logs first: a keeper that has one of them was read before, and does not join by a new log."""
        known = {log for one in self.groups.values() for log in (*one.known, *one.reported_frontiers.parts)}
        return sorted(snapshot, key=lambda one: (first_log(one) not in known, one.seq))

    def read(self, record: Record, now: float) -> Iterator[tuple[GroupKey, GroupState, GroupFrontier, LogFrontier]]:
        """Yields each group that a record of frontiers names."""
        source, log = record.message.attributes.source, first_log(record)
        keeper = (source.authority_name, source.ue_id)
        try:
            frontier = Frontier.FromString(record.message.payload)
        except DecodeError:
            self._dropped["unreadable"] += 1
            return
        for reported in frontier.groups[:LOG_GROUPS_MAX]:
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
        group.known.discard(log)
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
        """Returns whether the log may report one more group: it may have LOG_GROUPS_MAX that have not ended."""
        known = self._keepers.setdefault(log, {})
        if name not in known and len(known) >= LOG_GROUPS_MAX:
            for other, keeper in list(known.items()):
                merged = self.of((other, keeper if self._each else None)).reported_frontiers
                part = merged.parts.get(log)
                if part is None or not (part.lower or part.active):
                    self._leave(merged, other, log, 0.0 if part is None else part.heard_at)
        return name in known or len(known) < LOG_GROUPS_MAX

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
