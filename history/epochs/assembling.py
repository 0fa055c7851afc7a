"""All records of an epoch, or none of them: what a reader of one or several logs makes of records and frontiers. Pure.

snapshot -> filter: what had begun before we read: dropped | record -> pending, by epoch | frontier -> over in that log?
                                                             '-- over in all of them -> Assembled, in order of times
safe: before the first record of what is pending; from there it is read again after a restart, and what was handed over
      before is known by `handed`

Each log tells by itself how far it has come: the filter is the maximal of what all of them have begun, and nothing is
over before it is behind the minimal of what any of them may still bring.
"""

from __future__ import annotations

import itertools
from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from google.protobuf.message import DecodeError

from history.epochs.frontier import (
    NOTHING,
    Antichain,
    Epoch,
    Spans,
    Time,
    is_ahead,
    is_covered,
    maximal,
    minimal,
    not_passed,
    precedes,
    raised,
)
from history.epochs.merging import Keeper, Merged, Part, passed_unread, times_of
from history.reading.acceptor import Positions, Record
from uprotocol import uri as uris
from uprotocol.core.ustreamer import ids
from uprotocol.core.ustreamer.ids import is_about_epochs, is_frontiers
from uprotocol.core.ustreamer.v1.ustreamer_pb2 import Beginning, Frontier, GroupFrontier
from uprotocol.v1.uri_pb2 import UUri

PENDING_BYTES_MAX: Final = 64 << 20  # of records that wait for the end of their epoch, and ...
RECORD_BYTES: Final = 600  # ... what each takes beside its payload
TIMEOUT_S: Final = 60.0  # without a word of a log that holds an epoch back
GROUPS_MAX: Final = 64  # that one log tells of; a gateway has fewer
UNTOLD_MAX: Final = 1_024  # groups that nobody tells of
TOLD_MAX: Final = 256  # epochs of a group of which it is known that their loss was told
HANDED_MAX: Final = 4_096  # epochs of a group that may be read again, and whose end is told with a reason

MISSED: Final = "records of it may be in a gap"
BEGUN: Final = "it had begun before it was read"
BEGUN_THERE: Final = "it had begun before a gateway on the way followed all of its topics"
TOO_BIG: Final = "it is too big to be held until its end"
UNTOLD: Final = "nothing is told of its group: may //*/4/1/8005 be read?"
REST: Final = "it was handed over before, and this came later"
ODD: Final = "its time has not as many numbers as others of its group"

Filter = Literal["atomic", "all"]
Key = tuple[str, Keeper | None]  # a group; and who keeps it, where those are told apart


@dataclass(frozen=True, slots=True)
class Assembled:
    """All records of an epoch, in the order of each log. `epoch` None: records that have none, as they came.
    `incomplete`: why it may not be whole; empty: it is. One without records is only told of. `keeper`: whose epoch,
    where keepers are told apart."""

    epoch: Epoch | None
    records: list[Record]
    incomplete: str = ""
    keeper: Keeper | None = None

    @property
    def is_complete(self) -> bool:
        return not self.incomplete


@dataclass(slots=True)
class _Pending:
    records: list[Record] = field(default_factory=list)
    bytes: int = 0
    first: Positions = field(default_factory=dict)  # by log as it is read: the lowest seq
    incomplete: str = ""


