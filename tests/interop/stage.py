"""The stage of the interoperability tests: one gateway between three networks, each with its own uSubscription.

vehicle1 -- Zenoh (the gateway is its router; embedded uSubscription)
ecu1     -- MQTT 5 in-vehicle (`up-streamer usubscription`)                 a rust and a python party on each
cloud    -- MQTT 5 off-vehicle (`up-streamer usubscription`)

and Direct: two parties on one network, without a gateway.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import re
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from streamer.commands.demo.processes import Child
from tests.interop.parties import WAIT_S, Ear, Fields, Network, Party, PythonParty, RustParty
from tools.broker import Broker
from transports.ports import free_port
from uprotocol import attributes as attrs
from uprotocol import uri as uris
from uprotocol import uuid as uuids
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.uri_pb2 import UUri

RUST_ENTITY: Final = 0xA001
NAMELESS_ENTITY: Final = 0xA002  # leaves the authority out of its addresses
ADDRESSING_ENTITY: Final = 0xA003  # calls uSubscription with an authority
PYTHON_ENTITY: Final = 0x1_B001  # an instance, too
TOPIC: Final = 0x8001  # of the cells of messages: subscribed to by the static file
METHOD: Final = 0x0001
ECHO, FAILS = 0x0010, 0x0011  # methods that a party serves
PROBE_S: Final = 0.2

_CONFIG = """
[streamer]
data_dir = "{folder}/data"
admin = "127.0.0.1:0"
log_level = "info"

[usubscription]
static_file = "{folder}/subscriptions.json"

[[endpoint]]
name = "vehicle"
transport = "zenoh"
authorities = ["vehicle1"]
settings = {{ mode = "router", listen = ["{zenoh}"] }}

[[endpoint]]
name = "ecu"
transport = "mqtt5"
authorities = ["ecu1"]
settings = {{ port = {ecu_port} }}

