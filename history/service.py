"""core.ustreamer: the history on the wire (Describe, Poll), over any transport.

request -> checked -> places: one per log -> collect: scan, gaps -> reply with `next`
                           ^                        | nothing yet
                           '-- wait: commits of matching streams, bounded by wait_ms and the request's ttl
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from history import witness
from history.log import Log
from history.matching import Match, Matches
from uprotocol import uuid as uuids
from uprotocol.communication import InMemoryRpcServer
from uprotocol.core.ustreamer.v1.ustreamer_pb2 import (
    DescribeRequest,
    DescribeResponse,
    Gap,
    LogState,
    PollRequest,
    PollResponse,
    Position,
    RecordBatch,
    TopicState,
    Witness,
)
from uprotocol.message import UPayload
from uprotocol.status import UStatusError, invalid
from uprotocol.transport import LocalUriProvider, UTransport
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.umessage_pb2 import UMessage

UE_ID: Final = 0x4  # core.ustreamer
VERSION: Final = 1
DESCRIBE: Final = 1
POLL: Final = 2

POLL_RECORDS_MAX: Final = 10_000  # with some 24 bytes of columns each, and ...
POLL_BYTES_MAX: Final = 768 << 10  # ... these of messages, a reply stays below 1 MiB, which every transport carries
POLL_STEPS_MAX: Final = 16  # of reading, for one poll: who asks for a rare topic gets `more` and asks again, and others have their turn
POLLS_WAITING_MAX: Final = 256  # each is a consumer with nothing to do
POLLS_READING_MAX: Final = 8  # replies being made at once, which bounds memory to some tens of MiB
WAIT_MS_MAX: Final = 60_000  # a caller that is gone is noticed by then
TTL_MARGIN_MS: Final = 200  # of the request's ttl, or a tenth of it, is left for the reply's way back
LEASE_MS_DEFAULT: Final = 60_000
LEASE_MS_MAX: Final = 7 * 24 * 3_600_000
CONSUMERS_MAX: Final = 1_000  # with a lease that lasts; peers of the streamer have cursors beside them
CONSUMER_LENGTH_MAX: Final = 200  # characters
DESCRIBE_TOPICS_MAX: Final = 8_000  # some 115 bytes each: below 1 MiB
INCARNATION_BYTES: Final = 16
DRAIN_MS_MAX: Final = 5_000  # `stop` gives running requests this long, and then the network to take what is answered


def cursor_name(consumer: str) -> str:
    """The name of a consumer's cursor in each log."""
    return f"consumer:{consumer}"


@dataclass(slots=True)
class _Poll:
    """A request that was found valid."""

    matches: dict[Log, Match]
    positions: dict[bytes, int]
    known: dict[bytes, witness.Known]
    until: dict[bytes, int]
    acked: dict[bytes, int]
    records_max: int
    bytes_max: int
    wait_ms: float
    lease_ms: int
    places: dict[Log, int] = field(default_factory=dict)  # where each log is read on

    def end(self, log: Log) -> int:
        return min(log.newest_seq, self.until.get(log.incarnation, log.newest_seq))

    @property
    def pending(self) -> list[Log]:
        return [log for log, place in self.places.items() if place < self.end(log)]

    @property
    def is_over(self) -> bool:
        """Nothing that may come is wanted."""
        return all(place >= self.until.get(log.incarnation, place + 1) for log, place in self.places.items())


@dataclass(eq=False, slots=True)
class _Waiting:
    matches: dict[Log, Match]
    woken: asyncio.Event = field(default_factory=asyncio.Event)


