"""Invalid input from a network is counted or answered, and everything else continues: one streamer process, three real
networks.

vehicle1 -- Zenoh --+-- gateway --+-- MQTT 5 -- cloud
mcu1 ------- DDS ---+
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import paho.mqtt.client as paho
import pytest
import zenoh
from paho.mqtt.enums import CallbackAPIVersion, MQTTProtocolVersion
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties

from tests.tiers import dds_domain
from tests.transports import zenoh_attachments
from tests.transports.mqtt5_mapping import Mapping
from tools.broker import Broker
from transports.dds import mapping as dds_mapping
from transports.dds.config import DdsConfig
from transports.dds.link import Participant
from transports.dds.writers import Batch, Outgoing, WriterRoute, Writers
from transports.mqtt5.mapping import Mode
from transports.zenoh import ZenohConfig
from transports.zenoh import mapping as zenoh_mapping
from uprotocol import uri as uris
from uprotocol.communication import InMemoryRpcClient
from uprotocol.core.usubscription.v3.usubscription_pb2 import SubscriptionRequest, SubscriptionResponse
from uprotocol.message import UMessageBuilder, UPayload
from uprotocol.status import UStatusError
from uprotocol.transport import LocalUriProvider
from uprotocol.v1.uattributes_pb2 import UAttributes, UMessageType, UPayloadFormat
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.umessage_pb2 import UMessage
from uprotocol.v1.uri_pb2 import UUri

pytestmark = [pytest.mark.broker, pytest.mark.timeout(180)]

SPEED = uris.parse("//vehicle1/8001/1/8001")
RPM = uris.parse("//mcu1/8001/1/8001")
ALARM = uris.parse("//cloud/8001/1/8001")
CLOUD_APP = uris.parse("//cloud/9001/1/0")
SUBSCRIBED = {
    "//vehicle1/8001/1/8001": ["//cloud/9001/1/0"],
    "//mcu1/8001/1/8001": ["//cloud/9001/1/0"],
    "//cloud/8001/1/8001": ["//vehicle1/9001/1/0"],
}
DOMAIN = dds_domain()
TEXT = UPayloadFormat.UPAYLOAD_FORMAT_TEXT

MakeGateway = Callable[..., Awaitable[Any]]


def says(topic: UUri, text: str) -> UMessage:
    return UMessageBuilder.publish(topic).build_from_upayload(UPayload(text.encode(), TEXT))


def invalid_and_expired(topic: UUri) -> list[UMessage]:
    """Returns messages that no valid sender would send."""
    no_id = UMessage(attributes=UAttributes(type=UMessageType.UMESSAGE_TYPE_PUBLISH, source=topic))
    expired = says(topic, "expired")
    expired.attributes.id.msb -= 60_000 << 16
    expired.attributes.ttl = 1_000
    return [no_id, expired]


def foreign(sink: UUri = CLOUD_APP) -> UMessage:
    """Returns a message in the name of an authority that is on none of the networks on which it is sent."""
    return UMessageBuilder.notification(uris.parse("//streamer/8001/1/8001"), sink).build()


def dropped(metrics: dict[str, float], endpoint: str) -> dict[str, float]:
    start = f'dropped_total{{endpoint="{endpoint}",reason="'
    return {name[len(start) : -2]: value for name, value in metrics.items() if name.startswith(start)}


@contextlib.asynccontextmanager
async def raw_zenoh(port: int) -> AsyncIterator[Callable[[str, bytes, bytes | None], Awaitable[None]]]:
    session = await asyncio.to_thread(zenoh.open, ZenohConfig(connect=[f"tcp/127.0.0.1:{port}"]).to_zenoh())

    async def put(key: str, payload: bytes, attachment: bytes | None) -> None:
        publisher = session.declare_publisher(key)
        async with asyncio.timeout(30):
            while not publisher.matching_status.matching:  # noqa: ASYNC110 - Zenoh reports it on its own thread
                await asyncio.sleep(0.01)
        publisher.put(payload, attachment=attachment)

    yield put
    session.close()


@pytest.mark.spec("req~utransport-send-prevent-address-spoofing~1")
async def test_a_zenoh_sample_that_is_none_is_counted_and_the_next_one_goes_on(
    make_gateway: MakeGateway, broker: Broker
) -> None:
    gateway = await make_gateway(broker, "vehicle cloud", SUBSCRIBED)
    heard = await gateway.hear(await gateway.mqtt(), uris.pattern("vehicle1"))
    noted = await gateway.hear(await gateway.mqtt(entity=0x9001), uris.ANY, CLOUD_APP)
    vehicle = await gateway.zenoh()
    key = zenoh_mapping.filter_key(SPEED, None, "vehicle1")
    async with raw_zenoh(gateway.zenoh_port) as put:
        for attachment in (None, b"", b"\x01", b"\x02" + bytes(20), b"\x01\xff\xff\xff", bytes(range(256))):
            await put(key, b"malformed", attachment)
        for message in invalid_and_expired(SPEED):
            await put(key, message.payload, zenoh_attachments.encode(message))
        spoof = foreign()
        await put(zenoh_mapping.message_key(spoof, "streamer"), b"", zenoh_attachments.encode(spoof))
    await vehicle.send(says(SPEED, "good"))
    await heard.expect(1)
    metrics = await gateway.until(lambda m: dropped(m, "vehicle").get("spoofed"))
    assert heard.payloads == [b"good"]
    assert noted.messages == []
    counted = dropped(metrics, "vehicle")
    assert counted["spoofed"] == 1
    assert counted["expired"] == 1
    assert sum(counted.values()) == 9
    assert await gateway.problems() == []


async def _write(writers: Writers, route: WriterRoute, samples: list[bytes]) -> None:
    """Writes raw octets, and waits until the network has them."""
    loop, written = asyncio.get_running_loop(), asyncio.Event()
    batch = Batch(len(samples), lambda _: loop.call_soon_threadsafe(written.set))

    def put_all() -> None:
        for place, sample in enumerate(samples):
            writers.put(Outgoing(batch, place, route, sample))

    writers.submit(put_all)
    await written.wait()


async def test_a_dds_sample_that_is_none_is_counted_and_the_next_one_goes_on(
    make_gateway: MakeGateway, broker: Broker
) -> None:
    gateway = await make_gateway(broker, "vehicle cloud mcu", SUBSCRIBED, domain=DOMAIN)
    heard = await gateway.hear(await gateway.mqtt(), uris.pattern("mcu1"))
    settings = {
        "domain_id": DOMAIN,
        "interface": "lo",
        "multicast": False,
        "peers": ["127.0.0.1"],
        "tag": gateway.dds_tag,
    }
    mcu = await gateway.node("dds", "mcu1", settings, 0x8001)
    await mcu.send(says(RPM, "first"))
    await heard.expect(1)  # from now on they know each other
    participant = Participant(DdsConfig(**settings))
    writers = Writers(participant, writers_max=16, timeout_s=1.0)
    try:
        good = dds_mapping.encode(says(RPM, "x"))
        samples = [
            dds_mapping.pack(b"", b"no attributes", has_payload=True),
            dds_mapping.pack(b"\xff\xff\xff", b"attributes that don't parse", has_payload=True),
            good[:4] + b"\x02" + good[5:],  # another version
            *(dds_mapping.encode(message) for message in invalid_and_expired(RPM)),
        ]
        spoof = foreign()
        async with asyncio.timeout(60):
            # repeated until the gateway has found this writer
            while sum(dropped(metrics := await gateway.metrics(), "mcu").values()) < 6:
                route = WriterRoute(dds_mapping.writer_partition(RPM, None, "mcu1"), 0, None)
                spoofed = WriterRoute(dds_mapping.writer_partition(spoof.attributes.source, CLOUD_APP, "mcu1"), 0, None)
                await _write(writers, route, samples)
                await _write(writers, spoofed, [dds_mapping.encode(spoof)])
                await asyncio.sleep(0.5)
    finally:
        writers.close()
        participant.close()
    assert {"expired", "spoofed"} < set(dropped(metrics, "mcu"))
    await mcu.send(says(RPM, "good"))
    await heard.expect(2)
    assert heard.payloads == [b"first", b"good"]
    assert await gateway.problems() == []


def raw_mqtt(broker: Broker, packets: list[tuple[str, dict[str, str], bytes]]) -> None:
    """Publishes with plain paho, as a foreign client would."""
    client = paho.Client(CallbackAPIVersion.VERSION2, protocol=MQTTProtocolVersion.MQTTv5)
    client.connect(broker.host, broker.port)
    client.loop_start()
    for topic, found, payload in packets:
        properties = Properties(PacketTypes.PUBLISH)
        if found:
            properties.UserProperty = list(found.items())
        client.publish(topic, payload, 1, properties=properties).wait_for_publish(10)
    client.disconnect()
    client.loop_stop()


async def test_an_mqtt_packet_that_is_no_message_is_counted_and_the_next_one_goes_on(
    make_gateway: MakeGateway, broker: Broker
) -> None:
    gateway = await make_gateway(broker, "vehicle cloud", SUBSCRIBED)
    heard = await gateway.hear(await gateway.zenoh(), uris.pattern("cloud"))
    cloud = await gateway.mqtt(entity=0x8001)
    mapping = Mapping(Mode.IN_VEHICLE, "cloud")
    topic = mapping.topic(UMessageType.UMESSAGE_TYPE_PUBLISH, ALARM, None)
    good = dict(mapping.encode(says(ALARM, "x")).user_properties)
    changes: list[dict[str, str]] = [
        {"uP": "2"},
        {"1": "no id"},
        {"2": "up-unknown.v1"},
        {"3": "up://"},
        {"5": "CS9"},
        {"8": "0x1"},
    ]
    packets = [(topic, good | change, b"malformed") for change in changes] + [(topic, {}, b"malformed")]
    spoof = mapping.encode(foreign(uris.parse("//vehicle1/9001/1/0")))
    await asyncio.to_thread(raw_mqtt, broker, [*packets, (spoof.topic, dict(spoof.user_properties), b"")])
    await cloud.send(says(ALARM, "good"))
    await heard.expect(1)
    counted = dropped(await gateway.metrics(), "cloud")
    assert heard.payloads == [b"good"]
    assert counted["spoofed"] == 1
    assert sum(counted.values()) == len(packets) + 1
    assert await gateway.problems() == []


async def test_a_malformed_call_is_answered_and_the_next_one_served(make_gateway: MakeGateway, broker: Broker) -> None:
    gateway = await make_gateway(broker)
    cloud = await gateway.mqtt()
    async with InMemoryRpcClient(cloud, LocalUriProvider("cloud", 0x9001, 1)) as client:
        for method in ("//vehicle1/4/1/2", "//vehicle1/0/3/1", "//vehicle1/0/4/1"):
            with pytest.raises(UStatusError) as caught:
                await client.invoke_method(
                    uris.parse(method), UPayload(b"\xff\xff\xff", UPayloadFormat.UPAYLOAD_FORMAT_PROTOBUF)
                )
            assert caught.value.code == UCode.INVALID_ARGUMENT
            assert caught.value.message
        subscribe = uris.parse("//vehicle1/0/3/1")
        with pytest.raises(UStatusError) as caught:
            await client.invoke_method(subscribe, UPayload.pack(SubscriptionRequest(topic=uris.pattern("vehicle1"))))
        assert caught.value.code == UCode.INVALID_ARGUMENT
        assert "wildcard" in caught.value.message
        answer = await client.invoke_method(subscribe, UPayload.pack(SubscriptionRequest(topic=SPEED)))
        assert answer.unpack(SubscriptionResponse).status.state == 2  # SUBSCRIBED
    assert await gateway.problems() == []


async def test_a_broker_that_refuses_the_login_leaves_the_others_alone_until_it_accepts(
    make_gateway: MakeGateway, make_broker: Any
) -> None:
    broker = make_broker(users={"gateway": "right", "app": "app"})
    gateway = await make_gateway(
        broker, "vehicle mcu cloud", SUBSCRIBED, cloud='username = "gateway", password_file = "PW"', domain=DOMAIN
    )
    folder = gateway.config.parent
    await gateway.child.stop()
    (folder / "password").write_text("wrong\n")
    gateway.config.write_text(gateway.config.read_text().replace('"PW"', f'"{folder}/password"'))
    await gateway.start()
    (problem,) = await gateway.problems()
    assert "endpoint cloud" in problem
    assert "PERMISSION_DENIED" in problem or "UNAUTHENTICATED" in problem
    assert "cloud" in gateway.child.tail
    vehicle = await gateway.zenoh()
    async with InMemoryRpcClient(vehicle, LocalUriProvider("vehicle1", 0x8001, 1)) as client:
        await client.invoke_method(uris.parse("//vehicle1/4/1/1"), UPayload())
    await vehicle.send(says(SPEED, "while the broker refuses"))
    heard = await gateway.hear(await gateway.mqtt(username="app", password="app"), SPEED)
    (folder / "password").write_text("right\n")
    await gateway.until_ready()
    await heard.expect(1)
    assert heard.payloads == [b"while the broker refuses"]


async def test_a_port_in_use_troubles_nobody_else(make_gateway: MakeGateway, broker: Broker) -> None:
    gateway = await make_gateway(broker, "vehicle cloud", SUBSCRIBED, start=False)
    with socket.create_server(("127.0.0.1", gateway.zenoh_port)):
        await gateway.start()
        (problem,) = await gateway.problems()
        assert problem.startswith("endpoint vehicle: ")
        assert "the port is in use" in problem
        cloud = await gateway.mqtt()
        async with InMemoryRpcClient(cloud, LocalUriProvider("cloud", 0x9001, 1)) as client:
            await client.invoke_method(uris.parse("//vehicle1/4/1/1"), UPayload())
    await gateway.until_ready()
    vehicle = await gateway.zenoh()
    heard = await gateway.hear(cloud, SPEED)
    await vehicle.send(says(SPEED, "at last"))
    await heard.expect(1)
