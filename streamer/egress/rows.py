"""Names of the cursors that belong to endpoints, as they stand in a log's file, and up to where they say that an
endpoint has had the records. Made and taken apart here alone.

    egress:ENDPOINT               its pump has sent the records up to here
    followed:ENDPOINT             its follower has acknowledged the publishes up to here (following/handover.py)
    follower:ENDPOINT:SERVICE     who follows behind it; 1 once that service has acknowledged something
    parked:ENDPOINT:STREAM        the topic is undecided or paused: its later records wait (topic_holds.py)
    owed:ENDPOINT:STREAM          the follower reads this topic from here (topic_holds.py)
    held:ENDPOINT:KIND UNIT       the address is refused or unheard: its later records wait (address_holds.py)
    began:ENDPOINT                a new endpoint began here, while records waited for one not configured (claims.py)
    skipped:ENDPOINT:AFTER        all after AFTER up to here was skipped while the streamer was stopped (skipping.py)

Cursors of consumers are `history/service/consumers.py`'s.

egress: ------------------+-> cursor ------+-> overall -+-> first -+-> first_of_all: nothing waits up to this seq
followed: (else egress:) -'-> publishes ---'            |          |
parked:, owed: -------------> streams ------------------'          |
held: ----------------------> addresses ---------------------------'
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple, Self, TypeVar, cast, get_args

from history.log.cursors import CURSORS_MAX
from history.log.log import Log
from history.records.chunk import SEQ_MAX, is_publish

RowKind = Literal["egress", "followed", "follower", "parked", "owed", "held", "began", "skipped"]
KINDS: Final[frozenset[str]] = frozenset(get_args(RowKind))
WAITING: Final[frozenset[RowKind]] = frozenset(("egress", "followed", "parked", "owed", "held"))
"""Kinds behind which records may wait for an endpoint."""
HOLDER: Final = "egress"
"""Holder of the cursors of an endpoint that is owed every record."""
CURSORS_RESERVED: Final = 2_000  # for peers and consumers
NOTE_S: Final = 3_600.0  # between two saves of how long something has been held

T = TypeVar("T")
K = TypeVar("K")


class RowName(NamedTuple):
    """The parts of a cursor's name."""

    kind: RowKind
    endpoint: str
    unit: str | None = None  # a stream, a service, an address or a seq, by kind; None: this kind has none


def row(kind: RowKind, endpoint: str, unit: str | int | None = None) -> str:
    """Returns the name of a cursor."""
    return f"{kind}:{endpoint}" if unit is None else f"{kind}:{endpoint}:{unit}"


def parsed(name: str) -> RowName | None:
    """Returns the parts of a cursor's name; None if it is not a cursor of an endpoint."""
    kind, colon, rest = name.partition(":")
    if not colon or kind not in KINDS:
        return None
    endpoint, colon, unit = rest.partition(":")
    return RowName(cast("RowKind", kind), endpoint, unit if colon else None)


def endpoints_of(cursors: Mapping[str, T], kind: RowKind) -> dict[str, T]:
    """Returns what `cursors` has for the rows of one kind that have no unit, by endpoint."""
    prefix = f"{kind}:"
    return {name.removeprefix(prefix): value for name, value in cursors.items() if name.startswith(prefix)}


def units_of(cursors: Mapping[str, T], kind: RowKind, endpoint: str) -> dict[str, T]:
    """Returns what `cursors` has for the rows of one kind and endpoint, by unit."""
    prefix = f"{kind}:{endpoint}:"
    return {name.removeprefix(prefix): value for name, value in cursors.items() if name.startswith(prefix)}


def rows_left(source: Log) -> int:
    """Returns how many more rows holds may have; the other rows are for other cursors."""
    return CURSORS_MAX - CURSORS_RESERVED - len(source.cursors)


