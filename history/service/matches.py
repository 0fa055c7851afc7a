"""Finds the streams of a log that a request's patterns match and that its caller may see.

topics -> Matches.of: valid? -> patterns
patterns, sight -> Match -- advance: some streams at a time --> ids, kept, and extended as streams come
     | named topics: only their streams are looked up; named authorities: only the streams of those are examined
     |-- wildcards: each kind of topic (an address without its authority) is compared once, and checked once for all
     |   authorities with the same visible topics
     '-- a pattern that names only an authority, or a caller that sees all of one: nothing is compared
newest_seq: reads back through the records in memory to the first one of a matching stream. While ids are not complete,
            it reads a few thousand records back and checks the stream of each
"""

from __future__ import annotations

import asyncio
import functools
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence, Set
from itertools import chain
from typing import Final, NamedTuple

from history.log.log import Log, Stream
from history.records.chunk import authority_of, is_publish, kind_of, plain_address
from history.records.limits import PATTERNS_MAX, WILDCARD_PATTERNS_MAX
from history.records.visible import EVERYTHING_VISIBLE, NOTHING_VISIBLE, Visible
from uprotocol import uri as uris
from uprotocol.cache import Cache
from uprotocol.communication.shares import CALLERS_SHARE
from uprotocol.status import UStatusError, invalid
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.uri_pb2 import UUri

STREAMS_PER_STEP: Final = 2_000  # examined in one step on the loop, and ...
COMPARISONS_PER_STEP: Final = 4_000  # ... comparisons with patterns for these: some 2 ms
LAST_RECORDS: Final = 4_000  # searched for a match before all streams: if many match, one is likely among them
FEW_MAX: Final = 8_192  # streams whose newest records are compared one by one; of more, the newest is remembered
DOUBTFUL_MAX: Final = 4_096  # streams of which the first record that is left is looked for, in ...
DOUBTFUL_STEPS_MAX: Final = 32  # ... so many scans: some 10 ms each
OTHERS_MAX: Final = 64  # streams that do not match are known one by one: the index finds their records
PATTERNS_KNOWN_MAX: Final = 8_192  # valid topics in the cache of `pattern_of`; some 4 MB when it is full
KINDS_MAX: Final = 4_096  # kinds of topics, and authorities, in the caches of one match; some 100 bytes each
CACHED_MAX: Final = 1_024  # sets of patterns; consumers use the same ones from poll to poll
CACHED_BYTES_MAX: Final = 64 << 20  # of the ids of their streams: five that match all of 262,144 topics
SET_ID_BYTES: Final = 45  # of an id in a set

PatternKey = tuple[str, int, int, int]


class Sight:
    """What one caller may see of a log: everything, unless a subclass restricts it. Callers with the same `key` see the
    same; the key changes whenever what they see changes."""

    key: Hashable = "all"

    @property
    def visible(self) -> Visible:
        """Returns the topics of which `sees` is true without a sink."""
        return EVERYTHING_VISIBLE

    @property
    def cost(self) -> int:
        """Returns the number of patterns that `sees` compares a topic with."""
        return 0

    def sees(self, source: UUri, sink: UUri | None) -> bool:
        return True

    def alike(self, authority: str) -> Hashable:
        """Returns a value that is the same for authorities with the same visible topics. For these, one check decides
        for all topics of one kind that name no sink. By default each authority has its own value."""
        return authority

    def sees_all(self, authority: str) -> bool:
        """Returns True if all topics of the authority that name no sink are visible, so that none has to be checked.
        False: unknown."""
        return False


EVERYTHING: Final = Sight()


class Sights:
    """What each caller may see: everything, unless a subclass restricts it."""

    @property
    def version(self) -> int:
        """Returns a number that changes whenever a result of `of` may change."""
        return 0

    def of(self, caller: UUri) -> Sight:
        """Returns what the caller with this address may see now."""
        return EVERYTHING


class Pattern(NamedTuple):
    key: PatternKey
    uri: UUri
    is_wild: bool


