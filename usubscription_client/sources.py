"""Where a streamer learns which authorities want which topics.

uSubscription of A --fetch, notifications-> ServiceInterest ---+
uSubscription in this process --hook------> EmbeddedInterest --+--> Interest
the file of the Rust streamer ------------> StaticFile --------+
SavedInterest: the last known interest on disk, for a start while a service is away

While a service is away, its last known interest stays, and `healthy` is False.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, Final, Protocol

import structlog
from pydantic import Field, TypeAdapter

from storage.disk import REAL_DISK, Disk
from storage.runtime import REAL, Runtime
from storage.saved import SavedFile
from uprotocol import uri as uris
from uprotocol.core.usubscription.wire import Entry, Status, Subscription, to_uri
from uprotocol.pacing import Backoff
from uprotocol.status import UStatusError, invalid
from uprotocol.tasks import end, wait_within
from uprotocol.transport import LocalUriProvider, UTransport
from uprotocol.uri import Key
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.uri_pb2 import UUri
from usubscription_client.client import CALL_MS, PROBE_MS, USubscriptionClient
from usubscription_client.interest import (
    ASKS_AT_ONCE,
    AUTHORITY_TOPICS_ASKED_MAX,
    SUBSCRIPTIONS_MAX,
    TOPICS_ASKED_MAX,
    InterestSource,
    Topics,
    is_wide,
)

# between fetches while the service answers: they only correct what lost notifications left out
REFRESH_MS: Final = 60_000
FETCH_RETRY_FIRST_MS: Final = 500  # between two fetches; after a failure twice as long, which doubles up to ...
FETCH_RETRY_MAX_MS: Final = 15_000  # ... so that a service that is back is used soon
FORGET_CANDIDATES_MAX: Final = 64  # of the longest known topics, to find one that nobody wants
# the service stores the same itself: this copy is only for the case that its file is damaged
EMBEDDED_SAVE_DELAY_S: Final = 60.0
SAVE_DELAY_S: Final = 1.0  # changes come in bursts; after a power failure the service is asked again
ENTRIES_PER_S: Final = 1_000  # average writing rate, some 100 KB/s: a flash endures it for years
STEP_ENTRIES: Final = 256  # in one turn of the event loop, a millisecond
SAVED_BYTES_MAX: Final = 1 << 30  # 5 million entries of 200 bytes
# topic, subscriber, sample period in milliseconds (32 bits)
_ENTRIES: Final = TypeAdapter(list[tuple[str, str, Annotated[int, Field(ge=0, lt=1 << 32)] | None]])
STATIC_BYTES_MAX: Final = 256 << 20  # more than a million subscriptions

log = structlog.get_logger()


class SavedInterest:
    """One file for one source. If it can't be read or written, that is logged: the service is asked anyway."""

    def __init__(
        self,
        path: Path,
        known: Callable[[], Iterable[Subscription]],
        disk: Disk = REAL_DISK,
        delay_s: float = SAVE_DELAY_S,
    ) -> None:
        """`known()` returns the subscriptions to save."""
        self._file = SavedFile(path, _ENTRIES, SAVED_BYTES_MAX, disk)
        self._known, self._delay_s = known, delay_s
        self._entries = 0  # in the file
        self._due: asyncio.TimerHandle | None = None
        self._saving: asyncio.Task[None] | None = None

    def load(self) -> list[Subscription]:
        """Returns the subscriptions in the file; none if there is no file, or it can't be read."""
        try:
            return [
                Subscription(uris.parse(topic), uris.parse(subscriber), Status.SUBSCRIBED, None, period_ms)
                for topic, subscriber, period_ms in self._file.load() or ()
            ]
        except UStatusError as error:
            log.warning("the saved interest can't be used: the service is asked", why=error.message)
            return []

    def require_readable(self) -> None:
        """Raises FAILED_PRECONDITION if there is a file that can't be read."""
        self._file.load()

    def changed(self, _: Topics = None) -> None:
        """Save soon."""
        if self._due is None:
            delay_s = max(self._delay_s, self._entries / ENTRIES_PER_S)
            self._due = asyncio.get_running_loop().call_later(delay_s, self._start)

    def _start(self) -> None:
        self._due = None
        if self._saving is not None and not self._saving.done():
            self.changed()  # again after the running one
            return
        self._saving = asyncio.ensure_future(self.save())

    async def save(self) -> None:
        """Save now. Changes during the save may be missing: they cause another save."""
        known, pieces, count = iter(self._known()), list[str](), 0
        while step := list(islice(known, STEP_ENTRIES)):
            entries = [(uris.format(one.topic), uris.format(one.subscriber), one.sample_period_ms) for one in step]
            pieces.append(json.dumps(entries)[1:-1])
            count += len(step)
            await asyncio.sleep(0)
        self._entries = count
        try:
            await asyncio.to_thread(self._file.write, f"[{', '.join(pieces)}]")
        except UStatusError as error:
            log.warning("the interest can't be saved", why=error.message)

    async def close(self) -> None:
        """Save unsaved changes."""
        due, self._due = self._due, None
        if due is not None:
            due.cancel()
        if self._saving is not None:
            await self._saving
        if due is not None:
            await self.save()


