"""A volatile log keeps its records here: a ring in memory. What keeps them on disk has the same methods (disk.py).

append -> number -> chunks -> tail, which is all there is -> on_written
                               '-- more than it may have, or too old -> passed -> on_written
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable

from history.chunk import Chunk, Scan, message_id, message_ids
from history.cursors import Cursors
from history.load import Loaded
from history.passed import Allowance, Passed
from history.reader import Limits
from history.tail import Tail
from history.writer import CHUNK_RECORDS_MAX, RETENTION_PERIOD_MS, Append, Numbering, Writer, Written


class Ring:
    """As many records as fit into `retention_bytes` of memory, on the loop alone."""

    durable = False

    def __init__(self, incarnation: bytes, retention_bytes: int, now_ms: Callable[[], int]) -> None:
        self.loaded = Loaded(incarnation)
        self.tail = Tail(0, retention_bytes)
        self._now_ms = now_ms
        self._numbering = Numbering(0, self.loaded.streams)
        self._extent = self.loaded.extent
        self._allowance = Allowance()
        self._aging: asyncio.TimerHandle | None = None

    def start(self, cursors: Cursors, retention_ms: int, on_written: Callable[[Written], None]) -> None:
        self._cursors, self._retention_ms, self._on_written = cursors, retention_ms, on_written
        self.age()

    async def close(self) -> None:
        if self._aging is not None:
            self._aging.cancel()

    def append(self, append: Append) -> None:
        time_ms = self._now_ms()
        self._numbering.begin()
        seqs, prev_seqs = self._numbering.number(append.streams)
        whole = Chunk(seqs, time_ms, append.streams, prev_seqs, None, append.messages)
        self._grow(whole)
        chunks = [whole.slice(begin, begin + CHUNK_RECORDS_MAX) for begin in range(0, len(whole), CHUNK_RECORDS_MAX)]
        gone: list[Chunk] = []
        for chunk in chunks:
            gone += self.tail.push(chunk, sum([message.ByteSize() for message in chunk.messages]))
        self._extent.newest_seq = whole.last_seq
        self._tell(Written(self._extent, [append], chunks), gone)

    def _grow(self, chunk: Chunk) -> None:
        ids = chunk.streams
        newest = dict(zip(ids, range(len(ids)), strict=True))
        for id, count in Counter(ids).items():
            stream, place = self.loaded.streams[id], newest[id]
            first_seq = 0 if stream.records else chunk.seqs[ids.index(id)]
            stream.grow(first_seq, chunk.seqs[place], count, message_id(chunk.messages[place]), chunk.time_ms)

    def age(self) -> None:
        """Every second: what is asked for in one step on the loop is there in the whole of it."""
        self._aging = asyncio.get_running_loop().call_later(RETENTION_PERIOD_MS / 1_000, self.age)
        cutoff, keep_after = self._now_ms() - self._retention_ms, self._cursors.keep_after()
        self._allowance.refill()
        gone: list[Chunk] = []
        while (
            len(self.tail) > 1
            and (oldest := self.tail.oldest)
            and oldest.time_ms < cutoff
            and oldest.last_seq <= keep_after
        ):
            gone.append(self.tail.pop())
        self._tell(Written(self._extent), gone)

    def _tell(self, written: Written, gone: list[Chunk]) -> None:
        """`gone` is what the ring no longer has; it is told as far as an endpoint was still owed it."""
        extent, oldest = self._extent, self.tail.oldest
        extent.oldest_seq, extent.floor_seq = oldest.first_seq if oldest is not None else 0, self.tail.after
        extent.stored_bytes = self.tail.bytes
        if gone and (after := self._cursors.owed_after()) < gone[-1].last_seq:
            after = max(after, gone[0].first_seq - 1)
            written.passed.append(Passed(after, gone[-1].last_seq + 1, self._allowance.take(gone, after)))
        self._on_written(written)

    def save(self, change: Callable[[Writer], None], *, at_once: bool = True) -> None:
        """Nothing here outlives the process."""

    def probe(self) -> None:
        """Nothing here fails."""

    async def run(self, call: Callable[[], None]) -> None:
        call()

    async def scan(self, after: int, until: int, wanted: object, limits: Limits, holes: object) -> Scan:
        raise AssertionError("what isn't in the tail is nowhere")

    async def find_id(self, id: bytes) -> int | None:
        for chunk in reversed(self.tail.read(self.tail.after)):
            ids = message_ids(chunk.messages)
            for place in range(len(chunk) - 1, -1, -1):
                if ids[16 * place : 16 * place + 16] == id:
                    return chunk.seqs[place]
        return None

    async def first_after_time(self, time_ms: int) -> int | None:
        chunks = self.tail.read(self.tail.after)
        return next((chunk.first_seq for chunk in chunks if chunk.time_ms > time_ms), None)

    async def recent_ids(self, count: int) -> list[tuple[int, bytes]]:
        chunks = self.tail.read(self.tail.after)
        ids = [(id, message_id(one)) for chunk in chunks for id, one in zip(chunk.streams, chunk.messages, strict=True)]
        return ids[-count:]
