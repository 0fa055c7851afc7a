"""uP-L1: what a transport offers (spec up-l1/README.adoc). Everything above speaks to this, and to nothing else.

send_batch ->  network  -> on_receive_batch            push, with "ack last": the network is told that a message was
                        -> receive                     taken only after the listener's awaitable has completed
"""

from __future__ import annotations

import abc
import asyncio
import enum
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Final, Protocol, Self, runtime_checkable

from uprotocol import uri as uris
from uprotocol.encoded import EncodedMessage
from uprotocol.status import OK, UStatusError, invalid
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.umessage_pb2 import UMessage
from uprotocol.v1.uri_pb2 import UUri
from uprotocol.v1.ustatus_pb2 import UStatus

MESSAGE_BYTES_MAX: Final = 1 << 20  # of a payload, unless the owner of a transport says otherwise
# what a network may carry beside it: attributes, properties, and the columns of a page of history
ENVELOPE_BYTES_MAX: Final = 64 << 10


class Capability(enum.Flag):
    """What a transport declares. What it does not declare answers its documented error, and the conformance suite
    checks that."""

    NONE = 0
    PUSH = enum.auto()  # register_listener, unregister_listener; else UNIMPLEMENTED
    PULL = enum.auto()  # receive; else UNIMPLEMENTED
    # the network keeps a message until the listener's awaitable completed, and delivers it again otherwise
    ACK = enum.auto()
    PERSISTENT_SESSION = enum.auto()  # what arrives while we are away is delivered when we are back
    WILDCARD_SOURCE = enum.auto()  # (FFFF, none) and other source patterns without sink; else INVALID_ARGUMENT
    # else a publish needs the streamer's sink (MQTT off-vehicle); without it INVALID_ARGUMENT
    PUBLISH_WITHOUT_SINK = enum.auto()
    # `send_batch` also takes EncodedMessages (uprotocol.encoded), and sends them on without parsing them
    ENCODED = enum.auto()
    # `send_batch` says of a publish that nobody listens at its address (see UTransport.tells_absence)
    ABSENCE = enum.auto()


@runtime_checkable
class UListener(Protocol):
    """Receives messages on the event loop, in arrival order.

    A listener that also has `on_receive_batch(messages: Sequence[UMessage])` gets all that arrived together in one call
    of it instead. Either may return an awaitable: the message counts as taken when it completes.
    """

    def on_receive(self, message: UMessage) -> Awaitable[None] | None: ...


@runtime_checkable
class UBatchListener(Protocol):
    """What a listener may have beside `on_receive`."""

    def on_receive_batch(self, messages: Sequence[UMessage]) -> Awaitable[None] | None: ...


class EncodedListener(abc.ABC):
    """A listener that wants EncodedMessages, all that arrived together in one call.

    To a transport that has UMessages it is a listener like any other (UBatchListener).
    """

    @abc.abstractmethod
    def on_receive_encoded(self, messages: Sequence[EncodedMessage]) -> Awaitable[None] | None: ...

    def on_receive_batch(self, messages: Sequence[UMessage]) -> Awaitable[None] | None:
        return self.on_receive_encoded([EncodedMessage.of(message) for message in messages])

    def on_receive(self, message: UMessage) -> Awaitable[None] | None:
        return self.on_receive_batch([message])


class LocalUriProvider:
    """Who we are: own authority, entity and version (dsn~localuriprovider-declaration~1)."""

    def __init__(self, authority: str, ue_id: int, version: int) -> None:
        self._source = uris.uri(authority, ue_id, version, uris.RESOURCE_REPLY)
        if not authority or uris.has_wildcard(self._source):
            raise invalid(f"a local uEntity has a concrete authority, id and version, got {uris.format(self._source)}")

    def get_authority(self) -> str:
        return self._source.authority_name

    def get_source(self) -> UUri:
        """Own address, resource 0: where replies and notifications go."""
        return self.get_resource(uris.RESOURCE_REPLY)

    def get_resource(self, resource_id: int) -> UUri:
        source = self._source
        return uris.uri(source.authority_name, source.ue_id, source.ue_version_major, resource_id)

    def __repr__(self) -> str:
        return f"LocalUriProvider({uris.format(self._source)})"


ConnectionCallback = Callable[[bool], None]
LossCallback = Callable[[str, int | None], None]
HeardCallback = Callable[[Sequence[str] | None], None]


