"""A bounded dict for values that can be computed again. When it is full, it is cleared.

Clearing everything is cheap and rare, and needs no record of the order of use: reading is a plain look-up in a dict.

All caches of what is known about a stream (its stamp, its route, its encoding) have the same limit, `streams_max`. If
messages of more streams than that take turns, no look-up succeeds, and each message costs more than twice as much.
"""

from __future__ import annotations

from typing import Final, TypeVar

STREAMS_CACHED_MAX: Final = 16_384  # the default; with all caches some 3 KB each

K = TypeVar("K")
V = TypeVar("V")

streams_max = STREAMS_CACHED_MAX  # entries of each cache of streams in this process


def raise_streams_max(streams: int) -> None:
    """Raise `streams_max` to `streams`; a lower value changes nothing."""
    global streams_max
    streams_max = max(streams_max, streams)


class Cache(dict[K, V]):
    """At most `entries_max` entries (None: `streams_max`), if they are set by item assignment: `update` and
    `setdefault` do not check the limit."""

    __slots__ = ("entries_max",)

    def __init__(self, entries_max: int | None = None) -> None:
        super().__init__()
        assert entries_max is None or entries_max > 0, "expected a limit of at least 1 entry"
        self.entries_max = entries_max

    def __setitem__(self, key: K, value: V) -> None:
        if len(self) >= (self.entries_max or streams_max) and key not in self:
            self.clear()
        super().__setitem__(key, value)
