"""The blocking half of the DDS transport: entities of cyclonedds and the threads that may wait for them.
transport.py is the half on the loop.

here           Participant and its domain; Frame, a sample; ServingThread, a thread that waits for DDS
writers.py     one per (partition, priority), made when first needed    a thread of its own
readers.py     one per filter -> WaitSet -> arrived(owner, samples)     a thread of its own
roll_call.py   who else is here, and what they have found               a thread of its own

The binding holds the GIL while it writes and while it takes, but not while it waits: so a write never blocks here (it
is tried again after a sleep), a take never exceeds TAKE_SAMPLES_MAX, and everything that waits is a WaitSet. Callbacks
of the binding (its Listeners) run on DDS's own receiving thread, which then waits for the GIL while somebody who holds
it waits for DDS: they are not used at all. It converts QoS through variables that all threads share: whoever makes or
asks about an endpoint holds `binding`.
"""

import contextlib
import ctypes
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Final, Self, TypeVar

import structlog
from cyclonedds.core import (
    DDSException,
    Entity,
    GuardCondition,
    InstanceState,
    ReadCondition,
    SampleState,
    ViewState,
    WaitSet,
)
from cyclonedds.domain import Domain, DomainParticipant
from cyclonedds.idl import IdlStruct
from cyclonedds.idl.types import sequence, uint8
from cyclonedds.qos import Policy, Qos
from cyclonedds.sub import DataReader, Subscriber
from cyclonedds.topic import Topic

from transports.dds import interfaces, mapping
from transports.dds.config import DdsConfig, trial
from uprotocol.status import UStatusError
from uprotocol.v1.ucode_pb2 import UCode

# per reader and turn, some 1 ms under the GIL; beyond it the cost per sample no longer falls
TAKE_SAMPLES_MAX: Final = 256
# of a reader that has brought nothing yet, or large ones: what is taken is in no bound until it is put ...
TAKE_SAMPLES_MIN: Final = 16
TAKE_BYTES_MAX: Final = 2 << 20  # ... into the arrivals, so large ones are taken a few at a time
# per reader, not yet taken, a quarter of a second; when it is full its writers are held back
READER_SAMPLES_MAX: Final = 8_192
# however large they may be: with fewer, small ones wait for Cyclone's next try, every 10 ms
READER_SAMPLES_MIN: Final = 512
READER_BYTES_MAX: Final = 512 << 20  # what they may have in all, as far as a number of samples can say that
FAILED_TURN_S: Final = 0.02  # a thread that failed at one turn must not spin
WAIT_NS: Final = 1_000_000_000  # a thread looks at least once a second whether it has to end

INFINITE_NS: Final = (1 << 63) - 1
Volatile: Final = Policy.Durability.Volatile
ANYTHING: Final = ViewState.Any | SampleState.Any | InstanceState.Any

log = structlog.get_logger()

K = TypeVar("K")
V = TypeVar("V")


class FairLock:
    """A lock that goes to who has waited longest. One of `threading` goes to who asks while it is free, and that is who
    has just given it back: a thread that makes thousands of endpoints would keep it."""

    def __init__(self) -> None:
        self._guard = threading.Lock()  # of the two below; held for a moment only
        self._held = False
        self._waiting: deque[threading.Lock] = deque()

    def __enter__(self) -> None:
        with self._guard:
            if not self._held:
                self._held = True
                return
            turn = threading.Lock()
            turn.acquire()
            self._waiting.append(turn)
        turn.acquire()

    def __exit__(self, *_: object) -> None:
        with self._guard:
            if self._waiting:
                self._waiting.popleft().release()  # and it stays held
            else:
                self._held = False


binding: Final = FairLock()

_CODES: Final[dict[int, UCode.ValueType]] = {
    DDSException.DDS_RETCODE_TIMEOUT: UCode.UNAVAILABLE,
    # for now: a dispatcher keeps what waits, and tries again
    DDSException.DDS_RETCODE_OUT_OF_RESOURCES: UCode.UNAVAILABLE,
    DDSException.DDS_RETCODE_BAD_PARAMETER: UCode.INVALID_ARGUMENT,
    DDSException.DDS_RETCODE_INCONSISTENT_POLICY: UCode.INVALID_ARGUMENT,
    DDSException.DDS_RETCODE_NOT_ALLOWED_BY_SECURITY: UCode.PERMISSION_DENIED,
    DDSException.DDS_RETCODE_PRECONDITION_NOT_MET: UCode.FAILED_PRECONDITION,
    DDSException.DDS_RETCODE_UNSUPPORTED: UCode.UNIMPLEMENTED,
    DDSException.DDS_RETCODE_ALREADY_DELETED: UCode.UNAVAILABLE,
    DDSException.DDS_RETCODE_NOT_ENABLED: UCode.UNAVAILABLE,
}


