"""The UTransport of services inside this process, which connects them to all networks.

    service -> send -> another hosted service | home network | express lane or log of another endpoint
    ingress (of any endpoint) -> deliver -> service
                                    '-> no such method: UNIMPLEMENTED (UNAVAILABLE while services come and go)

A hosted entity (core.ustreamer, the embedded core.usubscription) has the streamer's own authority, so other networks
reach it like any other entity.

No message is checked here: the transport has checked what arrives, and services build valid messages.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Final, NamedTuple

import structlog

from streamer.walk.access import caller_is_inside
from streamer.walk.endpoint import Endpoint, Endpoints
from transports.listeners import all_of
from uprotocol import attributes as attrs
from uprotocol import uri as uris
from uprotocol import uuid as uuids
from uprotocol.callbacks import Remove
from uprotocol.communication.rpc_server import Unserved
from uprotocol.encoded import EncodedMessage
from uprotocol.status import OK, UStatusError
from uprotocol.transport import Capability, ConnectionCallback, EncodedListener, UBatchListener, UListener, UTransport
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.umessage_pb2 import UMessage
from uprotocol.v1.uri_pb2 import UUri
from uprotocol.v1.ustatus_pb2 import UStatus

USUBSCRIPTION: Final = 0x0000  # the uEntity core.usubscription

log = structlog.get_logger()

_ORDERED: Final = frozenset((attrs.NOTIFICATION, attrs.PUBLISH))
_EXPIRED: Final = UStatus(code=UCode.DEADLINE_EXCEEDED, message="the message has expired before it was sent")


SinkKey = tuple[int, int, int]
"""Entity, version and resource; the authority is ours."""


class _Ways(NamedTuple):
    """Messages that a service sends together, by their index, grouped by their way."""

    inside: dict[int, UMessage]
    calls: dict[int, EncodedMessage]
    ordered: dict[int, EncodedMessage]
    by_network: dict[Endpoint, dict[int, EncodedMessage]]  # those of the network, and our publishes at home


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
        # source filter and listener, by the sink and the source; patterns of sources, which are few, by None
        self._listeners: dict[tuple[SinkKey, uris.Key | None], list[tuple[UUri, UListener]]] = {}
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
        shares: dict[int, tuple[UListener, list[UMessage]]] = {}  # by listener: what it gets
        for message in messages:
            attributes = message.attributes
            source, sink, is_heard = attributes.source, attributes.sink, False
            exact = sink.ue_id, sink.ue_version_major, sink.resource_id
            for at in (exact, (sink.ue_id, uris.WILDCARD_VERSION, uris.WILDCARD_RESOURCE)):
                entries = *self._listeners.get((at, uris.key(source)), ()), *self._listeners.get((at, None), ())
                for source_filter, listener in entries:
                    if uris.matches(source_filter, source):
                        _, share = shares.setdefault(id(listener), (listener, []))
                        share.append(message)
                        is_heard = True
            if not is_heard:
                self.unserved.answer(attributes)
        # set for each call: the caller may itself have been called from inside or from a network
        token, pending = caller_is_inside.set(inside), list[Awaitable[None] | None]()
        try:
            for listener, share in shares.values():
                try:
                    if isinstance(listener, UBatchListener):
                        pending.append(listener.on_receive_batch(share))
                    else:
                        pending += map(listener.on_receive, share)
                except Exception:
                    log.exception("a service inside failed; its messages count as taken", messages=len(share))
        finally:
            caller_is_inside.reset(token)
        taken = [completion for completion in pending if completion is not None]
        return all_of(taken) if taken else None

    @property
    def connected(self) -> bool:
        return self._home.connected

    def on_connection(self, callback: ConnectionCallback) -> None:
        self._connection_callbacks.append(callback)
        for endpoint in self._endpoints:
            endpoint.on_connection(callback)

    def endpoint_added(self, endpoint: Endpoint) -> None:
        """Report connections of `endpoint` to callbacks for all networks, too."""
        for callback in self._connection_callbacks:
            endpoint.on_connection(callback)

    def toward(self, endpoint: Endpoint) -> UTransport:
        """Returns the same transport with `connected` and `on_connection` of one network."""
        return _Toward(self, endpoint)

    async def send_batch(self, messages: Sequence[UMessage]) -> list[UStatus]:
        """Send messages with the same way together: one append to the log, one batch per network.

        After a notification or publish that was not taken, no other one to the same destination is tried, to keep
        their order.
        """
        assert self._ingress is not None, "connect() was called"
        statuses = [OK] * len(messages)
        ways = self._ways(messages, statuses)
        taken: list[tuple[Iterable[int], Awaitable[None] | None]] = []
        if ways.inside:
            taken.append((ways.inside, self.deliver(list(ways.inside.values()), inside=True)))
        if ways.calls:  # apart from the ordered ones, since they do not wait for a log
            taken.append((ways.calls, self._ingress.on_receive_encoded(list(ways.calls.values()))))
        if ways.ordered:
            taken.append((ways.ordered, self._ingress.on_receive_encoded(list(ways.ordered.values()))))
        for indexes, done in taken:
            try:
                if done is not None:
                    await done
            except UStatusError as error:
                for index in indexes:
                    statuses[index] = error.status
        sending = []  # after the log, which may refuse them
        for network, way in ways.by_network.items():
            left = [index for index in way if not statuses[index].code]
            if left:
                sending.append((left, network.sends.begin([way[index] for index in left])))
        for left, answer in sending:
            for index, status in zip(left, await answer, strict=True):
                statuses[index] = status
        return statuses

    def _ways(self, messages: Sequence[UMessage], statuses: list[UStatus]) -> _Ways:
        """Returns the ways of messages that may leave. Others have expired, or come after an expired one to the same
        destination: sets their statuses."""
        ways, owner, now_ms = _Ways({}, {}, {}, {}), self._endpoints.owner, uuids.now_ms()
        stopped = set[str]()  # authorities; "": all on the home network
        for index, message in enumerate(messages):
            attributes, sink = message.attributes, message.attributes.sink.authority_name
            is_ordered = attributes.type in _ORDERED
            if (is_ordered and sink in stopped) or attrs.is_expired(attributes, now_ms):
                statuses[index] = _EXPIRED
                if is_ordered:
                    stopped.add(sink)
                continue
            if self.owns(attributes.sink):
                ways.inside[index] = message
                continue
            encoded = EncodedMessage.of(message)
            network, source = owner(sink), attributes.source.authority_name
            # if the sender is on the network of the sink, its message goes there directly
            if network is not None and network is (self._home if source == self.authority else owner(source)):
                ways.by_network.setdefault(network, {})[index] = encoded
                continue
            (ways.ordered if is_ordered else ways.calls)[index] = encoded
            if not attributes.HasField("sink"):
                ways.by_network.setdefault(self._home, {})[index] = encoded
        return ways

    async def register_listener(
        self, source_filter: UUri, listener: UListener, sink_filter: UUri | None = None
    ) -> None:
        assert sink_filter is not None, "a service listens to what is addressed to it"
        attrs.validate_filters(source_filter, sink_filter)
        is_whole = sink_filter.ue_version_major == uris.WILDCARD_VERSION
        assert is_whole == (sink_filter.resource_id == uris.WILDCARD_RESOURCE), "one address, or the whole entity"
        source, at = self._entry(source_filter, sink_filter)
        entries = self._listeners.setdefault(at, [])
        if not any(entry[1] is listener and entry[0] == source for entry in entries):
            entries.append((source, listener))
        self.unserved.served(sink_filter)
        await self._update_entities()

    async def unregister_listener(
        self, source_filter: UUri, listener: UListener, sink_filter: UUri | None = None
    ) -> None:
        assert sink_filter is not None, "as it was registered"
        source, at = self._entry(source_filter, sink_filter)
        entries = self._listeners.get(at, [])
        left = [entry for entry in entries if entry[1] is not listener or entry[0] != source]
        if len(left) == len(entries):
            raise UStatusError(UCode.NOT_FOUND, "no such listener: it was never registered, or not any more")
        self._listeners[at] = left
        if not left:
            del self._listeners[at]
        await self._update_entities()

    def _entry(self, source_filter: UUri, sink_filter: UUri) -> tuple[UUri, tuple[SinkKey, uris.Key | None]]:
        """Returns the source filter with an authority, and the key of `_listeners`."""
        source = uris.with_authority(source_filter, self.authority)
        sink = sink_filter.ue_id, sink_filter.ue_version_major, sink_filter.resource_id
        return source, (sink, None if uris.has_wildcard(source) else uris.key(source))

    async def _update_entities(self) -> None:
        entities = dict.fromkeys([*self._always, *(sink[0] for sink, _ in self._listeners)])
        if entities.keys() != self._entities.keys():
            self._entities = entities
            if self._on_entities_changed is not None:
                await self._on_entities_changed()


class _Toward(UTransport):
    """See HostedTransport.toward."""

    capabilities = HostedTransport.capabilities

    def __init__(self, hosted: HostedTransport, endpoint: Endpoint) -> None:
        self._hosted, self._endpoint = hosted, endpoint
        self._registrations: list[Remove] = []

    def __repr__(self) -> str:
        return f"{self._hosted!r} toward {self._endpoint.name}"

    @property
    def connected(self) -> bool:
        return self._endpoint.connected

    def on_connection(self, callback: ConnectionCallback) -> None:
        self._registrations.append(self._endpoint.on_connection(callback))

    async def close(self) -> None:
        """Report connections no more; everything else goes on."""
        while self._registrations:
            self._registrations.pop()()

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
