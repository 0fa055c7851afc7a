"""Offsets: how far a query has read the logs of each history. Pure.

Offset: name of the query --> {authority: HistoryOffset}       Spark stores it in its checkpoint, as JSON
HistoryOffset: {log: seq}, digests, which topics that covers --> covering(wanted): topics were added --> Backfill
start, end --ranges--> [Range(authority, log, after, until)] --divide--> partitions: ranges of about equal size

A log is named by its incarnation in hex. A seq of 0 (before the first record) is left out.

A seq covers the topics of its Coverage: those that match the patterns and that the caller could read. If more topics
are wanted than that, the query goes on at its seqs with the wanted ones, and a Backfill reads what it has not read of
them up to there. What was covered before and no longer is stays in `past`, so that it is not read twice if it is wanted
again.
"""

from __future__ import annotations

import functools
import itertools
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from history.records.visible import Visible
from history.records.witness import Known, learn, up_to
from spark_ingest import epochs
from spark_ingest.epochs import Gates
from uprotocol import uri as uris
from uprotocol.core.ustreamer.v1.ustreamer_pb2 import Gap, LogPlan
from uprotocol.status import UStatusError, invalid
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.uri_pb2 import UUri

EARLIEST: Final = "earliest"
LATEST: Final = "latest"
SEQ_MAX: Final = (1 << 63) - 1
OFFSETS_VERSION: Final = 2  # of the JSON; version 1 had one history, without a version
EPOCHS: Final = "epochs"  # key in the JSON of a history, beside the logs
PAST_MAX: Final = 16  # earlier coverages of one history, of topics that are no longer wanted
ADDED_MAX: Final = 32  # patterns with wildcards that a backfill names; beyond, it asks for all that is wanted
RANGES_MAX: Final = 64  # in one partition: each costs a call, and they are read one after the other
_ANY: Final = uris.format(uris.ANY)
_INCARNATION = re.compile(r"[0-9a-f]{32}")

LogSeqs = dict[str, int]
"""By log. Missing: 0."""


@dataclass(frozen=True, slots=True)
class Coverage:
    """The topics that a seq covers: they match one of `topics` (UUri patterns; empty: all) and were visible to the
    caller (`Visible` as text; empty: not known)."""

    topics: tuple[str, ...] = ()
    visible: str = ""

    def has(self, source: UUri) -> bool:
        patterns = _parsed(self.topics)
        is_wanted = not patterns or any(uris.matches(pattern, source) for pattern in patterns)
        return is_wanted and (not self.visible or _visible(self.visible).sees(source))

    def is_part_of(self, other: Coverage) -> bool:
        """Returns True if `other` surely has all of its topics."""
        if self.visible != other.visible and (
            "" in (self.visible, other.visible) or _granted(self.visible, other.visible)
        ):
            return False
        return all(_is_covered(topic, other.topics) for topic in self.topics or (_ANY,))

    def added(self, before: Coverage) -> tuple[str, ...] | None:
        """Returns patterns of all topics that `before` does not have, and perhaps others; None: no topic was added."""
        if not self.topics and before.topics:
            return ()
        added = [topic for topic in self.topics if not _is_covered(topic, before.topics)]
        if self.visible:
            # naming nothing but topics that may not be read is refused
            visible = _visible(self.visible)
            added = [
                topic for topic in added if uris.has_wildcard(uris.parse(topic)) or visible.sees(uris.parse(topic))
            ]
        if before.visible and self.visible != before.visible:
            added += _parts(self.topics or (_ANY,), _granted(self.visible, before.visible))
        if sum(uris.has_wildcard(uris.parse(topic)) for topic in added) > ADDED_MAX or len(added) > 10 * ADDED_MAX:
            return self.topics
        return tuple(dict.fromkeys(added)) or None

    def json(self) -> list[Any]:
        return [list(self.topics), self.visible]


@functools.lru_cache(maxsize=256)
def _parsed(topics: tuple[str, ...]) -> tuple[UUri, ...]:
    return tuple(map(uris.parse, topics))


@functools.lru_cache(maxsize=256)
def _visible(text: str) -> Visible:
    return Visible.parse(text)


