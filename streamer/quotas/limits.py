"""Divides the configured memory among topics, queues and caches: every share in one place.

[limits] memory_mib --> MemoryLimits: topics, queues ... in total, and per authority or caller
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from uprotocol.cache import STREAMS_MAX
from uprotocol.transport import MESSAGE_BYTES_MAX

MEMORY_MIB: Final = 512  # in addition to some 100 MiB of an idle streamer
TOPIC_BYTES: Final = 1_024  # memory of a topic with its caches; measured, see docs/security.md
CALLERS_SHARE: Final = 4  # one caller gets a quarter of the total, so that three others can work
VOLATILE_SHARE: Final = 4  # ... the volatile log, a quarter of the topics: it is for few topics with high rates
SUBSCRIPTION_BYTES: Final = 2_048  # memory of a subscription to its own topic, with interest and index; measured
SENDERS_SHARE: Final = 2  # ... the callers of one authority together, a half: one host can invent many callers
AUTHORITIES_SHARE: Final = 8  # ... one authority, an eighth of the topics
CACHED_SHARE: Final = 10  # the caches hold a tenth of the topics; some 3 KB each


@dataclass(frozen=True)
class MemoryLimits:
    """Limits in messages and bytes. Half of `memory_bytes` is for topics; each queue has a fixed share of the rest."""

    memory_bytes: int = MEMORY_MIB << 20
    message_bytes_max: int = MESSAGE_BYTES_MAX

    @property
    def topics_max(self) -> int:
        """Maximum of topics in all logs together."""
        return self.memory_bytes // 2 // TOPIC_BYTES

    @property
    def authority_topics_max(self) -> int:
        return max(1, self.topics_max // AUTHORITIES_SHARE)

    @property
    def streams_cached_max(self) -> int:
        """Maximum of streams in each cache (uprotocol.cache.raise_streams_max)."""
        return max(STREAMS_MAX, self.topics_max // CACHED_SHARE)

    @property
    def authorities_max(self) -> int:
        """Maximum of source authorities with an account, some 500 bytes each."""
        return self.memory_bytes // 16 // 512

    @property
    def volatile_topics_max(self) -> int:
        """Share of the volatile log in `topics_max`, if topics are configured for it; the others are durable."""
        return max(1, self.topics_max // VOLATILE_SHARE)

    @property
    def subscriptions_max(self) -> int:
        """Maximum in the embedded uSubscription, and from each remote one; its quotas are shares of it."""
        return self.memory_bytes // 4 // SUBSCRIPTION_BYTES

    @property
    def followed_topics_max(self) -> int:
        """Maximum of topics that followers of the history have named, some 500 bytes each."""
        return self.memory_bytes // 16 // 512

    @property
    def express_bytes_max(self) -> int:
        """Maximum of requests, responses and history frames that wait for one endpoint."""
        return max(2 * self.message_bytes_max, self.memory_bytes // 32)

    @property
    def window_bytes_max(self) -> int:
        """Maximum that is pushed to one follower and unconfirmed: all of it may wait for its endpoint."""
        return self.express_bytes_max // SENDERS_SHARE

    @property
    def dead_letter_bytes_max(self) -> int:
        """Maximum of dead letters that are not stored yet."""
        return max(2 * self.message_bytes_max, self.memory_bytes // 64)

    @property
    def replies_bytes_max(self) -> int:
        """Maximum of responses of the hosted services that the network has not accepted yet."""
        return max(2 * self.message_bytes_max, self.memory_bytes // 16)

    @property
    def reply_bytes_max(self) -> int:
        """Reserved for one response of the history: one longest message, or some thousands of short ones."""
        return max(self.message_bytes_max, 1 << 20) + (256 << 10)
