"""Limits the dead letters of one kind per minute, and the bytes of their payloads.

happened(kind, size) -> Granted: stored with payload | stored without payload | only counted
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Final, NamedTuple

KINDS_MAX: Final = 4_096  # within one minute; all further kinds count as one
PERIOD_S: Final = 60.0
ALL: Final = 8  # all kinds together have 8 times the limits of one: an attacker can invent any number of kinds


class Granted(NamedTuple):
    stored: bool  # False: only counted
    whole: bool  # with payload


class PerMinute:
    """Grants `count_max` letters of one kind per minute, `bytes_max` bytes of them with payload. All kinds together get
    ALL times as much."""

    def __init__(self, count_max: int, bytes_max: int, monotonic: Callable[[], float]) -> None:
        self._count_max, self._bytes_max, self._monotonic = count_max, bytes_max, monotonic
        self._kinds: dict[Hashable, tuple[int, int]] = {}
        self._count = self._bytes = 0  # of all kinds
        self._until = 0.0

    def happened(self, kind: Hashable, size: int) -> Granted:
        now = self._monotonic()
        if now >= self._until:
            self._kinds.clear()
            self._count = self._bytes = 0
            self._until = now + PERIOD_S
        if kind not in self._kinds and len(self._kinds) >= KINDS_MAX:
            kind = None
        count, bytes = self._kinds.get(kind, (0, 0))
        stored = count < self._count_max and self._count < ALL * self._count_max
        whole = (
            stored and (not bytes or bytes + size <= self._bytes_max) and self._bytes + size <= ALL * self._bytes_max
        )
        self._kinds[kind] = count + stored, bytes + size * whole
        self._count += stored
        self._bytes += size * whole
        return Granted(stored, whole)