class AskedTopics(dict[str, dict[Key, UUri]]):
    """The topics that a service which can't list is asked about, by authority; the longest known first."""

    def __init__(self) -> None:
        super().__init__()
        self.answered: set[Key] = set()
        self.unanswered: set[Key] = set()  # by the last question

    def add(self, topic: UUri) -> None:
        self.setdefault(topic.authority_name, {})[uris.key(topic)] = topic

    def is_full(self, authority: str) -> bool:
        return (
            sum(map(len, self.values())) >= TOPICS_ASKED_MAX
            or len(self.get(authority, ())) >= AUTHORITY_TOPICS_ASKED_MAX
        )

    def forget_one(self, authority: str, wants: Callable[[UUri], object]) -> UUri | None:
        """Forget a topic that nobody wants, of `authority` or, if it has none, of the one with the most; it is asked
        again if it is published again. Returns None if all are wanted."""
        asked = self.get(authority) or max(self.values(), key=len)
        for key in list(islice(asked, FORGET_CANDIDATES_MAX)):
            topic = asked.pop(key)
            if not wants(topic):
                self.answered.discard(key)
                self.unanswered.discard(key)
                return topic
            asked[key] = topic  # moved to the end
        return None


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
        self.refresh_ms, self._random = refresh_ms, runtime.rng.random
        self.healthy, self._why = False, ""  # the last error
        self._asked = AskedTopics()
        self._fetching = asyncio.Lock()
        self._was_full = False  # when a topic was to be asked
        self._news = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._is_loaded = False
        self._first_answer = asyncio.Event()  # or the first failure
        self.transport, self._could_list = transport, True
        transport.on_connection(self._connection_changed)

    @property
    def can_list(self) -> bool:  # type: ignore[override]
        version = self._client.version
        return self._could_list if version is None else version != 3

    def continue_from(self, before: InterestSource) -> None:
        """Serve what a source of the same service at another endpoint has said, until this one answers: its
        subscriptions, also those that are not on disk yet, and whether it can list, on which depends what is listened
        to."""
        self._could_list = before.can_list
        self.replace(list(before.subscriptions()))

    async def load(self) -> None:
        """Read the interest that was saved before the restart; it is used until the service answers."""
        if self._saved is None or self._is_loaded:
            return
        self._is_loaded = True
        known = self._saved.load()
        if changed := self.replace(known):
            self.changed(changed)
        for subscription in known:
            self._asked.add(subscription.topic)
        self.on_change(self._saved.changed)

    async def start(self) -> None:
        if self._task is not None:
            return
        await self.load()
        self._task = asyncio.ensure_future(self._run())
        await self.answered()

    async def answered(self) -> None:
        if self.transport.connected and self._task is not None:
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
        known = self._asked.get(authority, {})
        if self.can_list or uris.key(topic) in known:
            return
        freed: UUri | None = None
        if self._asked.is_full(authority):
            freed = self._asked.forget_one(authority, self.wants)
            if freed is None:
                limits = {"authority": self.name, "of": authority, "topics": len(known)}
                log.warning("the limit of topics to ask of this service is reached", **limits)
                self._was_full = True
                return
        self._asked.add(topic)
        if not await self._ask(topic):
            self._news.set()
        if freed is not None:
            self.changed(frozenset([uris.key(freed)]))  # it is undecided again
            with contextlib.suppress(UStatusError):  # then more notifications come, which is harmless
                await self._client.unregister_for_notifications(freed)

    def decided(self, topic: UUri) -> bool:
        return self.complete if self.can_list else uris.key(topic) in self._asked.answered

    async def _run(self) -> None:
        backoff = Backoff(2 * FETCH_RETRY_FIRST_MS, FETCH_RETRY_MAX_MS)
        loop = asyncio.get_running_loop()
        while True:
            self._news.clear()
            if not self.transport.connected:  # a call would wait for the network, and delay the first useful one
                await self._news.wait()
                continue
            # a limit also for notifications, which cost their sender nothing
            earliest = loop.time() + FETCH_RETRY_FIRST_MS / 1000
            await self.refresh()
            self._first_answer.set()
            if self.healthy:
                backoff.reset()
            if self._was_full:
                self._was_full = False
                self.changed(None)  # so that the topics are asked again
            wait_ms = (self.refresh_ms if self.healthy else backoff.next_ms()) * (0.75 + self._random() / 2)
            await wait_within(self._news, wait_ms / 1000)
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
                self.healthy = not self._asked.unanswered

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
            self._asked.unanswered.add(key)
            self.healthy = False
            return False
        self._asked.unanswered.discard(key)
        known = [Subscription(topic, subscriber, Status.SUBSCRIBED) for subscriber in subscribers]
        if self.replace(filter(self._is_its_own, known), only=topic) or key not in self._asked.answered:
            self._asked.answered.add(key)
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

    is_ours = True

    def __init__(self, service: EmbeddedService, saved: Path | None = None, runtime: Runtime = REAL) -> None:
        super().__init__(service.authority)
        self._service, self.also = service, service.also
        self._saved: SavedInterest | None = None
        if saved is not None:
            self._saved = SavedInterest(saved, self.one_of_each_authority, runtime.disk, EMBEDDED_SAVE_DELAY_S)
        self.healthy = False
        self._is_loaded = False
        service.on_change(lambda changes: self._take(_subscription(one) for one in changes if one.topic[3]))

    async def load(self) -> None:
        if not self._is_loaded:
            self._is_loaded = True
            await self.refresh()

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


