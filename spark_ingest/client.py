"""A streamer's history for callers without an event loop: Spark's driver and its tasks.

caller's thread --submit--> event loop in a thread: transport, RPC client, HistoryClient
describe | hold | wait | read(range): the next Poll is sent while the caller decodes the previous answer
                            event loop: renews the consumer's lease between calls
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import threading
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping
from concurrent.futures import Future
from typing import Annotated, Any, Final, Literal, Self, TypeVar

import structlog
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from pydantic.alias_generators import to_camel

from history.reading.subscriber import HistoryClient
from history.records import witness
from history.records.witness import Known
from spark_ingest import epochs, offsets
from spark_ingest.epochs import FrontierRecord
from spark_ingest.offsets import LogLoss, Offset, Offsets, Range
from transports import plugin
from uprotocol import uri as uris
from uprotocol.communication import InMemoryRpcClient
from uprotocol.core.ustreamer import ids
from uprotocol.core.ustreamer.v1.ustreamer_pb2 import LogState, PollRequest, PollResponse, Position, RecordBatch
from uprotocol.status import UStatusError, invalid
from uprotocol.transport import LocalUriProvider
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.uri_pb2 import UUri

OWN_UE_TYPE: Final = 0x8004  # free for applications; each task has its own instance and so gets only its own replies
CONNECT_TIMEOUT_S: Final = 30  # enough for a distant broker with TLS
GRACE_S: Final = 2  # added to the timeout of a call before its thread is given up
AWAY_MAX_S: Final = 120  # enough for a restart with a large log; then the task fails
RETRY_S: Final = 0.2
POLL_RECORDS_MAX: Final = 10_000  # one Arrow batch: 100 bytes each make 1 MB, which every transport carries

T = TypeVar("T")
log = structlog.get_logger()


def _topics(given: object) -> object:
    return tuple(text.strip() for text in given.split(",") if text.strip()) if isinstance(given, str) else given


def _settings(given: object) -> object:
    try:
        return json.loads(given) if isinstance(given, str) else given
    except ValueError as error:
        raise ValueError(f"expected a JSON object, got {given!r}: {error}") from None


class Options(BaseModel):
    """The options of the source; in Spark in camel case (localAuthority for local_authority), case-insensitive."""

    model_config = ConfigDict(extra="forbid", frozen=True, alias_generator=to_camel, populate_by_name=True)

    transport: str
    """name of a transport plugin"""
    transport_config: Annotated[dict[str, Any], BeforeValidator(_settings)] = {}
    """its settings; as an option, JSON"""
    authority: str
    """authority of the streamer; its history service is `up://AUTHORITY/4/1/...`"""
    local_authority: str
    """our own authority, one of our network; each task uses a uEntity instance of its own, so that it gets only its
    replies"""
    topics: Annotated[tuple[str, ...], BeforeValidator(_topics)] = ()
    """UUri patterns, in a Spark option separated by commas; empty: all recorded topics"""
    starting_offsets: str = offsets.EARLIEST
    """of a new query: `earliest`, `latest`, or JSON `{"INCARNATION": SEQ}` to read everything after SEQ; also an offset
    from a checkpoint"""
    max_records_per_batch: int = Field(default=100_000, ge=1)
    """of one micro-batch, counted in seqs; records of topics that are not read count too"""
    fail_on_data_loss: bool = True
    """true: a gap ends the query with an error that has its bounds; false: the gap is logged"""
    consumer: str = ""
    """name of the cursor that keeps records from retention; each query needs its own. Default: derived from the
    options; the job derives it from its checkpoint"""
    epochs: Literal["all", "complete"] = "all"
    """`complete`: a micro-batch contains only whole epochs, of topics that have epochs; those open at its end wait.
    If one cannot be whole, the column `epoch_incomplete` has the reason"""
    epoch_timeout: float = Field(default=600.0, gt=0, allow_inf_nan=False)
    """seconds without a frontier from the keeper of a waiting epoch, after which its records are delivered as
    incomplete; must be longer than an epoch"""
    poll_timeout_ms: int = Field(default=10_000, ge=100, le=600_000)
    """time-out of one call to the history"""

    @model_validator(mode="after")
    def _can_be_asked(self) -> Self:
        for authority in (self.authority, self.local_authority):
            LocalUriProvider(authority, ids.ENTITY, ids.VERSION)
        for topic in self.topics:
            uris.parse(topic)
        offsets.parse(self.starting_offsets)
        return self

    @classmethod
    def of(cls, given: Mapping[str, str]) -> Options:
        """From Spark's options. Raises UStatusError(INVALID_ARGUMENT) with the reason."""
        names = {to_camel(name).lower(): to_camel(name) for name in cls.model_fields}
        unknown = sorted(key for key in given if key.lower() not in names)
        if unknown:
            raise invalid(
                f"format uprotocol: unknown option {', '.join(map(repr, unknown))}; known: {', '.join(names.values())}"
            )
        try:
            return cls.model_validate({names[key.lower()]: value for key, value in given.items()})
        except (ValidationError, UStatusError) as error:
            why = error.message if isinstance(error, UStatusError) else plugin.explain(error)
            raise invalid(f"format uprotocol: {why}") from None

    @property
    def consumer_name(self) -> str:
        """`consumer`, or a name derived from both authorities and the topics."""
        if self.consumer:
            return self.consumer
        digest = hashlib.sha256(json.dumps([self.local_authority, self.authority, self.topics]).encode())
        return f"spark-{digest.hexdigest()[:16]}"


