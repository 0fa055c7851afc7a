"""uP-L1: the interface of a transport (spec up-l1/README.adoc). All layers above use only this interface.

send_batch ->  network  -> on_receive_batch            push, with "ack last": a message is acknowledged to the network
                        -> receive                     only after the listener's awaitable has completed
"""

from __future__ import annotations

import abc
import asyncio
import enum
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol, Self, runtime_checkable

from uprotocol import uri as uris
from uprotocol.encoded import EncodedMessage
from uprotocol.status import OK, UStatusError, invalid
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.umessage_pb2 import UMessage
from uprotocol.v1.uri_pb2 import UUri
from uprotocol.v1.ustatus_pb2 import UStatus

MESSAGE_BYTES_MAX: Final = 1 << 20  # payload bytes; the default of UTransport.message_bytes_max
# bytes that a network may carry beside the payload: attributes, properties, and the columns of a page of history
ENVELOPE_BYTES_MAX: Final = 64 << 10


class Capability(enum.Flag):
    """What a transport can do. An operation that it does not declare fails with the documented error; the conformance
    suite checks that."""

    NONE = 0
    PUSH = enum.auto()  # register_listener, unregister_listener; else UNIMPLEMENTED
    PULL = enum.auto()  # receive; else UNIMPLEMENTED
    # the network keeps a message until the listener's awaitable has completed; else it delivers the message again
    ACK = enum.auto()
    PERSISTENT_SESSION = enum.auto()  # messages that arrive while we are away are delivered after the reconnect
    WILDCARD_SOURCE = enum.auto()  # (FFFF, none) and other source patterns without sink; else INVALID_ARGUMENT
    # without it a publish needs the streamer's sink (MQTT off-vehicle), or fails with INVALID_ARGUMENT
    PUBLISH_WITHOUT_SINK = enum.auto()
    # `send_batch` also accepts EncodedMessages (uprotocol.encoded) and sends them without parsing
    ENCODED = enum.auto()
    # `send_batch` reports that nobody listens at the address of a publish (see UTransport.tells_absence)
    ABSENCE = enum.auto()


@runtime_checkable
class UListener(Protocol):
    """Receives messages on the event loop, in arrival order.

    If a listener also has `on_receive_batch(messages: Sequence[UMessage])`, that is called instead, with all messages
    that arrived together. Either may return an awaitable: the message counts as received when it completes.
    """

    def on_receive(self, message: UMessage) -> Awaitable[None] | None:
        """Takes a message. The network has an acknowledgement once the returned awaitable has completed."""


@runtime_checkable
class UBatchListener(Protocol):
    """The optional batch method of a listener."""

    def on_receive_batch(self, messages: Sequence[UMessage]) -> Awaitable[None] | None:
        """Takes messages in their order. The awaitable: as of `on_receive`, for all of them."""


class EncodedListener(abc.ABC):
    """A listener that gets EncodedMessages, with all that arrived together in one call.

    For a transport without EncodedMessages it is a UBatchListener like any other.
    """

    @abc.abstractmethod
    def on_receive_encoded(self, messages: Sequence[EncodedMessage]) -> Awaitable[None] | None: ...

    def on_receive_batch(self, messages: Sequence[UMessage]) -> Awaitable[None] | None:
        return self.on_receive_encoded([EncodedMessage.of(message) for message in messages])

    def on_receive(self, message: UMessage) -> Awaitable[None] | None:
        return self.on_receive_batch([message])


class LocalUriProvider:
    """The own authority, entity and version (dsn~localuriprovider-declaration~1)."""

    def __init__(self, authority: str, ue_id: int, version: int) -> None:
        self._source = uris.uri(authority, ue_id, version, uris.RESOURCE_REPLY)
        if not authority or uris.has_wildcard(self._source):
            raise invalid(f"a local uEntity has a concrete authority, id and version, got {uris.format(self._source)}")

    def get_authority(self) -> str:
        """Returns the authority of this uEntity."""
        return self._source.authority_name

    def get_source(self) -> UUri:
        """The own address, with resource 0: the sink of responses and notifications."""
        return self.get_resource(uris.RESOURCE_REPLY)

    def get_resource(self, resource_id: int) -> UUri:
        """Returns the address of a resource of this uEntity."""
        source = self._source
        return uris.uri(source.authority_name, source.ue_id, source.ue_version_major, resource_id)

    def __repr__(self) -> str:
        return f"LocalUriProvider({uris.format(self._source)})"


