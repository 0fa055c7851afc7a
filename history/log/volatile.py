"""A volatile log keeps its records here: a ring in memory. What keeps them on disk has the same methods (disk.py).

append -> number -> chunks -> tail, which is all there is -> on_written
                               '-- more than it may have, or too old -> passed -> on_written
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from history.file.load import Loaded
from history.file.reader import Limits
from history.file.writer import (
    CHUNK_RECORDS_MAX,
    RETENTION_PERIOD_MS,
    Append,
    Numbering,
    Writer,
    Written,
    epochs_of,
    origins_of,
)
from history.records.chunk import Allowance, Chunk, Passed, Scan, Tail, message_id

if TYPE_CHECKING:
    from history.log.log import Log

T = TypeVar("T")


class Ring:
    """As many records as fit into `retention_bytes` of memory, on the loop alone."""

    durable = False
    failures = 0

    def __init__(self, incarnation: bytes, retention_bytes: int, now_ms: Callable[[], int]) -> None:
        self.loaded, self.reader = Loaded(incarnation), self
        self.tail = Tail(0, retention_bytes)
        self._now_ms = now_ms
        self._numbering = Numbering(0, self.loaded.streams)
        self._extent = self.loaded.extent
        self._allowance = Allowance()
        self._aging: asyncio.TimerHandle | None = None

    def start(self, log: Log, on_written: Callable[[Written], None]) -> None:
        self._log, self._on_written = log, on_written
        self.age()

    async def close(self) -> None:
        if self._aging is not None:
            self._aging.cancel()

    def append(self, append: Append) -> None:
        time_ms = self._now_ms()
        self._numbering.begin()
        seqs, prev_seqs = self._numbering.number(append.streams)
        origins = None if append.followed is None else origins_of([append])
        whole = Chunk(seqs, time_ms, append.streams, prev_seqs, None, append.messages, origins, epochs_of([append]))
        newest = dict(zip(append.streams, range(len(whole)), strict=True))
        for id, count in Counter(append.streams).items():
            stream, place = self.loaded.streams[id], newest[id]
            first_seq = 0 if stream.records else seqs[append.streams.index(id)]
            stream.grow(first_seq, seqs[place], count, message_id(append.messages[place]), time_ms)
        chunks = [whole.slice(begin, begin + CHUNK_RECORDS_MAX) for begin in range(0, len(whole), CHUNK_RECORDS_MAX)]
        gone: list[Chunk] = []
        for chunk in chunks:
            gone += self.tail.push(chunk, sum([message.ByteSize() for message in chunk.messages]))
        self._extent.newest_seq = whole.last_seq
        self._tell(Written(self._extent, [append], chunks), gone)

    def age(self) -> None:
        """Every second: what is asked for in one step on the loop is there in the whole of it."""
        self._aging = asyncio.get_running_loop().call_later(RETENTION_PERIOD_MS / 1_000, self.age)
        cutoff, keep_after = self._now_ms() - self._log.retention_ms, self._log.keep_after()
        self._allowance.refill()
        gone: list[Chunk] = []
        while len(self.tail) > 1 and (oldest := self.tail.oldest):
            if oldest.time_ms >= cutoff or oldest.last_seq > keep_after:
                break
            gone.append(self.tail.pop())
        self._tell(Written(self._extent), gone)

    def _tell(self, written: Written, gone: list[Chunk]) -> None:
        """`gone` is what the ring no longer has; it is told as far as an endpoint was still owed it."""
        extent, oldest = self._extent, self.tail.oldest
        extent.oldest_seq, extent.floor_seq = oldest.first_seq if oldest is not None else 0, self.tail.after
        extent.stored_bytes = self.tail.bytes
        if gone and (after := self._log.owed_after()) < gone[-1].last_seq:
            after = max(after, gone[0].first_seq - 1)
            written.passed.append(Passed(after, gone[-1].last_seq + 1, self._allowance.take(gone, after)))
        self._on_written(written)

    def save(self, change: Callable[[Writer], bool | None], *, at_once: bool = True) -> None:
        """Nothing here outlives the process."""

    async def look(self) -> None:
        """Nothing is on disk."""

    def flush_soon(self, delay_ms: int) -> None:
        """Nothing here fails."""

    async def run(self, call: Callable[..., T], *arguments: object) -> T:
        return call(*arguments)

    def scan(self, limits: Limits, wanted: object, holes: object) -> Scan:
        raise AssertionError("what isn't in the tail is nowhere")

    def find_id(self, id: bytes) -> int | None:
        for chunk in reversed(self.tail.read(self.tail.after)):
            ids = list(map(message_id, chunk.messages))
            if id in ids:
                return chunk.seqs[len(ids) - 1 - ids[::-1].index(id)]
        return None

    def first_after_time(self, time_ms: int) -> int | None:
        chunks = self.tail.read(self.tail.after)
        return next((chunk.first_seq for chunk in chunks if chunk.time_ms > time_ms), None)

    def recent_ids(self, count: int) -> list[tuple[int, bytes]]:
        chunks = self.tail.read(self.tail.after)
        ids = [(id, message_id(one)) for chunk in chunks for id, one in zip(chunk.streams, chunk.messages, strict=True)]
        return ids[-count:]
