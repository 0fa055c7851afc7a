"""The client side of the history: poll, and a subscriber that never misses a record in silence.

Poll -> Acceptor: does each record directly follow the last one of its topic? -> queue -> batches() -> the application
  ^        | no: drop the rest, go back, poll again                                            |
  '--------+------- positions, acked <--- cursor (file, replaced whole) <--- batch was taken --'
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Final, Self

import structlog

from history.acceptor import Accepted, Acceptor, Places, Positions, Record
from uprotocol import uri as uris
from uprotocol.communication import CallOptions, RpcClient
from uprotocol.core.ustreamer.ids import DESCRIBE, POLL
from uprotocol.core.ustreamer.v1.ustreamer_pb2 import (
    DescribeRequest,
    DescribeResponse,
    Gap,
    LogState,
    PollRequest,
    PollResponse,
    Position,
    TopicState,
)
from uprotocol.message import M, UPayload
from uprotocol.pacing import Backoff
from uprotocol.status import UStatusError, invalid
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.uri_pb2 import UUri

TIMEOUT_MS: Final = 10_000  # of a call, beside what the service may wait
WAIT_MS_MIN: Final = 500  # of a long poll, on a network that loses or cuts long calls
WAIT_MS_MAX: Final = 30_000  # on a quiet and sound one: two calls a minute say that both are alive
BACKOFF_MS_MIN: Final = 100
BACKOFF_MS_MAX: Final = 10_000  # a streamer that is back is found within that
PAUSE_MS: Final = 100  # between polls, if a service answers at once with nothing though it was asked to wait
# polled while the application still works on the one before; each at most the service's limit
BATCHES_AHEAD_MAX: Final = 2
# between two writes of the file while batches pass; what is lost of it comes twice after a restart
CURSOR_SAVE_MS: Final = 1_000
AGAIN: Final = frozenset({UCode.UNAVAILABLE, UCode.DEADLINE_EXCEEDED, UCode.RESOURCE_EXHAUSTED})

log = structlog.get_logger()


class HistoryClient:
    """Calls core.ustreamer at `service` (its resource does not matter). Bound to no loop but that of `rpc_client`.

    All methods raise UStatusError: what the service answered, DEADLINE_EXCEEDED after `timeout_ms` (and what a poll
    may wait), or DATA_LOSS if the answer can't be read.
    """

    def __init__(self, rpc_client: RpcClient, service: UUri, *, timeout_ms: int = TIMEOUT_MS) -> None:
        self._rpc, self._timeout_ms = rpc_client, timeout_ms
        self.authority = service.authority_name
        address = (service.authority_name, service.ue_id, service.ue_version_major)
        self._describe, self._poll = (uris.uri(*address, method) for method in (DESCRIBE, POLL))

    async def logs(self, topics: Iterable[UUri] = ()) -> list[LogState]:
        """The logs, each with the newest record of `topics`, which are patterns (none given: all). It costs the same
        however many match."""
        asked = DescribeRequest(topics=topics, listing=DescribeRequest.LISTING_NONE)
        described = await self._call(self._describe, asked, DescribeResponse, 0)
        for log in described.logs:
            if not log.HasField("newest_match_seq"):  # a service of before there were pages has listed them all
                seqs = (topic.newest_seq for topic in described.topics if topic.incarnation == log.incarnation)
                log.newest_match_seq = max(seqs, default=0)
        return list(described.logs)

    async def topics(self, topics: Iterable[UUri] = ()) -> AsyncIterator[TopicState]:
        """The state of each topic that matches, page by page. One that comes or is forgotten meanwhile may be missing;
        all others are there once."""
        asked = DescribeRequest(topics=topics, listing=DescribeRequest.LISTING_PAGE)
        while True:
            described = await self._call(self._describe, asked, DescribeResponse, 0)
            for state in described.topics:
                yield state
            if not described.next_page:
                return
            if described.next_page == asked.page:
                raise UStatusError(UCode.DATA_LOSS, f"{self.authority} gives the same page again and again")
            asked.page = described.next_page

    async def describe(self, topics: Iterable[UUri] = ()) -> DescribeResponse:
        """The logs, and all topics that match, in one answer: RESOURCE_EXHAUSTED where those are more than some
        thousand."""
        return await self._call(self._describe, DescribeRequest(topics=topics), DescribeResponse, 0)

    async def poll(self, request: PollRequest | None = None) -> PollResponse:
        """One batch; waits up to `request.wait_ms` if there is nothing."""
        request = request if request is not None else PollRequest()
        return await self._call(self._poll, request, PollResponse, request.wait_ms)

    async def _call(self, method: UUri, request: DescribeRequest | PollRequest, response: type[M], wait_ms: int) -> M:
        # The service answers before the ttl ends, and keeps a part of it in hand for the way back.
        options = CallOptions(timeout_ms=self._timeout_ms + wait_ms + wait_ms // 8)
        payload = await self._rpc.invoke_method(method, UPayload.pack(request), options)
        try:
            return payload.unpack(response)
        except UStatusError as error:
            what = f"{uris.format(method)} gave an answer that can't be read: {error.message}"
            raise UStatusError(UCode.DATA_LOSS, what) from None


class Poller:
    """Polls as long as the network bears, and while the service is away asks again, with growing, random pauses."""

    def __init__(
        self,
        client: HistoryClient,
        *,
        wait_ms_max: int = WAIT_MS_MAX,
        on_connected: Callable[[bool], None] | None = None,
        rng: random.Random | None = None,
    ) -> None:
        self._client, self._on_connected = client, on_connected
        self._wait_ms_max = wait_ms_max
        self._backoff = Backoff(BACKOFF_MS_MIN, BACKOFF_MS_MAX, rng if rng is not None else random.Random())
        self.wait_ms = min(wait_ms_max, max(WAIT_MS_MIN, wait_ms_max // 8))
        self.connected = False

    async def poll(self, request: PollRequest) -> PollResponse | None:
        """The answer, or None after a pause if there was none. Raises UStatusError if the service refuses."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        request.wait_ms = self.wait_ms
        try:
            response = await self._client.poll(request)
        except UStatusError as error:
            if error.code not in AGAIN:
                raise
            self.wait_ms = max(min(WAIT_MS_MIN, self._wait_ms_max), self.wait_ms // 2)
            self._tell(False, error)
            await self.pause()
            return None
        self._backoff.reset()
        self._tell(True)
        if not response.batches and not response.gaps and not response.more and request.wait_ms:
            if (loop.time() - began) * 1000 < request.wait_ms / 4:
                await asyncio.sleep(PAUSE_MS / 1000)
            self.wait_ms = min(request.wait_ms * 2, self._wait_ms_max)
        return response

    async def pause(self) -> None:
        """Ever longer, until there is an answer."""
        await self._backoff.wait()

    def _tell(self, connected: bool, error: UStatusError | None = None) -> None:
        if connected == self.connected:
            return
        self.connected = connected
        if error is not None:
            log.warning("the history does not answer; asking again", error=str(error))
        if self._on_connected is not None:
            self._on_connected(connected)


class CursorFile:
    """Places in a file that is replaced whole: after a crash it holds the old ones or the new ones. Both methods
    block."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def load(self) -> Places:
        """Empty if there is none. Raises UStatusError(INVALID_ARGUMENT) for what isn't a cursor: its owner decides what
        then."""
        try:
            text = self._path.read_text()
        except FileNotFoundError:
            return Places()
        try:
            return _places(json.loads(text))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            what = f"{self._path} is not a cursor file ({error}): delete it to start from the beginning"
            raise invalid(what) from None

    def save(self, places: Places) -> None:
        """Raises OSError."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        beside = self._path.with_name(f"{self._path.name}.new")
        content = {
            "positions": {incarnation.hex(): seq for incarnation, seq in places.positions.items()},
            "known": {
                incarnation.hex(): [[seq, digest.hex()] for seq, digest in known.items()]
                for incarnation, known in places.known.items()
            },
            "idle": sorted(incarnation.hex() for incarnation in places.idle),
        }
        with beside.open("w") as file:
            json.dump(content, file)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(self._path)
        folder = os.open(self._path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def _places(content: dict[str, Any]) -> Places:
    """Files of the first version have positions only."""
    positions = {bytes.fromhex(incarnation): seq for incarnation, seq in content["positions"].items()}
    known = {
        bytes.fromhex(incarnation): {seq: bytes.fromhex(digest) for seq, digest in pairs}
        for incarnation, pairs in content.get("known", {}).items()
    }
    unread = (one.hex() for one, seq in positions.items() if not seq)
    idle = set(map(bytes.fromhex, content.get("idle", unread)))
    seqs = [*positions.values(), *(seq for pairs in known.values() for seq in pairs)]
    if not all(type(seq) is int and 0 <= seq < 1 << 64 for seq in seqs):
        raise ValueError("a seq is a number from 0")
    if not all(len(incarnation) == 16 for incarnation in (*positions, *known, *idle)):
        raise ValueError("an incarnation has 16 bytes")
    return Places(positions, known, idle)


class GaplessSubscriber:
    """Every record of `topics`, once and in order, within a run; at least once across restarts (with `cursor_path`).

        async with GaplessSubscriber(client, [topic], cursor_path=path, on_gap=report) as subscriber:
            async for record in subscriber: ...

    Without a cursor it begins after `positions`, in other logs where `start` says: a PollRequest of which only `start`
    is read (default: earliest). `consumer` names a cursor with the service that holds retention while we poll. A batch
    counts as taken when the next one is asked for. `on_gap(gap)` is told what can never be read; `on_connected(bool)`
    whether the service answers. Both are called on the loop, and kept as `gaps` (counted) and `connected`. While the
    service is away it is asked again, with growing, random pauses; any other error ends the iteration. `next_batch` and
    `commit` are the plain interface below.
    `dropped`: see Acceptor.
    """

    def __init__(
        self,
        client: HistoryClient,
        topics: Sequence[UUri] = (),
        *,
        start: PollRequest | None = None,
        positions: Positions | None = None,
        consumer: str = "",
        lease_ms: int = 0,
        cursor_path: Path | str | None = None,
        max_records: int = 0,
        max_bytes: int = 0,
        wait_ms_max: int = WAIT_MS_MAX,
        on_gap: Callable[[Gap], None] | None = None,
        on_connected: Callable[[bool], None] | None = None,
        rng: random.Random | None = None,
    ) -> None:
        self._request = PollRequest(
            topics=topics, consumer=consumer, lease_ms=lease_ms, max_records=max_records, max_bytes=max_bytes
        )
        self._start = start if start is not None else PollRequest(earliest=True)
        self._file = CursorFile(Path(cursor_path)) if cursor_path is not None else None
        self._on_gap = on_gap
        self._poller = Poller(client, wait_ms_max=wait_ms_max, on_connected=on_connected, rng=rng)
        self._taken = Places(dict(positions or {}))
        self._acceptor = Acceptor(places=self._taken)
        self._queue: asyncio.Queue[Accepted | Exception] = asyncio.Queue(BATCHES_AHEAD_MAX)
        self._puller: asyncio.Task[None] | None = None
        self._handed: Accepted | None = None
        self._rest: deque[Record] = deque()
        self._saved = Places()
        self._next_save = 0.0
        self.gaps = 0

    def __repr__(self) -> str:
        state = "connected" if self.connected else "not connected"
        taken = {key.hex()[:8]: seq for key, seq in self._taken.positions.items()}
        return f"GaplessSubscriber({state}, gaps={self.gaps}, {taken=})"

    @property
    def connected(self) -> bool:
        return self._poller.connected

    @property
    def dropped(self) -> Counter[str]:
        return self._acceptor.dropped

    @property
    def positions(self) -> Positions:
        """Up to where, in each log, the application has taken everything."""
        return dict(self._taken.positions)

    async def __aenter__(self) -> Self:
        if self._file is not None:
            self._saved = await asyncio.to_thread(self._file.load)
            if self._saved.positions:
                self._taken = self._saved.copy()
                self._acceptor = Acceptor(places=self._taken)
        self._puller = asyncio.create_task(self._pull(), name="gapless subscriber")
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Stop, and keep the cursor. What was not taken comes again next time. May be called twice."""
        puller, self._puller = self._puller, None
        if puller is None:
            return
        puller.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await puller
        while not self._queue.empty():
            self._queue.get_nowait()
        self._queue.put_nowait(UStatusError(UCode.CANCELLED, "the subscriber was closed"))  # for who waits for a batch
        await self._save()

    # -- what the application sees

    async def next_batch(self) -> list[Record]:
        """Records as they come, some at once; never an empty list. The batch before counts as taken.

        Raises UStatusError if the service refuses, FAILED_PRECONDITION after `close`.
        """
        self._take_handed()
        while True:
            item = await self._next_item()
            for gap in item.gaps:
                self.gaps += 1
                if self._on_gap is not None:
                    self._on_gap(gap)
            self._handed = item
            if item.records:
                return item.records
            self._take_handed()

    async def batches(self) -> AsyncIterator[list[Record]]:
        """`next_batch` for ever."""
        while True:
            yield await self.next_batch()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Record:
        if not self._rest:
            self._rest.extend(await self.next_batch())
        return self._rest.popleft()

    async def commit(self) -> None:
        """All that was handed over is taken; the cursor is in its file when this returns."""
        self._take_handed()
        await self._save()

    def _take_handed(self) -> None:
        handed, self._handed = self._handed, None
        if handed is None:
            return
        self._taken = handed.places.copy()
        if self._rest:  # iteration by record stands in the middle of this batch
            self._handed = handed
            taken = self._taken.positions
            for record in self._rest:
                taken[record.incarnation] = min(taken.get(record.incarnation, 0), record.seq - 1)

    async def _next_item(self) -> Accepted:
        """Waits, and saves the cursor meanwhile when its time has come."""
        while True:
            if self._puller is None:
                what = "the subscriber is closed, or was never opened: use `async with`"
                raise UStatusError(UCode.FAILED_PRECONDITION, what)
            save_at = None if self._file is None or self._taken == self._saved else self._next_save
            try:
                async with asyncio.timeout_at(save_at):
                    item = await self._queue.get()
            except TimeoutError:
                await self._save()
                continue
            if isinstance(item, Exception):
                self._queue.put_nowait(item)  # whoever asks again hears it again
                raise item
            return item

    async def _save(self) -> None:
        if self._file is None or self._taken == self._saved:
            return
        taken = self._taken.copy()
        self._next_save = asyncio.get_running_loop().time() + CURSOR_SAVE_MS / 1000
        try:
            await asyncio.to_thread(self._file.save, taken)
        except OSError as error:
            log.error("the cursor can't be saved; after a restart more comes twice", error=str(error))
        else:
            self._saved = taken

    # -- pulling

    async def _pull(self) -> None:
        try:
            while True:
                response = await self._poller.poll(self._next_request())
                if response is None:
                    continue
                accepted = self._acceptor.accept(response)
                if accepted.records or accepted.gaps:
                    await self._queue.put(accepted)
                elif not self._queue.full() and accepted.places != self._taken:
                    # nothing for us, but the cursor moves on, so that retention is not held
                    self._queue.put_nowait(accepted)
        except Exception as error:
            await self._queue.put(error)

    def _next_request(self) -> PollRequest:
        request = PollRequest()
        request.CopyFrom(self._start)
        for name in ("topics", "positions", "acked", "until"):
            request.ClearField(name)
        request.MergeFrom(self._request)
        request.positions.extend(self._acceptor.places.request())
        if request.consumer:
            acked = (self._taken if self._file is None else self._saved).positions
            request.acked.extend(Position(incarnation=incarnation, seq=seq) for incarnation, seq in acked.items())
        return request


__all__ = ["CursorFile", "GaplessSubscriber", "HistoryClient", "Places", "Poller", "Positions", "Record"]
