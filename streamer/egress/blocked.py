"""Streams of one peer that don't get through though others do: kept aside, in order, and tried at intervals.

sent: some taken, one not -> put aside --due--> the first few of each, with the others -> taken: back to the queue
                               ^                                                     '-> not taken: later
                               '-- new messages of the same (source, sink, priority) wait behind it
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence, Set
from operator import itemgetter
from typing import Final

from streamer.egress.sender import PriorityQueue
from uprotocol.encoded import EncodedMessage
from uprotocol.pacing import Backoff

ASIDE_MESSAGES_MAX: Final = 8_192  # kept in memory for streams that are stuck; with more, the peer waits for them
ASIDE_BYTES_MAX: Final = 16 << 20  # of payload
TRIED_AT_ONCE: Final = 16  # messages of one stream, to see whether it moves again

Item = tuple[int, EncodedMessage, int]  # seq, message, and the log's id of its stream
OrderKey = tuple[bytes, int]
"""((type, source, sink), priority class): messages with the same key keep their order."""


def key_of(message: EncodedMessage) -> OrderKey:
    return message.stamp.address, message.stamp.priority


class Aside(dict[OrderKey, deque[Item]]):
    """The streams that are stuck, each with its items that wait. `time` is the event loop's."""

    def __init__(self, backoff: Backoff, time: Callable[[], float]) -> None:
        super().__init__()
        self._backoff, self._time = backoff, time
        self._tried: set[OrderKey] = set()
        self.due_at = 0.0  # loop time of the next try
        self.messages = self.bytes = 0

    @property
    def known_streams(self) -> set[int]:
        """Returns their ids in the log."""
        return {item[2] for queue in self.values() for item in queue}

    @property
    def is_full(self) -> bool:
        return self.messages >= ASIDE_MESSAGES_MAX or self.bytes >= ASIDE_BYTES_MAX

    @property
    def oldest_seq(self) -> int | None:
        return min((item[0] for queue in self.values() for item in queue), default=None)

    def takes(self, item: Item) -> bool:
        """Have `item` wait if its stream is stuck. Returns whether it waits."""
        queue = self.get(key_of(item[1]))
        if queue is None:
            return False
        queue.append(item)
        self._count([item], 1)
        return True

    def take_out(self, which: Callable[[Item], bool]) -> list[Item]:
        """Remove and return the items for which `which` is true."""
        taken = list[Item]()
        for key, queue in list(self.items()):
            out = [item for item in queue if which(item)]
            if out:
                taken += out
                ids = set(map(id, out))
                self[key] = deque(item for item in queue if id(item) not in ids)
                if not self[key]:
                    del self[key]
        self._count(taken, -1)
        return taken

    def put_back(self, items: Sequence[Item]) -> None:
        """Put items that have not got through in front of their streams, in this order."""
        for item in reversed(items):
            key = key_of(item[1])
            self.setdefault(key, deque()).appendleft(item)
            self._tried.discard(key)
        self._count(items, 1)
        if items:
            self.due_at = self._time() + self._backoff.next_ms() / 1000

    def due(self) -> list[Item]:
        """Returns the first items of each stream, if it is time to try them. The caller then calls `put_back` with
        those that did not get through, and `release`."""
        if not self or self._time() < self.due_at:
            return []
        self._tried.update(self)
        found = [queue.popleft() for queue in self.values() for _ in range(min(len(queue), TRIED_AT_ONCE))]
        self._count(found, -1)
        return found

    def release(self) -> list[Item]:
        """Returns the items behind those that were `due` and got through."""
        found = [item for key in self._tried for item in self.pop(key, ())]
        self._tried.clear()
        self._count(found, -1)
        if not self:
            self._backoff.reset()
        return found

    def wake(self) -> None:
        """Try at once, because the network has changed."""
        self.due_at = 0.0

    def _count(self, items: Sequence[Item], sign: int) -> None:
        self.messages += sign * len(items)
        self.bytes += sign * sum(len(item[1].payload) for item in items)


class Outbox:
    """Records that a pump has read and not sent: the queue, and the streams aside."""

    def __init__(self, queue: PriorityQueue[Item], aside: Aside) -> None:
        self.queue, self.aside = queue, aside

    @property
    def streams(self) -> set[int]:
        """Returns their ids in the log."""
        return self.aside.known_streams.union(item[2] for item in self.queue)

    def take_out(self, which: Callable[[Item], bool]) -> list[Item]:
        """Remove and return the items for which `which` is true."""
        return self.aside.take_out(which) + self.queue.take_out(which)

    def put_back(self, again: Sequence[Item], stuck: Set[OrderKey] = frozenset()) -> None:
        """Put back items that have not got through: aside if their stream is stuck, else to the front of the queue."""
        apart, rest = list[Item](), list[Item]()
        for item in again:
            key = key_of(item[1])
            (apart if key in stuck or key in self.aside else rest).append(item)
        self.aside.put_back(apart)
        # in order of seq, since the cursor depends on the first item, which has to be the oldest
        self.queue.put_back(sorted(rest + self.aside.release(), key=itemgetter(0)))
