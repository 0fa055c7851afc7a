"""Topic -> who wants it, by authority, and how often: what every source of interest keeps. Pure.

put(subscription), replace(all) --> topics --> wants(topic) -> {authority: Want}
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

from uprotocol import uri as uris
from uprotocol.v1.uri_pb2 import UUri
from usubscription_client.wire import Status, Subscription

Key = tuple[str, int, int, int]


@dataclass(frozen=True, slots=True)
class Want:
    """One authority's interest in one topic. `sample_period_ms` None: every message."""

    sample_period_ms: int | None = None


def uri_of(key: Key) -> UUri:
    return UUri(authority_name=key[0], ue_id=key[1], ue_version_major=key[2], resource_id=key[3])


EVERYTHING: Final = Want()
NOBODY: Final[Mapping[str, Want]] = MappingProxyType({})


@dataclass(slots=True, eq=False)
class _Topic:
    uri: UUri
    subscribers: dict[Key, int | None] = field(default_factory=dict)  # -> sample period
    wants: Mapping[str, Want] | None = None  # by authority; None: to be made anew


class InterestTable:
    """Topic -> subscribers -> authorities. A lookup costs a dictionary access, and a scan of the topics that have wildcards."""

    def __init__(self) -> None:
        self._topics: dict[Key, _Topic] = {}
        self._patterns: dict[Key, _Topic] = {}  # topics with a wildcard (version 4 allows all instances)
        self._callbacks: list[Callable[[], None]] = []

    def __len__(self) -> int:
        return len(self._topics) + len(self._patterns)

    def wants(self, topic: UUri) -> Mapping[str, Want]:
        """Which authorities want `topic`."""
        found = self._topics.get(uris.key(topic))
        wants = _wants_of(found) if found is not None else NOBODY
        for pattern in self._patterns.values():
            if uris.matches(pattern.uri, topic):
                wants = merge((wants, _wants_of(pattern)))
        return wants

    def topics(self) -> list[UUri]:
        return [entry.uri for entries in (self._topics, self._patterns) for entry in entries.values()]

    def subscriptions(self) -> Iterator[Subscription]:
        """Everything that is known; pending ones count as subscribed."""
        for entries in (self._topics, self._patterns):
            for entry in entries.values():
                for subscriber, period in entry.subscribers.items():
                    yield Subscription(entry.uri, uri_of(subscriber), Status.SUBSCRIBED, None, period)

    def put(self, subscription: Subscription) -> bool:
        """Take one subscription as it is now. True if that changed anything."""
        topic_key, subscriber = uris.key(subscription.topic), uris.key(subscription.subscriber)
        entries = self._patterns if uris.has_wildcard(subscription.topic) else self._topics
        entry = entries.get(topic_key)
        if subscription.status.wanting:
            if entry is None:
                entry = entries[topic_key] = _Topic(subscription.topic)
            elif entry.subscribers.get(subscriber, -1) == subscription.sample_period_ms:
                return False
            entry.subscribers[subscriber] = subscription.sample_period_ms
        else:
            if entry is None or subscriber not in entry.subscribers:
                return False
            del entry.subscribers[subscriber]
            if not entry.subscribers:
                del entries[topic_key]
        entry.wants = None
        return True

    def replace(self, subscriptions: Iterable[Subscription], only: UUri | None = None) -> bool:
        """These are all there are (of topic `only`, if given). True if that changed anything."""
        fresh = InterestTable()
        for subscription in subscriptions:
            fresh.put(subscription)
        if only is not None:
            key = uris.key(only)
            old, new = self._topics.get(key), fresh._topics.get(key)
            if (old.subscribers if old else {}) == (new.subscribers if new else {}):
                return False
            if new is None:
                del self._topics[key]
            else:
                self._topics[key] = new
            return True
        if fresh._flat() == self._flat():
            return False
        self._topics, self._patterns = fresh._topics, fresh._patterns
        return True

    def _flat(self) -> dict[Key, dict[Key, int | None]]:
        return {key: entry.subscribers for entries in (self._topics, self._patterns) for key, entry in entries.items()}

    def on_change(self, callback: Callable[[], None]) -> None:
        self._callbacks.append(callback)

    def changed(self) -> None:
        for callback in self._callbacks:
            callback()


def _wants_of(entry: _Topic) -> Mapping[str, Want]:
    if entry.wants is None:
        periods: dict[str, int | None] = {}
        for subscriber, period in entry.subscribers.items():
            periods[subscriber[0]] = _smaller(periods[subscriber[0]], period) if subscriber[0] in periods else period
        entry.wants = {authority: Want(period) if period is not None else EVERYTHING for authority, period in periods.items()}
    return entry.wants


def _smaller(one: int | None, other: int | None) -> int | None:
    """The sample period that satisfies both; None is every message (A-33)."""
    return None if one is None or other is None else min(one, other)


def merge(parts: Sequence[Mapping[str, Want]]) -> Mapping[str, Want]:
    """The union; the smallest sample period wins."""
    filled = [part for part in parts if part]
    if len(filled) <= 1:
        return filled[0] if filled else NOBODY
    merged = dict(filled[0])
    for part in filled[1:]:
        for authority, want in part.items():
            known = merged.get(authority)
            merged[authority] = want if known is None else Want(_smaller(known.sample_period_ms, want.sample_period_ms))
    return merged


class TableSource:
    """What the sources have in common."""

    can_list = True
    healthy = True

    def __init__(self, name: str) -> None:
        self.name = name
        self._table = InterestTable()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name}, topics={len(self._table)}, healthy={self.healthy})"

    def wants(self, topic: UUri) -> Mapping[str, Want]:
        return self._table.wants(topic)

    def topics(self) -> Collection[UUri]:
        return self._table.topics()

    def on_change(self, callback: Callable[[], None]) -> None:
        self._table.on_change(callback)

    def decided(self, topic: UUri) -> bool:
        """This source knows everything already ..."""
        return True

    async def ask(self, topic: UUri) -> None:
        """... so there is nothing to do."""
