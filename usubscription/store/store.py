"""Threads around the database: one writes, one reads, the loop never waits for a disk.

submit(event) -> queue -> writer's thread: whatever has come, one transaction -> loop: Index, committed(outcomes)
                                                                                  answers, answered(outcomes)
read(question) -> queue -> a reader's thread: whatever has come -> loop: the answers
"""

from __future__ import annotations

import asyncio
import functools
import sqlite3
from collections.abc import Awaitable, Callable, Iterable, Sequence
from itertools import islice
from typing import Any, Final, Protocol, TypeVar

import structlog

from storage.faults import DamagedError
from storage.runtime import REAL, Runtime
from storage.worker import WAITING_MAX, Answerer, Reply, give
from uprotocol.status import UStatusError
from uprotocol.v1.ucode_pb2 import UCode
from usubscription.state import Key, Status
from usubscription.store.database import Database, Outcome, StoreEvent
from usubscription.store.reader import Reader
from usubscription.store.schema import STORE

READ_BATCH_MAX: Final = 8  # of questions: each answer may be a page of 768 KiB, and they lie in memory together
# from one commit to the next while requests keep coming: the more share a commit, the less each costs
GATHER_MS: Final = 4
# then others on the loop have their turn: a question that needs 0.1 ms must not wait for 256 answers
ANSWERS_AT_ONCE: Final = 8

SUBSCRIBERS_MAX: Final = 256  # of a topic that is answered from here: their answer takes 0.3 ms of the loop

QUICK, LONG = "quick", "long"  # the lanes of questions: those about one topic don't wait behind a listing of everything

A = TypeVar("A")

log = structlog.get_logger()


class Command(Reply[Outcome], Protocol):
    tag: Any


class Index:
    """Who is subscribed to each topic, as committed: a dispatcher asks for it at every new topic, and must not wait for
    the store's threads. The file stays the owner; this is its table folded by topic, some 120 bytes per subscription.

    Lives on the loop, but for `load`, which comes first.
    """

    def __init__(self) -> None:
        # -> subscriber -> expires_ms, in the order of first subscription (A-36)
        self._topics: dict[Key, dict[Key, int | None]] = {}

    def __repr__(self) -> str:
        return f"Index({len(self._topics)} topics)"

    def load(self, reader: Reader) -> None:
        """Blocks; a million subscriptions take a second."""
        topics = self._topics
        for topic, subscriber, expires_ms in reader.pairs():
            topics.setdefault(topic, {})[subscriber] = expires_ms

    def apply(self, outcomes: Iterable[Outcome]) -> None:
        """What was committed, in that order. Whoever comes, goes or gets another time is in a change; nothing else
        counts here."""
        for outcome in outcomes:
            if outcome.many_changes:  # a reset
                self._topics.clear()
            for stored in outcome.changes:
                topic, subscriber, status, _, expires_ms, *_ = stored.change
                if status is not Status.UNSUBSCRIBED:
                    self._topics.setdefault(topic, {})[subscriber] = expires_ms
                elif (known := self._topics.get(topic)) is not None:
                    known.pop(subscriber, None)
                    if not known:
                        del self._topics[topic]

    def subscribers(self, topic: Key, now_ms: int, offset: int, limit: int) -> tuple[list[Key], bool] | None:
        """As Reader.subscribers; None if there are so many that the store has to be asked."""
        known = self._topics.get(topic)
        if known is None:
            return [], False
        if len(known) > SUBSCRIBERS_MAX:
            return None
        found = (who for who, expires_ms in known.items() if expires_ms is None or expires_ms >= now_ms)
        page = list(islice(found, offset, offset + limit + 1))
        return page[:limit], len(page) > limit


