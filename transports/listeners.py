"""Filter -> listeners: the table of every push transport.

register_listener -> add     -> Filter that is new to the network, or None
arrived batch     -> deliver -> validate, drop expired messages, match, call each listener once per batch
                                 '-> an invalid traceparent is removed; the rest of the message is kept
unregister        -> remove  -> Filter that nobody needs any more, or None

Routes says which filters match, and looks them up instead of searching them:

filter (source, sink) -> put -> by key; and the shapes of filters in use: which of their parts are wildcards
(type, source, sink) of a message -> of -> Route: one look-up for each shape, cached; renewed when its filters change

Nearly all filters name one topic, so nearly all have one shape. The first message of a topic costs the same with
100,000 filters as with ten, and a new filter costs nothing for routes that it does not match.
"""

from __future__ import annotations

import asyncio
import struct
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, TypeVar

import structlog
from google.protobuf.message import DecodeError

from uprotocol import attributes as attrs
from uprotocol import cache as caches
from uprotocol import uri as uris
from uprotocol import uuid as uuids
from uprotocol.cache import Cache
from uprotocol.encoded import EncodedMessage, Stamp, is_shared, shared_suffix, suffix
from uprotocol.status import UStatusError, invalid
from uprotocol.transport import EncodedListener, TtlCounts, UBatchListener, UListener
from uprotocol.uri import Key
from uprotocol.v1.uattributes_pb2 import UAttributes
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.umessage_pb2 import UMessage
from uprotocol.v1.uri_pb2 import UUri

# of one transport: 100,000 subscriptions, and the streamer's own and its patterns; some 1.1 KB each
LISTENERS_MAX: Final = 131_072
LISTENERS_PER_FILTER_MAX: Final = 1_000  # the fan-out of one message within one process
SOURCES_LOGGED_MAX: Final = 1_000  # each with a log line for its first invalid traceparent
AGES_MAX: Final = 16  # of messages that had expired on arrival, to estimate the difference between two clocks
TRACEPARENT_SHOWN_MAX: Final = 64  # characters; a valid one has 55
KNOWN_BYTES_MAX: Final = 512  # of the attributes of a known stream; those of an honest one are shorter
RENEWED_MAX = 1_024  # routes that one filter renews, some 2 ms; if it matches more, the cache is cleared
REACHES_MAX: Final = 256  # sets of filters that many routes share, while few wide filters match most of them
ADDRESS_BYTES_MAX: Final = 512  # of a source or a sink, with unknown fields: twice the size of a valid one

log = structlog.get_logger()

FilterPair = tuple[Key, Key | None]
Found = list[tuple["Filter", list[UListener]]]
_Reach = tuple[Found, dict[int, list[UListener]]]
_Shapes = tuple[uris.Shape, uris.Shape | None]
_Packed = tuple[int, bytes, bytes | None]  # type, source, sink
_NUMBERS: Final = struct.Struct(">III")
Complete = Callable[[int, UAttributes], None]
"""(index of the message, its attributes, whose source or sink has no authority): fills in what the network knows."""
Unmatched = Callable[[int], None]
"""(index of the message): its filter does not match it."""


@dataclass(frozen=True, slots=True)
class Filter:
    """A source filter and a sink filter, completed with the local authority. Hashable."""

    key: FilterPair
    source: UUri = field(compare=False, repr=False)
    sink: UUri | None = field(compare=False, repr=False)

    @classmethod
    def of(cls, source: UUri, sink: UUri | None, local_authority: str = "") -> Filter:
        """Raises UStatusError(INVALID_ARGUMENT) for a pair that the specification does not allow."""
        attrs.validate_filters(source, sink)
        source = uris.with_authority(source, local_authority)
        sink = uris.with_authority(sink, local_authority) if sink is not None else None
        return cls((uris.key(source), uris.key(sink) if sink is not None else None), source, sink)

    def matches(self, source: UUri, sink: UUri | None) -> bool:
        """Without sink filter only messages without sink match; with a sink filter only messages with a sink."""
        if (self.sink is None) != (sink is None):
            return False
        return uris.matches(self.source, source) and (
            self.sink is None or sink is None or uris.matches(self.sink, sink)
        )


class Route:
    """The listeners for messages of one (type, source, sink). Stays the same object when they change."""

    __slots__ = ("by_filter", "found")

    def __init__(self, found: Found, by_filter: dict[int, list[UListener]]) -> None:
        self.found = found
        # by the identity of the Filter, which is faster than its hash; by that of None: all listeners, each once
        self.by_filter = by_filter


