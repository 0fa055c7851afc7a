"""What is known to be lost or damaged: kept in the log's own file, over every restart, until a person has seen it.

open, scan, commit -> Ledger -> rows of the file, `Log.damage`, on_found -> gaps on the wire, readiness, metrics
                        ^
       acknowledge: by the log (PASSING kinds, after a while), or by another process in the same file
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final, NamedTuple

from history.file.rows import DAMAGE, LOG, StoredRow
from storage.disk import REAL_DISK, Disk, pragma, transaction

DAMAGE_MAX: Final = 1_000  # noted one by one; beyond that the last note of the same kind is extended

FILE: Final = "file"  # the whole file could not be used, and was moved aside
MISSING: Final = "missing"  # there was a log here once, and its file is missing
COMMITS: Final = "commits"  # the newest commits are missing
RECORDS: Final = "records"  # a chunk can't be read, or is missing
CURSOR_ROW: Final = "cursor"
STREAM_ROW: Final = "stream"
META_ROW: Final = "meta"
HOLE_ROW: Final = "hole"
NOTE: Final = "note"  # of earlier damage
MARK: Final = "mark"
INDEX: Final = "index"
STRUCTURE: Final = "structure"  # SQLite's own pages, found while the log was in use
NETWORK: Final = "network"  # a network lost messages before they arrived here; it is unknown which
SUBSCRIPTIONS: Final = "subscriptions"  # the store beside the log lost changes of subscriptions
# messages that were dropped after their network had got an acknowledgement for them
DROPPED: Final = "dropped"
EMPTIED: Final = "emptied"  # what is stored is new, and others knew what was stored before
OTHERS: Final = frozenset({NETWORK, SUBSCRIPTIONS, DROPPED, EMPTIED})
"""Kinds of losses of other parts; kept here because a person has to see them, too."""
PASSING: Final = frozenset({NETWORK})
"""Kinds that need no repair: they may count as acknowledged after they were reported for long enough."""

LOSSES: Final = frozenset({FILE, MISSING, COMMITS, RECORDS})
"""Kinds that name lost records by (after, before). Damage of other kinds was repaired, or can't be counted."""


class Damage(NamedTuple):
    """Something of a log was lost or damaged."""

    when_ms: int  # when it was found, Unix milliseconds
    kind: str
    after: int = 0  # the records in (after, before) are lost; both 0: none, or unknown
    before: int = 0
    incarnation: bytes = b""  # of the damaged log; empty: unknown
    moved_to: str = ""  # where the damaged file is kept
    detail: str = ""

    @property
    def records(self) -> int:
        """Returns how many records are lost at most."""
        return max(0, self.before - self.after - 1) if self.kind in LOSSES else 0


