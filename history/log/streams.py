"""The streams of a log: their numbers, how many each authority may have, and when a stream is forgotten.

id_of --new--> is there capacity? -> a number -> records come, retention deletes them -> empty for a while ->
forgotten '-- no: an empty stream is forgotten at once, else TopicsFullError

`_due` holds each stream under a seq that its newest record has reached or passed. If the lowest of these is beyond the
floor, no stream is empty, and the others need not be checked before retention has come so far: an append costs nothing
here.
"""

from __future__ import annotations

import asyncio
import heapq
from array import array
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from itertools import islice
from typing import Any, Final

from history.file.load import FORGOTTEN_PREFIX, NEXT_STREAM, OTHER_AUTHORITIES
from history.file.store import LogChanges
from history.log.storage import Storage
from history.records.chunk import Stream, address_of, authority_of, is_frontier, is_publish, plain_address
from uprotocol import callbacks
from uprotocol.encoded import Carried
from uprotocol.status import UStatusError
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.uri_pb2 import UUri

STREAMS_MAX: Final = 200_000  # some 600 bytes each, plus caches
RESERVE_SHARE: Final = 8  # one part in so many of the capacity is kept for wanted streams
# without a record: a topic whose records are deleted as fast as they come must not always get a new number
FORGET_AFTER_S: Final = 300.0
SWEEP_S: Final = 10.0  # between searches for streams that can be forgotten, and ...
SWEEP_AGAIN_S: Final = 0.1  # ... between the steps of one search
SEARCH_AGAIN_S: Final = 1.0  # until an empty stream is searched again where there was none
CHECKED_MAX: Final = 4_000  # streams that are checked in one step on the loop, some milliseconds
# are forgotten together where capacity is needed, so that callbacks are called once for all of them
FORGOTTEN_AT_ONCE: Final = 64
# numbers of forgotten streams that are kept for one authority, plus one for each of its streams
STALE_IDS_MAX: Final = 64
# for each of these it is known up to where streams were forgotten; the others share one seq
FORGOTTEN_AUTHORITIES_MAX: Final = 10_000

StreamAddress = bytes | tuple[bytes, bytes]