def _subscription(entry: Entry) -> Subscription:
    topic, subscriber = to_uri(entry.topic), to_uri(entry.subscriber)
    return Subscription(topic, subscriber, entry.status, entry.expires_ms, entry.sample_period_ms)


class StaticFile(InterestSource):
    """The interest in the JSON file at `path`, in the format of the Rust streamer: topic -> its subscribers, such as
    `{"//authority-b/3039/1/8001": ["//authority-a/5678/1/1234"]}`. It is read at the start and at every refresh."""

    is_ours = True

    def __init__(self, path: str | Path) -> None:
        super().__init__(str(path), scope=uris.WILDCARD_AUTHORITY)
        self._path = Path(path)
        self.healthy = False

    async def load(self) -> None:
        """Read the file. Raises UStatusError: NOT_FOUND, or INVALID_ARGUMENT that names the invalid entry."""
        if not self.complete:
            await self._take_all(self._read)

    async def refresh(self) -> None:
        """Read the file again. If it is invalid now, the known interest stays, and `healthy` is False."""
        try:
            await self._take_all(self._read)
        except UStatusError:
            self.healthy = False

    async def _read(self) -> list[Subscription]:
        subscriptions = await asyncio.to_thread(read_static, self._path)
        self.healthy = True
        return subscriptions


def read_static(path: Path) -> list[Subscription]:
    """Returns the subscriptions in the file at `path`. Blocks. Raises NOT_FOUND or INVALID_ARGUMENT."""
    try:
        if path.stat().st_size > STATIC_BYTES_MAX:
            advice = "use a uSubscription service for that many subscriptions"
            raise invalid(f"{path} has more than {STATIC_BYTES_MAX} bytes: {advice}")
        content = json.loads(path.read_text(encoding="utf-8-sig"), object_pairs_hook=_no_duplicates)
    except OSError as error:
        raise UStatusError(UCode.NOT_FOUND, f"the subscription file {path} can't be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise invalid(f"{path} is not the JSON of a subscription file: {error}") from None
    except UStatusError as error:
        raise invalid(f"{path}: {error.message}") from None
    if not isinstance(content, dict):
        expected = "an object that maps topic URIs to lists of subscriber URIs"
        raise invalid(f"{path}: expected {expected}, got {_kind(content)}")
    return [one for topic, subscribers in content.items() for one in _of_topic(path, topic, subscribers)]


def _of_topic(path: Path, topic: str, subscribers: Any) -> list[Subscription]:
    if not isinstance(subscribers, list):
        raise invalid(f"{path}: expected a list of subscriber URIs for topic {topic!r}, got {_kind(subscribers)}")
    try:
        topic_uri = uris.parse(topic)
        if not (uris.is_topic(topic_uri) or topic_uri.resource_id == uris.WILDCARD_RESOURCE):
            raise invalid(f"a topic has a resource of 8000 to FFFE, got {topic_uri.resource_id:X}")
        found = []
        for subscriber in subscribers:
            if not isinstance(subscriber, str):
                raise invalid(f"expected a subscriber URI as a string, got {_kind(subscriber)}")
            uri = uris.parse(subscriber)
            if not uri.authority_name or uris.has_wildcard(uri):
                raise invalid(f"a subscriber has an authority and no wildcards, got {subscriber!r}")
            found.append(Subscription(topic_uri, uri, Status.SUBSCRIBED))
    except UStatusError as error:
        raise invalid(f"{path}, topic {topic!r}: {error.message}") from None
    return found


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    for topic, count in Counter(key for key, _ in pairs).items():
        if count > 1:
            raise invalid(f"topic {topic!r} is listed twice")
    return dict(pairs)


def _kind(value: Any) -> str:
    return {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}.get(
        type(value), "a number"
    )
