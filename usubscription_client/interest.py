"""Which authorities want which topics: a streamer looks this up before it forwards.

uSubscription of A --fetch, notifications-> ServiceInterest ---+
uSubscription in this process --hook------> EmbeddedInterest --+--> Interest: wants(topic) -> {authority: Want}, version
the file of the Rust streamer ------------> StaticFile --------+

A pending subscription counts like a confirmed one: the streamer must be ready before the first message. While a service
is away, its last known interest stays, and `healthy` is False. Until its first complete answer every topic is
undecided: more authorities may want it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Final, Protocol

import structlog

from storage.runtime import REAL, Runtime
from uprotocol import callbacks
from uprotocol import uri as uris
from uprotocol.callbacks import Remove
from uprotocol.core.usubscription.asking import end
from uprotocol.core.usubscription.wire import Entry, Status, Subscription, to_uri
from uprotocol.pacing import Backoff
from uprotocol.status import UStatusError
from uprotocol.transport import LocalUriProvider, UTransport
from uprotocol.uri import Key
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.uri_pb2 import UUri
from usubscription_client.client import CALL_MS, PROBE_MS, USubscriptionClient
from usubscription_client.saved_interest import SavedInterest
from usubscription_client.table import (
    SUBSCRIPTIONS_MAX,
    Changed,
    InterestSource,
    LogPositions,
    Topics,
    Want,
    is_wide,
    merge,
)

# between fetches while the service answers: they only correct what lost notifications left out
REFRESH_MS: Final = 60_000
RETRY_FIRST_MS: Final = 500  # least time between two fetches; after a failure twice as long, which doubles up to ...
RETRY_MAX_MS: Final = 15_000  # ... so that a service that is back is used soon
FORGET_CANDIDATES_MAX: Final = 64  # of the longest known topics, to find one that nobody wants
TOPICS_ASKED_MAX: Final = 100_000  # topics asked of a service that can't list; each costs a registration there
# topics of one authority, so that one that invents topics blocks only its own
AUTHORITY_TOPICS_ASKED_MAX: Final = TOPICS_ASKED_MAX // 8
ASKS_AT_ONCE: Final = 32  # calls in flight to services that can't list
# after that many answers topics that found no capacity are reported as changed, so that they are asked again
ANSWERS_UNTIL_RETRY: Final = 256
# entries of the journal of changed topics, some 150 bytes each: more than change between two calls of `changed_since`
JOURNAL_TOPICS_MAX: Final = 4_096
# the service stores the same itself: this copy is only for the case that its file is damaged
EMBEDDED_SAVE_DELAY_S: Final = 60.0

log = structlog.get_logger()


class ServiceInterest(InterestSource):
    """The subscriptions of the uSubscription service of `authority`, fetched over `transport`."""

    def __init__(
        self,
        transport: UTransport,
        local: LocalUriProvider,
        authority: str,
        *,
        refresh_ms: int = REFRESH_MS,
        call_ms: int = CALL_MS,
        saved: Path | None = None,
        runtime: Runtime = REAL,
        lives_there: Callable[[str], bool] = lambda authority: True,
        subscriptions_max: int = SUBSCRIPTIONS_MAX,
    ) -> None:
        """`saved`: a file that keeps the interest over a restart, in case the service is away then.

        `lives_there(authority)`: the authority is in the service's own network. A subscription is ignored if neither
        its topic nor its subscriber is.
        """
        super().__init__(authority, subscriptions_max=subscriptions_max)
        self._lives_there = lives_there
        self.ignored = 0  # subscriptions
        self._saved = SavedInterest(saved, self.subscriptions, runtime.disk) if saved is not None else None
        probe_ms = min(call_ms, PROBE_MS)
        self._client = USubscriptionClient(
            transport, local, authority, call_ms=call_ms, probe_ms=probe_ms, listed_max=subscriptions_max
        )
        self._client.on_change(self._on_change)
        self._refresh_ms, self._random = refresh_ms, runtime.rng.random
        self.healthy, self._why = False, ""  # the last error
        self._asked: dict[str, dict[Key, UUri]] = {}  # by authority; the longest known topics first
        self._asked_count = 0
        self._unanswered: set[Key] = set()
        self._answered: set[Key] = set()
        self._fetching = asyncio.Lock()
        self._was_full = False  # when a topic was to be asked
        self._news = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._is_loaded = False
        self._first_answer = asyncio.Event()  # or the first failure
        self._transport = transport
        transport.on_connection(self._connection_changed)

    @property
    def can_list(self) -> bool:  # type: ignore[override]
        return self._client.version != 3

    async def load(self) -> None:
        """Read the interest that was saved before the restart; it is used until the service answers."""
        if self._saved is None or self._is_loaded:
            return
        self._is_loaded = True
        known = self._saved.load()
        if changed := self.replace(known):
            self.changed(changed)
        for subscription in known:
            self._note_asked(subscription.topic)
        self.on_change(self._saved.changed)

    async def start(self) -> None:
        if self._task is not None:
            return
        await self.load()
        self._task = asyncio.ensure_future(self._run())
        await self.answered()

    async def answered(self) -> None:
        if self._transport.connected and self._task is not None:
            await self._first_answer.wait()

    async def stop(self) -> None:
        task, self._task = self._task, None
        await end(task)
        await self._client.close()
        if self._saved is not None:
            await self._saved.close()

    async def ask(self, topic: UUri) -> None:
        """FetchSubscribers and RegisterForNotifications, once per topic; the next refresh repeats failures."""
        authority = topic.authority_name
        asked = self._asked.get(authority, {})
        if self.can_list or uris.key(topic) in asked:
            return
        freed: UUri | None = None
        if self._asked_count >= TOPICS_ASKED_MAX or len(asked) >= AUTHORITY_TOPICS_ASKED_MAX:
            freed = self._forget_one(authority if asked else max(self._asked, key=lambda one: len(self._asked[one])))
            if freed is None:
                limits = {"authority": self.name, "of": authority, "topics": len(asked)}
                log.warning("the limit of topics to ask of this service is reached", **limits)
                self._was_full = True
                return
        self._note_asked(topic)
        if not await self._ask(topic):
            self._news.set()
        if freed is not None:
            self.changed(frozenset([uris.key(freed)]))  # it is undecided again
            with contextlib.suppress(UStatusError):  # then more notifications come, which is harmless
                await self._client.unregister_for_notifications(freed)

    def _note_asked(self, topic: UUri) -> None:
        asked = self._asked.setdefault(topic.authority_name, {})
        self._asked_count += uris.key(topic) not in asked
        asked[uris.key(topic)] = topic

    def _forget_one(self, authority: str) -> UUri | None:
        """Forget a topic of `authority` that nobody wants; it is asked again if it is published again. Returns None if
        all are wanted."""
        asked = self._asked[authority]
        for key in list(islice(asked, FORGET_CANDIDATES_MAX)):
            topic = asked.pop(key)
            if not self.wants(topic):
                self._asked_count -= 1
                self._answered.discard(key)
                self._unanswered.discard(key)
                return topic
            asked[key] = topic  # moved to the end
        return None

    def decided(self, topic: UUri) -> bool:
        return self.complete if self.can_list else uris.key(topic) in self._answered

    async def _run(self) -> None:
        backoff = Backoff(2 * RETRY_FIRST_MS, RETRY_MAX_MS)
        loop = asyncio.get_running_loop()
        while True:
            self._news.clear()
            if not self._transport.connected:  # a call would wait for the network, and delay the first useful one
                await self._news.wait()
                continue
            # a limit also for notifications, which cost their sender nothing
            earliest = loop.time() + RETRY_FIRST_MS / 1000
            await self.refresh()
            self._first_answer.set()
            if self.healthy:
                backoff.reset()
            if self._was_full:
                self._was_full = False
                self.changed(None)  # so that the topics are asked again
            wait_ms = (self._refresh_ms if self.healthy else backoff.next_ms()) * (0.75 + self._random() / 2)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_ms / 1000):
                    await self._news.wait()
            await asyncio.sleep(max(earliest - loop.time(), 0))

    async def refresh(self) -> None:
        async with self._fetching:
            try:
                await self._client.open()
                await self._fetch()
            except UStatusError as error:
                if self.healthy or str(error) != self._why:
                    what = "uSubscription does not answer: the last known interest is used"
                    log.warning(what, authority=self.name, why=str(error))
                self.healthy, self._why = False, str(error)
            except Exception:
                log.exception("fetching from uSubscription failed", authority=self.name)
                self.healthy = False
            else:
                self.healthy = not self._unanswered

    async def _fetch(self) -> None:
        could_list = self.can_list
        version = await self._client.find_version()
        if self.can_list != could_list:
            self.changed(None)  # which topics are undecided depends on `can_list`
        if version == 4:
            await self._take_all(self._fetch_all)
            return
        topics = [topic for asked in self._asked.values() for topic in asked.values()]
        for start in range(0, len(topics), ASKS_AT_ONCE):
            answered = await asyncio.gather(*(self._ask(topic) for topic in topics[start : start + ASKS_AT_ONCE]))
            if not any(answered):
                raise UStatusError(UCode.UNAVAILABLE, "the uSubscription service has stopped answering")

    async def _fetch_all(self) -> Iterable[Subscription]:
        """Register first, then fetch."""
        await self._client.register_for_notifications()
        return filter(self._is_its_own, await self._client.fetch_subscriptions())

    def _is_its_own(self, subscription: Subscription) -> bool:
        """False if the service has no authority over this subscription."""
        topic, subscriber = subscription.topic, subscription.subscriber
        is_topic = not is_wide(uris.key(topic)) and uris.is_topic(topic)
        if is_topic and (self._lives_there(topic.authority_name) or self._lives_there(subscriber.authority_name)):
            return True
        if not self.ignored:
            what = "a uSubscription reports a subscription outside of its network, which is ignored"
            addresses = {"topic": uris.format(topic), "subscriber": uris.format(subscriber)}
            log.warning(what, authority=self.name, **addresses)
        self.ignored += 1
        return False

    async def _ask(self, topic: UUri) -> bool:
        key = uris.key(topic)
        try:
            await self._client.register_for_notifications(topic)
            subscribers = await self._client.fetch_subscribers(topic)
        except UStatusError as error:
            log.warning("the subscribers of a topic could not be fetched", topic=uris.format(topic), why=str(error))
            self._unanswered.add(key)
            self.healthy = False
            return False
        self._unanswered.discard(key)
        known = [Subscription(topic, subscriber, Status.SUBSCRIBED) for subscriber in subscribers]
        if self.replace(filter(self._is_its_own, known), only=topic) or key not in self._answered:
            self._answered.add(key)
            self.changed(frozenset([key]))
        return True

    def _on_change(self, change: Subscription) -> None:
        if not change.topic.resource_id:
            self._news.set()  # after a Reset our registration is lost, too
        elif self._is_its_own(change):
            self._take([change])

    def _connection_changed(self, connected: bool) -> None:
        if connected:
            self._news.set()
        elif self._task is not None:
            self.healthy = False


class EmbeddedService(Protocol):
    """The part of usubscription.service.USubscriptionService that EmbeddedInterest uses."""

    authority: str

    @property
    def also(self) -> Collection[str]: ...

    async def subscriptions(self) -> Sequence[Entry]: ...

    def on_change(self, hook: Callable[[Sequence[Entry]], Awaitable[None] | None]) -> None:
        """Call `hook` after each commit, before the answers are sent."""


class EmbeddedInterest(InterestSource):
    """The subscriptions of the service in this process: current before a subscriber gets its answer.

    `saved`: a file that keeps the interest over a restart, in case the service's own file is damaged then.
    """

    def __init__(self, service: EmbeddedService, saved: Path | None = None, runtime: Runtime = REAL) -> None:
        super().__init__(service.authority)
        self._service, self.also = service, service.also
        self._saved: SavedInterest | None = None
        if saved is not None:
            self._saved = SavedInterest(saved, self.one_of_each_authority, runtime.disk, EMBEDDED_SAVE_DELAY_S)
        self.healthy = False
        self._is_loaded = False
        service.on_change(self._changed)

    async def load(self) -> None:
        if not self._is_loaded:
            self._is_loaded = True
            await self.refresh()

    async def start(self) -> None:
        await self.load()

    async def stop(self) -> None:
        """The service itself is stopped by its owner."""
        if self._saved is not None:
            await self._saved.close()

    async def refresh(self) -> None:
        """Read everything. If the service can't read its file, the last known interest is used."""
        try:
            await self._take_all(self._read)
        except UStatusError as error:
            what = "the subscriptions can't be read: the last known interest is used"
            log.error(what, authority=self.name, why=str(error))
            self.healthy = False
            if not self.complete and self._saved is not None and (changed := self.replace(self._saved.load())):
                self.changed(changed)

    async def _read(self) -> Iterable[Subscription]:
        entries = await self._service.subscriptions()
        self.healthy = True
        if self._saved is not None and not self.complete:
            self.on_change(self._saved.changed)
        return map(_subscription, entries)

    def _changed(self, changes: Sequence[Entry]) -> None:
        self._take(_subscription(change) for change in changes if change.topic[3])


def _subscription(entry: Entry) -> Subscription:
    topic, subscriber = to_uri(entry.topic), to_uri(entry.subscriber)
    return Subscription(topic, subscriber, entry.status, entry.expires_ms, entry.sample_period_ms)


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

    def __repr__(self) -> str:
        return f"Interest({', '.join(map(repr, self.sources))}, version={self.version})"

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

    def names(self, topic: UUri) -> bool:
        """True if somebody has subscribed to exactly `topic`."""
        return any(source.names(topic) for source in self.sources)

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
    def healthy(self) -> bool:
        return not self.unhealthy

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
