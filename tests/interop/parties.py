"""Two makes of uEntity with one interface: up-rust's, as a process, and ours.

test -> Party.send(Fields) -> UMessage, as it was sent        Party.listen -> Ear.expect(id) -> UMessage, as it arrived
            RustParty: JSON lines to interop-client (src/main.rs)      PythonParty: uprotocol and transports, in-process
"""

from __future__ import annotations

import abc
import asyncio
import contextlib
import itertools
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

from streamer.commands.demo.processes import die_with_parent
from transports import plugin as plugins
from uprotocol import attributes as attrs
from uprotocol import uri as uris
from uprotocol import uuid as uuids
from uprotocol.communication import CallOptions, InMemoryRpcClient, InMemoryRpcServer
from uprotocol.core.usubscription import wire
from uprotocol.core.usubscription.v3 import usubscription_pb2 as v3
from uprotocol.message import UMessageBuilder, UPayload
from uprotocol.status import UStatusError
from uprotocol.transport import LocalUriProvider
from uprotocol.v1.uattributes_pb2 import UPayloadFormat, UPriority
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.umessage_pb2 import UMessage
from uprotocol.v1.uuid_pb2 import UUID
from usubscription_client import Subscription
from usubscription_client.client import USubscriptionClient

WAIT_S: Final = 30.0  # a cell that waits longer for one thing has failed; long, since the machine may be busy
STOP_S: Final = 5.0
LINE_BYTES_MAX: Final = 1 << 20
TEXT: Final = UPayloadFormat.UPAYLOAD_FORMAT_TEXT


class Network(NamedTuple):
    """One of the networks on which uEntities live; `settings` are those of our transport."""

    name: str
    authority: str
    transport: str
    settings: dict[str, Any]

    @property
    def off_vehicle(self) -> bool:
        return self.settings.get("mode") == "off-vehicle"

    def rust(self) -> dict[str, Any]:
        """The same network in the words of up-rust's transports; only what the cells need."""
        if self.transport == "mqtt5":
            broker = f"mqtt://{self.settings['host']}:{self.settings['port']}"
            return {"transport": "mqtt5", "broker": broker, "off_vehicle": self.off_vehicle}
        settings = {
            "mode": self.settings["mode"],
            "connect/endpoints": list(self.settings.get("connect", ())),
            "listen/endpoints": list(self.settings.get("listen", ())),
            "scouting/multicast/enabled": False,
        }
        return {"transport": "zenoh", "settings": settings}


@dataclass(frozen=True)
class Fields:
    """What a message is to be; None leaves a field out."""

    type: str
    source: str
    sink: str | None = None
    ttl_ms: int | None = None
    priority: int | None = None
    token: str | None = None
    permission_level: int | None = None
    traceparent: str | None = None
    commstatus: int | None = None
    reqid: str | None = None
    payload: str | None = None  # hex
    payload_format: int = 0


class Refused(Exception):
    """What the other side answered instead; `code` where it gave one."""

    def __init__(self, code: int | None, message: str) -> None:
        super().__init__(f"{UCode.Name(UCode.ValueType(code)) if code is not None else 'no code'}: {message}")
        self.code, self.message = code, message


@dataclass(eq=False)
class Ear:
    """A listener that can be waited for."""

    messages: list[UMessage] = field(default_factory=list)
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    def on_receive(self, message: UMessage) -> None:
        self.messages.append(message)
        self._changed.set()

    def has(self, id: UUID) -> bool:
        return any(message.attributes.id == id for message in self.messages)

    async def expect(self, id: UUID, within_s: float = WAIT_S) -> UMessage:
        """The message of that id. Raises TimeoutError."""
        return (await self.until(lambda: [one for one in self.messages if one.attributes.id == id], 1, within_s))[0]

    async def until(self, find: Callable[[], list[UMessage]], count: int, within_s: float = WAIT_S) -> list[UMessage]:
        """What is found, when it is as many as that. Raises TimeoutError."""
        async with asyncio.timeout(within_s):
            while len(found := find()) < count:
                self._changed.clear()
                await self._changed.wait()
        return found


