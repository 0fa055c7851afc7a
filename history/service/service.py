"""The service of core.ustreamer: the history over any transport (Describe, Poll, Command, Progress).

request -> checked, allowed? -> turn -> a position per log -> read: records, gaps -> reply with `next`
                                 ^                              | nothing yet
                                 '-- wait: appends to matching streams, bounded by wait_ms and the request's ttl

Describe: the logs, each with its newest matching record; topics all at once, or in pages
LISTING_NONE    logs
LISTING_PAGE    logs, some topics, next_page: per log, the id of the last stream that is listed, and of the last to list
LISTING_AT_ONCE logs, all topics, or RESOURCE_EXHAUSTED

Ids of streams only grow, and are never used again. So a topic that exists all the time is listed once, whichever
others are added or removed between two pages. Topics added after the first page are not listed, so the listing ends.

Topics that a caller may not see (`access`) never match: they cause no record, no gap, no listed topic and no wake-up.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import struct
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final, Protocol

from history.log.log import Log, Stream
from history.records.limits import WINDOW_BYTES_MAX
from history.records.witness import seqs_of
from history.service.consumers import LEAVES_MS, Consumers, Owner, cursor_name
from history.service.followers import TOPICS_MAX, Followers, Keeping
from history.service.keeper import Keeper
from history.service.matches import EVERYTHING, Match, Matches, Sights
from history.service.poll import Poll, checked
from uprotocol import uuid as uuids
from uprotocol.communication import InMemoryRpcServer
from uprotocol.communication.shares import CALLERS_SHARE, Shares, Turns
from uprotocol.core.ustreamer.ids import COMMAND, DESCRIBE, ENTITY, FRAMES, POLL, PROGRESS, VERSION
from uprotocol.core.ustreamer.v1.ustreamer_pb2 import (
    CommandRequest,
    CommandResponse,
    DescribeRequest,
    DescribeResponse,
    HandOver,
    LogState,
    PollRequest,
    PollResponse,
    Position,
    ProgressRequest,
    ProgressResponse,
    TopicState,
)
from uprotocol.message import UPayload
from uprotocol.status import UStatusError, invalid
from uprotocol.tasks import wait_until
from uprotocol.transport import LocalUriProvider, UTransport
from uprotocol.v1.uattributes_pb2 import UAttributes
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.umessage_pb2 import UMessage
from uprotocol.v1.uri_pb2 import UUri

REQUESTS_RUNNING_MAX: Final = 2_000  # most of them are polls that wait for their turn
SEATS_MAX: Final = 8  # answers made at the same time: more would not be faster, and each takes some MiB
POLLS_WAITING_MAX: Final = 1_000  # polls that wait for records
# kept free for one reply: a message of 1 MiB with its envelope, or 768 KiB of records and their columns
REPLY_BYTES_MAX: Final = 5 << 18
REPLIES_BYTES_MAX: Final = 32 << 20  # of all replies that the network has not taken yet
TOPICS_AT_ONCE_MAX: Final = 8_000  # some 115 bytes each: below 1 MiB
PAGE_TOPICS_MAX: Final = 1_000  # some 10 ms to list, to translate where the answer leaves, and to parse
PAGE_BYTES_MAX: Final = 256 << 10  # of topics; they have 230 bytes each at most, so the limit before is reached first
PAGE_LOGS_MAX: Final = 256  # in a page, as many as in a poll
LISTED_PER_STEP: Final = 500  # examined in one step on the loop, some 3 ms if all of them are listed
# examined for one page, some 40 ms of steps: if few match, a page may be short or empty
STREAMS_PER_PAGE: Final = 200_000
TURN_MS_MAX: Final = 10_000  # a local read waits so long for its turn
DRAIN_MS_MAX: Final = 5_000  # `stop` waits this long for running requests, and then for the network to take replies

_RANGE: Final = struct.Struct(">16sQQ")  # incarnation, id of the last stream that is listed, and of the last to list


class HandingOver(Protocol):
    """Decides whether publishes are pushed to a caller's network, or the caller follows the logs."""

    async def asked(self, caller: UUri, asked: HandOver) -> list[Position]:
        """Returns the positions from which the caller follows. Raises UStatusError."""

    def acknowledged(self, caller: UUri, positions: Mapping[bytes, int]) -> None:
        """The caller has stored all records up to these positions, by incarnation."""


