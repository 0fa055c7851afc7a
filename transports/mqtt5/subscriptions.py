"""The topic filters that we have at the broker, and copies of one message that it sends for several of them. Pure.

If several of our filters match a message, it comes once or once for each of them: the broker chooses (MQTT 5 section
3.3.4). Brokers fill subscription identifiers differently, so we ask for none and look at the messages: on a topic that
two filters match, the first message with a source and id is taken, and later ones on the same connection are copies. On
another connection it may be the first one, sent again because it was not acknowledged.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from uprotocol.cache import Cache
from uprotocol.status import UStatusError
from uprotocol.v1.uattributes_pb2 import UAttributes

TopicShape = tuple[int, tuple[int, ...]]
"""Of a topic filter: its number of segments, and which of them are `+`."""

# sources and ids of messages on topics that two filters match, some 200 bytes each. A broker with a queue for each
# subscription (ActiveMQ Artemis) may send the copy so many messages later
COPIES_MAX: Final = 32_768
# unsubscribed filters: the broker may still send what it had queued for them
LEFT_MAX: Final = 1_024
# the same, after the last filter of an earlier process was unsubscribed
LEFT_S: Final = 30.0


@dataclass(slots=True, eq=False)
class TopicSubscription:
    topic_filter: str
    # the broker's first answer; None if there was no connection to ask on
    granted: asyncio.Future[None] | None = None
    known: bool = False  # the broker has it
    is_lossy: bool = False  # it grants QoS 0
    users: int = 1  # uProtocol filters that need it; 0: its UNSUBSCRIBE is not answered yet
    refusal: UStatusError | None = None  # why the broker does not have it
    refusals: int = 0  # in a row
    hang_ups: int = 0  # connections that were lost while it had no answer, in a row
    ask_at_s: float = 0.0  # loop time; it is not asked for again before

    @property
    def is_missing(self) -> bool:
        """True if the broker should be asked for it, together with others."""
        return not self.known and self.users > 0 and not self.hang_ups


def topic_matches(topic_filter: str, topic: str) -> bool:
    """`+` matches one segment; our mapping uses no other wildcard."""
    wanted, given = topic_filter.split("/"), topic.split("/")
    return len(wanted) == len(given) and all(one in ("+", two) for one, two in zip(wanted, given, strict=True))


def _shape(topic_filter: str) -> TopicShape:
    segments = topic_filter.split("/")
    return len(segments), tuple(index for index, segment in enumerate(segments) if segment == "+")


class Subscriptions(dict[str, TopicSubscription]):
    """By topic filter, in the order in which they were added. Matching a topic costs one look-up for each shape in use,
    however many filters there are."""

    def __init__(self, on_removed: Callable[[str], None] = lambda _: None) -> None:
        super().__init__()
        self._on_removed = on_removed
        self._matches: Cache[str, int] = Cache()
        self._shapes: Counter[TopicShape] = Counter()

    def add(self, topic_filter: str) -> TopicSubscription:
        assert topic_filter not in self, f"{topic_filter} is subscribed to already"
        made = self[topic_filter] = TopicSubscription(topic_filter)
        self._shapes[_shape(topic_filter)] += 1
        self._forget(topic_filter)
        return made

    def _forget(self, topic_filter: str) -> None:
        """Forget the cached counts of the topics that it matches."""
        if "+" in topic_filter:
            self._matches.clear()
        else:
            self._matches.pop(topic_filter, None)

    def remove(self, subscription: TopicSubscription) -> None:
        """May be called again."""
        if self.get(subscription.topic_filter) is subscription:
            del self[subscription.topic_filter]
            shape = _shape(subscription.topic_filter)
            self._shapes[shape] -= 1
            if not self._shapes[shape]:
                del self._shapes[shape]
            self._forget(subscription.topic_filter)
            self._on_removed(subscription.topic_filter)

    def forget_all(self) -> None:
        """The broker has lost the session."""
        for subscription in self.values():
            subscription.known = False

    def matches(self, topic: str) -> int:
        """Returns how many of our filters match `topic`."""
        found = self._matches.get(topic)
        if found is None:
            found = self._matches[topic] = self._count(topic)
        return found

    def _count(self, topic: str) -> int:
        segments, count = topic.split("/"), 0
        for length, wildcards in self._shapes:
            if length == len(segments):
                masked = segments.copy()
                for index in wildcards:
                    masked[index] = "+"
                count += "/".join(masked) in self
        return count


class Copies:
    """Messages that were taken on this connection, on topics that more than one filter of ours matches or matched; on
    all topics while the session may have filters of an earlier process, which may match anything."""

    def __init__(self) -> None:
        self._left = Subscriptions()
        self._taken: dict[bytes, None] = {}  # id and source, in the order in which they came
        self._of_all, self._of_all_until_s = False, 0.0

    def new_connection(self, *, is_present: bool) -> None:
        """Messages that were taken may come again. `is_present`: the broker still has our session, and what it had
        queued for unsubscribed filters."""
        self._taken.clear()
        if not is_present:
            self._left = Subscriptions()

    def left(self, topic_filter: str) -> None:
        """It was unsubscribed."""
        if topic_filter not in self._left:
            self._left.add(topic_filter)
            if len(self._left) > LEFT_MAX:
                self._left.remove(next(iter(self._left.values())))

    def has_unknown_filters(self, now_s: float) -> None:
        """The session may have filters of an earlier process now."""
        self._of_all, self._of_all_until_s = True, now_s + LEFT_S

    def tick(self, now_s: float) -> None:
        if self._of_all and now_s >= self._of_all_until_s:
            self._of_all = False

    def may_come(self, topic: str, matches: int) -> bool:
        """True if messages of this topic may come more than once; `matches` filters of ours match it."""
        return matches > 1 or self._of_all or (len(self._left) > 0 and matches + self._left.matches(topic) > 1)

    def is_copy(self, encoded: bytes) -> bool:
        """Returns True if a message with these UAttributes (`encoded`) was taken before, and notes that it is now."""
        attributes = UAttributes.FromString(encoded)
        key = attributes.id.SerializeToString() + attributes.source.SerializeToString()
        if key in self._taken:
            return True
        self._taken[key] = None
        if len(self._taken) > COPIES_MAX:
            del self._taken[next(iter(self._taken))]
        return False
