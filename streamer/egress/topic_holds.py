"""Topics toward one peer whose records wait in the log at a position of their own, while the pump goes on with others.

undecided  a uSubscription has not yet answered who wants the topic   until it has answered
paused     somebody has paused the topic                              until it is resumed
owed       it was held when a follower took over                      until the follower acknowledges something

record of an open topic -> hold -> nobody wants it    -> forget
                                '-> somebody wants it -> read back from its position -> live again
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from history.log.log import Log
from streamer.egress.rows import HOLDER, NOTE_S, row, rows_left, units_of
from streamer.walk.view import Target

# topics of one peer; each has a row in the log's file. With more, the peer waits, and nothing is lost
PARKED_MAX: Final = 5_000


@dataclass(slots=True)
class TopicHold:
    """One topic: records with a greater seq than `after` may still be wanted, but not by the authorities in
    `served`, which got them as they came."""

    after: int
    began: float  # the streamer's running time then, milliseconds, minus the wait before a restart
    saved_at: float = 0.0  # running time of the last save
    served: frozenset[str] = frozenset()
    whole: bool = False  # the peer's network got every message since then, so nobody there lacks any


class TopicHolds(dict[int, TopicHold]):
    """The topics of one peer that are undecided or paused, by the log's id of their stream. Owns the log's cursors
    `parked:PEER:STREAM`."""

    def __init__(self, source: Log, peer: str, wait_ms_max: int, on_change: Callable[[Iterable[int]], None]) -> None:
        """`wait_ms_max`: how long retention by age waits for each of them. `on_change(streams)`: they are held now, or
        otherwise than before."""
        super().__init__()
        self._log, self._peer, self._wait_ms_max, self._on_change = source, peer, wait_ms_max, on_change
        self._ran_ms = 0  # running time of the streamer at the last call of `wait`

    @property
    def free_capacity(self) -> int:
        """Returns how many more topics may be held."""
        return min(PARKED_MAX - len(self), rows_left(self._log))

    @property
    def waited_ms(self) -> int:
        """Returns how long the oldest has waited while the streamer ran."""
        return int(self._ran_ms - min((hold.began for hold in self.values()), default=self._ran_ms))

    def load(self) -> None:
        """Load the holds. `served` is not on disk, so authorities that were served may get records twice."""
        for number, cursor in units_of(self._log.cursors.all(), "parked", self._peer).items():
            if number.isdecimal() and self._log.knows_stream(int(number)):
                self[int(number)] = TopicHold(cursor.seq, self._ran_ms - cursor.absent_ms, self._ran_ms)
            else:
                self._log.cursors.drop(row("parked", self._peer, number))

    def park(self, stream: int, after: int, served: Iterable[Target]) -> None:
        self[stream] = TopicHold(after, self._ran_ms)
        self.serve(stream, served)
        self._save(stream)

    def serve(self, stream: int, targets: Iterable[Target]) -> None:
        """Send messages of the topic to `targets` as they come, from now on."""
        parked, targets = self[stream], tuple(targets)
        parked.served |= {target.authority for target in targets}
        parked.whole = parked.whole or any(
            target.period_ms is None and target.since <= parked.after for target in targets
        )
        self._on_change((stream,))

    def pass_to(self, after: int) -> None:
        """Have nothing up to `after` wait any more."""
        for stream, hold in self.items():
            if hold.after < after:
                hold.after = after
                self._save(stream)

    def hold(self, stream: int, after: int) -> None:
        """Hold a paused topic: records after `after` wait for all authorities, also for those that were served."""
        known = self.get(stream)
        self[stream] = TopicHold(after, self._ran_ms if known is None else known.began)
        self._save(stream)
        self._on_change((stream,))

    def forget(self, stream: int) -> None:
        del self[stream]
        self._log.cursors.drop(row("parked", self._peer, stream))
        self._on_change((stream,))

    def wait(self, ms: int) -> None:
        self._ran_ms += ms
        for stream, hold in self.items():
            if self._ran_ms - hold.saved_at >= NOTE_S * 1_000:
                self._save(stream)

    def _save(self, stream: int) -> None:
        hold, cursor = self[stream], row("parked", self._peer, stream)
        hold.saved_at = self._ran_ms
        waited_ms = int(self._ran_ms - hold.began)
        holds = waited_ms < self._wait_ms_max
        self._log.cursors.set(cursor, hold.after, holds=holds, absent_ms=waited_ms, holder=HOLDER)


class OwedTopics(dict[int, int]):
    """Publishes that were held when a peer began to follow: the seq after which it reads each topic from our history,
    by the log's id of its stream. Owns the log's cursors `owed:PEER:STREAM`."""

    def __init__(self, source: Log, peer: str) -> None:
        super().__init__()
        self._log, self._peer = source, peer

    def load(self) -> None:
        owed = units_of(self._log.cursors.seqs(), "owed", self._peer)
        self.update({int(stream): seq for stream, seq in owed.items()})

    def add(self, owed: Mapping[int, int]) -> None:
        for stream, after in owed.items():
            self[stream] = after
            self._log.cursors.set(row("owed", self._peer, stream), after)

    def move(self, after: int) -> None:
        """Note that retention has deleted the records up to `after`."""
        self.add({stream: after for stream, before in self.items() if before < after})

    def clear_all(self) -> None:
        """Drop all: the peer has their records."""
        for stream in self:
            self._log.cursors.drop(row("owed", self._peer, stream))
        self.clear()
