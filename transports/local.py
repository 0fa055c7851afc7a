"""The in-process reference transport: ordered, acknowledged last, and breakable on demand from a seed.

send_batch -> checks (valid?) -> its address    -> LocalNetwork (Faults) -> every other member: Arrivals -> listeners
              waits while         refused?                     |                            taken, or again, in order
              a member is full    nobody listens?              |-> wanted by no listener: kept for receive
                                                               '-> a named member that is away: its session keeps it

Messages are delivered as the very objects that were sent: treat them as immutable, as every message is once it is
built. A network lives on one event loop.
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

# waiting or being taken by one member; beyond it senders wait, so that they feel a slow one
QUEUE_MESSAGES_MAX: Final = 8_192
QUEUE_BYTES_MAX: Final = 32 << 20  # the same in bytes: 4 KiB for each
# kept for a named member that is away, as brokers are configured; some 50 MB of small ones
SESSION_MESSAGES_MAX: Final = 100_000
SESSION_BYTES_MAX: Final = 64 << 20  # the same in bytes
PULL_MESSAGES_MAX: Final = 1_024  # kept for `receive`: what no listener wanted, the newest
PULL_BYTES_MAX: Final = 8 << 20  # the same in bytes
IN_FLIGHT_MESSAGES: Final = 1_024  # unanswered at once, where answers take their time
DRAIN_MS_MAX: Final = 2_000  # how long `close` waits for listeners to take what has arrived
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
    """Messages in order, and their bytes: attributes and payload."""

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
    """What a network keeps for a named member that is away."""

    filters: list[Filter] = field(default_factory=list)  # what it listened to when it left
    kept: Kept = field(default_factory=Kept)

    def wants(self, message: UMessage) -> bool:
        return any(matches(filter, message) for filter in self.filters)

    def keep(self, message: UMessage) -> bool:
        """False if nobody would want it, or there is no room."""
        has_room = len(self.kept) < SESSION_MESSAGES_MAX and self.kept.octets < SESSION_BYTES_MAX
        if keeps := has_room and self.wants(message):
            self.kept.append(message)
        return keeps


def matches(filter: Filter, message: UMessage) -> bool:
    attributes = message.attributes
    return filter.matches(attributes.source, attributes.sink if attributes.HasField("sink") else None)


class LocalNetwork:
    """Everybody on it hears everybody else, and not itself."""

    _named: ClassVar[WeakValueDictionary[str, LocalNetwork]] = WeakValueDictionary()

    def __init__(self, faults: Faults | None = None, name: str = "") -> None:
        self.name = name
        self.members: list[LocalTransport] = []
        self.sessions: dict[str, MemberSession] = {}  # of named members that have left
        self.room = asyncio.Event()  # set whenever a member may have room again
        self.cut_off: set[str] = set()  # authorities that have no network
        self._refused: dict[tuple[str, str], re.Pattern[str]] = {}  # (address, sender), as `refuse` was told
        # until a sender hears what has become of a batch: as long as a network far away takes
        self.answer_s = 0.0
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
        self.cut_off.add(authority)
        for member in self._of(authority):
            member.disconnect()

    def mend(self, authority: str) -> None:
        self.cut_off.discard(authority)
        for member in self._of(authority):
            member.reconnect()

    def refuse(self, address: str, sender: str = "") -> None:
        """From now on what the member of the authority `sender` ("": any) sends to `address` is answered
        PERMISSION_DENIED, and goes to nobody. An address is one as LocalTransport.address_of makes it; a `*` in it
        stands for any text."""
        self._refused[address, sender] = re.compile(".*".join(map(re.escape, address.split("*"))))

    def allow(self, address: str | None = None, sender: str = "") -> None:
        """Take back what `refuse` was told with the same words; None: all that it was told of `sender`."""
        for rule in [one for one in self._refused if one[1] == sender and address in (None, one[0])]:
            del self._refused[rule]

    @property
    def has_late(self) -> bool:
        """Something has been sent, and is late."""
        return bool(self._held)

    def refuses(self, address: str, sender: str) -> bool:
        return any(
            of in ("", sender) and pattern.fullmatch(address) is not None for (_, of), pattern in self._refused.items()
        )

    @property
    def refuses_some(self) -> bool:
        return bool(self._refused)

    def is_heard(self, sender: LocalTransport, message: UMessage) -> bool:
        """True if a member other than `sender` listens to it, or the session of one that is away. What would only be
        kept for `receive` is heard by nobody: nobody may ever ask for it."""
        if any(member.hears(message) for member in self.members if member is not sender):
            return True
        return any(session.wants(message) for session in self.sessions.values())

    def heard(self, by: LocalTransport) -> None:
        """`by` hears more than before: tell those that were answered that nobody listens."""
        for member in list(self.members):
            if member is not by:
                member.somebody_listens()

    def inject(self, message: UMessage) -> None:
        """Put `message` on the wire as it is, valid or not, as a misbehaving member would."""
        for member in self.members:
            member.arrive(message)

    def _of(self, authority: str) -> list[LocalTransport]:
        return [member for member in self.members if member.authority == authority]

    def full(self, sender: LocalTransport) -> bool:
        """True if a member other than `sender` has no room for more."""
        return any(one.arrivals.is_full and one.connected and one is not sender for one in self.members)

    def carry(self, sender: LocalTransport, message: UMessage) -> UStatus:
        """Hand `message` to every other member, unless a fault strikes."""
        for session in self.sessions.values():
            session.keep(message)
        others = [member for member in self.members if member is not sender]
        if self.faults is None and not self._held:
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
                self._late(faults, member, message) if faults.delay_ms_max or self._held else member.arrive(message)
        return UNSURE if self._strikes(faults.unsure_send) else OK

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
        member.arrivals.count(size(message), 1)
        heapq.heappush(self._held, (due, self._count, member, message))
        loop.call_at(due, self._release)

    def _release(self) -> None:
        """One due message; there is one call for each, and the heap says which, so that equal times keep their
        order."""
        _, _, member, message = heapq.heappop(self._held)
        member.arrivals.count(-size(message), -1)
        self._deliver(member, message)
        if not self._held:
            self._release_at.clear()

    def _deliver(self, member: LocalTransport, message: UMessage) -> None:
        """To `member`, or to whoever has its session now."""
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
    """members of the same name, in this process, hear one another"""
    session: str | None = Field(default=None, min_length=1)
    """a name, for which the network keeps what its listeners want while it is away"""


@dataclass(eq=False, slots=True)
class _Call:
    """Of `send_batch`, where answers take their time."""

    failed: bool = False  # and will say so
    lost: bool = False  # the connection, meanwhile: what was sent may have arrived, or not
    # addresses that it answers `nobody_listens` for: what is behind must not overtake it, though somebody has come
    absent: set[str] = field(default_factory=set)


class LocalTransport(TransportBase):
    """A member of a LocalNetwork. `disconnect` and `reconnect` break and mend its own connection."""

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
        self._resumed = MemberSession()  # what is left of the one before us, and its listeners that have not come again
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
        self._was_unheard = False  # answered `nobody_listens`, and not told since that somebody does
        self.hangs: Literal["", "before", "after"] = ""
        """`send_batch` does not return, before or after it has sent: a fault that `open` mends, after `close`."""
        # what the network does to us is told in the owner's context, not in that of who breaks it
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
            for filter in self.listeners.filters:  # registered before
                await self.listen(filter)
            self.reconnect()

    async def close(self) -> None:
        """Leave the network, after what arrived has been taken, or DRAIN_MS_MAX."""
        if not self.is_open:
            return
        self.is_open = False
        self.network.members.remove(self)
        self.network.room.set()  # nobody waits for us any more
        if self.session is not None:
            self.network.sessions[self.session] = MemberSession([*self._resumed.filters, *self.listeners.filters])
        left = await self.arrivals.finish(DRAIN_MS_MAX / 1000) if self.connected else self.arrivals.close()
        self.disconnect()
        self._leave_session(left)
        self._for_pull = Kept()

    def abandon(self) -> None:
        """Leave as a process that is killed does: nothing drains, nobody is told; a session keeps what was not
        taken."""
        if self.is_open:
            self.is_open = self._connected = False
            self.network.members.remove(self)
            self._leave_session(self.arrivals.close())
            self.network.room.set()

    def _leave_session(self, left: list[UMessage]) -> None:
        """From here on the network keeps what comes, behind what was not taken."""
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
        """Lose the network: sending answers UNAVAILABLE, what was not taken waits; what others send meanwhile is
        missed, or kept by the session."""
        if self.connected:
            self.arrivals.pause()
            self.network.room.set()
            for call in self._calls:
                call.failed = call.lost = True
            self._change(False)

    def reconnect(self) -> None:
        if self.is_open and not self.connected and self.authority not in self.network.cut_off:
            self._change(True)
            self.arrivals.resume()
            self.network.heard(self)

    def _change(self, connected: bool) -> None:
        """In the owner's context, whoever cuts or mends the network."""
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
            # no key and no topic could say it on arrival
            message = attrs.completed(message, self.authority)
            if (status := self._answer_of_address(message, call)) is not None:
                statuses.append(status)
                continue
            while self.connected and self.network.full(self):
                self.network.room.clear()
                await self.network.room.wait()
                now = self.checks.now_ms()
            status = self.network.carry(self, message) if self.connected else LOST if self.is_open else NOT_OPEN
            if _is_of_the_network(status):
                return stopped(statuses, len(messages), status)
            statuses.append(status)
        return statuses

    def _answer_of_address(self, message: UMessage, call: _Call) -> UStatus | None:
        """Why the network does not carry what goes there; None if it does, or is away."""
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
        """Perhaps where nobody did when we last sent there."""
        if self._was_unheard:
            self._was_unheard = False
            self._context.copy().run(tell, self._on_heard, None)

    def hears(self, message: UMessage) -> bool:
        """True if it goes to a listener, at once or when we are connected again."""
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
        """A session that was resumed may have brought what belongs to a listener before the listener came."""
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
        """The members of a network hear everything, and match it with their listeners."""

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
            self.network.room.set()


def _is_of_the_network(status: UStatus) -> bool:
    """False also where only this one's receiver is missing."""
    return status.code == UCode.UNAVAILABLE and not is_nobody_listening(status)


PLUGIN: Final = TransportPlugin("local", LocalConfig, LocalTransport, LocalTransport.capabilities)