class Update(NamedTuple):
    topic: str
    state: int


class Party(abc.ABC):
    """One uEntity. `host` is the authority of its transport; `authority` that of its addresses, "" if it leaves it
    out."""

    make: str

    def __init__(self, network: Network, entity: int, authority: str | None) -> None:
        self.network, self.entity, self.host = network, entity, network.authority
        self.authority = self.host if authority is None else authority
        self.updates: asyncio.Queue[Update] = asyncio.Queue()
        self._heard: dict[tuple[str, str | None], Ear] = {}

    def __repr__(self) -> str:
        return f"{self.make} on {self.network.name}"

    def uri(self, resource: int) -> str:
        """Own address, as others write it."""
        return uris.format(uris.uri(self.host, self.entity, 1, resource))

    def written(self, resource: int) -> str:
        """Own address, as this party writes it."""
        return uris.format(uris.uri(self.authority, self.entity, 1, resource))

    async def ear(self, source: str, sink: str | None = None) -> Ear:
        """The one ear for these filters."""
        if (source, sink) not in self._heard:
            self._heard[source, sink] = await self.listen(source, sink)
        return self._heard[source, sink]

    async def until_update(self, topic: str, state: int) -> None:
        """Raises TimeoutError if the subscription's handler is not told that."""
        async with asyncio.timeout(WAIT_S):
            while await self.updates.get() != Update(topic, state):
                pass

    @abc.abstractmethod
    async def until_notified(self, topic: str, state: int) -> None:
        """Raises TimeoutError if no Update arrives that says that, whether or not there is a handler yet."""

    @abc.abstractmethod
    async def listen(self, source: str, sink: str | None) -> Ear: ...

    @abc.abstractmethod
    async def send(self, fields: Fields) -> UMessage:
        """Raises Refused."""

    @abc.abstractmethod
    async def send_built(self, message: UMessage) -> None: ...

    @abc.abstractmethod
    async def serve(self, method: int, fails: int | None = None) -> None:
        """Answer with the payload in upper case, or with that code."""

    @abc.abstractmethod
    async def call(self, method: str, payload: str, ttl_ms: int, token: str | None = None) -> str: ...

    @abc.abstractmethod
    async def subscribe(self, topic: str) -> Ear:
        """As the communication layer does it: tell uSubscription, and listen."""

    @abc.abstractmethod
    async def unsubscribe(self, topic: str) -> None: ...

    @abc.abstractmethod
    async def close(self) -> None: ...


