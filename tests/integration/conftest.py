"""A streamer in its own process, between real networks."""

from __future__ import annotations

import asyncio
import json
import re
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from streamer.commands.demo.processes import Child
from tests.known_store import make_known_store
from tests.tiers import dds_domain
from tools.broker import Broker
from transports import plugin as plugins
from transports.conformance import Sink
from transports.ports import free_port
from uprotocol.transport import LocalUriProvider, UTransport
from uprotocol.v1.uri_pb2 import UUri

WAIT_S = 60  # a test fails if it waits longer than this for one event


class Hearer(Sink):
    """Keeps the messages that it receives, and can wait for them."""

    def __init__(self) -> None:
        super().__init__(WAIT_S)

    @property
    def unique(self) -> list[bytes]:
        """Returns the payloads without repeated ids."""
        first = {(m.attributes.id.msb, m.attributes.id.lsb): m.payload for m in reversed(self.messages)}
        return [first.pop(id) for m in self.messages if (id := (m.attributes.id.msb, m.attributes.id.lsb)) in first]


@dataclass
class Gateway:
    """One streamer process. After `kill` or `stop`, `start` continues with the same data."""

    config: Path
    stack: AsyncExitStack
    broker: Broker
    zenoh_port: int
    dds_tag: str
    child: Child | None = None
    admin_port: int = 0
    _nodes: list[UTransport] = field(default_factory=list)

    async def start(self, *wrapper: str) -> None:
        self.child = await Child.start(
            "the gateway", *(wrapper or ("streamer.commands.cli",)), "run", "--config", str(self.config), "--json"
        )
        self.stack.push_async_callback(self.child.stop)
        self.admin_port = (await self.child.say("ready"))["admin_port"]

    async def zenoh(self, authority: str = "vehicle1", entity: int = 0x8001) -> UTransport:
        return await self.node(
            "zenoh", authority, {"connect": [f"tcp/127.0.0.1:{self.zenoh_port}"], "connect_timeout_ms": 20_000}, entity
        )

    async def mqtt(self, authority: str = "cloud", entity: int = 0x9001, **settings: Any) -> UTransport:
        return await self.node(
            "mqtt5", authority, {"host": self.broker.host, "port": self.broker.port, **settings}, entity
        )

    async def dds(self, authority: str = "mcu1", entity: int = 0x9001) -> UTransport:
        settings = {
            "domain_id": dds_domain(),
            "interface": "lo",
            "multicast": False,
            "peers": ["127.0.0.1"],
            "tag": self.dds_tag,
        }
        return await self.node("dds", authority, settings, entity)

    async def node(self, transport: str, authority: str, settings: dict[str, Any], entity: int) -> UTransport:
        return await self.stack.enter_async_context(
            plugins.create(transport, settings, LocalUriProvider(authority, entity, 1))
        )

    async def hear(self, node: UTransport, source: UUri, sink: UUri | None = None) -> Hearer:
        hearer = Hearer()
        await node.register_listener(source, hearer, sink)
        return hearer

    def _get(self, path: str) -> str:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.admin_port}{path}", timeout=10) as answer:
                text: str = answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                text = error.read().decode()
        return text

    async def problems(self) -> list[str]:
        return list(json.loads(await asyncio.to_thread(self._get, "/readyz"))["problems"])

    async def metrics(self) -> dict[str, float]:
        """Returns the values by `name{labels}` without the prefix."""
        text = await asyncio.to_thread(self._get, "/metrics")
        return {name: float(value) for name, value in re.findall(r"^up_streamer_(\S+) (\S+)$", text, re.MULTILINE)}

    async def until(self, condition: Callable[[dict[str, float]], Any]) -> dict[str, float]:
        """Waits until the metrics meet the condition."""
        async with asyncio.timeout(WAIT_S):
            while not condition(found := await self.metrics()):  # noqa: ASYNC110 - it is another process
                await asyncio.sleep(0.1)
        return found

    async def until_problems(self, condition: Callable[[list[str]], Any]) -> list[str]:
        async with asyncio.timeout(WAIT_S):
            while not condition(found := await self.problems()):  # noqa: ASYNC110 - it is another process
                await asyncio.sleep(0.1)
        return found

    async def until_ready(self) -> None:
        await self.until_problems(lambda problems: not problems)


MakeGateway = Callable[..., Awaitable[Gateway]]

HEAD = """
[streamer]
data_dir = "{folder}/data"
admin = "127.0.0.1:0"
log_level = "warning"
[egress]
retry_max_ms = 500
"""
ENDPOINTS = {
    "vehicle": """
[[endpoint]]
name = "vehicle"
transport = "zenoh"
authorities = ["vehicle1"]
settings = {{ listen = ["tcp/127.0.0.1:{zenoh}"], {vehicle} }}
""",
    "cloud": """
[[endpoint]]
name = "cloud"
transport = "mqtt5"
authorities = ["cloud"]
settings = {{ host = "127.0.0.1", port = {mqtt}, {cloud} }}
""",
    "mcu": """
[[endpoint]]
name = "mcu"
transport = "dds"
authorities = ["mcu1"]
settings = {{ domain_id = {domain}, interface = "lo", multicast = false, peers = ["127.0.0.1"], tag = "{tag}" }}
""",
}


@pytest.fixture
async def make_gateway(tmp_path: Path) -> AsyncIterator[MakeGateway]:
    """`await make_gateway(broker, "vehicle cloud", {topic: [subscribers]})` starts a gateway with the named endpoints.

    `vehicle` and `cloud` are their further settings, `usubscription` is their mode, and `extra` is further TOML.
    """
    async with AsyncExitStack() as stack:

        async def make(
            broker: Broker,
            endpoints: str = "vehicle cloud",
            subscriptions: dict[str, list[str]] | None = None,
            *,
            more: str = "",
            vehicle: str = "",
            cloud: str = "",
            extra: str = "",
            usubscription: dict[str, str] | None = None,
            domain: int = dds_domain(),
            start: bool = True,
        ) -> Gateway:
            port, tag = free_port(), tmp_path.name
            text = HEAD.format(folder=tmp_path) + more
            if subscriptions is not None:
                (tmp_path / "subscriptions.json").write_text(json.dumps(subscriptions))
                text += f'[usubscription]\nstatic_file = "{tmp_path}/subscriptions.json"\n'
            parts = "".join(ENDPOINTS[name] for name in endpoints.split())
            text += parts.format(zenoh=port, mqtt=broker.port, domain=domain, tag=tag, vehicle=vehicle, cloud=cloud)
            text = text.replace(",  }", " }")
            for name, mode in ({"cloud": "none", "mcu": "none"} | (usubscription or {})).items():
                text = text.replace(f'name = "{name}"\n', f'name = "{name}"\nusubscription = "{mode}"\n')
            (tmp_path / "gateway.toml").write_text(text + extra)
            make_known_store(tmp_path / "data", "vehicle1")
            gateway = Gateway(tmp_path / "gateway.toml", stack, broker, port, tag)
            if start:
                await gateway.start()
            return gateway

        yield make
