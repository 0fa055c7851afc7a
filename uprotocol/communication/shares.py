"""Room that many callers share: all together have the whole of it, and each at most its part, in pieces and in bytes.

full(who, bytes) -> None, or the limit that is reached           add(who, 1, bytes), later add(who, -1, -bytes)

So a caller that asks without end fills its own part: the others have room beside it.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Final, Generic, NamedTuple, TypeVar

CALLERS_SHARE: Final = 4  # one caller has at most a quarter of each limit: three others must be able to work beside it
UNLIMITED: Final = 1 << 62

K = TypeVar("K", bound=Hashable)


class Full(NamedTuple):
    """Which limit leaves no room for one more."""

    limit: int
    is_of_bytes: bool  # else of pieces
    is_of_one: bool  # of each caller; else of all together


class Shares(Generic[K]):
    """How much each caller has of what there is for all. One piece has room wherever there is none yet, whatever its
    size."""

    def __init__(self, pieces_max: int = UNLIMITED, bytes_max: int = UNLIMITED, share: int = CALLERS_SHARE) -> None:
        """A caller has at most one part in `share` of each limit, and at least one piece."""
        self.pieces_max, self.bytes_max = pieces_max, bytes_max
        self.each_pieces_max, self.each_bytes_max = max(1, pieces_max // share), bytes_max // share
        self.pieces = self.bytes = 0
        self._used: dict[K, tuple[int, int]] = {}  # pieces and bytes, of those that have any

    def __repr__(self) -> str:
        return f"Shares({self.pieces} pieces of {self.bytes} bytes, {len(self._used)} callers)"

    def full(self, who: K, bytes: int = 0, promised: int = 0, promised_to_all: int = 0) -> Full | None:
        """None if one more piece of so many bytes has room beside what is there, and the bytes that are promised to
        `who`, and to all."""
        pieces, mine = self._used.get(who, (0, 0))
        if self.pieces >= self.pieces_max:
            return Full(self.pieces_max, is_of_bytes=False, is_of_one=False)
        if (self.pieces or promised_to_all) and self.bytes + promised_to_all + bytes > self.bytes_max:
            return Full(self.bytes_max, is_of_bytes=True, is_of_one=False)
        if pieces >= self.each_pieces_max:
            return Full(self.each_pieces_max, is_of_bytes=False, is_of_one=True)
        if (pieces or promised) and mine + promised + bytes > self.each_bytes_max:
            return Full(self.each_bytes_max, is_of_bytes=True, is_of_one=True)
        return None

    def add(self, who: K, pieces: int, bytes: int = 0) -> None:
        """Below zero: they are gone."""
        has, mine = self._used.get(who, (0, 0))
        self.pieces += pieces
        self.bytes += bytes
        if has + pieces:
            self._used[who] = (has + pieces, mine + bytes)
        else:
            self._used.pop(who, None)

    def pieces_of(self, who: K) -> int:
        return self._used.get(who, (0, 0))[0]

    def most(self) -> K:
        """Who has most pieces; there must be somebody."""
        return max(self._used, key=self.pieces_of)
