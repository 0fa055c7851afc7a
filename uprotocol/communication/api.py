"""What an application may ask of uProtocol, whatever carries it (dsn~communication-layer-api-declaration~1).

Publisher ---- publish ---->  Subscriber        one topic, anybody who subscribed
Notifier ----- notify ----->  NotificationListener    one topic, one destination
RpcClient ---- request ---->  RpcServer         one method; the response comes back by itself
"""

from __future__ import annotations

import abc
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypedDict, Unpack

from google.protobuf.message import Message

from uprotocol.message import UPayload
from uprotocol.transport import UListener
from uprotocol.v1.uattributes_pb2 import UPriority
from uprotocol.v1.umessage_pb2 import UMessage
from uprotocol.v1.uri_pb2 import UUri

# of a call that names none: longer than a broker's reconnect takes, short enough for a person who waits
TIMEOUT_MS: Final = 10_000


@dataclass(frozen=True, slots=True)
class CallOptions:
    """How one call travels.

    `timeout_ms` is the request's ttl and what the caller waits at most; `priority` is CS4 or higher; `token` is opaque
    (TAP); `permission_level` is what the caller claims to have (CAP); `traceparent` is of the W3C Trace Context.
    """

    timeout_ms: int = TIMEOUT_MS
    priority: UPriority.ValueType = UPriority.UPRIORITY_CS4
    token: str | None = None
    permission_level: int | None = None
    traceparent: str | None = None


DEFAULT_OPTIONS: Final = CallOptions()

RequestHandler = Callable[[UMessage], "UPayload | Message | Awaitable[UPayload | Message | None] | None"]
"""Gets the whole request: `request.attributes.source` is the caller, `.token` and `.permission_level` are what it
claims."""

RequestCheck = Callable[[UMessage], None]
"""Refuses a request by raising UStatusError (PERMISSION_DENIED, UNAUTHENTICATED). The specification leaves enforcement
to such hooks."""


class MessageOptions(TypedDict, total=False):
    """How one message travels; what is not given, or None, is as the specification has it."""

    priority: UPriority.ValueType | None
    ttl_ms: int | None
    traceparent: str | None


class Publisher(abc.ABC):
    @abc.abstractmethod
    async def publish(
        self, resource_id: int, payload: UPayload | None = None, **options: Unpack[MessageOptions]
    ) -> None:
        """Publish on own topic `resource_id` (8000 to FFFE). Returns when the network has taken it.

        Raises UStatusError: INVALID_ARGUMENT for what can't be a message, else what the transport says.
        """


class NotificationListener(UListener, Protocol):
    """A UListener that gets notifications only."""


class Notifier(abc.ABC):
    @abc.abstractmethod
    async def notify(
        self, resource_id: int, destination: UUri, payload: UPayload | None = None, **options: Unpack[MessageOptions]
    ) -> None:
        """Tell `destination` (resource 0) something from own topic `resource_id`. Raises as `Publisher.publish`."""

    @abc.abstractmethod
    async def register_notification_listener(self, topic: UUri, listener: NotificationListener) -> None:
        """Hear the notifications that `topic` (which may have wildcards but for its resource) sends to us. Raises
        UStatusError."""

    @abc.abstractmethod
    async def unregister_notification_listener(self, topic: UUri, listener: NotificationListener) -> None:
        """Raises UStatusError(NOT_FOUND) if there is no such registration."""


class SubscriptionService(Protocol):
    """The local uSubscription, as far as a subscriber needs it."""

    async def subscribe(self, topic: UUri, **options: Any) -> Any: ...

    async def unsubscribe(self, topic: UUri) -> Any: ...


class Subscriber(abc.ABC):
    """A subscription lives in uSubscription and outlives this process; a listener does not, so subscribe again after a
    restart."""

    @abc.abstractmethod
    async def subscribe(self, topic: UUri, listener: UListener, **options: Any) -> Any:
        """Subscribe and hear. `options` are those of the subscription service (expiry, sample period); its answer is
        returned.

        Raises UStatusError; then nothing is registered.
        """

    @abc.abstractmethod
    async def unsubscribe(self, topic: UUri, listener: UListener | None = None) -> None:
        """Stop `listener` (None: all that this object knows); with the last one the subscription ends. Raises
        UStatusError."""


class RpcClient(abc.ABC):
    @abc.abstractmethod
    async def invoke_method(
        self, method: UUri, payload: UPayload | None = None, options: CallOptions = DEFAULT_OPTIONS
    ) -> UPayload:
        """The payload of the response. Raises UStatusError with the commstatus of the response, or
        DEADLINE_EXCEEDED."""


class RpcServer(abc.ABC):
    @abc.abstractmethod
    async def register_request_handler(self, resource_id: int, handler: RequestHandler) -> None:
        """Serve own method `resource_id` (1 to 7FFF). Raises ALREADY_EXISTS if another handler serves it."""

    @abc.abstractmethod
    async def unregister_request_handler(self, resource_id: int, handler: RequestHandler) -> None:
        """Raises UStatusError(NOT_FOUND) if `handler` does not serve this method."""
