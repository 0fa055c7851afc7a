"""The epochs of a group of topics: to which one each record belongs, and when one is over. No I/O; `now` is an
argument.

records -> assign: to which epoch does each belong? -> opened: reported before them
        -> settle: is an epoch over by them?        -> ended: reported after them      tick: ends what has timed out

Buckets: the time in a record's id, divided by `width_ms`. This side holds the lowest bucket that may come: by the
newest id and, while nothing comes, by the clock, so that a reader of several logs knows what a quiet one may bring.
Progress: publishers hold the epochs that they have opened, and say at the end of one which messages belong to it.

A late record is one for an epoch that is over: it joins the lowest open epoch, so it is not lost, and both epochs say
so. Messages may be missed while the process does not run or a network is away: the buckets of that time say so, too.
"""

from __future__ import annotations

import abc
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Final, NamedTuple

from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.message import DecodeError

from history.epochs.frontier import ACTIVE_MAX, Frontier, PassedTimes
from history.records.chunk import ID_BYTES, message_id
from history.records.epoch import LENGTH_MAX, NUMBER_MIN, Epoch, Time, time_of, wire_time
from history.records.witness import seqs_of
from uprotocol import uri as uris
from uprotocol import uuid as uuids
from uprotocol.core.ustreamer.v1.ustreamer_pb2 import GroupFrontier, LogicalTime, ProgressRequest, Timed
from uprotocol.encoded import Carried, EncodedMessage
from uprotocol.message import UPayload
from uprotocol.status import UStatusError, invalid
from uprotocol.v1.uattributes_pb2 import UPayloadFormat
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.uri_pb2 import UUri

ACTIVE_EACH_MAX: Final = ACTIVE_MAX // 4  # of one publisher; in a group of several hosts, of one host
CHANGES_MAX: Final = 2 * ACTIVE_EACH_MAX  # of one request
# topics that were named at the end of epochs and that lack messages: each frontier record has all of them, some 40
# bytes each. A publisher, or one host, has a quarter
LAST_MAX: Final = 4_000
LAST_EACH_MAX: Final = LAST_MAX // 4
ANY_FORMAT: Final = UPayloadFormat.UPAYLOAD_FORMAT_PROTOBUF_WRAPPED_IN_ANY

IDLE_REPORT_S_MAX: Final = 20.0  # between reports of a group in which nothing comes, and ...
IDLE_SHARE: Final = 8  # ... at most this part of the time since its last record, so that a flash does not wear
LATE_REPORTED_MAX: Final = 64  # epochs with late records, of one report; also the newest reported ones
MISSED_MAX: Final = 16  # spans of missed buckets that may still open
CAUSES_MAX: Final = 256  # for which messages may be missed at the same time: endpoints
CLOCK_AHEAD_MS_MIN: Final = 1_000  # a publisher whose ids are further ahead of our clock, and by a bucket, is reported
CLOCK_AHEAD_S: Final = 60.0  # ... for so long after its last such record
CLOCKS_AHEAD_MAX: Final = 256  # publishers; anybody may make them up

INTERRUPTED: Final = "the gateway was not running in between"
NOT_RUNNING: Final = "the gateway was not running"
SILENT: Final = "nothing came any more, and nothing that is later"
UNCLOSED: Final = "its publisher has not closed it"
REFUSED: Final = "some of its messages could not be stored"
CROWDED: Final = "too many epochs were open, and messages of others are in it"
ENDED: Final = "the group is not kept any more"

COUNTED: Final = ("records", "late", "ahead", "crowded", "unnamed", "without", "epochs", "incomplete", "skipped")

PublisherAddress = tuple[str, int]  # authority and uEntity; or a host and 0


@dataclass(frozen=True, slots=True)
class Group:
    """Topics that share epochs. `width_ms` None: publishers open and close them."""

    name: str
    topics: Sequence[UUri]
    width_ms: int | None
    lateness_ms: int = 0  # a bucket ends when a record with an id that is later by this comes
    ahead_ms: int = 5_000  # an id that is further ahead of our clock opens no bucket
    timeout_ms: int = 10_000

    def has(self, source: UUri) -> bool:
        """Returns True if the topic belongs to this group."""
        return any(uris.matches(pattern, source) for pattern in self.topics)

    def owner(self, publisher: PublisherAddress) -> PublisherAddress:
        """Returns the owner of the share of the group's limits that a publisher counts toward: itself, or its host in a
        group of several hosts."""
        hosts = {topic.authority_name for topic in self.topics}
        are_several = len(hosts) > 1 or any(host.startswith(uris.WILDCARD_AUTHORITY) for host in hosts)
        return (publisher[0], 0) if are_several else publisher

    def is_publisher(self, entity: UUri) -> bool:
        """Returns whether the uEntity may publish on topics of this group."""
        entities = (uris.uri(one.authority_name, one.ue_id, one.ue_version_major, 0) for one in self.topics)
        return any(uris.matches(pattern, entity) for pattern in entities)


