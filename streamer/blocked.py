"""Streams of one peer that don't get through though others do: kept aside, in order, and tried now and then.

sent: some taken, one not -> put aside --due--> the first few of each, with the others -> taken: back to the queue
                               ^                                                     '-> not taken: later
                               '-- what comes for the same (source, sink, priority) waits behind it
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Container, Iterable
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


class Aside:
    """The streams that are stuck. `time` is the event loop's."""

    def __init__(self, backoff: Backoff, time: Callable[[], float]) -> None:
        self._backoff, self._time = backoff, time
        self._queues: dict[Key, deque[Item]] = {}
        self._tried: set[Key] = set()
        self.due_at = 0.0  # loop time of the next try
        self.messages = self.bytes = 0

    def __repr__(self) -> str:
        return f"Aside({len(self._queues)} streams, {self.messages} messages)"

    def __bool__(self) -> bool:
        return bool(self._queues)

    @property
    def streams(self) -> int:
        return len(self._queues)

    @property
    def known_streams(self) -> set[int]:
        """The log's ids of them."""
        return {item[2] for queue in self._queues.values() for item in queue}

    @property
    def is_full(self) -> bool:
        return self.messages >= ASIDE_MESSAGES_MAX or self.bytes >= ASIDE_BYTES_MAX

    @property
    def oldest_seq(self) -> int | None:
        return min((item[0] for queue in self._queues.values() for item in queue), default=None)

    def __contains__(self, key: Key) -> bool:
        return key in self._queues

    def has_any(self, streams: Iterable[int]) -> bool:
        """True if something of these streams is stuck."""
        return not self.known_streams.isdisjoint(streams)

    def takes(self, item: Item) -> bool:
        """True if `item` has to wait behind its stream; then it does."""
        queue = self._queues.get(key_of(item[1]))
        if queue is None:
            return False
        queue.append(item)
        self._count(item, 1)
        return True

    def take_out(self, streams: Container[int]) -> list[Item]:
        """What waits of these streams waits here no more."""
        taken: list[Item] = []
        for key, queue in list(self._queues.items()):
            found = [item for item in queue if item[2] in streams]
            if not found:
                continue
            taken += found
            kept = deque(item for item in queue if item[2] not in streams)
            if kept:
                self._queues[key] = kept
            else:
                del self._queues[key]
        for item in taken:
            self._count(item, -1)
        return taken

    def put_back(self, items: Iterable[Item]) -> None:
        """These have not got through, in this order: before all else of their streams."""
        found: dict[Key, list[Item]] = {}
        for item in items:
            found.setdefault(key_of(item[1]), []).append(item)
            self._count(item, 1)
        for key, those in found.items():
            self._queues.setdefault(key, deque()).extendleft(reversed(those))
        self._tried -= found.keys()
        if found:
            self.due_at = self._time() + self._backoff.next_ms() / 1000

    def due(self) -> list[Item]:
        """The first of each stream, if it is time to try them; then `put_back` follows for what did not get through,
        and `release`."""
        if not self._queues or self._time() < self.due_at:
            return []
        found = []
        for key, queue in self._queues.items():
            self._tried.add(key)
            for _ in range(min(len(queue), TRIED_AT_ONCE)):
                found.append(queue.popleft())
                self._count(found[-1], -1)
        return found

    def release(self) -> list[Item]:
        """What waited behind those that were `due` and have got through."""
        found: list[Item] = []
        for key in self._tried:
            found += self._queues.pop(key, ())
        self._tried.clear()
        for item in found:
            self._count(item, -1)
        if not self._queues:
            self._backoff.reset()
        return found

    def wake(self) -> None:
        """The network has changed: try now."""
        self.due_at = 0.0

    def _count(self, item: Item, sign: int) -> None:
        self.messages += sign
        self.bytes += sign * len(item[1].payload)
