"""Serves own methods: passes each request to its handler, and returns the result as the response.

request -> capacity? -> check -> handler -> result -> responses -> transport   sync: at once; async: concurrent tasks
             |                      '-> UStatusError -> its code and a UStatus
             '-> expired: dropped; too many at once, in total or from one authority: RESOURCE_EXHAUSTED
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

from google.protobuf.message import Message

from uprotocol import attributes as attrs
from uprotocol import uri as uris
from uprotocol import uuid as uuids
from uprotocol.communication.api import RequestCheck, RequestHandler, RpcServer
from uprotocol.communication.responses import RESPONSES_BYTES_MAX, Responses, response_to
from uprotocol.communication.shares import CALLERS_SHARE, Full, Shares
from uprotocol.message import UPayload
from uprotocol.status import UStatusError, invalid
from uprotocol.transport import LocalUriProvider, UTransport
from uprotocol.v1.uattributes_pb2 import UAttributes
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.umessage_pb2 import UMessage

REQUESTS_RUNNING_MAX: Final = 1_000  # a long poll counts for as long as it waits
REQUESTS_BYTES_MAX: Final = 32 << 20  # payloads of the running requests: 1,000 of maximal length would be a gigabyte
DRAIN_MS_MAX: Final = 5_000  # how long close() waits for running handlers; most callers time out earlier

_CALLERS: Final = uris.pattern(resource=uris.RESOURCE_REPLY)
Result = UPayload | Message | None


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
        now_ms: Callable[[], int] = uuids.now_ms,
    ) -> None:
        self._transport, self._local = transport, local
        self._check, self._now_ms = check, now_ms
        self._drain_ms_max = drain_ms_max
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
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)
        await self.responses.drain(self._drain_ms_max)

    def on_receive(self, message: UMessage) -> None:
        self.on_receive_batch([message])

    def on_receive_batch(self, messages: Sequence[UMessage]) -> None:
        now_ms = self._now_ms()
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
            self._answer(attributes, result)
            return
        task = asyncio.ensure_future(self._run(attributes, result))
        self._running.add(task)
        self._shares.add(caller, 1, bytes)
        task.add_done_callback(self._running.discard)
        task.add_done_callback(lambda _: self._shares.add(caller, -1, -bytes))

    async def _run(self, request: UAttributes, pending: Awaitable[Result]) -> None:
        try:
            self._answer(request, await pending)
        except asyncio.CancelledError:
            why = "the service stopped while it handled the request: try again later"
            self.responses.refuse(request, UStatusError(UCode.UNAVAILABLE, why))
            raise
        except Exception as error:
            self.responses.refuse(request, error)

    def _answer(self, request: UAttributes, result: Result) -> None:
        payload = UPayload.pack(result) if isinstance(result, Message) else result
        assert payload is None or isinstance(payload, UPayload), f"a handler returned {type(payload).__name__}"
        self.responses.post(response_to(request, payload))


def _too_much(full: Full, caller: str) -> UStatusError:
    whose = f" for authority {caller!r}" if full.is_of_one else ""
    if not full.is_of_bytes:
        what = f"{full.limit} requests are being handled{whose}, which is the limit"
    else:
        what = f"requests of {full.limit} bytes are being handled{whose}, which is the limit: ask for less at once"
    return UStatusError(UCode.RESOURCE_EXHAUSTED, what)
