"""MQTT 5 through a real mosquitto: the conformance suite, in both modes."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Callable
from typing import Any

import paho.mqtt.client as paho
import pytest
import pytest_asyncio
from paho.mqtt.enums import CallbackAPIVersion, MQTTProtocolVersion
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties

from tests.transports.mqtt5_mapping import Mapping
from tests.transports.mqtt5_proxy import RefusingProxy
from tools.broker import Broker
from transports.conformance import TransportConformance
from transports.conformance.addresses import AddressConformance
from transports.conformance.messages import reply, topic
from transports.mqtt5 import Mqtt5Config, Mqtt5Transport
from transports.mqtt5.mapping import Mode, Packet
from uprotocol import attributes as attrs
from uprotocol import uri as uris
from uprotocol import uuid as uuids
from uprotocol.transport import Capability, LocalUriProvider, UTransport
from uprotocol.v1.umessage_pb2 import UMessage
from uprotocol.v1.uri_pb2 import UUri

pytestmark = pytest.mark.broker

NOT_AUTHORIZED = 0x87
BASE = Capability.PUSH | Capability.ENCODED | Capability.ABSENCE | Capability.ACK | Capability.PERSISTENT_SESSION


def raw_publish(broker: Broker, packets: list[Packet], qos: int = 1) -> None:
    """With plain paho, as a foreign client would."""
    client = paho.Client(CallbackAPIVersion.VERSION2, protocol=MQTTProtocolVersion.MQTTv5)
    client.connect(broker.host, broker.port)
    client.loop_start()
    for packet in packets:
        properties = Properties(PacketTypes.PUBLISH)
        if packet.user_properties:
            properties.UserProperty = list(packet.user_properties)
        if packet.expiry_s is not None:
            properties.MessageExpiryInterval = packet.expiry_s
        if packet.correlation is not None:
            properties.CorrelationData = packet.correlation
        if packet.content_type is not None:
            properties.ContentType = packet.content_type
        client.publish(packet.topic, packet.payload, qos, properties=properties).wait_for_publish(10)
    client.disconnect()
    client.loop_stop()


class Mqtt5Conformance(TransportConformance):
    mode: Mode
    flood_messages = 5_000  # Receive Maximum is 2,048
    network_drops_too_large = True
    slows_senders = False  # mosquitto keeps that many and more for a slow end

    @pytest_asyncio.fixture(autouse=True)
    async def network(
        self, broker: Broker, make_broker: Callable[..., Broker], request: pytest.FixtureRequest
    ) -> AsyncIterator[None]:
        """Each end has a link of its own to the broker, which a test can cut. Where it matters that nobody listens, or
        the broker is restarted, to a broker of its own: on the other one sessions of earlier tests still do."""
        name = request.function.__name__
        is_alone = name in vars(AddressConformance) or name.endswith("the_network_forgot_us")
        self.broker, self.make_broker = make_broker() if is_alone else broker, make_broker
        self.proxies: dict[str, RefusingProxy] = {}
        self.session = uuid.uuid4().hex
        yield
        for proxy in self.proxies.values():
            await proxy.stop()

    async def make_end(self, authority: str, **limits: int) -> UTransport:
        return await self.end(authority, **limits)

    async def make_returning(self, authority: str) -> UTransport:
        return await self.end(authority, client_id=f"{authority}-{self.session}")

    async def end(self, authority: str, **settings: Any) -> UTransport:
        proxy = self.proxies.setdefault(authority, RefusingProxy(self.broker.host, self.broker.port))
        if not proxy.port:
            await proxy.start()
        return Mqtt5Transport(
            Mqtt5Config(port=proxy.port, mode=self.mode, **settings), LocalUriProvider(authority, 0x10AB, 3)
        )

    async def make_unreachable(self, authority: str) -> UTransport:
        return Mqtt5Transport(Mqtt5Config(port=1, mode=self.mode), LocalUriProvider(authority, 0x10AB, 3))

    async def make_refused(self, authority: str) -> UTransport:
        broker = self.make_broker(users={"friend": "secret"})
        config = Mqtt5Config(port=broker.port, mode=self.mode, username="stranger", password="secret")
        return Mqtt5Transport(config, LocalUriProvider(authority, 0x10AB, 3))

    async def make_deaf(self, authority: str) -> UTransport:
        """mosquitto takes every subscription, and an access file only keeps messages back."""
        end = await self.make_end(authority)
        await self.refuse_filter(authority, topic(), reply())
        return end

    async def refuse_filter(self, authority: str, source: UUri, sink: UUri) -> None:
        proxy = self.proxies[authority]
        proxy.refused[Mapping(self.mode, authority).topic_filter(source, sink)] = NOT_AUTHORIZED

    async def allow_filters(self, authority: str) -> None:
        self.proxies[authority].refused.clear()

    async def refuse_address(self, authority: str, source: UUri, sink: UUri | None) -> None:
        """mosquitto 2.0.11 hangs up after such an answer, which is a test of its own."""
        type = attrs.PUBLISH if sink is None or attrs.is_streamer_sink(sink) else attrs.NOTIFICATION
        topic = Mapping(self.mode, authority).topic(type, source, sink)
        self.proxies[authority].refused_topics[topic] = NOT_AUTHORIZED

    async def allow_addresses(self, authority: str) -> None:
        self.proxies[authority].refused_topics.clear()

    def normalise(self, message: UMessage) -> UMessage:
        if not message.attributes.ttl:
            message.attributes.ClearField("ttl")
        return super().normalise(message)

    async def inject(self, message: UMessage) -> None:
        mapping = Mapping(self.mode, "alpha")
        source, sink = message.attributes.source, message.attributes.sink
        topic = mapping.topic(message.attributes.type or 4, source, sink)
        valid = UMessage()
        valid.CopyFrom(message)
        valid.attributes.type = message.attributes.type or 4
        packet = mapping.encode(valid)
        found = dict(packet.user_properties)
        if not message.attributes.HasField("id"):
            del found["1"]
        if not message.attributes.type:
            del found["2"]
        raw_publish(self.broker, [packet._replace(topic=topic, user_properties=list(found.items()))])

    async def inject_malformed(self, source: UUri, sink: UUri) -> int:
        mapping = Mapping(self.mode, "alpha")
        topic = mapping.topic(4, source, sink)
        good = {
            "uP": "1",
            "1": uuids.format(uuids.new()),
            "2": "up-not.v1",
            "3": uris.format(source),
            "4": uris.format(sink),
        }
        changes: list[dict[str, Any]] = [
            dict.fromkeys(good),
            {"uP": "2"},
            {"1": "no id"},
            {"2": "up-unknown.v1"},
            {"3": "up://"},
            {"3": uris.format(source).replace("alpha", "mallory")},
            {"4": "http://beta/1/1/0"},
            {"5": "CS9"},
            {"6": "soon"},
            {"7": "-1"},
            {"8": "0x1"},
        ]
        packets = [
            Packet(topic, [(k, v) for k, v in (good | change).items() if v is not None], payload=b"x")
            for change in changes
        ]
        valid = Packet(topic, list(good.items()), payload=b"x")
        packets += [valid._replace(correlation=b"short"), valid._replace(content_type="text/plain")]
        raw_publish(self.broker, packets)
        raw_publish(self.broker, packets, qos=0)
        return 2 * len(packets)

    async def inject_misplaced(self, message: UMessage, authority: str) -> None:
        elsewhere = UMessage()
        elsewhere.CopyFrom(message)
        elsewhere.attributes.source.authority_name = authority
        mapping = Mapping(self.mode, authority)
        raw_publish(self.broker, [mapping.encode(message)._replace(topic=mapping.encode(elsewhere).topic)])

    async def break_network(self, authority: str) -> None:
        self.proxies[authority].cut()

    async def heal_network(self, authority: str) -> None:
        self.proxies[authority].mend()

    async def forget_network(self, authority: str) -> None:
        """The broker keeps nothing over a stop."""
        self.broker.kill()
        await self.broker.start_async()

    def peer_process(self, authority: str) -> tuple[str, dict[str, Any]]:
        return "transports.mqtt5:PLUGIN", {"port": self.broker.port, "mode": str(self.mode)}


class TestInVehicle(Mqtt5Conformance):
    mode = Mode.IN_VEHICLE
    routes_streamed_publish = False  # in-vehicle topics have a publish's source only (section 6.3)
    capabilities = BASE | Capability.WILDCARD_SOURCE | Capability.PUBLISH_WITHOUT_SINK


class TestOffVehicle(Mqtt5Conformance):
    mode = Mode.OFF_VEHICLE
    capabilities = BASE
