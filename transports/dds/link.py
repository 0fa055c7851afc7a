"""The blocking part of the DDS transport: entities of cyclonedds and the threads that may wait for them.

here           Participant and its domain; Frame, a sample; ServingThread, a thread that waits for DDS
writers.py     one per (partition, priority), made when first needed    a thread of its own
readers.py     one per filter -> WaitSet -> arrived(owner, samples)     a thread of its own
roll_call.py   the participants, and the readers that they have found   a thread of its own

The binding holds the GIL while it writes and takes, but not while it waits. So a write never blocks (it is tried again
later), a take is limited to TAKE_SAMPLES_MAX, and all waiting is done with a WaitSet. The Listeners of the binding are
not used: they run on DDS's receiving thread, which then waits for the GIL while its holder may wait for DDS. The
binding converts QoS through variables that all threads share: hold `binding` to make or query an endpoint.
"""

import contextlib
import ctypes
import fcntl
import socket
import struct
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
from cyclonedds.internal import dds_c_t
from cyclonedds.qos import Policy, Qos
from cyclonedds.sub import DataReader, Subscriber
from cyclonedds.topic import Topic

from transports.dds import mapping
from transports.dds.config import DdsConfig, trial
from uprotocol.status import UStatusError
from uprotocol.v1.ucode_pb2 import UCode

# per reader and turn, some 1 ms under the GIL; with more, the cost per sample no longer falls
TAKE_SAMPLES_MAX: Final = 256
# at the first turn of a reader. Samples that are taken count in no limit until they are put into the arrivals, so large
# ones are taken a few at a time
TAKE_SAMPLES_MIN: Final = 16
TAKE_BYTES_MAX: Final = 2 << 20
# per reader, not yet taken, a quarter of a second; when it is full its writers wait
READER_SAMPLES_MAX: Final = 8_192
# of any size: with fewer, small ones wait for Cyclone's next try, every 10 ms
READER_SAMPLES_MIN: Final = 512
READER_BYTES_MAX: Final = 512 << 20  # of the samples of one reader, if each has the maximum size
FAILED_TURN_S: Final = 0.02  # pause of a thread after a failed turn
WAIT_NS: Final = 1_000_000_000  # a thread checks at least once a second whether it must end

INFINITE_NS: Final = (1 << 63) - 1
Volatile: Final = Policy.Durability.Volatile
ANYTHING: Final = ViewState.Any | SampleState.Any | InstanceState.Any

_SIOCGIFFLAGS: Final = 0x8913
_SIOCGIFADDR: Final = 0x8915
_UP: Final = 0x1
_LOOPBACK: Final = 0x8
_POINT_TO_POINT: Final = 0x10
_MULTICAST: Final = 0x1000
_NAME: Final = struct.Struct("16s240x")
_FLAGS: Final = struct.Struct("16sH")
_ADDRESS_AT: Final = slice(20, 24)  # behind the name, the family and the port

log = structlog.get_logger()

K = TypeVar("K")
V = TypeVar("V")


class FairLock:
    """A lock that goes to the thread that has waited longest. With a lock of `threading`, a thread that makes thousands
    of endpoints would take it again each time it has released it."""

    def __init__(self) -> None:
        self._guard = threading.Lock()  # of the two below; held for microseconds
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
                self._waiting.popleft().release()  # `_held` stays True
            else:
                self._held = False


binding: Final = FairLock()

