"""The checks of a request: each field is checked once, so that later code need not check it again.

PollRequest, ttl -> checked -> CheckedPoll | INVALID_ARGUMENT, RESOURCE_EXHAUSTED
topics -> patterns_of -> Patterns | INVALID_ARGUMENT, RESOURCE_EXHAUSTED

Which streams the topics match is decided in matches.py.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from history.records import witness
from history.service.matches import Patterns
from uprotocol import uri as uris
from uprotocol import uuid as uuids
from uprotocol.core.ustreamer.v1.ustreamer_pb2 import PollRequest, Position
from uprotocol.status import UStatusError, invalid
from uprotocol.v1.uattributes_pb2 import UAttributes
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.uri_pb2 import UUri

PATTERNS_MAX: Final = 1_000  # of one request; a caller that wants more uses wildcards
WILDCARD_PATTERNS_MAX: Final = 64  # each is compared with every kind of stream
PATTERNS_KNOWN_MAX: Final = 8_192  # valid topics in the cache of `pattern_of`; some 4 MB when it is full
POLL_RECORDS_MAX: Final = 10_000  # with some 24 bytes of columns each, and ...
POLL_BYTES_MAX: Final = 768 << 10  # ... these of messages, a reply stays below 1 MiB, which every transport carries
WAIT_MS_MAX: Final = 60_000  # within this time the service notices that a caller has gone
TTL_MARGIN_MS: Final = 200  # this, or a tenth of the request's ttl, is left for the reply to arrive
LEASE_MS_DEFAULT: Final = 60_000
LEASE_MS_MAX: Final = 7 * 24 * 3_600_000
INCARNATION_BYTES: Final = 16
FRONTIERS_PAGE: Final = struct.Struct(f">{INCARNATION_BYTES}sq")  # a log, and the last stream of it that was listed
# a streamer has two logs; each other one is a log that no longer exists and costs a gap in the reply
POSITIONS_MAX: Final = 256
DIGEST_BYTES_MAX: Final = 64  # of a witness; ours are shorter
NANOS_MAX: Final = 999_999_999
SECONDS_MIN: Final = -62_135_596_800  # the years 1 to 9999: the range of google.protobuf.Timestamp
SECONDS_MAX: Final = 253_402_300_799


def patterns_of(topics: Sequence[UUri], caller: str) -> Patterns:
    """Returns the patterns without duplicates. A topic without authority is on the host of the `caller`. Raises
    INVALID_ARGUMENT or RESOURCE_EXHAUSTED."""
    if len(topics) > PATTERNS_MAX:
        what = f"expected at most {PATTERNS_MAX} topics, got {len(topics)}: use wildcards"
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
    """Checks one serialized topic. Valid topics are cached, because consumers repeat theirs with each poll; a topic
    that raises is not, so junk cannot fill the cache."""
    given = UUri.FromString(topic)
    pattern = uris.with_authority(given, caller)
    uris.validate(pattern)
    if not uris.is_topic(pattern) and pattern.resource_id != uris.WILDCARD_RESOURCE:
        what = f"{uris.format(given)} is not a topic"
        raise invalid(f"{what}: expected a resource of 8000 to FFFE, or the wildcard FFFF")
    return Pattern(uris.key(pattern), pattern, uris.has_wildcard(pattern))


@dataclass(frozen=True, eq=False, slots=True)
class CheckedPoll:
    """A valid PollRequest, with its defaults and limits applied. Positions are by incarnation."""

    asked: PollRequest
    source: UUri  # of the caller
    caller: str  # the caller's authority
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


def checked(
    asked: PollRequest, attributes: UAttributes, now_ms: int, *, bytes_max: int = POLL_BYTES_MAX
) -> CheckedPoll:
    """`bytes_max` limits the answer further. Raises INVALID_ARGUMENT, or RESOURCE_EXHAUSTED for more than a limit."""
    start = asked.WhichOneof("start")
    if start == "after_message_id" and len(asked.after_message_id) != 16:
        raise invalid(f"expected a message id of 16 bytes, got {len(asked.after_message_id)}")
    if start == "after_time":
        seconds, nanos = asked.after_time.seconds, asked.after_time.nanos
        if not SECONDS_MIN <= seconds <= SECONDS_MAX or not 0 <= nanos <= NANOS_MAX:
            what = f"after_time is a time of the years 1 to 9999 with 0 to {NANOS_MAX} nanos"
            raise invalid(f"{what}, got {seconds} s and {nanos} ns")
    if asked.follower and asked.topics:
        raise invalid("a poll names topics, or a follower that named them before, not both")
    if len(asked.frontiers_page) not in (0, FRONTIERS_PAGE.size):
        what = f"frontiers_page has {FRONTIERS_PAGE.size} bytes: next_frontiers_page of the answer before"
        raise invalid(f"{what}, got {len(asked.frontiers_page)} bytes")
    ttl = attributes.ttl
    left_ms = ttl - max(0, now_ms - uuids.time_ms(attributes.id)) - max(TTL_MARGIN_MS, ttl // 10)
    caller = attributes.source.authority_name
    return CheckedPoll(
        asked,
        attributes.source,
        caller,
        patterns_of(asked.topics, caller),
        _positions(asked.positions),
        {one.incarnation: {known.seq: known.digest for known in one.witnesses} for one in asked.positions},
        _positions(asked.until),
        _positions(asked.acked),
        min(asked.max_records or POLL_RECORDS_MAX, POLL_RECORDS_MAX),
        max(1, min(asked.max_bytes or POLL_BYTES_MAX, POLL_BYTES_MAX, bytes_max)),
        max(0, min(asked.wait_ms, WAIT_MS_MAX, left_ms)),
        max(0, left_ms),
        min(asked.lease_ms or LEASE_MS_DEFAULT, LEASE_MS_MAX) if asked.consumer else 0,
    )


def _positions(given: Sequence[Position]) -> dict[bytes, int]:
    if len(given) > POSITIONS_MAX:
        raise invalid(f"expected at most {POSITIONS_MAX} logs in a poll, got {len(given)}")
    for position in given:
        if len(position.incarnation) != INCARNATION_BYTES:
            raise invalid(f"expected an incarnation of {INCARNATION_BYTES} bytes, got {len(position.incarnation)}")
        if len(position.witnesses) > witness.WITNESSES_MAX:
            what = f"expected at most {witness.WITNESSES_MAX} witnesses of a position"
            raise invalid(f"{what}, got {len(position.witnesses)}")
        if any(len(one.digest) > DIGEST_BYTES_MAX for one in position.witnesses):
            raise invalid(f"expected a witness of at most {DIGEST_BYTES_MAX} bytes")
    return {one.incarnation: one.seq for one in given}