@functools.lru_cache(maxsize=256)
def _granted(visible: str, before: str) -> tuple[UUri, ...]:
    """Patterns of topics that are visible now, and were not before."""
    found = (_of_all(one) for one in _visible(visible).beyond(_visible(before)))
    return tuple(one for one in found if uris.is_topic(one) or one.resource_id == uris.WILDCARD_RESOURCE)


def _of_all(key: uris.Key) -> UUri:
    """A pattern that a history can be asked for: it takes no families."""
    authority = uris.WILDCARD_AUTHORITY if uris.is_family(key[0]) else key[0]
    return uris.uri(authority, *key[1:])


def _is_covered(topic: str, patterns: tuple[str, ...]) -> bool:
    """Returns True if surely one of the patterns matches all that the pattern `topic` matches; none: everything."""
    return not patterns or any(uris.matches(pattern, uris.parse(topic)) for pattern in _parsed(patterns))


def _parts(topics: tuple[str, ...], granted: tuple[UUri, ...]) -> Iterator[str]:
    """Yields patterns of what both some of `topics` and some of `granted` match, and perhaps of some more."""
    for text, topic in zip(topics, _parsed(topics), strict=True):
        for pattern in granted:
            if uris.matches(topic, pattern):
                yield uris.format(pattern)
            elif uris.meets(topic, pattern):
                yield text


@dataclass(frozen=True, slots=True)
class Delivered:
    """Records of `coverage` up to `seqs` were delivered."""

    coverage: Coverage
    seqs: LogSeqs


@dataclass(frozen=True, slots=True)
class Backfill:
    """Reads the records after `done`, up to `until`, of topics that were added when the query was at `until`.

    `topics`: patterns that are asked for; `delivered`: what must not be delivered again; `coverage`: what may be, since
    what can be read later is in a later backfill (None: of an older checkpoint, all). One that is over is in the
    offset of the batch that reads its last records, and in no later one.
    """

    topics: tuple[str, ...]
    done: LogSeqs
    until: LogSeqs
    delivered: tuple[Delivered, ...]
    coverage: Coverage | None = None

    @property
    def is_over(self) -> bool:
        return all(self.done.get(log, 0) >= seq for log, seq in self.until.items())


@dataclass(slots=True)
class HistoryOffset:
    """A position in each log of one history. JSON of a log: its seq, or {"seq": ..., and more}."""

    seqs: LogSeqs = field(default_factory=dict)
    known: dict[str, Known] = field(default_factory=dict)  # digests of records that identify a log
    after: LogSeqs = field(default_factory=dict)  # of a log that went back: the begin of the batch that ends here
    unread: frozenset[str] = frozenset()  # logs in memory of which the query has read nothing yet
    gates: Gates | None = None  # None: without whole epochs
    coverage: Coverage | None = None  # None: not known; what is asked for
    backfills: tuple[Backfill, ...] = ()
    past: tuple[Delivered, ...] = ()

    def entry(self, incarnation: str) -> Any:
        """The JSON of one log."""
        made: dict[str, Any] = {"seq": self.seqs.get(incarnation, 0)}
        if known := self.known.get(incarnation):
            made["known"] = [[seq, digest.hex()] for seq, digest in sorted(known.items())]
        if incarnation in self.after:
            made["after"] = self.after[incarnation]
        if incarnation in self.unread:
            made["unread"] = True
        return made if len(made) > 1 else made["seq"]

    def covering(self, wanted: Coverage, *, added: str) -> HistoryOffset:
        """Returns this position with the topics of `wanted`. `added`: EARLIEST reads those that are new from their
        beginning, LATEST from here on. Raises FAILED_PRECONDITION if that has changed too often, or for whole
        epochs."""
        before = self.coverage
        if before == wanted:
            return self
        if before is None or not before.visible:
            before = Coverage(wanted.topics if before is None else before.topics, wanted.visible)
        if before == wanted:
            return replace(self, coverage=wanted)
        topics = wanted.added(before)
        delivered = (*self.past, Delivered(before, dict(self.seqs)))
        past = tuple(one for one in delivered if not one.coverage.is_part_of(wanted))
        past = tuple({one.coverage: one for one in past}.values())
        if len(past) > PAST_MAX:
            what = f"the topics of this query, or what it may read, have changed more than {PAST_MAX} times"
            raise UStatusError(UCode.FAILED_PRECONDITION, f"{what}: begin a new query, with a new checkpoint and sink")
        if topics is None or not self.seqs or added == LATEST:
            return replace(self, coverage=wanted, past=past)
        if self.gates is not None:
            what = "a query with epochs 'complete' cannot add topics later, for their epochs are over"
            advice = "begin a new query, with a new checkpoint, or set addedTopics to latest"
            raise UStatusError(UCode.FAILED_PRECONDITION, f"{what}: {advice}")
        made = Backfill(topics, {}, dict(self.seqs), delivered, wanted)
        return replace(self, coverage=wanted, past=past, backfills=(*self.backfills, made))


