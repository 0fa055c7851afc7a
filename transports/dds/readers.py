"""What arrives: the readers of the DDS transport, on one thread.

DDS -> WaitSet -> take -> new: each sample once, and  -> arrived(owner, samples)
                          what is missing is told        may wait: then the senders are held back
"""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

import structlog
from cyclonedds.core import DDSException, ReadCondition
from cyclonedds.qos import Policy, Qos
from cyclonedds.sub import DataReader, Subscriber

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
    reading,
    translated,
)

WRITERS_REMEMBERED_MAX: Final = 4_096  # per reader, some 300 bytes each: as many as a transport of ours has

log = structlog.get_logger()


@dataclass(slots=True)
class _Source:
    """One writer, as one reader sees it: also after it was lost and found again, which its key survives and its handle
    does not."""

    key: bytes  # GUID; without one, nothing is known of it any more
    participant: bytes
    partition: str  # "" if it is not known, or there are several
    is_numbered: bool
    lifespan_ns: int
    last_ns: int = 0  # source time stamp of its last sample
    last_data: bytes = b""  # of a writer without numbers


@dataclass(slots=True)
class _Reader:
    owner: Any
    partition: str
    subscriber: Subscriber
    entity: DataReader[Frame]
    condition: ReadCondition
    take_max: int = TAKE_SAMPLES_MIN  # samples at once
    # one that is forgotten is asked for again with its next sample
    by_handle: Remembered[int, _Source] = field(default_factory=lambda: Remembered(WRITERS_REMEMBERED_MAX))
    by_key: Remembered[bytes, _Source] = field(default_factory=lambda: Remembered(WRITERS_REMEMBERED_MAX))

    def close(self) -> None:
        delete(self.condition, self.entity, self.subscriber)

    def source(self, handle: int) -> _Source:
        """The writer of that handle, as it was known before if it was."""
        with binding:
            found = self.entity.get_matched_publication_data(handle)
        if found is None:  # it has gone already
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


class Readers(ServingThread):
    """Readers by token. `arrived(owner, samples)` runs on the thread of this object, and may wait: then the senders are
    held back.

    `lost` counts samples that a writer had sent to us and that never came: "lost", or "lost_or_expired" where DDS may
    have dropped them for their age.
    """

    def __init__(
        self,
        participant: Participant,
        arrived: Callable[[Any, list[tuple[bytes, str]]], None],
        sample_bytes_max: int,
    ) -> None:
        super().__init__(participant, "dds-readers")
        self._arrived = arrived
        # that each may hold: DDS's limits count no bytes
        self._samples_max = min(READER_SAMPLES_MAX, max(READER_SAMPLES_MIN, READER_BYTES_MAX // sample_bytes_max))
        self._readers: dict[int, _Reader] = {}
        self._tokens = itertools.count(1)
        self.lost: Counter[str] = Counter()
        self._thread.start()

    def __len__(self) -> int:
        return len(self._readers)

    def add(self, owner: Any, partition: str) -> tuple[int, bytes]:
        """A new reader's token, and its key on the network. Raises UStatusError."""
        with translated(f"reading from {partition}"), binding:
            token = next(self._tokens)
            subscriber = Subscriber(self._participant.entity, Qos(Policy.Partition([partition])))
            entity = reading(subscriber, self._participant.topic, self._samples_max)
            self._readers[token] = _Reader(owner, partition, subscriber, entity, self._watch(entity, token))
            return token, entity.guid.bytes

    def remove(self, token: int) -> None:
        reader = self._readers.pop(token)
        self._triggers.detach(reader.condition)
        reader.close()

    def _serve(self, tokens: list[int]) -> None:
        for token in tokens:
            reader = self._readers.get(token)
            if reader is None:
                continue
            try:
                samples = reader.entity.take(reader.take_max)
                fresh = self._new(reader, samples)
            except DDSException:
                if token in self._readers:  # else it went while we looked
                    raise
                continue
            if sum([len(sample) for sample, _ in fresh]) < TAKE_BYTES_MAX:
                reader.take_max = min(2 * reader.take_max, TAKE_SAMPLES_MAX)
            else:
                reader.take_max = max(1, reader.take_max // 4)
            self._arrived(reader.owner, fresh)

    def _new(self, reader: _Reader, samples: list[Any]) -> list[tuple[bytes, str]]:
        """The octets of `samples`, each once, and their writer's partition.

        While a reader is full, Cyclone offers a sample again, every 10 ms, to all readers of this participant that
        match, also to those that have stored it already; and a writer that is found again may repeat what had arrived.
        A number tells; where there is none, such a copy directly follows its original, with the same time.
        """
        fresh, by_handle = [], reader.by_handle
        for sample in samples:
            info = sample.sample_info
            if type(sample) is not Frame:  # its writer has gone
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
                    self._tell(reader, source, missing, stamp)
            source.last_ns = stamp
            fresh.append((sample.data, source.partition))
        return fresh

    def _tell(self, reader: _Reader, source: _Source, missing: int, stamp_ns: int) -> None:
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
            reader=reader.partition,
        )

    def close(self) -> None:
        self._end()
        for token in list(self._readers):
            self._readers.pop(token).close()
