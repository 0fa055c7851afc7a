"""Messages that the in-process network keeps: for `receive`, and for a named member that is away.

a member leaves -> Session(what its listeners want) -> keep(message), if it is wanted and there is room -> back: claimed
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from transports.listeners import Filter
from uprotocol.v1.umessage_pb2 import UMessage

# kept for a named member that is away, as brokers are configured; some 50 MB of small ones
SESSION_MESSAGES_MAX: Final = 100_000
SESSION_BYTES_MAX: Final = 64 << 20  # the same in bytes


class Kept(deque[UMessage]):
    """Messages in order, and their bytes: attributes and payload."""

    def __init__(self, messages: Iterable[UMessage] = ()) -> None:
        super().__init__()
        self.octets = 0
        self.extend(messages)

    def append(self, message: UMessage) -> None:
        super().append(message)
        self.octets += size(message)

    def extend(self, messages: Iterable[UMessage]) -> None:
        for message in messages:
            self.append(message)

    def popleft(self) -> UMessage:
        message = super().popleft()
        self.octets -= size(message)
        return message

    def remove(self, message: UMessage) -> None:
        super().remove(message)
        self.octets -= size(message)


def size(message: UMessage) -> int:
    return len(message.payload) + message.attributes.ByteSize()


@dataclass
class Session:
    """What a network keeps for a named member that is away."""

    filters: list[Filter] = field(default_factory=list)  # what it listened to when it left
    kept: Kept = field(default_factory=Kept)

    def wants(self, message: UMessage) -> bool:
        return any(matches(filter, message) for filter in self.filters)

    def keep(self, message: UMessage) -> bool:
        """False if nobody would want it, or there is no room."""
        has_room = len(self.kept) < SESSION_MESSAGES_MAX and self.kept.octets < SESSION_BYTES_MAX
        if keeps := has_room and self.wants(message):
            self.kept.append(message)
        return keeps


def matches(filter: Filter, message: UMessage) -> bool:
    attributes = message.attributes
    return filter.matches(attributes.source, attributes.sink if attributes.HasField("sink") else None)