class TopicsFullError(UStatusError):
    """There is no capacity for one more stream. `reason`: "topics_full" (of the log), "authority_topics_full" (of the
    source's authority)."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(UCode.RESOURCE_EXHAUSTED, message)
        self.reason = reason


class StreamTable:
    """The streams of a log, which it owns. On the event loop.

    Its state: `by_id`; indexes of that by address (`_by_address`, `_with_sink`), kind (`frontier_ids`) and authority
    (`_ids`, `_counts`, `_of_authority`), which may have numbers of forgotten streams; where each stream waits to be
    found empty (`_fresh`, `_due`) or forgotten (`_empty`); what was forgotten (`_forgotten`, `forgotten_count`).
    """

    def __init__(
        self,
        storage: Storage,
        floor_seq: Callable[[], int],
        is_writable: Callable[[], bool],
        streams_max: int,
        authority_streams_max: int | None = None,
        forget_after_s: float | None = None,
    ) -> None:
        """The streams that `storage` has loaded are known after `index`. `floor_seq`: of the log. `is_writable`: False
        if changes could not be written, and would only accumulate."""
        self._floor_seq, self._is_writable = floor_seq, is_writable
        self.streams_max = streams_max
        self.authority_streams_max = streams_max if authority_streams_max is None else authority_streams_max
        self.forget_after_s = FORGET_AFTER_S if forget_after_s is None else forget_after_s
        self._storage, self._loop = storage, asyncio.get_running_loop()
        # In the order of their numbers. The storage looks streams up in this very dict, and the log moves them on.
        self.by_id = storage.loaded.streams
        self.newest_id = storage.loaded.next_stream - 1  # the highest number that was ever given out
        # by source authority: the highest seq that its forgotten streams had
        self._forgotten = dict(storage.loaded.forgotten)
        self.forgotten_count = 0  # since the log was opened
        self._by_address: dict[StreamAddress, Stream] = {}
        # by source: publishes whose sink authority was set by a streamer
        self._with_sink: dict[bytes, list[Stream]] = {}
        self.frontier_ids: set[int] = set()  # of topics that carry frontiers of epochs
        self._ids = array("Q")  # sorted; some of them are forgotten
        self._counts: Counter[str] = Counter()  # by source authority
        self._of_authority: dict[str, array[int]] = {}  # as `_ids`, by source authority
        self._due: list[int] = []  # heap of seq << 64 | id
        self._fresh: dict[int, float] = {}  # without a record so far; since when, loop time
        # streams whose records were all deleted, the one that was written longest ago first; since when, loop time
        self._empty: dict[int, float] = {}
        self._search_due = 0.0  # loop time
        self._forgotten_callbacks: list[Callable[[frozenset[int]], None]] = []
        self._kept_callbacks: list[Callable[[], Iterable[int]]] = []
        self._sweeping = self._loop.call_later(min(SWEEP_S, self.forget_after_s), self._sweep)

    def close(self) -> None:
        """Forget no more."""
        self._sweeping.cancel()

    def index(self) -> None:
        """Build the indexes of the loaded streams. From any thread, before the log is used: there may be many."""
        table, now_s = self.by_id, self._loop.time()
        self._ids = array("Q", table)
        self._by_address = {stream.address: stream for stream in table.values()}
        for stream in table.values():
            self._note_authority(authority_of(stream.source_bytes), stream.id)
            self._note_sink(stream)
        self._due = [stream.newest_seq << 64 | id for id, stream in table.items() if stream.records]
        self._fresh = {id: now_s for id, stream in table.items() if not stream.records}
        heapq.heapify(self._due)

    # -- known

    def id_of(self, source: UUri, sink: UUri | None = None, *, wanted: bool = False) -> int:
        """Returns the number of the stream (source, sink), which is created on first use. The stream may be forgotten
        when no record of it is kept; `Log.append` accepts such a number.

        Raises TopicsFullError (RESOURCE_EXHAUSTED) beyond `authority_streams_max` of the source's authority, or if only
        the reserve is left of `streams_max`. `wanted`: somebody has named exactly this stream; then only `streams_max`
        limits it.
        """
        raw = source.SerializeToString()
        stream = self._by_address.get(raw if sink is None else (raw, sink.SerializeToString()))
        if stream is None:
            stream = self._by_address.get(address_of(source, sink)) or self._new_stream(source, sink, wanted)
        return stream.id

    def _new_stream(self, source: UUri, sink: UUri | None, wanted: bool) -> Stream:
        if self._is_crowded and self._loop.time() >= self._search_due and not self._forget(at_once=True):
            self._search_due = self._loop.time() + SEARCH_AGAIN_S
        self._refuse_beyond(source.authority_name, wanted=wanted)
        address = address_of(source, sink)
        self.newest_id += 1
        stream = Stream(self.newest_id, *((address, None) if isinstance(address, bytes) else address))
        self.by_id[stream.id] = self._by_address[address] = stream
        self._ids.append(stream.id)
        self._note_authority(source.authority_name, stream.id)
        self._note_sink(stream)
        self._fresh[stream.id] = self._loop.time()
        # not soon: a stream without a record need not survive a crash
        self._storage.save(LogChanges(streams=[stream], meta={NEXT_STREAM: stream.id + 1}), soon=False)
        return stream

    def _note_authority(self, authority: str, id: int) -> None:
        self._counts[authority] += 1
        ids = self._of_authority.get(authority)
        if ids is None:
            ids = self._of_authority[authority] = array("Q")
        ids.append(id)

    def _note_sink(self, stream: Stream) -> None:
        if is_frontier(stream):
            self.frontier_ids.add(stream.id)
        if stream.sink_bytes is not None and is_publish(stream):
            self._with_sink.setdefault(stream.source_bytes, []).append(stream)

    def renumbered(self, ids: list[int], messages: Sequence[Carried]) -> list[int]:
        """Replace the numbers of forgotten streams, which the caller of `Log.append` may still use, by new ones: a
        message names its source and sink. Raises TopicsFullError."""
        if not set(ids).difference(self.by_id):
            return ids
        new_ids: dict[int, int] = {}
        for id, message in zip(ids, messages, strict=True):
            if id not in self.by_id and id not in new_ids:
                attributes = message.attributes
                sink = attributes.sink if attributes.HasField("sink") else None
                new_ids[id] = self.id_of(attributes.source, sink, wanted=True)
        return [new_ids.get(id, id) for id in ids]

    def known_id(self, source: UUri) -> int | None:
        """Returns the number of the stream from `source` without a sink, or None."""
        stream = self._by_address.get(address_of(source, None))
        return None if stream is None else stream.id

    def publishes_from(self, source: UUri) -> list[Stream]:
        """Returns the streams of that topic: the one without a sink, and one for each sink authority that a streamer
        has set."""
        address = plain_address(source)
        plain = self._by_address.get(address)
        return [*([] if plain is None else [plain]), *self._with_sink.get(address, ())]

    def after(self, id: int, count: int, authorities: Set[str] | None = None) -> list[Stream]:
        """Returns at most `count` streams with a number greater than `id`, of these source authorities if given, in the
        order of their numbers."""
        if authorities is None:
            ids = _beyond(self._ids, id)
        else:
            known = (self._of_authority.get(authority) for authority in authorities)
            ids = heapq.merge(*(_beyond(its_ids, id) for its_ids in known if its_ids is not None and its_ids[-1] > id))
        return list(islice(filter(None, map(self.by_id.get, ids)), count))

    def topics_of(self, authority: str) -> int:
        """Returns how many streams have their source there."""
        return self._counts.get(authority, 0)

    # -- capacity

    @property
    def _is_crowded(self) -> bool:
        """True if only wanted streams may be added."""
        return len(self.by_id) >= self.streams_max - self.streams_max // RESERVE_SHARE

    def _refuse_beyond(self, authority: str, *, wanted: bool) -> None:
        """Raises TopicsFullError if there is no capacity for one more stream of this source authority."""
        of_authority, count = self._counts[authority], len(self.by_id)
        if not wanted and of_authority >= self.authority_streams_max:
            what = (
                f"{authority!r} has {of_authority} topics here already, which is the limit of one authority: use fewer"
            )
            raise TopicsFullError("authority_topics_full", what)
        if count >= self.streams_max or (self._is_crowded and not wanted):
            rest = "" if wanted else "the rest is kept for what is subscribed: "
            what = (
                f"{count} of at most {self.streams_max} topics are known here, and {rest}give more memory, or use fewer"
            )
            raise TopicsFullError("topics_full", what)

    # -- forgetting

    def on_forgotten(self, callback: Callable[[frozenset[int]], None]) -> Callable[[], None]:
        """`callback(ids)` on the loop, in the step in which these streams are forgotten. Their numbers are never used
        again. Returns a function that removes the callback."""
        return callbacks.add(self._forgotten_callbacks, callback)

    def keep(self, callback: Callable[[], Iterable[int]]) -> Callable[[], None]:
        """`callback()` on the loop gives the streams that somebody has in hand: those are not forgotten. Returns a
        function that removes the callback."""
        return callbacks.add(self._kept_callbacks, callback)

    def forgotten_seq(self, authorities: Set[str] | None) -> int:
        """Returns the seq up to which forgotten streams of these source authorities (None: of any) may have had
        records. A reader that has not read so far may have missed records of any topic of theirs."""
        forgotten = self._forgotten
        if authorities is None:
            return max(forgotten.values(), default=0)
        return max((forgotten.get(authority, 0) for authority in (*authorities, OTHER_AUTHORITIES)), default=0)

    def _sweep(self) -> None:
        has_more = self._find_empty(self._loop.time())
        has_more = bool(self._forget()) or has_more
        again_s = SWEEP_AGAIN_S if has_more else min(SWEEP_S, self.forget_after_s)
        self._sweeping = self._loop.call_later(again_s, self._sweep)

    def _forget(self, *, at_once: bool = False) -> int:
        """Forget streams without a record for `forget_after_s`; `at_once`: some of those without a record now. Returns
        how many were forgotten."""
        if not self._is_writable():
            return 0
        now = self._loop.time()
        self._find_empty(now)
        if at_once:
            candidates = self._take(self._empty, now, FORGOTTEN_AT_ONCE)
        else:
            latest = now - self.forget_after_s
            candidates = self._take(self._empty, latest, CHECKED_MAX) + self._take(self._fresh, latest, CHECKED_MAX)
        used = set[int]().union(*(callback() for callback in self._kept_callbacks)) if candidates else set[int]()
        self._empty.update((stream.id, now) for stream in candidates if stream.id in used)
        doomed = [stream for stream in candidates if stream.id not in used]
        ids = frozenset(stream.id for stream in doomed)
        if ids:
            meta = self._remove(doomed)
            self._storage.save(LogChanges(forgotten=list(ids), meta=meta))
            for callback in list(self._forgotten_callbacks):
                callback(ids)
        return len(ids)

    def _find_empty(self, now_s: float) -> bool:
        """Find streams without a record. A bounded step; returns True if there is more to check."""
        due, table, floor_seq = self._due, self.by_id, self._floor_seq()
        for id in list(islice(self._fresh, CHECKED_MAX)):
            if table[id].records:
                heapq.heappush(due, table[id].newest_seq << 64 | id)
                del self._fresh[id]
        for _ in range(CHECKED_MAX):
            if not due or due[0] >> 64 > floor_seq:
                return False
            id = due[0] & (1 << 64) - 1
            newest_seq = table[id].newest_seq
            if newest_seq > floor_seq:
                heapq.heapreplace(due, newest_seq << 64 | id)
            else:
                heapq.heappop(due)
                self._empty[id] = now_s
        return True

    def _take(self, waiting: dict[int, float], latest: float, count: int) -> list[Stream]:
        """Take the first streams that have waited without a record since `latest` at least."""
        empty: list[Stream] = []
        checked: list[int] = []
        floor_seq = self._floor_seq()
        for id, since in islice(waiting.items(), count):
            stream = self.by_id[id]
            if stream.newest_seq > floor_seq:  # it has records
                heapq.heappush(self._due, stream.newest_seq << 64 | id)
            elif since > latest:
                break
            else:
                empty.append(stream)
            checked.append(id)
        for id in checked:
            del waiting[id]
        return empty

    def _remove(self, streams: Iterable[Stream]) -> dict[str, Any]:
        """Forget these streams. Returns the changed rows of META (None: deleted)."""
        changed: dict[str, Any] = {}
        for stream in streams:
            del self.by_id[stream.id], self._by_address[stream.address]
            self.frontier_ids.discard(stream.id)
            if stream in (with_sink := self._with_sink.get(stream.source_bytes, [])):
                with_sink.remove(stream)
                if not with_sink:
                    del self._with_sink[stream.source_bytes]
            authority = authority_of(stream.source_bytes)
            self._counts[authority] -= 1
            if not self._counts[authority]:
                del self._counts[authority], self._of_authority[authority]
            elif len(self._of_authority[authority]) > 2 * self._counts[authority] + STALE_IDS_MAX:
                kept = filter(self.by_id.__contains__, self._of_authority[authority])
                self._of_authority[authority] = array("Q", kept)
            if stream.newest_seq > self._forgotten.get(authority, 0):
                self._forgotten[authority] = changed[FORGOTTEN_PREFIX + authority] = stream.newest_seq
            self.forgotten_count += 1
        if len(self._ids) > 2 * len(self.by_id) + CHECKED_MAX:
            self._ids = array("Q", self.by_id)
        if len(self._forgotten) > FORGOTTEN_AUTHORITIES_MAX:
            self._merge_forgotten(changed)
        return changed

    def _merge_forgotten(self, changed: dict[str, Any]) -> None:
        """Merge the half of the authorities whose streams were forgotten longest ago."""
        forgotten = self._forgotten
        oldest = sorted(forgotten.keys() - {OTHER_AUTHORITIES}, key=lambda authority: (forgotten[authority], authority))
        for authority in oldest[: FORGOTTEN_AUTHORITIES_MAX // 2]:
            forgotten[OTHER_AUTHORITIES] = max(forgotten.get(OTHER_AUTHORITIES, 0), forgotten.pop(authority))
            changed[FORGOTTEN_PREFIX + authority] = None
        changed[FORGOTTEN_PREFIX + OTHER_AUTHORITIES] = forgotten[OTHER_AUTHORITIES]


def _beyond(ids: Sequence[int], id: int) -> Iterator[int]:
    """Yields those of the sorted `ids` that are greater than `id`."""
    return map(ids.__getitem__, range(bisect_right(ids, id), len(ids)))
