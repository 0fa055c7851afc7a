"""Which streams a log knows: who may have how many, and which of them are forgotten.

address -> find --new--> room for one more? -> add -> records come, retention passes them -> empty for a while -> forgotten
                          '-- no: an empty one goes at once, else TopicsFullError

`due` holds each stream under a seq that its newest record has reached or passed. So where the lowest of them is beyond
the floor, no stream is empty, and the rest is looked at only when retention has come so far: an append costs nothing
here.
"""

from __future__ import annotations

import heapq
from array import array
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping, Set
from itertools import islice
from typing import Any, Final

from history.load import FORGOTTEN_PREFIX, OTHERS, Stream, address_of, authority_of
from uprotocol.status import UStatusError
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.uri_pb2 import UUri

STREAMS_MAX: Final = 200_000  # some 600 bytes each, and their caches
RESERVE_SHARE: Final = 8  # one part in so many of the room is kept for streams that somebody wants
FORGET_AFTER_S: Final = 300.0  # without a record: a topic at the edge of retention must not get a new number each time
LOOKED_AT_MAX: Final = 4_000  # streams in one step on the loop, some milliseconds
ROOM_STREAMS: Final = 64  # are forgotten at once where room is needed: who holds their numbers is not told one by one
AUTHORITIES_MAX: Final = 10_000  # of which is known up to where streams were forgotten; of the others together

Address = bytes | tuple[bytes, bytes]


