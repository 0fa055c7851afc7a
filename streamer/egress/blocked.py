"""Streams of one peer that don't get through though others do: kept aside, in order, and tried now and then.

sent: some taken, one not -> put aside --due--> the first few of each, with the others -> taken: back to the queue
                               ^                                                     '-> not taken: later
                               '-- what comes for the same (source, sink, priority) waits behind it
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

from uprotocol.encoded import EncodedMessage
from uprotocol.pacing import Backoff

ASIDE_MESSAGES_MAX: Final = 8_192  # kept in memory for streams that are stuck; beyond it the peer waits for them
ASIDE_BYTES_MAX: Final = 16 << 20  # of payload
TRIED_AT_ONCE: Final = 16  # messages of one stream, to see whether it moves again

Item = tuple[int, EncodedMessage, int]  # seq, message, and the log's id of its stream
Key = tuple[bytes, int]


def key_of(message: EncodedMessage) -> Key:
    """What must keep its order: (type, source, sink), and the priority class."""
    return message.stamp.address, message.stamp.priority


class Aside(dict[Key, deque[Item]]):
    """The streams that are stuck, and what of each waits. `time` is the event loop's."""

    def __init__(self, backoff: Backoff, time: Callable[[], float]) -> None:
        super().__init__()
        self._backoff, self._time = backoff, time
        self._tried: set[Key] = set()
        self.due_at = 0.0  # loop time of the next try
        self.messages = self.bytes = 0

    def __repr__(self) -> str:
        return f"Aside({len(self)} streams, {self.messages} messages)"

    @property
    def known_streams(self) -> set[int]:
        """The log's ids of them."""
        return {item[2] for queue in self.values() for item in queue}

    @property
    def is_full(self) -> bool:
        return self.messages >= ASIDE_MESSAGES_MAX or self.bytes >= ASIDE_BYTES_MAX

    @property
    def oldest_seq(self) -> int | None:
        return min((item[0] for queue in self.values() for item in queue), default=None)

    def takes(self, item: Item) -> bool:
        """True if `item` has to wait behind its stream; then it does."""
        queue = self.get(key_of(item[1]))
        if queue is None:
            return False
        queue.append(item)
        self._count([item], 1)
        return True

    def take_out(self, which: Callable[[Item], bool]) -> list[Item]:
        """What waits and for which it says so waits here no more."""
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
        """These have not got through, in this order: before all else of their streams."""
        for item in reversed(items):
            key = key_of(item[1])
            self.setdefault(key, deque()).appendleft(item)
            self._tried.discard(key)
        self._count(items, 1)
        if items:
            self.due_at = self._time() + self._backoff.next_ms() / 1000

    def due(self) -> list[Item]:
        """The first of each stream, if it is time to try them; then `put_back` follows for what did not get through,
        and `release`."""
        if not self or self._time() < self.due_at:
            return []
        self._tried.update(self)
        found = [queue.popleft() for queue in self.values() for _ in range(min(len(queue), TRIED_AT_ONCE))]
        self._count(found, -1)
        return found

    def release(self) -> list[Item]:
        """What waited behind those that were `due` and have got through."""
        found = [item for key in self._tried for item in self.pop(key, ())]
        self._tried.clear()
        self._count(found, -1)
        if not self:
            self._backoff.reset()
        return found

    def wake(self) -> None:
        """The network has changed: try now."""
        self.due_at = 0.0

    def _count(self, items: Sequence[Item], sign: int) -> None:
        self.messages += sign * len(items)
        self.bytes += sign * sum(len(item[1].payload) for item in items)
