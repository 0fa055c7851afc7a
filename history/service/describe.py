"""Describe: the logs, each with its newest matching record; topics all at once, or in pages.

LISTING_NONE    logs
LISTING_PAGE    logs, some topics, next_page: per log, the id of the last stream that is listed, and of the last to list
LISTING_AT_ONCE logs, all topics, or RESOURCE_EXHAUSTED

Ids of streams only grow, and are never used again. So a topic that exists all the time is listed once, whichever
others are added or removed between two pages. Topics added after the first page are not listed, so the listing ends.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from history.log.log import Log, Stream
from history.service.matches import Match
from uprotocol.core.ustreamer.v1.ustreamer_pb2 import DescribeRequest, DescribeResponse, LogState, TopicState
from uprotocol.status import UStatusError, invalid
from uprotocol.v1.ucode_pb2 import UCode

TOPICS_AT_ONCE_MAX: Final = 8_000  # some 115 bytes each: below 1 MiB
PAGE_TOPICS_MAX: Final = 1_000  # some 10 ms to list, to translate where the answer leaves, and to parse
PAGE_BYTES_MAX: Final = 256 << 10  # of topics; they have 230 bytes each at most, so the limit before is reached first
LOGS_MAX: Final = 256  # in a page, as many as in a poll
STREAMS_PER_STEP: Final = 500  # examined in one step on the loop, some 3 ms if all of them are listed
# examined for one page, some 40 ms of steps: if few match, a page may be short or empty
STREAMS_PER_PAGE: Final = 200_000

_RANGE: Final = struct.Struct(">16sQQ")  # incarnation, id of the last stream that is listed, and of the last to list

ListedRanges = dict[bytes, tuple[int, int]]


@dataclass(slots=True)
class Listing:
    """A request for topics, and the topics found so far."""

    kind: DescribeRequest.Listing.ValueType
    ranges: ListedRanges
    topics: list[TopicState] = field(default_factory=list)
    bytes: int = 0
    examined: int = 0

    @classmethod
    def of(cls, asked: DescribeRequest) -> Listing:
        """Returns the listing for a request. Raises INVALID_ARGUMENT."""
        if asked.listing not in DescribeRequest.Listing.values():
            raise invalid(f"unknown listing {asked.listing}; known: {', '.join(DescribeRequest.Listing.keys())}")
        if len(asked.page) % _RANGE.size or len(asked.page) > LOGS_MAX * _RANGE.size:
            raise invalid("expected `page` to be next_page of the answer before, got other bytes")
        ranges = {incarnation: (after, until) for incarnation, after, until in _RANGE.iter_unpack(asked.page)}
        return cls(asked.listing, ranges)

    @property
    def is_full(self) -> bool:
        is_full = len(self.topics) >= PAGE_TOPICS_MAX or self.bytes >= PAGE_BYTES_MAX
        return is_full or self.examined >= STREAMS_PER_PAGE

    def add(self, log: Log, stream: Stream) -> None:
        state = _topic_state(log, stream)
        self.topics.append(state)
        self.bytes += state.ByteSize()


async def describe(matches: Mapping[Log, Match], listing: Listing) -> DescribeResponse:
    """Answer in short steps, between which other tasks run. Raises RESOURCE_EXHAUSTED."""
    newest = {log: await match.newest_seq() for log, match in matches.items()}
    response = DescribeResponse()
    if listing.kind != DescribeRequest.LISTING_NONE:
        for match in matches.values():
            await match.complete()
    if listing.kind == DescribeRequest.LISTING_PAGE:
        response.next_page = await _page(matches, listing)
    elif listing.kind == DescribeRequest.LISTING_AT_ONCE:
        await _all(matches, listing)
    response.logs.extend(_log_state(log, seq) for log, seq in newest.items())
    response.topics.extend(listing.topics)
    return response


async def _page(matches: Mapping[Log, Match], listing: Listing) -> bytes:
    """List one page. Returns next_page; empty if this was the last one."""
    ranges = {log: listing.ranges.get(log.incarnation, (0, log.newest_stream_id)) for log in matches}
    for log, (after, until) in ranges.items():
        while after < until and not listing.is_full:
            after = _step(log, matches[log], listing, after, until)
            ranges[log] = (after, until)
            await asyncio.sleep(0)
    if all(after >= until for after, until in ranges.values()):
        return b""
    return b"".join(_RANGE.pack(log.incarnation, *range) for log, range in ranges.items())


def _step(log: Log, match: Match, listing: Listing, after: int, until: int) -> int:
    """List some streams. Returns the id up to which the log is now listed."""
    streams = log.streams_after(after, STREAMS_PER_STEP, match.authorities)
    listing.examined += len(streams)
    for stream in streams:
        if stream.id > until:
            return until
        if listing.is_full:
            return after
        after = stream.id
        if after in match.ids and stream.records:
            listing.add(log, stream)
    return after if len(streams) == STREAMS_PER_STEP else until


async def _all(matches: Mapping[Log, Match], listing: Listing) -> None:
    if sum(len(match.ids) for match in matches.values()) > TOPICS_AT_ONCE_MAX:
        what = f"more than {TOPICS_AT_ONCE_MAX} topics match: ask for fewer at once, or for pages"
        raise UStatusError(UCode.RESOURCE_EXHAUSTED, what)
    for log, match in matches.items():
        for number, id in enumerate(sorted(match.ids), 1):
            if log.knows_stream(id) and log.stream(id).records:
                listing.add(log, log.stream(id))
            if number % STREAMS_PER_STEP == 0:
                await asyncio.sleep(0)


def _log_state(log: Log, newest_match_seq: int) -> LogState:
    return LogState(
        incarnation=log.incarnation,
        durable=log.durable,
        oldest_seq=log.oldest_seq,
        newest_seq=log.newest_seq,
        stored_bytes=log.extent.stored_bytes,
        retention_ms=log.retention_ms,
        retention_bytes=log.retention_bytes,
        newest_match_seq=newest_match_seq,
    )


def _topic_state(log: Log, stream: Stream) -> TopicState:
    stored = stream.newest_seq >= log.oldest_seq > 0
    state = TopicState(
        topic=stream.source,
        incarnation=log.incarnation,
        oldest_seq=max(stream.first_seq, log.oldest_seq) if stored else 0,
        newest_seq=stream.newest_seq,
        newest_id=stream.newest_id,
        records=stream.records,
    )
    state.newest_time.FromMilliseconds(stream.newest_time_ms)
    return state
