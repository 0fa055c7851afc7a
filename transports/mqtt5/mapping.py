"""UMessage <-> MQTT 5 PUBLISH, as plain data (spec up-l1/mqtt_5.adoc). No sockets, no client library.

UMessage --encode--> Packet(topic, user properties, expiry, correlation, content type, payload) --read----> UMessage
filters  --topic_filter--> "device1/3BA/0/3/9876" (in-vehicle: 5 or 10 segments)   "vehicle1/backend" (off-vehicle)
"""

from __future__ import annotations

import enum
import re
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from transports.base import ROUTES_CACHED_MAX
from uprotocol import attributes as attrs
from uprotocol import uri as uris
from uprotocol import uuid as uuids
from uprotocol.cache import Cache
from uprotocol.status import UStatusError, invalid
from uprotocol.uoptions_pb2 import ce_name
from uprotocol.v1.uattributes_pb2 import UAttributes, UMessageType, UPayloadFormat, UPriority
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.umessage_pb2 import UMessage
from uprotocol.v1.uri_pb2 import UUri

_Address = tuple[str, Sequence[tuple[str, str]]]  # topic; user properties: type, source, sink

VERSION_TEXT: Final = "1"  # of uProtocol, in the user property uP
TTL_MS_MAX: Final = 0xFFFF_FFFF  # uint32 of UAttributes.ttl
TEXT_BYTES_MAX: Final = 65_535  # of one string in MQTT (16 bits of length)

# Our own user properties for a ttl in whole seconds, which the specification never puts into property 6. Both
# are in milliseconds; other receivers ignore them.
LATE_TTL: Final = "up-streamer-ttl"  # in a message that was sent late: the ttl
FRESH_TTL: Final = "up-streamer-fresh-ttl"  # in any other message: the ttl is at least this
FRESH_MS_MAX: Final = 1_000  # after the time of its id: a message that is sent later is late

_DECIMAL = re.compile(r"[0-9]{1,10}", re.ASCII)
# brokers hang up on these (MQTT 5 section 1.5.4)
_NOT_IN_MQTT = re.compile("[\x00-\x1f\x7f-\x9f\ufdd0-\ufdef\ufffe\uffff]")


class Mode(enum.StrEnum):
    """The kind of topic names: fine-grained between uEntities, or one topic for each pair of devices, as suits cloud
    brokers."""

    IN_VEHICLE = "in-vehicle"  # the specification's E2E
    OFF_VEHICLE = "off-vehicle"  # D2D


class TtlReading(enum.StrEnum):
    """How a ttl is read without property 6: brokers count the expiry interval down, but the ttl counts from the time of
    the id (A-17)."""

    RESTORED = "restored"  # the interval and the whole seconds since the id's time; or LATE_TTL and FRESH_TTL
    SPECIFICATION = "specification"  # the interval alone; LATE_TTL and FRESH_TTL are neither sent nor read


class Packet(NamedTuple):
    """The content of a PUBLISH."""

    topic: str
    user_properties: Sequence[tuple[str, str]]
    expiry_s: int | None = None
    correlation: bytes | None = None
    content_type: str | None = None
    payload: bytes = b""


def _ce_names(values: type[UMessageType] | type[UPriority]) -> dict[int, str]:
    return {value.number: value.GetOptions().Extensions[ce_name] for value in values.DESCRIPTOR.values if value.number}


_TYPE_NAMES: Final = _ce_names(UMessageType)
# in the bytes of a request's and a response's user properties, in the older form as well
REQUEST_TYPE, RESPONSE_TYPE = b"req.v1", b"res.v1"
_TYPES: Final = {name: UMessageType.ValueType(number) for number, name in _TYPE_NAMES.items()}
_TYPES.update({name.removeprefix("up-"): number for name, number in list(_TYPES.items())})  # the older pub.v1 and so on
_PRIORITY_NAMES: Final = _ce_names(UPriority)
_PRIORITIES: Final = {name: UPriority.ValueType(number) for number, name in _PRIORITY_NAMES.items()}


def _segments(uri: UUri, local_authority: str) -> str:
    """Five segments of a topic name or filter (section 6.4)."""
    numbers = (
        (uri.ue_id & 0xFFFF, uris.WILDCARD_ENTITY_TYPE),
        (uri.ue_id >> 16, uris.WILDCARD_ENTITY_INSTANCE),
        (uri.ue_version_major, uris.WILDCARD_VERSION),
        (uri.resource_id, uris.WILDCARD_RESOURCE),
    )
    fields = ["+" if number == wildcard else f"{number:X}" for number, wildcard in numbers]
    return "/".join((_authority(uri, local_authority), *fields))


def _authority(uri: UUri, local_authority: str) -> str:
    """Raises INVALID_ARGUMENT for a name with a `+`, which IPvFuture allows and topic names do not."""
    name = uri.authority_name or local_authority
    if "+" in name:
        raise invalid(
            f"the authority {name} has a +, which is a wildcard in MQTT's topics: it can't be reached over MQTT"
        )
    return "+" if name == uris.WILDCARD_AUTHORITY else name


