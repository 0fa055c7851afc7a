"""Following a history: one conversation, whatever is followed and however records come.

follow, unfollow -> Commands --one Command at a time--> the service
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
import os
import random
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, Self

from history.reading.acceptor import Positions, ReaderState
from history.reading.client import FrontierPages, HistoryClient
from history.reading.commands import Commands
from history.reading.poller import WAIT_MS_MAX, Poller
from history.reading.pushed import NoFrame, PushedFrames
from history.service.pushing import WINDOW_BYTES_MAX
from uprotocol.core.ustreamer.v1.ustreamer_pb2 import HandOver, PollRequest, PollResponse, Position
from uprotocol.status import UStatusError
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.uri_pb2 import UUri
from uprotocol.v1.uuid_pb2 import UUID

LEASE_MS: Final = 120_000  # how long the service remembers a follower that says nothing

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


class Following:
    """What is followed at one service, and the answers: `async with`, then `follow` and `next`.

    `mode` may be set at any time. `has_begun`: a log that the reader has no position of is a new one, to be read from
    its beginning. `wants_frontiers`: ask for frontiers with the next answers; an answer that has them sets it to False.
    `counts`: commands, retold (the service had forgotten us), polls, frames, repeated, missed (frames before which one
    was missing), quiet (polls because nothing came), pushes, overrun.

    `on_denied(topic)` is called for a topic that we may not see; `on_forgotten()` if the service was restarted, or our
    lease had ended. An exception that they raise ends this; otherwise everything is sent again. `on_confirmed(topics,
    done)`: from now on the service follows these topics, or no longer, for messages with an id later than `done`.
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
    ) -> None:
        options = options if options is not None else FollowingOptions()
        self.mode: FollowMode = options.mode
        self.has_begun = self.wants_frontiers = False
        self.counts: Counter[str] = Counter()
        self._client, self._base = client, options.poll_request()
        self._names_topics, self._acknowledges = options.names_topics, options.acknowledges
        self._poller = Poller(client, wait_ms_max=options.wait_ms_max, on_connected=on_connected, rng=options.rng)
        self._frontiers = FrontierPages(client.authority)
        self._pushed = PushedFrames(
            client,
            self._poller.timeout,
            self.counts,
            window_bytes=options.window_bytes,
            random_bytes=options.random_bytes,
            on_request=lambda: self._commands.wake(),
        )
        self._commands = Commands(
            self._poller,
            self._pushed,
            self.counts,
            lease_ms=options.lease_ms,
            names_topics=options.names_topics,
            random_bytes=options.random_bytes,
            on_denied=on_denied,
            on_forgotten=on_forgotten,
            on_confirmed=on_confirmed,
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
        return self._pushed.is_on

    @property
    def topics(self) -> list[UUri]:
        """The topics that are followed, whether or not the service knows it already."""
        return [topic for topic, _ in self._commands.topics.values()]

    def check_now(self) -> None:
        """Something may have come that did not reach us: poll at once."""
        self._interrupted.set()
        self._pushed.wake(check=True)
        self._poller.wake()

    async def __aenter__(self) -> Self:
        self._commands.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """The service forgets us when our lease ends. May be called twice."""
        await self._commands.close()
        self._pushed.end()

    # -- what is followed

    def follow(self, topic: UUri, sample_period_ms: int = 0) -> None:
        """Follow a topic or a pattern, from the positions with which `next` was last called. Called again for the same
        topic, it changes the sample period. The service is told with the next command."""
        if self._commands.change(topic, sample_period_ms):
            # An answer that was asked for without the topic must not move the positions past its records.
            self._additions += 1
            self._pushed.end()
            self._pushed.wake()
            self._interrupted.set()

    def unfollow(self, topic: UUri) -> None:
        """Stop following exactly this topic or pattern; nothing happens if it is not followed."""
        self._commands.change(topic, -1)

    async def begin_again(self) -> None:
        """Continue after a refusal, after a pause."""
        await self._poller.pause()
        self._commands.start()

    async def confirmed(self) -> None:
        """Wait until the service knows all that is followed now, unless polls name the topics. Raises UStatusError."""
        await self._commands.confirmed()

    async def hand_over(self, asked: HandOver) -> list[Position]:
        """See HandOver. Raises UStatusError."""
        return await self._commands.hand_over(asked)

    # -- answers

    async def next(self, state: ReaderState, acked: Positions | None = None) -> PollResponse | None:
        """Returns the next answer, to be taken with an Acceptor that has `state`; None: no answer yet, call again.

        `acked`: up to these positions all is stored on this side, for the consumer. Raises UStatusError if the service
        refuses.
        """
        if acked is not None:
            self._commands.acked = acked
        self._raise_error()
        # the first answer is polled: a lost first frame would not be noticed
        is_first = self.wants_frontiers or not state.positions
        may_push = self.mode != "poll" and self._client.can_be_pushed
        if not may_push or (self.mode == "auto" and self._pushed.rests):
            self._pushed.stop_if_on()
            # a service that is not known to be there is asked to answer at once, which shows that it is
            return await self._poll(state, at_once=is_first or not self.connected)
        if is_first:
            return await self._poll(state, at_once=True)
        if not self._pushed.is_on:
            await self._pushed.begin(self._request(state))
            self._raise_error()
        answer = await self._pushed.next(state.positions)
        if isinstance(answer, PollResponse):
            return answer
        if answer is NoFrame.ENDED:
            return None
        if answer is NoFrame.MISSED:
            self._pushed.missed(may_rest=self.mode == "auto")
            return await self._poll(state, at_once=True)
        return await self._check(state)

    def _raise_error(self) -> None:
        if self._commands.error is not None:
            raise self._commands.error

    async def _check(self, state: ReaderState) -> PollResponse | None:
        """Nothing has come for a while: poll, to see whether a frame was missed."""
        self.counts["quiet"] += 1
        mark = self._pushed.mark()
        answer = await self._poll(state, at_once=True)
        self._pushed.checked(mark, answer, may_rest=self.mode == "auto")
        return answer

    async def _poll(self, state: ReaderState, *, at_once: bool = False) -> PollResponse | None:
        request, commands = self._request(state), self._commands
        if self._names_topics:
            request.topics.extend(self.topics)
        else:
            await commands.confirmed()
            request.follower, request.number = commands.follower, commands.number
        self.counts["polls"] += 1
        self._pushed.must_check = False
        additions = self._additions
        try:
            answer = await self._unless_interrupted(self._poller.poll(request, at_once=at_once))
            if answer is None or additions != self._additions:
                return None
            if request.frontiers:
                self.wants_frontiers = not self._frontiers.take(answer)
            self.has_begun = True
            return answer
        except UStatusError as error:
            if error.code != UCode.NOT_FOUND or not request.follower:
                raise
            if request.follower == commands.follower:
                commands.forgotten()
            return None

    async def _unless_interrupted(self, polling: Coroutine[Any, Any, PollResponse | None]) -> PollResponse | None:
        """Give the poll up when `check_now` is called: a network may have lost it without an error."""
        self._interrupted.clear()
        tasks = [asyncio.ensure_future(polling), asyncio.ensure_future(self._interrupted.wait())]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            return tasks[0].result() if tasks[0].done() else None  # type: ignore[return-value]
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _request(self, state: ReaderState) -> PollRequest:
        request = PollRequest()
        request.CopyFrom(self._base)
        if self.has_begun:
            request.earliest = True
        request.positions.extend(state.request())
        if self.wants_frontiers:
            self._frontiers.ask(request)
        if request.consumer or self._acknowledges:
            request.acked.extend(self._commands.acked_positions())
        return request
