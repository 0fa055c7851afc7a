"""Keeps one poll waiting at each history of a query: it brings the plan of the next batch, and renews the lease.

watch: Poll(plan, wait, acked) --answer--> Member: cuts, losses, topics     failure: asked again after growing pauses
         ^  the plan was consumed, or is stale               |
         '------------ or the lease must be renewed ---------'
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Final

import structlog

from history.reading.client import is_sound
from history.records import witness
from history.records.visible import Visible
from spark_ingest import offsets
from spark_ingest.client import HistorySession, losses
from spark_ingest.members import Member, QueryRun
from spark_ingest.offsets import SEQ_MAX, Backfill, Coverage, HistoryOffset, LogSeqs, Offset
from uprotocol import uri as uris
from uprotocol.core.ustreamer.v1.ustreamer_pb2 import PollRequest, PollResponse, Position
from uprotocol.pacing import Backoff
from uprotocol.status import UStatusError
from uprotocol.tasks import wait_within
from uprotocol.uuid import now_ms
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.uri_pb2 import UUri

SPARK_WAIT_MS_MAX: Final = 20_000  # of a poll that waits for records: a third of the usual lease
RECORDS_MAX: Final = (1 << 32) - 1  # that the field of a poll can have
SPARK_WAIT_MS_MIN: Final = 1_000  # after a failure, and where a poll was not let wait: perhaps the streamer stops
BACKOFF_MS: Final = (500, 10_000)  # between calls to a history that does not answer
HELD_MAX_S: Final = 90.0  # another holder of our cursor: its lease ends within this time, or it is alive

log = structlog.get_logger()


class HistoryPolls:
    """The polls of one run. On the loop of `session`."""

    def __init__(self, session: HistorySession, run: QueryRun) -> None:
        self._session, self._run = session, run

    async def watch(self, member: Member) -> None:
        """Keep one poll waiting at the history whenever none of its planned records are left."""
        backoff = Backoff(*BACKOFF_MS)
        while True:
            member.wake.clear()
            generation = member.generation
            try:
                is_needed = member.is_stale or member.error is not None or not member.has_news
                if is_needed and not (self._run.is_ending and member.is_at_target):
                    await self._ask_again(member)
                    backoff.reset()
                elif not await wait_within(member.wake, member.lease_s / 3):
                    await self.renew(member)
            except UStatusError as error:
                if generation == member.generation:
                    self.failed(member, error)
                    await wait_within(member.wake, backoff.next_ms() / 1000)

    async def _ask_again(self, member: Member) -> None:
        """Poll in a task of its own, which `plan_again` cancels."""
        member.asking = asyncio.create_task(self._ask(member))
        try:
            await asyncio.wait({member.asking})
        finally:
            asking, member.asking = member.asking, None
            asking.cancel()
        if not asking.cancelled():
            asking.result()

    async def _ask(self, member: Member) -> None:
        """Poll for a plan, and take the answer."""
        # 1: ask
        generation = member.generation
        if self._run.is_ending and member.target is None:
            target = await self._target(member.authority)
            if generation != member.generation:
                return
            member.target = target
        asked, offset = self._request(member), member.offset
        may_wait = member.asked and member.error is None and not member.is_stale and not self._run.is_ending
        if member.backfill is None and may_wait:
            asked.wait_ms = min(member.wait_ms, round(member.lease_s * 333))
        began_s = time.monotonic()
        answer = await self._session.call(member.authority, lambda client: client.poll(asked))
        took_s = time.monotonic() - began_s
        is_cut_short = not answer.plan and took_s * 2_000 < asked.wait_ms
        member.wait_ms = SPARK_WAIT_MS_MIN if is_cut_short else min(2 * member.wait_ms, SPARK_WAIT_MS_MAX)
        member.answer_s = min(took_s, member.answer_s) if asked.wait_ms else took_s
        # 2: check the answer
        if not is_sound(answer) or any(one.seq > SEQ_MAX for one in (*answer.begin, *answer.next)):
            what = f"{member.authority}: expected logs with 16 bytes and a seq below 2^63, got an answer with others"
            raise UStatusError(UCode.DATA_LOSS, what)
        if not answer.HasField("visible"):
            what = f"{member.authority}: this streamer cannot plan batches: expected up-streamer 0.2 or later there"
            raise UStatusError(UCode.FAILED_PRECONDITION, what)
        # 3: topics that the query has wanted, or may read, for a shorter time than others: their older records
        wanted = Coverage(self._run.coverage_topics, Visible.of(answer.visible).text)
        begin = offset or begun(answer, wanted, asked.positions)
        changed = member.changed  # with how far earlier polls have passed the backfills, if it still is what is wanted
        if changed is None or changed.coverage != wanted:
            changed = begin.covering(wanted, added=self._run.options.added_topics)
        backfill = next((one for one in changed.backfills if not one.is_over), None)
        rest = PollResponse()
        if backfill is not None:
            older = _backfill_poll(backfill, asked)
            rest = await self._session.call(member.authority, lambda client: client.poll(older))
        # 4: take both answers
        if generation != member.generation or member.offset is not offset:
            return  # the query has gone on meanwhile
        if member.offset is None:
            member.offset, member.begin = begin, dict(begin.seqs) if self._run.has_begun else {}
        self._take(member, begin, answer)
        member.changed = changed if backfill is None else self._with_backfill(member, changed, backfill, rest)
        if member.has_other_topics:
            self._log_other_topics(member)
        member.asked = True
        self._run.news.set()

    def _request(self, member: Member) -> PollRequest:
        options = self._run.options
        each = max(1, self._run.records_max // (4 * max(1, self._run.histories, options.min_partitions)))
        asked = PollRequest(
            topics=self._run.wanted,
            plan_records=min(options.max_records_per_partition, each),
            max_records=min(self._run.records_max, RECORDS_MAX),
        )
        offset = member.offset if member.offset is not None else self._start(member, asked)
        if member.offset is not None:
            asked.earliest = True
        asked.positions.extend(poll_positions(offset, {} if member.has_news else member.next))
        for log_id, seq in (member.target or {}).items():
            asked.until.add(incarnation=bytes.fromhex(log_id), seq=seq)
        if member.acked is not None and self._run.has_cursors:
            member.held = member.cursor()
            self._set_cursor(asked, {} if member.keeps else member.held)
        return asked

    def _start(self, member: Member, asked: PollRequest) -> HistoryOffset:
        """Set where to begin in a history that the query has not read yet. Returns the positions to begin at."""
        options = self._run.options
        where = offsets.parse(options.starting_offsets, options.authority)
        time_ms = options.starting_offsets_by_timestamp.get(member.authority, options.starting_timestamp)
        if time_ms is not None:
            asked.after_time.FromMilliseconds(max(0, time_ms - 1))
        elif where == offsets.LATEST and self._run.has_begun:  # it was away when the query began, or has joined since
            asked.after_time.FromMilliseconds(self._run.began_ms)
        elif where == offsets.LATEST:
            asked.latest = True
        else:
            asked.earliest = True
            if isinstance(where, Offset):
                return where.histories.get(member.authority, HistoryOffset())
        return HistoryOffset()

    def _take(self, member: Member, offset: HistoryOffset, answer: PollResponse) -> None:
        """Note what a poll that began at `offset` has answered."""
        time_ms = now_ms()
        if member.away_ms:
            away_s = (time_ms - member.away_ms) / 1000
            log.info("the streamer answers again", authority=member.authority, away_s=away_s)
        member.error, member.is_refused, member.away_ms = None, False, 0
        member.answered_ms, member.answering_ms = time_ms, member.answering_ms or time_ms
        member.lease_s = answer.lease_ms / 1000 or member.lease_s
        member.agreed, member.losses = {}, offsets.lost(offset, (one.incarnation.hex() for one in answer.next))
        planned = {plan.incarnation.hex() for plan in answer.plan if plan.cuts}
        for name in offset.seqs:
            for loss in losses(answer, offset.known.get(name, {}), name):
                # others are found again by the task that reads the log there, if one does
                if loss.went_back or (loss.before and name not in planned):
                    member.losses.append(loss)
                    member.agreed[name] = loss.before - 1
        if any(not loss.before for loss in member.losses):  # a log that was made of a copy of one of them begins there
            others = (one for one in answer.begin if not one.in_memory and one.seq)
            member.agreed |= {name: one.seq for one in others if (name := one.incarnation.hex()) not in offset.seqs}
        member.next = {one.incarnation.hex(): one for one in answer.next}
        member.cuts, member.is_stale, member.planned_s = {}, False, time.monotonic()
        for plan in answer.plan:
            name = plan.incarnation.hex()
            member.newest[name] = plan.newest_match_seq
            if plan.cuts and (member.target is None or name in member.target):
                member.cuts[0, name] = list(plan.cuts)
        member.is_full = answer.more or member.records >= self._run.records_max

    def _with_backfill(
        self, member: Member, changed: HistoryOffset, backfill: Backfill, answer: PollResponse
    ) -> HistoryOffset:
        """Note the plan of a backfill. Returns `changed` where it passes logs that no longer exist, and those in which
        nothing matches."""
        covered = {one.incarnation.hex(): one.seq for one in answer.next}
        plans = {plan.incarnation.hex(): list(plan.cuts) for plan in answer.plan if plan.cuts}
        place = changed.backfills.index(backfill)
        done = dict(backfill.done)
        for gap in answer.gaps:
            if gap.incarnation.hex() not in plans:
                what = "records of added topics were deleted before the query asked for them"
                log.warning(what, authority=member.authority, after=gap.after_seq, before=gap.before_seq)
        for name, until in backfill.until.items():
            if name in plans:
                member.cuts[place + 1, name] = plans[name]
            else:
                done[name] = min(until, max(done.get(name, 0), covered.get(name, until)))
        moved = [*changed.backfills]
        moved[place] = replace(backfill, done=done)
        return replace(changed, backfills=tuple(moved))

    def _log_other_topics(self, member: Member) -> None:
        assert member.changed is not None, "it has other topics"
        old, new = member.offset, member.changed
        is_read = old is not None and len(new.backfills) > len(old.backfills)
        authority, topics = member.authority, self._run.options.topics
        log.info("the topics that are read have changed", authority=authority, topics=topics, reads_older=is_read)

    def failed(self, member: Member, error: UStatusError) -> None:
        time_ms = now_ms()
        is_held = error.code == UCode.ABORTED  # by another holder; its lease ends, or it is alive and we have to fail
        is_refused = not error.retryable and not (
            is_held and time_ms - (member.away_ms or time_ms) < HELD_MAX_S * 1_000
        )
        if not member.away_ms or member.is_refused != is_refused:
            what = "the streamer refuses the query" if is_refused else "the streamer is away; no new batch from it"
            if is_held:
                what = "another holder uses the consumer; waiting for the end of its lease"
            log.warning(what, authority=member.authority, error=error.message)
        member.away_ms, member.answering_ms, member.held = member.away_ms or time_ms, 0, None
        member.wait_ms = SPARK_WAIT_MS_MIN
        member.error, member.is_refused, member.asked, member.is_stale = error, is_refused, True, False
        self._run.news.set()

    async def newest(self, authority: str) -> LogSeqs:
        logs = await self._session.call(authority, lambda client: client.logs(self._run.wanted))
        return {one.incarnation.hex(): one.newest_seq for one in logs}

    async def _target(self, authority: str) -> LogSeqs:
        """Returns up to where a run that ends reads each log."""
        if authority in self._run.targets:  # as of the begin of the run
            return self._run.targets[authority]
        newest = await self.newest(authority)
        if self._run.has_cursors:  # a stream ends at the present
            return newest
        where = offsets.parse(self._run.options.ending_offsets, self._run.options.authority)
        if self._run.options.ending_timestamp is not None:
            asked = PollRequest(topics=self._run.wanted, max_records=1)
            asked.after_time.FromMilliseconds(max(0, self._run.options.ending_timestamp - 1))
            begin = (await self._session.call(authority, lambda client: client.poll(asked))).begin
            return {one.incarnation.hex(): one.seq for one in begin}
        if isinstance(where, Offset):
            ends = where.histories.get(authority, HistoryOffset()).seqs
            return {log_id: min(seq, ends.get(log_id, 0)) for log_id, seq in newest.items()}
        return newest

    def _set_cursor(self, asked: PollRequest, seqs: LogSeqs) -> None:
        asked.consumer = self._run.options.consumer or f"spark-{self._run.query}"
        asked.holder = self._run.query
        asked.acked.extend(Position(incarnation=bytes.fromhex(log_id), seq=seq) for log_id, seq in seqs.items())

    async def renew(self, member: Member) -> None:
        """Set the cursor, which renews its lease: Spark may make no call for the length of a trigger."""
        if member.acked is None or not self._run.has_cursors:
            return
        member.held = seqs = member.cursor()
        asked = poll_at(self._run.wanted, HistoryOffset(dict(seqs)))
        self._set_cursor(asked, {} if member.keeps else seqs)
        lease_ms = (await self._session.call(member.authority, lambda client: client.poll(asked))).lease_ms
        member.lease_s = lease_ms / 1000 or member.lease_s


def begun(answer: PollResponse, wanted: Coverage, asked: Iterable[Position]) -> HistoryOffset:
    """The offset at which a history begins that was not read before. It has the logs of `asked` that no longer exist,
    so that they are a loss."""
    seqs = {one.incarnation.hex(): one.seq for one in (*asked, *answer.begin)}
    known = {one.incarnation.hex(): witness.learn({}, one) for one in answer.begin if one.seq}
    unread = frozenset(one.incarnation.hex() for one in answer.begin if one.in_memory)
    return HistoryOffset(
        offsets.compact(seqs), {log_id: one for log_id, one in known.items() if one}, unread=unread, coverage=wanted
    )


def _backfill_poll(backfill: Backfill, main: PollRequest) -> PollRequest:
    def positions(seqs: LogSeqs) -> Iterator[Position]:
        return (Position(incarnation=bytes.fromhex(log_id), seq=seqs.get(log_id, 0)) for log_id in backfill.until)

    return PollRequest(
        topics=map(uris.parse, backfill.topics),
        positions=positions(backfill.done),
        until=positions(backfill.until),
        latest=True,
        plan_records=main.plan_records,
        max_records=main.max_records,
    )


def poll_positions(offset: HistoryOffset, reached: Mapping[str, Position]) -> Iterator[Position]:
    """Where the next poll begins: at the offset, or beyond it where nothing more matches."""
    for name in {**offset.seqs, **reached}:
        known = dict(offset.known.get(name, {}))
        at, seq = reached.get(name), offset.seqs.get(name, 0)
        if at is not None and at.seq >= seq:
            seq = at.seq
            known |= {one.seq: one.digest for one in at.witnesses}
        yield witness.position(bytes.fromhex(name), seq, known)


def poll_at(topics: Iterable[UUri], offset: HistoryOffset) -> PollRequest:
    """A poll that reads nothing: it ends where it begins."""
    at = list(poll_positions(offset, {}))
    return PollRequest(topics=topics, positions=at, until=at, latest=True, max_records=1)
