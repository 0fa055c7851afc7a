"""A streamer's history for callers without an event loop: Spark's driver and its tasks.

caller's thread --submit--> own loop in one thread: transport, RPC client, HistoryClient
describe | hold | wait | read(range): the next Poll is under way while the caller decodes this one
                  own loop: the consumer's lease is renewed while nobody calls
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
from spark_ingest.epochs import Told
from spark_ingest.offsets import LogState, Loss, Offset, Offsets, Range
from transports import plugin
from uprotocol import uri as uris
from uprotocol.communication import InMemoryRpcClient
from uprotocol.core.ustreamer import ids
from uprotocol.core.ustreamer.v1.ustreamer_pb2 import PollRequest, PollResponse, Position, RecordBatch
from uprotocol.status import UStatusError, invalid
from uprotocol.transport import LocalUriProvider
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.uri_pb2 import UUri

OWN_UE_TYPE: Final = 0x8004  # free for applications; each task is an instance of its own, and hears its own replies
CONNECT_TIMEOUT_MS: Final = 30_000  # a broker far away, with TLS; beyond it nobody is there
GRACE_MS: Final = 2_000  # what a call may take beyond its own timeout before its thread is given up
AWAY_MAX_MS: Final = 120_000  # a restart with a large log is over by then; after it the task fails
RETRY_MS: Final = 200
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
    """What the source is told, spelled as Spark's options (localAuthority for local_authority; case doesn't matter)."""

    model_config = ConfigDict(extra="forbid", frozen=True, alias_generator=to_camel, populate_by_name=True)

    transport: str
    """name of a transport plugin"""
    transport_config: Annotated[dict[str, Any], BeforeValidator(_settings)] = {}
    """its settings; as an option, JSON"""
    authority: str
    """the streamer's authority; asked is `up://AUTHORITY/4/1/...`"""
    local_authority: str
    """our own, of the network that we are on; each task adds a uEntity instance of its own, so that replies don't
    mix"""
    topics: Annotated[tuple[str, ...], BeforeValidator(_topics)] = ()
    """UUri patterns, as an option separated by commas. None: all that is recorded"""
    starting_offsets: str = offsets.EARLIEST
    """of a new query: `earliest`, `latest`, or JSON `{"INCARNATION": SEQ}`: everything after SEQ; what stands in a
    checkpoint will do, too"""
    max_records_per_batch: int = Field(default=100_000, ge=1)
    """of one micro-batch, counted in seqs: topics that aren't read count too"""
    fail_on_data_loss: bool = True
    """whether a gap ends the query, with its bounds in the error, or is logged"""
    consumer: str = ""
    """name of the cursor that holds the history's retention; give each query its own. Without it, made from the
    options; the job makes it from its checkpoint"""
    epochs: Literal["all", "complete"] = "all"
    """`complete`: a micro-batch has whole epochs only, of topics that have any; what is open at its end waits. The
    column `epoch_incomplete` tells which are not whole all the same"""
    epoch_timeout: float = Field(default=600.0, gt=0, allow_inf_nan=False)
    """seconds without a word of who keeps an epoch that waits, after which what there is of it is handed over as
    incomplete: longer than an epoch"""
    poll_timeout_ms: int = Field(default=10_000, ge=100, le=600_000)
    """of one call to the history"""

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
        """From Spark's options. Raises UStatusError(INVALID_ARGUMENT) that names what is wrong."""
        names = {to_camel(name).lower(): to_camel(name) for name in cls.model_fields}
        unknown = sorted(key for key in given if key.lower() not in names)
        if unknown:
            raise invalid(
                f"format uprotocol has no option {', '.join(map(repr, unknown))}; it has {', '.join(names.values())}"
            )
        try:
            return cls.model_validate({names[key.lower()]: value for key, value in given.items()})
        except (ValidationError, UStatusError) as error:
            why = error.message if isinstance(error, UStatusError) else plugin.explain(error)
            raise invalid(f"format uprotocol: {why}") from None

    @property
    def consumer_name(self) -> str:
        """`consumer`, or a name made of what is read, by whom and from where."""
        if self.consumer:
            return self.consumer
        digest = hashlib.sha256(json.dumps([self.local_authority, self.authority, self.topics]).encode())
        return f"spark-{digest.hexdigest()[:16]}"


