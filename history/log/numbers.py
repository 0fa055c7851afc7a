"""A set of very many numbers of streams: less than a byte for each, where a set of Python's takes some 45.

number -> page (number // 256) -> bit; a page in which nothing is left goes
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Set
from typing import Final

PAGE_BITS: Final = 8  # of a number; a greater page is slower to look into, a smaller one costs more beside its bits
PAGE_MEMORY_BYTES: Final = 170  # the bits, and their place in a dict; measured

_PLACE: Final = (1 << PAGE_BITS) - 1


class Numbers(Set[int]):
    """Numbers from 0. It may grow and shrink while it is iterated, and while other threads look into it: a page is
    replaced whole."""

    __slots__ = ("_count", "_pages")

    def __init__(self, numbers: Iterable[int] = ()) -> None:
        self._pages: dict[int, int] = {}
        self._count = 0
        for number in numbers:
            self.add(number)

    def __repr__(self) -> str:
        return f"Numbers({self._count} in {len(self._pages)} pages)"

    def __len__(self) -> int:
        return self._count

    @property
    def memory_bytes(self) -> int:
        """About."""
        return PAGE_MEMORY_BYTES * len(self._pages)

    def __contains__(self, number: object) -> bool:
        assert isinstance(number, int)
        return bool(self._pages.get(number >> PAGE_BITS, 0) >> (number & _PLACE) & 1)

    def __iter__(self) -> Iterator[int]:
        for key in list(self._pages):
            page = self._pages.get(key, 0)
            while page:
                bit = page & -page
                yield key << PAGE_BITS | bit.bit_length() - 1
                page ^= bit

    def __ge__(self, other: Set[int]) -> bool:
        pages = self._pages
        return all(pages.get(number >> PAGE_BITS, 0) >> (number & _PLACE) & 1 for number in other)

    def __and__(self, other: Set[int]) -> set[int]:
        return {number for number in other if number in self}

    def isdisjoint(self, other: Iterable[int]) -> bool:
        pages = self._pages
        return not any(pages.get(number >> PAGE_BITS, 0) >> (number & _PLACE) & 1 for number in other)

    def add(self, number: int) -> None:
        key, bit = number >> PAGE_BITS, 1 << (number & _PLACE)
        page = self._pages.get(key, 0)
        if not page & bit:
            self._pages[key] = page | bit
            self._count += 1

    def difference_update(self, numbers: Iterable[int]) -> None:
        """Those that aren't there are passed over."""
        for number in numbers:
            key, bit = number >> PAGE_BITS, 1 << (number & _PLACE)
            page = self._pages.get(key, 0)
            if page & bit:
                self._count -= 1
                if page == bit:
                    del self._pages[key]
                else:
                    self._pages[key] = page ^ bit
