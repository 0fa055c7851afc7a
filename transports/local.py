"""The in-process reference transport: ordered, acknowledged last, with faults on demand from a seed.

send_batch -> checks (valid?) -> its address    -> LocalNetwork (Faults) -> every other member: Arrivals -> listeners
              waits while         refused?                     |                            taken, or redelivered, in
              order a member is full    nobody listens?              |-> wanted by no listener: kept for `receive` '-> a
              named member that is away: its session keeps it

The objects that were sent are delivered without a copy: treat them as immutable, like every message. A network lives on
one event loop.
"""

from __future__ import annotations

import asyncio
import contextvars
import heapq
import random
import re
from collections import deque
from collections.abc import Awaitable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final, Literal, Self
from weakref import WeakValueDictionary

import structlog
from pydantic import Field

from transports.arrivals import Arrivals
from transports.base import NOT_OPEN, NOT_TRIED, OK, TransportBase, TransportSettings, stopped, tell, too_large
from transports.listeners import Filter
from transports.plugin import TransportPlugin
from uprotocol import attributes as attrs
from uprotocol import uri as uris
from uprotocol.status import UStatusError, is_nobody_listening, nobody_listens
from uprotocol.transport import Capability, HeardCallback, LocalUriProvider
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.umessage_pb2 import UMessage
from uprotocol.v1.uri_pb2 import UUri
from uprotocol.v1.ustatus_pb2 import UStatus

# waiting or being taken by one member; beyond it senders wait for it
QUEUE_MESSAGES_MAX: Final = 8_192
QUEUE_BYTES_MAX: Final = 32 << 20  # the same in bytes: 4 KiB for each
# kept for a named member that is away, as brokers are configured; some 50 MB of small ones
SESSION_MESSAGES_MAX: Final = 100_000
SESSION_BYTES_MAX: Final = 64 << 20  # the same in bytes
PULL_MESSAGES_MAX: Final = 1_024  # the newest messages that no listener wanted, kept for `receive`
PULL_BYTES_MAX: Final = 8 << 20  # the same in bytes
IN_FLIGHT_MESSAGES: Final = 1_024  # unanswered at once, if `answer_s` is set
DRAIN_MS_MAX: Final = 2_000  # how long `close` waits for listeners to take what has arrived
# how long kept messages of a session wait until the listener that wants them is registered
UNCLAIMED_MS_MAX: Final = 30_000

log = structlog.get_logger()


@dataclass(frozen=True)
class Faults:
    """Faults, each with a probability from 0 to 1, all drawn from one seed: the same sends get the same faults.

    No fault reorders a stream: messages of one (source, sink) stay in order.
    """

    seed: int = 0
    fail_send: float = 0.0  # per message: UNAVAILABLE, and it was not sent
    unsure_send: float = 0.0  # per message: UNAVAILABLE, though it was sent (a retry makes a duplicate)
    refuse: float = 0.0  # per message: PERMISSION_DENIED, no retry
    drop_connection: float = 0.0  # per batch: the sender loses the network for `away_ms` before the batch leaves
    away_ms: int = 20
    duplicate: float = 0.0  # per message and member: delivered twice in a row
    delay_ms_max: int = 0  # each message is delayed by a random time up to this; streams overtake one another


NO_FAULTS: Final = Faults()
REFUSED: Final = UStatus(
    code=UCode.PERMISSION_DENIED, message="the network refuses this message (a fault was asked for)"
)
NOT_SENT: Final = UStatus(code=UCode.UNAVAILABLE, message="the message was not sent (a fault was asked for): try again")
UNSURE: Final = UStatus(
    code=UCode.UNAVAILABLE, message="whether the message was sent is unknown (a fault was asked for): try again"
)
LOST: Final = UStatus(code=UCode.UNAVAILABLE, message="the connection is lost: try again when it is back")
BEHIND: Final = UStatus(code=UCode.UNAVAILABLE, message=NOT_TRIED)
NOBODY: Final = nobody_listens("no member of the network listens at this address: send it again when one does")


