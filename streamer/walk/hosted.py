"""The UTransport of services inside this process, which connects them to all networks.

    service -> send -> another hosted service | home network | express lane or log of another endpoint
    ingress (of any endpoint) -> deliver -> service
                                    '-> no such method: UNIMPLEMENTED (UNAVAILABLE while services come and go)

A hosted entity (core.ustreamer, the embedded core.usubscription) has the streamer's own authority, so other networks
reach it like any other entity.

No message is checked here: the transport has checked what arrives, and services build valid messages.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any, Final, TypeVar

import structlog

from streamer.walk.endpoint import Endpoint, Endpoints
from transports.listeners import all_of
from uprotocol import attributes as attrs
from uprotocol import uri as uris
from uprotocol import uuid as uuids
from uprotocol.communication.responses import Unserved
from uprotocol.encoded import EncodedMessage
from uprotocol.status import OK, UStatusError
from uprotocol.transport import (
    Capability,
    ConnectionCallback,
    EncodedListener,
    UBatchListener,
    UListener,
    UTransport,
    validate_filters,
)
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.umessage_pb2 import UMessage
from uprotocol.v1.uri_pb2 import UUri
from uprotocol.v1.ustatus_pb2 import UStatus

USUBSCRIPTION: Final = 0x0000  # the uEntity core.usubscription

log = structlog.get_logger()

T = TypeVar("T")
Taken = Awaitable[None] | None

_ORDERED: Final = frozenset((attrs.NOTIFICATION, attrs.PUBLISH))
_EXPIRED: Final = UStatus(code=UCode.DEADLINE_EXCEEDED, message="the message has expired before it was sent")
_inside: ContextVar[bool] = ContextVar("inside", default=False)
is_inside: Final[Callable[[], bool]] = _inside.get
"""Returns True while a hosted service handles a message of another one in this process. No network can fake that."""


def _key(sink: UUri) -> tuple[int, int, int]:
    """Returns entity, version and resource; the authority is ours."""
    return sink.ue_id, sink.ue_version_major, sink.resource_id


class _Listeners:
    """The listeners of one sink, by source filter. Exact filters are looked up; patterns are few."""

    def __init__(self) -> None:
        self._exact: dict[uris.Key, dict[int, UListener]] = {}
        self._wild: dict[tuple[uris.Key, int], tuple[UUri, UListener]] = {}

    def __bool__(self) -> bool:
        return bool(self._exact or self._wild)

    def put(self, source: UUri, listener: UListener) -> None:
        key = uris.key(source)
        if uris.has_wildcard(source):
            self._wild[key, id(listener)] = source, listener
        else:
            self._exact.setdefault(key, {})[id(listener)] = listener

    def take(self, source: UUri, listener: UListener) -> bool:
        """Remove a listener. Returns False if it was not registered."""
        key = uris.key(source)
        if uris.has_wildcard(source):
            return self._wild.pop((key, id(listener)), None) is not None
        of_it = self._exact.get(key, {})
        was_there = of_it.pop(id(listener), None) is not None
        if was_there and not of_it:
            del self._exact[key]
        return was_there

    def of(self, source: UUri) -> list[UListener]:
        exact = self._exact.get(uris.key(source)) if self._exact else None
        wild = [listener for wanted, listener in self._wild.values() if uris.matches(wanted, source)]
        return wild if exact is None else [*exact.values(), *wild]


_NOBODY: Final = _Listeners()


class HostedTransport(UTransport):
    """The transport of services inside the streamer. A service listens to one method or reply address, or to all
    messages for its entity."""

    capabilities = Capability.PUSH | Capability.WILDCARD_SOURCE | Capability.PUBLISH_WITHOUT_SINK

    def __init__(
        self,
        home: Endpoint,
        endpoints: Endpoints,
        authority: str,
        also: Iterable[str] = (),
        entities: Iterable[int] = (),
    ) -> None:
        """`also`: other authorities, or families of them, for which the uSubscription in this process answers.

        `entities` are always hosted: requests to them while their services start or stop are answered with
        UNAVAILABLE.
        """
        self._home, self._endpoints, self.authority, self._also = home, endpoints, authority, frozenset(also)
        self._listeners: dict[tuple[int, int, int], _Listeners] = {}  # by the key of the sink
        self._always = tuple(entities)
        # and entities with a listener, in the order of registration
        self._entities: dict[int, None] = dict.fromkeys(self._always)
        self._connection_callbacks: list[ConnectionCallback] = []  # of services, which live as long as the process
        self._ingress: EncodedListener | None = None
        self._on_entities_changed: Callable[[], Awaitable[None]] | None = None
        self.unserved = Unserved(self)

    def connect(self, ingress: EncodedListener, on_entities_changed: Callable[[], Awaitable[None]]) -> None:
        """Send messages of services to `ingress`; before this call nothing can be sent. `on_entities_changed` is
        awaited whenever `sinks` has changed, before the registration returns."""
        self._ingress, self._on_entities_changed = ingress, on_entities_changed

    def __repr__(self) -> str:
        return f"HostedTransport({self.authority}, entities={[f'{entity:X}' for entity in self._entities]})"

    def sinks(self) -> list[UUri]:
        """Returns the sink filters of services in this process; a family of authorities needs a filter of all."""
        also = {uris.WILDCARD_AUTHORITY if uris.is_pattern(authority) else authority for authority in self._also}
        sinks = [uris.pattern(self.authority, entity) for entity in self._entities]
        return sinks + [
            uris.pattern(authority, USUBSCRIPTION) for authority in sorted(also) if USUBSCRIPTION in self._entities
        ]

    def owns(self, sink: UUri) -> bool:
        if sink.ue_id not in self._entities:
            return False
        return sink.authority_name == self.authority or (
            sink.ue_id == USUBSCRIPTION and uris.is_one_of(sink.authority_name, self._also)
        )

    def deliver(self, messages: Sequence[UMessage], *, inside: bool = False) -> Awaitable[None] | None:
        """Deliver messages to hosted services, from a network or from `inside`. The awaitable, if any,
        completes when every service has taken its messages."""
        shares: dict[int, tuple[UListener, list[UMessage]]] = {}
        for message in messages:
            attributes, sink = message.attributes, message.attributes.sink
            found = self._listeners.get((sink.ue_id, sink.ue_version_major, sink.resource_id), _NOBODY)
            whole = self._listeners.get((sink.ue_id, uris.WILDCARD_VERSION, uris.WILDCARD_RESOURCE), _NOBODY)
            listeners = found.of(attributes.source) + whole.of(attributes.source)
            for listener in listeners:
                shares.setdefault(id(listener), (listener, []))[1].append(message)
            if not listeners:
                self.unserved.answer(attributes)
        # set for each call: the caller may itself have been called from inside or from a network
        token = _inside.set(inside)
        try:
            pending = [taken for listener, share in shares.values() for taken in _call(listener, share)]
        finally:
            _inside.reset(token)
        return all_of(pending) if pending else None

    @property
    def connected(self) -> bool:
        return self._home.connected

    def on_connection(self, callback: ConnectionCallback) -> None:
        self._connection_callbacks.append(callback)
        for endpoint in self._endpoints:
            endpoint.transport.on_connection(callback)

    def endpoint_added(self, endpoint: Endpoint) -> None:
        """Report connections of `endpoint` to callbacks for all networks, too."""
        for callback in self._connection_callbacks:
            endpoint.transport.on_connection(callback)

    def toward(self, endpoint: Endpoint) -> UTransport:
        """Returns the same transport with `connected` and `on_connection` of one network."""
        return _Toward(self, endpoint)

    async def send_batch(self, messages: Sequence[UMessage]) -> list[UStatus]:
        """Send messages with the same way together: one append to the log, one batch per network.

        After a notification or publish that was not taken, no other one to the same destination is tried, to keep
        their order.
        """
        assert self._ingress is not None, "connect() was called"
        batch, enter, owner = _ServiceBatch(messages), self._ingress.on_receive_encoded, self._endpoints.owner
        for index in batch.due():
            attributes = messages[index].attributes
            if self.owns(attributes.sink):
                batch.inside.append(index)
                continue
            network, source = owner(attributes.sink.authority_name), attributes.source.authority_name
            # if the sender is on the network of the sink, its message goes there directly
            if network is not None and network is (self._home if source == self.authority else owner(source)):
                batch.by_network.setdefault(network, []).append(index)
            else:
                (batch.ordered if attributes.type in _ORDERED else batch.calls).append(index)
                if not attributes.HasField("sink"):
                    batch.by_network.setdefault(self._home, []).append(index)
        batch.hand(
            batch.inside,
            lambda indexes: [messages[index] for index in indexes],
            functools.partial(self.deliver, inside=True),
        )
        batch.hand(batch.calls, batch.encoded, enter)  # separately, since these do not wait for a log
        batch.hand(batch.ordered, batch.encoded, enter)
        await _together(batch.pending)
        # after the log, which may refuse them
        await _together([batch.send(network, indexes) for network, indexes in batch.by_network.items()])
        return batch.statuses

    async def register_listener(
        self, source_filter: UUri, listener: UListener, sink_filter: UUri | None = None
    ) -> None:
        if sink_filter is None:
            await self._home.register_listener(source_filter, listener)
            return
        validate_filters(source_filter, sink_filter)
        is_whole = sink_filter.ue_version_major == uris.WILDCARD_VERSION
        assert is_whole == (sink_filter.resource_id == uris.WILDCARD_RESOURCE), "one address, or the whole entity"
        source = uris.with_authority(source_filter, self.authority)
        self._listeners.setdefault(_key(sink_filter), _Listeners()).put(source, listener)
        self.unserved.served(sink_filter)
        await self._update_entities()

    async def unregister_listener(
        self, source_filter: UUri, listener: UListener, sink_filter: UUri | None = None
    ) -> None:
        if sink_filter is None:
            await self._home.unregister_listener(source_filter, listener)
            return
        source = uris.with_authority(source_filter, self.authority)
        listeners = self._listeners.get(_key(sink_filter))
        if listeners is None or not listeners.take(source, listener):
            raise UStatusError(UCode.NOT_FOUND, "no such listener: it was never registered, or is gone already")
        await self._update_entities()

    async def _update_entities(self) -> None:
        served = (key[0] for key, listeners in self._listeners.items() if listeners)
        entities = dict.fromkeys([*self._always, *served])
        if entities.keys() != self._entities.keys():
            self._entities = entities
            if self._on_entities_changed is not None:
                await self._on_entities_changed()


class _ServiceBatch:
    """Messages that a service sends together, grouped by their way, with the status of each."""

    def __init__(self, messages: Sequence[UMessage]) -> None:
        self._messages = messages
        self._encoded: dict[int, EncodedMessage] = {}  # a publish goes two ways
        self.statuses = [OK] * len(messages)
        # indexes of messages
        self.inside: list[int] = []
        self.calls: list[int] = []
        self.ordered: list[int] = []
        self.by_network: dict[Endpoint, list[int]] = {}
        self.pending: list[Coroutine[Any, Any, None]] = []  # each notes the status of its messages

    def due(self) -> Iterator[int]:
        """Yields the indexes of messages that may leave: neither expired nor after an expired one to the same
        destination."""
        now_ms = uuids.now_ms()
        stopped: dict[str, UStatus] = {}  # by authority; "": all on the home network
        for index, message in enumerate(self._messages):
            attributes = message.attributes
            destination = attributes.sink.authority_name if attributes.type in _ORDERED else None
            if destination in stopped:
                self.statuses[index] = stopped[destination]
            elif attrs.is_expired(attributes, now_ms):
                self.statuses[index] = _EXPIRED
                if destination is not None:
                    stopped[destination] = _EXPIRED
            else:
                yield index

    def encoded(self, indexes: Iterable[int]) -> list[EncodedMessage]:
        known, messages = self._encoded, self._messages
        return [known.get(index) or known.setdefault(index, EncodedMessage.of(messages[index])) for index in indexes]

    def hand(self, indexes: list[int], some: Callable[[list[int]], list[T]], take: Callable[[list[T]], Taken]) -> None:
        """Pass the messages to `take`, if there are any."""
        if not indexes:
            return
        try:
            taken = take(some(indexes))
        except UStatusError as error:
            self._refused(indexes, error)
            return
        if taken is not None:
            self.pending.append(self._noted(indexes, taken))

    async def _noted(self, indexes: list[int], taken: Awaitable[None]) -> None:
        try:
            await taken
        except UStatusError as error:
            self._refused(indexes, error)

    def _refused(self, indexes: Iterable[int], error: UStatusError) -> None:
        for index in indexes:
            self.statuses[index] = error.status

    async def send(self, network: Endpoint, indexes: list[int]) -> None:
        left = [index for index in indexes if not self.statuses[index].code]
        if left:
            for index, status in zip(left, await network.send_batch(self.encoded(left)), strict=True):
                self.statuses[index] = status


async def _together(pending: Sequence[Coroutine[Any, Any, None]]) -> None:
    if len(pending) == 1:
        await pending[0]
    elif pending:
        await asyncio.gather(*pending)


def _call(listener: UListener, messages: list[UMessage]) -> list[Awaitable[None]]:
    """Call a listener. Messages on which it fails count as taken."""
    try:
        if isinstance(listener, UBatchListener):
            taken = [listener.on_receive_batch(messages)]
        else:
            taken = [listener.on_receive(message) for message in messages]
    except Exception:
        log.exception("a service inside failed; its messages count as taken", messages=len(messages))
        return []
    return [one for one in taken if one is not None]


class _Toward(UTransport):
    """See HostedTransport.toward."""

    capabilities = HostedTransport.capabilities

    def __init__(self, hosted: HostedTransport, endpoint: Endpoint) -> None:
        self._hosted, self._endpoint = hosted, endpoint

    def __repr__(self) -> str:
        return f"{self._hosted!r} toward {self._endpoint.name}"

    @property
    def connected(self) -> bool:
        return self._endpoint.connected

    def on_connection(self, callback: ConnectionCallback) -> None:
        self._endpoint.transport.on_connection(callback)

    async def send_batch(self, messages: Sequence[UMessage]) -> list[UStatus]:
        return await self._hosted.send_batch(messages)

    async def register_listener(
        self, source_filter: UUri, listener: UListener, sink_filter: UUri | None = None
    ) -> None:
        await self._hosted.register_listener(source_filter, listener, sink_filter)

    async def unregister_listener(
        self, source_filter: UUri, listener: UListener, sink_filter: UUri | None = None
    ) -> None:
        await self._hosted.unregister_listener(source_filter, listener, sink_filter)
