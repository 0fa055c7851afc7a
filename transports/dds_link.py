"""The blocking half of the DDS transport: entities of cyclonedds and the threads that may wait for them. dds.py is the half on the loop.

Writers    one per (partition, priority), made when first needed    only the sender's thread comes here
Readers    one per filter -> WaitSet -> arrived(owner, samples)     a thread of its own

The binding holds the GIL while it writes and while it takes, but not while it waits: so a write never blocks here (it is tried again
after a sleep), a take never exceeds TAKE_SAMPLES_MAX, and everything that waits is a WaitSet. Callbacks of the binding (its Listeners)
run on DDS's own receiving thread, which then waits for the GIL while somebody who holds it waits for DDS: they are not used at all.
"""

import contextlib
import ctypes
import itertools
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final, Self

import structlog
from cyclonedds.core import DDSException, Entity, GuardCondition, InstanceState, ReadCondition, SampleState, ViewState, WaitSet
from cyclonedds.domain import Domain, DomainParticipant
from cyclonedds.idl import IdlStruct
from cyclonedds.idl.types import sequence, uint8
from cyclonedds.pub import DataWriter, Publisher
from cyclonedds.qos import Policy, Qos
from cyclonedds.sub import DataReader, Subscriber
from cyclonedds.topic import Topic

from transports import dds_mapping as mapping
from uprotocol.status import UStatusError
from uprotocol.v1.ucode_pb2 import UCode

TAKE_SAMPLES_MAX: Final = 256  # per reader and turn, some 1 ms under the GIL; beyond it the cost per sample no longer falls
READER_SAMPLES_MAX: Final = 8_192  # per reader, not yet taken, a quarter of a second; when it is full its writers are held back
WRITE_RETRY_S_MIN: Final = 0.000_3  # a full writer has room again within a round trip, on loopback some 100 us
WRITE_RETRY_S_MAX: Final = 0.02  # while nobody acknowledges, 50 tries a second cost nothing
DRAIN_S: Final = 1.0  # what a writer that goes may wait for its last acknowledgements
WAIT_NS: Final = 1_000_000_000  # a thread looks at least once a second whether it has to end

ANYTHING: Final = ViewState.Any | SampleState.Any | InstanceState.Any

log = structlog.get_logger()

_CODES: Final[dict[int, UCode.ValueType]] = {
    DDSException.DDS_RETCODE_TIMEOUT: UCode.UNAVAILABLE,
    DDSException.DDS_RETCODE_OUT_OF_RESOURCES: UCode.RESOURCE_EXHAUSTED,
    DDSException.DDS_RETCODE_BAD_PARAMETER: UCode.INVALID_ARGUMENT,
    DDSException.DDS_RETCODE_INCONSISTENT_POLICY: UCode.INVALID_ARGUMENT,
    DDSException.DDS_RETCODE_NOT_ALLOWED_BY_SECURITY: UCode.PERMISSION_DENIED,
    DDSException.DDS_RETCODE_PRECONDITION_NOT_MET: UCode.FAILED_PRECONDITION,
    DDSException.DDS_RETCODE_UNSUPPORTED: UCode.UNIMPLEMENTED,
    DDSException.DDS_RETCODE_ALREADY_DELETED: UCode.UNAVAILABLE,
    DDSException.DDS_RETCODE_NOT_ENABLED: UCode.UNAVAILABLE,
}


def translate(error: DDSException, doing: str, otherwise: UCode.ValueType = UCode.INTERNAL) -> UStatusError:
    """An error of DDS as ours: the one place where the binding's exceptions end. `otherwise` is the code of a nameless failure."""
    return UStatusError(_CODES.get(error.code, otherwise), f"{doing}: {error}")


@contextlib.contextmanager
def translated(doing: str, otherwise: UCode.ValueType = UCode.INTERNAL) -> Iterator[None]:
    try:
        yield
    except DDSException as error:
        raise translate(error, doing, otherwise) from error


