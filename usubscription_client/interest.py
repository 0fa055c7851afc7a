"""Who wants what, kept fresh: what a streamer asks before it forwards.

uSubscription of A --fetch, notifications-> ServiceInterest ---+
uSubscription in this process --hook------> EmbeddedInterest --+--> Interest: wants(topic) -> {authority: Want}, version
the file of the Rust streamer ------------> StaticFile --------+

A subscription that is pending counts like one that stands: the streamer must be ready before the first message. A
service that is away does not change what is known of it; `healthy` says so. Until a service has given its first
complete answer, nobody knows who else wants a topic: it is undecided, and stays so for as long as that takes.
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
from uprotocol import uri as uris
from uprotocol.core.usubscription.asking import end
from uprotocol.core.usubscription.wire import Entry, Key, Status, Subscription, to_uri
from uprotocol.pacing import Backoff
from uprotocol.status import UStatusError
from uprotocol.transport import LocalUriProvider, UTransport
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.uri_pb2 import UUri
from usubscription_client.client import CALL_MS, PROBE_MS, USubscriptionClient
from usubscription_client.saved_interest import SavedInterest
from usubscription_client.table import (
    SUBSCRIPTIONS_MAX,
    Changed,
    InterestSource,
    Positions,
    Topics,
    Want,
    is_wide,
    merge,
)

# between fetches when all is well: notifications do the work, this only mends what they lost
REFRESH_MS: Final = 60_000
RETRY_FIRST_MS: Final = 500  # between two fetches at least; after a failed one twice as long, which doubles up to ...
RETRY_MAX_MS: Final = 15_000  # ... so that a service that returns is noticed soon
LET_GO_LOOKS_MAX: Final = 64  # of the longest known topics, to find one that nobody wants
TOPICS_ASKED_MAX: Final = 100_000  # topics asked of a service that can't list; each costs a registration there
# of one authority, so that topics which it makes up keep out its own alone
AUTHORITY_TOPICS_ASKED_MAX: Final = TOPICS_ASKED_MAX // 8
ASKS_AT_ONCE: Final = 32  # calls in flight to services that can't list
# that had to be waited for: then topics for which there was no room may be asked, so they are to be looked at again
ANSWERS_FOR_ROOM: Final = 256
# topics of which is known when they changed, some 150 bytes each: more than change between two looks of who is awake
JOURNAL_TOPICS_MAX: Final = 4_096
# what the service has on disk itself is remembered a second time for its damage only
EMBEDDED_SAVE_DELAY_S: Final = 60.0

log = structlog.get_logger()


class ServiceInterest(InterestSource):
    """What the uSubscription service of `authority` knows, asked over `transport`."""

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
        """`saved` is a file that keeps what is known over a restart, for when the service is away then.

        `lives_there(authority)`: it is one of the service's own network. Of subscriptions to others' topics by others'
        clients, it has nothing to say.
        """
        super().__init__(authority, subscriptions_max=subscriptions_max)
        self._lives_there = lives_there
        self.ignored = 0  # subscriptions of which it has nothing to say
        self._saved = SavedInterest(saved, self.subscriptions, runtime.disk) if saved is not None else None
        probe_ms = min(call_ms, PROBE_MS)
        self._client = USubscriptionClient(
            transport, local, authority, call_ms=call_ms, probe_ms=probe_ms, listed_max=subscriptions_max
        )
        self._client.on_change(self._on_change)
        self._refresh_ms, self._random = refresh_ms, runtime.rng.random
        self.healthy, self._why = False, ""  # and why it could not be asked the last time
        self._asked: dict[str, dict[Key, UUri]] = {}  # by the topics' authority; the longest known first
        self._asked_count = 0
        self._unanswered: set[Key] = set()
        self._answered: set[Key] = set()
        self._fetching = asyncio.Lock()
        self._had_no_room = False  # for a topic that was to be asked
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
        """What was known before the restart serves until the service is heard."""
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
        """FetchSubscribers and RegisterForNotifications, once per topic; a failure is repeated with the next
        refresh."""
        authority = topic.authority_name
        of_it = self._asked.get(authority, {})
        if self.can_list or uris.key(topic) in of_it:
            return
        freed: UUri | None = None
        if self._asked_count >= TOPICS_ASKED_MAX or len(of_it) >= AUTHORITY_TOPICS_ASKED_MAX:
            freed = self._let_go(authority if of_it else max(self._asked, key=lambda one: len(self._asked[one])))
            if freed is None:
                what = {"authority": self.name, "of": authority, "topics": len(of_it)}
                log.warning("no more topics can be asked of this service", **what)
                self._had_no_room = True
                return
        self._note_asked(topic)
        if not await self._ask(topic):
            self._news.set()
        if freed is not None:
            self.changed(frozenset([uris.key(freed)]))  # it is undecided again
            with contextlib.suppress(UStatusError):  # it may go on telling us
                await self._client.unregister_for_notifications(freed)

    def _note_asked(self, topic: UUri) -> None:
        of_it = self._asked.setdefault(topic.authority_name, {})
        self._asked_count += uris.key(topic) not in of_it
        of_it[uris.key(topic)] = topic

    def _let_go(self, authority: str) -> UUri | None:
        """Forget a topic of `authority` that nobody wants; who publishes it again has it asked again. None: all are
        wanted."""
        of_it = self._asked[authority]
        for key in list(islice(of_it, LET_GO_LOOKS_MAX)):
            topic = of_it.pop(key)
            if not self.wants(topic):
                self._asked_count -= 1
                self._answered.discard(key)
                self._unanswered.discard(key)
                return topic
            of_it[key] = topic  # behind the others: it is looked at last
        return None

    def decided(self, topic: UUri) -> bool:
        return self.complete if self.can_list else uris.key(topic) in self._answered

    async def _run(self) -> None:
        backoff = Backoff(2 * RETRY_FIRST_MS, RETRY_MAX_MS)
        loop = asyncio.get_running_loop()
        while True:
            self._news.clear()
            if not self._transport.connected:  # a call would only wait for the network, and be late when it is there
                await self._news.wait()
                continue
            # whatever we are told: a notification costs its sender nothing
            earliest = loop.time() + RETRY_FIRST_MS / 1000
            await self.refresh()
            self._first_answer.set()
            if self.healthy:
                backoff.reset()
            if self._had_no_room:
                self._had_no_room = False
                self.changed(None)  # whoever has such a topic asks again
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
                    what = "uSubscription can't be asked: the last known interest serves"
                    log.warning(what, authority=self.name, why=str(error))
                self.healthy, self._why = False, str(error)
            except Exception:
                log.exception("asking uSubscription failed", authority=self.name)
                self.healthy = False
            else:
                self.healthy = not self._unanswered

    async def _fetch(self) -> None:
        could_list = self.can_list
        version = await self._client.find_version()
        if self.can_list != could_list:
            self.changed(None)  # who waits for this service has to ask it by topic, or no more
        if version == 4:
            await self._take_all(self._fetch_all)
            return
        topics = [topic for of_it in self._asked.values() for topic in of_it.values()]
        for start in range(0, len(topics), ASKS_AT_ONCE):
            answered = await asyncio.gather(*(self._ask(topic) for topic in topics[start : start + ASKS_AT_ONCE]))
            if not any(answered):
                raise UStatusError(UCode.UNAVAILABLE, "it answers no more")

    async def _fetch_all(self) -> Iterable[Subscription]:
        """Register first, then fetch."""
        await self._client.register_for_notifications()
        return filter(self._may_say, await self._client.fetch_subscriptions())

    def _may_say(self, told: Subscription) -> bool:
        topic, subscriber = told.topic, told.subscriber
        is_topic = not is_wide(uris.key(topic)) and uris.is_topic(topic)
        if is_topic and (self._lives_there(topic.authority_name) or self._lives_there(subscriber.authority_name)):
            return True
        if not self.ignored:
            what = f"{uris.format(topic)} for {uris.format(subscriber)}"
            why = "a uSubscription tells of a subscription that is not of its network: passed over"
            log.warning(why, authority=self.name, what=what)
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
        if self.replace(filter(self._may_say, known), only=topic) or key not in self._answered:
            self._answered.add(key)
            self.changed(frozenset([key]))
        return True

    def _on_change(self, change: Subscription) -> None:
        if not change.topic.resource_id:
            self._news.set()  # it was reset, and with it our registration
        elif self._may_say(change):
            self._take([change])

    def _connection_changed(self, connected: bool) -> None:
        if connected:
            self._news.set()
        elif self._task is not None:
            self.healthy = False


class EmbeddedService(Protocol):
    """What EmbeddedInterest needs of a usubscription.service.USubscriptionService."""

    authority: str

    @property
    def also(self) -> Collection[str]: ...

    async def subscriptions(self) -> Sequence[Entry]: ...

    def on_change(self, hook: Callable[[Sequence[Entry]], Awaitable[None] | None]) -> None:
        """Calls `hook` after the commit and before the answers leave."""


class EmbeddedInterest(InterestSource):
    """Straight from the service in this process: fresh before a subscriber has its answer.

    `saved` is a file that keeps who wants what over a restart, for when the service's own file can't be read then.
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
        """The service has its own owner."""
        if self._saved is not None:
            await self._saved.close()

    async def refresh(self) -> None:
        """Read everything. Where the service can't read its file, what was known before serves."""
        try:
            await self._take_all(self._read)
        except UStatusError as error:
            what = "the subscriptions can't be read: the last known interest serves"
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
    """The union of several sources. `version` rises with every change of any of them; `changed_since` says what it was,
    so that whoever keeps what follows from it need not work out all of it anew."""

    def __init__(self, sources: Iterable[InterestSource], positions: Callable[[], Positions] = tuple) -> None:
        """`positions()`: where the logs are in which new subscriptions count."""
        self.sources = tuple(sources)
        self.version = 0
        self._journal: deque[tuple[int, Key]] = deque()  # version, and a topic that changed with it
        self._journal_after = 0  # all that changed after this version is in the journal
        self._callbacks: list[Changed] = []
        self._to_ask: dict[str, dict[Key, UUri]] = {}  # by the topics' authority, which take turns
        self._to_ask_count = 0
        self._asking: dict[Key, asyncio.Task[None]] = {}
        self._room_in: int | None = None  # answers, until there may be room for topics that were not asked
        for source in self.sources:
            source.positions = positions
            source.on_change(self._changed)

    def __repr__(self) -> str:
        return f"Interest({', '.join(map(repr, self.sources))}, version={self.version})"

    async def load(self) -> None:
        """Learn what is on disk. Raises UStatusError for a file that somebody has to mend."""
        await asyncio.gather(*(source.load() for source in self.sources))

    async def start(self) -> None:
        await asyncio.gather(*(source.start() for source in self.sources))

    async def answered(self) -> None:
        """Returns when each source whose network is there has answered, or has failed once."""
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
        """Ask the sources that can't list about `topic`. Costs nothing where all of them can, or have been asked."""
        await asyncio.gather(*(source.ask(topic) for source in self.sources if not source.can_list))

    def undecided(self, topic: UUri) -> list[str]:
        """The scopes of the sources that may yet name somebody who wants `topic`; `on_change` tells when one of them
        has answered.

        Sources that can't list are asked about it.
        """
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
        elif self._room_in is None:  # it is asked when it is seen again
            self._room_in = ANSWERS_FOR_ROOM

    def _ask_next(self, answered: Key | None = None) -> None:
        if answered is not None:
            del self._asking[answered]
            if self._room_in is not None:
                self._room_in -= 1
                if self._room_in <= 0 or not self._to_ask_count:
                    self._room_in = None
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
        """Which authorities want `topic`. Pure lookup: ask it once per topic, and again when that has changed."""
        return merge([source.wants(topic) for source in self.sources])

    def wants_by_name(self, topic: UUri) -> Mapping[str, Want]:
        """The same of those alone who have subscribed to just this, be it a topic or a pattern."""
        key = uris.key(topic)
        return merge([source.wants_by_name(key) for source in self.sources])

    def names(self, topic: UUri) -> bool:
        """True if somebody has subscribed to exactly `topic`, and not just to a pattern of it."""
        return any(source.names(topic) for source in self.sources)

    def topics(self) -> list[UUri]:
        """Every topic that somebody wants, patterns included, each once."""
        return list({uris.key(topic): topic for source in self.sources for topic in source.topics()}.values())

    @property
    def can_list(self) -> bool:
        return all(source.can_list for source in self.sources)

    @property
    def complete(self) -> bool:
        """Every source that can list has given its first complete answer."""
        return all(source.complete for source in self.sources if source.can_list)

    @property
    def healthy(self) -> bool:
        return not self.unhealthy

    @property
    def unhealthy(self) -> list[str]:
        """Names of the sources whose knowledge may be stale."""
        return [source.name for source in self.sources if not source.healthy]

    def on_change(self, callback: Changed) -> None:
        self._callbacks.append(callback)

    def changed_since(self, version: int) -> Topics:
        """The topics, and patterns of them, that have changed since then. None: any may have."""
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
