"""One gateway whose two endpoints are on one broker, in both modes, and the apps on both sides.

app of vehicle1 -- in-vehicle topics -- broker -- gateway -- the same broker -- off-vehicle topics -- app of cloud
"""

from __future__ import annotations

import asyncio
import itertools
import json
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from streamer.commands.demo.processes import Child
from tests.brokers.makes import AnyBroker, Make
from transports import plugin as plugins
from transports.conformance.sinks import Changes, Sink
from uprotocol import attributes as attrs
from uprotocol import uri as uris
from uprotocol.message import UMessageBuilder, UPayload
from uprotocol.transport import LocalUriProvider, UTransport
from uprotocol.v1.uattributes_pb2 import UPayloadFormat
from uprotocol.v1.umessage_pb2 import UMessage
from uprotocol.v1.uri_pb2 import UUri

WAIT_S: Final = 60.0  # for one thing, on a busy machine
QUIET_S: Final = 3.0  # behind the last message that was sent: what has not come by then is lost
SENDER, RECEIVER = 0x8001, 0x9001  # entities
TOPIC: Final = 0x8001
END: Final = b"end"
SESSION_S: Final = 3_600
_numbers: Final = itertools.count()

_CONFIG: Final = """
[streamer]
data_dir = "{folder}/data"
admin = "127.0.0.1:0"
log_level = "warning"
[egress]
retry_max_ms = 500
[usubscription]
static_file = "{folder}/subscriptions.json"
[[endpoint]]
name = "vehicle"
transport = "mqtt5"
authorities = ["vehicle1"]
usubscription = "none"
settings = {{ port = {port}, client_id = "{name}-vehicle", session_expiry_s = {session_s}{more} }}
[[endpoint]]
name = "cloud"
transport = "mqtt5"
authorities = ["cloud"]
usubscription = "none"
settings = {{ port = {port}, mode = "off-vehicle", client_id = "{name}-cloud", session_expiry_s = {session_s}{more} }}
"""


@dataclass
class App:
    """A uEntity on one side of the gateway."""

    transport: UTransport
    local: LocalUriProvider
    changes: Changes

    @property
    def authority(self) -> str:
        return self.local.get_source().authority_name

    async def hear_all(self, authority: str) -> Sink:
        """All publishes of that authority, with the filters that this side's mode takes."""
        heard = Sink(WAIT_S)
        if self.authority == "cloud":
            await self.transport.register_listener(uris.pattern(authority), heard, uris.pattern("cloud"))
        else:
            await self.transport.register_listener(uris.uri(authority, SENDER, 1, TOPIC), heard)
        return heard

    async def until_connected(self) -> None:
        if not self.transport.connected:
            await self.changes.until(True, WAIT_S)


@dataclass
class Stage:
    make: Make
    broker: AnyBroker
    folder: Path
    stack: AsyncExitStack
    gateway: Child | None = None
    name: str = field(
        default_factory=lambda: f"stage{next(_numbers)}"
    )  # its sessions', on a broker that others use, too

    async def start_gateway(self) -> None:
        """Start it, or start it again with the same data."""
        self.folder.mkdir(exist_ok=True)
        subscribed = {
            uris.format(uris.uri(authority, SENDER, 1, TOPIC)): [uris.format(uris.uri(other, RECEIVER, 1, 0))]
            for authority, other in (("vehicle1", "cloud"), ("cloud", "vehicle1"))
        }
        (self.folder / "subscriptions.json").write_text(json.dumps(subscribed))
        config = self.folder / "gateway.toml"
        more = "".join(f", {key} = {json.dumps(value)}" for key, value in self.make.endpoint.items())
        text = _CONFIG.format(folder=self.folder, port=self.broker.port, name=self.name, session_s=SESSION_S, more=more)
        config.write_text(text)
        self.gateway = await Child.start("gateway", "streamer.commands.cli", "run", "--config", str(config), "--json")
        self.stack.push_async_callback(self.gateway.stop)
        await self.gateway.say("ready")

    async def app(self, authority: str, entity: int = RECEIVER, *, keeps_session: bool = False) -> App:
        """One that `keeps_session` may be closed: its session waits for the next one of that kind."""
        settings: dict[str, Any] = {"port": self.broker.port, "mode": _MODES[authority], **self.make.endpoint}
        if keeps_session:
            settings |= {"client_id": f"{self.name}-app", "session_expiry_s": SESSION_S}
        local = LocalUriProvider(authority, entity, 1)
        transport = plugins.create("mqtt5", settings, local)
        changes = Changes(transport)
        await self.stack.enter_async_context(transport)
        return App(transport, local, changes)


_MODES: Final = {"vehicle1": "in-vehicle", "cloud": "off-vehicle"}


def raw(data: bytes) -> UPayload:
    return UPayload(data, UPayloadFormat.UPAYLOAD_FORMAT_RAW)


def topic(authority: str, resource: int = TOPIC) -> UUri:
    return uris.uri(authority, SENDER, 1, resource)


def publish(authority: str, payload: bytes) -> UMessage:
    """As an app of that side sends it: off-vehicle with the sink of a streamer."""
    if authority == "vehicle1":
        return UMessageBuilder.publish(topic(authority)).build_from_upayload(raw(payload))
    message = UMessageBuilder(attrs.PUBLISH, topic(authority), attrs.streamer_sink("vehicle1"))
    return message.build_from_upayload(raw(payload))


@dataclass(frozen=True)
class Counts:
    """What has arrived, against what was sent. `reordered`: messages that came first behind a later one."""

    sent: int
    lost: int
    doubled: int
    reordered: int

    @classmethod
    def of(cls, sent: list[bytes], heard: list[bytes]) -> Counts:
        places = {payload: place for place, payload in enumerate(sent)}
        found = [places[payload] for payload in heard if payload in places]
        firsts = list(dict.fromkeys(found))
        latest, reordered = -1, 0
        for place in firsts:
            reordered += place < latest
            latest = max(latest, place)
        return cls(len(sent), len(sent) - len(firsts), len(found) - len(firsts), reordered)

    def __str__(self) -> str:
        parts = [f"{count} {name}" for name in ("lost", "doubled", "reordered") if (count := getattr(self, name))]
        return f"{self.sent} sent: " + (", ".join(parts) or "all, once, in order")


async def all_of(heard: Sink, sent: list[bytes]) -> Counts:
    """Counts, when all has come, or when nothing more comes behind END."""
    missing = set(sent) | {END}
    looked_at = 0

    def is_whole() -> bool:
        nonlocal looked_at
        missing.difference_update(message.payload for message in heard.messages[looked_at:])
        looked_at = len(heard.messages)
        return not missing

    await heard.expect_payload(END)
    try:
        await heard.until(is_whole, "the rest", QUIET_S)
    except AssertionError:
        pass  # the counts say it
    else:
        await asyncio.sleep(0.1)  # a copy comes right behind
    return Counts.of(sent, heard.payloads)