class IncomingRecord(NamedTuple):
    """A record on its way into a log."""

    publisher: PublisherAddress
    topic: bytes  # as in Stream.source_bytes
    message: Carried


def timed(time: Time, payload: UPayload) -> UPayload:
    """Returns `payload` with the name of its epoch: for a publisher with several open epochs. Raises INVALID_ARGUMENT
    as `wire_time`."""
    named = Timed(time=wire_time(time), payload=payload.data, format=payload.format)
    return UPayload.pack_to_any(named)


def untimed(payload: UPayload) -> tuple[Time | None, UPayload]:
    """Returns the epoch that a payload names, and the payload in it; None, and the same payload, if it names none."""
    named = _timed_of(payload.format, payload.data)
    if named is None:
        return None, payload
    return time_of(named.time), UPayload(named.payload, named.format)  # type: ignore[arg-type]


def _timed_of(format: int, data: bytes) -> Timed | None:
    if format != ANY_FORMAT:
        return None
    try:
        wrapped, named = AnyMessage.FromString(data), Timed()
        return named if wrapped.Unpack(named) else None
    except DecodeError:
        return None


def _named(message: Carried) -> Time | None:
    if isinstance(message, EncodedMessage):
        format: int = message.stamp.payload_format
    else:
        format = message.attributes.payload_format
    named = _timed_of(format, message.payload)
    return None if named is None else time_of(named.time)


def created_ms(message: Carried) -> int:
    """Returns the time in the message's id, Unix milliseconds."""
    return message.created_ms if isinstance(message, EncodedMessage) else uuids.time_ms(message.attributes.id)


