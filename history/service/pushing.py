"""What is pushed to a follower: what it would be answered if it polled again and again, in frames.

Push -> checked -> Pushing: is its window open? -> poll on its behalf -> Frame: subscription, number, answer -> post
                               ^ Command: frames_taken
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Final

import structlog

from history.service.request import LEASE_MS_DEFAULT, LEASE_MS_MAX, Poll, checked
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

WINDOW_BYTES_MAX: Final = 8 << 20  # under way to one follower: 20 MB/s over a network of 200 ms there and back
WINDOW_BYTES_MIN: Final = 64 << 10  # of each, if there are many
WINDOW_FRAMES_MAX: Final = 1_024  # the same, where there is little in each
TELL_SHARE: Final = 4  # a follower is asked to tell what it has taken for each quarter of the window
PUSH_WAIT_MS: Final = 10_000  # where nothing comes a frame says so now and then
FRAME_TTL_MS: Final = 10_000  # one that is older has been polled by now
AGAIN_S: Final = 1.0  # after a refusal that will pass

log = structlog.get_logger()


def window_bytes_of_each(count: int, all: int, most: int = WINDOW_BYTES_MAX) -> int:
    """The share of `count` that have `all` together."""
    return max(WINDOW_BYTES_MIN, min(most, all // max(1, count)))


def checked_push(asked: PushRequest, attributes: UAttributes) -> PushRequest:
    """Raises INVALID_ARGUMENT, PERMISSION_DENIED."""
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
        raise invalid("the poll of a push names no topics: they are followed")
    checked(push.poll, attributes, uuids.now_ms())
    push.poll.wait_ms = PUSH_WAIT_MS
    return push


class Pushing:
    """Frames to one follower, as many bytes as its window has. Ends by itself only where it is refused for good."""

    def __init__(
        self,
        asked: PushRequest,
        caller: UUri,
        topic: UUri,
        answer: Callable[[Poll], Awaitable[None]],
        post: Callable[[UMessage], None],
        window_bytes_max: Callable[[], int],
        on_end: Callable[[Pushing], None],
    ) -> None:
        """`asked` is checked. `answer` fills a poll's response, and raises UStatusError; `topic` is the frames'.
        `window_bytes_max`: what the way there has room for now, while its network takes nothing. `on_end` is called
        when nothing is pushed any more."""
        self._asked, self._caller, self._topic, self._answer, self._post = asked, caller, topic, answer, post
        self._request = PollRequest()
        self._request.CopyFrom(asked.poll)
        self._window_max = window_bytes_max
        self._under_way: deque[tuple[int, int]] = deque()  # number and bytes
        self._bytes = self.frames = 0
        self._to_tell = 0  # the last frame that asks to tell, and how much has been sent since
        self._untold_bytes = 0
        self._opened = asyncio.Event()
        self._task = asyncio.create_task(self._run(), name="push")
        self._task.add_done_callback(lambda _: on_end(self))

    def __repr__(self) -> str:
        return f"Pushing({self.frames} frames, {self._bytes} bytes under way)"

    @property
    def _window(self) -> int:
        return min(self._asked.window_bytes or WINDOW_BYTES_MAX, self._window_max())

    @property
    def consumer(self) -> tuple[str, int]:
        """Its name, and its lease in milliseconds; "": there is none."""
        poll = self._asked.poll
        return poll.consumer, min(poll.lease_ms or LEASE_MS_DEFAULT, LEASE_MS_MAX)

    def stop(self) -> None:
        self._task.cancel()

    async def ended(self) -> None:
        await asyncio.gather(self._task, return_exceptions=True)

    def taken(self, number: int) -> None:
        """Up to this frame all is with the follower; what was never sent is not."""
        while self._under_way and self._under_way[0][0] <= number:
            self._bytes -= self._under_way.popleft()[1]
        self._opened.set()

    async def _run(self) -> None:
        while True:
            while self._under_way and (self._bytes >= self._window or len(self._under_way) >= WINDOW_FRAMES_MAX):
                if self._under_way[0][0] > self._to_tell:  # the window is smaller than it was
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
                await asyncio.sleep(AGAIN_S)

    async def _next(self) -> PollResponse:
        attributes = UAttributes(id=uuids.new(), source=self._caller, ttl=2 * PUSH_WAIT_MS)
        poll = checked(self._request, attributes, uuids.now_ms())
        poll.is_pushed = True
        poll.bytes_max = max(1, min(poll.bytes_max, self._window - self._bytes))
        await self._answer(poll)
        del self._request.acked[:]  # what is safe since then, commands say
        del self._request.positions[:]
        self._request.positions.extend(poll.response.next)
        self._request.frontiers_page = poll.response.next_frontiers_page
        self._request.frontiers = bool(poll.response.next_frontiers_page)
        return poll.response

    def _send(self, answer: PollResponse, *, tell: bool = False) -> None:
        self.frames += 1
        frame = Frame(subscription=self._asked.subscription, number=self.frames, answer=answer)
        frame.tell = self._is_to_tell(frame.ByteSize(), tell)
        builder = UMessageBuilder.notification(self._topic, self._asked.sink).with_ttl(FRAME_TTL_MS)
        message = builder.pack(frame)
        self._under_way.append((self.frames, len(message.payload)))
        self._bytes += len(message.payload)
        self._post(message)

    def _is_to_tell(self, bytes: int, now: bool) -> bool:
        self._untold_bytes += bytes
        are_many = (self.frames - self._to_tell) * TELL_SHARE >= WINDOW_FRAMES_MAX
        if not (now or are_many or self._untold_bytes * TELL_SHARE >= self._window):
            return False
        self._to_tell, self._untold_bytes = self.frames, 0
        return True
