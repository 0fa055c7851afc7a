"""Serves own methods: passes each request to its handler, and returns the result as the response.

request -> capacity? -> check -> handler -> result -> Responses                sync: at once; async: concurrent tasks
             |                      '-> UStatusError -> its code and a UStatus
             '-> expired: dropped; too many at once, in total or from one authority: RESOURCE_EXHAUSTED

Responses: bounded in messages and bytes, in turn by caller -> one send_batch after the other, some of each caller
                                    a response that is not sent is counted; its caller gets DEADLINE_EXCEEDED <-'

A caller that sends requests without end, or accepts no responses, fills only its own share.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

import structlog
from google.protobuf.message import Message

from uprotocol import attributes as attrs
from uprotocol import uri as uris
from uprotocol import uuid as uuids
from uprotocol.communication.api import RequestCheck, RequestHandler, RpcServer
from uprotocol.communication.shares import CALLERS_SHARE, Full, Shares
from uprotocol.message import PROTOBUF, UPayload, error_response
from uprotocol.status import UStatusError, invalid
from uprotocol.tasks import end
from uprotocol.transport import LocalUriProvider, UTransport
from uprotocol.v1.uattributes_pb2 import UAttributes
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.umessage_pb2 import UMessage
from uprotocol.v1.uri_pb2 import UUri
from uprotocol.v1.ustatus_pb2 import UStatus

REQUESTS_RUNNING_MAX: Final = 1_000  # a long poll counts for as long as it waits
REQUESTS_BYTES_MAX: Final = 32 << 20  # payloads of the running requests: 1,000 of maximal length would be a gigabyte
DRAIN_MS_MAX: Final = 5_000  # how long close() waits for running handlers; most callers time out earlier
RESPONSES_WAITING_MAX: Final = 4_096  # waiting responses: enough for the refusals of a burst, too
RESPONSES_BYTES_MAX: Final = 32 << 20  # memory of all waiting responses while the network accepts none
RESPONSES_BATCH_MAX: Final = 512  # a larger batch does not lower the cost per message
RESPONSES_BATCH_BYTES_MAX: Final = 4 << 20  # of one batch, so that the next callers have their turn soon
RESPONSE_MEMORY_BYTES: Final = 1_024  # memory of a response beside its payload
METHODS_REMEMBERED_MAX: Final = 1_000  # methods that are remembered after they are unregistered

_CALLERS: Final = uris.pattern(resource=uris.RESOURCE_REPLY)
Result = UPayload | Message | None

log = structlog.get_logger()


class InMemoryRpcServer(RpcServer):
    """Handlers run on the event loop; an async handler runs in a task of this server.

    A handler returns a UPayload, a protobuf message, or None (an empty payload). If it raises UStatusError, the caller
    gets that error; any other exception is logged, and the caller gets INTERNAL. `check` is called first for every
    request and may refuse it. The transport has validated the request; if it does not, pass
    `uprotocol.message.validate` as `check`. One authority may use 1/`share` of the running requests and of the waiting
    responses. `dropped` counts expired requests, refused requests that can't be answered, and responses that the
    network did not accept.
    """

    def __init__(
        self,
        transport: UTransport,
        local: LocalUriProvider,
        *,
        check: RequestCheck | None = None,
        requests_running_max: int = REQUESTS_RUNNING_MAX,
        requests_bytes_max: int = REQUESTS_BYTES_MAX,
        responses_bytes_max: int = RESPONSES_BYTES_MAX,
        share: int = CALLERS_SHARE,
        drain_ms_max: int = DRAIN_MS_MAX,
    ) -> None:
        self._transport, self._local = transport, local
        self._check, self._drain_ms_max = check, drain_ms_max
        self._methods: dict[int, RequestHandler] = {}
        self._running: set[asyncio.Task[None]] = set()
        self._shares = Shares[str](requests_running_max, requests_bytes_max, share)  # running requests, by authority
        self.responses = Responses(transport, bytes_max=responses_bytes_max, share=share)
        self.dropped = self.responses.dropped

    def __repr__(self) -> str:
        counts = f"methods={len(self._methods)}, running={len(self._running)}, responses={len(self.responses)}"
        return f"InMemoryRpcServer({self._local}, {counts})"

    async def register_request_handler(self, resource_id: int, handler: RequestHandler) -> None:
        """Serve own method `resource_id`. Repeating it changes nothing.

        Raises INVALID_ARGUMENT outside of 1 to 7FFF, ALREADY_EXISTS if another handler serves it, or the error of the
        transport.
        """
        sink = self._local.get_resource(resource_id)
        if not uris.is_method(sink):
            raise invalid(f"a method has a resource of 1 to 7FFF, got {resource_id:X}")
        known = self._methods.get(resource_id)
        if known == handler:
            return
        if known is not None:
            what = f"method {resource_id:X} has a handler already: unregister that one first"
            raise UStatusError(UCode.ALREADY_EXISTS, what)
        self._methods[resource_id] = handler
        try:
            await self._transport.register_listener(_CALLERS, self, sink)
        except BaseException:
            del self._methods[resource_id]
            raise

    async def unregister_request_handler(self, resource_id: int, handler: RequestHandler) -> None:
        """Accept no more requests for `resource_id`; running ones are still answered. Raises NOT_FOUND."""
        if resource_id not in self._methods or self._methods[resource_id] != handler:
            raise UStatusError(UCode.NOT_FOUND, f"this handler does not serve method {resource_id:X}")
        del self._methods[resource_id]
        await self._transport.unregister_listener(_CALLERS, self, self._local.get_resource(resource_id))

    async def close(self) -> None:
        """Accept no more requests, wait for the running ones (at most `drain_ms_max`, then they are answered
        UNAVAILABLE), and send the waiting responses.

        May be called twice. The transport stays open: its owner closes it.
        """
        for resource_id, handler in list(self._methods.items()):
            with contextlib.suppress(UStatusError):  # a transport that was closed earlier has no listeners
                await self.unregister_request_handler(resource_id, handler)
        if self._running:
            _, late = await asyncio.wait(self._running, timeout=self._drain_ms_max / 1000)
            await end(*late)
        await self.responses.drain(self._drain_ms_max)

    def on_receive(self, message: UMessage) -> None:
        """Takes a request."""
        self.on_receive_batch([message])

    def on_receive_batch(self, messages: Sequence[UMessage]) -> None:
        """Takes requests; each is answered by the handler of its method, or with an error."""
        now_ms = uuids.now_ms()
        for request in messages:
            if attrs.is_expired(request.attributes, now_ms):
                self.dropped["expired"] += 1
                continue
            try:
                self._handle(request)
            except Exception as error:
                self.responses.refuse(request.attributes, error)

    def _handle(self, request: UMessage) -> None:
        """Raises the error that the caller gets."""
        attributes = request.attributes
        caller, bytes = attributes.source.authority_name, len(request.payload)
        full = self._shares.full(caller, bytes)
        if full is not None:
            raise _too_much(full, caller)
        if self._check is not None:
            self._check(request)
        handler = self._methods.get(attributes.sink.resource_id)
        if handler is None:
            raise UStatusError(UCode.UNAVAILABLE, "this method is no longer served")
        result = handler(request)
        if not inspect.isawaitable(result):
            self.responses.respond(attributes, result)
            return
        task = asyncio.ensure_future(self._run(attributes, result))
        self._running.add(task)
        self._shares.add(caller, 1, bytes)
        task.add_done_callback(self._running.discard)
        task.add_done_callback(lambda _: self._shares.add(caller, -1, -bytes))

    async def _run(self, request: UAttributes, pending: Awaitable[Result]) -> None:
        try:
            self.responses.respond(request, await pending)
        except asyncio.CancelledError:
            why = "the service stopped while it handled the request: try again later"
            self.responses.refuse(request, UStatusError(UCode.UNAVAILABLE, why))
            raise
        except Exception as error:
            self.responses.refuse(request, error)


def _too_much(full: Full, caller: str) -> UStatusError:
    whose = f" for authority {caller!r}" if full.is_of_one else ""
    if not full.is_of_bytes:
        what = f"{full.limit} requests are being handled{whose}, which is the limit"
    else:
        what = f"requests of {full.limit} bytes are being handled{whose}, which is the limit: ask for less at once"
    return UStatusError(UCode.RESOURCE_EXHAUSTED, what)


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
        self.shares = Shares[str](waiting_max, bytes_max, share)
        self._waiting: dict[str, deque[UMessage]] = {}  # by caller, in the order of their turns
        self._sender: asyncio.Task[None] | None = None
        self.on_sent: Callable[[], None] = lambda: None  # called when capacity may have become free
        self._is_failing = False  # the last batch was not sent, and that is logged
        self.dropped: Counter[str] = Counter()

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def respond(self, request: UAttributes, result: Result) -> None:
        """Queue the response to `request`: addresses swapped, reqid, priority and ttl copied (spec section 3.5,
        dsn~service-error-model-success-response~1). It is valid if the request is, so it is not validated."""
        response = UMessage()
        attributes = response.attributes
        attributes.type, attributes.priority, attributes.ttl = attrs.RESPONSE, request.priority, request.ttl
        attributes.id.CopyFrom(uuids.new())
        attributes.source.CopyFrom(request.sink)
        attributes.sink.CopyFrom(request.source)
        attributes.reqid.CopyFrom(request.id)
        if isinstance(result, Message):
            response.payload, attributes.payload_format = result.SerializeToString(), PROTOBUF
        elif result is not None:
            assert isinstance(result, UPayload), f"a handler returned {type(result).__name__}"
            response.payload, attributes.payload_format = result.data, result.format
        self.post(response)

    def post(self, response: UMessage) -> None:
        """Queue `response`; without capacity it is dropped and counted. Raises nothing."""
        caller, bytes = response.attributes.sink.authority_name, len(response.payload) + RESPONSE_MEMORY_BYTES
        if self.shares.full(caller, bytes) is not None:
            self.dropped["responses_full"] += 1
            return
        self.shares.add(caller, 1, bytes)
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
        if self.shares.full(request.source.authority_name, RESPONSE_MEMORY_BYTES):  # before the response is built
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
            await end(*late)
        rest = [response for waiting in self._waiting.values() for response in waiting]
        self.dropped["response_not_sent"] += len(rest)
        self._waiting.clear()
        self._settle(rest)

    async def _send(self) -> None:
        """Send batches until nothing waits; callers take turns."""
        try:
            while self._waiting:
                batch: list[UMessage] = []
                bytes = 0
                while self._waiting and len(batch) < self._batch_max and bytes < RESPONSES_BATCH_BYTES_MAX:
                    caller, waiting = next(iter(self._waiting.items()))
                    batch.append(waiting.popleft())
                    bytes += len(batch[-1].payload) + RESPONSE_MEMORY_BYTES
                    del self._waiting[caller]
                    if waiting:
                        self._waiting[caller] = waiting  # behind the others
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

    def _settle(self, responses: list[UMessage]) -> None:
        """Free the capacity of `responses`."""
        for response in responses:
            bytes = len(response.payload) + RESPONSE_MEMORY_BYTES
            self.shares.add(response.attributes.sink.authority_name, -1, -bytes)
        if responses:
            self.on_sent()


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
        if len(self._served) < METHODS_REMEMBERED_MAX:
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
