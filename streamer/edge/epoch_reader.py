"""Whole epochs for one HTTP client (`epochs=atomic`): a GaplessSubscriber in this process.

The id of an event is the subscriber's cursor, with what its Assembler must know to go on: no epoch comes twice, and
none is lost.
"""

from __future__ import annotations

import base64
import binascii
import json
import zlib
from collections.abc import Iterator
from typing import Final

from history.epochs.assembling import Assembled, Assembler
from history.reading.client import HistoryClient
from history.reading.subscriber import GaplessSubscriber, cursor_of
from streamer.edge.clients import Output
from streamer.edge.events import event_lines, gap_text, id_line, json_of
from streamer.edge.feeds import FEED_READ_BYTES_MAX, ReadableHistory
from streamer.edge.positions import StreamStart, poll_of
from streamer.edge.query import Query
from uprotocol import uri as uris
from uprotocol.communication.api import DEFAULT_OPTIONS, CallOptions, RpcClient
from uprotocol.core.ustreamer import ids
from uprotocol.core.ustreamer.v1.ustreamer_pb2 import Gap, PollRequest
from uprotocol.message import UPayload
from uprotocol.status import UStatusError, invalid
from uprotocol.v1.uri_pb2 import UUri

EPOCH_BYTES_MAX: Final = 2 << 20  # of records that wait for the end of their epoch, for one client
EPOCH_MARK: Final = "e"
CURSOR_BYTES_MAX: Final = 64 << 10  # of the cursor in an id, unpacked
ID_CHARACTERS_MAX: Final = 6_000  # servers take some 8 KiB of a header; an event with a larger one has no id


class LocalPolls(RpcClient):
    """The polls of one caller as calls of the history in this process."""

    def __init__(self, history: ReadableHistory, caller: UUri) -> None:
        self._history, self._caller = history, caller

    async def invoke_method(
        self, method: UUri, payload: UPayload | None = None, options: CallOptions = DEFAULT_OPTIONS
    ) -> UPayload:
        assert payload is not None, "a poll has a request"
        return UPayload.pack(await self._history.read(self._caller, payload.unpack(PollRequest)))


class EpochReader:
    def __init__(self, history: ReadableHistory, caller: UUri, query: Query) -> None:
        """Raises INVALID_ARGUMENT."""
        self._lost: list[Gap] = []
        cursor = cursor_in(query.since)
        since = StreamStart() if cursor else StreamStart.of(query.since)
        self._request = poll_of(query.topics, since.state, since.start)
        self._history, self._caller = history, caller
        self.subscriber = GaplessSubscriber(
            HistoryClient(LocalPolls(history, caller), uris.uri(caller.authority_name, ids.ENTITY, ids.VERSION)),
            query.topics,
            mode="poll",
            start=since.start,
            positions=since.state.positions,
            cursor=cursor,
            assembler=Assembler(query.topics, bytes_max=EPOCH_BYTES_MAX),
            max_bytes=FEED_READ_BYTES_MAX,
            on_gap=self._lost.append,
        )

    async def check(self) -> None:
        """Raises UStatusError if the client may not read, or asks wrongly."""
        self._request.max_records = 1
        await self._history.read(self._caller, self._request)

    async def write(self, output: Output) -> None:
        """Write until the client goes. Raises UStatusError, ConnectionError."""
        await output.add(_id(self.subscriber.cursor) + b"\n")
        await output.flush()
        async for epoch in self.subscriber.epochs():
            for gap in self._lost:
                await output.add(event_lines(gap_text(gap), "gap"))
            self._lost.clear()
            await self.subscriber.commit()  # so that the cursor is behind this epoch
            await output.add(_id(self.subscriber.cursor))
            await output.add(b"".join(epoch_events(epoch)) or b"\n")
            await output.flush()


def epoch_events(epoch: Assembled) -> Iterator[bytes]:
    """Yields one event for an epoch, or one for each record that is in none."""
    if epoch.epoch is None:
        yield from (event_lines(json_of(record)) for record in epoch.records)
        return
    head = {"group": epoch.epoch.group, "time": list(epoch.epoch.time), "complete": epoch.is_complete}
    if epoch.incomplete:
        head["incomplete"] = epoch.incomplete
    records = ",".join(map(json_of, epoch.records))
    yield event_lines(f'{json.dumps(head)[:-1]}, "records": [{records}]}}', "epoch")


def cursor_in(text: str) -> str:
    """Returns the cursor in an id of `epochs=atomic`; "" if it is another kind of `since`. Raises INVALID_ARGUMENT."""
    if not text.startswith(EPOCH_MARK) or text == "earliest":
        return ""
    try:
        packed = base64.b64decode(text[1:] + "=" * (-(len(text) - 1) % 4), altchars=b"-_", validate=True)
        unpacking = zlib.decompressobj()
        cursor = unpacking.decompress(packed, CURSOR_BYTES_MAX).decode()
        cursor_of(cursor)
    except (binascii.Error, zlib.error, ValueError, UStatusError):
        raise invalid(f"expected the id of an epoch as it came, got {text[:80]!r}") from None
    return cursor


def _id(cursor: str) -> bytes:
    packed = base64.urlsafe_b64encode(zlib.compress(cursor.encode())).rstrip(b"=").decode()
    return id_line(EPOCH_MARK + packed) if len(packed) < ID_CHARACTERS_MAX else b""