@dataclass(frozen=True, slots=True)
class EndpointPositions:
    """The seq up to which an endpoint has had each stream of a log; SEQ_MAX: it has no such row. Who there wants what
    is not known: all later records count. Which streams wait for a held address is not known either."""

    cursor: int
    publishes: int  # as far as its follower has acknowledged them, if it has one
    streams: dict[int, int]  # that are held, or owed to the follower: by the log's id
    addresses: dict[str, int]  # that are held: by the letter of the kind, and the unit

    @classmethod
    def of(cls, seqs: Mapping[str, int], endpoint: str) -> Self:
        """`seqs`: the log's cursors."""
        cursor = seqs.get(row("egress", endpoint), SEQ_MAX)
        publishes = seqs.get(row("followed", endpoint), cursor)
        topics = {int(stream): seq for stream, seq in units_of(seqs, "parked", endpoint).items()}
        owed = {int(stream): seq for stream, seq in units_of(seqs, "owed", endpoint).items()}
        return cls(cursor, publishes, lowest(topics, owed), units_of(seqs, "held", endpoint))

    @property
    def overall(self) -> int:
        return min(self.cursor, self.publishes)

    @property
    def first(self) -> int:
        """Returns the seq after which the first record may wait, apart from held addresses."""
        return min([self.overall, *self.streams.values()])

    @property
    def first_held(self) -> int:
        """Returns the seq after which the first record may wait for a held address."""
        return min(self.addresses.values(), default=SEQ_MAX)

    @property
    def first_of_all(self) -> int:
        return min(self.first, self.first_held)

    def after(self, stream: int, *, is_publish: bool) -> int:
        """Returns the seq up to which it has had a stream."""
        had = self.publishes if is_publish else self.cursor
        return min(had, self.streams.get(stream, had))

    def after_in(self, source: Log, stream: int) -> int:
        return self.after(stream, is_publish=source.knows_stream(stream) and is_publish(source.stream(stream)))

    def earliest(self, other: EndpointPositions) -> EndpointPositions:
        """Returns the lower of both seqs, overall, by stream and by address: a topic may be held for only one."""

        def both(mine: dict[K, int], others: dict[K, int]) -> dict[K, int]:
            units = mine.keys() | others.keys()
            return {unit: min(mine.get(unit, self.overall), others.get(unit, other.overall)) for unit in units}

        cursor, publishes = min(self.cursor, other.cursor), min(self.publishes, other.publishes)
        streams, addresses = both(self.streams, other.streams), both(self.addresses, other.addresses)
        return EndpointPositions(cursor, publishes, streams, addresses)


def lowest(topics: Mapping[int, int], owed: Mapping[int, int]) -> dict[int, int]:
    """Returns the lower seq of each stream."""
    return {stream: min(topics.get(stream, SEQ_MAX), owed.get(stream, SEQ_MAX)) for stream in topics.keys() | owed}


class OwnedCursor:
    """A cursor of a log, and how long its owner has been away while the streamer ran. Retention by age waits for the
    owner until that is too long. The absence is saved with the cursor, so a restart does not end it."""

    def __init__(self, source: Log, name: str, limit_ms: int) -> None:
        self._log, self.name, self._limit_ms = source, name, limit_ms
        self.seq = 0  # the last seq that the owner has had
        self.absent_ms = 0  # as last saved
        self.is_new = False  # it did not exist before this start: no record that was in the log is for the owner

    def begin(self) -> None:
        """Load it, and save it at the position to go on from."""
        stored = self._log.cursors.get(self.name)
        if stored is not None:
            self.seq, self.absent_ms = min(stored.seq, self._log.newest_seq), stored.absent_ms
        elif self._log.cursors.lost:  # it may be among the lost ones: duplicates are better than losses
            self.seq = self._log.floor_seq
        else:
            self.seq, self.is_new = self._log.newest_seq, True
        self.save()

    def absent_after(self, ms: int, *, away_ms: int) -> int:
        """Returns `absent_ms` after `ms` more, of which the owner has been away for the last `away_ms`."""
        return self.absent_ms + ms if away_ms >= ms else away_ms

    def waited(self, ms: int, *, away_ms: int) -> None:
        """Note that `ms` have passed, and that the owner has been away for the last `away_ms` of them."""
        absent_ms = self.absent_after(ms, away_ms=away_ms)
        if absent_ms != self.absent_ms:
            self.absent_ms = absent_ms
            self.save()

    def save(self) -> None:
        holds = self.absent_ms < self._limit_ms
        self._log.cursors.set(self.name, self.seq, holds=holds, absent_ms=self.absent_ms, holder=HOLDER)
