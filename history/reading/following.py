"""Following a history: one conversation, whatever is followed and however records come.

follow, unfollow -> Commands: one at a time, each again until it is answered --> the service
next(state) <- poll: one long poll, which names no topics
            <- push: frames, each only if it begins at or before our positions. A missing frame is replaced by a poll,
                     and a new push begins from there; frames of the old one are ignored
                     '-- nothing for a while: a poll checks whether a frame was missed

A push is an optimisation; polls decide. A reader that takes the answers with an Acceptor has every record once,
whatever the networks do with frames (Ernst, "The Push-Pull Publish-Subscribe Pattern"; the pubsub module of Ray for
the commands and the one long poll).
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import os
import random
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Literal, Self

from history.reading.acceptor import ReaderState, went_back
from history.reading.client import AGAIN, WAIT_MS_MAX, AnswerTimeout, FrontierPages, HistoryClient, Poller
from history.records.chunk import plain_address
from history.records.limits import CONSUMER_LEASE_MS, PATTERNS_MAX, WINDOW_BYTES_MAX
from history.records.record import Positions
from storage.runtime import settle
from uprotocol.core.ustreamer.v1.ustreamer_pb2 import (
    CommandRequest,
    Frame,
    Gap,
    HandOver,
    PollRequest,
    PollResponse,
    Position,
)
from uprotocol.status import UStatusError
from uprotocol.tasks import end, wait_until, wait_within
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.uri_pb2 import UUri
from uprotocol.v1.uuid_pb2 import UUID

LEASE_MS: Final = 120_000  # how long the service remembers a follower that says nothing
LEAVE_MS_MAX: Final = 1_000  # for the answer to the last poll of a holder
LOOKS_AGAIN_S: Final = 6.0  # after a change, and an answer that names other topics as not kept than the one before
ALIVE_SHARE: Final = 4  # of the lease: after this part of it a command is sent even if there is nothing to say
FRAMES_HELD_MAX: Final = 2_048  # frames in the queue, and twice the window in bytes; a service never sends more
# After a time without a frame, a poll checks whether one was missed: four times the usual time between frames, or that
# in which a call is answered, within these limits
QUIET_S_MIN: Final = 0.25
QUIET_S_MAX: Final = 30.0
QUIET_TIMES: Final = 4
QUIET_S_FIRST: Final = 2.0
# after so many misses in a row nothing is pushed for a while, with mode "auto"; how long
MISSES_MAX: Final = 3
REST_S_MIN: Final = 2.0
REST_S_MAX: Final = 300.0

FollowMode = Literal["auto", "poll", "push"]


@dataclass(frozen=True, slots=True)
class FollowingOptions:
    """`mode`: "poll"; "push" wherever the service and the network allow it; "auto": push, but poll for a while where
    pushes fail again and again.

    `start`: a PollRequest of which only `start` is read (None: earliest). It holds for logs of which the reader has no
    position, until the first answer. `consumer`, `consumer_lease_ms`, `max_records`, `max_bytes`: see PollRequest.
    `names_topics`: polls name the topics, and the service keeps nothing of us while it does not push.
    `acknowledges`: tell the service what is stored here even without a consumer. `rng`: for pauses. `random_bytes`: for
    names that nobody may use again: neither this reader after a restart, nor a process that is forked from this one.
    """

    mode: FollowMode = "auto"
    start: PollRequest | None = None
    consumer: str = ""
    consumer_lease_ms: int = 0
    max_records: int = 0
    max_bytes: int = 0
    wait_ms_max: int = WAIT_MS_MAX
    window_bytes: int = WINDOW_BYTES_MAX
    lease_ms: int = LEASE_MS
    names_topics: bool = False
    acknowledges: bool = False
    rng: random.Random | None = None
    random_bytes: Callable[[int], bytes] = os.urandom

    @property
    def held_ms_max(self) -> int:
        """How long another holder of the consumer may be one that has died: until its lease ends, if it was like ours,
        and a poll of it was still waiting."""
        return (self.consumer_lease_ms or CONSUMER_LEASE_MS) + WAIT_MS_MAX if self.consumer else 0

    def poll_request(self) -> PollRequest:
        """Returns what all polls have in common."""
        request = PollRequest()
        request.CopyFrom(self.start if self.start is not None else PollRequest(earliest=True))
        for field, _ in request.ListFields():
            if field.containing_oneof is None:
                request.ClearField(field.name)  # type: ignore[arg-type]
        request.consumer, request.lease_ms = self.consumer, self.consumer_lease_ms
        request.max_records, request.max_bytes = self.max_records, self.max_bytes
        return request


class NoFrame(enum.Enum):
    MISSED = enum.auto()  # one before it is missing
    QUIET = enum.auto()  # nothing came for some time
    ENDED = enum.auto()  # no push, or `next` was woken


class PushedFrames:
    """The frames of at most one push at a time: in order, without a gap, and none of an older push. It counts frames,
    repeated, missed, pushes and overrun in `counts`.

    begin -> request, for the next Command -> frames -> queue -> next -> an answer, or NoFrame

    `subscription`: of the push, as far as we know; 0: there is none. `request`: to begin or end one, not sent yet.
    `is_requested`: the service may be pushing. `rests_until`, loop time: pushes have failed again and again, so with
    mode "auto" there is none until then. `on_request` is called when `take_request` has something for the next Command.
    """

    def __init__(
        self,
        client: HistoryClient,
        timeout: AnswerTimeout,
        counts: Counter[str],
        options: FollowingOptions,
        on_request: Callable[[], None],
    ) -> None:
        self._client, self._timeout, self._counts, self._on_request = client, timeout, counts, on_request
        self._window, self._random_bytes = min(options.window_bytes, WINDOW_BYTES_MAX), options.random_bytes
        self.subscription = 0
        self.request: CommandRequest | None = None
        self.is_requested, self.rests_until = False, 0.0
        self._frames: deque[tuple[Frame, int]] = deque()  # with their bytes
        self._frames_bytes = 0
        self._woken = asyncio.Event()
        self.must_check = False  # `next` returns QUIET when no frame waits
        self._taken = 0  # the number of the last frame
        self._quiet_s, self._usual_s, self._last_at = QUIET_S_FIRST, 0.0, 0.0
        self._misses, self._rest_s = 0, REST_S_MIN

    # -- what the service is asked for

    async def begin(self, poll: PollRequest) -> None:
        """`poll`: from where it begins. Raises UStatusError as the transport does."""
        frames, topic = self._client.frames, self._client.frames_topic
        assert frames is not None, "a client without frames only polls"
        await frames.listen(topic)
        self.subscription = int.from_bytes(self._random_bytes(8), "big") or 1
        frames.expect(topic, self.subscription, self._on_frame)
        self._counts["pushes"] += 1
        request = self.request = CommandRequest()
        request.push.sink.CopyFrom(frames.to)
        request.push.subscription, request.push.window_bytes = self.subscription, self._window
        request.push.poll.CopyFrom(poll)
        self._taken, self._last_at = 0, asyncio.get_running_loop().time()
        self._on_request()

    def end(self) -> None:
        """Ignore its frames from now on."""
        if self.subscription and self._client.frames is not None:
            self._client.frames.forget(self._client.frames_topic, self.subscription)
        self.subscription, self.request = 0, None
        self._frames.clear()
        self._frames_bytes = 0

    def stop(self) -> None:
        """Ignore its frames, and ask the service to push nothing."""
        self.end()
        self.request, self.is_requested = CommandRequest(stop_push=True), False
        self._on_request()

    def take_request(self) -> CommandRequest:
        """Returns what the next Command says about the push."""
        request, self.request = self.request, None
        if request is not None:
            self.is_requested = request.HasField("push")
            return request
        return CommandRequest(frames_taken=self._taken) if self.subscription else CommandRequest()

    # -- frames

    def wake(self, *, check: bool = False) -> None:
        """Let `next` return if no frame has come: ENDED, with `check` QUIET."""
        self.must_check = self.must_check or check
        self._woken.set()

    def _on_frame(self, frame: Frame, bytes: int) -> None:
        if len(self._frames) >= FRAMES_HELD_MAX or self._frames_bytes > 2 * self._window:
            self._counts["overrun"] += 1  # the next frame is then found not to follow, and its records are polled
            return
        now = asyncio.get_running_loop().time()
        self._usual_s += (now - self._last_at - self._usual_s) / 8
        usual_s = max(self._usual_s, self._timeout.usual_ms / 1_000)
        self._quiet_s = min(QUIET_S_MAX, max(QUIET_S_MIN, QUIET_TIMES * usual_s))
        self._last_at = now
        self._frames.append((frame, bytes))
        self._frames_bytes += bytes
        self._woken.set()

    async def next(self, positions: Positions) -> PollResponse | NoFrame:
        """Returns the next answer that begins at or before `positions` and brings something beyond them."""
        while True:
            while self._frames:
                frame, bytes = self._frames.popleft()
                self._frames_bytes -= bytes
                self._counts["frames"] += 1
                if frame.number <= self._taken:
                    self._counts["repeated"] += 1
                    continue
                answer = frame.answer
                if not follows(answer.begin, positions) or any(map(is_of_log, answer.gaps)):
                    self._counts["missed"] += 1
                    return NoFrame.MISSED
                self._misses, self._rest_s, self._taken = 0, REST_S_MIN, frame.number
                if frame.tell:
                    self._on_request()
                if all(one.seq < positions.get(one.incarnation, -1) for one in answer.next):  # nothing beyond them
                    self._counts["repeated"] += 1
                    continue
                return answer
            self._woken.clear()
            if self.must_check:
                return NoFrame.QUIET
            if not await wait_until(self._woken, self._last_at + self._quiet_s):
                return NoFrame.QUIET
            if not self.subscription or not (self._frames or self.must_check):
                return NoFrame.ENDED

    # -- what was missed

    def mark(self) -> tuple[int, int]:
        """For `checked`: which push there is, and how many frames wait."""
        return self.subscription, len(self._frames)

    def checked(self, mark: tuple[int, int], answer: PollResponse | None) -> None:
        """A poll has checked whether a frame was missed; `mark` was taken before it."""
        self._last_at = asyncio.get_running_loop().time()
        if answer is not None and not answer.batches and not answer.gaps and not answer.more:
            self._quiet_s = min(QUIET_S_MAX, 2 * self._quiet_s)
        elif mark == self.mark():
            self.missed()

    def missed(self) -> None:
        """A frame did not arrive. This push ends, and the next one begins at the reader's positions; or, after several
        misses in a row, later."""
        self.end()
        self._misses += 1
        if self._misses >= MISSES_MAX:
            self.rests_until = asyncio.get_running_loop().time() + self._rest_s
            self._rest_s, self._misses = min(REST_S_MAX, 2 * self._rest_s), 0


def follows(begin: Iterable[Position], positions: Positions) -> bool:
    """Returns whether an answer begins at or before `positions`, so that no record lies between. Of a log that is not
    in `positions` that is not known."""
    return all(one.seq <= positions.get(one.incarnation, -1) for one in begin)


def is_of_log(gap: Gap) -> bool:
    """Returns whether a log went back, or no longer exists. That changes positions, so it is read again with polls, one
    at a time."""
    return gap.reason == Gap.REASON_INCARNATION or went_back(gap)


class Commands:
    """Tells the service what is followed: one Command at a time, each again until it is answered. If the service has
    forgotten us, all is sent again, under another name: names are random, so a command of before can't be taken for one
    of now.

    `topics`: what is followed, by serialized pattern, with its sample period in milliseconds. `acked`: what is stored
    on this side. `error`: why nothing is followed any more. The callbacks are those of Following.
    """

    def __init__(
        self,
        poller: Poller,
        pushed: PushedFrames,
        counts: Counter[str],
        options: FollowingOptions,
        on_denied: Callable[[UUri], None],
        on_forgotten: Callable[[], None],
        on_confirmed: Callable[[Sequence[UUri], UUID], None],
        on_not_kept: Callable[[Sequence[UUri]], None] | None,
    ) -> None:
        self._poller, self._pushed, self._counts = poller, pushed, counts
        self._options, self._lease_ms = options, options.lease_ms
        self._on_denied, self._on_forgotten, self._on_confirmed = on_denied, on_forgotten, on_confirmed
        self._on_not_kept = on_not_kept
        self._not_kept: list[UUri] = []
        self._again_s = 0.0  # the next command is due then at the latest; 0: when the lease asks for it
        self.topics: dict[bytes, tuple[UUri, int]] = {}
        self.acked: Positions = {}
        self.error: Exception | None = None
        self.follower, self.number = b"", 0
        self._unsent: dict[bytes, tuple[UUri, int]] = {}  # period -1: no longer followed
        self._task: asyncio.Task[None] | None = None
        self.woken = asyncio.Event()  # there is something to send
        self._confirmed = asyncio.Event()  # the service knows all changes
        self._hand_over: tuple[HandOver, asyncio.Future[list[Position]]] | None = None

    def start(self) -> None:
        """Begin under a new name, and send everything. After an error, too."""
        self.error = None
        self._begin_again()
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run(), name="follow")

    async def close(self) -> None:
        task, self._task = self._task, None
        await end(task)
        self._answer_hand_over(UStatusError(UCode.CANCELLED, "the following was closed"))

    def change(self, topic: UUri, period_ms: int) -> bool:
        """`period_ms` -1: no longer followed. Returns whether the topic is new."""
        address = plain_address(topic)
        is_new = address not in self.topics
        if period_ms >= 0:
            self.topics[address] = topic, period_ms
        elif is_new:
            return False
        else:
            del self.topics[address]
        self._unsent[address] = topic, period_ms
        self._confirmed.clear()
        self.woken.set()
        return is_new

    async def confirmed(self) -> None:
        """Wait until the service knows all changes so far, unless polls name the topics. Raises UStatusError."""
        while self.error is None and not self._options.names_topics and not self._confirmed.is_set():
            await self._confirmed.wait()
        if self.error is not None:
            raise self.error

    async def hand_over(self, asked: HandOver) -> list[Position]:
        """See HandOver; one at a time. Raises UStatusError."""
        if self.error is not None:
            raise self.error
        assert self._hand_over is None or self._hand_over[1].done(), "the one before is answered"
        answered: asyncio.Future[list[Position]] = asyncio.get_running_loop().create_future()
        self._hand_over = asked, answered
        self.woken.set()
        return await answered

    def forgotten(self) -> None:
        """The service does not know the follower: it was restarted, or the lease has ended. Raises UStatusError as
        `on_forgotten` does."""
        self._counts["retold"] += 1
        try:
            self._on_forgotten()
        except UStatusError as error:
            self.error = error
            raise
        self._begin_again()

    def _begin_again(self) -> None:
        self._pushed.end()
        self._pushed.is_requested = False  # the service knows nothing of us
        self.follower, self.number = self._options.random_bytes(16), 0
        self._unsent = dict(self.topics)
        self._confirmed.clear()
        self.woken.set()

    async def _run(self) -> None:
        try:
            while True:
                await wait_within(self.woken, self._again_s or self._lease_ms / ALIVE_SHARE / 1_000)
                self.woken.clear()
                is_needed = not self._options.names_topics or self._pushed.subscription or self._pushed.request
                if is_needed:  # where polls name the topics, commands are only for pushes
                    await self._send()
        except Exception as error:
            self.error = error
            self._confirmed.set()
            self._pushed.wake()
            self._answer_hand_over(error)

    async def _send(self) -> None:
        """Send one command, again until it is answered. Raises UStatusError if it is refused."""
        asked, changes = self._next()
        while True:
            try:
                answer = await self._poller.command(asked)
                break
            except UStatusError as error:
                if error.code == UCode.NOT_FOUND and asked.number > 1:
                    self.forgotten()
                    return
                if asked.HasField("hand_over") and error.code not in AGAIN:
                    self.number = asked.number  # if the service did not count it, the next command is not known there
                    self._answer_hand_over(error)
                    return
                if not self._poller.asks_again(error):
                    raise
            await self._poller.backoff.wait()
        self.number = asked.number
        self._counts["commands"] += 1
        for index in answer.denied:
            if index < len(changes):
                self._on_denied(changes[index])
        if answer.lease_ms:
            self._lease_ms = answer.lease_ms
        self._on_confirmed(changes, answer.done)
        if asked.asks_kept and self._on_not_kept is not None:
            self._again_s = LOOKS_AGAIN_S if changes or self._not_kept != list(answer.not_kept) else 0.0
            self._not_kept = list(answer.not_kept)
            self._on_not_kept(self._not_kept)
        if not self._unsent:
            self._confirmed.set()
        if asked.HasField("hand_over"):
            self._answer_hand_over(list(answer.handed_over))

    def _next(self) -> tuple[CommandRequest, list[UUri]]:
        """Returns the next command, and the topics of its changes."""
        asked = CommandRequest(follower=self.follower, number=self.number + 1, lease_ms=self._lease_ms)
        changes: list[UUri] = []
        for address in list(self._unsent)[:PATTERNS_MAX]:
            topic, period_ms = self._unsent.pop(address)
            changes.append(topic)
            change = asked.changes.add()
            if period_ms < 0:
                change.unfollow.CopyFrom(topic)
            else:
                change.follow.topic.CopyFrom(topic)
                change.follow.sample_period_ms = period_ms
        if self._unsent:
            self.woken.set()
            return asked, changes
        asked.MergeFrom(self._pushed.take_request())
        asked.asks_kept = self._on_not_kept is not None
        asked.acked.extend(self.acked_positions())
        if self._hand_over is not None and changes:  # in a command of its own: it may be refused, the changes are not
            self.woken.set()
        elif self._hand_over is not None:
            asked.hand_over.CopyFrom(self._hand_over[0])
        return asked, changes

    def acked_positions(self) -> Iterator[Position]:
        return (Position(incarnation=one, seq=seq) for one, seq in self.acked.items())

    def _answer_hand_over(self, answer: list[Position] | Exception) -> None:
        asked, self._hand_over = self._hand_over, None
        if asked is not None:
            settle(asked[1], answer)


class Following:
    """What is followed at one service, and the answers: `async with`, then `follow` and `next`.

    `mode` may be set at any time. `holder`: see PollRequest; set it before the first `next`. `has_begun`: a log that
    the reader has no position of is a new one, to be read from its beginning. `wants_frontiers`: ask for frontiers with
    the next answers; an answer that has them sets it to False.
    `counts`: commands, retold (the service had forgotten us), polls, frames, repeated, missed (frames before which one
    was missing), quiet (polls because nothing came), pushes, overrun.

    `on_denied(topic)` is called for a topic that we may not see; `on_forgotten()` if the service was restarted, or our
    lease had ended. An exception that they raise ends this; otherwise everything is sent again. `on_confirmed(topics,
    done)`: from now on the service follows these topics, or no longer, for messages with an id later than `done`.
    `on_not_kept(topics)`, with each answer to a command: of what is followed, the service keeps nothing of `topics`.
    """

    def __init__(
        self,
        client: HistoryClient,
        options: FollowingOptions | None = None,
        *,
        on_connected: Callable[[bool], None] | None = None,
        on_denied: Callable[[UUri], None] = lambda _: None,
        on_forgotten: Callable[[], None] = lambda: None,
        on_confirmed: Callable[[Sequence[UUri], UUID], None] = lambda *_: None,
        on_not_kept: Callable[[Sequence[UUri]], None] | None = None,
    ) -> None:
        options = self._options = options if options is not None else FollowingOptions()
        self.mode: FollowMode = options.mode
        self.holder = ""
        self.has_begun = self.wants_frontiers = False
        self.counts = counts = Counter[str]()
        self._client, self._base = client, options.poll_request()
        self._poller = Poller(
            client,
            wait_ms_max=options.wait_ms_max,
            on_connected=on_connected,
            rng=options.rng,
            held_ms_max=options.held_ms_max,
        )
        self._frontiers = FrontierPages(client.authority)
        self._pushed = PushedFrames(
            client, self._poller.timeout, counts, options, on_request=lambda: self.commands.woken.set()
        )
        self.commands = Commands(
            self._poller, self._pushed, counts, options, on_denied, on_forgotten, on_confirmed, on_not_kept
        )
        self._interrupted = asyncio.Event()  # the poll that is running is given up
        self._additions = 0  # how often a topic was added

    def __repr__(self) -> str:
        how = "pushed" if self.is_pushed else "polled"
        return f"Following({self._client.authority}, {len(self.topics)} topics, {how}, {dict(self.counts)})"

    @property
    def connected(self) -> bool:
        return self._poller.connected

    @property
    def is_pushed(self) -> bool:
        """There is a push, as far as we know."""
        return self._pushed.subscription != 0

    @property
    def topics(self) -> list[UUri]:
        """The topics that are followed, whether or not the service knows it already."""
        return [topic for topic, _ in self.commands.topics.values()]

    def check_now(self) -> None:
        """Something may have come that did not reach us: poll at once."""
        self._interrupted.set()
        self._pushed.wake(check=True)
        self._poller.backoff.wake()

    async def __aenter__(self) -> Self:
        self.commands.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        """The service forgets us when our lease ends."""
        await self.commands.close()
        self._pushed.end()

    async def leave(self, acked: Positions) -> None:
        """After the end: let the next holder use the consumer at once, whose cursor is at `acked`. Best effort."""
        if not (self._base.consumer and self.holder and self.connected):
            return
        asked = PollRequest(consumer=self._base.consumer, lease_ms=self._base.lease_ms, max_records=1)
        asked.holder, asked.leaves = self.holder, True
        for positions in (asked.positions, asked.until, asked.acked):  # reads nothing
            positions.extend(Position(incarnation=one, seq=seq) for one, seq in acked.items())
        for follower in (self.commands.follower, b"") if self._pushed.is_requested else (b"",):
            asked.follower = follower  # whose push ends, too, if the service has got the command that began it
            with contextlib.suppress(UStatusError):
                await self._client.poll(asked, patience_ms=LEAVE_MS_MAX)
                return

    # -- what is followed

    def follow(self, topic: UUri, sample_period_ms: int = 0) -> None:
        """Follow a topic or a pattern, from the positions with which `next` was last called. Called again for the same
        topic, it changes the sample period. The service is told with the next command."""
        if self.commands.change(topic, sample_period_ms):
            # An answer that was asked for without the topic must not move the positions past its records.
            self._additions += 1
            self._pushed.end()
            self._pushed.wake()
            self._interrupted.set()

    def unfollow(self, topic: UUri) -> None:
        """Stop following exactly this topic or pattern; nothing happens if it is not followed."""
        self.commands.change(topic, -1)

    async def begin_again(self) -> None:
        """Continue after a refusal, after a pause."""
        await self._poller.backoff.wait()
        self.commands.start()

    # -- answers

    async def next(self, state: ReaderState, acked: Positions | None = None) -> PollResponse | None:
        """Returns the next answer, to be taken with an Acceptor that has `state`; None: no answer yet, call again.

        `acked`: up to these positions all is stored on this side, for the consumer. Raises UStatusError if the service
        refuses.
        """
        if acked is not None:
            self.commands.acked = acked
        if self.commands.error is not None:
            raise self.commands.error
        pushed = self._pushed
        # the first answer is polled: a lost first frame would not be noticed
        is_first = self.wants_frontiers or not state.positions
        rests = self.mode == "auto" and asyncio.get_running_loop().time() < pushed.rests_until
        if self.mode == "poll" or self._client.frames is None or rests:
            if pushed.subscription or pushed.is_requested:
                pushed.stop()
            # a service that is not known to be there is asked to answer at once, which shows that it is
            return await self._poll(state, at_once=is_first or not self._poller.connected)
        if is_first:
            return await self._poll(state, at_once=True)
        if not pushed.subscription:
            await pushed.begin(self._request(state))
            if self.commands.error is not None:
                raise self.commands.error
        answer = await pushed.next(state.positions)
        if isinstance(answer, PollResponse):
            return answer
        if answer is NoFrame.ENDED:
            return None
        if answer is NoFrame.MISSED:
            pushed.missed()
            return await self._poll(state, at_once=True)
        self.counts["quiet"] += 1
        mark = pushed.mark()
        polled = await self._poll(state, at_once=True)
        pushed.checked(mark, polled)
        return polled

    async def _poll(self, state: ReaderState, *, at_once: bool) -> PollResponse | None:
        request, commands = self._request(state), self.commands
        if self._options.names_topics:
            request.topics.extend(topic for topic, _ in commands.topics.values())
        else:
            await commands.confirmed()
            request.follower, request.number = commands.follower, commands.number
        self.counts["polls"] += 1
        self._pushed.must_check = False
        additions = self._additions
        # given up when `check_now` is called: a network may have lost it without an error
        self._interrupted.clear()
        polling = asyncio.ensure_future(self._poller.poll(request, at_once=at_once))
        interrupted = asyncio.ensure_future(self._interrupted.wait())
        try:
            await asyncio.wait((polling, interrupted), return_when=asyncio.FIRST_COMPLETED)
            answer = polling.result() if polling.done() else None
        except UStatusError as error:
            if error.code != UCode.NOT_FOUND or not request.follower:
                raise
            if request.follower == commands.follower:
                commands.forgotten()
            return None
        finally:
            await end(polling, interrupted)
        if answer is None or additions != self._additions:
            return None
        if request.frontiers:
            self.wants_frontiers = not self._frontiers.take(answer)
        self.has_begun = True
        return answer

    def _request(self, state: ReaderState) -> PollRequest:
        request = PollRequest()
        request.CopyFrom(self._base)
        if request.consumer:
            request.holder = self.holder
        if self.has_begun:
            request.earliest = True
        request.positions.extend(state.request())
        if self.wants_frontiers:
            self._frontiers.ask(request)
        if request.consumer or self._options.acknowledges:
            request.acked.extend(self.commands.acked_positions())
        return request
