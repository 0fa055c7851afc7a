"""One client of a stream, and the output to it.

StreamClient: reads for itself up to its feed -> follows the feed -> Output: pieces, each taken in time -> response
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from typing import Final

from aiohttp import web

from history.reading.acceptor import Accepted, ReaderState
from history.records.record import Positions
from streamer.edge.events import id_line
from streamer.edge.feeds import AGAIN_S, BUSY_CODES, Feed, Feeds, HistoryReading
from streamer.edge.positions import position_of, position_text
from streamer.edge.query import Query
from uprotocol.core.ustreamer.v1.ustreamer_pb2 import PollRequest
from uprotocol.status import UStatusError
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.uri_pb2 import UUri

CLIENT_WRITE_BYTES_MAX: Final = 64 << 10  # at once, to one client; an event is one piece of any size
SHORT_WAIT_MS: Final = 1_000


class Output:
    """Writes to one client. The server cuts off a client that takes nothing."""

    def __init__(self, response: web.StreamResponse) -> None:
        self._response = response
        self._lines: list[bytes] = []
        self._bytes = 0

    async def add(self, lines: bytes) -> None:
        self._lines.append(lines)
        self._bytes += len(lines)
        if self._bytes > CLIENT_WRITE_BYTES_MAX:
            await self.flush()

    async def flush(self) -> None:
        """Raises ConnectionError if the client has gone, or was cut off."""
        if self._lines:
            data = b"".join(self._lines)
            self._lines.clear()
            self._bytes = 0
            await self._response.write(data)


class StreamClient:
    """One stream. It has a position and no queue: what it has not taken stays in the feed or in the history."""

    def __init__(
        self, counts: Counter[str], feeds: Feeds, reading: HistoryReading, output: Output, query: Query, caller: UUri
    ) -> None:
        self._counts, self._feeds, self._reading, self._output = counts, feeds, reading, output
        self._query, self._caller = query, caller

    async def run(self, before: ReaderState, first: list[Accepted]) -> None:
        """Write until the client goes. `first`: the answer to the first request, behind `before`; it is taken out, so
        that nobody keeps it for as long as the stream lives. Raises ConnectionError."""
        has_records = bool(first[0].records)
        await self._write(before, first.pop())
        if not has_records:  # an id without data is no event: a client shows it that is cut before the first one
            await self._output.add(id_line(position_text(self._reading.state)) + b"\n")
            await self._output.flush()
        while True:
            try:
                feed = await self._feeds.join(self._caller, self._query.topics, self._query.format)
            except UStatusError as error:
                if error.code not in BUSY_CODES:
                    return  # it may not read any more: the next request says so
                await asyncio.sleep(AGAIN_S)
                continue
            try:
                while feed.end is None:
                    await self._read_up_to(feed)
                    await self._follow(feed)
            except UStatusError as error:
                if error.code not in BUSY_CODES:
                    return
                await asyncio.sleep(AGAIN_S)
            finally:
                self._feeds.leave(feed, self._caller)
            if feed.end is not None and feed.end.code != UCode.ABORTED:
                return

    async def _read_up_to(self, feed: Feed) -> None:
        """Read for itself until the feed has what follows."""
        while feed.end is None and feed.number_for(self._reading.state.positions) is None:
            before = self._reading.state.copy()
            await self._write(before, await self._reading.next(0 if self._reading.has_more else SHORT_WAIT_MS))

    async def _write(self, before: ReaderState, accepted: Accepted) -> None:
        events = deque(self._reading.events(before, accepted))
        del accepted  # it is as large as they are, and a client may take them slowly
        while events:
            event = events.popleft()
            await self._output.add(id_line(event.id) + event.lines)
            self._counts["gaps" if event.is_gap else "stream"] += 1
        await self._output.flush()

    async def _follow(self, feed: Feed) -> None:
        """Write the events of the feed, until it ends or has dropped what this client has not taken yet."""
        own, add = self._reading.state, self._output.add
        feed.admit(own)
        state = ReaderState(dict(own.positions), idle=set(own.idle))
        number, is_level, id = feed.number_for(state.positions), False, position_text(own)
        while number is not None:
            events = feed.from_number(number)
            if events is None:
                break
            for at, event in enumerate(events, number):
                if not is_level:
                    if not event.is_new_at(state.positions):
                        continue
                    event.move(state)
                    is_level = at >= feed.exact_from and is_behind(state.positions, event.position)
                id = event.id if is_level else position_text(state)
                await add(id_line(id) + event.lines)
                self._counts["gaps" if event.is_gap else "stream"] += 1
            number += len(events)
            if feed.next_number == number and feed.newest_id != id:
                is_level = is_level or is_behind(state.positions, feed.newest.positions)
                if is_level:  # what it has read past had nothing for this client
                    id = feed.newest_id
                    await add(id_line(id) + b"\n")
            await self._output.flush()
            if feed.end is not None:
                break
            if feed.next_number == number:
                await feed.moved()
        self._reading.begin(position_of(id) if is_level else state, PollRequest(earliest=True))


def is_behind(one: Positions, other: Positions) -> bool:
    """Returns whether `other` is at least as far in each log."""
    return all(other.get(log, -1) >= seq for log, seq in one.items())