class UTransport(abc.ABC):
    """A network that carries UMessages. All methods run on one event loop, and none blocks it.

    Errors are UStatusError, and nothing else: whatever a library or the system raises is translated at the edge.
    UNAVAILABLE and DEADLINE_EXCEEDED may be tried again; anything else never is. Only a cancellation goes through as it
    is, and after one in `open` the transport is closed.
    """

    capabilities: Capability = Capability.NONE
    only_listens: bool = False
    """Others come to it, and it goes to nobody: that nobody is there just now is no trouble."""
    message_bytes_max: int = MESSAGE_BYTES_MAX
    """Set by the owner before `open`. What has more than ENVELOPE_BYTES_MAX beyond it, attributes and payload together,
    is not taken from the network: the peer is told where the protocol can, and it is counted as dropped ("too_large").
    Sent, it answers INVALID_ARGUMENT."""

    @property
    def wire_bytes_max(self) -> int:
        """Of one message as a network carries it, attributes and payload together."""
        return self.message_bytes_max + ENVELOPE_BYTES_MAX

    in_flight_messages: int = 0
    """So many messages may be unanswered before there is any use in waiting for the network; it may change at any time.
    0: whoever sends waits for the answers to one batch before it sends the next. Else several calls of `send_batch` may
    be under way: they leave in the order of the calls, and after a failure nothing of the calls behind it is begun, nor
    of a new one, until the call that failed has been answered."""

    refused: dict[str, int] | None = None
    """Set by the owner: source authorities, as the network names them, whose messages are not taken for now. A
    transport that can tell an authority without reading the message counts it here, and acknowledges it; one that can't
    leaves it to its listeners. Requests are taken all the same: their callers are told."""

    tells_absence: bool = False
    """Set by the owner, at any time. With Capability.ABSENCE a publish at whose address nobody listens, as far as the
    network knows, then answers `status.nobody_listens`: nobody has got it, and the owner sends it again later. After
    such an answer the messages of the same call with the same address are answered the same. False: it answers OK, as
    without the capability. An address of which the network knows nothing yet counts as listened to."""

    def address_of(self, source: UUri, sink: UUri | None) -> str:
        """The name by which the network routes a message with these addresses: what an access rule there allows or
        refuses, and what a listener there listens to (MQTT: the topic). `send_batch` answers PERMISSION_DENIED or
        UNAUTHENTICATED where the network refuses it: all messages with that address would be answered the same. At most
        1,024 characters; pure."""
        return uris.format(source) if sink is None else f"{uris.format(source)} {uris.format(sink)}"

    def on_heard(self, callback: HeardCallback) -> None:
        """`callback(addresses)` on the event loop when somebody listens at addresses (`address_of`) that were answered
        `nobody_listens` before; None: at any of them, perhaps. A network without such an event never calls: the owner
        tries again by itself."""

    async def open(self) -> None:
        """Connect. Raises UNAVAILABLE if the network can't be reached, UNAUTHENTICATED or PERMISSION_DENIED if it
        refuses us.

        It may also return before there is a connection, and connect by itself later. After a failure it may be called
        again, and nothing is left of the one that failed. On one that is open, or being opened, it changes nothing.
        """

    async def close(self) -> None:
        """Drain and disconnect: what `send_batch` answered OK has left, or the log says otherwise. Raises nothing; may
        be called twice.

        A call of `send_batch` that is under way ends, UNAVAILABLE for what is not answered. `open` may be called after
        it: whoever registered listeners registers them again then, which changes nothing where the transport still has
        them.
        """

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def connected(self) -> bool:
        """False before `open`, after `close`, and while the network is known to be away. One that can't know says True
        once it is open."""
        return True

    @property
    def away_because(self) -> str:
        """Why `connected` is False, in a plain sentence: what the network or its broker said last. "" while there is a
        connection, and if nobody knows. It may change while the network is away."""
        return ""

    def on_connection(self, callback: ConnectionCallback) -> None:
        """`callback(connected)` once for each change of `connected`, which says the same by then; on the event loop.

        The first connection is told like any other, whether it comes within `open` or later; so is the end by `close`.
        A callback that is added while there is a connection hears of the next change: ask `connected`. What a callback
        raises harms nobody.
        """

    def on_loss(self, callback: LossCallback) -> None:
        """`callback(text, messages)` when messages for us were lost in the network, on the event loop; called before
        `open`.

        `text` is one line: what happened, and where. `messages` is how many at most; None if nobody can know. Each loss
        is told once. A network that loses nothing, or that can't tell, never calls.
        """

    def remember_in(self, file: str) -> None:
        """Keep in `file` what the next process must know to tell of losses, and to end subscriptions that it does not
        want any more; read what the last one has left. Called before `open`.

        The folder of `file` is there. Without this call only losses within one process are told. Who has nothing to
        remember makes no file.
        """

    def all_registered(self) -> None:
        """The owner has registered all listeners that an earlier process of his had and that he still wants: what a
        session brings for others need not wait for a listener. On the event loop, while it is open; may be called
        again. Who is not told gives listeners a while."""

    @property
    def troubles(self) -> list[str]:
        """What is wrong now though the network is there, in plain sentences that name the culprit; past losses are
        `on_loss`'s."""
        return []

    @property
    def notes(self) -> list[str]:
        """What a person may want to know though nothing is wrong: a limit of the network that is lower than what the
        settings ask for, for instance."""
        return []

    @abc.abstractmethod
    async def send_batch(self, messages: Sequence[UMessage]) -> list[UStatus]:
        """Send in order, also in the order of the calls; one status for each message, OK when the network has taken it
        (MQTT: PUBACK).

        An invalid message answers INVALID_ARGUMENT, an expired one DEADLINE_EXCEEDED, and neither stops the rest. After
        a failure of the network (UNAVAILABLE) nothing behind it with the same source, sink and priority is tried, so
        that a later try keeps the order. The rest may be tried, where it is one receiver that does not take what is
        sent to it. A request that nobody is there to take answers `status.nobody_listens`, where the network can tell:
        UNAVAILABLE too, but of that request alone. So does a publish, if the owner has asked for it (`tells_absence`).

        What the network refuses for its address (an access rule, a name that it does not allow) answers
        PERMISSION_DENIED or UNAUTHENTICATED; messages with other addresses go on.
        """

    async def send(self, message: UMessage) -> None:
        """Send one message. Raises UStatusError."""
        (status,) = await self.send_batch([message])
        if status.code:
            raise UStatusError.from_status(status)

    async def receive(self, source_filter: UUri, sink_filter: UUri | None = None) -> UMessage:
        """The oldest message that matches and has not expired. Raises NOT_FOUND, or UNIMPLEMENTED without
        Capability.PULL."""
        raise UStatusError(UCode.UNIMPLEMENTED, f"{type(self).__name__} delivers by push only: use register_listener")

    async def register_listener(
        self, source_filter: UUri, listener: UListener, sink_filter: UUri | None = None
    ) -> None:
        """Deliver what matches to `listener`. Without `sink_filter` only messages without sink match.

        Doing it again changes nothing. Raises UNIMPLEMENTED without Capability.PUSH, INVALID_ARGUMENT for a pair of
        filters that the specification does not list, RESOURCE_EXHAUSTED at a limit.
        """
        raise UStatusError(UCode.UNIMPLEMENTED, f"{type(self).__name__} delivers by pull only: use receive")

    async def register_listeners(
        self, filters: Iterable[tuple[UUri, UUri | None]], listener: UListener
    ) -> list[UStatus]:
        """register_listener for each (source filter, sink filter); one status for each. What is not OK is not
        registered. All are asked for at the same time: give some hundred at once."""

        async def register(source_filter: UUri, sink_filter: UUri | None) -> UStatus:
            try:
                await self.register_listener(source_filter, listener, sink_filter)
            except UStatusError as error:
                return error.status
            return OK

        return list(await asyncio.gather(*(register(*pair) for pair in filters)))

    def register_before_open(self, filters: Sequence[tuple[UUri, UUri | None]], listener: UListener) -> list[UStatus]:
        """Before `open`: register_listener for each (source filter, sink filter), so that the network is asked within
        `open`, before anybody can send to us. One status for each; no I/O.

        What is OK is registered, and is unregistered as usual once the transport is open. To register it again then
        changes nothing, and answers what the network said. Who can't do it answers UNAVAILABLE, as here, and is asked
        after `open`.
        """
        why = f"{type(self).__name__} takes listeners only while it is open: register them after open"
        return [UStatus(code=UCode.UNAVAILABLE, message=why)] * len(filters)

    async def unregister_listener(
        self, source_filter: UUri, listener: UListener, sink_filter: UUri | None = None
    ) -> None:
        """End what register_listener began. Raises UNIMPLEMENTED, INVALID_ARGUMENT, or NOT_FOUND if there is no such
        registration."""
        raise UStatusError(UCode.UNIMPLEMENTED, f"{type(self).__name__} delivers by pull only: use receive")


