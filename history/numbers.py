"""The numbers of a log's streams: given out on first use, forgotten when no record of the stream is kept.

stream_id -> known? its number : room? a new one                 every so often: empty for long, nobody uses it -> on_forgotten
"""

from __future__ import annotations

import abc
import asyncio
from collections.abc import Callable, Iterable, Sequence, Set
from typing import Final

from history.disk import Disk
from history.load import Stream
from history.ring import Ring
from history.streams import Streams
from uprotocol.encoded import Carried
from uprotocol.v1.uri_pb2 import UUri

SWEEP_S: Final = 10.0  # between looks for streams that can be forgotten, and ...
SWEEP_AGAIN_S: Final = 0.1  # ... between steps of one
ROOM_AGAIN_S: Final = 1.0  # until room is looked for again where there was none


class StreamNumbers(abc.ABC):
    """The part of a log that is about streams; on the loop."""

    def __init__(self, known: Streams, storage: Disk | Ring) -> None:
        self._known, self._storage = known, storage
        self._loop = asyncio.get_running_loop()
        self._room_due = 0.0  # loop time
        self._forgotten_callbacks: list[Callable[[frozenset[int]], None]] = []
        self._using: list[Callable[[], Iterable[int]]] = []
        self._sweeping = self._loop.call_later(min(SWEEP_S, known.forget_after_s), self._sweep)

    @property
    @abc.abstractmethod
    def floor_seq(self) -> int:
        """Records up to here were deleted by retention; 0 if none ever was."""

    @property
    @abc.abstractmethod
    def _is_writable(self) -> bool:
        """False: what would have to be written would only gather."""

    def stream_id(self, source: UUri, sink: UUri | None = None, *, wanted: bool = False) -> int:
        """The number of this pair, given out on first use. It may be forgotten when no record of it is kept; `append`
        bears that.

        Raises TopicsFullError (RESOURCE_EXHAUSTED): beyond `authority_streams_max` of the source's authority, or where
        only the reserve is left of `streams_max`. `wanted`, by somebody who has named just this one, has room in both,
        as long as there is any at all.
        """
        stream = self._known.find(source, sink)
        return stream.id if stream is not None else self._new_stream(source, sink, wanted)

    def _new_stream(self, source: UUri, sink: UUri | None, wanted: bool) -> int:
        known = self._known
        if known.is_crowded and self._loop.time() >= self._room_due and not self._forget(at_once=True):
            self._room_due = self._loop.time() + ROOM_AGAIN_S
        known.refuse_beyond(source.authority_name, wanted=wanted)
        stream = known.add(source, sink, self._loop.time())
        # at once is not needed: before it has a record nobody misses it
        self._storage.save(lambda writer: writer.save_stream(stream), at_once=False)
        return stream.id

    def _numbered_anew(self, streams: list[int], messages: Sequence[Carried]) -> list[int]:
        """Who appends may have kept a number for longer than the log has: a message says by itself where it comes from
        and goes to."""
        if not set(streams).difference(self._known.table):
            return streams
        found: dict[int, int] = {}
        for id, message in zip(streams, messages, strict=True):
            if id not in self._known.table and id not in found:
                attributes = message.attributes
                sink = attributes.sink if attributes.HasField("sink") else None
                found[id] = self.stream_id(attributes.source, sink, wanted=True)
        return [found.get(id, id) for id in streams]

    def stream(self, id: int) -> Stream:
        """One that is known; see `knows_stream`."""
        return self._known.table[id]

    def knows_stream(self, id: int) -> bool:
        """False for a number that was forgotten, or that only damaged bytes name."""
        return id in self._known.table

    def streams(self) -> list[Stream]:
        """All of them, in the order of their numbers."""
        return list(self._known.table.values())

    def streams_after(self, id: int, count: int) -> list[Stream]:
        """At most `count` of those with a number greater than `id`, in the order of their numbers."""
        return self._known.after(id, count)

    @property
    def newest_stream_id(self) -> int:
        """The highest number that was ever given out; 0 if none was."""
        return self._known.next_id - 1

    @property
    def stream_count(self) -> int:
        return len(self._known.table)

    def topics_of(self, authority: str) -> int:
        """How many of them have their source there."""
        return self._known.count_of(authority)

    @property
    def streams_forgotten(self) -> int:
        """Since the log was opened."""
        return self._known.forgotten_total

    def forgotten_seq(self, authorities: Set[str] | None) -> int:
        """Up to here there may have been records of these source authorities (None: of any) in streams that are
        forgotten. Who has not read so far may have missed some of any topic there."""
        return self._known.forgotten_seq(authorities)

    def on_forgotten(self, callback: Callable[[frozenset[int]], None]) -> None:
        """`callback(ids)` on the loop, in the step in which these streams are forgotten. Their numbers are never used
        again."""
        self._forgotten_callbacks.append(callback)

    def keep_streams(self, callback: Callable[[], Iterable[int]]) -> None:
        """`callback()` on the loop gives the streams that somebody has in hand: those are not forgotten."""
        self._using.append(callback)

    def _sweep(self) -> None:
        known = self._known
        more = known.look(self.floor_seq, self._loop.time())
        more = bool(self._forget()) or more
        self._sweeping = self._loop.call_later(
            SWEEP_AGAIN_S if more else min(SWEEP_S, known.forget_after_s), self._sweep
        )

    def _forget(self, *, at_once: bool = False) -> int:
        """Streams that have had no record for a while; `at_once`: some of those that have none now. How many that
        were."""
        if not self._is_writable:
            return 0
        known, now = self._known, self._loop.time()
        known.look(self.floor_seq, now)
        candidates = known.candidates(self.floor_seq, now, at_once=at_once)
        used = set[int]().union(*(callback() for callback in self._using)) if candidates else set[int]()
        known.keep_on((stream for stream in candidates if stream.id in used), now)
        doomed = [stream for stream in candidates if stream.id not in used]
        ids = frozenset(stream.id for stream in doomed)
        if ids:
            meta = known.remove(doomed)
            self._storage.save(lambda writer: writer.save_forgotten(ids, meta))
            for callback in list(self._forgotten_callbacks):
                callback(ids)
        return len(ids)
