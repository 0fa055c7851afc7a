"""Which commands were handled, so that one that a network delivers again does not undo a later one. On the writer's
thread.

command -> is_past? handled before, and not the last about its client and topic: refused
              '-> no: applied, add -> store, in the transaction of its batch -> trimmed now and then
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection
from typing import Final

from usubscription.state import Key
from usubscription.store.tables import Tables

HANDLED_MAX: Final = 32_768  # commands; a redelivery comes within the ttl of its request, some seconds to minutes
OF_RESET: Final = 0  # of commands from before a Reset: none of them is the last one


class Handled:
    """The newest HANDLED_MAX commands: their ids, and which client and topic they were about (a hash of both)."""

    def __init__(self, tables: Tables) -> None:
        self._tables = tables
        self._about: dict[bytes, int] | None = None  # None: to be read
        self._last: dict[int, bytes] = {}
        self._fresh: list[tuple[int, bytes, int]] = []
        self._number = 0

    def __repr__(self) -> str:
        return f"Handled({len(self._about or ())})"

    @staticmethod
    def about(client: Key, topic: Key) -> int:
        """The same after a restart, and not OF_RESET."""
        digest = hashlib.blake2b(repr((client, topic)).encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big", signed=True) or 1

    def forget(self) -> None:
        """After a transaction that was not committed, or one that has changed all of them."""
        self._about = None
        self._fresh.clear()

    def _known(self) -> dict[bytes, int]:
        if self._about is None:
            self._about, self._last, self._number = {}, {}, 0
            for number, request, about in self._tables.execute("SELECT * FROM handled ORDER BY number").fetchall():
                self._number = number
                self._remember(self._about, request, about)
        return self._about

    def is_past(self, request: bytes, about: int) -> bool:
        return request in self._known() and self._last.get(about) != request

    def add(self, request: bytes, about: int) -> None:
        known = self._known()
        if request not in known:  # else it is the last one, again
            self._remember(known, request, about)
            self._number += 1
            self._fresh.append((self._number, request, about))

    def reset(self, abouts: Collection[int] | None = None) -> None:
        """None of the commands about these (None: of all) is the last one any more: a Reset came after them."""
        self.store()
        if abouts is None:
            self._tables.execute("UPDATE handled SET about = ?", (OF_RESET,))
            self.forget()
        else:
            for about in abouts:
                self._last.pop(about, None)
            among = "about IN (SELECT value FROM json_each(?))"
            self._tables.execute(f"UPDATE handled SET about = ? WHERE {among}", (OF_RESET, json.dumps(list(abouts))))

    def _remember(self, known: dict[bytes, int], request: bytes, about: int) -> None:
        known[request] = about
        if about != OF_RESET:
            self._last[about] = request
        if len(known) > HANDLED_MAX:
            oldest = next(iter(known))
            gone = known.pop(oldest)
            if self._last.get(gone) == oldest:
                del self._last[gone]

    def store(self) -> None:
        """In the transaction of the commands."""
        stored = self._tables.insert("handled(number, request, about)", self._fresh)
        if self._number % 1024 < stored:  # now and then
            self._tables.execute("DELETE FROM handled WHERE number <= ?", (self._number - HANDLED_MAX,))
        self._fresh.clear()
