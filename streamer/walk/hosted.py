"""What a service inside this process sees of the networks: a UTransport.

    service -> send -> another hosted service | home network | express lane or log of another endpoint
    ingress (of any endpoint) -> deliver -> service
                                    '-> no such method: UNIMPLEMENTED (UNAVAILABLE while services come and go)

A hosted entity (core.ustreamer, the embedded core.usubscription) lives under the streamer's own authority, so other
networks reach it by the ordinary walk, and nothing else in the streamer treats it specially.

No message is checked here: what arrives was found valid by the transport that it came through, what services send is
valid since they made it with a UMessageBuilder, or as the response to a valid request.
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
from uprotocol.v1.uattributes_pb2 import UAttributes
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
"""True while a hosted service handles what another one in this process has sent: nobody on a network can claim that."""


def _key(sink: UUri) -> tuple[int, int, int]:
    """Entity, version and resource; the authority is ours."""
    return sink.ue_id, sink.ue_version_major, sink.resource_id


class _Listeners:
    """Of one sink, by what they want to hear: looked up, however many there are; patterns are few."""

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
        """False: it was not there."""
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
    """The networks as seen by services inside the streamer. They listen to one method or reply address each, or to all
    that is for their entity."""

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

        `entities` are hosted from the beginning to the end: what comes for them while their services start or stop is
        told so, and goes nowhere else.
        """
        self._home, self._endpoints, self.authority, self._also = home, endpoints, authority, frozenset(also)
        self._listeners: dict[tuple[int, int, int], _Listeners] = {}  # by the key of the sink
        self._always = tuple(entities)
        # and those that have a listener, in the order in which they came
        self._entities: dict[int, None] = dict.fromkeys(self._always)
        self._connection_callbacks: list[ConnectionCallback] = []  # of services, which stay as long as the process
        self._ingress: EncodedListener | None = None
        self._on_entities_changed: Callable[[], Awaitable[None]] | None = None
        self.unserved = Unserved(self)

    def lead_to(self, ingress: EncodedListener, on_entities_changed: Callable[[], Awaitable[None]]) -> None:
        """What services send begins the ordinary walk at `ingress`; before that nothing can be sent.
        `on_entities_changed` is awaited whenever `sinks` has changed, before the registration is done."""
        self._ingress, self._on_entities_changed = ingress, on_entities_changed

    def __repr__(self) -> str:
        return f"HostedTransport({self.authority}, entities={[f'{entity:X}' for entity in self._entities]})"

    def sinks(self) -> list[UUri]:
        """Filters of what is for services in this process; a family of authorities needs one for all of them."""
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
        """What has come for hosted services, from a network unless it is from `inside`. The awaitable, if any,
        completes when all have taken their share."""
        shares: dict[int, tuple[UListener, list[UMessage]]] = {}
        for message in messages:
            attributes = message.attributes
            entity, version, resource = _key(attributes.sink)
            found = self._listeners.get((entity, version, resource), _NOBODY)
            whole = self._listeners.get((entity, uris.WILDCARD_VERSION, uris.WILDCARD_RESOURCE), _NOBODY)
            listeners = found.of(attributes.source) + whole.of(attributes.source)
            for listener in listeners:
                shares.setdefault(id(listener), (listener, []))[1].append(message)
            if not listeners:
                self.unserved.answer(attributes)
        # told anew each time: whoever calls may itself have been called from somewhere else
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
        """Who asked for the connections of all networks is notified of those of `endpoint`, too."""
        for callback in self._connection_callbacks:
            endpoint.transport.on_connection(callback)

    def toward(self, endpoint: Endpoint) -> UTransport:
        """The same, for who speaks with one network: `connected` and `on_connection` are that network's."""
        return _Toward(self, endpoint)

    async def send_batch(self, messages: Sequence[UMessage]) -> list[UStatus]:
        """What goes the same way leaves together: one append to the log, one batch of each network.

        Behind a Notification or Publish that was not taken, no other one to the same destination is tried: that would
        be out of order.
        """
        batch = _Batch(messages)
        for place in batch.due():
            attributes = messages[place].attributes
            if self.owns(attributes.sink):
                batch.inside.append(place)
            elif (network := self._neighbour(attributes)) is not None:
                batch.by_network.setdefault(network, []).append(place)
            else:
                (batch.ordered if attributes.type in _ORDERED else batch.calls).append(place)
                if not attributes.HasField("sink"):
                    batch.by_network.setdefault(self._home, []).append(place)
        batch.hand(batch.inside, batch.plain, functools.partial(self.deliver, inside=True))
        batch.hand(batch.calls, batch.encoded, self._enter)  # apart, since no log has to take them
        batch.hand(batch.ordered, batch.encoded, self._enter)
        await _together(batch.pending)
        # behind the log, which may refuse
        await _together([batch.send(network, places) for network, places in batch.by_network.items()])
        return batch.statuses

    def _enter(self, messages: list[EncodedMessage]) -> Awaitable[None] | None:
        assert self._ingress is not None, "who sends has been led to the networks"
        return self._ingress.on_receive_encoded(messages)

    def _neighbour(self, attributes: UAttributes) -> Endpoint | None:
        """The network of the sink, if the sender is there, too: then there is no walk."""
        network, source = self._endpoints.owner(attributes.sink.authority_name), attributes.source.authority_name
        at = self._home if source == self.authority else self._endpoints.owner(source)
        return network if network is at else None

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
        await self._look_at_entities()

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
        await self._look_at_entities()

    async def _look_at_entities(self) -> None:
        served = (key[0] for key, listeners in self._listeners.items() if listeners)
        entities = dict.fromkeys([*self._always, *served])
        if entities.keys() != self._entities.keys():
            self._entities = entities
            if self._on_entities_changed is not None:
                await self._on_entities_changed()


