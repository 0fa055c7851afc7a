"""Names: the names of this gateway's authorities on the network of an endpoint.

inside: ecu1 --leave--> ecu1.vin123 outside     in source and sink, and in payloads of platform services
inside: ecu1 <-arrive-- ecu1.vin123 outside     ecu1 alone is not ours outside

Every vehicle has an ecu1. Behind one broker the vehicle's name distinguishes them. Only the gateway knows it: inside
(rules, log, subscriptions, history) the short names are used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final, NamedTuple

import structlog
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.descriptor import ServiceDescriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass

from uprotocol import attributes as attrs
from uprotocol import uri as uris
from uprotocol.cache import Cache
from uprotocol.core.ustreamer.v1 import ustreamer_pb2
from uprotocol.core.usubscription.v3 import usubscription_pb2 as v3
from uprotocol.core.usubscription.v4 import usubscription_pb2 as v4
from uprotocol.encoded import EncodedMessage, Readdressed
from uprotocol.uoptions_pb2 import method_id, notification_topic, publish_topic, service_id, service_version_major
from uprotocol.v1.uattributes_pb2 import UAttributes, UPayloadFormat
from uprotocol.v1.umessage_pb2 import UMessage
from uprotocol.v1.uri_pb2 import UUri

ANSWERS_MAX: Final = 16_384  # remembered answers: some seconds of a busy cloud gateway
TWINS_MAX: Final = 1_000  # authorities that are reported
TWINS_NOTED_S: Final = 3_600.0  # after the last second answer
DEPTH_MAX: Final = 4  # of messages within messages: a page of history with dead letters has two

log = structlog.get_logger()

CarriedKey = tuple[int, int, int, bool]  # entity type, major version, resource, True for a response
Rename = Callable[[str], str]


def _described(service: ServiceDescriptor) -> Iterator[tuple[CarriedKey, type[Message]]]:
    options = service.GetOptions().Extensions
    entity, major = options[service_id], options[service_version_major]
    for method in service.methods:
        number = method.GetOptions().Extensions[method_id]
        yield (entity, major, number, False), GetMessageClass(method.input_type)
        yield (entity, major, number, True), GetMessageClass(method.output_type)
    for topic in (*options[publish_topic], *options[notification_topic]):
        yield (entity, major, topic.id, False), GetMessageClass(service.file.message_types_by_name[topic.message])


CARRIED: Final[dict[CarriedKey, type[Message]]] = {
    **dict(_described(ustreamer_pb2.DESCRIPTOR.services_by_name["uStreamer"])),
    **dict(_described(v3.DESCRIPTOR.services_by_name["uSubscription"])),
    (0, 4, 1, False): v4.SubscribeRequest,  # the specification describes no service of version 4
    (0, 4, 1, True): v4.SubscribeResponse,
    (0, 4, 2, False): v4.UnsubscribeRequest,
    (0, 4, 2, True): v4.UnsubscribeResponse,
    (0, 4, 3, False): v4.FetchSubscriptionsRequest,
    (0, 4, 3, True): v4.FetchSubscriptionsResponse,
    (0, 4, 0x8000, False): v4.Subscription,
}
"""Payload types of the core services, by the address of the message. Each may contain addresses."""


class Leaving(NamedTuple):
    """How messages of one address leave."""

    readdressed: Readdressed | None
    may_carry_addresses: bool


class Names:
    """The names of one endpoint's network: an authority that `is_inside` ends in `.suffix` there."""

    def __init__(self, suffix: str, is_inside: Callable[[str], bool]) -> None:
        self._end, self.is_inside = f".{suffix}", is_inside
        self._leaving: Cache[bytes, Leaving] = Cache()  # by address

    def endpoints_changed(self) -> None:
        """Forget cached names, since other authorities may be inside now."""
        self._leaving.clear()

    def outward(self, authority: str) -> str:
        return authority + self._end if self.is_inside(authority) else authority

    def inward(self, authority: str) -> str:
        inside = authority.removesuffix(self._end)
        return inside if inside != authority and self.is_inside(inside) else authority

    def filter(self, source: UUri, sink: UUri | None) -> tuple[UUri, UUri | None]:
        """Returns the addresses with their names outside."""
        return _renamed(source, self.outward), None if sink is None else _renamed(sink, self.outward)

    def leave(self, message: EncodedMessage) -> EncodedMessage:
        """Returns `message` with the names outside."""
        leaving = self._leaving.get(message.stamp.address)
        if leaving is None:
            attributes = message.stamp.attributes
            leaving = Leaving(_readdressed(attributes, self.outward), may_carry_addresses(attributes))
            self._leaving[message.stamp.address] = leaving
        if leaving.may_carry_addresses:
            return _translated(leaving.readdressed, message, self.outward)
        return message if leaving.readdressed is None else leaving.readdressed.of(message)

    def arrived(self, readdressed: Readdressed | None, message: EncodedMessage) -> EncodedMessage:
        """Returns a message from outside with the names inside; `readdressed` gives it its addresses."""
        return _translated(readdressed, message, self.inward)