class History:
    """A connection to one streamer's history. Opens with the first call, and anew once it was closed or has failed."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._service = ids.at(options.authority)
        self._topics = [uris.parse(topic) for topic in options.topics]  # whose records are rows
        self._wanted = self._topics  # of all that is read
        if self._topics and options.epochs == "complete":
            self._wanted = [*self._topics, *epochs.TOPICS]
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._opened = contextlib.AsyncExitStack()  # transport and RPC client
        self._client: HistoryClient | None = None
        self._renewal: asyncio.Task[None] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def describe(self) -> list[LogState]:
        """The logs as they are now. Raises UStatusError, retryable if the streamer is away."""
        return offsets.logs_of(self._call(lambda client: client.logs(self._wanted)))

    def prove(self, seqs: Offsets, known: Mapping[str, Known]) -> tuple[dict[str, Known], dict[str, Loss]]:
        """What is known of each log with the record at `seqs`, and which logs are not what was `known` any more."""
        if not seqs:
            return {}, {}
        at = _positions(Offset(seqs, dict(known)))
        asked = PollRequest(topics=self._wanted, positions=at, until=at, latest=True, max_records=1)
        response = self._call(lambda client: client.poll(asked))
        learned = {
            begin.incarnation.hex(): witness.learn(known.get(begin.incarnation.hex(), {}), begin)
            for begin in response.begin
            if begin.incarnation.hex() in seqs
        }
        return learned, {loss.incarnation: loss for loss in _losses(response) if loss.went_back}

    def hold(self, acked: Offset) -> None:
        """Let the consumer's cursor keep what comes after `acked`, no more. Its lease is renewed until `close`.

        `acked` names every log that there is, with 0 where nothing was read: else what is in it now isn't kept.
        """
        positions = _positions(acked)
        request = PollRequest(
            topics=self._wanted,
            positions=positions,
            until=positions,  # nothing is read
            consumer=self._options.consumer_name,
            acked=positions,
            max_records=1,
        )
        response = self._call(lambda client: client.poll(request))
        assert self._loop is not None, "the call above made it"
        asyncio.run_coroutine_threadsafe(self._renew(request, response.lease_ms), self._loop).result()

    def wait(self, start: Offset, wait_ms: int) -> None:
        """Until there is something to read after `start`, but no longer than `wait_ms`."""
        after = _positions(start)
        asked = PollRequest(topics=self._wanted, positions=after, earliest=True, max_records=1, wait_ms=wait_ms)
        self._call(lambda client: client.poll(asked))

    def snapshot(self, seqs: Offsets) -> list[Told]:
        """How far epochs have come at these places: what was told last of each keeper."""
        at = _positions(Offset(seqs))
        asked = PollRequest(topics=epochs.TOPICS, positions=at, until=at, latest=True, max_records=1)
        return list(epochs.told_of(self._call(lambda client: client.frontiers(asked))))

    def told(self, range: Range) -> tuple[list[Told], bool]:
        """What is told of epochs in `range`, and whether any of its records are gone."""
        found: list[Told] = []
        position, known, is_lossy = range.after, dict(range.known), False
        while position < range.until:
            asked = self._range(epochs.TOPICS, range, position, known)
            response = self._call(lambda client, asked=asked: client.poll(asked))  # type: ignore[misc]
            losses = [loss for loss in _losses(response, range) if loss.after < range.until]
            is_lossy = is_lossy or bool(losses)
            found += epochs.told_of(one for one in response.batches if one.incarnation.hex() == range.incarnation)
            before, position = position, _next(response, range, position, lambda _: None)
            if position == before:
                break
        return found, is_lossy or position < range.until

    def read(self, range: Range, on_loss: Callable[[Loss], None]) -> Iterator[RecordBatch]:
        """The records of `range` that match, in log order; the same ones each time, as long as they are there.

        `on_loss` is told what is gone, and may raise. A streamer that is away is waited for: AWAY_MAX_MS, then
        UStatusError(UNAVAILABLE). Of a log that went back comes what it has in this range now.
        """
        position, known, deadline = range.after, dict(range.known), _now_ms() + AWAY_MAX_MS
        is_back = False
        ahead: Future[PollResponse] | None = None
        try:
            while position < range.until:
                try:
                    response, ahead = self._wait(ahead or self._ask(range, position, known)), None
                except UStatusError as error:
                    ahead = None
                    if not error.retryable or _now_ms() > deadline:
                        raise
                    who = self._options.authority
                    log.warning("the streamer is away; trying again", authority=who, error=str(error))
                    self.close()
                    time.sleep(RETRY_MS / 1000)
                    continue
                # which names every log that there is
                if all(place.incarnation.hex() != range.incarnation for place in response.next):
                    on_loss(Loss(range.incarnation, position, 0))
                    return
                back = next((loss for loss in _losses(response, range) if loss.went_back), None)
                if back is not None:
                    if is_back:
                        return  # it doesn't reach as far as this
                    on_loss(back)
                    is_back, known = True, {}
                    continue  # what this answer has may begin before the range
                before = position
                position = _next(response, range, position, on_loss)
                if position == before:
                    if is_back:
                        return
                    if _now_ms() > deadline:
                        what = f"expected records after {before} of {range}, got none for {AWAY_MAX_MS} ms"
                        raise UStatusError(UCode.UNAVAILABLE, what)
                    time.sleep(RETRY_MS / 1000)
                    continue
                deadline = _now_ms() + AWAY_MAX_MS
                if position < range.until:
                    ahead = self._ask(range, position, known)
                yield from (
                    batch for batch in response.batches if batch.incarnation.hex() == range.incarnation and batch.seq
                )
        finally:
            if ahead is not None:
                ahead.cancel()

    def close(self) -> None:
        """Leave the network and end the thread. May be called twice."""
        loop, thread = self._loop, self._thread
        if loop is None or thread is None:
            return
        limit_ms = self._options.poll_timeout_ms + GRACE_MS
        with contextlib.suppress(UStatusError, TimeoutError):
            asyncio.run_coroutine_threadsafe(self._close(), loop).result(limit_ms / 1000)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
        self._loop = self._thread = self._client = None

    def _ask(self, range: Range, after: int, known: Known) -> Future[PollResponse]:
        request = self._range(self._topics, range, after, known)
        return self._submit(lambda client: client.poll(request))

    def _range(self, topics: Iterable[UUri], range: Range, after: int, known: Known) -> PollRequest:
        incarnation = bytes.fromhex(range.incarnation)
        return PollRequest(
            topics=topics,
            positions=[witness.position(incarnation, after, known)],
            until=[Position(incarnation=incarnation, seq=range.until)],
            latest=True,  # of the other logs nothing
            max_records=POLL_RECORDS_MAX,
        )

    def _call(self, call: Callable[[HistoryClient], Coroutine[Any, Any, T]]) -> T:
        try:
            return self._wait(self._submit(call))
        except UStatusError as error:
            if error.retryable:
                self.close()  # whatever is stuck, the next call starts anew
            raise

    def _submit(self, call: Callable[[HistoryClient], Coroutine[Any, Any, T]]) -> Future[T]:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(target=self._loop.run_forever, name="uprotocol-history", daemon=True)
            self._thread.start()
        return asyncio.run_coroutine_threadsafe(self._run(call), self._loop)

    def _wait(self, future: Future[T]) -> T:
        limit_ms = CONNECT_TIMEOUT_MS + self._options.poll_timeout_ms + GRACE_MS
        try:
            return future.result(limit_ms / 1000)
        except TimeoutError:
            future.cancel()
            why = f"no answer from {self._options.authority} within {limit_ms} ms"
            raise UStatusError(UCode.DEADLINE_EXCEEDED, why) from None

    async def _run(self, call: Callable[[HistoryClient], Coroutine[Any, Any, T]]) -> T:
        if self._client is None:
            try:
                async with asyncio.timeout(CONNECT_TIMEOUT_MS / 1000):
                    self._client = await self._open()
            except TimeoutError:
                why = f"no connection over {self._options.transport} in {CONNECT_TIMEOUT_MS} ms"
                raise UStatusError(UCode.UNAVAILABLE, why) from None
        return await call(self._client)

    async def _open(self) -> HistoryClient:
        instance = 1 + int.from_bytes(os.urandom(4), "big") % 0xFFFE  # neither 0 nor the wildcard
        local = LocalUriProvider(self._options.local_authority, instance << 16 | OWN_UE_TYPE, 1)
        transport = plugin.create(self._options.transport, self._options.transport_config, local)
        self._opened.push_async_callback(transport.close)  # also what opened halfway
        await transport.open()
        rpc = await self._opened.enter_async_context(InMemoryRpcClient(transport, local))
        return HistoryClient(rpc, self._service, timeout_ms=self._options.poll_timeout_ms)

    async def _renew(self, request: PollRequest, lease_ms: int) -> None:
        """Keep the lease of the latest `hold` alive: Spark may be silent for the length of a trigger."""
        if self._renewal is not None:
            self._renewal.cancel()
        self._renewal = asyncio.create_task(self._renewing(request, lease_ms)) if lease_ms else None

    async def _renewing(self, request: PollRequest, lease_ms: int) -> None:
        while True:
            await asyncio.sleep(lease_ms / 3000)
            try:
                if self._client is not None:
                    await self._client.poll(request)
            except UStatusError as error:
                log.warning("the consumer's lease could not be renewed", consumer=request.consumer, error=str(error))
                if error.code == UCode.PERMISSION_DENIED:
                    return  # another one has the name now: the next batch tells it, asking on tells nobody

    async def _close(self) -> None:
        if self._renewal is not None:
            self._renewal.cancel()
            await asyncio.wait([self._renewal])
            self._renewal = None
        await self._opened.aclose()


def _next(response: PollResponse, range: Range, after: int, on_loss: Callable[[Loss], None]) -> int:
    """Where to go on after `response`."""
    position = max([after, *(place.seq for place in response.next if place.incarnation.hex() == range.incarnation)])
    for loss in _losses(response, range):
        if loss.after < range.until:
            on_loss(Loss(range.incarnation, max(loss.after, after), min(loss.before, range.until + 1)))
            position = max(position, loss.before - 1)
    return position


def _losses(response: PollResponse, range: Range | None = None) -> Iterator[Loss]:
    """What an answer says is gone, of all logs or of that of `range`."""
    losses = (Loss(gap.incarnation.hex(), gap.after_seq, gap.before_seq) for gap in response.gaps)
    return (loss for loss in losses if range is None or loss.incarnation == range.incarnation)


def _positions(places: Offset) -> list[Position]:
    return [witness.position(bytes.fromhex(name), seq, places.known.get(name, {})) for name, seq in places.seqs.items()]


def _now_ms() -> int:
    return time.monotonic_ns() // 1_000_000
