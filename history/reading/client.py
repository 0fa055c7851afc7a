"""The client side of the history: its methods as calls, and the frames of its pushes."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Final

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
from uprotocol.status import UStatusError
from uprotocol.transport import LocalUriProvider, UListener, UTransport
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.umessage_pb2 import UMessage
from uprotocol.v1.uri_pb2 import UUri

TIMEOUT_MS: Final = 10_000  # of a call, in addition to what the service may wait
FRONTIERS_BYTES_MAX: Final = 64 << 20  # of all pages of frontiers together: some 200,000 gateways


class HistoryClient:
    """Calls core.ustreamer at `service`, whose resource is ignored. Used on the loop of `rpc_client`.

    Pushes need `frames`, made for the address of `rpc_client`. All methods raise UStatusError: what the service
    answered, DEADLINE_EXCEEDED after `timeout_ms` (plus what a poll may wait), or DATA_LOSS for an invalid answer.
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
        """Returns the logs, each with the newest record of `topics`, which are patterns (none: all topics). The cost
        does not depend on how many match."""
        asked = DescribeRequest(topics=topics, listing=DescribeRequest.LISTING_NONE)
        return list((await self._call(self._describe, asked, DescribeResponse, 0)).logs)

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

    # -- frames

    @property
    def can_be_pushed(self) -> bool:
        return self._frames is not None

    @property
    def frames(self) -> Frames:
        assert self._frames is not None, "made with `frames`"
        return self._frames

    async def listen(self) -> None:
        """Listen for frames. Called before a push begins. Raises UStatusError as the transport does."""
        await self.frames.listen(self._topic)

    def expect(self, subscription: int, callback: Callable[[Frame, int], None]) -> None:
        """See Frames.expect."""
        self.frames.expect(self._topic, subscription, callback)

    def forget(self, subscription: int) -> None:
        self.frames.forget(self._topic, subscription)

    async def close(self) -> None:
        """Stop listening for frames. May be called twice."""
        if self._frames is not None:
            await self._frames.leave(self._topic)


class Frames(UListener):
    """Receives the frames that any service pushes to one address, and passes each to the reader of its push.

    `dropped`: frames that are unreadable, or stale: of a push that is not expected.
    """

    def __init__(self, transport: UTransport, local: LocalUriProvider) -> None:
        self._transport, self.to = transport, local.get_source()
        self._pushes: dict[tuple[int, bytes], Callable[[Frame, int], None]] = {}
        self._topics: Counter[bytes] = Counter()
        self.dropped: Counter[str] = Counter()

    async def listen(self, topic: UUri) -> None:
        """Listen for the frames of one service. Raises UStatusError as the transport does."""
        key = topic.SerializeToString()
        if not self._topics[key]:
            await self._transport.register_listener(topic, self, self.to)
        self._topics[key] = 1

    async def leave(self, topic: UUri) -> None:
        if self._topics.pop(topic.SerializeToString(), 0):
            with contextlib.suppress(UStatusError):  # the transport may be closed already
                await self._transport.unregister_listener(topic, self, self.to)

    async def close(self) -> None:
        for key in list(self._topics):
            await self.leave(UUri.FromString(key))

    def expect(self, topic: UUri, subscription: int, callback: Callable[[Frame, int], None]) -> None:
        """`callback(frame, bytes)` is called on the loop for each frame of that push."""
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
    lists = (answer.begin, answer.next, answer.gaps, answer.batches, answer.frontiers)
    return all(len(one.incarnation) == INCARNATION_BYTES for each in lists for one in each)
