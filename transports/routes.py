"""Which filters match a message: looked up, not searched.

filter (source, sink) -> put -> by key; and the shapes of filters in use: which of their parts are wildcards
(type, source, sink) of a message -> of -> Route: one look-up for each shape, cached; renewed when its filters change

Nearly all filters name one topic, so nearly all have one shape. The first message of a topic costs the same with
100,000 filters as with ten, and a new filter costs nothing for routes that it does not match.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import product
from typing import Final

from uprotocol import attributes as attrs
from uprotocol import cache as caches
from uprotocol import uri as uris
from uprotocol.cache import Cache
from uprotocol.status import UStatusError
from uprotocol.transport import UListener, validate_filters
from uprotocol.uri import Key
from uprotocol.v1.uattributes_pb2 import UAttributes
from uprotocol.v1.uri_pb2 import UUri

RENEWED_MAX: Final = 1_024  # routes that one filter renews, some 2 ms; if it matches more, the cache is cleared
REACHES_MAX: Final = 256  # sets of filters that many routes share, while few wide filters match most of them
ADDRESS_BYTES_MAX: Final = 512  # of a source or a sink, with unknown fields: twice the size of a valid one

FilterPair = tuple[Key, Key | None]
Found = list[tuple["Filter", list[UListener]]]
_Reach = tuple[Found, dict[int, list[UListener]]]
_Shapes = tuple[uris.Shape, uris.Shape | None]
_Packed = tuple[int, bytes, bytes | None]  # type, source, sink
_NUMBERS: Final = struct.Struct(">III")


@dataclass(frozen=True, slots=True)
class Filter:
    """A source filter and a sink filter, completed with the local authority. Hashable."""

    key: FilterPair
    source: UUri = field(compare=False, repr=False)
    sink: UUri | None = field(compare=False, repr=False)

    @classmethod
    def of(cls, source: UUri, sink: UUri | None, local_authority: str = "") -> Filter:
        """Raises UStatusError(INVALID_ARGUMENT) for a pair that the specification does not allow."""
        validate_filters(source, sink)
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

    def listeners(self, filter: Filter) -> list[UListener]:
        known = self.filters.get(filter.key)
        return [] if known is None else known[1]

    def put(self, filter: Filter, listeners: list[UListener]) -> None:
        """Set the listeners of a filter; none: remove it."""
        known, shapes = self.filters.get(filter.key), _shapes(filter.key)
        if listeners:
            self.filters[filter.key] = (filter if known is None else known[0], listeners)
            self._shapes[shapes] += known is None
        elif known is not None:
            del self.filters[filter.key]
            self._shapes[shapes] -= 1
            if not self._shapes[shapes]:
                del self._shapes[shapes]
        self._reaches.clear()
        self._renew(filter, shapes)

    def of(self, attributes: UAttributes) -> Route | None:
        """The route of a message; None if no valid message can have these addresses."""
        if not attributes.HasField("source"):
            return None
        source, sink = attributes.source, attributes.sink if attributes.HasField("sink") else None
        if source.ByteSize() > ADDRESS_BYTES_MAX or (sink is not None and sink.ByteSize() > ADDRESS_BYTES_MAX):
            return None
        packed = (attributes.type, _pack(source), None if sink is None else _pack(sink))
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

    # What matches

    def _reach(self, packed: _Packed) -> _Reach:
        """The filters that match, and the listeners by filter."""
        self.looks += 1
        source = self._key(packed[1])
        sink = None if packed[2] is None else self._key(packed[2])
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

    def _key(self, packed: bytes) -> Key:
        authority, numbers = packed[: -_NUMBERS.size], packed[-_NUMBERS.size :]
        return (authority.decode() or self._local, *_NUMBERS.unpack(numbers))

    # What changes

    def _renew(self, filter: Filter, shapes: _Shapes) -> None:
        """Renew the cached routes that `filter` matches, or clear the cache if that costs less."""
        if not self._routes:
            return
        (authority, *_), _ = filter.key
        if authority == uris.WILDCARD_AUTHORITY:
            self._clear()
            return
        is_one = shapes in (_ONE, _ONE_WITH_SINK)
        matching = self._variants(filter) if is_one else self._of_authority(authority)
        if len(matching) > RENEWED_MAX:
            self._clear()
            return
        for packed in matching:
            route = self._routes[packed]
            if route is not None:
                route.found, route.by_filter = self._reach(packed)

    def _variants(self, filter: Filter) -> list[_Packed]:
        """The cached routes of a filter without wildcards: of each type, with and without the local authority."""
        source, sink = filter.source, filter.sink
        sources = self._named_or_not(source)
        sinks: list[bytes | None] = [None] if sink is None else [*self._named_or_not(sink)]
        every = product(attrs.RULES, sources, sinks)
        return [packed for packed in every if packed in self._routes]

    def _named_or_not(self, uri: UUri) -> list[bytes]:
        packed = _pack(uri)
        return [packed, packed[-_NUMBERS.size :]] if uri.authority_name == self._local else [packed]

    def _of_authority(self, authority: str) -> list[_Packed]:
        """The cached routes with that source authority: a filter with other wildcards may match them."""
        name = authority.encode()
        length = len(name) + _NUMBERS.size
        of_it = [one for one in self._routes if len(one[1]) == length and one[1].startswith(name)]
        if authority == self._local:
            of_it += [one for one in self._routes if len(one[1]) == _NUMBERS.size]
        return of_it

    def _clear(self) -> None:
        self._routes.clear()
        self._on_cleared()


_ONE: Final = (uris.EXACT, None)
_ONE_WITH_SINK: Final = (uris.EXACT, uris.EXACT)


def _shapes(key: FilterPair) -> _Shapes:
    source, sink = key
    return uris.shape(source), None if sink is None else uris.shape(sink)


def _pack(uri: UUri) -> bytes:
    """Its key as bytes, which take less memory than a tuple."""
    return uri.authority_name.encode() + _NUMBERS.pack(uri.ue_id, uri.ue_version_major, uri.resource_id)


def each_once(found: Found) -> Iterable[UListener]:
    if len(found) == 1:
        return found[0][1]
    return {id(listener): listener for _, listeners in found for listener in listeners}.values()