@dataclass(init=False)
class Frame(IdlStruct, typename=mapping.TYPE_NAME.replace("::", ".")):
    """A sample as octets. The fields declare the type to DDS; they are never set, since the binding would (de)serialise octet by octet.

    The binding reads the annotations as they are: that is why this module does without `from __future__ import annotations`.
    """

    version: uint8
    has_payload: bool
    attributes: sequence[uint8]  # type: ignore[type-arg]
    payload: sequence[uint8]  # type: ignore[type-arg]

    def __init__(self, data: bytes) -> None:
        self.data = data

    def serialize(self, buffer: Any = None, endianness: Any = None, use_version_2: bool | None = None) -> bytes:
        return self.data

    @classmethod
    def deserialize(cls, data: bytes, has_header: bool = True, use_version_2: bool | None = None) -> Self:
        return cls(data)

    @classmethod
    def deserialize_key(cls, data: bytes, has_header: bool = True, use_version_2: bool | None = None) -> Self:
        return cls(b"")  # the type has no key; asked for when a writer has gone


def reliable(*policies: Any, durability: Any = Policy.Durability.Volatile) -> Qos:
    """What every writer and reader of ours has in common. IgnoreLocal: nobody hears itself."""
    return Qos(
        Policy.Reliability.Reliable(max_blocking_time=0),
        durability,
        Policy.DestinationOrder.ByReceptionTimestamp,
        Policy.IgnoreLocal.Participant,
        *policies,
    )


def delete(*entities: Entity) -> None:
    """Now, not when the last reference goes; each may be deleted twice."""
    for entity in entities:
        entity.__del__()


class Triggers(WaitSet):
    """A WaitSet that tells which of its conditions hold: the binding only tells how many, and to ask each of 1,000 readers costs 2 ms."""

    MAX: ClassVar[int] = 256  # told at once; the rest at the next turn

    def attach_as(self, entity: Entity, token: int) -> None:
        code = self._waitset_attach(self._ref, entity._ref, token)
        if code < 0:
            raise DDSException(code, "while attaching to a wait set")
        self.attached.append((entity, token))  # the superclass detaches these at the end, and keeps them alive until then

    def wait_for(self, timeout_ns: int) -> list[int]:
        """The tokens of what holds; none after `timeout_ns`. Waits without the GIL."""
        told = (ctypes.c_void_p * self.MAX)()
        count = self._waitset_wait(self._ref, ctypes.cast(told, ctypes.POINTER(ctypes.c_void_p)), self.MAX, timeout_ns)
        if count < 0:
            raise DDSException(count, "while waiting")
        return [told[index] or 0 for index in range(min(count, self.MAX))]


class Participant:
    """A participant, and the domain that it shares with others of this process that have the same configuration."""

    _domains: ClassVar[dict[int, tuple[str, Domain, int]]] = {}
    _lock: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self, domain_id: int, configuration: str | None) -> None:
        """`configuration`: Cyclone's XML, or the URI of a file; None leaves it to CYCLONEDDS_URI. Raises UStatusError."""
        self.domain_id = domain_id
        self._shares_domain = configuration is not None
        if configuration is not None:
            self._enter(domain_id, configuration)
        try:
            with translated(f"can't join DDS domain {domain_id}: check the interface and the Cyclone configuration", UCode.UNAVAILABLE):
                self.entity = DomainParticipant(domain_id)
                self.topic = Topic(self.entity, mapping.TOPIC, Frame)
                self.seen_topic = Topic(self.entity, mapping.SEEN_TOPIC, Frame)
        except UStatusError:
            self._leave()
            raise

    @property
    def key(self) -> bytes:
        return bytes(self.entity.guid.bytes)

    @classmethod
    def _enter(cls, domain_id: int, configuration: str) -> None:
        with cls._lock:
            known, domain, users = cls._domains.get(domain_id, (configuration, None, 0))
            if known != configuration:
                raise UStatusError(
                    UCode.FAILED_PRECONDITION,
                    f"DDS domain {domain_id} is in use in this process with another configuration: give both the same, or another id",
                )
            if domain is None:
                with translated(f"DDS domain {domain_id}: Cyclone refuses the configuration, or the interface is away", UCode.UNAVAILABLE):
                    domain = Domain(domain_id, configuration)
            cls._domains[domain_id] = (configuration, domain, users + 1)

    def _leave(self) -> None:
        if not self._shares_domain:
            return
        self._shares_domain = False
        with self._lock:
            configuration, domain, users = self._domains[self.domain_id]
            if users > 1:
                self._domains[self.domain_id] = (configuration, domain, users - 1)
            else:
                del self._domains[self.domain_id]
                delete(domain)

    def close(self) -> None:
        delete(self.topic, self.seen_topic, self.entity)
        self._leave()