class GroupEpochs(abc.ABC):
    """The epochs of a group. `counts`: records, late, ahead, crowded (too many epochs were open for one of their own),
    unnamed, without (an epoch), epochs (that ended), incomplete (of these), skipped. All are there from the start."""

    kind: str

    def __init__(self, group: Group) -> None:
        self.group = group
        self.frontier = Frontier()
        self.counts: Counter[str] = Counter(dict.fromkeys(COUNTED, 0))
        self.incomplete: dict[Time, str] = {}  # open epochs that will be incomplete, and why
        self.version = 0
        self._ended: list[GroupFrontier.Ended] = []  # not reported yet
        self._late: list[GroupFrontier.Ended] = []  # not reported yet
        self._missed: list[GroupFrontier.Missed] = []  # not reported yet
        self._is_changed = False  # in what `resume` needs
        self.spoiled: dict[Time, None] = {}  # ended by records that the log then refused; the newest ones
        self.reported = GroupFrontier()  # the last report

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.group.name}, {self.frontier}, {dict(self.counts)})"

    # -- decided by the kind of epochs

    @abc.abstractmethod
    def assign(self, records: Sequence[IncomingRecord], now_ms: int, now: float) -> list[Epoch | None]:
        """Returns an epoch or None for each record, before they are stored. `now`: loop time."""

    def refused(self, publisher: PublisherAddress, topic: bytes, time: Time) -> None:
        """Note that a record of the epoch could not be stored. Its sender may send it again."""

    @abc.abstractmethod
    def settle(self, now_ms: int, now: float) -> None:
        """End the epochs that are over by the records that were assigned."""

    @abc.abstractmethod
    def tick(self, now_ms: int, now: float) -> None:
        """End the epochs that have timed out."""

    @property
    @abc.abstractmethod
    def due(self) -> float | None:
        """Returns the loop time at which to call `tick`; None: nothing waits."""

    def start(self, now_ms: int, now: float) -> None:
        """Begin, after `resume` if there is a report, and before any record."""

    def away(self, cause: str, since_ms: int, why: str) -> None:
        """Note that messages may be missed for this `cause` from `since_ms` on, Unix milliseconds, until `back`."""

    def back(self, cause: str, now_ms: int) -> None:
        """Note that messages are not missed any more for this `cause`."""

    # -- common to all kinds

    def _release(self, *times: Time) -> PassedTimes:
        passed = self.frontier.release(*times)
        for time in passed.completed:
            why = self.incomplete.pop(time, "")
            self.counts["epochs"] += 1
            self.counts["incomplete"] += bool(why)
            self._ended.append(GroupFrontier.Ended(time=wire_time(time), incomplete=why))
        for time in passed.skipped:
            self.incomplete.pop(time, None)
            self.counts["skipped"] += 1
        return passed

    # -- reports

    @property
    def has_changes(self) -> bool:
        return (
            self._is_changed
            or bool(self._ended or self._late or self._missed)
            or self.frontier.lower != _times(self.reported.lower)
            or self.frontier.seen != _times(self.reported.active)
        )

    def report(self) -> GroupFrontier:
        """Returns the whole state, with the changes since the last report."""
        before, lower, active = _times(self.reported.lower), self.frontier.lower, self.frontier.seen
        self.version += 1
        report = GroupFrontier(group=self.group.name, ended=self._ended, version=self.version)
        report.late.extend(self._late)
        report.missed.extend(self._missed)
        report.lower.extend(map(wire_time, sorted(lower)))
        report.active.extend(map(wire_time, sorted(active)))
        report.opened.extend(map(wire_time, sorted(active - _times(self.reported.active))))
        changes = [(time, -1) for time in before - lower] + [(time, 1) for time in lower - before]
        report.updates.extend(
            GroupFrontier.Update(time=wire_time(time), change=change) for time, change in sorted(changes)
        )
        self._ended, self._late, self._missed, self._is_changed = [], [], [], False
        self._keep(report.kept)
        self.reported = report
        return report

    def report_again(self) -> GroupFrontier:
        """Returns the last report without changes."""
        report = GroupFrontier()
        report.CopyFrom(self.reported)
        report.group, report.version, report.kept.kind = self.group.name, self.version, self.kind
        for name in ("opened", "updates", "ended", "late", "missed"):
            report.ClearField(name)
        return report

    def _keep(self, kept: GroupFrontier.Kept) -> None:
        """Add what `resume` needs."""
        kept.kind = self.kind
        kept.seen.extend(map(wire_time, sorted(self.frontier.seen)))
        kept.passed.extend(map(wire_time, sorted(self.frontier.passed)))
        kept.floor.extend(map(wire_time, sorted(self.frontier.floor)))
        kept.incomplete.extend(
            GroupFrontier.Ended(time=wire_time(time), incomplete=why) for time, why in sorted(self.incomplete.items())
        )

    def resume(self, report: GroupFrontier, now: float) -> None:
        """Continue from the last report before a restart. Raises FAILED_PRECONDITION if it is of another kind."""
        kept = report.kept
        require_kind(self.group.name, kept.kind, self.kind)
        held = self._resumed(report, now)
        self.version = report.version
        self.frontier = Frontier(held, *(map(time_of, one) for one in (kept.seen, kept.passed, kept.floor)))
        self.incomplete = {time_of(one.time): one.incomplete for one in kept.incomplete}
        self.reported = report

    def _resumed(self, report: GroupFrontier, now: float) -> list[Time]:
        """Returns the times that are held."""
        return list(map(time_of, report.lower))


def require_kind(group: str, before: str, now: str) -> None:
    """Raises FAILED_PRECONDITION if the epochs of a group were of another kind."""
    if before != now:
        what = f"the epochs of {group!r} were kept by {before}, and its readers know them so"
        raise UStatusError(UCode.FAILED_PRECONDITION, f"{what}: give what is kept by {now} another name")


