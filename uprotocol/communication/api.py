"""The interfaces of uP-L2 for applications, independent of the transport (dsn~communication-layer-api-declaration~1).

Publisher ---- publish ---->  Subscriber              one topic, all subscribers
Notifier ----- notify ----->  NotificationListener    one topic, one destination
RpcClient ---- request ---->  RpcServer               one method; the response is the result of the call

Permission levels (CAP, spec basics/permissions.adoc) are transported and readable, not enforced: an application that
enforces them compares `claimed` with `declared` in the `check` of its InMemoryRpcServer.
"""

from __future__ import annotations

import abc
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypedDict, Unpack

from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import Message

from uprotocol import uoptions_pb2 as proto_options
from uprotocol.message import UPayload
from uprotocol.transport import UListener
from uprotocol.v1.uattributes_pb2 import UAttributes, UPriority
from uprotocol.v1.umessage_pb2 import UMessage
from uprotocol.v1.uri_pb2 import UUri

# the default of a call: longer than a reconnect of a broker takes, short enough for a waiting person
TIMEOUT_MS: Final = 10_000
LEVEL_DEFAULT: Final = 0  # the level of a caller that claims none
LEVEL_MAX: Final = 0xFFFF_FFFF  # N, the most permissive: the specification gives no number, the field has 32 bits


@dataclass(frozen=True, slots=True)
class CallOptions:
    """The options of one call.

    `timeout_ms` is the ttl of the request and the maximal wait of the caller; `priority` is CS4 or higher; `token` is
    opaque (TAP); `permission_level` is the level that the caller claims (CAP); `traceparent` as in the W3C Trace
    Context.
    """

    timeout_ms: int = TIMEOUT_MS
    priority: UPriority.ValueType = UPriority.UPRIORITY_CS4
    token: str | None = None
    permission_level: int | None = None
    traceparent: str | None = None


DEFAULT_OPTIONS: Final = CallOptions()

RequestHandler = Callable[[UMessage], "UPayload | Message | Awaitable[UPayload | Message | None] | None"]
"""Gets the whole request: `request.attributes.source` is the caller; `.token` and `.permission_level` are claims of
it."""

RequestCheck = Callable[[UMessage], None]
"""Raises UStatusError (PERMISSION_DENIED, UNAUTHENTICATED) to refuse a request. The specification leaves enforcement to
such hooks."""


class MessageOptions(TypedDict, total=False):
    """The options of one message. If an option is missing or None, the default of the specification applies."""

    priority: UPriority.ValueType | None
    ttl_ms: int | None
    traceparent: str | None


class Publisher(abc.ABC):
    @abc.abstractmethod
    async def publish(
        self, resource_id: int, payload: UPayload | None = None, **options: Unpack[MessageOptions]
    ) -> None:
        """Publish to own topic `resource_id` (8000 to FFFE). Returns when the network has accepted the message.

        Raises UStatusError: INVALID_ARGUMENT for an invalid message, or the error of the transport.
        """


class NotificationListener(UListener, Protocol):
    """A UListener that gets only notifications."""


class Notifier(abc.ABC):
    @abc.abstractmethod
    async def notify(
        self, resource_id: int, destination: UUri, payload: UPayload | None = None, **options: Unpack[MessageOptions]
    ) -> None:
        """Send a notification of own topic `resource_id` to `destination` (resource 0). Raises as
        `Publisher.publish`."""

    @abc.abstractmethod
    async def register_notification_listener(self, topic: UUri, listener: NotificationListener) -> None:
        """Deliver notifications of `topic` to us. `topic` may have wildcards, except for its resource. Raises
        UStatusError."""

    @abc.abstractmethod
    async def unregister_notification_listener(self, topic: UUri, listener: NotificationListener) -> None:
        """Raises UStatusError(NOT_FOUND) if there is no such registration."""


class SubscriptionService(Protocol):
    """The part of the local uSubscription that a Subscriber uses."""

    async def subscribe(self, topic: UUri, **options: Any) -> Any: ...

    async def unsubscribe(self, topic: UUri) -> Any: ...


class Subscriber(abc.ABC):
    """A subscription is stored in uSubscription and outlives this process. A listener does not, so subscribe again
    after a restart."""

    @abc.abstractmethod
    async def subscribe(self, topic: UUri, listener: UListener, **options: Any) -> Any:
        """Subscribe to `topic` and register `listener`. `options` are passed to the subscription service (expiry,
        sample period). Returns the answer of the service.

        Raises UStatusError; then nothing is registered.
        """

    @abc.abstractmethod
    async def unsubscribe(self, topic: UUri, listener: UListener | None = None) -> None:
        """Unregister `listener` (None: all listeners of this object); with the last one the subscription ends. Raises
        UStatusError."""


class RpcClient(abc.ABC):
    @abc.abstractmethod
    async def invoke_method(
        self, method: UUri, payload: UPayload | None = None, options: CallOptions = DEFAULT_OPTIONS
    ) -> UPayload:
        """Returns the payload of the response. Raises UStatusError with the commstatus of the response, or
        DEADLINE_EXCEEDED."""


class RpcServer(abc.ABC):
    @abc.abstractmethod
    async def register_request_handler(self, resource_id: int, handler: RequestHandler) -> None:
        """Serve own method `resource_id` (1 to 7FFF). Raises ALREADY_EXISTS if another handler serves it."""

    @abc.abstractmethod
    async def unregister_request_handler(self, resource_id: int, handler: RequestHandler) -> None:
        """Raises UStatusError(NOT_FOUND) if `handler` does not serve this method."""


def claimed(attributes: UAttributes) -> int:
    """The level in the attributes of a request (local~cap-carry)."""
    return attributes.permission_level if attributes.HasField("permission_level") else LEVEL_DEFAULT


def declared(method: MethodDescriptor) -> int:
    """The level that `method` declares, else its service, else N (local~cap-missing)."""
    of_method = method.GetOptions()
    if of_method.HasExtension(proto_options.method_permission_level):
        return of_method.Extensions[proto_options.method_permission_level]
    of_service = method.containing_service.GetOptions()
    if of_service.HasExtension(proto_options.service_permission_level):
        return of_service.Extensions[proto_options.service_permission_level]
    return LEVEL_MAX
