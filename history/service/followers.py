"""The followers: the topics that each of them follows, so that its polls need not name them, and pushes to them.

Command -> number: next? -> changes, in order -> Follower: topics -> a match for each log
   |        '-- the same: the same answer         ^        '-- its waiting poll is answered; the next one has the change
   |                                              |
   |   Poll with a follower: no topics ----------'     lease over -> the follower and its state are removed
   '-> push -> Pushing: is its window open? -> poll on its behalf -> Frame: subscription, number, answer -> responses
                           ^ Command: frames_taken

The state is in memory and leased: after a restart of either side the follower sends everything again. A push is an
optimisation: the service does not record which frames have arrived.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Hashable, Iterable, Iterator
from typing import Final, NamedTuple, Protocol

import structlog

from history.log.log import Log
from history.records.chunk import Chunk, plain_address
from history.records.limits import PATTERNS_MAX, WILDCARD_PATTERNS_MAX, WINDOW_BYTES_MAX
from history.service.matches import Match, Matches, Sight, Sights, pattern_of
from history.service.poll import LEASE_MS_MAX, CheckedPoll, Poll, checked, consumer_lease_ms
from uprotocol import uri as uris
from uprotocol import uuid as uuids
from uprotocol.communication.rpc_server import Responses
from uprotocol.communication.shares import CALLERS_SHARE, Shares
from uprotocol.core.ustreamer.v1.ustreamer_pb2 import CommandRequest, CommandResponse, Frame, PollRequest, PollResponse
from uprotocol.core.ustreamer.v1.ustreamer_pb2 import Push as PushRequest
from uprotocol.message import UMessageBuilder
from uprotocol.status import UStatusError, invalid
from uprotocol.v1.uattributes_pb2 import UAttributes
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.umessage_pb2 import UMessage
from uprotocol.v1.uri_pb2 import UUri

FOLLOWERS_MAX: Final = 4_096  # one authority has at most a quarter: a client restarted every second for 17 minutes
# followed topics of all followers; some 500 bytes each. One authority has at most a quarter
TOPICS_MAX: Final = 65_536
FOLLOWER_BYTES: Final = 16  # of its name
LEASE_MS_DEFAULT: Final = 120_000  # four times the longest wait of our client
LEASE_MS_MIN: Final = 1_000
LEASES_CHECK_S: Final = 1.0  # between checks for expired leases
WINDOW_BYTES_MIN: Final = 64 << 10  # of each push, if there are many
WINDOW_FRAMES_MAX: Final = 1_024  # sent and not yet taken, if frames are small
TELL_SHARE: Final = 4  # the follower is asked for its progress after each quarter of the window
PUSH_WAIT_MS: Final = 10_000  # an empty frame is sent when nothing has come for this long
FRAME_TTL_MS: Final = 10_000  # the follower has polled the content of an older frame
RETRY_S: Final = 1.0  # after a refusal that is temporary

NOT_KEPT_MAX: Final = 100  # topics in an answer
KEPT_STEP: Final = 64  # topics in one step of the loop, some 1 ms
KEPT_S: Final = 5.0  # between two looks of one follower: a quarter of TOPICS_MAX takes 0.3 s of the processor

log = structlog.get_logger()

Caller = tuple[str, int, int]
FollowerKey = tuple[Caller, bytes]


def unknown() -> UStatusError:
    """Returns an error after which the caller sends everything again, under another name."""
    what = "no such follower here (any more), or not this number: choose another name, and begin with number 1"
    return UStatusError(UCode.NOT_FOUND, what)


def window_bytes_of_each(count: int, all: int, most: int = WINDOW_BYTES_MAX) -> int:
    """Returns the share of each of `count` pushes that have `all` bytes together, `most` at most."""
    return max(WINDOW_BYTES_MIN, min(most, all // max(1, count)))


def checked_push(asked: PushRequest, attributes: UAttributes) -> PushRequest:
    """Returns a valid request. Raises INVALID_ARGUMENT, PERMISSION_DENIED."""
    push = PushRequest()
    push.CopyFrom(asked)
    caller = attributes.source.authority_name
    push.sink.CopyFrom(uris.with_authority(asked.sink, caller))
    if push.sink.authority_name != caller:
        what = f"frames go to the caller's own authority {caller!r}, not to {uris.format(push.sink)}"
        raise UStatusError(UCode.PERMISSION_DENIED, what)
    uris.validate(push.sink)
    if push.sink.resource_id or uris.has_wildcard(push.sink):
        what = "the sink of frames is an address without wildcards and with resource 0"
        raise invalid(f"{what}, got {uris.format(push.sink)}")
    if push.poll.topics or push.poll.follower:
        raise invalid("expected the poll of a push without topics and follower: it is for the followed topics")
    if push.poll.plan_records:
        raise invalid("expected the poll of a push without `plan_records`: a push brings records")
    checked(push.poll, attributes)
    push.poll.wait_ms = PUSH_WAIT_MS
    return push


class Pushing:
    """Sends frames to one follower, as many bytes as its window allows. Ends by itself only if the poll is refused with
    an error that is not temporary."""

    def __init__(self, asked: PushRequest, follower: Follower, all: Followers) -> None:
        """`asked` is checked, and the push's own."""
        self._asked, self._follower, self._all = asked, follower, all
        self._request = asked.poll  # the next one
        self._not_taken: deque[tuple[int, int]] = deque()  # number and bytes of frames
        self._bytes = self.frames = 0
        self._last_tell = 0  # the last frame that asks for progress, and bytes sent since
        self._bytes_since_tell = 0
        self._opened = asyncio.Event()
        self.task = asyncio.create_task(self._run(), name="push")
        self.task.add_done_callback(lambda _: all.pushes.pop(self, None))

    @property
    def _window(self) -> int:
        return min(self._asked.window_bytes or WINDOW_BYTES_MAX, self._all.window_bytes())

    @property
    def consumer(self) -> tuple[str, int, str]:
        """The consumer's name, its lease in milliseconds, and its holder; "": no consumer."""
        return self._request.consumer, consumer_lease_ms(self._request), self._request.holder

    def taken(self, number: int) -> None:
        """Note that the follower has taken all frames up to this number."""
        while self._not_taken and self._not_taken[0][0] <= number:
            self._bytes -= self._not_taken.popleft()[1]
        self._opened.set()

    async def _run(self) -> None:
        while True:
            while self._not_taken and (self._bytes >= self._window or len(self._not_taken) >= WINDOW_FRAMES_MAX):
                if self._not_taken[0][0] > self._last_tell:  # the window has shrunk
                    here = self._request.positions
                    self._send(PollResponse(begin=here, next=here), tell=True)
                self._opened.clear()
                await self._opened.wait()
            try:
                self._send(await self._next())
            except UStatusError as error:
                if error.code not in (UCode.RESOURCE_EXHAUSTED, UCode.UNAVAILABLE):
                    log.warning("a push has ended", to=uris.format(self._asked.sink), why=str(error))
                    return
                await asyncio.sleep(RETRY_S)

    async def _next(self) -> PollResponse:
        attributes = UAttributes(id=uuids.new(), source=self._follower.caller, ttl=2 * PUSH_WAIT_MS)
        request = checked(self._request, attributes, bytes_max=self._window - self._bytes)
        response = await self._all.push(self._follower, request)
        del self._request.acked[:]  # from now on commands acknowledge
        del self._request.positions[:]
        self._request.positions.extend(response.next)
        self._request.frontiers_page = response.next_frontiers_page
        self._request.frontiers = bool(response.next_frontiers_page)
        return response

    def _send(self, answer: PollResponse, *, tell: bool = False) -> None:
        self.frames += 1
        frame = Frame(subscription=self._asked.subscription, number=self.frames, answer=answer)
        frame.tell = self._asks_for_progress(frame.ByteSize(), tell)
        builder = UMessageBuilder.notification(self._all.frames, self._asked.sink).with_ttl(FRAME_TTL_MS)
        message = builder.pack(frame)
        self._not_taken.append((self.frames, len(message.payload)))
        self._bytes += len(message.payload)
        self._all.post(message)

    def _asks_for_progress(self, bytes: int, now: bool) -> bool:
        self._bytes_since_tell += bytes
        are_many = (self.frames - self._last_tell) * TELL_SHARE >= WINDOW_FRAMES_MAX
        if not (now or are_many or self._bytes_since_tell * TELL_SHARE >= self._window):
            return False
        self._last_tell, self._bytes_since_tell = self.frames, 0
        return True


