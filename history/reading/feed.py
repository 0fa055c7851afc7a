"""Listeners fed from a history: what was published since a point, and what comes, once and in order.

subscribe_since(topic, since, listener) -> describe: does the history answer?
   -> catch up: polls of its own, each handed over before the next   <--- fell out: too slow, a gap, a record missing
       -> at the end: join -> one long poll for all topics -> by topic: inbox of each listener -> listener, in batches

It is what `USubscriptionClient(..., history=feed).subscribe(topic, listener, since=...)` needs: the subscription makes
the messages flow, the history brings them without a gap. Each listener has an Acceptor of its own, so there is no seam
between the two: what comes twice is dropped, and where something is missing it catches up. A listener that is slow
costs the others nothing.
"""

from __future__ import annotations

import asyncio
import inspect
from collections import Counter, deque
from collections.abc import Callable, Iterable
from datetime import datetime
from itertools import chain
from typing import Any, Final, Self

import structlog

from history.reading.acceptor import Acceptor, Places, Positions, Record, Verdict, decode
from history.reading.client import HistoryClient, Poller, Steps
from history.reading.following import Following
from history.service.request import PATTERNS_MAX, WILDCARD_PATTERNS_MAX
from uprotocol import uri as uris
from uprotocol import uuid as uuids
from uprotocol.cache import Cache
from uprotocol.core.ustreamer.v1.ustreamer_pb2 import Gap, PollRequest, PollResponse
from uprotocol.status import UStatusError, invalid
from uprotocol.transport import UBatchListener, UListener
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.uri_pb2 import UUri
from uprotocol.v1.uuid_pb2 import UUID

FEEDS_MAX: Final = 16_384  # who wants more topics asks for a pattern with a GaplessSubscriber of its own
TOPICS_MAX: Final = 16_384  # of one conversation: what a service keeps for one authority
# of messages that wait for one listener, and of an answer; beyond it, it catches up
FEED_BYTES_MAX: Final = 256 << 10
FEEDS_BYTES_MAX: Final = 64 << 20  # that wait for all listeners together, if many hang
CATCHING_UP_MAX: Final = 8  # polls at once, which is what a service answers at once
# a listener that takes longer for what it is given isn't at the end any more, and would hold the others back
JOIN_HANDOVER_MS: Final = 100
JOIN_BEHIND_MAX: Final = 65_536  # records of the log; who is further behind the shared poll than that catches up first
SOURCES_MAX: Final = 65_536  # whose listeners are known

Since = int | datetime | UUID
"""After the record of this sequence number (0: all there are), after this append time, after the message with this
id."""

log = structlog.get_logger()


class _Held:
    """Bytes of messages that wait for listeners, all together."""

    def __init__(self) -> None:
        self.bytes = 0


class _Feed:
    """One listener of one topic: where it is, and what waits for it."""

    def __init__(
        self, topic: UUri, start: PollRequest, positions: Positions, listener: UListener, together: _Held
    ) -> None:
        self._together = together
        self.topic, self.key, self.is_wildcard = topic, uris.key(topic), uris.has_wildcard(topic)
        self.start, self.listener = start, listener
        self.acceptor = Acceptor(positions)
        self.inbox: deque[tuple[list[Record], int]] = deque()
        self.held_bytes = 0
        self.is_out = True  # of the shared poll
        self.woken = asyncio.Event()

    def request(self) -> PollRequest:
        places = self.acceptor.places.request()
        request = PollRequest(topics=[self.topic], positions=places, max_bytes=FEED_BYTES_MAX)
        request.MergeFrom(self.start)
        return request

    def take(self, records: list[Record]) -> bool:
        """False if it has to catch up: too much waits already, or something is missing before one of these."""
        bytes = sum(record.message.ByteSize() for record in records)
        is_much = self.held_bytes + bytes > FEED_BYTES_MAX or self._together.bytes + bytes > FEEDS_BYTES_MAX
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

    def fall_out(self) -> None:
        self.is_out = True
        self.woken.set()

    async def follow(self) -> None:
        """Hand over what comes, until it is out of the shared poll and all is handed over."""
        while not self.is_out or self.inbox:
            if not self.inbox:
                self.woken.clear()
                await self.woken.wait()
                continue
            await _hand_over(self.listener, self.inbox[0][0])
            self._hold(-self.inbox.popleft()[1])

    def _hold(self, bytes: int) -> None:
        self.held_bytes += bytes
        self._together.bytes += bytes

    def close(self) -> None:
        """Nothing waits for it any more."""
        self._hold(-self.held_bytes)
        self.inbox.clear()