class Kept(deque[UMessage]):
    """Messages in order, and the sum of their bytes: attributes and payload."""

    def __init__(self, messages: Iterable[UMessage] = ()) -> None:
        super().__init__()
        self.octets = 0
        self.extend(messages)

    def append(self, message: UMessage) -> None:
        super().append(message)
        self.octets += size(message)

    def extend(self, messages: Iterable[UMessage]) -> None:
        for message in messages:
            self.append(message)

    def popleft(self) -> UMessage:
        message = super().popleft()
        self.octets -= size(message)
        return message

    def remove(self, message: UMessage) -> None:
        super().remove(message)
        self.octets -= size(message)


def size(message: UMessage) -> int:
    return len(message.payload) + message.attributes.ByteSize()


@dataclass
class MemberSession:
    """Filters of a named member that is away, and the messages that the network keeps for it."""

    filters: list[Filter] = field(default_factory=list)  # what it listened to when it left
    kept: Kept = field(default_factory=Kept)

    def wants(self, message: UMessage) -> bool:
        return any(matches(filter, message) for filter in self.filters)

    def keep(self, message: UMessage) -> bool:
        """Keep `message`. Returns False if no filter matches, or at a limit."""
        has_room = len(self.kept) < SESSION_MESSAGES_MAX and self.kept.octets < SESSION_BYTES_MAX
        if keeps := has_room and self.wants(message):
            self.kept.append(message)
        return keeps


def matches(filter: Filter, message: UMessage) -> bool:
    attributes = message.attributes
    return filter.matches(attributes.source, attributes.sink if attributes.HasField("sink") else None)