class Mapping:
    """The mapping of one mode, as seen from one authority."""

    def __init__(self, mode: Mode, local_authority: str, *, ttl_reading: TtlReading = TtlReading.RESTORED) -> None:
        self.mode, self._local_authority, self._ttl_reading = mode, local_authority, ttl_reading
        self._out: Cache[tuple[int, bytes, bytes | None], _Address] = Cache(ROUTES_CACHED_MAX)
        # UAttributes with type, source and sink, encoded
        self._in: Cache[tuple[str | None, str | None, str | None, str], bytes] = Cache(ROUTES_CACHED_MAX)

    def topic(self, type: int, source: UUri, sink: UUri | None) -> str:
        """The topic name (dsn~up-transport-mqtt5-e2e-topic-names~1, dsn~up-transport-mqtt5-d2d-topic-names~1).

        Raises INVALID_ARGUMENT off-vehicle for a message without sink: it has no topic name there.
        """
        if self.mode is Mode.OFF_VEHICLE:
            if sink is None:
                raise invalid(
                    "off-vehicle, a publish needs the sink that a streamer sets (//AUTHORITY/FFFFFFFF/FF/FFFF): it "
                    "names the topic"
                )
            return f"{_authority(source, self._local_authority)}/{_authority(sink, self._local_authority)}"
        topic = _segments(source, self._local_authority)
        return topic if type == attrs.PUBLISH or sink is None else f"{topic}/{_segments(sink, self._local_authority)}"

    def topic_filter(self, source: UUri, sink: UUri | None) -> str:
        """The topic filter to subscribe to; off-vehicle it matches more than the UUri patterns. Raises INVALID_ARGUMENT
        there without sink filter (A-21)."""
        if sink is None and self.mode is Mode.OFF_VEHICLE:
            raise invalid(
                "off-vehicle, every message has a sink: listen with the pair (FFFF, FFFF) and the own "
                "authority in the sink"
            )
        return self.topic(attrs.NOTIFICATION, source, sink)

    def encode(self, message: UMessage, *, is_late: bool) -> Packet:
        """The PUBLISH of `message`, whose attributes must be valid. `is_late`: it is sent more than FRESH_MS_MAX after
        the time of its id.

        Raises UStatusError(INVALID_ARGUMENT) for addresses that don't fit its type, and for values that MQTT can't
        carry.
        """
        attributes = message.attributes
        has_sink = attributes.HasField("sink")
        route = (
            attributes.type,
            attributes.source.SerializeToString(),
            attributes.sink.SerializeToString() if has_sink else None,
        )
        topic, address = self._out.get(route) or self._resolve_out(route, attributes)
        properties = [("uP", VERSION_TEXT), ("1", uuids.format(attributes.id)), *address]
        if attributes.priority:
            name = _PRIORITY_NAMES.get(attributes.priority)
            if name is None:
                raise invalid(f"expected a priority with a name, as MQTT needs, got {attributes.priority}")
            properties.append(("5", name))
        expiry_s = None
        if attributes.ttl:  # 0 never expires, but an expiry interval of 0 would expire at once
            expiry_s = -(-attributes.ttl // 1000)
            if attributes.ttl % 1000:
                properties.append(("6", str(attributes.ttl)))
            elif self._ttl_reading is TtlReading.RESTORED:
                properties.append((LATE_TTL if is_late else FRESH_TTL, str(attributes.ttl)))
        if attributes.HasField("permission_level"):  # sent if set, also as 0 and OK; an empty text is not
            properties.append(("7", str(attributes.permission_level)))
        if attributes.HasField("commstatus"):
            properties.append(("8", str(attributes.commstatus)))
        if attributes.token:
            if len(attributes.token.encode()) > TEXT_BYTES_MAX or _NOT_IN_MQTT.search(attributes.token):
                what = f"text of at most {TEXT_BYTES_MAX} bytes without control characters"
                raise invalid(f"expected a token that MQTT can carry: {what}")
            properties.append(("10", attributes.token))
        if attributes.traceparent:
            properties.append(("11", attributes.traceparent))
        return Packet(
            topic,
            properties,
            expiry_s,
            uuids.to_bytes(attributes.reqid) if attributes.HasField("reqid") else None,
            str(attributes.payload_format) if attributes.payload_format else None,
            message.payload,
        )

    def _resolve_out(self, route: tuple[int, bytes, bytes | None], attributes: UAttributes) -> _Address:
        sink = attributes.sink if attributes.HasField("sink") else None
        attrs.validate_route(attributes.type, attributes.source if attributes.HasField("source") else None, sink)
        properties = [("2", _TYPE_NAMES[attributes.type]), ("3", uris.format(attributes.source))]
        if sink is not None:
            properties.append(("4", uris.format(sink)))
        out = self._out[route] = self.topic(attributes.type, attributes.source, sink), properties
        return out

    def read(self, packet: Packet, now_ms: int) -> tuple[UMessage, bool]:
        """Returns the message in `packet`, which arrives at `now_ms`, and whether its ttl depends on that time. The
        listener table validates the message.

        Raises UStatusError: INVALID_ARGUMENT if it can't be read, PERMISSION_DENIED if the topic name (which a broker's
        access rules check) belongs to another source or sink than the properties.
        """
        properties = dict(reversed(packet.user_properties))  # if a key comes twice, the first counts
        get = properties.get
        if get("uP", VERSION_TEXT) != VERSION_TEXT:  # may be missing
            raise invalid(f"expected uProtocol version {VERSION_TEXT} in the user property uP, got {get('uP')!r}")
        key = (get("2"), get("3"), get("4"), packet.topic)
        attributes = UAttributes.FromString(self._in.get(key) or self._resolve_in(key))
        attributes.id.CopyFrom(uuids.parse(_present(get("1"), "1 (id)")))
        if (priority := get("5")) is not None:
            if priority not in _PRIORITIES:
                raise invalid(f"expected CS0 to CS6 in the user property 5, got {priority!r}")
            attributes.priority = _PRIORITIES[priority]
        waited_s = max(0, now_ms - uuids.time_ms(attributes.id)) // 1000  # 0 in the future, since clocks differ
        ttl, is_restored = self._read_ttl(get, packet.expiry_s, waited_s)
        if ttl is not None:
            attributes.ttl = ttl
        if (level := get("7")) is not None:
            attributes.permission_level = _number(level, "7 (permission level)", 0xFFFF_FFFF)
        if (code := get("8")) is not None:
            attributes.commstatus = UCode.ValueType(_number(code, "8 (commstatus)", 0x7FFF_FFFF))
        if packet.correlation is not None:
            attributes.reqid.CopyFrom(uuids.from_bytes(packet.correlation))
        if (token := get("10")) is not None:
            attributes.token = token
        if (traceparent := get("11")) is not None:
            attributes.traceparent = traceparent
        if packet.content_type is not None:
            number = _number(packet.content_type, "content type", 0x7FFF_FFFF)
            attributes.payload_format = UPayloadFormat.ValueType(number)
        message = UMessage(attributes=attributes)
        if packet.payload or attributes.payload_format:  # absent and empty look alike on the wire
            message.payload = packet.payload
        return message, is_restored

    def _read_ttl(
        self, get: Callable[[str], str | None], expiry_s: int | None, waited_s: int
    ) -> tuple[int | None, bool]:
        """Returns the ttl in milliseconds (None: no ttl), and whether it depends on `waited_s`. Raises
        INVALID_ARGUMENT.

        An interval of 0 never becomes a ttl of 0 ms, which would never expire. mosquitto omits an interval of 0;
        FRESH_TTL shows that there was one.
        """
        if (exact := get("6")) is not None:
            return _number(exact, "6 (ttl)", TTL_MS_MAX), False
        if self._ttl_reading is TtlReading.SPECIFICATION:
            return (None if expiry_s is None else min(max(expiry_s, 1) * 1000, TTL_MS_MAX)), False
        if (exact := get(LATE_TTL)) is not None:
            return _number(exact, LATE_TTL, TTL_MS_MAX, at_least=1), False
        least = get(FRESH_TTL)
        if expiry_s is None and least is None:
            return None, False
        restored = min((waited_s + max(expiry_s or 0, 1)) * 1000, TTL_MS_MAX)
        if least is not None:  # a broker that counts whole seconds may subtract one too many
            restored = max(restored, _number(least, FRESH_TTL, TTL_MS_MAX, at_least=1))
        return restored, True

    def _resolve_in(self, key: tuple[str | None, str | None, str | None, str]) -> bytes:
        type_name, source_text, sink_text, topic = key
        type = _TYPES.get(_present(type_name, "2 (type)"))
        if type is None:
            raise invalid(f"expected a message type like up-pub.v1 in the user property 2, got {type_name!r}")
        source = uris.parse(_present(source_text, "3 (source)"))
        sink = uris.parse(sink_text) if sink_text is not None else None
        source, sink = self._completed(source, sink, topic.split("/"))
        expected = self.topic(type, source, sink)
        if topic != expected:
            why = f"expected topic {expected} for these addresses, got {topic}"
            raise UStatusError(UCode.PERMISSION_DENIED, why)
        found = self._in[key] = UAttributes(type=type, source=source, sink=sink).SerializeToString()
        return found

    def _completed(self, source: UUri, sink: UUri | None, segments: list[str]) -> tuple[UUri, UUri | None]:
        """Complete addresses without authority: they mean the sender's host, which is in the topic (A-20)."""
        has_sink = len(segments) == (2 if self.mode is Mode.OFF_VEHICLE else 10)
        source = uris.with_authority(source, segments[0])
        if sink is not None:
            sink = uris.with_authority(sink, segments[len(segments) // 2] if has_sink else segments[0])
        return source, sink


def _present(value: str | None, what: str) -> str:
    if value is None:
        raise invalid(f"expected the user property {what}, got none: not a uProtocol message")
    return value


def _number(text: str, what: str, at_most: int, at_least: int = 0) -> int:
    if not _DECIMAL.fullmatch(text) or not at_least <= int(text) <= at_most:
        raise invalid(f"expected a decimal number from {at_least} to {at_most} in {what}, got {text!r}")
    return int(text)
