"""Threads around the database: one writes, two read, and the event loop never waits for the disk.

submit(event) -> queue -> writer's thread: all waiting events in one transaction -> loop: Index, committed(outcomes)
                                                                                     answers, answered(outcomes)
read(query) -> queue -> a reader's thread: all waiting queries -> loop: answers
"""

from __future__ import annotations

import asyncio
import functools
import sqlite3
from collections.abc import Awaitable, Callable, Iterable, Sequence
from itertools import islice
from typing import Any, Final, TypeVar

import structlog

from storage.faults import DamagedError
from storage.runtime import REAL, WORK_BATCH_MAX, Answerer, Gathering, Runtime, give
from uprotocol.status import UStatusError
from uprotocol.tasks import end
from uprotocol.v1.ucode_pb2 import UCode
from usubscription.state import Key, Status
from usubscription.store.database import Database, Outcome, StoreEvent
from usubscription.store.reader import StoreReader
from usubscription.store.tables import STORE

READ_BATCH_MAX: Final = 8  # queries: each answer may be a page of 768 KiB, and all are in memory together
COMMIT_GATHER_MS: Final = 4  # a request waits at most so long for others: a commit of more requests costs less for each
# answers in one turn of the event loop: a request that needs 0.1 ms must not wait for 256 answers
ANSWERS_AT_ONCE: Final = 8

SUBSCRIBERS_MAX: Final = 256  # subscribers of a topic in an answer from memory, which takes 0.3 ms of the loop

QUICK, LONG = "quick", "long"  # lanes of queries: those about one topic do not wait behind a list of everything

A = TypeVar("A")

log = structlog.get_logger()


class Index:
    """The committed subscribers of each topic, in memory: a dispatcher requests them for every new topic, and must not
    wait for the store's threads. Some 120 bytes per subscription.

    Used on the event loop, except `load`, which is called first.
    """

    def __init__(self) -> None:
        # -> subscriber -> expires_ms, in the order of first subscription (A-36)
        self._topics: dict[Key, dict[Key, int | None]] = {}

    def __repr__(self) -> str:
        return f"Index({len(self._topics)} topics)"

    def load(self, reader: StoreReader) -> None:
        """Read all subscriptions. Blocks; a million of them take a second."""
        topics = self._topics
        for topic, subscriber, expires_ms in reader.pairs():
            topics.setdefault(topic, {})[subscriber] = expires_ms

    def apply(self, outcomes: Iterable[Outcome]) -> None:
        """Apply the committed changes, in their order."""
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
        """As StoreReader.subscribers; None if there are more than SUBSCRIBERS_MAX."""
        known = self._topics.get(topic)
        if known is None:
            return [], False
        if len(known) > SUBSCRIBERS_MAX:
            return None
        found = (who for who, expires_ms in known.items() if expires_ms is None or expires_ms >= now_ms)
        page = list(islice(found, offset, offset + limit + 1))
        return page[:limit], len(page) > limit


