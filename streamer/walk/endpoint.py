"""Endpoints: a name, authorities, and the transport of one network. The table finds the endpoint of an authority.

authority -> Endpoints.owner -> Endpoint      the name itself, else the longest suffix (*.vin123), else "*"
Endpoint.send_batch -> Sends -> transport
    a call returns    -> answered; what fails is sent again by its owner
    not within ms_max -> all calls under way are answered UNAVAILABLE and cancelled. `hung` is set: nothing is sent
                         until the transport was closed and opened again (networks.py). A later answer is ignored
Endpoint.open, ... -> transport   any exception of a plugin becomes a UStatusError, and a trouble of that endpoint
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence, Sized
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final, TypeVar, cast

import structlog

from streamer.reporting import Reporter
from streamer.spans import MessageSpans
from streamer.walk.names import Names, Twins, ambiguous
from transports.base import NOT_TRIED, stopped
from uprotocol import callbacks
from uprotocol import uri as uris
from uprotocol import uuid as uuids
from uprotocol.cache import Cache
from uprotocol.callbacks import Remove
from uprotocol.encoded import EncodedMessage
from uprotocol.status import OK, RETRYABLE, UStatusError
from uprotocol.transport import Capability, ConnectionCallback, HeardCallback, UListener, UTransport
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.uri_pb2 import UUri
from uprotocol.v1.ustatus_pb2 import UStatus

# Well above the limits of our transports: MQTT ends an idle connection after 20 s, a Zenoh put waits 5 s for a peer
# that does not read, a DDS write 4 s for a slow receiver
SEND_MS_MAX: Final = 60_000
# Gives a call more time for the bytes under way: a slow link (64 kbit/s) is no hang
BYTES_PER_S_MIN: Final = 8 << 10
ENVELOPE_BYTES: Final = 256  # about the size of a message without its payload
# cached owners; enough for thousands of vehicles, and a limit if somebody makes up names
AUTHORITIES_CACHED_MAX: Final = 65_536
TRIES_ALONE: Final = 3  # of a message on which a transport fails: the failure may have another cause
# of messages that were refused, or to which nobody listened
ADDRESSES_CACHED_MAX: Final = 8_192

REOPENED: Final = UStatus(
    code=UCode.UNAVAILABLE, message="the transport did not return, and is opened again: this is sent again after that"
)
BEHIND: Final = UStatus(code=UCode.UNAVAILABLE, message=NOT_TRIED)

T = TypeVar("T")
Statuses = list[UStatus]
log = structlog.get_logger()


class FaultError(UStatusError):
    """A plugin raised an exception other than UStatusError, or returned a wrong answer."""


class Endpoint:
    """One network. It counts messages: `received`, `forwarded`, the same by the endpoint that they came from, and
    `dropped` by reason.

    On its network our authority NAME is called NAME.suffix. A `suffix` of "" means that none is needed; None means
    that none was configured.

    A plugin that raises anything but UStatusError has a fault: `faults` counts it, `fault` describes it until the next
    call succeeds, and the call answers UNAVAILABLE, so that it is tried again.

    Its state: those counts and faults, and the addresses that it has looked up. Everything else is set once, by its
    owner, or belongs to `sends`, `twins` and the transport.
    """

    # set by `Endpoints`: the names of our authorities on this network, if they differ from those inside
    names: Names | None = None
    # set by the owner: the network answers `status.nobody_listens` to a publish without listeners
    tells_absence = False
    spans: MessageSpans | None = None  # set by the owner: what traces its messages

    def __init__(self, name: str, authorities: Iterable[str], transport: UTransport, suffix: str | None = None) -> None:
        self.name, self.suffix = name, suffix
        self.faults, self.fault = 0, ""
        self._last_fault = ""
        self.authorities = frozenset(authorities)
        self.transport = transport
        self.sends = Sends(name, self._send)
        self.twins = Twins(lambda: asyncio.get_running_loop().time())
        self._addressed: Cache[bytes, tuple[str, str]] = Cache(ADDRESSES_CACHED_MAX)
        self._connection_callbacks: list[ConnectionCallback] = []
        self._heard_callbacks: list[HeardCallback] = []
        self.received = 0
        self.forwarded = 0
        self.forwarded_from: Counter[str] = Counter()  # by name of the endpoint that has their source
        self.dropped: Counter[str] = Counter()
        self._listen()

    def change(self, authorities: Iterable[str], transport: UTransport, suffix: str | None) -> None:
        """Take other names and another transport, which is not open yet; the old one is closed. `Endpoints.changed`
        has to be called in the same step."""
        self.dropped.update(self.transport.dropped)
        self.sends.interrupt()
        if suffix != self.suffix:
            self.names = None
        self.authorities, self.transport, self.suffix, self.fault = frozenset(authorities), transport, suffix, ""
        self._addressed.clear()
        self._listen()

    def on_connection(self, callback: ConnectionCallback) -> Remove:
        """See UTransport.on_connection; also for each transport that replaces this one. Returns a function that removes
        the callback."""
        return callbacks.add(self._connection_callbacks, callback)

    def on_heard(self, callback: HeardCallback) -> Remove:
        """See UTransport.on_heard; otherwise as `on_connection`."""
        return callbacks.add(self._heard_callbacks, callback)

    def _listen(self) -> None:
        """Pass on what the transport reports, until another one replaces it."""
        transport = self.transport

        def connection(connected: bool) -> None:
            for callback in list(self._connection_callbacks) if self.transport is transport else ():
                callback(connected)

        def heard(addresses: Sequence[str] | None) -> None:
            for callback in list(self._heard_callbacks) if self.transport is transport else ():
                callback(addresses)

        transport.on_connection(connection)
        transport.on_heard(heard)

    @property
    def only_authority(self) -> str:
        """Its authority if it has exactly one, and "" otherwise: then an address without authority is ambiguous."""
        first, *others = self.authorities
        return "" if others or first.startswith(uris.WILDCARD_AUTHORITY) else first

    @property
    def needs_sink(self) -> bool:
        """True if a publish is sent with the streamer's sink, once per subscribing authority (MQTT off-vehicle)."""
        return Capability.PUBLISH_WITHOUT_SINK not in self.transport.capabilities

    # Calls of the transport, with every exception translated

    async def open(self) -> None:
        await self._guarded(self.transport.open)

    async def close(self) -> None:
        await self._guarded(self.transport.close)

    async def register_listeners(
        self, filters: Sequence[tuple[UUri, UUri | None]], listener: UListener
    ) -> list[UStatus]:
        """See UTransport.register_listeners. Never raises."""
        named = filters if self.names is None else [self.names.filter(*pair) for pair in filters]
        try:
            return await self._guarded(self.transport.register_listeners, named, listener, answers=len(named))
        except UStatusError as error:
            return [error.status] * len(named)

    def register_before_open(self, filters: Sequence[tuple[UUri, UUri | None]], listener: UListener) -> list[UStatus]:
        """See UTransport.register_before_open. Never raises."""
        named = filters if self.names is None else [self.names.filter(*pair) for pair in filters]
        try:
            statuses = self.transport.register_before_open(named, listener)
        except Exception as error:
            return [self._failed(f"register_before_open raised {error!r}", error).status] * len(named)
        if len(statuses) != len(named):
            return [self._failed(f"{len(named)} filters were answered by {len(statuses)} statuses").status] * len(named)
        return statuses

    async def unregister_listener(
        self, source_filter: UUri, listener: UListener, sink_filter: UUri | None = None
    ) -> None:
        if self.names is not None:
            source_filter, sink_filter = self.names.filter(source_filter, sink_filter)
        await self._guarded(self.transport.unregister_listener, source_filter, listener, sink_filter)

    async def send_batch(self, messages: Sequence[EncodedMessage]) -> list[UStatus]:
        """Send messages encoded or decoded, as the transport needs them. Never raises; the statuses are UNAVAILABLE if
        the transport does not return (Sends)."""
        return await self.sends.begin(messages)

    def address_of(self, source: UUri, sink: UUri | None) -> str:
        """See UTransport.address_of, for addresses with the names inside. Never raises."""
        if self.names is not None:
            source, sink = self.names.filter(source, sink)
        try:
            return self.transport.address_of(source, sink)
        except Exception as error:
            self._failed(f"address_of raised {error!r}", error)
            return f"{uris.format(source)} {'' if sink is None else uris.format(sink)}"

    def addressed(self, message: EncodedMessage) -> tuple[str, str]:
        """Returns the `address_of` a message, and the authority of its source."""
        found = self._addressed.get(message.stamp.address)
        if found is None:
            attributes = message.stamp.attributes
            sink = attributes.sink if attributes.HasField("sink") else None
            found = self.address_of(attributes.source, sink), attributes.source.authority_name
            self._addressed[message.stamp.address] = found
        return found

    async def _send(self, messages: Sequence[EncodedMessage]) -> list[UStatus]:
        """Never raises.

        If the transport fails on a batch, each message is tried alone. A message on which it fails while others pass
        is answered INTERNAL, which is final.
        """
        if self.names is not None:
            messages = [self.names.leave(message) for message in messages]
        carried: Sequence[Any] = messages
        if Capability.ENCODED not in self.transport.capabilities:
            carried = [message.decoded() for message in messages]
        try:
            statuses = await self.transport.send_batch(carried)
        except UStatusError as error:
            statuses = [error.status] * len(carried)
        except Exception as error:
            return await self._send_one_by_one(carried, self._failed(f"send_batch raised {error!r}", error))
        if len(statuses) != len(carried):
            what = f"{len(carried)} messages were answered by {len(statuses)} statuses"
            return await self._send_one_by_one(carried, self._failed(what))
        self.fault = ""
        return statuses

    async def _send_one_by_one(self, messages: Sequence[Any], fault: FaultError) -> list[UStatus]:
        if len(messages) == 1:
            return [fault.status]
        statuses: list[UStatus] = []
        faulty: list[int] = []
        for number, message in enumerate(messages):
            status, is_faulty = await self._send_alone(message)
            if is_faulty:
                faulty.append(number)
            elif status.code in RETRYABLE:
                stopped(statuses, len(messages), status)
                break
            statuses.append(status)
        if any(status is OK or not status.code for status in statuses):
            for number in faulty:
                statuses[number] = UStatus(code=UCode.INTERNAL, message=statuses[number].message)
        return statuses

    async def _send_alone(self, message: Any) -> tuple[UStatus, bool]:
        """Returns its status, and whether the transport has failed on it."""
        for _ in range(TRIES_ALONE):
            try:
                (status,) = await self._guarded(self.transport.send_batch, [message], answers=1)
                return status, False
            except FaultError as fault:
                answer = fault.status
            except UStatusError as error:
                return error.status, False
        return answer, True

    async def _guarded(self, call: Callable[..., Awaitable[T]], *arguments: Any, answers: int | None = None) -> T:
        """Call the transport. `answers`: how many statuses it has to return."""
        try:
            result = await call(*arguments)
        except UStatusError:
            self.fault = ""
            raise
        except Exception as error:
            raise self._failed(f"{call.__name__} raised {error!r}", error) from error
        if answers is not None and (given := len(cast(Sized, result))) != answers:
            raise self._failed(f"{answers} messages were answered by {given} statuses")
        self.fault = ""
        return result

    def _failed(self, why: str, error: BaseException | None = None) -> FaultError:
        self.faults += 1
        is_other, self.fault = why != self._last_fault, f"its transport has a fault: {why}"
        self._last_fault = why
        if is_other or self.faults & (self.faults - 1) == 0:  # log the 1st, 2nd, 4th, ... fault: every message may fail
            what = "a transport has a fault; trying again"
            log.error(what, endpoint=self.name, faults=self.faults, why=self.fault, exc_info=error)
        return FaultError(UCode.UNAVAILABLE, self.fault)

    @property
    def all_dropped(self) -> Counter[str]:
        """Returns the drops by reason, with those of the transport."""
        return self.dropped + Counter(self.transport.dropped)

    @property
    def in_flight_messages(self) -> int:
        """See UTransport.in_flight_messages. 0 while the transport has a fault, when each message is tried alone."""
        return 0 if self.fault else self.transport.in_flight_messages

    @property
    def connected(self) -> bool:
        return bool(self.transport.connected)

    def all_registered(self) -> None:
        """See UTransport.all_registered. Never raises."""
        try:
            self.transport.all_registered()
        except Exception:
            log.exception("a transport failed when it was told that all listeners are registered", endpoint=self.name)

    @property
    def troubles(self) -> list[str]:
        """Returns sentences about faults of the network or its transport."""
        own = filter(None, (self.sends.trouble, self.fault))
        return [*own, *self.transport.troubles]

    def __repr__(self) -> str:
        counts = f"received={self.received}, forwarded={self.forwarded}"
        return f"Endpoint({self.name}, {','.join(sorted(self.authorities))}, {counts})"


