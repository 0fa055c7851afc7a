"""Pushes to a follower: frames with the answers that it would get if it polled repeatedly.

Push -> checked -> Pushing: is its window open? -> poll on its behalf -> Frame: subscription, number, answer -> post
                               ^ Command: frames_taken
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Final

import structlog

from history.service.request import LEASE_MS_DEFAULT, LEASE_MS_MAX, CheckedPoll, checked
from uprotocol import uri as uris
from uprotocol import uuid as uuids
from uprotocol.core.ustreamer.v1.ustreamer_pb2 import Frame, PollRequest, PollResponse
from uprotocol.core.ustreamer.v1.ustreamer_pb2 import Push as PushRequest
from uprotocol.message import UMessageBuilder
from uprotocol.status import UStatusError, invalid
from uprotocol.v1.uattributes_pb2 import UAttributes
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.umessage_pb2 import UMessage
from uprotocol.v1.uri_pb2 import UUri

WINDOW_BYTES_MAX: Final = 8 << 20  # sent and not yet taken by one follower: 20 MB/s with a round trip of 200 ms
WINDOW_BYTES_MIN: Final = 64 << 10  # of each push, if there are many
WINDOW_FRAMES_MAX: Final = 1_024  # sent and not yet taken, if frames are small
TELL_SHARE: Final = 4  # the follower is asked for its progress after each quarter of the window
PUSH_WAIT_MS: Final = 10_000  # an empty frame is sent when nothing has come for this long
FRAME_TTL_MS: Final = 10_000  # the follower has polled the content of an older frame
RETRY_S: Final = 1.0  # after a refusal that is temporary

log = structlog.get_logger()


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
    checked(push.poll, attributes, uuids.now_ms())
    push.poll.wait_ms = PUSH_WAIT_MS
    return push


class Pushing:
    """Sends frames to one follower, as many bytes as its window allows. Ends by itself only if the poll is refused with
    an error that is not temporary."""

    def __init__(
        self,
        asked: PushRequest,
        caller: UUri,
        topic: UUri,
        answer: Callable[[CheckedPoll], Awaitable[PollResponse]],
        post: Callable[[UMessage], None],
        window_bytes_max: Callable[[], int],
        on_end: Callable[[Pushing], None],
    ) -> None:
        """`asked` is checked. `answer` returns the response to a poll; it raises UStatusError. `topic`: of the frames.
        `window_bytes_max`: how many bytes can wait for a network that accepts nothing. `on_end` is called when the push
        has ended."""
        self._asked, self._caller, self._topic, self._answer, self._post = asked, caller, topic, answer, post
        self._request = PollRequest()
        self._request.CopyFrom(asked.poll)
        self._window_max = window_bytes_max
        self._not_taken: deque[tuple[int, int]] = deque()  # number and bytes of frames
        self._bytes = self.frames = 0
        self._last_tell = 0  # the last frame that asks for progress, and bytes sent since
        self._bytes_since_tell = 0
        self._opened = asyncio.Event()
        self._task = asyncio.create_task(self._run(), name="push")
        self._task.add_done_callback(lambda _: on_end(self))

    def __repr__(self) -> str:
        return f"Pushing({self.frames} frames, {self._bytes} bytes not taken)"

    @property
    def _window(self) -> int:
        return min(self._asked.window_bytes or WINDOW_BYTES_MAX, self._window_max())

    @property
    def consumer(self) -> tuple[str, int]:
        """The consumer's name, and its lease in milliseconds; "": no consumer."""
        poll = self._asked.poll
        return poll.consumer, min(poll.lease_ms or LEASE_MS_DEFAULT, LEASE_MS_MAX)

    def stop(self) -> None:
        self._task.cancel()

    async def ended(self) -> None:
        await asyncio.gather(self._task, return_exceptions=True)

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
        attributes = UAttributes(id=uuids.new(), source=self._caller, ttl=2 * PUSH_WAIT_MS)
        free_bytes = self._window - self._bytes
        response = await self._answer(checked(self._request, attributes, uuids.now_ms(), bytes_max=free_bytes))
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
        builder = UMessageBuilder.notification(self._topic, self._asked.sink).with_ttl(FRAME_TTL_MS)
        message = builder.pack(frame)
        self._not_taken.append((self.frames, len(message.payload)))
        self._bytes += len(message.payload)
        self._post(message)

    def _asks_for_progress(self, bytes: int, now: bool) -> bool:
        self._bytes_since_tell += bytes
        are_many = (self.frames - self._last_tell) * TELL_SHARE >= WINDOW_FRAMES_MAX
        if not (now or are_many or self._bytes_since_tell * TELL_SHARE >= self._window):
            return False
        self._last_tell, self._bytes_since_tell = self.frames, 0
        return True
