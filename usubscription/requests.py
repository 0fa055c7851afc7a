"""Receives requests in the order of arrival, and sends responses.

network -> //AUTHORITY/0/FF/FFFF -> ServiceTransport -> by version and resource -> CommandEntry, other methods,
                                      |                  responses to own calls, change notifications of other services
                                      '-> unknown method: UNIMPLEMENTED
CommandEntry: batch of requests -> codec -> store -> one transaction -> answered -> responses -> one send_batch
                                     '-> refused at once: commstatus and UStatus

Networks keep the order within one filter, but not between filters: Zenoh's Python binding has a thread for each. So
there is a single filter, and Subscribe and Unsubscribe of both versions use one queue to the store: the last command of
a client for a topic wins. They are handled in batches, without a task for each, since a fleet that reconnects sends
thousands a second. InMemoryRpcServer serves the other methods.

The transport has validated the messages, and checked that they have not expired.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final

import structlog

from storage.runtime import BATCH_MAX, WAITING_MAX
from uprotocol import uri as uris
from uprotocol import uuid as uuids
from uprotocol.communication import RequestCheck, Responses
from uprotocol.communication.rpc_server import Unserved
from uprotocol.communication.shares import Quota, UEntity, weight
from uprotocol.core.usubscription.wire import (
    CODECS,
    ENTITY_TYPE,
    SUBSCRIBE,
    UNSUBSCRIBE,
    V3,
    V4,
    Subscribe,
    Unsubscribe,
    service,
)
from uprotocol.status import UStatusError
from uprotocol.transport import ConnectionCallback, UBatchListener, UListener, UTransport
from uprotocol.v1.uattributes_pb2 import UAttributes
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.umessage_pb2 import UMessage
from uprotocol.v1.uri_pb2 import UUri
from uprotocol.v1.ustatus_pb2 import UStatus
from usubscription.store.database import Commanded, Outcome
from usubscription.store.store import SubscriptionStore

COMMANDS: Final = (SUBSCRIBE, UNSUBSCRIBE)
RESPONSES_WAITING_MAX: Final = 20_000  # as many as requests may wait for the store
RESPONSES_BATCH_MAX: Final = 128  # a larger batch would delay other messages noticeably
# how long a change waits for the response of its request, from the commit on: a dropped response is never sent
ANSWER_WAIT_MS_MAX: Final = 1_000
DRAIN_MS_MAX: Final = 5_000  # how long stop() waits until the network has accepted the responses

_CALLERS: Final = uris.pattern(resource=uris.RESOURCE_REPLY)

log = structlog.get_logger()


class ResponseTracker:
    """Knows which responses are still to be sent, so that changes are sent after the response that caused them
    (C-23)."""

    def __init__(self) -> None:
        # loop time after which a change no longer waits for it, ascending; so it has the responses of one second
        self._expected: dict[bytes, float] = {}  # by the id of the request
        self._news = asyncio.Event()
        # not set while many commands wait: from when they exceed one transaction until none is left
        self.lull = asyncio.Event()
        self.lull.set()

    def __len__(self) -> int:
        """The number of responses that are still to be sent."""
        return len(self._expected)

    def expect(self, request: bytes) -> None:
        """The response to `request` will be sent. Call it in the turn of the event loop in which it is queued."""
        now = asyncio.get_running_loop().time()
        self._expected[request] = now + ANSWER_WAIT_MS_MAX / 1000
        while (first := next(iter(self._expected.items())))[1] <= now:
            del self._expected[first[0]]

    def sent(self, messages: Sequence[UMessage]) -> None:
        """The messages were sent, or have failed."""
        for message in messages:
            self._expected.pop(uuids.to_bytes(message.attributes.reqid), None)
        self._news.set()

    async def left(self, requests: set[bytes]) -> None:
        """Wait until the expected responses to `requests` were sent, or ANSWER_WAIT_MS_MAX is over for each."""
        loop = asyncio.get_running_loop()
        while waiting := [at for one in requests if (at := self._expected.get(one, 0.0)) > loop.time()]:
            self._news.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(max(waiting)):
                    await self._news.wait()


class ServiceTransport(UTransport):
    """The transport for the parts of the service, with a single filter for all messages to the service. Their listeners
    accept batches, have sinks of the service, and return no awaitable."""

    def __init__(self, inner: UTransport, authority: str, also: Collection[str] = ()) -> None:
        """`also`: other authorities of the service, or families of them."""
        self._inner, self._own = inner, frozenset((authority, *also))
        self._sink = uris.pattern(uris.WILDCARD_AUTHORITY if also else authority, ENTITY_TYPE)
        self.capabilities = inner.capabilities
        self._listeners: dict[tuple[int, int], list[tuple[UUri, UBatchListener]]] = {}
        self.unserved = Unserved(inner)
        self.responses = ResponseTracker()

    def __repr__(self) -> str:
        return f"ServiceTransport({uris.format(self._sink)}, {sum(map(len, self._listeners.values()))} listeners)"

    @property
    def connected(self) -> bool:
        return self._inner.connected

    def on_connection(self, callback: ConnectionCallback) -> None:
        self._inner.on_connection(callback)

    async def send_batch(self, messages: Sequence[UMessage]) -> list[UStatus]:
        try:
            return await self._inner.send_batch(messages)
        finally:
            self.responses.sent(messages)

    async def register_listener(
        self, source_filter: UUri, listener: UListener, sink_filter: UUri | None = None
    ) -> None:
        assert sink_filter is not None, "expected a sink of the service"
        assert isinstance(listener, UBatchListener)
        if not self._listeners:
            await self._inner.register_listener(uris.ANY, self, self._sink)
        self.unserved.served(sink_filter)
        known = self._listeners.setdefault((sink_filter.ue_version_major, sink_filter.resource_id), [])
        if not any(one is listener for _, one in known):
            known.append((source_filter, listener))

    async def unregister_listener(
        self, source_filter: UUri, listener: UListener, sink_filter: UUri | None = None
    ) -> None:
        assert sink_filter is not None
        assert isinstance(listener, UBatchListener)
        key = (sink_filter.ue_version_major, sink_filter.resource_id)
        known = self._listeners.get(key, [])
        rest = [(source, one) for source, one in known if one is not listener]
        if len(rest) == len(known):
            raise UStatusError(UCode.NOT_FOUND, "no such listener: it was never registered, or is unregistered already")
        if rest:
            self._listeners[key] = rest
            return
        del self._listeners[key]
        if not self._listeners:
            await self._inner.unregister_listener(uris.ANY, self, self._sink)

    def on_receive(self, message: UMessage) -> None:
        self.on_receive_batch([message])

    def on_receive_batch(self, messages: Sequence[UMessage]) -> None:
        """Deliver to each listener its messages in the order of arrival."""
        batches: dict[int, tuple[UBatchListener, list[UMessage]]] = {}
        for message in messages:
            attributes, sink = message.attributes, message.attributes.sink
            if len(self._own) > 1 and not uris.is_one_of(sink.authority_name, self._own):
                continue  # for another service
            listeners = self._listeners.get((sink.ue_version_major, sink.resource_id))
            if listeners is None:
                self.unserved.answer(attributes)
                continue
            for source, listener in listeners:
                if uris.matches(source, attributes.source):
                    batches.setdefault(id(listener), (listener, []))[1].append(message)
        for listener, batch in batches.values():
            try:
                listener.on_receive_batch(batch)
            except Exception:
                what = "a part of the service failed; its messages count as received"
                log.exception(what, listener=repr(listener), messages=len(batch))


@dataclass(slots=True, eq=False)
class PendingRequest:
    """One command that waits for its answer."""

    entry: CommandEntry
    codec: V3 | V4
    request: UAttributes
    topic: UUri | None  # of Subscribe, exactly as it was passed
    who: UEntity
    weight: int
    waits: bool = True

    def answered(self, answer: Outcome | BaseException) -> None:
        if not self.waits:
            return
        self.waits = False
        self.entry.is_waiting(self.who, -self.weight)
        if isinstance(answer, BaseException):
            self.entry.responses.refuse(self.request, answer)
            return
        codec, topic = self.codec, self.topic
        payload = codec.subscribed(topic, answer.answer) if topic is not None else codec.done(UNSUBSCRIBE)
        self.entry.responses.respond(self.request, payload)


class CommandEntry:
    """Subscribe and Unsubscribe of all versions. `requests` counts by method and version, as `subscribe_v4`."""

    def __init__(
        self,
        gate: ServiceTransport,
        store: SubscriptionStore,
        authority: str,
        check: RequestCheck | None,
        also: Collection[str] = (),
    ) -> None:
        """`also`: the other authorities of the service; its own clients may have more waiting requests."""
        self._gate, self._store, self._authority, self._check = gate, store, authority, check
        self.waiting = Quota("requests waiting", WAITING_MAX, {authority, *also})
        self.refused: Counter[str] = Counter()
        self._sinks = [
            service(authority, major, codec.methods[name].resource)
            for major, codec in CODECS.items()
            for name in COMMANDS
        ]
        self.responses = Responses(gate, waiting_max=RESPONSES_WAITING_MAX, batch_max=RESPONSES_BATCH_MAX)
        self.dropped = self.responses.dropped
        self.requests = Counter({f"{name}_v{major}": 0 for major in CODECS for name in COMMANDS})

    def __repr__(self) -> str:
        return f"CommandEntry(waiting={self.waiting.used}, responses={len(self.responses)})"

    async def open(self) -> None:
        for sink in self._sinks:
            await self._gate.register_listener(_CALLERS, self, sink)

    async def close(self) -> None:
        """Accept no more requests."""
        for sink in self._sinks:
            try:
                await self._gate.unregister_listener(_CALLERS, self, sink)
            except UStatusError as error:  # the transport is closed already, or was never opened
                if error.code not in (UCode.NOT_FOUND, UCode.UNAVAILABLE):
                    raise

    def on_receive(self, message: UMessage) -> None:
        self.on_receive_batch([message])

    def on_receive_batch(self, messages: Sequence[UMessage]) -> None:
        for request in messages:
            try:
                self._take(request)
            except Exception as error:
                self.responses.refuse(request.attributes, error)

    def _take(self, request: UMessage) -> None:
        """Raises UStatusError; RESOURCE_EXHAUSTED for a caller that has too many waiting requests."""
        attributes = request.attributes
        source, codec = attributes.source, CODECS[attributes.sink.ue_version_major]
        subscribes = attributes.sink.resource_id == codec.methods[SUBSCRIBE].resource
        self.requests[f"{SUBSCRIBE if subscribes else UNSUBSCRIBE}_v{codec.major}"] += 1
        if self._check is not None:
            self._check(request)
        who, size = (source.authority_name, source.ue_id), weight(len(request.payload))
        if (why := self.waiting.refusal(who, size)) is not None:
            self.refused["waiting"] += 1
            raise UStatusError(UCode.RESOURCE_EXHAUSTED, f"{why}: wait for the answers")
        event: Subscribe | Unsubscribe
        topic, host = None, source.authority_name or self._authority
        if subscribes:
            event, topic = codec.read_subscribe(request, host)
        else:
            event = codec.read_unsubscribe(request, host)
        pending = PendingRequest(self, codec, attributes, topic, who, size)
        self._store.writer().put(Commanded(event, uuids.to_bytes(attributes.id)), pending.answered)
        self.is_waiting(who, size)

    def is_waiting(self, who: UEntity, more: int) -> None:
        """Count `more` waiting requests of `who`; negative: they are answered."""
        self.waiting.add(who, more)
        lull = self._gate.responses.lull
        if self.waiting.used > BATCH_MAX:
            lull.clear()
        elif not self.waiting.used:
            lull.set()
