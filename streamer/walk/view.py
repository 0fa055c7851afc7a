"""View: decides which peers must get a record, and for which authorities.

    (source, sink) -> rule allows? -> sink's authority is theirs, or somebody there subscribed? -> Decision(legs, open)
                                      a service has not answered yet: its peers are open
                                      the topic is paused (paused.py): that peer is open, too

Decided once per topic; callers cache the answer. When `version` has changed, `changed_since` returns which topics.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

from history.log.log import Log
from streamer.egress.paused import Paused
from streamer.walk.endpoint import Endpoint, Endpoints
from streamer.walk.rules import Rules
from uprotocol import uri as uris
from uprotocol.v1.uri_pb2 import UUri
from usubscription_client.interest import Interest
from usubscription_client.table import Want


class Target(NamedTuple):
    """An authority that gets the record."""

    authority: str
    since: int  # it gets records with a greater seq
    period_ms: int | None  # at most one message per period; None: every one


class Leg(NamedTuple):
    """A peer that gets the record, and for whom."""

    peer: Endpoint
    targets: tuple[Target, ...]


@dataclass(frozen=True, slots=True)
class Decision:
    """Who gets a record. A peer that is `open` may have to get it as well, later: a uSubscription has not answered yet,
    or the topic is paused."""

    legs: tuple[Leg, ...] = ()
    open: tuple[Endpoint, ...] = ()

    def __bool__(self) -> bool:
        """False: nobody wants it."""
        return bool(self.legs or self.open)


NOBODY: Final = Decision()
Version = tuple[int, int, int]
"""Of the rules, the interest, the pauses."""


class View:
    """Pure. The order of `logs` is that of the positions of subscriptions (usubscription_client.table.Positions)."""

    def __init__(
        self, endpoints: Endpoints, rules: Rules, interest: Interest, logs: Iterable[Log], paused: Paused
    ) -> None:
        self._endpoints, self._rules, self._interest, self._paused = endpoints, rules, interest, paused
        self._indexes = {log: index for index, log in enumerate(logs)}

    @property
    def version(self) -> Version:
        """Changes whenever an answer of `decide` may."""
        return (self._rules.version, self._interest.version, self._paused.version)

    def changed_since(self, version: Version) -> frozenset[uris.Key] | None:
        """Returns the topics for which `decide` may answer differently by now; None: any topic. Only publishes:
        messages with a sink do not depend on subscriptions."""
        if (self._rules.version, self._paused.version) != (version[0], version[2]):
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
        """As `decide`, without pauses."""
        origin = self._endpoints.owner(source.authority_name)
        if origin is None:
            return NOBODY
        if sink is not None:
            peer = self._endpoints.owner(sink.authority_name)
            if peer is None or not self._passes(origin, peer, source):
                return NOBODY
            return Decision((Leg(peer, (Target(sink.authority_name, 0, None),)),))
        subscribed = self._subscribed(origin, source, self._interest.wants(source), self._indexes[log])
        return Decision(subscribed, self._open(origin, source))

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

    def _subscribed(self, origin: Endpoint, topic: UUri, wants: Mapping[str, Want], index: int) -> tuple[Leg, ...]:
        targets: dict[str, list[Target]] = {}
        for authority, want in wants.items():
            peer = self._endpoints.owner(authority)
            if peer is not None and self._passes(origin, peer, topic):
                since = want.since[index] if want.since else 0
                targets.setdefault(peer.name, []).append(Target(authority, since, want.sample_period_ms or None))
        return tuple(Leg(self._endpoints[name], tuple(those)) for name, those in targets.items())

    def _open(self, origin: Endpoint, topic: UUri) -> tuple[Endpoint, ...]:
        """Returns the peers of services that have not answered yet: both the subscriber's and the topic's service know
        a subscription."""
        undecided = self._interest.undecided(topic)
        if not undecided:
            return ()
        if uris.WILDCARD_AUTHORITY in undecided or topic.authority_name in undecided:
            peers = {endpoint.name: endpoint for endpoint in self._endpoints}
        else:
            owners = [owner for scope in undecided if (owner := self._endpoints.owner(scope)) is not None]
            peers = {owner.name: owner for owner in owners}
        return tuple(peer for peer in peers.values() if self._passes(origin, peer, topic))

    def comes_from(self, peer: Endpoint, source: UUri) -> bool:
        """True if `source` is on the network of `peer`, so nothing from it goes there."""
        return self._endpoints.owner(source.authority_name) is peer

    def names(self, topic: UUri) -> bool:
        """True if a subscription names exactly `topic`."""
        return self._interest.names(topic)

    def leaves(self, origin: Endpoint, topic: UUri) -> bool:
        """True iff `topic` is published at `origin`, and somebody on another network has subscribed to exactly this
        topic or pattern."""
        if self._endpoints.owner(topic.authority_name) is not origin:
            return False
        return bool(self._subscribed(origin, topic, self._interest.wants_by_name(topic), 0))

    def _passes(self, origin: Endpoint, peer: Endpoint, address: UUri) -> bool:
        if peer is origin:
            return False
        rule = self._rules.between(origin.name, peer.name)
        return rule is not None and rule.allows(address)
