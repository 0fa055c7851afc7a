"""Ingress: what an endpoint hears, checked and sent on its way. One per endpoint.

arrived batch -> known route? -> own authority? -> taken before? -+-> log (one append per batch, acknowledged when committed)
                 decided once     else "spoofed"   "duplicate"    +-> express lane      requests and responses
                 per (type, source, sink)                         +-> hosted service    what is for ourselves
"""

from __future__ import annotations

import asyncio
import enum
import functools
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import structlog

from history.log import Log, TopicsFullError
from streamer.dead_letter import attributes_of
from streamer.endpoint import Endpoint, Endpoints
from streamer.express import Express
from streamer.flow import Flow
from streamer.held import Held
from streamer.hosted import HostedTransport
from streamer.ledger import UNIT_BYTES, UNLIMITED, Account, Ledger
from streamer.names import carried_by
from streamer.rules import Rules
from streamer.view import Version, View
from uprotocol import attributes as attrs
from uprotocol import uri as uris
from uprotocol import uuid as uuids
from uprotocol.encoded import Carried, EncodedMessage, Readdressed, decoded
from uprotocol.status import UStatusError
from uprotocol.transport import MESSAGE_BYTES_MAX, Capability
from uprotocol.v1.uattributes_pb2 import UAttributes
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.uri_pb2 import UUri

ROUTES_CACHED_MAX: Final = 32_768  # (type, source, sink) whose way is known; the cache starts anew when it is full
# within which a network delivers again what was not taken; the longest back-off of our transports is 1 s
COMES_AGAIN_S: Final = 5.0
TELL_FULL_S: Final = 60.0  # between two lines about topics for which there is no room; the counters have all of them
# ids remembered to drop duplicates: seconds of the fastest network, minutes of a vehicle
WINDOW_IDS_MAX: Final = 131_072

log = structlog.get_logger()


class Lane(enum.Enum):
    LOG = enum.auto()
    EXPRESS = enum.auto()
    HOSTED = enum.auto()
    DROP = enum.auto()


@dataclass(slots=True)
class Route:
    """Where messages of one (type, source, sink) go."""

    version: Version
    lane: Lane
    log: Log | None = None
    stream: int = 0
    peer: Endpoint | None = None
    reason: str = ""  # of DROP; empty: none of our business, not counted
    source: bytes = b""  # as it is on the wire
    is_answer: bool = False  # a response
    # gives a message the addresses that it has inside; None: it has them
    inside: Callable[[Carried], Carried] | None = None
    account: Account = field(init=False)  # the source authority's
    bytes_max: int = UNLIMITED  # of a payload
    found_no_room: bool = False  # as one more topic


class IdWindow:
    """The ids taken lately, in two generations, so that forgetting is cheap. A key is an id and its source, both as
    they are on the wire: what somebody else sends under a foreign id must not keep out the real message.
    """

    def __init__(self, ids_max: int = WINDOW_IDS_MAX) -> None:
        self._generation_max = ids_max // 2
        self._young: set[bytes] = set()
        self._old: set[bytes] = set()

    def take(self, key: bytes) -> bool:
        """False if `key` was taken before."""
        if key in self._young or key in self._old:
            return False
        self._young.add(key)
        if len(self._young) >= self._generation_max:
            self._old, self._young = self._young, set()
        return True

    def forget(self, key: bytes) -> None:
        self._young.discard(key)
        self._old.discard(key)


class Logs:
    """The durable log and the volatile one, and which topic belongs where."""

    def __init__(self, durable: Log, volatile: Log, volatile_patterns: Sequence[UUri], record: Sequence[UUri]) -> None:
        self.durable, self.volatile = durable, volatile
        self._volatile, self._record = tuple(volatile_patterns), tuple(record)

    def __iter__(self) -> Any:
        return iter((self.durable, self.volatile))

    def of(self, source: UUri) -> Log:
        return self.volatile if any(uris.matches(pattern, source) for pattern in self._volatile) else self.durable

    def is_recorded(self, source: UUri) -> bool:
        return any(uris.matches(pattern, source) for pattern in self._record)

    def names(self, source: UUri) -> bool:
        """True if it is configured to be recorded by itself, for whichever authority, and not just as one of many."""
        key = uris.key(source)[1:]
        return any(uris.key(pattern)[1:] == key and uris.matches(pattern, source) for pattern in self._record)

    @property
    def record(self) -> Sequence[UUri]:
        return self._record