class Buckets(GroupEpochs):
    """The time of an epoch is the Unix millisecond in which its bucket begins. One bucket is held: the lowest that may
    come. An id that is ahead of our clock opens its bucket, and ends none before our clock is there, so a publisher
    with a fast clock makes no other one late. `clocks_ahead`: by publisher, how far its newest id that was too far
    ahead is ahead of our clock, milliseconds, and the loop time at which it came."""

    kind = "bucket"

    def __init__(self, group: Group) -> None:
        super().__init__(group)
        assert group.width_ms is not None, "a bucket has a width"
        self._width = group.width_ms
        self._newest_ms = NUMBER_MIN  # of all ids that were not too far ahead
        self._ends: dict[Time, float] = {}  # of open buckets, loop time
        self._quiet_since = 0.0  # loop time of the last record, or of the start
        self._idle_at: float | None = None  # loop time of the next report while nothing is open
        self._clock_at: float | None = None  # loop time at which our clock ends the lowest bucket
        self._late_reported: dict[int, None] = {}  # the newest buckets whose late records were reported
        self._causes: dict[str, tuple[int, str]] = {}  # why messages may be missed now, and since when, Unix ms
        self._may_open_missed: list[GroupFrontier.Missed] = []  # buckets of these may open later
        self._now_ms = 0  # of the last call
        self.clocks_ahead: dict[PublisherAddress, tuple[int, float]] = {}

    @property
    def _lowest(self) -> int:
        (time,) = self.frontier.lower
        return time[0]

    def _bucket(self, ms: int) -> int:
        return ms // self._width * self._width

    def start(self, now_ms: int, now: float) -> None:
        self._now_ms, self._quiet_since = now_ms, now
        if not self.frontier.held:
            self._hold(self._bucket(now_ms - self.group.timeout_ms))
        self._ends = {time: self._end_of(time, now) for time in self.frontier.seen}  # those of before a restart
        self._plan(now_ms, now)

    def _hold(self, begin: int) -> None:
        time = (begin,)
        if not self.frontier.may_come(time):  # the clock was set back
            time = (max(one[0] for one in self.frontier.passed) + self._width,)
        self.frontier.hold(time)

    def assign(self, records: Sequence[IncomingRecord], now_ms: int, now: float) -> list[Epoch | None]:
        self._now_ms = now_ms
        ceiling, width = now_ms + self.group.ahead_ms, self._width
        ahead_ms = now_ms + max(width, CLOCK_AHEAD_MS_MIN)
        created = [created_ms(one.message) for one in records]
        sane = [ms for ms in created if ms <= ceiling]
        if not self.frontier.held:
            self._hold(self._bucket(min(sane, default=now_ms) - self.group.lateness_ms))
        self._newest_ms = max([*sane, self._newest_ms])
        lowest = self._lowest
        epochs: list[Epoch | None] = []
        known: dict[int, Epoch] = {}
        self.counts["records"] += len(records)
        for record, ms in zip(records, created, strict=True):
            begin = joined = ms // width * width
            if ms > ahead_ms:
                self._note_clock(record.publisher, ms - now_ms, now)
            if ms > ceiling:
                self.counts["ahead"] += 1
                joined = lowest
            elif begin < lowest:
                self.counts["late"] += 1
                joined = lowest
            if joined not in known:
                known[joined] = self._open((joined,), (lowest,), now)
            epoch = known[joined]
            if epoch.time[0] != begin:
                self._note_stranger(record.publisher, epoch.time, begin, ms - now_ms)
            epochs.append(epoch)
        return epochs

    def _open(self, time: Time, lowest: Time, now: float) -> Epoch:
        seen = self.frontier.seen
        if time not in seen and time != lowest and len(seen) >= ACTIVE_MAX - 1:
            time = lowest
        if time not in seen:
            self.frontier.see(time)
            self._ends[time] = self._end_of(time, now)
            missed = (one.incomplete for one in self._may_open_missed if _is_within(one, time))
            reasons = chain(missed, (why for _, why in self._causes.values()))
            if why := next(reasons, ""):
                self.incomplete.setdefault(time, why)
        return Epoch(self.group.name, time)

    def _end_of(self, time: Time, now: float) -> float:
        """Returns the loop time at which a bucket with records has timed out: not before its time has come."""
        return now + (max(0, time[0] - self._now_ms) + self.group.timeout_ms) / 1_000

    def _note_stranger(self, publisher: PublisherAddress, joined: Time, begin: int, ahead_ms: int) -> None:
        """Note that a record has joined an epoch that is not that of its id, and why neither of the two is whole."""
        who = f"{publisher[0]}/{publisher[1]:X}"
        if begin < self._lowest:
            why = f"messages of {who} came too late for their own epochs, and are in it"
            if begin not in self._late_reported and len(self._late) < LATE_REPORTED_MAX:
                lost = f"messages of {who} came too late, and are in the epoch {joined[0]}"
                self._late.append(GroupFrontier.Ended(time=wire_time((begin,)), incomplete=lost))
                self._late_reported[begin] = None
                if len(self._late_reported) > LATE_REPORTED_MAX:
                    del self._late_reported[next(iter(self._late_reported))]
        elif ahead_ms > self.group.ahead_ms:
            why = f"messages of {who} are in it, whose ids are {ahead_ms / 1_000:.1f} s ahead of the gateway's clock"
        else:
            self.counts["crowded"] += 1
            why = CROWDED
        self.incomplete.setdefault(joined, why)

    def _note_clock(self, publisher: PublisherAddress, ahead_ms: int, now: float) -> None:
        if publisher in self.clocks_ahead or len(self.clocks_ahead) < CLOCKS_AHEAD_MAX:
            self.clocks_ahead[publisher] = ahead_ms, now

    def settle(self, now_ms: int, now: float) -> None:
        self._quiet_since = now
        if self.frontier.held:
            self._advance(self._bucket(min(self._newest_ms, now_ms) - self.group.lateness_ms))
        self._plan(now_ms, now)

    def _advance(self, begin: int) -> None:
        lowest = (self._lowest,)
        if begin > lowest[0]:
            for since_ms, why in self._causes.values():
                self._miss(lowest[0], begin - self._width, f"{why}, from {uuids.moment(since_ms)} on")
            self.frontier.hold((begin,))
            for time in self._release(lowest).completed:
                self._ends.pop(time, None)
            self._may_open_missed = [one for one in self._may_open_missed if one.last.numbers[0] >= begin]

    def tick(self, now_ms: int, now: float) -> None:
        overdue = [time for time, end in self._ends.items() if end <= now]
        if overdue:
            last = max(overdue)
            for time in self.frontier.seen:
                if time <= last:
                    self.incomplete.setdefault(time, SILENT)
            self._advance(last[0] + self._width)
        self._advance(self._bucket(min(self._newest_ms, now_ms) - self.group.lateness_ms))
        if not self.frontier.seen and self._idle_at is not None and self._idle_at <= now:
            self._advance(self._bucket(now_ms - self.group.timeout_ms))
        for publisher in [one for one, (_, at) in self.clocks_ahead.items() if at <= now - CLOCK_AHEAD_S]:
            del self.clocks_ahead[publisher]
        self._plan(now_ms, now)

    def _plan(self, now_ms: int, now: float) -> None:
        """Find out when `tick` has something to do."""
        self._now_ms = now_ms
        end_ms = self._lowest + self._width
        over_ms = end_ms + self.group.lateness_ms
        self._clock_at = now + (over_ms - now_ms) / 1_000 if over_ms <= self._newest_ms else None
        self._idle_at = None
        if not self.frontier.seen:
            pause_s = min((now - self._quiet_since) / IDLE_SHARE, IDLE_REPORT_S_MAX)
            self._idle_at = now + max((end_ms + self.group.timeout_ms - now_ms) / 1_000, pause_s)

    @property
    def due(self) -> float | None:
        dues = (min(self._ends.values(), default=None), self._clock_at, self._idle_at)
        return min((one for one in dues if one is not None), default=None)

    # -- messages that may be missed

    def away(self, cause: str, since_ms: int, why: str) -> None:
        if cause not in self._causes and len(self._causes) >= CAUSES_MAX:
            return
        self._causes.setdefault(cause, (since_ms, why))
        for time in self.frontier.seen:
            self.incomplete.setdefault(time, why)

    def back(self, cause: str, now_ms: int) -> None:
        since_ms, why = self._causes.pop(cause, (now_ms, ""))
        if why:
            why = f"{why}, {uuids.moment(since_ms)} to {uuids.moment(now_ms)}"
            first = max(self._bucket(min(since_ms, now_ms)), self._lowest)  # lower ones were reported when they ended
            self._miss(first, self._bucket(now_ms), why)

    def _miss(self, first: int, last: int, why: str) -> None:
        """Report that messages of the buckets from `first` to `last` may be missed."""
        if first > last:
            return
        missed = GroupFrontier.Missed(width_ms=self._width, incomplete=why)
        missed.first.numbers.append(first)
        missed.last.numbers.append(last)
        self._missed = [*self._missed[1 - MISSED_MAX :], missed]
        self._may_open_missed = [*self._may_open_missed[1 - MISSED_MAX :], missed]
        for time in self.frontier.seen:
            if first <= time[0] <= last:
                self.incomplete.setdefault(time, why)

    # -- restarts

    def _keep(self, kept: GroupFrontier.Kept) -> None:
        super()._keep(kept)
        if self.frontier.held:  # all buckets below the lowest are over, those without a record too
            del kept.passed[:]
            kept.passed.append(wire_time((self._lowest - self._width,)))
        kept.missed.extend(self._may_open_missed)
        kept.newest_ms = max(0, self._newest_ms)
        kept.complete_until_ms = min([self._now_ms, *(since_ms for since_ms, _ in self._causes.values())])

    def resume(self, report: GroupFrontier, now: float) -> None:
        super().resume(report, now)
        self._newest_ms = report.kept.newest_ms
        self._may_open_missed = list(report.kept.missed)
        for seen in self.frontier.seen:
            self.incomplete.setdefault(seen, INTERRUPTED)


