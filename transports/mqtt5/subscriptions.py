"""Which topic filters the broker knows, and which of its copies of one message we take. Pure.

A broker may send a message once for each subscription that matches, or once for all; the identifiers say for which it
did. Of the subscriptions that match a topic, the one that the broker has known longest leads: its copy is taken for all
listeners, the others are not. It is the longest known one, because the broker may still send what it matched before the
younger ones existed.
"""

from __future__ import annotations

import asyncio
import zlib
from dataclasses import dataclass
from typing import Final

from uprotocol.cache import Cache

IDENTIFIER_MAX: Final = 268_435_455
TOPICS_CACHED_MAX: Final = 32_768  # topics whose leader is known


@dataclass(slots=True, eq=False)
class Subscription:
    topic_filter: str
    identifier: int
    granted: asyncio.Future[None] | None = None  # the broker's answer; None if it was away when we would have asked
    known: bool = False  # the broker has it
    users: int = 1  # uProtocol filters that need it; 0: it is being left, and leads until the broker has answered


def topic_matches(topic_filter: str, topic: str) -> bool:
    """`+` stands for one segment; the mapping makes no other wildcard."""
    wanted, given = topic_filter.split("/"), topic.split("/")
    return len(wanted) == len(given) and all(one in ("+", two) for one, two in zip(wanted, given, strict=True))


class Subscriptions(dict[str, Subscription]):
    """By topic filter, in the order in which they were made."""

    def __init__(self) -> None:
        super().__init__()
        self._by_identifier: dict[int, Subscription] = {}
        self._leaders: Cache[str, tuple[bool, int | None]] = Cache(TOPICS_CACHED_MAX)

    def add(self, topic_filter: str) -> Subscription:
        """A new one. The same filter gets the same identifier in every process, so that what a session kept can be told
        apart."""
        assert topic_filter not in self, f"{topic_filter} is subscribed to already"
        identifier = zlib.crc32(topic_filter.encode()) % IDENTIFIER_MAX + 1
        while identifier in self._by_identifier:
            identifier = identifier % IDENTIFIER_MAX + 1
        made = Subscription(topic_filter, identifier)
        self[topic_filter] = self._by_identifier[identifier] = made
        self._leaders.clear()
        return made

    def remove(self, subscription: Subscription) -> None:
        """May be called again."""
        if self.get(subscription.topic_filter) is subscription:
            del self[subscription.topic_filter]
            del self._by_identifier[subscription.identifier]
            self._leaders.clear()

    def mark_known(self, subscription: Subscription) -> None:
        subscription.known = True
        self._leaders.clear()

    def forget_all(self) -> None:
        """The broker has lost the session."""
        for subscription in self.values():
            subscription.known = False
        self._leaders.clear()

    def match(self, topic: str, identifiers: tuple[int, ...]) -> bool | None:
        """True: take it. False: another copy of it is taken. None: no subscription of ours matches."""
        found = self._leaders.get(topic)
        if found is None:
            matching = [one for one in self.values() if topic_matches(one.topic_filter, topic)]
            leader = next((one.identifier for one in matching if one.known), None)
            found = self._leaders[topic] = (bool(matching), leader)
        matched, leader = found
        if not matched:
            return None
        if leader is None or not identifiers or leader in identifiers:
            return True
        return not any(identifier in self._by_identifier for identifier in identifiers)
