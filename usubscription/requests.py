"""Where requests come in, in the order of arrival, and where responses leave.

network -> //AUTHORITY/0/FF/FFFF -> Gate -> by version and resource -> CommandEntry, the other methods, responses to own
                                     |                                 calls, changes that others tell
                                     '-> a method that there is not: UNIMPLEMENTED
CommandEntry: arrived batch -> codec -> store.command -> one transaction -> answered -> responses -> one send_batch
                                 '-> refused at once: commstatus and UStatus

Networks keep the order of what comes through one filter, but not between filters: Zenoh's Python binding has a thread
for each. Subscribe and Unsubscribe of both versions go through one queue to the store: of the commands of one client
about one topic the last one wins. They come in batches, without a task for each, since a fleet that reconnects sends
thousands a second. The other methods are served by InMemoryRpcServer; to callers there is no difference.

The network has checked what arrives: it is valid and has not expired.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final

import structlog

from storage.worker import BATCH_MAX
from uprotocol import attributes as attrs
from uprotocol import uri as uris
from uprotocol import uuid as uuids
from uprotocol.communication import RequestCheck, Responses
from uprotocol.communication.responses import Unserved
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
from uprotocol.message import PROTOBUF
from uprotocol.status import UStatusError
from uprotocol.transport import ConnectionCallback, UBatchListener, UListener, UTransport
from uprotocol.v1.uattributes_pb2 import UAttributes
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.umessage_pb2 import UMessage
from uprotocol.v1.uri_pb2 import UUri
from uprotocol.v1.ustatus_pb2 import UStatus
from usubscription.quota import Caller, Quota, weight
from usubscription.store.database import Commanded, Outcome
from usubscription.store.store import WAITING_MAX, Store

COMMANDS: Final = (SUBSCRIBE, UNSUBSCRIBE)
RESPONSES_WAITING_MAX: Final = 20_000  # for the network to take them: as many as there may be requests before the store
RESPONSES_BATCH_MAX: Final = 128  # at once: beyond it what waits behind them would feel it
# for a response to leave first, from its commit on; one that the RPC server had to drop never does
ANSWER_WAIT_MS_MAX: Final = 1_000
DRAIN_MS_MAX: Final = 5_000  # close() gives the network this long to take what is answered

_CALLERS: Final = uris.pattern(resource=uris.RESOURCE_REPLY)

Tag = tuple[int, int]
"""A request's id."""

log = structlog.get_logger()


class ResponseTracker:
    """Which responses have left, so that what they bring about leaves later (C-23).

    Remembered is what is still to leave, not what has left: of that there may be any number before a change asks for
    it.
    """

    def __init__(self) -> None:
        # -> loop time after which nobody waits for it, ascending; so it holds what came in a second
        self._expected: dict[Tag, float] = {}
        self._news = asyncio.Event()
        # cleared from when more commands wait for an answer than one transaction takes until none does
        self.lull = asyncio.Event()
        self.lull.set()

    def __len__(self) -> int:
        """How many are still to leave."""
        return len(self._expected)

    def expect(self, tag: Tag) -> None:
        """The response to `tag` is about to leave. Call it on the turn of the loop on which the response is given."""
        self._expected[tag] = asyncio.get_running_loop().time() + ANSWER_WAIT_MS_MAX / 1000
        self._forget()

    def sent(self, messages: Sequence[UMessage]) -> None:
        """They have left, or won't."""
        for message in messages:
            self._expected.pop((message.attributes.reqid.msb, message.attributes.reqid.lsb), None)
        self._news.set()

    def _forget(self) -> None:
        now = asyncio.get_running_loop().time()
        while self._expected and (first := next(iter(self._expected.items())))[1] <= now:
            del self._expected[first[0]]

    async def left(self, tags: set[Tag]) -> None:
        """Completes when the responses to all of `tags` that were expected have left, or each had its time."""
        self._forget()
        while waiting := [self._expected[tag] for tag in tags if tag in self._expected]:
            self._news.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(max(waiting)):
                    await self._news.wait()
            self._forget()


