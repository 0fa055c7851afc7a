"""The gate of a topic that has a recovery source: messages pass in order, and wait where one may be missing.

live --take--> does it follow the last one? -> flow -> one append: messages, position -> acknowledged
                '- no: waits <------------ refused: waits again, behind a new answer
                        '-> the source is asked after the position -> recovered messages, then those that wait
                             '- no answer, or a hole in it, for timeout_s, or too many wait: the gap is reported, and
                                they go on

The position behind the last message is committed with it. So a process that is killed asks for what it has not stored,
and what comes twice is known by its id or its position. A source that can't tell the predecessor of a message is asked
when something may be missing: at the start, after a disconnect, after a failed append, and after silence.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final

import structlog

from history.log.log import Log
from streamer.recovery.appending import TopicAppender
from streamer.recovery.asking import AskedSource
from streamer.recovery.waiting import GateEntry, WaitingEntries, after_position, anchored, chained
from streamer.walk.flow import Flow
from streamer.walk.ingress import IdWindow
from uprotocol import uri as uris
from uprotocol.encoded import EncodedMessage
from uprotocol.pacing import Backoff
from uprotocol.status import UStatusError
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.umessage_pb2 import UMessage
from uprotocol.v1.uri_pb2 import UUri

WAITING_MESSAGES_MAX: Final = 4_096  # of one topic: some seconds of a fast one; more count as the timeout
WAITING_BYTES_MAX: Final = 4 << 20
PAGES_MAX: Final = 1_000  # of one answer; the next attempt goes on from there
ASK_MS_MIN: Final = 200  # between attempts, while a source does not answer, or answers with a hole
ASK_MS_MAX: Final = 30_000

log = structlog.get_logger()


class Cause(Enum):
    START = "the gateway has started"
    NETWORK = "the network was away"
    GAP = "a message is missing"
    REFUSED = "the log has refused messages"
    IDLE = "no message came for a while"


@dataclass(frozen=True)
class GateParts:
    """What a gate works with. `inward(authority)`: the name inside of an authority as a source writes it;
    `on_gap(topic, log, what)` reports lost messages; `on_answer(topic, position)`: an answer is complete;
    `is_heard()`: the topic's network is connected, and listened to."""

    log: Log
    flow: Flow
    window: IdWindow
    inward: Callable[[str], str]
    on_gap: Callable[[UUri, Log, str], None]
    on_answer: Callable[[UUri, str | None], None]
    is_heard: Callable[[], bool]
    now_ms: Callable[[], int]
    backoff: Backoff


