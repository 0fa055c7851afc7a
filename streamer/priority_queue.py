"""What waits to be sent: a queue for each priority class, the highest class first, the oldest first within a class.

add -> | CS6 | ... | CS1 | CS0 | -> take: a batch, bounded in messages and bytes
put_back -> before all else of its class
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, Generic, TypeVar

from uprotocol.encoded import EncodedMessage
from uprotocol.v1.uattributes_pb2 import UPriority

T = TypeVar("T", bound=tuple[Any, EncodedMessage, Any])


class PriorityQueue(Generic[T]):
    """Items are tuples with the message in the middle. `messages` wait, with `bytes` of payload."""

    def __init__(self) -> None:
        self._classes: list[deque[T]] = [deque() for _ in UPriority.values()]
        self.messages = self.bytes = 0

    def __len__(self) -> int:
        return self.messages

    def __iter__(self) -> Iterator[T]:
        return chain.from_iterable(self._classes)

    def add(self, items: Sequence[T]) -> None:
        classes, size = self._classes, 0
        for item in items:
            message = item[1]
            classes[message.stamp.priority].append(item)
            size += len(message.payload)
        self.messages += len(items)
        self.bytes += size

    def put_back(self, items: Sequence[T]) -> None:
        """They were taken in this order, and have not got through."""
        for item in reversed(items):
            self._classes[item[1].stamp.priority].appendleft(item)
        self._count(items, 1)

    def take(self, messages_max: int, bytes_max: int) -> list[T]:
        """The next ones; the last may exceed `bytes_max`."""
        batch: list[T] = []
        size = 0
        for queue in reversed(self._classes):
            while queue and len(batch) < messages_max and size < bytes_max:
                item = queue.popleft()
                batch.append(item)
                size += len(item[1].payload)
        self.messages -= len(batch)
        self.bytes -= size
        return batch

    def take_out(self, streams: Container[Any]) -> list[T]:
        """All those whose last part is one of `streams`."""
        taken: list[T] = []
        for place, queue in enumerate(self._classes):
            found = [item for item in queue if item[2] in streams]
            if found:
                self._classes[place] = deque(item for item in queue if item[2] not in streams)
                taken += found
        self._count(taken, -1)
        return taken

    @property
    def firsts(self) -> list[T]:
        """The oldest of each class."""
        return [queue[0] for queue in self._classes if queue]

    def _count(self, items: Iterable[T], sign: int) -> None:
        for item in items:
            self.messages += sign
            self.bytes += sign * len(item[1].payload)
