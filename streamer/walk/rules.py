"""Forwarding rules: from which endpoint to which other one messages may go. `version` rises when they change.

source topic or method -> deny? -> allow? -> may go
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from uprotocol import uri as uris
from uprotocol.status import UStatusError
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.uri_pb2 import UUri


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

    def __iter__(self) -> Iterator[Rule]:
        return iter(self._rules.values())

    def add(self, rule: Rule) -> None:
        """Raises ALREADY_EXISTS if there is one between the two endpoints."""
        if (rule.ingress, rule.egress) in self._rules:
            raise UStatusError(
                UCode.ALREADY_EXISTS,
                f"there is a rule from {rule.ingress!r} to {rule.egress!r} already: remove it first",
            )
        self._rules[rule.ingress, rule.egress] = rule
        self.version += 1

    def remove(self, ingress: str, egress: str) -> Rule:
        """Raises NOT_FOUND."""
        rule = self._rules.pop((ingress, egress), None)
        if rule is None:
            raise UStatusError(UCode.NOT_FOUND, f"there is no rule from {ingress!r} to {egress!r}")
        self.version += 1
        return rule

    def endpoints_changed(self) -> None:
        """Another endpoint may own an authority now: whatever was derived from the rules is derived anew."""
        self.version += 1

    def between(self, ingress: str, egress: str) -> Rule | None:
        return self._rules.get((ingress, egress))

    def egresses(self, ingress: str) -> list[str]:
        """Returns the endpoints to which messages of `ingress` may go."""
        return [rule.egress for rule in self if rule.ingress == ingress]
