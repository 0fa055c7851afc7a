"""Sample periods: of each topic one record in each period, and no more.

chunk -> of each stream: is it the first of its period? its time, and that of the record before it -> what is given
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from history.log.log import Log
from history.records.chunk import Chunk


class Thinning:
    """At most one record of a topic in each of its periods, by append time: the first. It looks at the log alone, so
    an answer is the same whenever it is asked for again. Made for one answer; what was left out is no gap: the
    predecessor that a record names is the one before it in this answer, or none."""

    def __init__(self, period: Callable[[Log, int], int]) -> None:
        """`period`: of a stream in a log, milliseconds; 0: all of it."""
        self._period = period
        self._newest: dict[tuple[Log, int], tuple[int, int]] = {}  # seq and time of the last one, given or not
        self._given: dict[tuple[Log, int], int] = {}

    async def all_of(self, source: Log, chunks: Iterable[Chunk]) -> list[Chunk]:
        return [thin for chunk in chunks if (thin := await self.thin(source, chunk)) is not None]

    async def thin(self, source: Log, chunk: Chunk) -> Chunk | None:
        """None if nothing is left."""
        if not any(self._period(source, stream) for stream in chunk.stream_set):
            return chunk
        places: list[int] = []
        prev_seqs: list[int] = []
        for place, (seq, prev_seq, stream) in enumerate(zip(chunk.seqs, chunk.prev_seqs, chunk.streams, strict=True)):
            period, key = self._period(source, stream), (source, stream)
            if not period:
                places.append(place)
                prev_seqs.append(prev_seq)
                continue
            before = await self._time_of(source, stream, prev_seq)
            self._newest[key] = seq, chunk.time_ms
            if before is None or before // period != chunk.time_ms // period:
                places.append(place)
                prev_seqs.append(self._given.get(key, 0))
                self._given[key] = seq
        return chunk.pick(places, prev_seqs) if places else None

    async def _time_of(self, source: Log, stream: int, seq: int) -> int | None:
        """Of the record before, if it is still there."""
        newest = self._newest.get((source, stream))
        if newest is not None and newest[0] == seq:
            return newest[1]
        if seq <= source.floor_seq:
            return None
        found = await source.scan(seq - 1, max_records=1, max_bytes=1, until=seq)
        return found.chunks[0].time_ms if found.chunks else None
