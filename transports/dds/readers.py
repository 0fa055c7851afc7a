"""The readers of the DDS transport, on one thread, and on the event loop the filters that need them.

filter -> a pattern:    a reader of its own       -> Readers.add, on one thread -> wait until every peer has announced
          a plain name: joins the next new reader                                  the reader (RollCall), SEEN_S at most

DDS -> WaitSet -> take -> each sample once;          -> owner of the sample -> arrived(samples)
                          missing ones are reported     by its partition       may block: then the senders wait

A reader has one pattern, or many plain names. DDS matches each new writer against every reader, here and elsewhere:
with 2,000 readers of one name each a writer took 430 us to make, with readers of 64 names and more 58 us.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Final

import structlog
from cyclonedds.core import DDSException, ReadCondition
from cyclonedds.qos import Policy, Qos
from cyclonedds.sub import DataReader, Subscriber

from transports.base import NOT_OPEN
from transports.dds import mapping
from transports.dds.link import (
    INFINITE_NS,
    READER_BYTES_MAX,
    READER_SAMPLES_MAX,
    READER_SAMPLES_MIN,
    TAKE_BYTES_MAX,
    TAKE_SAMPLES_MAX,
    TAKE_SAMPLES_MIN,
    Frame,
    Participant,
    Remembered,
    ServingThread,
    binding,
    delete,
    make_reader,
    translated,
)
from transports.dds.roll_call import Seen
from transports.listeners import Filter
from uprotocol.status import UStatusError
from uprotocol.tasks import wait_within

WRITERS_REMEMBERED_MAX: Final = 4_096  # per reader, some 300 bytes each: as many as a transport of ours has
# of one reader; more of them do not make a writer cheaper ...
NAMES_MAX: Final = 256
# ... and discovery sends all in one parameter of at most 64 KiB (RTPS 9.4.2.11), better in one datagram
NAMES_BYTES_MAX: Final = 16_384
DISCOVERY_S_MAX: Final = 2.0  # the longest wait of `discovered`
# for all peers to find a new reader; takes 1 to 30 ms. A peer that is stuck must not block us for longer
SEEN_S: Final = 1.0
SEEN_KEPT_MAX: Final = 4_096  # announcements kept for readers that are just being made

log = structlog.get_logger()


@dataclass(slots=True)
class _Source:
    """One writer, as one reader sees it. A writer that is lost and found again has a new handle and its old key."""

    key: bytes  # GUID; empty if the writer is unknown
    participant: bytes
    partition: str  # "" if it is unknown or one of several
    is_numbered: bool
    lifespan_ns: int
    last_ns: int = 0  # source time stamp of its last sample
    last_data: bytes = b""  # of a writer whose samples have no numbers


ArrivedSample = tuple[Any, bytes, str]  # its owner, its octets, and the partition of its writer


@dataclass(slots=True)
class _FilterReader:
    owners: dict[str, Any]  # by partition: one pattern, or plain names
    pattern: str  # "" for plain names
    subscriber: Subscriber
    entity: DataReader[Frame]
    condition: ReadCondition
    take_max: int = TAKE_SAMPLES_MIN  # samples in one call
    # one that was forgotten is looked up again at its next sample
    by_handle: Remembered[int, _Source] = field(default_factory=lambda: Remembered(WRITERS_REMEMBERED_MAX))
    by_key: Remembered[bytes, _Source] = field(default_factory=lambda: Remembered(WRITERS_REMEMBERED_MAX))

    def close(self) -> None:
        delete(self.condition, self.entity, self.subscriber)

    def source(self, handle: int) -> _Source:
        """The writer with that handle. A writer that was known under another handle keeps its counters."""
        with binding:
            found = self.entity.get_matched_publication_data(handle)
        if found is None:  # it has ended already
            source = _Source(b"", b"", "", False, INFINITE_NS)
        else:
            key, qos = found.key.bytes, found.qos
            userdata, lifespan = qos[Policy.Userdata], qos[Policy.Lifespan]
            is_numbered = userdata is not None and userdata.data == mapping.NUMBERED
            lifespan_ns = INFINITE_NS if lifespan is None else lifespan.lifespan
            partitions = qos[Policy.Partition]
            partition = partitions.partitions[0] if partitions is not None and len(partitions.partitions) == 1 else ""
            known = self.by_key.pop(key, None)
            source = known or _Source(key, found.participant_key.bytes, partition, is_numbered, lifespan_ns)
            source.lifespan_ns = lifespan_ns
            self.by_key[key] = source
        self.by_handle[handle] = source
        return source

    def owner(self, source: _Source, data: bytes) -> Any:
        """The owner of a sample; None if its filter was removed.

        If the writer is unknown or has several partitions, the message itself decides. A malformed one goes to any
        owner, who counts it.
        """
        if self.pattern:
            return self.owners.get(self.pattern)
        if source.partition:
            return self.owners.get(source.partition)
        try:
            return self.owners.get(mapping.partition_of(mapping.decode(data)))
        except UStatusError:
            return next(iter(self.owners.values()), None)


class Readers(ServingThread):
    """Readers by token. `arrived(samples)` runs on the thread of this object. While it blocks, the senders wait.

    `lost` counts samples that a writer sent to us and that never came: "lost", or "lost_or_expired" if DDS may have
    dropped them because of their age.
    """

    def __init__(
        self,
        participant: Participant,
        arrived: Callable[[list[ArrivedSample]], None],
        sample_bytes_max: int,
    ) -> None:
        super().__init__(participant, "dds-readers")
        self._arrived = arrived
        # of each reader: the limits of DDS count no bytes
        self._samples_max = min(READER_SAMPLES_MAX, max(READER_SAMPLES_MIN, READER_BYTES_MAX // sample_bytes_max))
        self._readers: dict[int, _FilterReader] = {}
        self._tokens = itertools.count(1)
        self.lost: Counter[str] = Counter()
        self._thread.start()

    def __len__(self) -> int:
        return len(self._readers)

    def add(self, owners: Mapping[str, Any]) -> tuple[int, bytes]:
        """Make a reader. Returns its token and its GUID. `owners`: by partition, one pattern, or plain names. Raises
        UStatusError."""
        names = list(owners)
        with translated(f"reading from {names[0]}{' and others' if len(names) > 1 else ''}"), binding:
            token = next(self._tokens)
            subscriber = Subscriber(self._participant.entity, Qos(Policy.Partition(names)))
            entity = make_reader(subscriber, self._participant.topic, self._samples_max)
            pattern = names[0] if mapping.is_pattern(names[0]) else ""
            watched = self._watch(entity, token)
            self._readers[token] = _FilterReader(dict(owners), pattern, subscriber, entity, watched)
            return token, entity.guid.bytes

    def leave(self, token: int, partition: str) -> None:
        """Remove the owner of `partition`. The reader is closed with the last one, since DDS allows no change of its
        partitions."""
        reader = self._readers[token]
        del reader.owners[partition]
        if not reader.owners:
            del self._readers[token]
            self._triggers.detach(reader.condition)
            reader.close()

    def _serve(self, tokens: list[int]) -> None:
        for token in tokens:
            reader = self._readers.get(token)
            if reader is None:
                continue
            try:
                samples = reader.entity.take(reader.take_max)
                fresh = self._fresh(reader, samples)
            except DDSException:
                if token in self._readers:  # else it was closed meanwhile
                    raise
                continue
            if sum([len(sample) for _, sample, _ in fresh]) < TAKE_BYTES_MAX:
                reader.take_max = min(2 * reader.take_max, TAKE_SAMPLES_MAX)
            else:
                reader.take_max = max(1, reader.take_max // 4)
            self._arrived(fresh)

    def _fresh(self, reader: _FilterReader, samples: list[Any]) -> list[ArrivedSample]:
        """The samples with their owners, without copies.

        While a reader is full, Cyclone offers a sample again, every 10 ms, to all matching readers of this participant,
        also to those that have stored it already. And a writer that is found again may repeat samples. The number of a
        sample reveals a copy; a copy without a number directly follows its original and has the same time.
        """
        fresh: list[ArrivedSample] = []
        by_handle = reader.by_handle
        for sample in samples:
            info = sample.sample_info
            if type(sample) is not Frame:  # its writer has ended
                by_handle.pop(info.publication_handle, None)
                continue
            source = by_handle.get(info.publication_handle) or reader.source(info.publication_handle)
            stamp, last = info.source_timestamp, source.last_ns
            if not source.is_numbered:
                if stamp == last and sample.data == source.last_data:
                    continue
                source.last_data = sample.data
            elif last:
                missing = mapping.missing(last, stamp)
                if missing < 0:
                    continue
                if missing:
                    self._report_missing(reader, source, missing, stamp)
            source.last_ns = stamp
            owner = reader.owner(source, sample.data)
            if owner is not None:
                fresh.append((owner, sample.data, source.partition))
        return fresh

    def _report_missing(self, reader: _FilterReader, source: _Source, missing: int, stamp_ns: int) -> None:
        reason = "lost" if time.time_ns() - source.last_ns < source.lifespan_ns else "lost_or_expired"
        self.lost[reason] += missing
        log.warning(
            "messages of a DDS writer never came",
            reason=reason,
            messages=missing,
            after=source.last_ns % mapping.NUMBERS,
            before=stamp_ns % mapping.NUMBERS,
            seconds=round((stamp_ns - source.last_ns) / 1e9, 1),
            writer=source.key.hex(),
            sender=self._participant.name(source.participant),
            reader=reader.pattern or source.partition,
        )

    def close(self) -> None:
        self._end()
        for token in list(self._readers):
            self._readers.pop(token).close()


@dataclass(eq=False, slots=True)
class _NewReader:
    """Filters that get one reader."""

    owners: dict[str, Filter]  # by partition
    made: asyncio.Task[int] | None = None
    octets: int = 0  # of the partitions' names


class Registrations:
    """The readers of one session's filters, and the peers that must find them. On the event loop."""

    def __init__(self, authority: str) -> None:
        self._authority = authority
        self._is_open = False
        self._tokens: dict[Filter, asyncio.Task[int]] = {}  # of readers; done when the peers know the reader
        self._next = _NewReader({})  # the reader that is made next
        self._making = asyncio.Lock()
        self.peers: frozenset[bytes] = frozenset()
        self._silent: set[bytes] = set()  # peers that did not answer in time: not waited for until they do
        self._seen: Remembered[bytes, set[bytes]] = Remembered(SEEN_KEPT_MAX)  # own reader -> peers that have found it
        self._awaited: dict[bytes, asyncio.Event] = {}  # own readers that a registration waits for
        self._found_something = asyncio.Event()  # set by discovery

    def open(self, readers: Readers) -> None:
        self._readers, self._is_open = readers, True
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="dds-registrar")

    async def discovered(self, quiet_s: float) -> None:
        """Wait until discovery has found nothing new for `quiet_s`. What we then write reaches every reader that
        existed before us."""
        loop = asyncio.get_running_loop()
        end = loop.time() + DISCOVERY_S_MAX
        while loop.time() < end:
            self._found_something.clear()
            if not await wait_within(self._found_something, quiet_s):
                return

    def stop(self) -> None:
        """Make no more readers."""
        self._is_open = False

    async def finish(self) -> None:
        """After `stop`: completes when no reader is being made."""
        self._wake(self._awaited)
        await asyncio.gather(*self._tokens.values(), return_exceptions=True)

    def close(self, close_session: Callable[[], None]) -> Future[None]:
        """Call `close_session` on the thread that makes readers, after what it is doing."""
        self._is_open = False
        ended = self._executor.submit(close_session)
        self._executor.shutdown(wait=False)
        return ended

    def partitions(self) -> list[str]:
        """Of all readers, also of those that are being made."""
        return [self._partition(filter) for filter in self._tokens]

    def _partition(self, filter: Filter) -> str:
        return mapping.reader_partition(filter.source, filter.sink, self._authority)

    async def register(self, filter: Filter) -> None:
        """Returns when the peers know the reader of `filter`. Raises UStatusError."""
        try:
            await asyncio.shield(self.reader(filter))
        except UStatusError:
            self._tokens.pop(filter, None)
            raise

    async def release(self, filter: Filter) -> None:
        reader = self._tokens.pop(filter, None)
        if reader is not None:
            token = await asyncio.shield(reader)
            if self._is_open:  # else `close` removes it
                await asyncio.wrap_future(self._executor.submit(self._readers.leave, token, self._partition(filter)))

    def reader(self, filter: Filter) -> asyncio.Task[int]:
        """Make the reader of `filter` unless it exists. Filters without wildcards that come while another reader is
        being made share the next one."""
        if filter not in self._tokens:
            partition, new = self._partition(filter), self._next
            is_full = len(new.owners) >= NAMES_MAX or new.octets + len(partition) > NAMES_BYTES_MAX
            if mapping.is_pattern(partition):
                new = _NewReader({})
            elif is_full or new.made is None or partition in new.owners:
                new = self._next = _NewReader({})
            new.owners[partition] = filter
            new.octets += len(partition)
            if new.made is None:
                new.made = asyncio.ensure_future(self._make(new))
            self._tokens[filter] = new.made
        return self._tokens[filter]

    async def _make(self, new: _NewReader) -> int:
        async with self._making:
            if self._next is new:
                self._next = _NewReader({})  # later filters are too late for this one
            if not self._is_open:
                raise UStatusError.from_status(NOT_OPEN)
            token, key = await asyncio.wrap_future(self._executor.submit(self._readers.add, new.owners))
        await self._await_peers(key)
        return token

    async def _await_peers(self, key: bytes) -> None:
        """Wait until every peer has announced that it found the reader `key`, SEEN_S at most."""
        changed = self._awaited[key] = asyncio.Event()
        missing = self._missing(key)
        try:
            async with asyncio.timeout(SEEN_S):
                while missing and self._is_open:
                    changed.clear()
                    await changed.wait()
                    missing = self._missing(key)
        except TimeoutError:
            self._silent |= missing
            log.warning(
                "DDS participants do not answer; a new listener may miss their next messages", participants=len(missing)
            )
        finally:
            del self._awaited[key]
            self._seen.pop(key, None)

    def _missing(self, key: bytes) -> frozenset[bytes]:
        return self.peers - self._seen.get(key, set()) - self._silent

    def note(self, peers: frozenset[bytes], seen: Seen) -> None:
        """Discovery has found something: see RollCall."""
        self._found_something.set()
        awaited = set() if peers == self.peers else set(self._awaited)
        self.peers = peers
        self._silent &= peers
        for peer, keys in seen:
            self._silent.discard(peer)
            awaited.update(keys)
            for key in keys:
                self._seen[key] = {*self._seen.get(key, ()), peer}
        self._wake(awaited)

    def _wake(self, keys: Iterable[bytes]) -> None:
        """Wake the registrations of these readers alone: a thousand may wait at once."""
        for key in keys:
            if key in self._awaited:
                self._awaited[key].set()
