"""Positions that a log keeps: the cursors of its readers, and how far other logs were followed into it.

Cursors       set, drop -> in memory, and on disk soon (or lazily, if a cursor has only moved) -> retention: keep_after
FollowedLogs  append(followed) -> begin: under way -> end: committed -> known
                                                           failed    -> the position before is still valid
              keep: no record up to there was for this log, so the position moves alone
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Final

from history.file.load import FOLLOWED_PREFIX, Cursor
from history.file.store import LogChanges
from history.file.writer import CURSORS_IDLE_S, Append, FollowedFrom
from history.log.storage import Storage
from history.records.chunk import INCARNATION_BYTES, NOBODY, SEQ_MAX
from uprotocol.status import UStatusError
from uprotocol.v1.ucode_pb2 import UCode

CURSORS_MAX: Final = 50_000  # peers, their parked topics, and consumers with a name; some 300 bytes each
# a lease that ends sooner is on disk soon when it is extended, so that no crash ends it
LEASE_LEFT_MS: Final = round(2_000 * CURSORS_IDLE_S)
# A fleet's vehicles, each of which is followed. With 600 bytes each they take 11 MiB of the file, and 0.1 s when it is
# opened.
FOLLOWED_MAX: Final = 10_000
POSITION_BYTES_MAX: Final = 8 << 10  # some logs, and witnesses of the position in each of them


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

    def __len__(self) -> int:
        return len(self._cursors)

    def seq(self, name: str) -> int | None:
        """Returns the seq up to which `name` has confirmed, or None if there is no such cursor."""
        cursor = self._cursors.get(name)
        return None if cursor is None else cursor.seq

    def get(self, name: str) -> Cursor | None:
        return self._cursors.get(name)

    def seqs(self) -> dict[str, int]:
        return {name: cursor.seq for name, cursor in self._cursors.items()}

    def all(self) -> dict[str, Cursor]:
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
        before = self._cursors.get(name)
        if before is None and len(self._cursors) >= CURSORS_MAX:
            self.drop_ended_leases()
            if len(self._cursors) >= CURSORS_MAX:
                what = f"the log {self._log_name} has {CURSORS_MAX} cursors, which is the limit: drop some first"
                raise UStatusError(UCode.RESOURCE_EXHAUSTED, what)
        if holder is None:
            holder = "" if before is None else before.holder
        cursor = Cursor(seq, None if lease_ms is None else self._now_ms() + lease_ms, holds, absent_ms, holder)
        if cursor == before:
            return
        self._cursors[name] = cursor
        if cursor.lease_until_ms is not None:
            self._next_lease_end_ms = min(self._next_lease_end_ms, cursor.lease_until_ms)
        # May it be on disk late?
        # 1. Not if it is new, or has moved back: after a crash the row on disk would lose what lies between.
        moved = -1 if before is None else seq - before.seq
        if before is None or moved < 0:
            is_lazy = False
        # 2. Without a lease, if it has only moved on.
        elif before.lease_until_ms is None or cursor.lease_until_ms is None:
            kept = (before.holds, before.lease_until_ms, before.holder)
            is_lazy = kept == (cursor.holds, cursor.lease_until_ms, cursor.holder)
        # 3. With a lease, if the row on disk still says for long enough that it is in use.
        else:
            is_lazy = before.lease_until_ms - self._now_ms() >= LEASE_LEFT_MS
        if is_lazy:
            self._storage.save_lazily({name: cursor}, {}, moved)
        else:
            self._storage.save(LogChanges(cursors={name: cursor}))

    def rename(self, names: Mapping[str, str]) -> None:
        """Give cursors other names, in one transaction. The new names are not in use."""
        moved = {new: self._cursors.pop(old) for old, new in names.items()}
        assert not moved.keys() & self._cursors.keys(), "a renamed cursor would replace another one"
        self._cursors |= moved
        self._storage.save(LogChanges(cursors={**dict.fromkeys(names), **moved}))

    def drop(self, name: str) -> None:
        """Drop a cursor if it exists."""
        if self._cursors.pop(name, None) is not None:
            self._storage.save(LogChanges(cursors={name: None}))

    def drop_ended_leases(self) -> None:
        now = self._now_ms()
        if now <= self._next_lease_end_ms:
            return
        ends = {name: cursor.lease_until_ms for name, cursor in self._cursors.items()}
        leases = [(end_ms, name) for name, end_ms in ends.items() if end_ms is not None]
        self._next_lease_end_ms = min((end_ms for end_ms, _ in leases if end_ms >= now), default=NOBODY)
        for end_ms, name in leases:
            if end_ms < now:
                self.drop(name)

    def keep_after(self) -> int:
        """Returns the seq beyond which retention by age deletes nothing. May be called from any thread: it reads a copy
        that is made in one step."""
        now, cursors = self._now_ms(), list(self._cursors.values())
        leased = (cursor for cursor in cursors if cursor.lease_until_ms is not None and cursor.lease_until_ms >= now)
        holding = (cursor for cursor in cursors if cursor.holds)
        return min((cursor.seq for cursor in (*leased, *holding)), default=NOBODY)

    def owed_after(self) -> int:
        """Returns the seq beyond which somebody has to learn of each record that is deleted. May be called from any
        thread, like `keep_after`."""
        cursors = list(self._cursors.values())
        return min((cursor.seq for cursor in cursors if cursor.holds or cursor.holder), default=NOBODY)


class FollowedLogs:
    """On the event loop. Positions are opaque; a key names who follows what."""

    def __init__(self, log_name: str, storage: Storage) -> None:
        self._log_name, self._storage = log_name, storage
        self._known = dict(storage.loaded.positions)
        self.under_way: Counter[str] = Counter()  # appends by key

    def positions(self) -> dict[str, bytes]:
        """Returns the committed position of each followed log, by key. One that moved alone may not be on disk yet."""
        return dict(self._known)

    def position(self, key: str) -> bytes | None:
        """Returns one of `positions`; None if that log was never followed, or its position was lost with a damaged
        file."""
        return self._known.get(key)

    def keep(self, key: str, position: bytes | None, *, at_once: bool = False) -> None:
        """Set a position that no record brings; None: forget it. Not while an append with this key is under way: the
        position could be written before the records.

        The first position is on disk soon, since without it nobody knows where to go on. One that has only moved is
        written as late as such a cursor, and losing that move does no harm; `at_once`: losing it does harm. Raises
        RESOURCE_EXHAUSTED beyond FOLLOWED_MAX.
        """
        assert key not in self.under_way, "its position would be written before the records"
        before = self._known.get(key)
        if before == position:
            return
        if position is None:
            del self._known[key]
        else:
            assert len(position) <= POSITION_BYTES_MAX, "a position is small: it is written often"
            self._refuse_beyond(key)
            self._known[key] = position
        row = {FOLLOWED_PREFIX + key: position}
        if at_once or before is None:
            self._storage.save(LogChanges(meta=row))
        else:
            self._storage.save_lazily({}, row, 0)

    def rename(self, key: str, to: str) -> None:
        """Give a position another key, in one transaction. Not while an append with one of them is under way."""
        position = self._known.get(key)
        if position is None:
            return
        self.keep(to, position, at_once=True)
        self.keep(key, None, at_once=True)

    def begin(self, followed: FollowedFrom, records: int) -> None:
        """Raises RESOURCE_EXHAUSTED beyond FOLLOWED_MAX."""
        assert len(followed.origins) == records, "each message has an origin, or None"
        origins = [origin for origin in followed.origins if origin is not None]
        assert all(0 < origin.seq <= SEQ_MAX for origin in origins), "an origin has the seq of a record"
        assert all(len(origin.incarnation) == INCARNATION_BYTES for origin in origins), "an incarnation has 16 bytes"
        assert len(followed.position) <= POSITION_BYTES_MAX, "a position is small: it is written with each batch"
        self._refuse_beyond(followed.key)
        self.under_way[followed.key] += 1

    def end(self, batch: Iterable[Append], *, is_committed: bool) -> None:
        for append in batch:
            followed = append.followed
            if followed is None:
                continue
            self.under_way[followed.key] -= 1
            if not self.under_way[followed.key]:
                del self.under_way[followed.key]
            if is_committed:
                self._known[followed.key] = followed.position

    def _refuse_beyond(self, key: str) -> None:
        if key in self._known or key in self.under_way:
            return
        coming = len(self.under_way.keys() - self._known.keys())
        if len(self._known) + coming >= FOLLOWED_MAX:
            what = f"{FOLLOWED_MAX} logs are followed into the log {self._log_name}, which is the limit: follow fewer"
            raise UStatusError(UCode.RESOURCE_EXHAUSTED, what)
