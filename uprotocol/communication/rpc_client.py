"""Calls: the response to a request is found by the request's id.

invoke_method -> pending[id] -> request -> ... -> response -> pending.pop(reqid) -> caller
                      |            |  all requests of one turn of the event loop: one send_batch
                      |            a timer for each, from its ttl
                      '-> DEADLINE_EXCEEDED; a later response is counted
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Sequence
from typing import Final, Self

from uprotocol import uri as uris
from uprotocol.attributes import RESPONSE
from uprotocol.communication.api import DEFAULT_OPTIONS, CallOptions, RpcClient
from uprotocol.message import UMessageBuilder, UPayload
from uprotocol.status import UStatusError, code_name
from uprotocol.tasks import end
from uprotocol.transport import LocalUriProvider, UTransport
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.umessage_pb2 import UMessage
from uprotocol.v1.uri_pb2 import UUri
from uprotocol.v1.ustatus_pb2 import UStatus

CALLS_PENDING_MAX: Final = 10_000  # ten seconds of a thousand calls a second; some 3 KB each

_OutgoingCall = tuple[UMessage, "asyncio.Future[UMessage]"]
"""A request, and its response."""


class InMemoryRpcClient(RpcClient):
    """One listener for all responses to the own address; calls run concurrently.

    `dropped` counts responses without a waiting call (late_response) and other messages (not_a_response: the only
    valid filter for responses from everywhere also matches notifications).
    """

    def __init__(
        self, transport: UTransport, local: LocalUriProvider, *, calls_pending_max: int = CALLS_PENDING_MAX
    ) -> None:
        self._transport, self._local = transport, local
        self._calls_pending_max = calls_pending_max
        self._pending: dict[tuple[int, int], asyncio.Future[UMessage]] = {}
        self._outgoing: list[_OutgoingCall] = []  # of this turn of the event loop: all of them are sent in one batch
        self._sending: set[asyncio.Task[None]] = set()
        self._open = False
        self.dropped: Counter[str] = Counter()

    def __repr__(self) -> str:
        return f"InMemoryRpcClient({self._local}, pending={len(self._pending)})"

    async def open(self) -> None:
        """Register the listener. May be called twice. Raises the errors of the transport."""
        await self._transport.register_listener(uris.ANY, self, self._local.get_source())
        self._open = True

    async def close(self) -> None:
        """Unregister the listener; waiting calls end with CANCELLED. May be called twice."""
        if not self._open:
            return
        self._open = False
        for call in self._pending.values():
            if not call.done():
                call.set_exception(UStatusError(UCode.CANCELLED, "the RPC client was closed while the call waited"))
        with contextlib.suppress(UStatusError):  # a transport that was closed earlier has no listeners
            await self._transport.unregister_listener(uris.ANY, self, self._local.get_source())
        await end(*self._sending)

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def invoke_method(
        self, method: UUri, payload: UPayload | None = None, options: CallOptions = DEFAULT_OPTIONS
    ) -> UPayload:
        """Returns the payload of the response (dsn~service-error-model-failed-rpc~1).

        Raises UStatusError: DEADLINE_EXCEEDED after `options.timeout_ms`, the response's commstatus with the message
        and details of its UStatus, RESOURCE_EXHAUSTED at the limit of pending calls, INVALID_ARGUMENT, CANCELLED, or
        the error of the transport.
        """
        if not self._open:
            what = "the RPC client is not open, so it can receive no response: await open() first"
            raise UStatusError(UCode.FAILED_PRECONDITION, what)
        if len(self._pending) >= self._calls_pending_max:
            what = f"{self._calls_pending_max} calls are pending, which is the limit: try later"
            raise UStatusError(UCode.RESOURCE_EXHAUSTED, what)
        request = self._request(method, payload, options)
        key = (request.attributes.id.msb, request.attributes.id.lsb)
        loop = asyncio.get_running_loop()
        call = self._pending[key] = loop.create_future()
        if not self._outgoing:
            loop.call_soon(self._send_outgoing)
        self._outgoing.append((request, call))
        timer = asyncio.timeout(options.timeout_ms / 1000)
        try:
            async with timer:
                response = await call
        except TimeoutError:
            if not timer.expired():
                raise
            what = f"{uris.format(request.attributes.sink)} gave no answer within {options.timeout_ms} ms"
            raise UStatusError(UCode.DEADLINE_EXCEEDED, what) from None
        finally:
            del self._pending[key]
            if call.done() and not call.cancelled():
                call.exception()  # mark as retrieved: close() may have set it after the send failed
        return _result(response)

    def _request(self, method: UUri, payload: UPayload | None, options: CallOptions) -> UMessage:
        sink = uris.with_authority(method, self._local.get_authority())
        builder = UMessageBuilder.request(self._local.get_source(), sink, options.timeout_ms)
        builder.with_priority(options.priority)
        if options.token is not None:
            builder.with_token(options.token)
        if options.permission_level is not None:
            builder.with_permission_level(options.permission_level)
        if options.traceparent is not None:
            builder.with_traceparent(options.traceparent)
        return builder.build_from_upayload(payload)

    def _send_outgoing(self) -> None:
        """A call that has ended already is not sent."""
        batch, self._outgoing = [one for one in self._outgoing if not one[1].done()], []
        if batch:
            task = asyncio.ensure_future(self._send(batch))
            self._sending.add(task)
            task.add_done_callback(self._sending.discard)

    async def _send(self, batch: list[_OutgoingCall]) -> None:
        """A call whose request the network does not accept ends with that error."""
        errors: list[Exception | None]
        try:
            statuses = await self._transport.send_batch([request for request, _ in batch])
            errors = [UStatusError.from_status(status) if status.code else None for status in statuses]
        except Exception as error:
            errors = [error] * len(batch)
        for (_, call), failed in zip(batch, errors, strict=True):
            if failed is not None and not call.done():
                call.set_exception(failed)

    def on_receive(self, message: UMessage) -> None:
        """Takes a response, and completes the call that waits for it."""
        attributes = message.attributes
        if attributes.type != RESPONSE:
            self.dropped["not_a_response"] += 1
            return
        call = self._pending.get((attributes.reqid.msb, attributes.reqid.lsb))
        if call is None or call.done():
            self.dropped["late_response"] += 1
        else:  # the ttl is ignored: some networks reduce it during the transfer
            call.set_result(message)

    def on_receive_batch(self, messages: Sequence[UMessage]) -> None:
        """Takes responses."""
        for message in messages:
            self.on_receive(message)


def _result(response: UMessage) -> UPayload:
    """Returns the payload of `response`, or raises its error. The commstatus has precedence over a code in the
    payload."""
    code = response.attributes.commstatus
    payload = UPayload.of(response)
    if not code:  # unset is OK, and OK is 0
        return payload
    try:
        status = payload.unpack(UStatus)
    except UStatusError:
        status = UStatus()
    if not status.message:
        status.message = f"the service answered {code_name(code)} and gave no reason"
    status.code = code
    raise UStatusError.from_status(status)