@dataclass(frozen=True, slots=True)
class LogLoss:
    """Records (after, before) of one log are lost. `before` 0: the whole log is lost; `before` <= `after` + 1: the log
    went back to there."""

    incarnation: str
    after: int
    before: int
    reason: Gap.Reason.ValueType = Gap.REASON_UNSPECIFIED
    is_beyond: bool = False  # of a log that went back: nothing contradicts it, it is only shorter

    @property
    def went_back(self) -> bool:
        return 0 < self.before <= self.after + 1

    def __str__(self) -> str:
        if not self.before:
            why = "another log has replaced it, or a streamer that restarted had it in memory"
            return f"the log {self.incarnation} and its records after seq {self.after} are lost: {why}"
        if self.went_back and self.is_beyond:
            what = f"the offset {self.after} is beyond the end of the log {self.incarnation}, which ends at seq"
            return f"{what} {self.before - 1}: it is an older copy, or the offset is of another log"
        if self.went_back:
            return (
                f"the log {self.incarnation} went back (restored from a copy?): it agrees with the records read up to "
                f"seq {self.before - 1}; records {self.before} to {self.after} may be lost or replaced"
            )
        why = {
            Gap.REASON_RETENTION: "retention deleted them before they were read",
            Gap.REASON_CORRUPTION: "a part of the log's file is damaged",
            Gap.REASON_NETWORK: "a network lost them before they came to the log",
            Gap.REASON_UNDELIVERED: "they could not be delivered to the log",
        }.get(self.reason, "the streamer does not say why")
        return f"records {self.after + 1} to {self.before - 1} of log {self.incarnation} are lost: {why}"


# -- the offset of a query


@dataclass(slots=True)
class Offset:
    """Where a query is in each history. `query`: its random name, which is the holder of its cursors; empty: of a
    checkpoint of version 1. `began_ms`: when it began, Unix ms. `initial`: of the end of the first batch, where that
    begins: Spark does not store it, and asks for it anew after a restart."""

    query: str = ""
    began_ms: int = 0
    histories: dict[str, HistoryOffset] = field(default_factory=dict)
    initial: dict[str, HistoryOffset] | None = None

    @classmethod
    def of(cls, given: object, authority: str = "") -> Offset:
        """From JSON. `authority`: of the history in a JSON of version 1, or that names no authority. Raises
        UStatusError(INVALID_ARGUMENT)."""
        if not isinstance(given, dict):
            raise invalid(f"expected a JSON object of log and seq, got {given!r}")
        if "version" not in given:
            return cls._plain(given, authority)
        if given["version"] != OFFSETS_VERSION:
            what = f"expected an offset of version {OFFSETS_VERSION}, got {given['version']!r}"
            raise invalid(f"{what}: a newer up-streamer has written this checkpoint")
        try:
            coverages = [Coverage(tuple(map(str, topics)), str(visible)) for topics, visible in given["coverages"]]

            def read(histories: Mapping[str, Any]) -> dict[str, HistoryOffset]:
                return {str(name): _history(one, coverages) for name, one in histories.items()}

            initial = read(given["initial"]) if "initial" in given else None
            return cls(str(given["query"]), int(given["began_ms"]), read(given["histories"]), initial)
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            raise invalid(f"expected an offset as a checkpoint has it, got another one: {error!r}") from None

    @classmethod
    def _plain(cls, given: dict[Any, Any], authority: str) -> Offset:
        """Of `{log: seq}`, the form of version 1, or `{authority: {log: seq}}`."""
        names = [name for name in given if name != EPOCHS and not _INCARNATION.fullmatch(str(name))]
        if names and len(names) == len(given) and all(isinstance(one, dict) for one in given.values()):
            return cls(histories={str(name): _logs(one) for name, one in given.items()})
        if not authority:
            raise invalid("expected offsets by authority, {authority: {log: seq}}, got {log: seq}")
        return cls(histories={authority: _logs(given)})

    def json(self) -> dict[str, Any]:
        coverages: dict[Coverage, int] = {}

        def number(coverage: Coverage) -> int:
            return coverages.setdefault(coverage, len(coverages))

        def write(histories: Mapping[str, HistoryOffset]) -> dict[str, Any]:
            return {name: _history_json(one, number) for name, one in sorted(histories.items())}

        made: dict[str, Any] = {"version": OFFSETS_VERSION, "query": self.query, "began_ms": self.began_ms}
        made["histories"] = write(self.histories)
        if self.initial is not None:
            made["initial"] = write(self.initial)
        made["coverages"] = [coverage.json() for coverage in coverages]
        return made

    def begin(self, start: Offset) -> dict[str, HistoryOffset]:
        """Where the batch that ends here begins, which Spark says begins at `start`."""
        return start.histories if self.initial is None else self.initial


