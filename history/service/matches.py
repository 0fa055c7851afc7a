"""Which streams of a log a question means: its patterns, and what its caller may see.

patterns, sight -> Match -- advance: some streams at a time --> ids, kept, and grown as streams come
     | named topics: theirs alone are looked up; named authorities: the streams of those alone are looked at
     |-- wildcards: each kind of topic (all of an address but its authority) is compared once, and looked at once for
     |   all authorities of which the caller sees alike
     '-- a pattern that names but an authority, or a caller who sees all of one: nothing is compared
newest_seq: back through what is in memory, as far as to the first record of theirs; while ids are not complete, some
            records back with each stream looked at by itself
"""

from __future__ import annotations

import asyncio
import functools
import weakref
from collections.abc import Hashable, Iterable, Iterator, Sequence, Set
from itertools import chain
from typing import Final, NamedTuple

from history.log.log import Log, Stream
from history.records.stream import authority_of, is_publish, kind_of, plain_address
from uprotocol import uri as uris
from uprotocol.cache import Cache
from uprotocol.communication.shares import CALLERS_SHARE
from uprotocol.status import UStatusError
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.uri_pb2 import UUri

STREAMS_PER_STEP: Final = 2_000  # looked at in one step on the loop, and ...
COMPARISONS_PER_STEP: Final = 4_000  # ... for these compared with so many patterns: some 2 ms
LAST_RECORDS: Final = 4_000  # looked at for one that matches, before all streams are: where much matches, it is there
FEW_MAX: Final = (
    8_192  # streams that are all asked for their newest record; of more, only what has changed is looked at
)
KINDS_MAX: Final = 4_096  # of topics, and authorities, that are remembered by one match; some 100 bytes each
CACHED_MAX: Final = 1_024  # pattern sets; consumers keep theirs from poll to poll
CACHED_BYTES_MAX: Final = 64 << 20  # of the streams of those: five that match all of 262,144 topics
ID_BYTES: Final = 45  # of one of these streams in a set
HIDDEN: Final = "the rules, or [[access]], of this streamer let you read none of these topics"

Key = tuple[Hashable, tuple[tuple[str, int, int, int], ...]]


class Sight:
    """What one caller may see of a log: everything, where a subclass does not say otherwise. Callers of the same `key`
    see the same; it changes with whatever changes that."""

    key: Hashable = "all"

    @property
    def cost(self) -> int:
        """With how many patterns a topic is compared."""
        return 0

    def sees(self, source: UUri, sink: UUri | None) -> bool:
        return True

    def alike(self, authority: str) -> Hashable:
        """Where this is the same, all topics of one kind that name no sink are seen, or none is: only the first of them
        is asked for. By default nothing is alike."""
        return authority

    def sees_all(self, authority: str) -> bool:
        """True: all topics there that name no sink are seen, and need not be asked for. By default that isn't known."""
        return False


EVERYTHING: Final = Sight()


class Access:
    """Who may see what: everybody everything, where a subclass does not say otherwise."""

    @property
    def version(self) -> int:
        """It changes whenever an answer of `of` may."""
        return 0

    def of(self, caller: UUri) -> Sight:
        """What the caller with this address may see now."""
        return EVERYTHING


class Patterns(NamedTuple):
    """What a request asks for."""

    key: tuple[tuple[str, int, int, int], ...]
    uris: tuple[UUri, ...]


