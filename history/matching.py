"""Which streams of a log a set of topic patterns means. Cached, and grown step by step as streams come.

patterns -> Match (exact keys, wildcards) -- advance: some streams at a time, so that the loop is not held up --> ids
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence, Set
from typing import Final

from history.log import Log, Stream
from uprotocol import uri as uris
from uprotocol.status import UStatusError, invalid
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.uri_pb2 import UUri

PATTERNS_MAX: Final = 1_000  # of one request; who wants more wants a wildcard
WILDCARD_PATTERNS_MAX: Final = 64  # each is compared with every stream
COMPARISONS_PER_STEP: Final = 4_000  # some 2 ms
CACHED_MAX: Final = 1_024  # pattern sets; consumers keep theirs from poll to poll

Key = tuple[tuple[str, int, int, int], ...]


def is_publish(stream: Stream) -> bool:
    """Publishes only: no sink, or the one that a streamer sets (an authority, all else wildcard)."""
    sink = stream.sink
    return sink is None or (
        sink.ue_id == uris.WILDCARD_ENTITY and sink.ue_version_major == uris.WILDCARD_VERSION and sink.resource_id == uris.WILDCARD_RESOURCE
    )


class Match:
    """The streams of one log that some of the patterns match; no pattern matches every topic."""

    def __init__(self, log: Log, patterns: Sequence[UUri]) -> None:
        self._log = log
        self._exact = {uris.key(pattern) for pattern in patterns if not uris.has_wildcard(pattern)}
        self._wildcards = [pattern for pattern in patterns if uris.has_wildcard(pattern)] if patterns else [uris.ANY]
        authorities = {pattern.authority_name for pattern in patterns}
        self._authorities = authorities if authorities and not any(map(uris.is_pattern, authorities)) else None  # None: any
        self._seen = 0  # the highest number that was looked at
        self.ids: set[int] = set()

    def advance(self) -> bool:
        """One step; True if every stream there is has been looked at."""
        step = max(1, COMPARISONS_PER_STEP // (1 + len(self._wildcards)))
        streams = self._log.streams_after(self._seen, step)
        for stream in streams:
            self._seen = stream.id
            if is_publish(stream) and self._matches(stream.source):
                self.ids.add(stream.id)
        return len(streams) < step

    def forget(self, ids: Set[int]) -> None:
        self.ids -= ids

    @property
    def forgotten_seq(self) -> int:
        """Up to here there may have been records of theirs of which nothing is known any more."""
        return self._log.forgotten_seq(self._authorities)

    def _matches(self, topic: UUri) -> bool:
        return uris.key(topic) in self._exact or any(uris.matches(pattern, topic) for pattern in self._wildcards)


class Matches:
    def __init__(self, logs: Iterable[Log]) -> None:
        self._logs = list(logs)
        self._cached: dict[Key, dict[Log, Match]] = {}
        for log in self._logs:
            log.on_forgotten(functools.partial(self._forget, log))

    def _forget(self, log: Log, ids: Set[int]) -> None:
        for matches in self._cached.values():
            matches[log].forget(ids)

    def of(self, topics: Sequence[UUri], caller: str) -> dict[Log, Match]:
        """A match for each log; a topic without authority is on the host of the `caller`. Raises INVALID_ARGUMENT or RESOURCE_EXHAUSTED."""
        if len(topics) > PATTERNS_MAX:
            raise UStatusError(UCode.RESOURCE_EXHAUSTED, f"{len(topics)} topics are more than {PATTERNS_MAX}: use wildcards")
        patterns: dict[tuple[str, int, int, int], UUri] = {}
        for topic in topics:
            pattern = uris.with_authority(topic, caller)
            uris.validate(pattern)
            if not uris.is_topic(pattern) and pattern.resource_id != uris.WILDCARD_RESOURCE:
                raise invalid(f"{uris.format(topic)} can't be a topic: expected a resource of 8000 to FFFE, or the wildcard FFFF")
            patterns[uris.key(pattern)] = pattern
        if sum(map(uris.has_wildcard, patterns.values())) > WILDCARD_PATTERNS_MAX:
            raise UStatusError(UCode.RESOURCE_EXHAUSTED, f"at most {WILDCARD_PATTERNS_MAX} of the topics may have wildcards")
        key = tuple(sorted(patterns))
        found = self._cached.get(key)
        if found is None:
            if len(self._cached) >= CACHED_MAX:
                self._cached.clear()
            found = self._cached[key] = {log: Match(log, list(patterns.values())) for log in self._logs}
        return found
