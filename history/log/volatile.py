"""The storage of a volatile log: a ring in memory.

append -> number -> chunks -> tail, which holds all records -> on_written
                               '-- oldest records: too many, or too old -> losses -> on_written
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any, TypeVar

from history.file.load import Cursor, Loaded
from history.file.reader import ScanLimits
from history.file.store import LogChanges
from history.file.writer import CHUNK_RECORDS_MAX, RETENTION_PERIOD_MS, Append, Retention, Written, chunk_of
from history.log.storage import FLUSH_MS, Storage
from history.records.chunk import Allowance, Chunk, RetentionLoss, Scan, StreamProgress, Tail, message_id

T = TypeVar("T")


class VolatileStorage(Storage):
    """See Storage. Keeps as many records as fit into `retention_bytes` of memory, on the loop alone."""

    def __init__(self, incarnation: bytes, retention_bytes: int, now_ms: Callable[[], int]) -> None:
        self.durable, self.failures = False, 0
        self.loaded = Loaded(incarnation)
        self.tail = Tail(0, retention_bytes)
        self._now_ms = now_ms
        self._extent = self.loaded.extent
        self._allowance = Allowance()
        self._aging: asyncio.TimerHandle | None = None

    def start(self, retention: Retention, on_written: Callable[[Written], None]) -> None:
        self._retention, self._on_written = retention, on_written
        self.age()

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

    # -- queries

    async def run(self, call: Callable[..., T], *arguments: object) -> T:
        return call(*arguments)

    async def scan(
        self,
        limits: ScanLimits,
        streams: Set[int] | None,
        newest: Mapping[int, int] | None,
        holes: Sequence[tuple[int, int]],
    ) -> Scan:
        raise AssertionError("all records are in the tail")

    async def find_id(self, id: bytes) -> int | None:
        for chunk in reversed(self.tail.read(self.tail.after)):
            ids = list(map(message_id, chunk.messages))
            if id in ids:
                return chunk.seqs[len(ids) - 1 - ids[::-1].index(id)]
        return None

    async def first_after_time(self, time_ms: int) -> int | None:
        chunks = self.tail.read(self.tail.after)
        return next((chunk.first_seq for chunk in chunks if chunk.time_ms > time_ms), None)

    async def recent_ids(self, count: int) -> list[tuple[int, bytes]]:
        chunks = self.tail.read(self.tail.after)
        ids = [(id, message_id(one)) for chunk in chunks for id, one in zip(chunk.streams, chunk.messages, strict=True)]
        return ids[-count:]
