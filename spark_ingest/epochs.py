"""Micro-batches that have whole epochs only. Pure.

driver: gates of `start` --advance(what frontiers in between say)--> gates of `end`   in the checkpoint, with seqs
tasks:  Choice(gates of both) --of(row)--> it is handed over, or waits for the end of its epoch, or was before

A gate is how far the epochs of a group have come, as one keeper tells them: which of them wait, and from which place in
each log on. A record is handed over in the first batch at whose end it does not wait: in one batch, whatever is told.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, NamedTuple

from google.protobuf.message import DecodeError

from history.epochs.assembling import BEGUN, BEGUN_THERE, MISSED, ODD, UNREPORTED, begins, begins_with_frontiers, concerns
from history.epochs.frontier import NOTHING, Antichain, Time, is_covered, maximal, minimal, not_passed, raised
from history.epochs.group_state import GROUPS_MAX, REST
from history.epochs.merging import LOGS_MAX, is_replaced, passed_unread, times_of
from uprotocol import uri as uris
from uprotocol.core.ustreamer import ids
from uprotocol.core.ustreamer.v1.ustreamer_pb2 import Beginning, Epoch, Frontier, GroupFrontier, RecordBatch
from uprotocol.v1.umessage_pb2 import UMessage
from uprotocol.v1.uri_pb2 import UUri

TOPICS: Final = ids.frontiers_of(uris.WILDCARD_AUTHORITY)  # where keepers and followers tell of epochs

PARTS_MAX: Final = 64  # of a gate: logs, also those of before restarts that may have records of what waits
WAITING_MAX: Final = 1_024  # times of a gate; a keeper has 256 open
TOO_MANY: Final = "too many epochs wait for a log of their gateway"

Key = tuple[str, int, str]  # of a keeper: authority, uEntity; and the group
Seqs = Mapping[str, int]  # by log, as it is read
Columns = tuple[Sequence[int], Sequence[int], Sequence[bytes], Sequence[Epoch], Sequence[int], Sequence[str | None]]


class Told(NamedTuple):
    """A record of TOPICS."""

    read: str  # the log that it was read from,
    seq: int  # its place there,
    origin: str  # and the log in which it was told first
    message: UMessage


def told_of(batches: Iterable[RecordBatch]) -> Iterator[Told]:
    for batch in batches:
        read, names = batch.incarnation.hex(), [name.hex() for name in batch.origin_incarnation]
        origins = batch.origin or [0] * len(batch.seq)
        for seq, origin, data in zip(batch.seq, origins, batch.message, strict=True):
            yield Told(read, seq, names[origin - 1] if origin else read, UMessage.FromString(data))


@dataclass(frozen=True, slots=True)
class Part:
    """What was told last in one log."""

    read: str
    version: int
    lower: Antichain
    active: frozenset[Time]
    logs: frozenset[str]
    number: int
    is_gone: bool = False  # nothing more is told there: it was in memory

    def json(self) -> list[Any]:
        times = sorted(self.lower), sorted(self.active)
        return [self.read, self.version, *times, sorted(self.logs), self.number, self.is_gone]

    @classmethod
    def of(cls, read: Any, version: Any, lower: Any, active: Any, logs: Any, number: Any, gone: Any) -> Part:
        times = minimal(_times(lower)), frozenset(_times(active))
        return cls(str(read), int(version), *times, frozenset(map(str, logs)), int(number), bool(gone))


@dataclass(slots=True)
class Waiting:
    """An epoch that is not over everywhere, and what of it has not been handed over: what comes after these places."""

    since: int  # the version in which it was told first
    after: dict[str, int] = field(default_factory=dict)
    why: str = ""  # it will not be whole
    is_given_up: bool = False  # what there was has been handed over, and so will be what comes

    def json(self) -> list[Any]:
        return [self.since, self.after, self.why, self.is_given_up]


@dataclass(slots=True)
class Gate:
    parts: dict[str, Part] = field(default_factory=dict)  # by the log in which they are told first
    filter: Antichain = NOTHING  # had begun before we read, and is dropped: in the batch that ends here
    waiting: dict[Time, Waiting] = field(default_factory=dict)
    incomplete: dict[Time, str] = field(default_factory=dict)  # of what the batch that ends here hands over: why
    heard_ms: int = 0  # when something was told last, Unix ms
    rest: Antichain = NOTHING  # of what is less than or equal to it a part was handed over, as `TOO_MANY`,
    rest_since: int = 0  # until this version is told in each log, and none of it may come
    suspect: Antichain = NOTHING  # what is less than or equal to it may lack records of a log that was read later

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
    def of(cls, given: Mapping[str, Any]) -> Gate:
        """Raises KeyError, TypeError, ValueError."""
        parts = {str(origin): Part.of(*part) for origin, part in given["parts"].items()}
        waiting = {
            _time(time): Waiting(
                int(since), {str(log): int(seq) for log, seq in after.items()}, str(why), bool(given_up)
            )
            for time, since, after, why, given_up in given["waiting"]
        }
        incomplete = {_time(time): str(why) for time, why in given["incomplete"]}
        filter, (rest, since) = maximal(_times(given["filter"])), given.get("rest", ((), 0))
        suspect = maximal(_times(given.get("suspect", ())))
        heard_ms, rest = int(given["heard_ms"]), maximal(_times(rest))
        made = cls(parts, filter, waiting, incomplete, heard_ms, rest, int(since), suspect)
        if len({len(time) for time in made._all_times()}) > 1:
            raise ValueError("times of one group have one length")
        return made

    def _all_times(self) -> Iterator[Time]:
        for part in self.parts.values():
            yield from (*part.lower, *part.active)
        yield from (*self.filter, *self.waiting, *self.incomplete, *self.rest, *self.suspect)

    @property
    def length(self) -> int:
        """Of its times; 0: there is none."""
        return len(next(self._all_times(), ()))

    # -- how far it has come

    @property
    def held(self) -> dict[Time, Waiting]:
        """What is not handed over."""
        return {time: one for time, one in self.waiting.items() if not one.is_given_up}

    @property
    def _live(self) -> list[Part]:
        return [part for part in self.parts.values() if not part.is_gone]

    @property
    def _is_whole(self) -> bool:
        """Of each log that is told of something is known."""
        return self.parts.keys() >= frozenset[str]().union(*(part.logs for part in self._live))

    @property
    def _is_idle(self) -> bool:
        """Whatever comes, it will be told anew in each log in front of it."""
        is_level = len({part.version for part in self._live}) <= 1
        return not self.waiting and not self.filter and not self.rest and self._is_whole and is_level

    def carried(self) -> Gate | None:
        """Into the next batch; None: nothing is to be known of it."""
        if self._is_idle:
            return None
        lower = minimal(time for part in self._live for time in part.lower)
        filter, suspect = self.filter, self.suspect
        if self._is_whole and self._live:
            filter, suspect = not_passed(filter, lower), not_passed(suspect, lower)
        waiting = {time: replace(one, after=dict(one.after)) for time, one in self.waiting.items()}
        return Gate(self._needed, filter, waiting, {}, self.heard_ms, self.rest, self.rest_since, suspect)

    @property
    def _needed(self) -> dict[str, Part]:
        """Logs that are there, and those of which there may be records of what waits."""
        first = min((one.since for one in self.waiting.values()), default=None)
        return {
            origin: part
            for origin, part in self.parts.items()
            if not part.is_gone or (first is not None and part.version >= first)
        }

    def begin(self, told: Told, group: GroupFrontier, *, is_new: bool) -> None:
        part = self._part(told, group)
        if part is None:
            return
        self.parts[told.origin] = part
        if is_new:
            self.filter = raised(self.filter, part.active)
            return
        for time in part.active:
            waiting = self.waiting.setdefault(time, Waiting(part.version, why=BEGUN))
            waiting.since = min(waiting.since, part.version)

    def hear(self, told: Told, group: GroupFrontier, *, is_lossy: bool) -> bool:
        """In the order of each log. False: it says what no keeper does, and nothing has changed."""
        part = self._part(told, group)
        if part is None:
            return False
        opened = {_time(one.numbers) for one in group.opened} & part.active
        known = self.parts.get(told.origin)
        before = part.active - opened
        if known is not None and not known.is_gone:
            # where its records were followed, some may not have been given to who follows; see Assembler
            if told.read == told.origin or part.number <= known.number + 1:
                before = frozenset()
            else:
                self.spoil(BEGUN_THERE)
        elif part.number == 1:
            before = frozenset()
        if known is None and not self._live and not is_lossy:  # so this is the snapshot
            self.filter, before = raised(self.filter, before), frozenset()
        self._replace(told.origin, part)
        if known is None:
            length = self.length or len(next(iter((*part.lower, *part.active)), ()))
            self.suspect = raised(self.suspect, passed_unread(group, length))
            for time, one in self.waiting.items():
                one.why = one.why or (MISSED if is_covered(self.suspect, time) else "")
        for time in part.active:
            if is_covered(self.filter, time) or is_covered(self.rest, time):
                continue
            waiting = self.waiting.setdefault(time, Waiting(part.version))
            waiting.since = min(waiting.since, part.version)
            if time in opened:
                waiting.after.setdefault(told.read, told.seq)
            if time in before:
                waiting.why = waiting.why or (MISSED if is_lossy else BEGUN_THERE)
            if is_covered(self.suspect, time):
                waiting.why = waiting.why or MISSED
        for ended in group.ended:
            ends = self.waiting.get(_time(ended.time.numbers))
            if ends is not None:
                ends.why = ends.why or ended.incomplete
        self.parts[told.origin] = part
        if len(self.waiting) > WAITING_MAX:
            self._let_go()
        return True

    def _replace(self, origin: str, part: Part) -> None:
        """Logs that are not there any more, by what is told in this one."""
        new = origin, part.version, part.logs
        for other, old in self.parts.items():
            if not old.is_gone and other != origin and is_replaced((other, old.version, old.logs), new):
                self.parts[other] = replace(old, is_gone=True)
                if old.version > part.version:  # its disk was replaced, and versions begin anew
                    self.spoil(MISSED)
                    self.rest_since = 0
                    for waiting in self.waiting.values():
                        waiting.since = 0

    def _let_go(self) -> None:
        """What waits. One of the logs is far behind the others."""
        self.rest_since = max(self.rest_since, *(one.since for one in self.waiting.values()))
        self.rest = raised(self.rest, self.waiting)
        self.give_up(TOO_MANY)
        self.waiting.clear()

    def _part(self, told: Told, group: GroupFrontier) -> Part | None:
        """None: not what a keeper writes."""
        times = times_of(group)
        if times is None:
            return None
        lower, active = times
        if (lower or active) and self.length not in (0, len((*lower, *active)[0])):
            if self.waiting or self.incomplete or self.rest:
                return None
            self.parts, self.filter, self.suspect = {}, NOTHING, NOTHING  # it begins anew, with other times
        logs = frozenset(log.hex() for log in group.logs)
        return Part(told.read, group.version, minimal(lower), frozenset(active), logs, group.number)

    def spoil(self, why: str) -> None:
        """A part of what waits may be missing."""
        for waiting in self.waiting.values():
            waiting.why = waiting.why or why

    def leave(self, anew: Collection[str], gone: Collection[str]) -> None:
        """Logs that went back: so do the versions there. And logs that are gone: nothing more is told in them."""
        if any(part.read in anew for part in self.parts.values()):
            self.give_up(MISSED)
            self.parts, self.waiting = {}, {}
            self.filter = self.rest = self.suspect = NOTHING
        for origin, part in self.parts.items():
            if part.read in gone:
                self.parts[origin] = replace(part, is_gone=True)
                self.spoil(MISSED)

    def settle(self, start: Seqs, end: Seqs) -> None:
        """Let go what is over."""
        self._leave_surplus()
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
            self._let_go()

    def _leave_surplus(self) -> None:
        """No keeper has so many logs at once."""
        surplus = sorted((part.version, origin) for origin, part in self.parts.items() if not part.is_gone)
        for _, origin in surplus[:-LOGS_MAX]:
            self.parts[origin] = replace(self.parts[origin], is_gone=True)
            self.spoil(MISSED)

    def give_up(self, why: str) -> None:
        """What is there is handed over."""
        for time, waiting in self.held.items():
            waiting.is_given_up = True
            self.incomplete[time] = why


Gates = dict[Key, Gate]


def to_json(gates: Gates) -> list[Any]:
    return [[*key, gate.json()] for key, gate in sorted(gates.items())]


def from_json(given: Iterable[Sequence[Any]]) -> Gates:
    """Raises KeyError, TypeError, ValueError."""
    return {(str(authority), int(entity), str(group)): Gate.of(gate) for authority, entity, group, gate in given}


def begin(snapshot: Iterable[Told], *, is_new: bool) -> Gates:
    """Of what is open there a part is behind us: a new query drops it, another one has had that part."""
    gates: Gates = {}
    for told in snapshot:
        for key, group in _groups(told):
            gates.setdefault(key, Gate()).begin(told, group, is_new=is_new)
    return {key: gate for key, gate in gates.items() if gate.carried() is not None}


@dataclass(frozen=True, slots=True)
class Between:
    """What is known of the records from the start to the end of a batch."""

    start: Seqs
    end: Seqs
    told: Sequence[Told]  # in the order of each log
    topics: Sequence[UUri] = ()  # that are read; none: all
    lossy: frozenset[str] = frozenset()  # logs in which some of them are gone,
    anew: frozenset[str] = frozenset()  # that went back, so that what they told is not what they tell,
    gone: frozenset[str] = frozenset()  # and that are not there any more


def advance(gates: Gates, what: Between, now_ms: int) -> Gates:
    """The gates at the end of a batch."""
    made: Gates = {}
    for key, gate in gates.items():
        carried = gate.carried()
        if carried is not None:
            carried.leave(what.anew, what.gone)
            made[key] = carried
    groups = Counter(key[:2] for key in made)
    for told in what.told:
        if not ids.is_frontiers(told.message.attributes.source):
            _spoil_begun(made, told, what.topics)
            continue
        for key, group in _groups(told):
            if key not in made and groups[key[:2]] >= GROUPS_MAX:
                continue
            if key not in made:
                groups[key[:2]] += 1
            gate = made.setdefault(key, Gate())
            if gate.hear(told, group, is_lossy=told.read in what.lossy | what.anew):
                gate.heard_ms = now_ms
    for gate in made.values():
        if {part.read for part in gate.parts.values()} & what.lossy:
            gate.spoil(MISSED)
        gate.settle(what.start, what.end)
    return made


def overdue(gates: Gates, now_ms: int, timeout_ms: int) -> list[Key]:
    """Which gates hold something, and were not told anything for so long."""
    return [key for key, gate in gates.items() if gate.held and now_ms - gate.heard_ms > timeout_ms]


def given_up(gates: Gates, keys: Collection[Key], timeout_ms: int) -> Gates:
    """`gates` of which these do not wait any more."""
    made = dict(gates)
    for key in keys:
        gate = gates[key].carried()
        assert gate is not None, "it holds something"
        gate.incomplete = dict(gates[key].incomplete)
        gate.give_up(f"{key[0]} has reported nothing for {timeout_ms / 1000:g} s")
        made[key] = gate
    return made


def read_from(start: Gates, end: Gates, log: str, seq: int) -> int:
    """After which place a batch that begins at `seq` has to read a log, for what it hands over that waited."""
    low = seq
    for key, gate in start.items():
        still = end[key].held if key in end else {}
        for time, waiting in gate.held.items():
            if time not in still:
                low = min(low, waiting.after.get(log, 0))
    return low


@dataclass(slots=True)
class _Known:
    """Of a group, and a log in which its records came first."""

    before: dict[Time, int] = field(default_factory=dict)  # held at the start: what comes after this seq
    held: dict[Time, int] = field(default_factory=dict)  # at the end
    filter: Antichain = NOTHING
    rest: Antichain = NOTHING
    incomplete: dict[Time, str] = field(default_factory=dict)
    length: int = 0  # of its times

    def why(self, time: Time) -> str | None:
        """What is handed over of it is not whole."""
        if len(time) != self.length:
            return ODD if self.length else None
        if is_covered(self.rest, time) and time not in self.incomplete:
            return REST
        return self.incomplete.get(time)


class Choice:
    """Which records of the log `read` a batch has that goes on after `seq`, and which of them are not of a whole
    epoch. Travels to the tasks."""

    def __init__(self, start: Gates, end: Gates, read: str, seq: int) -> None:
        self._after = seq
        self._known: dict[tuple[str, str], _Known] = {}
        for (_, _, group), gate in start.items():
            for origin in gate.parts:
                before = self._known.setdefault((origin, group), _Known()).before
                before.update({time: waiting.after.get(read, 0) for time, waiting in gate.held.items()})
        for (_, _, group), gate in end.items():
            for origin in gate.parts:
                known = self._known.setdefault((origin, group), _Known())
                known.held.update({time: waiting.after.get(read, 0) for time, waiting in gate.held.items()})
                known.filter, known.rest = gate.filter, gate.rest
                known.incomplete, known.length = gate.incomplete, gate.length

    def of(self, batch: RecordBatch) -> Columns:
        """What `Decoder.decode` takes."""
        read, names = batch.incarnation.hex(), [name.hex() for name in batch.origin_incarnation]
        origins = batch.origin or [0] * len(batch.seq)
        epochs = [None, *((one.group, _time(one.time.numbers)) for one in batch.epochs)]
        places, whys = [], list[str | None]()
        for place, (seq, origin, number) in enumerate(
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
            places.append(place)
            whys.append(why)
        columns: list[Any] = [batch.seq, batch.time_ms, batch.message, batch.epochs, batch.epoch]
        if len(places) < len(batch.seq):
            for at in (0, 1, 2, 4):
                columns[at] = [columns[at][place] for place in places] if columns[at] else ()
        return (*columns, whys)

    def _has(self, known: _Known | None, time: Time, seq: int) -> bool:
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
    """Up to where each log is not read again."""
    made = dict(seqs)
    for gate in gates.values():
        for waiting in gate.held.values():
            for log in made:
                made[log] = min(made[log], waiting.after.get(log, 0))
    return made


def _groups(told: Told) -> Iterator[tuple[Key, GroupFrontier]]:
    source = told.message.attributes.source
    try:
        frontier = Frontier.FromString(told.message.payload)
    except DecodeError:
        return
    for group in frontier.groups[:GROUPS_MAX]:
        yield (source.authority_name, source.ue_id, group.group), group


def _spoil_begun(gates: Gates, told: Told, topics: Sequence[UUri]) -> None:
    """Somebody between us and the keeper has only begun to take some of what we read."""
    try:
        said = Beginning.FromString(told.message.payload)
    except DecodeError:
        return
    for key, gate in gates.items() if begins(said, topics) else ():
        if concerns(said, key[0]):
            gate.spoil(BEGUN_THERE)
        if begins_with_frontiers(said, key[:2]):
            gate.leave((), {part.read for part in gate.parts.values()})


def _time(numbers: Iterable[int]) -> Time:
    return tuple(int(one) for one in numbers)


def _times(given: Iterable[Iterable[int]]) -> list[Time]:
    return [_time(one) for one in given]