[[endpoint]]
name = "cloud"
transport = "mqtt5"
authorities = ["cloud"]
settings = {{ port = {cloud_port}, mode = "off-vehicle" }}
"""


def mqtt(name: str, authority: str, broker: Broker, mode: str) -> Network:
    return Network(name, authority, "mqtt5", {"host": broker.host, "port": broker.port, "mode": mode})


@dataclass
class Hall:
    """Opens parties, and makes sure that they hear one another."""

    binary: Path
    folder: Path
    stack: AsyncExitStack
    _reached: set[tuple[int, int, str]] = field(default_factory=set)
    _entities: Iterator[int] = field(default_factory=lambda: itertools.count(0xC001))

    async def open(
        self, make: str, network: Network, entity: int, stack: AsyncExitStack | None = None, **options: Any
    ) -> Party:
        """A party, closed with `stack` or the hall."""
        party: Party
        if make == "rust":
            party = await RustParty.open(self.binary, network, entity, **options)
        else:
            party = await PythonParty.open(network, entity, **options)
        (stack or self.stack).push_async_callback(party.close)
        return party

    @contextlib.asynccontextmanager
    async def server(self, like: Party, *methods: int) -> AsyncIterator[Party]:
        """A party as `like` that serves ECHO, FAILS or both, while the context lasts.

        One of its own, since off-vehicle up-transport-mqtt5 would answer what others are asked, too.
        """
        async with AsyncExitStack() as stack:
            party = await self.open(like.make, like.network, next(self._entities), stack, authority=like.authority)
            for method in methods:
                await party.serve(method, UCode.RESOURCE_EXHAUSTED if method == FAILS else None)
            yield party

    async def ear(self, type: str, sender: Party, receiver: Party) -> Ear:
        """Where `receiver` hears that type of message from `sender`; when this returns, nothing is missed.

        Networks take a moment until they know of a listener, so messages are sent until one arrives.
        """
        if type == "publish":
            source, sink = sender.uri(TOPIC), None
            if receiver.network.off_vehicle:
                source, sink = uris.format(uris.ANY), uris.format(attrs.streamer_sink(receiver.host))
        else:
            source, sink = (
                uris.format(uris.ANY),
                uris.format(uris.uri(receiver.host, receiver.entity, 1, uris.WILDCARD_RESOURCE)),
            )
        ear = await receiver.ear(source, sink)
        if (key := (id(sender), id(receiver), type)) not in self._reached:
            await self._reach(sender, ear, type, receiver)
            self._reached.add(key)
        return ear

    async def _reach(self, sender: Party, ear: Ear, type: str, receiver: Party) -> None:
        try:
            async with asyncio.timeout(WAIT_S):
                while True:
                    sent = await sender.send(Fields(*addressed(type, sender, receiver), **least(type)))
                    with contextlib.suppress(TimeoutError):
                        await ear.expect(sent.attributes.id, PROBE_S)
                        return
        except TimeoutError:
            raise AssertionError(f"no {type} of {sender} reaches {receiver}{await self.hint()}") from None

    async def hint(self) -> str:
        """What may have kept a message from arriving."""
        return ""


@dataclass
class Stage(Hall):
    """Three networks, the gateway, the services, and who stands where."""

    networks: dict[str, Network] = field(default_factory=dict)
    parties: dict[tuple[str, str], Party] = field(default_factory=dict)
    # each cell of uSubscription has one of its own
    topics: Iterator[int] = field(default_factory=lambda: itertools.count(0x8100))
    admin_port: int = 0

    async def start(self, ecu: Broker, cloud: Broker) -> None:
        zenoh = f"tcp/127.0.0.1:{free_port()}"
        for network in (
            Network("zenoh", "vehicle1", "zenoh", {"mode": "client", "connect": [zenoh], "connect_timeout_ms": 20_000}),
            mqtt("mqtt-in", "ecu1", ecu, "in-vehicle"),
            mqtt("mqtt-off", "cloud", cloud, "off-vehicle"),
        ):
            self.networks[network.name] = network
        for name in ("mqtt-in", "mqtt-off"):
            await self._service(self.networks[name])
        self._write_subscriptions()
        config = self.folder / "gateway.toml"
        config.write_text(_CONFIG.format(folder=self.folder, zenoh=zenoh, ecu_port=ecu.port, cloud_port=cloud.port))
        gateway = await self._child("the gateway", "run", "--config", str(config), "--json")
        self.admin_port = (await gateway.say("ready"))["admin_port"]
        await self._until_ready()
        for name, network in self.networks.items():
            self.parties["rust", name] = await self.open("rust", network, RUST_ENTITY)
            self.parties["nameless", name] = await self.open("rust", network, NAMELESS_ENTITY, authority="")
            self.parties["addressing", name] = await self.open(
                "rust", network, ADDRESSING_ENTITY, usubscription=network.authority
            )
            self.parties["python", name] = await self.open("python", network, PYTHON_ENTITY)

    def _write_subscriptions(self) -> None:
        """Each topic of the cells is wanted by both parties of each other network."""
        subscriptions = {}
        for publisher in self.networks.values():
            others = [network for network in self.networks.values() if network is not publisher]
            wanted = [
                uris.format(uris.uri(one.authority, entity, 1, 0))
                for one in others
                for entity in (RUST_ENTITY, PYTHON_ENTITY)
            ]
            for entity in (RUST_ENTITY, NAMELESS_ENTITY, PYTHON_ENTITY):
                subscriptions[uris.format(uris.uri(publisher.authority, entity, 1, TOPIC)).removeprefix("up:")] = wanted
        text = json.dumps(
            {topic: [one.removeprefix("up:") for one in wanted] for topic, wanted in subscriptions.items()}
        )
        (self.folder / "subscriptions.json").write_text(text)

    async def _service(self, network: Network) -> None:
        options = ["--authority", network.authority, "--transport", "mqtt5", "--json"]
        for key, value in network.settings.items():
            options += ["--set", f"{key}={value}"]
        store = self.folder / f"{network.authority}.db"
        child = await self._child(
            f"uSubscription of {network.authority}", "usubscription", *options, "--store", str(store)
        )
        await child.say("ready")

    async def _child(self, name: str, *command: str) -> Child:
        child = await Child.start(name, "streamer.commands.cli", *command)
        self.stack.push_async_callback(child.stop)
        return child

    async def _until_ready(self) -> None:
        problems: list[str] = ["it has not answered yet"]
        try:
            async with asyncio.timeout(WAIT_S):
                while problems := await asyncio.to_thread(self._problems):  # noqa: ASYNC110 - it is another process
                    await asyncio.sleep(0.1)
        except TimeoutError:
            raise AssertionError(f"the gateway is not ready: {problems}") from None

    def _get(self, path: str) -> str:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.admin_port}{path}", timeout=10) as answer:
                return str(answer.read().decode())
        except urllib.error.HTTPError as error:
            with error:
                return error.read().decode()

    def _problems(self) -> list[str]:
        return list(json.loads(self._get("/readyz"))["problems"])

    async def subscribers(self, authority: str, topic: str) -> list[str]:
        """Who is subscribed, as the service of that authority says."""
        party = next(one for (role, _), one in self.parties.items() if role == "python" and one.host == authority)
        assert isinstance(party, PythonParty)
        return await party.subscribers(topic)

    async def until_no_subscribers(self, authority: str, topic: str) -> None:
        async with asyncio.timeout(WAIT_S):
            while await self.subscribers(authority, topic):  # noqa: ASYNC110 - services tell each other
                await asyncio.sleep(0.1)

    async def hint(self) -> str:
        metrics = await asyncio.to_thread(self._get, "/metrics")
        dropped = re.findall(r"^up_streamer_((?:dropped|dead_letters)_total\S+ [1-9]\S*)$", metrics, re.MULTILINE)
        return f"; the gateway has dropped {dropped}"

    def party(self, role: str, network: str) -> Party:
        """`rust`, `python`; `nameless` and `addressing` are rust, too."""
        return self.parties[role, network]


@dataclass
class Direct(Hall):
    """One network without a gateway: `rust`, `nameless` and `together` (python) are on device1, `python` is on
    device2."""

    parties: dict[str, Party] = field(default_factory=dict)

    async def start(self, name: str, broker: Broker) -> None:
        def ends() -> tuple[str, dict[str, Any], dict[str, Any]]:
            """Transport and settings of two that meet."""
            if name != "zenoh":
                mode = "in-vehicle" if name == "mqtt-in" else "off-vehicle"
                settings = {"host": broker.host, "port": broker.port, "mode": mode}
                return "mqtt5", settings, settings
            place = [f"tcp/127.0.0.1:{free_port()}"]
            return "zenoh", {"mode": "peer", "listen": place}, {"mode": "peer", "connect": place}

        transport, first, second = ends()
        self.parties["rust"] = await self.open("rust", Network(name, "device1", transport, first), RUST_ENTITY)
        self.parties["python"] = await self.open("python", Network(name, "device2", transport, second), PYTHON_ENTITY)
        transport, first, second = ends()
        at_home = Network(name, "device1", transport, first)
        self.parties["nameless"] = await self.open("rust", at_home, NAMELESS_ENTITY, authority="")
        self.parties["together"] = await self.open("python", at_home._replace(settings=second), PYTHON_ENTITY)


def addressed(type: str, sender: Party, receiver: Party) -> tuple[str, str, str | None]:
    """Type, source and sink of what `sender` sends to `receiver`."""
    if type == "publish":
        return (
            type,
            sender.written(TOPIC),
            uris.format(attrs.streamer_sink(receiver.host)) if sender.network.off_vehicle else None,
        )
    source = {"notification": TOPIC, "request": 0, "response": METHOD}[type]
    return type, sender.written(source), receiver.uri(METHOD if type == "request" else 0)


def least(type: str) -> dict[str, Any]:
    """The fields without which a message of that type is none."""
    rpc = {"ttl_ms": 20_000} if type in ("request", "response") else {}
    return rpc | ({"reqid": uuids.format(uuids.new())} if type == "response" else {})


def arriving_sink(type: str, receiver: Party) -> UUri | None:
    """A publish has a streamer's sink on an off-vehicle network, and only there."""
    return attrs.streamer_sink(receiver.host) if type == "publish" and receiver.network.off_vehicle else None
