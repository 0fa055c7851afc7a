"""Reading: a pump reads its log from disk, and reports the records that it can't have any more.

scan -> the log's records
     '-> gaps, by retention or damage: counted, and reported by `on_gap`
"""

from __future__ import annotations

from collections.abc import Callable, Set
from typing import Final

import structlog

from history.records.chunk import Scan
from streamer.egress.plans import Plans
from uprotocol.core.ustreamer.v1.ustreamer_pb2 import Gap

READ_MESSAGES_MAX: Final = 2_048  # per read of the log from disk: a window, so that a hop to a thread is worth it
READ_BYTES_MAX: Final = 4 << 20  # per read of the log

log = structlog.get_logger()

OnGap = Callable[[int, int, Gap.Reason.ValueType], None]
"""The records between these two seqs are lost to the peer, and why."""


class Reading:
    """Of one pump, whose plans it shares."""

    def __init__(self, plans: Plans, on_gap: OnGap) -> None:
        self._plans, self._log, self._peer, self.on_gap = plans, plans.log, plans.peer, on_gap
        self.gaps = 0  # records that were lost to retention or damage before the peer got them

    async def scan(self, position: int, streams: Set[int] | None = None, until: int | None = None) -> Scan:
        """Read what follows `position` and is not in memory any more. Raises UStatusError."""
        found = await self._log.scan(
            position, max_records=READ_MESSAGES_MAX, max_bytes=READ_BYTES_MAX, streams=streams, until=until
        )
        for after, before in found.gaps:
            self.lost(after, before)
        return found

    def lost(self, after: int, before: int) -> None:
        """Report the records between these two as lost."""
        self.gaps += before - after - 1
        what = "records were lost to retention or damage before the peer got them"
        log.error(what, peer=self._peer.name, after=after, before=before)
        is_retention = before - 1 <= self._log.floor_seq
        self.on_gap(after, before, Gap.REASON_RETENTION if is_retention else Gap.REASON_CORRUPTION)