@functools.lru_cache(maxsize=PATTERNS_KNOWN_MAX)
def pattern_of(topic: bytes, caller: str) -> Pattern:
    """Checks one serialized topic. Valid topics are cached, because consumers repeat theirs with each poll; a topic
    that raises is not, so junk cannot fill the cache."""
    given = UUri.FromString(topic)
    pattern = uris.with_authority(given, caller)
    uris.validate(pattern)
    if not uris.is_topic(pattern) and pattern.resource_id != uris.WILDCARD_RESOURCE:
        what = f"{uris.format(given)} is not a topic"
        raise invalid(f"{what}: expected a resource of 8000 to FFFE, or the wildcard FFFF")
    return Pattern(uris.key(pattern), pattern, uris.has_wildcard(pattern))


class Match:
    """The streams of one log that one of the patterns matches and that the caller may see.

    `withheld` counts the streams that match and may not be seen; `withholds`: at least one such stream was found.
    `authorities`: those that the streams can have; None: any.
    """

    def __init__(self, log: Log, patterns: Sequence[UUri], sight: Sight = EVERYTHING) -> None:
        self._log, self._sight = log, sight
        wild = [one for one in patterns if uris.has_wildcard(one)]
        self._exact = {plain_address(one) for one in patterns if not uris.has_wildcard(one)}
        self._is_all = uris.ANY in wild
        self._anywhere = [one for one in wild if uris.is_pattern(one.authority_name)]
        self._kinds: Cache[bytes, bool] = Cache(KINDS_MAX)
        self._named: dict[str, list[UUri]] = {}
        self._whole: set[str] = set()  # authorities whose every topic matches
        for one in wild:
            if not uris.is_pattern(one.authority_name):
                self._named.setdefault(one.authority_name, []).append(one)
                if uris.key(one) == uris.key(uris.pattern(one.authority_name)):
                    self._whole.add(one.authority_name)
        self.authorities = None if self._anywhere else {one.authority_name for one in patterns}
        self._alike: Cache[str, Hashable] = Cache(KINDS_MAX)
        self._seen_whole: Cache[str, bool] = Cache(KINDS_MAX)  # whether every topic of an authority is visible
        self._seen_alike: Cache[tuple[Hashable, bytes], bool] = Cache(KINDS_MAX)
        self._comparisons = 0  # of this step
        self.examined = 0  # streams up to this id have been examined
        self.ids: set[int] = set()
        # examined ones that do not match, if all are examined and these are few
        self._others: set[int] | None = set() if wild and self.authorities is None else None
        self.withheld = 0
        self.withholds = False
        # of more than FEW_MAX ids: the newest matching record up to `_counted_seq`
        self._newest_seq, self._counted_seq = 0, log.newest_seq
        self._is_doubtful = False  # `_newest_seq` may be of a stream that was forgotten
        if not wild:  # the log has an index of exact topics
            for stream in chain.from_iterable(map(log.publishes_from, patterns)):
                if stream.id not in self.ids:
                    self._take(stream)
            self.examined = log.stream_table.newest_id

    def __repr__(self) -> str:
        return f"Match({len(self.ids)} streams of {self._log.name}, examined={self.examined}, withheld={self.withheld})"

    @property
    def memory_bytes(self) -> int:
        """Returns an estimate."""
        return SET_ID_BYTES * len(self.ids)

    # -- the streams

    @property
    def has_all(self) -> bool:
        """True if every stream that the log knows matches, and so every record that it has."""
        return len(self.ids) == self._log.stream_count

    def others(self) -> list[Stream] | None:
        """Returns the streams that do not match; None: they are more than OTHERS_MAX, or not known."""
        if self.has_all:
            return []
        if self._others is None or self.examined < self._log.stream_table.newest_id:
            return None
        return [self._log.stream(id) for id in self._others if self._log.knows_stream(id)]

    def advance(self) -> bool:
        """Take one step. Returns True if every stream of the log has been examined."""
        newest = self._log.stream_table.newest_id
        if self.examined == newest:
            return True
        only = self.authorities
        if only is not None and newest - self.examined <= len(only):
            only = None  # few streams are new, so examining each costs less
        streams = self._log.stream_table.after(self.examined, STREAMS_PER_STEP, only)
        self._comparisons = 0
        for stream in streams:
            self.examined = stream.id
            if self._is_match(stream):
                self._take(stream)
            else:
                self._leave(stream)
            if self._comparisons >= COMPARISONS_PER_STEP:
                return self.examined == newest
        if len(streams) < STREAMS_PER_STEP:
            self.examined = newest
        return self.examined == newest

    @property
    def _is_far(self) -> bool:
        """True if more than one step is left until all streams have been examined."""
        most = self._log.stream_table.newest_id - self.examined
        if most > STREAMS_PER_STEP and self.authorities is not None:
            most = sum(map(self._log.topics_of, self.authorities))
        return most > STREAMS_PER_STEP

    async def complete(self) -> None:
        """Examine all streams of the log, in steps that let other tasks run."""
        while not self.advance():  # noqa: ASYNC110 - it waits for nothing
            await asyncio.sleep(0)

    def add(self, topic: UUri) -> None:
        """Add a topic without wildcards. Only its own streams are examined."""
        self._exact.add(topic.SerializeToString())
        if self.authorities is not None:
            self.authorities.add(topic.authority_name)
        for stream in self._log.publishes_from(topic):
            if stream.id <= self.examined and stream.id not in self.ids:  # later ones are examined by `advance`
                self._take(stream)

    def discard(self, topic: UUri) -> None:
        """Remove a topic without wildcards. Its streams stay if a pattern with wildcards matches them."""
        address = plain_address(topic)
        self._exact.discard(address)
        if not self._matches(address):
            self.ids.difference_update(stream.id for stream in self._log.publishes_from(topic))

    def forget(self, ids: Set[int]) -> None:
        """Remove streams that the log has forgotten."""
        removed = self.ids & ids  # iterates over the smaller set: most matches are small
        self.ids.difference_update(removed)
        if self._others is not None:
            self._others.difference_update(ids)
        # forgotten streams have no record beyond the floor
        self._is_doubtful = self._is_doubtful or (bool(removed) and self._newest_seq <= self._log.floor_seq)

    def streams(self) -> Iterator[Stream]:
        """Yields the matching streams known so far. The match may change during the iteration."""
        for id in list(self.ids):
            if self._log.knows_stream(id):
                yield self._log.stream(id)

    def _take(self, stream: Stream) -> None:
        if self._sight is not EVERYTHING and not self._sees(stream):
            self.withheld, self.withholds = self.withheld + 1, True
            self._leave(stream)
            return
        self.ids.add(stream.id)
        self._newest_seq = max(self._newest_seq, stream.newest_seq)

    def _leave(self, stream: Stream) -> None:
        if self._others is not None:
            self._others.add(stream.id)
            if len(self._others) > OTHERS_MAX:
                self._others = None

    def _is_match(self, stream: Stream) -> bool:
        """Returns whether a pattern matches the stream, which must be of publishes."""
        return self._matches(stream.source_bytes) and is_publish(stream)

    def _sees(self, stream: Stream) -> bool:
        address = stream.source_bytes
        if stream.sink_bytes is not None:
            self._comparisons += 1 + self._sight.cost
            return self._sight.sees(stream.source, stream.sink)
        authority = authority_of(address)
        whole = self._seen_whole.get(authority)
        if whole is None:
            self._comparisons += 1
            whole = self._seen_whole[authority] = self._sight.sees_all(authority)
        if whole:
            return True
        alike = self._alike.get(authority)
        if alike is None:
            self._comparisons += 1
            alike = self._alike[authority] = self._sight.alike(authority)
        key = (alike, kind_of(address))
        known = self._seen_alike.get(key)
        if known is None:
            self._comparisons += 1 + self._sight.cost
            known = self._seen_alike[key] = self._sight.sees(stream.source, None)
        return known

    def _matches(self, address: bytes) -> bool:
        if self._is_all or address in self._exact:
            return True
        if self._anywhere:
            kind = kind_of(address)
            known = self._kinds.get(kind)
            if known is None:
                known = self._kinds[kind] = self._is_like(self._anywhere, address)
            if known:
                return True
        if not self._named:
            return False
        authority = authority_of(address)
        return authority in self._whole or self._is_like(self._named.get(authority, ()), address)

    def _is_like(self, patterns: Sequence[UUri], address: bytes) -> bool:
        topic = UUri.FromString(address)
        self._comparisons += 1 + len(patterns)
        return any(uris.matches(pattern, topic) for pattern in patterns)

    # -- their newest record

    async def newest_seq(self) -> int:
        """Returns the seq of the newest matching record; 0: none. Retention may have deleted it.

        If many streams have not been examined yet, the last records are searched first; all streams are examined only
        if none of those matches.
        """
        log = self._log
        if self._is_far:
            last = max(log.in_memory_after, log.newest_seq - LAST_RECORDS)
            seq = await self._newest_after(last, functools.cache(self._is_seen))
            if seq:
                return seq
        await self.complete()
        if len(self.ids) <= FEW_MAX:
            return max((log.stream(id).newest_seq for id in self.ids if log.knows_stream(id)), default=0)
        end, in_memory = log.newest_seq, log.in_memory_after
        is_sure = self._counted_seq >= in_memory and not self._is_doubtful
        self._is_doubtful = False
        seq = await self._newest_after(max(self._counted_seq, in_memory), self.ids.__contains__)
        if not seq:
            seq = self._newest_seq if is_sure else await self._newest_of_all()
        self._newest_seq, self._counted_seq = seq, end
        return seq

    async def _newest_after(self, seq: int, is_match: Callable[[int], bool]) -> int:
        """Returns the newest record after `seq` of a stream that matches; all these records are in memory. 0: none."""
        records = reversed(self._log.tail(seq) or ())
        pairs = (pair for one in records for pair in zip(reversed(one.seqs), reversed(one.streams), strict=True))
        self._comparisons = 0
        for number, (found, id) in enumerate(pairs, 1):
            if is_match(id):
                return found
            if number % STREAMS_PER_STEP == 0 or self._comparisons >= COMPARISONS_PER_STEP:
                self._comparisons = 0
                await asyncio.sleep(0)
        return 0

    def _is_seen(self, id: int) -> bool:
        """Returns whether a stream matches, whether or not it has been examined."""
        if not self._log.knows_stream(id) or not self._is_match(stream := self._log.stream(id)):
            return False
        is_seen = self._sight is EVERYTHING or self._sees(stream)
        self.withholds = self.withholds or not is_seen
        return is_seen

    async def _newest_of_all(self) -> int:
        newest = 0
        for number, stream in enumerate(self.streams(), 1):
            newest = max(newest, stream.newest_seq)
            if number % STREAMS_PER_STEP == 0:
                await asyncio.sleep(0)
        return newest

    async def has_passed(self, floor: int, seq: int) -> bool:
        """Returns True if retention, which has deleted records up to `floor`, has deleted matching ones after `seq`;
        also if that can't be known: of forgotten streams, of too many streams, or of damaged records."""
        if self._log.stream_table.forgotten_seq(self.authorities) > seq:
            return True
        doubtful = set[int]()  # have records up to `seq`, and others that are not deleted
        for number, stream in enumerate(self.streams(), 1):
            if stream.first_seq <= floor and stream.newest_seq > seq:
                if stream.first_seq > seq or stream.newest_seq <= floor or len(doubtful) == DOUBTFUL_MAX:
                    return True
                doubtful.add(stream.id)
            if number % STREAMS_PER_STEP == 0:
                await asyncio.sleep(0)
        after = floor
        for _ in range(DOUBTFUL_STEPS_MAX):
            if not doubtful:
                return False
            found = await self._log.scan(after, max_records=DOUBTFUL_MAX, max_bytes=1, streams=doubtful, bare=True)
            for chunk in found.chunks:
                for id, prev_seq in zip(chunk.streams, chunk.prev_seqs, strict=True):
                    if id in doubtful and prev_seq > seq:  # the last one that was deleted
                        return True
                    doubtful.discard(id)
            after = found.covered
        return True


