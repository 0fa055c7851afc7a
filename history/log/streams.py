"""Which streams a log knows: who may have how many, and which of them are forgotten.

stream_id --new--> room for one? -> a number -> records come, retention passes them -> empty for a while -> forgotten
                    '-- no: an empty one goes at once, else TopicsFullError

`_due` holds each stream under a seq that its newest record has reached or passed. So where the lowest of them is beyond
the floor, no stream is empty, and the rest is looked at only when retention has come so far: an append costs nothing
here.
"""

from __future__ import annotations

import abc
import asyncio
import heapq
from array import array
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from itertools import islice
from typing import TYPE_CHECKING, Any, Final

from history.file.load import FORGOTTEN_PREFIX, OTHERS, Stream, address_of, authority_of
from history.records.stream import is_frontier, is_publish, plain_address
from uprotocol.encoded import Carried
from uprotocol.status import UStatusError
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.uri_pb2 import UUri

if TYPE_CHECKING:
    from history.log.durable import Disk
    from history.log.volatile import Ring

STREAMS_MAX: Final = 200_000  # some 600 bytes each, and their caches
RESERVE_SHARE: Final = 8  # one part in so many of the room is kept for streams that somebody wants
FORGET_AFTER_S: Final = 300.0  # without a record: a topic at the edge of retention must not get a new number each time
SWEEP_S: Final = 10.0  # between looks for streams that can be forgotten, and ...
SWEEP_AGAIN_S: Final = 0.1  # ... between steps of one
ROOM_AGAIN_S: Final = 1.0  # until room is looked for again where there was none
LOOKED_AT_MAX: Final = 4_000  # streams in one step on the loop, some milliseconds
ROOM_STREAMS: Final = 64  # are forgotten at once where room is needed: who holds their numbers is not told one by one
GONE_KEPT_MAX: Final = 64  # numbers that are gone, of one authority, beside one for each that is there
AUTHORITIES_MAX: Final = 10_000  # of which is known up to where streams were forgotten; of the others together

Address = bytes | tuple[bytes, bytes]


