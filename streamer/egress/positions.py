"""Up to where an endpoint has had the records of a log, by its rows: for claims, hand-overs and a stopped streamer.

egress: ------------------+-> cursor ------+-> overall -+-> first -+-> first_of_all: nothing waits up to this seq
followed: (else egress:) -'-> publishes ---'            |          |
parked:, owed: -------------> streams ------------------'          |
held: ----------------------> addresses ---------------------------'
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self, TypeVar

from history.log.log import Log
from history.records.chunk import SEQ_MAX, is_publish
from streamer.egress.rows import row, units_of

K = TypeVar("K")


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