class Store:
    """The service's memory. `committed` is awaited after a commit and before its answers are given, `answered` is
    called after."""

    def __init__(
        self,
        database: Database,
        committed: Callable[[list[Outcome]], Awaitable[None] | None],
        answered: Callable[[list[Outcome]], None],
        on_trouble: Callable[[], None],
        runtime: Runtime = REAL,
    ) -> None:
        self.database = database
        self._committed, self._tell, self._on_trouble = committed, answered, on_trouble
        self._now_ms = runtime.now_ms
        self._start_worker = runtime.worker
        self._writer: Answerer[tuple[StoreEvent, Any], Outcome] | None = None
        self._readers: dict[str, Answerer[Callable[[Reader], Any], Any]] = {}
        self._reading: dict[str, Reader] = {}
        self._batches: asyncio.Queue[Any] = asyncio.Queue()  # bounded by what waits before the writer
        self._answering: asyncio.Task[None] | None = None
        self._commits = True
        self.trouble: str | None = None
        self.index = Index()

    @property
    def healthy(self) -> bool:
        """False while nothing can be stored."""
        return self._commits and self.trouble is None

    async def start(self) -> None:
        """Open the file. One that is damaged is left as it is: `trouble` says what is wrong. Raises UStatusError as
        Database.open."""
        try:
            await asyncio.to_thread(self._open)
        except UStatusError as error:
            if error.code != UCode.DATA_LOSS:
                raise
            self._damaged(error)
            return
        self._writer = Answerer(
            "usubscription-writer", self._write, self._written, gather_ms=GATHER_MS, worker=self._start_worker
        )
        for name, reader in self._reading.items():
            answer = functools.partial(_answer_reads, reader)
            self._readers[name] = Answerer(
                f"usubscription-{name}", answer, self._read, batch_max=READ_BATCH_MAX, worker=self._start_worker
            )
        self._answering = asyncio.ensure_future(self._answer())

    def _damaged(self, error: UStatusError) -> None:
        """From here on nothing is read and nothing written, until a person has come: what is asked is answered with the
        reason."""
        if self.trouble is None:
            self.trouble = error.message
            log.error("the subscriptions are damaged: every request is answered UNAVAILABLE", why=error.message)
            self._on_trouble()

    def _seen(self, answers: Sequence[Any]) -> list[Any]:
        """What callers get of `answers`: damage is UNAVAILABLE to them."""
        seen = list(answers)
        for place, answer in enumerate(answers):
            if isinstance(answer, UStatusError) and answer.code == UCode.DATA_LOSS:
                self._damaged(answer)
                seen[place] = UStatusError(UCode.UNAVAILABLE, answer.message)
        return seen

    def require(self) -> Answerer[tuple[StoreEvent, Any], Outcome]:
        """The writer. Raises UNAVAILABLE while the store can't be used."""
        if self.trouble is not None:
            raise UStatusError(UCode.UNAVAILABLE, self.trouble)
        if self._writer is None:
            raise UStatusError(UCode.UNAVAILABLE, "the uSubscription service is not running")
        return self._writer

    def _written(self, batch: list[Any], answers: Sequence[Any]) -> None:
        self._batches.put_nowait((batch, self._seen(answers)))

    def _read(self, batch: list[Any], answers: Sequence[Any]) -> None:
        give(batch, self._seen(answers))

    def _open(self) -> None:
        self.database.open()
        try:
            self._reading = {name: self.database.reader() for name in (QUICK, LONG)}
            self.index.load(self._reading[LONG])
        except BaseException as error:
            self._close()
            fault: BaseException = error
            if isinstance(error, KeyError | ValueError):  # a bit that flipped in a row is no error to SQLite
                fault = DamagedError(f"{error!r} while its subscriptions were read")
            if isinstance(fault, sqlite3.Error | DamagedError):
                raise STORE.fault(fault, self.database.path, "read") from error
            raise

    def _close(self) -> None:
        for reader in self._reading.values():
            reader.close()
        self._reading = {}
        self.database.close()

    async def stop(self) -> None:
        """Commit and answer what waits, then close the file. May be called twice."""
        writer, readers, self._writer, self._readers = self._writer, self._readers, None, {}
        if writer is not None and self._answering is not None:
            await writer.close()
            for lane in readers.values():
                await lane.close()
            await self._batches.join()
            self._answering.cancel()
            await asyncio.gather(self._answering, return_exceptions=True)
        await asyncio.to_thread(self._close)

    def submit(self, event: StoreEvent, tag: Any = None) -> asyncio.Future[Outcome]:
        """Apply `event`; the future completes once it is on disk. `tag` comes back in the outcome."""
        return self.require().ask((event, tag))

    def command(self, event: StoreEvent, asked: Command) -> None:
        """Apply `event`, and tell `asked` once it is on disk. Raises as `submit`."""
        self.require().put((event, asked.tag), asked)

    def read(self, question: Callable[[Reader], A], *, lane: str = QUICK) -> asyncio.Future[A]:
        """`question(reader)` on a reader's thread; what may look at the whole store goes to the LONG one."""
        self.require()
        return self._readers[lane].ask(question)

    def _write(self, events: list[tuple[StoreEvent, Any]]) -> Sequence[Outcome | BaseException]:
        """On the writer's thread."""
        outcomes = self.database.apply([event for event, _ in events], self._now_ms())
        for outcome, (_, tag) in zip(outcomes, events, strict=True):
            if isinstance(outcome, Outcome):
                outcome.tag = tag
        return outcomes

    async def _answer(self) -> None:
        """Batches one after the other: hook, answers, consequences."""
        while True:
            batch, answers = await self._batches.get()
            try:
                outcomes = [answer for answer in answers if isinstance(answer, Outcome)]
                self._commits = bool(outcomes) or not any(isinstance(answer, BaseException) for answer in answers)
                if outcomes:
                    self.index.apply(outcomes)
                    result = self._committed(outcomes)
                    if result is not None:
                        await result
                for start in range(0, len(batch), ANSWERS_AT_ONCE):
                    end = start + ANSWERS_AT_ONCE
                    give(batch[start:end], answers[start:end])
                    self._tell([answer for answer in answers[start:end] if isinstance(answer, Outcome)])
                    if end < len(batch):
                        await asyncio.sleep(0)
            except Exception:
                log.exception("what follows a commit failed")
                give(batch, answers)
            finally:
                self._batches.task_done()


def _answer_reads(reader: Reader, questions: list[Callable[[Reader], Any]]) -> list[Any]:
    """On a reader's thread."""
    answers: list[Any] = []
    for question in questions:
        try:
            answers.append(question(reader))
        except sqlite3.Error as error:
            answers.append(STORE.fault(error, reader.path, "read"))
        except Exception as error:
            answers.append(error)
    return answers


__all__ = ["LONG", "QUICK", "WAITING_MAX", "Store"]
