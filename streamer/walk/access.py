"""Who may read what of the history: pull shows nothing that push would not.

caller -> inside this process: everything
       -> an [[access]] entry names it: `allow` (none given: as below), less `deny`
       -> else: what came from its own network, and what the rules let go there

Nothing is decided per record or poll, but once per topic for all callers who see the same, until the rules change.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Final

from history.service import matches
from history.service.matches import EVERYTHING, Sight
from streamer.walk.endpoint import Endpoint, Endpoints
from streamer.walk.hosted import is_inside
from streamer.walk.rules import Rules
from uprotocol import uri as uris
from uprotocol.cache import Cache
from uprotocol.v1.uri_pb2 import UUri

SIGHTS_CACHED_MAX: Final = 65_536  # callers whose sight is known; starts anew when it is full


@dataclass(frozen=True)
class Pattern:
    """A pattern of addresses whose authority may be a family (`*.vin123`), or empty: that of whoever asks."""

    address: UUri
    authority: str

    @classmethod
    def parse(cls, text: str) -> Pattern:
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
        """It means other addresses for each caller."""
        return not self.authority

    def matches(self, candidate: UUri, own: str) -> bool:
        if uris.is_family(self.authority):
            return candidate.authority_name.endswith(self.authority[1:]) and uris.matches(self.address, candidate)
        return uris.matches(uris.with_authority(self.address, own), candidate)


@dataclass(frozen=True)
class Entry:
    """One of [[access]]. `endpoint`: only callers of that one; "": of all."""

    endpoint: str = ""
    callers: Sequence[Pattern] = ()
    allow: Sequence[Pattern] = ()
    deny: Sequence[Pattern] = ()

    def names(self, caller: UUri, endpoint: Endpoint | None) -> bool:
        if self.endpoint and (endpoint is None or endpoint.name != self.endpoint):
            return False
        return not self.callers or any(pattern.matches(caller, caller.authority_name) for pattern in self.callers)


class _Sight(Sight):
    """Of callers at one endpoint, under one entry or none."""

    def __init__(
        self, key: Hashable, endpoint: Endpoint | None, entry: Entry, own: str, endpoints: Endpoints, rules: Rules
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

    def alike(self, authority: str) -> Hashable:
        """They live on one network, and no pattern names one of them."""
        origin = self._endpoints.owner(authority)
        is_named = uris.is_one_of(authority, self._named)
        return origin.name if origin is not None else "", authority if is_named else ""

    def sees_all(self, authority: str) -> bool:
        """No pattern is between it and the caller."""
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
            return False  # a publish that names whom it is for
        rule = self._rules.between(origin.name, self._endpoint.name)
        return rule is not None and rule.allows(source)


def _owned(patterns: Sequence[Pattern], own: str) -> list[Pattern]:
    """Without anything left to be completed."""
    return [Pattern(uris.with_authority(one.address, own), own) if one.is_own else one for one in patterns]


class Access(matches.Access):
    """Of `entries` the first one counts that names a caller."""

    def __init__(self, endpoints: Endpoints, rules: Rules, entries: Sequence[Entry]) -> None:
        self._endpoints, self._rules, self._entries = endpoints, rules, entries
        self._cached = Cache[tuple[str, int, int], _Sight](SIGHTS_CACHED_MAX)
        self._cached_version = rules.version

    def __repr__(self) -> str:
        return f"Access({len(self._entries)} entries, version={self.version})"

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
        number, entry = next(naming, (-1, Entry()))
        own = caller.authority_name if any(pattern.is_own for pattern in (*entry.allow, *entry.deny)) else ""
        key = (self.version, endpoint.name if endpoint is not None else "", number, own)
        return _Sight(key, endpoint, entry, own, self._endpoints, self._rules)
