"""Who wants what, as the uSubscription service of another authority tells it.

register, then fetch all; changes meanwhile on top --> table          a service of version 3: topic by topic, when asked
notification of a change -------------------------------^
a file -- what was known before the restart, until the service is heard
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable
from itertools import islice
from pathlib import Path
from typing import Any, Final

import structlog

from storage.runtime import REAL, Runtime
from uprotocol import uri as uris
from uprotocol.core.usubscription.wire import Key, Status, Subscription
from uprotocol.pacing import Backoff
from uprotocol.status import UStatusError
from uprotocol.transport import LocalUriProvider, UTransport
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.uri_pb2 import UUri
from usubscription_client.client import USubscriptionClient
from usubscription_client.interest import ASKS_AT_ONCE, AUTHORITY_TOPICS_ASKED_MAX, TOPICS_ASKED_MAX
from usubscription_client.saved_interest import SavedInterest
from usubscription_client.table import SUBSCRIPTIONS_MAX, TableSource

# between fetches when all is well: notifications do the work, this only mends what they lost
REFRESH_MS: Final = 60_000
RETRY_FIRST_MS: Final = 500  # between two fetches at least; after a failed one twice as long, which doubles up to ...
RETRY_MAX_MS: Final = 15_000  # ... so that a service that returns is noticed soon
LET_GO_LOOKS_MAX: Final = 64  # of the longest known topics, to find one that nobody wants

log = structlog.get_logger()


class ServiceInterest(TableSource):
    """What the uSubscription service of `authority` knows, asked over `transport`."""

    def __init__(
        self,
        transport: UTransport,
        local: LocalUriProvider,
        authority: str,
        *,
        version: int | None = None,
        refresh_ms: int = REFRESH_MS,
        retry_first_ms: int = RETRY_FIRST_MS,
        call_ms: int | None = None,
        saved: Path | None = None,
        random: Callable[[], float] | None = None,
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
        self._saved = SavedInterest(saved, self._table.subscriptions, runtime.disk) if saved is not None else None
        settings: dict[str, Any] = {} if call_ms is None else {"call_ms": call_ms, "probe_ms": min(call_ms, 1_000)}
        settings["listed_max"] = subscriptions_max
        self._client = USubscriptionClient(transport, local, authority, version, **settings)
        self._client.on_change(self._on_change)
        self._refresh_ms, self._retry_first_ms, self._random = refresh_ms, retry_first_ms, random or runtime.rng.random
        self.healthy = False
        self._started = False
        self._asked: dict[str, dict[Key, UUri]] = {}  # by the topics' authority; the longest known first
        self._asked_count = 0
        self._unanswered: set[Key] = set()
        self._answered: set[Key] = set()
        self._fetching = asyncio.Lock()
        self._news = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        transport.on_connection(self._connection_changed)

    @property
    def can_list(self) -> bool:  # type: ignore[override]
        return self._client.version != 3

    async def start(self) -> None:
        if self._started:
            return
        self._started = True
        if self._saved is not None:
            self._recall(self._saved)
        first = asyncio.get_running_loop().create_future()
        self._task = asyncio.ensure_future(self._run(first))
        await first

    async def stop(self) -> None:
        self._started = False
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None
        await self._client.close()
        if self._saved is not None:
            await self._saved.close()

    def _recall(self, saved: SavedInterest) -> None:
        """Serve what was known before the restart, until the service is heard."""
        known = saved.load()
        if self._table.replace(known):
            self._table.changed()
        for subscription in known:
            self._note_asked(subscription.topic)
        self._table.on_change(saved.changed)

    async def refresh(self) -> None:
        await self._try()

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
                log.warning(
                    "no more topics can be asked of this service", authority=self.name, of=authority, topics=len(of_it)
                )
                return
        self._note_asked(topic)
        if not await self._ask(topic):
            self._news.set()
        if freed is not None:
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
            if not self._table.wants(topic):
                self._asked_count -= 1
                self._answered.discard(key)
                self._unanswered.discard(key)
                return topic
            of_it[key] = topic  # behind the others: it is looked at last
        return None

    def decided(self, topic: UUri) -> bool:
        return self.complete if self.can_list else uris.key(topic) in self._answered

    async def _run(self, first: asyncio.Future[None]) -> None:
        backoff = Backoff(2 * self._retry_first_ms, RETRY_MAX_MS)
        loop = asyncio.get_running_loop()
        while True:
            self._news.clear()
            # whatever we are told: a notification costs its sender nothing
            earliest = loop.time() + self._retry_first_ms / 1000
            ok = await self._try()
            if not first.done():
                first.set_result(None)
            if ok:
                backoff.reset()
            wait_ms = (self._refresh_ms if ok else backoff.next_ms()) * (0.75 + self._random() / 2)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_ms / 1000):
                    await self._news.wait()
            await asyncio.sleep(max(earliest - loop.time(), 0))

    async def _try(self) -> bool:
        async with self._fetching:
            try:
                await self._client.open()
                await self._fetch()
            except UStatusError as error:
                if self.healthy:
                    log.warning(
                        "uSubscription can't be asked: the last known interest serves",
                        authority=self.name,
                        why=str(error),
                    )
                self.healthy = False
            except Exception:
                log.exception("asking uSubscription failed", authority=self.name)
                self.healthy = False
            else:
                self.healthy = not self._unanswered
            return self.healthy

    async def _fetch(self) -> None:
        """Register first, then fetch."""
        could_list = self.can_list
        if await self._client.find_version() == 3:
            if could_list:
                self._table.changed()  # who waits for this service has to ask it by topic
            await self._ask_all_again()
            return
        await self._take_all(self._fetch_all)

    async def _fetch_all(self) -> Iterable[Subscription]:
        await self._client.register_for_notifications()
        return filter(self._may_say, await self._client.fetch_subscriptions())

    def _may_say(self, told: Subscription) -> bool:
        topic, subscriber = told.topic, told.subscriber
        one_topic = (
            topic.authority_name != uris.WILDCARD_AUTHORITY and topic.ue_id & 0xFFFF != uris.WILDCARD_ENTITY_TYPE
        )
        if (
            one_topic
            and uris.is_topic(topic)
            and (self._lives_there(topic.authority_name) or self._lives_there(subscriber.authority_name))
        ):
            return True
        if not self.ignored:
            what = f"{uris.format(topic)} for {uris.format(subscriber)}"
            log.warning(
                "a uSubscription tells of a subscription that is not of its network: passed over",
                authority=self.name,
                what=what,
            )
        self.ignored += 1
        return False

    async def _ask_all_again(self) -> None:
        topics = [topic for of_it in self._asked.values() for topic in of_it.values()]
        for start in range(0, len(topics), ASKS_AT_ONCE):
            answered = await asyncio.gather(*(self._ask(topic) for topic in topics[start : start + ASKS_AT_ONCE]))
            if not any(answered):
                raise UStatusError(UCode.UNAVAILABLE, "it answers no more")

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
        if self._table.replace(filter(self._may_say, known), only=topic) or key not in self._answered:
            self._answered.add(key)
            self._table.changed()
        return True

    def _on_change(self, change: Subscription) -> None:
        if not change.topic.resource_id:
            self._news.set()  # it was reset, and with it our registration
            return
        if self._may_say(change):
            self._take([change])

    def _connection_changed(self, connected: bool) -> None:
        if connected:
            self._news.set()
        elif self._started:
            self.healthy = False
