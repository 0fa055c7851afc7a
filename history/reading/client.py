"""The client side of the history: its methods as calls, and the frames of its pushes.

HistoryClient   one call, one answer
Poller          over a network that loses calls: waits as long as answers take there, and pauses while nothing answers
Frames          receives the frames of all pushes to one address
"""

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
from history.records.witness import seqs_of
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

TIMEOUT_MS: Final = 10_000  # of a call, in addition to what the service may wait
FRONTIERS_BYTES_MAX: Final = 64 << 20  # of all pages of frontiers together: some 200,000 gateways
WAIT_MS_MIN: Final = 500  # of a long poll, on a network that loses or cuts long calls
WAIT_MS_MAX: Final = 30_000  # on a quiet and reliable network: two calls a minute show that both sides are alive
# for an answer that may be lost; over a satellite it takes a second
PATIENCE_MS_MIN: Final = 2_000
PATIENCE_MS_MAX: Final = 60_000
PATIENCE_TIMES: Final = 8
BACKOFF_MS_MIN: Final = 100
BACKOFF_MS_MAX: Final = 10_000  # within this time a service that is back is found
PAUSE_MS: Final = 100  # between polls, if a service answers at once with nothing though it was asked to wait
STUCK_MAX: Final = 8  # an answer without progress counts 2, one with progress -1; a pause begins above half of this
AGAIN: Final = frozenset({UCode.UNAVAILABLE, UCode.DEADLINE_EXCEEDED, UCode.RESOURCE_EXHAUSTED})

log = structlog.get_logger()