class Keeping(Protocol):
    """Says which topics enter the logs. `version` changes whenever an answer of `keeps` may change."""

    @property
    def version(self) -> Hashable: ...

    def keeps(self, topic: UUri, sees: Callable[[UUri], bool]) -> bool:
        """Returns whether a topic, or anything that a pattern matches, is kept. `sees(topic)`: whether the caller may
        know of a topic."""


class Thinning:
    """Keeps at most one record of a topic in each of its sample periods, by append time: the first one. It depends on
    the log alone, so a repeated request has the same answer. Made for one answer. A record that is left out is no gap:
    a record names as its predecessor the one before it in this answer, or none."""

    def __init__(self, period: Callable[[Log, int], int]) -> None:
        """`period`: of a stream in a log, in milliseconds; 0: all records are kept."""
        self._period = period
        self._newest: dict[tuple[Log, int], tuple[int, int]] = {}  # seq and time of the last record, kept or not
        self._kept: dict[tuple[Log, int], int] = {}  # seq of the last record that was kept

    async def thin(self, source: Log, chunk: Chunk) -> Chunk | None:
        """Returns the records that are kept; None: none."""
        if not any(self._period(source, stream) for stream in chunk.stream_set):
            return chunk
        kept: list[int] = []
        prev_seqs: list[int] = []
        for index, (seq, prev_seq, stream) in enumerate(zip(chunk.seqs, chunk.prev_seqs, chunk.streams, strict=True)):
            period, key = self._period(source, stream), (source, stream)
            if not period:
                kept.append(index)
                prev_seqs.append(prev_seq)
                continue
            before = await self._time_of(source, stream, prev_seq)
            self._newest[key] = seq, chunk.time_ms
            if before is None or before // period != chunk.time_ms // period:
                kept.append(index)
                prev_seqs.append(self._kept.get(key, 0))
                self._kept[key] = seq
        return chunk.pick(kept, prev_seqs) if kept else None

    async def _time_of(self, source: Log, stream: int, seq: int) -> int | None:
        """Returns the append time of a record in milliseconds; None: it is not there any more."""
        newest = self._newest.get((source, stream))
        if newest is not None and newest[0] == seq:
            return newest[1]
        if seq <= source.floor_seq:
            return None
        found = await source.scan(seq - 1, max_records=1, max_bytes=1, until=seq)
        return found.chunks[0].time_ms if found.chunks else None