class Routes:
    """The filters with their listeners, and the cached routes."""

    def __init__(self, local_authority: str, on_cleared: Callable[[], None]) -> None:
        """`on_cleared()`: routes that were returned before are not renewed any more."""
        self._local, self._on_cleared = local_authority, on_cleared
        self.filters: dict[FilterPair, tuple[Filter, list[UListener]]] = {}
        self._shapes: Counter[_Shapes] = Counter()
        self._routes: dict[_Packed, Route | None] = {}  # None: no valid message has it
        self._reaches: Cache[tuple[int, ...], _Reach] = Cache(REACHES_MAX)
        self.looks = 0  # how often filters were looked up for a route

    def put(self, filter: Filter, listeners: list[UListener]) -> None:
        """Set the listeners of a filter; none: remove it. Renews the cached routes that it matches, or clears the cache
        if that costs less."""
        known, (source, sink) = self.filters.get(filter.key), filter.key
        shapes = uris.shape(source), None if sink is None else uris.shape(sink)
        if listeners:
            self.filters[filter.key] = (filter if known is None else known[0], listeners)
            self._shapes[shapes] += known is None
        elif known is not None:
            del self.filters[filter.key]
            self._shapes[shapes] -= 1
            if not self._shapes[shapes]:
                del self._shapes[shapes]
        self._reaches.clear()
        if not self._routes:
            return
        if shapes in (_ONE, _ONE_WITH_SINK):
            there = self._pack(filter.source), None if filter.sink is None else self._pack(filter.sink)
            matching = [packed for type in attrs.RULES if (packed := (type, *there)) in self._routes]
        else:
            matching = self._of_authority(source[0])
        if len(matching) > RENEWED_MAX:
            self._clear()
            return
        for packed in matching:
            route = self._routes[packed]
            if route is not None:
                route.found, route.by_filter = self._reach(packed)

    def of(self, attributes: UAttributes) -> Route | None:
        """The route of a message; None if no valid message can have these addresses."""
        if not attributes.HasField("source"):
            return None
        source, sink = attributes.source, attributes.sink if attributes.HasField("sink") else None
        if source.ByteSize() > ADDRESS_BYTES_MAX or (sink is not None and sink.ByteSize() > ADDRESS_BYTES_MAX):
            return None
        if sink is not None and not sink.authority_name and sink.ue_id == uris.WILDCARD_ENTITY:
            return None  # a streamer's sink names its authority, so the local one does not complete it
        packed = (attributes.type, self._pack(source), None if sink is None else self._pack(sink))
        known = self._routes.get(packed)
        if known is not None:
            return known
        if packed in self._routes:
            return None
        if len(self._routes) >= caches.streams_max:
            self._clear()
        try:
            attrs.validate_route(attributes.type, source, sink)
        except UStatusError:
            made = None
        else:
            made = Route(*self._reach(packed))
        self._routes[packed] = made
        return made

    def _reach(self, packed: _Packed) -> _Reach:
        """The filters that match, and the listeners by filter."""
        self.looks += 1
        source = _key(packed[1])
        sink = None if packed[2] is None else _key(packed[2])
        found: dict[FilterPair, tuple[Filter, list[UListener]]] = {}
        for of_source, of_sink in self._shapes:
            if (sink is None) != (of_sink is None):
                continue
            pair = (
                uris.masked(source, of_source),
                None if sink is None or of_sink is None else uris.masked(sink, of_sink),
            )
            known = self.filters.get(pair)
            if known is not None:
                found[pair] = known
        mark = tuple([id(filter) for filter, _ in found.values()])
        reach = self._reaches.get(mark)
        if reach is None:
            those = list(found.values())
            by_filter = {id(filter): listeners for filter, listeners in those} | {id(None): list(each_once(those))}
            reach = self._reaches[mark] = (those, by_filter)
        return reach

    def _of_authority(self, authority: str) -> list[_Packed]:
        """The cached routes with that source authority: a filter with other wildcards may match them."""
        if authority == uris.WILDCARD_AUTHORITY:
            return list(self._routes)
        name = authority.encode()
        length = len(name) + _NUMBERS.size
        return [one for one in self._routes if len(one[1]) == length and one[1].startswith(name)]

    def _pack(self, uri: UUri) -> bytes:
        """Its key, with the local authority if it has none, as bytes, which take less memory than a tuple."""
        authority = uri.authority_name or self._local
        return authority.encode() + _NUMBERS.pack(uri.ue_id, uri.ue_version_major, uri.resource_id)

    def _clear(self) -> None:
        self._routes.clear()
        self._on_cleared()


