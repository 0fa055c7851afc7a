"""Detects clocks that differ: most messages with a ttl have expired on arrival, and calls are dropped unreported.

ListenerTable.take_ttl_counts --look, once a second--> the last WINDOW_S --> more than EXPIRED_SHARE expired? `trouble`

A fast clock and delayed messages look the same: `trouble` names both causes, and the age of the messages.
"""

from __future__ import annotations

import statistics
from collections import deque
from typing import Final

from streamer.walk.endpoint import Endpoint
from transports.listeners import TtlCounts

WINDOW_S: Final = 60.0
MESSAGES_MIN: Final = 20  # with a ttl within WINDOW_S; fewer prove nothing
EXPIRED_SHARE: Final = 0.5  # a larger share is reported


class Clocks:
    """Compares our clock with those of the senders on one endpoint."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._seen: deque[tuple[float, TtlCounts]] = deque()  # of each `look` within WINDOW_S; one may cover more time

    def look(self, now_s: float) -> None:
        """Reads the counts of the transport, if it has them. `now_s`: loop time."""
        take = getattr(self._endpoint.transport, "take_ttl_counts", None)
        counts: TtlCounts | None = take() if take is not None else None
        if counts is not None and counts.arrived:
            self._seen.append((now_s, counts))
        while self._seen and self._seen[0][0] <= now_s - WINDOW_S:
            self._seen.popleft()

    @property
    def trouble(self) -> str:
        """Returns a sentence for the operator; empty if the clocks agree."""
        arrived = sum(counts.arrived for _, counts in self._seen)
        expired = sum(counts.expired for _, counts in self._seen)
        if arrived < MESSAGES_MIN or expired <= EXPIRED_SHARE * arrived:
            return ""
        age_s = statistics.median(age for _, counts in self._seen for age in counts.ages_ms) / 1000
        return (
            f"{expired} of the last {arrived} messages with a ttl had expired on arrival, and are dropped: they were "
            f"{age_s:.1f} s old, so our clock is about that far ahead of their senders', or they waited that long on "
            "the way"
        )
