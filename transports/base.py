"""What every transport does alike, written once. Ours are made on it; a plugin may be, and need not.

send_batch: message -> valid?            -> not expired?      -> not too large?   -> the network
                       INVALID_ARGUMENT     DEADLINE_EXCEEDED    INVALID_ARGUMENT    UNAVAILABLE: stopped() answers the rest
connection: set_connected(True | False) -> each callback of on_connection, once for each change
listeners:  a ListenerTable, with its `dropped` and `mended`
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Annotated, Any, Final, Protocol

import structlog
from pydantic import Field

from transports.listeners import LISTENERS_MAX, LISTENERS_PER_FILTER_MAX, ListenerTable
from uprotocol import attributes as attrs
from uprotocol import uuid as uuids
from uprotocol.cache import Cache
from uprotocol.status import OK, UStatusError, code_name
from uprotocol.transport import ConnectionCallback, LocalUriProvider, UTransport
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.umessage_pb2 import UMessage
from uprotocol.v1.ustatus_pb2 import UStatus

ROUTES_CACHED_MAX: Final = 32_768  # (type, source, sink) known to be valid

NOT_OPEN: Final = UStatus(code=UCode.UNAVAILABLE, message="the transport is not open: call open first")
NOT_TRIED: Final = (
    "an earlier message of the batch could not be sent, so this one was not tried: send it again after that one"
)

ListenersMax = Annotated[int, Field(ge=1, description="listeners overall; beyond it RESOURCE_EXHAUSTED")]
ListenersPerFilterMax = Annotated[int, Field(ge=1, description="listeners of one pair of filters")]

Route = tuple[int, bytes, bytes | None]

log = structlog.get_logger()


class SendChecks:
    """Says what may not leave, and why."""

    def __init__(self, *, now_ms: Callable[[], int] = uuids.now_ms) -> None:
        self.now_ms = now_ms
        self._valid_routes: Cache[Route, bool] = Cache(ROUTES_CACHED_MAX)

    def refusal(self, message: UMessage, now_ms: int) -> UStatus | None:
        """None if it may leave; else INVALID_ARGUMENT, or DEADLINE_EXCEEDED for what has expired (A-14)."""
        attributes = message.attributes
        try:
            self._check_route(message)
            attrs.validate_rest(attributes)
            attrs.validate_payload(attributes, message.HasField("payload"))
        except UStatusError as error:
            return error.status
        if attributes.ttl and attrs.is_expired(attributes, now_ms):
            late_ms = now_ms - uuids.time_ms(attributes.id) - attributes.ttl
            return UStatus(
                code=UCode.DEADLINE_EXCEEDED,
                message=f"the message expired {late_ms} ms ago (ttl {attributes.ttl} ms): not sent",
            )
        return None

    def _check_route(self, message: UMessage) -> None:
        """Raises UStatusError for an address that no valid message of its type has."""
        attributes = message.attributes
        sink = attributes.sink if attributes.HasField("sink") else None
        source = attributes.source.SerializeToString()
        route = attributes.type, source, sink.SerializeToString() if sink is not None else None
        if route not in self._valid_routes:
            attrs.validate_route(attributes.type, attributes.source if attributes.HasField("source") else None, sink)
            self._valid_routes[route] = True


def too_large(size: int, bytes_max: int) -> UStatus:
    """The answer to a message of `size` bytes on the network, where its owner (`UTransport.wire_bytes_max`) allows
    fewer: it is that message's own fault, which no later try mends."""
    return UStatus(
        code=UCode.INVALID_ARGUMENT,
        message=f"a message has at most {bytes_max} bytes here, attributes and payload together, got {size}: send "
        "less, or raise message_bytes_max at both ends",
    )


def stopped(statuses: list[UStatus], count: int, why: UStatus) -> list[UStatus]:
    """`statuses` filled up to `count`: the first missing one is `why`, those behind it were not tried (code as
    `why`)."""
    assert why.code != UCode.OK, f"only a failure stops a batch, not {code_name(why.code)}"
    if len(statuses) < count:
        statuses.append(why)
    while len(statuses) < count:
        statuses.append(UStatus(code=why.code, message=NOT_TRIED))
    return statuses


def tell(callbacks: Iterable[Callable[..., None]], *what: Any) -> None:
    """Call all of them; what one raises is logged, and harms nobody."""
    for callback in callbacks:
        try:
            callback(*what)
        except Exception:
            log.exception("a callback of a transport's owner failed", callback=repr(callback), told=what)


class ListenerLimits(Protocol):
    """What a transport's configuration says of listeners."""

    @property
    def listeners_max(self) -> int: ...

    @property
    def listeners_per_filter_max(self) -> int: ...


class TransportBase(UTransport):
    """A transport that keeps its listeners, checks what it sends, and tells of its connection.

    `send_batch`, `open`, `close`, `register_listener` and `unregister_listener` are left to write. Lives on the event
    loop: from another thread only `authority`, `checks` and `dropped` may be used, the checks by one thread alone.
    """

    def __init__(self, config: ListenerLimits, local: LocalUriProvider) -> None:
        self.local, self.authority = local, local.get_authority()
        self.listeners = ListenerTable(
            self.authority,
            listeners_max=config.listeners_max,
            listeners_per_filter_max=config.listeners_per_filter_max,
        )
        self.checks = SendChecks()
        self._connected = False
        self._on_connection: list[ConnectionCallback] = []

    @property
    def dropped(self) -> Counter[str]:
        """Messages thrown away on arrival, by reason: malformed, too_large, invalid, expired, ..."""
        return self.listeners.dropped

    @property
    def mended(self) -> Counter[str]:
        """Messages taken without a field that was wrong, by the field: traceparent."""
        return self.listeners.mended

    @property
    def connected(self) -> bool:
        return self._connected

    def set_connected(self, connected: bool) -> None:
        """So it is from now on. Whoever wants to know is told, if it is a change."""
        if connected != self._connected:
            self._connected = connected
            tell(self._on_connection, connected)

    def on_connection(self, callback: ConnectionCallback) -> None:
        self._on_connection.append(callback)


__all__ = [
    "LISTENERS_MAX",
    "LISTENERS_PER_FILTER_MAX",
    "NOT_OPEN",
    "NOT_TRIED",
    "OK",
    "ListenersMax",
    "ListenersPerFilterMax",
    "SendChecks",
    "TransportBase",
    "stopped",
    "tell",
    "too_large",
]
