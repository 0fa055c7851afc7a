"""Feeds: one reader of the history for all clients that read the same, and the newest events as bytes.

history -> Feed: each record becomes one event, encoded once -> the newest of them -> each client, at its own pace
                                                                 '- a client that is further back reads for itself
                                                                    until it has reached them

A client has no queue: it has a position, and what it has not taken stays here or in the history. A feed lives while it
has clients. It ends when what its callers may read has changed; they look for another one.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import structlog

from history.reading.acceptor import Accepted, Acceptor, ReaderState, went_back
from history.records import witness
from history.records.record import Positions
from streamer.edge.events import EVENT_FORMATS, event_lines, gap_text
from streamer.edge.positions import poll_of, position_text
from uprotocol import uri as uris
from uprotocol.core.ustreamer.v1.ustreamer_pb2 import PollRequest, PollResponse
from uprotocol.encoded import Stamps
from uprotocol.status import UStatusError
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.uri_pb2 import UUri

KEPT_BYTES_MAX: Final = 512 << 10  # of the newest events of a feed
ALL_KEPT_BYTES_MAX: Final = 64 << 20  # of all feeds together: with many of them each keeps less
FEEDS_FREE: Final = 8  # of one caller of several, which read as fast as the log grows; more of them share a rate
FEED_UNITS_PER_S: Final = 4_000  # that rate: records, and answers; encoding so many takes some third of a core
CLIENT_READ_BYTES_MAX: Final = 64 << 10  # of records, in one answer for one client
CLIENT_READ_RECORDS_MAX: Final = 500
FEED_READ_BYTES_MAX: Final = 256 << 10
FEED_READ_RECORDS_MAX: Final = 2_000
WAIT_MS: Final = 30_000  # then the ids of idle clients are brought up to date
AGAIN_S: Final = 1.0  # after an answer that was refused for lack of capacity
BUSY_CODES: Final = (UCode.RESOURCE_EXHAUSTED, UCode.UNAVAILABLE)

log = structlog.get_logger()


class ReadableHistory(Protocol):
    """The history in this process (HistoryService)."""

    async def read(self, caller: UUri, asked: PollRequest) -> PollResponse: ...

    def sight_key(self, caller: UUri) -> Hashable: ...


@dataclass(frozen=True, slots=True)
class StreamEvent:
    """A record or a gap. `lines`: without the id. `position`: where its reader is behind it; `id`: the same as text.
    `seq`: its log was read up to there; None: the log has ended."""

    incarnation: bytes
    seq: int | None
    position: Positions
    id: str
    lines: bytes
    is_gap: bool = False
    goes_back: bool = False  # the log went back: what follows has the seqs of earlier records

    @property
    def size(self) -> int:
        return len(self.id) + len(self.lines)

    def is_new_at(self, positions: Positions) -> bool:
        """Returns whether a client at `positions` lacks it."""
        if self.seq is None:
            return self.incarnation in positions
        return self.goes_back or self.seq > positions.get(self.incarnation, 0)

    def move(self, state: ReaderState) -> None:
        """Move `state` behind it."""
        if self.seq is None:
            state.forget(self.incarnation)
        else:
            state.positions[self.incarnation] = self.seq
            state.idle.discard(self.incarnation)


class HistoryReading:
    """Reads `topics` for one caller, behind a state that moves on."""

    def __init__(self, history: ReadableHistory, caller: UUri, topics: Sequence[UUri], format: str) -> None:
        self._history, self._caller, self._topics, self.encode = history, caller, topics, EVENT_FORMATS[format]
        self._stamps = Stamps()
        self._acceptor = Acceptor(read=self._stamps.read)
        self._start = PollRequest()
        self.has_more = True  # the last answer did not reach the end

    @property
    def state(self) -> ReaderState:
        return self._acceptor.state

    def begin(self, state: ReaderState, start: PollRequest) -> None:
        self._acceptor = Acceptor(state=state, read=self._stamps.read)
        self._start = start

    async def next(self, wait_ms: int = 0, bytes_max: int = CLIENT_READ_BYTES_MAX, records_max: int = 0) -> Accepted:
        """Returns what comes within `wait_ms`. Raises UStatusError."""
        asked = poll_of(self._topics, self.state, self._start)
        asked.wait_ms, asked.max_bytes, asked.max_records = wait_ms, bytes_max, records_max or CLIENT_READ_RECORDS_MAX
        answer = await self._history.read(self._caller, asked)
        accepted = self._acceptor.accept(answer)
        self._start = PollRequest(earliest=True)  # a log that appears later is new
        self.has_more = answer.more
        return accepted

    def events(self, before: ReaderState, accepted: Accepted) -> Iterator[StreamEvent]:
        """Yields the gaps and records of an answer to a request behind `before`."""
        state = before.copy()
        for gap in accepted.gaps:
            if gap.before_seq:
                state.positions[gap.incarnation] = gap.before_seq - 1
            else:
                state.forget(gap.incarnation)
            seq = gap.before_seq - 1 if gap.before_seq else None
            lines = event_lines(gap_text(gap), "gap")
            position = dict(state.positions)
            yield StreamEvent(gap.incarnation, seq, position, position_text(state), lines, True, went_back(gap))
        last = len(accepted.records)
        for number, record in enumerate(accepted.records, 1):
            if number == last:  # and what does not match behind it
                state = accepted.state
            else:
                state.positions[record.incarnation] = record.seq
                state.known[record.incarnation] = {record.seq: witness.digest_of(record.message.id_bytes)}
                state.idle.discard(record.incarnation)
            lines = event_lines(self.encode(record))
            yield StreamEvent(record.incarnation, record.seq, dict(state.positions), position_text(state), lines)


class SharedRate:
    """How fast the feeds of one caller read: each as fast as it can, if they are few."""

    def __init__(self) -> None:
        self.feeds = 0
        self._next = 0.0  # loop time

    def pause_s(self, units: int) -> float:
        """Returns how long a feed that has read so many records and answers waits before it reads again."""
        if self.feeds <= FEEDS_FREE:
            return 0.0
        now = asyncio.get_running_loop().time()
        self._next = max(self._next, now) + units / FEED_UNITS_PER_S
        return self._next - now


class KeptBytes:
    """What all feeds keep, together."""

    def __init__(self) -> None:
        self.feeds = self.used = 0

    def is_too_much(self, own: int, events: int) -> bool:
        """Returns whether a feed with so many bytes and events drops its oldest one. It keeps one of any size, unless
        all feeds together have too much."""
        share = min(KEPT_BYTES_MAX, ALL_KEPT_BYTES_MAX // max(1, self.feeds))
        return own > share and (events > 1 or self.used > ALL_KEPT_BYTES_MAX)


class Feed:
    """Reads the newest records of `topics` as `caller`, while it has clients.

    Its state: the events in memory, the number and position of the first one (`_kept`, `_bytes`, `_first`,
    `_before_first`); the position of the last record that it has read (`newest_id`, `exact_from`); and its clients,
    with their rates (`clients`, `rates`).
    """

    def __init__(self, reading: HistoryReading, history: ReadableHistory, caller: UUri, room: KeptBytes) -> None:
        self._reading, self._history, self._caller, self._room = reading, history, caller, room
        self._sight = history.sight_key(caller)
        self._kept: list[StreamEvent] = []
        self._bytes = 0
        self._first = 0  # number of the first event that is kept
        self._before_first: Positions = {}  # the position before it
        self.exact_from = 0  # the ids of earlier events call logs idle of which a client has read a record
        self._is_ready = asyncio.Event()
        self._moved = asyncio.Event()
        self.key: Hashable = None  # under which it is found
        self.clients: Counter[str] = Counter()  # by caller
        self.rates: dict[str, SharedRate] = {}  # of those callers, where there are several
        self.newest_id = ""  # the position up to which it has read
        self.end: UStatusError | None = None  # why it has ended
        self._task = asyncio.create_task(self._run(), name="feed of HTTP clients")

    def __repr__(self) -> str:
        return f"Feed(clients={self.clients.total()}, kept={len(self._kept)}, end={self.end})"

    @property
    def newest(self) -> ReaderState:
        return self._reading.state

    async def ready(self) -> None:
        """Wait until it has found the end of the history. Raises UStatusError."""
        await self._is_ready.wait()
        if self.end is not None:
            raise self.end

    def stop(self) -> None:
        self._task.cancel()

    def admit(self, state: ReaderState) -> None:
        """A client at `state` follows from here on. It may have read a record of a log that gave none to this feed: the
        end of that log is a loss for it, so the ids that it gets must not call the log idle."""
        if read := self.newest.idle & (state.positions.keys() - state.idle):
            self.newest.idle -= read
            self.newest_id = position_text(self.newest)
            self.exact_from = self.next_number

    async def _run(self) -> None:
        try:
            self._reading.begin(ReaderState(), PollRequest(latest=True))
            await self._reading.next()
            self._before_first = dict(self.newest.positions)
            self.newest_id = position_text(self.newest)
            self._is_ready.set()
            while True:
                units = await self._read()
                self._wake()
                if self.rates and (pause_s := min(one.pause_s(units) for one in self.rates.values())):
                    await asyncio.sleep(pause_s)
        except UStatusError as error:
            self.end = error
        except Exception as error:
            log.exception("a feed of HTTP clients failed")
            self.end = UStatusError(UCode.INTERNAL, f"the feed failed: {error!r}")
        finally:
            self.end = self.end or UStatusError(UCode.CANCELLED, "the edge stops")
            self._room.used -= self._bytes
            self._is_ready.set()
            self._wake()

    async def _read(self) -> int:
        """Returns how many records and answers it has read."""
        before = self.newest.copy()
        try:
            accepted = await self._reading.next(WAIT_MS, FEED_READ_BYTES_MAX, FEED_READ_RECORDS_MAX)
        except UStatusError as error:
            if error.code not in BUSY_CODES:
                raise
            await asyncio.sleep(AGAIN_S)
            return 0
        if self._history.sight_key(self._caller) != self._sight:
            raise UStatusError(UCode.ABORTED, "what its callers may read has changed")
        before.idle &= self.newest.idle  # a client may have come meanwhile
        for event in self._reading.events(before, accepted):
            self._kept.append(event)
            self._bytes += event.size
            self._room.used += event.size
        oldest = 0
        while self._room.is_too_much(self._bytes, len(self._kept) - oldest):
            self._bytes -= self._kept[oldest].size
            self._room.used -= self._kept[oldest].size
            self._before_first = self._kept[oldest].position
            oldest += 1
        del self._kept[:oldest]
        self._first += oldest
        self.newest_id = position_text(self.newest)
        return 1 + len(accepted.records)

    def _wake(self) -> None:
        moved, self._moved = self._moved, asyncio.Event()
        moved.set()

    async def moved(self) -> None:
        """Wait for events, for a position that moves without one, or for the end."""
        if self.end is None:
            await self._moved.wait()

    def number_for(self, positions: Positions) -> int | None:
        """Returns the number of the first event that a client at `positions` may lack; None: it is further back."""
        if any(positions.get(incarnation, -1) < seq for incarnation, seq in self._before_first.items()):
            return None
        return self._first

    @property
    def next_number(self) -> int:
        return self._first + len(self._kept)

    def from_number(self, number: int) -> Sequence[StreamEvent] | None:
        """Returns the events from `number` on; None if some of them are not kept any more."""
        if number < self._first:
            return None
        return self._kept[number - self._first :]


class Feeds:
    """The feeds of all clients, by what they read."""

    def __init__(self, history: ReadableHistory, *, has_callers: bool = False) -> None:
        """`has_callers`: tokens tell clients apart, and no caller's many feeds may slow down those of others."""
        self._history, self._has_callers = history, has_callers
        self._feeds: dict[Hashable, Feed] = {}
        self._room = KeptBytes()
        self._rates: dict[str, SharedRate] = {}

    def __len__(self) -> int:
        return len(self._feeds)

    def reading(self, caller: UUri, topics: Sequence[UUri], format: str) -> HistoryReading:
        return HistoryReading(self._history, caller, topics, format)

    async def join(self, caller: UUri, topics: Sequence[UUri], format: str) -> Feed:
        """Returns the feed for one more client, which leaves it with `leave`. Raises UStatusError."""
        names = tuple(sorted(topic.SerializeToString() for topic in topics))
        own = caller.authority_name if any(not topic.authority_name for topic in topics) else ""
        key = (self._history.sight_key(caller), own, names, format)
        feed = self._feeds.get(key)
        if feed is None or feed.end is not None:
            feed = self._feeds[key] = Feed(self.reading(caller, topics, format), self._history, caller, self._room)
            feed.key = key
            self._room.feeds = len(self._feeds)
        self._enter(feed, uris.format(caller))
        try:
            await feed.ready()
        except BaseException:
            self.leave(feed, caller)
            raise
        return feed

    def _enter(self, feed: Feed, name: str) -> None:
        feed.clients[name] += 1
        if self._has_callers and name not in feed.rates:
            rate = feed.rates[name] = self._rates.setdefault(name, SharedRate())
            rate.feeds += 1

    def leave(self, feed: Feed, caller: UUri) -> None:
        name = uris.format(caller)
        feed.clients[name] -= 1
        if feed.clients[name]:
            return
        del feed.clients[name]
        if (rate := feed.rates.pop(name, None)) is not None:
            rate.feeds -= 1
            if not rate.feeds:
                del self._rates[name]
        if not feed.clients:
            feed.stop()
            if self._feeds.get(feed.key) is feed:
                del self._feeds[feed.key]
            self._room.feeds = len(self._feeds)

    def close(self) -> None:
        for feed in self._feeds.values():
            feed.stop()
