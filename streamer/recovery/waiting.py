"""The messages of one topic that wait for what was published before them, and the order of recovered ones. Pure."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from uprotocol.encoded import EncodedMessage


@dataclass(eq=False, slots=True)
class GateEntry:
    """A message on its way into the log. `position`: behind it; `follows`: behind what it was published, None: unknown.
    `taken`: settled when it is committed or refused; None: it was recovered. `since`: loop time of its arrival."""

    message: EncodedMessage
    key: bytes  # in the window of ids
    position: str
    follows: str | None
    taken: asyncio.Future[int] | None = None
    since: float = 0.0


class WaitingEntries:
    """In the order of their arrival. `bytes`: their size."""

    def __init__(self) -> None:
        self._entries: dict[bytes, GateEntry] = {}
        self._behind: dict[str, GateEntry] = {}  # by what it follows; of several with the same the first
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[GateEntry]:
        return iter(self._entries.values())

    @property
    def first(self) -> GateEntry:
        return next(iter(self._entries.values()))

    def add(self, entry: GateEntry) -> None:
        self._entries[entry.key] = entry
        self.bytes += entry.message.ByteSize()
        if entry.follows is not None:
            self._behind.setdefault(entry.follows, entry)

    def add_in_front(self, entries: Sequence[GateEntry]) -> None:
        behind = list(self)
        self.clear()
        for entry in (*entries, *behind):
            self.add(entry)

    def pop(self, key: bytes) -> GateEntry | None:
        entry = self._entries.pop(key, None)
        if entry is not None:
            self.bytes -= entry.message.ByteSize()
            if entry.follows is not None and self._behind.get(entry.follows) is entry:
                del self._behind[entry.follows]
        return entry

    def behind(self, position: str | None) -> GateEntry | None:
        """Returns the one that was published right behind `position`."""
        return None if position is None else self._behind.get(position)

    def clear(self) -> None:
        self._entries.clear()
        self._behind.clear()
        self.bytes = 0


def after_position(entries: Sequence[GateEntry], position: str | None) -> list[GateEntry]:
    """Returns the entries behind the one at `position`: a source may begin too early."""
    at = next((at for at, entry in enumerate(entries) if entry.position == position), -1)
    return list(entries[at + 1 :])


def chained(entries: Sequence[GateEntry], position: str | None) -> tuple[list[GateEntry], list[GateEntry]]:
    """Returns the entries that follow `position` without a hole, in their order, and the others. None: nothing is
    known, so the first one that follows none of the others begins."""
    chain: list[GateEntry] = []
    left = {entry.key: entry for entry in entries}
    behind = {entry.follows: entry for entry in reversed(entries) if entry.follows is not None}
    if position is not None:
        found = behind.get(position)
    else:
        positions = {entry.position for entry in entries}
        found = next((entry for entry in entries if entry.follows not in positions), None)
    while left:
        if found is None or found.key not in left:
            found = next(iter(left.values()))
            if found.follows is not None:
                break
        chain.append(left.pop(found.key))
        found = behind.get(found.position)
    return chain, list(left.values())


def anchored(entries: Sequence[GateEntry], anchor: str | None) -> list[GateEntry]:
    """Returns the entries that lead without a hole to the position `anchor`, in their order."""
    by_position = {entry.position: entry for entry in entries}
    found: list[GateEntry] = []
    while anchor is not None and (entry := by_position.pop(anchor, None)) is not None:
        found.append(entry)
        anchor = entry.follows
    return found[::-1]
