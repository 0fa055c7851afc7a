"""A dict of what can be worked out again: it starts anew when it is full.

To clear everything is cheap, rare, and needs no order of use: reading stays a plain look-up in a dict.

What is known of each stream (its stamp, its route, how it is written for a network) has one bound for the process:
where messages of more streams than that take turns, no message finds anything, and each costs twice as much and more.
"""

from __future__ import annotations

from typing import Final, TypeVar

STREAMS_MAX: Final = 16_384  # where nobody asks for more; with all caches some 3 KB each

K = TypeVar("K")
V = TypeVar("V")

_streams_max = STREAMS_MAX


def streams_max() -> int:
    """Of so many streams each cache knows something."""
    return _streams_max


def make_room(streams: int) -> None:
    """Let every cache of streams in this process know so many; where more was asked for before, that stays."""
    global _streams_max
    _streams_max = max(_streams_max, streams)


class Cache(dict[K, V]):
    """At most `entries_max` entries, by item assignment alone: `update` and `setdefault` are not bounded. None: as many
    as `streams_max` says."""

    __slots__ = ("entries_max",)

    def __init__(self, entries_max: int | None = None) -> None:
        super().__init__()
        assert entries_max is None or entries_max > 0, "a cache keeps something"
        self.entries_max = entries_max

    def __setitem__(self, key: K, value: V) -> None:
        if len(self) >= (self.entries_max or _streams_max) and key not in self:
            self.clear()
        super().__setitem__(key, value)
