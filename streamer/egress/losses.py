"""What one peer does not get: the first few records are dead letters, which a person looks at; of more, the range is a
gap, in the log of the streamer and in what it counts as lost."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import structlog

from history.log.log import Log
from streamer.egress.address_holds import AddressHold
from streamer.letters.dead_letter import DeadLetters
from streamer.walk.endpoint import Endpoint
from streamer.walk.sender import QueuedRecord
from uprotocol.core.ustreamer.v1.ustreamer_pb2 import Gap
from uprotocol.v1.ucode_pb2 import UCode

LETTERS_OF_HOLD_MAX: Final = 100  # dead letters of a hold at its limit
PASSED_LETTERS_MAX: Final = 100  # of what retention deletes, until the peer takes messages again

OnGap = Callable[[int, int, Gap.Reason.ValueType], None]
"""(seq before, seq after, reason): the records between these two seqs are lost to the peer."""

log = structlog.get_logger()


class PeerLosses:
    """Reports what a peer does not get from a log."""

    def __init__(self, peer: Endpoint, source: Log, dead_letters: DeadLetters, on_gap: OnGap) -> None:
        self._peer, self._log, self._dead_letters, self.on_gap = peer, source, dead_letters, on_gap
        self.gaps = 0  # records that were lost to retention or damage before the peer got them
        self.refill()

    def refill(self) -> None:
        """Allow PASSED_LETTERS_MAX dead letters again."""
        self._letters_left = PASSED_LETTERS_MAX

    def dead(self, item: QueuedRecord, code: UCode.ValueType, reason: str) -> None:
        self._peer.dropped["undeliverable"] += 1
        self._dead_letters.add(item[1], code, reason, self._peer.name)

    def lost(self, after: int, before: int) -> None:
        """Report the records between these two as lost."""
        self.gaps += before - after - 1
        what = "records were lost to retention or damage before the peer got them"
        log.error(what, peer=self._peer.name, after=after, before=before)
        is_retention = before - 1 <= self._log.floor_seq
        self.on_gap(after, before, Gap.REASON_RETENTION if is_retention else Gap.REASON_CORRUPTION)

    def deleted(self, items: Sequence[QueuedRecord]) -> Sequence[QueuedRecord]:
        """Report records that retention has deleted. Returns those without a dead letter."""
        letters = items[: self._letters_left]
        self._letters_left -= len(letters)
        for item in letters:
            self.dead(item, UCode.RESOURCE_EXHAUSTED, "the log had to delete it before the peer was back")
        return items[len(letters) :]

    def held_too_long(self, hold: AddressHold, copies: Sequence[QueuedRecord], after: int, until: int) -> None:
        """Report what has waited in `hold` for as long as it may, between these seqs. `copies`: the first of it."""
        letters = copies[:LETTERS_OF_HOLD_MAX]
        why = f"{hold.why}; it has waited for as long as it may (egress.{hold.kind}_hours)"
        for copy in letters:
            self.dead(copy, hold.code, why)
        records = max(hold.records, len(copies))
        self._peer.dropped["held_too_long"] += records - len(letters)
        what = "messages are not tried any more: the network did not take them for as long as they may wait"
        counts = {"records": records, "dead_letters": len(letters)}
        log.error(what, endpoint=self._peer.name, to=hold.name, why=hold.why, after=after, until=until, **counts)
        if records > len(letters):
            self.on_gap(after, until + 1, Gap.REASON_UNDELIVERED)
