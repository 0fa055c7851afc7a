"""What a Poll asks for, checked once: every number within its width, every list within its bound.

PollRequest, the request's ttl -> Poll | INVALID_ARGUMENT, RESOURCE_EXHAUSTED: nothing behind this has to doubt a field
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from history import witness
from history.consumers import Owner
from history.log import Log
from history.matching import Match, Patterns, Sight, patterns_of
from uprotocol import uuid as uuids
from uprotocol.core.ustreamer.v1.ustreamer_pb2 import PollRequest, Position
from uprotocol.status import invalid
from uprotocol.v1.uattributes_pb2 import UAttributes

POLL_RECORDS_MAX: Final = 10_000  # with some 24 bytes of columns each, and ...
POLL_BYTES_MAX: Final = 768 << 10  # ... these of messages, a reply stays below 1 MiB, which every transport carries
WAIT_MS_MAX: Final = 60_000  # a caller that is gone is noticed by then
TTL_MARGIN_MS: Final = 200  # of the request's ttl, or a tenth of it, is left for the reply's way back
LEASE_MS_DEFAULT: Final = 60_000
LEASE_MS_MAX: Final = 7 * 24 * 3_600_000
INCARNATION_BYTES: Final = 16
# a streamer has two logs; the others are of logs that are gone, and each costs a gap in the reply
POSITIONS_MAX: Final = 256
DIGEST_BYTES_MAX: Final = 64  # of a witness: ours are shorter
NANOS_MAX: Final = 999_999_999
SECONDS_MIN: Final = -62_135_596_800  # the year 1 and the year 9999: what google.protobuf.Timestamp may say
SECONDS_MAX: Final = 253_402_300_799


@dataclass(slots=True)
class Poll:
    """A request that was found valid."""

    asked: PollRequest
    owner: Owner
    caller: str  # its authority
    patterns: Patterns
    positions: dict[bytes, int]
    known: dict[bytes, witness.Known]
    until: dict[bytes, int]
    acked: dict[bytes, int]
    records_max: int
    bytes_max: int
    wait_ms: float
    left_ms: float  # until the caller gives up
    lease_ms: int
    matches: dict[Log, Match] = field(default_factory=dict)
    sight: Sight | None = None  # of which the matches are
    places: dict[Log, int] = field(default_factory=dict)  # where each log is read on

    def end(self, log: Log) -> int:
        return min(log.newest_seq, self.until.get(log.incarnation, log.newest_seq))

    @property
    def pending(self) -> list[Log]:
        return [log for log, place in self.places.items() if place < self.end(log)]

    @property
    def is_over(self) -> bool:
        """Nothing that may come is wanted."""
        return all(place >= self.until.get(log.incarnation, place + 1) for log, place in self.places.items())


def checked(asked: PollRequest, attributes: UAttributes, poll_bytes_max: int, now_ms: int) -> Poll:
    """Raises INVALID_ARGUMENT, or RESOURCE_EXHAUSTED if too much is asked for."""
    start = asked.WhichOneof("start")
    if start == "after_message_id" and len(asked.after_message_id) != 16:
        raise invalid(f"a message id has 16 bytes, got {len(asked.after_message_id)}")
    if start == "after_time":
        _require_time(asked.after_time.seconds, asked.after_time.nanos)
    ttl = attributes.ttl
    left_ms = ttl - max(0, now_ms - uuids.time_ms(attributes.id)) - max(TTL_MARGIN_MS, ttl // 10)
    caller = attributes.source.authority_name
    return Poll(
        asked,
        Owner.of(attributes.source),
        caller,
        patterns_of(asked.topics, caller),
        _positions(asked.positions),
        witness.checked(asked.positions),
        _positions(asked.until),
        _positions(asked.acked),
        min(asked.max_records or POLL_RECORDS_MAX, POLL_RECORDS_MAX),
        min(asked.max_bytes or poll_bytes_max, poll_bytes_max),
        max(0, min(asked.wait_ms, WAIT_MS_MAX, left_ms)),
        max(0, left_ms),
        min(asked.lease_ms or LEASE_MS_DEFAULT, LEASE_MS_MAX) if asked.consumer else 0,
    )


def _require_time(seconds: int, nanos: int) -> None:
    if not SECONDS_MIN <= seconds <= SECONDS_MAX or not 0 <= nanos <= NANOS_MAX:
        raise invalid(
            f"after_time is a time of the years 1 to 9999 with 0 to {NANOS_MAX} nanos, got {seconds} s and {nanos} ns"
        )


def _positions(given: Sequence[Position]) -> dict[bytes, int]:
    if len(given) > POSITIONS_MAX:
        raise invalid(f"a poll names at most {POSITIONS_MAX} logs, got {len(given)}")
    for position in given:
        if len(position.incarnation) != INCARNATION_BYTES:
            raise invalid(f"an incarnation has {INCARNATION_BYTES} bytes, got {len(position.incarnation)}")
        if any(len(one.digest) > DIGEST_BYTES_MAX for one in position.witnesses):
            raise invalid(f"a witness has at most {DIGEST_BYTES_MAX} bytes")
    return {position.incarnation: position.seq for position in given}