class Gate(UTransport):
    """The transport as the parts of the service see it: one filter for all that is sent to the service. Their listeners
    take batches, have sinks of the service itself, and never keep it waiting."""

    def __init__(self, inner: UTransport, authority: str, also: Collection[str] = ()) -> None:
        """`also`: other authorities, or families of them, that the service is addressed by."""
        self._inner, self._own = inner, frozenset((authority, *also))
        self._sink = uris.pattern(uris.WILDCARD_AUTHORITY if also else authority, ENTITY_TYPE)
        self.capabilities = inner.capabilities
        self._listeners: dict[tuple[int, int], list[tuple[UUri, UBatchListener]]] = {}
        self.unserved = Unserved(inner)
        self.responses = ResponseTracker()

    def __repr__(self) -> str:
        return f"Gate({uris.format(self._sink)}, {sum(map(len, self._listeners.values()))} listeners)"

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
        assert sink_filter is not None, "the service listens to what is sent to itself"
        assert isinstance(listener, UBatchListener)
        if not self._listeners:
            await self._inner.register_listener(uris.ANY, self, self._sink)
        self.unserved.served(sink_filter)
        known = self._listeners.setdefault(_key(sink_filter), [])
        if not any(one is listener for _, one in known):
            known.append((source_filter, listener))

    async def unregister_listener(
        self, source_filter: UUri, listener: UListener, sink_filter: UUri | None = None
    ) -> None:
        assert sink_filter is not None
        assert isinstance(listener, UBatchListener)
        key = _key(sink_filter)
        known = self._listeners.get(key, [])
        rest = [(source, one) for source, one in known if one is not listener]
        if len(rest) == len(known):
            raise UStatusError(UCode.NOT_FOUND, "no such listener: it was never registered, or is gone already")
        if rest:
            self._listeners[key] = rest
            return
        del self._listeners[key]
        if not self._listeners:
            await self._inner.unregister_listener(uris.ANY, self, self._sink)

    def on_receive(self, message: UMessage) -> None:
        self.on_receive_batch([message])

    def on_receive_batch(self, messages: Sequence[UMessage]) -> None:
        """Each listener gets its share in the order of arrival."""
        shares: dict[int, tuple[UBatchListener, list[UMessage]]] = {}
        for message in messages:
            attributes = message.attributes
            if len(self._own) > 1 and not uris.is_one_of(attributes.sink.authority_name, self._own):
                continue  # another service's
            listeners = self._listeners.get(_key(attributes.sink))
            if listeners is None:
                self.unserved.answer(attributes)
                continue
            for source, listener in listeners:
                if uris.matches(source, attributes.source):
                    shares.setdefault(id(listener), (listener, []))[1].append(message)
        for listener, share in shares.values():
            try:
                listener.on_receive_batch(share)
            except Exception:
                what = "a part of the service failed; its messages count as taken"
                log.exception(what, listener=repr(listener), messages=len(share))


def _key(sink: UUri) -> tuple[int, int]:
    return sink.ue_version_major, sink.resource_id


@dataclass(slots=True, eq=False)
class PendingRequest:
    """One command until it is answered."""

    entry: CommandEntry
    codec: V3 | V4
    request: UAttributes
    topic: UUri | None  # as it was passed to Subscribe
    who: Caller
    weight: int
    tag: Tag
    waits: bool = True

    def answered(self, answer: Outcome | BaseException) -> None:
        """dsn~service-error-model-success-response~1."""
        if not self.waits:
            return
        self.waits = False
        self.entry.is_waiting(self.who, -self.weight)
        request, responses = self.request, self.entry.responses
        if isinstance(answer, BaseException):
            responses.refuse(request, answer)
            return
        codec, topic = self.codec, self.topic
        said = codec.subscribed(topic, answer.answer) if topic is not None else codec.done(UNSUBSCRIBE)
        response = UMessage(payload=said.SerializeToString())
        attributes = response.attributes
        attributes.id.CopyFrom(uuids.new())
        attributes.type = attrs.RESPONSE
        attributes.source.CopyFrom(request.sink)
        attributes.sink.CopyFrom(request.source)
        attributes.reqid.CopyFrom(request.id)
        attributes.priority, attributes.ttl, attributes.payload_format = request.priority, request.ttl, PROTOBUF
        responses.post(response)


class CommandEntry:
    """Subscribe and Unsubscribe of all versions. `requests` counts by method and version, as `subscribe_v4`."""

    def __init__(
        self, gate: Gate, store: Store, authority: str, check: RequestCheck | None, also: Collection[str] = ()
    ) -> None:
        """`also`: the service's other authorities; the share of its own in what may wait is larger."""
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
        """Take no more requests."""
        for sink in self._sinks:
            try:
                await self._gate.unregister_listener(_CALLERS, self, sink)
            except UStatusError as error:  # closed already, and its listeners with it, or never opened
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
        """Raises UStatusError; RESOURCE_EXHAUSTED for a caller that has its share of what may wait for the store."""
        attributes = request.attributes
        source, id, codec = attributes.source, attributes.id, CODECS[attributes.sink.ue_version_major]
        subscribes = attributes.sink.resource_id == codec.methods[SUBSCRIBE].resource
        self.requests[f"{SUBSCRIBE if subscribes else UNSUBSCRIBE}_v{codec.major}"] += 1
        if self._check is not None:
            self._check(request)
        who, size = (source.authority_name, source.ue_id), weight(len(request.payload))
        if (why := self.waiting.room(who, size)) is not None:
            self.refused["waiting"] += 1
            raise UStatusError(UCode.RESOURCE_EXHAUSTED, f"{why}: wait for the answers")
        event: Subscribe | Unsubscribe
        topic, host = None, source.authority_name or self._authority
        if subscribes:
            event, topic = codec.read_subscribe(request, host)
        else:
            event = codec.read_unsubscribe(request, host)
        pending = PendingRequest(self, codec, attributes, topic, who, size, (id.msb, id.lsb))
        self._store.command(Commanded(event, id.msb.to_bytes(8, "big") + id.lsb.to_bytes(8, "big")), pending)
        self.is_waiting(who, size)

    def is_waiting(self, who: Caller, more: int) -> None:
        """So many requests more of `who`; below zero: they are answered."""
        self.waiting.add(who, more)
        lull = self._gate.responses.lull
        if self.waiting.used > BATCH_MAX:
            lull.clear()
        elif not self.waiting.used:  # a burst goes on while somebody waits: fewer do where the store keeps up
            lull.set()
