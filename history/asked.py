"""What a request asks for: its fields checked once, and which streams its topics mean to one who may not see all.

PollRequest, ttl -> checked -> Poll | INVALID_ARGUMENT, RESOURCE_EXHAUSTED: nothing behind this has to doubt a field
patterns, what the caller sees -> Match (exact keys, wildcards) -- advance: some streams at a time --> ids
                                      cached, and grown step by step as streams come
"""

from __future__ import annotations

import asyncio
import functools
import weakref
from collections.abc import Hashable, Iterable, Sequence, Set
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from history import witness
from history.log import Log, Stream
from uprotocol import uri as uris
from uprotocol import uuid as uuids
from uprotocol.communication.shares import CALLERS_SHARE
from uprotocol.core.ustreamer.v1.ustreamer_pb2 import PollRequest, PollResponse, Position
from uprotocol.status import UStatusError, invalid
from uprotocol.v1.uattributes_pb2 import UAttributes
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.uri_pb2 import UUri

PATTERNS_MAX: Final = 1_000  # of one request; who wants more wants a wildcard
WILDCARD_PATTERNS_MAX: Final = 64  # each is compared with every stream
PATTERNS_KNOWN_MAX: Final = 8_192  # valid topics that need no second look; some 4 MB when full
COMPARISONS_PER_STEP: Final = 4_000  # some 2 ms
CACHED_MAX: Final = 1_024  # pattern sets; consumers keep theirs from poll to poll
CACHED_IDS_MAX: Final = 1 << 20  # in all of those, some 50 bytes each
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
HIDDEN: Final = "the rules, or [[access]], of this streamer let you read none of these topics"

Key = tuple[Hashable, tuple[tuple[str, int, int, int], ...]]


class Sight:
    """What one caller may see of a log: everything, where a subclass does not say otherwise. Callers of the same `key`
    see the same; it changes with whatever changes that."""

    key: Hashable = "all"

    @property
    def cost(self) -> int:
        """With how many patterns a topic is compared."""
        return 0

    def sees(self, source: UUri, sink: UUri | None) -> bool:
        return True


EVERYTHING: Final = Sight()


class Access:
    """Who may see what: everybody everything, where a subclass does not say otherwise."""

    @property
    def version(self) -> int:
        """It changes whenever an answer of `of` may."""
        return 0

    def of(self, caller: UUri) -> Sight:
        """What the caller with this address may see now."""
        return EVERYTHING


def is_publish(stream: Stream) -> bool:
    """Publishes only: no sink, or the one that a streamer sets (an authority, all else wildcard)."""
    sink = stream.sink
    return sink is None or (
        sink.ue_id == uris.WILDCARD_ENTITY
        and sink.ue_version_major == uris.WILDCARD_VERSION
        and sink.resource_id == uris.WILDCARD_RESOURCE
    )


