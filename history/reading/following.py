"""Following a history: one conversation, whatever is followed and however it comes.

follow, unfollow -> what has changed --one Command at a time--> the service      it has forgotten us: all is told again
next(places) <- poll: one long poll, which names no topics
             <- push: frames, each only where it begins at or before our places; what is missing is polled,
                      and pushed anew from there, under another id: frames of the old one are ignored
                      '-- nothing for a while: a poll tells whether something was missed

A push is an optimisation, and what was polled is the truth: whoever takes these answers with an Acceptor has every
record once, whatever the networks do with frames (Ernst, "The Push-Pull Publish-Subscribe Pattern"; the pubsub module
of Ray for the commands and the one long poll).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any, Final, Literal, Self

import structlog

from history.reading.acceptor import Places, Positions, went_back
from history.reading.client import AGAIN, FrontierPages, HistoryClient, Poller
from history.records.stream import plain_address
from history.service.pushing import WINDOW_BYTES_MAX
from history.service.request import PATTERNS_MAX
from uprotocol.core.ustreamer.v1.ustreamer_pb2 import (
    CommandRequest,
    CommandResponse,
    Frame,
    Gap,
    HandOver,
    PollRequest,
    PollResponse,
    Position,
)
from uprotocol.status import UStatusError
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.uri_pb2 import UUri
from uprotocol.v1.uuid_pb2 import UUID

LEASE_MS: Final = 120_000  # of the service's memory of us
ALIVE_SHARE: Final = 4  # of it: so often we say something, though nothing comes
FRAMES_HELD_MAX: Final = 2_048  # that we have not looked at, and twice the bytes of the window: more nobody may send
# how long nothing may come until we look whether something was missed: four times what is usual between frames, or for
# a call to be answered, within these
QUIET_S_MIN: Final = 0.25
QUIET_S_MAX: Final = 30.0
QUIET_TIMES: Final = 4
QUIET_S_FIRST: Final = 2.0
# misses in a row after which we poll for a while, and how long
MISSES_MAX: Final = 3
REST_S_MIN: Final = 2.0
REST_S_MAX: Final = 300.0

Mode = Literal["auto", "poll", "push"]

log = structlog.get_logger()


class Following:
    """What is followed at one service, and what comes of it: `async with`, then `follow` and `next`.

    `mode`: "poll"; "push" wherever the service and the network let us; "auto": push, and poll for a while where pushes
    fail again and again. It may be changed at any time. Nothing but the places has to be kept by anybody.
    `counts`: commands, retold (the service had forgotten us), polls, frames, stale (of an ended push), repeated, missed
    (frames of which one before was missing), quiet (looks), pushes, unreadable, overrun.
    `on_denied(topic)` is called for what we may not see, `on_forgotten()` if the service was restarted, or our lease
    was over: what they raise ends us. Else everything is told again. `on_told(topics, done)`: what is published there
    under a later id than this is followed, or not any more.
    """

    def __init__(
        self,
        client: HistoryClient,
        *,
        mode: Mode = "auto",
        start: PollRequest | None = None,
        consumer: str = "",
        consumer_lease_ms: int = 0,
        max_records: int = 0,
        max_bytes: int = 0,
        wait_ms_max: int | None = None,
        window_bytes: int = WINDOW_BYTES_MAX,
        lease_ms: int = LEASE_MS,
        plain: bool = False,
        acks: bool = False,
        on_connected: Callable[[bool], None] | None = None,
        on_denied: Callable[[UUri], None] = lambda _: None,
        on_forgotten: Callable[[], None] = lambda: None,
        on_told: Callable[[Sequence[UUri], UUID], None] = lambda *_: None,
        rng: random.Random | None = None,
        random_bytes: Callable[[int], bytes] = os.urandom,
    ) -> None:
        """`start`: a PollRequest of which only `start` is read, for logs that `next` is not told a place of, until the
        first answer. Then, and where `has_begun` is set, a log that is not known is a new one: nothing of it was before
        us. `plain`: polls name the topics, and the service keeps nothing of us while it does not push. `acks`: say what
        is safe with us, though we have no consumer. `rng`: for pauses; `random_bytes`: for names that nobody may have
        again, nor we after a restart, nor a process that is forked from this one."""
        self.mode: Mode = mode
        self._client, self._plain, self._acks = client, plain, acks
        self._on_denied, self._on_forgotten, self._on_told = on_denied, on_forgotten, on_told
        self._random_bytes = random_bytes
        waits = {} if wait_ms_max is None else {"wait_ms_max": wait_ms_max}
        self._poller = Poller(client, on_connected=on_connected, rng=rng, **waits)
        self._base = PollRequest()
        self._base.CopyFrom(start if start is not None else PollRequest(earliest=True))
        for name in ("topics", "positions", "acked", "until"):
            self._base.ClearField(name)
        limits = PollRequest(
            consumer=consumer, lease_ms=consumer_lease_ms, max_records=max_records, max_bytes=max_bytes
        )
        self._base.MergeFrom(limits)
        self.has_begun = False
        self._window, self._lease_ms = min(window_bytes, WINDOW_BYTES_MAX), lease_ms
        # what is to be followed, by pattern, and what of it the service has not been told
        self._topics: dict[bytes, tuple[UUri, int]] = {}
        self._untold: dict[bytes, tuple[UUri, int]] = {}  # period -1: not any more
        self._acked: Positions = {}
        self._speaking: asyncio.Task[None] | None = None
        self._say = asyncio.Event()
        self._told = asyncio.Event()
        self._follower, self._number = b"", 0
        self._error: Exception | None = None  # of speaking: why there is nothing to be had
        self.knows_commands = True  # the service does, as far as we know
        self.wants_frontiers = False  # with the next answers; when one has them, this is False again
        self._frontiers = FrontierPages(client.authority)
        self._hand_over: deque[tuple[HandOver, asyncio.Future[list[Position]]]] = deque()
        # the push there is
        self._subscription = 0
        self._is_asked = False  # the service may be pushing
        self._push: CommandRequest | None = None  # asked for and not answered
        self._frames: deque[tuple[Frame, int]] = deque()  # with their bytes
        self._frames_bytes = 0
        self._came = asyncio.Event()
        self._rung = asyncio.Event()
        self._asks = 0  # how often more was wanted
        self._taken = 0  # the number of the last frame
        self._quiet_s, self._usual_s, self._came_at = QUIET_S_FIRST, 0.0, 0.0
        self._misses, self._rest_s, self._rests_until = 0, REST_S_MIN, 0.0
        self.counts: Counter[str] = Counter()

    def __repr__(self) -> str:
        how = "pushed" if self.is_pushed else "polled"
        return f"Following({self._client.authority}, {len(self._topics)} topics, {how}, {dict(self.counts)})"

    @property
    def connected(self) -> bool:
        return self._poller.connected

    @property
    def is_pushed(self) -> bool:
        """There is a push, as far as we know."""
        return self._subscription != 0

    @property
    def topics(self) -> list[UUri]:
        """What is followed, as far as we say."""
        return [topic for topic, _ in self._topics.values()]

    def ring(self) -> None:
        """Something may have come that we have not heard of: look now."""
        self._rung.set()
        self._came.set()
        self._poller.wake()

    async def __aenter__(self) -> Self:
        self._begin_anew()
        self._speaking = asyncio.create_task(self._speak(), name="follow")
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """The service forgets us when our lease is over. May be called twice."""
        speaking, self._speaking = self._speaking, None
        if speaking is not None:
            speaking.cancel()
            await asyncio.gather(speaking, return_exceptions=True)
        self._refuse_hand_overs(UStatusError(UCode.CANCELLED, "nothing is followed any more"))
        self._end_push()

    # -- what is followed

    def follow(self, topic: UUri, sample_period_ms: int = 0) -> None:
        """A topic or a pattern, from the places on at which `next` was called last; again: its period is another one.
        Done with the next command."""
        self._want(plain_address(topic), topic, sample_period_ms)

    def unfollow(self, topic: UUri) -> None:
        """It must be followed just like that; else nothing happens."""
        address = plain_address(topic)
        if address in self._topics:
            self._want(address, topic, -1)

    def _want(self, address: bytes, topic: UUri, period_ms: int) -> None:
        if period_ms < 0:
            del self._topics[address]
        else:
            if address not in self._topics:
                self._stand_still()
            self._topics[address] = topic, period_ms
        self._untold[address] = topic, period_ms
        self._told.clear()
        self._say.set()

    def _stand_still(self) -> None:
        """What was asked for, or is pushed, without a topic must not take us past what there is of it."""
        self._asks += 1
        self._end_push()
        self._rung.set()
        self._came.set()

    async def begin_again(self) -> None:
        """After a refusal, and a pause."""
        await self._poller.pause()
        self._error = None
        self._end_push()
        self._begin_anew()
        if self._speaking is not None and self._speaking.done():
            self._speaking = asyncio.create_task(self._speak(), name="follow")

    async def told(self) -> None:
        """All that was wanted up to now is known there, or is named with each poll. Raises UStatusError."""
        while self._error is None and self.knows_commands and not self._plain and not self._told.is_set():
            await self._told.wait()
        if self._error is not None:
            raise self._error

    async def hand_over(self, asked: HandOver) -> list[Position]:
        """See HandOver. Raises UStatusError."""
        if not self.knows_commands:
            raise self._no_commands()
        if self._error is not None:
            raise self._error
        answered: asyncio.Future[list[Position]] = asyncio.get_running_loop().create_future()
        self._hand_over.append((asked, answered))
        self._say.set()
        return await answered

    # -- commands, one after the other

    def _begin_anew(self) -> None:
        """Under another name: so that no command of before can be taken for one of now."""
        self._follower, self._number = self._random_bytes(16), 0
        self._is_asked = False
        self._untold = dict(self._topics)
        self._told.clear()
        self._say.set()

    def _forgotten(self) -> None:
        """By the service: it was restarted, or our lease is over."""
        self.counts["retold"] += 1
        self._end_push()
        try:
            self._on_forgotten()
        except UStatusError as error:
            self._error = error
            raise
        self._begin_anew()

    async def _speak(self) -> None:
        try:
            while True:
                alive_s = self._lease_ms / ALIVE_SHARE / 1_000
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(alive_s):
                        await self._say.wait()
                self._say.clear()
                if self.knows_commands and (not self._plain or self._push is not None or self.is_pushed):
                    await self._command()
        except Exception as error:
            self._error = error
            self._told.set()
            self._came.set()
            self._refuse_hand_overs(error)

    async def _command(self) -> None:
        """Say what there is to say, again until it is heard. Raises UStatusError if it is refused."""
        asked, changes = self._next_command()
        while True:
            try:
                answer = await self._poller.command(asked)
                break
            except UStatusError as error:
                if error.code == UCode.NOT_FOUND and asked.number > 1:
                    self._forgotten()
                    return
                if error.code == UCode.UNIMPLEMENTED and asked.number == 1:
                    self._become_plain()
                    return
                if asked.HasField("hand_over") and error.code not in AGAIN:
                    self._number = asked.number  # if that was not counted there, we are not known by the next one
                    self._answer_hand_over(error)
                    return
                if error.code not in AGAIN:
                    raise
            await self._poller.pause()
        self._number = asked.number
        self.counts["commands"] += 1
        self._hear(answer, changes)
        if asked.HasField("hand_over"):
            self._answer_hand_over(list(answer.handed_over))

    def _answer_hand_over(self, answer: list[Position] | UStatusError) -> None:
        _, waiting = self._hand_over.popleft()
        if self._hand_over:
            self._say.set()
        if waiting.done():
            return
        if isinstance(answer, UStatusError):
            waiting.set_exception(answer)
        else:
            waiting.set_result(answer)

    def _next_command(self) -> tuple[CommandRequest, list[UUri]]:
        asked = CommandRequest(follower=self._follower, number=self._number + 1, lease_ms=self._lease_ms)
        changes: list[UUri] = []
        for address in list(self._untold)[:PATTERNS_MAX]:
            topic, period_ms = self._untold.pop(address)
            changes.append(topic)
            change = asked.changes.add()
            if period_ms < 0:
                change.unfollow.CopyFrom(topic)
            else:
                change.follow.topic.CopyFrom(topic)
                change.follow.sample_period_ms = period_ms
        if self._untold:
            self._say.set()
            return asked, changes
        if self._push is not None:
            self._is_asked = self._push.HasField("push")
            asked.MergeFrom(self._push)
            self._push = None
        elif self._subscription:
            asked.frames_taken = self._taken
        asked.acked.extend(Position(incarnation=one, seq=seq) for one, seq in self._acked.items())
        if self._hand_over and changes:  # it may be refused, and they not
            self._say.set()
        elif self._hand_over:
            asked.hand_over.CopyFrom(self._hand_over[0][0])
        return asked, changes

    def _hear(self, answer: CommandResponse, changes: list[UUri]) -> None:
        for place in answer.denied:
            if place < len(changes):
                self._on_denied(changes[place])
        if answer.lease_ms:
            self._lease_ms = answer.lease_ms
        self._on_told(changes, answer.done)
        if not self._untold:
            self._told.set()

    def _become_plain(self) -> None:
        """Each poll names all topics, as it was before there were commands. Raises UNIMPLEMENTED."""
        if any(period_ms for _, period_ms in self._topics.values()):
            what = f"the history of {self._client.authority} knows no sample periods: follow without"
            raise UStatusError(UCode.UNIMPLEMENTED, what)
        self.knows_commands = False
        self._end_push()
        self._told.set()
        self._refuse_hand_overs(self._no_commands())

    def _no_commands(self) -> UStatusError:
        return UStatusError(UCode.UNIMPLEMENTED, f"{self._client.authority} knows no commands")

    def _refuse_hand_overs(self, error: Exception) -> None:
        while self._hand_over:
            _, waiting = self._hand_over.popleft()
            if not waiting.done():
                waiting.set_exception(error)

    # -- answers

    async def next(self, places: Places, acked: Positions | None = None) -> PollResponse | None:
        """The next answer, to be taken with an Acceptor that is at `places`; None: there is none yet, call again.

        `acked`: all up to here is safe with us, for the consumer. Raises UStatusError if the service refuses.
        """
        if acked is not None:
            self._acked = acked
        if self._error is not None:
            raise self._error
        if not self._may_push:
            if self._subscription or self._is_asked:
                self._end_push(tell=True)
            # a service that is not known to be there is asked for an answer at once, which shows that it is
            at_once = self.wants_frontiers or not places.positions or not self.connected
            return await self._poll(places, at_once=at_once)
        if self.wants_frontiers or not places.positions:  # a first frame that is lost would not be missed
            return await self._poll(places, at_once=True)
        if not self._subscription:
            await self._client.listen()
            self._begin_push(places)
        return await self._next_frame(places)

    @property
    def _may_push(self) -> bool:
        if not self.knows_commands or self.mode == "poll" or not self._client.can_be_pushed:
            return False
        return self.mode == "push" or asyncio.get_running_loop().time() >= self._rests_until

    async def _poll(self, places: Places, *, at_once: bool = False) -> PollResponse | None:
        request = self._request(places)
        if self._plain or not self.knows_commands:
            request.topics.extend(topic for topic, _ in self._topics.values())
        else:
            await self.told()
            request.follower, request.number = self._follower, self._number
        self.counts["polls"] += 1
        asks = self._asks
        try:
            answer = await self._unless_rung(self._poller.poll(request, at_once=at_once))
            if answer is None or asks != self._asks:
                return None
            if request.frontiers:
                self.wants_frontiers = not self._frontiers.take(answer)
            self.has_begun = True
            return answer
        except UStatusError as error:
            if error.code != UCode.NOT_FOUND or not request.follower:
                raise
            if request.follower == self._follower:
                self._forgotten()
            return None

    async def _unless_rung(self, polling: Coroutine[Any, Any, PollResponse | None]) -> PollResponse | None:
        """A call that was cut off without a word is given up when somebody rings."""
        self._rung.clear()
        tasks = [asyncio.ensure_future(polling), asyncio.ensure_future(self._rung.wait())]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            return tasks[0].result() if tasks[0].done() else None  # type: ignore[return-value]
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _request(self, places: Places) -> PollRequest:
        request = PollRequest()
        request.CopyFrom(self._base)
        if self.has_begun:
            request.earliest = True
        request.positions.extend(places.request())
        if self.wants_frontiers:
            self._frontiers.ask(request)
        if request.consumer or self._acks:
            request.acked.extend(Position(incarnation=one, seq=seq) for one, seq in self._acked.items())
        return request

    # -- pushes

    def _begin_push(self, places: Places) -> None:
        self._subscription = int.from_bytes(self._random_bytes(8), "big") or 1
        self._client.expect(self._subscription, self._arrived)
        self.counts["pushes"] += 1
        asked = CommandRequest()
        asked.push.sink.CopyFrom(self._client.frames.to)
        asked.push.subscription, asked.push.window_bytes = self._subscription, self._window
        asked.push.poll.CopyFrom(self._request(places))
        self._push = asked
        self._taken = 0
        self._came_at = asyncio.get_running_loop().time()
        self._say.set()

    def _end_push(self, *, tell: bool = False) -> None:
        """Frames of it are ignored from now on."""
        if self._subscription:
            self._client.forget(self._subscription)
        self._subscription, self._push = 0, CommandRequest(stop_push=True) if tell else None
        self._is_asked = self._is_asked and not tell
        self._frames.clear()
        self._frames_bytes = 0
        if tell:
            self._say.set()

    def _arrived(self, frame: Frame, bytes: int) -> None:
        """From the network."""
        if len(self._frames) >= FRAMES_HELD_MAX or self._frames_bytes > 2 * self._window:
            self.counts["overrun"] += 1  # the next one doesn't follow, so it is polled
            return
        now = asyncio.get_running_loop().time()
        self._usual_s += (now - self._came_at - self._usual_s) / 8
        usual_s = max(self._usual_s, self._poller.patience.usual_ms / 1_000)
        self._quiet_s = min(QUIET_S_MAX, max(QUIET_S_MIN, QUIET_TIMES * usual_s))
        self._came_at = now
        self._frames.append((frame, bytes))
        self._frames_bytes += bytes
        self._came.set()

    async def _next_frame(self, places: Places) -> PollResponse | None:
        while True:
            while self._frames:
                frame, bytes = self._frames.popleft()
                self._frames_bytes -= bytes
                self.counts["frames"] += 1
                if frame.number <= self._taken:
                    self.counts["repeated"] += 1
                    continue
                if not follows(frame.answer.begin, places.positions) or any(map(is_of_log, frame.answer.gaps)):
                    self.counts["missed"] += 1
                    return await self._recover(places)
                self._take(frame)
                if is_behind(frame.answer.next, places.positions):
                    self.counts["repeated"] += 1
                    continue
                return frame.answer
            self._came.clear()
            if self._error is not None:
                raise self._error
            try:
                async with asyncio.timeout_at(self._came_at + self._quiet_s):
                    await self._came.wait()
            except TimeoutError:
                return await self._look(places)
            if not self._subscription:  # the service has forgotten us, or more is wanted
                return None
            if self._rung.is_set() and not self._frames:
                return await self._look(places)

    def _take(self, frame: Frame) -> None:
        self._misses, self._rest_s = 0, REST_S_MIN
        self._taken = max(self._taken, frame.number)
        if frame.tell:
            self._say.set()

    async def _look(self, places: Places) -> PollResponse | None:
        """Nothing has come for a while: was something missed?"""
        self.counts["quiet"] += 1
        subscription, frames = self._subscription, len(self._frames)
        answer = await self._poll(places, at_once=True)
        self._came_at = asyncio.get_running_loop().time()
        if answer is not None and not answer.batches and not answer.gaps and not answer.more:
            self._quiet_s = min(QUIET_S_MAX, 2 * self._quiet_s)
        elif self._subscription == subscription and len(self._frames) == frames:
            self._missed()
        return answer

    async def _recover(self, places: Places) -> PollResponse | None:
        self._missed()
        return await self._poll(places, at_once=True)

    def _missed(self) -> None:
        """What was pushed did not arrive: the next push begins where we are then."""
        self._end_push()
        self._misses += 1
        if self.mode == "auto" and self._misses >= MISSES_MAX:
            self._rests_until = asyncio.get_running_loop().time() + self._rest_s
            self._rest_s, self._misses = min(REST_S_MAX, 2 * self._rest_s), 0
            self._end_push(tell=True)


def follows(begin: Iterable[Position], positions: Positions) -> bool:
    """Nothing lies between our places and where an answer begins. Of a log that we do not know something may."""
    return all(place.seq <= positions.get(place.incarnation, -1) for place in begin)


def is_of_log(gap: Gap) -> bool:
    """A log went back, or is gone: places change by that, so it is asked for again, by one poll at a time."""
    return gap.reason == Gap.REASON_INCARNATION or went_back(gap)


def is_behind(next: Iterable[Position], positions: Positions) -> bool:
    """Nothing in it is beyond our places."""
    return all(place.seq < positions.get(place.incarnation, -1) for place in next)