class _Batch:
    """Messages that a service sends together, by the way that they go, and what became of each."""

    def __init__(self, messages: Sequence[UMessage]) -> None:
        self._messages = messages
        self._encoded: dict[int, EncodedMessage] = {}  # a publish goes two ways
        self.statuses = [OK] * len(messages)
        # places of messages
        self.inside: list[int] = []
        self.calls: list[int] = []
        self.ordered: list[int] = []
        self.by_network: dict[Endpoint, list[int]] = {}
        self.pending: list[Coroutine[Any, Any, None]] = []  # each notes what has become of what was handed over

    def due(self) -> Iterator[int]:
        """Places of those that may leave: not expired, nor behind one that is and goes to the same destination."""
        now_ms = uuids.now_ms()
        stopped: dict[str, UStatus] = {}  # by authority; "": everybody on the home network
        for place, message in enumerate(self._messages):
            attributes = message.attributes
            destination = attributes.sink.authority_name if attributes.type in _ORDERED else None
            if destination in stopped:
                self.statuses[place] = stopped[destination]
            elif attrs.is_expired(attributes, now_ms):
                self.statuses[place] = _EXPIRED
                if destination is not None:
                    stopped[destination] = _EXPIRED
            else:
                yield place

    def plain(self, places: Iterable[int]) -> list[UMessage]:
        return [self._messages[place] for place in places]

    def encoded(self, places: Iterable[int]) -> list[EncodedMessage]:
        known, messages = self._encoded, self._messages
        return [known.get(place) or known.setdefault(place, EncodedMessage.of(messages[place])) for place in places]

    def hand(self, places: list[int], some: Callable[[list[int]], list[T]], take: Callable[[list[T]], Taken]) -> None:
        """Let `take` have them, if there are any."""
        if not places:
            return
        try:
            taken = take(some(places))
        except UStatusError as error:
            self._refused(places, error)
            return
        if taken is not None:
            self.pending.append(self._noted(places, taken))

    async def _noted(self, places: list[int], taken: Awaitable[None]) -> None:
        try:
            await taken
        except UStatusError as error:
            self._refused(places, error)

    def _refused(self, places: Iterable[int], error: UStatusError) -> None:
        for place in places:
            self.statuses[place] = error.status

    async def send(self, network: Endpoint, places: list[int]) -> None:
        left = [place for place in places if not self.statuses[place].code]
        if left:
            for place, status in zip(left, await network.send_batch(self.encoded(left)), strict=True):
                self.statuses[place] = status


async def _together(pending: Sequence[Coroutine[Any, Any, None]]) -> None:
    if len(pending) == 1:
        await pending[0]
    elif pending:
        await asyncio.gather(*pending)


def _call(listener: UListener, messages: list[UMessage]) -> list[Awaitable[None]]:
    """What it fails at counts as taken."""
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
