"""The in-process reference transport: ordered, acknowledged last, and breakable on demand from a seed.

send_batch -> checks (valid?) -> LocalNetwork (Faults) -> every other member: queue -> listeners -> taken
              waits while a member's queue is full        |                         failed: the queue goes back to the first
                                                          |                                                  message that was not taken
                                                          |-> wanted by no listener: kept for receive
                                                          '-> a named member that is away: its session keeps what its listeners want

Messages are delivered as the very objects that were sent: treat them as immutable, as every message is once it is
built. A network lives on one event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import heapq
import random
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final, Self
from weakref import WeakValueDictionary

import structlog
from pydantic import BaseModel, ConfigDict, Field

from transports.base import (
    LISTENERS_MAX,
    LISTENERS_PER_FILTER_MAX,
    NOT_OPEN,
    OK,
    ListenersMax,
    ListenersPerFilterMax,
    TransportBase,
    stopped,
    too_large,
)
from transports.listeners import Filter
from transports.plugin import TransportPlugin
from uprotocol import attributes as attrs
from uprotocol import uri as uris
from uprotocol.status import UStatusError
from uprotocol.transport import Capability, LocalUriProvider, UListener
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.umessage_pb2 import UMessage
from uprotocol.v1.uri_pb2 import UUri
from uprotocol.v1.ustatus_pb2 import UStatus

# waiting or being taken by one member; beyond it senders wait, so that they feel a slow one
QUEUE_MESSAGES_MAX: Final = 8_192
QUEUE_BYTES_MAX: Final = 32 << 20  # the same in bytes: 4 KiB for each
BATCH_MESSAGES_MAX: Final = 512  # handed over at once; beyond it the cost per message no longer falls
PULL_MESSAGES_MAX: Final = 1_024  # kept for `receive`: what no listener wanted, the newest
PULL_BYTES_MAX: Final = 8 << 20  # the same in bytes
REDELIVERY_MS_MIN: Final = 5  # before the first redelivery; it doubles up to ...
REDELIVERY_MS_MAX: Final = 1_000  # ... so that a listener that always fails costs no core
DRAIN_MS_MAX: Final = 2_000  # how long `close` waits for listeners to take what has arrived
# kept for a named member that is away, as brokers are configured; some 50 MB of small ones
SESSION_MESSAGES_MAX: Final = 100_000
SESSION_BYTES_MAX: Final = 64 << 20  # the same in bytes
# how long what a session has kept waits for the listener that wants it to be registered
UNCLAIMED_MS_MAX: Final = 30_000

log = structlog.get_logger()


@dataclass(frozen=True)
class Faults:
    """What goes wrong, each a chance from 0 to 1, all drawn from one seed: the same sends see the same faults.

    Nothing here reorders a stream: messages of one (source, sink) stay in order whatever happens.
    """

    seed: int = 0
    fail_send: float = 0.0  # per message: UNAVAILABLE, and it was not sent
    unsure_send: float = 0.0  # per message: UNAVAILABLE, though it was sent (a retry makes a duplicate)
    refuse: float = 0.0  # per message: PERMISSION_DENIED, not to be tried again
    drop_connection: float = 0.0  # per batch: the sender loses the network for `away_ms` before the batch leaves
    away_ms: int = 20
    duplicate: float = 0.0  # per message and member: delivered twice in a row
    delay_ms_max: int = 0  # each message is late by a random time up to this; streams overtake one another


NO_FAULTS: Final = Faults()
LOST: Final = UStatus(code=UCode.UNAVAILABLE, message="the connection is lost: try again when it is back")


class Kept:
    """Messages in order, and their bytes: attributes and payload."""

    def __init__(self, messages: Iterable[UMessage] = ()) -> None:
        self.messages: deque[UMessage] = deque()
        self.octets = 0
        self.extend(messages)

    def __len__(self) -> int:
        return len(self.messages)

    def __iter__(self) -> Iterator[UMessage]:
        return iter(self.messages)

    def append(self, message: UMessage) -> None:
        self.messages.append(message)
        self.octets += _size(message)

    def extend(self, messages: Iterable[UMessage]) -> None:
        for message in messages:
            self.append(message)

    def popleft(self) -> UMessage:
        message = self.messages.popleft()
        self.octets -= _size(message)
        return message

    def push_back(self, messages: Sequence[UMessage]) -> None:
        """In front of all others, in their order."""
        self.messages.extendleft(reversed(messages))
        self.octets += sum(map(_size, messages))

    def clear(self) -> None:
        self.messages.clear()
        self.octets = 0

    def remove(self, message: UMessage) -> None:
        self.messages.remove(message)
        self.octets -= _size(message)


def _size(message: UMessage) -> int:
    return len(message.payload) + message.attributes.ByteSize()


@dataclass
class Session:
    """What a network keeps for a named member that is away."""

    filters: list[Filter] = field(default_factory=list)  # what it listened to when it left
    kept: Kept = field(default_factory=Kept)

    def keep(self, message: UMessage, messages_max: int = SESSION_MESSAGES_MAX) -> bool:
        """False if nobody would want it, or there is no room."""
        if len(self.kept) >= messages_max or self.kept.octets >= SESSION_BYTES_MAX:
            return False
        if not any(_matches(filter, message) for filter in self.filters):
            return False
        self.kept.append(message)
        return True


def _matches(filter: Filter, message: UMessage) -> bool:
    attributes = message.attributes
    return filter.matches(attributes.source, attributes.sink if attributes.HasField("sink") else None)


class LocalNetwork:
    """Everybody on it hears everybody else, and not itself."""

    _named: ClassVar[WeakValueDictionary[str, LocalNetwork]] = WeakValueDictionary()

    def __init__(self, faults: Faults | None = None, name: str = "") -> None:
        self.name = name
        self.members: list[LocalTransport] = []
        self.sessions: dict[str, Session] = {}  # of named members that have left
        self.room = asyncio.Event()  # set whenever a member may have room again
        self._cut: set[str] = set()  # authorities that have no network
        self._held: list[tuple[float, int, LocalTransport, UMessage]] = []  # late messages: due, order, to whom, which
        self._count = 0
        self._release_at: dict[Any, float] = {}  # stream -> when its last late message is due
        self.set_faults(faults)

    @classmethod
    def named(cls, name: str) -> LocalNetwork:
        """The network of that name in this process; it lives as long as somebody holds it."""
        network = cls._named.get(name)
        if network is None:
            network = cls._named[name] = cls(name=name)
        return network

    def __repr__(self) -> str:
        return f"LocalNetwork({self.name!r}, members={len(self.members)}, faults={self.faults})"

    def set_faults(self, faults: Faults | None) -> None:
        """From here on these go wrong; None: nothing does. What is late stays late, and what follows it on its stream
        behind it."""
        self.faults = faults
        self._random = random.Random(faults.seed if faults is not None else 0)

    def break_(self) -> None:
        """Every member loses the network, until `heal`."""
        for member in self.members:
            member.disconnect()

    def heal(self) -> None:
        for member in self.members:
            member.reconnect()

    def cut(self, authority: str) -> None:
        """The member of that authority loses the network, or finds none when it joins, until `mend`."""
        self._cut.add(authority)
        for member in self.members:
            if member.authority == authority:
                member.disconnect()

    def mend(self, authority: str) -> None:
        self._cut.discard(authority)
        for member in self.members:
            if member.authority == authority:
                member.reconnect()

    def has_cut(self, authority: str) -> bool:
        return authority in self._cut

    def inject(self, message: UMessage) -> None:
        """Put `message` on the wire as it is, valid or not, as a misbehaving member would."""
        for member in self.members:
            member._arrive(message)

    def member(self, authority: str) -> LocalTransport:
        """The open member of that authority. Raises KeyError."""
        for member in self.members:
            if member.authority == authority:
                return member
        raise KeyError(authority)

    def full(self, sender: LocalTransport) -> bool:
        """True if a member other than `sender` has no room for more."""
        return any(one._is_full and one.connected and one is not sender for one in self.members)

    def carry(self, sender: LocalTransport, message: UMessage) -> UStatus:
        """Hand `message` to every other member, unless a fault strikes."""
        for session in self.sessions.values():
            session.keep(message)
        if self.faults is None and not self._held:
            for member in self.members:
                if member is not sender:
                    member._arrive(message)
            return OK
        faults = self.faults or NO_FAULTS
        if self._strikes(faults.refuse):
            return UStatus(
                code=UCode.PERMISSION_DENIED, message="the network refuses this message (a fault was asked for)"
            )
        if self._strikes(faults.fail_send):
            return UStatus(
                code=UCode.UNAVAILABLE, message="the message was not sent (a fault was asked for): try again"
            )
        for member in self.members:
            if member is not sender:
                for _ in range(2 if self._strikes(faults.duplicate) else 1):
                    self._late(faults, member, message) if faults.delay_ms_max or self._held else member._arrive(
                        message
                    )
        if self._strikes(faults.unsure_send):
            return UStatus(
                code=UCode.UNAVAILABLE,
                message="whether the message was sent is unknown (a fault was asked for): try again",
            )
        return OK

    def drops(self, sender: LocalTransport) -> bool:
        """True if a fault takes the network from `sender` just now; it comes back by itself."""
        if self.faults is None or not self._strikes(self.faults.drop_connection):
            return False
        sender.disconnect()
        asyncio.get_running_loop().call_later(self.faults.away_ms / 1000, sender.reconnect)
        return True

    def _strikes(self, chance: float) -> bool:
        return chance > 0 and self._random.random() < chance

    def _late(self, faults: Faults, member: LocalTransport, message: UMessage) -> None:
        """Deliver later, though never before an earlier message of the same stream."""
        loop = asyncio.get_running_loop()
        attributes = message.attributes
        sink = uris.key(attributes.sink) if attributes.HasField("sink") else None
        stream = (id(member), uris.key(attributes.source), sink)
        due = loop.time() + self._random.random() * faults.delay_ms_max / 1000
        self._release_at[stream] = due = max(due, self._release_at.get(stream, 0.0))
        self._count += 1
        member._add_load(1, _size(message))
        heapq.heappush(self._held, (due, self._count, member, message))
        loop.call_at(due, self._release)

    def _release(self) -> None:
        """One due message; there is one call for each, and the heap says which, so that equal times keep their
        order."""
        _, _, member, message = heapq.heappop(self._held)
        member._add_load(-1, -_size(message))
        self._deliver(member, message)
        if not self._held:
            self._release_at.clear()

    def _deliver(self, member: LocalTransport, message: UMessage) -> None:
        """To `member`, or to whoever has its session now."""
        if member._open or member.session is None:
            member._arrive(message)
        elif (session := self.sessions.get(member.session)) is not None:
            session.keep(message)
        else:
            for successor in self.members:
                if successor.session == member.session:
                    successor._arrive(message)


class LocalConfig(BaseModel):
    """`network` names the network within this process."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    network: str = Field(default="default", description="members of the same name, in this process, hear one another")
    session: str | None = Field(
        default=None,
        min_length=1,
        description="a name, for which the network keeps what its listeners want while it is away",
    )
    listeners_max: ListenersMax = LISTENERS_MAX
    listeners_per_filter_max: ListenersPerFilterMax = LISTENERS_PER_FILTER_MAX


