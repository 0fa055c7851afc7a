"""Topics that are paused toward a peer, or of which nobody can say yet whether it wants them.

They are parked, and the pump goes on with the others.

    record of an open topic -> park: a cursor of its own -> decided, resumed: nobody wants it -> forget
                                                        '-> somebody does -> read back from that cursor -> live again

A parked topic that somebody has named already is sent to those; it stays parked for the others.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from history.log import CURSORS_MAX, Log
from streamer.view import Target

PARKED_PREFIX: Final = "parked:"
# topics of one peer; each has a row of the log's file. Beyond it the peer waits, and nothing is lost
PARKED_MAX: Final = 5_000
CURSORS_RESERVED: Final = 2_000  # for peers and consumers


@dataclass(slots=True)
class Parked:
    """One topic: what has a greater seq than `after` may still be wanted, but for those who were `served` all along."""

    after: int
    served: frozenset[str] = frozenset()
    whole: bool = False  # the peer's network has got each of these messages, so there is nothing to be added
    waited_ms: int = 0  # while the streamer ran


class Parking(dict[int, Parked]):
    """The parked topics of one peer in one log, by stream. Owns the log's cursors `parked:PEER:STREAM`."""

    def __init__(self, log: Log, peer: str, wait_ms_max: int) -> None:
        """`wait_ms_max`: for so long each of them holds retention by age."""
        super().__init__()
        self._log, self._prefix, self._wait_ms_max = log, f"{PARKED_PREFIX}{peer}:", wait_ms_max

    def __repr__(self) -> str:
        return f"Parking({len(self)} topics)"

    @property
    def room(self) -> int:
        """How many more topics may be parked: others need cursors, too."""
        return min(PARKED_MAX - len(self), CURSORS_MAX - CURSORS_RESERVED - self._log.cursor_count)

    @property
    def waited_ms(self) -> int:
        """For how long the oldest has waited while the streamer ran."""
        return max((parked.waited_ms for parked in self.values()), default=0)

    def load(self) -> None:
        """What was parked when the log was closed. Who was served then is not known any more: they may get it twice."""
        for name, cursor in self._log.cursor_rows().items():
            number = name.removeprefix(self._prefix)
            if number == name:
                continue
            if number.isdecimal() and self._log.knows_stream(int(number)):
                self[int(number)] = Parked(cursor.seq, waited_ms=cursor.absent_ms)
            else:
                self._log.drop_cursor(name)

    def park(self, stream: int, after: int, served: Iterable[Target]) -> None:
        self[stream] = Parked(after)
        self.serve(stream, served)
        self._save(stream)

    def serve(self, stream: int, targets: Iterable[Target]) -> None:
        """From here on `targets` get its messages as they come."""
        parked, targets = self[stream], tuple(targets)
        parked.served |= {target.authority for target in targets}
        parked.whole = parked.whole or any(
            target.period_ms is None and target.since <= parked.after for target in targets
        )

    def move(self, stream: int, after: int) -> None:
        self[stream].after = after
        self._save(stream)

    def hold(self, stream: int, after: int) -> None:
        """It is paused: what has a greater seq than `after` waits for everybody, also for those who were served."""
        known = self.get(stream)
        self[stream] = Parked(after, waited_ms=known.waited_ms if known is not None else 0)
        self._save(stream)

    def forget(self, stream: int) -> None:
        del self[stream]
        self._log.drop_cursor(f"{self._prefix}{stream}")

    def wait(self, ms: int) -> None:
        """So much time has passed."""
        for stream, parked in self.items():
            parked.waited_ms += ms
            self._save(stream)

    def _save(self, stream: int) -> None:
        parked = self[stream]
        holds = parked.waited_ms < self._wait_ms_max
        self._log.set_cursor(f"{self._prefix}{stream}", parked.after, holds=holds, absent_ms=parked.waited_ms)
