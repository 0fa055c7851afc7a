"""When the samples of one DDS writer count as acknowledged. Pure: the caller asks DDS, and the time.

write -> Unacknowledged -> the writer is drained, and no reliable reader has left meanwhile -> ACKNOWLEDGED
                        -> such a reader has left: it may have got nothing                   -> LOST
                        -> not drained for too long                                          -> OVERDUE

DDS calls a writer drained when all its *present* readers have acknowledged all samples, so also when the only reader
has just left without having acknowledged anything. Cyclone removes a reader in this order: it disappears from the list
of matched readers, all samples count as acknowledged by it, and milliseconds later the counts of PUBLICATION_MATCHED
change. So the list is read after `drained`. The counts reveal a reader that has come and gone, or left and returned.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection, Mapping
from datetime import UTC, datetime
from hashlib import blake2b
from typing import Final, NamedTuple

NOTED_S: Final = 3_600.0  # so long a departure is worth a note


class Matched(NamedTuple):
    """How many readers a writer has matched (PUBLICATION_MATCHED status)."""

    total: int  # since it exists
    now: int

    @property
    def left(self) -> int:
        """Number of readers that have left. It never falls."""
        return self.total - self.now


class AckState(enum.Enum):
    PENDING = enum.auto()
    ACKNOWLEDGED = enum.auto()
    LOST = enum.auto()
    OVERDUE = enum.auto()


# Returns the matched readers of a writer: handle -> is reliable. With False it asks DDS for none: some are None, if
# their reliability is not known yet
ReadReaders = Callable[[bool], Mapping[int, bool | None]]


class ReaderWatch:
    """The readers of one writer, and whether a reliable one has left since `begin`.

    DDS takes 250 us to say whether a reader is reliable, as long as it takes to make a writer. It is asked when the
    writer is used again with the same readers; until then each of them counts as reliable.
    """

    __slots__ = ("_is_complete", "_known", "_left", "_left_best_effort", "_matched")

    def __init__(self) -> None:
        self._matched = Matched(0, 0)
        self._known: Mapping[int, bool | None] = {}  # handle -> is reliable; None: not known
        self._is_complete = True  # all of these are known
        self._left = 0  # readers that had left at `begin`
        self._left_best_effort = 0  # best-effort readers that have left since

    def begin(self, matched: Matched, readers: ReadReaders) -> None:
        """The next samples are written to the readers matched now. `readers` is called only if something is new."""
        if matched != self._matched:
            self._change(matched, readers)
        else:
            self.complete(readers)
        self._left, self._left_best_effort = matched.left, 0

    def complete(self, readers: ReadReaders) -> None:
        """Ask which readers are reliable, unless that is known."""
        if not self._is_complete:
            self._known, self._is_complete = readers(True), True

    def _change(self, matched: Matched, readers: ReadReaders) -> None:
        self._matched, self._known = matched, readers(False)
        self._is_complete = None not in self._known.values()

    def has_lost_reader(self, matched: Matched, present: Collection[int], readers: ReadReaders) -> bool:
        """True if a reader has left since `begin` that is not known to be a best-effort one. `present`: the handles of
        the matched readers, read after the writer was found drained."""
        if any(is_reliable is not False and handle not in present for handle, is_reliable in self._known.items()):
            return True
        if matched != self._matched:
            before = self._known
            self._change(matched, readers)
            self._left_best_effort += sum(
                is_reliable is False for handle, is_reliable in before.items() if handle not in self._known
            )
        return matched.left - self._left > self._left_best_effort


def judge(*, is_drained: bool, has_lost_reader: bool, waited_s: float, timeout_s: float) -> AckState:
    """What has become of the samples of a writer that were not acknowledged at the last look. `has_lost_reader` is
    needed only if the writer is drained or the time is over; it is asked after `is_drained`, so that a reader that
    leaves in between is noticed."""
    if has_lost_reader:
        return AckState.LOST
    if is_drained:
        return AckState.ACKNOWLEDGED
    return AckState.OVERDUE if waited_s >= timeout_s else AckState.PENDING


class Departures:
    """Readers that left before they had acknowledged what was written to them, over all sessions of a transport. `add`
    is called on the writers' thread, the rest on any."""

    def __init__(self) -> None:
        self.count = 0  # one for each writer that such a reader had
        self._last: tuple[float, str] | None = None  # when (time.time()), and the partition

    def add(self, partition: str, now: float) -> None:
        self.count += 1
        self._last = now, partition

    def notes(self, now: float) -> list[str]:
        """For a person, for NOTED_S after the last departure."""
        if self._last is None or now - self._last[0] >= NOTED_S:
            return []
        at = datetime.fromtimestamp(self._last[0], UTC).isoformat(timespec="seconds")
        return [
            f"{self.count} time(s) a DDS receiver left before it had acknowledged what was sent to it, the last one at "
            f"{at} on {self._last[1]}: that is sent again, and other receivers may get it twice"
        ]


def digest_of(partition: str, data: bytes) -> bytes:
    """A sample contains the unique id of its message."""
    return blake2b(data, digest_size=16, key=blake2b(partition.encode(), digest_size=16).digest()).digest()