Filter = tuple[UUri, UUri | None]


class Ingress:
    """The listener of one endpoint. `trusted` is the entry for services inside the streamer, whom rules don't bind."""

    def __init__(
        self,
        endpoint: Endpoint,
        endpoints: Endpoints,
        rules: Rules,
        view: View,
        logs: Logs,
        express: Express,
        hosted: HostedTransport,
        window: IdWindow,
        flows: Mapping[Log, Flow],
        ledger: Ledger,
        *,
        trusted: bool = False,
        message_bytes_max: int = MESSAGE_BYTES_MAX,
        now_ms: Callable[[], int] = uuids.now_ms,
    ) -> None:
        self.endpoint = endpoint
        self._endpoints, self._rules, self._view, self._logs = endpoints, rules, view, logs
        self._express, self._hosted, self._window, self._flows, self._trusted = express, hosted, window, flows, trusted
        self._now_ms = now_ms
        self._ledger, self._bytes_max = ledger, message_bytes_max
        self._routes: dict[Any, Route] = {}
        self._tell_full_at = 0.0  # loop time
        # by what the network calls them: nothing of theirs is read until the next turn
        self._refused: dict[str, Account] = {}
        self._in_flight: set[asyncio.Future[int]] = set()  # appends that may still fail
        self._registered: dict[Any, Filter] = {}
        self._sync_lock = asyncio.Lock()
        can_repeat = trusted or Capability.ACK in endpoint.transport.capabilities
        self._held = {} if can_repeat else {one: Held(one) for one in logs}
        # the id that nothing may overtake, and until when (loop time)
        self._comes_again: tuple[bytes, float] | None = None

    def __repr__(self) -> str:
        return f"Ingress({self.endpoint.name}, listening to {len(self._registered)} filters)"

    # What arrives

    takes_encoded = True

    def on_receive(self, message: Carried) -> Awaitable[None] | None:
        return self.on_receive_batch([message])

    def on_receive_batch(self, messages: Sequence[Carried]) -> Awaitable[None] | None:
        """The transport has dropped what is invalid or expired. The awaitable completes when everything taken is
        committed."""
        endpoint, routes, take = self.endpoint, self._routes, self._window.take
        endpoint.received += len(messages)
        version = self._view.version
        appends: dict[Log, tuple[list[int], list[Carried]]] = {}
        pending: list[Awaitable[Any]] = []
        duplicates = 0
        for message in messages:
            key: Any = message.stamp if type(message) is EncodedMessage else _key(message.attributes)
            route = routes.get(key)
            if route is None or route.version != version:
                route = self._resolve(key, message, version)
            account, size = route.account, len(message.payload)
            account.messages += 1
            account.bytes += size
            account.left -= 1 + size // UNIT_BYTES
            if size > route.bytes_max or (account.left < 0 and self._ledger.is_over(account)):
                self._refuse(route, message, size)
                continue
            if route.inside is not None:
                message = route.inside(message)
            if route.lane is Lane.DROP:
                self._drop(route, message)
                continue
            if not take(_id(message) + route.source):
                duplicates += 1
                continue
            if route.is_answer:
                endpoint.twins.answered(message.attributes)
            if route.log is not None:
                append = appends.get(route.log)
                if append is None:
                    append = appends[route.log] = ([], [])
                append[0].append(route.stream)
                append[1].append(message)
            elif route.lane is Lane.HOSTED:
                taken = self._hosted.deliver([decoded(message)])
                if taken is not None:
                    pending.append(taken)
            else:
                assert route.peer is not None
                self._express.put(route.peer, message, endpoint)
        for target, (streams, batch) in appends.items():
            future = self._flows[target].append(len(batch), functools.partial(self._append, target, streams, batch))
            pending.append(future)
            if not future.done():
                self._in_flight.add(future)
                future.add_done_callback(self._in_flight.discard)
        if duplicates:
            endpoint.dropped["duplicate"] += duplicates
            # the first copy may be in any of them, and is not safe yet
            pending.extend(self._in_flight.difference(pending))
        if not pending:
            return None
        return pending[0] if len(pending) == 1 else _all(pending)

    def _is_ahead(self, messages: Sequence[Carried]) -> bool:
        """True if `messages` would overtake what the log has refused and the network has not yet delivered again."""
        assert self._comes_again is not None
        id, until = self._comes_again
        if asyncio.get_running_loop().time() < until and all(_id(message) != id for message in messages):
            return True
        self._comes_again = None
        return False

    def _append(self, target: Log, streams: list[int], batch: list[Carried]) -> asyncio.Future[int]:
        if self._comes_again is not None and self._is_ahead(batch):
            future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
            future.set_exception(
                UStatusError(UCode.UNAVAILABLE, "what the log has refused before this comes again first")
            )
        else:
            future = (
                self._held[target].append(streams, batch) if target in self._held else target.append(streams, batch)
            )

        def settle(done: asyncio.Future[int]) -> None:
            if done.cancelled() or done.exception() is None:
                return
            self.endpoint.dropped["refused"] += len(batch)  # not acknowledged: whoever can will send it again
            if (
                self._comes_again is None
                and not self._trusted
                and Capability.ACK in self.endpoint.transport.capabilities
            ):
                self._comes_again = (_id(batch[0]), asyncio.get_running_loop().time() + COMES_AGAIN_S)
            for message in batch:
                self._window.forget(_id(message) + message.attributes.source.SerializeToString())

        future.add_done_callback(settle)
        return future

    def _drop(self, route: Route, message: Carried) -> None:
        if not route.reason:
            return
        self.endpoint.dropped[route.reason] += 1
        route.account.dropped += 1
        if route.reason == "denied":
            what = f"no rule lets endpoint {self.endpoint.name!r} send this on"
            self._express.fail(message, UCode.PERMISSION_DENIED, what, self.endpoint, is_withheld=True)

    def _refuse(self, route: Route, message: Carried, size: int) -> None:
        """It is too large, or one too many; of the latter only callers are told, and no letter is written."""
        if size > route.bytes_max:
            self.endpoint.dropped["too_large"] += 1
            route.account.dropped += 1
            what = f"a payload has at most {route.bytes_max} bytes here (limits.message_bytes_max), and this one has {size}"
            self._express.fail(message, UCode.INVALID_ARGUMENT, what, self.endpoint)
            return
        attributes = attributes_of(message)
        self.endpoint.dropped["over_quota"] += 1
        self._refuse_unread(route.account, attributes.source.authority_name)
        if attributes.type == attrs.REQUEST:
            what = f"authority {route.account.authority} sends more than its quota: send slower"
            self._express.fail(message, UCode.RESOURCE_EXHAUSTED, what, self.endpoint)

    def _refuse_unread(self, account: Account, authority: str) -> None:
        """Until the next turn of the ledger its messages need not even be read. `authority`: as the network names
        it."""
        refused = self.endpoint.transport.refused
        if refused is not None and authority not in self._refused:
            self._refused[authority] = account
            refused[authority] = 0

    def gather_refused(self) -> None:
        """Count what the transport has refused, and let those authorities send again that may."""
        refused = self.endpoint.transport.refused
        if refused is None:
            return
        for authority, account in list(self._refused.items()):
            count, refused[authority] = refused[authority], 0
            self.endpoint.received += count
            self.endpoint.dropped["over_quota"] += count
            if self._ledger.refused(account, count):
                del refused[authority], self._refused[authority]

    # Where it goes

    def forget_routes(self) -> None:
        """Decide anew: something has changed that `View.version` does not tell."""
        self._routes.clear()

    def forget_streams(self, target: Log, streams: frozenset[int]) -> None:
        """`target` knows these numbers no more: what comes next for one of them is decided anew, and what found no room
        before."""
        gone = [
            key
            for key, route in self._routes.items()
            if (route.stream in streams and route.log is target) or route.found_no_room
        ]
        for key in gone:
            del self._routes[key]

    def _resolve(self, key: Any, message: Carried, version: Version) -> Route:
        if len(self._routes) >= ROUTES_CACHED_MAX:
            self._routes.clear()
        attributes = attributes_of(message)  # not decoded: the message is kept for as long as the tail of the log
        source, sink = self._inside(attributes)
        try:
            route = self._decide(attributes, source, sink, version)
        except TopicsFullError as error:  # the others must not suffer
            self._tell_full(error)
            route = Route(version, Lane.DROP, reason=error.reason, found_no_room=True)
        route.is_answer = attributes.type == attrs.RESPONSE and not self._trusted
        route.source = source.SerializeToString()
        route.account = self._ledger.account(source.authority_name, "" if self._trusted else self.endpoint.name)
        if not self._trusted and not route.is_answer:  # a page of history is an answer, and may be an envelope larger
            route.bytes_max = self._bytes_max
        readdressed = None
        if source != attributes.source or (sink is not None and sink != attributes.sink):
            readdressed = Readdressed(source, sink)
            route.inside = readdressed.of
        names = self.endpoint.names
        if names is not None and not self._trusted and carried_by(attributes) is not None:
            route.inside = functools.partial(names.arrived, readdressed)
        self._routes[key] = route
        return route

    def _tell_full(self, error: TopicsFullError) -> None:
        """Once a minute: with a flood of topics a line each would cost more than all else."""
        now = asyncio.get_running_loop().time()
        if now >= self._tell_full_at:
            self._tell_full_at = now + TELL_FULL_S
            log.warning("dropped: no room for one more topic", endpoint=self.endpoint.name, error=str(error))

    def _inside(self, attributes: UAttributes) -> tuple[UUri, UUri | None]:
        """Source and sink as they are called inside: with authority, and by the names of this gateway."""
        addresses = [attributes.source, *([attributes.sink] if attributes.HasField("sink") else [])]
        names = None if self._trusted else self.endpoint.names
        inside = []
        for address in addresses:
            copy = UUri()
            copy.CopyFrom(uris.with_authority(address, self.endpoint.only_authority))
            if names is not None:
                copy.authority_name = names.inward(copy.authority_name)
            inside.append(copy)
        return inside[0], inside[1] if len(inside) > 1 else None

    def _decide(self, attributes: UAttributes, source: UUri, sink: UUri | None, version: Version) -> Route:
        if not source.authority_name or (sink is not None and not sink.authority_name):
            return Route(version, Lane.DROP, reason="no_authority")
        names = None if self._trusted else self.endpoint.names
        if names is not None and sink is not None and names.is_inside(attributes.sink.authority_name):
            return Route(version, Lane.DROP, reason="inside_name")  # every vehicle has one: it may mean any of them
        if not self._trusted and self._endpoints.owner(source.authority_name) is not self.endpoint:
            log.warning(
                "dropped: the source's authority is not of this network",
                endpoint=self.endpoint.name,
                source=uris.format(source),
            )
            return Route(version, Lane.DROP, reason="spoofed")
        if sink is not None:
            return self._decide_addressed(attributes.type, source, sink, version)
        return self._decide_published(source, version)

    def _decide_addressed(self, type: int, source: UUri, sink: UUri, version: Version) -> Route:
        if self._hosted.owns(sink):
            return Route(version, Lane.HOSTED)
        peer = self._endpoints.owner(sink.authority_name)
        if peer is None or peer is self.endpoint:
            return Route(version, Lane.DROP)  # traffic within one network
        rule = self._rules.between(self.endpoint.name, peer.name)
        address = sink if type == attrs.REQUEST else source
        if not self._trusted and (rule is None or not rule.allows(address)):
            return Route(version, Lane.DROP, reason="denied")
        if type in (attrs.REQUEST, attrs.RESPONSE):
            return Route(version, Lane.EXPRESS, peer=peer)
        target = self._logs.of(source)
        return Route(version, Lane.LOG, log=target, stream=target.stream_id(source, sink))

    def _decide_published(self, source: UUri, version: Version) -> Route:
        target = self._logs.of(source)
        if self._view.decide(source, None, target) or self._logs.is_recorded(source):
            is_named = self._view.names(source) or self._logs.names(source)
            return Route(version, Lane.LOG, log=target, stream=target.stream_id(source, None, wanted=is_named))
        return Route(version, Lane.DROP)  # nobody wants it

    # What to listen to

    async def sync(self, topics: Sequence[UUri], *, all_publishes: bool = False) -> None:
        """Listen to what rules, interest, recording and hosted services need, and to nothing else.

        `topics` are those of the interest; `all_publishes`: a uSubscription can't name them, so listen to every
        publish. Raises the first UStatusError after everything else was tried.
        """
        async with self._sync_lock:
            wanted = self._wanted(topics, all_publishes)
            errors: list[UStatusError] = []
            # in a fixed order, so that a run can be replayed
            for key in [key for key in self._registered if key not in wanted]:
                source, sink = self._registered.pop(key)
                try:
                    await self.endpoint.unregister_listener(source, self, sink)
                except UStatusError as error:
                    if error.code != UCode.NOT_FOUND:
                        errors.append(error)
            for key in [key for key in wanted if key not in self._registered]:
                source, sink = wanted[key]
                try:
                    await self.endpoint.register_listener(source, self, sink)
                except UStatusError as error:
                    errors.append(error)
                else:
                    self._registered[key] = (source, sink)
            if errors:
                raise errors[0]

    def _wanted(self, topics: Sequence[UUri], all_publishes: bool) -> dict[Any, Filter]:
        """The filters, without those that another one covers: a network may deliver once for each filter."""
        sinks = [uris.pattern(authority) for authority in self._sink_authorities()]
        known = {sink.authority_name for sink in sinks}
        if uris.WILDCARD_AUTHORITY not in known:
            sinks += [filter for filter in self._hosted.sinks() if filter.authority_name not in known]
        wanted: dict[Any, Filter] = {(uris.key(uris.ANY), uris.key(sink)): (uris.ANY, sink) for sink in sinks}
        if Capability.PUBLISH_WITHOUT_SINK not in self.endpoint.transport.capabilities:
            return wanted  # publishes carry the streamer's sink here
        sources: list[UUri] = []
        for pattern in [uris.ANY] if all_publishes else self._logs.record:
            sources += self._at_home(pattern)
        wide = [source for source in sources if uris.has_wildcard(source)]
        for topic in topics:
            if self._view.leaves(self.endpoint, topic):
                sources.append(topic)
        for source in sources:
            if not any(
                other is not source and uris.key(other) != uris.key(source) and uris.matches(other, source)
                for other in wide
            ):
                wanted[uris.key(source), None] = (source, None)
        return wanted

    def _sink_authorities(self) -> set[str]:
        peers = [self._endpoints[name] for name in self._rules.egresses(self.endpoint.name)]
        authorities = {authority for peer in peers for authority in peer.authorities}
        return {uris.WILDCARD_AUTHORITY} if any(map(uris.is_pattern, authorities)) else authorities

    def _at_home(self, pattern: UUri) -> list[UUri]:
        """`pattern`, limited to the authorities that live here."""
        if pattern.authority_name == uris.WILDCARD_AUTHORITY and any(map(uris.is_pattern, self.endpoint.authorities)):
            return [pattern]
        authorities = (
            self.endpoint.authorities if pattern.authority_name == uris.WILDCARD_AUTHORITY else [pattern.authority_name]
        )
        return [
            uris.uri(authority, pattern.ue_id, pattern.ue_version_major, pattern.resource_id)
            for authority in authorities
            if self._endpoints.owner(authority) is self.endpoint
        ]


def _key(attributes: UAttributes) -> tuple[int, bytes, bytes | None]:
    sink = attributes.sink.SerializeToString() if attributes.HasField("sink") else None
    return attributes.type, attributes.source.SerializeToString(), sink


def _id(message: Carried) -> bytes:
    return message.id_key if type(message) is EncodedMessage else message.attributes.id.SerializeToString()


async def _all(pending: list[Awaitable[Any]]) -> None:
    results = await asyncio.gather(*pending, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