def translate(error: DDSException, doing: str, otherwise: UCode.ValueType = UCode.INTERNAL) -> UStatusError:
    """An error of DDS as ours: the one place where the binding's exceptions end. `otherwise` is the code of a nameless
    failure."""
    return UStatusError(_CODES.get(error.code, otherwise), f"{doing}: {error}")


@contextlib.contextmanager
def translated(doing: str, otherwise: UCode.ValueType = UCode.INTERNAL) -> Iterator[None]:
    """Nothing but UStatusError leaves this block."""
    try:
        yield
    except DDSException as error:
        raise translate(error, doing, otherwise) from error
    except UStatusError:
        raise
    except Exception as error:  # the binding's own, or the system's: no more threads, files or memory
        raise UStatusError(otherwise, f"{doing}: {error!r}") from error


@dataclass(init=False)
class Frame(IdlStruct, typename=mapping.TYPE_NAME.replace("::", ".")):
    """A sample as octets. The fields declare the type to DDS; they are never set, since the binding would (de)serialise
    octet by octet.

    The binding reads the annotations as they are: that is why this module does without `from __future__ import
    annotations`.
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


def reliable(*policies: Any, durability: Any = Volatile) -> Qos:
    """What every writer and reader of ours has in common. IgnoreLocal: nobody hears itself."""
    return Qos(
        Policy.Reliability.Reliable(max_blocking_time=0),
        durability,
        Policy.DestinationOrder.ByReceptionTimestamp,
        Policy.IgnoreLocal.Participant,
        *policies,
    )


def reading(
    parent: Subscriber | DomainParticipant, topic: Topic[Frame], samples_max: int, durability: Any = Volatile
) -> DataReader[Frame]:
    """A reader that keeps all that comes, up to `samples_max`; then its writers wait. Made under `binding`."""
    limits = Policy.ResourceLimits(max_samples=samples_max, max_instances=-1, max_samples_per_instance=-1)
    return DataReader(parent, topic, reliable(Policy.History.KeepAll, limits, durability=durability))


class Remembered(OrderedDict[K, V]):
    """The last `entries_max` that were set."""

    def __init__(self, entries_max: int) -> None:
        super().__init__()
        self._entries_max = entries_max

    def __setitem__(self, key: K, value: V) -> None:
        super().__setitem__(key, value)
        while len(self) > self._entries_max:
            self.popitem(last=False)


def delete(*entities: Entity) -> None:
    """Now, not when the last reference goes; each may be deleted twice."""
    for entity in entities:
        entity.__del__()


class Triggers(WaitSet):
    """A WaitSet that tells which of its conditions hold: the binding only tells how many, and to ask each of 1,000
    readers costs 2 ms."""

    MAX: ClassVar[int] = 256  # told at once; the rest at the next turn

    def attach_as(self, entity: Entity, token: int) -> None:
        code = self._waitset_attach(self._ref, entity._ref, token)
        if code < 0:
            raise DDSException(code, "while attaching to a wait set")
        # the superclass detaches these at the end, and keeps them alive until then
        self.attached.append((entity, token))

    def wait_for(self, timeout_ns: int) -> list[int]:
        """The tokens of what holds; none after `timeout_ns`. Waits without the GIL."""
        told = (ctypes.c_void_p * self.MAX)()
        count = self._waitset_wait(self._ref, ctypes.cast(told, ctypes.POINTER(ctypes.c_void_p)), self.MAX, timeout_ns)
        if count < 0:
            raise DDSException(count, "while waiting")
        return [told[index] or 0 for index in range(min(count, self.MAX))]


@dataclass(slots=True)
class _Shared:
    """A domain of this process."""

    identity: str  # what it was made of
    domain: Domain
    addresses: frozenset[str]  # at which it is reached
    users: int = 1


class Participant:
    """A participant, and the domain that it shares with others of this process that have the same configuration."""

    _domains: ClassVar[dict[int, _Shared]] = {}  # by id
    _lock: ClassVar[threading.RLock] = threading.RLock()
    _abandoned: ClassVar[set[int]] = set()  # domains that nobody joins any more; made anew when all have left

    def __init__(self, config: DdsConfig) -> None:
        """Raises UStatusError: UNAVAILABLE with the reason where an address, a file or the interface is away, or
        Cyclone refuses."""
        self.domain_id = config.domain_id
        self.names: dict[bytes, str] = {}  # who the others are, by key; the roll call keeps it
        self._shares_domain = False
        self._interface = config.interface
        # who brings a whole configuration says there which interfaces are used
        self._addresses = frozenset[str]() if config.is_foreign else interfaces.addresses(config.interface)
        configuration = self._enter(config)
        try:
            with binding:
                self.entity = DomainParticipant(config.domain_id)
            self.topic = Topic(self.entity, mapping.TOPIC, Frame)
            self.seen_topic = Topic(self.entity, mapping.SEEN_TOPIC, Frame)
        except DDSException as error:
            self._leave()
            raise _refused(config, configuration, error) from error

    @property
    def key(self) -> bytes:
        return bytes(self.entity.guid.bytes)

    def name(self, key: bytes) -> str:
        """Participant `key` for people: its key, and its process and host as far as they are known."""
        known = self.names.get(key)
        return f"participant {key.hex()}" + (f" ({known})" if known else "")

    def moved(self) -> str:
        """How this host is reached differently from when the domain was joined, which Cyclone does not follow; "" if it
        is not."""
        then, now = self._addresses, interfaces.addresses(self._interface)
        if then <= now or (not now and self._interface is None):  # nothing is known now, or there is no better place
            return ""
        at = " or ".join(sorted(now)) or "no address"
        return f"DDS was joined at {' or '.join(sorted(then))}, and this host is reached at {at} now"

    def abandon(self) -> None:
        """Nobody of this process joins this domain again before all have left it: it is then made anew."""
        with self._lock:
            if self._shares_domain:
                self._abandoned.add(self.domain_id)

    def _enter(self, config: DdsConfig) -> str | None:
        """The configuration that counts; the domain is made if nobody here has it yet."""
        identity = config.identity()
        if identity is None:
            if config.is_foreign:
                _try(config, None)
            return None
        if self._joined(config.domain_id, identity):
            return None
        configuration = config.configuration()
        if config.is_foreign:
            _try(config, configuration)
        with self._lock:
            if not self._joined(config.domain_id, identity):
                try:
                    domain = Domain(config.domain_id, configuration)
                except DDSException as error:
                    raise _refused(config, configuration, error) from error
                self._domains[config.domain_id] = _Shared(identity, domain, self._addresses)
                self._shares_domain = True
        return configuration

    def _joined(self, domain_id: int, identity: str) -> bool:
        """True if the domain was there, and is ours too now."""
        with self._lock:
            if domain_id not in self._domains:
                return False
            shared = self._domains[domain_id]
            if domain_id in self._abandoned:
                raise UStatusError(
                    UCode.UNAVAILABLE,
                    f"DDS domain {domain_id} was joined at an address that this host no longer has, and others in this "
                    "process have not left it yet: try again when they have",
                )
            if shared.identity != identity:
                raise UStatusError(
                    UCode.FAILED_PRECONDITION,
                    f"DDS domain {domain_id} is in use in this process with another configuration: give both the "
                    "same, or another id",
                )
            shared.users += 1
            self._shares_domain, self._addresses = True, shared.addresses
            return True

    def _leave(self) -> None:
        if not self._shares_domain:
            return
        self._shares_domain = False
        with self._lock:
            shared = self._domains[self.domain_id]
            shared.users -= 1
            if not shared.users:
                del self._domains[self.domain_id]
                self._abandoned.discard(self.domain_id)
                delete(shared.domain)

    def close(self) -> None:
        delete(self.topic, self.seen_topic, self.entity)
        self._leave()


def _try(config: DdsConfig, configuration: str | None) -> None:
    """What somebody else wrote may end the process: let another one go first."""
    said = trial(config.domain_id, configuration)
    if said:
        raise UStatusError(
            UCode.UNAVAILABLE, f"DDS domain {config.domain_id}: Cyclone refuses its configuration: {said}"
        )


def _refused(config: DdsConfig, configuration: str | None, error: DDSException) -> UStatusError:
    """The reason, too, which Cyclone tells on its own stderr only: so it is asked again in another process."""
    said = trial(config.domain_id, configuration) or str(error)
    return UStatusError(UCode.UNAVAILABLE, f"can't join DDS domain {config.domain_id}: Cyclone says: {said}")


class ServingThread:
    """A thread that serves readers until it is told to end. `_serve(tokens)` is called when some that are watched have
    something, and once a second. Whoever made it calls `_thread.start()`."""

    def __init__(self, participant: Participant, name: str) -> None:
        self._participant = participant
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
                    time.sleep(FAILED_TURN_S)

    def _watch(self, reader: DataReader[Any], token: int) -> ReadCondition:
        condition = ReadCondition(reader, ANYTHING)
        self._triggers.attach_as(condition, token)
        return condition

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
