"""What is known to be lost or damaged, until a person has seen it: kept in the log's own file, over every restart.

open, scan, commit -> Ledger -> rows of the file, `Log.damage`, on_damage -> gaps on the wire, readiness, metrics
                        ^
       acknowledge: by the log (what is PASSING, after a while), or by another process in the same file
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final, NamedTuple

from history.file.rows import DAMAGE, LOG, Row
from storage.disk import REAL_DISK, Disk
from storage.file import pragma, transaction

DAMAGE_MAX: Final = 1_000  # noted one by one; beyond it the last of the same kind is widened

FILE: Final = "file"  # the whole file could not be used, and was moved aside
MISSING: Final = "missing"  # there was a log here once, and its file is gone
COMMITS: Final = "commits"  # what was committed last is cut off
RECORDS: Final = "records"  # a chunk can't be read, or isn't there
CURSOR: Final = "cursor"
STREAM: Final = "stream"
META: Final = "meta"
HOLE: Final = "hole"
NOTE: Final = "note"  # of earlier damage
MARK: Final = "mark"
INDEX: Final = "index"
STRUCTURE: Final = "structure"  # SQLite's own pages, found while the log was in use
NETWORK: Final = "network"  # a network lost messages before they came here; which, nobody knows
SUBSCRIPTIONS: Final = "subscriptions"  # the store beside the log lost changes of subscriptions
OTHERS: Final = frozenset({NETWORK, SUBSCRIPTIONS})
"""Kinds of losses that are not the log's own: kept here, since a person has to see them, too."""
PASSING: Final = frozenset({NETWORK})
"""Kinds of which nothing is left to be mended: they may count as acknowledged once they have been told for long
enough."""

LOSSES: Final = frozenset({FILE, MISSING, COMMITS, RECORDS})
"""Kinds that name records which are gone: (after, before) says which. The others were put right, or can't be
counted."""


class Damage(NamedTuple):
    """Something of a log was lost or damaged."""

    when_ms: int  # found, Unix milliseconds
    kind: str
    after: int = 0  # the records in (after, before) are gone; both 0: none, or nobody knows
    before: int = 0
    incarnation: bytes = b""  # of the log that it happened to; empty: not known
    moved_to: str = ""  # where the damaged file is kept
    detail: str = ""

    @property
    def records(self) -> int:
        """How many are gone, at most."""
        return max(0, self.before - self.after - 1) if self.kind in LOSSES else 0


class Ledger:
    """The damage of one log. `add` and `acknowledge` say which rows have to be written."""

    def __init__(self, rows: Iterable[Row] = ()) -> None:
        self._rows: dict[int, tuple[Damage, bool]] = {row[0]: (Damage(*row[1:8]), bool(row[8])) for row in rows}

    def __repr__(self) -> str:
        return f"Ledger({len(self._rows)} known, {len(self.open)} not acknowledged)"

    @property
    def open(self) -> list[Damage]:
        """What nobody has acknowledged, in the order of finding."""
        return [damage for damage, acknowledged in self._rows.values() if not acknowledged]

    @property
    def rows(self) -> list[Row]:
        return [(number, *damage, int(acknowledged)) for number, (damage, acknowledged) in self._rows.items()]

    def knows(self, incarnation: bytes) -> bool:
        """True if something of that log was told once."""
        return any(damage.incarnation == incarnation for damage, _ in self._rows.values())

    def lost(self, incarnation: bytes) -> list[tuple[int, int]]:
        """(after, before) of the records of that log that are known to be gone, acknowledged or not."""
        known = (one for one, _ in self._rows.values() if one.kind in LOSSES and one.incarnation == incarnation)
        return [(one.after, one.before) for one in known]

    def covers(self, damage: Damage) -> bool:
        """True if it is known, acknowledged or not. What others lost is lost anew, however often the same is told."""
        news = damage.kind in OTHERS
        return any(_covers(known, damage) for known, acknowledged in self._rows.values() if not (news and acknowledged))

    def add(self, damage: Damage) -> Row | None:
        """The row to write; None if it is known already."""
        if self.covers(damage):
            return None
        number = max(self._rows, default=0) + 1
        if len(self._rows) >= DAMAGE_MAX:
            kind = damage.kind, damage.incarnation
            same = [place for place, (known, _) in self._rows.items() if (known.kind, known.incarnation) == kind]
            number = max(same, default=max(self._rows))
            known = self._rows[number][0]
            damage = damage._replace(after=min(known.after, damage.after), before=max(known.before, damage.before))
        self._rows[number] = (damage, False)
        return (number, *damage, 0)

    def renew(self, damage: Damage) -> Row | None:
        """What others lost is lost once more, and nobody has acknowledged the last time: it is told from now on. The
        row to write; None if there is no such row."""
        for number, (known, acknowledged) in self._rows.items():
            if damage.kind in OTHERS and not acknowledged and _covers(known, damage):
                self._rows[number] = (known._replace(when_ms=damage.when_ms), False)
                return (number, *self._rows[number][0], 0)
        return None

    def acknowledge(self, is_due: Callable[[Damage], bool] = lambda _: True) -> list[Row]:
        """What `is_due`; the rows to write."""
        changed = [number for number, (one, is_known) in self._rows.items() if not is_known and is_due(one)]
        for number in changed:
            self._rows[number] = (self._rows[number][0], True)
        return [(number, *self._rows[number][0], 1) for number in changed]

    def acknowledge_one(self, number: int) -> None:
        """Another process has written that already."""
        if number in self._rows:
            self._rows[number] = (self._rows[number][0], True)

    def forget(self, floor_seq: int, incarnation: bytes) -> list[int]:
        """What was acknowledged and can't be found again; the numbers of the rows to delete."""

        def is_there(damage: Damage) -> bool:
            is_ours = damage.kind in (RECORDS, COMMITS) and damage.incarnation == incarnation
            return is_ours and damage.before - 1 > floor_seq

        gone = [number for number, (damage, is_known) in self._rows.items() if is_known and not is_there(damage)]
        for number in gone:
            del self._rows[number]
        return gone


def _covers(known: Damage, found: Damage) -> bool:
    # a chunk that could not be saved is a hole
    is_same = known.kind == found.kind or {known.kind, found.kind} == {RECORDS, COMMITS}
    if not is_same or (known.incarnation, known.moved_to) != (found.incarnation, found.moved_to):
        return False
    return known.after <= found.after and found.before <= known.before if found.before else known.detail == found.detail


def acknowledge(path: Path, disk: Disk = REAL_DISK) -> list[Damage]:
    """In the log's file, whether or not a gateway has it open: that one notices within some seconds. Returns what was
    not seen before.

    Raises UStatusError: INVALID_ARGUMENT (no such file), FAILED_PRECONDITION (no log of this version), and as
    FileKind.fault says.
    """
    LOG.require_there(path)
    try:
        with contextlib.closing(disk.connect(path, read_only=True)) as db:
            kind = pragma(db, "application_id"), pragma(db, "user_version")
        if kind != (LOG.application_id, LOG.version):
            raise LOG.refusal(path, "it is not a log of this version, so there is nothing to acknowledge")
        with contextlib.closing(disk.connect(path)) as db, transaction(db):
            ledger = Ledger(DAMAGE.read(db).rows)
            seen = ledger.open
            DAMAGE.insert(db, ledger.acknowledge())
    except sqlite3.Error as error:
        raise LOG.fault(error, path, "written") from error
    return seen
