"""Where a log keeps its records: a file (DurableStorage), or a ring in memory (VolatileStorage).

durable:  append, save -> Writer (its thread) -> on the loop: tail -> on_written
          reader.scan, ... -> Reader (some threads): records that are no longer in the tail
volatile: append -> number -> chunks -> tail, which holds all records -> on_written
                                        '-- oldest records: too many, or too old -> losses -> on_written

Both have the same methods. These belong to the event loop, and none blocks it.
"""

from __future__ import annotations

import asyncio
import sqlite3
from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final, Self, TypeVar

from history.file.load import Cursor, Loaded
from history.file.reader import Reader
from history.file.store import LogChanges, Store
from history.file.writer import (
    CHUNK_RECORDS_MAX,
    RETENTION_PERIOD_MS,
    Append,
    Retention,
    Writer,
    Written,
    chunk_of,
)
from history.records.chunk import Allowance, Chunk, RetentionLoss, Scan, StreamProgress, Tail, message_id
from storage.faults import is_damage
from storage.runtime import Runtime
from uprotocol.status import UStatusError
from uprotocol.v1.ucode_pb2 import UCode

FLUSH_MS = 200  # what is saved beside records is on disk that soon
READ_THREADS: Final = 2

T = TypeVar("T")


class DurableStorage:
    """Use `open`. `loaded`: the log as it was opened. The streams in it belong to the log, which applies what
    `on_written` reports. `tail`: the newest records. `reader`: for `run`; reads all records."""

    def __init__(
        self,
        store: Store,
        executor: ThreadPoolExecutor,
        name: str,
        tail_bytes: int,
        gather_ms: float,
        now_ms: Callable[[], int],
    ) -> None:
        self.durable = True
        self.loaded, self.tail = store.loaded, Tail(store.extent.newest_seq, tail_bytes)
        self.reader = Reader(store.path, store.runtime.disk)
        self.durations = store.durations
        self._store, self._executor, self._name, self._now_ms = store, executor, name, now_ms
        self._gather_ms = gather_ms
        self._loop = asyncio.get_running_loop()
        self._flush_due: asyncio.TimerHandle | None = None
        self._closed = False

    @classmethod
    async def open(
        cls,
        path: Path,
        name: str,
        retention_bytes: int,
        tail_bytes: int,
        gather_ms: float,
        now_ms: Callable[[], int],
        runtime: Runtime,
    ) -> Self:
        """Raises UStatusError, as Log.open."""
        executor = ThreadPoolExecutor(READ_THREADS, thread_name_prefix=f"history-{name}-read")
        loop = asyncio.get_running_loop()
        try:
            store = await loop.run_in_executor(executor, Store, path, runtime, now_ms, retention_bytes)
        except BaseException:
            executor.shutdown(wait=False)
            raise
        return cls(store, executor, name, tail_bytes, gather_ms, now_ms)

    def start(self, retention: Retention, on_written: Callable[[Written], None]) -> None:
        """`on_written` is called on the loop after each transaction and after each step of retention. `retention` may
        be called from any thread."""
        self._on_written = on_written
        self.writer = Writer(self._store, retention, self._written, self._now_ms, self._name, self._gather_ms)
        # stores the messages; `on_written` reports it, also if it fails
        self.append: Callable[[Append], None] = self.writer.worker.put

    def limit(self, age_ms: int, bytes_max: int, gather_ms: float) -> None:
        self.writer.limit(age_ms, bytes_max, gather_ms)

    async def close(self) -> None:
        """Write everything that is queued, and release the file."""
        self._closed = True
        if self._flush_due is not None:
            self._flush_due.cancel()
        await self.writer.stop()
        await self._loop.run_in_executor(self._executor, self.reader.close)
        self._executor.shutdown(wait=False)

    def _written(self, written: Written) -> None:
        for chunk in written.chunks:
            self.tail.push(chunk, sum(map(len, chunk.data)))
        self._on_written(written)
        self._store.heard_seq = max(self._store.heard_seq, written.extent.newest_seq)

    # -- beside records

    def save(self, changes: LogChanges, *, soon: bool = True) -> None:
        """Save `changes` with the next transaction; `soon`: within FLUSH_MS even if nothing is appended."""
        self.writer.save(changes)
        if soon:
            self.flush_soon()

    def save_lazily(self, cursors: Mapping[str, Cursor], meta: Mapping[str, Any], records: int) -> None:
        """Save cursors and rows of META that have only moved, the cursors by `records`: within
        history.file.writer.CURSORS_IDLE_S, or earlier with records that are appended."""
        if self.writer.save_lazily(cursors, meta, records):
            self.flush_soon()

    def flush_soon(self, delay_ms: int = FLUSH_MS, *, with_lazy: bool = False) -> None:
        """Run a transaction after `delay_ms`, even if nothing is to be written: it repeats what has failed.
        `with_lazy`: it includes everything that was saved lazily."""
        if with_lazy:
            self.writer.include_lazy()
        if self._flush_due is None and not self._closed:
            self._flush_due = self._loop.call_later(delay_ms / 1_000, self._flush)

    def _flush(self) -> None:
        self._flush_due = None
        self.writer.flush()

    async def check_file(self) -> None:
        """Run a transaction soon if the file was moved or deleted, so that this is noticed although nothing is
        appended."""
        if not self._closed:
            try:
                await self._loop.run_in_executor(self._executor, self._store.file.require_in_place)
            except sqlite3.OperationalError:
                self.flush_soon(0)

    async def run(self, call: Callable[..., T], *arguments: object) -> T:
        """Run `call` beside the loop, for example a method of `reader`. Raises UNAVAILABLE, DATA_LOSS."""
        if self._closed:
            raise UStatusError(UCode.UNAVAILABLE, f"the log {self._name} is closed")
        try:
            return await self._loop.run_in_executor(self._executor, call, *arguments)
        except (sqlite3.Error, UnicodeDecodeError) as error:  # the latter where SQLite quotes damaged text
            code = UCode.UNAVAILABLE if isinstance(error, sqlite3.Error) and not is_damage(error) else UCode.DATA_LOSS
            raise UStatusError(code, f"the log {self._name} can't be read: {error}") from error


