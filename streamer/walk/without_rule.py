"""Subscriptions that no rule serves: somebody on another network has subscribed, and no rule lets the topic go there.

Interest.changed_since --> those topics --> Causes.of(topic, authority) --> groups by cause --> notes, gauge, the log
rules have changed ------> all topics, TOPICS_STEP_MAX in each step of the loop

A rule is somebody's decision, so this is a note and no problem: a client must not be able to make a gateway degraded by
subscribing to what it may not have. Ingress drops such messages with the reason `no_rule` where it hears them.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Final, NamedTuple

import structlog

from streamer.reporting import Reporter, Sample
from streamer.walk.endpoint import Endpoint, Endpoints
from streamer.walk.view import Rules
from uprotocol import uri as uris
from uprotocol.core.usubscription.wire import to_uri
from uprotocol.uri import Key
from uprotocol.v1.uri_pb2 import UUri
from usubscription_client.interest import Interest, Topics

TOPICS_STEP_MAX: Final = 256  # topics in one step of the loop, some 3 ms
CAUSES_SHOWN_MAX: Final = 20  # causes that are named in the notes; the gauge counts all
CAUSES_LOGGED_MAX: Final = 20  # lines in LOGGED_S, so that clients that subscribe again and again do not fill the log
LOGGED_S: Final = 60.0
PATTERNS_SHOWN_MAX: Final = 3  # of one rule
_TOPIC: Final = "{topic}"

log = structlog.get_logger()


class WithoutRuleCause(NamedTuple):
    """Why subscriptions are not served. `ingress`, `egress`: names of endpoints; "" is none, or any for a topic with a
    wildcard as authority."""

    ingress: str
    egress: str
    why: str  # a clause about the rule or the authority
    remedy: str  # with _TOPIC in place of the topic


class Causes:
    """Pure: says why a subscription is not served."""

    def __init__(self, endpoints: Endpoints, rules: Rules) -> None:
        self._endpoints, self._rules = endpoints, rules

    def of(self, topic: UUri, subscriber: str, *, is_ours: bool) -> WithoutRuleCause | None:
        """Returns why nothing of `topic`, which may be a pattern, goes to the authority `subscriber`; None if something
        may, or if both are on one network. `is_ours`: only this gateway can serve the subscription, so an authority
        that no endpoint has is a mistake; else another gateway may have it."""
        peer = self._endpoints.owner(subscriber)
        if peer is None:
            return _unknown(subscriber, "subscriber") if is_ours else None
        if topic.authority_name == uris.WILDCARD_AUTHORITY:
            others = [endpoint for endpoint in self._endpoints if endpoint is not peer]
            if not others or any(self._rules.may_allow(origin, peer, topic) for origin in others):
                return None
            why = f"no rule to endpoint {peer.name} allows it"
            return WithoutRuleCause("", peer.name, why, f'add "{_TOPIC}" to `allow` of a rule with to = "{peer.name}"')
        origin = self._endpoints.owner(topic.authority_name)
        if origin is None:
            return _unknown(topic.authority_name, "topic") if is_ours else None
        if origin is peer or self._rules.may_allow(origin, peer, topic):
            return None
        return self._not_allowed(origin, peer, topic)

    def _not_allowed(self, origin: Endpoint, peer: Endpoint, topic: UUri) -> WithoutRuleCause:
        rule = self._rules.between(origin.name, peer.name)
        way = f"from {origin.name} to {peer.name}"
        if rule is None:
            remedy = f'add [[rule]] with from = "{origin.name}", to = "{peer.name}"'
            return WithoutRuleCause(origin.name, peer.name, f"there is no rule {way}", remedy)
        denying = [pattern for pattern in rule.deny if uris.matches(pattern, topic)]
        if denying:
            why = f"the rule {way} denies {_listed(denying)}"
            return WithoutRuleCause(origin.name, peer.name, why, "narrow its `deny`")
        why = f"the rule {way} allows only {_listed(rule.allow)}"
        return WithoutRuleCause(origin.name, peer.name, why, f'add "{_TOPIC}" to its `allow`')


def _unknown(authority: str, whose: str) -> WithoutRuleCause:
    why = f"no endpoint has the authority {authority} of the {whose}"
    return WithoutRuleCause("", "", why, "add it to `authorities` of its endpoint, or correct the subscription")


def _listed(patterns: Iterable[UUri]) -> str:
    texts = [uris.format(pattern) for pattern in patterns]
    more = f" and {len(texts) - PATTERNS_SHOWN_MAX} more" if len(texts) > PATTERNS_SHOWN_MAX else ""
    return ", ".join(texts[:PATTERNS_SHOWN_MAX]) + more


class WithoutRule(Reporter):
    """The subscriptions of `interest` that no rule serves: topics, each with the subscribing authorities."""

    def __init__(self, endpoints: Endpoints, rules: Rules, interest: Interest) -> None:
        self._causes, self._rules, self._interest = Causes(endpoints, rules), rules, interest
        self._seen: tuple[int, int] | None = None  # versions of rules and interest that were checked
        self._of_topic: dict[Key, dict[str, WithoutRuleCause]] = {}  # by subscribing authority
        self._groups: dict[WithoutRuleCause, dict[tuple[Key, str], None]] = {}
        self._changed = asyncio.Event()
        self._changed.set()
        self._logged, self._logged_since = 0, 0.0  # lines of the log since then, loop time
        self.looks = 0  # checks of a topic

    async def run(self) -> None:
        """Follow the changes of interest and rules until cancelled."""
        remove = self._interest.on_change(self._has_changed)
        self._rules.on_change.append(self._has_changed)
        try:
            while True:
                await self._changed.wait()
                self._changed.clear()
                new = list[tuple[Key, str]]()
                for step in self.steps():
                    new += step[: CAUSES_LOGGED_MAX - len(new)]
                    await asyncio.sleep(0)
                self._log(new)
        finally:
            self._rules.on_change.remove(self._has_changed)
            remove()

    def _has_changed(self, _: Topics = None) -> None:
        self._changed.set()

    def steps(self) -> Iterator[list[tuple[Key, str]]]:
        """Check what has changed, TOPICS_STEP_MAX in each step. Yields what no rule serves and was served before."""
        versions = self._rules.version, self._interest.version
        topics: Topics = None
        if self._seen is not None and self._seen[0] == versions[0]:
            topics = self._interest.changed_since(self._seen[1])
        if topics is not None:
            due = sorted(topics)
        else:
            due = list(dict.fromkeys([*self._of_topic, *map(uris.key, self._interest.topics())]))
        self._seen = versions
        for start in range(0, len(due), TOPICS_STEP_MAX):
            yield [found for topic in due[start : start + TOPICS_STEP_MAX] for found in self._check(topic)]

    def _check(self, topic: Key) -> list[tuple[Key, str]]:
        self.looks += 1
        before = self._of_topic.pop(topic, {})
        for authority, cause in before.items():
            group = self._groups[cause]
            del group[topic, authority]
            if not group:
                del self._groups[cause]
        address, causes = to_uri(topic), dict[str, WithoutRuleCause]()
        for authority in self._interest.wants_by_name(address):
            found = self._causes.of(address, authority, is_ours=self._interest.is_ours(topic, authority))
            if found is not None:
                causes[authority] = found
                self._groups.setdefault(found, {})[topic, authority] = None
        if causes:
            self._of_topic[topic] = causes
        return [(topic, authority) for authority in causes if authority not in before]

    def _log(self, new: list[tuple[Key, str]]) -> None:
        now = asyncio.get_running_loop().time()
        if now >= self._logged_since + LOGGED_S:
            self._logged, self._logged_since = 0, now
        for topic, authority in new[: CAUSES_LOGGED_MAX - self._logged]:
            known = self._of_topic.get(topic, {}).get(authority)
            if known is not None:
                self._logged += 1
                text, who = uris.format(to_uri(topic)), self._interest.subscriber(topic, authority)
                log.warning(
                    "a subscription is not served: no rule allows it",
                    topic=text,
                    subscriber=authority if who is None else uris.format(who),
                    why=known.why,
                    remedy=known.remedy.replace(_TOPIC, text),
                )

    # Reports

    def notes(self) -> Iterator[str]:
        """Yields a sentence for each cause, with one of its subscriptions."""
        for cause, group in islice(self._groups.items(), CAUSES_SHOWN_MAX):
            (topic, authority), count = next(iter(group)), len(group)
            subscriber = self._interest.subscriber(topic, authority)
            who = authority if subscriber is None else uris.format(subscriber)
            yield sentence(cause, uris.format(to_uri(topic)), who, count - 1)
        if len(self._groups) > CAUSES_SHOWN_MAX:
            rest = sum(len(group) for group in islice(self._groups.values(), CAUSES_SHOWN_MAX, None))
            yield f"subscribed, but not forwarded: no rule allows it: {rest} more subscriptions for other reasons"

    def samples(self) -> Iterator[Sample]:
        counts = Counter[tuple[str, str]]()
        for cause, group in self._groups.items():
            counts[cause.ingress, cause.egress] += len(group)
        for way, count in counts.items():
            yield "subscriptions_without_rule", way, count


def sentence(cause: WithoutRuleCause, topic: str, subscriber: str, more: int = 0) -> str:
    """Returns a sentence about a subscription that no rule serves, and so many more."""
    others = f" (and {more:,} more)" if more else ""
    remedy = cause.remedy.replace(_TOPIC, topic)
    what = f"{subscriber} has subscribed to {topic}{others}, and {cause.why}"
    return f"subscribed, but not forwarded: no rule allows it: {what}: {remedy}"