_CODES: Final[dict[int, UCode.ValueType]] = {
    DDSException.DDS_RETCODE_TIMEOUT: UCode.UNAVAILABLE,
    # temporary: a dispatcher keeps the messages and tries again
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
    """The UStatusError for an exception of the binding. `otherwise`: the code if that of DDS is not in the table."""
    return UStatusError(_CODES.get(error.code, otherwise), f"{doing}: {error}")


@contextlib.contextmanager
def translated(doing: str, otherwise: UCode.ValueType = UCode.INTERNAL) -> Iterator[None]:
    """Translates every exception of the block to a UStatusError."""
    try:
        yield
    except DDSException as error:
        raise translate(error, doing, otherwise) from error
    except UStatusError:
        raise
    except Exception as error:  # another one of the binding, or of the system: no threads, files or memory left
        raise UStatusError(otherwise, f"{doing}: {error!r}") from error


@dataclass(init=False)
class Frame(IdlStruct, typename=mapping.TYPE_NAME.replace("::", ".")):
    """A sample as octets. The fields declare the type to DDS and are never set: the binding would serialise them octet
    by octet.

    The binding reads the annotations as objects, so this module has no `from __future__ import annotations`.
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
        return cls(b"")  # the type has no key; called when a writer has ended


def reliable(*policies: Any, durability: Any = Volatile) -> Qos:
    """The common QoS of our writers and readers. IgnoreLocal: a participant does not receive its own samples."""
    return Qos(
        Policy.Reliability.Reliable(max_blocking_time=0),
        durability,
        Policy.DestinationOrder.ByReceptionTimestamp,
        Policy.IgnoreLocal.Participant,
        *policies,
    )


def make_reader(
    parent: Subscriber | DomainParticipant, topic: Topic[Frame], samples_max: int, durability: Any = Volatile
) -> DataReader[Frame]:
    """Make a reader that keeps up to `samples_max` samples; then its writers wait. Call it while holding `binding`."""
    limits = Policy.ResourceLimits(max_samples=samples_max, max_instances=-1, max_samples_per_instance=-1)
    return DataReader(parent, topic, reliable(Policy.History.KeepAll, limits, durability=durability))


class Remembered(OrderedDict[K, V]):
    """Keeps the `entries_max` entries that were set last."""

    def __init__(self, entries_max: int) -> None:
        super().__init__()
        self._entries_max = entries_max

    def __setitem__(self, key: K, value: V) -> None:
        super().__setitem__(key, value)
        while len(self) > self._entries_max:
            self.popitem(last=False)


def delete(*entities: Entity) -> None:
    """Delete entities now, not with their last reference. Each may be deleted twice."""
    for entity in entities:
        entity.__del__()


def _at_once(name: str, *arguments: Any) -> Any:
    """A C function of Cyclone that returns within a microsecond, called while holding the GIL. The binding releases it
    for each call, and then waits for other threads: some 8 us where they are busy."""
    function = getattr(_CYCLONE, name)
    function.restype, function.argtypes = ctypes.c_int32, [ctypes.c_int32, *arguments]
    return function


# the library that the binding has loaded
_CYCLONE: Final = ctypes.PyDLL(None, handle=Entity._dll_handle._handle)
# each takes the handle of a writer, and returns a negative code of DDS if it fails
read_matched_status: Final = _at_once(
    "dds_get_publication_matched_status", ctypes.POINTER(dds_c_t.publication_matched_status)
)
read_matched_readers: Final = _at_once(
    "dds_get_matched_subscriptions", ctypes.POINTER(dds_c_t.instance_handle), ctypes.c_size_t
)
look_for_acks: Final = _at_once("dds_wait_for_acks", ctypes.c_int64)  # with a time-out of 0


class Triggers(WaitSet):
    """A WaitSet that returns which of its conditions hold. The binding returns only their number, and asking each of
    1,000 readers costs 2 ms."""

    MAX: ClassVar[int] = 256  # returned by one call; the others by the next one

    def attach_as(self, entity: Entity, token: int) -> None:
        code = self._waitset_attach(self._ref, entity._ref, token)
        if code < 0:
            raise DDSException(code, "while attaching to a wait set")
        # the superclass keeps these alive and detaches them at the end
        self.attached.append((entity, token))

    def wait_for(self, timeout_ns: int) -> list[int]:
        """Returns the tokens of the conditions that hold; none after `timeout_ns`. Waits without the GIL."""
        tokens = (ctypes.c_void_p * self.MAX)()
        count = self._waitset_wait(
            self._ref, ctypes.cast(tokens, ctypes.POINTER(ctypes.c_void_p)), self.MAX, timeout_ns
        )
        if count < 0:
            raise DDSException(count, "while waiting")
        return [tokens[index] or 0 for index in range(min(count, self.MAX))]


@dataclass(slots=True)
class _SharedDomain:
    """A domain of this process."""

    configuration_key: str
    domain: Domain
    addresses: frozenset[str]  # of this host when it was joined
    users: int = 1


class Participant:
    """A participant, and the domain that it shares with others of this process that have the same configuration."""

    _domains: ClassVar[dict[int, _SharedDomain]] = {}  # by id
    _lock: ClassVar[threading.RLock] = threading.RLock()
    _abandoned: ClassVar[set[int]] = set()  # domains that can be joined again only after all users have left

    def __init__(self, config: DdsConfig) -> None:
        """Raises UStatusError: UNAVAILABLE if an address, a file or the interface is missing, or if Cyclone refuses."""
        self.domain_id = config.domain_id
        self.names: dict[bytes, str] = {}  # key -> process and host of the other participants; kept by the roll call
        self._shares_domain = False
        self._interface = config.interface
        # the user's own configuration names its interfaces itself
        self._addresses = frozenset[str]() if config.is_users_own else addresses_of(config.interface)
        self._enter(config)
        try:
            with binding:
                self.entity = DomainParticipant(config.domain_id)
            self.topic = Topic(self.entity, mapping.TOPIC, Frame)
            self.seen_topic = Topic(self.entity, mapping.SEEN_TOPIC, Frame)
        except DDSException as error:
            self._leave()
            raise _refused(config, error) from error

    @property
    def key(self) -> bytes:
        return bytes(self.entity.guid.bytes)

    def name(self, key: bytes) -> str:
        """Participant `key` for a person to read: its key, and its process and host if they are known."""
        known = self.names.get(key)
        return f"participant {key.hex()}" + (f" ({known})" if known else "")

    def moved(self) -> str:
        """Describes how the addresses of this host have changed since the domain was joined; "" if they have not.
        Cyclone does not notice such a change."""
        then, now = self._addresses, addresses_of(self._interface)
        if then <= now or (not now and self._interface is None):  # unchanged, or no interface to use instead
            return ""
        at = " or ".join(sorted(now)) or "no address"
        return f"DDS was joined at {' or '.join(sorted(then))}, and this host is reached at {at} now"

    def abandon(self) -> None:
        """Let this process join the domain again only after all its participants have left it."""
        with self._lock:
            if self._shares_domain:
                self._abandoned.add(self.domain_id)

    def _enter(self, config: DdsConfig) -> None:
        """Make the domain if this process does not have it yet."""
        key = config.configuration_key()
        if self._joined(config.domain_id, key):
            return
        configuration = config.configuration()
        # the user's own configuration may end the process, so another process tries it first
        if config.is_users_own and (refusal := trial(config.domain_id, configuration)):
            what = f"DDS domain {config.domain_id}: Cyclone refuses its configuration: {refusal}"
            raise UStatusError(UCode.UNAVAILABLE, what)
        with self._lock:
            if not self._joined(config.domain_id, key):
                try:
                    domain = Domain(config.domain_id, configuration)
                except DDSException as error:
                    if config.is_default and error.code == DDSException.DDS_RETCODE_PRECONDITION_NOT_MET:
                        log.info("the DDS domain is used as this process has configured it", domain=self.domain_id)
                        return
                    raise _refused(config, error) from error
                self._domains[config.domain_id] = _SharedDomain(key, domain, self._addresses)
                self._shares_domain = True

    def _joined(self, domain_id: int, configuration_key: str) -> bool:
        """True if the domain exists: then this participant uses it, too."""
        with self._lock:
            if domain_id not in self._domains:
                return False
            shared = self._domains[domain_id]
            if domain_id in self._abandoned:
                raise UStatusError(
                    UCode.UNAVAILABLE,
                    f"DDS domain {domain_id} was joined at an address that this host no longer has, and others in this "
                    "process still use it: try again when they have left it",
                )
            if shared.configuration_key != configuration_key:
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


def _refused(config: DdsConfig, error: DDSException) -> UStatusError:
    """The error with Cyclone's reason. Cyclone writes it only to stderr, so another process repeats the attempt."""
    reason = trial(config.domain_id, config.configuration()) or str(error)
    return UStatusError(UCode.UNAVAILABLE, f"can't join DDS domain {config.domain_id}: Cyclone says: {reason}")


def addresses_of(interface: str | None) -> frozenset[str]:
    """The IPv4 addresses of `interface`; without one, of all interfaces that Cyclone ranks highest: multicast, not
    loopback, not point to point. Empty if no address is found, and on other systems than Linux. Raises nothing. Cyclone
    itself looks for them only when it joins a domain."""
    try:
        names = [interface] if interface is not None else [name for _, name in socket.if_nameindex()]
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            found = [one for name in names if (one := _address(probe, name, must_be_up=interface is None)) is not None]
    except OSError:
        return frozenset()
    best = max((rank for rank, _ in found), default=0)
    return frozenset(address for rank, address in found if rank == best)


def _address(probe: socket.socket, name: str, *, must_be_up: bool) -> tuple[int, str] | None:
    """(rank, address) of interface `name`; None if it has no address."""
    request = _NAME.pack(name.encode())
    try:
        _, flags = _FLAGS.unpack_from(fcntl.ioctl(probe, _SIOCGIFFLAGS, request))
        address = socket.inet_ntoa(fcntl.ioctl(probe, _SIOCGIFADDR, request)[_ADDRESS_AT])
    except OSError:
        return None
    if must_be_up and not flags & _UP:
        return None
    if flags & _LOOPBACK:
        return 1, address
    return (3 if flags & _MULTICAST and not flags & _POINT_TO_POINT else 2), address


class ServingThread:
    """A thread that calls `_serve(tokens)` when watched readers have samples, and once a second. A subclass starts
    `_thread`."""

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
        """Begin no other turn. From any thread; does not wait."""
        if not self._ending:
            self._ending = True
            self._guard.set(True)

    def _end(self) -> None:
        self.stop()
        if self._thread.ident is not None:
            self._thread.join()
        delete(self._triggers, self._guard)
