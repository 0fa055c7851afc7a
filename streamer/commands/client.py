"""What the command line does as an ordinary uEntity on one network: subscribe, publish, call, look into a history.

Network(transport, settings, authority) -> opened transport -> L2 clients -> lines for a person, or JSON
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from google.protobuf.json_format import MessageToDict

from history.damage import Damage
from streamer import config as configs
from transports import plugin as plugins
from uprotocol import uri as uris
from uprotocol import uuid as uuids
from uprotocol.attributes import PUBLISH
from uprotocol.communication import CallOptions, InMemoryRpcClient
from uprotocol.core.ustreamer.v1.ustreamer_pb2 import DeadLetter, Sample
from uprotocol.message import UMessageBuilder, UPayload
from uprotocol.status import UStatusError, code_name, invalid
from uprotocol.transport import LocalUriProvider, UTransport
from uprotocol.v1.uattributes_pb2 import UMessageType, UPayloadFormat, UPriority
from uprotocol.v1.umessage_pb2 import UMessage
from uprotocol.v1.uri_pb2 import UUri

ENTITY: Final = 0x1_C11  # of the command line itself; instances keep several of them apart
VERSION: Final = 1
RECEIVED_MAX: Final = 100_000  # messages that wait to be printed; a terminal that lags loses nothing before that


@dataclass(frozen=True)
class Network:
    """A network and who we are on it."""

    transport: str
    authority: str
    settings: dict[str, Any] = field(default_factory=dict)
    entity: int = ENTITY

    @property
    def local(self) -> LocalUriProvider:
        return LocalUriProvider(self.authority, self.entity, VERSION)

    @asynccontextmanager
    async def open(self) -> AsyncIterator[UTransport]:
        transport = plugins.create(self.transport, self.settings, self.local)
        async with transport:
            yield transport


def network_of(path: Path, endpoint: str, authority: str | None, entity: int) -> Network:
    """The network of an endpoint of a streamer's configuration. What the streamer listens on, we connect to."""
    config = configs.load(path)
    section = next((one for one in config.endpoint if one.name == endpoint), None)
    if section is None:
        raise invalid(
            f"{path} has no endpoint {endpoint!r}; there are {', '.join(one.name for one in config.endpoint)}"
        )
    settings = dict(section.settings)
    if section.transport == "zenoh" and settings.get("listen"):
        settings["connect"] = [*settings.get("connect", []), *settings.pop("listen")]
        if settings.get("mode") == "router":  # it is the streamer that brings its guests together; we are one
            settings["mode"] = "client"
    for own in ("client_id", "clean_start", "session_expiry_s"):
        settings.pop(own, None)
    named = [one for one in section.authorities if not uris.is_pattern(one)]
    if authority is None and not named:
        raise invalid(f"endpoint {endpoint!r} names no authority: say who you are with --authority")
    return Network(section.transport, authority or named[0], settings, entity)


def parse_settings(texts: Sequence[str]) -> dict[str, Any]:
    """`key=value` with JSON values where they parse, text otherwise; `a.b=1` nests."""
    settings: dict[str, Any] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or not key:
            raise invalid(f"expected KEY=VALUE, got {text!r}")
        try:
            parsed = json.loads(value)
        except json.JSONDecodeError:
            parsed = value
        *path, last = key.split(".")
        table = settings
        for part in path:
            table = table.setdefault(part, {})
            if not isinstance(table, dict):
                raise invalid(f"{part!r} in {text!r} has been given a value already: it can't have keys, too")
        if isinstance(table.get(last), dict) and not isinstance(parsed, dict):
            raise invalid(f"{key!r} in {text!r} has been given keys already: it can't be a value, too")
        table[last] = parsed
    return settings


# What a message says


def payload_value(message: UMessage) -> Any:
    """The payload as JSON can say it: known messages and text as such, everything else as hex."""
    payload, format = message.payload, message.attributes.payload_format
    if not message.HasField("payload"):
        return None
    try:
        if format == UPayloadFormat.UPAYLOAD_FORMAT_TEXT:
            return payload.decode()
        if format == UPayloadFormat.UPAYLOAD_FORMAT_JSON:
            return json.loads(payload)
    except ValueError:
        return payload.hex()
    if format in (UPayloadFormat.UPAYLOAD_FORMAT_PROTOBUF, UPayloadFormat.UPAYLOAD_FORMAT_PROTOBUF_WRAPPED_IN_ANY):
        for type in (Sample, DeadLetter):
            try:
                known = UPayload.of(message).unpack(type)
            except UStatusError:
                continue
            if known.SerializeToString(deterministic=True) and (not isinstance(known, Sample) or known.path):
                return MessageToDict(known, preserving_proto_field_name=True)
    return payload.hex()


def as_dict(message: UMessage) -> dict[str, Any]:
    """A message as plain data; absent attributes are left out."""
    attributes = message.attributes
    data: dict[str, Any] = {
        "id": uuids.format(attributes.id),
        "time_ms": uuids.time_ms(attributes.id),
        "type": UMessageType.Name(attributes.type)[len("UMESSAGE_TYPE_") :].lower(),
        "source": uris.format(attributes.source),
    }
    if attributes.HasField("sink"):
        data["sink"] = uris.format(attributes.sink)
    if attributes.priority in UPriority.values() and attributes.priority:
        data["priority"] = UPriority.Name(attributes.priority)[len("UPRIORITY_") :]
    if attributes.ttl:
        data["ttl_ms"] = attributes.ttl
    if attributes.HasField("commstatus"):
        data["commstatus"] = code_name(attributes.commstatus)
    if message.HasField("payload"):
        data["payload_format"] = (
            UPayloadFormat.Name(attributes.payload_format)[len("UPAYLOAD_FORMAT_") :]
            if attributes.payload_format in UPayloadFormat.values()
            else attributes.payload_format
        )
        data["payload"] = payload_value(message)
    return data


