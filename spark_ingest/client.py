"""Histories for callers without an event loop: Spark's planner and its tasks.

caller's thread --run--> event loop in a thread: transport, RPC client, one HistoryClient for each streamer
shared(options): tasks of one worker use one session after the other; it is closed some time after the last one
read(range): the next Poll is under way while the caller decodes the answer before
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import threading
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator
from concurrent.futures import Future
from typing import Any, Final, TypeVar

import structlog

from history.reading.client import HistoryClient
from history.records import witness
from history.records.witness import Known
from spark_ingest.offsets import SEQ_MAX, LogLoss, Range
from spark_ingest.options import Options
from transports import plugin
from uprotocol import uri as uris
from uprotocol.cache import Cache
from uprotocol.communication import InMemoryRpcClient
from uprotocol.core.ustreamer import ids
from uprotocol.core.ustreamer.v1.ustreamer_pb2 import Gap, PollRequest, PollResponse, Position, RecordBatch
from uprotocol.status import UStatusError
from uprotocol.transport import LocalUriProvider, UTransport
from uprotocol.v1.uattributes_pb2 import UAttributes
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.umessage_pb2 import UMessage

OWN_UE_TYPE: Final = 0x8004  # free for applications; each session has its own instance and so gets only its own replies
CONNECT_TIMEOUT_S: Final = 30  # enough for a distant broker with TLS
GRACE_S: Final = 2  # added to the timeout of a call before its thread is given up
AWAY_MAX_S: Final = 120  # enough for a restart with a large log; then the task fails
SPARK_RETRY_S: Final = 0.2
REOPEN_S: Final = 0.5  # between the attempts of all calls together to open a connection
POLL_RECORDS_MAX: Final = 10_000  # one Arrow batch: 100 bytes each make 1 MB, which every transport carries
SESSION_IDLE_S: Final = 60.0  # as long as Spark keeps an idle Python worker
SOURCES_CACHED_MAX: Final = 10_000

T = TypeVar("T")
OnLoss = Callable[[LogLoss, str], None]
"""Called with a loss and the authority of its streamer; may raise."""
OnRangeLoss = Callable[[LogLoss, Range], None]

log = structlog.get_logger()


class HistorySession:
    """One connection, on an event loop in a thread, to the histories of all streamers of a network. Opened by the first
    call. After a failure of most streamers it is opened anew, since then the network is what failed."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._opened = contextlib.AsyncExitStack()
        self._rpc: InMemoryRpcClient | None = None
        self._opening: asyncio.Lock | None = None
        self._closed_until_s = 0.0  # monotonic; until then the network is as it was at the last attempt:
        self._closed_by: UStatusError | None = None
        self._clients: dict[str, HistoryClient] = {}
        self._failed: set[str] = set()  # authorities, since any of them has answered
        self.on_open: list[Callable[[UTransport, LocalUriProvider], Coroutine[Any, Any, None]]] = []

    # -- from any thread

    def run(self, call: Coroutine[Any, Any, T]) -> T:
        return self.submit(call).result()

    def submit(self, call: Coroutine[Any, Any, T]) -> Future[T]:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(target=self._loop.run_forever, name="uprotocol-history", daemon=True)
            self._thread.start()
        return asyncio.run_coroutine_threadsafe(call, self._loop)

    def close(self) -> None:
        """Close the connection and end the thread. May be called twice."""
        loop, thread = self._loop, self._thread
        if loop is None or thread is None:
            return
        with contextlib.suppress(UStatusError, TimeoutError):
            self.submit(self.shut()).result(self.call_limit_s)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
        self._loop = self._thread = None

    @property
    def call_limit_s(self) -> float:
        """The longest time that one call may take, a new connection included."""
        return CONNECT_TIMEOUT_S + self.options.poll_timeout_ms / 1000 + GRACE_S

    # -- on the loop

    async def shut(self) -> None:
        self._clients.clear()
        self._failed.clear()
        self._rpc = None
        opened, self._opened = self._opened, contextlib.AsyncExitStack()
        await opened.aclose()

    async def call(self, authority: str, ask: Callable[[HistoryClient], Coroutine[Any, Any, T]]) -> T:
        """Ask the history of `authority`. Raises UStatusError, which names the authority."""
        client: HistoryClient | None = None
        try:
            client = self._clients.get(authority) or await self._client(authority)
            answer = await ask(client)
        except UStatusError as error:
            code = UCode.UNAVAILABLE if error.code == UCode.CANCELLED else error.code  # the session was opened anew
            failed = UStatusError(code, f"{authority}: {error.message}")
            if failed.retryable and client is not None and self._clients.get(authority) is client:
                self._failed.add(authority)
                if 2 * len(self._failed) > len(self._clients):
                    await self.shut()
            raise failed from None
        self._failed.clear()
        return answer

    async def open(self) -> InMemoryRpcClient:
        """Open the connection, if it is not. Calls that wait for the same attempt fail with it. Raises UStatusError."""
        if self._opening is None:
            self._opening = asyncio.Lock()
        async with self._opening:
            if self._rpc is None:
                if self._closed_by is not None and time.monotonic() < self._closed_until_s:
                    raise UStatusError.from_status(self._closed_by.status)
                try:
                    self._rpc = await self._opened_rpc()
                except UStatusError as error:
                    self._closed_until_s, self._closed_by = time.monotonic() + REOPEN_S, error
                    raise
            return self._rpc

    async def _client(self, authority: str) -> HistoryClient:
        client = HistoryClient(await self.open(), ids.at(authority), timeout_ms=self.options.poll_timeout_ms)
        return self._clients.setdefault(authority, client)

    async def _opened_rpc(self) -> InMemoryRpcClient:
        options = self.options
        instance = 1 + int.from_bytes(os.urandom(4), "big") % 0xFFFE  # neither 0 nor the wildcard
        local = LocalUriProvider(options.local_authority, instance << 16 | OWN_UE_TYPE, 1)
        transport = plugin.create(options.transport, options.transport_settings, local)
        self._opened.push_async_callback(transport.close)  # also if `open` fails halfway
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                await transport.open()
                rpc = await self._opened.enter_async_context(InMemoryRpcClient(transport, local))
                for opened in self.on_open:
                    await opened(transport, local)
        except TimeoutError:
            await self.shut()
            why = f"no connection over {options.transport} in {CONNECT_TIMEOUT_S} s"
            raise UStatusError(UCode.UNAVAILABLE, why) from None
        except BaseException:
            await self.shut()
            raise
        return rpc


