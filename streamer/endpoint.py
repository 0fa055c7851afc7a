"""Endpoints: a name, authorities, and the transport of one network. The table knows whose an authority is.

authority -> Endpoints.owner -> Endpoint        "*" owns every authority that no other endpoint names
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Final

from uprotocol import uri as uris
from uprotocol.transport import Capability, UTransport

AUTHORITIES_CACHED_MAX: Final = 65_536  # owners that were looked up; thousands of vehicles fit, a flood of made-up names does not grow it


class Endpoint:
    """One network. Counters say what passed: `received`, `forwarded` messages, `dropped` by reason."""

    def __init__(self, name: str, authorities: Iterable[str], transport: UTransport) -> None:
        self.name = name
        self.authorities = frozenset(authorities)
        self.transport = transport
        self.received = 0
        self.forwarded = 0
        self.dropped: Counter[str] = Counter()

    @property
    def is_wildcard(self) -> bool:
        return uris.WILDCARD_AUTHORITY in self.authorities

    @property
    def needs_sink(self) -> bool:
        """A publish leaves with the streamer's sink, once per subscribing authority (MQTT off-vehicle)."""
        return Capability.PUBLISH_WITHOUT_SINK not in self.transport.capabilities

    def __repr__(self) -> str:
        return f"Endpoint({self.name}, {','.join(sorted(self.authorities))}, received={self.received}, forwarded={self.forwarded})"


class Endpoints:
    """All endpoints, and whose an authority is."""

    def __init__(self, endpoints: Iterable[Endpoint]) -> None:
        self._by_name = {endpoint.name: endpoint for endpoint in endpoints}
        self._named = {authority: endpoint for endpoint in self for authority in endpoint.authorities}
        self._cache: dict[str, Endpoint | None] = {}

    def __iter__(self) -> Iterator[Endpoint]:
        return iter(self._by_name.values())

    def __getitem__(self, name: str) -> Endpoint:
        return self._by_name[name]

    def owner(self, authority: str) -> Endpoint | None:
        """The endpoint on whose network `authority` lives; None if there is none."""
        try:
            return self._cache[authority]
        except KeyError:
            pass
        if len(self._cache) >= AUTHORITIES_CACHED_MAX:
            self._cache.clear()
        found = self._named.get(authority) or self._named.get(uris.WILDCARD_AUTHORITY)
        self._cache[authority] = found
        return found
