"""Who is subscribed to each topic, in memory: a dispatcher asks for it at every new topic, and must not wait for the
store's threads.

store: rows at the start -> load      commits -> apply(outcomes), before their answers leave      subscribers(topic) <- FetchSubscribers

The file stays the owner; this is its subscription table folded by topic, some 120 bytes per subscription.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import Final

from usubscription.database import Outcome
from usubscription.reader import Reader
from usubscription.state import Key, Status

SUBSCRIBERS_MAX: Final = 256  # of a topic that is answered from here: their answer takes 0.3 ms of the loop


class Index:
    """The committed subscriptions by topic. Lives on the loop, but for `load`, which comes first."""

    def __init__(self) -> None:
        # -> subscriber -> expires_ms, in the order of first subscription (A-36)
        self._topics: dict[Key, dict[Key, int | None]] = {}

    def __repr__(self) -> str:
        return f"Index({len(self._topics)} topics)"

    def load(self, reader: Reader) -> None:
        """Blocks; a million subscriptions take a second."""
        topics = self._topics
        for topic, subscriber, expires_ms in reader.pairs():
            known = topics.get(topic)
            if known is None:
                topics[topic] = {subscriber: expires_ms}
            else:
                known[subscriber] = expires_ms

    def apply(self, outcomes: Iterable[Outcome]) -> None:
        """What was committed, in that order. Whoever comes, goes or gets another time is in a change; nothing else
        counts here."""
        for outcome in outcomes:
            if outcome.many_changes:  # a reset
                self._topics.clear()
            for stored in outcome.changes:
                topic, subscriber, status, _, expires_ms, *_ = stored.change
                if status is not Status.UNSUBSCRIBED:
                    self._topics.setdefault(topic, {})[subscriber] = expires_ms
                elif (known := self._topics.get(topic)) is not None:
                    known.pop(subscriber, None)
                    if not known:
                        del self._topics[topic]

    def subscribers(self, topic: Key, now_ms: int, offset: int, limit: int) -> tuple[list[Key], bool] | None:
        """As Reader.subscribers; None if there are so many that the store has to be asked."""
        known = self._topics.get(topic)
        if known is None:
            return [], False
        if len(known) > SUBSCRIBERS_MAX:
            return None
        found = (who for who, expires_ms in known.items() if expires_ms is None or expires_ms >= now_ms)
        page = list(islice(found, offset, offset + limit + 1))
        return page[:limit], len(page) > limit
