"""Which commands were handled, so that one that a network delivers again does not undo a later one. On the writer's
thread.

command -> is_past? handled before, and not the last about its client and topic: refused
              '-> no: applied, add -> store, in the transaction of its batch -> trimmed now and then
"""

from __future__ import annotations

import hashlib
import json
import sqlite3
from collections.abc import Collection
from typing import Final

from usubscription.state import Key

HANDLED_MAX: Final = 32_768  # commands; a redelivery comes within the ttl of its request, some seconds to minutes
ROWS_AT_ONCE: Final = 100  # of one INSERT: each statement gives up Python's lock, and has to wait for it again
OF_RESET: Final = 0  # of commands from before a Reset: none of them is the last one


class Handled:
    """The newest HANDLED_MAX commands: their ids, and which client and topic they were about (a hash of both)."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self._about: dict[bytes, int] = {}
        self._last: dict[int, bytes] = {}
        self._fresh: list[bytes | int] = []
        self._number = 0
        rows = db.execute("SELECT number, request, about FROM handled ORDER BY number").fetchall()
        for number, request, about in rows:
            self._number = number
            self._remember(request, about)

    def __repr__(self) -> str:
        return f"Handled({len(self._about)})"

    @staticmethod
    def about(client: Key, topic: Key) -> int:
        """The same after a restart, and not OF_RESET."""
        digest = hashlib.blake2b(repr((client, topic)).encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big", signed=True) or 1

    def is_past(self, request: bytes, about: int) -> bool:
        return request in self._about and self._last.get(about) != request

    def add(self, request: bytes, about: int) -> None:
        if request in self._about:
            return  # the last one, again
        self._remember(request, about)
        self._number += 1
        self._fresh += (self._number, request, about)

    def reset(self, db: sqlite3.Connection, abouts: Collection[int]) -> None:
        """None of the commands about these is the last one any more: a Reset came after them."""
        self.store(db)
        for about in abouts:
            self._last.pop(about, None)
        db.execute(
            "UPDATE handled SET about = ? WHERE about IN (SELECT value FROM json_each(?))",
            (OF_RESET, json.dumps(list(abouts))),
        )

    def _remember(self, request: bytes, about: int) -> None:
        self._about[request] = about
        if about != OF_RESET:
            self._last[about] = request
        if len(self._about) > HANDLED_MAX:
            oldest = next(iter(self._about))
            gone = self._about.pop(oldest)
            if self._last.get(gone) == oldest:
                del self._last[gone]

    def store(self, db: sqlite3.Connection) -> None:
        fresh = self._fresh
        for start in range(0, len(fresh), 3 * ROWS_AT_ONCE):
            part = fresh[start : start + 3 * ROWS_AT_ONCE]
            db.execute(
                f"INSERT INTO handled(number, request, about) VALUES {', '.join(['(?, ?, ?)'] * (len(part) // 3))}",
                part,
            )
        if self._number % 1024 < len(fresh) // 3:  # now and then
            db.execute("DELETE FROM handled WHERE number <= ?", (self._number - HANDLED_MAX,))
        fresh.clear()