class HistoryService:
    """Serves `logs` at uEntity `entity`, version 1, of the authority of `local`. A streamer serves all its logs at
    uEntity 4; a publisher serves its own log at an instance of that (ids.of_publisher). Only publishes are visible.

    `access` says which of them a caller may see (None: all); it is asked each time the logs are read. `counts`, since
    the start: polls, describes, progress, commands, records, gaps, refused (all refused calls), denied (calls refused
    for lack of permission), withheld (calls that matched what their caller may not see). `followers` has counts, too.
    """

    def __init__(
        self,
        transport: UTransport,
        local: LocalUriProvider,
        logs: Iterable[Log],
        *,
        entity: int = ENTITY,
        access: Sights | None = None,
        reply_bytes_max: int = REPLY_BYTES_MAX,
        replies_bytes_max: int = REPLIES_BYTES_MAX,
        share: int = CALLERS_SHARE,
        drain_ms_max: int = DRAIN_MS_MAX,
        followed_max: int = TOPICS_MAX,
        window_bytes_max: int | None = None,
        handing_over: HandingOver | None = None,
        keeper: Keeper | None = None,
        followed: Callable[[], Iterable[UUri]] = tuple,
        keeping: Keeping | None = None,
    ) -> None:
        """`window_bytes_max`: bytes pushed to one follower and not yet taken by it; None: the share of one authority
        in the replies that wait here, minus one reply. `followed()`: the services whose histories are followed into
        `logs`. `keeping`: says which topics enter `logs`; None: all."""
        own = LocalUriProvider(local.get_authority(), entity, VERSION)
        self._server = InMemoryRpcServer(
            transport,
            own,
            requests_running_max=REQUESTS_RUNNING_MAX,
            responses_bytes_max=replies_bytes_max,
            share=share,
            drain_ms_max=drain_ms_max,
        )
        self._logs = list(logs)
        self._sights = access if access is not None else Sights()
        self._sights_version = self._sights.version
        self._matches = Matches(self._logs)
        self._waiting: dict[Poll, None] = {}  # in the order in which they began to wait
        self._waiting_shares = Shares[str](POLLS_WAITING_MAX, share=share)  # by authority
        self._turns = Turns(reply_bytes_max, self._server.responses.shares.full, SEATS_MAX, share)
        self._server.responses.on_sent = self._turns.look
        self._handing_over, self._keeper, self._followed, self._keeping = handing_over, keeper, followed, keeping
        if window_bytes_max is None:
            window_bytes_max = max(0, replies_bytes_max // share - reply_bytes_max)
        self.followers = Followers(
            self._matches,
            self._sights,
            self._answer,
            self._server.responses,
            own.get_resource(FRAMES),
            share=share,
            topics_max=followed_max,
            window_bytes_max=min(window_bytes_max, WINDOW_BYTES_MAX),
        )
        self.consumers = Consumers(self._logs, uuids.now_ms, share=share)
        self._seen: dict[Log, int] = {}
        self._stop_listening: list[Callable[[], None]] = []
        self._stopping = False
        self.counts: Counter[str] = Counter()

    def __repr__(self) -> str:
        return f"HistoryService({self._logs}, waiting={len(self._waiting)})"

    async def start(self) -> None:
        """Register the methods. Raises the UStatusError of the transport."""
        self._stopping = False
        self.followers.open()
        self.consumers.load()
        await self._server.register_request_handler(DESCRIBE, self._describe)
        await self._server.register_request_handler(POLL, self._poll)
        await self._server.register_request_handler(COMMAND, self._command)
        if self._keeper is not None:
            await self._server.register_request_handler(PROGRESS, self._progress)

    async def stop(self) -> None:
        """Answer the polls that wait, and refuse new requests. May be called twice. The logs stay open."""
        self._stopping = True
        await self.followers.close()
        for poll in self._waiting:
            poll.woken.set()
        await self._server.close()

    @contextlib.contextmanager
    def _counted(self, what: str) -> Iterator[None]:
        """Count a call as `what`, or as refused if its checks, which this encloses, raise."""
        try:
            yield
        except UStatusError as error:
            self.counts["refused"] += 1
            if error.code == UCode.PERMISSION_DENIED:
                self.counts["denied"] += 1
            raise
        self.counts[what] += 1

    # -- Describe

    async def _describe(self, request: UMessage) -> DescribeResponse:
        caller = request.attributes.source
        with self._counted("describes"):
            asked = UPayload.of(request).unpack(DescribeRequest)
            listing = Listing.of(asked)
            sight = self._sights.of(caller)
            matches = self._matches.of(asked.topics, sight, caller.authority_name)
        async with self._turns.turn(caller.authority_name, request.attributes.ttl / 1000):
            response = await describe(matches, listing)
        response.visible.CopyFrom(sight.visible.message)
        if asked.followed:
            response.followed.extend(
                service for service in self._followed() if sight.visible.sees_some_of(service.authority_name)
            )
        self.counts["withheld"] += any(match.withholds for match in matches.values())
        return response

    # -- Progress

    async def _progress(self, request: UMessage) -> ProgressResponse:
        assert self._keeper is not None, "only then is the method registered"
        with self._counted("progress"):
            asked = UPayload.of(request).unpack(ProgressRequest)
            answer = self._keeper.progress(request.attributes.source, asked)
        return await answer

    # -- Command

    async def _command(self, request: UMessage) -> CommandResponse:
        caller = request.attributes.source
        with self._counted("commands"):
            asked = UPayload.of(request).unpack(CommandRequest)
            if asked.HasField("push") and asked.push.poll.consumer:
                self.consumers.require(asked.push.poll.consumer, Owner.of(caller), asked.push.poll.holder)
            answer = self.followers.command(asked, request.attributes)
            if asked.acked:
                self._acknowledge(asked, caller)
        if asked.asks_kept and self._keeping is not None:
            not_kept = await self.followers.not_kept(asked, caller, self._keeping)
            del answer.not_kept[:]
            answer.not_kept.extend(not_kept)
        if asked.HasField("hand_over"):
            if self._handing_over is None:
                raise UStatusError(
                    UCode.PERMISSION_DENIED, "this history pushes nothing to you that could be handed over"
                )
            handed_over = await self._handing_over.asked(caller, asked.hand_over)
            del answer.handed_over[:]
            answer.handed_over.extend(handed_over)
        return answer

    def _acknowledge(self, asked: CommandRequest, caller: UUri) -> None:
        """Move the cursor of the consumer of the push, and that of a caller that has taken over."""
        if self._handing_over is not None:
            self._handing_over.acknowledged(caller, seqs_of(asked.acked))
        consumer, lease_ms, holder = self.followers.consumer_of(asked, caller)
        for log in self._logs if consumer else ():
            for position in asked.acked:
                if position.incarnation == log.incarnation:
                    self.consumers.hold(consumer, Owner.of(caller), log, position.seq, lease_ms, holder)

    # -- Poll

    async def read(self, caller: UUri, asked: PollRequest) -> PollResponse:
        """Answer a poll of `caller` that came another way than as a message: who passes it on bounds how many wait.
        Raises UStatusError as a poll answers."""
        attributes = UAttributes(id=uuids.new(), source=caller, ttl=asked.wait_ms + TURN_MS_MAX)
        with self._counted("polls"):
            valid = checked(asked, attributes)
            sight = self._sights.of(caller)
            poll = Poll(valid, sight, self._matches.of(asked.topics, sight, valid.caller), is_local=True)
        await self._answer(poll)
        return poll.response

    def sight_key(self, caller: UUri) -> Hashable:
        """Returns the same for callers that may read the same, and another one as soon as that may have changed."""
        return self._sights.of(caller).key

    async def _poll(self, request: UMessage) -> PollResponse:
        with self._counted("polls"):
            asked = UPayload.of(request).unpack(PollRequest)
            valid = checked(asked, request.attributes)
            sight = self._sights.of(valid.source)
            follower = self.followers.of(asked, valid.source) if asked.follower else None
            if follower is None:
                poll = Poll(valid, sight, self._matches.of(asked.topics, sight, valid.caller))
            else:
                poll = Poll(valid, sight, follower.matches_for(sight), follower)
            if asked.consumer:
                self.consumers.require(asked.consumer, Owner.of(valid.source), asked.holder)
            if follower is not None and asked.leaves:
                follower.stop_push()
            if valid.acked and self._handing_over is not None:
                self._handing_over.acknowledged(valid.source, valid.acked)
        await (self._answer(poll) if follower is None else self.followers.answer(follower, poll))
        return poll.response

    async def _answer(self, poll: Poll) -> None:
        """Fill the response with the records at hand, or with those that come while the poll may wait."""
        request, time = poll.request, asyncio.get_running_loop().time
        deadline, gives_up = time() + request.wait_ms / 1000, time() + request.left_ms / 1000
        with contextlib.ExitStack() as stack:
            while True:
                poll.woken.clear()
                async with self._turns.turn(poll.turn_of, gives_up - time()):
                    if not poll.positions:
                        await poll.begin(lambda log, seq: self._sees_record(poll, log, seq))
                        self.counts["withheld"] += any(match.withholds for match in poll.matches.values())
                        if request.asked.consumer:
                            self._hold(poll)
                    is_done = await poll.read()
                if is_done or poll.has_ended() or poll.is_cut or self._stopping or deadline <= time():
                    break
                if poll not in self._waiting:  # then read again, so that it misses nothing that came meanwhile
                    stack.enter_context(self._wakes(poll))
                else:
                    await wait_until(poll.woken, deadline)  # then read again, so that `next` passes other records
                self._match(poll)
        if request.asked.plan_records:
            poll.response.visible.CopyFrom(poll.sight.visible.message)
        self.counts["records"] += sum(len(batch.seq) for batch in poll.response.batches)
        self.counts["gaps"] += len(poll.response.gaps)

    def _match(self, poll: Poll) -> None:
        """Find the streams that the poll asks for and its caller may see; both may have changed while it waited. Raises
        PERMISSION_DENIED."""
        sight = self._sights.of(poll.request.source)
        if poll.follower is not None:
            poll.matches = poll.follower.matches_for(sight)
        elif poll.sight.key != sight.key:
            poll.matches = self._matches.of(poll.request.asked.topics, sight, poll.request.caller)
        poll.sight = sight

    async def _sees_record(self, poll: Poll, log: Log, seq: int) -> bool:
        """Returns whether the caller may know that this record exists, whatever its topic."""
        if poll.sight is EVERYTHING:
            return True
        match = self._matches.of((), poll.sight, poll.request.caller)[log]
        await match.complete()
        return bool((await log.scan(seq - 1, max_records=1, max_bytes=1, until=seq, streams=match.ids)).chunks)

    def _hold(self, poll: Poll) -> None:
        """Let the consumer's cursor hold retention: at its acknowledged position, else at its last position, else at
        the begin of the poll."""
        request = poll.request
        asked, owner, lease_ms = request.asked, Owner.of(request.source), request.lease_ms
        if lease_ms > LEAVES_MS:
            lease_ms += int(request.wait_ms)
        for log, position in poll.positions.items():
            known = log.cursors.seq(cursor_name(asked.consumer))
            seq = request.acked.get(log.incarnation, position if known is None else known)
            seq = min(seq, poll.agreed.get(log.incarnation, seq))
            self.consumers.hold(asked.consumer, owner, log, seq, lease_ms, asked.holder, leaves=asked.leaves)
        poll.response.lease_ms = request.lease_ms

    # -- polls that wait

    @contextlib.contextmanager
    def _wakes(self, poll: Poll) -> Iterator[None]:
        """Wake the poll when records come that may be for it. Raises RESOURCE_EXHAUSTED."""
        caller = poll.request.caller
        if not poll.is_local and (full := self._waiting_shares.full(caller)) is not None:
            whose = f" of authority {caller!r}" if full.is_of_one else ""
            what = f"{full.limit} polls{whose} wait already: try again later"
            raise UStatusError(UCode.RESOURCE_EXHAUSTED, what)
        if not self._waiting:
            self._seen = {log: log.newest_seq for log in self._logs}
            self._stop_listening = [log.on_append(functools.partial(self._appended, log)) for log in self._logs]
        self._waiting[poll] = None
        if not poll.is_local:
            self._waiting_shares.add(caller, 1)
        try:
            yield
        finally:
            self._waiting.pop(poll, None)
            if not poll.is_local:
                self._waiting_shares.add(caller, -1)
            if not self._waiting:
                for end in self._stop_listening:
                    end()

    def _appended(self, log: Log) -> None:
        """Wake the polls that may be waiting for the appended records."""
        chunks = log.tail(self._seen[log])
        self._seen[log] = log.newest_seq
        came: frozenset[int] = frozenset().union(*(chunk.stream_set for chunk in chunks or ()))
        is_old = self._sights_version != self._sights.version  # the matches may no longer be what callers may see
        self._sights_version = self._sights.version
        hits: dict[int, bool] = {}  # by the identity of the match, which many polls may share
        for poll in self._waiting:
            match = poll.matches[log]
            hit = hits.get(id(match))
            if hit is None:
                hit = hits[id(match)] = chunks is None or not match.advance() or not match.ids.isdisjoint(came)
            if hit or is_old:
                poll.woken.set()


# -- Describe


@dataclass(slots=True)
class Listing:
    """A request for topics, and the topics found so far."""

    kind: DescribeRequest.Listing.ValueType
    ranges: dict[bytes, tuple[int, int]]
    topics: list[TopicState] = field(default_factory=list)
    bytes: int = 0
    examined: int = 0

    @classmethod
    def of(cls, asked: DescribeRequest) -> Listing:
        """Returns the listing for a request. Raises INVALID_ARGUMENT."""
        if asked.listing not in DescribeRequest.Listing.values():
            raise invalid(f"unknown listing {asked.listing}; known: {', '.join(DescribeRequest.Listing.keys())}")
        if len(asked.page) % _RANGE.size or len(asked.page) > PAGE_LOGS_MAX * _RANGE.size:
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
    response = DescribeResponse()
    for log, match in matches.items():
        state = _log_state(log)
        state.newest_match_seq = await match.newest_seq()
        # Records that have come meanwhile may not have been looked at: a reader that goes on from newest_seq, since
        # nothing before it matches, misses none.
        state.newest_seq = max(state.newest_seq, state.newest_match_seq)
        response.logs.append(state)
    if listing.kind != DescribeRequest.LISTING_NONE:
        for match in matches.values():
            await match.complete()
    if listing.kind == DescribeRequest.LISTING_PAGE:
        response.next_page = await _page(matches, listing)
    elif listing.kind == DescribeRequest.LISTING_AT_ONCE:
        await _all(matches, listing)
    response.topics.extend(listing.topics)
    return response


async def _page(matches: Mapping[Log, Match], listing: Listing) -> bytes:
    """List one page. Returns next_page; empty if this was the last one."""
    ranges = {log: listing.ranges.get(log.incarnation, (0, log.stream_table.newest_id)) for log in matches}
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
    streams = log.stream_table.after(after, LISTED_PER_STEP, match.authorities)
    listing.examined += len(streams)
    for stream in streams:
        if stream.id > until:
            return until
        if listing.is_full:
            return after
        after = stream.id
        if after in match.ids and stream.records:
            listing.add(log, stream)
    return after if len(streams) == LISTED_PER_STEP else until


async def _all(matches: Mapping[Log, Match], listing: Listing) -> None:
    if sum(len(match.ids) for match in matches.values()) > TOPICS_AT_ONCE_MAX:
        what = f"more than {TOPICS_AT_ONCE_MAX} topics match: ask for fewer at once, or for pages"
        raise UStatusError(UCode.RESOURCE_EXHAUSTED, what)
    for log, match in matches.items():
        for number, id in enumerate(sorted(match.ids), 1):
            if log.knows_stream(id) and log.stream(id).records:
                listing.add(log, log.stream(id))
            if number % LISTED_PER_STEP == 0:
                await asyncio.sleep(0)


def _log_state(log: Log) -> LogState:
    return LogState(
        incarnation=log.incarnation,
        durable=log.durable,
        oldest_seq=log.oldest_seq,
        newest_seq=log.newest_seq,
        stored_bytes=log.extent.stored_bytes,
        retention_ms=log.retention_ms,
        retention_bytes=log.retention_bytes,
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