class TopicChange(NamedTuple):
    """A topic or pattern that is followed from now on, or no longer."""

    address: bytes  # of the pattern
    topic: UUri
    is_wild: bool
    period_ms: int  # -1: no longer followed

    @property
    def follows(self) -> bool:
        return self.period_ms >= 0


class Follower:
    """The topics of one follower, and their matches. `topics`: serialized patterns, with their sample periods in
    milliseconds."""

    def __init__(self, key: FollowerKey, caller: UUri, matches: Matches, sight: Sight, lease_ms: int) -> None:
        self.key, self.caller, self.lease_ms = key, caller, lease_ms
        self.number, self.answer = 0, CommandResponse()
        self.not_kept: list[UUri] = []  # at the last look, ...
        self.kept_as_of: Hashable = None  # ... as of this version; None: the topics have changed since
        self.next_look = 0.0  # loop time
        self.was_denied = False  # a topic that its caller may not see
        self.ends_at = 0.0  # loop time
        self.topics: dict[bytes, int] = {}
        self.push: Pushing | None = None
        self.polls: dict[Poll, None] = {}  # all but the newest are being answered
        self._all, self._sight = matches, sight
        self.patterns: dict[bytes, UUri] = {}  # topics with wildcards
        self._periods: dict[tuple[Log, int], int] = {}  # cache, by stream
        self._thinned = 0  # topics with a period
        self._matches: dict[Log, Match] = matches.make((), sight)

    def __repr__(self) -> str:
        return f"Follower({self.key[1].hex()[:8]} of {self.key[0][0]}, {len(self.topics)} topics, {self.push})"

    def matches_for(self, sight: Sight) -> dict[Log, Match]:
        """Returns a match for each log. They are made again if the caller's sight has changed."""
        if sight.key != self._sight.key:
            self._sight = sight
            self._make_matches()
        return self._matches

    def change(self, changes: Iterable[TopicChange]) -> None:
        """Apply changes, each of another pattern. An exact topic examines its own streams; a pattern examines all
        streams once."""
        is_new_match = False
        for address, topic, is_wild, period_ms in changes:
            self.kept_as_of = None
            self._thinned += (period_ms > 0) - (self.topics.get(address, 0) > 0)
            if (address in self.topics) != (period_ms >= 0):
                is_new_match = is_new_match or is_wild
                for match in self._matches.values() if not is_wild else ():
                    match.add(topic) if period_ms >= 0 else match.discard(topic)
            if period_ms < 0:
                self.topics.pop(address, None)
                self.patterns.pop(address, None)
            else:
                self.topics[address] = period_ms
                if is_wild:
                    self.patterns[address] = topic
        self._periods.clear()
        if is_new_match:
            self._make_matches()

    def _make_matches(self) -> None:
        self._matches = self._all.make([UUri.FromString(address) for address in self.topics], self._sight)

    def cut(self, *, pushed: bool = True) -> None:
        """Answer its waiting polls at once; `pushed`: also those of its push."""
        for poll in self.polls:
            if pushed or not poll.is_pushed:
                poll.is_cut = True
                poll.woken.set()

    def stop_push(self) -> None:
        if self.push is not None:
            self.push.task.cancel()
            self.push = None

    def thinning(self) -> Callable[[Log, Chunk], Awaitable[Chunk | None]] | None:
        return Thinning(self._period).thin if self._thinned else None

    def _period(self, of: Log, stream: int) -> int:
        """Returns the shortest period of all patterns that match, in milliseconds."""
        known = self._periods.get((of, stream))
        if known is None:
            source = of.stream(stream).source if of.knows_stream(stream) else UUri()
            exact = self.topics.get(plain_address(source))
            periods = [self.topics[one] for one, pattern in self.patterns.items() if uris.matches(pattern, source)]
            known = min([*periods, *([] if exact is None else [exact])], default=0)
            if len(self._periods) >= TOPICS_MAX:
                self._periods.clear()
            self._periods[of, stream] = known
        return known


