"""Endpoints: a name, authorities, and the transport of one network. The table finds the endpoint of an authority.

authority -> Endpoints.owner -> Endpoint      the name itself, else the longest suffix (*.vin123), else "*"
Endpoint.send_batch -> Sends -> transport      a call that does not return is cancelled
Endpoint.open, ... -> transport   any exception of a plugin becomes a UStatusError, and a trouble of that endpoint
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence, Sized
from typing import Any, Final, TypeVar, cast

import structlog

from streamer.egress.sender import Sends
from streamer.walk.names import Names, Twins, ambiguous
from transports.base import stopped
from uprotocol import uri as uris
from uprotocol.cache import Cache
from uprotocol.encoded import EncodedMessage
from uprotocol.status import OK, RETRYABLE, UStatusError
from uprotocol.transport import Capability, HeardCallback, UListener, UTransport
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.umessage_pb2 import UMessage
from uprotocol.v1.uri_pb2 import UUri
from uprotocol.v1.ustatus_pb2 import UStatus

# cached owners; enough for thousands of vehicles, and a limit if somebody makes up names
AUTHORITIES_CACHED_MAX: Final = 65_536
TRIES_ALONE: Final = 3  # of a message on which a transport fails: the failure may have another cause
# of messages that were refused, or to which nobody listened
ADDRESSES_CACHED_MAX: Final = 8_192

T = TypeVar("T")
log = structlog.get_logger()


class FaultError(UStatusError):
    """A plugin raised an exception other than UStatusError, or returned a wrong answer."""


class Endpoint:
    """One network. It counts messages: `received`, `forwarded`, and `dropped` by reason.

    On its network our authority NAME is called NAME.suffix. A `suffix` of "" means that none is needed; None means
    that none was configured.

    A plugin that raises anything but UStatusError has a fault: `faults` counts it, `fault` describes it until the next
    call succeeds, and the call answers UNAVAILABLE, so that it is tried again.
    """

    # set by `Endpoints`: the names of our authorities on this network, if they differ from those inside
    names: Names | None = None
    # set by the owner: the network answers `status.nobody_listens` to a publish without listeners
    tells_absence = False

    def __init__(self, name: str, authorities: Iterable[str], transport: UTransport, suffix: str | None = None) -> None:
        self.name, self.suffix = name, suffix
        self.faults, self.fault = 0, ""
        self._last_fault = ""
        self.authorities = frozenset(authorities)
        self.transport = transport
        self.sends = Sends(name, self._send, lambda: self.in_flight_messages)
        self.twins = Twins(lambda: asyncio.get_running_loop().time())
        self._addressed: Cache[bytes, tuple[str, str]] = Cache(ADDRESSES_CACHED_MAX)
        self.received = 0
        self.forwarded = 0
        self.dropped: Counter[str] = Counter()

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

    async def register_listener(
        self, source_filter: UUri, listener: UListener, sink_filter: UUri | None = None
    ) -> None:
        if self.names is not None:
            source_filter, sink_filter = self.names.filter(source_filter, sink_filter)
        await self._guarded(self.transport.register_listener, source_filter, listener, sink_filter)

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

    async def send(self, message: UMessage) -> None:
        """Raises UStatusError."""
        (status,) = await self.send_batch([EncodedMessage.of(message)])
        if status.code:
            raise UStatusError.from_status(status)

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

    def on_heard(self, callback: HeardCallback) -> None:
        """See UTransport.on_heard."""
        subscribe = getattr(self.transport, "on_heard", None)
        if subscribe is not None:
            subscribe(callback)

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
    def in_flight_messages(self) -> int:
        """See UTransport.in_flight_messages. 0 while the transport has a fault, when each message is tried alone."""
        return 0 if self.fault else int(getattr(self.transport, "in_flight_messages", 0))

    @property
    def connected(self) -> bool:
        return bool(self.transport.connected)

    def all_registered(self) -> None:
        """See UTransport.all_registered. Never raises."""
        all_registered = getattr(self.transport, "all_registered", None)
        try:
            if all_registered is not None:
                all_registered()
        except Exception:
            log.exception("a transport failed when it was told that all listeners are registered", endpoint=self.name)

    @property
    def troubles(self) -> list[str]:
        """Returns sentences about faults of the network or its transport."""
        own = filter(None, (self.sends.trouble, self.fault))
        return [*own, *getattr(self.transport, "troubles", ())]

    def __repr__(self) -> str:
        counts = f"received={self.received}, forwarded={self.forwarded}"
        return f"Endpoint({self.name}, {','.join(sorted(self.authorities))}, {counts})"


class Endpoints:
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
        self._named |= dict.fromkeys(endpoint.authorities, endpoint)
        self._forget_owners()
        endpoint.names = Names(endpoint.suffix, self._is_inside) if endpoint.suffix else None

    def remove(self, endpoint: Endpoint) -> None:
        del self._by_name[endpoint.name]
        for authority in endpoint.authorities:
            del self._named[authority]
        self._forget_owners()

    def _forget_owners(self) -> None:
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
            for note in (*getattr(endpoint.transport, "notes", ()), *endpoint.twins.notes())
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