class Match:
    """The streams of one log that some of the patterns match and that may be seen.

    `withheld` counts those that match and may not be seen. `authorities`: of which alone they can be; None: of any.
    """

    def __init__(self, log: Log, patterns: Sequence[UUri], sight: Sight = EVERYTHING) -> None:
        self._log, self._sight = log, sight
        wild = [one for one in patterns if uris.has_wildcard(one)]
        self._exact = {plain_address(one) for one in patterns if not uris.has_wildcard(one)}
        self._is_all = uris.ANY in wild
        self._anywhere = [one for one in wild if uris.is_pattern(one.authority_name)]
        self._kinds: Cache[bytes, bool] = Cache(KINDS_MAX)
        self._named: dict[str, list[UUri]] = {}
        self._whole: set[str] = set()  # authorities of which every topic matches
        for one in wild:
            if not uris.is_pattern(one.authority_name):
                self._named.setdefault(one.authority_name, []).append(one)
                if uris.key(one) == uris.key(uris.pattern(one.authority_name)):
                    self._whole.add(one.authority_name)
        self.authorities = None if self._anywhere else {one.authority_name for one in patterns}
        self._alike: Cache[str, Hashable] = Cache(KINDS_MAX)
        self._seen_whole: Cache[str, bool] = Cache(KINDS_MAX)  # whether all of an authority is seen
        self._seen_alike: Cache[tuple[Hashable, bytes], bool] = Cache(KINDS_MAX)
        self._comparisons = 0  # of this step
        self._seen = 0  # the highest number that was looked at
        self.ids: set[int] = set()
        self.withheld = 0
        self._withholds = False  # one was met that matches and may not be seen
        # of more than a few: the newest record of theirs among those up to `_counted_seq`
        self._newest_seq, self._counted_seq = 0, log.newest_seq
        self._is_doubtful = False  # it may be of a stream that was forgotten
        if not wild:  # there is an index of these
            for stream in chain.from_iterable(map(log.publishes_from, patterns)):
                if stream.id not in self.ids:
                    self._take(stream)
            self._seen = log.newest_stream_id

    def __repr__(self) -> str:
        return f"Match({len(self.ids)} streams of {self._log.name}, seen={self._seen}, withheld={self.withheld})"

    @property
    def memory_bytes(self) -> int:
        """About."""
        return ID_BYTES * len(self.ids)

    # -- which they are

    def advance(self) -> bool:
        """One step; True if every stream there is has been looked at."""
        newest = self._log.newest_stream_id
        if self._seen == newest:
            return True
        only = self.authorities
        if only is not None and newest - self._seen <= len(only):
            only = None  # so few have come that looking at each costs less
        streams = self._log.streams_after(self._seen, STREAMS_PER_STEP, only)
        self._comparisons = 0
        for stream in streams:
            self._seen = stream.id
            if self._is_meant(stream):
                self._take(stream)
            if self._comparisons >= COMPARISONS_PER_STEP:
                return self._seen == newest
        if len(streams) < STREAMS_PER_STEP:
            self._seen = newest
        return self._seen == newest

    @property
    def _is_far(self) -> bool:
        """More than a step from complete."""
        most = self._log.newest_stream_id - self._seen
        if most > STREAMS_PER_STEP and self.authorities is not None:
            most = sum(map(self._log.topics_of, self.authorities))
        return most > STREAMS_PER_STEP

    @property
    def withholds(self) -> bool:
        """As far as was looked, something matches that may not be seen."""
        return self._withholds or self.withheld > 0

    async def complete(self) -> None:
        """All streams there are when this returns have been looked at."""
        while not self.advance():  # noqa: ASYNC110 - gives way, waits for nothing
            await asyncio.sleep(0)

    def add(self, topic: UUri) -> None:
        """One more topic, without wildcards: only its own streams are looked at."""
        self._exact.add(topic.SerializeToString())
        if self.authorities is not None:
            self.authorities.add(topic.authority_name)
        for stream in self._log.publishes_from(topic):
            if stream.id <= self._seen and stream.id not in self.ids:  # the others' turn comes
                self._take(stream)

    def discard(self, topic: UUri) -> None:
        """Not by itself any more: its streams stay as far as a pattern with wildcards matches them."""
        address = plain_address(topic)
        self._exact.discard(address)
        if not self._matches(address):
            self.ids.difference_update(stream.id for stream in self._log.publishes_from(topic))

    def forget(self, ids: Set[int]) -> None:
        gone = self.ids & ids  # of two sets the smaller one is walked: most matches are small
        self.ids.difference_update(gone)
        # those that are forgotten have no record beyond the floor
        self._is_doubtful = self._is_doubtful or (bool(gone) and self._newest_seq <= self._log.floor_seq)

    def streams(self) -> Iterator[Stream]:
        """Those that are known; they may change meanwhile."""
        for id in list(self.ids):
            if self._log.knows_stream(id):
                yield self._log.stream(id)

    def _take(self, stream: Stream) -> None:
        if self._sight is not EVERYTHING and not self._sees(stream):
            self.withheld += 1
            return
        self.ids.add(stream.id)
        self._newest_seq = max(self._newest_seq, stream.newest_seq)

    def _is_meant(self, stream: Stream) -> bool:
        """Whether a pattern matches it."""
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

    # -- how far they have come

    async def newest_seq(self) -> int:
        """The newest record of theirs, as far as they are known; 0: none. Retention may have passed it.

        While many streams have not been looked at, they are for it only if it is not among the last ones.
        """
        seq = await self._newest_of_last() if self._is_far else 0
        if seq:
            return seq
        await self.complete()
        log = self._log
        if len(self.ids) <= FEW_MAX:
            return max((log.stream(id).newest_seq for id in self.ids if log.knows_stream(id)), default=0)
        end, in_memory = log.newest_seq, log.in_memory_after
        is_sure = self._counted_seq >= in_memory and not self._is_doubtful
        self._is_doubtful = False
        seq = await self._newest_after(max(self._counted_seq, in_memory))
        if not seq:
            seq = self._newest_seq if is_sure else await self._newest_of_all()
        self._newest_seq, self._counted_seq = seq, end
        return seq

    async def _newest_after(self, seq: int) -> int:
        """0: none there, all of which is in memory."""
        looked_at = 0
        for chunk in reversed(self._log.tail(seq) or ()):
            if not self.ids.isdisjoint(chunk.stream_set):
                numbers = zip(reversed(chunk.seqs), reversed(chunk.streams), strict=True)
                return next(one for one, stream in numbers if stream in self.ids)
            looked_at += len(chunk.stream_set)
            if looked_at >= STREAMS_PER_STEP:
                looked_at = 0
                await asyncio.sleep(0)
        return 0

    async def _newest_of_last(self) -> int:
        """Back through the last records, as far as they are in memory, with the stream of each looked at by itself; 0:
        none of them."""
        log, known = self._log, dict[int, bool]()
        records = reversed(log.tail(max(log.in_memory_after, log.newest_seq - LAST_RECORDS)) or ())
        pairs = (pair for one in records for pair in zip(reversed(one.seqs), reversed(one.streams), strict=True))
        self._comparisons = 0
        for place, (seq, id) in enumerate(pairs, 1):
            found = known.get(id)
            if found is None:
                found = known[id] = log.knows_stream(id) and self._is_seen(log.stream(id))
            if found:
                return seq
            if place % STREAMS_PER_STEP == 0 or self._comparisons >= COMPARISONS_PER_STEP:
                self._comparisons = 0
                await asyncio.sleep(0)
        return 0

    def _is_seen(self, stream: Stream) -> bool:
        if not self._is_meant(stream):
            return False
        is_seen = self._sight is EVERYTHING or self._sees(stream)
        self._withholds = self._withholds or not is_seen
        return is_seen

    async def _newest_of_all(self) -> int:
        newest = 0
        for place, stream in enumerate(self.streams(), 1):
            newest = max(newest, stream.newest_seq)
            if place % STREAMS_PER_STEP == 0:
                await asyncio.sleep(0)
        return newest

    async def has_passed(self, floor: int, place: int) -> bool:
        """True if retention, which has come to `floor`, has deleted something of theirs beyond `place`."""
        if self._log.forgotten_seq(self.authorities) > place:
            return True  # of forgotten ones nothing else is known
        for number, stream in enumerate(self.streams(), 1):
            if stream.newest_seq > place and stream.first_seq <= floor:
                return True
            if number % STREAMS_PER_STEP == 0:
                await asyncio.sleep(0)
        return False