@dataclass(slots=True)
class _Writer:
    publisher: Publisher
    entity: DataWriter[Frame]
    lifespan_ms: int | None

    def drained(self, timeout_s: float) -> bool:
        return bool(self.entity._wait_for_acks(self.entity._ref, int(timeout_s * 1e9)) == 0)  # its own wrapper trips over a time-out

    def close(self) -> None:
        delete(self.entity, self.publisher)


class Writers:
    """Writers by (partition, priority), the least recently used one giving way. For one thread only."""

    def __init__(self, participant: Participant, *, writers_max: int, timeout_s: float) -> None:
        self._participant, self._writers_max, self._timeout_s = participant, writers_max, timeout_s
        self._writers: OrderedDict[tuple[str, int], _Writer] = OrderedDict()
        self.stopping = threading.Event()  # set from anywhere: give up what waits for room

    def __len__(self) -> int:
        return len(self._writers)

    def write(self, partition: str, priority: int, lifespan_ms: int | None, data: bytes) -> None:
        """Raises UStatusError(UNAVAILABLE) if there is no room for it within the time-out, because a receiver does not keep up."""
        key = (partition, priority)
        try:
            writer = self._writers.get(key)
            if writer is None:
                writer = self._make(key, lifespan_ms)
            else:
                self._writers.move_to_end(key)
                if writer.lifespan_ms is not None and (lifespan_ms is None or lifespan_ms > writer.lifespan_ms):
                    # It only ever grows: several ttls on one topic must not mean several writers, or order would be lost.
                    writer.entity.set_qos(Qos(_lifespan(lifespan_ms)))
                    writer.lifespan_ms = lifespan_ms
            self._write(writer.entity, Frame(data))
        except DDSException as error:  # not `translated`: a context manager costs as much as the rest of this function
            raise translate(error, f"writing to {partition}") from error

    def _write(self, entity: DataWriter[Frame], frame: Frame) -> None:
        deadline, pause_s = 0.0, WRITE_RETRY_S_MIN
        while True:
            try:
                entity.write(frame)
                return
            except DDSException as error:
                if error.code != DDSException.DDS_RETCODE_TIMEOUT:
                    raise
            now = time.monotonic()
            deadline = deadline or now + self._timeout_s
            if now >= deadline or self.stopping.wait(pause_s):
                raise UStatusError(
                    UCode.UNAVAILABLE,
                    f"a receiver has not taken what was sent before within {self._timeout_s * 1000:.0f} ms: try again when it keeps up",
                )
            pause_s = min(pause_s * 1.5, WRITE_RETRY_S_MAX)

    def _make(self, key: tuple[str, int], lifespan_ms: int | None) -> _Writer:
        partition, priority = key
        while len(self._writers) >= self._writers_max:
            _, oldest = self._writers.popitem(last=False)
            oldest.drained(DRAIN_S)
            oldest.close()
        publisher = Publisher(self._participant.entity, Qos(Policy.Partition([partition])))
        qos = reliable(Policy.History.KeepAll, Policy.TransportPriority(priority), _lifespan(lifespan_ms))
        writer = _Writer(publisher, DataWriter(publisher, self._participant.topic, qos), lifespan_ms)
        self._writers[key] = writer
        return writer

    def close(self) -> None:
        """Wait for the last acknowledgements, DRAIN_S at most for all together, and delete everything."""
        deadline = time.monotonic() + DRAIN_S
        for writer in self._writers.values():
            writer.drained(max(0.0, deadline - time.monotonic()))
        for writer in self._writers.values():
            writer.close()
        self._writers.clear()


def _lifespan(lifespan_ms: int | None) -> Any:
    return Policy.Lifespan(lifespan_ms * 1_000_000 if lifespan_ms is not None else (1 << 63) - 1)