class HistoryService:
    """Serves the `logs` of one streamer at uEntity 4, version 1 of the authority of `local`. Only publishes are visible.

    `counts`: polls, records, gaps, and refused, since the start.
    """

    def __init__(
        self,
        transport: UTransport,
        local: LocalUriProvider,
        logs: Iterable[Log],
        *,
        polls_waiting_max: int = POLLS_WAITING_MAX,
        poll_bytes_max: int = POLL_BYTES_MAX,
        drain_ms_max: int = DRAIN_MS_MAX,
        now_ms: Callable[[], int] = uuids.now_ms,
    ) -> None:
        own = LocalUriProvider(local.get_authority(), UE_ID, VERSION)
        self._server = InMemoryRpcServer(transport, own, drain_ms_max=drain_ms_max)
        self._logs = list(logs)
        self._by_incarnation = {log.incarnation: log for log in self._logs}
        self._matches = Matches(self._logs)
        self._polls_waiting_max, self._poll_bytes_max, self._now_ms = polls_waiting_max, poll_bytes_max, now_ms
        self._waiting: set[_Waiting] = set()
        self._reading = asyncio.Semaphore(POLLS_READING_MAX)
        self._seen: dict[Log, int] = {}
        self._stop_listening: list[Callable[[], None]] = []
        self._stopping = False
        self.counts: Counter[str] = Counter()

    def __repr__(self) -> str:
        return f"HistoryService({self._logs}, waiting={len(self._waiting)})"

    async def start(self) -> None:
        """Raises what the transport says."""
        self._stopping = False
        for log in self._logs:
            self._seen[log] = log.newest_seq
            self._stop_listening.append(log.on_append(lambda log=log: self._appended(log)))  # type: ignore[misc]
        await self._server.register_request_handler(DESCRIBE, self._describe)
        await self._server.register_request_handler(POLL, self._poll)

    async def stop(self) -> None:
        """Answer the polls that wait, and take no more. May be called twice. The logs stay open."""
        self._stopping = True
        for waiting in self._waiting:
            waiting.woken.set()
        for end in self._stop_listening:
            end()
        self._stop_listening.clear()
        await self._server.close()

    # -- Describe

    async def _describe(self, request: UMessage) -> DescribeResponse:
        asked = UPayload.of(request).unpack(DescribeRequest)
        matches = self._matches.of(asked.topics, request.attributes.source.authority_name)
        response = DescribeResponse()
        for log in self._logs:
            response.logs.append(
                LogState(
                    incarnation=log.incarnation,
                    durable=log.durable,
                    oldest_seq=log.oldest_seq,
                    newest_seq=log.newest_seq,
                    stored_bytes=log.stored_bytes,
                    retention_ms=log.retention_ms,
                    retention_bytes=log.retention_bytes,
                )
            )
            await _complete(matches[log])
            if len(response.topics) + len(matches[log].ids) > DESCRIBE_TOPICS_MAX:
                raise UStatusError(UCode.RESOURCE_EXHAUSTED, f"more than {DESCRIBE_TOPICS_MAX} topics match: ask for fewer at once")
            response.topics.extend(_topic_state(log, id) for id in sorted(matches[log].ids) if log.stream(id).records)
        return response

    # -- Poll

    async def _poll(self, request: UMessage) -> PollResponse:
        try:
            asked = UPayload.of(request).unpack(PollRequest)
            poll = self._checked(asked, request)
        except UStatusError:
            self.counts["refused"] += 1
            raise
        self.counts["polls"] += 1
        for match in poll.matches.values():
            await _complete(match)
        response = PollResponse()
        await self._place(poll, asked, response)
        response.begin.extend([await _told(log, seq, poll) for log, seq in poll.places.items()])
        self._hold(asked.consumer, poll, response)
        response.more = await self._answer(poll, response)
        response.next.extend([await _told(log, seq, poll) for log, seq in poll.places.items()])
        self.counts["records"] += sum(len(batch.seq) for batch in response.batches)
        self.counts["gaps"] += len(response.gaps)
        return response

    def _checked(self, asked: PollRequest, request: UMessage) -> _Poll:
        """Raises INVALID_ARGUMENT, or RESOURCE_EXHAUSTED if too much is asked for."""
        if len(asked.consumer) > CONSUMER_LENGTH_MAX:
            raise invalid(f"a consumer's name has at most {CONSUMER_LENGTH_MAX} characters, got {len(asked.consumer)}")
        if asked.WhichOneof("start") == "after_message_id" and len(asked.after_message_id) != 16:
            raise invalid(f"a message id has 16 bytes, got {len(asked.after_message_id)}")
        ttl = request.attributes.ttl
        left = ttl - max(0, self._now_ms() - uuids.time_ms(request.attributes.id)) - max(TTL_MARGIN_MS, ttl // 10)
        return _Poll(
            self._matches.of(asked.topics, request.attributes.source.authority_name),
            _positions(asked.positions),
            witness.checked(asked.positions),
            _positions(asked.until),
            _positions(asked.acked),
            min(asked.max_records or POLL_RECORDS_MAX, POLL_RECORDS_MAX),
            min(asked.max_bytes or self._poll_bytes_max, self._poll_bytes_max),
            max(0, min(asked.wait_ms, WAIT_MS_MAX, left)),
            min(asked.lease_ms or LEASE_MS_DEFAULT, LEASE_MS_MAX) if asked.consumer else 0,
        )

    async def _place(self, poll: _Poll, asked: PollRequest, response: PollResponse) -> None:
        """Where to read each log on, and what of it is gone already."""
        for incarnation, seq in poll.positions.items():
            # Of a log that is gone and of which nothing was read nothing is missed, unless it is known to have had records.
            if incarnation not in self._by_incarnation and (seq or any(log.knows_lost(incarnation) for log in self._logs)):
                response.gaps.append(Gap(reason=Gap.REASON_INCARNATION, incarnation=incarnation, after_seq=seq))
        for log in self._logs:
            if log.incarnation not in poll.positions:
                poll.places[log] = await self._start(log, asked, response)
                continue
            seq = poll.places[log] = poll.positions[log.incarnation]
            known = poll.known[log.incarnation]
            bounds = await witness.went_back(log, seq, known)
            if bounds is not None:
                differs, agreed = bounds
                # The file is no longer what it was (restored from a copy, say): what it has now from there on can't be told apart.
                response.gaps.append(_gap(Gap.REASON_CORRUPTION, log, differs, agreed + 1))
                poll.places[log] = agreed
                poll.known[log.incarnation] = witness.up_to(known, agreed)
                poll.acked[log.incarnation] = min(agreed, poll.acked.get(log.incarnation, agreed))

    async def _start(self, log: Log, asked: PollRequest, response: PollResponse) -> int:
        start = asked.WhichOneof("start")
        if start == "latest" and asked.latest:
            return log.newest_seq
        if start == "after_time":
            try:
                time_ms = asked.after_time.ToMilliseconds()
            except ValueError as error:
                raise invalid(f"after_time is no time of the years 1 to 9999: {error}") from None
            seq = await log.seq_before_time(time_ms)
        elif start == "after_message_id":
            found = await log.seq_of_id(asked.after_message_id)
            if found is not None:
                return found
            # Not in this log, or no longer: whatever was appended after the id was made is at least what follows it.
            seq = await log.seq_before_time(int.from_bytes(asked.after_message_id[:6], "big"))
        else:
            return log.floor_seq
        if seq <= log.floor_seq and log.floor_seq:
            response.gaps.append(_gap(Gap.REASON_RETENTION, log, 0, log.floor_seq + 1))
        return max(seq, log.floor_seq)

    def _hold(self, consumer: str, poll: _Poll, response: PollResponse) -> None:
        """Let the consumer's cursor hold retention: at what it acknowledged, else where it was, else where it begins."""
        if not consumer:
            return
        name = cursor_name(consumer)
        for log, place in poll.places.items():
            known = log.cursor(name)
            if known is None and sum(other.startswith(cursor_name("")) for other in log.cursors()) >= CONSUMERS_MAX:
                raise UStatusError(
                    UCode.RESOURCE_EXHAUSTED, f"{CONSUMERS_MAX} consumers have a cursor, which is the limit: wait for a lease to end"
                )
            seq = poll.acked.get(log.incarnation, place if known is None else known)
            log.set_cursor(name, min(seq, log.newest_seq), lease_ms=poll.lease_ms + int(poll.wait_ms))
        response.lease_ms = poll.lease_ms

    async def _answer(self, poll: _Poll, response: PollResponse) -> bool:
        """Fill `response` with what there is, or what comes while the poll may wait; True if there is more at hand.

        Who waits is on the list before it looks, so that nothing can come in between unnoticed.
        """
        waiting = _Waiting(poll.matches)
        may_wait = len(self._waiting) < self._polls_waiting_max
        deadline = asyncio.get_running_loop().time() + poll.wait_ms / 1000
        if may_wait:
            self._waiting.add(waiting)
        try:
            while True:
                waiting.woken.clear()
                complete = await self._collect(poll, response)
                if response.batches or response.gaps or not complete:
                    return bool(poll.pending)
                if poll.is_over or self._stopping or deadline <= asyncio.get_running_loop().time():
                    return False
                if not may_wait:
                    raise UStatusError(UCode.RESOURCE_EXHAUSTED, f"{self._polls_waiting_max} polls wait already: try again later")
                with contextlib.suppress(TimeoutError):  # then look once more: `next` covers what was not for this poll
                    async with asyncio.timeout_at(deadline):
                        await waiting.woken.wait()
        finally:
            self._waiting.discard(waiting)

    async def _collect(self, poll: _Poll, response: PollResponse) -> bool:
        """Read every log from its place on, each with its share of the reply, as far as the reply and some steps go.

        True if it came to the end of each log, as that was when it began.
        """
        async with self._reading:
            return await self._read_all(poll, response)

    async def _read_all(self, poll: _Poll, response: PollResponse) -> bool:
        complete = True
        pending = poll.pending
        records, bytes = poll.records_max, poll.bytes_max
        for left, log in zip(range(len(pending), 0, -1), pending, strict=True):
            batch = RecordBatch(incarnation=log.incarnation)
            share_records, share_bytes = max(1, records // left), max(1, bytes // left)
            end = poll.end(log)
            for _ in range(POLL_STEPS_MAX):
                place = poll.places[log]
                if place >= end:
                    break
                found = await log.scan(
                    place,
                    max_records=share_records,
                    max_bytes=share_bytes,
                    streams=poll.matches[log].ids,
                    until=end,
                    strict=bool(batch.seq),  # a reply has one record at least, whatever its size
                )
                poll.places[log] = min(max(found.covered, place), end)
                if place < found.floor_seq:
                    self._note_retention(poll.matches[log], log, place, found.floor_seq, response)
                response.gaps.extend(_gap(Gap.REASON_CORRUPTION, log, after, before) for after, before in found.gaps)
                for chunk in found.chunks:
                    batch.seq.extend(chunk.seqs)
                    batch.prev_seq.extend(chunk.prev_seqs)
                    batch.time_ms.extend([chunk.time_ms] * len(chunk))
                    batch.message.extend(chunk.data)
                records -= share_records - found.records_left
                bytes -= share_bytes - found.bytes_left
                share_records, share_bytes = found.records_left, found.bytes_left
                if found.full:
                    break
            if batch.seq:
                response.batches.append(batch)
            complete = complete and poll.places[log] >= end
        return complete

    def _note_retention(self, match: Match, log: Log, place: int, floor: int, response: PollResponse) -> None:
        """A gap, if retention passed something of these streams that the caller has not seen."""
        streams = map(log.stream, match.ids)
        if any(stream.newest_seq > place and stream.first_seq <= floor for stream in streams):
            response.gaps.append(_gap(Gap.REASON_RETENTION, log, place, floor + 1))

    def _appended(self, log: Log) -> None:
        """Wake those for whom something came."""
        chunks = log.tail(self._seen[log])
        self._seen[log] = log.newest_seq
        if not self._waiting:
            return
        came: frozenset[int] = frozenset().union(*(chunk.stream_set for chunk in chunks or ()))
        for waiting in self._waiting:
            match = waiting.matches[log]
            if chunks is None or not match.advance() or not match.ids.isdisjoint(came):
                waiting.woken.set()


async def _complete(match: Match) -> None:
    while not match.advance():  # noqa: ASYNC110 - gives way, waits for nothing
        await asyncio.sleep(0)


def _positions(given: Sequence[Position]) -> dict[bytes, int]:
    for position in given:
        if len(position.incarnation) != INCARNATION_BYTES:
            raise invalid(f"an incarnation has {INCARNATION_BYTES} bytes, got {len(position.incarnation)}")
    return {position.incarnation: position.seq for position in given}


async def _told(log: Log, seq: int, poll: _Poll) -> Position:
    """A place, with the record there as its witness: what the caller has brought, else from the log."""
    digest = poll.known.get(log.incarnation, {}).get(seq)
    witnesses = await witness.at(log, seq) if digest is None else [Witness(seq=seq, digest=digest)]
    return Position(incarnation=log.incarnation, seq=seq, witnesses=witnesses, in_memory=not log.durable)


def _gap(reason: Gap.Reason.ValueType, log: Log, after: int, before: int) -> Gap:
    return Gap(reason=reason, incarnation=log.incarnation, after_seq=after, before_seq=before)


def _topic_state(log: Log, id: int) -> TopicState:
    stream = log.stream(id)
    stored = stream.newest_seq >= log.oldest_seq > 0
    state = TopicState(
        topic=stream.source,
        incarnation=log.incarnation,
        oldest_seq=max(stream.first_seq, log.oldest_seq) if stored else 0,
        newest_seq=stream.newest_seq,
        newest_id=stream.newest_id,
        records=stream.records,
    )
    state.newest_time.FromMilliseconds(stream.newest_time_ms)
    return state
