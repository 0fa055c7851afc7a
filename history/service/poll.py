"""A poll: the checks of its request, where it begins, and the answer that it fills.

PollRequest, ttl -> checked -> CheckedPoll | INVALID_ARGUMENT, RESOURCE_EXHAUSTED
Poll.begin: where to read each log from, gaps of logs that no longer exist or went back, frontiers up to there
Poll.read:  scan each log from there -> records of streams that match -> columns of a RecordBatch
                                     -> gaps: retention, damage
            a plan: the same without messages (planning.py)
            `next`: the positions to go on from, each with the record there as its witness

Frontiers come in pages. For each matching topic of frontiers, the newest record up to the position is sent. If epochs
are reported in several logs that are followed into this one, older records are added until each of those is covered.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

from google.protobuf.message import DecodeError

from history.log.log import Log, position_before
from history.records.chunk import INCARNATION_BYTES, Chunk, Scan, message_id, numbered
from history.records.epoch import Epoch, time_of
from history.records.limits import CONSUMER_LEASE_MS
from history.records.witness import WITNESSES_MAX, Known, digest_of, gap_of, up_to
from history.service.matches import Match, Sight
from history.service.planning import PLAN_CUTS_MAX, PLAN_RECORDS_MAX, PLAN_STEPS_MAX, Cuts, log_plan, plan_step
from uprotocol import uri as uris
from uprotocol import uuid as uuids
from uprotocol.core.ustreamer.v1.ustreamer_pb2 import (
    Frontier,
    Gap,
    PollRequest,
    PollResponse,
    Position,
    RecordBatch,
    Witness,
)
from uprotocol.status import invalid
from uprotocol.v1.uattributes_pb2 import UAttributes
from uprotocol.v1.uri_pb2 import UUri

POLL_RECORDS_MAX: Final = 10_000  # with some 24 bytes of columns each, and ...
POLL_BYTES_MAX: Final = 768 << 10  # ... these of messages, a reply stays below 1 MiB, which every transport carries
POLL_WAIT_MS_MAX: Final = 60_000  # within this time the service notices that a caller has gone
TTL_MARGIN_MS: Final = 200  # this, or a tenth of the request's ttl, is left for the reply to arrive
LEASE_MS_MAX: Final = 7 * 24 * 3_600_000
FRONTIERS_PAGE: Final = struct.Struct(f">{INCARNATION_BYTES}sq")  # a log, and the last stream of it that was listed
# a streamer has two logs; each other one is a log that no longer exists and costs a gap in the reply
POSITIONS_MAX: Final = 256
DIGEST_BYTES_MAX: Final = 64  # of a witness; ours are shorter
NANOS_MAX: Final = 999_999_999
SECONDS_MIN: Final = -62_135_596_800  # the years 1 to 9999: the range of google.protobuf.Timestamp
SECONDS_MAX: Final = 253_402_300_799
# scans of one log for one poll: a caller that asks for a rare topic gets `more` and asks again, and others have a turn
POLL_STEPS_MAX: Final = 16
FRONTIER_TOPICS_MAX: Final = 1_024  # in one answer; each costs two reads
FRONTIERS_BACK_MAX: Final = 8  # records read of one topic: a keeper writes to all of its logs at the same time
# of frontiers; an answer with more has no records, since it must have space for one record of any size
FRONTIERS_BESIDE_RECORDS_BYTES_MAX: Final = 128 << 10


@dataclass(frozen=True, eq=False, slots=True)
class CheckedPoll:
    """A valid PollRequest, with its defaults and limits applied. Positions are by incarnation."""

    asked: PollRequest
    source: UUri  # of the caller
    caller: str  # the caller's authority
    positions: dict[bytes, int]
    known: dict[bytes, Known]
    until: dict[bytes, int]
    acked: dict[bytes, int]
    records_max: int
    bytes_max: int
    wait_ms: float
    left_ms: float  # until the caller gives up
    lease_ms: int


def checked(asked: PollRequest, attributes: UAttributes, *, bytes_max: int = POLL_BYTES_MAX) -> CheckedPoll:
    """`bytes_max` limits the answer further. Raises INVALID_ARGUMENT, or RESOURCE_EXHAUSTED for more than a limit."""
    start = asked.WhichOneof("start")
    if start == "after_message_id" and len(asked.after_message_id) != 16:
        raise invalid(f"expected a message id of 16 bytes, got {len(asked.after_message_id)}")
    if start == "after_time":
        seconds, nanos = asked.after_time.seconds, asked.after_time.nanos
        if not SECONDS_MIN <= seconds <= SECONDS_MAX or not 0 <= nanos <= NANOS_MAX:
            what = f"after_time is a time of the years 1 to 9999 with 0 to {NANOS_MAX} nanos"
            raise invalid(f"{what}, got {seconds} s and {nanos} ns")
    if asked.plan_records and (asked.follower or asked.frontiers or asked.frontiers_page):
        raise invalid("expected a poll with `plan_records` without follower and frontiers: it brings a plan alone")
    if asked.follower and asked.topics:
        raise invalid("a poll names topics, or a follower that named them before, not both")
    if len(asked.frontiers_page) not in (0, FRONTIERS_PAGE.size):
        what = f"frontiers_page has {FRONTIERS_PAGE.size} bytes: next_frontiers_page of the answer before"
        raise invalid(f"{what}, got {len(asked.frontiers_page)} bytes")
    ttl = attributes.ttl
    left_ms = ttl - max(0, uuids.now_ms() - uuids.time_ms(attributes.id)) - max(TTL_MARGIN_MS, ttl // 10)
    caller = attributes.source.authority_name
    return CheckedPoll(
        asked,
        attributes.source,
        caller,
        _positions(asked.positions),
        {one.incarnation: {known.seq: known.digest for known in one.witnesses} for one in asked.positions},
        _positions(asked.until),
        _positions(asked.acked),
        min(asked.max_records or POLL_RECORDS_MAX, POLL_RECORDS_MAX),
        max(1, min(asked.max_bytes or POLL_BYTES_MAX, POLL_BYTES_MAX, bytes_max)),
        max(0, min(asked.wait_ms, POLL_WAIT_MS_MAX, left_ms)),
        max(0, left_ms),
        consumer_lease_ms(asked) if asked.consumer else 0,
    )


def consumer_lease_ms(asked: PollRequest) -> int:
    return min(asked.lease_ms or CONSUMER_LEASE_MS, LEASE_MS_MAX)


def _positions(given: Sequence[Position]) -> dict[bytes, int]:
    if len(given) > POSITIONS_MAX:
        raise invalid(f"expected at most {POSITIONS_MAX} logs in a poll, got {len(given)}")
    for position in given:
        if len(position.incarnation) != INCARNATION_BYTES:
            raise invalid(f"expected an incarnation of {INCARNATION_BYTES} bytes, got {len(position.incarnation)}")
        if len(position.witnesses) > WITNESSES_MAX:
            what = f"expected at most {WITNESSES_MAX} witnesses of a position"
            raise invalid(f"{what}, got {len(position.witnesses)}")
        if any(len(one.digest) > DIGEST_BYTES_MAX for one in position.witnesses):
            raise invalid(f"expected a witness of at most {DIGEST_BYTES_MAX} bytes")
    return {one.incarnation: one.seq for one in given}


class FollowedTopics(Protocol):
    """The topics of a follower, whose polls name none."""

    def matches_for(self, sight: Sight) -> dict[Log, Match]: ...

    def thinning(self) -> Callable[[Log, Chunk], Awaitable[Chunk | None]] | None:
        """Returns a function for one answer, which returns the records that are kept; None: no topic is sampled."""


@dataclass(eq=False, slots=True)
class Poll:
    """A running poll, and the answer to it. `sight`: for which `matches` were made. `is_pushed`: for a push, not a
    request. `is_local`: of a caller that sends no message (HistoryService.read). `is_cut`: answer it at
    once, even without records.

    `positions`: how far each log has been read; empty before `begin`. `agreed`, by incarnation of logs that went back:
    the seq up to which they are still what the caller knows."""

    request: CheckedPoll
    sight: Sight
    matches: Mapping[Log, Match]
    follower: FollowedTopics | None = None
    is_pushed: bool = False
    is_local: bool = False
    is_cut: bool = False
    woken: asyncio.Event = field(default_factory=asyncio.Event)
    response: PollResponse = field(default_factory=PollResponse)
    positions: dict[Log, int] = field(default_factory=dict)
    agreed: dict[bytes, int] = field(default_factory=dict)
    _has_capacity: bool = True  # for records beside the frontiers

    @property
    def turn_of(self) -> str:
        """Who waits for its turn: an authority, or a uEntity that sends no message."""
        return f"@{uris.format(self.request.source)}" if self.is_local else self.request.caller

    def has_ended(self) -> bool:
        """Returns whether no log can have more of the requested records."""
        until = self.request.until
        return all(seq >= until.get(log.incarnation, seq + 1) for log, seq in self.positions.items())

    # -- where to begin

    async def begin(self, sees: Callable[[Log, int], Awaitable[bool]]) -> None:
        """Decide where to start in each log, and report losses before that. `sees(log, seq)`: whether the caller
        may know that this record exists, whatever its topic."""
        for log, match in self.matches.items():
            if match.examined < log.stream_table.newest_id:
                await match.complete()
        response, positions, logs = self.response, self.request.positions, list(self.matches)
        incarnations = {log.incarnation for log in logs}
        for incarnation, seq in positions.items():
            # A log that no longer exists and that the caller has never read from is no loss, unless it is known to have
            # had records.
            is_missing = incarnation not in incarnations
            if is_missing and (seq or any(log.losses.ledger.knows(incarnation) for log in logs)):
                response.gaps.append(gap_of(Gap.REASON_INCARNATION, incarnation, seq))
        start = self.request.asked.WhichOneof("start")
        for log in logs:
            if log.incarnation not in positions:
                seq, other = position_before(log, positions) if log.predecessors else (0, b"")
                if other:
                    bounds = await went_back(log, seq, up_to(self.request.known[other], seq))
                    self.positions[log] = seq if bounds is None else bounds[1]
                    continue
                is_earliest = start is None or start == "earliest"
                self.positions[log] = log.floor_seq if is_earliest else await self._start(log, start, sees)
                continue
            seq = self.positions[log] = positions[log.incarnation]
            bounds = await went_back(log, seq, self.request.known[log.incarnation])
            if bounds is not None:
                differs, agreed = bounds
                # The file is no longer what it was (restored from a copy, for example). Which of its records the
                # caller has seen beyond `agreed` is unknown, so all of them are sent again.
                response.gaps.append(gap_of(Gap.REASON_CORRUPTION, log.incarnation, differs, agreed + 1))
                self.positions[log] = self.agreed[log.incarnation] = agreed
        response.begin.extend(await self.read_up_to())
        if self.request.asked.frontiers:
            self._has_capacity = await self._add_frontiers()

    async def _start(self, log: Log, start: str | None, sees: Callable[[Log, int], Awaitable[bool]]) -> int:
        asked = self.request.asked
        if start == "latest":
            return log.newest_seq if asked.latest else log.floor_seq
        if start == "after_time":
            seq = await log.seq_before_time(asked.after_time.ToMilliseconds())
        else:
            found = await log.seq_of_id(asked.after_message_id)
            if found is not None and await sees(log, found):
                return found
            # The message is not in this log, or no longer. Begin with what was appended from the millisecond of its id
            # on: that includes all that followed the message.
            seq = await log.seq_before_time(int.from_bytes(asked.after_message_id[:6], "big") - 1)
        if seq <= log.floor_seq and await self.matches[log].has_passed(log.floor_seq, 0):
            self.response.gaps.append(gap_of(Gap.REASON_RETENTION, log.incarnation, 0, log.floor_seq + 1))
        return max(seq, log.floor_seq)

    async def read_up_to(self) -> list[Position]:
        """Returns the position in each log. Its witness is the one that the caller brought, else it is made from the
        log."""
        found = []
        for log, seq in self.positions.items():
            is_brought = seq <= self.agreed.get(log.incarnation, seq)
            digest = self.request.known.get(log.incarnation, {}).get(seq) if is_brought else None
            witnesses = await witnesses_at(log, seq) if digest is None else [Witness(seq=seq, digest=digest)]
            found.append(Position(incarnation=log.incarnation, seq=seq, witnesses=witnesses, in_memory=not log.durable))
        return found

    # -- records

    async def read(self) -> bool:
        """Read on in each log, with its share of the reply, as far as the reply and some steps allow. Returns whether
        there is something to answer: records, a plan, gaps, or more records that were not read."""
        until = self.request.until
        ends = {log: min(log.newest_seq, until.get(log.incarnation, log.newest_seq)) for log in self.positions}
        pending = {log: end for log, end in ends.items() if self._has_capacity and self.positions[log] < end}
        for log in pending:
            if self.matches[log].examined < log.stream_table.newest_id:  # streams that have records up to its end
                await self.matches[log].complete()
        read = self._read_plan if self.request.asked.plan_records else self._read_records
        complete = await read(pending) and self._has_capacity
        response = self.response
        is_done = bool(response.batches or response.plan or response.gaps or not complete)
        self.response.more = is_done and any(
            seq < min(log.newest_seq, until.get(log.incarnation, log.newest_seq)) for log, seq in self.positions.items()
        )
        del self.response.next[:]
        self.response.next.extend(await self.read_up_to())
        if not self.request.positions:
            self.response.made.CopyFrom(uuids.new())
        return is_done

    async def _read_records(self, ends: Mapping[Log, int]) -> bool:
        """Returns whether each log was read up to its end."""
        complete = True
        thin = self.follower.thinning() if self.follower is not None else None
        records, bytes = self.request.records_max, self.request.bytes_max
        for left, (log, end) in zip(range(len(ends), 0, -1), ends.items(), strict=True):
            batch = RecordBatch(incarnation=log.incarnation)
            share_records, share_bytes = max(1, records // left), max(1, bytes // left)
            for _ in range(POLL_STEPS_MAX):
                seq = self.positions[log]
                if seq >= end:
                    break
                found = await log.scan(
                    seq,
                    max_records=share_records,
                    max_bytes=share_bytes,
                    streams=self.matches[log].ids,
                    until=end,
                    strict=bool(batch.seq),  # a reply has at least one record, whatever its size
                )
                await self._passed(log, found, end)
                for chunk in found.chunks:
                    thinned = chunk if thin is None else await thin(log, chunk)
                    if thinned is not None:
                        add_records(batch, thinned)
                records -= share_records - found.records_left
                bytes -= share_bytes - found.bytes_left
                share_records, share_bytes = found.records_left, found.bytes_left
                if found.full:
                    break
            if batch.seq:
                self.response.batches.append(batch)
            complete = complete and self.positions[log] >= end
        return complete

    async def _read_plan(self, ends: Mapping[Log, int]) -> bool:
        """Returns whether each log was planned up to its end."""
        asked, complete = self.request.asked, True
        records, cuts = asked.max_records or PLAN_RECORDS_MAX, PLAN_CUTS_MAX
        for left, (log, end) in zip(range(len(ends), 0, -1), ends.items(), strict=True):
            made = Cuts(asked.plan_records, min(records, max(1, records // left)), max(1, cuts // left))
            match = self.matches[log]
            for _ in range(PLAN_STEPS_MAX):
                if self.positions[log] >= end or not made.left:
                    break
                await self._passed(log, await plan_step(log, match, self.positions[log], end, made), end)
            records, cuts = records - made.records, cuts - len(made.cuts)
            if made.records:
                self.response.plan.append(await log_plan(log, match, made, witnesses_at))
            complete = complete and self.positions[log] >= end
        return complete

    async def _passed(self, log: Log, found: Scan, end: int) -> None:
        """Note how far a step of reading came, and what it could not read."""
        seq = self.positions[log]
        self.positions[log] = min(max(found.covered, seq), end)
        if seq < found.floor_seq and await self.matches[log].has_passed(found.floor_seq, seq):
            self.response.gaps.append(gap_of(Gap.REASON_RETENTION, log.incarnation, seq, found.floor_seq + 1))
        self.response.gaps.extend(gap_of(Gap.REASON_CORRUPTION, log.incarnation, *one) for one in found.gaps)

    # -- frontiers

    async def _add_frontiers(self) -> bool:
        """Add the frontiers at the positions, as many as fit. Returns whether all of them are in the answer and
        records fit beside them."""
        response, page = self.response, self.request.asked.frontiers_page
        logs = {log.incarnation: log for log in self.positions}
        begin, known = FRONTIERS_PAGE.unpack(page) if page else (b"", -1)
        topics_left, bytes_left = FRONTIER_TOPICS_MAX, self.request.bytes_max
        for incarnation, log in list(logs.items())[[*logs].index(begin) if begin in logs else 0 :]:
            after = known if incarnation == begin else -1
            batch = RecordBatch(incarnation=incarnation)
            for id in sorted(id for id in log.frontier_ids if id > after and id in self.matches[log].ids):
                if not topics_left or bytes_left <= 0:
                    response.next_frontiers_page = FRONTIERS_PAGE.pack(incarnation, after)
                    break
                before = len(batch.message)
                for chunk in await _newest_frontiers(log, id, self.positions[log]):
                    add_records(batch, chunk)
                topics_left, after = topics_left - 1, id
                bytes_left -= sum(map(len, batch.message[before:]))
            if batch.seq:
                response.frontiers.append(batch)
            if response.next_frontiers_page:
                return False
        response.has_frontiers = True
        return self.request.bytes_max - bytes_left <= FRONTIERS_BESIDE_RECORDS_BYTES_MAX


async def _newest_frontiers(log: Log, id: int, seq: int) -> list[Chunk]:
    """Returns the newest frontier up to `seq` of each log in which it was first appended, the newest one first."""
    found: list[Chunk] = []
    covered, expected = set[bytes](), set[bytes]()
    seq = await _newest_seq_up_to(log, id, seq)
    for _ in range(FRONTIERS_BACK_MAX):
        if seq <= log.floor_seq:
            break
        chunks = await log.read(seq - 1, until=seq, streams={id})
        if not chunks:  # retention has deleted it meanwhile, or it is damaged
            break
        (chunk,) = chunks
        origin = chunk.origins[0] if chunk.origins is not None else None
        first_log = log.incarnation if origin is None else origin.incarnation
        if first_log not in covered:
            covered.add(first_log)
            found.append(chunk)
            expected |= _logs_of(chunk)
        if expected <= covered or origin is None:
            break
        seq = chunk.prev_seqs[0]
    return found


async def _newest_seq_up_to(log: Log, id: int, seq: int) -> int:
    """Returns the seq of the stream's newest record up to and including `seq`; 0: no such record."""
    newest = log.stream(id).newest_seq if log.knows_stream(id) else 0
    if newest <= seq:
        return newest
    for chunk in await log.read(seq, max_records=1, streams={id}):
        return chunk.prev_seqs[0]
    return newest