class Followers:
    """All followers of a service. `answer(poll)` fills a poll's response; raises UStatusError.

    `counts`: commands, frames, expired (leases).
    """

    def __init__(
        self,
        matches: Matches,
        sights: Sights,
        answer: Callable[[Poll], Awaitable[None]],
        responses: Responses,
        frames: UUri,
        *,
        share: int = CALLERS_SHARE,
        topics_max: int = TOPICS_MAX,
        window_bytes_max: int = WINDOW_BYTES_MAX,
    ) -> None:
        """`frames`: their topic. `window_bytes_max`: of one push; all pushes together have twice as much."""
        self._matches, self._sights, self._answer = matches, sights, answer
        self._responses, self.frames = responses, frames
        self._window_bytes_max = window_bytes_max
        self.pushes = dict[Pushing, None]()  # pushes that have not ended
        self._followers: dict[FollowerKey, Follower] = {}
        self._shares = Shares[str](FOLLOWERS_MAX, share=share)
        self._topics = Shares[str](topics_max, share=share)
        self._sweeping: asyncio.TimerHandle | None = None
        self._closed = False
        self.counts: Counter[str] = Counter()

    def __iter__(self) -> Iterator[Follower]:
        return iter(self._followers.values())

    def __len__(self) -> int:
        return len(self._followers)

    def __repr__(self) -> str:
        return f"Followers({len(self)}, {self.topic_count} topics, {len(self.pushes)} pushes)"

    @property
    def topic_count(self) -> int:
        return self._topics.pieces

    def open(self) -> None:
        """Accept commands again after `close`."""
        self._closed = False

    async def close(self) -> None:
        """End all pushes, forget all followers, and answer commands with UNAVAILABLE. May be called twice."""
        self._closed = True
        for follower in list(self._followers.values()):
            self._forget(follower)
        if self._sweeping is not None:
            self._sweeping.cancel()
            self._sweeping = None
        tasks = [push.task for push in self.pushes]  # including those that were stopped before
        await asyncio.gather(*tasks, return_exceptions=True)

    # -- polls

    def of(self, asked: PollRequest, caller: UUri) -> Follower:
        """Returns the follower of a poll, and renews its lease. Raises NOT_FOUND."""
        follower = self._followers.get((_caller(caller), asked.follower))
        # After a restart a late copy of its first command may have created it again, with the changes of that command
        # alone.
        if follower is None or follower.number < asked.number:
            raise unknown()
        self._touch(follower)
        return follower

    async def answer(self, follower: Follower, poll: Poll) -> None:
        """Fill the response of a poll of `follower`. An older poll of it that still waits is answered at once: its
        answer was lost on the way. Raises UStatusError."""
        if not poll.is_pushed:
            follower.cut(pushed=False)
        follower.polls[poll] = None
        try:
            await self._answer(poll)
        finally:
            follower.polls.pop(poll, None)
            if not poll.is_pushed:
                self._touch(follower)

    # -- commands

    def consumer_of(self, asked: CommandRequest, caller: UUri) -> tuple[str, int, str]:
        """Returns the consumer of the push, or "", its lease in milliseconds, and its holder."""
        push = self._followers[_caller(caller), asked.follower].push
        return push.consumer if push is not None else ("", 0, "")

    def command(self, asked: CommandRequest, attributes: UAttributes) -> CommandResponse:
        """Apply a command. Raises NOT_FOUND, INVALID_ARGUMENT, RESOURCE_EXHAUSTED, PERMISSION_DENIED or UNAVAILABLE;
        then nothing has changed."""
        if self._closed:
            raise UStatusError(UCode.UNAVAILABLE, "the history service is stopping: try again later")
        caller = attributes.source
        if len(asked.follower) != FOLLOWER_BYTES:
            raise invalid(f"expected a follower's name of {FOLLOWER_BYTES} bytes, got {len(asked.follower)}")
        known = self._known(asked, caller)
        if known is not None and asked.number == known.number:
            self._touch(known)
            return known.answer
        self.counts["commands"] += 1
        changes = _changes(asked, caller.authority_name)
        push = checked_push(asked.push, attributes) if asked.HasField("push") else None
        sight = self._sights.of(caller)
        exact = [(index, one.topic) for index, one in enumerate(changes) if one.follows and not one.is_wild]
        denied = {index for index, topic in exact if not sight.sees(topic, None)}
        follower = known or self._made(asked, caller, sight)
        try:
            self._change(follower, [change for index, change in enumerate(changes) if index not in denied])
        except UStatusError:
            if known is None:
                self._forget(follower)
            raise
        follower.number, follower.lease_ms = asked.number, _lease_ms(asked)
        follower.was_denied = follower.was_denied or bool(denied)
        # `done` is an id, not a time: the clock may go back, or stand still between this and a message
        follower.answer = CommandResponse(lease_ms=follower.lease_ms, denied=sorted(denied), done=uuids.new())
        self._touch(follower)
        if changes:
            follower.cut()
        self._apply_push(follower, asked, push)
        return follower.answer

    async def not_kept(self, asked: CommandRequest, caller: UUri, keeping: Keeping) -> list[UUri]:
        """Returns what of its topics is not kept here, as of KEPT_S ago at most, or as of its last look."""
        follower, time = self._followers[_caller(caller), asked.follower], asyncio.get_running_loop().time
        version = keeping.version
        if time() < follower.next_look or follower.kept_as_of == version:
            return [one for one in follower.not_kept if plain_address(one) in follower.topics]
        follower.kept_as_of, follower.next_look = version, time() + KEPT_S
        sight, found = self._sights.of(caller), list[UUri]()
        for count, address in enumerate(list(follower.topics), 1):
            topic = UUri.FromString(address)
            if not keeping.keeps(topic, lambda one: sight.sees(one, None)):
                found.append(topic)
                if len(found) == NOT_KEPT_MAX:
                    break
            if count % KEPT_STEP == 0:
                await asyncio.sleep(0)
        follower.not_kept = found
        return found

    def _known(self, asked: CommandRequest, caller: UUri) -> Follower | None:
        """Returns the follower of a command; None: it is the first command. Raises NOT_FOUND."""
        known = self._followers.get((_caller(caller), asked.follower))
        if asked.number != 1:
            if known is None or asked.number not in (known.number, known.number + 1):
                raise unknown()
        elif known is not None and known.number != 1:
            raise unknown()  # a late copy of its first command: a follower that begins again has another name
        return known

    def _apply_push(self, follower: Follower, asked: CommandRequest, push: PushRequest | None) -> None:
        if push is not None or asked.stop_push:
            follower.stop_push()
        if push is not None:
            follower.push = Pushing(push, follower, self)
            self.pushes[follower.push] = None
        elif follower.push is not None and asked.frames_taken:
            follower.push.taken(asked.frames_taken)

    # -- for pushes

    async def push(self, follower: Follower, request: CheckedPoll) -> PollResponse:
        """Returns the answer to a poll on behalf of the follower. Raises UStatusError."""
        sight = self._sights.of(follower.caller)
        poll = Poll(request, sight, follower.matches_for(sight), follower, is_pushed=True)
        await self.answer(follower, poll)
        return poll.response

    def window_bytes(self) -> int:
        """Returns the limit of each push, in bytes."""
        return window_bytes_of_each(len(self.pushes), 2 * self._window_bytes_max, self._window_bytes_max)

    def post(self, frame: UMessage) -> None:
        self.counts["frames"] += 1
        self._responses.post(frame)

    def _made(self, asked: CommandRequest, caller: UUri, sight: Sight) -> Follower:
        full = self._shares.full(caller.authority_name)
        if full is not None:
            whose = f" of authority {caller.authority_name!r}" if full.is_of_one else ""
            what = f"{full.limit} followers{whose} exist, which is the limit: wait until a lease ends"
            raise UStatusError(UCode.RESOURCE_EXHAUSTED, what)
        key = (_caller(caller), asked.follower)
        follower = self._followers[key] = Follower(key, caller, self._matches, sight, _lease_ms(asked))
        self._shares.add(caller.authority_name, 1)
        self._touch(follower)
        if self._sweeping is None:  # not at once: the lease of this one may end before its topics are counted
            self._sweeping = asyncio.get_running_loop().call_later(LEASES_CHECK_S, self._sweep)
        return follower

    def _change(self, follower: Follower, changes: Iterable[TopicChange]) -> None:
        """Apply all of the changes, or none. Raises RESOURCE_EXHAUSTED."""
        last = {change.address: change for change in changes}
        added = [one for one in last.values() if one.follows and one.address not in follower.topics]
        removed = [one for one in last.values() if not one.follows and one.address in follower.topics]
        authority, all = follower.caller.authority_name, self._topics
        free = min(all.each_pieces_max - all.pieces_of(authority), all.pieces_max - all.pieces)
        more = len(added) - len(removed)
        if more > free:
            what = f"{more} topics more, but only {free} are free: follow patterns, or fewer topics"
            raise UStatusError(UCode.RESOURCE_EXHAUSTED, what)
        wild = len(follower.patterns) + sum(one.is_wild for one in added) - sum(one.is_wild for one in removed)
        if wild > WILDCARD_PATTERNS_MAX:
            what = f"at most {WILDCARD_PATTERNS_MAX} of the topics may have wildcards, got {wild}"
            raise UStatusError(UCode.RESOURCE_EXHAUSTED, what)
        follower.change(last.values())
        all.add(authority, more)

    def sights_changed(self) -> None:
        """Callers may see other topics from now on. A follower that was denied one has to ask again: it is forgotten,
        as after a restart."""
        for follower in [one for one in self._followers.values() if one.was_denied]:
            self._forget(follower)

    # -- leases

    def _touch(self, follower: Follower) -> None:
        follower.ends_at = asyncio.get_running_loop().time() + follower.lease_ms / 1_000

    def _sweep(self) -> None:
        self._sweeping = None
        loop = asyncio.get_running_loop()
        now = loop.time()
        for follower in list(self._followers.values()):
            if follower.ends_at < now and all(poll.is_pushed or poll.is_cut for poll in follower.polls):
                self.counts["expired"] += 1
                self._forget(follower)
        if self._followers:
            self._sweeping = loop.call_later(LEASES_CHECK_S, self._sweep)

    def _forget(self, follower: Follower) -> None:
        del self._followers[follower.key]
        authority = follower.caller.authority_name
        self._shares.add(authority, -1)
        self._topics.add(authority, -len(follower.topics))
        follower.cut()
        follower.stop_push()


def _changes(asked: CommandRequest, caller: str) -> list[TopicChange]:
    """Returns the changes. Raises INVALID_ARGUMENT, RESOURCE_EXHAUSTED."""
    if len(asked.changes) > PATTERNS_MAX:
        what = f"expected at most {PATTERNS_MAX} changes, got {len(asked.changes)}: send several commands"
        raise UStatusError(UCode.RESOURCE_EXHAUSTED, what)
    found: list[TopicChange] = []
    for change in asked.changes:
        which = change.WhichOneof("change")
        if which is None:
            raise invalid("expected a change with follow or unfollow, got neither")
        topic = change.follow.topic if which == "follow" else change.unfollow
        pattern = pattern_of(topic.SerializeToString(), caller)
        period = change.follow.sample_period_ms if which == "follow" else -1
        found.append(TopicChange(plain_address(pattern.uri), pattern.uri, pattern.is_wild, period))
    return found


def _lease_ms(asked: CommandRequest) -> int:
    return max(LEASE_MS_MIN, min(asked.lease_ms or LEASE_MS_DEFAULT, LEASE_MS_MAX))


def _caller(source: UUri) -> Caller:
    return source.authority_name, source.ue_id, source.ue_version_major
