"""View: for each record, which peers must get it, and under which authority.

    (source, sink) -> rule allows? -> sink's authority is theirs, or somebody there subscribed? -> Leg(peer, targets)

Decided once per topic and version of rules and interest; callers cache the answer under `version`.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from streamer.endpoint import Endpoint, Endpoints
from streamer.rules import Rules
from uprotocol import uri as uris
from uprotocol.v1.uri_pb2 import UUri
from usubscription_client.interest import Interest

TOPICS_REMEMBERED: Final = 65_536  # beyond it those that nobody wants are forgotten now and then, so that made-up topics cost no memory


class Target(NamedTuple):
    """An authority that gets the record."""

    authority: str
    since: int  # it gets what has a greater seq
    period_ms: int | None  # at most one message per period; None: every one


class Leg(NamedTuple):
    """A peer that gets the record, and for whom."""

    peer: Endpoint
    targets: tuple[Target, ...]


Version = tuple[int, int]


class View:
    """Pure but for one memory: since which seq each subscription of a topic counts."""

    def __init__(self, endpoints: Endpoints, rules: Rules, interest: Interest) -> None:
        self._endpoints, self._rules, self._interest = endpoints, rules, interest
        self._since: dict[tuple[str, int, int, int], dict[str, int]] = {}
        self._since_max = TOPICS_REMEMBERED

    @property
    def version(self) -> Version:
        """Changes whenever an answer of `legs` may."""
        return (self._rules.version, self._interest.version)

    def legs(self, source: UUri, sink: UUri | None, newest_seq: int) -> tuple[Leg, ...] | None:
        """Who gets what comes from `source` (and goes to `sink`); None while a uSubscription is still being asked.

        `newest_seq` is the log's: a subscription that is seen for the first time counts from there, unless the topic itself is new.
        """
        origin = self._endpoints.owner(source.authority_name)
        if origin is None:
            return ()
        if sink is not None:
            peer = self._endpoints.owner(sink.authority_name)
            if peer is None or peer is origin or not self._allowed(origin, peer, source):
                return ()
            return (Leg(peer, (Target(sink.authority_name, 0, None),)),)
        if self._interest.undecided(source):
            return None
        return self._subscribed(origin, source, newest_seq)

    def _subscribed(self, origin: Endpoint, topic: UUri, newest_seq: int) -> tuple[Leg, ...]:
        wants = self._interest.wants(topic)
        key = uris.key(topic)
        known = self._since.get(key)
        first = 0 if known is None else newest_seq
        since = {authority: (known or {}).get(authority, first) for authority in wants}
        if known is None and len(self._since) >= self._since_max:
            self._since = {topic: counted for topic, counted in self._since.items() if counted}
            self._since_max = max(TOPICS_REMEMBERED, 2 * len(self._since))
        self._since[key] = since
        targets: dict[str, list[Target]] = {}
        for authority, want in wants.items():
            peer = self._endpoints.owner(authority)
            if peer is not None and peer is not origin and self._allowed(origin, peer, topic):
                targets.setdefault(peer.name, []).append(Target(authority, since[authority], want.sample_period_ms or None))
        return tuple(Leg(self._endpoints[name], tuple(those)) for name, those in targets.items())

    def leaves(self, origin: Endpoint, topic: UUri) -> bool:
        """True iff `topic` is published at `origin` and wanted by somebody on another network."""
        if self._endpoints.owner(topic.authority_name) is not origin:
            return False
        for authority in self._interest.wants(topic):
            peer = self._endpoints.owner(authority)
            if peer is not None and peer is not origin and self._allowed(origin, peer, topic):
                return True
        return False

    def _allowed(self, origin: Endpoint, peer: Endpoint, address: UUri) -> bool:
        rule = self._rules.between(origin.name, peer.name)
        return rule is not None and rule.allows(address)
