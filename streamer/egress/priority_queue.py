"""A queue of messages to be sent: the highest priority class first, the oldest first within a class.

add -> | CS6 | ... | CS1 | CS0 | -> take: a batch, bounded in messages and bytes
put_back -> before all else of its class
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, chain
from typing import Any, Generic, TypeVar

from uprotocol.encoded import EncodedMessage
from uprotocol.v1.uattributes_pb2 import UPriority

T = TypeVar("T", bound=tuple[Any, EncodedMessage, Any])


class PriorityQueue(Generic[T]):
    """Items are tuples with the message in the middle. `messages` of them wait, with `bytes` of payload."""

    def __init__(self) -> None:
        self._classes: list[deque[T]] = [deque() for _ in UPriority.values()]  # the lowest first
        self.messages = self.bytes = 0

    def __len__(self) -> int:
        return self.messages

    def __iter__(self) -> Iterator[T]:
        return chain.from_iterable(reversed(self._classes))

    def add(self, items: Sequence[T]) -> None:
        priorities = {item[1].stamp.priority for item in items}
        if len(priorities) == 1:  # as most batches are
            self._classes[priorities.pop()].extend(items)
        else:
            for item in items:
                self._classes[item[1].stamp.priority].append(item)
        self.messages += len(items)
        self.bytes += sum([len(item[1].payload) for item in items])

    def put_back(self, items: Sequence[T]) -> None:
        """Put items back that were taken in this order and have not got through."""
        for item in reversed(items):
            self._classes[item[1].stamp.priority].appendleft(item)
        self.messages += len(items)
        self.bytes += sum([len(item[1].payload) for item in items])

    def take(self, messages_max: int, bytes_max: int) -> list[T]:
        """Remove and return the next items; the last one may exceed `bytes_max`."""
        if self.messages <= messages_max and self.bytes <= bytes_max:  # the common case: all of them
            batch = [item for queue in reversed(self._classes) for item in queue]
            self.messages = self.bytes = 0
            for queue in self._classes:
                queue.clear()
            return batch
        batch = []
        for queue in reversed(self._classes):
            batch += [queue.popleft() for _ in range(min(len(queue), messages_max - len(batch)))]
        sizes = list(accumulate([len(item[1].payload) for item in batch], initial=0))
        fits = bisect_left(sizes, bytes_max)  # including the item that reaches it
        if fits < len(batch):
            for item in reversed(batch[fits:]):
                self._classes[item[1].stamp.priority].appendleft(item)
            del batch[fits:]
        self.messages -= len(batch)
        self.bytes -= sizes[len(batch)]
        return batch

    def take_out(self, which: Callable[[T], bool]) -> list[T]:
        """Remove and return the items for which `which` is true."""
        taken = [item for item in self if which(item)]
        if taken:
            out = set(map(id, taken))
            self._classes = [deque(item for item in queue if id(item) not in out) for queue in self._classes]
            self.messages -= len(taken)
            self.bytes -= sum([len(item[1].payload) for item in taken])
        return taken

    @property
    def firsts(self) -> list[T]:
        """The oldest item of each class."""
        return [queue[0] for queue in self._classes if queue]
