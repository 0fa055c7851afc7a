"""The UTransport of services inside this process, which connects them to all networks; and what their callers may read.

    service -> send -> another hosted service | home network | express lane or log of another endpoint
    ingress (of any endpoint) -> deliver -> service
                                    '-> no such method: UNIMPLEMENTED (UNAVAILABLE while services come and go)

A hosted entity (core.ustreamer, the embedded core.usubscription) has the streamer's own authority, so other networks
reach it like any other entity.

No message is checked here: the transport has checked what arrives, and services build valid messages.

Access: caller -> inside this process: everything
               -> an [[access]] entry names it: `allow` (if empty: as below), without `deny`
               -> else: messages from its own network, and those that the rules let pass there
A poll shows nothing that a push would not.
"""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable, Hashable, Iterable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Final, NamedTuple

import structlog

from history.records.visible import HIDDEN_ROAD, Road, Visible, precedence
from history.service.matches import EVERYTHING, Sight, Sights
from streamer.walk.endpoint import Endpoint, Endpoints
from streamer.walk.view import Rules
from transports.listeners import all_of
from uprotocol import attributes as attrs
from uprotocol import uri as uris
from uprotocol import uuid as uuids
from uprotocol.cache import Cache
from uprotocol.callbacks import Remove
from uprotocol.communication.rpc_server import Unserved
from uprotocol.encoded import EncodedMessage
from uprotocol.status import OK, UStatusError
from uprotocol.transport import (
    Capability,
    ConnectionCallback,
    EncodedListener,
    UBatchListener,
    UListener,
    UTransport,
)
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.umessage_pb2 import UMessage
from uprotocol.v1.uri_pb2 import UUri
from uprotocol.v1.ustatus_pb2 import UStatus

USUBSCRIPTION: Final = 0x0000  # the uEntity core.usubscription
SIGHTS_CACHED_MAX: Final = 65_536  # callers whose sight is cached; the cache is cleared when it is full

log = structlog.get_logger()

_ORDERED: Final = frozenset((attrs.NOTIFICATION, attrs.PUBLISH))
_EXPIRED: Final = UStatus(code=UCode.DEADLINE_EXCEEDED, message="the message has expired before it was sent")
_inside: ContextVar[bool] = ContextVar("inside", default=False)
is_inside: Final[Callable[[], bool]] = _inside.get
"""Returns True while a hosted service handles a message of another one in this process. No network can fake that."""


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
        shares: dict[int, tuple[UListener, list[UMessage]]] = {}
        for message in messages:
            attributes = message.attributes
            source, sink, is_heard = attributes.source, attributes.sink, False
            exact = sink.ue_id, sink.ue_version_major, sink.resource_id
            for at in (exact, (sink.ue_id, uris.WILDCARD_VERSION, uris.WILDCARD_RESOURCE)):
                there = *self._listeners.get((at, uris.key(source)), ()), *self._listeners.get((at, None), ())
                for wanted, listener in there:
                    if uris.matches(wanted, source):
                        shares.setdefault(id(listener), (listener, []))[1].append(message)
                        is_heard = True
            if not is_heard:
                self.unserved.answer(attributes)
        # set for each call: the caller may itself have been called from inside or from a network
        token, pending = _inside.set(inside), list[Awaitable[None] | None]()
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
            _inside.reset(token)
        taken = [one for one in pending if one is not None]
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
        if sink_filter is None:
            await self._home.register_listener(source_filter, listener)
            return
        attrs.validate_filters(source_filter, sink_filter)
        is_whole = sink_filter.ue_version_major == uris.WILDCARD_VERSION
        assert is_whole == (sink_filter.resource_id == uris.WILDCARD_RESOURCE), "one address, or the whole entity"
        source, at = self._entry(source_filter, sink_filter)
        there = self._listeners.setdefault(at, [])
        if not any(known is listener and wanted == source for wanted, known in there):
            there.append((source, listener))
        self.unserved.served(sink_filter)
        await self._update_entities()

    async def unregister_listener(
        self, source_filter: UUri, listener: UListener, sink_filter: UUri | None = None
    ) -> None:
        if sink_filter is None:
            await self._home.unregister_listener(source_filter, listener)
            return
        source, at = self._entry(source_filter, sink_filter)
        there = self._listeners.get(at, [])
        left = [(wanted, known) for wanted, known in there if known is not listener or wanted != source]
        if len(left) == len(there):
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


# -- what callers may read


@dataclass(frozen=True)
class AccessPattern:
    """A pattern of addresses. Its authority may be a family (`*.vin123`), or empty: the caller's own."""

    address: UUri
    authority: str

    @classmethod
    def parse(cls, text: str) -> AccessPattern:
        """Raises INVALID_ARGUMENT."""
        rest = text.removeprefix("up:")
        authority, slash, path = rest.removeprefix("//").partition("/")
        if not rest.startswith("//") or not uris.is_family(authority):
            address = uris.parse(text)
            return cls(address, address.authority_name)
        uris.validate_authority(authority[2:])
        return cls(uris.parse(f"//*{slash}{path}"), authority)

    @property
    def is_own(self) -> bool:
        """True if its authority is the caller's own."""
        return not self.authority

    @property
    def key(self) -> uris.Key:
        """As a hashable tuple, in which the authority may be a family."""
        return (
            self.authority if uris.is_family(self.authority) else self.address.authority_name,
            *uris.key(self.address)[1:],
        )

    def matches(self, candidate: UUri, own: str) -> bool:
        if uris.is_family(self.authority):
            return candidate.authority_name.endswith(self.authority[1:]) and uris.matches(self.address, candidate)
        return uris.matches(uris.with_authority(self.address, own), candidate)