class _Shared:
    """One conversation for many feeds that are at the end: the service is told their topics once, and one long poll
    waits for all of them."""

    def __init__(self, client: HistoryClient) -> None:
        self._following = Following(
            client,
            mode="poll",
            start=PollRequest(latest=True),
            max_bytes=FEED_BYTES_MAX,
            on_denied=self._denied,
        )
        self._places = Places()
        self._feeds: dict[_Feed, None] = {}
        self._joining: dict[_Feed, None] = {}
        self._topics: Counter[Any] = Counter()  # how many feeds have each
        self._wildcards = 0
        self._exact: dict[Any, dict[_Feed, None]] = {}  # by topic, and those with wildcards ...
        self._wild: dict[_Feed, None] = {}
        self._wild_of = Cache[Any, list[_Feed]](SOURCES_MAX)  # ... by source, as they come
        self._task: asyncio.Task[None] | None = None

    def has_room(self, feed: _Feed) -> bool:
        if self._topics[feed.key]:
            return True
        return len(self._topics) < self._topics_max and self._wildcards + feed.is_wildcard <= WILDCARD_PATTERNS_MAX

    @property
    def _topics_max(self) -> int:
        """A service that knows no commands is told all topics with each poll."""
        return TOPICS_MAX if self._following.knows_commands else PATTERNS_MAX

    def join(self, feed: _Feed) -> None:
        """With the first poll after its topic is followed: the one that is under way is answered for that."""
        feed.is_out = False
        self._joining[feed] = None
        self._topics[feed.key] += 1
        if self._topics[feed.key] == 1:
            self._wildcards += feed.is_wildcard
            self._following.follow(feed.topic)
        self._start()

    def _start(self) -> None:
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name="feeds")

    def leave(self, feed: _Feed) -> None:
        if feed not in self._feeds and feed not in self._joining:
            return
        self._joining.pop(feed, None)
        if feed in self._feeds:
            self._expel(feed)
        feed.fall_out()
        self._topics[feed.key] -= 1
        if not self._topics[feed.key]:
            del self._topics[feed.key]
            self._wildcards -= feed.is_wildcard
            self._following.unfollow(feed.topic)  # and what is waited for is answered

    async def close(self) -> None:
        if self._task is not None:
            await _ended(self._task)

    async def _run(self) -> None:
        try:
            async with self._following as following:
                while self._topics:
                    try:
                        await following.told()
                        self._admit()
                        response = await following.next(self._places) if self._feeds else None
                        if response is not None:
                            self._deliver(response)
                    except UStatusError as error:
                        # One of them may be refused: each learns that by itself, and is told.
                        what = "the history refuses to feed all listeners at once; each is fed alone"
                        log.warning(what, error=repr(error))
                        self._scatter()
                        await following.begin_again()
        finally:
            self._task = None
        if self._topics:  # somebody came meanwhile
            self._start()

    def _denied(self, topic: UUri) -> None:
        """Each of them learns it by a poll of its own, and is told."""
        key = uris.key(topic)
        for feed in [*self._exact.get(key, ()), *(one for one in (*self._wild, *self._joining) if one.key == key)]:
            self.leave(feed)

    def _admit(self) -> None:
        """Those whose topics are followed by now."""
        for feed in list(self._joining):
            mine, theirs = self._places.positions, feed.acceptor.positions
            if not self._feeds:
                self._places = feed.acceptor.places.copy()
            elif mine.keys() != theirs.keys():  # a log is new: who doesn't know of it, learns it by a poll of its own
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
            if feed.is_wildcard:
                self._wild[feed] = None
                self._wild_of.clear()
            else:
                self._exact.setdefault(feed.key, {})[feed] = None

    def _expel(self, feed: _Feed) -> None:
        del self._feeds[feed]
        if feed.is_wildcard:
            del self._wild[feed]
            self._wild_of.clear()
            return
        others = self._exact[feed.key]
        del others[feed]
        if not others:
            del self._exact[feed.key]

    def _deliver(self, response: PollResponse) -> None:
        """What is not simple is left to each feed's own poll, whose answer is about its topic alone."""
        following = {position.incarnation: position.seq for position in response.next}
        is_simple = not response.gaps and following.keys() == self._places.positions.keys()
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
        self._places.positions.update(following)
        self._places.learn(response.next)

    def _wanted_by(self, source: UUri) -> Iterable[_Feed]:
        key = uris.key(source)
        exact = self._exact.get(key, ())
        if not self._wild:
            return exact
        found = self._wild_of.get(key)
        if found is None:
            found = self._wild_of[key] = [feed for feed in self._wild if uris.matches(feed.topic, source)]
        return chain(exact, found)

    def _scatter(self) -> None:
        for feed in list(self._feeds):
            self._drop(feed)

    def _drop(self, feed: _Feed) -> None:
        """It goes on from where all were before the answer at hand."""
        feed.acceptor.resume(self._places)
        self.leave(feed)


