"""View: which messages may pass between networks (rules), and who must get a record.

    (source, sink) -> rule allows? -> sink is there, or somebody there has subscribed? -> Decision(legs, open)
                                      a service has not answered yet: its peers are open
                                      the topic is paused (paused.py): that peer is open, too

Decisions are made once per topic and cached by callers. When `View.version` has changed, `changed_since` returns the
topics. What a caller of the history may read: hosted.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from history.log.log import Log
from streamer.walk.endpoint import Endpoint, Endpoints
from streamer.walk.paused import Paused
from uprotocol import uri as uris
from uprotocol.status import UStatusError
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.uri_pb2 import UUri
from usubscription_client.interest import Interest, Topics


@dataclass(frozen=True)
class Rule:
    """Messages of endpoint `ingress` may go to endpoint `egress`, if their address passes deny and allow.

    The address is the source of a publish or notification, and the method of a request or response.
    """

    ingress: str
    egress: str
    allow: Sequence[UUri] = field(default=(), compare=False)
    deny: Sequence[UUri] = field(default=(), compare=False)
    # the patterns that have matched an address
    matched: set[uris.Key] = field(default_factory=set, compare=False, repr=False)

    def allows(self, address: UUri) -> bool:
        if match(self.deny, address, self.matched):
            return False
        return not self.allow or match(self.allow, address, self.matched)

    def may_allow(self, topic: UUri) -> bool:
        """True if it allows `topic`, or something that the pattern `topic` matches."""
        if not uris.has_wildcard(topic):
            return self.allows(topic)
        if any(uris.matches(pattern, topic) for pattern in self.deny):
            return False
        return not self.allow or any(uris.meets(pattern, topic) for pattern in self.allow)


def match(patterns: Sequence[UUri], address: UUri, matched: set[uris.Key]) -> bool:
    """True if one of `patterns` matches. Adds the keys of all that match to `matched`."""
    is_match = False
    for pattern in patterns:
        if uris.matches(pattern, address):
            is_match = True
            matched.add(uris.key(pattern))
    return is_match


class Rules:
    """The rules in force. `version` rises with every change, so that caches become invalid."""

    def __init__(self) -> None:
        self._rules: dict[tuple[str, str], Rule] = {}
        self.version = 0
        self.on_change: list[Callable[[], None]] = []

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

    def replace(self, rules: Iterable[Rule]) -> None:
        """Use these rules and no others. What patterns have matched before stays known."""
        before, self._rules = self._rules, {(rule.ingress, rule.egress): rule for rule in rules}
        for way, rule in self._rules.items():
            if way in before:
                rule.matched.update(before[way].matched)
        self.changed()

    def changed(self) -> None:
        """Have everything derived from the rules derived again: also if other endpoints may own authorities now."""
        self.version += 1
        for callback in self.on_change:
            callback()

    def between(self, ingress: str, egress: str) -> Rule | None:
        return self._rules.get((ingress, egress))

    def allow(self, ingress: Endpoint, egress: Endpoint, address: UUri) -> bool:
        """True if a rule lets messages with this address go from one endpoint to the other."""
        rule = self._rules.get((ingress.name, egress.name))
        return rule is not None and ingress is not egress and rule.allows(address)

    def may_allow(self, ingress: Endpoint, egress: Endpoint, topic: UUri) -> bool:
        """True if a rule lets `topic`, or something that the pattern `topic` matches, go from one endpoint to the
        other."""
        rule = self._rules.get((ingress.name, egress.name))
        return rule is not None and ingress is not egress and rule.may_allow(topic)

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


FOR_NOBODY: Final = Decision()
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
        rules.on_change.append(self._changed)
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
            return FOR_NOBODY
        if sink is not None:
            peer = self.endpoints.owner(sink.authority_name)
            if peer is None or not self.rules.allow(origin, peer, source):
                return FOR_NOBODY
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
        topic or pattern. Of a pattern it is enough that a rule allows a part."""
        owner = self.endpoints.owner
        if owner(topic.authority_name) is not origin:
            return False
        peers = map(owner, self._interest.wants_by_name(topic))
        return any(peer is not None and self.rules.may_allow(origin, peer, topic) for peer in peers)

    def is_wanted_elsewhere(self, topic: UUri) -> bool:
        """True if somebody on another network has subscribed to `topic`, whether or not a rule allows it."""
        owner = self.endpoints.owner
        origin = owner(topic.authority_name)
        peers = map(owner, self._interest.wants(topic))
        return any(peer is not None and peer is not origin for peer in peers)
