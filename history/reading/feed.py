"""Feeds listeners from a history: the messages since a point and the new ones, each once and in order.

subscribe_since(topic, since, listener) -> describe: does the history answer?
   -> catch up: polls of its own, each delivered before the next     <--- left: too slow, a gap, a record missing
       -> at the end: join -> one long poll for all topics -> by topic: inbox of each listener -> listener, in batches

`USubscriptionClient(..., history=feed).subscribe(topic, listener, since=...)` uses it: the subscription makes the
messages flow, the history delivers them without a gap. Each listener has an Acceptor of its own, so the change between
the two ways loses nothing: duplicates are dropped, and a listener that misses a record catches up. A slow listener does
not delay the others.
"""

from __future__ import annotations

import asyncio
import inspect
from collections import Counter, deque
from collections.abc import Callable, Iterator
from datetime import datetime
from typing import Any, Final, Self

import structlog

from history.reading.acceptor import Acceptor, ReaderState, Verdict
from history.reading.client import HistoryClient
from history.reading.following import Following, FollowingOptions
from history.records.limits import WILDCARD_PATTERNS_MAX
from history.records.record import Positions, Record, decode
from history.records.witness import seqs_of
from uprotocol import uri as uris
from uprotocol import uuid as uuids
from uprotocol.cache import Cache
from uprotocol.core.ustreamer.v1.ustreamer_pb2 import Gap, PollRequest, PollResponse
from uprotocol.status import UStatusError, invalid
from uprotocol.tasks import end
from uprotocol.transport import UBatchListener, UListener
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.uri_pb2 import UUri
from uprotocol.v1.uuid_pb2 import UUID

# what a service keeps for one authority; for more topics, use a pattern with a GaplessSubscriber
FEEDS_MAX: Final = 16_384
# of messages that wait for one listener, and of an answer; a listener with more catches up by itself
FEED_BYTES_MAX: Final = 256 << 10
FEEDS_BYTES_MAX: Final = 64 << 20  # of messages that wait for all listeners together, if many are stuck
CATCHING_UP_MAX: Final = 8  # polls at the same time: as many as a service answers at the same time
# a listener that takes longer for its last batch is no longer at the end, and would delay the others
JOIN_DELIVERY_MS: Final = 100
JOIN_BEHIND_MAX: Final = 65_536  # records; a listener further behind the shared poll catches up first
SOURCES_MAX: Final = 65_536  # sources in the cache of their listeners

Since = int | datetime | UUID
"""The records after this seq (0: all), after this append time, or after the message with this id."""

log = structlog.get_logger()


class _Feed:
    """One listener of one topic: its state, and the records that wait for it."""

    def __init__(
        self, topic: UUri, start: PollRequest, positions: Positions, listener: UListener, counts: Counter[str]
    ) -> None:
        self._counts = counts  # held_bytes: of messages that wait for all listeners together
        self.topic, self.key, self.is_wildcard = topic, uris.key(topic), uris.has_wildcard(topic)
        self.start, self.listener = start, listener
        self.acceptor = Acceptor(positions)
        self.inbox: deque[tuple[list[Record], int]] = deque()
        self.held_bytes = 0
        self.is_out = True  # not part of the shared poll
        self.woken = asyncio.Event()

    def take(self, records: list[Record]) -> bool:
        """Returns False if the listener has to catch up: too much waits already, or a record is missing."""
        bytes = sum(record.message.ByteSize() for record in records)
        is_much = self.held_bytes + bytes > FEED_BYTES_MAX or self._counts["held_bytes"] + bytes > FEEDS_BYTES_MAX
        if self.inbox and is_much:
            return False
        taken: list[Record] = []
        verdict = Verdict.TAKEN
        for record in records:
            verdict = self.acceptor.judge(record)
            if verdict is Verdict.REFUSED:
                break
            if verdict is Verdict.TAKEN:
                taken.append(record)
        if taken:
            self.inbox.append((taken, bytes))
            self._hold(bytes)
            self.woken.set()
        return verdict is not Verdict.REFUSED

    def leave(self) -> None:
        """The shared poll brings nothing more."""
        self.is_out = True
        self.woken.set()

    async def follow(self) -> None:
        """Deliver what the shared poll brings, until the feed has left it and nothing waits."""
        while not self.is_out or self.inbox:
            if not self.inbox:
                self.woken.clear()
                await self.woken.wait()
                continue
            await _deliver_to(self.listener, self.inbox[0][0])
            self._hold(-self.inbox.popleft()[1])

    def _hold(self, bytes: int) -> None:
        self.held_bytes += bytes
        self._counts["held_bytes"] += bytes

    def close(self) -> None:
        """Drop what waits."""
        self._hold(-self.held_bytes)
        self.inbox.clear()