@dataclass(slots=True)
class _Group:
    filter: Antichain = NOTHING
    suspect: Antichain = NOTHING  # what is covered by these, and not over, may have records in a gap
    said: Merged = field(default_factory=Merged)
    pending: dict[Time, _Pending] = field(default_factory=dict)
    incomplete: dict[Time, str] = field(default_factory=dict)  # as frontiers said, of what is not handed over yet
    # What may be read again though it was handed over, or dropped, and up to where in each log: of a time, and of all
    # that are less, since those were before it
    handed: dict[Time, Positions] = field(default_factory=dict)
    open: set[Time] = field(default_factory=set)  # but for these: handed over in part, and the rest waited at a restart
    unknown_since: float | None = None  # records came, and nothing is told of the group; loop time
    known: set[bytes] = field(default_factory=set)  # logs that were parts before a restart
    gone: Spans = field(default_factory=Spans)  # what was handed over: of these, more is the rest
    again: set[Time] = field(default_factory=set)  # but for these, which nobody had taken before a restart
    told: dict[Time, None] = field(default_factory=dict)  # of which nothing is handed over but that; the newest
    length: int = 0  # of its times

    def is_rest(self, time: Time) -> bool:
        return time not in self.again and time in self.gone

    def note(self, time: Time, records: Iterable[Record]) -> None:
        """They are not wanted again."""
        upto: Positions = {}
        for record in records:
            upto[record.incarnation] = max(record.seq, upto.get(record.incarnation, 0))
        for other in list(self.handed):
            if precedes(other, time) or precedes(time, other):
                time = max(time, other)
                for log, seq in self.handed.pop(other).items():
                    upto[log] = max(seq, upto.get(log, 0))
        self.handed[time] = upto
        if len(self.handed) > HANDED_MAX:
            del self.handed[next(iter(self.handed))]

    def was_handed(self, time: Time, record: Record) -> bool:
        """Before a restart."""
        ups = (upto for other, upto in self.handed.items() if precedes(time, other))
        return time not in self.open and any(record.seq <= upto.get(record.incarnation, 0) for upto in ups)

    def due(self, timeout_s: float) -> float | None:
        """When somebody is to be waited for no longer; None: nothing waits."""
        if not self.pending:
            return None
        at = self.said.silent_at(timeout_s) if self.said.parts else None
        return (self.unknown_since or 0.0) + timeout_s if at is None else at


