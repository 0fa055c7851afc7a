"""Serves own methods: each request to its handler, each result back as the response.

request -> checks -> handler -> result -> responses -> transport     sync: at once; async: a task, many side by side
             |          '-> UStatusError -> its code and a UStatus
             '-> expired: dropped; too many at once, in all or of one authority: RESOURCE_EXHAUSTED
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

from google.protobuf.message import Message

from uprotocol import attributes as attrs
from uprotocol import message as messages_
from uprotocol import uri as uris
from uprotocol import uuid as uuids
from uprotocol.communication.api import RequestCheck, RequestHandler, RpcServer
from uprotocol.communication.responses import CALLERS_SHARE, RESPONSES_BYTES_MAX, Responses
from uprotocol.message import UMessageBuilder, UPayload
from uprotocol.status import UStatusError, invalid
from uprotocol.transport import LocalUriProvider, UTransport
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.umessage_pb2 import UMessage

# a long poll holds one for as long as it waits; beyond a thousand the caller should go elsewhere
REQUESTS_RUNNING_MAX: Final = 1_000
REQUESTS_BYTES_MAX: Final = 32 << 20  # of the payloads of those: a thousand of the longest would be a gigabyte
DRAIN_MS_MAX: Final = 5_000  # close() gives running handlers this long; a caller's own timer has rarely more left

_CALLERS: Final = uris.pattern(resource=uris.RESOURCE_REPLY)
Result = UPayload | Message | None


class InMemoryRpcServer(RpcServer):
    """Handlers run on the event loop; an async one is a task that this server owns.

    A handler answers with a UPayload, a protobuf message, or None (an empty payload). It may raise UStatusError, which
    the caller gets; anything else it raises is logged, and the caller gets INTERNAL. `check`, if given, sees every
    request first and may refuse it. One authority has at most one part in `share` of what may run, and of the responses
    that wait for the network. `dropped` counts requests that are expired, invalid and unanswerable, and responses that
    the network did not take.
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
        self._running_max, self._bytes_max, self._share = requests_running_max, requests_bytes_max, share
        self._drain_ms_max = drain_ms_max
        self._methods: dict[int, _Method] = {}
        self._running: set[asyncio.Task[None]] = set()
        self._counts: Counter[str] = Counter()  # of those that run, by authority
        self._bytes: Counter[str] = Counter()
        self._running_bytes = 0
        self.responses = Responses(transport, bytes_max=responses_bytes_max, share=share)
        self.dropped = self.responses.dropped

    def __repr__(self) -> str:
        counts = f"methods={len(self._methods)}, running={len(self._running)}, responses={len(self.responses)}"
        return f"InMemoryRpcServer({self._local}, {counts})"

    async def register_request_handler(self, resource_id: int, handler: RequestHandler) -> None:
        """Serve own method `resource_id`. Doing it again changes nothing.

        Raises INVALID_ARGUMENT outside of 1 to 7FFF, ALREADY_EXISTS if another handler serves it, or what the transport
        says.
        """
        sink = self._local.get_resource(resource_id)
        if not uris.is_method(sink):
            raise invalid(f"a method has a resource of 1 to 7FFF, got {resource_id:X}")
        known = self._methods.get(resource_id)
        if known is not None:
            if known.handler == handler:
                return
            raise UStatusError(
                UCode.ALREADY_EXISTS, f"method {resource_id:X} has a handler already: unregister that one first"
            )
        method = self._methods[resource_id] = _Method(self, handler)
        try:
            await self._transport.register_listener(_CALLERS, method, sink)
        except BaseException:
            del self._methods[resource_id]
            raise

    async def unregister_request_handler(self, resource_id: int, handler: RequestHandler) -> None:
        """Take no more requests for `resource_id`; those that run are still answered. Raises NOT_FOUND."""
        method = self._methods.get(resource_id)
        if method is None or method.handler != handler:
            raise UStatusError(UCode.NOT_FOUND, f"this handler does not serve method {resource_id:X}")
        del self._methods[resource_id]
        await self._transport.unregister_listener(_CALLERS, method, self._local.get_resource(resource_id))

    async def close(self) -> None:
        """Take no more requests, let the running ones finish (those beyond `drain_ms_max` are answered UNAVAILABLE),
        send what is ready.

        May be called twice. The transport stays open: it is its owner's.
        """
        for resource_id, method in list(self._methods.items()):
            # the transport may have been closed before us, and its listeners with it
            with contextlib.suppress(UStatusError):
                await self.unregister_request_handler(resource_id, method.handler)
        if self._running:
            _, late = await asyncio.wait(self._running, timeout=self._drain_ms_max / 1000)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)
        await self.responses.drain(self._drain_ms_max)

    def _accept(self, request: UMessage, handler: RequestHandler) -> None:
        attributes = request.attributes
        if attrs.is_expired(attributes, self._now_ms()):
            self.dropped["expired"] += 1
            return
        try:
            self._require_room(attributes.source.authority_name, len(request.payload))
            messages_.validate(request)
            if attributes.type != attrs.REQUEST:
                raise invalid("expected a request")
            if self._check is not None:
                self._check(request)
            result = handler(request)
        except Exception as error:
            self.responses.refuse(request.attributes, error)
            return
        if inspect.isawaitable(result):
            task = asyncio.ensure_future(self._run(request, result))
            self._running.add(task)
            self._count(attributes.source.authority_name, 1, len(request.payload))
            task.add_done_callback(
                functools.partial(self._ended, attributes.source.authority_name, len(request.payload))
            )
        else:
            self._answer(request, result)

    def _require_room(self, caller: str, bytes: int) -> None:
        """Raises RESOURCE_EXHAUSTED. One request of a caller always fits beside those of others."""
        for whose, running, running_bytes, parts in (
            ("", len(self._running), self._running_bytes, 1),
            (f" for authority {caller!r}", self._counts[caller], self._bytes[caller], self._share),
        ):
            running_max, bytes_max = max(1, self._running_max // parts), self._bytes_max // parts
            if running >= running_max:
                raise UStatusError(
                    UCode.RESOURCE_EXHAUSTED, f"{running_max} requests are being handled{whose}, which is the limit"
                )
            if running and running_bytes + bytes > bytes_max:
                raise UStatusError(
                    UCode.RESOURCE_EXHAUSTED,
                    f"requests of {bytes_max} bytes are being handled{whose}, which is the limit: ask for less at once",
                )

    def _count(self, caller: str, requests: int, bytes: int) -> None:
        self._counts[caller] += requests
        self._bytes[caller] += bytes
        self._running_bytes += bytes
        if not self._counts[caller]:
            del self._counts[caller], self._bytes[caller]

    def _ended(self, caller: str, bytes: int, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        self._count(caller, -1, -bytes)

    async def _run(self, request: UMessage, pending: Awaitable[Result]) -> None:
        try:
            result = await pending
        except asyncio.CancelledError:
            self.responses.refuse(
                request.attributes,
                UStatusError(UCode.UNAVAILABLE, "the service stopped while it handled the request: try again later"),
            )
            raise
        except Exception as error:
            self.responses.refuse(request.attributes, error)
        else:
            self._answer(request, result)

    def _answer(self, request: UMessage, result: Result) -> None:
        """dsn~service-error-model-success-response~1."""
        try:
            payload = UPayload.pack(result) if isinstance(result, Message) else result
            assert payload is None or isinstance(payload, UPayload), f"a handler returned {type(payload).__name__}"
            response = UMessageBuilder.response_for_request(request.attributes).build_from_upayload(payload)
        except Exception as error:
            self.responses.refuse(request.attributes, error)
        else:
            self.responses.post(response)


class _Method:
    """The listener of one method."""

    def __init__(self, server: InMemoryRpcServer, handler: RequestHandler) -> None:
        self._server, self.handler = server, handler

    def on_receive(self, message: UMessage) -> None:
        self._server._accept(message, self.handler)

    def on_receive_batch(self, messages: Sequence[UMessage]) -> None:
        for message in messages:
            self._server._accept(message, self.handler)