# -- sessions of tasks


_idle: Final[list[tuple[str, HistorySession, float]]] = []
"""Sessions that are kept between tasks: their `_key`, and the time of their last use."""
_idle_lock: Final = threading.Lock()
os.register_at_fork(after_in_child=_idle.clear)  # a forked worker has no threads of its parent


@contextlib.contextmanager
def shared(options: Options) -> Iterator[HistorySession]:
    """A session that the tasks of this process use one after the other. It is closed when it has been idle for
    SESSION_IDLE_S."""
    key = _key(options)
    with _idle_lock:
        found = next((one for one in reversed(_idle) if one[0] == key), None)
        if found is not None:
            _idle.remove(found)
    session = HistorySession(options) if found is None else found[1]
    session.options = options
    try:
        yield session
    except BaseException:
        session.close()
        raise
    with _idle_lock:
        _idle.append((key, session, time.monotonic()))
    timer = threading.Timer(SESSION_IDLE_S, _close_idle)
    timer.daemon = True
    timer.start()


def _key(options: Options) -> str:
    return json.dumps([options.transport, options.transport_settings, options.local_authority], sort_keys=True)


def _close_idle() -> None:
    since = time.monotonic() - SESSION_IDLE_S + 0.1
    with _idle_lock:
        closing = [one for one in _idle if one[2] <= since]
        for one in closing:
            _idle.remove(one)
    for _, session, _ in closing:
        session.close()


# -- reading


def read(session: HistorySession, ranges: Iterable[Range], on_loss: OnRangeLoss) -> Iterator[tuple[Range, RecordBatch]]:
    """The matching records of each range, in log order; the same ones at each call, while the histories have them.

    Calls `on_loss` with each loss. If a streamer is away, tries again for AWAY_MAX_S, then raises
    UStatusError(UNAVAILABLE). If a log went back, yields the records that it has in this range now.
    """
    reading = [_Reading(session, one, on_loss) for one in ranges]
    try:
        for one, following in zip(reading, [*reading[1:], None], strict=True):
            one.ask()
            if following is not None:
                following.ask()
            for batch in one.batches():
                if one.range.delivered or one.range.coverage is not None:
                    batch = _without_delivered(batch, one.range)
                if batch.seq:
                    yield one.range, batch
    finally:
        for one in reading:
            one.cancel()


