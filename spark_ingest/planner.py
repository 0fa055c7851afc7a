"""Plans the micro-batches of a query, over one history or many, on the event loop of a session.

begin, or the offset of a checkpoint --> Fleet: each history is watched, and has a plan at hand as soon as it has news
latest(start, limit): what all have at hand --share--> end of the batch     costs no call without news
commit(acked)       --> the cursors of the histories that have moved

With whole epochs the end of a batch also contains which epochs wait: frontiers of its records --> gates.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from spark_ingest import epochs, offsets
from spark_ingest.client import HistorySession, OnLoss, losses, range_poll
from spark_ingest.epochs import BatchFrontiers, FrontierRecord, Gates
from spark_ingest.fleet import FIRST_ANSWERS_S, Fleet
from spark_ingest.members import CutsKey, Member, new_query
from spark_ingest.offsets import HistoryOffset, LogLoss, LogSeqs, Offset, Range
from spark_ingest.polls import poll_at
from uprotocol import uri as uris
from uprotocol.core.ustreamer.v1.ustreamer_pb2 import Gap
from uprotocol.status import UStatusError
from uprotocol.tasks import wait_until
from uprotocol.uuid import now_ms


class Planner:
    """Plans micro-batches of `session.options`. All coroutines are for the session's loop.

    `on_loss(loss, authority)` may raise.
    """

    def __init__(self, session: HistorySession, on_loss: OnLoss) -> None:
        self._session, self._on_loss = session, on_loss
        self.fleet = Fleet(session)
        self._run = self.fleet.run
        self._initial: Offset | None = None  # where the query began, if it began in this run
        self._last_batch_s = time.monotonic()
        # how many records the ranges of the latest batch have, see offsets.Counted
        self.counted: dict[tuple[str, str, tuple[str, ...]], list[tuple[int, int]]] = {}
        self._topics = [uris.parse(topic) for topic in session.options.topics]

    async def begin(self, query: str) -> Offset:
        """Begin a new query. Waits for the first answers, at most startTimeout. Called again, returns the same offset.
        Raises UNAVAILABLE if no streamer answers, and what they refuse."""
        if self._initial is not None:
            return self._initial
        self.fleet.open(query, now_ms())
        await self.fleet.find_members()
        await self.fleet.answers(self._run.options.start_timeout, must_answer=True)
        found = [member for member in self.fleet.members.values() if member.offset is not None]
        if self._run.options.epochs == "complete":
            await asyncio.gather(*(self._first_gates(member) for member in found))
        offset = Offset(
            query, self._run.began_ms, {one.authority: one.offset for one in found if one.offset is not None}
        )
        for member in found:
            member.begin = {}
        self._run.has_begun = True
        # if its first batch was cut off, Spark reads that from the checkpoint; the present is behind it
        is_latest = offsets.parse(self._run.options.starting_offsets, self._run.options.authority) == offsets.LATEST
        await self.fleet.hold(offset, found, keeps=is_latest)
        self._initial = offset
        return offset

    async def latest(self, start: Offset, limit: int | None, idle_s: float) -> Offset:
        """Returns the end of the batch that begins at `start` and has at most `limit` records. Without new records it
        waits up to `idle_s` and then returns `start`. Raises DATA_LOSS, PERMISSION_DENIED, and in a run that ends
        UNAVAILABLE."""
        self.fleet.resume(start)
        await self.fleet.find_members()
        if not all(member.asked for member in self.fleet.members.values()):
            await self.fleet.answers(
                self._run.options.poll_timeout_ms / 1000 + 5 if self._run.is_ending else FIRST_ANSWERS_S
            )
        self.fleet.raise_refused(is_away_refused=self._run.is_ending)
        await self.fleet.refresh()
        end = await self._choose(start, limit)
        if end == start:
            deadline = asyncio.get_running_loop().time() + idle_s
            while end == start and (self.fleet.is_planning() if self._run.is_ending else True):
                self._run.news.clear()
                if not await wait_until(self._run.news, None if self._run.is_ending else deadline):
                    break
                end = await self._choose(start, limit)
        # All records before `start` are in the sink: Spark finishes a batch, also after a restart, before it asks for
        # the next one. But it calls `commit` only when the next one begins, which may never happen.
        await self.fleet.hold(start, [one for one in self.fleet.members.values() if one.acked is None or end == start])
        return end

    async def reread(self, start: Offset, end: Offset) -> None:
        """Spark reads again, after a restart, the batch between two offsets: let the histories keep its records."""
        if end.query in ("", self._run.query):
            return
        # an empty first batch is stored without its begin, and Spark gives one that is asked for anew
        is_empty = end.initial is None and start.query not in ("", end.query)
        begin = Offset(end.query, end.began_ms, end.histories if is_empty else end.begin(start))
        self.fleet.resume(begin)
        with contextlib.suppress(UStatusError):  # the tasks meet it, too
            await self.fleet.answers(FIRST_ANSWERS_S)
            await self.fleet.hold(begin, list(self.fleet.members.values()))

    async def whole(self) -> tuple[Offset, Offset]:
        """Plan all records from the begin of a new query to its end. Returns both. Raises UNAVAILABLE if one of the
        named histories does not answer."""
        self._run.is_ending, self._run.is_whole, self._run.has_cursors = True, True, False
        start = await self.begin(new_query())
        self.fleet.raise_refused(is_away_refused=True)
        end, counted = start, dict[tuple[str, str, tuple[str, ...]], list[tuple[int, int]]]()
        while (further := await self.latest(end, None, 0)) != end:
            end = further
            for key, pieces in self.counted.items():
                counted.setdefault(key, []).extend(pieces)
        self.counted = counted
        self._check_end(start)
        return start, end

    def _check_end(self, start: Offset) -> None:
        """Report what `endingOffsets` names beyond the records that are there."""
        ending = offsets.parse(self._run.options.ending_offsets, self._run.options.authority)
        if not isinstance(ending, Offset):
            return
        for authority, history in ending.histories.items():
            member = self.fleet.members.get(authority)
            for log, seq in history.seqs.items():
                present = (member.target or {}).get(log) if member is not None else None
                if present is None:
                    begin = start.histories.get(authority, HistoryOffset()).seqs.get(log, 0)
                    self._on_loss(LogLoss(log, begin, 0, Gap.REASON_INCARNATION), authority)
                elif present < seq:
                    self._on_loss(LogLoss(log, seq, present + 1, is_beyond=True), authority)

    async def present(self, start: Offset) -> Offset:
        """Returns the end of one batch that begins at `start` and has what is there now, whatever its size; of a
        history that has more of it than one plan can have, that. Raises as `latest`."""
        self._run.is_whole = True
        await self.fleet.end_at_present()
        return await self.latest(start, None, 0)

    async def commit(self, acked: Offset) -> None:
        """All records up to `acked` are in the sink, so the histories need not keep them."""
        await self.fleet.hold(acked, list(self.fleet.members.values()))

    async def _choose(self, start: Offset, limit: int | None) -> Offset:
        """Returns the end of a batch of what is at hand; `start` if that is not enough."""
        self.fleet.raise_refused()
        # records of one that is away are not planned: a task that waits for it would hold up the others
        answering = [one for one in self.fleet.members.values() if one.offset is not None and one.error is None]
        members = [one for one in answering if one.has_news or self._frees_epochs(one)]
        waiting = [(one, key) for one in members for key in one.cuts]
        counts = [[cut.records for cut in one.cuts[key]] for one, key in waiting]
        if not self._is_enough(sum(map(sum, counts))) and not any(one.losses for one in members):
            members = []
        for member in members:
            for loss in member.losses:
                self._on_loss(loss, member.authority)
        taken: dict[str, dict[CutsKey, int]] = {one.authority: {} for one in self.fleet.members.values()}
        for (member, key), count in zip(waiting, offsets.share(counts, limit), strict=True) if members else ():
            taken[member.authority][key] = count
        ends = {one.authority: one.end(taken[one.authority]) for one in members}
        if self._run.options.epochs == "complete":
            await self._set_gates(start, members, ends)
        else:
            ends = {authority: replace(end, gates=None) for authority, end in ends.items()}
        if not ends:
            return start
        self.counted = dict(self._count(members, taken, ends))
        for member in members:
            member.take(taken[member.authority], ends[member.authority])
        self._run.has_begun, self._last_batch_s = True, time.monotonic()
        initial = start.histories if start == self._initial else None
        return Offset(
            start.query or self._run.query, start.began_ms or self._run.began_ms, start.histories | ends, initial
        )

    def _frees_epochs(self, member: Member) -> bool:
        """Returns whether records wait for the end of their epoch, and the query no longer does."""
        offset = member.offset
        return self._run.options.epochs == "all" and offset is not None and offset.gates is not None

    def _is_enough(self, records: int) -> bool:
        least = min(self._run.options.min_records_per_batch, self._run.options.max_records_per_batch)
        waited_s = time.monotonic() - self._last_batch_s
        return self._run.is_ending or records >= least or waited_s >= self._run.options.max_trigger_delay

    def _count(
        self,
        members: Iterable[Member],
        taken: Mapping[str, Mapping[CutsKey, int]],
        ends: Mapping[str, HistoryOffset],
    ) -> Iterator[tuple[tuple[str, str, tuple[str, ...]], list[tuple[int, int]]]]:
        for member in members:
            offset = member.changed or member.offset
            for (where, name), count in taken[member.authority].items():
                coverage = ends[member.authority].coverage
                topics = coverage.topics if coverage is not None else self._run.options.topics
                if where and offset is not None:
                    topics = offset.backfills[where - 1].topics
                cuts = member.cuts[where, name][:count]
                yield (member.authority, name, topics), [(cut.position.seq, cut.records) for cut in cuts]

    async def _first_gates(self, member: Member) -> None:
        if member.offset is not None and member.offset.gates is None:
            seqs = member.offset.seqs
            member.offset.gates = epochs.begin(await self._snapshot(member, seqs) if seqs else (), is_new=True)

    async def _set_gates(self, start: Offset, members: list[Member], ends: dict[str, HistoryOffset]) -> None:
        """Set the gates of `ends`. Adds the ends of histories whose waiting epochs are given up."""

        async def advance(member: Member) -> None:
            begin = start.histories.get(member.authority)
            if begin is None:
                await self._first_gates(member)
                begin = member.offset
            assert begin is not None, "a member with news has an offset"
            ends[member.authority].gates = await self._gates(member, begin, ends[member.authority])

        await asyncio.gather(*(advance(member) for member in members))
        time_ms, timeout_ms = now_ms(), round(self._run.options.epoch_timeout * 1000)
        for member in self.fleet.members.values():
            end = ends.get(member.authority, member.offset)
            is_read = end is not None and all(
                cuts[-1].position.seq <= end.seqs.get(log, 0) for (where, log), cuts in member.cuts.items() if not where
            )
            has_answered = member.answering_ms and time_ms - member.answering_ms > timeout_ms
            # a run that ends does not wait; another one waits until the streamer has been back for the time-out
            if end is None or not end.gates or not is_read or not (self._run.is_ending or has_answered):
                continue
            given_up = epochs.given_up(end.gates, time_ms, timeout_ms)
            if given_up != end.gates:
                ends[member.authority] = replace(end, gates=given_up)
                if member not in members:
                    members.append(member)

    async def _gates(self, member: Member, start: HistoryOffset, end: HistoryOffset) -> Gates | None:
        back, missing = frozenset(member.agreed), frozenset(one.incarnation for one in member.losses if not one.before)
        begin = start.seqs | member.agreed
        if not back | missing and start.seqs == end.seqs:
            return start.gates
        gates = start.gates
        if gates is None:
            gates = epochs.begin(
                await self._snapshot(member, {one: start.seqs.get(one, 0) for one in end.seqs}), is_new=False
            )
        frontiers, lossy = list[FrontierRecord](), set[str]()
        for name, until in end.seqs.items():
            after = end.after.get(name, begin.get(name, 0))
            if until > after:
                known = tuple(start.known.get(name, {}).items()) if name not in back else ()
                found, is_lossy = await self._frontiers(Range(member.authority, name, after, until, (), known))
                frontiers += found
                lossy |= {name} if is_lossy and after else set()
        batch = BatchFrontiers(begin, end.seqs, frontiers, self._topics, frozenset(lossy), back, missing)
        return epochs.advance(gates, batch, now_ms())

    async def _snapshot(self, member: Member, seqs: LogSeqs) -> list[FrontierRecord]:
        """Returns the latest frontier of each keeper at these positions."""
        asked = poll_at(epochs.TOPICS, HistoryOffset(dict(seqs)))
        found = await self._session.call(member.authority, lambda client: client.frontiers(asked))
        return list(epochs.frontier_records(found))

    async def _frontiers(self, range: Range) -> tuple[list[FrontierRecord], bool]:
        """Returns the frontiers in `range`, and whether any of them are lost."""
        found: list[FrontierRecord] = []
        position, known, is_lossy = range.after, dict(range.known), False
        while position < range.until:
            asked = range_poll(epochs.TOPICS, range, position, known)
            response = await self._session.call(range.authority, lambda client, asked=asked: client.poll(asked))  # type: ignore[misc]
            gaps = [loss for loss in losses(response, known, range.incarnation) if loss.after < range.until]
            is_lossy = is_lossy or bool(gaps)
            found += epochs.frontier_records(
                one for one in response.batches if one.incarnation.hex() == range.incarnation
            )
            reached = max([position, *(one.seq for one in response.next if one.incarnation.hex() == range.incarnation)])
            reached = max([reached, *(gap.before - 1 for gap in gaps)])
            if reached == position:
                break
            position = reached
        return found, is_lossy or position < range.until
