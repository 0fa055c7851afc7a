"""Responses on their way to the network: a bounded number of messages and bytes, callers in turn.

post(response)          -> waiting, by caller -> one send_batch after the other, some of each caller -> the network
refuse(request, error) -'                        '-> not taken: counted, and the caller's own timer tells it

A caller that asks without end, or takes no answers, fills its own share: whatever the others are owed has room beside
it.
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

RESPONSES_WAITING_MAX: Final = 4_096  # for the network to take them: the refusals of a burst must find room too
RESPONSES_BYTES_MAX: Final = 32 << 20  # of them in all: what long answers to a network that takes none may cost
RESPONSES_BATCH_MAX: Final = 512  # beyond it the cost per message no longer falls
BATCH_BYTES_MAX: Final = 4 << 20  # of one batch: the next callers' turn comes soon
RESPONSE_MEMORY_BYTES: Final = 1_024  # what a response costs beside its payload
METHODS_MAX: Final = 1_000  # that are remembered though they are not served any more

log = structlog.get_logger()


class Responses:
    """The outbox of whoever serves methods. A caller here is an authority: uEntities are made up at no cost.

    `dropped` counts what did not leave, by reason; its owner may count more there.
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
        # by caller; what is being sent counts until the network has taken it
        self._room = Shares[str](waiting_max, bytes_max, share)
        self._waiting: dict[str, deque[UMessage]] = {}  # by caller, in the order in which it is their turn
        self._sender: asyncio.Task[None] | None = None
        self._on_taken: Callable[[], None] | None = None
        self._is_failing = False  # the last batch was not sent, which has been told
        self.dropped: Counter[str] = Counter()

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    @property
    def bytes(self) -> int:
        """Of all that the network has not taken."""
        return self._room.bytes

    def has_room(self, caller: str, bytes: int, promised: int = 0, promised_to_all: int = 0) -> bool:
        """True if a response of so many bytes would be taken beside all that waits, and what is promised to it and to
        all."""
        return self._room.full(caller, bytes, promised, promised_to_all) is None

    def on_taken(self, callback: Callable[[], None]) -> None:
        """Call it whenever there may be room that there was not before."""
        self._on_taken = callback

    def post(self, response: UMessage) -> None:
        """Raises nothing: what finds no room is dropped, and counted."""
        caller, bytes = response.attributes.sink.authority_name, _bytes(response)
        if not self.has_room(caller, bytes):
            self.dropped["responses_full"] += 1
            return
        self._room.add(caller, 1, bytes)
        self._waiting.setdefault(caller, deque()).append(response)
        if self._sender is None:
            self._sender = asyncio.ensure_future(self._send())

    def refuse(self, request: UAttributes, error: BaseException) -> None:
        """Answer with the code of a UStatusError; anything else is a fault of ours: INTERNAL
        (dsn~service-error-model-error-response~1)."""
        if isinstance(error, UStatusError):
            status = error.status
        else:
            log.error("a request handler failed", method=uris.format(request.sink), exc_info=error)
            status = UStatus(code=UCode.INTERNAL, message="the service failed to handle the request; its log says why")
        if not self.has_room(request.source.authority_name, RESPONSE_MEMORY_BYTES):  # asked before it costs anything
            self.dropped["responses_full"] += 1
            return
        try:
            response = error_response(request, status)
        except UStatusError:  # so malformed that no valid response to it exists
            self.dropped["unanswerable"] += 1
        else:
            self.post(response)

    async def drain(self, ms_max: int) -> None:
        """Wait until the network has taken them, at most `ms_max`; the rest is dropped and counted."""
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
        """Until nothing waits."""
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
                except Exception as error:  # a fault of the transport must not end the answers
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
        """One of each caller in turn, as many as fit: at least one."""
        batch: list[UMessage] = []
        bytes = 0
        while self._waiting and len(batch) < self._batch_max and bytes < BATCH_BYTES_MAX:
            caller, waiting = next(iter(self._waiting.items()))
            batch.append(waiting.popleft())
            bytes += _bytes(batch[-1])
            del self._waiting[caller]
            if waiting:
                self._waiting[caller] = waiting  # behind the others
        return batch

    def _settle(self, gone: list[UMessage]) -> None:
        for response in gone:
            self._room.add(response.attributes.sink.authority_name, -1, -_bytes(response))
        if gone and self._on_taken is not None:
            self._on_taken()


def response_to(request: UAttributes, payload: UPayload | None) -> UMessage:
    """Addresses swapped, reqid, priority and ttl copied (spec section 3.5,
    dsn~service-error-model-success-response~1). Valid if the request is: nothing is checked again."""
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
    """Answers requests for methods that nobody serves: UNIMPLEMENTED, or UNAVAILABLE if the method may be there later
    or elsewhere.

    `is_settled`: set by the owner once all is served that ever will be, and taken back when it stops. Until then nobody
    is told that a method does not exist: who hears that gives up for good.
    """

    def __init__(self, transport: UTransport) -> None:
        super().__init__(transport)
        self._served: set[tuple[int, int, int]] = set()  # also what is served no more
        self.is_settled = False

    def served(self, method: UUri) -> None:
        """Somebody serves it from now on."""
        if len(self._served) < METHODS_MAX:
            self._served.add(_method(method))

    def answer(self, request: UAttributes) -> None:
        """Anything but a request that is alive is left alone."""
        if request.type != attrs.REQUEST or attrs.is_expired(request, uuids.now_ms()):
            return
        what = uris.format(request.sink)
        if not self.is_settled or _method(request.sink) in self._served:
            error = UStatusError(UCode.UNAVAILABLE, f"{what} is not served just now: try again later")
        else:
            error = UStatusError(UCode.UNIMPLEMENTED, f"there is no method {what}")
        self.refuse(request, error)


def _method(sink: UUri) -> tuple[int, int, int]:
    return sink.ue_id, sink.ue_version_major, sink.resource_id


def _bytes(response: UMessage) -> int:
    return len(response.payload) + RESPONSE_MEMORY_BYTES