class Gate:
    """The gate of one topic, on the event loop. `came_at`: loop time of the last live message or answer.

    Its state: the entries that wait (`_waiting`), those as well that are under way (`_entries`), and those behind a
    hole (`_beyond`); whether the gate is closed, and why (`_is_closed`, `_cause`, `_is_gap_open`); the attempt to
    recover (`_task`), and what makes the next turn due (`_is_due`, `_timer`).
    """

    def __init__(self, topic: UUri, source: AskedSource, parts: GateParts) -> None:
        self.topic, self.source, self._parts = topic, source, parts
        self._loop = asyncio.get_running_loop()
        self._timeout_s = source.section.timeout_s
        self._waiting = WaitingEntries()
        self._entries: dict[bytes, GateEntry] = {}  # those that wait or are under way: not committed, not refused
        self._appender = TopicAppender(topic, parts.log, parts.flow, self._committed, self._failed)
        self._beyond: list[GateEntry] = []  # recovered, but behind a hole
        self._is_closed = False  # messages wait, unless their predecessor is the last one
        self._cause = Cause.START
        self.came_at = self._loop.time()
        self._is_gap_open = False  # reported, and the source has not answered since
        self._task: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._is_due = self._is_stopped = False

    def __repr__(self) -> str:
        state = self._cause.value if self._is_closed else "open"
        return f"Gate({uris.format(self.topic)}, {state}, {self.waiting} wait)"

    @property
    def position(self) -> str | None:
        """Returns the position behind the last message that was given to the log; None: there was none."""
        return self._appender.position

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def is_asking(self) -> bool:
        return self._task is not None

    # Live messages

    def take(self, message: EncodedMessage, key: bytes) -> asyncio.Future[int] | None:
        """Take a message of the topic; `key`: in the window of ids. Returns what is settled when it is committed; None
        if it was committed before."""
        if not self._parts.window.take(key):
            self.source.counts["duplicate"] += 1
            known = self._entries.get(key)
            if known is None:
                return None
            if known.taken is None:  # it was recovered, and may yet fail
                known.taken, known.since = self._loop.create_future(), self._loop.time()
            return known.taken
        self.came_at = self._loop.time()
        taken: asyncio.Future[int] = self._loop.create_future()
        entry = self._entries[key] = self.source.entry(message, key, self.came_at, taken)
        self._waiting.add(entry)
        if not self._is_due:
            self._is_due = True
            self._loop.call_soon(self._turn)
        return taken

    def _turn(self) -> None:
        """Let pass what may pass; ask for what is missing."""
        self._is_due = False
        if self._is_stopped:
            self._refuse_all(UStatusError(UCode.UNAVAILABLE, "the gateway stops: the message comes again"))
            return
        self._advance()
        if not self._waiting or self._appender.is_failing:
            return
        if not self._is_closed or self._task is None:
            self.ask(Cause.GAP)
        if len(self._waiting) > WAITING_MESSAGES_MAX or self._waiting.bytes > WAITING_BYTES_MAX:
            self._end_wait("too many messages wait for it")
        else:
            self._set_timer()

    def _advance(self) -> None:
        """Append the waiting messages that follow the position without a hole."""
        if self._appender.is_failing:
            return
        ready: list[GateEntry] = []
        while (entry := self._next()) is not None:
            self._waiting.pop(entry.key)
            self._appender.position = entry.position
            ready.append(entry)
        self._appender.append(ready)

    def _next(self) -> GateEntry | None:
        if not self._waiting:
            return None
        if self.source.has_predecessors and (entry := self._waiting.behind(self._appender.position)) is not None:
            return entry
        first = self._waiting.first
        return first if first.follows is None and not self._is_closed else None

    # Asking the source

    def doubt(self, cause: Cause) -> None:
        """Note that messages may be missed from now on, so that the next one waits for an answer."""
        if not self._is_stopped:
            self._is_closed, self._cause = True, cause

    def ask(self, cause: Cause) -> None:
        """Ask the source. Messages whose predecessor is not known to be there wait for the answer."""
        if self._is_stopped:
            return
        if not self._is_closed or self._cause is Cause.IDLE:
            self._cause = cause
        self._is_closed = True
        self._set_timer()
        if self._task is None:
            self._begin()
        elif cause is not Cause.REFUSED:
            self._parts.backoff.wake()

    def _begin(self) -> None:
        self._task = self._loop.create_task(self._ask_on(), name=f"recover {uris.format(self.topic)}")

    async def _ask_on(self) -> None:
        """Ask until the answer is complete, and no trouble is left."""
        backoff = self._parts.backoff
        if self._cause is Cause.REFUSED:
            await backoff.wait()
        while True:
            is_done = False
            try:
                is_done = not self._appender.is_failing and await self._answer(self._appender.round)
            except UStatusError as error:
                self.source.failed(self.topic, error)
            except Exception as error:  # a fault of ours must not end it without a report
                log.exception("a topic can't be recovered; trying again", topic=uris.format(self.topic))
                self.source.failed(self.topic, UStatusError(UCode.INTERNAL, f"a fault of this program: {error!r}"))
            if is_done:
                break
            await backoff.wait()
        backoff.reset()
        self._task = None
        self._open()

    async def _answer(self, round: int) -> bool:
        """Take all pages of an answer. Returns whether nothing is missing any more. Raises UStatusError."""
        after = self._appender.position
        for _ in range(PAGES_MAX):
            fetched = await self.source.fetch(self.topic, after, self._timeout_s)
            self.came_at = self._loop.time()
            if round != self._appender.round:
                return False
            if not self._is_closed:  # nobody waited for it, and messages have passed meanwhile: ask again
                if not fetched.messages:
                    self._answered()
                    return True
                self.ask(Cause.IDLE)
                after = self._appender.position
                continue
            has_moved = self._take_page(fetched.messages, fetched.next)
            if not fetched.more:
                self._answered()
                return self._is_complete()
            if not has_moved and fetched.next in (None, after):
                raise UStatusError(UCode.FAILED_PRECONDITION, "it says that there is more, and gives nothing new")
            after = fetched.next or self._appender.position
            await self._appender.settled()  # so that no more than a page is in memory
            if round != self._appender.round:
                return False
        raise UStatusError(UCode.RESOURCE_EXHAUSTED, f"its answer has more than {PAGES_MAX} pages")

    def _answered(self) -> None:
        self.source.answered(self.topic)
        self._parts.on_answer(self.topic, self.position)
        if self._is_gap_open:
            self._is_gap_open = False
            log.info("a gap has ended", topic=uris.format(self.topic), position=self.position)

    def _take_page(self, messages: Sequence[UMessage], next: str | None) -> bool:
        """Append the recovered messages of a page, and those that wait, in order. Returns whether there was a new
        one, or the position has moved."""
        parts, counts = self._parts, self.source.counts
        found = self.source.entries(self.topic, messages, parts.inward, self._loop.time())
        entries = after_position(found, self._appender.position)
        if self.source.has_predecessors:
            chain, self._beyond = chained(entries, self._appender.position)
        else:
            chain, self._beyond = entries, []
        times = [entry.message.created_ms for entry in chain]
        counts["out_of_order"] += chain != entries[: len(chain)] or times != sorted(times)
        before, batch, keys = self._appender.position, list[GateEntry](), {entry.key for entry in chain}
        if before is None and chain:  # what is known to precede the first one
            batch += filter(None, (self._waiting.pop(one.key) for one in anchored([*self._waiting], chain[0].follows)))
        for entry in chain:
            if not self.source.has_predecessors:
                batch += self._earlier_than(entry, keys)
            waiting = self._waiting.pop(entry.key)
            if waiting is not None:
                batch.append(waiting)
            elif entry.message.is_expired(parts.now_ms()):
                counts["expired"] += 1
            elif parts.window.take(entry.key):
                self._entries[entry.key] = entry
                batch.append(entry)
            else:
                counts["duplicate"] += 1
            self._appender.position = entry.position
        if next is not None and not self.source.has_predecessors:
            self._appender.position = next
        if batch:
            self._appender.append(batch)
        elif self._appender.position != before:
            self._appender.keep()
        return bool(batch) or self._appender.position != before

    def _earlier_than(self, entry: GateEntry, keys: set[bytes]) -> list[GateEntry]:
        """Returns the first ones that wait and are older than `entry`, except those of the answer: it orders them."""
        found = []
        while self._waiting:
            first = self._waiting.first
            if first.key in keys or first.message.created_ms >= entry.message.created_ms:
                break
            found.append(first)
            self._waiting.pop(first.key)
        return found

    def _is_complete(self) -> bool:
        """Returns whether nothing is missing before what waits."""
        if not self.source.has_predecessors:
            return True
        if self._appender.position is None and self._waiting:  # the source knows nothing before it
            first = self._waiting.first
            self._waiting.pop(first.key)
            self._appender.position = first.position
            self._appender.append([first])
        self._advance()
        return not self._waiting

    def _open(self) -> None:
        self._is_closed, self._beyond = False, []
        self._stop_waiting()
        self._turn()
        if not self._is_closed and not self._parts.is_heard():
            self.doubt(Cause.NETWORK)  # what is published now is missed

    # The end of waiting

    def _set_timer(self) -> None:
        if self._timer is None and self._waiting:
            self._timer = self._loop.call_at(self._waiting.first.since + self._timeout_s, self._time_out)

    def _time_out(self) -> None:
        self._timer = None
        if not self._waiting:
            return
        if self._waiting.first.since + self._timeout_s > self._loop.time():
            self._set_timer()
        else:
            self._end_wait(f"it has not brought them within {self._timeout_s:g} s")

    def _end_wait(self, why: str) -> None:
        """What waits has waited for long enough."""
        if self._appender.refusal is not None:  # nothing is lost: the network, or the source, has it still
            self._refuse_all(self._appender.refusal)
            return
        self._stop_waiting()
        self._is_closed = False
        if self.source.has_predecessors:
            batch = self._with_gaps(why)
        else:
            if self._cause is not Cause.IDLE and not self._is_gap_open:
                self._is_gap_open = True
                self._report("after", ", until its source answers", why)
            batch = list(self._waiting)
            self._waiting.clear()
            self._appender.position = batch[-1].position
        self._beyond = []
        self._appender.append(batch)
        if self.source.is_in_trouble(self.topic):
            self._begin()  # until it answers, though nobody waits for it

    def _with_gaps(self, why: str) -> list[GateEntry]:
        """Returns all that waits, and what was recovered before it, as it follows one another. Reports each gap."""
        batch: list[GateEntry] = []
        while self._waiting:
            entry = self._waiting.behind(self._appender.position)
            if entry is None:
                entry = self._waiting.first
                recovered = anchored(self._beyond, entry.follows)
                if entry.follows is not None:
                    end = recovered[0] if recovered else entry
                    self._report("between", f" and {end.position}", why)
                new = [one for one in recovered if self._parts.window.take(one.key)]
                self._entries |= {one.key: one for one in new}
                batch += new
                self._beyond = []
            self._waiting.pop(entry.key)
            batch.append(entry)
            self._appender.position = entry.position
        return batch

    def _report(self, where: str, end: str, why: str) -> None:
        self.source.counts["gaps"] += 1
        begin = "the first one" if self.position is None else f"position {self.position}"
        trouble = f" ({self.source.trouble})" if self.source.is_in_trouble(self.topic) else ""
        what = f"messages may be lost {where} {begin}{end}: {self._cause.value}, and {why}{trouble}"
        self._parts.on_gap(self.topic, self._parts.log, what)

    def _refuse_all(self, error: UStatusError) -> None:
        for entry in list(self._waiting):
            self._refuse(entry, error)
        self._waiting.clear()

    def _refuse(self, entry: GateEntry, error: UStatusError) -> None:
        """Give a message back to its network, which may deliver it again; the source has it, too."""
        self._parts.window.forget(entry.key)
        self._entries.pop(entry.key, None)
        if entry.taken is not None:
            self.source.counts["refused"] += 1
            if not entry.taken.done():
                entry.taken.set_exception(error)

    def _stop_waiting(self) -> None:
        for one in (self._task, self._timer):
            if one is not None:
                one.cancel()
        self._task = self._timer = None

    def stop(self) -> None:
        """Stop asking, and give what waits back to the network."""
        self._is_stopped = True
        self._stop_waiting()
        self._turn()

    # The log's answers

    def _committed(self, entries: Sequence[GateEntry], seq: int) -> None:
        for at, entry in enumerate(entries):
            self._entries.pop(entry.key, None)
            if entry.taken is None:
                self.source.counts["recovered"] += 1
            elif not entry.taken.done():
                entry.taken.set_result(seq + at)

    def _failed(self, entries: Sequence[GateEntry], error: UStatusError) -> None:
        """All that was under way has failed: it waits again, and the source is asked from the committed position on."""
        self._beyond = []
        live, end = list[GateEntry](), self._loop.time() - self._timeout_s
        for entry in entries:
            if entry.taken is None or entry.since <= end:
                self._refuse(entry, error)
            else:
                live.append(entry)
        self._waiting.add_in_front(live)
        self.ask(Cause.REFUSED)
        if self._is_stopped:
            self._turn()
