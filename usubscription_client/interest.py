"""Who wants what, kept fresh: what a streamer asks before it forwards.

uSubscription of A --> ServiceInterest (service_interest.py) ---+
uSubscription in this process --hook-------> EmbeddedInterest --+--> Interest: wants(topic) -> {authority: Want}, version
the file of the Rust streamer -------------> StaticFile --------+

A subscription that is pending counts like one that stands: the streamer must be ready before the first message. A
service that is away does not change what is known of it; `healthy` says so. Until a service has given its first
complete answer, nobody knows who else wants a topic: it is undecided, and stays so for as long as that takes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final, Protocol

import structlog

from storage.runtime import REAL, Runtime
from uprotocol import uri as uris
from uprotocol.core.usubscription.wire import Entry, Key, Subscription, to_uri
from uprotocol.status import UStatusError
from uprotocol.v1.uri_pb2 import UUri
from usubscription_client.saved_interest import SavedInterest
from usubscription_client.table import Positions, TableSource, Want, merge

TOPICS_ASKED_MAX: Final = 100_000  # topics asked of a service that can't list; each costs a registration there
# of one authority, so that topics which it makes up keep out its own alone
AUTHORITY_TOPICS_ASKED_MAX: Final = TOPICS_ASKED_MAX // 8
ASKS_AT_ONCE: Final = 32  # calls in flight to services that can't list
# what the service has on disk itself is remembered a second time for its damage only
EMBEDDED_SAVE_DELAY_S: Final = 60.0

log = structlog.get_logger()


class InterestSource(Protocol):
    """One place that knows subscriptions."""

    name: str
    scope: str  # the authority whose clients and topics it knows; the wildcard: all
    also: Collection[str]  # other authorities, or families of them, whose topics it knows
    positions: Callable[[], Positions]  # where the logs are in which subscriptions count; set by the union

    @property
    def healthy(self) -> bool:
        """False while what is known may be stale."""
        ...

    @property
    def can_list(self) -> bool:
        """False: this source knows only the topics it was asked about (see `ask`)."""
        ...

    async def start(self) -> None:
        """Learn what there is. Returns when that has succeeded or failed once; a failure is retried, not raised."""

    async def stop(self) -> None: ...

    async def refresh(self) -> None:
        """Fetch again now."""

    async def ask(self, topic: UUri) -> None:
        """Find out about `topic` and follow it from here on; nothing to do where the source can list. Never raises
        UStatusError."""

    def decided(self, topic: UUri) -> bool:
        """False until the first complete answer after a start, or, of a source that can't list, the first one about
        `topic`."""
        ...

    def wants(self, topic: UUri) -> Mapping[str, Want]: ...
    def names(self, topic: UUri) -> bool: ...
    def topics(self) -> Collection[UUri]: ...
    def on_change(self, callback: Callable[[], None]) -> None: ...


class EmbeddedService(Protocol):
    """What EmbeddedInterest needs of a usubscription.service.USubscriptionService."""

    authority: str

    @property
    def also(self) -> Collection[str]: ...

    async def subscriptions(self) -> Sequence[Entry]: ...

    def on_change(self, hook: Callable[[Sequence[Entry]], Awaitable[None] | None]) -> None:
        """Calls `hook` after the commit and before the answers leave."""


class EmbeddedInterest(TableSource):
    """Straight from the service in this process: fresh before a subscriber has its answer.

    `saved` is a file that keeps who wants what over a restart, for when the service's own file can't be read then.
    """

    def __init__(self, service: EmbeddedService, saved: Path | None = None, runtime: Runtime = REAL) -> None:
        super().__init__(service.authority)
        self._service, self.also = service, service.also
        self._saved = (
            SavedInterest(saved, self._table.one_of_each_authority, runtime.disk, delay_s=EMBEDDED_SAVE_DELAY_S)
            if saved is not None
            else None
        )
        self.healthy = False
        service.on_change(self._changed)

    async def start(self) -> None:
        if not self.complete:
            await self.refresh()

    async def stop(self) -> None:
        """The service has its own owner."""
        if self._saved is not None:
            await self._saved.close()

    async def refresh(self) -> None:
        """Read everything. Where the service can't read its file, what was known before serves."""
        try:
            await self._take_all(self._read)
        except UStatusError as error:
            log.error(
                "the subscriptions can't be read: the last known interest serves", authority=self.name, why=str(error)
            )
            self.healthy = False
            if not self.complete and self._saved is not None and self._table.replace(self._saved.load()):
                self._table.changed()

    async def _read(self) -> Iterable[Subscription]:
        entries = await self._service.subscriptions()
        self.healthy = True
        if self._saved is not None and not self.complete:
            self._table.on_change(self._saved.changed)
        return map(_subscription, entries)

    def _changed(self, changes: Sequence[Entry]) -> None:
        self._take(_subscription(change) for change in changes if change.topic[3])


def _subscription(entry: Entry) -> Subscription:
    topic, subscriber = to_uri(entry.topic), to_uri(entry.subscriber)
    return Subscription(topic, subscriber, entry.status, entry.expires_ms, entry.sample_period_ms)


class Interest:
    """The union of several sources. `version` rises with every change of any of them."""

    def __init__(self, sources: Iterable[InterestSource], positions: Callable[[], Positions] = tuple) -> None:
        """`positions()`: where the logs are in which new subscriptions count."""
        self.sources = tuple(sources)
        self.version = 0
        self._callbacks: list[Callable[[], None]] = []
        self._to_ask: dict[str, dict[Key, UUri]] = {}  # by the topics' authority, which take turns
        self._to_ask_count = 0
        self._asking: dict[Key, asyncio.Task[None]] = {}
        for source in self.sources:
            source.positions = positions
            source.on_change(self._changed)

    def __repr__(self) -> str:
        return f"Interest({', '.join(map(repr, self.sources))}, version={self.version})"

    async def start(self) -> None:
        await asyncio.gather(*(source.start() for source in self.sources))

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
        asking = [source.ask(topic) for source in self.sources if not source.can_list]
        if asking:
            await asyncio.gather(*asking)

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
        # else it is asked when it is seen again
        if self._to_ask_count < TOPICS_ASKED_MAX and len(waiting) < AUTHORITY_TOPICS_ASKED_MAX:
            waiting[key] = topic
            self._to_ask_count += 1
            self._ask_next()

    def _ask_next(self, answered: Key | None = None) -> None:
        if answered is not None:
            del self._asking[answered]
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
        """Which authorities want `topic`. Pure lookup: ask it once per topic and version."""
        return merge([source.wants(topic) for source in self.sources])

    def names(self, topic: UUri) -> bool:
        """True if somebody has subscribed to exactly `topic`, and not just to a pattern of it."""
        return any(source.names(topic) for source in self.sources)

    def topics(self) -> list[UUri]:
        """Every topic that somebody wants, patterns included, each once."""
        found = {uris.key(topic): topic for source in self.sources for topic in source.topics()}
        return list(found.values())

    @property
    def can_list(self) -> bool:
        return all(source.can_list for source in self.sources)

    @property
    def healthy(self) -> bool:
        return all(source.healthy for source in self.sources)

    @property
    def unhealthy(self) -> list[str]:
        """Names of the sources whose knowledge may be stale."""
        return [source.name for source in self.sources if not source.healthy]

    def on_change(self, callback: Callable[[], None]) -> None:
        self._callbacks.append(callback)

    def _changed(self) -> None:
        self.version += 1
        for callback in self._callbacks:
            callback()


__all__ = ["EmbeddedInterest", "EmbeddedService", "Interest", "InterestSource", "Want"]
