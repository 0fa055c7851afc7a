"""Who has confirmed what, in memory; each change is handed on to be saved.

set, drop -> rows -> save                 retention asks (from its thread): keep_after, owed_after
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from history.load import Cursor
from history.rows import HELD_PREFIXES
from uprotocol.status import UStatusError
from uprotocol.v1.ucode_pb2 import UCode

CURSORS_MAX: Final = 50_000  # peers, their parked topics, and consumers with a name; some 300 bytes each
NOBODY: Final = 1 << 62


class Cursors:
    """The cursors of one log; on the loop, but for what says otherwise."""

    def __init__(self, name: str, now_ms: Callable[[], int], save: Callable[[str, Cursor | None], None]) -> None:
        self._name, self._now_ms, self._save = name, now_ms, save
        self.rows: dict[str, Cursor] = {}

    def __repr__(self) -> str:
        return f"Cursors({self.rows})"

    def set(self, name: str, seq: int, lease_ms: int | None, holds: bool, absent_ms: int) -> None:
        """Raises RESOURCE_EXHAUSTED beyond CURSORS_MAX."""
        assert lease_ms is None or not holds, "a cursor that holds has no lease: it never ends by itself"
        known = self.rows.get(name)
        if known is None and len(self.rows) >= CURSORS_MAX:
            self.drop_ended_leases()
            if len(self.rows) >= CURSORS_MAX:
                raise UStatusError(
                    UCode.RESOURCE_EXHAUSTED, f"the log {self._name} has {CURSORS_MAX} cursors, which is the limit"
                )
        cursor = Cursor(seq, None if lease_ms is None else self._now_ms() + lease_ms, holds, absent_ms)
        if cursor != known:
            self.rows[name] = cursor
            self._save(name, cursor)

    def drop(self, name: str) -> None:
        if self.rows.pop(name, None) is not None:
            self._save(name, None)

    def drop_ended_leases(self) -> None:
        now = self._now_ms()
        for name, cursor in list(self.rows.items()):
            if cursor.lease_until_ms is not None and cursor.lease_until_ms < now:
                self.drop(name)

    def keep_after(self) -> int:
        """Beyond this seq somebody needs what is old. From any thread: it only reads, from a copy made in one step."""
        now = self._now_ms()
        return min(
            (
                c.seq
                for c in list(self.rows.values())
                if c.holds or (c.lease_until_ms is not None and c.lease_until_ms >= now)
            ),
            default=NOBODY,
        )

    def owed_after(self) -> int:
        """Beyond this seq some endpoint was promised everything. From any thread, as `keep_after`."""
        owed = (
            cursor.seq for name, cursor in list(self.rows.items()) if cursor.holds or name.startswith(HELD_PREFIXES)
        )
        return min(owed, default=NOBODY)