def _is_within(missed: GroupFrontier.Missed, time: Time) -> bool:
    return time_of(missed.first) <= time <= time_of(missed.last)


@dataclass(slots=True)
class Received:
    """The messages of one topic that have come in an epoch."""

    count: int = 0
    newest_id: bytes = b""


@dataclass(slots=True)
class OpenEpoch:
    """An epoch that one publisher has opened."""

    ends_at: float  # loop time; each message extends it
    after: dict[bytes, int]  # by log: its records come after this seq
    is_closing: bool = False
    last: dict[bytes, tuple[bytes, int]] = field(default_factory=dict)  # by topic: last id and count, as announced
    had: dict[bytes, Received] = field(default_factory=dict)  # by topic

    def count(self, topic: bytes, id: bytes) -> None:
        had = self.had.setdefault(topic, Received())
        had.count += 1
        had.newest_id = max(had.newest_id, id)

    def missing(self) -> str:
        """Returns why it can't end yet; empty: it can."""
        if not self.is_closing:
            return UNCLOSED
        for topic, (id, count) in self.last.items():
            had = self.had.get(topic, Received())
            if had.newest_id < id or had.count < count:
                return f"{had.count} of {count} messages of {uris.format(UUri.FromString(topic))} came"
        return ""


class Progress(GroupEpochs):
    """Epochs that publishers open and close. `positions` returns the newest seq of each log."""

    kind = "progress"

    def __init__(self, group: Group, positions: Callable[[], dict[bytes, int]]) -> None:
        super().__init__(group)
        self._positions = positions
        self.publishers: dict[PublisherAddress, dict[Time, OpenEpoch]] = {}
        self.covered: dict[Time, PublisherAddress] = {}  # closed epochs that a lower one, not closed, precedes
        self._settled: list[tuple[PublisherAddress, Time]] = []  # epochs that may be over after the latest records

    # -- changes by publishers

    def change(self, publisher: UUri, changes: Sequence[ProgressRequest.Change], now: float) -> None:
        """Apply all changes, or none and raise UStatusError. A change that was applied before has no effect."""
        if len(changes) > CHANGES_MAX:
            raise UStatusError(UCode.RESOURCE_EXHAUSTED, f"expected at most {CHANGES_MAX} changes, got {len(changes)}")
        whose = (publisher.authority_name, publisher.ue_id)
        for index, one in enumerate(changes):
            self._check(publisher, one, index)
        opens = self._opens(whose, changes)
        self._check_limits(whose, opens, changes)
        self.frontier.hold(*opens)
        self._is_changed = True
        held = self.publishers.setdefault(whose, {})
        held.update({time: OpenEpoch(0.0, self._positions()) for time in opens})
        for one in changes:
            time = time_of(one.time)
            if one.change < 0 and time in held and not held[time].is_closing:
                held[time].is_closing = True
                held[time].last = {last.topic.SerializeToString(): (last.id, last.count) for last in one.last}
                self._settled.append((whose, time))
            if time in held:
                held[time].ends_at = now + self.group.timeout_ms / 1_000
        if not held:
            del self.publishers[whose]

    def _check(self, publisher: UUri, one: ProgressRequest.Change, index: int) -> None:
        what, time = f"change {index + 1}", time_of(one.time)
        if one.change not in (1, -1):
            raise invalid(f"{what} is +1 or -1, got {one.change}")
        length = self.frontier.length
        if not 0 < len(time) <= LENGTH_MAX:
            raise invalid(f"{what}: a time has 1 to {LENGTH_MAX} numbers, got {len(time)}")
        if length is not None and len(time) != length:
            raise invalid(f"{what}: the times of {self.group.name!r} have {length} numbers, got {time}")
        for last in one.last:
            whose = (last.topic.authority_name, last.topic.ue_id)
            if whose != (publisher.authority_name, publisher.ue_id) or not self.group.has(last.topic):
                raise invalid(f"{what}: {uris.format(last.topic)} is no topic of the caller in {self.group.name!r}")
            if len(last.id) != ID_BYTES or not last.count:
                raise invalid(f"{what}: the last message of a topic has an id of {ID_BYTES} bytes, and a count from 1")

    def _opens(self, whose: PublisherAddress, changes: Sequence[ProgressRequest.Change]) -> list[Time]:
        """Returns the times to hold in addition. Raises as `change` does."""
        held = self.publishers.get(whose, {})
        opens = list(dict.fromkeys(time_of(one.time) for one in changes if one.change > 0))
        opens = [time for time in opens if time not in held]
        length = self.frontier.length or next(map(len, opens), None)
        for time in opens:
            if len(time) != length:
                raise invalid(f"the times of {self.group.name!r} have {length} numbers, got {time}")
            if not self.frontier.may_come(time):
                lower = sorted(self.frontier.lower) or sorted(self.frontier.passed)
                what = f"{time} of {self.group.name!r} is over: the lower frontier has come to {lower}"
                raise UStatusError(UCode.FAILED_PRECONDITION, f"{what}; open what is greater")
        length = self.frontier.length
        closes = [time_of(one.time) for one in changes if one.change < 0]
        for time in closes:
            is_over = length is not None and time not in self.frontier.seen and not self.frontier.may_come(time)
            if time not in held and time not in opens and not is_over:
                what = f"{time} of {self.group.name!r} was not opened by the caller"
                raise UStatusError(UCode.NOT_FOUND, what)
        return opens

    def _check_limits(
        self, whose: PublisherAddress, opens: Sequence[Time], changes: Sequence[ProgressRequest.Change]
    ) -> None:
        """Raises RESOURCE_EXHAUSTED."""
        owner, held = self.group.owner(whose), self.publishers.get(whose, {})
        others = {publisher: all for publisher, all in self.publishers.items() if publisher != whose}
        near = [
            one for publisher, all in others.items() if self.group.owner(publisher) == owner for one in all.values()
        ]
        closes = {time_of(one.time): len(one.last) for one in changes if one.change < 0}
        open = [time for time in (*held, *opens) if time not in closes and not (time in held and held[time].is_closing)]
        covered = [self.group.owner(by) for time, by in self.covered.items() if time not in self.frontier.held]
        of_owner = len(open) + sum(not one.is_closing for one in near) + covered.count(owner)
        in_all = self.frontier.held.total() + len(covered) + len(opens)
        if opens and (in_all > ACTIVE_MAX or of_owner > ACTIVE_EACH_MAX):
            what = f"{ACTIVE_EACH_MAX} epochs of one publisher and {ACTIVE_MAX} in all are open at once"
            do = f"close some of {self.group.name!r}, the lowest first: one that is greater ends with it"
            raise UStatusError(UCode.RESOURCE_EXHAUSTED, f"at most {what}: {do}")
        closing = [time for time in closes if time in opens or (time in held and not held[time].is_closing)]
        new = sum(closes[time] for time in closing)
        own = new + sum(len(one.last) for one in (*held.values(), *near))
        all = new + sum(len(one.last) for each in self.publishers.values() for one in each.values())
        if new and (own > LAST_EACH_MAX or all > LAST_MAX):
            what = f"{LAST_EACH_MAX} topics of one publisher and {LAST_MAX} in all are named by what closes at once"
            do = f"wait until the messages of what was closed of {self.group.name!r} before have come, or name fewer"
            raise UStatusError(UCode.RESOURCE_EXHAUSTED, f"at most {what}: {do}")

    # -- records

    def assign(self, records: Sequence[IncomingRecord], now_ms: int, now: float) -> list[Epoch | None]:
        self.counts["records"] += len(records)
        return [self._assign(record, now) for record in records]

    def _assign(self, record: IncomingRecord, now: float) -> Epoch | None:
        own, id = self.publishers.get(record.publisher, {}), message_id(record.message)
        named = _named(record.message) if own else None
        time = self._current(own, record.topic, id) if named is None else named
        if time is None or time not in own:
            self.counts["late"] += 1
            if not self.frontier.held:
                self.counts["without"] += 1
                return None
            time = min(self.frontier.lower)
        else:
            own[time].count(record.topic, id)
            if own[time].is_closing:
                self._settled.append((record.publisher, time))
            else:
                own[time].ends_at = now + self.group.timeout_ms / 1_000
        self.frontier.see(time)
        return Epoch(self.group.name, time)

    def _current(self, own: dict[Time, OpenEpoch], topic: bytes, id: bytes) -> Time | None:
        """Returns the epoch of a record that does not name one."""
        closing = [time for time, held in own.items() if held.is_closing and id <= held.last.get(topic, (b"", 0))[0]]
        if closing:
            return min(closing)
        open = [time for time, held in own.items() if not held.is_closing]
        self.counts["unnamed"] += len(open) > 1
        return min(open, default=None)

    def count_stored(self, publisher: PublisherAddress, topic: bytes, id: bytes, time: Time) -> None:
        """Count a record that was stored before a restart."""
        held = self.publishers.get(publisher, {}).get(time)
        if held is not None:
            held.count(topic, id)
            self._settled.append((publisher, time))

    def refused(self, publisher: PublisherAddress, topic: bytes, time: Time) -> None:
        held = self.publishers.get(publisher, {}).get(time)
        if held is None and time in self.frontier.seen:  # a lower epoch is still open
            self.incomplete.setdefault(time, REFUSED)
            self._is_changed = True
        elif held is None:
            self.spoiled[time] = None
            if len(self.spoiled) > ACTIVE_MAX:
                del self.spoiled[next(iter(self.spoiled))]
        elif topic in held.had:
            held.had[topic].count -= 1

    def settle(self, now_ms: int, now: float) -> None:
        settled, self._settled = self._settled, []
        held = ((one, self.publishers.get(one[0], {}).get(one[1])) for one in dict.fromkeys(settled))
        self._end([one for one, epoch in held if epoch is not None and not epoch.missing()])

    def _end(self, over: Sequence[tuple[PublisherAddress, Time]]) -> None:
        for publisher, time in over:
            del self.publishers[publisher][time]
            if not self.publishers[publisher]:
                del self.publishers[publisher]
        if over:
            self._release(*(time for _, time in over))
            self.covered.update((time, publisher) for publisher, time in over)
            self.covered = {time: publisher for time, publisher in self.covered.items() if time in self.frontier.seen}

    def tick(self, now_ms: int, now: float) -> None:
        overdue = [
            (publisher, time, held)
            for publisher, all in self.publishers.items()
            for time, held in all.items()
            if held.ends_at <= now
        ]
        for (authority, ue_id), time, held in overdue:
            self.incomplete[time] = f"{authority}/{ue_id:X}: {held.missing() or UNCLOSED}"
        self._end([(publisher, time) for publisher, time, _ in overdue])

    @property
    def due(self) -> float | None:
        return min((held.ends_at for all in self.publishers.values() for held in all.values()), default=None)

    def _keep(self, kept: GroupFrontier.Kept) -> None:
        super()._keep(kept)
        for (authority, ue_id), all in self.publishers.items():
            for time, held in all.items():
                report = kept.held.add(time=wire_time(time), is_closing=held.is_closing)
                report.publisher.CopyFrom(uris.uri(authority, ue_id, 0, 0))
                for topic, (id, count) in held.last.items():
                    report.last.add(topic=UUri.FromString(topic), id=id, count=count)
                for incarnation, seq in held.after.items():
                    report.after.add(incarnation=incarnation, seq=seq)

    def _resumed(self, report: GroupFrontier, now: float) -> list[Time]:
        held_times = []
        for one in report.kept.held:
            held = OpenEpoch(now + self.group.timeout_ms / 1_000, seqs_of(one.after))
            held.is_closing = one.is_closing
            held.last = {last.topic.SerializeToString(): (last.id, last.count) for last in one.last}
            time = time_of(one.time)
            held_times.append(time)
            self.publishers.setdefault((one.publisher.authority_name, one.publisher.ue_id), {})[time] = held
        # the publisher matters only for times that are not held
        self.covered = dict.fromkeys(map(time_of, report.kept.seen), ("", 0))
        return held_times


def _times(report: Iterable[LogicalTime]) -> set[Time]:
    return set(map(time_of, report))