class _Reading:
    def __init__(self, session: HistorySession, range: Range, on_loss: OnRangeLoss) -> None:
        self._session, self.range, self._on_loss = session, range, on_loss
        self._topics = [uris.parse(topic) for topic in range.topics]
        self._position, self._known = range.after, dict(range.known)
        self._ahead: Future[PollResponse] | None = None

    def ask(self) -> None:
        """Send the next Poll, unless it is under way."""
        if self._ahead is None:
            asked = range_poll(self._topics, self.range, self._position, self._known)
            call = self._session.call(self.range.authority, lambda client: client.poll(asked))
            self._ahead = self._session.submit(call)

    def cancel(self) -> None:
        if self._ahead is not None:
            self._ahead.cancel()

    def _answer(self) -> PollResponse:
        self.ask()
        assert self._ahead is not None, "it was just asked"
        ahead, self._ahead = self._ahead, None
        limit_s = self._session.call_limit_s
        try:
            return ahead.result(limit_s)
        except TimeoutError:
            ahead.cancel()
            why = f"no answer from {self.range.authority} within {limit_s:g} s"
            raise UStatusError(UCode.DEADLINE_EXCEEDED, why) from None

    def batches(self) -> Iterator[RecordBatch]:
        range, is_back, deadline = self.range, False, time.monotonic() + AWAY_MAX_S
        while self._position < range.until:
            try:
                response = self._answer()
            except UStatusError as error:
                if not error.retryable or time.monotonic() > deadline:
                    raise
                log.warning("the streamer is away; trying again", authority=range.authority, error=str(error))
                time.sleep(SPARK_RETRY_S)
                continue
            # `next` names every log of the streamer
            if all(position.incarnation.hex() != range.incarnation for position in response.next):
                self._on_loss(LogLoss(range.incarnation, self._position, 0, Gap.REASON_INCARNATION), range)
                return
            back = next((loss for loss in losses(response, self._known, range.incarnation) if loss.went_back), None)
            if back is not None:
                if is_back:
                    return  # it ends before this range
                self._on_loss(back, range)
                is_back, self._known = True, {}
                continue  # the records of this answer may begin before the range
            before, self._position = self._position, self._next(response)
            if self._position == before:
                if is_back:
                    return
                if time.monotonic() > deadline:
                    what = f"expected records after {before} of {range}, got none for {AWAY_MAX_S} s"
                    raise UStatusError(UCode.UNAVAILABLE, what)
                time.sleep(SPARK_RETRY_S)
                continue
            deadline = time.monotonic() + AWAY_MAX_S
            if self._position < range.until:
                self.ask()
            yield from (batch for batch in response.batches if batch.incarnation.hex() == range.incarnation)

    def _next(self, response: PollResponse) -> int:
        """Returns the seq after which to read on; reports the losses of `response`."""
        range, after = self.range, self._position
        position = max([after, *(one.seq for one in response.next if one.incarnation.hex() == range.incarnation)])
        for loss in losses(response, self._known, range.incarnation):
            if loss.after < range.until:
                low, high = max(loss.after, after), min(loss.before, range.until + 1)
                self._on_loss(LogLoss(range.incarnation, low, high, loss.reason), range)
                position = max(position, loss.before - 1)
        return position


def range_poll(topics: Iterable[Any], range: Range, after: int, known: Known) -> PollRequest:
    """Returns the poll that reads on in `range`."""
    incarnation = bytes.fromhex(range.incarnation)
    return PollRequest(
        topics=topics,
        positions=[witness.position(incarnation, after, known)],
        until=[Position(incarnation=incarnation, seq=range.until)],
        latest=True,  # no records of other logs
        max_records=POLL_RECORDS_MAX,
    )


def losses(response: PollResponse, known: Known, incarnation: str) -> Iterator[LogLoss]:
    """The losses of one log in an answer. `known`: digests of its records that were sent."""
    for gap in response.gaps:
        if gap.incarnation.hex() == incarnation:
            is_beyond = not any(seq >= gap.before_seq for seq in known)
            yield LogLoss(incarnation, gap.after_seq, gap.before_seq, gap.reason, is_beyond)


def _without_delivered(batch: RecordBatch, range: Range) -> RecordBatch:
    """Returns the records of a batch that were not delivered before, and are to be delivered by this range."""
    seen: Cache[bytes, int] = Cache(SOURCES_CACHED_MAX)  # by source: up to which seq it was delivered
    chosen = list[int]()
    for index, (seq, data) in enumerate(zip(batch.seq, batch.message, strict=True)):
        attributes: UAttributes = UMessage.FromString(data).attributes
        key = attributes.source.SerializeToString()
        until = seen.get(key)
        if until is None:
            source = attributes.source
            until = max((seq for coverage, seq in range.delivered if coverage.has(source)), default=0)
            until = until if range.coverage is None or range.coverage.has(source) else SEQ_MAX
            seen[key] = until
        if seq > until:
            chosen.append(index)
    if len(chosen) == len(batch.seq):
        return batch
    made = RecordBatch(incarnation=batch.incarnation, origin_incarnation=batch.origin_incarnation, epochs=batch.epochs)
    for column in ("seq", "prev_seq", "time_ms", "message", "origin", "origin_seq", "epoch"):
        values = getattr(batch, column)
        getattr(made, column).extend([values[index] for index in chosen] if values else [])
    return made