class RustParty(Party):
    make = "rust"

    def __init__(
        self, network: Network, entity: int, authority: str | None, process: asyncio.subprocess.Process
    ) -> None:
        super().__init__(network, entity, authority)
        self._process, self._ids = process, itertools.count()
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._ears: dict[str, Ear] = {}
        self._notified = Ear()
        self._reader = asyncio.create_task(self._read())

    @classmethod
    async def open(
        cls, binary: Path, network: Network, entity: int, authority: str | None = None, usubscription: str | None = None
    ) -> RustParty:
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            binary, stdin=pipe, stdout=pipe, limit=LINE_BYTES_MAX, preexec_fn=die_with_parent, start_new_session=True
        )
        party = cls(network, entity, authority, process)
        options = {"authority": party.authority, "host": party.host, "entity": entity, "usubscription": usubscription}
        await party.do("open", **options, **network.rust())
        return party

    async def _read(self) -> None:
        assert self._process.stdout is not None
        async for line in self._process.stdout:
            said = json.loads(line)
            if "ear" in said:
                self._ears[said["ear"]].on_receive(UMessage.FromString(bytes.fromhex(said["umessage"])))
            elif "update" in said:
                self.updates.put_nowait(Update(**said["update"]))
            elif not (waiting := self._answers.pop(said["id"])).done():  # else nobody waits for it any more
                if "error" in said:
                    waiting.set_exception(Refused(**said["error"]))
                else:
                    waiting.set_result(said["ok"])
        for waiting in self._answers.values():
            if not waiting.done():
                waiting.set_exception(Refused(None, "interop-client has ended; what it said last is on standard error"))

    async def do(self, command: str, **arguments: Any) -> Any:
        assert self._process.stdin is not None
        id = next(self._ids)
        self._answers[id] = asyncio.get_running_loop().create_future()
        self._process.stdin.write(json.dumps({"id": id, "do": command, **arguments}).encode() + b"\n")
        async with asyncio.timeout(WAIT_S):
            return await self._answers[id]

    async def listen(self, source: str, sink: str | None) -> Ear:
        name = f"{source} {sink}"
        ear = self._ears.setdefault(name, Ear())
        await self.do("listen", name=name, source=source, sink=sink)
        return ear

    async def send(self, fields: Fields) -> UMessage:
        return UMessage.FromString(bytes.fromhex(await self.do("send", **asdict(fields))))

    async def send_built(self, message: UMessage) -> None:
        await self.do("send_encoded", umessage=message.SerializeToString().hex())

    async def serve(self, method: int, fails: int | None = None) -> None:
        await self.do("serve", method=method, fails=fails)

    async def call(self, method: str, payload: str, ttl_ms: int, token: str | None = None) -> str:
        return str(await self.do("call", method=method, payload=payload, ttl_ms=ttl_ms, token=token))

    async def subscribe(self, topic: str) -> Ear:
        ear = self._ears.setdefault(topic, Ear())
        self._notified = await self.ear(f"//{self.host}/0/3/8000", self.uri(0))
        await self.do("subscribe", topic=topic)
        return ear

    async def until_notified(self, topic: str, state: int) -> None:
        """InMemorySubscriber adds its handler when the answer has come, and misses an Update that is quicker."""
        wanted = Update(topic, state)
        await self._notified.until(lambda: [one for one in self._notified.messages if _update(one) == wanted], 1)

    async def unsubscribe(self, topic: str) -> None:
        """Not `InMemorySubscriber.unsubscribe`, which names no topic (test_in_memory_subscriber_unsubscribes)."""
        await self.do("usubscription", method="unsubscribe", topic=topic)

    async def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()  # the end of its commands is the end of it
        try:
            async with asyncio.timeout(STOP_S):
                await self._process.wait()
        except TimeoutError:
            self._process.kill()
            await self._process.wait()
        await self._reader


