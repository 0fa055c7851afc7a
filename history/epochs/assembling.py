"""All records of an epoch, or none of them: assembled from the records and frontiers of one or several logs. Pure.

snapshot -> filter: what had begun before we read is dropped
record -> pending, by epoch     frontier -> over in that log? over in all logs -> Assembled, in order of times
safe: before the first pending record. After a restart it is read again from there; `delivered` says what was already
      delivered

Each log reports its own frontiers. The filter has the maximal times that have begun in any log. An epoch is over when
none of the minimal times that may still come from any log is less than or equal to it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Final, Literal

from google.protobuf.message import DecodeError

from history.epochs.frontier import NOTHING, Antichain, is_ahead, is_covered, maximal, raised
from history.epochs.merging import (
    REST,
    GroupKey,
    GroupState,
    GroupTable,
    KeeperAddress,
    LogFrontier,
    PendingEpoch,
    first_log,
    restored_time,
)
from history.records.epoch import Epoch, Time, time_of
from history.records.record import Positions, Record
from uprotocol import uri as uris
from uprotocol.core.ustreamer import ids
from uprotocol.core.ustreamer.ids import is_about_epochs, is_frontiers
from uprotocol.core.ustreamer.v1.ustreamer_pb2 import Beginning, GroupFrontier
from uprotocol.v1.uri_pb2 import UUri

PENDING_BYTES_MAX: Final = 64 << 20  # of records that wait for the end of their epoch, and ...
RECORD_BYTES: Final = 600  # ... what each takes in addition to its payload
TIMEOUT_S: Final = 60.0  # the longest silence of a log that holds an epoch back

MISSED: Final = "records of it may be in a gap"
BEGUN: Final = "it had begun before it was read"
BEGUN_THERE: Final = "it had begun before a gateway on the way followed all of its topics"
TOO_BIG: Final = "it is too big to be held until its end"
UNREPORTED: Final = "no frontier of its group has come: may //*/4/1/8005 be read?"
ODD: Final = "its time has not as many numbers as others of its group"

EpochFilter = Literal["atomic", "all"]


@dataclass(frozen=True, slots=True)
class Assembled:
    """All records of an epoch, in the order of each log. `epoch` None: records without an epoch, as they came.
    `incomplete`: why records may be missing; empty: none is. Without records, the loss of the epoch is reported.
    `keeper`: of the epoch, if keepers are distinguished. `keepers`: the gateways that were read when it was over; it is
    whole as to their records, not to those of one that is followed later."""

    epoch: Epoch | None
    records: list[Record]
    incomplete: str = ""
    keeper: KeeperAddress | None = None
    keepers: frozenset[KeeperAddress] = frozenset()

    @property
    def is_complete(self) -> bool:
        return not self.incomplete


class Assembler:
    """Assembles the epochs of one reader of `topics`, which are patterns. `filter`: "atomic": epochs that had begun
    when it began to read are dropped; "all": they are delivered as incomplete. `beyond`, by group: epochs that are less
    than or equal to one of these times are always dropped.

    `each`: groups of the same name with different keepers are different groups; else they are one group, and an epoch
    is over when it is over for all keepers. `timeout_s`: how long a log that holds an epoch back may be silent.

    `dropped`: filtered, begun (before any frontier of its group), delivered (read again after a restart), unreadable.
    `counts`: epochs, incomplete (of these), rest.
    """

    def __init__(
        self,
        topics: Sequence[UUri] = (),
        *,
        filter: EpochFilter = "atomic",
        beyond: Mapping[str, Collection[Time]] | None = None,
        each: bool = False,
        timeout_s: float = TIMEOUT_S,
        bytes_max: int = PENDING_BYTES_MAX,
    ) -> None:
        self._topics, self._filter = list(topics), filter
        self._beyond = {name: maximal(times) for name, times in (beyond or {}).items()}
        self._timeout_s, self._bytes_max = timeout_s, bytes_max
        self.dropped: Counter[str] = Counter()
        self._table = GroupTable(self.dropped, each=each, beyond=self._beyond)
        self._groups = self._table.groups
        self._lost: list[Assembled] = []  # losses that were not reported before a restart
        self._plain: Positions = {}  # up to where records without an epoch were delivered, also before a restart
        self._is_suspect = False  # there was a gap, and no snapshot since
        self._bytes = 0
        self.due: float | None = None  # loop time at which to call `overdue`; None: nothing waits
        self.counts: Counter[str] = Counter()

    def __repr__(self) -> str:
        groups = {key: (one.reported_frontiers, sorted(one.pending)) for key, one in self._groups.items()}
        return f"Assembler({groups}, {dict(self.counts)}, dropped={dict(self.dropped)})"

    def frontiers(self) -> Iterator[tuple[str, Antichain, Antichain]]:
        """Yields the name, lower and upper frontier of each group."""
        for (name, _), group in self._groups.items():
            yield name, group.reported_frontiers.lower, group.reported_frontiers.upper

    # -- records and frontiers

    def begin(self, snapshot: Iterable[Record], now: float) -> None:
        """Begin to read, at the start and after each gap. `snapshot`: the frontiers where the next records begin."""
        running = {key for key, group in self._groups.items() if group.is_running}
        begun, with_snapshot = dict[GroupKey, list[GroupFrontier]](), defaultdict[GroupKey, set[bytes]](set)
        for record in self._table.in_order(snapshot):
            log = first_log(record)
            for key, group, reported, part in self._table.read(record, now):
                with_snapshot[key].add(log)
                if log not in group.known and log not in group.reported_frontiers.parts:
                    is_running = self._is_suspect or key in running
                    group.begin_log(part.keeper, reported, part.active, None, is_running=is_running)
                    begun.setdefault(key, []).append(reported)
                elif self._is_suspect:
                    group.doubt_unread(reported, part.active, None)
                self._merge(group, reported, log, part)
        for key, frontiers in begun.items():
            self._groups[key].doubt_passed(frontiers)
        for key, group in self._groups.items():
            group.note_begun(with_snapshot[key], self._is_suspect)
        self._is_suspect = False

    def lose(self, damaged: Collection[bytes] = ()) -> None:
        """Note a gap, whose records may belong to any epoch that is not over. `damaged`: logs that may have gone back,
        so that the seqs of delivered records may now be those of other records."""
        self._is_suspect = True
        for log in damaged:
            self._plain.pop(log, None)
            for group in self._groups.values():
                for last in group.delivered.values():
                    last.pop(log, None)

    def take(self, records: Iterable[Record], now: float) -> list[Assembled]:
        """Take records in the order of each log. Returns the epochs that they end."""
        ready, self._lost = self._lost, []
        plain: list[Record] = []
        for record in records:
            if record.epoch is not None:
                ready += self._add(record, record.epoch, now)
            elif is_frontiers(source := record.message.attributes.source):
                ready += self._move(record, now)
            elif is_about_epochs(source):
                ready += self._begun(record, now)
            else:
                plain += self._take_plain(record)
        if plain:
            ready.insert(0, Assembled(None, plain))
        return ready + self._shrink()

    def _take_plain(self, record: Record) -> list[Record]:
        """Returns the record, which then counts as delivered; nothing if it was delivered before."""
        if record.seq <= self._plain.get(record.incarnation, 0):
            self.dropped["delivered"] += 1
            return []
        self._plain[record.incarnation] = record.seq
        return [record]

    def _move(self, record: Record, now: float) -> Iterator[Assembled]:
        """Take a record of frontiers."""
        log, touched = first_log(record), dict[GroupKey, None]()
        for key, group, reported, part in self._table.read(record, now):
            known = group.reported_frontiers.parts.get(log)
            before = part.active - set(map(time_of, reported.opened))
            if known is None and (reported.number != 1 or group.reported_frontiers.parts):
                # the first one read of this log, so it is the snapshot
                open, is_running = before if reported.number != 1 else (), group.is_running
                group.begin_log(part.keeper, reported, open, record, is_running=is_running)
            elif known is not None and record.origin is not None and reported.number > known.number + 1:
                # a gateway on the way was not sent some of it; in the keeper's own log, a frontier was not stored
                group.doubt_unread(reported, (), record)
                yield from self._lose(key, group, before | known.active, record)
            elif known is not None and (log in group.known or _went_back(reported, known)):
                # How the open epochs ended may be in a gap, or in the part that the log has lost.
                group.doubt_unread(reported, before | known.active, record)
            self._merge(group, reported, log, part)
            group.note_missed(reported.missed, record)
            for late in reported.late:
                yield from self._came_late(key, group, time_of(late.time), late.incomplete, record)
            touched[key] = None
        for key in touched:
            yield from self._over(key, self._groups[key])

    def _merge(self, group: GroupState, reported: GroupFrontier, log: bytes, part: LogFrontier) -> None:
        for old in self._table.merge(group, reported.group, log, part):
            if old.version > part.version:  # the keeper's disk was replaced
                group.suspect = raised(group.suspect, old.active)
        group.note_incomplete(reported)

    def _came_late(self, key: GroupKey, group: GroupState, time: Time, why: str, by: Record) -> Iterator[Assembled]:
        """Note that records of an epoch came when it was over. Of an epoch that was delivered this is one more report
        without records."""
        if not group.has_length(time) or is_covered(group.started, time):
            return
        if not group.is_rest(time):
            group.note_late(time, why, by)
        elif group.note_reported(time):
            yield self._report_empty(key, group, time, why)

    def _report_empty(self, key: GroupKey, group: GroupState, time: Time, why: str) -> Assembled:
        """Report an epoch without records whose messages may be missing."""
        group.finished.add(time)
        self._count_incomplete()
        return Assembled(Epoch(key[0], time), [], why, key[1])

    def _begun(self, record: Record, now: float) -> Iterator[Assembled]:
        """A gateway between us and the keeper has only begun to follow some of our topics: records of the epochs that
        are open there may be missing."""
        try:
            beginning = Beginning.FromString(record.message.payload)
        except DecodeError:
            self.dropped["unreadable"] += 1
            return
        if not begins(beginning, self._topics):
            return
        for key, group in self._groups.items():
            parts = _through(record, beginning, group)
            yield from self._lose(key, group, frozenset[Time]().union(*(part.active for _, part in parts)), record)
            for log in [log for log, part in parts if begins_with_frontiers(beginning, part.keeper)]:
                group.reported_frontiers.expect(log, now)
                group.unknown_since = now

    def _lose(self, key: GroupKey, group: GroupState, open: Iterable[Time], by: Record) -> Iterator[Assembled]:
        """Note that records of these epochs may be missing, as the record `by` shows."""
        lost = [time for time in open if not is_covered(group.filter, time)]
        group.filter = raised(group.filter, lost)
        lost += [time for time in group.pending if time not in lost and is_covered(group.filter, time)]
        for time in sorted(lost):
            yield from self._report_loss(key, group, time, by)
        self._expect(group)

    def _report_loss(self, key: GroupKey, group: GroupState, time: Time, by: Record) -> Iterator[Assembled]:
        """Deliver nothing of the epoch but this report, once."""
        if self._filter == "all":
            group.pending.setdefault(time, PendingEpoch()).incomplete = BEGUN_THERE
            return
        if group.is_rest(time):  # it was reported that records were missing
            if time in group.pending:
                yield self._deliver(key, group, time)
            return
        pending = group.pending.pop(time, None)
        if pending is not None:
            self.dropped["filtered"] += len(pending.records)
            self._bytes -= pending.bytes
        group.note_delivered(time, [by] if pending is None else [*pending.records, by])
        if group.note_reported(time):
            self._count_incomplete()
            yield Assembled(Epoch(key[0], time), [], BEGUN_THERE, key[1])

    def _count_incomplete(self) -> None:
        self.counts["epochs"] += 1
        self.counts["incomplete"] += 1

    def _add(self, record: Record, epoch: Epoch, now: float) -> list[Assembled]:
        # 1: its group, and the part of its keeper, whose frontiers say when it is whole
        key, log, time = self._table.key_of(record, epoch.group), first_log(record), epoch.time
        group = self._groups.get(key) or self._table.unreported(key)
        merged = group.reported_frontiers
        part = merged.parts.get(log)
        if part is None:
            log, part = record.incarnation, merged.parts.get(record.incarnation)
            if part is not None and not is_ahead(part.lower, time):
                part = None  # of a keeper whose frontiers were not read yet
        if part is not None:
            merged.touch(log, part, now)
        # 2: a time of another length than the group's: an epoch of this record alone
        group.length = group.length or len(time)
        if len(time) != group.length:
            if not (odd := self._take_plain(record)):
                return []
            self._count_incomplete()
            return [Assembled(epoch, odd, ODD, key[1])]
        # 3: what was delivered, or is not wanted
        joins = bool(merged.parts) and group.is_rest(time) if part is None else group.joined(part.keeper, time)
        if joins and self._filter == "atomic":
            self.dropped["filtered"] += 1
            return []
        if group.was_delivered(time, record):
            self.dropped["delivered"] += 1
            return []
        # 4: an epoch that had begun before we read, or that no frontier reports
        is_unreported = part is None and bool(merged.parts)
        if part is None and not merged.parts:
            # no frontier has come for so long that none is expected
            group.unknown_since = now if group.unknown_since is None else group.unknown_since
            is_unreported = now - group.unknown_since >= self._timeout_s
        begun = BEGUN if (part is None and not group.known) or is_covered(group.filter, time) else ""
        if is_unreported and not is_covered(group.filter, time):
            begun = UNREPORTED
        elif begun and (self._filter == "atomic" or is_covered(self._beyond.get(epoch.group, NOTHING), time)):
            self.dropped["filtered" if part is not None else "begun"] += 1
            group.note_delivered(time, [record])  # it may be read again after the filter is gone
            return []
        # 5: it waits for the end of its epoch
        pending = group.pending.get(time)
        if pending is None:
            reason = REST if group.is_rest(time) else group.redelivered.get(time, "")
            pending = group.pending[time] = PendingEpoch(incomplete=reason)
            self._expect(group)
        pending.incomplete = pending.incomplete or begun
        bytes = len(record.message.payload) + RECORD_BYTES
        pending.records.append(record)
        pending.bytes += bytes
        self._bytes += bytes
        pending.first.setdefault(record.incarnation, record.seq)
        return []

    # -- epochs that are over

    def _over(self, key: GroupKey, group: GroupState) -> list[Assembled]:
        merged = group.reported_frontiers
        if merged.is_settled or not merged.is_whole:
            return []
        merged.is_settled = True
        empty = group.take_empty()
        silent = {time: merged.missing(time) for time in group.pending if merged.is_over(time)}
        why, ready = f"has reported nothing for {self._timeout_s} s", list[Assembled]()
        for time in sorted([*empty, *silent]):
            if time in empty:
                ready.append(self._report_empty(key, group, time, empty[time]))
            else:
                ready.append(self._deliver(key, group, time, silent[time] and f"{silent[time]} {why}"))
        group.forget_over(self._beyond.get(key[0], NOTHING), is_suspect=self._is_suspect)
        return ready

    def _deliver(self, key: GroupKey, group: GroupState, time: Time, why: str = "") -> Assembled:
        pending = group.pending.pop(time)
        self._bytes -= pending.bytes
        reported, late = group.incomplete.pop(time, ""), group.take_late(time)
        missed = MISSED if self._is_suspect or is_covered(group.suspect, time) else ""
        incomplete = why or pending.incomplete or reported or late or group.why_missed(time) or missed
        group.note_delivered(time, pending.records)
        group.finished.add(time)
        self.counts["epochs" if pending.incomplete != REST else "rest"] += 1
        self.counts["incomplete"] += bool(incomplete)
        return Assembled(Epoch(key[0], time), pending.records, incomplete, key[1], group.reported_frontiers.keepers)

    def overdue(self, now: float) -> list[Assembled]:
        """Returns the epochs that only silent logs hold back."""
        ready: list[Assembled] = []
        if self.due is None or now < self.due:
            return ready
        self.due = None
        for key, group in self._groups.items():
            at = group.due(self._timeout_s)
            if at is not None and at <= now:
                if group.reported_frontiers.parts:
                    group.reported_frontiers.silence(now, self._timeout_s)
                    ready += self._over(key, group)
                else:
                    ready += [
                        self._deliver(key, group, time, group.pending[time].incomplete or UNREPORTED)
                        for time in sorted(group.pending)
                    ]
            self._expect(group)
        return ready

    def _expect(self, group: GroupState) -> None:
        """Update the due time after the pending epochs of the group have changed."""
        group.reported_frontiers.is_settled = False
        at = group.due(self._timeout_s)
        if at is not None:
            self.due = at if self.due is None else min(self.due, at)

    def _shrink(self) -> list[Assembled]:
        ready: list[Assembled] = []
        while self._bytes > self._bytes_max:
            pending = ((key, time) for key, group in self._groups.items() for time in group.pending)
            key, time = max(pending, key=lambda one: self._groups[one[0]].pending[one[1]].bytes)
            ready.append(self._deliver(key, self._groups[key], time, TOO_BIG))
        return ready

    # -- restarts

    def safe(self, positions: Positions, held: Iterable[Assembled] = ()) -> Positions:
        """Returns the positions to read from after a restart, if the logs were read up to `positions` and the reader
        has not stored `held` yet."""
        safe, groups = dict(positions), self._groups.values()
        pending = (one.first.items() for group in groups for one in group.pending.values())
        reports = (one for group in groups for one in group.reports_not_over())
        records = chain(reports, *(one.records for one in held))
        for log, seq in chain(*pending, ((one.incarnation, one.seq) for one in records)):
            if log in safe:
                safe[log] = min(safe[log], seq - 1)
        return safe

    def forget(self, safe: Positions) -> None:
        """Forget records before `safe`, which are not read again."""
        for group in self._groups.values():
            group.forget_delivered(safe)

    def save(self, safe: Positions, held: Iterable[Assembled] = ()) -> dict[str, Any]:
        """Returns what to keep with `safe`, for `restore`: plain data for JSON."""
        plain, lost, in_hand = _not_taken([*self._lost, *held], self._plain)
        saved = [
            {"group": key[0], "keeper": key[1], "lost": lost.get(key, [])} | group.save(safe, in_hand.get(key, {}))
            for key, group in self._groups.items()
        ]
        return {"groups": saved, "plain": {log.hex(): seq for log, seq in plain.items() if seq > safe.get(log, seq)}}

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Called before anything is taken. Raises KeyError, TypeError or ValueError for invalid data."""
        self._plain = {bytes.fromhex(log): int(seq) for log, seq in saved.get("plain", {}).items()}
        for one in saved["groups"]:
            keeper = one["keeper"]
            key = (str(one["group"]), None if keeper is None else (str(keeper[0]), int(keeper[1])))
            self._table.of(key).restore(one)
            lost = [(restored_time(time), str(why)) for time, why in one["lost"]]
            self._lost += [Assembled(Epoch(key[0], time), [], why, key[1]) for time, why in lost]