class TopicsFullError(UStatusError):
    """There is no room for one more stream. `reason`: "topics_full" (in all), "authority_topics_full" (of that source's
    authority)."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(UCode.RESOURCE_EXHAUSTED, message)
        self.reason = reason


class Streams(abc.ABC):
    """The part of a log that is about streams; on the loop."""

    floor_seq: int
    """Records up to here were deleted by retention; 0: none ever was."""

    def __init__(
        self,
        storage: Disk | Ring,
        streams_max: int,
        authority_streams_max: int | None = None,
        forget_after_s: float | None = None,
    ) -> None:
        """What `storage` has is known after `_load`."""
        self.streams_max = streams_max
        self.authority_streams_max = streams_max if authority_streams_max is None else authority_streams_max
        self.forget_after_s = FORGET_AFTER_S if forget_after_s is None else forget_after_s
        self.streams_forgotten = 0  # since the log was opened
        self._storage, self._loop = storage, asyncio.get_running_loop()
        # in the order of their numbers; shared with the storage, which moves their seqs when it has committed
        self._table = storage.loaded.streams
        self.newest_stream_id = storage.loaded.next_stream - 1  # the highest number that was ever given out
        # by source authority: up to which seq there were records of forgotten streams
        self._forgotten = dict(storage.loaded.forgotten)
        self._by_address: dict[Address, Stream] = {}
        self._aimed: dict[bytes, list[Stream]] = {}  # by source: publishes of which a streamer has named the sink
        self.frontier_ids: set[int] = set()  # those that tell of epochs
        self._ids = array("Q")  # in order; with some that are forgotten
        self._counts: Counter[str] = Counter()  # by source authority
        self._of_authority: dict[str, array[int]] = {}  # as `_ids`, by source authority
        self._due: list[int] = []  # heap of seq << 64 | id
        self._fresh: dict[int, float] = {}  # without a record so far, and since when
        # those whose records are gone, the one written longest ago first, and since when
        self._empty: dict[int, float] = {}
        self._room_due = 0.0  # loop time
        self._forgotten_callbacks: list[Callable[[frozenset[int]], None]] = []
        self._using: list[Callable[[], Iterable[int]]] = []
        self._sweeping = self._loop.call_later(min(SWEEP_S, self.forget_after_s), self._sweep)

    def _load(self) -> None:
        """From any thread, before anybody else asks: there may be many."""
        table, now_s = self._table, self._loop.time()
        self._ids = array("Q", table)
        self._by_address = {stream.address: stream for stream in table.values()}
        for stream in table.values():
            self._note_authority(authority_of(stream.source_bytes), stream.id)
            self._note_aim(stream)
        self._due = [stream.newest_seq << 64 | id for id, stream in table.items() if stream.records]
        self._fresh = {id: now_s for id, stream in table.items() if not stream.records}
        heapq.heapify(self._due)

    @property
    @abc.abstractmethod
    def _is_writable(self) -> bool:
        """False: what would have to be written would only gather."""

    # -- known

    def stream_id(self, source: UUri, sink: UUri | None = None, *, wanted: bool = False) -> int:
        """The number of this pair, given out on first use. It may be forgotten when no record of it is kept; `append`
        bears that.

        Raises TopicsFullError (RESOURCE_EXHAUSTED): beyond `authority_streams_max` of the source's authority, or where
        only the reserve is left of `streams_max`. `wanted`, by somebody who has named just this one, has room in both,
        as long as there is any at all.
        """
        raw = source.SerializeToString()
        stream = self._by_address.get(raw if sink is None else (raw, sink.SerializeToString()))
        if stream is None:
            stream = self._by_address.get(address_of(source, sink)) or self._new_stream(source, sink, wanted)
        return stream.id

    def _new_stream(self, source: UUri, sink: UUri | None, wanted: bool) -> Stream:
        if self._is_crowded and self._loop.time() >= self._room_due and not self._forget(at_once=True):
            self._room_due = self._loop.time() + ROOM_AGAIN_S
        self._refuse_beyond(source.authority_name, wanted=wanted)
        address = address_of(source, sink)
        self.newest_stream_id += 1
        stream = Stream(self.newest_stream_id, *((address, None) if isinstance(address, bytes) else address))
        self._table[stream.id] = self._by_address[address] = stream
        self._ids.append(stream.id)
        self._note_authority(source.authority_name, stream.id)
        self._note_aim(stream)
        self._fresh[stream.id] = self._loop.time()
        # at once is not needed: before it has a record nobody misses it
        self._storage.save(lambda writer: writer.save_stream(stream), at_once=False)
        return stream

    def _note_authority(self, authority: str, id: int) -> None:
        self._counts[authority] += 1
        known = self._of_authority.get(authority)
        if known is None:
            known = self._of_authority[authority] = array("Q")
        known.append(id)

    def _note_aim(self, stream: Stream) -> None:
        if is_frontier(stream):
            self.frontier_ids.add(stream.id)
        if stream.sink_bytes is not None and is_publish(stream):
            self._aimed.setdefault(stream.source_bytes, []).append(stream)

    def _numbered_anew(self, streams: list[int], messages: Sequence[Carried]) -> list[int]:
        """Who appends may have kept a number for longer than the log has: a message says by itself where it comes from
        and goes to."""
        if not set(streams).difference(self._table):
            return streams
        found: dict[int, int] = {}
        for id, message in zip(streams, messages, strict=True):
            if id not in self._table and id not in found:
                attributes = message.attributes
                sink = attributes.sink if attributes.HasField("sink") else None
                found[id] = self.stream_id(attributes.source, sink, wanted=True)
        return [found.get(id, id) for id in streams]

    def known_id(self, source: UUri) -> int | None:
        """The number of what comes from `source` without sink, if it has one."""
        stream = self._by_address.get(address_of(source, None))
        return None if stream is None else stream.id

    def publishes_from(self, source: UUri) -> list[Stream]:
        """What is known of that topic: without sink, and for each authority that a streamer has named as the sink."""
        address = plain_address(source)
        plain = self._by_address.get(address)
        return [*([] if plain is None else [plain]), *self._aimed.get(address, ())]

    def stream(self, id: int) -> Stream:
        """One that is known; see `knows_stream`."""
        return self._table[id]

    def knows_stream(self, id: int) -> bool:
        """False for a number that was forgotten, or that only damaged bytes name."""
        return id in self._table

    def streams(self) -> list[Stream]:
        """All of them, in the order of their numbers."""
        return list(self._table.values())

    def streams_after(self, id: int, count: int, authorities: Set[str] | None = None) -> list[Stream]:
        """At most `count` of those with a number greater than `id`, of these source authorities if given, in the order
        of their numbers."""
        if authorities is None:
            ids = _beyond(self._ids, id)
        else:
            known = (self._of_authority.get(authority) for authority in authorities)
            ids = heapq.merge(*(_beyond(one, id) for one in known if one is not None and one[-1] > id))
        return list(islice(filter(None, map(self._table.get, ids)), count))

    @property
    def stream_count(self) -> int:
        return len(self._table)

    def topics_of(self, authority: str) -> int:
        """How many of them have their source there."""
        return self._counts.get(authority, 0)

    # -- room

    @property
    def _is_crowded(self) -> bool:
        """Only what is wanted has room."""
        return len(self._table) >= self.streams_max - self.streams_max // RESERVE_SHARE

    def _refuse_beyond(self, authority: str, *, wanted: bool) -> None:
        """Raises TopicsFullError where there is no room for one more of this source authority."""
        has, known = self._counts[authority], len(self._table)
        if not wanted and has >= self.authority_streams_max:
            what = f"{authority!r} has {has} topics here already, which is the limit of one authority: use fewer"
            raise TopicsFullError("authority_topics_full", what)
        if known >= self.streams_max or (self._is_crowded and not wanted):
            rest = "" if wanted else "the rest is kept for what is subscribed: "
            what = (
                f"{known} of at most {self.streams_max} topics are known here, and {rest}give more memory, or use fewer"
            )
            raise TopicsFullError("topics_full", what)

    # -- forgetting

    def on_forgotten(self, callback: Callable[[frozenset[int]], None]) -> None:
        """`callback(ids)` on the loop, in the step in which these streams are forgotten. Their numbers are never used
        again."""
        self._forgotten_callbacks.append(callback)

    def keep_streams(self, callback: Callable[[], Iterable[int]]) -> None:
        """`callback()` on the loop gives the streams that somebody has in hand: those are not forgotten."""
        self._using.append(callback)

    def forgotten_seq(self, authorities: Set[str] | None) -> int:
        """Up to here there may have been records of these source authorities (None: of any) in streams that are
        forgotten. Who has not read so far may have missed some of any topic there."""
        known = self._forgotten
        if authorities is None:
            return max(known.values(), default=0)
        return max((known.get(authority, 0) for authority in (*authorities, OTHERS)), default=0)

    def _sweep(self) -> None:
        more = self._look(self.floor_seq, self._loop.time())
        more = bool(self._forget()) or more
        again_s = SWEEP_AGAIN_S if more else min(SWEEP_S, self.forget_after_s)
        self._sweeping = self._loop.call_later(again_s, self._sweep)

    def _forget(self, *, at_once: bool = False) -> int:
        """Streams that have had no record for a while; `at_once`: some of those that have none now. How many that
        were."""
        if not self._is_writable:
            return 0
        now = self._loop.time()
        self._look(self.floor_seq, now)
        candidates = self._candidates(self.floor_seq, now, at_once=at_once)
        used = set[int]().union(*(callback() for callback in self._using)) if candidates else set[int]()
        self._empty.update((stream.id, now) for stream in candidates if stream.id in used)
        doomed = [stream for stream in candidates if stream.id not in used]
        ids = frozenset(stream.id for stream in doomed)
        if ids:
            meta = self._remove(doomed)
            self._storage.save(lambda writer: writer.save_forgotten(ids, meta))
            for callback in list(self._forgotten_callbacks):
                callback(ids)
        return len(ids)

    def _look(self, floor_seq: int, now_s: float) -> bool:
        """A bounded step: which streams have no record beyond `floor_seq`? True if there is more to look at."""
        due, table = self._due, self._table
        for id in list(islice(self._fresh, LOOKED_AT_MAX)):
            if table[id].records:
                heapq.heappush(due, table[id].newest_seq << 64 | id)
                del self._fresh[id]
        for _ in range(LOOKED_AT_MAX):
            if not due or due[0] >> 64 > floor_seq:
                break
            id = due[0] & (1 << 64) - 1
            newest_seq = table[id].newest_seq
            if newest_seq > floor_seq:
                heapq.heapreplace(due, newest_seq << 64 | id)
            else:
                heapq.heappop(due)
                self._empty[id] = now_s
        else:
            return True
        return False

    def _candidates(self, floor_seq: int, now_s: float, *, at_once: bool) -> list[Stream]:
        """Those that have been empty for long enough; `at_once`: the first of all that are empty. They are no longer
        among the empty ones."""
        if at_once:
            return self._take(self._empty, now_s, floor_seq, ROOM_STREAMS)
        latest = now_s - self.forget_after_s
        found = self._take(self._empty, latest, floor_seq, LOOKED_AT_MAX)
        return found + self._take(self._fresh, latest, floor_seq, LOOKED_AT_MAX)

    def _take(self, waiting: dict[int, float], latest: float, floor_seq: int, count: int) -> list[Stream]:
        found: list[Stream] = []
        looked: list[int] = []
        for id, since in islice(waiting.items(), count):
            stream = self._table[id]
            if stream.newest_seq > floor_seq:  # it has records (again)
                heapq.heappush(self._due, stream.newest_seq << 64 | id)
            elif since > latest:
                break
            else:
                found.append(stream)
            looked.append(id)
        for id in looked:
            del waiting[id]
        return found

    def _remove(self, streams: Iterable[Stream]) -> dict[str, Any]:
        """Forget them; the rows of `meta` that have changed (None: gone)."""
        changed: dict[str, Any] = {}
        for stream in streams:
            del self._table[stream.id], self._by_address[stream.address]
            self.frontier_ids.discard(stream.id)
            if stream in (aimed := self._aimed.get(stream.source_bytes, [])):
                aimed.remove(stream)
                if not aimed:
                    del self._aimed[stream.source_bytes]
            authority = authority_of(stream.source_bytes)
            self._counts[authority] -= 1
            if not self._counts[authority]:
                del self._counts[authority], self._of_authority[authority]
            elif len(self._of_authority[authority]) > 2 * self._counts[authority] + GONE_KEPT_MAX:
                kept = filter(self._table.__contains__, self._of_authority[authority])
                self._of_authority[authority] = array("Q", kept)
            if stream.newest_seq > self._forgotten.get(authority, 0):
                self._forgotten[authority] = changed[FORGOTTEN_PREFIX + authority] = stream.newest_seq
            self.streams_forgotten += 1
        if len(self._ids) > 2 * len(self._table) + LOOKED_AT_MAX:
            self._ids = array("Q", self._table)
        if len(self._forgotten) > AUTHORITIES_MAX:
            self._merge_forgotten(changed)
        return changed

    def _merge_forgotten(self, changed: dict[str, Any]) -> None:
        """The half of them that was forgotten longest ago counts as one."""
        known = self._forgotten
        oldest = sorted(known.keys() - {OTHERS}, key=lambda authority: (known[authority], authority))
        for authority in oldest[: AUTHORITIES_MAX // 2]:
            known[OTHERS] = max(known.get(OTHERS, 0), known.pop(authority))
            changed[FORGOTTEN_PREFIX + authority] = None
        changed[FORGOTTEN_PREFIX + OTHERS] = known[OTHERS]


def _beyond(ids: Sequence[int], id: int) -> Iterator[int]:
    """Those of `ids`, which are in order, that are greater."""
    return map(ids.__getitem__, range(bisect_right(ids, id), len(ids)))


__all__ = ["FORGET_AFTER_S", "STREAMS_MAX", "Streams", "TopicsFullError"]