class Assembler:
    """Of one reader of `topics`, which are patterns. `filter`: "atomic": what had begun when it began to read is
    dropped; "all": it is handed over, as incomplete. `beyond`, by group: what is less than or equal to one of these
    times is dropped in any case.

    `each`: groups of the same name whose epochs others keep are told apart; else they are one, and an epoch is over
    when it is for all of them. `timeout_s`: for so long a log that holds an epoch back may be silent.

    `dropped`: filtered, begun (before anything was known of its group), handed (read again after a restart),
    unreadable. `counts`: epochs, incomplete (of these), rest.
    """

    def __init__(
        self,
        topics: Sequence[UUri] = (),
        *,
        filter: Filter = "atomic",
        beyond: Mapping[str, Collection[Time]] | None = None,
        each: bool = False,
        timeout_s: float = TIMEOUT_S,
        bytes_max: int = PENDING_BYTES_MAX,
    ) -> None:
        self._topics, self._filter, self._each = list(topics), filter, each
        self._beyond = {name: maximal(times) for name, times in (beyond or {}).items()}
        self._timeout_s, self._bytes_max = timeout_s, bytes_max
        self._groups: dict[Key, _Group] = {}
        self._keepers: dict[bytes, dict[str, Keeper]] = {}  # by log, by group
        self._untold: OrderedDict[Key, None] = OrderedDict()  # of which there are records, and no frontier so far
        self._lost: list[Assembled] = []  # was to be told at a restart
        self._plain: Positions = {}  # up to where what waits for nothing was handed over
        self._is_suspect = False  # a gap, and no snapshot since
        self._bytes = 0
        self._due: float | None = None  # nothing is overdue before; None: nothing waits
        self.dropped: Counter[str] = Counter()
        self.counts: Counter[str] = Counter()

    def __repr__(self) -> str:
        groups = {key: (one.said, sorted(one.pending)) for key, one in self._groups.items()}
        return f"Assembler({groups}, {dict(self.counts)}, dropped={dict(self.dropped)})"

    def frontiers(self) -> Iterator[tuple[str, Antichain, Antichain]]:
        """Of each group: its name, lower and upper frontier."""
        for (name, _), group in self._groups.items():
            yield name, group.said.lower, group.said.upper

    # -- what comes

    def begin(self, snapshot: Iterable[Record], now: float) -> None:
        """As of where the next records begin. After a gap again."""
        running = {key for key, group in self._groups.items() if group.known or group.said.parts}
        for record in sorted(snapshot, key=lambda one: one.seq):
            for key, told, part in self._told(record, now):
                group = self._group(key)
                log = _log_of(record)
                if log not in group.known and log not in group.said.parts:
                    is_running = self._is_suspect or key in running
                    self._begin_to_hear(group, told, part.active, is_running=is_running)
                elif self._is_suspect:
                    group.suspect = raised(group.suspect, part.active)
                self._hear(group, told.group, log, part)
                self._note_ended(group, told)
        self._is_suspect = False
        for group in self._groups.values():
            group.known.clear()

    def lose(self, damaged: Collection[bytes] = ()) -> None:
        """A gap: what is behind it may be of anything that is not over. `damaged`: logs that may have gone back, so
        that other records have the numbers of those that were handed over."""
        self._is_suspect = True
        for log in damaged:
            self._plain.pop(log, None)
            for group in self._groups.values():
                for upto in group.handed.values():
                    upto.pop(log, None)

    def take(self, records: Iterable[Record], now: float) -> list[Assembled]:
        """In the order of each log."""
        ready, self._lost = self._lost, []
        plain: list[Record] = []
        for record in records:
            if record.epoch is not None:
                ready += self._add(record, record.epoch, now)
            elif is_frontiers(source := record.message.attributes.source):
                ready += self._move(record, now)
            elif is_about_epochs(source):
                ready += self._begun(record, now)
            elif not self._was_plain(record):
                plain.append(record)
        if plain:
            ready.insert(0, Assembled(None, plain))
        return ready + self._shrink()

    def _was_plain(self, record: Record) -> bool:
        """It was handed over, as it came, before a restart."""
        if record.seq <= self._plain.get(record.incarnation, 0):
            self.dropped["handed"] += 1
            return True
        self._plain[record.incarnation] = record.seq
        return False

    def _told(self, record: Record, now: float) -> Iterator[tuple[Key, GroupFrontier, Part]]:
        source, log = record.message.attributes.source, _log_of(record)
        keeper = (source.authority_name, source.ue_id)
        try:
            frontier = Frontier.FromString(record.message.payload)
        except DecodeError:
            self.dropped["unreadable"] += 1
            return
        for told in frontier.groups[:GROUPS_MAX]:
            key, times = (told.group, keeper if self._each else None), times_of(told)
            if times is None or not self._has_room(log, told.group):
                self.dropped["unreadable"] += 1
                continue
            lower, active = times
            if not self._has_length(key, keeper, len((*lower, *active, ())[0])):
                self.dropped["unreadable"] += 1
                continue
            self._untold.pop(key, None)
            self._keepers[log][told.group] = keeper
            logs = frozenset(told.logs)
            yield key, told, Part(keeper, told.version, minimal(lower), frozenset(active), logs, told.number, now)

    def _has_length(self, key: Key, keeper: Keeper, length: int) -> bool:
        """Times of a group have as many numbers as the first one had; until its only keeper begins it anew with others,
        and nothing waits for what was before."""
        group = self._group(key)
        if length and group.length not in (0, length):
            if group.pending or any(part.keeper != keeper for part in group.said.parts.values()):
                return False
            group = self._groups[key] = _Group()
        group.length = group.length or length
        return True

    def _has_room(self, log: bytes, name: str) -> bool:
        """One log may tell of so many groups that have not ended."""
        known = self._keepers.setdefault(log, {})
        if name not in known and len(known) >= GROUPS_MAX:
            for other, keeper in list(known.items()):
                said = self._group((other, keeper if self._each else None)).said
                part = said.parts.get(log)
                if part is None or not (part.lower or part.active):
                    self._leave(said, other, log, 0.0 if part is None else part.heard_at)
        return name in known or len(known) < GROUPS_MAX

    def _leave(self, said: Merged, name: str, log: bytes, now: float) -> None:
        """Nothing more is told of it in that log."""
        if log in said.parts:
            said.drop(log, now)
        self._keepers[log].pop(name, None)
        if not self._keepers[log]:
            del self._keepers[log]

    def _group(self, key: Key) -> _Group:
        group = self._groups.get(key)
        if group is None:
            group = self._groups[key] = _Group(filter=self._beyond.get(key[0], NOTHING))
            group.length = next((len(time) for time in group.filter), 0)
        return group

    def _hear(self, group: _Group, name: str, log: bytes, part: Part) -> None:
        group.said.hear(log, part)
        group.unknown_since = None
        for gone in group.said.replaced_by(log):
            old = group.said.parts[gone]
            if old.version > part.version:  # its disk was replaced
                group.suspect = raised(group.suspect, old.active)
            self._leave(group.said, name, gone, part.heard_at)

    def _move(self, record: Record, now: float) -> Iterator[Assembled]:
        """A frontier."""
        log, touched = _log_of(record), set[Key]()
        for key, told, part in self._told(record, now):
            group = self._group(key)
            known = group.said.parts.get(log)
            before = part.active - {tuple(one.numbers) for one in told.opened}
            if known is None and told.number != 1:  # nothing was known of it: so this is the snapshot
                self._begin_to_hear(group, told, before, is_running=bool(group.said.parts))
            elif known is not None and record.origin is not None and told.number > known.number + 1:
                # somebody on the way was not given some of it. In the keeper's own log nobody is, and a number that
                # is left out there is that of a frontier that could not be stored
                yield from self._lose(key, group, before | known.active, record)
            elif known is not None and told.number <= known.number and told.version < known.version:
                # the log went back: how what was open ended may be in what it has lost
                group.suspect = raised(group.suspect, before | known.active)
            self._hear(group, told.group, log, part)
            self._note_ended(group, told)
            touched.add(key)
        for key in touched:
            yield from self._over(key, self._groups[key])

    @staticmethod
    def _begin_to_hear(group: _Group, told: GroupFrontier, open: Iterable[Time], *, is_running: bool) -> None:
        """A log in which something came before, which is not read. `is_running`: others of the group are read already,
        so what is `open` is not dropped, but may not be whole."""
        passed = passed_unread(told, group.length)
        group.length = group.length or len(next(iter(passed), ()))
        group.suspect = raised(group.suspect, [*passed, *(open if is_running else ())])
        if not is_running:
            group.filter = raised(group.filter, open)

    def _note_ended(self, group: _Group, told: GroupFrontier) -> None:
        for one in told.ended:
            if one.incomplete and 0 < len(one.time.numbers) == group.length:
                group.incomplete[tuple(one.time.numbers)] = one.incomplete
        while len(group.incomplete) > HANDED_MAX:
            del group.incomplete[next(iter(group.incomplete))]

    def _begun(self, record: Record, now: float) -> Iterator[Assembled]:
        """Somebody between us and the keeper has only begun to take some of what we read: of what is open there a part
        may be missing."""
        try:
            said = Beginning.FromString(record.message.payload)
        except DecodeError:
            self.dropped["unreadable"] += 1
            return
        if not begins(said, self._topics):
            return
        for key, group in self._groups.items():
            parts = group.said.parts
            open = [part.active for part in parts.values() if concerns(said, part.keeper[0])]
            yield from self._lose(key, group, frozenset[Time]().union(*open), record)
            for log in [log for log, part in parts.items() if begins_to_hear(said, part.keeper)]:
                group.said.drop(log, now)  # what is told next is a snapshot
                group.unknown_since = now

    def _lose(self, key: Key, group: _Group, open: Iterable[Time], by: Record) -> Iterator[Assembled]:
        """Of these a part may be missing, as `by` shows."""
        lost = [time for time in open if not is_covered(group.filter, time)]
        group.filter = raised(group.filter, lost)
        lost += [time for time in group.pending if time not in lost and is_covered(group.filter, time)]
        for time in sorted(lost):
            yield from self._not_whole(key, group, time, by)
        self._expect(group)

    def _not_whole(self, key: Key, group: _Group, time: Time, by: Record) -> Iterator[Assembled]:
        """None of it is handed over, but that."""
        if self._filter == "all":
            group.pending.setdefault(time, _Pending()).incomplete = BEGUN_THERE
            return
        if group.is_rest(time):  # and its reader knows that there is more
            if time in group.pending:
                yield self._hand(key, group, time)
            return
        pending = group.pending.pop(time, None)
        if pending is not None:
            self.dropped["filtered"] += len(pending.records)
            self._bytes -= pending.bytes
        group.note(time, [by] if pending is None else [*pending.records, by])
        if time in group.told:
            return
        group.told[time] = None
        if len(group.told) > TOLD_MAX:
            del group.told[next(iter(group.told))]
        self.counts["epochs"] += 1
        self.counts["incomplete"] += 1
        yield Assembled(Epoch(key[0], time), [], BEGUN_THERE, key[1])

    def _add(self, record: Record, epoch: Epoch, now: float) -> list[Assembled]:
        key, log = self._key_of(record, epoch.group), _log_of(record)
        group, time = self._groups.get(key) or self._untold_group(key), epoch.time
        said = group.said
        part = said.parts.get(log)
        if part is None:
            log, part = record.incarnation, said.parts.get(record.incarnation)
        if part is not None:
            said.touch(log, part, now)
        group.length = group.length or len(time)
        if len(time) != group.length:
            if self._was_plain(record):
                return []
            self.counts["epochs"] += 1
            self.counts["incomplete"] += 1
            return [Assembled(epoch, [record], ODD, key[1])]
        if group.was_handed(time, record):
            self.dropped["handed"] += 1
            return []
        is_untold = part is None and (bool(said.parts) or self._is_untold(group, now))
        begun = BEGUN if part is None or is_covered(group.filter, time) else ""
        if is_untold and not is_covered(group.filter, time):
            begun = UNTOLD
        elif begun and (self._filter == "atomic" or is_covered(self._beyond.get(epoch.group, NOTHING), time)):
            self.dropped["filtered" if part is not None else "begun"] += 1
            group.note(time, [record])  # the filter may fall away while this may still be read again
            return []
        pending = group.pending.get(time)
        if pending is None:
            pending = group.pending[time] = _Pending(incomplete=REST if group.is_rest(time) else "")
            self._expect(group)
        pending.incomplete = pending.incomplete or begun
        bytes = len(record.message.payload) + RECORD_BYTES
        pending.records.append(record)
        pending.bytes += bytes
        self._bytes += bytes
        pending.first.setdefault(record.incarnation, record.seq)
        return []

    def _untold_group(self, key: Key) -> _Group:
        group = self._group(key)
        self._untold[key] = None
        if len(self._untold) > UNTOLD_MAX:
            oldest = next((one for one in self._untold if one != key and not self._groups[one].pending), None)
            if oldest is not None:
                del self._untold[oldest], self._groups[oldest]
        return group

    def _is_untold(self, group: _Group, now: float) -> bool:
        """Nobody will say when it is over."""
        group.unknown_since = now if group.unknown_since is None else group.unknown_since
        return now - group.unknown_since >= self._timeout_s

    def _key_of(self, record: Record, name: str) -> Key:
        if not self._each:
            return name, None
        known = self._keepers.get(_log_of(record), {}).get(name)
        return name, known or self._keepers.get(record.incarnation, {}).get(name)

    # -- what is over

    def _over(self, key: Key, group: _Group) -> list[Assembled]:
        said = group.said
        if said.is_settled or not said.is_whole:
            return []
        said.is_settled, lower = True, said.lower
        group.filter = raised(not_passed(group.filter, lower), self._beyond.get(key[0], NOTHING))
        over = sorted(time for time in group.pending if said.is_over(time))
        ready = [self._hand(key, group, time, self._silent(said, time)) for time in over]
        if not self._is_suspect:
            group.suspect = not_passed(group.suspect, lower)
        for time in [time for time in group.incomplete if time not in group.pending and not is_ahead(lower, time)]:
            del group.incomplete[time]
        return ready

    def _silent(self, said: Merged, time: Time) -> str:
        """Who was waited for, and is no longer."""
        who = said.missing(time)
        return who and f"nothing was heard of {who} for {self._timeout_s} s"

    def _hand(self, key: Key, group: _Group, time: Time, why: str = "") -> Assembled:
        pending = group.pending.pop(time)
        self._bytes -= pending.bytes
        told = group.incomplete.pop(time, "")
        missed = MISSED if self._is_suspect or is_covered(group.suspect, time) else ""
        incomplete = why or pending.incomplete or told or missed
        group.note(time, pending.records)
        group.gone.add(time)
        group.again.discard(time)
        self.counts["epochs" if pending.incomplete != REST else "rest"] += 1
        self.counts["incomplete"] += bool(incomplete)
        return Assembled(Epoch(key[0], time), pending.records, incomplete, key[1])

    def overdue(self, now: float) -> list[Assembled]:
        """What only silent logs hold back."""
        ready: list[Assembled] = []
        if self._due is None or now < self._due:
            return ready
        self._due = None
        for key, group in self._groups.items():
            at = group.due(self._timeout_s)
            if at is not None and at <= now:
                if group.said.parts:
                    group.said.silence(now, self._timeout_s)
                    ready += self._over(key, group)
                else:
                    ready += [
                        self._hand(key, group, time, group.pending[time].incomplete or UNTOLD)
                        for time in sorted(group.pending)
                    ]
            self._expect(group)
        return ready

    @property
    def due(self) -> float | None:
        """When to ask for what is overdue; None: nothing waits."""
        return self._due

    def _expect(self, group: _Group) -> None:
        """Something came to what is pending there."""
        group.said.is_settled = False
        at = group.due(self._timeout_s)
        if at is not None:
            self._due = at if self._due is None else min(self._due, at)

    def _shrink(self) -> list[Assembled]:
        ready: list[Assembled] = []
        while self._bytes > self._bytes_max:
            sizes = (
                (one.bytes, key, time) for key, group in self._groups.items() for time, one in group.pending.items()
            )
            _, key, time = max(sizes, key=lambda one: one[0])
            ready.append(self._hand(key, self._groups[key], time, TOO_BIG))
        return ready

    # -- restarts

    def safe(self, positions: Positions, held: Iterable[Assembled] = ()) -> Positions:
        """From where it has to be read after a restart, if it was read up to `positions`, and `held` is not safe with
        the reader yet."""
        safe = dict(positions)

        def lower(log: bytes, seq: int) -> None:
            if log in safe:
                safe[log] = min(safe[log], seq - 1)

        for group in self._groups.values():
            for pending in group.pending.values():
                for log, seq in pending.first.items():
                    lower(log, seq)
        for one in held:
            for record in one.records:
                lower(record.incarnation, record.seq)
        return safe

    def forget(self, safe: Positions) -> None:
        """It is not read again from further back than there."""
        for group in self._groups.values():
            for time in [one for one, upto in group.handed.items() if _is_behind(upto, safe)]:
                del group.handed[time]

    def save(self, safe: Positions, held: Iterable[Assembled] = ()) -> dict[str, Any]:
        """What is to be kept with `safe`, for `restore`. Plain data for JSON."""
        in_hand: dict[Key, dict[Time, str]] = {}
        plain = dict(self._plain)
        lost: dict[Key, list[tuple[Time, str]]] = {}  # of which is to be told, and nothing more
        for one in (*self._lost, *held):
            if one.epoch is not None and not one.records:
                lost.setdefault((one.epoch.group, one.keeper), []).append((one.epoch.time, one.incomplete))
            elif one.epoch is None or one.incomplete == ODD:
                for record in one.records:
                    plain[record.incarnation] = min(plain.get(record.incarnation, 0), record.seq - 1)
            else:
                in_hand.setdefault((one.epoch.group, one.keeper), {})[one.epoch.time] = one.incomplete
        saved = []
        for key, group in self._groups.items():
            open = {time: one.incomplete for time, one in group.pending.items()} | in_hand.get(key, {})
            saved.append(
                {
                    "group": key[0],
                    "keeper": key[1],
                    "filter": sorted(group.filter),
                    "suspect": sorted(group.suspect),
                    "logs": sorted(log.hex() for log in group.said.parts),
                    "handed": [
                        [time, {log.hex(): seq for log, seq in upto.items()}]
                        for time, upto in sorted(group.handed.items())
                        if not _is_behind(upto, safe)
                    ],
                    "open": sorted(open),
                    "rest": sorted(time for time, why in open.items() if why == REST),
                    "gone": group.gone.spans,
                    "told": list(group.told),
                    "lost": lost.get(key, []),
                }
            )
        return {"groups": saved, "plain": {log.hex(): seq for log, seq in plain.items() if seq > safe.get(log, seq)}}

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Before anything is taken. Raises KeyError, TypeError, ValueError for what `save` never gave."""
        self._plain = {bytes.fromhex(log): int(seq) for log, seq in saved.get("plain", {}).items()}
        for one in saved["groups"]:
            keeper = one["keeper"]
            key = (str(one["group"]), None if keeper is None else (str(keeper[0]), int(keeper[1])))
            group = self._group(key)
            group.filter = maximal([*group.filter, *map(_time, one["filter"])])
            group.suspect = maximal(map(_time, one["suspect"]))
            group.known = {bytes.fromhex(log) for log in one["logs"]}
            group.handed = {
                _time(time): {bytes.fromhex(log): int(seq) for log, seq in upto.items()} for time, upto in one["handed"]
            }
            group.open = set(map(_time, one["open"]))
            group.again = group.open.difference(map(_time, one.get("rest", ())))
            group.gone = Spans((_time(first), _time(last)) for first, last in one.get("gone", ()))
            group.told = dict.fromkeys(map(_time, one.get("told", ())))
            lost = [(_time(time), str(why)) for time, why in one.get("lost", ())]
            self._lost += [Assembled(Epoch(key[0], time), [], why, key[1]) for time, why in lost]
            gone = itertools.chain.from_iterable(group.gone.spans)
            times = [*group.filter, *group.suspect, *group.handed, *group.open, *group.told, *gone]
            group.length = next(map(len, times), group.length)
            if {len(time) for time in times} - {group.length}:
                raise ValueError("times of one group have one length")


def _time(numbers: Iterable[int]) -> Time:
    return tuple(int(one) for one in numbers)


def begins(said: Beginning, topics: Sequence[UUri]) -> bool:
    """Some of what the patterns `topics` mean; none means every topic."""
    return not topics or any(
        any(uris.meets(topic, one) for one in said.topics) and not any(uris.matches(one, topic) for one in said.but)
        for topic in topics
    )


def begins_to_hear(said: Beginning, keeper: tuple[str, int]) -> bool:
    """What this keeper has told before may be missing, too."""
    return concerns(said, keeper[0]) and begins(said, [uris.uri(*keeper, ids.VERSION, ids.FRONTIERS)])


def concerns(said: Beginning, keeper: str) -> bool:
    """Who has this authority may keep the epochs of these topics."""
    family = keeper.partition(".")[2] or keeper
    there = {said.service.authority_name, *(topic.authority_name for topic in said.topics)}
    return bool(there & {keeper, uris.WILDCARD_AUTHORITY}) or any(one.partition(".")[2] == family for one in there)


def _log_of(record: Record) -> bytes:
    """In which it was appended first: that is where its epoch was kept."""
    return record.incarnation if record.origin is None else record.origin.incarnation


def _is_behind(upto: Positions, safe: Positions) -> bool:
    """None of it is read again."""
    return all(seq <= safe.get(log, seq) for log, seq in upto.items())
