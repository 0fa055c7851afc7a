"""The positions of a log in the logs that are followed into it. A position is committed with the records up to it.

append(followed) -> begin: under way -> end: committed -> known
                                             failed    -> the position before is still valid
keep: no record up to there was for this log, so the position moves alone
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Final

from history.file.load import FOLLOWED_PREFIX
from history.file.store import LogChanges
from history.file.writer import Append, FollowedFrom
from history.log.storage import Storage
from history.records.chunk import INCARNATION_BYTES, SEQ_MAX
from uprotocol.status import UStatusError
from uprotocol.v1.ucode_pb2 import UCode

# A fleet's vehicles, each of which is followed. With 600 bytes each they take 11 MiB of the file, and 0.1 s when it is
# opened.
FOLLOWED_MAX: Final = 10_000
POSITION_BYTES_MAX: Final = 8 << 10  # some logs, and witnesses of the position in each of them


class FollowedLogs:
    """On the event loop. Positions are opaque; a key names who follows what."""

    def __init__(self, log_name: str, storage: Storage) -> None:
        self._log_name, self._storage = log_name, storage
        self._known = dict(storage.loaded.positions)
        self.under_way: Counter[str] = Counter()  # appends by key

    def __repr__(self) -> str:
        return f"FollowedLogs({len(self._known)} known, {self.under_way.total()} appends under way)"

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
        coming = sum(1 for one in self.under_way if one not in self._known)
        if len(self._known) + coming >= FOLLOWED_MAX:
            what = f"{FOLLOWED_MAX} logs are followed into the log {self._log_name}, which is the limit: follow fewer"
            raise UStatusError(UCode.RESOURCE_EXHAUSTED, what)