class Matches:
    """The matches in use, by what is asked for and what may be seen: none is looked for again with each request."""

    def __init__(self, logs: Iterable[Log]) -> None:
        self._logs = list(logs)
        # with the authority that asked first; what was used last is last
        self._cached: dict[Key, tuple[str, dict[Log, Match]]] = {}
        self._in_use: dict[Log, weakref.WeakSet[Match]] = {}  # those that a poll still holds, too
        for log in self._logs:
            self._in_use[log] = weakref.WeakSet()
            log.on_forgotten(functools.partial(self._forget, log))

    def _forget(self, log: Log, ids: Set[int]) -> None:
        for match in self._in_use[log]:
            match.forget(ids)

    def of(self, patterns: Patterns, sight: Sight, caller: str) -> dict[Log, Match]:
        """A match for each log. Raises PERMISSION_DENIED if the caller may see none of what is asked for."""
        key = (sight.key, patterns.key)
        known = self._cached.pop(key, None)
        if known is None:
            # Topics that are named, each by itself, and none may be seen: that depends on no log, so who is refused
            # learns nothing of it.
            seen = (uris.has_wildcard(topic) or sight.sees(topic, None) for topic in patterns.uris)
            if patterns.uris and not any(seen):
                raise UStatusError(UCode.PERMISSION_DENIED, HIDDEN)
            self._make_room(caller)
            known = (caller, self.make(patterns.uris or (uris.ANY,), sight))
        self._cached[key] = known
        return known[1]

    def make(self, topics: Sequence[UUri], sight: Sight) -> dict[Log, Match]:
        """A match for each log that is the caller's own, to be changed by it. None of `topics`: nothing matches."""
        made = {log: Match(log, topics, sight) for log in self._logs}
        for log, match in made.items():
            self._in_use[log].add(match)
        return made

    def _make_room(self, caller: str) -> None:
        """Who asks for ever other topics pushes out its own."""
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
