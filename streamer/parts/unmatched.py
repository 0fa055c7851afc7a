"""Patterns of the configuration that match nothing: mistyped ones, mostly.

Config, Endpoints -----------------> unknown_authorities: none of it can ever match       -> notes, `up-streamer check`
Rules, Logs, Follows, Access: matched -> UnmatchedPatterns: nothing has matched for UNMATCHED_S -> notes
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from streamer.assembly import Assembly
from streamer.config import Config, patterns
from streamer.part import Part, Parts
from streamer.walk.access import AccessPattern
from streamer.walk.endpoint import Endpoint, Endpoints
from uprotocol import uri as uris
from uprotocol.uri import Key
from uprotocol.v1.uri_pb2 import UUri

UNMATCHED_S: Final = 3_600  # many topics are published, or subscribed to, some time after a start
SHOWN_MAX: Final = 3  # patterns of one setting and reason that are named


def unknown_authorities(config: Config, endpoints: Endpoints) -> Iterator[str]:
    """Yields a sentence for the patterns of each setting whose authority is at none of the endpoints concerned."""
    for setting, texts, names in _settings(config):
        reasons: dict[str, list[str]] = {}
        for text in texts:
            if reason := _unknown(AccessPattern.parse(text).authority, endpoints, names):
                reasons.setdefault(reason, []).append(text)
        for reason, those in reasons.items():
            yield f"{setting}: {_listed(those)} can't match anything: {reason}"


def _settings(config: Config) -> Iterator[tuple[str, Sequence[str], Sequence[str]]]:
    """Yields the settings with patterns: name, patterns, and the endpoints where these may live; none given: all."""
    for rule in config.rules:
        way = f"[[rule]] from {rule.from_} to {rule.to}"
        for name, texts in (("allow", rule.allow), ("deny", rule.deny)):
            yield f"{way}, {name}", texts, (rule.from_, rule.to)
    for number, entry in enumerate(config.access, 1):
        yield _entry(number, "callers"), entry.callers, [entry.endpoint] if entry.endpoint else []
        yield _entry(number, "allow"), entry.allow, []
        yield _entry(number, "deny"), entry.deny, []
    for follow in config.follow:
        yield _follow(follow.endpoint, follow.service), follow.topics, [follow.endpoint]
    for group in config.epochs:
        yield f"[[epochs]] {group.name}, topics", group.topics, []
    yield "history.record", config.history.record, []
    yield "history.volatile", config.history.volatile, []


def _entry(number: int, name: str) -> str:
    return f"[[access]] entry {number}, {name}"


def _follow(endpoint: str, service: str) -> str:
    return f"[[follow]] of {service} at {endpoint}, topics"


def _unknown(authority: str, endpoints: Endpoints, names: Sequence[str]) -> str:
    """Returns why nothing has this authority; empty if something may."""
    if not authority or authority == uris.WILDCARD_AUTHORITY:
        return ""
    owners = _owners(authority, endpoints)
    if not owners:
        return f"no endpoint has the authority {authority}"
    if names and not any(owner.name in names for owner in owners):
        return f"the authority {authority} is at endpoint {owners[0].name}"
    return ""


def _owners(authority: str, endpoints: Endpoints) -> list[Endpoint]:
    """Returns the endpoints where an authority, or some of a family, may live."""
    if not uris.is_family(authority):
        owner = endpoints.owner(authority)
        return [] if owner is None else [owner]
    ending = authority[1:]
    general = endpoints.owner(f"any{ending}")  # of the family, or a wider one
    members = (peer for peer in endpoints if any(name.endswith(ending) for name in peer.authorities))
    return list(dict.fromkeys([*members, *([] if general is None else [general])]))


def _listed(texts: Sequence[str]) -> str:
    more = f" and {len(texts) - SHOWN_MAX} more" if len(texts) > SHOWN_MAX else ""
    return ", ".join(texts[:SHOWN_MAX]) + more


class UnmatchedPart(Part):
    """The patterns that have matched nothing for UNMATCHED_S, although something could."""

    name = "patterns that match nothing"

    def __init__(self, assembly: Assembly, parts: Parts) -> None:
        super().__init__(assembly, parts)
        self._since_ms: dict[tuple[str, str], int] = {}  # by setting and pattern: when it was first seen unmatched

    def notes(self) -> Iterator[str]:
        yield from unknown_authorities(self.assembly.config, self.assembly.endpoints)
        yield from self.unmatched()

    def unmatched(self) -> Iterator[str]:
        now_ms = self.assembly.runtime.now_ms()
        unmatched = [(setting, text) for setting, texts in self._unmatched() for text in texts]
        self._since_ms = {setting: self._since_ms.get(setting, now_ms) for setting in unmatched}
        due: dict[str, list[str]] = {}
        for (setting, text), since_ms in self._since_ms.items():
            if now_ms - since_ms >= UNMATCHED_S * 1_000:
                due.setdefault(setting, []).append(text)
        for setting, texts in due.items():
            hours = min(now_ms - self._since_ms[setting, text] for text in texts) // 3_600_000
            yield f"{setting}: {_listed(texts)} matched nothing in the last {hours} h"

    def _unmatched(self) -> Iterator[tuple[str, Iterable[str]]]:
        """Yields the settings with those of their patterns that have matched nothing."""
        assembly, config = self.assembly, self.assembly.config
        for rule in assembly.rules:
            names = (rule.ingress, rule.egress)
            yield f"[[rule]] from {rule.ingress} to {rule.egress}, allow", self._left(rule.allow, rule.matched, names)
        yield "history.record", self._left(patterns(config.history.record), assembly.logs.matched, ())
        for section in config.follow:
            left = self._left(patterns(section.topics), assembly.follows.matched, [section.endpoint])
            yield _follow(section.endpoint, section.service), left
        for number, entry in enumerate(config.access, 1):
            if number - 1 not in assembly.access.used:
                yield _entry(number, "callers"), [", ".join(entry.callers) or "any caller"]

    def _left(self, those: Iterable[UUri], matched: set[Key], names: Sequence[str]) -> Iterator[str]:
        endpoints = self.assembly.endpoints
        for pattern in those:
            if uris.key(pattern) not in matched and not _unknown(pattern.authority_name, endpoints, names):
                yield uris.format(pattern)