class LocalNetwork:
    """Every member receives the messages of all others, but not its own."""

    _named: ClassVar[WeakValueDictionary[str, LocalNetwork]] = WeakValueDictionary()

    def __init__(self, faults: Faults | None = None, name: str = "") -> None:
        self.name = name
        self.members: list[LocalTransport] = []
        self.sessions: dict[str, MemberSession] = {}  # of named members that have left
        self.freed = asyncio.Event()  # set whenever a member may have free capacity again
        self.cut_off: set[str] = set()  # authorities without network
        self._refused: dict[tuple[str, str], re.Pattern[str]] = {}  # (address, sender), as given to `refuse`
        self.answer_s = 0.0  # delay of the statuses of a batch, as on a network far away
        self._delayed: list[tuple[float, int, LocalTransport, UMessage]] = []  # due, order, receiver, message
        self._count = 0
        self._release_at: dict[Any, float] = {}  # stream -> when its last delayed message is due
        self.set_faults(faults)

    @classmethod
    def named(cls, name: str) -> LocalNetwork:
        """The network of that name in this process; it exists as long as it is referenced."""
        network = cls._named.get(name)
        if network is None:
            network = cls._named[name] = cls(name=name)
        return network

    def __repr__(self) -> str:
        return f"LocalNetwork({self.name!r}, members={len(self.members)}, faults={self.faults})"

    def set_faults(self, faults: Faults | None) -> None:
        """Use these faults from now on; None: none. Delayed messages stay delayed, and later ones of their stream stay
        behind them."""
        self.faults = faults
        self._random = random.Random(faults.seed if faults is not None else 0)

    def break_(self) -> None:
        """Disconnect every member, until `heal`."""
        for member in self.members:
            member.disconnect()

    def heal(self) -> None:
        for member in self.members:
            member.reconnect()

    def cut(self, authority: str) -> None:
        """The member of that authority is disconnected, now or when it joins, until `mend`."""
        self.cut_off.add(authority)
        for member in self._of(authority):
            member.disconnect()

    def mend(self, authority: str) -> None:
        self.cut_off.discard(authority)
        for member in self._of(authority):
            member.reconnect()

    def refuse(self, address: str, sender: str = "") -> None:
        """From now on, messages from the authority `sender` ("": any) to `address` are answered PERMISSION_DENIED and
        delivered to nobody. `address`: as LocalTransport.address_of makes it; `*` in it matches any text."""
        self._refused[address, sender] = re.compile(".*".join(map(re.escape, address.split("*"))))

    def allow(self, address: str | None = None, sender: str = "") -> None:
        """Undo `refuse` with the same arguments; None: all of `sender`."""
        for rule in [one for one in self._refused if one[1] == sender and address in (None, one[0])]:
            del self._refused[rule]

    @property
    def has_late(self) -> bool:
        """True if messages are delayed."""
        return bool(self._delayed)

    def refuses(self, address: str, sender: str) -> bool:
        return any(
            of in ("", sender) and pattern.fullmatch(address) is not None for (_, of), pattern in self._refused.items()
        )

    @property
    def refuses_some(self) -> bool:
        return bool(self._refused)

    def is_heard(self, sender: LocalTransport, message: UMessage) -> bool:
        """True if a member other than `sender`, or the session of one that is away, listens to it. To be kept for
        `receive` does not count: nobody may ever ask for it."""
        if any(member.hears(message) for member in self.members if member is not sender):
            return True
        return any(session.wants(message) for session in self.sessions.values())

    def heard(self, by: LocalTransport) -> None:
        """`by` listens to more than before: notify members that were answered that nobody listens."""
        for member in list(self.members):
            if member is not by:
                member.somebody_listens()

    def inject(self, message: UMessage) -> None:
        """Deliver `message` unchecked, as if a misbehaving member had sent it."""
        for member in self.members:
            member.arrive(message)

    def _of(self, authority: str) -> list[LocalTransport]:
        return [member for member in self.members if member.authority == authority]

    def full(self, sender: LocalTransport) -> bool:
        """True if a member other than `sender` is full."""
        return any(one.arrivals.is_full and one.connected and one is not sender for one in self.members)

    def carry(self, sender: LocalTransport, message: UMessage) -> UStatus:
        """Deliver `message` to every other member, unless a fault strikes."""
        for session in self.sessions.values():
            session.keep(message)
        others = [member for member in self.members if member is not sender]
        if self.faults is None and not self._delayed:
            for member in others:
                member.arrive(message)
            return OK
        faults = self.faults or NO_FAULTS
        if self._strikes(faults.refuse):
            return REFUSED
        if self._strikes(faults.fail_send):
            return NOT_SENT
        for member in others:
            for _ in range(2 if self._strikes(faults.duplicate) else 1):
                self._late(faults, member, message) if faults.delay_ms_max or self._delayed else member.arrive(message)
        return UNSURE if self._strikes(faults.unsure_send) else OK

    def drops(self, sender: LocalTransport) -> bool:
        """True if a fault disconnects `sender` now; it is reconnected after `away_ms`."""
        if self.faults is None or not self._strikes(self.faults.drop_connection):
            return False
        sender.disconnect()
        asyncio.get_running_loop().call_later(self.faults.away_ms / 1000, sender.reconnect)
        return True

    def _strikes(self, chance: float) -> bool:
        return chance > 0 and self._random.random() < chance

    def _late(self, faults: Faults, member: LocalTransport, message: UMessage) -> None:
        """Deliver later, but not before an earlier message of the same stream."""
        loop = asyncio.get_running_loop()
        attributes = message.attributes
        sink = uris.key(attributes.sink) if attributes.HasField("sink") else None
        stream = (id(member), uris.key(attributes.source), sink)
        due = loop.time() + self._random.random() * faults.delay_ms_max / 1000
        self._release_at[stream] = due = max(due, self._release_at.get(stream, 0.0))
        self._count += 1
        member.arrivals.count(size(message), 1)
        heapq.heappush(self._delayed, (due, self._count, member, message))
        loop.call_at(due, self._release)

    def _release(self) -> None:
        """Deliver one due message. There is one call for each message; the heap chooses, which keeps the order of equal
        times."""
        _, _, member, message = heapq.heappop(self._delayed)
        member.arrivals.count(-size(message), -1)
        self._deliver(member, message)
        if not self._delayed:
            self._release_at.clear()

    def _deliver(self, member: LocalTransport, message: UMessage) -> None:
        """Deliver to `member`, or to the member that has its session now."""
        if member.is_open or member.session is None:
            member.arrive(message)
        elif (session := self.sessions.get(member.session)) is not None:
            session.keep(message)
        else:
            for successor in self.members:
                if successor.session == member.session:
                    successor.arrive(message)


