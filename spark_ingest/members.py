"""One history of a query, as its planner knows it: the offset, what is planned beyond it, and whether it answers.

poll --> cuts, losses, changed topics --end(taken)--> HistoryOffset of a batch --take--> offset
commit --> acked --cursor--> up to where the history need not keep records
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Final

from spark_ingest import epochs, offsets
from spark_ingest.offsets import Backfill, HistoryOffset, LogLoss, LogSeqs
from spark_ingest.options import Options
from uprotocol import uri as uris
from uprotocol.core.ustreamer.v1.ustreamer_pb2 import LogPlan, Position
from uprotocol.status import UStatusError
from uprotocol.v1.uri_pb2 import UUri

CUTS_MAX: Final = 1_000  # that a history makes for one plan
LEASE_S: Final = 60.0  # of a cursor, until the history says another time

CutsKey = tuple[int, str]
"""Which plan: 0 of the query itself, else the number of a backfill from 1; and the log."""


@dataclass(eq=False)
class QueryRun:
    """What all histories of a running query have in common. `query`: its name; `began_ms`: Unix ms, 0: not begun."""

    options: Options
    query: str = ""
    began_ms: int = 0
    has_begun: bool = False  # a history that joins from now on is not in the checkpoint
    is_ending: bool = False  # it reads what is there, and ends
    is_whole: bool = False  # and all of it in one batch
    has_cursors: bool = True  # False: all is read now or never
    targets: dict[str, LogSeqs] = field(default_factory=dict)  # of a run that ends: where, as far as it is known
    histories: int = 0
    news: asyncio.Event = field(default_factory=asyncio.Event)  # a history has answered, or failed

    @property
    def records_max(self) -> int:
        """Records that one history plans at a time."""
        options = self.options
        return CUTS_MAX * options.max_records_per_partition if self.is_whole else options.max_records_per_batch

    @cached_property
    def coverage_topics(self) -> tuple[str, ...]:
        """As those of the options, computed once and not for each poll."""
        return self.options.coverage_topics

    @cached_property
    def wanted(self) -> list[UUri]:
        """The topics that are asked for; with whole epochs also those of the frontiers."""
        topics = [uris.parse(topic) for topic in self.options.topics]
        return [*topics, *epochs.TOPICS] if topics and self.options.epochs == "complete" else topics


@dataclass(eq=False, slots=True)
class Member:
    """One history, and what is known of it. `offset`: the end of its latest batch; None: it has not answered yet."""

    authority: str
    offset: HistoryOffset | None = None
    begin: LogSeqs = field(default_factory=dict)  # of a history that no batch has yet: where the first one begins
    changed: HistoryOffset | None = None  # `offset` with the topics that the next batch has
    cuts: dict[CutsKey, list[LogPlan.Cut]] = field(default_factory=dict)  # planned records that are in no batch yet
    losses: list[LogLoss] = field(default_factory=list)  # found with them
    agreed: LogSeqs = field(default_factory=dict)  # of logs that went back: up to here they are what was read
    next: dict[str, Position] = field(default_factory=dict)  # up to here is in `cuts`, or does not match
    read_ms: int = 0  # append time of records that are in the latest batch, Unix ms
    newest: LogSeqs = field(default_factory=dict)  # the newest matching record
    target: LogSeqs | None = None  # of a run that ends: no record beyond
    acked: HistoryOffset | None = None  # the records up to here are in the sink
    held: LogSeqs | None = None  # seqs of the cursor
    keeps: bool = False  # a cursor that is there already stays where it is
    lease_s: float = LEASE_S
    began_s: float = field(default_factory=time.monotonic)  # since then it is asked
    asked: bool = False  # whether it has answered or failed
    is_stale: bool = False  # the plan at hand is to be made again, since more records may have come
    is_full: bool = False  # the plan at hand has as many records as a plan may have
    planned_s: float = 0.0  # when it was made, monotonic
    answer_s: float = 0.0  # how long it takes to answer
    wait_ms: int = 20_000  # how long its next poll waits for records
    answered_ms: int = 0  # time of the last answer, Unix ms
    answering_ms: int = 0  # since then it has answered without a failure
    away_ms: int = 0  # since then it has not answered
    error: UStatusError | None = None  # of the last call
    is_refused: bool = False  # and time does not mend it
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    generation: int = 0  # of `offset`: an answer for an earlier one is dropped
    task: asyncio.Task[None] | None = None
    asking: asyncio.Task[None] | None = None  # its poll
    renewing: asyncio.Task[None] | None = None  # moves its cursor

    @property
    def records(self) -> int:
        """Planned matching records that are in no batch yet."""
        return sum(cut.records for cuts in self.cuts.values() for cut in cuts)

    @property
    def has_news(self) -> bool:
        return bool(self.cuts or self.losses or self.agreed) or self.has_other_topics

    @property
    def has_other_topics(self) -> bool:
        old, new = self.offset, self.changed
        return (
            old is not None
            and new is not None
            and (len(old.backfills) != len(new.backfills) or old.coverage not in (None, new.coverage))
        )

    @property
    def backfill(self) -> Backfill | None:
        """The first backfill that is not over."""
        offset = self.changed or self.offset
        return next((one for one in offset.backfills if not one.is_over), None) if offset is not None else None

    @property
    def is_at_target(self) -> bool:
        """Returns whether a run that ends has planned everything here."""
        is_read = (self.next[log].seq >= seq for log, seq in (self.target or {}).items() if log in self.next)
        return self.target is not None and bool(self.next) and self.backfill is None and all(is_read)

    def reset(self, offset: HistoryOffset | None) -> None:
        """Go on from `offset`, since the query does."""
        self.offset, self.begin = offset, {}
        self.plan_again()

    def plan_again(self) -> None:
        """Drop what was planned, and the answer that is under way, and ask again."""
        self.changed, self.cuts, self.losses, self.agreed, self.next = None, {}, [], {}, {}
        self.asked, self.is_stale, self.error, self.is_refused = False, False, None, False
        self.began_s = time.monotonic()
        self.generation += 1
        if self.asking is not None:
            self.asking.cancel()
        self.wake.set()

    def end(self, taken: Mapping[CutsKey, int]) -> HistoryOffset:
        """The end of a batch with the first so many cuts of each plan."""
        assert self.offset is not None, "a history that has not answered has no plan"
        start = self.changed or self.offset
        missing = {loss.incarnation for loss in self.losses if not loss.before}
        if missing:
            start = replace(start, seqs={log: seq for log, seq in start.seqs.items() if log not in missing})
        cuts = {log: self.cuts[where, log][:count] for (where, log), count in taken.items() if not where}
        made = offsets.moved(start, cuts, self.agreed)
        made.after |= {log: seq for log, seq in self.begin.items() if log in cuts}
        reached = {key: self.cuts[key][count - 1].position.seq for key, count in taken.items()}
        made.backfills = tuple(
            replace(one, done=one.done | {log: seq for (where, log), seq in reached.items() if where == place})
            for place, one in enumerate(made.backfills, 1)
            if not one.is_over
        )
        return made

    def take(self, taken: Mapping[CutsKey, int], end: HistoryOffset) -> None:
        """The batch was planned."""
        has_other_topics = self.offset is not None and self.offset.coverage != end.coverage
        self.offset, self.changed, self.begin = end, None, {}
        self.losses, self.agreed = [], {}
        for key, count in taken.items():
            self.read_ms = self.cuts[key][count - 1].first_time_ms
            del self.cuts[key][:count]
        # those of backfills are planned anew: their numbers change when one is over
        self.cuts = {(where, log): cuts for (where, log), cuts in self.cuts.items() if cuts and not where}
        if has_other_topics:
            # what was found not to match, was found so for the topics before, at least in part: it is planned anew
            self.cuts = {}
            self.next = {
                log: Position(incarnation=one.incarnation, seq=end.seqs.get(log, 0)) for log, one in self.next.items()
            }
        if not self.cuts:
            self.wake.set()

    def cursor(self) -> LogSeqs:
        """Up to where the history need not keep records, for all up to `acked` is stored. Names every log: the records
        of a log that is not named are not kept."""
        acked = self.acked
        assert acked is not None, "only then is there a cursor"
        needed = offsets.needed(acked)
        is_quiet = (
            acked == self.offset and not acked.backfills and not any(gate.held for gate in (acked.gates or {}).values())
        )
        made = {}
        for log, position in self.next.items():
            is_read = is_quiet and not self.has_news
            made[log] = position.seq if is_read else needed.get(log, self.begin.get(log, 0))
        return made or needed

    def lag(self, time_ms: int) -> dict[str, Any]:
        """How far the query is behind. `records`: the number of matching records that no batch has yet; beyond the
        plan, each seq counts as a matching record. `seconds`: the time since the oldest of these was appended; if it
        is not planned yet, since the newest records of the latest batch were appended."""
        ends = {log: cuts[-1].position.seq for (where, log), cuts in self.cuts.items() if not where}
        read = self.offset.seqs if self.offset is not None else {}
        beyond = sum(max(0, seq - ends.get(log, read.get(log, 0))) for log, seq in self.newest.items())
        first_ms = min((cuts[0].first_time_ms for cuts in self.cuts.values()), default=self.read_ms if beyond else 0)
        made: dict[str, Any] = {
            "records": self.records + beyond,
            "seconds": max(0, time_ms - first_ms) / 1000 if first_ms else 0.0,
        }
        if self.away_ms or not self.answered_ms:
            reason = self.error.message if self.error is not None else "it has not answered yet"
            away_s = (time_ms - self.away_ms) / 1000 if self.away_ms else round(time.monotonic() - self.began_s, 3)
            made["away"] = {"seconds": away_s, "reason": reason}
        return made


def new_query() -> str:
    """A random name of a query."""
    return os.urandom(8).hex()
