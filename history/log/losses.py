"""What is known to be lost or damaged, while the log is open: it is saved in the log's file until a person has
acknowledged it.

open, scan, commit, other parts -> note, report -> Ledger -> on disk, and callbacks of `on_found`
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Final

from history.file import damage as kinds
from history.file.damage import Damage, Ledger
from history.file.store import LogChanges
from history.log.storage import Storage

_REASONS: Final = {  # the keys of `dropped`
    **dict.fromkeys((kinds.FILE, kinds.MISSING, kinds.STRUCTURE), "damaged_file"),
    kinds.COMMITS: "lost_commits",
    kinds.RECORDS: "corrupt_chunks",
    kinds.NETWORK: "network_loss",
    kinds.SUBSCRIPTIONS: "subscriptions_loss",
}


class LogLosses:
    """On the event loop. `dropped` counts by reason what could not be kept or read."""

    def __init__(self, storage: Storage, now_ms: Callable[[], int]) -> None:
        self._storage, self._now_ms, self._incarnation = storage, now_ms, storage.loaded.incarnation
        self.ledger: Ledger = storage.loaded.ledger
        self.dropped: Counter[str] = Counter()
        self._callbacks: list[Callable[[Damage], None]] = []
        for damage in storage.loaded.found:
            self._count(damage)

    def __repr__(self) -> str:
        return f"LogLosses({self.ledger})"

    def on_found(self, callback: Callable[[Damage], None]) -> None:
        """`callback(damage)` on the loop when new damage is found. What was found when the log was opened is in
        `Log.damage` already."""
        self._callbacks.append(callback)

    def acknowledge(self) -> None:
        """A person has seen all open damage."""
        if rows := self.ledger.acknowledge():
            self._storage.save(LogChanges(damage=rows))

    def acknowledge_passing(self, after_ms: int) -> list[Damage]:
        """Acknowledge damage of a kind in history.file.damage.PASSING that was found at least `after_ms` ago, and
        return it. A time that lies as far ahead is of a wrong clock, and is treated the same way."""
        now_ms = self._now_ms()
        due = [one for one in self.ledger.open if one.kind in kinds.PASSING and abs(now_ms - one.when_ms) >= after_ms]
        if due:
            self._storage.save(LogChanges(damage=self.ledger.acknowledge(due.__contains__)))
        return due

    def knows_lost(self, incarnation: bytes) -> bool:
        """Returns True if the log with this incarnation was here once, and was lost with its records."""
        return self.ledger.knows(incarnation)

    def report(self, kind: str, detail: str) -> None:
        """Report a loss of another part (history.file.damage.OTHERS): it is kept until a person has acknowledged it."""
        assert kind in kinds.OTHERS, "the log finds its own damage by itself"
        if not self.note(kind, detail):
            row = self.ledger.renew(self._found(kind, detail))
            if row is not None:
                self._storage.save(LogChanges(damage=[row]))

    def note(self, kind: str, detail: str, after: int = 0, before: int = 0) -> bool:
        """Note damage of this log. Returns False if it was known."""
        damage = self._found(kind, detail, after, before)
        row = self.ledger.add(damage)
        if row is None:
            return False
        self._count(damage)
        self._storage.save(LogChanges(damage=[row]))
        for callback in list(self._callbacks):
            callback(damage)
        return True

    def _found(self, kind: str, detail: str, after: int = 0, before: int = 0) -> Damage:
        return Damage(self._now_ms(), kind, after, before, self._incarnation, "", detail)

    def _count(self, damage: Damage) -> None:
        self.dropped[_REASONS.get(damage.kind, "damaged_rows")] += 1