def _logs_of(chunk: Chunk) -> set[bytes]:
    try:
        return {one for group in Frontier.FromString(chunk.messages[0].payload).groups for one in group.logs}
    except DecodeError:
        return set()


# -- columns


def add_records(batch: RecordBatch, chunk: Chunk) -> None:
    """Append the records of `chunk` to the columns of `batch`. The inverse is acceptor.decode."""
    if chunk.origins is not None or batch.origin:
        _add_origins(batch, chunk)
    if chunk.epochs is not None or batch.epoch:
        _add_epochs(batch, chunk)
    batch.seq.extend(chunk.seqs)
    batch.prev_seq.extend(chunk.prev_seqs)
    batch.time_ms.extend([chunk.time_ms] * len(chunk))
    batch.message.extend(chunk.data)


def _add_origins(batch: RecordBatch, chunk: Chunk) -> None:
    before = [0] * (len(batch.seq) - len(batch.origin))  # none of the records so far was followed
    origins = [None] * len(chunk) if chunk.origins is None else chunk.origins
    logs = {incarnation: number for number, incarnation in enumerate(batch.origin_incarnation, 1)}
    known = len(logs)
    batch.origin.extend(before + numbered(origins, logs))
    batch.origin_seq.extend(before + [0 if origin is None else origin.seq for origin in origins])
    batch.origin_incarnation.extend(list(logs)[known:])


