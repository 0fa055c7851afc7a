"""The frames of a push: in order, without a gap, and none of an older push.

begin -> request, for the next Command -> frames -> arrived -> queue -> next -> an answer
                                                                         |-> MISSED: one before it is missing
                                                                         |-> QUIET: nothing came for some time
                                                                         '-> ENDED: no push, or it was woken
"""

from __future__ import annotations

import asyncio
import enum
from collections import Counter, deque
from collections.abc import Callable, Iterable
from typing import Final

from history.reading.acceptor import Positions, went_back
from history.reading.client import HistoryClient
from history.reading.poller import AnswerTimeout
from history.service.pushing import WINDOW_BYTES_MAX
from uprotocol.core.ustreamer.v1.ustreamer_pb2 import CommandRequest, Frame, Gap, PollRequest, PollResponse, Position

FRAMES_HELD_MAX: Final = 2_048  # frames in the queue, and twice the window in bytes; a service never sends more
# After a time without a frame, a poll checks whether one was missed: four times the usual time between frames, or that
# in which a call is answered, within these limits
QUIET_S_MIN: Final = 0.25
QUIET_S_MAX: Final = 30.0
QUIET_TIMES: Final = 4
QUIET_S_FIRST: Final = 2.0
# after so many misses in a row nothing is pushed for a while; how long
MISSES_MAX: Final = 3
REST_S_MIN: Final = 2.0
REST_S_MAX: Final = 300.0


class NoFrame(enum.Enum):
    MISSED = enum.auto()
    QUIET = enum.auto()
    ENDED = enum.auto()


class PushedFrames:
    """At most one push at a time. It counts frames, stale, repeated, missed, pushes and overrun in `counts`."""

    def __init__(
        self,
        client: HistoryClient,
        timeout: AnswerTimeout,
        counts: Counter[str],
        *,
        window_bytes: int,
        random_bytes: Callable[[int], bytes],
        on_request: Callable[[], None],
    ) -> None:
        """`on_request` is called when `take_request` has something for the next Command."""
        self._client, self._timeout, self._counts = client, timeout, counts
        self._window, self._random_bytes, self._on_request = (
            min(window_bytes, WINDOW_BYTES_MAX),
            random_bytes,
            on_request,
        )
        self._subscription = 0
        self._request: CommandRequest | None = None  # to begin or end a push; not sent yet
        self._is_requested = False  # the service may be pushing
        self._frames: deque[tuple[Frame, int]] = deque()  # with their bytes
        self._frames_bytes = 0
        self._woken = asyncio.Event()
        self.must_check = False  # `next` returns QUIET when no frame waits
        self._taken = 0  # the number of the last frame
        self._quiet_s, self._usual_s, self._last_at = QUIET_S_FIRST, 0.0, 0.0
        self._misses, self._rest_s, self._rests_until = 0, REST_S_MIN, 0.0

    @property
    def is_on(self) -> bool:
        """There is a push, as far as we know."""
        return self._subscription != 0

    @property
    def is_idle(self) -> bool:
        """There is no push, and nothing to tell the service about one."""
        return not self._subscription and self._request is None

    @property
    def rests(self) -> bool:
        """Pushes have failed again and again, so nothing is pushed for a while."""
        return asyncio.get_running_loop().time() < self._rests_until

    # -- what the service is asked for

    async def begin(self, poll: PollRequest) -> None:
        """`poll`: from where it begins. Raises UStatusError as the transport does."""
        await self._client.listen()
        self._subscription = int.from_bytes(self._random_bytes(8), "big") or 1
        self._client.expect(self._subscription, self._on_frame)
        self._counts["pushes"] += 1
        request = self._request = CommandRequest()
        request.push.sink.CopyFrom(self._client.frames.to)
        request.push.subscription, request.push.window_bytes = self._subscription, self._window
        request.push.poll.CopyFrom(poll)
        self._taken, self._last_at = 0, asyncio.get_running_loop().time()
        self._on_request()

    def end(self, *, stop: bool = False) -> None:
        """Ignore its frames from now on. `stop`: the service is asked to stop, too."""
        if self._subscription:
            self._client.forget(self._subscription)
        self._subscription, self._request = 0, CommandRequest(stop_push=True) if stop else None
        self._is_requested = self._is_requested and not stop
        self._frames.clear()
        self._frames_bytes = 0
        if stop:
            self._on_request()

    def stop_if_on(self) -> None:
        if self._subscription or self._is_requested:
            self.end(stop=True)

    def forget(self) -> None:
        """The service knows nothing of us any more."""
        self.end()
        self._is_requested = False

    def take_request(self) -> CommandRequest:
        """Returns what the next Command says about the push."""
        request, self._request = self._request, None
        if request is not None:
            self._is_requested = request.HasField("push")
            return request
        return CommandRequest(frames_taken=self._taken) if self._subscription else CommandRequest()

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
                if not follows(frame.answer.begin, positions) or any(map(is_of_log, frame.answer.gaps)):
                    self._counts["missed"] += 1
                    return NoFrame.MISSED
                self._take(frame)
                if is_behind(frame.answer.next, positions):
                    self._counts["repeated"] += 1
                    continue
                return frame.answer
            self._woken.clear()
            if self.must_check:
                return NoFrame.QUIET
            try:
                async with asyncio.timeout_at(self._last_at + self._quiet_s):
                    await self._woken.wait()
            except TimeoutError:
                return NoFrame.QUIET
            if not self._subscription or not (self._frames or self.must_check):
                return NoFrame.ENDED

    def _take(self, frame: Frame) -> None:
        self._misses, self._rest_s = 0, REST_S_MIN
        self._taken = max(self._taken, frame.number)
        if frame.tell:
            self._on_request()

    # -- what was missed

    def mark(self) -> tuple[int, int]:
        """For `checked`: which push there is, and how many frames wait."""
        return self._subscription, len(self._frames)

    def checked(self, mark: tuple[int, int], answer: PollResponse | None, *, may_rest: bool) -> None:
        """A poll has checked whether a frame was missed; `mark` was taken before it."""
        self._last_at = asyncio.get_running_loop().time()
        if answer is not None and not answer.batches and not answer.gaps and not answer.more:
            self._quiet_s = min(QUIET_S_MAX, 2 * self._quiet_s)
        elif mark == (self._subscription, len(self._frames)):
            self.missed(may_rest=may_rest)

    def missed(self, *, may_rest: bool) -> None:
        """A frame did not arrive. This push ends, and the next one begins at the reader's positions; or, if `may_rest`
        and after several misses in a row, later."""
        self.end()
        self._misses += 1
        if may_rest and self._misses >= MISSES_MAX:
            self._rests_until = asyncio.get_running_loop().time() + self._rest_s
            self._rest_s, self._misses = min(REST_S_MAX, 2 * self._rest_s), 0
            self.end(stop=True)


def follows(begin: Iterable[Position], positions: Positions) -> bool:
    """Returns whether an answer begins at or before `positions`, so that no record lies between. Of a log that is not
    in `positions` that is not known."""
    return all(one.seq <= positions.get(one.incarnation, -1) for one in begin)


def is_of_log(gap: Gap) -> bool:
    """Returns whether a log went back, or no longer exists. That changes positions, so it is read again with polls, one
    at a time."""
    return gap.reason == Gap.REASON_INCARNATION or went_back(gap)


def is_behind(next: Iterable[Position], positions: Positions) -> bool:
    """Returns whether an answer that ends at `next` brings nothing beyond `positions`."""
    return all(one.seq < positions.get(one.incarnation, -1) for one in next)