class ProbeVerdict(enum.StrEnum):
    """Of one result of a probe."""

    OK = "ok"
    FAIL = "FAIL"
    UNKNOWN = "?"  # can't be known, or not without disturbing somebody


class ProbeResult(NamedTuple):
    """One thing that `UTransport.probe` has found out, in one line: "may not write vehicle1/cloud (Not authorized)"."""

    verdict: ProbeVerdict
    what: str


@dataclass(frozen=True)
class ProbeRequest:
    """What the owner of a transport needs from its network. Addresses have the names of that network."""

    filters: Sequence[tuple[UUri, UUri | None]] = ()
    """source filter and sink filter of each listener that it will register"""
    sends: Sequence[tuple[UUri, UUri | None]] = ()
    """source and sink of messages that it will send; some stand for many"""
    is_running: bool = False
    """another process of this owner has the same settings open: the probe must not disturb it"""
    is_connected: bool | None = None
    """that process is connected to the network; None: unknown"""
    has_received: bool = False
    """that process has received messages from the network"""
    take_over: bool = False
    """the probe may end the connection of another client that uses our name, or our session"""


class TtlCounts(NamedTuple):
    """Counts of valid messages with a ttl that arrived."""

    arrived: int = 0
    expired: int = 0  # of these, on arrival
    ages_ms: tuple[int, ...] = ()  # of the last expired ones: our time minus the time of their ids


ConnectionCallback = Callable[[bool], None]
LossCallback = Callable[[str, int | None], None]
HeardCallback = Callable[[Sequence[str] | None], None]