class VolatileStorage:
    """Keeps as many records as fit into `retention_bytes` of memory, on the loop alone."""

    def __init__(self, incarnation: bytes, retention_bytes: int, now_ms: Callable[[], int]) -> None:
        self.durable, self.durations = False, deque[tuple[float, float]]()
        self.loaded = Loaded(incarnation)
        self.tail, self.reader = Tail(0, retention_bytes), self
        self._now_ms = now_ms
        self._extent = self.loaded.extent
        self._allowance = Allowance()
        self._aging: asyncio.TimerHandle | None = None

    def start(self, retention: Retention, on_written: Callable[[Written], None]) -> None:
        self._retention, self._on_written = retention, on_written
        self.age()

    def limit(self, age_ms: int, bytes_max: int, _gather_ms: float) -> None:
        self._retention.age_ms, self.tail.bytes_max = age_ms, bytes_max

    async def close(self) -> None:
        if self._aging is not None:
            self._aging.cancel()

    def append(self, append: Append) -> None:
        ids, messages, streams = append.streams, append.messages, self.loaded.streams
        whole = chunk_of([append], self._extent.newest_seq, streams, {}, self._now_ms())
        newest = dict(zip(ids, range(len(whole)), strict=True))
        progress: dict[int, StreamProgress] = {}
        for id, count in Counter(ids).items():
            stream, index = streams[id], newest[id]
            first_seq = stream.first_seq if stream.records else whole.seqs[ids.index(id)]
            newest_id = message_id(messages[index])
            progress[id] = first_seq, whole.seqs[index], stream.records + count, newest_id, whole.time_ms
        chunks = [whole.slice(begin, begin + CHUNK_RECORDS_MAX) for begin in range(0, len(whole), CHUNK_RECORDS_MAX)]
        removed: list[Chunk] = []
        for chunk in chunks:
            removed += self.tail.push(chunk, sum([message.ByteSize() for message in chunk.messages]))
        self._extent.newest_seq = whole.last_seq
        self._report(Written(self._extent, [append], chunks, progress), removed)

    def age(self) -> None:
        """Remove old records every second: a caller that reads in one step on the loop finds the same records
        throughout that step."""
        self._aging = asyncio.get_running_loop().call_later(RETENTION_PERIOD_MS / 1_000, self.age)
        cutoff, keep_after = self._now_ms() - self._retention.age_ms, self._retention.keep_after()
        self._allowance.refill()
        removed: list[Chunk] = []
        while len(self.tail) > 1 and (oldest := self.tail.oldest):
            if oldest.time_ms >= cutoff or oldest.last_seq > keep_after:
                break
            removed.append(self.tail.pop())
        self._report(Written(self._extent), removed)

    def _report(self, written: Written, removed: list[Chunk]) -> None:
        extent, oldest = self._extent, self.tail.oldest
        extent.oldest_seq, extent.floor_seq = oldest.first_seq if oldest is not None else 0, self.tail.after
        extent.stored_bytes = self.tail.bytes
        if removed and (after := self._retention.owed_after()) < removed[-1].last_seq:
            after = max(after, removed[0].first_seq - 1)
            chunks = self._allowance.take(removed, after)
            written.losses.append(RetentionLoss(after, removed[-1].last_seq + 1, chunks))
        self._on_written(written)

    # -- nothing here outlives the process

    def save(self, changes: LogChanges, *, soon: bool = True) -> None:
        pass

    def save_lazily(self, cursors: Mapping[str, Cursor], meta: Mapping[str, Any], records: int) -> None:
        pass

    def flush_soon(self, delay_ms: int = FLUSH_MS, *, with_lazy: bool = False) -> None:
        pass

    async def check_file(self) -> None:
        pass

    # -- queries, as those of a Reader

    async def run(self, call: Callable[..., T], *arguments: object) -> T:
        return call(*arguments)

    def scan(self, *_: object) -> Scan:
        raise AssertionError("all records are in the tail")

    def find_id(self, id: bytes) -> int | None:
        for chunk in reversed(self.tail.read(self.tail.after)):
            ids = list(map(message_id, chunk.messages))
            if id in ids:
                return chunk.seqs[len(ids) - 1 - ids[::-1].index(id)]
        return None

    def find_ids(self, ids: Set[bytes], after: int, until: int) -> tuple[dict[tuple[int, bytes], int], int]:
        raise AssertionError("only what a durable log has is known after a restart")

    def first_after_time(self, time_ms: int) -> int | None:
        chunks = self.tail.read(self.tail.after)
        return next((chunk.first_seq for chunk in chunks if chunk.time_ms > time_ms), None)

    def times_of(self, seqs: Sequence[int]) -> list[int]:
        chunks = self.tail.read(self.tail.after)
        firsts = [chunk.first_seq for chunk in chunks]
        return [chunks[at - 1].time_ms if at else 0 for at in (bisect_right(firsts, seq) for seq in seqs)]

    def recent_ids(self, count: int) -> list[tuple[int, bytes]]:
        chunks = self.tail.read(self.tail.after)
        pairs = (pair for chunk in chunks for pair in zip(chunk.streams, chunk.messages, strict=True))
        return [(id, message_id(message)) for id, message in pairs][-count:]


Storage = DurableStorage | VolatileStorage
