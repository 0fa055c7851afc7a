"""A whole streamer on in-process networks, with uEntities on them."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from campaigns.simulation.network import FaultyNetwork
from streamer.app import Streamer
from streamer.assembly import Assembly
from streamer.config import Config, loads
from streamer.part import Parts
from streamer.parts.reloading import Reloader
from transports.conformance import Sink
from transports.local import LocalTransport
from uprotocol import uri as uris
from uprotocol.message import UMessageBuilder, UPayload
from uprotocol.transport import LocalUriProvider
from uprotocol.v1.uattributes_pb2 import UPayloadFormat
from uprotocol.v1.umessage_pb2 import UMessage
from uprotocol.v1.uri_pb2 import UUri

WAIT_S = 20  # a test that waits longer for one thing has failed
_numbers = itertools.count()

AUTHORITIES = {"vehicle": "vehicle1", "mcu": "mcu1", "cloud": "cloud"}
THREE = {"vehicle": "", "mcu": "none", "cloud": "none"}


def endpoints(usubscriptions: dict[str, str]) -> str:
    """TOML of endpoints by name, each with its mode of uSubscription ("": the default), on in-process networks."""
    return "".join(
        f'[[endpoint]]\nname = "{name}"\ntransport = "local"\nauthorities = ["{AUTHORITIES[name]}"]\n'
        f'settings = {{{{ network = "{{n}}-{name}" }}}}\n' + (f'usubscription = "{mode}"\n' if mode else "")
        for name, mode in usubscriptions.items()
    )


class Hearer(Sink):
    """Keeps the messages that it receives; tests can wait for them."""

    def __init__(self) -> None:
        super().__init__(WAIT_S)

    @property
    def texts(self) -> list[str]:
        return [message.payload.decode() for message in self.messages]


@dataclass
class World:
    """`streamer` runs; `networks` are its endpoints' by name."""

    number: int
    config: Config
    streamer: Streamer
    stack: AsyncExitStack
    networks: dict[str, FaultyNetwork] = field(default_factory=dict)
    running: asyncio.Task[None] | None = None

    @property
    def assembly(self) -> Assembly:
        return self.streamer.assembly

    @property
    def parts(self) -> Parts:
        return self.streamer.parts

    async def node(self, network: str, authority: str, entity: int = 0x8001) -> LocalTransport:
        """A uEntity of `authority` on the network of an endpoint."""
        node = LocalTransport.on(self.networks[network], LocalUriProvider(authority, entity, 1))
        await self.stack.enter_async_context(node)
        return node

    async def hear(self, node: LocalTransport, source: UUri, sink: UUri | None = None) -> Hearer:
        hearer = Hearer()
        await node.register_listener(source, hearer, sink)
        return hearer

    async def stop(self) -> None:
        if self.running is not None:
            self.streamer.stop()
            await asyncio.wait_for(self.running, WAIT_S)
            self.running = None

    async def restart(self) -> None:
        """Stop the streamer and start another on the same data."""
        await self.stop()
        await self.start()

    async def start(self) -> None:
        self.streamer = await Streamer.create(self.config)
        self.running = asyncio.create_task(self.streamer.run())
        ready = asyncio.create_task(self.streamer.assembly.ready.wait())
        await asyncio.wait({ready, self.running}, return_when=asyncio.FIRST_COMPLETED, timeout=WAIT_S)
        if not ready.done():
            ready.cancel()
            running, self.running = self.running, None
            if running.done():
                await running
            running.cancel()
            raise AssertionError(f"not ready: {self.streamer.parts.problems()}")

    async def reload(self, config: Config, *, dry_run: bool = False) -> list[str]:
        """Take over `config`; returns what changes."""
        reloader = self.parts.of(Reloader)
        reloader.read = lambda: config
        return [str(change) for change in await reloader.reload(dry_run=dry_run)]

    async def change_rule(self, ingress: str, egress: str, keys: dict[str, Any] | None) -> None:
        """Reload with another rule between two endpoints; `keys` None: without one."""
        others = [
            rule.model_dump(by_alias=True, exclude_unset=True)
            for rule in self.streamer.config.rules
            if (rule.from_, rule.to) != (ingress, egress)
        ]
        rule = [] if keys is None else [{"from": ingress, "to": egress, **keys}]
        await self.reload(changed(self.streamer.config, rule=[*others, *rule]))

    async def taken(self, endpoint: str) -> None:
        """Until the streamer has taken everything that is on the network of an endpoint."""
        transport = self.streamer.assembly.endpoints[endpoint].transport
        assert isinstance(transport, LocalTransport)
        await self.until(lambda: not transport.arrivals.waiting)

    async def until(self, condition: Callable[[], Any]) -> None:
        """Let everybody run until `condition` holds."""
        async with asyncio.timeout(WAIT_S):
            while not condition():  # noqa: ASYNC110 - any state may be asked for
                await asyncio.sleep(0.005)


MakeWorld = Callable[..., Awaitable[World]]


def changed(config: Config, **sections: Any) -> Config:
    """Returns the configuration with other sections."""
    return Config.model_validate({name: getattr(config, name) for name in config.model_fields_set} | sections)


@pytest.fixture(autouse=True)
def known_store(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other uSubscription services know the gateway's store, and are asked nothing; but for tests with the mark
    `new_store`."""
    if request.node.get_closest_marker("new_store") is None:
        monkeypatch.setattr("usubscription.audit.Auditor.is_new", False)


@pytest.fixture
async def make_world(tmp_path: Path) -> AsyncIterator[MakeWorld]:
    """`await make_world(endpoints, {topic: [subscribers]})`: a running streamer; "{n}" in TOML makes names of networks
    unique."""
    worlds: list[World] = []

    async def make(
        networks: str | dict[str, str] = THREE,
        subscriptions: dict[str, Sequence[str]] | None = None,
        more: str = "",
        start: bool = True,
        egress: str = "",
    ) -> World:
        toml = networks if isinstance(networks, str) else endpoints(networks)
        number = next(_numbers)
        head = f'[streamer]\ndata_dir = "{tmp_path}/data{number}"\n[egress]\nretry_min_ms = 1\nretry_max_ms = 20\n'
        head += egress
        if subscriptions is not None:
            (tmp_path / f"static{number}.json").write_text(json.dumps(subscriptions))
            head += f'[usubscription]\nstatic_file = "{tmp_path}/static{number}.json"\n'
        config = loads(head + more + toml.format(n=number))
        world = World(number, config, None, AsyncExitStack())  # type: ignore[arg-type]
        for endpoint in config.endpoint:
            world.networks[endpoint.name] = FaultyNetwork.named(endpoint.settings["network"])
        worlds.append(world)
        if start:
            await world.start()
        return world

    yield make
    for world in worlds:
        await world.stop()
        await world.stack.aclose()


def text(message: str) -> UPayload:
    return UPayload(message.encode(), UPayloadFormat.UPAYLOAD_FORMAT_TEXT)


def publication(topic: UUri | str, payload: str = "", **options: Any) -> UMessage:
    builder = UMessageBuilder.publish(uris.parse(topic) if isinstance(topic, str) else topic)
    for name, value in options.items():
        getattr(builder, f"with_{name}")(value)
    return builder.build_from_upayload(text(payload))


@pytest.fixture
def publish() -> Callable[..., UMessage]:
    """Makes a publish message."""
    return publication