class Matches:
    """A cache of matches, by patterns and sight, so that a request does not search all streams again."""

    def __init__(self, logs: Iterable[Log]) -> None:
        self._logs = list(logs)
        # with the authority that asked first; the most recently used is last
        self._cached: dict[tuple[Hashable, tuple[PatternKey, ...]], tuple[str, dict[Log, Match]]] = {}
        self._in_use: dict[Log, weakref.WeakSet[Match]] = {}  # including those that only a poll still has
        for log in self._logs:
            self._in_use[log] = weakref.WeakSet()
            log.on_forgotten(functools.partial(self._forget, log))

    def _forget(self, log: Log, ids: Set[int]) -> None:
        for match in self._in_use[log]:
            match.forget(ids)

    def of(self, topics: Sequence[UUri], sight: Sight, caller: str) -> dict[Log, Match]:
        """Returns a match for each log. A topic without authority is on the host of the `caller`; without `topics`
        every topic matches. Raises INVALID_ARGUMENT, RESOURCE_EXHAUSTED, or PERMISSION_DENIED if the caller may see
        none of them."""
        if len(topics) > PATTERNS_MAX:
            what = f"expected at most {PATTERNS_MAX} topics, got {len(topics)}: use wildcards"
            raise UStatusError(UCode.RESOURCE_EXHAUSTED, what)
        patterns = {one.key: one for one in (pattern_of(topic.SerializeToString(), caller) for topic in topics)}
        if sum(one.is_wild for one in patterns.values()) > WILDCARD_PATTERNS_MAX:
            what = f"at most {WILDCARD_PATTERNS_MAX} of the topics may have wildcards"
            raise UStatusError(UCode.RESOURCE_EXHAUSTED, what)
        key = (sight.key, tuple(sorted(patterns)))
        known = self._cached.pop(key, None)
        if known is None:
            # Exact topics of which none may be seen are refused, and everything where nothing may be seen. That depends
            # on no log, so the refusal reveals nothing about one.
            may_see = any(one.is_wild or sight.sees(one.uri, None) for one in patterns.values()) or not patterns
            if not may_see or sight.visible.is_nothing:
                raise UStatusError(UCode.PERMISSION_DENIED, NOTHING_VISIBLE)
            self._evict(caller)
            known = (caller, self.make([one.uri for one in patterns.values()] or [uris.ANY], sight))
        self._cached[key] = known
        return known[1]

    def make(self, topics: Sequence[UUri], sight: Sight) -> dict[Log, Match]:
        """Returns new matches, one for each log, which the caller may change. Without `topics` nothing matches."""
        made = {log: Match(log, topics, sight) for log in self._logs}
        for log, match in made.items():
            self._in_use[log].add(match)
        return made

    def _evict(self, caller: str) -> None:
        """Make space for one more. A caller that keeps asking for other topics displaces its own matches first."""
        own = [key for key, (whose, _) in self._cached.items() if whose == caller]
        if len(own) >= CACHED_MAX // CALLERS_SHARE:
            del self._cached[own[0]]
        sizes = [sum(match.memory_bytes for match in matches.values()) for _, matches in self._cached.values()]
        total = sum(sizes)
        for key, bytes in zip(list(self._cached), sizes, strict=True):
            if total <= CACHED_BYTES_MAX and len(self._cached) < CACHED_MAX:
                break
            del self._cached[key]
            total -= bytes