def as_line(message: UMessage) -> str:
    data = as_dict(message)
    payload = data.get("payload")
    if isinstance(payload, dict) and "path" in payload:
        value = next((payload[key] for key in ("double_value", "string_value", "bool_value") if key in payload), None)
        payload = f"{payload['path']} = {value}"
    return f"{data['type']:<12} {data['source']}{' -> ' + data['sink'] if 'sink' in data else ''}  {payload if payload is not None else ''}"


def payload_of(text: str | None, as_json: str | None, as_hex: str | None, file: Path | None) -> UPayload | None:
    """One of the four ways to say a payload on the command line; none of them is no payload."""
    given = [one for one in (text, as_json, as_hex, file) if one is not None]
    if len(given) > 1:
        raise invalid("say the payload once: one of --text, --json-payload, --hex and --file")
    if text is not None:
        return UPayload(text.encode(), UPayloadFormat.UPAYLOAD_FORMAT_TEXT)
    if as_json is not None:
        try:
            json.loads(as_json)
        except ValueError as error:
            raise invalid(f"--json-payload is not JSON: {error}") from None
        return UPayload(as_json.encode(), UPayloadFormat.UPAYLOAD_FORMAT_JSON)
    if as_hex is not None:
        try:
            return UPayload(bytes.fromhex(as_hex), UPayloadFormat.UPAYLOAD_FORMAT_RAW)
        except ValueError as error:
            raise invalid(f"--hex is not hexadecimal: {error}") from None
    if file is not None:
        try:
            return UPayload(file.read_bytes(), UPayloadFormat.UPAYLOAD_FORMAT_RAW)
        except OSError as error:
            raise invalid(f"can't read {file}: {error.strerror}") from None
    return None


def damage_as_dict(damage: Damage) -> dict[str, Any]:
    """What a log has lost, as plain data."""
    return {
        "time_ms": damage.when_ms,
        "kind": damage.kind,
        "after_seq": damage.after,
        "before_seq": damage.before,
        "records_at_most": damage.records,
        "incarnation": damage.incarnation.hex(),
        "moved_to": damage.moved_to,
        "detail": damage.detail,
    }


def damage_as_line(row: dict[str, Any]) -> str:
    where = f" the records between {row['after_seq']} and {row['before_seq']}" if row["before_seq"] else ""
    kept = f" (kept as {row['moved_to']})" if row["moved_to"] else ""
    return f"{row['kind']}:{where}{kept} {row['detail']}".rstrip()


# What can be done


class Collector:
    """A listener that hands what it hears to a queue."""

    def __init__(self) -> None:
        self.queue: asyncio.Queue[UMessage] = asyncio.Queue(RECEIVED_MAX)

    def on_receive(self, message: UMessage) -> Awaitable[None] | None:
        if self.queue.full():
            return self.queue.put(message)
        self.queue.put_nowait(message)
        return None


async def listen(
    network: Network,
    topics: Sequence[UUri],
    each: Callable[[UMessage], None],
    *,
    count: int | None,
    subscribe: bool,
    on_listening: Callable[[], None] = lambda: None,
) -> int:
    """Hand every message on `topics` to `each`, until `count` have come. With `subscribe` the network's uSubscription
    is told."""
    from usubscription_client.client import USubscriptionClient

    collector = Collector()
    received = 0
    async with network.open() as transport:
        for topic in topics:
            await transport.register_listener(topic, collector)
        client = USubscriptionClient(transport, network.local, network.authority) if subscribe else None
        try:
            if client is not None:
                await client.open()
                for topic in topics:
                    await client.subscribe(topic)
            on_listening()
            while count is None or received < count:
                each(await collector.queue.get())
                received += 1
        finally:
            if client is not None:
                for topic in topics:
                    await client.unsubscribe(topic)
                await client.close()
    return received


async def publish(
    network: Network,
    topic: UUri,
    payload: UPayload | None,
    *,
    count: int,
    ttl_ms: int | None,
    priority: UPriority.ValueType,
) -> list[UMessage]:
    """Publish `count` times. Raises the first UStatusError."""
    messages = []
    for _ in range(count):
        builder = UMessageBuilder(PUBLISH, topic).with_priority(priority)
        if ttl_ms is not None:
            builder.with_ttl(ttl_ms)
        messages.append(builder.build_from_upayload(payload))
    async with network.open() as transport:
        for status in await transport.send_batch(messages):
            if status.code:
                raise UStatusError.from_status(status)
    return messages


async def call(network: Network, method: UUri, payload: UPayload | None, options: CallOptions) -> UPayload:
    """Invoke a method and return its answer. Raises UStatusError."""
    async with network.open() as transport, InMemoryRpcClient(transport, network.local) as client:
        return await client.invoke_method(method, payload or UPayload(), options)
