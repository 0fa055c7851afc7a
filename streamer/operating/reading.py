"""What people look up in a running streamer: who has subscribed to what, and the last messages of a topic.

subscriptions   the sources of the interest, one after the other -> filter -> a page of rows, and where the next begins
messages        the streams of the topic in each log: the newest record, the one before it, ... -> rows, newest first

Both read in small steps between which the loop runs, and hold one page in memory.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any, Final

from history.log.log import Log
from streamer.operating.readable import as_row
from streamer.operation import Arguments, Operation
from uprotocol import uri as uris
from uprotocol.status import invalid
from uprotocol.v1.umessage_pb2 import UMessage
from uprotocol.v1.uri_pb2 import UUri
from usubscription_client.interest import Interest

SUBSCRIPTIONS_SHOWN_MAX: Final = 500  # subscriptions in one answer, and ...
ROWS: Final = 100  # ... without `limit`
EXAMINED_MAX: Final = 20_000  # subscriptions for one answer; a filter may fit few of them
EXAMINED_AT_ONCE: Final = 500  # in one step on the loop, some milliseconds
SERVICES_MAX: Final = 100  # named in one answer
MESSAGES_SHOWN_MAX: Final = 100  # in one answer, and ...
MESSAGES: Final = 20  # ... without `limit`
PAYLOAD_BYTES_MAX: Final = 4 << 10  # that are shown of each

_Place = tuple[int, int, int]  # sources, topics of the next one, subscribers of the next one that were examined


def reading_operations(interest: Interest, logs: Iterable[Log]) -> dict[str, Operation]:
    """Returns `subscriptions` and `messages`."""
    logs = tuple(logs)

    async def subscriptions(given: Arguments) -> dict[str, Any]:
        """topic, subscriber: patterns (uProtocol URIs; without authority: of any), or a part of the text of the URI."""
        limit, place = _limit(given, ROWS, SUBSCRIPTIONS_SHOWN_MAX), _place(given.text("after", "0.0.0"))
        has_topic, has_subscriber = _filter(given, "topic"), _filter(given, "subscriber")
        rows, following = await _page(interest, place, limit, lambda row: has_topic(row[1]) and has_subscriber(row[2]))
        return {
            "subscriptions": [
                {
                    "topic": uris.format(topic),
                    "subscriber": uris.format(subscriber),
                    "sample_period_ms": period_ms,
                    "usubscription": service,
                }
                for service, topic, subscriber, period_ms in rows
            ],
            "next": None if following is None else ".".join(map(str, following)),
            "total": sum(source.count for source in interest.sources),
            "services": [
                {"name": source.name, "healthy": source.healthy, "subscriptions": source.count}
                for source in interest.sources[:SERVICES_MAX]
            ],
        }

    async def messages(given: Arguments) -> dict[str, Any]:
        """topic: without wildcards. The newest message comes first; `stored_ms`: when it was appended."""
        topic, limit = uris.parse(given.text("topic")), _limit(given, MESSAGES, MESSAGES_SHOWN_MAX)
        uris.validate(topic)
        if uris.shape(uris.key(topic)) != uris.EXACT or not topic.authority_name:
            raise invalid(f"topic: expected one topic with its authority and no wildcard, got {uris.format(topic)}")
        rows = [row for log in logs async for row in _last(log, topic, limit)]
        rows.sort(key=lambda row: row["stored_ms"], reverse=True)  # stable: within one log they are in order already
        return {"topic": uris.format(topic), "messages": rows[:limit]}

    return {
        "messages": Operation(messages, ("topic", "limit")),
        "subscriptions": Operation(subscriptions, ("topic", "subscriber", "limit", "after")),
    }


def _limit(given: Arguments, default: int, most: int) -> int:
    limit = given.number("limit", default)
    if not 1 <= limit <= most:
        raise invalid(f"limit: expected 1 to {most}, got {limit}")
    return limit


# Subscriptions

_Row = tuple[str, UUri, UUri, int | None]  # name of the service, topic, subscriber, sample period


async def _page(
    interest: Interest, place: _Place, limit: int, is_wanted: Callable[[_Row], bool]
) -> tuple[list[_Row], _Place | None]:
    """Returns rows from `place` on, and where the next page begins; None: there is none."""
    rows: list[_Row] = []
    examined = 0
    number, topics, subscribers = place
    while number < len(interest.sources):
        source = interest.sources[number]
        if len(rows) >= limit or examined >= EXAMINED_MAX:
            return rows, (number, topics, subscribers)
        found, *after = source.page(topics, subscribers, EXAMINED_AT_ONCE)
        candidates = [(source.name, one.topic, one.subscriber, one.sample_period_ms) for one in found]
        wanted = [index for index, row in enumerate(candidates) if is_wanted(row)][: limit - len(rows)]
        rows += [candidates[index] for index in wanted]
        if len(rows) == limit and wanted:
            _, *after = source.page(topics, subscribers, wanted[-1] + 1)
        examined += len(found)
        topics, subscribers = after
        if not found:
            number, topics, subscribers = number + 1, 0, 0
        await asyncio.sleep(0)
    return rows, None


def _place(text: str) -> _Place:
    numbers = [int(part) for part in text.split(".") if part.isascii() and part.isdigit() and len(part) < 10]
    if len(numbers) != 3 or text.count(".") != 2:
        raise invalid(f"after: expected `next` of an earlier answer, got {text[:64]!r}")
    return numbers[0], numbers[1], numbers[2]


def _filter(given: Arguments, name: str) -> Callable[[UUri], bool]:
    wanted = given.text(name, "").strip()
    if not wanted.startswith(("/", "up:")):
        part = wanted.lower()
        return lambda uri: part in uris.format(uri).lower()
    pattern = uris.with_authority(uris.parse(wanted), uris.WILDCARD_AUTHORITY)
    return lambda uri: uris.matches(pattern, uri)


# Messages


async def _last(log: Log, topic: UUri, count: int) -> AsyncIterator[dict[str, Any]]:
    """Yields the last messages of a topic in a log, newest first."""
    newest = heapq.nlargest(count, log.publishes_from(topic), key=lambda stream: stream.newest_seq)
    waiting = [(-stream.newest_seq, stream.id) for stream in newest]
    heapq.heapify(waiting)
    for _ in range(count):
        if not waiting:
            return
        negative, id = heapq.heappop(waiting)
        found = await log.read(-negative - 1, streams={id}, until=-negative)
        if found:  # else retention has deleted it, and all before it, or it is damaged
            chunk = found[0]
            row = as_row(UMessage.FromString(chunk.data[0]), PAYLOAD_BYTES_MAX)
            yield {"seq": chunk.first_seq, "log": log.name, "stored_ms": chunk.time_ms, **row}
            heapq.heappush(waiting, (-chunk.prev_seqs[0], id))
        await asyncio.sleep(0)
