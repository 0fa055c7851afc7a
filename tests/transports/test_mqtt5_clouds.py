"""The recipes of docs/brokers.md for AWS IoT Core and Azure Event Grid: a gateway with each against a profile of that
cloud. The clouds themselves are not asked."""

from __future__ import annotations

import asyncio
import itertools
import re
from collections.abc import AsyncIterator, Awaitable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from streamer.app import Streamer
from streamer.config import loads
from tests.certificates import TestAuthority
from tests.transports.mqtt5_answering import serving
from tests.transports.mqtt5_clouds import AWS, AZURE, CloudBroker, Profile, serving_tls, tls_of
from tests.transports.mqtt5_websocket import WebSocketBridge
from transports.conformance.sinks import Sink
from transports.local import LocalConfig, LocalTransport
from transports.mqtt5 import Mqtt5Config, Mqtt5Transport, link
from uprotocol import attributes as attrs
from uprotocol import uri as uris
from uprotocol.communication import CallOptions, InMemoryRpcClient, InMemoryRpcServer
from uprotocol.message import UMessageBuilder, UPayload
from uprotocol.status import UStatusError
from uprotocol.transport import LocalUriProvider, UTransport
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.umessage_pb2 import UMessage

PAGE = Path(__file__).resolve().parents[2] / "docs" / "brokers.md"
RECIPES = re.findall(r"^```toml\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
AWS_RECIPE, AZURE_RECIPE, AZURE_ON_443 = (
    next(text for text in RECIPES if words in text) for words in ("amazonaws", "azure.net", "websocket")
)
WAIT_S = 20
# what the policy of the page lets vehicle1 and backend do, as topics and as topic filters
TOPICS = {"vehicle1/backend", "backend/vehicle1", "+/vehicle1", "+/backend"}
VEHICLE_TOPIC, CLOUD_TOPIC = uris.parse("//vehicle1/8001/1/8001"), uris.parse("//backend/8001/1/8001")
METHOD = uris.parse("//vehicle1/8001/1/1")
_numbers = itertools.count()

HOME = """
[streamer]
data_dir = "{folder}/data"
[usubscription]
static_file = "{folder}/subscriptions.json"
[[endpoint]]
name = "home"
transport = "local"
authorities = ["vehicle1"]
settings = {{ network = "{network}" }}
"""


def configured(recipe: str, folder: Path, port: int) -> str:
    """The recipe with this host, this port, and the files of `folder`."""
    text = re.sub(r'host = "EXAMPLE[^"]*"', 'host = "localhost"', recipe)
    text = re.sub(r"^port = \d+", f"port = {port}", text, flags=re.MULTILINE)
    text = re.sub(r'^(\w+_file) = "(.*)"', rf'\1 = "{folder}/\2"', text, flags=re.MULTILINE)
    return text if "ca_file" in text else text + f'ca_file = "{folder}/ca.pem"\n'


@dataclass
class Stage:
    cloud: CloudBroker
    streamer: Streamer
    vehicle: UTransport  # an app at home
    backend: UTransport  # one at the broker

    async def until_connected(self) -> None:
        ends = self.streamer.assembly.endpoints["cloud"].transport, self.backend
        async with asyncio.timeout(WAIT_S):
            while not all(one.connected for one in ends):  # noqa: ASYNC110
                await asyncio.sleep(0.005)


@asynccontextmanager
async def stage(profile: Profile, recipe: str, folder: Path, *, websocket: bool = False) -> AsyncIterator[Stage]:
    authority = TestAuthority(folder)
    (folder / "AmazonRootCA1.pem").write_bytes(authority.ca.read_bytes())
    authority.issue("vehicle1")
    authority.issue("backend")
    async with AsyncExitStack() as stack:
        cloud = CloudBroker(profile, TOPICS)
        if websocket:
            await stack.enter_async_context(serving(cloud))
            bridge = WebSocketBridge("127.0.0.1", cloud.port, tls_of(profile, authority))
            await bridge.start()
            stack.push_async_callback(bridge.stop)
            port = bridge.port
        else:
            await stack.enter_async_context(serving_tls(cloud, authority))
            port = cloud.port
        network = f"clouds-{next(_numbers)}"
        home = HOME.format(folder=folder, network=network)
        (folder / "subscriptions.json").write_text(
            f'{{"{uris.format(VEHICLE_TOPIC)}": ["//backend/9001/1/0"], '
            f'"{uris.format(CLOUD_TOPIC)}": ["//vehicle1/9001/1/0"]}}'
        )
        config = loads(home + configured(recipe, folder, port))
        (settings,) = (one.settings for one in config.endpoint if one.name == "cloud")
        streamer = await Streamer.create(config)
        running = asyncio.create_task(streamer.run())

        async def stop() -> None:
            streamer.stop()
            await asyncio.wait_for(running, WAIT_S)

        stack.push_async_callback(stop)
        await asyncio.wait_for(streamer.assembly.ready.wait(), WAIT_S)
        local = LocalTransport(LocalConfig(network=network), LocalUriProvider("vehicle1", 0x9001, 1))
        theirs = {
            **settings,
            "client_id": "backend",
            "tls": {
                **settings["tls"],
                "cert_file": folder / "backend.pem",
                "key_file": folder / "backend.key",
            },
        }
        backend = Mqtt5Transport(Mqtt5Config(**theirs), LocalUriProvider("backend", 0x9001, 1))
        yield Stage(
            cloud,
            streamer,
            await stack.enter_async_context(local),
            await stack.enter_async_context(backend),
        )
        assert not cloud.breaches


def publish(topic: Any, text: str, size: int = 0) -> UMessage:
    """As an app at home sends it; off-vehicle a publish has the sink of a streamer."""
    payload = UPayload(text.encode() + b" " * size, 6)
    if topic is VEHICLE_TOPIC:
        return UMessageBuilder.publish(topic).build_from_upayload(payload)
    return UMessageBuilder(attrs.PUBLISH, topic, attrs.streamer_sink("vehicle1")).build_from_upayload(payload)


async def exchange(on: Stage, round: str, heard: tuple[Sink, Sink]) -> None:
    """Publishes both ways, and a notification."""
    at_home, at_cloud = heard
    before = len(at_home.messages), len(at_cloud.messages)
    for number in range(20):
        await on.vehicle.send(publish(VEHICLE_TOPIC, f"{round} {number}"))
        await on.backend.send(publish(CLOUD_TOPIC, f"{round} {number}"))
    note = UMessageBuilder.notification(uris.parse("//vehicle1/9001/1/8005"), uris.parse("//backend/9001/1/0"))
    await on.vehicle.send(note.build_from_upayload(UPayload(b"note", 6)))
    expected = [f"{round} {number}".encode() for number in range(20)]
    await at_home.expect(before[0] + 20)
    await at_cloud.expect(before[1] + 21)
    assert at_home.payloads[before[0] :] == expected
    assert [one for one in at_cloud.payloads[before[1] :] if one != b"note"] == expected


class Heard(Sink):
    """Without the gateway's requests to a uSubscription there."""

    def on_receive(self, message: UMessage) -> Awaitable[None] | None:
        return None if message.attributes.type == attrs.REQUEST else super().on_receive(message)


async def listen(on: Stage) -> tuple[Sink, Sink]:
    at_home, at_cloud = Heard(WAIT_S), Heard(WAIT_S)
    await on.vehicle.register_listener(CLOUD_TOPIC, at_home)
    await on.backend.register_listener(uris.pattern("vehicle1"), at_cloud, uris.pattern("backend"))
    return at_home, at_cloud


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reconnect is not waited for."""
    monkeypatch.setattr(link, "RECONNECT_MS", (10,))


CLOUDS = [
    pytest.param(AWS, AWS_RECIPE, False, id="AWS"),
    pytest.param(AZURE, AZURE_RECIPE, False, id="Azure"),
    pytest.param(AZURE, AZURE_RECIPE.replace("port = 8883\n", AZURE_ON_443), True, id="Azure on 443"),
]


@pytest.mark.parametrize(("profile", "recipe", "websocket"), CLOUDS)
async def test_a_gateway_with_the_recipe(profile: Profile, recipe: str, websocket: bool, tmp_path: Path) -> None:
    """Publishes and notifications both ways, calls, a connection that is lost, and a session that has expired."""
    async with stage(profile, recipe, tmp_path, websocket=websocket) as on:
        heard = await listen(on)
        await exchange(on, "first", heard)
        for end in (on.cloud.end_connections, on.cloud.forget):
            connections = on.cloud.connections
            end()
            await on.cloud.until(lambda count=connections: on.cloud.connections >= count + 2)  # type: ignore[misc]
            await on.until_connected()
            await exchange(on, end.__name__, heard)
        callee, caller = LocalUriProvider("vehicle1", 0x8001, 1), LocalUriProvider("backend", 0x9001, 1)
        server = InMemoryRpcServer(on.vehicle, callee)
        await server.register_request_handler(7, lambda request: UPayload(request.payload.upper(), 6))
        async with InMemoryRpcClient(on.backend, caller) as client:
            answer = await client.invoke_method(callee.get_resource(7), UPayload(b"ping", 6), CallOptions(10_000))
        assert answer.data == b"PING"
        await server.close()
        if not websocket:
            assert set(on.cloud.agreed) == {profile.alpn or None}
            assert set(on.cloud.names) == {"vehicle1", "backend"}


async def test_what_a_cloud_refuses_costs_no_connection(tmp_path: Path) -> None:
    """A payload that is too large, and a topic that no policy allows."""
    async with stage(AWS, AWS_RECIPE, tmp_path) as on:
        heard = await listen(on)
        connections = on.cloud.connections
        for size in (131_073, 131_072):
            await on.vehicle.send(publish(VEHICLE_TOPIC, "x", size - 1))
        (message,) = await heard[1].expect(1)
        assert len(message.payload) == 131_072
        for status in await on.backend.send_batch([publish(CLOUD_TOPIC, "y", 200_000)]):
            assert status.code == UCode.INVALID_ARGUMENT
        stranger = UMessageBuilder.notification(CLOUD_TOPIC, uris.parse("//vehicle2/9001/1/0"))
        (status,) = await on.backend.send_batch([stranger.build_from_upayload(UPayload(b"z", 6))])
        assert status.code == UCode.PERMISSION_DENIED
        assert on.cloud.connections == connections


async def test_in_vehicle_topics_are_refused(tmp_path: Path) -> None:
    """As the page says: a publish passes, and notifications, which have nine slashes, never do."""
    broker = CloudBroker(AWS, TOPICS | {"backend/8001/0/1/8001"})
    async with serving(broker):
        config = Mqtt5Config(port=broker.port, sys_topics=False)
        async with Mqtt5Transport(config, LocalUriProvider("backend", 0x8001, 1)) as one:
            await one.send(UMessageBuilder.publish(CLOUD_TOPIC).build_from_upayload(UPayload(b"1", 6)))
            note = UMessageBuilder.notification(CLOUD_TOPIC, uris.parse("//vehicle1/9001/1/0"))
            (status,) = await one.send_batch([note.build_from_upayload(UPayload(b"2", 6))])
            assert status.code == UCode.PERMISSION_DENIED
            assert "Topic name invalid" in status.message


async def test_a_port_that_requires_alpn_disconnects_without_it(tmp_path: Path) -> None:
    authority = TestAuthority(tmp_path)
    files = dict(zip(("cert_file", "key_file"), authority.issue("vehicle1"), strict=True))
    async with serving_tls(CloudBroker(AWS, TOPICS), authority) as broker:
        config = Mqtt5Config(host="localhost", port=broker.port, tls={"ca_file": authority.ca, **files})
        with pytest.raises(UStatusError) as refused:
            await Mqtt5Transport(config, LocalUriProvider("vehicle1", 0x8001, 1)).open()
        assert refused.value.code == UCode.UNAVAILABLE