class LocalTransport(TransportBase):
    """A member of a LocalNetwork. `disconnect` and `reconnect` break and mend its own connection."""

    capabilities = (
        Capability.PUSH
        | Capability.PULL
        | Capability.ACK
        | Capability.WILDCARD_SOURCE
        | Capability.PUBLISH_WITHOUT_SINK
    )

    def __init__(self, config: LocalConfig, local: LocalUriProvider, network: LocalNetwork | None = None) -> None:
        self.network = network if network is not None else LocalNetwork.named(config.network)
        super().__init__(config, local)
        self.session = config.session
        if self.session is not None:
            self.capabilities = type(self).capabilities | Capability.PERSISTENT_SESSION
        self._resumed = Session()  # what is left of the one before us, and its listeners that have not come again
        self._resumed_until = 0.0  # loop time
        self._queue = Kept()  # arrived, not handed over
        # handed over, not yet taken; their bytes
        self._taking: deque[tuple[list[UMessage], int, asyncio.Future[None]]] = deque()
        self._load = self._load_bytes = 0  # messages in _queue, in _taking, and late on the wire to us
        self._for_pull = Kept()
        self._open = self._awake = False
        self._redelivery_ms = REDELIVERY_MS_MIN
        self._idle = asyncio.Event()  # nothing waits and nothing is being taken
        self._idle.set()
        # what arrives is handed over in the owner's context, not in the sender's
        self._context = contextvars.copy_context()

    @classmethod
    def on(cls, network: LocalNetwork, local: LocalUriProvider) -> Self:
        return cls(LocalConfig(), local, network)

    def __repr__(self) -> str:
        state = "connected" if self.connected else "open" if self._open else "closed"
        return f"LocalTransport({self.authority}, {state}, queued={len(self._queue)}, being_taken={len(self._taking)})"

    async def open(self) -> None:
        if not self._open:
            self._open = True
            self._context = contextvars.copy_context()
            self.network.members.append(self)
            if self.session is not None and self.session in self.network.sessions:
                self._resumed = self.network.sessions.pop(self.session)
                self._resumed_until = asyncio.get_running_loop().time() + UNCLAIMED_MS_MAX / 1000
            self.reconnect()

    async def close(self) -> None:
        """Leave the network, after what arrived has been taken, or DRAIN_MS_MAX."""
        if not self._open:
            return
        self._open = False
        self.network.members.remove(self)
        self.network.room.set()  # nobody waits for us any more
        if self.session is not None:
            self.network.sessions[self.session] = Session([*self._resumed.filters, *self.listeners.filters])
        if self.connected:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(DRAIN_MS_MAX / 1000):
                    await self._idle.wait()
        self.disconnect()
        self._leave_session()
        self._add_load(-len(self._queue), -self._queue.octets)
        self._queue.clear()
        self._for_pull.clear()
        self._idle.set()

    def abandon(self) -> None:
        """Leave as a process that is killed does: nothing drains, nobody is told; a session keeps what was not
        taken."""
        if self._open:
            self._open = self._connected = False
            self.network.members.remove(self)
            self._go_back()
            self._leave_session()
            self._queue.clear()
            self.network.room.set()

    def _leave_session(self) -> None:
        """From here on the network keeps what comes, behind what was not taken."""
        self._drop_unclaimed()
        if self.session is not None:
            session = Session(list({*self._resumed.filters, *self.listeners.filters}))
            session.kept.extend(self._resumed.kept)
            session.kept.extend(
                message for message in self._queue if any(_matches(filter, message) for filter in session.filters)
            )
            if (begun := self.network.sessions.get(self.session)) is not None:  # while we were closing
                session.kept.extend(begun.kept)
            self.network.sessions[self.session] = session
            self._resumed = Session()

    def disconnect(self) -> None:
        """Lose the network: sending answers UNAVAILABLE, what was not taken waits; what others send meanwhile is
        missed, or kept by the session."""
        if self.connected:
            self._go_back()
            self.network.room.set()
            self._change(False)

    def reconnect(self) -> None:
        if self._open and not self.connected and not self.network.has_cut(self.authority):
            self._change(True)
            self._wake()

    def _change(self, connected: bool) -> None:
        """In the owner's context, whoever cuts or mends the network."""
        self._context.copy().run(self.set_connected, connected)

    async def send_batch(self, messages: Sequence[UMessage]) -> list[UStatus]:
        statuses: list[UStatus] = []
        if self.connected:
            self.network.drops(self)
        now = self.checks.now_ms()
        for message in messages:
            refusal = self.checks.refusal(message, now)
            if refusal is not None:
                statuses.append(refusal)
                continue
            size = _size(message)
            if size > self.wire_bytes_max:
                statuses.append(too_large(size, self.wire_bytes_max))
                continue
            while self.connected and self.network.full(self):
                self.network.room.clear()
                await self.network.room.wait()
                now = self.checks.now_ms()
            # no key and no topic could say it on arrival
            message = attrs.completed(message, self.authority)
            status = self.network.carry(self, message) if self.connected else self._away()
            if status.code == UCode.UNAVAILABLE:
                return stopped(statuses, len(messages), status)
            statuses.append(status)
        return statuses

    def _away(self) -> UStatus:
        return LOST if self._open else NOT_OPEN

    def _check_open(self) -> None:
        if not self._open:
            raise UStatusError.from_status(self._away())

    async def receive(self, source_filter: UUri, sink_filter: UUri | None = None) -> UMessage:
        self._check_open()
        wanted = Filter.of(source_filter, sink_filter, self.authority)
        now = self.checks.now_ms()
        for message in list(self._for_pull):
            attributes = message.attributes
            if attrs.is_expired(attributes, now):
                self.dropped["expired"] += 1
                self._for_pull.remove(message)
            elif wanted.matches(attributes.source, attributes.sink if attributes.HasField("sink") else None):
                self._for_pull.remove(message)
                return message
        raise UStatusError(
            UCode.NOT_FOUND, f"nothing has arrived that matches {uris.format(source_filter)}: try again later"
        )

    async def register_listener(
        self, source_filter: UUri, listener: UListener, sink_filter: UUri | None = None
    ) -> None:
        self._check_open()
        added = self.listeners.add(source_filter, sink_filter, listener)
        if added is not None and self._resumed.filters:
            self._claim(added)

    async def unregister_listener(
        self, source_filter: UUri, listener: UListener, sink_filter: UUri | None = None
    ) -> None:
        self._check_open()
        self.listeners.remove(source_filter, sink_filter, listener)

    def _claim(self, filter: Filter) -> None:
        """A session that was resumed may have brought what belongs to a listener before the listener came."""
        kept = self._resumed.kept
        self._resumed.kept = Kept(message for message in kept if not _matches(filter, message))
        for message in kept:
            if _matches(filter, message):
                self._put(message)
        self._resumed.filters = [left for left in self._resumed.filters if left != filter]

    def _drop_unclaimed(self) -> None:
        if self._resumed.filters and asyncio.get_running_loop().time() >= self._resumed_until:
            self.dropped["unclaimed"] += len(self._resumed.kept)
            self._resumed = Session()

    def _arrive(self, message: UMessage) -> None:
        self._drop_unclaimed()
        if _size(message) > self.wire_bytes_max:
            self.dropped["too_large"] += 1
            log.warning("dropped what is too large", bytes=_size(message), bytes_max=self.wire_bytes_max)
            return
        if self._resumed.filters and not self.listeners.wants(message) and self._resumed.keep(message):
            return
        has_room = len(self._queue) < SESSION_MESSAGES_MAX and self._queue.octets < SESSION_BYTES_MAX
        if self.connected or (self.session is not None and self.listeners.wants(message) and has_room):
            self._put(message)

    def _put(self, message: UMessage) -> None:
        if self._open:
            self._queue.append(message)
            self._add_load(1, _size(message))
            self._idle.clear()
            if not self._awake and self.connected:
                self._wake()

    def _wake(self, after_ms: int = 0) -> None:
        if not self._awake:
            self._awake = True
            loop = asyncio.get_running_loop()
            schedule: Callable[..., object] = (
                functools.partial(loop.call_later, after_ms / 1000) if after_ms else loop.call_soon
            )
            schedule(self._hand_over, context=self._context)

    def _hand_over(self) -> None:
        """One batch to its listeners; the next one does not wait for it, so that a listener may await an answer that is
        behind."""
        self._awake = False
        if not self.connected or not self._queue:
            return
        octets = self._queue.octets
        batch = [self._queue.popleft() for _ in range(min(len(self._queue), BATCH_MESSAGES_MAX))]
        octets -= self._queue.octets
        wanted: list[UMessage] = []
        for message in batch:
            if self.listeners.wants(message):
                wanted.append(message)
            elif self.listeners.accepts(message):
                self._for_pull.append(message)
        while len(self._for_pull) > PULL_MESSAGES_MAX or self._for_pull.octets > PULL_BYTES_MAX:
            self._for_pull.popleft()
        result = self.listeners.deliver(wanted)
        if result is None and not self._taking:
            self._took(len(batch), octets)
        else:
            future = asyncio.ensure_future(_completed() if result is None else _awaited(result))
            self._taking.append((batch, octets, future))
            future.add_done_callback(self._settle)
        if self._queue:
            self._wake()

    def _settle(self, done: asyncio.Future[None]) -> None:
        if not done.cancelled():
            done.exception()  # one behind a failure is delivered again whatever became of it
        while self._taking and self._taking[0][2].done():
            future = self._taking[0][2]
            error = asyncio.CancelledError() if future.cancelled() else future.exception()
            if error is not None:
                log.warning(
                    "a listener did not take a batch: it gets it again",
                    messages=len(self._taking[0][0]),
                    error=repr(error),
                )
                self._go_back()
                self._wake(self._redelivery_ms)
                self._redelivery_ms = min(self._redelivery_ms * 2, REDELIVERY_MS_MAX)
                return
            batch, octets, _ = self._taking.popleft()
            self._redelivery_ms = REDELIVERY_MS_MIN
            self._took(len(batch), octets)

    def _go_back(self) -> None:
        """Queue again everything that was not taken; what was handed over behind a failure comes twice, and in
        order."""
        for batch, _, _ in reversed(self._taking):
            self._queue.push_back(batch)
        self._taking.clear()

    @property
    def _is_full(self) -> bool:
        return self._load >= QUEUE_MESSAGES_MAX or self._load_bytes >= QUEUE_BYTES_MAX

    def _add_load(self, messages: int, octets: int) -> None:
        self._load += messages
        self._load_bytes += octets

    def _took(self, messages: int, octets: int) -> None:
        self._add_load(-messages, -octets)
        if not self._is_full:
            self.network.room.set()
        if not self._queue and not self._taking:
            self._idle.set()


async def _completed() -> None:
    return None


async def _awaited(result: Awaitable[None]) -> None:
    await result


PLUGIN: Final = TransportPlugin("local", LocalConfig, LocalTransport, LocalTransport.capabilities)