def _history_json(offset: HistoryOffset, number: Any) -> dict[str, Any]:
    def delivered(given: Iterable[Delivered]) -> list[Any]:
        return [[number(one.coverage), one.seqs] for one in given]

    made: dict[str, Any] = {"logs": {one: offset.entry(one) for one in sorted({*offset.seqs, *offset.unread})}}
    if offset.gates is not None:
        made[EPOCHS] = epochs.to_json(offset.gates)
    if offset.coverage is not None:
        made["covers"] = number(offset.coverage)
    if offset.backfills:
        made["backfills"] = [
            [list(one.topics), one.done, one.until, delivered(one.delivered)]
            + ([] if one.coverage is None else [number(one.coverage)])
            for one in offset.backfills
        ]
    if offset.past:
        made["past"] = delivered(offset.past)
    return made


def _history(given: Mapping[str, Any], coverages: Sequence[Coverage]) -> HistoryOffset:
    def delivered(rows: Iterable[Any]) -> tuple[Delivered, ...]:
        return tuple(Delivered(coverages[number], _seqs(seqs)) for number, seqs in rows)

    made = _logs(given["logs"] | ({EPOCHS: given[EPOCHS]} if EPOCHS in given else {}))
    made.coverage = coverages[given["covers"]] if "covers" in given else None
    made.backfills = tuple(
        Backfill(
            tuple(map(str, topics)), _seqs(done), _seqs(until), delivered(rows), *(coverages[number] for number in more)
        )
        for topics, done, until, rows, *more in given.get("backfills", ())
    )
    made.past = delivered(given.get("past", ()))
    return made


def _logs(given: Mapping[Any, Any]) -> HistoryOffset:
    """From the JSON of logs and gates. Raises UStatusError(INVALID_ARGUMENT)."""
    made = HistoryOffset()
    for incarnation, value in given.items():
        if incarnation == EPOCHS:
            try:
                made.gates = epochs.from_json(value)
            except (AttributeError, KeyError, TypeError, ValueError) as error:
                raise invalid(f"{EPOCHS!r}: expected waiting epochs as a checkpoint has them, got {error}") from None
            continue
        if not _INCARNATION.fullmatch(str(incarnation)):
            raise invalid(f"a log: expected its incarnation, 32 lower-case hex digits, got {incarnation!r}")
        entry = value if isinstance(value, dict) else {"seq": value}
        seq = _seq(incarnation, entry.get("seq"))
        if entry.get("unread") is True:
            made.unread |= {incarnation}
        if not seq:
            continue
        made.seqs[incarnation] = seq
        try:
            known = {_seq(incarnation, one): bytes.fromhex(digest) for one, digest in entry.get("known", ())}
        except (TypeError, ValueError):
            raise invalid(
                f"'known' of log {incarnation}: expected a list of [seq, digest in hex], got {entry['known']!r}"
            ) from None
        if known:
            made.known[incarnation] = known
        if "after" in entry:
            made.after[incarnation] = _seq(incarnation, entry["after"])
    return made


def _seqs(given: Mapping[str, Any]) -> LogSeqs:
    return {str(log): _seq(log, seq) for log, seq in given.items()}


