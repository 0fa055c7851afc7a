"""Room that several authorities share: whoever has most of it gives way. And how often a thing of one kind may happen
in a minute.

add(owner, item, size) -> is it over? -> give_way: the oldest item of the owner with the most  take: the owners in turn
happened(kind, size)   -> whole? told? counted only?

So one owner alone may fill all the room, and a flood of one takes nothing from those who have less than it.
"""

from __future__ import annotations

import heapq
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Hashable
from typing import Final, Generic, NamedTuple, TypeVar

KINDS_MAX: Final = 4_096  # told apart within one minute; what is beyond them counts as one kind
STALE_MAX: Final = 1_024  # entries of the heap that tell of weights of the past, beside two for each owner
PERIOD_S: Final = 60.0
ALL: Final = 8  # kinds that may be told as much as one may: names of somebody's making are kinds without end

T = TypeVar("T")


class Shares(Generic[T]):
    """Items of many owners, bounded in number and in bytes; the caller lets some go while `is_over`."""

    def __init__(self, count_max: int, bytes_max: int) -> None:
        self._count_max, self._bytes_max = count_max, bytes_max
        self._owners: OrderedDict[str, deque[tuple[T, int]]] = OrderedDict()  # whose turn is next comes first
        self._bytes: Counter[str] = Counter()  # by owner
        self._heaviest: list[tuple[float, str]] = []  # a heap; each owner has an entry that is not less than its weight
        self.count = self.bytes = 0

    def __len__(self) -> int:
        return self.count

    def __repr__(self) -> str:
        full = f"{self.count} of {self._count_max}, {self.bytes} of {self._bytes_max} bytes"
        return f"Shares({full}, {len(self._owners)} owners)"

    @property
    def is_over(self) -> bool:
        return self.count > self._count_max or self.bytes > self._bytes_max

    def add(self, owner: str, item: T, size: int) -> None:
        self._owners.setdefault(owner, deque()).append((item, size))
        self._bytes[owner] += size
        self.count += 1
        self.bytes += size
        heapq.heappush(self._heaviest, (-self._weight(owner), owner))
        if len(self._heaviest) > 2 * len(self._owners) + STALE_MAX:
            self._heaviest = [(-self._weight(name), name) for name in self._owners]
            heapq.heapify(self._heaviest)

    def give_way(self) -> T:
        """The oldest item of whoever has most; it is gone."""
        while True:
            weight, owner = self._heaviest[0]
            if owner not in self._owners:
                heapq.heappop(self._heaviest)
            elif -self._weight(owner) == weight:
                return self._pop(owner)[0]
            else:
                heapq.heapreplace(self._heaviest, (-self._weight(owner), owner))

    def take(self) -> tuple[T, int]:
        """The oldest item of the next owner, and its size; it is gone."""
        owner = next(iter(self._owners))
        self._owners.move_to_end(owner)
        return self._pop(owner)

    def _pop(self, owner: str) -> tuple[T, int]:
        item, size = self._owners[owner].popleft()
        self._bytes[owner] -= size
        self.count -= 1
        self.bytes -= size
        if not self._owners[owner]:
            del self._owners[owner], self._bytes[owner]
        return item, size

    def _weight(self, owner: str) -> float:
        return max(self._bytes[owner] / self._bytes_max, len(self._owners[owner]) / self._count_max)


class Granted(NamedTuple):
    told: bool  # else it is counted only
    whole: bool  # else without its payload


class PerMinute:
    """How much of one kind is told in a minute, whole up to so many bytes, and of all kinds ALL times as much."""

    def __init__(self, count_max: int, bytes_max: int, monotonic: Callable[[], float]) -> None:
        self._count_max, self._bytes_max, self._monotonic = count_max, bytes_max, monotonic
        self._kinds: dict[Hashable, tuple[int, int]] = {}
        self._told = self._bytes = 0  # of all kinds
        self._until = 0.0

    def happened(self, kind: Hashable, size: int) -> Granted:
        now = self._monotonic()
        if now >= self._until:
            self._kinds.clear()
            self._told = self._bytes = 0
            self._until = now + PERIOD_S
        if kind not in self._kinds and len(self._kinds) >= KINDS_MAX:
            kind = None
        count, bytes = self._kinds.get(kind, (0, 0))
        is_told = count < self._count_max and self._told < ALL * self._count_max
        is_whole = (
            is_told and (not bytes or bytes + size <= self._bytes_max) and self._bytes + size <= ALL * self._bytes_max
        )
        self._kinds[kind] = count + is_told, bytes + size * is_whole
        self._told += is_told
        self._bytes += size * is_whole
        return Granted(is_told, is_whole)