@dataclass(frozen=True)
class AccessEntry:
    """One entry of [[access]]. `endpoint`: only callers of that endpoint; "": of any."""

    endpoint: str = ""
    callers: Sequence[AccessPattern] = ()
    allow: Sequence[AccessPattern] = ()
    deny: Sequence[AccessPattern] = ()

    def names(self, caller: UUri, endpoint: Endpoint | None) -> bool:
        if self.endpoint and (endpoint is None or endpoint.name != self.endpoint):
            return False
        return not self.callers or any(pattern.matches(caller, caller.authority_name) for pattern in self.callers)


class _Sight(Sight):
    """The sight of callers at one endpoint, under one entry or none."""

    def __init__(
        self, key: Hashable, endpoint: Endpoint | None, entry: AccessEntry, own: str, endpoints: Endpoints, rules: Rules
    ) -> None:
        self.key = key
        self._endpoint, self._own, self._endpoints, self._rules = endpoint, own, endpoints, rules
        self._allow, self._deny = _owned(entry.allow, own), _owned(entry.deny, own)
        into = [rule for rule in rules if endpoint is not None and rule.egress == endpoint.name]
        patterns = [pattern for rule in into for pattern in (*rule.allow, *rule.deny)]
        named = {one.authority for one in (*self._allow, *self._deny)} | {one.authority_name for one in patterns}
        self._named = named - {uris.WILDCARD_AUTHORITY}
        per_rule = max((len(rule.allow) + len(rule.deny) for rule in into), default=0)
        self._cost = len(self._allow) + len(self._deny) + per_rule

    @property
    def cost(self) -> int:
        return self._cost

    @functools.cached_property
    def visible(self) -> Visible:
        allow, deny = ([pattern.key for pattern in patterns] for patterns in (self._allow, self._deny))
        owners = {authority: endpoint for endpoint in self._endpoints for authority in endpoint.authorities}
        return Visible.made(allow, deny, ((one, self._road(owners[one])) for one in sorted(owners, key=precedence)))

    def _road(self, origin: Endpoint) -> Road:
        if self._endpoint is None:
            return HIDDEN_ROAD
        if origin is self._endpoint:
            return Road()
        rule = self._rules.between(origin.name, self._endpoint.name)
        return HIDDEN_ROAD if rule is None else Road(tuple(map(uris.key, rule.allow)), tuple(map(uris.key, rule.deny)))

    def alike(self, authority: str) -> Hashable:
        """Returns the same for authorities that are alike: on one network, and not named by a pattern."""
        origin = self._endpoints.owner(authority)
        is_named = uris.is_one_of(authority, self._named)
        return origin.name if origin is not None else "", authority if is_named else ""

    def sees_all(self, authority: str) -> bool:
        """True if no pattern restricts what the caller sees of `authority`."""
        origin = self._endpoints.owner(authority)
        if origin is None or self._endpoint is None or self._allow or self._deny:
            return False
        rule = self._rules.between(origin.name, self._endpoint.name)
        return origin is self._endpoint or (rule is not None and not rule.allow and not rule.deny)

    def sees(self, source: UUri, sink: UUri | None) -> bool:
        if any(pattern.matches(source, self._own) for pattern in self._deny):
            return False
        if self._allow:
            return any(pattern.matches(source, self._own) for pattern in self._allow)
        origin = self._endpoints.owner(source.authority_name)
        if origin is None or self._endpoint is None:
            return False
        if origin is self._endpoint:
            return True
        if sink is not None and self._endpoints.owner(sink.authority_name) is not self._endpoint:
            return False  # it is for another network
        return self._rules.allow(origin, self._endpoint, source)


def _owned(patterns: Sequence[AccessPattern], own: str) -> list[AccessPattern]:
    """Returns `patterns` with the caller's own authority filled in."""
    return [AccessPattern(uris.with_authority(one.address, own), own) if one.is_own else one for one in patterns]


class Access(Sights):
    """The sights of callers. The first of `entries` that names a caller applies."""

    def __init__(self, endpoints: Endpoints, rules: Rules, entries: Sequence[AccessEntry]) -> None:
        self._endpoints, self._rules, self._entries = endpoints, rules, entries
        self.used: set[int] = set()  # indexes of the entries that have named a caller
        self._cached = Cache[tuple[str, int, int], _Sight](SIGHTS_CACHED_MAX)
        self._cached_version = rules.version

    def change(self, entries: Sequence[AccessEntry]) -> None:
        """Use other entries. `Rules.changed` has to be called in the same step."""
        self.used = {at for at in self.used if at < len(entries) and entries[at] == self._entries[at]}
        self._entries = entries

    @property
    def version(self) -> int:
        return self._rules.version

    def of(self, caller: UUri) -> Sight:
        if is_inside():
            return EVERYTHING
        if self._cached_version != self._rules.version:
            self._cached.clear()
            self._cached_version = self._rules.version
        key = (caller.authority_name, caller.ue_id, caller.ue_version_major)
        sight = self._cached.get(key)
        if sight is None:
            sight = self._cached[key] = self._made(caller)
        return sight

    def _made(self, caller: UUri) -> _Sight:
        endpoint = self._endpoints.owner(caller.authority_name)
        naming = (one for one in enumerate(self._entries) if one[1].names(caller, endpoint))
        number, entry = next(naming, (-1, AccessEntry()))
        if number >= 0:
            self.used.add(number)
        own = caller.authority_name if any(pattern.is_own for pattern in (*entry.allow, *entry.deny)) else ""
        key = (self.version, endpoint.name if endpoint is not None else "", number, own)
        return _Sight(key, endpoint, entry, own, self._endpoints, self._rules)