@dataclass(eq=False, slots=True)
class _SendCall:
    messages: int
    bytes: int
    began: float  # loop time
    due: float  # loop time: if it has not returned by then, it hangs
    answer: asyncio.Future[Statuses]
    on_answer: Callable[[Statuses], None]
    task: asyncio.Task[None] | None = None


class Sends:
    """The calls of `send_batch` of one transport, and how they end if it hangs. Lives on the event loop."""

    def __init__(self, name: str, send: Callable[[Sequence[EncodedMessage]], Awaitable[Statuses]]) -> None:
        """`send` hands messages to the network; it never raises."""
        self._name, self._send = name, send
        self.ms_max = SEND_MS_MAX
        self.hung = asyncio.Event()
        self.hangs = 0
        self.trouble = ""  # says since when no call has returned; empty once one does
        self._calls: dict[_SendCall, None] = {}  # in the order in which they began
        self._bytes = 0  # of all these calls
        self._timer: asyncio.TimerHandle | None = None

    def __repr__(self) -> str:
        return f"Sends({self._name}, under_way={len(self._calls)}, hangs={self.hangs})"

    def begin(
        self,
        messages: Sequence[EncodedMessage],
        on_answer: Callable[[Statuses], None] = lambda _: None,
        is_held: Callable[[], bool] = lambda: False,
    ) -> asyncio.Future[Statuses]:
        """Send the messages behind what is under way. Returns one status for each. Cancelling it cancels the call.

        `on_answer` is called in the loop step in which the network answers. Sending begins one loop step later; if
        `is_held` is true then, the messages are not sent and are answered UNAVAILABLE.
        """
        loop = asyncio.get_running_loop()
        octets = sum([len(message.payload) for message in messages]) + ENVELOPE_BYTES * len(messages)
        self._bytes += octets
        due = loop.time() + self.ms_max / 1_000 + self._bytes / BYTES_PER_S_MIN
        call = _SendCall(len(messages), octets, loop.time(), due, loop.create_future(), on_answer)
        self._calls[call] = None
        task = call.task = loop.create_task(self._run(call, messages, is_held))
        call.answer.add_done_callback(lambda answer: task.cancel() if answer.cancelled() else None)
        if self._timer is None:
            self._timer = loop.call_at(due, self._look)
        return call.answer

    async def _run(self, call: _SendCall, messages: Sequence[EncodedMessage], is_held: Callable[[], bool]) -> None:
        try:
            if self.hung.is_set() or is_held():
                statuses = [REOPENED if self.hung.is_set() else BEHIND] * call.messages
            else:
                statuses = await self._send(messages)
                if self.trouble and call in self._calls:
                    self._works()
            if call in self._calls and not call.answer.done():
                call.on_answer(statuses)
                call.answer.set_result(statuses)
        except asyncio.CancelledError:
            call.answer.cancel()
            raise
        finally:
            if call in self._calls:
                del self._calls[call]
                self._bytes -= call.bytes

    def _look(self) -> None:
        """If a call hangs, answer and cancel all calls: the transport is about to be closed."""
        loop = asyncio.get_running_loop()
        self._timer = None
        if not self._calls:
            return
        due = min(call.due for call in self._calls)
        if due > loop.time():
            self._timer = loop.call_at(due, self._look)
            return
        self.hangs += 1
        first = next(iter(self._calls))
        if not self.trouble:
            since = datetime.fromtimestamp(uuids.now_ms() / 1_000 - (loop.time() - first.began), UTC)
            self.trouble = (
                f"since {since.isoformat(timespec='seconds')} its transport does not return from sending within "
                f"{self.ms_max} ms (egress.send_ms_max): it is closed and opened again, and what was not answered is "
                "sent again"
            )
        calls = len(self._calls)
        log.error("a transport hangs", endpoint=self._name, calls=calls, hangs=self.hangs, why=self.trouble)
        self.hung.set()
        self.interrupt()

    def interrupt(self) -> None:
        """Answer all calls UNAVAILABLE, and cancel them: their transport is replaced, or is about to be closed."""
        calls = list(self._calls)
        self._calls.clear()
        self._bytes = 0
        for call in calls:
            if not call.answer.done():
                statuses = [REOPENED] * call.messages
                call.on_answer(statuses)
                call.answer.set_result(statuses)
        for call in calls:
            if call.task is not None:
                call.task.cancel()

    def resume(self) -> None:
        """Send again: the transport was reopened. It works if a call returns, or none is under way after `ms_max`."""
        self.hung.clear()
        asyncio.get_running_loop().call_later(self.ms_max / 1_000, self._check_trouble)

    def _check_trouble(self) -> None:
        if self.trouble and self.is_idle:
            self._works()

    def _works(self) -> None:
        log.info("a transport that did not return from sending works again", endpoint=self._name)
        self.trouble = ""

    @property
    def is_idle(self) -> bool:
        """True if no call is under way and none hangs."""
        return not self._calls and not self.hung.is_set()

    def close(self) -> None:
        """Send nothing more, and stop the timer, which would keep the endpoint in memory."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class Endpoints(Reporter):
    """All endpoints, and the owner of each authority."""

    def __init__(self, endpoints: Iterable[Endpoint]) -> None:
        self._by_name: dict[str, Endpoint] = {}
        self._named: dict[str, Endpoint] = {}  # by authority
        self._owners: Cache[str, Endpoint | None] = Cache(AUTHORITIES_CACHED_MAX)
        for endpoint in endpoints:
            self.add(endpoint)

    def add(self, endpoint: Endpoint) -> None:
        """Add an endpoint whose name and authorities no other one has."""
        self._by_name[endpoint.name] = endpoint
        self.changed()

    def remove(self, endpoint: Endpoint) -> None:
        del self._by_name[endpoint.name]
        self.changed()

    def changed(self) -> None:
        """Have all owners found again: endpoints have other authorities or suffixes."""
        self._named = {authority: endpoint for endpoint in self for authority in endpoint.authorities}
        for endpoint in self:
            if endpoint.names is None and endpoint.suffix:
                endpoint.names = Names(endpoint.suffix, self._is_inside)
        self._owners.clear()
        for endpoint in self:
            if endpoint.names is not None:
                endpoint.names.endpoints_changed()

    def __contains__(self, name: str) -> bool:
        return name in self._by_name

    def notes(self) -> list[str]:
        """Returns sentences about networks and names that an operator should know."""
        notes = [
            f"endpoint {endpoint.name}: {note}"
            for endpoint in self
            for note in (*endpoint.transport.notes, *endpoint.twins.notes())
        ]
        for outside in self:
            others = [other for other in self if other is not outside and not other.suffix]
            inside = {authority for other in others for authority in other.authorities}
            if outside.needs_sink and (names := ambiguous(outside.suffix, inside)):
                notes.append(
                    f"endpoint {outside.name}: it leads off the vehicle, where any vehicle may have our "
                    f"{', '.join(names)}; "
                    f'set suffix = "VIN" ({names[0]} is then {names[0]}.VIN there), or suffix = "" if no other '
                    "gateway has such names"
                )
        return notes

    def _is_inside(self, authority: str) -> bool:
        owner = None if uris.is_pattern(authority) else self.owner(authority)
        return owner is not None and not owner.suffix

    def __iter__(self) -> Iterator[Endpoint]:
        return iter(self._by_name.values())

    def __getitem__(self, name: str) -> Endpoint:
        return self._by_name[name]

    def owner(self, authority: str) -> Endpoint | None:
        """Returns the endpoint on whose network `authority` is, or None."""
        if authority not in self._owners:
            owners = (self._named[pattern] for pattern in uris.owners(authority) if pattern in self._named)
            self._owners[authority] = next(owners, None)
        return self._owners[authority]