class TopicsFullError(UStatusError):
    """There is no room for one more stream. `reason`: "topics_full" (in all), "authority_topics_full" (of that source's
    authority)."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(UCode.RESOURCE_EXHAUSTED, message)
        self.reason = reason


class Streams:
    """The streams of one log, on the loop. `table` may be read from any thread."""

    def __init__(self, streams_max: int, authority_streams_max: int, forget_after_s: float | None = None) -> None:
        self.streams_max, self.authority_streams_max = streams_max, authority_streams_max
        self.forget_after_s = FORGET_AFTER_S if forget_after_s is None else forget_after_s
        self.table: dict[int, Stream] = {}  # in the order of their numbers
        self.next_id = 1
        self.forgotten_total = 0
        self._by_address: dict[Address, Stream] = {}
        self._ids = array("Q")  # in order; with some that are forgotten
        self._counts: Counter[str] = Counter()  # by source authority
        self._due: list[int] = []  # heap of seq << 64 | id
        self._fresh: dict[int, float] = {}  # without a record so far, and since when
        # those whose records are gone, the one written longest ago first, and since when
        self._empty: dict[int, float] = {}
        # by source authority: up to which seq there were records of forgotten streams
        self._forgotten: dict[str, int] = {}

    def __repr__(self) -> str:
        return f"Streams({len(self.table)} of {self.streams_max}, forgotten={self.forgotten_total})"

    def load(self, table: dict[int, Stream], next_id: int, forgotten: Mapping[str, int], now_s: float) -> None:
        """What a file has; `table` is taken over."""
        self.table, self.next_id, self._forgotten = table, next_id, dict(forgotten)
        self._ids = array("Q", table)
        self._by_address = {stream.address: stream for stream in table.values()}
        self._counts.update(authority_of(stream.source_bytes) for stream in table.values())
        self._due = [stream.newest_seq << 64 | id for id, stream in table.items() if stream.records]
        self._fresh = {id: now_s for id, stream in table.items() if not stream.records}
        heapq.heapify(self._due)

    # -- known

    def find(self, source: UUri, sink: UUri | None) -> Stream | None:
        raw = source.SerializeToString()
        found = self._by_address.get(raw if sink is None else (raw, sink.SerializeToString()))
        return found if found is not None else self._by_address.get(address_of(source, sink))

    def add(self, source: UUri, sink: UUri | None, now_s: float) -> Stream:
        """A new one; `refuse_beyond` was asked before."""
        address = address_of(source, sink)
        stream = Stream(self.next_id, *((address, None) if isinstance(address, bytes) else address))
        self.next_id += 1
        self.table[stream.id] = self._by_address[address] = stream
        self._ids.append(stream.id)
        self._counts[source.authority_name] += 1
        self._fresh[stream.id] = now_s
        return stream

    def after(self, id: int, count: int) -> list[Stream]:
        """At most `count` of those with a greater number, in order."""
        found: list[Stream] = []
        place = bisect_right(self._ids, id)
        while place < len(self._ids) and len(found) < count:
            stream = self.table.get(self._ids[place])
            if stream is not None:
                found.append(stream)
            place += 1
        return found

    # -- room

    @property
    def is_crowded(self) -> bool:
        """Only what is wanted has room."""
        return len(self.table) >= self.streams_max - self.streams_max // RESERVE_SHARE

    def refuse_beyond(self, authority: str, *, wanted: bool) -> None:
        """Raises TopicsFullError where there is no room for one more of this source authority."""
        if not wanted and self._counts[authority] >= self.authority_streams_max:
            raise TopicsFullError(
                "authority_topics_full",
                f"{authority!r} has {self._counts[authority]} topics here already, which is the limit of one "
                "authority: use fewer",
            )
        if len(self.table) >= self.streams_max or (self.is_crowded and not wanted):
            raise TopicsFullError(
                "topics_full",
                f"{len(self.table)} of at most {self.streams_max} topics are known here, "
                f"and {'' if wanted else 'the rest is kept for what is subscribed: '}give more memory, or use fewer",
            )

    def count_of(self, authority: str) -> int:
        return self._counts.get(authority, 0)

    # -- forgetting

    def look(self, floor_seq: int, now_s: float) -> bool:
        """A bounded step: which streams have no record beyond `floor_seq`? True if there is more to look at."""
        due, table = self._due, self.table
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

    def candidates(self, floor_seq: int, now_s: float, *, at_once: bool) -> list[Stream]:
        """Those that have been empty for long enough; `at_once`: the first of all that are empty. They are `remove`d or
        `keep_on` next."""
        found: list[Stream] = []
        if at_once:
            self._take(self._empty, now_s, floor_seq, ROOM_STREAMS, found)
            return found
        latest = now_s - self.forget_after_s
        self._take(self._empty, latest, floor_seq, LOOKED_AT_MAX, found)
        self._take(self._fresh, latest, floor_seq, LOOKED_AT_MAX, found)
        return found

    def _take(self, waiting: dict[int, float], latest: float, floor_seq: int, count: int, found: list[Stream]) -> None:
        looked: list[int] = []
        for id, since in islice(waiting.items(), count):
            stream = self.table[id]
            if stream.newest_seq > floor_seq:  # it has records (again)
                heapq.heappush(self._due, stream.newest_seq << 64 | id)
            elif since > latest:
                break
            else:
                found.append(stream)
            looked.append(id)
        for id in looked:
            del waiting[id]

    def keep_on(self, streams: Iterable[Stream], now_s: float) -> None:
        """Somebody needs them still."""
        for stream in streams:
            self._empty[stream.id] = now_s

    def remove(self, streams: Iterable[Stream]) -> dict[str, Any]:
        """Forget them; the rows of `meta` that have changed (None: gone)."""
        changed: dict[str, Any] = {}
        for stream in streams:
            del self.table[stream.id], self._by_address[stream.address]
            authority = authority_of(stream.source_bytes)
            self._counts[authority] -= 1
            if not self._counts[authority]:
                del self._counts[authority]
            if stream.newest_seq > self._forgotten.get(authority, 0):
                self._forgotten[authority] = changed[FORGOTTEN_PREFIX + authority] = stream.newest_seq
            self.forgotten_total += 1
        if len(self._ids) > 2 * len(self.table) + LOOKED_AT_MAX:
            self._ids = array("Q", self.table)
        if len(self._forgotten) > AUTHORITIES_MAX:
            self._merge_forgotten(changed)
        return changed

    def _merge_forgotten(self, changed: dict[str, Any]) -> None:
        """The half of them that was forgotten longest ago counts as one."""
        oldest = sorted(
            (authority for authority in self._forgotten if authority != OTHERS), key=self._forgotten.__getitem__
        )
        for authority in oldest[: AUTHORITIES_MAX // 2]:
            self._forgotten[OTHERS] = max(self._forgotten.get(OTHERS, 0), self._forgotten.pop(authority))
            changed[FORGOTTEN_PREFIX + authority] = None
        changed[FORGOTTEN_PREFIX + OTHERS] = self._forgotten[OTHERS]

    def forgotten_seq(self, authorities: Set[str] | None) -> int:
        """Up to here there may have been records of these source authorities (None: any) in streams that are
        forgotten."""
        if authorities is None:
            return max(self._forgotten.values(), default=0)
        known = self._forgotten
        return max((known.get(authority, 0) for authority in (*authorities, OTHERS)), default=0)


__all__ = ["FORGET_AFTER_S", "STREAMS_MAX", "Streams", "TopicsFullError"]
