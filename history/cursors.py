"""Who has confirmed what, in memory; each change is handed on to be saved.

set_cursor, drop_cursor -> rows -> save                 retention asks (from its thread): keep_after, owed_after
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Final

from history.load import Cursor
from history.rows import HELD_PREFIXES
from uprotocol.status import UStatusError
from uprotocol.v1.ucode_pb2 import UCode

if TYPE_CHECKING:
    from history.writer import Writer

CURSORS_MAX: Final = 50_000  # peers, their parked topics, and consumers with a name; some 300 bytes each
NOBODY: Final = 1 << 62


class Cursors:
    """The part of a log that is about cursors; on the loop, but for what says otherwise."""

    def __init__(
        self,
        log_name: str,
        rows: Mapping[str, Cursor],
        now_ms: Callable[[], int],
        save: Callable[[Callable[[Writer], None]], None],
    ) -> None:
        self._log_name, self._now_ms, self._save = log_name, now_ms, save
        self._cursors = dict(rows)  # changed on the loop, and read by retention

    def cursor(self, name: str) -> int | None:
        """The seq up to which `name` has confirmed, or None if there is no such cursor."""
        cursor = self._cursors.get(name)
        return None if cursor is None else cursor.seq

    def cursor_row(self, name: str) -> Cursor | None:
        """All that is known of one cursor."""
        return self._cursors.get(name)

    @property
    def cursor_count(self) -> int:
        return len(self._cursors)

    def cursors(self) -> dict[str, int]:
        return {name: cursor.seq for name, cursor in self._cursors.items()}

    def cursor_rows(self) -> dict[str, Cursor]:
        """All that is known of each cursor."""
        return dict(self._cursors)

    def set_cursor(
        self, name: str, seq: int, *, lease_ms: int | None = None, holds: bool = False, absent_ms: int = 0
    ) -> None:
        """On disk with the next transaction, or within disk.FLUSH_MS.

        What the cursor still needs is kept beyond the retention by age (never beyond that by bytes): with `lease_ms`
        until the lease ends, and then the cursor is gone; with `holds` until it is dropped. `absent_ms` is kept for the
        caller. Raises RESOURCE_EXHAUSTED beyond CURSORS_MAX.
        """
        assert lease_ms is None or not holds, "a cursor that holds has no lease: it never ends by itself"
        known = self._cursors.get(name)
        if known is None and len(self._cursors) >= CURSORS_MAX:
            self.drop_ended_leases()
            if len(self._cursors) >= CURSORS_MAX:
                raise UStatusError(
                    UCode.RESOURCE_EXHAUSTED, f"the log {self._log_name} has {CURSORS_MAX} cursors, which is the limit"
                )
        cursor = Cursor(seq, None if lease_ms is None else self._now_ms() + lease_ms, holds, absent_ms)
        if cursor != known:
            self._cursors[name] = cursor
            self._save(lambda writer: writer.save_cursor(name, cursor))

    def drop_cursor(self, name: str) -> None:
        """Nothing happens if there is none."""
        if self._cursors.pop(name, None) is not None:
            self._save(lambda writer: writer.save_cursor(name, None))

    def drop_ended_leases(self) -> None:
        now = self._now_ms()
        for name, cursor in list(self._cursors.items()):
            if cursor.lease_until_ms is not None and cursor.lease_until_ms < now:
                self.drop_cursor(name)

    def keep_after(self) -> int:
        """Beyond this seq somebody needs what is old. From any thread: it only reads, from a copy made in one step."""
        now = self._now_ms()
        return min(
            (
                cursor.seq
                for cursor in list(self._cursors.values())
                if cursor.holds or (cursor.lease_until_ms is not None and cursor.lease_until_ms >= now)
            ),
            default=NOBODY,
        )

    def owed_after(self) -> int:
        """Beyond this seq some endpoint was promised everything. From any thread, as `keep_after`."""
        owed = (
            cursor.seq for name, cursor in list(self._cursors.items()) if cursor.holds or name.startswith(HELD_PREFIXES)
        )
        return min(owed, default=NOBODY)
