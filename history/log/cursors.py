"""The cursors of a log: up to which seq each reader has confirmed, and what retention by age has to keep for it.

set, drop -> here, and on disk soon (or lazily, if a cursor has only moved) -> keep_after, owed_after: retention
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from history.file.load import Cursor
from history.file.store import LogChanges
from history.file.writer import CURSORS_IDLE_S
from history.log.storage import Storage
from history.records.chunk import NOBODY
from uprotocol.status import UStatusError
from uprotocol.v1.ucode_pb2 import UCode

CURSORS_MAX: Final = 50_000  # peers, their parked topics, and consumers with a name; some 300 bytes each
# a lease that ends sooner is on disk soon when it is extended, so that no crash ends it
LEASE_LEFT_MS: Final = round(2_000 * CURSORS_IDLE_S)


class Cursors:
    """On the event loop, except `keep_after` and `owed_after`.

    `lost`: a cursor was damaged, and even its name is uncertain. A reader whose cursor is missing begins at the floor.
    """

    def __init__(
        self, log_name: str, storage: Storage, now_ms: Callable[[], int], known: Mapping[str, Cursor], *, lost: bool
    ) -> None:
        self._log_name, self._storage, self._now_ms, self.lost = log_name, storage, now_ms, lost
        self._cursors = dict(known)
        self._next_lease_end_ms = 0  # no lease ends earlier; Unix milliseconds

    def __repr__(self) -> str:
        return f"Cursors({len(self._cursors)} of the log {self._log_name})"

    def __len__(self) -> int:
        return len(self._cursors)

    def seq(self, name: str) -> int | None:
        """Returns the seq up to which `name` has confirmed, or None if there is no such cursor."""
        cursor = self._cursors.get(name)
        return None if cursor is None else cursor.seq

    def get(self, name: str) -> Cursor | None:
        return self._cursors.get(name)

    def seqs(self) -> dict[str, int]:
        """Returns the confirmed seq of each cursor, by name."""
        return {name: cursor.seq for name, cursor in self._cursors.items()}

    def all(self) -> dict[str, Cursor]:
        """Returns all cursors by name."""
        return dict(self._cursors)

    def set(
        self,
        name: str,
        seq: int,
        *,
        lease_ms: int | None = None,
        holds: bool = False,
        absent_ms: int = 0,
        holder: str | None = None,
    ) -> None:
        """Set a cursor. It is on disk with the next transaction, or within storage.FLUSH_MS. If it has only moved on,
        and not far, it is on disk within writer.CURSORS_IDLE_S, or earlier with messages.

        Records beyond `seq` are kept beyond the retention by age (never beyond that by bytes): with `lease_ms` until
        the lease ends, which also drops the cursor; with `holds` until the cursor is dropped. `absent_ms` is stored for
        the caller. `holder`: who has to learn of records that were deleted before the cursor had passed them; empty:
        nobody; None: as before. Raises RESOURCE_EXHAUSTED beyond CURSORS_MAX.
        """
        assert lease_ms is None or not holds, "a cursor that holds records has no lease: it never ends by itself"
        known = self._cursors.get(name)
        if known is None and len(self._cursors) >= CURSORS_MAX:
            self.drop_ended_leases()
            if len(self._cursors) >= CURSORS_MAX:
                what = f"the log {self._log_name} has {CURSORS_MAX} cursors, which is the limit: drop some first"
                raise UStatusError(UCode.RESOURCE_EXHAUSTED, what)
        if holder is None:
            holder = "" if known is None else known.holder
        cursor = Cursor(seq, None if lease_ms is None else self._now_ms() + lease_ms, holds, absent_ms, holder)
        if cursor == known:
            return
        self._cursors[name] = cursor
        if cursor.lease_until_ms is not None:
            self._next_lease_end_ms = min(self._next_lease_end_ms, cursor.lease_until_ms)
        if known is not None and self._has_only_moved(known, cursor):
            self._storage.save_lazily({name: cursor}, {}, seq - known.seq)
        else:
            self._storage.save(LogChanges(cursors={name: cursor}))

    def _has_only_moved(self, known: Cursor, cursor: Cursor) -> bool:
        """True if the row on disk may stay for a while: nothing that `cursor` holds is lost with it."""
        if cursor.seq < known.seq:  # it moved back: after a crash the row on disk would lose what lies between
            return False
        if known.lease_until_ms is None or cursor.lease_until_ms is None:
            kept = (known.holds, known.lease_until_ms, known.holder)
            return kept == (cursor.holds, cursor.lease_until_ms, cursor.holder)
        return known.lease_until_ms - self._now_ms() >= LEASE_LEFT_MS

    def drop(self, name: str) -> None:
        """Drop a cursor if it exists."""
        if self._cursors.pop(name, None) is not None:
            self._storage.save(LogChanges(cursors={name: None}))

    def drop_ended_leases(self) -> None:
        now = self._now_ms()
        if now <= self._next_lease_end_ms:
            return
        leased = [(one.lease_until_ms, name) for name, one in self._cursors.items() if one.lease_until_ms is not None]
        self._next_lease_end_ms = min((until for until, _ in leased if until >= now), default=NOBODY)
        for until, name in leased:
            if until < now:
                self.drop(name)

    def keep_after(self) -> int:
        """Returns the seq beyond which retention by age deletes nothing. May be called from any thread: it reads a copy
        that is made in one step."""
        now, cursors = self._now_ms(), list(self._cursors.values())
        held = (
            one.seq for one in cursors if one.holds or (one.lease_until_ms is not None and one.lease_until_ms >= now)
        )
        return min(held, default=NOBODY)

    def owed_after(self) -> int:
        """Returns the seq beyond which somebody has to learn of each record that is deleted. May be called from any
        thread, like `keep_after`."""
        return min((one.seq for one in list(self._cursors.values()) if one.holds or one.holder), default=NOBODY)
