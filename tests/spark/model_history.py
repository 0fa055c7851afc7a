"""A history without network, disk or service, for tests of the planner: it answers Poll from a list of records."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, NamedTuple, TypeVar

from history.records.witness import gap_of
from spark_ingest.options import Options
from uprotocol import uri as uris
from uprotocol.core.ustreamer.v1.ustreamer_pb2 import (
    Gap,
    LogPlan,
    LogState,
    PollRequest,
    PollResponse,
    Position,
    RecordBatch,
    TopicPattern,
    VisibleTopics,
    Witness,
)
from uprotocol.status import UStatusError
from uprotocol.transport import UTransport
from uprotocol.v1.uattributes_pb2 import UAttributes
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.umessage_pb2 import UMessage
from uprotocol.v1.uri_pb2 import UUri

T = TypeVar("T")


class ModelRecord(NamedTuple):
    topic: str
    time_ms: int
    number: int  # of all records that a test has made


class ModelHistory:
    """One log. `visible`: topics that the caller may read; None: all."""

    def __init__(self, incarnation: bytes = b"a" * 16) -> None:
        self.incarnation = incarnation
        self.records: list[ModelRecord] = []  # seq 1 is the first
        self.floor = 0
        self.visible: frozenset[str] | None = None
        self.is_away = False
        self.refuses: UStatusError | None = None
        self.cursors: dict[str, int] = {}
        self.polls = 0
        self._appended = asyncio.Event()

    def append(self, *records: ModelRecord) -> None:
        self.records += records
        self.wake()

    def wake(self) -> None:
        self._appended.set()
        self._appended = asyncio.Event()

    def retain(self) -> None:
        """Delete what no cursor holds."""
        self.floor = max(self.floor, min(self.cursors.values(), default=len(self.records)))

    def _matches(self, topics: list[UUri], record: ModelRecord) -> bool:
        if self.visible is not None and record.topic not in self.visible:
            return False
        return not topics or any(uris.matches(topic, uris.parse(record.topic)) for topic in topics)

    def _witness(self, seq: int) -> list[Witness]:
        known = self.floor < seq <= len(self.records)
        return [Witness(seq=seq, digest=b"%d" % self.records[seq - 1].number)] if known else []

    def _position(self, seq: int) -> Position:
        return Position(incarnation=self.incarnation, seq=seq, witnesses=self._witness(seq))

    def _begin(self, asked: PollRequest, answer: PollResponse) -> int:
        for position in asked.positions:
            if position.incarnation == self.incarnation:
                return position.seq
            if position.seq:
                answer.gaps.append(gap_of(Gap.REASON_INCARNATION, position.incarnation, position.seq))
        start = asked.WhichOneof("start")
        if start == "latest":
            return len(self.records)
        if start == "after_time":
            after_ms = asked.after_time.ToMilliseconds()
            older = sum(record.time_ms <= after_ms for record in self.records)
            return max(older, self.floor)
        return self.floor

    def reachable(self) -> None:
        if self.is_away:
            raise UStatusError(UCode.UNAVAILABLE, "nobody answers")
        if self.refuses is not None:
            raise self.refuses

    async def poll(self, asked: PollRequest, **_: Any) -> PollResponse:
        self.polls += 1
        topics, deadline = list(asked.topics), asyncio.get_event_loop().time() + asked.wait_ms / 1000
        reading = PollRequest()
        reading.CopyFrom(asked)
        has_time = bool(asked.wait_ms)
        while True:
            self.reachable()
            answer, appended = self._answer(reading, topics), self._appended
            if answer.plan or answer.batches or answer.gaps or not has_time:
                return answer
            # it reads on from there, with what its caller may read then
            reading.ClearField("start")
            del reading.positions[:]
            reading.positions.extend(answer.next)
            try:
                async with asyncio.timeout_at(deadline):
                    await appended.wait()
            except TimeoutError:
                has_time = False

    def _answer(self, asked: PollRequest, topics: list[UUri]) -> PollResponse:
        answer = PollResponse()
        begin = self._begin(asked, answer)
        ends = {one.incarnation: one.seq for one in asked.until}
        end = min(len(self.records), ends.get(self.incarnation, len(self.records)))
        answer.begin.append(self._position(begin))
        lost = [seq for seq in range(begin + 1, self.floor + 1) if self._matches(topics, self.records[seq - 1])]
        if lost and lost[0] <= end:
            answer.gaps.append(gap_of(Gap.REASON_RETENTION, self.incarnation, begin, self.floor + 1))
        seqs = [
            seq for seq in range(max(begin, self.floor) + 1, end + 1) if self._matches(topics, self.records[seq - 1])
        ]
        limit = asked.max_records or 1_000_000
        covered = end if len(seqs) <= limit else seqs[limit - 1]
        seqs = seqs[:limit]
        if asked.plan_records:
            self._plan(answer, seqs, asked.plan_records, topics)
            answer.visible.CopyFrom(self._visible())
        elif seqs:
            answer.batches.append(
                RecordBatch(
                    incarnation=self.incarnation,
                    seq=seqs,
                    prev_seq=[0] * len(seqs),
                    time_ms=[self.records[seq - 1].time_ms for seq in seqs],
                    message=[_message(self.records[seq - 1]).SerializeToString() for seq in seqs],
                )
            )
        answer.next.append(self._position(max(begin, covered)))
        if asked.consumer:
            answer.lease_ms = 60_000
            self.cursors.setdefault(asked.consumer, begin)
            for position in asked.acked:
                if position.incarnation == self.incarnation:
                    self.cursors[asked.consumer] = position.seq
        return answer

    def _plan(self, answer: PollResponse, seqs: list[int], each: int, topics: list[UUri]) -> None:
        newest = max((seq for seq, one in enumerate(self.records, 1) if self._matches(topics, one)), default=0)
        plan = LogPlan(incarnation=self.incarnation, newest_match_seq=newest)
        for first in range(0, len(seqs), each):
            part = seqs[first : first + each]
            time_ms = self.records[part[0] - 1].time_ms
            plan.cuts.add(position=self._position(part[-1]), records=len(part), first_time_ms=time_ms)
        if plan.cuts:
            answer.plan.append(plan)

    def _visible(self) -> VisibleTopics:
        if self.visible is None:
            return VisibleTopics(origins=[VisibleTopics.Origin(authorities=["*"])])
        return VisibleTopics(allow=[TopicPattern(topic=uris.parse(topic)) for topic in sorted(self.visible)])

    async def logs(self, topics: list[UUri]) -> list[LogState]:
        self.reachable()
        return [LogState(incarnation=self.incarnation, durable=True, newest_seq=len(self.records))]

    async def followed(self) -> list[UUri]:
        self.reachable()
        return []


def _message(record: ModelRecord) -> UMessage:
    source = uris.parse(record.topic)
    return UMessage(attributes=UAttributes(source=source), payload=b"%d" % record.number)


class ModelSession:
    """In place of spark_ingest.client.Session. Tasks read without a loop, since a model history does not wait then."""

    call_limit_s = 5.0

    def __init__(self, options: Options, histories: dict[str, ModelHistory]) -> None:
        self.options, self.histories = options, histories
        self.on_open: list[Callable[..., Coroutine[Any, Any, None]]] = []
        self.transport: UTransport | None = None

    async def open(self) -> None:
        """Nothing has to be opened."""

    async def call(self, authority: str, ask: Callable[[Any], Coroutine[Any, Any, T]]) -> T:
        return await ask(self.histories[authority])

    def submit(self, call: Coroutine[Any, Any, T]) -> Future[T]:
        done: Future[T] = Future()
        try:
            done.set_result(asyncio.run(call))
        except UStatusError as error:
            done.set_exception(error)
        return done