class _SharedFollowing:
    """One Following for many feeds that are at the end: the service is told their topics once, and one long poll waits
    for all of them."""

    def __init__(self, client: HistoryClient) -> None:
        self._following = Following(
            client,
            FollowingOptions(mode="poll", start=PollRequest(latest=True), max_bytes=FEED_BYTES_MAX),
            on_denied=self._denied,
        )
        self._state = ReaderState()
        self._feeds: dict[_Feed, None] = {}
        self._joining: dict[_Feed, None] = {}
        self._topics: dict[Any, dict[_Feed, None]] = {}  # all, by topic
        self._wild: dict[Any, UUri] = {}  # the topics with wildcards
        self._topics_of = Cache[Any, list[Any]](SOURCES_MAX)  # by source: what of these matches it
        self._task: asyncio.Task[None] | None = None

    def has_capacity(self, feed: _Feed) -> bool:
        return feed.key in self._topics or len(self._wild) + feed.is_wildcard <= WILDCARD_PATTERNS_MAX

    def join(self, feed: _Feed) -> None:
        """The feed joins with the first poll after its topic is followed; the poll that is running is answered then."""
        feed.is_out = False
        self._joining[feed] = None
        if feed.key not in self._topics:
            self._topics[feed.key] = {}
            if feed.is_wildcard:
                self._wild[feed.key] = feed.topic
                self._topics_of.clear()
            self._following.follow(feed.topic)
        self._topics[feed.key][feed] = None
        self._start()

    def _start(self) -> None:
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name="feeds")

    def leave(self, feed: _Feed) -> None:
        if feed not in self._topics.get(feed.key, ()):
            return
        self._joining.pop(feed, None)
        self._feeds.pop(feed, None)
        feed.leave()
        del self._topics[feed.key][feed]
        if not self._topics[feed.key]:
            del self._topics[feed.key]
            if feed.is_wildcard:
                del self._wild[feed.key]
                self._topics_of.clear()
            self._following.unfollow(feed.topic)  # the poll that waits is answered

    async def close(self) -> None:
        await end(self._task)

    async def _run(self) -> None:
        try:
            async with self._following as following:
                while self._topics:
                    try:
                        await following.commands.confirmed()
                        self._admit()
                        response = await following.next(self._state) if self._feeds else None
                        if response is not None:
                            self._deliver(response)
                    except UStatusError as error:
                        # One of them may be refused. Each polls alone, and so finds out.
                        what = "the history refuses to feed all listeners together; each is fed alone"
                        log.warning(what, error=repr(error))
                        self._scatter()
                        await following.begin_again()
        finally:
            self._task = None
        if self._topics:  # a feed has joined meanwhile
            self._start()

    def _denied(self, topic: UUri) -> None:
        """Its feeds leave: each is refused at a poll of its own."""
        for feed in list(self._topics.get(uris.key(topic), ())):
            self.leave(feed)

    def _admit(self) -> None:
        """Add the feeds whose topics are already followed."""
        for feed in list(self._joining):
            mine, theirs = self._state.positions, feed.acceptor.state.positions
            if not self._feeds:
                self._state = feed.acceptor.state.copy()
            elif mine.keys() != theirs.keys():  # a log is new: the others find it with polls of their own
                self._scatter()
                self.leave(feed)
                continue
            elif any(seq - theirs[incarnation] > JOIN_BEHIND_MAX for incarnation, seq in mine.items()):
                self.leave(feed)
                continue
            else:
                mine.update({incarnation: min(seq, theirs[incarnation]) for incarnation, seq in mine.items()})
            del self._joining[feed]
            self._feeds[feed] = None

    def _deliver(self, response: PollResponse) -> None:
        """An answer with gaps or other logs is not delivered: each feed polls alone, for its own topic."""
        following = seqs_of(response.next)
        is_simple = not response.gaps and following.keys() == self._state.positions.keys()
        parts: dict[_Feed, list[Record]] = {}
        for batch in response.batches:
            for record in decode(batch) or [0]:
                if isinstance(record, int):
                    is_simple = False
                    continue
                for feed in self._wanted_by(record.message.attributes.source):
                    parts.setdefault(feed, []).append(record)
        if not is_simple:
            self._scatter()
            return
        for feed, records in parts.items():
            if not feed.take(records):
                self._drop(feed)
        self._state.positions.update(following)
        self._state.learn(response.next)

    def _wanted_by(self, source: UUri) -> Iterator[_Feed]:
        key = uris.key(source)
        topics = self._topics_of.get(key)
        if topics is None:
            topics = [key, *(one for one, pattern in self._wild.items() if uris.matches(pattern, source))]
            self._topics_of[key] = topics
        return (feed for topic in topics for feed in self._topics.get(topic, ()) if feed in self._feeds)

    def _scatter(self) -> None:
        for feed in list(self._feeds):
            self._drop(feed)

    def _drop(self, feed: _Feed) -> None:
        """The feed continues from before the current answer."""
        feed.acceptor.resume(self._state)
        self.leave(feed)