_ONE: Final = (uris.EXACT, None)
_ONE_WITH_SINK: Final = (uris.EXACT, uris.EXACT)


def _key(packed: bytes) -> Key:
    return (packed[: -_NUMBERS.size].decode(), *_NUMBERS.unpack(packed[-_NUMBERS.size :]))


def each_once(found: Found) -> Iterable[UListener]:
    if len(found) == 1:
        return found[0][1]
    return {id(listener): listener for _, listeners in found for listener in listeners}.values()


class _KnownStamp(NamedTuple):
    """The same for all messages with a stamp."""

    route: Route
    stamp: Stamp


M = TypeVar("M", UMessage, EncodedMessage)
_ListenerCall = tuple[UListener, Callable[[Any], Awaitable[None] | None], Any]
_Shares = dict[int, tuple[UListener, list[M]]]  # by the identity of the listener


class ListenerTable:
    """Delivers messages to the listeners whose filters match. Lives on the event loop.

    `dropped` counts, by reason, the messages that were thrown away on arrival; `mended` counts, by field, those that
    were taken without an invalid field.
    """

    def __init__(
        self,
        local_authority: str,
        *,
        listeners_max: int = LISTENERS_MAX,
        listeners_per_filter_max: int = LISTENERS_PER_FILTER_MAX,
        now_ms: Callable[[], int] = uuids.now_ms,
    ) -> None:
        self._local_authority = local_authority
        self._listeners_max, self._per_filter_max = listeners_max, listeners_per_filter_max
        self._now_ms = now_ms
        self._size = 0
        self._stamped: Cache[bytes, _KnownStamp] = Cache()  # by the suffix of the encoded attributes
        self._routes = Routes(local_authority, self._stamped.clear)
        self.dropped: Counter[str] = Counter()
        self.mended: Counter[str] = Counter()
        self._logged_sources: set[bytes] = set()  # sources of what was mended
        self._with_ttl = self._expired_count = 0  # since `take_ttl_counts`
        self._ages_ms: deque[int] = deque(maxlen=AGES_MAX)
        self.failures = 0  # calls of listeners that raised
        self._last_failure = ""

    def add(self, source: UUri, sink: UUri | None, listener: UListener) -> Filter | None:
        """Returns the filter if this is its first listener, so that the network has to be asked for it; else None.

        Raises INVALID_ARGUMENT, or RESOURCE_EXHAUSTED at a limit (not if it is registered already).
        """
        filter = Filter.of(source, sink, self._local_authority)
        given: object = listener
        if not isinstance(given, (UListener, UBatchListener, EncodedListener)):
            what = "expected a listener, an object with a method on_receive(message)"
            raise invalid(f"{what}, got {type(given).__name__}")
        _, listeners = self._routes.filters.get(filter.key, (filter, []))
        if any(known is listener for known in listeners):
            return None
        if self._size >= self._listeners_max:
            what = f"{self._listeners_max} listeners are registered, which is the limit"
            raise UStatusError(UCode.RESOURCE_EXHAUSTED, what)
        if len(listeners) >= self._per_filter_max:
            what = f"{self._per_filter_max} listeners have this filter, which is the limit"
            raise UStatusError(UCode.RESOURCE_EXHAUSTED, what)
        self._routes.put(filter, [*listeners, listener])
        self._size += 1
        return None if listeners else filter

    def remove(self, source: UUri, sink: UUri | None, listener: UListener) -> Filter | None:
        """Returns the filter if it has no listener left; else None. Raises INVALID_ARGUMENT or NOT_FOUND."""
        filter = Filter.of(source, sink, self._local_authority)
        _, listeners = self._routes.filters.get(filter.key, (filter, []))
        rest = [known for known in listeners if known is not listener]
        if len(rest) == len(listeners):
            what = f"no such listener for {uris.format(filter.source)}: it was never registered, or not any more"
            raise UStatusError(UCode.NOT_FOUND, what)
        self._size -= 1
        self._routes.put(filter, rest)
        return None if rest else filter

    @property
    def filters(self) -> list[Filter]:
        """Every filter that the network must know, for instance after a reconnect."""
        return [filter for filter, _ in self._routes.filters.values()]

    def deliver(self, messages: Sequence[UMessage], only: Filter | None = None) -> Awaitable[None] | None:
        """Deliver `messages` to the matching listeners, in order, with one call of each listener for the whole batch.

        `only` limits it to the listeners of one filter, the object that `add` returned. Invalid and expired messages
        are dropped and counted. The awaitable, if any, completes when every listener has taken its messages; it raises
        if one has not.
        """
        shares: _Shares[UMessage] = {}
        now = self._now_ms()
        for message in messages:
            route = self._sound(message, now)
            if route is None:
                continue
            found = route.found if only is None else [one for one in route.found if one[0] is only]
            for listener in each_once(found):
                shares.setdefault(id(listener), (listener, []))[1].append(message)
        return self._call_all(call for listener, messages in shares.values() for call in _calls_of(listener, messages))

    def deliver_encoded(
        self,
        arrived: Iterable[tuple[Filter | None, bytes, bytes]],
        complete: Complete | None = None,
        unmatched: Unmatched | None = None,
    ) -> Awaitable[None] | None:
        """As `deliver`, for networks that bring the attributes encoded: (filter, payload, UAttributes).

        `complete(index, attributes)` is called for a message without authority in source or sink: the network may know
        the host from a key or a topic. `unmatched(index)` is called for a valid message that does not match its filter,
        which has listeners or had some.

        The filter is for networks that deliver a message once for each filter; it is the object that `add` returned.
        None: all filters.

        A payload is present if it has bytes or a format (A-19, A-28). Messages of a known stream are only parsed for a
        listener that is no EncodedListener. If a message comes twice in a row, for overlapping filters, a listener of
        both gets it once.
        """
        shares: _Shares[EncodedMessage] = {}
        now, stamped = self._now_ms(), self._stamped
        last: EncodedMessage | None = None
        last_encoded = last_payload = b""
        # filters that have brought `last`: if one of them brings it again, it was sent twice
        brought_by: list[Filter | None] = []
        known: _KnownStamp | None = None
        with_ttl = 0
        for index, (filter, payload, encoded) in enumerate(arrived):
            # 1: the message: the last one again, one of a known stream, or one to be parsed
            is_again = encoded == last_encoded and payload == last_payload and filter not in brought_by
            if last is None or known is None or not is_again:
                last, last_encoded, last_payload, brought_by = None, encoded, payload, []
                rest = suffix(encoded)
                known = stamped.get(rest) if rest is not None else None
                if known is not None:
                    last = EncodedMessage(encoded, payload, known.stamp)
                    if known.stamp.ttl:
                        with_ttl += 1
                        if last.is_expired(now):
                            self._expired(now - last.created_ms)
                            last = None
                            continue
                else:
                    first = self._parse_first(encoded, payload, now, index, complete)
                    if first is None:
                        continue
                    known, last = first
            # 2: who wants it
            brought_by.append(filter)
            wanted_by = known.route.by_filter.get(id(filter))
            if wanted_by is None:
                if unmatched is not None:
                    unmatched(index)
                continue
            for listener in wanted_by:
                share = shares.get(id(listener))
                if share is None:
                    shares[id(listener)] = (listener, [last])
                elif share[1][-1] is not last:
                    share[1].append(last)
        self._with_ttl += with_ttl
        return self._call_all(
            call
            for listener, messages in shares.values()
            for call in (
                [(listener, listener.on_receive_encoded, messages)]
                if isinstance(listener, EncodedListener)
                else _calls_of(listener, [message.decoded() for message in messages])
            )
        )

    def _parse_first(
        self, encoded: bytes, payload: bytes, now: int, index: int, complete: Complete | None
    ) -> tuple[_KnownStamp, EncodedMessage] | None:
        """Parse and validate a message whose stamp is not known; cache the stamp if other messages can have it.

        Missing authorities are completed first: two hosts that don't name themselves are not one stream.
        """
        message = UMessage()
        try:
            message.attributes.ParseFromString(encoded)
        except DecodeError:
            self.dropped["malformed"] += 1
            return None
        if complete is not None and attrs.lacks_authority(message.attributes):
            complete(index, message.attributes)
            encoded = message.attributes.SerializeToString()
        if payload or message.attributes.payload_format:
            message.payload = payload
        rest = shared_suffix(encoded, message.attributes)  # before `_sound`, which may remove a field
        route = self._sound(message, now)
        if route is None:
            return None
        if rest is None:
            alone = EncodedMessage.of(message)
            return _KnownStamp(route, alone.stamp), alone
        known = self._stamped[rest] = _KnownStamp(route, Stamp(message.attributes, rest))
        return known, EncodedMessage(encoded, payload, known.stamp)

    def _sound(self, message: UMessage, now_ms: int) -> Route | None:
        """Returns its route; None, and counted, if the message is invalid or has expired."""
        attributes = message.attributes
        route = self._routes.of(attributes)
        if route is not None:
            try:
                attrs.validate_rest(attributes)
            except UStatusError:
                if not self._mend(attributes):
                    route = None
        if route is not None and attributes.ttl:
            self._with_ttl += 1
            if attrs.is_expired(attributes, now_ms):
                self._expired(now_ms - uuids.time_ms(attributes.id))
                return None
        if route is None or (attributes.payload_format and not message.HasField("payload")):
            self.dropped["invalid"] += 1
            return None
        return route

    def _expired(self, age_ms: int) -> None:
        self.dropped["expired"] += 1
        self._expired_count += 1
        self._ages_ms.append(age_ms)

    def take_ttl_counts(self) -> TtlCounts:
        """See UTransport.take_ttl_counts; `ages_ms` of the last AGES_MAX."""
        counts = TtlCounts(self._with_ttl, self._expired_count, tuple(self._ages_ms))
        self._with_ttl = self._expired_count = 0
        self._ages_ms.clear()
        return counts

    def _mend(self, attributes: UAttributes) -> bool:
        """Remove an invalid traceparent, which is not part of the content. Returns True if the rest is valid."""
        if attrs.has_valid_traceparent(attributes):
            return False
        traceparent = attributes.traceparent
        attributes.ClearField("traceparent")
        try:
            attrs.validate_rest(attributes)
        except UStatusError:
            return False
        self.mended["traceparent"] += 1
        source = attributes.source.SerializeToString()
        if source not in self._logged_sources and len(self._logged_sources) < SOURCES_LOGGED_MAX:
            self._logged_sources.add(source)
            what = "invalid traceparent removed; logged once for each source"
            shown = traceparent[:TRACEPARENT_SHOWN_MAX]
            log.warning(what, source=uris.format(attributes.source), traceparent=shown)
        return True

    def wants(self, message: UMessage) -> bool:
        """True if a listener's filter matches, or if the message can't be valid: `deliver` counts and drops it then."""
        route = self._routes.of(message.attributes)
        return route is None or bool(route.found)

    def accepts(self, message: UMessage) -> bool:
        """True if it is valid and has not expired; else counts it in `dropped`."""
        return self._sound(message, self._now_ms()) is not None

    def _call_all(self, calls: Iterable[_ListenerCall]) -> Awaitable[None] | None:
        """Call the listeners. The awaitable completes when all of theirs have; None: there are none."""
        pending: list[Awaitable[None]] = []
        for listener, call, what in calls:
            try:
                answer = call(what)
            except Exception as error:
                self._count_failure(listener, error)
            else:
                if answer is not None:
                    pending.append(answer)
        if not pending:
            return None
        return pending[0] if len(pending) == 1 else all_of(pending)

    def _count_failure(self, listener: UListener, error: Exception) -> None:
        self.failures += 1
        is_other, self._last_failure = repr(error) != self._last_failure, repr(error)
        # the 1st, 2nd, 4th, ... and each with another reason: it may fail with every message
        if is_other or self.failures & (self.failures - 1) == 0:
            log.exception(
                "a listener failed; its message counts as taken", listener=repr(listener), failures=self.failures
            )