class LocalConfig(TransportSettings):
    network: str = "default"
    """members with the same network name, in this process, receive each other's messages"""
    session: str | None = Field(default=None, min_length=1)
    """a name; while the member is away, the network keeps the messages that its listeners want"""


@dataclass(eq=False, slots=True)
class _Call:
    """One `send_batch`, if `answer_s` is set."""

    failed: bool = False  # some status will be a failure of the network
    lost: bool = False  # the connection was lost meanwhile: it is unknown whether the messages have arrived
    # addresses that it answers `nobody_listens` for: later messages must not overtake, even if somebody listens now
    absent: set[str] = field(default_factory=set)


class LocalTransport(TransportBase):
    """A member of a LocalNetwork. `disconnect` and `reconnect` affect only its own connection."""

    capabilities = (
        Capability.PUSH
        | Capability.PULL
        | Capability.ACK
        | Capability.WILDCARD_SOURCE
        | Capability.PUBLISH_WITHOUT_SINK
        | Capability.ABSENCE
    )

    def __init__(self, config: LocalConfig, local: LocalUriProvider, network: LocalNetwork | None = None) -> None:
        self.network = network if network is not None else LocalNetwork.named(config.network)
        super().__init__(config, local)
        self.session = config.session
        if self.session is not None:
            self.capabilities = type(self).capabilities | Capability.PERSISTENT_SESSION
        self._resumed = MemberSession()  # of the member before us: messages and filters that are not claimed yet
        self._resumed_until = 0.0  # loop time
        self.arrivals: Arrivals[UMessage] = Arrivals(
            self._deliver,
            self._took,
            messages_max=QUEUE_MESSAGES_MAX,
            bytes_max=QUEUE_BYTES_MAX,
            redeliver=True,
            gathers=False,
        )
        self._for_pull = Kept()
        self._turn, self._calls = asyncio.Lock(), set[_Call]()
        self._on_heard: list[HeardCallback] = []
        self._was_unheard = False  # answered `nobody_listens`, and not yet notified that somebody listens
        self.hangs: Literal["", "before", "after"] = ""
        """`send_batch` does not return, before or after sending: a fault that `close` and `open` end."""
        # callbacks run in the owner's context, not in that of the caller that breaks the network
        self._context = contextvars.copy_context()

    @classmethod
    def on(cls, network: LocalNetwork, local: LocalUriProvider) -> Self:
        return cls(LocalConfig(), local, network)

    def __repr__(self) -> str:
        state = "connected" if self.connected else "open" if self.is_open else "closed"
        return f"LocalTransport({self.authority}, {state}, {self.arrivals})"

    async def open(self) -> None:
        if not self.is_open:
            self.is_open, self.hangs = True, ""
            self._context = contextvars.copy_context()
            self.arrivals.open()
            self.arrivals.pause()  # until we are connected
            self.network.members.append(self)
            if self.session is not None and self.session in self.network.sessions:
                self._resumed = self.network.sessions.pop(self.session)
                self._resumed_until = asyncio.get_running_loop().time() + UNCLAIMED_MS_MAX / 1000
            for filter in self.listeners.filters:  # registered before `open`
                await self.listen(filter)
            self.reconnect()

    async def close(self) -> None:
        """Leave the network when everything that has arrived is taken, after DRAIN_MS_MAX at the latest."""
        if not self.is_open:
            return
        self.is_open = False
        self.network.members.remove(self)
        self.network.freed.set()  # nobody need wait for us any more
        if self.session is not None:
            self.network.sessions[self.session] = MemberSession([*self._resumed.filters, *self.listeners.filters])
        left = await self.arrivals.finish(DRAIN_MS_MAX / 1000) if self.connected else self.arrivals.close()
        self.disconnect()
        self._leave_session(left)
        self._for_pull = Kept()

    def abandon(self) -> None:
        """Leave like a process that is killed: without draining or notifying; a session keeps what was not taken."""
        if self.is_open:
            self.is_open = self._connected = False
            self.network.members.remove(self)
            self._leave_session(self.arrivals.close())
            self.network.freed.set()

    def _leave_session(self, left: list[UMessage]) -> None:
        """Let the network keep messages from now on, behind those that were not taken."""
        self._drop_unclaimed()
        if self.session is not None:
            session = MemberSession(list({*self._resumed.filters, *self.listeners.filters}))
            session.kept.extend(self._resumed.kept)
            session.kept.extend(filter(session.wants, left))
            if (begun := self.network.sessions.get(self.session)) is not None:  # while we were closing
                session.kept.extend(begun.kept)
            self.network.sessions[self.session] = session
            self._resumed = MemberSession()

    def disconnect(self) -> None:
        """Lose the network: sending answers UNAVAILABLE, messages that were not taken wait; messages of others are
        missed, or kept by the session."""
        if self.connected:
            self.arrivals.pause()
            self.network.freed.set()
            for call in self._calls:
                call.failed = call.lost = True
            self._change(False)

    def reconnect(self) -> None:
        if self.is_open and not self.connected and self.authority not in self.network.cut_off:
            self._change(True)
            self.arrivals.resume()
            self.network.heard(self)

    def _change(self, connected: bool) -> None:
        """Set `connected` in the owner's context, whoever changes the network."""
        self._context.copy().run(self.set_connected, connected)

    @property
    def in_flight_messages(self) -> int:  # type: ignore[override]  # read only
        return IN_FLIGHT_MESSAGES if self.network.answer_s else 0

    async def send_batch(self, messages: Sequence[UMessage]) -> list[UStatus]:
        if self.hangs == "before":
            await asyncio.get_running_loop().create_future()
        statuses = await self._send_batch(messages)
        if self.hangs == "after":
            await asyncio.get_running_loop().create_future()
        return statuses

    async def _send_batch(self, messages: Sequence[UMessage]) -> list[UStatus]:
        call = _Call()
        if not self.network.answer_s:
            return await self._send(messages, call)
        if any(other.failed for other in self._calls):
            return stopped([], len(messages), BEHIND)
        self._calls.add(call)
        try:
            return await self._send_far(messages, call)
        finally:
            self._calls.discard(call)

    async def _send_far(self, messages: Sequence[UMessage], call: _Call) -> list[UStatus]:
        async with self._turn:
            if any(other.failed for other in self._calls):
                return stopped([], len(messages), BEHIND)
            statuses = await self._send(messages, call)
            call.failed = call.failed or any(map(_is_of_the_network, statuses))
        await asyncio.sleep(self.network.answer_s)
        return [UNSURE if call.lost and not status.code else status for status in statuses]

    async def _send(self, messages: Sequence[UMessage], call: _Call) -> list[UStatus]:
        statuses: list[UStatus] = []
        if self.connected:
            self.network.drops(self)
        now = self.checks.now_ms()
        for message in messages:
            refusal = self.checks.refusal(message, now)
            if refusal is not None:
                statuses.append(refusal)
                continue
            octets = size(message)
            if octets > self.wire_bytes_max:
                statuses.append(too_large(octets, self.wire_bytes_max))
                continue
            # there is no key or topic from which the receiver could complete it
            message = attrs.completed(message, self.authority)
            if (status := self._answer_of_address(message, call)) is not None:
                statuses.append(status)
                continue
            while self.connected and self.network.full(self):
                self.network.freed.clear()
                await self.network.freed.wait()
                now = self.checks.now_ms()
            status = self.network.carry(self, message) if self.connected else LOST if self.is_open else NOT_OPEN
            if _is_of_the_network(status):
                return stopped(statuses, len(messages), status)
            statuses.append(status)
        return statuses

    def _answer_of_address(self, message: UMessage, call: _Call) -> UStatus | None:
        """Returns why the network does not carry messages to this address; None if it does, or is away."""
        attributes = message.attributes
        may_be_unheard = self.tells_absence and attributes.type == attrs.PUBLISH
        if not self.connected or not (may_be_unheard or self.network.refuses_some):
            return None
        address = self.address_of(attributes.source, attributes.sink if attributes.HasField("sink") else None)
        if self.network.refuses(address, self.authority):
            why = f"Not authorized: {self.authority} may not send to {address} on this network"
            return UStatus(code=UCode.PERMISSION_DENIED, message=why)
        if not may_be_unheard:
            return None
        was_unheard = address in call.absent or any(address in other.absent for other in self._calls)
        if not was_unheard and self.network.is_heard(self, message):
            return None
        call.absent.add(address)
        self._was_unheard = True
        return NOBODY

    def on_heard(self, callback: HeardCallback) -> None:
        self._on_heard.append(callback)

    def somebody_listens(self) -> None:
        """Notify that somebody may listen where nobody did before."""
        if self._was_unheard:
            self._was_unheard = False
            self._context.copy().run(tell, self._on_heard, None)

    def hears(self, message: UMessage) -> bool:
        """True if it would be delivered to a listener, now or after a reconnect."""
        if not self.connected and self.session is None:
            return False
        self._drop_unclaimed()
        return self.listeners.wants(message) or self._resumed.wants(message)

    async def receive(self, source_filter: UUri, sink_filter: UUri | None = None) -> UMessage:
        self.check_open()
        wanted = Filter.of(source_filter, sink_filter, self.authority)
        now = self.checks.now_ms()
        for message in list(self._for_pull):
            if attrs.is_expired(message.attributes, now):
                self.dropped["expired"] += 1
                self._for_pull.remove(message)
            elif matches(wanted, message):
                self._for_pull.remove(message)
                return message
        raise UStatusError(
            UCode.NOT_FOUND, f"nothing has arrived that matches {uris.format(source_filter)}: try again later"
        )

    async def listen(self, filter: Filter) -> None:
        """Deliver what a resumed session has kept for this filter."""
        if self._resumed.filters:
            kept = self._resumed.kept
            self._resumed.kept = Kept(message for message in kept if not matches(filter, message))
            for message in kept:
                if matches(filter, message):
                    self._put(message)
            self._resumed.filters = [left for left in self._resumed.filters if left != filter]
        if self.connected or self.session is not None:
            self.network.heard(self)

    def listen_at_open(self, filter: Filter) -> None:
        """Nothing to do: members receive all messages and match them with their listeners."""

    def _drop_unclaimed(self) -> None:
        if self._resumed.filters and asyncio.get_running_loop().time() >= self._resumed_until:
            self.dropped["unclaimed"] += len(self._resumed.kept)
            self._resumed = MemberSession()

    def arrive(self, message: UMessage) -> None:
        self._drop_unclaimed()
        if size(message) > self.wire_bytes_max:
            self.dropped["too_large"] += 1
            log.warning("dropped a message that is too large", bytes=size(message), bytes_max=self.wire_bytes_max)
            return
        if self._resumed.filters and not self.listeners.wants(message) and self._resumed.keep(message):
            return
        has_room = self.arrivals.waiting < SESSION_MESSAGES_MAX and self.arrivals.octets < SESSION_BYTES_MAX
        if self.connected or (self.session is not None and self.listeners.wants(message) and has_room):
            self._put(message)

    def _put(self, message: UMessage) -> None:
        if self.is_open:
            self.arrivals.put_now((message,), (size(message),))

    def _deliver(self, batch: list[UMessage]) -> Awaitable[None] | None:
        wanted: list[UMessage] = []
        for message in batch:
            if self.listeners.wants(message):
                wanted.append(message)
            elif self.listeners.accepts(message):
                self._for_pull.append(message)
        while len(self._for_pull) > PULL_MESSAGES_MAX or self._for_pull.octets > PULL_BYTES_MAX:
            self._for_pull.popleft()
        return self.listeners.deliver(wanted)

    def _took(self, _batch: list[UMessage], _error: BaseException | None) -> None:
        if not self.arrivals.is_full:
            self.network.freed.set()


def _is_of_the_network(status: UStatus) -> bool:
    """True if the network has failed; False if only the receiver of this message is missing."""
    return status.code == UCode.UNAVAILABLE and not is_nobody_listening(status)


PLUGIN: Final = TransportPlugin("local", LocalConfig, LocalTransport, LocalTransport.capabilities)
