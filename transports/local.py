"""The in-process reference transport: ordered, and acknowledged last.

send_batch -> checks -> nobody listens?  -> LocalNetwork -> every other member: Arrivals -> listeners: taken, or again
              waits while a member is full       |                  '-> wanted by no listener: kept for `receive`
                                                 '-> a named member that is away: its session keeps it

The objects that were sent are delivered without a copy: treat them as immutable, like every message. A network lives on
one event loop. campaigns/simulation/network.py has one with faults on demand.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final, Self
from weakref import WeakValueDictionary

import structlog
from pydantic import Field

from transports.arrivals import Arrivals
from transports.base import NOT_OPEN, OK, UNCLAIMED_MS_MAX, TransportBase, TransportSettings, stopped, tell, too_large
from transports.listeners import Filter
from transports.plugin import TransportPlugin
from uprotocol import attributes as attrs
from uprotocol import uri as uris
from uprotocol.status import UStatusError, is_nobody_listening, nobody_listens
from uprotocol.transport import (
    Capability,
    LocalUriProvider,
    ProbeRequest,
    ProbeResult,
    ProbeVerdict,
)
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
LAST_TAKEN_MS_MAX: Final = 2_000  # how long `close` waits for listeners to take what has arrived

log = structlog.get_logger()

LOST: Final = UStatus(code=UCode.UNAVAILABLE, message="the connection is lost: try again when it is back")
NOBODY_LISTENS: Final = nobody_listens("no member of the network listens at this address: send it again when one does")


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
    """Every member receives the messages of all others, but not its own. `freed` is set whenever a member may have free
    capacity again."""

    _named: ClassVar[WeakValueDictionary[str, Any]] = WeakValueDictionary()

    def __init__(self, name: str = "") -> None:
        self.name = name
        self.members: list[LocalTransport] = []
        self.sessions: dict[str, MemberSession] = {}  # of named members that have left
        self.freed = asyncio.Event()
        self.cut_off: set[str] = set()  # authorities without network

    @classmethod
    def named(cls, name: str) -> Self:
        """The network of that name in this process; it exists as long as it is referenced."""
        network: Self | None = cls._named.get(name)
        if network is None:
            network = cls._named[name] = cls(name)
        return network

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r}, members={len(self.members)})"

    async def send(
        self, sender: LocalTransport, messages: Sequence[UMessage], absent: set[str] | None = None
    ) -> list[UStatus]:
        """See UTransport.send_batch. `absent`: addresses where nobody has listened yet; later messages to them must not
        overtake earlier ones, even if somebody listens now."""
        absent = set() if absent is None else absent
        statuses: list[UStatus] = []
        now = sender.checks.now_ms()
        for message in messages:
            refusal = sender.checks.refusal(message, now)
            if refusal is not None:
                statuses.append(refusal)
                continue
            octets = size(message)
            if octets > sender.wire_bytes_max:
                statuses.append(too_large(octets, sender.wire_bytes_max))
                continue
            # there is no key or topic from which the receiver could complete it
            message = attrs.completed(message, sender.authority)
            if sender.connected and sender.tells_absence and self._is_unheard(sender, message, absent):
                statuses.append(NOBODY_LISTENS)
                continue
            while sender.connected and self.full(sender):
                self.freed.clear()
                await self.freed.wait()
                now = sender.checks.now_ms()
            status = self.carry(sender, message) if sender.connected else LOST if sender.is_open else NOT_OPEN
            if is_of_the_network(status):
                return stopped(statuses, len(messages), status)
            statuses.append(status)
        return statuses

    def _is_unheard(self, sender: LocalTransport, message: UMessage, absent: set[str]) -> bool:
        attributes = message.attributes
        if attributes.type not in (attrs.PUBLISH, attrs.REQUEST):
            return False
        address = sender.address_of(attributes.source, attributes.sink if attributes.HasField("sink") else None)
        if address not in absent and self.is_heard(sender, message, address):
            return False
        absent.add(address)
        sender.was_unheard = True
        return True

    def carry(self, sender: LocalTransport, message: UMessage) -> UStatus:
        for session in self.sessions.values():
            session.keep(message)
        for member in [member for member in self.members if member is not sender]:
            member.arrive(message)
        return OK

    def is_heard(self, sender: LocalTransport, message: UMessage, address: str) -> bool:
        """True if a member other than `sender`, or the session of one that is away, listens to `message`, which has
        this address. To be kept for `receive` does not count: nobody may ever ask for it."""
        if any(member.hears(message) for member in self.members if member is not sender):
            return True
        return any(session.wants(message) for session in self.sessions.values())

    def heard(self, by: LocalTransport) -> None:
        """`by` listens to more than before: notify members that were answered that nobody listens."""
        for member in list(self.members):
            if member is not by:
                member.somebody_listens()

    def join(self, member: LocalTransport) -> None:
        self.members.append(member)

    def lose(self, member: LocalTransport) -> None:
        """`member` has lost the network."""
        self.freed.set()

    def full(self, sender: LocalTransport) -> bool:
        return any(one.arrivals.is_full and one.connected and one is not sender for one in self.members)


class LocalConfig(TransportSettings):
    network: str = "default"
    """members with the same network name, in this process, receive each other's messages"""
    session: str | None = Field(default=None, min_length=1)
    """a name; while the member is away, the network keeps the messages that its listeners want"""


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
        self._drains = False  # `close` waits for listeners
        self.arrivals: Arrivals[UMessage] = Arrivals(
            self._deliver,
            self._took,
            messages_max=QUEUE_MESSAGES_MAX,
            bytes_max=QUEUE_BYTES_MAX,
            redeliver=True,
            gathers=False,
        )
        self._for_pull = Kept()
        self.was_unheard = False  # answered `nobody_listens`, and not yet notified that somebody listens
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
            self.is_open = True
            self._context = contextvars.copy_context()
            self.arrivals.open()
            self.arrivals.pause()  # until we are connected
            self.network.join(self)
            if self.session is not None and self.session in self.network.sessions:
                self._resumed = self.network.sessions.pop(self.session)
                self._resumed_until = asyncio.get_running_loop().time() + UNCLAIMED_MS_MAX / 1000
            for filter in self.listeners.filters:  # registered before `open`
                await self.listen(filter)
            self.reconnect()

    async def probe(self, asked: ProbeRequest) -> AsyncGenerator[ProbeResult, None]:
        yield ProbeResult(ProbeVerdict.OK, "within the process of the streamer")

    async def close(self) -> None:
        """Leave the network when everything that has arrived is taken, after LAST_TAKEN_MS_MAX at the latest."""
        if not self.is_open:
            return
        self.is_open, self._drains = False, True
        self.network.members.remove(self)
        self.network.freed.set()  # nobody need wait for us any more
        if self.session is not None:
            self.network.sessions[self.session] = MemberSession([*self._resumed.filters, *self.listeners.filters])
        left = await self.arrivals.finish(LAST_TAKEN_MS_MAX / 1000) if self.connected else self.arrivals.close()
        if not self._drains:  # abandoned meanwhile
            return
        self._drains = False
        self.disconnect()
        self._leave_session(left)
        self._for_pull = Kept()

    def abandon(self) -> None:
        """Leave like a process that is killed: without draining or notifying; a session keeps what was not taken."""
        if self.is_open:
            self.network.members.remove(self)
        elif not self._drains:
            return
        self.is_open = self._connected = self._drains = False
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
            self.network.lose(self)
            self._change(False)

    def reconnect(self) -> None:
        if self.is_open and not self.connected and self.authority not in self.network.cut_off:
            self._change(True)
            self.arrivals.resume()
            self.network.heard(self)

    def _change(self, connected: bool) -> None:
        """Set `connected` in the owner's context, whoever changes the network."""
        self._context.copy().run(self.set_connected, connected)

    async def send_batch(self, messages: Sequence[UMessage]) -> list[UStatus]:
        return await self.network.send(self, messages)

    def report_loss(self, what: str, messages: int) -> None:
        """The network has lost so many messages, as a network with faults does."""
        self._context.copy().run(tell, self._on_loss, what, messages)

    def somebody_listens(self) -> None:
        """Notify that somebody may listen where nobody did before."""
        if self.was_unheard:
            self.was_unheard = False
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


def is_of_the_network(status: UStatus) -> bool:
    """True if the network has failed; False if only the receiver of this message is missing."""
    return status.code == UCode.UNAVAILABLE and not is_nobody_listening(status)


PLUGIN: Final = TransportPlugin("local", LocalConfig, LocalTransport, LocalTransport.capabilities)