class Match:
    """The streams of one log that some of the patterns match and that may be seen; no pattern matches every topic.

    `withheld` counts those that match and may not be seen.
    """

    def __init__(self, log: Log, patterns: Sequence[UUri], sight: Sight = EVERYTHING) -> None:
        self._log, self._sight = log, sight
        self._exact = {uris.key(pattern) for pattern in patterns if not uris.has_wildcard(pattern)}
        self._wildcards = [pattern for pattern in patterns if uris.has_wildcard(pattern)] if patterns else [uris.ANY]
        authorities = {pattern.authority_name for pattern in patterns}
        # None: any
        self._authorities = authorities if authorities and not any(map(uris.is_pattern, authorities)) else None
        self._seen = 0  # the highest number that was looked at
        self.ids: set[int] = set()
        self.withheld = 0

    def advance(self) -> bool:
        """One step; True if every stream there is has been looked at."""
        newest = self._log.newest_stream_id
        if self._seen == newest:
            return True
        step = max(1, COMPARISONS_PER_STEP // (1 + len(self._wildcards) + self._sight.cost))
        streams = self._log.streams_after(self._seen, step)
        for stream in streams:
            self._seen = stream.id
            if not is_publish(stream) or not self._matches(stream.source):
                continue
            if self._sight.sees(stream.source, stream.sink):
                self.ids.add(stream.id)
            else:
                self.withheld += 1
        if len(streams) < step:
            self._seen = newest
        return self._seen == newest

    async def complete(self) -> None:
        while not self.advance():  # noqa: ASYNC110 - gives way, waits for nothing
            await asyncio.sleep(0)

    def forget(self, ids: Set[int]) -> None:
        self.ids -= ids

    @property
    def forgotten_seq(self) -> int:
        """Up to here there may have been records of theirs of which nothing is known any more."""
        return self._log.forgotten_seq(self._authorities)

    def _matches(self, topic: UUri) -> bool:
        return uris.key(topic) in self._exact or any(uris.matches(pattern, topic) for pattern in self._wildcards)


class Patterns(NamedTuple):
    """What a request asks for."""

    key: tuple[tuple[str, int, int, int], ...]
    uris: tuple[UUri, ...]


def patterns_of(topics: Sequence[UUri], caller: str) -> Patterns:
    """Without doubles; a topic without authority is on the host of the `caller`. Raises INVALID_ARGUMENT or
    RESOURCE_EXHAUSTED."""
    if len(topics) > PATTERNS_MAX:
        what = f"{len(topics)} topics are more than {PATTERNS_MAX}: use wildcards"
        raise UStatusError(UCode.RESOURCE_EXHAUSTED, what)
    patterns = {one.key: one for one in (_pattern(topic.SerializeToString(), caller) for topic in topics)}
    if sum(one.is_wild for one in patterns.values()) > WILDCARD_PATTERNS_MAX:
        what = f"at most {WILDCARD_PATTERNS_MAX} of the topics may have wildcards"
        raise UStatusError(UCode.RESOURCE_EXHAUSTED, what)
    return Patterns(tuple(sorted(patterns)), tuple(one.uri for one in patterns.values()))


class _Pattern(NamedTuple):
    key: tuple[str, int, int, int]
    uri: UUri
    is_wild: bool


@functools.lru_cache(maxsize=PATTERNS_KNOWN_MAX)
def _pattern(topic: bytes, caller: str) -> _Pattern:
    """Valid ones are remembered: consumers name theirs with each poll. What raises is not, so that junk can't fill the
    cache."""
    given = UUri.FromString(topic)
    pattern = uris.with_authority(given, caller)
    uris.validate(pattern)
    if not uris.is_topic(pattern) and pattern.resource_id != uris.WILDCARD_RESOURCE:
        what = f"{uris.format(given)} can't be a topic"
        raise invalid(f"{what}: expected a resource of 8000 to FFFE, or the wildcard FFFF")
    return _Pattern(uris.key(pattern), pattern, uris.has_wildcard(pattern))


class Matches:
    """The matches in use, by what is asked for and what may be seen: none is looked for again with each request."""

    def __init__(self, logs: Iterable[Log]) -> None:
        self._logs = list(logs)
        # with the authority that asked first; what was used last is last
        self._cached: dict[Key, tuple[str, dict[Log, Match]]] = {}
        self._in_use: dict[Log, weakref.WeakSet[Match]] = {}  # those that a poll still holds, too
        for log in self._logs:
            self._in_use[log] = weakref.WeakSet()
            log.on_forgotten(functools.partial(self._forget, log))

    def _forget(self, log: Log, ids: Set[int]) -> None:
        for match in self._in_use[log]:
            match.forget(ids)

    def of(self, patterns: Patterns, sight: Sight, caller: str) -> dict[Log, Match]:
        """A match for each log. Raises PERMISSION_DENIED if the caller may see none of what is asked for."""
        key = (sight.key, patterns.key)
        known = self._cached.pop(key, None)
        if known is None:
            # Topics that are named, each by itself, and none may be seen: that depends on no log, so who is refused
            # learns nothing of it.
            seen = (uris.has_wildcard(topic) or sight.sees(topic, None) for topic in patterns.uris)
            if patterns.uris and not any(seen):
                raise UStatusError(UCode.PERMISSION_DENIED, HIDDEN)
            self._make_room(caller)
            known = (caller, {log: Match(log, patterns.uris, sight) for log in self._logs})
            for log, match in known[1].items():
                self._in_use[log].add(match)
        self._cached[key] = known
        return known[1]

    def _make_room(self, caller: str) -> None:
        """Who asks for ever other topics pushes out its own."""
        own = [key for key, (whose, _) in self._cached.items() if whose == caller]
        if len(own) >= CACHED_MAX // CALLERS_SHARE:
            del self._cached[own[0]]
        ids = [sum(len(match.ids) for match in matches.values()) for _, matches in self._cached.values()]
        total = sum(ids)
        for key, count in zip(list(self._cached), ids, strict=True):
            if total <= CACHED_IDS_MAX and len(self._cached) < CACHED_MAX:
                break
            del self._cached[key]
            total -= count


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
