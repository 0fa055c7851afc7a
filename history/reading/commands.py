"""Tells a history service what is followed: one Command at a time, each again until it is answered.

follow, unfollow -> changes --Command--> the service
                                '-- it has forgotten us: all is sent again, under another name

The follower's name is random. A command of before can therefore not be taken for one of now.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from history.reading.acceptor import Positions
from history.reading.poller import AGAIN, Poller
from history.reading.pushed import PushedFrames
from history.records.chunk import plain_address
from history.service.request import PATTERNS_MAX
from uprotocol.core.ustreamer.v1.ustreamer_pb2 import CommandRequest, CommandResponse, HandOver, Position
from uprotocol.status import UStatusError
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.uri_pb2 import UUri
from uprotocol.v1.uuid_pb2 import UUID

ALIVE_SHARE: Final = 4  # of the lease: after this part of it a command is sent even if there is nothing to say


class Commands:
    """Sends commands until `close`. `topics`: what is followed, by serialized pattern, with its sample period in
    milliseconds. `acked`: what is stored on this side. `error`: why nothing is followed any more. With `names_topics`
    polls name the topics, so commands are only needed for a push."""

    def __init__(
        self,
        poller: Poller,
        pushed: PushedFrames,
        counts: Counter[str],
        *,
        lease_ms: int,
        names_topics: bool,
        random_bytes: Callable[[int], bytes],
        on_denied: Callable[[UUri], None],
        on_forgotten: Callable[[], None],
        on_confirmed: Callable[[Sequence[UUri], UUID], None],
    ) -> None:
        self._poller, self._pushed, self._counts = poller, pushed, counts
        self._lease_ms, self._names_topics, self._random_bytes = lease_ms, names_topics, random_bytes
        self._on_denied, self._on_forgotten, self._on_confirmed = on_denied, on_forgotten, on_confirmed
        self.topics: dict[bytes, tuple[UUri, int]] = {}
        self.acked: Positions = {}
        self.error: Exception | None = None
        self.follower, self.number = b"", 0
        self._unsent: dict[bytes, tuple[UUri, int]] = {}  # period -1: no longer followed
        self._task: asyncio.Task[None] | None = None
        self._woken = asyncio.Event()
        self._confirmed = asyncio.Event()  # the service knows all changes
        self._hand_overs: deque[tuple[HandOver, asyncio.Future[list[Position]]]] = deque()

    def start(self) -> None:
        """Begin under a new name, and send everything. After an error, too."""
        self.error = None
        self._begin_again()
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run(), name="follow")

    async def close(self) -> None:
        """The service forgets the follower when its lease ends. May be called twice."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        self._refuse_hand_overs(UStatusError(UCode.CANCELLED, "the following was closed"))

    def wake(self) -> None:
        """There is something to send."""
        self._woken.set()

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
        self._woken.set()
        return is_new

    async def confirmed(self) -> None:
        """Wait until the service knows all changes so far, unless polls name the topics. Raises UStatusError."""
        while self.error is None and not self._names_topics and not self._confirmed.is_set():
            await self._confirmed.wait()
        if self.error is not None:
            raise self.error

    async def hand_over(self, asked: HandOver) -> list[Position]:
        """See HandOver. Raises UStatusError."""
        if self.error is not None:
            raise self.error
        answered: asyncio.Future[list[Position]] = asyncio.get_running_loop().create_future()
        self._hand_overs.append((asked, answered))
        self._woken.set()
        return await answered

    def forgotten(self) -> None:
        """The service does not know the follower: it was restarted, or the lease has ended. Raises UStatusError as
        `on_forgotten` does."""
        self._counts["retold"] += 1
        self._pushed.end()
        try:
            self._on_forgotten()
        except UStatusError as error:
            self.error = error
            raise
        self._begin_again()

    def _begin_again(self) -> None:
        self._pushed.forget()
        self.follower, self.number = self._random_bytes(16), 0
        self._unsent = dict(self.topics)
        self._confirmed.clear()
        self._woken.set()

    async def _run(self) -> None:
        try:
            while True:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._lease_ms / ALIVE_SHARE / 1_000):
                        await self._woken.wait()
                self._woken.clear()
                if not (self._names_topics and self._pushed.is_idle):
                    await self._send()
        except Exception as error:
            self.error = error
            self._confirmed.set()
            self._pushed.wake()
            self._refuse_hand_overs(error)

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
                if error.code not in AGAIN:
                    raise
            await self._poller.pause()
        self.number = asked.number
        self._counts["commands"] += 1
        self._take(answer, changes)
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
            self._woken.set()
            return asked, changes
        asked.MergeFrom(self._pushed.take_request())
        asked.acked.extend(self.acked_positions())
        if self._hand_overs and changes:  # in a command of its own: it may be refused though the changes are not
            self._woken.set()
        elif self._hand_overs:
            asked.hand_over.CopyFrom(self._hand_overs[0][0])
        return asked, changes

    def acked_positions(self) -> Iterator[Position]:
        return (Position(incarnation=one, seq=seq) for one, seq in self.acked.items())

    def _take(self, answer: CommandResponse, changes: list[UUri]) -> None:
        for index in answer.denied:
            if index < len(changes):
                self._on_denied(changes[index])
        if answer.lease_ms:
            self._lease_ms = answer.lease_ms
        self._on_confirmed(changes, answer.done)
        if not self._unsent:
            self._confirmed.set()

    def _answer_hand_over(self, answer: list[Position] | UStatusError) -> None:
        _, waiting = self._hand_overs.popleft()
        if self._hand_overs:
            self._woken.set()
        if waiting.done():
            return
        if isinstance(answer, UStatusError):
            waiting.set_exception(answer)
        else:
            waiting.set_result(answer)

    def _refuse_hand_overs(self, error: Exception) -> None:
        while self._hand_overs:
            _, waiting = self._hand_overs.popleft()
            if not waiting.done():
                waiting.set_exception(error)
