"""What was read for one peer and has not left: queued, in flight, or aside.

Aside: streams that don't get through though others do wait in memory, and are tried at intervals.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator, Sequence, Set
from itertools import chain
from operator import itemgetter
from typing import Final

from streamer.walk.sender import OrderKey, PriorityQueue, QueuedRecord, Sender, key_of
from uprotocol.pacing import Backoff

ASIDE_MESSAGES_MAX: Final = 8_192  # kept in memory for streams that are stuck; with more, the peer waits for them
ASIDE_BYTES_MAX: Final = 16 << 20  # of payload
ASIDE_TRIED_MAX: Final = 16  # messages of one stream, to see whether it moves again


class Aside(dict[OrderKey, deque[QueuedRecord]]):
    """The streams of `queue` that don't get through though others do, each with its items that wait. `time` is the
    event loop's.

    sent: some taken, one not -> put aside --due--> the first few of each, with the others -> taken: back to the queue
                                   ^                                                     '-> not taken: later
                                   '-- new messages with the same OrderKey wait behind it
    """

    def __init__(self, queue: PriorityQueue[QueuedRecord], backoff: Backoff, time: Callable[[], float]) -> None:
        super().__init__()
        self._queue, self._backoff, self._time = queue, backoff, time
        self._tried: set[OrderKey] = set()
        self.due_at = 0.0  # loop time of the next try
        self.messages = self.bytes = 0

    @property
    def streams(self) -> set[int]:
        """Returns their ids in the log."""
        return {item[2] for queue in self.values() for item in queue}

    @property
    def is_full(self) -> bool:
        return self.messages >= ASIDE_MESSAGES_MAX or self.bytes >= ASIDE_BYTES_MAX

    @property
    def oldest_seq(self) -> int | None:
        return min((item[0] for queue in self.values() for item in queue), default=None)

    def takes(self, item: QueuedRecord) -> bool:
        """Have `item` wait if its stream is stuck. Returns whether it waits."""
        queue = self.get(key_of(item[1]))
        if queue is None:
            return False
        queue.append(item)
        self._count([item], 1)
        return True

    def take_out(self, which: Callable[[QueuedRecord], bool]) -> list[QueuedRecord]:
        """Remove and return the items for which `which` is true, here and from the queue."""
        taken = list[QueuedRecord]()
        for key, queue in list(self.items()):
            out = [item for item in queue if which(item)]
            if out:
                taken += out
                ids = set(map(id, out))
                self[key] = deque(item for item in queue if id(item) not in ids)
                if not self[key]:
                    del self[key]
        self._count(taken, -1)
        return taken + self._queue.take_out(which)

    def due(self) -> list[QueuedRecord]:
        """Returns the first items of each stream, if it is time to try them. The caller then calls `put_back` with
        those that did not get through."""
        if not self or self._time() < self.due_at:
            return []
        self._tried.update(self)
        items = [queue.popleft() for queue in self.values() for _ in range(min(len(queue), ASIDE_TRIED_MAX))]
        self._count(items, -1)
        return items

    def put_back(self, again: Sequence[QueuedRecord], stuck: Set[OrderKey] = frozenset()) -> None:
        """Put items back that have not got through: in front of their stream if it is stuck, else of the queue. Also
        put the rest of the streams back whose `due` items got through."""
        apart, rest = list[QueuedRecord](), list[QueuedRecord]()
        for item in again:
            key = key_of(item[1])
            (apart if key in stuck or key in self else rest).append(item)
        for item in reversed(apart):
            key = key_of(item[1])
            self.setdefault(key, deque()).appendleft(item)
            self._tried.discard(key)
        self._count(apart, 1)
        if apart:
            self.due_at = self._time() + self._backoff.next_ms() / 1000
        moving = [item for key in self._tried for item in self.pop(key, ())]
        self._tried.clear()
        self._count(moving, -1)
        if not self:
            self._backoff.reset()
        # in order of seq, since the cursor depends on the first item, which has to be the oldest
        self._queue.put_back(sorted(rest + moving, key=itemgetter(0)))

    def _count(self, items: Sequence[QueuedRecord], sign: int) -> None:
        self.messages += sign * len(items)
        self.bytes += sign * sum(len(item[1].payload) for item in items)


class InHand:
    """A sender, and what is aside from its queue."""

    def __init__(self, sender: Sender[QueuedRecord], backoff: Backoff) -> None:
        self.sender, self.aside = sender, Aside(sender.queue, backoff, loop_time)

    @property
    def has_left(self) -> bool:
        """True if nothing is queued or in flight."""
        return not (self.sender.queue or self.sender.flights)

    @property
    def streams(self) -> set[int]:
        """Returns the streams of what is not in flight."""
        return self.aside.streams.union(item[2] for item in self.sender.queue)

    @property
    def under_way(self) -> Iterator[QueuedRecord]:
        """Yields what waits for the pace, or is in flight."""
        return chain(self.sender.waiting, self.sender.in_flight)

    @property
    def oldest_seq(self) -> int | None:
        sender = self.sender
        seqs = [items[0][0] for items in sender.queue.classes if items]
        seqs += [item[0] for item in sender.waiting]
        seqs += [flight.oldest_seq for flight in sender.flights]
        if self.aside and (oldest := self.aside.oldest_seq) is not None:
            seqs.append(oldest)
        return min(seqs, default=None)


def loop_time() -> float:
    return asyncio.get_running_loop().time()