class KnownAddresses:
    """Whether the attributes of a message name the addresses at which it arrived, on a network that checks access to
    those. Known for each stream."""

    def __init__(self, is_of: Callable[[str, UAttributes], bool], dropped: Counter[str]) -> None:
        """`is_of(there, attributes)`: they are those of a message that arrives there (a key, a partition)."""
        self._is_of, self._dropped = is_of, dropped
        self._known: Cache[bytes, str] = Cache()  # encoded attributes without their id -> where they arrive

    def agree(self, encoded: bytes, there: str) -> bool:
        """False, and counted as spoofed, if the attributes name another source or sink. True if they can't be parsed:
        the listeners count that."""
        rest = suffix(encoded)
        if rest is not None and self._known.get(rest) == there:
            return True
        try:
            attributes = UAttributes.FromString(encoded)
        except DecodeError:
            return True
        if not self._is_of(there, attributes):
            self._dropped["spoofed"] += 1
            return False
        if rest is not None and len(rest) <= KNOWN_BYTES_MAX and is_shared(attributes):
            self._known[rest] = there
        return True


def _calls_of(listener: UListener, messages: list[UMessage]) -> list[_ListenerCall]:
    if isinstance(listener, (EncodedListener, UBatchListener)):
        return [(listener, listener.on_receive_batch, messages)]
    return [(listener, listener.on_receive, message) for message in messages]


async def all_of(pending: Sequence[Awaitable[Any]]) -> None:
    """Completes when all have completed; raises the exception of the first one that has failed."""
    for result in await asyncio.gather(*pending, return_exceptions=True):
        if isinstance(result, BaseException):
            raise result
