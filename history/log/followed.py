"""How far a log has come in the logs that are followed into it: a place in each, committed with the records from there.

append(followed) -> begin: under way -> end: committed -> known
                                             failed    -> what was known before still holds
keep: nothing there was for us, so the place moves alone
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Final

from history.records.chunk import INCARNATION_BYTES, SEQ_MAX
from uprotocol.status import UStatusError
from uprotocol.v1.ucode_pb2 import UCode

if TYPE_CHECKING:
    from history.file.writer import Append, Followed

# a fleet's vehicles, each of which is followed: of 600 bytes each they take 11 MiB of the file, and 0.1 s when it opens
PLACES_MAX: Final = 10_000
PLACE_BYTES_MAX: Final = 8 << 10  # some logs, and of each what proves the place


class FollowedLogs:
    """On the loop. Places are opaque; a key names who follows what."""

    def __init__(self, log_name: str, known: Mapping[str, bytes]) -> None:
        self._log_name, self.known = log_name, dict(known)
        self.under_way: Counter[str] = Counter()  # by key: appends

    def __repr__(self) -> str:
        return f"FollowedLogs({len(self.known)} known, {self.under_way.total()} appends under way)"

    def begin(self, followed: Followed, records: int) -> None:
        """Raises RESOURCE_EXHAUSTED."""
        assert len(followed.origins) == records, "each message has an origin, or none that is known"
        origins = [origin for origin in followed.origins if origin is not None]
        assert all(0 < origin.seq <= SEQ_MAX for origin in origins), "which is a record of a log"
        assert all(len(origin.incarnation) == INCARNATION_BYTES for origin in origins), "that has a name"
        assert len(followed.place) <= PLACE_BYTES_MAX, "a place is small: it is written with each batch"
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
                self.known[followed.key] = followed.place

    def keep(self, key: str, place: bytes | None) -> bool:
        """False if nothing changes. Raises RESOURCE_EXHAUSTED."""
        assert key not in self.under_way, "its place would be written ahead of the records"
        if self.known.get(key) == place:
            return False
        if place is None:
            del self.known[key]
            return True
        assert len(place) <= PLACE_BYTES_MAX, "a place is small: it is written now and then"
        self._refuse_beyond(key)
        self.known[key] = place
        return True

    def _refuse_beyond(self, key: str) -> None:
        if key in self.known or key in self.under_way:
            return
        coming = sum(1 for one in self.under_way if one not in self.known)
        if len(self.known) + coming >= PLACES_MAX:
            what = f"{PLACES_MAX} logs are followed into the log {self._log_name}, which is the limit"
            raise UStatusError(UCode.RESOURCE_EXHAUSTED, what)
