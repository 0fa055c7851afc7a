"""Absences: a cursor keeps retention by age away from its owner's records until the owner has been away for too long.

Absence is counted while the streamer runs. It is saved with the cursor, so a restart does not end it.
"""

from __future__ import annotations

from history.log.log import Log
from streamer.egress.holds import HOLDER


class OwnedCursor:
    """A cursor of a log, and how long its owner has been away."""

    def __init__(self, source: Log, name: str, limit_ms: int) -> None:
        """`limit_ms`: after so long an absence, retention by age no longer waits for the owner."""
        self._log, self.name, self._limit_ms = source, name, limit_ms
        self.seq = 0  # the last seq that the owner has had
        self.absent_ms = 0  # as it was last saved

    def __repr__(self) -> str:
        return f"OwnedCursor({self.name}, seq={self.seq}, absent_ms={self.absent_ms})"

    def begin(self) -> bool:
        """Load it, and save it at the position to go on from. Returns True if it is new: then nothing of what the log
        has already is for the owner."""
        stored, is_new = self._log.cursors.all().get(self.name), False
        if stored is not None:
            self.seq, self.absent_ms = min(stored.seq, self._log.newest_seq), stored.absent_ms
        elif self._log.cursors.lost:  # it may be among them: to send again is better than to skip
            self.seq = self._log.floor_seq
        else:
            self.seq, is_new = self._log.newest_seq, True
        self.save()
        return is_new

    def absent_after(self, ms: int, *, away_ms: int) -> int:
        """Returns `absent_ms` after so much more time, of which the owner has been away for the last `away_ms`."""
        return self.absent_ms + ms if away_ms >= ms else away_ms

    def waited(self, ms: int, *, away_ms: int) -> None:
        """So much time has passed, and the owner has been away for the last `away_ms` of it."""
        absent_ms = self.absent_after(ms, away_ms=away_ms)
        if absent_ms != self.absent_ms:
            self.absent_ms = absent_ms
            self.save()

    def save(self) -> None:
        holds = self.absent_ms < self._limit_ms
        self._log.cursors.set(self.name, self.seq, holds=holds, absent_ms=self.absent_ms, holder=HOLDER)