class HistoryFeed:
    """Feeds listeners, as many as FEEDS_MAX. `on_gap(topic, gap)` is told what can never be read."""

    def __init__(self, client: HistoryClient, *, on_gap: Callable[[UUri, Gap], None] | None = None) -> None:
        self._client, self._on_gap = client, on_gap
        self._feeds: dict[tuple[Any, int], asyncio.Task[None]] = {}
        self._held = _Held()
        self._shared: list[_Shared] = []
        self._poller = Poller(client, wait_ms_max=0)
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
            await _ended(feed)
        self._feeds.clear()
        for shared in self._shared:
            await shared.close()

    async def subscribe_since(self, topic: UUri, since: Since, listener: UListener) -> None:
        """Feed `listener`; doing it again changes nothing.

        Raises UStatusError: INVALID_ARGUMENT for a `since` that is none, RESOURCE_EXHAUSTED at FEEDS_MAX, or what the
        history says.
        """
        topic = uris.with_authority(topic, self._client.authority)
        key = (uris.key(topic), id(listener))
        if key in self._feeds:
            return
        if len(self._feeds) >= FEEDS_MAX:
            what = f"{FEEDS_MAX} topics are fed from the history, which is the limit"
            raise UStatusError(UCode.RESOURCE_EXHAUSTED, what)
        start, positions = await self._start(topic, since)
        if key not in self._feeds:  # nobody was quicker
            feeding = self._feed(_Feed(topic, start, positions, listener, self._held))
            feed = self._feeds[key] = asyncio.create_task(feeding, name=f"feed of {uris.format(topic)}")
            feed.add_done_callback(lambda done: self._forget(key, done))

    async def unsubscribe(self, topic: UUri, listener: UListener) -> None:
        """End one feed; that there is none is no error."""
        feed = self._feeds.pop((uris.key(uris.with_authority(topic, self._client.authority)), id(listener)), None)
        if feed is not None:
            await _ended(feed)

    def _forget(self, key: tuple[Any, int], feed: asyncio.Task[None]) -> None:
        """One that the history refused may be asked for again."""
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
                return start, {log.incarnation: since for log in logs if since and log.newest_match_seq}
        raise invalid(f"since is a sequence number, a datetime with time zone, or the UUID of a message, got {since!r}")

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
            what = "the history refuses to go on: this listener hears no more"
            log.error(what, topic=uris.format(feed.topic), error=str(error))
        finally:
            feed.close()

    async def _catch_up(self, feed: _Feed) -> None:
        """Until the listener has all there was a moment ago. Raises UStatusError if the history refuses."""
        time, acceptor, steps = asyncio.get_running_loop().time, feed.acceptor, Steps()
        while True:
            response = None
            async with self._catching_up:
                while response is None:
                    response = await self._poller.poll(feed.request(), steps=steps)
            polled = time()
            accepted = acceptor.accept(response)
            for gap in accepted.gaps:
                bounds = {"after": gap.after_seq, "before": gap.before_seq}
                log.warning("a feed has a gap", topic=uris.format(feed.topic), **bounds)
                if self._on_gap is not None:
                    self._on_gap(feed.topic, gap)
            if accepted.records:
                await _hand_over(feed.listener, accepted.records)
            behind = (one for one in response.next if acceptor.positions.get(one.incarnation, 0) < one.seq)
            if not response.more and not any(behind) and (time() - polled) * 1000 <= JOIN_HANDOVER_MS:
                return

    def _shared_for(self, feed: _Feed) -> _Shared:
        for shared in self._shared:
            if shared.has_room(feed):
                return shared
        self._shared.append(_Shared(self._client))
        return self._shared[-1]


async def _hand_over(listener: UListener, records: list[Record]) -> None:
    """As a transport does: what a listener can't take counts as taken, and is told."""
    messages = [record.message for record in records]
    batch = listener.on_receive_batch if isinstance(listener, UBatchListener) else None
    for part in [messages] if batch is not None else [[message] for message in messages]:
        try:
            taken = batch(part) if batch is not None else listener.on_receive(part[0])
            if inspect.isawaitable(taken):
                await taken
        except Exception:
            log.exception("a listener failed; its messages count as taken", listener=repr(listener), messages=len(part))


async def _ended(feed: asyncio.Task[None]) -> None:
    feed.cancel()
    await asyncio.gather(feed, return_exceptions=True)