class History:
    """A connection to one streamer's history. A call opens it if it was not opened yet, was closed or has failed."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._service = ids.at(options.authority)
        self._topics = [uris.parse(topic) for topic in options.topics]  # their records become rows
        self._wanted = self._topics  # and those of the frontiers
        if self._topics and options.epochs == "complete":
            self._wanted = [*self._topics, *epochs.TOPICS]
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._opened = contextlib.AsyncExitStack()  # transport and RPC client
        self._client: HistoryClient | None = None
        self._renewal: asyncio.Task[None] | None = None

    def describe(self) -> list[LogState]:
        """The present logs; `newest_match_seq` is of the wanted topics. Raises UStatusError, retryable if the streamer
        is away."""
        return self._call(lambda client: client.logs(self._wanted))

    def prove(self, seqs: Offsets, known: Mapping[str, Known]) -> tuple[dict[str, Known], dict[str, LogLoss]]:
        """Returns digests of records up to `seqs`, which identify each log, and the logs that contradict `known`."""
        if not seqs:
            return {}, {}
        asked = _at(self._wanted, Offset(seqs, dict(known)))
        response = self._call(lambda client: client.poll(asked))
        learned = {
            begin.incarnation.hex(): witness.learn(known.get(begin.incarnation.hex(), {}), begin)
            for begin in response.begin
            if begin.incarnation.hex() in seqs
        }
        return learned, {loss.incarnation: loss for loss in _losses(response) if loss.went_back}

    def hold(self, acked: Offset) -> None:
        """Set the consumer's cursor, so that the history keeps records after `acked`. Renew its lease until `close`.

        `acked` must name every log, with 0 if nothing was read: the records of a log that is not named are not kept.
        """
        request = _at(self._wanted, acked)
        request.consumer = self._options.consumer_name
        request.acked.extend(request.positions)

        async def hold(client: HistoryClient) -> None:
            lease_ms = (await client.poll(request)).lease_ms
            if self._renewal is not None:
                self._renewal.cancel()
            self._renewal = asyncio.create_task(self._renew(request, lease_ms)) if lease_ms else None

        self._call(hold)

    def wait(self, start: Offset, wait_ms: int) -> None:
        """Wait until there are records after `start`, at most `wait_ms`."""
        asked = PollRequest(topics=self._wanted, positions=_positions(start), earliest=True, max_records=1)
        asked.wait_ms = wait_ms
        self._call(lambda client: client.poll(asked))

    def snapshot(self, seqs: Offsets) -> list[FrontierRecord]:
        """Returns the latest frontier of each keeper at these positions."""
        asked = _at(epochs.TOPICS, Offset(seqs))
        return list(epochs.frontier_records(self._call(lambda client: client.frontiers(asked))))

    def frontiers(self, range: Range) -> tuple[list[FrontierRecord], bool]:
        """Returns the frontiers in `range`, and whether any of them are lost."""
        found: list[FrontierRecord] = []
        position, known, is_lossy = range.after, dict(range.known), False
        while position < range.until:
            response = self._wait(self._ask(epochs.TOPICS, range, position, known))
            losses = [loss for loss in _losses(response, range) if loss.after < range.until]
            is_lossy = is_lossy or bool(losses)
            found += epochs.frontier_records(
                one for one in response.batches if one.incarnation.hex() == range.incarnation
            )
            before, position = position, _next(response, range, position, lambda _: None)
            if position == before:
                break
        return found, is_lossy or position < range.until

    def read(self, range: Range, on_loss: Callable[[LogLoss], None]) -> Iterator[RecordBatch]:
        """The matching records of `range`, in log order; the same ones at each call, while the history has them.

        Calls `on_loss` with each loss; it may raise. If the streamer is away, tries again for AWAY_MAX_S, then raises
        UStatusError(UNAVAILABLE). If the log went back, yields the records that it has in this range now.
        """
        position, known, deadline = range.after, dict(range.known), time.monotonic() + AWAY_MAX_S
        is_back = False
        ahead: Future[PollResponse] | None = None
        try:
            while position < range.until:
                try:
                    response, ahead = self._wait(ahead or self._ask(self._topics, range, position, known)), None
                except UStatusError as error:
                    ahead = None
                    if not error.retryable or time.monotonic() > deadline:
                        raise
                    who = self._options.authority
                    log.warning("the streamer is away; trying again", authority=who, error=str(error))
                    time.sleep(RETRY_S)
                    continue
                # `next` names every log of the streamer
                if all(position.incarnation.hex() != range.incarnation for position in response.next):
                    on_loss(LogLoss(range.incarnation, position, 0))
                    return
                back = next((loss for loss in _losses(response, range) if loss.went_back), None)
                if back is not None:
                    if is_back:
                        return  # it ends before this range
                    on_loss(back)
                    is_back, known = True, {}
                    continue  # the records of this answer may begin before the range
                before = position
                position = _next(response, range, position, on_loss)
                if position == before:
                    if is_back:
                        return
                    if time.monotonic() > deadline:
                        what = f"expected records after {before} of {range}, got none for {AWAY_MAX_S} s"
                        raise UStatusError(UCode.UNAVAILABLE, what)
                    time.sleep(RETRY_S)
                    continue
                deadline = time.monotonic() + AWAY_MAX_S
                if position < range.until:
                    ahead = self._ask(self._topics, range, position, known)
                yield from (
                    batch for batch in response.batches if batch.incarnation.hex() == range.incarnation and batch.seq
                )
        finally:
            if ahead is not None:
                ahead.cancel()

    def close(self) -> None:
        """Close the connection and end the thread. May be called twice."""
        loop, thread = self._loop, self._thread
        if loop is None or thread is None:
            return
        with contextlib.suppress(UStatusError, TimeoutError):
            closing = asyncio.run_coroutine_threadsafe(self._close(), loop)
            closing.result(self._options.poll_timeout_ms / 1000 + GRACE_S)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
        self._loop = self._thread = self._client = None

    def _ask(self, topics: Iterable[UUri], range: Range, after: int, known: Known) -> Future[PollResponse]:
        incarnation = bytes.fromhex(range.incarnation)
        request = PollRequest(
            topics=topics,
            positions=[witness.position(incarnation, after, known)],
            until=[Position(incarnation=incarnation, seq=range.until)],
            latest=True,  # no records of other logs
            max_records=POLL_RECORDS_MAX,
        )
        return self._submit(lambda client: client.poll(request))

    def _call(self, call: Callable[[HistoryClient], Coroutine[Any, Any, T]]) -> T:
        return self._wait(self._submit(call))

    def _submit(self, call: Callable[[HistoryClient], Coroutine[Any, Any, T]]) -> Future[T]:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(target=self._loop.run_forever, name="uprotocol-history", daemon=True)
            self._thread.start()
        return asyncio.run_coroutine_threadsafe(self._run(call), self._loop)

    def _wait(self, future: Future[T]) -> T:
        """Returns the answer. After a failure that may pass, the next call opens a new connection."""
        limit_s = CONNECT_TIMEOUT_S + self._options.poll_timeout_ms / 1000 + GRACE_S
        try:
            return future.result(limit_s)
        except TimeoutError:
            future.cancel()
            self.close()
            why = f"no answer from {self._options.authority} within {limit_s:g} s"
            raise UStatusError(UCode.DEADLINE_EXCEEDED, why) from None
        except UStatusError as error:
            if error.retryable:
                self.close()
            raise

    async def _run(self, call: Callable[[HistoryClient], Coroutine[Any, Any, T]]) -> T:
        if self._client is None:
            options = self._options
            instance = 1 + int.from_bytes(os.urandom(4), "big") % 0xFFFE  # neither 0 nor the wildcard
            local = LocalUriProvider(options.local_authority, instance << 16 | OWN_UE_TYPE, 1)
            transport = plugin.create(options.transport, options.transport_config, local)
            self._opened.push_async_callback(transport.close)  # also if `open` fails halfway
            try:
                async with asyncio.timeout(CONNECT_TIMEOUT_S):
                    await transport.open()
                    rpc = await self._opened.enter_async_context(InMemoryRpcClient(transport, local))
            except TimeoutError:
                why = f"no connection over {options.transport} in {CONNECT_TIMEOUT_S} s"
                raise UStatusError(UCode.UNAVAILABLE, why) from None
            self._client = HistoryClient(rpc, self._service, timeout_ms=options.poll_timeout_ms)
        return await call(self._client)

    async def _renew(self, request: PollRequest, lease_ms: int) -> None:
        """Renew the lease of the latest `hold`: Spark may make no call for the length of a trigger."""
        while True:
            await asyncio.sleep(lease_ms / 3000)
            try:
                if self._client is not None:
                    await self._client.poll(request)
            except UStatusError as error:
                log.warning("the consumer's lease could not be renewed", consumer=request.consumer, error=str(error))
                if error.code == UCode.PERMISSION_DENIED:
                    return  # another consumer has taken the name: the next batch will report it

    async def _close(self) -> None:
        if self._renewal is not None:
            self._renewal.cancel()
            await asyncio.wait([self._renewal])
            self._renewal = None
        await self._opened.aclose()


def _next(response: PollResponse, range: Range, after: int, on_loss: Callable[[LogLoss], None]) -> int:
    """Returns the seq after which to read on; reports the losses of `response`."""
    position = max([after, *(one.seq for one in response.next if one.incarnation.hex() == range.incarnation)])
    for loss in _losses(response, range):
        if loss.after < range.until:
            on_loss(LogLoss(range.incarnation, max(loss.after, after), min(loss.before, range.until + 1)))
            position = max(position, loss.before - 1)
    return position


def _losses(response: PollResponse, range: Range | None = None) -> Iterator[LogLoss]:
    """The losses in an answer, of all logs or of the log of `range`."""
    losses = (LogLoss(gap.incarnation.hex(), gap.after_seq, gap.before_seq) for gap in response.gaps)
    return (loss for loss in losses if range is None or loss.incarnation == range.incarnation)


def _positions(offset: Offset) -> list[Position]:
    return [witness.position(bytes.fromhex(name), seq, offset.known.get(name, {})) for name, seq in offset.seqs.items()]


def _at(topics: Iterable[UUri], offset: Offset) -> PollRequest:
    """A poll that reads nothing: it ends where it begins."""
    at = _positions(offset)
    return PollRequest(topics=topics, positions=at, until=at, latest=True, max_records=1)
