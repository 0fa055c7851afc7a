"""What retention takes although an endpoint was still owed it: handed over one by one while that is little, beyond that
as a range.

doomed chunks -> Allowance.take -> Passed(after, before, the first of them) -> Log.on_passed
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, NamedTuple

from history.chunk import Chunk

RECORDS_MAX: Final = 1_000  # in a second of retention; who is owed more than that looks at ranges, not at messages
BYTES_MAX: Final = 1 << 20  # of their messages


class Passed(NamedTuple):
    """Retention has deleted the records in (after, before), and a cursor of an endpoint had not passed them."""

    after: int
    before: int
    chunks: list[Chunk]  # those records, oldest first, as far as the allowance reaches and they can be read


class Allowance:
    """How much is still handed over before the next `refill`."""

    def __init__(self) -> None:
        self.refill()

    def __repr__(self) -> str:
        return f"Allowance({self._records} records, {self._bytes} bytes)"

    def refill(self) -> None:
        self._records, self._bytes = RECORDS_MAX, BYTES_MAX

    def take(self, chunks: Iterable[Chunk], after: int) -> list[Chunk]:
        """The first records of `chunks` beyond `after`; nothing is read of chunks that are not needed."""
        taken: list[Chunk] = []
        if self._records <= 0 or self._bytes <= 0:
            return taken
        for chunk in chunks:
            if chunk.last_seq <= after:
                continue
            chunk = chunk.after(after)
            fits = chunk.places_within(self._records, self._bytes)
            if fits:
                taken.append(chunk.slice(0, fits))
                self._records -= fits
                self._bytes -= sum(map(len, taken[-1].data))
            if fits < len(chunk):
                self._records = 0
            if self._records <= 0:
                break
        return taken
