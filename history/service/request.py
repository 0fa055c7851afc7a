"""What a poll asks for: its fields checked once. Which streams its topics mean is for matches.py.

PollRequest, ttl -> checked -> Poll | INVALID_ARGUMENT, RESOURCE_EXHAUSTED: nothing behind this has to doubt a field
topics -> patterns_of -> Patterns | INVALID_ARGUMENT, RESOURCE_EXHAUSTED
"""

from __future__ import annotations

import asyncio
import functools
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple

from history.log.log import Log
from history.records import witness
from history.service.matches import Match, Patterns, Sight
from uprotocol import uri as uris
from uprotocol import uuid as uuids
from uprotocol.core.ustreamer.v1.ustreamer_pb2 import PollRequest, PollResponse, Position
from uprotocol.status import UStatusError, invalid
from uprotocol.v1.uattributes_pb2 import UAttributes
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.uri_pb2 import UUri

if TYPE_CHECKING:
    from history.service.followers import Follower

PATTERNS_MAX: Final = 1_000  # of one request; who wants more wants a wildcard
WILDCARD_PATTERNS_MAX: Final = 64  # each is compared with every kind of stream
PATTERNS_KNOWN_MAX: Final = 8_192  # valid topics that need no second look; some 4 MB when full
POLL_RECORDS_MAX: Final = 10_000  # with some 24 bytes of columns each, and ...
POLL_BYTES_MAX: Final = 768 << 10  # ... these of messages, a reply stays below 1 MiB, which every transport carries
WAIT_MS_MAX: Final = 60_000  # a caller that is gone is noticed by then
TTL_MARGIN_MS: Final = 200  # of the request's ttl, or a tenth of it, is left for the reply's way back
LEASE_MS_DEFAULT: Final = 60_000
LEASE_MS_MAX: Final = 7 * 24 * 3_600_000
INCARNATION_BYTES: Final = 16
FRONTIERS_PAGE: Final = struct.Struct(f">{INCARNATION_BYTES}sq")  # a log, and the last stream that was told there
# a streamer has two logs; the others are of logs that are gone, and each costs a gap in the reply
POSITIONS_MAX: Final = 256
DIGEST_BYTES_MAX: Final = 64  # of a witness: ours are shorter
NANOS_MAX: Final = 999_999_999
SECONDS_MIN: Final = -62_135_596_800  # the year 1 and the year 9999: what google.protobuf.Timestamp may say
SECONDS_MAX: Final = 253_402_300_799


def patterns_of(topics: Sequence[UUri], caller: str) -> Patterns:
    """Without doubles; a topic without authority is on the host of the `caller`. Raises INVALID_ARGUMENT or
    RESOURCE_EXHAUSTED."""
    if len(topics) > PATTERNS_MAX:
        what = f"{len(topics)} topics are more than {PATTERNS_MAX}: use wildcards"
        raise UStatusError(UCode.RESOURCE_EXHAUSTED, what)
    patterns = {one.key: one for one in (pattern_of(topic.SerializeToString(), caller) for topic in topics)}
    if sum(one.is_wild for one in patterns.values()) > WILDCARD_PATTERNS_MAX:
        what = f"at most {WILDCARD_PATTERNS_MAX} of the topics may have wildcards"
        raise UStatusError(UCode.RESOURCE_EXHAUSTED, what)
    return Patterns(tuple(sorted(patterns)), tuple(one.uri for one in patterns.values()))


class Pattern(NamedTuple):
    key: tuple[str, int, int, int]
    uri: UUri
    is_wild: bool


@functools.lru_cache(maxsize=PATTERNS_KNOWN_MAX)
def pattern_of(topic: bytes, caller: str) -> Pattern:
    """Valid ones are remembered: consumers name theirs with each poll. What raises is not, so that junk can't fill the
    cache."""
    given = UUri.FromString(topic)
    pattern = uris.with_authority(given, caller)
    uris.validate(pattern)
    if not uris.is_topic(pattern) and pattern.resource_id != uris.WILDCARD_RESOURCE:
        what = f"{uris.format(given)} can't be a topic"
        raise invalid(f"{what}: expected a resource of 8000 to FFFE, or the wildcard FFFF")
    return Pattern(uris.key(pattern), pattern, uris.has_wildcard(pattern))


@dataclass(eq=False, slots=True)
class Poll:
    """A request that was found valid, and its answer so far."""

    asked: PollRequest
    source: UUri  # who asks
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
    response: PollResponse = field(default_factory=PollResponse)
    woken: asyncio.Event = field(default_factory=asyncio.Event)  # while it waits
    follower: Follower | None = None  # who says what is wanted, in place of `patterns`
    has_room: bool = True  # for records, beside frontiers
    is_pushed: bool = False  # asked on its behalf
    is_cut: bool = False  # to be answered with what there is

    def end(self, log: Log) -> int:
        return min(log.newest_seq, self.until.get(log.incarnation, log.newest_seq))

    @property
    def pending(self) -> list[Log]:
        return [log for log, place in self.places.items() if place < self.end(log)]

    @property
    def is_over(self) -> bool:
        """Nothing that may come is wanted."""
        return all(place >= self.until.get(log.incarnation, place + 1) for log, place in self.places.items())


def checked(asked: PollRequest, attributes: UAttributes, now_ms: int) -> Poll:
    """Raises INVALID_ARGUMENT, or RESOURCE_EXHAUSTED if too much is asked for."""
    start = asked.WhichOneof("start")
    if start == "after_message_id" and len(asked.after_message_id) != 16:
        raise invalid(f"a message id has 16 bytes, got {len(asked.after_message_id)}")
    if start == "after_time":
        seconds, nanos = asked.after_time.seconds, asked.after_time.nanos
        if not SECONDS_MIN <= seconds <= SECONDS_MAX or not 0 <= nanos <= NANOS_MAX:
            what = f"after_time is a time of the years 1 to 9999 with 0 to {NANOS_MAX} nanos"
            raise invalid(f"{what}, got {seconds} s and {nanos} ns")
    most = max((len(one.witnesses) for one in asked.positions), default=0)
    if most > witness.WITNESSES_MAX:
        raise invalid(f"a position has at most {witness.WITNESSES_MAX} witnesses, got {most}")
    if asked.follower and asked.topics:
        raise invalid("a poll names topics, or a follower that has named them before, not both")
    if len(asked.frontiers_page) not in (0, FRONTIERS_PAGE.size):
        raise invalid(f"a page of frontiers is what an answer said, not {len(asked.frontiers_page)} bytes")
    ttl = attributes.ttl
    left_ms = ttl - max(0, now_ms - uuids.time_ms(attributes.id)) - max(TTL_MARGIN_MS, ttl // 10)
    caller = attributes.source.authority_name
    return Poll(
        asked,
        attributes.source,
        caller,
        patterns_of(asked.topics, caller),
        _positions(asked.positions),
        {one.incarnation: {known.seq: known.digest for known in one.witnesses} for one in asked.positions},
        _positions(asked.until),
        _positions(asked.acked),
        min(asked.max_records or POLL_RECORDS_MAX, POLL_RECORDS_MAX),
        min(asked.max_bytes or POLL_BYTES_MAX, POLL_BYTES_MAX),
        max(0, min(asked.wait_ms, WAIT_MS_MAX, left_ms)),
        max(0, left_ms),
        min(asked.lease_ms or LEASE_MS_DEFAULT, LEASE_MS_MAX) if asked.consumer else 0,
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
