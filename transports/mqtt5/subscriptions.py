"""Which topic filters the broker knows, and which of its copies of one message we take. Pure.

A broker may send a message once for each subscription that matches, or once for all; the identifiers say for which it
did. Of the subscriptions that match a topic, the one that the broker has known longest leads: its copy is taken for all
listeners, the others are not. It is the longest known one, because the broker may still send what it matched before the
younger ones existed.
"""

from __future__ import annotations

import asyncio
import itertools
import zlib
from collections import Counter
from dataclasses import dataclass
from typing import Final

from uprotocol.cache import Cache
from uprotocol.status import UStatusError

Shape = tuple[int, tuple[int, ...]]
"""Of a topic filter: how many segments it has, and which of them are `+`."""

IDENTIFIER_MAX: Final = 268_435_455


@dataclass(slots=True, eq=False)
class Subscription:
    topic_filter: str
    identifier: int
    # the broker's first answer; None if it was away when we would have asked
    granted: asyncio.Future[None] | None = None
    known: bool = False  # the broker has it
    number: int = 0  # rises in the order in which they were made
    users: int = 1  # uProtocol filters that need it; 0: it is being left, and leads until the broker has answered
    refusal: UStatusError | None = None  # why the broker has it not
    refusals: int = 0  # in a row
    hang_ups: int = 0  # connections that were lost while it had no answer, in a row
    again_s: float = 0.0  # loop time from which on it may be asked for again

    @property
    def is_missing(self) -> bool:
        """The broker is to be asked for it, together with others."""
        return not self.known and self.users > 0 and not self.hang_ups


def topic_matches(topic_filter: str, topic: str) -> bool:
    """`+` stands for one segment; the mapping makes no other wildcard."""
    wanted, given = topic_filter.split("/"), topic.split("/")
    return len(wanted) == len(given) and all(one in ("+", two) for one, two in zip(wanted, given, strict=True))


def _shape(topic_filter: str) -> Shape:
    segments = topic_filter.split("/")
    return len(segments), tuple(place for place, segment in enumerate(segments) if segment == "+")


class Subscriptions(dict[str, Subscription]):
    """By topic filter, in the order in which they were made. A topic is looked up once for each shape that is in use,
    however many filters there are."""

    def __init__(self) -> None:
        super().__init__()
        self._by_identifier: dict[int, Subscription] = {}
        self._leaders: Cache[str, tuple[bool, int | None]] = Cache()
        self._shapes: Counter[Shape] = Counter()
        self._numbers = itertools.count()

    def add(self, topic_filter: str) -> Subscription:
        """A new one. The same filter gets the same identifier in every process, so that what a session kept can be told
        apart."""
        assert topic_filter not in self, f"{topic_filter} is subscribed to already"
        identifier = zlib.crc32(topic_filter.encode()) % IDENTIFIER_MAX + 1
        while identifier in self._by_identifier:
            identifier = identifier % IDENTIFIER_MAX + 1
        made = Subscription(topic_filter, identifier, number=next(self._numbers))
        self[topic_filter] = self._by_identifier[identifier] = made
        self._shapes[_shape(topic_filter)] += 1
        self._forget(topic_filter)
        return made

    def _forget(self, topic_filter: str) -> None:
        """Which subscription leads, of the topics that it matches."""
        if "+" in topic_filter:
            self._leaders.clear()
        else:
            self._leaders.pop(topic_filter, None)

    def remove(self, subscription: Subscription) -> None:
        """May be called again."""
        if self.get(subscription.topic_filter) is subscription:
            del self[subscription.topic_filter]
            del self._by_identifier[subscription.identifier]
            shape = _shape(subscription.topic_filter)
            self._shapes[shape] -= 1
            if not self._shapes[shape]:
                del self._shapes[shape]
            self._forget(subscription.topic_filter)

    def mark_known(self, subscription: Subscription) -> None:
        subscription.known = True
        self._forget(subscription.topic_filter)

    def forget_all(self) -> None:
        """The broker has lost the session."""
        for subscription in self.values():
            subscription.known = False
        self._leaders.clear()

    def match(self, topic: str, identifiers: tuple[int, ...]) -> bool | None:
        """True: take it. False: another copy of it is taken. None: no subscription of ours matches."""
        found = self._leaders.get(topic)
        if found is None:
            matching = sorted(self._matching(topic), key=lambda one: one.number)
            leader = next((one.identifier for one in matching if one.known), None)
            found = self._leaders[topic] = (bool(matching), leader)
        matched, leader = found
        if not matched:
            return None
        if leader is None or not identifiers or leader in identifiers:
            return True
        return not any(identifier in self._by_identifier for identifier in identifiers)

    def _matching(self, topic: str) -> list[Subscription]:
        segments = topic.split("/")
        found = []
        for length, places in self._shapes:
            if length == len(segments):
                masked = segments.copy()
                for place in places:
                    masked[place] = "+"
                one = self.get("/".join(masked))
                if one is not None:
                    found.append(one)
        return found
