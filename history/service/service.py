"""core.ustreamer: the history on the wire (Describe, Poll, Command, Progress), over any transport.

request -> checked, allowed? -> turn -> places: one per log -> collect: scan, gaps -> reply with `next`
                                 ^                               | nothing yet
                                 '-- wait: commits of matching streams, bounded by wait_ms and the request's ttl

What a caller may not see (`access`) matches nothing: no record, no gap, no topic of it, and no wake-up.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Final, Protocol

from history.epochs.keeper import Keeper
from history.log.log import Log
from history.records import witness
from history.records.batch import add_records
from history.records.witness import gap_of
from history.service.consumers import Consumers, Owner, cursor_name
from history.service.describe import Listing, describe
from history.service.followers import TOPICS_MAX, Followers
from history.service.matches import EVERYTHING, Access, Matches
from history.service.pushing import WINDOW_BYTES_MAX
from history.service.request import Poll, checked, patterns_of
from history.service.snapshot import add_frontiers
from uprotocol import uuid as uuids
from uprotocol.communication import InMemoryRpcServer
from uprotocol.communication.shares import CALLERS_SHARE, Shares, Turns
from uprotocol.core.ustreamer.ids import COMMAND, DESCRIBE, ENTITY, FRAMES, POLL, PROGRESS, VERSION
from uprotocol.core.ustreamer.v1.ustreamer_pb2 import (
    CommandRequest,
    CommandResponse,
    DescribeRequest,
    DescribeResponse,
    Gap,
    HandOver,
    PollRequest,
    PollResponse,
    Position,
    ProgressRequest,
    ProgressResponse,
    RecordBatch,
    Witness,
)
from uprotocol.message import UPayload
from uprotocol.status import UStatusError
from uprotocol.transport import LocalUriProvider, UTransport
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.umessage_pb2 import UMessage
from uprotocol.v1.uri_pb2 import UUri

# of reading, for one poll: who asks for a rare topic gets `more` and asks again, and others have their turn
POLL_STEPS_MAX: Final = 16
REQUESTS_RUNNING_MAX: Final = 2_000  # polls that wait for their turn, for the most part
SEATS_MAX: Final = 8  # answers being made at once: more are not made faster, and each takes some MiB
POLLS_WAITING_MAX: Final = 1_000  # each is a consumer with nothing to do
# what is kept free for one: a message of 1 MiB with its envelope, or 768 KiB of records and their columns
REPLY_BYTES_MAX: Final = 5 << 18
REPLIES_BYTES_MAX: Final = 32 << 20  # that the network has not taken, in all
DRAIN_MS_MAX: Final = 5_000  # `stop` gives running requests this long, and then the network to take what is answered


class HandingOver(Protocol):
    """Who decides whether publishes are pushed to a caller's network, or it follows."""

    async def asked(self, caller: UUri, asked: HandOver) -> list[Position]:
        """Where the caller begins to follow. Raises UStatusError."""

    def acknowledged(self, caller: UUri, positions: Mapping[bytes, int]) -> None:
        """All up to here is safe with the caller, by log."""