class PythonParty(Party):
    make = "python"

    def __init__(self, network: Network, entity: int, authority: str | None) -> None:
        super().__init__(network, entity, authority)
        self._local = LocalUriProvider(self.host, entity, 1)
        self.transport = plugins.create(network.transport, network.settings, self._local)
        self._rpc = InMemoryRpcClient(self.transport, self._local)
        self._server = InMemoryRpcServer(self.transport, self._local)
        self._usubscription: USubscriptionClient | None = None

    @classmethod
    async def open(cls, network: Network, entity: int, authority: str | None = None) -> PythonParty:
        party = cls(network, entity, authority)
        await party.transport.open()
        await party._rpc.open()
        return party

    async def listen(self, source: str, sink: str | None) -> Ear:
        ear = Ear()
        await self.transport.register_listener(uris.parse(source), ear, uris.parse(sink) if sink is not None else None)
        return ear

    async def send(self, fields: Fields) -> UMessage:
        message = _build(fields)
        await self.send_built(message)
        return message

    async def send_built(self, message: UMessage) -> None:
        with _refusals():
            await self.transport.send(message)

    async def serve(self, method: int, fails: int | None = None) -> None:
        def handle(request: UMessage) -> UPayload:
            if fails is not None:
                raise UStatusError(UCode.ValueType(fails), "as it was told to")
            return UPayload(request.payload.upper(), request.attributes.payload_format)

        await self._server.register_request_handler(method, handle)

    async def call(self, method: str, payload: str, ttl_ms: int, token: str | None = None) -> str:
        options = CallOptions(timeout_ms=ttl_ms, token=token)
        with _refusals():
            answer = await self._rpc.invoke_method(uris.parse(method), UPayload(payload.encode(), TEXT), options)
        return answer.data.decode()

    async def _client(self) -> USubscriptionClient:
        if self._usubscription is None:
            self._usubscription = USubscriptionClient(self.transport, self._local)
            await self._usubscription.open()
            self._usubscription.on_change(self._changed)
        return self._usubscription

    async def subscribers(self, topic: str) -> list[str]:
        """What the service of the own authority says."""
        return [uris.format(one) for one in await (await self._client()).fetch_subscribers(uris.parse(topic))]

    async def subscribe(self, topic: str) -> Ear:
        client = await self._client()
        source = uris.parse(topic)
        sink = uris.format(attrs.streamer_sink(self.host)) if self.network.off_vehicle else None
        ear = await self.listen(topic, sink) if sink is None else await self.listen(uris.format(uris.ANY), sink)
        await client.subscribe(source)
        return ear

    async def until_notified(self, topic: str, state: int) -> None:
        await self.until_update(topic, state)

    def _changed(self, change: Subscription) -> None:
        self.updates.put_nowait(Update(uris.format(change.topic), int(change.status)))

    async def unsubscribe(self, topic: str) -> None:
        await (await self._client()).unsubscribe(uris.parse(topic))

    async def close(self) -> None:
        if self._usubscription is not None:
            await self._usubscription.close()
        await self._server.close()
        await self._rpc.close()
        await self.transport.close()


def _update(message: UMessage) -> Update | None:
    """None for what else comes to the same address: off-vehicle, up-transport-mqtt5 hands over whatever is for the
    authority."""
    source = message.attributes.source
    if message.attributes.type != attrs.NOTIFICATION or source != wire.service(
        source.authority_name, 3, wire.CHANGE_RESOURCE
    ):
        return None
    update = UPayload.of(message).unpack(v3.Update)
    return Update(uris.format(update.topic), update.status.state)


@contextlib.contextmanager
def _refusals() -> Any:
    try:
        yield
    except UStatusError as error:
        raise Refused(error.code, error.message) from None


def _build(fields: Fields) -> UMessage:
    types = {
        "publish": attrs.PUBLISH,
        "notification": attrs.NOTIFICATION,
        "request": attrs.REQUEST,
        "response": attrs.RESPONSE,
    }
    sink = uris.parse(fields.sink) if fields.sink is not None else None
    builder = UMessageBuilder(types[fields.type], uris.parse(fields.source), sink)
    if fields.type == "request":
        builder.with_priority(UPriority.UPRIORITY_CS4)
    if fields.reqid is not None:
        assert fields.type == "response"
        assert sink is not None
        builder = UMessageBuilder.response(uris.parse(fields.source), sink, uuids.parse(fields.reqid))
    if fields.priority is not None:
        builder.with_priority(UPriority.ValueType(fields.priority))
    if fields.ttl_ms is not None:
        builder.with_ttl(fields.ttl_ms)
    if fields.token is not None:
        builder.with_token(fields.token)
    if fields.permission_level is not None:
        builder.with_permission_level(fields.permission_level)
    if fields.traceparent is not None:
        builder.with_traceparent(fields.traceparent)
    if fields.commstatus is not None:
        builder.with_commstatus(UCode.ValueType(fields.commstatus))
    if fields.payload is None:
        return builder.build()
    return builder.build_from_upayload(
        UPayload(bytes.fromhex(fields.payload), UPayloadFormat.ValueType(fields.payload_format))
    )