def _seq(incarnation: object, seq: object) -> int:
    if type(seq) is not int or not 0 <= seq <= SEQ_MAX:
        raise invalid(f"seq of log {incarnation}: expected a whole number from 0 to 2^63 - 1, got {seq!r}")
    return seq


def parse(text: str, authority: str = "") -> str | Offset:
    """`earliest`, `latest`, or offsets in JSON. `authority`: as for Offset.of. Raises INVALID_ARGUMENT."""
    if text.lower() in (EARLIEST, LATEST):
        return text.lower()
    try:
        given = json.loads(text)
    except (ValueError, RecursionError):
        raise invalid(f"expected earliest, latest or a JSON object of log and seq, got {text!r}") from None
    return Offset.of(given, authority)


# -- the plan of a batch


def lost(start: HistoryOffset, present: Iterable[str]) -> list[LogLoss]:
    """The logs of `start` that are no longer `present`, with their records after `start`."""
    missing = start.seqs.keys() - {*present} - start.unread
    return [LogLoss(incarnation, start.seqs[incarnation], 0, Gap.REASON_INCARNATION) for incarnation in sorted(missing)]


def share(counts: Sequence[Sequence[int]], limit: int | None) -> list[int]:
    """Returns how many cuts to take of each plan, whose cuts have so many records, so that all have at most `limit`
    records. Those with few leave their share to the others; each gets at least one cut, so none starves."""
    taken = [0] * len(counts)
    sizes = sorted((sum(records), index) for index, records in enumerate(counts) if records)
    left = sum(size for size, _ in sizes) if limit is None else limit
    for rank, (_, index) in enumerate(sizes):
        sums = list(itertools.accumulate(counts[index]))
        mine = max(1, left // (len(sizes) - rank))
        taken[index] = max(1, sum(one <= mine for one in sums))
        left = max(0, left - sums[taken[index] - 1])
    return taken


def moved(start: HistoryOffset, cuts: Mapping[str, Sequence[LogPlan.Cut]], agreed: LogSeqs) -> HistoryOffset:
    """The end of a batch that takes `cuts`, by log. `agreed`: up to where logs that went back are still what was read.

    A log without new records has the same entry as in `start`, so that Spark sees that nothing is new.
    """
    made = replace(
        start,
        seqs=start.seqs | agreed,
        known={one: up_to(known, agreed[one]) if one in agreed else known for one, known in start.known.items()},
        after={one: seq for one, seq in start.after.items() if one not in cuts} | agreed,
        unread=start.unread - {*cuts, *agreed},
    )
    for incarnation, taken in cuts.items():
        made.seqs[incarnation] = taken[-1].position.seq
        known = learn(made.known.get(incarnation, {}), *(cut.position for cut in taken))
        if known:
            made.known[incarnation] = known
    made.seqs = compact(made.seqs)
    made.known = {log: known for log, known in made.known.items() if known and log in made.seqs}
    return made


@dataclass(frozen=True, slots=True)
class Range:
    """Records (after, until] of one log that match `topics`, and digests that identify the log. An earlier batch has
    read those up to `seq`, but they waited. `delivered`: of these topics those up to the seq were delivered before.
    `coverage`: only its topics are delivered."""

    authority: str
    incarnation: str
    after: int
    until: int
    topics: tuple[str, ...] = field(default=(), repr=False)
    known: tuple[tuple[int, bytes], ...] = field(default=(), repr=False)
    seq: int = field(default=0, repr=False)
    delivered: tuple[tuple[Coverage, int], ...] = field(default=(), repr=False)
    coverage: Coverage | None = field(default=None, repr=False)
    is_backfill: bool = field(default=False, repr=False)

    def __str__(self) -> str:
        return f"records {self.after + 1} to {self.until} of log {self.incarnation} of {self.authority}"


def ranges(start: Offset, end: Offset, topics: tuple[str, ...]) -> Iterator[Range]:
    """The records between two offsets; the same offsets give the same ranges. `topics`: of a history whose coverage is
    not known."""
    begin = end.begin(start)
    for authority, history in sorted(end.histories.items()):
        begun = begin.get(authority, HistoryOffset())
        wanted = topics if history.coverage is None else history.coverage.topics
        for incarnation, until in sorted(history.seqs.items()):
            seq = until
            if history.entry(incarnation) != begun.entry(incarnation):
                seq = history.after.get(incarnation, begun.seqs.get(incarnation, 0))
            after = epochs.read_from(begun.gates or {}, history.gates or {}, incarnation, seq)
            if until <= after:
                continue
            known = tuple(history.known.get(incarnation, {}).items())
            waited = seq if after < seq else 0
            delivered = _delivered(history.past, incarnation, after)
            yield Range(authority, incarnation, after, until, wanted, known, waited, delivered)
        yield from _backfill_ranges(authority, begun, history)


def _backfill_ranges(authority: str, begun: HistoryOffset, history: HistoryOffset) -> Iterator[Range]:
    for backfill in history.backfills:
        before = next((one.done for one in begun.backfills if _same(one, backfill)), {})
        for incarnation, until in sorted(backfill.done.items()):
            after = before.get(incarnation, 0)
            if until > after:
                delivered = _delivered(backfill.delivered, incarnation, after)
                coverage = backfill.coverage if backfill.coverage != history.coverage else None
                topics = backfill.topics
                yield Range(authority, incarnation, after, until, topics, (), 0, delivered, coverage, is_backfill=True)


def _same(one: Backfill, other: Backfill) -> bool:
    return (one.topics, one.until, one.delivered) == (other.topics, other.until, other.delivered)


def _delivered(given: Iterable[Delivered], incarnation: str, after: int) -> tuple[tuple[Coverage, int], ...]:
    return tuple((one.coverage, one.seqs[incarnation]) for one in given if one.seqs.get(incarnation, 0) > after)


Counted = Mapping[tuple[str, str, tuple[str, ...]], Sequence[tuple[int, int]]]
"""By authority, log and topics: seqs, each with the number of matching records since the seq before it."""


def divide(given: Iterable[Range], counted: Counted, records_max: int, partitions_min: int) -> list[list[Range]]:
    """Divides ranges into partitions of at most `records_max` records. In a range that was not `counted`, each seq
    counts as a record."""
    weighed = [(one, counted.get((one.authority, one.incarnation, one.topics), ())) for one in given]
    total = sum(sum(records for _, records in pieces) or one.until - one.after for one, pieces in weighed)
    limit = max(1, min(records_max, -(-total // partitions_min)))
    partitions: list[list[Range]] = []
    size = limit
    for one, pieces in weighed:
        for low, high, records in _pieces(one, pieces, limit):
            if not partitions or size + records > limit or len(partitions[-1]) >= RANGES_MAX:
                partitions.append([])
                size = 0
            size += records
            last = partitions[-1][-1] if partitions[-1] else None
            if (
                last is not None
                and replace(last, until=one.until) == replace(one, after=last.after)
                and last.until == low
            ):
                partitions[-1][-1] = replace(last, until=high)
            else:
                partitions[-1].append(replace(one, after=low, until=high))
    return partitions


def _pieces(one: Range, counted: Sequence[tuple[int, int]], limit: int) -> Iterator[tuple[int, int, int]]:
    """Yields the bounds of pieces of a range, and how many records each piece has."""
    inside = [(seq, records) for seq, records in counted if one.after < seq <= one.until]
    if not inside:
        seqs = one.until - one.after
        count = -(-seqs // limit)
        marks = [one.after + seqs * place // count for place in range(count + 1)]
        inside = [(high, high - low) for low, high in itertools.pairwise(marks)]
    elif inside[-1][0] < one.until:
        inside.append((one.until, 1))
    low = one.after
    for high, records in inside:
        yield low, high, records
        low = high


def needed(acked: HistoryOffset) -> LogSeqs:
    """The seqs up to which a query that has all batches up to `acked` reads nothing again."""
    seqs = dict(acked.seqs)
    if acked.gates:
        seqs = epochs.needed(acked.gates, seqs)
    for backfill in acked.backfills:
        for log in seqs:
            if backfill.done.get(log, 0) < backfill.until.get(log, 0):
                seqs[log] = min(seqs[log], backfill.done.get(log, 0))
    return seqs


def compact(seqs: Mapping[str, int]) -> LogSeqs:
    return {incarnation: seq for incarnation, seq in sorted(seqs.items()) if seq > 0}