class HistoryClient:
    """Calls core.ustreamer at `service`, whose resource is ignored. Used on the loop of `rpc_client`.

    Pushes need `frames`, made for the address of `rpc_client`; they come from `frames_topic`. All methods raise
    UStatusError: what the service answered, DEADLINE_EXCEEDED after `timeout_ms` (plus what a poll may wait), or
    DATA_LOSS for an invalid answer.
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
        self._describe, self._poll, self._command, self.frames_topic = (
            uris.uri(*address, resource) for resource in (DESCRIBE, POLL, COMMAND, FRAMES)
        )
        self.frames = frames

    async def logs(self, topics: Iterable[UUri] = ()) -> list[LogState]:
        """Returns the logs, each with the newest record of `topics`, which are patterns (none: all topics). The cost
        does not depend on how many match."""
        asked = DescribeRequest(topics=topics, listing=DescribeRequest.LISTING_NONE)
        return list((await self._call(self._describe, asked, DescribeResponse, 0)).logs)

    async def followed(self) -> list[UUri]:
        """Returns the histories that this streamer follows, of publishers that we may read."""
        asked = DescribeRequest(listing=DescribeRequest.LISTING_NONE, followed=True)
        return list((await self._call(self._describe, asked, DescribeResponse, 0)).followed)

    async def topics(self, topics: Iterable[UUri] = ()) -> AsyncIterator[TopicState]:
        """Yields the state of each topic that matches, page by page. A topic that appears or is forgotten meanwhile may
        be missing; all others come once."""
        asked = DescribeRequest(topics=topics, listing=DescribeRequest.LISTING_PAGE)
        while True:
            described = await self._call(self._describe, asked, DescribeResponse, 0)
            for state in described.topics:
                yield state
            if not described.next_page:
                return
            if described.next_page == asked.page:
                raise UStatusError(
                    UCode.DATA_LOSS, f"expected the next page of topics from {self.authority}, got the same one again"
                )
            asked.page = described.next_page

    async def describe(self, topics: Iterable[UUri] = ()) -> DescribeResponse:
        """Returns the logs, and all topics that match, in one answer. Raises RESOURCE_EXHAUSTED for more than some
        thousand topics."""
        return await self._call(self._describe, DescribeRequest(topics=topics), DescribeResponse, 0)

    async def poll(self, request: PollRequest | None = None, *, patience_ms: int | None = None) -> PollResponse:
        """Returns one batch. The service waits up to `request.wait_ms` for records; the answer is awaited `patience_ms`
        longer (default: `timeout_ms`)."""
        request = request if request is not None else PollRequest()
        return await self._call(self._poll, request, PollResponse, request.wait_ms, patience_ms)

    async def frontiers(self, request: PollRequest) -> list[RecordBatch]:
        """Returns all frontiers as of the position where `request` begins to read. Raises RESOURCE_EXHAUSTED if they
        are too large."""
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
        """Sends changes of what is followed."""
        return await self._call(self._command, request, CommandResponse, 0, patience_ms)

    async def _call(
        self, method: UUri, request: Message, response: type[M], wait_ms: int, patience_ms: int | None = None
    ) -> M:
        # The service answers before the ttl ends, and leaves a part of it for the way back.
        patience_ms = self._timeout_ms if patience_ms is None else patience_ms
        options = CallOptions(timeout_ms=patience_ms + wait_ms + wait_ms // 8)
        payload = await self._rpc.invoke_method(method, UPayload.pack(request), options)
        try:
            return payload.unpack(response)
        except UStatusError as error:
            what = f"expected {response.DESCRIPTOR.name} from {uris.format(method)}"
            raise UStatusError(UCode.DATA_LOSS, f"{what}, got an answer that can't be read: {error.message}") from None

    async def close(self) -> None:
        """Stop listening for frames. May be called twice."""
        if self.frames is not None:
            await self.frames.leave(self.frames_topic)


class FrontierPages:
    """Collects frontiers from one answer, or from several that bring nothing else."""

    def __init__(self, authority: str) -> None:
        """`authority`: of the service, for error texts."""
        self._authority = authority
        self._batches: list[RecordBatch] = []
        self._page = b""
        self._bytes = 0  # of the answers so far
        self._at: dict[bytes, int] = {}  # positions as of which they were asked for

    def ask(self, request: PollRequest) -> None:
        """Ask for the next page; for the first page, if `request` begins elsewhere than before."""
        at = seqs_of(request.positions)
        if at != self._at:
            self._batches, self._page, self._bytes = [], b"", 0
        request.frontiers, request.frontiers_page = True, self._page

    def take(self, answer: PollResponse) -> bool:
        """Returns True if this was the last page; `answer` then has the frontiers of all pages. Raises DATA_LOSS,
        RESOURCE_EXHAUSTED."""
        if answer.has_frontiers:
            batches = [*self._batches, *answer.frontiers]
            self._batches, self._page, self._bytes, self._at = [], b"", 0, {}
            del answer.frontiers[:]
            answer.frontiers.extend(batches)
            return True
        if not answer.next_frontiers_page:
            what = f"expected frontiers, or a next page of them, from the history of {self._authority}, got neither"
            raise UStatusError(UCode.DATA_LOSS, what)
        self._bytes += answer.ByteSize()
        if self._bytes > FRONTIERS_BYTES_MAX:
            what = f"the history of {self._authority} has more than {FRONTIERS_BYTES_MAX >> 20} MiB of frontiers"
            raise UStatusError(UCode.RESOURCE_EXHAUSTED, f"{what}: name the authorities that you read")
        self._batches += answer.frontiers
        self._page = answer.next_frontiers_page
        self._at = seqs_of(answer.next)
        return False


def is_sound(answer: PollResponse) -> bool:
    """Returns whether every incarnation has 16 bytes."""
    lists = (answer.begin, answer.next, answer.gaps, answer.batches, answer.frontiers, answer.plan)
    return all(len(one.incarnation) == INCARNATION_BYTES for each in lists for one in each)


class AnswerTimeout:
    """How long to wait for an answer that may be lost: a few times as long as answers take, and twice as long after
    each one that did not come. Milliseconds."""

    def __init__(self) -> None:
        self.ms = PATIENCE_MS_MIN
        self.usual_ms = 0.0  # what answers take

    def answered(self, ms: float) -> None:
        """An answer took so long."""
        self.usual_ms += (ms - self.usual_ms) / 4
        self.ms = max(PATIENCE_MS_MIN, self.ms // 2 if ms * PATIENCE_TIMES < self.ms else self.ms)

    def lost(self) -> None:
        self.ms = min(2 * self.ms, PATIENCE_MS_MAX)


class Poller:
    """Makes long polls as long as the network allows. While the service does not answer, it is asked again after
    pauses of `backoff`, growing and random. A reader whose polls are answered at once and bring it no further pauses,
    too."""

    def __init__(
        self,
        client: HistoryClient,
        *,
        wait_ms_max: int = WAIT_MS_MAX,
        on_connected: Callable[[bool], None] | None = None,
        rng: random.Random | None = None,
        held_ms_max: int = 0,
    ) -> None:
        """`held_ms_max`: how long to wait while another holder uses our consumer."""
        self._client, self._on_connected, self._held_ms_max = client, on_connected, held_ms_max
        self._held_since: float | None = None  # loop time; another holder uses our consumer
        self._wait_ms_max = wait_ms_max
        self.backoff = Backoff(BACKOFF_MS_MIN, BACKOFF_MS_MAX, rng if rng is not None else random.Random())
        self.wait_ms = min(wait_ms_max, max(WAIT_MS_MIN, wait_ms_max // 8))
        self.connected = False
        self.timeout = AnswerTimeout()
        self._before: dict[bytes, int] | None = None  # the positions of the poll before, if it was answered, and ...
        self._asked_at, self._stuck = 0.0, 0  # ... when that was; see STUCK_MAX

    def asks_again(self, error: UStatusError) -> bool:
        """Returns whether the cause of the error may end by itself."""
        if error.code != UCode.ABORTED or not self._held_ms_max:
            return error.code in AGAIN
        now = asyncio.get_running_loop().time()
        if self._held_since is None:
            self._held_since = now
            log.warning("another holder uses the consumer; waiting for the end of its lease", error=error.message)
        return (now - self._held_since) * 1000 < self._held_ms_max

    async def command(self, request: CommandRequest) -> CommandResponse:
        """As HistoryClient.command, but waits for the answer as long as other answers take."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        try:
            answer = await self._client.command(request, patience_ms=self.timeout.ms)
        except UStatusError as error:
            if error.code == UCode.DEADLINE_EXCEEDED:
                self.timeout.lost()
            raise
        self.timeout.answered((loop.time() - began) * 1000)
        return answer

    async def poll(self, request: PollRequest, *, at_once: bool = False) -> PollResponse | None:
        """Returns the answer, or None after a pause if there was none. `at_once`: the service does not wait for
        records. Raises UStatusError if the service refuses."""
        loop = asyncio.get_running_loop()
        positions = seqs_of(request.positions)
        await self._pause_if_stuck(positions)
        began = loop.time()
        request.wait_ms = 0 if at_once else self.wait_ms
        try:
            response = await self._client.poll(request, patience_ms=self.timeout.ms)
        except UStatusError as error:
            if not self.asks_again(error):
                raise
            if error.code == UCode.DEADLINE_EXCEEDED:
                self.timeout.lost()
            self.wait_ms = max(min(WAIT_MS_MIN, self._wait_ms_max), self.wait_ms // 2)
            if self.connected:
                if error.code in AGAIN:
                    log.warning("the history does not answer; asking again", error=str(error))
                self._set_connected(False)
            await self.backoff.wait()
            return None
        if at_once:
            self.timeout.answered((loop.time() - began) * 1000)
        if not is_sound(response):
            log.warning("the history gave an invalid answer; asking again")
            await self.backoff.wait()
            return None
        self.backoff.reset()
        self._before, self._held_since = positions, None
        if not self.connected:
            self._set_connected(True)
        if not response.batches and not response.gaps and not response.more and request.wait_ms:
            if (loop.time() - began) * 1000 < request.wait_ms / 4:
                await asyncio.sleep(PAUSE_MS / 1000)
            self.wait_ms = min(request.wait_ms * 2, self._wait_ms_max)
        return response

    async def _pause_if_stuck(self, positions: dict[bytes, int]) -> None:
        loop = asyncio.get_running_loop()
        before, self._before = self._before, None
        if before is not None:
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

    def _set_connected(self, connected: bool) -> None:
        self.connected = connected
        if self._on_connected is not None:
            self._on_connected(connected)


class Frames(UListener):
    """Receives the frames that any service pushes to one address, and passes each to the reader of its push.

    `dropped`: frames that are unreadable, or stale: of a push that is not expected.
    """

    def __init__(self, transport: UTransport, local: LocalUriProvider) -> None:
        self._transport, self.to = transport, local.get_source()
        self._pushes: dict[tuple[int, bytes], Callable[[Frame, int], None]] = {}
        self._topics: set[bytes] = set()
        self.dropped: Counter[str] = Counter()

    async def listen(self, topic: UUri) -> None:
        """Listen for the frames of one service. Raises UStatusError as the transport does."""
        key = topic.SerializeToString()
        if key not in self._topics:
            await self._transport.register_listener(topic, self, self.to)
        self._topics.add(key)

    async def leave(self, topic: UUri) -> None:
        """Stops listening for frames on a topic."""
        key = topic.SerializeToString()
        if key in self._topics:
            self._topics.remove(key)
            with contextlib.suppress(UStatusError):  # the transport may be closed already
                await self._transport.unregister_listener(topic, self, self.to)

    async def close(self) -> None:
        """Stops listening for frames."""
        for key in list(self._topics):
            await self.leave(UUri.FromString(key))

    def expect(self, topic: UUri, subscription: int, callback: Callable[[Frame, int], None]) -> None:
        """`callback(frame, bytes)` is called on the loop for each frame of that push."""
        self._pushes[subscription, topic.SerializeToString()] = callback

    def forget(self, topic: UUri, subscription: int) -> None:
        """Ends what `expect` has begun."""
        self._pushes.pop((subscription, topic.SerializeToString()), None)

    def on_receive(self, message: UMessage) -> None:
        """Takes a frame, and passes it on to the callback of its subscription."""
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
