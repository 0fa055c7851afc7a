"""What callers of the services inside may read of the history.

caller -> inside this process: everything
       -> an [[access]] entry names it: `allow` (if empty: as below), without `deny`
       -> else: messages from its own network, and those that the rules let pass there
A poll shows nothing that a push would not.

Access -> the Sight of one caller: which topics it sees -> Visible, the same as patterns: those of its [[access]]
entry, else a Road for each authority: what comes from its network to the caller's, `allow` and `deny` of that rule.
Authorities that are `alike` are on one network and named by no pattern: what is seen of one is seen of all.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Final

from history.records.visible import HIDDEN_ROAD, Road, Visible, precedence
from history.service.matches import EVERYTHING, Sight, Sights
from streamer.walk.endpoint import Endpoint, Endpoints
from streamer.walk.view import Rules
from uprotocol import uri as uris
from uprotocol.cache import Cache
from uprotocol.v1.uri_pb2 import UUri

SIGHTS_CACHED_MAX: Final = 65_536  # callers whose sight is cached; the cache is cleared when it is full

caller_is_inside: Final = ContextVar("inside", default=False)  # set by the services' transport (hosted.py)
is_inside: Final[Callable[[], bool]] = caller_is_inside.get
"""Returns True while a hosted service handles a message of another one in this process. No network can fake that."""


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
