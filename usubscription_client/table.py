"""The table of every source of interest: topic -> which authorities want it, and how often. Pure.

put(subscription), replace(all) --> topics --> wants(topic) -> {authority: Want}
      since(topic): the log positions after which a new subscription counts
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

from uprotocol import uri as uris
from uprotocol.core.usubscription.wire import WANTING, Status, Subscription, to_uri
from uprotocol.uri import Key
from uprotocol.v1.uri_pb2 import UUri

LogPositions = tuple[int, ...]
"""The last position in each log, in the order of the logs. Later positions are greater; () is before all others."""

Topics = frozenset[Key] | None
"""The topics, or patterns of topics, whose interest has changed. None: any of them may have changed."""
Changed = Callable[[Topics], None]

FROM_THE_CURSOR: Final[LogPositions] = ()
CHANGES_KEPT_MAX: Final = 100_000  # changes that may arrive during one fetch; with more the fetch starts again
SUBSCRIPTIONS_MAX: Final = 5_000_000  # the same as in our own service


@dataclass(frozen=True, slots=True)
class Want:
    """The interest of one authority in one topic. `sample_period_ms` None: every message.

    `since`: it counts for records after these positions; FROM_THE_CURSOR: for all records after the peer's cursor.
    """

    sample_period_ms: int | None = None
    since: LogPositions = FROM_THE_CURSOR


NOBODY: Final[Mapping[str, Want]] = MappingProxyType({})


@dataclass(slots=True, eq=False)
class _Topic:
    uri: UUri
    subscribers: dict[Key, Want] = field(default_factory=dict)
    wants: Mapping[str, Want] | None = None  # by authority; None: has to be computed


class InterestTable:
    """Topic -> subscribers -> authorities. A lookup costs some dictionary accesses, independent of the number of
    topics with wildcards."""

    def __init__(
        self,
        since: Callable[[UUri], LogPositions] = lambda _: FROM_THE_CURSOR,
        subscriptions_max: int = SUBSCRIPTIONS_MAX,
    ) -> None:
        """`since(topic)`: the positions after which a new subscription counts."""
        self._since, self._most = since, subscriptions_max
        self.count = 0  # subscriptions
        self.left_out = 0  # subscriptions beyond `subscriptions_max`
        self._topics: dict[Key, _Topic] = {}
        # topics by their wildcards: version 4 allows wildcard instances and versions, a static file also others
        self._shapes: Counter[uris.Shape] = Counter()
        self._callbacks: list[Changed] = []

    def __len__(self) -> int:
        return len(self._topics)

    def wants(self, topic: UUri) -> Mapping[str, Want]:
        """Which authorities want `topic`."""
        key = uris.key(topic)
        if not self._shapes:
            return self.wants_by_name(key)
        keys = {key: None} | {uris.masked(key, shape): None for shape in self._shapes}
        return merge([self.wants_by_name(one) for one in keys])

    def wants_by_name(self, topic: Key) -> Mapping[str, Want]:
        """Which authorities have subscribed to exactly `topic`, which may be a pattern."""
        found = self._topics.get(topic)
        return _wants_of(found) if found is not None else NOBODY

    def names(self, topic: UUri) -> bool:
        """True if there is a subscription to exactly `topic`."""
        return uris.key(topic) in self._topics

    def topics(self) -> list[UUri]:
        return [entry.uri for entry in self._topics.values()]

    def subscriptions(self) -> Iterator[Subscription]:
        """All subscriptions; pending ones count as subscribed. Changes during the iteration may be missed."""
        for entry in list(self._topics.values()):
            for key, want in list(entry.subscribers.items()):
                yield Subscription(entry.uri, to_uri(key), Status.SUBSCRIBED, None, want.sample_period_ms)

    def one_of_each_authority(self) -> Iterator[Subscription]:
        """What forwarding needs: for each topic one subscriber of each authority, with the smallest sample period of
        that authority. Changes during the iteration may be missed."""
        for entry in list(self._topics.values()):
            named = {key[0]: key for key in reversed(entry.subscribers)}  # the first subscriber of each authority
            for authority, want in list(_wants_of(entry).items()):
                yield Subscription(entry.uri, to_uri(named[authority]), Status.SUBSCRIBED, None, want.sample_period_ms)

    def put(self, subscription: Subscription) -> bool:
        """Add, update or remove one subscription. True if that changed anything."""
        topic_key, subscriber = uris.key(subscription.topic), uris.key(subscription.subscriber)
        entry = self._topics.get(topic_key)
        if subscription.status in WANTING:
            known = entry.subscribers.get(subscriber) if entry is not None else None
            if known is not None and known.sample_period_ms == subscription.sample_period_ms:
                return False
            if known is None and self.count >= self._most:
                self.left_out += 1
                return False
            if entry is None:
                entry = self._topics[topic_key] = _Topic(subscription.topic)
                if (shape := uris.shape(topic_key)) != uris.EXACT:
                    self._shapes[shape] += 1
            self.count += known is None
            since = self._since(subscription.topic) if known is None else known.since
            entry.subscribers[subscriber] = Want(subscription.sample_period_ms, since)
        else:
            if entry is None or subscriber not in entry.subscribers:
                return False
            del entry.subscribers[subscriber]
            self.count -= 1
            if not entry.subscribers:
                del self._topics[topic_key]
                if (shape := uris.shape(topic_key)) != uris.EXACT:
                    self._shapes -= Counter([shape])
        entry.wants = None
        return True

    def replace(self, subscriptions: Iterable[Subscription], only: UUri | None = None) -> frozenset[Key]:
        """Replace everything (or everything about topic `only`) by `subscriptions`. Returns the changed topics."""
        listed = {(uris.key(one.topic), uris.key(one.subscriber)): one for one in subscriptions}
        topics = self._topics if only is None else {uris.key(only)} & self._topics.keys()
        removed = [
            Subscription(self._topics[topic].uri, to_uri(subscriber), Status.UNSUBSCRIBED)
            for topic in topics
            for subscriber in self._topics[topic].subscribers
            if (topic, subscriber) not in listed
        ]
        return self.put_all((*removed, *listed.values()))

    def put_all(self, subscriptions: Iterable[Subscription]) -> frozenset[Key]:
        """Put each of them. Returns the changed topics."""
        return frozenset([uris.key(one.topic) for one in subscriptions if self.put(one)])

    def on_change(self, callback: Changed) -> None:
        self._callbacks.append(callback)

    def changed(self, topics: Topics) -> None:
        for callback in self._callbacks:
            callback(topics)


def is_wide(key: Key) -> bool:
    """True if `key` has wildcards that the specification forbids in subscriptions."""
    authority, ue_id, _, resource = key
    return (
        authority == uris.WILDCARD_AUTHORITY
        or ue_id & 0xFFFF == uris.WILDCARD_ENTITY_TYPE
        or resource == uris.WILDCARD_RESOURCE
    )


def _wants_of(entry: _Topic) -> Mapping[str, Want]:
    if entry.wants is None:
        wants: dict[str, Want] = {}
        for (authority, *_), want in entry.subscribers.items():
            wants[authority] = _both(wants[authority], want) if authority in wants else want
        entry.wants = wants
    return entry.wants


def _both(one: Want, other: Want) -> Want:
    """The interest that satisfies both subscribers of an authority."""
    mine, others = one.sample_period_ms, other.sample_period_ms
    period_ms = None if mine is None or others is None else min(mine, others)  # None is every message
    return Want(period_ms, min(one.since, other.since))


def merge(parts: Sequence[Mapping[str, Want]]) -> Mapping[str, Want]:
    """The union of `parts`, with the smallest sample periods and the earliest positions."""
    filled = [part for part in parts if part]
    if len(filled) <= 1:
        return filled[0] if filled else NOBODY
    merged = dict(filled[0])
    for part in filled[1:]:
        for authority, want in part.items():
            known = merged.get(authority)
            merged[authority] = want if known is None else _both(known, want)
    return merged


class InterestSource(InterestTable):
    """One source of subscriptions: a service or a file.

    `scope`: the authority whose clients and topics this source knows; the wildcard: all. `positions()`: the current
    end of each log. A subscription in the first answer after a start may be older than records in the logs, so it
    counts from each peer's cursor; a later one counts from the end of the logs at that time.
    """

    can_list = True  # False: it knows only topics that it was asked about
    healthy = True  # False while its data may be stale
    complete = False  # True from the first complete answer after a start

    def __init__(self, name: str, scope: str | None = None, subscriptions_max: int = SUBSCRIPTIONS_MAX) -> None:
        super().__init__(lambda topic: self.positions() if self.decided(topic) else FROM_THE_CURSOR, subscriptions_max)
        self.name, self.scope = name, scope if scope is not None else name
        self.also: Collection[str] = ()  # other authorities, or families of them, whose topics it knows
        self.positions: Callable[[], LogPositions] = tuple
        self._meanwhile: list[Subscription] | None = None  # changes during a fetch

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name}, topics={len(self)}, healthy={self.healthy})"

    async def load(self) -> None:
        """Read the data on disk. Called before `start`, or by it."""

    async def start(self) -> None:
        """Start to keep the table current. Returns as `answered`; a failure of a service is retried, not raised."""

    async def answered(self) -> None:
        """Wait until the first fetch after `start` has succeeded or failed. Returns at once while the network to the
        service is away."""

    async def stop(self) -> None:
        """End what `start` began."""

    async def refresh(self) -> None:
        """Fetch everything now."""

    def decided(self, topic: UUri) -> bool:
        """False until the first complete answer after a start, or (if the source can't list) until the first answer
        about `topic`."""
        return self.complete

    async def ask(self, topic: UUri) -> None:
        """Fetch the subscribers of `topic` and keep them current. A source that can list does nothing. Never raises
        UStatusError."""

    async def _take_all(self, fetch: Callable[[], Awaitable[Iterable[Subscription]]]) -> None:
        """Replace everything by the result of `fetch`, then apply the changes that arrived during the fetch."""
        try:
            meanwhile: list[Subscription] | None = None
            while meanwhile is None or len(meanwhile) >= CHANGES_KEPT_MAX:
                self._meanwhile = meanwhile = []
                subscriptions = await fetch()
        finally:
            self._meanwhile = None
        changed = self.replace(subscriptions) | self.put_all(meanwhile)
        if not self.complete:
            self.complete = True
            self.changed(None)  # no topic is undecided any more
        elif changed:
            self.changed(changed)

    def _take(self, changes: Iterable[Subscription]) -> None:
        changes = list(changes)
        if self._meanwhile is not None:
            self._meanwhile += changes[: CHANGES_KEPT_MAX - len(self._meanwhile)]
        if changed := self.put_all(changes):
            self.changed(changed)
