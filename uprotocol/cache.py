"""A dict of what can be worked out again: it starts anew when it is full.

To clear everything is cheap, rare, and needs no order of use: reading stays a plain look-up in a dict.
"""

from __future__ import annotations

from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")


class Cache(dict[K, V]):
    """At most `entries_max` entries, by item assignment alone: `update` and `setdefault` are not bounded."""

    __slots__ = ("entries_max",)

    def __init__(self, entries_max: int) -> None:
        super().__init__()
        assert entries_max > 0, "a cache keeps something"
        self.entries_max = entries_max

    def __setitem__(self, key: K, value: V) -> None:
        if len(self) >= self.entries_max and key not in self:
            self.clear()
        super().__setitem__(key, value)
