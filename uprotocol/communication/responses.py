"""The queue of responses to the network: bounded in messages and bytes, in turn by caller.

post(response)          -> waiting, by caller -> one send_batch after the other, some of each caller -> the network
refuse(request, error) -'                        '-> failed: counted; the caller gets DEADLINE_EXCEEDED from its timer

A caller that sends requests without end, or accepts no responses, fills only its own share of the queue.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable
from typing import Final

import structlog

from uprotocol import attributes as attrs
from uprotocol import uri as uris
from uprotocol import uuid as uuids
from uprotocol.communication.shares import CALLERS_SHARE, Shares
from uprotocol.message import UMessageBuilder, UPayload, error_response
from uprotocol.status import UStatusError
from uprotocol.transport import UTransport
from uprotocol.v1.uattributes_pb2 import UAttributes
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.umessage_pb2 import UMessage
from uprotocol.v1.uri_pb2 import UUri
from uprotocol.v1.ustatus_pb2 import UStatus

RESPONSES_WAITING_MAX: Final = 4_096  # waiting responses: enough for the refusals of a burst, too
RESPONSES_BYTES_MAX: Final = 32 << 20  # memory of all waiting responses while the network accepts none
RESPONSES_BATCH_MAX: Final = 512  # a larger batch does not lower the cost per message
BATCH_BYTES_MAX: Final = 4 << 20  # of one batch, so that the next callers have their turn soon
RESPONSE_MEMORY_BYTES: Final = 1_024  # memory of a response beside its payload
METHODS_MAX: Final = 1_000  # methods that are remembered after they are unregistered

log = structlog.get_logger()


class Responses:
    """The queue of responses of one server. Here a caller is an authority, since a sender can invent uEntities.

    `dropped` counts responses that were not sent, by reason; its owner may add other counts.
    """

    def __init__(
        self,
        transport: UTransport,
        *,
        waiting_max: int = RESPONSES_WAITING_MAX,
        bytes_max: int = RESPONSES_BYTES_MAX,
        batch_max: int = RESPONSES_BATCH_MAX,
        share: int = CALLERS_SHARE,
    ) -> None:
        self._transport, self._batch_max = transport, batch_max
        # by caller; a response counts until the network has accepted it
        self._shares = Shares[str](waiting_max, bytes_max, share)
        self._waiting: dict[str, deque[UMessage]] = {}  # by caller, in the order of their turns
        self._sender: asyncio.Task[None] | None = None
        self._on_sent: Callable[[], None] | None = None
        self._is_failing = False  # the last batch was not sent, and that is logged
        self.dropped: Counter[str] = Counter()

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    @property
    def bytes(self) -> int:
        """The bytes of all responses that the network has not accepted yet."""
        return self._shares.bytes

    def has_capacity(self, caller: str, bytes: int, promised: int = 0, promised_to_all: int = 0) -> bool:
        """True if a response of `bytes` fits beside all that wait, and beside the bytes promised to this caller and to
        all callers."""
        return self._shares.full(caller, bytes, promised, promised_to_all) is None

    def on_sent(self, callback: Callable[[], None]) -> None:
        """Call `callback` after each batch, when capacity may have become free."""
        self._on_sent = callback

    def post(self, response: UMessage) -> None:
        """Queue `response`; without capacity it is dropped and counted. Raises nothing."""
        caller, bytes = response.attributes.sink.authority_name, len(response.payload) + RESPONSE_MEMORY_BYTES
        if self._shares.full(caller, bytes) is not None:
            self.dropped["responses_full"] += 1
            return
        self._shares.add(caller, 1, bytes)
        self._waiting.setdefault(caller, deque()).append(response)
        if self._sender is None:
            self._sender = asyncio.ensure_future(self._send())

    def refuse(self, request: UAttributes, error: BaseException) -> None:
        """Answer with the status of a UStatusError; any other exception is a bug of the handler and answers INTERNAL
        (dsn~service-error-model-error-response~1)."""
        if isinstance(error, UStatusError):
            status = error.status
        else:
            log.error("a request handler failed", method=uris.format(request.sink), exc_info=error)
            status = UStatus(code=UCode.INTERNAL, message="the service failed to handle the request; its log says why")
        if not self.has_capacity(request.source.authority_name, RESPONSE_MEMORY_BYTES):  # before the response is built
            self.dropped["responses_full"] += 1
            return
        try:
            response = error_response(request, status)
        except UStatusError:  # no valid response to this malformed request exists
            self.dropped["unanswerable"] += 1
        else:
            self.post(response)

    async def drain(self, ms_max: int) -> None:
        """Wait at most `ms_max` until the network has accepted all responses; the rest is dropped and counted."""
        if self._sender is not None:
            _, late = await asyncio.wait({self._sender}, timeout=ms_max / 1000)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)
        rest = [response for waiting in self._waiting.values() for response in waiting]
        self.dropped["response_not_sent"] += len(rest)
        self._waiting.clear()
        self._settle(rest)

    async def _send(self) -> None:
        """Send batches until nothing waits."""
        try:
            while self._waiting:
                batch = self._next_batch()
                try:
                    statuses = await self._transport.send_batch(batch)
                except UStatusError as error:
                    statuses = [error.status] * len(batch)
                except asyncio.CancelledError:
                    self.dropped["response_not_sent"] += len(batch)
                    raise
                except Exception as error:  # a bug of the transport must not stop later responses
                    statuses = [UStatus(code=UCode.INTERNAL, message=repr(error))] * len(batch)
                finally:
                    self._settle(batch)
                failed = [status for status in statuses if status.code]
                if failed:
                    self.dropped["response_not_sent"] += len(failed)
                    if not self._is_failing:
                        what = "responses are not sent, and their callers will time out"
                        log.warning(what, responses=len(failed), why=failed[0].message)
                self._is_failing = bool(failed)
        finally:
            self._sender = None

    def _next_batch(self) -> list[UMessage]:
        """Returns at least one response; callers take turns."""
        batch: list[UMessage] = []
        bytes = 0
        while self._waiting and len(batch) < self._batch_max and bytes < BATCH_BYTES_MAX:
            caller, waiting = next(iter(self._waiting.items()))
            batch.append(waiting.popleft())
            bytes += len(batch[-1].payload) + RESPONSE_MEMORY_BYTES
            del self._waiting[caller]
            if waiting:
                self._waiting[caller] = waiting  # behind the others
        return batch

    def _settle(self, responses: list[UMessage]) -> None:
        """Free the capacity of `responses`."""
        for response in responses:
            bytes = len(response.payload) + RESPONSE_MEMORY_BYTES
            self._shares.add(response.attributes.sink.authority_name, -1, -bytes)
        if responses and self._on_sent is not None:
            self._on_sent()


def response_to(request: UAttributes, payload: UPayload | None) -> UMessage:
    """The response to `request`: addresses swapped, reqid, priority and ttl copied (spec section 3.5,
    dsn~service-error-model-success-response~1). It is valid if the request is, so it is not validated."""
    attributes = UAttributes(
        type=attrs.RESPONSE,
        id=UMessageBuilder.new_id(),
        source=request.sink,
        sink=request.source,
        reqid=request.id,
        priority=request.priority,
        ttl=request.ttl,
    )
    if payload is not None:
        attributes.payload_format = payload.format
    return UMessage(attributes=attributes, payload=None if payload is None else payload.data)


class Unserved(Responses):
    """Answers requests for methods that are not served: UNIMPLEMENTED, or UNAVAILABLE if the method may be served later
    or by another process.

    `is_settled`: the owner sets it when all its methods are served, and resets it when it stops. Until then no request
    is answered UNIMPLEMENTED, since a caller then gives up permanently.
    """

    def __init__(self, transport: UTransport) -> None:
        super().__init__(transport)
        self._served: set[tuple[int, int, int]] = set()  # includes methods that are no longer served
        self.is_settled = False

    def served(self, method: UUri) -> None:
        """`method` is served from now on."""
        if len(self._served) < METHODS_MAX:
            self._served.add(_method(method))

    def answer(self, request: UAttributes) -> None:
        """Answer `request`, unless it has expired or is not a request."""
        if request.type != attrs.REQUEST or attrs.is_expired(request, uuids.now_ms()):
            return
        what = uris.format(request.sink)
        if not self.is_settled or _method(request.sink) in self._served:
            error = UStatusError(UCode.UNAVAILABLE, f"{what} is not served now: try again later")
        else:
            error = UStatusError(UCode.UNIMPLEMENTED, f"there is no method {what}")
        self.refuse(request, error)


def _method(sink: UUri) -> tuple[int, int, int]:
    return sink.ue_id, sink.ue_version_major, sink.resource_id