_T, _M, _R, _W = "topic", "method", "reply", "wildcard"
VALID_FILTER_PAIRS: Final = frozenset({(_T, None), (_W, None), (_T, _R), (_R, _M), (_M, _R), (_W, _R), (_W, _W)})
"""Kinds of (source, sink) resource that may be listened to (spec up-l1, valid filter pairs)."""


def _kind(uri: UUri) -> str:
    if uri.resource_id == uris.WILDCARD_RESOURCE:
        return _W
    return _R if uris.is_reply(uri) else _M if uris.is_method(uri) else _T


def validate_filters(source_filter: UUri, sink_filter: UUri | None) -> None:
    """Raises UStatusError(INVALID_ARGUMENT) for a malformed filter or a pair that the specification does not list."""
    uris.validate(source_filter)
    if sink_filter is not None:
        uris.validate(sink_filter)
    pair = (_kind(source_filter), None if sink_filter is None else _kind(sink_filter))
    if pair not in VALID_FILTER_PAIRS:
        sink = "no sink filter" if sink_filter is None else f"sink filter {uris.format(sink_filter)}"
        raise invalid(
            f"source filter {uris.format(source_filter)} with {sink} can match no message; "
            "allowed are (topic or FFFF, none), (topic, 0), (0, method), (method, 0), (FFFF, 0), (FFFF, FFFF)"
        )
