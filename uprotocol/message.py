"""UMessage: payloads, builders, validation.

UMessageBuilder.publish(topic).with_priority(CS2).build_from_upayload(UPayload.pack(sample))  ->  valid UMessage
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self, TypeVar

from google.protobuf.any_pb2 import Any
from google.protobuf.message import DecodeError, Message

from uprotocol import attributes as attrs
from uprotocol import uuid as uuids
from uprotocol.status import invalid
from uprotocol.v1.uattributes_pb2 import UAttributes, UMessageType, UPayloadFormat, UPriority
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.umessage_pb2 import UMessage
from uprotocol.v1.uri_pb2 import UUri
from uprotocol.v1.ustatus_pb2 import UStatus
from uprotocol.v1.uuid_pb2 import UUID

M = TypeVar("M", bound=Message)

PROTOBUF = UPayloadFormat.UPAYLOAD_FORMAT_PROTOBUF
PROTOBUF_WRAPPED_IN_ANY = UPayloadFormat.UPAYLOAD_FORMAT_PROTOBUF_WRAPPED_IN_ANY
UNSPECIFIED = UPayloadFormat.UPAYLOAD_FORMAT_UNSPECIFIED
_CS4 = UPriority.UPRIORITY_CS4
_UINT32_MAX = 0xFFFF_FFFF


@dataclass(frozen=True, slots=True)
class UPayload:
    """Bytes and their format."""

    data: bytes = b""
    format: UPayloadFormat.ValueType = UNSPECIFIED

    @classmethod
    def pack(cls, message: Message) -> UPayload:
        """`message` as plain protobuf: the receiver has to know the type."""
        return cls(message.SerializeToString(), PROTOBUF)

    @classmethod
    def pack_to_any(cls, message: Message) -> UPayload:
        """`message` in a google.protobuf.Any, which names the type."""
        wrapped = Any()
        wrapped.Pack(message)
        return cls(wrapped.SerializeToString(), PROTOBUF_WRAPPED_IN_ANY)

    @classmethod
    def of(cls, message: UMessage) -> UPayload:
        return cls(message.payload, message.attributes.payload_format)

    def unpack(self, type: type[M]) -> M:
        """Parse the payload as a protobuf message of `type`; an empty payload is an empty message.

        Raises UStatusError(INVALID_ARGUMENT) if the format is not protobuf, the bytes can't be parsed, or the Any has
        another type.
        """
        made = type()
        try:
            if self.format == PROTOBUF_WRAPPED_IN_ANY:
                wrapped = Any.FromString(self.data)
                if self.data and not wrapped.Unpack(made):
                    raise invalid(f"expected {made.DESCRIPTOR.full_name} in the payload, got {wrapped.type_url}")
            elif self.format in (PROTOBUF, UNSPECIFIED):
                made.ParseFromString(self.data)
            else:
                name = UPayloadFormat.Name(self.format) if self.format in UPayloadFormat.values() else self.format
                raise invalid(f"expected a protobuf payload, got {name}")
        except DecodeError as error:
            raise invalid(f"the payload is not a {made.DESCRIPTOR.full_name}: {error}") from None
        return made


def validate(message: UMessage) -> None:
    """Check the attributes, and that there is no payload format without payload. Raises
    UStatusError(INVALID_ARGUMENT)."""
    attrs.validate(message.attributes, has_payload=message.HasField("payload"))


class UMessageBuilder:
    """Builds one message. `build`, `build_from_upayload` and `pack` validate it, so every built message is valid."""

    def __init__(self, type: UMessageType.ValueType, source: UUri, sink: UUri | None = None) -> None:
        self._attributes = UAttributes(type=type, source=source, sink=sink)
        self._id: UUID | None = None

    @classmethod
    def publish(cls, topic: UUri) -> Self:
        return cls(attrs.PUBLISH, topic)

    @classmethod
    def notification(cls, topic: UUri, destination: UUri) -> Self:
        return cls(attrs.NOTIFICATION, topic, destination)

    @classmethod
    def request(cls, reply_to: UUri, method: UUri, ttl_ms: int) -> Self:
        builder = cls(attrs.REQUEST, reply_to, method)
        return builder.with_priority(_CS4).with_ttl(ttl_ms)

    @classmethod
    def response(cls, method: UUri, reply_to: UUri, request_id: UUID) -> Self:
        builder = cls(attrs.RESPONSE, method, reply_to)
        builder._attributes.reqid.CopyFrom(request_id)
        return builder.with_priority(_CS4)

    @classmethod
    def response_for_request(cls, request: UAttributes) -> Self:
        """The response to `request`: addresses swapped, reqid, priority and ttl copied (spec section 3.5)."""
        builder = cls.response(request.sink, request.source, request.id)
        return builder.with_priority(request.priority).with_ttl(request.ttl)

    def with_id(self, id: UUID) -> Self:
        """Sets the id; without it, `build` creates one."""
        self._id = id
        return self

    def with_priority(self, priority: UPriority.ValueType) -> Self:
        """Sets the priority; requests need CS4 or a higher one."""
        self._attributes.priority = priority
        return self

    def with_ttl(self, ttl_ms: int) -> Self:
        """Sets the time to live in milliseconds; 0: no end. Raises INVALID_ARGUMENT."""
        if not 0 <= ttl_ms <= _UINT32_MAX:
            raise invalid(f"a ttl is 0 to {_UINT32_MAX} ms, got {ttl_ms}")
        self._attributes.ttl = ttl_ms
        return self

    def with_token(self, token: str) -> Self:
        """Sets the access token of a request."""
        self._attributes.token = token
        return self

    def with_permission_level(self, level: int) -> Self:
        """Sets the permission level of a request. Raises INVALID_ARGUMENT."""
        if not 0 <= level <= _UINT32_MAX:
            raise invalid(f"a permission level is 0 to {_UINT32_MAX}, got {level}")
        self._attributes.permission_level = level
        return self

    def with_commstatus(self, code: UCode.ValueType) -> Self:
        """Sets the status of a response."""
        self._attributes.commstatus = code
        return self

    def with_traceparent(self, traceparent: str) -> Self:
        """Sets the trace context (W3C Trace Context)."""
        self._attributes.traceparent = traceparent
        return self

    def build(self) -> UMessage:
        """Returns the message without a payload. Raises INVALID_ARGUMENT for invalid attributes."""
        return self.build_from_upayload(None)

    def build_from_upayload(self, payload: UPayload | None) -> UMessage:
        """Returns the message. Raises INVALID_ARGUMENT for invalid attributes."""
        message = UMessage(attributes=self._attributes)
        message.attributes.id.CopyFrom(self._id if self._id is not None else uuids.new())
        if payload is not None:
            message.payload = payload.data
            message.attributes.payload_format = payload.format
        validate(message)
        return message

    def pack(self, payload: Message) -> UMessage:
        """Build the message with `payload` as plain protobuf."""
        return self.build_from_upayload(UPayload.pack(payload))


def error_response(request: UAttributes, status: UStatus) -> UMessage:
    """The response that reports an error to the caller: a UStatus as payload, and its code as commstatus
    (dsn~service-error-model-error-response~1)."""
    return UMessageBuilder.response_for_request(request).with_commstatus(status.code).pack(status)