def _add_epochs(batch: RecordBatch, chunk: Chunk) -> None:
    numbers = [0] * (len(batch.seq) - len(batch.epoch))  # none of the records so far has an epoch
    known = {Epoch(one.group, time_of(one.time)): number for number, one in enumerate(batch.epochs, 1)}
    for epoch in [None] * len(chunk) if chunk.epochs is None else chunk.epochs:
        if epoch is not None and epoch not in known:
            known[epoch] = len(known) + 1
            added = batch.epochs.add(group=epoch.group)
            added.time.numbers.extend(epoch.time)
        numbers.append(0 if epoch is None else known[epoch])
    batch.epoch.extend(numbers)


# -- witnesses


async def witnesses_at(log: Log, seq: int) -> list[Witness]:
    """Returns the witness of the record at `seq`; none if the record is not there: deleted by retention, damaged, lost,
    or not yet appended."""
    if not log.floor_seq < seq <= log.newest_seq:
        return []
    found = await log.scan(seq - 1, max_records=1, max_bytes=1, until=seq)
    return [Witness(seq=seq, digest=digest_of(message_id(chunk.messages[0]))) for chunk in found.chunks]


async def went_back(log: Log, seq: int, known: Mapping[int, bytes]) -> tuple[int, int] | None:
    """Returns None if the log has all records that a caller at `seq` got, as far as can be known. Else returns the seq
    up to which the log differs from what the caller knows, and the seq up to which both surely agree.

    It compares the newest witness whose record is still there, and older ones only if that record is another one now.
    """
    differs = False
    for one in sorted(known, reverse=True):
        here = await witnesses_at(log, one)
        if here and here[0].digest == known[one]:
            if differs:
                return max(known), min(seq, one)
            break
        differs = differs or bool(here) or _is_beyond(log, one)
    if differs:
        return max(known), min(seq, log.floor_seq)
    return (seq, log.newest_seq) if _is_beyond(log, seq) else None


def _is_beyond(log: Log, seq: int) -> bool:
    """Returns whether the log in its present state can never have given out `seq`."""
    return seq > max(log.newest_seq, *(before - 1 for _, before in log.holes), 0)