class SubscriptionStore:
    """The store of the service. `committed` is awaited after a commit and before its answers, `answered` is called
    after them."""

    def __init__(
        self,
        database: Database,
        committed: Callable[[list[Outcome]], Awaitable[None] | None],
        answered: Callable[[list[Outcome]], None],
        on_trouble: Callable[[], None],
        runtime: Runtime = REAL,
    ) -> None:
        self.database = database
        self._committed, self._answered, self._on_trouble = committed, answered, on_trouble
        self._now_ms = runtime.now_ms
        self._start_worker = runtime.worker
        self._writer: Answerer[StoreEvent, Outcome] | None = None
        self._readers: dict[str, Answerer[Callable[[StoreReader], Any], Any]] = {}
        self._reading: dict[str, StoreReader] = {}
        self._batches: asyncio.Queue[Any] = asyncio.Queue()  # bounded by the writer's queue
        self._answering: asyncio.Task[None] | None = None
        self._closing: asyncio.Task[None] | None = None
        self._commits = True
        # how the file is damaged, and what to do about it; every request is answered UNAVAILABLE with this text
        self.trouble: str | None = None
        self.index = Index()

    @property
    def healthy(self) -> bool:
        """False while the store can't write, and permanently if there is `trouble`."""
        return self._commits and self.trouble is None

    async def start(self) -> None:
        """Open the file. A damaged file is left unchanged, and `trouble` says what is wrong. Raises UStatusError as
        Database.open."""
        self._closing = None
        try:
            await asyncio.to_thread(self._open)
        except UStatusError as error:
            if error.code != UCode.DATA_LOSS:
                raise
            self._damaged(error)
            return
        self._writer = Answerer(
            "usubscription-writer",
            lambda events: self.database.apply(events, self._now_ms()),
            lambda batch, answers: self._batches.put_nowait((batch, answers)),
            gathering=Gathering(COMMIT_GATHER_MS, WORK_BATCH_MAX),
            worker=self._start_worker,
        )
        for name, reader in self._reading.items():
            self._readers[name] = Answerer(
                f"usubscription-{name}",
                functools.partial(_answer_reads, reader),
                lambda batch, answers: give(batch, self._without_damage(answers)),
                batch_max=READ_BATCH_MAX,
                worker=self._start_worker,
            )
        self._answering = asyncio.ensure_future(self._answer())

    def _damaged(self, error: UStatusError) -> None:
        """Stop reading and writing, and answer every request with the reason, until the file is repaired."""
        if self.trouble is None:
            self.trouble = error.message
            log.error("the subscriptions are damaged: every request is answered UNAVAILABLE", why=error.message)
            self._on_trouble()

    def _without_damage(self, answers: Sequence[Any]) -> list[Any]:
        """Returns `answers` with UNAVAILABLE instead of DATA_LOSS, and stops the store after that."""
        found = list(answers)
        for index, answer in enumerate(answers):
            if isinstance(answer, UStatusError) and answer.code == UCode.DATA_LOSS:
                self._damaged(answer)
                found[index] = UStatusError(UCode.UNAVAILABLE, answer.message)
        return found

    def writer(self) -> Answerer[StoreEvent, Outcome]:
        """Returns the writer. Raises UNAVAILABLE while the store can't be used."""
        if self.trouble is not None:
            raise UStatusError(UCode.UNAVAILABLE, self.trouble)
        if self._writer is None:
            raise UStatusError(UCode.UNAVAILABLE, "the uSubscription service is not running")
        return self._writer

    def _open(self) -> None:
        self.database.open()
        try:
            self._reading = {name: self.database.reader() for name in (QUICK, LONG)}
            self.index.load(self._reading[LONG])
        except BaseException as error:
            self._close()
            fault: BaseException = error
            if isinstance(error, KeyError | ValueError):  # SQLite does not detect damage within a row
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
        """Commit and answer what is queued, then close the file. May be called again: all callers wait for the same
        closing, which goes on if one of them is cancelled."""
        if self._closing is None:
            self._closing = asyncio.ensure_future(self._stop())
        await asyncio.shield(self._closing)

    async def _stop(self) -> None:
        writer, readers, self._writer, self._readers = self._writer, self._readers, None, {}
        if writer is not None and self._answering is not None:
            await writer.close()
            for lane in readers.values():
                await lane.close()
            await self._batches.join()
            await end(self._answering)
        await asyncio.to_thread(self._close)

    def submit(self, event: StoreEvent) -> asyncio.Future[Outcome]:
        """Apply `event`; the future completes when it is on disk."""
        return self.writer().ask(event)

    def read(self, query: Callable[[StoreReader], A], *, lane: str = QUICK) -> asyncio.Future[A]:
        """Run `query(reader)` on a reader's thread; one that may read the whole store belongs to the LONG lane."""
        self.writer()
        return self._readers[lane].ask(query)

    async def _answer(self) -> None:
        """For each batch: update the index, call `committed`, give the answers, call `answered`."""
        while True:
            batch, answers = await self._batches.get()
            try:
                outcomes = [answer for answer in answers if isinstance(answer, Outcome)]
                if len(outcomes) < len(answers):
                    answers = self._without_damage(answers)
                self._commits = bool(outcomes) or not answers
                if outcomes:
                    self.index.apply(outcomes)
                    result = self._committed(outcomes)
                    if result is not None:
                        await result
                for start in range(0, len(batch), ANSWERS_AT_ONCE):
                    end = start + ANSWERS_AT_ONCE
                    give(batch[start:end], answers[start:end])
                    self._answered([answer for answer in answers[start:end] if isinstance(answer, Outcome)])
                    if end < len(batch):
                        await asyncio.sleep(0)
            except Exception:
                log.exception("the handling of a committed batch failed")
                give(batch, answers)
            finally:
                self._batches.task_done()


def _answer_reads(reader: StoreReader, queries: list[Callable[[StoreReader], Any]]) -> list[Any]:
    """Runs on a reader's thread."""
    answers: list[Any] = []
    for query in queries:
        try:
            answers.append(query(reader))
        except sqlite3.Error as error:
            answers.append(STORE.fault(error, reader.path, "read"))
        except Exception as error:
            answers.append(error)
    return answers
