"""Which authorities want which topics: a streamer looks this up before it forwards. Pure.

a source (sources.py): put(subscription), replace(all) --> topics --> wants(topic) -> {authority: Want}
                            since: the log positions after which a new subscription counts
several sources -> Interest: wants(topic) -> {authority: Want}, version

A pending subscription counts like a confirmed one: the streamer must be ready before the first message. Until the first
complete answer of a source every topic is undecided: more authorities may want it.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from types import MappingProxyType
from typing import Final

from uprotocol import callbacks
from uprotocol import uri as uris
from uprotocol.callbacks import Remove
from uprotocol.core.usubscription.wire import WANTING, Status, Subscription, to_uri
from uprotocol.uri import Key
from uprotocol.v1.uri_pb2 import UUri

LogPositions = tuple[int, ...]
"""The last position in each log, in the order of the logs. Later positions are greater; () is before all others."""

Topics = frozenset[Key] | None
"""The topics, or patterns of topics, whose interest has changed. None: any of them may have changed."""
Changed = Callable[[Topics], None]

FROM_THE_CURSOR: Final[LogPositions] = ()
TOPICS_ASKED_MAX: Final = 100_000  # topics asked of a service that can't list; each costs a registration there
# topics of one authority, so that one that invents topics blocks only its own
AUTHORITY_TOPICS_ASKED_MAX: Final = TOPICS_ASKED_MAX // 8
ASKS_AT_ONCE: Final = 32  # calls in flight to services that can't list
# after that many answers topics that found no capacity are reported as changed, so that they are asked again
ANSWERS_UNTIL_RETRY: Final = 256
# entries of the journal of changed topics, some 150 bytes each: more than change between two calls of `changed_since`
JOURNAL_TOPICS_MAX: Final = 4_096
CHANGES_KEPT_MAX: Final = 100_000  # changes that may arrive during one fetch; with more the fetch starts again
SUBSCRIPTIONS_MAX: Final = 5_000_000  # the same as in our own service


@dataclass(frozen=True, slots=True)
class Want:
    """The interest of one authority in one topic. `sample_period_ms` None: every message.

    `since`: it counts for records after these positions; FROM_THE_CURSOR: for all records after the peer's cursor.
    """

    sample_period_ms: int | None = None
    since: LogPositions = FROM_THE_CURSOR


NO_WANTS: Final[Mapping[str, Want]] = MappingProxyType({})


@dataclass(slots=True, eq=False)
class _Topic:
    uri: UUri
    subscribers: dict[Key, Want] = field(default_factory=dict)
    wants: Mapping[str, Want] | None = None  # by authority; None: has to be computed


class InterestSource:
    """One source of subscriptions, a service or a file, as a table: topic -> subscribers -> authorities. A lookup costs
    some dictionary accesses, independent of the number of topics with wildcards.

    `scope`: the authority whose clients and topics this source knows; the wildcard: all. `positions()`: the current
    end of each log. A subscription in the first answer after a start may be older than records in the logs, so it
    counts from each peer's cursor; a later one counts from the end of the logs at that time.
    """

    can_list = True  # False: it knows only topics that it was asked about
    healthy = True  # False while its data may be stale
    is_ours = False  # True: no other gateway serves its subscriptions
    complete = False  # True from the first complete answer after a start

    def __init__(self, name: str, scope: str | None = None, subscriptions_max: int = SUBSCRIPTIONS_MAX) -> None:
        self.name, self.scope, self._most = name, scope if scope is not None else name, subscriptions_max
        self.also: Collection[str] = ()  # other authorities, or families of them, whose topics it knows
        self.positions: Callable[[], LogPositions] = tuple
        self._meanwhile: list[Subscription] | None = None  # changes during a fetch
        self.count = 0  # subscriptions
        self._topics: dict[Key, _Topic] = {}
        # topics by their wildcards: version 4 allows wildcard instances and versions, a static file also others
        self._shapes: Counter[uris.Shape] = Counter()
        self._callbacks: list[Changed] = []

    def __len__(self) -> int:
        return len(self._topics)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name}, topics={len(self)}, healthy={self.healthy})"

    def wants(self, topic: UUri) -> Mapping[str, Want]:
        key = uris.key(topic)
        if not self._shapes:
            return self.wants_by_name(key)
        keys = {key: None} | {uris.masked(key, shape): None for shape in self._shapes}
        return merge([self.wants_by_name(one) for one in keys])

    def wants_by_name(self, topic: Key) -> Mapping[str, Want]:
        """Which authorities have subscribed to exactly `topic`, which may be a pattern."""
        entry = self._topics.get(topic)
        if entry is None:
            return NO_WANTS
        if entry.wants is None:
            entry.wants = wants = dict[str, Want]()
            for (authority, *_), want in entry.subscribers.items():
                wants[authority] = _both(wants[authority], want) if authority in wants else want
        return entry.wants

    def subscriber(self, topic: Key, authority: str) -> UUri | None:
        """Returns the first subscriber of `authority` to exactly `topic`."""
        entry = self._topics.get(topic)
        keys = (key for key in entry.subscribers if key[0] == authority) if entry is not None else ()
        first = next(iter(keys), None)
        return None if first is None else to_uri(first)

    def topics(self) -> list[UUri]:
        return [entry.uri for entry in self._topics.values()]

    def subscriptions(self) -> Iterator[Subscription]:
        """All subscriptions; pending ones count as subscribed. Changes during the iteration may be missed."""
        for entry in list(self._topics.values()):
            for key, want in list(entry.subscribers.items()):
                yield Subscription(entry.uri, to_uri(key), Status.SUBSCRIBED, None, want.sample_period_ms)

    def page(self, topics: int, subscribers: int, count: int) -> tuple[list[Subscription], int, int]:
        """Returns at most `count` subscriptions behind so many topics and, of the next one, so many subscribers; and
        where the next page begins. None at the end. Changes between two pages may repeat or leave out some."""
        found: list[Subscription] = []
        for entry in islice(self._topics.values(), topics, None):
            for key, want in islice(entry.subscribers.items(), subscribers, subscribers + count - len(found)):
                period = want.sample_period_ms
                found.append(Subscription(entry.uri, to_uri(key), Status.SUBSCRIBED, None, period))
                subscribers += 1
            if len(found) == count:
                break
            topics, subscribers = topics + 1, 0
        return found, topics, subscribers

    def one_of_each_authority(self) -> Iterator[Subscription]:
        """What forwarding needs: for each topic one subscriber of each authority, with the smallest sample period of
        that authority. Changes during the iteration may be missed."""
        for topic, entry in list(self._topics.items()):
            named = {key[0]: key for key in reversed(entry.subscribers)}  # the first subscriber of each authority
            for authority, want in list(self.wants_by_name(topic).items()):
                yield Subscription(entry.uri, to_uri(named[authority]), Status.SUBSCRIBED, None, want.sample_period_ms)

    def put(self, *subscriptions: Subscription) -> frozenset[Key]:
        """Add, update or remove them. Returns the topics for which that changed anything."""
        changed: set[Key] = set()
        for subscription in subscriptions:
            topic, subscriber = uris.key(subscription.topic), uris.key(subscription.subscriber)
            entry = self._topics.get(topic)
            known = entry.subscribers.get(subscriber) if entry is not None else None
            if subscription.status in WANTING:
                if known is not None and known.sample_period_ms == subscription.sample_period_ms:
                    continue
                if known is None and self.count >= self._most:
                    continue
                if entry is None:
                    entry = self._topics[topic] = _Topic(subscription.topic)
                    if (shape := uris.shape(topic)) != uris.EXACT:
                        self._shapes[shape] += 1
                self.count += known is None
                if known is not None:
                    since = known.since
                else:
                    since = self.positions() if self.decided(subscription.topic) else FROM_THE_CURSOR
                entry.subscribers[subscriber] = Want(subscription.sample_period_ms, since)
            else:
                if entry is None or known is None:
                    continue
                del entry.subscribers[subscriber]
                self.count -= 1
                if not entry.subscribers:
                    del self._topics[topic]
                    if (shape := uris.shape(topic)) != uris.EXACT:
                        self._shapes -= Counter([shape])
            entry.wants = None
            changed.add(topic)
        return frozenset(changed)

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
        return self.put(*removed, *listed.values())

    def on_change(self, callback: Changed) -> None:
        self._callbacks.append(callback)

    def changed(self, topics: Topics) -> None:
        for callback in self._callbacks:
            callback(topics)

    async def load(self) -> None:
        """Read the data on disk. Called before `start`, or by it."""

    async def start(self) -> None:
        """Start to keep the table current. Returns as `answered`; a failure of a service is retried, not raised."""
        await self.load()

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
        changed = self.replace(subscriptions) | self.put(*meanwhile)
        if not self.complete:
            self.complete = True
            self.changed(None)  # no topic is undecided any more
        elif changed:
            self.changed(changed)

    def _take(self, changes: Iterable[Subscription]) -> None:
        changes = list(changes)
        if self._meanwhile is not None:
            self._meanwhile += changes[: CHANGES_KEPT_MAX - len(self._meanwhile)]
        if changed := self.put(*changes):
            self.changed(changed)


def is_wide(key: Key) -> bool:
    """True if `key` has wildcards that the specification forbids in subscriptions."""
    authority, ue_id, _, resource = key
    return (
        authority == uris.WILDCARD_AUTHORITY
        or ue_id & 0xFFFF == uris.WILDCARD_ENTITY_TYPE
        or resource == uris.WILDCARD_RESOURCE
    )


def _both(one: Want, other: Want) -> Want:
    """The interest that satisfies both subscribers of an authority."""
    mine, others = one.sample_period_ms, other.sample_period_ms
    period_ms = None if mine is None or others is None else min(mine, others)  # None is every message
    return Want(period_ms, min(one.since, other.since))


def merge(parts: Sequence[Mapping[str, Want]]) -> Mapping[str, Want]:
    """The union of `parts`, with the smallest sample periods and the earliest positions."""
    filled = [part for part in parts if part]
    if len(filled) <= 1:
        return filled[0] if filled else NO_WANTS
    merged = dict(filled[0])
    for part in filled[1:]:
        for authority, want in part.items():
            known = merged.get(authority)
            merged[authority] = want if known is None else _both(known, want)
    return merged


class Interest:
    """The union of several sources. `version` increases with every change; `changed_since` returns the changed topics,
    so that results for other topics can be kept."""

    def __init__(self, sources: Iterable[InterestSource], positions: Callable[[], LogPositions] = tuple) -> None:
        """`positions()`: the current end of each log."""
        self.sources: tuple[InterestSource, ...] = ()
        self._positions = positions
        self.version = 0
        self._journal: deque[tuple[int, Key]] = deque()  # version, and a topic that changed with it
        self._journal_after = 0  # the journal has all changes after this version
        self._callbacks: list[Changed] = []
        self._to_ask: dict[str, dict[Key, UUri]] = {}  # by authority; authorities take turns
        self._to_ask_count = 0
        self._asking: dict[Key, asyncio.Task[None]] = {}
        self._retry_in: int | None = None  # answers, until topics that were not asked are reported as changed
        for source in sources:
            self._add(source)

    def _add(self, source: InterestSource) -> None:
        self.sources = (*self.sources, source)
        source.positions = self._positions
        source.on_change(self._changed)

    async def add_source(self, source: InterestSource) -> None:
        """Learn what it has on disk, and add it; its `start` is for the caller. Raises UStatusError as `load`."""
        await source.load()
        self._add(source)
        self._changed(None)

    async def remove_source(self, source: InterestSource) -> None:
        """What it alone knows is not wanted any more."""
        self.sources = tuple(one for one in self.sources if one is not source)
        self._changed(None)
        await source.stop()

    async def load(self) -> None:
        """Read the data on disk. Raises UStatusError for a file that has to be repaired."""
        await asyncio.gather(*(source.load() for source in self.sources))

    async def start(self) -> None:
        await asyncio.gather(*(source.start() for source in self.sources))

    async def answered(self) -> None:
        """Wait until each source whose network is available has answered or failed once."""
        await asyncio.gather(*(source.answered() for source in self.sources))

    async def stop(self) -> None:
        self._to_ask.clear()
        self._to_ask_count = 0
        for task in list(self._asking.values()):
            task.cancel()
        await asyncio.gather(*(source.stop() for source in self.sources))

    async def refresh(self) -> None:
        await asyncio.gather(*(source.refresh() for source in self.sources))

    async def ask(self, topic: UUri) -> None:
        """Ask the sources that can't list about `topic`, unless they were asked before."""
        await asyncio.gather(*(source.ask(topic) for source in self.sources if not source.can_list))

    def undecided(self, topic: UUri) -> list[str]:
        """The scopes of the sources that have not answered yet whether somebody wants `topic`. Sources that can't list
        are asked about it. An answer is reported by `on_change`."""
        undecided = [source for source in self.sources if not source.decided(topic)]
        if any(not source.can_list for source in undecided):
            self._ask_soon(topic)
        authority = topic.authority_name
        return [authority if uris.is_one_of(authority, source.also) else source.scope for source in undecided]

    def _ask_soon(self, topic: UUri) -> None:
        key, waiting = uris.key(topic), self._to_ask.setdefault(topic.authority_name, {})
        if key in self._asking or key in waiting:
            return
        if self._to_ask_count < TOPICS_ASKED_MAX and len(waiting) < AUTHORITY_TOPICS_ASKED_MAX:
            waiting[key] = topic
            self._to_ask_count += 1
            self._ask_next()
        elif self._retry_in is None:
            self._retry_in = ANSWERS_UNTIL_RETRY

    def _ask_next(self, answered: Key | None = None) -> None:
        if answered is not None:
            del self._asking[answered]
            if self._retry_in is not None:
                self._retry_in -= 1
                if self._retry_in <= 0 or not self._to_ask_count:
                    self._retry_in = None
                    self._changed(None)
        while self._to_ask and len(self._asking) < ASKS_AT_ONCE:
            authority, waiting = next(iter(self._to_ask.items()))
            del self._to_ask[authority]
            if not waiting:
                continue
            key = next(iter(waiting))
            topic = waiting.pop(key)
            self._to_ask_count -= 1
            if waiting:
                self._to_ask[authority] = waiting  # behind the others
            self._asking[key] = task = asyncio.ensure_future(self.ask(topic))
            task.add_done_callback(lambda _, key=key: self._ask_next(key))  # type: ignore[misc]

    def wants(self, topic: UUri) -> Mapping[str, Want]:
        """Which authorities want `topic`. Only a lookup; the result is valid until the topic changes."""
        return merge([source.wants(topic) for source in self.sources])

    def wants_by_name(self, topic: UUri) -> Mapping[str, Want]:
        """Which authorities have subscribed to exactly `topic`, which may be a pattern."""
        key = uris.key(topic)
        return merge([source.wants_by_name(key) for source in self.sources])

    def subscriber(self, topic: Key, authority: str) -> UUri | None:
        """Returns one subscriber of `authority` to exactly `topic`."""
        return next(filter(None, (source.subscriber(topic, authority) for source in self.sources)), None)

    def is_ours(self, topic: Key, authority: str) -> bool:
        """True if a source whose subscriptions no other gateway serves knows a subscription of `authority`."""
        return any(source.is_ours and authority in source.wants_by_name(topic) for source in self.sources)

    def topics(self) -> list[UUri]:
        """Every topic and pattern that somebody wants, once each."""
        return list({uris.key(topic): topic for source in self.sources for topic in source.topics()}.values())

    @property
    def can_list(self) -> bool:
        return all(source.can_list for source in self.sources)

    @property
    def complete(self) -> bool:
        """True when every source that can list has given its first complete answer."""
        return all(source.complete for source in self.sources if source.can_list)

    @property
    def unhealthy(self) -> list[str]:
        """Names of the sources whose data may be stale."""
        return [source.name for source in self.sources if not source.healthy]

    def on_change(self, callback: Changed) -> Remove:
        """Calls `callback` with the topics of each change. Returns a function that removes it."""
        return callbacks.add(self._callbacks, callback)

    def changed_since(self, version: int) -> Topics:
        """The topics and patterns that have changed after `version`. None: any may have changed."""
        if version < self._journal_after:
            return None
        changed = set[Key]()
        for changed_with, topic in reversed(self._journal):
            if changed_with <= version:
                break
            changed.add(topic)
        return frozenset(changed)

    def _changed(self, topics: Topics) -> None:
        self.version += 1
        if topics is None or len(topics) > JOURNAL_TOPICS_MAX:
            self._journal.clear()
            self._journal_after = self.version
        else:
            self._journal.extend((self.version, topic) for topic in topics)
            while len(self._journal) > JOURNAL_TOPICS_MAX:
                self._journal_after, _ = self._journal.popleft()
        for callback in self._callbacks:
            callback(topics)