def _readdressed(attributes: UAttributes, rename: Rename) -> Readdressed | None:
    """Returns None if the addresses do not change."""
    source, sink = attributes.source, attributes.sink if attributes.HasField("sink") else None
    if rename(source.authority_name) == source.authority_name and (
        sink is None or rename(sink.authority_name) == sink.authority_name
    ):
        return None
    return Readdressed(_renamed(source, rename), None if sink is None else _renamed(sink, rename))


def _renamed(address: UUri, rename: Rename) -> UUri:
    copy = UUri()
    copy.CopyFrom(address)
    copy.authority_name = rename(address.authority_name)
    return copy


def may_carry_addresses(attributes: UAttributes) -> bool:
    """True if it is a message of a core service, by type and addresses."""
    return _kind(attributes) is not None


def _kind(attributes: UAttributes) -> type[Message] | None:
    """Returns the payload type if it is a message of a core service and no UStatus."""
    is_response = attributes.type == attrs.RESPONSE
    address = attributes.sink if attributes.type == attrs.REQUEST else attributes.source
    return CARRIED.get((address.ue_id & 0xFFFF, address.ue_version_major, address.resource_id, is_response))


def _translated(readdressed: Readdressed | None, message: EncodedMessage, rename: Rename) -> EncodedMessage:
    if readdressed is not None:
        message = readdressed.of(message)
    payload = _payload(message.stamp.attributes, message.payload, rename, 0)
    return message if payload == message.payload else EncodedMessage(message.encoded, payload, message.stamp)


def _payload(attributes: UAttributes, payload: bytes, rename: Rename, depth: int) -> bytes:
    """Returns the payload with renamed addresses. One that can't be parsed is unchanged: its receiver reports that."""
    kind, format = _kind(attributes), attributes.payload_format
    if kind is None or attributes.commstatus or not payload or depth >= DEPTH_MAX:
        return payload
    message, wrapper = kind(), AnyMessage()
    wrapped = format in (
        UPayloadFormat.UPAYLOAD_FORMAT_UNSPECIFIED,
        UPayloadFormat.UPAYLOAD_FORMAT_PROTOBUF_WRAPPED_IN_ANY,
    )
    try:
        if wrapped:
            wrapper.ParseFromString(payload)
            if not wrapper.Unpack(message):
                return payload
        elif format == UPayloadFormat.UPAYLOAD_FORMAT_PROTOBUF:
            message.ParseFromString(payload)
        else:
            return payload
        if not _rename_all(message, rename, depth):
            return payload
    except DecodeError:  # of it or of a record within it
        return payload
    if wrapped:
        wrapper.value = message.SerializeToString()
        return wrapper.SerializeToString()
    return message.SerializeToString()


def _rename_all(message: Message, rename: Rename, depth: int) -> bool:
    """Rename every address in `message`, at any depth. Returns whether one has changed."""
    if isinstance(message, UUri):
        name = rename(message.authority_name)
        changed = name != message.authority_name
        message.authority_name = name
        return changed
    if isinstance(message, UMessage):
        return _rename_inner(message, rename, depth)
    if isinstance(message, ustreamer_pb2.TopicPattern):
        name = message.topic.authority_name
        message.topic.authority_name = _renamed_pattern(name, rename)
        return message.topic.authority_name != name
    changed = False
    if isinstance(message, ustreamer_pb2.VisibleTopics.Origin):
        before = list(message.authorities)
        message.authorities[:] = [_renamed_pattern(authority, rename) for authority in before]
        changed = before != message.authorities
    if isinstance(message, ustreamer_pb2.RecordBatch):
        for index, record in enumerate(message.message):
            inner = UMessage.FromString(record)
            if _rename_inner(inner, rename, depth):
                message.message[index] = inner.SerializeToString()
                changed = True
        return changed
    for field, value in message.ListFields():
        if field.message_type is None or field.message_type.GetOptions().map_entry:
            continue  # maps of these services have no addresses
        parts: Any = value if field.is_repeated else (value,)
        for part in parts:
            changed |= _rename_all(part, rename, depth)
    return changed