class Ledger:
    """The damage of one log. `add` and `acknowledge` return the rows that have to be written."""

    def __init__(self, rows: Iterable[StoredRow] = ()) -> None:
        self._rows: dict[int, tuple[Damage, bool]] = {row[0]: (Damage(*row[1:8]), bool(row[8])) for row in rows}

    @property
    def open(self) -> list[Damage]:
        """Returns the damage that nobody has acknowledged, in the order in which it was found."""
        return [damage for damage, acknowledged in self._rows.values() if not acknowledged]

    @property
    def open_rows(self) -> dict[int, Damage]:
        """Returns the same by number of the row."""
        return {number: damage for number, (damage, acknowledged) in self._rows.items() if not acknowledged}

    @property
    def rows(self) -> list[StoredRow]:
        return [(number, *damage, int(acknowledged)) for number, (damage, acknowledged) in self._rows.items()]

    def knows(self, incarnation: bytes) -> bool:
        """Returns True if damage of that log was ever reported."""
        return any(damage.incarnation == incarnation for damage, _ in self._rows.values())

    def lost(self, incarnation: bytes) -> list[tuple[int, int]]:
        """Returns (after, before) of the lost records of that log, acknowledged or not."""
        known = (one for one, _ in self._rows.values() if one.kind in LOSSES and one.incarnation == incarnation)
        return [(one.after, one.before) for one in known]

    def covers(self, damage: Damage) -> bool:
        """Returns True if the damage is known, acknowledged or not. A loss of another part is new if the same one was
        acknowledged before."""
        news = damage.kind in OTHERS
        return any(_covers(known, damage) for known, acknowledged in self._rows.values() if not (news and acknowledged))

    def add(self, damage: Damage) -> StoredRow | None:
        """Returns the row to write; None if the damage is known already."""
        if self.covers(damage):
            return None
        number = max(self._rows, default=0) + 1
        if len(self._rows) >= DAMAGE_MAX:
            kind = damage.kind, damage.incarnation
            same = [number for number, (known, _) in self._rows.items() if (known.kind, known.incarnation) == kind]
            number = max(same, default=max(self._rows))
            known = self._rows[number][0]
            damage = damage._replace(after=min(known.after, damage.after), before=max(known.before, damage.before))
        self._rows[number] = (damage, False)
        return (number, *damage, 0)

    def renew(self, damage: Damage) -> StoredRow | None:
        """Note that another part had the same loss again before a person has acknowledged the last one. Returns the row
        to write; None if there is no such row."""
        for number, (known, acknowledged) in self._rows.items():
            if damage.kind in OTHERS and not acknowledged and _covers(known, damage):
                self._rows[number] = (known._replace(when_ms=damage.when_ms), False)
                return (number, *self._rows[number][0], 0)
        return None

    def is_open(self, number: int) -> bool:
        """Returns True if the row exists, and nobody has acknowledged it."""
        return number in self._rows and not self._rows[number][1]

    def put(self, damage: Damage, number: int | None = None) -> tuple[int, StoredRow]:
        """Add a loss of another part that grows; `number`: of its open row, whose text is replaced. The caller bounds
        how many rows are open. Returns the number, and the row to write."""
        if number is None and len(self._rows) >= DAMAGE_MAX:
            seen = (one for one, (known, acknowledged) in self._rows.items() if acknowledged and known.kind in OTHERS)
            number = next(seen, None)
        if number is None:
            number = max(self._rows, default=0) + 1
        self._rows[number] = (damage, False)
        return number, (number, *damage, 0)

    def acknowledge(self, is_due: Callable[[Damage], bool] = lambda _: True) -> list[StoredRow]:
        """Acknowledge the open damage that `is_due`. Returns the rows to write."""
        changed = [number for number, (one, is_known) in self._rows.items() if not is_known and is_due(one)]
        for number in changed:
            self._rows[number] = (self._rows[number][0], True)
        return [(number, *self._rows[number][0], 1) for number in changed]

    def acknowledge_one(self, number: int) -> None:
        """Another process has acknowledged this in the file."""
        if number in self._rows:
            self._rows[number] = (self._rows[number][0], True)

    def forget(self, floor_seq: int, incarnation: bytes) -> list[int]:
        """Forget acknowledged damage that can't be found again. Returns the numbers of the rows to delete."""

        def is_there(damage: Damage) -> bool:
            is_ours = damage.kind in (RECORDS, COMMITS) and damage.incarnation == incarnation
            return is_ours and damage.before - 1 > floor_seq

        removed = [number for number, (damage, is_known) in self._rows.items() if is_known and not is_there(damage)]
        for number in removed:
            del self._rows[number]
        return removed


def _covers(known: Damage, found: Damage) -> bool:
    # a chunk that could not be saved becomes a hole
    is_same = known.kind == found.kind or {known.kind, found.kind} == {RECORDS, COMMITS}
    if not is_same or (known.incarnation, known.moved_to) != (found.incarnation, found.moved_to):
        return False
    return known.after <= found.after and found.before <= known.before if found.before else known.detail == found.detail


def acknowledge(path: Path, disk: Disk = REAL_DISK) -> list[Damage]:
    """Acknowledge all damage in the log's file, whether or not a gateway has it open: the gateway notices it within
    some seconds. Returns the damage that was open.

    Raises UStatusError: INVALID_ARGUMENT (no such file), FAILED_PRECONDITION (no log of this version), and as
    FileKind.fault.
    """
    LOG.require_there(path)
    try:
        with contextlib.closing(disk.connect(path, read_only=True)) as db:
            kind = pragma(db, "application_id"), pragma(db, "user_version")
        if kind != (LOG.application_id, LOG.version):
            raise LOG.refusal(path, "it is not a log of this version: use the program that wrote it")
        with contextlib.closing(disk.connect(path)) as db, transaction(db):
            ledger = Ledger(DAMAGE.read(db, []))
            seen = ledger.open
            DAMAGE.insert(db, ledger.acknowledge())
    except sqlite3.Error as error:
        raise LOG.fault(error, path, "written") from error
    return seen