class ServingThread:
    """A thread that serves a wait set until it is told to end."""

    def __init__(self, participant: Participant, name: str) -> None:
        self._triggers = Triggers(participant.entity)
        self._guard = GuardCondition(participant.entity)
        self._triggers.attach_as(self._guard, 0)
        self._ending = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def _run(self) -> None:
        while not self._ending:
            try:
                tokens = self._triggers.wait_for(WAIT_NS)
                if not self._ending:
                    self._serve(tokens)
            except Exception:
                if not self._ending:
                    log.exception("a DDS thread failed at one turn and goes on", thread=self._thread.name)
                    time.sleep(WRITE_RETRY_S_MAX)  # whatever it is, it must not spin

    def _serve(self, tokens: list[int]) -> None:
        raise NotImplementedError

    def stop(self) -> None:
        """From any thread, without waiting: begin no other turn."""
        if not self._ending:
            self._ending = True
            self._guard.set(True)

    def _end(self) -> None:
        self.stop()
        if self._thread.ident is not None:
            self._thread.join()
        delete(self._triggers, self._guard)


@dataclass(slots=True)
class _Reader:
    owner: Any
    subscriber: Subscriber
    entity: DataReader[Frame]
    condition: ReadCondition
    last: dict[int, tuple[int, bytes]] = field(default_factory=dict)  # by writer: time and octets of its last sample

    def new(self, samples: list[Any]) -> list[bytes]:
        """The octets of `samples`, each once.

        While a reader is full, Cyclone offers a sample again, every 10 ms, to all readers of this participant that match, also to those
        that have stored it already. Such a copy directly follows its original, with the same time.
        """
        fresh, last = [], self.last
        for sample in samples:
            info = sample.sample_info
            if type(sample) is not Frame:  # its writer has gone
                last.pop(info.publication_handle, None)
                continue
            mark = (info.source_timestamp, sample.data)
            if last.get(info.publication_handle) != mark:
                last[info.publication_handle] = mark
                fresh.append(sample.data)
        return fresh


class Readers(ServingThread):
    """Readers by token. `arrived(owner, samples)` runs on the thread of this object, and may wait: then the senders are held back."""

    def __init__(self, participant: Participant, arrived: Callable[[Any, list[bytes]], None]) -> None:
        super().__init__(participant, "dds-readers")
        self._participant, self._arrived = participant, arrived
        self._readers: dict[int, _Reader] = {}
        self._tokens = itertools.count(1)
        self._thread.start()

    def __len__(self) -> int:
        return len(self._readers)

    def add(self, owner: Any, partition: str) -> tuple[int, bytes]:
        """A new reader's token, and its key on the network. Raises UStatusError."""
        with translated(f"reading from {partition}"):
            token = next(self._tokens)
            subscriber = Subscriber(self._participant.entity, Qos(Policy.Partition([partition])))
            limits = Policy.ResourceLimits(max_samples=READER_SAMPLES_MAX, max_instances=-1, max_samples_per_instance=-1)
            entity = DataReader(subscriber, self._participant.topic, reliable(Policy.History.KeepAll, limits))
            condition = ReadCondition(entity, ANYTHING)
            self._readers[token] = _Reader(owner, subscriber, entity, condition)
            self._triggers.attach_as(condition, token)
            return token, entity.guid.bytes

    def remove(self, token: int) -> None:
        reader = self._readers.pop(token)
        self._triggers.detach(reader.condition)
        delete(reader.condition, reader.entity, reader.subscriber)

    def _serve(self, tokens: list[int]) -> None:
        for token in tokens:
            reader = self._readers.get(token)
            if reader is None:
                continue
            try:
                samples = reader.entity.take(TAKE_SAMPLES_MAX)
            except DDSException:
                if token in self._readers:  # else it went while we looked
                    raise
                continue
            self._arrived(reader.owner, reader.new(samples))

    def close(self) -> None:
        self._end()
        for token in list(self._readers):
            reader = self._readers.pop(token)
            delete(reader.condition, reader.entity, reader.subscriber)