class HistoryService:
    """Serves `logs` at uEntity `entity`, version 1 of the authority of `local`: all of one streamer at 4, or what a
    publisher keeps itself at an instance of that (ids.of_publisher). Only publishes are visible.

    `access` says which of them a caller may see (None: all); it is asked with every look at a log. `counts`, since the
    start: polls, describes, records, gaps, refused (all that were), denied (those that may not), withheld (calls that
    matched what their caller may not see). `followers` counts, too.
    """

    def __init__(
        self,
        transport: UTransport,
        local: LocalUriProvider,
        logs: Iterable[Log],
        *,
        entity: int = ENTITY,
        access: Access | None = None,
        reply_bytes_max: int = REPLY_BYTES_MAX,
        replies_bytes_max: int = REPLIES_BYTES_MAX,
        share: int = CALLERS_SHARE,
        drain_ms_max: int = DRAIN_MS_MAX,
        followed_max: int = TOPICS_MAX,
        window_bytes_max: int | None = None,
        handing_over: HandingOver | None = None,
        keeper: Keeper | None = None,
    ) -> None:
        """`window_bytes_max`: pushed to one follower and not taken; None: as much as waits here for one authority, less
        an answer."""
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
        self._incarnations = {log.incarnation for log in self._logs}
        self._access = access if access is not None else Access()
        self._access_version = self._access.version
        self._matches = Matches(self._logs)
        self._waiting: set[Poll] = set()
        self._room = Shares[str](POLLS_WAITING_MAX, share=share)  # for those that wait, by authority
        self._turns = Turns(reply_bytes_max, self._server.responses.has_capacity, SEATS_MAX, share)
        self._server.responses.on_sent(self._turns.look)
        self._handing_over, self._keeper = handing_over, keeper
        if window_bytes_max is None:
            window_bytes_max = max(0, replies_bytes_max // share - reply_bytes_max)
        self.followers = Followers(
            self._matches,
            self._access.of,
            self._answer_counted,
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
        """Raises what the transport says."""
        self._stopping = False
        self.followers.open()
        self.consumers.load()
        for log in self._logs:
            self._seen[log] = log.newest_seq
            self._stop_listening.append(log.on_append(lambda log=log: self._appended(log)))  # type: ignore[misc]
        await self._server.register_request_handler(DESCRIBE, self._describe)
        await self._server.register_request_handler(POLL, self._poll)
        await self._server.register_request_handler(COMMAND, self._command)
        if self._keeper is not None:
            await self._server.register_request_handler(PROGRESS, self._progress)

    async def stop(self) -> None:
        """Answer the polls that wait, and take no more. May be called twice. The logs stay open."""
        self._stopping = True
        await self.followers.close()
        for poll in self._waiting:
            poll.woken.set()
        for end in self._stop_listening:
            end()
        self._stop_listening.clear()
        await self._server.close()

    @contextlib.contextmanager
    def _counted(self, what: str) -> Iterator[None]:
        """Around the part of a call in which it may be refused."""
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
            patterns = patterns_of(asked.topics, caller.authority_name)
            matches = self._matches.of(patterns, self._access.of(caller), caller.authority_name)
        async with self._turns.turn(caller.authority_name, request.attributes.ttl / 1000):
            response = await describe(matches, listing)
        self.counts["withheld"] += any(match.withholds for match in matches.values())
        return response

    # -- Progress

    async def _progress(self, request: UMessage) -> ProgressResponse:
        assert self._keeper is not None, "else nobody is heard"
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
                self.consumers.require(asked.push.poll.consumer, Owner.of(caller))
            answer = self.followers.command(asked, request.attributes)
            if asked.acked:
                self._acknowledge(asked, caller)
        if asked.HasField("hand_over"):
            if self._handing_over is None:
                raise UStatusError(UCode.PERMISSION_DENIED, "nothing is pushed from here that could be handed over")
            handed_over = await self._handing_over.asked(caller, asked.hand_over)
            del answer.handed_over[:]
            answer.handed_over.extend(handed_over)
        return answer

    def _acknowledge(self, asked: CommandRequest, caller: UUri) -> None:
        """Move the cursor of the consumer for whom it is pushed, and of who has taken over."""
        if self._handing_over is not None:
            self._handing_over.acknowledged(caller, {one.incarnation: one.seq for one in asked.acked})
        consumer, lease_ms = self.followers.consumer_of(asked, caller)
        for log in self._logs if consumer else ():
            for position in asked.acked:
                if position.incarnation == log.incarnation:
                    self.consumers.hold(consumer, Owner.of(caller), log, position.seq, lease_ms)

    # -- Poll

    async def _poll(self, request: UMessage) -> PollResponse:
        with self._counted("polls"):
            asked = UPayload.of(request).unpack(PollRequest)
            poll = checked(asked, request.attributes, uuids.now_ms())
            if asked.follower:
                poll.follower = self.followers.of(asked, poll.source)
            self._look_again(poll)
            if asked.consumer:
                self.consumers.require(asked.consumer, Owner.of(poll.source))
            if poll.acked and self._handing_over is not None:
                self._handing_over.acknowledged(poll.source, poll.acked)
        await self._answer_counted(poll)
        return poll.response

    async def _answer_counted(self, poll: Poll) -> None:
        if poll.follower is None:
            poll.response.more = await self._answer(poll)
        else:
            self.followers.begins(poll)
            try:
                poll.response.more = await self._answer(poll)
            finally:
                self.followers.ends(poll)
        self.counts["records"] += sum(len(batch.seq) for batch in poll.response.batches)
        self.counts["gaps"] += len(poll.response.gaps)

    def _look_again(self, poll: Poll) -> None:
        """What the caller may see now: that may have changed while it waited. Raises PERMISSION_DENIED."""
        sight = self._access.of(poll.source)
        if poll.follower is not None:
            poll.follower.look_again(sight)
            poll.sight, poll.matches = sight, poll.follower.matches
        elif poll.sight is None or poll.sight.key != sight.key:
            poll.sight, poll.matches = sight, self._matches.of(poll.patterns, sight, poll.caller)

    async def _place(self, poll: Poll) -> None:
        """Where to read each log on, and what of it is gone already."""
        response = poll.response
        for incarnation, seq in poll.positions.items():
            # Of a log that is gone and of which nothing was read nothing is missed, unless it is known to have had
            # records.
            is_gone = incarnation not in self._incarnations
            if is_gone and (seq or any(log.losses.knows_lost(incarnation) for log in self._logs)):
                response.gaps.append(gap_of(Gap.REASON_INCARNATION, incarnation, seq))
        for log in self._logs:
            if log.incarnation not in poll.positions:
                poll.places[log] = await self._start(log, poll)
                continue
            seq = poll.places[log] = poll.positions[log.incarnation]
            known = poll.known[log.incarnation]
            bounds = await witness.went_back(log, seq, known)
            if bounds is not None:
                differs, agreed = bounds
                # The file is no longer what it was (restored from a copy, say): what it has now from there on can't be
                # told apart.
                response.gaps.append(gap_of(Gap.REASON_CORRUPTION, log.incarnation, differs, agreed + 1))
                poll.places[log] = agreed
                poll.known[log.incarnation] = witness.up_to(known, agreed)
                poll.acked[log.incarnation] = min(agreed, poll.acked.get(log.incarnation, agreed))

    async def _start(self, log: Log, poll: Poll) -> int:
        asked = poll.asked
        start = asked.WhichOneof("start")
        if start == "latest" and asked.latest:
            return log.newest_seq
        if start == "after_time":
            seq = await log.seq_before_time(asked.after_time.ToMilliseconds())
        elif start == "after_message_id":
            found = await log.seq_of_id(asked.after_message_id)
            if found is not None and await self._sees_record(log, found, poll):
                return found
            # Not in this log, or no longer: whatever was appended after the id was made, and be it in the same
            # millisecond, is at least what follows it.
            seq = await log.seq_before_time(int.from_bytes(asked.after_message_id[:6], "big") - 1)
        else:
            return log.floor_seq
        if seq <= log.floor_seq and log.floor_seq:
            poll.response.gaps.append(gap_of(Gap.REASON_RETENTION, log.incarnation, 0, log.floor_seq + 1))
        return max(seq, log.floor_seq)

    async def _sees_record(self, log: Log, seq: int, poll: Poll) -> bool:
        """Whether the caller may know that this record is there, on whichever topic."""
        assert poll.sight is not None, "checked"
        if poll.sight is EVERYTHING:
            return True
        match = self._matches.of(patterns_of((), poll.caller), poll.sight, poll.caller)[log]
        await match.complete()
        return bool((await log.scan(seq - 1, max_records=1, max_bytes=1, until=seq, streams=match.ids)).chunks)

    def _hold(self, poll: Poll) -> None:
        """Let the consumer's cursor hold retention: at what it acknowledged, else where it was, else where it
        begins."""
        consumer = poll.asked.consumer
        for log, place in poll.places.items():
            known = log.cursors.seq(cursor_name(consumer))
            seq = poll.acked.get(log.incarnation, place if known is None else known)
            self.consumers.hold(consumer, Owner.of(poll.source), log, seq, poll.lease_ms + int(poll.wait_ms))
        poll.response.lease_ms = poll.lease_ms

    async def _answer(self, poll: Poll) -> bool:
        """Fill the response with what there is, or what comes while the poll may wait; True if there is more at hand.

        Who waits is on the list before it looks, so that nothing can come in between unnoticed.
        """
        time = asyncio.get_running_loop().time
        deadline, gives_up = time() + poll.wait_ms / 1000, time() + poll.left_ms / 1000
        full = self._room.full(poll.caller)
        if full is None:
            self._waiting.add(poll)
            self._room.add(poll.caller, 1)
        try:
            while True:
                poll.woken.clear()
                self._look_again(poll)
                is_done = await self._look(poll, gives_up - time())
                if is_done or poll.is_over or poll.is_cut or self._stopping or deadline <= time():
                    return is_done and bool(poll.pending)
                if full is not None:
                    whose = f" of authority {poll.caller!r}" if full.is_of_one else ""
                    what = f"{full.limit} polls{whose} wait already: try again later"
                    raise UStatusError(UCode.RESOURCE_EXHAUSTED, what)
                with contextlib.suppress(TimeoutError):  # then look once more: `next` covers what was not for this poll
                    async with asyncio.timeout_at(deadline):
                        await poll.woken.wait()
        finally:
            if full is None:
                self._waiting.discard(poll)
                self._room.add(poll.caller, -1)

    async def _look(self, poll: Poll, seconds: float) -> bool:
        """Read on when it is this caller's turn; True if there is something to answer."""
        response = poll.response
        async with self._turns.turn(poll.caller, seconds):
            for match in poll.matches.values():
                await match.complete()
            if not poll.places:
                self.counts["withheld"] += any(match.withholds for match in poll.matches.values())
                await self._place(poll)
                response.begin.extend(await _told(poll))
                poll.has_room = not poll.asked.frontiers or await add_frontiers(poll)
                if poll.asked.consumer:
                    self._hold(poll)
            complete = poll.has_room and await self._read_all(poll)
            del response.next[:]
            response.next.extend(await _told(poll))
            if not poll.positions:
                response.made.CopyFrom(uuids.new())
        return bool(response.batches or response.gaps or not complete)

    async def _read_all(self, poll: Poll) -> bool:
        """Read every log from its place on, each with its share of the reply, as far as the reply and some steps go.

        True if it came to the end of each log, as that was when it began.
        """
        complete, gaps = True, poll.response.gaps
        pending = poll.pending
        records, bytes = poll.records_max, poll.bytes_max
        thinning = poll.follower.thinning if poll.follower is not None else None
        for left, log in zip(range(len(pending), 0, -1), pending, strict=True):
            batch = RecordBatch(incarnation=log.incarnation)
            share_records, share_bytes = max(1, records // left), max(1, bytes // left)
            match = poll.matches[log]
            await match.complete()  # no step lies between this and the end: all that is read was looked at
            end = poll.end(log)
            for _ in range(POLL_STEPS_MAX):
                place = poll.places[log]
                if place >= end:
                    break
                found = await log.scan(
                    place,
                    max_records=share_records,
                    max_bytes=share_bytes,
                    streams=match.ids,
                    until=end,
                    strict=bool(batch.seq),  # a reply has one record at least, whatever its size
                )
                poll.places[log] = min(max(found.covered, place), end)
                if place < found.floor_seq and await match.has_passed(found.floor_seq, place):
                    gaps.append(gap_of(Gap.REASON_RETENTION, log.incarnation, place, found.floor_seq + 1))
                gaps.extend(gap_of(Gap.REASON_CORRUPTION, log.incarnation, *bounds) for bounds in found.gaps)
                for chunk in found.chunks if thinning is None else await thinning.all_of(log, found.chunks):
                    add_records(batch, chunk)
                records -= share_records - found.records_left
                bytes -= share_bytes - found.bytes_left
                share_records, share_bytes = found.records_left, found.bytes_left
                if found.full:
                    break
            if batch.seq:
                poll.response.batches.append(batch)
            complete = complete and poll.places[log] >= end
        return complete

    def _appended(self, log: Log) -> None:
        """Wake those for whom something came."""
        chunks = log.tail(self._seen[log])
        self._seen[log] = log.newest_seq
        if not self._waiting:
            return
        came: frozenset[int] = frozenset().union(*(chunk.stream_set for chunk in chunks or ()))
        is_old = self._access_version != self._access.version  # what is waited for may not be what may be seen now
        self._access_version = self._access.version
        hits: dict[int, bool] = {}  # by the identity of the match, which many polls may share
        for poll in self._waiting:
            match = poll.matches[log]
            hit = hits.get(id(match))
            if hit is None:
                hit = hits[id(match)] = chunks is None or not match.advance() or not match.ids.isdisjoint(came)
            if hit or is_old:
                poll.woken.set()


async def _told(poll: Poll) -> list[Position]:
    """Where it is in each log, with the record there as its witness: what the caller has brought, else from the log."""
    places = []
    for log, seq in poll.places.items():
        digest = poll.known.get(log.incarnation, {}).get(seq)
        witnesses = await witness.at(log, seq) if digest is None else [Witness(seq=seq, digest=digest)]
        places.append(Position(incarnation=log.incarnation, seq=seq, witnesses=witnesses, in_memory=not log.durable))
    return places
