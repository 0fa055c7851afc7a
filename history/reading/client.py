"""The client side of the history: its methods as calls, frames as they come, and polls that bear a bad network."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Final

import structlog
from google.protobuf.message import Message

from history.records.chunk import INCARNATION_BYTES
from uprotocol import uri as uris
from uprotocol.communication import CallOptions, RpcClient
from uprotocol.core.ustreamer.ids import COMMAND, DESCRIBE, FRAMES, POLL
from uprotocol.core.ustreamer.v1.ustreamer_pb2 import (
    CommandRequest,
    CommandResponse,
    DescribeRequest,
    DescribeResponse,
    Frame,
    LogState,
    PollRequest,
    PollResponse,
    RecordBatch,
    TopicState,
)
from uprotocol.message import M, UPayload
from uprotocol.pacing import Backoff
from uprotocol.status import UStatusError
from uprotocol.transport import LocalUriProvider, UListener, UTransport
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.umessage_pb2 import UMessage
from uprotocol.v1.uri_pb2 import UUri

TIMEOUT_MS: Final = 10_000  # of a call, beside what the service may wait
WAIT_MS_MIN: Final = 500  # of a long poll, on a network that loses or cuts long calls
WAIT_MS_MAX: Final = 30_000  # on a quiet and sound one: two calls a minute say that both are alive
# for an answer that may be lost on its way; over a satellite it takes a second
PATIENCE_MS_MIN: Final = 2_000
PATIENCE_MS_MAX: Final = 60_000
PATIENCE_TIMES: Final = 8
BACKOFF_MS_MIN: Final = 100
BACKOFF_MS_MAX: Final = 10_000  # a streamer that is back is found within that
FRONTIERS_BYTES_MAX: Final = 64 << 20  # of all pages together: some 200,000 gateways
PAUSE_MS: Final = 100  # between polls, if a service answers at once with nothing though it was asked to wait
STUCK_MAX: Final = 8  # twice what answers that bring nothing may come to, two each, until we pause as well
AGAIN: Final = frozenset({UCode.UNAVAILABLE, UCode.DEADLINE_EXCEEDED, UCode.RESOURCE_EXHAUSTED})

log = structlog.get_logger()


class HistoryClient:
    """Calls core.ustreamer at `service` (its resource does not matter). Bound to no loop but that of `rpc_client`.

    With `frames`, of the address of `rpc_client`, it can be pushed to. All methods raise UStatusError: what the service
    answered, DEADLINE_EXCEEDED after `timeout_ms` (and what a poll may wait), or DATA_LOSS if the answer can't be read.
    """

    def __init__(
        self,
        rpc_client: RpcClient,
        service: UUri,
        *,
        timeout_ms: int = TIMEOUT_MS,
        frames: Frames | None = None,
    ) -> None:
        self._rpc, self._timeout_ms = rpc_client, timeout_ms
        self.authority = service.authority_name
        address = (service.authority_name, service.ue_id, service.ue_version_major)
        self._describe, self._poll, self._command, self._topic = (
            uris.uri(*address, resource) for resource in (DESCRIBE, POLL, COMMAND, FRAMES)
        )
        self._frames = frames

    async def logs(self, topics: Iterable[UUri] = ()) -> list[LogState]:
        """The logs, each with the newest record of `topics`, which are patterns (none given: all). It costs the same
        however many match."""
        asked = DescribeRequest(topics=topics, listing=DescribeRequest.LISTING_NONE)
        described = await self._call(self._describe, asked, DescribeResponse, 0)
        for log in described.logs:
            if not log.HasField("newest_match_seq"):  # a service of before there were pages has listed them all
                seqs = (topic.newest_seq for topic in described.topics if topic.incarnation == log.incarnation)
                log.newest_match_seq = max(seqs, default=0)
        return list(described.logs)

    async def topics(self, topics: Iterable[UUri] = ()) -> AsyncIterator[TopicState]:
        """The state of each topic that matches, page by page. One that comes or is forgotten meanwhile may be missing;
        all others are there once."""
        asked = DescribeRequest(topics=topics, listing=DescribeRequest.LISTING_PAGE)
        while True:
            described = await self._call(self._describe, asked, DescribeResponse, 0)
            for state in described.topics:
                yield state
            if not described.next_page:
                return
            if described.next_page == asked.page:
                raise UStatusError(UCode.DATA_LOSS, f"{self.authority} gives the same page again and again")
            asked.page = described.next_page

    async def describe(self, topics: Iterable[UUri] = ()) -> DescribeResponse:
        """The logs, and all topics that match, in one answer: RESOURCE_EXHAUSTED where those are more than some
        thousand."""
        return await self._call(self._describe, DescribeRequest(topics=topics), DescribeResponse, 0)

    async def poll(self, request: PollRequest | None = None, *, patience_ms: int | None = None) -> PollResponse:
        """One batch; waits up to `request.wait_ms` if there is nothing, and `patience_ms` (default: `timeout_ms`) more
        for an answer that may be lost on its way."""
        request = request if request is not None else PollRequest()
        return await self._call(self._poll, request, PollResponse, request.wait_ms, patience_ms)

    async def frontiers(self, request: PollRequest) -> list[RecordBatch]:
        """How far epochs have come where `request` begins to read, all pages of it. Raises UNIMPLEMENTED from a service
        that knows no epochs, RESOURCE_EXHAUSTED from one that tells without end."""
        asked, pages = PollRequest(), FrontierPages(self.authority)
        asked.CopyFrom(request)
        while True:
            pages.ask(asked)
            answer = await self.poll(asked)
            if pages.take(answer):
                return list(answer.frontiers)
            del asked.positions[:]
            asked.positions.extend(answer.next)

    async def command(self, request: CommandRequest, *, patience_ms: int | None = None) -> CommandResponse:
        """One batch of changes of what is followed."""
        return await self._call(self._command, request, CommandResponse, 0, patience_ms)

    async def _call(
        self, method: UUri, request: Message, response: type[M], wait_ms: int, patience_ms: int | None = None
    ) -> M:
        # The service answers before the ttl ends, and keeps a part of it in hand for the way back.
        patience_ms = self._timeout_ms if patience_ms is None else patience_ms
        options = CallOptions(timeout_ms=patience_ms + wait_ms + wait_ms // 8)
        payload = await self._rpc.invoke_method(method, UPayload.pack(request), options)
        try:
            return payload.unpack(response)
        except UStatusError as error:
            what = f"{uris.format(method)} gave an answer that can't be read: {error.message}"
            raise UStatusError(UCode.DATA_LOSS, what) from None

    # -- frames

    @property
    def can_be_pushed(self) -> bool:
        return self._frames is not None

    @property
    def frames(self) -> Frames:
        assert self._frames is not None, "asked for by who can be pushed to"
        return self._frames

    async def listen(self) -> None:
        """To frames; before any are asked for. Raises what the transport says."""
        await self.frames.listen(self._topic)

    def expect(self, subscription: int, callback: Callable[[Frame, int], None]) -> None:
        """See Frames."""
        self.frames.expect(self._topic, subscription, callback)

    def forget(self, subscription: int) -> None:
        self.frames.forget(self._topic, subscription)

    async def close(self) -> None:
        """Hear no frames any more. May be called twice."""
        if self._frames is not None:
            await self._frames.leave(self._topic)


class Frames(UListener):
    """What is pushed to one address, whoever pushes: each frame to whom its push is for.

    `dropped`: frames that are unreadable, or stale: of no push that we know.
    """

    def __init__(self, transport: UTransport, local: LocalUriProvider) -> None:
        self._transport, self.to = transport, local.get_source()
        self._pushes: dict[tuple[int, bytes], Callable[[Frame, int], None]] = {}
        self._topics: Counter[bytes] = Counter()
        self.dropped: Counter[str] = Counter()

    async def listen(self, topic: UUri) -> None:
        """To the frames of one service. Raises what the transport says."""
        key = topic.SerializeToString()
        if not self._topics[key]:
            await self._transport.register_listener(topic, self, self.to)
        self._topics[key] = 1

    async def leave(self, topic: UUri) -> None:
        if self._topics.pop(topic.SerializeToString(), 0):
            with contextlib.suppress(UStatusError):  # it may have been closed before us
                await self._transport.unregister_listener(topic, self, self.to)

    async def close(self) -> None:
        for key in list(self._topics):
            await self.leave(UUri.FromString(key))

    def expect(self, topic: UUri, subscription: int, callback: Callable[[Frame, int], None]) -> None:
        """`callback(frame, bytes)` on the loop, for frames of that push of that service."""
        self._pushes[subscription, topic.SerializeToString()] = callback

    def forget(self, topic: UUri, subscription: int) -> None:
        self._pushes.pop((subscription, topic.SerializeToString()), None)

    def on_receive(self, message: UMessage) -> None:
        try:
            frame = UPayload.of(message).unpack(Frame)
        except UStatusError:
            frame = None
        if frame is None or not is_sound(frame.answer):
            self.dropped["unreadable"] += 1
            return
        callback = self._pushes.get((frame.subscription, message.attributes.source.SerializeToString()))
        if callback is None:
            self.dropped["stale"] += 1
        else:
            callback(frame, len(message.payload))


class FrontierPages:
    """How far epochs have come, from one answer or several that read nothing on."""

    def __init__(self, authority: str) -> None:
        """`authority`: whose history it is, for what is told of it."""
        self._authority = authority
        self._told: list[RecordBatch] = []
        self._page = b""
        self._bytes = 0  # of answers
        self._at: dict[bytes, int] = {}  # where they are asked for

    def ask(self, request: PollRequest) -> None:
        """For the next page; for the first one, if it begins elsewhere than those before."""
        at = {one.incarnation: one.seq for one in request.positions}
        if at != self._at:
            self._told, self._page, self._bytes = [], b"", 0
        request.frontiers, request.frontiers_page = True, self._page

    def take(self, answer: PollResponse) -> bool:
        """True: it has those of all pages now. Raises UNIMPLEMENTED, RESOURCE_EXHAUSTED."""
        if answer.has_frontiers:
            told = [*self._told, *answer.frontiers]
            self._told, self._page, self._bytes, self._at = [], b"", 0, {}
            del answer.frontiers[:]
            answer.frontiers.extend(told)
            return True
        if not answer.next_frontiers_page:
            raise UStatusError(UCode.UNIMPLEMENTED, f"the history of {self._authority} knows no epochs: read without")
        self._bytes += answer.ByteSize()
        if self._bytes > FRONTIERS_BYTES_MAX:
            what = f"the history of {self._authority} tells of epochs in more than {FRONTIERS_BYTES_MAX >> 20} MiB"
            raise UStatusError(UCode.RESOURCE_EXHAUSTED, f"{what}: name the authorities that you read")
        self._told += answer.frontiers
        self._page = answer.next_frontiers_page
        self._at = {one.incarnation: one.seq for one in answer.next}
        return False


def is_sound(answer: PollResponse) -> bool:
    """The logs in it can be logs."""
    told = (answer.begin, answer.next, answer.gaps, answer.batches, answer.frontiers)
    return all(len(one.incarnation) == INCARNATION_BYTES for all in told for one in all)


class Patience:
    """How long an answer is waited for that may be lost: a few times what answers take, and twice as long after each
    that did not come."""

    def __init__(self) -> None:
        self.ms = PATIENCE_MS_MIN
        self.usual_ms = 0.0  # what answers take

    def answered(self, ms: float) -> None:
        """It took so long."""
        self.usual_ms += (ms - self.usual_ms) / 4
        self.ms = max(PATIENCE_MS_MIN, self.ms // 2 if ms * PATIENCE_TIMES < self.ms else self.ms)

    def lost(self) -> None:
        self.ms = min(2 * self.ms, PATIENCE_MS_MAX)


class Steps:
    """Of one reader: pauses where one answer after the other comes at once and brings it no further."""

    def __init__(self) -> None:
        self._before: dict[bytes, int] = {}  # where it was when it asked last, and ...
        self._asked_at, self._stuck = 0.0, 0  # ... when that was; how often it was no further soon after

    async def hold_back(self, positions: dict[bytes, int]) -> None:
        """Before it asks for what is behind `positions`."""
        loop = asyncio.get_running_loop()
        before, self._before = self._before, positions
        steps = [seq - before[one] for one, seq in positions.items() if one in before]
        if max(steps, default=0) > 0 and min(steps) >= 0:
            self._stuck = max(0, self._stuck - 1)
        elif loop.time() - self._asked_at > 2 * PAUSE_MS / 1000:
            self._stuck = 0
        else:
            self._stuck = min(self._stuck + 2, STUCK_MAX)
        if self._stuck > STUCK_MAX // 2:
            await asyncio.sleep(PAUSE_MS / 1000)
        self._asked_at = loop.time()


class Poller:
    """Polls as long as the network bears, and while the service is away asks again, with growing, random pauses."""

    def __init__(
        self,
        client: HistoryClient,
        *,
        wait_ms_max: int = WAIT_MS_MAX,
        on_connected: Callable[[bool], None] | None = None,
        rng: random.Random | None = None,
    ) -> None:
        self._client, self._on_connected = client, on_connected
        self._wait_ms_max = wait_ms_max
        self._backoff = Backoff(BACKOFF_MS_MIN, BACKOFF_MS_MAX, rng if rng is not None else random.Random())
        self.wait_ms = min(wait_ms_max, max(WAIT_MS_MIN, wait_ms_max // 8))
        self.connected = False
        self.patience = Patience()
        self._steps = Steps()

    async def command(self, request: CommandRequest) -> CommandResponse:
        """As HistoryClient.command; its answer is waited for as long as others take."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        try:
            answer = await self._client.command(request, patience_ms=self.patience.ms)
        except UStatusError as error:
            if error.code == UCode.DEADLINE_EXCEEDED:
                self.patience.lost()
            raise
        self.patience.answered((loop.time() - began) * 1000)
        return answer

    async def poll(
        self, request: PollRequest, *, at_once: bool = False, steps: Steps | None = None
    ) -> PollResponse | None:
        """The answer, or None after a pause if there was none; `at_once`: it does not wait for records. `steps`: of who
        asks, where several do. Raises UStatusError if the service refuses."""
        loop = asyncio.get_running_loop()
        await (steps or self._steps).hold_back({one.incarnation: one.seq for one in request.positions})
        began = loop.time()
        request.wait_ms = 0 if at_once else self.wait_ms
        try:
            response = await self._client.poll(request, patience_ms=self.patience.ms)
        except UStatusError as error:
            if error.code not in AGAIN:
                raise
            if error.code == UCode.DEADLINE_EXCEEDED:
                self.patience.lost()
            self.wait_ms = max(min(WAIT_MS_MIN, self._wait_ms_max), self.wait_ms // 2)
            self._tell(False, error)
            await self.pause()
            return None
        if at_once:
            self.patience.answered((loop.time() - began) * 1000)
        if not is_sound(response):
            log.warning("the history answers what none can: asking again")
            await self.pause()
            return None
        self._backoff.reset()
        self._tell(True)
        if not response.batches and not response.gaps and not response.more and request.wait_ms:
            if (loop.time() - began) * 1000 < request.wait_ms / 4:
                await asyncio.sleep(PAUSE_MS / 1000)
            self.wait_ms = min(request.wait_ms * 2, self._wait_ms_max)
        return response

    def wake(self) -> None:
        """Ask again now, if we pause."""
        self._backoff.wake()

    async def pause(self) -> None:
        """Ever longer, until there is an answer."""
        await self._backoff.wait()

    def _tell(self, connected: bool, error: UStatusError | None = None) -> None:
        if connected == self.connected:
            return
        self.connected = connected
        if error is not None:
            log.warning("the history does not answer; asking again", error=str(error))
        if self._on_connected is not None:
            self._on_connected(connected)
