"""How much of each thing fits into the memory that the operator gives: every share in one place.

[limits] memory_mib --> MemoryLimits: topics, queues ... for all together, and for one authority or caller alone
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from uprotocol.cache import STREAMS_MAX
from uprotocol.transport import MESSAGE_BYTES_MAX

MEMORY_MIB: Final = 512  # beside the some 100 MiB that an idle streamer takes
TOPIC_BYTES: Final = 1_024  # what a topic costs in memory with its caches; measured, see docs/security.md
CALLERS_SHARE: Final = 4  # one caller has at most a quarter of what all have: three others work beside it
VOLATILE_SHARE: Final = 4  # ... the volatile log has a quarter of the topics: few topics with high rates belong there
SUBSCRIPTION_BYTES: Final = 2_048  # a subscription to a topic of its own, with interest and index; measured
SENDERS_SHARE: Final = 2  # ... and the callers of one authority together a half: their numbers may be made up
AUTHORITIES_SHARE: Final = 8  # ... and one authority an eighth of the topics
CACHED_SHARE: Final = 10  # a tenth of the topics may take turns without being looked up anew; some 3 KB each


@dataclass(frozen=True)
class MemoryLimits:
    """Bounds in messages and bytes. Half of `memory_bytes` is for topics; of the rest each queue has a fixed share."""

    memory_bytes: int = MEMORY_MIB << 20
    message_bytes_max: int = MESSAGE_BYTES_MAX

    @property
    def topics_max(self) -> int:
        """Topics known at once, of all logs together."""
        return self.memory_bytes // 2 // TOPIC_BYTES

    @property
    def authority_topics_max(self) -> int:
        return max(1, self.topics_max // AUTHORITIES_SHARE)

    @property
    def streams_cached_max(self) -> int:
        """Streams of which each cache knows something (uprotocol.cache.raise_streams_max)."""
        return max(STREAMS_MAX, self.topics_max // CACHED_SHARE)

    @property
    def authorities_max(self) -> int:
        """Source authorities with an account of their own, some 500 bytes each."""
        return self.memory_bytes // 16 // 512

    @property
    def volatile_topics_max(self) -> int:
        """Of `topics_max`, those of the volatile log, where topics are configured for it; the others are durable."""
        return max(1, self.topics_max // VOLATILE_SHARE)

    @property
    def subscriptions_max(self) -> int:
        """Stored by the embedded uSubscription, and known of each one that is asked; its quotas are shares of that."""
        return self.memory_bytes // 4 // SUBSCRIPTION_BYTES

    @property
    def followed_topics_max(self) -> int:
        """That followers of the history have named, some 500 bytes each."""
        return self.memory_bytes // 16 // 512

    @property
    def express_bytes_max(self) -> int:
        """Of requests and responses that wait for one endpoint, and of frames of histories."""
        return max(2 * self.message_bytes_max, self.memory_bytes // 32)

    @property
    def window_bytes_max(self) -> int:
        """Pushed to one follower and not taken: all of it may have to wait for its endpoint."""
        return self.express_bytes_max // SENDERS_SHARE

    @property
    def dead_letter_bytes_max(self) -> int:
        """Of dead letters that are not stored yet."""
        return max(2 * self.message_bytes_max, self.memory_bytes // 64)

    @property
    def replies_bytes_max(self) -> int:
        """Of answers of the services inside that the network has not taken yet."""
        return max(2 * self.message_bytes_max, self.memory_bytes // 16)

    @property
    def reply_bytes_max(self) -> int:
        """Kept free for one answer of the history: one message of the longest, or some thousands of short ones."""
        return max(self.message_bytes_max, 1 << 20) + (256 << 10)