class UTransport(abc.ABC):
    """A network that carries UMessages. All methods run on one event loop, and none blocks it.

    Every error is a UStatusError: a transport translates what libraries and the system raise. After UNAVAILABLE and
    DEADLINE_EXCEEDED the caller may try again, after other codes it must not. A cancellation is passed on unchanged; if
    `open` is cancelled, the transport is closed.
    """

    capabilities: Capability = Capability.NONE
    only_listens: bool = False
    """True if peers connect to this transport and it connects to none: then having no peer is not an error."""
    message_bytes_max: int = MESSAGE_BYTES_MAX
    """Set by the owner before `open`. A message whose attributes and payload together exceed this limit plus
    ENVELOPE_BYTES_MAX is not accepted from the network: it is counted as dropped ("too_large"), and the peer gets an
    error if the protocol allows it. `send_batch` answers INVALID_ARGUMENT for it."""

    @property
    def wire_bytes_max(self) -> int:
        """The maximal bytes of one message in the network, attributes and payload together."""
        return self.message_bytes_max + ENVELOPE_BYTES_MAX

    in_flight_messages: int = 0
    """How many messages a sender may have in flight (sent but not answered). It may change at any time.
    0: a sender waits for the answers to one batch before it sends the next. Otherwise several calls of `send_batch` may
    run at once: their messages are sent in the order of the calls. After a failure the transport sends no message of a
    later call until the failed call has returned."""

    refused: dict[str, int] | None = None
    """Set by the owner: source authorities (by their names in the network) whose messages are discarded for now, with
    a count for each. A transport that knows the authority without parsing the message counts the message here and
    drops it; another one leaves that to its listeners. Requests are delivered all the same, so that their callers get
    an error, and so is what the network has acknowledged to its sender."""

    tells_absence: bool = False
    """Set by the owner, at any time. If True, a transport with Capability.ABSENCE answers `status.nobody_listens` for a
    publish or request if the network knows that nobody listens at its address: nobody received it, and the owner sends
    it again later (a request for a moment only). The following messages of the same call with the same address get the
    same answer. If False, it answers OK, as without the capability. As long as the network does not know, somebody is
    assumed to listen."""

    def address_of(self, source: UUri, sink: UUri | None) -> str:
        """The name by which the network routes a message with these addresses (MQTT: the topic). Access rules and
        listeners of the network refer to it. If the network refuses an address, `send_batch` answers PERMISSION_DENIED
        or UNAUTHENTICATED for all messages with it. At most 1,024 characters; pure."""
        return uris.format(source) if sink is None else f"{uris.format(source)} {uris.format(sink)}"

    def on_heard(self, callback: HeardCallback) -> None:
        """Call `callback(addresses)` on the event loop when somebody starts to listen at addresses (`address_of`) for
        which `send_batch` answered `nobody_listens`; None: possibly at any of them. A network without such an event
        never calls: the owner then has to try again by itself."""

    async def open(self) -> None:
        """Connect. Raises UNAVAILABLE if the network can't be reached, UNAUTHENTICATED or PERMISSION_DENIED if it
        refuses the connection.

        It may also return before there is a connection, and connect later by itself. After a failure it may be called
        again; the failed call leaves nothing behind. If the transport is open or being opened, it changes nothing.
        """

    async def close(self) -> None:
        """Drain and disconnect: messages for which `send_batch` answered OK are sent, or their loss is logged. Raises
        nothing; may be called twice.

        A running call of `send_batch` ends, with UNAVAILABLE for each message that is not answered yet. `open` may be
        called again afterwards: then the owners of listeners register them again, which changes nothing if the
        transport still has them.
        """

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def connected(self) -> bool:
        """False before `open`, after `close`, and while the network is known to be away. A transport that can't know
        returns True while it is open."""
        return True

    @property
    def away_because(self) -> str:
        """Why `connected` is False, as a sentence: the last error of the network or its broker. "" while there is a
        connection, or if the reason is unknown. It may change while the network is away."""
        return ""

    def on_connection(self, callback: ConnectionCallback) -> None:
        """Call `callback(connected)` on the event loop once after each change of `connected`.

        The first connection is reported like any other, whether it is made within `open` or later; so is the end by
        `close`. A callback that is added later gets the next change; read `connected` for the current value. An
        exception of a callback has no effect on others.
        """

    def on_loss(self, callback: LossCallback) -> None:
        """Call `callback(text, messages)` on the event loop when messages for us were lost in the network. To be called
        before `open`.

        `text` is one line: what happened, and where. `messages` is the maximal number of lost messages; None if it is
        unknown. Each loss is reported once. A network that loses nothing, or can't detect it, never calls.
        """

    def remember_in(self, file: str) -> None:
        """Use `file` to keep what the next process needs to report losses and to end subscriptions that are no longer
        wanted, and read what the previous process stored there. To be called before `open`.

        The folder of `file` exists. Without this call only losses within one process are reported. A transport that has
        nothing to store creates no file.
        """

    @property
    def resumed_session(self) -> bool:
        """The first connection of this object has found a session in the network that an earlier process had left."""
        return False

    def all_registered(self) -> None:
        """The owner calls this when it has registered all listeners of an earlier process that it still wants. From
        then on messages of a persistent session without a listener need not wait for one; without this call they wait
        for some time. On the event loop, while the transport is open; may be called again."""

    @property
    def troubles(self) -> list[str]:
        """Current problems while the network is available, as sentences that name the cause. Past losses are reported
        by `on_loss`."""
        return []

    @property
    def notes(self) -> list[str]:
        """Information for the operator that is not a problem, for example a limit of the network that is lower than the
        configured value."""
        return []

    # What a transport counts. These defaults count nothing; the conformance suite needs `dropped`.
    @property
    def dropped(self) -> Counter[str]:
        """Messages thrown away on arrival, by reason: malformed, too_large, invalid, expired, ..."""
        return Counter()

    @property
    def mended(self) -> Counter[str]:
        """Messages taken without a field that was invalid, by the field: traceparent."""
        return Counter()

    @property
    def unprobed(self) -> int:
        """Messages sent without knowing, despite `tells_absence`, whether anybody listens: a limit was reached."""
        return 0

    @property
    def left_unacknowledged(self) -> int:
        """Times that a receiver left the network before it had acknowledged what was sent to it."""
        return 0

    def take_ttl_counts(self) -> TtlCounts:
        """Returns the counts since the last call, so there should be one caller: the owner, which compares clocks."""
        return TtlCounts()

    async def probe(self, asked: ProbeRequest) -> AsyncGenerator[ProbeResult, None]:
        """Find out whether the network can be reached with these settings, and allows what the owner needs; yields one
        result after the other. For a closed transport; afterwards it is closed. `up-streamer check --connect` calls it,
        and ends it after some seconds.

        It disturbs nobody: no message reaches a listener, no session of our name is opened (but with
        `asked.take_over`), and nothing is left in the network. What can't be found out so is ProbeVerdict.UNKNOWN.
        """
        if asked.is_running or (Capability.PERSISTENT_SESSION in self.capabilities and not asked.take_over):
            why = "the streamer that runs" if asked.is_running else "a session of our name (--take-over tries it)"
            yield ProbeResult(ProbeVerdict.UNKNOWN, f"whether it can be opened: that could disturb {why}")
            return
        try:
            await self.open()
            reached = "opened, and connected" if self.connected else "opened, and no other end is there yet"
            yield ProbeResult(ProbeVerdict.OK, reached)
        except UStatusError as error:
            yield ProbeResult(ProbeVerdict.FAIL, error.message)
        finally:
            await self.close()

    @abc.abstractmethod
    async def send_batch(self, messages: Sequence[UMessage]) -> list[UStatus]:
        """Send in order, also in the order of the calls. Returns one status for each message: OK when the network has
        accepted it (MQTT: PUBACK).

        The status is INVALID_ARGUMENT for an invalid message and DEADLINE_EXCEEDED for an expired one; neither stops
        the others. After a failure of the network (UNAVAILABLE) no later message with the same source, sink and
        priority is sent, so that a retry keeps the order. The others may be sent, if only one receiver failed. If the
        network knows that a request has no receiver, its status is `status.nobody_listens`: UNAVAILABLE as well, but of
        that request only. The same holds for a publish if the owner has set `tells_absence`.

        If the network refuses an address (an access rule, a forbidden name), the status is PERMISSION_DENIED or
        UNAUTHENTICATED; messages with other addresses are sent.
        """

    async def send(self, message: UMessage) -> None:
        """Send one message. Raises UStatusError."""
        (status,) = await self.send_batch([message])
        if status.code:
            raise UStatusError.from_status(status)

    async def receive(self, source_filter: UUri, sink_filter: UUri | None = None) -> UMessage:
        """Returns the oldest message that matches and has not expired. Raises NOT_FOUND, or UNIMPLEMENTED without
        Capability.PULL."""
        raise UStatusError(UCode.UNIMPLEMENTED, f"{type(self).__name__} delivers by push only: use register_listener")

    async def register_listener(
        self, source_filter: UUri, listener: UListener, sink_filter: UUri | None = None
    ) -> None:
        """Deliver messages that match to `listener`. Without `sink_filter` only messages without sink match.

        Repeating it changes nothing. Raises UNIMPLEMENTED without Capability.PUSH, INVALID_ARGUMENT for a pair of
        filters that the specification does not list, RESOURCE_EXHAUSTED at a limit.
        """
        raise UStatusError(UCode.UNIMPLEMENTED, f"{type(self).__name__} delivers by pull only: use receive")

    async def register_listeners(
        self, filters: Iterable[tuple[UUri, UUri | None]], listener: UListener
    ) -> list[UStatus]:
        """Call register_listener for each (source filter, sink filter), all at the same time: pass some hundred at
        most. Returns one status for each; a pair whose status is not OK is not registered."""

        async def register(source_filter: UUri, sink_filter: UUri | None) -> UStatus:
            try:
                await self.register_listener(source_filter, listener, sink_filter)
            except UStatusError as error:
                return error.status
            return OK

        return list(await asyncio.gather(*(register(*pair) for pair in filters)))

    def register_before_open(self, filters: Sequence[tuple[UUri, UUri | None]], listener: UListener) -> list[UStatus]:
        """Register `listener` for each (source filter, sink filter) before `open`, so that `open` subscribes in the
        network before anybody can send to us. Returns one status for each; does no I/O.

        A pair with status OK is registered, and is unregistered as usual while the transport is open. Registering it
        again after `open` changes nothing, and returns the answer of the network. A transport that can't do this
        answers UNAVAILABLE, like this default: register the listeners after `open`.
        """
        why = f"{type(self).__name__} takes listeners only while it is open: register them after open"
        return [UStatus(code=UCode.UNAVAILABLE, message=why)] * len(filters)

    async def unregister_listener(
        self, source_filter: UUri, listener: UListener, sink_filter: UUri | None = None
    ) -> None:
        """Undo register_listener. Raises UNIMPLEMENTED, INVALID_ARGUMENT, or NOT_FOUND if there is no such
        registration."""
        raise UStatusError(UCode.UNIMPLEMENTED, f"{type(self).__name__} delivers by pull only: use receive")
