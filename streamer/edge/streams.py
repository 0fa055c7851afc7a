"""GET /stream: history and live in one request, as server-sent events, or a page of them (`mode=poll`).

request -> who asks? -> Query -> mode=poll: one page, and where to go on
                              -> StreamClient: reads for itself up to its feed -> follows the feed -> response
                              -> epochs=atomic: a GaplessSubscriber with an Assembler of its own

By the HTML standard, section 9.2, an EventSource gives up after any status but 200. So what may pass is 200: overload
closes the stream and says when to come back, and records that are lost are a `gap` event. What the client itself has to
change is 400, 401 or 403.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterator
from typing import Final

import structlog
from aiohttp import web
from aiohttp_sse import EventSourceResponse

from streamer.config.edge import HttpSection
from streamer.edge.callers import Callers
from streamer.edge.clients import Output, StreamClient
from streamer.edge.epoch_reader import EpochReader
from streamer.edge.events import gap_of
from streamer.edge.feeds import BUSY_CODES, Feeds, ReadableHistory
from streamer.edge.positions import StreamStart, position_text
from streamer.edge.query import Query
from streamer.http.lines import SeldomLog
from streamer.http.places import Places
from streamer.http.statuses import STATUSES
from streamer.reporting import Reporter, Sample
from uprotocol import uri as uris
from uprotocol.status import UStatusError
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.uri_pb2 import UUri

RETRY_MS: Final = 5_000  # then a client that found no capacity comes back
EPOCH_CLIENTS_MAX: Final = 64  # each may hold epoch_reader.EPOCH_BYTES_MAX

log = structlog.get_logger()


class HttpStreams(Reporter):
    """Serves GET /stream from `history`. What it counts is in `places`: events and gaps, and who was refused."""

    def __init__(self, history: ReadableHistory, callers: Callers, section: HttpSection, places: Places) -> None:
        self._history, self._callers, self._section, self._places = history, callers, section, places
        self._feeds = Feeds(history, has_callers=section.tokens_file is not None)
        self._epoch_clients, self._log = 0, SeldomLog()

    def __repr__(self) -> str:
        return f"HttpStreams({len(self._places)} clients, {len(self._feeds)} feeds)"

    @property
    def feeds(self) -> int:
        return len(self._feeds)

    def samples(self) -> Iterator[Sample]:
        yield "edge_feeds", (), self.feeds

    def close(self) -> None:
        """End all streams; their clients come back. May be called twice."""
        self._feeds.close()

    async def get(self, request: web.Request) -> web.StreamResponse:
        caller = await self._callers.of(request)
        is_poll = request.query.get("mode") == "poll"
        try:
            query = Query.of(list(request.query.items()), request.headers.get("Last-Event-ID"))
            if query.mode == "poll":
                return await self._page(caller, query)
            return await self._stream(request, caller, query)
        except UStatusError as error:
            if error.code in BUSY_CODES:
                self._places.turned_away("overload", error.message)
                if not is_poll:
                    return await self._come_back(request)
            status = STATUSES.get(error.code, 500)
            headers = {"Retry-After": str(RETRY_MS // 1000)} if error.code in BUSY_CODES else None
            return web.Response(status=status, text=f"{error.message}\n", headers=headers)

    async def _come_back(self, request: web.Request) -> web.StreamResponse:
        """Answer 200 with the time after which an EventSource connects again, and close."""
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        response.force_close()
        await response.prepare(request)
        await response.write(b"retry: %d\n: too many clients, or the history is busy: come back later\n\n" % RETRY_MS)
        return response

    # -- mode=poll

    async def _page(self, caller: UUri, query: Query) -> web.StreamResponse:
        name = self._require_place(caller)
        since = StreamStart.of(query.since)
        reading = self._feeds.reading(caller, query.topics, query.format)
        reading.begin(since.state, since.start)
        with self._places.taken("poll", client=name):
            accepted = await reading.next(query.wait_ms, records_max=query.records_max)
        self._places.events["gaps"] += len(accepted.gaps)
        if accepted.gaps:  # reported once: `next` is behind them, and in front of the records that follow
            before = accepted.state.copy()
            for record in accepted.records:
                before.positions[record.incarnation] = min(before.positions[record.incarnation], record.seq - 1)
            what = {"gaps": [gap_of(gap) for gap in accepted.gaps], "next": position_text(before)}
            return web.json_response(what, status=410)
        events = [reading.encode(record) for record in accepted.records]
        self._places.events["poll"] += len(events)
        if query.format == "umessage":
            events = [f'"{event}"' for event in events]
        more = "true" if reading.has_more else "false"
        body = f'{{"events":[{",".join(events)}],"next":"{position_text(reading.state)}","more":{more}}}\n'
        return web.Response(body=body.encode(), content_type="application/json")

    # -- streams

    def _require_place(self, caller: UUri) -> str:
        """Returns the name of the client. Raises RESOURCE_EXHAUSTED."""
        name = uris.format(caller)
        if self._places.are_full:
            raise UStatusError(UCode.RESOURCE_EXHAUSTED, "too many clients (http.clients_max): come back later")
        if self._places.are_full_for(name):
            what = f"too many streams of {name} (http.client_streams_max): come back later"
            raise UStatusError(UCode.RESOURCE_EXHAUSTED, what)
        return name

    async def _stream(self, request: web.Request, caller: UUri, query: Query) -> web.StreamResponse:
        name = self._require_place(caller)
        with self._places.taken("stream", lambda: self._callers.still_allowed(request, caller), name):
            if query.is_atomic:
                return await self._stream_epochs(request, caller, query)
            since = StreamStart.of(query.since)
            reading = self._feeds.reading(caller, query.topics, query.format)
            reading.begin(since.state, since.start)
            first = [await reading.next()]  # before the answer begins: a refusal is not a stream
            async with self._output(request) as (output, response):
                client = StreamClient(self._places.events, self._feeds, reading, output, query, caller)
                await client.run(since.state, first)
            return response

    @contextlib.asynccontextmanager
    async def _output(self, request: web.Request) -> AsyncIterator[tuple[Output, web.StreamResponse]]:
        """Begins the answer, and ends it. A client that has gone is no error."""
        section = self._section
        response = EventSourceResponse(sep="\n", ping_interval=section.keep_alive_s, send_timeout=section.send_s)
        await response.prepare(request)
        try:
            with contextlib.suppress(ConnectionError):
                yield Output(response), response
        finally:
            response.stop_streaming()
        await response.wait()

    async def _stream_epochs(self, request: web.Request, caller: UUri, query: Query) -> web.StreamResponse:
        if self._epoch_clients >= EPOCH_CLIENTS_MAX:
            raise UStatusError(UCode.RESOURCE_EXHAUSTED, f"{EPOCH_CLIENTS_MAX} streams of epochs run: come back later")
        self._epoch_clients += 1
        try:
            reader = EpochReader(self._history, caller, query)
            await reader.check()
            async with self._output(request) as (output, response), reader.subscriber:
                try:
                    await reader.write(output)
                except UStatusError as error:
                    if self._log.is_due(error.code):
                        log.warning("a stream of epochs ends", error=str(error))
            return response
        finally:
            self._epoch_clients -= 1
