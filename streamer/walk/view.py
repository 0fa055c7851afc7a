"""View: which messages may pass between networks (rules), who must get a record, and what a caller may read.

    (source, sink) -> rule allows? -> sink is there, or somebody there has subscribed? -> Decision(legs, open)
    (View)                            a service has not answered yet: its peers are open
                                      the topic is paused (paused.py): that peer is open, too

    caller   -> inside this process: everything
    (Access) -> an [[access]] entry names it: `allow` (if empty: as below), without `deny`
             -> else: messages from its own network, and those that the rules let pass there

Decisions are made once per topic (and once for all callers with the same sight) and cached by callers. When
`View.version` has changed, `changed_since` returns the topics. A poll shows nothing that a push would not.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from history.log.log import Log
from history.service.matches import EVERYTHING, Sight, Sights
from streamer.egress.paused import Paused
from streamer.walk.endpoint import Endpoint, Endpoints
from streamer.walk.hosted import is_inside
from uprotocol import uri as uris
from uprotocol.cache import Cache
from uprotocol.status import UStatusError
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.uri_pb2 import UUri
from usubscription_client.interest import Interest, Topics

SIGHTS_CACHED_MAX: Final = 65_536  # callers whose sight is cached; the cache is cleared when it is full


@dataclass(frozen=True)
class Rule:
    """Messages of endpoint `ingress` may go to endpoint `egress`, if their address passes deny and allow.

    The address is the source of a publish or notification, and the method of a request or response.
    """

    ingress: str
    egress: str
    allow: Sequence[UUri] = field(default=(), compare=False)
    deny: Sequence[UUri] = field(default=(), compare=False)

    def allows(self, address: UUri) -> bool:
        if any(uris.matches(pattern, address) for pattern in self.deny):
            return False
        return not self.allow or any(uris.matches(pattern, address) for pattern in self.allow)


class Rules:
    """The rules in force. `version` rises with every change, so that caches become invalid."""

    def __init__(self) -> None:
        self._rules: dict[tuple[str, str], Rule] = {}
        self.version = 0
        self.on_change: Callable[[], None] = lambda: None

    def __iter__(self) -> Iterator[Rule]:
        return iter(self._rules.values())

    def add(self, rule: Rule) -> None:
        """Raises ALREADY_EXISTS if the two endpoints have a rule."""
        if (rule.ingress, rule.egress) in self._rules:
            raise UStatusError(
                UCode.ALREADY_EXISTS,
                f"there is a rule from {rule.ingress!r} to {rule.egress!r} already: remove it first",
            )
        self._rules[rule.ingress, rule.egress] = rule
        self.changed()

    def remove(self, ingress: str, egress: str) -> Rule:
        """Raises NOT_FOUND."""
        rule = self._rules.pop((ingress, egress), None)
        if rule is None:
            raise UStatusError(UCode.NOT_FOUND, f"there is no rule from {ingress!r} to {egress!r}")
        self.changed()
        return rule

    def changed(self) -> None:
        """Have everything derived from the rules derived again: also if other endpoints may own authorities now."""
        self.version += 1
        self.on_change()

    def between(self, ingress: str, egress: str) -> Rule | None:
        return self._rules.get((ingress, egress))

    def allow(self, ingress: Endpoint, egress: Endpoint, address: UUri) -> bool:
        """True if a rule lets messages with this address go from one endpoint to the other."""
        rule = self._rules.get((ingress.name, egress.name))
        return rule is not None and ingress is not egress and rule.allows(address)

    def egresses(self, ingress: str) -> list[str]:
        """Returns the endpoints to which messages of `ingress` may go."""
        return [rule.egress for rule in self if rule.ingress == ingress]


class Target(NamedTuple):
    """An authority that gets the record."""

    authority: str
    since: int  # it gets only records with a greater seq
    period_ms: int | None  # at most one message per period; None: every message


class Leg(NamedTuple):
    """A peer that gets the record, and the targets there."""

    peer: Endpoint
    targets: tuple[Target, ...]


@dataclass(frozen=True, slots=True)
class Decision:
    """Who gets a record. An `open` peer may have to get it later, because a uSubscription has not answered yet or the
    topic is paused."""

    legs: tuple[Leg, ...] = ()
    open: tuple[Endpoint, ...] = ()

    def __bool__(self) -> bool:
        """False if nobody wants it."""
        return bool(self.legs or self.open)


NOBODY: Final = Decision()
Version = tuple[int, int, int]
"""The versions of the rules, the interest and the pauses."""


class View:
    """Pure. `logs` have the order of the positions of subscriptions (usubscription_client.interest.LogPositions)."""

    def __init__(
        self, endpoints: Endpoints, rules: Rules, interest: Interest, logs: Iterable[Log], paused: Paused
    ) -> None:
        self.endpoints, self.rules, self._interest, self._paused = endpoints, rules, interest, paused
        self._indexes = {log: index for index, log in enumerate(logs)}
        self.version: Version = (0, 0, 0)  # changes whenever an answer of `decide` may change
        self._changed()
        rules.on_change = self._changed
        interest.on_change(self._changed)
        paused.on_change(self._changed)

    def _changed(self, _: Topics = None) -> None:
        self.version = self.rules.version, self._interest.version, self._paused.version

    def changed_since(self, version: Version) -> frozenset[uris.Key] | None:
        """Returns the topics of publishes for which `decide` may now answer differently; None: any topic. Messages
        with a sink do not depend on subscriptions."""
        if (self.rules.version, self._paused.version) != (version[0], version[2]):
            return None
        changed = self._interest.changed_since(version[1])
        if changed is None or any(uris.shape(topic) != uris.EXACT for topic in changed):
            return None
        return changed

    def decide(self, source: UUri, sink: UUri | None, log: Log) -> Decision:
        """Returns who gets a message from `source` (to `sink`) that is kept in `log`."""
        wanted = self.wanted(source, sink, log)
        return self._held(wanted, source) if self._paused else wanted

    def wanted(self, source: UUri, sink: UUri | None, log: Log) -> Decision:
        """Returns the same as `decide`, but without pauses."""
        origin = self.endpoints.owner(source.authority_name)
        if origin is None:
            return NOBODY
        if sink is not None:
            peer = self.endpoints.owner(sink.authority_name)
            if peer is None or not self.rules.allow(origin, peer, source):
                return NOBODY
            return Decision((Leg(peer, (Target(sink.authority_name, 0, None),)),))
        index, targets = self._indexes[log], dict[str, list[Target]]()
        for authority, want in self._interest.wants(source).items():
            peer = self.endpoints.owner(authority)
            if peer is not None and self.rules.allow(origin, peer, source):
                since = want.since[index] if want.since else 0
                targets.setdefault(peer.name, []).append(Target(authority, since, want.sample_period_ms or None))
        legs = tuple(Leg(self.endpoints[name], tuple(those)) for name, those in targets.items())
        return Decision(legs, self._open(origin, source))

    def _held(self, decision: Decision, source: UUri) -> Decision:
        """Returns `decision` without the targets for which `source` is paused; their peers are open."""
        legs, open = [], {peer.name: peer for peer in decision.open}
        for peer, targets in decision.legs:
            going = tuple(target for target in targets if not self._paused.holds(peer, target.authority, source))
            if going:
                legs.append(Leg(peer, going))
            if len(going) < len(targets):
                open[peer.name] = peer
        return Decision(tuple(legs), tuple(open.values()))

    def _open(self, origin: Endpoint, topic: UUri) -> tuple[Endpoint, ...]:
        """Returns the peers of services that have not answered yet. Both the subscriber's and the topic's service know
        a subscription."""
        undecided = self._interest.undecided(topic)
        if not undecided:
            return ()
        if uris.WILDCARD_AUTHORITY in undecided or topic.authority_name in undecided:
            peers = {endpoint.name: endpoint for endpoint in self.endpoints}
        else:
            owners = [owner for scope in undecided if (owner := self.endpoints.owner(scope)) is not None]
            peers = {owner.name: owner for owner in owners}
        return tuple(peer for peer in peers.values() if self.rules.allow(origin, peer, topic))

    def comes_from(self, peer: Endpoint, source: UUri) -> bool:
        """True if `source` is on the network of `peer`, so nothing from it goes there."""
        return self.endpoints.owner(source.authority_name) is peer

    def names(self, topic: UUri) -> bool:
        """True if a subscription names exactly `topic`."""
        return bool(self._interest.wants_by_name(topic))

    def leaves(self, origin: Endpoint, topic: UUri) -> bool:
        """True if `topic` is published at `origin`, and somebody on another network has subscribed to exactly this
        topic or pattern."""
        owner = self.endpoints.owner
        if owner(topic.authority_name) is not origin:
            return False
        peers = map(owner, self._interest.wants_by_name(topic))
        return any(peer is not None and self.rules.allow(origin, peer, topic) for peer in peers)


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
        self._cached = Cache[tuple[str, int, int], _Sight](SIGHTS_CACHED_MAX)
        self._cached_version = rules.version

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
        own = caller.authority_name if any(pattern.is_own for pattern in (*entry.allow, *entry.deny)) else ""
        key = (self.version, endpoint.name if endpoint is not None else "", number, own)
        return _Sight(key, endpoint, entry, own, self._endpoints, self._rules)