class HistoryFeed:
    """Feeds up to FEEDS_MAX listeners. `on_gap(topic, gap)` is called for records that can never be read."""

    def __init__(self, client: HistoryClient, *, on_gap: Callable[[UUri, Gap], None] | None = None) -> None:
        self._client, self._on_gap = client, on_gap
        self._feeds: dict[tuple[Any, int], asyncio.Task[None]] = {}
        self._counts: Counter[str] = Counter()
        self._shared: list[_SharedFollowing] = []
        self._catching_up = asyncio.Semaphore(CATCHING_UP_MAX)

    def __repr__(self) -> str:
        return f"HistoryFeed(feeds={len(self._feeds)})"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """End all feeds. May be called twice."""
        for feed in list(self._feeds.values()):
            await end(feed)
        self._feeds.clear()
        for shared in self._shared:
            await shared.close()

    async def subscribe_since(self, topic: UUri, since: Since, listener: UListener) -> None:
        """Feed `listener`. Calling it again changes nothing.

        Raises UStatusError: INVALID_ARGUMENT for an invalid `since`, RESOURCE_EXHAUSTED at FEEDS_MAX, or what the
        history answers.
        """
        topic = uris.with_authority(topic, self._client.authority)
        key = (uris.key(topic), id(listener))
        if key in self._feeds:
            return
        if len(self._feeds) >= FEEDS_MAX:
            what = f"{FEEDS_MAX} topics are fed from the history, which is the limit: use patterns"
            raise UStatusError(UCode.RESOURCE_EXHAUSTED, what)
        start, positions = await self._start(topic, since)
        if key not in self._feeds:  # another call was not faster
            feeding = self._feed(_Feed(topic, start, positions, listener, self._counts))
            feed = self._feeds[key] = asyncio.create_task(feeding, name=f"feed of {uris.format(topic)}")
            feed.add_done_callback(lambda done: self._forget(key, done))

    async def unsubscribe(self, topic: UUri, listener: UListener) -> None:
        """End one feed, if there is one."""
        feed = self._feeds.pop((uris.key(uris.with_authority(topic, self._client.authority)), id(listener)), None)
        if feed is not None:
            await end(feed)

    def _forget(self, key: tuple[Any, int], feed: asyncio.Task[None]) -> None:
        """After its end, subscribe_since may be called again."""
        if self._feeds.get(key) is feed:
            del self._feeds[key]

    async def _start(self, topic: UUri, since: Since) -> tuple[PollRequest, Positions]:
        logs = await self._client.logs([topic])
        start = PollRequest(earliest=True)
        match since:
            case UUID():
                return PollRequest(after_message_id=uuids.to_bytes(since)), {}
            case datetime() if since.tzinfo is not None:
                start.after_time.FromDatetime(since)
                return start, {}
            case int() if not isinstance(since, bool) and since >= 0:
                return start, {state.incarnation: since for state in logs if since and state.newest_match_seq}
        raise invalid(
            f"expected since as a sequence number, a datetime with time zone, or the UUID of a message, got {since!r}"
        )

    async def _feed(self, feed: _Feed) -> None:
        try:
            while True:
                await self._catch_up(feed)
                shared = self._shared_for(feed)
                shared.join(feed)
                try:
                    await feed.follow()
                finally:
                    shared.leave(feed)
        except UStatusError as error:
            what = "the history refuses to continue: this listener is no longer fed"
            log.error(what, topic=uris.format(feed.topic), error=str(error))
        finally:
            feed.close()

    async def _catch_up(self, feed: _Feed) -> None:
        """Poll until the listener has all records of a moment ago. Raises UStatusError if the history refuses."""
        time, acceptor = asyncio.get_running_loop().time, feed.acceptor
        options = FollowingOptions(
            mode="poll", start=feed.start, max_bytes=FEED_BYTES_MAX, wait_ms_max=0, names_topics=True
        )
        async with Following(self._client, options) as following:
            following.follow(feed.topic)
            while True:
                response = None
                async with self._catching_up:
                    while response is None:
                        response = await following.next(acceptor.state)
                polled = time()
                accepted = acceptor.accept(response)
                for gap in accepted.gaps:
                    bounds = {"after": gap.after_seq, "before": gap.before_seq}
                    log.warning("a feed has a gap", topic=uris.format(feed.topic), **bounds)
                    if self._on_gap is not None:
                        self._on_gap(feed.topic, gap)
                if accepted.records:
                    await _deliver_to(feed.listener, accepted.records)
                behind = (one for one in response.next if acceptor.state.positions.get(one.incarnation, 0) < one.seq)
                if not response.more and not any(behind) and (time() - polled) * 1000 <= JOIN_DELIVERY_MS:
                    return

    def _shared_for(self, feed: _Feed) -> _SharedFollowing:
        for shared in self._shared:
            if shared.has_capacity(feed):
                return shared
        self._shared.append(_SharedFollowing(self._client))
        return self._shared[-1]


async def _deliver_to(listener: UListener, records: list[Record]) -> None:
    """As a transport does: a message whose listener fails counts as delivered, and the failure is logged."""
    messages = [record.message for record in records]
    batch = listener.on_receive_batch if isinstance(listener, UBatchListener) else None
    for part in [messages] if batch is not None else [[message] for message in messages]:
        try:
            taken = batch(part) if batch is not None else listener.on_receive(part[0])
            if inspect.isawaitable(taken):
                await taken
        except Exception:
            log.exception(
                "a listener failed; its messages count as delivered", listener=repr(listener), messages=len(part)
            )