def _through(record: Record, beginning: Beginning, group: GroupState) -> list[tuple[bytes, LogFrontier]]:
    """Returns the logs, with their last report, whose records come through the gateway that published `beginning`: not
    what it keeps itself, and, if it is another one than that which we read from, not what that one keeps."""
    follower, parts = record.message.attributes.source.authority_name, group.reported_frontiers.parts
    direct = [part.keeper for log, part in parts.items() if record.origin is not None and log == record.incarnation]
    return [
        (log, part)
        for log, part in parts.items()
        if part.keeper[0] != follower and part.keeper not in direct and concerns(beginning, part.keeper[0])
    ]


def _went_back(reported: GroupFrontier, known: LogFrontier) -> bool:
    return reported.number <= known.number and reported.version < known.version


def _not_taken(
    assembled: Iterable[Assembled], plain: Positions
) -> tuple[Positions, dict[GroupKey, list[tuple[Time, str]]], dict[GroupKey, dict[Time, str]]]:
    """Returns, of what the reader has not taken: `plain`, the positions before its records without an epoch, the losses
    to report, and the epochs with records, each with the reason why it is incomplete."""
    before, lost, in_hand = dict(plain), dict[GroupKey, list[tuple[Time, str]]](), dict[GroupKey, dict[Time, str]]()
    for one in assembled:
        if one.epoch is not None and not one.records:
            lost.setdefault((one.epoch.group, one.keeper), []).append((one.epoch.time, one.incomplete))
        elif one.epoch is None or one.incomplete == ODD:
            for record in one.records:
                before[record.incarnation] = min(before.get(record.incarnation, 0), record.seq - 1)
        else:
            in_hand.setdefault((one.epoch.group, one.keeper), {})[one.epoch.time] = one.incomplete
    return before, lost, in_hand


def begins(beginning: Beginning, topics: Sequence[UUri]) -> bool:
    """Returns whether it concerns topics that the patterns `topics` match; no patterns match every topic."""
    return not topics or any(
        any(uris.meets(topic, one) for one in beginning.topics)
        and not any(uris.matches(one, topic) for one in beginning.but)
        for topic in topics
    )


def begins_with_frontiers(beginning: Beginning, keeper: KeeperAddress) -> bool:
    """Returns whether earlier frontiers of this keeper may be missing, too."""
    return concerns(beginning, keeper[0]) and begins(beginning, [uris.uri(*keeper, ids.VERSION, ids.FRONTIERS)])


def concerns(beginning: Beginning, keeper: str) -> bool:
    """Returns whether a keeper with this authority may keep the epochs of these topics."""
    family = keeper.partition(".")[2] or keeper
    there = {beginning.service.authority_name, *(topic.authority_name for topic in beginning.topics)}
    return bool(there & {keeper, uris.WILDCARD_AUTHORITY}) or any(one.partition(".")[2] == family for one in there)
