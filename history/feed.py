"""Listeners fed from a history: what was published since a point, and what comes, once and in order.

    subscribe_since(topic, since, listener) -> describe: does the history answer? -> GaplessSubscriber -> listener, batch by batch

It is what `USubscriptionClient(..., history=feed).subscribe(topic, listener, since=...)` needs: the subscription makes the messages flow,
the history brings them without a gap. The listener takes what it is given (its awaitable is waited for) before more is handed over.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from datetime import datetime
from typing import Any, Final, Self

import structlog

from history.subscriber import GaplessSubscriber, HistoryClient, Positions, Record
from uprotocol import uri as uris
from uprotocol import uuid as uuids
from uprotocol.core.ustreamer.v1.ustreamer_pb2 import Gap, PollRequest
from uprotocol.status import UStatusError, invalid
from uprotocol.transport import UListener
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.uri_pb2 import UUri
from uprotocol.v1.uuid_pb2 import UUID

FEEDS_MAX: Final = 1_000  # each is a long poll; who wants more topics asks for a pattern with a GaplessSubscriber of its own

Since = int | datetime | UUID
"""After the record of this sequence number (0: all there are), after this append time, after the message with this id."""

log = structlog.get_logger()


class HistoryFeed:
    """Owns one GaplessSubscriber for each topic and listener. `on_gap(topic, gap)` is told what can never be read."""

    def __init__(self, client: HistoryClient, *, on_gap: Callable[[UUri, Gap], None] | None = None) -> None:
        self._client, self._on_gap = client, on_gap
        self._feeds: dict[tuple[Any, int], asyncio.Task[None]] = {}

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

    async def subscribe_since(self, topic: UUri, since: Since, listener: UListener) -> None:
        """Feed `listener`; doing it again changes nothing.

        Raises UStatusError: INVALID_ARGUMENT for a `since` that is none, RESOURCE_EXHAUSTED at FEEDS_MAX, or what the history says.
        """
        key = (uris.key(topic), id(listener))
        if key in self._feeds:
            return
        if len(self._feeds) >= FEEDS_MAX:
            raise UStatusError(UCode.RESOURCE_EXHAUSTED, f"{FEEDS_MAX} topics are fed from the history, which is the limit")
        start, positions = await self._start(topic, since)
        if key not in self._feeds:  # nobody was quicker
            feed = self._feeds[key] = asyncio.create_task(
                self._feed(topic, start, positions, listener), name=f"feed of {uris.format(topic)}"
            )
            feed.add_done_callback(lambda done: self._forget(key, done))

    async def unsubscribe(self, topic: UUri, listener: UListener) -> None:
        """End one feed; that there is none is no error."""
        feed = self._feeds.pop((uris.key(topic), id(listener)), None)
        if feed is not None:
            await _ended(feed)

    def _forget(self, key: tuple[Any, int], feed: asyncio.Task[None]) -> None:
        """One that the history refused may be asked for again."""
        if self._feeds.get(key) is feed:
            del self._feeds[key]

    async def _start(self, topic: UUri, since: Since) -> tuple[PollRequest, Positions]:
        described = await self._client.describe([topic])
        start = PollRequest(earliest=True)
        match since:
            case UUID():
                return PollRequest(after_message_id=uuids.to_bytes(since)), {}
            case datetime() if since.tzinfo is not None:
                start.after_time.FromDatetime(since)
                return start, {}
            case int() if not isinstance(since, bool) and since >= 0:
                return start, {state.incarnation: since for state in described.topics if since}
        raise invalid(f"since is a sequence number, a datetime with time zone, or the UUID of a message, got {since!r}")

    async def _feed(self, topic: UUri, start: PollRequest, positions: Positions, listener: UListener) -> None:
        def gap(gap: Gap) -> None:
            log.warning("a feed has a gap", topic=uris.format(topic), after=gap.after_seq, before=gap.before_seq)
            if self._on_gap is not None:
                self._on_gap(topic, gap)

        try:
            async with GaplessSubscriber(self._client, [topic], start=start, positions=positions, on_gap=gap) as subscriber:
                async for records in subscriber.batches():
                    await _hand_over(listener, records)
        except UStatusError as error:
            log.error("the history refuses to go on: this listener hears no more", topic=uris.format(topic), error=str(error))


async def _hand_over(listener: UListener, records: list[Record]) -> None:
    """As a transport does: what a listener can't take counts as taken, and is told."""
    messages = [record.message for record in records]
    batch = getattr(listener, "on_receive_batch", None)
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