def _renamed_pattern(authority: str, rename: Rename) -> str:
    """A family is renamed as its members are."""
    if not uris.is_family(authority):
        return rename(authority)
    return uris.WILDCARD_AUTHORITY + rename(f"x{authority[1:]}")[1:]


def _rename_inner(message: UMessage, rename: Rename, depth: int) -> bool:
    """Rename the addresses of a message within a payload. Returns whether one has changed."""
    payload = _payload(message.attributes, message.payload, rename, depth + 1)
    readdressed = _readdressed(message.attributes, rename)
    is_carrier = payload != message.payload
    if is_carrier:
        message.payload = payload
    if readdressed is not None:
        readdressed.put(message.attributes)
    return is_carrier or readdressed is not None


class Twins:
    """Finds hosts with the same name by requests with two answers. Nothing else on a network shows them."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """`clock` in seconds."""
        self._clock = clock
        self._young: dict[bytes, bytes] = {}  # request -> its answer, in two generations, so that forgetting is cheap
        self._old: dict[bytes, bytes] = {}
        self.heard: dict[str, float] = {}  # authority -> when it last answered twice
        self.answers = 0  # number of second answers

    def answered(self, attributes: UAttributes) -> None:
        """Note a response that has come."""
        request, answer = attributes.reqid.SerializeToString(), attributes.id.SerializeToString()
        first = self._young.get(request) or self._old.get(request)
        if first is None:
            self._young[request] = answer
            if len(self._young) >= ANSWERS_MAX // 2:
                self._old, self._young = self._young, {}
        elif first != answer:
            self.answers += 1
            authority = attributes.source.authority_name
            if authority not in self.heard:
                log.warning("two hosts go by one name: a request was answered twice", authority=authority)
                if len(self.heard) >= TWINS_MAX:
                    del self.heard[next(iter(self.heard))]
            self.heard[authority] = self._clock()

    def notes(self) -> list[str]:
        """Returns a sentence for each name that has answered twice within the hour."""
        names = [name for name, at in self.heard.items() if self._clock() - at < TWINS_NOTED_S]
        advice = "requests to it are served twice; give each gateway a suffix of its own"
        return [f"two hosts go by the name {name!r}: {advice}" for name in names]


def ambiguous(suffix: str | None, inside: Iterable[str]) -> list[str]:
    """Returns the names `inside` that other vehicles may also have on a network outside with this `suffix`."""
    if suffix is not None:
        return []
    return sorted(name for name in inside if "." not in name and ":" not in name and not uris.is_pattern(name))


def mistakes(suffix: str, inside: set[str], outside: set[str]) -> Iterator[str]:
    """Yields why `suffix` can't be appended to the names `inside` on a network with the authorities `outside`."""
    for name in sorted(inside - {uris.WILDCARD_AUTHORITY}):
        if name.endswith(f".{suffix}"):
            yield f"authority {name!r} ends in .{suffix} already: name it without, or leave the suffix away"
        elif f"{name}.{suffix}" in outside:
            called = f"authority {name!r} is called {name}.{suffix!s} there"
            yield f"{called}, and that is somebody else's name on that network"
        elif len(name) + len(suffix) + 1 > uris.AUTHORITY_LENGTH_MAX:
            yield f"authority {name!r} and its suffix are longer than {uris.AUTHORITY_LENGTH_MAX} characters"
        elif name.startswith("["):
            yield f"authority {name!r} is an IP address, which takes no suffix: give the host a name"
    for pattern in uris.owners(f"x.{suffix}"):
        if uris.is_family(pattern) and pattern in outside:
            yield f"{pattern} belongs to that network, and our own names end in .{suffix} there"
